//! The operation mix of `fsx`: one file, random reads, writes, truncations, holes, zeroed and
//! allocated ranges, ranges removed and inserted, appends, copies within it and reopening, all
//! compared with an array in memory. On failure the last operations are printed, with the seed.

use std::collections::VecDeque;
use std::fmt::Write as _;

use crate::scratch::Scratch;
use crate::scratch::soundness::assert_sound;
use aquifer_fs::{FallocateMode, File, FileOptions, Files, FsError};
use aquifer_pool::Pool;
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

const PAGE: u64 = 4096;
const POOL_BYTES: u64 = 4 << 20;
/// The maximum length of the file.
const MAX_BYTES: u64 = 256 << 10;
/// How many operations a failure prints.
const SHOWN: usize = 40;

struct Fsx {
    rng: Rng,
    scratch: Scratch,
    files: Option<Files>,
    file: Option<File>,
    model: Vec<u8>,
    log: VecDeque<String>,
    /// The byte to write: never the same twice in a row.
    byte: u8,
}

fn options(files: &Files) -> FileOptions {
    let mut options = files.options();
    options.read(true).write(true);
    options
}

impl Fsx {
    fn new(seed: u64) -> Fsx {
        let scratch = Scratch::with_pool(POOL_BYTES, &Pool::options());
        let files = scratch.open();
        let file = options(&files).create_new(true).open("fsx").unwrap();
        Fsx {
            rng: Rng::new(seed),
            scratch,
            files: Some(files),
            file: Some(file),
            model: Vec::new(),
            log: VecDeque::new(),
            byte: 0,
        }
    }

    fn file(&self) -> &File {
        self.file.as_ref().unwrap()
    }

    fn note(&mut self, operation: String) {
        self.log.push_back(operation);
        if self.log.len() > SHOWN {
            self.log.pop_front();
        }
    }

    /// A range that ends before [`MAX_BYTES`]; often at page boundaries.
    fn range(&mut self) -> (u64, u64) {
        let end_bytes =
            if self.rng.chance(0.7) { self.model.len() as u64 + 5000 } else { MAX_BYTES };
        let offset = self.rng.below(end_bytes.min(MAX_BYTES));
        let len = match self.rng.below(4) {
            0 => 1 + self.rng.below(64),
            1 => 1 + self.rng.below(4 * PAGE),
            _ => 1 + self.rng.below(64 << 10),
        };
        let (offset, len) = match self.rng.below(4) {
            0 => (offset / PAGE * PAGE, len.next_multiple_of(PAGE)),
            1 => (offset / PAGE * PAGE, len),
            _ => (offset, len),
        };
        (offset, len.min(MAX_BYTES - offset).max(1))
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        self.byte = self.byte % 251 + 1;
        (0..len).map(|at| self.byte.wrapping_add((at / 512) as u8)).collect()
    }

    fn put(&mut self, bytes: &[u8], offset: u64) {
        let (start, end) = (offset as usize, offset as usize + bytes.len());
        self.model.resize(self.model.len().max(end), 0);
        self.model[start..end].copy_from_slice(bytes);
    }

    fn clear(&mut self, offset: u64, len: u64, extends: bool) {
        let (start, end) = (offset as usize, (offset + len) as usize);
        if extends {
            self.model.resize(self.model.len().max(end), 0);
        }
        let size = self.model.len();
        self.model[start.min(size)..end.min(size)].fill(0);
    }

