//! Memory-backed files and devices, mapped once and linearly.
//!
//! # What qualifies
//! | | persistence | sync |
//! |---|---|---|
//! | `/dev/dax*`, a file on a DAX file system (`MAP_SYNC` succeeds) | [`Persistence::CacheLineFlush`] | a store fence |
//! | tmpfs, ramfs, hugetlbfs, memfd | [`Persistence::Volatile`] | nothing |
//! | anything else: its mapping is page cache | refused; open it as a [`FileDevice`] | |
//!
//! A page-cache mapping is never treated as DAX: the kernel writes it back at any time, and
//! flushing cache lines would make nothing durable.
//!
//! # Durability
//! [`Device::write_at`] on persistent memory uses non-temporal stores and flushes partial lines, so
//! the bytes are durable when it returns, and `sync` only orders. A caller that stores through
//! [`Device::dax`] must flush the lines it touched (`aquifer_sys::copy::flush_cache_lines`) before
//! `sync`. On volatile memory nothing survives a reboot, not even after `sync`.
//!
//! # Truncation
//! The mapping is made once: growth is not noticed. Each transfer checks the file's length first,
//! so a truncated file gives [`DeviceError::OutOfBounds`] or a short read; a truncation during a
//! copy still raises SIGBUS, as in any mapping. Files opened writable are fully allocated first, so
//! that no store finds the file system full.
//!
//! [`FileDevice`]: crate::FileDevice

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use aquifer_sys::{copy, devdax, file_system};

use crate::region::Region;
use crate::{Device, DeviceError, DeviceIdentity, IoOperation, bounds};

/// What makes stores to a byte-addressable device durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Persistence {
    /// Writing the cache lines back, then a store fence.
    CacheLineFlush,
    /// Nothing: the bytes survive the process, not a reboot.
    Volatile,
}

/// A byte-addressable file or device.
///
/// ```
/// use aquifer_device::{DaxDevice, Device, Persistence};
/// # let name = format!("/dev/shm/aquifer-doc-{}", std::process::id());
/// # let path = std::path::Path::new(&name);
/// # if std::fs::write(path, [7u8; 4096]).is_err() { return Ok(()); }
/// # let opened = DaxDevice::open(path);
/// # std::fs::remove_file(path).unwrap();
/// # let device = opened?; /*
/// let device = DaxDevice::open("/dev/shm/data")?;
/// # */
/// assert_eq!(device.persistence(), Persistence::Volatile);
/// let mut bytes = [0; 3];
/// device.read_at(4093, &mut bytes)?;
/// assert_eq!(bytes, [7; 3]);
/// # Ok::<(), aquifer_device::DeviceError>(())
/// ```
#[derive(Debug)]
pub struct DaxDevice {
    name: String,
    file: File,
    identity: DeviceIdentity,
    region: Region,
    is_writable: bool,
    is_regular: bool,
    persistence: Persistence,
    medium: &'static str,
}

/// Options for opening a [`DaxDevice`]; made by [`DaxDevice::options`].
#[derive(Debug, Clone, Default)]
pub struct DaxOptions {
    writable: bool,
    persistent: bool,
}

impl DaxOptions {
    /// Sets whether the device can be written to. Off by default. If on, a regular file is fully
    /// allocated at open.
    pub fn writable(mut self, writable: bool) -> Self {
        self.writable = writable;
        self
    }

    /// Sets whether volatile memory is refused. Off by default.
    pub fn persistent(mut self, persistent: bool) -> Self {
        self.persistent = persistent;
        self
    }

