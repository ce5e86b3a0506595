//! The parts of an open pool, and the order of their locks.
//!
//! ```text
//!  Core             transactions, checkpoints, captures, closing       its locks:
//!   ├── Space       reservations, the turn, zeroing                   reserving, zeroing
//!   ├── Pins        pins that this handle sets
//!   ├── Image       reading the metadata, without locks
//!   ├── Log         appends, packed records, replay, repair           maintenance, metadata
//!   └── Handle      media, segment, members                           file mutexes
//! ```
//!
//! A part uses those below it and none above it: space, pins and image take the metadata mutex
//! through the log, and all of them use the handle. What two parts of one height need is passed as
//! a parameter. What needs more, and what makes room in the log by a checkpoint, is a method of
//! [`Core`].
//!
//! The *state* that these parts work on is shared by all processes and lies in the
//! [`segment`](crate::segment): what the metadata mutex guards there is reached through
//! [`Locked`](crate::log::Locked), by its methods (the log's) and by functions that take it
//! ([`apply`](crate::apply), [`alloc`](crate::alloc), [`freed`](crate::freed)).
//!
//! # Lock order
//! A thread takes locks from the top down, and none while it holds the last.
//!
//! | lock | guards | taken by |
//! |---|---|---|
//! | file mutexes, in the order of their numbers | the bytes and the layout of files | [`Members::lock_file`](crate::members::Members::lock_file) |
//! | `Space::reserving`, then the byte `Turn` | the right to wait with reservations | [`Turn`](crate::turn::Turn) |
//! | `Space::zeroing`, then the byte `Zeroer` | that one handle has pages reserved only to zero them | [`zero`](crate::zero) |
//! | the maintenance mutex | applying, checkpoints, superblocks | [`Log::maintain`]: [`Maintaining`](crate::log::Maintaining) |
//! | the metadata mutex | the log's end, the image, the maps of pages, the lists of freed runs | [`Log::lock`]: [`Locked`](crate::log::Locked) |
//!
//! `Members::held`, the buffers of the log and the state of the heartbeat are held for a few
//! instructions; inside, only the byte of an inode is taken, which does not wait.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock};

use aquifer_sys::lock::LockKind;
use aquifer_vm::worker::Bell;

use crate::failure::FailureKind;
use crate::handle::Handle;
use crate::image::Image;
use crate::log::Log;
use crate::membership::Byte;
use crate::pins::{PinPlaces, Pins};
use crate::point;
use crate::segment_place::Places;
use crate::space::Space;

/// An open pool. All of it is safe to use from any thread.
pub(crate) struct Core {
    pub space: Space,
    pub pins: Pins,
    pub image: Image,
    pub log: Arc<Log>,
    pub handle: Arc<Handle>,
    /// The directories in which the segment may lie.
    pub places: Places,
    /// Rung when a checkpoint is due.
    pub checkpoint_bell: OnceLock<Arc<Bell>>,
    /// The tail for which it was rung because of freed pages.
    rung_tail_lsn: AtomicU64,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Core").field("uuid", &self.handle.uuid).finish_non_exhaustive()
    }
}

impl Core {
    pub fn new(handle: Handle, pins: PinPlaces, places: Places) -> Arc<Core> {
        let (handle, pins) = (Arc::new(handle), Arc::new(pins));
        let log = Arc::new(Log::new(handle.clone()));
        Arc::new(Core {
            space: Space {
                handle: handle.clone(),
                log: log.clone(),
                pins: pins.clone(),
                zeroing: Mutex::default(),
                reserving: Mutex::default(),
                zeroer_bell: OnceLock::new(),
            },
            pins: Pins { handle: handle.clone(), log: log.clone(), places: pins },
            image: Image { handle: handle.clone(), log: log.clone(), distrusted: OnceLock::new() },
            log,
            handle,
            places,
            checkpoint_bell: OnceLock::new(),
            rung_tail_lsn: AtomicU64::new(u64::MAX),
        })
    }

    /// Requests a checkpoint in the background, if this handle has a background thread for it.
    pub fn checkpoint_soon(&self) {
        if let Some(bell) = self.checkpoint_bell.get() {
            bell.ring();
        }
    }

    /// As [`Core::checkpoint_soon`], once for each position of the tail: while a checkpoint is being
    /// made for the pages that wait for the tail, a second one has little to free.
    pub fn move_tail_soon(&self, tail_lsn: u64) {
        // Relaxed: the value orders nothing else.
        if self.rung_tail_lsn.swap(tail_lsn, Relaxed) != tail_lsn {
            self.checkpoint_soon();
        }
    }

    /// Leaves the pool. The last writer brings the media up to date, and removes the segment if no
    /// reader uses it. If this fails, the next opener makes up for it, unless the machine is
    /// restarted before.
    ///
    /// Readers can hold locks that hide from a writer that it is the last: then the segment stays,
    /// and the media are brought up to date all the same, which needs no lock of the file.
    pub fn close(&self) {
        let (members, control) = (&self.handle.members, self.handle.control());
        let recovery =
            || members.locks.lock(Byte::Recovery, LockKind::Exclusive, members.stall_timeout);
        if members.is_writable
            && let Err(error) = self.handle.media.check_kept()
        {
            // If the kernel reported the loss to another program earlier, a process that opened the
            // pool later does not get it.
            control.fail(FailureKind::Data, &error.source);
            self.log.note_loss();
        }
        if members.is_writable {
            let knows_others = recovery().unwrap_or(false);
            let is_last = knows_others
                && members.locks.try_lock(Byte::Openers, LockKind::Exclusive).unwrap_or(false);
            if is_last {
                point::pass("close-last");
                // If it cannot be lowered, some free pages are no longer known to be zero.
                let _ = self.lower_fresh();
                let closed = self.checkpoint().and_then(|()| {
                    point::pass("close-checkpoint");
                    self.write_closed_superblock()
                });
                point::pass("close-superblock");
                // Then the superblock tells the next opener that there is no segment, or that bytes
                // are lost. Otherwise the segment stays, which records whether they are.
                if closed.is_ok() || (control.check_not_failed().is_err() && self.log.note_loss()) {
                    self.places.remove(self.handle.segment_id);
                }
                point::pass("close-removed");
            } else if !knows_others || !members.locks.has_writers() {
                // Readers stay, and write nothing when they close: changes that are not durable now
                // would be lost at a restart of the machine. Without the lock, other writers may be
                // closing as well, and each may rely on the other.
                let _ = self.checkpoint();
            }
        }
        self.pins.places.leave();
        members.locks.leave();
    }
}
