//! Atomics, a mutex and waiting, real or modelled: code that uses only this module runs unchanged
//! under loom (`--cfg loom`, see the `loom_models` of the modules).
//!
//! Loom orders SeqCst *fences* as the language does, but treats SeqCst accesses as acquire and
//! release. An algorithm that needs the single order of SeqCst accesses calls [`in_one_order`] next
//! to them: a fence under loom, nothing otherwise.

#[cfg(loom)]
pub(crate) use modelled::{
    AtomicU32, AtomicU64, AtomicUsize, Mutex, Ordering, UnsafeCell, wait, wake,
};
#[cfg(not(loom))]
pub(crate) use real::{AtomicU32, AtomicU64, AtomicUsize, Mutex, Ordering, UnsafeCell, wait, wake};

/// Belongs before a SeqCst load, or after a SeqCst store, whose place in the single order matters.
#[inline(always)]
pub(crate) fn in_one_order() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
}

#[cfg(not(loom))]
mod real {
    pub(crate) use aquifer_sys::futex::{Mutex, wait, wake};
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

    /// The standard library's with the interface of loom's, which checks accesses for races.
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub fn new(value: T) -> UnsafeCell<T> {
            UnsafeCell(std::cell::UnsafeCell::new(value))
        }

        pub fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
            read(self.0.get())
        }

        pub fn with_mut<R>(&self, change: impl FnOnce(*mut T) -> R) -> R {
            change(self.0.get())
        }
    }
}

/// The futex for loom has no time-outs and no spurious wake-ups, so a lost wake-up ends the model
/// as a deadlock.
#[cfg(loom)]
mod modelled {
    use std::time::Duration;

    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
    use loom::sync::{Condvar, MutexGuard};

    /// Loom's mutex with the interface of `aquifer_sys::futex::Mutex`.
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
        /// Number of wake calls.
        wakes: loom::sync::Mutex<u64>,
        woken: Condvar,
    }

    loom::lazy_static! {
        static ref FUTEXES: Futexes =
            Futexes { wakes: loom::sync::Mutex::new(0), woken: Condvar::new() };
    }

    /// Checking the word and going to sleep is atomic with respect to `wake`. With a time-out it
    /// returns at once, as if the time had passed.
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
