//! The kernel backend: a shared file mapping whose residency is kept under the budget.
//!
//! The kernel serves faults from its page cache: the fastest bare miss there is, without signals,
//! and system calls work on the memory. This module adds residency bounded by the drop manager
//! (`drop_manager`), read-ahead only where it pays off (`pattern`), batches at queue depth, pins,
//! and errors instead of signals.
//!
//! # Errors
//! * `get`, `read_exact_at`, `touch` and `touch_many` use load instructions that can fail
//!   (`aquifer_sys::fallible`), and get the reason from `pread`.
//! * `pin` makes the kernel populate the range, which reports failure.
//! * The closure of `read` runs under a guard ([`aquifer_vm::guard`]), after its pages were loaded.
//! * A bare load of a page that cannot be read raises SIGBUS, as with mmap, and is recorded; or, if the mapping was made so,
//!   finds zeros ([`aquifer_vm::Missed`]).
//!
//! After the end of a truncated file, but within its last page, bytes read as zero, as with mmap. A
//! thread that blocks SIGBUS gets no errors: the kernel kills it.
//!
//! # Invariants
//! * The pin table is never locked while mapped memory is touched.

mod drop_manager;
mod pattern;
mod pins;

pub(crate) use drop_manager::DropManager;

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use aquifer_device::Device;
use aquifer_sys::fallible;
use aquifer_sys::futex::Mutex;
use aquifer_sys::memory::{self, Protection, REGION_BYTES, SMALL_PAGE_BYTES};
use aquifer_sys::residency::{self, Backing, FileIdentity};
use aquifer_sys::signal::FaultContext;
use aquifer_vm::drop_behind::{Hands, REGION_PAGES};
use aquifer_vm::guard::{Replaceable, Trouble};
use aquifer_vm::{Arena, Bytes, FaultOwner, Missed, Reservation, Served};

use self::pattern::Detector;
use self::pins::Pins;
use crate::engine::{BareCause, BareFault, Engine};
use crate::error::{CacheError, Result, TRUNCATED};
use crate::geometry::Geometry;
use crate::ids::{PageId, StoreId};
use crate::lazy::LazyArray;
use crate::map_options::Advice;

const PAGE: u64 = SMALL_PAGE_BYTES as u64;
/// Ranges that `touch_many` reads ahead with one call, before it waits for the previous batch.
const BATCH_RANGES: usize = 64;
/// `touch_many` divides longer ranges.
const PIECE_BYTES: u64 = 1 << 20;
/// Requests for at least this part of a region keep it from being dropped once: before the
/// application comes to read a large prefetch, the drop manager may.
const SPARED_PAGES: u32 = REGION_PAGES as u32 / 8;
/// A prefetch is scattered if it has at least this many ranges of at most so many bytes each.
const SCATTERED_RANGES: usize = 8;
const SCATTERED_BYTES: u64 = 64 << 10;
const UNREADABLE: &str = "the system could not read it from the device";
const UNSETTLED: &str =
    "the file could not be read elsewhere in the mapping at the same time; read again";

/// How the kernel reads ahead for a mapping.
struct Pattern {
    advice: memory::Advice,
    /// Present while the access pattern is being detected.
    detector: Option<Detector>,
}

/// A file mapped by the kernel. See the module documentation.
pub(crate) struct KernelFile {
    /// First, so that the range is unmapped before the other fields are dropped.
    reservation: Reservation,
    pub id: StoreId,
    engine: Arc<Engine>,
    pub device: Arc<dyn Device>,
    /// In the system's pages, regardless of the cache's page size.
    pub geometry: Geometry,
    pub identity: FileIdentity,
    pub backing: Backing,
    /// Whether the kernel tells which pages are in the page cache.
    pub residency_is_revealed: bool,
    replaceable: Replaceable,
    missed: Missed,
    pattern: Mutex<Pattern>,
    pins: Mutex<Pins>,
    /// Where the drop manager is.
    pub hands: Hands,
    /// Pages of each region for which read-ahead was requested since the region was unmapped.
    asked: LazyArray<AtomicU32>,
    /// Scattered pages were prefetched.
    is_scattered: AtomicBool,
}

