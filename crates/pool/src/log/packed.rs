//! Packed records: changes that are visible to all processes at once, and made durable on demand.
//!
//! ```text
//!     one append, PACKED                            page boundary
//!  ───┬──────────┬──────────┬─────────┬─────────────┬───
//!     │ record   │ record   │ record  │ close       │ next append
//!  ───┴──────────┴──────────┴─────────┴─────────────┴───
//!                                     ▲ not there yet while more records may follow
//! ```
//!
//! The module [`log`](crate::log::locks) describes how they become durable. These are the steps; a process
//! may die in each:
//!
//! | step | with the metadata mutex | a death after it leaves |
//! |---|---|---|
//! | the record is written behind the end | yes | bytes that do not count: the next holder erases them durably, so that they never will |
//! | the end is moved | yes | a record that counts and is not applied: [`Locked::repair_packed`] |
//! | the close is written, the end is moved | yes | an append that nothing may follow: the next holder abandons it, and a process that needs it adopts it |
//! | the append is adopted | yes | an append whose owner is dead: the next process adopts it |
//! | exposed bytes are flushed (but for those freed again by then), the mark is set, all of it is durable | no | the same; each of these can be repeated |
//!
//! There is always room for a close behind a packed record, in its page or including the next one,
//! and before the end of the ring: an append never crosses that.

use std::sync::atomic::Ordering::Relaxed;

use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::format::record::{HEADER_BYTES, MIN_CLOSE_BYTES, close_start};
use crate::format::run::Run;
use crate::log::append::Append;
use crate::log::locks::{Locked, Log};
use crate::media::{ByteRange, PersistenceDomain};
use crate::mutant::{self, Mutant};
use crate::point;
use crate::shared::appends::append;
use crate::shared::failure::FailureKind;
use crate::shared::handle::Handle;
use crate::shared::heartbeat::Held;

/// How much of a packed append is written at a time.
const CHUNK_BYTES: u64 = 4 << 20;
/// The longest packed append; beyond it a new one begins, which bounds the time to make one
/// durable.
const MAX_PACKED_BYTES: u64 = 16 << 20;

/// The place of a packed record.
pub(crate) struct PackedPlace {
    index: u64,
    pub lsn: u64,
    pub acknowledged_lsn: u64,
}

