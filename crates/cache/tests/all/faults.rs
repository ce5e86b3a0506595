//! Invalid input and failing devices: each gives a typed error, and nothing is lost.

#![allow(clippy::single_range_in_vec_init, reason = "ranges are what the calls take")]

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use aquifer_cache::policy::{HitMode, HitTable, Policy, PolicyKind};
use aquifer_cache::{
    Advice, Backend, Cache, CacheError, FrameId, MapOptions, Mapping, MappingMut, PageId, PageKey,
    Pages,
};
use aquifer_device::{
    Device, DeviceError, Direct, Fault, FaultControl, FaultRule, FaultTarget, Faulty, FileDevice,
    MemoryDevice,
};

use crate::support::{Hooked, content, errno_of, memory, random_bytes, unrelated, wait_until};
use aquifer_sys::signal::FaultContext;
use aquifer_testkit::rng::Rng;
use aquifer_vm::router::serve;
use aquifer_vm::{Served, has_missed_faults};

const PAGE: u64 = 4096;
const BUDGET: u64 = 6 << 20;
const BUDGET_PAGES: u64 = BUDGET / PAGE;

fn cache() -> Cache {
    Cache::builder().budget_bytes(BUDGET).build().unwrap()
}

/// A faulty device over memory of random bytes, its control, and the memory.
fn faulty(pages: u64) -> (Arc<dyn Device>, FaultControl, Arc<MemoryDevice>, Vec<u8>) {
    let bytes = random_bytes((pages * PAGE) as usize, pages);
    let memory = Arc::new(MemoryDevice::from_bytes(&bytes).unwrap());
    let device = Faulty::new(memory.clone());
    let control = device.control();
    (Arc::new(device), control, memory, bytes)
}

fn fails(target: FaultTarget, errno: i32) -> FaultRule {
    FaultRule::new(target, Fault::Errno(errno))
}

/// A device over a temporary file that holds these bytes.
fn file_device(bytes: &[u8], direct: Direct) -> (tempfile::NamedTempFile, Arc<dyn Device>) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let device = FileDevice::options().writable(true).direct(direct).open(file.path()).unwrap();
    (file, Arc::new(device))
}

/// Waits until the statistics of an idle cache are consistent.
fn settled(cache: &Cache) {
    wait_until("consistent statistics", || cache.stats().is_consistent());
}

// ---- loads --------------------------------------------------------------------------------------

#[test]
fn a_read_error_is_typed_and_a_retry_works() {
    let (device, control, _, bytes) = faulty(64);
    let cache = cache();
    let mapping = cache.map_mut(device.clone()).unwrap();
    let pages = cache.pages(unrelated(device)).unwrap();
    control.inject(fails(FaultTarget::Reads, libc::EIO));

    let at = 5 * PAGE;
    type Call = fn(&MappingMut, u64) -> Result<(), CacheError>;
    let calls: [(&str, Call); 9] = [
        ("read", |mapping, at| mapping.read(at..at + 1, |_| ())),
        ("read_exact_at", |mapping, at| mapping.read_exact_at(&mut [0], at)),
        ("write_all_at", |mapping, at| mapping.write_all_at(&[0], at)),
        ("get", |mapping, at| mapping.get::<u8>(at).map(drop)),
        ("set", |mapping, at| mapping.set(at, 0u8)),
        ("pin", |mapping, at| mapping.pin(at..at + 1).map(drop)),
        ("pin_mut", |mapping, at| mapping.pin_mut(at..at + 1).map(drop)),
        ("touch", |mapping, at| mapping.touch(at)),
        ("touch_many", |mapping, at| mapping.touch_many(&[at..at + 1])),
    ];
    for (name, call) in calls {
        match call(&mapping, at) {
            Err(CacheError::Load { offset_bytes, source, .. }) => {
                assert_eq!((offset_bytes, errno_of(&source)), (at, Some(libc::EIO)), "{name}");
            }
            other => panic!("{name}: {other:?}"),
        }
        assert!(!mapping.is_resident(at..at + 1).unwrap(), "{name}");
    }
    let failed = pages.get(PageId(5)).err();
    assert!(matches!(failed, Some(CacheError::Load { offset_bytes, .. }) if offset_bytes == at));
    assert!(matches!(pages.get_mut(PageId(5)), Err(CacheError::Load { .. })));
    assert!(matches!(pages.read(PageId(5), |_| ()), Err(CacheError::Load { .. })));
    assert!(matches!(pages.load(&[PageId(5)]), Err(CacheError::Load { .. })));
    assert!(!pages.is_resident(PageId(5)).unwrap());

    control.clear();
    assert_eq!(mapping.get::<u8>(at).unwrap(), bytes[at as usize]);
    assert_eq!(pages.get(PageId(5)).unwrap()[0], bytes[at as usize]);
    // SAFETY: inside the mapping, and resident.
    assert_eq!(unsafe { mapping.as_ptr().add(at as usize).read() }, bytes[at as usize]);
    settled(&cache);
    assert!(cache.stats().load_errors >= 9 + 4);
}

/// A load of a good page does not fail because read-ahead met a bad page after it.
#[test]
fn read_ahead_into_a_bad_page_does_not_fail_the_good_one() {
    let (device, control, _, bytes) = faulty(256);
    let bad = 100;
    control.inject(fails(FaultTarget::Reads, libc::EIO).range(bad * PAGE..(bad + 1) * PAGE));
    for sequential in [false, true] {
        let cache = cache();
        let mapping = cache.map(device.clone()).unwrap();
        let pages = cache.pages(unrelated(device.clone())).unwrap();
        if sequential {
            mapping.advise(0..mapping.len(), Advice::Sequential).unwrap();
        }
        for page in (0..256).filter(|&page| page != bad) {
            let at = page * PAGE;
            assert_eq!(mapping.get::<u8>(at).unwrap(), bytes[at as usize], "page {page}");
            assert_eq!(pages.get(PageId(page)).unwrap()[0], bytes[at as usize], "page {page}");
        }
        for page in (0..256).filter(|&page| page != bad) {
            // SAFETY: inside the mapping. A bare load that fails would end the test.
            let byte = unsafe { mapping.as_ptr().add((page * PAGE) as usize).read_volatile() };
            assert_eq!(byte, bytes[(page * PAGE) as usize]);
        }
        assert!(matches!(mapping.touch(bad * PAGE), Err(CacheError::Load { .. })));
        assert!(matches!(pages.get(PageId(bad)), Err(CacheError::Load { .. })));
        settled(&cache);
    }
}

