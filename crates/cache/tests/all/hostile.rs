//! Situations in which a mapping could hang, return wrong bytes or lose a store: each was a bug
//! once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use aquifer_cache::{Advice, Cache, CacheError, Mapping, MappingMut, PageId};
use aquifer_device::{
    Batch, Device, DeviceError, Fault, FaultRule, FaultTarget, Faulty, IoOperation, MemoryDevice,
    Request, run_one, run_serially,
};
use aquifer_testkit::watchdog::receive;

const PAGE: usize = 4096;
const REGION: usize = 2 << 20;

/// Runs `work` in a separate thread and fails if it hangs.
fn must_end<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    receive("the work", &ended)
}

fn cache(budget_bytes: u64) -> Cache {
    Cache::builder().budget_bytes(budget_bytes).build().unwrap()
}

fn store(map: &MappingMut, offset: usize, value: u8) {
    // SAFETY: inside the mapping, which outlives the call.
    unsafe { map.as_mut_ptr().add(offset).write_volatile(value) };
}

fn load(map: &Mapping, offset: usize) -> u8 {
    // SAFETY: inside the mapping, which outlives the call.
    unsafe { map.as_ptr().add(offset).read_volatile() }
}

fn byte_of(device: &dyn Device, offset: usize) -> u8 {
    let mut byte = [0];
    device.read_at(offset as u64, &mut byte).unwrap();
    byte[0]
}

#[test]
fn a_store_after_a_flush_is_seen_on_both_sides_of_a_region_boundary() {
    let device = Arc::new(MemoryDevice::new(2 * REGION).unwrap());
    let cache = cache(16 << 20);
    let map = cache.map_mut(device.clone()).unwrap();
    let pages = REGION / PAGE - 8..REGION / PAGE + 8;
    for round in 1..4u8 {
        for page in pages.clone() {
            store(&map, page * PAGE, round);
        }
        map.flush_all().unwrap();
        for page in pages.clone() {
            assert_eq!(byte_of(&*device, page * PAGE), round, "page {page} in round {round}");
        }
    }
}

#[test]
fn a_page_whose_write_failed_takes_further_stores() {
    let memory = Arc::new(MemoryDevice::new(REGION).unwrap());
    let faulty = Faulty::new(memory.clone());
    let control = faulty.control();
    let cache = cache(16 << 20);
    let map = cache.map_mut(faulty).unwrap();
    store(&map, 5 * PAGE, 1);
    control.inject(FaultRule::new(FaultTarget::Writes, Fault::Errno(5)));
    assert!(matches!(map.flush_all(), Err(CacheError::WriteBack { .. })));
    let map = must_end(move || {
        store(&map, 5 * PAGE, 2);
        map.write_all_at(&[3], 5 * PAGE as u64 + 1).unwrap();
        map
    });
    control.clear();
    map.flush_all().unwrap();
    assert_eq!((byte_of(&*memory, 5 * PAGE), byte_of(&*memory, 5 * PAGE + 1)), (2, 3));
}

#[test]
fn locked_pages_stay_and_do_not_take_others_with_them() {
    let bytes: Vec<u8> = (0..REGION).map(|at| (at / PAGE) as u8).collect();
    for without_vectored_discard in [false, true] {
        let device = Arc::new(MemoryDevice::from_bytes(&bytes).unwrap());
        let mut builder = Cache::builder().budget_bytes(16 << 20);
        if without_vectored_discard {
            builder = builder.without_vectored_discard();
        }
        let map = builder.build().unwrap().map(device).unwrap();
        map.read(0..REGION as u64, |_| ()).unwrap();
        // SAFETY: a page of the mapping, which is resident.
        if unsafe { libc::mlock(map.as_ptr().add(40 * PAGE).cast(), PAGE) } != 0 {
            eprintln!("skipped: locking memory is not allowed here");
            return;
        }
        map.advise(0..REGION as u64, Advice::DontNeed).unwrap();
        must_end(move || {
            for page in 0..REGION / PAGE {
                assert_eq!(load(&map, page * PAGE), page as u8);
            }
        });
    }
}

#[test]
fn the_evictor_does_not_wait_for_a_writing_guard() {
    let device = Arc::new(MemoryDevice::new(32 << 20).unwrap());
    let pages = Arc::new(cache(6 << 20).pages(device.clone()).unwrap());
    must_end(move || {
        let mut held = pages.get_mut(PageId(0)).unwrap();
        // More dirty pages than there are frames, the first of them in the guard's own region.
        for page in 1..pages.page_count() {
            pages.get_mut(PageId(page)).unwrap()[0] = page as u8;
        }
        held[0] = 7;
        drop(held);
        pages.flush_all().unwrap();
        assert_eq!(byte_of(&*device, 0), 7);
        assert_eq!(byte_of(&*device, 77 * PAGE), 77);
    });
}

// ---- devices that break the contract of `Device::run` -------------------------------------------

