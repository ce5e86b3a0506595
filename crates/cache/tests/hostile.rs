//! Situations in which a mapping could hang, lie or lose a store: each was possible once.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use aquifer_cache::{Advice, Cache, Error, Mapping, PageId};
use aquifer_device::{Device, Fault, FaultRule, FaultTarget, Faulty, MemoryDevice};

const PAGE: usize = 4096;
const REGION: usize = 2 << 20;
/// Far beyond what the work takes: only a hang reaches it.
const HANGS_AFTER: Duration = Duration::from_secs(30);

/// Runs `work` in a thread of its own and fails instead of hanging with it.
fn must_end<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    ended.recv_timeout(HANGS_AFTER).expect("it hangs")
}

fn cache(budget_bytes: u64) -> Cache {
    Cache::builder().budget_bytes(budget_bytes).build().unwrap()
}

fn store(map: &Mapping, offset: usize, value: u8) {
    // SAFETY: inside the mapping, which outlives the call.
    unsafe { map.as_mut_ptr().unwrap().add(offset).write_volatile(value) };
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
    let map = cache.map_mut(Arc::new(faulty)).unwrap();
    store(&map, 5 * PAGE, 1);
    control.inject(FaultRule::new(FaultTarget::Writes, Fault::Errno(5)));
    assert!(matches!(map.flush_all(), Err(Error::WriteBack { .. })));
    let map = must_end(move || {
        store(&map, 5 * PAGE, 2);
        map.write(5 * PAGE as u64 + 1, &[3]).unwrap();
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