/// A device that panics in a read leaves the page absent, and the panic propagates to the caller.
#[test]
fn a_device_that_panics_leaves_the_page_absent() {
    let bytes = random_bytes(64 * PAGE as usize, 64);
    let armed = Arc::new(AtomicBool::new(true));
    let mut device = Hooked::new(Arc::new(MemoryDevice::from_bytes(&bytes).unwrap()));
    let panics = armed.clone();
    device.on_read = Box::new(move |_, _| {
        assert!(!panics.load(Ordering::Relaxed), "this device panics on purpose");
        Ok(())
    });
    let device: Arc<dyn Device> = Arc::new(device);
    let cache = cache();
    let mapping = cache.map(device.clone()).unwrap();
    let pages = cache.pages(unrelated(device)).unwrap();
    let panics = |call: &dyn Fn()| {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
        assert!(result.is_err(), "the panic goes through the call");
    };
    panics(&|| drop(mapping.touch(3 * PAGE)));
    panics(&|| drop(mapping.touch_many(&[5 * PAGE..9 * PAGE])));
    panics(&|| drop(pages.get(PageId(3)).map(drop)));
    assert_eq!(cache.stats().resident_pages, 0, "the frames came back");
    armed.store(false, Ordering::Relaxed);
    assert_eq!(mapping.get::<u8>(3 * PAGE).unwrap(), bytes[3 * PAGE as usize]);
    mapping.touch_many(&[0..64 * PAGE]).unwrap();
    assert_eq!(pages.get(PageId(3)).unwrap()[..], bytes[3 * PAGE as usize..4 * PAGE as usize]);
    settled(&cache);
}

/// A pin that was forgotten keeps its page in memory, and not its stores from the device.
#[test]
fn stores_under_a_forgotten_pin_are_written_when_the_mapping_is_dropped() {
    for others_remain in [false, true] {
        let (device, mut bytes) = memory(16 * PAGE as usize, 1);
        let cache = cache();
        let other = others_remain.then(|| cache.map(device.clone()).unwrap());
        let mapping = cache.map_mut(device.clone()).unwrap();
        let pinned = mapping.pin_mut(2 * PAGE..4 * PAGE).unwrap();
        let first = pinned.as_mut_ptr();
        std::mem::forget(pinned);
        let after = mapping.pin(3 * PAGE..6 * PAGE).unwrap();
        std::mem::forget(after);
        mapping.set(5 * PAGE, !bytes[5 * PAGE as usize]).unwrap();
        // SAFETY: inside the mapping.
        unsafe { first.add(PAGE as usize).write(!bytes[3 * PAGE as usize]) };
        drop(mapping);
        drop(other);
        for page in [3, 5] {
            let at = page * PAGE as usize;
            bytes[at] = !bytes[at];
        }
        assert!(device.to_vec() == bytes, "others remain: {others_remain}");
        assert_eq!(cache.stats().resident_pages, 0);
        settled(&cache);
    }
}

/// Serves a bare load as the handler does, but without a signal.
fn bare_load(mapping: &Mapping, at: u64, hardware_error: bool) -> Served {
    let address = mapping.as_ptr() as usize + at as usize;
    let (signal, write) = (libc::SIGBUS, Some(false));
    let fault = FaultContext { signal, address, write, fallible: false, hardware_error };
    // SAFETY: the mapping is borrowed.
    unsafe { serve(&fault) }
}

#[test]
fn a_bare_access_that_fails_is_explained_afterwards() {
    let (device, control, _, _) = faulty(64);
    let cache = cache();
    let mapping = cache.map(device).unwrap();
    assert_eq!(bare_load(&mapping, 0, false), Served::Yes);
    assert!(mapping.last_fault_error().is_none());
    // The page is resident; a load from it would raise the signal again.
    assert_eq!(bare_load(&mapping, 0, true), Served::No);
    let explained = |mapping: &Mapping| match mapping.last_fault_error() {
        Some(CacheError::Load { source, .. }) => source,
        other => panic!("{other:?}"),
    };
    assert_eq!(errno_of(&explained(&mapping)), Some(libc::EHWPOISON));
    let rule = FaultRule::new(FaultTarget::Reads, Fault::EndsEarly { got_bytes: 100 });
    let rule = control.inject(rule);
    assert_eq!(bare_load(&mapping, 9 * PAGE, false), Served::No);
    let source = explained(&mapping);
    assert!(matches!(source, DeviceError::ShortRead { got_bytes: 100, .. }), "{source:?}");
    control.remove(rule);
    control.inject(fails(FaultTarget::Reads, libc::EIO));
    assert_eq!(bare_load(&mapping, 9 * PAGE, false), Served::No);
    assert_eq!(errno_of(&explained(&mapping)), Some(libc::EIO));
}

#[test]
fn bare_loads_find_zeros_where_that_is_asked_for() {
    let (device, control, _, bytes) = faulty(64);
    let cache = cache();
    let options = MapOptions::new().backend(Backend::User).zeros_for_missing(true);
    let mapping = cache.map_with(device.clone(), options.clone()).unwrap();
    let at = |page: u64| {
        let word = &bytes[(page * PAGE) as usize..][..8];
        u64::from_ne_bytes(word.try_into().unwrap())
    };
    let load = |page: u64| {
        let address = mapping.as_ptr().wrapping_add((page * PAGE) as usize).cast::<u64>();
        // SAFETY: inside the mapping, which answers what it cannot load.
        unsafe { address.read_volatile() }
    };
    mapping.advise(0..mapping.len(), Advice::Random).unwrap();
    assert_eq!(load(1), at(1));
    assert!(mapping.take_missed_fault().is_none());
    let rule = control.inject(fails(FaultTarget::Reads, libc::EIO));
    assert_eq!((load(9), load(1)), (0, at(1)));
    let tried = cache.stats().load_errors;
    // Without the device, which may take long to fail.
    assert_eq!((load(20), load(9), cache.stats().load_errors), (0, 0, tried));
    assert!(has_missed_faults());
    assert!(matches!(mapping.get::<u64>(9 * PAGE), Err(CacheError::Load { .. })), "calls fail");
    assert!(!mapping.is_resident(9 * PAGE..10 * PAGE).unwrap());
    let Some(CacheError::Load { offset_bytes, source, .. }) = mapping.take_missed_fault() else {
        panic!("not reported")
    };
    assert_eq!((offset_bytes, errno_of(&source)), (9 * PAGE, Some(libc::EIO)));
    assert!(mapping.take_missed_fault().is_none(), "reported once");
    control.remove(rule);
    assert_eq!((load(9), load(20)), (at(9), at(20)));
    // What a call brings replaces zeros at once.
    let rule = control.inject(fails(FaultTarget::Reads, libc::EIO));
    assert_eq!((load(30), load(31)), (0, 0));
    control.remove(rule);
    assert_eq!((mapping.get::<u64>(30 * PAGE).unwrap(), load(30), load(31)), (at(30), at(30), 0));
    // The device is well again, and zeros were read all the same.
    assert!(matches!(mapping.take_missed_fault(), Some(CacheError::Load { .. })));
    assert_eq!((load(30), load(31)), (at(30), at(31)));
    // Stores to zeros would be lost.
    assert!(matches!(cache.map_mut(device.clone()), Err(CacheError::Kernel { .. })));
    drop(mapping);
    let writable = cache.map_mut(device.clone()).unwrap();
    let reading = cache.map_with(device, options).unwrap();
    control.inject(fails(FaultTarget::Reads, libc::EIO));
    assert_eq!(bare_load(&reading, 40 * PAGE, false), Served::No);
    drop(writable);
}

