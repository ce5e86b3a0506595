//! Pools: a formatted file or device that holds named, persistent things.
//!
//! ```text
//!   pool                                       create, open, close, and the methods of each subject
//!     │
//!   core ── transaction ── checkpoint ── recovery ── grow       what needs several parts
//!     │
//!   space ── reservation ── turn ── zero       free pages, as this handle takes them
//!   pins                                       what keeps freed pages
//!   image                                      reading the metadata, without locks
//!   log ── log_writer ── packed ── commit ── replay ── repair       the one redo log, and its mutexes
//!     │           apply ── alloc ── freed      metadata and pages, changed with the metadata mutex
//!     │
//!   handle ── members ── segment ── broker     what the processes of a pool share at run time
//!     │          advisory                      locks of files, for their users
//!     │
//!   aquifer_format    media                            bytes on media; how they become durable
//! ```
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
mod advisory;
mod alloc;
mod appends;
mod apply;
mod background;
mod base;
mod bitmap;
pub mod broker;
mod buffers;
mod checkpoint;
mod claims;
mod closing;
mod commit;
mod core;
mod create;
mod dead_holders;
mod error;
mod failure;
mod freed;
mod fresh;
mod grow;
mod handle;
mod heartbeat;
mod image;
mod image_slots;
mod image_words;
mod inode_lock;
#[doc(hidden)]
pub mod internals;
mod left_memory;
mod life;
mod lock_file;
mod log;
mod log_reader;
mod log_writer;
mod logged_page;
#[cfg(all(test, loom))]
mod loom_models;
pub mod media;
mod members;
mod membership;
mod memory;
mod mutant;
mod note;
mod object_names;
mod options;
mod packed;
mod pins;
mod point;
mod pool;
mod presence;
mod random;
mod recovery;
mod repair;
mod replay;
mod reservation;
mod saved;
mod segment;
mod segment_place;
mod signal;
mod sole;
mod space;
mod superblocks;
mod sync;
mod transaction;
mod turn;
mod upgrade;
mod zero;

/// What the models of crates above are made of.
#[cfg(loom)]
#[doc(hidden)]
pub mod modelled {
    pub use crate::image_words::{
        ImageSlot, ImageVersion, before_bytes_are_stored, change, has_layout, image_slot,
        state_of_file,
    };
}

pub use aquifer_format as format;
use aquifer_format::{owners, slots};

pub use advisory::{AdvisoryLocks, HeldLock, LockArea};
pub use broker::{AccessError, AccessKey, Broker};
pub use commit::{Commit, CommitContent, CommitCopied, CommitPages, CommitPatches};
pub use error::{PoolError, Result};
pub use format::patch::Patches;
pub use format::slots::{ChangeSlots, ReadSlots};
pub use image::View as MetadataView;
pub use inode_lock::{Holder, InodeLock, LockMode};
pub use left_memory::LeftMemory;
#[cfg(feature = "mutants")]
#[doc(hidden)]
pub use mutant::Mutant;
pub use note::{Published, TransactionNote, Unpublished};
pub use options::PoolOptions;
pub use pins::{BorrowedPins, InodeUse, LentPins, Pin, PinPlace};
#[cfg(feature = "mutants")]
#[doc(hidden)]
pub use point::{POINTS, end_thread_at, pass_other};
pub use pool::{FileLock, OwnedPin, Pool, PoolInfo};
pub use reservation::Reservation;
pub use space::Room;
pub use transaction::Transaction;
pub use turn::Turn;
