//! Space of files: in pieces, in holes, left by dead processes.

use std::io::{ErrorKind, Seek, Write};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use crate::scratch::soundness::assert_sound;
use crate::scratch::{Scratch, read_all};
use aquifer_fs::{At, FallocateMode, File, FileOptions, Files, FsError, SetMode, WriteHow};
use aquifer_pool::{Pool, PoolError, PoolOptions, Reservation};

pub const ROLES: &[aquifer_testkit::child::Role] = &[("no addresses", no_addresses)];

const PAGE: usize = 4096;
/// More than a process can reserve at a time.
const PIECES: usize = 700;

fn options(files: &Files) -> FileOptions {
    let mut options = files.options();
    options.read(true).write(true).create(true);
    options
}

fn create(inodes: u64, log_bytes: u64) -> PoolOptions {
    Pool::options().inodes(inodes).log_bytes(log_bytes)
}

/// A pool whose free pages are [`PIECES`] pieces of one page each.
fn in_pieces() -> (Scratch, Files) {
    let scratch = Scratch::with_pool(8 << 20, &create(4095, 128 << 10));
    let files = scratch.open();
    let mut made = 0;
    while let Ok(()) =
        files.create_file(format!("{made}")).and_then(|file| file.write_all_at(&[1; PAGE], 0))
    {
        made += 1;
    }
    files.remove_file(format!("{made}")).unwrap();
    assert!(made > 2 * PIECES);
    for index in 0..PIECES {
        files.remove_file(format!("{}", 2 * index)).unwrap();
    }
    files.pool().checkpoint().unwrap();
    let space = files.space().unwrap();
    assert_eq!((space.free_bytes, space.largest_free_bytes), ((PIECES * PAGE) as u64, PAGE as u64));
    (scratch, files)
}

/// What a call could have counts as free, though it waits for a checkpoint; what a view keeps does not.
#[test]
fn what_is_removed_is_free_at_once() {
    const BYTES: usize = 4 << 20;
    let scratch = Scratch::with_pool(8 << 20, &create(100, 128 << 10));
    let files = Files::new(Pool::options().background(false).open(&scratch.path).unwrap());
    let free_bytes = || files.space().unwrap().free_bytes;
    let before = free_bytes();
    files.write("/f", vec![1; BYTES]).unwrap();
    let file = options(&files).open("/f").unwrap();
    let view = file.view(0..BYTES as u64).unwrap();
    file.set_len(0).unwrap();
    assert_eq!(free_bytes(), before - BYTES as u64);
    files.pool().checkpoint().unwrap();
    assert_eq!(free_bytes(), before - BYTES as u64);
    drop(view);
    assert_eq!(free_bytes(), before);
    files.write("/g", vec![1; BYTES]).unwrap();
    files.remove_file("/g").unwrap();
    assert!(files.pool().room().unwrap().free_pages * (PAGE as u64) < before);
    assert_eq!(free_bytes(), before);
    assert_eq!(file.write_at(&vec![1; before as usize], 0).unwrap() as u64, before);
    assert_eq!(free_bytes(), 0);
}

/// Bytes in which no two pages are equal.
fn pattern(pages: usize) -> Vec<u8> {
    (0..pages * PAGE / 8).flat_map(|word| (word as u64).to_le_bytes()).collect()
}

#[test]
fn a_file_takes_all_pieces_that_are_free() {
    let (scratch, files) = in_pieces();
    let file = options(&files).open("big").unwrap();
    file.write_all_at(&pattern(PIECES), 0).unwrap();
    assert!(read_all(&files, "big").unwrap() == pattern(PIECES));
    let full = file.write_all_at(&[1], (PIECES * PAGE) as u64).unwrap_err();
    assert_eq!(full.errno(), libc::ENOSPC);
    file.set_len(0).unwrap();
    file.allocate(FallocateMode::Extend, 0, (PIECES * PAGE) as u64).unwrap();
    assert!(read_all(&files, "big").unwrap() == vec![0; PIECES * PAGE]);
    assert_sound(files.pool());
    drop((file, files));
    scratch.assert_clean();
}

/// As on Linux: the next write reports the error.
#[test]
fn a_write_that_fills_the_pool_says_how_much_it_wrote() {
    let (_scratch, files) = in_pieces();
    let bytes = pattern(PIECES + 100);
    let mut file = options(&files).open("big").unwrap();
    let written = file.write(&bytes).unwrap();
    assert!(0 < written && written < bytes.len(), "{written}");
    assert!(read_all(&files, "big").unwrap() == bytes[..written]);
    assert_eq!(file.stream_position().unwrap(), written as u64);
    let full = file.write_at(&bytes[written..], written as u64).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    assert!(file.write_all_at(&bytes, 0).is_err());
    assert_sound(files.pool());
}

