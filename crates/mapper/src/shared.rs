//! A view whose stores go to the file at once: an ordinary shared mapping.
//!
//! Other processes see stores immediately, and the kernel writes them back at any time, in any
//! order. A flush makes all earlier stores durable. A store dirties its whole folio, which may be 2
//! MiB: where few pages of a large file are stored to, a private view flushes 5 times as fast, and
//! writes a fraction (see [`super::flush`]). On files of small folios this view is faster.
//!
//! A store may find no block: in a hole of a full disk, beyond a quota, in a reflinked file. A call that
//! stores reports that. A store through a pointer goes to a private copy of its page, which the next
//! call reports and each flush tries to write ([`super::writable`], `full`). A store behind the end of
//! a truncated file is in no file: a call reports an error, and a store through a pointer raises
//! SIGBUS.
//!
//! After a failed flush, stores since the previous flush may be lost on the device while the page
//! cache still shows them: the kernel marks pages clean that it could not write, and reports that
//! once. So every later flush of the view fails as well. Storing the bytes again does not help on
//! every file system (see [`super::flush`] about lost pages): write them to another file.
//!
//! A flush is a [`RangeSync`]: write-back of the range and then a commit, which makes newly allocated
//! blocks and filled holes part of the file.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{PoisonError, RwLock};

use aquifer_sys::memory::{self, SMALL_PAGE_BYTES};
use aquifer_sys::range_sync::{RangeSync, sync_range};

use super::Stores;
use super::budget::Pages;
use super::error::{FlushCause, MapError, Result};
use super::flush::Flushed;
use super::writable::{Place, Writable};
use zerocopy::{Immutable, IntoBytes};

const PAGE: u64 = SMALL_PAGE_BYTES as u64;

/// A shared mapping of a range of a file. Can be shared freely between threads.
pub(crate) struct SharedFile {
    mapping: Writable,
    durable: RangeSync,
    /// The system's error of the first write-back that failed, or 0. A forked child has its own.
    failed: AtomicI32,
    /// Held shared by each sync until its error is in `failed`: of several at the same time, the kernel
    /// reports an error to one.
    syncing: RwLock<()>,
}

impl SharedFile {
    /// Maps `range` of a file that is open for reading and writing. The view can grow into the
    /// remaining room of the place. With `allocates`, blocks are reserved for it and for its growth.
    pub fn new(
        place: Box<dyn Place>,
        file: &File,
        path: &Path,
        range: Range<u64>,
        allocates: bool,
    ) -> Result<SharedFile> {
        aquifer_vm::router::install()?;
        let mapping = Writable::new(place, file, path, range, Stores::Shared, allocates)?;
        let durable = RangeSync::of_file(mapping.file()).map_err(MapError::open(path))?;
        Ok(SharedFile { mapping, durable, failed: AtomicI32::new(0), syncing: RwLock::new(()) })
    }

    /// The mapping, to read from.
    pub fn mapping(&self) -> &Writable {
        &self.mapping
    }

