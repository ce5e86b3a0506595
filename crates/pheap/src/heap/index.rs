//! The allocator's index in DRAM: the free pages, and the slabs with room.
//!
//! Built by one pass over the page maps on first use, and never stored: maintaining a list in the
//! object would dirty pages that are otherwise untouched.
//!
//! # Slab selection
//! The slab most recently allocated from or freed into, as long as it has room: its page is already
//! dirty. Then the one used before it, and so on; after a few, the lowest one with room, so that
//! used pages stay together and high pages become free.

use std::collections::BTreeSet;

use super::error::HeapError;
use super::free_runs::FreeRuns;
use super::pages::{Pages, Piece};
use super::size_class::{CLASS_COUNT, SizeClass};

/// How many recently used slabs are kept per class.
const RECENT: usize = 16;

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Index {
    pub free: FreeRuns,
    classes: [Slabs; CLASS_COUNT],
}

/// The slabs of a class that have room.
#[derive(Debug, Default)]
pub(crate) struct Slabs {
    with_room: BTreeSet<u64>,
    /// Most recent last. May contain slabs that have no room any more.
    recent: Vec<u64>,
}

impl Index {
    /// Builds the index from the page maps.
    pub fn scan(pages: &Pages) -> Result<Index, HeapError> {
        let mut index = Index::default();
        for zone in &pages.header.zones {
            pages.for_each_piece(zone, |piece| {
                match piece {
                    Piece::Free { page, pages } => index.free.insert(page, pages),
                    Piece::Slab { page, class, full: false, .. } => {
                        index.slabs(class).with_room.insert(page);
                    }
                    Piece::Slab { .. } | Piece::Run { .. } => {}
                }
                Ok(())
            })?;
        }
        Ok(index)
    }

    pub fn slabs(&mut self, class: SizeClass) -> &mut Slabs {
        &mut self.classes[usize::from(class.number())]
    }

    /// Whether the index lists a slab as having room.
    pub fn has_room(&self, class: SizeClass, page: u64) -> bool {
        self.classes[usize::from(class.number())].with_room.contains(&page)
    }
}

impl Slabs {
    /// The slab to take the next block from.
    pub fn preferred(&mut self) -> Option<u64> {
        while let Some(&page) = self.recent.last() {
            if self.with_room.contains(&page) {
                return Some(page);
            }
            self.recent.pop();
        }
        let &lowest = self.with_room.first()?;
        self.recent.push(lowest);
        Some(lowest)
    }

    /// Notes that a slab has room and was just used.
    pub fn used(&mut self, page: u64) {
        self.with_room.insert(page);
        if self.recent.last() != Some(&page) {
            if self.recent.len() == RECENT {
                self.recent.remove(0);
            }
            self.recent.push(page);
        }
    }

    /// Notes that a slab has no room or was freed.
    pub fn remove(&mut self, page: u64) {
        self.with_room.remove(&page);
    }

    /// Whether any slab other than this one has room.
    pub fn others(&self, page: u64) -> bool {
        self.with_room.len() > usize::from(self.with_room.contains(&page))
    }
}
