//! The locks that show which processes have the pool open: open-file-description locks on bytes far
//! beyond the end of the pool file.
//!
//! | byte | shared | exclusive |
//! |---|---|---|
//! | openers | by all that use the segment | by the first, during recovery; by the last, when it closes; by an exclusive opener, while it has the pool open |
//! | recovery | briefly, by readers that open | by a process that opens or closes for writing |
//! | snapshots | by readers without a segment | by the first writer, briefly |
//! | zeroer | | by a process while it zeroes free pages |
//! | broker | | by the pool's [broker](crate::broker), in a private open file description |
//! | sole | | by a writer that keeps other writers out ([`sole`](crate::open::sole)) |
//! | turn | | by a call while it waits for the reservations of other calls ([`turn`](crate::metadata::turn)) |
//! | pins *i* | | by the writer that owns block *i* of the pins |
//! | pins of readers: inodes in use, groups of inodes, layouts | by readers ([`pins`](crate::pins)) | never taken: writers query for conflicts, and so find the pins |
//! | process *i* | | by the process that owns slot *i* of the segment |
//! | inode *n* | by its readers | by its writer |
//! | whole file *n*, bytes of files | as applications choose | as applications choose ([`advisory`](crate::shared::advisory)) |
//! | all bytes | | by a process that creates a pool on existing media |
//!
//! Such locks belong to an open file description, are released when its last descriptor is closed,
//! also by SIGKILL, are visible across PID namespaces, and work on read-only descriptors. Each handle
//! has one for its locks alone ([`LockFile`]), because a mapping would keep them as well. A forked
//! child would keep them, so it closes its copy of the descriptors ([`aquifer_vm::fork`]).
//!
//! A program that closes descriptors that it does not know releases them as well. Then this handle is
//! dead for all others, while it may be in the middle of a change. So it compares its descriptor before
//! each change and before what it writes durably, at most one tick of the clock (1 to 4 ms) before,
//! and changes nothing without it ([`PoolError::LocksLost`](crate::PoolError::LocksLost)). As long as
//! the descriptor refers to the same open file description, the locks are held: asking for a lock
//! would take the longer the more locks there are.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aquifer_sys::high_fd::HeldFile;
use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_vm::NotInherited;

use crate::media::Media;
use crate::media::lock_file::LockFile;
use crate::shared::claims::Claim;
use crate::shared::segment::{Control, PROCESSES, Segment};

const BASE: u64 = 1 << 61;
const OPENERS: u64 = BASE;
const RECOVERY: u64 = BASE + 1;
const SNAPSHOTS: u64 = BASE + 2;
const ZEROER: u64 = BASE + 3;
const BROKER: u64 = BASE + 4;
const TURN: u64 = BASE + 5;
const SOLE: u64 = BASE + 6;
const PROCESS: u64 = BASE + (1 << 12);
const PIN_BLOCK: u64 = BASE + (1 << 13);
const INODE: u64 = BASE + (1 << 16);
/// Advisory locks of whole files start here: one byte for each possible inode.
pub(crate) const WHOLE_FILES: u64 = BASE + (1 << 33);
/// Advisory locks of bytes of files start here, and use as many bytes as this number.
pub(crate) const FILE_BYTES: u64 = 1 << 62;
/// Pins of readers: one byte for each possible inode, for each way to use an inode.
pub(crate) const READER_USES: u64 = BASE + (1 << 34);
/// Pins of readers: a byte for each 64 inodes, directly before those of layouts.
pub(crate) const READER_GROUPS: u64 = READER_LAYOUTS - (1 << 26);
/// Pins of readers: a byte for each layout version of each inode below 2²⁸.
pub(crate) const READER_LAYOUTS: u64 = READER_LAYOUTS_END - (1 << 60);
pub(crate) const READER_LAYOUTS_END: u64 = FILE_BYTES;
const NO_SLOT: usize = usize::MAX;
/// How many blocks the pins of writers have: each has a byte.
pub(crate) const PIN_BLOCKS: usize = 16384;
/// How many numbers that may be a dead handle's are tried before one that was never taken.
const PERHAPS_DEAD: usize = 16;

/// The ranges do not overlap.
const _: () = {
    let numbers = 1 << 32;
    assert!(PROCESS + PROCESSES as u64 <= PIN_BLOCK && PIN_BLOCK + PIN_BLOCKS as u64 <= INODE);
    assert!(INODE + numbers <= WHOLE_FILES && WHOLE_FILES + numbers <= READER_USES);
    assert!(READER_USES + 4 * numbers <= READER_GROUPS);
};

/// A byte to lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Byte {
    Openers,
    Recovery,
    Snapshots,
    Zeroer,
    Broker,
    Turn,
    Sole,
    PinBlock(usize),
    Process(usize),
    Inode(u64),
}

