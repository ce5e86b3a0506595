//! Ownership of pages, and detection of untrustworthy metadata.
//!
//! No damage may ever show one object's bytes in another. A checksum verifies that a slot is as it
//! was written; it does not verify that two slots fit together, and deliberate damage has valid
//! checksums. So all inodes are checked together before any of them is used:
//!
//! * each decodes, and lies in a slot that the head records as used;
//! * a slot that the head records as used is not zero: otherwise a lost sector would look like an
//!   object that never was;
//! * its pages are data, and lie below the head's first fresh page: everything from there on is
//!   zero, so allocations there are not zeroed again; the pages of the saved state lie below it, too,
//!   and are no inode's;
//! * no page is named twice;
//! * slots refer to each other consistently: [`links`](crate::links).
//!
//! Recovery, readers and the check all use this. A writer is refused unless the only inconsistencies are
//! losses; a reader ignores the slots whose bytes or pages are in doubt, and detects the other
//! inconsistencies when it follows a reference to them, because each part records its owner; the check
//! reports every inconsistency.
//!
//! Content in the log is for the pages that its inode owns *after* the last record. A checkpoint
//! may have been running at the crash, so the metadata on media may be newer than a record, or torn
//! where a later record has it whole. Pages that no longer belong to the inode were freed by a
//! later record and are not reused before the tail has passed that record, so dropping their
//! content is harmless.

use std::collections::BTreeMap;

use crate::inode::{HEAD_SLOT, PoolHead};
use crate::layout::Layout;
use crate::links::{Extent, LinkCounts, LinkInconsistency, Links};
use crate::run::Run;
use crate::slot::Slot;
use crate::slot_bytes::SlotBytes;
use crate::{ByteRange, FormatError, PAGE_BYTES};

/// An inconsistency in the metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inconsistency {
    /// The head is damaged.
    Head(FormatError),
    /// The inode is damaged.
    Inode {
        /// Its slot.
        number: u64,
        /// The damage.
        error: FormatError,
    },
    /// A run lies where no content can be.
    Misplaced {
        /// The slot that names it.
        number: u64,
        /// The run.
        run: Run,
    },
    /// Two runs, possibly of one inode, have pages in common.
    Shared {
        /// The slot that names the later run.
        number: u64,
        /// The slot that names the other one.
        other: u64,
        /// The later run.
        run: Run,
    },
    /// Slots do not fit together.
    Link(LinkInconsistency),
}

impl Inconsistency {
    /// Whether no process may write to the pool before the inconsistency is repaired.
    pub fn forbids_writing(&self) -> bool {
        !matches!(self, Inconsistency::Link(inconsistency) if inconsistency.extent() == Extent::Loss)
    }

    /// Whether it is a wrong count that a repair can correct.
    pub fn is_miscount(&self) -> bool {
        matches!(self, Inconsistency::Link(inconsistency) if inconsistency.extent() == Extent::Miscount)
    }

    /// The slots that must not be used because of it.
    pub fn inodes(&self) -> impl Iterator<Item = u64> {
        let (one, other) = match *self {
            Inconsistency::Head(_) | Inconsistency::Link(_) => (None, None),
            Inconsistency::Inode { number, .. } | Inconsistency::Misplaced { number, .. } => {
                (Some(number), None)
            }
            Inconsistency::Shared { number, other, .. } => (Some(number), Some(other)),
        };
        one.into_iter().chain(other)
    }

    /// The name of the structure.
    pub fn structure(&self) -> String {
        match self {
            Inconsistency::Head(_) => "the pool's head".to_owned(),
            Inconsistency::Inode { number, .. } | Inconsistency::Misplaced { number, .. } => {
                format!("inode {number}")
            }
            Inconsistency::Shared { number, other, .. } => {
                format!("inode {number} (it shares pages with inode {other})")
            }
            Inconsistency::Link(inconsistency) => format!("slot {}", inconsistency.slot()),
        }
    }

    /// The error in it.
    pub fn error(&self) -> FormatError {
        match self {
            Inconsistency::Head(error) | Inconsistency::Inode { error, .. } => error.clone(),
            Inconsistency::Misplaced { run, .. } | Inconsistency::Shared { run, .. } => {
                FormatError::Field { field: "run", value: run.start_page }
            }
            Inconsistency::Link(inconsistency) => inconsistency.error(),
        }
    }
}

