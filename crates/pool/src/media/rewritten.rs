//! Regions of a file that are written densely, and again and again: writing them by stores to a
//! mapping takes a fraction of a system call, and no lock of the file, for which the writers of all
//! processes would wait.
//!
//! A store to a mapping has costs that a write does not have, so most bytes are written by calls:
//!
//! | cost of a store | why it is small here |
//! |---|---|
//! | a page that is not cached is read | a region is prepared only if all of it is cached, and the kernel tells this user so; dirty pages mostly stay cached for [`RECENT_SECONDS`] |
//! | the first one to a page, after each write-back, is a fault of some microseconds | the region is prepared by one call, which takes a quarter of a microsecond a page; nothing is known any more of a region that was written back |
//! | it makes the whole folio dirty: a sync may write 2 MiB instead of 4 KiB | half of the region was written before, or all of the one in front of it |
//!
//! A region is prepared when a page of it is written again after half of its pages were, or if it is
//! being written from its beginning, in small pieces, behind one that was written completely.
//!
//! So what is written rarely, or synced each time, is always written by calls. And whatever this
//! says, stores and writes have the same effect: it is a hint, changed without locks, and a race
//! between two threads, or with another process that writes back, costs faults and nothing else.
//!
//! # Why a store may take the place of a write
//! * *Visible*: the mapping is of the page cache that `pread` and other processes read. What is
//!   stored before a record is published is visible to a process that sees the record.
//! * *Durable*: a page counts as changed from the fault, or the preparation, before its first store.
//!   Write-back takes away the permission to store before it copies the page, in all processes, so
//!   the next store is a fault, and the page counts as changed again. So each operation that makes a
//!   range durable covers what was stored to it, and reports if it was lost, as for writes. The
//!   kernel may write pages back at any time and in any order, whole sectors or parts of the bytes
//!   being copied; that holds for writes as well, and the checksums of the log and its rules assume
//!   no more.
//! * *Other bytes* of a prepared region count as changed and are written back as they are, which
//!   changes nothing on the media.
//! * *Failures*: a store that cannot be made (the file was cut short, its disk is full or fails, its
//!   server is gone, another thread's failed read has a page of zeros in its place) reports that
//!   ([`FileMapping::write`](aquifer_vm::file_mapping::FileMapping::write)), and the bytes are
//!   written by a call, which returns the system's error. Where a failed store would end the
//!   process instead, no region is prepared: on other CPUs, in a thread that blocks SIGBUS, and
//!   where the program has put a handler of its own before ours; nor where pages are larger than
//!   4 KiB, media were opened for reading, or write windows guard them. A thread that blocks SIGBUS
//!   and stores to a region that another thread has prepared is killed by such a store, as by a load
//!   from a view.
//! * *Waiting*: to prepare a region may wait for the media, as a write may. So records that are
//!   written with the metadata mutex held are always written by calls.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::ByteRange;
use crate::format::PAGE_BYTES;

/// Pages of a region: as many as the largest folio has.
const REGION_PAGES: u64 = 512;
const REGION_BYTES: u64 = REGION_PAGES * PAGE_BYTES;
/// A region is prepared when this many of its pages were written.
const MANY_PAGES: u64 = REGION_PAGES / 2;
/// With larger pieces, writes are as fast as stores.
const MOST_PIECE_BYTES: u64 = 16 << 10;
/// Regions that are remembered: 8 GiB of the file, in 320 KiB of memory.
const REGIONS: usize = 4096;
/// The kernel writes dirty pages back, and may then evict them, after 30 seconds.
const RECENT_SECONDS: u64 = 30;

/// The count of a region that is prepared for stores.
const PREPARED: u64 = u64::MAX;
/// The count of a region that could not be prepared.
const REFUSED: u64 = u64::MAX - 1;

/// What was written to 2 MiB of the file.
#[derive(Debug, Default)]
struct Region {
    /// Its number and one more than when this began, in units of [`RECENT_SECONDS`]; 0: none.
    head: AtomicU64,
    /// How many pages were written; or one of the two constants.
    count: AtomicU64,
    /// A bit for each page that was written.
    pages: [AtomicU64; (REGION_PAGES / 64) as usize],
}

