//! Effects on the process: signals, forks, system calls, stacks. Most tests end or permanently
//! change a process, so they run in children; see `support::child`.

#![allow(clippy::single_range_in_vec_init, reason = "ranges are what the calls take")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use aquifer_cache::{Advice, Cache, CacheError, Mapping, MappingMut, PageId};
use aquifer_device::{Device, Fault, FaultRule, FaultTarget, Faulty, MemoryDevice};
use aquifer_vm::prepare_thread;

use crate::support::{Hooked, child, load, memory, store, wait_until};

const PAGE: usize = 4096;
const BUDGET: usize = 6 << 20;

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("failing bare load", failing_bare_load),
    ("failing bare store", failing_bare_store),
    ("bare store to a read-only mapping", bare_store_to_read_only),
    ("bare load behind the end", bare_load_behind_the_end),
    ("fork", fork),
    ("fork and touch", fork_and_touch),
    ("blocked signals", blocked_signals),
    ("blocked signals, unprepared", blocked_signals_unprepared),
    ("foreign faults before", foreign_faults_before),
    ("failing load, handler before", failing_load_with_a_handler_before),
    ("handler after", handler_after),
    ("foreign fault, nobody else", foreign_fault_without_another_handler),
    ("raised signal", raised_signal),
    ("raised signal, ignored", raised_signal_ignored),
    ("nearly full stack", nearly_full_stack),
    ("nearly full stack without an alternate one", nearly_full_stack_without_alternate),
    ("nested faults", nested_faults),
    ("drop by a waker", drop_by_a_waker),
    ("waiting for a frame", waiting_for_a_frame),
    ("panic in a prefetch", panic_in_a_prefetch),
    ("panic in the handler", panic_in_the_handler),
    ("panic in a write", panic_in_a_write),
    ("little memory promised", little_memory_promised),
];

fn cache() -> Cache {
    Cache::builder().budget_bytes(BUDGET as u64).build().unwrap()
}

fn evict(mapping: &Mapping, at: usize) {
    let page = (at / PAGE * PAGE) as u64;
    wait_until("the page is out", || {
        mapping.advise(page..page + 1, Advice::DontNeed).unwrap();
        !mapping.is_resident(page..page + 1).unwrap()
    });
}

// ---- accesses that cannot be served -------------------------------------------------------------

#[test]
fn a_bare_access_that_fails_dies_of_sigbus() {
    child::dies("failing bare load", libc::SIGBUS, "before the load");
    child::dies("failing bare store", libc::SIGBUS, "before the store");
}

fn failing_device() -> Arc<dyn Device> {
    let device = Faulty::new(MemoryDevice::new(64 * PAGE).unwrap());
    let bad = (9 * PAGE) as u64..(10 * PAGE) as u64;
    device.control().inject(FaultRule::new(FaultTarget::Reads, Fault::Errno(libc::EIO)).range(bad));
    Arc::new(device)
}

fn failing_bare_load() {
    let cache = cache();
    let mapping = cache.map(failing_device()).unwrap();
    assert_eq!(load(&mapping, 8 * PAGE), 0);
    assert!(matches!(mapping.touch(9 * PAGE as u64), Err(CacheError::Load { .. })));
    println!("before the load");
    load(&mapping, 9 * PAGE);
}

fn failing_bare_store() {
    let cache = cache();
    let mapping = cache.map_mut(failing_device()).unwrap();
    println!("before the store");
    store(&mapping, 9 * PAGE, 1);
}

#[test]
fn a_device_panic_outside_a_call_aborts_the_process() {
    child::dies("panic in a prefetch", libc::SIGABRT, "thread aquifer-io panicked");
    child::dies("panic in the handler", libc::SIGABRT, "before the load");
    child::dies("panic in a write", libc::SIGABRT, "before the flush");
}

#[test]
fn what_a_waker_drops_is_dropped_on_the_worker_that_wakes() {
    child::succeeds("drop by a waker");
}

