//! Models of the lock-free parts, explored by loom. Run them with
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p aquifer-cache --release --lib loom
//! ```
//!
//! The words, gates and versions are the real ones. Their surroundings are modelled as
//! small as the property allows. A page table is a mutex: the kernel serialises its changes, and a
//! store is checked and done in one step. A page's bytes are a cell whose accesses loom checks for
//! races. A device is a number. A lost wake-up ends a model as a deadlock.

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::frames::frame_word::{self, FREE, UNGRANTED};
use crate::ids::FrameId;
use crate::page_word::{PageWord, PinKind, PinRefused, State};
use crate::store::dirty;
use crate::store::gate::Gate;
use crate::sync::{AtomicU64, AtomicUsize, Ordering, fence};
use crate::version::Version;

const FRAME: FrameId = FrameId(5);

/// Explores every schedule with at most `preemptions` preemptions: all the bugs that these models
/// were tried with need at most two.
fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Runs `first` and `second` in threads and `third` in this one.
fn together(first: impl FnOnce() + 'static, second: impl FnOnce() + 'static, third: impl FnOnce()) {
    let threads = [thread::spawn(first), thread::spawn(second)];
    third();
    for thread in threads {
        thread.join().unwrap();
    }
}

// ---- the life of a page ------------------------------------------------------------------------

/// Bytes that loom checks for races.
///
/// Loom switches threads only at atomics that two threads use in conflicting ways, so each access
/// has one in its middle: otherwise an access that is one step too early or too late would go
/// unnoticed.
struct Checked {
    bytes: UnsafeCell<u64>,
    middle: AtomicU64,
}

// SAFETY: loom checks every access to the cell.
unsafe impl Sync for Checked {}
// SAFETY: as above.
unsafe impl Send for Checked {}

impl Checked {
    fn new() -> Checked {
        Checked { bytes: UnsafeCell::new(0), middle: AtomicU64::new(0) }
    }

    fn set(&self, value: u64) {
        self.bytes.with_mut(|bytes| {
            self.middle.store(value, Ordering::Relaxed);
            // SAFETY: loom reports a concurrent access.
            unsafe { *bytes = value };
        });
    }

    fn get(&self) -> u64 {
        self.bytes.with(|bytes| {
            self.middle.load(Ordering::Relaxed);
            // SAFETY: loom reports a concurrent change.
            unsafe { *bytes }
        })
    }
}

/// A page whose bytes are checked for races: the loader and the evictor change them, pin holders
/// read them.
struct Bytes {
    word: PageWord,
    bytes: Checked,
}

const LOADED: u64 = 7;

impl Bytes {
    fn absent() -> Arc<Bytes> {
        Arc::new(Bytes { word: PageWord::new(), bytes: Checked::new() })
    }

    fn resident(dirty: bool) -> Arc<Bytes> {
        let page = Bytes::absent();
        page.word.begin_load(page.word.load()).unwrap();
        page.change(LOADED);
        page.word.finish_load(FRAME, dirty, None);
        page
    }

    fn change(&self, value: u64) {
        self.bytes.set(value);
    }

    fn look(&self) -> u64 {
        self.bytes.get()
    }

    /// As `Store::ensure` with a pin for reading.
    fn pin(&self) {
        loop {
            let seen = self.word.load();
            match seen.state() {
                State::Absent => {
                    if self.word.begin_load(seen).is_ok() {
                        self.change(LOADED);
                        self.word.finish_load(FRAME, false, Some(PinKind::Read));
                        return;
                    }
                }
                State::Clean | State::Dirty | State::Cleaning => {
                    if self.word.pin().is_ok() {
                        return;
                    }
                }
                _ => self.word.wait(seen),
            }
        }
    }

    fn pin_and_look(&self) {
        self.pin();
        assert_eq!(self.look(), LOADED);
        self.word.unpin();
    }

