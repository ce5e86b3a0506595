//! Media whose bytes are memory: the domains `Dax` and `Volatile`.
//!
//! The file or device is mapped shared as a whole, and every transfer is a copy to or from the
//! mapping:
//!
//! | | `Dax` | `Volatile` |
//! |---|---|---|
//! | `write_at` | non-temporal stores | stores |
//! | `write_back` | the cache lines of the ranges are written back | nothing |
//! | `flush` | a store fence | nothing |
//! | `write_durable` | non-temporal stores; lines covered in part are written back; a fence | stores |
//!
//! `write_back` also flushes earlier stores of other processes through their own mappings: a cache
//! line belongs to no process.
//!
//! [`WriteWindows`] describes how a process stores if it guards itself against its own stray
//! stores.
//!
//! # Forcing
//! Any file that can be mapped can be opened as `Dax`, for tests and measurements: the same
//! instructions run, but if the mapping is page cache, a power cut loses what the kernel has not
//! written back on its own.
//!
//! # Length
//! Reads, `write_at` and `store_at` try the mapping first. If that fails, and in all other
//! operations, the length is checked: a file that was cut short gives an error, and a file that another process
//! made longer is mapped up to its new end. A file that is cut short *during* a transfer, broken
//! memory and a page that cannot be allocated give errors, too (`sys::fallible`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use aquifer_sys::copy::{self, FlushForm};
use aquifer_sys::high_fd::HeldFile;
use aquifer_sys::memory::{REGION_BYTES, SMALL_PAGE_BYTES};
use aquifer_sys::{devdax, file_system, io as file_io, residency};
use aquifer_vm::file_mapping::{FileMapping, Inaccessible, MappingOptions};
use aquifer_vm::{WindowKey, WriteWindow};

use super::{
    ByteRange, Media, MediaError, MediaOperation, PersistenceDomain, WriteWindows, check_inside,
    opened_for_reading,
};

/// The unit in which new pages are made huge.
const COLLAPSED_BYTES: u64 = 32 << 20;
/// The unit in which zeros are written.
const ZEROS_BYTES: u64 = 4 << 20;

/// A file or device whose bytes are memory. See the module's documentation.
///
/// Safe to use from any thread; concurrent transfers to the same bytes mix, but never within an
/// aligned word of eight bytes.
#[derive(Debug)]
pub struct MappedMedia {
    path: PathBuf,
    file: HeldFile,
    mapping: FileMapping,
    stores: Stores,
    /// How cache lines are flushed; `None` in the domain `Volatile`.
    flush: Option<FlushForm>,
    /// The length of a device; `None` for a file, whose length is read each time.
    device_bytes: Option<u64>,
    maps_privately: bool,
    growing: Mutex<()>,
}

/// How bytes are written.
#[derive(Debug)]
enum Stores {
    /// Not at all: opened for reading.
    Nowhere,
    /// By stores to the linear mapping.
    Linear,
    /// By stores to a second mapping of the same bytes, in windows.
    Guarded { mapping: FileMapping, key: WindowKey },
    /// By system calls.
    Calls,
}

impl Stores {
    fn windows(&self) -> WriteWindows {
        match self {
            Stores::Nowhere | Stores::Linear => WriteWindows::None,
            Stores::Guarded { .. } => WriteWindows::Keys,
            Stores::Calls => WriteWindows::Calls,
        }
    }
}

/// The requirement on a file that is to be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Persistence {
    /// It must be persistent memory.
    Checked,
    /// It is treated as persistent memory.
    Forced,
    /// Not persistent.
    Volatile,
}

