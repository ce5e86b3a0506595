//! One device attached to a cache: its pages, and how they are loaded.
//!
//! [`Store`] is the same for `Mapping` and `Pages`. They differ in where a resident page's bytes
//! are and in how pages are installed, discarded and write-protected: that is the [`PageMemory`]
//! behind the store.
//!
//! ```text
//!            Mapping                         Pages
//!               │                              │
//!        Store<MappedMemory>            Store<ArenaMemory>       load · evict · write back · flush
//!               │                              │
//!     userfaultfd, page tables        frames of a huge-page arena
//! ```
//!
//! Loading: `ensure` reads the page word and does what the state requires: it loads the page,
//! waits, unprotects it, or does nothing. The fault handler and every call that returns `Result`
//! use it; they differ only in how they handle an error.

pub(crate) mod attached;
pub(crate) mod batch;
pub(crate) mod claims;
pub(crate) mod dirty;
mod evict;
pub(crate) mod gate;
mod guess;
pub(crate) mod write_style;
pub(crate) mod writeback;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use aquifer_device::{Device, DeviceError};
use aquifer_sys::futex::Mutex;
use aquifer_sys::memory::SMALL_PAGE_BYTES;
use aquifer_sys::uffd::FaultMessage;
use aquifer_vm::readahead::{Reach, ReadAhead};

use self::dirty::DirtyMap;
use self::gate::Gates;
use self::guess::Guesses;
use self::write_style::WriteStyle;
use crate::bits::Bits;
use crate::engine::bounce::Bounce;
use crate::engine::duties::{self, Height};
use crate::engine::{Answer, BareCause, Cleaning, Engine, Kind, NoFrame};
use crate::error::{CacheError, Result};
use crate::frames::{BATCH, FramePool};
use crate::geometry::Geometry;
use crate::ids::{FrameId, PageId, PageKey, StoreId};
use crate::lazy::{LazyArray, ZeroInit};
use crate::page_word::{MAX_PINS, PageWord, PinKind, PinRefused, Seen, State};
use crate::stats::count;

/// Where resident pages are, and how they are installed and discarded. Errors are the kernel's.
pub(crate) trait PageMemory: Send + Sync + 'static {
    /// Whether consecutive pages are adjacent in memory.
    const CONTIGUOUS: bool;
    /// Whether a store to a clean page faults, so that pages are installed write-protected.
    const PROTECTS: bool;
    /// The share of the budget that its frames come from.
    const KIND: Kind;

    /// The word of a page.
    fn word(&self, page: u64) -> &PageWord;

    /// The frame pool of these pages.
    fn pool<'a>(&self, engine: &'a Engine) -> &'a FramePool;

    /// The bytes of a resident page.
    fn bytes(&self, page: u64, frame: FrameId) -> *mut u8;

    /// The buffer a single page may be read into directly, so that [`PageMemory::install`] need not
    /// copy.
    fn landing(&self, frame: FrameId) -> Option<*mut u8>;

    /// Installs `frames.len()` pages from `first` with the bytes at `data`.
    ///
    /// # Safety
    /// `data` must be readable for the pages, which are Loading and owned by the caller.
    unsafe fn install(
        &self,
        first: u64,
        frames: &[FrameId],
        data: *const u8,
        protect: bool,
    ) -> std::io::Result<()>;

    /// Write-protects a run of pages, so that stores to them fault.
    fn protect(&self, pages: Range<u64>) -> std::io::Result<()>;

    /// Makes read-only memory writable; resident pages stay write-protected.
    fn make_writable(&self) -> std::io::Result<()>;

    /// Lifts the write protection of a page.
    fn unprotect(&self, page: u64) -> std::io::Result<()>;

    /// Discards runs of pages with as few calls as possible. All are Evicting and owned by the
    /// caller.
    fn discard(&self, runs: &[Range<u64>]) -> std::io::Result<()>;

    /// Whether one call can discard scattered pages. If not, the evictor works by region.
    fn discards_vectored(&self) -> bool;

    /// The addresses of the pages; empty if their bytes are in frames.
    fn addresses(&self) -> Range<usize> {
        0..0
    }

    /// Answers a fault of another thread at one of the addresses; see `AttachedStore::answer`.
    fn answer(store: &Store<Self>, fault: &FaultMessage, may_wait: bool) -> Answer
    where
        Self: Sized,
    {
        let _ = (store, may_wait);
        unreachable!("a fault at {:#x}, where no page is", fault.address);
    }

    /// See `AttachedStore::try_again`.
    fn try_again(_store: &Store<Self>, address: usize) -> bool
    where
        Self: Sized,
    {
        unreachable!("a fault at {address:#x}, where no page is");
    }
}

