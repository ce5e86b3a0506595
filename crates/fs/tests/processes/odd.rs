//! Odd input and extremes: any bytes as names, the longest names and paths, trees deeper than a
//! stack, huge directories, huge sparse files, full pools, and a fork with the pool open.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::scratch::soundness::assert_sound;
use crate::scratch::{Scratch, names, read_all};
use aquifer_fs::{FallocateMode, File, Files, FsError, SetMode};
use aquifer_pool::{Pool, PoolError, PoolOptions};
use aquifer_testkit::campaign::steps;
use aquifer_testkit::child;
use aquifer_testkit::rng::Rng;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("forks", forks)];

fn small(inodes: u64) -> PoolOptions {
    Pool::options().inodes(inodes)
}

/// A unique name of bytes that are not UTF-8.
fn odd_name(number: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng::new(number);
    let mut name: Vec<u8> = (0..len)
        .map(|_| match rng.below(256) as u8 {
            0 | b'/' => 0xff,
            byte => byte,
        })
        .collect();
    name.extend(format!("{number}").as_bytes());
    name
}

#[test]
fn names_are_bytes() {
    let scratch = Scratch::with_pool(8 << 20, &small(2047));
    let files = scratch.open();
    let mut expected = BTreeSet::new();
    for byte in (1..=255u8).filter(|byte| *byte != b'/') {
        let name = match byte {
            // `.` is the directory itself.
            b'.' => b"...".to_vec(),
            byte => vec![byte],
        };
        let path = Path::new(OsStr::from_bytes(&name));
        files.create_file(path).unwrap().write_all_at(&[byte], 0).unwrap();
        assert!(expected.insert(name));
    }
    for number in 1000..1200 {
        let name = odd_name(number, (number % 250) as usize);
        let path = Path::new(OsStr::from_bytes(&name));
        files.create_file(path).unwrap().write_all_at(&number.to_le_bytes(), 0).unwrap();
        assert!(expected.insert(name));
    }
    let found: BTreeSet<Vec<u8>> =
        names(&files, "/").unwrap().into_iter().map(|name| name.as_bytes().to_vec()).collect();
    assert!(found == expected, "the names that were made are there, and no others");
    assert_sound(files.pool());
    for name in &expected {
        let path = Path::new(OsStr::from_bytes(name));
        assert!(!read_all(&files, path).unwrap().is_empty());
        files.remove_file(path).unwrap();
    }
    assert_sound(files.pool());
    assert_eq!(files.metadata("/").unwrap().len(), 0);
}

#[test]
fn names_and_paths_end_where_they_do_on_linux() {
    let scratch = Scratch::with_pool(8 << 20, &small(2047));
    let files = scratch.open();
    let errno = |outcome: Result<File, FsError>| outcome.map(drop).map_err(|error| error.errno());
    let longest = "n".repeat(255);
    files.create_dir(&longest).unwrap();
    assert_eq!(errno(files.create_file("n".repeat(256))), Err(libc::ENAMETOOLONG));
    assert_eq!(errno(files.create_file(format!("{}/a", "n".repeat(256)))), Err(libc::ENAMETOOLONG));
    // Fifteen names of 255 bytes with their slashes, and one that fills up 4,095 bytes.
    let mut path = PathBuf::new();
    for _ in 0..15 {
        path.push(&longest);
    }
    files.create_dir_all(&path).unwrap();
    let left = 4095 - path.as_os_str().len() - 1;
    let file = path.join("f".repeat(left));
    assert_eq!(file.as_os_str().len(), 4095);
    files.create_file(&file).unwrap().write_all_at(b"far", 0).unwrap();
    assert_eq!(read_all(&files, &file).unwrap(), b"far");
    let longer = format!("/{}", file.display());
    assert_eq!(errno(files.open_file(&longer)), Err(libc::ENAMETOOLONG));
    // A target of the maximum length.
    files.symlink(&file, "link").unwrap();
    assert_eq!(files.read_link("link").unwrap(), file);
    assert_eq!(read_all(&files, files.read_link("link").unwrap()).unwrap(), b"far");
    assert_eq!(files.symlink(&longer, "other").unwrap_err().errno(), libc::ENAMETOOLONG);
    assert_eq!(errno(files.create_file("a\0b")), Err(libc::EINVAL));
    assert_sound(files.pool());
    files.remove_dir_all(&longest).unwrap();
    assert_sound(files.pool());
}

