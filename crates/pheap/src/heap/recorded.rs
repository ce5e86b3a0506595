//! Where a heap and its collections have stored.
//!
//! Code of this crate *notes* memory before it stores there, and before it lends it mutably: the
//! allocator's metadata, the elements that a collection writes or moves, the bytes of each `&mut`
//! that a scope or a collection hands out. What a value owns elsewhere is noted when it is reached.
//! A psync may then commit the noted bytes, and need not look for stores.
//!
//! # What holds
//! [`ObjectHeap::take_recorded`] returns ranges only if they cover every store since the last call.
//! * A reference is lent for a part of a scope, and no scope of the heap is alive during a take. So
//!   no store happens after the take through what was noted before it.
//! * Within a scope a reference may outlive a commit: values on the stack and in other threads own
//!   memory of the heap. A commit in the middle of a scope ([`Scope::quiesced`](super::Scope::quiesced))
//!   therefore makes the next take return `None`.
//! * Memory is noted also where a store seems not to matter, such as in values that are dropped. If
//!   a store were left out, memory here and its durable content would differ. The allocator looks at
//!   memory here when it skips what is zero already.
//! * As soon as code can get at a raw pointer, recording ends for good: the raw methods of a heap,
//!   the `Allocator` implementations, and a root whose type contains addresses or is not declared by
//!   [`persist!`](crate::persist!).
//!
//! # Bounds
//! Above [`MOST_BYTES`] or [`MOST_RANGES`] the ranges are joined; if that leaves more than three
//! quarters of either, they are given up and the next take returns `None`: finding pages is cheaper then. Until that take, noting costs one load.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use aquifer_sys::futex::Mutex;

use super::error::HeapError;
use super::registry::Registry;

#[allow(unused_imports, reason = "for the documentation")]
use super::ObjectHeap;

/// As much as 16 pages.
const MOST_BYTES: u64 = 64 << 10;
const MOST_RANGES: usize = 256;
/// New ranges are joined with these many last ones.
const LAST_RANGES: usize = 8;

/// How many heaps of the process are recording. A forked child inherits the number and no heap.
static RECORDING: AtomicUsize = AtomicUsize::new(0);

/// The stores of all open heaps.
static HEAPS: Registry<Recorded> = Registry::new();

/// The stores of one heap.
#[derive(Default)]
pub(crate) struct Recorded(Mutex<Stores>);

#[derive(Default)]
struct Stores {
    phase: Phase,
    /// Of addresses, in the order of the stores.
    ranges: Vec<Range<u64>>,
    bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    /// Not asked for, or ended for good.
    #[default]
    Off,
    /// Until the next take: there were stores that are not in the ranges.
    Incomplete,
    Recording,
}

impl Stores {
    fn set(&mut self, phase: Phase) {
        // Relaxed: a thread that is to see the new number has synchronized with this one, because
        // takes exclude scopes.
        match (self.phase == Phase::Recording, phase == Phase::Recording) {
            (false, true) => _ = RECORDING.fetch_add(1, Relaxed),
            (true, false) => _ = RECORDING.fetch_sub(1, Relaxed),
            _ => {}
        }
        self.phase = phase;
        self.ranges.clear();
        self.bytes = 0;
    }

    fn add(&mut self, new: Range<u64>) {
        if self.phase != Phase::Recording {
            return;
        }
        for old in self.ranges.iter_mut().rev().take(LAST_RANGES) {
            if new.start <= old.end && old.start <= new.end {
                let joined = old.start.min(new.start)..old.end.max(new.end);
                self.bytes += joined.end - joined.start - (old.end - old.start);
                *old = joined;
                return self.check();
            }
        }
        self.bytes += new.end - new.start;
        self.ranges.push(new);
        self.check();
    }

    fn check(&mut self) {
        if self.bytes <= MOST_BYTES && self.ranges.len() <= MOST_RANGES {
            return;
        }
        self.join();
        // Leave room, or the next ranges would be joined one by one.
        if self.bytes > MOST_BYTES / 4 * 3 || self.ranges.len() > MOST_RANGES / 4 * 3 {
            self.set(Phase::Incomplete);
        }
    }

    fn join(&mut self) {
        self.ranges.sort_unstable_by_key(|range| range.start);
        self.ranges.dedup_by(|next, before| {
            let touches = next.start <= before.end;
            if touches {
                before.end = before.end.max(next.end);
            }
            touches
        });
        self.bytes = self.ranges.iter().map(|range| range.end - range.start).sum();
    }
}

impl Recorded {
    /// Registers the stores of a heap.
    pub fn open(self: &Arc<Self>, start: u64, len_bytes: u64) -> Result<(), HeapError> {
        HEAPS.insert(start, len_bytes, Arc::clone(self))
    }

    /// Updates the length of a heap that has grown.
    pub fn grow(self: &Arc<Self>, len_bytes: u64) {
        HEAPS.grow(self, len_bytes);
    }

    /// Unregisters the stores of a heap that is being closed.
    pub fn close(self: &Arc<Self>) {
        self.end();
        HEAPS.remove(self);
    }

    /// Records from the next take on, if `may_begin` returns true. It is called with the lock held that [`Recorded::end`] takes.
    pub fn begin(&self, may_begin: impl FnOnce() -> bool) {
        let mut stores = self.0.lock();
        if stores.phase == Phase::Off && may_begin() {
            stores.set(Phase::Incomplete);
        }
    }

    /// The ranges since the last take, as offsets from `base`; `None` if they are not known.
    pub fn take(&self, base: u64) -> Option<Vec<Range<u64>>> {
        let mut stores = self.0.lock();
        let is_complete = stores.phase == Phase::Recording;
        let taken = stores.ranges.iter().map(|range| range.start - base..range.end - base);
        let taken = is_complete.then(|| taken.collect());
        if stores.phase != Phase::Off {
            stores.set(Phase::Recording);
        }
        taken
    }

    pub fn is_on(&self) -> bool {
        self.0.lock().phase != Phase::Off
    }

    /// There were or may be stores that are not noted, up to the next take.
    pub fn is_incomplete(&self) {
        let mut stores = self.0.lock();
        if stores.phase == Phase::Recording {
            stores.set(Phase::Incomplete);
        }
    }

    /// There may be stores that are not noted, at any time from now on.
    pub fn end(&self) {
        let mut stores = self.0.lock();
        if stores.phase != Phase::Off {
            stores.set(Phase::Off);
        }
    }
}

/// Notes bytes of any heap that are about to be stored to. Does nothing for other memory.
#[inline]
pub(crate) fn note_bytes(start: NonNull<u8>, len_bytes: usize) {
    // Relaxed: see `Stores::set`.
    if RECORDING.load(Relaxed) > 0 {
        note_address(start.as_ptr() as u64, len_bytes as u64);
    }
}

#[cold]
fn note_address(start: u64, len_bytes: u64) {
    if len_bytes > 0 {
        let addresses = start..start.saturating_add(len_bytes);
        HEAPS.with(start, |recorded| recorded.0.lock().add(addresses));
    }
}

/// [`note_bytes`] of `count` values.
#[inline]
pub(crate) fn note<T>(start: NonNull<T>, count: usize) {
    note_bytes(start.cast(), count * size_of::<T>());
}

/// [`note`] of values that are about to be dropped, which may store to them.
#[inline]
pub(crate) fn note_drop<T>(start: NonNull<T>, count: usize) {
    if std::mem::needs_drop::<T>() {
        note(start, count);
    }
}
