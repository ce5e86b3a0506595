//! Write-back: from dirty memory to durable bytes.
//!
//! ```text
//!  walk the dirty map in order ─► seal a region: Dirty → Cleaning, one range write-protect
//!        ─► merge neighbours into large writes, at the device's queue depth
//!        ─► Clean, or Dirty again where a write failed           ─► sync the device (flush only)
//! ```
//!
//! While a page is Cleaning its bytes do not change: stores wait, loads go on. A page that is *pinned for
//! writing* cannot be sealed; `flush` writes a snapshot of it and leaves it dirty.
//!
//! A failed write loses nothing: its pages are Dirty again, still marked, and every flush that covers them
//! tries them again and fails until that succeeds. A failed device sync is the device's to remember.

use std::ops::Range;

use aquifer_device::{Batch, DeviceError, IoOperation, Request};
use aquifer_sys::memory;

use crate::bounce::Bounce;
use crate::error::{Error, Result};
use crate::ids::FrameId;
use crate::page_word::State;
use crate::stats::count;
use crate::store::{PageMemory, Store};

/// Regions sealed at a time: bounds how long a store may wait, and the memory of the batch.
const REGIONS_AT_A_TIME: u64 = 16;
/// Largest transfer.
const MAX_TRANSFER_BYTES: usize = 1 << 20;

/// What could not be written.
#[derive(Debug)]
pub(crate) struct Failed {
    pub pages: u64,
    pub first: u64,
    pub last: u64,
    pub source: DeviceError,
}

impl Failed {
    fn merge(slot: &mut Option<Failed>, pages: Range<u64>, source: DeviceError) {
        let failed =
            slot.get_or_insert(Failed { pages: 0, first: pages.start, last: pages.start, source });
        failed.pages += pages.end - pages.start;
        failed.first = failed.first.min(pages.start);
        failed.last = failed.last.max(pages.end - 1);
    }
}

/// One transfer of neighbouring pages.
struct Run {
    pages: Range<u64>,
    /// Frame of the first page; only for memory that is not contiguous.
    frames: Vec<FrameId>,
    /// A snapshot of a page that somebody may be writing: it stays dirty.
    snapshot: bool,
}

impl<M: PageMemory> Store<M> {
    /// Writes back the dirty pages of a range and makes them durable.
    pub fn flush(&self, pages: Range<u64>) -> Result<()> {
        let failed = self.write_back_all(pages, true);
        if let Some(failed) = failed {
            return Err(self.write_back_error(failed));
        }
        count(&self.engine.counters.syncs, 1);
        self.device
            .sync()
            .map_err(|source| Error::Sync { device: self.device.name().to_owned(), source })
    }

    fn write_back_error(&self, failed: Failed) -> Error {
        Error::WriteBack {
            device: self.device.name().to_owned(),
            offset_bytes: self.geometry.offset_of(failed.first),
            end_bytes: self.geometry.offset_of(failed.last + 1).min(self.geometry.len_bytes),
            pages: failed.pages,
            source: failed.source,
        }
    }

    /// Writes back the dirty pages of a range, without a sync.
    pub fn write_back(&self, pages: Range<u64>) -> Option<Failed> {
        self.write_back_all(pages, false)
    }

    fn write_back_all(&self, pages: Range<u64>, snapshots: bool) -> Option<Failed> {
        let mut failed = None;
        let step = REGIONS_AT_A_TIME * self.geometry.pages_per_region();
        let mut first = pages.start;
        while first < pages.end {
            let end = (first / step + 1) * step;
            let part = first..end.min(pages.end);
            let mut others = vec![];
            let runs = self.seal(part, snapshots, &mut others);
            self.write_runs(runs, &mut failed);
            // Pages that somebody else was cleaning: their outcome is part of a flush. Only a flush waits,
            // because the evictor must not: an exclusive guard's holder may be waiting for a frame.
            if snapshots {
                for page in others {
                    self.settle(page, &mut failed);
                }
            }
            first = end;
        }
        failed
    }