/// The kind of access to a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// What `ensure` had to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ensured {
    /// The page was resident.
    Present,
    /// The page was loaded, or the thread waited for it.
    Came,
}

/// Why a page could not be made usable. Small, and built without allocating.
#[derive(Debug)]
pub(crate) enum Refused {
    Device(DeviceError),
    Kernel(std::io::Error),
    NoFrame(NoFrame),
    TooManyPins,
    /// See [`CacheError::UnderItself`].
    UnderItself,
}

impl Refused {
    /// The cause to record where nothing may be allocated.
    pub fn cause(&self) -> BareCause {
        match self {
            Refused::Device(DeviceError::Io { source, .. }) | Refused::Kernel(source) => {
                source.raw_os_error().map_or(BareCause::Device, BareCause::System)
            }
            &Refused::Device(DeviceError::ShortRead { got_bytes, .. }) => {
                BareCause::ShortRead { got_bytes }
            }
            &Refused::Device(DeviceError::OutOfBounds { device_bytes, .. }) => {
                BareCause::OutOfBounds { device_bytes }
            }
            Refused::UnderItself => BareCause::UnderItself,
            _ => BareCause::Device,
        }
    }
}

/// A table with an entry for each page of a device.
///
/// Wiped on fork: in a child every page reads as absent, so the hot paths, which check only the
/// word, fall through to the slow paths, which return an error.
pub(crate) fn page_table<T: ZeroInit>(pages: u64) -> Result<LazyArray<T>> {
    LazyArray::new(pages as usize)
        .and_then(LazyArray::wiped_on_fork)
        .map_err(|source| CacheError::Kernel { what: "reserving page tables", source })
}

/// One attached device. See the module documentation.
pub(crate) struct Store<M: PageMemory> {
    pub id: StoreId,
    pub engine: Arc<Engine>,
    /// The device that the store was attached with.
    first_device: Arc<dyn Device>,
    /// A writable device of the same bytes, if the first is read-only.
    writable_device: OnceLock<Arc<dyn Device>>,
    pub geometry: Geometry,
    pub height: Height,
    writable: AtomicBool,
    /// With the table of page words.
    pub memory: M,
    pub dirty: DirtyMap,
    pub gates: Gates,
    pub readahead: ReadAhead,
    pub write_style: WriteStyle,
    /// Held while snapshots of pages pinned for writing are taken and written, so that an older
    /// snapshot does not overwrite a newer one on the device. Only flushes take it.
    pub snapshots: Mutex<()>,
    /// The first failed sync of the device. Final: later successful syncs do not clear it.
    pub sync_failure: OnceLock<DeviceError>,
    /// One bit per region: a page was ever loaded into it. The teardown visits those.
    loaded: Bits,
    /// For each region, the write-backs that ended, modulo 2³². See `visit`.
    write_backs: LazyArray<AtomicU32>,
    /// Set once the store is writable, if stores to its clean pages fault and a page is installed at
    /// once. Without it, every page that is read is installed protected.
    guesses: OnceLock<Guesses>,
    /// It is about to be detached, and prefetches come to their end.
    pub leaving: AtomicBool,
}