/// A caller that needs all bytes gets the error, and knows which bytes are there.
#[test]
fn a_write_that_ends_early_has_a_count_and_an_error() {
    let (_scratch, files) = in_pieces();
    let bytes = pattern(PIECES + 100);
    let file = options(&files).open("big").unwrap();
    let how = WriteHow::default();
    for at in [At::Offset(0), At::End] {
        file.set_len(0).unwrap();
        let written = file.write_with(&bytes, at, how);
        let range = written.range();
        assert!(range.start == 0 && 0 < range.end && range.end < bytes.len() as u64, "{range:?}");
        assert!(read_all(&files, "big").unwrap() == bytes[..range.end as usize]);
        assert_eq!(written.all().unwrap_err().kind(), ErrorKind::StorageFull);
    }
    // As `write(2)`: what was written counts.
    file.set_len(0).unwrap();
    assert!(!file.write_with(&bytes, At::End, how).part().unwrap().is_empty());
    assert!(file.write_with(&bytes, At::End, how).part().is_err());
    assert_sound(files.pool());
}

#[test]
fn a_copy_that_ends_early_has_a_count_and_an_error() {
    let (_scratch, files) = in_pieces();
    let from = options(&files).open("from").unwrap();
    let bytes = pattern(PIECES - 200);
    from.write_all_at(&bytes, PAGE as u64).unwrap();
    let to = options(&files).open("to").unwrap();
    // A hole comes first.
    let range = 0..(bytes.len() + PAGE) as u64;
    let copied = from.copy_range_with(range.clone(), &to, 0, WriteHow::default());
    let end = copied.range().end;
    assert!(PAGE as u64 * 65 < end && end < range.end, "{end}");
    assert_eq!(copied.all().unwrap_err().kind(), ErrorKind::StorageFull);
    let expected = [vec![0; PAGE], bytes].concat();
    assert!(read_all(&files, "to").unwrap() == expected[..end as usize]);
    assert!(from.copy_range(range, &to, 0).is_err());
    assert_sound(files.pool());
}

/// Pages come first: without room for all of them, each byte stays as it is.
#[test]
fn a_range_that_finds_no_room_is_not_zeroed() {
    for mode in [FallocateMode::ZeroRange, FallocateMode::ZeroKeepSize, FallocateMode::Extend] {
        let (_scratch, files) = in_pieces();
        let file = options(&files).open("big").unwrap();
        let bytes = pattern(10);
        file.write_all_at(&bytes, 0).unwrap();
        let full = file.allocate(mode, 100, (PIECES * PAGE) as u64).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::StorageFull);
        assert!(read_all(&files, "big").unwrap() == bytes, "{mode:?}");
        // A range that finds room.
        file.allocate(mode, 100, (9 * PAGE) as u64).unwrap();
        let mut expected = bytes.clone();
        if mode != FallocateMode::Extend {
            expected[100..][..9 * PAGE].fill(0);
        }
        assert!(read_all(&files, "big").unwrap() == expected, "{mode:?}");
        assert_sound(files.pool());
    }
}

#[test]
fn what_is_replaced_at_once_must_be_reserved_at_once() {
    let (_scratch, files) = in_pieces();
    let file = options(&files).open("big").unwrap();
    file.write_all_at(&[7; PAGE], 0).unwrap();
    let refused = file.write_atomic(&pattern(PIECES - 1), 0).unwrap_err();
    assert_eq!(refused.errno(), libc::ENOSPC, "{refused}");
    assert!(read_all(&files, "big").unwrap() == [7; PAGE]);
    file.write_atomic(&pattern(300), 0).unwrap();
    assert!(read_all(&files, "big").unwrap() == pattern(300));
    assert_sound(files.pool());
}

/// If the appended bytes cannot be mapped, nothing is appended.
#[test]
fn a_file_stays_as_long_as_it_is_if_there_are_no_addresses_for_what_is_appended() {
    aquifer_testkit::child::succeeds("no addresses");
}

