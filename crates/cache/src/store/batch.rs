//! Loading many pages at the device's queue depth.
//!
//! The device pulls the batch: while it has room, the batch names the next absent pages, takes
//! frames for them and moves them to Loading. Each completion is installed at once, while other
//! transfers are in flight. Consecutive pages share a transfer, and so do pages with one or two
//! others between them: reading these along, into the buffer only, costs less than a second transfer.
//!
//! A batch is a hint, or it must load all pages. A hint ends where frames are short. If the pool cannot hold what it names, it
//! takes half of the pool, or what is free: the other pages there are of more use than pages that later ones evict.

use std::ops::Range;
use std::sync::atomic::Ordering;

use aquifer_device::{Batch, DeviceError, IoOperation, Request};

use crate::engine::Cleaning;
use crate::engine::bounce::Bounce;
use crate::engine::duties;
use crate::engine::jobs::Hint;
use crate::ids::FrameId;
use crate::page_word::State;
use crate::stats::count;
use crate::store::{Access, MAX_RUN_PAGES, PageMemory, Refused, Store, check_length};

/// Pages between two pages of a run that are read along.
pub(crate) const GAP_PAGES: u64 = 2;

struct Run<'a> {
    pages: Range<u64>,
    frames: [FrameId; MAX_RUN_PAGES],
    /// A bit for each page that is Loading and has a frame; the others are in gaps.
    loading: u64,
    bounce: Option<Bounce<'a>>,
    data: *mut u8,
}

const _: () = assert!(MAX_RUN_PAGES <= u64::BITS as usize, "a bit for each page of a run");

impl Run<'_> {
    /// The parts between gaps: the place of the first page in the run, and the frames.
    fn parts(&self) -> impl Iterator<Item = (usize, &[FrameId])> {
        let mut loading = self.loading;
        std::iter::from_fn(move || {
            let start = loading.trailing_zeros() as usize;
            let end = start + loading.checked_shr(start as u32)?.trailing_ones() as usize;
            loading = loading.checked_shr(end as u32).map_or(0, |rest| rest << end);
            Some((start, &self.frames[start..end]))
        })
    }

    /// The pages of a part, with their frames.
    fn part(&self, start: usize, frames: &[FrameId]) -> impl Iterator<Item = (u64, FrameId)> {
        (self.pages.start + start as u64..).zip(frames.iter().copied())
    }
}

/// The pages of a batch: ranges in the given order.
pub(crate) struct Pages<'a> {
    ranges: &'a [Range<u64>],
    current: Range<u64>,
}

impl<'a> Pages<'a> {
    pub fn new(ranges: &'a [Range<u64>]) -> Pages<'a> {
        Pages { ranges, current: 0..0 }
    }

    fn peek(&mut self) -> Option<u64> {
        while self.current.is_empty() {
            let (first, rest) = self.ranges.split_first()?;
            self.current = first.clone();
            self.ranges = rest;
        }
        Some(self.current.start)
    }

    fn advance(&mut self) {
        self.current.start += 1;
    }
}

/// A batch of loads. See the module documentation.
struct LoadBatch<'a, M: PageMemory> {
    store: &'a Store<M>,
    pages: Pages<'a>,
    runs: Vec<Option<Run<'a>>>,
    free_runs: Vec<usize>,
    in_flight: usize,
    /// Whether to wait for a missing frame. False for a background hint.
    patient: bool,
    /// How many pages may still be loaded.
    most: usize,
    /// If it is no hint, the pages that another thread was working on, and those of failed transfers.
    missed: Vec<u64>,
    failed: Option<(u64, Refused)>,
}

impl<M: PageMemory> Store<M> {
    fn load_batch<'a>(&'a self, ranges: &'a [Range<u64>], patient: bool) -> LoadBatch<'a, M> {
        LoadBatch {
            store: self,
            pages: Pages::new(ranges),
            runs: vec![],
            free_runs: vec![],
            in_flight: 0,
            patient,
            most: usize::MAX,
            missed: vec![],
            failed: None,
        }
    }

    /// Has a worker load absent pages of `runs`, as a hint.
    pub fn hint(&self, runs: Vec<Range<u64>>) {
        let most_pages = self.pool().capacity() as u64;
        self.engine.jobs.push_hint(Hint { store: self.id, runs }, most_pages);
    }

    /// Loads absent pages of `ranges`, as a hint.
    pub fn load_hinted(&self, ranges: &[Range<u64>]) {
        let mut batch = self.load_batch(ranges, false);
        let lengths = ranges.iter().map(|range| range.end.saturating_sub(range.start));
        let named = lengths.fold(0, u64::saturating_add);
        let pool = self.pool();
        if named > pool.capacity() as u64 {
            batch.most = pool.free().max(pool.capacity() / 2);
        }
        batch.run();
    }
}

