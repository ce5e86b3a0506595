//! Reads that a fault handler can wait for: posted to memory allocated beforehand, answered by a device's thread.
//!
//! A reader claims a slot, writes the range into it, posts it and rings for the thread, as the caller defines it; the thread
//! finds posted slots by looking at all. The answer stays the thread's memory: the reader copies out of it and posts the slot back as used,
//! so that a reader neither allocates nor frees, and the thread never touches a reader's memory, which may itself be
//! absent. A reader that waited too long abandons its slot, which becomes free when the thread is done with it.
//!
//! | from | to | by |
//! |---|---|---|
//! | Free | Filling | reader |
//! | Filling | Posted | reader |
//! | Posted | Running | thread |
//! | Running | Answered | thread |
//! | Answered | Used | reader |
//! | Posted | Used | reader that waited too long |
//! | Running | Abandoned | reader that waited too long |
//! | Abandoned, Used | Free | thread |
//!
//! Invariant: `answer` belongs to the thread in Running, Abandoned and Used, to the reader in Answered, and is empty
//! otherwise. Of an Abandoned slot the request still runs.

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod tests;

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::sync::{AtomicU32, AtomicU64, Ordering, UnsafeCell, wait, wake};

const FREE: u32 = 0;
const FILLING: u32 = 1;
const POSTED: u32 = 2;
const RUNNING: u32 = 3;
const ANSWERED: u32 = 4;
const USED: u32 = 5;
const ABANDONED: u32 = 6;

struct Slot<A> {
    state: AtomicU32,
    start: AtomicU64,
    len_bytes: AtomicU64,
    answer: UnsafeCell<Option<A>>,
}

/// Ranges that readers post and one thread answers with an `A`; see the module documentation.
pub struct Mailbox<A> {
    slots: Box<[Slot<A>]>,
    /// Counts slots that became free: what readers without one wait on.
    freed: AtomicU32,
}

// SAFETY: `answer` is accessed only by the owner that the slot's state names; the transitions are release and
// acquire, and compare-and-swap where two could make one.
unsafe impl<A: Send + Sync> Sync for Mailbox<A> {}

/// The wait ended before the answer came.
#[derive(Debug)]
pub struct TooLate;

/// What is left of a limit; no end if there is none.
struct Left {
    start: Instant,
    limit: Duration,
}

impl Left {
    fn get(&self) -> Result<Option<Duration>, TooLate> {
        if self.limit == Duration::MAX {
            return Ok(None);
        }
        let left = self.limit.checked_sub(self.start.elapsed());
        left.filter(|left| !left.is_zero()).map(Some).ok_or(TooLate)
    }
}

impl<A> Mailbox<A> {
    /// Makes one for so many readers at once; more of them wait for a slot.
    pub fn new(slots: usize) -> Mailbox<A> {
        let slot = |_| Slot {
            state: AtomicU32::new(FREE),
            start: AtomicU64::new(0),
            len_bytes: AtomicU64::new(0),
            answer: UnsafeCell::new(None),
        };
        Mailbox { slots: (0..slots).map(slot).collect(), freed: AtomicU32::new(0) }
    }

    /// Reads a range: hands the answer to `use_answer`. `ring` makes the thread look. Async-signal-safe if both are.
    ///
    /// # Errors
    /// The limit is over; `Duration::MAX` is none.
    pub fn read<T>(
        &self,
        range: Range<u64>,
        limit: Duration,
        ring: impl Fn(),
        use_answer: impl FnOnce(&A) -> T,
    ) -> Result<T, TooLate> {
        let left = Left { start: Instant::now(), limit };
        let slot = self.claim(&left)?;
        // Relaxed: published by the release below.
        slot.start.store(range.start, Ordering::Relaxed);
        slot.len_bytes.store(range.end - range.start, Ordering::Relaxed);
        // Release: the thread's acquire sees the range.
        slot.state.store(POSTED, Ordering::Release);
        ring();
        loop {
            // Acquire: pairs with the release in `answer`.
            let state = slot.state.load(Ordering::Acquire);
            if state == ANSWERED {
                break;
            }
            if let Ok(left) = left.get() {
                wait(&slot.state, state, left);
                continue;
            }
            let end = if state == POSTED { USED } else { ABANDONED };
            // Relaxed: this reader has written and read nothing but the range.
            let given_up =
                slot.state.compare_exchange(state, end, Ordering::Relaxed, Ordering::Relaxed);
            if given_up.is_ok() {
                ring();
                return Err(TooLate);
            }
        }
        // Also if `use_answer` panics.
        let _used = Use { slot, ring };
        Ok(slot.answer.with(|answer| {
            // SAFETY: Answered, and claimed by this thread: the answer is this reader's until Used.
            let answer = unsafe { &*answer };
            use_answer(answer.as_ref().expect("stored before Answered"))
        }))
    }