impl MappedMedia {
    /// Maps an open file or device; `path` is for messages. `writing` selects how it is written, or
    /// is `None` if it was opened for reading.
    ///
    /// # Errors
    /// The system's errors; `EOPNOTSUPP` or `EINVAL` if persistent memory was required and it is
    /// not; [`io::ErrorKind::Unsupported`] if the CPU cannot flush a cache line, or has no
    /// protection keys although these were requested.
    pub(super) fn new(
        file: File,
        path: PathBuf,
        writing: Option<WriteWindows>,
        persistence: Persistence,
    ) -> io::Result<MappedMedia> {
        let flush = match persistence {
            Persistence::Volatile => None,
            _ => Some(FlushForm::best().ok_or_else(|| {
                let reason = "this CPU has no instruction to flush a cache line";
                io::Error::new(io::ErrorKind::Unsupported, reason)
            })?),
        };
        let metadata = file.metadata()?;
        let kind = metadata.file_type();
        let is_devdax = devdax::is_devdax(&metadata);
        let device_bytes = if is_devdax {
            Some(devdax::len_bytes(&metadata))
        } else if kind.is_block_device() {
            Some(file_io::block_device_len_bytes(file.as_fd())?)
        } else {
            None
        };
        let is_hugetlbfs =
            device_bytes.is_none() && file_system::magic(file.as_fd())? == file_system::HUGETLBFS;
        let unit_bytes = if is_devdax {
            devdax::alignment_bytes(&metadata)
        } else if is_hugetlbfs {
            file_system::block_bytes(file.as_fd())?
        } else {
            SMALL_PAGE_BYTES as u64
        };
        let unit_bytes = unit_bytes.max(SMALL_PAGE_BYTES as u64).next_power_of_two();
        let len_bytes = device_bytes.unwrap_or(metadata.len());
        let options = MappingOptions {
            writable: writing == Some(WriteWindows::None),
            synchronous: persistence == Persistence::Checked,
            unit_bytes: in_memory(unit_bytes)?,
            alignment_bytes: in_memory(alignment_bytes(len_bytes).max(unit_bytes))?,
            key: None,
        };
        let map = |options| FileMapping::new(file.as_fd(), in_memory(len_bytes)?, options);
        let mapping = map(options)?;
        // With the router, a load from a page that no longer exists ends in an error. A file that is
        // not persistent memory was refused before it.
        aquifer_vm::router::install().map_err(io::Error::other)?;
        let stores = match writing {
            None => Stores::Nowhere,
            Some(WriteWindows::None) => Stores::Linear,
            Some(WriteWindows::Calls) => Stores::Calls,
            Some(WriteWindows::Keys | WriteWindows::Best) => {
                let key = WindowKey::of_process()?;
                let guarded = MappingOptions { writable: true, key: Some(key.key()), ..options };
                Stores::Guarded { mapping: map(guarded)?, key }
            }
        };
        Ok(MappedMedia {
            path,
            file: HeldFile::new(file.into())?,
            mapping,
            stores,
            flush,
            device_bytes,
            maps_privately: !is_hugetlbfs && !is_devdax,
            growing: Mutex::new(()),
        })
    }

    fn duplicate(&self) -> io::Result<File> {
        self.file.as_fd().try_clone_to_owned().map(File::from)
    }

    fn present_len_bytes(&self) -> io::Result<u64> {
        match self.device_bytes {
            Some(device_bytes) => Ok(device_bytes),
            None => residency::file_len_bytes(self.file.as_fd()),
        }
    }

    /// Runs one operation with its range check, and gives its errors their context.
    fn run(
        &self,
        operation: MediaOperation,
        range: ByteRange,
        access: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), MediaError> {
        self.reach(range)
            .and_then(|()| access())
            .map_err(|error| self.file.explain(error))
            .map_err(MediaError::at(&self.path, operation, range))
    }

    /// Checks that a range lies in the file, and maps it if necessary.
    fn reach(&self, range: ByteRange) -> io::Result<()> {
        let len_bytes = self.present_len_bytes()?;
        check_inside(range, len_bytes)?;
        if range.end_bytes() > self.mapping.len_bytes() as u64 {
            self.extend(len_bytes)?;
        }
        Ok(())
    }

    /// Maps the file up to its new length; the linear mapping last, because its length is the one
    /// that is checked.
    fn extend(&self, len_bytes: u64) -> io::Result<()> {
        if let Stores::Guarded { mapping, .. } = &self.stores {
            mapping.extend(self.file.as_fd(), in_memory(len_bytes)?)?;
        }
        self.mapping.extend(self.file.as_fd(), in_memory(len_bytes)?)
    }

    /// The error of a failed copy.
    fn explain(&self, range: ByteRange) -> impl FnOnce(Inaccessible) -> io::Error {
        move |_| {
            let outside = self.present_len_bytes().and_then(|len| check_inside(range, len));
            match outside {
                Err(error) => error,
                Ok(()) => io::Error::from_raw_os_error(libc::EIO),
            }
        }
    }

    fn store(
        &self,
        operation: MediaOperation,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), MediaError> {
        let range = ByteRange { offset_bytes: offset, len_bytes: bytes.len() as u64 };
        self.run(operation, range, || {
            if let Some(stored) = self.store_by_memory(offset, bytes) {
                return stored.map_err(self.explain(range));
            }
            if !self.is_writable() {
                return Err(opened_for_reading());
            }
            file_io::write_all_at(self.file.as_fd(), bytes, offset)?;
            let Some(flush) = self.flush else { return Ok(()) };
            let flushed = self.mapping.flush(offset, bytes.len(), flush);
            copy::store_fence();
            flushed.map_err(self.explain(range))
        })
    }

