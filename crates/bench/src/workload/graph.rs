//! Work on the graph file, from a cold start.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail};

use crate::contender::PageFile;
use crate::graph::{Graph, Overtime, breadth_first_search, random_lookups};
use crate::job::{Job, LaneAnswer, Measured, Unavailable, Work};
use crate::raw::PAGE_BYTES;

/// Runs the jobs on graphs.
pub fn run<F: PageFile>(job: &Job, contender: &F) -> Result<Measured> {
    let memory = contender.contiguous().context("this contender has no contiguous addresses")?;
    let len_bytes = job.source.pages * PAGE_BYTES as u64;
    let start = Instant::now();
    let deadline = start + Duration::from_millis(job.deadline_ms);
    // SAFETY: `Contiguous` promises the whole file at its base; `Source::pages` is its length.
    let graph = unsafe { Graph::open(memory.base(), len_bytes) }?;
    let (answer, waits, mut details) = match job.work {
        Work::Bfs { threads } => {
            let found = breadth_first_search(&graph, memory, threads as usize, deadline)
                .map_err(|error| out_of_time(error, job))?;
            let details = BTreeMap::from([
                ("reached".to_owned(), found.reached as f64),
                ("depth".to_owned(), f64::from(found.depth)),
                ("visited_entries".to_owned(), found.visited_entries as f64),
            ]);
            let checksum = found.checksum ^ found.reached;
            (LaneAnswer { accesses: found.visited_entries, checksum }, 1.0, details)
        }
        Work::Lookup { threads } => {
            let (entries, checksum) =
                random_lookups(&graph, memory, threads, job.accesses, job.seed, deadline)
                    .map_err(|error| out_of_time(error, job))?;
            (LaneAnswer { accesses: entries, checksum }, job.accesses as f64, BTreeMap::new())
        }
        _ => bail!("this is no work on a graph"),
    };
    let elapsed_ns = start.elapsed().as_nanos() as f64;
    details.extend(contender.details()?);
    Ok(Measured {
        mean_ns: elapsed_ns / waits,
        lanes: vec![answer],
        details,
        ..Measured::default()
    })
}

/// Running out of time is not a failure but a note in the report.
fn out_of_time(error: Error, job: &Job) -> Error {
    match error.downcast::<Overtime>() {
        Ok(overtime) => Unavailable(format!("{overtime} ({} s)", job.deadline_ms / 1000)).into(),
        Err(error) => error,
    }
}