impl<M: PageMemory> Store<M> {
    /// A store with a newly reserved identifier, which [`Engine::attach`] registers.
    pub fn new(
        engine: Arc<Engine>,
        device: Arc<dyn Device>,
        geometry: Geometry,
        writable: bool,
        memory: M,
    ) -> Result<Store<M>> {
        let kernel = |source| CacheError::Kernel { what: "reserving page tables", source };
        let dirty = DirtyMap::new(geometry.pages()).map_err(kernel)?;
        let gates = Gates::new(geometry.regions()).map_err(kernel)?;
        let loaded = Bits::new(geometry.regions()).map_err(kernel)?;
        let write_backs = LazyArray::new(geometry.regions()).map_err(kernel)?;
        let height = Height::new(engine.callers.clone());
        let store = Store {
            // Reserved after everything that can fail.
            id: engine.reserve_id(),
            dirty,
            gates,
            readahead: ReadAhead::new(engine.bounce.buffer_bytes() / geometry.page_bytes),
            write_style: WriteStyle::default(),
            snapshots: Mutex::new(()),
            sync_failure: OnceLock::new(),
            loaded,
            write_backs,
            guesses: OnceLock::new(),
            leaving: AtomicBool::new(false),
            engine,
            first_device: device,
            writable_device: OnceLock::new(),
            geometry,
            height,
            writable: AtomicBool::new(writable),
            memory,
        };
        if writable {
            store.make_guesses();
        }
        Ok(store)
    }

    /// Enables guesses, if there is memory for them.
    fn make_guesses(&self) {
        if M::PROTECTS
            && self.appears_at_once()
            && self.guesses.get().is_none()
            && let Ok(guesses) = Guesses::new(self.geometry.pages())
        {
            let _ = self.guesses.set(guesses);
        }
    }

    #[inline]
    pub fn pool(&self) -> &FramePool {
        self.memory.pool(&self.engine)
    }

    /// The device that the store was attached with.
    pub fn first_device(&self) -> &Arc<dyn Device> {
        &self.first_device
    }

    /// The device that pages are read from and written to.
    #[inline]
    pub fn device(&self) -> &Arc<dyn Device> {
        self.writable_device.get().unwrap_or(&self.first_device)
    }

    /// Whether any user of the store may store to its pages.
    #[inline]
    pub fn writable(&self) -> bool {
        // Acquire pairs with the release in `make_writable`.
        self.writable.load(Ordering::Acquire)
    }

    /// Makes a read-only store writable, through `device` if its own device is read-only. The table
    /// of claims ensures that one thread at a time calls this.
    pub fn make_writable(&self, device: Arc<dyn Device>) -> Result<()> {
        if !self.first_device.is_writable() {
            let _ = self.writable_device.set(device);
        }
        self.memory
            .make_writable()
            .map_err(|source| CacheError::Kernel { what: "making a mapping writable", source })?;
        // Release: a thread that reads `true` also sees the device that takes writes.
        self.writable.store(true, Ordering::Release);
        self.make_guesses();
        Ok(())
    }

    pub fn key(&self, page: u64) -> PageKey {
        PageKey { store: self.id, page: PageId(page) }
    }

    #[inline]
    pub fn word(&self, page: u64) -> &PageWord {
        self.memory.word(page)
    }

    /// Converts a refusal into the caller's error. Allocates, so it is not for the fault path.
    pub fn error(&self, page: u64, refused: Refused) -> CacheError {
        let device = || self.device().name().to_owned();
        let offset_bytes = self.geometry.offset_of(page);
        match refused {
            Refused::Device(source) => CacheError::Load { device: device(), offset_bytes, source },
            Refused::Kernel(source) => CacheError::Kernel { what: "installing a page", source },
            Refused::NoFrame(NoFrame { pinned, unwritable }) => {
                CacheError::Exhausted { pinned, unwritable }
            }
            Refused::TooManyPins => CacheError::TooManyPins { offset_bytes, pins: MAX_PINS },
            Refused::UnderItself => CacheError::UnderItself { device: device() },
        }
    }

