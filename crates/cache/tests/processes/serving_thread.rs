//! Faults served by threads of the cache, so that system calls and threads that block all signals
//! can wait for them. Needs the privilege to serve the kernel's faults.

#![allow(clippy::single_range_in_vec_init, reason = "ranges are what the calls take")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use aquifer_cache::{Advice, Cache, CacheError, MapOptions, Mapping, Pinned};
use aquifer_device::{Device, Fault, FaultRule, FaultTarget, Faulty, MemoryDevice};

use crate::support::{Hooked, OverMapping, child, load, memory, store, wait_until};

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

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("failing load", failing_load),
    ("failing system call", failing_system_call),
    ("zeros after a failing system call", zeros_after_a_failing_system_call),
    ("mappings that come and go", mappings_that_come_and_go),
    ("a slow device", a_slow_device),
    ("a full budget", a_full_budget),
    ("a page that another thread brings", a_page_that_another_thread_brings),
    ("many faults", many_faults),
    ("more faults than servers", more_faults_than_servers),
    ("a cache under itself", a_cache_under_itself),
    ("bare loads of a cache under itself", bare_loads_of_a_cache_under_itself),
];

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
    wait_until("a system call that tries again", || out() == PAGE as isize);
    assert_eq!(mapping.get::<u8>(1).unwrap(), bytes[1]);
    assert_eq!(load(&mapping, 2), bytes[2]);
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

/// A page that could not be loaded for a system call is marked; a mapping of the same pages whose missing bytes are answered with
/// zeros finds them there too.
#[test]
fn zeros_replace_the_mark_of_a_failed_access() {
    if cache().is_none() {
        return;
    }
    child::succeeds("zeros after a failing system call");
}

fn zeros_after_a_failing_system_call() {
    let Some(cache) = cache() else { return };
    let device = Faulty::new(MemoryDevice::from_bytes(&[7; PAGE]).unwrap());
    let control = device.control();
    control.inject(FaultRule::new(FaultTarget::Reads, Fault::Errno(libc::EIO)));
    let device: Arc<dyn Device> = Arc::new(device);
    let mapping = cache.map(device.clone()).unwrap();
    // SAFETY: the kernel checks the address itself.
    assert_eq!(unsafe { libc::write(1, mapping.as_ptr().cast(), 1) }, -1);
    let answered = cache.map_with(device, MapOptions::new().zeros_for_missing(true)).unwrap();
    assert_eq!(load(&answered, 0), 0);
    control.clear();
    assert!(matches!(answered.take_missed_fault(), Some(CacheError::Load { .. })));
    assert_eq!(load(&answered, 0), 7);
}

/// The faulting thread goes on when its page is there, and may drop the mapping at once: the server must be done with it.
#[test]
fn a_mapping_is_dropped_as_soon_as_its_fault_is_served() {
    if cache().is_none() {
        return;
    }
    child::succeeds("mappings that come and go");
}

/// Each thread maps a device, loads and stores, and drops the mapping; two have a device of their own, the others share one.
fn mappings_that_come_and_go() {
    let Some(cache) = cache() else { return };
    let devices = [0, 1, 2].map(|seed| memory(64 * PAGE, seed));
    std::thread::scope(|scope| {
        for thread in 0..5 {
            let (cache, (device, bytes)) = (&cache, &devices[thread.min(2)]);
            scope.spawn(move || {
                for round in 0..2000 {
                    let page = (round * 7 + thread) % 63;
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

#[test]
fn faults_that_wait_hold_up_no_others() {
    if cache().is_none() {
        return;
    }
    child::succeeds("a slow device");
    child::succeeds("many faults");
    child::succeeds("more faults than servers");
}

/// Opens once, for all that wait.
#[derive(Default)]
struct Door(Mutex<bool>, Condvar);

impl Door {
    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn wait(&self) {
        drop(self.1.wait_while(self.0.lock().unwrap(), |is_open| !*is_open).unwrap());
    }
}

/// A device of pages that all are read at once: each read waits at the door.
fn behind_a_door(pages: usize) -> (Hooked, Arc<AtomicUsize>, Arc<Door>) {
    let (reading, door) = (Arc::new(AtomicUsize::new(0)), Arc::new(Door::default()));
    let (entered, waits) = (reading.clone(), door.clone());
    let on_read = move |_, _: &mut [u8]| {
        entered.fetch_add(1, Ordering::Relaxed);
        waits.wait();
        Ok(())
    };
    let device = MemoryDevice::new(pages * PAGE).unwrap();
    (Hooked { on_read: Box::new(on_read), ..Hooked::new(Arc::new(device)) }, reading, door)
}

fn a_slow_device() {
    let Some(cache) = cache() else { return };
    let (slow, reading, door) = behind_a_door(1);
    let slow = cache.map(slow).unwrap();
    let (fast, bytes) = memory(PAGE, 1);
    let fast = cache.map(fast).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| load(&slow, 0));
        wait_until("a read of the slow device", || reading.load(Ordering::Relaxed) == 1);
        assert_eq!(load(&fast, 1), bytes[1]);
        door.open();
    });
}

fn many_faults() {
    const FAULTS: usize = 16;
    let Some(cache) = cache() else { return };
    let (device, reading, door) = behind_a_door(FAULTS);
    let mapping = cache.map(device).unwrap();
    mapping.advise(0..mapping.len(), Advice::Random).unwrap();
    std::thread::scope(|scope| {
        for page in 0..FAULTS {
            let mapping = &mapping;
            scope.spawn(move || load(mapping, page * PAGE));
        }
        wait_until("all reads", || reading.load(Ordering::Relaxed) == FAULTS);
        door.open();
    });
}

/// A store to a clean page needs no device and no frame.
fn more_faults_than_servers() {
    const FAULTS: usize = 100;
    let Some(cache) = cache() else { return };
    let (device, reading, door) = behind_a_door(FAULTS);
    let mapping = cache.map(device).unwrap();
    mapping.advise(0..mapping.len(), Advice::Random).unwrap();
    let (other_device, _) = memory(2 * PAGE, 1);
    let other = cache.map_mut(other_device).unwrap();
    other.touch(0).unwrap();
    std::thread::scope(|scope| {
        for page in 0..FAULTS {
            let mapping = &mapping;
            scope.spawn(move || load(mapping, page * PAGE));
        }
        wait_until("all servers wait", || reading.load(Ordering::Relaxed) == 64);
        store(&other, 0, 1);
        door.open();
    });
    assert_eq!(reading.load(Ordering::Relaxed), FAULTS);
}

#[test]
fn a_fault_that_waits_for_a_frame_holds_up_no_pin_holder() {
    if cache().is_none() {
        return;
    }
    child::succeeds("a full budget");
    child::succeeds("a page that another thread brings");
}

/// Pins pages from the front on until no frame is left.
fn pin_all(mapping: &Mapping) -> Vec<Pinned<'_>> {
    let mut pins = vec![];
    loop {
        let page = pins.len() as u64 * PAGE as u64;
        match mapping.pin(page..page + 1) {
            Ok(pin) => pins.push(pin),
            Err(CacheError::Exhausted { .. }) => return pins,
            Err(other) => panic!("{other}"),
        }
    }
}

/// A thread that holds all frames brings the page of a fault for which there was none, and drops its pins only when that thread has
/// gone on.
fn a_page_that_another_thread_brings() {
    let Some(cache) = cache() else { return };
    let (device, bytes) = memory(2 * BUDGET, 1);
    let mapping = cache.map(device).unwrap();
    let mut pins = pin_all(&mapping);
    let before = cache.stats().stalls;
    let at = 2 * BUDGET - PAGE;
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| load(&mapping, at));
        wait_until("a fault that finds no frame", || cache.stats().stalls > before);
        // Calls that give up later than the fault.
        for _ in 0..3 {
            let none = mapping.pin(at as u64 - PAGE as u64..at as u64);
            assert!(matches!(none, Err(CacheError::Exhausted { .. })));
        }
        pins.pop();
        let _pin = mapping.pin(at as u64..at as u64 + 1).unwrap();
        assert_eq!(loading.join().unwrap(), bytes[at]);
    });
}

