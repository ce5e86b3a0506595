//! Both superblocks, and the file's length compared with the pool's.

use aquifer_format::ByteRange;
use aquifer_format::superblock::{COPIES, Superblock};
use aquifer_format::{FORMAT_VERSION, FormatError, PAGE_BYTES};

use super::report::{FindingKind, Severity};
use super::{Checker, RESTORE, at, text};

/// The place of a copy.
pub(super) fn place_of(copy: u64) -> ByteRange {
    ByteRange { offset_bytes: copy * PAGE_BYTES, len_bytes: PAGE_BYTES }
}

impl Checker<'_> {
    /// Checks both copies and returns the one that counts.
    pub(super) fn check_superblocks(&mut self) -> Option<Superblock> {
        let pages: Vec<Option<Vec<u8>>> =
            (0..COPIES).map(|copy| self.read(place_of(copy), &name_of(copy))).collect();
        let decoded: Vec<Result<Superblock, FormatError>> = (0..COPIES)
            .zip(&pages)
            .map(|(copy, page)| match page {
                Some(page) => Superblock::decode(page, copy),
                None => Err(FormatError::Unreadable),
            })
            .collect();
        let valid: Vec<&Superblock> = decoded.iter().flatten().collect();
        // The first of those with the highest sequence number, as in recovery.
        let counts = valid.iter().rev().max_by_key(|superblock| superblock.sequence).copied();
        if counts.is_none() && self.explain_no_pool(&decoded) {
            return None;
        }
        for (copy, outcome) in (0..COPIES).zip(&decoded) {
            if let Err(error) = outcome {
                self.explain_bad_copy(copy, error, counts.is_some());
            }
        }
        let superblock = counts?.clone();
        if valid.iter().any(|other| !other.is_of_same_pool(&superblock)) {
            self.find(
                Severity::Damage,
                FindingKind::SuperblocksContradict,
                place_of(0),
                text(
                    "The two superblocks describe different pools",
                    "One of them was written over, and nothing says which; the pool cannot be opened",
                    RESTORE,
                ),
            );
        } else if valid.iter().any(|other| **other != superblock) && !self.presence.is_in_use() {
            self.find(
                Severity::Repairable,
                FindingKind::SuperblocksDiffer,
                None,
                text(
                    "One superblock is older than the other",
                    "A crash came between the writes of the two, which is what there are two for; \
                     each leads to the same state",
                    "Open the pool for writing, which makes both the same",
                ),
            );
        }
        for ((copy, page), outcome) in (0..COPIES).zip(&pages).zip(&decoded) {
            if let (Some(page), Ok(superblock)) = (page, outcome)
                && superblock.encode(copy) != *page
            {
                self.explain_reserved(&name_of(copy), place_of(copy));
            }
        }
        self.check_length(&superblock);
        Some(superblock)
    }

    /// Explains a file without a superblock. Returns whether the check ends with that.
    fn explain_no_pool(&mut self, decoded: &[Result<Superblock, FormatError>]) -> bool {
        let errors: Vec<&FormatError> =
            decoded.iter().filter_map(|one| one.as_ref().err()).collect();
        if let Some(found) = errors.iter().find_map(|error| match error {
            FormatError::Version { found } => Some(found),
            _ => None,
        }) {
            self.find(
                Severity::Damage,
                FindingKind::FutureVersion,
                place_of(0),
                text(
                    format!("The pool has format version {found}, this program knows version {FORMAT_VERSION}"),
                    "It cannot be checked here",
                    "Use the program that it was made with",
                ),
            );
            return true;
        }
        if let Some(bits) = errors.iter().find_map(|error| match error {
            FormatError::Features { bits } => Some(bits),
            _ => None,
        }) {
            self.find(
                Severity::Damage,
                FindingKind::FutureVersion,
                place_of(0),
                text(
                    format!("The pool uses features {bits:#x} that this program does not know"),
                    "A later program made it, so it cannot be checked here",
                    "Use that program",
                ),
            );
            return true;
        }
        let is_foreign = |error: &&FormatError| matches!(error, FormatError::Magic);
        if errors.iter().all(is_foreign) || self.media.len_bytes() < COPIES * PAGE_BYTES {
            self.find(
                Severity::Damage,
                FindingKind::NotAPool,
                None,
                text(
                    "There is no pool in this file: it does not begin like one, and neither does \
                     its second page",
                    "It is something else, or its beginning was written over",
                    "If there was a pool in it, restore it from a copy; else make one with \
                     `aquifer pool create`",
                ),
            );
            return true;
        }
        false
    }

    fn explain_bad_copy(&mut self, copy: u64, error: &FormatError, has_other: bool) {
        let what = format!("{} {} is damaged: {error}", name_of(copy), at(place_of(copy)));
        let (severity, kind, meaning, advice) = match (has_other, error) {
            (_, FormatError::Unreadable) if has_other => return,
            (true, FormatError::Version { .. } | FormatError::Features { .. }) => (
                Severity::Damage,
                FindingKind::FutureVersion,
                "The other copy can be read; perhaps a later program began to convert the pool and was stopped",
                "Open it with that program; this one would undo what it began",
            ),
            (true, _) => (
                Severity::Repairable,
                FindingKind::Superblock,
                "Nothing is lost: the other copy serves, and the pool can be used",
                "Run `aquifer pool check --repair`, or open the pool for writing: both write it \
                 anew; if it happens again, look at the disk",
            ),
            (false, _) => (
                Severity::Damage,
                FindingKind::Superblock,
                "The other copy cannot be used either, so it is not known where the parts of the pool lie",
                "Restore the pool from a copy",
            ),
        };
        self.find(severity, kind, place_of(copy), text(what, meaning, advice));
    }

    fn check_length(&mut self, superblock: &Superblock) {
        let (found, expected) = (self.media.len_bytes(), superblock.layout.len_bytes());
        if found < expected {
            let missing = ByteRange { offset_bytes: found, len_bytes: expected - found };
            self.find(
                Severity::Damage,
                FindingKind::Truncated,
                missing,
                text(
                    format!("The file has {found} bytes, but the pool in it has {expected}"),
                    "It was cut short; what lay behind is gone",
                    "Restore the file from a copy; do not make it longer again, which would fill it with zeros",
                ),
            );
        } else if found - expected >= PAGE_BYTES {
            let surplus = ByteRange { offset_bytes: expected, len_bytes: found - expected };
            self.find(
                Severity::Note,
                FindingKind::LongerFile,
                surplus,
                text(
                    format!("The file has {found} bytes, the pool in it only {expected}"),
                    "Growing the pool was interrupted, or something was appended to the file; the \
                     pool does not use it",
                    format!("`aquifer pool grow --size {found}` makes it part of the pool"),
                ),
            );
        }
    }

    pub(super) fn explain_reserved(&mut self, of: &str, place: ByteRange) {
        self.find(
            Severity::Note,
            FindingKind::ReservedBytes,
            place,
            text(
                format!("{of} {} has bytes that mean nothing and are not zero", at(place)),
                "A later program may have written them, or something wrote over them and the \
                 checksum was made right",
                "Nothing need be done; they are lost when it is written next",
            ),
        );
    }
}

fn name_of(copy: u64) -> String {
    match copy {
        0 => "The first superblock".to_owned(),
        _ => "The second superblock".to_owned(),
    }
}
