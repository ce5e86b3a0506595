//! The rows in memory: a set-associative table whose readers write nothing but a use count.
//!
//! ```text
//!  row ──hash──▶ set: version │ 8 tags (row + 1, uses)      64 + 16 bytes a set
//!                             │ epoch of the last invalidation
//!                             └ 8 places of `row_bytes`     in an arena with huge pages
//! ```
//! A set is a small cache of its own: a row may be in any of its eight places, and a row that comes
//! in replaces one of the same set. So there is no list, no index to resize and no lock that all
//! threads share, and a row costs ten bytes beside its own. Of the rows of a full set, the one that
//! was used least is replaced; all counts of the set then fall by that row's count, so that rows
//! that were popular once do not stay forever. Rows that nothing has asked for, which came with
//! another one's transfer, have the count 0 and fill empty places only.
//!
//! # Concurrency
//! The version of a set is a sequence lock ([`Version`]): a reader finds the tag, copies the row, and
//! discards the copy if the version has changed. A writer makes the version odd, which also excludes
//! other writers; it does not wait for one, because a row that is not inserted is only read again.
//!
//! A row that was read from the device before an invalidation must not be inserted after it. A
//! loader takes the [`Epoch`] before it reads. An invalidation begins a new one, takes each set that
//! may have one of its rows, and leaves the new epoch there. An insertion that has the set before is
//! swept away; one that has it afterwards finds an epoch later than its own, and gives up. So an
//! invalidation costs the insertions into its own sets only, however often there is one.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_sys::memory::{self, Advice, REGION_BYTES, copy_racy};

use crate::lazy::LazyArray;
use crate::memory_on_demand::MemoryOnDemand;
use crate::version::Version;

/// Places of a set.
pub(super) const WAYS: usize = 8;
/// Bytes of a set beside its rows.
const SET_BYTES: usize = size_of::<Version>() + (WAYS + 1) * size_of::<AtomicU64>();
/// How many times a copy is tried that a writer of the set disturbs.
const TRIES: usize = 4;

/// A tag: the row's number plus one above [`USE_BITS`] bits of use count; 0 for an empty place.
const USE_BITS: u32 = 4;
const MOST_USES: u64 = (1 << USE_BITS) - 1;
/// The largest number of rows that tags can tell apart.
pub(super) const MOST_ROWS: u64 = (1 << (64 - USE_BITS)) - 1;

fn tag_of(row: u64, uses: u64) -> u64 {
    (row + 1) << USE_BITS | uses
}

fn uses_of(tag: u64) -> u64 {
    tag & MOST_USES
}

fn holds(tag: u64, row: u64) -> bool {
    tag >> USE_BITS == row + 1
}

/// The number of invalidations that have begun.
#[derive(Debug, Clone, Copy)]
pub(super) struct Epoch(u64);

/// What an insertion did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Inserted {
    /// The row is in a place that was empty.
    Filled,
    /// The row has replaced another one.
    Replaced,
    /// The row is not inserted: it was there already, or there is no place for it.
    No,
}

/// The table. See the module documentation.
pub(super) struct Table {
    versions: LazyArray<Version>,
    tags: LazyArray<AtomicU64>,
    /// For each set the epoch that the last invalidation of it began; takes memory where there was
    /// one.
    invalidated: LazyArray<AtomicU64>,
    places: MemoryOnDemand,
    row_bytes: usize,
    sets: usize,
    /// Number of tags that are not 0.
    resident: AtomicU64,
    epoch: AtomicU64,
}

impl Table {
    /// Bytes that the smallest table for rows of this length takes.
    pub fn least_bytes(row_bytes: usize) -> u64 {
        (WAYS as u64).saturating_mul(row_bytes as u64).saturating_add(SET_BYTES as u64)
    }