    fn evict(&self) {
        if self.word.begin_evict().is_ok() {
            self.change(0);
            self.word.finish_evict();
        }
    }
}

/// No two threads load at once, no thread reads a page that is being evicted, and waiting threads
/// are woken.
#[test]
fn loom_faulters_and_evictor() {
    explore(3, || {
        let page = Bytes::absent();
        let (first, second) = (page.clone(), page.clone());
        together(move || first.pin_and_look(), move || second.pin_and_look(), || page.evict());
    });
}

/// A pinned page is not evicted, and an evicted one is not pinned.
#[test]
fn loom_pins_and_evictor() {
    explore(3, || {
        let page = Bytes::resident(false);
        let (first, second) = (page.clone(), page.clone());
        together(move || first.pin_and_look(), move || second.evict(), || page.pin_and_look());
    });
}

/// A failed load wakes the waiting threads, one of which retries.
#[test]
fn loom_failed_load() {
    explore(3, || {
        let page = Bytes::absent();
        let (first, second) = (page.clone(), page.clone());
        together(
            move || {
                let seen = first.word.load();
                if seen.state() == State::Absent && first.word.begin_load(seen).is_ok() {
                    first.change(0);
                    first.word.abort_load();
                }
            },
            move || second.pin_and_look(),
            || page.pin_and_look(),
        );
    });
}

/// A cancelled eviction wakes the waiting threads and loses nothing.
#[test]
fn loom_cancelled_eviction() {
    explore(3, || {
        let page = Bytes::resident(false);
        let (first, second) = (page.clone(), page.clone());
        together(
            move || {
                if first.word.begin_evict().is_ok() {
                    first.word.cancel_evict();
                }
            },
            move || second.pin_and_look(),
            || page.pin_and_look(),
        );
    });
}

/// A writing guard is exclusive: it waits for pins, and threads that pin wait for it.
#[test]
fn loom_exclusive_and_pins() {
    explore(3, || {
        let page = Bytes::resident(false);
        let (first, second) = (page.clone(), page.clone());
        together(
            move || first.pin_and_look(),
            move || second.pin_and_look(),
            || {
                loop {
                    let seen = page.word.load();
                    match seen.state() {
                        State::Clean | State::Dirty if seen.pins() == 0 => {
                            if page.word.begin_exclusive(seen).is_ok() {
                                break;
                            }
                        }
                        _ => page.word.wait(seen),
                    }
                }
                page.change(0);
                page.change(LOADED);
                page.word.finish_exclusive();
            },
        );
        assert_eq!(page.word.load().state(), State::Dirty);
    });
}

/// The holder of a write pin changes the bytes without a fault: no thread cleans the page at that
/// time.
#[test]
fn loom_write_pin_and_cleaner() {
    explore(3, || {
        let page = Bytes::resident(true);
        let (first, second) = (page.clone(), page.clone());
        together(
            move || loop {
                match first.word.pin_for_writing() {
                    Ok(_) => {
                        first.change(LOADED + 1);
                        first.word.unpin();
                        return;
                    }
                    Err(PinRefused::NotNow(seen)) if seen.is_transient() => first.word.wait(seen),
                    Err(_) => return,
                }
            },
            move || {
                if second.word.pin().is_ok() {
                    second.word.unpin();
                }
            },
            || {
                if page.word.begin_clean().is_ok() {
                    page.look();
                    page.word.finish_clean(true);
                }
            },
        );
    });
}

// ---- stores and write-back ---------------------------------------------------------------------

/// The kernel's view of a page: changes are serialised, and a store is checked and done in one
/// step.
#[derive(Clone, Copy)]
struct Entry {
    present: bool,
    protected: bool,
    bytes: [u64; 2],
}

/// A page of a writable mapping, with the state that stores and flushes use.
struct Mapped {
    word: PageWord,
    gate: Gate,
    mark: AtomicU64,
    summary: AtomicU64,
    entry: Mutex<Entry>,
    device: Mutex<[u64; 2]>,
}

