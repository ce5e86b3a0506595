//! The segment: the state that the processes of a pool share at run time.
//!
//! ```text
//!  ┌─────────┬──────────────────────────────┬───────────────────────┬───────────────────────┐
//!  │ mutexes │ control: positions in the    │ used pages, used      │ image: the metadata,  │
//!  │         │ log, pending appends, freed  │ slots, pages of zeros,│ as of the last change;│
//!  │         │ runs, slots of the processes │ present pages of the  │ after a clean close   │
//!  │         │                              │ image: a bit for each │ what changed since    │
//!  └─────────┴──────────────────────────────┴───────────────────────┴───────────────────────┘
//! ```
//!
//! The lists of freed runs and the slots of processes get memory when they are first used, and so do
//! the end of the image and that of the maps of pages: the part before it says how much of each has
//! memory, and nothing touches more.
//!
//! All of it is derived, except the word that records that the pool has failed, which only the
//! recovery of changes that were not durable needs ([`segment_place`](crate::shared::segment_place)). The
//! first process that opens the pool builds the segment from the media, and the last one that
//! closes the pool removes it. Metadata is changed only in the image; it reaches its place on media
//! at a checkpoint, when its log records are durable there (*no-steal*). So one scheme serves all
//! persistence domains.
//!
//! # Access rules
//! Everything is an atomic, because a process may die or be stopped between any two instructions,
//! and because readers take no lock. All *changes* are made while holding the metadata mutex,
//! except those of the signal words, the failure word, the states that the owner of an append sets,
//! the set of files with requested room, and the fields that only the holder of the maintenance
//! mutex changes (`applied_lsn`, `sequence`). What is read without a lock has separate modules,
//! with models: [`image_words`](crate::shared::image_words), [`appends`](crate::shared::appends),
//! [`signal`](crate::shared::signal). The order of stores matters wherever the next holder must be able to
//! repair what a dead one left; the functions concerned document it.
//!
//! The image also contains the links of [`object_names`](crate::metadata::object_names), by which objects are
//! found by name.
//!
//! A second segment holds the [`pins`](crate::pins) of writers. Readers do not open it, and map
//! this one read-only.

use std::mem::offset_of;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_sys::robust::{self, RobustMutex};
use aquifer_sys::shared_memory::SharedMemory;
use uuid::Uuid;

use crate::bitmap;
use crate::error::{PoolError, Result};
use crate::format::PAGE_BYTES;
use crate::format::inode::HEAD_SLOT;
use crate::format::layout::{Layout, SLOTS_PER_PAGE};
use crate::format::slot::named_runs;
use crate::format::slot_bytes::SLOT_BYTES;
use crate::format::slot_change::SLOT_WORDS;
use crate::memory::Memory;
use crate::mutant::Mutant;
use crate::point;
use crate::random::new_uuid;
use crate::shared::appends::Appends;
use crate::shared::base::Base;
use crate::shared::dead_holders::DeadHolders;
use crate::shared::image_words::{self, ImageSlot, ImageVersion};
use crate::shared::life;
use crate::shared::note::Noting;
use crate::shared::signal::Signal;
use crate::shared::sole_note::SoleNote;
use crate::sync::{AtomicU64, fence};

/// How many freed runs can wait for the durable tail.
pub(crate) const FREED: usize = 1 << 16;
/// How many processes, or handles, can have a pool open for writing. Their numbers identify the
/// owners of mutexes.
pub(crate) const PROCESSES: usize = 4096;
const _: () = assert!(PROCESSES <= 1 << 16);
/// How many locked inodes are noted for each handle.
pub(crate) const NOTED_LOCKS: usize = 32;
/// How many freed runs can wait for pins.
pub(crate) const HELD: usize = 1 << 15;
/// How many runs can be tracked that moved from one inode to another and may be pinned through the
/// first.
pub(crate) const MOVED: usize = 1 << 12;
/// How many runs one handle can have taken without having named them yet.
pub(crate) const RESERVATIONS: usize = 512;
/// Classes of free runs (at least 1, 2, 4, … pages), each with a position where the search for it
/// starts.
pub(crate) const RUN_CLASSES: usize = 17;

/// How many mutexes there are for files that are being written. Files that share one wait for each
/// other.
pub(crate) const FILE_MUTEXES: usize = 512;

/// Locked in the file of a segment by each process that uses the segment.
const USERS: LockRange = LockRange::byte(0);

/// Another one for each change of what lies where: processes join whose programs were built at other
/// times.
const MAGIC: u64 = u64::from_le_bytes(*b"AQSEGM14");

/// Pages that no inode names any more, until the durable tail has passed the record that freed
/// them.
#[repr(C)]
pub(crate) struct Freed {
    pub kept: Kept,
    pub lsn: AtomicU64,
}

/// Pages that an inode had, and the pins that keep them.
#[repr(C)]
pub(crate) struct Kept {
    pub run: AtomicU64,
    /// The inode and its layout version before the change: a `PinValue`.
    pub owner: AtomicU64,
}

