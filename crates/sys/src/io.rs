//! Reading, writing and syncing ranges of a file.
//!
//! A transfer is complete or an error: short transfers are continued and `EINTR` is retried here,
//! in one place, so that no caller mistakes a short transfer for success.
//!
//! | call | guarantees on return |
//! |---|---|
//! | [`write_all_at`] | the bytes are visible to every process |
//! | [`write_all_at_durably`] | these bytes are durable; the rest of the file is not written back |
//! | [`start_write_back`] | the I/O of some pages has been submitted |
//! | [`finish_write_back`] | dirty pages are on the device or in its cache; metadata is not |
//! | [`SyncableRange::sync`] | the pages and the metadata needed to read them are durable |
//! | [`sync_data`] | as above, for all pages of the file |
//!
//! # Errors of write-back
//! The kernel reports a failed write-back to each open file description once, no matter which
//! process dirtied the pages. Of two threads that sync through one description at the same time,
//! only one gets the error. A caller that must not miss an error uses a separate description
//! ([`reopen`]) for each concurrent sync.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FallocateFlags, IFlags, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};
use rustix::ioctl::{Getter, Opcode, ioctl, opcode};

use crate::check;
use crate::memory::{self, Protection, SMALL_PAGE_BYTES};

/// Length of a block device in bytes: `BLKGETSIZE64`.
const BLOCK_DEVICE_LEN: Opcode = opcode::read::<libc::size_t>(0x12, 114);

/// Retries a call that a signal interrupted.
fn uninterrupted(mut call: impl FnMut() -> libc::c_long) -> io::Result<usize> {
    loop {
        match check(call()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Returns whether a descriptor is open for reading (not write-only, not `O_PATH`).
pub fn can_be_read(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| {
        !flags.contains(OFlags::PATH) && flags & OFlags::ACCMODE != OFlags::WRONLY
    })
}

/// Opens the file with this name in a directory, for reading.
pub fn open_at(directory: BorrowedFd<'_>, name: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let open = || rustix::fs::openat(directory, name, flags, Mode::empty());
    Ok(retry_on_intr(open)?.into())
}

/// Returns an offset as the kernel's offset type.
fn signed(offset_bytes: u64) -> io::Result<libc::off64_t> {
    libc::off64_t::try_from(offset_bytes).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Returns `offset_bytes + done` as the kernel's offset type.
fn behind(offset_bytes: u64, done: usize) -> io::Result<libc::off64_t> {
    offset_bytes
        .checked_add(done as u64)
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))
        .and_then(signed)
}

/// Reads at an offset. The result is shorter than `target` only at the end of the file.
pub fn read_at(file: BorrowedFd<'_>, target: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < target.len() {
        let rest = &mut target[done..];
        let at = behind(offset_bytes, done)?;
        let got = retry_on_intr(|| rustix::io::pread(file, &mut *rest, at as u64))?;
        if got == 0 {
            break;
        }
        done += got;
    }
    Ok(done)
}

/// Reads only what is in the page cache, up to the first byte that is not; returns 0 if the first
/// is not.
///
/// # Errors
/// [`io::ErrorKind::Unsupported`] where the file system does not support it.
pub fn read_resident_at(
    file: BorrowedFd<'_>,
    target: &mut [u8],
    offset_bytes: u64,
) -> io::Result<usize> {
    let at = signed(offset_bytes)?;
    let mut targets = [IoSliceMut::new(target)];
    let read = || rustix::io::preadv2(file, &mut targets, at as u64, ReadWriteFlags::NOWAIT);
    match retry_on_intr(read) {
        Err(Errno::AGAIN) => Ok(0),
        Err(Errno::OPNOTSUPP) => Err(io::ErrorKind::Unsupported.into()),
        other => Ok(other?),
    }
}