impl Locked<'_> {
    /// The space before the end of the ring.
    fn to_end_of_ring(&self, lsn: u64) -> u64 {
        let log_bytes = self.handle().layout.log().len_bytes;
        log_bytes - lsn % log_bytes
    }

    /// Returns a place for a packed record of `len_bytes`; `None` if the log has no room for it
    /// now.
    pub fn place_packed(&self, len_bytes: u64) -> Result<Option<PackedPlace>> {
        // Including a close before it and one behind it, each up to a page boundary.
        if !self.has_room(len_bytes + 4 * PAGE_BYTES) || !self.control().appends.has_entries(4) {
            return Ok(None);
        }
        let is_full = |lsn, end_lsn| {
            let left = self.to_end_of_ring(end_lsn);
            end_lsn - lsn + len_bytes > MAX_PACKED_BYTES || len_bytes + MIN_CLOSE_BYTES > left
        };
        let acknowledged_lsn = self.control().appends.durable_lsn.load(Relaxed);
        if let Some((index, end_lsn)) = self.control().appends.open_packed() {
            if !is_full(self.control().appends.entry(index).lsn.load(Relaxed), end_lsn) {
                return Ok(Some(PackedPlace { index, lsn: end_lsn, acknowledged_lsn }));
            }
            self.close_packed()?;
        }
        let mut lsn = self.control().appends.head_lsn();
        if is_full(lsn, lsn) {
            // The rest of the ring becomes an append with only a close.
            self.begin_packed(lsn);
            self.write_close(self.to_end_of_ring(lsn))?;
            lsn = self.control().appends.head_lsn();
        }
        Ok(Some(PackedPlace { index: self.begin_packed(lsn), lsn, acknowledged_lsn }))
    }

    fn begin_packed(&self, lsn: u64) -> u64 {
        self.push_pending(lsn, lsn, append::PACKED, true, append::NOTHING)
    }

    /// Writes a packed record, which then counts for all processes.
    pub fn publish_packed(&self, place: &PackedPlace, record: &[u8], exposes: bool) -> Result<()> {
        self.store_packed(place.lsn, record)?;
        if exposes {
            // Before the end is moved, so that no counted record's exposure is missed.
            self.control().appends.entry(place.index).exposes.store(1, Relaxed);
        }
        point::pass("packed-written");
        let end_lsn = place.lsn + record.len() as u64;
        let has_note = self.control().noting.publishing(end_lsn);
        self.control().appends.extend_packed(place.index, end_lsn);
        point::pass("packed-published");
        if has_note {
            self.control().noting.published();
        }
        Ok(())
    }

    /// Writes bytes behind the end of the records that count.
    fn store_packed(&self, lsn: u64, bytes: &[u8]) -> Result<()> {
        let end_lsn = lsn + bytes.len() as u64;
        let begins_page = end_lsn > lsn.next_multiple_of(PAGE_BYTES);
        let mut whole_pages = Vec::new();
        if begins_page && self.handle().media.domain() == PersistenceDomain::PageCache {
            // Padded with zeros to the end of the page: writing a part of an uncached page would
            // make the kernel read the rest first.
            whole_pages.extend_from_slice(bytes);
            whole_pages.resize((end_lsn.next_multiple_of(PAGE_BYTES) - lsn) as usize, 0);
        }
        let bytes = if whole_pages.is_empty() { bytes } else { &whole_pages };
        let position = self.handle().log_position(lsn);
        // In the page cache by a call: a store may first prepare 2 MiB, and the mutex is held.
        // SAFETY: only the log writes to its own pages, and no reference to them is ever made.
        let write = || unsafe { self.handle().media.store_small(position, bytes) };
        // A failed write may have written everything. If the record then counts, it is harmless
        // only because the pool has failed.
        write().or_else(|_| write()).map_err(|error| {
            self.handle().fail_at_media(FailureKind::Log, &error.source);
            error.into()
        })
    }

    /// Closes the open packed append, if there is one: the next append begins at a page boundary.
    pub fn close_packed(&self) -> Result<()> {
        let Some((index, end_lsn)) = self.control().appends.open_packed() else { return Ok(()) };
        if self.control().appends.entry(index).lsn.load(Relaxed) == end_lsn {
            // No record was added since it was begun.
            self.control().appends.take_back(index);
            return Ok(());
        }
        let in_page = PAGE_BYTES - end_lsn % PAGE_BYTES;
        self.write_close(if in_page >= MIN_CLOSE_BYTES { in_page } else { in_page + PAGE_BYTES })
    }

    fn write_close(&self, len_bytes: u64) -> Result<()> {
        let (index, lsn) =
            self.control().appends.open_packed().expect("the caller has looked, or begun one");
        let acknowledged_lsn = self.control().appends.durable_lsn.load(Relaxed);
        let close = close_start(lsn, len_bytes, acknowledged_lsn, self.handle().identity());
        self.store_packed(lsn, &close)?;
        let end_lsn = lsn + len_bytes;
        self.control().appends.entry(index).close_lsn.store(lsn, Relaxed);
        self.control().appends.extend_packed(index, end_lsn);
        point::pass("packed-closed");
        // Before `note_applied`: the repair after a death here finds the close by the applied
        // position.
        self.control().appends.give_up(index);
        // Everything before it is applied, or the mutex could not be held.
        self.control().appends.note_applied(end_lsn);
        Ok(())
    }

    /// Completes what a dead process was doing to packed records: applies a record that it had
    /// published and not applied, and abandons an append that it had closed.
    pub fn repair_packed(&self, index: u64) -> Result<()> {
        let (control, pending) = (self.control(), self.control().appends.entry(index));
        let end_lsn = pending.end_lsn.load(Relaxed);
        let mut lsn = pending.lsn.load(Relaxed).max(control.appends.metadata_lsn.load(Relaxed));
        let mut is_closed = false;
        while lsn < end_lsn {
            let record = self.log().read_counted(lsn)?;
            self.log().metadata.apply(self, &record);
            is_closed = record.header.is_close;
            lsn = record.header.end_lsn();
        }
        if pending.state.load(Relaxed) != append::PACKED {
            return Ok(());
        }
        if is_closed {
            control.appends.give_up(index);
            return Ok(());
        }
        // What it had written behind the end and not published has not happened, for every later
        // reader of the state. It names pages that are free now: if a recovery after the death of
        // all processes counted it, it would show what the pages are used for next. Erase it
        // durably before anything else is written there: a sector that the next record shares with
        // it, or that the kernel writes back later than those around it, could have the old bytes
        // after a power cut, and a record that is as long as the next one would count in its place.
        let erased = [0; HEADER_BYTES];
        if mutant::is(self.handle().mutant, Mutant::EraseUnsaid) {
            // SAFETY: only the log writes to its own pages, and no reference to them is ever made.
            unsafe { self.handle().media.store(self.handle().log_position(end_lsn), &erased)? };
            return Ok(());
        }
        self.log().write_log(end_lsn, &erased)
    }
}

impl Log {
    /// Closes the open packed append, so that everything up to the returned position can become
    /// durable.
    pub fn close_log(&self) -> Result<u64> {
        let locked = self.lock()?;
        locked.close_packed()?;
        Ok(locked.control().appends.head_lsn())
    }

