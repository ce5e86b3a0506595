//! A background thread of an open pool: started when it is first called, it sleeps until it is called
//! again. [`workers`](crate::open::workers) says which there are.

use std::ffi::CStr;
use std::sync::Arc;

use aquifer_vm::worker::{self, Bell, Ticket};

/// A background thread, which is started by the first call and runs until it is stopped.
pub(crate) struct Worker {
    name: &'static CStr,
    bell: Arc<Bell>,
    /// What the thread does after each call; false ends it.
    work: Arc<dyn Fn(&Bell) -> bool + Send + Sync>,
    thread: worker::Worker,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Worker").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Worker {
    /// `work` must not keep alive what owns this worker.
    pub fn new(
        name: &'static CStr,
        work: impl Fn(&Bell) -> bool + Send + Sync + 'static,
    ) -> Worker {
        let (bell, work, thread) = (Arc::default(), Arc::new(work), worker::Worker::new());
        Worker { name, bell, work, thread }
    }

    /// Has the thread do its work, soon. Returns false if there is no thread and none can be started:
    /// then the work is left to the calls that need it, and the next call tries again.
    pub fn call(&self) -> bool {
        if !self.thread.has_started() && !self.bell.is_stopped() {
            let (bell, work) = (self.bell.clone(), self.work.clone());
            let body = move || {
                let mut heard = Ticket::default();
                while bell.wait(&mut heard, None) && work(&bell) {}
            };
            let _ = self.thread.start_once(self.name, body);
        }
        self.bell.ring();
        self.has_started()
    }

    /// Whether there is a thread, or was one.
    pub fn has_started(&self) -> bool {
        self.thread.has_started()
    }

    /// The bell that calls it.
    #[cfg(test)]
    pub fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Stops the thread, if there is one, and waits until it has ended.
    pub fn stop(&self) {
        self.bell.stop();
        self.thread.join();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}