    /// Stores to the mapping as the domain requires; `None` if bytes are not written by stores.
    fn store_by_memory(&self, offset: u64, bytes: &[u8]) -> Option<Result<(), Inaccessible>> {
        // No reference covers the range: the callers of the unsafe operations of `Media` guarantee
        // it, and new pages have no references.
        let store = |mapping: &FileMapping| match self.flush {
            // SAFETY: no reference covers the range, as stated above.
            Some(flush) => unsafe { mapping.persist(offset, bytes, flush) },
            // SAFETY: as above.
            None => unsafe { mapping.write(offset, bytes) },
        };
        match &self.stores {
            Stores::Nowhere | Stores::Calls => None,
            Stores::Linear => Some(store(&self.mapping)),
            Stores::Guarded { mapping, key } => {
                let _window = key.open();
                Some(store(mapping))
            }
        }
    }

    /// Stores to the mapping with ordinary stores; false if the range is not mapped or not
    /// accessible.
    fn store_mapped(&self, offset: u64, bytes: &[u8]) -> bool {
        match &self.stores {
            Stores::Nowhere | Stores::Calls => false,
            // SAFETY: the caller of `Media::store_at` guarantees that no reference covers the
            // range.
            Stores::Linear => unsafe { self.mapping.write(offset, bytes) }.is_ok(),
            Stores::Guarded { mapping, key } => {
                let _window = key.open();
                // SAFETY: as above: no reference covers the range.
                unsafe { mapping.write(offset, bytes) }.is_ok()
            }
        }
    }

    /// Sets the file's length, allocates every new page, and makes new bytes zero.
    fn lengthen(
        &self,
        from_bytes: u64,
        to_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> io::Result<()> {
        let total_bytes = to_bytes - from_bytes;
        match file_io::allocate(self.file.as_fd(), from_bytes, total_bytes) {
            // ramfs: it has no limit that could be exceeded.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                self.duplicate()?.set_len(to_bytes)?;
            }
            allocated => allocated?,
        }
        self.extend(to_bytes)?;
        if self.flush.is_some() {
            // A page that is only allocated needs a metadata change at its first store.
            self.write_zeros(from_bytes, to_bytes, progress)?;
            self.duplicate()?.sync_all()?;
        } else {
            self.use_huge_pages(from_bytes, to_bytes, progress);
        }
        Ok(())
    }

    /// Makes a file in memory consist of huge pages where possible: accesses then take few faults
    /// and few TLB entries (views of 4 KiB are two to three times as fast).
    pub(super) fn use_huge_pages(
        &self,
        from_bytes: u64,
        to_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) {
        let total_bytes = to_bytes - from_bytes;
        let region_bytes = REGION_BYTES as u64;
        let end_bytes = to_bytes / region_bytes * region_bytes;
        let mut at_bytes = from_bytes.next_multiple_of(region_bytes);
        while at_bytes < end_bytes {
            let part_bytes = (end_bytes - at_bytes).min(COLLAPSED_BYTES);
            if !self.mapping.use_huge_pages(at_bytes, part_bytes as usize) {
                // Not supported, or no huge pages left: small ones remain.
                break;
            }
            at_bytes += part_bytes;
            progress(at_bytes - from_bytes, total_bytes);
        }
        progress(total_bytes, total_bytes);
    }

