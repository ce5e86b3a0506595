//! Costs of primitives on this machine: the kernel's, the disk's, and the engine's.
//!
//! Each takes at most some tens of milliseconds; a failed measurement reports its reason.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use aquifer::device::Direct;
use aquifer::pool::media;
use aquifer::{
    Advice, AlignedBuffer, Backend, Cache, Device, FileDevice, MapOptions, MemoryDevice, PageId,
    WriteWindows,
};
use aquifer_sys::cost;

use super::forms::BUDGET_BYTES;
use super::report::Cost;
use super::{DATA_BYTES, bare};

const PAGE: usize = 4096;
const PAGES: u64 = (DATA_BYTES / PAGE) as u64;
/// The time limit for one figure.
const PATIENCE: Duration = Duration::from_millis(60);

/// All figures.
pub fn all(data: &Path) -> Vec<Cost> {
    let kernel = |name, found: io::Result<f64>| Cost::new(name, found.map_err(Into::into));
    vec![
        kernel("system call", cost::system_call_ns()),
        kernel("signal to itself and back", cost::signal_round_trip_ns()),
        kernel("userfaultfd: install a page", cost::install_page_ns()),
        kernel("discard, 64 pages a call: a page", cost::vectored_discard_page_ns()),
        kernel("discard, one page a call", cost::single_discard_page_ns()),
        kernel("write-protect 2 MiB: a page", cost::region_protect_page_ns()),
        kernel("write-protect one page a call", cost::single_protect_page_ns()),
        kernel("copy a page, non-temporal", cost::copy_page_ns()),
        Cost::new("page-cache fault", page_cache_fault(data)),
        Cost::new("pread of a cached page", cached_read(data)),
        Cost::new("direct read of a page", direct_read(data, 1)),
        Cost::new("direct read of a page, 64 in flight", direct_read(data, 64)),
        Cost::new("mapping: miss in a bare load (no I/O)", mapping_miss(false)),
        Cost::new("mapping: miss in touch (no I/O)", mapping_miss(true)),
        Cost::new("mapping: hit, random bare load", mapping_hit(false)),
        Cost::new("mapping: hit, touch", mapping_hit(true)),
        Cost::new("Pages: hit, optimistic read", pages_hit(false)),
        Cost::new("Pages: hit, guard", pages_hit(true)),
        Cost::new("pool in memory: store of a page, no windows", pool_store(WriteWindows::None)),
        Cost::new("the same, with protection keys", pool_store(WriteWindows::Keys)),
        Cost::new("the same, with system calls", pool_store(WriteWindows::Calls)),
    ]
}

/// Nanoseconds per call of `work`, averaged over as many calls as the time limit permits.
fn repeat(mut work: impl FnMut(u64) -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    let mut done = 0_u64;
    while done < 64 || start.elapsed() < PATIENCE {
        // In groups, to amortize reading the clock.
        for _ in 0..if done < 64 { 1 } else { 64 } {
            work(done)?;
            done += 1;
        }
        if start.elapsed() > 10 * PATIENCE {
            break;
        }
    }
    Ok(start.elapsed().as_nanos() as f64 / done as f64)
}

/// A scattered page number: an odd multiplier permutes the pages.
fn scattered(index: u64) -> u64 {
    index.wrapping_mul(2_654_435_761) % PAGES
}

fn page_cache_fault(data: &Path) -> Result<f64> {
    Ok(cost::page_cache_fault_ns(&File::open(data)?, DATA_BYTES)?)
}

fn cached_read(data: &Path) -> Result<f64> {
    let file = File::open(data)?;
    let mut page = [0; PAGE];
    (0..PAGES).try_for_each(|index| file.read_exact_at(&mut page, index * PAGE as u64))?;
    repeat(|index| Ok(file.read_exact_at(&mut page, scattered(index) * PAGE as u64)?))
}

