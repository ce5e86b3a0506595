//! Views: bytes of files as memory, and how long they are valid.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use crate::scratch::Scratch;
use aquifer_fs::{FallocateMode, File, FileOptions, Files, FsError, MAX_VIEW_PIECES};
use aquifer_pool::media::WriteWindows;
use aquifer_pool::{Pool, PoolError};

const PAGE: usize = 4096;
const POOL_BYTES: u64 = 32 << 20;

fn scratch() -> (Scratch, Files) {
    let scratch = Scratch::with_pool(POOL_BYTES, &Pool::options());
    let files = scratch.open();
    (scratch, files)
}

fn read_write(files: &Files) -> FileOptions {
    let mut options = files.options();
    options.read(true).write(true).create(true);
    options
}

fn file_of(files: &Files, path: &str, pages: &[u8]) -> File {
    let file = read_write(files).open(path).unwrap();
    let bytes: Vec<u8> = pages.iter().flat_map(|page| [*page; PAGE]).collect();
    file.write_all_at(&bytes, 0).unwrap();
    file
}

/// A file whose pages lie in reverse order.
fn fragmented(files: &Files, path: &str, pages: u8) -> File {
    let backwards: Vec<u8> = (1..=pages).rev().collect();
    let file = file_of(files, path, &backwards);
    let at = |page: u8| u64::from(page) * PAGE as u64;
    for page in 0..pages / 2 {
        file.exchange_range(at(page), &file, at(pages - 1 - page), PAGE as u64).unwrap();
    }
    assert!(file.runs().unwrap().len() > usize::from(pages) / 2);
    file
}

fn bytes_of(view: &aquifer_fs::View<'_>) -> Vec<u8> {
    view.read(|bytes| bytes.to_vec()).unwrap()
}

#[test]
fn a_view_shows_what_a_read_does() {
    let (_scratch, files) = scratch();
    let whole = file_of(&files, "/whole", &[1, 2, 3]);
    let parts = fragmented(&files, "/parts", 9);
    let holes = file_of(&files, "/holes", &[7]);
    holes.write_all_at(&[8; 100], 3 * PAGE as u64 + 50).unwrap();
    files.create_file("/empty").unwrap();
    for (path, file) in [("/whole", &whole), ("/parts", &parts), ("/holes", &holes)] {
        let len = file.metadata().unwrap().len();
        for range in [0..len, 0..1, 5..len, len - 1..len, len..len, 4000..4200] {
            let mut read = vec![0; (range.end - range.start) as usize];
            assert_eq!(file.read_at(&mut read, range.start).unwrap(), read.len());
            for view in [files.view(path, range.clone()), file.view(range.clone())] {
                let view = view.unwrap();
                assert_eq!((view.len(), view.offset_bytes()), (read.len() as u64, range.start));
                assert_eq!(bytes_of(&view), read, "{path} {range:?}");
                let mut copied = vec![0; read.len()];
                view.read_exact_at(&mut copied, 0).unwrap();
                assert_eq!(copied, read);
                // SAFETY: no thread writes to the file while the slice is used.
                assert_eq!(unsafe { view.as_slice() }.unwrap(), read);
            }
        }
    }
    assert!(files.view("/empty", ..).unwrap().is_empty());
}

