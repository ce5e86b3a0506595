//! Media in a regular file on a disk, or on a block device: the domain `PageCache`.
//!
//! Everything goes through the page cache, so that written bytes are visible to all processes
//! immediately, outlive the process, and can be mapped.
//!
//! # Durability by range
//! A sync of the whole file would also write what other threads and processes have dirtied, and
//! takes as long as that needs. So nothing here syncs more than requested: see
//! [`aquifer_sys::range_sync`]. `write_durable` is `pwritev2(RWF_DSYNC)` if ranges are written back
//! with `sync_file_range`, otherwise `pwrite` and a sync of the range.
//!
//! # Failures
//! The kernel reports that it lost a page, but not which one (see `descriptors`). So after any such
//! failure since the file was opened here, whichever program it was reported to, every later
//! `write_back` and `flush` of this object fails with that error: any bytes written earlier may be
//! the lost ones. `write_durable` keeps working, because it writes the bytes that it makes durable.
//! Opening the file again clears the state, and recovery rewrites what is not known to be durable.
//!
//! # Growing
//! New blocks are allocated and then written once: a block that is only allocated needs a metadata
//! change, and so a commit of the file system's journal, at its first write. [`Media::grow`] writes
//! zeros.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use aquifer_sys::file_system::{self, commits_whole_inodes};
use aquifer_sys::high_fd::HeldFile;
use aquifer_sys::io as file_io;
use aquifer_sys::memory::SMALL_PAGE_BYTES;
use aquifer_sys::range_sync::{self, RangeSync, sync_range};
use aquifer_vm::file_mapping::{FileMapping, MappingOptions};

use super::descriptors::{Descriptor, Descriptors};
use super::mapped::{alignment_bytes, in_memory};
use super::rewritten::{How, Rewritten};
use super::{
    ByteRange, Media, MediaError, MediaOperation, PersistenceDomain, WriteWindows, check_inside,
    opened_for_reading,
};

/// The unit in which zeros are written. The page cache keeps them in folios of this size: a small
/// write into a folio of 2 MiB takes eight times as long, because the file system checks each of
/// its blocks.
const ZEROS_BYTES: usize = 256 << 10;
/// Zeros of at most this part of memory stay in the page cache, for the pages that are used first:
/// a write to an uncached page must allocate it.
const CACHED_PART: u64 = 8;
/// The most dirty bytes while zeros are written.
const ZEROS_WINDOW_BYTES: u64 = 64 << 20;

/// A file or block device as media. See the module's documentation.
///
/// Safe to use from any thread; concurrent transfers to the same bytes mix.
#[derive(Debug)]
pub struct FileMedia {
    path: PathBuf,
    file: HeldFile,
    /// The length of a block device; `None` for a file, whose length is read where it may have changed.
    device_bytes: Option<u64>,
    /// The greatest length that the file was seen to have.
    known_bytes: AtomicU64,
    /// `None` if opened for reading.
    descriptors: Option<Descriptors>,
    ranges: RangeSync,
    /// Whether `RWF_DSYNC` works. Only ever goes from true to false.
    has_durable_writes: AtomicBool,
    /// Errno of the first failure of write-back; 0 if there was none.
    lost: AtomicI32,
    growing: Mutex<()>,
    /// Whether the mapping is read-only: bytes are written by system calls only.
    is_guarded: bool,
    /// Created on first use; the inner value is `None` if the file cannot be mapped.
    mapping: OnceLock<Option<FileMapping>>,
    rewritten: Rewritten,
}

