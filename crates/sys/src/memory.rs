//! Memory mapping, advice and page residency.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use once_cell::race::OnceBox;

use crate::check;

/// Size of the hardware's small page.
pub const SMALL_PAGE_BYTES: usize = 4096;
/// Reach of one last-level page table, and size of the usual huge page.
pub const REGION_BYTES: usize = 2 << 20;
/// Size of a CPU cache line.
const CACHE_LINE_BYTES: usize = 64;

/// The accesses that a mapping allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protection {
    /// Nothing: a reservation.
    None,
    /// Loads.
    Read,
    /// Loads and stores.
    ReadWrite,
}

impl Protection {
    pub(crate) fn bits(self) -> i32 {
        match self {
            Protection::None => libc::PROT_NONE,
            Protection::Read => libc::PROT_READ,
            Protection::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

fn map_raw(
    address: *mut u8,
    len_bytes: usize,
    protection: Protection,
    flags: i32,
    file: Option<(BorrowedFd<'_>, u64)>,
) -> io::Result<*mut u8> {
    let (fd, offset) = file.map_or((-1, 0), |(fd, offset)| (fd.as_raw_fd(), offset));
    // SAFETY: the callers pass MAP_FIXED only for ranges they own (their own safety contracts).
    let result = unsafe {
        libc::mmap(address.cast(), len_bytes, protection.bits(), flags, fd, offset as libc::off_t)
    };
    if result == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(result.cast()) }
}

/// Prefetches the cache lines of a range into the CPU caches. A hint: any address is allowed, and
/// there is no other effect. Does nothing on other architectures than x86-64.
#[inline]
pub fn prefetch(start: *const u8, len_bytes: usize) {
    for offset in (0..len_bytes).step_by(CACHE_LINE_BYTES) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch never faults.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(offset).cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = start.wrapping_add(offset);
    }
}

/// Reserves address space at any address: no access, no memory, no commit charge.
pub fn reserve(len_bytes: usize) -> io::Result<*mut u8> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    map_raw(std::ptr::null_mut(), len_bytes, Protection::None, flags, None)
}

/// Maps zeroed memory at any address, not charged before it is touched.
pub fn map_anonymous(len_bytes: usize) -> io::Result<*mut u8> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    map_raw(std::ptr::null_mut(), len_bytes, Protection::ReadWrite, flags, None)
}

/// Replaces any mapping at `address` by zeroed memory, or by a reservation.
///
/// # Safety
/// The caller owns the range, and no references into it exist.
pub unsafe fn map_anonymous_at(
    address: *mut u8,
    len_bytes: usize,
    protection: Protection,
) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    map_raw(address, len_bytes, protection, flags, None).map(drop)
}

/// Maps part of a file, shared, over any mapping at `address`. On an error the range is either
/// unchanged or reserved.
///
/// # Safety
/// As for [`map_anonymous_at`].
pub unsafe fn map_file_at(
    address: *mut u8,
    len_bytes: usize,
    protection: Protection,
    file: BorrowedFd<'_>,
    offset_bytes: u64,
) -> io::Result<()> {
    map_over(address, len_bytes, protection, libc::MAP_SHARED, (file, offset_bytes))
}

