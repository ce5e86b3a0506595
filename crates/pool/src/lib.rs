//! Pools: a formatted file or device that holds named, persistent things.
//!
//! ```text
//!   pool         the methods of `Pool`, by subject
//!     │
//!   broker       write access for processes that may only read
//!   open         create, recover, grow and close a pool; its background threads
//!     │
//!   metadata     the image of the slots, pages, transactions, checkpoints
//!     │
//!   pins         what keeps freed pages
//!   log          the one redo log, and its mutexes; commits
//!     │
//!   shared       what the processes of a pool share at run time: segment, members, locks
//!     │
//!   media        bytes on media; how they become durable
//! ```
//!
//! A folder uses those below it and never one above it; nor do the files of a folder use each other
//! in a circle. Files beside the folders are for all of them. `.ci/layers` checks both.
//!
//! # Durability
//! A transaction or a commit that has returned survives everything the media survives. After a
//! crash, one that has not returned is present in full or not at all. `docs/durability.md`
//! describes what each persistence domain survives, `docs/format.md` describes every byte.
//!
//! # Use
//! Most programs use objects (`aquifer-object`), which lie in a pool. A program that uses the pool
//! directly reserves pages, names them in a transaction, and commits their content:
//!
//! ```
//! use aquifer_pool::format::inode::{Inode, InodeKind};
//! use aquifer_pool::{CommitContent, CommitPages, Pool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("data.pool");
//! let pool = Pool::create(&path, 4 << 20)?;
//! let reservation = pool.reserve_zeroed(1, 1)?;
//! let runs = reservation.runs().to_vec();
//! // SAFETY: the pool has no files and objects that these pages could be taken from.
//! let inode = unsafe { pool.transact(vec![reservation], |transaction| {
//!     let inode = Inode {
//!         kind: InodeKind::Object,
//!         size_bytes: 4096,
//!         runs: runs.clone(),
//!         name: b"page".to_vec(),
//!         ..transaction.free_inode()?
//!     };
//!     transaction.put(inode.clone());
//!     Ok(inode)
//! })? };
//! let pages = [CommitPages { inode: inode.number, target: inode.runs[0].bytes() }];
//! let content = CommitContent { pages: &pages, ..Default::default() };
//! // SAFETY: the object was just made and is attached nowhere.
//! unsafe { pool.capture(&content, |bytes| bytes.fill(7))? }.finish()?; // durable from here on
//! # Ok(())
//! # }
//! ```

mod access_error;
mod background;
mod bitmap;
pub mod broker;
mod error;
#[doc(hidden)]
pub mod internals;
mod log;
#[cfg(all(test, loom))]
mod loom_models;
pub mod media;
mod memory;
mod metadata;
mod mutant;
mod open;
mod options;
mod pins;
mod point;
mod pool;
mod random;
mod shared;
mod sync;

/// What the models of crates above are made of.
#[cfg(loom)]
#[doc(hidden)]
pub mod modelled {
    pub use crate::shared::image_words::{
        ImageSlot, ImageVersion, change, has_layout, image_slot, state_of_file,
    };
    pub use crate::sync::before_bytes_are_stored;
}

pub use aquifer_format as format;
use aquifer_format::{owners, slots};

pub use broker::{AccessError, AccessKey, Broker};
pub use error::{PoolError, Result};
pub use format::patch::Patches;
pub use format::slots::{ChangeSlots, ReadSlots};
pub use log::commit::{Commit, CommitContent, CommitCopied, CommitPages, CommitPatches};
pub use metadata::image::View as MetadataView;
pub use metadata::reservation::Reservation;
pub use metadata::space::Room;
pub use metadata::transaction::Transaction;
pub use metadata::turn::Turn;
#[cfg(feature = "mutants")]
#[doc(hidden)]
pub use mutant::Mutant;
pub use options::PoolOptions;
pub use pins::{InodeUse, LentPins, Pin};
#[cfg(feature = "mutants")]
#[doc(hidden)]
pub use point::{POINTS, end_thread_at, pass_other};
pub use pool::{BorrowedPins, FileLock, LeftMemory, OwnedPin, PinPlace, Pool, PoolInfo};
pub use shared::advisory::{AdvisoryLocks, HeldLock, LockArea};
pub use shared::inode_lock::{Holder, InodeLock, LockMode};
pub use shared::note::{Published, TransactionNote, Unpublished};