    fn claim(&self, left: &Left) -> Result<&Slot<A>, TooLate> {
        loop {
            // Acquire: pairs with the release of the thread, so that a slot freed before this is seen below.
            let freed = self.freed.load(Ordering::Acquire);
            let free = self.slots.iter().find(|slot| {
                // Acquire: pairs with the release of the thread, which emptied the answer.
                slot.state
                    .compare_exchange(FREE, FILLING, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            });
            if let Some(slot) = free {
                return Ok(slot);
            }
            wait(&self.freed, freed, left.get()?);
        }
    }

    /// Frees what readers are done with, and hands over what they posted: the slot's number and the range. In the
    /// thread.
    pub fn look(&self, mut start: impl FnMut(usize, Range<u64>)) {
        for (number, slot) in self.slots.iter().enumerate() {
            // Acquire: pairs with the reader's release.
            match slot.state.load(Ordering::Acquire) {
                POSTED => {
                    let taken = slot.state.compare_exchange(
                        POSTED,
                        RUNNING,
                        Ordering::Acquire,
                        Ordering::Acquire,
                    );
                    match taken {
                        Ok(_) => {
                            // Relaxed: published by the reader's release of Posted.
                            let first = slot.start.load(Ordering::Relaxed);
                            let len_bytes = slot.len_bytes.load(Ordering::Relaxed);
                            start(number, first..first + len_bytes);
                        }
                        // Given up meanwhile, and so Used.
                        Err(_) => self.free(slot),
                    }
                }
                USED => self.free(slot),
                // `answer` frees what is Abandoned.
                _ => {}
            }
        }
    }

    /// Answers a slot that [`Mailbox::look`] handed over. In the thread.
    pub fn answer(&self, number: usize, answer: A) {
        let slot = &self.slots[number];
        slot.answer.with_mut(|place| {
            // SAFETY: Running or Abandoned: the answer is this thread's.
            unsafe { *place = Some(answer) };
        });
        // Release: the reader's acquire sees the answer.
        let answered =
            slot.state.compare_exchange(RUNNING, ANSWERED, Ordering::Release, Ordering::Acquire);
        match answered {
            Ok(_) => wake(&slot.state, 1),
            Err(_) => self.free(slot),
        }
    }

    /// Frees a slot in Used, or in Abandoned with its request done.
    fn free(&self, slot: &Slot<A>) {
        slot.answer.with_mut(|place| {
            // SAFETY: Used, or Abandoned: the answer is this thread's.
            unsafe { *place = None };
        });
        // Release: pairs with the acquire of the next reader.
        slot.state.store(FREE, Ordering::Release);
        // Release: pairs with the acquire of a reader that looks for a slot.
        self.freed.fetch_add(1, Ordering::Release);
        wake(&self.freed, 1);
    }
}

struct Use<'a, A, R: Fn()> {
    slot: &'a Slot<A>,
    ring: R,
}

impl<A, R: Fn()> Drop for Use<'_, A, R> {
    fn drop(&mut self) {
        // Release: the thread frees the answer after this reader's last look at it.
        self.slot.state.store(USED, Ordering::Release);
        (self.ring)();
    }
}
