//! The budget of private copies holds while much more is stored, and no store is lost to it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_mapper::{FileView, Mapper, Stores, ViewOptions};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;
use aquifer_vm::dirty::PrivateCopies;

/// A view whose stores are private until they are flushed.
const PRIVATE: ViewOptions = ViewOptions::write().stores(Stores::Private);

const PAGE: usize = 4096;
const MIB: u64 = 1 << 20;
const BUDGET: u64 = 16 * MIB;
/// What stores through a pointer may exceed it by, 16 MiB, and what may be stored between two looks
/// of its thread on a machine that is ten times busier.
const OVERHEAD: u64 = 112 * MIB;
/// A time limit that is only reached if the event never happens.
const NEVER: Duration = Duration::from_secs(60);

fn scene(len_bytes: u64) -> (tempfile::TempDir, PathBuf, Mapper) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    File::create(&path).unwrap().set_len(len_bytes).unwrap();
    (directory, path, Mapper::builder().private_budget_bytes(BUDGET).build().unwrap())
}

fn private_bytes(view: &FileView) -> u64 {
    let start = view.as_ptr().addr();
    PrivateCopies::new().unwrap().count(start..start + view.len_bytes() as usize).unwrap()
        * PAGE as u64
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < NEVER, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn word(at: usize) -> u64 {
    (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn check_file(path: &Path, len_bytes: usize) {
    let there = fs::read(path).unwrap();
    assert_eq!(there.len(), len_bytes);
    for at in (0..len_bytes).step_by(PAGE) {
        let found = u64::from_ne_bytes(there[at..at + 8].try_into().unwrap());
        assert_eq!(found, word(at), "page {}", at / PAGE);
    }
}

#[test]
fn copies_stay_within_the_budget_while_many_times_as_much_is_stored() {
    let len_bytes = 24 * BUDGET;
    for through_pointer in [true, false] {
        let (_directory, path, mapper) = scene(len_bytes);
        let view = mapper.map(&path, PRIVATE, ..).unwrap();
        let base = if through_pointer { view.as_mut_ptr().unwrap() } else { std::ptr::null_mut() };
        let mut most = 0;
        for at in (0..len_bytes as usize).step_by(PAGE) {
            if through_pointer {
                // SAFETY: a word inside the view.
                unsafe { base.add(at).cast::<u64>().write_volatile(word(at)) };
            } else {
                view.set(at as u64, word(at)).unwrap();
            }
            if (at as u64).is_multiple_of(MIB) {
                most = most.max(private_bytes(&view));
            }
        }
        most = most.max(private_bytes(&view));
        assert!(most <= BUDGET + OVERHEAD, "{} MiB", most / MIB);
        let dropped = mapper.stats().private_bytes_dropped;
        assert!(dropped >= len_bytes - BUDGET - OVERHEAD, "{} MiB", dropped / MIB);
        for at in (0..len_bytes as usize).step_by(PAGE) {
            assert_eq!(view.get::<u64>(at as u64).unwrap(), word(at), "page {}", at / PAGE);
        }
        view.flush().unwrap();
        drop(view);
        check_file(&path, len_bytes as usize);
    }
}

#[test]
fn nothing_is_written_after_the_view_is_gone() {
    let len_bytes = 3 * BUDGET;
    for _ in 0..steps(10) {
        let (_directory, path, mapper) = scene(len_bytes);
        let file = File::open(&path).unwrap();
        let written = || {
            let is_written = |&at: &u64| {
                let mut found = [0; 8];
                file.read_exact_at(&mut found, at).unwrap();
                found != [0; 8]
            };
            (0..len_bytes).step_by(16 * PAGE).filter(is_written).count()
        };
        let view = mapper.map(&path, PRIVATE, ..).unwrap();
        let base = view.as_mut_ptr().unwrap();
        for at in (0..len_bytes as usize).step_by(PAGE) {
            // SAFETY: a word inside the view.
            unsafe { base.add(at).cast::<u64>().write_volatile(word(at)) };
        }
        drop(view);
        let then = written();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(written(), then);
    }
}

/// Each thread counts up in words of its own, on pages that it shares with the others, and sees no
/// word of its own go back, whatever is written out meanwhile.
#[test]
fn no_store_is_lost_or_seen_to_go_back_while_copies_are_dropped() {
    const THREADS: usize = 3;
    const PAGES: usize = 16 << 10;
    let (_directory, path, mapper) = scene((PAGES * PAGE) as u64);
    let view = mapper.map(&path, PRIVATE, ..).unwrap();
    let base = view.as_mut_ptr().unwrap().addr();
    let seed = seed(1);
    let is_done = AtomicBool::new(false);
    let (rounds, mapper) = (steps(300_000), &mapper);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|thread| {
                scope.spawn(move || {
                    let mut rng = Rng::new(seed + thread as u64);
                    let mut counts = vec![0u64; PAGES];
                    // Some pages are stored to all the time, the others now and then.
                    let started = Instant::now();
                    for round in 0.. {
                        if round >= rounds && round % 1000 == 0 {
                            if mapper.stats().private_bytes_dropped > BUDGET {
                                break;
                            }
                            assert!(started.elapsed() < NEVER, "no copies are dropped");
                        }
                        let among = if rng.below(2) == 0 { 64 } else { PAGES as u64 };
                        let page = rng.below(among) as usize;
                        let place = base + page * PAGE + 8 * thread;
                        // SAFETY: an aligned word inside the view, which only this thread stores to.
                        let place = unsafe { AtomicU64::from_ptr(place as *mut u64) };
                        assert_eq!(place.load(Ordering::Relaxed), counts[page], "seed {seed}");
                        counts[page] += 1;
                        place.store(counts[page], Ordering::Relaxed);
                        assert_eq!(place.load(Ordering::Relaxed), counts[page], "seed {seed}");
                    }
                    counts
                })
            })
            .collect();
        let (view, is_done) = (&view, &is_done);
        let flusher = scope.spawn(move || {
            let mut flushes = 0;
            while !is_done.load(Ordering::Relaxed) {
                view.flush().unwrap();
                flushes += 1;
                std::thread::sleep(Duration::from_millis(50));
            }
            flushes
        });
        let counts: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        is_done.store(true, Ordering::Relaxed);
        assert!(flusher.join().unwrap() > 0);
        view.flush().unwrap();
        let there = fs::read(&path).unwrap();
        for (thread, counts) in counts.into_iter().enumerate() {
            for (page, count) in counts.unwrap().into_iter().enumerate() {
                let at = page * PAGE + 8 * thread;
                let found = u64::from_ne_bytes(there[at..at + 8].try_into().unwrap());
                assert_eq!(found, count, "page {page}, seed {seed}");
            }
        }
    });
}

