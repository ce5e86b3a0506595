//! Who has the pool open, and what those left who died with it open.

use std::os::fd::AsFd;

use aquifer_sys::lock::LockKind;

use super::report::{FindingKind, Severity};
use super::{Checker, text};
use crate::format::superblock::Superblock;
use crate::media::Media;
use crate::membership::{Byte, Membership};
use crate::segment::{Owner, Segment};

/// Whether others use the pool. While it lives and nobody writes, nobody can begin to.
pub(super) struct Presence {
    members: Option<Membership>,
    is_in_use: bool,
}

impl Presence {
    /// Looks who is there, and keeps writers out if nobody is.
    pub fn of(media: &dyn Media) -> Presence {
        let Ok(members) = Membership::new(media.file().as_fd()) else {
            return Presence { members: None, is_in_use: false };
        };
        let locked = |byte| members.try_lock(byte, LockKind::Shared).unwrap_or(false);
        // Who opens or closes the pool for writing just now holds the first; who has it open, the other one.
        let is_in_use = !locked(Byte::Recovery)
            || members.is_locked_by_other(Byte::Openers, LockKind::Exclusive);
        let is_in_use = is_in_use || !locked(Byte::Snapshots);
        members.unlock(Byte::Recovery);
        Presence { members: Some(members), is_in_use }
    }

    /// The caller has the pool for itself.
    pub fn alone() -> Presence {
        Presence { members: None, is_in_use: false }
    }

    /// Whether others have it open for writing.
    pub fn is_in_use(&self) -> bool {
        self.is_in_use
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        if let Some(members) = &self.members {
            members.unlock(Byte::Snapshots);
        }
    }
}

impl Checker<'_> {
    pub(super) fn check_run_time(&mut self, superblock: &Superblock) {
        if self.presence.is_in_use() {
            return;
        }
        if !superblock.segment.is_nil() {
            self.find(
                Severity::Repairable,
                FindingKind::NotClosed,
                None,
                text(
                    "The pool was not closed",
                    "All processes that had it open for writing were killed, or the machine \
                     stopped; nothing that was acknowledged is lost",
                    "Open the pool for writing, or run `aquifer pool check --repair`",
                ),
            );
        }
        let Ok(owner) = Owner::new(superblock.uuid, self.media.file()) else { return };
        for id in Segment::left_by(owner) {
            self.find(
                Severity::Repairable,
                FindingKind::SharedMemory,
                None,
                text(
                    format!("/dev/shm/{} belongs to this pool, and nobody has the pool open",
                     Segment::name(id)),
                    "A process that was killed left it; it takes memory and serves nothing",
                    "Open the pool for writing, or run `aquifer pool check --repair`: both remove it",
                ),
            );
        }
    }
}