/// The owners of pages, as of one state of the metadata.
#[derive(Debug, Default)]
pub struct Owners {
    /// All runs in order of their first page, with their inode; the saved state with the head.
    runs: Vec<(Run, u64)>,
    /// The shadow of each inode that has one.
    shadows: BTreeMap<u64, Run>,
    /// The content of each object without inconsistencies.
    content: BTreeMap<u64, ByteRange>,
    counts: LinkCounts,
    inconsistencies: Vec<Inconsistency>,
}

impl Owners {
    /// Checks all slots, including the head's, as `read` returns them: `None` if they cannot be
    /// read. No slot may name pages of `saved`, which are those of the saved state. Calls `visit`
    /// for every object and every inode of a file.
    pub fn new(
        layout: &Layout,
        saved: Run,
        mut read: impl FnMut(u64) -> Option<SlotBytes>,
        mut visit: impl FnMut(&Slot),
    ) -> Owners {
        let mut owners = Owners::default();
        // Without a head, every page and slot may have been used.
        let mut head = PoolHead { fresh_from_page: layout.page_count, used_slots: layout.slots() };
        if let Some(bytes) = read(HEAD_SLOT) {
            match PoolHead::decode(&bytes).and_then(|found| found.validate(layout)) {
                Ok(found) => head = found,
                Err(error) => owners.inconsistencies.push(Inconsistency::Head(error)),
            }
        }
        let mut links = Links::new(head.used_slots);
        for number in HEAD_SLOT + 1..layout.slots() {
            match read(number) {
                Some(bytes) => {
                    let is_misplaced = |run: Run| {
                        run.start_page < layout.data_start_page
                            || run.end_page() > head.fresh_from_page
                            || run.overlaps(saved)
                    };
                    owners.add_slot(number, &bytes, &head, is_misplaced, &mut links, &mut visit);
                }
                None => links.add_damaged(number),
            }
        }
        // Its bytes are not zero.
        if saved.end_page() > head.fresh_from_page && !owners.has_no_head() {
            let (field, value) = ("first fresh page", head.fresh_from_page);
            owners.inconsistencies.push(Inconsistency::Head(FormatError::Field { field, value }));
        }
        owners.find_shared();
        if !saved.is_empty() {
            let place = owners.runs.partition_point(|(run, _)| *run < saved);
            owners.runs.insert(place, (saved, HEAD_SLOT));
        }
        let (inconsistencies, counts) = links.finish(read);
        owners.inconsistencies.extend(inconsistencies.into_iter().map(Inconsistency::Link));
        owners.counts = counts;
        for number in owners.inconsistencies.iter().flat_map(Inconsistency::inodes) {
            owners.content.remove(&number);
        }
        owners
    }

    fn add_slot(
        &mut self,
        number: u64,
        bytes: &SlotBytes,
        head: &PoolHead,
        is_misplaced: impl Fn(Run) -> bool,
        links: &mut Links,
        visit: &mut impl FnMut(&Slot),
    ) {
        let is_zero = bytes.iter().all(|&byte| byte == 0);
        let decoded = match (is_zero, number < head.used_slots) {
            (true, true) if !self.has_no_head() => Err(FormatError::Erased),
            (true, _) => return,
            (false, false) => Err(FormatError::Field { field: "slot", value: number }),
            (false, true) => Slot::decode(bytes, number),
        };
        let slot = match decoded {
            Ok(slot) => slot,
            Err(error) => {
                self.inconsistencies.push(Inconsistency::Inode { number, error });
                return links.add_damaged(number);
            }
        };
        links.add(number, &slot);
        if matches!(slot, Slot::Object(_) | Slot::File(_)) {
            visit(&slot);
        }
        for run in slot.runs() {
            if is_misplaced(run) {
                self.inconsistencies.push(Inconsistency::Misplaced { number, run });
            }
            self.runs.push((run, number));
        }
        let Slot::Object(inode) = slot else { return };
        if !inode.shadow.is_empty() {
            self.shadows.insert(number, inode.shadow);
        }
        // The runs are adjacent: decoding ensures that.
        let pages = inode.content_pages();
        let start_page = inode.runs.first().map_or(0, |run| run.start_page);
        self.content.insert(number, Run { start_page, pages }.bytes());
    }

