//! One large file read sequentially, and the pages of a warm one in random order.
//!
//! The clock runs from before the file is mapped until after it is unmapped; the figure is the
//! whole pass. Page-sized records are summed as they are read: too short to be timed individually.

use std::fs::File;
use std::ops::Range;
use std::time::Instant;

use anyhow::Result;

use super::chill;
use crate::contender::files::{Mapped, Maps};
use crate::file_set::warm;
use crate::job::{Job, LaneAnswer, Measured};
use crate::raw::{PAGE_BYTES, keep_to_processors};
use crate::rng::Rng;
use crate::sum::sum_words;
use crate::threads::join_all;

/// Reads the file once, by one thread or by several that read a share each.
pub fn sequential<M: Maps>(
    job: &Job,
    open: impl FnOnce() -> Result<M>,
    readers: Option<u32>,
    streams: u32,
    cold: bool,
) -> Result<Measured> {
    let file = File::open(&job.source.path)?;
    if let Some(readers) = readers {
        keep_to_processors(readers as usize)?;
    }
    if cold {
        chill(&file)?;
    } else {
        warm([job.source.path.as_path()].into_iter())?;
    }
    let pages = usize::try_from(job.source.pages)?;
    let (readers, streams) = (readers.unwrap_or(1) as usize, streams as usize);
    let maps = open()?;
    let start = Instant::now();
    let map = maps.map(&file, pages * PAGE_BYTES)?;
    let shares = shares(0..pages, readers);
    let lanes = match &shares[..] {
        [share] => vec![read(&map, share.clone(), streams)?],
        shares => std::thread::scope(|scope| {
            let map = &map;
            let started: Vec<_> = shares
                .iter()
                .map(|share| scope.spawn(move || read(map, share.clone(), streams)))
                .collect();
            join_all(started)
        })?,
    };
    let details = map.details();
    drop(map);
    Ok(pass(start, lanes, details))
}

fn pass(
    start: Instant,
    lanes: Vec<LaneAnswer>,
    details: std::collections::BTreeMap<String, f64>,
) -> Measured {
    let mean_ns = start.elapsed().as_nanos() as f64;
    Measured { mean_ns, lanes, details, ..Measured::default() }
}

/// Divides pages into shares that differ by one page at most.
fn shares(pages: Range<usize>, count: usize) -> Vec<Range<usize>> {
    let bound = |number: usize| pages.start + pages.len() * number / count;
    (0..count).map(|number| bound(number)..bound(number + 1)).collect()
}

/// Sums these pages, from several positions in turn.
fn read<M: Mapped>(map: &M, pages: Range<usize>, streams: usize) -> Result<LaneAnswer> {
    let accesses = pages.len() as u64;
    let streams = shares(pages, streams);
    for stream in &streams {
        map.announce(stream.start * PAGE_BYTES..stream.end * PAGE_BYTES)?;
    }
    let longest = streams.iter().map(Range::len).max().unwrap_or(0);
    let checksum = map.look(|bytes| {
        let mut sum = 0_u64;
        for step in 0..longest {
            for stream in &streams {
                let page = stream.start + step;
                if page < stream.end {
                    sum = sum.wrapping_add(sum_words(record(bytes, page)));
                }
            }
        }
        sum
    })?;
    Ok(LaneAnswer { accesses, checksum })
}

/// One page of the file.
pub fn record(bytes: &[u8], page: usize) -> &[u8] {
    &bytes[page * PAGE_BYTES..][..PAGE_BYTES]
}

/// Reads pages of a warm file in random order, without advice.
pub fn random<M: Maps>(job: &Job, open: impl FnOnce() -> Result<M>) -> Result<Measured> {
    let file = File::open(&job.source.path)?;
    warm([job.source.path.as_path()].into_iter())?;
    let mut order =
        Rng::for_lane(job.seed, job.round, 0).shuffled(u32::try_from(job.source.pages)?);
    order.truncate(usize::try_from(job.accesses)?);
    let pages = usize::try_from(job.source.pages)?;
    let maps = open()?;
    let start = Instant::now();
    let map = maps.map(&file, pages * PAGE_BYTES)?;
    let checksum = map.look(|bytes| {
        let sums = order.iter().map(|&page| sum_words(record(bytes, page as usize)));
        sums.fold(0, u64::wrapping_add)
    })?;
    let details = map.details();
    drop(map);
    let lane = LaneAnswer { accesses: order.len() as u64, checksum };
    Ok(pass(start, vec![lane], details))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_once() {
        assert_eq!(shares(0..10, 3), [0..3, 3..6, 6..10]);
        assert_eq!(shares(4..6, 4), [4..4, 4..5, 5..5, 5..6]);
    }
}
