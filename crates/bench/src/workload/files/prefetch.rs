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
use crate::contender::System;
use crate::contender::files::{Mapped, Maps, VisitMaps, with_maps};
use crate::harness::{Job, LaneAnswer, Measured};
use crate::raw::PAGE_BYTES;
use crate::rng::Rng;
use crate::sum::sum_words;

/// Pages requested at a time: enough for a device's queue.
const BATCH_PAGES: usize = 256;

/// How pages are requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    Never,
    AllAtOnce,
    OneBatchAhead,
}

/// Reads the job's pages.
pub fn run(job: &Job) -> Result<Measured> {
    let file = File::open(&job.source.path)?;
    chill(&file)?;
    let mut order =
        Rng::for_lane(job.seed, job.round, 0).shuffled(u32::try_from(job.source.pages)?);
    order.truncate(usize::try_from(job.accesses)?);
    let order: Vec<u64> = order.into_iter().map(u64::from).collect();
    let plan = match job.system {
        System::Mmap | System::MmapRandom => Plan::Never,
        System::MmapWillneed => Plan::AllAtOnce,
        _ => Plan::OneBatchAhead,
    };
    let len_bytes = usize::try_from(job.source.pages)? * PAGE_BYTES;
    with_maps(job.system, Prefetch { file: &file, len_bytes, order: &order, plan })
}

struct Prefetch<'a> {
    file: &'a File,
    len_bytes: usize,
    order: &'a [u64],
    plan: Plan,
}

impl VisitMaps for Prefetch<'_> {
    type Output = Measured;

    fn visit<M: Maps>(self, maps: &M) -> Result<Measured> {
        let map = maps.map(self.file, self.len_bytes)?;
        let start = Instant::now();
        let checksum = match self.plan {
            Plan::Never => sum(&map, self.order)?,
            Plan::AllAtOnce => {
                let pending = map.ask_for(self.order)?;
                map.wait_for(pending)?;
                sum(&map, self.order)?
            }
            Plan::OneBatchAhead => one_batch_ahead(&map, self.order)?,
        };
        let mean_ns = start.elapsed().as_nanos() as f64 / self.order.len().max(1) as f64;
        let accesses = self.order.len() as u64;
        let lanes = vec![LaneAnswer { accesses, checksum }];
        Ok(Measured { mean_ns, lanes, details: map.details(), ..Measured::default() })
    }
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
