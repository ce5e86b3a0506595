//! The work of a child with its contender.

mod access;
pub mod anatomy;
mod commit;
mod compute;
mod files;
mod graph;
pub mod mounted;
mod open;
mod pooled;
mod recover;
#[cfg(feature = "remote")]
pub mod remote;
mod rows;

use anyhow::{Result, bail};

use crate::contender::files::{Files, Maps};
use crate::contender::{Contender, PageFile};
use crate::job::{FilesWork, Job, Measured, PooledWork, Work};

pub use access::{READ_BYTES, lane_pages, stored_byte};
pub use files::flush::flushed_stores;
pub use files::search::read_loop;
pub use files::whole::summed_files;
pub use pooled::record_files;
pub use rows::{expected_answer, row_batches};

/// Runs the job with this contender.
pub fn run(job: &Job, contender: &Contender) -> Result<Measured> {
    let roles = &contender.roles;
    match job.work {
        Work::Load
        | Work::Read { .. }
        | Work::Zipf
        | Work::Cycle { .. }
        | Work::Batch { .. }
        | Work::Write { .. }
        | Work::Miss
        | Work::Bfs { .. } => contender.role(roles.pages)?(job),
        Work::Rows(_) => contender.role(roles.rows)?(job),
        Work::Anatomy => contender.role(roles.anatomy)?(job),
        Work::Commit(work) => commit::alone(job, &work, contender.role(roles.commits)?),
        Work::CommitTogether { threads, commit } => {
            commit::together(job, &commit, contender.role(roles.commits)?, threads)
        }
        Work::Compute(work) => compute::run(job, &work, contender.role(roles.regions)?),
        Work::Crash(work) => recover::crash(job, &work, contender.role(roles.commits)?),
        Work::Recover(work) => recover::run(job, &work, contender.role(roles.commits)?),
        Work::Files(ref work) => match *work {
            FilesWork::Sum { .. } | FilesWork::Touch { .. } | FilesWork::Search { .. } => {
                contender.role(roles.files)?(job)
            }
            FilesWork::Stream { .. } | FilesWork::Scatter | FilesWork::Prefetch => {
                contender.role(roles.maps)?(job)
            }
            FilesWork::Flush { pages, salt } => {
                files::flush::run(job, pages, salt, contender.role(roles.stored)?)
            }
        },
        Work::Pooled(work) => pooled::run(job, work, contender),
        Work::Open(work) => open::run(job, work, contender.role(roles.open)?),
        Work::Mounted(work) => mounted::run(job, work),
        #[cfg(feature = "remote")]
        Work::Remote(ref work) => remote::run(job, work, contender.role(roles.remote)?),
        #[cfg(not(feature = "remote"))]
        Work::Remote(_) => bail!("this program was built without the feature `remote`"),
    }
}

/// Runs a job on a data file.
pub fn pages<F: PageFile>(job: &Job, file: &F) -> Result<Measured> {
    match job.work {
        Work::Bfs { threads } => graph::run(job, file, threads),
        _ => access::run(job, file),
    }
}

/// Runs a job on whole files, opened by `open` once everything else is prepared.
pub fn whole_files<F: Files>(job: &Job, open: impl FnOnce() -> Result<F>) -> Result<Measured> {
    match job.work {
        Work::Files(FilesWork::Sum { files }) => files::whole::sum(job, open, files),
        Work::Files(FilesWork::Touch { files, file_bytes, threads }) => {
            files::whole::touch(job, open, files, usize::try_from(file_bytes)?, threads)
        }
        Work::Files(FilesWork::Search { .. }) => files::search::run(job, open),
        Work::Pooled(PooledWork::Sum { files, threads, passes }) => {
            pooled::whole::sum(job, open, files, threads, passes)
        }
        Work::Pooled(PooledWork::Open { file }) => pooled::whole::open(job, open, file),
        _ => bail!("this is no work on whole files"),
    }
}

/// Runs a job on one large file, mapped by what `open` returns.
pub fn mapped<M: Maps>(job: &Job, open: impl FnOnce() -> Result<M>) -> Result<Measured> {
    match job.work {
        Work::Files(FilesWork::Stream { readers, streams, cold }) => {
            files::stream::sequential(job, open, readers, streams, cold)
        }
        Work::Files(FilesWork::Scatter) => files::stream::random(job, open),
        Work::Files(FilesWork::Prefetch) => files::prefetch::run(job, open),
        _ => bail!("this is no work on a mapped file"),
    }
}
