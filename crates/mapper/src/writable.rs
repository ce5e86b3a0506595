//! The common part of private and shared writable mappings: addresses, a file, and faults as
//! errors.
//!
//! ```text
//!  place    [ ····│lead│ view ……………………………… │ mapped, behind the view's or the file's end ……… ]
//!            ▲ page of the file               ▲ end: moves when the view grows       capacity ▲
//! ```
//! The whole place is mapped at once, including the part behind the end of the file. Growing then
//! only extends the file, and no mapping changes: addresses stay valid, and so does the state of a
//! private mapping's tracker.
//!
//! # Faults
//! As for read-only mappings ([`aquifer_vm::guard`]), with one difference: pages next to a replaced
//! one may hold stores that exist nowhere else. So exactly the replaced pages are mapped again, not
//! the range that encloses them.
//!
//! A file that was found too short may be extended a moment later, and another thread may then
//! store to the page. So a page of a private mapping is *held* before it is replaced: it is
//! write-protected, and checked once more. It is replaced by zeros only if it is still missing.
//! Zeros then cannot overwrite a store, because there is none, and none can be made. A store to a
//! held page faults and is repeated.
//!
//! # Invariants
//! * A page is marked in `replaced` before zeros appear there, and unmarked before the file is
//!   back.
//! * A page of a private mapping is held, replaced and mapped again by one thread at a time
//!   ([`Holds`]).
//! * `len_bytes` only grows, under `growing`.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use aquifer_sys::fallible;
use aquifer_sys::high_fd::HeldFile;
use aquifer_sys::memory::{self, Advice, Protection, SMALL_PAGE_BYTES};
use aquifer_sys::residency::file_len_bytes;
use aquifer_sys::signal::FaultContext;

use super::Stores;
use super::error::{FaultCause, MapError, Result};
use super::identity::may_be_parked;
use super::mapped::{is_unfilled, was_tried};
use aquifer_vm::dirty::runs;
use aquifer_vm::guard::{Replaceable, Trouble};
use aquifer_vm::{FaultOwner, Missed, PageRun, ProcessMark, Reservation, Served, VmError};

mod full;

use full::{Copies, Marks};

const PAGE: u64 = SMALL_PAGE_BYTES as u64;

/// Addresses owned by one mapping, unmapped when this is dropped or later.
///
/// # Safety
/// No other code maps or uses the addresses. In a fork of the process that made it, dropping does
/// nothing.
pub(crate) unsafe trait Place: Send + Sync {
    /// The first address; page-aligned.
    fn address(&self) -> *mut u8;
    /// Length in bytes: whole pages.
    fn capacity_bytes(&self) -> usize;
    /// Has forked children keep what is mapped, where the place allows that.
    fn keep_in_children(&self) {}
    /// Sets the owner that serves the faults of these addresses.
    ///
    /// # Safety
    /// `owner` stays valid until this is dropped.
    unsafe fn set_owner(
        &mut self,
        owner: *const dyn FaultOwner,
    ) -> std::result::Result<(), VmError>;
}

// SAFETY: a reservation owns its addresses, and detects that it is in a child.
unsafe impl Place for Reservation {
    fn address(&self) -> *mut u8 {
        Reservation::address(self)
    }

    fn capacity_bytes(&self) -> usize {
        self.len_bytes()
    }

    fn keep_in_children(&self) {
        Reservation::keep_in_children(self);
    }

    unsafe fn set_owner(
        &mut self,
        owner: *const dyn FaultOwner,
    ) -> std::result::Result<(), VmError> {
        // SAFETY: forwarded to the caller.
        unsafe { Reservation::set_owner(self, owner) }
    }
}

/// A mapping that can be stored to.
pub(crate) struct Writable {
    // Dropped before `faults`, to which it refers.
    place: Box<dyn Place>,
    faults: Box<Faults>,
    stores: Stores,
    /// Blocks are reserved for what the view grows by.
    allocates: bool,
    path: PathBuf,
    /// Bytes of the first page that lie before the view.
    lead_bytes: u64,
    /// Length of the view.
    len_bytes: AtomicU64,
    growing: Mutex<()>,
    mark: ProcessMark,
}

/// The state that the fault handler uses.
struct Faults {
    start: usize,
    /// A dedicated open file description: it records its own write-back errors.
    file: HeldFile,
    /// File offset of the place: a multiple of the page size.
    first_byte: u64,
    replaceable: Replaceable,
    missed: Missed,
    /// Pages of the place.
    pages: usize,
    /// Replaced pages.
    replaced: Marks,
    copies: Copies,
    stores: Stores,
    holds: Holds,
}