/// A thread that holds the pins of a full budget stores to a page, and drops the pins only then.
fn a_full_budget() {
    let Some(cache) = cache() else { return };
    let (device, bytes) = memory(2 * BUDGET, 1);
    let mapping = cache.map_mut(device).unwrap();
    let pins = pin_all(&mapping);
    let before = cache.stats().signals;
    std::thread::scope(|scope| {
        for page in 0..3 {
            let (mapping, at) = (&mapping, 2 * BUDGET - (page + 1) * PAGE);
            let byte = bytes[at];
            scope.spawn(move || assert_eq!(load(mapping, at), byte));
        }
        wait_until("faults that find no frame", || cache.stats().signals >= before + 3);
        for page in 0..pins.len() {
            store(&mapping, page * PAGE, 1);
        }
        drop(pins);
    });
}

#[test]
fn a_cache_under_itself_is_refused() {
    if cache().is_none() {
        return;
    }
    child::succeeds("a cache under itself");
    child::dies("bare loads of a cache under itself", libc::SIGBUS, "before the loads");
}

/// More threads than servers, so that none is left if each waits for another fault to be served.
const ABOVE: usize = 100;

fn a_cache_under_itself() {
    for bare in [false, true] {
        let Some(cache) = cache() else { return };
        let (bottom, bytes) = memory(ABOVE * PAGE, 1);
        let below = cache.map_mut(bottom.clone()).unwrap();
        let top = cache.map_mut(OverMapping { below, bare }).unwrap();
        let is_refused = |result: Result<(), CacheError>| {
            assert!(
                matches!(result, Err(CacheError::UnderItself { .. })),
                "bare {bare}: {result:?}"
            );
        };
        std::thread::scope(|scope| {
            for page in 0..ABOVE as u64 {
                let top = &top;
                scope.spawn(move || is_refused(top.touch(page * PAGE as u64)));
            }
        });
        is_refused(top.touch_many(&[0..top.len()]));
        is_refused(top.touch_mut(0));
        is_refused(top.read_exact_at(&mut [0; 10], 5));
        drop(top);
        // The lower mapping works by itself, and under a cache of its own.
        let below = cache.map_mut(bottom).unwrap();
        assert_eq!(load(&below, 1), bytes[1]);
        let above = Cache::builder().budget_bytes(BUDGET as u64).build().unwrap();
        let top = above.map_mut(OverMapping { below, bare }).unwrap();
        store(&top, 5 * PAGE, !bytes[5 * PAGE]);
        assert_eq!(load(&top, PAGE + 1), bytes[PAGE + 1]);
        top.flush_all().unwrap();
        drop(top);
        wait_until("nothing in use", || cache.stats().resident_pages == 0);
    }
}

fn bare_loads_of_a_cache_under_itself() {
    let Some(cache) = cache() else { return };
    let (bottom, _) = memory(ABOVE * PAGE, 1);
    let below = cache.map_mut(bottom).unwrap();
    below.advise(0..below.len(), Advice::Random).unwrap();
    let top = cache.map_mut(OverMapping { below, bare: true }).unwrap();
    top.advise(0..top.len(), Advice::Random).unwrap();
    println!("before the loads");
    std::thread::scope(|scope| {
        for page in 0..ABOVE {
            let top = &top;
            scope.spawn(move || load(top, page * PAGE));
        }
    });
}
