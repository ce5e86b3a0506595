//! The user backend: faults served in user space, exact budget, own policy.
//!
//! A fault arrives from the signal handler of the faulting thread or, with a serving thread, as a
//! message. Either way `serve_page` makes the page usable with the same `ensure` that every call uses.
//! If that fails, a bare access cannot return the reason: the error is recorded and the fault is
//! passed to the previous handler, which by default ends the process with SIGBUS, as with mmap.
//!
//! The signal handler runs in the thread that faults, whose access keeps the mapping alive. A message is about another thread,
//! which may drop the mapping as soon as it is awake, or may have been interrupted and have dropped it: the server holds a
//! reference to the store (`Engine::store_at`) while it answers, and wakes the thread when it has given it back. No call
//! that changes the page table wakes a thread.
//!
//! Where that is asked for, the fault is answered with a page of zeros instead, noted, and reported by a later call; so are all
//! faults of absent pages until then, without the device. The page stays Absent: calls load it, and only bare loads find
//! zeros. They are installed and taken away by a thread that has moved the page to Loading, so that no other installs it
//! meanwhile. Such memory is only read, as stores to zeros would be lost.

pub(crate) mod mapped_memory;
pub(crate) mod serving;

use std::io;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::{Device, DeviceError, IoOperation};
use aquifer_sys::signal::FaultContext;
use aquifer_sys::uffd::FaultMessage;
use aquifer_vm::readahead::Pattern;
use aquifer_vm::{FaultOwner, Served};

use self::mapped_memory::MappedMemory;
use crate::engine::{Answer, BareCause, BareFault, Engine, Kind};
use crate::error::{CacheError, Result};
use crate::geometry::Geometry;
use crate::ids::PageId;
use crate::map_options::Advice;
use crate::page_word::{PinKind, State};
use crate::stats::count;
use crate::store::{Access, Ensured, PageMemory, Refused, Store};
use crate::sync::{Ordering, fence};

const _: () = assert!(<MappedMemory as PageMemory>::CONTIGUOUS, "bytes() of a range is one run");

/// A device mapped by the user backend.
pub(crate) type UserStore = Store<MappedMemory>;

impl Store<MappedMemory> {
    /// Maps a device and attaches it to the engine.
    pub fn map(
        engine: Arc<Engine>,
        device: Arc<dyn Device>,
        geometry: Geometry,
        writable: bool,
    ) -> Result<Arc<UserStore>> {
        let memory = MappedMemory::new(engine.clone(), geometry, writable)?;
        let store = Store::new(engine.clone(), device, geometry, writable, memory)?;
        let mut store = Arc::new(store);
        let id = store.id;
        let owner: *const UserStore = Arc::as_ptr(&store);
        let reservation = &mut Arc::get_mut(&mut store).expect("not shared yet").memory.reservation;
        // SAFETY: the reservation is dropped with the store it names as its owner.
        unsafe { reservation.set_owner(owner) }.inspect_err(|_| engine.release_id(id))?;
        engine.attach(id, store.clone(), Kind::Mapped)?;
        Ok(store)
    }

    /// Calls `work` with the address and the part of the range on each page; pins one page at a
    /// time.
    pub fn for_each_page(
        &self,
        offset_bytes: u64,
        len: usize,
        access: Access,
        mut work: impl FnMut(*mut u8, Range<usize>),
    ) -> Result<()> {
        let pages = self.geometry.pages_of(offset_bytes, len as u64)?;
        let end = offset_bytes + len as u64;
        for page in pages {
            let first = self.geometry.offset_of(page).max(offset_bytes);
            let last = self.geometry.offset_of(page + 1).min(end);
            let pin = if access == Access::Write { PinKind::Write } else { PinKind::Read };
            self.ensure(page, access, Some(pin), false)
                .map_err(|refused| self.error(page, refused))?;
            let address = self.memory.address(0).wrapping_add(first as usize);
            let start = (first - offset_bytes) as usize;
            work(address, start..start + (last - first) as usize);
            self.unpin(page);
        }
        Ok(())
    }

    /// Whether a load from the page at an offset does not fault. Costs one load.
    #[inline]
    pub fn touch_resident(&self, offset_bytes: u64) -> bool {
        if offset_bytes >= self.geometry.len_bytes {
            return false;
        }
        let seen = self.seen(self.geometry.page_of(offset_bytes));
        if !seen.is_readable() {
            return false;
        }
        self.pool().hit(seen.frame());
        true
    }

