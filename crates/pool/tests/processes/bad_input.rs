//! Bad input and faults: each gives a typed error with advice, and leaves the pool unchanged.

use std::sync::Arc;

use crate::support::sample::{self, page};
use crate::support::*;
use aquifer_check::{CheckOptions, check};
use aquifer_crashkit::unguarded::{UnguardedMedia, UnguardedPool};
use aquifer_pool::format::inode::Inode;
use aquifer_pool::format::run::Run;
use aquifer_pool::format::slot_bytes::SLOT_BYTES;
use aquifer_pool::format::superblock::Superblock;
use aquifer_pool::format::{FormatError, PAGE_BYTES};
use aquifer_pool::media::{ByteRange, Media};
use aquifer_pool::{CommitContent, CommitCopied, CommitPages, Pool, PoolError, PoolOptions};

const POOL_BYTES: usize = 512 << 10;
const PAGE: usize = PAGE_BYTES as usize;

/// Asserts that opening this image for writing, alone and shared, gives this error and changes
/// nothing.
fn assert_refused(image: &[u8], is_it: impl Fn(&PoolError) -> bool) {
    for options in [alone(), shared()] {
        let media = FileMedia::of(image);
        let error = options.open_on(media.clone()).expect_err("a bad pool");
        assert!(is_it(&error), "{error:?}");
        assert!(error.to_string().contains("(image)"), "the message names the file: {error}");
        assert!(media.image() == image, "the pool was changed by an opening that failed: {error}");
    }
}

/// The same for opening it for reading.
fn assert_refused_for_reading(image: &[u8], is_it: impl Fn(&PoolError) -> bool) {
    let media = FileMedia::of(image);
    let error = reading().open_on(media.clone()).expect_err("a bad pool");
    assert!(is_it(&error), "{error:?}");
    assert!(media.image() == image, "the pool was changed by a reader");
}

#[test]
fn the_sample_is_what_it_says() {
    let image = sample::crashed_image(POOL_BYTES);
    let media = FileMedia::of(&image);
    sample::assert_complete(&reading().open_on(media.clone()).unwrap());
    assert!(media.image() == image, "a reader changes nothing");
    let pool = alone().open_on(FileMedia::of(&image)).unwrap();
    sample::assert_complete(&pool);
    assert!(pool.info().unwrap().recovered_records > 4);
}

#[test]
fn the_second_superblock_serves_when_the_first_is_damaged_and_the_other_way_round() {
    let image = sample::crashed_image(POOL_BYTES);
    for copy in 0..2 {
        for damage in [&|page: &mut [u8]| page.fill(0), &|page: &mut [u8]| page[100] ^= 4]
            as [&dyn Fn(&mut [u8]); 2]
        {
            let mut damaged = image.clone();
            damage(&mut damaged[copy * PAGE..(copy + 1) * PAGE]);
            sample::assert_complete(
                &reading().open_on(FileMedia::of(&damaged)).expect("for reading"),
            );
            let media = FileMedia::of(&damaged);
            let pool = alone().open_on(media.clone()).expect("for writing");
            sample::assert_complete(&pool);
            drop(pool);
            let image = media.image();
            for copy in 0..2 {
                let page = &image[copy as usize * PAGE..];
                Superblock::decode(page, copy).expect("written anew");
            }
        }
    }
}

#[test]
fn a_superblock_that_cannot_be_read_is_like_a_damaged_one() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    for copy in 0..2 {
        let hole = ByteRange { offset_bytes: copy * PAGE_BYTES, len_bytes: PAGE_BYTES };
        let media = FileMedia::open_with_unreadable(&path, hole);
        sample::assert_complete(&reading().open_on(media).unwrap());
    }
    let both = ByteRange { offset_bytes: 0, len_bytes: 2 * PAGE_BYTES };
    let media = FileMedia::open_with_unreadable(&path, both);
    let error = reading().open_on(media).unwrap_err();
    assert!(matches!(error, PoolError::Media(_)), "{error:?}");
}

#[test]
fn two_damaged_superblocks_are_refused() {
    let mut image = sample::crashed_image(POOL_BYTES);
    image[50] ^= 1;
    image[PAGE + 50] ^= 1;
    let is_it = |error: &PoolError| matches!(error, PoolError::Damaged { .. });
    assert_refused(&image, is_it);
    assert_refused_for_reading(&image, is_it);
}

#[test]
fn superblocks_of_two_pools_are_not_chosen_among() {
    let mut image = sample::crashed_image(POOL_BYTES);
    let other = sample::crashed_image(POOL_BYTES);
    image[PAGE..2 * PAGE].copy_from_slice(&other[PAGE..2 * PAGE]);
    assert_refused(&image, |error| {
        matches!(error, PoolError::Damaged { error: FormatError::Contradiction { .. }, .. })
    });
}