/// The last handle of a cache, dropped by the worker that completes a future while another future's
/// work is queued.
fn drop_by_a_waker() {
    struct Drops(Mutex<Option<(MappingMut, Cache)>>, AtomicBool);
    impl Wake for Drops {
        fn wake(self: Arc<Self>) {
            drop(self.0.lock().unwrap().take());
            self.1.store(true, Ordering::SeqCst);
        }
    }
    let (device, go) = (memory(64 * PAGE, 5).0, Arc::new(AtomicBool::new(false)));
    let mut device = Hooked::new(device);
    let may_go = go.clone();
    device.on_read = Box::new(move |_, _| {
        wait_until("the work to be queued", || may_go.load(Ordering::SeqCst));
        Ok(())
    });
    let cache = Cache::builder().budget_bytes(BUDGET as u64).io_threads(1).build().unwrap();
    let mapping = cache.map_mut(device).unwrap();
    let mut first = Box::pin(mapping.touch_many_async(&[0..PAGE as u64]));
    let second = mapping.touch_many_async(&[9 * PAGE as u64..10 * PAGE as u64]);
    let drops = Arc::new(Drops(Mutex::new(Some((mapping, cache))), AtomicBool::new(false)));
    let waker = drops.clone().into();
    assert!(first.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    go.store(true, Ordering::SeqCst);
    wait_until("the mapping and its cache to be dropped", || drops.1.load(Ordering::SeqCst));
    crate::support::block_on(second).unwrap();
}

#[test]
fn a_bare_access_waiting_for_a_frame_does_not_block_its_page() {
    child::succeeds("waiting for a frame");
}

/// A bare access must not fail for lack of a frame, so it waits. A thread that pins all frames and
/// accesses the same page still gets an error.
fn waiting_for_a_frame() {
    let cache = cache();
    let (device, bytes) = memory(2 * BUDGET, 7);
    let mapping = cache.map(device).unwrap();
    mapping.advise(0..mapping.len(), Advice::Random).unwrap();
    let mut pins = vec![];
    let mut page = 0..PAGE as u64;
    while let Ok(pin) = mapping.pin(page.clone()) {
        pins.push(pin);
        page = page.end..page.end + PAGE as u64;
    }
    let at = 2 * BUDGET - PAGE;
    let stalls = cache.stats().stalls;
    std::thread::scope(|scope| {
        let loaded = scope.spawn(|| load(&mapping, at));
        wait_until("the access to wait", || cache.stats().stalls > stalls);
        for _ in 0..20 {
            let refused = mapping.touch(at as u64);
            assert!(matches!(refused, Err(CacheError::Exhausted { .. })), "{refused:?}");
        }
        assert!(!loaded.is_finished());
        pins.clear();
        assert_eq!(loaded.join().unwrap(), bytes[at]);
    });
}

fn panicking_device() -> Arc<dyn Device> {
    let mut device = Hooked::new(Arc::new(MemoryDevice::new(64 * PAGE).unwrap()));
    device.on_read = Box::new(|offset_bytes, _| {
        assert_ne!(offset_bytes, 9 * PAGE as u64, "this device panics on purpose");
        Ok(())
    });
    device.on_write = Box::new(|_, _| panic!("this device panics on purpose"));
    Arc::new(device)
}

fn panic_in_a_prefetch() {
    let cache = cache();
    let mapping = cache.map(panicking_device()).unwrap();
    let page = 9 * PAGE as u64;
    mapping.prefetch(&[page..page + 1]).unwrap();
    // The panic of the prefetch ends the process.
    wait_until("the end of the process", || false);
}

fn panic_in_the_handler() {
    let cache = cache();
    let mapping = cache.map(panicking_device()).unwrap();
    println!("before the load");
    load(&mapping, 9 * PAGE);
}

fn panic_in_a_write() {
    let cache = cache();
    let mapping = cache.map_mut(panicking_device()).unwrap();
    mapping.write_all_at(&[1], 0).unwrap();
    println!("before the flush");
    let _ = mapping.flush_all();
}

#[test]
fn a_bare_access_outside_what_is_allowed_dies_of_sigsegv() {
    child::dies("bare store to a read-only mapping", libc::SIGSEGV, "before the store");
    child::dies("bare load behind the end", libc::SIGSEGV, "before the load");
}

fn bare_store_to_read_only() {
    let cache = cache();
    let mapping = cache.map(memory(PAGE, 1).0).unwrap();
    load(&mapping, 0);
    println!("before the store");
    // SAFETY: none: this invalid access is what is tested, and it ends the process.
    unsafe { mapping.as_ptr().cast_mut().write_volatile(1) };
}

fn bare_load_behind_the_end() {
    let cache = cache();
    let mapping = cache.map(memory(PAGE, 1).0).unwrap();
    println!("before the load");
    // SAFETY: none: this invalid access is what is tested, and it ends the process.
    unsafe { mapping.as_ptr().add(PAGE).read_volatile() };
}

// ---- fork ---------------------------------------------------------------------------------------

#[test]
fn a_fork_with_both_sides_going_on() {
    child::succeeds("fork");
}

/// Waits for a child of `libc::fork`; returns its status.
fn wait_for(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: our own child, and a word on this stack.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status
}

/// Runs `body` in a fork; 0 if it returned, 1 if it panicked, the signal plus 128 if one ended it.
fn in_a_fork(body: impl FnOnce()) -> i32 {
    // SAFETY: the child uses only the code under test, the allocator and standard output, which
    // glibc keeps usable, and exits without running the parent's destructors.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "{}", std::io::Error::last_os_error());
    if pid == 0 {
        aquifer_testkit::child::dies_with_its_parent();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: the child ends here.
        unsafe { libc::_exit(outcome.is_err().into()) };
    }
    let status = wait_for(pid);
    if libc::WIFSIGNALED(status) { 128 + libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) }
}