    /// Zeroes a range, durably in the domain `Dax`.
    pub(super) fn write_zeros(
        &self,
        from_bytes: u64,
        to_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> io::Result<()> {
        let total_bytes = to_bytes - from_bytes;
        let zeros = vec![0; ZEROS_BYTES.min(total_bytes) as usize];
        let mut at_bytes = from_bytes;
        while at_bytes < to_bytes {
            let len_bytes = (to_bytes - at_bytes).min(zeros.len() as u64);
            self.store(MediaOperation::Resize, at_bytes, &zeros[..len_bytes as usize])
                .map_err(|error| error.source)?;
            at_bytes += len_bytes;
            progress(at_bytes - from_bytes, total_bytes);
        }
        Ok(())
    }
}

/// The alignment of the mapping of media of this length.
pub(super) fn alignment_bytes(len_bytes: u64) -> u64 {
    // hugetlbfs shares page tables between mappings of whole ranges of this size.
    const LARGE_BYTES: u64 = 1 << 30;
    match len_bytes {
        large if large >= LARGE_BYTES => LARGE_BYTES,
        _ => REGION_BYTES as u64,
    }
}

/// Converts a length to `usize`.
pub(super) fn in_memory(len_bytes: u64) -> io::Result<usize> {
    usize::try_from(len_bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}

impl Media for MappedMedia {
    fn path(&self) -> &Path {
        &self.path
    }

    fn len_bytes(&self) -> u64 {
        self.present_len_bytes().unwrap_or(0)
    }

    fn domain(&self) -> PersistenceDomain {
        match self.flush {
            Some(_) => PersistenceDomain::Dax,
            None => PersistenceDomain::Volatile,
        }
    }

    fn is_writable(&self) -> bool {
        !matches!(self.stores, Stores::Nowhere)
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MediaError> {
        // Mapped bytes can be read without a length check.
        if self.mapping.read(offset_bytes, bytes).is_ok() {
            return Ok(());
        }
        let range = ByteRange { offset_bytes, len_bytes: bytes.len() as u64 };
        self.run(MediaOperation::Read, range, || {
            self.mapping.read(offset_bytes, bytes).map_err(self.explain(range))
        })
    }

    unsafe fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        // Mapped bytes can be stored without a length check, which `write_back` makes.
        if let Some(Ok(())) = self.store_by_memory(offset_bytes, bytes) {
            return Ok(());
        }
        self.store(MediaOperation::Write, offset_bytes, bytes)
    }

    unsafe fn store_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        if self.store_mapped(offset_bytes, bytes) {
            Ok(())
        } else {
            // Beyond the mapping, or in error: `write_at` extends the mapping or reports the error.
            // SAFETY: the caller's guarantee is the same.
            unsafe { self.write_at(offset_bytes, bytes) }
        }
    }

    unsafe fn write_durable(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.store(MediaOperation::WriteDurable, offset_bytes, bytes)
    }

    fn write_back(&self, ranges: &[ByteRange]) -> Result<(), MediaError> {
        let Some(&last) = ranges.iter().max_by_key(|range| range.end_bytes()) else {
            return Ok(());
        };
        // One look at the length, which takes longer than to write a page back.
        self.run(MediaOperation::WriteBack, last, || {
            if self.is_writable() { Ok(()) } else { Err(opened_for_reading()) }
        })?;
        let Some(flush) = self.flush else { return Ok(()) };
        for &range in ranges {
            in_memory(range.len_bytes)
                .and_then(|len_bytes| {
                    let flushed = self.mapping.flush(range.offset_bytes, len_bytes, flush);
                    flushed.map_err(self.explain(range))
                })
                .map_err(MediaError::at(&self.path, MediaOperation::WriteBack, range))?;
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), MediaError> {
        let nothing = ByteRange { offset_bytes: 0, len_bytes: 0 };
        self.run(MediaOperation::Flush, nothing, || {
            if !self.is_writable() {
                return Err(opened_for_reading());
            }
            if self.flush.is_some() {
                copy::store_fence();
            }
            Ok(())
        })
    }

    fn grow(&self, len_bytes: u64) -> Result<(), MediaError> {
        self.grow_with_progress(len_bytes, &mut |_, _| {})
    }

    fn grow_with_progress(
        &self,
        len_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), MediaError> {
        let nothing = ByteRange { offset_bytes: 0, len_bytes: 0 };
        self.run(MediaOperation::Resize, nothing, || {
            let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
            if !self.is_writable() {
                return Err(opened_for_reading());
            }
            let present_bytes = self.present_len_bytes()?;
            if len_bytes <= present_bytes {
                return Ok(());
            }
            if self.device_bytes.is_some() {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "a device cannot be made longer; use a larger one",
                ));
            }
            self.lengthen(present_bytes, len_bytes, progress).inspect_err(|_| {
                // Give back what was allocated. If that fails as well, the file stays too long,
                // which does no harm.
                let _ = self.duplicate().and_then(|file| file.set_len(present_bytes));
            })
        })
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn mapping(&self) -> Option<&FileMapping> {
        Some(&self.mapping)
    }

    fn extend_mapping(&self) {
        // On failure the mapping stays short, which its users check.
        let _ = self.present_len_bytes().and_then(|len_bytes| self.extend(len_bytes));
    }

    fn write_windows(&self) -> WriteWindows {
        self.stores.windows()
    }

    fn mapping_to_store(&self) -> Option<&FileMapping> {
        match &self.stores {
            Stores::Nowhere | Stores::Calls => None,
            Stores::Linear => Some(&self.mapping),
            Stores::Guarded { mapping, .. } => Some(mapping),
        }
    }

    fn write_window(&self) -> Option<WriteWindow> {
        match &self.stores {
            Stores::Guarded { key, .. } => Some(key.open()),
            _ => None,
        }
    }

    fn maps_privately(&self) -> bool {
        self.maps_privately
    }
}
