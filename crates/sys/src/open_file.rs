//! Tells open file descriptions apart: whether two descriptors refer to one, that is, are duplicates
//! ([`is_same`]), and whether a number still refers to the one that it referred to before
//! ([`Identity`]).
//!
//! # Duplicates
//! Since Linux 6.10 the kernel answers this (`F_DUPFD_QUERY`). Before that, a property of the
//! description is used as a mark: a value set through one descriptor is read back only through its
//! duplicates. The property is the signal number for `O_ASYNC` (`F_SETSIG`), which regular files
//! and block devices store and do not use. Unlike a lock, a process that opened the same file
//! separately cannot affect it.
//!
//! # Identity
//! Device and inode tell files apart, but not two open file descriptions of one file, which have
//! separate locks. So a description that has no other user is *marked* ([`mark`]): it gets a random
//! file offset, which nothing uses, because all transfers state theirs. Asking for the offset takes
//! 0.1 µs, however many locks the file has. Where the offset cannot lie far behind the end of the file,
//! there are fewer marks, and device and inode are compared as well.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::check;

const F_SETSIG: libc::c_int = 10;
const F_GETSIG: libc::c_int = 11;
const F_DUPFD_QUERY: libc::c_int = 1024 + 3;
const SIGNALS: u64 = 64;

/// Far marks lie below this offset, and in its upper half: beyond the end of most files.
const FAR_BYTES: u64 = 1 << 41;
/// There is one far mark in so many bytes: 16 million of them.
const FAR_UNIT_BYTES: u64 = 1 << 16;
/// There is one near mark in so many bytes, where an offset cannot be far: 8,191 in 4 MiB.
const NEAR_UNIT_BYTES: u64 = 512;

/// Marks the open file description of a descriptor, unless it is marked already. The caller must have
/// opened it, and use its file offset for nothing.
///
/// Devices of device DAX cannot be marked, nor can what has no file offset; nor what is shorter than
/// 1 KiB where an offset cannot lie far behind the end, as on block devices.
pub fn mark(file: BorrowedFd<'_>) {
    let mark_in = |units: std::ops::Range<u64>, unit_bytes| {
        let count = units.end.checked_sub(units.start).filter(|count| *count > 0)?;
        let mark = mark_in(units.start + crate::random::below(count).ok()?, unit_bytes);
        seek(file, mark as i64, libc::SEEK_SET).is_ok_and(|now| now == mark).then_some(())
    };
    if mark_of(file).is_some() {
        return;
    }
    let far = FAR_BYTES / FAR_UNIT_BYTES;
    let near = || seek(file, 0, libc::SEEK_END).ok().map(|len_bytes| len_bytes / NEAR_UNIT_BYTES);
    if mark_in(far / 2..far, FAR_UNIT_BYTES)
        .or_else(|| mark_in(1..near()?, NEAR_UNIT_BYTES))
        .is_none()
    {
        let _ = seek(file, 0, libc::SEEK_SET);
    }
}

/// The mark in a unit of bytes: an odd offset, which depends on the unit, so that the offset of a
/// program that reads or writes the file hardly passes for one.
fn mark_in(unit: u64, unit_bytes: u64) -> u64 {
    let hash = unit.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
    unit * unit_bytes + ((hash % unit_bytes) | 1)
}

/// The mark of an open file description. Async-signal-safe.
fn mark_of(file: BorrowedFd<'_>) -> Option<u64> {
    let offset_bytes = seek(file, 0, libc::SEEK_CUR).ok()?;
    let unit_bytes = if is_far(offset_bytes) { FAR_UNIT_BYTES } else { NEAR_UNIT_BYTES };
    let unit = offset_bytes / unit_bytes;
    (unit > 0 && offset_bytes == mark_in(unit, unit_bytes)).then_some(offset_bytes)
}

/// Whether a mark is one of so many that no two descriptions have the same.
fn is_far(mark: u64) -> bool {
    (FAR_BYTES / 2..FAR_BYTES).contains(&mark)
}

fn seek(file: BorrowedFd<'_>, offset_bytes: i64, from: libc::c_int) -> io::Result<u64> {
    // SAFETY: changes no memory.
    let offset_bytes = unsafe { libc::lseek(file.as_raw_fd(), offset_bytes, from) };
    check(offset_bytes).map(|offset_bytes| offset_bytes as u64)
}

/// What tells the open file description that a descriptor refers to from others: its [`mark`], if it
/// has one; otherwise device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity {
    device: u64,
    inode: u64,
    /// 0 if it is not marked.
    mark: u64,
}

