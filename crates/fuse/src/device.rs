//! The device: where requests come from and answers go, and what the kernel says about both.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use aquifer_sys::fuse::FuseDevice;

use crate::answer::{Channel, Delivered};
use crate::wire::{Bytes, InvalidateInode, OutHeader, notify};

/// What a read of the device led to.
#[derive(Debug)]
pub enum Received {
    /// A request of this length.
    Request(usize),
    /// The file system was unmounted.
    Unmounted,
    /// The connection was ended; the file system may still be mounted.
    Aborted,
}

/// Up to this length the parts of an answer are copied together: the kernel takes longer for each part
/// than for the bytes.
const SHORT_BYTES: usize = 512;

/// The parts as one, if they fit.
fn joined<'b>(parts: &[IoSlice<'_>], buffer: &'b mut [u8; SHORT_BYTES]) -> Option<&'b [u8]> {
    let mut len = 0;
    for part in parts {
        buffer.get_mut(len..len + part.len())?.copy_from_slice(part);
        len += part.len();
    }
    Some(&buffer[..len])
}

/// One description of the device.
#[derive(Debug)]
pub struct Device {
    device: Arc<FuseDevice>,
}

impl Device {
    /// Of a description.
    pub fn new(device: FuseDevice) -> Device {
        Device { device: Arc::new(device) }
    }

    /// Another description of the same connection; where the device cannot be opened, another
    /// descriptor of this one.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn another(&self) -> io::Result<Device> {
        self.device.another().or_else(|_| self.device.duplicate()).map(Device::new)
    }

    /// Another description of the same connection.
    ///
    /// # Errors
    /// As for [`FuseDevice::another`].
    pub fn another_description(&self) -> io::Result<Device> {
        self.device.another().map(Device::new)
    }

    /// Another descriptor of the same description.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn duplicate(&self) -> io::Result<Device> {
        self.device.duplicate().map(Device::new)
    }

    /// Asks the kernel to hand out again what was read from any description and not answered. Returns
    /// false if it does not know how.
    pub fn resend(&self) -> bool {
        let len = size_of::<OutHeader>() as u32;
        let header = OutHeader { len, error: notify::RESEND, unique: 0 };
        self.device.write(&[header.slice()]).is_ok()
    }

    /// Has the kernel drop the pages and attributes that it has of an inode. Waits for pages that are
    /// being read or written, so for answers to requests: not for a thread that answers them, or whose
    /// process has to end if they are not answered.
    pub fn drop_pages(&self, ino: u64) {
        let body = InvalidateInode { ino, offset: 0, len: 0 };
        let len = (size_of::<OutHeader>() + size_of::<InvalidateInode>()) as u32;
        let header = OutHeader { len, error: notify::INVAL_INODE, unique: 0 };
        // It may have forgotten the inode, or have ended.
        let _ = self.device.write(&[header.slice(), body.slice()]);
    }

    /// Waits for the next request.
    ///
    /// # Errors
    /// Those of the system that are neither an end nor a reason to try again.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        loop {
            let error = match self.device.read(buffer) {
                Ok(len) => return Ok(Received::Request(len)),
                Err(error) => error,
            };
            match error.raw_os_error() {
                // The client was killed before the request was read; a signal; no request after all.
                Some(libc::ENOENT | libc::EINTR | libc::EAGAIN) => {}
                Some(libc::ENODEV) => return Ok(Received::Unmounted),
                Some(libc::ECONNABORTED) => return Ok(Received::Aborted),
                _ => return Err(error),
            }
        }
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl Channel for Device {
    fn another(&self) -> Option<Box<dyn Channel + Send>> {
        // Of the same description, as the answer must be. No descriptor: many may wait.
        Some(Box::new(Device { device: self.device.clone() }))
    }

    fn send(&self, parts: &[IoSlice<'_>]) -> Delivered {
        let mut buffer = [0; SHORT_BYTES];
        let joined = joined(parts, &mut buffer).map(IoSlice::new);
        let parts = joined.as_ref().map_or(parts, std::slice::from_ref);
        loop {
            let error = match self.device.write(parts) {
                Ok(_) => return Delivered::Yes,
                Err(error) => error,
            };
            match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                Some(libc::ENOENT) => return Delivered::ClientGone,
                Some(libc::ENODEV | libc::ECONNABORTED) => return Delivered::Ended,
                // The answer is not what the protocol says: a defect of this crate. The client must
                // not wait for ever; it gets an error instead (`Answer`).
                _ => return Delivered::Refused,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_answers_are_one_part_and_long_ones_stay_as_they_are() {
        let mut buffer = [0; SHORT_BYTES];
        let rest = [7; SHORT_BYTES - 2];
        let parts = [IoSlice::new(b"ab"), IoSlice::new(&[]), IoSlice::new(&rest)];
        let expected = [&b"ab"[..], &rest].concat();
        assert_eq!(joined(&parts, &mut buffer), Some(&expected[..]));
        assert_eq!(joined(&[parts[0], parts[0], parts[2]], &mut buffer), None);
    }
}
