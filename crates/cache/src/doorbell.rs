//! A doorbell: a thread that adds work rings it, a thread without work sleeps until the next ring.
//!
//! A sleeper draws a *ticket* before it looks for work, and sleeps only if the bell has not rung
//! since. The ringer skips the system call if no thread sleeps. This is safe because each side
//! writes first and reads then: the ringer advances the ticket and reads the number of sleepers;
//! the sleeper increments that number and lets the kernel compare the ticket. In the single order
//! of SeqCst accesses one of them comes second and sees the other's write.

use std::time::Duration;

use crate::sync::{self, AtomicU32, Ordering};

/// A doorbell. See the module documentation. Async-signal-safe.
#[derive(Debug)]
pub(crate) struct Doorbell {
    rung: AtomicU32,
    sleepers: AtomicU32,
}

impl Doorbell {
    pub fn new() -> Doorbell {
        Doorbell { rung: AtomicU32::new(0), sleepers: AtomicU32::new(0) }
    }

    /// Draws a ticket, before looking for work.
    pub fn ticket(&self) -> u32 {
        self.rung.load(Ordering::SeqCst)
    }

    /// Announces work, and wakes up to `sleepers` sleeping threads.
    pub fn ring(&self, sleepers: u32) {
        // Also a release: a thread that draws the new ticket sees the work.
        self.rung.fetch_add(1, Ordering::SeqCst);
        sync::in_one_order();
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            sync::wake_u32(&self.rung, sleepers);
        }
    }

    /// Sleeps unless the bell rang since `ticket` was drawn; at most `timeout`, or less if woken
    /// spuriously.
    pub fn sleep(&self, ticket: u32, timeout: Option<Duration>) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        sync::in_one_order();
        sync::wait_u32(&self.rung, ticket, timeout);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}
