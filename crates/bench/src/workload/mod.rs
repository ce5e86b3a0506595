//! What a child does with its contender.

mod access;
mod anatomy;
mod graph;

use anyhow::Result;

use crate::contender;
use crate::harness::{Job, Measured, Work};

pub use access::{lane_pages, stored_byte};

/// Does the job.
pub fn run(job: &Job) -> Result<Measured> {
    match job.work {
        Work::Bfs { .. } | Work::Lookup { .. } => {
            contender::with(job.system, &job.source, graph::GraphWork { job })
        }
        Work::Anatomy => anatomy::run(job),
        _ => contender::with(job.system, &job.source, access::Access { job }),
    }
}