impl KernelFile {
    /// Maps the file behind a device. The inner `Err` is the reason why it cannot be mapped.
    pub fn map(
        engine: Arc<Engine>,
        device: Arc<dyn Device>,
        len_bytes: u64,
    ) -> Result<std::result::Result<Arc<KernelFile>, String>> {
        let Some(file) = device.page_cache_file() else {
            return Ok(Err("it has no page cache that could be mapped".to_owned()));
        };
        let inspected = residency::backing(file)
            .and_then(|backing| Ok((backing, residency::file_identity(file)?)));
        let (backing, identity) = match inspected {
            Ok((Backing::HugePages, _)) => {
                return Ok(Err("its pages are huge; use a DAX device".to_owned()));
            }
            Ok(found) => found,
            Err(error) => return Ok(Err(format!("its file system cannot be told: {error}"))),
        };
        let residency_is_revealed = residency::is_revealed(file);
        let geometry = Geometry::new(len_bytes, SMALL_PAGE_BYTES);
        let mapped_bytes = geometry.pages() as usize * SMALL_PAGE_BYTES;
        let reservation = Arena::global()?.allocate(mapped_bytes)?;
        if let Err(error) = reservation.map_file(mapped_bytes, Protection::Read, file) {
            return Ok(Err(error.to_string()));
        }
        let regions = len_bytes.div_ceil(REGION_BYTES as u64) as usize;
        let asked = LazyArray::new(regions).map_err(|source| CacheError::Kernel {
            what: "reserving memory for the regions of a file",
            source,
        })?;
        let mut mapped = Arc::new(KernelFile {
            reservation,
            id: engine.reserve_id(),
            engine,
            device,
            geometry,
            identity,
            backing,
            residency_is_revealed,
            replaceable: Replaceable::new(),
            missed: Missed::new(),
            pattern: Mutex::new(Pattern {
                advice: memory::Advice::Normal,
                detector: Some(Detector::new()),
            }),
            pins: Mutex::new(Pins::default()),
            hands: Hands::default(),
            asked,
            is_scattered: AtomicBool::new(false),
        });
        let owner: *const KernelFile = Arc::as_ptr(&mapped);
        let reservation = &mut Arc::get_mut(&mut mapped).expect("not shared yet").reservation;
        // SAFETY: the reservation is dropped with the file it names as its owner.
        unsafe { reservation.set_owner(owner) }?;
        Ok(Ok(mapped))
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    pub fn file(&self) -> BorrowedFd<'_> {
        self.device.page_cache_file().expect("was there when the file was mapped")
    }

    #[inline]
    pub fn address(&self, offset_bytes: u64) -> *mut u8 {
        self.reservation.address().wrapping_add(offset_bytes as usize)
    }

    /// A byte range rounded out to whole pages.
    fn whole_pages(range: &Range<u64>) -> Range<u64> {
        let start = range.start / PAGE * PAGE;
        if range.is_empty() { start..start } else { start..range.end.next_multiple_of(PAGE) }
    }

    fn len_of(range: &Range<u64>) -> usize {
        (range.end - range.start) as usize
    }

    // ---- errors ---------------------------------------------------------------------------------

    fn failed_at(&self, offset_bytes: u64, reason: &'static str) -> CacheError {
        CacheError::MappedAccess {
            device: self.device.name().to_owned(),
            offset_bytes: offset_bytes / PAGE * PAGE,
            reason,
        }
    }

    /// Reads the bytes of a load that failed, or finds the reason of the failure.
    #[cold]
    fn read_instead(&self, offset_bytes: u64, target: &mut [u8]) -> Result<()> {
        match residency::read_at(self.file(), target, offset_bytes) {
            Ok(got) if got == target.len() => Ok(()),
            Ok(got) => Err(self.failed_at(offset_bytes + got as u64, TRUNCATED)),
            Err(_) => {
                // Find the bad page: try one at a time. Readable pages are cached now.
                let bad = (0..target.len())
                    .step_by(SMALL_PAGE_BYTES)
                    .map(|at| offset_bytes + at as u64)
                    .find(|&at| residency::read_at(self.file(), &mut [0], at).is_err());
                Err(self.failed_at(bad.unwrap_or(offset_bytes), UNREADABLE))
            }
        }
    }

    /// Finds the error that made populating a range fail. `Ok` if the range can be read after all.
    #[cold]
    fn find_error(&self, range: &Range<u64>) -> Result<()> {
        let mut buffer = vec![0; 64 << 10];
        let mut at = range.start;
        while at < range.end {
            let len = (buffer.len() as u64).min(range.end - at) as usize;
            self.read_instead(at, &mut buffer[..len])?;
            at += len as u64;
        }
        Ok(())
    }