impl FileMedia {
    /// Takes an open regular file or block device; `path` is for messages. `writable` states how it
    /// was opened.
    ///
    /// # Errors
    /// The system's errors when the file is inspected.
    pub fn new(file: File, path: PathBuf, writable: bool) -> io::Result<FileMedia> {
        let metadata = file.metadata()?;
        let is_device = metadata.file_type().is_block_device();
        let magic = file_system::magic(file.as_fd())?;
        let device_bytes =
            is_device.then(|| file_io::block_device_len_bytes(file.as_fd())).transpose()?;
        let file = HeldFile::new(file.into())?;
        let descriptors = writable.then(|| Descriptors::new(&file)).transpose()?;
        // For a device node the magic is that of the file system with the node. Files in memory
        // have no journal to commit.
        let commits =
            is_device || commits_whole_inodes(magic) || file_system::in_memory(magic).is_some();
        Ok(FileMedia {
            path,
            file,
            device_bytes,
            known_bytes: AtomicU64::new(device_bytes.unwrap_or(metadata.len())),
            descriptors,
            ranges: RangeSync::new(commits),
            has_durable_writes: AtomicBool::new(commits),
            lost: AtomicI32::new(0),
            growing: Mutex::new(()),
            is_guarded: false,
            mapping: OnceLock::new(),
            rewritten: Rewritten::default(),
        })
    }

    /// Makes the mapping read-only.
    pub(super) fn guarded(self) -> FileMedia {
        FileMedia { is_guarded: true, ..self }
    }

