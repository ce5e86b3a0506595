//! The check explains what is wrong and changes nothing; the repair makes only changes that lose
//! nothing.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use crate::support::pool::*;
use aquifer_check::{CheckOptions, CheckReport, Finding, FindingKind, Severity, check, repair};
use aquifer_crashkit::unguarded::UnguardedMedia;
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::inode::{Inode, PoolHead};
use aquifer_pool::format::run::Run;
use aquifer_pool::media::{ByteRange, Media, MediaError, PersistenceDomain};
use aquifer_pool::{Pool, PoolError};
use aquifer_testkit::child;

const POOL_BYTES: usize = 512 << 10;
const PAGE: usize = PAGE_BYTES as usize;

fn report_of(image: &[u8]) -> CheckReport {
    let media = FileMedia::of(image);
    let report =
        check(media.clone(), &CheckOptions { fresh_pages: true, ..CheckOptions::default() })
            .unwrap();
    assert!(media.image() == image, "the check changed something");
    for finding in &report.findings {
        let text = finding.to_string();
        let is_sentence = |text: &String| {
            text.chars().next().is_some_and(|first| {
                first.is_uppercase() || first == '/' || first == '`' || first.is_ascii_digit()
            }) && !text.ends_with('.')
        };
        assert!(is_sentence(&finding.what), "{text}");
        assert!(is_sentence(&finding.meaning), "{text}");
        assert!(is_sentence(&finding.advice), "{text}");
    }
    report
}

/// The only finding of this kind.
fn only(report: &CheckReport, kind: FindingKind) -> &Finding {
    let found: Vec<&Finding> = report.findings.iter().filter(|f| f.kind == kind).collect();
    assert_eq!(found.len(), 1, "{kind:?} in {report:#?}");
    found[0]
}

fn has(report: &CheckReport, kind: FindingKind) -> bool {
    report.findings.iter().any(|finding| finding.kind == kind)
}

/// A pool that was closed.
fn closed_image() -> Vec<u8> {
    let media = FileMedia::of(&sample::crashed_image(POOL_BYTES));
    drop(alone().open_on(media.clone()).unwrap());
    media.image()
}

/// Changes an inode of an image and recomputes its checksum.
fn change_inode(image: &mut [u8], name: &str, change: impl FnOnce(&mut Inode)) -> u64 {
    let layout = forge::superblock(image).layout;
    let pool = reading().open_on(FileMedia::of(image)).unwrap();
    let mut inode = sample::find(&pool, name).unwrap();
    drop(pool);
    let number = inode.number;
    change(&mut inode);
    forge::slot(image, &layout, number).copy_from_slice(&inode.encode().unwrap());
    number
}

#[test]
fn nothing_is_wrong_with_a_pool_that_was_closed() {
    let report = report_of(&closed_image());
    assert_eq!(report.findings, []);
    assert_eq!(report.worst(), None);
    let pool = report.pool.as_ref().unwrap();
    assert_eq!((pool.inodes, pool.records), (5, 0));
    assert!(report.to_string().ends_with("nothing is wrong."), "{report}");
    let info = alone().open_on(FileMedia::of(&closed_image())).unwrap().info().unwrap();
    assert_eq!(pool.free_pages, info.free_pages);
}

#[test]
fn a_pool_that_crashed_is_sound_and_waits_to_be_replayed() {
    let image = sample::crashed_image(POOL_BYTES);
    let report = report_of(&image);
    assert!(report.is_sound(), "{report}");
    let finding = only(&report, FindingKind::Unreplayed);
    assert_eq!(finding.severity, Severity::Repairable);
    assert_eq!(report.findings.len(), 1);
    let pool = report.pool.unwrap();
    assert_eq!(pool.inodes, 5);
    assert!(pool.records > 4 && pool.end_lsn > pool.tail_lsn);
}

#[test]
fn each_damaged_superblock_is_named() {
    let image = closed_image();
    for copy in 0..2 {
        let mut damaged = image.clone();
        damaged[copy * PAGE + 60] ^= 1;
        let report = report_of(&damaged);
        let finding = only(&report, FindingKind::Superblock);
        assert_eq!(finding.severity, Severity::Repairable);
        let place = ByteRange { offset_bytes: (copy * PAGE) as u64, len_bytes: PAGE_BYTES };
        assert_eq!(finding.place, Some(place));
        assert_eq!(report.findings.len(), 1);
    }
    let mut damaged = image.clone();
    damaged[60] ^= 1;
    damaged[PAGE + 60] ^= 1;
    let report = report_of(&damaged);
    assert_eq!(report.worst(), Some(Severity::Damage));
    assert!(report.pool.is_none());
}

