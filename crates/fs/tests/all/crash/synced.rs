//! Syncs of one file: what they make durable, and how many flushes of the device they take.

use std::sync::Arc;

use aquifer_crashkit::{CrashMedia, Fault, Plan, Trigger, explore};
use aquifer_fs::{File, FileTimes, Files, Synced};
use aquifer_pool::Mutant;
use aquifer_pool::media::{MediaOperation, PersistenceDomain};
use aquifer_testkit::campaign::seed;

use super::history::{BOOT, fresh_media, open};

const DISK: PersistenceDomain = PersistenceDomain::PageCache;

/// Media whose durable writes also flush, as those of files through the page cache, or do not, as with
/// direct I/O.
fn media(domain: PersistenceDomain, writes_flush: bool) -> Arc<CrashMedia> {
    let fresh = fresh_media(domain, |files| files.write("/f", [1; 10_000]).unwrap());
    Arc::new(CrashMedia::clone(&fresh).with_writes_that_flush(writes_flush))
}

fn flushes(media: &CrashMedia) -> usize {
    media.recording().operations_of(MediaOperation::Flush).count()
}

/// Changes that a sync makes durable, and what it may cost where durable writes flush.
type Step = (&'static str, fn(&File), Synced, usize);

const STEPS: &[Step] = &[
    ("nothing", |_| {}, Synced::All, 1),
    ("overwrite", |file| file.write_all_at(&[2; 5000], 100).unwrap(), Synced::All, 1),
    ("append", |file| file.write_all_at(&[3; 100], 10_000).unwrap(), Synced::Data, 2),
    ("overwrite", |file| file.write_all_at(&[4; 500], 4000).unwrap(), Synced::Data, 1),
    // The time of the last change is not needed to read the file.
    ("times", |file| file.set_times(FileTimes::new()).unwrap(), Synced::Data, 1),
    ("new page", |file| file.write_all_at(&[5; 100], 50_000).unwrap(), Synced::All, 2),
    ("cut", |file| file.set_len(20_000).unwrap(), Synced::Data, 1),
    ("overwrite", |file| file.write_all_at(&[6; 10], 9_999).unwrap(), Synced::Data, 1),
];

fn content(files: &Files) -> Vec<u8> {
    files.read("/f").unwrap()
}

fn survive(writes_flush: bool, mutant: Option<Mutant>) -> Result<(), String> {
    let media = media(DISK, writes_flush);
    let files = open(&media, BOOT, mutant).unwrap();
    let file = files.options().read(true).write(true).open("/f").unwrap();
    let mut contents = vec![content(&files)];
    for (id, (_, step, what, _)) in (1..).zip(STEPS) {
        media.begin(id);
        step(&file);
        contents.push(content(&files));
        file.sync_range(.., *what).unwrap();
        media.acknowledge(id);
    }
    let recording = media.recording();
    std::mem::forget((files, file));
    let plan = Plan { depth: 0, budget: 3000, seed: seed(1) };
    let explored = explore(&recording, plan, |state| {
        let found = content(&open(&Arc::new(state.media()?), BOOT + 1, mutant)?);
        let last = state.marks().last_acknowledged().unwrap_or(0) as usize;
        let newest = (last + 1).min(contents.len() - 1);
        // The change under way may be there in part, each byte old or new.
        let among = [&contents[last], &contents[newest]];
        let has_length = among.iter().any(|content| content.len() == found.len());
        let is_foreign = |(at, byte): (usize, &u8)| {
            among.iter().all(|content| content.get(at).is_some_and(|had| had != byte))
        };
        if !has_length || found.iter().enumerate().any(is_foreign) {
            return Err(format!("acknowledged {last}: {} bytes", found.len()).into());
        }
        Ok(None)
    });
    explored.map(drop).map_err(|failure| failure.to_string())
}

#[test]
fn what_was_synced_is_there() {
    for writes_flush in [false, true] {
        survive(writes_flush, None).unwrap();
        survive(writes_flush, Some(Mutant::CommitBeforeData)).unwrap_err();
    }
}

#[test]
fn a_sync_takes_one_flush_or_two() {
    let media = media(DISK, true);
    let files = open(&media, BOOT, None).unwrap();
    let file = files.options().read(true).write(true).open("/f").unwrap();
    file.sync_all().unwrap();
    for (name, step, what, most) in STEPS {
        step(&file);
        let before = flushes(&media);
        file.sync_range(.., *what).unwrap();
        assert_eq!(flushes(&media) - before, *most, "{name}, {what:?}");
    }
    // Only the pages of the range are handed over.
    file.write_all_at(&[7; 9000], 0).unwrap();
    file.sync_range(5000..5001, Synced::Data).unwrap();
    let recording = media.recording();
    let last = recording.operations_of(MediaOperation::WriteBack).last().unwrap();
    let written: u64 =
        recording.operations()[last].ranges().iter().map(|range| range.len_bytes).sum();
    assert_eq!(written, 1);
}

/// One of a sync's flushes fails. If it is that of the write that makes the log durable, its repetition
/// makes the log durable, and says nothing of the bytes that the first one should have flushed.
#[test]
fn a_sync_whose_flush_has_failed_is_an_error() {
    const DAX: PersistenceDomain = PersistenceDomain::Dax;
    for (domain, writes_flush) in [(DISK, true), (DISK, false), (DAX, false)] {
        for (name, step, what, _) in STEPS.iter().filter(|(name, ..)| *name != "nothing") {
            for nth in 1.. {
                let media = media(domain, writes_flush);
                let files = open(&media, BOOT, None).unwrap();
                let file = files.options().read(true).write(true).open("/f").unwrap();
                file.sync_all().unwrap();
                step(&file);
                let before = flushes(&media);
                media.fail(Fault::io_error(Trigger::on(MediaOperation::Flush).nth(nth)));
                let synced = file.sync_range(.., *what);
                let said = format!("{domain:?}, {writes_flush}: flush {nth} after {name}");
                if flushes(&media) < before + nth as usize {
                    synced.unwrap_or_else(|error| panic!("{said}: {error}"));
                    assert!(nth > 1, "{said}: there is one");
                    break;
                }
                assert!(synced.is_err(), "{said}");
                assert!(file.sync_all().is_err(), "{said}");
            }
        }
    }
}
