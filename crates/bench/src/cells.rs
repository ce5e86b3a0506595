//! The data that commits modify, and how "K stores on P pages" maps to different kinds of
//! contenders.
//!
//! ```text
//! page p   0                       1920    2048                    3968    4096
//!          ┌───────────────────────┬───────┬───────────────────────┬───────┐
//!          │ record 2p: 240 cells  │ unused│ record 2p + 1         │ unused│
//!          └───────────────────────┴───────┴───────────────────────┴───────┘
//! ```
//! A cell is 8 bytes. For contenders in memory (an object, a mapping) the data is the array above.
//! For a key-value store each record is one value under its number: two of them fill one of its
//! leaf pages, as LMDB stores values of up to 2,022 bytes in a leaf and SQLite's and redb's pages
//! hold two of this size. So the data sets are equally large, and *P distinct pages* are P distinct
//! leaves. A transaction modifies one record on each of its pages, with any number of stores: a
//! key-value store gets and puts each record once.
//!
//! The stored values depend only on the seed, the commit and the cell, so any order of a
//! transaction's stores leaves the same bytes, and a [`Reference`] knows the expected value of
//! every cell.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::raw::PAGE_BYTES;
use crate::rng::{Rng, mix};

/// Cells of a record.
pub const RECORD_CELLS: usize = 240;
/// Bytes of a record.
pub const RECORD_BYTES: usize = RECORD_CELLS * 8;
/// Records on a page.
pub const PAGE_RECORDS: usize = 2;
/// Distance between consecutive records in memory.
const RECORD_STRIDE_BYTES: usize = PAGE_BYTES / PAGE_RECORDS;

/// The cells of one record.
pub type Record = [u64; RECORD_CELLS];

/// The array: its length, and its content before the first commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellArray {
    /// Length in pages.
    pub pages: u32,
    /// Seed of the content.
    pub seed: u64,
}

impl CellArray {
    /// Number of records.
    pub fn records(&self) -> u32 {
        self.pages * PAGE_RECORDS as u32
    }

    /// Length in memory.
    pub fn len_bytes(&self) -> usize {
        self.pages as usize * PAGE_BYTES
    }

    /// The index of a record's first cell in memory.
    pub fn first_cell(&self, record: u32) -> usize {
        offset_bytes(record, 0) / 8
    }

    /// The initial content of a record.
    pub fn initial(&self, record: u32) -> Record {
        let base = mix(self.seed ^ mix(u64::from(record)));
        std::array::from_fn(|cell| base.wrapping_add(cell as u64))
    }
}

/// The offset of a cell in memory.
#[inline(always)]
pub fn offset_bytes(record: u32, cell: usize) -> usize {
    record as usize * RECORD_STRIDE_BYTES + cell * 8
}

/// One 8-byte store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Store {
    /// The record.
    pub record: u32,
    /// The cell in the record.
    pub cell: u32,
    /// The stored value.
    pub value: u64,
}

/// The stores of one commit.
#[derive(Debug, Clone, Default)]
pub struct Transaction {
    /// The stores in random order, for contenders in memory.
    pub stores: Vec<Store>,
    /// The same stores grouped by record, for key-value stores.
    by_record: Vec<Store>,
}

impl Transaction {
    /// The stores of each record.
    pub fn records(&self) -> impl Iterator<Item = (u32, &[Store])> {
        self.by_record
            .chunk_by(|first, second| first.record == second.record)
            .map(|stores| (stores[0].record, stores))
    }
}

/// Applies the stores to a copy of one record.
pub fn apply(record: &mut Record, stores: &[Store]) {
    for store in stores {
        record[store.cell as usize] = store.value;
    }
}

/// An endless sequence of transactions, the same for all contenders.
#[derive(Debug, Clone)]
pub struct Transactions {
    array: CellArray,
    pages_each: u32,
    stores_a_page: u32,
    rng: Rng,
    made: u64,
}

impl Transactions {
    /// Transactions of `stores_a_page` stores on each of `pages_each` distinct pages.
    pub fn new(array: CellArray, pages_each: u32, stores_a_page: u32, rng: Rng) -> Result<Self> {
        ensure!(
            u64::from(pages_each) * 2 <= u64::from(array.pages),
            "{pages_each} distinct pages a commit need an array of at least twice as many, and it has {}: \
             choose a larger --size",
            array.pages
        );
        Ok(Self { array, pages_each, stores_a_page, rng, made: 0 })
    }

