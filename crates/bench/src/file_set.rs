//! Many files of one length, in a private directory.
//!
//! Their content is random 64-bit words, so that every file has a different sum; the sums are
//! computed while writing, and the contenders' answers are checked against them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};

use crate::data::check_space;
use crate::raw::{cached_bytes, fill_cache};
use crate::rng::Rng;
use crate::scratch::Scratch;
use crate::sum::sum_words;
use aquifer_sys::interrupt;

/// The files, removed when dropped.
#[derive(Debug)]
pub struct FileSet {
    directory: Scratch,
    sums: Vec<u64>,
}

impl FileSet {
    /// Writes `files` files of `file_bytes` (a multiple of 8) to `directory`. `progress` is called
    /// after each file.
    pub fn create(
        directory: Scratch,
        files: u32,
        file_bytes: u64,
        seed: u64,
        mut progress: impl FnMut(),
    ) -> Result<Self> {
        ensure!(
            file_bytes > 0 && file_bytes.is_multiple_of(8),
            "files of {file_bytes} bytes cannot be summed by words: choose a multiple of 8"
        );
        // Each file may occupy an additional block of its file system.
        check_space(directory.path(), u64::from(files) * (file_bytes + 4096))?;
        let mut sums = Vec::with_capacity(files as usize);
        let mut content = vec![0_u8; usize::try_from(file_bytes)?];
        for number in 0..files {
            interrupt::check()?;
            fill_content(&mut content, seed, number);
            sums.push(sum_words(&content));
            let path = file_path(directory.path(), number);
            fs::write(&path, &content)
                .with_context(|| format!("cannot write {}", path.display()))?;
            progress();
        }
        Ok(Self { directory, sums })
    }

    /// The directory of the files.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The sum over the words of each file.
    pub fn sums(&self) -> &[u64] {
        &self.sums
    }
}

/// Fills the content of file `number` of a set with this seed.
pub fn fill_content(content: &mut [u8], seed: u64, number: u32) {
    let mut rng = Rng::for_lane(seed, u32::MAX, number);
    for word in content.chunks_exact_mut(8) {
        word.copy_from_slice(&rng.next().to_ne_bytes());
    }
}

/// The path of file `number` of a set.
pub fn file_path(directory: &Path, number: u32) -> PathBuf {
    directory.join(format!("{number:06}"))
}

/// Files count as warm if at most one byte in this many is not cached: proactive reclaim (DAMON)
/// evicts some idle pages, which the next access reads again.
const COLD_SHARE: u64 = 100;
/// How often missing pages are read again.
const WARMINGS: usize = 3;

/// The detail of a measurement with the bytes that were not warm.
pub const COLD_BYTES: &str = "cold_bytes";

/// Bytes that this process found missing from the page cache in files that count as warm.
static FOUND_COLD: AtomicU64 = AtomicU64::new(0);

/// Bytes of supposedly warm files that were missing at the last check, for the report.
pub fn cold_bytes() -> u64 {
    // Relaxed: an independent counter.
    FOUND_COLD.load(Ordering::Relaxed)
}

/// Reads those files into the page cache that are not cached, and checks that they stay, except for
/// a hundredth. Returns false if the kernel cannot tell (before 6.5); then all were read.
pub fn warm<'a>(files: impl Iterator<Item = &'a Path> + Clone) -> Result<bool> {
    let open =
        |path: &Path| File::open(path).with_context(|| format!("cannot open {}", path.display()));
    let paths: Vec<&Path> = files.collect();
    let missing = |&path: &&Path| -> Result<Presence> {
        let file = open(path)?;
        let len_bytes = file.metadata()?.len();
        let missing = cached_bytes(&file)?.map(|cached| len_bytes.saturating_sub(cached));
        Ok(Presence { len_bytes, missing_bytes: missing })
    };
    let fill = |path: &&Path, len_bytes| -> Result<()> { Ok(fill_cache(&open(path)?, len_bytes)?) };
    let first = || paths.first().map(|path| path.display().to_string()).unwrap_or_default();
    let cold_bytes = bring_in(&paths, missing, fill).with_context(|| {
        format!("cannot keep {} files warm, {} the first", paths.len(), first())
    })?;
    // Relaxed: an independent counter.
    FOUND_COLD.fetch_add(cold_bytes.unwrap_or(0), Ordering::Relaxed);
    Ok(cold_bytes.is_some())
}

/// Fails if more than a little of the file is in the page cache.
pub fn expect_cold(file: &File) -> Result<()> {
    let file_bytes = file.metadata()?.len();
    if let Some(cached) = cached_bytes(file)? {
        ensure!(
            cached <= file_bytes / 64,
            "{cached} of {file_bytes} bytes of the data file are cached although it was dropped: is \
             something else reading it, or is it in memory?"
        );
    }
    Ok(())
}

/// How much of a file is cached.
#[derive(Debug, Clone, Copy)]
struct Presence {
    len_bytes: u64,
    /// `None` if the kernel cannot tell.
    missing_bytes: Option<u64>,
}