    /// The last bare load that failed, as an error.
    pub fn bare_fault_error(&self, fault: BareFault) -> CacheError {
        let unreadable = matches!(fault.cause, BareCause::System(_));
        let reason = if unreadable { UNREADABLE } else { TRUNCATED };
        self.failed_at(fault.page.0 * PAGE, reason)
    }

    /// From now on, bare loads of missing pages find zeros.
    pub fn answer_faults(&self) {
        self.missed.answer();
    }

    /// Replaces the file by zeros, at once and at the same addresses.
    pub fn retire(&self) -> Result<()> {
        // Whole pages are mapped.
        let len_bytes = self.geometry.pages() as usize * SMALL_PAGE_BYTES;
        Ok(self.reservation.map_anonymous(len_bytes, Protection::ReadWrite)?)
    }

    /// The first bare load since the last call that found zeros, as an error; maps the file again.
    pub fn take_missed(&self) -> Option<CacheError> {
        let offset_bytes = self.missed.take()?;
        self.replaceable.settle(|again| self.map_again(again));
        let found = self.read_instead(offset_bytes, &mut [0]);
        Some(found.err().unwrap_or_else(|| self.failed_at(offset_bytes, UNSETTLED)))
    }

    // ---- loads ----------------------------------------------------------------------------------

    /// Copies a range of the mapping; the caller has checked that it lies inside.
    ///
    /// # Safety
    /// `target` must be writable for `len` bytes.
    #[inline]
    pub unsafe fn copy_to(&self, offset_bytes: u64, target: *mut u8, len: usize) -> Result<()> {
        let source = self.address(offset_bytes);
        if fallible::SUPPORTED {
            // If no page is replaced by zeros during the copy, all bytes come from the file.
            let (copied, is_settled) = self.replaceable.is_settled_during(|| {
                // SAFETY: mapped; the target is the caller's.
                unsafe { fallible::try_copy(source, target, len) }
            });
            if copied && is_settled {
                return Ok(());
            }
            // SAFETY: guaranteed by the caller.
            let target = unsafe { std::slice::from_raw_parts_mut(target, len) };
            return self.read_instead(offset_bytes, target);
        }
        let range = offset_bytes..offset_bytes + len as u64;
        // SAFETY: mapped, and a fault is caught by the guard; the target is the caller's.
        self.guarded(&range, || unsafe { memory::copy_racy(source, target, len) })
    }

    /// Loads the page at an offset.
    #[inline]
    pub fn touch(&self, offset_bytes: u64) -> Result<()> {
        if fallible::SUPPORTED {
            // SAFETY: the caller has checked that the offset lies inside the mapping.
            if unsafe { fallible::try_touch(self.address(offset_bytes)) } {
                return Ok(());
            }
            return self.read_instead(offset_bytes, &mut [0]);
        }
        let address = self.address(offset_bytes);
        self.guarded(&(offset_bytes..offset_bytes + 1), || {
            // SAFETY: mapped, and a fault is caught by the guard.
            unsafe { address.read_volatile() };
        })
    }

    /// Calls a closure on a range's bytes.
    pub fn read<T>(&self, range: &Range<u64>, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        let pages = Self::whole_pages(range);
        self.check_fits(&pages)?;
        if Self::len_of(&pages) > SMALL_PAGE_BYTES {
            self.will_need(std::slice::from_ref(range));
        }
        for offset in pages.clone().step_by(SMALL_PAGE_BYTES) {
            self.touch(offset)?;
        }
        // SAFETY: mapped while `self` is borrowed; a page that cannot be read is replaced by the
        // guard.
        let bytes = unsafe { Bytes::new(self.address(range.start), Self::len_of(range)) };
        self.guarded(range, || look(bytes))
    }

    /// Runs `access`; a fault in `range` becomes an error.
    fn guarded<T>(&self, range: &Range<u64>, access: impl FnOnce() -> T) -> Result<T> {
        let addresses = self.address(range.start) as usize..self.address(range.end) as usize;
        self.replaceable.guarded(addresses, |again| self.map_again(again), access).map_err(
            |trouble| match trouble {
                Trouble::Failed { address, truncated } => {
                    let offset = (address - self.address(0) as usize) as u64;
                    self.failed_at(offset, if truncated { TRUNCATED } else { UNREADABLE })
                }
                Trouble::Unsettled => self.failed_at(range.start, UNSETTLED),
            },
        )
    }

