//! The end of a psync, and waiting for it: by blocking, or as a future.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use aquifer_vm::worker::{self, Completer};

use crate::error::{ObjectError, Result};

/// A psync whose pages are captured and being written. The object may be stored to again.
///
/// Wait with [`PendingPsync::wait`], or await it as a future. Dropping it cancels nothing. If the
/// psync fails, the next psync commits its pages too; detaching without another psync returns an
/// error.
///
/// The committing thread wakes the future: the waker must not run anything long. Once it has returned
/// the result, polling it again or waiting returns `Ok`.
#[must_use = "the psync may fail; wait for it, or drop it explicitly"]
#[derive(Debug)]
pub struct PendingPsync {
    completion: worker::Completion<Result<()>>,
    /// Whether the result was returned.
    has_returned: bool,
}

/// The end of a psync, in parts: its own commit, and earlier commits of its objects.
pub(crate) struct Countdown {
    state: Mutex<CountdownState>,
    done: Completer<Result<()>>,
}

struct CountdownState {
    /// Parts that have not ended.
    open: usize,
    /// The first error, or the result of all parts.
    outcome: Result<()>,
}

impl Countdown {
    /// Ends one part.
    pub fn end_one(&self, outcome: Result<()>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.outcome.is_ok() {
            state.outcome = outcome;
        }
        state.open -= 1;
        if state.open == 0 {
            let outcome = std::mem::replace(&mut state.outcome, Ok(()));
            drop(state);
            self.done.complete(outcome);
        }
    }
}

impl PendingPsync {
    /// Returns it with the parts that have to end.
    pub(crate) fn new(parts: usize) -> (PendingPsync, Arc<Countdown>) {
        let (done, completion) = worker::completion();
        if parts == 0 {
            done.complete(Ok(()));
        }
        let state = Mutex::new(CountdownState { open: parts, outcome: Ok(()) });
        (PendingPsync { completion, has_returned: false }, Arc::new(Countdown { state, done }))
    }

    /// Whether the psync has ended, successfully or not, so that [`PendingPsync::wait`] returns at
    /// once.
    pub fn is_done(&self) -> bool {
        self.completion.is_done()
    }

    /// Waits until everything stored before the psync began is durable.
    ///
    /// # Errors
    /// As for [`Attachment::psync`](crate::Attachment::psync).
    pub fn wait(mut self) -> Result<()> {
        if self.has_returned {
            return Ok(());
        }
        self.completion.wait().map_err(|_| ObjectError::Forked)?
    }
}

impl Future for PendingPsync {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        if self.has_returned {
            return Poll::Ready(Ok(()));
        }
        let outcome = ready!(Pin::new(&mut self.completion).poll(context));
        self.has_returned = true;
        Poll::Ready(outcome.map_err(|_| ObjectError::Forked)?)
    }
}
