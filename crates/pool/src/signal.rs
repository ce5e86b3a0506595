//! A word that processes sleep on until something is to be looked at again.
//!
//! | who waits | | who has something to say |
//! |---|---|---|
//! | takes the word ([`Signal::now`]) | | changes what is waited for |
//! | looks: not yet | | raises the word ([`Signal::ring`]) |
//! | counts itself | | **fence** |
//! | **fence** (the kernel's) | | looks whether anybody is counted |
//! | sleeps if the word is still the same | | wakes all |
//!
//! Who takes the word before it is raised and sleeps after that finds it changed. Who is not counted when the other one looks finds it
//! raised: the two fences have an order. So a sleeper is woken, and nobody makes a system call where nobody sleeps.

use std::sync::atomic::Ordering::{AcqRel, Acquire, SeqCst};
use std::time::Duration;

use crate::sync::{AtomicU32, fence_behind_locked_instruction, wait_shared, wake_all_shared};

/// See the module's documentation. Lies in memory that processes share.
#[repr(C)]
pub(crate) struct Signal {
    /// Raised and woken.
    word: AtomicU32,
    /// How many wait for it.
    waiters: AtomicU32,
}

impl Signal {
    /// That nobody waits for.
    #[cfg(all(test, loom))]
    pub fn new() -> Signal {
        Signal { word: AtomicU32::new(0), waiters: AtomicU32::new(0) }
    }

    /// To be taken before looking at what is waited for.
    pub fn now(&self) -> u32 {
        // Acquire: pairs with `ring`; a change after this load makes the wait return at once.
        self.word.load(Acquire)
    }

    /// Sleeps until the word is not `seen` any more, or for so long. Says whether it is another one.
    pub fn wait(&self, seen: u32, most: Duration) -> bool {
        // AcqRel: counted before sleeping, so that `ring` wakes.
        self.waiters.fetch_add(1, AcqRel);
        wait_shared(&self.word, seen, Some(most));
        self.waiters.fetch_sub(1, AcqRel);
        self.now() != seen
    }

    /// Wakes all that wait.
    pub fn ring(&self) {
        // SeqCst: what led to this is visible to who sees the new value; and the load of `waiters` comes after it.
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

    /// Nobody sleeps on when all is said, whoever else waits.
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
