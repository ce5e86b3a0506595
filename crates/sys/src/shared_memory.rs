//! Memory that processes share: named segments, and unnamed ones for a single process.
//!
//! A segment is *fully allocated* when it is created. tmpfs allocates pages on the first store, and
//! a store when none is left raises SIGBUS in the storing process; `/dev/shm` is small in
//! containers. So creation reports [`SharedMemoryError::NoSpace`], and accesses never fail. Parts
//! that may never be needed can be left unallocated and allocated later
//! ([`SharedMemory::allocate`]): until then no process may touch them, not even to read.
//!
//! A name is what `shm_open` takes without the slash, and appears in `/dev/shm`. The name stays
//! until it is unlinked, even if its creator dies; the memory stays until no process maps it. The
//! content of a new segment is zero.
//!
//! A segment can also be a file in any other directory ([`SharedMemory::create_at`],
//! [`SharedMemory::descriptor_at`]), reachable by the processes that share that directory. On a
//! disk its space is reserved there, the system writes it back from time to time, and its name
//! survives a reboot. File systems that cannot reserve space are refused.
//!
//! Other processes may change the bytes at any time: access them through [`SharedMemory::start`]
//! with atomics and raw copies ([`copy_racy`](crate::memory::copy_racy)), never through references.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create};

use crate::high_fd::HeldFile;
use crate::memory::{self, Protection};
use crate::open_file::mark;

/// Why a segment could not be created or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedMemoryError {
    /// Not enough memory for the segment.
    #[error(
        "not enough shared memory for {len_bytes} bytes ({source}); enlarge /dev/shm \
         (`mount -o remount,size=…`, `--shm-size` of a container), or what else was chosen in its place, or remove what fills it"
    )]
    NoSpace {
        /// Bytes requested.
        len_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The name is taken.
    #[error("the shared memory {name} exists already")]
    Exists {
        /// The name.
        name: String,
    },
    /// No segment has this name.
    #[error("there is no shared memory {name}")]
    Missing {
        /// The name.
        name: String,
    },
    /// The user has no permission to open it.
    #[error("no permission for the shared memory {name}; ask its owner, or run as the same user")]
    NoPermission {
        /// The name.
        name: String,
    },
    /// The file is empty: its creator has not finished, or died.
    #[error("the shared memory {name} is empty: its creator has not finished; unlink it")]
    Empty {
        /// The name.
        name: String,
    },
    /// Not a valid segment name.
    #[error("{name:?} cannot name shared memory: 1 to 250 bytes without slash and NUL can")]
    BadName {
        /// The name.
        name: String,
    },
    /// The system call failed.
    #[error("cannot {action} the shared memory {name}: {source}")]
    System {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// The name.
        name: String,
        /// The system's error.
        source: io::Error,
    },
}

/// A mapped segment, unmapped when dropped.
#[derive(Debug)]
pub struct SharedMemory {
    start: *mut u8,
    len_bytes: usize,
    is_writable: bool,
    file: HeldFile,
}