/// More pieces than a view maps: reads copy, but otherwise it behaves like any view.
#[test]
fn a_view_of_very_many_pieces_shows_what_a_view_does() {
    const PAGES: usize = 2400;
    let (_scratch, files) = scratch();
    let of_page = |page: usize| [page as u8, (page >> 8) as u8].repeat(PAGE / 2);
    let at = |page: usize| (page * PAGE) as u64;
    let file = read_write(&files).open("/f").unwrap();
    let backwards: Vec<u8> = (0..PAGES).rev().flat_map(of_page).collect();
    file.write_all_at(&backwards, 0).unwrap();
    for page in 0..PAGES / 2 {
        file.exchange_range(at(page), &file, at(PAGES - 1 - page), PAGE as u64).unwrap();
    }
    assert!(file.runs().unwrap().len() > 2 * MAX_VIEW_PIECES);
    let expected: Vec<u8> = (0..PAGES).flat_map(of_page).collect();

    for view in [files.view("/f", ..), file.view(..)] {
        let view = view.unwrap();
        assert!(bytes_of(&view) == expected);
        assert!(view.bytes().is_none() && view.is_current());
        // SAFETY: it is `None`, so there is no slice whose bytes could change.
        assert!(unsafe { view.as_slice() }.is_none());
        let across = view.read_range(at(7) - 2..at(7) + 2, |bytes| bytes.to_vec()).unwrap();
        assert_eq!(across, [6, 0, 7, 0]);
        assert_eq!(view.get::<u16>(at(1030)).unwrap(), 1030);
        assert!(matches!(view.get::<u16>(view.len() - 1), Err(FsError::OutsideView { .. })));
    }
    // Stores through the file and through a view are visible in all views.
    let view = file.view(at(3) + 100..).unwrap().into_owned();
    let to_store = file.view_mut(..).unwrap();
    file.write_all_at(&[1; 3], at(4) - 1).unwrap();
    to_store.write(at(5) - 1, &[2; 3]).unwrap();
    to_store.persist(at(4)..at(6)).unwrap();
    assert!(to_store.as_mut_ptr().is_none());
    let seen = |page| view.read_range(at(page) - 101..at(page) - 98, |bytes| bytes.to_vec());
    assert_eq!((seen(1).unwrap(), seen(2).unwrap()), (vec![1; 3], vec![2; 3]));
    assert_eq!(to_store.get::<u8>(at(4)).unwrap(), 1);
    let mut read = [0; 3];
    file.read_at(&mut read, at(5) - 1).unwrap();
    assert_eq!(read, [2; 3]);
    drop(to_store);
    // Pages that replace those of the view are not visible in it; it keeps its own.
    let before = bytes_of(&view);
    file.write_atomic(&[9; PAGE], at(6)).unwrap();
    assert!(!view.is_current());
    files.remove_file("/f").unwrap();
    drop(file);
    for _ in 0..3 {
        let filled = fill(&files);
        files.pool().checkpoint().unwrap();
        assert!(bytes_of(&view) == before);
        (0..filled).for_each(|number| files.remove_file(format!("/fill{number}")).unwrap());
    }
}

/// Islands in a hole.
#[test]
fn a_view_of_very_many_holes_shows_zeros() {
    let (_scratch, files) = scratch();
    let file = read_write(&files).open("/f").unwrap();
    let islands = MAX_VIEW_PIECES as u64;
    file.set_len(islands * 2 * PAGE as u64 + 10).unwrap();
    for island in 0..islands {
        file.write_all_at(&island.to_le_bytes(), island * 2 * PAGE as u64 + 50).unwrap();
    }
    let view = files.view("/f", 50..).unwrap();
    let mut read = vec![1; view.len() as usize];
    assert_eq!(file.read_at(&mut read, 50).unwrap(), read.len());
    assert!(bytes_of(&view) == read && read[read.len() - 10..] == [0; 10]);
    assert_eq!(view.get::<u64>(1000 * 2 * PAGE as u64).unwrap(), 1000);
    // A slice is memory in one piece.
    files.set_immutable("/f", true).unwrap();
    let refused = files.lease("/f", ..).unwrap_err();
    assert!(matches!(refused, FsError::TooFragmented { limit: MAX_VIEW_PIECES, .. }), "{refused}");
    assert_eq!(files.lease("/f", ..PAGE as u64 * 8).unwrap().len(), PAGE * 8);
}