    /// A table in at most `budget_bytes`, for no more than `rows` rows. Memory is allocated when it
    /// is first used.
    pub fn new(budget_bytes: u64, row_bytes: usize, rows: u64) -> io::Result<Table> {
        let most = budget_bytes / Self::least_bytes(row_bytes);
        // Twice the rows: with as many places as rows some sets would overflow.
        let wanted = rows.saturating_mul(2).div_ceil(WAYS as u64).max(1);
        let sets = most.clamp(1, wanted) as usize;
        let places_bytes = sets * WAYS * row_bytes;
        let places = MemoryOnDemand::new(places_bytes, REGION_BYTES)?;
        // Huge pages may be switched off; small ones work as well.
        let _ = places.advise(Advice::HugePage);
        // In the last region a huge page would be memory beyond the budget.
        let whole_bytes = places_bytes / REGION_BYTES * REGION_BYTES;
        let rest = places.base().wrapping_add(whole_bytes);
        // SAFETY: inside the table's own memory; the advice keeps contents.
        let _ =
            unsafe { memory::advise(rest, places.len_bytes() - whole_bytes, Advice::NoHugePage) };
        places.provide(usize::MAX)?;
        Ok(Table {
            versions: LazyArray::new(sets)?,
            tags: LazyArray::new(sets * WAYS)?,
            invalidated: LazyArray::new(sets)?,
            places,
            row_bytes,
            sets,
            resident: AtomicU64::new(0),
            epoch: AtomicU64::new(0),
        })
    }

    /// The number of places.
    pub fn capacity(&self) -> u64 {
        (self.sets * WAYS) as u64
    }

    /// The number of rows in memory.
    pub fn resident(&self) -> u64 {
        self.resident.load(Ordering::Relaxed)
    }

    /// Whether most sets have empty places.
    pub fn is_filling(&self) -> bool {
        self.resident() < self.capacity() - self.capacity() / 8
    }

    fn set_of(&self, row: u64) -> usize {
        // The finaliser of SplitMix64, then the high half of a product: any number of sets.
        let mut hash = row.wrapping_add(0x9e37_79b9_7f4a_7c15);
        hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        hash ^= hash >> 31;
        ((u128::from(hash) * self.sets as u128) >> 64) as usize
    }

    fn tags_of(&self, set: usize) -> &[AtomicU64] {
        &self.tags[set * WAYS..(set + 1) * WAYS]
    }

    /// The place `way` of a set: `row_bytes` bytes inside `places`.
    fn place(&self, set: usize, way: usize) -> *mut u8 {
        debug_assert!(set < self.sets && way < WAYS);
        self.places.base().wrapping_add((set * WAYS + way) * self.row_bytes)
    }

    /// Brings what a lookup of `row` reads first into the CPU's caches.
    #[inline]
    pub fn prefetch(&self, row: u64) {
        let set = self.set_of(row);
        memory::prefetch((&raw const self.versions[set]).cast(), 1);
        memory::prefetch((&raw const self.tags[set * WAYS]).cast(), 1);
    }

    /// Whether the row is in memory now; says nothing about a moment later.
    #[inline]
    pub fn contains(&self, row: u64) -> bool {
        let mut tags = self.tags_of(self.set_of(row)).iter();
        tags.any(|tag| holds(tag.load(Ordering::Relaxed), row))
    }

    /// Copies a row into `target`, which has its length; false if it is not in memory. The content
    /// of `target` is then unspecified.
    #[inline]
    pub fn copy_row(&self, row: u64, target: &mut [u8]) -> bool {
        assert_eq!(target.len(), self.row_bytes);
        let set = self.set_of(row);
        for _ in 0..TRIES {
            let Some(version) = self.versions[set].at_rest() else {
                std::hint::spin_loop();
                continue;
            };
            // Relaxed: the version tells whether tag and bytes belong together.
            let found = self.tags_of(set).iter().enumerate().find_map(|(way, tag)| {
                let seen = tag.load(Ordering::Relaxed);
                holds(seen, row).then_some((way, tag, seen))
            });
            let Some((way, tag, seen)) = found else {
                return false;
            };
            // SAFETY: a place is `row_bytes` long, as is the target, and lies in memory that stays
            // mapped. A writer may change it now: the copy is then discarded.
            unsafe { copy_racy(self.place(set, way), target.as_mut_ptr(), self.row_bytes) };
            if self.versions[set].is_still(version) {
                if uses_of(seen) < MOST_USES {
                    // If it fails the tag has changed; one use more or less decides nothing.
                    let more = seen + 1;
                    let _ = tag.compare_exchange(seen, more, Ordering::Relaxed, Ordering::Relaxed);
                }
                return true;
            }
        }
        false
    }