/// After a panic of the device nothing is in flight, and uncompleted pages were not loaded.
impl<M: PageMemory> Drop for LoadBatch<'_, M> {
    fn drop(&mut self) {
        self.fail_unfinished();
    }
}

impl<M: PageMemory> LoadBatch<'_, M> {
    fn run(&mut self) {
        let store = self.store;
        let device = store.device();
        duties::loading(&store.height, store.pool(), 0, || {
            device.run(self, device.queue_depth());
        });
        self.fail_unfinished();
    }

    /// Notes a page that the batch leaves to be looked at again.
    fn miss(&mut self, page: u64) {
        if self.patient {
            self.missed.push(page);
        }
    }

    /// Fails the transfers that the device did not complete before it returned.
    fn fail_unfinished(&mut self) {
        let store = self.store;
        self.free_runs.clear();
        self.in_flight = 0;
        for run in std::mem::take(&mut self.runs).into_iter().flatten() {
            count(&store.engine.counters.prefetched, u64::from(run.loading.count_ones()));
            for (start, frames) in run.parts() {
                for (page, frame) in run.part(start, frames) {
                    store.give_up(page, frame);
                    self.miss(page);
                }
            }
            let unfinished = DeviceError::Unfinished {
                operation: IoOperation::Read,
                offset_bytes: store.geometry.offset_of(run.pages.start),
                len_bytes: store.geometry.bytes_in(run.pages.clone()),
            };
            self.failed.get_or_insert((run.pages.start, Refused::Device(unfinished)));
        }
    }
}

impl<'a, M: PageMemory> LoadBatch<'a, M> {
    /// A frame for `page`. Does not wait while transfers are in flight: their completions come
    /// first.
    fn frame(&mut self, page: u64) -> Option<FrameId> {
        let store = self.store;
        if let Some(frame) = store.pool().take(store.key(page)) {
            return Some(frame);
        }
        if self.in_flight > 0 || !self.patient {
            store.engine.evict(store.pool(), MAX_RUN_PAGES, Cleaning::No);
            return store.pool().take(store.key(page));
        }
        match store.engine.acquire(store.pool(), store.key(page)) {
            Ok(frame) => Some(frame),
            Err(no_frame) => {
                self.failed.get_or_insert((page, Refused::NoFrame(no_frame)));
                None
            }
        }
    }

    /// Whether the batch is a hint and its store is about to be detached.
    fn is_unwanted(&self) -> bool {
        !self.patient && self.store.leaving.load(Ordering::Relaxed)
    }

    fn bounce(&self) -> Option<Bounce<'a>> {
        let pool = &self.store.engine.bounce;
        if self.in_flight == 0 { Some(pool.take()) } else { pool.try_take() }
    }

    /// Starts loading the next absent page and its absent neighbours.
    fn begin_run(&mut self) -> Option<Run<'a>> {
        let store = self.store;
        loop {
            let page = self.pages.peek()?;
            if self.failed.is_some() || self.most == 0 || self.is_unwanted() {
                return None;
            }
            if store.height.is_under_itself() {
                self.failed = Some((page, Refused::UnderItself));
                return None;
            }
            let seen = store.word(page).load();
            if seen.state() != State::Absent {
                self.pages.advance();
                if !seen.is_readable() {
                    self.miss(page);
                } else if self.patient {
                    store.pool().hit(seen.frame());
                }
                continue;
            }
            let frame = self.frame(page)?;
            let Some(bounce) = self.bounce() else {
                store.pool().give(&[frame]);
                return None;
            };
            self.pages.advance();
            if store.word(page).begin_load(seen).is_err() {
                store.pool().give(&[frame]);
                self.miss(page);
                continue;
            }
            let mut frames = [frame; MAX_RUN_PAGES];
            let (mut count, mut loading) = (1, 1_u64);
            let region_end = store.geometry.pages_of_region(store.geometry.region_of(page)).end;
            let most =
                (store.engine.bounce.buffer_bytes() / store.geometry.page_bytes).min(MAX_RUN_PAGES);
            while let Some(next) = self.pages.peek()
                && (page + count as u64..=page + count as u64 + GAP_PAGES).contains(&next)
                && next < region_end.min(page + most as u64)
                && (loading.count_ones() as usize) < self.most
                && let Some(extra) = store.begin_extra(next)
            {
                count = (next - page) as usize + 1;
                frames[count - 1] = extra;
                loading |= 1 << (count - 1);
                self.pages.advance();
            }
            let landing = (count == 1).then(|| store.memory.landing(frame)).flatten();
            let (data, bounce) = match landing {
                Some(landing) => (landing, None),
                None => (bounce.as_ptr(), Some(bounce)),
            };
            duties::takes(loading.count_ones() as usize);
            self.most -= loading.count_ones() as usize;
            return Some(Run { pages: page..page + count as u64, frames, loading, bounce, data });
        }
    }

    /// Checks what was read, and fills up the last page.
    fn check(&self, run: &Run<'a>, got: usize) -> std::result::Result<(), Refused> {
        if self.store.height.is_under_itself() {
            return Err(Refused::UnderItself);
        }
        let geometry = self.store.geometry;
        let wanted = geometry.bytes_in(run.pages.clone());
        check_length(geometry.offset_of(run.pages.start), wanted, got)?;
        let whole = (run.pages.end - run.pages.start) as usize * geometry.page_bytes;
        if wanted < whole {
            // SAFETY: the buffer holds `whole` bytes and the transfer has ended.
            unsafe { std::ptr::write_bytes(run.data.add(wanted), 0, whole - wanted) };
        }
        Ok(())
    }
}

