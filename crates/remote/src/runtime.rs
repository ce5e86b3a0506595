//! The threads named `aquifer-remote`: each runs a tokio runtime for the requests of a device or a store. Long work runs
//! [`aside`] of the requests of any runtime.

use std::io;

use aquifer_sys::thread::{self, Thread};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::RemoteError;
use crate::connection::install_crypto;

/// An error of the system, of what a URL's object or store needs.
pub(crate) fn refused(
    shown: &str,
    what: &'static str,
) -> impl FnOnce(io::Error) -> RemoteError + use<> {
    let url = shown.to_owned();
    move |source| RemoteError::System { url, what, source }
}

pub(crate) fn new(shown: &str) -> Result<Runtime, RemoteError> {
    install_crypto();
    Builder::new_current_thread()
        .enable_all()
        .thread_name("aquifer-remote")
        .build()
        .map_err(refused(shown, "cannot start a runtime"))
}

/// Starts a thread that runs `work`, and then ends the runtime.
pub(crate) fn run(
    runtime: Runtime,
    shown: &str,
    work: impl FnOnce(&Runtime) + Send + 'static,
) -> Result<Thread, RemoteError> {
    let work = move || {
        work(&runtime);
        // Not by dropping it, which waits for a look-up of a name.
        runtime.shutdown_background();
    };
    thread::start(c"aquifer-remote", work).map_err(refused(shown, "cannot start a thread"))
}

/// Runs work that takes the processor or the disk for a while, where it keeps no request waiting.
pub(crate) async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match Handle::try_current() {
        Err(_) => work(),
        Ok(runtime) => match runtime.spawn_blocking(work).await {
            Ok(done) => done,
            Err(failed) => std::panic::resume_unwind(failed.into_panic()),
        },
    }
}
