//! Which bytes a device has: told by what the kernel tells, never by a path, which may have several names.

/// Equal for two devices exactly if they have the same bytes. See [`Device::identity`](crate::Device::identity).
///
/// Not seen through: a block device below a file system, a partition and its disk, a loop device and its
/// file, a file and a copy of it that shares blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceIdentity {
    /// A regular file: number of its file system (`st_dev`) and of its inode.
    File {
        /// `st_dev`.
        file_system: u64,
        /// `st_ino`.
        inode: u64,
    },
    /// A block or character device, whatever its name: its number (`st_rdev`).
    Special {
        /// `st_rdev`.
        number: u64,
    },
    /// An object of this process: its address, which no other object has while it lives.
    Object {
        /// Where it is.
        address: usize,
    },
}

impl DeviceIdentity {
    /// The identity of an object, or of the memory that starts at an address.
    pub fn of_object<T: ?Sized>(object: *const T) -> DeviceIdentity {
        DeviceIdentity::Object { address: object.cast::<()>() as usize }
    }
}
