//! The segment: what the processes of a pool share at run time.
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
//! All of it is derived but the word that says that the pool has failed, and only recovery of changes that were not durable asks for that one
//! ([`segment_place`](crate::segment_place)): who opens the pool as the first process builds it from the
//! media, and who closes it as the last one removes it. Metadata is changed only in the image; it reaches its
//! place on media at a checkpoint, when its log records are durable there (*no-steal*). So one scheme serves
//! all persistence domains.
//!
//! # Who may touch what
//! Everything is an atomic, because a process may die or be stopped between any two instructions, and because others
//! look without a lock. All *changes* are made while holding the metadata mutex, except those of the signal words, of
//! the failure word, of the states by which the owner of an append speaks of it, of the files that room was asked for, and
//! of fields that only the holder of the maintenance mutex changes (`applied`, `sequence`). What is looked at without a lock has modules of its own, with models:
//! [`image_words`](crate::image_words), [`appends`](crate::appends), [`signal`](crate::signal). The order of the stores matters wherever the next holder must be able to repair what a dead one left;
//! the functions that make them say so.
//!
//! Among the image lie the links of [`object_names`](crate::object_names), by which objects are found by their names.
//!
//! Beside it lies a second segment, of the [`pins`](crate::pins) of writers. Readers do not open that one, and map this one for reading only.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Release};

use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_sys::robust::{self, RobustMutex};
use aquifer_sys::shared_memory::SharedMemory;
use uuid::Uuid;

use crate::appends::Appends;
use crate::bitmap;
use crate::create::new_uuid;
use crate::error::{PoolError, Result};
use crate::format::inode::SLOT_BYTES;
use crate::format::layout::Layout;
use crate::format::slot_change::SLOT_WORDS;
use crate::image_words::{ImageSlot, ImageVersion};
use crate::life;
use crate::signal::Signal;
use crate::sync::AtomicU64;

/// Freed runs that can wait for the durable tail.
pub(crate) const FREED: usize = 1 << 16;
/// Processes, or handles, that can have a pool open. Their numbers are owners of mutexes.
pub(crate) const PROCESSES: usize = 256;
const _: () = assert!(PROCESSES <= 1 << 16);
/// Locked inodes that are noted for each handle.
pub(crate) const NOTED_LOCKS: usize = 32;
/// Freed runs that can wait for pins.
pub(crate) const HELD: usize = 1 << 15;
/// Runs that went from one inode to another and may be pinned as the first one's.
pub(crate) const MOVED: usize = 1 << 12;
/// Runs that one handle can have taken without having named them yet.
pub(crate) const RESERVATIONS: usize = 512;
/// Free runs of at least 1, 2, 4, … pages have a place each from which they are looked for.
pub(crate) const RUN_CLASSES: usize = 17;

/// Locks of files that are being written. Files that have the same one wait for each other.
pub(crate) const FILE_MUTEXES: usize = 512;

/// Locked in the file of a segment by each process that uses it.
const USERS: LockRange = LockRange::byte(0);

const MAGIC: u64 = u64::from_le_bytes(*b"AQSEGM07");

/// Pages that nobody names any more, until the durable tail has passed the record that says so.
#[repr(C)]
pub(crate) struct Freed {
    pub kept: Kept,
    pub lsn: AtomicU64,
}

/// Pages that an inode had, and by which pins they are kept.
#[repr(C)]
pub(crate) struct Kept {
    pub run: AtomicU64,
    /// The inode and its layout version before the change: a `PinValue`.
    pub owner: AtomicU64,
}

/// What a process (a handle) holds.
#[repr(C)]
pub(crate) struct ProcessSlot {
    pub pid: AtomicU64,
    /// Inodes it has locked, for messages: see `InodeLock`.
    pub locked: [AtomicU64; NOTED_LOCKS],
    pub reservations: [AtomicU64; RESERVATIONS],
    /// Pages of these that are free but for being zeroed.
    pub zeroing_pages: AtomicU64,
}

