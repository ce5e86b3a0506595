//! Trackers compared with a plain set: random stores, loads, takes, failed commits, drops and
//! reclaim; and with concurrent stores.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_testkit::rng::Rng;

use super::test_support::{PAGES_PER_PIECE, Source, Subject, Way, combinations, reclaim, word};
use super::*;

fn seed(usual: u64) -> u64 {
    let seed = std::env::var("AQUIFER_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or(usual);
    println!("replay with AQUIFER_SEED={seed}");
    seed
}

fn steps(usual: usize) -> usize {
    let percent = std::env::var("AQUIFER_STEPS").ok().and_then(|steps| steps.parse().ok());
    (usual * percent.unwrap_or(100usize)).div_ceil(100)
}

/// The pages of a random run: mostly short, sometimes more than a piece.
fn random_run(rng: &mut Rng, pages: u64) -> std::ops::Range<u64> {
    let longest = if rng.chance(0.05) { pages } else { 8 };
    let first = rng.below(pages);
    first..(first + 1 + rng.below(longest)).min(pages)
}

#[test]
fn trackers_are_plain_sets() {
    let seed = seed(1);
    for (source, way) in combinations() {
        let mut rng = Rng::new(seed);
        let mut subject = Subject::new(source, way, 3 * PAGES_PER_PIECE + 77);
        let pages = subject.pages();
        let mut stored = BTreeSet::new();
        for step in 0..steps(600) {
            let at = || format!("{source:?} {way:?} step {step}, AQUIFER_SEED={seed}");
            match rng.below(100) {
                0..40 => {
                    for page in random_run(&mut rng, pages) {
                        subject.store(page);
                        stored.insert(page);
                    }
                }
                40..55 => random_run(&mut rng, pages).for_each(|page| _ = subject.load(page)),
                55..75 => {
                    let expected: Vec<u64> = std::mem::take(&mut stored).into_iter().collect();
                    assert_eq!(subject.commit(), expected, "{}", at());
                }
                75..83 => {
                    // Simulates a commit that fails.
                    let runs = subject.take().unwrap();
                    let taken = runs.iter().flat_map(|run| run.pages()).map(|page| page.0);
                    assert!(taken.eq(stored.iter().copied()), "{}", at());
                    subject.tracker.give_back(&runs);
                }
                83..93 => {
                    let before: Vec<u64> = (0..pages).map(|page| subject.load(page)).collect();
                    let private = subject.tracker.private_pages().unwrap();
                    let wanted = rng.below(pages);
                    let share = rng.unit_f64();
                    let mut consented = BTreeSet::new();
                    let dropped = subject.drop_clean(wanted, &mut |page| {
                        let consents = rng.chance(share);
                        if consents {
                            consented.insert(page);
                        }
                        consents
                    });
                    let clean = consented.difference(&stored).count() as u64;
                    let expected = if source == Source::Anonymous { 0 } else { clean };
                    assert_eq!(dropped, expected, "{}", at());
                    assert!(dropped <= wanted, "{}", at());
                    if source != Source::Anonymous {
                        let left = subject.tracker.private_pages().unwrap();
                        assert_eq!(left, private - dropped, "{}", at());
                    }
                    let after: Vec<u64> = (0..pages).map(|page| subject.load(page)).collect();
                    assert_eq!(before, after, "{}", at());
                }
                93..97 => {
                    let run = random_run(&mut rng, pages);
                    reclaim(&subject, PageRun::new(run));
                }
                _ => {
                    let counted = subject.tracker.private_pages().unwrap();
                    let expected = subject.private_in_smaps();
                    match source {
                        // Not every kernel distinguishes zero pages, which loads of anonymous
                        // memory share.
                        Source::Anonymous => {
                            assert!(counted >= expected, "{counted} of {expected}: {}", at());
                        }
                        // smaps also counts swapped-out pages of the file itself.
                        Source::Memory => {
                            assert!(counted <= expected, "{counted} of {expected}: {}", at());
                        }
                        Source::Storage => assert_eq!(counted, expected, "{}", at()),
                    }
                }
            }
        }
    }
}

/// One thread stores and one loads during takes. The pages copied after takes must in the end equal
/// the mapping.
#[test]
fn no_store_is_lost_to_a_take_that_races_with_it() {
    let seed = seed(2);
    for (source, way) in combinations() {
        let mut subject = Subject::new(source, way, 2 * PAGES_PER_PIECE);
        let (base, pages) = (subject.range.address() as usize, subject.pages());
        let stop = AtomicBool::new(false);
        let page_of = |page| word(base as *mut u8, pages, page);
        let takes = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut rng = Rng::new(seed);
                let stores = steps(200_000) as u64;
                for sequence in 1..=stores {
                    // Mostly a few pages, sometimes all of them.
                    let among = if rng.chance(0.9) { 16 } else { pages };
                    page_of(rng.below(among)).store(sequence << 32, Ordering::Relaxed);
                }
                stop.store(true, Ordering::Release);
            });
            scope.spawn(|| {
                let mut rng = Rng::new(seed + 1);
                while !stop.load(Ordering::Relaxed) {
                    page_of(rng.below(pages)).load(Ordering::Relaxed);
                }
            });
            let mut takes = 0;
            loop {
                // The take after the last store sees all of them.
                let last = stop.load(Ordering::Acquire);
                subject.stores = match way {
                    Way::ScanFaulted if last => Stores::Excluded,
                    _ => Stores::InProgress,
                };
                let runs = subject.take().unwrap();
                for page in runs.iter().flat_map(|run| run.pages()) {
                    subject.committed[page.0 as usize] = subject.load(page.0);
                }
                takes += 1;
                if last {
                    break takes;
                }
            }
        });
        let there: Vec<u64> = (0..pages).map(|page| subject.load(page)).collect();
        let at = format!("{source:?} {way:?} after {takes} takes, AQUIFER_SEED={seed}");
        assert!(subject.committed == there, "{at}");
        println!("{at}");
        assert_eq!(subject.take().unwrap(), []);
    }
}
