//! A bell: a thread that adds work rings it, a thread without work sleeps until the next ring.
//!
//! A sleeper draws a *ticket* before it looks for work, and sleeps only if the bell has not rung
//! since. The ringer skips the system call if no thread sleeps. This is safe because each side
//! writes first and reads then: the ringer advances the ticket and reads the number of sleepers;
//! the sleeper increments that number and lets the kernel compare the ticket. In the single order
//! of SeqCst accesses one of them comes second and sees the other's write.
//!
//! Stopping the bell is a ring that stays: a thread that draws a ticket afterwards learns of it.

use std::time::{Duration, Instant};

use crate::sync::{self, AtomicU32, Ordering};

/// Bit of the ticket word: the bell is stopped. The other bits count rings.
const STOPPED: u32 = 1;
const RING: u32 = 2;

/// Wakes threads that wait for work. See the module documentation. Async-signal-safe.
#[derive(Debug)]
pub struct Bell {
    tickets: AtomicU32,
    sleepers: AtomicU32,
}

/// What a thread has heard of a [`Bell`]. The default is that of a new bell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ticket(u32);

impl Ticket {
    /// Whether the bell was stopped when it was drawn.
    pub fn is_stopped(self) -> bool {
        self.0 & STOPPED != 0
    }
}

impl Bell {
    /// A bell that has not rung.
    pub fn new() -> Bell {
        Bell { tickets: AtomicU32::new(0), sleepers: AtomicU32::new(0) }
    }

    /// Draws a ticket, before looking for work.
    pub fn ticket(&self) -> Ticket {
        Ticket(self.tickets.load(Ordering::SeqCst))
    }

    /// Whether the bell is stopped.
    pub fn is_stopped(&self) -> bool {
        self.ticket().is_stopped()
    }

    /// Announces work for one thread: wakes one, if any sleeps. One that [pauses](Bell::pause) takes
    /// the wake and sleeps on, so only a bell with a single thread may be paused on.
    pub fn ring(&self) {
        self.ring_for(1);
    }

    /// Announces something to all threads.
    pub fn ring_all(&self) {
        self.ring_for(u32::MAX);
    }

    fn ring_for(&self, sleepers: u32) {
        // Also a release: a thread that draws the new ticket sees the work.
        self.tickets.fetch_add(RING, Ordering::SeqCst);
        self.wake(sleepers);
    }

    /// Tells all threads to end.
    pub fn stop(&self) {
        // Also a release, as in `ring_for`.
        self.tickets.fetch_or(STOPPED, Ordering::SeqCst);
        self.wake(u32::MAX);
    }

    fn wake(&self, sleepers: u32) {
        sync::in_one_order();
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            sync::wake(&self.tickets, sleepers);
        }
    }

    /// Sleeps unless the bell rang or was stopped since `ticket` was drawn; at most `timeout`, or
    /// less if woken spuriously.
    pub fn sleep(&self, ticket: Ticket, timeout: Option<Duration>) {
        debug_assert!(!ticket.is_stopped(), "nothing would wake it");
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        sync::in_one_order();
        sync::wait(&self.tickets, ticket.0, timeout);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Waits until the bell has rung since `heard`, which is advanced, or for `timeout`. Returns
    /// false if the bell is stopped.
    pub fn wait(&self, heard: &mut Ticket, timeout: Option<Duration>) -> bool {
        let mut left = Left::new(timeout);
        loop {
            let now = self.ticket();
            if now.is_stopped() {
                return false;
            }
            let has_rung = std::mem::replace(heard, now) != now;
            if has_rung || left.is_over() {
                return true;
            }
            self.sleep(now, left.duration);
        }
    }

    /// Sleeps for `duration`, no matter whether the bell rings. Returns false if it is stopped.
    pub fn pause(&self, duration: Duration) -> bool {
        let mut left = Left::new(Some(duration));
        loop {
            let now = self.ticket();
            if now.is_stopped() || left.is_over() {
                return !now.is_stopped();
            }
            self.sleep(now, left.duration);
        }
    }
}

impl Default for Bell {
    fn default() -> Bell {
        Bell::new()
    }
}

/// What is left of a timeout.
struct Left {
    /// `None` without a timeout, and if it exceeds the range of the clock.
    end: Option<Instant>,
    duration: Option<Duration>,
}

impl Left {
    fn new(timeout: Option<Duration>) -> Left {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Left { end, duration: timeout }
    }

    fn is_over(&mut self) -> bool {
        self.duration = self.end.map(|end| end.saturating_duration_since(Instant::now()));
        self.duration == Some(Duration::ZERO)
    }
}