/// Threads that load without calls while the device fails now and then, and one that reports.
#[test]
fn zeros_are_gone_once_they_are_reported() {
    let (device, control, _, bytes) = faulty(64);
    let cache = cache();
    let options = MapOptions::new().backend(Backend::User).zeros_for_missing(true);
    let mapping = cache.map_with(device, options).unwrap();
    let load = |page: u64| {
        let address = mapping.as_ptr().wrapping_add((page * PAGE) as usize).cast::<u64>();
        // SAFETY: as above.
        unsafe { address.read_volatile() }.to_ne_bytes()
    };
    let at = |page: u64| &bytes[(page * PAGE) as usize..][..8];
    let is_over = AtomicBool::new(false);
    /// Ends the threads, also of a test that fails.
    struct Ends<'a>(&'a AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let _ends = Ends(&is_over);
        for seed in 0..3 {
            let (load, at, is_over, mapping) = (&load, &at, &is_over, &mapping);
            scope.spawn(move || {
                let _ends = Ends(is_over);
                for page in (0..64).cycle().skip(seed * 20) {
                    let found = load(page);
                    assert!(found == at(page) || found == [0; 8], "page {page}: {found:?}");
                    if page % 7 == 0 {
                        let _ = mapping.touch(page * PAGE);
                    }
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        for _ in 0..200 {
            mapping.advise(0..mapping.len(), Advice::DontNeed).unwrap();
            let rule = control.inject(fails(FaultTarget::Reads, libc::EIO));
            while !has_missed_faults() {
                assert!(!is_over.load(Ordering::Relaxed), "a thread has failed");
                mapping.advise(0..mapping.len(), Advice::DontNeed).unwrap();
                std::thread::yield_now();
            }
            control.remove(rule);
            while mapping.take_missed_fault().is_some() {}
            for page in 0..64 {
                // A thread may have met the failure before its end, and answers only now.
                assert!(load(page) == at(page) || has_missed_faults(), "page {page}");
            }
        }
    });
    while mapping.take_missed_fault().is_some() {}
    for page in 0..64 {
        assert_eq!(load(page), at(page), "page {page}");
    }
}

/// Two threads load from an absent page: the second one's fault is handled when the page is
/// resident. Not all hardware and emulators report that it was a load.
#[test]
fn a_late_load_is_served_where_the_hardware_does_not_tell() {
    let unknown = |mapping: &Mapping, signal| {
        let context = FaultContext {
            signal,
            address: mapping.as_ptr() as usize + 3 * PAGE as usize,
            write: None,
            fallible: false,
            hardware_error: false,
        };
        // SAFETY: the mapping is borrowed.
        unsafe { serve(&context) }
    };
    let (device, _, _, _) = faulty(64);
    let cache = cache();
    let mapping = cache.map(device.clone()).unwrap();
    for _ in 0..2 {
        assert_eq!(unknown(&mapping, libc::SIGBUS), Served::Yes);
    }
    assert_eq!(unknown(&mapping, libc::SIGSEGV), Served::No, "a store is not allowed");
    drop(mapping);
    let mapping = cache.map_mut(device).unwrap();
    for _ in 0..2 {
        assert_eq!(unknown(&mapping, libc::SIGBUS), Served::Yes);
    }
    mapping.set(3 * PAGE, 1u8).unwrap();
}

#[test]
fn a_failed_pin_leaves_nothing_pinned() {
    let (device, control, _, _) = faulty(64);
    let cache = cache();
    let mapping = cache.map_mut(device).unwrap();
    control.inject(fails(FaultTarget::Reads, libc::EIO).range(20 * PAGE..20 * PAGE + 1));
    for _ in 0..2 {
        let failed = mapping.pin(10 * PAGE..30 * PAGE).err();
        let Some(CacheError::Load { offset_bytes, .. }) = failed else { panic!("{failed:?}") };
        assert_eq!(offset_bytes, 20 * PAGE);
    }
    assert!(mapping.pin_mut(10 * PAGE..30 * PAGE).is_err());
    mapping.advise(0..mapping.len(), Advice::DontNeed).unwrap();
    wait_until("nothing resident", || cache.stats().resident_pages == 0);
    settled(&cache);
}

#[test]
fn a_short_read_is_an_error_not_zeros() {
    for fault in [Fault::ShortRead { got_bytes: 100 }, Fault::EndsEarly { got_bytes: 100 }] {
        let (device, control, _, bytes) = faulty(16);
        let cache = cache();
        let mapping = cache.map(device.clone()).unwrap();
        let pages = cache.pages(unrelated(device)).unwrap();
        control.inject(FaultRule::new(FaultTarget::Reads, fault).at_most(2));
        for failed in [mapping.touch(0).err(), pages.get(PageId(0)).err()] {
            let Some(CacheError::Load { source: DeviceError::ShortRead { got_bytes, .. }, .. }) =
                failed
            else {
                panic!("{failed:?}")
            };
            assert_eq!(got_bytes, 100);
        }
        assert_eq!(mapping.read(0..PAGE, |look| look.to_vec()).unwrap(), bytes[..4096]);
        assert_eq!(pages.get(PageId(0)).unwrap()[..], bytes[..4096]);
    }
}

#[test]
fn a_file_that_shrinks_and_grows() {
    for direct in [Direct::Auto, Direct::Never] {
        let bytes = random_bytes((64 * PAGE) as usize, 1);
        let (file, device) = file_device(&bytes, direct);
        let cache = cache();
        let mapping = cache.map_mut(device.clone()).unwrap();
        let pages = cache.pages(unrelated(device)).unwrap();
        mapping.set(50 * PAGE, 7u8).unwrap();

        let file = file.as_file();
        file.set_len(10 * PAGE + 100).unwrap();
        for page in [10, 11, 40, 63] {
            assert!(
                matches!(mapping.touch(page * PAGE), Err(CacheError::Load { .. })),
                "page {page}"
            );
            assert!(matches!(pages.get(PageId(page)), Err(CacheError::Load { .. })), "page {page}");
        }
        assert_eq!(mapping.get::<u8>(9 * PAGE).unwrap(), bytes[9 * PAGE as usize]);
        // A write-back never extends the file: the page stays dirty, and is written when the file
        // is longer again.
        let Err(CacheError::WriteBack { offset_bytes, end_bytes, pages: failed, .. }) =
            mapping.flush_all()
        else {
            panic!("flushed beyond the end")
        };
        assert_eq!((offset_bytes, end_bytes, failed), (50 * PAGE, 51 * PAGE, 1));
        assert_eq!(file.metadata().unwrap().len(), 10 * PAGE + 100);

        file.set_len(100 * PAGE).unwrap();
        mapping.flush_all().unwrap();
        assert_eq!(mapping.len(), 64 * PAGE);
        assert!(matches!(mapping.touch(64 * PAGE), Err(CacheError::OutOfBounds { .. })));
        assert_eq!(mapping.get::<u8>(63 * PAGE).unwrap(), 0);
        assert_eq!(pages.get(PageId(50)).unwrap()[0], 7);
        // Drop both first: a mapping of another length cannot share their pages.
        drop((mapping, pages));
        assert_eq!(cache.map(mapping_device(file)).unwrap().len(), 100 * PAGE);
    }
}

fn mapping_device(file: &std::fs::File) -> Arc<dyn Device> {
    use std::os::fd::AsRawFd;
    let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    Arc::new(FileDevice::open(path).unwrap())
}

#[test]
fn missing_unreadable_and_empty_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("missing");
    assert!(matches!(FileDevice::open(&path), Err(DeviceError::Open { .. })));
    std::fs::write(&path, b"").unwrap();
    let empty: Arc<dyn Device> = Arc::new(FileDevice::open(&path).unwrap());
    assert!(matches!(cache().map(empty.clone()), Err(CacheError::Empty { .. })));
    assert!(matches!(cache().pages(empty), Err(CacheError::Empty { .. })));
}

#[test]
fn the_last_page_is_partial() {
    for direct in [Direct::Auto, Direct::Never] {
        let bytes = random_bytes(5 * PAGE as usize + 777, 2);
        let (file, device) = file_device(&bytes, direct);
        let cache = cache();
        let mapping = cache.map_mut(device.clone()).unwrap();
        assert_eq!(mapping.read(0..mapping.len(), |look| look.to_vec()).unwrap(), bytes);
        mapping.write_all_at(&[1; 77], 5 * PAGE + 700).unwrap();
        // After the end, in the last page: readable, zero, and never written to the file.
        let behind = mapping.as_mut_ptr().wrapping_add(bytes.len());
        // SAFETY: the last page is mapped whole.
        unsafe {
            assert_eq!(behind.read_volatile(), 0);
            behind.write_volatile(9);
        }
        mapping.flush_all().unwrap();
        let mut expected = bytes.clone();
        expected[5 * PAGE as usize + 700..].fill(1);
        assert_eq!(std::fs::read(file.path()).unwrap(), expected);
        let pages = cache.pages(unrelated(device)).unwrap();
        assert_eq!(pages.page_count(), 6);
        assert_eq!(pages.get(PageId(5)).unwrap()[777..], [0; 4096 - 777]);
    }
}

/// A mapping keeps its original length when another program appends to the file.
#[test]
fn the_last_page_is_written_also_when_the_file_has_grown() {
    for direct in [Direct::Auto, Direct::Never] {
        let mut expected = random_bytes(10_000, 3);
        let (file, device) = file_device(&expected, direct);
        let cache = cache();
        let mapping = cache.map_mut(device.clone()).unwrap();
        mapping.set(9000, 1u8).unwrap();
        file.as_file().write_all_at(&[2; 20_000], 10_000).unwrap();
        mapping.flush_all().unwrap();
        mapping.set(9001, 3u8).unwrap();
        drop(mapping);
        expected[9000..9002].copy_from_slice(&[1, 3]);
        expected.extend([2; 20_000]);
        assert!(std::fs::read(file.path()).unwrap() == expected, "{}", device.access_path());
    }
}

// ---- write-back ---------------------------------------------------------------------------------

/// Dirties pages 3, 4 and 9 with 1, 2 and 3.
fn dirty_three(mapping: &MappingMut, pages: &Pages) {
    for (page, value) in [(3, 1u8), (4, 2), (9, 3)] {
        mapping.set(page * PAGE, value).unwrap();
        pages.get_mut(PageId(page)).unwrap()[0] = value;
    }
}

#[test]
fn a_failed_write_leaves_its_pages_dirty_and_flush_fails_until_it_succeeds() {
    for errno in [libc::ENOSPC, libc::EIO] {
        let (device, control, memory, bytes) = faulty(64);
        let (other, other_control, other_memory, _) = faulty(64);
        let cache = cache();
        let mapping = cache.map_mut(device).unwrap();
        let pages = cache.pages(other).unwrap();
        dirty_three(&mapping, &pages);
        let on_nine = 9 * PAGE..9 * PAGE + 1;
        control.inject(fails(FaultTarget::Writes, errno).range(on_nine.clone()));
        other_control.inject(fails(FaultTarget::Writes, errno).range(on_nine));
        for _ in 0..3 {
            for failed in [mapping.flush_all(), pages.flush_all()] {
                let Err(CacheError::WriteBack { offset_bytes, end_bytes, pages, source, .. }) =
                    failed
                else {
                    panic!("{failed:?}")
                };
                assert_eq!((offset_bytes, end_bytes, pages), (9 * PAGE, 10 * PAGE, 1));
                assert_eq!(errno_of(&source), Some(errno));
            }
            // The pages that could be written were written.
            for memory in [&memory, &other_memory] {
                assert_eq!(memory.to_vec()[3 * PAGE as usize], 1);
                assert_eq!(memory.to_vec()[9 * PAGE as usize], bytes[9 * PAGE as usize]);
            }
            assert_eq!(cache.stats().dirty_pages, 2);
        }
        // A range without the bad page is flushed.
        mapping.flush(0..9 * PAGE).unwrap();
        pages.flush(PageId(0)..PageId(9)).unwrap();
        assert!(mapping.flush(9 * PAGE..9 * PAGE + 1).is_err());
        control.clear();
        other_control.clear();
        mapping.flush_all().unwrap();
        pages.flush_all().unwrap();
        assert_eq!(memory.to_vec()[9 * PAGE as usize], 3);
        assert_eq!(other_memory.to_vec()[9 * PAGE as usize], 3);
        assert_eq!(cache.stats().dirty_pages, 0);
    }
}

/// A page whose write failed still accepts stores: through a pointer, a call, and the kernel.
#[test]
fn a_page_whose_write_failed_is_writable() {
    let (device, control, memory, _) = faulty(64);
    let cache = cache();
    let mapping = cache.map_mut(device).unwrap();
    let base = mapping.as_mut_ptr();
    for page in 0..8 {
        mapping.set(page * PAGE, 1u8).unwrap();
    }
    control.inject(fails(FaultTarget::Writes, libc::ENOSPC));
    assert!(mapping.flush_all().is_err());
    mapping.set(1, 2u8).unwrap();
    // SAFETY: inside the mapping.
    unsafe { base.add(PAGE as usize + 1).write_volatile(3) };
    {
        let pinned = mapping.pin_mut(2 * PAGE..3 * PAGE).unwrap();
        let zero = std::fs::File::open("/dev/zero").unwrap();
        use std::os::fd::AsRawFd;
        let target = pinned.as_mut_ptr().cast();
        // SAFETY: the pinned page.
        let got = unsafe { libc::read(zero.as_raw_fd(), target, PAGE as usize) };
        assert_eq!(got, PAGE as isize, "{}", std::io::Error::last_os_error());
    }
    control.clear();
    mapping.flush_all().unwrap();
    let now = memory.to_vec();
    assert_eq!((now[1], now[PAGE as usize + 1]), (2, 3));
    assert!(now[2 * PAGE as usize..3 * PAGE as usize].iter().all(|&byte| byte == 0));
}

#[test]
fn a_failed_sync_is_reported_as_such() {
    let (device, control, _, _) = faulty(64);
    let cache = cache();
    let mapping = cache.map_mut(device.clone()).unwrap();
    let pages = cache.pages(unrelated(device.clone())).unwrap();
    mapping.set(0, 1u8).unwrap();
    control.inject(fails(FaultTarget::Syncs, libc::EIO));
    for _ in 0..3 {
        for failed in [mapping.flush_all(), pages.flush_all()] {
            let Err(CacheError::Sync { source, .. }) = failed else { panic!("{failed:?}") };
            assert_eq!(errno_of(&source), Some(libc::EIO));
        }
    }
    // Final, even if later syncs of the device succeed.
    control.clear();
    for failed in [
        crate::support::block_on(mapping.flush_async(0..PAGE)),
        mapping.flush(0..PAGE),
        pages.flush(PageId(9)..PageId(10)),
    ] {
        let Err(CacheError::Sync { source, .. }) = failed else { panic!("{failed:?}") };
        assert_eq!(errno_of(&source), Some(libc::EIO));
    }
    drop(mapping);
    cache.map_mut(device).unwrap().flush_all().unwrap();
}

/// More dirty pages than the budget holds, on a full device: calls fail, nothing is lost.
#[test]
fn a_budget_full_of_unwritable_pages_refuses_and_recovers() {
    let (device, control, memory, mut bytes) = faulty(2 * BUDGET_PAGES);
    let cache = cache();
    let mapping = cache.map_mut(device).unwrap();
    control.inject(fails(FaultTarget::Writes, libc::ENOSPC));
    let mut refused = None;
    let mut page = 0;
    while refused.is_none() {
        match mapping.set(page * PAGE, 0xa5u8) {
            Ok(()) => bytes[(page * PAGE) as usize] = 0xa5,
            Err(error) => refused = Some(error),
        }
        page += 1;
    }
    let Some(CacheError::Exhausted { unwritable, .. }) = refused else { panic!("{refused:?}") };
    assert!(unwritable > 0 && page > BUDGET_PAGES / 2, "{unwritable} at page {page}");
    assert!(matches!(mapping.flush_all(), Err(CacheError::WriteBack { .. })));
    control.clear();
    mapping.set(page * PAGE, 0xa5u8).unwrap();
    bytes[(page * PAGE) as usize] = 0xa5;
    mapping.flush_all().unwrap();
    assert!(memory.to_vec() == bytes);
    settled(&cache);
}

/// A thread that needs a page never writes to a device that does not declare its writes
/// signal-safe.
#[test]
fn a_device_that_does_not_say_so_is_never_written_by_a_thread_that_needs_a_page() {
    let mut device = Hooked::new(Arc::new(MemoryDevice::new(4 * BUDGET as usize).unwrap()));
    let caller = std::thread::current().id();
    let written_here = Arc::new(AtomicBool::new(false));
    let noted = written_here.clone();
    device.on_write = Box::new(move |_, _| {
        noted.fetch_or(std::thread::current().id() == caller, Ordering::Relaxed);
        Ok(())
    });
    let cache = cache();
    let mapping = cache.map_mut(device).unwrap();
    for round in 0..4u8 {
        for page in 0..4 * BUDGET_PAGES {
            mapping.write_all_at(&[round; 8], page * PAGE).unwrap();
        }
    }
    assert!(!written_here.load(Ordering::Relaxed), "written on the way to a page");
    assert!(cache.stats().written_pages > 0, "the budget is smaller than the device");
    // Drop it in another thread, because dropping writes back in the calling thread.
    std::thread::spawn(move || drop(mapping)).join().unwrap();
}

#[test]
fn an_older_snapshot_does_not_overwrite_a_newer_one() {
    let memory = Arc::new(MemoryDevice::new((8 * PAGE) as usize).unwrap());
    let mut device = Hooked::new(memory.clone());
    let writes = Arc::new(AtomicUsize::new(0));
    let (seen, ended) = (writes.clone(), Arc::new(AtomicBool::new(false)));
    let second_ended = ended.clone();
    device.on_write = Box::new(move |_, _| {
        if seen.fetch_add(1, Ordering::SeqCst) == 0 {
            // The first write is slow: without the lock a second flush would overtake it.
            for _ in 0..20_000 {
                if second_ended.load(Ordering::SeqCst) {
                    break;
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    });
    let cache = cache();
    let mapping = cache.map_mut(device).unwrap();
    let pinned = mapping.pin_mut(0..PAGE).unwrap();
    let target = pinned.as_mut_ptr();
    // SAFETY: pinned for writing.
    unsafe { target.write_volatile(1) };
    std::thread::scope(|scope| {
        scope.spawn(|| mapping.flush_all().unwrap());
        wait_until("the first write", || writes.load(Ordering::SeqCst) > 0);
        // SAFETY: pinned for writing.
        unsafe { target.write_volatile(2) };
        mapping.flush_all().unwrap();
        ended.store(true, Ordering::SeqCst);
    });
    assert_eq!(memory.to_vec()[0], 2, "both flushes returned, so the newer store is on the device");
}

/// A flush that waits for another thread's write of a page does not succeed if that write fails.
#[test]
fn a_flush_does_not_hide_behind_a_write_that_failed() {
    let memory = Arc::new(MemoryDevice::new((8 * PAGE) as usize).unwrap());
    let mut device = Hooked::new(memory.clone());
    let failing = Arc::new(AtomicBool::new(true));
    let fails = failing.clone();
    device.on_write = Box::new(move |_, _| {
        std::thread::yield_now();
        if fails.load(Ordering::SeqCst) {
            Err(crate::support::io_error(aquifer_device::IoOperation::Write, libc::EIO))
        } else {
            Ok(())
        }
    });
    let cache = cache();
    let mapping = cache.map_mut(device).unwrap();
    mapping.set(0, 1u8).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..crate::support::steps(10_000) {
                    assert!(mapping.flush_all().is_err(), "nothing was ever written");
                }
            });
        }
    });
    failing.store(false, Ordering::SeqCst);
    mapping.flush_all().unwrap();
    assert_eq!(memory.to_vec()[0], 1);
}