fn no_addresses() {
    let (_scratch, files) = in_pieces();
    let file = options(&files).open("f").unwrap();
    file.write_all_at(b"text", 0).unwrap();
    let holes = options(&files).open("holes").unwrap();
    let mut sizes = (12..44).rev().map(|bits| 1_u64 << bits);
    let mut taken = Vec::new();
    let mut size_bytes = sizes.next();
    while let Some(bytes) = size_bytes {
        holes.set_len(bytes).unwrap();
        match holes.view(..) {
            Ok(view) => taken.push(view.into_owned()),
            Err(error) => {
                assert_eq!(error.errno(), libc::ENOMEM, "{error}");
                size_bytes = sizes.next();
            }
        }
    }
    let allocated_bytes = file.metadata().unwrap().allocated_bytes();
    let refused = file.append_view(3 * PAGE as u64).map(drop).unwrap_err();
    assert!(matches!(refused, FsError::Stitch(_)), "{refused}");
    let metadata = file.metadata().unwrap();
    assert_eq!((metadata.len(), metadata.allocated_bytes()), (4, allocated_bytes));
    drop(taken);
    file.append_view(3 * PAGE as u64).unwrap().write(0, b" more").unwrap();
    assert_eq!(read_all(&files, "f").unwrap()[..10], *b"text more\0");
    assert_sound(files.pool());
}

/// If there is no better place, bytes stay where they are.
#[test]
fn a_file_is_not_brought_to_more_pieces_than_it_has() {
    let scratch = Scratch::with_pool(4 << 20, &create(2047, 64 << 10));
    let files = scratch.open();
    let [file, other, room] = ["f", "other", "room"].map(|name| {
        let file = options(&files).open(name).unwrap();
        file.write_all_at(&pattern(100), 0).unwrap();
        file
    });
    file.exchange_range(0, &other, 0, (50 * PAGE) as u64).unwrap();
    let mut made = 0;
    while let Ok(()) =
        files.create_file(format!("{made}")).and_then(|file| file.write_all_at(&[1; PAGE], 0))
    {
        made += 1;
    }
    for index in (0..made).step_by(2) {
        files.remove_file(format!("{index}")).unwrap();
    }
    // Only single pages; a place for more than half; a place for everything.
    for (kept_pages, runs, moved_pages) in [(100, 2, 0), (30, 2, 0), (0, 1, 100)] {
        room.set_len(kept_pages * PAGE as u64).unwrap();
        files.pool().checkpoint().unwrap();
        assert!(files.space().unwrap().free_bytes > 100 * PAGE as u64);
        for moved_pages in [moved_pages, 0] {
            let done = file.defragment().unwrap();
            assert_eq!(
                (done.runs_before, done.runs_after),
                (if moved_pages > 0 { 2 } else { runs }, runs)
            );
            assert_eq!(done.moved_bytes, moved_pages * PAGE as u64);
            assert_eq!(file.runs().unwrap().len(), runs);
        }
    }
    assert!(read_all(&files, "f").unwrap() == pattern(100));
    // Two runs with a hole in between, wherever they lie.
    file.allocate(FallocateMode::PunchHole, 10 * PAGE as u64, PAGE as u64).unwrap();
    let done = file.defragment().unwrap();
    assert_eq!((done.runs_before, done.runs_after, done.moved_bytes), (2, 2, 0));
    assert_sound(files.pool());
}

#[test]
fn any_number_of_holes_is_filled_and_made() {
    // A log in which one transaction cannot hold all of them.
    let scratch = Scratch::with_pool(32 << 20, &create(4095, 64 << 10));
    let files = scratch.open();
    let pages = 5000;
    let file = options(&files).open("f").unwrap();
    file.write_all_at(&pattern(pages), 0).unwrap();
    for page in (0..pages as u64).step_by(2) {
        file.allocate(FallocateMode::PunchHole, page * PAGE as u64, PAGE as u64).unwrap();
    }
    let half = file.metadata().unwrap();
    assert_eq!(half.allocated_bytes(), (pages / 2 * PAGE) as u64);
    file.allocate(FallocateMode::PunchHole, 0, (pages * PAGE) as u64).unwrap();
    let none = file.metadata().unwrap();
    assert_eq!((none.allocated_bytes(), none.len()), (0, half.len()));
    for page in (0..300).step_by(2) {
        file.write_all_at(&[1; 10], page * PAGE as u64).unwrap();
    }
    file.write_all_at(&pattern(300), 0).unwrap();
    let mut found = vec![0; 300 * PAGE];
    file.read_at(&mut found, 0).unwrap();
    assert!(found == pattern(300));
    assert_sound(files.pool());
    drop((file, files));
    scratch.assert_clean();
}