// SAFETY: owns its mapping; the bytes are reached only through raw pointers, and each access
// through them carries its own safety contract.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates a new segment with exactly these permission bits, and maps it for writing. On an
    /// error no segment is left.
    pub fn create(
        name: &str,
        len_bytes: usize,
        mode: u32,
    ) -> Result<SharedMemory, SharedMemoryError> {
        Self::create_partly(name, len_bytes, len_bytes, mode)
    }

    /// As [`SharedMemory::create`], but allocates only the first `allocated_bytes`.
    pub fn create_partly(
        name: &str,
        len_bytes: usize,
        allocated_bytes: usize,
        mode: u32,
    ) -> Result<SharedMemory, SharedMemoryError> {
        Self::create_at(&path_of(name)?, len_bytes, allocated_bytes, mode)
    }

    /// As [`SharedMemory::create_partly`], at a path.
    pub fn create_at(
        path: &Path,
        len_bytes: usize,
        allocated_bytes: usize,
        mode: u32,
    ) -> Result<SharedMemory, SharedMemoryError> {
        let name = &*path.to_string_lossy();
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
        let file = open_raw(path, flags, mode).map_err(|source| refused(name, "make", source))?;
        let made = (|| {
            crate::io::write_in_place(file.as_fd());
            // The umask has been applied to the mode.
            let permissions = std::fs::Permissions::from_mode(mode & 0o777);
            file.set_permissions(permissions)
                .map_err(|source| refused(name, "set the mode of", source))?;
            allocate(file.as_fd(), len_bytes, 0..allocated_bytes, name)?;
            Self::map(file, len_bytes, Protection::ReadWrite, name)
        })();
        if made.is_err() {
            let _ = std::fs::remove_file(path);
        }
        made
    }

    /// Maps the whole of an existing segment.
    pub fn open(name: &str, writable: bool) -> Result<SharedMemory, SharedMemoryError> {
        Self::adopt(Self::descriptor_at(&path_of(name)?, writable)?, writable)
    }

    /// Opens the file at a path without touching its bytes: for callers that first check whether it
    /// is the right one.
    pub fn descriptor_at(path: &Path, writable: bool) -> Result<OwnedFd, SharedMemoryError> {
        let flags = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        open_raw(path, flags, 0)
            .map(OwnedFd::from)
            .map_err(|source| refused(&path.to_string_lossy(), "open", source))
    }

    /// Maps the whole of a segment by its descriptor, which must be open for writing if `writable`.
    pub fn adopt(file: OwnedFd, writable: bool) -> Result<SharedMemory, SharedMemoryError> {
        let protection = if writable { Protection::ReadWrite } else { Protection::Read };
        Self::map_whole(file.into(), protection, "(open)")
    }

    fn map_whole(
        file: File,
        protection: Protection,
        name: &str,
    ) -> Result<SharedMemory, SharedMemoryError> {
        let metadata =
            file.metadata().map_err(|source| refused(name, "find the length of", source))?;
        let len_bytes = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
        if len_bytes == 0 {
            return Err(SharedMemoryError::Empty { name: name.into() });
        }
        Self::map(file, len_bytes, protection, name)
    }

    /// Creates a segment without a name. Other processes reach it only through
    /// [`SharedMemory::file`].
    pub fn anonymous(len_bytes: usize) -> Result<SharedMemory, SharedMemoryError> {
        const NAME: &str = "(unnamed)";
        let file = memfd_create("aquifer", MemfdFlags::CLOEXEC)
            .map_err(|errno| refused(NAME, "make", errno.into()))?;
        mark(file.as_fd());
        let file = File::from(file);
        allocate(file.as_fd(), len_bytes, 0..len_bytes, NAME)?;
        Self::map(file, len_bytes, Protection::ReadWrite, NAME)
    }

    /// Allocates a part of the segment, for all processes that map it. Parts already allocated stay
    /// as they are.
    ///
    /// # Errors
    /// [`SharedMemoryError::NoSpace`]; the range then still must not be touched.
    pub fn allocate(&self, range: Range<usize>) -> Result<(), SharedMemoryError> {
        allocate(self.file.as_fd(), self.len_bytes, range, "(open)")
    }

    /// Removes the name. Existing mappings stay valid.
    pub fn unlink(name: &str) -> Result<(), SharedMemoryError> {
        std::fs::remove_file(path_of(name)?).map_err(|source| refused(name, "remove", source))
    }

    fn map(
        file: File,
        len_bytes: usize,
        protection: Protection,
        name: &str,
    ) -> Result<SharedMemory, SharedMemoryError> {
        let file = HeldFile::new(file.into()).map_err(|source| refused(name, "inspect", source))?;
        let start = memory::map_file(len_bytes, protection, file.as_fd(), 0)
            .map_err(|source| refused(name, "map", source))?;
        let is_writable = protection == Protection::ReadWrite;
        Ok(SharedMemory { start, len_bytes, is_writable, file })
    }

    /// Returns the first byte; page-aligned.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Returns the length.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Returns whether the segment is mapped for writing.
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Returns the descriptor.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, unmapped only here; users of `start` keep the
        // segment alive.
        let _ = unsafe { memory::unmap(self.start, self.len_bytes) };
    }
}

/// The directory of POSIX shared memory.
pub const DIRECTORY: &str = "/dev/shm";

