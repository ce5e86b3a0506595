//! The device of FUSE: requests of the kernel and answers to them.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::check;

/// Where the device is.
pub const PATH: &str = "/dev/fuse";

/// `_IOR(229, 0, uint32_t)`.
const CLONE: libc::c_ulong = 0x8004_e500;

/// An open file description of `/dev/fuse`.
///
/// A request that was read through one description is answered through the same one. Closing the
/// last descriptor of a description ends the requests that it has read and not answered; closing
/// the last description of a connection ends the connection.
#[derive(Debug)]
pub struct FuseDevice {
    file: OwnedFd,
}

impl FuseDevice {
    /// Opens the device, as the beginning of a connection: the mount then gets the descriptor.
    ///
    /// # Errors
    /// Those of `open`: `ENOENT` or `ENODEV` where the kernel has no FUSE, `EACCES` where the user
    /// may not use it.
    pub fn open() -> io::Result<FuseDevice> {
        OpenOptions::new().read(true).write(true).open(PATH).map(FuseDevice::from)
    }

    /// Another description of the same connection, so that threads do not wait for each other.
    ///
    /// # Errors
    /// As for [`FuseDevice::open`]; `EINVAL` if nothing is mounted with this device yet.
    pub fn another(&self) -> io::Result<FuseDevice> {
        let other = FuseDevice::open()?;
        let number = self.file.as_raw_fd() as u32;
        // SAFETY: the argument is a pointer to four bytes, which the kernel reads.
        check(unsafe { libc::ioctl(other.file.as_raw_fd(), CLONE, &raw const number) }.into())?;
        Ok(other)
    }

    /// Another descriptor of the same description.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn duplicate(&self) -> io::Result<FuseDevice> {
        Ok(FuseDevice { file: self.file.try_clone()? })
    }

    /// Waits for a request and reads it.
    ///
    /// # Errors
    /// Those of `read`: `ENOENT` if the request was ended meanwhile, `ENODEV` if the file system was
    /// unmounted or, as `ECONNABORTED`, the connection ended; `EINVAL` for a buffer that is too
    /// short.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(&self.file, buffer)?)
    }

    /// Writes an answer or a notification, which is taken whole or not at all.
    ///
    /// # Errors
    /// Those of `writev`: `ENOENT` if the request is no more, `ENODEV`.
    pub fn write(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(rustix::io::writev(&self.file, parts)?)
    }
}

/// Tells the kernel that the calling thread, and those that it starts from now on, write back pages of
/// others: where they need memory, they do not wait until such pages are written. Without the right to
/// say so (`CAP_SYS_RESOURCE`) nothing changes.
pub fn announce_server() {
    /// `PR_SET_IO_FLUSHER`.
    const SET_IO_FLUSHER: libc::c_int = 57;
    // SAFETY: numbers only; changes how the kernel allocates memory for this thread.
    let _ = unsafe { libc::prctl(SET_IO_FLUSHER, 1 as libc::c_ulong, 0, 0, 0) };
}

impl From<File> for FuseDevice {
    fn from(file: File) -> FuseDevice {
        FuseDevice { file: file.into() }
    }
}

impl AsFd for FuseDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
