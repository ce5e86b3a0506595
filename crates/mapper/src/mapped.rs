//! One mapping of a file, read-only: in use by views, or parked. It is of the whole file where it can be used again for other
//! views, and otherwise of the pages that its view needs.
//!
//! # Faults
//! A load of a byte that is not there (the file was cut short, the device failed) raises SIGBUS. Under a closure of a view
//! the page is replaced by zeros and the call returns an error ([`aquifer_vm::guard`]); through a bare pointer the signal takes
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
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use aquifer_sys::fallible;
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

/// A mapping. Unmapped, perhaps later, when the last who knows it is gone.
pub(crate) struct Mapped {
    heap: Arc<Heap>,
    extent: ManuallyDrop<Extent>,
    pub id: FileId,
    /// Where in the file it begins: at a page.
    first_byte: u64,
    /// Bytes of the file that are mapped: whole pages.
    pub mapped_bytes: u64,
    /// What the mapping cache knows it by, if it does.
    pub key: Option<CacheKey>,
    pub may_park: AtomicBool,
    /// Where its views told the kernel to read nothing ahead.
    pub random: RandomRanges,
    replaceable: Replaceable,
    file: Mutex<Option<Arc<Kept>>>,
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

/// Unmaps what was mapped at a free place to find out whether the kernel does it. Some file systems are asked when what was
/// at the place is gone already, and what another thread maps there then would be taken for this one's.
pub(super) fn was_tried(elsewhere: io::Result<*mut u8>, len: usize) -> io::Result<()> {
    let address = elsewhere?;
    // SAFETY: mapped for this, and nobody knows it.
    unsafe { memory::unmap(address, len) }
}

impl Mapped {
    /// Maps a range of a file, not empty. The mapping cache may know it by `key`.
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
        // The whole of the extent: nothing of what it held before stays.
        // SAFETY: fresh addresses that nobody else knows.
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
        // SAFETY: it retires the extent when it is dropped, and has its address until then.
        unsafe { mapped.extent.set_owner(Arc::<Mapped>::as_ptr(&mapped)) };
        Ok(mapped)
    }

    /// The first byte.
    pub fn address(&self) -> *const u8 {
        self.extent.address()
    }

    /// A byte of the file, or the one behind the last.
    pub fn address_of(&self, offset_bytes: u64) -> *const u8 {
        self.address().wrapping_add((offset_bytes - self.first_byte) as usize)
    }

    /// A range of the file as offsets from the first byte that is mapped.
    pub fn in_mapping(&self, range: &Range<u64>) -> Range<usize> {
        (range.start - self.first_byte) as usize..(range.end - self.first_byte) as usize
    }

    /// Bytes of the file that are mapped.
    pub fn range(&self) -> Range<u64> {
        self.first_byte..self.first_byte + self.mapped_bytes
    }

    /// Whether all pages are the file's, and it may be used again for others.
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

    /// Keeps a file of its identity open for as long as it is in use, unless it does already.
    pub fn keep_file(&self, kept: Arc<Kept>) {
        let mut file = self.lock_file();
        if file.is_none() {
            *file = Some(kept);
        }
    }

    /// What the file that is kept open is called at the moment.
    pub fn path_now(&self) -> Option<PathBuf> {
        let kept = self.lock_file().clone();
        kept.map(|kept| path_of(kept.file()))
    }

    /// The file, opened again if need be: if its name still leads to it.
    pub fn file(&self, name: &FileName) -> Option<Arc<Kept>> {
        // Asks this mapping, so before it is locked.
        let path = name.path(Some(self));
        let mut kept = self.lock_file();
        if let Some(kept) = &*kept {
            return Some(kept.clone());
        }
        match Kept::new(self.open_again(path)?) {
            Ok(file) => Some(kept.insert(file).clone()),
            Err(file) => Some(Kept::uncounted(file)),
        }
    }

    /// As [`Mapped::file`], for a moment: it is not kept open.
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
        let page = SMALL_PAGE_BYTES;
        let inside = self.in_mapping(range);
        let addresses =
            start + inside.start / page * page..start + inside.end.next_multiple_of(page);
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
                    if self.replaceable.settle(|again| self.map_again(name, again))
                        && copy() == (true, true) =>
                {
                    Ok(())
                }
                _ => Err(self.fault(name, range.start, &range)),
            };
        }
        self.guarded(name, &range, || {
            // SAFETY: mapped, and a fault is caught by the guard; the target is the caller's own.
            unsafe { memory::copy_racy(source, target.as_mut_ptr(), target.len()) };
        })
    }

    /// Why something in `range` could not be had: of what lies from `offset_bytes` on a byte of each page is read, so that
    /// the caller names no more than it has looked at.
    pub fn fault(&self, name: &FileName, offset_bytes: u64, range: &Range<u64>) -> MapError {
        let fault = |offset_bytes, cause| {
            let path = name.path(Some(self)).to_owned();
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

    /// Maps the file again where zero pages are.
    fn map_again(&self, name: &FileName, addresses: Range<usize>) -> bool {
        let Some(kept) = self.file(name) else { return false };
        let offset = self.first_byte + (addresses.start - self.address() as usize) as u64;
        // SAFETY: inside this mapping, which is read-only and never borrowed as references while a guard is active but by
        // who vouched for the file.
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

/// Why something could not be mapped; the caller knows what it is called.
pub(crate) enum NotMapped {
    /// There are no addresses, or too many mappings.
    NoAddresses(NoAddresses),
    /// The system refused.
    Refused(io::Error),
}

impl NotMapped {
    /// Whether there may be room once other mappings are gone.
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

    /// The error of mapping so many bytes of a file.
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