    /// Stores bytes at `offset_bytes` of the view.
    ///
    /// # Errors
    /// [`MapError::OutsideView`]; [`MapError::Fault`], after which some of the bytes may have been
    /// stored; [`MapError::Flush`] for an earlier store through the pointer that has found no block:
    /// nothing was stored.
    pub fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.mapping.report_copies()?;
        self.mapping.write_at(offset_bytes, bytes)
    }

    /// Stores a value at `offset_bytes` of the view, in the machine's byte order.
    ///
    /// # Errors
    /// As for [`SharedFile::write_at`].
    pub fn set<T: IntoBytes + Immutable>(&self, offset_bytes: u64, value: T) -> Result<()> {
        self.write_at(offset_bytes, value.as_bytes())
    }

    /// The first byte, to store through.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.mapping.as_mut_ptr()
    }

    /// Makes all stores durable.
    ///
    /// # Errors
    /// [`MapError::Flush`]; after one of the device's errors, every later call returns
    /// [`FlushCause::Gone`].
    pub fn flush(&self) -> Result<Flushed> {
        self.flush_range(0..self.mapping.len_bytes())
    }

    /// As [`flush`](SharedFile::flush), for the pages that a range of the view touches. Reports the
    /// number of dirty pages that the page cache had there, whichever process dirtied them; 0 where
    /// the kernel does not tell (before Linux 6.5). Also in a forked child.
    ///
    /// # Errors
    /// As for `flush`; [`MapError::OutsideView`].
    pub fn flush_range(&self, range: Range<u64>) -> Result<Flushed> {
        let is_child = self.mapping.check_process().is_err();
        let bytes = self.mapping.in_file(&range)?;
        if bytes.is_empty() {
            return Ok(Flushed::default());
        }
        let failed = |cause| MapError::Flush {
            path: self.mapping.path().to_owned(),
            range: bytes.clone(),
            cause,
        };
        let pages = bytes.start / PAGE * PAGE..bytes.end.next_multiple_of(PAGE);
        let copies = match is_child {
            // Locks may be held by a thread that only the parent has.
            true => self.mapping.check_copies(&bytes),
            false => {
                self.mapping.settle();
                self.mapping.write_copies()
            }
        };
        let dirty_pages = self.dirty_pages(&pages);
        if is_child {
            // The kernel reports an error to each open file description once: the parent gets it as well.
            let own = aquifer_sys::io::reopen(self.mapping.file(), libc::O_RDWR);
            let file = own.as_ref().map_or(self.mapping.file(), AsFd::as_fd);
            self.note(sync_range(file, pages));
        } else {
            self.sync(&mut || {
                self.durable.make_durable(self.mapping.file(), std::slice::from_ref(&pages))
            });
            // Waits for other syncs: one of them may have got the error of these pages.
            drop(self.syncing.write().unwrap_or_else(PoisonError::into_inner));
        }
        // Relaxed, as in `note`: the lock orders it.
        let errno = self.failed.load(Ordering::Relaxed);
        if errno != 0 {
            return Err(failed(FlushCause::Gone(errno)));
        }
        // Stores behind the end of a file, in its last page, are in no file.
        if self.mapping.file_len_bytes().is_ok_and(|len_bytes| len_bytes < bytes.end) {
            return Err(failed(FlushCause::Truncated));
        }
        // Everything else is durable.
        copies?;
        Ok(Flushed { pages: dirty_pages, bytes_written: dirty_pages * PAGE })
    }

    /// Keeps an error for all later flushes.
    fn note(&self, synced: io::Result<()>) {
        if let Err(error) = synced {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            let _ = self.failed.compare_exchange(0, errno, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    fn dirty_pages(&self, bytes: &Range<u64>) -> u64 {
        memory::cachestat(self.mapping.file(), bytes.start, bytes.end - bytes.start)
            .map_or(0, |stat| stat.dirty)
    }

    /// Writes the copies of pages for which the file had no block.
    ///
    /// # Errors
    /// [`MapError::Flush`].
    pub fn write_out(&self) -> Result<()> {
        self.mapping.write_copies()
    }

    /// Makes the view longer, at the same addresses, and extends the file if it ends before that;
    /// never shrinks.
    ///
    /// # Errors
    /// [`MapError::GrowBeyond`] if the addresses end before; [`MapError::Grow`] if the file cannot
    /// be extended.
    pub fn grow(&self, len_bytes: u64) -> Result<()> {
        self.mapping.grow(len_bytes).map(drop)
    }

    /// Dirty bytes in the page cache of the view's range, whichever process dirtied them; 0 where
    /// the kernel does not tell.
    pub fn dirty_bytes(&self) -> Result<u64> {
        self.mapping.check_process()?;
        Ok(self.dirty_pages(&self.mapping.view_in_file()) * PAGE)
    }
}

impl Pages for SharedFile {
    fn range(&self) -> Range<u64> {
        let end = self.mapping.view_in_file().end;
        self.mapping.first_byte()..end.next_multiple_of(PAGE)
    }

    fn address_of(&self, file_byte: u64) -> *const u8 {
        self.mapping.address_of(file_byte)
    }

    fn with_file(&self, _path: &Path, call: &mut dyn FnMut(Option<BorrowedFd<'_>>)) {
        call(Some(self.mapping.file()));
    }

    fn unmap(&self, bytes: &Range<u64>) {
        self.mapping.unmap_shared(bytes);
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn sync(&self, sync: &mut dyn FnMut() -> io::Result<()>) {
        let _syncing = self.syncing.read().unwrap_or_else(PoisonError::into_inner);
        self.note(sync());
    }

    fn has_lost(&self) -> bool {
        // A sync in progress may have got an error that it has not noted yet.
        self.syncing.try_write().is_err() || self.failed.load(Ordering::Relaxed) != 0
    }
}

#[cfg(test)]
mod tests;