// ---- limits -------------------------------------------------------------------------------------

#[test]
fn budgets_and_page_sizes_that_cannot_work() {
    for budget_bytes in [0, 1 << 20, BUDGET - 1, 1 << 60] {
        let built = Cache::builder().budget_bytes(budget_bytes).build();
        let Err(CacheError::Budget { min_bytes, max_bytes, .. }) = built else {
            panic!("{budget_bytes} bytes were accepted")
        };
        assert!(min_bytes == BUDGET && max_bytes < 1 << 60);
        assert!(matches!(cache().resize(budget_bytes), Err(CacheError::Budget { .. })));
    }
    for page_bytes in [0, 512, 5000, 12288, 1 << 17] {
        let built = Cache::builder().page_bytes(page_bytes).budget_bytes(64 << 20).build();
        assert!(matches!(built, Err(CacheError::PageSize { .. })), "{page_bytes} were accepted");
    }
}

#[test]
fn ranges_out_of_bounds() {
    let (device, _, _, _) = faulty(4);
    let cache = cache();
    let mapping = cache.map_mut(device.clone()).unwrap();
    let pages = cache.pages(unrelated(device)).unwrap();
    let len = mapping.len();
    for at in [len, len + 1, u64::MAX - 1, u64::MAX] {
        let end = at.saturating_add(1);
        let refused = [
            mapping.touch(at),
            mapping.touch_mut(at),
            mapping.read(at..end.max(at), |_| ()).and(if at == len {
                mapping.touch(at)
            } else {
                Ok(())
            }),
            mapping.get::<u8>(at).map(drop),
            mapping.set(at, 1u8),
            mapping.write_all_at(&[1], at),
            mapping.pin(at - 1..end).map(drop),
            mapping.flush(at - 1..end),
            mapping.prefetch(&[0..1, at - 1..end]),
            mapping.touch_many(&[0..1, at - 1..end]),
            mapping.advise(at - 1..end, Advice::WillNeed),
            mapping.is_resident(at - 1..end).map(drop),
        ];
        for (call, result) in refused.into_iter().enumerate() {
            assert!(
                matches!(result, Err(CacheError::OutOfBounds { .. })),
                "call {call} at {at}: {result:?}"
            );
        }
    }
    #[expect(clippy::reversed_empty_ranges, reason = "that is the point")]
    let backwards = mapping.read(2..1, |_| ());
    assert!(matches!(backwards, Err(CacheError::OutOfBounds { .. })));
    assert_eq!(mapping.read(len..len, |bytes| bytes.len()).unwrap(), 0);
    for page in [4, 5, u64::MAX] {
        assert!(matches!(pages.get(PageId(page)), Err(CacheError::OutOfBounds { .. })));
        assert!(matches!(pages.get_mut(PageId(page)), Err(CacheError::OutOfBounds { .. })));
        assert!(matches!(pages.read(PageId(page), |_| ()), Err(CacheError::OutOfBounds { .. })));
        assert!(matches!(pages.load(&[PageId(page)]), Err(CacheError::OutOfBounds { .. })));
        assert!(matches!(pages.prefetch(PageId(page), 1), Err(CacheError::OutOfBounds { .. })));
    }
    assert!(matches!(
        pages.read_exact_at(&mut [0; 2], len - 1),
        Err(CacheError::OutOfBounds { .. })
    ));
    pages.prefetch(PageId(1), u64::MAX).unwrap();
}

