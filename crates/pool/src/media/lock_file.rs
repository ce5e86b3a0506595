//! Open file descriptions of the pool's file that have locks and no other use.
//!
//! A lock lives as long as its open file description, which every descriptor of it and every mapping
//! through it keeps. So nothing is mapped through a description with locks, and a forked child keeps
//! no descriptor of it: then the locks end when the program closes the descriptor, and when the
//! process dies.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use aquifer_sys::high_fd::HeldFile;
use aquifer_vm::NotInherited;

/// An open file description for locks.
#[derive(Debug)]
pub(crate) struct LockFile {
    /// Refers to the descriptor below, so it is dropped first.
    _not_inherited: NotInherited,
    file: Arc<HeldFile>,
    is_shared: bool,
}

impl LockFile {
    /// Opens one of the same file.
    pub fn open(of: BorrowedFd<'_>, is_writable: bool) -> io::Result<LockFile> {
        let flags = if is_writable { libc::O_RDWR } else { libc::O_RDONLY };
        let file = HeldFile::own(aquifer_sys::io::reopen(of, flags)?)?;
        Ok(LockFile::new(Arc::new(file), false))
    }

    /// One that another process has opened.
    pub fn adopt(file: OwnedFd) -> io::Result<LockFile> {
        Ok(LockFile::new(Arc::new(HeldFile::own(file)?), false))
    }

    /// As [`LockFile::open`]. Without the permission to open the file, as for a client of a
    /// [broker](crate::broker), and without `/proc`, it [shares](LockFile::share) the description.
    pub fn open_or_share(of: &Arc<HeldFile>, is_writable: bool) -> LockFile {
        LockFile::open(of.as_fd(), is_writable)
            .ok()
            // It was made by the number, which may have become another file's.
            .filter(|own| own.file.identity().is_same_file(&of.identity()))
            .unwrap_or_else(|| LockFile::share(of))
    }

    /// The same description, which others may map.
    pub fn share(file: &Arc<HeldFile>) -> LockFile {
        LockFile::new(file.clone(), true)
    }

    fn new(file: Arc<HeldFile>, is_shared: bool) -> LockFile {
        LockFile { _not_inherited: NotInherited::new(file.as_fd()), file, is_shared }
    }

    /// Whether the description has other users.
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    pub fn held(&self) -> &HeldFile {
        &self.file
    }
}

impl AsFd for LockFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
