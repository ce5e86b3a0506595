//! Atomics and waiting, real or modelled: code built on this module alone runs unchanged under loom
//! (`--cfg loom`, see `loom_models`).
//!
//! Loom orders SeqCst *fences* as the language does, but treats SeqCst accesses as acquire and
//! release. An algorithm that needs the single order of SeqCst accesses calls [`in_one_order`] next
//! to them: a fence under loom, nothing otherwise.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

/// Belongs before a SeqCst load, or after a SeqCst store, whose place in the single order matters.
#[inline(always)]
pub(crate) fn in_one_order() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}

#[cfg(not(loom))]
mod waiting {
    use super::*;

    /// Sleeps until the low half of `word` differs from that of `seen`, or until a spurious
    /// wake-up.
    pub(crate) fn wait(word: &AtomicU64, seen: u64) {
        aquifer_sys::futex::wait(low_half(word), seen as u32, None);
    }

    /// Wakes all threads that wait on `word`.
    pub(crate) fn wake_all(word: &AtomicU64) {
        aquifer_sys::futex::wake(low_half(word), u32::MAX);
    }

    fn low_half(word: &AtomicU64) -> &AtomicU32 {
        let half = std::ptr::from_ref(word)
            .cast::<u32>()
            .wrapping_add(cfg!(target_endian = "big") as usize);
        // SAFETY: half of a live, aligned atomic word. The kernel reads it; nothing writes through
        // it.
        unsafe { AtomicU32::from_ptr(half.cast_mut()) }
    }

    pub(crate) use aquifer_sys::futex::{wait as wait_u32, wake as wake_u32};

    /// Spins once while another thread finishes something short.
    #[inline]
    pub(crate) fn spin() {
        std::hint::spin_loop();
    }

    /// Yields the core to other threads.
    pub(crate) fn yield_now() {
        std::thread::yield_now();
    }
}

/// A futex for loom. Checking the word and going to sleep is one step with respect to a waker.
/// Sleepers are woken only by a wake of their own word, never by a time-out. So a lost wake-up ends
/// the model as a deadlock.
#[cfg(loom)]
mod waiting {
    use std::time::Duration;

    use loom::sync::{Condvar, Mutex};

    use super::*;

    #[derive(Default)]
    struct Sleepers {
        drawn: u64,
        /// The number of each sleeper with the address of its word, in the order of arrival.
        asleep: Vec<(u64, usize)>,
    }

    struct Futexes {
        sleepers: Mutex<Sleepers>,
        changed: Condvar,
    }

    loom::lazy_static! {
        static ref FUTEXES: Futexes =
            Futexes { sleepers: Mutex::new(Sleepers::default()), changed: Condvar::new() };
    }

    fn sleep_while(address: usize, unchanged: impl FnOnce() -> bool) {
        let mut sleepers = FUTEXES.sleepers.lock().unwrap();
        // The kernel has a full barrier between queueing the sleeper and reading the word.
        fence(Ordering::SeqCst);
        if !unchanged() {
            return;
        }
        sleepers.drawn += 1;
        let me = sleepers.drawn;
        sleepers.asleep.push((me, address));
        while sleepers.asleep.iter().any(|&(number, _)| number == me) {
            sleepers = FUTEXES.changed.wait(sleepers).unwrap();
        }
    }

    fn wake(address: usize, mut count: u32) {
        let mut sleepers = FUTEXES.sleepers.lock().unwrap();
        sleepers.asleep.retain(|&(_, word)| {
            let wakes = word == address && count > 0;
            count -= u32::from(wakes);
            !wakes
        });
        FUTEXES.changed.notify_all();
    }

    pub(crate) fn wait(word: &AtomicU64, seen: u64) {
        sleep_while(std::ptr::from_ref(word) as usize, || {
            word.load(Ordering::Relaxed) as u32 == seen as u32
        });
    }

    pub(crate) fn wake_all(word: &AtomicU64) {
        wake(std::ptr::from_ref(word) as usize, u32::MAX);
    }

    pub(crate) fn wait_u32(word: &AtomicU32, seen: u32, _timeout: Option<Duration>) {
        sleep_while(std::ptr::from_ref(word) as usize, || word.load(Ordering::Relaxed) == seen);
    }

    pub(crate) fn wake_u32(word: &AtomicU32, count: u32) {
        wake(std::ptr::from_ref(word) as usize, count);
    }

    pub(crate) fn spin() {
        loom::thread::yield_now();
    }

    pub(crate) fn yield_now() {}
}

pub(crate) use waiting::{spin, wait, wait_u32, wake_all, wake_u32, yield_now};
