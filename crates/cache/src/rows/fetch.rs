//! Reading the missing rows of a batch from the device, many transfers in flight.
//!
//! The misses are sorted by row. The device pulls transfers: each covers a row, and the next ones
//! too if the gap is small, in whole sectors (units of the device's alignment). When one completes,
//! its rows are inserted into the table and handed out from the transfer's memory, while others are
//! in flight.
//!
//! Of a transfer that failed and that covered several rows, each row is read again alone: an
//! unreadable sector fails the rows in it and no others.
//!
//! *Filling.* A transfer of up to a page takes as long as one of a sector. While the table has room,
//! a transfer that is shorter is widened to the page, and the other rows in it fill empty places.

use std::ops::Range;
use std::sync::atomic::Ordering;

use aquifer_device::{AlignedBuffer, Batch, Device, DeviceError, IoOperation, Request};

use super::layout::Layout;
use super::stats::Counters;
use super::table::{Epoch, Table};
use crate::error::{CacheError, Result};

/// Gaps up to this length are read rather than skipped.
const MOST_GAP_BYTES: u64 = 4096;
/// The length up to which a transfer costs no more than a sector's.
const PAGE_BYTES: u64 = 4096;
/// The longest transfer of several rows.
const MOST_RUN_BYTES: usize = 16 << 10;
/// Memory for the transfers of one call, if a row is no longer.
pub(super) const MOST_MEMORY_BYTES: usize = 4 << 20;

/// A row that the caller asked for and that is not in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Miss {
    pub row: u64,
    /// Its index in the caller's list.
    pub position: usize,
}

/// Memory for transfers, reused by later calls.
pub(super) struct Slots {
    buffer: AlignedBuffer,
    alignment_bytes: usize,
    slot_bytes: usize,
}

impl Slots {
    /// No memory, for rows of this layout.
    pub fn none(layout: &Layout) -> Slots {
        let slot_bytes = layout.span_bytes().max(MOST_RUN_BYTES);
        // At least a page, so that a short transfer does not straddle two of them.
        let alignment_bytes = layout.alignment_bytes.max(PAGE_BYTES) as usize;
        let slot_bytes = slot_bytes.next_multiple_of(alignment_bytes);
        Slots { buffer: AlignedBuffer::new(0, alignment_bytes), alignment_bytes, slot_bytes }
    }

    /// Makes room for `wanted` transfers, or fewer if rows are long; returns for how many.
    fn provide(&mut self, wanted: usize) -> usize {
        let most = (MOST_MEMORY_BYTES / self.slot_bytes).max(1);
        let count = wanted.clamp(1, most);
        if self.buffer.len() < count * self.slot_bytes {
            self.buffer = AlignedBuffer::new(count * self.slot_bytes, self.alignment_bytes);
        }
        count
    }
}

/// A transfer in flight.
struct Run {
    /// A range of the misses.
    misses: Range<usize>,
    /// The transferred range of the device.
    bytes: Range<u64>,
}

/// A batch of reads. See the module documentation.
pub(super) struct Fetch<'a, F> {
    device: &'a dyn Device,
    layout: Layout,
    table: &'a Table,
    counters: &'a Counters,
    epoch: Epoch,
    /// Sorted.
    misses: &'a [Miss],
    /// The first of them that no transfer covers yet.
    next: usize,
    /// Misses to be read alone, of one row each.
    again: Vec<Range<usize>>,
    memory: *mut u8,
    slot_bytes: usize,
    runs: Vec<Option<Run>>,
    free: Vec<usize>,
    /// Fails in a child that the caller's code forked, which has neither the table nor the transfers.
    visit: F,
    failed: Option<CacheError>,
}

/// Reads the `misses`, sorted by row, and calls `visit` for each with its bytes, until it fails.
pub(super) fn fetch(
    (device, layout): (&dyn Device, &Layout),
    table: &Table,
    counters: &Counters,
    slots: &mut Slots,
    misses: &[Miss],
    visit: impl FnMut(Miss, &[u8]) -> Result<()>,
) -> Result<()> {
    // A batch ends with an emptying queue. With twice the device's depth it is full for longer, and
    // batches of 230 reads are 7 % faster on a virtio disk.
    let depth = device.queue_depth().saturating_mul(2).min(misses.len());
    let count = slots.provide(depth);
    let mut batch = Fetch {
        device,
        layout: *layout,
        table,
        counters,
        epoch: table.epoch(),
        misses,
        next: 0,
        again: Vec::new(),
        memory: slots.buffer.as_mut_ptr(),
        slot_bytes: slots.slot_bytes,
        runs: (0..count).map(|_| None).collect(),
        free: (0..count).rev().collect(),
        visit,
        failed: None,
    };
    device.run(&mut batch, count);
    batch.finish()
}

