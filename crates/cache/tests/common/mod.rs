//! Shared by the tests of mappings: files with known bytes, and running a test on both backends.

#![allow(dead_code, unused_imports, reason = "each test file uses its part")]

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use aquifer_cache::{Backend, Cache, MapOptions, Mapping};
use aquifer_device::{Device, FileDevice};
use aquifer_sys::residency::{Backing, backing};

pub use aquifer_testkit::executor::block_on;
pub use aquifer_testkit::watchdog::wait_until;

pub const PAGE: u64 = 4096;
pub const MIB: u64 = 1 << 20;

/// Declares tests that take a [`Backend`] and run once with each.
#[macro_export]
macro_rules! on_both_backends {
    ($($(#[$attribute:meta])* fn $name:ident($backend:ident) $body:block)*) => { $(
        mod $name {
            use super::*;

            $(#[$attribute])*
            fn body($backend: Backend) $body

            #[test]
            fn kernel() {
                body(Backend::Kernel);
            }

            #[test]
            fn user() {
                body(Backend::User);
            }
        }
    )* };
}

/// The byte at an offset of every test file: differs between pages and within them.
pub fn byte_at(offset: u64) -> u8 {
    ((offset / PAGE).wrapping_mul(0x9e37_79b9) >> 7) as u8 ^ (offset as u8).wrapping_mul(31)
}

pub fn bytes_at(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(byte_at).collect()
}

/// A file of `len` bytes that is not in the page cache, if the system allows that.
pub fn write_file(path: &Path, len: u64) -> File {
    use std::io::Write;
    let mut file = File::options().create_new(true).write(true).read(true).open(path).unwrap();
    let mut offset = 0;
    while offset < len {
        let part = (len - offset).min(MIB) as usize;
        file.write_all(&bytes_at(offset, part)).unwrap();
        offset += part as u64;
    }
    file.sync_all().unwrap();
    aquifer_sys::memory::drop_cached(file.as_fd(), 0, 0).unwrap();
    file
}

/// A test file in its own directory, which is deleted with it.
pub struct TestFile {
    pub directory: tempfile::TempDir,
    pub file: File,
    pub device: Arc<dyn Device>,
    pub len: u64,
}

impl TestFile {
    pub fn new(len: u64) -> TestFile {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data");
        let file = write_file(&path, len);
        let device = Arc::new(FileDevice::open(&path).unwrap());
        TestFile { directory, file, device, len }
    }

    /// Whether the page cache is a copy of storage, so that residency is meaningful.
    pub fn is_on_storage(&self) -> bool {
        backing(self.file.as_fd()).unwrap() == Backing::Storage
    }

    /// Bytes of the file in the page cache, if the kernel reports them.
    pub fn cached_bytes(&self) -> Option<u64> {
        let stat = aquifer_sys::memory::cachestat(self.file.as_fd(), 0, 0).ok()?;
        Some(stat.cached * PAGE)
    }

    pub fn map(&self, cache: &Cache, backend: Backend) -> Mapping {
        cache.map_with(self.device.clone(), MapOptions::new().backend(backend)).unwrap()
    }
}

pub fn cache_of(budget_bytes: u64) -> Cache {
    Cache::builder().budget_bytes(budget_bytes).build().unwrap()
}

/// Forks, and returns in both processes: in the child at once; in the parent
/// when the child has exited with status 0.
///
/// The child must do nothing but return to where it ends itself.
#[track_caller]
pub fn fork_and_wait(what: &str) {
    // SAFETY: the child only returns from here, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        aquifer_testkit::child::dies_with_its_parent();
        return;
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "{what}");
}
