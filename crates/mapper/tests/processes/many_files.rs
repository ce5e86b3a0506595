//! More files than a process may have mappings, and more than it may have descriptors.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use aquifer_mapper::{FileAccess, FileView, MapError, Mapper};
use aquifer_testkit::campaign::steps;
use aquifer_testkit::child;

/// The usual limit of descriptors in a shell, and a low one for tests with fewer files.
const USUAL_DESCRIPTORS: u64 = 1024;
const FEW_DESCRIPTORS: u64 = 64;

/// Limits the descriptors of the process.
fn limit_descriptors(count: u64) {
    let limit = libc::rlimit { rlim_cur: count, rlim_max: count };
    // SAFETY: a structure on this stack.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The content of a file: its number, repeated so that lengths differ.
fn content(file: usize) -> Vec<u8> {
    format!("file {file}; ").repeat(1 + file % 200).into_bytes()
}

/// Makes files in directories of 1,000.
fn make_files(directory: &Path, count: usize) -> Vec<PathBuf> {
    let path = |file: usize| directory.join(format!("{}/{file}", file / 1000));
    let paths: Vec<PathBuf> = (0..count).map(path).collect();
    for (file, path) in paths.iter().enumerate() {
        if file % 1000 == 0 {
            fs::create_dir(path.parent().unwrap()).unwrap();
        }
        fs::write(path, content(file)).unwrap();
    }
    paths
}

fn map_all(mapper: &Mapper, paths: &[PathBuf]) -> Vec<FileView> {
    let map = |path| mapper.map(path, FileAccess::Read, ..).unwrap();
    paths.iter().map(map).collect()
}

fn check_all(views: &[FileView]) {
    for (file, view) in views.iter().enumerate() {
        let wanted = content(file);
        assert!(view.read(|bytes| bytes.to_vec()).unwrap() == wanted, "file {file}");
        // SAFETY: no process changes the files.
        assert!(unsafe { view.as_slice() } == wanted, "file {file}");
        let mut end = [0; 2];
        view.read_exact_at(&mut end, wanted.len() as u64 - 2).unwrap();
        assert_eq!(&end, b"; ");
    }
}

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("more files than mappings", more_files_than_mappings),
    ("a hundred thousand files", a_hundred_thousand_files),
    ("a file without a path", a_file_without_a_path),
];

fn more_files_than_mappings() {
    let directory = tempfile::tempdir().unwrap();
    limit_descriptors(FEW_DESCRIPTORS);
    let paths = make_files(directory.path(), 3000);
    let mapper = Mapper::builder().mappings_limit(1000).build().unwrap();
    let views = map_all(&mapper, &paths);
    assert!(open_descriptors() < FEW_DESCRIPTORS as usize / 2, "{}", open_descriptors());
    check_all(&views);
    let snapshots = views.iter().filter(|view| view.is_snapshot()).count();
    assert!((2000..3000).contains(&snapshots), "{snapshots} of 3000 read");
    assert!(!views[0].is_snapshot(), "while there is room, files are mapped");
    let needed: usize = (0..3000).map(|file| content(file).len()).sum();
    let taken = mapper.stats().snapshot_bytes;
    assert!(taken > 0 && taken < 2 * needed as u64 + (4 << 20), "{taken} for {needed}");

    // A snapshot does not show changes; a mapping does.
    for (file, view) in [0, 2999].map(|file| (file, &views[file])) {
        File::options().write(true).open(&paths[file]).unwrap().write_all_at(b"FILE", 0).unwrap();
        let first = view.read_range(0..4, |bytes| bytes.to_vec()).unwrap();
        assert_eq!(first == b"file", view.is_snapshot());
    }

    // Ranges of more than 64 KiB are refused; a shorter one of the same file is read.
    let large = directory.path().join("large");
    fs::write(&large, vec![7; 100 << 10]).unwrap();
    let refused = mapper.map(&large, FileAccess::Read, ..).unwrap_err();
    assert!(matches!(refused, MapError::TooManyMappings { limit: 1000, .. }), "{refused}");
    assert!(refused.to_string().contains("sysctl vm.max_map_count"), "{refused}");
    let part = mapper.map(&large, FileAccess::Read, 99 << 10..).unwrap();
    assert!(part.is_snapshot());
    assert_eq!((part.offset_bytes(), part.len_bytes()), (99 << 10, 1 << 10));
    assert_eq!(part.read(|bytes| bytes.to_vec()).unwrap(), [7; 1 << 10]);
    assert!(matches!(part.get::<u64>(1020).unwrap_err(), MapError::OutsideView { .. }));
    drop(part);

    // Dropping the views frees their memory, and there is room again.
    drop(views);
    assert!(mapper.stats().snapshot_bytes <= 2 << 20, "{}", mapper.stats().snapshot_bytes);
    mapper.forget_all().unwrap();
    assert!(!mapper.map(&large, FileAccess::Read, ..).unwrap().is_snapshot());
}

#[test]
fn more_small_files_than_mappings_are_read_and_larger_ones_refused() {
    child::succeeds("more files than mappings");
}

fn a_hundred_thousand_files() {
    let directory = tempfile::tempdir().unwrap();
    limit_descriptors(USUAL_DESCRIPTORS);
    let paths = make_files(directory.path(), 100_000);
    let mapper = Mapper::builder().build().unwrap();
    let views = map_all(&mapper, &paths);
    assert!(views.iter().any(FileView::is_snapshot));
    check_all(&views);
    // Unrelated operations of the program still work.
    drop(std::thread::spawn(|| vec![1u8; 64 << 20]).join().unwrap());
}

#[test]
fn a_hundred_thousand_files_are_mapped_at_once() {
    if steps(10) < 100 {
        eprintln!("skipped: `./test full` maps 100,000 files");
        return;
    }
    child::succeeds("a hundred thousand files");
}

/// A file that cannot be reopened stays open, however many files are.
fn a_file_without_a_path() {
    let directory = tempfile::tempdir().unwrap();
    limit_descriptors(FEW_DESCRIPTORS);
    let paths = make_files(directory.path(), 100);
    let mapper = Mapper::builder().build().unwrap();
    let views = map_all(&mapper, &paths);
    let file = File::options().read(true).write(true).open(&paths[0]).unwrap();
    let removed = directory.path().join("removed");
    fs::write(&removed, content(1)).unwrap();
    let opened = File::options().read(true).write(true).open(&removed).unwrap();
    fs::remove_file(&removed).unwrap();
    let view = mapper.map_file(&opened, FileAccess::Read, ..).unwrap();
    let by_path = &views[99];
    let last = File::options().write(true).open(&paths[99]).unwrap();
    fs::remove_file(&paths[99]).unwrap();
    for file in [&file, &opened, &last] {
        file.set_len(0).unwrap();
    }
    for (view, is_known) in [(&views[0], true), (&view, true), (by_path, false)] {
        let cause = match view.read(|bytes| bytes.to_vec()) {
            Err(MapError::Fault { cause, .. }) => cause,
            other => panic!("{other:?}"),
        };
        let is_truncated = cause == aquifer_mapper::FaultCause::Truncated;
        assert_eq!(is_truncated, is_known, "{cause}");
    }
    // As soon as its bytes are back, the file that could be reopened can be read again.
    opened.write_all_at(&content(1), 0).unwrap();
    assert_eq!(view.read(|bytes| bytes.to_vec()).unwrap(), content(1));
}

#[test]
fn a_file_without_a_path_stays_open_and_others_say_that_they_cannot_be_asked() {
    child::succeeds("a file without a path");
}
