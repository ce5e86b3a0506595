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
//! | turn | | by a call while it waits for the reservations of other calls ([`turn`](crate::turn)) |
//! | pins *i* | | by the writer that owns block *i* of the pins |
//! | pins of readers: inodes in use, groups of inodes, layouts | by readers ([`pins`](crate::pins)) | never taken: writers query for conflicts, and so find the pins |
//! | process *i* | | by the process that owns slot *i* of the segment |
//! | inode *n* | by its readers | by its writer |
//! | whole file *n*, bytes of files | as applications choose | as applications choose ([`advisory`](crate::advisory)) |
//! | all bytes | | by a process that creates a pool on existing media |
//!
//! Such locks belong to an open file description, are released when its last descriptor is closed,
//! also by SIGKILL, are visible across PID namespaces, and work on read-only descriptors. A forked
//! child would keep them, so it closes its copy of the descriptors ([`aquifer_vm::fork`]).

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_vm::NotInherited;

use crate::claims::Claim;
use crate::segment::{Control, PROCESSES};

const BASE: u64 = 1 << 61;
const OPENERS: u64 = BASE;
const RECOVERY: u64 = BASE + 1;
const SNAPSHOTS: u64 = BASE + 2;
const ZEROER: u64 = BASE + 3;
const BROKER: u64 = BASE + 4;
const TURN: u64 = BASE + 5;
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
pub(crate) const PIN_BLOCKS: usize = 1024;

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
            Byte::PinBlock(index) => PIN_BLOCK + index as u64,
            Byte::Process(index) => PROCESS + index as u64,
            Byte::Inode(number) => INODE + number,
        })
    }
}

/// A byte that is locked, through a private open file description, until this is dropped or the
/// process dies.
#[derive(Debug)]
pub(crate) struct HeldByte {
    _not_inherited: NotInherited,
    _file: OwnedFd,
}

impl HeldByte {
    /// Locks a byte if no other open file description has it locked; `file` must have been opened
    /// for this.
    pub fn try_take(file: OwnedFd, byte: Byte) -> io::Result<Option<HeldByte>> {
        let is_taken = lock::try_lock(file.as_fd(), byte.range(), LockKind::Exclusive)?;
        let _not_inherited = NotInherited::new(file.as_fd());
        Ok(is_taken.then_some(HeldByte { _not_inherited, _file: file }))
    }
}

/// The locks of one opened pool.
#[derive(Debug)]
pub(crate) struct Membership {
    /// Refers to the descriptors below and to the media: dropped before them.
    _not_inherited: [NotInherited; 2],
    /// Keeps this process from opening another pool through the same open file description, until
    /// the locks are released.
    claim: Mutex<Option<Claim>>,
    file: Arc<OwnedFd>,
    /// This handle's slot of the segment.
    index: AtomicUsize,
}

impl Membership {
    /// A membership that only queries locks.
    pub fn new(file: impl AsFd) -> io::Result<Membership> {
        let own = file.as_fd().try_clone_to_owned()?;
        Ok(Membership {
            _not_inherited: [NotInherited::new(file.as_fd()), NotInherited::new(own.as_fd())],
            claim: Mutex::default(),
            file: Arc::new(own),
            index: AtomicUsize::new(NO_SLOT),
        })
    }

    /// A membership that takes locks; `None` if this process already takes some through the same
    /// open file description. It inherits the locks that the open file description has, which an
    /// earlier membership may have left.
    pub fn claim(file: impl AsFd) -> io::Result<Option<Membership>> {
        let members = Membership::new(file)?;
        let claim = Claim::take(&members.file)?;
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

    /// Takes a process slot.
    pub fn join(&self, control: &Control) -> io::Result<bool> {
        for index in 0..PROCESSES {
            if self.try_lock(Byte::Process(index), LockKind::Exclusive)? {
                let slot = &control.processes[index];
                slot.locked.iter().for_each(|word| word.store(0, Relaxed));
                slot.pid.store(u64::from(std::process::id()), Relaxed);
                self.index.store(index, Relaxed);
                return Ok(true);
            }
        }
        Ok(false)
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
        control.processes.get(index).map_or(0, |slot| slot.pid.load(Relaxed) as u32)
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

    /// Releases all locks. The media may share the descriptor and keep it open.
    pub fn leave(&self) {
        let pins = LockRange { offset_bytes: PIN_BLOCK, len_bytes: PIN_BLOCKS as u64 };
        let len_bytes = READER_LAYOUTS_END - READER_USES;
        let of_reader = LockRange { offset_bytes: READER_USES, len_bytes };
        [pins, of_reader].into_iter().for_each(|range| self.unlock_range(range));
        let process = Byte::Process(self.index());
        for byte in [Byte::Zeroer, process, Byte::Openers, Byte::Snapshots, Byte::Recovery] {
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