#[test]
fn what_is_no_pool_is_said_to_be_none() {
    for image in [&[][..], &[0; 3 * PAGE], b"#!/bin/sh\n"] {
        let report = report_of(image);
        assert_eq!(only(&report, FindingKind::NotAPool).severity, Severity::Damage);
        assert_eq!(report.findings.len(), 1);
    }
    let mut image = closed_image();
    for copy in 0..2 {
        image[copy * PAGE + 8] = 3;
        forge::seal_superblock(&mut image, copy);
    }
    only(&report_of(&image), FindingKind::FutureVersion);
    // The pool is intact: no copy should replace it.
    let mut image = closed_image();
    for copy in 0..2 {
        image[copy * PAGE + 120] |= 0x40;
        forge::seal_superblock(&mut image, copy);
    }
    let report = report_of(&image);
    let finding = only(&report, FindingKind::FutureVersion);
    assert!(finding.what.contains("features 0x40"), "{finding}");
    assert_eq!(report.findings.len(), 1, "{report}");
}

#[test]
fn superblocks_of_two_pools_or_of_two_moments_are_told_apart() {
    let image = closed_image();
    let mut mixed = image.clone();
    mixed[..PAGE].copy_from_slice(&closed_image()[..PAGE]);
    only(&report_of(&mixed), FindingKind::SuperblocksContradict);

    let media = FileMedia::of(&image);
    let pool = alone().open_on(media.clone()).unwrap();
    let mut torn = media.image();
    drop(pool);
    torn[PAGE..2 * PAGE].copy_from_slice(&image[PAGE..2 * PAGE]);
    let report = report_of(&torn);
    assert_eq!(only(&report, FindingKind::SuperblocksDiffer).severity, Severity::Repairable);
}

#[test]
fn the_length_of_the_file_is_compared() {
    let image = closed_image();
    let report = report_of(&image[..POOL_BYTES - 3 * PAGE]);
    assert_eq!(only(&report, FindingKind::Truncated).severity, Severity::Damage);
    assert!(report.pool.is_some(), "the rest is checked all the same");
    // Even if almost nothing is left.
    assert!(!report_of(&image[..2 * PAGE]).is_sound());

    let mut longer = image.clone();
    longer.extend([1; 2 * PAGE]);
    let report = report_of(&longer);
    let finding = only(&report, FindingKind::LongerFile);
    assert_eq!(finding.severity, Severity::Note);
    assert!(finding.advice.contains("grow"), "{finding}");
}

#[test]
fn metadata_inconsistencies_are_explained_one_by_one() {
    let image = closed_image();
    let layout = forge::superblock(&image).layout;
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut changed = image.clone();
        change(&mut changed);
        let report = report_of(&changed);
        assert_eq!(report.worst(), Some(Severity::Damage), "{report}");
        report
    };
    let head = with(&|image| forge::slot(image, &layout, 0)[9] ^= 1);
    only(&head, FindingKind::Head);
    let inode = with(&|image| forge::slot(image, &layout, 2)[70] ^= 1);
    assert_eq!(only(&inode, FindingKind::Inode).inode, Some(2));
    assert_eq!(inode.pool.unwrap().inodes, 4);
    let erased = with(&|image| forge::slot(image, &layout, 2).fill(0));
    assert!(only(&erased, FindingKind::Inode).what.contains("zero"));
    let unexpected = with(&|image| forge::slot(image, &layout, 9)[3] = 1);
    assert_eq!(only(&unexpected, FindingKind::Inode).inode, Some(9));
    let misplaced = with(&|image| {
        change_inode(image, "delta", |inode| inode.runs = vec![Run { start_page: 4, pages: 2 }]);
    });
    only(&misplaced, FindingKind::MisplacedRun);
    let shared = with(&|image| {
        let mut epsilon = Run::EMPTY;
        change_inode(image, "epsilon", |inode| epsilon = inode.runs[0]);
        change_inode(image, "delta", |inode| inode.runs = vec![Run { pages: 2, ..epsilon }]);
    });
    only(&shared, FindingKind::SharedPages);
    assert_eq!(shared.pool.unwrap().inodes, 3);
    let renamed = with(&|image| {
        change_inode(image, "delta", |inode| inode.name = b"alpha".to_vec());
    });
    assert!(only(&renamed, FindingKind::SameName).what.contains("\"alpha\""));
    for address in [0x1234_5678_9000, 0x2000_0000_0800, 0x4fff_ffff_f000, u64::MAX - 4095] {
        let moved = with(&|image| {
            change_inode(image, "delta", |inode| inode.address = address);
        });
        only(&moved, FindingKind::Address);
    }
    let neighbours = with(&|image| {
        change_inode(image, "delta", |inode| inode.address = sample::address(0));
    });
    only(&neighbours, FindingKind::SharedAddresses);
}

