//! A word that processes sleep on until a condition must be checked again.
//!
//! | waiter | | notifier |
//! |---|---|---|
//! | loads the word ([`Signal::now`]) | | changes the condition |
//! | checks the condition: not met | | raises the word ([`Signal::ring`]) |
//! | counts itself | | **fence** |
//! | **fence** (the kernel's) | | checks whether any waiter is counted |
//! | sleeps if the word is unchanged | | wakes all |
//!
//! A waiter that loads the word before it is raised and sleeps after that finds it changed. A
//! waiter that is not yet counted when the notifier checks finds the word raised: the two fences
//! are ordered. So every sleeper is woken, and the notifier makes no system call if no waiter is
//! counted.

use std::sync::atomic::Ordering::{AcqRel, Acquire, SeqCst};
use std::time::Duration;

use crate::sync::{AtomicU32, fence_behind_locked_instruction, wait_shared, wake_all_shared};

/// See the module's documentation. Lies in memory that processes share.
#[repr(C)]
pub(crate) struct Signal {
    /// Raised by each `ring`; the futex word.
    word: AtomicU32,
    /// How many processes wait.
    waiters: AtomicU32,
}

impl Signal {
    /// A signal without waiters.
    #[cfg(all(test, loom))]
    pub fn new() -> Signal {
        Signal { word: AtomicU32::new(0), waiters: AtomicU32::new(0) }
    }

    /// The current value, to be loaded before checking the condition.
    pub fn now(&self) -> u32 {
        // Acquire: pairs with `ring`; a change after this load makes the wait return at once.
        self.word.load(Acquire)
    }

    /// Sleeps until the word differs from `seen`, or until `most` has passed. Returns whether it
    /// differs.
    pub fn wait(&self, seen: u32, most: Duration) -> bool {
        // AcqRel: counted before sleeping, so that `ring` wakes.
        self.waiters.fetch_add(1, AcqRel);
        wait_shared(&self.word, seen, Some(most));
        self.waiters.fetch_sub(1, AcqRel);
        self.now() != seen
    }

    /// Wakes all waiters.
    pub fn ring(&self) {
        // SeqCst: the change of the condition is visible to a waiter that loads the new value; and
        // the load of `waiters` comes after it.
        self.word.fetch_add(1, SeqCst);
        fence_behind_locked_instruction();
        if self.waiters.load(Acquire) > 0 {
            wake_all_shared(&self.word);
        }
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use std::sync::Arc;
    use std::sync::atomic::Ordering::{Acquire, Release};

    use loom::thread;

    use super::*;
    use crate::sync::AtomicU64;

    /// No waiter keeps sleeping after the last `ring`, even with another waiter on the word.
    #[test]
    fn loom_a_waiter_is_woken() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(|| {
            let shared = Arc::new((Signal::new(), AtomicU64::new(0)));
            let waiters = [1, 2].map(|wanted| {
                let shared = shared.clone();
                thread::spawn(move || {
                    loop {
                        let seen = shared.0.now();
                        if shared.1.load(Acquire) >= wanted {
                            return;
                        }
                        shared.0.wait(seen, Duration::ZERO);
                    }
                })
            });
            for value in 1..=2 {
                shared.1.store(value, Release);
                shared.0.ring();
            }
            waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
        });
    }
}