fn fork() {
    const LEN: usize = 3 * BUDGET;
    let cache = cache();
    let (mapped, mapped_bytes) = memory(LEN, 1);
    let (paged, paged_bytes) = memory(LEN, 2);
    let mapping = Arc::new(cache.map_mut(mapped.clone()).unwrap());
    let pages = Arc::new(cache.pages(paged).unwrap());
    let stop = AtomicBool::new(false);
    let (mapping_in, pages_in) = (mapping.clone(), pages.clone());
    std::thread::scope(|scope| {
        for first in 0..2 {
            let (mapping, pages, stop) = (&*mapping, &*pages, &stop);
            let (mapped, mapped_bytes, paged_bytes) = (&*mapped, &mapped_bytes, &paged_bytes);
            scope.spawn(move || {
                for step in (first..).step_by(2) {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    // One thread reads even pages, the other odd ones; each writes its own.
                    let at = (step * 7919 % (LEN / PAGE / 2) * 2 + first) * PAGE;
                    assert_eq!(load(mapping, at + 1), mapped_bytes[at + 1]);
                    store(mapping, at, step as u8);
                    assert_eq!(load(mapping, at), step as u8);
                    let guard = pages.get(PageId((at / PAGE) as u64)).unwrap();
                    assert_eq!(guard[1], paged_bytes[at + 1]);
                    if step % 512 == first {
                        mapping.flush((at as u64)..(at as u64) + 1).unwrap();
                        let mut page = [0; PAGE];
                        mapped.read_at(at as u64, &mut page).unwrap();
                        assert_eq!(page[0], step as u8);
                    }
                }
            });
        }
        for round in 0..crate::support::steps(6) {
            mapping.touch(0).unwrap();
            pages.get(PageId(0)).unwrap();
            let (mapping, pages, cache) = (mapping_in.clone(), pages_in.clone(), cache.clone());
            // A cache without mappings: in the child its last reference is dropped.
            let idle = self::cache();
            let ended = in_a_fork(move || child_of_a_fork(mapping, pages, cache, idle));
            assert_eq!(ended, 0, "round {round}");
        }
        stop.store(true, Ordering::Relaxed);
    });
    mapping.flush_all().unwrap();
    for (at, byte) in mapped_bytes.iter().enumerate().filter(|(at, _)| at % PAGE == 1) {
        assert_eq!(load(&mapping, at), *byte);
    }
}

/// The result of a future that does not have to wait.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("it would wait for a thread of the parent"),
    }
}

fn child_of_a_fork(
    mapping: Arc<MappingMut>,
    pages: Arc<aquifer_cache::Pages>,
    cache: Cache,
    idle: Cache,
) {
    assert!(matches!(mapping.get::<u8>(0), Err(CacheError::Forked)));
    assert!(matches!(mapping.set(0, 1u8), Err(CacheError::Forked)));
    assert!(matches!(mapping.write_all_at(&[1], 0), Err(CacheError::Forked)));
    assert!(matches!(mapping.read(0..1, |_| ()), Err(CacheError::Forked)));
    assert!(matches!(mapping.touch(0), Err(CacheError::Forked)), "resident in the parent");
    assert!(matches!(mapping.touch_mut(0), Err(CacheError::Forked)));
    assert!(matches!(mapping.pin(0..1), Err(CacheError::Forked)));
    assert!(matches!(mapping.flush_all(), Err(CacheError::Forked)));
    assert!(matches!(mapping.is_resident(0..1), Err(CacheError::Forked)));
    assert!(matches!(mapping.touch_many(&[0..1]), Err(CacheError::Forked)));
    assert!(matches!(mapping.prefetch(&[0..1]), Err(CacheError::Forked)));
    assert!(matches!(mapping.advise(0..1, Advice::DontNeed), Err(CacheError::Forked)));
    assert!(matches!(pages.get(PageId(0)), Err(CacheError::Forked)));
    assert!(matches!(pages.get_mut(PageId(0)), Err(CacheError::Forked)));
    assert!(matches!(pages.read(PageId(0), |look| look.get::<u8>(0)), Err(CacheError::Forked)));
    assert!(matches!(pages.read_exact_at(&mut [0; 9], 0), Err(CacheError::Forked)));
    assert!(matches!(pages.load(&[PageId(0)]), Err(CacheError::Forked)));
    assert!(matches!(pages.flush_all(), Err(CacheError::Forked)));
    assert!(matches!(at_once(mapping.flush_async(0..1)), Err(CacheError::Forked)));
    assert!(matches!(at_once(mapping.touch_many_async(&[0..1])), Err(CacheError::Forked)));
    assert!(matches!(at_once(pages.load_async(&[PageId(0)])), Err(CacheError::Forked)));
    assert!(matches!(cache.resize(BUDGET as u64), Err(CacheError::Forked)));
    assert!(matches!(cache.map(memory(PAGE, 1).0), Err(CacheError::Forked)));
    assert!(matches!(cache.pages(memory(PAGE, 1).0), Err(CacheError::Forked)));
    assert_eq!(cache.stats().resident_pages, 0);
    assert!(mapping.last_fault_error().is_none());

    // The child's own memory lies where the parent's cache was; destructors must not touch it.
    let own: Vec<Vec<u8>> = (0..8).map(|index| vec![index; 1 << 20]).collect();
    let ranges = [32, 16, 8, 4, 2, 1, 1, 1].map(|gib| Anonymous::new(gib << 30));
    drop_last(mapping);
    drop_last(pages);
    drop(cache);
    drop(idle);
    for (index, bytes) in own.iter().enumerate() {
        assert!(*bytes == vec![index as u8; 1 << 20]);
    }
    ranges.iter().for_each(Anonymous::check);

    let fresh = self::cache();
    let (device, bytes) = memory(2 * BUDGET, 3);
    let mapping = fresh.map_mut(device.clone()).unwrap();
    for at in (0..2 * BUDGET).step_by(PAGE) {
        assert_eq!(load(&mapping, at + 1), bytes[at + 1], "a new cache in the child");
        store(&mapping, at, 9);
    }
    mapping.flush_all().unwrap();
    assert!(device.to_vec().chunks(PAGE).all(|page| page[0] == 9));
}

