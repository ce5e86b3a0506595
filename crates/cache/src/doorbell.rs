//! A doorbell: whoever has work rings, whoever has none sleeps until the next ring.
//!
//! A sleeper draws a *ticket* before it looks for work, and sleeps only while nobody has rung since. The
//! bell-ringer skips the system call when nobody sleeps. That is safe because each side writes first and
//! looks then: the ringer moves the ticket on and looks for sleepers, the sleeper counts itself and lets the
//! kernel compare the ticket. In the single order of SeqCst accesses one of them comes second and sees the
//! other.

use std::time::Duration;

use crate::sync::{self, AtomicU32, Ordering};

/// See the module documentation. Async-signal-safe.
#[derive(Debug)]
pub(crate) struct Doorbell {
    rung: AtomicU32,
    sleepers: AtomicU32,
}

impl Doorbell {
    pub fn new() -> Doorbell {
        Doorbell { rung: AtomicU32::new(0), sleepers: AtomicU32::new(0) }
    }

    /// To be drawn before looking for work.
    pub fn ticket(&self) -> u32 {
        self.rung.load(Ordering::SeqCst)
    }

    /// Says that there is work, and wakes up to `sleepers` of those who wait for it.
    pub fn ring(&self, sleepers: u32) {
        // Release as well: who draws the new ticket sees the work.
        self.rung.fetch_add(1, Ordering::SeqCst);
        sync::in_one_order();
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            sync::wake_u32(&self.rung, sleepers);
        }
    }

    /// Sleeps unless somebody rang since `ticket` was drawn; at most `timeout`, or spuriously less long.
    pub fn sleep(&self, ticket: u32, timeout: Option<Duration>) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        sync::in_one_order();
        sync::wait_u32(&self.rung, ticket, timeout);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}
