//! What the calling thread is in the middle of, should it turn out to need a frame.
//!
//! A device's data may be memory of the same cache: writing a page to it, or reading one, then needs frames. A
//! thread that waits for a frame relies on others to free some, so two kinds of threads must be told apart:
//! * A thread that *writes back* frees frames itself. Were it to wait for others, the evictor would wait for
//!   itself, and a flush for an evictor that cannot take the pages which the flush is cleaning. So it takes a frame
//!   of the reserve, evicts what other stores hold, and is refused where that yields nothing.
//! * A thread that *loads* holds frames that no page has yet, and one that *evicts* holds the victims it was given.
//!   They come back when the load or the eviction ends, which others wait for; unless the thread waits as well.
//!
//! Both are known for the thread that calls the device. A device that touches memory of the same cache from threads
//! of its own while the caller waits for them is not known here.

use std::cell::Cell;
use std::ptr;

/// A write-back that a thread is in, on its stack.
struct WriteBack {
    store: *const (),
    outer: *const WriteBack,
}

thread_local! {
    static INNERMOST: Cell<*const WriteBack> = const { Cell::new(ptr::null()) };
    static LOADING_FRAMES: Cell<usize> = const { Cell::new(0) };
    static VICTIMS: Cell<usize> = const { Cell::new(0) };
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Runs `work`, which writes pages of a store, known by its address, to its device.
pub(crate) fn writing_back<T>(store: *const (), work: impl FnOnce() -> T) -> T {
    struct End(*const WriteBack);
    impl Drop for End {
        fn drop(&mut self) {
            INNERMOST.set(self.0);
        }
    }
    let this = WriteBack { store, outer: INNERMOST.get() };
    let _end = End(this.outer);
    INNERMOST.set(&raw const this);
    deeper(work)
}

/// How many calls of devices the thread is in, each made on behalf of the one before.
pub(crate) fn depth() -> u32 {
    DEPTH.get()
}

/// Runs `work`, which calls a device.
fn deeper<T>(work: impl FnOnce() -> T) -> T {
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get() - 1);
        }
    }
    DEPTH.set(DEPTH.get() + 1);
    let _end = End;
    work()
}

/// Whether the thread is writing pages back, of any store.
pub(crate) fn is_writing_back() -> bool {
    !INNERMOST.get().is_null()
}

/// Whether the thread is writing pages of this store back.
pub(crate) fn is_writing_back_to(store: *const ()) -> bool {
    let mut innermost = INNERMOST.get();
    // SAFETY: what is linked lies in frames of this thread's own stack that `writing_back` has not left.
    while let Some(this) = unsafe { innermost.as_ref() } {
        if this.store == store {
            return true;
        }
        innermost = this.outer;
    }
    false
}

/// Frames that the thread has taken for pages it is loading, and victims that it has in hand.
pub(crate) fn frames_in_hand() -> usize {
    LOADING_FRAMES.get() + VICTIMS.get()
}

/// The thread was given so many victims.
pub(crate) fn begin_evicting(victims: usize) {
    VICTIMS.set(VICTIMS.get() + victims);
}

/// The frames of so many victims are free, or the policy's again.
pub(crate) fn end_evicting(victims: usize) {
    VICTIMS.set(VICTIMS.get() - victims);
}

/// The thread begins to load so many pages.
pub(crate) fn begin_loading(frames: usize) {
    LOADING_FRAMES.set(LOADING_FRAMES.get() + frames);
}

/// The loads of so many pages have ended.
pub(crate) fn end_loading(frames: usize) {
    LOADING_FRAMES.set(LOADING_FRAMES.get() - frames);
}

/// Runs `work`, which loads so many pages.
pub(crate) fn loading<T>(frames: usize, work: impl FnOnce() -> T) -> T {
    struct End(usize);
    impl Drop for End {
        fn drop(&mut self) {
            end_loading(self.0);
        }
    }
    begin_loading(frames);
    let _end = End(frames);
    deeper(work)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn duties_nest_and_end_with_a_panic() {
        let [first, second] = [&0u8, &1u8].map(|place| ptr::from_ref(place).cast());
        assert!(!is_writing_back());
        let ended = std::panic::catch_unwind(|| {
            writing_back(first, || {
                assert!(is_writing_back_to(first) && !is_writing_back_to(second));
                loading(3, || {
                    writing_back(second, || {
                        assert_eq!(depth(), 3);
                        assert!(is_writing_back_to(first) && is_writing_back_to(second));
                        assert_eq!(frames_in_hand(), 3);
                        std::panic::resume_unwind(Box::new(()));
                    })
                })
            })
        });
        assert!(ended.is_err() && !is_writing_back());
        assert_eq!((frames_in_hand(), depth()), (0, 0));
    }
}
