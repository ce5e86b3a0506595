//! The thread that makes a store's requests, and how callers wait for them.

use std::future::Future;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use aquifer_sys::thread::Thread;
use aquifer_vm::ProcessMark;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::options::Cancel;
use crate::{RemoteError, runtime};

/// How often a waiting caller asks whether it was cancelled.
const ASKED_EVERY: Duration = Duration::from_millis(50);

/// One thread with a runtime. A forked child has no such thread.
pub(crate) struct Runner {
    handle: Handle,
    end: Option<oneshot::Sender<()>>,
    thread: Option<Thread>,
    mark: ProcessMark,
}

impl Runner {
    pub fn start(shown: &str) -> Result<Runner, RemoteError> {
        let runtime = runtime::new(shown)?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel();
        let thread = runtime::run(runtime, shown, move |runtime| {
            // The sender is dropped without a word.
            let _ = runtime.block_on(ended);
        })?;
        Ok(Runner { handle, end: Some(end), thread: Some(thread), mark: ProcessMark::new() })
    }

    /// Starts work in the thread.
    pub fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, RemoteError>> + Send + 'static,
    ) -> Pending<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let task = self.handle.spawn(async move {
            // Without a receiver the result is not wanted any more.
            let _ = sender.send(work.await);
        });
        Pending { receiver, task: task.abort_handle(), is_current: self.mark.is_current() }
    }
}

impl Drop for Runner {
    /// Ends the thread. Work under way is given up.
    fn drop(&mut self) {
        if !self.mark.is_current() {
            // Locks of the channel may be held by a thread that only the parent has.
            std::mem::forget(self.end.take());
            return;
        }
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            thread.join();
        }
    }
}

/// Work under way. Given up when dropped.
pub(crate) struct Pending<T> {
    receiver: mpsc::Receiver<Result<T, RemoteError>>,
    task: AbortHandle,
    is_current: bool,
}

impl<T> Pending<T> {
    /// Waits for the result.
    pub fn wait(self, shown: &str, cancel: Option<&Cancel>) -> Result<T, RemoteError> {
        if !self.is_current {
            return Err(RemoteError::Stopped { url: shown.to_owned() });
        }
        let result = received(&self.receiver, shown, cancel)?;
        // Of a caller that wants to stop, no failure says more.
        result.map_err(|error| match cancel {
            Some(cancel) if cancel() => RemoteError::Cancelled { url: shown.to_owned() },
            _ => error,
        })
    }
}

/// Waits for what a channel brings, unless that is cancelled.
pub(crate) fn received<T>(
    receiver: &mpsc::Receiver<T>,
    shown: &str,
    cancel: Option<&Cancel>,
) -> Result<T, RemoteError> {
    loop {
        if cancel.is_some_and(|cancel| cancel()) {
            return Err(RemoteError::Cancelled { url: shown.to_owned() });
        }
        match receiver.recv_timeout(ASKED_EVERY) {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Timeout) => {}
            // After a panic, or the end of the thread.
            Err(RecvTimeoutError::Disconnected) => {
                return Err(RemoteError::Stopped { url: shown.to_owned() });
            }
        }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if self.is_current {
            self.task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// The work fails before the caller asks again whether it was cancelled.
    #[test]
    fn a_failure_after_a_cancellation_is_reported_as_that() {
        let runner = Runner::start("shown").unwrap();
        let wait = |cancelled_after: u32| {
            let url = "s3://bucket/key".to_owned();
            let failed = runner.spawn::<()>(async { Err(RemoteError::Exists { url }) });
            let asked = AtomicU32::new(0);
            let is_cancelled = move || asked.fetch_add(1, Ordering::Relaxed) >= cancelled_after;
            // It has failed.
            while !failed.task.is_finished() {
                std::thread::yield_now();
            }
            failed.wait("shown", Some(&(Arc::new(is_cancelled) as Cancel))).unwrap_err()
        };
        assert!(matches!(wait(1), RemoteError::Cancelled { .. }));
        assert!(matches!(wait(2), RemoteError::Exists { .. }));
    }
}
