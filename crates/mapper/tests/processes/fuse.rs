//! Files on a file system whose server fails, as network file systems do: over FUSE, each test in a
//! process with its own mounts.

#![allow(clippy::single_range_in_vec_init, reason = "a list of ranges may have one")]

use std::fs;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::Path;

use aquifer_mapper::{
    FaultCause, FileAccess, FileView, FlushCause, MapError, Mapper, Stores, ViewOptions,
};
use aquifer_testkit::child;
use aquifer_testkit::faulty_files::FaultyFiles;
use tempfile::TempDir;

/// A view whose stores are private until they are flushed.
const PRIVATE: ViewOptions = ViewOptions::write().stores(Stores::Private);

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
/// Longer than any file that `read_once` reads rather than maps.
const LARGE: u64 = 4 * MIB;

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("unreadable", unreadable),
    ("hangs up", hangs_up),
    ("changes", changes),
    ("unwritable", unwritable),
    ("unwritable shared", unwritable_shared),
    ("unwritable after a fork", unwritable_after_a_fork),
    ("unwritable within a budget", unwritable_within_a_budget),
];

/// Mounts a directory with files of these lengths. `None`, reported to the parent, where that is
/// not possible.
fn mounted(files: &[(&str, u64)]) -> Option<(FaultyFiles, TempDir)> {
    let directory = tempfile::tempdir().unwrap();
    let contents: Vec<Vec<u8>> = files.iter().map(|(_, len)| numbered(*len, 0)).collect();
    let named: Vec<(&str, &[u8])> =
        files.iter().zip(&contents).map(|((name, _), content)| (*name, &content[..])).collect();
    match FaultyFiles::mount(directory.path(), &named) {
        // The mount is dropped before the directory.
        Ok(files) => Some((files, directory)),
        Err(error) => {
            println!("skipped: mounting a file system of one's own needs /dev/fuse: {error}");
            None
        }
    }
}

/// Bytes that encode their offset and version.
fn numbered(len: u64, version: u64) -> Vec<u8> {
    (0..len.div_ceil(8)).flat_map(|word| (word | version << 48).to_le_bytes()).collect::<Vec<_>>()
        [..len as usize]
        .to_vec()
}

fn mapper() -> Mapper {
    Mapper::builder().write_back_bytes_per_second(0).build().unwrap()
}

fn pages(range: Range<u64>) -> Range<u64> {
    range.start * PAGE..range.end * PAGE
}

/// Requires a fault with one of these causes at a byte of `bytes` in a file.
#[track_caller]
fn names<T>(result: Result<T, MapError>, path: &Path, bytes: Range<u64>, causes: &[i32]) {
    match result.map(drop) {
        Err(MapError::Fault { path: named, offset_bytes, cause: FaultCause::Io(errno) }) => {
            assert_eq!(named, path);
            assert!(bytes.contains(&offset_bytes), "{offset_bytes} is not in {bytes:?}");
            assert!(causes.contains(&errno), "{errno}");
        }
        other => panic!("{other:?}"),
    }
}

// ---- reading --------------------------------------------------------------------------------------

