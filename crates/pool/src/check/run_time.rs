//! Who has the pool open, and what those left who died with it open.

use std::os::fd::AsFd;

use aquifer_sys::lock::LockKind;

use super::report::{FindingKind, Severity};
use super::{Checker, text};
use crate::claims::Claim;
use crate::format::PAGE_BYTES;
use crate::format::superblock::{COPIES, Superblock};
use crate::media::Media;
use crate::membership::{Byte, Membership};
use crate::segment_place::{Owner, Places};

/// Whether others use the pool.
pub(super) struct Presence {
    /// `None` if the caller has the pool for itself.
    watch: Option<Watch>,
    is_in_use: bool,
}

/// By what it shows that somebody has opened the pool for writing.
struct Watch {
    members: Membership,
    /// Both superblocks. Whoever opens the pool for writing, formats it or makes it longer writes them.
    superblocks: Vec<u8>,
}

impl Presence {
    /// Looks who is there.
    pub fn of(media: &dyn Media) -> Presence {
        let Ok(members) = Membership::new(media.file().as_fd()) else {
            return Presence::alone();
        };
        let watch = Watch { members, superblocks: superblocks_of(media) };
        let is_in_use = watch.sees_somebody(media);
        Presence { watch: Some(watch), is_in_use }
    }

    /// The caller has the pool for itself.
    pub fn alone() -> Presence {
        Presence { watch: None, is_in_use: false }
    }

    /// Whether others have it open for writing, or had at some time since the first look.
    pub fn is_in_use(&self) -> bool {
        self.is_in_use
    }

    /// Whether it is in use as of now, or was in the meantime, and was not before. Says so once.
    pub fn has_begun(&mut self, media: &dyn Media) -> bool {
        let Some(watch) = self.watch.as_ref().filter(|_| !self.is_in_use) else { return false };
        // In this order: who closes the pool in between has written before.
        self.is_in_use = watch.sees_somebody(media) || watch.superblocks != superblocks_of(media);
        self.is_in_use
    }
}

impl Watch {
    fn sees_somebody(&self, media: &dyn Media) -> bool {
        // Who opens or closes the pool for writing just now holds the first; who has it open, the other one. Locks of these very media
        // are not seen, but who has them.
        Claim::is_taken(media.file()).unwrap_or(false)
            || self.members.is_locked_by_other(Byte::Recovery, LockKind::Shared)
            || self.members.is_locked_by_other(Byte::Openers, LockKind::Exclusive)
    }
}

/// Their bytes as far as they can be read; that is all that is asked of them here.
fn superblocks_of(media: &dyn Media) -> Vec<u8> {
    let mut bytes = vec![0; (COPIES * PAGE_BYTES) as usize];
    for (copy, page) in (0..COPIES).zip(bytes.chunks_exact_mut(PAGE_BYTES as usize)) {
        let _ = media.read_at(copy * PAGE_BYTES, page);
    }
    bytes
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
        let places = Places::new(self.options.segment_directory.as_deref(), self.media.path());
        for left in places.left_by(owner, superblock.segment, superblock.uuid) {
            self.find(
                Severity::Repairable,
                FindingKind::SharedMemory,
                None,
                text(
                    format!("{} belongs to this pool, and nobody has the pool open",
                     left.path.display()),
                    "A process that was killed left it; it takes memory and serves nothing",
                    "Open the pool for writing, or run `aquifer pool check --repair`: both remove it",
                ),
            );
        }
    }
}
