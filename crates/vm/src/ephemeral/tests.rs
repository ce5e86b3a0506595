//! The heap with real mappings of small files, whose pages each contain the number of their file.

use std::fs::File;
use std::os::fd::AsFd;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use aquifer_sys::memory::{self, Protection};
use aquifer_sys::signal::FaultContext;
use aquifer_testkit::campaign;
use aquifer_testkit::rng::Rng;

use super::unmapping::{Span, Unmapper as _};
use super::*;
use crate::{FaultOwner, Served, router};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn plenty() -> Arc<VmaBudget> {
    Arc::new(VmaBudget::new(20_000))
}

/// Unmaps only on request.
const LATER: Unmap = Unmap::Async { threshold_pages: 512, delay: Duration::from_secs(3600) };

/// Heaps with both forms of unmapping, whichever is faster on this kernel.
fn heaps(unmap: Unmap) -> [Arc<Heap>; 2] {
    [true, false].map(|drains| Heap::with(unmap, plenty(), 2, move || Kernel::draining(drains)))
}

fn take(heap: &Heap, len_bytes: usize) -> Extent {
    heap.take(len_bytes).unwrap()
}

/// A directory of files whose every page begins with the file's number.
struct Files {
    directory: tempfile::TempDir,
    files: Vec<(File, usize)>,
}

impl Files {
    fn new(lengths: &[usize]) -> Files {
        let directory = tempfile::tempdir().unwrap();
        let make = |(number, &len_bytes): (usize, &usize)| {
            let mut content = vec![0xA5; len_bytes];
            for page in content.chunks_mut(SMALL_PAGE_BYTES) {
                page[0] = number as u8;
            }
            let path = directory.path().join(number.to_string());
            std::fs::write(&path, content).unwrap();
            (File::open(path).unwrap(), len_bytes)
        };
        let files = lengths.iter().enumerate().map(make).collect();
        Files { directory, files }
    }

    fn path(&self, number: usize) -> PathBuf {
        self.directory.path().join(number.to_string())
    }

    /// Maps a file into fresh addresses.
    fn map(&self, heap: &Heap, number: usize) -> Mapping {
        let (file, len_bytes) = &self.files[number];
        let extent = take(heap, *len_bytes);
        assert!(extent.capacity_bytes() >= *len_bytes);
        // SAFETY: the extent owns these addresses.
        unsafe {
            memory::map_file_at(
                extent.address(),
                extent.capacity_bytes(),
                Protection::Read,
                file.as_fd(),
                0,
            )
        }
        .unwrap();
        Mapping { extent, number, len_bytes: *len_bytes }
    }
}

struct Mapping {
    extent: Extent,
    number: usize,
    len_bytes: usize,
}

impl Mapping {
    /// Checks that every page is the file's.
    fn check(&self) {
        for at in (0..self.len_bytes).step_by(SMALL_PAGE_BYTES) {
            // SAFETY: mapped, and inside the file.
            let found = unsafe { self.extent.address().wrapping_add(at).read_volatile() };
            assert_eq!(found, self.number as u8, "page {} of another file", at / SMALL_PAGE_BYTES);
        }
    }

    fn span(&self) -> std::ops::Range<usize> {
        let start = self.extent.address() as usize;
        start..start + self.extent.capacity_bytes()
    }
}

/// Mappings of this process that belong to a path below `directory`.
fn mapped_below(directory: &Path) -> usize {
    let directory = directory.to_str().unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(directory)).count()
}

fn wait_until(condition: impl Fn() -> bool) {
    while !condition() {
        std::thread::yield_now();
    }
}

#[test]
fn extents_are_aligned_and_do_not_overlap() {
    for heap in heaps(LATER) {
        let lengths =
            [1, 4096, 32 * KIB, 33 * KIB, 64 * KIB, 65 * KIB, MIB, 2 * MIB + 1, 1 << 30, 3 << 30];
        let mut spans = Vec::new();
        let mut extents = Vec::new();
        for len_bytes in lengths.into_iter().cycle().take(60) {
            let extent = take(&heap, len_bytes);
            let start = extent.address() as usize;
            assert!(extent.capacity_bytes() >= len_bytes);
            assert_eq!(start % GRANULE_BYTES, 0);
            assert!(len_bytes < 2 * MIB || start.is_multiple_of(2 * MIB));
            spans.push(start..start + extent.capacity_bytes());
            extents.push(extent);
        }
        spans.sort_by_key(|span| span.start);
        assert!(spans.windows(2).all(|two| two[0].end <= two[1].start), "{spans:x?}");
        let live: usize = extents.iter().map(Extent::capacity_bytes).sum();
        assert_eq!(heap.stats().live_bytes, live as u64);
        extents.into_iter().for_each(|extent| heap.retire(extent));
        heap.unmap_now();
        let stats = heap.stats();
        assert_eq!((stats.live, stats.live_bytes), (0, 0));
        assert_eq!((stats.zombies, stats.zombie_bytes, stats.drained), (0, 0, 0));
    }
}