impl Identity {
    /// The identity of a descriptor. Async-signal-safe.
    ///
    /// # Errors
    /// `EBADF` if the descriptor is closed.
    pub fn of(file: BorrowedFd<'_>) -> io::Result<Identity> {
        // SAFETY: zeros are a value of the structure.
        let mut status: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: fills in the structure.
        check(unsafe { libc::fstat(file.as_raw_fd(), &raw mut status) }.into())?;
        let mark = mark_of(file).unwrap_or(0);
        Ok(Identity { device: status.st_dev, inode: status.st_ino, mark })
    }

    /// Whether the descriptor still refers to this; false if it is closed. Async-signal-safe.
    pub fn is_of(&self, file: BorrowedFd<'_>) -> bool {
        if is_far(self.mark) {
            // Of 16 million marks, hardly another description has the same. Asking for the file as well
            // could take a message to a server.
            seek(file, 0, libc::SEEK_CUR).is_ok_and(|offset_bytes| offset_bytes == self.mark)
        } else {
            Identity::of(file).is_ok_and(|now| now == *self)
        }
    }

    /// Whether it tells open file descriptions of one file apart.
    pub fn is_marked(&self) -> bool {
        self.mark != 0
    }

    /// Whether both are descriptions of one file.
    pub fn is_same_file(&self, other: &Identity) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// The identity as numbers, to be kept in atomics.
    pub fn to_words(self) -> [u64; 3] {
        [self.device, self.inode, self.mark]
    }

    /// The reverse of [`Identity::to_words`].
    pub fn from_words([device, inode, mark]: [u64; 3]) -> Identity {
        Identity { device, inode, mark }
    }
}

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

    #[test]
    fn a_mark_is_kept_by_duplicates_and_tells_descriptions_of_one_file_apart() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || file.reopen().unwrap();
        let (first, other, plain) = (open(), open(), open());
        let of = |file: &File| Identity::of(file.as_fd()).unwrap();
        let unmarked = of(&first);
        assert!(unmarked == of(&other) && !unmarked.is_marked());
        [&first, &other].into_iter().for_each(|file| mark(file.as_fd()));
        let marked = of(&first);
        assert!(marked.is_marked() && of(&other).is_marked() && marked != of(&other));
        assert!(marked.is_same_file(&of(&other)) && !of(&plain).is_marked());
        assert!(!unmarked.is_of(first.as_fd()) && unmarked.is_of(plain.as_fd()));

        let duplicate = first.try_clone().unwrap();
        mark(duplicate.as_fd());
        crate::io::write_all_at(first.as_fd(), b"text", 0).unwrap();
        assert!(marked.is_of(duplicate.as_fd()) && !marked.is_of(other.as_fd()));
        assert_eq!(Identity::from_words(marked.to_words()), marked);
    }

    #[test]
    fn what_has_no_offset_is_not_marked() {
        let (pipe, _writing) = std::io::pipe().unwrap();
        let null = File::open("/dev/null").unwrap();
        for file in [pipe.as_fd(), null.as_fd()] {
            mark(file);
            assert!(!Identity::of(file).unwrap().is_marked());
        }
    }

    /// As of small block devices, where an offset cannot lie behind the end.
    #[test]
    fn near_marks_are_many_and_are_compared_with_the_file() {
        let near: std::collections::HashSet<u64> =
            (1..(4 << 20) / NEAR_UNIT_BYTES).map(|unit| mark_in(unit, NEAR_UNIT_BYTES)).collect();
        assert_eq!(near.len(), 8191);
        assert!(near.iter().all(|mark| mark % 2 == 1 && *mark < 4 << 20 && !is_far(*mark)));

        let (one, other) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        for file in [&one, &other] {
            seek(file.as_fd(), mark_in(77, NEAR_UNIT_BYTES) as i64, libc::SEEK_SET).unwrap();
        }
        let marked = Identity::of(one.as_fd()).unwrap();
        assert!(marked.is_marked() && marked.is_of(one.as_fd()) && !marked.is_of(other.as_fd()));
    }

    /// Offsets of programs that read or write whole words, or whole lines, are no marks.
    #[test]
    fn offsets_that_programs_use_are_no_marks() {
        let file = tempfile::tempfile().unwrap();
        for offset_bytes in [0, 1, 511, 4095, 1 << 16, 1 << 40, FAR_BYTES - 4096, FAR_BYTES - 1] {
            seek(file.as_fd(), offset_bytes as i64, libc::SEEK_SET).unwrap();
            assert_eq!(mark_of(file.as_fd()), None, "{offset_bytes}");
        }
    }
}
