//! The system calls the bench makes itself: maps, advice, direct reads, page-cache queries.
//!
//! The bench compares with programs *without* Aquifer, so it must not reach the kernel through
//! Aquifer's own wrappers. All `unsafe` code of the contenders that use stock mechanisms is in this
//! file and its submodule.

mod files;

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
#[cfg(feature = "remote")]
use std::os::unix::process::CommandExt;
use std::path::Path;
#[cfg(feature = "remote")]
use std::process::Command;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

pub use files::{
    Usage, device_written_bytes, keep_to_processors, len_at, open_at, open_directory,
    raise_file_limit,
};

/// The unit of every access in the bench. It may be smaller than the machine's page size; a
/// page-cache page then holds several of them.
pub const PAGE_BYTES: usize = 4096;

/// The most ranges one vectored call takes (`UIO_MAXIOV`).
const VECTOR_MAX: usize = 1024;

/// Converts a `-1` result into the error in `errno`.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// One memory mapping, unmapped when dropped.
#[derive(Debug)]
pub struct Map {
    base: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: a mapping belongs to the process, not to the thread that made it; the type hands out only
// raw pointers and modifies the mapping only in `drop`.
unsafe impl Send for Map {}
// SAFETY: as above; all methods but `drop` only read the two fields or pass them to the kernel.
unsafe impl Sync for Map {}

impl Map {
    /// Maps the first `len_bytes` of `file`, shared.
    pub fn file(file: &File, len_bytes: usize, writable: bool) -> io::Result<Self> {
        let write = if writable { libc::PROT_WRITE } else { 0 };
        Self::new(len_bytes, libc::PROT_READ | write, libc::MAP_SHARED, file.as_raw_fd())
    }

    /// Maps the first `len_bytes` of `file`, shared, and populates all its page-table entries.
    pub fn populated(file: &File, len_bytes: usize, writable: bool) -> io::Result<Self> {
        let write = if writable { libc::PROT_WRITE } else { 0 };
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        Self::new(len_bytes, libc::PROT_READ | write, flags, file.as_raw_fd())
    }

    /// Maps private zero-filled memory.
    pub fn anonymous(len_bytes: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Self::new(len_bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1)
    }

    fn new(len_bytes: usize, protection: i32, flags: i32, fd: i32) -> io::Result<Self> {
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, protection, flags, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>()).expect("the kernel never chooses address zero");
        Ok(Self { base, len_bytes })
    }