/// What one process (one handle) holds. No cache line belongs to two.
#[repr(C, align(64))]
pub(crate) struct ProcessSlot {
    /// Inodes it has locked, for messages: see `InodeLock`.
    pub locked: [AtomicU64; NOTED_LOCKS],
    pub reservations: [AtomicU64; RESERVATIONS],
    /// No reservation was stored from this one on.
    pub used_reservations: AtomicU64,
    /// How many of the reserved pages are free and only reserved while they are zeroed.
    pub zeroing_pages: AtomicU64,
    /// 1 if it changes no files: see [`sole`](crate::open::sole).
    pub is_passive: AtomicU64,
}

/// The lists of freed runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum List {
    Freed,
    Held,
    Moved,
}

impl List {
    /// Where it lies in [`Control`], the length of an entry, and how many there are.
    fn place(self) -> (usize, usize, usize) {
        match self {
            List::Freed => (offset_of!(Control, freed), size_of::<Freed>(), FREED),
            List::Held => (offset_of!(Control, held), size_of::<Kept>(), HELD),
            List::Moved => (offset_of!(Control, moved), size_of::<Kept>(), MOVED),
        }
    }
}

#[repr(C)]
pub(crate) struct Control {
    magic: AtomicU64,
    /// Layout number of a mutex in the creator's C library.
    mutex_layout: AtomicU64,
    uuid: [AtomicU64; 2],
    /// The identity of the segment with the pins: see [`segment_place`](crate::shared::segment_place).
    pub pins_identity: AtomicU64,
    /// The life in which the segment was created: see [`life`](crate::shared::life). All processes that
    /// share it are in that one.
    pub life: AtomicU64,
    /// The life in which the segment's file itself was created; it may lie on another file system.
    /// Reads 0 if its bytes were lost.
    own_life: AtomicU64,
    /// The checksum of the header of the saved state that this segment was built from; 0: it was
    /// recovered in full. That state stays on media until the pool is closed.
    pub base_sum: AtomicU64,
    /// Pages of the image before this one are read from media until they are present: see
    /// [`base`](crate::shared::base). 0 without a base.
    base_pages: AtomicU64,
    /// 1 if a page of the base could not be read, or was not as it was saved. Then the pool is not
    /// closed cleanly, and the next opening examines all slots.
    pub base_is_doubtful: AtomicU64,
    /// 1 + the page of the image that is being made present; 0: none.
    materialising: AtomicU64,
    /// The slots of processes before this one have memory; the others were never taken.
    used_processes: AtomicU64,
    /// The maps of pages have memory for pages before this one. The others were never used, so they
    /// are free and not known to be zero by a map.
    map_pages: AtomicU64,
    /// Entries of each list before this one have memory, in the order of [`List`].
    list_entries: [AtomicU64; 3],
    pub metadata_mutex: RobustMutex,
    pub maintenance_mutex: RobustMutex,
    /// 1 if a holder of the metadata mutex has released it that had lost its locks, or could not
    /// rebuild the map of used pages: the next one repairs, as after a death. Guarded by that mutex.
    pub needs_repair: AtomicU64,
    pub file_mutexes: [RobustMutex; FILE_MUTEXES],
    /// Raised when bytes of files with this mutex were stored: see [`Pool::foreign_writes`].
    ///
    /// [`Pool::foreign_writes`]: crate::Pool::foreign_writes
    pub writes: [AtomicU64; FILE_MUTEXES],
    /// The dead holders of these.
    pub dead_file_holders: DeadHolders,
    /// The log must be durable up to here before bytes are stored to pages of files with this
    /// mutex, which guards it: `FileLock`.
    pub exchanged_lsn: [AtomicU64; FILE_MUTEXES],
    /// 0, or 1 + the error that made the pool read-only for all processes.
    pub failure: AtomicU64,
    /// What failed: see `log::FAILURES`.
    pub failure_kind: AtomicU64,
    pub image: ImageVersion,
    /// The object at the root of the tree of [`object_names`](crate::metadata::object_names); 0: none.
    pub object_names_root: AtomicU64,
    /// That tree contains the objects in the slots before this one; the highest value: all of them.
    pub object_names_end: AtomicU64,
    /// The seed of the hashes in that tree: random, so that names cannot be chosen to collide.
    pub object_names_seed: AtomicU64,
    /// The inode that a transaction may free although it had a link before: see
    /// [`pins`](crate::pins). 0: none.
    pub claimed_inode: AtomicU64,
    pub generation: AtomicU64,
    /// Sequence number of the superblocks on media.
    pub sequence: AtomicU64,
    /// Everything before it is on media, at its place: its log space can be overwritten.
    pub tail_lsn: AtomicU64,
    /// Everything before it was copied to its place, and is visible there.
    pub applied_lsn: AtomicU64,
    /// The end of the last commit: from here on, the log contains only metadata.
    pub content_end_lsn: AtomicU64,
    /// The end of the last record that turned fresh pages into used ones.
    pub fresh_lsn: AtomicU64,
    /// Rung when the durable prefix of the log has advanced, or `failure` changed.
    pub signal: Signal,
    /// Rung when reservations end.
    pub given_back: Signal,
    /// Entries of `freed` in use are `freed[first % FREED] .. freed[next % FREED]`, in the order of
    /// their positions.
    pub freed_first: AtomicU64,
    pub freed_next: AtomicU64,
    /// Pages of those entries whose records the tail had not passed when it moved last; after a
    /// death possibly one entry too many.
    pub behind_tail_pages: AtomicU64,
    /// The end of the log when `freed` was last examined, with a first entry that only pins keep.
    pub freed_looked_lsn: AtomicU64,
    /// Entries of `held` in use are the first ones, in no order.
    pub held_count: AtomicU64,
    /// Entries of `moved` in use are the first ones, in no order.
    pub moved_count: AtomicU64,
    /// No free run of at least 2ⁱ pages starts before `first_free_page[i]`.
    pub first_free_page: [AtomicU64; RUN_CLASSES],
    /// Where the next search for room for a file starts: for any pages, for zeroed, for unzeroed.
    pub next_page: [AtomicU64; 3],
    /// Where the next search for pages to zero starts.
    pub next_page_to_zero: AtomicU64,
    /// The head's value, as of the last change.
    pub fresh_from_page: AtomicU64,
    /// Pages whose bit in `used_pages` is not set.
    pub free_count: AtomicU64,
    /// Pages whose bit in `zeroed_pages` is set.
    pub zeroed_count: AtomicU64,
    /// Pages before this one are not fresh, and will not be after a power cut.
    pub durable_fresh_from_page: AtomicU64,
    /// No page from this one on was handed out since the pool was recovered.
    pub used_to_page: AtomicU64,
    /// Where the search for a free slot starts.
    pub free_slot_hint: AtomicU64,
    pub appends: Appends,
    /// The process that owns each slot, as numbered in its own PID namespace; 0: none has since the
    /// last one left properly. After a death it is that of the dead process.
    pub pids: [AtomicU64; PROCESSES],
    /// What the writer says that keeps others out, if there is one.
    pub sole: SoleNote,
    /// Whether transactions of dead processes were published.
    pub noting: Noting,
    // From here on, but for the first entries, nothing has memory before it is used.
    pub freed: [Freed; FREED],
    pub held: [Kept; HELD],
    pub moved: [Kept; MOVED],
    processes: [ProcessSlot; PROCESSES],
}

