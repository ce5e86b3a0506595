//! The open file descriptions on which this process has a pool open, or is opening or creating one.
//!
//! Media serve one opener at a time: those of one [`Media`](crate::media::Media) given twice, or of
//! media on duplicates of one descriptor, would share what belongs to the *open file description*.
//! That may include their locks ([`LockFile`](crate::media::lock_file::LockFile)): then the second opener
//! would recover a pool that the first has open, and its failure would release the locks of the
//! first. Such openers are in one process (a forked child keeps no descriptor of a pool), so this list
//! detects them.
//!
//! The kernel decides whether two descriptors refer to one open file description
//! ([`aquifer_sys::open_file`]). Locks could not tell: any process that may read the file can hold
//! them.
//!
//! The list is per process, and looking something up in it takes as long however many pools are open.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use aquifer_sys::high_fd::HeldFile;
use aquifer_sys::open_file::{self, Identity};
use aquifer_vm::{PerProcess, ProcessMark};

/// By identity: one for each, because descriptions that the pool has opened are marked. Those that
/// it was given are not, and all of one file have one identity.
type Claimed = BTreeMap<Identity, Vec<Weak<HeldFile>>>;

/// The open file descriptions that this process has claimed.
static CLAIMED: PerProcess<Mutex<Claimed>> = PerProcess::new();

fn claimed() -> MutexGuard<'static, Claimed> {
    CLAIMED.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// A claim on an open file description, until this is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    file: Weak<HeldFile>,
    identity: Identity,
    process: ProcessMark,
}

impl Claim {
    /// Claims the open file description of a descriptor; `None` if it is already claimed.
    pub fn take(file: &Arc<HeldFile>) -> io::Result<Option<Claim>> {
        let mut claimed = claimed();
        if is_among(&claimed, file.as_fd())? {
            return Ok(None);
        }
        let identity = file.identity();
        let (file, process) = (Arc::downgrade(file), ProcessMark::new());
        claimed.entry(identity).or_default().push(file.clone());
        Ok(Some(Claim { file, identity, process }))
    }

    /// Whether a pool of this process has claimed the open file description of a descriptor.
    pub fn is_taken(file: BorrowedFd<'_>) -> io::Result<bool> {
        is_among(&claimed(), file)
    }
}

impl Claim {
    /// Gives up the claim of a handle that has lost a descriptor, and calls `release` before, unless
    /// another opener has claimed the open file description of `file` since.
    pub fn give_up(self, file: BorrowedFd<'_>, release: impl FnOnce()) {
        if self.process.is_current() {
            let mut claimed = claimed();
            self.leave(&mut claimed);
            if is_among(&claimed, file).is_ok_and(|is_others| !is_others) {
                release();
            }
        }
    }

    fn leave(&self, claimed: &mut Claimed) {
        if let Entry::Occupied(mut alike) = claimed.entry(self.identity) {
            alike.get_mut().retain(|other| !other.ptr_eq(&self.file));
            if alike.get().is_empty() {
                alike.remove();
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // A claim inherited from the parent is not in the child's list.
        if self.process.is_current() {
            self.leave(&mut claimed());
        }
    }
}

fn is_among(claimed: &Claimed, file: BorrowedFd<'_>) -> io::Result<bool> {
    let alike = claimed.get(&Identity::of(file)?).into_iter().flatten();
    // What the program has closed is claimed no more, and its number may be this file's.
    for other in alike.filter_map(Weak::upgrade).filter(|other| other.is_there()) {
        // Compared while the list is locked, so that no other thread compares the same file.
        if open_file::is_same(other.as_fd(), file)? {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However many handles of one file there are, looking one up compares it with none of the others.
    #[test]
    fn descriptions_of_one_file_are_told_apart_by_their_marks() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let again = || Arc::new(HeldFile::own(file.reopen().unwrap().into()).unwrap());
        let files: Vec<_> = (0..10).map(|_| again()).collect();
        let claims: Vec<_> = files.iter().map(|file| Claim::take(file).unwrap().unwrap()).collect();
        let alike = |file: &Arc<HeldFile>| claimed().get(&file.identity()).map_or(0, Vec::len);
        assert!(files.iter().all(|file| alike(file) == 1));
        assert!(Claim::take(&files[3]).unwrap().is_none());
        drop(claims);
        assert!(files.iter().all(|file| alike(file) == 0));
    }

    /// A thread that holds the list's lock at the fork does not exist in the child.
    #[test]
    fn a_forked_child_has_a_list_of_its_own() {
        let file = || Arc::new(HeldFile::new(tempfile::tempfile().unwrap().into()).unwrap());
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
