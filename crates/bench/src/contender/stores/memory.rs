//! Cells in memory that is made durable as a whole: objects and shared mappings.

use std::ops::Range;

use anyhow::Result;

use super::{CellStore, See};
use crate::cells::{CellArray, RECORD_CELLS, Store, Transaction, offset_bytes};
use crate::contender::regions::{Home, MakeRegions, Region};

/// An array in a region.
pub struct MemoryStore {
    region: Box<dyn Region>,
    array: CellArray,
    commits: Commits,
    ranges: Vec<Range<u64>>,
}

/// What a commit makes durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Commits {
    /// The region, which finds out what was stored.
    Everything,
    /// The cells of the transaction, by their ranges.
    Cells,
}

impl MemoryStore {
    /// Creates regions and stores the initial content.
    pub fn create(
        create: MakeRegions,
        commits: Commits,
        home: &Home,
        array: &CellArray,
        lanes: u32,
    ) -> Result<Vec<Box<dyn CellStore>>> {
        let regions = create(home, &vec![array.len_bytes(); lanes as usize])?;
        let fill = |mut region: Box<dyn Region>| -> Result<Box<dyn CellStore>> {
            // SAFETY: the region is writable, as long as the array, and not yet shared.
            unsafe { fill(region.base(), array) };
            region.sync()?;
            Ok(Box::new(Self { region, array: *array, commits, ranges: Vec::new() }))
        };
        regions.into_iter().map(fill).collect()
    }

    /// Opens those regions.
    pub fn open(
        open: MakeRegions,
        commits: Commits,
        home: &Home,
        array: &CellArray,
        lanes: u32,
    ) -> Result<Vec<Box<dyn CellStore>>> {
        let regions = open(home, &vec![array.len_bytes(); lanes as usize])?;
        let store = |region| -> Box<dyn CellStore> {
            Box::new(Self { region, array: *array, commits, ranges: Vec::new() })
        };
        Ok(regions.into_iter().map(store).collect())
    }
}

impl CellStore for MemoryStore {
    fn commit(&mut self, transaction: &Transaction) -> Result<()> {
        for store in &transaction.stores {
            // SAFETY: transactions name cells of this array, and the region is that long and
            // writable.
            unsafe { put(self.region.base(), store) };
        }
        if self.commits == Commits::Everything {
            return self.region.sync();
        }
        self.ranges.clear();
        self.ranges.extend(transaction.stores.iter().map(|store| {
            let offset = offset_bytes(store.record, store.cell as usize) as u64;
            offset..offset + 8
        }));
        self.region.sync_ranges(&self.ranges)
    }

    fn scan(&mut self, see: &mut See<'_>) -> Result<()> {
        // SAFETY: the region is as long as the array and readable.
        unsafe { scan(self.region.base(), &self.array, see) }
    }

    fn keep_dirty(&mut self, pages: usize) -> Result<()> {
        self.region.keep_dirty(pages)
    }

    fn settle(&mut self) -> Result<()> {
        self.region.settle()
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.region.close()
    }
}

/// Performs one store.
///
/// # Safety
/// `base` must point to a writable array that has this cell; no other thread may use it.
#[inline(always)]
pub unsafe fn put(base: *mut u8, store: &Store) {
    // SAFETY: the caller's promise: the offset is inside the array.
    let cell = unsafe { base.add(offset_bytes(store.record, store.cell as usize)) };
    // SAFETY: as above; page-aligned base and multiples of 8 make it aligned.
    unsafe { cell.cast::<u64>().write(store.value) };
}

/// Stores the initial content.
///
/// # Safety
/// As for [`put`], for all cells of `array`.
pub unsafe fn fill(base: *mut u8, array: &CellArray) {
    for record in 0..array.records() {
        for (cell, value) in (0..).zip(array.initial(record)) {
            // SAFETY: the caller's promise.
            unsafe { put(base, &Store { record, cell, value }) };
        }
    }
}

/// Calls `see` with every record.
///
/// # Safety
/// `base` must point to a readable array like `array`; no other thread may change it.
pub unsafe fn scan(base: *const u8, array: &CellArray, see: &mut See<'_>) -> Result<()> {
    for record in 0..array.records() {
        // SAFETY: the caller's promise: every record is inside the array.
        let cells = unsafe { base.add(offset_bytes(record, 0)) };
        // SAFETY: as above; aligned like every cell, and any bytes are a valid record.
        let found = unsafe { cells.cast::<[u64; RECORD_CELLS]>().read() };
        see(record, &found)?;
    }
    Ok(())
}