#[test]
fn a_file_that_is_no_pool_is_told_from_a_damaged_one() {
    let is_it = |error: &PoolError| matches!(error, PoolError::NotAPool { .. });
    let text = b"It was a bright cold day in April.\n".repeat(POOL_BYTES / 35);
    for image in [&[][..], b"x", &[0; PAGE], &vec![0; POOL_BYTES], &text] {
        assert_refused(image, is_it);
        assert_refused_for_reading(image, is_it);
    }
}

#[test]
fn a_pool_of_a_later_version_is_refused_untouched() {
    let mut image = sample::crashed_image(POOL_BYTES);
    for copy in 0..2 {
        image[copy * PAGE + 8] = 9;
        forge::seal_superblock(&mut image, copy);
    }
    assert_refused(&image, |error| matches!(error, PoolError::FutureVersion { found: 9, .. }));
    // Whatever the checksum of that version is.
    image[500] ^= 1;
    image[PAGE + 500] ^= 1;
    assert_refused(&image, |error| matches!(error, PoolError::FutureVersion { found: 9, .. }));
}

/// A later program was stopped while it converted the pool: writing would undo its work.
#[test]
fn a_pool_with_one_superblock_of_a_later_version_is_only_read() {
    for copy in 0..2 {
        let mut image = sample::crashed_image(POOL_BYTES);
        image[copy * PAGE + 8] = 9;
        forge::seal_superblock(&mut image, copy);
        let is_it = |error: &PoolError| matches!(error, PoolError::FutureVersion { found: 9, .. });
        assert_refused(&image, is_it);
        let media = FileMedia::of(&image);
        let error =
            Pool::grow_on(media.clone(), 2 * POOL_BYTES as u64, &Pool::options(), &mut |_, _| {})
                .unwrap_err();
        assert!(is_it(&error) && media.image() == image, "{error}");
        let reader = reading().open_on(media).unwrap();
        sample::assert_complete(&reader);
        // Whatever the checksum of that version is.
        image[copy * PAGE + 500] ^= 1;
        assert_refused(&image, is_it);

        let mut image = sample::crashed_image(POOL_BYTES);
        image[copy * PAGE + 120] |= 4;
        forge::seal_superblock(&mut image, copy);
        assert_refused(&image, |error| matches!(error, PoolError::LaterFeatures { bits: 4, .. }));
    }
}

/// A version number that is the result of damage is not a version.
#[test]
fn a_superblock_whose_version_is_damaged_is_replaced_by_the_other_one() {
    for copy in 0..2 {
        let image = sample::crashed_image(POOL_BYTES);
        for bit in 0..32 {
            let mut damaged = image.clone();
            damaged[copy * PAGE + 8 + bit / 8] ^= 1 << (bit % 8);
            let media = FileMedia::of(&damaged);
            sample::assert_complete(&alone().open_on(media).expect("the other one serves"));
        }
        // More than the version was damaged.
        let mut damaged = image.clone();
        damaged[copy * PAGE + 8..][..200].fill(0xe5);
        let media = FileMedia::of(&damaged);
        sample::assert_complete(&alone().open_on(media).expect("the other one serves"));
    }
}

#[test]
fn a_pool_with_unknown_features_is_refused_untouched() {
    let mut image = sample::crashed_image(POOL_BYTES);
    for copy in 0..2 {
        image[copy * PAGE + 120] |= 4;
        forge::seal_superblock(&mut image, copy);
    }
    assert_refused(&image, |error| matches!(error, PoolError::LaterFeatures { bits: 4, .. }));
}

#[test]
fn a_pool_that_was_cut_short_is_refused() {
    let image = sample::crashed_image(POOL_BYTES);
    for len in [POOL_BYTES - 1, POOL_BYTES - PAGE, POOL_BYTES / 2, 2 * PAGE] {
        let is_it = |error: &PoolError| {
            matches!(error, PoolError::Truncated { found_bytes, expected_bytes, .. }
                if *found_bytes == len as u64 && *expected_bytes == POOL_BYTES as u64)
        };
        assert_refused(&image[..len], is_it);
        assert_refused_for_reading(&image[..len], is_it);
    }
}

#[test]
fn a_file_longer_than_its_pool_works() {
    let mut image = sample::crashed_image(POOL_BYTES);
    image.extend([0xaa; 10_000]);
    let media = FileMedia::of(&image);
    sample::assert_complete(&alone().open_on(media.clone()).unwrap());
    assert!(media.image()[POOL_BYTES..] == [0xaa; 10_000], "what lies behind is not the pool's");
}

