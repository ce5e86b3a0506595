//! Repeated passes over a data file, from a cold start. The order within a pass does not matter.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::graph::{out_of_time, read_bytes};
use crate::contender::{Contiguous, PageFile, Visitor};
use crate::graph::Overtime;
use crate::job::{Job, LaneAnswer, Measured};
use crate::raw::PAGE_BYTES;
use crate::sum::sum_words;

/// Bytes summed at a time.
const PIECE_BYTES: u64 = 64 << 10;
/// Bytes announced at a time, that far ahead.
const AHEAD_BYTES: u64 = 2 << 20;

/// Sums the file `passes` times.
pub fn run<F: PageFile>(job: &Job, file: &F, passes: u32) -> Result<Measured> {
    let memory = file.contiguous().context("this contender has no contiguous addresses")?;
    let len_bytes = job.source.pages * PAGE_BYTES as u64;
    let read_before = read_bytes();
    let start = Instant::now();
    let deadline = start + Duration::from_millis(job.deadline_ms);
    let mut checksum = 0_u64;
    for _ in 0..passes {
        let sum = match file.visitor() {
            Some(visitor) => visit(visitor, len_bytes, deadline),
            None => load(memory, len_bytes, deadline),
        };
        checksum = checksum.wrapping_add(sum.map_err(|error| out_of_time(error, job))?);
    }
    let details = BTreeMap::from([("device_read_bytes".to_owned(), read_bytes() - read_before)]);
    Ok(Measured {
        mean_ns: start.elapsed().as_nanos() as f64,
        lanes: vec![LaneAnswer { accesses: u64::from(passes) * len_bytes, checksum }],
        details,
        ..Measured::default()
    })
}

fn pieces(len_bytes: u64, piece_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let starts = (0..len_bytes).step_by(piece_bytes as usize);
    starts.map(move |at| (at, piece_bytes.min(len_bytes - at)))
}

fn in_time(deadline: Instant) -> Result<()> {
    if Instant::now() > deadline { Err(Overtime.into()) } else { Ok(()) }
}

fn load(memory: &dyn Contiguous, len_bytes: u64, deadline: Instant) -> Result<u64> {
    let mut sum = 0_u64;
    for (at, part_bytes) in pieces(len_bytes, AHEAD_BYTES) {
        in_time(deadline)?;
        if at == 0 {
            memory.prefetch(&[(0, part_bytes)])?;
        }
        let next = at + part_bytes;
        if next < len_bytes {
            memory.prefetch(&[(next, AHEAD_BYTES.min(len_bytes - next))])?;
        }
        let start = memory.base().wrapping_add(at as usize);
        // SAFETY: `Contiguous` promises the whole file at its base, and nothing writes to it.
        let bytes = unsafe { std::slice::from_raw_parts(start, part_bytes as usize) };
        sum = sum.wrapping_add(sum_words(bytes));
    }
    Ok(sum)
}

fn visit(visitor: &dyn Visitor, len_bytes: u64, deadline: Instant) -> Result<u64> {
    let mut sum = 0_u64;
    let ranges: Vec<_> = pieces(len_bytes, PIECE_BYTES).collect();
    visitor.visit(&ranges, &mut |_, bytes| {
        // SAFETY: nothing writes to the file.
        sum = sum.wrapping_add(sum_words(unsafe { bytes.as_slice() }));
        in_time(deadline)
    })?;
    Ok(sum)
}