    fn has_no_head(&self) -> bool {
        self.inconsistencies
            .iter()
            .any(|inconsistency| matches!(inconsistency, Inconsistency::Head(_)))
    }

    fn find_shared(&mut self) {
        self.runs.sort_unstable();
        // The run that reaches furthest so far: a long one may overlap with many later ones.
        let mut furthest: Option<(Run, u64)> = None;
        for &(run, number) in &self.runs {
            if let Some((before, other)) = furthest
                && before.overlaps(run)
            {
                self.inconsistencies.push(Inconsistency::Shared { number, other, run });
            }
            if furthest.is_none_or(|(before, _)| run.end_page() > before.end_page()) {
                furthest = Some((run, number));
            }
        }
    }

    /// The inconsistencies found.
    pub fn inconsistencies(&self) -> &[Inconsistency] {
        &self.inconsistencies
    }

    /// Counts of the slots that belong to files.
    pub fn counts(&self) -> LinkCounts {
        self.counts
    }

    /// Whether the slot contains an object without inconsistencies.
    pub fn is_believed(&self, number: u64) -> bool {
        self.content.contains_key(&number)
    }

    /// Pages that are named, adjacent and overlapping runs merged.
    pub fn used_runs(&self) -> Vec<Run> {
        let mut merged: Vec<Run> = Vec::new();
        for &(run, _) in &self.runs {
            match merged.last_mut() {
                Some(last) if run.start_page <= last.end_page() => {
                    last.pages = last.pages.max(run.end_page() - last.start_page);
                }
                _ => merged.push(run),
            }
        }
        merged
    }

    /// The part of `range` that is content of an inode.
    pub fn owned(&self, number: u64, range: ByteRange) -> ByteRange {
        match self.content.get(&number) {
            Some(content) => range.intersection(*content),
            None => ByteRange { len_bytes: 0, ..range },
        }
    }