#[test]
fn ranges_and_paths_that_are_none_are_refused() {
    let (_scratch, files) = scratch();
    let file = file_of(&files, "/f", &[1]);
    let backwards = std::ops::Range { start: 9, end: 8 };
    for range in [0..4097, 4097..4097, backwards] {
        let refused = files.view("/f", range.clone()).unwrap_err();
        assert!(matches!(refused, FsError::OutsideFile { len_bytes: 4096, .. }), "{refused}");
        assert!(file.view(range.clone()).is_err() && file.view_mut(range).is_err());
    }
    // Cached by then.
    assert!(matches!(files.view("/f", 1..5000), Err(FsError::OutsideFile { .. })));
    let view = files.view("/f", 10..20).unwrap();
    assert!(matches!(view.get::<u64>(3), Err(FsError::OutsideView { len_bytes: 10, .. })));
    assert!(matches!(view.read_range(5..11, |_| ()), Err(FsError::OutsideView { .. })));
    assert!(matches!(files.view("/", ..), Err(FsError::IsADirectory { .. })));
    assert!(matches!(files.view("/none", ..), Err(FsError::NotFound { .. })));
    assert!(matches!(files.create_file("/g").unwrap().view(..), Err(FsError::NotOpenFor { .. })));
    let read_only = files.open_file("/f").unwrap();
    assert!(matches!(read_only.view_mut(..), Err(FsError::NotOpenFor { .. })));
}

/// A path lookup is cached, but later changes are still seen.
#[test]
fn a_known_path_leads_where_it_leads_now() {
    let (scratch, files) = scratch();
    let other = scratch.open();
    let look = |path: &str| -> Result<Vec<u8>, FsError> {
        let (viewed, read) = (files.view(path, ..), files.read(path));
        assert_eq!(viewed.is_ok(), read.is_ok(), "{path}");
        let (viewed, read) = (bytes_of(&viewed?), read?);
        assert_eq!(viewed, read, "{path}");
        Ok(read)
    };
    file_of(&files, "/a", &[1]);
    file_of(&files, "/b", &[2]);
    files.symlink("a", "/link").unwrap();
    for _ in 0..2 {
        assert_eq!(look("/a").unwrap(), [1; PAGE]);
        assert_eq!(look("/link").unwrap(), [1; PAGE]);
    }
    other.rename("/b", "/a").unwrap();
    assert_eq!(look("/a").unwrap(), [2; PAGE]);
    assert_eq!(look("/link").unwrap(), [2; PAGE]);
    assert!(matches!(look("/b"), Err(FsError::NotFound { .. })));
    // Content changes without name changes.
    let file = read_write(&other).open("/a").unwrap();
    file.write_atomic(&[3; PAGE], 0).unwrap();
    assert_eq!(look("/a").unwrap(), [3; PAGE]);
    file.set_len(5).unwrap();
    assert_eq!(look("/a").unwrap(), [3; 5]);
    file.write_all_at(&[4; 2 * PAGE], 0).unwrap();
    assert_eq!(look("/a").unwrap(), [4; 2 * PAGE]);
    other.remove_file("/a").unwrap();
    assert!(matches!(look("/a"), Err(FsError::NotFound { .. })));
    assert!(matches!(look("/link"), Err(FsError::NotFound { .. })));
    file_of(&other, "/a", &[5]);
    assert_eq!(look("/link").unwrap(), [5; PAGE]);
    other.create_dir("/d").unwrap();
    other.rename("/a", "/d/a").unwrap();
    assert_eq!(look("/d/a").unwrap(), [5; PAGE]);
    other.rename("/d", "/e").unwrap();
    assert!(look("/d/a").is_err());
    assert_eq!(look("/e/a").unwrap(), [5; PAGE]);
}

