//! Locks of inodes: the handles that have an object attached, for reading or for writing.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_sys::lock::LockKind;

use crate::error::{PoolError, Result};
use crate::shared::handle::Handle;
use crate::shared::members::Members;
use crate::shared::membership::Byte;
use crate::shared::segment::Segment;

/// The mode of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LockMode {
    /// Compatible with other shared locks.
    Shared,
    /// Compatible with no other lock.
    Exclusive,
}

/// A process that has an inode locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// The process id, as numbered in its own namespace.
    pub pid: u32,
    /// The mode of its lock.
    pub mode: LockMode,
    /// Whether it is writing a commit of the inode.
    pub is_committing: bool,
}

/// The format of a process's note about a lock in its slot: the number, shifted, and these bits.
const NOTE_BITS: u32 = 2;
const NOTE_EXCLUSIVE: u64 = 1;
const NOTE_COMMITTING: u64 = 2;

/// A locked inode. Unlocked when dropped, or when the process dies.
pub struct InodeLock {
    handle: Arc<Handle>,
    number: u64,
    mode: LockMode,
    is_committing: AtomicBool,
}

impl std::fmt::Debug for InodeLock {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("InodeLock")
            .field("number", &self.number)
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}

impl LockMode {
    pub(crate) fn kind(self) -> LockKind {
        match self {
            LockMode::Shared => LockKind::Shared,
            LockMode::Exclusive => LockKind::Exclusive,
        }
    }

    pub(crate) fn of(kind: LockKind) -> LockMode {
        match kind {
            LockKind::Shared => LockMode::Shared,
            LockKind::Exclusive => LockMode::Exclusive,
        }
    }
}

impl InodeLock {
    /// Locks an inode; does not block.
    pub(crate) fn take(handle: &Arc<Handle>, number: u64, mode: LockMode) -> Result<InodeLock> {
        let members = &handle.members;
        members.check_process()?;
        // Locks of one open file description do not conflict with each other, so this handle
        // records its own.
        let mut held = members.held.lock().unwrap_or_else(|broken| broken.into_inner());
        if held.contains(&number) {
            return Err(PoolError::AlreadyLocked { number });
        }
        let is_free =
            members.locks.try_lock(Byte::Inode(number), mode.kind()).map_err(|source| {
                PoolError::Open {
                    path: handle.media.path().to_path_buf(),
                    reason: format!("inode {number} cannot be locked"),
                    source: Some(source),
                }
            })?;
        if !is_free {
            let holder = members.holders(&handle.segment, number).first().map(|holder| holder.pid);
            return Err(PoolError::Locked { number, holder });
        }
        held.insert(number);
        let own = handle.clone();
        let lock = InodeLock { handle: own, number, mode, is_committing: AtomicBool::new(false) };
        members.note_lock(&handle.segment, 0, lock.note(false));
        Ok(lock)
    }

    /// The number of the inode.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The mode of the lock.
    pub fn mode(&self) -> LockMode {
        self.mode
    }

    /// Sets whether [`Pool::holders`](crate::Pool::holders) reports a commit of the inode as being
    /// written. Calls must not overlap.
    pub fn set_committing(&self, is_committing: bool) {
        let before = self.is_committing.swap(is_committing, Relaxed);
        let members = &self.handle.members;
        if before != is_committing && members.process.is_current() {
            let (from, to) = (self.note(before), self.note(is_committing));
            members.note_lock(&self.handle.segment, from, to);
        }
    }

    fn note(&self, is_committing: bool) -> u64 {
        let exclusive = if self.mode == LockMode::Exclusive { NOTE_EXCLUSIVE } else { 0 };
        let committing = if is_committing { NOTE_COMMITTING } else { 0 };
        self.number << NOTE_BITS | exclusive | committing
    }
}

impl Drop for InodeLock {
    fn drop(&mut self) {
        // In a forked child the lock belongs to the parent.
        let members = &self.handle.members;
        if !members.process.is_current() {
            return;
        }
        let mut held = members.held.lock().unwrap_or_else(|broken| broken.into_inner());
        let note = self.note(self.is_committing.load(Relaxed));
        members.note_lock(&self.handle.segment, note, 0);
        members.locks.unlock(Byte::Inode(self.number));
        held.remove(&self.number);
    }
}

impl Members {
    /// Replaces a note in this process's slot. A reader has no slot and leaves no note.
    fn note_lock(&self, segment: &Segment, from: u64, to: u64) {
        if self.is_writable {
            let notes = &segment.process(self.locks.index()).locked;
            let _ = notes.iter().find(|n| n.compare_exchange(from, to, Relaxed, Relaxed).is_ok());
        }
    }

    /// The known holders of locks on an inode.
    pub fn holders(&self, segment: &Segment, number: u64) -> Vec<Holder> {
        let mut holders = Vec::new();
        for (index, process) in segment.processes() {
            for note in process.locked.iter().map(|note| note.load(Relaxed)) {
                if note >> NOTE_BITS == number && note != 0 && self.locks.is_alive(index) {
                    holders.push(Holder {
                        pid: self.locks.pid_of(segment.control(), index),
                        mode: if note & NOTE_EXCLUSIVE != 0 {
                            LockMode::Exclusive
                        } else {
                            LockMode::Shared
                        },
                        is_committing: note & NOTE_COMMITTING != 0,
                    });
                }
            }
        }
        holders
    }
}
