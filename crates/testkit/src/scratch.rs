//! Directories of tests.

use tempfile::TempDir;

/// A directory in memory if possible: for tests that need no disk.
///
/// # Panics
/// If there is no directory for temporary files either.
pub fn in_memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory")
}
