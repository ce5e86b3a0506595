//! Open files that this process has a pool open on, or is opening or making one on.
//!
//! The locks that keep openers apart belong to an *open file*, so they say nothing between two openers that use the same one: one
//! [`Media`](crate::media::Media) given twice, or media on duplicates of one descriptor. The second of them would recover a pool that
//! the first has open, and its failure would give back the locks of the first. Such openers are of one process (a forked child keeps no
//! descriptor of a pool), which this list tells from each other.
//!
//! Whether two descriptors are of one open file is what the locks themselves say: what is locked through the one stands against the other
//! unless they are.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use aquifer_sys::lock::{self, LockKind};
use aquifer_vm::ProcessMark;

use crate::membership::probe;

/// An open file that is claimed.
struct Claimed {
    file: Weak<OwnedFd>,
    process: ProcessMark,
}

static CLAIMED: Mutex<Vec<Claimed>> = Mutex::new(Vec::new());

fn claimed() -> MutexGuard<'static, Vec<Claimed>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An open file, claimed until this is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    file: Weak<OwnedFd>,
    process: ProcessMark,
}

impl Claim {
    /// Claims the open file of a descriptor; `None` if it is claimed.
    pub fn take(file: &Arc<OwnedFd>) -> io::Result<Option<Claim>> {
        let mut claimed = claimed();
        if is_among(&claimed, file.as_fd())? {
            return Ok(None);
        }
        let (file, process) = (Arc::downgrade(file), ProcessMark::new());
        claimed.push(Claimed { file: file.clone(), process });
        Ok(Some(Claim { file, process }))
    }

    /// Whether somebody in this process has claimed the open file of a descriptor.
    pub fn is_taken(file: BorrowedFd<'_>) -> io::Result<bool> {
        is_among(&claimed(), file)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // A child's copy of the list is of no use, and its lock may be held by a thread that the child does not have.
        if self.process.is_current() {
            claimed().retain(|other| !other.file.ptr_eq(&self.file));
        }
    }
}

fn is_among(claimed: &[Claimed], file: BorrowedFd<'_>) -> io::Result<bool> {
    let wanted = identity(file)?;
    for other in claimed.iter().filter(|other| other.process.is_current()) {
        let Some(other) = other.file.upgrade() else { continue };
        if identity(other.as_fd())? == wanted && is_same_open_file(other.as_fd(), file)? {
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

/// Whether two descriptors of a file are of the same open file. With the list: nobody else of this process asks.
fn is_same_open_file(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> io::Result<bool> {
    // At random: another process may ask the same, and its lock would look like the one that is set here.
    let byte = probe(aquifer_sys::random::next_u64()?);
    if !lock::try_lock(one, byte, LockKind::Shared)? {
        // Somebody else has locked all bytes, and not through `one`: to make media of the file. The caller will find that out.
        return Ok(false);
    }
    let conflict = lock::conflict(other, byte, LockKind::Exclusive);
    let unlocked = lock::unlock(one, byte);
    let is_same = conflict?.is_none();
    unlocked.map(|()| is_same)
}
