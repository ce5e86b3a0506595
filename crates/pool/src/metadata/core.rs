//! The parts of an open pool, and the order of their locks.
//!
//! ```text
//!  Core             transactions, checkpoints, closing                 its locks:
//!   ├── Space       reservations, the turn, zeroing                   reserving, zeroing
//!   ├── Pins        pins that this handle sets
//!   ├── Image       reading the metadata, without locks
//!   ├── Log         appends, packed records, commits, replay          maintenance, metadata
//!   └── Handle      media, segment, members                           file mutexes
//! ```
//!
//! A part uses those below it and none above it: space, pins and image take the metadata mutex
//! through the log, and all of them use the handle. What two parts of one height need is passed as
//! a parameter. What needs more, and what makes room in the log by a checkpoint, is a method of
//! [`Core`].
//!
//! The *state* that these parts work on is shared by all processes and lies in the
//! [`segment`](crate::shared::segment): what the metadata mutex guards there is reached through
//! [`Locked`](crate::log::locks::Locked), by its methods (the log's) and by functions that take it
//! ([`apply`](crate::metadata::apply), [`alloc`](crate::metadata::alloc), [`freed`](crate::metadata::freed)).
//!
//! # Lock order
//! A thread takes locks from the top down, and none while it holds the last.
//!
//! | lock | guards | taken by |
//! |---|---|---|
//! | file mutexes, in the order of their numbers | the bytes and the layout of files | [`Members::lock_file`](crate::shared::members::Members::lock_file) |
//! | `Space::reserving`, then the byte `Turn` | the right to wait with reservations | [`Turn`](crate::metadata::turn::Turn) |
//! | `Space::zeroing`, then the byte `Zeroer` | that one handle has pages reserved only to zero them | [`zero`](crate::metadata::zero) |
//! | the maintenance mutex | applying, checkpoints, superblocks | [`Log::maintain`]: [`Maintaining`](crate::log::locks::Maintaining) |
//! | the metadata mutex | the log's end, the image, the maps of pages, the lists of freed runs | [`Log::lock`]: [`Locked`](crate::log::locks::Locked) |
//!
//! `Members::held`, the buffers of the log and the state of the heartbeat are held for a few
//! instructions; inside, only the byte of an inode is taken, which does not wait.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock};

use crate::background::Worker;
use crate::log::locks::Log;
use crate::metadata::image::Image;
use crate::metadata::repair::Slots;
use crate::metadata::space::Space;
use crate::pins::{PinPlaces, Pins};
use crate::shared::handle::Handle;
use crate::shared::segment_place::Places;

/// An open pool. All of it is safe to use from any thread.
pub(crate) struct Core {
    pub space: Space,
    pub pins: Pins,
    pub image: Image,
    pub log: Arc<Log>,
    pub handle: Arc<Handle>,
    /// The directories in which the segment may lie.
    pub places: Places,
    /// Called when a checkpoint is due; none if this handle has no background threads.
    pub checkpointer: OnceLock<Worker>,
    /// The tail for which it was called because of freed pages.
    called_tail_lsn: AtomicU64,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Core").field("uuid", &self.handle.uuid).finish_non_exhaustive()
    }
}

impl Core {
    pub fn new(handle: Handle, pins: PinPlaces, places: Places) -> Arc<Core> {
        let (handle, pins) = (Arc::new(handle), Arc::new(pins));
        let log = Arc::new(Log::new(handle.clone(), &Slots));
        Arc::new(Core {
            space: Space {
                handle: handle.clone(),
                log: log.clone(),
                pins: pins.clone(),
                zeroing: Mutex::default(),
                reserving: Mutex::default(),
                zeroer: OnceLock::new(),
            },
            pins: Pins { handle: handle.clone(), log: log.clone(), places: pins },
            image: Image { handle: handle.clone(), log: log.clone(), distrusted: OnceLock::new() },
            log,
            handle,
            places,
            checkpointer: OnceLock::new(),
            called_tail_lsn: AtomicU64::new(u64::MAX),
        })
    }

    /// Requests a checkpoint in the background, if this handle has a background thread for it.
    pub fn checkpoint_soon(&self) {
        if let Some(checkpointer) = self.checkpointer.get() {
            checkpointer.call();
        }
    }

    /// As [`Core::checkpoint_soon`], once for each position of the tail: while a checkpoint is being
    /// made for the pages that wait for the tail, a second one has little to free.
    pub fn move_tail_soon(&self, tail_lsn: u64) {
        // Relaxed: the value orders nothing else.
        if self.called_tail_lsn.swap(tail_lsn, Relaxed) != tail_lsn {
            self.checkpoint_soon();
        }
    }

    /// Ends the background threads that change the pool.
    pub fn stop_workers(&self) {
        let zeroer = self.space.zeroer.get().map(|zeroer| &zeroer.worker);
        zeroer.into_iter().chain(self.checkpointer.get()).for_each(Worker::stop);
    }
}
