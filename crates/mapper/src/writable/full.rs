//! Stores through a shared mapping for which the file system has no block.
//!
//! A store to a hole of a full disk, beyond a quota, or to a block shared with a reflinked file raises
//! SIGBUS. The handler maps that page privately: it shows the file's content, and takes the store.
//! [`Writable::write_copies`] writes such pages to the file and maps them shared again.
//!
//! ```text
//!  shared ──store without a block──▶ private ──store──▶ copy
//!    ▲                                  │                 │ written
//!    └──────────────────────────────────┴─────────────────┘
//! ```
//! After very many of them, the pages around one are mapped privately with it, so that the process does
//! not run out of mappings. Of these, only the pages that were stored to are written.
//!
//! Other processes do not see the stores to a copy before it is written. Its page is written whole: of
//! what they wrote there meanwhile, one version survives.
//!
//! # Invariants
//! * A page is marked in `copied` by the thread that holds the mapping's pages, after it is mapped
//!   privately, and unmarked after it is mapped shared.
//! * No store reaches a copy between the moment at which it is read and the one at which its page is
//!   mapped shared: the page is write-protected, and a store that faults waits for the holder.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use aquifer_sys::fallible;
use aquifer_sys::memory::{self, Advice, Protection, REGION_BYTES, SMALL_PAGE_BYTES};
use aquifer_sys::pagemap::Pagemap;
use aquifer_sys::signal::FaultContext;
use aquifer_vm::{Missed, Served};

use super::{Faults, PAGE, Writable};
use crate::error::{FlushCause, MapError, Result};

/// Private mappings made one by one before the pages around them are included.
const MANY: usize = 1024;
/// Pages that are included.
const REGION_PAGES: usize = REGION_BYTES / SMALL_PAGE_BYTES;
/// Pages that are write-protected at a time while they are written.
const HELD_PAGES: usize = 64;

/// One bit for each page of a mapping. Memory is used for the part that has marks.
pub(super) struct Marks(Box<[AtomicU64]>);

impl Marks {
    pub fn new(pages: usize) -> Marks {
        // `calloc`: the kernel provides zeros where they are touched.
        let words = Box::into_raw(vec![0_u64; pages.div_ceil(64)].into_boxed_slice());
        // SAFETY: made just now; an `AtomicU64` has the size and the values of a `u64`, and on the
        // supported systems, of 64 bits, its alignment.
        Marks(unsafe { Box::from_raw(words as *mut [AtomicU64]) })
    }

    // Relaxed, throughout: only the thread that holds the pages changes marks, and `Holds` orders it.
    pub fn get(&self, page: usize) -> bool {
        self.0[page / 64].load(Ordering::Relaxed) >> (page % 64) & 1 == 1
    }

    pub fn set(&self, page: usize) {
        self.0[page / 64].fetch_or(1 << (page % 64), Ordering::Relaxed);
    }

    /// Removes the mark, and returns whether there was one.
    pub fn take(&self, page: usize) -> bool {
        let bit = 1 << (page % 64);
        self.0[page / 64].fetch_and(!bit, Ordering::Relaxed) & bit != 0
    }

