//! A whole file in a shared mapping that grows with it, and copies to and from it.
//!
//! ```text
//! reservation   [ mapped to the file ………………… | reserved, no access ……… ]
//!                ▲ start                       ▲ len_bytes
//! ```
//! Address space is reserved for twice the file. While the file grows inside it, only the new part
//! is mapped and no address changes. When the file outgrows the reservation, all of it is mapped a
//! second time into a reservation twice as large. The earlier one stays as long as this object
//! lives, because another thread may be copying from it: all reservations together take less than
//! twice the last one.
//!
//! # Accesses
//! The bytes may change concurrently, in any process, so there are no references into the mapping,
//! only copies, and [`Bytes`], which copies. A copy from or to a page that cannot be accessed (the
//! file was truncated, memory is broken, no page is left) returns an error. So does a load in a
//! closure ([`FileMapping::guarded`]): until the closure ends, a page of zeros replaces the missing
//! one, and copies out of the mapping by other threads also return an error. All of this needs the
//! handler of [`router`](crate::router).
//!
//! The mapping is excluded from core dumps and from forked children, in which accesses return
//! errors.
//!
//! # Invariants
//! * `len_bytes` bytes from `start` are mapped. Both change only under the lock of the
//!   reservations, `start` first. So a reader that loads `len_bytes` and then `start` (in this
//!   order, Acquire) gets a start for at least that length.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use aquifer_sys::copy::FlushForm;
use aquifer_sys::fallible;
use aquifer_sys::memory::{self, Advice, Protection, SMALL_PAGE_BYTES};
use aquifer_sys::pkey::Key;

use crate::bytes::Bytes;
use crate::guard::Replaceable;

/// Bytes prefetched before the first access: beyond them the CPU detects the stream itself.
const PREFETCHED_BYTES: usize = 2048;

/// How a file is mapped.
#[derive(Debug, Clone, Copy)]
pub struct MappingOptions {
    /// Whether stores are possible.
    pub writable: bool,
    /// Whether the mapping must be of persistent memory (`MAP_SYNC`): fails with `EOPNOTSUPP` or
    /// `EINVAL` where it is not.
    pub synchronous: bool,
    /// The unit of mappings of this file: 4096, or its huge page. A power of two.
    pub unit_bytes: usize,
    /// Alignment of the first byte: a power of two, at least the unit.
    pub alignment_bytes: usize,
    /// The protection key that every access requires; without a key, every thread has access.
    pub key: Option<Key>,
}

/// A part of the mapping could not be accessed: it lies behind the mapped part, or its page cannot
/// be read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the bytes are not accessible")]
pub struct Inaccessible;

/// A shared mapping of a file from its start.
#[derive(Debug)]
pub struct FileMapping {
    options: MappingOptions,
    start: AtomicPtr<u8>,
    len_bytes: AtomicUsize,
    /// The last reservation is the current one.
    reservations: Mutex<Vec<Reservation>>,
    replaceable: Replaceable,
}

/// Address space, unmapped when dropped.
#[derive(Debug)]
struct Reservation {
    base: *mut u8,
    base_len_bytes: usize,
    /// The aligned part.
    start: *mut u8,
    len_bytes: usize,
}

// SAFETY: owns its address space.
unsafe impl Send for Reservation {}

impl Reservation {
    fn new(len_bytes: usize, alignment_bytes: usize) -> io::Result<Reservation> {
        let too_large = || io::Error::from_raw_os_error(libc::ENOMEM);
        let base_len_bytes = len_bytes.checked_add(alignment_bytes).ok_or_else(too_large)?;
        let base = memory::reserve(base_len_bytes)?;
        let start = base.wrapping_add(base.align_offset(alignment_bytes));
        Ok(Reservation { base, base_len_bytes, start, len_bytes })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: reserved by `new`. The mapping that owns this is being dropped, and no copy is in
        // progress.
        let _ = unsafe { memory::unmap(self.base, self.base_len_bytes) };
    }
}