impl Byte {
    fn range(self) -> LockRange {
        LockRange::byte(match self {
            Byte::Openers => OPENERS,
            Byte::Recovery => RECOVERY,
            Byte::Snapshots => SNAPSHOTS,
            Byte::Zeroer => ZEROER,
            Byte::Broker => BROKER,
            Byte::Turn => TURN,
            Byte::Sole => SOLE,
            Byte::PinBlock(index) => PIN_BLOCK + index as u64,
            Byte::Process(index) => PROCESS + index as u64,
            Byte::Inode(number) => INODE + number,
        })
    }
}

/// A byte that is locked, through a private open file description, until this is dropped or the
/// process dies.
#[derive(Debug)]
pub(crate) struct HeldByte(LockFile);

impl HeldByte {
    /// Locks a byte of a file if no other open file description has it locked.
    pub fn try_take(file: BorrowedFd<'_>, byte: Byte) -> io::Result<Option<HeldByte>> {
        let own = LockFile::open(file, true)?;
        let is_taken = lock::try_lock(own.as_fd(), byte.range(), LockKind::Exclusive)?;
        Ok(is_taken.then_some(HeldByte(own)))
    }
}

impl Drop for HeldByte {
    fn drop(&mut self) {
        // Before it is closed: a child that is forked in between would keep it. In a child itself, the
        // descriptor is that of another file.
        let _ = lock::unlock(self.0.as_fd(), LockRange::WHOLE);
    }
}

/// The numbers below `limit` in the order in which a handle tries to take one. Trying takes a system
/// call, which takes the longer the more locks there are, so the first are those that are free by
/// the state in shared memory. Those from `used` on were never taken, and have no memory yet: before
/// them, some are tried whose owner may be dead.
pub(crate) fn to_try(
    used: usize,
    limit: usize,
    is_free: impl Fn(usize) -> bool + Copy,
) -> impl Iterator<Item = usize> {
    let used = used.min(limit);
    let start = std::process::id() as usize;
    let free = (0..used).filter(move |&index| is_free(index));
    let perhaps = (0..used).map(move |step| (start + step) % used.max(1));
    let perhaps = perhaps.filter(move |&index| !is_free(index)).take(PERHAPS_DEAD);
    free.chain(perhaps).chain(used..limit).chain(0..used)
}

/// The locks of one opened pool.
#[derive(Debug)]
pub(crate) struct Membership {
    /// Refers to the descriptor below and to the media: dropped before them.
    _not_inherited: [NotInherited; 2],
    /// Keeps this process from opening another pool through the media's open file description, until
    /// the locks are released.
    claim: Mutex<Option<Claim>>,
    /// The media's open file description, and the number that they have of it.
    of_media: (Arc<HeldFile>, RawFd),
    /// Has the locks.
    file: LockFile,
    /// This handle's slot of the segment.
    index: AtomicUsize,
    /// Whether a descriptor of the handle is lost. Changes once.
    has_ended: AtomicBool,
}

impl Membership {
    /// A membership that only queries locks.
    pub fn new(file: impl AsFd) -> io::Result<Membership> {
        Membership::with(file.as_fd(), LockFile::share)
    }

    fn with(
        file: BorrowedFd<'_>,
        locks: impl FnOnce(&Arc<HeldFile>) -> LockFile,
    ) -> io::Result<Membership> {
        let of_media = Arc::new(HeldFile::new(file.try_clone_to_owned()?)?);
        Ok(Membership {
            _not_inherited: [NotInherited::new(file), NotInherited::new(of_media.as_fd())],
            claim: Mutex::default(),
            file: locks(&of_media),
            of_media: (of_media, file.as_raw_fd()),
            index: AtomicUsize::new(NO_SLOT),
            has_ended: AtomicBool::new(false),
        })
    }

    /// A membership that takes locks, through `locks` if the caller has some already; `None` if this
    /// process has claimed the media's open file description already.
    pub fn claim(media: &dyn Media, locks: Option<LockFile>) -> io::Result<Option<Membership>> {
        let members = Membership::with(media.file(), |of_media| {
            locks.unwrap_or_else(|| LockFile::open_or_share(of_media, media.is_writable()))
        })?;
        let claim = Claim::take(&members.of_media.0)?;
        let is_claimed = claim.is_some();
        *members.claim.lock().unwrap_or_else(PoisonError::into_inner) = claim;
        Ok(is_claimed.then_some(members))
    }

    /// Locks a byte if no other handle has it; if this handle has it, changes the mode.
    pub fn try_lock(&self, byte: Byte, kind: LockKind) -> io::Result<bool> {
        lock::try_lock(self.file.as_fd(), byte.range(), kind)
    }