#[test]
fn sizes_that_make_no_pool_are_refused_before_anything_is_written() {
    let small_pool = 200 << 10;
    let cases = [
        (small_pool, alone()),
        (POOL_BYTES, alone().inodes(1 << 40)),
        (POOL_BYTES, alone().log_bytes(1 << 40)),
        (POOL_BYTES, alone().log_bytes(u64::MAX)),
        (POOL_BYTES, alone().log_bytes(1 << 10)),
        (POOL_BYTES, alone().inodes(u64::MAX)),
    ];
    for (len, options) in cases {
        let media = FileMedia::of(&vec![7; len]);
        let error = options.create_on(media.clone()).unwrap_err();
        assert!(matches!(error, PoolError::Parameter { .. }), "{options:?}: {error:?}");
        assert!(media.image() == vec![7; len], "{options:?}");
    }
}

#[test]
fn a_damaged_record_that_was_acknowledged_is_noticed() {
    let image = sample::crashed_image(POOL_BYTES);
    let records = forge::records(&image);
    assert!(records.len() > 4, "{records:?}");
    for record in &records[..records.len() - 2] {
        let mut damaged = image.clone();
        damaged[record.offset + record.len - 2000] ^= 1;
        assert_refused(
            &damaged,
            |error| matches!(error, PoolError::DamagedLog { end_lsn, .. } if *end_lsn == record.lsn),
        );
        // A reader sees the state before that.
        let pool = reading().open_on(FileMedia::of(&damaged)).unwrap();
        for (inode, bytes) in sample::read_all(&pool).unwrap() {
            assert_eq!(sample::find_foreign(&inode.name, &bytes), None);
        }
    }
}

#[test]
fn the_last_record_torn_is_one_that_never_was() {
    let image = sample::crashed_image(POOL_BYTES);
    let last = *forge::records(&image).last().unwrap();
    let mut torn = image.clone();
    torn[last.offset + 4096..last.offset + last.len].fill(0);
    let pool = alone().open_on(FileMedia::of(&torn)).unwrap();
    let alpha = sample::find(&pool, "alpha").unwrap();
    let bytes = sample::read(&pool, &alpha).unwrap();
    assert!(bytes[..PAGE] == page("alpha", 1), "the commit before it");
}

#[test]
fn a_tail_of_an_older_generation_stays_dead() {
    let image = sample::crashed_image(POOL_BYTES);
    // A commit is appended, and the machine crashes: the record stays on the media.
    let with_commit = {
        let media = FileMedia::of(&image);
        let pool = alone().open_on(media.clone()).unwrap();
        let before = media.image();
        sample::commit(&pool, &[("alpha", 0)], 77).unwrap();
        (before, media.image())
    };
    let (before, after) = with_commit;
    let record = *forge::records(&after).last().unwrap();
    assert!(forge::records(&before).is_empty());
    let media = FileMedia::of(&before);
    let pool = alone().open_on(media.clone()).unwrap();
    let mut image = media.image();
    drop(pool);
    let lost = record.offset..record.offset + record.len;
    image[lost.clone()].copy_from_slice(&after[lost]);
    // The log continues one round later. Otherwise the record would lie where the next one is
    // expected.
    assert!(forge::superblock(&image).tail_lsn > record.lsn);
    for copy in 0..2 {
        image[copy * PAGE + 88..][..8].copy_from_slice(&record.lsn.to_le_bytes());
        forge::seal_superblock(&mut image, copy);
    }
    sample::assert_complete(&reading().open_on(FileMedia::of(&image)).unwrap());
    let pool = alone().open_on(FileMedia::of(&image)).unwrap();
    assert_eq!(pool.info().unwrap().recovered_records, 0);
    sample::assert_complete(&pool);
}

#[test]
fn a_full_pool_says_so_and_works_on() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let pool = small(alone()).create_on(media).unwrap();
    let free = pool.info().unwrap().free_pages;
    let error = sample::create(&pool, "alpha", free + 1, 0).unwrap_err();
    let PoolError::Full { wanted_pages, largest_free_pages } = error else { panic!("{error}") };
    assert_eq!((wanted_pages, largest_free_pages), (free + 1, free));
    sample::create(&pool, "alpha", free, 0).unwrap();
    sample::commit(&pool, &[("alpha", free - 1)], 1).unwrap();
    assert!(matches!(sample::create(&pool, "beta", 1, 0), Err(PoolError::Full { .. })));
    sample::destroy(&pool, "alpha").unwrap();
    // The pages wait for the tail, which the next request moves.
    sample::create(&pool, "beta", free, 0).unwrap();
    let (_, bytes) = &sample::read_all(&pool).unwrap()[0];
    assert!(bytes.iter().all(|&byte| byte == 0), "nothing of alpha is in beta");
    assert_eq!(pool.info().unwrap().free_pages, 0);
}

