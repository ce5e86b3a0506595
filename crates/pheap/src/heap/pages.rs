//! Pages and their use: the header, the page maps, and finding the allocation at an address.
//!
//! This is the state stored in the object; the DRAM index is in `index.rs`.

use super::error::{Damage, HeapError, NotAllocated};
use super::layout::{Header, PAGE_BYTES, Zone};
use super::memory::Memory;
use super::size_class::{MAX_SLAB_PAGES, SizeClass};
use super::slab::Slab;

const FREE: u8 = 0;
const RUN_HEAD: u8 = 1;
const RUN_REST: u8 = 2;
const SLAB_REST: u8 = 3;
const SLAB: u8 = 0x40;
const FULL: u8 = 0x80;

/// What a data page is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageState {
    Free,
    /// First page of a large allocation.
    RunHead,
    /// Another page of a large allocation.
    RunRest,
    /// First page of a slab. `full` means that almost nothing is free in it.
    Slab {
        class: SizeClass,
        full: bool,
    },
    /// Another page of a slab.
    SlabRest,
}

impl PageState {
    pub fn encode(self) -> u8 {
        match self {
            PageState::Free => FREE,
            PageState::RunHead => RUN_HEAD,
            PageState::RunRest => RUN_REST,
            PageState::SlabRest => SLAB_REST,
            PageState::Slab { class, full } => SLAB | class.number() | if full { FULL } else { 0 },
        }
    }

    pub fn decode(byte: u8) -> Option<PageState> {
        Some(match byte {
            FREE => PageState::Free,
            RUN_HEAD => PageState::RunHead,
            RUN_REST => PageState::RunRest,
            SLAB_REST => PageState::SlabRest,
            _ if byte & SLAB != 0 => PageState::Slab {
                class: SizeClass::from_number(byte & !(SLAB | FULL))?,
                full: byte & FULL != 0,
            },
            _ => return None,
        })
    }
}

/// The allocation at an address.
#[derive(Debug)]
pub(crate) enum Allocation {
    Block { slab: Slab, class: SizeClass, page: u64, block: u64 },
    Run { page: u64, pages: u64 },
}

impl Allocation {
    /// Bytes that its owner may use.
    pub fn usable_bytes(&self) -> u64 {
        match self {
            Allocation::Block { class, .. } => class.block_bytes(),
            Allocation::Run { pages, .. } => pages * PAGE_BYTES,
        }
    }
}

/// A heap as stored in the object.
#[derive(Debug)]
pub(crate) struct Pages {
    pub memory: Memory,
    /// The content of page 0, which is written whenever this changes.
    pub header: Header,
}

impl Pages {
    /// Writes the header.
    pub fn write_header(&self) -> Result<(), HeapError> {
        self.memory.store(0, self.header.encode())
    }

    /// The zone that has `page` as a data page.
    pub fn zone_of(&self, page: u64) -> Option<&Zone> {
        let behind = self.header.zones.partition_point(|zone| zone.data_first_page() <= page);
        let zone = self.header.zones.get(behind.checked_sub(1)?)?;
        (page < zone.end_page()).then_some(zone)
    }

    fn damaged<T>(page: u64, damage: Damage) -> Result<T, HeapError> {
        Err(HeapError::Damaged { offset_bytes: page.saturating_mul(PAGE_BYTES), damage })
    }

    /// The state of a data page of a zone.
    pub fn state(&self, zone: &Zone, page: u64) -> Result<PageState, HeapError> {
        if page >= zone.ready_end_page() {
            return Ok(PageState::Free);
        }
        let byte: u8 = self.memory.load(zone.map_offset(page))?;
        PageState::decode(byte).map_or_else(|| Self::damaged(page, Damage::PageState(byte)), Ok)
    }

    /// Sets the state of `pages` pages: `first` for the first, `rest` for the others.
    pub fn set_states(
        &mut self,
        page: u64,
        pages: u64,
        first: PageState,
        rest: PageState,
    ) -> Result<(), HeapError> {
        let Some(zone) = self.zone_of(page).copied() else {
            return Self::damaged(page, Damage::Outside);
        };
        if pages > zone.end_page() - page {
            return Self::damaged(page, Damage::Outside);
        }
        self.make_ready(&zone, page + pages)?;
        let offset = zone.map_offset(page);
        self.memory.store(offset, first.encode())?;
        self.memory.fill(offset + 1, pages - 1, rest.encode())
    }

    /// Extends the valid part of a zone's map up to a page.
    fn make_ready(&mut self, zone: &Zone, end_page: u64) -> Result<(), HeapError> {
        let needed = (end_page - zone.data_first_page()).div_ceil(PAGE_BYTES);
        if needed <= zone.maps_ready {
            return Ok(());
        }
        let from = (zone.map_first_page + zone.maps_ready) * PAGE_BYTES;
        self.memory.zero(from, (needed - zone.maps_ready) * PAGE_BYTES)?;
        for other in &mut self.header.zones {
            if other.map_first_page == zone.map_first_page {
                other.maps_ready = needed;
            }
        }
        self.write_header()
    }

    /// Pages of the run that starts at `head`.
    pub fn run_pages(&self, zone: &Zone, head: u64) -> Result<u64, HeapError> {
        const EIGHT: u64 = u64::from_ne_bytes([RUN_REST; 8]);
        let end = zone.ready_end_page();
        let mut page = head + 1;
        while page + 8 <= end && self.memory.load::<u64>(zone.map_offset(page))? == EIGHT {
            page += 8;
        }
        while page < end && self.memory.load::<u8>(zone.map_offset(page))? == RUN_REST {
            page += 1;
        }
        Ok(page - head)
    }

