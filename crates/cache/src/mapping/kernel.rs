//! The kernel backend: a shared file mapping whose residency is kept under the budget.
//!
//! Faults are served by the kernel, from its page cache: the fastest bare miss there is, no signal, no
//! trouble with system calls. What is added: residency bounded by the drop manager (`drop_manager`),
//! read-ahead where it serves (`pattern`), batches at queue depth, pins, and errors instead of signals.
//!
//! # Errors
//! * `get`, `read_into`, `touch` load with instructions that can fail (`aquifer_sys::fallible`), and ask
//!   `pread` for the reason.
//! * `pin` and `touch_many` let the kernel populate the range, which reports failure.
//! * The closure of `read` runs under a guard ([`aquifer_vm::guard`]), after its pages were brought in.
//! * A bare load of a page that cannot be read raises SIGBUS, as with mmap, and is recorded.
//!
//! Beyond the end of a truncated file, but within its last page, there are zeros, as with mmap. A thread
//! that blocks SIGBUS gets no errors: the kernel kills it.
//!
//! # Invariants
//! * The pin table is never locked while mapped memory is touched.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_device::Device;
use aquifer_sys::fallible;
use aquifer_sys::futex::Mutex;
use aquifer_sys::memory::{self, Protection, SMALL_PAGE_BYTES};
use aquifer_sys::residency::{self, Backing, FileIdentity};
use aquifer_sys::signal::FaultContext;
use aquifer_vm::guard::{Replaceable, Trouble};
use aquifer_vm::{Arena, FaultOwner, Reservation, Served};

use crate::engine::{BareCause, BareFault, Engine};
use crate::error::{Error, Result};
use crate::ids::{PageId, StoreId};
use crate::mapping::Advice;
use crate::mapping::pattern::Detector;
use crate::mapping::pins::Pins;
use crate::store::Geometry;
use aquifer_vm::Bytes;

const PAGE: u64 = SMALL_PAGE_BYTES as u64;
/// Ranges a batch of `touch_many` reads ahead with one call, before it waits for the batch before.
const BATCH_RANGES: usize = 64;
const TRUNCATED: &str = "the file ends before it; it was truncated after it was mapped";
const UNREADABLE: &str = "the system could not read it from the device";
const UNSETTLED: &str =
    "the file could not be read elsewhere in the mapping at the same time; read again";

/// How the kernel reads ahead.
struct Pattern {
    advice: memory::Advice,
    /// Present while the pattern is to be found out.
    detector: Option<Detector>,
}

/// A file mapped by the kernel. See the module documentation.
pub(crate) struct KernelFile {
    /// First, so that nothing is mapped any more when the rest is dropped.
    reservation: Reservation,
    pub id: StoreId,
    engine: Arc<Engine>,
    pub device: Arc<dyn Device>,
    /// In pages of the system, whatever the cache's are.
    pub geometry: Geometry,
    pub identity: FileIdentity,
    pub backing: Backing,
    replaceable: Replaceable,
    pattern: Mutex<Pattern>,
    pins: Mutex<Pins>,
    /// Where the drop manager goes on, in bytes.
    pub cursor: AtomicU64,
    /// Batches of pages asked for ahead of use, which no count of mapped pages shows.
    pub batches_asked: AtomicU64,
}

