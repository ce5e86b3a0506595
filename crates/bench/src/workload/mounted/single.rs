//! Single operations, in batches.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::faster_half;
use crate::job::{Job, Measured, SingleWork};
use crate::rng::{Rng, mix};

/// How often the operations are timed, each time a batch of them.
const BATCHES: u64 = 16;
/// The files that are opened and read, and their length.
pub const FILES: u64 = 300;
const FILE_BYTES: usize = 12 << 10;
/// The file whose parts are read and written.
const LARGE_BYTES: u64 = 16 << 20;
/// The names in the directory that is listed.
pub const NAMES: u64 = 10_000;

/// Makes in a directory what these operations work on; `names` are listed.
pub fn prepare(directory: &Path, names: u64, works: &[SingleWork]) -> Result<()> {
    for folder in ["files", "names", "made"] {
        fs::create_dir(directory.join(folder))?;
    }
    let mut content = vec![0; FILE_BYTES];
    for file in 0..FILES {
        fill(&mut content, file);
        fs::write(directory.join(name_of(file)), &content)?;
    }
    if works.contains(&SingleWork::List) {
        for name in 0..names {
            File::create(directory.join(format!("names/{name:08}")))?;
        }
    }
    let mut content = vec![0; LARGE_BYTES as usize];
    fill(&mut content, FILES);
    let large = File::create(directory.join("large"))?;
    large.write_all_at(&content, 0)?;
    Ok(large.sync_all()?)
}

/// Runs batches of one operation.
pub fn run(job: &Job, work: SingleWork) -> Result<Measured> {
    let mut rng = Rng::for_lane(job.seed, job.round, 0);
    let paths: Vec<PathBuf> = (0..FILES).map(name_of).collect();
    // The file of an operation, by its number.
    let file = |files: u64, number: u64| &paths[(number % files) as usize];
    match work {
        SingleWork::Stat { files } => {
            for path in &paths {
                fs::symlink_metadata(path)?;
            }
            batches(job, |number| Ok(fs::symlink_metadata(file(files, number))?.len()))
        }
        SingleWork::OpenReadClose { files } => {
            let mut buffer = vec![0; FILE_BYTES + 1];
            for path in &paths {
                fs::read(path)?;
            }
            batches(job, |number| {
                let len = File::open(file(files, number))?.read(&mut buffer)?;
                Ok(sample(&buffer[..len]))
            })
        }
        SingleWork::Read { len_bytes } => {
            let (large, mut buffer) = (File::open("large")?, vec![0; len_bytes as usize]);
            batches(job, |_| {
                let at = rng.below(LARGE_BYTES / len_bytes) * len_bytes;
                large.read_exact_at(&mut buffer, at)?;
                Ok(sample(&buffer))
            })
        }
        SingleWork::Write { len_bytes } => {
            let large = OpenOptions::new().read(true).write(true).open("large")?;
            let mut content = vec![0; len_bytes as usize];
            let measured = batches(job, |number| {
                let at = rng.below(LARGE_BYTES / len_bytes) * len_bytes;
                content[0] = number as u8;
                large.write_all_at(&content, at)?;
                Ok(0)
            })?;
            check_written(&large, measured)
        }
        SingleWork::WriteAndSync { data_only } => {
            let large = OpenOptions::new().read(true).write(true).open("large")?;
            let mut content = [0; 4096];
            let measured = batches(job, |number| {
                let at = rng.below(LARGE_BYTES / 4096) * 4096;
                content[0] = number as u8;
                large.write_all_at(&content, at)?;
                if data_only {
                    large.sync_data()?
                } else {
                    large.sync_all()?
                }
                Ok(0)
            })?;
            check_written(&large, measured)
        }
        SingleWork::CreateRemove => batches(job, |number| {
            let path = format!("made/{:04}", number % 1000);
            let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
            drop(file);
            fs::remove_file(&path)?;
            Ok(0)
        }),
        SingleWork::List => batches(job, |_| {
            let mut sum = 0_u64;
            for entry in fs::read_dir("names")? {
                sum = sum.wrapping_add(hash(entry?.file_name().as_bytes()));
            }
            Ok(sum)
        }),
    }
}

/// Times batches of an operation, whose argument counts up, after one that is not timed. The answer
/// is the sum of its results.
fn batches(job: &Job, mut operation: impl FnMut(u64) -> Result<u64>) -> Result<Measured> {
    let in_batch = job.accesses.div_ceil(BATCHES).max(1);
    let (mut number, mut sum) = (0, 0_u64);
    let mut batch = || -> Result<Duration> {
        let start = Instant::now();
        for _ in 0..in_batch {
            sum = sum.wrapping_add(operation(number)?);
            number += 1;
        }
        Ok(start.elapsed())
    };
    batch()?;
    let found = (0..BATCHES).map(|_| batch()).collect::<Result<Vec<_>>>()?;
    Ok(faster_half(found, in_batch, sum))
}

/// All contenders have written the same; the answer is what the file then holds.
fn check_written(large: &File, mut measured: Measured) -> Result<Measured> {
    let mut content = vec![0; LARGE_BYTES as usize];
    large.read_exact_at(&mut content, 0)?;
    ensure!(large.metadata()?.len() == LARGE_BYTES, "the file has another length");
    // The next contender must find what this one has found.
    measured.lanes[0].checksum = hash(&content);
    fill(&mut content, FILES);
    large.write_all_at(&content, 0)?;
    large.sync_all()?;
    Ok(measured)
}

fn name_of(file: u64) -> PathBuf {
    format!("files/{file:04}").into()
}

/// The same bytes for the same number.
fn fill(content: &mut [u8], number: u64) {
    let mut rng = Rng::new(mix(number));
    for word in content.chunks_exact_mut(8) {
        word.copy_from_slice(&rng.next().to_ne_bytes());
    }
}

/// A word of each page: every contender has read all bytes into memory anyway.
fn sample(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(4096).filter_map(|page| page.first_chunk::<8>());
    words.fold(bytes.len() as u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)))
}

/// A number that depends on all bytes and on their order.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(bytes.len() as u64, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix(sum.rotate_left(1) ^ u64::from_ne_bytes(word))
    })
}