/// Fills `target`; fails with [`io::ErrorKind::UnexpectedEof`] if the file is too short.
pub fn read_exact_at(file: BorrowedFd<'_>, target: &mut [u8], offset_bytes: u64) -> io::Result<()> {
    let wanted = target.len();
    match read_at(file, target, offset_bytes)? {
        done if done == wanted => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Writes all of `bytes`.
pub fn write_all_at(file: BorrowedFd<'_>, bytes: &[u8], offset_bytes: u64) -> io::Result<()> {
    write_with(bytes, offset_bytes, |rest, at| rustix::io::pwrite(file, rest, at))
}

/// Writes all of some memory that other threads may be changing: of a word that changes during the
/// write, the old or the new value is written. The parts, at most 1024, are written consecutively;
/// `parts` is consumed.
///
/// # Errors
/// `EFAULT` also if the memory maps a file that was truncated or cannot be read. Some of the bytes
/// may have been written.
///
/// # Safety
/// Each part is mapped readable, even if accesses to the mapping may fail.
pub unsafe fn write_parts_from(
    file: BorrowedFd<'_>,
    mut parts: &mut [memory::Range],
    offset_bytes: u64,
) -> io::Result<()> {
    let mut done = 0;
    loop {
        while parts.first().is_some_and(|part| part.len_bytes == 0) {
            parts = &mut parts[1..];
        }
        if parts.is_empty() {
            return Ok(());
        }
        let at = behind(offset_bytes, done)?;
        let put = uninterrupted(|| {
            // SAFETY: `Range` has the layout of an iovec; the kernel checks its accesses to the
            // caller's parts.
            let put = unsafe {
                libc::pwritev64(file.as_raw_fd(), parts.as_ptr().cast(), parts.len() as i32, at)
            };
            put as libc::c_long
        })?;
        if put == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        done += put;
        let mut left = put;
        for part in parts.iter_mut() {
            let taken = left.min(part.len_bytes);
            part.address = part.address.wrapping_add(taken);
            part.len_bytes -= taken;
            left -= taken;
        }
    }
}

/// Writes all of `bytes` durably, with the metadata needed to read them: `pwritev2` with
/// `RWF_DSYNC`, which syncs this range only.
///
/// # Errors
/// [`io::ErrorKind::Unsupported`], with nothing written, where the system refuses the flag. Then
/// write, and sync the range with [`SyncableRange`] or [`sync_data`].
pub fn write_all_at_durably(
    file: BorrowedFd<'_>,
    bytes: &[u8],
    offset_bytes: u64,
) -> io::Result<()> {
    let written = write_with(bytes, offset_bytes, |rest, at| {
        rustix::io::pwritev2(file, &[IoSlice::new(rest)], at, ReadWriteFlags::DSYNC)
    });
    written.map_err(|error| match error.raw_os_error() {
        Some(libc::ENOSYS | libc::EOPNOTSUPP) => io::ErrorKind::Unsupported.into(),
        _ => error,
    })
}

/// Repeats a write until all bytes are written. A call that writes nothing is
/// [`io::ErrorKind::WriteZero`].
fn write_with(
    bytes: &[u8],
    offset_bytes: u64,
    mut write: impl FnMut(&[u8], u64) -> Result<usize, Errno>,
) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let at = behind(offset_bytes, done)?;
        match retry_on_intr(|| write(&bytes[done..], at as u64))? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            put => done += put,
        }
    }
    Ok(())
}

/// Starts write-back of the dirty pages of a range, without waiting. Pages already under write-back
/// are skipped, even if stored to since: [`finish_write_back`] writes them.
pub fn start_write_back(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
    sync_range(file, offset_bytes, len_bytes, libc::SYNC_FILE_RANGE_WRITE)
}

/// Writes the dirty pages of a range back and waits for them.
///
/// All three flags are needed, because only then does the kernel write for integrity: it waits for
/// a page that is under write-back with older contents, and writes it again.
pub fn finish_write_back(
    file: BorrowedFd<'_>,
    offset_bytes: u64,
    len_bytes: u64,
) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    sync_range(file, offset_bytes, len_bytes, flags)
}

/// Returns a write-back error of any page of the file that this description has not reported yet.
/// Does not wait for I/O.
///
/// Where the system lacks the call (`ENOSYS`: some sandboxes), it returns `Ok`.
pub fn write_back_error(file: BorrowedFd<'_>) -> io::Result<()> {
    // No file is this long, so there is no I/O to wait for; the wait still reports the error.
    const BEHIND_ALL_BYTES: u64 = 1 << 62;
    match sync_range(file, BEHIND_ALL_BYTES, 1, libc::SYNC_FILE_RANGE_WAIT_BEFORE) {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
        told => told,
    }
}

fn sync_range(
    file: BorrowedFd<'_>,
    offset_bytes: u64,
    len_bytes: u64,
    flags: libc::c_uint,
) -> io::Result<()> {
    // A length of 0 would mean the rest of the file.
    if len_bytes == 0 {
        return Ok(());
    }
    let (offset, len) = (signed(offset_bytes)?, signed(len_bytes)?);
    uninterrupted(|| {
        // SAFETY: integers only.
        unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, flags) }.into()
    })
    .map(drop)
}