impl Mapped {
    fn clean() -> Arc<Mapped> {
        let page = Mapped {
            word: PageWord::new(),
            gate: Gate::new(),
            mark: AtomicU64::new(0),
            summary: AtomicU64::new(0),
            entry: Mutex::new(Entry { present: true, protected: true, bytes: [0; 2] }),
            device: Mutex::new([0; 2]),
        };
        page.word.begin_load(page.word.load()).unwrap();
        page.word.finish_load(FRAME, false, None);
        Arc::new(page)
    }

    fn dirty(value: u64) -> Arc<Mapped> {
        let page = Mapped::clean();
        page.store(0, value);
        page
    }

    /// A store through a bare pointer: retried until it does not fault.
    fn store(&self, at: usize, value: u64) {
        loop {
            {
                let mut entry = self.entry.lock().unwrap();
                if entry.present && !entry.protected {
                    entry.bytes[at] = value;
                    return;
                }
            }
            self.ensure_writable();
        }
    }

    /// A store that faults at most as often as the other threads can cause.
    fn store_once(&self, at: usize, value: u64) {
        for _ in 0..3 {
            {
                let mut entry = self.entry.lock().unwrap();
                if entry.present && !entry.protected {
                    entry.bytes[at] = value;
                    return;
                }
            }
            self.ensure_writable();
        }
        panic!("the store faults for ever");
    }

    /// As `Store::ensure` for a store.
    fn ensure_writable(&self) {
        loop {
            let seen = self.word.load();
            match seen.state() {
                State::Absent => {
                    if self.word.begin_load(seen).is_ok() {
                        let bytes = *self.device.lock().unwrap();
                        let _gate = self.gate.shared();
                        self.set_mark();
                        *self.entry.lock().unwrap() =
                            Entry { present: true, protected: false, bytes };
                        self.word.finish_load(FRAME, true, None);
                        return;
                    }
                }
                State::Clean => {
                    if self.word.begin_unprotect(seen).is_ok() {
                        let _gate = self.gate.shared();
                        self.set_mark();
                        self.entry.lock().unwrap().protected = false;
                        self.word.finish_unprotect(false);
                        return;
                    }
                }
                State::Dirty => return,
                _ => self.word.wait(seen),
            }
        }
    }

    fn set_mark(&self) {
        dirty::mark(&self.mark, 1, &self.summary, 1);
    }

    fn is_marked(&self) -> bool {
        self.summary.load(Ordering::Acquire) != 0 && self.mark.load(Ordering::Acquire) != 0
    }

    /// As `seal`, `WriteBatch` and `settle`; a flush (`waits`) waits for other cleaners.
    fn clean_up(&self, written: bool, waits: bool) {
        while self.is_marked() {
            let gate = self.gate.exclusive();
            match self.word.begin_clean() {
                Ok(_) => {
                    self.entry.lock().unwrap().protected = true;
                    drop(gate);
                    if written {
                        let bytes = self.entry.lock().unwrap().bytes;
                        *self.device.lock().unwrap() = bytes;
                        self.mark.fetch_and(0, Ordering::AcqRel);
                        self.word.finish_clean(true);
                    } else {
                        let _gate = self.gate.shared();
                        self.entry.lock().unwrap().protected = false;
                        self.word.finish_clean(false);
                    }
                    return;
                }
                Err(seen) => {
                    drop(gate);
                    if !waits || !seen.is_transient() {
                        return;
                    }
                    self.word.wait(seen);
                }
            }
        }
    }

    /// As `seal` and `WriteBatch` in a flush of a page that is pinned for writing.
    fn write_snapshot(&self) {
        if self.word.begin_clean().is_ok() {
            // Not pinned: `clean_up` covers that case, so continue as if the write had failed.
            self.word.finish_clean(false);
        } else if self.word.pin_for_snapshot().is_ok() {
            let copy = self.entry.lock().unwrap().bytes;
            *self.device.lock().unwrap() = copy;
            self.word.unpin();
        }
    }