#[test]
fn all_inodes_in_use_is_an_error_until_one_is_destroyed() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let pool = small(alone()).create_on(media.clone()).unwrap();
    // One slot is the root directory's.
    for index in 0..14 {
        sample::create(&pool, &format!("object {index}"), 1, 0).unwrap();
    }
    let free = pool.info().unwrap().free_pages;
    let error = sample::create(&pool, "alpha", 1, 0).unwrap_err();
    assert!(matches!(error, PoolError::NoFreeInode { slots: 15 }), "{error}");
    assert_eq!(pool.info().unwrap().free_pages, free, "its reservation was given back");
    sample::destroy(&pool, "object 7").unwrap();
    sample::create(&pool, "alpha", 1, 0).unwrap();
    drop(pool);
    assert_eq!(alone().open_on(media).unwrap().inodes().unwrap().len(), 14);
}

#[test]
fn a_full_log_is_checkpointed_by_the_writer_that_needs_room() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let pool = small(alone()).create_on(media.clone()).unwrap();
    sample::create(&pool, "alpha", 4, 0).unwrap();
    // A commit takes three pages, two and a header; a log of sixteen is full after five.
    for id in 1..=100 {
        sample::commit(&pool, &[("alpha", id % 4), ("alpha", (id + 1) % 4)], id).unwrap();
    }
    let crashed = media.image();
    let pool = alone().open_on(FileMedia::of(&crashed)).unwrap();
    let (_, bytes) = &sample::read_all(&pool).unwrap()[0];
    assert!(bytes[..2 * PAGE] == [page("alpha", 100), page("alpha", 100)].concat());
}

#[test]
fn a_record_larger_than_the_log_is_refused_and_the_pool_works_on() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let pool = small(alone()).create_on(media.clone()).unwrap();
    let inode = sample::create(&pool, "alpha", 20, 0).unwrap();
    let before = media.image();
    for pages in [8, 16, 20] {
        let target = Run { start_page: inode.runs[0].start_page, pages }.bytes();
        let commit = CommitPages { inode: inode.number, target };
        let refused = pool
            .capture_unguarded(&CommitContent { pages: &[commit], ..Default::default() }, |_| {
                panic!("nothing is captured")
            });
        let error = refused.err().expect("too large");
        assert!(matches!(error, PoolError::TooLargeForLog { .. }), "{error}");
    }
    assert!(media.image() == before);
    let pages = pool.max_commit_bytes() / PAGE_BYTES;
    let target = Run { start_page: inode.runs[0].start_page, pages }.bytes();
    let commit = CommitPages { inode: inode.number, target };
    pool.capture_unguarded(&CommitContent { pages: &[commit], ..Default::default() }, |bytes| {
        bytes.fill(1)
    })
    .unwrap()
    .finish()
    .unwrap();
}

#[test]
fn media_that_cannot_be_written_serve_readers() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    let open = |options: &PoolOptions| options.open_on(FileMedia::open_read_only(&path));
    for options in [alone(), shared()] {
        let error = open(&options).unwrap_err();
        assert!(matches!(error, PoolError::ReadOnly { .. }), "{error}");
    }
    let pool = open(&reading()).unwrap();
    sample::assert_complete(&pool);
    let is_refused = |outcome: Result<(), PoolError>| {
        assert!(matches!(outcome, Err(PoolError::ReadOnly { .. })), "{outcome:?}");
    };
    is_refused(pool.checkpoint());
    is_refused(pool.reserve(1, 1).map(drop));
    is_refused(pool.reserve_zeroed(1, 1).map(drop));
    is_refused(pool.apply_through(u64::MAX));
    is_refused(pool.make_durable(&[]));
    is_refused(pool.transact_unguarded(vec![], |_| Ok(())));
    is_refused(pool.capture_unguarded(&CommitContent::default(), |_| {}).map(drop));
}

#[test]
fn a_reader_of_a_shared_pool_changes_nothing_either() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    let writer = shared().open_on(FileMedia::open(&path)).unwrap();
    let reader = reading().open_on(FileMedia::open_read_only(&path)).unwrap();
    sample::commit(&writer, &[("delta", 0)], 99).unwrap();
    let delta = sample::find(&reader, "delta").unwrap();
    assert!(sample::read(&reader, &delta).unwrap()[..PAGE] == page("delta", 99));
    // Its mapping of the shared memory is read-only: a store would end the process.
    assert!(matches!(reader.make_durable(&[]), Err(PoolError::ReadOnly { .. })));
    assert_eq!(reader.info().unwrap().processes, [std::process::id()]);
}

