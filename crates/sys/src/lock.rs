//! Open-file-description locks: advisory byte-range locks that are released when their holder dies.
//!
//! # Why these
//! | | dies with its holder | seen across PID namespaces | survives closing another descriptor of the file |
//! |---|---|---|---|
//! | open-file-description lock | yes | yes | yes |
//! | POSIX record lock | yes | yes | no |
//! | a PID in a file | no | no | yes |
//!
//! A lock belongs to the open file description: descriptors made by `dup` and `fork` share it, and
//! it ends when the last of them is closed, or when the range is unlocked through any of them. So a
//! forked child keeps its parent's locks until it closes its copy. Threads that share a descriptor
//! do not exclude each other.
//!
//! The range need not exist: a byte past the end of the file can be locked. Locks work on regular
//! files, block devices and character devices alike; network file systems pass them on to their
//! server, if it supports them.
//!
//! The kernel's blocking wait ([`lock`]) has no time limit and does not detect deadlock. A caller
//! that needs a limit polls with [`try_lock`].

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::check;

/// The sharing mode of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// Other shared locks may coexist. Needs a readable descriptor.
    Shared,
    /// No other lock may coexist. Needs a writable descriptor.
    Exclusive,
}

impl LockKind {
    fn raw(self) -> libc::c_short {
        match self {
            LockKind::Shared => libc::F_RDLCK as libc::c_short,
            LockKind::Exclusive => libc::F_WRLCK as libc::c_short,
        }
    }
}

/// A range of bytes to lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LockRange {
    /// First byte.
    pub offset_bytes: u64,
    /// Number of bytes; 0 means to the end of any file.
    pub len_bytes: u64,
}

impl LockRange {
    /// One byte.
    pub const fn byte(offset_bytes: u64) -> LockRange {
        LockRange { offset_bytes, len_bytes: 1 }
    }

    /// Every possible byte of a file.
    pub const WHOLE: LockRange = LockRange { offset_bytes: 0, len_bytes: 0 };
}

/// A lock held through another open file description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conflict {
    /// The kind.
    pub kind: LockKind,
    /// The range.
    pub range: LockRange,
    /// The process, if it holds a POSIX record lock. For an open-file-description lock the kernel
    /// reports none, because several processes may share it.
    pub pid: Option<u32>,
}

