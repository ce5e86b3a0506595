//! Trees of files that can be copied into each other: in a pool, and in the file systems of the machine.
//!
//! [`Tree`] is what copying needs of both, [`Copier`] copies. What is made gets its name when it is whole: until then it is a [`New`].

mod copier;
mod local;
mod pooled;

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Result;

pub use copier::{Choices, Copier, Counts, into_itself};
pub use local::Local;
pub use pooled::Pooled;

/// What something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    Directory,
    Link,
    /// What a pool cannot hold: a device, a socket, a pipe.
    Other,
}

/// Something in a tree, with everything of it that a copy keeps except its content.
#[derive(Debug, Clone)]
pub struct Item {
    pub kind: Kind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub len_bytes: u64,
    pub accessed: SystemTime,
    pub modified: SystemTime,
    /// How many names it has.
    pub links: u64,
    /// Two names of the same file in one tree have the same.
    pub identity: (u64, u64),
}

/// Names and values of extended attributes.
pub type Attributes = Vec<(Vec<u8>, Vec<u8>)>;

/// A place that has files. Paths are those that the user gave, with names behind them.
pub trait Tree {
    /// A file open for reading.
    type File: Content;

    /// A file or symbolic link that is being made.
    type New: New;

    /// A path, for a terminal.
    fn show(&self, path: &Path) -> String;

    /// What is at a path; `None` if there is nothing.
    fn item(&self, path: &Path, follow: bool) -> Result<Option<Item>>;

    /// The names in a directory.
    fn names(&self, directory: &Path) -> Result<Vec<OsString>>;

    /// Where a symbolic link leads.
    fn target(&self, link: &Path) -> Result<PathBuf>;

    /// Opens a file for reading.
    fn open(&self, path: &Path, follow: bool) -> Result<Self::File>;

    /// The extended attributes that can be read, of a file or directory.
    fn attributes(&self, path: &Path) -> Result<Attributes>;

    /// Begins a file that nobody else may read. It will be called `name`, as what the following two begin: in a directory that is
    /// there.
    fn make_file(&self, name: &Path) -> Result<Self::New>;

    /// Begins a symbolic link.
    fn make_link(&self, target: &Path, name: &Path) -> Result<Self::New>;

    /// Begins another name of a file.
    fn make_name(&self, original: &Path, name: &Path) -> Result<Self::New>;

    /// Makes a directory that nobody else may enter.
    fn make_directory(&self, path: &Path) -> Result<()>;

    /// Gives a directory the owner, the permissions, the times of `item`, and these attributes; how many attributes cannot be
    /// kept there.
    fn finish_directory(&self, path: &Path, item: &Item, attributes: &Attributes) -> Result<u64>;
}

/// Something that is being made, and has not its name yet. Without it, nothing is left when this is dropped.
pub trait New {
    /// Writes all of it.
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()>;

    /// Gives the file a length: what is new is a hole.
    fn set_len(&self, len_bytes: u64) -> Result<()>;

    /// As [`Tree::finish_directory`].
    fn finish(&self, item: &Item, attributes: &Attributes) -> Result<u64>;

    /// Gives it its name. What has that is replaced if it is wanted, and is an error otherwise.
    fn place(self, replace: bool) -> Result<()>;
}

/// The bytes of a file.
pub trait Content {
    /// The first range from `offset_bytes` on that is no hole; `None` if there is none. `len_bytes` is how long the file was.
    fn next_data(&self, offset_bytes: u64, len_bytes: u64) -> std::io::Result<Option<Range<u64>>>;

    /// Reads; less than was asked for only at the end.
    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> std::io::Result<usize>;

    /// An error of one of these, with what it is about.
    fn explain(&self, error: std::io::Error) -> anyhow::Error;
}