/// Maps part of a file over any mapping at `address`.
///
/// The kernel unmaps the range before it calls the file system's `mmap`. If that fails, a hole is
/// left, which is reserved again here. A mapping that another thread places in the hole in between
/// would be unmapped together with the range by the range's owner. Callers that can try at another
/// address first ([`map_file`], [`map_file_synchronously`]) do so.
fn map_over(
    address: *mut u8,
    len_bytes: usize,
    protection: Protection,
    flags: libc::c_int,
    file: (BorrowedFd<'_>, u64),
) -> io::Result<()> {
    let mapped = map_raw(address, len_bytes, protection, flags | libc::MAP_FIXED, Some(file));
    mapped.map(drop).inspect_err(|_| {
        // Fails with `EEXIST` where there is no hole.
        let _ = map_private_at_free(address, len_bytes, Protection::None, None);
    })
}

/// Maps part of a file, shared, at any address, under the conditions of
/// [`map_file_synchronously_at`].
pub fn map_file_synchronously(
    len_bytes: usize,
    protection: Protection,
    file: BorrowedFd<'_>,
    offset_bytes: u64,
) -> io::Result<*mut u8> {
    let flags = libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC;
    map_raw(std::ptr::null_mut(), len_bytes, protection, flags, Some((file, offset_bytes)))
}

/// Maps part of a file, private, over any mapping at `address`. Nothing is charged before it is
/// stored to. On an error the range is either unchanged or reserved.
///
/// # Safety
/// As for [`map_anonymous_at`].
pub unsafe fn map_private_file_at(
    address: *mut u8,
    len_bytes: usize,
    protection: Protection,
    file: BorrowedFd<'_>,
    offset_bytes: u64,
) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
    map_over(address, len_bytes, protection, flags, (file, offset_bytes))
}

/// As [`map_file_at`], but only if the file is persistent memory whose metadata the kernel keeps
/// durable at every fault (`MAP_SYNC`); otherwise fails with `EOPNOTSUPP` or `EINVAL`.
///
/// # Safety
/// As for [`map_anonymous_at`].
pub unsafe fn map_file_synchronously_at(
    address: *mut u8,
    len_bytes: usize,
    protection: Protection,
    file: BorrowedFd<'_>,
    offset_bytes: u64,
) -> io::Result<()> {
    let flags = libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC;
    map_over(address, len_bytes, protection, flags, (file, offset_bytes))
}

/// Maps part of a file, shared, at any address.
pub fn map_file(
    len_bytes: usize,
    protection: Protection,
    file: BorrowedFd<'_>,
    offset_bytes: u64,
) -> io::Result<*mut u8> {
    map_raw(
        std::ptr::null_mut(),
        len_bytes,
        protection,
        libc::MAP_SHARED,
        Some((file, offset_bytes)),
    )
}

/// Maps part of a file, private, at any address: stores stay in this process. Nothing is charged
/// before it is stored to.
pub fn map_private(
    len_bytes: usize,
    protection: Protection,
    file: BorrowedFd<'_>,
    offset_bytes: u64,
) -> io::Result<*mut u8> {
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
    map_raw(std::ptr::null_mut(), len_bytes, protection, flags, Some((file, offset_bytes)))
}