/// How [`Misbehaving`] runs a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Conduct {
    Good,
    /// Transfers half of each request and reports that.
    Halves,
    /// Returns without completing every third transfer.
    Abandons,
    /// Returns after the third transfer, even if the batch has more.
    Leaves,
    /// Takes all that the batch has before it completes the first. This keeps the contract.
    Hoards,
}

/// A device in memory that sleeps in each blocking write, so that the cache gives it batches.
struct Misbehaving {
    inner: Arc<MemoryDevice>,
    conduct: AtomicU8,
    /// Transfers that `run` has taken; with `Hoards`, the most at a time.
    taken: AtomicUsize,
}

impl Misbehaving {
    fn new(len_bytes: usize) -> Arc<Misbehaving> {
        Arc::new(Misbehaving {
            inner: Arc::new(MemoryDevice::new(len_bytes).unwrap()),
            conduct: AtomicU8::new(Conduct::Good as u8),
            taken: AtomicUsize::new(0),
        })
    }

    fn set(&self, conduct: Conduct) {
        self.taken.store(0, Ordering::SeqCst);
        self.conduct.store(conduct as u8, Ordering::SeqCst);
    }
}

impl Device for Misbehaving {
    fn name(&self) -> &str {
        "misbehaving"
    }
    fn len_bytes(&self) -> Result<u64, DeviceError> {
        self.inner.len_bytes()
    }
    fn is_writable(&self) -> bool {
        true
    }
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        self.inner.read_at(offset_bytes, buffer)
    }
    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        // A context switch: by this the cache learns that writes to this device block.
        std::thread::sleep(Duration::from_micros(10));
        self.inner.write_at(offset_bytes, buffer)
    }
    fn sync(&self) -> Result<(), DeviceError> {
        self.inner.sync()
    }
    fn run(&self, batch: &mut dyn Batch, _depth: usize) {
        let conduct = self.conduct.load(Ordering::SeqCst);
        if conduct == Conduct::Good as u8 {
            return run_serially(self, batch);
        }
        if conduct == Conduct::Hoards as u8 {
            loop {
                let hoard: Vec<Request> = std::iter::from_fn(|| batch.next()).collect();
                if hoard.is_empty() {
                    return;
                }
                self.taken.fetch_max(hoard.len(), Ordering::SeqCst);
                hoard
                    .iter()
                    .for_each(|request| batch.complete(request.tag, run_one(self, request)));
            }
        }
        while let Some(request) = batch.next() {
            let taken = self.taken.fetch_add(1, Ordering::SeqCst) + 1;
            if conduct == Conduct::Halves as u8 {
                let half = Request { len_bytes: request.len_bytes / 2, ..request };
                batch.complete(request.tag, run_one(self, &half));
                continue;
            }
            if conduct == Conduct::Abandons as u8 && taken.is_multiple_of(3) {
                continue;
            }
            batch.complete(request.tag, run_one(self, &request));
            if conduct == Conduct::Leaves as u8 && taken == 3 {
                return;
            }
        }
    }
    fn queue_depth(&self) -> usize {
        16
    }
    fn access_path(&self) -> String {
        "memory, with an own way of running a batch".into()
    }
}

const MISCONDUCTS: [Conduct; 3] = [Conduct::Halves, Conduct::Abandons, Conduct::Leaves];

/// Every second page: the pages are not consecutive, so each is a separate transfer.
const SCATTERED: usize = 64;

#[test]
fn what_a_device_did_not_write_whole_is_an_error_and_stays_dirty() {
    for conduct in MISCONDUCTS {
        let device = Misbehaving::new(REGION);
        let cache = cache(16 << 20);
        let map = cache.map_mut(device.clone()).unwrap();
        let value = |page: usize| 1 + page as u8;
        for page in 0..SCATTERED {
            for at in [0, PAGE - 1] {
                store(&map, 2 * page * PAGE + at, value(page));
            }
        }
        device.set(conduct);
        let (map, failed) = must_end(move || {
            let failed = map.flush_all();
            (map, failed)
        });
        assert!(device.taken.load(Ordering::SeqCst) >= 3, "no batch was run");
        let Err(CacheError::WriteBack { source, .. }) = failed else {
            panic!("{conduct:?}: {failed:?}")
        };
        match (conduct, &source) {
            (Conduct::Halves, DeviceError::ShortWrite { len_bytes, wrote_bytes, .. }) => {
                assert_eq!((*len_bytes, *wrote_bytes), (PAGE, PAGE / 2));
            }
            (Conduct::Abandons | Conduct::Leaves, DeviceError::Unfinished { operation, .. }) => {
                assert_eq!(*operation, IoOperation::Write);
            }
            _ => panic!("{conduct:?}: {source}"),
        }
        assert!(cache.stats().dirty_pages > 0, "{conduct:?}");

        device.set(Conduct::Good);
        // Stores must not wait for a transfer that never ends.
        let map = must_end(move || {
            for page in 0..SCATTERED {
                store(&map, 2 * page * PAGE + 1, value(page));
            }
            map.flush_all().unwrap();
            map
        });
        for page in 0..SCATTERED {
            for at in [0, 1, PAGE - 1] {
                let offset = 2 * page * PAGE + at;
                assert_eq!(byte_of(&*device, offset), value(page), "{conduct:?}: page {page}");
            }
        }
        drop(map);
        assert_eq!(cache.stats().dirty_pages, 0);
    }
}

