//! The ghost queue: identifiers of recently evicted pages, without the pages.
//!
//! S3-FIFO's paper (section 4.2) makes the ghost queue a bucketed hash table of fingerprints with
//! the time of eviction; time is the number of insertions into the queue. An entry is in the queue
//! while fewer than `capacity` others were inserted after it. Nothing is dequeued; an expired entry
//! is simply overwritten. A bucket is one cache line, so remembering a page or looking one up costs
//! one cache miss. The table allocates only in `resize`.
//!
//! It is inexact in two harmless ways. A bucket has eight entries and holds two to four live ones
//! on average; in at most one of fifty buckets, which would need more, the oldest entry is
//! forgotten early. And two pages with the same bucket and 32-bit fingerprint are confused, about
//! once in a billion look-ups.

use crate::ids::PageKey;

const BUCKET_ENTRIES: usize = 8;

#[derive(Debug, Clone)]
#[repr(align(64))]
struct Bucket {
    /// 0 if there is no entry.
    fingerprints: [u32; BUCKET_ENTRIES],
    /// The value of `Ghost::insertions` when the entry was made.
    stamps: [u32; BUCKET_ENTRIES],
}

const EMPTY: Bucket = Bucket { fingerprints: [0; BUCKET_ENTRIES], stamps: [0; BUCKET_ENTRIES] };

const _: () = assert!(size_of::<Bucket>() == 64, "a bucket is one cache line");

#[derive(Debug, Default)]
pub(super) struct Ghost {
    buckets: Vec<Bucket>,
    capacity: u32,
    insertions: u32,
}

impl Ghost {
    /// Remembers the last `capacity` pages from now on. If the table has to change its size, it
    /// forgets all pages. The only operation that allocates.
    pub(super) fn resize(&mut self, capacity: usize) {
        self.resize_with_slack(capacity, 2);
    }

    /// As `resize`, with `slack` entries per page to remember. A large slack makes the queue exact.
    pub(super) fn resize_with_slack(&mut self, capacity: usize, slack: usize) {
        let capacity = capacity.max(1);
        self.capacity = u32::try_from(capacity).expect("there are fewer than 2^32 frames");
        let buckets = (capacity * slack).div_ceil(BUCKET_ENTRIES).next_power_of_two();
        // A table twice as large is kept: a budget that varies a little does not replace the table,
        // and so does not forget its pages, each time.
        if !(buckets..=2 * buckets).contains(&self.buckets.len()) {
            self.buckets = vec![EMPTY; buckets];
        }
    }

    /// Remembers `page`, which must not be remembered yet.
    pub(super) fn insert(&mut self, page: PageKey) {
        self.insertions = self.insertions.wrapping_add(1);
        let (now, (bucket, fingerprint)) = (self.insertions, self.locate(page));
        let bucket = &mut self.buckets[bucket];
        let (mut slot, mut slot_age) = (0, 0);
        for entry in 0..BUCKET_ENTRIES {
            let age = match bucket.fingerprints[entry] {
                0 => u32::MAX,
                _ => now.wrapping_sub(bucket.stamps[entry]),
            };
            if age > slot_age {
                (slot, slot_age) = (entry, age);
            }
        }
        bucket.fingerprints[slot] = fingerprint;
        bucket.stamps[slot] = now;
    }

    /// Forgets `page`. Returns how many pages were remembered after it, if it was.
    pub(super) fn take(&mut self, page: PageKey) -> Option<u32> {
        let (bucket, fingerprint) = self.locate(page);
        let bucket = &mut self.buckets[bucket];
        for entry in 0..BUCKET_ENTRIES {
            let age = self.insertions.wrapping_sub(bucket.stamps[entry]);
            if bucket.fingerprints[entry] == fingerprint && age < self.capacity {
                bucket.fingerprints[entry] = 0;
                return Some(age);
            }
        }
        None
    }

    /// The bucket and the fingerprint of `page`: disjoint parts of one 64-bit hash.
    fn locate(&self, page: PageKey) -> (usize, u32) {
        let hash = hash_of(page);
        let bucket = (hash >> 32) as usize & (self.buckets.len() - 1);
        (bucket, (hash as u32).max(1))
    }
}

/// 64 bits that depend on the page.
pub(super) fn hash_of(page: PageKey) -> u64 {
    let store = u64::from(page.store.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mix(page.page.0 ^ store)
}

/// SplitMix64's finalizer (G. Steele, D. Lea and C. Flood, OOPSLA 2014): each input bit affects
/// each output bit.
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{PageId, StoreId};

    fn page(page: u64) -> PageKey {
        PageKey { store: StoreId(0), page: PageId(page) }
    }

    #[test]
    fn remembers_the_last_pages_and_no_others() {
        let mut ghost = Ghost::default();
        ghost.resize_with_slack(100, 64);
        for number in 0..1000 {
            ghost.insert(page(number));
        }
        for number in 0..2000 {
            assert_eq!(
                ghost.take(page(number)).is_some(),
                (900..1000).contains(&number),
                "page {number}"
            );
        }
        assert!(ghost.take(page(950)).is_none(), "taken twice");
    }

    #[test]
    fn forgets_few_at_its_normal_size() {
        for capacity in [1000, 1024, 2048, 2049] {
            let mut ghost = Ghost::default();
            ghost.resize(capacity);
            let pages = 10 * capacity as u64;
            for number in 0..pages {
                ghost.insert(page(number));
            }
            let live = pages - capacity as u64..pages;
            let remembered = live.filter(|&number| ghost.take(page(number)).is_some()).count();
            assert!(remembered * 100 >= capacity * 98, "{remembered} of {capacity}");
        }
    }

    #[test]
    fn a_capacity_that_goes_up_and_down_keeps_what_is_remembered() {
        let mut ghost = Ghost::default();
        ghost.resize(2048 + 1);
        let (table, page) = (ghost.buckets.len(), page(7));
        ghost.insert(page);
        for capacity in [2048, 2049, 2048] {
            ghost.resize(capacity);
            assert_eq!(ghost.buckets.len(), table);
        }
        assert!(ghost.take(page).is_some());
        ghost.resize(512);
        assert!(ghost.buckets.len() < table, "a much smaller one gives memory back");
    }

    #[test]
    fn tells_devices_apart() {
        let mut ghost = Ghost::default();
        ghost.resize(1000);
        ghost.insert(page(7));
        assert!(ghost.take(PageKey { store: StoreId(1), page: PageId(7) }).is_none());
        assert!(ghost.take(page(7)).is_some());
    }

    #[test]
    fn time_may_wrap() {
        let mut ghost = Ghost { insertions: u32::MAX - 5, ..Ghost::default() };
        ghost.resize_with_slack(100, 64);
        for number in 0..50 {
            ghost.insert(page(number));
        }
        assert!((0..50).all(|number| ghost.take(page(number)).is_some()));
    }

    #[test]
    fn a_smaller_capacity_forgets_the_oldest() {
        let mut ghost = Ghost::default();
        ghost.resize_with_slack(100, 64);
        for number in 0..100 {
            ghost.insert(page(number));
        }
        ghost.resize_with_slack(90, 64);
        assert!(ghost.take(page(9)).is_none());
        assert!(ghost.take(page(10)).is_some());
    }
}
