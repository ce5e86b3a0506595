//! What dropping a mapping waits for, and how.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use aquifer_cache::Cache;
use aquifer_device::{Device, DeviceError, MemoryDevice};

use crate::support::wait_until;

const MIB: u64 = 1 << 20;

/// A memory device whose reads block until the gate is opened.
struct Gated {
    memory: MemoryDevice,
    reads: AtomicUsize,
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gated {
    fn new(len_bytes: u64) -> Gated {
        Gated {
            memory: MemoryDevice::new(len_bytes as usize).unwrap(),
            reads: AtomicUsize::new(0),
            is_open: Mutex::new(false),
            opened: Condvar::new(),
        }
    }

    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn reads(&self) -> usize {
        self.reads.load(Ordering::SeqCst)
    }
}

impl Device for Gated {
    fn name(&self) -> &str {
        "gated"
    }

    fn len_bytes(&self) -> Result<u64, DeviceError> {
        self.memory.len_bytes()
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let gate = self.is_open.lock().unwrap();
        drop(self.opened.wait_while(gate, |is_open| !*is_open).unwrap());
        self.memory.read_at(offset_bytes, buffer)
    }

    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        self.memory.write_at(offset_bytes, buffer)
    }

    fn sync(&self) -> Result<(), DeviceError> {
        self.memory.sync()
    }

    fn access_path(&self) -> String {
        self.memory.access_path()
    }
}

/// Opens the gate when a test ends, even if it fails: the thread that drops the mapping waits for
/// it.
struct OpenAtEnd<'a>(&'a Gated);

impl Drop for OpenAtEnd<'_> {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// Whether a thread of this process is sleeping.
fn sleeps(thread: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    stat.rsplit(") ").next().unwrap().starts_with('S')
}

/// Starts a prefetch of a whole device and drops what `attach` returned during the first read: the
/// dropping thread sleeps until that read has ended, and there is no further read.
fn dropping_ends_the_prefetch<T: Send>(
    io_threads: usize,
    attach: impl FnOnce(&Cache, Arc<dyn Device>) -> T,
) {
    let cache = Cache::builder().budget_bytes(32 * MIB).io_threads(io_threads).build().unwrap();
    let device = Arc::new(Gated::new(16 * MIB));
    let attached = attach(&cache, device.clone());
    wait_until("the first read", || device.reads() == 1);
    let thread = AtomicU64::new(0);
    let is_dropped = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _open = OpenAtEnd(&device);
        scope.spawn(|| {
            // SAFETY: only a query.
            thread.store(unsafe { libc::gettid() } as u64, Ordering::SeqCst);
            drop(attached);
            is_dropped.store(true, Ordering::SeqCst);
        });
        wait_until("a thread that drops it", || thread.load(Ordering::SeqCst) != 0);
        wait_until("its sleep", || sleeps(thread.load(Ordering::SeqCst)));
        assert!(!is_dropped.load(Ordering::SeqCst), "the read on its way is waited for");
    });
    assert_eq!(device.reads(), 1, "the rest of the prefetch is not wanted any more");
    wait_until("figures that add up", || cache.stats().is_consistent());
    assert_eq!(cache.stats().resident_pages, 0);
}

#[test]
fn dropping_a_mapping_ends_its_prefetch() {
    for io_threads in [1, 2] {
        dropping_ends_the_prefetch(io_threads, |cache, device| {
            let mapping = cache.map_mut(device).unwrap();
            mapping.prefetch(std::slice::from_ref(&(0..mapping.len()))).unwrap();
            mapping
        });
    }
}

#[test]
fn dropping_pages_ends_their_prefetch() {
    dropping_ends_the_prefetch(1, |cache, device| {
        let pages = cache.pages(device).unwrap();
        pages.prefetch(aquifer_cache::PageId(0), pages.page_count()).unwrap();
        pages
    });
}

/// A call that outlives its dropped future is not a hint, and is waited for; the thread that runs
/// it may be the one that drops the mapping.
#[test]
fn dropping_a_mapping_waits_for_its_calls() {
    let cache = Cache::builder().budget_bytes(32 * MIB).io_threads(1).build().unwrap();
    let device = Arc::new(Gated::new(MIB));
    let mapping = cache.map_mut(device.clone()).unwrap();
    drop(mapping.touch_many_async(std::slice::from_ref(&(0..MIB))));
    wait_until("the first read", || device.reads() == 1);
    let thread = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let _open = OpenAtEnd(&device);
        scope.spawn(|| {
            // SAFETY: only a query.
            thread.store(unsafe { libc::gettid() } as u64, Ordering::SeqCst);
            drop(mapping);
        });
        wait_until("a thread that drops it", || thread.load(Ordering::SeqCst) != 0);
        wait_until("its sleep", || sleeps(thread.load(Ordering::SeqCst)));
    });
    assert_eq!(device.reads() as u64, MIB / (64 << 10), "the call came to its end");
}
