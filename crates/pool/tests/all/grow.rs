//! Growing a pool: only while no process has it open, atomically, and new pages are zero.

use std::sync::Arc;

use crate::support::*;
use aquifer_check::{CheckOptions, check};
use aquifer_crashkit::{CrashMedia, Fault, Plan, Trigger, explore};
use aquifer_pool::format::superblock::{KNOWN_FEATURES, SAVED};
use aquifer_pool::media::{Media, MediaOperation, PersistenceDomain};
use aquifer_pool::{Pool, PoolError};

const POOL_BYTES: usize = 512 << 10;
const GROWN_BYTES: u64 = 800 << 10;
/// Long enough for a saved state.
const LONG_BYTES: u64 = 4 << 20;

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

fn assert_sound(media: &Arc<FileMedia>) {
    let options = CheckOptions { fresh_pages: true, ..CheckOptions::default() };
    assert_eq!(check(media.clone(), &options).unwrap().findings, []);
}

#[test]
fn pages_of_the_saved_state_grow_with_the_pool() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    drop(small(alone()).features(KNOWN_FEATURES).create_on(media.clone()).unwrap());
    let before = forge::superblock(&media.image()).saved;
    // One block of its map stands for 128 MiB.
    grow(&media, 200 << 20).unwrap();
    let after = forge::superblock(&media.image()).saved;
    assert_eq!(after.pages, before.pages + 1);
    assert_sound(&media);
    let pool = alone().open_on(media.clone()).unwrap();
    let info = pool.info().unwrap();
    let data_pages = info.layout.page_count - info.layout.data_start_page;
    assert_eq!(info.free_pages, data_pages - after.pages, "the first ones are free");
}

#[test]
fn a_pool_that_becomes_long_enough_gets_a_saved_state() {
    let media = FileMedia::of(&sample::crashed_image(POOL_BYTES));
    assert_eq!(forge::superblock(&media.image()).features, 0);
    grow(&media, LONG_BYTES).unwrap();
    let superblock = forge::superblock(&media.image());
    assert_eq!(superblock.features, SAVED);
    assert!(superblock.saved.start_page >= superblock.layout.data_start_page);
    assert!(superblock.saved_sum != 0, "it was closed with one");
    assert_sound(&media);
    let pool = alone().open_on(media.clone()).unwrap();
    sample::assert_complete(&pool);
    let info = pool.info().unwrap();
    let inodes = pool.inodes().unwrap();
    let named: u64 = inodes.iter().flat_map(|inode| inode.all_runs()).map(|run| run.pages).sum();
    let data_pages = info.layout.page_count - info.layout.data_start_page;
    assert_eq!(info.free_pages + named + info.saved.pages, data_pages);
    // Its pages are for nothing else.
    for index in 0.. {
        let largest = pool.info().unwrap().largest_free_pages;
        match sample::create(&pool, &format!("all {index}"), largest.max(1), 0) {
            Ok(_) => {}
            Err(PoolError::Full { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    drop(pool);
    assert_sound(&media);
}

/// The pages behind those of the saved state stay known to be zero.
#[test]
fn a_new_saved_state_leaves_fresh_pages_fresh() {
    let media = FileMedia::of(&vec![0; 64 << 20]);
    let pool = small(alone()).features(0).create_on(media.clone()).unwrap();
    sample::create(&pool, "alpha", 3, 0).unwrap();
    drop(pool);
    let fresh_pages =
        || check(media.clone(), &CheckOptions::default()).unwrap().pool.unwrap().fresh_pages;
    let before = fresh_pages();
    grow(&media, 65 << 20).unwrap();
    let saved = forge::superblock(&media.image()).saved;
    assert_eq!(fresh_pages(), before + (1 << 20) / 4096 - saved.pages);
    assert_sound(&media);
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
    let operations = [
        MediaOperation::Resize,
        MediaOperation::WriteDurable,
        MediaOperation::Write,
        MediaOperation::Flush,
    ];
    let lengths = [(GROWN_BYTES, 8), (LONG_BYTES, 16)];
    for (operation, (len_bytes, most)) in
        operations.into_iter().flat_map(|operation| lengths.map(|length| (operation, length)))
    {
        for nth in 1..most {
            let media = CrashMedia::from_image(&image, PersistenceDomain::PageCache).unwrap();
            let media = Arc::new(media);
            media.fail(Fault::no_space(Trigger::on(operation).nth(nth)));
            let outcome = Pool::grow_on(media.clone(), len_bytes, &Pool::options(), &mut |_, _| {});
            media.clear_faults();
            let pool = alone().open_on(media.clone()).unwrap();
            sample::assert_complete(&pool);
            if let Ok(layout) = outcome {
                assert_eq!(layout.len_bytes(), pool.layout().len_bytes());
                assert_eq!(pool.features() == SAVED, len_bytes == LONG_BYTES);
            }
        }
    }
}

/// After any power cut there is a whole pool, of one length or the other, with a saved state or
/// without.
fn survives_crashes(domain: PersistenceDomain, len_bytes: u64) {
    let mut image = sample::crashed_image(POOL_BYTES);
    // There are bytes after the pool: growing has to zero them first.
    image.resize(POOL_BYTES + 8192, 0xdd);
    let media = Arc::new(CrashMedia::from_image(&image, domain).unwrap());
    Pool::grow_on(media.clone(), len_bytes, &Pool::options(), &mut |_, _| {}).unwrap();
    let mut forms = std::collections::BTreeSet::new();
    let plan = Plan { depth: 0, budget: 2000, seed: 1 };
    let explored = explore(&media.recording(), plan, |state| {
        let media = Arc::new(state.media()?);
        let options = Pool::options().exclusive(true).background(false);
        let pool = options.open_on(media.clone())?;
        forms.insert((pool.layout().len_bytes(), pool.features()));
        sample::assert_complete(&pool);
        let largest = pool.info()?.largest_free_pages;
        sample::create(&pool, "new", largest, 0)?;
        let new = sample::find(&pool, "new")?;
        assert!(sample::read(&pool, &new)?.iter().all(|&byte| byte == 0));
        drop(pool);
        assert!(check(media, &CheckOptions::default())?.is_sound());
        Ok(None)
    });
    let explored = explored.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(explored.states() > 100, "{explored:?}");
    let mut expected = vec![(POOL_BYTES as u64, 0), (len_bytes, 0)];
    expected.extend((len_bytes == LONG_BYTES).then_some((len_bytes, SAVED)));
    assert!(forms.iter().eq(&expected), "{forms:?}");
}

#[test]
fn a_crash_while_a_pool_on_a_disk_grows_leaves_it_whole() {
    survives_crashes(PersistenceDomain::PageCache, GROWN_BYTES);
}

#[test]
fn a_crash_while_a_pool_gets_a_saved_state_leaves_it_whole() {
    survives_crashes(PersistenceDomain::PageCache, LONG_BYTES);
}

#[test]
fn a_crash_while_a_pool_in_persistent_memory_grows_leaves_it_whole() {
    survives_crashes(PersistenceDomain::Dax, GROWN_BYTES);
}
