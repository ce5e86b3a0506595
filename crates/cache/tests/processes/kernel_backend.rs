//! Behaviour specific to the kernel backend: its budget, faults inside closures, and when it is
//! chosen.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::*;
use aquifer_cache::policy::{Policy, PolicyKind};
use aquifer_cache::{
    Advice, Backend, Cache, CacheBuilder, CacheError, MapOptions, Mapping, MappingMut, calibrate,
    calibrations,
};
use aquifer_device::{Counting, Device, FileDevice, MemoryDevice};

const REGION: u64 = 2 * MIB;

/// Waits until residency is within a budget that only this mapping uses.
fn bounded(file: &TestFile, budget: u64, what: &str) {
    wait_until(what, || file.cached_bytes().unwrap() <= budget + REGION);
}

fn storage_with_cachestat(len: u64) -> Option<TestFile> {
    let file = TestFile::new(len);
    if !file.is_on_storage() || file.cached_bytes().is_none() {
        eprintln!("skipped: residency of this file system cannot be measured");
        return None;
    }
    Some(file)
}

fn stream(mapping: &Mapping) {
    for page in 0..mapping.len() / PAGE {
        let at = page * PAGE + 1;
        // SAFETY: inside the mapping.
        let byte = unsafe { mapping.as_ptr().add(at as usize).read_volatile() };
        assert_eq!(byte, byte_at(at));
    }
}

#[test]
fn a_file_of_eight_budgets_streams_through() {
    let budget = 12 * MIB;
    let Some(file) = storage_with_cachestat(8 * budget) else { return };
    let cache = cache_of(budget);
    let mapping = file.map(&cache, Backend::Kernel);
    for advice in [Advice::Normal, Advice::Sequential, Advice::Random] {
        mapping.advise(0..mapping.len(), advice).unwrap();
        stream(&mapping);
        bounded(&file, budget, "residency under the budget after a scan");
    }
    for step in 0..4096u64 {
        let at = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) % file.len;
        assert_eq!(mapping.get::<u8>(at).unwrap(), byte_at(at));
    }
    bounded(&file, budget, "residency under the budget after random reads");
    wait_until("published residency", || {
        let pages = cache.stats().kernel_resident_pages;
        pages > 0 && pages * PAGE <= budget + REGION
    });
    // Prefetch the whole file at once, mapped or not.
    for _ in 0..4 {
        mapping.prefetch(std::slice::from_ref(&(0..file.len))).unwrap();
        bounded(&file, budget, "residency under the budget after prefetches");
    }
}

#[test]
fn several_files_share_the_budget_and_a_smaller_one_is_kept_to() {
    let budget = 24 * MIB;
    let Some(first) = storage_with_cachestat(2 * budget) else { return };
    let second = TestFile::new(2 * budget);
    let cache = cache_of(budget);
    let mappings = [&first, &second, &first].map(|file| file.map(&cache, Backend::Kernel));
    mappings.iter().for_each(stream);
    let together = || first.cached_bytes().unwrap() + second.cached_bytes().unwrap();
    wait_until("both under the budget", || together() <= budget + 2 * REGION);
    cache.resize(8 * MIB).unwrap();
    wait_until("both under the smaller budget", || together() <= 8 * MIB + 2 * REGION);
    drop(mappings);
    wait_until("nothing counted", || cache.stats().kernel_resident_pages == 0);
}