    /// First byte of the mapping.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length of the mapping.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// `madvise` over the whole mapping. Only for advice that never discards data.
    pub fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping, and `Advice` holds only non-destructive
        // values.
        check(unsafe { libc::madvise(self.base().cast(), self.len_bytes, advice.raw()) })?;
        Ok(())
    }

    /// Removes the page-table entries of a shared file mapping; the page cache keeps the pages.
    pub fn unmap_pages(&self) -> io::Result<()> {
        // SAFETY: for a shared file mapping MADV_DONTNEED drops page-table entries, not data; the
        // contenders call this on such mappings only.
        check(unsafe { libc::madvise(self.base().cast(), self.len_bytes, libc::MADV_DONTNEED) })?;
        Ok(())
    }

    /// Populates the range for reading through one system call.
    pub fn populate_read(&self, offset_bytes: usize, len_bytes: usize) -> io::Result<()> {
        assert!(offset_bytes + len_bytes <= self.len_bytes);
        // SAFETY: the assertion keeps the sum inside the mapping.
        let start = unsafe { self.base().add(offset_bytes) };
        // SAFETY: the range is inside this mapping; populating changes no data.
        check(unsafe { libc::madvise(start.cast(), len_bytes, libc::MADV_POPULATE_READ) })?;
        Ok(())
    }

    /// Populates the range of a writable mapping for writing through one system call.
    pub fn populate_write(&self, offset_bytes: usize, len_bytes: usize) -> io::Result<()> {
        let page_bytes = system_page_bytes() as usize;
        let from = offset_bytes / page_bytes * page_bytes;
        assert!(offset_bytes + len_bytes <= self.len_bytes);
        // SAFETY: the assertion keeps the sum inside the mapping.
        let start = unsafe { self.base().add(from) };
        let len_bytes = offset_bytes + len_bytes - from;
        // SAFETY: the range is inside this mapping; populating changes no data.
        check(unsafe { libc::madvise(start.cast(), len_bytes, libc::MADV_POPULATE_WRITE) })?;
        Ok(())
    }

    /// Bytes of the mapping; the accesses may fault.
    ///
    /// # Safety
    /// Nothing stores to the file or truncates it while the bytes are borrowed.
    pub unsafe fn bytes(&self, offset_bytes: usize, len_bytes: usize) -> &[u8] {
        assert!(offset_bytes + len_bytes <= self.len_bytes);
        // SAFETY: the assertion keeps the sum inside the mapping.
        let start = unsafe { self.base().add(offset_bytes) };
        // SAFETY: inside the mapping, for as long as the map is borrowed; the caller guarantees
        // that the bytes do not change.
        unsafe { std::slice::from_raw_parts(start, len_bytes) }
    }

    /// Copies bytes out of the mapping; the accesses may fault.
    pub fn copy_out(&self, offset_bytes: usize, target: &mut [u8]) {
        assert!(offset_bytes + target.len() <= self.len_bytes);
        // SAFETY: the assertion keeps the sum inside the mapping.
        let start = unsafe { self.base().add(offset_bytes) };
        // SAFETY: the range is inside the mapping and within the file; the target does not overlap
        // it. The bench's own processes do not store to a record while one of them reads it.
        unsafe { std::ptr::copy_nonoverlapping(start, target.as_mut_ptr(), target.len()) };
    }

    /// Copies bytes into a writable mapping; the accesses may fault.
    pub fn copy_in(&self, offset_bytes: usize, bytes: &[u8]) {
        assert!(offset_bytes + bytes.len() <= self.len_bytes);
        // SAFETY: the assertion keeps the sum inside the mapping.
        let start = unsafe { self.base().add(offset_bytes) };
        // SAFETY: the range is inside the mapping, which the caller made writable; `bytes` does not
        // overlap it, and no other process of the bench accesses that record now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len()) };
    }

    /// Starts reading the range into the page cache, `MADV_WILLNEED`.
    pub fn will_need(&self, offset_bytes: usize, len_bytes: usize) -> io::Result<()> {
        assert!(offset_bytes + len_bytes <= self.len_bytes);
        // SAFETY: the assertion keeps the sum inside the mapping.
        let start = unsafe { self.base().add(offset_bytes) };
        // SAFETY: the range is inside this mapping; reading ahead changes no data.
        check(unsafe { libc::madvise(start.cast(), len_bytes, libc::MADV_WILLNEED) })?;
        Ok(())
    }

    /// Writes back every dirty page of the mapping and waits for completion.
    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping.
        check(unsafe { libc::msync(self.base().cast(), self.len_bytes, libc::MS_SYNC) })?;
        Ok(())
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the range is exactly this mapping and nothing borrows from it: all accesses go
        // through raw pointers of contenders that own the map.
        unsafe { libc::munmap(self.base().cast(), self.len_bytes) };
    }
}

/// Advice that never discards data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Read-ahead off, `MADV_RANDOM`.
    Random,
    /// Base pages only, `MADV_NOHUGEPAGE`.
    NoHugePage,
    /// Maximum read-ahead, `MADV_SEQUENTIAL`.
    Sequential,
}

impl Advice {
    fn raw(self) -> libc::c_int {
        match self {
            Self::Random => libc::MADV_RANDOM,
            Self::NoHugePage => libc::MADV_NOHUGEPAGE,
            Self::Sequential => libc::MADV_SEQUENTIAL,
        }
    }
}

/// The number of bytes in the mappings that start in this range that are mapped by entries larger
/// than a base page.
pub fn huge_mapped_bytes(base: *const u8, len_bytes: u64) -> io::Result<u64> {
    let smaps = std::fs::read_to_string("/proc/self/smaps")?;
    Ok(huge_bytes_in(&smaps, base as u64, len_bytes))
}