#[test]
fn a_device_that_wants_more_alignment_than_a_page() {
    let memory = Arc::new(MemoryDevice::new(1 << 20).unwrap());
    for (alignment_bytes, page_bytes, fits) in
        [(8192, 4096, false), (8192, 16384, true), (3000, 4096, false), (512, 4096, true)]
    {
        let mut device = Hooked::new(memory.clone());
        device.alignment_bytes = alignment_bytes;
        let device = Arc::new(device);
        let cache = Cache::builder().page_bytes(page_bytes).budget_bytes(16 << 20).build().unwrap();
        let mapped = cache.map(device.clone()).map(drop);
        let opened = cache.pages(device).map(drop);
        for result in [mapped, opened] {
            match result {
                Ok(()) => assert!(fits),
                Err(CacheError::Alignment { alignment_bytes: named, .. }) => {
                    assert!(!fits && named == alignment_bytes);
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
}

#[test]
fn writes_to_what_was_opened_for_reading() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), [7u8; 4096]).unwrap();
    let read_only: Arc<dyn Device> = Arc::new(FileDevice::open(file.path()).unwrap());
    let cache = cache();
    assert!(matches!(cache.map_mut(read_only.clone()), Err(CacheError::ReadOnly { .. })));
    let pages = cache.pages(read_only).unwrap();
    assert!(matches!(pages.get_mut(PageId(0)), Err(CacheError::ReadOnly { .. })));
    assert_eq!(pages.get(PageId(0)).unwrap()[0], 7);
}

#[test]
fn everything_pinned_is_exhausted_until_a_pin_is_dropped() {
    let (device, _, _, bytes) = faulty(2 * BUDGET_PAGES);
    let cache = cache();
    let mapping = cache.map_mut(device.clone()).unwrap();
    let mut pins = vec![];
    let mut page = 0;
    let refused = loop {
        match mapping.pin(page * PAGE..page * PAGE + 1) {
            Ok(pin) => pins.push(pin),
            Err(error) => break error,
        }
        page += 1;
    };
    let CacheError::Exhausted { pinned, .. } = refused else { panic!("{refused}") };
    assert!(pinned > 0);
    // All but the reserve.
    assert_eq!(page, BUDGET_PAGES - 16);
    assert!(matches!(mapping.touch(page * PAGE), Err(CacheError::Exhausted { .. })));
    assert!(matches!(
        mapping.touch_many(&[page * PAGE..(page + 4) * PAGE]),
        Err(CacheError::Exhausted { .. })
    ));
    pins.truncate(10);
    assert_eq!(mapping.get::<u8>(page * PAGE).unwrap(), bytes[(page * PAGE) as usize]);
    drop(pins);
    drop(mapping);

    let pages = cache.pages(device).unwrap();
    let mut guards = vec![];
    let refused = loop {
        let id = PageId(guards.len() as u64);
        // Alternate between shared and writing guards.
        let guard = if id.0.is_multiple_of(2) {
            pages.get(id).map(|guard| (Some(guard), None))
        } else {
            pages.get_mut(id).map(|guard| (None, Some(guard)))
        };
        match guard {
            Ok(guard) => guards.push(guard),
            Err(error) => break error,
        }
    };
    let CacheError::Exhausted { pinned, unwritable } = refused else { panic!("{refused}") };
    assert!(pinned > 0 && unwritable == 0, "{pinned} pinned, {unwritable} unwritable");
    assert_eq!(guards.len() as u64, BUDGET_PAGES - 16);
    let all: Vec<PageId> = (0..BUDGET_PAGES + 1).map(PageId).collect();
    drop(guards);
    assert!(matches!(pages.get_many(&all), Err(CacheError::Exhausted { .. })));
    assert_eq!(pages.get_many(&all[..100]).unwrap().len(), 100);
    settled(&cache);
}

/// A thread that holds a page exclusively may need frames: the evictor must not wait for it.
#[test]
fn a_writing_guard_does_not_stop_eviction() {
    let (device, _, memory, mut bytes) = faulty(4 * BUDGET_PAGES);
    let cache = cache();
    let pages = cache.pages(device).unwrap();
    for held in [0, 700, BUDGET_PAGES] {
        let mut guard = pages.get_mut(PageId(held)).unwrap();
        for page in (0..4 * BUDGET_PAGES).filter(|&page| page != held) {
            pages.get_mut(PageId(page)).unwrap()[0] = page as u8;
            bytes[(page * PAGE) as usize] = page as u8;
        }
        guard[0] = 0xee;
        bytes[(held * PAGE) as usize] = 0xee;
    }
    pages.flush_all().unwrap();
    assert!(memory.to_vec() == bytes);
}

#[test]
fn one_page_takes_a_limited_number_of_pins() {
    let (device, _, memory, _) = faulty(4);
    let cache = cache();
    let mapping = cache.map_mut(device.clone()).unwrap();
    let mut pins = vec![];
    let refused = loop {
        match mapping.pin(0..1) {
            Ok(pin) => pins.push(pin),
            Err(error) => break error,
        }
    };
    let CacheError::TooManyPins { offset_bytes: 0, pins: most } = refused else {
        panic!("{refused}")
    };
    assert_eq!(pins.len() as u64, most);
    // The page is clean: pinning it for writing as well must not overflow the count.
    assert!(matches!(mapping.pin_mut(0..1), Err(CacheError::TooManyPins { .. })));
    assert!(matches!(mapping.read(0..1, |_| ()), Err(CacheError::TooManyPins { .. })));
    mapping.touch_mut(0).unwrap();
    assert!(matches!(mapping.pin_mut(0..1), Err(CacheError::TooManyPins { .. })));
    // With all pins taken, one for writing, a flush must not be silently incomplete.
    pins.pop();
    let for_writing = mapping.pin_mut(0..1).unwrap();
    // SAFETY: pinned for writing.
    unsafe { for_writing.as_mut_ptr().write_volatile(0x5a) };
    if mapping.flush_all().is_ok() {
        assert_eq!(memory.to_vec()[0], 0x5a);
    }
    drop(for_writing);
    drop(pins);
    mapping.flush_all().unwrap();
    assert_eq!(memory.to_vec()[0], 0x5a);
    mapping.advise(0..PAGE, Advice::DontNeed).unwrap();
    assert!(!mapping.is_resident(0..1).unwrap());

    let pages = cache.pages(unrelated(device)).unwrap();
    let guards: Vec<_> = (0..most).map(|_| pages.get(PageId(0)).unwrap()).collect();
    assert!(matches!(pages.get(PageId(0)), Err(CacheError::TooManyPins { .. })));
    assert_eq!(pages.read(PageId(0), |bytes| bytes.get::<u8>(0)).unwrap(), 0x5a);
    drop(guards);
    pages.get_mut(PageId(0)).unwrap()[0] = 1;
}

// ---- many ---------------------------------------------------------------------------------------

/// Random replacement that counts the victims it named.
#[derive(Default)]
struct Random {
    held: Vec<FrameId>,
    slot_of: Vec<Option<usize>>,
    state: u64,
    named: Arc<AtomicUsize>,
}

impl Policy for Random {
    fn name(&self) -> &'static str {
        "test-random"
    }
    fn hit_mode(&self) -> HitMode {
        HitMode::Ignore
    }
    fn resize(&mut self, _frames: usize, max_frames: usize) {
        self.held.reserve(max_frames - self.held.len());
        self.slot_of.resize(max_frames, None);
    }
    fn inserted(&mut self, frame: FrameId, _page: PageKey, _hits: &HitTable) {
        assert!(self.slot_of[frame.0 as usize].replace(self.held.len()).is_none(), "held twice");
        self.held.push(frame);
    }
    fn removed(&mut self, frame: FrameId) {
        let Some(slot) = self.slot_of[frame.0 as usize].take() else {
            return;
        };
        self.held.swap_remove(slot);
        if let Some(moved) = self.held.get(slot) {
            self.slot_of[moved.0 as usize] = Some(slot);
        }
    }
    fn victims(
        &mut self,
        want: usize,
        _hits: &HitTable,
        _page_of: &dyn Fn(FrameId) -> PageKey,
        victims: &mut Vec<FrameId>,
    ) {
        for _ in 0..want.min(self.held.len()) {
            self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1);
            let frame = self.held[(self.state >> 33) as usize % self.held.len()];
            self.removed(frame);
            victims.push(frame);
        }
        self.named.fetch_add(victims.len(), Ordering::Relaxed);
    }
    fn returned(&mut self, frame: FrameId, page: PageKey, hits: &HitTable) {
        self.inserted(frame, page, hits);
    }
}