/// Maps zeroed memory, or part of a file privately, at exactly `address` if nothing is mapped
/// there; otherwise fails with `EEXIST`. Nothing is charged before it is stored to.
pub fn map_private_at_free(
    address: *mut u8,
    len_bytes: usize,
    protection: Protection,
    file: Option<(BorrowedFd<'_>, u64)>,
) -> io::Result<()> {
    let kind = if file.is_some() { 0 } else { libc::MAP_ANONYMOUS };
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE | kind;
    let mapped = map_raw(address, len_bytes, protection, flags, file)?;
    if mapped == address {
        return Ok(());
    }
    // Linux before 4.17 does not know the flag and treats the address as a hint.
    // SAFETY: the mapping is new, and no other code has its address.
    unsafe { unmap(mapped, len_bytes) }?;
    Err(io::Error::from_raw_os_error(libc::EEXIST))
}

/// Makes the pages of a shared file mapping durable, with the metadata needed to reach them.
///
/// # Safety
/// The range is mapped, and starts at a page.
pub unsafe fn sync(address: *mut u8, len_bytes: usize) -> io::Result<()> {
    loop {
        // SAFETY: forwarded to the caller; no memory is changed.
        match check(unsafe { libc::msync(address.cast(), len_bytes, libc::MS_SYNC) }.into()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            synced => return synced.map(drop),
        }
    }
}

/// Changes the protection of a mapping.
///
/// # Safety
/// The caller owns the range, and no thread makes accesses that the new protection forbids.
pub unsafe fn protect(
    address: *mut u8,
    len_bytes: usize,
    protection: Protection,
) -> io::Result<()> {
    // SAFETY: forwarded to the caller.
    check(unsafe { libc::mprotect(address.cast(), len_bytes, protection.bits()) }.into()).map(drop)
}

/// Removes a mapping.
///
/// # Safety
/// The caller owns the range, and no code uses it any more.
pub unsafe fn unmap(address: *mut u8, len_bytes: usize) -> io::Result<()> {
    // SAFETY: forwarded to the caller.
    check(unsafe { libc::munmap(address.cast(), len_bytes) }.into()).map(drop)
}

/// Advice for a range, as in `madvise(2)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are madvise's own")]
#[repr(i32)]
pub enum Advice {
    Normal = libc::MADV_NORMAL,
    Random = libc::MADV_RANDOM,
    Sequential = libc::MADV_SEQUENTIAL,
    WillNeed = libc::MADV_WILLNEED,
    DontNeed = libc::MADV_DONTNEED,
    DontFork = libc::MADV_DONTFORK,
    DontDump = libc::MADV_DONTDUMP,
    HugePage = libc::MADV_HUGEPAGE,
    NoHugePage = libc::MADV_NOHUGEPAGE,
    WipeOnFork = libc::MADV_WIPEONFORK,
    Cold = libc::MADV_COLD,
    PopulateRead = libc::MADV_POPULATE_READ,
    PopulateWrite = libc::MADV_POPULATE_WRITE,
    /// Replaces small pages by huge ones with the same content, where whole ones fit (since Linux
    /// 6.1).
    Collapse = libc::MADV_COLLAPSE,
}

/// Advises the kernel about a range.
///
/// # Safety
/// With `DontNeed` the contents of anonymous memory are lost: the caller owns the range.
pub unsafe fn advise(address: *mut u8, len_bytes: usize, advice: Advice) -> io::Result<()> {
    // SAFETY: forwarded to the caller.
    check(unsafe { libc::madvise(address.cast(), len_bytes, advice as i32) }.into()).map(drop)
}

/// A range for [`advise_many`]; layout of `struct iovec`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Range {
    /// First byte.
    pub address: *mut u8,
    /// Length.
    pub len_bytes: usize,
}

const _: () = assert!(size_of::<Range>() == size_of::<libc::iovec>());

// SAFETY: a plain pair of numbers; accessing the memory at the address is the user's
// responsibility.
unsafe impl Send for Range {}

/// `PIDFD_SELF_THREAD_GROUP`, from Linux 6.14.
const PIDFD_SELF: i32 = -10002;

/// Returns a descriptor of this process for `process_madvise`. It is opened once; in a forked child
/// the parent's is useless, so the child uses `PIDFD_SELF` instead.
fn self_pidfd() -> i32 {
    static FD: OnceBox<(i32, Option<OwnedFd>)> = OnceBox::new();
    // SAFETY: getpid has no preconditions.
    let pid = unsafe { libc::getpid() };
    let (owner, file) = FD.get_or_init(|| {
        // SAFETY: pidfd_open takes two integers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as i32;
        // SAFETY: just made, so nothing else owns it.
        Box::new((pid, (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })))
    });
    match file {
        Some(file) if *owner == pid => file.as_raw_fd(),
        _ => PIDFD_SELF,
    }
}

/// Opens the descriptor that [`advise_many`] needs, so that the fault path does not have to.
pub fn prepare_advise_many() {
    self_pidfd();
}

/// Advises about many ranges in one call. `DontNeed` causes one TLB shootdown at the end since
/// Linux 6.16; before, one for each range. Returns the bytes advised, which may be less than
/// requested.
///
/// # Safety
/// As for [`advise`], for every range.
pub unsafe fn advise_many(ranges: &[Range], advice: Advice) -> io::Result<usize> {
    // SAFETY: `Range` has the layout of an iovec; the effect is the caller's responsibility.
    check(unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            self_pidfd(),
            ranges.as_ptr(),
            ranges.len(),
            advice as i32,
            0,
        )
    })
}