impl FileMapping {
    /// Maps the first `len_bytes` of a file, which must exist.
    pub fn new(
        file: BorrowedFd<'_>,
        len_bytes: usize,
        options: MappingOptions,
    ) -> io::Result<FileMapping> {
        assert!(options.unit_bytes.is_power_of_two() && options.alignment_bytes.is_power_of_two());
        assert!(options.alignment_bytes >= options.unit_bytes.max(SMALL_PAGE_BYTES));
        let mapping = FileMapping {
            options,
            start: AtomicPtr::new(std::ptr::null_mut()),
            len_bytes: AtomicUsize::new(0),
            reservations: Mutex::new(Vec::new()),
            replaceable: Replaceable::outside_arena(options.unit_bytes),
        };
        mapping.extend(file, len_bytes)?;
        Ok(mapping)
    }

    /// Number of bytes mapped.
    pub fn len_bytes(&self) -> usize {
        // Acquire pairs with the release in `extend`: a later load of `start` returns one for this
        // length.
        self.len_bytes.load(Ordering::Acquire)
    }

    /// Maps the part of the same file behind the mapped part, up to `len_bytes`. Never shrinks.
    pub fn extend(&self, file: BorrowedFd<'_>, len_bytes: usize) -> io::Result<()> {
        let mut reservations = self.reservations.lock().unwrap_or_else(PoisonError::into_inner);
        // Relaxed: changed only under this lock.
        let mapped_bytes = self.len_bytes.load(Ordering::Relaxed);
        if len_bytes <= mapped_bytes {
            return Ok(());
        }
        let too_large = || io::Error::from_raw_os_error(libc::ENOMEM);
        let unit_bytes = self.options.unit_bytes;
        let end_bytes = len_bytes.checked_next_multiple_of(unit_bytes).ok_or_else(too_large)?;
        match reservations.last() {
            Some(last) if end_bytes <= last.len_bytes => {
                self.map(file, last, mapped_bytes.next_multiple_of(unit_bytes), end_bytes)?;
            }
            _ => {
                if self.options.synchronous {
                    self.ask(file)?;
                }
                let alignment_bytes = self.options.alignment_bytes;
                let larger = Reservation::new(end_bytes.saturating_mul(2), alignment_bytes)
                    // Little address space is left (`ulimit -v`): reserve no room to grow.
                    .or_else(|_| Reservation::new(end_bytes, alignment_bytes))?;
                self.map(file, &larger, 0, end_bytes)?;
                // Release pairs with the acquire in `place`.
                self.start.store(larger.start, Ordering::Release);
                reservations.push(larger);
            }
        }
        // Release pairs with the acquire in `len_bytes`: after `start`.
        self.len_bytes.store(len_bytes, Ordering::Release);
        Ok(())
    }

    /// Checks at a free address that the file can be mapped synchronously. Most files are refused,
    /// and a refusal inside a reservation would leave a hole in it, where another thread's memory
    /// may be mapped.
    fn ask(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        let len_bytes = self.options.unit_bytes;
        let answer = memory::map_file_synchronously(len_bytes, Protection::Read, file, 0)?;
        // SAFETY: mapped above; its address is in no other hands.
        unsafe { memory::unmap(answer, len_bytes) }
    }

    fn map(
        &self,
        file: BorrowedFd<'_>,
        reservation: &Reservation,
        from_bytes: usize,
        to_bytes: usize,
    ) -> io::Result<()> {
        if from_bytes >= to_bytes {
            return Ok(());
        }
        let start = reservation.start.wrapping_add(from_bytes);
        self.map_at(start, file, from_bytes as u64, to_bytes - from_bytes)
    }

    /// Maps a part of the file at a place of its reservation.
    fn map_at(
        &self,
        address: *mut u8,
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        len_bytes: usize,
    ) -> io::Result<()> {
        let wanted = if self.options.writable { Protection::ReadWrite } else { Protection::Read };
        // Map read-only first: no store may succeed before the key is set.
        let protection = if self.options.key.is_some() { Protection::Read } else { wanted };
        if self.options.synchronous {
            // SAFETY: inside the reservation, where nothing, this mapping, or its zero pages are
            // mapped.
            unsafe {
                memory::map_file_synchronously_at(
                    address,
                    len_bytes,
                    protection,
                    file,
                    offset_bytes,
                )
            }?;
        } else {
            // SAFETY: as above.
            unsafe { memory::map_file_at(address, len_bytes, protection, file, offset_bytes) }?;
        }
        if let Some(key) = self.options.key {
            // SAFETY: mapped above; no thread uses it yet.
            unsafe { key.protect(address, len_bytes, wanted) }?;
        }
        for advice in [Advice::DontFork, Advice::DontDump] {
            // Best effort: the mappings of some drivers refuse this advice.
            // SAFETY: mapped above; the contents stay.
            let _ = unsafe { memory::advise(address, len_bytes, advice) };
        }
        Ok(())
    }