/// Drops the value behind a shared pointer, although there are other holders: threads of the
/// parent.
fn drop_last<T>(shared: Arc<T>) {
    let raw = Arc::into_raw(shared);
    // SAFETY: in the child no other holder exists; the counts are given up so that the value is
    // dropped.
    unsafe {
        for _ in 0..64 {
            let last = {
                let holder = Arc::from_raw(raw);
                let last = Arc::strong_count(&holder) == 1;
                drop(holder);
                last
            };
            if last {
                break;
            }
        }
    }
}

/// A sparse range of anonymous memory with marks in it.
struct Anonymous(*mut u8, usize);

impl Anonymous {
    const STEP: usize = 64 << 20;

    fn new(len: usize) -> Anonymous {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping at an address the kernel chooses.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        let range = Anonymous(base.cast(), len);
        for at in (0..len).step_by(Self::STEP) {
            // SAFETY: inside the mapping.
            unsafe { range.0.add(at).write_volatile(0x77) };
        }
        range
    }

    fn check(&self) {
        for at in (0..self.1).step_by(Self::STEP) {
            // SAFETY: inside the mapping, unless a destructor unmapped it, which this test detects.
            assert_eq!(unsafe { self.0.add(at).read_volatile() }, 0x77);
        }
    }
}

#[test]
fn a_fork_that_touches_the_parents_mapping_dies_and_corrupts_nothing() {
    child::succeeds("fork and touch");
}

fn fork_and_touch() {
    let cache = cache();
    let (device, bytes) = memory(64 * PAGE, 4);
    let mapping = cache.map_mut(device.clone()).unwrap();
    store(&mapping, 0, 1);
    load(&mapping, PAGE);
    for at in [0, PAGE, 2 * PAGE] {
        // Resident and dirty, resident and clean, absent.
        assert_eq!(
            in_a_fork(|| assert_ne!(load(&mapping, at), 0)),
            128 + libc::SIGSEGV,
            "load at {at}"
        );
        assert_eq!(in_a_fork(|| store(&mapping, at, 99)), 128 + libc::SIGSEGV, "store at {at}");
    }
    assert_eq!((load(&mapping, 0), load(&mapping, PAGE)), (1, bytes[PAGE]));
    assert!(!mapping.is_resident(2 * PAGE as u64..2 * PAGE as u64 + 1).unwrap());
    assert_eq!(load(&mapping, 2 * PAGE), bytes[2 * PAGE]);
    mapping.flush_all().unwrap();
    let mut expected = bytes;
    expected[0] = 1;
    assert!(device.to_vec() == expected);
}

// ---- system calls -------------------------------------------------------------------------------

