//! The five states of an object, and what they are here.
//!
//! The paper this follows ("PMOs: Fast and Easy Crash Consistency for Persistent Memory") keeps a state in each object's
//! metadata, changes it with one atomic store, and reads it to recover. Here nothing is stored: a state is a name for
//! facts that can be looked at, and recovery needs none of them.
//!
//! | state | in the paper | here |
//! |---|---|---|
//! | D, detached | no process has it | nobody holds the lock of its inode, and everything committed is at its place |
//! | R, reading | attached for reading; psync is ignored | the lock is held shared |
//! | W, writing | attached for writing; stores go to the shadow | the lock is held exclusively; stored-to pages have private copies |
//! | P, persisting | psync is making the shadow durable | the writer says in its slot of the shared segment that a record of the object is captured and not acknowledged |
//! | C, copying | the shadow is durable, and being copied to the primary | the log has content of the object, durable, that is not at its place |
//!
//! Where several are true, [`ObjectState`] names the one that the paper's figure would show: P before C before W, R and D.
//!
//! # Normal operation
//! | from | to | in the paper | here |
//! |---|---|---|---|
//! | D | R | attach for reading | shared lock taken, everything committed applied |
//! | R | D | last detach | last shared lock given up, or its process died |
//! | D | W | attach for writing | exclusive lock taken, everything committed applied |
//! | W | D | detach | lock given up; stores since the last psync are lost |
//! | W | P | psync | capture: the pages are copied into a record with its place in the log |
//! | P | C | the shadow is durable | the record, and all before it, are durable: psync returns here |
//! | C | W | the primary is up to date | the record is applied: lazily, by a checkpoint, by whoever attaches, or for the budget |
//! | C | P | – | psync does not wait for apply: the next may come before it |
//! | C | D | – | detached, and then applied; until then it stays C, with nobody attached |
//! | P | W | – | the commit failed: its pages are taken along by the next |
//!
//! # Recovery
//! | found in | in the paper | here |
//! |---|---|---|
//! | D, R | nothing is to be done | nothing is to be done: there is no record behind the tail |
//! | W | the primary is consistent: it is copied over the shadow | the primary is consistent: private copies ended with their process |
//! | P | as W: the shadow may be incomplete | as W: the record is not whole, so the log ends before it. Or it is whole, and then it counts: old or new |
//! | C | the shadow is consistent: it is copied over the primary | the record is replayed: copied to its place, again and again if recovery itself is interrupted |
//!
//! All lead to D. If only the writing *process* died, the next attach does the same for its object, without recovery of the
//! pool: it decides what is in flight, and applies what is committed.

use aquifer_pool::format::inode::Inode;
use aquifer_pool::media::ByteRange;
use aquifer_pool::{Holder, LockMode, Pool};

use crate::attach::content;
use crate::error::Result;

/// The state of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ObjectState {
    /// D: nobody has it attached.
    Detached,
    /// R: attached for reading.
    Reading,
    /// W: attached for writing.
    Writing,
    /// P: a commit of it is being written.
    Persisting,
    /// C: a commit of it is durable, and not yet at its place.
    Copying,
}

/// What the log has that is not at its place.
pub(crate) struct Unapplied {
    ranges: Vec<ByteRange>,
}

impl Unapplied {
    pub fn of(pool: &Pool) -> Result<Unapplied> {
        Ok(Unapplied { ranges: pool.unapplied()? })
    }

    fn touches(&self, range: ByteRange) -> bool {
        self.ranges.iter().any(|other| other.intersection(range).len_bytes > 0)
    }
}

impl ObjectState {
    pub(crate) fn of(
        pool: &Pool,
        inode: &Inode,
        holders: &[Holder],
        unapplied: &Unapplied,
    ) -> ObjectState {
        let is_locked = |mode| pool.is_locked_elsewhere(inode.number, mode);
        let is_held = |mode| holders.iter().any(|holder| holder.mode == mode);
        if holders.iter().any(|holder| holder.is_committing) {
            ObjectState::Persisting
        } else if unapplied.touches(content(inode)) {
            ObjectState::Copying
        } else if is_held(LockMode::Exclusive) || is_locked(LockMode::Shared) {
            ObjectState::Writing
        } else if is_held(LockMode::Shared) || is_locked(LockMode::Exclusive) {
            ObjectState::Reading
        } else {
            ObjectState::Detached
        }
    }

    /// The letter of the figures.
    pub fn letter(self) -> char {
        match self {
            ObjectState::Detached => 'D',
            ObjectState::Reading => 'R',
            ObjectState::Writing => 'W',
            ObjectState::Persisting => 'P',
            ObjectState::Copying => 'C',
        }
    }
}