const REGIONS: usize = 20;

/// A page in each of many regions: all of them are in the device's queue together.
#[test]
fn a_flush_fills_the_queue_across_regions() {
    let device = Misbehaving::new(REGIONS * REGION);
    let cache = cache(16 << 20);
    let map = cache.map_mut(device.clone()).unwrap();
    let store_all = |value: u8| (0..REGIONS).for_each(|n| store(&map, n * REGION, value));
    // From the first flush the cache learns that writes to this device block.
    store_all(1);
    map.flush_all().unwrap();
    device.set(Conduct::Hoards);
    store_all(2);
    map.flush_all().unwrap();
    assert_eq!(device.taken.load(Ordering::SeqCst), REGIONS);
    assert!((0..REGIONS).all(|n| byte_of(&*device, n * REGION) == 2));
}

/// What the device did not ask for was not even sealed; a flush fails for that as well.
#[test]
fn regions_that_a_device_did_not_ask_for_are_an_error_and_stay_dirty() {
    let device = Misbehaving::new(REGIONS * REGION);
    let cache = cache(16 << 20);
    let map = cache.map_mut(device.clone()).unwrap();
    (0..REGIONS).for_each(|n| store(&map, n * REGION, 1));
    map.flush_all().unwrap();
    device.set(Conduct::Leaves);
    (0..REGIONS).for_each(|n| store(&map, n * REGION, 2));
    let failed = map.flush_all();
    let Err(CacheError::WriteBack { source, pages, offset_bytes, end_bytes, .. }) = failed else {
        panic!("{failed:?}")
    };
    assert!(matches!(source, DeviceError::Unfinished { .. }), "{source}");
    let last = (REGIONS - 1) * REGION + PAGE;
    assert_eq!((pages, offset_bytes, end_bytes), (17, 3 * REGION as u64, last as u64));
    assert_eq!(cache.stats().dirty_pages, 17);
    device.set(Conduct::Good);
    map.flush_all().unwrap();
    assert!((0..REGIONS).all(|n| byte_of(&*device, n * REGION) == 2));
}

/// Flushes of pages pinned for writing take turns, and each has many regions to write.
#[test]
fn flushes_of_pinned_pages_in_many_regions_do_not_wait_for_each_other_forever() {
    let device = Misbehaving::new(REGIONS * REGION);
    let cache = cache(16 << 20);
    let map = cache.map_mut(device.clone()).unwrap();
    device.set(Conduct::Hoards);
    must_end(move || {
        let range = |n: usize| (n * REGION) as u64..(n * REGION + PAGE) as u64;
        let pinned: Vec<_> =
            (0..REGIONS).step_by(3).map(|n| map.pin_mut(range(n)).unwrap()).collect();
        std::thread::scope(|scope| {
            for value in 1..=3 {
                let map = &map;
                scope.spawn(move || {
                    for _ in 0..20 {
                        (0..REGIONS)
                            .filter(|n| n % 3 != 0)
                            .for_each(|n| store(map, n * REGION, value));
                        map.flush_all().unwrap();
                    }
                });
            }
        });
        for page in &pinned {
            // SAFETY: pinned for writing.
            unsafe { page.as_mut_ptr().write_volatile(9) };
        }
        map.flush_all().unwrap();
        drop(pinned);
    });
    assert!((0..REGIONS).step_by(3).all(|n| byte_of(&*device, n * REGION) == 9));
}

#[test]
fn what_a_device_did_not_read_is_absent_and_read_when_it_is_asked_for() {
    for conduct in MISCONDUCTS {
        let device = Misbehaving::new(REGION);
        let value = |page: usize| 1 + page as u8;
        for page in 0..SCATTERED {
            device.inner.write_at((2 * page * PAGE) as u64, &[value(page); PAGE]).unwrap();
        }
        let cache = cache(16 << 20);
        let map = cache.map_mut(device.clone()).unwrap();
        device.set(conduct);
        let pages = |page: usize| (2 * page * PAGE) as u64..(2 * page * PAGE + PAGE) as u64;
        let ranges: Vec<_> = (0..SCATTERED).map(pages).collect();
        let map = must_end(move || {
            map.touch_many(&ranges).unwrap();
            map
        });
        assert!(device.taken.load(Ordering::SeqCst) > 0, "no batch was run");
        for page in 0..SCATTERED {
            for at in [0, PAGE - 1] {
                assert_eq!(load(&map, 2 * page * PAGE + at), value(page), "{conduct:?}: {page}");
            }
        }
        drop(map);
        assert_eq!(cache.stats().resident_pages, 0, "{conduct:?}");
    }
}