/// A lock, held by the thread that holds pages of a mapping, replaces them or maps the file there
/// again.
#[derive(Default)]
struct Holds {
    /// The holder's mark ([`Holds::mark`]), or 0. Fault handlers take this lock, so they must
    /// detect whether the interrupted code holds it.
    holder: AtomicUsize,
    /// Incremented when the lock is taken and when it is released: odd while it is held.
    count: AtomicU64,
}

/// The lock of [`Holds`], released on drop.
struct Held<'a>(&'a Holds);

impl Holds {
    /// A number unique among living threads. Async-signal-safe.
    fn mark() -> usize {
        thread_local! {
            /// Initialised at compile time and without a destructor: the handler's access allocates
            /// nothing.
            static MARK: u8 = const { 0 };
        }
        MARK.with(|mark| ptr::from_ref(mark).addr())
    }

    /// Waits for the holder, which makes only a few system calls; `None` if the calling thread is
    /// the holder. Async-signal-safe.
    fn hold(&self) -> Option<Held<'_>> {
        let mark = Holds::mark();
        // Acquire pairs with the release in `Held::drop`: the pages are as the last holder left
        // them.
        while let Err(holder) =
            self.holder.compare_exchange(0, mark, Ordering::Acquire, Ordering::Relaxed)
        {
            if holder == mark {
                return None;
            }
            std::thread::yield_now();
        }
        // Release, here and in `Held::drop`: pairs with the acquires in `Faults::serve_store`.
        self.count.fetch_add(1, Ordering::AcqRel);
        Some(Held(self))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.count.fetch_add(1, Ordering::AcqRel);
        self.0.holder.store(0, Ordering::Release);
    }
}

impl Faults {
    fn address_of(&self, page: usize) -> *mut u8 {
        (self.start + page * SMALL_PAGE_BYTES) as *mut u8
    }

    fn protect(&self, pages: &Range<usize>, protection: Protection) -> bool {
        let (start, len_bytes) = (self.address_of(pages.start), pages.len() * SMALL_PAGE_BYTES);
        // SAFETY: pages of this mapping, held by the caller; a store that faults in the meantime is
        // repeated.
        unsafe { memory::protect(start, len_bytes, protection) }.is_ok()
    }

    fn has_ended_before(&self, page: usize) -> bool {
        file_len_bytes(self.file.as_fd())
            .is_ok_and(|len_bytes| len_bytes <= self.first_byte + page as u64 * PAGE)
    }

    /// Maps the file again at the replaced ones of `pages`, and returns how many that were; `None`
    /// if some remain replaced. The caller holds the pages, unless its handler interrupted the
    /// holder. Async-signal-safe.
    fn map_again(&self, pages: Range<usize>) -> Option<usize> {
        let (mut mapped, mut all) = (0, true);
        let mut from = pages.start;
        while from < pages.end {
            let end =
                (from..pages.end).find(|page| !self.replaced.take(*page)).unwrap_or(pages.end);
            if end > from {
                match self.map_file(from..end) {
                    Ok(()) => mapped += end - from,
                    Err(_) => {
                        (from..end).for_each(|page| self.replaced.set(page));
                        all = false;
                    }
                }
            }
            from = end + 1;
        }
        all.then_some(mapped)
    }

    fn is_replaced(&self, page: usize) -> bool {
        self.replaced.get(page)
    }

    /// The first replaced page of `pages`.
    fn next_replaced(&self, pages: Range<usize>) -> Option<usize> {
        self.replaced.next(pages)
    }

    /// Makes pages writable, except those that show zeros. The caller holds them.
    fn allow_stores(&self, pages: Range<usize>) -> bool {
        let mut from = pages.start;
        while from < pages.end {
            let end = self.next_replaced(from..pages.end).unwrap_or(pages.end);
            if end > from && !self.protect(&(from..end), Protection::ReadWrite) {
                return false;
            }
            from = end + 1;
        }
        true
    }

    /// Maps the file at replaced pages.
    fn map_file(&self, pages: Range<usize>) -> io::Result<()> {
        // SAFETY: the pages belong to the place, and hold only zeros that cannot be stored to, or
        // what the file holds.
        unsafe { self.map_file_as(pages, self.stores) }
    }

