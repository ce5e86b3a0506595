//! `visit_many` and `visit_in_order`: every range with its current bytes, whatever else happens.

#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges, some of one")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::ControlFlow::{self, Break, Continue};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::*;
use crate::support::{Hooked, Late, io_error, memory, seed};
use aquifer_cache::{Backend, CacheError, Mapping, PageId, Visited};
use aquifer_device::{Counting, DeviceError, FileDevice, IoOperation, MemoryDevice};
use aquifer_testkit::rng::Rng;

/// Not a whole number of pages.
const LEN: u64 = 20 * MIB + 1234;
const BUDGET: u64 = 8 * MIB;

/// Checks that the pieces of each range arrive, once and with the file's bytes.
struct Expected {
    ranges: Vec<Range<u64>>,
    left: Vec<u64>,
}

impl Expected {
    fn new(ranges: &[Range<u64>]) -> Expected {
        let left = ranges.iter().map(|range| range.end - range.start).collect();
        Expected { ranges: ranges.to_vec(), left }
    }

    fn check(&mut self, visited: Visited<'_>, byte_at: impl Fn(u64) -> u8) -> ControlFlow<()> {
        let len = visited.bytes.len() as u64;
        let range = &self.ranges[visited.index];
        assert!(range.start <= visited.offset_bytes && visited.offset_bytes + len <= range.end);
        assert!(len == range.end - range.start || range.end - range.start > 64 << 10);
        for (at, byte) in (visited.offset_bytes..).zip(visited.bytes.iter()) {
            assert_eq!(byte, byte_at(at), "at {at}");
        }
        self.left[visited.index] -= len;
        Continue(())
    }

    fn all_came(&self) {
        assert!(self.left.iter().all(|&left| left == 0), "{:?}", self.left);
    }
}

/// Ranges of all lengths, in no order, some of them twice, some empty, to the last byte.
fn ranges(len: u64, count: usize, seed: u64) -> Vec<Range<u64>> {
    let mut rng = Rng::new(seed);
    let mut ranges: Vec<Range<u64>> = (0..count)
        .map(|_| {
            let most = [20, 500, 5000, 70_000, 400_000][rng.next_u64() as usize % 5];
            let start = rng.next_u64() % len;
            start..(start + rng.next_u64() % most).min(len)
        })
        .collect();
    ranges.push(len - 3..len);
    ranges.push(0..1);
    ranges.push(ranges[0].clone());
    ranges
}