fn pipe() -> (OwnedFd, OwnedFd) {
    let mut ends = [0; 2];
    // SAFETY: two descriptors on this stack.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: fresh and ours.
    unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

#[test]
fn system_calls_need_pins() {
    let cache = cache();
    let (device, bytes) = memory(64 * PAGE, 5);
    let mapping = cache.map_mut(device.clone()).unwrap();
    mapping.advise(0..mapping.len(), Advice::Random).unwrap();
    let (reader, writer) = pipe();
    let out = |address: *const u8| {
        // SAFETY: the kernel checks the address itself.
        unsafe { libc::write(writer.as_raw_fd(), address.cast(), PAGE) }
    };
    let fill = |address: *mut u8| {
        // SAFETY: the kernel checks the address itself.
        unsafe { libc::read(reader.as_raw_fd(), address.cast(), PAGE) }
    };

    // From memory that is not resident: EFAULT. Pinned: works.
    assert_eq!((out(mapping.as_ptr()), errno()), (-1, libc::EFAULT));
    {
        let pinned = mapping.pin(0..PAGE as u64).unwrap();
        assert_eq!(out(pinned.as_ptr()), PAGE as isize);
    }
    let mut copy = vec![0u8; PAGE];
    assert_eq!(fill(copy.as_mut_ptr()), PAGE as isize);
    assert!(copy == bytes[..PAGE]);

    // Into memory that is resident but clean, and so write-protected: EFAULT. Pinned for writing:
    // works, and counts as a store.
    assert_eq!(out(copy.as_ptr()), PAGE as isize);
    let second = mapping.as_mut_ptr().wrapping_add(PAGE);
    mapping.touch(PAGE as u64).unwrap();
    assert_eq!((fill(second), errno()), (-1, libc::EFAULT));
    {
        let pinned = mapping.pin_mut(PAGE as u64..2 * PAGE as u64).unwrap();
        assert_eq!(fill(pinned.as_mut_ptr()), PAGE as isize);
        mapping.flush_all().unwrap();
        assert!(device.to_vec()[PAGE..2 * PAGE] == bytes[..PAGE]);
        // Still pinned: the kernel may continue to write, and the next flush writes that.
        copy.fill(0x11);
        assert_eq!(out(copy.as_ptr()), PAGE as isize);
        assert_eq!(fill(pinned.as_mut_ptr()), PAGE as isize);
    }
    mapping.flush_all().unwrap();
    assert!(device.to_vec()[PAGE..2 * PAGE].iter().all(|&byte| byte == 0x11));
    assert_eq!(cache.stats().dirty_pages, 0);
}

// ---- signals ------------------------------------------------------------------------------------

#[test]
fn a_thread_that_blocks_all_signals() {
    child::succeeds("blocked signals");
    child::dies("blocked signals, unprepared", libc::SIGBUS, "before the load");
}

fn block_all_signals() {
    // SAFETY: a set on this stack.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
    }
}

fn blocked_signals() {
    let cache = cache();
    let (device, bytes) = memory(64 * PAGE, 6);
    let mapping = cache.map_mut(device).unwrap();
    mapping.advise(0..mapping.len(), Advice::Random).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            block_all_signals();
            assert_eq!(mapping.get::<u8>(0).unwrap(), bytes[0]);
            mapping.set(0, 1u8).unwrap();
            mapping.read(PAGE as u64..3 * PAGE as u64, |_| ()).unwrap();
            // Touched before, so no fault.
            mapping.touch(9 * PAGE as u64).unwrap();
            assert_eq!(load(&mapping, 9 * PAGE), bytes[9 * PAGE]);
            mapping.touch_mut(9 * PAGE as u64).unwrap();
            store(&mapping, 9 * PAGE, 1);
            prepare_thread().unwrap();
            assert_eq!(load(&mapping, 20 * PAGE), bytes[20 * PAGE]);
            store(&mapping, 21 * PAGE, 1);
        });
    });
}

fn blocked_signals_unprepared() {
    let cache = cache();
    let mapping = cache.map(memory(PAGE, 1).0).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            block_all_signals();
            println!("before the load");
            load(&mapping, 0);
        });
    });
}

type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

/// Installs a handler and returns the previous action.
fn install(signal: i32, handler: Handler) -> libc::sigaction {
    // SAFETY: zeroed actions are valid, and both live on this stack.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
        let mut old = std::mem::zeroed();
        assert_eq!(libc::sigaction(signal, &raw const action, &raw mut old), 0);
        old
    }
}

/// An inaccessible page of the test, for foreign faults; [`open_foreign`] makes it accessible.
static FOREIGN: AtomicUsize = AtomicUsize::new(0);
static HANDLED: AtomicUsize = AtomicUsize::new(0);

fn foreign_page() -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_NONE, flags, -1, 0) };
    assert_ne!(page, libc::MAP_FAILED);
    FOREIGN.store(page as usize, Ordering::SeqCst);
    page.cast()
}