/// A file that was opened by a cached lookup is read as it is at each time, also when its pages are
/// others than at the lookup, and exists until it is closed.
#[test]
fn a_file_opened_by_a_known_path_is_read_as_it_is() {
    let (scratch, files) = scratch();
    let other = scratch.open();
    let writer = file_of(&other, "/f", &[1, 2]);
    assert_eq!(files.open_file("/f").unwrap().read_at(&mut [0; 9], 0).unwrap(), 9);
    let known = files.open_file("/f").unwrap();
    let read = |offset: usize| {
        let mut bytes = vec![77; 4 * PAGE];
        let got = known.read_at(&mut bytes, offset as u64).unwrap();
        bytes.truncate(got);
        bytes
    };
    assert_eq!(read(PAGE - 1), [&[1][..], &[2; PAGE]].concat());
    assert_eq!(read(2 * PAGE), []);
    writer.set_len(5 * PAGE as u64 / 2).unwrap();
    assert_eq!(read(PAGE), [[2; PAGE].as_slice(), &[0; PAGE / 2]].concat(), "a hole at the end");
    writer.write_all_at(&[3; PAGE], 2 * PAGE as u64).unwrap();
    assert_eq!(read(PAGE), [[2; PAGE], [3; PAGE]].concat(), "other pages");
    writer.write_atomic(&[4; PAGE], 0).unwrap();
    assert_eq!(read(0)[..PAGE], [4; PAGE]);
    writer.set_len(7).unwrap();
    assert_eq!(read(0), [4; 7]);

    // Known again, and removed: it exists as long as it is open, and then no longer.
    assert_eq!(files.read("/f").unwrap(), [4; 7]);
    let again = files.open_file("/f").unwrap();
    other.remove_file("/f").unwrap();
    drop((writer, known));
    assert_eq!(again.read_at(&mut [0; 9], 0).unwrap(), 7);
    assert!(matches!(files.open_file("/f"), Err(FsError::NotFound { .. })));
    let orphans = || other.pool().orphans().unwrap().len();
    assert_eq!(orphans(), 1);
    drop(again);
    assert_eq!(orphans(), 0);
    // Not followed, or for writing, a path is looked up.
    files.write("/g", "text").unwrap();
    files.symlink("g", "/link").unwrap();
    assert_eq!(
        (files.read("/link").unwrap(), files.read("/link").unwrap()),
        (b"text".into(), b"text".into())
    );
    let mut unfollowed = files.options();
    unfollowed.read(true).custom_flags(libc::O_NOFOLLOW);
    assert!(matches!(unfollowed.open("/link"), Err(FsError::LinkLoop { .. })));
    assert!(files.options().read(true).write(true).open("/g").unwrap().write_at(b"T", 0).is_ok());
    assert_eq!(files.read("/g").unwrap(), b"Text");
}

/// Whatever any process does to the file, no other file gets its pages while the view exists.
#[test]
fn a_view_keeps_its_bytes() {
    let (scratch, files) = scratch();
    let writers = scratch.open();
    type Change = fn(&Files);
    let changes: [Change; 6] = [
        |files| files.remove_file("/f").unwrap(),
        |files| drop(files.create_file("/f").unwrap()),
        |files| read_write(files).open("/f").unwrap().set_len(1).unwrap(),
        |files| {
            file_of(files, "/g", &[9; 4]);
            files.rename("/g", "/f").unwrap();
        },
        |files| {
            let file = read_write(files).open("/f").unwrap();
            file.write_atomic(&[9; 4 * PAGE], 0).unwrap();
        },
        |files| {
            let file = read_write(files).open("/f").unwrap();
            file.allocate(FallocateMode::PunchHole, 0, 4 * PAGE as u64).unwrap();
        },
    ];
    for change in changes {
        for is_parts in [false, true] {
            if is_parts {
                drop(fragmented(&files, "/f", 4))
            } else {
                drop(file_of(&files, "/f", &[1, 2, 3, 4]))
            }
            let view = files.view("/f", ..).unwrap();
            let pages: Vec<u8> = (1..=4).flat_map(|page| [page; PAGE]).collect();
            assert!(view.is_current());
            change(&writers);
            // Other files use all of the free space, again and again.
            for round in 0..3 {
                let filled = fill(&writers);
                writers.pool().checkpoint().unwrap();
                assert_eq!(bytes_of(&view), pages, "round {round}");
                (0..filled).for_each(|number| {
                    writers.remove_file(format!("/fill{number}")).unwrap();
                });
            }
            assert!(!view.is_current());
            drop(view);
            let _ = files.remove_file("/f");
        }
    }
}

