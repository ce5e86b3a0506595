//! Growing a pool: only while no process has it open, atomically, and new pages are zero.

use std::sync::Arc;

use crate::support::*;
use aquifer_check::{CheckOptions, check};
use aquifer_crashkit::{CrashMedia, Fault, Plan, Trigger, explore};
use aquifer_pool::format::superblock::KNOWN_FEATURES;
use aquifer_pool::media::{Media, MediaOperation, PersistenceDomain};
use aquifer_pool::{Pool, PoolError};

const POOL_BYTES: usize = 512 << 10;
const GROWN_BYTES: u64 = 800 << 10;

fn grow(media: &Arc<FileMedia>, len_bytes: u64) -> Result<u64, PoolError> {
    Pool::grow_on(media.clone(), len_bytes, &Pool::options(), &mut |_, _| {})
        .map(|layout| layout.len_bytes())
}

/// Asserts that everything is present, and that an object over all of the new space is zero.
fn assert_grown(pool: &Pool) {
    sample::assert_complete(pool);
    let (free, _) = (pool.info().unwrap().free_pages, ());
    assert!(free > (GROWN_BYTES - POOL_BYTES as u64) / 4096, "{free} pages");
    let largest = pool.info().unwrap().largest_free_pages;
    sample::create(pool, "new", largest, 0).unwrap();
    let new = sample::find(pool, "new").unwrap();
    assert!(sample::read(pool, &new).unwrap().iter().all(|&byte| byte == 0));
    sample::destroy(pool, "new").unwrap();
}

#[test]
fn a_grown_pool_has_all_it_had_and_zeros_behind() {
    let media = FileMedia::of(&sample::crashed_image(POOL_BYTES));
    assert_eq!(grow(&media, GROWN_BYTES + 100).unwrap(), GROWN_BYTES, "whole pages");
    let report =
        check(media.clone(), &CheckOptions { fresh_pages: true, ..CheckOptions::default() })
            .unwrap();
    assert_eq!(report.findings, [], "it was recovered and closed");
    assert_eq!(report.pool.unwrap().layout.len_bytes(), GROWN_BYTES);
    assert_grown(&alone().open_on(media.clone()).unwrap());
    assert_grown(&shared().open_on(media.clone()).unwrap());
    // Grow again, and to the length that it has already.
    assert_eq!(grow(&media, 2 * GROWN_BYTES).unwrap(), 2 * GROWN_BYTES);
    assert_eq!(grow(&media, 2 * GROWN_BYTES).unwrap(), 2 * GROWN_BYTES);
    assert_grown(&alone().open_on(media).unwrap());
}

/// Also the next readers, who could not save it anew, open the pool at once.
#[test]
fn a_size_that_is_refused_leaves_the_saved_state() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let options = small(alone()).features(KNOWN_FEATURES);
    drop(options.create_on(media.clone()).unwrap());
    let is_saved = || forge::superblock(&media.image()).saved_sum != 0;
    assert!(is_saved());
    for len_bytes in [POOL_BYTES as u64 / 2, u64::MAX] {
        assert!(matches!(grow(&media, len_bytes), Err(PoolError::Parameter { .. })));
        assert!(is_saved(), "{len_bytes}");
    }
}

#[test]
fn a_full_pool_has_room_again() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let pool = small(alone()).create_on(media.clone()).unwrap();
    let free = pool.info().unwrap().free_pages;
    sample::create(&pool, "alpha", free, 0).unwrap();
    drop(pool);
    assert_eq!(grow(&media, GROWN_BYTES).unwrap(), GROWN_BYTES);
    let pool = alone().open_on(media).unwrap();
    assert_eq!(pool.info().unwrap().free_pages, (GROWN_BYTES - POOL_BYTES as u64) / 4096);
    sample::create(&pool, "beta", 10, 0).unwrap();
}

#[test]
fn what_lies_behind_a_pool_is_zeroed_before_it_becomes_part_of_it() {
    let mut image = sample::crashed_image(POOL_BYTES);
    image.resize(POOL_BYTES + 50_001, 0xcc);
    let media = FileMedia::of(&image);
    assert_eq!(grow(&media, GROWN_BYTES).unwrap(), GROWN_BYTES);
    assert_grown(&alone().open_on(media).unwrap());

    // Also if the file already has the length, like a device.
    image.resize(GROWN_BYTES as usize + 5000, 0xcc);
    let media = FileMedia::of(&image);
    assert_eq!(grow(&media, GROWN_BYTES).unwrap(), GROWN_BYTES);
    assert_grown(&alone().open_on(media.clone()).unwrap());
    assert!(media.image()[GROWN_BYTES as usize..] == [0xcc; 5000]);
}