// SAFETY: buffers are kept in `runs` until their completion, and the pages are Loading, so no other
// thread accesses them.
unsafe impl<M: PageMemory> Batch for LoadBatch<'_, M> {
    fn next(&mut self) -> Option<Request> {
        let run = self.begin_run()?;
        let geometry = self.store.geometry;
        let wanted = geometry.bytes_in(run.pages.clone());
        let whole = (run.pages.end - run.pages.start) as usize * geometry.page_bytes;
        let request = Request {
            operation: IoOperation::Read,
            offset_bytes: geometry.offset_of(run.pages.start),
            memory: run.data,
            len_bytes: wanted.next_multiple_of(self.store.device().alignment_bytes()).min(whole),
            tag: 0,
        };
        self.in_flight += 1;
        let tag = match self.free_runs.pop() {
            Some(tag) => {
                self.runs[tag] = Some(run);
                tag
            }
            None => {
                self.runs.push(Some(run));
                self.runs.len() - 1
            }
        };
        Some(Request { tag: tag as u64, ..request })
    }

    fn complete(&mut self, tag: u64, result: std::result::Result<usize, DeviceError>) {
        let run = self.runs.get_mut(tag as usize).and_then(Option::take);
        let run = run.expect("a device completes the transfers that it took, each once");
        self.in_flight -= 1;
        self.free_runs.push(tag as usize);
        let store = self.store;
        let pages = run.loading.count_ones();
        duties::gives_back(pages as usize);
        count(&store.engine.counters.prefetched, u64::from(pages));
        // A run lies in one region. Held until the pages leave Loading, as in `Store::finish`: the
        // exclusive holder of the gate assumes that a Loading page is not installed, and discards
        // across it.
        let region = store.geometry.region_of(run.pages.start);
        let _gate = M::PROTECTS.then(|| store.gates.shared(region));
        let checked = result.map_err(Refused::Device).and_then(|got| self.check(&run, got));
        let is_whole = checked.is_ok();
        if let Err(refused) = checked {
            self.failed.get_or_insert((run.pages.start, refused));
        }
        for (start, frames) in run.parts() {
            let first = run.pages.start + start as u64;
            let data = run.data.wrapping_add(start * store.geometry.page_bytes);
            // SAFETY: the buffer holds the run, and this batch is loading the pages of the part.
            let install = || unsafe { store.install(first, frames, data, true) };
            let installed = if is_whole { install().map_err(Refused::Kernel) } else { Ok(()) };
            for (page, frame) in run.part(start, frames) {
                if is_whole && installed.is_ok() {
                    store.hold(page, frame, false);
                    store.word(page).finish_load(frame, false, None);
                } else {
                    store.give_up(page, frame);
                    self.miss(page);
                }
            }
            if let Err(refused) = installed {
                self.failed.get_or_insert((first, refused));
            }
        }
        drop(run.bounce);
    }
}

impl<M: PageMemory> Store<M> {
    /// Loads the pages of `ranges`, each once, and waits for pages that other threads are loading. An
    /// error names a page that cannot be read.
    pub fn touch_many(&self, ranges: &[Range<u64>]) -> std::result::Result<(), (u64, Refused)> {
        if self.height.is_in_a_refused_call() {
            let first = ranges.first().map_or(0, |range| range.start);
            return Err((first, Refused::UnderItself));
        }
        let mut batch = self.load_batch(ranges, true);
        loop {
            batch.run();
            match batch.failed.take() {
                // A failed transfer may cover many pages: the loop below finds the bad ones.
                None | Some((_, Refused::Device(_))) => {}
                Some(failed) => return Err(failed),
            }
            let mut missed = std::mem::take(&mut batch.missed);
            missed.sort_unstable();
            // If the batch ended early, its next page as well: it goes on.
            missed.extend(batch.pages.peek());
            for page in missed {
                self.ensure(page, Access::Read, None, false).map_err(|refused| (page, refused))?;
            }
            if batch.pages.peek().is_none() {
                return Ok(());
            }
        }
    }
}
