//! Removing and inserting ranges, finding holes, and writing several ranges at once: one operation
//! at a time, beside a file of the system where that can do it.

use std::os::unix::fs::FileExt;

use crate::scratch::soundness::assert_sound;
use crate::scratch::{Scratch, read_all};
use aquifer_fs::FallocateMode::{CollapseRange, InsertRange, KeepSize, PunchHole, ZeroKeepSize};
use aquifer_fs::{FallocateMode, File, Files, FsError};
use aquifer_pool::{Pool, PoolError};
use rustix::fs::{FallocateFlags, SeekFrom};

const PAGE: u64 = 4096;

fn scene() -> (Scratch, Files) {
    let scratch = Scratch::with_pool(32 << 20, &Pool::options());
    let files = scratch.open();
    (scratch, files)
}

fn create(files: &Files, path: &str) -> File {
    files.options().read(true).write(true).create_new(true).open(path).unwrap()
}

/// Content of which each page has its own byte.
fn pages(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().flat_map(|byte| vec![*byte; PAGE as usize]).collect()
}

fn flags(mode: FallocateMode) -> FallocateFlags {
    match mode {
        CollapseRange => FallocateFlags::COLLAPSE_RANGE,
        InsertRange => FallocateFlags::INSERT_RANGE,
        ZeroKeepSize => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        PunchHole => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        KeepSize => FallocateFlags::KEEP_SIZE,
        FallocateMode::ZeroRange => FallocateFlags::ZERO_RANGE,
        _ => FallocateFlags::empty(),
    }
}

#[test]
fn ranges_are_removed_and_inserted_as_by_the_kernel() {
    let (_scratch, files) = scene();
    // On a disk: tmpfs does neither.
    let theirs = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    theirs.set_len(2 * PAGE).unwrap();
    if let Err(error) = rustix::fs::fallocate(&theirs, flags(CollapseRange), 0, PAGE) {
        println!("skipped: the file system of the build cannot collapse a file: {error}");
        return;
    }
    let operations = [
        (CollapseRange, PAGE, 2 * PAGE),
        (CollapseRange, 0, PAGE),
        (InsertRange, PAGE, 3 * PAGE),
        (InsertRange, 0, PAGE),
        (ZeroKeepSize, 3000, 20 * PAGE),
        (CollapseRange, 100, PAGE),
        (CollapseRange, 0, 100),
        (CollapseRange, 0, 0),
        (InsertRange, 100, PAGE),
        (InsertRange, 0, 100),
        // To the end, and behind it.
        (CollapseRange, 2 * PAGE, 4 * PAGE),
        (CollapseRange, 0, 6 * PAGE),
        (CollapseRange, 8 * PAGE, PAGE),
        (InsertRange, 6 * PAGE, PAGE),
        (InsertRange, 100 * PAGE, PAGE),
        (InsertRange, 5 * PAGE, PAGE),
        (CollapseRange, 1 << 60, PAGE),
        (PunchHole, PAGE, 2 * PAGE),
        (CollapseRange, 2 * PAGE, 2 * PAGE),
    ];
    // Ends inside a page, at the end of one, in a hole; with room behind the end.
    let contents = [
        [pages(&[1, 2, 3, 4, 5]), vec![6; 100]].concat(),
        pages(&[1, 2, 3, 4, 5, 6]),
        [pages(&[1, 2]), vec![0; 3 * PAGE as usize + 1]].concat(),
        pages(&[1]),
    ];
    for (index, content) in contents.iter().enumerate() {
        for has_room in [false, true] {
            let path = format!("/{index}{has_room}");
            let ours = create(&files, &path);
            theirs.set_len(0).unwrap();
            ours.write_all_at(content, 0).unwrap();
            theirs.write_all_at(content, 0).unwrap();
            if has_room {
                ours.allocate(KeepSize, 0, 20 * PAGE).unwrap();
                rustix::fs::fallocate(&theirs, flags(KeepSize), 0, 20 * PAGE).unwrap();
            }
            for (mode, offset, len) in operations {
                let mine = ours.allocate(mode, offset, len).map_err(|error| error.errno());
                let kernel = rustix::fs::fallocate(&theirs, flags(mode), offset, len);
                let kernel = kernel.map_err(|error| error.raw_os_error());
                assert_eq!(mine, kernel, "{mode:?} {offset} {len} of {path}");
                let len = theirs.metadata().unwrap().len();
                assert_eq!(ours.metadata().unwrap().len(), len, "{mode:?} {offset} of {path}");
                let mut expected = vec![0; len as usize];
                theirs.read_exact_at(&mut expected, 0).unwrap();
                assert!(read_all(&files, &path).unwrap() == expected, "{mode:?} of {path}");
            }
        }
    }
    assert_sound(files.pool());
}

