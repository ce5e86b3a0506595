//! Commits that are too large for the log.
//!
//! The pages are written to a run of the pool that belongs to the object, its *shadow run*, and
//! made durable there. The record only names them, with checksums. The log then needs room only for
//! a few entries, and the commit is as atomic as any other.
//!
//! ```text
//!   reserve and name the shadow run ── write pages there ── durable ── record ── applied ── tail passes the record
//!          (one transaction)                                                                 │
//!                                            the next large commit may write there from here ┘
//! ```
//!
//! Replay reads the run as long as the record is behind the durable tail. The run is therefore
//! overwritten only after the tail has passed the last record that names it, which a checkpoint
//! ensures. The run is freed on detach; the next attach after a crash reuses or frees the run it
//! finds.
//!
//! # Entries
//! A record has room for a limited number of ranges. A more scattered set of pages is joined over
//! its smallest gaps, and the clean pages in the gaps are written too, with their current content.
//! That is the content of the last commit unless another thread stores to them concurrently, so
//! their bases are forgotten along with the others.

use aquifer_pool::format::record::ENTRY_BYTES;
use aquifer_pool::format::run::{MAX_RUN_PAGES, Run};
use aquifer_pool::format::{Checksum, PAGE_BYTES};
use aquifer_pool::media::ByteRange;
use aquifer_pool::{CommitCopied, Pool, PoolError, Transaction};
use aquifer_sys::memory::copy_racy;
use aquifer_vm::dirty::PageRun;

use crate::error::{ObjectError, Result};
use crate::memory::Object;

/// The shadow run of an attached object.
pub(crate) struct Shadow {
    run: Run,
    /// The end of the last record that may name it; `u64::MAX` if unknown.
    last_lsn: u64,
}

impl Shadow {
    /// The run found at attach.
    pub fn found(run: Run) -> Shadow {
        Shadow { run, last_lsn: if run.is_empty() { 0 } else { u64::MAX } }
    }

    /// Notes the end of a record that names the run.
    pub fn named_by(&mut self, end_lsn: u64) {
        self.last_lsn = end_lsn;
    }

    /// Makes sure that at least `pages` pages may be overwritten.
    fn make_room(&mut self, object: &Object, pages: u64) -> Result<()> {
        let pool = &object.shared.pool;
        if self.run.pages < pages {
            return self.replace(object, pages);
        }
        if self.last_lsn > pool.tail_lsn() {
            pool.checkpoint()?;
            self.last_lsn = 0;
        }
        Ok(())
    }

    fn replace(&mut self, object: &Object, pages: u64) -> Result<()> {
        let no_room =
            |source| ObjectError::NoRoomForShadow { len_bytes: pages * PAGE_BYTES, source };
        if pages > MAX_RUN_PAGES {
            return Err(no_room(PoolError::Parameter {
                what: "a single commit",
                value: format!("{pages} pages"),
                reason: "it has at most 2^24 - 1 pages",
            }));
        }
        let pool = &object.shared.pool;
        let reservation = pool.reserve(pages, 1).map_err(|error| match error {
            full @ PoolError::Full { .. } => no_room(full),
            other => other.into(),
        })?;
        let run = reservation.whole();
        // If the transaction fails, it is unknown which run the object has: the next large commit
        // then allocates another.
        *self = Shadow::found(Run::EMPTY);
        let change = |transaction: &mut Transaction<'_>| {
            let mut inode = transaction.inode(object.number)?;
            inode.shadow = run;
            transaction.put(inode);
            Ok(())
        };
        // SAFETY: the object's write lock is held, and its content stays.
        unsafe { pool.transact(vec![reservation], change)? };
        // No record names it yet.
        *self = Shadow { run, last_lsn: 0 };
        Ok(())
    }

    /// Frees the run; durable on return.
    pub fn free(&mut self, pool: &Pool, number: u64) -> Result<()> {
        if self.run.is_empty() {
            return Ok(());
        }
        let change = |transaction: &mut Transaction<'_>| {
            let mut inode = transaction.inode(number)?;
            inode.shadow = Run::EMPTY;
            transaction.put(inode);
            Ok(())
        };
        // SAFETY: the object's write lock is held, and its content stays.
        unsafe { pool.transact(Vec::new(), change)? };
        *self = Shadow::found(Run::EMPTY);
        Ok(())
    }

    /// Writes pages of an object to its shadow run and makes them durable there. Adds at most
    /// `most_entries` entries for the record to `copied`. Returns all pages written, including
    /// those in the gaps.
    pub fn put_aside(
        &mut self,
        object: &Object,
        captured: &[PageRun],
        most_entries: usize,
        copied: &mut Vec<CommitCopied>,
    ) -> Result<Vec<PageRun>> {
        const PIECE_BYTES: u64 = 1 << 20;
        let runs = join(captured, most_entries);
        let pages = runs.iter().map(|run| run.count).sum();
        self.make_room(object, pages)?;
        let media = object.shared.pool.media();
        let mut buffer = vec![0; PIECE_BYTES.min(pages * PAGE_BYTES) as usize];
        let start = self.run.bytes().offset_bytes;
        let mut offset = start;
        for &run in &runs {
            let source_offset_bytes = offset;
            let len_bytes = run.count * PAGE_BYTES;
            let mut sum = Checksum::new();
            for done in (0..len_bytes).step_by(PIECE_BYTES as usize) {
                let piece = &mut buffer[..PIECE_BYTES.min(len_bytes - done) as usize];
                let source = object.page(run.first).wrapping_add(done as usize);
                // SAFETY: inside the mapping; the piece has the same length.
                unsafe { copy_racy(source, piece.as_mut_ptr(), piece.len()) };
                sum.update(piece);
                // SAFETY: the shadow run belongs to this object, and no memory is mapped from it.
                unsafe { media.write_at(offset, piece) }.map_err(PoolError::from)?;
                offset += piece.len() as u64;
            }
            copied.push(CommitCopied {
                inode: object.number,
                target: object.on_media(run),
                source_offset_bytes,
                checksum: sum.finish(),
            });
        }
        let written = ByteRange { offset_bytes: start, len_bytes: offset - start };
        object.shared.pool.make_durable(&[written])?;
        Ok(runs)
    }
}