/// The lists get memory for this many bytes at a time.
const LIST_STEP_BYTES: usize = 32 << 10;
/// The part of [`Control`] that always has memory: up to the first entries of `freed`, so that
/// changes are possible where there is no more memory.
const FIXED_CONTROL_BYTES: usize =
    (offset_of!(Control, freed) + LIST_STEP_BYTES).next_multiple_of(4096);

/// The image gets memory for so many of its pages at a time: of pages with a base one chunk, of
/// others, which are used in order, several.
const CHUNK_PAGES: u64 = 16;
const CHUNKS_AT_ONCE: u64 = 32;

/// Words of a page of the image.
const PAGE_WORDS: usize = PAGE_BYTES as usize / 8;

const CONTROL_BYTES: usize = size_of::<Control>().next_multiple_of(4096);

/// The segment, mapped into this process.
pub(crate) struct Segment {
    memory: Memory,
    start: Start,
    /// The pages that are not in it.
    base: OnceLock<Base>,
    places: Maps,
}

/// The first byte of the memory, which is asked for at each access.
#[derive(Clone, Copy)]
struct Start(*mut u8);

// SAFETY: all threads may use the memory, which consists of atomics and mutexes; it lives as long as
// the segment that has this.
unsafe impl Send for Start {}
// SAFETY: as above.
unsafe impl Sync for Start {}

/// Where the maps and the image begin: in words from the end of the control part.
struct Maps {
    /// One bit for each page of the image.
    dirty: MapPlace,
    written: MapPlace,
    present: MapPlace,
    /// One bit for each chunk of pages of the image.
    reserved: MapPlace,
    /// One bit for each page of links.
    reserved_links: MapPlace,
    /// One bit for each slot, for each set.
    sets: MapPlace,
    /// One bit for each page of the pool. From here on, memory is allocated when it is needed.
    used: MapPlace,
    zeroed: MapPlace,
    base_used: MapPlace,
    /// A word for each slot.
    links: MapPlace,
    image: MapPlace,
    slots: u64,
}

#[derive(Clone, Copy)]
struct MapPlace {
    first: usize,
    words: usize,
}

impl Maps {
    fn new(layout: &Layout) -> Maps {
        let (slots, image_pages) = (layout.slots(), layout.metadata_pages);
        let mut end = 0;
        let mut place = |words: usize| {
            let first = end;
            end += words;
            MapPlace { first, words }
        };
        let bits = |count: u64| count.div_ceil(64) as usize;
        let [dirty, written, present] = [(); 3].map(|()| place(bits(image_pages)));
        let reserved = place(bits(image_pages.div_ceil(CHUNK_PAGES)));
        let reserved_links = place(bits(slots.div_ceil(PAGE_WORDS as u64)));
        let sets = place(SLOT_SETS * bits(slots));
        let before = sets.first + sets.words;
        place(before.next_multiple_of(PAGE_WORDS) - before);
        let [used, zeroed, base_used] = [(); 3].map(|()| {
            let map = place(bits(layout.page_count));
            place(map.words.next_multiple_of(PAGE_WORDS) - map.words);
            map
        });
        let links = place((slots as usize).next_multiple_of(PAGE_WORDS));
        let image = place(image_pages as usize * PAGE_WORDS);
        Maps {
            dirty,
            written,
            present,
            reserved,
            reserved_links,
            sets,
            used,
            zeroed,
            base_used,
            links,
            image,
            slots,
        }
    }