#[test]
fn holes_and_data_are_found_as_by_lseek() {
    let (scratch, files) = scene();
    let ours = create(&files, "/sparse");
    let theirs = tempfile::tempfile_in(scratch.directory.path()).unwrap();
    for (page, len) in [(0, 1), (3, 2), (8, 1)] {
        ours.write_all_at(&vec![1; len * PAGE as usize], page * PAGE).unwrap();
        theirs.write_all_at(&vec![1; len * PAGE as usize], page * PAGE).unwrap();
    }
    for len in [9 * PAGE, 8 * PAGE + 100, 8 * PAGE, 7 * PAGE + 1, 10, 0] {
        ours.set_len(len).unwrap();
        theirs.set_len(len).unwrap();
        for offset in (0..11).flat_map(|page| [page * PAGE, page * PAGE + 10]) {
            let seek = |from| rustix::fs::seek(&theirs, from).ok();
            let [data, hole] = [ours.next_data(offset).unwrap(), ours.next_hole(offset).unwrap()];
            assert_eq!(data.as_ref().map(|data| data.start), seek(SeekFrom::Data(offset)));
            assert_eq!(hole.as_ref().map(|hole| hole.start), seek(SeekFrom::Hole(offset)));
            // Each ends where the other begins.
            if let Some(data) = data {
                assert_eq!(ours.next_hole(data.start).unwrap().unwrap().start, data.end);
            }
            if let Some(hole) = hole.filter(|hole| !hole.is_empty()) {
                let next = ours.next_data(hole.start).unwrap();
                assert_eq!(next.map_or(len, |data| data.start), hole.end);
            }
        }
    }
}

#[test]
fn open_files_elsewhere_see_that_pages_have_moved() {
    let (scratch, files) = scene();
    let file = create(&files, "/f");
    file.write_all_at(&pages(&[1, 2, 3, 4]), 0).unwrap();
    // As another process has it.
    let others = scratch.open();
    let other = others.open_file("/f").unwrap();
    let mut byte = [0];
    let mut at = |offset| {
        other.read_exact_at(&mut byte, offset).unwrap();
        byte[0]
    };
    assert_eq!(at(PAGE), 2);
    let view = others.view("/f", ..).unwrap();
    file.allocate(CollapseRange, 0, PAGE).unwrap();
    assert_eq!([at(0), at(PAGE)], [2, 3]);
    file.allocate(InsertRange, PAGE, PAGE).unwrap();
    assert_eq!([at(0), at(PAGE), at(2 * PAGE)], [2, 0, 3]);
    // What freed pages become is not seen in the view, which keeps them.
    files.pool().checkpoint().unwrap();
    create(&files, "/new").write_all_at(&vec![9; 2 << 20], 0).unwrap();
    assert!(
        view.read(|bytes| bytes.to_vec()).unwrap() == pages(&[1, 2, 3, 4]),
        "the view is of its moment"
    );
    assert_eq!([at(0), at(PAGE), at(2 * PAGE)], [2, 0, 3]);
}

#[test]
fn pages_of_a_writable_view_do_not_move() {
    let (_scratch, files) = scene();
    let file = create(&files, "/f");
    file.write_all_at(&pages(&[1, 2, 3]), 0).unwrap();
    let view = file.view_mut(0..100).unwrap();
    for mode in [CollapseRange, InsertRange] {
        let refused = file.allocate(mode, PAGE, PAGE).unwrap_err();
        assert!(matches!(refused, FsError::InUse { .. }), "{refused}");
    }
    let refused = file.write_atomic_ranges(&[(0, b"one"), (PAGE, b"other")]).unwrap_err();
    assert!(matches!(refused, FsError::InUse { .. }), "{refused}");
    drop(view);
    file.allocate(CollapseRange, PAGE, PAGE).unwrap();
    files.set_immutable("/f", true).unwrap();
    // As by the kernel, that comes first.
    for mode in [CollapseRange, InsertRange, ZeroKeepSize, PunchHole] {
        for (offset, len) in [(0, PAGE), (100, 100), (1 << 60, PAGE)] {
            let refused = file.allocate(mode, offset, len).unwrap_err();
            assert!(matches!(refused, FsError::Immutable { .. }), "{mode:?}: {refused}");
        }
    }
    let reader = files.open_file("/f").unwrap();
    assert_eq!(reader.allocate(CollapseRange, 0, PAGE).unwrap_err().errno(), libc::EBADF);
}

