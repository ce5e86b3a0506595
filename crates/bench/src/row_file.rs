//! A file of words that can be verified wherever a row of it begins: the data of the bench `rows`.
//!
//! The word at each multiple of 8 is a function of its offset, except that every other cache line
//! is constant but for its last word. So about half of the content is compressible, as in
//! [`data`](crate::data), and the first and the last word of a row identify it, whatever its length.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use aquifer_sys::interrupt;

use crate::data::scratch_file;
use crate::raw::drop_cache;
use crate::rng::mix;

const LINE_BYTES: u64 = 64;
const REQUEST_BYTES: u64 = 4 << 20;

/// The word at this offset, a multiple of 8, of the file of this seed.
#[inline]
fn word_at(seed: u64, offset_bytes: u64) -> u64 {
    let is_constant =
        offset_bytes / LINE_BYTES % 2 == 1 && offset_bytes % LINE_BYTES != LINE_BYTES - 8;
    if is_constant { 0x5555_5555_5555_5555 } else { mix(seed ^ mix(offset_bytes)) }
}

/// What a row of this length adds to a contender's answer: the sum of the first word of each of its
/// cache lines, and of its last word.
pub fn expected_sum(seed: u64, row: u64, row_bytes: u64) -> u64 {
    let start = row * row_bytes;
    let firsts = (start..start + row_bytes).step_by(LINE_BYTES as usize);
    firsts.fold(word_at(seed, start + row_bytes - 8), |sum, at| sum.wrapping_add(word_at(seed, at)))
}

/// The same sum over the bytes that a contender hands out: one access to each of its cache lines.
#[inline]
pub fn sum_of(bytes: &[u8]) -> u64 {
    let word = |at: &[u8]| u64::from_ne_bytes(at[..8].try_into().expect("8 bytes"));
    let last = word(&bytes[bytes.len() - 8..]);
    bytes.chunks(LINE_BYTES as usize).fold(last, |sum, line| sum.wrapping_add(word(line)))
}

/// The file, removed when dropped.
#[derive(Debug)]
pub struct RowFile {
    path: tempfile::TempPath,
}

impl RowFile {
    /// Writes a file of `len_bytes`, a multiple of 4 KiB, in `directory` and drops it from the page
    /// cache. `progress` is called with the bytes written by each request.
    pub fn create(
        directory: &Path,
        len_bytes: u64,
        seed: u64,
        mut progress: impl FnMut(u64),
    ) -> Result<Self> {
        let (file, path) = scratch_file(directory)?;
        let mut buffer = Vec::with_capacity(REQUEST_BYTES as usize);
        for start in (0..len_bytes).step_by(REQUEST_BYTES as usize) {
            interrupt::check()?;
            buffer.clear();
            // Native order: the words are loaded as integers by the same machine.
            let words = (start..len_bytes.min(start + REQUEST_BYTES)).step_by(8);
            buffer.extend(words.flat_map(|at| word_at(seed, at).to_ne_bytes()));
            file.write_all_at(&buffer, start)
                .with_context(|| format!("cannot write the data file {}", path.display()))?;
            progress(buffer.len() as u64);
        }
        drop_cache(&file)?;
        Ok(Self { path })
    }

    /// The path of the file.
    pub fn path(&self) -> PathBuf {
        self.path.to_path_buf()
    }

    /// Opens the file. It is not kept open, as with other data files.
    pub fn open(&self) -> Result<File> {
        let opened = File::options().read(true).write(true).open(&self.path);
        opened.with_context(|| format!("cannot open the data file {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_any_length_are_recognised() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
        let file = RowFile::create(directory, 64 << 10, 3, |_| {}).unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!(bytes.len(), 64 << 10);
        for row_bytes in [64, 256, 3072] {
            for (row, content) in bytes.chunks_exact(row_bytes).enumerate() {
                let expected = expected_sum(3, row as u64, row_bytes as u64);
                assert_eq!(sum_of(content), expected);
                assert_ne!(sum_of(content), expected_sum(3, row as u64 + 1, row_bytes as u64));
            }
        }
    }
}