impl<F: FnMut(Miss, &[u8]) -> Result<()>> Fetch<'_, F> {
    /// The result, after the device has returned.
    fn finish(mut self) -> Result<()> {
        // A transfer that the device has not completed, or one that it has not even asked for.
        let unfinished = self.runs.iter_mut().find_map(Option::take).or_else(|| self.plan());
        if let Some(run) = unfinished {
            let unfinished = DeviceError::Unfinished {
                operation: IoOperation::Read,
                offset_bytes: run.bytes.start,
                len_bytes: (run.bytes.end - run.bytes.start) as usize,
            };
            self.fail(self.misses[run.misses.start].row, unfinished);
        }
        self.failed.map_or(Ok(()), Err)
    }

    fn fail(&mut self, row: u64, source: DeviceError) {
        let offset_bytes = self.layout.bytes_of(row).start;
        let device = || self.device.name().to_owned();
        self.failed.get_or_insert_with(|| CacheError::Load {
            device: device(),
            offset_bytes,
            source,
        });
    }

    /// The next transfer to start.
    fn plan(&mut self) -> Option<Run> {
        if self.failed.is_some() {
            return None;
        }
        if let Some(misses) = self.again.pop() {
            let bytes = self.layout.span_of(self.misses[misses.start].row);
            return Some(Run { misses, bytes });
        }
        let start = self.next;
        let mut bytes = self.layout.span_of(self.misses.get(start)?.row);
        let mut end = start + 1;
        while let Some(miss) = self.misses.get(end) {
            let span = self.layout.span_of(miss.row);
            if span.start > bytes.end + MOST_GAP_BYTES
                || (span.end - bytes.start) as usize > self.slot_bytes
            {
                break;
            }
            bytes.end = span.end;
            end += 1;
        }
        self.next = end;
        let page = self.layout.aligned(bytes.clone(), PAGE_BYTES.max(self.layout.alignment_bytes));
        if page.end - page.start == PAGE_BYTES
            && self.layout.row_bytes as u64 <= PAGE_BYTES / 2
            && self.table.is_filling()
        {
            bytes = page;
        }
        Some(Run { misses: start..end, bytes })
    }

    /// Inserts and hands out the rows of a transfer of which `got` bytes are in memory.
    fn hand_out(&mut self, run: Run, slot: usize, got: usize) {
        let memory = self.memory.wrapping_add(slot * self.slot_bytes);
        // SAFETY: the slot is this batch's own, was initialised when it was allocated, and the
        // transfer that filled it has ended.
        let slot = unsafe { std::slice::from_raw_parts(memory, self.slot_bytes) };
        // What follows the transfer's end is left from an earlier one.
        let asked_bytes = (run.bytes.end - run.bytes.start) as usize;
        let transferred = &slot[..got.min(asked_bytes)];
        let there = run.bytes.start..run.bytes.start + transferred.len() as u64;
        let content = |row: u64| {
            let bytes = self.layout.bytes_of(row);
            let inside = there.start <= bytes.start && bytes.end <= there.end;
            let (from, to) = (bytes.start - run.bytes.start, bytes.end - run.bytes.start);
            inside.then(|| &transferred[from as usize..to as usize])
        };
        let mut last = None;
        let mut truncated = None;
        for &miss in &self.misses[run.misses.clone()] {
            let Some(bytes) = content(miss.row) else {
                truncated = Some(miss.row);
                break;
            };
            if last.replace(miss.row) != Some(miss.row) {
                self.counters.inserted(self.table.insert(miss.row, bytes, self.epoch, true));
            }
            if let Err(error) = (self.visit)(miss, bytes) {
                self.failed = Some(error);
                return;
            }
        }
        if self.table.is_filling() {
            for row in self.layout.rows_in(there.clone()) {
                let bytes = content(row).expect("rows that lie entirely in these bytes");
                self.counters.inserted(self.table.insert(row, bytes, self.epoch, false));
            }
        }
        if let Some(row) = truncated {
            let bytes = self.layout.bytes_of(row);
            let got_bytes = there.end.saturating_sub(bytes.start) as usize;
            self.fail(
                row,
                DeviceError::ShortRead {
                    offset_bytes: bytes.start,
                    len_bytes: self.layout.row_bytes,
                    got_bytes,
                },
            );
        }
    }

    /// Plans to read each row of a failed transfer again, unless the transfer was that of one row.
    fn read_again(&mut self, run: Run, error: DeviceError) {
        let row = self.misses[run.misses.start].row;
        if run.bytes == self.layout.span_of(row) {
            return self.fail(row, error);
        }
        let mut start = run.misses.start;
        for row in self.misses[run.misses].chunk_by(|one, next| one.row == next.row) {
            self.again.push(start..start + row.len());
            start += row.len();
        }
    }
}

// SAFETY: a slot belongs to one run from `next` to `complete`; the memory outlives `Device::run`,
// and only `hand_out` accesses it, after the completion.
unsafe impl<F: FnMut(Miss, &[u8]) -> Result<()>> Batch for Fetch<'_, F> {
    fn next(&mut self) -> Option<Request> {
        let slot = *self.free.last()?;
        let run = self.plan()?;
        self.free.pop();
        let request = Request {
            operation: IoOperation::Read,
            offset_bytes: run.bytes.start,
            memory: self.memory.wrapping_add(slot * self.slot_bytes),
            len_bytes: (run.bytes.end - run.bytes.start) as usize,
            tag: slot as u64,
        };
        self.runs[slot] = Some(run);
        Some(request)
    }

    fn complete(&mut self, tag: u64, result: std::result::Result<usize, DeviceError>) {
        let slot = tag as usize;
        let run = self.runs.get_mut(slot).and_then(Option::take);
        let run = run.expect("a device completes the transfers that it took, each once");
        // Relaxed: counts for display.
        self.counters.reads.fetch_add(1, Ordering::Relaxed);
        match result {
            Ok(got) => {
                self.counters.read_bytes.fetch_add(got as u64, Ordering::Relaxed);
                self.hand_out(run, slot, got);
            }
            // The device has become so short that the whole transfer lies behind its end.
            Err(DeviceError::OutOfBounds { .. }) => self.hand_out(run, slot, 0),
            Err(error) => self.read_again(run, error),
        }
        self.free.push(slot);
    }
}