#[test]
fn a_range_in_many_pieces_is_removed() {
    let (scratch, files) = scene();
    let one = create(&files, "/one");
    one.write_all_at(&vec![7; 2800 * PAGE as usize], 0).unwrap();
    for page in 0..1400 {
        one.write_all_at(&[page as u8; 10], 2 * page * PAGE).unwrap();
        one.allocate(PunchHole, (2 * page + 1) * PAGE, PAGE).unwrap();
    }
    let mut model = read_all(&files, "/one").unwrap();
    // Nearly all of it moves, in more pieces than a record names.
    one.allocate(CollapseRange, PAGE, PAGE).unwrap();
    model.drain(PAGE as usize..2 * PAGE as usize);
    assert!(read_all(&files, "/one").unwrap() == model);
    one.allocate(CollapseRange, 50 * PAGE, 2400 * PAGE).unwrap();
    model.drain(50 * PAGE as usize..2450 * PAGE as usize);
    assert!(read_all(&files, "/one").unwrap() == model);
    one.allocate(InsertRange, 0, 1 << 40).unwrap();
    assert_eq!(one.metadata().unwrap().len(), model.len() as u64 + (1 << 40));
    one.allocate(CollapseRange, 0, 1 << 40).unwrap();
    assert!(read_all(&files, "/one").unwrap() == model);
    let too_far = one.allocate(InsertRange, 0, 1 << 52).unwrap_err();
    assert!(matches!(too_far, FsError::FileTooLarge), "{too_far}");
    assert_sound(files.pool());
    drop((one, files));
    scratch.assert_clean();
}

#[test]
fn pieces_move_with_the_shortest_log() {
    for pieces in [60, 64, 65, 390, 450, 512, 513] {
        let scratch = Scratch::with_pool(16 << 20, &Pool::options().log_bytes(64 << 10));
        let files = scratch.open();
        let file = create(&files, "/f");
        let len = 2 * pieces * PAGE + 100;
        file.set_len(len).unwrap();
        for index in 0..=pieces {
            file.write_all_at(&[(index % 255) as u8 + 1; 100], 2 * index * PAGE).unwrap();
        }
        let mut model = read_all(&files, "/f").unwrap();
        let mut change = |mode, from: u64, len: u64| {
            file.allocate(mode, from, len).unwrap_or_else(|error| panic!("{pieces}: {error}"));
            let range = from as usize..(from + len) as usize;
            if mode == CollapseRange {
                model.drain(range);
            } else {
                model.splice(range.start..range.start, vec![0; range.len()]);
            }
            assert!(read_all(&files, "/f").unwrap() == model, "{mode:?} with {pieces}");
        };
        change(InsertRange, 0, PAGE);
        change(CollapseRange, 0, PAGE);
        // All move, and then all are removed.
        change(CollapseRange, PAGE, PAGE);
        change(CollapseRange, 0, (2 * pieces - 1) * PAGE);
        assert_sound(files.pool());
    }
}

#[test]
fn zeros_inside_the_file_ask_for_no_room() {
    let (_scratch, files) = scene();
    for mode in [KeepSize, ZeroKeepSize] {
        let path = format!("/{mode:?}");
        let file = create(&files, &path);
        (0..40).for_each(|page| file.write_all_at(&pages(&[1]), page * PAGE).unwrap());
        assert!(file.metadata().unwrap().allocated_bytes() > 40 * PAGE, "more than it needs");
        file.allocate(mode, PAGE, 39 * PAGE).unwrap();
        drop(file);
        assert_eq!(files.metadata(&path).unwrap().allocated_bytes(), 40 * PAGE, "{mode:?}");
    }
}