/// Uses all free space; returns how many files it took.
fn fill(files: &Files) -> usize {
    for number in 0.. {
        let file = files.create_file(format!("/fill{number}")).unwrap();
        if file.write_all_at(&vec![0xee; 1 << 20], 0).is_err() {
            return number + 1;
        }
    }
    unreachable!()
}

#[test]
fn stores_are_seen_and_stay() {
    let (scratch, files) = scratch();
    for is_parts in [false, true] {
        let file = if is_parts {
            fragmented(&files, "/f", 4)
        } else {
            file_of(&files, "/f", &[1, 2, 3, 4])
        };
        let view = file.view_mut(100..3 * PAGE as u64).unwrap();
        view.write(PAGE as u64 - 102, &[9; 4]).unwrap();
        let mut bytes = [0; 6];
        file.read_at(&mut bytes, PAGE as u64 - 3).unwrap();
        assert_eq!(bytes, [1, 9, 9, 9, 9, 2]);
        // SAFETY: inside the view, and no other thread accesses these bytes.
        unsafe { view.as_mut_ptr().unwrap().write(7) };
        assert_eq!(view.get::<u8>(0).unwrap(), 7);
        assert!(matches!(view.write(view.len() - 1, &[0; 2]), Err(FsError::OutsideView { .. })));
        view.flush().unwrap();
        view.persist(5..5).unwrap();
        drop((view, file));
        let other = scratch.open();
        other.open_file("/f").unwrap().read_at(&mut bytes[..1], 100).unwrap();
        assert_eq!(bytes[0], 7);
        files.remove_file("/f").unwrap();
    }
}

/// Write windows of the pool also apply to views: pointers exist only where stores are possible,
/// and `write` works everywhere.
#[test]
fn guarded_views_are_stored_to_in_windows() {
    let (scratch, files) = scratch();
    drop((file_of(&files, "/whole", &[1, 2, 3, 4]), fragmented(&files, "/parts", 4), files));
    for write_windows in [WriteWindows::Calls, WriteWindows::Keys] {
        let options = Pool::options().write_windows(write_windows);
        let files = match options.open(&scratch.path) {
            Err(PoolError::NotOpened(error)) => {
                eprintln!("skipped: {error}");
                continue;
            }
            pool => Files::new(pool.unwrap()),
        };
        for path in ["/whole", "/parts"] {
            let file = read_write(&files).open(path).unwrap();
            let view = file.view_mut(100..3 * PAGE as u64).unwrap();
            view.write(PAGE as u64 - 102, &[9; 4]).unwrap();
            view.write(0, &vec![8; 2 * PAGE]).unwrap();
            let mut bytes = [0; 2];
            file.read_at(&mut bytes, 2 * PAGE as u64 + 99).unwrap();
            assert_eq!(bytes, [8, 3]);
            let window = files.pool().media().write_window();
            match (view.as_mut_ptr(), window, path) {
                // SAFETY: inside the view, in a window of this thread, and no other thread accesses
                // these bytes.
                (Some(first), Some(_window), "/whole") => unsafe { first.write(7) },
                (None, None, _) | (None, Some(_), "/parts") => view.write(0, &[7]).unwrap(),
                other => panic!("{path}, {write_windows}: {other:?}"),
            }
            assert_eq!(view.get::<u8>(0).unwrap(), 7);
            view.flush().unwrap();
            view.write(0, &[3; 3 * PAGE - 100]).unwrap();
        }
    }
    scratch.assert_clean();
}