/// Adds up the huge-page lines of those `/proc/self/smaps` entries that start inside the range.
fn huge_bytes_in(smaps: &str, start: u64, len_bytes: u64) -> u64 {
    let mut inside = false;
    let mut total_kib = 0;
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or("");
        if let Some((from, _)) = first.split_once('-')
            && let Ok(from) = u64::from_str_radix(from, 16)
        {
            inside = (start..start + len_bytes).contains(&from);
        } else if inside && matches!(first, "AnonHugePages:" | "ShmemPmdMapped:" | "FilePmdMapped:")
        {
            let kib = line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
            total_kib += kib.unwrap_or(0);
        }
    }
    total_kib * 1024
}

/// Vectored `MADV_WILLNEED`: advises many ranges of this process in one call.
#[derive(Debug)]
pub struct WillNeed {
    this_process: OwnedFd,
}

impl WillNeed {
    /// Opens the pidfd of this process that `process_madvise` requires.
    pub fn new() -> io::Result<Self> {
        // SAFETY: takes no pointers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
        if fd == -1 {
            return Err(io::Error::last_os_error());
        }
        let fd = i32::try_from(fd).expect("descriptors are small");
        // SAFETY: the call succeeded, so this is a fresh descriptor with no other owner.
        let this_process = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { this_process })
    }

    /// Starts reading the ranges, given as address and length. Returns when the reads are
    /// submitted.
    pub fn advise(&self, ranges: &[libc::iovec]) -> io::Result<()> {
        for mut chunk in ranges.chunks(VECTOR_MAX) {
            while !chunk.is_empty() {
                let advised_bytes = self.advise_once(chunk)?;
                // A short count means the call stopped between two ranges; continue with the rest.
                let mut left = advised_bytes;
                let done = chunk
                    .iter()
                    .take_while(|range| {
                        let whole = range.iov_len <= left;
                        left = left.saturating_sub(range.iov_len);
                        whole
                    })
                    .count();
                if done == 0 {
                    return Err(io::Error::other("process_madvise made no progress"));
                }
                chunk = &chunk[done..];
            }
        }
        Ok(())
    }

    fn advise_once(&self, ranges: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: the vector is valid for the call; WILLNEED neither reads through the addresses
        // nor changes data, and a wrong address is an error, not undefined behaviour.
        let advised = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                self.this_process.as_raw_fd(),
                ranges.as_ptr(),
                ranges.len(),
                libc::MADV_WILLNEED,
                0,
            )
        };
        usize::try_from(advised).map_err(|_| io::Error::last_os_error())
    }
}

/// Page-aligned memory for direct I/O.
#[derive(Debug)]
pub struct AlignedBuffer {
    memory: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain owned heap memory.
unsafe impl Send for AlignedBuffer {}

impl AlignedBuffer {
    /// Allocates `len_bytes` zeroed bytes, which must be a positive multiple of a page.
    pub fn new(len_bytes: usize) -> Self {
        assert!(len_bytes > 0 && len_bytes.is_multiple_of(PAGE_BYTES));
        let layout = Layout::from_size_align(len_bytes, PAGE_BYTES).expect("a valid layout");
        // SAFETY: the layout has a non-zero size.
        let memory = unsafe { alloc_zeroed(layout) };
        let Some(memory) = NonNull::new(memory) else { handle_alloc_error(layout) };
        Self { memory, layout }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: owned, initialised, and borrowed through `self`.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.layout.size()) }
    }

    /// The bytes, mutably.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: owned, initialised, and borrowed exclusively through `self`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}

/// Opens a file for I/O that bypasses the page cache. Fails with `EINVAL` if the file system does
/// not support that.
pub fn open_direct(path: &Path, writable: bool) -> io::Result<File> {
    OpenOptions::new().read(true).write(writable).custom_flags(libc::O_DIRECT).open(path)
}

/// The page cache's state of a range of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheState {
    /// Cached pages.
    pub cached_pages: u64,
    /// Cached pages that have not been written back.
    pub dirty_pages: u64,
}

/// Bytes of the file in the page cache; `None` if the kernel has no `cachestat` (before 6.5).
pub fn cached_bytes(file: &File) -> io::Result<Option<u64>> {
    // Length 0 means to the end of the file.
    Ok(cache_state(file, 0, 0)?.map(|state| state.cached_pages * system_page_bytes()))
}