impl KernelFile {
    /// Maps the file behind a device. `Err` with the reason where that cannot be.
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
        let geometry = Geometry::new(len_bytes, SMALL_PAGE_BYTES);
        let mapped_bytes = geometry.pages() as usize * SMALL_PAGE_BYTES;
        let reservation = Arena::global()?.allocate(mapped_bytes)?;
        if let Err(error) = reservation.map_file(mapped_bytes, Protection::Read, file) {
            return Ok(Err(error.to_string()));
        }
        let mut mapped = Arc::new(KernelFile {
            reservation,
            id: engine.reserve_id(),
            engine,
            device,
            geometry,
            identity,
            backing,
            replaceable: Replaceable::new(),
            pattern: Mutex::new(Pattern {
                advice: memory::Advice::Normal,
                detector: Some(Detector::new()),
            }),
            pins: Mutex::new(Pins::default()),
            cursor: AtomicU64::new(0),
            batches_asked: AtomicU64::new(0),
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

    fn failed_at(&self, offset_bytes: u64, reason: &'static str) -> Error {
        Error::MappedAccess {
            device: self.device.name().to_owned(),
            offset_bytes: offset_bytes / PAGE * PAGE,
            reason,
        }
    }

    /// Reads what could not be loaded, for the bytes or for the reason.
    #[cold]
    fn read_instead(&self, offset_bytes: u64, target: &mut [u8]) -> Result<()> {
        match residency::read_at(self.file(), target, offset_bytes) {
            Ok(got) if got == target.len() => Ok(()),
            Ok(got) => Err(self.failed_at(offset_bytes + got as u64, TRUNCATED)),
            Err(_) => {
                // Which page it was: one at a time, what can be read is cached by now.
                let bad = (0..target.len())
                    .step_by(SMALL_PAGE_BYTES)
                    .map(|at| offset_bytes + at as u64)
                    .find(|&at| residency::read_at(self.file(), &mut [0], at).is_err());
                Err(self.failed_at(bad.unwrap_or(offset_bytes), UNREADABLE))
            }
        }
    }

    /// Finds the error that made populating a range fail. `Ok` if it can be read after all.
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

    /// The last bare load that failed.
    pub fn bare_fault_error(&self, fault: BareFault) -> Error {
        let unreadable = matches!(fault.cause, BareCause::System(_));
        let reason = if unreadable { UNREADABLE } else { TRUNCATED };
        self.failed_at(fault.page.0 * PAGE, reason)
    }

    // ---- loads ----------------------------------------------------------------------------------

    /// Copies a range of the mapping, which the caller has checked to lie inside.
    ///
    /// # Safety
    /// `target` is writable for `len` bytes.
    #[inline]
    pub unsafe fn copy_to(&self, offset_bytes: u64, target: *mut u8, len: usize) -> Result<()> {
        let source = self.address(offset_bytes);
        if fallible::SUPPORTED {
            // What is copied without a replacement meanwhile comes from the file.
            let (copied, is_settled) = self.replaceable.is_settled_during(|| {
                // SAFETY: mapped; the target is the caller's.
                unsafe { fallible::try_copy(source, target, len) }
            });
            if copied && is_settled {
                return Ok(());
            }
            // SAFETY: the caller's promise.
            let target = unsafe { std::slice::from_raw_parts_mut(target, len) };
            return self.read_instead(offset_bytes, target);
        }
        let range = offset_bytes..offset_bytes + len as u64;
        // SAFETY: mapped, and a fault is caught by the guard; the target is the caller's.
        self.guarded(&range, || unsafe { memory::copy_racy(source, target, len) })
    }

    /// Brings the page at an offset in.
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

    /// Shows a range to a closure.
    pub fn read<T>(&self, range: &Range<u64>, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        let pages = Self::whole_pages(range);
        self.check_fits(&pages)?;
        if Self::len_of(&pages) > SMALL_PAGE_BYTES {
            self.will_need(std::slice::from_ref(range));
        }
        for offset in pages.clone().step_by(SMALL_PAGE_BYTES) {
            self.touch(offset)?;
        }
        // SAFETY: mapped while `self` is borrowed; a page that cannot be read is replaced by the guard.
        let bytes = unsafe { Bytes::new(self.address(range.start), Self::len_of(range)) };
        self.guarded(range, || look(bytes))
    }

    /// Runs `access` with faults in `range` turned into an error.
    fn guarded<T>(&self, range: &Range<u64>, access: impl FnOnce() -> T) -> Result<T> {
        let pages = Self::whole_pages(range);
        let addresses = self.address(pages.start) as usize..self.address(pages.end) as usize;
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

    /// Maps the file again where zero pages are.
    fn map_again(&self, addresses: Range<usize>) -> bool {
        let start = addresses.start as *mut u8;
        let len = addresses.end - addresses.start;
        let offset = (addresses.start - self.address(0) as usize) as u64;
        let pattern = self.pattern.lock();
        // SAFETY: the range lies in this file's own mapping, which is read-only and never borrowed as references.
        let mapped =
            unsafe { memory::map_file_at(start, len, Protection::Read, self.file(), offset) };
        if mapped.is_err() {
            return false;
        }
        // Alike its neighbours, so that the kernel merges them. Each is only advice.
        for advice in [memory::Advice::DontFork, memory::Advice::DontDump, pattern.advice] {
            // SAFETY: our own mapping.
            let _ = unsafe { memory::advise(start, len, advice) };
        }
        true
    }

    // ---- residency ------------------------------------------------------------------------------

    /// Refuses a range that the budget cannot hold.
    fn check_fits(&self, pages: &Range<u64>) -> Result<()> {
        if pages.end - pages.start > self.engine.kernel_share_bytes() {
            return Err(Error::Exhausted {
                pinned: self.pins.lock().bytes() / PAGE,
                unwritable: 0,
            });
        }
        Ok(())
    }

    /// Makes a range resident and keeps the drop manager away from it.
    pub fn pin(&self, range: &Range<u64>) -> Result<u64> {
        let pages = Self::whole_pages(range);
        self.check_fits(&pages)?;
        let bytes = pages.end - pages.start;
        let id = {
            let mut pins = self.pins.lock();
            if pins.bytes() + bytes > self.engine.kernel_share_bytes() {
                return Err(Error::Exhausted { pinned: pins.bytes() / PAGE, unwritable: 0 });
            }
            pins.insert(pages.clone())
        };
        // In the table first, then brought in: what the manager dropped before comes back here.
        let populated = self.populate(&pages, range);
        if populated.is_err() {
            self.unpin(id);
        }
        populated.map(|()| id)
    }

    pub fn unpin(&self, id: u64) {
        // In a child of a fork another thread's lock may be held for ever.
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
                // A zero page of somebody's failing `read` populates as well.
                return if self.replaceable.is_settled() { Ok(()) } else { self.find_error(range) };
            };
            self.find_error(range)?;
            attempts += 1;
            if attempts == 3 {
                return Err(Error::Kernel { what: "populating a pinned range", source });
            }
        }
    }

    /// Asks for ranges to be read, without waiting.
    pub fn will_need(&self, ranges: &[Range<u64>]) {
        let mut most_bytes = self.engine.kernel_share_bytes();
        let mut vector =
            [memory::Range { address: std::ptr::null_mut(), len_bytes: 0 }; BATCH_RANGES];
        for batch in ranges.chunks(BATCH_RANGES) {
            let mut count = 0;
            for range in batch {
                let pages = Self::whole_pages(range);
                let len = (pages.end - pages.start).min(most_bytes) / PAGE * PAGE;
                most_bytes -= len;
                if len > 0 {
                    vector[count] = memory::Range {
                        address: self.address(pages.start),
                        len_bytes: len as usize,
                    };
                    count += 1;
                }
            }
            self.batches_asked.fetch_add(1, Ordering::Relaxed);
            // SAFETY: our own mapping; this changes nothing in it.
            let advised =
                unsafe { memory::advise_many(&vector[..count], memory::Advice::WillNeed) };
            let mut advised = advised.unwrap_or(0);
            for range in &vector[..count] {
                // What the kernel left out, or all of it where it takes no vectors.
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

    /// Brings ranges in: each batch is asked for before the one before it is waited for.
    pub fn touch_many(&self, ranges: &[Range<u64>]) -> Result<()> {
        let mut batches = ranges.chunks(BATCH_RANGES);
        let mut asked = batches.next();
        if let Some(first) = asked {
            self.will_need(first);
        }
        while let Some(current) = asked {
            asked = batches.next();
            if let Some(next) = asked {
                self.will_need(next);
            }
            for range in current {
                for offset in Self::whole_pages(range).step_by(SMALL_PAGE_BYTES) {
                    self.touch(offset)?;
                }
            }
        }
        Ok(())
    }

    /// Whether all pages of a range are in the page cache. For files that the process neither owns nor may
    /// write the kernel does not tell, and the answer is yes.
    pub fn is_resident(&self, range: &Range<u64>) -> Result<bool> {
        const CHUNK: usize = 1024;
        let mut resident = [0u8; CHUNK];
        let pages = Self::whole_pages(range);
        for start in pages.clone().step_by(CHUNK * SMALL_PAGE_BYTES) {
            let len = Self::len_of(&(start..pages.end)).min(CHUNK * SMALL_PAGE_BYTES);
            memory::residency(self.address(start), len, &mut resident)
                .map_err(|source| Error::Kernel { what: "asking for residency", source })?;
            if !resident[..len / SMALL_PAGE_BYTES].iter().all(|page| page & 1 == 1) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Gives the pages of a range back, but for the pinned ones.
    pub fn discard(&self, pages: Range<u64>) {
        let pins = self.pins.lock();
        for part in pins.gaps(pages) {
            // SAFETY: the contents of a shared file mapping are the file's: nothing is lost. A failure leaves
            // the pages where they are.
            let _ = unsafe {
                memory::advise(
                    self.address(part.start),
                    Self::len_of(&part),
                    memory::Advice::DontNeed,
                )
            };
            if self.backing == Backing::Storage {
                let _ = memory::drop_cached(self.file(), part.start, part.end - part.start);
            }
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
                // First for the kernel's own reclaim, and next for the drop manager.
                // SAFETY: our own mapping; nothing is lost.
                let _ = unsafe {
                    memory::advise(
                        self.address(pages.start),
                        Self::len_of(&pages),
                        memory::Advice::Cold,
                    )
                };
                self.cursor.store(pages.start, Ordering::Relaxed);
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
        // SAFETY: our own mapping; this is advice about read-ahead only.
        let _ = unsafe { memory::advise(self.address(0), len, pattern.advice) };
    }

    /// Whether the pattern of accesses is to be found out.
    pub fn detects(&self) -> bool {
        self.pattern.lock().detector.is_some()
    }

    /// Tells the detector about a region that is being given back.
    pub fn observe(&self, cached: u64, mapped: impl FnOnce() -> u64) {
        let mut pattern = self.pattern.lock();
        let Some(reads_ahead) = pattern.detector.as_mut().and_then(|d| d.observe(cached, mapped))
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
        // SIGSEGV here is a store to a read-only mapping. A load that can fail is left to.
        if fault.signal != libc::SIGBUS || fault.fallible {
            return Served::No;
        }
        let page = (fault.address - self.address(0) as usize) as u64 / PAGE;
        let truncated =
            residency::file_len_bytes(self.file()).is_ok_and(|len_bytes| page * PAGE >= len_bytes);
        // SAFETY: the guarded addresses are in this file's own mapping, which is never borrowed as references.
        if unsafe { self.replaceable.replace(fault.address, truncated) } {
            return Served::Yes;
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