on_both_backends! {
    fn every_range_is_visited_with_its_bytes(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(BUDGET);
        let mapping = file.map(&cache, backend);
        for pass in 0..3 {
            let ranges = ranges(LEN, 100, seed(7) + pass);
            let mut expected = Expected::new(&ranges);
            mapping.visit_many(ranges.clone(), |one| expected.check(one, byte_at)).unwrap();
            expected.all_came();
            let mut expected = Expected::new(&ranges);
            let mut last = (0, 0);
            mapping.visit_in_order(ranges, |one| {
                assert!(last <= (one.index, one.offset_bytes));
                last = (one.index, one.offset_bytes);
                expected.check(one, byte_at)
            }).unwrap();
            expected.all_came();
            assert!(cache.stats().is_consistent());
        }
    }

    fn a_visit_ends_early_and_with_a_panic(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(BUDGET);
        let mapping = file.map(&cache, backend);
        let rows: Vec<_> = (0..200).map(|row| row * 90_000..row * 90_000 + 100).collect();
        for count in [1, 50, 200] {
            for in_order in [false, true] {
                let mut visits = 0;
                let look = |_: Visited<'_>| {
                    visits += 1;
                    if visits == count { Break(()) } else { Continue(()) }
                };
                let ended = if in_order {
                    mapping.visit_in_order(rows.clone(), look)
                } else {
                    mapping.visit_many(rows.clone(), look)
                };
                ended.unwrap();
                assert_eq!(visits, count);
            }
        }
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            mapping.visit_many(rows.clone(), |one| if one.index == 77 { panic!("77") } else { Continue(()) })
        }));
        assert_eq!(*panicked.unwrap_err().downcast::<&str>().unwrap(), "77");
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            block_on(mapping.visit_many_async(rows.clone(), |one| {
                if one.index == 78 { panic!("78") } else { Continue(()) }
            }))
        }));
        assert_eq!(*panicked.unwrap_err().downcast::<&str>().unwrap(), "78");
        let sum = Arc::new(AtomicU64::new(0));
        let adds = sum.clone();
        block_on(mapping.visit_many_async(rows.clone(), move |one| {
            adds.fetch_add(one.bytes.len() as u64, Ordering::Relaxed);
            Continue(())
        })).unwrap();
        assert_eq!(sum.load(Ordering::Relaxed), 200 * 100);
        assert!(cache.stats().is_consistent());
    }

    fn the_closure_may_use_the_mapping(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(BUDGET);
        let mapping = file.map(&cache, backend);
        let rows: Vec<_> = (0..300).map(|row| row * 70_000..row * 70_000 + 9000).collect();
        let mut expected = Expected::new(&rows);
        mapping.visit_many(rows.clone(), |one| {
            // Pages that are under way, by a call, a bare load and another visit.
            let other = (one.index as u64 + 5) % 300 * 70_000;
            assert_eq!(mapping.get::<u8>(other).unwrap(), byte_at(other));
            assert_eq!(crate::support::load(&mapping, other as usize + 5000), byte_at(other + 5000));
            if one.index % 50 == 0 {
                let mut inner = Expected::new(&rows);
                mapping.visit_many(rows.clone(), |one| inner.check(one, byte_at)).unwrap();
                inner.all_came();
            }
            expected.check(one, byte_at)
        }).unwrap();
        expected.all_came();
    }

    fn ranges_outside_are_refused_before_any_visit(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(BUDGET);
        let mapping = file.map(&cache, backend);
        let never = |_: Visited<'_>| -> ControlFlow<()> { panic!("visited") };
        let outside = [0..10, LEN - 1..LEN + 1];
        assert!(matches!(mapping.visit_many(outside.clone(), never), Err(CacheError::OutOfBounds { .. })));
        let refused = block_on(mapping.visit_many_async(outside.clone(), never));
        assert!(matches!(refused, Err(CacheError::OutOfBounds { .. })));
        let refused = mapping.visit_in_order(outside, |_| Continue(()));
        assert!(matches!(refused, Err(CacheError::OutOfBounds { .. })));
    }

    fn a_truncated_file_is_an_error(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(BUDGET);
        let mapping = file.map(&cache, backend);
        file.file.set_len(10 * MIB).unwrap();
        let rows: Vec<_> = (0..100).map(|row| row * 200_000..row * 200_000 + 10).collect();
        let error = mapping.visit_many(rows, |_| Continue(())).unwrap_err();
        let at = match error {
            CacheError::Load { offset_bytes, .. } | CacheError::MappedAccess { offset_bytes, .. } => offset_bytes,
            other => panic!("{other}"),
        };
        assert!(at >= 10 * MIB, "{at}");
    }
}

#[test]
fn an_iterator_may_depend_on_what_was_visited() {
    let file = TestFile::new(LEN);
    let cache = cache_of(BUDGET);
    for backend in [Backend::User, Backend::Kernel] {
        let mapping = file.map(&cache, backend);
        let queue = RefCell::new(VecDeque::from([1_u64]));
        let mut order = vec![];
        let next = std::iter::from_fn(|| {
            let at = queue.borrow_mut().pop_front()? * 40_000;
            Some(at..at + 8)
        });
        mapping
            .visit_in_order(next, |one| {
                let number = one.offset_bytes / 40_000;
                assert_eq!(one.bytes.get::<u8>(0), byte_at(one.offset_bytes));
                order.push(number);
                queue
                    .borrow_mut()
                    .extend([2 * number, 2 * number + 1].into_iter().filter(|&n| n < 500));
                Continue(())
            })
            .unwrap();
        assert!(order.iter().copied().eq(1..500), "{order:?}");
    }
}

#[test]
fn dirty_pages_are_seen() {
    let (device, mut bytes) = memory(LEN as usize, 1);
    let cache = cache_of(BUDGET);
    let mapping = cache.map_mut(device).unwrap();
    let mut rng = Rng::new(seed(7));
    for round in 0..20 {
        for _ in 0..100 {
            let at = rng.next_u64() % LEN;
            crate::support::store(&mapping, at as usize, round);
            bytes[at as usize] = round;
        }
        let ranges = ranges(LEN, 40, rng.next_u64());
        let mut expected = Expected::new(&ranges);
        mapping
            .visit_many(ranges.clone(), |one| {
                // A store to a range that is perhaps under way.
                let later = &ranges[(one.index + 1) % ranges.len()];
                if !later.is_empty() {
                    mapping.set(later.start, bytes[later.start as usize]).unwrap();
                }
                expected.check(one, |at| bytes[at as usize])
            })
            .unwrap();
        expected.all_came();
        // Exact once no eviction is in progress.
        while !cache.stats().is_consistent() {
            std::thread::yield_now();
        }
    }
}

