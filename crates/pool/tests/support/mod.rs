//! Shared by the tests of damaged and full pools: media over a plain file, and a pool with
//! something of everything in it.
#![allow(dead_code, reason = "each test uses a part")]

#[path = "../../../format/tests/support/forge.rs"]
pub mod forge;
pub mod sample;

use std::fs::{File, OpenOptions as FileOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use aquifer_pool::media::{ByteRange, Media, MediaError, MediaOperation, PersistenceDomain};
use aquifer_pool::{Pool, PoolOptions};

pub use aquifer_testkit::scratch::in_memory as scratch;

/// A small pool: 16 slots, a log of 64 KiB.
pub fn small(options: PoolOptions) -> PoolOptions {
    options.inodes(15).log_bytes(64 << 10)
}

/// Opens for this process alone, without background work.
pub fn alone() -> PoolOptions {
    Pool::options().exclusive(true).background(false)
}

/// Opens to share with other handles.
pub fn shared() -> PoolOptions {
    Pool::options().background(false)
}

/// Opens for reading.
pub fn reading() -> PoolOptions {
    Pool::options().read_only(true).background(false)
}

/// Media over a file, without the cost of durability: no power is cut in these tests.
#[derive(Debug)]
pub struct FileMedia {
    path: PathBuf,
    file: File,
    len_bytes: AtomicU64,
    is_writable: bool,
    /// Reads of this range fail with EIO.
    unreadable: ByteRange,
    /// What was read, in order.
    reads: Mutex<Vec<ByteRange>>,
}

const NOTHING: ByteRange = ByteRange { offset_bytes: 0, len_bytes: 0 };

impl FileMedia {
    /// The file at `path`.
    pub fn open(path: &Path) -> Arc<FileMedia> {
        let file = FileOptions::new().read(true).write(true).open(path).expect("a file");
        Self::new(path, file, true, NOTHING)
    }

    /// Opens it for reading.
    pub fn open_read_only(path: &Path) -> Arc<FileMedia> {
        Self::new(path, File::open(path).expect("a file"), false, NOTHING)
    }

    /// Opens it with a range that cannot be read.
    pub fn open_with_unreadable(path: &Path, unreadable: ByteRange) -> Arc<FileMedia> {
        let file = FileOptions::new().read(true).write(true).open(path).expect("a file");
        Self::new(path, file, true, unreadable)
    }

    /// An unnamed file that holds `image`.
    pub fn of(image: &[u8]) -> Arc<FileMedia> {
        let file = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile());
        let file = file.expect("a file");
        file.write_all_at(image, 0).expect("room for it");
        Self::new(Path::new("(image)"), file, true, NOTHING)
    }

    fn new(path: &Path, file: File, is_writable: bool, unreadable: ByteRange) -> Arc<FileMedia> {
        let len_bytes = file.metadata().expect("an open file").len().into();
        let (path, reads) = (path.to_owned(), Mutex::default());
        Arc::new(FileMedia { path, file, len_bytes, is_writable, unreadable, reads })
    }

    /// What was read since the last call.
    pub fn take_reads(&self) -> Vec<ByteRange> {
        std::mem::take(&mut self.reads.lock().unwrap())
    }

    /// How many reads touched a range since the last call.
    pub fn take_reads_of(&self, range: ByteRange) -> usize {
        let reads = self.take_reads();
        reads.iter().filter(|read| read.intersection(range).len_bytes > 0).count()
    }

    /// All its bytes.
    pub fn image(&self) -> Vec<u8> {
        let mut image = vec![0; self.len_bytes() as usize];
        self.file.read_exact_at(&mut image, 0).expect("its own length");
        image
    }

    fn error(&self, operation: MediaOperation, range: ByteRange, source: io::Error) -> MediaError {
        let ByteRange { offset_bytes, len_bytes } = range;
        MediaError { operation, path: self.path.clone(), offset_bytes, len_bytes, source }
    }

    fn check(&self, operation: MediaOperation, range: ByteRange) -> Result<(), MediaError> {
        if range.end_bytes() > self.len_bytes() {
            return Err(self.error(operation, range, io::ErrorKind::UnexpectedEof.into()));
        }
        if operation != MediaOperation::Read && !self.is_writable {
            return Err(self.error(operation, range, io::ErrorKind::ReadOnlyFilesystem.into()));
        }
        Ok(())
    }

    fn write(
        &self,
        operation: MediaOperation,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), MediaError> {
        let range = ByteRange { offset_bytes: offset, len_bytes: bytes.len() as u64 };
        self.check(operation, range)?;
        self.file.write_all_at(bytes, offset).map_err(|source| self.error(operation, range, source))
    }
}

impl Media for FileMedia {
    fn path(&self) -> &Path {
        &self.path
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Relaxed)
    }

    fn domain(&self) -> PersistenceDomain {
        PersistenceDomain::Volatile
    }

    fn is_writable(&self) -> bool {
        self.is_writable
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MediaError> {
        let range = ByteRange { offset_bytes, len_bytes: bytes.len() as u64 };
        self.check(MediaOperation::Read, range)?;
        self.reads.lock().unwrap().push(range);
        if offset_bytes < self.unreadable.end_bytes()
            && self.unreadable.offset_bytes < range.end_bytes()
        {
            let error = io::Error::from_raw_os_error(5);
            return Err(self.error(MediaOperation::Read, range, error));
        }
        self.file
            .read_exact_at(bytes, offset_bytes)
            .map_err(|source| self.error(MediaOperation::Read, range, source))
    }

    unsafe fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.write(MediaOperation::Write, offset_bytes, bytes)
    }

    unsafe fn write_durable(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.write(MediaOperation::WriteDurable, offset_bytes, bytes)
    }

    fn write_back(&self, ranges: &[ByteRange]) -> Result<(), MediaError> {
        ranges.iter().try_for_each(|range| self.check(MediaOperation::WriteBack, *range))
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.check(MediaOperation::Flush, NOTHING)
    }

    fn grow(&self, len_bytes: u64) -> Result<(), MediaError> {
        let range = ByteRange { offset_bytes: 0, len_bytes };
        self.check(MediaOperation::Resize, NOTHING)?;
        if len_bytes > self.len_bytes() {
            self.file
                .set_len(len_bytes)
                .map_err(|source| self.error(MediaOperation::Resize, range, source))?;
            self.len_bytes.store(len_bytes, Relaxed);
        }
        Ok(())
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn maps_privately(&self) -> bool {
        true
    }
}