#[test]
fn a_pool_that_is_in_use_is_not_opened_twice_in_ways_that_exclude_each_other() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    let open = |options: PoolOptions| {
        let stall_timeout = std::time::Duration::from_millis(10);
        options.stall_timeout(stall_timeout).open_on(FileMedia::open(&path))
    };
    let is_busy = |outcome: Result<Pool, PoolError>| match outcome {
        Err(PoolError::Busy { .. } | PoolError::BusyElsewhere { .. }) => {}
        other => panic!("{other:?}"),
    };
    let first = open(alone()).unwrap();
    is_busy(open(alone()));
    is_busy(open(shared()));
    is_busy(open(reading()));
    drop(first);
    let first = open(shared()).unwrap();
    let second = open(shared()).unwrap();
    is_busy(open(alone()));
    drop((first, second));
    let reader = open(reading()).unwrap();
    let other = open(reading()).unwrap();
    is_busy(open(alone()));
    is_busy(open(shared()));
    drop((reader, other));
    sample::assert_complete(&open(alone()).unwrap());
}

#[test]
fn a_failed_opening_leaves_no_lock_behind() {
    let directory = scratch();
    let path = directory.path().join("pool");
    let image = sample::crashed_image(POOL_BYTES);
    let layout = forge::superblock(&image).layout;
    let mut damaged = image.clone();
    let number = number_of(&image, "delta");
    forge::slot(&mut damaged, &layout, number).fill(0xee);
    std::fs::write(&path, &damaged).unwrap();
    for (options, is_refused) in [(alone(), true), (shared(), true), (reading(), false)] {
        let media = FileMedia::open(&path);
        let opened = options.open_on(media.clone());
        assert_eq!(opened.is_err(), is_refused);
        drop(opened);
        std::fs::write(&path, &image).unwrap();
        // The refused media are still referenced.
        sample::assert_complete(&alone().open_on(FileMedia::open(&path)).unwrap());
        std::fs::write(&path, &damaged).unwrap();
    }
}

#[test]
fn an_erased_inode_is_not_taken_for_an_unused_one() {
    let mut image = sample::crashed_image(POOL_BYTES);
    let layout = forge::superblock(&image).layout;
    let number = number_of(&image, "delta");
    forge::slot(&mut image, &layout, number).fill(0);
    assert_refused(&image, |error| {
        matches!(error, PoolError::Damaged { error: FormatError::Erased, .. })
    });
    let pool = reading().open_on(FileMedia::of(&image)).unwrap();
    assert!(matches!(pool.inode(number), Err(PoolError::Damaged { .. })));
    assert_eq!(pool.info().unwrap().damaged_inodes, 1);
    assert_eq!(sample::read_all(&pool).unwrap().len(), 4, "the others can be read");
}

fn number_of(image: &[u8], name: &str) -> u64 {
    let pool = reading().open_on(FileMedia::of(image)).unwrap();
    sample::find(&pool, name).unwrap().number
}

#[test]
fn inodes_that_share_pages_cannot_be_read() {
    let image = sample::crashed_image(POOL_BYTES);
    let layout = forge::superblock(&image).layout;
    let (delta, epsilon) = (number_of(&image, "delta"), number_of(&image, "epsilon"));
    let mut forged = image.clone();
    let other = Inode::decode(forge::slot(&mut forged, &layout, epsilon), epsilon).unwrap();
    let slot = forge::slot(&mut forged, &layout, delta);
    let inode = Inode::decode(slot, delta).unwrap();
    let start_page = other.runs[0].start_page + 1;
    let inode = Inode { runs: vec![Run { start_page, pages: 2 }], ..inode };
    slot.copy_from_slice(&inode.encode().unwrap());
    assert_refused(&forged, |error| matches!(error, PoolError::Damaged { .. }));
    let pool = reading().open_on(FileMedia::of(&forged)).unwrap();
    for number in [delta, epsilon] {
        let error = pool.inode(number).unwrap_err();
        assert!(error.to_string().contains("shares pages"), "{error}");
    }
    let names: Vec<_> = pool.inodes().unwrap().into_iter().map(|inode| inode.name).collect();
    assert_eq!(names.len(), 3, "the others can be read");
}

/// In memory such a slot would count as one that was changed there.
#[test]
fn a_slot_without_a_checksum_is_damaged_on_media() {
    let image = sample::crashed_image(POOL_BYTES);
    let layout = forge::superblock(&image).layout;
    let number = number_of(&image, "delta");
    let mut damaged = image.clone();
    forge::slot(&mut damaged, &layout, number)[SLOT_BYTES - 8..].fill(0);
    assert_refused(&damaged, |error| matches!(error, PoolError::Damaged { .. }));
    let pool = reading().open_on(FileMedia::of(&damaged)).unwrap();
    assert!(matches!(pool.inode(number), Err(PoolError::Damaged { .. })));
    assert!(!check(FileMedia::of(&damaged), &CheckOptions::default()).unwrap().is_sound());
}