/// Attributes take more slots than one record of a small log can give back, or patch.
#[test]
fn what_has_many_attributes_is_removed_in_a_pool_with_a_small_log() {
    let options = small(1500).log_bytes(64 << 10);
    let scratch = Scratch::with_pool(2 << 20, &options);
    let files = scratch.open();
    // The directory has a node from now on.
    files.create_file("/other").unwrap().write_all_at(b"text", 0).unwrap();
    let free = files.space().unwrap().free_slots;
    let fill = |path: &str| {
        let set = |number: u32| {
            files.set_attribute(path, format!("user.{number}"), [7; 460], SetMode::Create)
        };
        let refused = (0..).find_map(|number| set(number).err()).unwrap();
        assert_eq!(refused.errno(), libc::ENOSPC, "{refused}");
        // Giving back a full slot is logged as a patch of its whole content.
        assert!(free - files.space().unwrap().free_slots > 270);
    };
    let make_file = |path: &str| drop(files.create_file(path).unwrap());
    let is_free = || files.space().unwrap().free_slots == free;

    make_file("/file");
    fill("/file");
    files.remove_file("/file").unwrap();
    assert!(is_free(), "a file");
    files.create_dir("/directory").unwrap();
    fill("/directory");
    let (stale, listing) = (files.open_file("/directory").unwrap(), files.read_dir("/directory"));
    files.remove_dir("/directory").unwrap();
    assert_eq!(stale.metadata().unwrap_err().errno(), libc::ENOENT);
    assert_eq!(listing.unwrap().count(), 0);
    drop(stale);
    assert!(is_free(), "a directory");
    make_file("/file");
    fill("/file");
    let open = files.open_file("/file").unwrap();
    files.remove_file("/file").unwrap();
    assert_eq!(open.attribute("user.3").unwrap(), [7; 460]);
    drop(open);
    assert!(is_free(), "an open file");
    make_file("/file");
    fill("/file");
    files.rename("/other", "/file").unwrap();
    assert!(is_free(), "a file that was replaced");
    files.create_dir_all("/tree/directory").unwrap();
    fill("/tree/directory");
    files.remove_dir_all("/tree").unwrap();
    assert!(is_free(), "a tree");
    let link = files.symlink_unnamed("t".repeat(4000)).unwrap();
    for number in 0..200 {
        let name = format!("trusted.{number}");
        link.set_attribute(name, [7; 460], SetMode::Create).unwrap();
    }
    drop(link);
    assert!(is_free(), "a symbolic link");
    assert_sound(files.pool());
    drop(files);
    scratch.assert_clean();
}

/// Deeper than paths can reach: made by moving directories.
#[test]
fn trees_are_deeper_than_stacks() {
    // Each level is looked up from the root, which takes quadratic time.
    let levels = if steps(1) > 1 { 10_000 } else { 3_000 };
    let scratch = Scratch::with_pool(64 << 20, &small(2 * levels as u64 + 1000));
    let files = scratch.open();
    // Bottom up: with a path of two names, a tree of any depth can be made.
    files.create_dir("d").unwrap();
    for level in 1..levels {
        files.create_dir("up").unwrap();
        files.rename("d", "up/d").unwrap_or_else(|error| panic!("level {level}: {error}"));
        files.rename("up", "d").unwrap();
    }
    assert_sound(files.pool());
    // To check whether the new place lies inside `d`, all its parents are visited.
    let deep: PathBuf = std::iter::repeat_n("d", 2000).collect();
    files.create_dir("other").unwrap();
    let refused = files.rename("d", deep.join("other")).unwrap_err();
    assert_eq!(refused.errno(), libc::EINVAL);
    drop(files);
    let on_small_stack = || {
        let files = scratch.open();
        assert_sound(files.pool());
        files.remove_dir_all("d").unwrap();
        assert_sound(files.pool());
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(128 << 10);
        thread.spawn_scoped(scope, on_small_stack).unwrap().join().unwrap();
    });
    scratch.assert_clean();
}

