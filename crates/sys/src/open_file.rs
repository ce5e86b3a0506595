//! Whether two descriptors are of one open file description, that is, duplicates of each other.
//!
//! The kernel says so from Linux 6.10 on (`F_DUPFD_QUERY`). Before that, a property of the description says it: what is set through
//! one descriptor is read through its duplicates only. It is the number of the signal for `O_ASYNC` (`F_SETSIG`), which regular files and
//! block devices store and do not use. Unlike a lock, it cannot be touched by a process that has opened the same file for itself.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::check;

const F_SETSIG: libc::c_int = 10;
const F_GETSIG: libc::c_int = 11;
const F_DUPFD_QUERY: libc::c_int = 1024 + 3;
const SIGNALS: u64 = 64;

/// Whether two descriptors are of one open file description. Calls for one description must not overlap.
///
/// # Errors
/// Those of `fcntl`.
pub fn is_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> io::Result<bool> {
    // Refused by older kernels, which do not know it.
    control(one, F_DUPFD_QUERY, other.as_raw_fd())
        .map(|is_same| is_same != 0)
        .or_else(|_| is_same_by_signal(one, other))
}

fn is_same_by_signal(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> io::Result<bool> {
    // More than once: a forked child that has duplicates may ask the same at this moment, and put back what was before.
    for _ in 0..4 {
        let before = control(one, F_GETSIG, 0)?;
        // Neither the present number nor 0: `before` is at most `SIGNALS`.
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

/// A command whose argument is a number, and whose result is one.
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
