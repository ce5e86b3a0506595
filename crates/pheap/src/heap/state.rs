//! The allocator: allocates and frees blocks and runs of pages. Called under the heap's lock.
//!
//! Each operation validates before it stores: after the first store, only an access outside the
//! memory can fail. So an error leaves the heap unchanged.

use super::error::{Damage, HeapError};
use super::free_runs::FreeRuns;
use super::index::Index;
use super::layout::{MAX_ZONES, PAGE_BYTES, Zone};
use super::pages::{Allocation, PageState, Pages, Piece};
use super::size_class::SizeClass;
use super::slab::Slab;
use super::statistics::Statistics;

/// The largest alignment in a relocatable heap: that of a page, where the heap starts.
pub(crate) const MAX_RELOCATABLE_ALIGN: u64 = PAGE_BYTES;

/// A heap's state: the part stored in the object, and the DRAM index.
#[derive(Debug)]
pub(crate) struct State {
    pub pages: Pages,
    /// Built on first use.
    index: Option<Index>,
}

impl State {
    pub fn new(pages: Pages) -> State {
        State { pages, index: None }
    }

    fn parts(&mut self) -> Result<(&mut Pages, &mut Index), HeapError> {
        if self.index.is_none() {
            self.index = Some(Index::scan(&self.pages)?);
        }
        let index = self.index.as_mut().expect("it was made above");
        Ok((&mut self.pages, index))
    }

    /// Allocates. Returns the offset and the usable bytes.
    pub fn allocate(&mut self, size: u64, align: u64) -> Result<(u64, u64), HeapError> {
        if self.pages.header.address.is_none() && align > MAX_RELOCATABLE_ALIGN {
            let largest_bytes = MAX_RELOCATABLE_ALIGN;
            return Err(HeapError::Alignment { align_bytes: align, largest_bytes });
        }
        let (pages, index) = self.parts()?;
        if let Some(class) = SizeClass::for_size(size, align) {
            match allocate_block(pages, index, class) {
                // If there is no room for a slab of several pages, fall back to one page.
                Err(HeapError::Full { .. }) if class.slab_pages() > 1 => {}
                done => return Ok((done?, class.block_bytes())),
            }
        }
        let count = size.div_ceil(PAGE_BYTES).max(1);
        let page = take_pages(pages, &mut index.free, count, align)
            .ok_or_else(|| full(&index.free, size))?;
        pages.set_states(page, count, PageState::RunHead, PageState::RunRest)?;
        Ok((page * PAGE_BYTES, count * PAGE_BYTES))
    }

    /// Frees an allocation.
    pub fn free(&mut self, offset: u64) -> Result<(), HeapError> {
        let (pages, index) = self.parts()?;
        match pages.find(offset)? {
            Allocation::Block { slab, class, page, block } => {
                free_block(pages, index, slab, class, page, block)
            }
            Allocation::Run { page, pages: count } => {
                pages.set_states(page, count, PageState::Free, PageState::Free)?;
                index.free.insert(page, count);
                Ok(())
            }
        }
    }

    /// Resizes an allocation in place. Returns its usable bytes, or `None` if that is impossible.
    pub fn resize_in_place(&mut self, offset: u64, size: u64) -> Result<Option<u64>, HeapError> {
        let (pages, index) = self.parts()?;
        match pages.find(offset)? {
            Allocation::Block { class, .. } => {
                Ok(Some(class.block_bytes()).filter(|&bytes| size <= bytes))
            }
            Allocation::Run { page, pages: count } => {
                let wanted = size.div_ceil(PAGE_BYTES).max(1);
                let (behind, free) = (page + count, PageState::Free);
                if wanted < count {
                    pages.set_states(page + wanted, count - wanted, free, free)?;
                    index.free.insert(page + wanted, count - wanted);
                } else if wanted > count {
                    if !index.free.take_at(behind, wanted - count) {
                        return Ok(None);
                    }
                    let rest = PageState::RunRest;
                    pages.set_states(behind, wanted - count, rest, rest)?;
                }
                Ok(Some(wanted * PAGE_BYTES))
            }
        }
    }

