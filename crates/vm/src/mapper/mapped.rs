//! One mapping of a file, read-only, from its start: in use by views, or parked.
//!
//! # Faults
//! A load of a byte that is not there (the file was cut short, the device failed) raises SIGBUS. Under a closure of a view
//! the page is replaced by zeros and the call returns an error ([`crate::guard`]); through a bare pointer the signal takes
//! its usual course.
//!
//! # Descriptors
//! See `descriptors`: some files in use stay open, parked ones do not. A view opens its file again when it needs it, which
//! is only after a fault.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use aquifer_sys::fallible;
use aquifer_sys::file_system;
use aquifer_sys::memory::{self, Advice, Protection, SMALL_PAGE_BYTES};
use aquifer_sys::signal::FaultContext;

use super::descriptors::{self, Kept};
use super::error::{FaultCause, MapError, Result};
use super::heap::{Extent, Heap};
use super::identity::{FileId, Status};
use crate::guard::{Replaceable, Trouble};
use crate::{FaultOwner, Served};

/// A mapping. Unmapped, perhaps later, when the last who knows it is gone.
pub(crate) struct Mapped {
    heap: Arc<Heap>,
    extent: ManuallyDrop<Extent>,
    pub id: FileId,
    /// Bytes of the file from its start that are mapped: whole pages.
    pub mapped_bytes: u64,
    pub may_park: AtomicBool,
    replaceable: Replaceable,
    file: Mutex<Option<Kept>>,
}

