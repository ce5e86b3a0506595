//! Identity of a device's bytes: taken from the kernel's numbers, not from a path, since a file may
//! have several.

/// The identity of a device: equal for two devices exactly if they have the same bytes. See
/// [`Device::identity`](crate::Device::identity).
///
/// Not detected: a block device below a file system, a partition and its disk, a loop device and
/// its file, a file and a copy of it that shares blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceIdentity {
    /// A regular file: its file system's number (`st_dev`) and inode number.
    File {
        /// `st_dev`.
        file_system: u64,
        /// `st_ino`.
        inode: u64,
    },
    /// A block or character device: its number (`st_rdev`), whatever its path.
    Special {
        /// `st_rdev`.
        number: u64,
    },
    /// An object of this process: its address, unique while the object lives.
    Object {
        /// The address.
        address: usize,
    },
}

impl DeviceIdentity {
    /// Returns the identity of an object, or of the memory that starts at an address.
    pub fn of_object<T: ?Sized>(object: *const T) -> DeviceIdentity {
        DeviceIdentity::Object { address: object.cast::<()>() as usize }
    }
}