    /// Waits for another thread's write of a page; if that failed, or was of an older state, writes it here.
    fn settle(&self, page: u64, failed: &mut Option<Failed>) {
        let mut others = vec![page];
        while others.pop().is_some() {
            let seen = self.seen(page);
            if seen.is_transient() {
                self.word(page).wait(seen);
                others.push(page);
                continue;
            }
            let runs = self.seal(page..page + 1, true, &mut others);
            self.write_runs(runs, failed);
        }
    }

    /// Seals the dirty pages of a range, and says which transfers they make.
    fn seal(&self, pages: Range<u64>, snapshots: bool, others: &mut Vec<u64>) -> Vec<Run> {
        let mut runs: Vec<Run> = vec![];
        let most = (MAX_TRANSFER_BYTES / self.geometry.page_bytes) as u64;
        let most = if M::CONTIGUOUS {
            most
        } else {
            most.min((self.engine.bounce.buffer_bytes() / self.geometry.page_bytes) as u64)
        };
        let mut page = pages.start;
        while page < pages.end {
            let region = self.geometry.region_of(page);
            let end = self.geometry.pages_of_region(region).end.min(pages.end);
            let mut any = false;
            self.dirty.walk(page..end, |_| {
                any = true;
                false
            });
            if any {
                let gate = M::PROTECTS.then(|| self.gates.exclusive(region));
                let first_run = runs.len();
                self.dirty.walk(page..end, |page| {
                    self.seal_page(page, most, snapshots, &mut runs, others);
                    true
                });
                self.protect_runs(&runs[first_run..]);
                drop(gate);
            }
            page = end;
        }
        runs
    }

    fn seal_page(
        &self,
        page: u64,
        most: u64,
        snapshots: bool,
        runs: &mut Vec<Run>,
        others: &mut Vec<u64>,
    ) {
        match self.word(page).begin_clean() {
            Ok(seen) => match runs.last_mut() {
                // Never across regions: a run is write-protected under its region's gate.
                Some(run)
                    if !run.snapshot
                        && run.pages.end == page
                        && self.geometry.region_of(run.pages.start)
                            == self.geometry.region_of(page)
                        && run.pages.end - run.pages.start < most =>
                {
                    run.pages.end += 1;
                    run.frames.push(seen.frame());
                }
                _ => runs.push(Run {
                    pages: page..page + 1,
                    frames: vec![seen.frame()],
                    snapshot: false,
                }),
            },
            // Pinned for writing. Our own such pin keeps the page where it is while it is copied, and away
            // from other cleaners until the copy is written: of two writes in flight the older might win.
            Err(seen) if seen.state() == State::Dirty && snapshots => {
                match self.word(page).pin_for_writing() {
                    Ok(seen) => runs.push(Run {
                        pages: page..page + 1,
                        frames: vec![seen.frame()],
                        snapshot: true,
                    }),
                    // No longer Dirty, or pinned too often: waited for, and looked at once more.
                    Err(_) => others.push(page),
                }
            }
            Err(seen) if seen.is_transient() => others.push(page),
            Err(_) => {}
        }
    }

    /// Write-protects the sealed pages with as few calls as can be: neighbours in one, and across clean
    /// or absent pages in between, which are protected or have nothing to protect.
    fn protect_runs(&self, runs: &[Run]) {
        if !M::PROTECTS {
            return;
        }
        let mut span: Option<Range<u64>> = None;
        for run in runs.iter().filter(|run| !run.snapshot) {
            match &mut span {
                Some(open) if self.may_protect(open.end..run.pages.start) => {
                    open.end = run.pages.end;
                }
                _ => {
                    if let Some(done) = span.replace(run.pages.clone()) {
                        self.protect_span(done);
                    }
                }
            }
        }
        if let Some(done) = span {
            self.protect_span(done);
        }
    }

    /// The gate is held: what is not Dirty now does not become it.
    fn may_protect(&self, between: Range<u64>) -> bool {
        between.into_iter().all(|page| self.seen(page).state() != State::Dirty)
    }

    fn protect_span(&self, span: Range<u64>) {
        // Fails only if the range is no longer mapped, which ends the program's use of it anyway.
        let result = self.memory.protect(span);
        debug_assert!(result.is_ok(), "write-protecting a live range: {result:?}");
    }