    fn bytes(place: MapPlace) -> Range<usize> {
        CONTROL_BYTES + place.first * 8..CONTROL_BYTES + (place.first + place.words) * 8
    }

    fn bytes_of_pages(place: MapPlace, pages: Range<u64>) -> Range<usize> {
        let (start, page_bytes) = (Self::bytes(place).start, PAGE_BYTES as usize);
        start + pages.start as usize * page_bytes..start + pages.end as usize * page_bytes
    }
}

/// The length of a segment, and of its part that has memory from the start.
fn len_bytes(layout: &Layout) -> (usize, usize) {
    let places = Maps::new(layout);
    (Maps::bytes(places.image).end, Maps::bytes(places.used).start)
}

/// The sets of slots: one bit for each slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotSet {
    /// The slot is not empty.
    Occupied,
    /// The slot contains an object.
    Objects,
    /// The slot contains an inode of a file without links.
    Orphans,
    /// The log contains a whole change of the slot, behind the place where the next checkpoint's
    /// tail will be.
    Logged,
    /// The slot contains a file with room requested beyond its end.
    WithRoom,
}

const SLOT_SETS: usize = 5;

impl Segment {
    /// Creates a segment that other processes can open once the superblock names it.
    pub fn create(path: &Path, pool: Uuid, layout: &Layout, mode: u32) -> Result<Segment> {
        let (len_bytes, first_bytes) = len_bytes(layout);
        let memory = SharedMemory::create_at(path, len_bytes, FIXED_CONTROL_BYTES, mode)
            .and_then(|made| made.allocate(CONTROL_BYTES..first_bytes).map(|()| made))
            .map_err(PoolError::SharedMemory)?;
        let own_life = life::of_file(memory.file());
        let segment = Self::initialise(Memory::Shared(memory), pool, layout)?;
        // Relaxed: other processes find the segment through the superblock, which is written later.
        segment.control().own_life.store(own_life, Relaxed);
        segment.note_use();
        Ok(segment)
    }

    /// Creates a segment for this process alone.
    pub fn private(pool: Uuid, layout: &Layout) -> Result<Segment> {
        Self::initialise(Memory::private(len_bytes(layout).0)?, pool, layout)
    }

    fn of(memory: Memory, layout: &Layout) -> Segment {
        let start = Start(memory.start());
        Segment { memory, start, base: OnceLock::new(), places: Maps::new(layout) }
    }

    fn initialise(memory: Memory, pool: Uuid, layout: &Layout) -> Result<Segment> {
        let segment = Self::of(memory, layout);
        let control = segment.control();
        let own = [&control.metadata_mutex, &control.maintenance_mutex];
        for mutex in own.into_iter().chain(&control.file_mutexes) {
            // SAFETY: the memory is fresh, shared by all future users, and not known to any other
            // thread yet.
            unsafe { RobustMutex::init(std::ptr::from_ref(mutex).cast_mut()) }
                .map_err(PoolError::Mutex)?;
        }
        let (high, low) = pool.as_u64_pair();
        control.uuid[0].store(high, Relaxed);
        control.uuid[1].store(low, Relaxed);
        let freed = &control.list_entries[List::Freed as usize];
        freed.store((LIST_STEP_BYTES / size_of::<Freed>()) as u64, Relaxed);
        control.object_names_seed.store(new_uuid()?.as_u64_pair().0, Relaxed);
        control.mutex_layout.store(robust::LAYOUT.into(), Relaxed);
        // Relaxed: other processes find the segment through the superblock, which is written later.
        control.magic.store(MAGIC, Relaxed);
        Ok(segment)
    }

    /// Takes the shared lock on the segment's file that marks it as in use, until this process
    /// closes the file. If the lock is not granted because a reader has locked the file otherwise,
    /// that lock marks it as in use as well.
    pub fn note_use(&self) {
        if let Some(file) = self.file() {
            let _ = lock::try_lock(file, USERS, LockKind::Shared);
        }
    }

    /// Whether a process uses the segment that has this file; `file` must be an open file
    /// description private to the caller.
    pub fn is_in_use(file: impl AsFd) -> bool {
        lock::conflict(file.as_fd(), USERS, LockKind::Exclusive)
            .map_or(true, |found| found.is_some())
    }

    /// Whether all stores to the segment are still there: its file may lie on a disk, whose page
    /// cache was lost.
    pub fn is_whole(&self) -> bool {
        let own_life = self.control().own_life.load(Relaxed);
        own_life != life::UNKNOWN && self.file().is_some_and(|file| life::of_file(file) == own_life)
    }