#[test]
fn a_smaller_budget_is_reached_without_another_store() {
    let (_directory, path, mapper) = scene(64 * MIB);
    assert!(mapper.set_private_budget(256 * MIB));
    let view = mapper.map(&path, PRIVATE, ..).unwrap();
    let base = view.as_mut_ptr().unwrap();
    for at in (0..64 << 20).step_by(PAGE) {
        // SAFETY: a word inside the view.
        unsafe { base.add(at).cast::<u64>().write_volatile(word(at)) };
    }
    assert_eq!((private_bytes(&view), mapper.stats().private_bytes_dropped), (64 * MIB, 0));
    mapper.set_private_budget(BUDGET);
    wait_until("copies are dropped", || private_bytes(&view) <= BUDGET);
    view.flush().unwrap();
    check_file(&path, 64 << 20);
    assert!(!Mapper::builder().build().unwrap().set_private_budget(BUDGET), "built without one");
}

/// What a flush keeps of each copy counts too.
#[test]
fn a_flush_keeps_no_more_than_fits() {
    let (_directory, path, mapper) = scene(64 * MIB);
    mapper.set_private_budget(100 * MIB);
    let view = mapper.map(&path, PRIVATE, ..).unwrap();
    let base = view.as_mut_ptr().unwrap();
    let store = |from: usize, to: usize| {
        for at in (from..to).step_by(PAGE) {
            // SAFETY: a word inside the view.
            unsafe { base.add(at).cast::<u64>().write_volatile(word(at)) };
        }
    };
    store(0, 16 << 20);
    view.flush().unwrap();
    assert_eq!(private_bytes(&view), 16 * MIB, "twice as much fits");
    store(16 << 20, 64 << 20);
    view.flush().unwrap();
    assert_eq!(private_bytes(&view), 0, "twice as much does not fit");
    check_file(&path, 64 << 20);
}