    /// Cleaning → Dirty, after a failed write: stores go on without a fault, as to every dirty page.
    fn unseal(&self, page: u64) {
        // Held over both steps, as in `unprotect`: nobody may seal the region in between.
        let _gate = M::PROTECTS.then(|| self.gates.shared(self.geometry.region_of(page)));
        // Fails only if the range is no longer mapped, which ends the program's use of it anyway.
        let result = self.memory.unprotect(page);
        debug_assert!(result.is_ok(), "lifting the protection of a live page: {result:?}");
        self.word(page).finish_clean(false);
    }

    fn write_runs(&self, runs: Vec<Run>, failed: &mut Option<Failed>) {
        if runs.is_empty() {
            return;
        }
        let mut batch =
            WriteBatch { store: self, runs, next: 0, in_flight: 0, bounces: vec![], failed };
        batch.bounces.resize_with(batch.runs.len(), || None);
        self.device.run(&mut batch, self.device.queue_depth());
        debug_assert_eq!(batch.in_flight, 0, "the device ran the whole batch");
    }
}

/// The transfers of one write-back.
struct WriteBatch<'a, M: PageMemory> {
    store: &'a Store<M>,
    runs: Vec<Run>,
    next: usize,
    in_flight: usize,
    bounces: Vec<Option<Bounce<'a>>>,
    failed: &'a mut Option<Failed>,
}

impl<'a, M: PageMemory> WriteBatch<'a, M> {
    /// Where a run's bytes are: in place, or gathered in a buffer.
    fn memory_of(&mut self, index: usize) -> Option<*mut u8> {
        let store = self.store;
        let run = &self.runs[index];
        let in_place = !run.snapshot && (M::CONTIGUOUS || run.frames.len() == 1);
        if in_place {
            return Some(store.memory.bytes(run.pages.start, run.frames[0]));
        }
        let pool = &store.engine.bounce;
        // With nothing in flight nobody else would bring us back here.
        let bounce = if self.in_flight == 0 { pool.take() } else { pool.try_take()? };
        let page_bytes = store.geometry.page_bytes;
        for (index, (page, &frame)) in run.pages.clone().zip(&run.frames).enumerate() {
            // SAFETY: the pages are Cleaning or pinned, so they stay; a snapshot may be torn, and is
            // written again because its page stays dirty.
            unsafe {
                memory::copy_racy(
                    store.memory.bytes(page, frame),
                    bounce.as_ptr().add(index * page_bytes),
                    page_bytes,
                );
            }
        }
        let memory = bounce.as_ptr();
        self.bounces[index] = Some(bounce);
        Some(memory)
    }
}

// SAFETY: pages in flight are Cleaning (stores wait, the evictor keeps away) or copied to a buffer that is
// kept until the completion.
unsafe impl<M: PageMemory> Batch for WriteBatch<'_, M> {
    fn next(&mut self) -> Option<Request> {
        let index = self.next;
        if index == self.runs.len() {
            return None;
        }
        let memory = self.memory_of(index)?;
        self.next += 1;
        self.in_flight += 1;
        let pages = self.runs[index].pages.clone();
        Some(Request {
            operation: IoOperation::Write,
            offset_bytes: self.store.geometry.offset_of(pages.start),
            memory,
            len_bytes: self.store.geometry.bytes_in(pages),
            tag: index as u64,
        })
    }

    fn complete(&mut self, tag: u64, result: std::result::Result<usize, DeviceError>) {
        self.in_flight -= 1;
        self.bounces[tag as usize] = None;
        let store = self.store;
        let run = &self.runs[tag as usize];
        let counters = &store.engine.counters;
        let written = result.is_ok();
        for page in run.pages.clone() {
            if run.snapshot {
                store.unpin(page);
                continue;
            }
            if written {
                // Unmarked while Cleaning: nobody can mark it again before it is Clean.
                store.dirty.unmark(page);
                store.word(page).finish_clean(true);
            } else {
                store.unseal(page);
            }
        }
        let pages = run.pages.end - run.pages.start;
        match result {
            Ok(bytes) => {
                count(&counters.write_backs, 1);
                count(&counters.written_pages, pages);
                counters.write_back_bytes.record(bytes as u64);
            }
            Err(source) => {
                count(&counters.write_errors, 1);
                Failed::merge(self.failed, run.pages.clone(), source);
            }
        }
    }
}