    /// Describes how bytes become durable, for people.
    pub fn describe(&self) -> &'static str {
        if self.ranges.commits_whole_inodes() {
            "page cache, written back by range, one flush"
        } else {
            "page cache, each range synced"
        }
    }

    fn read_len_bytes(&self) -> io::Result<u64> {
        match self.device_bytes {
            Some(device_bytes) => Ok(device_bytes),
            None => aquifer_sys::residency::file_len_bytes(self.file.as_fd())
                .map_err(|error| self.file.explain(error)),
        }
    }

    /// The length; an error if it was cut short, also if writes have made it longer again.
    fn present_len_bytes(&self) -> io::Result<u64> {
        // Before the length: the file may be growing. Relaxed: the value orders nothing else.
        let known_bytes = self.known_bytes.load(Ordering::Relaxed);
        let len_bytes = self.see_len_bytes()?;
        check_inside(ByteRange { offset_bytes: 0, len_bytes: known_bytes }, len_bytes)?;
        Ok(len_bytes)
    }

    /// The length; the next operations know it.
    fn see_len_bytes(&self) -> io::Result<u64> {
        let len_bytes = self.read_len_bytes()?;
        // Relaxed: as above.
        self.known_bytes.fetch_max(len_bytes, Ordering::Relaxed);
        Ok(len_bytes)
    }

    /// Checks that a range lies in the file before it is written: a write to a file that was cut short
    /// would make it longer again, with zeros in place of what it had. The last byte that the file
    /// was seen to have tells by a load; asking for the length takes a third as long as writing a
    /// record of the log.
    fn check_known(&self, range: ByteRange) -> io::Result<()> {
        // Relaxed: as above.
        let known_bytes = self.known_bytes.load(Ordering::Relaxed);
        let has_last = |mapping: &FileMapping| mapping.read(known_bytes - 1, &mut [0]).is_ok();
        if known_bytes > 0
            && check_inside(range, known_bytes).is_ok()
            && self.mapping().is_some_and(has_last)
        {
            return Ok(());
        }
        check_inside(range, self.see_len_bytes()?)
    }

    fn duplicate(&self) -> io::Result<File> {
        self.file.as_fd().try_clone_to_owned().map(File::from)
    }

    fn writing(&self) -> io::Result<&Descriptors> {
        self.descriptors.as_ref().ok_or_else(opened_for_reading)
    }

    /// Runs one operation with its range check, and gives its errors their context.
    fn run<T>(
        &self,
        operation: MediaOperation,
        range: ByteRange,
        work: impl FnOnce() -> io::Result<T>,
    ) -> Result<T, MediaError> {
        self.present_len_bytes()
            .and_then(|len_bytes| check_inside(range, len_bytes))
            .and_then(|()| work())
            .map_err(MediaError::at(&self.path, operation, range))
    }

    fn how_to_write(&self, range: ByteRange) -> How {
        let now_seconds = aquifer_sys::clock::coarse_ns() as u64 / 1_000_000_000;
        self.rewritten.note(range, now_seconds)
    }

    fn is_prepared(&self, mapping: &FileMapping, how: How) -> bool {
        let How::Prepare(region) = how else { return true };
        let is_prepared = aquifer_vm::router::is_installed()
            && !aquifer_sys::signal::is_blocked(libc::SIGBUS)
            && aquifer_sys::residency::is_revealed(self.file.as_fd())
            && mapping.prepare_stores(region.offset_bytes, region.len_bytes as usize);
        self.rewritten.note_prepared(region, is_prepared);
        is_prepared
    }

    /// Records a failure of write-back, for all later syncs.
    fn lose(&self, error: io::Error) -> io::Error {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        // Relaxed: the value orders nothing else. A thread that loads 0 has not been told of this
        // failure either, or its own file description will report it.
        let _ = self.lost.compare_exchange(0, errno, Ordering::Relaxed, Ordering::Relaxed);
        error
    }

    fn check_nothing_lost(&self) -> io::Result<()> {
        // Relaxed: as above.
        match self.lost.load(Ordering::Relaxed) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Runs a sync through a file description that no other sync uses. A failure is final.
    fn sync_with(&self, sync: impl FnOnce(&mut Descriptor) -> io::Result<()>) -> io::Result<()> {
        let descriptors = self.writing()?;
        self.check_nothing_lost()?;
        let synced = descriptors.with(|descriptor| {
            sync(descriptor).map_err(|error| {
                // Before another thread can take its failure for a repetition of this one.
                let error = self.lose(descriptor.explain(error));
                descriptors.note_failure(descriptor);
                error
            })
        });
        synced?;
        descriptors.ask_witness(|error| self.lose(error))?;
        // The loss of what this thread has written may have been reported to another thread during
        // the sync.
        self.check_nothing_lost()
    }

    fn write_durably(
        &self,
        descriptors: &Descriptors,
        descriptor: &mut Descriptor,
        offset_bytes: u64,
        bytes: &[u8],
    ) -> io::Result<()> {
        let attempt = |descriptor: &Descriptor| {
            self.write_and_sync(descriptor, offset_bytes, bytes)
                .map_err(|error| descriptor.explain(error))
        };
        let Err(error) = attempt(descriptor) else {
            return Ok(());
        };
        // If the write itself is refused (no space, a limit), nothing was lost.
        file_io::write_all_at(descriptor.file(), bytes, offset_bytes)
            .map_err(|error| descriptor.explain(error))?;
        if descriptor.is_repeat(descriptors) && attempt(descriptor).is_ok() {
            return Ok(());
        }
        // As above.
        let error = self.lose(error);
        descriptors.note_failure(descriptor);
        Err(error)
    }

    fn write_and_sync(
        &self,
        descriptor: &Descriptor,
        offset_bytes: u64,
        bytes: &[u8],
    ) -> io::Result<()> {
        // Relaxed: a thread that still loads true gets the same refusal.
        if self.has_durable_writes.load(Ordering::Relaxed) {
            match file_io::write_all_at_durably(descriptor.file(), bytes, offset_bytes) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                    self.has_durable_writes.store(false, Ordering::Relaxed);
                }
                written => return written,
            }
        }
        file_io::write_all_at(descriptor.file(), bytes, offset_bytes)?;
        sync_range(descriptor.file(), offset_bytes..offset_bytes + bytes.len() as u64)
    }

    /// Allocates and zeroes the bytes between the two lengths.
    fn lengthen(
        &self,
        from_bytes: u64,
        to_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> io::Result<()> {
        let file = self.file.as_fd();
        match file_io::allocate(file, from_bytes, to_bytes - from_bytes) {
            // Writing allocates as well.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            allocated => allocated?,
        }
        write_zeros(file, from_bytes, to_bytes, progress)?;
        // Includes the length, which is metadata that a sync of data may omit.
        self.duplicate()?.sync_all()
    }
}