/// Returns the path that `shm_open` uses for a name.
fn path_of(name: &str) -> Result<PathBuf, SharedMemoryError> {
    let is_good = !name.is_empty() && name.len() <= 250 && !name.contains(['/', '\0']);
    let is_good = is_good && name != "." && name != "..";
    if is_good {
        Ok(Path::new(DIRECTORY).join(name))
    } else {
        Err(SharedMemoryError::BadName { name: name.into() })
    }
}

/// Opens as `shm_open` does: follows no symlink, and does not block on a FIFO.
fn open_raw(path: &Path, flags: OFlags, mode: u32) -> io::Result<File> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(mode))?;
    mark(file.as_fd());
    Ok(file.into())
}

/// Sets the length of the file, and allocates every page of a range.
fn allocate(
    file: BorrowedFd<'_>,
    file_bytes: usize,
    range: Range<usize>,
    name: &str,
) -> Result<(), SharedMemoryError> {
    if range.is_empty() || file_bytes < range.end {
        return Err(SharedMemoryError::Empty { name: name.into() });
    }
    let (start, len_bytes) = (range.start as u64, range.len() as u64);
    // A tmpfs without a size limit would allocate until the OOM killer acts.
    if len_bytes > machine_memory_bytes().map_err(|source| refused(name, "allocate", source))? {
        let source = io::Error::from_raw_os_error(libc::ENOMEM);
        return Err(SharedMemoryError::NoSpace { len_bytes, source });
    }
    let allocated = crate::io::allocate(file, start, len_bytes).and_then(|()| match start {
        0 => Ok(rustix::fs::ftruncate(file, file_bytes as u64)?),
        _ => Ok(()),
    });
    allocated.map_err(|source| match source.raw_os_error() {
        Some(libc::ENOSPC | libc::ENOMEM | libc::EDQUOT | libc::EFBIG) => {
            SharedMemoryError::NoSpace { len_bytes, source }
        }
        _ => refused(name, "allocate", source),
    })
}

/// Returns the memory and swap of this machine. By libc: rustix takes the call for one that cannot
/// fail, and a sandbox may refuse it.
fn machine_memory_bytes() -> io::Result<u64> {
    // SAFETY: all-zero is a valid `sysinfo`.
    let mut status: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: `status` is valid for the call to fill in.
    crate::check(unsafe { libc::sysinfo(&raw mut status) }.into())?;
    let units = (status.totalram as u64).saturating_add(status.totalswap as u64);
    Ok(units.saturating_mul(u64::from(status.mem_unit)))
}