impl Region {
    fn begin(&self, head: u64) {
        self.pages.iter().for_each(|word| word.store(0, Relaxed));
        self.count.store(0, Relaxed);
        self.head.store(head, Relaxed);
    }

    /// Adds pages that are being written; returns whether all of them were there, among many.
    fn add(&self, first_page: u64, end_page: u64) -> bool {
        let mut added = 0;
        for (index, word) in (0..).zip(&self.pages) {
            let (from, to) = (first_page.max(index * 64), end_page.min(index * 64 + 64));
            if from >= to {
                continue;
            }
            let bits = (u64::MAX >> (64 - (to - from))) << (from % 64);
            let before = word.load(Relaxed);
            if before & bits != bits {
                added += u64::from((bits & !before).count_ones());
                word.store(before | bits, Relaxed);
            }
        }
        let before = self.count.load(Relaxed);
        // Another thread may have prepared it, or failed to.
        if before >= REFUSED {
            return false;
        }
        if added > 0 {
            self.count.store(before + added, Relaxed);
        }
        added == 0 && before >= MANY_PAGES
    }
}

/// How to write a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// By calls.
    Write,
    /// By stores.
    Store,
    /// By stores if this region can be prepared for them: [`Rewritten::note_prepared`].
    Prepare(ByteRange),
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Rewritten {
    regions: OnceLock<Box<[Region]>>,
}

impl Rewritten {
    fn region(&self, number: u64) -> &Region {
        let make = || (0..REGIONS).map(|_| Region::default()).collect();
        &self.regions.get_or_init(make)[number as usize % REGIONS]
    }

    /// Notes that a range is being written. Returns how.
    pub fn note(&self, range: ByteRange, now_seconds: u64) -> How {
        let first = range.offset_bytes / REGION_BYTES;
        let end = range.end_bytes().div_ceil(REGION_BYTES);
        let mut how = How::Write;
        for number in first..end {
            how = self.note_region(number, range, now_seconds / RECENT_SECONDS + 1);
        }
        if end - first == 1 && range.len_bytes <= MOST_PIECE_BYTES { how } else { How::Write }
    }

    fn note_region(&self, number: u64, range: ByteRange, time: u64) -> How {
        let region = self.region(number);
        let all = ByteRange { offset_bytes: number * REGION_BYTES, len_bytes: REGION_BYTES };
        let head = |number: u64| number << 32 | time & 0xffff_ffff;
        let mut is_next = false;
        if region.head.load(Relaxed) != head(number) {
            region.begin(head(number));
            is_next = range.offset_bytes == all.offset_bytes && number > 0 && {
                let before = self.region(number - 1);
                let (head_before, count) = (before.head.load(Relaxed), before.count.load(Relaxed));
                head_before == head(number - 1) && count >= REGION_PAGES && count != REFUSED
            };
        }
        match region.count.load(Relaxed) {
            PREPARED => How::Store,
            REFUSED => How::Write,
            _ => {
                let part = all.intersection(range);
                let first_page = (part.offset_bytes - all.offset_bytes) / PAGE_BYTES;
                let end_page = (part.end_bytes() - all.offset_bytes).div_ceil(PAGE_BYTES);
                let is_rewritten = region.add(first_page, end_page);
                if is_rewritten || is_next { How::Prepare(all) } else { How::Write }
            }
        }
    }

    /// Notes whether a region was prepared for stores.
    pub fn note_prepared(&self, region: ByteRange, is_prepared: bool) {
        let count = if is_prepared { PREPARED } else { REFUSED };
        self.region(region.offset_bytes / REGION_BYTES).count.store(count, Relaxed);
    }

