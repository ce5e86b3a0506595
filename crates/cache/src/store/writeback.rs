//! Write-back: from dirty memory to durable bytes.
//!
//! ```text
//!  walk the dirty map in order ─► seal a region: Dirty → Cleaning, one range write-protect
//!        ─► merge neighbours into large writes, at the device's queue depth
//!        ─► Clean, or Dirty again where a write failed           ─► sync the device (flush only)
//! ```
//!
//! The device pulls: when it has taken all transfers of one region, the next region is sealed, while
//! those transfers are in flight. So the device's queue does not run empty between regions, and a
//! page is sealed only shortly before it is written.
//!
//! While a page is Cleaning its bytes do not change: stores wait, loads proceed. A page that is
//! *pinned for writing* cannot be sealed; `flush` writes a snapshot of it and leaves it dirty.
//!
//! Where a write is CPU work (memory, compressed memory), transfers run one after the other, and a
//! faulting thread that needs a frame writes back itself. On other devices transfers go to the
//! device's queue, and a faulting thread leaves write-back to the evictor.
//!
//! A failed write loses nothing: its pages are Dirty again and still marked, and every flush that
//! covers them retries, and fails until a write succeeds. A failed device sync is final: the store
//! remembers it, and every later flush fails, because the pages whose data the device lost are
//! already marked clean.
//!
//! A transfer succeeds if the device reports that it wrote every byte. A partial transfer fails,
//! and so does one that the device left uncompleted when it returned from the batch.

use std::io;
use std::ops::Range;

use aquifer_device::{Batch, DeviceError, IoOperation, Request, run_serially};
use aquifer_sys::futex::MutexGuard;
use aquifer_sys::{cpu, memory};

use crate::engine::bounce::Bounce;
use crate::engine::duties;
use crate::error::{CacheError, Result};
use crate::geometry::MAX_REGION_PAGES;
use crate::page_word::State;
use crate::stats::count;
use crate::store::{OnUnwind, PageMemory, Store};

/// Transfers of one write-back that may be in flight: more than the queue of a device gains from.
const MOST_IN_FLIGHT: usize = 128;
/// Serial transfers after which [`WriteStyle`](crate::store::write_style::WriteStyle) decides anew.
const MOST_SERIAL: usize = 1024;
/// Largest transfer.
const MAX_TRANSFER_BYTES: usize = 1 << 20;

/// A copy of an error.
fn again(error: &DeviceError) -> DeviceError {
    let (offset_bytes, len_bytes, source) = match error {
        DeviceError::Io { offset_bytes, len_bytes, source, .. } => {
            let again = match source.raw_os_error() {
                Some(errno) => io::Error::from_raw_os_error(errno),
                None => io::Error::new(source.kind(), source.to_string()),
            };
            (*offset_bytes, *len_bytes, again)
        }
        other => (0, 0, io::Error::other(other.to_string())),
    };
    DeviceError::Io { operation: IoOperation::Sync, offset_bytes, len_bytes, source }
}

/// The pages that could not be written.
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

/// One transfer of consecutive pages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    first: u64,
    count: u32,
    /// A snapshot of a page that is pinned for writing: the page stays dirty.
    snapshot: bool,
    /// A page that was installed writable by a guess, and may only have been read.
    guessed: bool,
}

impl Run {
    /// An unused place for a run.
    const EMPTY: Run = Run::new(0, 0, false);

    const fn new(first: u64, count: u32, snapshot: bool) -> Run {
        Run { first, count, snapshot, guessed: false }
    }

    fn is_empty(self) -> bool {
        self.count == 0
    }

    fn pages(self) -> Range<u64> {
        self.first..self.first + u64::from(self.count)
    }
}

/// The runs of one region, in memory that the caller provides: the fault path has it on its stack.
struct Runs<'a> {
    places: &'a mut [Run; MAX_REGION_PAGES],
    len: usize,
}