    /// The error for a request that does not fit, with the bytes in free pages and in the longest
    /// run.
    pub fn full(&mut self, requested_bytes: u64) -> HeapError {
        match self.parts() {
            Ok((_, index)) => full(&index.free, requested_bytes),
            Err(error) => error,
        }
    }

    /// Extends the heap to `len_bytes`.
    pub fn grow(&mut self, len_bytes: u64) -> Result<(), HeapError> {
        let page_count = len_bytes / PAGE_BYTES;
        self.parts()?;
        let mut header = self.pages.header.clone();
        let too_small = |least_bytes| HeapError::TooSmall { given_bytes: len_bytes, least_bytes };
        let last = header.zones.last_mut().expect("a heap has a zone");
        let old_end = last.end_page();
        let added = page_count.checked_sub(old_end).ok_or(too_small(header.len_bytes))?;
        if added == 0 {
            return Ok(());
        }
        // A map page was zeroed when it became ready, so it already marks the new pages as free.
        let (page, count) = if last.data_pages + added <= last.capacity_pages() {
            last.data_pages += added;
            (old_end, added)
        } else if header.zones.len() < MAX_ZONES {
            let zone = Zone::fresh(old_end, added).ok_or(too_small((old_end + 2) * PAGE_BYTES))?;
            header.zones.push(zone);
            (zone.data_first_page(), zone.data_pages)
        } else {
            return Err(HeapError::TooManyZones { zones: MAX_ZONES });
        };
        header.len_bytes = page_count * PAGE_BYTES;
        self.pages.memory = self.pages.memory.with_len(header.len_bytes);
        self.pages.header = header;
        self.pages.write_header()?;
        self.parts()?.1.free.insert(page, count);
        Ok(())
    }

    /// Validates everything; returns the first contradiction as the error.
    pub fn check(&self) -> Result<Statistics, HeapError> {
        let pages = &self.pages;
        let mut page = vec![0; PAGE_BYTES as usize];
        pages.memory.copy_to(0, &mut page)?;
        if page != pages.header.encode() {
            return Err(HeapError::Damaged { offset_bytes: 0, damage: Damage::Changed });
        }
        let mut statistics = Statistics::of_header(&pages.header);
        let mut free = FreeRuns::default();
        for zone in &pages.header.zones {
            pages.for_each_piece(zone, |piece| {
                if let Piece::Free { page, pages } = piece {
                    free.insert(page, pages);
                }
                self.check_piece(piece, &mut statistics)
            })?;
        }
        statistics.largest_run_bytes = free.longest() * PAGE_BYTES;
        if self.index.as_ref().is_some_and(|index| index.free != free) {
            return Err(HeapError::Damaged { offset_bytes: 0, damage: Damage::Changed });
        }
        self.check_root()?;
        Ok(statistics)
    }

    fn check_piece(&self, piece: Piece, statistics: &mut Statistics) -> Result<(), HeapError> {
        match piece {
            Piece::Free { pages, .. } => statistics.free_page_bytes += pages * PAGE_BYTES,
            Piece::Run { pages, .. } => {
                statistics.allocations += 1;
                statistics.allocated_bytes += pages * PAGE_BYTES;
            }
            Piece::Slab { page, pages: count, class, full } => {
                let slab = Slab::read(&self.pages.memory, page, class)?;
                let offset_bytes = page * PAGE_BYTES;
                // The mark may lag behind, but only within this limit.
                let fits =
                    if full { slab.free() < class.room_worth_noting() } else { slab.free() > 0 };
                if !fits {
                    return Err(HeapError::Damaged { offset_bytes, damage: Damage::FullMark });
                }
                if !full && self.index.as_ref().is_some_and(|index| !index.has_room(class, page)) {
                    return Err(HeapError::Damaged { offset_bytes, damage: Damage::Changed });
                }
                let block = class.block_bytes();
                statistics.allocations += slab.live();
                statistics.allocated_bytes += slab.live() * block;
                statistics.free_block_bytes += slab.free() * block;
                statistics.metadata_bytes += count * PAGE_BYTES - class.blocks() * block;
            }
        }
        Ok(())
    }

