//! The work of a child with its contender.

mod access;
mod anatomy;
mod commit;
mod compute;
mod files;
mod graph;
mod pooled;
mod recover;

use anyhow::Result;

use crate::contender;
use crate::harness::{Job, Measured, Work};

pub use access::{lane_pages, stored_byte};
pub use files::{flushed_stores, summed_files};
pub use pooled::record_files;

/// Runs the job.
pub fn run(job: &Job) -> Result<Measured> {
    match job.work {
        Work::Bfs { .. } | Work::Lookup { .. } => {
            contender::with(job.system, &job.source, graph::GraphWork { job })
        }
        Work::Anatomy => anatomy::run(job),
        Work::Commit(work) => commit::alone(job, &work),
        Work::CommitTogether { threads, commit } => commit::together(job, &commit, threads),
        Work::Compute(work) => compute::run(job, &work),
        Work::Crash(work) => recover::crash(job, &work),
        Work::Recover(work) => recover::run(job, &work),
        Work::Files(ref work) => files::run(job, work),
        Work::Pooled(work) => pooled::run(job, work),
        _ => contender::with(job.system, &job.source, access::Access { job }),
    }
}