#[test]
fn holes_get_pages_of_zeros() {
    let (_scratch, files) = scratch();
    // Space that was used before.
    let filled = fill(&files);
    (0..filled).for_each(|number| files.remove_file(format!("/fill{number}")).unwrap());
    let file = file_of(&files, "/f", &[1]);
    file.set_len(1 << 20).unwrap();
    let view = file.view_mut(..).unwrap();
    assert!(bytes_of(&view)[PAGE..].iter().all(|&byte| byte == 0));
    view.write(500_000, b"text").unwrap();
    let mut bytes = [0; 4];
    file.read_at(&mut bytes, 500_000).unwrap();
    assert_eq!(&bytes, b"text");
}

/// No operation replaces pages under a writable view.
#[test]
fn pages_stay_where_they_are_under_a_view_that_is_stored_to() {
    let (scratch, files) = scratch();
    let other = scratch.open();
    let file = file_of(&files, "/f", &[1, 2, 3, 4]);
    let view = file.view_mut(..8192).unwrap();
    let elsewhere = read_write(&other).open("/f").unwrap();
    let third = file_of(&other, "/g", &[9; 4]);
    for file in [&file, &elsewhere] {
        let refused = file.write_atomic(&[5], 0).unwrap_err();
        assert!(matches!(refused, FsError::InUse { .. }), "{refused}");
    }
    assert_eq!(elsewhere.exchange_range(0, &third, 0, 4096).unwrap_err().errno(), libc::EBUSY);
    assert_eq!(third.exchange_range(0, &elsewhere, 0, 4096).unwrap_err().errno(), libc::EBUSY);
    assert_eq!(other.set_immutable("/f", true).unwrap_err().errno(), libc::EBUSY);
    // Operations that leave the pages in place work.
    elsewhere.write_all_at(&[6; 100], 3 * PAGE as u64).unwrap();
    elsewhere.write_all_at(&[6; PAGE], 4 * PAGE as u64).unwrap();
    view.persist(0..8192).unwrap();
    // Operations that remove the pages are detected.
    elsewhere.set_len(PAGE as u64).unwrap();
    view.persist(0..4096).unwrap();
    view.write(4096, &[7; 10]).unwrap();
    assert!(matches!(view.persist(0..8192), Err(FsError::LayoutChanged)));
    assert!(matches!(view.persist(4096..4100), Err(FsError::LayoutChanged)));
    elsewhere.set_len(2 * PAGE as u64).unwrap();
    assert!(matches!(view.flush(), Err(FsError::LayoutChanged)));
    let mut bytes = [1; 10];
    file.read_at(&mut bytes, 4096).unwrap();
    assert_eq!(bytes, [0; 10]);
    drop(view);
    elsewhere.write_atomic(&[5], 0).unwrap();
    elsewhere.exchange_range(0, &third, 0, 4096).unwrap();
}

#[test]
fn a_lease_keeps_a_file_immutable() {
    let (scratch, files) = scratch();
    let other = scratch.open();
    let file = file_of(&files, "/f", &[1, 2]);
    assert!(matches!(files.lease("/f", ..), Err(FsError::NotImmutable { .. })));
    other.set_immutable("/f", true).unwrap();
    let by_path = files.lease("/f", 4000..5000).unwrap();
    assert_eq!(by_path[..96], [1; 96]);
    assert_eq!(by_path[96..], [2; 904]);
    let by_file = file.lease(..1).unwrap().into_owned();
    assert_eq!(*by_file, [1]);
    // A handle opened for writing before cannot write any more.
    assert!(matches!(file.write_all_at(&[9], 0), Err(FsError::Immutable { .. })));
    assert!(matches!(file.view_mut(..), Err(FsError::Immutable { .. })));
    for files in [&files, &other] {
        let refused = files.set_immutable("/f", false).unwrap_err();
        assert!(matches!(refused, FsError::InUse { .. }), "{refused}");
    }
    // The refused calls have left no state behind.
    drop(files.lease("/f", ..).unwrap());
    drop(by_path);
    assert!(other.set_immutable("/f", false).is_err());
    drop(by_file);
    other.set_immutable("/f", false).unwrap();
    assert!(matches!(file.lease(..), Err(FsError::NotImmutable { .. })));
    file.write_all_at(&[9], 0).unwrap();
}

