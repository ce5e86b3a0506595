//! How a file is opened.

use crate::error::{FsError, Result};
use crate::walk::{Last, owned};

/// How to open a file: as `std::fs::OpenOptions`, with the same meaning.
#[derive(Debug, Clone, Default)]
pub struct FileOptions {
    read: bool,
    write: bool,
    append: bool,
    truncate: bool,
    create: bool,
    create_new: bool,
    keep_link: bool,
    mode: Option<u32>,
}

impl FileOptions {
    /// Nothing is allowed yet.
    pub fn new() -> FileOptions {
        FileOptions::default()
    }

    /// Whether it can be read.
    pub fn read(mut self, read: bool) -> FileOptions {
        self.read = read;
        self
    }

    /// Whether it can be written.
    pub fn write(mut self, write: bool) -> FileOptions {
        self.write = write;
        self
    }

    /// Whether all writing is at the end, wherever that is then.
    pub fn append(mut self, append: bool) -> FileOptions {
        self.append = append;
        self
    }

    /// Whether it is emptied.
    pub fn truncate(mut self, truncate: bool) -> FileOptions {
        self.truncate = truncate;
        self
    }

    /// Whether it is made if there is none.
    pub fn create(mut self, create: bool) -> FileOptions {
        self.create = create;
        self
    }

    /// Whether it is made, and must not be there: `O_EXCL`.
    pub fn create_new(mut self, create_new: bool) -> FileOptions {
        self.create_new = create_new;
        self
    }

    /// Whether a symbolic link at the end of the path is an error: `O_NOFOLLOW`.
    pub fn no_follow(mut self, no_follow: bool) -> FileOptions {
        self.keep_link = no_follow;
        self
    }

    /// Permissions of a file that is made, less the process's umask; 0o666 by default.
    pub fn permissions(mut self, mode: u32) -> FileOptions {
        self.mode = Some(mode);
        self
    }

    pub(crate) fn check(&self, path: &[u8]) -> Result<()> {
        let reason = match self {
            _ if !self.read && !self.writes() => "it is opened neither for reading nor for writing",
            _ if (self.makes() || self.truncate) && !self.writes() => {
                "what is made or emptied is opened for writing"
            }
            _ if self.append && self.truncate && !self.create_new => {
                "what is emptied is not opened for appending"
            }
            _ => return Ok(()),
        };
        Err(FsError::Options { path: owned(path), reason })
    }

    pub(crate) fn reads(&self) -> bool {
        self.read
    }

    pub(crate) fn writes(&self) -> bool {
        self.write || self.append
    }

    pub(crate) fn appends(&self) -> bool {
        self.append
    }

    pub(crate) fn makes(&self) -> bool {
        self.create || self.create_new
    }

    pub(crate) fn makes_new(&self) -> bool {
        self.create_new
    }

    pub(crate) fn truncates(&self) -> bool {
        self.truncate
    }

    pub(crate) fn last(&self) -> Last {
        match self.keep_link || self.create_new {
            true => Last::Keep,
            false => Last::Follow,
        }
    }

    pub(crate) fn mode(&self) -> u32 {
        self.mode.unwrap_or(0o666)
    }
}
