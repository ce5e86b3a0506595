//! Futex waits, and a mutex that a fault handler may take.
//!
//! [`Mutex`] is three states on a futex: it never allocates, never poisons, and uses no
//! thread-local storage, so it may be taken inside a signal handler, provided that no thread
//! touches mapped memory while holding it. (`parking_lot` allocates when it parks; `std` consults
//! the panic count.)

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex::{self, Flags};

/// For words that only threads of this process wait on; without it, those of every process that
/// maps the word.
const PROCESS: Flags = Flags::PRIVATE;
const SHARED: Flags = Flags::empty();

/// Sleeps while `*word == expected`; returns on a wake-up, a changed value, a signal or the
/// timeout.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    wait_in(PROCESS, word, expected, timeout);
}

/// As [`wait`], on a word in memory that several processes share.
pub fn wait_shared(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    wait_in(SHARED, word, expected, timeout);
}

fn wait_in(flags: Flags, word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    // A timeout beyond the range of the clock is none.
    let limit = timeout.and_then(|timeout| timeout.try_into().ok());
    // Every reason to return is one to look at the word again.
    let _ = futex::wait(word, flags, expected, limit.as_ref());
}

/// Wakes up to `count` threads waiting on `word`.
pub fn wake(word: &AtomicU32, count: u32) {
    wake_in(PROCESS, word, count);
}

/// As [`wake`], for threads in [`wait_shared`].
pub fn wake_shared(word: &AtomicU32, count: u32) {
    wake_in(SHARED, word, count);
}

fn wake_in(flags: Flags, word: &AtomicU32, count: u32) {
    // Fails only for an address that is not mapped.
    let _ = futex::wake(word, flags, count.min(i32::MAX as u32));
}

const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;
const CONTENDED: u32 = 2;

/// A mutex that is safe to take in a fault handler. See the module documentation.
#[derive(Default)]
pub struct Mutex<T: ?Sized> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the mutex hands out one reference at a time.
unsafe impl<T: ?Sized + Send> Send for Mutex<T> {}
// SAFETY: as above; `T: Send` because the value moves between the threads that lock it.
unsafe impl<T: ?Sized + Send> Sync for Mutex<T> {}

impl<T> Mutex<T> {
    /// An unlocked mutex.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex { state: AtomicU32::new(UNLOCKED), value: UnsafeCell::new(value) }
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Takes the lock, sleeping if necessary.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        // Acquire pairs with the release in `drop`.
        if self
            .state
            .compare_exchange(UNLOCKED, LOCKED, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            self.lock_contended();
        }
        MutexGuard { mutex: self }
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        // Acquire pairs with the release in `drop`.
        self.state
            .compare_exchange(UNLOCKED, LOCKED, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
            // Created only on success: dropping a guard releases the lock.
            .then(|| MutexGuard { mutex: self })
    }

    /// Releases the lock in a forked child, where the thread that may have held it does not exist.
    /// The guarded value is as that thread left it.
    ///
    /// # Safety
    /// The calling thread is the only one of a process just forked, and does not hold the lock
    /// itself.
    pub unsafe fn reset_in_child(&self) {
        self.state.store(UNLOCKED, Ordering::Relaxed);
    }

    #[cold]
    fn lock_contended(&self) {
        for _ in 0..100 {
            // Acquire pairs with the release in `drop`.
            if self.state.load(Ordering::Relaxed) == UNLOCKED
                && self
                    .state
                    .compare_exchange(UNLOCKED, LOCKED, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return;
            }
            std::hint::spin_loop();
        }
        // Acquire pairs with the release in `drop`; CONTENDED makes the holder wake us.
        while self.state.swap(CONTENDED, Ordering::Acquire) != UNLOCKED {
            wait(&self.state, CONTENDED, None);
        }
    }
}

/// The lock, held by this thread.
pub struct MutexGuard<'a, T: ?Sized> {
    mutex: &'a Mutex<T>,
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard exists only while this thread holds the lock.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed uniquely.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T: ?Sized> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        // Release pairs with the acquires in `lock`.
        if self.mutex.state.swap(UNLOCKED, Ordering::Release) == CONTENDED {
            wake(&self.mutex.state, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutex_counts_from_many_threads() {
        let counter = Mutex::new(0u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        *counter.lock() += 1;
                    }
                });
            }
        });
        assert_eq!(*counter.lock(), 40_000);
    }

    #[test]
    fn try_lock_fails_while_held() {
        let mutex = Mutex::new(());
        let held = mutex.lock();
        assert!(mutex.try_lock().is_none());
        assert!(mutex.try_lock().is_none(), "the first one opened a lock that another holds");
        drop(held);
        assert!(mutex.try_lock().is_some());
    }
}
