//! Shared code of the object tests: pools in temporary files and on crash media.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_crashkit::CrashMedia;
use aquifer_object::{Access, Attachment, ObjectError, ObjectOptions, Objects};
use aquifer_pool::media::{ByteRange, Media, MediaError, MediaOperation, PersistenceDomain};
use aquifer_pool::{Pool, PoolOptions};
use tempfile::TempDir;

pub const PAGE: usize = 4096;

/// Exclusive and without background work: only the test causes media operations.
pub fn alone() -> PoolOptions {
    Pool::options().exclusive(true).background(false)
}

/// Attaches an object for this access.
pub fn attach_for(
    access: Access,
    options: ObjectOptions<'_>,
    objects: &Objects,
    name: &str,
) -> Result<Attachment, ObjectError> {
    match access {
        Access::Read => options.attach(objects, name),
        Access::Write => options.attach_mut(objects, name),
    }
}

/// A temporary directory that contains a pool.
pub struct Place {
    directory: TempDir,
}

impl Place {
    /// In the system's directory for temporary files.
    pub fn new() -> Place {
        Place { directory: tempfile::tempdir().expect("a temporary directory") }
    }

    /// In `/dev/shm`, if it exists.
    pub fn in_memory() -> Option<Place> {
        Some(Place { directory: tempfile::tempdir_in("/dev/shm").ok()? })
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("pool")
    }

    pub fn create(&self, len_bytes: u64, log_bytes: u64) -> Objects {
        let options = Pool::options().log_bytes(log_bytes);
        Objects::new(options.create(self.path(), len_bytes).unwrap())
    }

    pub fn open(&self) -> Objects {
        Objects::open(self.path()).expect("the pool")
    }

    pub fn open_for_reading(&self) -> Objects {
        let options = Pool::options().read_only(true);
        Objects::new(options.open(self.path()).expect("the pool"))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Killed processes leave their shared memory behind; opening the pool removes it.
        drop(Pool::open(self.path()));
    }
}

/// Called in place of a durable write.
type WriteHook = Box<dyn Fn(&Write<'_>) -> Result<(), MediaError> + Send + Sync>;

/// Media that override one operation or property of others.
pub struct Wrapped {
    media: Arc<dyn Media>,
    /// Called for each durable write, which it performs or not.
    pub on_write_durable: WriteHook,
    pub maps_privately: bool,
}

pub type Write<'a> = dyn Fn() -> Result<(), MediaError> + 'a;

impl Wrapped {
    pub fn new(media: Arc<dyn Media>) -> Wrapped {
        let maps_privately = media.maps_privately();
        Wrapped { media, on_write_durable: Box::new(|write| write()), maps_privately }
    }
}

impl Media for Wrapped {
    fn path(&self) -> &Path {
        self.media.path()
    }
    fn len_bytes(&self) -> u64 {
        self.media.len_bytes()
    }
    fn domain(&self) -> PersistenceDomain {
        self.media.domain()
    }
    fn is_writable(&self) -> bool {
        self.media.is_writable()
    }
    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MediaError> {
        self.media.read_at(offset_bytes, bytes)
    }
    unsafe fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.media.write_at(offset_bytes, bytes) }
    }
    unsafe fn write_durable(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        // SAFETY: the caller upholds the same contract.
        (self.on_write_durable)(&|| unsafe { self.media.write_durable(offset_bytes, bytes) })
    }
    fn write_back(&self, ranges: &[ByteRange]) -> Result<(), MediaError> {
        self.media.write_back(ranges)
    }
    fn flush(&self) -> Result<(), MediaError> {
        self.media.flush()
    }
    fn grow(&self, len_bytes: u64) -> Result<(), MediaError> {
        self.media.grow(len_bytes)
    }
    fn file(&self) -> BorrowedFd<'_> {
        self.media.file()
    }
    fn maps_privately(&self) -> bool {
        self.maps_privately
    }
}

/// An exclusive pool on crash media.
pub fn on_media(len_bytes: u64, log_bytes: u64) -> (Arc<CrashMedia>, Objects) {
    let media = Arc::new(CrashMedia::new(len_bytes, PersistenceDomain::PageCache).unwrap());
    let pool = alone().log_bytes(log_bytes).create_on(media.clone()).unwrap();
    (media, Objects::new(pool))
}

/// Reopens the current media content, as after a restart.
pub fn reopen(media: &CrashMedia) -> Objects {
    let media = CrashMedia::from_image(&media.image(), PersistenceDomain::PageCache).unwrap();
    Objects::new(alone().open_on(Arc::new(media)).unwrap())
}

/// The bytes of the object `object` after a crash now.
pub fn survivor(media: &CrashMedia) -> Vec<u8> {
    let objects = reopen(media);
    let info = objects.info("object").unwrap();
    let mut bytes = vec![0; info.size_bytes as usize];
    objects.pool().media().read_at(info.media_offset_bytes, &mut bytes).unwrap();
    bytes
}

/// The media operations from operation `from` on.
pub fn operations(media: &CrashMedia, from: usize) -> Vec<MediaOperation> {
    media.recording().operations()[from..].iter().map(|operation| operation.kind()).collect()
}

/// Stores a number at the start of a page: few enough bytes for a patch.
pub fn store(attachment: &mut Attachment, page: usize, value: u64) {
    let bytes = attachment.as_mut_slice().unwrap();
    bytes[page * PAGE..page * PAGE + 8].copy_from_slice(&value.to_le_bytes());
}

/// Fills a page with a number below 2^32: too many bytes for a patch.
pub fn fill(attachment: &mut Attachment, page: usize, value: u64) {
    let bytes = attachment.as_mut_slice().unwrap();
    let words = bytes[page * PAGE..(page + 1) * PAGE].chunks_exact_mut(8);
    words.for_each(|word| word.copy_from_slice(&value.to_le_bytes()));
}

/// The result of [`load`] for a page with this content after [`store`].
pub fn stored(before: u64, value: u64) -> u64 {
    before >> 32 << 32 | value
}

/// The result of [`load`] for a page after [`fill`].
pub fn filled(value: u64) -> u64 {
    value << 32 | value
}

/// The number at the start of a page, with the number that fills the rest in the upper half.
pub fn load(attachment: &Attachment, page: usize) -> u64 {
    let bytes = &attachment.as_slice().unwrap()[page * PAGE..(page + 1) * PAGE];
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert!(bytes[8..PAGE - 8] == bytes[16..], "page {page} holds parts of several states");
    word(8) << 32 | word(0)
}

/// [`load`] of all pages.
pub fn load_all(attachment: &Attachment) -> Vec<u64> {
    (0..attachment.len_bytes() as usize / PAGE).map(|page| load(attachment, page)).collect()
}