#[test]
fn a_caller_without_a_reservation_waits_for_the_others() {
    let scratch = Scratch::with_pool(8 << 20, &Pool::options());
    let files = scratch.open();
    let file = options(&files).open("f").unwrap();
    let mut reserved = Vec::new();
    let refused = loop {
        match files.pool().reserve(1, 1) {
            Ok(pages) => reserved.push(pages),
            Err(error) => break error,
        }
    };
    let all = reserved.len();
    assert!(matches!(refused, PoolError::TooManyReservations { limit } if limit == all));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| file.write_all_at(&[1; PAGE], 0));
        (0..1000).for_each(|_| std::thread::yield_now());
        reserved.pop();
        writer.join().unwrap().unwrap();
    });
}

/// Reserves `count` pages, one piece each.
fn hold(files: &Files, count: usize) -> Vec<Reservation<'_>> {
    (0..count).map(|_| files.pool().reserve(1, 1).unwrap()).collect()
}

/// A call that needs more reservations at once than are left waits for other callers to give theirs
/// back, in its own process or in another one.
#[test]
fn what_needs_many_pieces_at_once_waits_for_those_of_others() {
    type Call = fn(&File) -> Result<(), FsError>;
    let calls: [Call; 2] = [
        |file| file.append_view(300 * PAGE as u64).map(drop),
        |file| file.write_atomic(&pattern(300), 0),
    ];
    for call in calls {
        let (scratch, files) = in_pieces();
        let file = options(&files).open("big").unwrap();
        // Leaves too few of the reservations that a process can have at a time.
        let held = hold(&files, 400);
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| call(&file));
            while !caller.is_finished() && files.pool().reserve(1, 1).is_ok() {
                std::thread::yield_now();
            }
            drop(held);
            caller.join().unwrap().unwrap();
        });
        file.set_len(0).unwrap();
        files.pool().checkpoint().unwrap();
        // Leaves too few of the free pages.
        let other = scratch.open();
        let held = hold(&other, 500);
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| call(&file));
            while !caller.is_finished() && other.pool().info().unwrap().free_pages > 0 {
                std::thread::yield_now();
            }
            drop(held);
            caller.join().unwrap().unwrap();
        });
        assert_eq!(file.metadata().unwrap().len(), (300 * PAGE) as u64);
        assert_sound(files.pool());
    }
}

/// Several such calls do not deadlock, and none fails that could succeed.
#[test]
fn calls_that_need_many_pieces_at_once_get_them_one_after_the_other() {
    let (_scratch, files) = in_pieces();
    std::thread::scope(|scope| {
        for number in 0..4 {
            let files = &files;
            scope.spawn(move || {
                let file = options(files).open(format!("big {number}")).unwrap();
                for _ in 0..3 {
                    drop(file.append_view(170 * PAGE as u64).unwrap());
                    file.set_len(0).unwrap();
                }
            });
        }
    });
    assert_sound(files.pool());
}

/// Creates and removes a file that fills most of the pool. Returns it open through a read-only pool
/// handle, which cannot free it.
fn removed_while_read(scratch: &Scratch, files: &Files) -> (File, u64) {
    let len = files.space().unwrap().free_bytes / 4 * 3;
    files.create_file("f").unwrap().write_all_at(&vec![1; len as usize], 0).unwrap();
    let read_only = Pool::options().read_only(true);
    let reader = Files::new(read_only.open(&scratch.path).unwrap());
    let read = reader.open_file("f").unwrap();
    files.remove_file("f").unwrap();
    assert_eq!(read.read_at(&mut [0; 10], len - 10).unwrap(), 10);
    (read, len)
}

#[test]
fn what_a_reader_had_open_is_free_when_pages_are_wanted() {
    let scratch = Scratch::with_pool(4 << 20, &create(127, 64 << 10));
    let files = scratch.open();
    let (read, len) = removed_while_read(&scratch, &files);
    let file = options(&files).open("g").unwrap();
    let bytes = vec![2; len as usize];
    assert_eq!(file.write_all_at(&bytes, 0).unwrap_err().errno(), libc::ENOSPC, "it is still read");
    assert_eq!(read.read_at(&mut [0; 10], len - 10).unwrap(), 10);
    drop(read);
    file.write_all_at(&bytes, 0).unwrap();
    assert!(read_all(&files, "g").unwrap() == bytes);
    assert_sound(files.pool());
}

