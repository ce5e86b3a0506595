//! File trees that can be copied into each other: in a pool, in the machine's file systems, and in an object store.
//!
//! [`Tree`] is the interface that copying needs, [`Copier`] copies. A new item gets its name when
//! it is complete; until then it is a [`New`].

mod copier;
mod local;
mod pooled;
#[cfg(feature = "remote")]
mod stored;

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Result;
use aquifer::fs::SpecialFile;

pub use copier::{Choices, Copier, Counts, into_itself};
pub use local::Local;
pub use pooled::Pooled;
#[cfg(feature = "remote")]
pub use stored::Stored;

/// The kind of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    Directory,
    Link,
    /// A named pipe, a socket or a device.
    Special(SpecialFile),
    /// An item that a pool cannot hold.
    Other,
}

/// An item of a tree, with everything that a copy preserves except its content.
#[derive(Debug, Clone)]
pub struct Item {
    pub kind: Kind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub len_bytes: u64,
    pub accessed: SystemTime,
    pub modified: SystemTime,
    /// The number of its names.
    pub links: u64,
    /// Equal for two names of the same file in one tree.
    pub identity: (u64, u64),
}

/// Names and values of extended attributes.
pub type Attributes = Vec<(Vec<u8>, Vec<u8>)>;

/// A file tree. Paths are those that the user gave, extended by names.
pub trait Tree {
    /// A file open for reading.
    type File: Content;

    /// A file or symbolic link that is being made.
    type New: New;

    /// Whether a name needs no directory above it and holds nothing but content, as a key of an object store. Then each
    /// name can be used, also that of a directory, and an item has one name.
    fn is_flat(&self) -> bool {
        false
    }

    /// Waits for files that [`New::place`] has only begun to place: for as many that few are left, or for all. Returns
    /// the failures.
    fn settle(&self, all: bool) -> Vec<anyhow::Error> {
        let _ = all;
        Vec::new()
    }

    /// A path, for a terminal.
    fn show(&self, path: &Path) -> String;

    /// The item at a path; `None` if there is none.
    fn item(&self, path: &Path, follow: bool) -> Result<Option<Item>>;

    /// The names in a directory. That of a directory may end with a slash.
    fn names(&self, directory: &Path) -> Result<Vec<OsString>>;

    /// The target of a symbolic link.
    fn target(&self, link: &Path) -> Result<PathBuf>;

    /// Opens a file for reading.
    fn open(&self, path: &Path, follow: bool) -> Result<Self::File>;

    /// The readable extended attributes of an item; of a symbolic link only if it is not to be
    /// followed.
    fn attributes(&self, path: &Path, follow: bool) -> Result<Attributes>;

    /// Begins a file of about this length that other users may not read. Like the following two, it
    /// will be called `name`, in an existing directory.
    fn make_file(&self, name: &Path, len_bytes: u64) -> Result<Self::New>;

    /// Begins a symbolic link.
    fn make_link(&self, target: &Path, name: &Path) -> Result<Self::New>;

    /// Begins a named pipe, a socket or a device.
    fn make_special(&self, special: SpecialFile, name: &Path) -> Result<Self::New>;

    /// Begins a hard link.
    fn make_name(&self, original: &Path, name: &Path) -> Result<Self::New>;

    /// Creates a directory that other users may not enter.
    fn make_directory(&self, path: &Path) -> Result<()>;

    /// Sets a directory's owner, permissions and times to those of `item`, and these attributes.
    /// Returns how many attributes could not be set.
    fn finish_directory(&self, path: &Path, item: &Item, attributes: &Attributes) -> Result<u64>;
}

/// An item being created that does not have its name yet. Dropping it before that removes it.
pub trait New {
    /// Writes all the bytes.
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()>;

    /// Sets the file's length; an added range is a hole.
    fn set_len(&self, len_bytes: u64) -> Result<()>;

    /// Like [`Tree::finish_directory`].
    fn finish(&self, item: &Item, attributes: &Attributes) -> Result<u64>;

    /// Gives it its name. An existing item of that name is replaced if `replace`, otherwise this
    /// fails.
    fn place(self, replace: bool) -> Result<()>;
}

/// The bytes of a file.
pub trait Content {
    /// The first range from `offset_bytes` on that is not a hole; `None` if there is none.
    /// `len_bytes` is the previously known length of the file.
    fn next_data(&self, offset_bytes: u64, len_bytes: u64) -> std::io::Result<Option<Range<u64>>>;

    /// Reads; returns less than requested only at the end.
    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> std::io::Result<usize>;

    /// Adds the file to an I/O error.
    fn explain(&self, error: std::io::Error) -> anyhow::Error;
}
