//! Visits at their limits: endless iterators, stores of the closure, writers beside the visit, no
//! free frames, files of other users, and handles that go with the closure.

#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges, some of one")]

use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::ControlFlow::{Break, Continue};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::*;
use crate::support::{Late, Liar, memory};
use aquifer_cache::{Backend, Cache, CacheError, MapOptions, MappingMut, PageId, Visited};
use aquifer_device::{Batch, Device, DeviceError, FileDevice, MemoryDevice, run_one};

const LEN: u64 = 20 * MIB;
const BUDGET: u64 = 8 * MIB;

on_both_backends! {
    fn an_iterator_without_end_is_asked_for_a_bounded_number_ahead(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(BUDGET);
        let mapping = file.map(&cache, backend);
        mapping.touch(0).unwrap();
        let absent = 10 * MIB..10 * MIB + 400;
        // Ranges in memory behind one that is not, and one range that is not again and again.
        for again in [0..400, absent.clone()] {
            let asked = Cell::new(0);
            let endless = std::iter::once(absent.clone()).chain(std::iter::repeat(again)).inspect(|_| {
                asked.set(asked.get() + 1);
                assert!(asked.get() < 1_000_000, "asked without end");
            });
            let mut visits = 0;
            mapping.visit_in_order(endless, |_| {
                visits += 1;
                if visits == 100_000 { Break(()) } else { Continue(()) }
            }).unwrap();
            assert_eq!(visits, 100_000);
            mapping.advise(10 * MIB..11 * MIB, aquifer_cache::Advice::DontNeed).unwrap();
        }
    }

    fn ranges_in_memory_wait_for_one_that_is_not(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(BUDGET);
        let mapping = file.map(&cache, backend);
        mapping.touch_many(&[0..10 * PAGE]).unwrap();
        let far = |row: u64| 5 * MIB + row * 100_000;
        let rows: Vec<Range<u64>> = (0..40)
            .flat_map(|row| [far(row)..far(row) + 10, row % 10 * PAGE..row % 10 * PAGE + 9])
            .collect();
        let mut order = vec![];
        mapping.visit_in_order(rows.clone(), |one| {
            assert_eq!(one.offset_bytes, rows[one.index].start);
            assert_eq!(one.bytes.get::<u8>(3), byte_at(one.offset_bytes + 3));
            order.push(one.index);
            Continue(())
        }).unwrap();
        assert!(order.iter().copied().eq(0..80), "{order:?}");
    }

    fn the_last_handle_may_go_with_the_closure(backend) {
        // A visit that waits for itself would hold the cache's threads: neither is ever dropped.
        let file: &TestFile = Box::leak(Box::new(TestFile::new(MIB)));
        let cache: &Cache = Box::leak(Box::new(cache_of(BUDGET)));
        let mapping = Arc::new(file.map(cache, backend));
        let inside = mapping.clone();
        let sum = Arc::new(AtomicU64::new(0));
        let adds = sum.clone();
        let coming = mapping.visit_many_async([0..10, 500_000..500_020], move |one| {
            wait_until("the other handle is dropped", || Arc::strong_count(&inside) == 1);
            adds.fetch_add(one.bytes.len() as u64, Ordering::Relaxed);
            Continue(())
        });
        drop(mapping);
        let is_over = Arc::new(AtomicBool::new(false));
        let over = is_over.clone();
        std::thread::spawn(move || {
            block_on(coming).unwrap();
            over.store(true, Ordering::Release);
        });
        wait_until("the visit has ended", || is_over.load(Ordering::Acquire));
        assert_eq!(sum.load(Ordering::Relaxed), 30);
    }
}

fn map_of(cache: &Cache) -> MappingMut {
    cache.map_mut(memory(MIB as usize, 1).0).unwrap()
}