#[test]
fn each_page_is_visited_once() {
    let (device, bytes) = memory(LEN as usize, 2);
    let cache = cache_of(BUDGET);
    let pages = cache.pages(device).unwrap();
    let last = pages.page_count() - 1;
    pages.get_mut(PageId(5)).unwrap()[7] = !bytes[5 * 4096 + 7];
    let wanted = || (0..=last).rev().step_by(3).chain([last, 5, last]).map(PageId);
    for _ in 0..2 {
        let mut found = vec![];
        let mut look = |page: PageId, content: &[u8]| {
            let start = page.0 as usize * 4096;
            let device = &bytes[start..bytes.len().min(start + 4096)];
            assert_eq!(content.len(), 4096);
            assert!(content[device.len()..].iter().all(|&byte| byte == 0));
            if page.0 == 5 {
                assert_eq!(content[7], !device[7]);
            } else {
                assert!(&content[..device.len()] == device, "{page:?}");
            }
            found.push(page.0);
            Continue(())
        };
        pages.visit_many(wanted(), &mut look).unwrap();
        let given: Vec<_> = wanted().map(|page| page.0).collect();
        let mut expected = given.clone();
        expected.sort_unstable();
        expected.dedup();
        found.sort_unstable();
        assert_eq!(found, expected);
        found.clear();
        let look = |page: PageId, _: &[u8]| {
            found.push(page.0);
            Continue(())
        };
        pages.visit_in_order(wanted(), look).unwrap();
        assert_eq!(found, given);
    }
    let refused = pages.visit_many([PageId(last + 1)], |_, _| Continue(()));
    assert!(matches!(refused, Err(CacheError::OutOfBounds { .. })));
    assert!(cache.stats().is_consistent());
}

#[test]
fn a_visit_keeps_what_fits_and_evicts_nothing() {
    let (device, _) = memory(LEN as usize, 3);
    let cache = cache_of(BUDGET);
    let pages = cache.pages(device).unwrap();
    let all = || (0..pages.page_count()).map(PageId);
    pages.visit_many(all(), |_, _| Continue(())).unwrap();
    let resident = cache.stats().resident_pages;
    assert!(resident > BUDGET / 4096 / 2, "{resident}");
    assert_eq!(cache.stats().evictions, 0);
    pages.visit_many(all(), |_, _| Continue(())).unwrap();
    assert_eq!((cache.stats().evictions, cache.stats().resident_pages), (0, resident));
}

#[test]
fn only_pages_that_are_wanted_and_bad_are_errors() {
    let (inner, _) = memory(LEN as usize, 4);
    let mut device = Hooked::new(inner);
    let bad = 1000 * 4096;
    device.on_read = Box::new(move |at, buffer| {
        if (at..at + buffer.len() as u64).contains(&bad) {
            Err(io_error(IoOperation::Read, libc::EIO))
        } else {
            Ok(())
        }
    });
    let cache = cache_of(BUDGET);
    let mapping = cache.map_mut(device).unwrap();
    // Read along in a gap: found to be unreadable, and not wanted.
    let mut visits = 0;
    mapping
        .visit_many([bad - 10..bad, bad + 4096..bad + 4100], |_| {
            visits += 1;
            Continue(())
        })
        .unwrap();
    assert_eq!(visits, 2);
    let error =
        mapping.visit_many([10..20, bad + 8192..bad + 8200, bad + 5..bad + 9], |_| Continue(()));
    let Err(CacheError::Load { offset_bytes, source: DeviceError::Io { source, .. }, .. }) = error
    else {
        panic!("{error:?}")
    };
    assert_eq!((offset_bytes, source.raw_os_error()), (bad, Some(libc::EIO)));
    mapping.visit_many([bad + 8192..bad + 8200], |_| Continue(())).unwrap();
    assert!(cache.stats().is_consistent());
}