/// Takes a range, or changes the kind in which it is held, without blocking. Returns false if
/// another description's lock conflicts; what was held before is then still held.
pub fn try_lock(file: BorrowedFd<'_>, range: LockRange, kind: LockKind) -> io::Result<bool> {
    let mut request = request(range, kind.raw())?;
    match control(file, libc::F_OFD_SETLK, &mut request) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// As [`try_lock`], but blocks until no other description's lock conflicts. Locks already held in
/// the range stay held while it waits. A signal whose handler was not installed with `SA_RESTART`
/// ends the wait with [`io::ErrorKind::Interrupted`].
pub fn lock(file: BorrowedFd<'_>, range: LockRange, kind: LockKind) -> io::Result<()> {
    let mut request = request(range, kind.raw())?;
    control(file, libc::F_OFD_SETLKW, &mut request)
}

/// Releases all locks in a range. Not an error where none is held.
pub fn unlock(file: BorrowedFd<'_>, range: LockRange) -> io::Result<()> {
    let mut request = request(range, libc::F_UNLCK as libc::c_short)?;
    control(file, libc::F_OFD_SETLK, &mut request)
}

/// Returns the first lock of another description that conflicts with the range. Locks of the
/// description itself do not count. Also works on descriptors that could not take the lock.
pub fn conflict(
    file: BorrowedFd<'_>,
    range: LockRange,
    kind: LockKind,
) -> io::Result<Option<Conflict>> {
    let mut request = request(range, kind.raw())?;
    control(file, libc::F_OFD_GETLK, &mut request)?;
    let kind = match libc::c_int::from(request.l_type) {
        libc::F_UNLCK => return Ok(None),
        libc::F_RDLCK => LockKind::Shared,
        _ => LockKind::Exclusive,
    };
    let range = LockRange {
        offset_bytes: u64::try_from(request.l_start).unwrap_or(0),
        len_bytes: u64::try_from(request.l_len).unwrap_or(0),
    };
    Ok(Some(Conflict { kind, range, pid: u32::try_from(request.l_pid).ok() }))
}

fn request(range: LockRange, kind: libc::c_short) -> io::Result<libc::flock64> {
    let number = |bytes: u64| {
        libc::off64_t::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
    };
    // SAFETY: all-zero is a valid `flock64`; `l_pid` must be 0.
    let mut request: libc::flock64 = unsafe { std::mem::zeroed() };
    request.l_type = kind;
    request.l_whence = libc::SEEK_SET as libc::c_short;
    request.l_start = number(range.offset_bytes)?;
    request.l_len = number(range.len_bytes)?;
    Ok(request)
}

fn control(
    file: BorrowedFd<'_>,
    command: libc::c_int,
    request: &mut libc::flock64,
) -> io::Result<()> {
    // SAFETY: the structure outlives the call, which may write to it.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(request)) };
    check(result.into()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;

    /// Two open file descriptions of an unnamed file.
    fn two_descriptions() -> (File, File) {
        use std::os::fd::FromRawFd;
        // SAFETY: a NUL-terminated name.
        let fd = unsafe { libc::memfd_create(c"locks".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: just made, so nothing else owns the descriptor.
        let one = unsafe { File::from_raw_fd(fd) };
        let other = crate::io::reopen(one.as_fd(), libc::O_RDWR).unwrap();
        (one, other.into())
    }

    #[test]
    fn descriptions_exclude_each_other_and_not_themselves() {
        let (one, other) = two_descriptions();
        let range = LockRange::byte(10);
        assert!(try_lock(one.as_fd(), range, LockKind::Exclusive).unwrap());
        assert!(try_lock(one.as_fd(), range, LockKind::Exclusive).unwrap());
        assert_eq!(conflict(one.as_fd(), range, LockKind::Exclusive).unwrap(), None);
        for kind in [LockKind::Shared, LockKind::Exclusive] {
            assert!(!try_lock(other.as_fd(), range, kind).unwrap());
            let found = conflict(other.as_fd(), LockRange::WHOLE, kind).unwrap();
            assert_eq!(found, Some(Conflict { kind: LockKind::Exclusive, range, pid: None }));
        }
        assert!(try_lock(other.as_fd(), LockRange::byte(11), LockKind::Exclusive).unwrap());
        unlock(one.as_fd(), LockRange::WHOLE).unwrap();
        assert!(try_lock(other.as_fd(), range, LockKind::Exclusive).unwrap());
    }

    #[test]
    fn a_lock_is_turned_into_the_other_kind_in_place() {
        let (one, other) = two_descriptions();
        let range = LockRange { offset_bytes: 5, len_bytes: 3 };
        assert!(try_lock(one.as_fd(), range, LockKind::Exclusive).unwrap());
        assert!(try_lock(one.as_fd(), range, LockKind::Shared).unwrap());
        assert!(try_lock(other.as_fd(), range, LockKind::Shared).unwrap());
        // Refused; the lock is still held in its former kind.
        assert!(!try_lock(one.as_fd(), range, LockKind::Exclusive).unwrap());
        let found = conflict(other.as_fd(), range, LockKind::Exclusive).unwrap().unwrap();
        assert_eq!(found.kind, LockKind::Shared);
        assert_eq!(conflict(other.as_fd(), range, LockKind::Shared).unwrap(), None);
        drop(other);
        assert!(try_lock(one.as_fd(), range, LockKind::Exclusive).unwrap());
    }

    #[test]
    fn a_duplicate_shares_the_lock_until_the_last_is_closed() {
        let (one, other) = two_descriptions();
        let duplicate = one.try_clone().unwrap();
        assert!(try_lock(one.as_fd(), LockRange::WHOLE, LockKind::Exclusive).unwrap());
        drop(one);
        assert!(!try_lock(other.as_fd(), LockRange::WHOLE, LockKind::Shared).unwrap());
        drop(duplicate);
        assert!(try_lock(other.as_fd(), LockRange::WHOLE, LockKind::Shared).unwrap());
    }

    #[test]
    fn a_description_that_reads_takes_shared_locks_only() {
        let (one, _other) = two_descriptions();
        let reading: File = crate::io::reopen(one.as_fd(), libc::O_RDONLY).unwrap().into();
        assert!(try_lock(reading.as_fd(), LockRange::byte(0), LockKind::Shared).unwrap());
        let refused = try_lock(reading.as_fd(), LockRange::byte(1), LockKind::Exclusive);
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EBADF));
        assert!(try_lock(one.as_fd(), LockRange::byte(1), LockKind::Exclusive).unwrap());
        let found = conflict(reading.as_fd(), LockRange::byte(1), LockKind::Exclusive);
        assert!(found.unwrap().is_some(), "asking needs no right to write");
    }

    extern "C" fn nothing(_: libc::c_int) {}

    #[test]
    fn waiting_ends_with_the_lock_or_with_a_signal() {
        let (one, other) = two_descriptions();
        assert!(try_lock(one.as_fd(), LockRange::byte(3), LockKind::Exclusive).unwrap());
        let (says, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                // SAFETY: no preconditions.
                says.send(unsafe { libc::pthread_self() }).unwrap();
                let ended = lock(other.as_fd(), LockRange::WHOLE, LockKind::Exclusive);
                let is_interrupted = ended.unwrap_err().kind() == io::ErrorKind::Interrupted;
                says.send(0).unwrap();
                // Signals may still be pending.
                while lock(other.as_fd(), LockRange::WHOLE, LockKind::Exclusive).is_err() {}
                is_interrupted
            });
            let thread = told.recv().unwrap();
            // SAFETY: all-zero is a valid action, with no flags.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = nothing as *const () as usize;
            // SAFETY: the handler does nothing, and no other test of this crate uses the signal.
            unsafe { libc::sigaction(libc::SIGWINCH, &raw const action, std::ptr::null_mut()) };
            while told.try_recv().is_err() {
                // SAFETY: the thread is joined below.
                unsafe { libc::pthread_kill(thread, libc::SIGWINCH) };
                std::thread::yield_now();
            }
            unlock(one.as_fd(), LockRange::WHOLE).unwrap();
            assert!(waiting.join().unwrap());
        });
        assert!(!try_lock(one.as_fd(), LockRange::byte(5), LockKind::Shared).unwrap());
    }

    #[test]
    fn impossible_ranges_are_errors() {
        let (one, _other) = two_descriptions();
        for (offset_bytes, len_bytes) in [(u64::MAX, 1), (0, u64::MAX), (i64::MAX as u64, 2)] {
            let range = LockRange { offset_bytes, len_bytes };
            assert!(try_lock(one.as_fd(), range, LockKind::Shared).is_err(), "{range:?}");
        }
    }
}
