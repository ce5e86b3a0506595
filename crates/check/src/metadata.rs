//! The slots, as the last record of the log leaves them: first each by itself, then all together.

use std::collections::BTreeMap;

use aquifer_format::inode::{HEAD_SLOT, Inode, PoolHead};
use aquifer_format::layout::Layout;
use aquifer_format::links::LinkCounts;
use aquifer_format::owners::{Inconsistency, Owners};
use aquifer_format::run::Run;
use aquifer_format::slot::Slot;
use aquifer_format::slot_bytes::{SLOT_BYTES, SlotBytes};
use aquifer_format::superblock::Superblock;
use aquifer_format::{ByteRange, PAGE_BYTES};
use aquifer_vm::fixed::WINDOW;

use super::log::LogView;
use super::report::{FindingKind, Severity};
use super::saved::Maps;
use super::slots::Slots;
use super::{Checker, RESTORE, at, quoted, text};

/// Totals of the metadata.
pub(super) struct Metadata {
    /// Objects.
    pub inodes: u64,
    pub links: LinkCounts,
    pub used_pages: u64,
    pub free_pages: u64,
    pub fresh_pages: u64,
}

/// The place of a slot on media.
pub(super) fn place_of(layout: &Layout, slot: u64) -> ByteRange {
    let offset_bytes = layout.slot_offset_bytes(slot);
    ByteRange { offset_bytes, len_bytes: SLOT_BYTES as u64 }
}

