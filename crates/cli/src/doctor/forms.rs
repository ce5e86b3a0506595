//! The form that each mechanism takes on this machine.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use aquifer::mapper::read_once::calibrate;
use aquifer::{
    Cache, Device, FileAccess, FileDevice, Mapper, MemoryDevice, PersistenceDomain, Pool,
};
use aquifer_sys::copy::CopyForm;
use aquifer_sys::uffd::{Delivery, Uffd};
use aquifer_sys::units::Bytes;
use aquifer_sys::{features, pkey};

use super::report::Mechanism;

/// The smallest budget: nothing is cached here.
pub const BUDGET_BYTES: u64 = 24 << 20;

/// All mechanisms. `data` is a file in the examined directory.
pub fn all(data: &Path) -> Result<Vec<Mechanism>> {
    let device = Arc::new(FileDevice::options().open(data)?);
    let access = device.access_path();
    let userfaultfd = features::userfaultfd_sigbus();
    let serving_thread = Uffd::open(Delivery::Message { kernel_faults: true });
    let backend_of = |device: Arc<dyn Device>, writable| backend(device, writable);
    let writable = Arc::new(MemoryDevice::from_bytes(&[0; 4096])?);
    Ok(vec![
        Mechanism::new(
            "faults of user-backed mappings",
            match &userfaultfd {
                Ok(_) => "SIGBUS mode: the faulting thread serves its own faults".to_owned(),
                Err(error) => format!("none: userfaultfd is refused ({error})"),
            },
        ),
        Mechanism::new(
            "serving thread, if enabled",
            match serving_thread {
                Ok(_) => "available: system calls may access absent pages".to_owned(),
                Err(error) => {
                    format!("refused ({error}); run as root or set vm.unprivileged_userfaultfd=1")
                }
            },
        ),
        Mechanism::new("read-only mapping of a file", backend_of(device, false)),
        Mechanism::new("writable mapping", backend_of(writable, true)),
        Mechanism::new(
            "eviction of clean pages",
            match features::vectored_dontneed() {
                Ok(()) if features::range_dontneed_flushes_once() => {
                    "vectored: many pages, one TLB shootdown".to_owned()
                }
                Ok(()) => "vectored: many pages in one call (one TLB shootdown needs Linux 6.16)"
                    .to_owned(),
                Err(_) => "by region of 2 MiB (vectored needs Linux 6.13)".to_owned(),
            },
        ),
        Mechanism::new("eviction of dirty pages", "by region of 2 MiB".to_owned()),
        Mechanism::new("transfers of files there", access),
        Mechanism::new("copies to devices in memory", copies().to_owned()),
        Mechanism::new("views of files that were closed", parking(data)),
        Mechanism::new("views of files that are unmapped", unmapping().to_owned()),
        Mechanism::new("durability of pools there", persistence(data)),
        Mechanism::new("page tables of pools", page_tables()),
        Mechanism::new("write windows of pools, if enabled", write_windows()),
        Mechanism::new("files read once", read_once(data)),
        Mechanism::new("files read once, on tmpfs", read_once_in_memory()),
    ])
}

/// The backend that the engine chooses by default.
fn backend(device: Arc<dyn Device>, writable: bool) -> String {
    let mapped = Cache::builder().budget_bytes(BUDGET_BYTES).build().and_then(|cache| {
        if writable {
            cache.map_mut(device).map(|mapping| mapping.backend())
        } else {
            cache.map(device).map(|mapping| mapping.backend())
        }
    });
    match mapped {
        Ok(backend) => format!("{} backend", backend.name()),
        Err(error) => format!("not possible: {error}"),
    }
}

/// The length from which a file in this directory is mapped instead of read.
fn read_once(data: &Path) -> String {
    File::open(data).map_or_else(|error| format!("not measured: {error}"), |file| threshold(&file))
}

fn read_once_in_memory() -> String {
    let file = tempfile::tempfile_in("/dev/shm").and_then(|file| {
        file.write_all_at(&vec![1; 4 << 20], 0)?;
        Ok(file)
    });
    file.map_or_else(|error| format!("not measured: {error}"), |file| threshold(&file))
}

fn threshold(file: &File) -> String {
    calibrate(file).map_or_else(
        || "read below 512 KiB, otherwise mapped (not measured)".to_owned(),
        |found| {
            let bound = Bytes(found.threshold_bytes);
            format!("read below {bound}, otherwise mapped (measured)")
        },
    )
}

/// Whether the mapping of a file in this directory is kept for the next view.
fn parking(data: &Path) -> String {
    let parked = Mapper::builder().build().map_err(anyhow::Error::from).and_then(|mapper| {
        drop(mapper.map(data, FileAccess::Read, ..)?);
        drop(mapper.map(data, FileAccess::Read, ..)?);
        Ok(mapper.stats().cache.hits)
    });
    match parked {
        Ok(0) => "unmapped: each view maps the file again".to_owned(),
        Ok(_) => "parked: the next view of the file reuses its mapping".to_owned(),
        Err(error) => format!("not possible: {error:#}"),
    }
}

/// How many mappings are removed at a time.
fn unmapping() -> &'static str {
    if features::range_dontneed_flushes_once() {
        "drained: many at once, with one TLB shootdown and without the lock"
    } else {
        "vacated: many under one reservation, with the lock (draining needs Linux 6.16)"
    }
}

/// How a pool in the directory of `data` is made durable.
fn persistence(data: &Path) -> String {
    // Create a temporary pool, so that the result is the engine's own.
    let domain = || -> Result<PersistenceDomain> {
        let directory = tempfile::Builder::new()
            .prefix("doctor-")
            .tempdir_in(data.parent().unwrap_or(Path::new(".")))?;
        let path = directory.path().join("pool");
        let pool = Pool::create(&path, 1 << 20)?;
        Ok(pool.info()?.domain)
    };
    match domain() {
        Ok(domain @ PersistenceDomain::Dax) => format!("{domain}: cache-line flush and fence"),
        Ok(domain @ PersistenceDomain::PageCache) => {
            format!("{domain}: write-back of a range and a flush of the device")
        }
        Ok(domain @ PersistenceDomain::Volatile) => {
            format!("{domain}: memory, which survives processes, but not a power cut")
        }
        Err(error) => format!("cannot create a pool: {error:#}"),
    }
}

/// Where processes can share the page tables of a pool.
fn page_tables() -> String {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let huge = mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (place, kind) = (words.next()?, words.next()?);
        (kind == "hugetlbfs").then(|| place.to_owned())
    });
    match huge {
        Some(place) => {
            format!("shared on hugetlbfs ({place}) from 1 GiB on; otherwise not shared")
        }
        None => "not shared (hugetlbfs, which shares them, is not mounted)".to_owned(),
    }
}

/// What protects the mapping of a pool under [`WriteWindows::Best`](aquifer::WriteWindows::Best).
fn write_windows() -> String {
    match pkey::probe() {
        Ok(()) => {
            "protection keys: a second mapping, writable only while the pool stores".to_owned()
        }
        Err(error) => format!("system calls; none on hugetlbfs (no protection keys: {error})"),
    }
}

fn copies() -> &'static str {
    match CopyForm::best() {
        CopyForm::Avx512 => "AVX-512, non-temporal",
        CopyForm::Avx2 => "AVX2, non-temporal",
        CopyForm::Sse2 => "SSE2, non-temporal",
        _ => "memcpy",
    }
}