/// Several threads map, check, keep and retire mappings, including each other's, while the timer
/// runs.
#[test]
fn a_mapping_in_use_shows_its_file() {
    let mut random = Rng::new(campaign::seed(3));
    let lengths: Vec<usize> = (0..48)
        .map(|number| match number % 8 {
            7 => (1 + random.below(3 << 20)) as usize,
            _ => (1 + random.below(100 << 10)) as usize,
        })
        .collect();
    let files = Files::new(&lengths);
    let often = Unmap::Async { threshold_pages: 100, delay: Duration::from_micros(200) };
    for heap in heaps(often).into_iter().chain(heaps(Unmap::Sync)) {
        let seeds: Vec<u64> = (0..4).map(|_| random.next_u64()).collect();
        let shared: Mutex<Vec<Mapping>> = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for seed in seeds {
                let (files, heap, shared) = (&files, &heap, &shared);
                scope.spawn(move || churn(files, heap, shared, seed));
            }
        });
        for mapping in shared.lock().drain(..) {
            mapping.check();
            heap.retire(mapping.extent);
        }
        heap.unmap_now();
        assert_eq!(mapped_below(files.directory.path()), 0);
        let (used, stats) = (heap.shared.vmas.used(), heap.stats());
        assert_eq!((stats.live, stats.zombies, stats.drained), (0, 0, 0));
        let regions = stats.regions as usize;
        assert_eq!(used, regions * region::REGION_VMAS, "VMAs were not given back");
    }
}

fn churn(files: &Files, heap: &Heap, shared: &Mutex<Vec<Mapping>>, seed: u64) {
    let mut random = Rng::new(seed);
    for step in 0..campaign::steps(3000) {
        let mapping = files.map(heap, random.below(files.files.len() as u64) as usize);
        mapping.check();
        match random.below(10) {
            0..6 => heap.retire(mapping.extent),
            6 => drop(mapping.extent),
            _ => {
                let mut kept = shared.lock();
                kept.push(mapping);
                let one = random.below(kept.len() as u64) as usize;
                let other = (kept.len() > 60).then(|| kept.swap_remove(one));
                drop(kept);
                if let Some(other) = other {
                    other.check();
                    heap.retire(other.extent);
                }
            }
        }
        if step % 500 == 0 {
            heap.unmap_now();
        }
    }
}

/// Retired mappings are unmapped in batches.
#[test]
fn one_call_unmaps_many() {
    let files = Files::new(&[32 * KIB]);
    for heap in heaps(LATER) {
        // On one CPU, or in a few runs if the thread migrates between two.
        for _ in 0..640 {
            let mapping = files.map(&heap, 0);
            mapping.check();
            heap.retire(mapping.extent);
        }
        let stats = heap.stats();
        assert!((5..=40).contains(&stats.unmap_calls), "{stats:?}");
        assert!(stats.zombies < 2 * 64, "{stats:?}");
    }
}

/// Unmapping leaves one VMA, because equal neighbours merge. There are never more VMAs than were
/// accounted for.
#[test]
fn what_is_unmapped_takes_no_vmas() {
    let files = Files::new(&[32 * KIB]);
    for heap in heaps(LATER) {
        let mut mappings: Vec<Mapping> = (0..200).map(|_| files.map(&heap, 0)).collect();
        let any = mappings[0].extent.address() as usize;
        let region = any / SLOT_BYTES * SLOT_BYTES..(any / SLOT_BYTES + 1) * SLOT_BYTES;
        for every in [2, 3, 1] {
            let mut number = 0;
            mappings.retain_mut(|_| {
                number += 1;
                number % every != 0
            });
            assert!(vmas_in(&region) <= heap.stats().vmas as usize);
        }
        assert_eq!(vmas_in(&region), 1);
    }
}

fn vmas_in(addresses: &std::ops::Range<usize>) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let overlaps = |line: &&str| {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split(' ').next().unwrap();
        let [start, end] = [start, end].map(|hex| usize::from_str_radix(hex, 16).unwrap());
        start < addresses.end && addresses.start < end
    };
    maps.lines().filter(overlaps).count()
}