impl Runs<'_> {
    fn as_slice(&self) -> &[Run] {
        &self.places[..self.len]
    }

    /// Adds a run; extends the last run if it is adjacent and the transfer has room.
    fn add(&mut self, run: Run, most: u64) {
        let joins = |last: &Run| {
            !(run.snapshot || run.guessed || last.snapshot || last.guessed)
                && last.pages().end == run.first
                && u64::from(last.count + run.count) <= most
        };
        match self.places[..self.len].last_mut() {
            Some(last) if joins(last) => last.count += run.count,
            _ => {
                self.places[self.len] = run;
                self.len += 1;
            }
        }
    }
}

impl<M: PageMemory> Store<M> {
    /// Writes back the dirty pages of a range and makes them durable.
    pub fn flush(&self, pages: Range<u64>) -> Result<()> {
        let failed = self.write_back_all(pages, true);
        if let Some(failed) = failed {
            return Err(self.write_back_error(failed));
        }
        if self.sync_failure.get().is_none() {
            count(&self.engine.counters.syncs, 1);
            match self.device().sync() {
                // A concurrent flush's failed sync may have covered data that this sync was to make
                // durable.
                Ok(()) if self.sync_failure.get().is_none() => return Ok(()),
                Ok(()) => {}
                // Of several concurrent failures any may be recorded.
                Err(source) => drop(self.sync_failure.set(source)),
            }
        }
        let source = again(self.sync_failure.get().expect("set above or before"));
        Err(CacheError::Sync { device: self.device().name().to_owned(), source })
    }

    fn write_back_error(&self, failed: Failed) -> CacheError {
        CacheError::WriteBack {
            device: self.device().name().to_owned(),
            offset_bytes: self.geometry.offset_of(failed.first),
            end_bytes: self.geometry.offset_of(failed.last + 1).min(self.geometry.len_bytes),
            pages: failed.pages,
            source: failed.source,
        }
    }

    /// Writes back the dirty pages of a range that no other thread is working on, without a sync.
    ///
    /// Waits for no other thread: the evictor must not depend on one that may itself be waiting for
    /// a frame.
    pub fn write_back(&self, pages: Range<u64>) -> Option<Failed> {
        self.write_back_all(pages, false)
    }

    /// With `flush`, the outcome includes every dirty page of the range, also those pinned for writing.
    pub fn write_back_all(&self, pages: Range<u64>, flush: bool) -> Option<Failed> {
        let (mut failed, mut others) = (None, vec![]);
        self.write_out(pages, flush, false, &mut failed, &mut |page| others.push(page));
        if flush {
            // Pages that another thread was cleaning: this flush waits for their outcome.
            for page in others {
                self.settle(page, &mut failed);
            }
        }
        failed
    }

    /// Writes back the dirty pages of a region that can be sealed now, for eviction. Allocates
    /// nothing if `serially`.
    ///
    /// Failures are counted; the pages stay dirty and the next flush reports them. The fault path
    /// must pass `serially`, because the device's queue may allocate.
    pub fn clean_region(&self, region: usize, serially: bool) {
        self.write_out(
            self.geometry.pages_of_region(region),
            false,
            serially,
            &mut None,
            &mut |_| (),
        );
    }

    /// Whether a faulting thread, which may be in a signal handler, may write back itself instead
    /// of waiting for the evictor.
    pub fn writes_are_copies(&self) -> bool {
        self.write_style.is_copying() && self.device().writes_are_signal_safe()
    }

    /// Waits for another thread's write of a page; if it failed, retries it here.
    fn settle(&self, page: u64, failed: &mut Option<Failed>) {
        let mut others = vec![page];
        while let Some(page) = others.pop() {
            let seen = self.seen(page);
            if seen.is_transient() {
                self.word(page).wait(seen);
                others.push(page);
                continue;
            }
            // The page comes back in `others` if a third thread took it first.
            self.write_out(page..page + 1, true, false, failed, &mut |page| others.push(page));
        }
    }

