//! Several threads perform all operations on shared pages at once, under eviction, resizes and
//! device errors. Each thread knows at any time what its own bytes must be, in memory and, after a
//! flush, on the device.
//!
//! Reads fail only in the last quarter of the device, where there are no bare accesses, because a
//! failed one would end the process. Writes fail anywhere.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use aquifer_cache::policy::PolicyKind;
use aquifer_cache::{Advice, Cache, CacheError, MappingMut, PageId, Pages};
use aquifer_device::{
    AlignedBuffer, Device, Fault, FaultControl, FaultRule, FaultTarget, Faulty, FileDevice,
    MemoryDevice, Trigger,
};
use aquifer_testkit::rng::Rng;
use aquifer_testkit::stripes::{BLOCK_BYTES, Stripes};

use crate::support::{block_on, content, random_bytes, seed, steps, wait_until};

const THREADS: usize = 3;

#[derive(Debug, Clone, Copy)]
enum Medium {
    Memory,
    Ring,
    Threads,
}

#[derive(Debug, Clone, Copy)]
struct Setup {
    page_bytes: usize,
    policy: PolicyKind,
    vectored: bool,
    medium: Medium,
}

/// Every page size, policy, medium and form of discard, in varying combinations.
fn setups() -> Vec<Setup> {
    let media = [Medium::Memory, Medium::Ring, Medium::Threads];
    let mut setups = vec![];
    for (index, &policy) in PolicyKind::all().iter().enumerate() {
        for (turn, vectored) in [(0, true), (1, false)] {
            let page_bytes = match (index + turn) % 6 {
                2 => 16 << 10,
                5 => 64 << 10,
                _ => 4096,
            };
            setups.push(Setup { page_bytes, policy, vectored, medium: media[(index + turn) % 3] });
        }
    }
    setups
}

/// The cache and devices of a run.
struct Rig {
    cache: Cache,
    /// The device below the fault injection.
    inner: Arc<dyn Device>,
    device: Arc<dyn Device>,
    control: FaultControl,
    bytes: Vec<u8>,
    page_bytes: usize,
    min_budget_bytes: u64,
    seed: u64,
    _file: Option<tempfile::NamedTempFile>,
}

impl Rig {
    fn new(setup: Setup, seed: u64) -> Rig {
        let min_budget_bytes = (256 * setup.page_bytes as u64).max(6 << 20);
        // Not a whole number of pages.
        let len = 3 * min_budget_bytes as usize + 1234;
        let bytes = random_bytes(len, seed);
        let mut file = None;
        let inner: Arc<dyn Device> = match setup.medium {
            Medium::Memory => Arc::new(MemoryDevice::from_bytes(&bytes).unwrap()),
            Medium::Ring | Medium::Threads => {
                let temporary = file.insert(tempfile::NamedTempFile::new().unwrap());
                std::fs::write(temporary.path(), &bytes).unwrap();
                let options = FileDevice::options().writable(true);
                let options = options.io_uring(matches!(setup.medium, Medium::Ring));
                Arc::new(options.open(temporary.path()).unwrap())
            }
        };
        let mut builder = Cache::builder()
            .budget_bytes(2 * min_budget_bytes)
            .page_bytes(setup.page_bytes)
            .policy(setup.policy);
        if !setup.vectored {
            builder = builder.without_vectored_discard();
        }
        let faulty = Faulty::new(inner.clone());
        let control = faulty.control();
        let cache = builder.build().unwrap();
        Rig {
            cache,
            inner,
            device: Arc::new(faulty),
            control,
            bytes,
            page_bytes: setup.page_bytes,
            min_budget_bytes,
            seed,
            _file: file,
        }
    }

    /// The range where reads may fail.
    fn bad_zone(&self) -> Range<usize> {
        self.bytes.len() / 4 * 3..self.bytes.len()
    }

    fn stripes(&self) -> Vec<Stripes> {
        (0..THREADS).map(|thread| Stripes::new(thread, THREADS, self.bytes.clone())).collect()
    }