    /// Makes a page usable for an access.
    pub fn touch(&self, page: u64, access: Access) -> Result<()> {
        self.ensure(page, access, None, false)
            .map(drop)
            .map_err(|refused| self.error(page, refused))
    }

    /// Loads many runs of pages.
    pub fn touch_runs(&self, pages: &[Range<u64>]) -> Result<()> {
        self.touch_many(pages).map_err(|(page, refused)| self.error(page, refused))
    }

    /// Applies advice to a run of pages.
    pub fn advise(&self, pages: Range<u64>, advice: Advice) {
        match advice {
            Advice::Normal => self.readahead.set_pattern(Pattern::Detect),
            Advice::Sequential => self.readahead.set_pattern(Pattern::Sequential),
            Advice::Random => self.readahead.set_pattern(Pattern::Random),
            Advice::WillNeed => self.hint(vec![pages]),
            Advice::DontNeed => {
                let _ = self.write_back(pages.clone());
                self.discard_clean(self.may_be_resident(pages));
            }
            Advice::Cold => {
                for seen in self.may_be_resident(pages).map(|page| self.seen(page)) {
                    if seen.is_resident() {
                        self.pool().demoted(seen.frame());
                    }
                }
            }
        }
    }

    fn record(&self, page: u64, cause: BareCause) {
        self.engine.record_bare_fault(BareFault { store: self.id, page: PageId(page), cause });
    }

    /// From now on bare loads of pages that cannot be loaded find zeros, unless the memory may be stored to.
    pub fn answer_faults(&self) {
        let is_stored_to = self.memory.zeros.is_stored_to.lock();
        if !*is_stored_to {
            self.memory.zeros.missed.answer();
        }
    }

    /// Installs zeros at a page, unless another thread has brought it or does so: then the load tries again. False if the kernel
    /// refuses. Async-signal-safe.
    fn answer_with_zeros(&self, page: u64) -> bool {
        let word = self.word(page);
        let seen = word.load();
        if seen.state() != State::Absent || word.begin_load(seen).is_err() {
            return true;
        }
        let zeros = &self.memory.zeros;
        // Before a thread can see them. First where they are, so that a call that takes the note finds them: or the load
        // that it waits for.
        zeros.regions.set(self.geometry.region_of(page));
        fence(Ordering::SeqCst);
        zeros.missed.note(self.geometry.offset_of(page));
        // The mark of an access that failed would stay in their place, and raise SIGBUS again.
        self.memory.discard_zeros(page);
        // SAFETY: this thread has moved the page to Loading.
        let installed = unsafe { self.memory.install_zeros(page) };
        word.abort_load();
        installed.is_ok()
    }

    /// The first bare load since the last call that found zeros, as an error; takes all zeros away.
    pub fn take_missed(&self) -> Option<CacheError> {
        let zeros = &self.memory.zeros;
        let changing = zeros.is_stored_to.lock();
        let offset_bytes = zeros.missed.take()?;
        fence(Ordering::SeqCst);
        for region in zeros.regions.iter() {
            zeros.regions.clear(region);
            fence(Ordering::SeqCst);
            for page in self.geometry.pages_of_region(region) {
                let word = self.word(page);
                loop {
                    let seen = word.load();
                    match seen.state() {
                        State::Absent if word.begin_load(seen).is_ok() => {
                            self.memory.discard_zeros(page);
                            word.abort_load();
                            break;
                        }
                        State::Absent => {}
                        State::Loading => word.wait(seen),
                        // Loaded since, which has replaced them.
                        _ => break,
                    }
                }
            }
        }
        // Not during a call of the device.
        drop(changing);
        // The device's own error, if it still fails.
        let page = self.geometry.page_of(offset_bytes);
        let met = BareFault { store: self.id, page: PageId(page), cause: BareCause::Device };
        let again = self.touch(page, Access::Read).err();
        Some(again.unwrap_or_else(|| self.bare_fault_error(met)))
    }

