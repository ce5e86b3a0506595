//! Where the time of one miss goes in a plain mapping, in the parts of Aquila's figure 8.
//!
//! The kernel does not say, so the parts are differences between things that can be timed. The same pages, far
//! apart, are accessed in four ways, with plenty of memory:
//!
//! | access | contains |
//! |---|---|
//! | first load (cold) | trap + lookup + I/O + install |
//! | load after the page-table entry was dropped (the page is cached) | trap + lookup + install |
//! | `MADV_POPULATE_READ` of one page, less an empty system call | lookup + install |
//! | `pread` of 8 cached bytes, less an empty system call | lookup |
//!
//! Eviction is what a miss takes longer under the memory limit; that is measured by another job.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use anyhow::Result;

use super::access::miss_order;
use crate::contender::MmapFile;
use crate::harness::{Job, LaneAnswer, Measured};
use crate::raw::{PAGE_BYTES, empty_system_call, load_word};

/// Times the parts.
pub fn run(job: &Job, contender: &MmapFile) -> Result<Measured> {
    let map = contender.map();
    let file = File::open(&job.source.path)?;
    let mut pages = miss_order(job);
    pages.truncate(usize::try_from(job.accesses)?);
    let offsets: Vec<usize> = pages.iter().map(|&page| page as usize * PAGE_BYTES).collect();

    let mut checksum = 0_u64;
    let mut load = |offset_bytes: usize| {
        // SAFETY: page numbers are below the number of pages mapped.
        checksum = checksum.wrapping_add(unsafe { load_word(map.base(), offset_bytes) });
        Ok(())
    };
    let cold_ns = mean_ns(&offsets, &mut load)?;
    map.unmap_pages()?;
    let soft_ns = mean_ns(&offsets, &mut load)?;
    map.unmap_pages()?;
    let call_ns = mean_ns(&offsets, |_| {
        empty_system_call();
        Ok(())
    })?;
    let populate_ns = mean_ns(&offsets, |offset| Ok(map.populate_read(offset, PAGE_BYTES)?))?;
    let mut word = [0; 8];
    let pread_ns = mean_ns(&offsets, |offset| Ok(file.read_exact_at(&mut word, offset as u64)?))?;

    let lookup_ns = pread_ns - call_ns;
    let install_ns = populate_ns - call_ns - lookup_ns;
    let mut measured = Measured { mean_ns: cold_ns, ..Measured::default() };
    measured.lanes = vec![LaneAnswer { accesses: offsets.len() as u64, checksum }];
    let parts = [
        ("trap", soft_ns - lookup_ns - install_ns),
        ("lookup", lookup_ns),
        ("io", cold_ns - soft_ns),
        ("install", install_ns),
    ];
    measured.details = parts.map(|(name, ns)| (name.to_owned(), ns)).into();
    Ok(measured)
}

fn mean_ns(offsets: &[usize], mut each: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    offsets.iter().try_for_each(|&offset| each(offset))?;
    Ok(start.elapsed().as_nanos() as f64 / offsets.len() as f64)
}