#[test]
fn pages_that_cannot_be_content_are_refused() {
    let image = sample::crashed_image(POOL_BYTES);
    let superblock = forge::superblock(&image);
    let layout = superblock.layout;
    let number = number_of(&image, "delta");
    // Metadata, the log, pages that were never used, pages beyond the end.
    for start_page in [0, 3, layout.log_start_page, layout.page_count - 2, layout.page_count] {
        let mut forged = image.clone();
        let slot = forge::slot(&mut forged, &layout, number);
        let inode = Inode::decode(slot, number).unwrap();
        let inode = Inode { runs: vec![Run { start_page, pages: 2 }], ..inode };
        slot.copy_from_slice(&inode.encode().unwrap());
        assert_refused(&forged, |error| matches!(error, PoolError::Damaged { .. }));
        let pool = reading().open_on(FileMedia::of(&forged)).unwrap();
        assert!(matches!(pool.inode(number), Err(PoolError::Damaged { .. })));
    }
}

/// The record of the large commit, with the content of another object as its copied content.
fn copied_from_another() -> Vec<u8> {
    let mut image = sample::crashed_image(POOL_BYTES);
    let epsilon = {
        let pool = reading().open_on(FileMedia::of(&image)).unwrap();
        sample::find(&pool, "epsilon").unwrap().runs[0].bytes()
    };
    let content = epsilon.offset_bytes as usize..epsilon.end_bytes() as usize;
    let sum = aquifer_pool::format::checksum(&[&image[content]]);
    let is_copied = |record: &&forge::Place| image[record.offset + 64] == 3;
    let record = *forge::records(&image).iter().find(is_copied).expect("the sample has one");
    let bytes = &mut image[record.offset..record.offset + record.len];
    bytes[88..96].copy_from_slice(&epsilon.offset_bytes.to_le_bytes());
    bytes[96..104].copy_from_slice(&sum.to_le_bytes());
    forge::seal_record(bytes);
    assert_refused(&image, |error| {
        matches!(
            error,
            PoolError::Damaged { error: FormatError::Field { field: "source", .. }, .. }
        )
    });
    image
}

#[test]
fn a_record_shows_no_object_the_pages_of_another() {
    let image = sample::crashed_image(POOL_BYTES);
    let record = *forge::records(&image).last().unwrap();
    // Its entries are for zeta, gamma and alpha; each has 40 bytes: kind, inode, target, length,
    // payload, checksum.
    let entry = |index: usize| record.offset + 64 + index * 40;
    let forge = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut forged = image.clone();
        change(&mut forged);
        forge::seal_record(&mut forged[record.offset..record.offset + record.len]);
        forged
    };
    let copy = |bytes: &mut Vec<u8>, from: usize, to: usize, len: usize| {
        bytes.copy_within(from..from + len, to);
    };
    let target_of_another = forge(&|bytes| copy(bytes, entry(0) + 8, entry(1) + 8, 8));
    let inode_of_another = forge(&|bytes| copy(bytes, entry(0) + 4, entry(1) + 4, 4));
    let payload_of_another = forge(&|bytes| copy(bytes, entry(0) + 24, entry(1) + 24, 8));
    for forged in [target_of_another, inode_of_another, payload_of_another, copied_from_another()] {
        for options in [reading(), alone()] {
            let Ok(pool) = options.open_on(FileMedia::of(&forged)) else { continue };
            for (inode, bytes) in sample::read_all(&pool).unwrap() {
                assert_eq!(sample::find_foreign(&inode.name, &bytes), None, "{:?}", inode.name);
            }
        }
    }
}