    /// Removes all marks.
    pub fn clear(&self) {
        let marked = self.0.iter().filter(|word| word.load(Ordering::Relaxed) != 0);
        marked.for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// The first marked page of `pages`.
    pub fn next(&self, pages: Range<usize>) -> Option<usize> {
        let mut from = pages.start;
        while from < pages.end {
            let word = self.0[from / 64].load(Ordering::Relaxed) >> (from % 64);
            if word != 0 {
                return Some(from + word.trailing_zeros() as usize).filter(|&at| at < pages.end);
            }
            from = (from / 64 + 1) * 64;
        }
        None
    }
}

/// The pages that are mapped privately in a shared mapping.
pub(super) struct Copies {
    copied: Marks,
    /// Private mappings made since all were written.
    made: AtomicUsize,
    /// The first store since the last call that reported one.
    unreported: Missed,
}

impl Copies {
    pub fn new(pages: usize) -> Copies {
        Copies { copied: Marks::new(pages), made: AtomicUsize::new(0), unreported: Missed::new() }
    }
}

impl Faults {
    /// Makes a store possible that has failed at a page of a shared mapping, if the page can be read.
    /// Async-signal-safe.
    pub(super) fn keep_store(&self, fault: &FaultContext) -> Served {
        if fault.fallible || fault.hardware_error || fault.write != Some(true) {
            return Served::No;
        }
        let page = (fault.address - self.start) / SMALL_PAGE_BYTES;
        let Some(_held) = self.holds.hold() else { return Served::No };
        // Another thread was first, or there is a block now.
        if self.is_replaced(page) || self.can_store(page) {
            return Served::Yes;
        }
        if self.has_ended_before(page) {
            return Served::No;
        }
        let copies = &self.copies;
        let mut made = page..page;
        if !copies.copied.get(page) {
            made = self.around(page);
            // SAFETY: pages of this mapping, which have shown the file's content, and still do.
            if unsafe { self.map_file_as(made.clone(), crate::Stores::Private) }.is_err() {
                return Served::No;
            }
            made.clone().for_each(|page| copies.copied.set(page));
            // Release pairs with the acquire in `write_copies`.
            copies.made.fetch_add(1, Ordering::Release);
        }
        if self.can_store(page) || self.fill_hole(page) {
            copies.unreported.note(self.first_byte + page as u64 * PAGE);
            return Served::Yes;
        }
        // It cannot be read. Around it, other threads may have stored by now.
        if made.len() == 1 && self.map_file(made).is_ok() {
            copies.copied.take(page);
        }
        Served::No
    }

    /// Whether a page is mapped privately and can be read: it may hold a store. The caller holds it.
    pub(super) fn is_kept(&self, page: usize) -> bool {
        let (address, len_bytes) = (self.address_of(page), SMALL_PAGE_BYTES);
        self.copies.copied.get(page)
            && !self.is_replaced(page)
            // SAFETY: a page of this mapping; populating changes no contents.
            && unsafe { memory::advise(address, len_bytes, Advice::PopulateRead) }.is_ok()
    }

    fn can_store(&self, page: usize) -> bool {
        // SAFETY: a page of this mapping; populating changes no contents.
        unsafe { memory::advise(self.address_of(page), SMALL_PAGE_BYTES, Advice::PopulateWrite) }
            .is_ok()
    }

    /// The pages to be mapped privately for a store to `page`.
    fn around(&self, page: usize) -> Range<usize> {
        // Relaxed: a bound.
        if self.copies.made.load(Ordering::Relaxed) < MANY {
            return page..page + 1;
        }
        let region = page / REGION_PAGES * REGION_PAGES;
        let is_other = |page: usize| self.copies.copied.get(page) || self.is_replaced(page);
        let start = (region..page).rev().find(|&page| is_other(page)).map_or(region, |at| at + 1);
        let end = (region + REGION_PAGES).min(self.pages);
        start..(page + 1..end).find(|&page| is_other(page)).unwrap_or(end)
    }