/// Handles faults on the foreign page, as a language run-time does, and exits with 3 on others.
extern "C" fn open_foreign(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let foreign = FOREIGN.load(Ordering::SeqCst);
    // SAFETY: the kernel filled in the structure.
    let address = unsafe { (*info).si_addr() } as usize;
    if address & !(PAGE - 1) != foreign {
        // SAFETY: ends the process.
        unsafe { libc::_exit(3) };
    }
    HANDLED.fetch_add(1, Ordering::SeqCst);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: our own page.
    unsafe { libc::mprotect(foreign as *mut libc::c_void, PAGE, access) };
}

#[test]
fn a_handler_installed_before_gets_foreign_faults() {
    child::succeeds("foreign faults before");
    let played = child::run("failing load, handler before");
    assert_eq!(played.status.code(), Some(3), "{played:#?}");
}

fn foreign_faults_before() {
    install(libc::SIGSEGV, open_foreign);
    install(libc::SIGBUS, open_foreign);
    let cache = cache();
    let (device, bytes) = memory(3 * BUDGET, 7);
    let mapping = cache.map_mut(device).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for at in (0..3 * BUDGET).step_by(PAGE) {
                assert_eq!(load(&mapping, at + 1), bytes[at + 1]);
                store(&mapping, at, 1);
            }
        });
        for round in 1..=100 {
            let page = foreign_page();
            // SAFETY: the handler makes the page accessible.
            unsafe { page.write_volatile(5) };
            assert_eq!(HANDLED.load(Ordering::SeqCst), round);
        }
    });
}

fn failing_load_with_a_handler_before() {
    install(libc::SIGSEGV, open_foreign);
    install(libc::SIGBUS, open_foreign);
    let cache = cache();
    let mapping = cache.map(failing_device()).unwrap();
    load(&mapping, 9 * PAGE);
}

static PREVIOUS: std::sync::OnceLock<[libc::sigaction; 2]> = std::sync::OnceLock::new();

/// As [`open_foreign`], but passes other faults to the previous handler.
extern "C" fn chaining(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel filled in the structure.
    let address = unsafe { (*info).si_addr() } as usize;
    if address & !(PAGE - 1) == FOREIGN.load(Ordering::SeqCst) {
        return open_foreign(signal, info, context);
    }
    let [sigsegv, sigbus] = PREVIOUS.get().unwrap();
    let previous = if signal == libc::SIGSEGV { sigsegv } else { sigbus };
    // SAFETY: the previous handler takes three arguments: it is the cache's.
    let previous: Handler = unsafe { std::mem::transmute(previous.sa_sigaction) };
    previous(signal, info, context);
}

#[test]
fn a_handler_installed_after_passes_ours_on() {
    child::succeeds("handler after");
}

fn handler_after() {
    let cache = cache();
    let (device, bytes) = memory(3 * BUDGET, 8);
    let mapping = cache.map_mut(device).unwrap();
    assert!(aquifer_vm::router::is_installed());
    let previous = [libc::SIGSEGV, libc::SIGBUS].map(|signal| install(signal, chaining));
    assert!(PREVIOUS.set(previous).is_ok());
    assert!(!aquifer_vm::router::is_installed());
    for at in (0..3 * BUDGET).step_by(PAGE) {
        assert_eq!(load(&mapping, at + 1), bytes[at + 1]);
        store(&mapping, at, 1);
    }
    // SAFETY: the handler makes the page accessible.
    unsafe { foreign_page().write_volatile(5) };
    assert_eq!(HANDLED.load(Ordering::SeqCst), 1);
    // A later mapping does not reinstall the cache's handler.
    let second = cache.map(memory(PAGE, 9).0).unwrap();
    load(&second, 0);
    assert!(!aquifer_vm::router::is_installed());
}

#[test]
fn an_unhandled_foreign_fault_ends_the_process() {
    child::dies("foreign fault, nobody else", libc::SIGSEGV, "before the fault");
    child::dies("raised signal", libc::SIGBUS, "before the signal");
}

fn foreign_fault_without_another_handler() {
    let cache = cache();
    let mapping = cache.map(memory(PAGE, 1).0).unwrap();
    load(&mapping, 0);
    println!("before the fault");
    // SAFETY: none: this invalid access is what is tested, and it ends the process.
    unsafe { foreign_page().write_volatile(5) };
}

#[test]
fn a_signal_that_was_sent_is_ignored_where_it_was_before() {
    child::succeeds("raised signal, ignored");
}

fn raised_signal_ignored() {
    // SAFETY: no preconditions.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_IGN) };
    let cache = cache();
    let mapping = cache.map(memory(2 * PAGE, 1).0).unwrap();
    load(&mapping, 0);
    // SAFETY: no preconditions.
    unsafe { libc::raise(libc::SIGBUS) };
    load(&mapping, PAGE);
}