fn unreadable() {
    let Some((files, _directory)) = mounted(&[("large", LARGE), ("small", 64 << 10)]) else {
        return;
    };
    let (large, small) = (files.path("large"), files.path("small"));
    files.change("large", |file| file.unreadable = Some((2 * MIB..u64::MAX, libc::EIO)));
    files.change("small", |file| file.unreadable = Some((32 << 10..u64::MAX, libc::EIO)));
    let mapper = mapper();
    let view = mapper.map(&large, FileAccess::Read, ..).unwrap();
    let (bad, eio) = (2 * MIB..LARGE, [libc::EIO]);

    let good = view.read_range(0..2 * MIB, |bytes| bytes.to_vec()).unwrap();
    assert!(good == numbered(2 * MIB, 0));
    names(view.read(|bytes| bytes.to_vec().len()), &large, bad.clone(), &eio);
    names(view.read_exact_at(&mut vec![0; 2 * MIB as usize], MIB), &large, bad.clone(), &eio);
    names(view.get::<u64>(3 * MIB), &large, 3 * MIB..3 * MIB + 8, &eio);
    let scattered = [0..PAGE, 3 * MIB..3 * MIB + PAGE, MIB..MIB + PAGE];
    names(view.touch_many(&scattered), &large, scattered[1].clone(), &eio);
    names(view.prefetch(&scattered).unwrap().wait(), &large, scattered[1].clone(), &eio);
    names(mapper.read_once(&large, |bytes| bytes.to_vec().len()), &large, bad.clone(), &eio);
    match mapper.read_once(&small, |bytes| bytes.len()) {
        Err(MapError::Read { path, source }) => {
            assert_eq!((path, source.raw_os_error()), (small.clone(), Some(libc::EIO)));
        }
        other => panic!("{other:?}"),
    }
    // If no more can be mapped, small files are read at once.
    let full = Mapper::builder().mappings_limit(0).build().unwrap();
    let snapshot = full.map(&small, FileAccess::Read, ..);
    names(snapshot, &small, 0..64 << 10, &eio);
    // A store to a private view reads the page first.
    let writable = mapper.map(&large, PRIVATE, ..).unwrap();
    writable.set(MIB, 7_u64).unwrap();
    names(writable.set(3 * MIB, 7_u64), &large, 3 * MIB..3 * MIB + 8, &eio);
    names(writable.read(|bytes| bytes.to_vec().len()), &large, bad, &eio);
    assert_eq!((writable.get::<u64>(MIB).unwrap(), writable.dirty_bytes().unwrap()), (7, PAGE));

    // The same views show everything once it can be read again.
    for name in ["large", "small"] {
        files.change(name, |file| file.unreadable = None);
    }
    assert!(view.read(|bytes| bytes.to_vec()).unwrap() == numbered(LARGE, 0));
    view.touch_many(&scattered).unwrap();
    let mut wanted = numbered(LARGE, 0);
    wanted[MIB as usize..][..8].copy_from_slice(&7_u64.to_ne_bytes());
    assert!(writable.read(|bytes| bytes.to_vec()).unwrap() == wanted);
    for (path, len) in [(&large, LARGE), (&small, 64 << 10)] {
        assert!(mapper.read_once(path, |bytes| bytes.to_vec()).unwrap() == numbered(len, 0));
    }
}

#[test]
fn bytes_that_the_server_cannot_read_are_named_and_come_back() {
    child::succeeds_with_mounts("unreadable");
}

fn hangs_up() {
    let Some((mut files, _directory)) = mounted(&[("file", LARGE), ("other", LARGE)]) else {
        return;
    };
    let (path, other) = (files.path("file"), files.path("other"));
    let mapper = mapper();
    let view = mapper.map(&path, FileAccess::Read, ..).unwrap();
    let stored = mapper.map(&other, PRIVATE, ..).unwrap();
    stored.set(0, 7_u64).unwrap();
    view.touch_many(&[0..PAGE]).unwrap();
    // The kernel must not already have fetched these pages by read-ahead.
    files.change("file", |file| file.is_silent = true);
    let gone = [libc::ENOTCONN, libc::ECONNABORTED];
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| view.read_range(3 * MIB..LARGE, |bytes| bytes.to_vec().len()));
        files.wait_for_unanswered_read();
        files.hang_up().unwrap();
        names(waiting.join().unwrap(), &path, 3 * MIB..LARGE, &gone);
    });
    let whole = 0..LARGE;
    names(view.read(|bytes| bytes.to_vec().len()), &path, whole.clone(), &gone);
    names(view.get::<u64>(2 * MIB), &path, 2 * MIB..2 * MIB + 8, &gone);
    names(view.touch_many(&[2 * MIB..LARGE]), &path, 2 * MIB..LARGE, &gone);
    names(view.prefetch(&[2 * MIB..LARGE]).unwrap().wait(), &path, 2 * MIB..LARGE, &gone);
    // Stores stay in the view, and a flush reports that they cannot be written.
    assert!(matches!(stored.flush(), Err(MapError::Flush { cause: FlushCause::Io(_), .. })));
    assert_eq!((stored.get::<u64>(0).unwrap(), stored.dirty_bytes().unwrap()), (7, PAGE));
    let refused = [
        mapper.map(&path, FileAccess::Read, ..).map(drop),
        mapper.map(&path, PRIVATE, ..).map(drop),
        mapper.read_once(&path, |_| ()),
        view.file_len_bytes().map(drop),
        mapper.forget(&path),
    ];
    for error in refused.map(Result::unwrap_err) {
        let MapError::Open { source, .. } = &error else { panic!("{error}") };
        assert!(gone.contains(&source.raw_os_error().unwrap()), "{error}");
    }
    drop((view, stored));
    mapper.forget_all().unwrap();
}