    /// Replaces `transaction` by the next one.
    pub fn next_into(&mut self, transaction: &mut Transaction) {
        self.made += 1;
        let Transaction { stores, by_record } = transaction;
        by_record.clear();
        let mut chosen = std::collections::HashSet::with_capacity(self.pages_each as usize);
        while chosen.len() < self.pages_each as usize {
            let page = self.rng.below(u64::from(self.array.pages)) as u32;
            if !chosen.insert(page) {
                continue;
            }
            let record = page * PAGE_RECORDS as u32 + self.rng.below(PAGE_RECORDS as u64) as u32;
            for _ in 0..self.stores_a_page {
                let cell = self.rng.below(RECORD_CELLS as u64) as u32;
                let position = u64::from(record) << 32 | u64::from(cell);
                let value = mix(self.array.seed ^ mix(self.made) ^ position);
                by_record.push(Store { record, cell, value });
            }
        }
        stores.clone_from(by_record);
        for last in (1..stores.len()).rev() {
            stores.swap(last, self.rng.below(last as u64 + 1) as usize);
        }
    }
}

/// The expected content of the array.
#[derive(Debug, Clone)]
pub struct Reference {
    records: Vec<Record>,
}

impl Reference {
    /// The initial content.
    pub fn new(array: &CellArray) -> Self {
        Self { records: (0..array.records()).map(|record| array.initial(record)).collect() }
    }

    /// Applies a commit.
    pub fn apply(&mut self, transaction: &Transaction) {
        for (record, stores) in transaction.records() {
            apply(&mut self.records[record as usize], stores);
        }
    }

    /// Compares a record of a contender with the expected one.
    pub fn check(&self, record: u32, found: &Record) -> Result<()> {
        let expected = self.records.get(record as usize);
        let differs = expected.is_none_or(|expected| expected != found);
        ensure!(!differs, "record {record} does not hold what was committed to it");
        Ok(())
    }

    /// A number that depends on every cell.
    pub fn checksum(&self) -> u64 {
        self.records.iter().flatten().fold(0, |sum, &cell| mix(sum.rotate_left(1) ^ cell))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARRAY: CellArray = CellArray { pages: 64, seed: 3 };

    #[test]
    fn a_transaction_touches_one_record_on_each_of_its_pages() {
        let mut all = Transactions::new(ARRAY, 10, 5, Rng::new(1)).unwrap();
        let mut transaction = Transaction::default();
        for _ in 0..50 {
            all.next_into(&mut transaction);
            let records: Vec<u32> = transaction.records().map(|(record, _)| record).collect();
            let mut pages: Vec<u32> = records.iter().map(|record| record / 2).collect();
            pages.sort_unstable();
            pages.dedup();
            assert_eq!((records.len(), pages.len()), (10, 10));
            assert!(pages.iter().all(|&page| page < ARRAY.pages));
            assert_eq!(transaction.stores.len(), 50);
        }
    }

    #[test]
    fn the_order_of_stores_does_not_matter() {
        let mut all = Transactions::new(ARRAY, 4, 200, Rng::new(2)).unwrap();
        let mut transaction = Transaction::default();
        all.next_into(&mut transaction);
        let mut by_record = Reference::new(&ARRAY);
        by_record.apply(&transaction);
        let mut in_order = Reference::new(&ARRAY);
        for store in &transaction.stores {
            apply(&mut in_order.records[store.record as usize], &[*store]);
        }
        assert_eq!(by_record.checksum(), in_order.checksum());
        assert_ne!(by_record.checksum(), Reference::new(&ARRAY).checksum());
    }

    #[test]
    fn the_reference_finds_lost_stores() {
        let mut all = Transactions::new(ARRAY, 1, 1, Rng::new(4)).unwrap();
        let mut transaction = Transaction::default();
        all.next_into(&mut transaction);
        let mut reference = Reference::new(&ARRAY);
        let record = transaction.stores[0].record;
        reference.check(record, &ARRAY.initial(record)).unwrap();
        reference.apply(&transaction);
        assert!(reference.check(record, &ARRAY.initial(record)).is_err());
        let mut found = ARRAY.initial(record);
        apply(&mut found, &transaction.stores);
        reference.check(record, &found).unwrap();
        assert!(reference.check(ARRAY.records(), &found).is_err(), "a record too many");
    }

    #[test]
    fn too_many_pages_for_the_array_are_refused() {
        assert!(Transactions::new(ARRAY, 33, 1, Rng::new(1)).is_err());
    }

    #[test]
    fn records_do_not_overlap_and_stay_on_their_page() {
        for record in 0..ARRAY.records() {
            let (first, last) =
                (offset_bytes(record, 0), offset_bytes(record, RECORD_CELLS - 1) + 7);
            assert_eq!(first / PAGE_BYTES, record as usize / PAGE_RECORDS);
            assert_eq!(last / PAGE_BYTES, record as usize / PAGE_RECORDS);
            assert!(last < offset_bytes(record + 1, 0));
        }
    }
}