#[test]
fn a_policy_of_ones_own_names_the_victims() {
    let named = Arc::new(AtomicUsize::new(0));
    let used = named.clone();
    let cache = Cache::builder()
        .budget_bytes(BUDGET)
        .custom_policy(move || Box::new(Random { named: used.clone(), ..Random::default() }))
        .build()
        .unwrap();
    assert_eq!(cache.stats().policy, "test-random");
    let (device, _, memory, mut bytes) = faulty(2 * BUDGET_PAGES);
    let mapping = cache.map_mut(device).unwrap();
    for page in 0..2 * BUDGET_PAGES {
        let at = page * PAGE;
        assert_eq!(mapping.get::<u8>(at).unwrap(), bytes[at as usize]);
        if page % 3 == 0 {
            mapping.set(at, 1u8).unwrap();
            bytes[at as usize] = 1;
        }
    }
    mapping.flush_all().unwrap();
    assert!(memory.to_vec() == bytes);
    settled(&cache);
    assert!(named.load(Ordering::Relaxed) > 0);
    assert!(cache.stats().evictions >= BUDGET_PAGES / 2);
}

#[test]
fn thousands_of_mappings() {
    let cache = cache();
    let device = Arc::new(MemoryDevice::new(2 * PAGE as usize).unwrap());
    // Fewer than the 65,530 kernel mappings that a process may have.
    let count = crate::support::steps(3_000).min(10_000);
    let mappings: Vec<MappingMut> =
        (0..count).map(|_| cache.map_mut(device.clone()).unwrap()).collect();
    for (index, mapping) in mappings.iter().enumerate() {
        mapping.set(8, index as u64).unwrap();
        // SAFETY: inside the mapping.
        unsafe { mapping.as_mut_ptr().cast::<u64>().write_volatile(index as u64) };
    }
    for (index, mapping) in mappings.iter().enumerate().rev() {
        // Mappings of one device share their pages, so each may see a later mapping's store.
        if mapping.is_resident(0..1).unwrap() {
            // SAFETY: inside the mapping.
            let value = unsafe { mapping.as_ptr().cast::<u64>().read_volatile() };
            assert!(value as usize >= index || value == 0 || (value as usize) < count);
        }
    }
    drop(mappings);
    assert_eq!(cache.stats().resident_pages, 0);
    settled(&cache);
}