#[test]
fn a_checkpoint_cut_off_before_its_superblocks_is_done_again() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let pool = small(alone()).create_on(media.clone()).unwrap();
    for name in ["alpha", "beta", "gamma"] {
        sample::create(&pool, name, 4, 0).unwrap();
        sample::commit(&pool, &[(name, 0), (name, 1)], 1).unwrap();
    }
    pool.checkpoint().unwrap();
    let superblocks = media.image()[..2 * PAGE].to_vec();
    // The log has content of an object that no longer exists, or is smaller now.
    for name in ["alpha", "beta", "gamma"] {
        sample::commit(&pool, &[(name, 0), (name, 1)], 2).unwrap();
    }
    sample::destroy(&pool, "alpha").unwrap();
    let beta = sample::find(&pool, "beta").unwrap();
    let shrunk = Run { pages: 1, ..beta.runs[0] };
    pool.transact_unguarded(vec![], |transaction| {
        transaction.put(Inode { runs: vec![shrunk], size_bytes: 1, ..beta.clone() });
        Ok(())
    })
    .unwrap();
    pool.checkpoint().unwrap();
    // The metadata on media are current, the superblocks are old.
    let mut image = media.image();
    image[..2 * PAGE].copy_from_slice(&superblocks);
    for options in [reading(), alone()] {
        let pool = options.open_on(FileMedia::of(&image)).unwrap();
        let objects = sample::read_all(&pool).unwrap();
        assert_eq!(objects.len(), 2);
        for (inode, bytes) in objects {
            let name = std::str::from_utf8(&inode.name).unwrap();
            assert!(bytes[..PAGE] == page(name, 2), "the last commit of {name}");
        }
    }
}

/// A commit that covers more pages than its object still has is replayed for the remaining ones.
#[test]
fn an_object_that_shrank_keeps_what_was_committed_with_pages_it_lost() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let pool = small(alone()).create_on(media.clone()).unwrap();
    let inode = sample::create(&pool, "alpha", 4, 0).unwrap();
    let whole = inode.runs[0];
    let commit = CommitPages { inode: inode.number, target: whole.bytes() };
    let bytes = page("alpha", 5).repeat(4);
    pool.capture_unguarded(&CommitContent { pages: &[commit], ..Default::default() }, |payload| {
        payload.copy_from_slice(&bytes)
    })
    .unwrap()
    .finish()
    .unwrap();
    let half = Run { pages: 2, ..whole };
    pool.transact_unguarded(vec![], |transaction| {
        transaction.put(Inode { runs: vec![half], size_bytes: 1, ..inode.clone() });
        Ok(())
    })
    .unwrap();
    let image = media.image();
    for options in [reading(), alone()] {
        let pool = options.open_on(FileMedia::of(&image)).unwrap();
        let (_, found) = &sample::read_all(&pool).unwrap()[0];
        assert!(found[..] == bytes[..2 * PAGE]);
    }
}

#[test]
fn a_pool_outlives_its_last_handle_until_its_commits_are_done() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    let pool = alone().open_on(FileMedia::open(&path)).unwrap();
    let alpha = sample::find(&pool, "alpha").unwrap();
    let pages = CommitPages { inode: alpha.number, target: sample::place(&alpha, 0) };
    let fill = |bytes: &mut [u8]| bytes.copy_from_slice(&page("alpha", 8));
    let commit = pool
        .capture_unguarded(&CommitContent { pages: &[pages], ..Default::default() }, fill)
        .unwrap();
    drop(pool);
    let stall_timeout = std::time::Duration::from_millis(10);
    let options = alone().stall_timeout(stall_timeout);
    let error = options.open_on(FileMedia::open(&path)).unwrap_err();
    assert!(matches!(error, PoolError::Busy { .. }), "{error}");
    commit.finish().unwrap();
    let pool = options.open_on(FileMedia::open(&path)).unwrap();
    assert!(sample::read(&pool, &alpha).unwrap()[..PAGE] == page("alpha", 8));
}

/// A pool is one file: every message about it has its path.
#[test]
fn messages_name_the_file() {
    let image = sample::crashed_image(POOL_BYTES);
    let media: Arc<dyn Media> = FileMedia::of(&image[..POOL_BYTES / 2]);
    let error = alone().open_on(media).unwrap_err();
    assert!(error.to_string().starts_with("(image) has 262144 bytes"), "{error}");
}

/// A copy of a pool has its uuid, and names its shared memory.
#[test]
fn a_copy_of_an_open_pool_takes_nothing_from_it() {
    let directory = scratch();
    let (path, copy) = (directory.path().join("pool"), directory.path().join("copy"));
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    let pool = shared().open_on(FileMedia::open(&path)).unwrap();
    std::fs::copy(&path, &copy).unwrap();
    for options in [shared(), alone()] {
        let other = options.open_on(FileMedia::open(&copy)).unwrap();
        sample::commit(&other, &[("alpha", 0)], 55).unwrap();
    }
    let joined = shared().open_on(FileMedia::open(&path)).unwrap();
    sample::assert_complete(&joined);
    drop((pool, joined));
}