/// Determines for each small page of a range whether it is resident (for a file mapping: in the
/// page cache).
///
/// Sets one byte of `resident` per page, of which only bit 0 counts.
pub fn residency(address: *const u8, len_bytes: usize, resident: &mut [u8]) -> io::Result<()> {
    assert!(resident.len() >= len_bytes.div_ceil(SMALL_PAGE_BYTES), "one byte a page");
    // SAFETY: the vector is long enough, and mincore only inspects the range.
    let result =
        unsafe { libc::mincore(address.cast_mut().cast(), len_bytes, resident.as_mut_ptr()) };
    check(result.into()).map(drop)
}

/// The page cache's state of a file range, from `cachestat(2)` (Linux 6.5).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CacheStat {
    /// Pages in the page cache.
    pub cached: u64,
    /// Of those, dirty.
    pub dirty: u64,
    /// Of those, under write-back.
    pub writeback: u64,
    /// Pages evicted at some time.
    pub evicted: u64,
    /// Pages evicted recently.
    pub recently_evicted: u64,
}

const _: () = assert!(size_of::<CacheStat>() == size_of::<linux_raw_sys::general::cachestat>());

/// Returns the page cache's state of `offset_bytes..+len_bytes` (a length of 0 means to the end).
pub fn cachestat(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: u64) -> io::Result<CacheStat> {
    let range = linux_raw_sys::general::cachestat_range { off: offset_bytes, len: len_bytes };
    let mut stat = CacheStat::default();
    // SAFETY: both structures live on this stack and have the kernel's layout.
    check(unsafe {
        libc::syscall(
            i64::from(linux_raw_sys::general::__NR_cachestat),
            file.as_raw_fd(),
            std::ptr::from_ref(&range),
            std::ptr::from_mut(&mut stat),
            0,
        )
    })?;
    Ok(stat)
}

/// Extends a file to a length with all its blocks allocated.
pub fn allocate_file(file: &std::fs::File, len_bytes: u64) -> io::Result<()> {
    // SAFETY: integers only.
    let error = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len_bytes as libc::off_t) };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// Asks the page cache to drop clean pages of a file range.
