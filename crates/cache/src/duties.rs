//! What the calling thread is in the middle of, should it turn out to need a frame.
//!
//! A device's data may be memory of the same cache: writing a page to it, or reading one, then needs frames. A
//! thread that waits for a frame relies on others to free some, so two kinds of threads must be told apart:
//! * A thread that *writes back* frees frames itself. Were it to wait for others, the evictor would wait for
//!   itself, and a flush for an evictor that cannot take the pages which the flush is cleaning. So it takes a frame
//!   of the reserve, evicts what other stores hold, and is refused where that yields nothing.
//! * A thread that *loads* holds frames that no page has yet. They come back when the load ends, which others wait for;
//!   unless the thread waits as well.
//!
//! Both are known for the thread that calls the device. A device that touches memory of the same cache from threads
//! of its own while the caller waits for them is not known here.

//!
//! # Heights
//! The *height* of a store is 0 where its device needs no memory of the cache, and else one more than that of the
//! highest store which its device touches. It is learnt: when a thread that calls the device of one store needs a
//! frame for another, the first is higher. Two rules follow:
//! * a thread that writes a store back evicts dirty pages of lower stores only, and clean ones of any;
//! * the lower a store, the more of the reserve is its.
//!
//! So by induction there is a frame that can be freed, from the lowest stores on, as long as the reserve has frames for each
//! height: up to four devices in a row in a pool of 512 frames, none in one of fewer than 32. Beyond that, and where devices lead in
//! a circle, a write that finds no frame fails after ten seconds; its page stays dirty.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// Higher stores count as this high.
const MOST_HEIGHT: u32 = 8;

/// How high a store is.
#[derive(Debug, Default)]
pub(crate) struct Height(AtomicU32);

impl Height {
    pub fn get(&self) -> u32 {
        // Relaxed: a share that is a moment too large or too small is tried again.
        self.0.load(Relaxed)
    }

    /// The device of this store touches memory of another one.
    pub fn is_above(&self, below: u32) {
        self.0.fetch_max((below + 1).min(MOST_HEIGHT), Relaxed);
    }
}

/// A call of a device that a thread is in, on its stack.
struct Call {
    height: *const Height,
    writes_back: bool,
    outer: *const Call,
}

thread_local! {
    static INNERMOST: Cell<*const Call> = const { Cell::new(ptr::null()) };
    static LOADING_FRAMES: Cell<usize> = const { Cell::new(0) };
}

fn calling<T>(height: &Height, writes_back: bool, work: impl FnOnce() -> T) -> T {
    struct End(*const Call);
    impl Drop for End {
        fn drop(&mut self) {
            INNERMOST.set(self.0);
        }
    }
    let this = Call { height, writes_back, outer: INNERMOST.get() };
    let _end = End(this.outer);
    INNERMOST.set(&raw const this);
    work()
}

/// Runs `work`, which writes pages of the store of this height to its device.
pub(crate) fn writing_back<T>(height: &Height, work: impl FnOnce() -> T) -> T {
    calling(height, true, work)
}

/// Looks at the height of the store whose device the thread is calling, and which is another than the one of height `own`: what
/// a store needs for itself while its device runs, such as the frames of a batch, makes it no higher.
pub(crate) fn with_caller<T>(own: &Height, look: impl FnOnce(&Height) -> T) -> Option<T> {
    let mut innermost = INNERMOST.get();
    // SAFETY: what is linked lies in frames of this thread's own stack that `calling` has not left.
    while let Some(call) = unsafe { innermost.as_ref() } {
        if !ptr::eq(call.height, own) {
            // SAFETY: `calling` has borrowed it for as long.
            return Some(look(unsafe { &*call.height }));
        }
        innermost = call.outer;
    }
    None
}

/// Whether the thread is in a call of a device.
pub(crate) fn is_in_a_call() -> bool {
    !INNERMOST.get().is_null()
}

/// Of the store that the thread is writing pages of back, the innermost if there are several.
pub(crate) fn writing() -> Option<u32> {
    let mut innermost = INNERMOST.get();
    // SAFETY: as in `with_caller`.
    while let Some(call) = unsafe { innermost.as_ref() } {
        if call.writes_back {
            // SAFETY: as in `with_caller`.
            return Some(unsafe { &*call.height }.get());
        }
        innermost = call.outer;
    }
    None
}

/// Frames that the thread has taken for pages it is loading.
pub(crate) fn frames_in_hand() -> usize {
    LOADING_FRAMES.get()
}

/// The thread begins to load so many pages.
pub(crate) fn begin_loading(frames: usize) {
    LOADING_FRAMES.set(LOADING_FRAMES.get() + frames);
}

/// The loads of so many pages have ended.
pub(crate) fn end_loading(frames: usize) {
    LOADING_FRAMES.set(LOADING_FRAMES.get() - frames);
}

/// Runs `work`, which loads so many pages of the store of this height.
pub(crate) fn loading<T>(height: &Height, frames: usize, work: impl FnOnce() -> T) -> T {
    struct End(usize);
    impl Drop for End {
        fn drop(&mut self) {
            end_loading(self.0);
        }
    }
    begin_loading(frames);
    let _end = End(frames);
    calling(height, false, work)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn duties_nest_and_end_with_a_panic() {
        let [first, second] = [Height::default(), Height::default()];
        first.is_above(second.get());
        assert!(writing().is_none() && !is_in_a_call());
        let ended = std::panic::catch_unwind(|| {
            writing_back(&first, || {
                assert_eq!(writing(), Some(1));
                loading(&second, 3, || {
                    assert_eq!(with_caller(&second, |height| ptr::eq(height, &first)), Some(true));
                    assert_eq!(with_caller(&first, |height| ptr::eq(height, &second)), Some(true));
                    assert_eq!(writing(), Some(1));
                    writing_back(&second, || {
                        assert_eq!((writing(), frames_in_hand()), (Some(0), 3));
                        std::panic::resume_unwind(Box::new(()));
                    })
                })
            })
        });
        assert!(ended.is_err() && writing().is_none());
        assert_eq!(frames_in_hand(), 0);
    }
}
