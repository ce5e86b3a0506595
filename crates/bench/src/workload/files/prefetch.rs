//! Random pages of a cold file that are known in advance.
//!
//! | contender | how |
//! |---|---|
//! | `mmap`, `mmap_random` | consecutive faults |
//! | `mmap_willneed` | all pages requested by `MADV_WILLNEED`, then read |
//! | the others | pages requested in batches, one batch ahead of the reads |

use std::fs::File;
use std::time::Instant;

use anyhow::Result;

use super::chill;
use super::stream::record;
use crate::contender::files::{Mapped, Maps, Requests};
use crate::job::{Job, LaneAnswer, Measured};
use crate::raw::PAGE_BYTES;
use crate::rng::Rng;
use crate::sum::sum_words;

/// Pages requested at a time: enough for a device's queue.
const BATCH_PAGES: usize = 256;

/// Reads the job's pages.
pub fn run<M: Maps>(job: &Job, open: impl FnOnce() -> Result<M>) -> Result<Measured> {
    let file = File::open(&job.source.path)?;
    chill(&file)?;
    let mut order =
        Rng::for_lane(job.seed, job.round, 0).shuffled(u32::try_from(job.source.pages)?);
    order.truncate(usize::try_from(job.accesses)?);
    let order: Vec<u64> = order.into_iter().map(u64::from).collect();
    let len_bytes = usize::try_from(job.source.pages)? * PAGE_BYTES;
    let maps = open()?;
    let map = maps.map(&file, len_bytes)?;
    let start = Instant::now();
    let checksum = match maps.requests() {
        Requests::Never => sum(&map, &order)?,
        Requests::AllAtOnce => {
            let pending = map.ask_for(&order)?;
            map.wait_for(pending)?;
            sum(&map, &order)?
        }
        Requests::OneBatchAhead => one_batch_ahead(&map, &order)?,
    };
    let mean_ns = start.elapsed().as_nanos() as f64 / order.len().max(1) as f64;
    let lanes = vec![LaneAnswer { accesses: order.len() as u64, checksum }];
    Ok(Measured { mean_ns, lanes, details: map.details(), ..Measured::default() })
}

fn one_batch_ahead<M: Mapped>(map: &M, order: &[u64]) -> Result<u64> {
    let mut batches = order.chunks(BATCH_PAGES).peekable();
    let mut asked = batches.peek().map(|first| map.ask_for(first)).transpose()?;
    let mut total = 0_u64;
    while let Some(batch) = batches.next() {
        let next = batches.peek().map(|next| map.ask_for(next)).transpose()?;
        if let Some(pending) = std::mem::replace(&mut asked, next) {
            map.wait_for(pending)?;
        }
        total = total.wrapping_add(sum(map, batch)?);
    }
    Ok(total)
}

fn sum<M: Mapped>(map: &M, pages: &[u64]) -> Result<u64> {
    map.look(|bytes| {
        let sums = pages.iter().map(|&page| sum_words(record(bytes, page as usize)));
        sums.fold(0, u64::wrapping_add)
    })
}
