//! An open pool: each file has the methods of one subject, and passes them on to the
//! [parts](crate::metadata::core) that do the work.

mod commits;
mod data;
mod file_lock;
mod grow;
mod info;
mod left_memory;
mod lent_pins;
mod locks;
mod metadata;
mod note;
mod open;
mod pages;
mod pins;

use std::sync::Arc;

use uuid::Uuid;

pub use self::file_lock::FileLock;
pub use self::info::PoolInfo;
pub use self::left_memory::LeftMemory;
pub use self::lent_pins::{BorrowedPins, PinPlace};
pub use self::pins::OwnedPin;
use crate::background::Worker;
use crate::error::Result;
use crate::format::layout::Layout;
use crate::log::replay::Committed;
use crate::media::Media;
use crate::metadata::core::Core;
use crate::shared::handle::Handle;

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

    /// The pages that files and objects can have together: the data, without the saved state.
    pub fn usable_pages(&self) -> u64 {
        let Handle { layout, saved, .. } = &*self.core().handle;
        layout.page_count - layout.data_start_page - saved.pages
    }

    /// The pool's uuid.
    pub fn uuid(&self) -> Uuid {
        self.core().handle.uuid
    }

    /// What the pool has that not all have, as bits: [`SAVED`](crate::format::superblock::SAVED).
    pub fn features(&self) -> u64 {
        self.core().handle.features
    }

    /// Whether it was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.core().handle.members.is_writable
    }

    /// The nonce by which other processes of this server open the pool
    /// ([`PoolOptions::beside`](crate::PoolOptions::beside)); `None` unless this handle is the
    /// [sole writer](crate::PoolOptions::sole).
    pub fn sole_nonce(&self) -> Option<u64> {
        self.core().handle.sole_nonce.get().copied()
    }

    /// Returns an error in a fork of the process that opened the pool.
    ///
    /// # Errors
    /// [`PoolError::Forked`](crate::PoolError::Forked).
    pub fn check_process(&self) -> Result<()> {
        self.core().handle.members.check_process()
    }

    /// Returns an error in a fork, and if this handle has lost its locks, as of now: then its pins
    /// keep nothing.
    ///
    /// # Errors
    /// [`PoolError::Forked`](crate::PoolError::Forked),
    /// [`PoolError::LocksLost`](crate::PoolError::LocksLost).
    pub fn check_kept(&self) -> Result<()> {
        self.check_process()?;
        self.core().handle.members.check_kept_now()
    }

    /// Returns an error if this handle can change the pool no more: it is in a fork or has lost its
    /// locks, or the media have failed in any process that has the pool open. A process that only
    /// keeps the pool open asks now and then, and closes it: when all have closed it, the next one
    /// that opens it recovers it.
    ///
    /// # Errors
    /// [`PoolError::Forked`](crate::PoolError::Forked),
    /// [`PoolError::LocksLost`](crate::PoolError::LocksLost),
    /// [`PoolError::Failed`](crate::PoolError::Failed).
    pub fn check_usable(&self) -> Result<()> {
        self.check_kept()?;
        self.core().handle.control().check_not_failed()
    }

    /// What all handles have in common that have the pool open together, and no other: also a copy
    /// of the pool's file has another one. Nil for handles that share no memory.
    pub fn session(&self) -> Uuid {
        self.core().handle.segment_id
    }

    /// Leaves the state that the death of the process would leave, except that the media stay: these
    /// can be opened again. In builds for the tests that record the writes to one medium. This must be
    /// the only clone.
    #[cfg(feature = "mutants")]
    #[doc(hidden)]
    pub fn die(self) {
        assert_eq!(Arc::strong_count(&self.shared), 1, "another clone goes on");
        self.core().handle.members.end();
        std::mem::forget(self);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let core = &self.core;
        if core.handle.members.process.is_current() {
            core.stop_workers();
            core.close();
            // Closing waits for the media as well.
            core.handle.heartbeat.worker.get().into_iter().for_each(Worker::stop);
        }
    }
}