#[test]
fn truncation_inside_a_closure_discards_its_result() {
    let file = TestFile::new(MIB);
    let cache = cache_of(8 * MIB);
    let mapping = file.map(&cache, Backend::Kernel);
    let cut = MIB / 2;
    let result = mapping.read(cut - PAGE..cut + 8 * PAGE, |bytes| {
        file.file.set_len(cut).unwrap();
        // SAFETY: nothing writes; pages that were cut off are replaced.
        let bytes = unsafe { bytes.as_slice() };
        bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>()
    });
    match result {
        Err(CacheError::MappedAccess { offset_bytes, reason, .. }) => {
            assert_eq!(offset_bytes, cut);
            assert!(reason.contains("truncated"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert!(mapping.last_fault_error().is_none(), "it was no bare access");
    // The mapping shows the file again: restored pages are readable, missing ones stay errors.
    assert!(matches!(mapping.touch(cut), Err(CacheError::MappedAccess { .. })));
    file.file.set_len(MIB).unwrap();
    let hole = mapping.read(cut..cut + PAGE, |bytes| bytes.to_vec()).unwrap();
    assert!(hole.iter().all(|&byte| byte == 0));
    assert_eq!(mapping.get::<u8>(cut - 1).unwrap(), byte_at(cut - 1));
}

#[test]
fn a_bare_load_of_missing_bytes_finds_zeros_and_the_next_call_reports_it() {
    let file = TestFile::new(MIB);
    let cache = cache_of(8 * MIB);
    let options = MapOptions::new().backend(Backend::Kernel).zeros_for_missing(true);
    let mapping = cache.map_with(file.device.clone(), options).unwrap();
    assert!(mapping.take_missed_fault().is_none());
    let load = |at: u64| {
        // SAFETY: inside the mapping.
        unsafe { mapping.as_ptr().add(at as usize).read_volatile() }
    };
    let cut = MIB / 2;
    file.file.set_len(cut).unwrap();
    assert_eq!((load(cut + 3 * PAGE), load(cut), load(cut - 1)), (0, 0, byte_at(cut - 1)));
    assert!(aquifer_vm::has_missed_faults());
    match mapping.take_missed_fault() {
        Some(CacheError::MappedAccess { offset_bytes, reason, .. }) => {
            assert_eq!(offset_bytes, cut + 3 * PAGE, "the first");
            assert!(reason.contains("truncated"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert!(mapping.take_missed_fault().is_none() && mapping.last_fault_error().is_none());
    // Again, and then the bytes are back.
    assert_eq!(load(cut), 0);
    std::os::unix::fs::FileExt::write_all_at(&file.file, &bytes_at(cut, MIB as usize / 2), cut)
        .unwrap();
    assert!(mapping.take_missed_fault().is_some());
    assert_eq!((load(cut), load(MIB - 1)), (byte_at(cut), byte_at(MIB - 1)));
    assert_eq!(mapping.get::<u8>(cut).unwrap(), byte_at(cut));
}

#[test]
fn the_zero_page_of_a_failing_closure_is_seen_by_no_other() {
    use std::os::unix::fs::FileExt;
    let file = TestFile::new(MIB);
    let cache = cache_of(8 * MIB);
    let mapping = file.map(&cache, Backend::Kernel);
    let at = MIB / 2 + 3 * PAGE;
    let result = mapping.read(at..at + PAGE, |bytes| {
        file.file.set_len(MIB / 2).unwrap();
        assert_eq!(bytes.get::<u8>(0), 0);
        // The file is whole again, but the zero page stays until this closure returns.
        file.file.set_len(MIB).unwrap();
        file.file.write_all_at(&bytes_at(at, PAGE as usize), at).unwrap();
        assert_eq!(bytes.get::<u8>(1), 0);
        assert_eq!(mapping.get::<u64>(at).unwrap().to_le_bytes().to_vec(), bytes_at(at, 8));
        let mut target = [0; 100];
        mapping.read_exact_at(&mut target, at).unwrap();
        assert_eq!(target.to_vec(), bytes_at(at, 100));
        std::thread::scope(|scope| {
            let other = scope.spawn(|| mapping.read(at..at + 1, |bytes| bytes.get::<u8>(0)));
            let seen = other.join().unwrap();
            assert!(matches!(seen, Err(CacheError::MappedAccess { .. })), "not sure: {seen:?}");
        });
    });
    assert!(matches!(result, Err(CacheError::MappedAccess { .. })), "{result:?}");
    assert_eq!(mapping.read(at..at + 9, |bytes| bytes.to_vec()).unwrap(), bytes_at(at, 9));
    // SAFETY: inside the mapping.
    assert_eq!(unsafe { mapping.as_ptr().add(at as usize).read_volatile() }, byte_at(at));
}

#[test]
fn closures_nest_and_may_panic() {
    let file = TestFile::new(MIB);
    let cache = cache_of(8 * MIB);
    let mapping = file.map(&cache, Backend::Kernel);
    let cut = MIB / 2;
    let last = cut + 4 * PAGE;
    let outer = mapping.read(last..last + PAGE, |outer| {
        let inner = mapping.read(0..PAGE, |inner| {
            file.file.set_len(cut).unwrap();
            inner.get::<u8>(5)
        });
        assert_eq!(inner.unwrap(), byte_at(5), "the inner range is whole");
        assert!(matches!(mapping.get::<u8>(last), Err(CacheError::MappedAccess { .. })));
        outer.get::<u8>(0)
    });
    assert!(matches!(outer, Err(CacheError::MappedAccess { .. })), "{outer:?}");
    file.file.set_len(MIB).unwrap();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        mapping.read(last..last + PAGE, |bytes| {
            file.file.set_len(cut).unwrap();
            let byte = bytes.get::<u8>(0);
            panic!("the closure's own, after reading {byte}");
        })
    }));
    assert!(panicked.is_err());
    assert!(matches!(mapping.get::<u8>(last), Err(CacheError::MappedAccess { .. })));
    file.file.set_len(MIB).unwrap();
    assert_eq!(mapping.read(last..last + 1, |bytes| bytes.get::<u8>(0)).unwrap(), 0);
}

#[test]
fn a_file_that_shrinks_and_grows_meanwhile_gives_bytes_or_errors() {
    let file = TestFile::new(4 * MIB);
    let cache = cache_of(8 * MIB);
    let mapping = file.map(&cache, Backend::Kernel);
    let done = AtomicBool::new(false);
    let cut = 2 * MIB;
    let mut failures = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                file.file.set_len(cut).unwrap();
                file.file.set_len(4 * MIB).unwrap();
            }
        });
        let check = |at: u64, byte: u8| {
            // The part that was cut off and restored is a hole.
            assert!(byte == byte_at(at) || (at >= cut && byte == 0), "{byte} at {at}");
        };
        for step in 0..20_000u64 {
            let at = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (4 * MIB - 16 * PAGE);
            let outcome = match step % 4 {
                0 => mapping.get::<u8>(at).map(|byte| check(at, byte)),
                1 => mapping.touch(at),
                2 => mapping.read(at..at + 16 * PAGE, |bytes| {
                    for page in 0..16 {
                        let _ = bytes.get::<u8>((page * PAGE) as usize);
                    }
                }),
                _ => mapping.pin(at..at + 1).map(drop),
            };
            match outcome {
                Ok(()) => {}
                Err(CacheError::MappedAccess { .. }) => failures += 1,
                Err(other) => panic!("{other:?}"),
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    println!("{failures} of 20000 calls failed");
    file.file.set_len(4 * MIB).unwrap();
    for at in (0..4 * MIB).step_by(PAGE as usize) {
        mapping.touch(at).unwrap();
    }
}

/// A bare load of a page that was cut off: the process gets SIGBUS, and the error is recorded.
#[test]
fn a_bare_load_that_fails_is_recorded_and_goes_to_the_previous_handler() {
    static CAUGHT: AtomicBool = AtomicBool::new(false);
    extern "C" fn grow(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        CAUGHT.store(true, Ordering::Relaxed);
        // SAFETY: async-signal-safe; the descriptor was stored before the load.
        unsafe { libc::ftruncate(GROWN.load(Ordering::Relaxed), MIB as i64) };
    }
    static GROWN: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(-1);
    use std::os::fd::AsRawFd;
    const CHILD: &str = "AQUIFER_TEST_BARE_FAULT";
    // Handlers belong to the process, so run in a new process, where no mapping was created before.
    if std::env::var_os(CHILD).is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg("kernel_backend::a_bare_load_that_fails_is_recorded_and_goes_to_the_previous_handler")
            .env(CHILD, "1")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let file = TestFile::new(MIB);
    GROWN.store(file.file.as_raw_fd(), Ordering::Relaxed);
    // SAFETY: an all-zero action is valid, and the handler does only what is async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = grow as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        assert_eq!(libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()), 0);
    }
    let cache = cache_of(8 * MIB);
    let mapping = file.map(&cache, Backend::Kernel);
    file.file.set_len(MIB / 2).unwrap();
    let gone = MIB / 2 + 3 * PAGE;
    // SAFETY: inside the mapping; the handler restores the page.
    assert_eq!(unsafe { mapping.as_ptr().add(gone as usize).read_volatile() }, 0);
    assert!(CAUGHT.load(Ordering::Relaxed));
    match mapping.last_fault_error() {
        Some(CacheError::MappedAccess { offset_bytes, .. }) => assert_eq!(offset_bytes, gone),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_choice_is_left_to_the_cache() {
    let file = TestFile::new(16 * MIB);
    let cache = cache_of(8 * MIB);
    let auto = |device: Arc<dyn Device>| cache.map(device).unwrap().backend();
    let measured = calibrate(file.device.clone());
    let wanted = measured.map_or(Backend::Kernel, |calibration| calibration.backend());
    assert_eq!(auto(file.device.clone()), wanted);
    if let Some(measured) = measured {
        assert!(measured.kernel_fault_ns > 0 && measured.user_fault_ns > 0);
        assert!(calibrations().contains(&measured), "measured once a file system");
        assert_eq!(calibrate(file.device.clone()), Some(measured));
    } else {
        eprintln!("skipped in part: nothing to measure here");
    }

    let path = file.directory.path().join("data");
    assert_eq!(cache.open_mut(&path).unwrap().backend(), Backend::User);
    let custom: Arc<dyn Device> = Arc::new(Counting::new(FileDevice::open(&path).unwrap()));
    let mappable = custom.page_cache_file().is_some();
    assert_eq!(auto(custom), if mappable { wanted } else { Backend::User });
    let memory: Arc<dyn Device> = Arc::new(MemoryDevice::from_bytes(&[1; 8192]).unwrap());
    assert_eq!(auto(memory), Backend::User);
}

/// A writable device of `len` bytes in memory, mapped by the user backend.
fn user_backed(cache: &Cache, len: u64) -> MappingMut {
    cache.map_mut(MemoryDevice::new(len as usize).unwrap()).unwrap()
}

fn touch_all(mapping: &Mapping) {
    for at in (0..mapping.len()).step_by(PAGE as usize) {
        mapping.touch(at).unwrap();
    }
}

#[test]
fn a_small_file_takes_little_of_the_budget() {
    let cache = cache_of(64 * MIB);
    let mapping = user_backed(&cache, 48 * MIB);
    touch_all(&mapping);
    let file = TestFile::new(MIB);
    let small = file.map(&cache, Backend::Kernel);
    touch_all(&small);
    wait_until("the end of the shrink", || !cache.is_shrinking());
    assert_eq!(cache.stats().evictions, 0, "there is room for both");
    assert_eq!(cache.stats().resident_pages * PAGE, 48 * MIB);
    drop(small);
    // A large file gets an equal share.
    let file = TestFile::new(64 * MIB);
    let large = file.map(&cache, Backend::Kernel);
    wait_until("the end of the shrink", || !cache.is_shrinking());
    assert!(cache.stats().resident_pages * PAGE <= 32 * MIB);
    drop(large);
}

#[test]
fn a_file_that_is_not_used_gives_its_share_up() {
    let cache = cache_of(24 * MIB);
    let file = TestFile::new(24 * MIB);
    let idle = file.map(&cache, Backend::Kernel);
    touch_all(&idle);
    let mapping = user_backed(&cache, 64 * MIB);
    wait_until("a larger share", || {
        touch_all(&mapping);
        cache.stats().resident_pages * PAGE > 16 * MIB
    });
}

/// Builders of caches whose settings only the user backend can follow.
fn with_wishes() -> [CacheBuilder; 3] {
    let builder = || Cache::builder().budget_bytes(16 * MIB);
    let own = || -> Box<dyn Policy> { PolicyKind::Lru.build() };
    [
        builder().custom_policy(own),
        builder().policy(PolicyKind::Clock), // the default, but requested explicitly
        builder().page_bytes(64 << 10),
    ]
}

#[test]
fn a_policy_and_a_page_size_that_were_asked_for_are_kept_to() {
    let file = TestFile::new(16 * MIB);
    for wish in with_wishes() {
        let cache = wish.clone().build().unwrap();
        let mapping = cache.map(file.device.clone()).unwrap();
        assert_eq!(mapping.backend(), Backend::User);
        assert_eq!(mapping.get::<u8>(5 * MIB).unwrap(), byte_at(5 * MIB));
        // Requested explicitly, the kernel backend serves: the policy applies to the other
        // mappings.
        assert_eq!(file.map(&cache, Backend::Kernel).backend(), Backend::Kernel);
        // If the user backend is unavailable, the settings are not silently ignored.
        let cache = wish.without_userfaultfd().build().unwrap();
        match cache.map(file.device.clone()) {
            Err(CacheError::BackendUnsupported { reason, .. }) => {
                assert!(reason.contains("userfaultfd"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(file.map(&cache, Backend::Kernel).backend(), Backend::Kernel);
    }
    // Both backends support pages of 4 KiB.
    let small = Cache::builder().budget_bytes(8 * MIB).page_bytes(4096);
    let mapping = small.without_userfaultfd().build().unwrap().map(file.device.clone()).unwrap();
    assert_eq!(mapping.backend(), Backend::Kernel);
}

#[test]
fn without_userfaultfd_files_can_still_be_read() {
    let file = TestFile::new(MIB);
    let cache = Cache::builder().budget_bytes(8 * MIB).without_userfaultfd().build().unwrap();
    let mapping = cache.map(file.device.clone()).unwrap();
    assert_eq!(mapping.backend(), Backend::Kernel);
    assert_eq!(mapping.get::<u8>(77).unwrap(), byte_at(77));
    let user = cache.map_with(file.device.clone(), MapOptions::new().backend(Backend::User));
    assert!(matches!(user, Err(CacheError::Kernel { .. })), "{user:?}");
    let memory = MemoryDevice::from_bytes(&[1; 8192]).unwrap();
    assert!(matches!(cache.map(memory), Err(CacheError::Kernel { .. })));
}

#[test]
fn what_the_kernel_cannot_map_is_refused() {
    let cache = cache_of(8 * MIB);
    let forced = || MapOptions::new().backend(Backend::Kernel);
    let memory = MemoryDevice::from_bytes(&[1; 8192]).unwrap();
    match cache.map_with(memory, forced()) {
        Err(CacheError::BackendUnsupported { backend, reason, .. }) => {
            assert_eq!(backend, "kernel");
            assert!(reason.contains("page cache"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    let file = TestFile::new(MIB);
    let path = file.directory.path().join("data");
    let device = Arc::new(FileDevice::options().writable(true).open(path).unwrap());
    let to_write = cache.map_mut_with(device.clone(), forced());
    assert!(matches!(to_write, Err(CacheError::BackendUnsupported { .. })));
    assert_eq!(cache.map_with(device, forced()).unwrap().backend(), Backend::Kernel);
}
