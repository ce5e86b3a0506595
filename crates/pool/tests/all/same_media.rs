//! Opening the media of an open pool a second time: locks belong to open files and do not separate
//! such openers, so they are refused by other means.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use crate::support::*;
use aquifer_check::CheckOptions;
use aquifer_pool::media::{self, Media};
use aquifer_pool::{Pool, PoolError};
use aquifer_sys::lock::{self, LockKind, LockRange};

const POOL_BYTES: usize = 512 << 10;

fn is_refused<T>(outcome: Result<T, PoolError>) {
    match outcome {
        Err(PoolError::MediaInUse { .. }) => {}
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("it was not refused"),
    }
}

/// Asserts that everything that needs the media exclusively is refused.
fn assert_all_are_refused(media: &Arc<dyn Media>) {
    let read_only = alone().read_only(true);
    for options in [shared(), alone(), reading(), read_only] {
        is_refused(options.open_on(media.clone()));
    }
    is_refused(Pool::grow_on(
        media.clone(),
        POOL_BYTES as u64 * 2,
        &Pool::options(),
        &mut |_, _| (),
    ));
    is_refused(aquifer_check::repair(media.clone(), &CheckOptions::default()));
    is_refused(small(alone()).create_on(media.clone()));
    is_refused(small(Pool::options()).format(media));
}

#[test]
fn media_of_an_open_pool_are_refused() {
    for (options, is_writing) in [(shared(), true), (alone(), true), (reading(), false)] {
        let media: Arc<dyn Media> = FileMedia::of(&sample::crashed_image(POOL_BYTES));
        if !is_writing {
            // Recovered before, so that a reader can show everything.
            drop(alone().open_on(media.clone()).unwrap());
        }
        let pool = options.open_on(media.clone()).unwrap();
        let mut superblocks = [0; 8192];
        media.read_at(0, &mut superblocks).unwrap();
        assert_all_are_refused(&media);
        let mut now = [0; 8192];
        media.read_at(0, &mut now).unwrap();
        assert!(now == superblocks, "nothing was changed under the open pool");
        if is_writing {
            sample::commit(&pool, &[("alpha", 0)], 99).unwrap();
            assert!(
                aquifer_check::check(media.clone(), &CheckOptions::default()).unwrap().is_in_use
            );
        }
        drop(pool);
        // One after another they are accepted.
        drop(shared().open_on(media.clone()).unwrap());
        Pool::grow_on(media.clone(), POOL_BYTES as u64 * 2, &Pool::options(), &mut |_, _| ())
            .unwrap();
        aquifer_check::repair(media.clone(), &CheckOptions::default()).unwrap();
        assert!(!aquifer_check::check(media.clone(), &CheckOptions::default()).unwrap().is_in_use);
        drop(small(alone()).media_is_used(true).create_on(media).unwrap());
    }
}

/// A refused opening releases no lock of the open pool.
#[test]
fn a_refused_opening_leaves_the_locks_of_the_first() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    let media: Arc<dyn Media> = FileMedia::open(&path);
    let first = alone().open_on(media.clone()).unwrap();
    assert_all_are_refused(&media);
    let quick = shared().stall_timeout(std::time::Duration::ZERO);
    let elsewhere = quick.open_on(FileMedia::open(&path));
    assert!(matches!(elsewhere, Err(PoolError::Busy { .. })), "{elsewhere:?}");
    drop(first);
    quick.open_on(FileMedia::open(&path)).unwrap();
}

/// Duplicates of one descriptor are one open file; a file that was opened twice is two.
#[test]
fn other_media_of_the_same_open_file_are_refused() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    let open = || File::options().read(true).write(true).open(&path).unwrap();
    let media_of = |file: &File| -> Arc<dyn Media> {
        let options = media::OpenOptions::new().writable(true);
        options.open_file(file.try_clone().unwrap(), &path).unwrap()
    };
    let (file, other) = (open(), open());
    let pool = shared().open_on(media_of(&file)).unwrap();
    assert_all_are_refused(&media_of(&file));
    let joined = shared().open_on(media_of(&other)).unwrap();
    is_refused(shared().open_on(media_of(&other)));
    sample::assert_complete(&joined);
    drop(pool);
    let again = shared().open_on(media_of(&file)).unwrap();
    sample::assert_complete(&again);
}

/// The locks of a process that may only read the file do not affect which media share an open file.
#[test]
fn locks_of_a_reader_do_not_hide_that_media_are_in_use() {
    const FIRST_LOCK: u64 = 1 << 61;
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    let media: Arc<dyn Media> = FileMedia::open(&path);
    let pool = shared().open_on(media.clone()).unwrap();
    let reader = File::open(&path).unwrap();
    // All bytes without a meaning.
    for (start, end) in [(0, FIRST_LOCK), (FIRST_LOCK + (1 << 36), FIRST_LOCK + (1 << 37))] {
        let range = LockRange { offset_bytes: start, len_bytes: end - start };
        assert!(lock::try_lock(reader.as_fd(), range, LockKind::Shared).unwrap());
    }
    assert_all_are_refused(&media);
    let joined = shared().open_on(FileMedia::open(&path)).unwrap();
    sample::assert_complete(&joined);
    sample::assert_complete(&pool);
}

/// Two threads open at once: one of them succeeds.
#[test]
fn of_two_openings_at_once_one_is_refused() {
    let media: Arc<dyn Media> = FileMedia::of(&sample::crashed_image(POOL_BYTES));
    for _ in 0..20 {
        let both = std::sync::Barrier::new(2);
        let open = || {
            both.wait();
            let opened = shared().open_on(media.clone());
            both.wait();
            opened
        };
        let (one, other) = std::thread::scope(|scope| {
            let one = scope.spawn(open);
            let other = scope.spawn(open);
            (one.join().unwrap(), other.join().unwrap())
        });
        let (pool, refused) = if one.is_ok() { (one, other) } else { (other, one) };
        sample::assert_complete(&pool.unwrap());
        is_refused(refused);
    }
}