    /// Cleaning → Dirty after a failed write. Lifts the protection first: the fault handler does
    /// nothing for a Dirty page, so a store to a protected one would fault forever.
    fn unseal(&self, page: u64) {
        // Held until the word is Dirty, so that no thread protects the page again in between.
        let _gate = M::PROTECTS.then(|| self.gates.shared(self.geometry.region_of(page)));
        let result = self.memory.unprotect(page);
        debug_assert!(result.is_ok(), "lifting the protection of a live page: {result:?}");
        self.word(page).finish_clean(false);
    }

    fn first_marked(&self, pages: Range<u64>) -> Option<u64> {
        let mut first = None;
        self.dirty.walk(pages, |page| {
            first = Some(page);
            false
        });
        first
    }

    /// Seals the dirty pages of a range, which lies in one region, and puts their transfers in
    /// `runs`, which is empty. Pages that another thread is working on go to `other`.
    fn seal(
        &self,
        pages: Range<u64>,
        snapshots: bool,
        runs: &mut Runs<'_>,
        other: &mut dyn FnMut(u64),
    ) {
        let largest =
            if M::CONTIGUOUS { MAX_TRANSFER_BYTES } else { self.engine.bounce.buffer_bytes() };
        let most = (largest / self.geometry.page_bytes) as u64;
        let region = self.geometry.region_of(pages.start);
        let gate = M::PROTECTS.then(|| self.gates.exclusive(region));
        let mut any_guessed = false;
        self.dirty.walk(pages, |page| {
            match self.word(page).begin_clean() {
                Ok(_) => {
                    let guessed = self.is_guessed(page);
                    any_guessed |= guessed;
                    runs.add(Run { guessed, ..Run::new(page, 1, false) }, most);
                }
                // Pinned for writing. A snapshot pin keeps the page resident while it is copied,
                // and keeps it from being cleaned. If the page is no longer Dirty, or has too many
                // snapshot pins, `settle` handles it.
                Err(seen) if seen.state() == State::Dirty => {
                    if snapshots {
                        match self.word(page).pin_for_snapshot() {
                            Ok(_) => runs.add(Run::new(page, 1, true), most),
                            Err(_) => other(page),
                        }
                    }
                }
                Err(seen) if seen.is_transient() => other(page),
                Err(_) => {}
            }
            true
        });
        if !self.protect_runs(runs.as_slice()) {
            self.take_seals_back(snapshots, runs, other);
            return;
        }
        drop(gate);
        if any_guessed {
            self.leave_out_unchanged(most, runs);
        }
    }

    /// Of the sealed and protected runs, makes guessed pages Clean without a transfer if their
    /// content is unchanged, and merges the others with adjacent runs.
    fn leave_out_unchanged(&self, most: u64, runs: &mut Runs<'_>) {
        let end = std::mem::take(&mut runs.len);
        for index in 0..end {
            let run = runs.places[index];
            if run.guessed && self.was_only_read(run.first) {
                self.dirty.unmark(run.first);
                // A visit may have copied bytes out of the frame that were stored and taken back.
                self.write_back_ended(self.geometry.region_of(run.first));
                self.word(run.first).finish_clean(true);
            } else {
                runs.add(Run { guessed: false, ..run }, most);
            }
        }
    }

    /// Undoes the seals of runs whose pages the kernel could not protect.
    ///
    /// Stores to them now would be lost, so the pages are Dirty again, and a flush writes snapshots
    /// of them. The caller holds the region's gate.
    #[cold]
    fn take_seals_back(&self, snapshots: bool, runs: &mut Runs<'_>, other: &mut dyn FnMut(u64)) {
        // Stays empty, and allocates nothing, if there are no snapshots.
        let mut kept = vec![];
        for &run in runs.as_slice() {
            if run.snapshot {
                kept.push(run);
                continue;
            }
            for page in run.pages() {
                // Some may have been protected: see `unseal`.
                let result = self.memory.unprotect(page);
                debug_assert!(result.is_ok(), "lifting the protection of a live page: {result:?}");
                self.word(page).finish_clean(false);
                if snapshots {
                    match self.word(page).pin_for_snapshot() {
                        Ok(_) => kept.push(Run::new(page, 1, true)),
                        Err(_) => other(page),
                    }
                }
            }
        }
        // There is one place for each page, so a run of many pages has room for that many
        // single-page runs.
        runs.len = kept.len();
        runs.places[..kept.len()].copy_from_slice(&kept);
    }