#[test]
fn huge_directories() {
    let count = if steps(1) > 1 { 1_000_000 } else { 20_000 };
    let options = Pool::options().inodes(count * 5 / 4 + 5000).log_bytes(64 << 20);
    let scratch = Scratch::with_pool((128 << 20) + count * 700, &options);
    let files = scratch.open();
    files.create_dir("d").unwrap();
    for number in 0..count {
        files.create_file(format!("d/file {number}")).unwrap();
    }
    assert_eq!(files.metadata("d").unwrap().len(), count);
    // Names that stay are listed exactly once, while half of the names are removed and as many
    // added.
    let mut seen = BTreeSet::new();
    for (index, entry) in files.read_dir("d").unwrap().enumerate() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if let Some(number) = name.strip_prefix("file ") {
            assert!(seen.insert(number.parse::<u64>().unwrap()), "{name} was read twice");
        }
        let number = index as u64 * 2 + 1;
        if number < count && index.is_multiple_of(4) {
            files.remove_file(format!("d/file {number}")).unwrap();
            files.create_file(format!("d/new {number}")).unwrap();
        }
    }
    assert!((0..count).step_by(2).all(|number| seen.contains(&number)), "a name was not read");
    assert_sound(files.pool());
    drop(files);
    scratch.assert_clean();
    let files = scratch.open();
    assert_eq!(files.metadata("d").unwrap().len(), count);
    files.remove_dir_all("d").unwrap();
    let info = files.pool().info().unwrap();
    assert_eq!(info.free_slots, info.layout.slots() - 2);
}

#[test]
fn files_of_holes_are_as_long_as_files_can_be() {
    const FAR: u64 = 1 << 52;
    let scratch = Scratch::with_pool(8 << 20, &Pool::options());
    let files = scratch.open();
    let file = files.options().read(true).write(true).create(true).open("f").unwrap();
    let longest = aquifer_pool::format::file::MAX_FILE_BYTES;
    let mut expected: Vec<(u64, &[u8])> = vec![(0, b"begin")];
    if FAR + 3 < longest - 3 {
        expected.push((FAR, b"far"));
    }
    expected.push((longest - 3, b"end"));
    for (at, bytes) in &expected {
        file.write_all_at(bytes, *at).unwrap();
    }
    assert_eq!(file.write_all_at(b"over", longest - 3).unwrap_err().errno(), libc::EFBIG);
    assert_eq!(file.write_all_at(b"over", u64::MAX - 1).unwrap_err().errno(), libc::EFBIG);
    assert_eq!(file.set_len(longest + 1).unwrap_err().errno(), libc::EFBIG);
    assert_eq!(file.metadata().unwrap().len(), longest);
    assert!(file.metadata().unwrap().allocated_bytes() < 1 << 20);
    let mut bytes = [1; 10];
    for (at, wanted) in &expected {
        let got = file.read_at(&mut bytes[..wanted.len()], *at).unwrap();
        assert_eq!(&bytes[..got], *wanted);
    }
    assert_eq!(file.read_at(&mut bytes, FAR / 2).unwrap(), 10);
    assert_eq!(bytes, [0; 10]);
    // More than the free space fails, and takes nothing.
    let free = files.space().unwrap().free_bytes;
    let refused = file.allocate(FallocateMode::Extend, 0, FAR.min(longest)).unwrap_err();
    assert_eq!(refused.errno(), libc::ENOSPC);
    assert_eq!(files.space().unwrap().free_bytes, free);
    file.allocate(FallocateMode::PunchHole, 4096, longest - 4096).unwrap();
    assert_eq!(file.read_at(&mut bytes, longest - 3).unwrap(), 3);
    assert_eq!(&bytes[..3], [0; 3]);
    file.set_len(5).unwrap();
    assert_eq!(read_all(&files, "f").unwrap(), b"begin");
    assert_sound(files.pool());
}

