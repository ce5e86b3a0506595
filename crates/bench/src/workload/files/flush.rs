//! Stores to pages of a large file, which are then made durable.
//!
//! First the file is dropped from the page cache and read again in 4 MiB requests: the cost of a
//! flush depends on the size of the kernel's folios, and a contender that bypassed the page cache
//! would leave smaller ones for the next. Then the whole mapping is read once, as a program would
//! have done.
//!
//! The figure is the flush alone; the detail `with_stores_ms` includes the stores, which cost more
//! in a private mapping (a copy each) than in a shared one. The bytes that reached the device are
//! counted by the device, so they include other processes' writes during the flush.

use std::collections::BTreeMap;
use std::fs::File;
use std::time::Instant;

use anyhow::Result;

use super::chill;
use crate::contender::files::OpenStored;
use crate::data::STORE_OFFSET_BYTES;
use crate::file_set::warm;
use crate::job::{Job, LaneAnswer, Measured};
use crate::raw::{PAGE_BYTES, device_written_bytes, load_word};
use crate::rng::{Rng, mix};
use crate::workload::stored_byte;

/// The stores of a job, in order: page and byte.
pub fn flushed_stores(job: &Job, pages: u64, salt: u64) -> Result<Vec<(u64, u8)>> {
    let mut order =
        Rng::for_lane(job.seed, job.round, 0).shuffled(u32::try_from(job.source.pages)?);
    order.truncate(usize::try_from(pages)?);
    // A different byte in every round, so that the page changes.
    let salt = salt ^ mix(u64::from(job.round));
    let stores = order.into_iter().map(u64::from).map(|page| (page, stored_byte(salt, page)));
    Ok(stores.collect())
}

/// Runs the job.
pub fn run(job: &Job, pages: u64, salt: u64, stored: OpenStored) -> Result<Measured> {
    // Not kept open: a flush merges its writes only while no other descriptor has the file open, as
    // in a program that owns it.
    let open = || File::open(&job.source.path);
    chill(&open()?)?;
    warm([job.source.path.as_path()].into_iter())?;
    let stores = flushed_stores(job, pages, salt)?;
    let file_pages = usize::try_from(job.source.pages)?;
    let mut contender = stored(&job.source.path, file_pages * PAGE_BYTES)?;
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
        // SAFETY: a byte of a page of the writable mapping; volatile, because the kernel accesses
        // the memory too.
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
