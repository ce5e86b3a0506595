//! The end of a psync, and waiting for it: by blocking, or as a future.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use aquifer_vm::ProcessMark;

use crate::error::{ObjectError, Result};

/// A psync whose pages are captured and being written. The object may be stored to again.
///
/// Wait with [`PendingPsync::wait`], or await it as a future. Dropping it cancels nothing. If the
/// psync fails, the next psync commits its pages too; detaching without another psync returns an
/// error.
///
/// The committing thread wakes the future: the waker must not run anything long.
#[must_use = "the psync may fail; wait for it, or drop it explicitly"]
#[derive(Debug)]
pub struct PendingPsync {
    completion: Arc<Completion>,
}

/// The end of a psync, in parts: its own commit, and earlier commits of its objects.
#[derive(Debug)]
pub(crate) struct Completion {
    state: Mutex<CompletionState>,
    done: Condvar,
    process: ProcessMark,
}

#[derive(Debug)]
struct CompletionState {
    /// Parts that have not ended.
    open: usize,
    /// The first error, or the result of all parts.
    outcome: Result<()>,
    waker: Option<Waker>,
}

impl Completion {
    /// A psync of this many parts.
    pub fn new(parts: usize) -> Arc<Completion> {
        Arc::new(Completion {
            state: Mutex::new(CompletionState { open: parts, outcome: Ok(()), waker: None }),
            done: Condvar::new(),
            process: ProcessMark::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, CompletionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends one part.
    pub fn end_part(&self, outcome: Result<()>) {
        let mut state = self.state();
        if state.outcome.is_ok() {
            state.outcome = outcome;
        }
        state.open -= 1;
        if state.open > 0 {
            return;
        }
        let waker = state.waker.take();
        drop(state);
        self.done.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl CompletionState {
    fn take_outcome(&mut self) -> Result<()> {
        std::mem::replace(&mut self.outcome, Ok(()))
    }
}

impl PendingPsync {
    pub(crate) fn new(completion: Arc<Completion>) -> PendingPsync {
        PendingPsync { completion }
    }

    /// Whether the psync has ended, successfully or not, so that [`PendingPsync::wait`] returns at
    /// once.
    pub fn is_done(&self) -> bool {
        self.completion.process.is_current() && self.completion.state().open == 0
    }

    /// Waits until everything stored before the psync began is durable.
    ///
    /// # Errors
    /// As for [`Attachment::psync`](crate::Attachment::psync).
    pub fn wait(self) -> Result<()> {
        if !self.completion.process.is_current() {
            return Err(ObjectError::Forked);
        }
        let mut state = self.completion.state();
        while state.open > 0 {
            state = self.completion.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.take_outcome()
    }
}

impl Future for PendingPsync {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        if !self.completion.process.is_current() {
            return Poll::Ready(Err(ObjectError::Forked));
        }
        let mut state = self.completion.state();
        if state.open == 0 {
            return Poll::Ready(state.take_outcome());
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}
