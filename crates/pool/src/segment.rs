//! The segment: the state that the processes of a pool share at run time.
//!
//! ```text
//!  ┌─────────┬──────────────────────────────┬───────────────────────┬───────────────────────┐
//!  │ mutexes │ control: positions in the    │ image: the metadata,  │ used pages, used      │
//!  │         │ log, pending appends, freed  │ as of the last change │ slots, pages of zeros,│
//!  │         │ runs, slots of the processes │                       │ logged slots: a bit   │
//!  │         │                              │                       │ for each              │
//!  └─────────┴──────────────────────────────┴───────────────────────┴───────────────────────┘
//! ```
//!
//! All of it is derived, except the word that records that the pool has failed, which only the
//! recovery of changes that were not durable needs ([`segment_place`](crate::segment_place)). The
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
//! with models: [`image_words`](crate::image_words), [`appends`](crate::appends),
//! [`signal`](crate::signal). The order of stores matters wherever the next holder must be able to
//! repair what a dead one left; the functions concerned document it.
//!
//! The image also contains the links of [`object_names`](crate::object_names), by which objects are
//! found by name.
//!
//! A second segment holds the [`pins`](crate::pins) of writers. Readers do not open it, and map
//! this one read-only.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Release};

use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_sys::robust::{self, RobustMutex};
use aquifer_sys::shared_memory::SharedMemory;
use uuid::Uuid;

use crate::appends::Appends;
use crate::bitmap;
use crate::error::{PoolError, Result};
use crate::format::inode::SLOT_BYTES;
use crate::format::layout::Layout;
use crate::format::slot_change::SLOT_WORDS;
use crate::image_words::{ImageSlot, ImageVersion};
use crate::life;
use crate::random::new_uuid;
use crate::signal::Signal;
use crate::sync::AtomicU64;

/// How many freed runs can wait for the durable tail.
pub(crate) const FREED: usize = 1 << 16;
/// How many processes, or handles, can have a pool open. Their numbers identify the owners of
/// mutexes.
pub(crate) const PROCESSES: usize = 256;
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

const MAGIC: u64 = u64::from_le_bytes(*b"AQSEGM08");

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

/// What one process (one handle) holds.
#[repr(C)]
pub(crate) struct ProcessSlot {
    pub pid: AtomicU64,
    /// Inodes it has locked, for messages: see `InodeLock`.
    pub locked: [AtomicU64; NOTED_LOCKS],
    pub reservations: [AtomicU64; RESERVATIONS],
    /// How many of the reserved pages are free and only reserved while they are zeroed.
    pub zeroing_pages: AtomicU64,
}

#[repr(C)]
pub(crate) struct Control {
    magic: AtomicU64,
    /// Layout number of a mutex in the creator's C library.
    mutex_layout: AtomicU64,
    uuid: [AtomicU64; 2],
    /// The identity of the segment with the pins: see [`segment_place`](crate::segment_place).
    pub pins_identity: AtomicU64,
    /// The life in which the segment was created: see [`life`](crate::life). All processes that
    /// share it are in that one.
    pub life: AtomicU64,
    /// The life in which the segment's file itself was created; it may lie on another file system.
    /// Reads 0 if its bytes were lost.
    own_life: AtomicU64,
    /// Slots before this one have memory; the others were never used.
    allocated_slots: AtomicU64,
    pub metadata_mutex: RobustMutex,
    pub maintenance_mutex: RobustMutex,
    pub file_mutexes: [RobustMutex; FILE_MUTEXES],
    /// The log must be durable up to here before bytes are stored to pages of files with this
    /// mutex, which guards it: `FileLock`.
    pub exchanged_lsn: [AtomicU64; FILE_MUTEXES],
    /// 0, or 1 + the error that made the pool read-only for all processes.
    pub failure: AtomicU64,
    /// What failed: see `log::FAILURES`.
    pub failure_kind: AtomicU64,
    pub image: ImageVersion,
    /// The object at the root of the tree of [`object_names`](crate::object_names); 0: none.
    pub object_names_root: AtomicU64,
    /// 1 if that tree contains all objects.
    pub object_names_are_whole: AtomicU64,
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
    pub freed: [Freed; FREED],
    pub held: [Kept; HELD],
    pub moved: [Kept; MOVED],
    pub processes: [ProcessSlot; PROCESSES],
}

/// The image gets memory for this many slots at a time: a word of links for each of them, and then
/// the slots.
const STEP_SLOTS: u64 = 4096;
const STEP_WORDS: usize = STEP_SLOTS as usize * (SLOT_WORDS + 1);

