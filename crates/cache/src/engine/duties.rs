//! The device calls that the calling thread is inside of, in case it needs a frame.
//!
//! A device's data may be memory of the same cache: writing a page to it, or reading one, then
//! needs frames. A thread that waits for a frame relies on other threads to free some, so two kinds
//! of threads must be distinguished:
//! * A thread that *writes back* frees frames itself. If it waited for other threads, the evictor
//!   would wait for itself, and a flush for an evictor that cannot take the pages that the flush is
//!   cleaning. So it takes a frame of the reserve, evicts frames of other stores, and fails if that
//!   yields nothing.
//! * A thread that *loads* holds frames that no page has yet. They become available when the load
//!   ends, and other threads wait for that; unless the loading thread waits as well.
//!
//! Both are known for the thread that calls the device. If a device touches memory of the same
//! cache from its own threads while the caller waits for them, that is not detected here.
//!
//! # Heights
//! The *height* of a store is 0 if its device needs no memory of the cache, and otherwise one more
//! than that of the highest store that its device touches. It is learnt: when a thread that calls
//! the device of one store needs a frame for another, the first is higher. Two rules follow:
//! * a thread that writes a store back evicts dirty pages only of lower stores, but clean pages of
//!   any;
//! * the lower a store, the larger the part of the reserve that it may use.
//!
//! By induction from the lowest stores there is always a frame that can be freed, as long as the
//! reserve has frames for each height: enough for up to four stacked devices in a pool of 512
//! frames, none in a pool of fewer than 32. Beyond that, and if devices form a cycle, a write that
//! finds no frame fails after ten seconds; its page stays dirty.
//!
//! # With serving threads
//! A fault that another thread serves does not bring its duties along, so none of this holds. Such a cache notes the threads
//! that are inside of calls of its devices ([`Callers`]); if one of them uses memory of the cache, the store whose device it
//! calls is *under itself*, and loads of the store fail from then on.

use std::cell::Cell;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32};

use aquifer_sys::futex::Mutex;
use aquifer_sys::thread::this_thread;

use crate::frames::FramePool;

/// Higher stores count as this high.
const MOST_HEIGHT: u32 = 8;

/// The height of a store.
#[derive(Default)]
pub(crate) struct Height {
    above: AtomicU32,
    is_under_itself: Arc<AtomicBool>,
    /// Those of its cache, if that has serving threads.
    callers: Option<Arc<Callers>>,
}

impl Height {
    pub fn new(callers: Option<Arc<Callers>>) -> Height {
        Height { callers, ..Height::default() }
    }

    pub fn get(&self) -> u32 {
        // Relaxed: a share of the reserve computed from a stale height is retried.
        self.above.load(Relaxed)
    }

    /// Records that this store's device touches memory of a store of height `below`.
    pub fn is_above(&self, below: u32) {
        self.above.fetch_max((below + 1).min(MOST_HEIGHT), Relaxed);
    }

    /// Returns `true` if the store's device was found to use memory of a cache that refuses this.
    pub fn is_under_itself(&self) -> bool {
        // Acquire pairs with the release in `refuse`; a call of the device finds what it made true.
        self.is_under_itself.load(Acquire)
    }

    /// Returns `true` if the calling thread is inside a call of a device of this store's cache, which refuses that.
    pub fn is_in_a_refused_call(&self) -> bool {
        self.callers.as_ref().is_some_and(|callers| is_in_a_call() && callers.refuse(this_thread()))
    }
}

/// The threads that are inside of calls of a cache's devices, by the kernel's numbers: each with the store's mark.
#[derive(Default)]
pub(crate) struct Callers(Mutex<Vec<(i32, Arc<AtomicBool>)>>);

impl Callers {
    fn enter(&self, mark: Arc<AtomicBool>) {
        self.0.lock().push((this_thread(), mark));
    }

    /// Ends the thread's innermost call.
    fn leave(&self) {
        let thread = this_thread();
        let mut inside = self.0.lock();
        let innermost = inside.iter().rposition(|(caller, _)| *caller == thread);
        inside.remove(innermost.expect("entered before"));
    }

    /// Marks the stores whose devices a thread is calling, as it uses memory of the cache. Returns false if it calls none.
    pub fn refuse(&self, thread: i32) -> bool {
        let inside = self.0.lock();
        let calls = inside.iter().filter(|(caller, _)| *caller == thread);
        // Release pairs with the acquire in `is_under_itself`.
        calls.map(|(_, mark)| mark.store(true, Release)).count() > 0
    }
}

/// A device call that a thread is inside of, on its stack.
struct Call {
    height: *const Height,
    writes_back: bool,
    /// The pool of the frames that the call has taken for pages being loaded.
    pool: *const FramePool,
    frames: Cell<usize>,
    outer: *const Call,
}

thread_local! {
    static INNERMOST: Cell<*const Call> = const { Cell::new(ptr::null()) };
}

fn calling<T>(call: Call, work: impl FnOnce() -> T) -> T {
    struct End(*const Call);
    impl Drop for End {
        fn drop(&mut self) {
            leave();
            INNERMOST.set(self.0);
        }
    }
    let _end = End(call.outer);
    INNERMOST.set(&raw const call);
    enter();
    work()
}

/// Notes that the thread is in its innermost call.
fn enter() {
    with_callers(|callers, height| callers.enter(height.is_under_itself.clone()));
}