    /// Stores to a page pinned for writing as the kernel does for a system call, and unpins it. A
    /// fault would make the call fail.
    fn store_pinned(&self, at: usize, value: u64) {
        {
            let mut entry = self.entry.lock().unwrap();
            assert!(entry.present && !entry.protected, "the system call fails");
            entry.bytes[at] = value;
        }
        self.word.unpin();
    }

    fn evict(&self) {
        if self.word.begin_evict().is_ok() {
            *self.entry.lock().unwrap() = Entry { present: false, protected: false, bytes: [9; 2] };
            self.word.finish_evict();
        }
    }

    /// As `protect_runs` and `runs_around`: a call for a whole span of a region covers this page,
    /// because it is not dirty or not present.
    fn span_over(&self) {
        let _gate = self.gate.exclusive();
        match self.word.load().state() {
            State::Dirty => {}
            State::Absent | State::Loading => self.entry.lock().unwrap().present = false,
            _ => self.entry.lock().unwrap().protected = true,
        }
    }

    /// The invariants while no thread is at work: no store is lost, and every dirty page is marked.
    fn check(&self, expected: [u64; 2]) {
        let (entry, device) = (*self.entry.lock().unwrap(), *self.device.lock().unwrap());
        match self.word.load().state() {
            State::Absent => assert_eq!(device, expected, "lost by eviction"),
            State::Clean => {
                assert_eq!((device, entry.bytes), (expected, expected), "a store was not seen");
                assert!(entry.protected, "the next store to it is lost");
                assert!(entry.present, "an access faults for ever");
            }
            State::Dirty => {
                assert_eq!(entry.bytes, expected, "lost in memory");
                assert!(self.is_marked(), "no flush will find it");
                assert!(entry.present && !entry.protected, "a store to it faults for ever");
            }
            other => panic!("left in {other:?}"),
        }
    }
}

/// A store during a write-back and an eviction reaches the device, or is still in memory and
/// marked.
#[test]
fn loom_store_cleaner_evictor() {
    explore(2, || {
        let page = Mapped::dirty(1);
        let (first, second) = (page.clone(), page.clone());
        together(move || first.store(0, 2), move || second.clean_up(true, false), || page.evict());
        page.check([2, 0]);
    });
}

/// The same after a failed write.
#[test]
fn loom_store_and_failed_write() {
    explore(2, || {
        let page = Mapped::dirty(1);
        let (first, second) = (page.clone(), page.clone());
        together(
            move || first.store(0, 2),
            move || second.clean_up(false, false),
            || page.clean_up(true, false),
        );
        page.check([2, 0]);
    });
}

/// Calls that cover a page because its whole region is cleaned or evicted find word and page table
/// in agreement.
#[test]
fn loom_spans_over_a_page() {
    for absent in [false, true] {
        explore(2, move || {
            let page = Mapped::clean();
            if absent {
                page.evict();
            }
            let (first, second) = (page.clone(), page.clone());
            together(
                move || first.store_once(0, 1),
                move || second.span_over(),
                || page.clean_up(true, false),
            );
            page.check([1, 0]);
        });
    }
}

/// A snapshot of a page that was pinned for writing does not overwrite a newer write of the page.
#[test]
fn loom_snapshot_and_cleaner() {
    explore(3, || {
        let page = Mapped::dirty(1);
        page.word.pin_for_writing().unwrap();
        let first = page.clone();
        together(
            move || {
                first.store_pinned(0, 2);
                first.store(0, 3);
                first.clean_up(true, false);
            },
            || (),
            || page.write_snapshot(),
        );
        page.check([3, 0]);
    });
}