#[test]
fn several_devices_share_a_cache() {
    let cache = cache();
    let pages_each = BUDGET_PAGES / 2;
    let setups: Vec<_> = (0..4).map(|_| faulty(pages_each)).collect();
    let mappings: Vec<MappingMut> =
        setups.iter().take(3).map(|setup| cache.map_mut(setup.0.clone()).unwrap()).collect();
    let guarded = cache.pages(setups[3].0.clone()).unwrap();
    // One device is broken: that must not affect the others.
    setups[1].1.inject(fails(FaultTarget::Transfers, libc::EIO));
    std::thread::scope(|scope| {
        for (index, mapping) in mappings.iter().enumerate().filter(|(index, _)| *index != 1) {
            let bytes = &setups[index].3;
            scope.spawn(move || {
                for page in (0..pages_each).chain(0..pages_each) {
                    let at = page * PAGE;
                    assert_eq!(mapping.get::<u8>(at + 9).unwrap(), bytes[at as usize + 9]);
                    mapping.set(at, index as u8).unwrap();
                }
                mapping.flush_all().unwrap();
            });
        }
        scope.spawn(|| {
            for page in (0..pages_each).chain(0..pages_each) {
                guarded.get_mut(PageId(page)).unwrap()[0] = 3;
            }
            guarded.flush_all().unwrap();
        });
        scope.spawn(|| {
            for page in 0..pages_each {
                assert!(mappings[1].touch(page * PAGE).is_err());
            }
        });
    });
    for (index, setup) in setups.iter().enumerate().filter(|(index, _)| *index != 1) {
        let mut expected = setup.3.clone();
        expected.chunks_mut(PAGE as usize).for_each(|page| page[0] = index as u8);
        assert!(content(&*setup.2) == expected, "device {index}");
    }
    setups[1].1.clear();
    assert_eq!(mappings[1].get::<u8>(1).unwrap(), setups[1].3[1]);
    settled(&cache);
    // Without users nothing is resident.
    drop(guarded);
    drop(mappings);
    assert_eq!(cache.stats().resident_pages, 0);
}

