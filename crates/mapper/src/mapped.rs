//! One read-only mapping of a file: in use by views, or parked. It covers the whole file where
//! other views can reuse it, and otherwise the pages that its view needs.
//!
//! # Faults
//! A load of a byte that cannot be read (the file was truncated, the device failed) raises SIGBUS.
//! In a closure of a view the page is replaced by zeros and the call returns an error
//! ([`aquifer_vm::guard`]); through a bare pointer the signal takes its usual course.
//!
//! # Descriptors
//! See `descriptors`: some files in use stay open, parked ones do not. A view reopens its file when
//! it needs it, which is only after a fault.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use aquifer_sys::file_system;
use aquifer_sys::futex::{Mutex, MutexGuard};
use aquifer_sys::memory::{self, Advice, Protection, SMALL_PAGE_BYTES};
use aquifer_sys::signal::FaultContext;

use super::descriptors::{FileName, Kept, Opened, path_of};
use super::error::{FaultCause, MapError};
use super::identity::{self, CacheKey, FileId, Status};
use super::random::RandomRanges;
use aquifer_vm::ephemeral::{Extent, Heap, NoAddresses};
use aquifer_vm::guard::{Replaceable, Trouble};
use aquifer_vm::{FaultOwner, Served, VmError};

/// A mapping. It is retired, and unmapped at once or later, when the last reference is dropped.
pub(crate) struct Mapped {
    heap: Arc<Heap>,
    extent: ManuallyDrop<Extent>,
    pub id: FileId,
    /// File offset of its first byte: a multiple of the page size.
    first_byte: u64,
    /// Bytes of the file that are mapped: whole pages.
    pub mapped_bytes: u64,
    /// Its key in the mapping cache, if it may be parked.
    pub key: Option<CacheKey>,
    pub may_park: AtomicBool,
    /// Ranges for which its views turned the kernel's read-ahead off.
    pub random: RandomRanges,
    replaceable: Replaceable,
    file: Mutex<Option<Arc<Kept>>>,
}