/// The page cache's state of a range; `None` if the kernel has no `cachestat` (before 6.5).
pub fn cache_state(
    file: &File,
    offset_bytes: u64,
    len_bytes: u64,
) -> io::Result<Option<CacheState>> {
    /// `SYS_cachestat`: the same number on every architecture.
    const SYS_CACHESTAT: libc::c_long = 451;
    #[repr(C)]
    struct Range {
        offset_bytes: u64,
        len_bytes: u64,
    }
    #[repr(C)]
    #[derive(Default)]
    struct Stat {
        cached: u64,
        dirty: u64,
        writeback: u64,
        evicted: u64,
        recently_evicted: u64,
    }
    let range = Range { offset_bytes, len_bytes };
    let mut stat = Stat::default();
    // SAFETY: both structures have the layout the kernel expects and outlive the call.
    let result = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut stat, 0)
    };
    if result == 0 {
        return Ok(Some(CacheState { cached_pages: stat.cached, dirty_pages: stat.dirty }));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // Sandboxes return EPERM for unknown calls; some file systems return EOPNOTSUPP.
        Some(libc::ENOSYS | libc::EPERM | libc::EOPNOTSUPP) => Ok(None),
        _ => Err(error),
    }
}

/// Writes back all dirty data in the file system of `directory`, so that no later operation waits
/// for it.
pub fn sync_file_system(directory: &Path) -> io::Result<()> {
    let directory = File::open(directory)?;
    // SAFETY: takes no pointers.
    check(unsafe { libc::syncfs(directory.as_raw_fd()) })?;
    Ok(())
}

/// Size of a page-cache page.
pub fn system_page_bytes() -> u64 {
    // SAFETY: takes and returns plain integers.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).expect("every Linux has a page size")
}

/// Bytes that this process has caused to be read from storage.
pub fn storage_reads() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/io")?;
    let number = text.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok());
    number.ok_or_else(|| io::Error::other("/proc/self/io does not tell what was read"))
}

/// `posix_fadvise`.
pub fn advise_file(
    file: &File,
    offset_bytes: i64,
    len_bytes: i64,
    advice: libc::c_int,
) -> io::Result<()> {
    // SAFETY: takes no pointers.
    let error = unsafe { libc::posix_fadvise(file.as_raw_fd(), offset_bytes, len_bytes, advice) };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// How long the number of cached pages has to stay the same for [`drop_cache`] to give up.
const DROP_PATIENCE: Duration = Duration::from_millis(500);

/// Makes the file durable and drops its pages from the page cache. The kernel skips pages whose
/// read is not complete (read-ahead of a contender that has exited), so pages are dropped until
/// none are left, or those that are left stay: they are mapped, or the file is in memory.
pub fn drop_cache(file: &File) -> io::Result<()> {
    file.sync_all()?;
    let (mut last, mut since) = (None, Instant::now());
    loop {
        // Length 0 means to the end of the file.
        advise_file(file, 0, 0, libc::POSIX_FADV_DONTNEED)?;
        let cached = cached_bytes(file)?;
        if cached.is_none_or(|bytes| bytes == 0) {
            return Ok(());
        }
        if cached != last {
            (last, since) = (cached, Instant::now());
        } else if since.elapsed() > DROP_PATIENCE {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Reads the file into the page cache in requests that let the kernel build large folios.
pub fn fill_cache(file: &File, len_bytes: u64) -> io::Result<()> {
    let mut buffer = vec![0; 4 << 20];
    let mut offset_bytes = 0;
    while offset_bytes < len_bytes {
        let read = file.read_at(&mut buffer, offset_bytes)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        offset_bytes += read as u64;
    }
    Ok(())
}

/// Asks the kernel to kill this process when its parent exits, so that no contender is left behind.
pub fn die_with_parent() -> io::Result<()> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })?;
    Ok(())
}

/// Has the kernel end a process that this command starts when this one exits: gently, so that it can unmount.
#[cfg(feature = "remote")]
pub fn end_with_parent(command: &mut Command) {
    let ask = || {
        // SAFETY: takes no pointers.
        check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) })?;
        Ok(())
    };
    // SAFETY: between fork and exec, `ask` only makes a system call.
    unsafe { command.pre_exec(ask) };
}

