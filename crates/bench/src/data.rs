//! The data file: realistic random content that can be verified bytewise.
//!
//! ```text
//! page p   0          8            16            24                                4088
//!          ┌──────────┬────────────┬─────────────┬──────────────── ··· ────────────┬────────────┐
//!          │ p        │ mark(p, 1) │ store bytes │ 64 random, 64 constant bytes …  │ mark(p, 2) │
//!          └──────────┴────────────┴─────────────┴──────────────── ··· ────────────┴────────────┘
//! ```
//! The first and the last words identify the page, so that a contender that returns a wrong or
//! incomplete page is detected. About half of the content is compressible, as in real data; it
//! matters on compressed devices such as zram. The write benches store to the word at 16. Files are
//! written in 4 MiB requests, which gives them long extents and their page cache large folios.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::raw::{AlignedBuffer, PAGE_BYTES, drop_cache, load_word, open_direct};
use crate::rng::{Rng, mix};
use aquifer_sys::interrupt;

/// The offset in a page where the write benches store their byte.
pub const STORE_OFFSET_BYTES: usize = 16;
const LAST_WORD_BYTES: usize = PAGE_BYTES - 8;
const REQUEST_BYTES: usize = 4 << 20;

/// A word unique to this page of this file.
#[inline(always)]
fn mark(seed: u64, page: u64, which: u64) -> u64 {
    mix(seed ^ mix(page.wrapping_mul(4) + which))
}

/// The contribution of a page to a contender's answer: the sum of its two marks.
pub fn expected_sample(seed: u64, page: u64) -> u64 {
    mark(seed, page, 1).wrapping_add(mark(seed, page, 2))
}

/// Reads the words that identify a page, in its first and last cache line. `None` if this is not
/// `page`.
///
/// # Safety
/// `memory` must be 8-byte aligned, `PAGE_BYTES` long and readable (accesses may fault).
#[inline(always)]
pub unsafe fn sample(memory: *const u8, page: u64) -> Option<u64> {
    // SAFETY: inside the page, by the caller's promise.
    let number = unsafe { load_word(memory, 0) };
    // SAFETY: as above.
    let first = unsafe { load_word(memory, 8) };
    // SAFETY: as above.
    let last = unsafe { load_word(memory, LAST_WORD_BYTES) };
    (number == page).then(|| first.wrapping_add(last))
}

/// A file of generated pages, removed when dropped.
#[derive(Debug)]
pub struct DataFile {
    path: tempfile::TempPath,
    seed: u64,
    pages: u64,
}

impl DataFile {
    /// Writes a file of `pages` pages in `directory` and drops it from the page cache. `progress`
    /// is called with the bytes written by each request.
    pub fn create(
        directory: &Path,
        pages: u64,
        seed: u64,
        mut progress: impl FnMut(u64),
    ) -> Result<Self> {
        let (file, path) = scratch_file(directory)?;
        let mut buffer = vec![0_u8; REQUEST_BYTES];
        let mut page = 0;
        while page < pages {
            interrupt::check()?;
            let count = (REQUEST_BYTES / PAGE_BYTES).min(usize::try_from(pages - page)?);
            for (memory, number) in buffer.chunks_exact_mut(PAGE_BYTES).take(count).zip(page..) {
                fill_page(memory, seed, number);
            }
            let bytes = &buffer[..count * PAGE_BYTES];
            file.write_all_at(bytes, page * PAGE_BYTES as u64)
                .with_context(|| format!("cannot write the data file {}", path.display()))?;
            progress(bytes.len() as u64);
            page += count as u64;
        }
        drop_cache(&file)?;
        Ok(Self { path, seed, pages })
    }

    /// The path of the file.
    pub fn path(&self) -> PathBuf {
        self.path.to_path_buf()
    }

    /// Opens the file. It is not kept open, because a contender may be faster if it alone has the
    /// file open.
    pub fn open(&self) -> Result<File> {
        let opened = File::options().read(true).write(true).open(&self.path);
        opened.with_context(|| format!("cannot open the data file {}", self.path.display()))
    }