/// A flush covers the stores before it, including one that succeeded without a fault because
/// another thread's fault had just made the page writable.
#[test]
fn loom_flush_after_a_store_without_a_fault() {
    explore(2, || {
        let page = Mapped::clean();
        let (first, second) = (page.clone(), page.clone());
        together(
            move || first.store(0, 1),
            move || {
                second.store(1, 2);
                second.clean_up(true, true);
                assert_eq!(second.device.lock().unwrap()[1], 2, "flushed, but not written");
            },
            || (),
        );
        page.check([1, 2]);
    });
}

/// A thread finds its own mark at once, even if another thread marks a neighbour.
#[test]
fn loom_marks_of_neighbours() {
    explore(3, || {
        let map = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
        let mark_and_find = |bit: u64| {
            let map = map.clone();
            move || {
                dirty::mark(&map.0, bit, &map.1, 1);
                assert_eq!(map.1.load(Ordering::Acquire), 1, "the walk skips the word");
                assert_ne!(map.0.load(Ordering::Acquire) & bit, 0);
            }
        };
        together(mark_and_find(1), mark_and_find(2), || ());
    });
}

// ---- gates, frames, versions --------------------------------------------------------

struct Inside(Gate, Checked);

impl Inside {
    fn new() -> Arc<Inside> {
        Arc::new(Inside(Gate::new(), Checked::new()))
    }

    fn pass(&self) {
        let _shared = self.0.shared();
        self.1.get();
    }

    fn take(&self) {
        let _alone = self.0.exclusive();
        self.1.set(1);
    }
}

/// An exclusive hold is exclusive, its effects are visible to the next holder, and no thread sleeps
/// forever.
#[test]
fn loom_gate() {
    explore(2, || {
        let gate = Inside::new();
        let (first, second) = (gate.clone(), gate.clone());
        together(move || first.pass(), move || second.take(), || gate.take());
    });
    explore(2, || {
        let gate = Inside::new();
        let (first, second) = (gate.clone(), gate.clone());
        together(move || first.pass(), move || second.pass(), || gate.take());
    });
}

/// The state that the pool keeps for one frame: the limit, the owner word, the free list, and the
/// number of granted frames, which changes under the list's lock.
struct Frame {
    limit: AtomicUsize,
    owner: AtomicU64,
    list: Mutex<Vec<usize>>,
    granted: AtomicUsize,
}

const INDEX: usize = 1;

impl Frame {
    fn in_use() -> Arc<Frame> {
        Arc::new(Frame {
            limit: AtomicUsize::new(2),
            owner: AtomicU64::new(77),
            list: Mutex::new(vec![]),
            granted: AtomicUsize::new(2),
        })
    }

    fn give(&self) {
        if frame_word::release(&self.owner, &self.limit, INDEX) {
            self.list.lock().unwrap().push(INDEX);
        }
    }

    /// Takes the frame and gives it back.
    fn use_once(&self) {
        if self.list.lock().unwrap().pop().is_none() {
            return;
        }
        if frame_word::is_granted(&self.limit, INDEX)
            || frame_word::retire(&self.owner, &self.limit, INDEX)
        {
            self.owner.store(78, Ordering::SeqCst);
            self.give();
        }
    }

    fn shrink(&self) {
        let _list = self.list.lock().unwrap();
        self.limit.store(1, Ordering::SeqCst);
        crate::sync::in_one_order();
    }

    /// As `FramePool::set_limit`. `shrink`, `grow` and `finish` run on one thread, which models the
    /// policy lock.
    fn grow(&self) {
        let granted = {
            let _list = self.list.lock().unwrap();
            self.limit.store(2, Ordering::SeqCst);
            self.granted.load(Ordering::Relaxed)
        };
        if INDEX < granted && (frame_word::regain(&self.owner) || frame_word::grant(&self.owner)) {
            self.list.lock().unwrap().push(INDEX);
        }
    }