/// Selects which captured sets go to their shadow runs, largest first, so that the others fit into
/// `most_bytes`.
pub(crate) fn too_large(sizes_bytes: &[u64], most_bytes: u64) -> Vec<bool> {
    let mut order: Vec<usize> = (0..sizes_bytes.len()).collect();
    order.sort_unstable_by_key(|index| std::cmp::Reverse(sizes_bytes[*index]));
    let mut rest: u64 = sizes_bytes.iter().sum();
    let mut is_aside = vec![false; sizes_bytes.len()];
    for index in order {
        if rest <= most_bytes {
            break;
        }
        is_aside[index] = true;
        rest -= sizes_bytes[index];
    }
    is_aside
}

/// The most shadow-run entries that a record may have for each of `objects`: together an eighth of
/// the log.
pub(crate) fn most_entries(pool: &Pool, objects: usize) -> usize {
    let room = pool.layout().log().len_bytes as usize / 8 / ENTRY_BYTES;
    (room / objects.max(1)).max(1)
}

/// Joins sorted runs over their smallest gaps until there are at most `most`.
fn join(runs: &[PageRun], most: usize) -> Vec<PageRun> {
    if runs.len() <= most {
        return runs.to_vec();
    }
    let mut gaps: Vec<(u64, usize)> =
        (1..runs.len()).map(|i| (runs[i].first.0 - runs[i - 1].end().0, i)).collect();
    // Keep the largest gaps.
    gaps.sort_unstable_by_key(|gap| std::cmp::Reverse(*gap));
    let mut starts: Vec<usize> = gaps[..most - 1].iter().map(|(_, index)| *index).collect();
    starts.push(0);
    starts.sort_unstable();
    let ends = starts[1..].iter().copied().chain([runs.len()]);
    (starts.iter().zip(ends))
        .map(|(&start, end)| PageRun::new(runs[start].first.0..runs[end - 1].end().0))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use aquifer_crashkit::{CrashMedia, Trigger};
    use aquifer_pool::media::{Media, MediaOperation, PersistenceDomain};
    use aquifer_pool::{Pool, PoolOptions};
    use aquifer_vm::dirty::{PageIndex, Stores};

    use super::*;
    use crate::access::Access;
    use crate::attach::Attached;
    use crate::psync::psync;
    use crate::psync::tests::PANICS;
    use crate::{ObjectOptions, Objects};

    #[test]
    fn the_largest_sets_go_aside() {
        assert_eq!(too_large(&[3, 9, 4], 16), [false; 3]);
        assert_eq!(too_large(&[3, 9, 4], 15), [false, true, false]);
        assert_eq!(too_large(&[3, 9, 4], 6), [false, true, true]);
        assert_eq!(too_large(&[3, 9, 4], 0), [true; 3]);
        assert_eq!(too_large(&[], 0), []);
    }

    #[test]
    fn runs_are_joined_over_the_smallest_gaps() {
        let runs: Vec<PageRun> = [0..1, 3..4, 5..6, 20..22, 23..24].map(PageRun::new).to_vec();
        let joined = |most| -> Vec<_> {
            join(&runs, most).iter().map(|run| (run.first.0, run.end().0)).collect()
        };
        assert_eq!(joined(5), [(0, 1), (3, 4), (5, 6), (20, 22), (23, 24)]);
        assert_eq!(joined(3).len(), 3);
        assert_eq!(joined(2), [(0, 6), (20, 24)]);
        assert_eq!(joined(1), [(0, 24)]);
        for most in 1..6 {
            let all = joined(most);
            assert!(all.windows(2).all(|w| w[0].1 < w[1].0));
            assert!(runs.iter().all(|run| {
                all.iter().any(|(start, end)| *start <= run.first.0 && run.end().0 <= *end)
            }));
        }
    }

    fn attached(pages: u64) -> (Arc<CrashMedia>, Objects, Attached) {
        let media = Arc::new(CrashMedia::new(16 << 20, PersistenceDomain::PageCache).unwrap());
        let pool = alone().log_bytes(64 << 10).create_on(media.clone()).unwrap();
        let objects = Objects::new(pool);
        objects.create("a", pages * PAGE_BYTES).unwrap();
        let options = ObjectOptions::new();
        let attached = Attached::attach(&objects.shared, b"a", Access::Write, &options).unwrap();
        (media, objects, attached)
    }

    fn alone() -> PoolOptions {
        Pool::options().exclusive(true).background(false)
    }

    fn fill(attached: &Attached, page: u64, value: u8, len_bytes: usize) {
        let page = attached.object.page(PageIndex(page)).cast_mut();
        // SAFETY: inside the mapping of an object that is attached for writing.
        unsafe { page.write_bytes(value, len_bytes) };
    }

    #[test]
    fn a_run_that_could_not_be_replaced_is_still_named() {
        let (_media, objects, attached) = attached(100);
        (0..100).for_each(|page| fill(&attached, page, 1, 4096));
        psync(&[&attached], Stores::Excluded).unwrap();
        let mut held = attached.held();
        let shadow = &mut held.as_mut().unwrap().writing.as_mut().unwrap().shadow;
        let last_lsn = shadow.last_lsn;
        assert!(last_lsn > objects.pool().tail_lsn());
        shadow.make_room(&attached.object, MAX_RUN_PAGES + 1).unwrap_err();
        assert_eq!(shadow.last_lsn, last_lsn);
    }

    /// The record of a psync that panicked may count, so the next commit must not be relative to
    /// the content before it.
    #[test]
    fn a_psync_that_panicked_leaves_no_bases_behind() {
        let (media, objects, attached) = attached(4);
        let psync = || psync(&[&attached], Stores::Excluded);
        for value in [3, 1] {
            fill(&attached, 0, value, 8);
            psync().unwrap();
        }
        fill(&attached, 0, 2, 8);
        PANICS.set(true);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(psync)).unwrap_err();
        PANICS.set(false);
        fill(&attached, 0, 1, 8);
        psync().unwrap();
        let crashed = CrashMedia::from_image(&media.image(), media.domain()).unwrap();
        attached.detach().unwrap();
        drop(objects);
        let objects = Objects::new(alone().open_on(Arc::new(crashed)).unwrap());
        let survivor = objects.attach("a").unwrap();
        assert_eq!(survivor.as_slice().unwrap()[..8], [1; 8]);
    }

    /// Unreachable memory may be stored to concurrently, and become reachable later.
    #[test]
    fn clean_pages_that_were_put_aside_are_compared_with_what_was_put_there() {
        const CLEAN: u64 = 1;
        let (media, objects, attached) = attached(900);
        fill(&attached, CLEAN, 1, 8);
        psync(&[&attached], Stores::Excluded).unwrap();
        (0..900).step_by(2).for_each(|page| fill(&attached, page, 1, 4096));
        // The transaction that gives the object its shadow run.
        let log = objects.pool().layout().log();
        let gate = media.hold(Trigger::on(MediaOperation::WriteDurable).within(log));
        std::thread::scope(|scope| {
            let committing = scope.spawn(|| psync(&[&attached], Stores::InProgress));
            gate.wait_until_reached();
            fill(&attached, CLEAN, 2, 8);
            gate.open();
            committing.join().unwrap().unwrap();
        });
        fill(&attached, CLEAN, 1, 8);
        psync(&[&attached], Stores::Excluded).unwrap();
        let crashed = CrashMedia::from_image(&media.image(), media.domain()).unwrap();
        attached.detach().unwrap();
        let objects = Objects::new(alone().open_on(Arc::new(crashed)).unwrap());
        let survivor = objects.attach("a").unwrap();
        assert_eq!(survivor.as_slice().unwrap()[CLEAN as usize * 4096..][..8], [1; 8]);
    }
}
