//! Who has the pool open: open-file-description locks on bytes far behind the end of the pool file.
//!
//! | byte | shared | exclusive |
//! |---|---|---|
//! | openers | by all that use the segment | by the first, during recovery; by the last, when it closes; for good, by who opens exclusively |
//! | recovery | briefly, by readers that open | by who opens or closes for writing |
//! | snapshots | by readers without a segment | by the first writer, briefly |
//! | zeroer | | by who zeroes free pages, meanwhile |
//! | broker | | by the pool's [broker](crate::broker), in an open file of its own |
//! | turn | | by the call that waits for the reservations of others, meanwhile ([`turn`](crate::turn)) |
//! | pins *i* | | by the writer that owns block *i* of the pins |
//! | pins of readers: inodes in use, groups of inodes, layouts | by readers ([`pins`](crate::pins)) | by none: writers ask for it, and so find the pins |
//! | process *i* | | by the process whose slot *i* of the segment is |
//! | inode *n* | by its readers | by its writer |
//! | whole file *n*, bytes of files | as their users like | as their users like ([`advisory`](crate::advisory)) |
//! | all there are | | by who makes media of what was there |
//!
//! Such locks belong to an open file, vanish when its last descriptor is closed, also by SIGKILL, are seen
//! across PID namespaces, and work on descriptors for reading. A forked child would keep them, so it closes its copy of the
//! descriptors ([`aquifer_vm::fork`]).

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
use crate::pins::BLOCKS;
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
/// Advisory locks of whole files: as many bytes as there can be inodes, from here on.
pub(crate) const WHOLE_FILES: u64 = BASE + (1 << 33);
/// Advisory locks of bytes of files: as many bytes as this number says, from it on.
pub(crate) const FILE_BYTES: u64 = 1 << 62;
/// Pins of readers: for each way to use an inode as many bytes as there can be inodes.
pub(crate) const READER_USES: u64 = BASE + (1 << 34);
/// Pins of readers: a byte for each 64 inodes, right before those of layouts.
pub(crate) const READER_GROUPS: u64 = READER_LAYOUTS - (1 << 26);
/// Pins of readers: a byte for each layout version of each inode below 2²⁸.
pub(crate) const READER_LAYOUTS: u64 = READER_LAYOUTS_END - (1 << 60);
pub(crate) const READER_LAYOUTS_END: u64 = FILE_BYTES;
const NO_SLOT: usize = usize::MAX;

