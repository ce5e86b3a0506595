//! Reads that a fault handler can wait for: posted to memory allocated beforehand, answered by the device's thread.
//!
//! A reader claims a slot, writes the range into it, posts it and writes to an eventfd; the thread finds posted slots
//! by looking at all. The answer stays the thread's memory: the reader copies out of it and posts the slot back as used,
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

use std::cell::UnsafeCell;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_sys::futex;
use rustix::event::{EventfdFlags, eventfd};

use crate::RemoteError;
use crate::fetch::Body;

/// More readers at once wait for a slot.
const SLOTS: usize = 256;

const FREE: u32 = 0;
const FILLING: u32 = 1;
const POSTED: u32 = 2;
const RUNNING: u32 = 3;
const ANSWERED: u32 = 4;
const USED: u32 = 5;
const ABANDONED: u32 = 6;

pub(crate) type Answer = Result<Body, Arc<RemoteError>>;

struct Slot {
    state: AtomicU32,
    start: AtomicU64,
    len_bytes: AtomicU64,
    answer: UnsafeCell<Option<Answer>>,
}

/// See the module documentation.
pub(crate) struct Mailbox {
    slots: Box<[Slot]>,
    /// Counts slots that became free: what readers without one wait on.
    freed: AtomicU32,
    event: OwnedFd,
}

// SAFETY: `answer` is accessed only by the owner that the slot's state names; the transitions are release and
// acquire, and compare-and-swap where two could make one.
unsafe impl Sync for Mailbox {}

/// The wait ended before the answer came.
pub(crate) struct TooLate;

impl Mailbox {
    pub fn new() -> std::io::Result<Mailbox> {
        let slot = |_| Slot {
            state: AtomicU32::new(FREE),
            start: AtomicU64::new(0),
            len_bytes: AtomicU64::new(0),
            answer: UnsafeCell::new(None),
        };
        Ok(Mailbox {
            slots: (0..SLOTS).map(slot).collect(),
            freed: AtomicU32::new(0),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// The descriptor that [`Mailbox::ring`] makes readable.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Makes the thread look. Async-signal-safe.
    pub fn ring(&self) {
        // Fails only if the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Takes the event, before the thread looks at the slots.
    pub fn hear(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }

    /// Reads a range: hands the answer to `use_answer`. Async-signal-safe if that is.
    pub fn read<T>(
        &self,
        range: Range<u64>,
        limit: Duration,
        use_answer: impl FnOnce(&Answer) -> T,
    ) -> Result<T, TooLate> {
        let start = Instant::now();
        let left = || limit.checked_sub(start.elapsed()).filter(|left| !left.is_zero());
        let slot = self.claim(left)?;
        // Relaxed: published by the release below.
        slot.start.store(range.start, Ordering::Relaxed);
        slot.len_bytes.store(range.end - range.start, Ordering::Relaxed);
        // Release: the thread's acquire sees the range.
        slot.state.store(POSTED, Ordering::Release);
        self.ring();
        loop {
            // Acquire: pairs with the release in `answer`.
            let state = slot.state.load(Ordering::Acquire);
            if state == ANSWERED {
                break;
            }
            if let Some(left) = left() {
                futex::wait(&slot.state, state, Some(left));
                continue;
            }
            let end = if state == POSTED { USED } else { ABANDONED };
            // Relaxed: this reader has written and read nothing but the range.
            let given_up =
                slot.state.compare_exchange(state, end, Ordering::Relaxed, Ordering::Relaxed);
            if given_up.is_ok() {
                self.ring();
                return Err(TooLate);
            }
        }
        // Also if `use_answer` panics.
        let _used = Use { mailbox: self, slot };
        // SAFETY: Answered, and claimed by this thread: the answer is this reader's until Used.
        let answer = unsafe { &*slot.answer.get() };
        Ok(use_answer(answer.as_ref().expect("stored before Answered")))
    }

    fn claim(&self, left: impl Fn() -> Option<Duration>) -> Result<&Slot, TooLate> {
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
            futex::wait(&self.freed, freed, Some(left().ok_or(TooLate)?));
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
    pub fn answer(&self, number: usize, answer: Answer) {
        let slot = &self.slots[number];
        // SAFETY: Running or Abandoned: the answer is this thread's.
        unsafe { *slot.answer.get() = Some(answer) };
        // Release: the reader's acquire sees the answer.
        let answered =
            slot.state.compare_exchange(RUNNING, ANSWERED, Ordering::Release, Ordering::Acquire);
        match answered {
            Ok(_) => futex::wake(&slot.state, 1),
            Err(_) => self.free(slot),
        }
    }

    /// Frees a slot in Used, or in Abandoned with its request done.
    fn free(&self, slot: &Slot) {
        // SAFETY: Used, or Abandoned: the answer is this thread's.
        unsafe { *slot.answer.get() = None };
        // Release: pairs with the acquire of the next reader.
        slot.state.store(FREE, Ordering::Release);
        // Release: pairs with the acquire of a reader that looks for a slot.
        self.freed.fetch_add(1, Ordering::Release);
        futex::wake(&self.freed, 1);
    }
}

struct Use<'a> {
    mailbox: &'a Mailbox,
    slot: &'a Slot,
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        // Release: the thread frees the answer after this reader's last look at it.
        self.slot.state.store(USED, Ordering::Release);
        self.mailbox.ring();
    }
}

#[cfg(test)]
mod tests {
    use aquifer_testkit::rng::Rng;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn is_late(mailbox: &Mailbox, limit: Duration) -> bool {
        mailbox.read(0..10, limit, |_| ()).is_err()
    }

    fn states(mailbox: &Mailbox) -> Vec<u32> {
        let states = mailbox.slots.iter().map(|slot| slot.state.load(Ordering::Acquire));
        states.filter(|&state| state != FREE).collect()
    }

    /// Waits until a slot is in this state.
    fn wait_for(mailbox: &Mailbox, state: u32) {
        let start = Instant::now();
        while !states(mailbox).contains(&state) {
            assert!(start.elapsed() < LONG, "waited in vain");
            std::thread::yield_now();
        }
    }

    #[test]
    fn reads_that_no_thread_takes_give_their_slots_back() {
        let mailbox = Mailbox::new().unwrap();
        for _ in 0..3 {
            // One more than there are slots.
            for _ in 0..=SLOTS {
                assert!(is_late(&mailbox, Duration::ZERO));
            }
            assert_eq!(states(&mailbox), [USED; SLOTS]);
            mailbox.look(|_, _| panic!("given up"));
            assert!(states(&mailbox).is_empty());
        }
    }

    #[test]
    fn a_read_given_up_while_it_runs_is_freed_by_its_answer() {
        let mailbox = Mailbox::new().unwrap();
        let mut limit = Duration::from_millis(1);
        // Until the slot is taken within the limit.
        let number = loop {
            let mut taken = None;
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| is_late(&mailbox, limit));
                while states(&mailbox).is_empty() && !reader.is_finished() {
                    std::thread::yield_now();
                }
                while taken.is_none() && !reader.is_finished() {
                    mailbox.look(|number, _| taken = Some(number));
                }
                assert!(reader.join().unwrap());
            });
            if let Some(number) = taken {
                break number;
            }
            mailbox.look(|_, _| panic!("given up"));
            limit *= 2;
        };
        mailbox.look(|_, _| panic!("it runs"));
        assert_eq!(states(&mailbox), [ABANDONED]);
        mailbox.answer(number, Ok(Body::default()));
        assert!(states(&mailbox).is_empty());
    }

