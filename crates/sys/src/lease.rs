//! Determines whether an open file description is the only one of its inode, and keeps it so for a
//! moment.
//!
//! A write lease (`F_SETLEASE`) is granted only while no other file description of the inode is
//! open in any process; a mapping keeps its description open. From then on a thread that opens the
//! file blocks until the lease is released. So while a [`SoleOpener`]
//! [is alone](SoleOpener::is_alone), no other description of the file is open, and no mapping of
//! one exists.
//!
//! A process that opens the file with `O_NONBLOCK` gets `EWOULDBLOCK` during the lease; so a lease
//! is for work that takes milliseconds. If the holder is stopped for
//! `/proc/sys/fs/lease-break-time` (45 s) while another thread is blocked, it loses its lease:
//! [`SoleOpener::is_alone`] checks for that. The kernel signals the holder when a thread blocks:
//! here with `SIGURG`, which does nothing unless a program handles it. A thread that holds a lease
//! must not open the file itself, nor wait for a thread that does.
//!
//! Works only on file systems known to count all open descriptions. On overlayfs a mapping keeps
//! another file open than the one that was opened.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::file_system;

/// The `libc` crate defines it for some systems only.
const F_SETSIG: i32 = 10;

/// ext4 (with ext2 and ext3, which have the same magic number) and XFS.
const COUNTING: [u64; 2] = [libc::EXT4_SUPER_MAGIC as u64, libc::XFS_SUPER_MAGIC as u64];

/// While this [is alone](SoleOpener::is_alone), no other description of the file is open.
#[derive(Debug)]
pub struct SoleOpener<'a> {
    file: BorrowedFd<'a>,
}

impl SoleOpener<'_> {
    /// Takes the lease. `None` if another description is open, if the file belongs to another user,
    /// or if the file system is not known to count. Permanently changes the signal that the
    /// descriptor sends.
    pub fn stay(file: BorrowedFd<'_>) -> Option<SoleOpener<'_>> {
        let magic = file_system::magic(file).ok()?;
        if !COUNTING.contains(&magic) {
            return None;
        }
        control(file, F_SETSIG, libc::SIGURG).ok()?;
        control(file, libc::F_SETLEASE, libc::F_WRLCK).ok()?;
        Some(SoleOpener { file })
    }

    /// Returns whether the lease is still held.
    pub fn is_alone(&self) -> bool {
        // SAFETY: a command without an argument.
        unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_GETLEASE) == libc::F_WRLCK }
    }
}

impl Drop for SoleOpener<'_> {
    fn drop(&mut self) {
        // Fails if the kernel has already revoked the lease, because another thread was blocked for
        // 45 s.
        let _ = control(self.file, libc::F_SETLEASE, libc::F_UNLCK);
    }
}

fn control(file: BorrowedFd<'_>, command: i32, argument: i32) -> io::Result<()> {
    // SAFETY: commands that take an integer.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn open(path: &Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    /// Returns `None`, and prints why, where leases are not supported.
    fn scene() -> Option<(tempfile::NamedTempFile, File)> {
        let named = tempfile::NamedTempFile::new().unwrap();
        let path = named.into_temp_path();
        let file = open(&path);
        if SoleOpener::stay(file.as_fd()).is_none() {
            println!("skipped: no leases on the file system of {}", path.display());
            return None;
        }
        Some((tempfile::NamedTempFile::from_parts(file.try_clone().unwrap(), path), file))
    }

    #[test]
    fn another_open_file_or_mapping_is_noticed() {
        let Some((named, file)) = scene() else { return };
        for writes in [false, true] {
            let other = File::options().read(true).write(writes).open(named.path()).unwrap();
            assert!(SoleOpener::stay(file.as_fd()).is_none());
            drop(other);
            assert!(SoleOpener::stay(file.as_fd()).is_some());
        }
        let other = open(named.path());
        other.set_len(4096).unwrap();
        let protection = crate::memory::Protection::ReadWrite;
        let address = crate::memory::map_file(4096, protection, other.as_fd(), 0).unwrap();
        drop(other);
        assert!(SoleOpener::stay(file.as_fd()).is_none(), "mapped");
        // SAFETY: mapped above, and not used any more.
        unsafe { crate::memory::unmap(address, 4096) }.unwrap();
        assert!(SoleOpener::stay(file.as_fd()).is_some());
    }

    #[test]
    fn a_thread_that_opens_the_file_waits_until_the_lease_is_given_back() {
        let Some((named, file)) = scene() else { return };
        let has_opened = AtomicBool::new(false);
        let lease = SoleOpener::stay(file.as_fd()).unwrap();
        assert!(lease.is_alone());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                File::open(named.path()).unwrap();
                has_opened.store(true, Ordering::SeqCst);
            });
            for _ in 0..20 {
                let refused = File::options()
                    .read(true)
                    .custom_flags(libc::O_NONBLOCK)
                    .open(named.path())
                    .unwrap_err();
                assert_eq!(refused.raw_os_error(), Some(libc::EWOULDBLOCK));
                std::thread::yield_now();
            }
            assert!(!has_opened.load(Ordering::SeqCst));
            assert!(!lease.is_alone(), "it is being taken back");
            drop(lease);
        });
        assert!(has_opened.load(Ordering::SeqCst));
        assert!(SoleOpener::stay(file.as_fd()).is_some());
    }
}
