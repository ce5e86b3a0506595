//! Models of concurrent operations on a heap, explored by loom. Run them with
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p aquifer-vm --release --lib loom
//! ```
//!
//! The pools, runs, budgets and the bell are the real ones. The kernel is modelled by a word for
//! each slot that records what is mapped there. The model fails if a slot is taken that is in use,
//! whose mapping was not removed, or is being removed.

use std::sync::Arc;

use loom::thread;

use super::pool::{NoSlot, Pool, PoolStats};
use super::runs::{Runs, RunsStats};
use super::timer::Bell;
use super::unmapping::{Left, Span, Unmapper};
use super::{GRANULE_BYTES, VmaBudget};
use crate::sync::{AtomicUsize, Ordering};

/// Nothing is mapped.
const EMPTY: usize = 0;
/// A mapping without page-table entries.
const DRAINED: usize = 1;
/// A system call is in progress there.
const BUSY: usize = 2;
/// In use, or retired: the number of the thread plus this value.
const USED: usize = 3;

/// Explores every schedule with at most `preemptions` preemptions.
fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Runs `first` in a new thread and `second` in this one.
fn together(first: impl FnOnce() + 'static, second: impl FnOnce()) {
    let first = thread::spawn(first);
    second();
    first.join().unwrap();
}

/// The mappings, by slot or granule.
#[derive(Clone)]
struct PageTable {
    granule_bytes: usize,
    words: Arc<Vec<AtomicUsize>>,
}

impl PageTable {
    fn new(granule_bytes: usize, count: usize) -> PageTable {
        let words = (0..count).map(|_| AtomicUsize::new(EMPTY)).collect();
        PageTable { granule_bytes, words: Arc::new(words) }
    }

    fn word(&self, address: usize) -> &AtomicUsize {
        &self.words[address / self.granule_bytes]
    }

    /// Maps a file over a taken slot, and uses it.
    fn map_and_use(&self, address: usize, thread: usize) {
        let before = self.word(address).swap(USED + thread, Ordering::AcqRel);
        assert!(before == EMPTY || before == DRAINED, "given out with {before} still there");
        let now = self.word(address).load(Ordering::Acquire);
        assert_eq!(now, USED + thread, "unmapped while it was in use");
    }

    /// Models a call that removes mappings and leaves `after`.
    fn take_away(&self, span: Span, after: usize) {
        let end = span.address + span.len_bytes;
        let words = || (span.address..end).step_by(self.granule_bytes).map(|at| self.word(at));
        for word in words() {
            assert_ne!(word.swap(BUSY, Ordering::AcqRel), BUSY, "two calls for one mapping");
        }
        for word in words() {
            assert_eq!(word.swap(after, Ordering::AcqRel), BUSY, "used during the call");
        }
    }
}

impl Unmapper for PageTable {
    type Place = ();

    unsafe fn drain(&self, spans: &[Span], left: &mut Vec<Left>) {
        spans.iter().for_each(|&span| self.take_away(span, DRAINED));
        left.extend(spans.iter().map(|_| Left::Drained));
    }

    unsafe fn vacate(&self, span: Span) -> Left {
        self.take_away(span, EMPTY);
        Left::Reserved
    }

    fn close_hole(&self, _span: Span) -> bool {
        false
    }

    fn abandon(&self, _place: &()) {
        panic!("nothing was lost");
    }

    fn is_current(&self) -> bool {
        true
    }
}

const SLOTS: usize = 2;

struct Slotted {
    pool: Pool<PageTable>,
    table: PageTable,
    vmas: Arc<VmaBudget>,
}

impl Slotted {
    /// One ring, whose slots are drained as soon as `threshold` are retired.
    fn new(threshold: usize, vmas: usize) -> Arc<Slotted> {
        let table = PageTable::new(1, SLOTS);
        let vmas = Arc::new(VmaBudget::new(vmas));
        let pool = Pool::new(1, SLOTS, threshold, vmas.clone(), table.clone());
        pool.add_ring((), 0);
        Arc::new(Slotted { pool, table, vmas })
    }

    /// Takes a slot if there is one, uses it and retires it, as the heap does. Returns its address.
    fn use_one(&self, thread: usize) -> Option<usize> {
        let (slot, address, ()) = self.pool.take(|()| ()).ok()?;
        self.table.map_and_use(address, thread);
        if self.pool.retire(slot) {
            self.pool.drain_unless_draining();
        }
        Some(address)
    }

    /// As `use_one`, but unmaps the slot at once.
    fn use_and_release_one(&self, thread: usize) {
        if let Ok((slot, address, ())) = self.pool.take(|()| ()) {
            self.table.map_and_use(address, thread);
            self.pool.release(slot);
        }
    }

    /// Checks that everything is unmapped, all VMAs are returned, and every slot can be taken once.
    fn check(&self) {
        self.pool.release_idle();
        assert_eq!(self.pool.stats(), PoolStats::default());
        assert_eq!(self.vmas.used(), 0, "VMAs are not counted right");
        let taken: Vec<_> = (0..SLOTS).map(|_| self.pool.take(|()| ()).expect("lost")).collect();
        let mut addresses: Vec<_> = taken.iter().map(|&(_, address, ())| address).collect();
        addresses.sort_unstable();
        assert_eq!(addresses, [0, 1]);
        assert_eq!(self.pool.take(|()| ()).unwrap_err(), NoSlot::Taken);
        taken.into_iter().for_each(|(slot, ..)| self.pool.release(slot));
    }
}

