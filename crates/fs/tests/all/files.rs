//! Files in a pool, one operation at a time.

use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use aquifer_fs::{FallocateMode, FileTimes, Files, FsError, RenameMode};
use aquifer_pool::Pool;

const POOL_BYTES: u64 = 16 << 20;

struct Scratch {
    _directory: tempfile::TempDir,
    path: std::path::PathBuf,
}

fn scratch() -> (Scratch, Files) {
    let directory = aquifer_testkit::scratch::in_memory();
    let path = directory.path().join("pool");
    let pool = Pool::create(&path, POOL_BYTES).unwrap();
    (Scratch { _directory: directory, path }, Files::new(pool))
}

fn names(files: &Files, path: &str) -> Vec<String> {
    let entries = files.read_dir(path).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn read(files: &Files, path: impl AsRef<Path>) -> Vec<u8> {
    let mut bytes = Vec::new();
    files.open_file(path).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn what_is_written_is_read_again() {
    let (scratch, files) = scratch();
    files.create_dir_all("/a/b").unwrap();
    let mut file = files.create_file("/a/b/c").unwrap();
    file.write_all(b"first").unwrap();
    file.write_all(b" second").unwrap();
    assert_eq!(read(&files, "a/b/c"), b"first second");
    file.write_all_at(b"F", 0).unwrap();
    file.write_all_at(b"far", 100_000).unwrap();
    let bytes = read(&files, "/a/b/c");
    assert_eq!(bytes.len(), 100_003);
    assert_eq!(&bytes[..12], b"First second");
    assert!(bytes[12..100_000].iter().all(|&byte| byte == 0));
    assert_eq!(&bytes[100_000..], b"far");
    drop((file, files));
    let files = Files::open(&scratch.path).unwrap();
    assert_eq!(read(&files, "/a/b/c"), bytes);
    assert_eq!(names(&files, "/"), ["a"]);
    assert_eq!(names(&files, "/a/b/../b/."), ["c"]);
}

#[test]
fn files_grow_shrink_and_have_holes() {
    let (_scratch, files) = scratch();
    let free = files.space().unwrap().free_bytes;
    let mut file = files.options().read(true).write(true).create_new(true).open("f").unwrap();
    for index in 0..100u8 {
        file.write_all(&[index; 1000]).unwrap();
    }
    file.set_len(50_500).unwrap();
    file.set_len(60_000).unwrap();
    let bytes = read(&files, "f");
    assert!(bytes[50_000..50_500].iter().all(|&byte| byte == 50));
    assert!(bytes[50_500..].iter().all(|&byte| byte == 0) && bytes.len() == 60_000);
    file.allocate(FallocateMode::PunchHole, 5_000, 10_000).unwrap();
    let bytes = read(&files, "f");
    assert!(bytes[5_000..15_000].iter().all(|&byte| byte == 0));
    assert!(bytes[4_000..5_000].iter().all(|&byte| byte == 4));
    assert!(bytes[15_000..16_000].iter().all(|&byte| byte == 15));
    let before = file.metadata().unwrap();
    file.allocate(FallocateMode::Extend, 0, 80_000).unwrap();
    let after = file.metadata().unwrap();
    assert!(after.allocated_bytes() > before.allocated_bytes() && after.len() == 80_000);
    file.seek(SeekFrom::End(-10)).unwrap();
    let mut tail = Vec::new();
    file.read_to_end(&mut tail).unwrap();
    assert_eq!(tail, [0; 10]);
    files.remove_file("f").unwrap();
    drop(file);
    files.pool().checkpoint().unwrap();
    files.create_file("g").unwrap().write_all(&[1; 10]).unwrap();
    files.remove_file("g").unwrap();
    files.pool().checkpoint().unwrap();
    files.create_file("h").unwrap();
    assert_eq!(files.space().unwrap().free_bytes, free);
}

#[test]
fn names_move_and_are_replaced() {
    let (_scratch, files) = scratch();
    files.create_dir("d").unwrap();
    files.create_dir("d/e").unwrap();
    files.create_file("f").unwrap().write_all(b"f").unwrap();
    files.create_file("d/g").unwrap().write_all(b"g").unwrap();
    files.rename("f", "d/g").unwrap();
    assert_eq!(read(&files, "d/g"), b"f");
    assert_eq!(names(&files, "/"), ["d"]);
    assert!(matches!(files.rename("d", "d/e/d"), Err(FsError::IntoItself { .. })));
    // As on Linux: the directory contains what is moved.
    assert!(matches!(files.rename("d/g", "d"), Err(FsError::NotEmpty { .. })));
    assert!(matches!(files.rename("d/g", "d/e"), Err(FsError::IsADirectory { .. })));
    assert!(matches!(files.remove_dir("d"), Err(FsError::NotEmpty { .. })));
    files.rename("d/e", "x").unwrap();
    assert_eq!(files.metadata("d").unwrap().nlink(), 2);
    assert_eq!(files.metadata("/").unwrap().nlink(), 4);
    files.symlink("../d/g", "x/link").unwrap();
    assert_eq!(read(&files, "x/link"), b"f");
    assert_eq!(files.read_link("x/link").unwrap(), Path::new("../d/g"));
    files.hard_link("d/g", "second").unwrap();
    assert_eq!(files.metadata("second").unwrap().nlink(), 2);
    files.rename_with("second", "x", RenameMode::Exchange).unwrap();
    assert!(files.metadata("second").unwrap().is_dir());
    let refused = files.rename_with("x", "d", RenameMode::NoReplace);
    assert!(matches!(refused, Err(FsError::Exists { .. })));
    files.remove_dir_all("d").unwrap();
    assert_eq!(read(&files, "x"), b"f");
    files.symlink("a", "b").unwrap();
    files.symlink("b", "a").unwrap();
    assert!(matches!(files.open_file("a"), Err(FsError::LinkLoop { .. })));
}

#[test]
fn a_removed_file_stays_until_its_last_handle_is_closed() {
    let (_scratch, files) = scratch();
    files.create_file("f").unwrap().write_all(&[7; 10_000]).unwrap();
    let mut file = files.open_file("f").unwrap();
    files.remove_file("f").unwrap();
    files.create_file("f").unwrap().write_all(&[8; 10_000]).unwrap();
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    assert!(bytes == [7; 10_000]);
    assert_eq!(file.metadata().unwrap().nlink(), 0);
}

#[test]
fn many_names() {
    let (_scratch, files) = scratch();
    for index in 0..500 {
        files.create_file(format!("file {index}")).unwrap();
    }
    assert_eq!(names(&files, "/").len(), 500);
    for index in (0..500).step_by(2) {
        files.remove_file(format!("file {index}")).unwrap();
    }
    assert_eq!(names(&files, "/").len(), 250);
    assert!(!files.exists("file 0").unwrap() && files.exists("file 1").unwrap());
}

#[test]
fn pages_are_replaced_and_exchanged() {
    let (_scratch, files) = scratch();
    let [a, b] = ["a", "b"].map(|path| files.create_new_file(path).unwrap());
    a.write_all_at(&[1; 20_000], 0).unwrap();
    b.write_all_at(&[2; 30_000], 0).unwrap();
    a.write_atomic(&[3; 10_000], 5_000).unwrap();
    a.write_atomic(&[4; 10], 25_000).unwrap();
    let bytes = read(&files, "a");
    let expected = [vec![1; 5_000], vec![3; 10_000], vec![1; 5_000], vec![0; 5_000], vec![4; 10]];
    assert!(bytes == expected.concat());
    let free = files.space().unwrap().free_bytes;
    a.exchange_range(4096, &b, 8192, 8192).unwrap();
    assert_eq!(files.space().unwrap().free_bytes, free, "nothing is taken or given back");
    let (now, other) = (read(&files, "a"), read(&files, "b"));
    assert!(now[..4096] == bytes[..4096] && now[4096..12_288] == [2; 8192]);
    assert!(now[12_288..] == bytes[12_288..]);
    assert!(other[..8192] == [2; 8192] && other[8192..16_384] == bytes[4096..12_288]);
    assert!(other[16_384..] == [2; 30_000 - 16_384]);
    // Within one file, and up to its last page, which is partial.
    b.exchange_range(0, &b, 28_672, 4096).unwrap();
    let swapped = read(&files, "b");
    assert!(swapped[..30_000 - 28_672] == [2; 30_000 - 28_672]);
    assert!(swapped[30_000 - 28_672..4096].iter().all(|&byte| byte == 0));
    for (own, others, len) in [(0, 0, 4096), (1, 8192, 4096), (0, 4096, 100), (0, 32_768, 4096)] {
        let refused = b.exchange_range(own, &b, others, len);
        assert!(matches!(refused, Err(FsError::NotPages { .. })), "{own} {others} {len}");
    }
}

#[test]
fn a_directory_with_the_group_bit_gives_its_group_on() {
    let (_scratch, files) = scratch();
    files.create_dir("d").unwrap();
    files.lchown("d", None, Some(4711)).unwrap();
    files.set_permissions("d", PermissionsExt::from_mode(0o2755)).unwrap();
    files.create_dir("d/e").unwrap();
    files.create_file("d/e/f").unwrap();
    files.symlink("f", "d/e/link").unwrap();
    let of = |path| files.symlink_metadata(path).map(|it| (it.gid(), it.mode() & 0o2000)).unwrap();
    assert_eq!(of("d/e"), (4711, 0o2000));
    assert_eq!((of("d/e/f"), of("d/e/link")), ((4711, 0), (4711, 0)));
}

#[test]
fn emptying_what_is_empty_is_a_change() {
    let (_scratch, files) = scratch();
    files.create_file("f").unwrap();
    let long_ago = std::time::SystemTime::UNIX_EPOCH;
    files.set_times("f", FileTimes::new().set_modified(long_ago)).unwrap();
    files.create_file("f").unwrap();
    assert_ne!(files.metadata("f").unwrap().modified().unwrap(), long_ago);
}

#[test]
fn a_file_that_is_copied_or_moved_to_itself_stays_as_it_is() {
    let (_scratch, files) = scratch();
    files.write("/f", "content").unwrap();
    files.hard_link("/f", "/hard").unwrap();
    files.symlink("f", "/soft").unwrap();
    let before = files.metadata("/f").unwrap();
    let names = ["/f", "/hard", "/soft"];
    for (from, to) in names.iter().flat_map(|from| names.map(|to| (from, to))) {
        let error = files.copy(from, to).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{from} to {to}");
        assert!(error.to_string().contains("same file; copy to another name"), "{error}");
    }
    files.rename("/f", "/f").unwrap();
    files.rename("/f", "/hard").unwrap();
    let file = files.options().read(true).write(true).open("/f").unwrap();
    assert_eq!(file.copy_range(0..7, &file, 3).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(files.read("/hard").unwrap(), b"content");
    let after = files.metadata("/f").unwrap();
    assert_eq!((after.mtime_nsec(), after.nlink()), (before.mtime_nsec(), 2));
    // What has become another file is overwritten, and shorter.
    files.write("/g", "shorter").unwrap();
    files.write("/f", "a long text").unwrap();
    assert_eq!(files.copy("/g", "/soft").unwrap(), 7);
    assert_eq!(files.read("/hard").unwrap(), b"shorter");
}

#[test]
fn symbolic_links_at_the_end_are_as_on_linux() {
    let (_scratch, files) = scratch();
    files.symlink("nothing", "link").unwrap();
    let errno = |path: &str| {
        files.options().write(true).create(true).open(path).map(drop).map_err(|it| it.errno())
    };
    // Whatever it refers to: only a directory would be valid, and that cannot be written to.
    assert_eq!(errno("link/"), Err(libc::EISDIR));
    assert_eq!(errno("link"), Ok(()));
    assert!(files.metadata("nothing").unwrap().is_file());
    files.symlink("nowhere", "other").unwrap();
    assert_eq!(files.create_dir_all("other").unwrap_err().errno(), libc::EEXIST);
    // A target and the rest of the path may together be longer than a path can be.
    files.create_dir("d").unwrap();
    files.create_file("d/f").unwrap();
    files.symlink("./".repeat(2000) + "d", "long").unwrap();
    assert!(files.metadata("long/".to_owned() + &"./".repeat(2000) + "f").unwrap().is_file());
}

#[test]
fn removing_a_tree_removes_a_symbolic_link_and_not_what_it_leads_to() {
    let (_scratch, files) = scratch();
    files.create_dir_all("d/e").unwrap();
    files.create_file("kept").unwrap();
    files.symlink("/", "d/e/up").unwrap();
    files.symlink("d", "link").unwrap();
    files.remove_dir_all("link").unwrap();
    assert_eq!(names(&files, "/"), ["d", "kept"]);
    files.remove_dir_all("d").unwrap();
    assert_eq!(names(&files, "/"), ["kept"]);
    assert_eq!(files.remove_dir_all("kept").unwrap_err().errno(), libc::ENOTDIR);
}

#[test]
fn a_removed_directory_that_is_open_is_no_damage_and_keeps_nothing() {
    let (_scratch, files) = scratch();
    files.create_dir("d").unwrap();
    let directory = files.open_file("d").unwrap();
    let number = directory.metadata().unwrap().ino();
    files.remove_dir("d").unwrap();
    assert_eq!(directory.metadata().unwrap_err().errno(), libc::ENOENT);
    // Another inode has the number, and is removed while the handle is open.
    let free_slots = files.space().unwrap().free_slots;
    let file = (0..).find(|index| {
        let file = files.create_file(format!("{index}")).unwrap();
        file.metadata().unwrap().ino() == number
    });
    for index in 0..=file.unwrap() {
        files.remove_file(format!("{index}")).unwrap();
    }
    assert_eq!(directory.metadata().unwrap_err().errno(), libc::ENOENT);
    drop(directory);
    assert_eq!(files.space().unwrap().free_slots, free_slots);
}