    /// A bare access that failed, as an error.
    pub fn bare_fault_error(&self, fault: BareFault) -> CacheError {
        let offset_bytes = self.geometry.offset_of(fault.page.0);
        let len_bytes = self.geometry.page_bytes;
        let io = |source| DeviceError::Io {
            operation: IoOperation::Read,
            offset_bytes,
            len_bytes,
            source,
        };
        let source = match fault.cause {
            BareCause::UnderItself => {
                return CacheError::UnderItself { device: self.device().name().to_owned() };
            }
            BareCause::System(errno) => io(io::Error::from_raw_os_error(errno)),
            BareCause::ShortRead { got_bytes } => {
                DeviceError::ShortRead { offset_bytes, len_bytes, got_bytes }
            }
            BareCause::OutOfBounds { device_bytes } => {
                DeviceError::OutOfBounds { offset_bytes, len_bytes, device_bytes }
            }
            BareCause::Device => io(io::Error::other(
                "an error of the device itself, which a call that returns it will tell",
            )),
        };
        CacheError::Load { device: self.device().name().to_owned(), offset_bytes, source }
    }
}

impl FaultOwner for UserStore {
    fn serve(&self, fault: &FaultContext) -> Served {
        // Faults that userfaultfd leaves to user space arrive as SIGBUS. SIGSEGV means that the
        // access is not allowed at all (a store to a read-only mapping, a jump into one); retrying
        // it would never end.
        if fault.signal == libc::SIGSEGV || !self.engine.mark.is_current() {
            return Served::No;
        }
        let page = self.page_at(fault.address);
        if page >= self.geometry.pages() {
            return Served::No;
        }
        if fault.hardware_error {
            self.record(page, BareCause::System(libc::EHWPOISON));
            return Served::No;
        }
        // If the hardware does not report the kind of access: a fault on a resident page is a store
        // to a protected page, or another thread has loaded the page. In a read-only mapping it can
        // only be the latter, because a store arrives as SIGSEGV.
        let write = fault
            .write
            .unwrap_or_else(|| self.writable() && self.seen(page).state() == State::Clean);
        if write && !self.writable() {
            return Served::No;
        }
        count(&self.engine.counters.signals, 1);
        match self.serve_page(page, write, fault.fallible, true) {
            Ok(()) => Served::Yes,
            Err(_) => Served::No,
        }
    }
}

impl Store<MappedMemory> {
    /// The page at an address of the mapping.
    pub fn page_at(&self, address: usize) -> u64 {
        ((address - self.memory.address(0) as usize) / self.geometry.page_bytes) as u64
    }

    /// Answers a fault message; see `AttachedStore::answer`.
    pub fn answer_message(&self, fault: &FaultMessage, may_wait: bool) -> Answer {
        let page = self.page_at(fault.address);
        let write = fault.write || fault.write_protected;
        // A store to memory that is only read raises SIGSEGV: such a message is about a mapping that was here before.
        if write && !self.writable() {
            return Answer::Served;
        }
        if !may_wait {
            let is_served = self.is_served_at_once(page, write);
            return if is_served { Answer::Served } else { Answer::Waits };
        }
        match self.serve_page(page, write, false, false) {
            Ok(()) => Answer::Served,
            Err(Refused::NoFrame(_)) => Answer::Waits,
            Err(_) => {
                self.poison(page);
                Answer::Failed
            }
        }
    }

    /// Makes a page that is there usable for a bare access, unless a thread is working on it.
    fn is_served_at_once(&self, page: u64, write: bool) -> bool {
        let seen = self.seen(page);
        match seen.state() {
            // If the kernel refuses, the access tries again.
            State::Clean if write => {
                let begun = self.word(page).begin_unprotect(seen).is_ok();
                if begun {
                    let _ = self.unprotect(page, false);
                }
                begun
            }
            State::Clean | State::Dirty => {
                count(&self.engine.counters.late_faults, 1);
                true
            }
            State::Cleaning => !write,
            _ => false,
        }
    }

    /// Makes accesses to an absent page raise SIGBUS. If it is not absent, another thread has brought it or does so, and the
    /// access tries again; also if the kernel has no memory for it.
    fn poison(&self, page: u64) {
        let word = self.word(page);
        let seen = word.load();
        if seen.state() == State::Absent && word.begin_load(seen).is_ok() {
            let _ = self.memory.poison(page);
            word.abort_load();
        }
    }

