//! The allocator against a plain model: no page has two owners, a freed page is not reused before
//! the tail has passed the record that freed it, zeroed pages are zero, and nothing is lost when
//! processes die.
//!
//! Sessions of random operations, each through one handle or two, end with the handles closed, with
//! leftover reservations as of a killed process, or with a crash.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::support::*;
use aquifer_crashkit::unguarded::{UnguardedMedia, UnguardedPool};
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::inode::{Inode, InodeKind};
use aquifer_pool::format::layout::Layout;
use aquifer_pool::format::run::Run;
use aquifer_pool::media::Media;
use aquifer_pool::{CommitContent, CommitPages, Mutant, Pool, PoolError, Reservation};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

const POOL_BYTES: usize = 768 << 10;
const MOST_OBJECTS: usize = 10;

/// An object: its pages, the stamp of each, and its shadow.
#[derive(Debug, Clone)]
struct Object {
    run: Run,
    shadow: Run,
    stamps: Vec<u64>,
}

/// The expected state of the pool.
#[derive(Debug, Clone)]
struct Model {
    layout: Layout,
    objects: BTreeMap<u64, Object>,
    /// Freed runs, each with the log position that the tail has to pass.
    waiting: Vec<(Run, u64)>,
    /// Reserved by handles that were closed without giving them back.
    dead: Vec<Run>,
}

/// A reservation that is held.
struct Held<'a> {
    reservation: Reservation<'a>,
    /// The index of its handle.
    handle: usize,
    /// The stamp of its pages.
    stamp: u64,
}

impl Model {
    fn data(&self) -> Run {
        let start_page = self.layout.data_start_page;
        Run { start_page, pages: self.layout.page_count - start_page }
    }