    /// Maps the file at pages of the place.
    ///
    /// # Safety
    /// The content of the pages is that of the file, or no longer needed.
    unsafe fn map_file_as(&self, pages: Range<usize>, stores: Stores) -> io::Result<()> {
        let address = self.address_of(pages.start);
        let offset = self.first_byte + pages.start as u64 * PAGE;
        let (length, access) = (pages.len() * SMALL_PAGE_BYTES, Protection::ReadWrite);
        let file = self.file.as_fd();
        // SAFETY: forwarded to the caller.
        unsafe {
            match stores {
                Stores::Private => {
                    memory::map_private_file_at(address, length, access, file, offset)
                }
                Stores::Shared => memory::map_file_at(address, length, access, file, offset),
            }
        }?;
        if self.stores == Stores::Shared {
            return Ok(());
        }
        keep_private(address, length).inspect_err(|_| {
            // A page that a child would inherit must not be writable.
            // SAFETY: mapped above, and no store has reached it: stores are retried after the hold.
            let _ = unsafe { memory::map_anonymous_at(address, length, Protection::Read) };
        })
    }

    /// Puts zeros where a guarded load of this thread has failed, at the first of `pages`. The
    /// caller holds them.
    fn replace(&self, pages: Range<usize>, address: usize, has_ended: bool) -> Served {
        for page in pages {
            self.replaced.set(page);
        }
        // SAFETY: guarded addresses of this mapping. The pages are the file's: a load from a
        // private copy cannot fail, no copy survives a truncation, and none can be made while the
        // pages are held.
        if unsafe { self.replaceable.replace(address, has_ended) } {
            Served::Yes
        } else {
            Served::No
        }
    }

    /// As [`Faults::replace`], unless the page has become readable.
    fn replace_if_gone(&self, pages: Range<usize>, address: usize) -> Served {
        #[cfg(test)]
        test_support::before_hold();
        let Some(_held) = self.holds.hold() else { return Served::No };
        let first = pages.start;
        if self.is_replaced(first) {
            // Another thread has replaced the page: its zeros are readable, and must not become
            // writable. This guard records the replacement as well.
            return self.replace(first..first + 1, address, false);
        }
        if !self.protect(&pages, Protection::Read) {
            return Served::No;
        }
        #[cfg(test)]
        test_support::held();
        // SAFETY: a page of this mapping; populating changes no contents.
        let populated = unsafe {
            memory::advise(self.address_of(first), SMALL_PAGE_BYTES, Advice::PopulateRead)
        };
        if populated.is_ok() {
            // There: the load is made again.
            return if self.allow_stores(pages) { Served::Yes } else { Served::No };
        }
        let has_ended = pages.len() > 1 && self.has_ended_before(first);
        if !has_ended && pages.len() > 1 && !self.allow_stores(pages.clone()) {
            return Served::No;
        }
        let behind = if has_ended { pages.end } else { first + 1 };
        if behind < pages.end && !self.protect(&(first..behind), Protection::Read) {
            return Served::No;
        }
        self.replace(first..behind, address, has_ended)
    }

    /// Puts zeros under a load that no call guards, or behind the end of the file also under a store, which is lost there. A
    /// page that cannot be read is not made writable: a flush would take the zeros for stores.
    fn answer(&self, fault: &FaultContext) -> Served {
        if !self.missed.is_wanted() || fault.fallible {
            return Served::No;
        }
        let page = (fault.address - self.start) / SMALL_PAGE_BYTES;
        let Some(_held) = self.holds.hold() else { return Served::No };
        if self.is_replaced(page) {
            // Another thread was first. If a store meets zeros that cannot be stored to, that is a SIGSEGV, and
            // `serve_store` maps the file again.
            return Served::Yes;
        }
        let pages = page..page + 1;
        if !self.protect(&pages, Protection::Read) {
            return Served::No;
        }
        let address = self.address_of(page);
        // SAFETY: a page of this mapping; populating changes no contents.
        let populated = unsafe { memory::advise(address, SMALL_PAGE_BYTES, Advice::PopulateRead) };
        if populated.is_ok() {
            // There after all. A store that fails for another reason, such as a full file system, would fail forever.
            let again = self.allow_stores(pages) && fault.write != Some(true);
            return if again { Served::Yes } else { Served::No };
        }
        let protection = match self.has_ended_before(page) {
            true => Protection::ReadWrite,
            false if fault.write == Some(true) => {
                self.allow_stores(pages);
                return Served::No;
            }
            false => Protection::Read,
        };
        let pages = self.many_gone(&pages, protection).unwrap_or(pages);
        pages.clone().for_each(|page| self.replaced.set(page));
        let (address, len_bytes) = (self.address_of(pages.start), pages.len() * SMALL_PAGE_BYTES);
        let addresses = address as usize..address as usize + len_bytes;
        // SAFETY: pages of this mapping, as for `replace`, whose content no code relies on: they cannot be read. A private copy
        // that swap or failed memory withholds is lost with its stores.
        if !unsafe { self.replaceable.replace_bare(addresses, protection) } {
            return Served::No;
        }
        if self.stores == Stores::Private {
            // Without it a child would inherit zeros, which harms nothing.
            let _ = keep_private(address, len_bytes);
        }
        self.missed.note(self.first_byte + page as u64 * PAGE);
        Served::Yes
    }