impl Checker<'_> {
    pub(super) fn check_metadata(&mut self, superblock: &Superblock, log: &LogView) -> Metadata {
        let layout = superblock.layout;
        let mut head = None;
        let mut not_canonical: Vec<u64> = Vec::new();
        let mut inodes: Vec<Named> = Vec::new();
        let mut with_parts: Vec<u64> = Vec::new();
        let slots = Slots::new(self.media, layout, log);
        let mut maps = (superblock.saved_sum != 0).then(|| Maps::new(&layout));
        let mut next = HEAD_SLOT;
        let read = |number| {
            // Slots that cannot be read and are not in the log are left out, and reported below.
            let bytes = slots.read(number)?;
            if number == HEAD_SLOT {
                head = PoolHead::decode(&bytes).and_then(|head| head.validate(&layout)).ok();
            }
            // Some slots are read again; each is checked once.
            if number >= next {
                next = number + 1;
                maps.iter_mut().for_each(|maps| maps.note_slot(number, &bytes));
                if !is_canonical(number, &bytes, head.as_ref()) {
                    not_canonical.push(number);
                }
            }
            Some(bytes)
        };
        let owners = Owners::new(&layout, superblock.saved, read, |slot| match slot {
            Slot::Object(inode) => inodes.push(Named::of(inode)),
            Slot::File(inode)
                if inode.part != 0 || inode.attributes != 0 || !inode.runs.is_empty() =>
            {
                with_parts.push(inode.number);
            }
            _ => {}
        });
        for inconsistency in owners.inconsistencies() {
            match inconsistency {
                Inconsistency::Link(inconsistency) => {
                    self.explain_link_inconsistency(&layout, &slots, inconsistency)
                }
                inconsistency => self.explain_inconsistency(&layout, inconsistency),
            }
        }
        for slot in not_canonical {
            self.explain_reserved(&name_of(slot), place_of(&layout, slot));
        }
        self.check_names(&layout, &inodes);
        self.check_addresses(&layout, &inodes);
        self.check_parts(&layout, &slots, &with_parts);
        self.note_orphans(owners.counts().orphans);
        for range in slots.into_unread() {
            // Reading again reports the error.
            let _ = self.read(range, "Metadata");
        }
        self.check_logged_content(superblock, log, &owners);
        let used = owners.used_runs();
        if let (Some(maps), Some(head)) = (maps, head)
            && owners.inconsistencies().is_empty()
            && log.end_lsn == superblock.tail_lsn
        {
            self.check_saved(superblock, &head, maps, &used);
        }
        let used_pages = used
            .iter()
            .map(|run| {
                let end_page = run.end_page().min(layout.page_count);
                end_page.saturating_sub(run.start_page.max(layout.data_start_page))
            })
            .sum();
        let fresh_from_page = head.map_or(layout.page_count, |head| head.fresh_from_page);
        if self.options.fresh_pages && head.is_some() && !self.presence.is_in_use() {
            self.check_fresh_pages(&layout, fresh_from_page);
        }
        Metadata {
            inodes: inodes.iter().filter(|inode| owners.is_believed(inode.number)).count() as u64,
            links: owners.counts(),
            used_pages,
            free_pages: (layout.page_count - layout.data_start_page).saturating_sub(used_pages),
            fresh_pages: layout.page_count.saturating_sub(fresh_from_page),
        }
    }

    fn explain_inconsistency(&mut self, layout: &Layout, inconsistency: &Inconsistency) {
        let (kind, slot, what, meaning) = match inconsistency {
            Inconsistency::Head(error) => (
                FindingKind::Head,
                HEAD_SLOT,
                format!("The pool's head is damaged: {error}"),
                "It is not known which pages were never used; objects can still be read, nothing \
                 can be changed"
                    .to_owned(),
            ),
            Inconsistency::Inode { number, error } => (
                FindingKind::Inode,
                *number,
                format!("Inode {number} is damaged: {error}"),
                "The object that it is cannot be read, and its pages cannot be told from free \
                 ones; the others can be read, and nothing can be changed"
                    .to_owned(),
            ),
            Inconsistency::Misplaced { number, run } => (
                FindingKind::MisplacedRun,
                *number,
                format!("Inode {number} names {}, where no content can be", pages_of(*run)),
                "They are metadata, log, the saved state, never used, or outside the pool; the object \
                 cannot be read, and nothing can be changed"
                    .to_owned(),
            ),
            Inconsistency::Shared { number, other, run } if number == other => (
                FindingKind::SharedPages,
                *number,
                format!("Inode {number} names some of {} twice", pages_of(*run)),
                "The object cannot be read, and nothing can be changed".to_owned(),
            ),
            Inconsistency::Shared { number, other, run } => (
                FindingKind::SharedPages,
                *number,
                format!("Inodes {number} and {other} both name some of {}", pages_of(*run)),
                "Nothing says whose they are, so neither object can be read, and nothing can be \
                 changed"
                    .to_owned(),
            ),
            Inconsistency::Link(_) => return,
        };
        let place = place_of(layout, slot);
        let what = format!("{what} (the slot lies {})", at(place));
        self.find_of_inode(Severity::Damage, kind, slot, place, text(what, meaning, RESTORE));
    }

    fn check_names(&mut self, layout: &Layout, inodes: &[Named]) {
        let mut by_name: BTreeMap<&[u8], u64> = BTreeMap::new();
        for inode in inodes {
            if let Some(other) = by_name.insert(&inode.name, inode.number) {
                self.find_of_inode(
                    Severity::Damage,
                    FindingKind::SameName,
                    inode.number,
                    place_of(layout, inode.number),
                    text(
                        format!("Inodes {other} and {} are both named {}", inode.number, quoted(&inode.name)),
                        "Only one of them is found by its name, and which one is chance",
                        "Copy what the object holds under another name, and destroy it; do that twice",
                    ),
                );
            }
        }
    }

    fn check_addresses(&mut self, layout: &Layout, inodes: &[Named]) {
        let mut ranges: Vec<(u64, u64, &Named)> = Vec::new();
        for inode in inodes.iter().filter(|inode| inode.address != 0) {
            let end = inode.address.checked_add(inode.content_bytes);
            let is_inside =
                WINDOW.contains(&inode.address) && end.is_some_and(|end| end <= WINDOW.end);
            if !is_inside || inode.address % PAGE_BYTES != 0 {
                self.find_of_inode(
                    Severity::Damage,
                    FindingKind::Address,
                    inode.number,
                    place_of(layout, inode.number),
                    text(
                        format!(
                            "The address of {inode} is {:#x}, where no object can be",
                            inode.address
                        ),
                        "It cannot be attached; its bytes are whole",
                        "Copy them with `aquifer object dump`",
                    ),
                );
                continue;
            }
            ranges.push((inode.address, end.unwrap_or(u64::MAX), inode));
        }
        ranges.sort_unstable_by_key(|(start, end, inode)| (*start, *end, inode.number));
        let mut furthest: Option<(u64, &Named)> = None;
        for (start, end, inode) in ranges {
            if let Some((reached, other)) = furthest
                && start < reached
            {
                self.find_of_inode(
                    Severity::Damage,
                    FindingKind::SharedAddresses,
                    inode.number,
                    place_of(layout, inode.number),
                    text(
                        format!("The addresses of {other} and {inode} overlap at {start:#x}"),
                        "Whichever is attached first keeps the other out; their bytes are whole",
                        "Attach them one at a time, and move one of them with `aquifer object \
                         resize` if it is relocatable",
                    ),
                );
            }
            if furthest.is_none_or(|(reached, _)| end > reached) {
                furthest = Some((end, inode));
            }
        }
    }

    fn check_fresh_pages(&mut self, layout: &Layout, fresh_from_page: u64) {
        const PIECE_PAGES: u64 = 256;
        let mut page = fresh_from_page;
        while page < layout.page_count {
            let piece = Run { start_page: page, pages: PIECE_PAGES.min(layout.page_count - page) };
            let Some(bytes) = self.read(piece.bytes(), "Free space") else { return };
            if let Some(index) = bytes.iter().position(|&byte| byte != 0) {
                let place = ByteRange {
                    offset_bytes: piece.bytes().offset_bytes + index as u64,
                    len_bytes: PAGE_BYTES - index as u64 % PAGE_BYTES,
                };
                self.find(
                    Severity::Damage,
                    FindingKind::UsedFreshPage,
                    place,
                    text(
                        format!(
                            "Pages from {fresh_from_page} on count as never used, but there \
                         is something {}",
                            at(place)
                        ),
                        "An object made there would begin with these bytes in place of zeros",
                        "Copy the objects to a new pool",
                    ),
                );
                return;
            }
            page += PIECE_PAGES;
        }
    }
}