/// Fills the pool with files of `len` bytes; returns how many fit.
fn fill(files: &Files, len: usize) -> u64 {
    for number in 0.. {
        let outcome = files
            .create_file(format!("full {number}"))
            .and_then(|file| file.write_all_at(&vec![number as u8; len], 0));
        match outcome {
            Ok(()) => {}
            Err(error) => {
                assert_eq!(error.errno(), libc::ENOSPC, "{error}");
                return number;
            }
        }
    }
    unreachable!()
}

fn check_full(scratch: &Scratch, files: Files, len: usize, count: u64) {
    assert_sound(files.pool());
    for number in 0..count {
        assert!(read_all(&files, format!("full {number}")).unwrap() == vec![number as u8; len]);
    }
    drop(files);
    scratch.assert_clean();
    let files = scratch.open();
    for number in 0..=count {
        match files.remove_file(format!("full {number}")) {
            Err(error) if number == count => assert_eq!(error.errno(), libc::ENOENT, "{error}"),
            outcome => outcome.unwrap(),
        }
    }
    assert_sound(files.pool());
    let again = fill(&files, len);
    assert!(again >= count, "there was room for {count} files, and then for {again}");
    assert_sound(files.pool());
    files.sync().unwrap();
}

#[test]
fn a_pool_full_of_data() {
    let scratch = Scratch::with_pool(4 << 20, &Pool::options());
    let files = scratch.open();
    let count = fill(&files, 50_000);
    assert!(count > 20, "only {count} files");
    // Operations that need no space still work.
    let file = files.options().read(true).write(true).open("full 0").unwrap();
    file.write_all_at(&[0; 50_000], 0).unwrap();
    files.rename("full 1", "other").unwrap();
    files.rename("other", "full 1").unwrap();
    file.set_len(100).unwrap();
    file.set_len(50_000).unwrap();
    drop(file);
    check_full(&scratch, files, 50_000, count);
}

#[test]
fn a_pool_full_of_inodes() {
    let scratch = Scratch::with_pool(4 << 20, &small(199));
    let files = scratch.open();
    let count = fill(&files, 1);
    assert!((120..199).contains(&count), "{count} files in 199 slots");
    // A file can need several slots, so some may be left: an attribute that grows takes one at a
    // time.
    let grow = |len| files.set_attribute("full 0", "user.rest", vec![0; len], SetMode::Any);
    let refused = (400..).step_by(400).find_map(|len| grow(len).err()).unwrap();
    assert_eq!(refused.errno(), libc::ENOSPC);
    assert_eq!(files.create_dir("d").unwrap_err().errno(), libc::ENOSPC);
    assert_eq!(files.symlink("x", "d").unwrap_err().errno(), libc::ENOSPC);
    let refused = files.set_attribute("full 1", "user.a", [0; 5000], SetMode::Any).unwrap_err();
    assert_eq!(refused.errno(), libc::ENOSPC);
    check_full(&scratch, files, 1, count);
}

/// Writes that are copied in several parts: to new pages, in place, and to both.
#[test]
fn writes_of_many_megabytes() {
    const LEN: usize = 35 << 20;
    let scratch = Scratch::with_pool(128 << 20, &small(100));
    let files = scratch.open();
    let file = files.options().write(true).create(true).open("f").unwrap();
    let bytes = |start: usize| -> Vec<u8> {
        (start..start + LEN / 4).flat_map(|word| (word as u32).to_le_bytes()).collect()
    };
    let mut expected = vec![0; 3];
    expected.extend(bytes(0));
    file.write_all_at(&bytes(0), 3).unwrap();
    assert!(read_all(&files, "f").unwrap() == expected);
    for (start, offset) in [(1 << 24, 1), (1 << 25, 1 << 20)] {
        expected.resize(expected.len().max(offset + LEN), 0);
        expected[offset..offset + LEN].copy_from_slice(&bytes(start));
        file.write_all_at(&bytes(start), offset as u64).unwrap();
        assert!(read_all(&files, "f").unwrap() == expected, "at {offset}");
    }
    expected[..LEN].copy_from_slice(&bytes(7));
    file.write_atomic(&bytes(7), 0).unwrap();
    assert!(read_all(&files, "f").unwrap() == expected);
}