    /// Write-protects the sealed pages with as few calls as possible.
    ///
    /// One call covers consecutive pages and any clean or absent pages between them, which are
    /// protected already or have nothing to protect. Returns false if the kernel refused a call: it
    /// needs memory for it.
    fn protect_runs(&self, runs: &[Run]) -> bool {
        if !M::PROTECTS {
            return true;
        }
        let mut protected = true;
        let mut span: Option<Range<u64>> = None;
        for run in runs.iter().filter(|run| !run.snapshot) {
            match &mut span {
                Some(open) if self.may_protect(open.end..run.first) => open.end = run.pages().end,
                _ => {
                    if let Some(done) = span.replace(run.pages()) {
                        protected &= self.memory.protect(done).is_ok();
                    }
                }
            }
        }
        if let Some(done) = span {
            protected &= self.memory.protect(done).is_ok();
        }
        protected
    }

    /// Whether no page of the range is Dirty. The caller holds the gate, so none becomes Dirty.
    fn may_protect(&self, between: Range<u64>) -> bool {
        between.into_iter().all(|page| self.seen(page).state() != State::Dirty)
    }

    /// Writes the dirty pages of a range to the device: serially where writes are CPU work, else at
    /// the device's queue depth. A region is sealed when the transfers of the one before have been
    /// handed to the device, so that its queue does not run empty in between.
    ///
    /// Pages that another thread is working on go to `other`.
    fn write_out(
        &self,
        pages: Range<u64>,
        flush: bool,
        serially: bool,
        failed: &mut Option<Failed>,
        other: &mut dyn FnMut(u64),
    ) {
        let mut places = [Run::EMPTY; MAX_REGION_PAGES];
        let mut flight = [Run::EMPTY; MOST_IN_FLIGHT];
        let mut batch = WriteBatch {
            store: self,
            unsealed: pages,
            flush,
            other,
            sealed: Runs { places: &mut places, len: 0 },
            next: 0,
            most: 0,
            flight: &mut flight,
            free: 0,
            in_flight: 0,
            copies: vec![],
            snapshots: 0,
            in_turn: None,
            failed,
        };
        if !batch.seal_more() {
            return;
        }
        // No other thread can take over pages in flight, and it is unknown which of them were
        // written: abort.
        let fatal = OnUnwind(|| {
            eprintln!("aquifer: a device panicked while it was written to");
            std::process::abort();
        });
        let device = self.device();
        duties::writing_back(&self.height, || {
            while batch.seal_more() {
                let serial = if serially {
                    usize::MAX
                } else {
                    self.write_style.serial_part(batch.transfers_left()).min(MOST_SERIAL)
                };
                if serial > 0 {
                    let switches = cpu::voluntary_switches();
                    batch.most = serial;
                    run_serially(&**device, &mut batch);
                    let switches = cpu::voluntary_switches() - switches;
                    self.write_style.learn(serial - batch.most, switches);
                } else {
                    batch.most = usize::MAX;
                    device.run(&mut batch, device.queue_depth());
                }
                batch.fail_unfinished();
            }
        });
        fatal.disarm();
    }
}

