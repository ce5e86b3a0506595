//! The engine of a cache with its threads.

use std::ffi::CStr;
use std::sync::{Arc, OnceLock};

use aquifer_vm::worker::Worker;

use crate::engine::Engine;
use crate::error::{CacheError, Result};
use crate::kernel::DropManager;
use crate::publish::Publisher;

/// The engine and its threads, which end when this is dropped.
pub(crate) struct Running {
    pub engine: Arc<Engine>,
    pub publisher: Option<Arc<Publisher>>,
    worker: Worker,
    /// Keeps kernel-backed mappings within the budget; started with the first one.
    drop_manager: OnceLock<Arc<DropManager>>,
}

impl Running {
    pub fn new(engine: Arc<Engine>) -> Running {
        Running { engine, publisher: None, worker: Worker::new(), drop_manager: OnceLock::new() }
    }

    pub fn spawn(
        &self,
        name: &'static CStr,
        body: impl FnOnce(&Engine) + Send + 'static,
    ) -> Result<()> {
        let engine = self.engine.clone();
        let body = move || {
            let _fatal = FatalPanic(name);
            body(&engine);
        };
        self.worker.start(name, body).map_err(Running::no_thread)
    }

    /// The error of a thread that the system refuses.
    pub fn no_thread(source: std::io::Error) -> CacheError {
        CacheError::Kernel { what: "starting a thread of the cache", source }
    }

    /// The drop manager; starts it if it is not running.
    pub fn drop_manager(&self) -> Result<&Arc<DropManager>> {
        if let Some(manager) = self.drop_manager.get() {
            return Ok(manager);
        }
        let manager = Arc::new(DropManager::new(self.engine.clone()));
        let started = manager.clone();
        self.spawn(c"aquifer-drop", move |_| started.run())?;
        if let Err(second) = self.drop_manager.set(manager) {
            // Another thread was first: the thread started here ends, and is joined with the
            // others.
            second.stop();
        }
        Ok(self.drop_manager.get().expect("set above"))
    }
}

/// Ends the process if a background thread panics: other threads would wait forever for work that
/// it was about to do. The panic itself has been printed.
pub(crate) struct FatalPanic(pub &'static CStr);

impl Drop for FatalPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let name = self.0.to_string_lossy();
            eprintln!(
                "aquifer: the background thread {name} panicked, in a device or a policy; the cache \
                 cannot go on without it"
            );
            std::process::abort();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.engine.mark.is_current() {
            return;
        }
        self.engine.stop();
        if let Some(publisher) = &self.publisher {
            publisher.stop();
        }
        if let Some(manager) = self.drop_manager.get() {
            manager.stop();
        }
        // If the last reference is dropped by a future's waker, on a worker, that thread ends when
        // the waker returns.
        self.worker.join();
    }
}
