//! Atomics, a mutex and waiting, real or modelled: what is built on this module alone runs unchanged under loom
//! (`--cfg loom`, see the `loom_models` of the modules).

#[cfg(loom)]
pub(crate) use modelled::{AtomicU32, AtomicU64, AtomicUsize, Mutex, Ordering, wait, wake};
#[cfg(not(loom))]
pub(crate) use real::{AtomicU32, AtomicU64, AtomicUsize, Mutex, Ordering, wait, wake};

#[cfg(not(loom))]
mod real {
    pub(crate) use aquifer_sys::futex::{Mutex, wait, wake};
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
}

/// A futex for loom has no time-outs and no spurious wake-ups: so a wake-up that is lost ends the model as a
/// deadlock.
#[cfg(loom)]
mod modelled {
    use std::time::Duration;

    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
    use loom::sync::{Condvar, MutexGuard};

    /// Loom's mutex with the interface of ours.
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Mutex<T> {
            Mutex(loom::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }

        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    struct Futexes {
        /// How often somebody was woken.
        wakes: loom::sync::Mutex<u64>,
        woken: Condvar,
    }

    loom::lazy_static! {
        static ref FUTEXES: Futexes =
            Futexes { wakes: loom::sync::Mutex::new(0), woken: Condvar::new() };
    }

    /// Looking at the word and going to sleep is one step towards a waker. With a time-out it does not sleep at all:
    /// the time is over.
    pub(crate) fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
        if timeout.is_some() {
            return;
        }
        let mut wakes = FUTEXES.wakes.lock().unwrap();
        let before = *wakes;
        if word.load(Ordering::SeqCst) != expected {
            return;
        }
        while *wakes == before {
            wakes = FUTEXES.woken.wait(wakes).unwrap();
        }
    }

    pub(crate) fn wake(_word: &AtomicU32, _count: u32) {
        *FUTEXES.wakes.lock().unwrap() += 1;
        FUTEXES.woken.notify_all();
    }
}