#[test]
fn what_a_reader_had_open_is_free_when_inodes_are_wanted() {
    let scratch = Scratch::with_pool(4 << 20, &create(127, 64 << 10));
    let files = scratch.open();
    let (read, _) = removed_while_read(&scratch, &files);
    files.create_file("g").unwrap();
    // One slot more at a time.
    let grow = |len| files.set_attribute("g", "user.a", vec![0; len], SetMode::Any);
    let (len, full) = (400..).step_by(400).find_map(|len| Some((len, grow(len).err()?))).unwrap();
    assert!(matches!(full, FsError::Pool(PoolError::NoFreeInode { .. })), "{full}");
    drop(read);
    grow(len).unwrap();
    assert_sound(files.pool());
}

#[test]
fn opening_a_file_during_its_removal_does_not_keep_it() {
    let scratch = Scratch::with_pool(4 << 20, &Pool::options());
    let files = scratch.open();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Relaxed) {
                let _ = files.open_file("f");
            }
        });
        for _ in 0..20_000 {
            drop(files.create_file("f").unwrap());
            files.remove_file("f").unwrap();
        }
        is_done.store(true, Relaxed);
    });
    assert_eq!(files.pool().orphans().unwrap(), [0; 0]);
}

#[test]
fn what_is_too_many_pieces_to_be_exchanged_at_once_is_exchanged_in_parts() {
    const RUNS: u64 = 4200;
    let scratch = Scratch::with_pool(64 << 20, &create(4095, 4 << 20));
    let files = scratch.open();
    let [sparse, other, empty] =
        ["sparse", "other", "empty"].map(|name| options(&files).open(name).unwrap());
    let page = |index: u64| 2 * index * PAGE as u64;
    sparse.set_len(page(RUNS)).unwrap();
    empty.set_len(page(RUNS)).unwrap();
    other.set_len(page(RUNS)).unwrap();
    for index in 0..RUNS {
        sparse.write_all_at(&index.to_le_bytes(), page(index)).unwrap();
        // So that these pages are apart in the pool as well.
        other.write_all_at(&[1], page(index)).unwrap();
    }
    let before = read_all(&files, "sparse").unwrap();
    let refused = sparse.exchange_range(0, &empty, 0, page(RUNS)).unwrap_err();
    assert!(matches!(refused, FsError::Pool(PoolError::TooManyRuns { .. })), "{refused}");
    assert_eq!(refused.errno(), libc::E2BIG);
    assert!(read_all(&files, "sparse").unwrap() == before);
    for part in [0, RUNS / 2] {
        sparse.exchange_range(page(part), &empty, page(part), page(RUNS / 2)).unwrap();
    }
    assert!(read_all(&files, "empty").unwrap() == before);
    assert_eq!(sparse.metadata().unwrap().allocated_bytes(), 0);
    assert_sound(files.pool());
}

/// Extra room that a file was given to grow into is freed on close; room that any process has
/// allocated explicitly is not.
#[test]
fn room_that_another_process_asked_for_stays() {
    let scratch = Scratch::with_pool(8 << 20, &Pool::options());
    let (files, other) = (scratch.open(), scratch.open());
    let allocated = || files.metadata("f").unwrap().allocated_bytes();
    let grow = || {
        let file = options(&files).open("f").unwrap();
        (0..40).for_each(|page| file.write_all_at(&[1; PAGE], page * PAGE as u64).unwrap());
        assert!(allocated() > 40 * PAGE as u64, "it is given more than it needs");
        file
    };
    drop(grow());
    assert_eq!(allocated(), 40 * PAGE as u64);
    files.remove_file("f").unwrap();

    let file = grow();
    let wanted = options(&other).open("f").unwrap();
    wanted.allocate(FallocateMode::KeepSize, 0, 100 * PAGE as u64).unwrap();
    drop(file);
    assert!(allocated() >= 100 * PAGE as u64);
    drop(wanted);
    assert!(allocated() >= 100 * PAGE as u64);

    // Allocated room stays only until the file is truncated or removed.
    other.create_file("f").unwrap();
    drop(grow());
    assert_eq!(allocated(), 40 * PAGE as u64);
    let file = options(&other).open("f").unwrap();
    file.allocate(FallocateMode::KeepSize, 0, 100 * PAGE as u64).unwrap();
    drop(file);
    let inode = files.metadata("f").unwrap().ino();
    files.remove_file("f").unwrap();
    drop(grow());
    assert_eq!((files.metadata("f").unwrap().ino(), allocated()), (inode, 40 * PAGE as u64));
    assert_sound(files.pool());
}