    /// The epoch of a load that begins now.
    pub fn epoch(&self) -> Epoch {
        // Acquire pairs with the increment in `invalidate`: what the caller of that wrote to the
        // device before is there for a read that starts after this.
        Epoch(self.epoch.load(Ordering::Acquire))
    }

    /// Inserts a row that was read after `epoch` began. One that was not asked for (`wanted` is
    /// false) takes an empty place or none.
    pub fn insert(&self, row: u64, bytes: &[u8], epoch: Epoch, wanted: bool) -> Inserted {
        assert_eq!(bytes.len(), self.row_bytes);
        let set = self.set_of(row);
        let version = &self.versions[set];
        if !version.try_begin_change() {
            return Inserted::No;
        }
        let inserted = self.insert_locked(set, row, bytes, epoch, wanted);
        version.end_change();
        inserted
    }

    /// The part of an insertion that has the set's version.
    fn insert_locked(
        &self,
        set: usize,
        row: u64,
        bytes: &[u8],
        epoch: Epoch,
        wanted: bool,
    ) -> Inserted {
        let tags = self.tags_of(set);
        // Relaxed, here and below: only the holder of the version changes rows. Readers change use
        // counts, which may be lost.
        let seen: [u64; WAYS] = std::array::from_fn(|way| tags[way].load(Ordering::Relaxed));
        // Relaxed: the version's acquire orders it after an invalidation of this set; see the module
        // documentation.
        let is_stale = self.invalidated[set].load(Ordering::Relaxed) > epoch.0;
        if is_stale || seen.iter().any(|&tag| holds(tag, row)) {
            return Inserted::No;
        }
        let empty = seen.iter().position(|&tag| tag == 0);
        if empty.is_none() && !wanted {
            return Inserted::No;
        }
        let way = empty.unwrap_or_else(|| self.make_room(set, row, &seen));
        // SAFETY: the place is `row_bytes` long, as are the bytes; readers discard what they copy
        // while the version is odd.
        unsafe { copy_racy(bytes.as_ptr(), self.place(set, way), self.row_bytes) };
        tags[way].store(tag_of(row, u64::from(wanted)), Ordering::Relaxed);
        if empty.is_none() {
            return Inserted::Replaced;
        }
        // While it has the version: the row cannot be discarded before it is counted.
        self.resident.fetch_add(1, Ordering::Relaxed);
        Inserted::Filled
    }