#[test]
fn a_page_that_was_written_back_during_the_read_is_not_kept_as_it_was() {
    // While the visit's read is under way, another thread stores to the page, flushes it and gives
    // its frame back: the page is absent again, and the buffer is out of date.
    let write: Arc<std::sync::Mutex<Option<Arc<aquifer_cache::MappingMut>>>> = Arc::default();
    let armed = write.clone();
    let read = move |offset_bytes| {
        if offset_bytes != 8 * 4096 {
            return;
        }
        let mapping = armed.lock().unwrap().take();
        if let Some(mapping) = mapping {
            let change = move || {
                mapping.set(8 * 4096 + 100, 77_u8).unwrap();
                mapping.flush_all().unwrap();
                mapping.advise(0..MIB, aquifer_cache::Advice::DontNeed).unwrap();
                assert!(!mapping.is_resident(8 * 4096..9 * 4096).unwrap());
            };
            std::thread::spawn(change).join().unwrap();
        }
    };
    let cache = cache_of(BUDGET);
    let device = Late { inner: MemoryDevice::new(MIB as usize).unwrap(), read };
    let mapping = Arc::new(cache.map_mut(device).unwrap());
    *write.lock().unwrap() = Some(mapping.clone());
    let row = 8 * 4096 + 100..8 * 4096 + 101;
    let mut seen = None;
    let look = |one: Visited<'_>| {
        seen = Some(one.bytes.get::<u8>(0));
        Continue(())
    };
    mapping.visit_many([row.clone()], look).unwrap();
    assert!(write.lock().unwrap().is_none(), "the read was intercepted");
    assert_eq!(seen, Some(77));
    assert_eq!(mapping.get::<u8>(row.start).unwrap(), 77);
}

#[test]
fn pages_are_whole_and_not_older_than_the_call_beside_writers() {
    const PAGES: usize = 4096;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    std::fs::write(&path, vec![0; PAGES * 4096]).unwrap();
    let device = Arc::new(FileDevice::options().writable(true).open(&path).unwrap());
    let cache = cache_of(6 * MIB);
    let pages = cache.pages(device).unwrap();
    let stored: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = Rng::new(seed(7));
            while !is_over.load(Ordering::Relaxed) {
                let page = rng.next_u64() as usize % PAGES;
                let mut guard = pages.get_mut(PageId(page as u64)).unwrap();
                let value = stored[page].load(Ordering::Relaxed) + 1;
                guard
                    .chunks_exact_mut(8)
                    .for_each(|word| word.copy_from_slice(&value.to_ne_bytes()));
                drop(guard);
                stored[page].store(value, Ordering::Release);
            }
        });
        let visitors: Vec<_> = (0..2)
            .map(|visitor| {
                let (pages, stored) = (&pages, &stored);
                scope.spawn(move || {
                    let mut rng = Rng::new(seed(7) + visitor);
                    for _ in 0..crate::support::steps(30) {
                        let wanted: Vec<_> =
                            (0..500).map(|_| PageId(rng.next_u64() % PAGES as u64)).collect();
                        let before: Vec<u64> =
                            stored.iter().map(|value| value.load(Ordering::Acquire)).collect();
                        pages
                            .visit_many(wanted, |page, bytes| {
                                let first = &bytes[..8];
                                assert!(bytes.chunks_exact(8).all(|word| word == first), "torn");
                                let value = u64::from_ne_bytes(first.try_into().unwrap());
                                assert!(value >= before[page.0 as usize], "older than the call");
                                Continue(())
                            })
                            .unwrap();
                    }
                })
            })
            .collect();
        let results: Vec<_> = visitors.into_iter().map(|visitor| visitor.join()).collect();
        is_over.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
    assert!(cache.stats().is_consistent());
}

#[test]
fn many_threads_visit_one_mapping() {
    let file = TestFile::new(LEN);
    let cache = cache_of(BUDGET);
    let mapping: &Mapping = &file.map(&cache, Backend::User);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            scope.spawn(move || {
                let ranges = ranges(LEN, 60, seed(7) + thread);
                let mut expected = Expected::new(&ranges);
                mapping.visit_many(ranges, |one| expected.check(one, byte_at)).unwrap();
                expected.all_came();
            });
        }
    });
    assert!(cache.stats().is_consistent());
}

#[test]
fn a_batch_reads_small_gaps_along_and_keeps_what_was_asked_for() {
    let (memory, bytes) = memory(LEN as usize, 5);
    let device = Counting::new(memory);
    let counters = device.counters();
    let cache = cache_of(BUDGET);
    let mapping = cache.map_mut(device).unwrap();
    let wanted = [10, 11, 13, 16, 20, 21].map(|page| page * PAGE..page * PAGE + 1);
    mapping.touch_many(&wanted).unwrap();
    assert_eq!(counters.snapshot().reads, 2, "one to page 16, and one from page 20 on");
    for page in 9..23 {
        let is_wanted = wanted.iter().any(|range| range.start == page * PAGE);
        assert_eq!(mapping.is_resident(page * PAGE..page * PAGE + 1).unwrap(), is_wanted, "{page}");
    }
    for page in 9..23 {
        assert_eq!(mapping.get::<u8>(page * PAGE).unwrap(), bytes[(page * PAGE) as usize]);
    }
    assert!(cache.stats().is_consistent());
}