    /// Wraps memory that another process created; the error tells why it does not belong to this
    /// pool.
    pub fn adopt(
        memory: SharedMemory,
        pool: Uuid,
        layout: &Layout,
    ) -> std::result::Result<Segment, String> {
        if memory.len_bytes() < len_bytes(layout).0 {
            return Err("it is too small for this pool".to_owned());
        }
        let segment = Self::of(Memory::Shared(memory), layout);
        let control = segment.control();
        let (high, low) = pool.as_u64_pair();
        if control.magic.load(Relaxed) != MAGIC
            || control.uuid[0].load(Relaxed) != high
            || control.uuid[1].load(Relaxed) != low
        {
            return Err("it belongs to another pool".to_owned());
        }
        if control.mutex_layout.load(Relaxed) != u64::from(robust::LAYOUT) {
            return Err("its locks are those of another C library".to_owned());
        }
        Ok(segment)
    }

    /// The descriptor; `None` if the segment is private to this process.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.memory.file()
    }

    /// The control part.
    #[inline]
    pub fn control(&self) -> &Control {
        // SAFETY: the memory is at least this long, page-aligned, lives as long as `self`, and all
        // of `Control` is atomics and mutexes, for which any bytes are valid.
        unsafe { &*self.start.0.cast::<Control>() }
    }

    #[inline]
    fn words(&self, place: MapPlace) -> &[AtomicU64] {
        let MapPlace { first, words } = place;
        debug_assert!(CONTROL_BYTES + (first + words) * 8 <= self.memory.len_bytes());
        // SAFETY: inside the memory, whose length was checked.
        let start = unsafe { self.start.0.add(CONTROL_BYTES + first * 8) };
        // SAFETY: aligned, inside the memory, which lives as long as `self`; any bytes are valid
        // atomics.
        unsafe { std::slice::from_raw_parts(start.cast::<AtomicU64>(), words) }
    }

    /// The image of one slot; `None` if it was never used, or cannot be read. Reads it from media if
    /// it is not present and this process did not read it before.
    #[inline]
    pub fn slot(&self, slot: u64) -> Option<&ImageSlot> {
        match self.slot_in_memory(slot) {
            Ok(slot) => slot,
            Err(_) => self.read_slot(slot).ok().flatten(),
        }
    }

    /// The image of one slot, without waiting for the media; `None` if it was never used. The error
    /// is the page that must be read first: [`Segment::prepare`].
    #[inline]
    pub fn slot_in_memory(&self, slot: u64) -> std::result::Result<Option<&ImageSlot>, u64> {
        if let Some(present) = self.present_slot(slot) {
            return Ok(Some(present));
        }
        let Some(base) = self.base.get() else { return Ok(None) };
        match base.slot_in_memory(slot) {
            Some(read) => Ok(Some(read)),
            None if slot / SLOTS_PER_PAGE < base.pages() => Err(slot / SLOTS_PER_PAGE),
            None => Ok(None),
        }
    }

    /// The image of one slot; `None` if it was never used.
    ///
    /// # Errors
    /// Those of [`Base::read`].
    pub fn read_slot(&self, slot: u64) -> Result<Option<&ImageSlot>> {
        loop {
            match self.slot_in_memory(slot) {
                Ok(slot) => return Ok(slot),
                Err(page) => self.read_base(page)?,
            }
        }
    }

    /// Reads a page of the base, unless it is in the image by now.
    #[cold]
    fn read_base(&self, page: u64) -> Result<()> {
        let base = self.base.get().expect("the page is in it");
        aquifer_sys::waits::about_to_wait();
        match base.read(page) {
            // It was changed and written to media during the read.
            Err(_) if self.is_present(page) => Ok(()),
            Err(error) => {
                if self.is_writable() && !error.is_of_closed_file() {
                    // Relaxed: it is looked at when all others have closed the pool.
                    self.control().base_is_doubtful.store(1, Relaxed);
                }
                Err(error)
            }
            read => read,
        }
    }

    /// The place of a slot in the image, if its page is present.
    #[inline(always)]
    pub fn present_slot(&self, slot: u64) -> Option<&ImageSlot> {
        let is_present = slot < self.places.slots && self.is_present(slot / SLOTS_PER_PAGE);
        is_present.then(|| self.place_of(slot))
    }

    /// The place of a slot in the image. Only to be touched if it has memory.
    #[inline(always)]
    fn place_of(&self, slot: u64) -> &ImageSlot {
        debug_assert!(slot < self.places.slots);
        let first = self.places.image.first + slot as usize * SLOT_WORDS;
        // SAFETY: inside the memory, whose length was checked, since there is such a slot.
        let start = unsafe { self.start.0.add(CONTROL_BYTES + first * 8) };
        // SAFETY: aligned, inside the memory, which lives as long as `self`; any bytes are valid
        // atomics.
        unsafe { &*start.cast::<ImageSlot>() }
    }

    /// Whether a page of the image has its content in the segment. Once it has, it stays so.
    #[inline(always)]
    pub fn is_present(&self, page: u64) -> bool {
        let word = &self.words(self.places.present)[(page / 64) as usize];
        // Acquire: pairs with the Release in `materialise`. A thread that loads the bit sees the
        // content, and a thread that loads the bit behind a fence, and does not find it, has seen no
        // change of the page.
        word.load(Acquire) & 1 << (page % 64) != 0
    }

    /// The pages of the image that are present, ascending.
    pub fn present_pages(&self) -> impl Iterator<Item = u64> + '_ {
        let words = self.words(self.places.present);
        let runs = bitmap::runs(|index| words[index].load(Acquire), 0, self.image_pages());
        runs.flat_map(|run| run.start_page..run.end_page())
    }

    fn image_pages(&self) -> u64 {
        self.places.slots / SLOTS_PER_PAGE
    }

    fn chunk_is_reserved(&self, page: u64) -> bool {
        let chunk = page / CHUNK_PAGES;
        // Acquire: pairs with the Release in `reserve`. The memory may be accessed.
        let word = self.words(self.places.reserved)[(chunk / 64) as usize].load(Acquire);
        word & 1 << (chunk % 64) != 0
    }

    /// Allocates the memory of a page of the image, and of the links of its slots: where the image
    /// has memory, the links have it too.
    ///
    /// # Errors
    /// [`PoolError::SharedMemory`]; then nothing has changed.
    pub fn reserve(&self, page: u64) -> Result<()> {
        if self.chunk_is_reserved(page) {
            return Ok(());
        }
        let has_base = self.base.get().is_some_and(|base| page < base.pages());
        let step = CHUNK_PAGES * if has_base { 1 } else { CHUNKS_AT_ONCE };
        let first = page / step * step;
        let end = (first + step).min(self.image_pages());
        self.reserve_links(first * SLOTS_PER_PAGE..end * SLOTS_PER_PAGE)?;
        self.memory.allocate(Maps::bytes_of_pages(self.places.image, first..end))?;
        let reserved = self.words(self.places.reserved);
        for chunk in first / CHUNK_PAGES..end.div_ceil(CHUNK_PAGES) {
            // Release: pairs with the Acquire in `chunk_is_reserved`.
            reserved[(chunk / 64) as usize].fetch_or(1 << (chunk % 64), Release);
        }
        Ok(())
    }

    /// Allocates the memory of the links of these slots.
    ///
    /// # Errors
    /// [`PoolError::SharedMemory`]; then nothing has changed.
    pub fn reserve_links(&self, slots: Range<u64>) -> Result<()> {
        const PER_PAGE: u64 = PAGE_WORDS as u64;
        let pages = slots.start / PER_PAGE..slots.end.div_ceil(PER_PAGE);
        if pages.clone().all(|page| self.links_are_reserved(page)) {
            return Ok(());
        }
        self.memory.allocate(Maps::bytes_of_pages(self.places.links, pages.clone()))?;
        // Release: pairs with the Acquire in `links_are_reserved`.
        let reserved = self.words(self.places.reserved_links);
        pages.for_each(|page| {
            reserved[(page / 64) as usize].fetch_or(1 << (page % 64), Release);
        });
        Ok(())
    }

    fn links_are_reserved(&self, page: u64) -> bool {
        // Acquire: pairs with the Release in `reserve_links`. The memory may be accessed.
        let word = self.words(self.places.reserved_links)[(page / 64) as usize].load(Acquire);
        word & 1 << (page % 64) != 0
    }

    /// Makes it possible to change a page of the image without waiting: allocates its memory, and
    /// reads it.
    ///
    /// # Errors
    /// [`PoolError::SharedMemory`]; those of [`Base::read`].
    pub fn prepare(&self, page: u64) -> Result<()> {
        if self.is_present(page) {
            return Ok(());
        }
        self.reserve(page)?;
        self.read_slot(page * SLOTS_PER_PAGE).map(drop)
    }

    /// Whether a page of the image can be changed without waiting.
    pub fn is_prepared(&self, page: u64) -> bool {
        self.is_present(page)
            || (self.chunk_is_reserved(page) && self.slot_in_memory(page * SLOTS_PER_PAGE).is_ok())
    }

    /// Makes a page present, which was prepared, or was never used and has memory. Before a record
    /// that changes the page is published, so that the repair after a death finds it present. With
    /// the metadata mutex.
    ///
    /// | a death | leaves | the repair |
    /// |---|---|---|
    /// | before the bit | a page that is absent | nothing: it is copied again |
    /// | behind it | pages of its runs perhaps still in the base's map | takes them out; they are what the image names, as no change of the page was made yet |
    pub fn materialise(&self, page: u64) {
        if self.is_present(page) {
            return;
        }
        let control = self.control();
        // Relaxed, and a Release fence: the next holder of the mutex sees it if it sees anything of
        // what follows.
        control.materialising.store(page + 1, Relaxed);
        fence(Release);
        point::pass("materialise-begun");
        let first = page * SLOTS_PER_PAGE;
        let sources: [_; SLOTS_PER_PAGE as usize] =
            std::array::from_fn(|index| self.slot_in_memory(first + index as u64).ok().flatten());
        let present = &self.words(self.places.present)[(page / 64) as usize];
        if self.base.get().is_some_and(|base| base.has(Mutant::PresentTooEarly)) {
            present.fetch_or(1 << (page % 64), Release);
            point::pass("materialise-present");
        }
        for (slot, source) in (first..).zip(sources) {
            for (word, source) in self.place_of(slot).iter().zip(source.into_iter().flatten()) {
                word.store(source.load(Relaxed), Relaxed);
            }
        }
        point::pass("materialise-copied");
        // Release: pairs with the Acquire in `is_present`.
        present.fetch_or(1 << (page % 64), Release);
        point::pass("materialise-present");
        self.settle();
    }

    /// Completes what [`Segment::materialise`] had begun when its process died. With the metadata
    /// mutex.
    pub fn settle(&self) {
        let control = self.control();
        let Some(page) = control.materialising.load(Relaxed).checked_sub(1) else { return };
        let is_kept = self.base.get().is_some_and(|base| base.has(Mutant::BaseUsedKept));
        if self.is_present(page) && page < control.base_pages.load(Relaxed) && !is_kept {
            let mut runs = Vec::new();
            let first = page * SLOTS_PER_PAGE;
            for slot in (first..first + SLOTS_PER_PAGE).filter(|slot| *slot != HEAD_SLOT) {
                let mut bytes = [0; SLOT_BYTES];
                image_words::copy_out(self.place_of(slot), &mut bytes);
                named_runs(&bytes, &mut runs);
            }
            for run in runs {
                bitmap::set(self.base_used_pages(), run, false);
            }
        }
        point::pass("materialise-cleared");
        // Release: everything before it is done.
        control.materialising.store(0, Release);
    }

    /// Adds a page to the image in recovery.
    ///
    /// # Errors
    /// [`PoolError::SharedMemory`].
    pub fn add_page(&self, page: u64) -> Result<()> {
        if page < self.image_pages() {
            self.reserve(page)?;
            self.materialise(page);
        }
        Ok(())
    }

    /// The slots of processes that some handle has taken, with their numbers.
    pub fn processes(&self) -> impl Iterator<Item = (usize, &ProcessSlot)> {
        let slots = &self.control().processes;
        slots.iter().enumerate().take(self.used_processes())
    }

    /// The slot of a process, which a handle has taken.
    #[inline]
    pub fn process(&self, index: usize) -> &ProcessSlot {
        assert!(index < self.used_processes(), "no handle has taken slot {index}");
        &self.control().processes[index]
    }

    /// The slots before this one have memory.
    #[inline]
    pub fn used_processes(&self) -> usize {
        // Acquire: pairs with the Release below.
        self.control().used_processes.load(Acquire) as usize
    }

    /// Allocates the memory of a process's slot. The caller has locked the slot's byte.
    pub fn allocate_process(&self, index: usize) -> Result<()> {
        let used = self.used_processes();
        if index >= used {
            // Those before it as well: a process that is taking one of them may die before it has
            // allocated it. They need not end at a page: whole pages are allocated.
            let place = |index| offset_of!(Control, processes) + index * size_of::<ProcessSlot>();
            self.memory.allocate(place(used)..place(index + 1))?;
            // Release: pairs with the Acquire above.
            self.control().used_processes.fetch_max(index as u64 + 1, Release);
        }
        Ok(())
    }

    /// The links of a slot in the tree of [`object_names`](crate::metadata::object_names); `None` if they have
    /// no memory.
    pub fn name_links(&self, slot: u64) -> Option<&AtomicU64> {
        let is_there =
            slot < self.places.slots && self.links_are_reserved(slot / PAGE_WORDS as u64);
        is_there.then(|| &self.words(self.places.links)[slot as usize])
    }

    /// The base, if the segment has one.
    pub fn base(&self) -> Option<&Base> {
        self.base.get()
    }

    /// Pages of the image that are not present are read from this base. In the process that builds
    /// the segment, before others know it.
    pub fn set_base(&self, base: Base) {
        // Relaxed: other processes find the segment through the superblock, which is written later.
        self.control().base_pages.store(base.pages(), Relaxed);
        self.control().base_sum.store(base.sum(), Relaxed);
        self.adopt_base(base);
    }

    /// The same in a process that has joined.
    pub fn adopt_base(&self, base: Base) {
        let _ = self.base.set(base);
    }

    /// Whether the first `count` entries of a list have memory.
    pub fn has_entries(&self, list: List, count: usize) -> bool {
        // Acquire: pairs with the Release below.
        count <= self.control().list_entries[list as usize].load(Acquire) as usize
    }

    /// Allocates the memory of the first `count` entries of a list. The caller holds the metadata
    /// mutex.
    pub fn allocate_entries(&self, list: List, count: usize) -> Result<()> {
        if self.has_entries(list, count) {
            return Ok(());
        }
        let (start, entry_bytes, most) = list.place();
        let entries = &self.control().list_entries[list as usize];
        let step = LIST_STEP_BYTES / entry_bytes;
        let wanted = count.next_multiple_of(step).min(most);
        let place = |count: usize| start + count * entry_bytes;
        self.memory.allocate(place(entries.load(Acquire) as usize)..place(wanted))?;
        // Release: pairs with the Acquire in `has_entries`.
        entries.fetch_max(wanted as u64, Release);
        Ok(())
    }

    /// One bit for each page of the image: changed since the last checkpoint.
    pub fn dirty_image_pages(&self) -> &[AtomicU64] {
        self.words(self.places.dirty)
    }

    /// One bit for each page of the image: it went to media since the segment was made.
    pub fn written_image_pages(&self) -> &[AtomicU64] {
        self.words(self.places.written)
    }

    /// One bit for each page of the pool: in use. As the next two, only the part that has memory:
    /// no bit behind it is set.
    pub fn used_pages(&self) -> &[AtomicU64] {
        self.words(self.with_memory(self.places.used))
    }

    /// One bit for each page of the pool: free and known to be all zero.
    pub fn zeroed_pages(&self) -> &[AtomicU64] {
        self.words(self.with_memory(self.places.zeroed))
    }

    /// One bit for each page of the pool: named by a slot that is not in the image, or in use
    /// without a name.
    pub fn base_used_pages(&self) -> &[AtomicU64] {
        self.words(self.with_memory(self.places.base_used))
    }

    /// The part of a map of pages that has memory.
    fn with_memory(&self, map: MapPlace) -> MapPlace {
        // Acquire: pairs with the Release in `allocate_maps`.
        let words = self.control().map_pages.load(Acquire) as usize / 64;
        MapPlace { words: map.words.min(words), ..map }
    }

    /// Allocates the memory of the maps of pages for all pages before this one. With the metadata
    /// mutex, or in the process that builds the segment.
    ///
    /// # Errors
    /// [`PoolError::SharedMemory`]; then nothing has changed.
    pub fn allocate_maps(&self, end_page: u64) -> Result<()> {
        const PER_PAGE: u64 = PAGE_BYTES * 8;
        let map_pages = &self.control().map_pages;
        let most = self.places.used.words.div_ceil(PAGE_WORDS) as u64;
        let places = map_pages.load(Acquire) / PER_PAGE..end_page.div_ceil(PER_PAGE).min(most);
        if places.is_empty() {
            return Ok(());
        }
        for map in [self.places.used, self.places.zeroed, self.places.base_used] {
            self.memory.allocate(Maps::bytes_of_pages(map, places.clone()))?;
        }
        // Release: pairs with the Acquire in `with_memory`.
        map_pages.fetch_max(places.end * PER_PAGE, Release);
        Ok(())
    }

    /// One bit for each slot: whether it is in the set.
    pub fn slot_set(&self, set: SlotSet) -> &[AtomicU64] {
        let words = self.places.sets.words / SLOT_SETS;
        self.words(MapPlace { first: self.places.sets.first + set as usize * words, words })
    }

    /// The slots of a set, ascending.
    pub fn slots_in(&self, set: SlotSet) -> impl Iterator<Item = u64> + '_ {
        self.slots_from(set, 0)
    }

    /// The slots of a set from one on, ascending.
    pub fn slots_from(&self, set: SlotSet, from: u64) -> impl Iterator<Item = u64> + '_ {
        let words = self.slot_set(set);
        let runs = bitmap::runs(|index| words[index].load(Relaxed), from, self.slots());
        runs.flat_map(|run| run.start_page..run.end_page())
    }

    /// Whether this process can store to it.
    pub fn is_writable(&self) -> bool {
        self.memory.is_writable()
    }

    /// Makes the maps empty, in a segment that no other process uses.
    pub fn forget_maps(&self) {
        let others = MapPlace { first: 0, words: self.places.used.first };
        let maps = [self.used_pages(), self.zeroed_pages(), self.base_used_pages()];
        let words = maps.into_iter().flatten().chain(self.words(others));
        words.filter(|word| word.load(Relaxed) != 0).for_each(|word| word.store(0, Relaxed));
    }

    /// How many slots there are.
    pub fn slots(&self) -> u64 {
        self.places.slots
    }
}

