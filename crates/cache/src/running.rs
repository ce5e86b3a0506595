//! The engine of a cache with its threads.

use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;

use crate::engine::Engine;
use crate::error::{CacheError, Result};
use crate::kernel::DropManager;
use crate::publish::Publisher;

/// The engine and its threads, which end when this is dropped.
pub(crate) struct Running {
    pub engine: Arc<Engine>,
    pub publisher: Option<Arc<Publisher>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Keeps kernel-backed mappings within the budget; started with the first one.
    drop_manager: OnceLock<Arc<DropManager>>,
}

impl Running {
    pub fn new(engine: Arc<Engine>) -> Running {
        Running {
            engine,
            publisher: None,
            threads: Mutex::default(),
            drop_manager: OnceLock::new(),
        }
    }

    pub fn spawn(&self, name: &str, body: impl FnOnce(&Engine) + Send + 'static) -> Result<()> {
        let engine = self.engine.clone();
        let mut threads = self.threads.lock().expect("nobody panics while holding it");
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let _fatal = FatalPanic;
                body(&engine);
            })
            .map_err(|source| CacheError::Kernel {
                what: "starting a thread of the cache",
                source,
            })?;
        threads.push(thread);
        Ok(())
    }

    /// The drop manager; starts it if it is not running.
    pub fn drop_manager(&self) -> Result<&Arc<DropManager>> {
        if let Some(manager) = self.drop_manager.get() {
            return Ok(manager);
        }
        let manager = Arc::new(DropManager::new(self.engine.clone()));
        let started = manager.clone();
        self.spawn("aquifer-drop", move |_| started.run())?;
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
struct FatalPanic;

impl Drop for FatalPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("of a cache");
            eprintln!(
                "aquifer: the background thread {name} panicked, in a device, a policy or a waker; \
                 the cache cannot go on without it"
            );
            std::process::abort();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let threads = self.threads.get_mut().expect("nobody panics while holding it");
        if !self.engine.mark.is_current() {
            // A child of a fork has none of these threads: joining one would block forever.
            std::mem::take(threads).into_iter().for_each(std::mem::forget);
            return;
        }
        self.engine.stop();
        if let Some(publisher) = &self.publisher {
            publisher.stop();
        }
        if let Some(manager) = self.drop_manager.get() {
            manager.stop();
        }
        for thread in threads.drain(..) {
            if thread.thread().id() == std::thread::current().id() {
                // Dropped by a future's waker, on a worker: it ends when the waker returns.
                continue;
            }
            // Never an error: a panic of a background thread ends the process.
            let _ = thread.join();
        }
    }
}
