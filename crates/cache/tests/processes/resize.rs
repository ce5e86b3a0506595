//! Resident memory follows the budget, while readers and writers run. Alone in its process, because
//! it measures the process's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_cache::{Cache, PageId};
use aquifer_device::MemoryDevice;
use aquifer_testkit::rng::Rng;

use crate::support::wait_until;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("resizes", resizes)];

const MIB: u64 = 1 << 20;
const LEN: u64 = 64 * MIB;
/// Memory that is not frames: transfer buffers, page tables of the cache, stacks, rounding to huge
/// pages.
const BOOKKEEPING: u64 = 16 * MIB;

/// The resident memory of this process.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * 4096
}

#[test]
fn resident_memory_follows_the_budget() {
    aquifer_testkit::child::succeeds("resizes");
}

fn resizes() {
    // All of it is resident from the start, so that only the cache's memory changes.
    let [first, second] =
        [0, 1].map(|_| Arc::new(MemoryDevice::from_bytes(&vec![1; LEN as usize]).unwrap()));
    let before = resident_bytes();
    let cache = Cache::builder().budget_bytes(64 * MIB).build().unwrap();
    let mapping = cache.map_mut(first).unwrap();
    let pages = cache.pages(second).unwrap();
    let stop = AtomicBool::new(false);
    let written = std::thread::scope(|scope| {
        let (cache, mapping, pages, stop) = (&cache, &mapping, &pages, &stop);
        let workers: Vec<_> = (0..2u64)
            .map(|thread| {
                scope.spawn(move || {
                    let mut rng = Rng::new(thread);
                    let mut written = vec![];
                    while !stop.load(Ordering::Relaxed) {
                        // Each thread uses the pages of its own parity.
                        let page = rng.below(LEN / 4096 / 2) * 2 + thread;
                        let at = (page * 4096) as usize;
                        // SAFETY: inside the mapping.
                        unsafe { mapping.as_ptr().add(at).read_volatile() };
                        drop(pages.get(PageId(page)).unwrap());
                        if rng.chance(0.2) {
                            // SAFETY: as above, and no other thread uses the page.
                            unsafe { mapping.as_mut_ptr().add(at).write_volatile(7) };
                            pages.get_mut(PageId(page)).unwrap()[0] = 7;
                            written.push(page);
                        }
                    }
                    written
                })
            })
            .collect();
        let used = || cache.stats().resident_pages * 4096;
        for round in 0..crate::support::steps(2) {
            cache.resize(64 * MIB).unwrap();
            // The cache uses a larger budget.
            wait_until("a cache that has grown", || used() > 40 * MIB);
            let budget = [6 * MIB, 12 * MIB, 20 * MIB][round % 3];
            cache.resize(budget).unwrap();
            wait_until("the end of the shrink", || !cache.is_shrinking());
            wait_until("memory within the budget", || {
                resident_bytes() <= before + budget + BOOKKEEPING && used() <= budget
            });
        }
        stop.store(true, Ordering::Relaxed);
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect::<Vec<u64>>()
    });
    mapping.flush_all().unwrap();
    pages.flush_all().unwrap();
    for page in written {
        assert_eq!(mapping.get::<u8>(page * 4096).unwrap(), 7);
        assert_eq!(pages.get(PageId(page)).unwrap()[0], 7);
    }
    wait_until("figures that add up", || cache.stats().is_consistent());
}