#[test]
fn a_fresh_page_with_something_in_it_is_found() {
    let mut image = closed_image();
    image[POOL_BYTES - 100] = 1;
    let media = FileMedia::of(&image);
    assert!(check(media.clone(), &CheckOptions::default()).unwrap().is_sound(), "not looked at");
    let report = report_of(&image);
    let place = only(&report, FindingKind::UsedFreshPage).place.unwrap();
    assert_eq!(place.offset_bytes, POOL_BYTES as u64 - 100);
}

#[test]
fn bytes_that_mean_nothing_are_noted() {
    let mut image = closed_image();
    let layout = forge::superblock(&image).layout;
    image[300] = 1;
    forge::seal_superblock(&mut image, 0);
    image[PAGE + 3000] = 1; // Outside of the checksum.
    let slot = forge::slot(&mut image, &layout, 0);
    slot[200] = 1;
    forge::seal_slot(slot);
    let slot = forge::slot(&mut image, &layout, 2);
    slot[220] = 1;
    forge::seal_slot(slot);
    let report = report_of(&image);
    assert_eq!(report.worst(), Some(Severity::Note));
    let kinds: Vec<_> = report.findings.iter().map(|finding| finding.kind).collect();
    assert_eq!(kinds, [FindingKind::ReservedBytes; 4]);
}

#[test]
fn a_loss_in_the_log_is_told_from_a_crash() {
    let image = sample::crashed_image(POOL_BYTES);
    let records = forge::records(&image);
    let last = *records.last().unwrap();
    let mut torn = image.clone();
    torn[last.offset + last.len - 1] ^= 1;
    let report = report_of(&torn);
    assert_eq!(only(&report, FindingKind::TornRecord).severity, Severity::Note);
    assert!(report.is_sound());

    let first = records[0];
    let mut lost = image.clone();
    lost[first.offset + first.len - 1] ^= 1;
    let report = report_of(&lost);
    let finding = only(&report, FindingKind::LogLoss);
    assert_eq!(finding.severity, Severity::Damage);
    assert!(finding.what.contains(&first.lsn.to_string()), "{finding}");
}

#[test]
fn records_that_say_what_cannot_be_are_found() {
    let image = sample::crashed_image(POOL_BYTES);
    let layout = forge::superblock(&image).layout;
    let record = *forge::records(&image).last().unwrap();
    let with = |change: &dyn Fn(&mut [u8])| {
        let mut forged = image.clone();
        let bytes = &mut forged[record.offset..record.offset + record.len];
        change(bytes);
        forge::seal_record(bytes);
        report_of(&forged)
    };
    // The first entry: kind, inode, target, length, payload.
    let outside = with(&|bytes| bytes[72..80].copy_from_slice(&PAGE_BYTES.to_le_bytes()));
    assert!(has(&outside, FindingKind::Record));
    let no_slot = with(&|bytes| bytes[68..72].copy_from_slice(&999u32.to_le_bytes()));
    assert!(has(&no_slot, FindingKind::Record));
    let foreign = with(&|bytes| {
        let target = (layout.page_count - 1) * PAGE_BYTES;
        bytes[72..80].copy_from_slice(&target.to_le_bytes());
    });
    assert!(has(&foreign, FindingKind::Record));
    // A copied page whose source was written over.
    let mut damaged = image.clone();
    let pool = reading().open_on(FileMedia::of(&image)).unwrap();
    let shadow = sample::find(&pool, "gamma").unwrap().shadow;
    damaged[shadow.bytes().offset_bytes as usize + 5000] ^= 1;
    let report = report_of(&damaged);
    assert_eq!(only(&report, FindingKind::CopiedContent).severity, Severity::Damage);
}