/// Processes that open the pool read-only have views and leases, too.
#[test]
fn readers_have_views() {
    let (scratch, files) = scratch();
    file_of(&files, "/f", &[1, 2]);
    files.set_immutable("/f", true).unwrap();
    let read_only = Pool::options().read_only(true);
    let reader = Files::new(read_only.open(&scratch.path).unwrap());
    let lease = reader.lease("/f", ..).unwrap();
    assert_eq!(lease[4095..4097], [1, 2]);
    assert!(files.set_immutable("/f", false).is_err());
    drop(lease);
    files.set_immutable("/f", false).unwrap();
    let view = reader.view("/f", ..).unwrap();
    files.remove_file("/f").unwrap();
    let filled = fill(&files);
    assert_eq!(bytes_of(&view), [[1; PAGE], [2; PAGE]].concat());
    (0..filled).for_each(|number| files.remove_file(format!("/fill{number}")).unwrap());
}

#[test]
fn a_file_in_very_many_pieces_is_brought_together() {
    let (_scratch, files) = scratch();
    let file = fragmented(&files, "/f", 20);
    let before: Vec<u8> = (1..=20).flat_map(|page| [page; PAGE]).collect();
    let view = files.view("/f", ..).unwrap();
    let done = file.defragment().unwrap();
    assert!(done.runs_before > 1 && done.runs_after == 1, "{done:?}");
    assert_eq!(file.runs().unwrap().len(), 1);
    for view in [view, files.view("/f", ..).unwrap()] {
        assert_eq!(bytes_of(&view), before);
    }
    assert_eq!(file.defragment().unwrap().moved_bytes, 0);
    // Holes stay.
    file.allocate(FallocateMode::PunchHole, 4096, 4096).unwrap();
    file.defragment().unwrap();
    assert_eq!(file.metadata().unwrap().allocated_bytes(), 19 * 4096);
    assert_eq!(file.runs().unwrap().len(), 3);
    let _view = file.view_mut(..4096).unwrap();
    assert_eq!(file.defragment().unwrap_err().errno(), libc::EBUSY);
}

/// Each page of a view holds bytes of one write only, while a writer replaces pages and other files
/// reuse the freed ones.
#[test]
fn views_are_sound_beside_writers() {
    const PAGES: usize = 4;
    let (scratch, files) = scratch();
    let file = file_of(&files, "/f", &[0; PAGES]);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers = [0, 1].map(|_| {
            let files = scratch.open();
            let is_over = &is_over;
            scope.spawn(move || {
                let mut views = 0;
                while !is_over.load(Relaxed) || views == 0 {
                    let view = files.view("/f", ..).unwrap();
                    let bytes = bytes_of(&view);
                    for page in bytes.chunks(PAGE) {
                        assert!(page.iter().all(|byte| *byte == page[0]), "a torn page");
                        assert_ne!(page[0], 0xee, "another file's");
                    }
                    assert_eq!(bytes[0], bytes[PAGES * PAGE - 1], "two layouts in one view");
                    views += 1;
                }
            })
        });
        let churn = scope.spawn(|| {
            let files = scratch.open();
            while !is_over.load(Relaxed) {
                files.create_file("/churn").unwrap().write_all_at(&[0xee; 64 * PAGE], 0).unwrap();
                files.remove_file("/churn").unwrap();
            }
        });
        for round in 0..3000_u32 {
            file.write_atomic(&[(round % 200) as u8; PAGES * PAGE], 0).unwrap();
        }
        is_over.store(true, Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        churn.join().unwrap();
    });
}

