//! The memory of a user-backed mapping: anonymous pages that userfaultfd installs.
//!
//! A page's bytes are at a fixed address; installing it copies from a buffer (`UFFDIO_COPY`). A
//! clean page of a writable mapping is installed write-protected, so that the first store to it
//! faults. Moving pages from a pool instead (`UFFDIO_MOVE`, shared memory with `UFFDIO_CONTINUE`)
//! measured slower: each needs one more page-table change.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use aquifer_sys::futex::Mutex;
use aquifer_sys::memory::{self, Advice, Protection};
use aquifer_sys::uffd::{FaultMessage, Installed};
use aquifer_vm::{Arena, Missed, Reservation};

use crate::bits::Bits;
use crate::engine::{Answer, Engine, Kind};
use crate::error::{CacheError, Result};
use crate::frames::FramePool;
use crate::geometry::{Geometry, MAX_REGION_PAGES};
use crate::ids::FrameId;
use crate::lazy::LazyArray;
use crate::page_word::PageWord;
use crate::store::{PageMemory, Store, page_table};

/// The memory of a mapping. See the module documentation.
pub(crate) struct MappedMemory {
    /// Before `engine` in drop order: the range is registered with the engine's userfaultfd.
    pub reservation: Reservation,
    engine: Arc<Engine>,
    words: LazyArray<PageWord>,
    page_bytes: usize,
    len_bytes: usize,
    /// Whether stores to clean pages can be made to fault. If not, the mapping is read-only.
    protects: bool,
    pub zeros: Zeros,
}

/// Pages of zeros that bare loads were answered with, at absent pages of memory that is only read. See
/// [`user`](crate::user).
pub(crate) struct Zeros {
    pub missed: Missed,
    /// One bit per region: a page of zeros may be there. Set before one is installed, while its page is Loading; cleared before the
    /// region's pages are looked at.
    pub regions: Bits,
    /// Whether the memory may be stored to. Held while zeros are asked for, or taken away.
    pub is_stored_to: Mutex<bool>,
}

impl MappedMemory {
    /// Maps and registers the range; no page is present yet.
    pub fn new(engine: Arc<Engine>, geometry: Geometry, writable: bool) -> Result<MappedMemory> {
        let words = page_table(geometry.pages())?;
        let len = geometry.pages() as usize * geometry.page_bytes;
        let reservation = Arena::global()?.allocate(len)?;
        let protection = if writable { Protection::ReadWrite } else { Protection::Read };
        reservation.map_anonymous(len, protection)?;
        let base = reservation.address();
        let kernel = |what| move |source| CacheError::Kernel { what, source };
        // With huge pages one fault would install 512 pages. Fails harmlessly where the kernel has
        // none.
        // SAFETY: our own range.
        let _ = unsafe { memory::advise(base, len, Advice::NoHugePage) };
        // Register for write protection even if read-only: another mapping of the device may become
        // writable.
        let registered = engine.uffd()?.register(base, len, true);
        let protects = registered.is_ok();
        let registered = match registered {
            // Some architectures do not support write protection.
            Err(_) if !writable => engine.uffd()?.register(base, len, false),
            registered => registered,
        };
        registered.map_err(kernel("registering a range with userfaultfd"))?;
        let zeros = Zeros {
            missed: Missed::new(),
            regions: Bits::new(geometry.regions()).map_err(kernel("reserving page tables"))?,
            is_stored_to: Mutex::new(writable),
        };
        Ok(MappedMemory {
            reservation,
            zeros,
            engine,
            words,
            page_bytes: geometry.page_bytes,
            len_bytes: len,
            protects,
        })
    }

    #[inline]
    pub fn address(&self, page: u64) -> *mut u8 {
        self.reservation.address().wrapping_add(page as usize * self.page_bytes)
    }

    fn len(&self, pages: &Range<u64>) -> usize {
        (pages.end - pages.start) as usize * self.page_bytes
    }

    fn uffd(&self) -> &aquifer_sys::uffd::Uffd {
        self.engine.uffd_if_open().expect("opened before the range was registered")
    }

    /// Installs zeros at an absent page.
    ///
    /// # Safety
    /// The page is Loading and owned by the caller.
    pub unsafe fn install_zeros(&self, page: u64) -> io::Result<()> {
        // SAFETY: the caller's.
        unsafe { self.uffd().zeros(self.address(page), self.page_bytes) }
    }

    /// Discards what [`MappedMemory::install_zeros`] or [`MappedMemory::poison`] installed at a page that is Loading and owned by
    /// the caller.
    pub fn discard_zeros(&self, page: u64) {
        // A load of the page discards what this could not.
        let _ = self.discard_each(std::slice::from_ref(&(page..page + 1)));
    }