const CONTROL_BYTES: usize = size_of::<Control>().next_multiple_of(4096);

/// The segment, mapped into this process.
pub(crate) struct Segment {
    memory: SharedMemory,
    slots: usize,
    pages: usize,
    /// In words from the end of the control part.
    image_start: usize,
    /// Slots of the first step: all slots, if it is the only step.
    first_slots: usize,
}

fn image_dirty_words(layout: &Layout) -> usize {
    (layout.metadata_pages as usize).div_ceil(64)
}

/// Where the image begins: behind everything else, since memory for its end is allocated last.
fn image_start_bytes(layout: &Layout) -> usize {
    let words = image_dirty_words(layout)
        + 2 * (layout.page_count as usize).div_ceil(64)
        + SLOT_SETS * (layout.slots() as usize).div_ceil(64);
    (CONTROL_BYTES + words * 8).next_multiple_of(4096)
}

/// Words of the image of this many slots: whole steps, or all slots.
fn image_words(slots: u64) -> usize {
    let (steps, rest) = (slots / STEP_SLOTS, slots % STEP_SLOTS);
    let links = match (steps, rest) {
        (_, 0) => 0,
        (0, rest) => rest,
        _ => STEP_SLOTS,
    };
    steps as usize * STEP_WORDS + links as usize + rest as usize * SLOT_WORDS
}

fn len_bytes(layout: &Layout) -> usize {
    image_start_bytes(layout) + image_words(layout.slots()) * 8
}