#[test]
fn what_cannot_be_read_is_a_finding_and_the_rest_is_checked() {
    let directory = scratch();
    let path = directory.path().join("pool");
    let image = sample::crashed_image(POOL_BYTES);
    std::fs::write(&path, &image).unwrap();
    let layout = forge::superblock(&image).layout;
    let log = layout.log();
    for offset_bytes in [
        0,
        PAGE_BYTES,
        layout.metadata().offset_bytes + PAGE_BYTES,
        log.offset_bytes,
        log.end_bytes() - PAGE_BYTES,
    ] {
        let hole = ByteRange { offset_bytes, len_bytes: PAGE_BYTES };
        let media = FileMedia::open_with_unreadable(&path, hole);
        let report = check(media.clone(), &CheckOptions::default()).unwrap();
        assert!(has(&report, FindingKind::Unreadable), "{offset_bytes}: {report}");
        assert!(report.pool.is_some());
    }
}

#[test]
fn a_pool_full_of_nonsense_gives_a_report_of_bounded_length() {
    let options = alone().inodes(20_000);
    let media = FileMedia::of(&vec![0; 32 << 20]);
    drop(options.create_on(media.clone()).unwrap());
    let layout = forge::superblock(&media.image()).layout;
    media
        .write_unguarded(
            layout.metadata().offset_bytes,
            &vec![0x5a; layout.metadata().len_bytes as usize],
        )
        .unwrap();
    let report = check(media.clone(), &CheckOptions::default()).unwrap();
    assert_eq!(report.findings.len(), 1000);
    assert_eq!(report.unlisted + 1000, layout.slots());
}

#[test]
fn a_pool_in_use_is_a_snapshot_and_is_not_repaired() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    for options in [alone(), shared()] {
        let pool = options.open_on(FileMedia::open(&path)).unwrap();
        sample::commit(&pool, &[("alpha", 0)], 12).unwrap();
        let report = check(&path, &CheckOptions::default()).unwrap();
        assert!(report.is_in_use && report.is_sound(), "{report}");
        assert_eq!(report.findings, []);
        assert!(report.to_string().contains("open for writing"), "{report}");
        let error = repair(&path, &CheckOptions::default()).unwrap_err();
        assert!(
            matches!(error, PoolError::Busy { .. } | PoolError::BusyElsewhere { .. }),
            "{error}"
        );
        drop(pool);
    }
    // Readers and checks do not exclude each other.
    let reader = reading().open_on(FileMedia::open(&path)).unwrap();
    let report = check(&path, &CheckOptions::default()).unwrap();
    assert!(!report.is_in_use);
    drop(reader);
}

/// Another process opens the pool during a check that began while it was closed: it does not have
/// to wait.
#[test]
fn a_pool_can_be_opened_while_it_is_checked() {
    for (role, is_closed_again) in [("visitor", true), ("sitter", false)] {
        let directory = scratch();
        let path = directory.path().join("pool");
        std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
        let log = forge::superblock(&std::fs::read(&path).unwrap()).layout.log();
        let visitor = Arc::new(Mutex::new(None));
        let on_read = {
            let (visitor, path) = (visitor.clone(), path.clone());
            Box::new(move |offset_bytes: u64, _: &mut [u8]| {
                let mut visitor = visitor.lock().unwrap();
                if offset_bytes >= log.offset_bytes && visitor.is_none() {
                    let mut child = start(role, &path);
                    if is_closed_again {
                        // It prints "ready" after it has closed the pool.
                        child.0.wait().unwrap();
                    }
                    *visitor = Some(child);
                }
                false
            })
        };
        let media = Shifting { media: FileMedia::open_read_only(&path), on_read };
        let report = check(Arc::new(media), &CheckOptions::default()).unwrap();
        assert!(report.is_in_use && report.is_sound(), "{role}: {report}");
        assert_eq!(report.findings, [], "{role}: of what there was before");
        assert!(visitor.lock().unwrap().take().is_some(), "{role}");
        // Removes the shared memory of the killed process.
        repair(&path, &CheckOptions::default()).unwrap();
    }
}