/// A log much smaller than the changes between two checkpoints, and than a large file's table.
#[test]
fn a_log_that_is_always_full() {
    let options = small(1000).log_bytes(64 << 10);
    let scratch = Scratch::with_pool(8 << 20, &options);
    let options = Pool::options().background(false);
    let files = Files::new(options.open(&scratch.path).unwrap());
    let file = files.options().read(true).write(true).create(true).open("f").unwrap();
    // As many runs as pages: every second page.
    for page in (0..800u64).step_by(2) {
        file.write_all_at(&[page as u8; 4096], page * 4096).unwrap();
    }
    for page in (1..800u64).step_by(2) {
        file.write_all_at(&[page as u8; 4096], page * 4096).unwrap();
    }
    assert_sound(files.pool());
    let content = read_all(&files, "f").unwrap();
    assert!(content.chunks(4096).zip(0u64..).all(|(bytes, page)| bytes == [page as u8; 4096]));
    match files.set_attribute("f", "user.a", vec![7; 60_000], SetMode::Any) {
        Ok(()) => {}
        Err(error) => assert!(matches!(error, FsError::Pool(PoolError::TooLargeForLog { .. }))),
    }
    file.set_len(0).unwrap();
    files.remove_file("f").unwrap();
    drop(file);
    assert_sound(files.pool());
    drop(files);
    scratch.assert_clean();
}

/// In a forked child every call on the pool fails, and the parent is not affected.
fn forks() {
    let scratch = Scratch::with_pool(8 << 20, &Pool::options());
    let files = scratch.open();
    let file = files.options().read(true).write(true).create(true).open("f").unwrap();
    file.write_all_at(b"parent", 0).unwrap();
    // SAFETY: the child allocates, which this process's only other thread does not do at the same
    // time, and ends with `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let is_told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            is_told_of_fork(&files, &file)
        }));
        drop((files, file));
        // SAFETY: runs none of the parent's destructors.
        unsafe { libc::_exit(if matches!(is_told, Ok(true)) { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "the child was not told");
    file.write_all_at(b"after", 0).unwrap();
    assert_eq!(read_all(&files, "f").unwrap(), b"aftert");
    files.create_file("g").unwrap();
    assert_sound(files.pool());
    drop((files, file));
    scratch.assert_clean();
}

fn is_told_of_fork(files: &Files, file: &File) -> bool {
    let of_fork = |error: FsError| matches!(error, FsError::Pool(PoolError::Forked));
    let mut told = vec![
        ("write", file.write_all_at(b"child", 0).is_err_and(of_fork)),
        ("write behind the end", file.write_all_at(b"child", 100_000).is_err_and(of_fork)),
        ("set_len", file.set_len(1).is_err_and(of_fork)),
        ("sync", file.sync_all().is_err_and(of_fork)),
        ("create", files.create_file("child").is_err_and(of_fork)),
        ("remove", files.remove_file("f").is_err_and(of_fork)),
        ("rename", files.rename("f", "g").is_err_and(of_fork)),
        ("attribute", files.set_attribute("f", "user.a", b"", SetMode::Any).is_err_and(of_fork)),
    ];
    told.push(("read", file.read_at(&mut [0; 4], 0).is_err_and(of_fork)));
    told.push(("open", files.open_file("f").is_err_and(of_fork)));
    told.push(("metadata", files.metadata("f").is_err_and(of_fork)));
    for (call, is_told) in &told {
        if !is_told {
            println!("{call} does not say that the process is a fork");
        }
    }
    told.iter().all(|(_, is_told)| *is_told)
}

#[test]
fn a_fork_is_told_and_its_parent_goes_on() {
    child::succeeds("forks");
}