    /// Whether content for `inodes`, which must be sorted, may lie in `range`: in the shadow of one
    /// of them, or in pages without an owner.
    pub fn may_hold_content_for(&self, inodes: &[u64], range: ByteRange) -> bool {
        let start_page = range.offset_bytes / PAGE_BYTES;
        let range = Run { start_page, pages: range.end_bytes().div_ceil(PAGE_BYTES) - start_page };
        // Where runs overlap, their ends are not sorted.
        let first = if self.inconsistencies.is_empty() {
            self.runs.partition_point(|(run, _)| run.end_page() <= range.start_page)
        } else {
            0
        };
        self.runs[first..]
            .iter()
            .take_while(|(run, _)| run.start_page < range.end_page())
            .filter(|(run, _)| run.overlaps(range))
            .all(|(run, owner)| {
                inodes.binary_search(owner).is_ok() && self.shadows.get(owner) == Some(run)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{FileInode, FileKind};
    use crate::inode::{Inode, InodeKind};
    use crate::slot_bytes::SLOT_BYTES;

    const LAYOUT: Layout = Layout {
        page_count: 200,
        metadata_pages: 1,
        log_start_page: 3,
        log_pages: 16,
        data_start_page: 19,
    };

    const SAVED: Run = Run { start_page: 100, pages: 6 };

    fn object(number: u64, start_page: u64, pages: u64) -> Inode {
        Inode {
            kind: InodeKind::Object,
            size_bytes: 1,
            runs: vec![Run { start_page, pages }],
            name: format!("object {number}").into_bytes(),
            ..Inode::free(number, 1)
        }
    }

    /// These inodes, with the root directory in slot 1.
    fn owners(inodes: &[Inode], fresh_from_page: u64, used_slots: u64) -> Owners {
        owners_beside(Run::EMPTY, inodes, fresh_from_page, used_slots)
    }

    /// The same in a pool with a saved state.
    fn owners_beside(
        saved: Run,
        inodes: &[Inode],
        fresh_from_page: u64,
        used_slots: u64,
    ) -> Owners {
        let mut slots = [[0; SLOT_BYTES]; 8];
        slots[0] = PoolHead { fresh_from_page, used_slots }.encode();
        let root = FileInode { links: 2, parent: 1, ..FileInode::new(FileKind::Directory, 1, 1) };
        slots[1] = root.encode().unwrap();
        for inode in inodes {
            slots[inode.number as usize] = inode.encode().unwrap();
        }
        Owners::new(&LAYOUT, saved, |number| slots.get(number as usize).copied(), |_| {})
    }

    fn pages(start_page: u64, pages: u64) -> ByteRange {
        Run { start_page, pages }.bytes()
    }

    #[test]
    fn an_inode_owns_what_it_names() {
        let owners = owners(&[object(2, 20, 10), object(3, 30, 5)], 50, 4);
        assert_eq!(owners.inconsistencies(), []);
        assert_eq!(owners.owned(2, pages(25, 10)), pages(25, 5));
        assert_eq!(owners.owned(3, pages(25, 10)), pages(30, 5));
        assert_eq!(owners.owned(4, pages(25, 10)), pages(25, 0));
        assert_eq!(owners.used_runs(), [Run { start_page: 20, pages: 15 }]);
    }

    #[test]
    fn content_comes_from_the_committers_shadow_or_unowned_pages() {
        let with_shadow = Inode { shadow: Run { start_page: 40, pages: 4 }, ..object(2, 20, 10) };
        let owners = owners(&[with_shadow, object(3, 30, 5)], 50, 4);
        assert!(owners.may_hold_content_for(&[2], pages(41, 2)));
        assert!(owners.may_hold_content_for(&[2, 3], pages(41, 2)));
        assert!(!owners.may_hold_content_for(&[3], pages(41, 2)), "another's shadow");
        assert!(!owners.may_hold_content_for(&[2], pages(20, 1)), "content is not a shadow");
        assert!(!owners.may_hold_content_for(&[2, 3], pages(34, 2)));
        assert!(owners.may_hold_content_for(&[3], pages(35, 5)), "unowned");
        assert!(!owners.may_hold_content_for(&[3], pages(36, 5)));
    }

    #[test]
    fn pages_with_two_owners_belong_to_neither() {
        // The second lies inside the first, the third behind the second and still inside the first.
        let owners = owners(&[object(2, 20, 10), object(3, 21, 1), object(4, 25, 2)], 50, 5);
        let shared: Vec<_> =
            owners.inconsistencies().iter().flat_map(Inconsistency::inodes).collect();
        assert_eq!(shared, [3, 2, 4, 2]);
        assert!((2..5).all(|number| owners.owned(number, pages(20, 10)).len_bytes == 0));
    }

    #[test]
    fn runs_outside_the_data_or_in_fresh_pages_are_misplaced() {
        let owners = owners(&[object(2, 18, 4), object(3, 48, 4), object(4, 30, 4)], 50, 5);
        let inconsistencies: Vec<_> =
            owners.inconsistencies().iter().map(Inconsistency::structure).collect();
        assert_eq!(inconsistencies, ["inode 2", "inode 3"]);
        assert_eq!(owners.owned(4, pages(30, 4)), pages(30, 4));
    }

    #[test]
    fn pages_of_the_saved_state_are_not_fresh() {
        let owners = owners_beside(SAVED, &[], 105, 2);
        assert!(matches!(owners.inconsistencies(), [Inconsistency::Head(_)]));
        assert!(owners.inconsistencies()[0].forbids_writing());
    }

    #[test]
    fn pages_of_the_saved_state_belong_to_no_inode() {
        let owners = owners_beside(SAVED, &[object(2, 98, 3), object(3, 106, 1)], 150, 4);
        let inconsistencies: Vec<_> =
            owners.inconsistencies().iter().map(Inconsistency::structure).collect();
        assert_eq!(inconsistencies, ["inode 2"]);
        let named = [Run { start_page: 98, pages: 9 }];
        assert_eq!(owners.used_runs(), named, "with those of the saved state");
        assert!(!owners.may_hold_content_for(&[2, 3], pages(105, 1)));
        assert!(owners.may_hold_content_for(&[2, 3], pages(107, 1)));
    }

    #[test]
    fn a_slot_that_was_used_is_never_zero_and_an_unused_one_always() {
        assert_eq!(
            owners(&[object(3, 20, 1)], 50, 4).inconsistencies().len(),
            1,
            "slot 2 was erased"
        );
        assert_eq!(owners(&[object(2, 20, 1), object(3, 21, 1)], 50, 3).inconsistencies().len(), 1);
        assert_eq!(owners(&[object(2, 20, 1), object(3, 21, 1)], 50, 4).inconsistencies(), []);
    }
}