    /// Maps zeros at a copy that a file in memory has no page for: there, even a private mapping
    /// allocates the page of the file first.
    fn fill_hole(&self, page: usize) -> bool {
        let (pages, address) = (page..page + 1, self.address_of(page));
        // Another thread may store to the page as soon as there is room again.
        if !self.protect(&pages, Protection::Read) {
            return false;
        }
        #[cfg(test)]
        super::test_support::held();
        // SAFETY: a page of this mapping; populating changes no contents.
        if unsafe { memory::advise(address, SMALL_PAGE_BYTES, Advice::PopulateRead) }.is_ok() {
            // The store is made again.
            return self.allow_stores(pages);
        }
        let mut there = [0; SMALL_PAGE_BYTES];
        let offset = self.first_byte + page as u64 * PAGE;
        let is_zero = aquifer_sys::io::read_at(self.file.as_fd(), &mut there, offset).is_ok()
            && there == [0; SMALL_PAGE_BYTES];
        // SAFETY: a page of this mapping that is marked as a copy, has shown zeros, and can take no
        // store.
        let is_filled = is_zero
            && unsafe {
                memory::map_anonymous_at(address, SMALL_PAGE_BYTES, Protection::ReadWrite)
            }
            .is_ok();
        is_filled || {
            self.allow_stores(pages);
            false
        }
    }
}

impl Writable {
    /// Writes the copies again if one was made that no call has reported.
    ///
    /// # Errors
    /// As for [`Writable::write_copies`].
    pub fn report_copies(&self) -> Result<()> {
        match self.faults.copies.unreported.is_noted() {
            true => self.write_copies(),
            false => Ok(()),
        }
    }

    /// Discards the copies: their pages were replaced. The caller holds the pages.
    pub(super) fn forget_copies(&self) {
        let copies = &self.faults.copies;
        copies.unreported.take();
        copies.copied.clear();
        // Relaxed: only a thread that holds the pages changes it.
        copies.made.store(0, Ordering::Relaxed);
    }

    /// Writes the pages for which the file had no block, and maps them shared again. Nothing is made
    /// durable.
    ///
    /// # Errors
    /// [`MapError::Flush`]: the first bytes that could not be written. Their copies stay.
    pub fn write_copies(&self) -> Result<()> {
        self.check_process()?;
        let faults = &*self.faults;
        // Acquire pairs with the release in `keep_store`: the marks of this thread's own stores are
        // seen, since it has run that itself.
        if faults.copies.made.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        // `None` in a signal handler that has interrupted the holder: it is being done.
        let Some(_held) = faults.holds.hold() else { return Ok(()) };
        faults.copies.unreported.take();
        let pagemap = Pagemap::open().ok();
        let mut failed: Option<(Range<u64>, FlushCause)> = None;
        let mut from = 0;
        while let Some(start) = faults.copies.copied.next(from..faults.pages) {
            let most = (start + HELD_PAGES).min(faults.pages);
            let end = (start..most).find(|&page| !faults.copies.copied.get(page)).unwrap_or(most);
            from = end;
            self.write_run(start..end, pagemap.as_ref(), &mut |bytes, cause| match &mut failed {
                None => failed = Some((bytes, cause)),
                Some((all, first)) if all.end == bytes.start && *first == cause => {
                    all.end = bytes.end;
                }
                Some(_) => {}
            });
        }
        match failed {
            None => {
                // Relaxed: only a thread that holds the pages changes it.
                let is_any = faults.copies.copied.next(0..faults.pages).is_some();
                faults.copies.made.store(usize::from(is_any), Ordering::Relaxed);
                Ok(())
            }
            Some((range, cause)) => {
                Err(MapError::Flush { path: self.path().to_owned(), range, cause })
            }
        }
    }

    /// In a forked child: an error if a range of the file has a copy, which is not the child's to write.
    ///
    /// # Errors
    /// [`MapError::Flush`].
    pub fn check_copies(&self, bytes: &Range<u64>) -> Result<()> {
        let page = |byte: u64| ((byte - self.first_byte()) / PAGE) as usize;
        match self.faults.copies.copied.next(page(bytes.start)..page(bytes.end - 1) + 1) {
            None => Ok(()),
            Some(page) => Err(MapError::Flush {
                path: self.path().to_owned(),
                range: self.bytes_of(page),
                cause: FlushCause::NoSpace,
            }),
        }
    }