    fn step(&mut self) -> Result<(), FsError> {
        let (offset, len) = self.range();
        let what = self.rng.below(100);
        match what {
            0..20 => {
                self.note(format!("read {offset}, {len}"));
                self.check_range(offset, len)?;
            }
            20..40 => {
                self.note(format!("write {offset}, {len}"));
                let bytes = self.bytes(len);
                self.file().write_all_at(&bytes, offset)?;
                self.put(&bytes, offset);
            }
            40..43 => {
                self.note(format!("write_atomic {offset}, {len}"));
                let bytes = self.bytes(len);
                self.file().write_atomic(&bytes, offset)?;
                self.put(&bytes, offset);
            }
            43..46 => self.write_ranges()?,
            46..54 => {
                let len = if self.rng.chance(0.2) { 0 } else { offset };
                self.note(format!("set_len {len}"));
                self.file().set_len(len)?;
                self.model.resize(len as usize, 0);
            }
            54..62 => {
                self.note(format!("punch {offset}, {len}"));
                self.file().allocate(FallocateMode::PunchHole, offset, len)?;
                self.clear(offset, len, false);
            }
            62..66 => {
                let extends = self.rng.chance(0.5);
                self.note(format!("zero {offset}, {len}, extends: {extends}"));
                let mode =
                    if extends { FallocateMode::ZeroRange } else { FallocateMode::ZeroKeepSize };
                self.file().allocate(mode, offset, len)?;
                self.clear(offset, len, extends);
            }
            66..68 => self.shift(offset, len)?,
            68..74 => {
                let extends = self.rng.chance(0.5);
                self.note(format!("allocate {offset}, {len}, extends: {extends}"));
                let mode = if extends { FallocateMode::Extend } else { FallocateMode::KeepSize };
                self.file().allocate(mode, offset, len)?;
                if extends {
                    let end = (offset + len) as usize;
                    self.model.resize(self.model.len().max(end), 0);
                }
            }
            74..80 => self.append(len)?,
            80..86 => self.copy(offset, len)?,
            86..90 => self.swap()?,
            90..91 => {
                self.note("sync".to_owned());
                self.file().sync_all()?;
            }
            91..92 => {
                self.note("checkpoint".to_owned());
                self.files.as_ref().unwrap().pool().checkpoint()?;
            }
            92..94 => self.shift(offset, len)?,
            94..98 => {
                self.note("open again".to_owned());
                self.file = None;
                let files = self.files.as_ref().unwrap();
                self.file = Some(options(files).open("fsx")?);
            }
            _ => {
                self.note("open the pool again".to_owned());
                (self.file, self.files) = (None, None);
                let files = self.scratch.open();
                self.file = Some(options(&files).open("fsx")?);
                self.files = Some(files);
            }
        }
        self.check_size()
    }

    fn append(&mut self, len: u64) -> Result<(), FsError> {
        let end = self.model.len() as u64;
        let len = len.min(MAX_BYTES.saturating_sub(end)).min(20_000);
        self.note(format!("append {len}"));
        let bytes = self.bytes(len);
        let files = self.files.as_ref().unwrap();
        // A separate handle; the offset passed to it is ignored.
        files.options().append(true).open("fsx")?.write_all_at(&bytes, 7)?;
        self.put(&bytes, end);
        Ok(())
    }

    /// Reads in one place and writes in another one.
    fn copy(&mut self, to: u64, len: u64) -> Result<(), FsError> {
        let from = self.range().0.min(self.model.len() as u64);
        self.note(format!("copy from {from} to {to}, {len}"));
        let mut bytes = vec![0; len as usize];
        let got = self.file().read_at(&mut bytes, from)?;
        let to_put = self.model[from as usize..][..got].to_vec();
        self.file().write_all_at(&bytes[..got], to)?;
        if got > 0 {
            self.put(&to_put, to);
        }
        Ok(())
    }

    fn write_ranges(&mut self) -> Result<(), FsError> {
        let parts: Vec<(u64, Vec<u8>)> = (0..1 + self.rng.below(6))
            .map(|_| {
                let (offset, len) = self.range();
                (offset, self.bytes(len))
            })
            .collect();
        let parts: Vec<(u64, &[u8])> = parts.iter().map(|(at, bytes)| (*at, &bytes[..])).collect();
        let ranges: Vec<_> = parts.iter().map(|(at, bytes)| (at, bytes.len())).collect();
        self.note(format!("write_atomic_ranges {ranges:?}"));
        self.file().write_atomic_ranges(&parts)?;
        parts.iter().for_each(|(offset, bytes)| self.put(bytes, *offset));
        Ok(())
    }