#[test]
fn a_superblock_is_not_repaired_while_the_pool_is_open() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    let pool = shared().open_on(FileMedia::open(&path)).unwrap();
    pool.media().write_unguarded(PAGE_BYTES, &[0xab; 512]).unwrap();
    let before = std::fs::read(&path).unwrap();
    only(&check(&path, &CheckOptions::default()).unwrap(), FindingKind::Superblock);
    let error = repair(&path, &CheckOptions::default()).unwrap_err();
    assert!(matches!(error, PoolError::Busy { .. } | PoolError::BusyElsewhere { .. }), "{error}");
    assert!(std::fs::read(&path).unwrap() == before);
}

#[test]
fn a_superblock_of_a_later_version_beside_one_of_this_is_left_alone() {
    let mut image = closed_image();
    image[8] = 2;
    forge::seal_superblock(&mut image, 0);
    let report = report_of(&image);
    assert_eq!(only(&report, FindingKind::FutureVersion).severity, Severity::Damage);
    image[PAGE + 60] ^= 1;
    let media = FileMedia::of(&image);
    let repaired = repair(media.clone(), &CheckOptions::default()).unwrap();
    assert!(repaired.done.is_empty() && media.image() == image);
    image[PAGE + 60] ^= 1;
    // Even if something else can be repaired.
    image[PAGE + 96] = 1;
    forge::seal_superblock(&mut image, 1);
    let media = FileMedia::of(&image);
    let repaired = repair(media.clone(), &CheckOptions::default()).unwrap();
    assert!(repaired.done.is_empty() && media.image() == image, "{:?}", repaired.done);
}

/// Called before each read, which it may perform; returns whether it has.
type ReadHook = dyn Fn(u64, &mut [u8]) -> bool + Send + Sync;

/// Media that change while they are read.
struct Shifting {
    media: Arc<FileMedia>,
    on_read: Box<ReadHook>,
}

impl Media for Shifting {
    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MediaError> {
        if (self.on_read)(offset_bytes, bytes) {
            Ok(())
        } else {
            self.media.read_at(offset_bytes, bytes)
        }
    }

    fn path(&self) -> &Path {
        self.media.path()
    }

    fn len_bytes(&self) -> u64 {
        self.media.len_bytes()
    }

    fn domain(&self) -> PersistenceDomain {
        self.media.domain()
    }

    fn is_writable(&self) -> bool {
        false
    }

    unsafe fn write_at(&self, _: u64, _: &[u8]) -> Result<(), MediaError> {
        panic!("a check writes nothing")
    }

    unsafe fn write_durable(&self, _: u64, _: &[u8]) -> Result<(), MediaError> {
        panic!("a check writes nothing")
    }

    fn write_back(&self, _: &[ByteRange]) -> Result<(), MediaError> {
        panic!("a check writes nothing")
    }

    fn flush(&self) -> Result<(), MediaError> {
        panic!("a check writes nothing")
    }

    fn grow(&self, _: u64) -> Result<(), MediaError> {
        panic!("a check writes nothing")
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.media.file()
    }

    fn maps_privately(&self) -> bool {
        true
    }
}

/// A checkpoint between two reads looks like damage, which the next attempt does not find.
#[test]
fn what_looks_like_damage_while_the_pool_changes_is_looked_at_again() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    let pool = shared().open_on(FileMedia::open(&path)).unwrap();
    let old = std::fs::read(&path).unwrap()[..2 * PAGE].to_vec();
    // More than fits into the log: the records of the old superblocks are overwritten.
    for id in 0..11 {
        sample::commit(&pool, &[("alpha", id % 2)], id).unwrap();
    }
    let look = |stale_reads| {
        let media = FileMedia::open_read_only(&path);
        let (old, stale_reads) = (old.clone(), AtomicUsize::new(stale_reads));
        let on_read = Box::new(move |offset_bytes: u64, bytes: &mut [u8]| {
            let less = |left: usize| left.checked_sub(1);
            let is_stale = offset_bytes < 2 * PAGE_BYTES
                && stale_reads.fetch_update(Relaxed, Relaxed, less).is_ok();
            if is_stale {
                bytes.copy_from_slice(&old[offset_bytes as usize..][..bytes.len()]);
            }
            is_stale
        });
        check(Arc::new(Shifting { media, on_read }), &CheckOptions::default()).unwrap()
    };
    // Both copies, read once for later comparison and once for the check.
    let report = look(4);
    assert!(report.is_in_use && report.is_sound(), "{report}");
    let always = look(usize::MAX);
    assert!(!always.is_sound(), "it does look like damage");
    drop(pool);
}

