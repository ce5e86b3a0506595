//! The processes that have the pool open, and what killed processes left behind.

use aquifer_format::superblock::Superblock;
use aquifer_pool::internals::left_behind;

use super::report::{FindingKind, Severity};
use super::{Checker, text};

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
        let directory = self.options.segment_directory.as_deref();
        for left in left_behind(directory, superblock, self.media) {
            self.find(
                Severity::Repairable,
                FindingKind::SharedMemory,
                None,
                text(
                    format!("{} belongs to this pool, and no process has the pool open",
                     left.display()),
                    "A process that was killed left it; it takes memory and serves nothing",
                    "Open the pool for writing, or run `aquifer pool check --repair`: both remove it",
                ),
            );
        }
    }
}
