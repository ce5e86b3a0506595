//! Many files of one length, in a directory of their own.
//!
//! Their content is random 64-bit words, so that every file has another sum; the sums are known from writing, and
//! answers of contenders are checked against them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::data::check_space;
use crate::interrupt;
use crate::raw::{cached_bytes, fill_cache};
use crate::rng::Rng;
use crate::scratch::Scratch;
use crate::sum::sum_words;

/// The files, removed when dropped.
#[derive(Debug)]
pub struct FileSet {
    directory: Scratch,
    sums: Vec<u64>,
}

impl FileSet {
    /// Writes `files` files of `file_bytes` (a multiple of 8) to `directory`. `progress` hears of each file.
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
        // Each takes a block of its file system besides.
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

    /// The directory they are in.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The sum over the words of each.
    pub fn sums(&self) -> &[u64] {
        &self.sums
    }
}

/// What file `number` of a set with this seed holds.
pub fn fill_content(content: &mut [u8], seed: u64, number: u32) {
    let mut rng = Rng::for_lane(seed, u32::MAX, number);
    for word in content.chunks_exact_mut(8) {
        word.copy_from_slice(&rng.next().to_ne_bytes());
    }
}

/// Where file `number` of a set is.
pub fn file_path(directory: &Path, number: u32) -> PathBuf {
    directory.join(format!("{number:06}"))
}

/// Reads those files into the page cache that are not there, and checks that they stay. False where the kernel
/// cannot tell (before 6.5); then all were read.
pub fn warm<'a>(files: impl Iterator<Item = &'a Path> + Clone) -> Result<bool> {
    let open =
        |path: &Path| File::open(path).with_context(|| format!("cannot open {}", path.display()));
    let mut checked = true;
    for path in files.clone() {
        let file = open(path)?;
        let len_bytes = file.metadata()?.len();
        match cached_bytes(&file)? {
            Some(cached) if cached >= len_bytes => {}
            Some(_) => fill_cache(&file, len_bytes)?,
            None => {
                checked = false;
                fill_cache(&file, len_bytes)?;
            }
        }
    }
    for path in files.filter(|_| checked) {
        let file = open(path)?;
        let len_bytes = file.metadata()?.len();
        let cached = cached_bytes(&file)?.unwrap_or(len_bytes);
        ensure!(
            cached >= len_bytes,
            "only {cached} of {len_bytes} bytes of {} are warm although it was read: is memory short?",
            path.display()
        );
    }
    Ok(checked)
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
}
