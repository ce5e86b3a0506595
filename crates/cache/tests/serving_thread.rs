//! Faults served by a thread of the cache, so that system calls and threads that block all signals
//! can wait for them. Needs the privilege to serve the kernel's faults.

mod support;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use aquifer_cache::{Advice, Cache, CacheError, Mapping};
use aquifer_device::{Device, Fault, FaultRule, FaultTarget, Faulty, MemoryDevice};

use support::{child, load, memory, store, wait_until};

const PAGE: usize = 4096;
const BUDGET: usize = 6 << 20;

/// A cache with a serving thread, unless the system refuses it.
fn cache() -> Option<Cache> {
    match Cache::builder().budget_bytes(BUDGET as u64).serving_thread(true).build() {
        Ok(cache) => Some(cache),
        Err(CacheError::Kernel { what, source }) => {
            println!("skipped: {what}: {source}");
            eprintln!("skipped: {what}: {source}");
            None
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn child() {
    child::play(&[
        ("failing load", failing_load),
        ("failing system call", failing_system_call),
        ("mappings that come and go", mappings_that_come_and_go),
    ]);
}

#[test]
fn loads_and_stores_beyond_the_budget() {
    let Some(cache) = cache() else { return };
    let (device, mut bytes) = memory(2 * BUDGET, 1);
    let mapping = cache.map_mut(device.clone()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (mapping, bytes) = (&mapping, &bytes);
            scope.spawn(move || {
                // SAFETY: a set on this stack.
                unsafe {
                    let mut all = std::mem::zeroed();
                    libc::sigfillset(&raw mut all);
                    libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
                }
                for step in 0..BUDGET / PAGE {
                    let at = step * 7919 % (BUDGET / PAGE) * 2 * PAGE + thread * PAGE;
                    assert_eq!(load(mapping, at + 1), bytes[at + 1]);
                    store(mapping, at, 5);
                }
            });
        }
    });
    bytes.chunks_mut(PAGE).for_each(|page| page[0] = 5);
    mapping.flush_all().unwrap();
    assert!(device.to_vec() == bytes);
    wait_until("figures that add up", || cache.stats().is_consistent());
}

#[test]
fn system_calls_need_no_pins() {
    let Some(cache) = cache() else { return };
    let (device, bytes) = memory(64 * PAGE, 2);
    let mapping = cache.map_mut(device.clone()).unwrap();
    mapping.advise(0..mapping.len(), Advice::Random).unwrap();
    let mut ends = [0; 2];
    // SAFETY: two descriptors on this stack.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: fresh and ours.
    let [reader, writer] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
    for page in 0..32 {
        let (from, to) = (page * PAGE, (63 - page) * PAGE);
        let base = mapping.as_mut_ptr();
        // SAFETY: both inside the mapping.
        unsafe {
            let got = libc::write(writer.as_raw_fd(), base.add(from).cast(), PAGE);
            assert_eq!(got, PAGE as isize, "{}", std::io::Error::last_os_error());
            // Into a page that is absent, or resident and write-protected.
            if page % 2 == 0 {
                base.add(to).read_volatile();
            }
            let got = libc::read(reader.as_raw_fd(), base.add(to).cast(), PAGE);
            assert_eq!(got, PAGE as isize, "{}", std::io::Error::last_os_error());
        }
        assert_eq!(load(&mapping, to + 9), bytes[from + 9]);
    }
    mapping.flush_all().unwrap();
    let now = device.to_vec();
    for page in 0..32 {
        let to = (63 - page) * PAGE;
        assert!(now[to..to + PAGE] == bytes[page * PAGE..(page + 1) * PAGE], "page {page}");
    }
}

/// A page that could not be loaded raises SIGBUS, and is loaded once the device works again.
#[test]
fn an_error_is_not_for_ever() {
    let Some(cache) = cache() else { return };
    let (device, bytes) = memory(16 * PAGE, 3);
    let faulty = Faulty::new(device);
    let control = faulty.control();
    let mapping = cache.map_mut(faulty).unwrap();
    control.inject(FaultRule::new(FaultTarget::Reads, Fault::Errno(libc::EIO)));
    let mut ends = [0; 2];
    // SAFETY: two descriptors on this stack.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: fresh and ours.
    let [_reader, writer] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
    let out = || {
        // SAFETY: the kernel checks the address itself.
        unsafe { libc::write(writer.as_raw_fd(), mapping.as_ptr().cast(), PAGE) }
    };
    // A system call cannot receive SIGBUS: it fails with EFAULT.
    assert_eq!(out(), -1);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
    assert!(matches!(mapping.last_fault_error(), Some(CacheError::Load { offset_bytes: 0, .. })));
    control.clear();
    assert_eq!(mapping.get::<u8>(1).unwrap(), bytes[1]);
    assert_eq!(load(&mapping, 2), bytes[2]);
    assert_eq!(out(), PAGE as isize);
    store(&mapping, 0, 1);
    mapping.flush_all().unwrap();
}

#[test]
fn a_bare_load_that_fails_dies_of_sigbus() {
    if cache().is_none() {
        return;
    }
    child::dies("failing load", libc::SIGBUS, "before the load");
    child::succeeds("failing system call");
}

fn failing_mapping(cache: &Cache) -> Mapping {
    let device = Faulty::new(MemoryDevice::new(16 * PAGE).unwrap());
    device.control().inject(FaultRule::new(FaultTarget::Reads, Fault::Errno(libc::EIO)));
    let device: Arc<dyn Device> = Arc::new(device);
    cache.map(device).unwrap()
}

fn failing_load() {
    let Some(cache) = cache() else { return };
    let mapping = failing_mapping(&cache);
    println!("before the load");
    load(&mapping, 0);
}

fn failing_system_call() {
    let Some(cache) = cache() else { return };
    let mapping = failing_mapping(&cache);
    // SAFETY: the kernel checks the address itself.
    let written = unsafe { libc::write(1, mapping.as_ptr().cast(), 1) };
    assert_eq!(written, -1);
}

/// The faulting thread goes on when its page is there, and may drop the mapping at once: the server must be done with it.
#[test]
fn a_mapping_is_dropped_as_soon_as_its_fault_is_served() {
    if cache().is_none() {
        return;
    }
    child::succeeds("mappings that come and go");
}

/// Each thread maps a device of its own, loads and stores, and drops the mapping.
fn mappings_that_come_and_go() {
    let Some(cache) = cache() else { return };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let cache = &cache;
            scope.spawn(move || {
                let (device, bytes) = memory(64 * PAGE, thread);
                for round in 0..2000 {
                    let page = (round * 7 + thread as usize) % 63;
                    if round % 2 == 0 {
                        let mapping = cache.map(device.clone()).unwrap();
                        assert_eq!(load(&mapping, page * PAGE + 1), bytes[page * PAGE + 1]);
                    } else {
                        let mapping = cache.map_mut(device.clone()).unwrap();
                        store(&mapping, page * PAGE, round as u8);
                        assert_eq!(
                            load(&mapping, (page + 1) * PAGE + 1),
                            bytes[(page + 1) * PAGE + 1]
                        );
                    }
                }
            });
        }
    });
    wait_until("all frames given back", || cache.stats().resident_pages == 0);
    assert!(cache.stats().is_consistent());
}