    /// Locks a byte once no other handle has it; false if that took longer than `timeout`.
    pub fn lock(&self, byte: Byte, kind: LockKind, timeout: Duration) -> io::Result<bool> {
        let started = Instant::now();
        while !self.try_lock(byte, kind)? {
            if started.elapsed() > timeout {
                return Ok(false);
            }
            // This polls only while another process opens or closes the pool. The kernel's blocking
            // lock has no timeout.
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(true)
    }

    pub fn unlock(&self, byte: Byte) {
        // Cannot fail on a descriptor that was locked.
        let _ = lock::unlock(self.file.as_fd(), byte.range());
    }

    /// Whether another handle's lock conflicts with this one.
    pub fn is_locked_by_other(&self, byte: Byte, kind: LockKind) -> bool {
        lock::conflict(self.file.as_fd(), byte.range(), kind).map_or(true, |found| found.is_some())
    }

    /// As [`Membership::try_lock`], for a range.
    pub fn try_lock_range(&self, range: LockRange, kind: LockKind) -> io::Result<bool> {
        lock::try_lock(self.file.as_fd(), range, kind)
    }

    pub fn unlock_range(&self, range: LockRange) {
        // As `unlock`.
        let _ = lock::unlock(self.file.as_fd(), range);
    }

    /// A range that another handle has locked, in either mode, and that overlaps this one.
    pub fn locked_by_other_in(&self, range: &Range<u64>) -> io::Result<Option<Range<u64>>> {
        let len_bytes = range.end - range.start;
        let range = LockRange { offset_bytes: range.start, len_bytes };
        let found = lock::conflict(self.file.as_fd(), range, LockKind::Exclusive)?;
        Ok(found.map(|found| {
            let LockRange { offset_bytes, len_bytes } = found.range;
            // A length of 0 stands for everything from the start on.
            let len_bytes = if len_bytes == 0 { u64::MAX } else { len_bytes };
            offset_bytes..offset_bytes.saturating_add(len_bytes)
        }))
    }

    /// Whether the locks were held at most one tick of the clock (1 to 4 ms) ago.
    #[inline]
    pub fn were_kept(&self) -> bool {
        // Relaxed: a thread that sees the old value acts as it would have a moment before.
        !self.has_ended.load(Relaxed) && self.file.held().was_there_lately()
    }

    /// Whether the locks are held now. Once they are lost, this handle counts as dead for all others,
    /// and stays so.
    pub fn are_kept(&self) -> bool {
        !self.has_ended.load(Relaxed) && self.file.held().is_there()
    }

    /// Counts as dead from now on, because a descriptor of the handle is lost: releases the locks that
    /// are still there.
    #[cold]
    pub fn end(&self) {
        self.has_ended.store(true, Relaxed);
        let claim = self.claim.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(claim) = claim else { return };
        let held = self.file.held();
        if !self.file.is_shared() {
            if held.is_there() {
                let _ = lock::unlock(held.as_fd(), LockRange::WHOLE);
            }
            return;
        }
        // SAFETY: not -1, and compared before it is used. It is that of the media, or was.
        let of_media = unsafe { BorrowedFd::borrow_raw(self.of_media.1) };
        let identity = held.identity();
        let file = if held.is_there() {
            held.as_fd()
        } else if identity.is_marked() && identity.is_of(of_media) {
            of_media
        } else {
            return;
        };
        claim.give_up(file, || drop(lock::unlock(file, LockRange::WHOLE)));
    }

    /// Locks the byte of a process slot that no handle has; `None` if all are taken.
    pub fn lock_slot(&self, segment: &Segment) -> io::Result<Option<usize>> {
        let pids = &segment.control().pids;
        let is_free = |index: usize| pids[index].load(Relaxed) == 0;
        for index in to_try(segment.used_processes(), PROCESSES, is_free) {
            if self.try_lock(Byte::Process(index), LockKind::Exclusive)? {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// Takes the process slot whose byte it has locked, and which has memory.
    pub fn join(&self, segment: &Segment, index: usize) {
        segment.process(index).locked.iter().for_each(|word| word.store(0, Relaxed));
        segment.control().pids[index].store(u64::from(std::process::id()), Relaxed);
        self.index.store(index, Relaxed);
    }

    /// The slot of this handle; 0 before it has one, when no other handle is there.
    pub fn index(&self) -> usize {
        match self.index.load(Relaxed) {
            NO_SLOT => 0,
            index => index,
        }
    }

    /// Whether another handle has the pool open for writing: its lock is one that a read-only
    /// descriptor cannot have.
    pub fn has_writers(&self) -> bool {
        let slots = LockRange { offset_bytes: PROCESS, len_bytes: PROCESSES as u64 };
        lock::conflict(self.file.as_fd(), slots, LockKind::Shared)
            .is_ok_and(|found| found.is_some())
    }

    /// Whether the owner of a process slot lives: a writer, whose lock is one that a read-only
    /// descriptor cannot have.
    pub fn is_alive(&self, index: usize) -> bool {
        // A reader has no slot, so this matches none.
        index == self.index.load(Relaxed)
            || self.is_locked_by_other(Byte::Process(index), LockKind::Shared)
    }

    /// The process that owns a slot, as numbered in its own PID namespace.
    pub fn pid_of(&self, control: &Control, index: usize) -> u32 {
        control.pids.get(index).map_or(0, |pid| pid.load(Relaxed) as u32)
    }

    /// Reduces the lock on all bytes, taken to create a pool, to those that keep other processes
    /// from opening it.
    pub fn keep_out_only(&self) {
        let before = LockRange { offset_bytes: 0, len_bytes: OPENERS };
        let behind = LockRange { offset_bytes: SNAPSHOTS + 1, len_bytes: 0 };
        for range in [before, behind] {
            let _ = lock::unlock(self.file.as_fd(), range);
        }
    }

    /// Gives up the process slot, and releases all locks.
    pub fn leave_slot(&self, control: &Control) {
        let index = self.index.load(Relaxed);
        if index != NO_SLOT {
            // Before the lock is released: then the slot may be the next owner's.
            control.pids[index].store(0, Relaxed);
        }
        self.leave();
    }

    /// Releases the locks of the members. Those of inodes are released with their guards.
    pub fn leave(&self) {
        let pins = LockRange { offset_bytes: PIN_BLOCK, len_bytes: PIN_BLOCKS as u64 };
        let len_bytes = READER_LAYOUTS_END - READER_USES;
        let of_reader = LockRange { offset_bytes: READER_USES, len_bytes };
        [pins, of_reader].into_iter().for_each(|range| self.unlock_range(range));
        let process = Byte::Process(self.index());
        for byte in
            [Byte::Zeroer, process, Byte::Sole, Byte::Openers, Byte::Snapshots, Byte::Recovery]
        {
            self.unlock(byte);
        }
        self.give_up_claim();
    }

    /// Releases the claim, so that this process can use the open file description for another pool.
    pub fn give_up_claim(&self) {
        drop(self.claim.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As many handles as there are slots join, and no more; the slots of those that left and of
    /// those that died are taken again, before there is memory for others.
    #[test]
    fn every_slot_is_taken_and_taken_again() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let layout = crate::options::PoolOptions::default().layout(4 << 20).unwrap();
        let segment = Segment::private(uuid::Uuid::from_u128(7), &layout).unwrap();
        let join = || {
            let members = Membership::new(file.reopen().unwrap()).unwrap();
            let index = members.lock_slot(&segment).unwrap()?;
            segment.allocate_process(index).unwrap();
            members.join(&segment, index);
            Some(members)
        };
        // SAFETY: zeros are a value of the structure, and the calls only read and write it.
        unsafe {
            let mut limit: libc::rlimit = std::mem::zeroed();
            assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
            limit.rlim_cur = limit.rlim_max;
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        }

        let first: Vec<Membership> = (0..20).map(|_| join().unwrap()).collect();
        assert!(first.iter().enumerate().all(|(index, members)| members.index() == index));
        first[3].leave_slot(segment.control());
        assert_eq!(join().unwrap().index(), 3);
        // Their death: the locks end, and the numbers stay.
        drop(first);
        let again: Vec<usize> = (0..10).map(|_| join().unwrap().index()).collect();
        assert!(again.iter().all(|&index| index < 20), "{again:?}");
        assert_eq!(segment.used_processes(), 20);

        let all: Vec<Membership> = (0..PROCESSES).map(|_| join().unwrap()).collect();
        let indexes: std::collections::BTreeSet<usize> =
            all.iter().map(|one| one.index()).collect();
        assert_eq!(indexes.len(), PROCESSES);
        assert!(join().is_none());
        assert!(all[0].is_alive(PROCESSES - 1) && all[0].has_writers());
        all[77].leave();
        assert_eq!(join().unwrap().index(), all[77].index());
    }

    /// Writers lock their slots in a mode that a read-only descriptor cannot have.
    #[test]
    fn a_lock_that_a_reader_can_have_makes_no_writer() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let again = || Membership::new(file.reopen().unwrap()).unwrap();
        let (own, reader, writer) = (again(), again(), again());
        assert!(reader.try_lock(Byte::Process(3), LockKind::Shared).unwrap());
        assert!(!own.is_alive(3) && !own.has_writers());
        assert!(writer.try_lock(Byte::Process(4), LockKind::Exclusive).unwrap());
        assert!(own.is_alive(4) && own.has_writers());
        assert!(!own.is_alive(3));
    }
}