#[cfg(all(test, not(loom), target_arch = "x86_64", target_env = "gnu"))]
mod tests {
    use super::*;

    /// Whatever changes one of these also needs another magic.
    #[test]
    fn what_lies_where_is_that_of_the_magic() {
        let layout = Layout::new(1 << 30, 10_000, 1 << 20).expect("there is room");
        let places = Maps::new(&layout);
        let maps = [
            places.dirty,
            places.written,
            places.present,
            places.reserved,
            places.reserved_links,
            places.sets,
            places.used,
            places.zeroed,
            places.base_used,
            places.links,
            places.image,
        ];
        let control = [
            offset_of!(Control, map_pages),
            offset_of!(Control, metadata_mutex),
            offset_of!(Control, needs_repair),
            offset_of!(Control, failure),
            offset_of!(Control, claimed_inode),
            offset_of!(Control, signal),
            offset_of!(Control, appends),
            offset_of!(Control, pids),
            offset_of!(Control, sole),
            offset_of!(Control, noting),
            offset_of!(Control, freed),
            offset_of!(Control, processes),
            size_of::<ProcessSlot>(),
            CONTROL_BYTES,
        ];
        assert_eq!(&MAGIC.to_le_bytes(), b"AQSEGM14");
        assert_eq!(
            (control, maps.map(|map| map.first)),
            (
                [
                    96, 128, 256, 41296, 41352, 41408, 41688, 82680, 115448, 115728, 116784,
                    2279488, 4416, 20369408
                ],
                [0, 20, 40, 60, 62, 63, 1024, 5120, 9216, 13312, 23552]
            )
        );
    }
}