/// With every policy the statistics add up.
#[test]
fn statistics_add_up_with_every_policy() {
    for &kind in PolicyKind::all() {
        let cache = Cache::builder().budget_bytes(BUDGET).policy(kind).build().unwrap();
        let (device, _, _, bytes) = faulty(BUDGET_PAGES + BUDGET_PAGES / 8);
        let mapping = cache.map(device).unwrap();
        mapping.advise(0..mapping.len(), Advice::Random).unwrap();
        let mut rng = Rng::new(1);
        for _ in 0..4 * BUDGET_PAGES {
            let at = rng.below(BUDGET_PAGES + BUDGET_PAGES / 8) * PAGE;
            assert_eq!(mapping.get::<u8>(at).unwrap(), bytes[at as usize]);
        }
        settled(&cache);
        let stats = cache.stats();
        assert!(stats.resident_pages * PAGE <= BUDGET);
    }
}

/// A page is evicted and reloaded into the same frame during an optimistic read, with another
/// page's bytes there in between. The read must not return those.
#[test]
fn an_optimistic_read_notices_a_frame_used_by_another_page_meanwhile() {
    let pages_count = 2 * BUDGET_PAGES;
    let mut bytes = vec![0u8; (pages_count * PAGE) as usize];
    for (page, chunk) in bytes.chunks_mut(PAGE as usize).enumerate() {
        chunk[..8].copy_from_slice(&(page as u64).to_le_bytes());
    }
    let cache = cache();
    let pages = cache.pages(MemoryDevice::from_bytes(&bytes).unwrap()).unwrap();
    let mut calls = 0;
    let mut rng = Rng::new(crate::support::seed(7));
    let mut others = (1..pages_count).cycle();
    let mut load_another = || drop(pages.get(PageId(others.next().expect("endless"))).unwrap());
    pages.get(PageId(0)).unwrap();
    let value = pages.read(PageId(0), |look| {
        calls += 1;
        if calls > 1 {
            return Some(look.get::<u64>(0));
        }
        for _ in 0..crate::support::steps(1_000) {
            // Evict page 0 and let another page into its frame and out again. Then, with the frame
            // among the most recently freed, reload page 0, with luck into it.
            while pages.is_resident(PageId(0)).unwrap() {
                load_another();
            }
            while look.get::<u64>(0) == 0 {
                load_another();
            }
            let foreign = look.get::<u64>(0);
            while pages.is_resident(PageId(foreign)).unwrap() {
                load_another();
            }
            for _ in 0..rng.below(64) {
                load_another();
            }
            if pages.get(PageId(0)).unwrap().as_ptr() == look.as_ptr() {
                return Some(foreign);
            }
        }
        None
    });
    match value.unwrap() {
        None => eprintln!("skipped: the frame never came back to its page"),
        Some(value) => assert_eq!((value, calls), (0, 2), "another page's bytes were accepted"),
    }
}

/// A page of several small ones appears piece by piece. If the kernel fails halfway, as it does
/// without memory, the installed part is discarded: no store may reach it.
#[test]
fn no_store_gets_into_a_page_that_does_not_come_in_whole() {
    const PAGE: usize = 64 << 10;
    let protect = |memory: *mut u8, protection| {
        // SAFETY: the second half of the cache's transfer buffer, which only this test's device
        // uses now.
        let result = unsafe { libc::mprotect(memory.add(PAGE / 2).cast(), PAGE / 2, protection) };
        assert_eq!(result, 0);
    };
    let fails = Arc::new(AtomicBool::new(true));
    let mut device = Hooked::new(Arc::new(MemoryDevice::new(PAGE).unwrap()));
    let hook = fails.clone();
    device.on_read = Box::new(move |_, buffer| {
        // The previous read made it unreadable, if it is the same buffer.
        protect(buffer.as_mut_ptr(), libc::PROT_READ | libc::PROT_WRITE);
        Ok(())
    });
    let device = UnreadableAfterwards { device, fails: hook, protect };
    let cache = Cache::builder().budget_bytes(16 << 20).page_bytes(PAGE).build().unwrap();
    let mapping = cache.map_mut(device).unwrap();
    let zero = std::fs::File::open("/dev/zero").unwrap();
    let stop = AtomicBool::new(false);
    let stores = std::thread::scope(|scope| {
        let storer = scope.spawn(|| {
            use std::os::fd::AsRawFd;
            let mut stores = 0;
            while !stop.load(Ordering::Relaxed) {
                // A system call: a failed store does not end the process.
                // SAFETY: one byte inside the mapping.
                let got = unsafe { libc::read(zero.as_raw_fd(), mapping.as_mut_ptr().cast(), 1) };
                stores += usize::from(got == 1);
            }
            stores
        });
        for _ in 0..crate::support::steps(4000) {
            assert!(matches!(mapping.touch_mut(0), Err(CacheError::Kernel { .. })));
        }
        stop.store(true, Ordering::Relaxed);
        storer.join().unwrap()
    });
    assert_eq!(stores, 0, "stores to a page that never came in");
    fails.store(false, Ordering::SeqCst);
    mapping.set(0, 5u8).unwrap();
    let pinned = mapping.pin_mut(PAGE as u64 - 1..PAGE as u64).unwrap();
    // SAFETY: pinned for writing.
    unsafe { pinned.as_mut_ptr().write(6) };
    drop(pinned);
    mapping.flush_all().unwrap();
    assert_eq!(mapping.get::<u8>(0).unwrap(), 5);
}

/// A device that makes the second half of the buffer unreadable after each read.
struct UnreadableAfterwards<P> {
    device: Hooked,
    fails: Arc<AtomicBool>,
    protect: P,
}

impl<P: Fn(*mut u8, i32) + Send + Sync + 'static> Device for UnreadableAfterwards<P> {
    fn name(&self) -> &str {
        "unreadable afterwards"
    }
    fn len_bytes(&self) -> Result<u64, DeviceError> {
        self.device.len_bytes()
    }
    fn is_writable(&self) -> bool {
        true
    }
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        let got = self.device.read_at(offset_bytes, buffer)?;
        if self.fails.load(Ordering::SeqCst) {
            (self.protect)(buffer.as_mut_ptr(), libc::PROT_NONE);
        }
        Ok(got)
    }
    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        self.device.write_at(offset_bytes, buffer)
    }
    fn sync(&self) -> Result<(), DeviceError> {
        self.device.sync()
    }
    fn access_path(&self) -> String {
        self.device.access_path()
    }
}
