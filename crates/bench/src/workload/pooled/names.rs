//! Files created, looked up and removed, in a separate directory per process: the kernel locks
//! directories, so its locks are not contended.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};

use super::measured;
use crate::contender::pooled::CreateNames;
use crate::harness::wait_to_go;
use crate::job::{Job, Measured};

/// Number of names, used in turn.
const NAMES: usize = 1024;

/// Runs one process's share.
pub fn run(job: &Job, names: CreateNames, member: u32) -> Result<Measured> {
    let directory = PathBuf::from(format!("member-{member}"));
    let mut tree = names(&directory)?;
    let paths: Vec<_> = (0..NAMES).map(|name| directory.join(format!("name-{name:04}"))).collect();
    for path in paths.iter().cycle().take(usize::try_from(job.warm_accesses)?) {
        tree.create_stat_remove(path)?;
    }
    wait_to_go()?;
    let start = Instant::now();
    for path in paths.iter().cycle().take(usize::try_from(job.accesses)?) {
        let len_bytes = tree.create_stat_remove(path)?;
        ensure!(len_bytes == 0, "{} was just made and has {len_bytes} bytes", path.display());
    }
    Ok(measured(start.elapsed(), job.accesses, 0))
}