    /// The number of pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The seed of its content.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Verifies on the device itself, bypassing every cache, that the `stored` bytes (page, byte)
    /// are there and that nothing else in those pages changed.
    pub fn verify_stores(&self, stored: impl Iterator<Item = (u64, u8)>) -> Result<()> {
        let (file, direct) = match open_direct(&self.path, false) {
            Ok(file) => (file, true),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                (File::open(&self.path)?, false)
            }
            Err(error) => return Err(error.into()),
        };
        if direct {
            // Pages cached by an earlier contender must not be read instead of the device.
            drop_cache(&self.open()?)?;
        }
        let mut buffer = AlignedBuffer::new(PAGE_BYTES);
        let mut expected = vec![0; PAGE_BYTES];
        for (page, byte) in stored {
            file.read_exact_at(buffer.bytes_mut(), page * PAGE_BYTES as u64)?;
            fill_page(&mut expected, self.seed, page);
            expected[STORE_OFFSET_BYTES] = byte;
            ensure!(
                buffer.bytes() == expected,
                "page {page} does not hold what was stored there and flushed"
            );
        }
        Ok(())
    }
}

/// Creates an empty scratch file that is removed when its path is dropped.
pub fn scratch_file(directory: &Path) -> Result<(File, tempfile::TempPath)> {
    let file = tempfile::Builder::new()
        .prefix("bench-")
        .suffix(".aquifer-data")
        .tempfile_in(directory)
        .with_context(|| format!("cannot create a data file in {}", directory.display()))?;
    Ok(file.into_parts())
}

/// Checks the free space, rather than letting a long write end in ENOSPC.
pub fn check_space(directory: &Path, needed_bytes: u64) -> Result<()> {
    let free_bytes = aquifer_sys::machine::free_bytes(directory)?;
    ensure!(
        needed_bytes <= free_bytes,
        "{} has {} free, but the data file needs {}: choose another --dir or a smaller --size",
        directory.display(),
        aquifer_sys::units::Bytes(free_bytes),
        aquifer_sys::units::Bytes(needed_bytes),
    );
    Ok(())
}

/// Writes the content of one page into `memory`.
pub fn fill_page(memory: &mut [u8], seed: u64, page: u64) {
    assert_eq!(memory.len(), PAGE_BYTES);
    let mut rng = Rng::new(mark(seed, page, 3));
    for (index, line) in memory.chunks_exact_mut(64).enumerate() {
        if index % 2 == 0 {
            for word in line.chunks_exact_mut(8) {
                word.copy_from_slice(&rng.next().to_le_bytes());
            }
        } else {
            line.fill(0x55);
        }
    }
    let mut put = |offset: usize, word: u64| {
        // Native order: the words are loaded as integers by the same machine.
        memory[offset..offset + 8].copy_from_slice(&word.to_ne_bytes());
    };
    put(0, page);
    put(8, mark(seed, page, 1));
    put(STORE_OFFSET_BYTES, 0);
    put(LAST_WORD_BYTES, mark(seed, page, 2));
}

/// Reads one page into `buffer`, bypassing the page cache.
pub fn read_page(file: &File, page: u64, buffer: &mut AlignedBuffer) -> io::Result<()> {
    file.read_exact_at(buffer.bytes_mut(), page * PAGE_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_knows_its_number_and_its_file() {
        let mut buffer = AlignedBuffer::new(PAGE_BYTES);
        fill_page(buffer.bytes_mut(), 7, 42);
        // SAFETY: a whole aligned page.
        let found = unsafe { sample(buffer.bytes().as_ptr(), 42) };
        assert_eq!(found, Some(expected_sample(7, 42)));
        // SAFETY: a whole aligned page.
        let wrong_page = unsafe { sample(buffer.bytes().as_ptr(), 43) };
        assert_eq!(wrong_page, None);
        assert_ne!(expected_sample(7, 42), expected_sample(8, 42));
    }

    #[test]
    fn about_half_of_a_page_is_constant() {
        let mut page = vec![0; PAGE_BYTES];
        fill_page(&mut page, 1, 1);
        let constant = page.iter().filter(|&&byte| byte == 0x55).count();
        assert!((PAGE_BYTES / 2 - 64..PAGE_BYTES / 2 + 64).contains(&constant), "{constant}");
    }

    #[test]
    fn lost_and_stray_stores_are_found() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
        let data = DataFile::create(directory, 8, 3, |_| {}).unwrap();
        data.verify_stores([(5, 0)].into_iter()).unwrap();
        data.open().unwrap().write_all_at(&[9], 5 * 4096 + STORE_OFFSET_BYTES as u64).unwrap();
        data.verify_stores([(5, 9)].into_iter()).unwrap();
        assert!(data.verify_stores([(5, 8)].into_iter()).is_err());
        data.open().unwrap().write_all_at(&[1], 6 * 4096 + 1000).unwrap();
        assert!(data.verify_stores([(6, 0)].into_iter()).is_err());
        let path = data.path();
        drop(data);
        assert!(!path.exists());
    }
}
