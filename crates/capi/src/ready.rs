//! Completions of asynchronous calls, by an eventfd.

use std::ffi::c_int;
use std::future::Future;
use std::os::fd::AsRawFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use aquifer::{Error, Ready};

use crate::call::{Failure, Result, always, call, system};
use crate::error::{AQ_NO_OFFSET, number_of};
use crate::memory::{Place, free, handle, places, usable};

/// A set of asynchronous calls under way, with a descriptor that is readable when one has completed.
pub struct aq_ready {
    ready: Arc<Ready<Result>>,
}

/// The completion of an asynchronous call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_completion {
    /// The token that was given to the call.
    pub token: u64,
    /// What the call would have returned: 0, or a negative number of errno(3).
    pub result: c_int,
    /// Of a failure, one of `AQ_KIND_…`; otherwise `AQ_KIND_NONE`.
    pub kind: c_int,
    /// Of a failure, the first byte concerned; otherwise, or if it concerns no place, `AQ_NO_OFFSET`.
    pub offset: u64,
    /// 0.
    pub reserved: u64,
}

/// Creates an empty set; `*ready` is null if it fails.
///
/// Threads: any. Errors: -EMFILE, -EINVAL. Frees: the caller, by `aq_ready_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_ready_new(ready: *mut *mut aq_ready) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(ready, "ready") }?;
        let ready = Ready::new().map_err(|error| system("eventfd(2)", error))?;
        place.give(aq_ready { ready: Arc::new(ready) });
        Ok(())
    })
}

/// Waits for all calls under way, then frees the set: no buffer is written to afterwards. Null is
/// fine; in a forked child it does not wait.
///
/// Threads: none may be in a call with this handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_ready_free(ready: *mut aq_ready) {
    always((), || {
        // SAFETY: documented.
        if let Some(set) = unsafe { usable(ready) } {
            // Fails only for a signal, which is no reason to give buffers back early.
            while !matches!(set.ready.wait(), Ok(false)) {
                set.ready.take(usize::MAX);
            }
        }
    });
    // SAFETY: documented.
    unsafe { free(ready) }
}

/// The descriptor of a set, for poll(2), epoll(7) or an event loop: readable when `aq_ready_take` may
/// have something. It belongs to the set: not to be read, written or closed. Negative if `ready` is
/// null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_ready_fd(ready: *mut aq_ready) -> c_int {
    // SAFETY: documented.
    match unsafe { handle(ready, "ready") } {
        Ok(ready) => ready.ready.fd().as_raw_fd(),
        Err(failure) => failure.keep(),
    }
}

/// The number of calls that were started and whose completions have not been taken. 0 if `ready` is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_ready_len(ready: *mut aq_ready) -> usize {
    // SAFETY: documented.
    unsafe { usable(ready) }.map_or(0, |set| set.ready.len())
}

/// Takes at most `room` completions, and puts their number into `*count`: 0 if none is there. Does
/// not wait. The failure of a call that has completed becomes this thread's last failure: for the texts
/// of all, take one at a time.
///
/// Threads: any; each completion is taken once. Errors: -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_ready_take(
    ready: *mut aq_ready,
    completions: *mut aq_completion,
    room: usize,
    count: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let ready = unsafe { handle(ready, "ready") }?;
        // SAFETY: documented.
        let (list, place) =
            unsafe { (places(completions, room, "completions")?, Place::new(count, "count")?) };
        let taken = ready.ready.take(room);
        place.put(taken.len());
        for (target, (token, result)) in list.iter_mut().zip(taken) {
            let failure = result.err().unwrap_or_default();
            target.write(aq_completion {
                token,
                kind: number_of(failure.kind),
                offset: failure.offset.unwrap_or(AQ_NO_OFFSET),
                result: if failure.errno == 0 { 0 } else { failure.keep() },
                reserved: 0,
            });
        }
        Ok(())
    })
}

/// Waits until a completion is there, or no call is under way: because none was started, or other
/// threads have taken all that completed.
///
/// Threads: any; if several wait, one of them may find nothing to take. A thread that waits for the
/// descriptor itself may miss what another takes: use this function where several threads take.
/// Errors: -EINTR after a signal, -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_ready_wait(ready: *mut aq_ready) -> c_int {
    call(|| {
        // SAFETY: documented.
        let ready = unsafe { handle(ready, "ready") }?;
        ready.ready.wait().map_err(|error| system("poll(2)", error))?;
        Ok(())
    })
}

/// Starts an asynchronous call and adds it to a set. If this fails, nothing was started that could use
/// the program's buffers later.
///
/// # Safety
/// As for [`handle`].
pub(crate) unsafe fn add<E: Into<Error> + 'static>(
    ready: *mut aq_ready,
    token: u64,
    start: impl FnOnce() -> Result<Box<dyn Future<Output = std::result::Result<(), E>> + Send>>,
) -> Result {
    // Before the start: in a forked child the set accepts nothing.
    // SAFETY: guaranteed by the caller.
    let ready = unsafe { handle(ready, "ready") }?;
    let future = Completes(Box::into_pin(start()?));
    Ok(ready.ready.add(token, future)?)
}

/// A call that completes, with a failure if it panics: its token must come.
struct Completes<E>(Pin<Box<dyn Future<Output = std::result::Result<(), E>> + Send>>);

impl<E: Into<Error>> Future for Completes<E> {
    type Output = Result;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result> {
        catch_unwind(AssertUnwindSafe(|| self.0.as_mut().poll(context).map_err(Failure::from)))
            .unwrap_or_else(|panic| Poll::Ready(Err(Failure::panicked(&*panic))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_panics_completes() {
        let set = Ready::<Result>::new().unwrap();
        let mut polls = 0;
        let panics = std::future::poll_fn(move |context: &mut Context<'_>| {
            polls += 1;
            assert!(polls < 2, "a defect");
            context.waker().wake_by_ref();
            Poll::<std::result::Result<(), aquifer::CacheError>>::Pending
        });
        set.add(3, Completes(Box::pin(panics))).unwrap();
        let (token, result) = set.take(1).pop().unwrap();
        assert_eq!((token, result.unwrap_err().errno), (3, libc::ENOTRECOVERABLE));
        assert!(set.is_empty());
    }
}