/// Whether a slot has exactly the bytes that encoding its content gives.
fn is_canonical(number: u64, bytes: &SlotBytes, head: Option<&PoolHead>) -> bool {
    if number == HEAD_SLOT {
        return head.is_none_or(|head| head.encode() == *bytes);
    }
    let is_zero = bytes.iter().all(|&byte| byte == 0);
    match Slot::decode(bytes, number) {
        Ok(slot) if !is_zero => slot.encode().map_or(true, |again| again == *bytes),
        _ => true,
    }
}

fn name_of(slot: u64) -> String {
    match slot {
        HEAD_SLOT => "The pool's head".to_owned(),
        _ => format!("Inode {slot}"),
    }
}

fn pages_of(run: Run) -> String {
    format!("the pages {} to {}", run.start_page, run.end_page().saturating_sub(1))
}

/// The fields of an object that the checks across all objects need.
struct Named {
    number: u64,
    name: Vec<u8>,
    address: u64,
    content_bytes: u64,
}

impl Named {
    fn of(inode: &Inode) -> Named {
        Named {
            number: inode.number,
            address: inode.address,
            content_bytes: inode.content_pages().saturating_mul(PAGE_BYTES),
            name: inode.name.clone(),
        }
    }
}

impl std::fmt::Display for Named {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "object {} (inode {})", quoted(&self.name), self.number)
    }
}