/// Writes zeros with a bounded number of dirty pages. Unless they are few, drops them from the cache
/// as it proceeds, so that they displace nothing.
pub(super) fn write_zeros(
    file: BorrowedFd<'_>,
    from_bytes: u64,
    to_bytes: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> io::Result<()> {
    let total_bytes = to_bytes - from_bytes;
    let stays_cached = total_bytes <= aquifer_sys::cpu::memory_bytes() / CACHED_PART;
    let zeros = vec![0; ZEROS_BYTES.min(usize::try_from(total_bytes).unwrap_or(ZEROS_BYTES))];
    let mut at_bytes = from_bytes;
    let mut window_bytes = from_bytes;
    while at_bytes < to_bytes {
        let len = zeros.len().min(usize::try_from(to_bytes - at_bytes).unwrap_or(usize::MAX));
        file_io::write_all_at(file, &zeros[..len], at_bytes)?;
        at_bytes += len as u64;
        if at_bytes - window_bytes >= ZEROS_WINDOW_BYTES {
            // Both only limit memory; the sync at the end makes the bytes durable.
            let _ = file_io::start_write_back(file, window_bytes, at_bytes - window_bytes);
            let before = window_bytes.saturating_sub(ZEROS_WINDOW_BYTES).max(from_bytes);
            if before < window_bytes {
                let _ = file_io::finish_write_back(file, before, window_bytes - before);
                if !stays_cached {
                    let _ = aquifer_sys::memory::drop_cached(file, before, window_bytes - before);
                }
            }
            window_bytes = at_bytes;
        }
        progress(at_bytes - from_bytes, total_bytes);
    }
    Ok(())
}

impl Media for FileMedia {
    fn path(&self) -> &Path {
        &self.path
    }

    fn len_bytes(&self) -> u64 {
        self.read_len_bytes().unwrap_or(0)
    }

    fn domain(&self) -> PersistenceDomain {
        PersistenceDomain::PageCache
    }

    fn is_writable(&self) -> bool {
        self.descriptors.is_some()
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MediaError> {
        // No check before: a short read shows that the range is outside.
        let range = ByteRange { offset_bytes, len_bytes: bytes.len() as u64 };
        let file = self.file.as_fd();
        let error = match file_io::read_exact_at(file, bytes, offset_bytes) {
            Ok(()) => return Ok(()),
            Err(error) => self.file.explain(error),
        };
        let outside = check_inside(range, self.len_bytes()).err();
        Err(MediaError::at(&self.path, MediaOperation::Read, range)(outside.unwrap_or(error)))
    }

    fn read_resident_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<bool, MediaError> {
        match file_io::read_resident_at(self.file.as_fd(), bytes, offset_bytes) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                self.read_at(offset_bytes, bytes).map(|()| true)
            }
            // An ordinary read reports the error better.
            Err(_) => Ok(false),
            Ok(got) => Ok(got == bytes.len()),
        }
    }

    unsafe fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        let range = ByteRange { offset_bytes, len_bytes: bytes.len() as u64 };
        self.check_known(range)
            .and_then(|()| self.writing().map(|_| ()))
            .and_then(|()| {
                file_io::write_all_at(self.file.as_fd(), bytes, offset_bytes)
                    .map_err(|error| self.file.explain(error))
            })
            .map_err(MediaError::at(&self.path, MediaOperation::Write, range))
    }

    unsafe fn store_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        let range = ByteRange { offset_bytes, len_bytes: bytes.len() as u64 };
        if self.check_known(range).is_ok()
            && let how = self.how_to_write(range)
            && how != How::Write
            && let Some(mapping) = self.mapping_to_store()
            && self.is_prepared(mapping, how)
            // SAFETY: the caller's guarantee is the same.
            && unsafe { mapping.write(offset_bytes, bytes) }.is_ok()
        {
            return Ok(());
        }
        // SAFETY: the caller's guarantee is the same.
        unsafe { self.write_at(offset_bytes, bytes) }
    }

    unsafe fn write_durable(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        let range = ByteRange { offset_bytes, len_bytes: bytes.len() as u64 };
        self.run(MediaOperation::WriteDurable, range, || {
            self.rewritten.forget(range);
            let descriptors = self.writing()?;
            if bytes.is_empty() {
                return Ok(());
            }
            descriptors
                .with(|descriptor| self.write_durably(descriptors, descriptor, offset_bytes, bytes))
        })
    }

    fn write_back(&self, ranges: &[ByteRange]) -> Result<(), MediaError> {
        let all: Vec<_> =
            ranges.iter().map(|range| range.offset_bytes..range.end_bytes()).collect();
        let merged = range_sync::merge(&all);
        let whole = match (merged.first(), merged.last()) {
            (Some(first), Some(last)) => {
                ByteRange { offset_bytes: first.start, len_bytes: last.end - first.start }
            }
            _ => ByteRange { offset_bytes: 0, len_bytes: 0 },
        };
        self.run(MediaOperation::WriteBack, whole, || {
            ranges.iter().for_each(|range| self.rewritten.forget(*range));
            self.sync_with(|descriptor| self.ranges.write_back(descriptor.file(), &merged))
        })
    }

    fn begin_write_back(&self, range: ByteRange) {
        // It reports no error of earlier writes, so none is lost.
        let _ = file_io::start_write_back(self.file.as_fd(), range.offset_bytes, range.len_bytes);
    }

    fn check_kept(&self) -> Result<(), MediaError> {
        let nothing = ByteRange { offset_bytes: 0, len_bytes: 0 };
        self.run(MediaOperation::WriteBack, nothing, || match &self.descriptors {
            Some(descriptors) => descriptors
                .ask_witness(|error| self.lose(error))
                .and_then(|()| self.check_nothing_lost()),
            None => Ok(()),
        })
    }

    fn flush(&self) -> Result<(), MediaError> {
        let nothing = ByteRange { offset_bytes: 0, len_bytes: 0 };
        self.run(MediaOperation::Flush, nothing, || {
            self.sync_with(|descriptor| {
                self.ranges.commit(descriptor.file(), descriptor.first_page().ok())
            })
        })
    }

    /// Where a sync of one page commits all of the file. A write with `RWF_DSYNC` goes through the page
    /// cache here, and the kernel ends it with the same sync of its range (`generic_write_sync`) that
    /// `msync` ends with; only direct I/O may instead persist that write alone.
    fn durable_writes_flush(&self) -> bool {
        self.ranges.commits_whole_inodes()
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
            self.writing()?;
            let present_bytes = self.read_len_bytes()?;
            if len_bytes <= present_bytes {
                return Ok(());
            }
            if self.device_bytes.is_some() {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "a device cannot be made longer; use a larger one",
                ));
            }
            self.lengthen(present_bytes, len_bytes, progress).map_err(|error| {
                // Give back what was allocated. If that fails as well, the file stays too long,
                // which does no harm.
                let _ = self.duplicate().and_then(|file| file.set_len(present_bytes));
                self.known_bytes.store(present_bytes, Ordering::Relaxed);
                self.file.explain(error)
            })
        })
    }

    fn forget_cached(&self, range: ByteRange) {
        self.rewritten.forget(range);
        // A hint: dirty pages and pages in use stay.
        let _ = aquifer_sys::memory::drop_cached(
            self.file.as_fd(),
            range.offset_bytes,
            range.len_bytes,
        );
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn mapping(&self) -> Option<&FileMapping> {
        let map = || {
            // With the router, a load from a page that no longer exists ends in an error.
            aquifer_vm::router::install().ok()?;
            let len_bytes = self.read_len_bytes().ok()?;
            let options = MappingOptions {
                writable: self.is_writable() && !self.is_guarded,
                synchronous: false,
                key: None,
                unit_bytes: SMALL_PAGE_BYTES,
                alignment_bytes: in_memory(alignment_bytes(len_bytes)).ok()?,
            };
            FileMapping::new(self.file.as_fd(), in_memory(len_bytes).ok()?, options).ok()
        };
        let mapping = self.mapping.get_or_init(map).as_ref()?;
        Some(mapping)
    }

    fn mapping_to_store(&self) -> Option<&FileMapping> {
        self.mapping().filter(|_| self.is_writable() && !self.is_guarded)
    }

    fn extend_mapping(&self) {
        let Some(mapping) = self.mapping() else { return };
        // On failure the mapping stays short, which its users check.
        let len_bytes = self.read_len_bytes().and_then(in_memory);
        let _ = len_bytes.and_then(|len_bytes| mapping.extend(self.file.as_fd(), len_bytes));
    }

    fn write_windows(&self) -> WriteWindows {
        if self.is_guarded { WriteWindows::Calls } else { WriteWindows::None }
    }

    fn maps_privately(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    use super::*;
    use aquifer_testkit::failing_device::FailingDevice;

    /// The kernel reports a lost page to each file description that was opened earlier, but not to
    /// one that was opened after some program was told.
    #[test]
    fn what_another_program_was_told_is_known_whatever_descriptor_syncs() {
        let Some(device) = FailingDevice::new() else {
            return eprintln!("skipped: no block device can be made here");
        };
        let open = || File::options().read(true).write(true).open(device.path()).unwrap();
        let media = FileMedia::new(open(), device.path().to_path_buf(), true).unwrap();
        let page = ByteRange { offset_bytes: 4 << 20, len_bytes: 4096 };
        let other = open();
        device.fill();
        // SAFETY: no pool is on the device.
        unsafe { media.write_at(page.offset_bytes, &[1; 4096]) }.unwrap();
        other.sync_all().expect_err("there is no room for it");
        device.empty();
        // All descriptors that existed at that time are in use.
        media.writing().unwrap().with(|_first| {
            media.write_back(&[page]).expect_err("it is lost");
            media.flush().expect_err("it is lost");
        });
        // SAFETY: as above.
        unsafe { media.write_durable(page.offset_bytes, &[1; 4096]) }.unwrap();
        media.flush().expect_err("there may be others");
    }

    /// `EBADF` that a file system returns, here for a descriptor that cannot write, is not taken for
    /// a descriptor that the program has closed.
    #[test]
    fn an_error_of_the_file_system_is_no_closed_descriptor() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let reading = File::open(file.path()).unwrap();
        let media = FileMedia::new(reading, file.path().to_path_buf(), true).unwrap();
        // SAFETY: no pool is on the file.
        let write = || unsafe { media.write_at(0, &[1; 100]) }.unwrap_err().source.raw_os_error();
        assert_eq!(write(), Some(libc::EIO));
        let failed = |_: &mut Descriptor| Err(io::Error::from_raw_os_error(libc::EBADF));
        assert_eq!(media.sync_with(failed).unwrap_err().raw_os_error(), Some(libc::EIO));
        assert_eq!(media.flush().unwrap_err().source.raw_os_error(), Some(libc::EIO), "it stays");
        // SAFETY: closed on purpose; the media notice.
        unsafe { libc::close(media.file.as_fd().as_raw_fd()) };
        assert!(!media.file.is_there());
        assert_eq!(write(), Some(libc::EBADF));
    }

    #[test]
    fn open_file_descriptions_of_a_small_block_device_have_marks_of_their_own() {
        let Some(device) = FailingDevice::new() else {
            return eprintln!("skipped: no block device can be made here");
        };
        let open = |_| HeldFile::own(File::open(device.path()).unwrap().into()).unwrap();
        let files: Vec<HeldFile> = (0..200).map(open).collect();
        assert!(files.iter().all(|file| file.identity().is_marked() && file.is_there()));
        let marks = files.iter().map(|file| file.identity().to_words());
        let different = marks.collect::<std::collections::HashSet<_>>().len();
        assert!(different > 190, "{different}");
    }

    /// A file of three regions, and the media over it.
    fn file_of_regions() -> (tempfile::NamedTempFile, FileMedia) {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().write_all_at(&vec![7; 6 << 20], 0).unwrap();
        let media = FileMedia::new(file.reopen().unwrap(), file.path().to_path_buf(), true);
        (file, media.unwrap())
    }

    fn piece(index: u64, round: u8) -> [u8; 4096] {
        [round ^ index as u8; 4096]
    }

    const PAGE: ByteRange = ByteRange { offset_bytes: 5 * 4096, len_bytes: 4096 };

    /// Writes the first two regions until the first one is prepared for stores.
    fn write_densely(media: &FileMedia) {
        let stores_at_last = || {
            for (round, index) in (1..=3).flat_map(|round| (0..1024).map(move |i| (round, i))) {
                // SAFETY: no pool is on the file.
                unsafe { media.store_at(index * 4096, &piece(index, round)) }.unwrap();
            }
            media.how_to_write(PAGE) == How::Store
        };
        let can_be_prepared =
            || media.mapping_to_store().is_some_and(|mapping| mapping.prepare_stores(0, 2 << 20));
        // Twice, since what was written before the last multiple of 30 seconds is unknown.
        if !stores_at_last() && !stores_at_last() {
            assert!(!can_be_prepared());
            eprintln!("skipped in part: no region can be prepared for stores here");
        }
    }

    #[test]
    fn dense_pieces_are_stored_and_arrive() {
        let (file, media) = file_of_regions();
        write_densely(&media);
        let mut bytes = vec![0; 6 << 20];
        file.as_file().read_exact_at(&mut bytes, 0).unwrap();
        for (index, found) in (0..).zip(bytes.chunks(4096)) {
            let expected = if index < 1024 { piece(index, 3) } else { [7; 4096] };
            assert!(found == expected, "page {index}");
        }
        media.write_back(&[PAGE]).unwrap();
        media.flush().unwrap();
        assert_eq!(media.how_to_write(PAGE), How::Write);
    }

    /// Not by a store to a region that was prepared either, nor in its first operation.
    #[test]
    fn a_file_that_was_cut_short_is_not_written_and_makes_nothing_durable() {
        let (file, stored) = file_of_regions();
        write_densely(&stored);
        let open = || FileMedia::new(file.reopen().unwrap(), file.path().to_path_buf(), true);
        // The length is no multiple of a page, and that of a pool in it is.
        file.as_file().set_len((6 << 20) + 1000).unwrap();
        let (written, new) = (open().unwrap(), open().unwrap());
        // SAFETY: no pool is on the file.
        unsafe { written.write_at(0, &[1; 100]) }.unwrap();
        assert_eq!(stored.len_bytes(), (6 << 20) + 1000);
        file.as_file().set_len(4096).unwrap();
        for media in [&stored, &written, &new] {
            for offset_bytes in [PAGE.offset_bytes, 1 << 20, (6 << 20) - 4096] {
                // SAFETY: as above.
                let errors = unsafe {
                    [
                        media.store_at(offset_bytes, &[1; 4096]),
                        media.write_at(offset_bytes, &[1; 100]),
                    ]
                };
                for error in errors.map(Result::unwrap_err) {
                    assert_eq!(error.source.kind(), io::ErrorKind::UnexpectedEof);
                }
            }
            assert_eq!(media.read_len_bytes().unwrap(), 4096);
            let page = ByteRange { offset_bytes: 0, len_bytes: 4096 };
            let error = media.write_back(&[page]).unwrap_err();
            assert_eq!(error.source.kind(), io::ErrorKind::UnexpectedEof);
            // SAFETY: as above.
            unsafe { media.write_durable(0, &[1; 100]) }.unwrap_err();
            media.flush().unwrap_err();
        }
    }
}