    /// All pages behind the end of the file, if a page of them is to be replaced after very many: each could cost two of the
    /// mappings that a process may have. The caller holds them.
    fn many_gone(&self, page: &Range<usize>, protection: Protection) -> Option<Range<usize>> {
        if protection != Protection::ReadWrite || !self.replaceable.has_many_bare() {
            return None;
        }
        let len_bytes = file_len_bytes(self.file.as_fd()).ok()?.saturating_sub(self.first_byte);
        let first = usize::try_from(len_bytes.div_ceil(PAGE)).ok()?.min(page.start);
        let gone = first..self.pages;
        // As for one page: a store is made before the file is found to end here, and lost with its page, or repeated.
        let is_protected = self.protect(&gone, Protection::Read);
        #[cfg(test)]
        test_support::held();
        if is_protected && self.has_ended_before(first) {
            return Some(gone);
        }
        // The page itself is replaced: a store that reached it now would be lost.
        for others in [first..page.start, page.end..self.pages] {
            self.allow_stores(others);
        }
        None
    }

    /// Repeats a store that failed because its page was held. Maps the file again under a store to
    /// a page that another thread's guarded load had replaced. Other faults are not served.
    fn serve_store(&self, fault: &FaultContext) -> Served {
        if fault.write != Some(true) {
            return Served::No;
        }
        let index = (fault.address - self.start) / SMALL_PAGE_BYTES;
        let populate = || {
            let (page, length) = (self.address_of(index), SMALL_PAGE_BYTES);
            // SAFETY: a page of this mapping; populating changes no contents.
            unsafe { memory::advise(page, length, Advice::PopulateWrite) }
        };
        if self.stores == Stores::Private {
            // Acquire, here and below, pairs with the releases in `Holds::hold` and `Held::drop`: a
            // changed or odd count means that the page was held at some point since the store.
            // Otherwise the store failed for another reason.
            let before = self.holds.count.load(Ordering::Acquire);
            #[cfg(test)]
            test_support::met_hold();
            let populated = populate();
            let after = self.holds.count.load(Ordering::Acquire);
            if before % 2 == 1 {
                // The holder may need this processor.
                std::thread::yield_now();
            }
            if populated.is_ok() || before != after || before % 2 == 1 {
                return Served::Yes;
            }
        }
        #[cfg(test)]
        if self.stores == Stores::Shared {
            test_support::met_hold();
        }
        let Some(_held) = self.holds.hold() else { return Served::No };
        // A guarded load of this thread would put the zeros there again, and the store would fault
        // forever.
        if self.is_replaced(index) && self.replaceable.guarded_around(fault.address).is_some() {
            return Served::No;
        }
        match self.map_again(index..index + 1) {
            Some(1..) => Served::Yes,
            // Another thread has mapped the page again. Retry if it is the file's page; a store behind
            // the end of the file then raises SIGBUS.
            Some(0) => match populate() {
                Ok(()) => Served::Yes,
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => Served::Yes,
                Err(_) => Served::No,
            },
            None => Served::No,
        }
    }
}

