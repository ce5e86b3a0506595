//! Breadth-first search over the graph file, from a cold start.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::contender::{Contender, Unavailable, Visit};
use crate::graph::{Graph, Overtime, breadth_first_search};
use crate::harness::{Job, LaneAnswer, Measured};
use crate::raw::PAGE_BYTES;

/// Runs the search job.
pub struct Search<'a> {
    /// The job.
    pub job: &'a Job,
    /// Threads that search.
    pub threads: u32,
}

impl Visit for Search<'_> {
    type Output = Measured;

    fn visit<C: Contender>(self, contender: &C) -> Result<Measured> {
        let memory =
            contender.contiguous().context("this contender has no contiguous addresses")?;
        let len_bytes = self.job.source.pages * PAGE_BYTES as u64;
        let start = Instant::now();
        // SAFETY: `Contiguous` promises the whole file at its base; `Source::pages` is its length.
        let graph = unsafe { Graph::open(memory.base(), len_bytes) }?;
        let deadline = start + Duration::from_millis(self.job.deadline_ms);
        let found = breadth_first_search(&graph, memory, self.threads as usize, deadline);
        let answer = found.map_err(|error| match error.downcast::<Overtime>() {
            Ok(overtime) => {
                Unavailable(format!("{overtime} ({} s)", self.job.deadline_ms / 1000)).into()
            }
            Err(error) => error,
        })?;
        let elapsed = start.elapsed();
        let mut details = BTreeMap::from([
            ("reached".to_owned(), answer.reached as f64),
            ("depth".to_owned(), f64::from(answer.depth)),
            ("visited_entries".to_owned(), answer.visited_entries as f64),
        ]);
        details.extend(contender.details()?);
        Ok(Measured {
            mean_ns: elapsed.as_nanos() as f64,
            lanes: vec![LaneAnswer {
                accesses: answer.visited_entries,
                checksum: answer.checksum ^ answer.reached,
            }],
            details,
            ..Measured::default()
        })
    }
}