    fn named(&self) -> impl Iterator<Item = Run> + '_ {
        self.objects.values().flat_map(|object| [object.run, object.shadow])
    }

    fn free_pages(&self, held: &[Held<'_>]) -> u64 {
        let held = held.iter().map(|held| held.reservation.whole());
        let waiting = self.waiting.iter().map(|(run, _)| *run);
        let used: u64 = self.named().chain(held).chain(waiting).map(|run| run.pages).sum();
        self.data().pages - used
    }

    /// Fails if `run` is not free.
    fn assert_free(&self, run: Run, held: &[Held<'_>]) {
        assert!(
            run.start_page >= self.data().start_page && run.end_page() <= self.data().end_page()
        );
        assert!(!self.named().any(|named| named.overlaps(run)), "{run:?} is in use");
        assert!(
            !self.waiting.iter().any(|(freed, _)| freed.overlaps(run)),
            "{run:?} is freed too recently"
        );
        assert!(
            !held.iter().any(|held| held.reservation.whole().overlaps(run)),
            "{run:?} is reserved"
        );
    }

    /// Whether `pages` pages at a multiple of `align` are free.
    fn has_room(&self, held: &[Held<'_>], pages: u64, align: u64) -> bool {
        let data = self.data();
        let used: Vec<Run> = self
            .named()
            .chain(held.iter().map(|held| held.reservation.whole()))
            .chain(self.waiting.iter().map(|(run, _)| *run))
            .collect();
        (data.start_page..data.end_page()).step_by(1).any(|start_page| {
            let run = Run { start_page, pages };
            start_page % align == 0
                && run.end_page() <= data.end_page()
                && !used.iter().any(|used| used.overlaps(run))
        })
    }

    /// The tail has moved to `tail_lsn`.
    fn pass(&mut self, tail_lsn: u64) {
        self.waiting.retain(|(_, lsn)| *lsn > tail_lsn);
    }
}

fn page(stamp: u64) -> Vec<u8> {
    stamp.to_le_bytes().repeat(PAGE_BYTES as usize / 8)
}

/// Compares everything that is visible.
fn assert_same(pool: &Pool, model: &Model, held: &[Held<'_>]) {
    let inodes = pool.inodes().unwrap();
    assert_eq!(inodes.len(), model.objects.len());
    for inode in &inodes {
        let object = &model.objects[&inode.number];
        assert_eq!((&inode.runs[..], inode.shadow), (&[object.run][..], object.shadow));
    }
    let free = pool.info().unwrap().free_pages;
    let (expected, dead) =
        (model.free_pages(held), model.dead.iter().map(|run| run.pages).sum::<u64>());
    // What dead processes had reserved is given back when it is needed, and at checkpoints.
    assert!((expected - dead..=expected).contains(&free), "{free} free pages, not {expected}");
}

fn assert_content(pool: &Pool, model: &Model) {
    for (number, object) in &model.objects {
        let bytes = sample::read(pool, &pool.inode(*number).unwrap()).unwrap();
        for (index, (found, stamp)) in
            bytes.chunks_exact(PAGE_BYTES as usize).zip(&object.stamps).enumerate()
        {
            assert!(found == page(*stamp), "page {index} of inode {number} is not {stamp}");
        }
    }
}

/// Runs random operations through `handles`; returns the reservations that are left.
fn session<'a>(
    rng: &mut Rng,
    handles: &'a [Pool],
    model: &mut Model,
    next_stamp: &mut u64,
    operations: u64,
) -> Vec<Held<'a>> {
    let mut held: Vec<Held<'a>> = Vec::new();
    for _ in 0..operations {
        let handle = rng.below(handles.len() as u64) as usize;
        let pool = &handles[handle];
        *next_stamp += 1;
        let stamp = *next_stamp;
        let numbers: Vec<u64> = model.objects.keys().copied().collect();
        let some_object =
            (!numbers.is_empty()).then(|| numbers[rng.below(numbers.len() as u64) as usize]);
        match (rng.below(12), some_object) {
            (0..=2, _) if held.len() < 3 => {
                let (pages, align) = (1 + rng.below(12), 1 << rng.below(4));
                let zeroed = rng.chance(0.5);
                let outcome = if zeroed {
                    pool.reserve_zeroed(pages, align)
                } else {
                    pool.reserve(pages, align)
                };
                // If it did not fit, a checkpoint was made.
                model.pass(pool.tail_lsn());
                match outcome {
                    Ok(reservation) => {
                        let whole = reservation.whole();
                        model.assert_free(whole, &held);
                        assert_eq!((whole.pages, whole.start_page % align), (pages, 0));
                        model.dead.retain(|dead| !dead.overlaps(whole));
                        let stamp = if zeroed { 0 } else { stamp };
                        if !zeroed {
                            // It may be written to before anything names it.
                            let bytes = page(stamp).repeat(pages as usize);
                            pool.media()
                                .write_unguarded(whole.bytes().offset_bytes, &bytes)
                                .unwrap();
                        }
                        held.push(Held { reservation, handle, stamp });
                    }
                    Err(PoolError::Full { .. }) => {
                        model.dead.clear();
                        assert!(!model.has_room(&held, pages, align), "{pages} pages would fit");
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            (3, _) if !held.is_empty() => drop(held.swap_remove(0)),
            (4 | 5, _) if !held.is_empty() && model.objects.len() < MOST_OBJECTS => {
                let Held { reservation, stamp, .. } = held.swap_remove(0);
                let run = reservation.whole();
                let number = pool
                    .transact_unguarded(vec![reservation], |transaction| {
                        let inode = Inode {
                            kind: InodeKind::Object,
                            size_bytes: run.pages * PAGE_BYTES,
                            runs: vec![run],
                            name: stamp.to_string().into_bytes(),
                            ..transaction.free_inode()?
                        };
                        transaction.put(inode.clone());
                        Ok(inode.number)
                    })
                    .unwrap();
                let stamps = vec![stamp; run.pages as usize];
                let before =
                    model.objects.insert(number, Object { run, shadow: Run::EMPTY, stamps });
                assert!(before.is_none(), "inode {number} was in use");
            }
            (6, Some(number)) => {
                pool.transact_unguarded(vec![], |transaction| {
                    let inode = transaction.inode(number)?;
                    transaction.put(Inode::free(number, inode.generation));
                    Ok(())
                })
                .unwrap();
                let object = model.objects.remove(&number).unwrap();
                let lsn = pool.durable_lsn();
                model.waiting.extend(
                    [object.run, object.shadow]
                        .into_iter()
                        .filter(|run| !run.is_empty())
                        .map(|run| (run, lsn)),
                );
            }
            (7, Some(number)) => {
                // Shrinks in place.
                let object = model.objects.get_mut(&number).unwrap();
                let pages = 1 + rng.below(object.run.pages);
                let run = Run { pages, ..object.run };
                put(pool, number, |inode| {
                    inode.runs = vec![run];
                    inode.size_bytes = 1;
                });
                let gone = Run { start_page: run.end_page(), pages: object.run.pages - pages };
                (object.run, object.stamps) = (run, object.stamps[..pages as usize].to_vec());
                if !gone.is_empty() {
                    model.waiting.push((gone, pool.durable_lsn()));
                }
            }
            (8, Some(number)) => {
                // Grows in place, if there is room.
                let object = model.objects.get_mut(&number).unwrap();
                let more = Run { start_page: object.run.end_page(), pages: 1 + rng.below(4) };
                let reserved = pool.reserve_zeroed_at(more.start_page, more.pages).unwrap();
                let Some(reservation) = reserved else { continue };
                let run = Run { pages: object.run.pages + more.pages, ..object.run };
                pool.transact_unguarded(vec![reservation], |transaction| {
                    let inode = transaction.inode(number)?;
                    transaction.put(Inode { runs: vec![run], ..inode });
                    Ok(())
                })
                .unwrap();
                object.run = run;
                object.stamps.extend(vec![0; more.pages as usize]);
                let mut others = model.clone();
                others.objects.remove(&number);
                others.assert_free(more, &held);
                model.dead.retain(|dead| !dead.overlaps(more));
            }
            (9, Some(number)) => {
                // Makes a reservation its shadow, or gives its shadow up.
                let object = model.objects.get_mut(&number).unwrap();
                let before = object.shadow;
                let reserved: Vec<_> =
                    held.pop().map(|held| held.reservation).into_iter().collect();
                object.shadow = reserved.first().map_or(Run::EMPTY, Reservation::whole);
                let shadow = object.shadow;
                pool.transact_unguarded(reserved, |transaction| {
                    let inode = transaction.inode(number)?;
                    transaction.put(Inode { shadow, ..inode });
                    Ok(())
                })
                .unwrap();
                if !before.is_empty() {
                    model.waiting.push((before, pool.durable_lsn()));
                }
            }
            (10, Some(number)) => {
                let object = model.objects.get_mut(&number).unwrap();
                let index = rng.below(object.run.pages);
                let target = Run { start_page: object.run.start_page + index, pages: 1 }.bytes();
                let pages = CommitPages { inode: number, target };
                let fill = |bytes: &mut [u8]| bytes.copy_from_slice(&page(stamp));
                pool.capture_unguarded(
                    &CommitContent { pages: &[pages], ..Default::default() },
                    fill,
                )
                .unwrap()
                .finish()
                .unwrap();
                object.stamps[index as usize] = stamp;
            }
            (11, _) if rng.chance(0.3) => {
                pool.checkpoint().unwrap();
                model.dead.clear();
            }
            _ => continue,
        }
        model.pass(pool.tail_lsn());
        assert_same(pool, model, &held);
    }
    held
}

/// Changes an inode.
fn put(pool: &Pool, number: u64, change: impl Fn(&mut Inode)) {
    pool.transact_unguarded(vec![], |transaction| {
        let mut inode = transaction.inode(number)?;
        change(&mut inode);
        transaction.put(inode);
        Ok(())
    })
    .unwrap();
}

/// How a session ends.
#[derive(Debug)]
enum End {
    /// Reservations are given back, handles are closed.
    Closed,
    /// The first handle dies as if killed, the second one continues.
    OneDies,
    /// The media are in the state after a crash.
    Crash,
}

fn run(seed: u64, sessions: u64, mutant: Option<Mutant>) {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, vec![0; POOL_BYTES]).unwrap();
    let open = |path: &Path, is_shared: bool| {
        let options = if is_shared { shared() } else { alone() };
        let options = options.mutant(mutant);
        options.open_on(FileMedia::open(path)).unwrap()
    };
    let media: Arc<dyn Media> = FileMedia::open(&path);
    let layout = small(alone()).create_on(media).unwrap().layout();
    let mut model =
        Model { layout, objects: BTreeMap::new(), waiting: Vec::new(), dead: Vec::new() };
    let mut rng = Rng::new(seed);
    let mut stamp = 0;
    for _ in 0..sessions {
        let is_shared = rng.chance(0.5);
        let mut handles = vec![open(&path, is_shared)];
        if is_shared {
            handles.push(open(&path, true));
        }
        // After recovery nothing waits, and nothing is reserved.
        (model.waiting, model.dead) = (Vec::new(), Vec::new());
        assert_same(&handles[0], &model, &[]);
        assert_content(&handles[0], &model);
        let operations = 5 + rng.below(60);
        let held = session(&mut rng, &handles, &mut model, &mut stamp, operations);
        assert_content(&handles[handles.len() - 1], &model);
        let end = match rng.below(3) {
            0 => End::Crash,
            1 if is_shared => End::OneDies,
            _ => End::Closed,
        };
        match end {
            End::Closed => drop(held),
            End::Crash => {
                let image = std::fs::read(&path).unwrap();
                drop(held);
                handles.clear();
                std::fs::write(&path, image).unwrap();
            }
            End::OneDies => {
                for Held { reservation, handle, .. } in held {
                    if handle == 0 {
                        model.dead.push(reservation.whole());
                        std::mem::forget(reservation);
                    }
                }
                let second = handles.pop().unwrap();
                handles.clear();
                let again = open(&path, true);
                let handles = [second, again];
                session(&mut rng, &handles, &mut model, &mut stamp, 30).clear();
                handles[1].checkpoint().unwrap();
                model.pass(handles[0].tail_lsn());
                model.dead.clear();
                assert_same(&handles[0], &model, &[]);
            }
        }
    }
    let pool = open(&path, false);
    model.waiting.clear();
    model.dead.clear();
    assert_same(&pool, &model, &[]);
    assert_content(&pool, &model);
}

#[test]
fn the_allocator_is_like_its_model() {
    let seed = seed(1);
    for round in 0..steps(12) as u64 {
        println!("round {round}");
        run(seed ^ round << 32, 12, None);
    }
}

/// The model notices deliberate mistakes.
#[test]
fn deliberate_mistakes_are_noticed() {
    for mutant in [Mutant::NoRevoke, Mutant::EarlyReuse] {
        let noticed =
            (0..10).any(|seed| std::panic::catch_unwind(|| run(seed, 5, Some(mutant))).is_err());
        assert!(noticed, "{mutant:?}");
    }
}

#[test]
fn reserving_what_cannot_be_is_an_error() {
    let media = FileMedia::of(&vec![0; 4 << 20]);
    let pool = small(alone()).create_on(media).unwrap();
    let info = pool.info().unwrap();
    for (pages, align) in [(0, 1), (u64::MAX, 1), (1 << 40, 1), (1, u64::MAX), (1, 1 << 63)] {
        for outcome in [pool.reserve(pages, align), pool.reserve_zeroed(pages, align)] {
            let error = outcome.map(drop).unwrap_err();
            assert!(
                matches!(error, PoolError::Full { .. } | PoolError::Parameter { .. }),
                "{pages} by {align}: {error}"
            );
        }
    }
    for (start_page, pages) in [(0, 1), (info.layout.page_count, 1), (u64::MAX, u64::MAX), (30, 0)]
    {
        let outcome = pool.reserve_zeroed_at(start_page, pages);
        assert!(!matches!(outcome, Ok(Some(_))), "{pages} from {start_page}");
    }
    // More than one handle can reserve at once.
    let mut held = Vec::new();
    let refused = loop {
        match pool.reserve(1, 1) {
            Ok(pages) => held.push(pages),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, PoolError::TooManyReservations { limit } if limit == held.len()));
    held.pop();
    held.push(pool.reserve(1, 0).unwrap());
    drop(held);
    assert_eq!(pool.info().unwrap().free_pages, info.free_pages);
}

#[test]
fn a_transaction_of_too_many_inodes_is_an_error_and_not_an_endless_loop() {
    let media = FileMedia::of(&vec![0; 8 << 20]);
    let options = small(alone()).inodes(600).log_bytes(2 << 20);
    let pool = options.create_on(media).unwrap();
    let many = |count: u64| {
        pool.transact_unguarded(vec![], |transaction| {
            (1..=count).for_each(|number| transaction.put(Inode::free(number, 1)));
            Ok(())
        })
    };
    many(200).unwrap();
    let error = many(600).unwrap_err();
    assert!(matches!(error, PoolError::TooManyRuns { .. }), "{error}");
    for number in [0, 601, 1 << 40] {
        let error = pool.transact_unguarded(vec![], |transaction| {
            transaction.put(Inode::free(number, 1));
            Ok(())
        });
        if number != 601 || pool.layout().slots() <= 601 {
            assert!(matches!(error, Err(PoolError::Parameter { .. })), "{number}: {error:?}");
        }
    }
}

/// What is written to reserved pages that are never named is not visible to their next owner.
#[test]
fn pages_given_up_are_zero_for_the_next_one() {
    for crashes in [false, true] {
        let media = FileMedia::of(&vec![0; POOL_BYTES]);
        let pool = small(alone()).create_on(media.clone()).unwrap();
        // All free pages, so that the next owner has to take some of them.
        let pages = pool.info().unwrap().largest_free_pages;
        let reservation = pool.reserve(pages, 1).unwrap();
        let whole = reservation.whole();
        let bytes = page(77).repeat(pages as usize);
        pool.media().write_unguarded(whole.bytes().offset_bytes, &bytes).unwrap();
        let image = media.image();
        drop(reservation);
        let pool = if crashes { alone().open_on(FileMedia::of(&image)).unwrap() } else { pool };
        let inode = sample::create(&pool, "alpha", 40, 0).unwrap();
        assert!(inode.runs[0].overlaps(whole));
        assert!(sample::read(&pool, &inode).unwrap().iter().all(|&byte| byte == 0));
    }
}
