//! Which file system a file lies on, as far as that decides how it can be reached.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// File systems whose files are memory.
const IN_MEMORY: [(u64, &str); 3] =
    [(0x0102_1994, "tmpfs"), (0x8584_58f6, "ramfs"), (HUGETLBFS, "hugetlbfs")];

/// File systems whose files are made up by the kernel as they are read.
const MADE_UP: [(u64, &str); 8] = [
    (0x9fa0, "proc"),
    (0x6265_6572, "sysfs"),
    (0x0027_e0eb, "cgroup"),
    (0x6367_7270, "cgroup2"),
    (0x6462_6720, "debugfs"),
    (0x7472_6163, "tracefs"),
    (0x7363_6673, "securityfs"),
    (0x6165_676c, "pstore"),
];

/// hugetlbfs, which has no write system call.
pub(crate) const HUGETLBFS: u64 = 0x9584_58f6;

/// Magic number of the file system `file` lies on.
pub(crate) fn magic(file: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: all-zero is a valid `statfs`.
    let mut status: libc::statfs64 = unsafe { std::mem::zeroed() };
    // SAFETY: `status` is valid for the call to fill in.
    if unsafe { libc::fstatfs64(file.as_raw_fd(), &raw mut status) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Magic numbers are 32 bits wide; the field's type and sign differ between architectures.
    Ok(status.f_type as u64 & 0xffff_ffff)
}

/// The name of an in-memory file system, if it is one.
pub(crate) fn in_memory(magic: u64) -> Option<&'static str> {
    IN_MEMORY.iter().find(|known| known.0 == magic).map(|known| known.1)
}

/// The name of a file system without storage, if it is one.
pub(crate) fn made_up(magic: u64) -> Option<&'static str> {
    MADE_UP.iter().find(|known| known.0 == magic).map(|known| known.1)
}