    /// Opens and maps `path`.
    ///
    /// # Errors
    /// [`DeviceError::Open`] where the system refuses, also for lack of space;
    /// [`DeviceError::Unsuitable`] where the file is not memory-backed.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<DaxDevice, DeviceError> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let mode = std::fs::metadata(path)
            .map_err(|source| DeviceError::Open { path: name.clone(), source })?;
        let kind = mode.file_type();
        if !kind.is_file() && !devdax::is_devdax(&mode) {
            let what = if kind.is_block_device() { "a block device" } else { "no regular file" };
            return Err(DeviceError::Unsuitable {
                path: name,
                reason: format!(
                    "is {what}; only files in memory and on DAX file systems and /dev/dax devices \
                     are byte-addressable, open others as a FileDevice"
                ),
            });
        }
        let file = File::options()
            .read(true)
            .write(self.writable)
            .open(path)
            .map_err(|source| DeviceError::Open { path: name.clone(), source })?;
        self.map(file, name)
    }

    /// Maps an open file, for instance a memfd; `name` appears in messages.
    ///
    /// # Errors
    /// As [`DaxOptions::open`].
    pub fn map(&self, file: File, name: String) -> Result<DaxDevice, DeviceError> {
        let open_error = |source| DeviceError::Open { path: name.clone(), source };
        let unsuitable = |reason: String| DeviceError::Unsuitable { path: name.clone(), reason };
        let metadata = file.metadata().map_err(open_error)?;
        let is_regular = metadata.file_type().is_file();
        let identity = if is_regular {
            DeviceIdentity::File { file_system: metadata.dev(), inode: metadata.ino() }
        } else {
            DeviceIdentity::Special { number: metadata.rdev() }
        };
        let magic = file_system::magic(file.as_fd()).map_err(open_error)?;
        let volatile = file_system::in_memory(magic).filter(|_| is_regular);
        let len_bytes = if is_regular { metadata.len() } else { devdax::len_bytes(&metadata) };
        let len_bytes = usize::try_from(len_bytes)
            .map_err(|_| unsuitable("is longer than the address space".into()))?;
        let (region, persistence, medium) = match volatile {
            Some(medium) if self.persistent => {
                return Err(unsuitable(format!(
                    "is {medium}, which does not survive a reboot; use a DAX file system or device"
                )));
            }
            Some(medium) => {
                if self.writable && len_bytes > 0 {
                    allocate(&file, len_bytes).map_err(open_error)?;
                }
                let region =
                    Region::of_file(file.as_fd(), len_bytes, self.writable, libc::MAP_SHARED)
                        .map_err(open_error)?;
                (region, Persistence::Volatile, medium)
            }
            None if len_bytes == 0 => {
                return Err(unsuitable("is empty, so it cannot be told whether it is DAX".into()));
            }
            None => {
                let flags = libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC;
                let region = Region::of_file(file.as_fd(), len_bytes, self.writable, flags);
                let region = region.map_err(|error| match error.raw_os_error() {
                    Some(libc::EOPNOTSUPP | libc::EINVAL) => unsuitable(
                        "its mapping would be page cache (MAP_SYNC refused); open it as a FileDevice"
                            .into(),
                    ),
                    _ => open_error(error),
                })?;
                if self.writable && is_regular {
                    allocate(&file, len_bytes).map_err(open_error)?;
                }
                if copy::FlushForm::best().is_none() {
                    return Err(unsuitable("this CPU has no instruction to flush a line".into()));
                }
                (
                    region,
                    Persistence::CacheLineFlush,
                    if is_regular { "MAP_SYNC" } else { "devdax" },
                )
            }
        };
        if magic == file_system::HUGETLBFS && !self.writable {
            // A hole is filled at its first read, which raises SIGBUS when no huge page is free.
            region.populate_for_reading().map_err(open_error)?;
        }
        Ok(DaxDevice {
            name,
            file,
            identity,
            region,
            is_writable: self.writable,
            is_regular,
            persistence,
            medium,
        })
    }
}

impl DaxDevice {
    /// Opens `path` for reading.
    ///
    /// # Errors
    /// As [`DaxOptions::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DeviceError> {
        Self::options().open(path)
    }

    /// Returns options for opening: writable, persistent memory only.
    pub fn options() -> DaxOptions {
        DaxOptions::default()
    }

    /// Returns what makes stores durable.
    pub fn persistence(&self) -> Persistence {
        self.persistence
    }

    /// Returns the length of the mapping: the file's length when it was opened.
    pub fn mapped_bytes(&self) -> usize {
        self.region.len_bytes()
    }
}

impl Device for DaxDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn identity(&self) -> DeviceIdentity {
        self.identity
    }

    /// Returns the mapped length, or the file's length if it was truncated below that.
    fn len_bytes(&self) -> Result<u64, DeviceError> {
        let mapped_bytes = self.region.len_bytes() as u64;
        if !self.is_regular {
            return Ok(mapped_bytes);
        }
        match self.file.metadata() {
            Ok(metadata) => Ok(metadata.len().min(mapped_bytes)),
            Err(source) => Err(DeviceError::Io {
                operation: IoOperation::Inspect,
                offset_bytes: 0,
                len_bytes: 0,
                source,
            }),
        }
    }

    fn is_writable(&self) -> bool {
        self.is_writable
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        let readable_bytes = bounds::readable_bytes(offset_bytes, buffer.len(), self.len_bytes()?)?;
        self.region.read(offset_bytes, &mut buffer[..readable_bytes]);
        Ok(readable_bytes)
    }

    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        if !self.is_writable {
            return Err(DeviceError::ReadOnly);
        }
        bounds::check_write(offset_bytes, buffer.len(), self.len_bytes()?)?;
        match self.persistence {
            Persistence::CacheLineFlush => self.region.write_persistently(offset_bytes, buffer),
            Persistence::Volatile => self.region.write(offset_bytes, buffer),
        }
        Ok(())
    }

    fn writes_are_signal_safe(&self) -> bool {
        true
    }

    /// A store fence on persistent memory, since writes have flushed their lines; a no-op on
    /// volatile memory.
    fn sync(&self) -> Result<(), DeviceError> {
        if self.persistence == Persistence::CacheLineFlush {
            copy::store_fence();
        }
        Ok(())
    }

    /// Readable, and writable if the device was opened writable. The caller must handle truncation.
    fn dax(&self) -> Option<(*mut u8, usize)> {
        Some((self.region.start(), self.region.len_bytes()))
    }

    fn access_path(&self) -> String {
        match self.persistence {
            Persistence::CacheLineFlush => format!("dax ({}, flushed by cache line)", self.medium),
            Persistence::Volatile => format!("memory ({}, volatile)", self.medium),
        }
    }
}

/// Allocates every page of the file, keeping its content.
fn allocate(file: &File, len_bytes: usize) -> io::Result<()> {
    match aquifer_sys::io::allocate(file.as_fd(), 0, len_bytes as u64) {
        // ramfs has no fallocate, and no size limit either.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
        allocated => allocated,
    }
}