    /// Switches faults on and off and resizes until the workers are done. It touches no mapped
    /// memory, so that it keeps running when all workers wait for a frame that only a working
    /// device can free.
    fn disturb(&self, done: &AtomicUsize, progress: &AtomicUsize) {
        let mut rng = Rng::new(self.seed ^ 0xd157);
        let bad = self.bad_zone();
        let zone = bad.start as u64..bad.end as u64;
        while done.load(Ordering::SeqCst) < THREADS {
            self.control.clear();
            if rng.chance(0.5) {
                let trigger = Trigger::Probability { probability: 0.4, seed: rng.next_u64() };
                let errno = if rng.chance(0.5) { libc::ENOSPC } else { libc::EIO };
                let rule = FaultRule::new(FaultTarget::Writes, Fault::Errno(errno));
                self.control.inject(rule.trigger(trigger));
            }
            if rng.chance(0.5) {
                let trigger = Trigger::Probability { probability: 0.3, seed: rng.next_u64() };
                let rule = FaultRule::new(FaultTarget::Reads, Fault::Errno(libc::EIO));
                self.control.inject(rule.range(zone.clone()).trigger(trigger));
            }
            if rng.chance(0.3) {
                let budget = self.min_budget_bytes * (2 + rng.below(4)) / 2;
                self.cache.resize(budget).unwrap();
            }
            let until = progress.load(Ordering::Relaxed) + rng.below(600) as usize;
            for _ in 0..2_000 {
                if progress.load(Ordering::Relaxed) >= until {
                    break;
                }
                std::thread::yield_now();
            }
        }
        self.control.clear();
    }