/// The transfers of one write-back.
///
/// ```text
///  unsealed pages ──seal_more──► sealed runs of one region ──next──► in flight ──complete──► Clean
/// ```
struct WriteBatch<'a, M: PageMemory> {
    store: &'a Store<M>,
    /// The pages that have not been looked at yet.
    unsealed: Range<u64>,
    /// Whether pages that are pinned for writing are written as snapshots.
    flush: bool,
    other: &'a mut dyn FnMut(u64),
    /// The runs of the region sealed last; those from `next` on are waiting.
    sealed: Runs<'a>,
    next: usize,
    /// How many more transfers may start.
    most: usize,
    /// The transfers in flight, by their tags; the other places are empty.
    flight: &'a mut [Run; MOST_IN_FLIGHT],
    /// Where to look for an empty place first.
    free: usize,
    in_flight: usize,
    /// Buffers of transfers that are not made in place, with their tags. Empty for a mapping's
    /// evictions.
    copies: Vec<(usize, Bounce<'a>)>,
    /// Snapshots that are waiting or in flight.
    snapshots: usize,
    /// Held from the first of them on until the last one ends. See [`Store::snapshots`].
    in_turn: Option<MutexGuard<'a, ()>>,
    failed: &'a mut Option<Failed>,
}

impl<'a, M: PageMemory> WriteBatch<'a, M> {
    /// Seals regions until a transfer is waiting; returns false if none is left.
    fn seal_more(&mut self) -> bool {
        let store = self.store;
        while self.next == self.sealed.len {
            let Some(first) = store.first_marked(self.unsealed.clone()) else {
                self.unsealed.start = self.unsealed.end;
                return false;
            };
            let region = store.geometry.pages_of_region(store.geometry.region_of(first));
            let part = first..region.end.min(self.unsealed.end);
            self.unsealed.start = part.end;
            (self.next, self.sealed.len) = (0, 0);
            store.seal(part, self.flush, &mut self.sealed, self.other);
            self.snapshots += self.sealed.as_slice().iter().filter(|run| run.snapshot).count();
        }
        true
    }

    /// How many transfers are left, if no region is left to be sealed; otherwise many.
    fn transfers_left(&self) -> usize {
        match self.store.first_marked(self.unsealed.clone()) {
            None => self.sealed.len - self.next,
            Some(_) => usize::MAX,
        }
    }

    /// Whether a snapshot may be taken now: if no other flush takes any.
    ///
    /// Waits for the other flush only with nothing in flight, because transfers in flight hold
    /// buffers that it may be waiting for.
    fn is_our_turn(&mut self) -> bool {
        if self.in_turn.is_none() {
            let snapshots = &self.store.snapshots;
            self.in_turn =
                if self.in_flight == 0 { Some(snapshots.lock()) } else { snapshots.try_lock() };
        }
        self.in_turn.is_some()
    }

    fn snapshot_ended(&mut self) {
        self.snapshots -= 1;
        if self.snapshots == 0 {
            self.in_turn = None;
        }
    }

    /// The address of a run's bytes: in place, or gathered in a buffer for the transfer `tag`.
    fn memory_of(&mut self, run: Run, tag: usize) -> Option<*mut u8> {
        let store = self.store;
        // Cleaning or pinned, so each page keeps its frame.
        let bytes_of = |page| store.memory.bytes(page, store.seen(page).frame());
        if !run.snapshot && (M::CONTIGUOUS || run.count == 1) {
            return Some(bytes_of(run.first));
        }
        let pool = &store.engine.bounce;
        // With nothing in flight no completion would call `next` again, so wait for a buffer.
        let bounce = if self.in_flight == 0 { pool.take() } else { pool.try_take()? };
        let page_bytes = store.geometry.page_bytes;
        for (index, page) in run.pages().enumerate() {
            // SAFETY: the page stays resident, and the buffer holds a run. A snapshot may be torn;
            // it is written again, because its page stays dirty.
            unsafe {
                let target = bounce.as_ptr().add(index * page_bytes);
                memory::copy_racy(bytes_of(page), target, page_bytes);
            }
        }
        let memory = bounce.as_ptr();
        self.copies.push((tag, bounce));
        Some(memory)
    }

    /// The request of a transfer whose bytes are at `memory`.
    fn request(&self, run: Run, tag: usize, memory: *mut u8) -> Request {
        let (geometry, pages) = (self.store.geometry, run.pages());
        Request {
            operation: IoOperation::Write,
            offset_bytes: geometry.offset_of(pages.start),
            memory,
            len_bytes: geometry.bytes_in(pages),
            tag: tag as u64,
        }
    }