    /// Makes `page` usable for `access`, pinned if requested.
    ///
    /// With `patient` it waits for a frame indefinitely: for the fault handler, where an error
    /// would kill the process.
    pub fn ensure(
        &self,
        page: u64,
        access: Access,
        pin: Option<PinKind>,
        patient: bool,
    ) -> std::result::Result<Ensured, Refused> {
        if self.height.is_in_a_refused_call() {
            return Err(Refused::UnderItself);
        }
        let word = self.word(page);
        let mut ensured = Ensured::Present;
        loop {
            let seen = word.load();
            match seen.state() {
                State::Absent if self.height.is_under_itself() => {
                    return Err(Refused::UnderItself);
                }
                State::Absent => {
                    let started = Instant::now();
                    // Acquire the frame before the page becomes Loading, so that no thread waits
                    // for a page whose loader waits for a frame. That waiting thread may hold the
                    // pins that keep every frame, or be the one that frees frames.
                    let frame = match self.engine.acquire(self.pool(), self.key(page)) {
                        Ok(frame) => frame,
                        Err(_) if patient && duties::writing().is_none() => {
                            self.engine.wait_for_frame(self.pool());
                            ensured = Ensured::Came;
                            continue;
                        }
                        Err(no_frame) => return Err(Refused::NoFrame(no_frame)),
                    };
                    if word.begin_load(seen).is_err() {
                        self.pool().give(&[frame]);
                        continue;
                    }
                    self.load(page, frame, access, pin, started)?;
                    if access == Access::Read || self.appears_at_once() {
                        return Ok(Ensured::Came);
                    }
                    ensured = Ensured::Came;
                    continue;
                }
                State::Clean if access == Access::Write => {
                    if pin.is_some() && seen.pins() >= MAX_PINS {
                        return Err(Refused::TooManyPins);
                    }
                    if word.begin_unprotect(seen).is_ok() {
                        self.unprotect(page, pin.is_some())?;
                        return Ok(ensured);
                    }
                    continue;
                }
                State::Clean | State::Dirty => {}
                State::Cleaning if access == Access::Read => {}
                _ => {
                    word.wait(seen);
                    ensured = Ensured::Came;
                    continue;
                }
            }
            let pinned = match pin {
                None => return Ok(ensured),
                Some(PinKind::Read) => word.pin(),
                Some(PinKind::Write) => word.pin_for_writing(),
            };
            match pinned {
                Ok(seen) => {
                    self.pool().hit(seen.frame());
                    return Ok(ensured);
                }
                Err(PinRefused::TooMany) => return Err(Refused::TooManyPins),
                Err(PinRefused::NotNow(_)) => {}
            }
        }
    }

    /// Whether a page is installed by one atomic change of the page table.
    ///
    /// A page that consists of several small pages appears piece by piece. If the kernel runs out
    /// of memory for the last piece, a store to the first would be lost. So such a page is
    /// installed write-protected for any access, and unprotected when all of it is present.
    fn appears_at_once(&self) -> bool {
        !M::PROTECTS || self.geometry.page_bytes == SMALL_PAGE_BYTES
    }

    /// Unprotecting → Dirty.
    pub fn unprotect(&self, page: u64, pin: bool) -> std::result::Result<(), Refused> {
        let word = self.word(page);
        // Held until the word is Dirty: the exclusive holder of the gate must find word and page
        // table in agreement.
        let _gate = M::PROTECTS.then(|| self.gates.shared(self.geometry.region_of(page)));
        // Marked before any thread can store to the page without a fault: a flush after such a
        // store must find it. After an error Dirty is the safe state: the page is merely written
        // once more.
        self.dirty.mark(page);
        let result = self.memory.unprotect(page);
        word.finish_unprotect(pin && result.is_ok());
        count(&self.engine.counters.write_faults, 1);
        if let Some(guesses) = self.guesses.get() {
            guesses.stored_to(page);
        }
        result.map_err(Refused::Kernel)
    }

    /// Loads a page that this thread has moved to Loading, and the pages that read-ahead adds to
    /// it.
    fn load(
        &self,
        page: u64,
        frame: FrameId,
        access: Access,
        pin: Option<PinKind>,
        started: Instant,
    ) -> std::result::Result<(), Refused> {
        let bounce = self.engine.bounce.take();
        let reach = match access {
            Access::Read => self.readahead.on_fault(page, self.geometry.pages()),
            Access::Write => Reach::ONE,
        };
        count(&self.engine.counters.misses, 1);
        if reach.now > 1 {
            return self.load_run(page, reach, frame, &bounce, pin, started);
        }
        self.load_one(page, frame, &bounce, access, pin, started)
    }