/// A range of a file that can be synced separately.
///
/// The kernel offers the `fsync` of a range only as `msync(MS_SYNC)` of a mapping, so this is a
/// mapping, without access rights, page tables or memory. It syncs the file's pages, no matter how
/// they were dirtied, with the metadata needed to read them, and flushes the device even if no page
/// is dirty.
#[derive(Debug)]
pub struct SyncableRange {
    start: *mut u8,
    len_bytes: usize,
}

// SAFETY: owns its mapping, which allows no accesses.
unsafe impl Send for SyncableRange {}
// SAFETY: as above.
unsafe impl Sync for SyncableRange {}

impl SyncableRange {
    /// Creates it for the pages that a range touches. `file` must be open for writing.
    ///
    /// # Errors
    /// Also where the file cannot be mapped shared, for instance on a FUSE file system without a
    /// page cache: then use [`sync_data`].
    pub fn new(
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> io::Result<SyncableRange> {
        let lead_bytes = offset_bytes % SMALL_PAGE_BYTES as u64;
        let len_bytes = lead_bytes
            .checked_add(len_bytes)
            .and_then(|len_bytes| usize::try_from(len_bytes).ok())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        let first = offset_bytes - lead_bytes;
        let start = memory::map_file(len_bytes, Protection::None, file, first)?;
        Ok(SyncableRange { start, len_bytes })
    }

    /// Makes the range durable.
    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: this object's own mapping.
        unsafe { memory::sync(self.start, self.len_bytes) }
    }
}

impl Drop for SyncableRange {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, unmapped only here.
        let _ = unsafe { memory::unmap(self.start, self.len_bytes) };
    }
}

/// Makes the whole file's data durable.
pub fn sync_data(file: BorrowedFd<'_>) -> io::Result<()> {
    Ok(retry_on_intr(|| rustix::fs::fdatasync(file))?)
}

/// Allocates the blocks of a range, keeping its content, and extends the file if the range ends
/// past its end.
///
/// # Errors
/// `EOPNOTSUPP` on file systems that cannot (ramfs, some network file systems). After `ENOSPC` the
/// file may be longer than before.
pub fn allocate(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
    allocate_as(file, FallocateFlags::empty(), offset_bytes, len_bytes)
}

/// As [`allocate`], but the file keeps its length, also after an error. Blocks past its end are
/// freed when its length is set, to the current length or less.
pub fn allocate_behind_end(
    file: BorrowedFd<'_>,
    offset_bytes: u64,
    len_bytes: u64,
) -> io::Result<()> {
    allocate_as(file, FallocateFlags::KEEP_SIZE, offset_bytes, len_bytes)
}

fn allocate_as(
    file: BorrowedFd<'_>,
    flags: FallocateFlags,
    offset_bytes: u64,
    len_bytes: u64,
) -> io::Result<()> {
    if len_bytes == 0 {
        return Ok(());
    }
    Ok(retry_on_intr(|| rustix::fs::fallocate(file, flags, offset_bytes, len_bytes))?)
}

/// Disables copy-on-write for a new, empty file where its file system copies each write (btrfs), so
/// that allocated space stays sufficient. Does nothing on other file systems.
pub fn write_in_place(file: BorrowedFd<'_>) {
    if crate::file_system::magic(file).ok() != Some(libc::BTRFS_SUPER_MAGIC as u64) {
        return;
    }
    if let Ok(flags) = rustix::fs::ioctl_getflags(file) {
        // A file system that refuses keeps copying each write.
        let _ = rustix::fs::ioctl_setflags(file, flags | IFlags::NOCOW);
    }
}

/// Opens another open file description of the same file, with `flags` of `open(2)`: it has separate
/// write-back error state, status flags and locks.
pub fn reopen(file: BorrowedFd<'_>, flags: libc::c_int) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::from_bits_retain(flags as u32) | OFlags::CLOEXEC;
    Ok(retry_on_intr(|| rustix::fs::open(path.as_str(), flags, Mode::empty()))?)
}