    /// Fails the transfers that the device did not complete, or did not take, before it returned.
    /// Their pages become Dirty again; left Cleaning, they would block every store to them forever.
    fn fail_unfinished(&mut self) {
        for tag in 0..MOST_IN_FLIGHT {
            if !self.flight[tag].is_empty() {
                self.fail(tag);
            }
        }
        while let Some(Request { tag, .. }) = self.next() {
            self.fail(tag as usize);
        }
    }

    fn fail(&mut self, tag: usize) {
        let Request { operation, offset_bytes, len_bytes, .. } =
            self.request(self.flight[tag], tag, std::ptr::null_mut());
        self.end(tag, Err(DeviceError::Unfinished { operation, offset_bytes, len_bytes }));
    }

    /// Ends a transfer with its result.
    fn end(&mut self, tag: usize, result: std::result::Result<usize, DeviceError>) {
        let run = std::mem::replace(&mut self.flight[tag], Run::EMPTY);
        self.free = tag;
        self.in_flight -= 1;
        if let Some(copy) = self.copies.iter().position(|&(of, _)| of == tag) {
            self.copies.swap_remove(copy);
        }
        let store = self.store;
        let counters = &store.engine.counters;
        let written = result.is_ok();
        store.write_back_ended(store.geometry.region_of(run.first));
        for page in run.pages() {
            if run.snapshot {
                store.unpin(page);
                self.snapshot_ended();
                continue;
            }
            if written {
                // Unmarked while Cleaning: no thread can mark it again before it is Clean.
                store.dirty.unmark(page);
                store.word(page).finish_clean(true);
            } else {
                store.unseal(page);
            }
        }
        match result {
            Ok(bytes) => {
                count(&counters.write_backs, 1);
                count(&counters.written_pages, u64::from(run.count));
                counters.write_back_bytes.record(bytes as u64);
            }
            Err(source) => {
                count(&counters.write_errors, 1);
                Failed::merge(self.failed, run.pages(), source);
            }
        }
    }
}

// SAFETY: pages in flight are Cleaning (stores wait, the evictor does not discard them) or copied
// to a buffer that is kept until the completion.
unsafe impl<M: PageMemory> Batch for WriteBatch<'_, M> {
    fn next(&mut self) -> Option<Request> {
        while self.most > 0 && self.in_flight < MOST_IN_FLIGHT && self.seal_more() {
            let run = self.sealed.places[self.next];
            if run.snapshot && !self.is_our_turn() {
                return None;
            }
            let empty = |tag: &usize| self.flight[*tag].is_empty();
            let tag = (self.free..MOST_IN_FLIGHT).chain(0..self.free).find(empty)?;
            let memory = self.memory_of(run, tag)?;
            self.next += 1;
            if run.snapshot && self.store.is_snapshot_of_what_was_only_read(run.first, memory) {
                // Nothing to write; the page stays Dirty.
                self.copies.retain(|&(of, _)| of != tag);
                self.store.unpin(run.first);
                self.snapshot_ended();
                continue;
            }
            self.flight[tag] = run;
            self.in_flight += 1;
            self.most -= 1;
            return Some(self.request(run, tag, memory));
        }
        None
    }

    fn complete(&mut self, tag: u64, result: std::result::Result<usize, DeviceError>) {
        let tag = tag as usize;
        let run = self.flight.get(tag).copied().unwrap_or(Run::EMPTY);
        assert!(!run.is_empty(), "a device completes the transfers that it took, each once");
        let Request { offset_bytes, len_bytes, .. } = self.request(run, tag, std::ptr::null_mut());
        let whole = result.and_then(|wrote_bytes| {
            if wrote_bytes < len_bytes {
                Err(DeviceError::ShortWrite { offset_bytes, len_bytes, wrote_bytes })
            } else {
                Ok(len_bytes)
            }
        });
        self.end(tag, whole);
    }
}