    /// Makes a packed append durable, which must be closed and owned by this process.
    pub fn harden(&self, mut append: Append) -> Result<()> {
        let pending = self.control().appends.entry(append.index);
        let mut exposed = Vec::new();
        let mut lsn = append.lsn;
        // Volatile media never write anything back, so the exposed ranges are not needed.
        let asks = pending.exposes.load(Relaxed) != 0
            && self.handle.media.domain() != PersistenceDomain::Volatile;
        while asks && lsn < append.end_lsn {
            let record = self.read_counted(lsn)?;
            exposed.extend(record.exposed());
            lsn = record.header.end_lsn();
        }
        if !exposed.is_empty() {
            // All of these records count, or none that exposes anything: only the mark makes them
            // count, and it lies behind them. So what one of them exposes and another one frees
            // has no name in any state that a crash can leave, and need not be durable.
            let locked = self.lock()?;
            let freed = self.metadata.freed_between(&locked, append.lsn, append.end_lsn);
            drop(locked);
            exposed = outside(exposed, freed);
        }
        let close = self.read_counted(pending.close_lsn.load(Relaxed))?.header;
        // Relaxed: a hint for waiters.
        let note_progress = || _ = pending.progress.fetch_add(1, Relaxed);
        if !exposed.is_empty() && !mutant::is(self.handle.mutant, Mutant::CommitBeforeData) {
            self.make_durable_in_parts(exposed, note_progress)?;
        }
        point::pass("packed-flushed");
        let mark_position = self.handle.log_position(close.lsn) + HEADER_BYTES as u64;
        // SAFETY: only the log writes to its own pages, and no reference to them is ever made.
        unsafe { self.handle.media.store(mark_position, &close.close_mark())? };
        point::pass("packed-marked");
        self.write_packed(append.lsn, append.end_lsn, note_progress)?;
        self.complete(&mut append)
    }

    /// Whether [`Log::harden`] makes durable what was handed to the media before it.
    pub fn hardening_flushes(&self) -> bool {
        let media = &self.handle.media;
        // See `write_packed`.
        media.domain() != PersistenceDomain::PageCache || media.durable_writes_flush()
    }

    /// Makes this part of the log durable without changing it.
    fn write_packed(&self, lsn: u64, end_lsn: u64, note_progress: impl Fn()) -> Result<()> {
        let Handle { media, heartbeat, .. } = &*self.handle;
        let (position, len_bytes) = (self.handle.log_position(lsn), end_lsn - lsn);
        if media.domain() != PersistenceDomain::PageCache {
            let range = ByteRange { offset_bytes: position, len_bytes };
            let written = heartbeat.while_media_work(Held::Log, || {
                media.write_back(&[range]).and_then(|()| media.flush())
            });
            return Ok(written.inspect_err(|error| {
                self.handle.fail_at_media(FailureKind::Log, &error.source);
            })?);
        }
        let mut bytes = vec![0; CHUNK_BYTES.min(len_bytes) as usize];
        for done in (0..len_bytes).step_by(CHUNK_BYTES as usize) {
            let chunk = &mut bytes[..CHUNK_BYTES.min(len_bytes - done) as usize];
            media.read_at(position + done, chunk)?;
            self.write_log(lsn + done, chunk)?;
            note_progress();
        }
        Ok(())
    }
}

/// The parts of `ranges` that lie in none of `runs`.
fn outside(ranges: Vec<ByteRange>, mut runs: Vec<Run>) -> Vec<ByteRange> {
    if runs.is_empty() {
        return ranges;
    }
    runs.sort_unstable();
    let mut left = Vec::new();
    for range in ranges {
        let mut at_bytes = range.offset_bytes;
        let first = runs.partition_point(|run| run.bytes().end_bytes() <= at_bytes);
        for run in runs[first..].iter().map(|run| run.bytes()) {
            if run.offset_bytes >= range.end_bytes() {
                break;
            }
            if run.offset_bytes > at_bytes {
                let len_bytes = run.offset_bytes - at_bytes;
                left.push(ByteRange { offset_bytes: at_bytes, len_bytes });
            }
            at_bytes = at_bytes.max(run.end_bytes());
        }
        if at_bytes < range.end_bytes() {
            let len_bytes = range.end_bytes() - at_bytes;
            left.push(ByteRange { offset_bytes: at_bytes, len_bytes });
        }
    }
    left
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_lies_outside_of_runs_is_found() {
        let range = |offset_bytes, len_bytes| ByteRange { offset_bytes, len_bytes };
        let run = |start_page, pages| Run { start_page, pages };
        let page = 4096;
        let ranges = vec![range(8 * page, 4 * page), range(100, 50), range(2 * page + 7, 3 * page)];
        assert_eq!(outside(ranges.clone(), vec![]), ranges);
        let left = outside(ranges, vec![run(12, 3), run(9, 1), run(1, 2), run(4, 1)]);
        let expected = [
            range(8 * page, page),
            range(10 * page, 2 * page),
            range(100, 50),
            range(3 * page, page),
            range(5 * page, 7),
        ];
        assert_eq!(left, expected);
        assert_eq!(outside(vec![range(page, page)], vec![run(1, 1), run(0, 1)]), []);
    }
}