/// Mappings retired in random order are drained together, by one call with several ranges.
#[test]
fn mappings_retired_in_any_order_are_unmapped_together() {
    let files = Files::new(&[20 * KIB]);
    let heap = Heap::with(LATER, plenty(), 1, || Kernel::draining(true));
    let mut random = Rng::new(campaign::seed(5));
    let mut parked: Vec<Mapping> = (0..400).map(|_| files.map(&heap, 0)).collect();
    for _ in 0..640 {
        let evicted = parked.swap_remove(random.below(parked.len() as u64) as usize);
        evicted.check();
        heap.retire(evicted.extent);
        parked.push(files.map(&heap, 0));
    }
    if aquifer_sys::features::vectored_dontneed().is_ok() {
        assert!(heap.stats().unmap_calls <= 10, "{:?}", heap.stats());
    } else {
        eprintln!("skipped: vectored DONTNEED is refused here");
    }
    parked.iter().for_each(Mapping::check);
}

/// Addresses are not given out while their mapping is in use, or before it is unmapped.
#[test]
fn no_address_is_given_out_twice() {
    for heap in heaps(LATER) {
        let files = Files::new(&[30 * KIB, 50 * KIB, 200 * KIB]);
        let kept: Vec<Mapping> = (0..300).map(|number| files.map(&heap, number % 3)).collect();
        for number in 0..3000 {
            let mapping = files.map(&heap, number % 3);
            let span = mapping.span();
            let overlaps =
                |other: &&Mapping| other.span().start < span.end && span.start < other.span().end;
            assert!(kept.iter().find(overlaps).is_none());
            heap.retire(mapping.extent);
        }
        kept.iter().for_each(Mapping::check);
    }
}

/// A region of large mappings is reused only when all of them are unmapped.
#[test]
fn a_region_is_used_again_when_it_is_empty() {
    for heap in heaps(LATER) {
        let first = take(&heap, 512 * MIB);
        let base = first.address();
        let second = take(&heap, 512 * MIB);
        heap.retire(first);
        let third = take(&heap, 512 * MIB);
        assert_ne!(third.address(), base, "one mapping of the region is still there");
        heap.retire(second);
        heap.unmap_now();
        let fourth = take(&heap, 600 * MIB);
        assert_eq!(fourth.address(), base);
        drop((third, fourth));
    }
}

/// The space of a deleted file is free after `unmap_now`.
#[test]
fn unmap_now_lets_go_of_files() {
    for heap in heaps(LATER) {
        let files = Files::new(&[10 * KIB, 60 * KIB, 3 * MIB, 100 * KIB]);
        for number in 0..4 {
            let mapping = files.map(&heap, number);
            mapping.check();
            std::fs::remove_file(files.path(number)).unwrap();
            heap.retire(mapping.extent);
        }
        heap.unmap_now();
        assert_eq!(mapped_below(files.directory.path()), 0);
    }
}

/// The space of deleted files is free after the delay, whether they were drained before or not.
#[test]
fn the_timer_lets_go_of_files() {
    let soon = Unmap::Async { threshold_pages: 64, delay: Duration::from_millis(2) };
    for heap in heaps(soon) {
        for _ in 0..3 {
            let files = Files::new(&[10 * KIB, 60 * KIB, 300 * KIB]);
            for number in (0..3).cycle().take(100) {
                let mapping = files.map(&heap, number);
                mapping.check();
                heap.retire(mapping.extent);
            }
            wait_until(|| mapped_below(files.directory.path()) == 0);
        }
    }
}

#[test]
fn sync_and_dropped_extents_are_unmapped_at_once() {
    let files = Files::new(&[10 * KIB, 60 * KIB, 300 * KIB]);
    for heap in heaps(Unmap::Sync) {
        for number in 0..3 {
            let mapping = files.map(&heap, number);
            heap.retire(mapping.extent);
            assert_eq!(mapped_below(files.directory.path()), 0);
        }
    }
    for heap in heaps(LATER) {
        for number in 0..3 {
            drop(files.map(&heap, number).extent);
            assert_eq!(mapped_below(files.directory.path()), 0);
        }
    }
}

/// Extents may outlive the heap.
#[test]
fn an_extent_outlives_its_heap() {
    let files = Files::new(&[10 * KIB, 300 * KIB]);
    for heap in heaps(Unmap::default()) {
        let mappings = [0, 1].map(|number| files.map(&heap, number));
        heap.retire(files.map(&heap, 0).extent);
        drop(heap);
        for mapping in &mappings {
            mapping.check();
        }
        drop(mappings);
        assert_eq!(mapped_below(files.directory.path()), 0);
    }
}