pub const ROLES: &[aquifer_testkit::child::Role] =
    &[("committer", committer), ("sitter", sitter), ("visitor", visitor)];

fn committer() {
    let path = std::env::var("POOL").expect("set by the parent");
    let pool = Pool::options().open_on(FileMedia::open(Path::new(&path))).unwrap();
    println!("ready");
    for id in 0.. {
        sample::commit(&pool, &[("alpha", id % 2), ("delta", 0)], id).unwrap();
        if id % 7 == 0 {
            pool.checkpoint().unwrap();
        }
        let name = format!("made {}", id % 2);
        if pool.inodes().unwrap().iter().any(|inode| inode.name == name.as_bytes()) {
            sample::destroy(&pool, &name).unwrap()
        } else {
            drop(sample::create(&pool, &name, 2, 0).unwrap())
        }
    }
}

fn sitter() {
    let path = std::env::var("POOL").expect("set by the parent");
    let pool = shared().open_on(FileMedia::open(Path::new(&path))).unwrap();
    sample::commit(&pool, &[("alpha", 0)], 66).unwrap();
    println!("ready");
    // Until the parent kills it.
    loop {
        std::thread::park();
    }
}

/// Opens the pool, changes something and closes it.
fn visitor() {
    let path = std::env::var("POOL").expect("set by the parent");
    let pool = shared().open_on(FileMedia::open(Path::new(&path))).unwrap();
    sample::create(&pool, "visited", 1, 0).unwrap();
    drop(pool);
    println!("ready");
}

fn start(role: &str, path: &Path) -> child::Reaped {
    use std::io::{BufRead, BufReader};
    let mut child = child::Reaped(child::command(role).env("POOL", path).spawn().unwrap());
    let output = child.0.stdout.take().unwrap();
    let mut lines = BufReader::new(output).lines();
    assert!(lines.any(|line| line.unwrap() == "ready"), "{role} did not get ready");
    child
}

#[test]
fn a_pool_that_changes_meanwhile_is_not_called_damaged() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    let child = start("committer", &path);
    let mut damaged = 0;
    for _ in 0..aquifer_testkit::campaign::steps(200) {
        let report = check(&path, &CheckOptions::default()).unwrap();
        assert!(report.is_in_use);
        damaged += u32::from(!report.is_sound());
    }
    drop(child);
    assert_eq!(damaged, 0, "reports of damage that was none");
    let report = check(&path, &CheckOptions::default()).unwrap();
    assert!(!report.is_in_use && report.is_sound(), "{report}");
    // Removes the shared memory of the killed process.
    repair(&path, &CheckOptions::default()).unwrap();
}

#[test]
fn what_a_killed_process_leaves_is_found_and_removed() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    drop(start("sitter", &path));
    let report = check(&path, &CheckOptions::default()).unwrap();
    assert_eq!(only(&report, FindingKind::NotClosed).severity, Severity::Repairable);
    let finding = only(&report, FindingKind::SharedMemory);
    let name = finding.what.split(' ').next().unwrap().to_owned();
    assert!(Path::new(&name).exists(), "{name}");
    let repaired = repair(&path, &CheckOptions::default()).unwrap();
    assert!(!Path::new(&name).exists(), "{name}");
    assert_eq!(repaired.refused, []);
    assert_eq!(repaired.after.findings, [], "{:?}", repaired.done);
    let pool = alone().open_on(FileMedia::open(&path)).unwrap();
    let alpha = sample::find(&pool, "alpha").unwrap();
    assert!(sample::read(&pool, &alpha).unwrap()[..PAGE] == sample::page("alpha", 66));
}