    /// As `FramePool::finish_shrink`.
    fn finish(&self) {
        if frame_word::withdraw(&self.owner) {
            let _list = self.list.lock().unwrap();
            self.granted.store(INDEX, Ordering::SeqCst);
        }
    }

    /// As `FramePool::refill`, but takes no frame.
    fn refill(&self) {
        let list = self.list.lock().unwrap();
        let granted = self.granted.load(Ordering::Relaxed);
        if list.is_empty() && granted < self.limit.load(Ordering::SeqCst) {
            assert!(
                frame_word::grant(&self.owner),
                "above the granted frames none is in circulation"
            );
            self.granted.store(granted + 1, Ordering::Relaxed);
            drop(list);
            self.list.lock().unwrap().push(INDEX);
        }
    }

    fn sweep(&self) {
        self.list.lock().unwrap().retain(|&frame| {
            frame_word::is_granted(&self.limit, frame)
                || frame_word::retire(&self.owner, &self.limit, frame)
        });
    }
}

/// After a shrink and a growth the frame is in the list exactly once, even if other threads gave it
/// back, took it or swept the list in between.
#[test]
fn loom_frame_between_shrink_and_growth() {
    explore(3, || {
        let frame = Frame::in_use();
        let (first, second) = (frame.clone(), frame.clone());
        together(
            move || first.give(),
            move || second.use_once(),
            || {
                frame.shrink();
                frame.grow();
            },
        );
        assert_eq!(*frame.list.lock().unwrap(), [INDEX]);
        assert_eq!(frame.owner.load(Ordering::SeqCst), FREE);
    });
    explore(3, || {
        let frame = Frame::in_use();
        let (first, second) = (frame.clone(), frame.clone());
        together(
            move || first.give(),
            move || second.sweep(),
            || {
                frame.shrink();
                frame.grow();
            },
        );
        assert_eq!(*frame.list.lock().unwrap(), [INDEX]);
        assert_eq!(frame.owner.load(Ordering::SeqCst), FREE);
    });
}

/// The same if the shrink may have finished: then the frame is granted anew.
#[test]
fn loom_frame_between_finished_shrink_and_growth() {
    explore(3, || {
        let frame = Frame::in_use();
        let (first, second) = (frame.clone(), frame.clone());
        together(
            move || first.give(),
            move || second.refill(),
            || {
                frame.shrink();
                frame.finish();
                frame.grow();
            },
        );
        frame.refill();
        assert_eq!(*frame.list.lock().unwrap(), [INDEX]);
        assert_eq!(frame.owner.load(Ordering::SeqCst), FREE);
        assert_eq!(frame.granted.load(Ordering::SeqCst), 2);
    });
}

/// A frame that is granted between a growth and the next shrink is in use, or is soon removed from
/// the list because it lies above the limit.
#[test]
fn loom_frame_granted_while_the_limit_changes() {
    explore(3, || {
        let frame = Frame::in_use();
        frame.give();
        frame.shrink();
        frame.sweep();
        frame.finish();
        let (first, second) = (frame.clone(), frame.clone());
        together(
            move || {
                first.refill();
                first.use_once();
            },
            move || second.use_once(),
            || {
                frame.grow();
                frame.shrink();
                frame.sweep();
            },
        );
        frame.sweep();
        frame.finish();
        assert!(frame.list.lock().unwrap().is_empty());
        assert_eq!(frame.owner.load(Ordering::SeqCst), UNGRANTED);
        assert_eq!(frame.granted.load(Ordering::SeqCst), INDEX);
    });
}

/// After a shrink alone the frame is retired, or a sweep finds it in the list.
#[test]
fn loom_frame_and_shrink() {
    explore(3, || {
        let frame = Frame::in_use();
        let (first, second) = (frame.clone(), frame.clone());
        together(move || first.give(), move || second.use_once(), || frame.shrink());
        frame.sweep();
        frame.finish();
        assert!(frame.list.lock().unwrap().is_empty());
        assert_eq!(frame.owner.load(Ordering::SeqCst), UNGRANTED);
    });
}

