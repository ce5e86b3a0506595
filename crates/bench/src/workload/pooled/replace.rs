//! One file takes the content of another, an odd number of times, so that exchanged files have
//! swapped content at the end.
//!
//! Bytes written to the pages of files are counted if the kernel can tell: pages of the pool's data
//! that `cachestat` reports as dirty, of which there were none before.

use std::fs::File;
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};

use super::{file_names, measured, warm_set};
use crate::contender::pooled::{OpenPair, open_pool};
use crate::job::{Job, Measured};
use crate::raw::{cache_state, system_page_bytes};
use crate::scratch::POOL;
use aquifer_sys::interrupt;

/// Runs the job.
pub fn run(job: &Job, pair: OpenPair, file_bytes: u64) -> Result<Measured> {
    ensure!(!job.accesses.is_multiple_of(2), "an even number of exchanges changes nothing");
    let names = file_names(2);
    warm_set(&names)?;
    let mut pair = pair([&names[0], &names[1]], file_bytes)?;
    let [_, wanted] = pair.sums()?;
    let counter = pair.exchanges_pages().then(DirtyData::start).transpose()?;
    let start = Instant::now();
    for _ in 0..job.accesses {
        interrupt::check()?;
        pair.replace()?;
    }
    let elapsed = start.elapsed();
    let written_bytes = counter.map(|counter| counter.bytes()).transpose()?.flatten();
    let [found, _] = pair.sums()?;
    ensure!(found == wanted, "the file does not have the content of the other one");
    let mut measured = measured(elapsed, job.accesses, 0);
    if let Some(written_bytes) = written_bytes {
        measured.details.insert("data_written_bytes".to_owned(), written_bytes as f64);
    }
    Ok(measured)
}

/// Counts dirty pages of a pool's data.
struct DirtyData {
    file: File,
    offset_bytes: u64,
    len_bytes: u64,
}

impl DirtyData {
    fn start() -> Result<Self> {
        let data = open_pool()?.pool().layout().data();
        let file = File::options().read(true).write(true).open(Path::new(POOL))?;
        file.sync_all()?;
        Ok(Self { file, offset_bytes: data.offset_bytes, len_bytes: data.len_bytes })
    }

    /// `None` if pages are never dirty there, or the kernel cannot tell.
    fn bytes(&self) -> Result<Option<u64>> {
        let in_data = cache_state(&self.file, self.offset_bytes, self.len_bytes)?;
        let everywhere = cache_state(&self.file, 0, 0)?;
        // At least the log was written to.
        let can_tell = everywhere.is_some_and(|state| state.dirty_pages > 0);
        Ok(in_data.filter(|_| can_tell).map(|state| state.dirty_pages * system_page_bytes()))
    }
}