impl FaultOwner for Faults {
    fn serve(&self, fault: &FaultContext) -> Served {
        if fault.signal == libc::SIGSEGV {
            return self.serve_store(fault);
        }
        if self.stores == Stores::Shared && self.keep_store(fault) == Served::Yes {
            return Served::Yes;
        }
        let Some(guarded) = self.replaceable.guarded_in(fault) else { return self.answer(fault) };
        let first = (fault.address - self.start) / SMALL_PAGE_BYTES;
        // Replace one page at a time, so that a file that is extended again can be stored to.
        // Behind the end nothing can be lost.
        let has_ended = guarded.has_many_gone && self.has_ended_before(first);
        let behind =
            if has_ended { (guarded.end - self.start) / SMALL_PAGE_BYTES } else { first + 1 };
        match self.stores {
            Stores::Private => self.replace_if_gone(first..behind, fault.address),
            Stores::Shared => {
                #[cfg(test)]
                test_support::before_hold();
                let Some(_held) = self.holds.hold() else { return Served::No };
                // Stores are in the file, whatever is mapped, or in copies: those stay.
                if self.is_kept(first) {
                    return Served::Yes;
                }
                let has_ended = has_ended && self.has_ended_before(first);
                let behind = if has_ended { behind } else { first + 1 };
                self.replace(first..behind, fault.address, has_ended)
            }
        }
    }
}

impl Writable {
    /// Maps `range` of a file that is open for reading and writing. It may end behind the end of
    /// the file. With `allocates`, blocks are reserved for it, and for what it grows by.
    pub fn new(
        mut place: Box<dyn Place>,
        file: &File,
        path: &Path,
        range: Range<u64>,
        stores: Stores,
        allocates: bool,
    ) -> Result<Writable> {
        let capacity_bytes = place.capacity_bytes();
        let failed = |source| MapError::Map {
            path: path.to_owned(),
            len_bytes: range.end.saturating_sub(range.start),
            source,
        };
        let lead_bytes = range.start % PAGE;
        let first_byte = range.start - lead_bytes;
        let len_bytes = range.end.checked_sub(range.start).filter(|len_bytes| {
            lead_bytes.checked_add(*len_bytes).is_some_and(|end| end <= capacity_bytes as u64)
        });
        let Some(len_bytes) = len_bytes else {
            return Err(failed(io::Error::from_raw_os_error(libc::ENOMEM)));
        };
        let refused = |file: &File, source: io::Error| {
            // The kernel says so in many ways: ENODEV, EINVAL, EPERM, EACCES, ETXTBSY.
            let is_for_sharing = stores == Stores::Shared
                && source.raw_os_error() != Some(libc::ENOMEM)
                && memory::map_private(
                    SMALL_PAGE_BYTES,
                    Protection::ReadWrite,
                    file.as_fd(),
                    first_byte,
                )
                // SAFETY: mapped just now; its address is in no other hands.
                .is_ok_and(|address| unsafe { memory::unmap(address, SMALL_PAGE_BYTES) }.is_ok());
            match is_for_sharing {
                true => MapError::SharedRefused { path: path.to_owned(), source },
                false => failed(source),
            }
        };
        let file = own_description(file).map_err(MapError::open(path))?;
        if allocates {
            aquifer_sys::io::allocate_behind_end(file.as_fd(), range.start, len_bytes).map_err(
                |source| MapError::Allocate { path: path.to_owned(), range: range.clone(), source },
            )?;
        }
        let (address, protection) = (place.address(), Protection::ReadWrite);
        if !may_be_parked(&file) {
            let map =
                if stores == Stores::Private { memory::map_private } else { memory::map_file };
            let elsewhere = map(capacity_bytes, protection, file.as_fd(), first_byte);
            was_tried(elsewhere, capacity_bytes).map_err(|error| refused(&file, error))?;
        }
        if stores == Stores::Shared {
            place.keep_in_children();
        }
        // SAFETY: the caller passes ownership of the place to this mapping.
        let mapped = unsafe {
            match stores {
                Stores::Private => memory::map_private_file_at(
                    address,
                    capacity_bytes,
                    protection,
                    file.as_fd(),
                    first_byte,
                ),
                Stores::Shared => memory::map_file_at(
                    address,
                    capacity_bytes,
                    protection,
                    file.as_fd(),
                    first_byte,
                ),
            }
        };
        mapped.map_err(|error| refused(&file, error))?;
        if stores == Stores::Private {
            keep_private(address, capacity_bytes).map_err(failed)?;
        }
        let file = HeldFile::own(file.into()).map_err(MapError::open(path))?;
        let faults = Box::new(Faults {
            start: address as usize,
            file,
            first_byte,
            replaceable: Replaceable::new(),
            missed: Missed::new(),
            pages: capacity_bytes / SMALL_PAGE_BYTES,
            replaced: Marks::new(capacity_bytes / SMALL_PAGE_BYTES),
            copies: Copies::new(match stores {
                Stores::Shared => capacity_bytes / SMALL_PAGE_BYTES,
                Stores::Private => 0,
            }),
            stores,
            holds: Holds::default(),
        });
        // SAFETY: `faults` is boxed, so its address is stable, and it is dropped after `place`.
        unsafe { place.set_owner(&raw const *faults as *const dyn FaultOwner) }?;
        Ok(Writable {
            place,
            faults,
            stores,
            allocates,
            path: path.to_owned(),
            lead_bytes,
            len_bytes: AtomicU64::new(len_bytes),
            growing: Mutex::new(()),
            mark: ProcessMark::new(),
        })
    }