/// Asks a process to end.
#[cfg(feature = "remote")]
pub fn terminate(process: u32) -> io::Result<()> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::kill(process as libc::pid_t, libc::SIGTERM) })?;
    Ok(())
}

/// Kills this process without closing or flushing anything, like a crash.
pub fn kill_this_process() -> ! {
    // SAFETY: takes no pointers.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    unreachable!("SIGKILL cannot be handled")
}

/// A nearly empty system call: the cost of entering and leaving the kernel.
pub fn empty_system_call() {
    // SAFETY: takes no pointers and cannot fail.
    unsafe { libc::syscall(libc::SYS_getppid) };
}

/// Reads one aligned 8-byte word that the kernel or another process may modify at any time.
///
/// # Safety
/// `base + offset_bytes` must be 8-byte aligned and in readable memory (the access may fault).
#[inline(always)]
pub unsafe fn load_word(base: *const u8, offset_bytes: usize) -> u64 {
    // SAFETY: the caller's promise.
    let word = unsafe { base.add(offset_bytes) };
    // SAFETY: the caller's promise; volatile, because the bytes may change at any time.
    unsafe { word.cast::<u64>().read_volatile() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn huge_pages_are_counted_in_the_range_only() {
        let smaps = "7f0000000000-7f0000400000 r--s 00000000 fd:00 12 /data\n\
                     Rss:                4096 kB\n\
                     AnonHugePages:         0 kB\n\
                     FilePmdMapped:      2048 kB\n\
                     7f0000400000-7f0000600000 rw-p 00000000 00:00 0\n\
                     AnonHugePages:      2048 kB\n";
        assert_eq!(huge_bytes_in(smaps, 0x7f00_0000_0000, 0x40_0000), 2 << 20);
        assert_eq!(huge_bytes_in(smaps, 0x7f00_0000_0000, 0x60_0000), 4 << 20);
        assert_eq!(huge_bytes_in(smaps, 0x7e00_0000_0000, 0x1000), 0);
    }

    #[test]
    fn page_cache_is_filled_and_dropped() {
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let len_bytes = 8 << 20;
        file.write_all(&vec![7; len_bytes]).unwrap();
        file.sync_all().unwrap();
        fill_cache(&file, len_bytes as u64).unwrap();
        let Some(full) = cached_bytes(&file).unwrap() else {
            eprintln!("skipped: this kernel has no cachestat");
            return;
        };
        assert_eq!(full, len_bytes as u64);
        drop_cache(&file).unwrap();
        let rest = cached_bytes(&file).unwrap().unwrap();
        assert!(rest < full, "{rest} of {full} bytes still cached");
    }

    #[test]
    fn pages_that_are_being_read_are_dropped_too() {
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let (len_bytes, piece_bytes) = (64 << 20, 128 << 10);
        file.write_all(&vec![7; len_bytes]).unwrap();
        if cached_bytes(&file).unwrap().is_none() {
            return eprintln!("skipped: this kernel has no cachestat");
        }
        drop_cache(&file).unwrap();
        for offset in (0..len_bytes as i64).step_by(2 * piece_bytes) {
            advise_file(&file, offset, piece_bytes as i64, libc::POSIX_FADV_WILLNEED).unwrap();
        }
        drop_cache(&file).unwrap();
        assert_eq!(cached_bytes(&file).unwrap(), Some(0));
    }

    #[test]
    fn willneed_takes_more_ranges_than_one_call() {
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let pages = 3000;
        file.write_all(&vec![1; pages * PAGE_BYTES]).unwrap();
        let map = Map::file(&file, pages * PAGE_BYTES, false).unwrap();
        let ranges: Vec<_> = (0..pages)
            .map(|page| libc::iovec {
                iov_base: map.base().wrapping_add(page * PAGE_BYTES).cast(),
                iov_len: PAGE_BYTES,
            })
            .collect();
        let will_need = match WillNeed::new() {
            Ok(will_need) => will_need,
            Err(error) => return eprintln!("skipped: pidfd_open: {error}"),
        };
        match will_need.advise(&ranges) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                eprintln!("skipped: no process_madvise");
            }
            result => result.unwrap(),
        }
    }
}