    /// Makes accesses to an absent page raise SIGBUS, until it is loaded. The page is Loading and owned by the caller.
    pub fn poison(&self, page: u64) -> io::Result<()> {
        self.uffd().poison(self.address(page), self.page_bytes)
    }

    fn discard_each(&self, runs: &[Range<u64>]) -> io::Result<()> {
        for run in runs {
            // SAFETY: the pages are Evicting or Loading, so no thread uses them, and their bytes
            // are on the device.
            unsafe { memory::advise(self.address(run.start), self.len(run), Advice::DontNeed) }?;
        }
        Ok(())
    }
}

impl PageMemory for MappedMemory {
    const CONTIGUOUS: bool = true;
    const PROTECTS: bool = true;
    const KIND: Kind = Kind::Mapped;

    #[inline]
    fn word(&self, page: u64) -> &PageWord {
        &self.words[page as usize]
    }

    #[inline]
    fn pool<'a>(&self, engine: &'a Engine) -> &'a FramePool {
        &engine.mapped
    }

    fn bytes(&self, page: u64, _frame: FrameId) -> *mut u8 {
        self.address(page)
    }

    fn landing(&self, _frame: FrameId) -> Option<*mut u8> {
        None
    }

    unsafe fn install(
        &self,
        first: u64,
        frames: &[FrameId],
        data: *const u8,
        protect: bool,
    ) -> io::Result<()> {
        let pages = first..first + frames.len() as u64;
        let (target, len) = (self.address(first), self.len(&pages));
        // SAFETY: the caller is loading these pages and owns the data.
        let copy = || unsafe { self.uffd().copy(target, data, len, protect && self.protects) };
        let installed = match copy() {
            Ok(Installed::AlreadyThere) => {
                // It can only be a poison marker of an earlier failed load, or zeros: no other thread
                // installs pages that this one is loading.
                self.discard_each(std::slice::from_ref(&pages))?;
                copy()
            }
            installed => installed,
        };
        if installed.is_err() {
            // Part of the range may have been installed. Discard it: stores to it would not fault
            // while its page counts as absent, and the next load would discard them.
            let _ = self.discard_each(std::slice::from_ref(&pages));
        }
        installed.map(drop)
    }

    fn protect(&self, pages: Range<u64>) -> io::Result<()> {
        self.uffd().write_protect(self.address(pages.start), self.len(&pages), true)
    }

    fn make_writable(&self) -> io::Result<()> {
        if !self.protects {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let mut is_stored_to = self.zeros.is_stored_to.lock();
        if self.zeros.missed.is_wanted() {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        *is_stored_to = true;
        let base = self.reservation.address();
        // SAFETY: our own range, to which no references exist. Its pages were installed protected,
        // so the first store to each still faults.
        unsafe { memory::protect(base, self.len_bytes, Protection::ReadWrite) }
    }

    fn unprotect(&self, page: u64) -> io::Result<()> {
        self.uffd().write_protect(self.address(page), self.page_bytes, false)
    }

    fn discard(&self, runs: &[Range<u64>]) -> io::Result<()> {
        if !self.engine.vectored_discard || runs.len() == 1 {
            return self.discard_each(runs);
        }
        let mut vector =
            [memory::Range { address: std::ptr::null_mut(), len_bytes: 0 }; MAX_REGION_PAGES];
        let mut wanted = 0;
        for (slot, run) in vector.iter_mut().zip(runs) {
            *slot = memory::Range { address: self.address(run.start), len_bytes: self.len(run) };
            wanted += slot.len_bytes;
        }
        // SAFETY: the pages are Evicting: no thread uses them, and their bytes are on the device.
        match unsafe { memory::advise_many(&vector[..runs.len()], Advice::DontNeed) } {
            Ok(done) if done == wanted => Ok(()),
            // Interrupted partway: discarding twice is harmless.
            _ => self.discard_each(runs),
        }
    }

    fn discards_vectored(&self) -> bool {
        self.engine.vectored_discard
    }

    fn addresses(&self) -> Range<usize> {
        let first = self.reservation.address() as usize;
        first..first + self.len_bytes
    }

    fn answer(store: &Store<MappedMemory>, fault: &FaultMessage, may_wait: bool) -> Answer {
        store.answer_message(fault, may_wait)
    }

    fn try_again(store: &Store<MappedMemory>, address: usize) -> bool {
        store.take_poison(store.page_at(address))
    }
}
