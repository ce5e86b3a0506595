//! The states of an object.

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