#[test]
fn the_closure_sees_its_own_stores_to_ranges_that_come_later() {
    for in_order in [false, true] {
        let cache = cache_of(BUDGET);
        let mapping = map_of(&cache);
        // In one run: two ranges of a page, the next page, one a page apart, one over two pages.
        let rows =
            [0..8, 100..108, PAGE..PAGE + 8, 3 * PAGE..3 * PAGE + 8, 5 * PAGE - 4..5 * PAGE + 4];
        let mut seen = vec![];
        let look = |one: Visited<'_>| {
            if one.index == 0 {
                for row in &rows[1..] {
                    mapping.set(row.start, 0x1122_3344_5566_7788_u64).unwrap();
                }
            } else {
                seen.push((one.index, one.bytes.get::<u64>(0)));
            }
            Continue(())
        };
        if in_order {
            mapping.visit_in_order(rows.clone(), look).unwrap();
        } else {
            mapping.visit_many(rows.clone(), look).unwrap();
        }
        assert!(
            seen.iter().copied().eq((1..5).map(|row| (row, 0x1122_3344_5566_7788))),
            "{seen:x?}"
        );
    }
}

#[test]
fn a_run_is_read_again_after_a_write_back_beside_it() {
    // While the run is read, another thread stores to another page of its region and flushes it: the
    // count of write-backs changes, and the run is not known to be current.
    let write: Arc<std::sync::Mutex<Option<Arc<MappingMut>>>> = Arc::default();
    let armed = write.clone();
    let reads = Arc::new(AtomicU64::new(0));
    let counted = reads.clone();
    let read = move |offset_bytes| {
        counted.fetch_add(1, Ordering::Relaxed);
        if offset_bytes != 0 {
            return;
        }
        if let Some(mapping) = armed.lock().unwrap().take() {
            let change = move || {
                mapping.set(100 * PAGE, 77_u8).unwrap();
                mapping.flush_all().unwrap();
            };
            std::thread::spawn(change).join().unwrap();
        }
    };
    let cache = cache_of(BUDGET);
    let device = Late { inner: MemoryDevice::new(MIB as usize).unwrap(), read };
    let mapping = Arc::new(cache.map_mut(device).unwrap());
    *write.lock().unwrap() = Some(mapping.clone());
    let mut visits = 0;
    mapping
        .visit_many((0..16).map(|page| page * PAGE..page * PAGE + 8), |_| {
            visits += 1;
            Continue(())
        })
        .unwrap();
    assert!(write.lock().unwrap().is_none(), "the read was intercepted");
    assert_eq!(visits, 16);
    // The run twice, and the page of the other thread.
    assert_eq!(reads.load(Ordering::Relaxed), 3);
}

#[test]
fn a_visit_needs_no_frame() {
    let (device, bytes) = memory(LEN as usize, 3);
    let cache = cache_of(BUDGET);
    let pages = cache.pages(device).unwrap();
    let mut pinned = vec![];
    let refused = loop {
        match pages.get(PageId(pinned.len() as u64)) {
            Ok(guard) => pinned.push(guard),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, CacheError::Exhausted { .. }), "{refused}");
    let all = || (0..pages.page_count()).map(PageId);
    for in_order in [false, true] {
        let mut visits = 0;
        let look = |page: PageId, content: &[u8]| {
            let start = page.0 as usize * 4096;
            assert!(content == &bytes[start..start + 4096], "{page:?}");
            visits += 1;
            Continue(())
        };
        if in_order {
            pages.visit_in_order(all(), look).unwrap();
        } else {
            pages.visit_many(all(), look).unwrap();
        }
        assert_eq!(visits, pages.page_count());
    }
    assert!(cache.stats().is_consistent());
}

#[test]
fn pages_are_visited_on_a_worker() {
    let (device, bytes) = memory(LEN as usize, 4);
    let cache = cache_of(BUDGET);
    let pages = cache.pages(device).unwrap();
    let found = Arc::new(std::sync::Mutex::new(vec![]));
    let adds = found.clone();
    let visit = pages.visit_many_async(
        (0..300).rev().map(|page| PageId(page * 7)),
        move |page, content| {
            let start = page.0 as usize * 4096;
            assert!(content == &bytes[start..start + 4096], "{page:?}");
            adds.lock().unwrap().push(page.0);
            if page.0 == 7 * 299 { Break(()) } else { Continue(()) }
        },
    );
    block_on(visit).unwrap();
    let mut found = std::mem::take(&mut *found.lock().unwrap());
    found.sort_unstable();
    assert!(found.iter().copied().eq((0..300).map(|page| page * 7)), "{found:?}");
    let outside = block_on(pages.visit_many_async([PageId(1 << 30)], |_, _| Continue(())));
    assert!(matches!(outside, Err(CacheError::OutOfBounds { .. })));
    assert!(cache.stats().is_consistent());
}