    /// Removes pages, or inserts a hole.
    fn shift(&mut self, offset: u64, len: u64) -> Result<(), FsError> {
        let size = self.model.len() as u64;
        let offset = offset.min(size.saturating_sub(1)) / PAGE * PAGE;
        if self.rng.chance(0.5) {
            let len = len.min(size.saturating_sub(offset + 1)) / PAGE * PAGE;
            if len > 0 {
                self.note(format!("collapse {offset}, {len}"));
                self.file().allocate(FallocateMode::CollapseRange, offset, len)?;
                self.model.drain(offset as usize..(offset + len) as usize);
            }
        } else {
            let len = len.min(MAX_BYTES.saturating_sub(size)) / PAGE * PAGE;
            if len > 0 && size > 0 {
                self.note(format!("insert {offset}, {len}"));
                self.file().allocate(FallocateMode::InsertRange, offset, len)?;
                let at = offset as usize;
                self.model.splice(at..at, (0..len).map(|_| 0));
            }
        }
        Ok(())
    }

    /// Exchanges pages of the file.
    fn swap(&mut self) -> Result<(), FsError> {
        let pages = (self.model.len() as u64).div_ceil(PAGE);
        if pages < 2 {
            return Ok(());
        }
        let count = 1 + self.rng.below(pages / 2);
        let first = self.rng.below(pages - 2 * count + 1);
        let second = first + count + self.rng.below(pages - first - 2 * count + 1);
        self.note(format!("swap pages {first} and {second}, {count}"));
        let file = self.file();
        file.exchange_range(first * PAGE, file, second * PAGE, count * PAGE)?;
        let size = self.model.len();
        self.model.resize((pages * PAGE) as usize, 0);
        for at in 0..(count * PAGE) as usize {
            self.model.swap((first * PAGE) as usize + at, (second * PAGE) as usize + at);
        }
        self.model.truncate(size);
        Ok(())
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<(), FsError> {
        let mut bytes = vec![0xa5; len as usize];
        let got = self.file().read_at(&mut bytes, offset)?;
        let start = (offset as usize).min(self.model.len());
        let expected = &self.model[start..(start + len as usize).min(self.model.len())];
        assert_eq!(got, expected.len(), "bytes read from {offset} on");
        if let Some(at) = (0..got).find(|at| bytes[*at] != expected[*at]) {
            panic!("byte {} is {}, not {}", start + at, bytes[at], expected[at]);
        }
        Ok(())
    }

    fn check_size(&self) -> Result<(), FsError> {
        assert_eq!(self.file().metadata()?.len(), self.model.len() as u64, "the size");
        Ok(())
    }
}

fn run(seed: u64, operations: usize) {
    let mut fsx = Fsx::new(seed);
    for step in 0..operations {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            fsx.step().expect("nothing here is refused");
            if step % 16 == 15 {
                fsx.check_range(0, MAX_BYTES).unwrap();
            }
            if step % 256 == 255 {
                assert_sound(fsx.files.as_ref().unwrap().pool());
            }
        }));
        if outcome.is_err() {
            let log = fsx.log.iter().fold(String::new(), |mut text, operation| {
                let _ = writeln!(text, "  {operation}");
                text
            });
            panic!("AQUIFER_SEED={seed}, step {step}, after\n{log}");
        }
    }
    (fsx.file, fsx.files) = (None, None);
    fsx.scratch.assert_clean();
}

#[test]
fn a_file_is_what_an_array_is() {
    let first = seed(0);
    for seed in first..first + steps(10) as u64 {
        run(seed, 1500);
    }
}