/// A request beyond the budget returns an error, but only after retired mappings have been reused.
#[test]
fn the_budget_is_kept() {
    let files = Files::new(&[20 * KIB, 50 * KIB, 200 * KIB]);
    for heap in [true, false].map(|drains| {
        Heap::with(LATER, Arc::new(VmaBudget::new(100)), 2, move || Kernel::draining(drains))
    }) {
        for number in 0..3 {
            let mut kept = Vec::new();
            let error = loop {
                match heap.take(files.files[number].1) {
                    Ok(extent) => kept.push(extent),
                    Err(error) => break error,
                }
            };
            assert!((40..=100).contains(&kept.len()), "{}", kept.len());
            match error {
                NoAddresses::Vmas { used, limit: 100 } => assert!(used <= 100),
                other => panic!("{other}"),
            }
            for extent in kept {
                heap.retire(extent);
                drop(heap.take(files.files[number].1).unwrap());
            }
            heap.unmap_now();
        }
    }
}

/// When no further slots can be added, a CPU takes free slots of another CPU's pool.
#[test]
fn slots_of_other_pools_are_taken_in_need() {
    let heap = Heap::with(LATER, Arc::new(VmaBudget::new(12)), 2, || Kernel::draining(true));
    // Five extents fit, from one pool or from both.
    let some: Vec<Extent> = (0..5).map(|_| take(&heap, 1)).collect();
    some.into_iter().for_each(|extent| heap.retire(extent));
    let pool = &heap.shared.pools[1][0];
    for _ in 0..5 {
        heap.shared.add_ring(pool).unwrap();
    }
    let again: Vec<Extent> = (0..5).map(|_| take(&heap, 1)).collect();
    assert_eq!(again.len(), 5);
}

struct Counting(AtomicUsize);

impl FaultOwner for Counting {
    fn serve(&self, fault: &FaultContext) -> Served {
        self.0.fetch_add(1, Ordering::Relaxed);
        let page = fault.address / SMALL_PAGE_BYTES * SMALL_PAGE_BYTES;
        // SAFETY: the fault is in an extent of this test.
        let mapped = unsafe {
            memory::map_anonymous_at(page as *mut u8, SMALL_PAGE_BYTES, Protection::ReadWrite)
        };
        if mapped.is_ok() { Served::Yes } else { Served::No }
    }
}

/// A fault in an extent goes to its owner until it is retired.
#[test]
fn faults_go_to_the_owner() {
    for heap in heaps(LATER) {
        for len_bytes in [4 * KIB, 50 * KIB, 5 * MIB, 2 << 30] {
            let (owner, other) = (Counting(AtomicUsize::new(0)), Counting(AtomicUsize::new(0)));
            let (extent, neighbour) = (take(&heap, len_bytes), take(&heap, len_bytes));
            // SAFETY: both owners outlive the extents.
            unsafe {
                extent.set_owner(&raw const owner);
                neighbour.set_owner(&raw const other);
            }
            let last = extent.address().wrapping_add(extent.capacity_bytes() - 1);
            // SAFETY: the owner makes it readable.
            assert_eq!(unsafe { last.read_volatile() }, 0);
            assert_eq!((owner.0.load(Ordering::Relaxed), other.0.load(Ordering::Relaxed)), (1, 0));
            let fault = FaultContext {
                signal: libc::SIGBUS,
                address: extent.address() as usize,
                write: None,
                fallible: false,
                hardware_error: false,
            };
            // SAFETY: the extent is this thread's.
            assert_eq!(unsafe { router::serve(&fault) }, Served::Yes);
            heap.retire(extent);
            // SAFETY: as above; nothing is mapped there now.
            assert_eq!(unsafe { router::serve(&fault) }, Served::No);
            assert_eq!(owner.0.load(Ordering::Relaxed), 2);
            drop(neighbour);
        }
    }
}