/// Superblocks of an earlier generation, as from a disk that lost its last writes: records of the
/// lost generation do not count as the continuation of what is appended now.
#[test]
fn records_of_a_generation_that_was_forgotten_stay_dead() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    drop(small(alone()).create_on(media.clone()).unwrap());
    let pool = alone().open_on(media.clone()).unwrap();
    sample::create(&pool, "alpha", 4, 0).unwrap();
    pool.checkpoint().unwrap();
    drop(pool);
    let forgotten = media.image();
    // One generation later: records after the point where both logs begin.
    let pool = alone().open_on(media.clone()).unwrap();
    for id in 1..4 {
        sample::commit(&pool, &[("alpha", id)], id).unwrap();
    }
    let mut image = media.image();
    image[..2 * PAGE].copy_from_slice(&forgotten[..2 * PAGE]);
    drop(pool);
    let media = FileMedia::of(&image);
    let pool = alone().open_on(media.clone()).unwrap();
    // Of the same length as the old record there, which is followed by another old one.
    sample::commit(&pool, &[("alpha", 0)], 100).unwrap();
    let image = media.image();
    let pool = alone().open_on(FileMedia::of(&image)).unwrap();
    assert_eq!(pool.info().unwrap().recovered_records, 1);
    let (_, bytes) = &sample::read_all(&pool).unwrap()[0];
    assert!(bytes[..PAGE] == page("alpha", 100));
}

#[test]
fn numbers_that_could_not_be_counted_on_from_are_refused() {
    let image = sample::crashed_image(POOL_BYTES);
    // Sequence, generation, tail.
    for field in [32, 80, 88] {
        let mut forged = image.clone();
        for copy in 0..2 {
            forged[copy * PAGE + field..][..8].copy_from_slice(&(u64::MAX - 4095).to_le_bytes());
            forge::seal_superblock(&mut forged, copy);
        }
        assert_refused(&forged, |error| {
            matches!(error, PoolError::Damaged { error: FormatError::Field { .. }, .. })
        });
    }
}

/// A forked child has a copy of the handle of a commit, and drops it.
#[test]
fn a_forked_child_does_not_give_up_its_parents_commit() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, sample::crashed_image(POOL_BYTES)).unwrap();
    let stall_timeout = std::time::Duration::from_millis(300);
    let open = || shared().stall_timeout(stall_timeout).open_on(FileMedia::open(&path));
    let (pool, other) = (open().unwrap(), open().unwrap());
    let alpha = sample::find(&pool, "alpha").unwrap();
    let pages = CommitPages { inode: alpha.number, target: sample::place(&alpha, 0) };
    let fill = |bytes: &mut [u8]| bytes.copy_from_slice(&page("alpha", 31));
    let commit = pool
        .capture_unguarded(&CommitContent { pages: &[pages], ..Default::default() }, fill)
        .unwrap();
    // SAFETY: the child only drops a value and ends without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(commit);
        // SAFETY: `_exit` ends the child without running destructors.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: our child; `status` outlives the call.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    // Other handles still wait for it, and none fills its place.
    let error = other.checkpoint().unwrap_err();
    assert!(matches!(error, PoolError::Stalled { .. }), "{error}");
    commit.finish().unwrap();
    other.checkpoint().unwrap();
    assert!(sample::read(&other, &alpha).unwrap()[..PAGE] == page("alpha", 31));
}

/// Content beside the log is read once for each record that names it. A forged log may name it any
/// number of times.
#[test]
fn a_log_that_names_content_without_end_is_refused_soon() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let pool = alone().log_bytes(64 << 10).create_on(media.clone()).unwrap();
    let reservation = pool.reserve(8, 1).unwrap();
    let (runs, target) = (reservation.runs().to_vec(), reservation.whole().bytes());
    let number = pool
        .transact_unguarded(vec![reservation], |transaction| {
            let inode = Inode {
                kind: aquifer_pool::format::inode::InodeKind::Object,
                size_bytes: target.len_bytes,
                runs: runs.clone(),
                name: b"object".to_vec(),
                ..transaction.free_inode()?
            };
            let number = inode.number;
            transaction.put(inode);
            Ok(number)
        })
        .unwrap();
    // Pages without an owner, like those of a run that was given up.
    let source_offset_bytes = target.end_bytes();
    let bytes = vec![1; 8 * PAGE];
    pool.media().write_unguarded(source_offset_bytes, &bytes).unwrap();
    let checksum = aquifer_pool::format::checksum(&[&bytes]);
    let copied = [CommitCopied { inode: number, target, source_offset_bytes, checksum }; 64];
    assert!(64 * target.len_bytes > 2 * pool.layout().data().len_bytes);
    let content = CommitContent { copied: &copied, ..CommitContent::default() };
    pool.capture_unguarded(&content, |_| {}).unwrap().finish().unwrap();
    let image = media.image();
    std::mem::forget(pool);
    assert_refused(&image, |error| match error {
        PoolError::Damaged { structure, .. } => structure == "a record of the log",
        _ => false,
    });
}