#[test]
fn lengths_that_cannot_be_are_refused_and_change_nothing() {
    let media = FileMedia::of(&sample::crashed_image(POOL_BYTES));
    drop(alone().open_on(media.clone()).unwrap());
    let objects = |media: &Arc<FileMedia>| {
        let pool = reading().open_on(media.clone()).unwrap();
        sample::assert_complete(&pool);
        pool.layout()
    };
    let layout = objects(&media);
    for len_bytes in [0, POOL_BYTES as u64 - 1, u64::MAX, 1 << 60] {
        let error = grow(&media, len_bytes).unwrap_err();
        assert!(matches!(error, PoolError::Parameter { what: "the size", .. }), "{error}");
        assert_eq!(objects(&media), layout);
        assert_eq!(media.len_bytes(), POOL_BYTES as u64);
    }
}

#[test]
fn an_open_pool_cannot_be_grown() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    for options in [alone(), shared(), reading()] {
        let pool = options.open_on(FileMedia::open(&path)).unwrap();
        let error = grow(&FileMedia::open(&path), GROWN_BYTES).unwrap_err();
        assert!(
            matches!(error, PoolError::Busy { .. } | PoolError::BusyElsewhere { .. }),
            "{error}"
        );
        drop(pool);
    }
    let error = grow(&FileMedia::open_read_only(&path), GROWN_BYTES).unwrap_err();
    assert!(matches!(error, PoolError::ReadOnly { .. }), "{error}");
    // Afterwards any process can open it.
    let media = FileMedia::open(&path);
    grow(&media, GROWN_BYTES).unwrap();
    assert_grown(&alone().open_on(FileMedia::open(&path)).unwrap());
}

#[test]
fn a_damaged_pool_is_not_grown() {
    let mut image = sample::crashed_image(POOL_BYTES);
    let record = forge::records(&image)[0];
    image[record.offset + 700] ^= 1;
    let media = FileMedia::of(&image);
    let error = grow(&media, GROWN_BYTES).unwrap_err();
    assert!(matches!(error, PoolError::DamagedLog { .. }), "{error}");
    assert!(media.image() == image);
}

#[test]
fn media_that_fail_leave_the_pool_as_it_was() {
    let image = sample::crashed_image(POOL_BYTES);
    for operation in [MediaOperation::Resize, MediaOperation::WriteDurable, MediaOperation::Write] {
        for nth in 1..8 {
            let media = CrashMedia::from_image(&image, PersistenceDomain::PageCache).unwrap();
            let media = Arc::new(media);
            media.fail(Fault::no_space(Trigger::on(operation).nth(nth)));
            let outcome =
                Pool::grow_on(media.clone(), GROWN_BYTES, &Pool::options(), &mut |_, _| {});
            media.clear_faults();
            let pool = alone().open_on(media.clone()).unwrap();
            sample::assert_complete(&pool);
            if let Ok(layout) = outcome {
                assert_eq!(layout.len_bytes(), pool.layout().len_bytes());
            }
        }
    }
}

/// After any power cut there is a whole pool, of one length or the other.
fn survives_crashes(domain: PersistenceDomain) {
    let mut image = sample::crashed_image(POOL_BYTES);
    // There are bytes after the pool: growing has to zero them first.
    image.resize(POOL_BYTES + 8192, 0xdd);
    let media = Arc::new(CrashMedia::from_image(&image, domain).unwrap());
    Pool::grow_on(media.clone(), GROWN_BYTES, &Pool::options(), &mut |_, _| {}).unwrap();
    let mut lengths = std::collections::BTreeSet::new();
    let plan = Plan { depth: 0, budget: 2000, seed: 1 };
    let explored = explore(&media.recording(), plan, |state| {
        let media = Arc::new(state.media()?);
        let options = Pool::options().exclusive(true).background(false);
        let pool = options.open_on(media)?;
        lengths.insert(pool.layout().len_bytes());
        sample::assert_complete(&pool);
        let largest = pool.info()?.largest_free_pages;
        sample::create(&pool, "new", largest, 0)?;
        let new = sample::find(&pool, "new")?;
        assert!(sample::read(&pool, &new)?.iter().all(|&byte| byte == 0));
        Ok(None)
    });
    let explored = explored.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(explored.states() > 100, "{explored:?}");
    assert!(lengths.into_iter().eq([POOL_BYTES as u64, GROWN_BYTES]));
}

#[test]
fn a_crash_while_a_pool_on_a_disk_grows_leaves_it_whole() {
    survives_crashes(PersistenceDomain::PageCache);
}

#[test]
fn a_crash_while_a_pool_in_persistent_memory_grows_leaves_it_whole() {
    survives_crashes(PersistenceDomain::Dax);
}
