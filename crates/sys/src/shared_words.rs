//! Words that outlive a process: an array of atomics in memory of a file without a name.

use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::memory::{self, Protection};

/// A long array of words, zero at first, that costs memory only where it was touched. A process that
/// gets the descriptor maps the same words ([`SharedWords::adopt`]).
///
/// A process that has the descriptor can store anything to it, at any time: readers must take every
/// value.
/// The file cannot get shorter, which is sealed, so no access raises a signal; memory that is not
/// there when a word is touched for the first time is charged to the process as any memory is.
#[derive(Debug)]
pub struct SharedWords {
    start: *const AtomicU64,
    len: usize,
    file: OwnedFd,
}

// SAFETY: the words are atomics.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// An array of `len` words.
    ///
    /// # Errors
    /// Those of `memfd_create`, `ftruncate`, `fcntl` and `mmap`.
    pub fn new(len: usize) -> io::Result<SharedWords> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("aquifer-words", flags)?;
        let len_bytes =
            len.checked_mul(size_of::<AtomicU64>()).ok_or(io::ErrorKind::OutOfMemory)?;
        ftruncate(&file, len_bytes as u64)?;
        let seals = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
        rustix::fs::fcntl_add_seals(&file, seals | rustix::fs::SealFlags::SEAL)?;
        SharedWords::adopt(file)
    }

    /// The words of a descriptor of [`SharedWords::file`], from another process.
    ///
    /// # Errors
    /// `EINVAL` for any other file: only one that cannot get shorter is safe to map.
    pub fn adopt(file: OwnedFd) -> io::Result<SharedWords> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        let len_bytes = usize::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
        let len = len_bytes / size_of::<AtomicU64>();
        if !seals.contains(rustix::fs::SealFlags::SHRINK) || len == 0 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let start = memory::map_file(len_bytes, Protection::ReadWrite, file.as_fd(), 0)?;
        Ok(SharedWords { start: start.cast_const().cast(), len, file })
    }

    /// The descriptor, for another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Deref for SharedWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: mapped from a page on with this length, until it is dropped; the file cannot get
        // shorter. Other processes change the words, which atomics permit.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: the mapping of `adopt`; nothing refers to it any more.
        let _ = unsafe { memory::unmap(self.start.cast_mut().cast(), self.len * 8) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn two_mappings_are_of_the_same_words() {
        let words = SharedWords::new(1 << 20).unwrap();
        let again = SharedWords::adopt(words.file().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(again.len(), 1 << 20);
        words[(1 << 20) - 1].store(7, Relaxed);
        assert_eq!((again[(1 << 20) - 1].load(Relaxed), again[0].load(Relaxed)), (7, 0));
    }

    #[test]
    fn a_file_that_can_get_shorter_is_refused() {
        let file = memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 4096).unwrap();
        let refused = SharedWords::adopt(file).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
        let words = SharedWords::new(512).unwrap();
        assert!(ftruncate(words.file(), 8).is_err());
    }
}