fn direct_read(data: &Path, in_flight: usize) -> Result<f64> {
    let device = Arc::new(FileDevice::options().direct(Direct::Require).open(data)?);
    if in_flight == 1 {
        let mut page = AlignedBuffer::new(PAGE, device.alignment_bytes());
        return repeat(|index| {
            let read = device.read_at(scattered(index) * PAGE as u64, &mut page)?;
            ensure!(read == PAGE, "the file was truncated");
            Ok(())
        });
    }
    // Through the engine, because its batching determines the cost.
    let cache = Cache::builder().budget_bytes(BUDGET_BYTES).build()?;
    let pages = cache.pages(device)?;
    let start = Instant::now();
    let mut done = 0;
    let numbers: Vec<_> = (0..PAGES).map(|index| PageId(scattered(index))).collect();
    for batch in numbers.chunks(in_flight) {
        pages.load(batch)?;
        done += batch.len();
        if start.elapsed() > PATIENCE {
            break;
        }
    }
    Ok(start.elapsed().as_nanos() as f64 / done as f64)
}

fn memory() -> Result<Arc<MemoryDevice>> {
    Ok(Arc::new(MemoryDevice::from_bytes(&vec![1; DATA_BYTES])?))
}

/// A user-backed mapping of memory, larger than its budget if it is to miss.
fn mapping_miss(touch: bool) -> Result<f64> {
    let cache = Cache::builder().budget_bytes(BUDGET_BYTES).build()?;
    let mapping = cache.map_with(memory()?, MapOptions::new().backend(Backend::User))?;
    mapping.advise(0..mapping.len(), Advice::Random)?;
    let start = Instant::now();
    let mut done = 0;
    for index in 0..PAGES / 2 {
        let at = scattered(index) * PAGE as u64;
        if touch {
            mapping.touch(at)?;
        } else {
            std::hint::black_box(bare::load(&mapping, at));
        }
        done += 1;
        if index.is_multiple_of(64) && start.elapsed() > PATIENCE {
            break;
        }
    }
    Ok(start.elapsed().as_nanos() as f64 / f64::from(done))
}

fn mapping_hit(touch: bool) -> Result<f64> {
    let cache = Cache::builder().budget_bytes(2 * BUDGET_BYTES).build()?;
    let mapping = cache.map_with(memory()?, MapOptions::new().backend(Backend::User))?;
    mapping.touch_many(std::slice::from_ref(&(0..mapping.len())))?;
    if touch {
        return repeat(|index| Ok(mapping.touch(scattered(index) * PAGE as u64)?));
    }
    Ok(bare::random_load_ns(&mapping))
}

fn pages_hit(guard: bool) -> Result<f64> {
    let cache = Cache::builder().budget_bytes(2 * BUDGET_BYTES).build()?;
    let pages = cache.pages(memory()?)?;
    let all: Vec<_> = (0..PAGES).map(PageId).collect();
    all.chunks(256).try_for_each(|part| pages.load(part))?;
    repeat(|index| {
        let page = PageId(scattered(index));
        if guard {
            std::hint::black_box(pages.get(page)?[0]);
        } else {
            std::hint::black_box(pages.read(page, |bytes| bytes.get::<u8>(0))?);
        }
        Ok(())
    })
}

/// Storing a page in media like those of a pool in memory.
#[allow(unsafe_code)] // The operation that is measured is unsafe.
fn pool_store(windows: WriteWindows) -> Result<f64> {
    let file = tempfile::tempfile_in("/dev/shm")?;
    file.set_len(DATA_BYTES as u64)?;
    let options = media::OpenOptions::new().writable(true).write_windows(windows);
    let media = options.open_file(file, "/dev/shm")?;
    let page = [1; PAGE];
    let store = |index| {
        // SAFETY: nothing refers to the bytes of these media: no pool is on them.
        unsafe { media.store_at(scattered(index) * PAGE as u64, &page)? };
        Ok(())
    };
    (0..PAGES).try_for_each(store)?;
    repeat(store)
}
