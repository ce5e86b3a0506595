//! What the tests of objects share: pools in temporary files.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::path::PathBuf;

use aquifer_object::Objects;
use aquifer_pool::{CreateOptions, OpenOptions, Pool};
use tempfile::TempDir;

pub const PAGE: usize = 4096;

/// A directory with a pool in it, removed at the end.
pub struct Place {
    pub directory: TempDir,
}

impl Place {
    /// Below the system's directory for temporary files.
    pub fn new() -> Place {
        Place { directory: tempfile::tempdir().expect("a temporary directory") }
    }

    /// In shared memory, where there is such a file system.
    pub fn in_memory() -> Option<Place> {
        let directory = tempfile::tempdir_in("/dev/shm").ok()?;
        Some(Place { directory })
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("pool")
    }

    pub fn create(&self, len_bytes: u64, log_bytes: u64) -> Objects {
        let options = CreateOptions { log_bytes: Some(log_bytes), ..CreateOptions::default() };
        let pool = Pool::create(self.path(), len_bytes, &options, &OpenOptions::default());
        Objects::new(pool.expect("a pool"))
    }

    pub fn open(&self) -> Objects {
        Objects::open(self.path(), &OpenOptions::default()).expect("the pool")
    }
}
