//! Files created, looked up and removed, in a separate directory per process: the kernel locks
//! directories, so its locks are not contended. Lookups without paths.

use std::ffi::CString;
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

/// Looks names up in an open directory, or lists it again and again: one process's share.
pub fn look_up(job: &Job, names: CreateNames, member: u32, lists: bool) -> Result<Measured> {
    let directory = PathBuf::from(format!("member-{member}"));
    let mut tree = names(&directory)?;
    let mut made = Vec::new();
    for name in 0..NAMES {
        let name = format!("name-{name:04}");
        tree.create(&directory.join(&name))?;
        made.push(CString::new(name)?);
    }
    // A list has all names.
    let passes = usize::try_from(job.accesses)?.div_ceil(NAMES);
    let mut pass = || match lists {
        true => tree.list(),
        false => made.iter().try_fold(0, |sum, name| Ok(sum + tree.look_up(name)?)),
    };
    pass()?;
    wait_to_go()?;
    let start = Instant::now();
    let mut sum = 0;
    for _ in 0..passes {
        sum += pass()?;
    }
    let elapsed = start.elapsed();
    ensure!(sum == (passes * NAMES) as u64, "the files have {sum} bytes");
    Ok(measured(elapsed, (passes * NAMES) as u64, sum))
}