/// Runs `body` in a forked child.
fn in_child(body: impl FnOnce()) {
    // SAFETY: the child runs `body` and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no preconditions; the alarm ends a child that hangs.
        unsafe { libc::alarm(30) };
        let failed = std::panic::catch_unwind(AssertUnwindSafe(body)).is_err();
        // SAFETY: ends the child without running the parent's destructors or exit handlers.
        unsafe { libc::_exit(i32::from(failed)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child failed; 14 is its alarm");
}

/// A child has none of the mappings, its inherited heap is inert, and it can make a new heap.
#[test]
fn a_child_has_its_own_heap() {
    let files = Files::new(&[10 * KIB, 60 * KIB, 300 * KIB]);
    let often = Unmap::Async { threshold_pages: 512, delay: Duration::from_millis(1) };
    let mut doomed = heaps(often).to_vec();
    for heap in heaps(often) {
        heap.retire(files.map(&heap, 0).extent);
        doomed.iter().for_each(|heap| heap.retire(files.map(heap, 0).extent));
        let mut mappings = [0, 1, 2].map(|number| Some(files.map(&heap, number)));
        // Simulates other threads that hold the locks at the fork.
        let (rings, pools) = (heap.shared.rings.lock(), heap.shared.pools.iter().flatten());
        let locked = (rings, pools.map(|pool| pool.lock_for_test()).collect::<Vec<_>>());
        in_child(|| {
            assert_eq!(mapped_below(files.directory.path()), 0);
            assert!(matches!(heap.take(1), Err(NoAddresses::Forked)));
            heap.retire(mappings[0].take().unwrap().extent);
            drop(mappings[1].take());
            heap.unmap_now();
            assert_eq!(heap.stats(), HeapStats::default());
            doomed.clear();
            let own = Heap::new(Unmap::default(), plenty());
            let mapping = files.map(&own, 1);
            mapping.check();
            own.retire(mapping.extent);
            own.unmap_now();
            assert_eq!(mapped_below(files.directory.path()), 0);
        });
        drop(locked);
        mappings.iter().flatten().for_each(Mapping::check);
        assert_eq!(heap.stats().live, 3, "the child changed something of the parent's");
    }
}

/// Makes mappings until the process reaches its limit.
fn fill_up() -> memory::Range {
    let len_bytes = 1 << 30;
    let address = memory::reserve(len_bytes).unwrap();
    for at in (0..len_bytes).step_by(2 * SMALL_PAGE_BYTES) {
        let page = address.wrapping_add(at);
        // SAFETY: inside the fresh reservation.
        if unsafe { memory::protect(page, SMALL_PAGE_BYTES, Protection::Read) }.is_err() {
            break;
        }
    }
    let cannot_map = || memory::reserve(SMALL_PAGE_BYTES).is_err();
    wait_until(cannot_map);
    memory::Range { address, len_bytes }
}

/// At the limit of mappings, retired mappings are still unmapped.
#[test]
fn files_are_let_go_at_the_limit_of_mappings() {
    if aquifer_sys::features::limits().max_mappings.is_none_or(|most| most > 200_000) {
        eprintln!("skipped: vm.max_map_count is too high to be reached");
        return;
    }
    let files = Files::new(&[10 * KIB, 60 * KIB, 300 * KIB]);
    in_child(|| {
        for heap in heaps(LATER) {
            let kept = [0, 1, 2].map(|number| files.map(&heap, number));
            let some = [0, 1, 2].repeat(50).into_iter().map(|number| files.map(&heap, number));
            let mut retired = some.collect::<Vec<Mapping>>();
            let released = retired.pop().unwrap();
            let full = fill_up();
            retired.into_iter().for_each(|mapping| heap.retire(mapping.extent));
            drop(released);
            heap.unmap_now();
            // SAFETY: mapped by `fill_up`, and used for nothing else.
            unsafe { memory::unmap(full.address, full.len_bytes) }.unwrap();
            assert_eq!(mapped_below(files.directory.path()), kept.len());
            kept.iter().for_each(Mapping::check);
            let again: Vec<Mapping> = (0..600).map(|step| files.map(&heap, step % 3)).collect();
            kept.iter().chain(&again).for_each(Mapping::check);
        }
    });
}

/// A foreign mapping made in a hole is kept.
#[test]
fn a_stranger_in_a_hole_is_left_alone() {
    let region = Region::new(REGION_BYTES, &plenty()).unwrap_or_else(|_| panic!("addresses"));
    let kernel = Kernel::new();
    let span = Span { address: region.base() + 8 * MIB, len_bytes: SMALL_PAGE_BYTES };
    let start = span.address as *mut u8;
    // SAFETY: inside the fresh region.
    unsafe { memory::unmap(start, SMALL_PAGE_BYTES) }.unwrap();
    memory::map_private_at_free(start, SMALL_PAGE_BYTES, Protection::ReadWrite, None).unwrap();
    // SAFETY: mapped above.
    unsafe { start.write_volatile(7) };
    assert!(!kernel.close_hole(span));
    region.abandon();
    drop(region);
    // SAFETY: as above.
    assert_eq!(unsafe { start.read_volatile() }, 7);
    // SAFETY: as above.
    unsafe { memory::unmap(start, SMALL_PAGE_BYTES) }.unwrap();
    assert!(kernel.close_hole(span));
}
