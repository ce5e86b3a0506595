//! Opening a file device: checks that the file is suitable, and finds whether direct I/O works and
//! with which alignment.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use aquifer_sys::file_system;
use aquifer_sys::high_fd::HeldFile;
use rustix::fs::OFlags;

use super::queue::Engine;
use super::state::{FileState, Kind};
use super::sync::SyncGate;
use super::{FileDevice, system};
use crate::{AlignedBuffer, DeviceError, DeviceIdentity};

/// Whether transfers bypass the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Direct {
    /// Where the file system allows it, otherwise buffered; `access_path` reports which.
    #[default]
    Auto,
    /// Refuse to open where direct I/O is not possible.
    Require,
    /// Always through the page cache.
    Never,
}

/// Options for opening a [`FileDevice`]; made by [`FileDevice::options`].
#[derive(Debug, Clone)]
pub struct FileOptions {
    writable: bool,
    direct: Direct,
    io_uring: bool,
}

impl Default for FileOptions {
    fn default() -> Self {
        FileOptions { writable: false, direct: Direct::Auto, io_uring: true }
    }
}

/// The alignment used where none is known; every disk in use accepts it.
const USUAL_ALIGNMENT_BYTES: usize = 4096;
/// The largest alignment that is probed, or accepted from `statx`.
const LARGEST_ALIGNMENT_BYTES: usize = 64 << 10;

impl FileOptions {
    /// Sets whether the device can be written to. Off by default.
    pub fn writable(mut self, writable: bool) -> Self {
        self.writable = writable;
        self
    }

    /// Sets whether transfers bypass the page cache. [`Direct::Auto`] by default.
    pub fn direct(mut self, direct: Direct) -> Self {
        self.direct = direct;
        self
    }

    /// Sets whether batches may use io_uring; on by default. If it is off, the kernel refuses it,
    /// or `AQUIFER_NO_IO_URING` is set and neither empty nor `0`, a thread pool runs them.
    pub fn io_uring(mut self, io_uring: bool) -> Self {
        self.io_uring = io_uring;
        self
    }

    /// Opens `path`, a regular file or block device. An empty file is a device of length 0.
    ///
    /// # Errors
    /// [`DeviceError::Open`] where the system refuses to open it, [`DeviceError::Unsuitable`] where
    /// it is not storage: directories, pipes, sockets, character devices, files of /proc and the
    /// like, and files that cannot do direct I/O under [`Direct::Require`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<FileDevice, DeviceError> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let open_error = |source| DeviceError::Open { path: name.clone(), source };
        let unsuitable =
            |reason: &str| DeviceError::Unsuitable { path: name.clone(), reason: reason.into() };

        // Checked before opening, because opening a FIFO blocks and opening a character device can
        // have side effects.
        kind_of(system::mode_of(path).map_err(open_error)?).map_err(unsuitable)?;
        let access = if self.writable { OFlags::RDWR } else { OFlags::RDONLY };
        let buffered = system::open(path, access).map_err(open_error)?;
        let status = system::status(buffered.as_fd()).map_err(open_error)?;
        let kind = kind_of(status.mode).map_err(unsuitable)?;
        let magic = file_system::magic(buffered.as_fd()).map_err(open_error)?;
        if kind == Kind::Regular {
            if let Some(pseudo) = file_system::made_up(magic) {
                return Err(unsuitable(&format!(
                    "a {pseudo} file is made up as it is read; copy it to a regular file"
                )));
            }
            if magic == file_system::HUGETLBFS && self.writable {
                return Err(unsuitable(
                    "hugetlbfs has no write system call; open it as a DaxDevice",
                ));
            }
        }

        let attempt = match self.direct {
            Direct::Never => Err("asked for"),
            _ => open_direct(path, access, kind, magic, buffered.as_fd()),
        };
        let (main, second, alignment_bytes, buffered_because) = match attempt {
            Ok((direct, alignment_bytes)) => {
                let second = (kind == Kind::Regular).then_some(buffered);
                (direct, second, alignment_bytes, None)
            }
            Err(reason) if self.direct == Direct::Require => {
                return Err(unsuitable(&format!(
                    "direct I/O is not possible: {reason}; move the file or allow buffered access"
                )));
            }
            Err(reason) => (buffered, None, 1, Some(reason)),
        };
        let main = HeldFile::own(main).map_err(open_error)?;
        let second = second.map(HeldFile::own).transpose().map_err(open_error)?;
        Ok(FileDevice {
            state: Arc::new(FileState {
                name,
                kind,
                identity: match kind {
                    Kind::Regular => status.file,
                    Kind::BlockDevice => DeviceIdentity::Special { number: status.number },
                },
                may_give_up_direct: second.is_some() && self.direct == Direct::Auto,
                buffered: second,
                main,
                is_writable: self.writable,
                alignment_bytes,
                direct: AtomicBool::new(buffered_because.is_none()),
                buffered_because,
                gate: SyncGate::default(),
            }),
            engine: Engine::choose(self.io_uring),
        })
    }
}