#[test]
fn a_visit_in_order_keeps_what_fits_in_the_page_cache() {
    let file = TestFile::new(LEN);
    if !file.is_on_storage() || file.cached_bytes() != Some(0) {
        eprintln!("skipped: the file system or the kernel does not tell");
        return;
    }
    let cache = cache_of(8 * LEN);
    let mapping = file.map(&cache, Backend::Kernel);
    let rows = (0..LEN / 5000).map(|row| row * 5000..row * 5000 + 100);
    let mut visits = 0;
    mapping
        .visit_in_order(rows, |one| {
            assert_eq!(
                (one.index, one.bytes.get::<u8>(7)),
                (visits, byte_at(one.offset_bytes + 7))
            );
            visits += 1;
            Continue(())
        })
        .unwrap();
    assert_eq!(visits as u64, LEN / 5000);
    let cached = file.cached_bytes().unwrap();
    assert!(cached > LEN / 2, "{cached}");
}

/// A file that counts its reads past the page cache.
struct CountedFile {
    inner: FileDevice,
    reads: Arc<AtomicU64>,
    read_bytes: Arc<AtomicU64>,
}

impl CountedFile {
    fn open(path: &Path) -> CountedFile {
        let inner = FileDevice::open(path).unwrap();
        CountedFile { inner, reads: Arc::default(), read_bytes: Arc::default() }
    }
}

impl Device for CountedFile {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn len_bytes(&self) -> Result<u64, DeviceError> {
        self.inner.len_bytes()
    }
    fn alignment_bytes(&self) -> usize {
        self.inner.alignment_bytes()
    }
    fn is_writable(&self) -> bool {
        false
    }
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        self.inner.read_at(offset_bytes, buffer)
    }
    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        self.inner.write_at(offset_bytes, buffer)
    }
    fn sync(&self) -> Result<(), DeviceError> {
        self.inner.sync()
    }
    fn page_cache_file(&self) -> Option<BorrowedFd<'_>> {
        self.inner.page_cache_file()
    }
    fn access_path(&self) -> String {
        self.inner.access_path()
    }
}

#[test]
fn runs_of_a_file_of_another_user_are_read_together() {
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root can become another user");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    write_file(&path, LEN);
    for (path, mode) in [(directory.path(), 0o755), (&*path, 0o444)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let visit = move || {
        // The system call concerns only this thread, and the threads that it starts.
        // SAFETY: it changes credentials only.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
        assert_eq!(changed, 0);
        let cache = cache_of(BUDGET);
        let device = CountedFile::open(&path);
        let reads = device.reads.clone();
        let options = MapOptions::new().backend(Backend::Kernel);
        let mapping = cache.map_with(device, options).unwrap();
        let mut visits = 0;
        mapping
            .visit_many((0..LEN / PAGE).map(|page| page * PAGE..page * PAGE + 8), |one| {
                assert_eq!(one.bytes.get::<u8>(7), byte_at(one.offset_bytes + 7));
                visits += 1;
                Continue(())
            })
            .unwrap();
        assert_eq!(visits, LEN / PAGE);
        let reads = reads.load(Ordering::Relaxed);
        assert!((1..LEN / PAGE / 4).contains(&reads), "{reads} reads past the page cache");
    };
    std::thread::spawn(visit).join().unwrap();
}

#[test]
fn of_the_pages_of_rows_only_their_sectors_are_read_past_the_page_cache() {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let file = TestFile::new(LEN);
        if !file.is_on_storage() || file.cached_bytes() != Some(0) {
            eprintln!("skipped: the file system or the kernel does not tell");
            return;
        }
        let device = CountedFile::open(&file.directory.path().join("data"));
        let (reads, read_bytes) = (device.reads.clone(), device.read_bytes.clone());
        let unit = device.alignment_bytes() as u64;
        let cache = cache_of(BUDGET);
        let mapping = cache.map_with(device, MapOptions::new().backend(Backend::Kernel)).unwrap();
        // The budget is full afterwards.
        let pages = (0..LEN / 2 / PAGE).map(|page| page * PAGE..page * PAGE + 8);
        mapping.visit_many(pages, |_| Continue(())).unwrap();
        reads.store(0, Ordering::Relaxed);
        read_bytes.store(0, Ordering::Relaxed);
        // Each lies across the border of two units; the last one ends with the file.
        let starts = (LEN / 2 + 2 * PAGE - 4..LEN - 8).step_by(64 << 10).chain([LEN - 8]);
        let rows: Vec<_> = starts.map(|start| start..start + 8).collect();
        let mut visits = 0;
        mapping
            .visit_many(rows.clone(), |one| {
                assert_eq!(one.bytes.get::<u8>(5), byte_at(one.offset_bytes + 5));
                visits += 1;
                Continue(())
            })
            .unwrap();
        assert_eq!(visits, rows.len());
        let (reads, bytes) = (reads.load(Ordering::Relaxed), read_bytes.load(Ordering::Relaxed));
        assert!(bytes <= reads * 2 * unit, "{bytes} bytes in {reads} reads");
        if reads > 0 {
            break;
        }
        // The cache has dropped pages in the meantime: there was room.
        assert!(Instant::now() < deadline, "nothing was read past the page cache");
    }
}