    /// Returns the address of a range, if all of it is mapped.
    fn place(&self, offset_bytes: u64, len_bytes: usize) -> Result<*mut u8, Inaccessible> {
        let offset_bytes = usize::try_from(offset_bytes).map_err(|_| Inaccessible)?;
        let end_bytes = offset_bytes.checked_add(len_bytes).ok_or(Inaccessible)?;
        if end_bytes > self.len_bytes() {
            return Err(Inaccessible);
        }
        // Acquire pairs with the release in `extend`.
        Ok(self.start.load(Ordering::Acquire).wrapping_add(offset_bytes))
    }

    /// Copies out of the mapping. Bytes that change concurrently may be torn.
    pub fn read(&self, offset_bytes: u64, target: &mut [u8]) -> Result<(), Inaccessible> {
        let source = self.place(offset_bytes, target.len())?;
        // SAFETY: `place` checked the range.
        let copied = unsafe { self.replaceable.try_copy(source, target) };
        copied.then_some(()).ok_or(Inaccessible)
    }

    /// The bytes of a range, if all of it is mapped. Reading a byte that cannot be accessed raises
    /// SIGBUS.
    #[inline]
    pub fn bytes(&self, offset_bytes: u64, len_bytes: usize) -> Result<Bytes<'_>, Inaccessible> {
        let start = self.place(offset_bytes, len_bytes)?;
        // SAFETY: `place` checked the range, and mapped bytes stay mapped as long as `self`.
        Ok(unsafe { Bytes::new(start, len_bytes) })
    }

    /// Prefetches the beginning of a range into the CPU's caches. Any range is allowed.
    #[inline]
    pub fn prefetch(&self, offset_bytes: u64, len_bytes: usize) {
        if let Ok(start) = self.place(offset_bytes, len_bytes) {
            memory::prefetch(start, len_bytes.min(PREFETCHED_BYTES));
        }
    }

    /// Has the kernel use huge pages for a file in memory where whole ones fit into a range,
    /// whatever its file system is configured for. Returns whether it did. Takes about as long as
    /// copying the range; the contents do not change.
    pub fn use_huge_pages(&self, offset_bytes: u64, len_bytes: usize) -> bool {
        let Ok(start) = self.place(offset_bytes, len_bytes) else { return false };
        // SAFETY: inside the mapping; the contents stay what they are.
        unsafe { memory::advise(start, len_bytes, Advice::Collapse) }.is_ok()
    }

    /// Prepares a range for stores if all of it is in the page cache: page-table entries are made,
    /// and pages count as changed. Returns whether it did. The contents do not change. False where
    /// a store that fails would end the process, and where pages are larger than 4 KiB: then the
    /// kernel fills in fewer bytes than are checked here.
    pub fn prepare_stores(&self, offset_bytes: u64, len_bytes: usize) -> bool {
        let Ok(start) = self.writable_place(offset_bytes, len_bytes) else { return false };
        let mut resident = vec![0; len_bytes.div_ceil(SMALL_PAGE_BYTES)];
        fallible::SUPPORTED
            && memory::residency(start, len_bytes, &mut resident).is_ok()
            && resident.iter().all(|page| page & 1 == 1)
            // SAFETY: inside the mapping; the contents stay what they are.
            && unsafe { memory::advise(start, len_bytes, Advice::PopulateWrite) }.is_ok()
    }

    /// Passes a range to a closure. If the closure reads a byte that cannot be accessed, returns an
    /// error and drops the closure's result. `file` is the mapped file.
    pub fn guarded<T>(
        &self,
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        len_bytes: usize,
        access: impl FnOnce(Bytes<'_>) -> T,
    ) -> Result<T, Inaccessible> {
        let bytes = self.bytes(offset_bytes, len_bytes)?;
        let start = bytes.as_ptr().addr();
        let map_again = |replaced: Range<usize>| {
            // Offsets count from the reservation that contains `bytes`, which may not be the last
            // one.
            let to_offset = |address: usize| offset_bytes + address as u64 - start as u64;
            let address = bytes.as_ptr().wrapping_add(replaced.start).wrapping_sub(start);
            self.map_at(address.cast_mut(), file, to_offset(replaced.start), replaced.len()).is_ok()
        };
        let addresses = start..start + len_bytes;
        self.replaceable.guarded(addresses, map_again, || access(bytes)).map_err(|_| Inaccessible)
    }

    /// Copies into the mapping by ordinary stores. Aligned words of eight bytes are not torn.
    ///
    /// # Safety
    /// No reference that forbids changes exists to bytes of the range, whether made from
    /// [`FileMapping::bytes`] or from another mapping of the file.
    pub unsafe fn write(&self, offset_bytes: u64, source: &[u8]) -> Result<(), Inaccessible> {
        let target = self.writable_place(offset_bytes, source.len())?;
        // SAFETY: as in `read`.
        let copied = unsafe { fallible::try_store(source.as_ptr(), target, source.len()) };
        copied.then_some(()).ok_or(Inaccessible)
    }

    /// Copies into the mapping past the caches; on persistent memory the bytes are durable on
    /// return. `flush` is available on this CPU.
    ///
    /// # Safety
    /// As for [`FileMapping::write`].
    pub unsafe fn persist(
        &self,
        offset_bytes: u64,
        source: &[u8],
        flush: FlushForm,
    ) -> Result<(), Inaccessible> {
        assert!(flush.is_available());
        let target = self.writable_place(offset_bytes, source.len())?;
        // SAFETY: as in `read`, and the form is available.
        let copied = unsafe { fallible::try_persist(source.as_ptr(), target, source.len(), flush) };
        copied.then_some(()).ok_or(Inaccessible)
    }

    /// Writes back the cache lines of a range. On persistent memory they are durable after a
    /// following [`store_fence`](aquifer_sys::copy::store_fence). `flush` is available on this CPU.
    pub fn flush(
        &self,
        offset_bytes: u64,
        len_bytes: usize,
        flush: FlushForm,
    ) -> Result<(), Inaccessible> {
        assert!(flush.is_available());
        let start = self.place(offset_bytes, len_bytes)?;
        // SAFETY: `place` checked the range, and the form is available.
        let flushed = unsafe { fallible::try_flush(start, len_bytes, flush) };
        flushed.then_some(()).ok_or(Inaccessible)
    }

    fn writable_place(&self, offset_bytes: u64, len_bytes: usize) -> Result<*mut u8, Inaccessible> {
        if self.options.writable { self.place(offset_bytes, len_bytes) } else { Err(Inaccessible) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsFd, FromRawFd};

    const PLAIN: MappingOptions = MappingOptions {
        writable: true,
        synchronous: false,
        unit_bytes: SMALL_PAGE_BYTES,
        alignment_bytes: 2 << 20,
        key: None,
    };

    fn file_of(len_bytes: u64) -> File {
        crate::router::install().unwrap();
        // SAFETY: a NUL-terminated name.
        let fd = unsafe { libc::memfd_create(c"mapping".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: a new descriptor, owned by nothing else.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(len_bytes).unwrap();
        file
    }

    /// Stores through the mapping.
    fn write(mapping: &FileMapping, offset_bytes: u64, source: &[u8]) -> Result<(), Inaccessible> {
        // SAFETY: these tests make no references to mapped bytes.
        unsafe { mapping.write(offset_bytes, source) }
    }

    /// Most files are not persistent memory, and the check must not unmap other threads' memory.
    #[test]
    fn a_refused_mapping_leaves_existing_mappings() {
        const LEN_BYTES: usize = 4 << 20;
        let file = tempfile::tempfile().unwrap();
        file.set_len(LEN_BYTES as u64).unwrap();
        let options = MappingOptions { synchronous: true, ..PLAIN };
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                let refuses = |_| FileMapping::new(file.as_fd(), LEN_BYTES, options).is_err();
                (0..5000).all(refuses)
            });
            while !asking.is_finished() {
                let memory = memory::map_anonymous(LEN_BYTES).unwrap();
                for page in (0..LEN_BYTES).step_by(64 * SMALL_PAGE_BYTES) {
                    // SAFETY: inside the memory just mapped; a hole in it ends the test with a
                    // signal.
                    unsafe { memory.add(page).write_volatile(7) };
                }
                // SAFETY: as above.
                unsafe { memory::unmap(memory, LEN_BYTES) }.unwrap();
            }
            if !asking.join().unwrap() {
                eprintln!("skipped: this is persistent memory");
            }
        });
    }

    #[test]
    fn copies_reach_the_file() {
        let file = file_of(10_000);
        let mapping = FileMapping::new(file.as_fd(), 10_000, PLAIN).unwrap();
        write(&mapping, 9_990, b"0123456789").unwrap();
        let mut bytes = [0; 4];
        aquifer_sys::io::read_exact_at(file.as_fd(), &mut bytes, 9_996).unwrap();
        assert_eq!(&bytes, b"6789");
        mapping.read(9_990, &mut bytes).unwrap();
        assert_eq!(&bytes, b"0123");
        if let Some(flush) = FlushForm::best() {
            // SAFETY: no reference to the mapped bytes exists.
            unsafe { mapping.persist(4_090, &[7; 200], flush) }.unwrap();
            mapping.flush(0, 10_000, flush).unwrap();
            aquifer_sys::io::read_exact_at(file.as_fd(), &mut bytes, 4_286).unwrap();
            assert_eq!(bytes, [7; 4]);
        }
    }

    #[test]
    fn what_is_not_mapped_is_not_accessed() {
        let file = file_of(10_000);
        let mapping = FileMapping::new(file.as_fd(), 10_000, PLAIN).unwrap();
        for offset_bytes in [9_999, 10_000, 1 << 40, u64::MAX] {
            assert_eq!(mapping.read(offset_bytes, &mut [0; 2]), Err(Inaccessible));
            assert_eq!(write(&mapping, offset_bytes, &[0; 2]), Err(Inaccessible));
        }
        let reading = MappingOptions { writable: false, ..PLAIN };
        let mapping = FileMapping::new(file.as_fd(), 10_000, reading).unwrap();
        assert_eq!(write(&mapping, 0, &[1]), Err(Inaccessible));
        assert_eq!(mapping.read(9_999, &mut [1]), Ok(()));
    }

    /// Wherever the first byte that cannot be stored is: in the bytes before the first whole word, in a
    /// word, in a line, or behind them.
    #[test]
    fn stores_beyond_a_cut_fail() {
        let file = file_of(8192);
        let mapping = FileMapping::new(file.as_fd(), 8192, PLAIN).unwrap();
        file.set_len(4096).unwrap();
        for (before, len) in (0..90).flat_map(|before| (1..180).map(move |len| (before, len))) {
            let stored = write(&mapping, 4096 - before, &vec![7; len]);
            let fits = len as u64 <= before;
            assert_eq!(stored, if fits { Ok(()) } else { Err(Inaccessible) }, "{before} {len}");
        }
    }

    #[test]
    fn it_grows_in_place_and_beyond_its_reservation() {
        let file = file_of(5_000);
        let mapping = FileMapping::new(file.as_fd(), 5_000, PLAIN).unwrap();
        let start = mapping.start.load(Ordering::Relaxed);
        assert_eq!(start as usize % PLAIN.alignment_bytes, 0);
        write(&mapping, 4_999, &[1]).unwrap();
        for (len_bytes, moves) in [(5_001, false), (16_384, false), (16_385, true), (1 << 20, true)]
        {
            let before = mapping.start.load(Ordering::Relaxed);
            file.set_len(len_bytes as u64).unwrap();
            mapping.extend(file.as_fd(), len_bytes).unwrap();
            assert_eq!(mapping.len_bytes(), len_bytes);
            assert_eq!(mapping.start.load(Ordering::Relaxed) != before, moves, "{len_bytes}");
            write(&mapping, len_bytes as u64 - 1, &[2]).unwrap();
            let mut byte = [0];
            mapping.read(4_999, &mut byte).unwrap();
            assert_eq!(byte, [1]);
            // SAFETY: the first mapping is kept.
            assert_eq!(unsafe { start.add(4_999).read_volatile() }, 1);
        }
        mapping.extend(file.as_fd(), 1).unwrap();
        assert_eq!(mapping.len_bytes(), 1 << 20, "never shrinks");
    }

    #[test]
    fn memory_of_no_persistence_is_refused_as_such() {
        let file = file_of(4096);
        let synchronous = MappingOptions { synchronous: true, ..PLAIN };
        let error = FileMapping::new(file.as_fd(), 4096, synchronous).unwrap_err();
        assert!(matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)), "{error}");
    }
}