/// Reads files that are not cached, with a few retries, and returns how much of them is still
/// missing. `None` if the kernel cannot tell; then all were read.
fn bring_in<T>(
    files: &[T],
    mut check: impl FnMut(&T) -> Result<Presence>,
    mut fill: impl FnMut(&T, u64) -> Result<()>,
) -> Result<Option<u64>> {
    let (mut all_bytes, mut cold_bytes) = (0, 0);
    for _ in 0..WARMINGS {
        (all_bytes, cold_bytes) = (0, 0);
        let mut is_known = true;
        for file in files {
            let found = check(file)?;
            all_bytes += found.len_bytes;
            if found.missing_bytes != Some(0) {
                fill(file, found.len_bytes)?;
                is_known &= found.missing_bytes.is_some();
            }
        }
        if !is_known {
            return Ok(None);
        }
        for file in files {
            cold_bytes += check(file)?.missing_bytes.unwrap_or(0);
        }
        if check_warm(cold_bytes, all_bytes).is_ok() {
            break;
        }
    }
    check_warm(cold_bytes, all_bytes)?;
    Ok(Some(cold_bytes))
}

/// Fails if more than a small share is still missing after reading.
fn check_warm(cold_bytes: u64, all_bytes: u64) -> Result<()> {
    ensure!(
        cold_bytes <= all_bytes / COLD_SHARE,
        "only {} of {all_bytes} bytes are warm although they were read: is memory short?",
        all_bytes - cold_bytes
    );
    Ok(())
}

/// The same for a file that was read in another way.
pub fn expect_warm(cached_bytes: u64, file_bytes: u64) -> Result<()> {
    let cold_bytes = file_bytes.saturating_sub(cached_bytes);
    check_warm(cold_bytes, file_bytes)?;
    // Relaxed: an independent counter.
    FOUND_COLD.fetch_add(cold_bytes, Ordering::Relaxed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::drop_cache;
    use crate::scratch::scratch_directory;

    #[test]
    fn files_have_the_sums_that_are_known_of_them_and_go_away() {
        let directory = || scratch_directory(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        let set = FileSet::create(directory(), 3, 4104, 1, || {}).unwrap();
        for (&sum, number) in set.sums().iter().zip(0..) {
            let content = fs::read(file_path(set.path(), number)).unwrap();
            assert_eq!(content.len(), 4104);
            assert_eq!(sum_words(&content), sum);
        }
        assert_ne!(set.sums()[0], set.sums()[1]);
        let path = set.path().to_owned();
        drop(set);
        assert!(!path.exists());
        assert!(FileSet::create(directory(), 1, 7, 1, || {}).is_err());
    }

    #[test]
    fn what_is_cold_gets_warm() {
        let directory = scratch_directory(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        let set = FileSet::create(directory, 2, 65_536, 1, || {}).unwrap();
        let paths = [file_path(set.path(), 0), file_path(set.path(), 1)];
        drop_cache(&File::open(&paths[1]).unwrap()).unwrap();
        if !warm(paths.iter().map(PathBuf::as_path)).unwrap() {
            return eprintln!("skipped: this kernel has no cachestat");
        }
        let cached = cached_bytes(&File::open(&paths[1]).unwrap()).unwrap();
        assert_eq!(cached, Some(65_536));
    }

    /// Two files of 100 pages; the simulated kernel reclaims some pages before each check.
    fn bring_in_while_reclaimed(
        mut taken: impl FnMut(usize) -> u64,
    ) -> (Result<Option<u64>>, usize) {
        let mut missing = [100_u64, 0];
        let missing = std::cell::RefCell::new(&mut missing);
        let (mut checks, mut fills) = (0, 0);
        let check = |&file: &usize| {
            checks += 1;
            let missing = &mut missing.borrow_mut()[file];
            *missing = (*missing + taken(checks)).min(100);
            Ok(Presence { len_bytes: 100, missing_bytes: Some(*missing) })
        };
        let fill = |&file: &usize, len_bytes| {
            assert_eq!(len_bytes, 100);
            fills += 1;
            missing.borrow_mut()[file] = 0;
            Ok(())
        };
        (bring_in(&[0, 1], check, fill), fills)
    }

    #[test]
    fn what_is_taken_back_is_brought_in_again_and_a_little_is_tolerated() {
        let (cold, fills) = bring_in_while_reclaimed(|_| 0);
        assert_eq!((cold.unwrap(), fills), (Some(0), 1));
        // A page reclaimed before every second check is tolerated, and reported.
        let (cold, _) = bring_in_while_reclaimed(|check| u64::from(check % 2 == 0));
        assert_eq!(cold.unwrap(), Some(1));
        // Many pages reclaimed once are read again.
        let (cold, fills) = bring_in_while_reclaimed(|check| if check == 3 { 50 } else { 0 });
        assert_eq!((cold.unwrap(), fills), (Some(0), 2));
        // Many pages reclaimed every time are an error.
        let (cold, _) = bring_in_while_reclaimed(|_| 3);
        let error = cold.unwrap_err().to_string();
        assert!(error.contains("only 194 of 200"), "{error}");
        // A kernel that cannot tell.
        let unknown = |_: &u8| Ok(Presence { len_bytes: 9, missing_bytes: None });
        assert_eq!(bring_in(&[1], unknown, |_, _| Ok(())).unwrap(), None);
    }

    #[test]
    fn what_is_missing_of_a_file_is_counted_for_the_report() {
        let before = cold_bytes();
        expect_warm(142_405_632, 142_606_336).unwrap();
        assert!(cold_bytes() - before >= 200_704);
        assert!(expect_warm(140_000_000, 142_606_336).is_err());
    }
}