#[repr(C)]
pub(crate) struct Control {
    magic: AtomicU64,
    /// What a mutex of the maker's C library looks like.
    mutex_layout: AtomicU64,
    uuid: [AtomicU64; 2],
    /// Of the pins beside it: see [`segment_place`](crate::segment_place).
    pub pins_identity: AtomicU64,
    /// The life in which it was made: see [`life`](crate::life). All who share it are in that one.
    pub life: AtomicU64,
    /// The life in which the file of the segment itself was made, which may lie on another file system. Of bytes that were lost it is 0.
    own_life: AtomicU64,
    /// Slots before this one have memory; those from it on were never used.
    allocated_slots: AtomicU64,
    pub metadata_mutex: RobustMutex,
    pub maintenance_mutex: RobustMutex,
    pub file_mutexes: [RobustMutex; FILE_MUTEXES],
    /// Up to where the log must be durable before bytes are stored to pages of files with this mutex, which guards it: `FileLock`.
    pub exchanged_lsn: [AtomicU64; FILE_MUTEXES],
    /// 0, or 1 + the error that made the pool read-only for everybody.
    pub failure: AtomicU64,
    /// What failed: see `log::FAILURES`.
    pub failure_kind: AtomicU64,
    pub image: ImageVersion,
    /// The object at the root of the tree of [`object_names`](crate::object_names); 0: none.
    pub object_names_root: AtomicU64,
    /// 1 if that tree has all objects.
    pub object_names_are_whole: AtomicU64,
    /// Of the hashes in that tree: a random number, so that nobody can choose names that collide.
    pub object_names_seed: AtomicU64,
    /// The inode that a transaction may give back although it had a link before: see [`pins`](crate::pins). 0: none.
    pub claimed_inode: AtomicU64,
    pub generation: AtomicU64,
    /// Sequence number of the superblocks on media.
    pub sequence: AtomicU64,
    /// Everything before it is on media, at its place: its log space can be overwritten.
    pub tail_lsn: AtomicU64,
    /// Everything before it was copied to its place, and is visible there.
    pub applied_lsn: AtomicU64,
    /// Behind the last commit: from here on, the log has only metadata.
    pub content_end_lsn: AtomicU64,
    /// Behind the last record that made fresh pages used ones.
    pub fresh_lsn: AtomicU64,
    /// Rung when the log is durable further, or `failure` changed.
    pub signal: Signal,
    /// Rung when reservations end.
    pub given_back: Signal,
    /// Entries of `freed` in use are `freed[first % FREED] .. freed[next % FREED]`, in the order of their positions.
    pub freed_first: AtomicU64,
    pub freed_next: AtomicU64,
    /// `freed` was looked at with the log up to here, and its first entry can only be freed when pins are gone.
    pub freed_looked_lsn: AtomicU64,
    /// Entries of `held` in use are the first ones, in no order.
    pub held_count: AtomicU64,
    /// Entries of `moved` in use are the first ones, in no order.
    pub moved_count: AtomicU64,
    /// No free run of at least 2ⁱ pages starts before `first_free_page[i]`.
    pub first_free_page: [AtomicU64; RUN_CLASSES],
    /// Where to look next for room for a file: for any pages, for such with zeros, for such without.
    pub next_page: [AtomicU64; 3],
    /// Where to look next for pages to be zeroed.
    pub next_page_to_zero: AtomicU64,
    /// The head's, as of the last change.
    pub fresh_from_page: AtomicU64,
    /// Pages whose bit in `used_pages` is not set.
    pub free_count: AtomicU64,
    /// Pages whose bit in `zeroed_pages` is set.
    pub zeroed_count: AtomicU64,
    /// Pages before this one are not fresh, and will not be after a power cut.
    pub durable_fresh_from_page: AtomicU64,
    /// Where to look for a free slot first.
    pub free_slot_hint: AtomicU64,
    pub appends: Appends,
    pub freed: [Freed; FREED],
    pub held: [Kept; HELD],
    pub moved: [Kept; MOVED],
    pub processes: [ProcessSlot; PROCESSES],
}

/// The image gets memory for so many slots at a time: a word of links for each of them, and then the slots.
const STEP_SLOTS: u64 = 4096;
const STEP_WORDS: usize = STEP_SLOTS as usize * (SLOT_WORDS + 1);

const CONTROL_BYTES: usize = size_of::<Control>().next_multiple_of(4096);

/// The segment, mapped into this process.
pub(crate) struct Segment {
    memory: SharedMemory,
    slots: usize,
    pages: usize,
    /// In words behind the control part.
    image_start: usize,
    /// Slots of the first step, which are all there are if it is the only one.
    first_slots: usize,
}

fn image_dirty_words(layout: &Layout) -> usize {
    (layout.metadata_pages as usize).div_ceil(64)
}

/// Where the image begins: behind all else, since memory for its end comes last.
fn image_start_bytes(layout: &Layout) -> usize {
    let words = image_dirty_words(layout)
        + 2 * (layout.page_count as usize).div_ceil(64)
        + SLOT_SETS * (layout.slots() as usize).div_ceil(64);
    (CONTROL_BYTES + words * 8).next_multiple_of(4096)
}

/// Words of the image of so many slots, which are whole steps or all that there are.
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

/// With as many slots as everybody needs.
fn first_bytes(layout: &Layout) -> usize {
    image_start_bytes(layout) + image_words(layout.slots().min(STEP_SLOTS)) * 8
}