/// No byte means two things.
const _: () = {
    let numbers = 1 << 32;
    assert!(PROCESS + PROCESSES as u64 <= PIN_BLOCK && PIN_BLOCK + BLOCKS as u64 <= INODE);
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

/// A byte, locked in an open file of its own until this is dropped, or the process dies.
#[derive(Debug)]
pub(crate) struct HeldByte {
    _not_inherited: NotInherited,
    _file: OwnedFd,
}

impl HeldByte {
    /// Locks a byte if nobody else has it; `file` was opened for that.
    pub fn try_take(file: OwnedFd, byte: Byte) -> io::Result<Option<HeldByte>> {
        let is_taken = lock::try_lock(file.as_fd(), byte.range(), LockKind::Exclusive)?;
        let _not_inherited = NotInherited::new(file.as_fd());
        Ok(is_taken.then_some(HeldByte { _not_inherited, _file: file }))
    }
}

/// The locks of one opened pool.
#[derive(Debug)]
pub(crate) struct Membership {
    /// Speaks of the descriptors below and of the media: dropped before them.
    _not_inherited: [NotInherited; 2],
    /// Keeps others of this process from using the open file for a pool of their own, until the locks are given back.
    claim: Mutex<Option<Claim>>,
    file: Arc<OwnedFd>,
    /// The slot of the segment that is this handle's.
    index: AtomicUsize,
}

impl Membership {
    /// To look at the locks of others.
    pub fn new(file: impl AsFd) -> io::Result<Membership> {
        let own = file.as_fd().try_clone_to_owned()?;
        Ok(Membership {
            _not_inherited: [NotInherited::new(file.as_fd()), NotInherited::new(own.as_fd())],
            claim: Mutex::default(),
            file: Arc::new(own),
            index: AtomicUsize::new(NO_SLOT),
        })
    }

    /// To take locks; `None` if this process takes some through the same open file already. Its locks are those that the file has now,
    /// which an earlier membership may have left to it.
    pub fn claim(file: impl AsFd) -> io::Result<Option<Membership>> {
        let members = Membership::new(file)?;
        let claim = Claim::take(&members.file)?;
        let is_claimed = claim.is_some();
        *members.claim.lock().unwrap_or_else(PoisonError::into_inner) = claim;
        Ok(is_claimed.then_some(members))
    }

    /// Locks a byte if nobody else has it; a lock that is held already changes its kind.
    pub fn try_lock(&self, byte: Byte, kind: LockKind) -> io::Result<bool> {
        lock::try_lock(self.file.as_fd(), byte.range(), kind)
    }

    /// Locks a byte when nobody else has it any more; false if that took longer than `timeout`.
    pub fn lock(&self, byte: Byte, kind: LockKind, timeout: Duration) -> io::Result<bool> {
        let started = Instant::now();
        while !self.try_lock(byte, kind)? {
            if started.elapsed() > timeout {
                return Ok(false);
            }
            // Only while another process opens or closes the pool. The kernel's own waiting has no time limit.
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(true)
    }

    pub fn unlock(&self, byte: Byte) {
        // A descriptor that can be locked can be unlocked.
        let _ = lock::unlock(self.file.as_fd(), byte.range());
    }

    /// Whether somebody else's lock stands against this one.
    pub fn is_locked_by_other(&self, byte: Byte, kind: LockKind) -> bool {
        lock::conflict(self.file.as_fd(), byte.range(), kind).map_or(true, |found| found.is_some())
    }

    /// As [`Membership::try_lock`], of a range.
    pub fn try_lock_range(&self, range: LockRange, kind: LockKind) -> io::Result<bool> {
        lock::try_lock(self.file.as_fd(), range, kind)
    }

    pub fn unlock_range(&self, range: LockRange) {
        // As `unlock`.
        let _ = lock::unlock(self.file.as_fd(), range);
    }

    /// A range that another handle has locked, in any way, and that has a byte of this one.
    pub fn locked_by_other_in(&self, range: &Range<u64>) -> io::Result<Option<Range<u64>>> {
        let len_bytes = range.end - range.start;
        let range = LockRange { offset_bytes: range.start, len_bytes };
        let found = lock::conflict(self.file.as_fd(), range, LockKind::Exclusive)?;
        Ok(found.map(|found| {
            let LockRange { offset_bytes, len_bytes } = found.range;
            // No length stands for all there can be behind the start.
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

    /// The slot of this handle; 0 before it has one, when it is alone anyway.
    pub fn index(&self) -> usize {
        match self.index.load(Relaxed) {
            NO_SLOT => 0,
            index => index,
        }
    }

    /// Whether another handle has the pool open for writing, by a lock that a descriptor for reading cannot have.
    pub fn has_writers(&self) -> bool {
        let slots = LockRange { offset_bytes: PROCESS, len_bytes: PROCESSES as u64 };
        lock::conflict(self.file.as_fd(), slots, LockKind::Shared)
            .is_ok_and(|found| found.is_some())
    }

    /// Whether the owner of a process slot lives: a writer, whose lock no descriptor for reading can have.
    pub fn is_alive(&self, index: usize) -> bool {
        // A reader has no slot, so none is its own.
        index == self.index.load(Relaxed)
            || self.is_locked_by_other(Byte::Process(index), LockKind::Shared)
    }

    /// The process that owns a slot, as it knows itself.
    pub fn pid_of(&self, control: &Control, index: usize) -> u32 {
        control.processes.get(index).map_or(0, |slot| slot.pid.load(Relaxed) as u32)
    }

    /// Who has all bytes locked, to make media, keeps only those that keep others from opening the pool.
    pub fn keep_out_only(&self) {
        let before = LockRange { offset_bytes: 0, len_bytes: OPENERS };
        let behind = LockRange { offset_bytes: SNAPSHOTS + 1, len_bytes: 0 };
        for range in [before, behind] {
            let _ = lock::unlock(self.file.as_fd(), range);
        }
    }

    /// Gives all locks back. The descriptor may be shared with the media, which lives on.
    pub fn leave(&self) {
        let pins = LockRange { offset_bytes: PIN_BLOCK, len_bytes: BLOCKS as u64 };
        let len_bytes = READER_LAYOUTS_END - READER_USES;
        let of_reader = LockRange { offset_bytes: READER_USES, len_bytes };
        [pins, of_reader].into_iter().for_each(|range| self.unlock_range(range));
        let process = Byte::Process(self.index());
        for byte in [Byte::Zeroer, process, Byte::Openers, Byte::Snapshots, Byte::Recovery] {
            self.unlock(byte);
        }
        self.give_up_claim();
    }

    /// Lets others of this process use the open file.
    pub fn give_up_claim(&self) {
        drop(self.claim.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writers lock their slots in a way that a descriptor for reading cannot.
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
