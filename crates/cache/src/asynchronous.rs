//! Futures over the I/O workers. They need no run-time and work with any executor.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use crate::jobs::Jobs;

enum Progress<T> {
    Running(Option<Waker>),
    Done(T),
    Taken,
}

struct Task<T>(Arc<Mutex<Progress<T>>>);

/// Runs `work` on a worker; the future completes with its result.
///
/// The work runs even if the future is dropped.
pub(crate) fn run<T: Send + 'static>(
    jobs: &Jobs,
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = T> + Send + 'static {
    let shared = Arc::new(Mutex::new(Progress::Running(None)));
    let worker = shared.clone();
    jobs.push_task(Box::new(move || {
        let result = work();
        let mut progress = worker.lock().expect("nobody panics while holding it");
        if let Progress::Running(Some(waker)) =
            std::mem::replace(&mut *progress, Progress::Done(result))
        {
            drop(progress);
            waker.wake();
        }
    }));
    Task(shared)
}

impl<T> Future for Task<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut progress = self.0.lock().expect("nobody panics while holding it");
        match &mut *progress {
            Progress::Running(waker) => {
                *waker = Some(context.waker().clone());
                Poll::Pending
            }
            Progress::Done(_) => match std::mem::replace(&mut *progress, Progress::Taken) {
                Progress::Done(result) => Poll::Ready(result),
                _ => unreachable!("just matched"),
            },
            Progress::Taken => panic!("polled after completion"),
        }
    }
}
