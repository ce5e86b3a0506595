//! Operations that are atomic also for content: a crash leaves a file exactly as it was before or
//! after each of them, in no other state.

use aquifer_crashkit::{Plan, explore};
use aquifer_fs::{FallocateMode, File, Files, FsError};
use aquifer_pool::media::PersistenceDomain;
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

use super::history::{BOOT, Durable, History, check, fresh_media, open};

const PAGE: u64 = 4096;

fn operate(file: &File, rng: &mut Rng, byte: u8) -> (String, Result<(), FsError>) {
    let bytes = [byte; 6000];
    let page = rng.below(4) * PAGE;
    match rng.below(7) {
        0..3 => {
            let ranges: Vec<(u64, &[u8])> = (0..2 + rng.below(3))
                .map(|_| (rng.below(30_000), &bytes[..1 + rng.below(6000) as usize]))
                .collect();
            let text = ranges.iter().map(|(at, bytes)| (at, bytes.len())).collect::<Vec<_>>();
            (format!("ranges {text:?}"), file.write_atomic_ranges(&ranges))
        }
        3 => (format!("collapse {page}"), file.allocate(FallocateMode::CollapseRange, page, PAGE)),
        4 => (format!("insert {page}"), file.allocate(FallocateMode::InsertRange, page, PAGE)),
        5 => {
            let len = rng.below(file.metadata().unwrap().len() + 1);
            (format!("cut to {len}"), file.set_len(len))
        }
        _ => {
            let offset = rng.below(30_000);
            (format!("write atomically {offset}"), file.write_atomic(&bytes, offset))
        }
    }
}

type Outcome = (String, Result<Option<Durable>, FsError>);

/// Runs as many operations, each with a byte value of its own, and checks the crash states. Returns
/// how many.
fn run(
    (domain, seed): (PersistenceDomain, u64),
    operations: u8,
    mut operate: impl FnMut(&Files, &File, u8) -> Outcome,
) -> u64 {
    let media = fresh_media(domain, |files| {
        files.create_file("/f").unwrap().write_all_at(&[1; 10_000], 0).unwrap();
    });
    let files = open(&media, BOOT, None).unwrap();
    let file = files.options().read(true).write(true).open("/f").unwrap();
    let mut history = History::begin(&media, &files).of_whole_contents();
    for _ in 0..operations {
        let id = history.last() + 1;
        media.begin(id);
        let done = operate(&files, &file, 10 + id as u8);
        history.note(&media, domain, (&files, std::slice::from_ref(&file)), done);
    }
    let recording = media.recording();
    let plan = Plan { depth: 0, budget: 300, seed };
    match explore(&recording, plan, |state| check(state, &history, domain, None)) {
        Ok(explored) => explored.states(),
        Err(failure) => panic!("seed {seed}: {failure}"),
    }
}

fn survives(domain: PersistenceDomain) {
    let first = seed(0);
    let mut states = 0;
    for seed in first..first + steps(8) as u64 {
        let mut rng = Rng::new(seed);
        states += run((domain, seed), 12, |files, file, byte| {
            if rng.chance(0.2) {
                files.sync().unwrap();
                ("sync".to_owned(), Ok(Some(Durable::All)))
            } else {
                let (text, outcome) = operate(file, &mut rng, byte);
                (text, outcome.map(|()| None))
            }
        });
    }
    println!("{states} crash states on {domain}");
}

/// Bytes that a truncation has left behind the end of the file become zeros in it.
fn survives_zeros_behind_a_cut(domain: PersistenceDomain) {
    let ranges: [&[(u64, &[u8])]; 3] =
        [&[(20_000, b"x")], &[(5, b"x"), (20_000, b"x")], &[(8192, b"x")]];
    for ranges in ranges {
        run((domain, seed(0)), 4, |files, file, byte| match byte {
            // Taking fresh pages for the first time would make the truncation durable.
            11 => ("write".to_owned(), file.write_atomic(&[byte; 9000], 0).map(|()| None)),
            12 => ("sync".to_owned(), files.sync().map(|()| Some(Durable::All))),
            13 => ("cut".to_owned(), file.set_len(5000).map(|()| None)),
            _ => (format!("ranges {ranges:?}"), file.write_atomic_ranges(ranges).map(|()| None)),
        });
    }
}

#[test]
fn content_is_old_or_new_on_a_disk() {
    survives(PersistenceDomain::PageCache);
}

#[test]
fn content_is_old_or_new_in_persistent_memory() {
    survives(PersistenceDomain::Dax);
}

#[test]
fn content_is_old_or_new_after_a_kill() {
    survives(PersistenceDomain::Volatile);
}

#[test]
fn zeros_behind_a_cut_are_of_one_moment() {
    survives_zeros_behind_a_cut(PersistenceDomain::PageCache);
    survives_zeros_behind_a_cut(PersistenceDomain::Dax);
}