    pub fn check_process(&self) -> Result<()> {
        if self.mark.is_current() { Ok(()) } else { Err(MapError::Forked) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn file(&self) -> BorrowedFd<'_> {
        self.faults.file.as_fd()
    }

    /// The first byte of the first page.
    pub fn base(&self) -> *mut u8 {
        self.place.address()
    }

    /// The view's first byte.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.base().wrapping_add(self.lead_bytes as usize)
    }

    /// Length of the view.
    pub fn len_bytes(&self) -> u64 {
        // Acquire pairs with the release in `grow`: the file has at least these bytes.
        self.len_bytes.load(Ordering::Acquire)
    }

    pub fn capacity_pages(&self) -> u64 {
        self.place.capacity_bytes() as u64 / PAGE
    }

    /// File offset of the first page.
    pub fn first_byte(&self) -> u64 {
        self.faults.first_byte
    }

    /// The whole view, as bytes of the file.
    pub fn view_in_file(&self) -> Range<u64> {
        let start = self.first_byte() + self.lead_bytes;
        start..start + self.len_bytes()
    }

    /// Converts bytes of the view to bytes of the file.
    pub fn in_file(&self, range: &Range<u64>) -> Result<Range<u64>> {
        let len_bytes = self.len_bytes();
        if range.start > range.end || range.end > len_bytes {
            return Err(MapError::OutsideView { start: range.start, end: range.end, len_bytes });
        }
        let start = self.first_byte() + self.lead_bytes;
        Ok(start + range.start..start + range.end)
    }

    /// The address of a byte of the file in the mapping.
    pub fn address_of(&self, file_byte: u64) -> *mut u8 {
        self.base().wrapping_add((file_byte - self.first_byte()) as usize)
    }

    /// The current length of the file.
    pub fn file_len_bytes(&self) -> io::Result<u64> {
        file_len_bytes(self.file())
    }

    /// Copies bytes from `offset_bytes` of the view.
    pub fn read_into(&self, offset_bytes: u64, target: &mut [u8]) -> Result<()> {
        self.check_process()?;
        let end = offset_bytes.saturating_add(target.len() as u64);
        let range = self.in_file(&(offset_bytes..end))?;
        let source = self.address_of(range.start);
        let map_again = |hull| self.map_again(hull);
        // SAFETY: the source is mapped.
        if unsafe { self.faults.replaceable.copy(source, target, map_again) } {
            Ok(())
        } else {
            Err(self.fault(&range))
        }
    }