    /// Reads and installs a single page that is Loading.
    fn load_one(
        &self,
        page: u64,
        frame: FrameId,
        bounce: &Bounce<'_>,
        access: Access,
        pin: Option<PinKind>,
        started: Instant,
    ) -> std::result::Result<(), Refused> {
        let landing = self.memory.landing(frame).unwrap_or(bounce.as_ptr());
        match self.read(page..page + 1, &[frame], landing) {
            Ok(()) => self.finish(page, frame, landing, access, pin, started),
            Err(refused) => {
                self.give_up(page, frame);
                Err(refused)
            }
        }
    }

    /// Reads a run of pages, which get `frames`, to `target` and zero-fills the rest of the last
    /// page.
    fn read(
        &self,
        pages: Range<u64>,
        frames: &[FrameId],
        target: *mut u8,
    ) -> std::result::Result<(), Refused> {
        let wanted = self.geometry.bytes_in(pages.clone());
        let whole = (pages.end - pages.start) as usize * self.geometry.page_bytes;
        // Direct I/O needs whole blocks; bytes beyond the device's end are not transferred.
        let device = self.device();
        let asked = wanted.next_multiple_of(device.alignment_bytes()).min(whole);
        let offset_bytes = self.geometry.offset_of(pages.start);
        // SAFETY: `target` is a bounce buffer or a frame of at least `whole` bytes that this thread
        // owns.
        let buffer = unsafe { std::slice::from_raw_parts_mut(target, whole) };
        let given_up = OnUnwind(|| {
            count(&self.engine.counters.prefetched, frames.len() as u64 - 1);
            for (page, &frame) in pages.clone().zip(frames) {
                self.give_up(page, frame);
            }
        });
        let got = duties::loading(&self.height, self.pool(), frames.len(), || {
            device.read_at(offset_bytes, &mut buffer[..asked])
        });
        given_up.disarm();
        if self.height.is_under_itself() {
            return Err(Refused::UnderItself);
        }
        let got = got.map_err(Refused::Device)?;
        check_length(offset_bytes, wanted, got)?;
        buffer[wanted..].fill(0);
        Ok(())
    }

    /// Installs a loaded page and ends Loading.
    fn finish(
        &self,
        page: u64,
        frame: FrameId,
        data: *const u8,
        access: Access,
        pin: Option<PinKind>,
        started: Instant,
    ) -> std::result::Result<(), Refused> {
        let usable = access == Access::Read || self.appears_at_once();
        let asked = self.guesses.get().filter(|_| access == Access::Read && pin.is_none());
        let guesses = asked.filter(|guesses| guesses.will_be_stored_to());
        if let Some(guesses) = guesses {
            // SAFETY: `data` holds the page, which this thread is loading.
            let content = unsafe { std::slice::from_raw_parts(data, self.geometry.page_bytes) };
            guesses.remember(page, content);
        }
        let dirty = guesses.is_some() || access == Access::Write && usable;
        let pin = pin.filter(|_| usable);
        // Held until the page leaves Loading: the exclusive holder of the gate assumes that a
        // Loading page is not installed.
        let _gate = M::PROTECTS.then(|| self.gates.shared(self.geometry.region_of(page)));
        if dirty {
            // Before the page can be stored to without a fault, as in `unprotect`.
            self.dirty.mark(page);
        }
        // SAFETY: `data` holds the page, which this thread is loading.
        let installed = unsafe { self.install(page, &[frame], data, !dirty) };
        if let Err(error) = installed {
            if dirty {
                self.dirty.unmark(page);
            }
            if let Some(guesses) = guesses {
                guesses.forget(page);
            }
            self.give_up(page, frame);
            return Err(Refused::Kernel(error));
        }
        self.hold(page, frame, asked.is_some() && guesses.is_none());
        self.word(page).finish_load(frame, dirty, pin);
        self.engine.counters.fault_service_ns.record(started.elapsed().as_nanos() as u64);
        Ok(())
    }

    /// Installs pages of one region, as [`PageMemory::install`] does.
    ///
    /// # Safety
    /// As for [`PageMemory::install`].
    pub unsafe fn install(
        &self,
        first: u64,
        frames: &[FrameId],
        data: *const u8,
        protect: bool,
    ) -> std::io::Result<()> {
        // First: what is installed is torn down.
        self.loaded.set(self.geometry.region_of(first));
        // SAFETY: forwarded to the caller.
        unsafe { self.memory.install(first, frames, data, protect) }
    }

