//! Breadth-first search over a graph file, from a cold start.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result};

use crate::contender::PageFile;
use crate::graph::{Graph, Overtime, Reader, breadth_first_search};
use crate::job::{Job, LaneAnswer, Measured, Unavailable};
use crate::raw::PAGE_BYTES;

/// Searches with `threads` threads.
pub fn run<F: PageFile>(job: &Job, contender: &F, threads: u32) -> Result<Measured> {
    let memory = contender.contiguous().context("this contender has no contiguous addresses")?;
    let len_bytes = job.source.pages * PAGE_BYTES as u64;
    let (read_before, cpu_before) = (read_bytes(), cpu_ms());
    let start = Instant::now();
    let deadline = start + Duration::from_millis(job.deadline_ms);
    // SAFETY: `Contiguous` promises the whole file at its base; `Source::pages` is its length.
    let graph = unsafe { Graph::open(memory.base(), len_bytes) }?;
    let reader = contender.visitor().map_or(Reader::Streamed(memory), Reader::Visited);
    let found = breadth_first_search(&graph, reader, threads as usize, deadline)
        .map_err(|error| out_of_time(error, job))?;
    let mut details = BTreeMap::from([
        ("reached".to_owned(), found.reached as f64),
        ("depth".to_owned(), f64::from(found.depth)),
        ("visited_entries".to_owned(), found.visited_entries as f64),
    ]);
    let checksum = found.checksum ^ found.reached;
    let answer = LaneAnswer { accesses: found.visited_entries, checksum };
    let elapsed_ns = start.elapsed().as_nanos() as f64;
    details.insert("device_read_bytes".to_owned(), read_bytes() - read_before);
    details.insert("cpu_ms".to_owned(), cpu_ms() - cpu_before);
    details.extend(contender.details()?);
    Ok(Measured { mean_ns: elapsed_ns, lanes: vec![answer], details, ..Measured::default() })
}

/// Running out of time is not a failure but a note in the report.
fn out_of_time(error: Error, job: &Job) -> Error {
    match error.downcast::<Overtime>() {
        Ok(overtime) => Unavailable(format!("{overtime} ({} s)", job.deadline_ms / 1000)).into(),
        Err(error) => error,
    }
}

/// Bytes that this process caused to be read from devices so far; 0 if that is not to be had.
fn read_bytes() -> f64 {
    let io = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let line = io.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    line.and_then(|bytes| bytes.parse().ok()).unwrap_or(0.0)
}

fn cpu_ms() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is valid for the call to fill in.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}
