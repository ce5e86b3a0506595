//! Tells whether two descriptors refer to one open file description, that is, are duplicates.
//!
//! Since Linux 6.10 the kernel answers this (`F_DUPFD_QUERY`). Before that, a property of the
//! description is used as a mark: a value set through one descriptor is read back only through its
//! duplicates. The property is the signal number for `O_ASYNC` (`F_SETSIG`), which regular files
//! and block devices store and do not use. Unlike a lock, a process that opened the same file
//! separately cannot affect it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::check;

const F_SETSIG: libc::c_int = 10;
const F_GETSIG: libc::c_int = 11;
const F_DUPFD_QUERY: libc::c_int = 1024 + 3;
const SIGNALS: u64 = 64;

/// Returns whether two descriptors refer to one open file description. Calls for one description
/// must not overlap.
///
/// # Errors
/// Those of `fcntl`.
pub fn is_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> io::Result<bool> {
    // Older kernels refuse the command.
    control(one, F_DUPFD_QUERY, other.as_raw_fd())
        .map(|is_same| is_same != 0)
        .or_else(|_| is_same_by_signal(one, other))
}

fn is_same_by_signal(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> io::Result<bool> {
    // Repeat: a forked child with duplicates may do the same concurrently and restore the former
    // value.
    for _ in 0..4 {
        let before = control(one, F_GETSIG, 0)?;
        // Differs from the current number and from 0: `before` is at most `SIGNALS`.
        let distance = 1 + crate::random::next_u64()? % (SIGNALS - 1);
        let mark = 1 + (before as u64 + distance - 1) % SIGNALS;
        control(one, F_SETSIG, mark as libc::c_int)?;
        let seen = control(other, F_GETSIG, 0);
        control(one, F_SETSIG, before as libc::c_int)?;
        if seen? as u64 == mark {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Runs a command whose argument and result are numbers.
fn control(file: BorrowedFd<'_>, command: libc::c_int, argument: libc::c_int) -> io::Result<usize> {
    // SAFETY: none of the commands of this module reads or writes memory of the process.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
    check(result.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;

    #[test]
    fn duplicates_are_of_one_description_and_what_was_opened_twice_is_not() {
        let file = File::open("/proc/self/exe").unwrap();
        let (duplicate, again) =
            (file.try_clone().unwrap(), crate::io::reopen(file.as_fd(), libc::O_RDONLY).unwrap());
        let ways = [is_same, is_same_by_signal];
        for is_same in ways {
            for _ in 0..100 {
                assert!(is_same(file.as_fd(), file.as_fd()).unwrap());
                assert!(is_same(file.as_fd(), duplicate.as_fd()).unwrap());
                assert!(!is_same(file.as_fd(), again.as_fd()).unwrap());
                assert!(!is_same(again.as_fd(), duplicate.as_fd()).unwrap());
            }
        }
        assert_eq!(control(file.as_fd(), F_GETSIG, 0).unwrap(), 0, "it is put back");
        assert_eq!(control(again.as_fd(), F_GETSIG, 0).unwrap(), 0, "it is put back");
    }
}