/// Notes that the thread is not in its innermost call.
fn leave() {
    with_callers(|callers, _| callers.leave());
}

fn with_callers(note: impl FnOnce(&Callers, &Height)) {
    let Some(call) = calls().next() else { return };
    // SAFETY: the call borrows the height for as long as it is linked.
    let height = unsafe { &*call.height };
    if let Some(callers) = &height.callers {
        note(callers, height);
    }
}

/// The device calls that the thread is inside of, innermost first.
fn calls<'a>() -> impl Iterator<Item = &'a Call> {
    // SAFETY: every linked call lies in a frame of this thread's stack that `calling` has not left,
    // and will not leave before the caller, a function of this module, returns.
    let at = |call: *const Call| unsafe { call.as_ref() };
    std::iter::successors(at(INNERMOST.get()), move |call| at(call.outer))
}

/// Runs `work`, which writes pages of the store of this height to its device.
pub(crate) fn writing_back<T>(height: &Height, work: impl FnOnce() -> T) -> T {
    let (outer, frames) = (INNERMOST.get(), Cell::new(0));
    calling(Call { height, writes_back: true, pool: ptr::null(), frames, outer }, work)
}

/// Runs `work`, which loads pages of the store of this height; `frames` frames of `pool` are
/// already taken.
pub(crate) fn loading<T>(
    height: &Height,
    pool: *const FramePool,
    frames: usize,
    work: impl FnOnce() -> T,
) -> T {
    let (outer, frames) = (INNERMOST.get(), Cell::new(frames));
    calling(Call { height, writes_back: false, pool, frames, outer }, work)
}

/// Runs `work`, code of the application, which the thread's innermost device call called back: as if
/// that call had not been made.
pub(crate) fn outside<T>(work: impl FnOnce() -> T) -> T {
    struct Return(*const Call);
    impl Drop for Return {
        fn drop(&mut self) {
            INNERMOST.set(self.0);
            enter();
        }
    }
    leave();
    let _return = Return(INNERMOST.get());
    INNERMOST.set(calls().next().map_or(ptr::null(), |call| call.outer));
    work()
}

/// Adds frames to those that the thread's current load has taken.
pub(crate) fn takes(frames: usize) {
    if let Some(call) = calls().next() {
        call.frames.set(call.frames.get() + frames);
    }
}

/// Subtracts frames of pages that the thread's current load has completed.
pub(crate) fn gives_back(frames: usize) {
    if let Some(call) = calls().next() {
        call.frames.set(call.frames.get().saturating_sub(frames));
    }
}

/// Calls `look` with the height of the innermost other store whose device the thread is calling.
/// `own` is the store that needs a frame: what it needs for itself while its device runs, such as
/// the frames of a batch, does not raise its height.
pub(crate) fn with_caller<T>(own: &Height, look: impl FnOnce(&Height) -> T) -> Option<T> {
    let caller = calls().find(|call| !ptr::eq(call.height, own))?;
    // SAFETY: the call borrows the height for as long as it is linked.
    Some(look(unsafe { &*caller.height }))
}

/// Whether the thread is inside a device call.
pub(crate) fn is_in_a_call() -> bool {
    !INNERMOST.get().is_null()
}

/// The height of the store that the thread is writing back; the innermost if there are several.
pub(crate) fn writing() -> Option<u32> {
    let call = calls().find(|call| call.writes_back)?;
    // SAFETY: the call borrows the height for as long as it is linked.
    Some(unsafe { &*call.height }.get())
}

/// Calls `visit` for each load on this thread's stack, with the pool of its frames (which the load
/// borrows) and the number of frames it holds.
pub(crate) fn for_each_load(mut visit: impl FnMut(*const FramePool, usize)) {
    calls()
        .filter(|call| !call.pool.is_null())
        .for_each(|call| visit(call.pool, call.frames.get()));
}

/// The number of frames of a pool that the thread holds for pages it is loading.
pub(crate) fn frames_in_hand(pool: *const FramePool) -> usize {
    calls().filter(|call| ptr::eq(call.pool, pool)).map(|call| call.frames.get()).sum()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn duties_nest_and_end_with_a_panic() {
        let [first, second] = [Height::default(), Height::default()];
        let pools = [1, 2].map(ptr::without_provenance::<FramePool>);
        first.is_above(second.get());
        assert!(writing().is_none() && !is_in_a_call());
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            writing_back(&first, || {
                assert_eq!(writing(), Some(1));
                loading(&second, pools[0], 3, || {
                    takes(2);
                    gives_back(1);
                    assert_eq!(outside(|| (writing(), frames_in_hand(pools[0]))), (Some(1), 0));
                    assert_eq!(with_caller(&second, |height| ptr::eq(height, &first)), Some(true));
                    assert_eq!(with_caller(&first, |height| ptr::eq(height, &second)), Some(true));
                    assert_eq!(writing(), Some(1));
                    writing_back(&second, || {
                        assert_eq!((writing(), pools.map(frames_in_hand)), (Some(0), [4, 0]));
                        loading(&first, pools[1], 7, || {
                            assert_eq!(pools.map(frames_in_hand), [4, 7]);
                        });
                        std::panic::resume_unwind(Box::new(()));
                    })
                })
            })
        }));
        assert!(ended.is_err() && writing().is_none());
        assert_eq!(pools.map(frames_in_hand), [0, 0]);
    }
}