    #[test]
    fn an_answer_is_freed_after_its_reader_has_used_it() {
        let mailbox = Mailbox::new().unwrap();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| mailbox.read(5..8, LONG, Result::is_ok).ok());
            wait_for(&mailbox, POSTED);
            let mut taken = None;
            mailbox.look(|number, range| taken = Some((number, range)));
            let (number, range) = taken.unwrap();
            assert_eq!(range, 5..8);
            mailbox.answer(number, Ok(Body::default()));
            assert_eq!(reader.join().unwrap(), Some(true));
            assert_eq!(states(&mailbox), [USED]);
            mailbox.look(|_, _| panic!("it was answered"));
            assert!(states(&mailbox).is_empty());
        });
    }

    /// Readers of any patience against a thread that answers in any order: each gets its own range, or is late.
    #[test]
    fn readers_get_the_answers_to_their_own_reads() {
        let mailbox = Mailbox::new().unwrap();
        std::thread::scope(|scope| {
            let read = |reader| {
                let mailbox = &mailbox;
                scope.spawn(move || {
                    let mut rng = Rng::new(reader);
                    for _ in 0..2000 {
                        let start = rng.below(1 << 40);
                        let limit = match rng.below(3) {
                            0 => Duration::ZERO,
                            1 => Duration::from_micros(rng.below(100)),
                            _ => LONG,
                        };
                        let check = |answer: &Answer| {
                            let body = answer.as_ref().unwrap();
                            let (_, bytes) = body.parts(0, 8).next().unwrap();
                            assert_eq!(bytes, start.to_le_bytes());
                        };
                        let read = mailbox.read(start..start + 8, limit, check);
                        assert!(read.is_ok() || limit < LONG);
                    }
                })
            };
            let readers: Vec<_> = (0..4).map(read).collect();
            let mut rng = Rng::new(4);
            let mut taken: Vec<(usize, Range<u64>)> = vec![];
            while readers.iter().any(|reader| !reader.is_finished()) || !taken.is_empty() {
                mailbox.hear();
                mailbox.look(|number, range| taken.push((number, range)));
                if !taken.is_empty() && rng.chance(0.5) {
                    let (number, range) = taken.swap_remove(rng.below(taken.len() as u64) as usize);
                    mailbox.answer(number, Ok(Body::of(range.start.to_le_bytes().to_vec())));
                }
            }
        });
        mailbox.look(|_, _| panic!("no reader is left"));
        assert!(states(&mailbox).is_empty());
    }
}
