//! One large file read sequentially, and the pages of a warm one in random order.
//!
//! The clock runs from before the file is mapped until after it is unmapped; the figure is the
//! whole pass. Page-sized records are summed as they are read: too short to be timed individually.

use std::fs::File;
use std::ops::Range;
use std::time::Instant;

use anyhow::{Result, anyhow};

use super::chill;
use crate::contender::files::{Mapped, Maps, VisitMaps, with_maps};
use crate::file_set::warm;
use crate::harness::{Job, LaneAnswer, Measured};
use crate::raw::{PAGE_BYTES, keep_to_processors};
use crate::rng::Rng;
use crate::sum::sum_words;

/// Reads the file once, by one thread or by several that read a part each.
pub fn sequential(job: &Job, readers: Option<u32>, streams: u32, cold: bool) -> Result<Measured> {
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
    let readers = readers.unwrap_or(1) as usize;
    with_maps(job.system, Sequential { file: &file, pages, readers, streams: streams as usize })
}

struct Sequential<'a> {
    file: &'a File,
    pages: usize,
    readers: usize,
    streams: usize,
}

impl VisitMaps for Sequential<'_> {
    type Output = Measured;

    fn visit<M: Maps>(self, maps: &M) -> Result<Measured> {
        let start = Instant::now();
        let map = maps.map(self.file, self.pages * PAGE_BYTES)?;
        let parts = parts(0..self.pages, self.readers);
        let lanes = match &parts[..] {
            [part] => vec![read(&map, part.clone(), self.streams)?],
            parts => std::thread::scope(|scope| {
                let map = &map;
                let started: Vec<_> = parts
                    .iter()
                    .map(|part| scope.spawn(move || read(map, part.clone(), self.streams)))
                    .collect();
                let joined = started.into_iter().map(|thread| {
                    thread.join().unwrap_or_else(|_| Err(anyhow!("a reading thread panicked")))
                });
                joined.collect::<Result<Vec<_>>>()
            })?,
        };
        let details = map.details();
        drop(map);
        Ok(pass(start, lanes, details))
    }
}

fn pass(
    start: Instant,
    lanes: Vec<LaneAnswer>,
    details: std::collections::BTreeMap<String, f64>,
) -> Measured {
    let mean_ns = start.elapsed().as_nanos() as f64;
    Measured { mean_ns, lanes, details, ..Measured::default() }
}

/// Divides pages into parts that differ by one page at most.
fn parts(pages: Range<usize>, count: usize) -> Vec<Range<usize>> {
    let bound = |number: usize| pages.start + pages.len() * number / count;
    (0..count).map(|number| bound(number)..bound(number + 1)).collect()
}

/// Sums these pages, from several positions in turn.
fn read<M: Mapped>(map: &M, pages: Range<usize>, streams: usize) -> Result<LaneAnswer> {
    let accesses = pages.len() as u64;
    let streams = parts(pages, streams);
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
pub fn random(job: &Job) -> Result<Measured> {
    let file = File::open(&job.source.path)?;
    warm([job.source.path.as_path()].into_iter())?;
    let mut order =
        Rng::for_lane(job.seed, job.round, 0).shuffled(u32::try_from(job.source.pages)?);
    order.truncate(usize::try_from(job.accesses)?);
    let pages = usize::try_from(job.source.pages)?;
    with_maps(job.system, Random { file: &file, pages, order: &order })
}

struct Random<'a> {
    file: &'a File,
    pages: usize,
    order: &'a [u32],
}

impl VisitMaps for Random<'_> {
    type Output = Measured;

    fn visit<M: Maps>(self, maps: &M) -> Result<Measured> {
        let start = Instant::now();
        let map = maps.map(self.file, self.pages * PAGE_BYTES)?;
        let checksum = map.look(|bytes| {
            let sums = self.order.iter().map(|&page| sum_words(record(bytes, page as usize)));
            sums.fold(0, u64::wrapping_add)
        })?;
        let details = map.details();
        drop(map);
        let lane = LaneAnswer { accesses: self.order.len() as u64, checksum };
        Ok(pass(start, vec![lane], details))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_once() {
        assert_eq!(parts(0..10, 3), [0..3, 3..6, 6..10]);
        assert_eq!(parts(4..6, 4), [4..4, 4..5, 5..5, 5..6]);
    }
}