    /// Stores bytes at `offset_bytes` of the view. After an error some of them may have been
    /// stored.
    pub fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.check_process()?;
        let end = offset_bytes.saturating_add(bytes.len() as u64);
        let range = self.in_file(&(offset_bytes..end))?;
        let target = self.address_of(range.start);
        // SAFETY: the place is mapped writable; the source belongs to the caller.
        if unsafe { fallible::try_store(bytes.as_ptr(), target, bytes.len()) } {
            return Ok(());
        }
        let fault = self.fault(&range);
        if self.stores == Stores::Shared
            && !matches!(fault, MapError::Fault { cause: FaultCause::Truncated, .. })
        {
            // A system call reports why it fails.
            return aquifer_sys::io::write_all_at(self.file(), bytes, range.start).map_err(
                |error| MapError::Fault {
                    path: self.path.clone(),
                    offset_bytes: range.start,
                    cause: cause_of(&error),
                },
            );
        }
        Err(fault)
    }

    /// Runs `access` with faults in `range` of the file turned into errors.
    pub fn guarded<T>(&self, range: &Range<u64>, access: impl FnOnce() -> T) -> Result<T> {
        let start = self.base() as usize;
        let address_of = |byte: u64| start + (byte - self.first_byte()) as usize;
        let addresses = address_of(range.start)..address_of(range.end);
        let outcome =
            self.faults.replaceable.guarded(addresses, |hull| self.map_again(hull), access);
        outcome.map_err(|trouble| match trouble {
            Trouble::Failed { address, .. } => {
                let at = range.start.max(self.first_byte() + (address - start) as u64);
                self.fault(&(at..at + 1))
            }
            Trouble::Unsettled => self.fault(&(range.end.saturating_sub(1)..range.end)),
        })
    }

    /// Maps the file again at the replaced pages in `hull`.
    fn map_again(&self, hull: Range<usize>) -> bool {
        let start = self.base() as usize;
        let pages = (hull.start - start) / SMALL_PAGE_BYTES..(hull.end - start) / SMALL_PAGE_BYTES;
        // `None` if this is a signal handler that has interrupted the holder in the same thread.
        let _held = self.faults.holds.hold();
        self.faults.map_again(pages).is_some()
    }

    /// From now on, bare loads of missing pages find zeros.
    pub fn answer_faults(&self) {
        self.faults.missed.answer();
    }

    /// The first bare access since the last call that was answered with zeros or has found no block, as an error; maps the file
    /// again.
    pub fn take_missed(&self) -> Option<MapError> {
        // In a child the mapping is its parent's.
        self.check_process().ok()?;
        if let Err(error) = self.report_copies() {
            return Some(error);
        }
        let at = self.faults.missed.take()?;
        self.settle();
        Some(self.fault(&(at.max(self.view_in_file().start)..at + PAGE)))
    }

    /// Replaces the file by zeros, at once and at the same addresses. They stay until this is dropped;
    /// stores to them are in no file.
    pub fn retire(&self) -> Result<()> {
        self.check_process()?;
        let (address, len_bytes) = (self.base(), self.place.capacity_bytes());
        let _held = self.faults.holds.hold();
        // SAFETY: the place is this mapping's, and its bytes are not borrowed as references. The
        // kernel replaces the mapping under its lock: no access in between finds none.
        let mapped = unsafe { memory::map_anonymous_at(address, len_bytes, Protection::ReadWrite) };
        // A child keeps what it kept of the file.
        let is_private = self.stores == Stores::Private;
        mapped
            .and_then(|()| if is_private { keep_private(address, len_bytes) } else { Ok(()) })
            .map_err(|source| MapError::Map {
                path: self.path.clone(),
                len_bytes: len_bytes as u64,
                source,
            })?;
        // Nothing maps the file again, or writes copies to it.
        self.faults.replaced.clear();
        self.forget_copies();
        Ok(())
    }

    /// Maps the file again where bare accesses were answered with zeros.
    pub fn settle(&self) {
        self.faults.replaceable.settle(|hull| self.map_again(hull));
    }

    /// Leaves out the pages that show zeros instead of the file.
    pub fn without_replaced(&self, runs: &[PageRun]) -> Vec<PageRun> {
        let mut replaced = Vec::new();
        for run in runs {
            let (mut from, end) = (run.first.0 as usize, run.end().0 as usize);
            while let Some(page) = self.faults.next_replaced(from..end) {
                replaced.push(PageRun::new(page as u64..page as u64 + 1));
                from = page + 1;
            }
        }
        runs::subtract(runs, &replaced)
    }

    /// Finds out why a byte in `range` of the file could not be accessed.
    pub fn fault(&self, range: &Range<u64>) -> MapError {
        let fault =
            |offset_bytes, cause| MapError::Fault { path: self.path.clone(), offset_bytes, cause };
        let mut byte = [0];
        let mut at = range.start;
        while at < range.end {
            match aquifer_sys::io::read_at(self.file(), &mut byte, at) {
                Ok(1) if is_unfilled(self.file(), at) => return fault(at, FaultCause::NoSpace),
                Ok(1) => at = (at / PAGE + 1) * PAGE,
                Ok(_) => {
                    let len_bytes = self.file_len_bytes().unwrap_or(at);
                    return fault(len_bytes.clamp(range.start, at), FaultCause::Truncated);
                }
                Err(error) => return fault(at, cause_of(&error)),
            }
        }
        fault(range.start, FaultCause::Passing)
    }

    /// Makes the view longer, and extends the file if it ends before that. A private view, and one
    /// that allocates, gets blocks for all of the new part.
    ///
    /// Returns `Ok(Some(end))` if the view has grown, where `end` is the byte of the file at which
    /// it ended before.
    pub fn grow(&self, len_bytes: u64) -> Result<Option<u64>> {
        self.check_process()?;
        let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.len_bytes();
        if len_bytes <= before {
            return Ok(None);
        }
        let capacity_bytes = self.place.capacity_bytes() as u64 - self.lead_bytes;
        if len_bytes > capacity_bytes {
            let path = self.path.clone();
            return Err(MapError::GrowBeyond { path, len_bytes, capacity_bytes });
        }
        let start = self.first_byte() + self.lead_bytes;
        self.lengthen_file(start + len_bytes).map_err(|source| MapError::Grow {
            path: self.path.clone(),
            len_bytes,
            source,
        })?;
        // Release pairs with the acquire in `len_bytes`.
        self.len_bytes.store(len_bytes, Ordering::Release);
        Ok(Some(start + before))
    }

    fn duplicate(&self) -> io::Result<File> {
        self.file().try_clone_to_owned().map(File::from)
    }

    /// Extends the file by allocating blocks rather than only setting the length: then the file is not
    /// truncated if another process extends it at the same time. Where the file is to stay sparse,
    /// that is the last block alone. Otherwise it is all of them, so that no store to them fails
    /// later; the length changes only once all are allocated, and is never set back: bytes that
    /// another process appends in the meantime stay.
    fn lengthen_file(&self, end: u64) -> io::Result<()> {
        let present = self.file_len_bytes()?;
        if present >= end {
            return Ok(());
        }
        if !self.allocates && self.stores == Stores::Shared {
            return match aquifer_sys::io::allocate(self.file(), end - 1, 1) {
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    self.duplicate()?.set_len(end)
                }
                extended => extended,
            };
        }
        let added_bytes = end - present;
        match aquifer_sys::io::allocate_behind_end(self.file(), present, added_bytes) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                self.duplicate()?.set_len(end)
            }
            Err(error) => {
                // Free the blocks that were allocated before space ran out, by setting the length
                // to its current value. If another process has changed the length, leave the blocks
                // allocated.
                if self.file_len_bytes()? == present {
                    let _ = self.duplicate().and_then(|file| file.set_len(present));
                }
                Err(error)
            }
            Ok(()) => aquifer_sys::io::allocate(self.file(), present, added_bytes),
        }
    }
}

