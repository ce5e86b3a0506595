//! Files in a pool: a file system in user space that many processes share.
//!
//! ```text
//!    Files (by_path)            what `std::fs` has, and more             POSIX names and semantics
//!      │
//!    names    file    view      names → inodes;  bytes → pages;  pages → pointers
//!      │        │
//!   directory  file_table  byte_chain ── attributes
//!                                          structures over slots, each written against two traits
//!      │
//!   aquifer_pool                           transactions, log, image, pages
//! ```
//!
//! All metadata is slots of 512 bytes (`aquifer_pool::format::slot`). A change of names or sizes is
//! one transaction of the pool: all processes see all of it or nothing, and it survives the death
//! of any process at once; [`Files::sync`] and related calls make it durable.

pub mod attributes;
mod by_path;
pub mod byte_chain;
pub mod check;
pub mod directory;
mod error;
mod file;
pub mod file_table;
mod files;
mod known_paths;
#[cfg(all(test, loom))]
mod loom_models;
mod metadata;
mod names;
mod open_inodes;
mod read_dir;
mod sync;
mod unnamed;
mod view;
mod walk;

pub use aquifer_pool::LockMode;
pub use aquifer_pool::format::file::FileKind;
pub use attributes::SetMode;
pub use by_path::{DirBuilder, FileOptions, RenameMode};
pub use error::{FsError, Result};
pub use file::{Defragmented, FallocateMode, File, FileRun, HeldRange};
pub use files::{Files, Space};
pub use metadata::{FileTimes, FileType, Metadata};
pub use read_dir::{DirEntry, ReadDir};
pub use view::{Lease, MAX_VIEW_PIECES, View, ViewMut};