#[test]
fn a_server_that_goes_while_a_page_is_waited_for_is_an_error_like_all_later_ones() {
    child::succeeds_with_mounts("hangs up");
}

fn changes() {
    let Some((files, _directory)) = mounted(&[("file", LARGE)]) else { return };
    let (path, mapper) = (files.path("file"), mapper());
    let before = mapper.map(&path, FileAccess::Read, ..).unwrap();
    let shows = |view: &FileView| view.read(|bytes| bytes.to_vec()).unwrap();
    assert!(shows(&before) == numbered(LARGE, 0));
    let lens = [LARGE, MIB + 100, 0, 2 * LARGE, 7];
    for (version, len) in (1..).zip(lens) {
        files.change("file", |file| file.content = numbered(len, version));
        // Dropped each time: if it were parked, the next round would reuse it without opening the
        // file.
        let view = mapper.map(&path, FileAccess::Read, ..).unwrap();
        assert_eq!(view.len_bytes(), len);
        assert!(shows(&view) == numbered(len, version), "version {version}");
        assert!(mapper.read_once(&path, |bytes| bytes.to_vec()).unwrap() == numbered(len, version));
        match before.read(|bytes| bytes.to_vec()) {
            Ok(found) => assert!(found[..] == numbered(len, version)[..LARGE as usize]),
            Err(MapError::Fault { cause: FaultCause::Truncated, offset_bytes, .. }) => {
                assert!((len..LARGE).contains(&offset_bytes), "{offset_bytes} of {len}");
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(mapper.stats().cache.parked, 0, "the server decides what a number stands for");
}

#[test]
fn a_file_that_is_another_when_it_is_opened_again_is_shown_as_it_is() {
    child::succeeds_with_mounts("changes");
}

// ---- storing --------------------------------------------------------------------------------------

/// Stores to three runs of pages, and returns the expected content of the file.
fn store(view: &FileView, version: u64) -> Vec<u8> {
    let (all, mut wanted) = (numbered(LARGE, version), numbered(LARGE, 0));
    for run in [pages(1..2), pages(8..12), pages(200..203)] {
        let bytes = run.start as usize..run.end as usize;
        view.write_all_at(&all[bytes.clone()], run.start).unwrap();
        wanted[bytes.clone()].copy_from_slice(&all[bytes]);
    }
    wanted
}

fn flush_error(view: &FileView) -> (Range<u64>, FlushCause) {
    match view.flush() {
        Err(MapError::Flush { range, cause, .. }) => (range, cause),
        other => panic!("{other:?}"),
    }
}

fn unwritable() {
    let Some((files, _directory)) = mounted(&[("file", LARGE)]) else { return };
    let (path, mapper) = (files.path("file"), mapper());
    let view = mapper.map(&path, PRIVATE, ..).unwrap();
    let causes = [(libc::EIO, FlushCause::Io(libc::EIO)), (libc::ENOSPC, FlushCause::NoSpace)];
    for (version, (errno, cause)) in (1..).zip(causes) {
        let before = files.content("file");
        let wanted = store(&view, version);
        // The write fails at the second page of the second run.
        files.change("file", |file| file.unwritable = Some((pages(9..10), errno)));
        assert_eq!(flush_error(&view), (pages(8..12), cause));
        assert_eq!(view.dirty_bytes().unwrap(), 4 * PAGE, "the others were written");
        let there = files.content("file");
        assert!(there[..pages(8..9).start as usize] == wanted[..pages(8..9).start as usize]);
        assert!(there[pages(12..13).start as usize..] == wanted[pages(12..13).start as usize..]);
        let failed = pages(9..12).start as usize..pages(9..12).end as usize;
        assert!(there[failed.clone()] == before[failed]);
        assert_eq!(flush_error(&view), (pages(8..12), cause), "nor is it forgotten");
        assert!(view.read(|bytes| bytes.to_vec()).unwrap() == wanted);
        files.change("file", |file| file.unwritable = None);
        let written_before = files.change("file", |file| file.written_bytes);
        assert_eq!(view.flush().unwrap().pages, 4);
        assert_eq!(files.change("file", |file| file.written_bytes) - written_before, 4 * PAGE);
        assert!(files.content("file") == wanted);
        assert_eq!(view.dirty_bytes().unwrap(), 0);
    }

    // Written, but not made durable: all of it is written again.
    files.change("file", |file| file.sync_error = Some(libc::EIO));
    let wanted = store(&view, 3);
    let (range, cause) = flush_error(&view);
    assert_eq!((range, cause), (pages(1..203), FlushCause::Lost(libc::EIO)));
    assert_eq!(view.dirty_bytes().unwrap(), 8 * PAGE);
    files.change("file", |file| {
        file.sync_error = None;
        // The server has lost what it did not make durable.
        file.content = numbered(LARGE, 0);
    });
    assert_eq!(view.flush().unwrap().pages, 8);
    assert!(files.content("file") == wanted);

    // No space to grow into.
    files.change("file", |file| file.unwritable = Some((LARGE..u64::MAX, libc::ENOSPC)));
    match view.grow(LARGE + PAGE) {
        Err(MapError::Grow { source, .. }) => {
            assert_eq!(source.raw_os_error(), Some(libc::ENOSPC));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!((view.len_bytes(), fs::metadata(&path).unwrap().len()), (LARGE, LARGE));
    files.change("file", |file| file.unwritable = None);
    view.grow(LARGE + PAGE).unwrap();
    view.set(LARGE, 7_u64).unwrap();
    view.flush().unwrap();
    assert!(files.content("file")[LARGE as usize..][..8] == 7_u64.to_ne_bytes());
}

#[test]
fn what_the_server_does_not_take_stays_dirty_is_named_and_written_again() {
    child::succeeds_with_mounts("unwritable");
}

fn unwritable_shared() {
    let Some((files, _directory)) = mounted(&[("file", LARGE)]) else { return };
    let (path, mapper) = (files.path("file"), mapper());
    let mut view = mapper.map(&path, FileAccess::Write, ..).unwrap();
    for (version, errno) in (1..).zip([libc::EIO, libc::ENOSPC]) {
        files.change("file", |file| file.unwritable = Some((pages(9..10), errno)));
        let wanted = store(&view, version);
        let gone = FlushCause::Gone(errno);
        assert_eq!(flush_error(&view), (0..LARGE, gone));
        assert!(view.read(|bytes| bytes.to_vec()).unwrap() == wanted);
        files.change("file", |file| file.unwritable = None);
        // The kernel has marked the failed pages clean: nothing writes them again.
        for part in [0..LARGE, 0..PAGE] {
            match view.flush_range(part.clone()) {
                Err(MapError::Flush { range, cause, .. }) => {
                    assert_eq!((range, cause), (part, gone))
                }
                other => panic!("{other:?}"),
            }
        }
        // A new view flushes what is stored through it.
        view = mapper.map(&path, FileAccess::Write, ..).unwrap();
        store(&view, version);
        view.flush().unwrap();
        assert!(files.content("file") == wanted);
    }
    // A page that cannot be read can still be stored to by a call: the server accepts the write.
    files.change("file", |file| file.unreadable = Some((3 * MIB..LARGE, libc::EIO)));
    drop(view);
    let view = mapper.map(&path, FileAccess::Write, ..).unwrap();
    names(view.get::<u64>(3 * MIB), &path, 3 * MIB..3 * MIB + 8, &[libc::EIO]);
    view.set(3 * MIB, 9_u64).unwrap();
    assert!(files.content("file")[3 * MIB as usize..][..8] == 9_u64.to_ne_bytes());
}

/// The kernel reports an error once to each open file description.
fn unwritable_after_a_fork() {
    let Some((files, _directory)) = mounted(&[("file", LARGE)]) else { return };
    let view = mapper().map(files.path("file"), FileAccess::Write, ..).unwrap();
    files.change("file", |file| file.unwritable = Some((0..LARGE, libc::EIO)));
    // SAFETY: the child stores, flushes, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: inside the view.
        unsafe { view.as_mut_ptr().unwrap().write_volatile(7) };
        let is_gone = |flushed| {
            let gone = FlushCause::Gone(libc::EIO);
            matches!(flushed, Err(MapError::Flush { cause, .. }) if cause == gone)
        };
        let is_refused = is_gone(view.flush()) && is_gone(view.flush_range(0..PAGE));
        // SAFETY: ends the child without running the parent's destructors or exit handlers.
        unsafe { libc::_exit(i32::from(!is_refused)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    files.change("file", |file| file.unwritable = None);
    for _ in 0..2 {
        assert_eq!(flush_error(&view), (0..LARGE, FlushCause::Gone(libc::EIO)));
    }
}

#[test]
fn a_child_and_its_parent_both_learn_that_a_write_back_has_failed() {
    child::succeeds_with_mounts("unwritable after a fork");
}

/// The kernel takes for clean what it could not write: the page cache has the only copy.
fn unwritable_within_a_budget() {
    let Some((files, _directory)) = mounted(&[("file", LARGE), ("other", LARGE)]) else { return };
    let mapper = Mapper::builder().resident_budget_bytes(64 * PAGE).build().unwrap();
    let view = mapper.map(files.path("file"), FileAccess::Write, ..).unwrap();
    files.change("file", |file| file.unwritable = Some((0..LARGE, libc::EIO)));
    let wanted = store(&view, 1);
    assert_eq!(flush_error(&view), (0..LARGE, FlushCause::Gone(libc::EIO)));
    assert!(view.read(|bytes| bytes.to_vec()).unwrap() == wanted);
    let other = mapper.map(files.path("other"), FileAccess::Read, ..).unwrap();
    let file = fs::File::open(files.path("other")).unwrap();
    let cached =
        || aquifer_sys::memory::cachestat(file.as_fd(), 0, 0).map_or(0, |stat| stat.cached);
    // Again and again, the budget's thread has passed all files when the other one is gone.
    for _ in 0..20 {
        assert_eq!(other.read(|bytes| bytes.to_vec().len()).unwrap() as u64, LARGE);
        while cached() > 64 {
            std::thread::yield_now();
        }
    }
    assert!(view.read(|bytes| bytes.to_vec()).unwrap() == wanted, "it can be written elsewhere");
}

#[test]
fn what_the_server_did_not_take_stays_in_memory_beyond_the_budget() {
    child::succeeds_with_mounts("unwritable within a budget");
}

#[test]
fn a_shared_view_says_that_the_server_did_not_take_what_was_stored() {
    child::succeeds_with_mounts("unwritable shared");
}