/// Opens a file for reading without waiting for anybody: a pipe would.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Opens a file to be read and written, as [`open`] does.
pub(crate) fn open_to_store(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Whether the page is a hole of a file in memory: there it needs room also to be looked at through a mapping.
pub(super) fn is_unfilled(file: BorrowedFd<'_>, at: u64) -> bool {
    let page = SMALL_PAGE_BYTES as u64;
    let is_in_memory =
        file_system::magic(file).is_ok_and(|magic| file_system::in_memory(magic).is_some());
    // Where the kernel does not tell, it is the likely reason.
    is_in_memory
        && memory::cachestat(file, at / page * page, page).map_or(true, |stat| stat.cached == 0)
}

impl Mapped {
    /// Maps a file of this length, not zero, whole.
    pub fn new(
        heap: &Arc<Heap>,
        file: &Arc<File>,
        path: &Path,
        status: &Status,
        may_park: bool,
    ) -> Result<Arc<Mapped>> {
        let failed =
            |source| MapError::Map { path: path.to_owned(), len_bytes: status.len_bytes, source };
        let len = usize::try_from(status.len_bytes)
            .ok()
            .and_then(|len| len.checked_next_multiple_of(SMALL_PAGE_BYTES))
            .ok_or_else(|| failed(io::Error::from_raw_os_error(libc::ENOMEM)))?;
        let extent = heap.take(len, path)?;
        // The whole of the extent: nothing of what it held before stays.
        // SAFETY: fresh addresses that nobody else knows.
        let mapped = unsafe {
            memory::map_file_at(
                extent.address(),
                extent.capacity_bytes(),
                Protection::Read,
                file.as_fd(),
                0,
            )
        };
        mapped.map_err(failed)?;
        let mapped = Arc::new(Mapped {
            heap: heap.clone(),
            extent: ManuallyDrop::new(extent),
            id: status.id,
            mapped_bytes: len as u64,
            may_park: AtomicBool::new(may_park),
            replaceable: Replaceable::new(),
            file: Mutex::new(descriptors::keep(file, path, status.id)),
        });
        // SAFETY: it retires the extent when it is dropped, and has its address until then.
        unsafe { mapped.extent.set_owner(Arc::<Mapped>::as_ptr(&mapped)) };
        Ok(mapped)
    }

    /// The first byte.
    pub fn address(&self) -> *const u8 {
        self.extent.address()
    }

    /// Whether all pages are the file's, and it may be used again for others.
    pub fn is_sound(&self) -> bool {
        self.replaceable.is_settled()
    }

    /// Closes the file.
    pub fn close_file(&self) {
        drop(self.lock_file().take());
    }

    /// Keeps a file open that no path leads to, as long as it is in use. Without descriptors it is done without.
    pub fn keep_file(&self, file: &File) {
        let mut kept = self.lock_file();
        if kept.is_none() {
            *kept = file.try_clone().ok().map(|file| Kept::anyway(&Arc::new(file)));
        }
    }

    fn lock_file(&self) -> std::sync::MutexGuard<'_, Option<Kept>> {
        self.file.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The file, opened again if need be: if the path still leads to it.
    pub fn file(&self, path: &Path) -> Option<Arc<File>> {
        let mut kept = self.lock_file();
        if let Some(kept) = &*kept {
            return Some(kept.file().clone());
        }
        let file = Arc::new(self.open_again(path)?);
        *kept = Kept::new(&file);
        Some(file)
    }

    /// As [`Mapped::file`], for a moment: it is not kept open.
    pub fn file_for_now(&self, path: &Path) -> Option<Arc<File>> {
        let kept = self.lock_file().as_ref().map(|kept| kept.file().clone());
        kept.or_else(|| self.open_again(path).map(Arc::new))
    }

    fn open_again(&self, path: &Path) -> Option<File> {
        let file = open(path).ok()?;
        (Status::of_file(&file).ok()?.id == self.id).then_some(file)
    }

    /// Runs `access` with faults in `range` of the file turned into errors.
    pub fn guarded<T>(
        &self,
        path: &Path,
        range: &Range<u64>,
        access: impl FnOnce() -> T,
    ) -> Result<T> {
        let start = self.address() as usize;
        let page = SMALL_PAGE_BYTES;
        let addresses = start + range.start as usize / page * page
            ..start + (range.end as usize).next_multiple_of(page);
        let outcome =
            self.replaceable.guarded(addresses, |again| self.map_again(path, again), access);
        outcome.map_err(|trouble| match trouble {
            Trouble::Failed { address, .. } => {
                let at = range.start.max((address - start) as u64);
                self.fault(path, at, &(range.start..at + 1))
            }
            Trouble::Unsettled => self.fault(path, range.end - 1, range),
        })
    }

    /// Copies from the file's bytes at `offset_bytes`.
    pub fn copy_to(&self, path: &Path, offset_bytes: u64, target: &mut [u8]) -> Result<()> {
        let range = offset_bytes..offset_bytes + target.len() as u64;
        let source = self.address().wrapping_add(offset_bytes as usize);
        if fallible::SUPPORTED {
            let mut copy = || {
                self.replaceable.is_settled_during(|| {
                    // SAFETY: mapped; the target is the caller's own.
                    unsafe { fallible::try_copy(source, target.as_mut_ptr(), target.len()) }
                })
            };
            return match copy() {
                (true, true) => Ok(()),
                (true, false)
                    if self.replaceable.settle(|again| self.map_again(path, again))
                        && copy() == (true, true) =>
                {
                    Ok(())
                }
                _ => Err(self.fault(path, range.start, &range)),
            };
        }
        self.guarded(path, &range, || {
            // SAFETY: mapped, and a fault is caught by the guard; the target is the caller's own.
            unsafe { memory::copy_racy(source, target.as_mut_ptr(), target.len()) };
        })
    }

    /// Why something in `range` could not be had: of what lies from `offset_bytes` on a byte of each page is read, so that
    /// the caller names no more than it has looked at.
    pub fn fault(&self, path: &Path, offset_bytes: u64, range: &Range<u64>) -> MapError {
        let fault =
            |offset_bytes, cause| MapError::Fault { path: path.to_owned(), offset_bytes, cause };
        let Some(file) = self.file(path) else {
            return fault(offset_bytes, FaultCause::OutOfReach);
        };
        let mut byte = [0];
        let page = SMALL_PAGE_BYTES as u64;
        let mut at = offset_bytes.max(range.start);
        while at < range.end {
            match aquifer_sys::io::read_at(file.as_fd(), &mut byte, at) {
                Ok(1) if is_unfilled(file.as_fd(), at) => return fault(at, FaultCause::NoSpace),
                Ok(1) => at = (at / page + 1) * page,
                Ok(_) => {
                    let len_bytes = file.metadata().map_or(at, |metadata| metadata.len());
                    return fault(len_bytes.clamp(range.start, at), FaultCause::Truncated);
                }
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(libc::EIO);
                    return fault(at, FaultCause::Io(errno));
                }
            }
        }
        fault(offset_bytes, FaultCause::Passing)
    }

    /// Maps the file again where zero pages are.
    fn map_again(&self, path: &Path, addresses: Range<usize>) -> bool {
        let Some(file) = self.file(path) else { return false };
        let offset = (addresses.start - self.address() as usize) as u64;
        // SAFETY: inside this mapping, which is read-only and never borrowed as references while a guard is active but by
        // who vouched for the file.
        let mapped = unsafe {
            memory::map_file_at(
                addresses.start as *mut u8,
                addresses.end - addresses.start,
                Protection::Read,
                file.as_fd(),
                offset,
            )
        };
        mapped.is_ok()
    }
}

impl FaultOwner for Mapped {
    fn serve(&self, fault: &FaultContext) -> Served {
        // SIGSEGV here is a store to a read-only mapping. A load that can fail is left to.
        if fault.signal != libc::SIGBUS || fault.fallible {
            return Served::No;
        }
        let Some(guarded) = self.replaceable.guarded_around(fault.address) else {
            return Served::No;
        };
        // Page by page, so that others lose nothing that is there. If many are gone, and the last one too, so is what lies
        // between: the file has ended, or its device.
        let last = (guarded.end - SMALL_PAGE_BYTES) as *mut u8;
        let is_gone = || {
            // SAFETY: a page of this mapping; populating changes no contents.
            let populated = unsafe { memory::advise(last, SMALL_PAGE_BYTES, Advice::PopulateRead) };
            populated.is_err_and(|error| error.raw_os_error() == Some(libc::EFAULT))
        };
        let has_ended = guarded.has_ended || guarded.has_many_gone && is_gone();
        // SAFETY: the guarded addresses are this mapping's.
        match unsafe { self.replaceable.replace(fault.address, has_ended) } {
            true => Served::Yes,
            false => Served::No,
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: taken once, here.
        let extent = unsafe { ManuallyDrop::take(&mut self.extent) };
        self.heap.retire(extent);
    }
}