/// Makes the entries of a directory durable.
pub fn sync_directory(path: &std::path::Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Returns the current length of a block device.
pub fn block_device_len_bytes(file: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: the request writes one `u64`.
    let get = unsafe { Getter::<BLOCK_DEVICE_LEN, u64>::new() };
    // SAFETY: as above.
    Ok(unsafe { ioctl(file, get) }?)
}

/// Returns the alignments of memory and of offsets for direct I/O, both 0 if the file does not
/// support it; `None` where the kernel (before 6.1) or the file system does not report them.
pub fn direct_alignment(file: BorrowedFd<'_>) -> Option<(usize, usize)> {
    // SAFETY: all-zero is a valid `statx`.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the empty path with AT_EMPTY_PATH names the descriptor; `status` outlives the call.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut status,
        )
    };
    if result != 0 || status.stx_mask & libc::STATX_DIOALIGN == 0 {
        return None;
    }
    Some((status.stx_dio_mem_align as usize, status.stx_dio_offset_align as usize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn unnamed(len_bytes: u64) -> File {
        let directory = std::env::temp_dir();
        let flags = libc::O_TMPFILE;
        use std::os::unix::fs::OpenOptionsExt;
        let file = File::options().read(true).write(true).custom_flags(flags).open(directory);
        let file = file.expect("a file system with O_TMPFILE");
        file.set_len(len_bytes).unwrap();
        file
    }

    #[test]
    fn what_is_written_is_read() {
        let file = unnamed(0);
        write_all_at(file.as_fd(), b"one", 0).unwrap();
        match write_all_at_durably(file.as_fd(), b"two", 3) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                eprintln!("skipped in part: RWF_DSYNC is refused here");
                write_all_at(file.as_fd(), b"two", 3).unwrap();
            }
            written => written.unwrap(),
        }
        let mut bytes = [0; 6];
        read_exact_at(file.as_fd(), &mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"onetwo");
        let mut more = [9; 10];
        assert_eq!(read_at(file.as_fd(), &mut more, 4).unwrap(), 2);
        let short = read_exact_at(file.as_fd(), &mut more, 4).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn offsets_beyond_what_a_file_can_have_are_errors() {
        let file = unnamed(10);
        for offset_bytes in [u64::MAX, u64::MAX - 2, 1 << 63] {
            assert!(write_all_at(file.as_fd(), b"abc", offset_bytes).is_err());
            assert!(write_all_at_durably(file.as_fd(), b"abc", offset_bytes).is_err());
            assert!(read_at(file.as_fd(), &mut [0; 3], offset_bytes).is_err());
            assert!(finish_write_back(file.as_fd(), offset_bytes, 1).is_err());
            assert!(allocate(file.as_fd(), offset_bytes, 1).is_err());
        }
        assert_eq!(file.metadata().unwrap().len(), 10);
    }

    #[test]
    fn a_read_only_descriptor_writes_nothing() {
        let file = unnamed(4096);
        let reading = reopen(file.as_fd(), libc::O_RDONLY).unwrap();
        let refused = write_all_at(reading.as_fd(), b"x", 0).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBADF));
        let refused = write_all_at_durably(reading.as_fd(), b"x", 0).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn ranges_are_synced() {
        let file = unnamed(1 << 20);
        write_all_at(file.as_fd(), &[7; 8192], 4096).unwrap();
        start_write_back(file.as_fd(), 4096, 8192).unwrap();
        finish_write_back(file.as_fd(), 4096, 8192).unwrap();
        if let Ok(stat) = memory::cachestat(file.as_fd(), 4096, 8192) {
            assert!(in_memory(&file) || stat.dirty == 0, "{stat:?}");
        }
        write_all_at(file.as_fd(), &[8; 4096], 0).unwrap();
        SyncableRange::new(file.as_fd(), 10, 100).unwrap().sync().unwrap();
        if let Ok(stat) = memory::cachestat(file.as_fd(), 0, 4096) {
            assert!(in_memory(&file) || stat.dirty == 0, "{stat:?}");
        }
        sync_data(file.as_fd()).unwrap();
    }

    fn in_memory(file: &File) -> bool {
        crate::file_system::magic(file.as_fd())
            .is_ok_and(|magic| crate::file_system::in_memory(magic).is_some())
    }

    #[test]
    fn allocation_lengthens_and_keeps() {
        let file = unnamed(0);
        write_all_at(file.as_fd(), b"kept", 0).unwrap();
        allocate(file.as_fd(), 0, 1 << 20).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
        let mut bytes = [1; 6];
        read_exact_at(file.as_fd(), &mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"kept\0\0");
        use std::os::unix::fs::MetadataExt;
        assert!(file.metadata().unwrap().blocks() * 512 >= 1 << 20);
    }
}