fn cause_of(error: &io::Error) -> FaultCause {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => FaultCause::NoSpace,
        errno => FaultCause::Io(errno.unwrap_or(libc::EIO)),
    }
}

/// Excludes a mapping from forked children and core dumps.
fn keep_private(address: *mut u8, len_bytes: usize) -> io::Result<()> {
    for advice in [Advice::DontFork, Advice::DontDump] {
        // SAFETY: a mapping of the caller; its contents stay.
        unsafe { memory::advise(address, len_bytes, advice) }?;
    }
    Ok(())
}

/// Reopens the file: the new description has no append mode, and its write-back errors are reported
/// to no other descriptor.
fn own_description(file: &File) -> io::Result<File> {
    aquifer_sys::io::reopen(file.as_fd(), libc::O_RDWR).map(File::from)
}

/// Hooks for tests, to interleave other threads.
#[cfg(test)]
pub(super) mod test_support {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU64, Ordering};

    thread_local! {
        static BEFORE_HOLD: Cell<Option<fn()>> = const { Cell::new(None) };
        static HELD: Cell<Option<fn()>> = const { Cell::new(None) };
    }

    /// How many stores hit a held page.
    pub static STORES_HELD_UP: AtomicU64 = AtomicU64::new(0);

    /// Has the calling thread's handler call `before_hold` before it holds a page, and `held` while
    /// it does.
    pub fn interpose(before_hold: Option<fn()>, held: Option<fn()>) {
        BEFORE_HOLD.set(before_hold);
        HELD.set(held);
    }

    pub fn before_hold() {
        if let Some(hook) = BEFORE_HOLD.take() {
            hook();
        }
    }

    pub fn held() {
        if let Some(hook) = HELD.take() {
            hook();
        }
    }

    pub fn met_hold() {
        STORES_HELD_UP.fetch_add(1, Ordering::SeqCst);
    }
}
