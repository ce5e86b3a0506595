//! Upgrading a pool of an earlier program: atomic, and nothing is lost.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::support::*;
use aquifer_check::{CheckOptions, check};
use aquifer_crashkit::{CrashMedia, Fault, Plan, Trigger, explore};
use aquifer_pool::format::run::Run;
use aquifer_pool::format::superblock::{KNOWN_FEATURES, SAVED, SPECIAL};
use aquifer_pool::media::{MediaOperation, PersistenceDomain};
use aquifer_pool::{Pool, PoolError};

const PAGE: usize = 4096;
const POOL_BYTES: usize = 512 << 10;

/// A pool as an earlier program has left it in a crash.
fn old_image() -> Vec<u8> {
    let image = sample::crashed_image(POOL_BYTES);
    assert_eq!(forge::superblock(&image).features, SPECIAL);
    old_form(image)
}

/// The same pool without features.
fn old_form(mut image: Vec<u8>) -> Vec<u8> {
    for copy in 0..2 {
        image[copy * PAGE + 120] = 0;
        forge::seal_superblock(&mut image, copy);
    }
    image
}

fn upgrade(media: &Arc<FileMedia>) -> Result<bool, PoolError> {
    Pool::upgrade_on(media.clone(), &Pool::options())
}

fn assert_sound(media: &Arc<FileMedia>) {
    let options = CheckOptions { fresh_pages: true, ..CheckOptions::default() };
    assert_eq!(check(media.clone(), &options).unwrap().findings, []);
}

#[test]
fn a_pool_of_an_earlier_program_is_used_in_its_form() {
    let media = FileMedia::of(&old_image());
    let pool = alone().open_on(media.clone()).unwrap();
    sample::assert_complete(&pool);
    assert_eq!(pool.features(), 0);
    assert!(matches!(
        pool.check_features(SPECIAL, "place for pipes").unwrap_err(),
        PoolError::NeedsUpgrade { .. }
    ));
    drop(pool);
    let superblock = forge::superblock(&media.image());
    assert_eq!((superblock.features, superblock.saved, superblock.saved_sum), (0, Run::EMPTY, 0));
}

#[test]
fn an_upgraded_pool_has_all_it_had() {
    let media = FileMedia::of(&old_image());
    assert!(upgrade(&media).unwrap());
    assert_sound(&media);
    let superblock = forge::superblock(&media.image());
    assert_eq!(superblock.features, KNOWN_FEATURES);
    assert!(superblock.saved.start_page >= superblock.layout.data_start_page);
    assert!(!upgrade(&media).unwrap(), "there is nothing more to do");
    assert_sound(&media);
    let pool = alone().open_on(media.clone()).unwrap();
    sample::assert_complete(&pool);
    pool.check_features(SAVED | SPECIAL, "all of it").unwrap();
    let info = pool.info().unwrap();
    let inodes = pool.inodes().unwrap();
    let named: u64 = inodes.iter().flat_map(|inode| inode.all_runs()).map(|run| run.pages).sum();
    let data_pages = info.layout.page_count - info.layout.data_start_page;
    assert_eq!(info.free_pages + named + info.saved.pages, data_pages);
    // Its pages are for nothing else.
    let largest = pool.info().unwrap().largest_free_pages;
    for index in 0.. {
        match sample::create(&pool, &format!("all {index}"), largest.max(1), 0) {
            Ok(_) => {}
            Err(PoolError::Full { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    drop(pool);
    assert_sound(&media);
}

#[test]
fn a_full_pool_is_not_upgraded_and_stays_as_it_is() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let pool = small(alone()).features(0).create_on(media.clone()).unwrap();
    let free = pool.info().unwrap().free_pages;
    sample::create(&pool, "alpha", free - 2, 0).unwrap();
    drop(pool);
    let error = upgrade(&media).unwrap_err();
    assert!(matches!(error, PoolError::Full { .. }), "{error}");
    let pool = alone().open_on(media.clone()).unwrap();
    assert_eq!((pool.features(), pool.info().unwrap().free_pages), (0, 2));
    drop(pool);
    assert_sound(&media);
}

#[test]
fn pages_of_the_saved_state_grow_with_the_pool() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    drop(small(alone()).features(KNOWN_FEATURES).create_on(media.clone()).unwrap());
    let before = forge::superblock(&media.image()).saved;
    // One block of its map stands for 128 MiB.
    Pool::grow_on(media.clone(), 200 << 20, &Pool::options(), &mut |_, _| {}).unwrap();
    let after = forge::superblock(&media.image()).saved;
    assert_eq!(after.pages, before.pages + 1);
    assert_sound(&media);
    let pool = alone().open_on(media.clone()).unwrap();
    let info = pool.info().unwrap();
    let data_pages = info.layout.page_count - info.layout.data_start_page;
    assert_eq!(info.free_pages, data_pages - after.pages, "the first ones are free");
}

#[test]
fn media_that_fail_leave_either_form() {
    let image = old_image();
    for operation in [MediaOperation::WriteDurable, MediaOperation::Write, MediaOperation::Flush] {
        for nth in 1..10 {
            let media = CrashMedia::from_image(&image, PersistenceDomain::PageCache).unwrap();
            let media = Arc::new(media);
            media.fail(Fault::no_space(Trigger::on(operation).nth(nth)));
            let outcome = Pool::upgrade_on(media.clone(), &Pool::options());
            media.clear_faults();
            let pool = alone().open_on(media.clone()).unwrap();
            sample::assert_complete(&pool);
            assert!([0, KNOWN_FEATURES].contains(&pool.features()));
            assert!(outcome.is_err() || pool.features() == KNOWN_FEATURES);
        }
    }
}

/// After any power cut there is a whole pool, of one form or the other.
#[test]
fn a_crash_while_a_pool_is_upgraded_leaves_it_whole() {
    let media = CrashMedia::from_image(&old_image(), PersistenceDomain::PageCache).unwrap();
    let media = Arc::new(media);
    Pool::upgrade_on(media.clone(), &Pool::options()).unwrap();
    let mut forms = BTreeSet::new();
    let plan = Plan { depth: 0, budget: 2000, seed: 1 };
    let explored = explore(&media.recording(), plan, |state| {
        let media = Arc::new(state.media()?);
        let pool = alone().open_on(media.clone())?;
        forms.insert(pool.features());
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
    assert!(explored.states() > 50, "{explored:?}");
    assert!(forms.into_iter().eq([0, KNOWN_FEATURES]));
}

/// The pages that are behind those of the saved state stay known to be zero.
#[test]
fn an_upgrade_leaves_fresh_pages_fresh() {
    let media = FileMedia::of(&vec![0; 64 << 20]);
    let pool = small(alone()).features(0).create_on(media.clone()).unwrap();
    sample::create(&pool, "alpha", 3, 0).unwrap();
    drop(pool);
    let fresh_pages =
        || check(media.clone(), &CheckOptions::default()).unwrap().pool.unwrap().fresh_pages;
    let before = fresh_pages();
    assert!(upgrade(&media).unwrap());
    let saved = forge::superblock(&media.image()).saved;
    assert_eq!(fresh_pages(), before - saved.pages);
    assert_sound(&media);
}
