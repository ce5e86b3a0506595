//! Shared memory that no process uses: what processes have left that were killed, and writers that
//! were closed while others still read the pool.
//!
//! The next process that opens the pool for writing removes it. If the pool itself is gone, nothing does: then it
//! takes memory until it is removed by hand, or the machine is started again.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use aquifer_sys::shared_memory::{self, SharedMemory};

use super::Pool;
use crate::shared::segment::Segment;
use crate::shared::segment_place;

/// Shared memory of a pool that no process has open. See [`Pool::left_memory`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeftMemory {
    /// The files that it consists of.
    pub files: Vec<PathBuf>,
    /// How much memory they take together.
    pub allocated_bytes: u64,
    /// When they were made, or written to by a system call last.
    pub since: Option<SystemTime>,
}

impl Pool {
    /// The shared memory in a directory (by default `/dev/shm`, where it is unless
    /// [`PoolOptions::segment_directory`](crate::PoolOptions::segment_directory) says otherwise) that
    /// no process uses: of pools whose last process was killed, or read longer than the last writer.
    /// What this process may not read is left out. A pool that another process is just opening may be
    /// among them.
    ///
    /// Opening the pool for writing removes it. Without its pool it is of no use, and its files can be
    /// removed. If they are removed and the pool exists, its next opening trusts nothing that was not
    /// synced.
    ///
    /// ```
    /// for left in aquifer_pool::Pool::left_memory(None)? {
    ///     println!("{} bytes in {:?}", left.allocated_bytes, left.files);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of listing the directory.
    pub fn left_memory(directory: Option<&Path>) -> io::Result<Vec<LeftMemory>> {
        let directory = directory.unwrap_or(Path::new(shared_memory::DIRECTORY));
        let mut found = BTreeMap::<_, Vec<PathBuf>>::new();
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            if let Some(id) = entry.file_name().to_str().and_then(segment_place::id_in) {
                found.entry(id).or_default().push(entry.path());
            }
        }
        let mut left = Vec::new();
        for mut files in found.into_values() {
            files.sort_unstable();
            let described: Vec<_> = files.iter().flat_map(|path| path.symlink_metadata()).collect();
            let is_in_use = |path: &PathBuf| match SharedMemory::descriptor_at(path, false) {
                Ok(file) => Segment::is_in_use(file),
                // Not ours, or removed meanwhile.
                Err(_) => true,
            };
            // Opening a pipe would wait.
            if !described.iter().all(std::fs::Metadata::is_file) || files.iter().any(is_in_use) {
                continue;
            }
            left.push(LeftMemory {
                allocated_bytes: described.iter().map(|found| found.blocks() * 512).sum(),
                since: described.iter().filter_map(|found| found.modified().ok()).min(),
                files,
            });
        }
        Ok(left)
    }
}