/// Two threads take and retire slots while one of them drains.
#[test]
fn loom_slots_are_taken_and_drained() {
    explore(3, || {
        let shared = Slotted::new(1, 10);
        let first = shared.clone();
        together(
            move || {
                first.use_one(0);
                first.use_one(0);
            },
            || {
                shared.use_one(1);
                shared.use_one(1);
            },
        );
        shared.check();
    });
}

/// The timer sweeps, and a thread drains, while slots are taken and retired.
#[test]
fn loom_slots_are_taken_and_released() {
    explore(3, || {
        let shared = Slotted::new(2, 10);
        let first = shared.clone();
        together(
            move || {
                first.use_one(0);
                first.use_and_release_one(0);
                first.use_one(0);
            },
            || {
                shared.pool.release_idle();
                shared.pool.drain();
            },
        );
        shared.check();
    });
}

/// When `release_idle` returns, nothing is mapped that the caller retired before, even if another
/// thread sweeps too.
#[test]
fn loom_nothing_retired_is_left_mapped() {
    explore(3, || {
        let shared = Slotted::new(1, 10);
        let first = shared.clone();
        let unmap_mine = |shared: &Slotted, thread: usize| {
            let Some(address) = shared.use_one(thread) else { return };
            shared.pool.release_idle();
            let now = shared.table.word(address).load(Ordering::Acquire);
            assert_ne!(now, USED + thread, "still mapped");
        };
        together(move || unmap_mine(&first, 0), || unmap_mine(&shared, 1));
        shared.check();
    });
}

/// With room for the VMAs of one slot only, the budget is kept, and all VMAs are returned.
#[test]
fn loom_vmas_are_counted() {
    explore(3, || {
        let shared = Slotted::new(1, 2);
        let first = shared.clone();
        let use_some = |shared: &Slotted, thread: usize| {
            shared.use_one(thread);
            assert!(shared.vmas.used() <= 2);
            shared.use_and_release_one(thread);
            assert!(shared.vmas.used() <= 2);
        };
        together(move || use_some(&first, 0), || use_some(&shared, 1));
        shared.check();
    });
}

/// Two pools that share a budget do not exceed it.
#[test]
fn loom_the_budget_is_kept() {
    explore(3, || {
        let vmas = Arc::new(VmaBudget::new(3));
        let in_use = Arc::new(AtomicUsize::new(0));
        let take_some = |vmas: &VmaBudget, in_use: &AtomicUsize| {
            if vmas.try_take(2) {
                assert_eq!(in_use.swap(1, Ordering::AcqRel), 0, "four of three");
                in_use.store(0, Ordering::Release);
                vmas.give_back(2);
            }
        };
        let first = (vmas.clone(), in_use.clone());
        together(move || take_some(&first.0, &first.1), || take_some(&vmas, &in_use));
        assert_eq!(vmas.used(), 0);
    });
}

/// After a sweep, the bell is armed if anything retired was missed; and the timer does not sleep
/// while it is armed.
#[test]
fn loom_the_bell_is_armed_for_what_is_left() {
    explore(3, || {
        let shared = Arc::new((Slotted::new(3, 10), Bell::new()));
        let retire_and_arm = |shared: &(Arc<Slotted>, Bell), thread: usize| {
            shared.0.use_one(thread).expect("a slot for each");
            shared.1.arm();
        };
        let (first, timer) = (shared.clone(), shared.clone());
        let timer = thread::spawn(move || {
            assert!(timer.1.wait_armed());
            timer.1.disarm();
            timer.0.pool.release_idle();
        });
        together(move || retire_and_arm(&first, 0), || retire_and_arm(&shared, 1));
        timer.join().unwrap();
        let left = shared.0.pool.stats();
        assert!(left == PoolStats::default() || shared.1.is_armed(), "forgotten: {left:?}");
        shared.0.check();
    });
}

/// Stopping the bell wakes a sleeping timer.
#[test]
fn loom_the_bell_stops() {
    explore(3, || {
        let bell = Arc::new(Bell::new());
        let timer = bell.clone();
        together(
            move || {
                while timer.wait_armed() {
                    timer.disarm();
                }
            },
            || {
                bell.arm();
                bell.stop();
            },
        );
    });
}

/// Addresses of a region are reused only when all of it is unmapped.
#[test]
fn loom_runs_are_taken_and_unmapped() {
    explore(3, || {
        let table = PageTable::new(GRANULE_BYTES, 2);
        let vmas = Arc::new(VmaBudget::new(10));
        let runs = Arc::new(Runs::new(1, vmas.clone(), table.clone()));
        runs.add_region((), 0, 2 * GRANULE_BYTES);
        let use_one = |runs: &Runs<PageTable>, table: &PageTable, thread: usize| {
            if let Ok((run, address, ())) = runs.take(GRANULE_BYTES, 1, |()| ()) {
                table.map_and_use(address, thread);
                if runs.retire(run) {
                    runs.sweep_unless_sweeping();
                }
            }
        };
        let (first, firsts) = (runs.clone(), table.clone());
        together(
            move || {
                use_one(&first, &firsts, 0);
                use_one(&first, &firsts, 0);
            },
            || {
                use_one(&runs, &table, 1);
                use_one(&runs, &table, 1);
            },
        );
        runs.sweep();
        assert_eq!(runs.stats(), RunsStats::default());
        assert_eq!(vmas.used(), 0);
        let (run, address, ()) = runs.take(2 * GRANULE_BYTES, 1, |()| ()).expect("lost");
        assert_eq!(address, 0);
        runs.release(run);
    });
}
