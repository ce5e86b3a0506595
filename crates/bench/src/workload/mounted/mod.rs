//! Work in a directory that may be a mount: single operations, and whole programs.
//!
//! What is measured is done several times, and the mean of the faster half counts: other processes of
//! the machine only ever add to a figure. Everything was done once before, so both caches of a mount
//! are as warm as the kernel's own.

pub mod programs;
pub mod single;

use std::time::Duration;

use anyhow::{Context, Result};

use crate::contender::mounted;
use crate::job::{Job, LaneAnswer, Measured, MountedWork};

/// Runs the job in its directory.
pub fn run(job: &Job, work: MountedWork) -> Result<Measured> {
    if let MountedWork::Serve = work {
        return mounted::serve(job);
    }
    std::env::set_current_dir(&job.source.path)
        .with_context(|| format!("cannot work in {}", job.source.path.display()))?;
    match work {
        MountedWork::Single(single) => single::run(job, single),
        MountedWork::Program(program) => programs::run(job, program),
        MountedWork::Serve => unreachable!("it has no directory"),
    }
}

/// The mean of the faster half of these, each of so many operations.
fn faster_half(mut found: Vec<Duration>, operations: u64, checksum: u64) -> Measured {
    found.sort_unstable();
    let times = found.len() as u64;
    found.truncate(found.len().div_ceil(2));
    let total: Duration = found.iter().sum();
    let mean_ns = total.as_nanos() as f64 / (found.len().max(1) as u64 * operations) as f64;
    let lanes = vec![LaneAnswer { accesses: times * operations, checksum }];
    Measured { mean_ns, lanes, ..Measured::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_faster_half_counts() {
        let found = [9, 1, 3].map(Duration::from_nanos).to_vec();
        let half = faster_half(found, 2, 7);
        assert_eq!((half.mean_ns, half.lanes[0].accesses, half.lanes[0].checksum), (1.0, 6, 7));
    }
}