    /// Notes that a range is being written back.
    pub fn forget(&self, range: ByteRange) {
        let Some(regions) = self.regions.get() else { return };
        let first = range.offset_bytes / REGION_BYTES;
        let count = range.end_bytes().div_ceil(REGION_BYTES) - first;
        for index in 0..count.min(REGIONS as u64) {
            regions[(first + index) as usize % REGIONS].head.store(0, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(first: u64, pages: u64) -> ByteRange {
        ByteRange { offset_bytes: first * PAGE_BYTES, len_bytes: pages * PAGE_BYTES }
    }

    const FIRST: How = How::Prepare(ByteRange { offset_bytes: 0, len_bytes: REGION_BYTES });
    const SECOND: ByteRange = ByteRange { offset_bytes: REGION_BYTES, len_bytes: REGION_BYTES };

    #[test]
    fn a_region_is_prepared_once_half_of_it_was_written() {
        let rewritten = Rewritten::default();
        for page in (0..REGION_PAGES).step_by(2) {
            assert_eq!(rewritten.note(pages(page, 1), 7), How::Write, "the first time");
            let is_enough = page == REGION_PAGES - 2;
            let expected = if is_enough { FIRST } else { How::Write };
            assert_eq!(rewritten.note(pages(page, 1), 8), expected, "page {page}");
        }
        assert_eq!(rewritten.note(ByteRange { offset_bytes: 5, len_bytes: 7 }, 9), FIRST);
        assert_eq!(rewritten.note(pages(0, 2), 9), How::Write, "the second was not written");
        assert_eq!(rewritten.note(pages(0, 2), 9), FIRST);
        rewritten.note_prepared(pages(0, REGION_PAGES), true);
        assert_eq!(rewritten.note(pages(1, 4), 9), How::Store);
        assert_eq!(rewritten.note(pages(1, 5), 9), How::Write, "a large piece");
        assert_eq!(rewritten.note(pages(REGION_PAGES - 1, 2), 9), How::Write, "two regions");
        assert_eq!(rewritten.note(pages(0, 0), 9), How::Write);
        rewritten.note_prepared(pages(0, REGION_PAGES), false);
        assert_eq!(rewritten.note(pages(1, 4), 9), How::Write);
    }

    #[test]
    fn a_region_that_another_thread_could_not_prepare_stays_refused() {
        let region = Region::default();
        for count in [REFUSED, PREPARED] {
            region.count.store(count, Relaxed);
            assert!(!region.add(3, 4));
            assert_eq!(region.count.load(Relaxed), count);
        }
    }

    #[test]
    fn the_next_region_of_a_sequence_is_prepared() {
        let rewritten = Rewritten::default();
        let note = |first, count| rewritten.note(pages(first, count), 1);
        (0..REGION_PAGES).for_each(|page| assert_eq!(note(page, 1), How::Write));
        assert_eq!(note(REGION_PAGES, 2), How::Prepare(SECOND));
        assert_eq!(note(REGION_PAGES + 2, 1), How::Write, "not yet");
        rewritten.note_prepared(SECOND, true);
        assert_eq!(note(REGION_PAGES + 3, 1), How::Store);
        let third = pages(2 * REGION_PAGES, REGION_PAGES);
        assert_eq!(note(2 * REGION_PAGES, 1), How::Prepare(third));
        rewritten.note_prepared(third, false);
        assert_eq!(note(3 * REGION_PAGES, 1), How::Write, "the one before could not be prepared");
        // Nothing is known of what was written back.
        rewritten.forget(SECOND);
        rewritten.forget(third);
        assert_eq!(note(2 * REGION_PAGES, 1), How::Write);
    }

    #[test]
    fn what_was_written_back_or_long_ago_is_unknown() {
        let rewritten = Rewritten::default();
        rewritten.forget(pages(0, 1));
        let written = pages(REGION_PAGES - 300, 600);
        let note = |page, seconds| rewritten.note(pages(page, 1), seconds);
        assert_eq!(rewritten.note(written, 0), How::Write);
        assert_eq!(note(REGION_PAGES - 1, RECENT_SECONDS - 1), FIRST);
        assert_eq!(note(REGION_PAGES + 1, 0), How::Prepare(SECOND));
        rewritten.forget(pages(REGION_PAGES, 1));
        assert_eq!(note(REGION_PAGES - 1, 1), FIRST);
        assert_eq!(note(REGION_PAGES + 1, 1), How::Write);
        assert_eq!(note(REGION_PAGES - 1, RECENT_SECONDS), How::Write);
        // Of another region in the same place, nothing is known.
        rewritten.note(pages(0, 300), 1);
        assert_eq!(note(1, 1), FIRST);
        assert_eq!(note(REGION_PAGES * REGIONS as u64 + 1, 1), How::Write);
        assert_eq!(note(1, 1), How::Write);
        rewritten.note(pages(0, 300), 1);
        rewritten.forget(pages(0, u64::MAX / PAGE_BYTES));
        assert_eq!(note(1, 1), How::Write);
    }
}