    /// Runs one `worker` per thread, disturbed, and returns what the bytes must be afterwards.
    fn run(&self, worker: impl Fn(&mut Worker<'_>) + Sync) -> Vec<u8> {
        let (done, progress) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let failed = AtomicBool::new(false);
        let mut views = self.stripes();
        std::thread::scope(|scope| {
            for (thread, own) in views.iter_mut().enumerate() {
                let (done, progress, failed, worker) = (&done, &progress, &failed, &worker);
                scope.spawn(move || {
                    let _done = CountDown(done, failed);
                    let rng = Rng::new(self.seed.wrapping_mul(31) + thread as u64);
                    let mut own = Worker { rig: self, own, rng };
                    for _ in 0..steps(1_200) {
                        if failed.load(Ordering::Relaxed) {
                            break;
                        }
                        worker(&mut own);
                        progress.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            self.disturb(&done, &progress);
        });
        Stripes::merge(&views)
    }

    /// After faults and workers have ended: everything can be written, and all figures add up.
    fn finish(&self, expected: &[u8], what: &str) {
        assert!(content(&*self.inner) == expected, "{what}: the device differs from the model");
        let stats = || self.cache.stats();
        assert_eq!(stats().dirty_pages, 0, "{what}");
        wait_until("figures that add up", || stats().is_consistent());
        // A pinned page would keep the shrink from completing.
        self.cache.resize(self.min_budget_bytes).unwrap();
        wait_until("the end of a shrink: is a page pinned?", || !self.cache.is_shrinking());
        assert!(stats().resident_pages * stats().page_bytes <= self.min_budget_bytes, "{what}");
    }
}

/// Signals that a worker has ended and, if it panicked, that the others may end as well.
struct CountDown<'a>(&'a AtomicUsize, &'a AtomicBool);

impl Drop for CountDown<'_> {
    fn drop(&mut self) {
        self.1.fetch_or(std::thread::panicking(), Ordering::SeqCst);
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

struct Worker<'a> {
    rig: &'a Rig,
    own: &'a mut Stripes,
    rng: Rng,
}

impl Worker<'_> {
    fn below(&mut self, bound: usize) -> usize {
        self.rng.below(bound as u64) as usize
    }

    /// A range within one of the thread's own blocks, often in frequently used pages.
    fn place(&mut self, limit: usize) -> Range<usize> {
        let page = self.rig.page_bytes;
        let pages = limit / page;
        let number =
            if self.rng.chance(0.3) { self.below(20) * pages / 20 } else { self.below(pages) };
        let index = self.below(page / BLOCK_BYTES / THREADS);
        let (at, len) = self.own.block(number * page, index);
        let skip = self.below(len.max(1));
        let take = self.below(len - skip + 1);
        at + skip..at + skip + take
    }

    /// A range anywhere on the device.
    fn anywhere(&mut self) -> Range<usize> {
        self.place(self.rig.bytes.len())
    }

    /// A range where reads do not fail.
    fn good(&mut self) -> Range<usize> {
        self.place(self.rig.bad_zone().start)
    }

    fn fresh(&mut self, len: usize) -> Vec<u8> {
        random_bytes(len, self.rng.next_u64())
    }

    fn check(&self, at: usize, read: &[u8]) {
        assert!(self.own.agrees_with(at, read), "at {at}+{}: memory differs", read.len());
    }

    /// Checks that after a flush of these bytes the device has the thread's own bytes.
    fn check_device(&self, range: Range<usize>) {
        let start = range.start / 4096 * 4096;
        let mut buffer = AlignedBuffer::new((range.end - start).next_multiple_of(4096), 4096);
        self.rig.inner.read_at(start as u64, &mut buffer).unwrap();
        let read = &buffer[range.start - start..range.end - start];
        assert!(
            self.own.agrees_with(range.start, read),
            "{range:?}: the device differs after a flush"
        );
    }

    /// The value, or `None` for an error that the disturbances explain; panics for any other error.
    fn allow<T>(&self, result: Result<T, CacheError>, range: &Range<usize>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(CacheError::Exhausted { .. } | CacheError::TooManyPins { .. }) => None,
            Err(CacheError::Load { offset_bytes, .. }) => {
                let page = self.rig.page_bytes;
                let bad = self.rig.bad_zone().start / page * page;
                let asked = range.start / page * page..range.end.next_multiple_of(page).max(1);
                assert!(offset_bytes as usize >= bad && asked.contains(&(offset_bytes as usize)));
                None
            }
            Err(CacheError::WriteBack { offset_bytes, end_bytes, pages, .. }) => {
                let page = self.rig.page_bytes;
                let asked = range.start / page * page..range.end.next_multiple_of(page);
                assert!(pages > 0 && offset_bytes as usize >= asked.start);
                assert!(end_bytes as usize <= asked.end, "{range:?}: {offset_bytes}..{end_bytes}");
                None
            }
            Err(other) => panic!("{range:?}: {other}"),
        }
    }
}

fn u64s(range: &Range<usize>) -> Range<u64> {
    range.start as u64..range.end as u64
}

// ---- Mapping ------------------------------------------------------------------------------------

#[test]
fn mappings_agree_with_the_model() {
    let seed = seed(1);
    for (index, setup) in setups().into_iter().enumerate() {
        let what = format!("setup {index}: {setup:?}");
        println!("{what}");
        let rig = Rig::new(setup, seed + index as u64);
        let mapping = rig.cache.map_mut(rig.device.clone()).unwrap();
        let expected = rig.run(|worker| step_on_mapping(worker, &mapping));
        mapping.flush_all().unwrap();
        assert!(mapping.read(0..100, |look| look.to_vec()).unwrap() == expected[..100]);
        rig.finish(&expected, &what);
        mapping.advise(0..mapping.len(), Advice::DontNeed).unwrap();
        wait_until("an empty cache: is a page pinned?", || {
            mapping.advise(0..mapping.len(), Advice::DontNeed).unwrap();
            rig.cache.stats().resident_pages == 0
        });
        for at in (0..expected.len()).step_by(setup.page_bytes) {
            assert_eq!(mapping.get::<u8>(at as u64).unwrap(), expected[at], "{what}: at {at}");
        }
    }
}

fn step_on_mapping(worker: &mut Worker<'_>, mapping: &MappingMut) {
    let base = mapping.as_mut_ptr();
    match worker.below(20) {
        0..=3 => {
            let range = worker.good();
            let mut read = vec![0; range.len()];
            for (at, byte) in range.clone().zip(&mut read) {
                // SAFETY: inside the mapping.
                *byte = unsafe { base.add(at).read_volatile() };
            }
            worker.check(range.start, &read);
        }
        4..=6 => {
            let range = worker.good();
            let bytes = worker.fresh(range.len());
            for (at, byte) in range.clone().zip(&bytes) {
                // SAFETY: inside the mapping, and no other thread's bytes.
                unsafe { base.add(at).write_volatile(*byte) };
            }
            worker.own.bytes_mut(range).copy_from_slice(&bytes);
        }
        7 => {
            let range = worker.anywhere();
            let bytes = worker.fresh(range.len());
            let written = mapping.write_all_at(&bytes, range.start as u64);
            if worker.allow(written, &range).is_some() {
                worker.own.bytes_mut(range).copy_from_slice(&bytes);
            }
        }
        8 => {
            let range = worker.anywhere();
            if let Some(at) = range.end.checked_sub(8).filter(|&at| at >= range.start) {
                let value = worker.rng.next_u64();
                let range = at..at + 8;
                if worker.allow(mapping.set(at as u64, value), &range).is_some() {
                    worker.own.bytes_mut(range).copy_from_slice(&value.to_ne_bytes());
                }
            }
        }
        9 => {
            // Across several pages.
            let start = worker.anywhere().start;
            let len = 1 + worker.below(3 * worker.rig.page_bytes);
            let range = start..(start + len).min(worker.rig.bytes.len());
            let mut read = vec![0; range.len()];
            let got = mapping.read_exact_at(&mut read, start as u64);
            if worker.allow(got, &range).is_some() {
                worker.check(start, &read);
            }
        }
        10 => {
            let range = worker.anywhere();
            let got = mapping.read(u64s(&range), |look| look.to_vec());
            if let Some(read) = worker.allow(got, &range) {
                worker.check(range.start, &read);
            }
        }
        11..=12 => {
            let start = worker.anywhere().start;
            let len = 1 + worker.below(8 * worker.rig.page_bytes);
            let range = start..(start + len).min(worker.rig.bytes.len());
            let flushed = if worker.rng.chance(0.2) {
                block_on(mapping.flush_async(u64s(&range)))
            } else {
                mapping.flush(u64s(&range))
            };
            if worker.allow(flushed, &range).is_some() {
                worker.check_device(range);
            }
        }
        13 => {
            let range = worker.anywhere();
            let advice = [
                Advice::Normal,
                Advice::Sequential,
                Advice::Random,
                Advice::WillNeed,
                Advice::DontNeed,
                Advice::Cold,
            ];
            let advice = advice[worker.below(advice.len())];
            mapping.advise(u64s(&range), advice).unwrap();
        }
        14 => {
            let ranges: Vec<_> = (0..1 + worker.below(6)).map(|_| worker.anywhere()).collect();
            let asked: Vec<_> = ranges.iter().map(u64s).collect();
            let all = 0..worker.rig.bytes.len();
            match worker.below(3) {
                0 => mapping.prefetch(&asked).unwrap(),
                1 => drop(worker.allow(mapping.touch_many(&asked), &all)),
                _ => drop(worker.allow(block_on(mapping.touch_many_async(&asked)), &all)),
            }
        }
        15 => {
            let range = worker.anywhere();
            let range = range.start..range.start + 1;
            if range.end <= worker.rig.bytes.len() {
                let touched = if worker.rng.chance(0.5) {
                    mapping.touch(range.start as u64)
                } else {
                    mapping.touch_mut(range.start as u64)
                };
                worker.allow(touched, &range);
            }
        }
        16 => {
            // Pinned for reading, while other operations proceed.
            let range = worker.anywhere();
            if let Some(pinned) = worker.allow(mapping.pin(u64s(&range)), &range) {
                step_on_mapping_unpinned(worker, mapping);
                worker.check(range.start, &pinned.bytes().to_vec());
            }
        }
        17 => {
            // Pinned for writing: stores need no fault, and a flush during the pin writes them.
            let range = worker.anywhere();
            if let Some(pinned) = worker.allow(mapping.pin_mut(u64s(&range)), &range) {
                for _ in 0..2 {
                    let bytes = worker.fresh(range.len());
                    let target = pinned.as_mut_ptr();
                    for (at, byte) in bytes.iter().enumerate() {
                        // SAFETY: pinned for writing, and no other thread's bytes.
                        unsafe { target.add(at).write_volatile(*byte) };
                    }
                    worker.own.bytes_mut(range.clone()).copy_from_slice(&bytes);
                    if worker.allow(mapping.flush(u64s(&range)), &range).is_some() {
                        worker.check_device(range.clone());
                    }
                }
            }
        }
        _ => {
            // A page that many threads access.
            let page = worker.rig.page_bytes;
            let index = worker.below(page / BLOCK_BYTES / THREADS);
            let (at, len) = worker.own.block(page, index);
            let bytes = worker.fresh(len);
            for (at, byte) in (at..at + len).zip(&bytes) {
                // SAFETY: inside the mapping, and no other thread's bytes.
                unsafe { base.add(at).write_volatile(*byte) };
            }
            worker.own.bytes_mut(at..at + len).copy_from_slice(&bytes);
            if worker.rng.chance(0.3) {
                let range = at..at + len;
                if worker.allow(mapping.flush(u64s(&range)), &range).is_some() {
                    worker.check_device(range);
                }
            }
        }
    }
}

/// A step that needs no second pin.
fn step_on_mapping_unpinned(worker: &mut Worker<'_>, mapping: &MappingMut) {
    let range = worker.anywhere();
    if worker.allow(mapping.flush(u64s(&range)), &range).is_some() {
        worker.check_device(range);
    }
}

// ---- Pages --------------------------------------------------------------------------------------

#[test]
fn pages_agree_with_the_model() {
    let seed = seed(100);
    for (index, setup) in setups().into_iter().enumerate().filter(|(_, setup)| setup.vectored) {
        let what = format!("setup {index}: {setup:?}");
        println!("{what}");
        let rig = Rig::new(setup, seed + index as u64);
        let pages = rig.cache.pages(rig.device.clone()).unwrap();
        let expected = rig.run(|worker| step_on_pages(worker, &pages));
        pages.flush_all().unwrap();
        rig.finish(&expected, &what);
        for page in 0..pages.page_count() {
            // Blocks forever if another guard still holds the page.
            let guard = pages.get_mut(PageId(page)).unwrap();
            let start = page as usize * setup.page_bytes;
            let len = setup.page_bytes.min(expected.len() - start);
            assert!(guard[..len] == expected[start..start + len], "{what}: page {page}");
            assert!(guard[len..].iter().all(|&byte| byte == 0), "{what}: behind the end");
        }
    }
}

fn step_on_pages(worker: &mut Worker<'_>, pages: &Pages) {
    let page_bytes = pages.page_bytes();
    let range = worker.anywhere();
    if range.is_empty() {
        return;
    }
    let id = PageId((range.start / page_bytes) as u64);
    let start = id.0 as usize * page_bytes;
    let len = page_bytes.min(worker.rig.bytes.len() - start);
    let whole = start..start + len;
    match worker.below(12) {
        0..=2 => {
            if let Some(guard) = worker.allow(pages.get(id), &whole) {
                worker.check(start, &guard[..len]);
            }
        }
        3..=5 => {
            let bytes = worker.fresh(range.len());
            if let Some(mut guard) = worker.allow(pages.get_mut(id), &whole) {
                worker.check(start, &guard[..len]);
                guard[range.start - start..range.end - start].copy_from_slice(&bytes);
                worker.own.bytes_mut(range).copy_from_slice(&bytes);
                // Access another page while this one is held: a later one, so that no threads
                // deadlock.
                let further = PageId(id.0 + 1 + worker.rng.below(pages.page_count()));
                if further.0 < pages.page_count() {
                    let start = further.0 as usize * page_bytes;
                    let end = (start + page_bytes).min(worker.rig.bytes.len());
                    if let Some(second) = worker.allow(pages.get(further), &(start..end)) {
                        worker.check(start, &second[..end - start]);
                    }
                }
            }
        }
        6 => {
            let read = pages.read(id, |look| look.to_vec());
            if let Some(read) = worker.allow(read, &whole) {
                worker.check(start, &read[..len]);
            }
        }
        7 => {
            let mut read = vec![0; range.len()];
            if worker.allow(pages.read_exact_at(&mut read, range.start as u64), &whole).is_some() {
                worker.check(range.start, &read);
            }
        }
        8 => {
            let mut ids: Vec<_> = (0..1 + worker.below(5))
                .map(|_| PageId(worker.rng.below(pages.page_count())))
                .collect();
            ids.push(id);
            let all = 0..worker.rig.bytes.len();
            match worker.below(4) {
                0 => {
                    if let Some(guards) = worker.allow(pages.get_many(&ids), &all) {
                        for guard in guards {
                            let start = guard.id().0 as usize * page_bytes;
                            let len = page_bytes.min(worker.rig.bytes.len() - start);
                            worker.check(start, &guard[..len]);
                        }
                    }
                }
                1 => drop(worker.allow(pages.load(&ids), &all)),
                2 => drop(worker.allow(block_on(pages.load_async(&ids)), &all)),
                _ => pages.prefetch(id, 1 + worker.rng.below(40)).unwrap(),
            }
        }
        9..=10 => {
            let end = PageId((id.0 + 1 + worker.rng.below(8)).min(pages.page_count()));
            let range = start..(end.0 as usize * page_bytes).min(worker.rig.bytes.len());
            if worker.allow(pages.flush(id..end), &range).is_some() {
                worker.check_device(range);
            }
        }
        _ => {
            // A page that many threads access.
            let index = worker.below(page_bytes / BLOCK_BYTES / THREADS);
            let (at, len) = worker.own.block(page_bytes, index);
            let bytes = worker.fresh(len);
            let whole = page_bytes..2 * page_bytes;
            if let Some(mut guard) = worker.allow(pages.get_mut(PageId(1)), &whole) {
                guard[at - page_bytes..at - page_bytes + len].copy_from_slice(&bytes);
                worker.own.bytes_mut(at..at + len).copy_from_slice(&bytes);
            }
        }
    }
}

// ---- both ---------------------------------------------------------------------------------------

/// A mapping and `Pages` of two devices in one cache, so that the budget moves between them.
#[test]
fn mappings_and_pages_share_a_budget() {
    let seed = seed(200);
    let setup = Setup {
        page_bytes: 4096,
        policy: PolicyKind::S3Fifo,
        vectored: true,
        medium: Medium::Memory,
    };
    let rig = Rig::new(setup, seed);
    let other = Arc::new(MemoryDevice::from_bytes(&rig.bytes).unwrap());
    let mapping = rig.cache.map_mut(rig.device.clone()).unwrap();
    let pages = rig.cache.pages(other.clone()).unwrap();
    let expected = rig.run(|worker| {
        step_on_mapping(worker, &mapping);
        let page = worker.rng.below(pages.page_count());
        let mut guard = pages.get_mut(PageId(page)).unwrap();
        let index = worker.below(4096 / BLOCK_BYTES / THREADS);
        let (at, _) = worker.own.block(page as usize * 4096, index);
        let start = page as usize * 4096;
        if let Some(byte) = guard.get_mut(at.wrapping_sub(start)) {
            *byte = page as u8 | 1;
        }
    });
    mapping.flush_all().unwrap();
    pages.flush_all().unwrap();
    rig.finish(&expected, "both");
    for (page, (now, before)) in other.to_vec().chunks(4096).zip(rig.bytes.chunks(4096)).enumerate()
    {
        for (byte, old) in now.iter().zip(before) {
            assert!(*byte == *old || *byte == page as u8 | 1, "page {page}");
        }
    }
    drop(mapping);
    drop(pages);
    assert_eq!(rig.cache.stats().resident_pages, 0);
}
