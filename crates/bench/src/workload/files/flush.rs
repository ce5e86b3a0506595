//! Pages of a large file stored to, then made durable.
//!
//! The file is dropped from the page cache and read again in 4 MiB requests first: what a flush costs depends on how
//! large the kernel's folios are, and a contender that went around the page cache would leave smaller ones to the next.
//! Then the whole mapping is read once, as its program would have done.
//!
//! The figure is the flush alone; `with_stores_ms` in the details adds the stores, which a private mapping pays
//! more for (a copy each) and a shared one less. What reached the device stands beside it, counted by the device:
//! others' writes to it during the flush are in it, too.

use std::collections::BTreeMap;
use std::fs::File;
use std::time::Instant;

use anyhow::Result;

use super::chill;
use crate::contender::files::stored;
use crate::data::STORE_OFFSET_BYTES;
use crate::file_set::warm;
use crate::harness::{Job, LaneAnswer, Measured};
use crate::raw::{PAGE_BYTES, device_written_bytes, load_word};
use crate::rng::{Rng, mix};
use crate::workload::stored_byte;

/// The stores of a job, in order: page and byte.
pub fn flushed_stores(job: &Job, pages: u64, salt: u64) -> Result<Vec<(u64, u8)>> {
    let mut order =
        Rng::for_lane(job.seed, job.round, 0).shuffled(u32::try_from(job.source.pages)?);
    order.truncate(usize::try_from(pages)?);
    // Another byte in every round, or the page would not change.
    let salt = salt ^ mix(u64::from(job.round));
    let stores = order.into_iter().map(u64::from).map(|page| (page, stored_byte(salt, page)));
    Ok(stores.collect())
}

/// Stores and flushes.
pub fn run(job: &Job, pages: u64, salt: u64) -> Result<Measured> {
    // Not kept open: a flush joins what it writes only while no other has the file open, as in a program that owns it.
    let open = || File::open(&job.source.path);
    chill(&open()?)?;
    warm([job.source.path.as_path()].into_iter())?;
    let stores = flushed_stores(job, pages, salt)?;
    let file_pages = usize::try_from(job.source.pages)?;
    let mut contender = stored(job.system, &job.source.path, file_pages * PAGE_BYTES)?;
    let base = contender.base()?;
    let mut before = 0_u64;
    for page in 0..file_pages {
        // SAFETY: an aligned word of a page of the mapping.
        before = before.wrapping_add(unsafe { load_word(base, page * PAGE_BYTES) });
    }
    let start = Instant::now();
    let mut checksum = before;
    for &(page, value) in &stores {
        let byte = base.wrapping_add(page as usize * PAGE_BYTES + STORE_OFFSET_BYTES);
        // SAFETY: a byte of a page of the writable mapping; volatile, because its memory is the kernel's, too.
        unsafe { byte.write_volatile(value) };
        checksum = checksum.wrapping_add(u64::from(value));
    }
    let storing = start.elapsed();
    let device_before = device_written_bytes(&open()?)?;
    let start = Instant::now();
    let reported = contender.flush()?;
    let flush = start.elapsed();
    let device_after = device_written_bytes(&open()?)?;

    let mut details =
        BTreeMap::from([("with_stores_ms".to_owned(), (storing + flush).as_secs_f64() * 1e3)]);
    if let (Some(before), Some(after)) = (device_before, device_after) {
        details.insert("device_written_bytes".to_owned(), after.saturating_sub(before) as f64);
    }
    if let Some(bytes) = reported {
        details.insert("reported_written_bytes".to_owned(), bytes as f64);
    }
    Ok(Measured {
        mean_ns: flush.as_nanos() as f64,
        lanes: vec![LaneAnswer { accesses: pages, checksum }],
        details,
        ..Measured::default()
    })
}
