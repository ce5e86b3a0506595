//! The open file descriptions on which this process has a pool open, or is opening or creating one.
//!
//! The locks that keep openers apart belong to an *open file description*, so two openers that use
//! the same one do not conflict: one [`Media`](crate::media::Media) given twice, or media on
//! duplicates of one descriptor. The second opener would recover a pool that the first has open,
//! and its failure would release the locks of the first. Such openers are in one process (a forked
//! child keeps no descriptor of a pool), so this list detects them.
//!
//! The kernel decides whether two descriptors refer to one open file description
//! ([`aquifer_sys::open_file`]). Locks could not tell: any process that may read the file can hold
//! them.
//!
//! The list is per process.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use aquifer_sys::open_file;
use aquifer_vm::{PerProcess, ProcessMark};

/// The open file descriptions that this process has claimed.
static CLAIMED: PerProcess<Mutex<Vec<Weak<OwnedFd>>>> = PerProcess::new();

fn claimed() -> MutexGuard<'static, Vec<Weak<OwnedFd>>> {
    CLAIMED.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// A claim on an open file description, until this is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    file: Weak<OwnedFd>,
    process: ProcessMark,
}

impl Claim {
    /// Claims the open file description of a descriptor; `None` if it is already claimed.
    pub fn take(file: &Arc<OwnedFd>) -> io::Result<Option<Claim>> {
        let mut claimed = claimed();
        if is_among(&claimed, file.as_fd())? {
            return Ok(None);
        }
        let (file, process) = (Arc::downgrade(file), ProcessMark::new());
        claimed.push(file.clone());
        Ok(Some(Claim { file, process }))
    }

    /// Whether a pool of this process has claimed the open file description of a descriptor.
    pub fn is_taken(file: BorrowedFd<'_>) -> io::Result<bool> {
        is_among(&claimed(), file)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // A claim inherited from the parent is not in the child's list.
        if self.process.is_current() {
            claimed().retain(|other| !other.ptr_eq(&self.file));
        }
    }
}

fn is_among(claimed: &[Weak<OwnedFd>], file: BorrowedFd<'_>) -> io::Result<bool> {
    let wanted = identity(file)?;
    for other in claimed.iter().filter_map(Weak::upgrade) {
        // Compared while the list is locked, so that no other thread compares the same file.
        if identity(other.as_fd())? == wanted && open_file::is_same(other.as_fd(), file)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Device and inode.
fn identity(file: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let metadata = File::from(file.try_clone_to_owned()?).metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that holds the list's lock at the fork does not exist in the child.
    #[test]
    fn a_forked_child_has_a_list_of_its_own() {
        let file = || Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
        let (first, other) = (file(), file());
        let _claim = Claim::take(&first).unwrap().expect("it is new");
        let locked = claimed();
        // SAFETY: the child makes system calls, allocates, and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: `alarm` only arms a timer, which ends a child that hangs.
            unsafe { libc::alarm(20) };
            let claim = Claim::take(&other).unwrap();
            let is_listed = Claim::is_taken(other.as_fd()).unwrap();
            let is_parents = Claim::is_taken(first.as_fd()).unwrap();
            let is_right = claim.is_some() && is_listed && !is_parents;
            drop(claim);
            let is_right = is_right && !Claim::is_taken(other.as_fd()).unwrap();
            // SAFETY: ends the child without running any code of the parent.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        drop(locked);
        assert_eq!(status, 0, "the child ended otherwise");
        assert!(Claim::is_taken(first.as_fd()).unwrap());
        assert!(!Claim::is_taken(other.as_fd()).unwrap());
    }
}
