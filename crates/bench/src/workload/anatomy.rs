//! The parts of the time of one miss, as in Aquila's figure 8.
//!
//! The parts cannot be measured directly, so they are differences between operations that can.
//!
//! **A plain mapping.** The same cached pages, far apart, are reached in three ways:
//!
//! | access | contains |
//! |---|---|
//! | load after the page-table entry was dropped | trap + lookup + install |
//! | `MADV_POPULATE_READ` of one page, less an empty system call | lookup + install |
//! | `pread` of 8 bytes, less an empty system call | lookup |
//!
//! **Aquifer.** On a device in plain memory, whose transfer is a copy with a known cost:
//!
//! | access | contains |
//! |---|---|
//! | bare load of an absent page (mapping) | trap + lookup + transfer + install |
//! | touch of an absent page (mapping), read of one (`Pages`) | lookup + transfer + install |
//! | touch or read of a resident page | lookup |
//!
//! The cost of the device and of eviction is measured by other jobs: see the bench.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use aquifer::{Advice, Backend, Cache, Device, MapOptions, MemoryDevice, PageId};

use super::access::miss_order;
use crate::contender::mmap::{Form, MmapFile};
use crate::job::{Job, LaneAnswer, Measured};
use crate::raw::{AlignedBuffer, PAGE_BYTES, empty_system_call, load_word};

/// Nanoseconds of each part.
struct Parts {
    trap_ns: f64,
    lookup_ns: f64,
    install_ns: f64,
}

impl Parts {
    fn measured(&self, job: &Job) -> Measured {
        let named =
            [("trap", self.trap_ns), ("lookup", self.lookup_ns), ("install", self.install_ns)];
        Measured {
            mean_ns: self.trap_ns + self.lookup_ns + self.install_ns,
            lanes: vec![LaneAnswer { accesses: job.accesses, checksum: 0 }],
            details: named.map(|(name, ns)| (name.to_owned(), ns)).into(),
            ..Measured::default()
        }
    }
}

/// The parts of a miss of a plain mapping.
pub fn plain_mapping(job: &Job) -> Result<Measured> {
    let contender = MmapFile::open(Form::Random, &job.source)?;
    let map = contender.map();
    let file = File::open(&job.source.path)?;
    let mut pages = miss_order(job);
    pages.truncate(usize::try_from(job.accesses)?);
    let offsets: Vec<usize> = pages.iter().map(|&page| page as usize * PAGE_BYTES).collect();

    let load = |offset_bytes: usize| {
        // SAFETY: page numbers are below the number of pages mapped.
        std::hint::black_box(unsafe { load_word(map.base(), offset_bytes) });
        Ok(())
    };
    // Loads the pages into the page cache, and no others: read-ahead is off.
    mean_ns(&offsets, load)?;
    map.unmap_pages()?;
    let soft_ns = mean_ns(&offsets, load)?;
    map.unmap_pages()?;
    let call_ns = mean_ns(&offsets, |_| {
        empty_system_call();
        Ok(())
    })?;
    let populate_ns = mean_ns(&offsets, |offset| Ok(map.populate_read(offset, PAGE_BYTES)?))?;
    let mut word = [0; 8];
    let pread_ns = mean_ns(&offsets, |offset| Ok(file.read_exact_at(&mut word, offset as u64)?))?;
    let parts = Parts {
        trap_ns: soft_ns - (populate_ns - call_ns),
        lookup_ns: pread_ns - call_ns,
        install_ns: populate_ns - pread_ns,
    };
    Ok(parts.measured(job))
}

/// A cache with room for everything over a device in memory, and two disjoint random sets of its
/// pages.
struct Roomy {
    cache: Cache,
    device: Arc<MemoryDevice>,
    first: Vec<usize>,
    second: Vec<usize>,
}

impl Roomy {
    fn new(job: &Job) -> Result<Self> {
        let count = usize::try_from(job.accesses)?;
        let mut order_of = job.clone();
        order_of.source.pages = 2 * job.accesses;
        let mut first: Vec<usize> =
            miss_order(&order_of).iter().map(|&page| page as usize * PAGE_BYTES).collect();
        let second = first.split_off(count);
        let len_bytes = 2 * count * PAGE_BYTES;
        let device = MemoryDevice::new(len_bytes)?;
        // Otherwise the first transfer would allocate the memory.
        let content = vec![1; 1 << 20];
        for at in (0..len_bytes).step_by(content.len()) {
            let chunk = &content[..content.len().min(len_bytes - at)];
            device.write_at(at as u64, chunk)?;
        }
        let budget_bytes = 2 * len_bytes as u64 + (32 << 20);
        let cache = Cache::builder().budget_bytes(budget_bytes).build()?;
        Ok(Self { cache, device: Arc::new(device), first, second })
    }

    fn transfer_ns(&self) -> Result<f64> {
        let mut buffer = AlignedBuffer::new(PAGE_BYTES);
        mean_ns(&self.second, |offset| {
            self.device.read_at(offset as u64, buffer.bytes_mut())?;
            Ok(())
        })
    }
}

/// The parts of a miss of a mapping of Aquifer.
pub fn mapping(job: &Job) -> Result<Measured> {
    let roomy = Roomy::new(job)?;
    let options = MapOptions::new().backend(Backend::User);
    let mapping = roomy.cache.map_with(roomy.device.clone(), options)?;
    mapping.advise(0..mapping.len(), Advice::Random)?;
    let bare_ns = mean_ns(&roomy.first, |offset| {
        // SAFETY: offsets are below the length of the mapping.
        std::hint::black_box(unsafe { load_word(mapping.as_ptr(), offset) });
        Ok(())
    })?;
    let touch = |offset: usize| Ok(mapping.touch(offset as u64)?);
    let touch_ns = mean_ns(&roomy.second, touch)?;
    let lookup_ns = mean_ns(&roomy.first, touch)?;
    // Addressable bytes are installed from there without a transfer.
    let transfer_ns = if roomy.device.dax().is_some() { 0.0 } else { roomy.transfer_ns()? };
    let parts = Parts {
        trap_ns: bare_ns - touch_ns,
        lookup_ns,
        install_ns: touch_ns - lookup_ns - transfer_ns,
    };
    Ok(parts.measured(job))
}

/// The parts of a miss of pages of Aquifer.
pub fn pages(job: &Job) -> Result<Measured> {
    let roomy = Roomy::new(job)?;
    let pages = roomy.cache.pages(roomy.device.clone())?;
    let read = |offset: usize| {
        let page = PageId((offset / PAGE_BYTES) as u64);
        // SAFETY: the bytes of a page are a whole page.
        pages.read(page, |bytes| std::hint::black_box(unsafe { load_word(bytes.as_ptr(), 0) }))?;
        Ok(())
    };
    // Includes the kernel's allocation of the frames' memory: each frame is used for the first
    // time.
    let miss_ns = mean_ns(&roomy.first, read)?;
    let lookup_ns = mean_ns(&roomy.first, read)?;
    let transfer_ns = roomy.transfer_ns()?;
    let parts = Parts { trap_ns: 0.0, lookup_ns, install_ns: miss_ns - lookup_ns - transfer_ns };
    Ok(parts.measured(job))
}

fn mean_ns(offsets: &[usize], mut each: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    offsets.iter().try_for_each(|&offset| each(offset))?;
    Ok(start.elapsed().as_nanos() as f64 / offsets.len() as f64)
}