/// Of which slots there is a set: one bit for each slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotSet {
    /// There is something in it.
    Occupied,
    /// There is an object in it.
    Objects,
    /// There is an inode of a file without links in it.
    Orphans,
    /// The log has a whole change of it, behind the place where the next checkpoint's tail will be.
    Logged,
    /// There is a file in it that somebody asked room behind the end for.
    WithRoom,
}

const SLOT_SETS: usize = 5;

impl Segment {
    /// Makes a segment that other processes can open, when the superblock names it.
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

    /// Makes a segment for this process alone.
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
            // SAFETY: the memory is fresh, shared by all who will use it, and nobody else knows it yet.
            unsafe { RobustMutex::init(std::ptr::from_ref(mutex).cast_mut()) }
                .map_err(PoolError::Mutex)?;
        }
        let (high, low) = pool.as_u64_pair();
        control.uuid[0].store(high, Relaxed);
        control.uuid[1].store(low, Relaxed);
        control.allocated_slots.store(layout.slots().min(STEP_SLOTS), Relaxed);
        control.object_names_seed.store(new_uuid()?.as_u64_pair().0, Relaxed);
        control.mutex_layout.store(robust::LAYOUT.into(), Relaxed);
        // Others find the segment through the superblock, which is written later.
        control.magic.store(MAGIC, Relaxed);
        Ok(segment)
    }

    /// Locks the file of the segment as all processes do that use it, until this process has closed it. A lock that is not granted, since a
    /// reader has locked the file otherwise, shows as well that the file is in use.
    pub fn note_use(&self) {
        let _ = lock::try_lock(self.file(), USERS, LockKind::Shared);
    }

    /// Whether a process uses the segment whose file this is; `file` is an open file of the caller's own.
    pub fn is_in_use(file: impl AsFd) -> bool {
        lock::conflict(file.as_fd(), USERS, LockKind::Exclusive)
            .map_or(true, |found| found.is_some())
    }

    /// Whether all that was stored to the segment is there: its file may lie on a disk, whose page cache was lost.
    pub fn is_whole(&self) -> bool {
        use std::sync::atomic::Ordering::Relaxed;
        let own_life = self.control().own_life.load(Relaxed);
        own_life != life::UNKNOWN && own_life == life::of_file(self.file())
    }

    /// The segment in memory that another process made; the error says why it does not belong to this pool.
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
        // SAFETY: the memory is at least this long, page-aligned, lives as long as `self`, and all of `Control` is
        // atomics and mutexes, for which any bytes are valid.
        unsafe { &*self.memory.start().cast::<Control>() }
    }

    fn words(&self, first: usize, count: usize) -> &[AtomicU64] {
        debug_assert!(CONTROL_BYTES + (first + count) * 8 <= self.memory.len_bytes());
        // SAFETY: inside the memory, whose length was checked.
        let start = unsafe { self.memory.start().add(CONTROL_BYTES + first * 8) };
        // SAFETY: aligned, inside the memory, atomics.
        unsafe { std::slice::from_raw_parts(start.cast::<AtomicU64>(), count) }
    }

    /// The image of one slot; `None` of one that was never used.
    #[inline]
    pub fn slot(&self, slot: u64) -> Option<&ImageSlot> {
        (slot < self.allocated_slots()).then(|| {
            let (step, index) = ((slot / STEP_SLOTS) as usize, (slot % STEP_SLOTS) as usize);
            let before = step * STEP_WORDS + self.first_slots + index * SLOT_WORDS;
            let words = self.words(self.image_start + before, SLOT_WORDS);
            words.try_into().expect("as many as a slot has")
        })
    }

    /// The links of a slot in the tree of [`object_names`](crate::object_names); `None` of one that was never used.
    pub fn name_links(&self, slot: u64) -> Option<&AtomicU64> {
        (slot < self.allocated_slots()).then(|| {
            let (step, index) = ((slot / STEP_SLOTS) as usize, (slot % STEP_SLOTS) as usize);
            &self.words(self.image_start + step * STEP_WORDS + index, 1)[0]
        })
    }

    /// Slots before this one can be stored to.
    #[inline]
    pub fn allocated_slots(&self) -> u64 {
        // Acquire: pairs with the Release below.
        self.control().allocated_slots.load(Acquire)
    }

    /// Makes sure that a slot can be stored to.
    pub fn allocate_slot(&self, slot: u64) -> Result<()> {
        let allocated = self.allocated_slots();
        if slot < allocated {
            return Ok(());
        }
        let wanted = (slot + 1).next_multiple_of(STEP_SLOTS).min(self.slots());
        let place = |slots| CONTROL_BYTES + (self.image_start + image_words(slots)) * 8;
        self.memory.allocate(place(allocated)..place(wanted)).map_err(PoolError::SharedMemory)?;
        // Release: who sees it may touch the memory.
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

    /// One bit for each page of the pool: it is free, and all zero.
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