/// Bytes that change under a version, as two halves that reveal a torn copy.
struct Slot {
    version: Version,
    halves: [AtomicU64; 2],
}

impl Slot {
    fn new() -> Slot {
        Slot { version: Version::new(), halves: [AtomicU64::new(0), AtomicU64::new(0)] }
    }

    fn set(&self, value: u64) {
        for half in &self.halves {
            half.store(value, Ordering::Relaxed);
        }
    }

    fn get(&self) -> [u64; 2] {
        [0, 1].map(|half| self.halves[half].load(Ordering::Relaxed))
    }
}

/// A copy out of a slot whose version did not change during the copy is whole, and only one of two
/// threads changes a slot.
#[test]
fn loom_version_of_a_slot() {
    explore(3, || {
        let slot = Arc::new(Slot::new());
        let keep = |slot: &Slot, value| {
            if slot.version.try_begin_change() {
                slot.set(value);
                slot.version.end_change();
            }
        };
        let (first, second) = (slot.clone(), slot.clone());
        together(
            move || keep(&first, 1),
            move || keep(&second, 2),
            || {
                if let Some(version) = slot.version.at_rest() {
                    let [low, high] = slot.get();
                    if slot.version.is_still(version) {
                        assert_eq!(low, high, "torn");
                    }
                }
            },
        );
        let [low, high] = slot.get();
        assert_eq!(low, high, "two wrote at once");
    });
}

/// A page of `Pages` in a frame that other pages are loaded into.
struct Paged {
    word: PageWord,
    slot: Slot,
}

impl Paged {
    /// As `Pages::read`, once.
    fn read(&self) -> Option<[u64; 2]> {
        let version = self.slot.version.at_rest()?;
        let seen = self.word.load();
        if !seen.is_readable() {
            return None;
        }
        let halves = self.slot.get();
        fence(Ordering::Acquire);
        let after = self.word.load();
        (after.is_where_it_was(seen) && self.slot.version.is_still(version)).then_some(halves)
    }

    /// Writes bytes to the frame, as in `ArenaMemory`.
    fn load(&self, value: u64) {
        fence(Ordering::Release);
        self.slot.set(value);
    }

    fn resident() -> Arc<Paged> {
        let page = Arc::new(Paged { word: PageWord::new(), slot: Slot::new() });
        page.word.begin_load(page.word.load()).unwrap();
        page.load(1);
        page.slot.version.skip();
        page.word.finish_load(FRAME, false, None);
        page
    }
}

/// An optimistic read sees neither another page that was loaded into the frame nor a mixture, even
/// if the first page is loaded into the same frame again.
#[test]
fn loom_optimistic_read_and_reuse_of_the_frame() {
    explore(3, || {
        let page = Paged::resident();
        let reader = page.clone();
        together(
            move || {
                if let Some(halves) = reader.read() {
                    assert_eq!(halves, [1, 1]);
                }
            },
            || (),
            || {
                if page.word.begin_evict().is_err() {
                    return;
                }
                page.word.finish_evict();
                page.load(2);
                page.word.begin_load(page.word.load()).unwrap();
                page.load(1);
                page.slot.version.skip();
                page.word.finish_load(FRAME, false, None);
            },
        );
    });
}

/// An optimistic read sees all changes of a writing guard or none.
#[test]
fn loom_optimistic_read_and_writing_guard() {
    explore(3, || {
        let page = Paged::resident();
        let reader = page.clone();
        together(
            move || {
                if let Some([low, high]) = reader.read() {
                    assert_eq!(low, high, "torn");
                }
            },
            || (),
            || {
                page.word.begin_exclusive(page.word.load()).unwrap();
                page.slot.version.begin_change();
                page.slot.set(2);
                page.slot.version.end_change();
                page.word.finish_exclusive();
            },
        );
    });
}