    /// Maps the file again over replacement zero pages.
    fn map_again(&self, addresses: Range<usize>) -> bool {
        let start = addresses.start as *mut u8;
        let len = addresses.end - addresses.start;
        let offset = (addresses.start - self.address(0) as usize) as u64;
        let pattern = self.pattern.lock();
        // SAFETY: the range lies in this file's own mapping, which is read-only and never borrowed
        // as references.
        let mapped =
            unsafe { memory::map_file_at(start, len, Protection::Read, self.file(), offset) };
        if mapped.is_err() {
            return false;
        }
        // Same attributes as its neighbours, so that the kernel merges them. Each is only advice.
        for advice in [memory::Advice::DontFork, memory::Advice::DontDump, pattern.advice] {
            // SAFETY: our own mapping.
            let _ = unsafe { memory::advise(start, len, advice) };
        }
        true
    }

    // ---- residency ------------------------------------------------------------------------------

    /// Fails for a range that the budget cannot hold.
    fn check_fits(&self, pages: &Range<u64>) -> Result<()> {
        if pages.end - pages.start > self.engine.kernel_share_bytes() {
            return Err(CacheError::Exhausted {
                pinned: self.pins.lock().bytes() / PAGE,
                unwritable: 0,
            });
        }
        Ok(())
    }

    /// Makes a range resident and excludes it from the drop manager.
    pub fn pin(&self, range: &Range<u64>) -> Result<u64> {
        let pages = Self::whole_pages(range);
        self.check_fits(&pages)?;
        let bytes = pages.end - pages.start;
        let id = {
            let mut pins = self.pins.lock();
            if pins.bytes() + bytes > self.engine.kernel_share_bytes() {
                return Err(CacheError::Exhausted { pinned: pins.bytes() / PAGE, unwritable: 0 });
            }
            pins.insert(pages.clone())
        };
        // Pin first, then populate: pages that the manager dropped before are loaded again here.
        let populated = self.populate(&pages, range);
        if populated.is_err() {
            self.unpin(id);
        }
        populated.map(|()| id)
    }

    pub fn unpin(&self, id: u64) {
        // In a child of a fork the lock may be held forever by a thread that does not exist there.
        if !self.engine.mark.is_current() {
            return;
        }
        self.pins.lock().remove(id);
    }

    fn populate(&self, pages: &Range<u64>, range: &Range<u64>) -> Result<()> {
        if pages.is_empty() {
            return Ok(());
        }
        if Self::len_of(pages) > SMALL_PAGE_BYTES {
            self.will_need(std::slice::from_ref(range));
        }
        let mut attempts = 0;
        loop {
            // SAFETY: our own mapping, which this only reads.
            let populated = unsafe {
                memory::advise(
                    self.address(pages.start),
                    Self::len_of(pages),
                    memory::Advice::PopulateRead,
                )
            };
            let Err(source) = populated else {
                // Populating also succeeds on a zero page that another thread's failing `read`
                // installed.
                return if self.replaceable.is_settled() { Ok(()) } else { self.find_error(range) };
            };
            self.find_error(range)?;
            attempts += 1;
            if attempts == 3 {
                return Err(CacheError::Kernel { what: "populating a pinned range", source });
            }
        }
    }

    /// Notes what is about to be read ahead.
    fn note_asked(&self, pages: &Range<u64>) {
        let region_bytes = REGION_BYTES as u64;
        let mut at = pages.start;
        while at < pages.end {
            let end = ((at / region_bytes + 1) * region_bytes).min(pages.end);
            // Relaxed: a hint.
            self.asked[(at / region_bytes) as usize]
                .fetch_add(((end - at) / PAGE) as u32, Ordering::Relaxed);
            at = end;
        }
    }

    /// Whether much of a region was asked for since this was called last.
    pub fn take_asked(&self, region: &Range<u64>) -> bool {
        let asked = &self.asked[(region.start / REGION_BYTES as u64) as usize];
        asked.load(Ordering::Relaxed) > 0 && asked.swap(0, Ordering::Relaxed) >= SPARED_PAGES
    }

    /// Ends read-around at the first prefetch of scattered pages: the application says what it
    /// needs, and their neighbours are not it.
    fn note_scattered(&self, ranges: &[Range<u64>]) {
        if ranges.len() < SCATTERED_RANGES || self.is_scattered.load(Ordering::Relaxed) {
            return;
        }
        let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let is_dense = ranges.windows(2).all(|pair| pair[0].end >= pair[1].start / PAGE * PAGE);
        if total > ranges.len() as u64 * SCATTERED_BYTES || is_dense {
            return;
        }
        self.is_scattered.store(true, Ordering::Relaxed);
        let mut pattern = self.pattern.lock();
        if let Some(detector) = &mut pattern.detector {
            detector.expect_random();
            pattern.advice = memory::Advice::Random;
            self.apply(&pattern);
        }
    }

