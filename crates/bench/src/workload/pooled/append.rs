//! A file that grows to its length piece by piece; repeatedly, if requested, being removed in
//! between.
//!
//! One time measures appends into never-used space. Several times measure sustained appends: space
//! then comes from removed files, and must be zeroed or proven to expose none of its old content.

use std::time::Instant;

use anyhow::{Result, ensure};

use super::measured;
use crate::contender::pooled::CreateGrowing;
use crate::file_set::fill_content;
use crate::job::{AppendWork, Job, Measured};
use crate::sum::sum_words;
use aquifer_sys::interrupt;

/// Runs the job.
pub fn run(job: &Job, work: &AppendWork, growing: CreateGrowing) -> Result<Measured> {
    let mut piece = vec![0_u8; usize::try_from(work.piece_bytes)?];
    fill_content(&mut piece, job.seed, job.round);
    let pieces = work.file_bytes / work.piece_bytes;
    ensure!(pieces > 0, "a file of {} bytes has no such piece", work.file_bytes);
    let mut file = growing(pieces * work.piece_bytes)?;
    let start = Instant::now();
    for time in 0..work.times {
        interrupt::check()?;
        if time > 0 {
            file.begin_again()?;
        }
        for _ in 0..pieces {
            file.append(&piece)?;
        }
    }
    let elapsed = start.elapsed();
    let expected = sum_words(&piece);
    let mut found = vec![0; piece.len()];
    for index in 0..pieces {
        file.read(index * work.piece_bytes, &mut found)?;
        ensure!(sum_words(&found) == expected, "piece {index} is not what was appended");
    }
    Ok(measured(elapsed, pieces * u64::from(work.times), expected))
}