fn raised_signal() {
    // Replaces the handler of Rust's run-time, which ignores the first signal that was sent.
    // SAFETY: no preconditions.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    let cache = cache();
    let mapping = cache.map(memory(PAGE, 1).0).unwrap();
    load(&mapping, 0);
    println!("before the signal");
    // SAFETY: no preconditions.
    unsafe { libc::raise(libc::SIGBUS) };
}

// ---- stacks -------------------------------------------------------------------------------------

#[test]
fn faults_with_the_stack_nearly_full() {
    child::succeeds("nearly full stack");
    child::succeeds("nearly full stack without an alternate one");
}

/// The lowest address of the calling thread's stack, including its guard.
fn stack_bottom() -> usize {
    // SAFETY: attributes of the calling thread, destroyed again.
    unsafe {
        let mut attributes = std::mem::zeroed();
        assert_eq!(libc::pthread_getattr_np(libc::pthread_self(), &raw mut attributes), 0);
        let (mut base, mut size) = (std::ptr::null_mut(), 0);
        libc::pthread_attr_getstack(&raw const attributes, &raw mut base, &raw mut size);
        libc::pthread_attr_destroy(&raw mut attributes);
        base as usize
    }
}

/// Recurses until less than `left` bytes of stack are left, touching an absent page now and then,
/// and one at the end.
#[inline(never)]
fn descend(mapping: &Mapping, bytes: &[u8], bottom: usize, left: usize, depth: usize) -> usize {
    let frame = [depth as u8; 256];
    let here = std::hint::black_box(&frame).as_ptr() as usize;
    let at = depth % (mapping.len() as usize / PAGE) * PAGE;
    let last = here - bottom < left;
    if depth.is_multiple_of(16) || last {
        // SAFETY: inside the mapping.
        let value = unsafe { mapping.as_ptr().add(at).read_volatile() };
        if value != bytes[at] {
            std::process::abort();
        }
    }
    if last {
        return 1;
    }
    let deeper = descend(mapping, bytes, bottom, left, depth + 1);
    std::hint::black_box(&frame);
    deeper + 1
}

/// Runs `body` in a thread with a small stack: a Rust thread, which has an alternate stack, or a
/// bare one.
fn on_a_small_stack(bare: bool, body: impl Fn() + Send + Sync) {
    const STACK: usize = 128 << 10;
    if !bare {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK);
            thread.spawn_scoped(scope, &body).unwrap();
        });
        return;
    }
    extern "C" fn call(body: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: `on_a_small_stack` passes a reference that outlives the thread.
        let body = unsafe { &*body.cast::<&(dyn Fn() + Send + Sync)>() };
        body();
        std::ptr::null_mut()
    }
    let body: &(dyn Fn() + Send + Sync) = &body;
    // SAFETY: the thread is joined before `body` is dropped.
    unsafe {
        let mut attributes = std::mem::zeroed();
        libc::pthread_attr_init(&raw mut attributes);
        libc::pthread_attr_setstacksize(&raw mut attributes, STACK);
        let mut thread = std::mem::zeroed();
        let argument = std::ptr::from_ref(&body).cast_mut().cast();
        assert_eq!(libc::pthread_create(&raw mut thread, &raw const attributes, call, argument), 0);
        libc::pthread_join(thread, std::ptr::null_mut());
        libc::pthread_attr_destroy(&raw mut attributes);
    }
}

fn nearly_full_stack() {
    let cache = cache();
    let (device, bytes) = memory(3 * BUDGET, 10);
    let mapping = cache.map(device).unwrap();
    mapping.advise(0..mapping.len(), Advice::Random).unwrap();
    for round in 0..4 {
        // With Rust's own alternate stack. Left: the size of two frames of this function in a debug
        // build.
        on_a_small_stack(false, || {
            let depth = descend(&mapping, &bytes, stack_bottom(), 2 << 10, round * 10_000);
            assert!(depth > 100);
        });
    }
}

fn nearly_full_stack_without_alternate() {
    let cache = cache();
    let (device, bytes) = memory(3 * BUDGET, 11);
    let mapping = cache.map(device).unwrap();
    mapping.advise(0..mapping.len(), Advice::Random).unwrap();
    let descended = AtomicUsize::new(0);
    // Without an alternate stack: the kernel's frame and the entry of the handler must fit.
    on_a_small_stack(true, || {
        let depth = descend(&mapping, &bytes, stack_bottom(), 24 << 10, 20_000);
        descended.fetch_add(depth, Ordering::Relaxed);
    });
    assert!(descended.load(Ordering::Relaxed) > 100);
    // Prepared: as with Rust's alternate stack.
    on_a_small_stack(true, || {
        prepare_thread().unwrap();
        let depth = descend(&mapping, &bytes, stack_bottom(), 2 << 10, 40_000);
        descended.fetch_add(depth, Ordering::Relaxed);
    });
    assert!(descended.load(Ordering::Relaxed) > 200);
}

