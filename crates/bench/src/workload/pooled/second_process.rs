//! Counts the page faults of a process that reads a file of a pool that another process has read
//! and keeps open.
//!
//! On hugetlbfs, processes share the page tables of equally aligned mappings of the same range of a
//! file: the second process finds them filled. Faults are counted from the first word of the file
//! to the last, one word in each 4 KiB.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use aquifer_fs::File;

use super::file_names;
use crate::contender::pooled::open_pool;
use crate::harness::{Member, wait_to_go};
use crate::job::{Job, LaneAnswer, Measured, PooledWork, Work};
use crate::raw::{PAGE_BYTES, Usage};

/// Runs the job: the parent of the two processes, or one of them.
pub fn run(job: &Job, file_bytes: u64, member: Option<u32>) -> Result<Measured> {
    match member {
        Some(_) => read(file_bytes),
        None => both(job, file_bytes),
    }
}

fn both(job: &Job, file_bytes: u64) -> Result<Measured> {
    let start = |member| {
        let work = PooledWork::SecondProcess { file_bytes, member: Some(member) };
        let mut member = Member::start(&Job { work: Work::Pooled(work), ..job.clone() })?;
        member.wait_ready()?;
        Ok::<_, anyhow::Error>(member)
    };
    // The first process keeps running until the second has read everything.
    let (mut first, mut second) = (start(0)?, start(1)?);
    second.go()?;
    let mut measured = second.finish()?;
    first.go()?;
    let of_first = first.finish()?;
    ensure!(of_first.lanes == measured.lanes, "the two processes read something else");
    measured.details.insert("first_process_faults".to_owned(), of_first.mean_ns);
    Ok(measured)
}

fn read(file_bytes: u64) -> Result<Measured> {
    let files = open_pool()?;
    let name: PathBuf = file_names(1).remove(0);
    let file = files.open_file(name)?;
    let mut sum = word(&file, 0)?;
    let before = Usage::of_this_process()?.faults;
    for offset_bytes in (0..file_bytes).step_by(PAGE_BYTES) {
        sum = sum.wrapping_add(word(&file, offset_bytes)?);
    }
    let faults = Usage::of_this_process()?.faults - before;
    wait_to_go()?;
    let lanes = vec![LaneAnswer { accesses: file_bytes / PAGE_BYTES as u64, checksum: sum }];
    // A count, reported in place of a time.
    Ok(Measured { mean_ns: faults as f64, lanes, ..Measured::default() })
}

fn word(file: &File, offset_bytes: u64) -> Result<u64> {
    let mut bytes = [0; 8];
    let read_bytes = file.read_at(&mut bytes, offset_bytes)?;
    ensure!(read_bytes == bytes.len(), "the file ends at byte {offset_bytes}");
    Ok(u64::from_ne_bytes(bytes))
}