    /// Requests read-ahead of ranges, without waiting. If the budget cannot hold them, of half of it: the other pages there are
    /// of more use than pages that later ones push out.
    pub fn will_need(&self, ranges: &[Range<u64>]) {
        self.note_scattered(ranges);
        let share_bytes = self.engine.kernel_share_bytes();
        let named_bytes = ranges.iter().map(Self::whole_pages).map(|pages| pages.end - pages.start);
        let fits = named_bytes.fold(0, u64::saturating_add) <= share_bytes;
        let mut most_bytes = if fits { share_bytes } else { share_bytes / 2 };
        let mut vector =
            [memory::Range { address: std::ptr::null_mut(), len_bytes: 0 }; BATCH_RANGES];
        for batch in ranges.chunks(BATCH_RANGES) {
            if most_bytes < PAGE {
                break;
            }
            let mut count = 0;
            for range in batch {
                let pages = Self::whole_pages(range);
                let len = (pages.end - pages.start).min(most_bytes) / PAGE * PAGE;
                most_bytes -= len;
                if len > 0 {
                    self.note_asked(&(pages.start..pages.start + len));
                    vector[count] = memory::Range {
                        address: self.address(pages.start),
                        len_bytes: len as usize,
                    };
                    count += 1;
                }
            }
            self.engine.kernel_batches_asked.fetch_add(1, Ordering::Relaxed);
            // SAFETY: our own mapping; the advice does not change its contents.
            let advised =
                unsafe { memory::advise_many(&vector[..count], memory::Advice::WillNeed) };
            let mut advised = advised.unwrap_or(0);
            for range in &vector[..count] {
                // The ranges that the kernel left out, or all of them if it does not support
                // vectors.
                if advised < range.len_bytes {
                    // SAFETY: as above.
                    let _ = unsafe {
                        memory::advise(range.address, range.len_bytes, memory::Advice::WillNeed)
                    };
                }
                advised = advised.saturating_sub(range.len_bytes);
            }
        }
    }

    /// Loads ranges: requests each batch before it waits for the previous one.
    pub fn touch_many(&self, ranges: &[Range<u64>]) -> Result<()> {
        let mut pieces = ranges.iter().flat_map(|range| {
            let starts = range.clone().step_by(PIECE_BYTES as usize);
            starts.map(|start| start..range.end.min(start + PIECE_BYTES))
        });
        // Two batches are there at a time.
        let most_bytes = self.engine.kernel_share_bytes() / 4;
        let mut ask_next = || {
            let (mut batch, mut bytes) = (vec![], 0);
            while batch.len() < BATCH_RANGES && bytes < most_bytes.max(1) {
                let Some(piece) = pieces.next() else { break };
                bytes += piece.end - piece.start;
                batch.push(piece);
            }
            if !batch.is_empty() {
                self.will_need(&batch);
            }
            batch
        };
        let mut current = ask_next();
        while !current.is_empty() {
            let next = ask_next();
            for piece in &current {
                for offset in Self::whole_pages(piece).step_by(SMALL_PAGE_BYTES) {
                    self.touch(offset)?;
                }
            }
            current = next;
        }
        Ok(())
    }

