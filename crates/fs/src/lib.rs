//! Files in a pool: a file system in user space that many processes share.
//!
//! ```text
//!    Files (by_path)            what `std::fs` has, and more             POSIX names and semantics
//!      │         Nodes (node)   the same by inode number and generation, for servers
//!      ├───────────┘
//!    names    file    view      names → inodes;  bytes → pages;  pages → pointers
//!      │        │
//!    rules  permission          what follows from a change, and what it needs
//!      │
//!    transaction  walk          slots as inodes; paths → inodes
//!      │
//!   aquifer_format                         directory  file_table  byte_chain: structures over slots
//!      │
//!   aquifer_pool                           transactions, log, image, pages
//! ```
//!
//! All metadata is slots of 512 bytes (`aquifer_pool::format::slot`). A change of names or sizes is
//! one transaction of the pool: all processes see all of it or nothing, and it survives the death
//! of any process at once; [`Files::sync`] and related calls make it durable.

mod acl;
mod attribute_limits;
pub mod attributes;
mod by_path;
mod caller;
mod error;
mod file;
mod files;
mod hand_over;
mod known_directories;
mod known_paths;
#[cfg(all(test, loom))]
mod loom_models;
mod lost_and_found;
mod metadata;
mod names;
pub mod node;
mod node_id;
mod open_inodes;
mod options;
mod permission;
mod read_dir;
mod rules;
mod special;
mod sync;
mod transaction;
mod unnamed;
mod view;
mod walk;

/// What the check of a pool (`aquifer-check`) takes from the file system, so that both follow the
/// same rules. No other crate needs it; it is not a part of the public interface, and any version
/// may change it.
#[doc(hidden)]
pub mod internals {
    pub use crate::lost_and_found::{Adopted, adopt};
    pub use crate::walk::{MAX_PATH_BYTES, target};
}

pub use acl::{ACCESS_ACL, Acl, AclEntry, AclTag, DEFAULT_ACL};
pub use aquifer_pool::LockMode;
pub use aquifer_pool::format::file::FileKind;
pub use attributes::SetMode;
pub use by_path::DirBuilder;
pub use error::{FsError, Result};
pub use file::{
    At, Defragmented, FallocateMode, File, FileRun, HeldRange, Synced, WriteHow, Written,
};
pub use files::{Files, Space};
pub use metadata::{FileTimes, FileType, Metadata};
pub use names::RenameMode;
pub use options::FileOptions;
pub use read_dir::{DirEntry, ReadDir};
pub use rules::Privileges;
pub use special::SpecialFile;
pub use view::{Lease, MAX_VIEW_PIECES, View, ViewMut};