// ---- nested -------------------------------------------------------------------------------------

#[test]
fn a_device_whose_data_is_itself_mapped() {
    child::succeeds("nested faults");
}

fn nested_faults() {
    const LEVELS: usize = 4;
    let (device, bytes) = memory(3 * BUDGET, 12);
    let mut device: Arc<dyn Device> = device;
    for _ in 0..LEVELS {
        let below = Arc::new(self::cache().map_mut(device.clone()).unwrap());
        below.advise(0..below.len(), Advice::Random).unwrap();
        let mut hooked = Hooked::new(device);
        let (reads, writes) = (below.clone(), below);
        // The hooks load the data from, and store it to, the mapping below by bare pointer; the
        // hooked device's own transfer then finds the same bytes.
        hooked.on_read = Box::new(move |offset, buffer| {
            let len = buffer.len().min((reads.len() - offset) as usize);
            for at in 0..len {
                std::hint::black_box(load(&reads, offset as usize + at));
            }
            Ok(())
        });
        hooked.on_write = Box::new(move |offset, buffer| {
            for (at, &byte) in buffer.iter().enumerate() {
                store(&writes, offset as usize + at, byte);
            }
            Ok(())
        });
        device = Arc::new(hooked);
    }
    let cache = cache();
    let mapping = cache.map_mut(device).unwrap();
    mapping.advise(0..mapping.len(), Advice::Random).unwrap();
    on_a_small_stack(false, || {
        for page in (0..3 * BUDGET / PAGE).step_by(17) {
            let at = page * 7919 % (3 * BUDGET / PAGE) * PAGE;
            assert_eq!(load(&mapping, at + 1), bytes[at + 1]);
        }
        for page in (0..64).step_by(3) {
            store(&mapping, page * PAGE, 1);
        }
        mapping.flush_all().unwrap();
        for page in (0..64).step_by(3) {
            evict(&mapping, page * PAGE);
            assert_eq!(load(&mapping, page * PAGE), 1);
        }
    });
}

// ---- memory that the system commits -------------------------------------------------------------

/// Makes the kernel refuse to commit more than `more_bytes` of additional private memory, as
/// `vm.overcommit_memory=2` does for the whole system.
fn promise_at_most(more_bytes: u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let data_kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmData:")?.split_whitespace().next()?.parse().ok());
    let data_kib: u64 = data_kib.expect("the kernel says how much there is");
    let limit = libc::rlimit { rlim_cur: (data_kib << 10) + more_bytes, rlim_max: !0 };
    // SAFETY: a valid limit, for this process, which runs only this test.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) }, 0);
}

fn little_memory_promised() {
    const LEN: usize = 4 << 20;
    // The frame tables are sized for all of the machine's memory: some bytes for each 4 KiB.
    let memory_bytes = aquifer_sys::cpu::memory_bytes();
    if memory_bytes < 4 << 30 {
        println!("skipped: the machine has less than 4 GiB, which the limit has to lie far below");
        return;
    }
    let tables_bytes = memory_bytes / 64;
    promise_at_most(tables_bytes + (256 << 20));
    let cache = Cache::builder().budget_bytes(16 << 20).build().unwrap();
    let (device, bytes) = memory(LEN, 1);
    let mapping = cache.map_mut(memory(LEN, 2).0).unwrap();
    let pages = cache.pages(device).unwrap();
    for page in 0..(LEN / PAGE) as u64 {
        assert_eq!(pages.get(PageId(page)).unwrap()[..], bytes[page as usize * PAGE..][..PAGE]);
    }
    store(&mapping, 5, 6);
    mapping.flush_all().unwrap();

    // A budget larger than the system commits is refused, and the cache keeps working.
    let before = cache.stats().budget_bytes;
    let refused = cache.resize(tables_bytes + (1 << 30)).unwrap_err();
    assert!(matches!(refused, CacheError::Kernel { .. }), "{refused}");
    assert_eq!(cache.stats().budget_bytes, before);
    cache.resize(32 << 20).unwrap();
    for page in 1..(LEN / PAGE) as u64 {
        assert_eq!(pages.get(PageId(page)).unwrap()[..], bytes[page as usize * PAGE..][..PAGE]);
    }
    let too_large = Cache::builder().budget_bytes(tables_bytes + (1 << 30)).build().unwrap();
    let (device, _) = memory(LEN, 1);
    let refused = too_large.pages(device.clone()).map(drop).unwrap_err();
    assert!(matches!(refused, CacheError::Kernel { .. }), "{refused}");
    too_large.resize(16 << 20).unwrap();
    assert_eq!(too_large.pages(device).unwrap().page_count(), (LEN / PAGE) as u64);
}

#[test]
fn a_cache_takes_no_more_memory_at_once_than_its_budget() {
    child::succeeds("little memory promised");
}