/// The length with the slots that every pool needs.
fn first_bytes(layout: &Layout) -> usize {
    image_start_bytes(layout) + image_words(layout.slots().min(STEP_SLOTS)) * 8
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
        let (len_bytes, first_bytes) = (len_bytes(layout), first_bytes(layout));
        let memory = SharedMemory::create_at(path, len_bytes, first_bytes, mode)
            .map_err(PoolError::SharedMemory)?;
        use std::sync::atomic::Ordering::Relaxed;
        let segment = Self::initialise(memory, pool, layout)?;
        // Relaxed: other processes find the segment through the superblock, which is written later.
        segment.control().own_life.store(life::of_file(segment.file()), Relaxed);
        segment.note_use();
        Ok(segment)
    }

    /// Creates a segment for this process alone.
    pub fn private(pool: Uuid, layout: &Layout) -> Result<Segment> {
        let memory = SharedMemory::anonymous_partly(len_bytes(layout), first_bytes(layout))
            .map_err(PoolError::SharedMemory)?;
        Self::initialise(memory, pool, layout)
    }

    fn of(memory: SharedMemory, layout: &Layout) -> Segment {
        Segment {
            memory,
            first_slots: layout.slots().min(STEP_SLOTS) as usize,
            slots: layout.slots() as usize,
            pages: layout.page_count as usize,
            image_start: (image_start_bytes(layout) - CONTROL_BYTES) / 8,
        }
    }

    fn initialise(memory: SharedMemory, pool: Uuid, layout: &Layout) -> Result<Segment> {
        use std::sync::atomic::Ordering::Relaxed;
        let segment = Self::of(memory, layout);
        let control = segment.control();
        let own = [&control.metadata_mutex, &control.maintenance_mutex];
        for mutex in own.into_iter().chain(&control.file_mutexes) {
            // SAFETY: the memory is fresh, mapped shared for all future users, and not known to any
            // other thread yet.
            unsafe { RobustMutex::init(std::ptr::from_ref(mutex).cast_mut()) }
                .map_err(PoolError::Mutex)?;
        }
        let (high, low) = pool.as_u64_pair();
        control.uuid[0].store(high, Relaxed);
        control.uuid[1].store(low, Relaxed);
        control.allocated_slots.store(layout.slots().min(STEP_SLOTS), Relaxed);
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
        let _ = lock::try_lock(self.file(), USERS, LockKind::Shared);
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
        use std::sync::atomic::Ordering::Relaxed;
        let own_life = self.control().own_life.load(Relaxed);
        own_life != life::UNKNOWN && own_life == life::of_file(self.file())
    }

    /// Wraps memory that another process created; the error tells why it does not belong to this
    /// pool.
    pub fn adopt(
        memory: SharedMemory,
        pool: Uuid,
        layout: &Layout,
    ) -> std::result::Result<Segment, String> {
        use std::sync::atomic::Ordering::Relaxed;
        if memory.len_bytes() < len_bytes(layout) {
            return Err("it is too small for this pool".to_owned());
        }
        let segment = Self::of(memory, layout);
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

    /// The descriptor.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.memory.file()
    }

    /// The control part.
    pub fn control(&self) -> &Control {
        // SAFETY: the memory is at least this long, page-aligned, lives as long as `self`, and all
        // of `Control` is atomics and mutexes, for which any bytes are valid.
        unsafe { &*self.memory.start().cast::<Control>() }
    }

    fn words(&self, first: usize, count: usize) -> &[AtomicU64] {
        debug_assert!(CONTROL_BYTES + (first + count) * 8 <= self.memory.len_bytes());
        // SAFETY: inside the memory, whose length was checked.
        let start = unsafe { self.memory.start().add(CONTROL_BYTES + first * 8) };
        // SAFETY: aligned, inside the memory, which lives as long as `self`; any bytes are valid
        // atomics.
        unsafe { std::slice::from_raw_parts(start.cast::<AtomicU64>(), count) }
    }

    /// The image of one slot; `None` if it was never used.
    #[inline]
    pub fn slot(&self, slot: u64) -> Option<&ImageSlot> {
        (slot < self.allocated_slots()).then(|| {
            let (step, index) = ((slot / STEP_SLOTS) as usize, (slot % STEP_SLOTS) as usize);
            let before = step * STEP_WORDS + self.first_slots + index * SLOT_WORDS;
            let words = self.words(self.image_start + before, SLOT_WORDS);
            words.try_into().expect("as many as a slot has")
        })
    }

    /// The links of a slot in the tree of [`object_names`](crate::object_names); `None` if it was
    /// never used.
    pub fn name_links(&self, slot: u64) -> Option<&AtomicU64> {
        (slot < self.allocated_slots()).then(|| {
            let (step, index) = ((slot / STEP_SLOTS) as usize, (slot % STEP_SLOTS) as usize);
            &self.words(self.image_start + step * STEP_WORDS + index, 1)[0]
        })
    }

    /// The number of slots with memory: slots before this one can be stored to.
    #[inline]
    pub fn allocated_slots(&self) -> u64 {
        // Acquire: pairs with the Release below.
        self.control().allocated_slots.load(Acquire)
    }

    /// Allocates the memory of a slot.
    pub fn allocate_slot(&self, slot: u64) -> Result<()> {
        let allocated = self.allocated_slots();
        if slot < allocated {
            return Ok(());
        }
        let wanted = (slot + 1).next_multiple_of(STEP_SLOTS).min(self.slots());
        let place = |slots| CONTROL_BYTES + (self.image_start + image_words(slots)) * 8;
        self.memory.allocate(place(allocated)..place(wanted)).map_err(PoolError::SharedMemory)?;
        // Release: pairs with the Acquire in `allocated_slots`. A thread that loads the value may
        // access the memory.
        self.control().allocated_slots.fetch_max(wanted, Release);
        Ok(())
    }

    /// One bit for each page of the image: changed since the last checkpoint.
    pub fn dirty_image_pages(&self) -> &[AtomicU64] {
        let pages = self.slots * SLOT_BYTES / 4096;
        self.words(0, pages.div_ceil(64))
    }

    /// One bit for each page of the pool: in use.
    pub fn used_pages(&self) -> &[AtomicU64] {
        let dirty = (self.slots * SLOT_BYTES / 4096).div_ceil(64);
        self.words(dirty, self.pages.div_ceil(64))
    }

    /// One bit for each page of the pool: free and known to be all zero.
    pub fn zeroed_pages(&self) -> &[AtomicU64] {
        let dirty = (self.slots * SLOT_BYTES / 4096).div_ceil(64);
        let pages = self.pages.div_ceil(64);
        self.words(dirty + pages, pages)
    }

    /// One bit for each slot: whether it is in the set.
    pub fn slot_set(&self, set: SlotSet) -> &[AtomicU64] {
        let dirty = (self.slots * SLOT_BYTES / 4096).div_ceil(64);
        let first = dirty + 2 * self.pages.div_ceil(64);
        let words = self.slots.div_ceil(64);
        self.words(first + set as usize * words, words)
    }

    /// The slots of a set, ascending.
    pub fn slots_in(&self, set: SlotSet) -> impl Iterator<Item = u64> + '_ {
        use std::sync::atomic::Ordering::Relaxed;
        let words = self.slot_set(set);
        let runs = bitmap::runs(|index| words[index].load(Relaxed), 0, self.slots());
        runs.flat_map(|run| run.start_page..run.end_page())
    }

    /// How many slots there are.
    pub fn slots(&self) -> u64 {
        self.slots as u64
    }
}