/// Returns the kind of device that a file of this mode makes, or why it makes none.
fn kind_of(mode: libc::mode_t) -> Result<Kind, &'static str> {
    match mode & libc::S_IFMT {
        libc::S_IFREG => Ok(Kind::Regular),
        libc::S_IFBLK => Ok(Kind::BlockDevice),
        libc::S_IFDIR => Err("is a directory; name a regular file or a block device"),
        libc::S_IFIFO => Err("is a pipe, which cannot be read at an offset; name a regular file"),
        libc::S_IFSOCK => Err("is a socket; name a regular file or a block device"),
        libc::S_IFCHR => {
            Err("is a character device; name a regular file or a block device, and open a \
             /dev/dax device as a DaxDevice")
        }
        _ => Err("is no storage; name a regular file or a block device"),
    }
}

/// Returns a direct descriptor and its alignment, or the reason why there is none.
fn open_direct(
    path: &Path,
    access: OFlags,
    kind: Kind,
    magic: u64,
    buffered: BorrowedFd<'_>,
) -> Result<(OwnedFd, usize), &'static str> {
    // These would accept O_DIRECT (tmpfs since 6.6) but use their page cache anyway.
    if kind == Kind::Regular && file_system::in_memory(magic).is_some() {
        return Err("the file system keeps its files in memory");
    }
    let stated = aquifer_sys::io::direct_alignment(buffered);
    if stated.is_some_and(|(_, offset)| offset == 0) {
        return Err("O_DIRECT refused by the file system for this file");
    }
    let direct = system::open(path, access | OFlags::DIRECT)
        .map_err(|_| "O_DIRECT refused by the file system")?;
    let alignment_bytes = match (stated, kind) {
        (Some((memory, offset)), _) => memory.max(offset).next_power_of_two(),
        (None, Kind::BlockDevice) => {
            system::block_device_block_bytes(direct.as_fd()).unwrap_or(USUAL_ALIGNMENT_BYTES)
        }
        (None, Kind::Regular) => {
            probe_alignment(direct.as_fd()).ok_or("direct transfers refused by the file system")?
        }
    };
    if alignment_bytes > LARGEST_ALIGNMENT_BYTES {
        return Err("its direct I/O needs an alignment beyond 64 KiB");
    }
    let refused = try_read(direct.as_fd(), 0, alignment_bytes.max(USUAL_ALIGNMENT_BYTES), 0)
        .is_err_and(|errno| errno == libc::EINVAL);
    if refused {
        return Err("direct transfers refused by the file system");
    }
    Ok((direct, alignment_bytes))
}

/// Returns the smallest alignment at which a direct read is accepted; `None` if none is. For a file
/// too short to probe, returns the usual one.
fn probe_alignment(direct: BorrowedFd<'_>) -> Option<usize> {
    let len_bytes = system::status(direct).ok()?.len_bytes;
    let mut candidate_bytes = 512;
    while candidate_bytes <= LARGEST_ALIGNMENT_BYTES {
        if len_bytes <= candidate_bytes as u64 {
            return Some(USUAL_ALIGNMENT_BYTES.max(candidate_bytes));
        }
        // Offset, length and memory are odd multiples of the candidate, so no larger alignment is
        // met by chance.
        match try_read(direct, candidate_bytes as u64, candidate_bytes, candidate_bytes) {
            Err(libc::EINVAL) => candidate_bytes *= 2,
            _ => return Some(candidate_bytes),
        }
    }
    None
}

/// Reads into memory `shift_bytes` past a multiple of the largest alignment.
fn try_read(
    file: BorrowedFd<'_>,
    offset_bytes: u64,
    len_bytes: usize,
    shift_bytes: usize,
) -> Result<usize, i32> {
    let mut buffer = AlignedBuffer::new(shift_bytes + len_bytes, LARGEST_ALIGNMENT_BYTES);
    let memory = buffer[shift_bytes..].as_mut_ptr();
    // SAFETY: `memory` is the last `len_bytes` of the buffer, which outlives the call.
    unsafe { system::read(file, offset_bytes, memory, len_bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probing_finds_what_statx_says() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![0u8; 256 << 10]).unwrap();
        let buffered = system::open(file.path(), OFlags::RDONLY).unwrap();
        let Some((memory, offset)) = aquifer_sys::io::direct_alignment(buffered.as_fd()) else {
            eprintln!("skipped: statx does not state the alignment of direct I/O here");
            return;
        };
        let Ok(direct) = system::open(file.path(), OFlags::RDONLY | OFlags::DIRECT) else {
            eprintln!("skipped: the temporary directory's file system refuses O_DIRECT");
            return;
        };
        let probed = probe_alignment(direct.as_fd());
        assert_eq!(probed, Some(memory.max(offset).max(512)));
    }

    #[test]
    fn a_file_too_short_to_probe_gets_the_usual_alignment() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let opened = system::open(file.path(), OFlags::RDONLY).unwrap();
        assert_eq!(probe_alignment(opened.as_fd()), Some(4096));
    }

    #[test]
    fn errors_of_open_keep_their_cause() {
        let error = FileDevice::open("/nonexistent/file").unwrap_err();
        let DeviceError::Open { source, .. } = error else { panic!("{error}") };
        assert_eq!(source.kind(), std::io::ErrorKind::NotFound);
    }
}