/// Opens a file for reading without blocking: opening a pipe would block.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Opens a file to be read and written, as [`open`] does.
pub(crate) fn open_to_store(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Whether the page is a hole of a file in memory: there even a load through a mapping needs space.
pub(super) fn is_unfilled(file: BorrowedFd<'_>, at: u64) -> bool {
    let page = SMALL_PAGE_BYTES as u64;
    let is_in_memory =
        file_system::magic(file).is_ok_and(|magic| file_system::in_memory(magic).is_some());
    // If the kernel does not tell, assume so: it is the likely cause.
    is_in_memory
        && memory::cachestat(file, at / page * page, page).map_or(true, |stat| stat.cached == 0)
}

/// Unmaps a trial mapping at a free address, made to find out whether the kernel accepts the file.
/// Some file systems refuse only after the kernel has removed what was mapped at a fixed address;
/// another thread's mapping made in that gap would be mistaken for this one.
pub(super) fn was_tried(elsewhere: io::Result<*mut u8>, len: usize) -> io::Result<()> {
    let address = elsewhere?;
    // SAFETY: mapped for the trial; its address is in no other hands.
    unsafe { memory::unmap(address, len) }
}

impl Mapped {
    /// Maps a non-empty range of a file. The mapping cache may keep it under `key`.
    pub fn new(
        heap: &Arc<Heap>,
        opened: &Opened<'_>,
        status: &Status,
        range: &Range<u64>,
        key: Option<CacheKey>,
    ) -> Result<Arc<Mapped>, NotMapped> {
        let page = SMALL_PAGE_BYTES as u64;
        let first_byte = range.start / page * page;
        let len = usize::try_from(range.end - first_byte)
            .ok()
            .and_then(|len| len.checked_next_multiple_of(SMALL_PAGE_BYTES))
            .ok_or_else(|| NotMapped::Refused(io::Error::from_raw_os_error(libc::ENOMEM)))?;
        if key.is_none() && !identity::refuses_early(opened.file(), status.id) {
            let elsewhere =
                memory::map_file(len, Protection::Read, opened.file().as_fd(), first_byte);
            was_tried(elsewhere, len).map_err(NotMapped::Refused)?;
        }
        let extent = heap.take(len).map_err(NotMapped::NoAddresses)?;
        // All of the extent, so that nothing it held before remains.
        // SAFETY: the extent's addresses belong to this mapping alone.
        let mapped = unsafe {
            memory::map_file_at(
                extent.address(),
                extent.capacity_bytes(),
                Protection::Read,
                opened.file().as_fd(),
                first_byte,
            )
        };
        mapped.map_err(NotMapped::Refused)?;
        let mapped = Arc::new(Mapped {
            heap: heap.clone(),
            extent: ManuallyDrop::new(extent),
            id: status.id,
            first_byte,
            mapped_bytes: len as u64,
            key,
            may_park: AtomicBool::new(key.is_some()),
            random: RandomRanges::new(heap.vmas().clone()),
            replaceable: Replaceable::new(),
            file: Mutex::new(opened.kept()),
        });
        // SAFETY: the extent is retired in `drop`, and the `Arc` does not move the owner before
        // that.
        unsafe { mapped.extent.set_owner(Arc::<Mapped>::as_ptr(&mapped)) };
        Ok(mapped)
    }

    /// The first byte.
    pub fn address(&self) -> *const u8 {
        self.extent.address()
    }

    /// The address of a byte of the file, or of the one behind the last.
    pub fn address_of(&self, offset_bytes: u64) -> *const u8 {
        self.address().wrapping_add((offset_bytes - self.first_byte) as usize)
    }

    /// A range of the file as offsets from the first mapped byte.
    pub fn in_mapping(&self, range: &Range<u64>) -> Range<usize> {
        (range.start - self.first_byte) as usize..(range.end - self.first_byte) as usize
    }

    /// The bytes of the file that are mapped.
    pub fn range(&self) -> Range<u64> {
        self.first_byte..self.first_byte + self.mapped_bytes
    }

    /// Whether all pages are the file's, so that the mapping may be reused.
    pub fn is_sound(&self) -> bool {
        self.replaceable.is_settled()
    }

    /// Closes the file.
    pub fn close_file(&self) {
        drop(self.lock_file().take());
    }

    fn lock_file(&self) -> MutexGuard<'_, Option<Arc<Kept>>> {
        self.file.lock()
    }

    /// Keeps this descriptor of the file open as long as the mapping is in use, unless it has one
    /// already.
    pub fn keep_file(&self, kept: Arc<Kept>) {
        let mut file = self.lock_file();
        if file.is_none() {
            *file = Some(kept);
        }
    }

    /// The current path of the file, if it is kept open.
    pub fn path_now(&self) -> Option<PathBuf> {
        let kept = self.lock_file().clone();
        kept.map(|kept| path_of(kept.file()))
    }

    /// The file, reopened if necessary; `None` if its path no longer names it.
    pub fn file(&self, name: &FileName) -> Option<Arc<Kept>> {
        // Before the lock: `path` takes the same lock.
        let path = name.path(|| self.path_now());
        let mut kept = self.lock_file();
        if let Some(kept) = &*kept {
            return Some(kept.clone());
        }
        match Kept::new(self.open_again(path)?) {
            Ok(file) => Some(kept.insert(file).clone()),
            Err(file) => Some(Kept::uncounted(file)),
        }
    }

    /// As [`Mapped::file`], for temporary use: it is not kept open.
    pub fn file_for_now(&self, path: &Path) -> Option<Arc<Kept>> {
        let kept = self.lock_file().clone();
        kept.or_else(|| self.open_again(path).map(Kept::uncounted))
    }

    fn open_again(&self, path: &Path) -> Option<File> {
        let file = open(path).ok()?;
        (Status::of_file(&file).ok()?.id == self.id).then_some(file)
    }

    /// Runs `access` with faults in `range` of the file turned into errors.
    pub fn guarded<T>(
        &self,
        name: &FileName,
        range: &Range<u64>,
        access: impl FnOnce() -> T,
    ) -> Result<T, MapError> {
        let start = self.address() as usize;
        let inside = self.in_mapping(range);
        let addresses = start + inside.start..start + inside.end;
        let outcome =
            self.replaceable.guarded(addresses, |again| self.map_again(name, again), access);
        outcome.map_err(|trouble| match trouble {
            Trouble::Failed { address, .. } => {
                let at = range.start.max(self.first_byte + (address - start) as u64);
                self.fault(name, at, &(range.start..at + 1))
            }
            Trouble::Unsettled => self.fault(name, range.end - 1, range),
        })
    }

    /// Copies from the file's bytes at `offset_bytes`.
    pub fn copy_to(
        &self,
        name: &FileName,
        offset_bytes: u64,
        target: &mut [u8],
    ) -> Result<(), MapError> {
        let range = offset_bytes..offset_bytes + target.len() as u64;
        let source = self.address_of(offset_bytes);
        let map_again = |again| self.map_again(name, again);
        // SAFETY: the source is mapped.
        if unsafe { self.replaceable.copy(source, target, map_again) } {
            Ok(())
        } else {
            Err(self.fault(name, range.start, &range))
        }
    }

    /// Finds out why a byte in `range` could not be accessed. Reads one byte of each page from
    /// `offset_bytes` on; the caller passes the range that it has accessed.
    pub fn fault(&self, name: &FileName, offset_bytes: u64, range: &Range<u64>) -> MapError {
        let fault = |offset_bytes, cause| {
            let path = name.path(|| self.path_now()).to_owned();
            MapError::Fault { path, offset_bytes, cause }
        };
        let Some(kept) = self.file(name) else {
            return fault(offset_bytes, FaultCause::OutOfReach);
        };
        let file = kept.file();
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

    /// Maps the file again at replaced pages.
    fn map_again(&self, name: &FileName, addresses: Range<usize>) -> bool {
        let Some(kept) = self.file(name) else { return false };
        let offset = self.first_byte + (addresses.start - self.address() as usize) as u64;
        // SAFETY: inside this read-only mapping. During a guard, references into it exist only if
        // their owner guarantees that the file does not change ([`super::FileView::as_slice`]).
        let mapped = unsafe {
            memory::map_file_at(
                addresses.start as *mut u8,
                addresses.end - addresses.start,
                Protection::Read,
                kept.file().as_fd(),
                offset,
            )
        };
        mapped.is_ok()
    }
}

/// Why a mapping could not be made; the caller adds the path.
pub(crate) enum NotMapped {
    /// No addresses are free, or the process has too many mappings.
    NoAddresses(NoAddresses),
    /// The system refused.
    Refused(io::Error),
}

impl NotMapped {
    /// Whether unmapping other mappings may make room.
    pub fn is_for_want_of_room(&self) -> bool {
        match self {
            NotMapped::NoAddresses(NoAddresses::Vmas { .. }) => true,
            NotMapped::NoAddresses(NoAddresses::Memory(VmError::ArenaFull {
                len_bytes,
                arena_bytes,
            })) => len_bytes <= arena_bytes,
            NotMapped::NoAddresses(_) => false,
            NotMapped::Refused(source) => source.raw_os_error() == Some(libc::ENOMEM),
        }
    }

    /// The error for mapping `len_bytes` of a file.
    pub fn of(self, path: PathBuf, len_bytes: u64) -> MapError {
        match self {
            NotMapped::NoAddresses(NoAddresses::Vmas { used, limit }) => {
                MapError::TooManyMappings { path, used, limit }
            }
            NotMapped::NoAddresses(NoAddresses::Memory(error)) => error.into(),
            NotMapped::NoAddresses(NoAddresses::Forked) => MapError::Forked,
            NotMapped::Refused(source) => MapError::Map { path, len_bytes, source },
        }
    }
}

impl FaultOwner for Mapped {
    fn serve(&self, fault: &FaultContext) -> Served {
        // Replace one page at a time, so that other threads lose no readable page. If many are
        // missing, and the last one too, replace all between: the file was truncated, or its device
        // failed.
        let is_there = |page: usize| {
            let page = page as *mut u8;
            // SAFETY: a page of this mapping; populating changes no contents.
            let populated = unsafe { memory::advise(page, SMALL_PAGE_BYTES, Advice::PopulateRead) };
            !populated.is_err_and(|error| error.raw_os_error() == Some(libc::EFAULT))
        };
        // SAFETY: the guarded addresses are this mapping's. References into them exist only if
        // their owner guarantees that the file does not change.
        unsafe { self.replaceable.serve_unless(fault, is_there) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: taken once, here.
        let extent = unsafe { ManuallyDrop::take(&mut self.extent) };
        self.heap.retire(extent);
    }
}
