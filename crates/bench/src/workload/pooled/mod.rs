//! Files of a pool and the same files of the kernel: whole files, records, growth, names,
//! replacement.
//!
//! All contenders run in the directory of the set, so that all paths have one component. Files, and
//! the pool, are loaded into the page cache before the clock starts, which `cachestat` verifies.
//! Single steps are not timed: an operation of a pool may take less time than two clock readings.

mod append;
mod names;
mod records;
mod replace;
mod second_process;
pub mod whole;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::contender::Contender;
use crate::file_set::{COLD_BYTES, file_path, warm};
use crate::harness::Member;
use crate::job::{Job, LaneAnswer, Measured, PooledWork, RecordWork, TeamWork, Work};
use crate::scratch::POOL;

pub use records::set_files as record_files;

/// Runs the job.
pub fn run(job: &Job, work: PooledWork, contender: &Contender) -> Result<Measured> {
    std::env::set_current_dir(&job.source.path)
        .with_context(|| format!("cannot work in {}", job.source.path.display()))?;
    let roles = &contender.roles;
    match work {
        PooledWork::Sum { .. } | PooledWork::Open { .. } => contender.role(roles.files)?(job),
        PooledWork::Records(work) => match work.team.member {
            Some(member) => records::run(job, &work, contender.role(roles.records)?, member),
            None => {
                together(job, work.team, |team| PooledWork::Records(RecordWork { team, ..work }))
            }
        },
        PooledWork::Append(work) => append::run(job, &work, contender.role(roles.growing)?),
        PooledWork::Names(team) => match team.member {
            Some(member) => names::run(job, contender.role(roles.names)?, member),
            None => together(job, team, PooledWork::Names),
        },
        PooledWork::LookUps { lists, team } => match team.member {
            Some(member) => names::look_up(job, contender.role(roles.names)?, member, lists),
            None => together(job, team, |team| PooledWork::LookUps { lists, team }),
        },
        PooledWork::Replace { file_bytes } => {
            replace::run(job, contender.role(roles.pair)?, file_bytes)
        }
        PooledWork::SecondProcess { file_bytes, member } => {
            second_process::run(job, file_bytes, member)
        }
    }
}

/// Runs every member's share of the team at once.
fn together(job: &Job, team: TeamWork, share: impl Fn(TeamWork) -> PooledWork) -> Result<Measured> {
    let of = |member| {
        let work = Work::Pooled(share(TeamWork { member: Some(member), ..team }));
        Job { work, ..job.clone() }
    };
    let jobs: Vec<Job> = (0..team.processes).map(of).collect();
    let members = Member::run_together(&jobs)?;
    let accesses: u64 = members.iter().flat_map(|one| &one.lanes).map(|lane| lane.accesses).sum();
    // As seen by each process; all make the same number of accesses.
    let mean_ns = members.iter().map(|one| one.mean_ns).sum::<f64>() / members.len() as f64;
    let checksums = members.iter().flat_map(|one| &one.lanes).map(|lane| lane.checksum);
    let checksum = checksums.fold(0, u64::wrapping_add);
    // Cold bytes are reported for the whole team.
    let cold_bytes: f64 = members.iter().filter_map(|one| one.details.get(COLD_BYTES)).sum();
    let details = (cold_bytes > 0.0).then(|| (COLD_BYTES.to_owned(), cold_bytes));
    Ok(Measured {
        mean_ns,
        lanes: vec![LaneAnswer { accesses, checksum }],
        details: details.into_iter().collect(),
        ..Measured::default()
    })
}

/// The result of one thread.
fn measured(elapsed: Duration, accesses: u64, checksum: u64) -> Measured {
    Measured {
        mean_ns: elapsed.as_nanos() as f64 / accesses.max(1) as f64,
        lanes: vec![LaneAnswer { accesses, checksum }],
        ..Measured::default()
    }
}

/// The names of the set's files.
fn file_names(files: u32) -> Vec<PathBuf> {
    (0..files).map(|number| file_path(Path::new(""), number)).collect()
}

/// Loads the files of a set, and its pool, into the page cache.
fn warm_set(names: &[PathBuf]) -> Result<()> {
    let pool = Path::new(POOL);
    warm(names.iter().map(PathBuf::as_path).chain([pool])).map(drop)
}