fn refused(name: &str, action: &'static str, source: io::Error) -> SharedMemoryError {
    let name = name.to_owned();
    match source.raw_os_error() {
        Some(libc::EEXIST) => SharedMemoryError::Exists { name },
        Some(libc::ENOENT) => SharedMemoryError::Missing { name },
        Some(libc::EACCES | libc::EPERM) => SharedMemoryError::NoPermission { name },
        Some(libc::ENOSPC) => SharedMemoryError::NoSpace { len_bytes: 0, source },
        _ => SharedMemoryError::System { action, name, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    /// A name unique to this test, unlinked when dropped.
    struct Name(String);

    impl Name {
        fn new(purpose: &str) -> Name {
            let unique = crate::random::next_u64().unwrap();
            Name(format!("aquifer-test-{purpose}-{unique:016x}"))
        }
    }

    impl Drop for Name {
        fn drop(&mut self) {
            let _ = SharedMemory::unlink(&self.0);
        }
    }

    fn byte(of: &SharedMemory, index: usize) -> u8 {
        assert!(index < of.len_bytes());
        // SAFETY: inside the mapping.
        unsafe { of.start().add(index).read_volatile() }
    }

    fn metadata(made: &SharedMemory) -> std::fs::Metadata {
        File::from(made.file().try_clone_to_owned().unwrap()).metadata().unwrap()
    }

    #[test]
    fn a_segment_is_shared_by_name() {
        let name = Name::new("share");
        let made = SharedMemory::create(&name.0, 10_000, 0o622).unwrap();
        let blocks = metadata(&made).blocks();
        assert!(blocks * 512 >= 10_000, "every page has its memory: {blocks}");
        assert_eq!(metadata(&made).mode() & 0o777, 0o622, "whatever the mask");
        assert_eq!(byte(&made, 9_999), 0);
        let reading = SharedMemory::open(&name.0, false).unwrap();
        let writing = SharedMemory::open(&name.0, true).unwrap();
        assert_eq!((reading.len_bytes(), reading.is_writable()), (10_000, false));
        assert!(writing.is_writable());
        // SAFETY: inside the mapping.
        unsafe { writing.start().add(9_999).write_volatile(7) };
        assert_eq!((byte(&reading, 9_999), byte(&made, 9_999)), (7, 7));

        let again = SharedMemory::create(&name.0, 1, 0o600).unwrap_err();
        assert!(matches!(again, SharedMemoryError::Exists { .. }), "{again}");
        assert_eq!(SharedMemory::open(&name.0, false).unwrap().len_bytes(), 10_000);
        SharedMemory::unlink(&name.0).unwrap();
        assert!(matches!(SharedMemory::unlink(&name.0), Err(SharedMemoryError::Missing { .. })));
        assert!(matches!(
            SharedMemory::open(&name.0, true),
            Err(SharedMemoryError::Missing { .. })
        ));
        assert_eq!(byte(&reading, 9_999), 7, "still mapped");
    }

    #[test]
    fn more_than_there_is_is_an_error_and_leaves_nothing() {
        let name = Name::new("large");
        // More than any machine has, less than the maximum file size.
        let error = SharedMemory::create(&name.0, 1 << 55, 0o600).unwrap_err();
        assert!(matches!(error, SharedMemoryError::NoSpace { .. }), "{error}");
        assert!(error.to_string().contains("/dev/shm"), "{error}");
        let gone = SharedMemory::open(&name.0, false).unwrap_err();
        assert!(matches!(gone, SharedMemoryError::Missing { .. }), "{gone}");
        let error = SharedMemory::anonymous(1 << 55).unwrap_err();
        assert!(matches!(error, SharedMemoryError::NoSpace { .. }), "{error}");
    }

    #[test]
    fn a_part_can_be_allocated_later() {
        let name = Name::new("partly");
        let made = SharedMemory::create_partly(&name.0, 1 << 30, 8192, 0o600).unwrap();
        let blocks = || metadata(&made).blocks() * 512;
        assert!((8192..1 << 20).contains(&blocks()), "{}", blocks());
        let other = SharedMemory::open(&name.0, true).unwrap();
        assert_eq!(other.len_bytes(), 1 << 30);
        other.allocate(1 << 20..2 << 20).unwrap();
        assert!(blocks() >= (1 << 20) + 8192);
        // SAFETY: inside the mapping, and allocated.
        unsafe { made.start().add(1 << 20).write_volatile(7) };
        other.allocate(1 << 20..3 << 20).unwrap();
        assert_eq!(byte(&other, 1 << 20), 7);
        assert!(other.allocate(1 << 30..(1 << 30) + 1).is_err(), "behind its end");
    }

    #[test]
    fn a_half_made_segment_and_bad_names_are_errors() {
        let name = Name::new("empty");
        let path = path_of(&name.0).unwrap();
        drop(open_raw(&path, OFlags::CREATE | OFlags::EXCL | OFlags::RDWR, 0o600).unwrap());
        let empty = SharedMemory::open(&name.0, true).unwrap_err();
        assert!(matches!(empty, SharedMemoryError::Empty { .. }), "{empty}");
        for bad in ["", "a/b", "..", "nul\0", &"x".repeat(251)] {
            let error = SharedMemory::open(bad, false).unwrap_err();
            assert!(matches!(error, SharedMemoryError::BadName { .. }), "{error}");
        }
        let none = SharedMemory::create(&Name::new("none").0, 0, 0o600).unwrap_err();
        assert!(matches!(none, SharedMemoryError::Empty { .. }), "{none}");
    }

    #[test]
    fn an_unnamed_segment_is_reached_by_its_descriptor() {
        let made = SharedMemory::anonymous(5000).unwrap();
        // SAFETY: inside the mapping.
        unsafe { made.start().add(4999).write_volatile(3) };
        let other = memory::map_file(5000, Protection::Read, made.file(), 0).unwrap();
        // SAFETY: inside the mapping.
        assert_eq!(unsafe { other.add(4999).read_volatile() }, 3);
        // SAFETY: mapped above, and not used after this.
        unsafe { memory::unmap(other, 5000) }.unwrap();
    }
}