pub fn drop_cached(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
    // SAFETY: integers only.
    let error = unsafe {
        libc::posix_fadvise(
            file.as_raw_fd(),
            offset_bytes as libc::off_t,
            len_bytes as libc::off_t,
            libc::POSIX_FADV_DONTNEED,
        )
    };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// Copies bytes that another thread, process or device may be changing: the copy may be torn, but
/// the compiler assumes nothing about the bytes.
///
/// On x86-64 it is a string move, except where the target lies 1 to 15 bytes ahead of the source
/// modulo 4,096: there each load has the low address bits of a store just made, and waits for it
/// (*4K aliasing*). Such bytes are copied from the end: 4 KiB in 0.3 µs instead of 1.2, where a
/// string move to any other place takes 0.04 to 0.1.
///
/// # Safety
/// `source` is readable and `target` writable for `len_bytes`; they do not overlap.
#[inline]
pub unsafe fn copy_racy(source: *const u8, target: *mut u8, len_bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if target.addr().wrapping_sub(source.addr()).wrapping_sub(1) % SMALL_PAGE_BYTES < 15 {
        // SAFETY: forwarded to the caller.
        unsafe { copy_racy_from_the_end(source, target, len_bytes) };
        return;
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller guarantees both ranges; the string move is opaque to the compiler.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len_bytes => _,
            inout("rsi") source => _,
            inout("rdi") target => _,
            options(nostack, preserves_flags),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    for index in 0..len_bytes {
        // SAFETY: inside the ranges the caller guarantees.
        unsafe { target.add(index).write_volatile(source.add(index).read_volatile()) };
    }
}

/// [`copy_racy`] in descending order.
///
/// # Safety
/// As for [`copy_racy`].
#[cfg(target_arch = "x86_64")]
#[cold]
unsafe fn copy_racy_from_the_end(source: *const u8, target: *mut u8, len_bytes: usize) {
    let mut left = len_bytes;
    while left >= 8 {
        left -= 8;
        // SAFETY: inside the ranges the caller guarantees.
        let (from, to) = unsafe { (source.add(left).cast::<Word>(), target.add(left).cast()) };
        // SAFETY: as above; a `Word` needs no alignment.
        unsafe { std::ptr::write_volatile(to, std::ptr::read_volatile(from)) };
    }
    for index in 0..left {
        // SAFETY: inside the ranges the caller guarantees.
        unsafe { target.add(index).write_volatile(source.add(index).read_volatile()) };
    }
}

/// Eight bytes at any address.
#[cfg(target_arch = "x86_64")]
#[repr(C, packed)]
struct Word(u64);

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_racy_copy_is_a_copy_wherever_it_lies() {
        let source: Vec<u8> = (0..3 * SMALL_PAGE_BYTES).map(|index| (index % 251) as u8).collect();
        let mut target = vec![0; 3 * SMALL_PAGE_BYTES];
        let apart = (source.as_ptr().addr()).wrapping_sub(target.as_ptr().addr());
        for ahead in (0..70).chain(4080..4096) {
            for len_bytes in [0, 1, 7, 8, 63, 64, 100, SMALL_PAGE_BYTES, SMALL_PAGE_BYTES + 3] {
                target.fill(255);
                let at = apart.wrapping_add(ahead) % SMALL_PAGE_BYTES;
                let place = &mut target[at..at + len_bytes];
                // SAFETY: two vectors, both long enough.
                unsafe { copy_racy(source.as_ptr(), place.as_mut_ptr(), len_bytes) };
                assert!(place == &source[..len_bytes], "{len_bytes} bytes, {ahead} ahead");
                assert!(target[..at].iter().chain(&target[at + len_bytes..]).all(|&b| b == 255));
            }
        }
    }

    #[test]
    fn a_refused_mapping_leaves_no_hole() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let place = reserve(1 << 20).unwrap();
        let offset_bytes = 0;
        // SAFETY: the place is this test's own.
        let refused = unsafe {
            map_file_synchronously_at(place, 1 << 20, Protection::Read, file.as_fd(), offset_bytes)
        };
        if refused.is_ok() {
            return eprintln!("skipped: this is persistent memory");
        }
        let taken = map_private_at_free(place, 1 << 20, Protection::None, None).unwrap_err();
        assert_eq!(taken.raw_os_error(), Some(libc::EEXIST));
        // SAFETY: as above.
        unsafe { unmap(place, 1 << 20) }.unwrap();
    }

    #[test]
    fn vectored_dontneed_drops_every_range_or_is_refused() {
        let len = 64 * SMALL_PAGE_BYTES;
        let base = map_anonymous(len).unwrap();
        for page in 0..64 {
            // SAFETY: inside the fresh mapping.
            unsafe { base.add(page * SMALL_PAGE_BYTES).write(7) };
        }
        let ranges: Vec<Range> = (0..64)
            .step_by(2)
            .map(|page| Range {
                // SAFETY: inside the mapping.
                address: unsafe { base.add(page * SMALL_PAGE_BYTES) },
                len_bytes: SMALL_PAGE_BYTES,
            })
            .collect();
        // SAFETY: the mapping is this test's own.
        match unsafe { advise_many(&ranges, Advice::DontNeed) } {
            Ok(bytes) => {
                assert_eq!(bytes, 32 * SMALL_PAGE_BYTES);
                for page in 0..64 {
                    // SAFETY: inside the mapping.
                    let byte = unsafe { base.add(page * SMALL_PAGE_BYTES).read() };
                    assert_eq!(byte, if page % 2 == 0 { 0 } else { 7 });
                }
            }
            Err(error) => eprintln!("skipped: vectored DONTNEED is refused here: {error}"),
        }
        // SAFETY: mapped above, and not used after this.
        unsafe { unmap(base, len).unwrap() };
    }
}