    /// Chooses the place of the least used row, and ages the others.
    fn make_room(&self, set: usize, row: u64, seen: &[u64; WAYS]) -> usize {
        // Ties are broken by the row that comes in, which is as good as chance.
        let first = row as usize % WAYS;
        let ways = (first..WAYS).chain(0..first);
        let victim = ways.min_by_key(|&way| uses_of(seen[way])).expect("a set has places");
        let least = uses_of(seen[victim]);
        if least > 0 {
            for (tag, &seen) in self.tags_of(set).iter().zip(seen) {
                // If it fails, a reader has just used the row.
                let aged = seen - least.min(uses_of(seen));
                let _ = tag.compare_exchange(seen, aged, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
        victim
    }

    /// Discards the rows of a range. Rows that are being read from the device are not inserted
    /// afterwards.
    pub fn invalidate(&self, rows: Range<u64>) {
        // Release pairs with the acquire in `epoch`.
        let epoch = self.epoch.fetch_add(1, Ordering::Release) + 1;
        if rows.end.saturating_sub(rows.start) < self.sets as u64 {
            for row in rows {
                self.discard(self.set_of(row), epoch, |tag| holds(tag, row));
            }
        } else {
            for set in 0..self.sets {
                self.discard(set, epoch, |tag| rows.contains(&(tag >> USE_BITS).wrapping_sub(1)));
            }
        }
    }

    /// Empties the places of a set whose tags match, in the invalidation that began `epoch`.
    fn discard(&self, set: usize, epoch: u64, matches: impl Fn(u64) -> bool) {
        while !self.versions[set].try_begin_change() {
            // Another thread copies a row.
            std::thread::yield_now();
        }
        // Two invalidations of a set may come in either order.
        self.invalidated[set].fetch_max(epoch, Ordering::Relaxed);
        for tag in self.tags_of(set) {
            if matches(tag.load(Ordering::Relaxed)) {
                tag.store(0, Ordering::Relaxed);
                self.resident.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.versions[set].end_change();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of one set.
    fn one_set() -> Table {
        Table::new(Table::least_bytes(8), 8, 1000).unwrap()
    }

    fn insert(table: &Table, row: u64) -> Inserted {
        table.insert(row, &row.to_ne_bytes(), table.epoch(), true)
    }

    fn is_there(table: &Table, row: u64) -> bool {
        let mut found = [0; 8];
        let copied = table.copy_row(row, &mut found);
        assert_eq!(copied, table.contains(row));
        assert!(!copied || found == row.to_ne_bytes());
        copied
    }

    #[test]
    fn the_least_used_row_gives_way() {
        let table = one_set();
        for row in 0..8 {
            assert_eq!(insert(&table, row), Inserted::Filled);
        }
        assert_eq!(insert(&table, 3), Inserted::No);
        for row in (0..8).filter(|&row| row != 5) {
            assert!(is_there(&table, row));
        }
        assert_eq!(insert(&table, 100), Inserted::Replaced);
        assert!(!is_there(&table, 5) && is_there(&table, 100));
        assert_eq!((table.resident(), table.capacity()), (8, 8));
    }

    #[test]
    fn a_popular_row_outlives_a_scan_and_is_forgotten_in_the_end() {
        let table = one_set();
        insert(&table, 7);
        (0..5).for_each(|_| assert!(is_there(&table, 7)));
        for row in 100..120 {
            insert(&table, row);
        }
        assert!(table.contains(7));
        let scan = (1000..10_000).take_while(|&row| {
            insert(&table, row);
            table.contains(7)
        });
        assert!(scan.count() < 1000);
    }

    #[test]
    fn a_row_that_was_not_asked_for_displaces_none() {
        let table = one_set();
        let extra = |row: u64| table.insert(row, &row.to_ne_bytes(), table.epoch(), false);
        assert_eq!(extra(1), Inserted::Filled);
        for row in 2..9 {
            insert(&table, row);
        }
        assert_eq!(extra(50), Inserted::No);
        insert(&table, 51);
        assert!(!table.contains(1), "it is the first to go");
    }

    #[test]
    fn what_was_read_before_an_invalidation_is_not_inserted_after_it() {
        let table = one_set();
        let before = table.epoch();
        insert(&table, 1);
        table.invalidate(5..6);
        assert!(table.contains(1));
        table.invalidate(0..100);
        assert_eq!(table.resident(), 0);
        assert_eq!(table.insert(1, &[0; 8], before, true), Inserted::No);
        assert_eq!(insert(&table, 1), Inserted::Filled);
    }

    #[test]
    fn an_invalidation_concerns_its_own_sets() {
        let table = Table::new(16 * Table::least_bytes(8), 8, 1000).unwrap();
        let before = table.epoch();
        table.invalidate(3..4);
        let (same, other): (Vec<u64>, Vec<u64>) =
            (0..50).partition(|&row| table.set_of(row) == table.set_of(3));
        for row in other {
            assert_eq!(table.insert(row, &row.to_ne_bytes(), before, true), Inserted::Filled);
        }
        for row in same {
            assert_eq!(table.insert(row, &row.to_ne_bytes(), before, true), Inserted::No);
            assert_eq!(insert(&table, row), Inserted::Filled);
        }
    }

    #[test]
    fn copies_are_never_torn() {
        const ROW_BYTES: usize = 32 << 10;
        let table = Table::new(Table::least_bytes(ROW_BYTES), ROW_BYTES, 1000).unwrap();
        let together = std::sync::Barrier::new(3);
        std::thread::scope(|scope| {
            for thread in 0..3_u64 {
                let (table, together) = (&table, &together);
                scope.spawn(move || {
                    let mut found = vec![0; ROW_BYTES];
                    together.wait();
                    for step in 0..30_000_u64 {
                        let row = step * (7 + 2 * thread) % 16; // all of them, in different orders
                        if table.copy_row(row, &mut found) {
                            assert!(found.iter().all(|&byte| u64::from(byte) == row));
                        } else {
                            table.insert(row, &[row as u8; ROW_BYTES], table.epoch(), true);
                        }
                    }
                });
            }
        });
        assert_eq!(table.resident(), 8);
    }
}
