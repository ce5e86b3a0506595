//! The five states of an object.
//!
//! The paper this follows ("PMOs: Fast and Easy Crash Consistency for Persistent Memory") stores a
//! state in each object's metadata, changes it with one atomic store, and reads it to recover. This
//! implementation stores no state: a state is derived from observable facts, and recovery needs
//! none of them.
//!
//! | state | in the paper | here |
//! |---|---|---|
//! | D, detached | no process has it attached | the inode lock is free, and everything committed is applied |
//! | R, reading | attached for reading; psync is ignored | the lock is held shared |
//! | W, writing | attached for writing; stores go to the shadow | the lock is held exclusively; stored-to pages have private copies |
//! | P, persisting | psync is making the shadow durable | the writer's slot in the shared segment marks a captured, unacknowledged record of the object |
//! | C, copying | the shadow is durable and is being copied to the primary | the log holds durable content of the object that is not applied |
//!
//! If several apply, [`ObjectState`] names the one that the paper's figure would show: P before C
//! before W, R and D.
//!
//! # Normal operation
//! | from | to | in the paper | here |
//! |---|---|---|---|
//! | D | R | attach for reading | shared lock taken, everything committed applied |
//! | R | D | last detach | last shared lock released, or its process died |
//! | D | W | attach for writing | exclusive lock taken, everything committed applied |
//! | W | D | detach | lock released; stores since the last psync are lost |
//! | W | P | psync | capture: the pages are copied into a record in the log |
//! | P | C | the shadow is durable | the record and all earlier ones are durable: psync returns here |
//! | C | W | the primary is up to date | the record is applied: lazily, by a checkpoint, by the next attach, or to stay within the budget |
//! | C | P | – | psync does not wait for apply: the next one may come first |
//! | C | D | – | applied after detaching; until then it stays C although it is not attached |
//! | P | W | – | the commit failed: the next one takes its pages |
//!
//! # Recovery
//! | found in | in the paper | here |
//! |---|---|---|
//! | D, R | nothing to do | nothing to do: there is no record behind the tail |
//! | W | the primary is consistent: it is copied over the shadow | the primary is consistent: the private copies ended with their process |
//! | P | as W: the shadow may be incomplete | an incomplete record ends the log: as W. A complete record counts: either the old or the new content results |
//! | C | the shadow is consistent: it is copied over the primary | the record is replayed into place, again if recovery itself is interrupted |
//!
//! All lead to D. If only the writing *process* died, the next attach does the same for its object
//! without recovering the pool: it resolves the commits in flight and applies the committed
//! content.

use aquifer_pool::format::inode::Inode;
use aquifer_pool::media::ByteRange;
use aquifer_pool::{Holder, LockMode, Pool};

use crate::error::Result;
use crate::shared::content;

/// The state of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ObjectState {
    /// D: no process has it attached.
    Detached,
    /// R: attached for reading.
    Reading,
    /// W: attached for writing.
    Writing,
    /// P: a commit of it is being written.
    Persisting,
    /// C: a commit of it is durable, and not yet applied.
    Copying,
}

/// The ranges of media whose content in the log is not applied.
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

    /// The letter used in the paper's figures.
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
