//! Whether processes use a pool, seen from outside and without a lock: for the check.

use std::os::fd::AsFd;

use aquifer_sys::lock::LockKind;

use crate::format::PAGE_BYTES;
use crate::format::superblock::COPIES;
use crate::media::Media;
use crate::shared::claims::Claim;
use crate::shared::membership::{Byte, Membership};

/// Whether other processes use the pool.
pub struct Presence {
    /// `None` if the caller has the pool for itself.
    watch: Option<Watch>,
    is_in_use: bool,
}

/// What shows that a process has opened the pool for writing.
struct Watch {
    members: Membership,
    /// Both superblocks. Every process that opens the pool for writing, formats it or grows it
    /// writes them.
    superblocks: Vec<u8>,
}

impl Presence {
    /// Checks whether other processes use the pool.
    pub fn of(media: &dyn Media) -> Presence {
        let Ok(members) = Membership::new(media.file().as_fd()) else {
            return Presence::alone();
        };
        let watch = Watch { members, superblocks: superblocks_of(media) };
        let is_in_use = watch.sees_a_member(media);
        Presence { watch: Some(watch), is_in_use }
    }

    /// The caller has the pool for itself.
    pub fn alone() -> Presence {
        Presence { watch: None, is_in_use: false }
    }

    /// Whether other processes have the pool open for writing, or had at any time since the first
    /// check.
    pub fn is_in_use(&self) -> bool {
        self.is_in_use
    }

    /// Whether use by other processes has begun: the pool is in use now or was in the meantime, and
    /// was not before. Returns true only once.
    pub fn has_begun(&mut self, media: &dyn Media) -> bool {
        let Some(watch) = self.watch.as_ref().filter(|_| !self.is_in_use) else { return false };
        // In this order: a process that closes the pool in between has written the superblocks
        // before it releases its locks.
        self.is_in_use = watch.sees_a_member(media) || watch.superblocks != superblocks_of(media);
        self.is_in_use
    }
}

impl Watch {
    fn sees_a_member(&self, media: &dyn Media) -> bool {
        // A process that is opening or closing the pool for writing locks `Recovery`; one that has
        // it open locks `Openers`. Locks of these media's own open file do not conflict, so the
        // list of claims is checked as well.
        Claim::is_taken(media.file()).unwrap_or(false)
            || self.members.is_locked_by_other(Byte::Recovery, LockKind::Shared)
            || self.members.is_locked_by_other(Byte::Openers, LockKind::Exclusive)
    }
}

/// The bytes of both superblocks; a copy that cannot be read stays zero.
fn superblocks_of(media: &dyn Media) -> Vec<u8> {
    let mut bytes = vec![0; (COPIES * PAGE_BYTES) as usize];
    for (copy, page) in (0..COPIES).zip(bytes.chunks_exact_mut(PAGE_BYTES as usize)) {
        let _ = media.read_at(copy * PAGE_BYTES, page);
    }
    bytes
}
