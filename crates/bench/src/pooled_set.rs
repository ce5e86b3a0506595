//! The same files twice: in a directory, and in a pool in that directory.
//!
//! Names, contents and lengths are those of a [`FileSet`], so one list of sums checks both; or those
//! of a [`SourceTree`].

use std::path::Path;

use anyhow::Result;
use aquifer_fs::Files;
use aquifer_pool::Pool;

use crate::data::check_space;
use crate::file_set::{FileSet, file_path, fill_content};
use crate::rng::Rng;
use crate::scratch::{POOL, Scratch};
use crate::source_tree::{SourceTree, folders_below};
use aquifer_sys::interrupt;

/// The length of a pool with room for `content_bytes` in `files` files.
pub fn pool_bytes(content_bytes: u64, files: u64) -> u64 {
    let slots_bytes = slots(files) * 512;
    // A tenth more than the content, and a log, which is a quarter of small pools and 128 MiB of
    // large ones.
    let bytes = content_bytes + content_bytes / 10 + 2 * slots_bytes;
    // The length is a multiple of a huge page, for pools on hugetlbfs.
    (bytes + (bytes / 3).clamp(2 << 20, 128 << 20) + (4 << 20)).next_multiple_of(2 << 20)
}

/// Slots for `files` files with a name each, and for the overflow slots of files with several runs.
fn slots(files: u64) -> u64 {
    files + files / 2 + 4096
}

/// The history of a pool before its files are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Age {
    /// None: free space is one range.
    New,
    /// Small files filled it, and every other one of them was removed: free space is many small
    /// ranges.
    Aged,
}

/// The range of lengths of the files that age a pool, drawn uniformly.
const AGEING_BYTES: [u64; 2] = [4 << 10, 64 << 10];

/// Creates `files` files of `file_bytes` in a directory, and the same in a pool there. `progress`
/// is called for each of them.
pub fn create(
    directory: Scratch,
    files: u32,
    file_bytes: u64,
    seed: u64,
    age: Age,
    mut progress: impl FnMut(),
) -> Result<FileSet> {
    let content_bytes = u64::from(files) * file_bytes;
    check_space(directory.path(), content_bytes + room_bytes(content_bytes, age))?;
    let set = FileSet::create(directory, files, file_bytes, seed, &mut progress)?;
    create_pool(set.path(), files, file_bytes, seed, age, progress)?;
    Ok(set)
}

/// Space for content: in an aged pool, the remaining small files keep half of the used space.
fn room_bytes(content_bytes: u64, age: Age) -> u64 {
    content_bytes * if age == Age::Aged { 3 } else { 1 }
}

/// Creates a pool with these files, without the copies outside it.
pub fn create_pool(
    directory: &Path,
    files: u32,
    file_bytes: u64,
    seed: u64,
    age: Age,
    mut progress: impl FnMut(),
) -> Result<()> {
    let content_bytes = u64::from(files) * file_bytes;
    let room_bytes = room_bytes(content_bytes, age);
    let others = if age == Age::Aged { room_bytes / AGEING_BYTES[0] } else { 0 };
    let bytes = pool_bytes(room_bytes, u64::from(files) + others);
    let options = Pool::options().inodes(slots(u64::from(files) + others));
    let path = directory.join(POOL);
    let pool = Files::new(options.create(path, bytes)?);
    if age == Age::Aged {
        make_old(&pool, room_bytes, seed)?;
    }
    let mut content = vec![0_u8; usize::try_from(file_bytes)?];
    for number in 0..files {
        interrupt::check()?;
        fill_content(&mut content, seed, number);
        let file = pool.create_file(file_path(Path::new(""), number))?;
        file.write_all_at(&content, 0)?;
        progress();
    }
    pool.sync()?;
    Ok(pool.pool().checkpoint()?)
}

/// Creates a pool in the directory of a tree, with the files of the tree under the same paths.
pub fn copy_tree(tree: &SourceTree) -> Result<()> {
    // A file occupies whole pages.
    let content_bytes = tree.bytes + u64::from(tree.files) * 4096;
    let folders = folders_below(tree.path(), usize::MAX)?;
    let names = u64::from(tree.files) + folders.len() as u64 * 8;
    let bytes = pool_bytes(content_bytes, names);
    check_space(tree.path(), bytes)?;
    let pool = Pool::options().inodes(slots(names)).create(tree.path().join(POOL), bytes)?;
    let pool = Files::new(pool);
    for folder in folders {
        let below = folder.path.strip_prefix(tree.path()).expect("found below it");
        pool.create_dir_all(below)?;
        for name in &folder.names {
            interrupt::check()?;
            pool.write(below.join(name), std::fs::read(folder.path.join(name))?)?;
        }
    }
    pool.sync()?;
    Ok(pool.pool().checkpoint()?)
}

/// Fills `room_bytes` with small files, and removes every other one of them.
fn make_old(files: &Files, room_bytes: u64, seed: u64) -> Result<()> {
    files.create_dir("old")?;
    let content = vec![0x5a; AGEING_BYTES[1] as usize];
    let mut rng = Rng::new(seed);
    let mut names = Vec::new();
    let mut written_bytes = 0;
    while written_bytes < room_bytes && files.space()?.free_bytes > AGEING_BYTES[1] {
        interrupt::check()?;
        let pages = AGEING_BYTES.map(|bytes| bytes / 4096);
        let len_bytes = (pages[0] + rng.below(pages[1] - pages[0] + 1)) * 4096;
        let name = format!("old/{:06}", names.len());
        files.create_file(&name)?.write_all_at(&content[..len_bytes as usize], 0)?;
        names.push(name);
        written_bytes += len_bytes;
    }
    for name in names.iter().step_by(2) {
        files.remove_file(name)?;
    }
    // Makes the removed files' space available again.
    Ok(files.pool().checkpoint()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::scratch_directory;
    use crate::sum::sum_words;

    #[test]
    fn a_pool_has_the_files_of_its_directory() {
        for age in [Age::New, Age::Aged] {
            let directory = scratch_directory(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
            let mut seen = 0;
            let set = create(directory, 5, 64 << 10, 3, age, || seen += 1).unwrap();
            assert_eq!(seen, 10);
            let files = Files::open(set.path().join(POOL)).unwrap();
            for (&sum, number) in set.sums().iter().zip(0..) {
                let file = files.open_file(file_path(Path::new(""), number)).unwrap();
                let mut bytes = vec![0; 64 << 10];
                assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
                assert_eq!(sum_words(&bytes), sum, "{number} {age:?}");
            }
        }
    }
}