#[test]
fn several_ranges_are_written_as_one_after_the_other() {
    let (_scratch, files) = scene();
    let file = create(&files, "/f");
    let mut model = vec![7; 50_000];
    file.write_all_at(&model, 0).unwrap();
    let mut put = |parts: &[(u64, &[u8])]| {
        file.write_atomic_ranges(parts).unwrap();
        for (offset, bytes) in parts {
            let (start, end) = (*offset as usize, *offset as usize + bytes.len());
            model.resize(model.len().max(end), 0);
            model[start..end].copy_from_slice(bytes);
        }
        assert!(read_all(&files, "/f").unwrap() == model, "{:?}", parts.first());
    };
    put(&[]);
    put(&[(5, b"")]);
    // In one page, overlapping, out of order, adjacent, across pages, behind the end.
    put(&[(100, b"one"), (200, b"two"), (4090, b"across two pages"), (10_000, b"x")]);
    put(&[(300, b"first"), (301, b"later ones count"), (5, b"before")]);
    put(&[(8192, &[3; 4096]), (12_288, &[4; 4096]), (4096, &[2; 4096])]);
    put(&[(30_000, &[5; 9000]), (29_000, &[6; 3000])]);
    put(&[(8000, b"hidden"), (7000, &[8; 3000]), (7900, b"on top"), (10_000, b"touches")]);
    put(&[(60_000, b"behind"), (10, b"inside"), (100_000, b"far behind")]);
    let all: Vec<(u64, [u8; 3])> =
        (0..700).map(|page| (page * 8192 + page, [page as u8; 3])).collect();
    let all: Vec<(u64, &[u8])> = all.iter().map(|(at, bytes)| (*at, &bytes[..])).collect();
    put(&all);
    let appends = files.options().append(true).open("/f").unwrap();
    let refused = appends.write_atomic_ranges(&[(0, b"x")]).unwrap_err();
    assert!(matches!(refused, FsError::NotOpenFor { .. }), "{refused}");
    let too_far = file.write_atomic_ranges(&[(0, b"x"), (u64::MAX, b"xy")]).unwrap_err();
    assert!(matches!(too_far, FsError::FileTooLarge), "{too_far}");
    assert_sound(files.pool());
}

#[test]
fn room_behind_the_end_is_zero_between_ranges() {
    let (_scratch, files) = scene();
    let file = create(&files, "/f");
    file.write_all_at(&pages(&[1; 16]), 0).unwrap();
    // The pages stay, with their bytes.
    file.set_len(5000).unwrap();
    file.allocate(KeepSize, 0, 16 * PAGE).unwrap();
    file.write_at(&pages(&[2; 16]), 0).unwrap();
    file.set_len(16 * PAGE).unwrap();
    let view = file.view_mut(..).unwrap();
    view.write(0, &pages(&[3; 16])).unwrap();
    drop(view);
    file.set_len(5000).unwrap();
    file.allocate(KeepSize, 0, 16 * PAGE).unwrap();
    file.write_atomic_ranges(&[(6 * PAGE + 5, b"one"), (12 * PAGE + 5, b"two")]).unwrap();
    let mut expected = vec![0; 12 * PAGE as usize + 8];
    expected[..5000].fill(3);
    expected[6 * PAGE as usize + 5..][..3].copy_from_slice(b"one");
    expected[12 * PAGE as usize + 5..].copy_from_slice(b"two");
    assert!(read_all(&files, "/f").unwrap() == expected);
}

#[test]
fn if_there_is_no_room_for_all_ranges_none_is_written() {
    let (_scratch, files) = scene();
    let file = create(&files, "/f");
    file.write_all_at(&pages(&[1; 100]), 0).unwrap();
    let free = files.space().unwrap().free_bytes;
    create(&files, "/rest").allocate(FallocateMode::Extend, 0, free - 10 * PAGE).unwrap();
    let all: Vec<(u64, &[u8])> = (0..30).map(|page| (page * 3 * PAGE, &b"new"[..])).collect();
    let full = file.write_atomic_ranges(&all).unwrap_err();
    assert!(matches!(full, FsError::Pool(PoolError::Full { .. })), "{full}");
    assert!(read_all(&files, "/f").unwrap() == pages(&[1; 100]));
    file.write_atomic_ranges(&all[..10]).unwrap();
}
