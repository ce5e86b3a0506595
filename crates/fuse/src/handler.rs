//! What answers requests.

use crate::answer::Answer;
use crate::team::Worker;
use crate::wire::Request;

/// A file system, as the kernel asks for it. Called by several threads at a time.
pub trait Handler: Send + Sync {
    /// Answers a request, or [none](Answer::none) that has no answer. `out` is memory for long
    /// answers, of at least the negotiated length and whatever is in it.
    ///
    /// What may wait for the media, or for anything but another thread's short lock, runs in
    /// [`Worker::blocking`].
    fn handle(
        &self,
        request: &Request<'_>,
        out: &mut [u8],
        answer: Answer<'_>,
        worker: &Worker<'_>,
    );

    /// Called once a second, from a thread of its own: to give back what was not used lately.
    fn tidy(&self) {}
}
