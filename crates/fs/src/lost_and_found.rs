//! Inodes that have lost their names: the part of a repair that needs names.

use aquifer_pool::format::file::FileKind;
use aquifer_pool::{Pool, Result};

use crate::caller::Caller;
use crate::error::FsError;
use crate::transaction::{Names, New, now_ns};

/// What [`adopt`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Adopted {
    /// Inodes that have a name now.
    pub named: usize,
    /// Inodes that were freed, because they had no content.
    pub freed: usize,
}

/// Gives each of these inodes, to which no name refers, a name in `/lost+found`: `#` and its number.
/// Frees those without content.
///
/// # Errors
/// Those of the pool. An error with one inode is left for the next check to report.
pub fn adopt(pool: &Pool, lost: &[u64]) -> Result<Adopted> {
    let now_ns = now_ns();
    let by = Caller::of_process(false);
    let home = New::of(FileKind::Directory, 0o700, &[], &by);
    let mut done = Adopted::default();
    for &number in lost {
        // SAFETY: the inode gets a name, or is freed because it has no content; no leased file
        // loses its runs.
        let adopted = unsafe {
            pool.try_change(Vec::new(), |slots| Names { slots, now_ns }.adopt(number, home))
        };
        match adopted {
            Ok(Some(_)) => done.named += 1,
            Ok(None) => done.freed += 1,
            Err(FsError::Pool(error)) => return Err(error),
            Err(_) => {}
        }
    }
    Ok(done)
}
