//! An open pool: each file has the methods of one subject, and passes them on to the
//! [parts](crate::core) that do the work.

mod commits;
mod data;
mod file_lock;
mod info;
mod locks;
mod metadata;
mod open;
mod pages;
mod pins;

use std::sync::Arc;

use uuid::Uuid;

pub use self::file_lock::FileLock;
pub use self::info::PoolInfo;
pub use self::pins::OwnedPin;
use crate::background::Worker;
use crate::core::Core;
use crate::error::Result;
use crate::format::layout::Layout;
use crate::media::Media;
use crate::replay::Committed;

/// An open pool. Cheap to clone; closed when the last clone is dropped. Threads may share it
/// freely, and processes may share the file.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    core: Arc<Core>,
    overlay: Committed,
    recovered_records: u64,
    checkpointer: Option<Worker>,
    zeroer: Option<Worker>,
    heartbeat: Option<Worker>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Pool").field("core", &self.shared.core).finish_non_exhaustive()
    }
}

impl Pool {
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.shared.core
    }

    /// The media.
    pub fn media(&self) -> &Arc<dyn Media> {
        &self.core().handle.media
    }

    /// The positions of the parts.
    pub fn layout(&self) -> Layout {
        self.core().handle.layout
    }

    /// The pool's uuid.
    pub fn uuid(&self) -> Uuid {
        self.core().handle.uuid
    }

    /// Whether it was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.core().handle.members.is_writable
    }

    /// Returns an error in a fork of the process that opened the pool.
    ///
    /// # Errors
    /// [`PoolError::Forked`](crate::PoolError::Forked).
    pub fn check_process(&self) -> Result<()> {
        self.core().handle.members.check_process()
    }

    /// Leaves the state that the death of the process would leave, except for the locks, which stay
    /// with the media: these can be opened again. In builds for the tests that record the writes to
    /// one medium. This must be the only clone.
    #[cfg(feature = "mutants")]
    #[doc(hidden)]
    pub fn die(self) {
        assert_eq!(Arc::strong_count(&self.shared), 1, "another clone goes on");
        self.core().handle.members.locks.give_up_claim();
        std::mem::forget(self);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let core = &self.core;
        let workers = [self.zeroer.take(), self.checkpointer.take()];
        let heartbeat = self.heartbeat.take();
        if !core.handle.members.process.is_current() {
            // The threads belong to the parent. Detaching them here would detach one of the child's
            // threads, if it has the same stack.
            std::mem::forget((workers, heartbeat));
            return;
        }
        workers.into_iter().flatten().for_each(Worker::stop);
        core.close();
        // Closing waits for the media as well.
        heartbeat.into_iter().for_each(Worker::stop);
    }
}
