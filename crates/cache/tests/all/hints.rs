//! Hints, and batches that are larger than the budget: what is read, and what stays.

#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges, some of one range")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_cache::{Advice, Backend, Cache, MapOptions, Mapping};
use aquifer_device::{Counting, Device, FileDevice, MemoryDevice};

use crate::support::{Hooked, block_on, memory, wait_until};

const PAGE: u64 = 4096;
const BUDGET: u64 = 8 << 20;

fn cache(budget_bytes: u64) -> Cache {
    Cache::builder().budget_bytes(budget_bytes).io_threads(1).build().unwrap()
}

fn resident(mapping: &Mapping) -> u64 {
    (0..mapping.len() / PAGE)
        .filter(|page| mapping.is_resident(page * PAGE..(page + 1) * PAGE).unwrap())
        .count() as u64
}

#[test]
fn a_prefetch_of_many_ranges_loads_them_all() {
    const RANGES: u64 = 10_000;
    let cache = cache(64 << 20);
    let mapping = cache.map(MemoryDevice::new((8 * RANGES * PAGE) as usize).unwrap()).unwrap();
    let ranges: Vec<_> = (0..RANGES).map(|n| 8 * n * PAGE..8 * n * PAGE + 1).collect();
    mapping.prefetch(&ranges).unwrap();
    wait_until("all pages", || cache.stats().prefetched == RANGES);
    assert!(ranges.iter().all(|range| mapping.is_resident(range.clone()).unwrap()));
}

/// The only worker is free again, after it has begun.
fn wait_for_worker(mapping: &Mapping, reads: &AtomicU64, before: u64) {
    wait_until("a first read", || reads.load(Ordering::Relaxed) > before);
    block_on(mapping.touch_many_async(&[])).unwrap();
}

#[test]
fn a_hint_that_the_budget_cannot_hold_leaves_half_of_it() {
    const LEN: u64 = 16 * BUDGET;
    for hint in ["advice", "one range", "many ranges"] {
        for kept_pages in [BUDGET / PAGE / 4, BUDGET / PAGE] {
            let cache = cache(BUDGET);
            let (kept, _) = memory((kept_pages * PAGE) as usize, 1);
            let kept = cache.map(kept).unwrap();
            kept.touch_many(&[0..kept.len()]).unwrap();
            let before = resident(&kept);
            assert!(before > kept_pages * 9 / 10, "{before}");
            let reads = Arc::new(AtomicU64::new(0));
            let read = reads.clone();
            let on_read = move |_, _: &mut [u8]| {
                read.fetch_add(1, Ordering::Relaxed);
                Ok(())
            };
            let large = Arc::new(MemoryDevice::new(LEN as usize).unwrap());
            let large = Hooked { on_read: Box::new(on_read), ..Hooked::new(large) };
            let large = cache.map(large).unwrap();
            match hint {
                "advice" => large.advise(0..LEN, Advice::WillNeed).unwrap(),
                "one range" => large.prefetch(&[0..LEN]).unwrap(),
                _ => {
                    let ranges: Vec<_> =
                        (0..LEN).step_by(PAGE as usize).map(|at| at..at + 1).collect();
                    large.prefetch(&ranges).unwrap();
                }
            }
            wait_for_worker(&large, &reads, 0);
            let (loaded, left) = (resident(&large), resident(&kept));
            assert!(loaded >= BUDGET / PAGE / 3, "{hint}: {loaded} loaded");
            // The evictor keeps a few frames free.
            let least = before.min(BUDGET / PAGE * 2 / 5) - 64;
            assert!(left >= least, "{hint}: of {before} pages, {left} are left, {loaded} loaded");
            // From the front on, and then no more.
            assert!(large.is_resident(0..loaded * PAGE).unwrap(), "{hint}");
        }
    }
}

#[test]
fn touch_many_reads_what_the_budget_cannot_hold_once() {
    let (memory, _) = memory(8 * BUDGET as usize, 2);
    for many in [false, true] {
        let device = Counting::new(memory.clone());
        let counters = device.counters();
        let cache = cache(BUDGET);
        let mapping = cache.map(device).unwrap();
        let ranges: Vec<_> = match many {
            false => vec![0..mapping.len()],
            true => (0..mapping.len()).step_by(3 * PAGE as usize).map(|at| at..at + 1).collect(),
        };
        mapping.touch_many(&ranges).unwrap();
        let read = counters.snapshot();
        assert!(read.read_bytes <= mapping.len(), "many {many}: {read:?}");
        assert!(read.reads <= mapping.len() / PAGE / 5, "many {many}: {read:?}");
        assert!(resident(&mapping) > BUDGET / PAGE / 2);
    }
}

/// With the kernel backend, hints end as well.
#[test]
fn a_hint_for_a_file_leaves_half_of_the_budget() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(16 * BUDGET).unwrap();
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(file.path()).unwrap());
    let cache = cache(BUDGET);
    let mapping = cache.map_with(device, MapOptions::new().backend(Backend::Kernel)).unwrap();
    mapping.advise(0..mapping.len(), Advice::WillNeed).unwrap();
    let loaded = resident(&mapping);
    assert!(loaded <= BUDGET / PAGE * 3 / 5, "{loaded}");
}
