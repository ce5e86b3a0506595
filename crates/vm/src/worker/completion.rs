//! The end of work that another thread does.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::contain_panic;
use crate::{ProcessMark, VmError};

/// Makes the two ends: one thread completes, another one awaits.
pub fn completion<T>() -> (Completer<T>, Completion<T>) {
    let shared =
        Arc::new(Shared { progress: Mutex::new(Progress::Pending(None)), done: Condvar::new() });
    (Completer(shared.clone()), Completion { shared, mark: ProcessMark::new() })
}

struct Shared<T> {
    progress: Mutex<Progress<T>>,
    done: Condvar,
}

enum Progress<T> {
    Pending(Option<Waker>),
    Done(T),
    Taken,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Progress<T>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Progress<T> {
    /// Takes the result if it is there.
    ///
    /// # Panics
    /// If it was taken before.
    fn take(&mut self) -> Option<T> {
        match std::mem::replace(self, Progress::Taken) {
            Progress::Done(result) => Some(result),
            Progress::Taken => panic!("the result was taken before"),
            pending => {
                *self = pending;
                None
            }
        }
    }
}

/// The end of the working thread. If it is dropped without a result, the other end waits forever.
pub struct Completer<T>(Arc<Shared<T>>);

impl<T> Completer<T> {
    /// Passes the result on, once. The calling thread runs the waker, which must not do anything
    /// long. A panic of the waker is printed and ends here.
    pub fn complete(&self, result: T) {
        let before = std::mem::replace(&mut *self.0.lock(), Progress::Done(result));
        self.0.done.notify_all();
        if let Progress::Pending(Some(waker)) = before {
            // The waker is the application's, the thread is shared: what is queued behind this must
            // still complete. `wake` consumes the waker, so nothing sees what a panic leaves of it.
            contain_panic(|| waker.wake());
        }
    }
}

/// The end of the waiting thread: a future for any executor, or for none ([`Completion::wait`]).
/// Dropping it cancels nothing.
///
/// In a forked child, where no thread will complete it, it fails with [`VmError::Forked`].
#[must_use = "dropping it loses the result"]
pub struct Completion<T> {
    shared: Arc<Shared<T>>,
    mark: ProcessMark,
}

impl<T> Completion<T> {
    /// Whether the result is there, so that [`Completion::wait`] returns at once. False in a forked
    /// child.
    pub fn is_done(&self) -> bool {
        self.mark.is_current() && !matches!(*self.shared.lock(), Progress::Pending(_))
    }

    /// Blocks until the result is there, and takes it.
    ///
    /// # Errors
    /// [`VmError::Forked`].
    ///
    /// # Panics
    /// If the result was taken before.
    pub fn wait(&mut self) -> Result<T, VmError> {
        if !self.mark.is_current() {
            return Err(VmError::Forked);
        }
        let mut progress = self.shared.lock();
        loop {
            if let Some(result) = progress.take() {
                return Ok(result);
            }
            progress = self.shared.done.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Future for Completion<T> {
    type Output = Result<T, VmError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if !self.mark.is_current() {
            return Poll::Ready(Err(VmError::Forked));
        }
        let mut progress = self.shared.lock();
        match progress.take() {
            Some(result) => Poll::Ready(Ok(result)),
            None => {
                *progress = Progress::Pending(Some(context.waker().clone()));
                Poll::Pending
            }
        }
    }
}

impl<T> fmt::Debug for Completion<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // In a fork, the lock may be held forever.
        let is_done = self.mark.is_current().then(|| self.is_done());
        formatter.debug_struct("Completion").field("is_done", &is_done).finish()
    }
}