    /// The allocation that starts at an offset.
    pub fn find(&self, offset: u64) -> Result<Allocation, HeapError> {
        let address = self.memory.address(offset);
        let refuse = |reason| HeapError::NotAllocated { address, reason };
        let page = offset / PAGE_BYTES;
        let zone = self.zone_of(page).ok_or(refuse(if offset < self.memory.len_bytes() {
            NotAllocated::Metadata
        } else {
            NotAllocated::Foreign
        }))?;
        match self.state(zone, page)? {
            PageState::Free => Err(refuse(NotAllocated::Free)),
            PageState::RunRest => Err(refuse(NotAllocated::Interior)),
            PageState::RunHead if offset.is_multiple_of(PAGE_BYTES) => {
                Ok(Allocation::Run { page, pages: self.run_pages(zone, page)? })
            }
            PageState::RunHead => Err(refuse(NotAllocated::Interior)),
            PageState::Slab { class, .. } => self.find_block(page, class, offset),
            PageState::SlabRest => {
                let (page, class) = self.slab_before(zone, page)?;
                self.find_block(page, class, offset)
            }
        }
    }

    fn find_block(
        &self,
        page: u64,
        class: SizeClass,
        offset: u64,
    ) -> Result<Allocation, HeapError> {
        let slab = Slab::read(&self.memory, page, class)?;
        match slab.block_at(offset) {
            Ok(block) => Ok(Allocation::Block { slab, class, page, block }),
            Err(reason) => {
                Err(HeapError::NotAllocated { address: self.memory.address(offset), reason })
            }
        }
    }

    /// The slab that contains a page other than its first.
    fn slab_before(&self, zone: &Zone, page: u64) -> Result<(u64, SizeClass), HeapError> {
        for head in (zone.data_first_page()..page).rev().take(MAX_SLAB_PAGES as usize - 1) {
            match self.state(zone, head)? {
                PageState::SlabRest => {}
                PageState::Slab { class, .. } if page < head + class.slab_pages() => {
                    return Ok((head, class));
                }
                _ => break,
            }
        }
        Self::damaged(page, Damage::PageOrder)
    }

    /// Calls `visit` with the pieces of a zone, in order.
    pub fn for_each_piece(
        &self,
        zone: &Zone,
        mut visit: impl FnMut(Piece) -> Result<(), HeapError>,
    ) -> Result<(), HeapError> {
        let mut map = [0u8; PAGE_BYTES as usize];
        let mut piece: Option<Piece> = None;
        let mut page = zone.data_first_page();
        while page < zone.ready_end_page() {
            let count = PAGE_BYTES.min(zone.ready_end_page() - page);
            let map = &mut map[..count as usize];
            self.memory.copy_to(zone.map_offset(page), map)?;
            for &byte in &*map {
                let Some(state) = PageState::decode(byte) else {
                    return Self::damaged(page, Damage::PageState(byte));
                };
                if !piece.as_mut().is_some_and(|piece| piece.continues_with(state)) {
                    let Some(next) = Piece::starting_at(page, state) else {
                        return Self::damaged(page, Damage::PageOrder);
                    };
                    if let Some(done) = piece.replace(next) {
                        visit(done.complete()?)?;
                    }
                }
                page += 1;
            }
        }
        // Pages that no ready map describes are free.
        let unready = zone.end_page() - page;
        match &mut piece {
            Some(Piece::Free { pages, .. }) => *pages += unready,
            _ if unready > 0 => {
                if let Some(done) = piece.replace(Piece::Free { page, pages: unready }) {
                    visit(done.complete()?)?;
                }
            }
            _ => {}
        }
        piece.map_or(Ok(()), |last| visit(last.complete()?))
    }
}

/// Consecutive pages with one use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece {
    Free { page: u64, pages: u64 },
    Run { page: u64, pages: u64 },
    Slab { page: u64, pages: u64, class: SizeClass, full: bool },
}

impl Piece {
    fn starting_at(page: u64, state: PageState) -> Option<Piece> {
        match state {
            PageState::Free => Some(Piece::Free { page, pages: 1 }),
            PageState::RunHead => Some(Piece::Run { page, pages: 1 }),
            PageState::Slab { class, full } => Some(Piece::Slab { page, pages: 1, class, full }),
            PageState::RunRest | PageState::SlabRest => None,
        }
    }

    /// Extends the piece by a page if a page in this state continues it.
    fn continues_with(&mut self, state: PageState) -> bool {
        let pages = match (self, state) {
            (Piece::Free { pages, .. }, PageState::Free)
            | (Piece::Run { pages, .. }, PageState::RunRest) => pages,
            (Piece::Slab { pages, class, .. }, PageState::SlabRest)
                if *pages < class.slab_pages() =>
            {
                pages
            }
            _ => return false,
        };
        *pages += 1;
        true
    }

    fn complete(self) -> Result<Piece, HeapError> {
        match self {
            Piece::Slab { page, pages, class, .. } if pages != class.slab_pages() => {
                Pages::damaged(page, Damage::PageOrder)
            }
            whole => Ok(whole),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_told_apart() {
        let mut known = 0;
        for byte in 0..=255 {
            if let Some(state) = PageState::decode(byte) {
                assert_eq!(state.encode(), byte);
                known += 1;
            }
        }
        assert_eq!(known, 4 + 2 * SizeClass::all().count());
    }
}