    /// Undoes [`Store::poison`]: the next access to the page raises no SIGBUS before it was tried to load it. Returns false while
    /// another thread works on the page, whose load may fail and leave the mark.
    pub fn take_poison(&self, page: u64) -> bool {
        let word = self.word(page);
        let seen = word.load();
        match seen.state() {
            State::Absent if word.begin_load(seen).is_ok() => {
                self.memory.discard_zeros(page);
                word.abort_load();
                true
            }
            // A page that was loaded since has no mark.
            state => !matches!(state, State::Absent | State::Loading),
        }
    }

    /// Makes a page usable for a bare access, or records why it is not. With `patient`, waits for a frame indefinitely;
    /// otherwise it is not recorded that there is none.
    fn serve_page(
        &self,
        page: u64,
        write: bool,
        fallible: bool,
        patient: bool,
    ) -> std::result::Result<(), Refused> {
        let access = if write { Access::Write } else { Access::Read };
        let missed = &self.memory.zeros.missed;
        let answers = missed.is_wanted() && !write && !fallible;
        // One load is to be reported already: what follows it is not worth a wait for each page.
        let at_once = answers && missed.is_noted() && self.seen(page).state() == State::Absent;
        if at_once && self.answer_with_zeros(page) {
            return Ok(());
        }
        match self.ensure(page, access, None, patient) {
            Ok(Ensured::Came) => Ok(()),
            Ok(Ensured::Present) => {
                count(&self.engine.counters.late_faults, 1);
                Ok(())
            }
            Err(no_frame @ Refused::NoFrame(_)) if !patient => Err(no_frame),
            Err(refused) => {
                self.record(page, refused.cause());
                if answers && self.answer_with_zeros(page) {
                    return Ok(());
                }
                Err(refused)
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Cache;
    use crate::mapping::{Mapping, Served as ServedBy};
    use aquifer_device::MemoryDevice;

    fn store_of(mapping: &Mapping) -> &Arc<UserStore> {
        match &mapping.served {
            ServedBy::User(store, _) => store,
            ServedBy::Kernel(..) => unreachable!("memory has no page cache"),
        }
    }

    #[test]
    fn only_absent_pages_are_poisoned() {
        let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
        let mapping = cache.map(MemoryDevice::from_bytes(&[7; 8192]).unwrap()).unwrap();
        let store = store_of(&mapping);
        if !cache.running.engine.uffd().unwrap().can_poison() {
            eprintln!("skipped: no UFFDIO_POISON");
            return;
        }
        mapping.touch(0).unwrap();
        for page in [0, 1] {
            store.poison(page);
        }
        assert_eq!([0, 1].map(|page| store.seen(page).state()), [State::Clean, State::Absent]);
        // SAFETY: inside the mapping.
        assert_eq!(unsafe { mapping.as_ptr().read_volatile() }, 7);
        // A load replaces the mark.
        assert_eq!(mapping.get::<u8>(4096).unwrap(), 7);
        // SAFETY: as above.
        assert_eq!(unsafe { mapping.as_ptr().add(4096).read_volatile() }, 7);
    }

    #[test]
    fn few_pages_of_a_large_mapping_are_found_by_their_frames() {
        const REGIONS: u64 = 300;
        let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
        let device = MemoryDevice::new(REGIONS as usize * (2 << 20)).unwrap();
        let mapping = cache.map(device).unwrap();
        mapping.advise(0..mapping.len(), Advice::Random).unwrap();
        let store = store_of(&mapping);
        let touched: Vec<_> = (0..REGIONS).map(|region| region * 512 + region % 7).collect();
        for page in touched.iter().rev() {
            mapping.get::<u8>(page * 4096).unwrap();
        }
        let pages = store.geometry.pages();
        assert_eq!(store.may_be_resident(0..pages).collect::<Vec<_>>(), touched);
        assert_eq!(store.may_be_resident(1..pages - 512).collect::<Vec<_>>(), touched[1..299]);
        assert_eq!(store.may_be_resident(512..514).collect::<Vec<_>>(), [512, 513]);
    }

    #[test]
    fn a_message_about_a_mapping_that_is_gone_finds_no_store() {
        let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
        let engine = &cache.running.engine;
        let mapping = cache.map(MemoryDevice::new(8192).unwrap()).unwrap();
        let first = mapping.as_ptr() as usize;
        let found = [first - 1, first, first + 8191, first + 8192];
        let is_found = found.map(|address| engine.store_at(address).is_some());
        assert_eq!(is_found, [false, true, true, false]);
        drop(mapping);
        assert!(engine.store_at(first).is_none());
    }
}