    /// Whether all pages of a range are in the page cache.
    ///
    /// For files that the process neither owns nor may write, the kernel does not reveal this, and
    /// the answer is true.
    pub fn is_resident(&self, range: &Range<u64>) -> Result<bool> {
        const CHUNK: usize = 1024;
        let mut resident = [0u8; CHUNK];
        let pages = Self::whole_pages(range);
        for start in pages.clone().step_by(CHUNK * SMALL_PAGE_BYTES) {
            let len = Self::len_of(&(start..pages.end)).min(CHUNK * SMALL_PAGE_BYTES);
            memory::residency(self.address(start), len, &mut resident)
                .map_err(|source| CacheError::Kernel { what: "asking for residency", source })?;
            if !resident[..len / SMALL_PAGE_BYTES].iter().all(|page| page & 1 == 1) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Drops the pages of a range, except the pinned ones.
    pub fn discard(&self, pages: Range<u64>) {
        self.unmap(&pages);
        self.drop_unmapped(&pages);
    }

    /// Unmaps the pages of a range, except the pinned ones.
    pub fn unmap(&self, pages: &Range<u64>) {
        let pins = self.pins.lock();
        for part in pins.gaps(pages.clone()) {
            // SAFETY: a shared file mapping has the file's contents, so nothing is lost. On failure
            // the pages stay.
            let _ = unsafe {
                memory::advise(
                    self.address(part.start),
                    Self::len_of(&part),
                    memory::Advice::DontNeed,
                )
            };
        }
    }

    /// Drops the pages of a range that are not mapped from the page cache, except the pinned ones.
    pub fn drop_unmapped(&self, pages: &Range<u64>) {
        if self.backing != Backing::Storage {
            return;
        }
        let pins = self.pins.lock();
        for part in pins.gaps(pages.clone()) {
            let _ = memory::drop_cached(self.file(), part.start, part.end - part.start);
        }
    }

    pub fn advise(&self, range: &Range<u64>, advice: Advice) {
        match advice {
            Advice::Normal => self.set_pattern(memory::Advice::Normal, Some(Detector::new())),
            Advice::Sequential => self.set_pattern(memory::Advice::Sequential, None),
            Advice::Random => self.set_pattern(memory::Advice::Random, None),
            Advice::WillNeed => self.will_need(std::slice::from_ref(range)),
            Advice::DontNeed => self.discard(Self::whole_pages(range)),
            Advice::Cold => {
                let pages = Self::whole_pages(range);
                // First for the kernel's own reclaim, next for the drop manager.
                // SAFETY: our own mapping; nothing is lost.
                let _ = unsafe {
                    memory::advise(
                        self.address(pages.start),
                        Self::len_of(&pages),
                        memory::Advice::Cold,
                    )
                };
                self.hands.start_at(pages.start);
            }
        }
    }

    fn set_pattern(&self, advice: memory::Advice, detector: Option<Detector>) {
        let mut pattern = self.pattern.lock();
        *pattern = Pattern { advice, detector };
        self.apply(&pattern);
    }

    fn apply(&self, pattern: &Pattern) {
        let len = self.geometry.pages() as usize * SMALL_PAGE_BYTES;
        // SAFETY: our own mapping; this is only advice about read-ahead.
        let _ = unsafe { memory::advise(self.address(0), len, pattern.advice) };
    }

    /// Whether the access pattern is being detected.
    pub fn detects(&self) -> bool {
        self.pattern.lock().detector.is_some()
    }

    /// Reports a region that is being unmapped to the detector.
    pub fn observe(&self, cached: u64, is_scattered: bool, mapped: impl FnOnce() -> u64) {
        let mut pattern = self.pattern.lock();
        let Some(reads_ahead) =
            pattern.detector.as_mut().and_then(|d| d.observe(cached, is_scattered, mapped))
        else {
            return;
        };
        pattern.advice = if reads_ahead { memory::Advice::Normal } else { memory::Advice::Random };
        self.apply(&pattern);
    }
}

impl Drop for KernelFile {
    fn drop(&mut self) {
        if self.engine.mark.is_current() {
            self.engine.release_id(self.id);
        }
    }
}

impl FaultOwner for KernelFile {
    fn serve(&self, fault: &FaultContext) -> Served {
        // SIGSEGV here is a store to a read-only mapping. A fallible load handles its own fault.
        if fault.signal != libc::SIGBUS || fault.fallible {
            return Served::No;
        }
        let page = (fault.address - self.address(0) as usize) as u64 / PAGE;
        let truncated =
            residency::file_len_bytes(self.file()).is_ok_and(|len_bytes| page * PAGE >= len_bytes);
        // SAFETY: the guarded addresses lie in this file's own mapping, which is never borrowed as
        // references.
        if unsafe { self.replaceable.replace(fault.address, truncated) } {
            return Served::Yes;
        }
        if self.missed.is_wanted() {
            let start = self.address(page * PAGE) as usize;
            // The rest at once: a foreign program that goes on reading would use up the mappings of the process.
            let end = self.address(self.geometry.pages() * PAGE) as usize;
            let end = if truncated { end } else { start + SMALL_PAGE_BYTES };
            // SAFETY: pages of this file's own mapping, which is read-only and never borrowed as references.
            if unsafe { self.replaceable.replace_bare(start..end, Protection::Read) } {
                self.missed.note(page * PAGE);
                return Served::Yes;
            }
        }
        self.engine.record_bare_fault(BareFault {
            store: self.id,
            page: PageId(page),
            cause: if truncated {
                BareCause::ShortRead { got_bytes: 0 }
            } else {
                BareCause::System(libc::EIO)
            },
        });
        Served::No
    }
}