/// A device that takes all requests that it can get before it performs the first.
struct Queue(MemoryDevice);

impl Device for Queue {
    fn name(&self) -> &str {
        "queue"
    }
    fn len_bytes(&self) -> Result<u64, DeviceError> {
        self.0.len_bytes()
    }
    fn is_writable(&self) -> bool {
        true
    }
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        self.0.read_at(offset_bytes, buffer)
    }
    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        self.0.write_at(offset_bytes, buffer)
    }
    fn sync(&self) -> Result<(), DeviceError> {
        self.0.sync()
    }
    fn run(&self, batch: &mut dyn Batch, _depth: usize) {
        let mut taken = VecDeque::new();
        loop {
            taken.extend(std::iter::from_fn(|| batch.next()));
            let Some(request) = taken.pop_front() else { return };
            batch.complete(request.tag, run_one(self, &request));
        }
    }
    fn access_path(&self) -> String {
        "memory".into()
    }
}

#[test]
fn ranges_in_memory_are_visited_while_others_are_read() {
    let cache = cache_of(BUDGET);
    let mapping = cache.map_mut(Queue(MemoryDevice::new(LEN as usize).unwrap())).unwrap();
    mapping.touch_many(&[0..2 * PAGE]).unwrap();
    let mut order = vec![];
    let ranges = [0..10, 5 * MIB..5 * MIB + 10, PAGE..PAGE + 10, 9 * MIB..9 * MIB + 10];
    mapping
        .visit_many(ranges, |one| {
            order.push(one.index);
            Continue(())
        })
        .unwrap();
    assert_eq!(order, [0, 2, 1, 3]);
    // More than are set aside at once, and none that is read.
    mapping.touch_many(&[0..5 * MIB]).unwrap();
    let all: Vec<_> = (0..500_000).map(|row| row * 10..row * 10 + 10).collect();
    let mut visits = 0;
    mapping
        .visit_many(all, |one| {
            assert_eq!(one.index, visits);
            visits += 1;
            Continue(())
        })
        .unwrap();
    assert_eq!(visits, 500_000);
}

#[test]
fn ranges_that_the_device_leaves_out_are_an_error() {
    for (runs, in_order) in (0..3).flat_map(|runs| [(runs, false), (runs, true)]) {
        let device = Liar { len_bytes: 4 * MIB, claims_more: false, runs };
        let mapping = cache_of(BUDGET).map(device).unwrap();
        let rows = [0, 1, 2, 3].map(|row| row * MIB..row * MIB + 100);
        let mut visits = 0;
        let look = |_: Visited<'_>| {
            visits += 1;
            Continue(())
        };
        let ended = match in_order {
            true => mapping.visit_in_order(rows, look),
            false => mapping.visit_many(rows, look),
        };
        let CacheError::Load { offset_bytes, source, .. } = ended.unwrap_err() else { panic!() };
        assert!(matches!(source, DeviceError::Unfinished { .. }), "{source}");
        assert_eq!((visits, offset_bytes), (runs, runs as u64 * MIB));
    }
}
