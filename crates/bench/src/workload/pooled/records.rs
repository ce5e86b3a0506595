//! Records of a large file, read or overwritten, by one process or by several at once.
//!
//! Separate files are read and overwritten, so that the content read is known. Several processes
//! that overwrite one file do so in separate ranges: its final content does not depend on their
//! speed. Everything is touched once before the clock starts: that is what *repetitive* means.

use std::time::Instant;

use anyhow::Result;

use super::{file_names, measured, warm_set};
use crate::contender::pooled::{OpenRecords, Records};
use crate::harness::wait_to_go;
use crate::job::{Job, Measured, RecordWork};
use crate::rng::{Rng, mix};
use crate::sum::sum_words;
use aquifer_sys::interrupt;

/// Bytes touched at a time before the clock starts.
const WARM_BYTES: usize = 256 << 10;

/// The number of files in a set: `processes` to be read, and as many to be overwritten.
pub const fn set_files(processes: u32) -> u32 {
    2 * processes
}

/// Runs one process's share.
pub fn run(job: &Job, work: &RecordWork, records: OpenRecords, member: u32) -> Result<Measured> {
    let processes = work.team.processes;
    let names = file_names(set_files(processes));
    warm_set(&names)?;
    let file = if work.own_files { member } else { 0 } + if work.writes { processes } else { 0 };
    let mut file = records(&names[file as usize], work.file_bytes)?;
    let sequence = Sequence::new(job, work, member);
    touch(&mut *file, work, &sequence)?;
    let mut record = vec![0_u8; work.record_bytes as usize];
    wait_to_go()?;
    let start = Instant::now();
    let mut sum = 0_u64;
    for index in 0..job.accesses {
        let offset_bytes = sequence.offset_bytes(index);
        if work.writes {
            stamp(&mut record, sequence.salt, offset_bytes);
            file.write(offset_bytes, &record)?;
        } else {
            file.read(offset_bytes, &mut record)?;
            sum = sum.wrapping_add(ends(&record));
        }
    }
    let elapsed = start.elapsed();
    if work.writes {
        for index in 0..job.accesses {
            file.read(sequence.offset_bytes(index), &mut record)?;
            sum = sum.wrapping_add(sum_words(&record));
        }
    }
    Ok(measured(elapsed, job.accesses, sum))
}

/// Reads the process's range of the file once, and writes it if the work writes.
fn touch(file: &mut dyn Records, work: &RecordWork, sequence: &Sequence) -> Result<()> {
    let (from, to) = sequence.range_bytes();
    let mut bytes = vec![0; WARM_BYTES];
    for offset_bytes in (from..to).step_by(WARM_BYTES) {
        interrupt::check()?;
        let chunk = &mut bytes[..(to - offset_bytes).min(WARM_BYTES as u64) as usize];
        file.read(offset_bytes, chunk)?;
        if work.writes {
            file.write(offset_bytes, chunk)?;
        }
    }
    Ok(())
}

/// Writes the expected content for this offset to the record. Cheap, and the same for all
/// contenders.
#[inline]
fn stamp(record: &mut [u8], salt: u64, offset_bytes: u64) {
    let word = mix(salt ^ offset_bytes).to_ne_bytes();
    let end = record.len() - 8;
    record[..8].copy_from_slice(&word);
    record[end..].copy_from_slice(&word);
}

/// Combines the first and the last word, so that the whole record must have been read.
#[inline]
fn ends(record: &[u8]) -> u64 {
    let first = record.first_chunk().map_or(0, |word| u64::from_ne_bytes(*word));
    let last = record.last_chunk().map_or(0, |word| u64::from_ne_bytes(*word));
    first.wrapping_add(last.rotate_left(1))
}

/// The records that a process accesses, in order.
struct Sequence {
    first: u64,
    count: u64,
    record_bytes: u64,
    is_random: bool,
    seed: u64,
    salt: u64,
}

impl Sequence {
    fn new(job: &Job, work: &RecordWork, member: u32) -> Self {
        let record_bytes = u64::from(work.record_bytes);
        let all = work.file_bytes / record_bytes;
        let processes = u64::from(work.team.processes);
        let (first, count) = if work.own_files || !work.writes {
            (0, all)
        } else {
            (all / processes * u64::from(member), all / processes)
        };
        let seed = Rng::for_lane(job.seed, job.round, member).next();
        let salt = mix(job.seed ^ mix(u64::from(job.round)));
        Self { first, count, record_bytes, is_random: work.is_random, seed, salt }
    }

    #[inline]
    fn offset_bytes(&self, index: u64) -> u64 {
        let record = if self.is_random {
            ((u128::from(mix(self.seed ^ index)) * u128::from(self.count)) >> 64) as u64
        } else {
            index % self.count
        };
        (self.first + record) * self.record_bytes
    }

    fn range_bytes(&self) -> (u64, u64) {
        (self.first * self.record_bytes, (self.first + self.count) * self.record_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(first: u64, count: u64, is_random: bool) -> Sequence {
        Sequence { first, count, record_bytes: 1024, is_random, seed: 5, salt: 0 }
    }

    #[test]
    fn records_stay_in_their_range() {
        for is_random in [false, true] {
            let sequence = sequence(8, 4, is_random);
            let mut seen = [false; 4];
            for index in 0..100 {
                let offset_bytes = sequence.offset_bytes(index);
                assert!((8192..12_288).contains(&offset_bytes));
                seen[(offset_bytes / 1024 - 8) as usize] = true;
            }
            assert_eq!(seen, [true; 4]);
        }
        assert_eq!(sequence(8, 4, false).range_bytes(), (8192, 12_288));
    }

    #[test]
    fn a_record_shows_whether_its_end_is_there() {
        let mut record = vec![0; 1024];
        stamp(&mut record, 1, 4096);
        let sum = ends(&record);
        record[1023] ^= 1;
        assert_ne!(ends(&record), sum);
    }
}
