//! Atomics and waiting, real or modelled: code that uses only this module runs unchanged under loom
//! (`--cfg loom`, see the `loom_models` of the modules).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, fence};

pub(crate) use waiting::{wait_shared, wake_all_shared};

/// A SeqCst fence behind a SeqCst read-modify-write.
#[inline]
pub(crate) fn fence_behind_locked_instruction() {
    // On x86 a locked instruction is a full fence for the CPU, twice as fast as `mfence`.
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    #[cfg(any(not(target_arch = "x86_64"), loom))]
    fence(std::sync::atomic::Ordering::SeqCst);
}

/// Must be called before storing bytes to a page that may have had another owner: a reader that
/// loads one of the bytes then sees the change that took the page from that owner. No instruction
/// on hardware that keeps stores in order, such as x86.
#[inline]
pub fn before_bytes_are_stored() {
    // Release: pairs with the fence in `image_words::has_layout`.
    fence(std::sync::atomic::Ordering::Release);
}

#[cfg(not(loom))]
mod waiting {
    pub(crate) use aquifer_sys::futex::wait_shared;
    use std::sync::atomic::AtomicU32;

    /// Wakes all waiters on `word`, in any process.
    pub(crate) fn wake_all_shared(word: &AtomicU32) {
        aquifer_sys::futex::wake_shared(word, u32::MAX);
    }
}

/// A futex for loom: checking the word and going to sleep is one step with respect to a waker, and
/// there are no time-outs. So a lost wake-up ends the model as a deadlock.
#[cfg(loom)]
mod waiting {
    use std::sync::atomic::Ordering::{Relaxed, SeqCst};
    use std::time::Duration;

    use loom::sync::{Condvar, Mutex};

    use super::{AtomicU32, fence};

    struct Futexes {
        /// The number of wake-ups.
        wakes: Mutex<u64>,
        woken: Condvar,
    }

    loom::lazy_static! {
        static ref FUTEXES: Futexes = Futexes { wakes: Mutex::new(0), woken: Condvar::new() };
    }

    pub(crate) fn wait_shared(word: &AtomicU32, expected: u32, _timeout: Option<Duration>) {
        let mut wakes = FUTEXES.wakes.lock().unwrap();
        let before = *wakes;
        // The kernel has a full barrier between queueing the sleeper and loading the word.
        fence(SeqCst);
        if word.load(Relaxed) != expected {
            return;
        }
        while *wakes == before {
            wakes = FUTEXES.woken.wait(wakes).unwrap();
        }
    }

    pub(crate) fn wake_all_shared(_word: &AtomicU32) {
        *FUTEXES.wakes.lock().unwrap() += 1;
        FUTEXES.woken.notify_all();
    }
}