#[test]
fn a_repair_replays_the_log_and_writes_a_damaged_superblock_anew() {
    let image = sample::crashed_image(POOL_BYTES);
    for copy in [None, Some(0), Some(1)] {
        let mut damaged = image.clone();
        if let Some(copy) = copy {
            damaged[copy * PAGE..(copy + 1) * PAGE].fill(0x11);
        }
        let media = FileMedia::of(&damaged);
        let repaired = repair(media.clone(), &CheckOptions::default()).unwrap();
        assert_eq!(repaired.refused, []);
        assert_eq!(repaired.after.findings, []);
        assert_eq!(repaired.done.len(), 1 + usize::from(copy.is_some()), "{:?}", repaired.done);
        sample::assert_complete(&alone().open_on(media).unwrap());
    }
    // A pool that needs no repair is left unchanged.
    let image = closed_image();
    let media = FileMedia::of(&image);
    let repaired = repair(media.clone(), &CheckOptions::default()).unwrap();
    assert!(repaired.done.is_empty() && repaired.refused.is_empty());
    assert!(media.image() == image);
}

type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);

#[test]
fn a_repair_refuses_to_guess() {
    let image = sample::crashed_image(POOL_BYTES);
    let layout = forge::superblock(&image).layout;
    let first = forge::records(&image)[0];
    let number = change_inode(&mut image.clone(), "delta", |_| {});
    let cases: [(FindingKind, Damage<'_>); 4] = [
        (FindingKind::LogLoss, &|image| image[first.offset + 700] ^= 1),
        (FindingKind::Inode, &|image| forge::slot(image, &layout, number)[30] ^= 1),
        (FindingKind::Truncated, &|image| image.truncate(POOL_BYTES - PAGE)),
        (FindingKind::FutureVersion, &|image| {
            for copy in 0..2 {
                image[copy * PAGE + 8] = 7;
                forge::seal_superblock(image, copy);
            }
        }),
    ];
    for (kind, damage) in cases {
        let mut damaged = image.clone();
        damage(&mut damaged);
        let media = FileMedia::of(&damaged);
        let repaired = repair(media.clone(), &CheckOptions::default()).unwrap();
        assert!(repaired.done.is_empty(), "{:?}", repaired.done);
        assert!(repaired.refused.iter().any(|refused| refused.finding.kind == kind), "{kind:?}");
        assert!(media.image() == damaged, "{kind:?}: a refused repair changes nothing");
    }
    // A superblock is repaired even if something else cannot be.
    let mut damaged = image.clone();
    forge::slot(&mut damaged, &layout, number)[30] ^= 1;
    damaged[PAGE + 60] ^= 1;
    let media = FileMedia::of(&damaged);
    let repaired = repair(media.clone(), &CheckOptions::default()).unwrap();
    assert_eq!(repaired.done.len(), 1);
    assert!(!repaired.after.is_sound());
    let written = media.image();
    damaged[PAGE..2 * PAGE].copy_from_slice(&written[PAGE..2 * PAGE]);
    assert!(written == damaged, "and nothing else is written");
}

#[test]
fn files_that_cannot_be_opened_are_errors_and_not_findings() {
    let directory = scratch();
    for path in [directory.path().join("missing"), directory.path().to_path_buf()] {
        let error = check(&path, &CheckOptions::default()).unwrap_err();
        assert!(matches!(error, PoolError::NotOpened(_)), "{error}");
        let error = repair(&path, &CheckOptions::default()).unwrap_err();
        assert!(matches!(error, PoolError::NotOpened(_)), "{error}");
    }
    let path = directory.path().join("pool");
    std::fs::write(&path, closed_image()).unwrap();
    let media: Arc<dyn Media> = FileMedia::open_read_only(&path);
    let error = repair(media, &CheckOptions::default()).unwrap_err();
    assert!(matches!(error, PoolError::ReadOnly { .. }), "{error}");
}

#[test]
fn a_head_that_says_too_much_is_found() {
    let mut image = closed_image();
    let layout = forge::superblock(&image).layout;
    for (fresh_from_page, used_slots) in
        [(0, 6), (layout.page_count + 1, 6), (layout.page_count, 0), (layout.page_count, 999)]
    {
        let head = PoolHead { fresh_from_page, used_slots };
        forge::slot(&mut image, &layout, 0).copy_from_slice(&head.encode());
        only(&report_of(&image), FindingKind::Head);
    }
}