    /// Records that a page that is Loading, and installed, holds `frame`; `watched` as for
    /// [`Guesses::loaded`].
    pub fn hold(&self, page: u64, frame: FrameId, watched: bool) {
        if let Some(guesses) = self.guesses.get() {
            guesses.loaded(page, watched);
        }
        self.pool().inserted(frame, self.key(page));
    }

    /// Counts a write-back of pages of a region that has ended, before they leave Cleaning; also
    /// one that found nothing to write, since the pages become Clean all the same.
    pub fn write_back_ended(&self, region: usize) {
        // Release: a thread that sees the count and then reads the device gets what was written.
        self.write_backs[region].fetch_add(1, Ordering::Release);
    }

    /// The number of write-backs that ended in a region, modulo 2³².
    pub fn write_backs_ended(&self, region: usize) -> u32 {
        // Acquire: the caller reads the device afterwards, or has just read a page word.
        self.write_backs[region].load(Ordering::Acquire)
    }

    /// The regions that pages were ever loaded into.
    pub fn loaded_regions(&self) -> impl Iterator<Item = usize> + '_ {
        self.loaded.iter()
    }

    /// The pages of a run that may be resident, in order: all, or where there are fewer frames, those that have one.
    pub fn may_be_resident(&self, pages: Range<u64>) -> impl Iterator<Item = u64> + use<M> {
        let frames = self.pool().granted();
        let (run, in_frames) = if frames.len() as u64 >= pages.end - pages.start {
            (pages, vec![])
        } else {
            let owners = frames.filter_map(|frame| self.pool().owner(frame));
            let own = owners.filter(|key| key.store == self.id && pages.contains(&key.page.0));
            let mut own: Vec<_> = own.map(|key| key.page.0).collect();
            own.sort_unstable();
            (0..0, own)
        };
        run.chain(in_frames)
    }

    /// Undoes a failed load whose frame was taken.
    pub fn give_up(&self, page: u64, frame: FrameId) {
        count(&self.engine.counters.load_errors, 1);
        self.pool().give(&[frame]);
        self.word(page).abort_load();
    }

    /// Loads `page` and absent pages after it, up to the reach, with one transfer.
    fn load_run(
        &self,
        page: u64,
        reach: Reach,
        frame: FrameId,
        bounce: &Bounce<'_>,
        pin: Option<PinKind>,
        started: Instant,
    ) -> std::result::Result<(), Refused> {
        let mut frames = [frame; MAX_RUN_PAGES];
        let region = self.geometry.pages_of_region(self.geometry.region_of(page));
        let most = (self.engine.bounce.buffer_bytes() / self.geometry.page_bytes)
            .min(reach.now as usize)
            .min((region.end - page) as usize)
            .min(MAX_RUN_PAGES);
        if self.pool().free() < most {
            self.engine.evict(self.pool(), BATCH, Cleaning::No);
        }
        let mut run = 1;
        while run < most {
            match self.begin_extra(page + run as u64) {
                Some(extra) => frames[run] = extra,
                None => break,
            }
            run += 1;
        }
        let pages = page..page + run as u64;
        let mut result = self.read(pages.clone(), &frames[..run], bounce.as_ptr());
        // As in `finish`.
        let gate = M::PROTECTS.then(|| self.gates.shared(self.geometry.region_of(page)));
        if result.is_ok() {
            // SAFETY: the buffer holds the run, all of which this thread is loading.
            let installed = unsafe { self.install(page, &frames[..run], bounce.as_ptr(), true) };
            result = installed.map_err(Refused::Kernel);
        }
        if result.is_err() {
            drop(gate);
            count(&self.engine.counters.prefetched, run as u64 - 1);
            for (extra, &frame) in pages.zip(&frames[..run]).skip(1) {
                self.give_up(extra, frame);
            }
            // Retry the requested page alone: the error may concern only the read-ahead pages.
            return self.load_one(page, frame, bounce, Access::Read, pin, started);
        }
        for (extra, &frame) in pages.clone().zip(&frames[..run]) {
            self.hold(extra, frame, false);
            let pin = pin.filter(|_| extra == page);
            self.word(extra).finish_load(frame, false, pin);
        }
        count(&self.engine.counters.prefetched, run as u64 - 1);
        self.engine.counters.fault_service_ns.record(started.elapsed().as_nanos() as u64);
        if reach.later > 0 {
            self.engine.request_prefetch(self.id, pages.end, u64::from(reach.later));
        }
        Ok(())
    }

    /// Moves a further page to Loading with a frame, if it is absent and a frame is free at once.
    pub fn begin_extra(&self, page: u64) -> Option<FrameId> {
        let word = self.word(page);
        let seen = word.load();
        if seen.state() != State::Absent {
            return None;
        }
        let frame = self.pool().take(self.key(page))?;
        if word.begin_load(seen).is_err() {
            self.pool().give(&[frame]);
            return None;
        }
        Some(frame)
    }

    /// Returns whether a page was guessed, and has not been written since.
    pub fn is_guessed(&self, page: u64) -> bool {
        self.guesses.get().is_some_and(|guesses| guesses.is_guessed(page))
    }

    /// Ends the guess about a page that this thread is cleaning; returns whether its content is
    /// unchanged.
    pub fn was_only_read(&self, page: u64) -> bool {
        let Some(guesses) = self.guesses.get() else { return false };
        guesses.forget(page);
        let bytes = self.memory.bytes(page, self.seen(page).frame());
        // SAFETY: the page stays resident, and no thread stores to it, while it is Cleaning and
        // protected.
        let content = unsafe { std::slice::from_raw_parts(bytes, self.geometry.page_bytes) };
        guesses.is_unchanged(page, content)
    }

    /// Returns whether the snapshot of a guessed page, which this thread has pinned, equals what was
    /// loaded. If not, ends the guess: the caller writes the snapshot.
    pub fn is_snapshot_of_what_was_only_read(&self, page: u64, snapshot: *const u8) -> bool {
        let guessed = self.guesses.get().filter(|guesses| guesses.is_guessed(page));
        guessed.is_some_and(|guesses| {
            // SAFETY: the buffer belongs to this thread and holds a page.
            let content = unsafe { std::slice::from_raw_parts(snapshot, self.geometry.page_bytes) };
            let is_unchanged = guesses.is_unchanged(page, content);
            if !is_unchanged {
                guesses.forget(page);
            }
            is_unchanged
        })
    }

    /// Whether a page is usable for loads without a fault.
    pub fn is_resident(&self, page: u64) -> bool {
        self.word(page).load().is_resident()
    }

    /// The number of dirty pages, including those being written back.
    pub fn dirty_pages(&self) -> u64 {
        let mut dirty = 0;
        self.dirty.walk(0..self.geometry.pages(), |page| {
            let state = self.word(page).load().state();
            dirty += u64::from(!matches!(state, State::Clean | State::Absent));
            true
        });
        dirty
    }

    /// Unpins a page.
    #[inline]
    pub fn unpin(&self, page: u64) {
        self.word(page).unpin();
    }

    /// The page word's current value.
    #[inline]
    pub fn seen(&self, page: u64) -> Seen {
        self.word(page).load()
    }
}

/// Runs a closure if a panic in the application's code unwinds out of its scope: no other thread
/// may wait forever for a page that this thread was working on.
pub(crate) struct OnUnwind<F: FnMut()>(pub F);

impl<F: FnMut()> OnUnwind<F> {
    pub fn disarm(self) {
        std::mem::forget(self);
    }
}

impl<F: FnMut()> Drop for OnUnwind<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Longest run of pages installed by one fault.
pub(crate) const MAX_RUN_PAGES: usize = 64;

/// Fails if a read inside the device returned too few bytes: the device has been truncated.
pub(crate) fn check_length(
    offset_bytes: u64,
    wanted: usize,
    got: usize,
) -> std::result::Result<(), Refused> {
    if got >= wanted {
        return Ok(());
    }
    Err(Refused::Device(DeviceError::ShortRead { offset_bytes, len_bytes: wanted, got_bytes: got }))
}