    /// Checks that the root is in an allocation large enough for it.
    pub fn check_root(&self) -> Result<(), HeapError> {
        let Some(root) = self.pages.header.root else { return Ok(()) };
        match self.pages.find(root.offset) {
            Ok(found) if found.usable_bytes() >= root.tag.size_bytes => Ok(()),
            _ => Err(HeapError::Damaged { offset_bytes: root.offset, damage: Damage::Root }),
        }
    }
}

fn full(free: &FreeRuns, requested_bytes: u64) -> HeapError {
    HeapError::Full {
        requested_bytes,
        free_bytes: free.pages() * PAGE_BYTES,
        largest_run_bytes: free.longest() * PAGE_BYTES,
    }
}

/// Takes a run out of the free ones. The caller updates the page map.
fn take_pages(pages: &Pages, free: &mut FreeRuns, count: u64, align: u64) -> Option<u64> {
    free.take(count, |page| {
        let address = pages.memory.address(page * PAGE_BYTES);
        address.wrapping_neg() % align.max(PAGE_BYTES) / PAGE_BYTES
    })
}

fn allocate_block(
    pages: &mut Pages,
    index: &mut Index,
    class: SizeClass,
) -> Result<u64, HeapError> {
    let (page, mut slab) = slab_with_room(pages, index, class)?;
    let Some(offset) = slab.take(&pages.memory)? else {
        return Err(HeapError::Damaged { offset_bytes: page * PAGE_BYTES, damage: Damage::Slab });
    };
    let slabs = index.slabs(class);
    if slab.free() == 0 {
        slabs.remove(page);
        mark(pages, page, class, true)?;
    } else {
        slabs.used(page);
    }
    Ok(offset)
}

fn slab_with_room(
    pages: &mut Pages,
    index: &mut Index,
    class: SizeClass,
) -> Result<(u64, Slab), HeapError> {
    while let Some(page) = index.slabs(class).preferred() {
        let slab = Slab::read(&pages.memory, page, class)?;
        if slab.free() > 0 {
            return Ok((page, slab));
        }
        // It filled up without being marked: the map was copied before the mark.
        index.slabs(class).remove(page);
        mark(pages, page, class, true)?;
    }
    let count = class.slab_pages();
    let page = take_pages(pages, &mut index.free, count, PAGE_BYTES)
        .ok_or_else(|| full(&index.free, class.block_bytes()))?;
    pages.set_states(page, count, PageState::Slab { class, full: false }, PageState::SlabRest)?;
    Slab::format(&pages.memory, page, class)?;
    index.slabs(class).used(page);
    Ok((page, Slab::read(&pages.memory, page, class)?))
}

fn free_block(
    pages: &mut Pages,
    index: &mut Index,
    mut slab: Slab,
    class: SizeClass,
    page: u64,
    block: u64,
) -> Result<(), HeapError> {
    slab.give_back(&pages.memory, block)?;
    let slabs = index.slabs(class);
    slabs.used(page);
    // Keep the last slab of a class: alternating frees and allocations would free and create it
    // each time.
    if slab.live() == 0 && slabs.others(page) {
        slabs.remove(page);
        let count = class.slab_pages();
        pages.set_states(page, count, PageState::Free, PageState::Free)?;
        index.free.insert(page, count);
    } else if slab.free() >= class.room_worth_noting() {
        mark(pages, page, class, false)?;
    }
    Ok(())
}

/// Marks a slab full or not, storing only if the map differs: a store dirties a page.
fn mark(pages: &mut Pages, page: u64, class: SizeClass, full: bool) -> Result<(), HeapError> {
    let zone = pages.zone_of(page).copied();
    let state = PageState::Slab { class, full };
    match zone {
        Some(zone) if pages.state(&zone, page)? != state => pages.set_states(page, 1, state, state),
        _ => Ok(()),
    }
}