/// Views do not work in a forked child.
#[test]
fn a_fork_has_no_views() {
    let (_scratch, files) = scratch();
    let file = fragmented(&files, "/f", 4);
    let (whole, parts) = (file.view(..10).unwrap(), file.view(..).unwrap());
    let stored = [file.view_mut(..10).unwrap(), file.view_mut(..).unwrap()];
    file_of(&files, "/g", &[5]);
    files.set_immutable("/g", true).unwrap();
    let lease = files.lease("/g", ..).unwrap();
    // SAFETY: the child makes only a few calls, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = |outcome: Result<(), FsError>| {
            matches!(outcome, Err(FsError::Pool(aquifer_pool::PoolError::Forked)))
        };
        let views = [&whole, &parts, &stored[0], &stored[1], lease.view()];
        let is_refused = forked(files.view("/f", ..).map(drop))
            && file.view_mut(..10).is_err()
            && views.iter().all(|view| {
                forked(view.read(|_| ()))
                    && forked(view.read_exact_at(&mut [0], 0))
                    && view.bytes().is_none()
                    && !view.is_current()
            })
            && stored.iter().all(|view| {
                forked(view.write(0, b"x"))
                    && forked(view.persist(0..1))
                    && view.as_mut_ptr().is_none()
            });
        drop((whole, parts, stored, lease));
        // SAFETY: ends the child without running any of the parent's destructors.
        unsafe { libc::_exit(i32::from(!is_refused)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    stored[1].write(3 * PAGE as u64, &[4; 10]).unwrap();
    drop(stored);
    assert_eq!(lease[..], [5; PAGE]);
    file.write_atomic(&[9; 100], 0).unwrap();
    assert_eq!(whole.get::<u8>(0).unwrap(), 1);
    assert_eq!(bytes_of(&parts)[3 * PAGE..], [4; PAGE]);
}

/// Files of a directory that is known by its path are found where the path leads now.
#[test]
fn a_known_directory_is_the_one_that_the_path_leads_to() {
    let (_scratch, files) = scratch();
    let text = |path: &str| -> Result<Vec<u8>, FsError> {
        assert_eq!(files.metadata(path).is_ok(), files.view(path, ..).is_ok(), "{path}");
        files.view(path, ..)?.read(|bytes| bytes.to_vec())
    };
    files.create_dir_all("a/b").unwrap();
    for name in ["x", "y", "z"] {
        files.write(format!("a/b/{name}"), name).unwrap();
    }
    assert_eq!((text("a/b/x").unwrap(), text("a/b/y").unwrap()), (b"x".into(), b"y".into()));
    assert!(matches!(text("a/b/none"), Err(FsError::NotFound { .. })));
    assert!(matches!(text("a/b/x/y"), Err(FsError::NotADirectory { .. })));
    assert!(matches!(files.view("a/b/z/", ..), Err(FsError::NotADirectory { .. })));

    files.rename("a", "c").unwrap();
    assert!(matches!(text("a/b/z"), Err(FsError::NotFound { .. })));
    assert_eq!(text("c/b/z").unwrap(), b"z");
    files.create_dir_all("a/b").unwrap();
    files.write("a/b/z", "another").unwrap();
    assert_eq!(text("a/b/z").unwrap(), b"another");

    // Links as the last component, and before it.
    files.symlink("../../c/b/y", "a/b/link").unwrap();
    assert_eq!(text("a/b/link").unwrap(), b"y");
    assert_eq!(text("a/b/z").unwrap(), b"another");
    assert!(files.symlink_metadata("a/b/link").unwrap().is_symlink());
    files.symlink("../c/b", "a/d").unwrap();
    assert_eq!((text("a/d/x").unwrap(), text("a/d/y").unwrap()), (b"x".into(), b"y".into()));
    files.remove_file("a/d").unwrap();
    files.create_dir("a/d").unwrap();
    assert!(matches!(text("a/d/x"), Err(FsError::NotFound { .. })));
}
