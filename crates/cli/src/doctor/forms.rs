//! Which form each mechanism takes here.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use aquifer::mapper::read_once::calibrate;
use aquifer::{Cache, Device, FileDevice, MemoryDevice};
use aquifer_bench::Bytes;
use aquifer_sys::copy::CopyForm;
use aquifer_sys::uffd::{Delivery, Uffd};
use aquifer_sys::{features, pkey};

use super::report::Mechanism;

/// The least budget: nothing is cached here.
pub const BUDGET_BYTES: u64 = 24 << 20;

/// All mechanisms. `data` is a file in the directory asked about.
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
                Ok(_) => "SIGBUS mode: the faulting thread serves itself".to_owned(),
                Err(error) => format!("none, userfaultfd is refused: {error}"),
            },
        ),
        Mechanism::new(
            "serving thread, if asked for",
            match serving_thread {
                Ok(_) => "possible: system calls may touch pages that are not there".to_owned(),
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
                Ok(()) => "vectored: many pages, one TLB shootdown".to_owned(),
                Err(_) => "by region of 2 MiB (vectored needs Linux 6.13)".to_owned(),
            },
        ),
        Mechanism::new("eviction of dirty pages", "by region of 2 MiB".to_owned()),
        Mechanism::new("transfers of files there", access),
        Mechanism::new("copies to devices in memory", copies().to_owned()),
        Mechanism::new("write windows of pools, if asked for", write_windows()),
        Mechanism::new("files looked at once", read_once(data)),
        Mechanism::new("files looked at once, on tmpfs", read_once_in_memory()),
    ])
}

/// Which backend the engine takes when it may choose.
fn backend(device: Arc<dyn Device>, writable: bool) -> String {
    let mapped = Cache::builder()
        .budget_bytes(BUDGET_BYTES)
        .build()
        .and_then(|cache| if writable { cache.map_mut(device) } else { cache.map(device) });
    match mapped {
        Ok(mapping) => format!("{} backend", mapping.backend().name()),
        Err(error) => format!("not possible: {error}"),
    }
}

/// From which length on a file there is mapped instead of read.
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
        || "not measured: read below 512 KiB, mapped above".to_owned(),
        |found| {
            let bound = Bytes(found.threshold_bytes);
            format!("read below {bound}, mapped from there on (measured)")
        },
    )
}

/// What guards the mapping of a pool where [`WriteWindows::Best`](aquifer::WriteWindows::Best) is asked for.
fn write_windows() -> String {
    match pkey::probe() {
        Ok(()) => "protection keys: a second mapping, open only while the pool stores".to_owned(),
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