    /// As [`Writable::write_copies`], for adjacent copies. The caller holds them.
    fn write_run(
        &self,
        run: Range<usize>,
        pagemap: Option<&Pagemap>,
        failed: &mut dyn FnMut(Range<u64>, FlushCause),
    ) {
        let faults = &*self.faults;
        let is_protected = faults.protect(&run, Protection::Read);
        #[cfg(test)]
        super::test_support::held();
        let start = faults.address_of(run.start).addr();
        let mut stored = vec![false; run.len()];
        let found = pagemap.is_some_and(|pagemap| {
            let addresses = start..start + run.len() * SMALL_PAGE_BYTES;
            let mut note = |found: Range<usize>| {
                let page = |address: usize| (address - start) / SMALL_PAGE_BYTES;
                stored[page(found.start)..page(found.end)].fill(true);
            };
            pagemap.private_pages(addresses, &mut note).is_ok()
        });
        for page in run.clone() {
            let written = match !found || stored[page - run.start] {
                // Zeros in place of a copy that was lost when the file was cut short.
                _ if faults.is_replaced(page) => Ok(()),
                _ if !is_protected => Err((self.bytes_of(page), FlushCause::Io(libc::ENOMEM))),
                true => self.write_copy(page),
                false => Ok(()),
            };
            // What was stored behind the end is gone with its page.
            let is_done = matches!(written, Ok(()) | Err((_, FlushCause::Truncated)));
            if let Err((bytes, cause)) = written {
                failed(bytes, cause);
            }
            if is_done && (faults.is_replaced(page) || faults.map_file(page..page + 1).is_ok()) {
                faults.copies.copied.take(page);
            }
        }
        while !faults.allow_stores(run.clone()) {
            std::thread::yield_now();
        }
    }

    /// Unmaps the pages of a range of the file, except copies, which exist nowhere else. They stay in
    /// the page cache.
    pub fn unmap_shared(&self, bytes: &Range<u64>) {
        let faults = &*self.faults;
        // No copy is made meanwhile. This is no signal handler.
        let Some(_held) = faults.holds.hold() else { return };
        let page = |byte: u64| ((byte - self.first_byte()) / PAGE) as usize;
        let (mut from, end) = (page(bytes.start), page(bytes.end));
        while from < end {
            let copy = faults.copies.copied.next(from..end).unwrap_or(end);
            if from < copy {
                let len_bytes = (copy - from) * SMALL_PAGE_BYTES;
                // SAFETY: pages that are mapped shared, or show zeros: no contents are lost. A
                // failure leaves them in memory.
                let _ =
                    unsafe { memory::advise(faults.address_of(from), len_bytes, Advice::DontNeed) };
            }
            from = copy + 1;
        }
    }

    /// The bytes of the file that a page shows of the view.
    fn bytes_of(&self, page: usize) -> Range<u64> {
        let (start, view) = (self.first_byte() + page as u64 * PAGE, self.view_in_file());
        start.max(view.start)..(start + PAGE).min(view.end)
    }

    /// Writes a copy, to which no thread stores.
    fn write_copy(&self, page: usize) -> std::result::Result<(), (Range<u64>, FlushCause)> {
        let bytes = self.bytes_of(page);
        let failed = |error: &std::io::Error| (bytes.clone(), FlushCause::of_write(error));
        let file_len_bytes = self.file_len_bytes().map_err(|error| failed(&error))?;
        let end = bytes.end.min(file_len_bytes);
        if end <= bytes.start {
            return Err((bytes, FlushCause::Truncated));
        }
        let mut content = [0; SMALL_PAGE_BYTES];
        let content = &mut content[..(end - bytes.start) as usize];
        // SAFETY: bytes of the mapping, and a buffer of their length.
        let is_there = unsafe {
            fallible::try_copy(self.address_of(bytes.start), content.as_mut_ptr(), content.len())
        };
        if !is_there {
            return Err((bytes, FlushCause::Truncated));
        }
        aquifer_sys::io::write_all_at(self.file(), content, bytes.start)
            .map_err(|error| failed(&error))
    }
}
