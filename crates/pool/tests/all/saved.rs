//! The saved state of a pool that was closed cleanly: it is used when it is right, and only then.

use std::io::Write;
use std::sync::Arc;

use crate::support::*;
use aquifer_check::{CheckOptions, FindingKind, check, repair};
use aquifer_crashkit::unguarded::{UnguardedMedia, UnguardedPool};
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::inode::{Inode, InodeKind};
use aquifer_pool::format::saved::{HEADER_BYTES, MAPS, Map, SavedHeader, SavedLayout, header_sum};
use aquifer_pool::format::slot_bytes::SLOT_BYTES;
use aquifer_pool::format::superblock::{KNOWN_FEATURES, Superblock};
use aquifer_pool::media::{ByteRange, Media};
use aquifer_pool::{Mutant, Pool, PoolError, PoolOptions, end_thread_at};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

const PAGE: usize = PAGE_BYTES as usize;
const POOL_BYTES: usize = 512 << 10;

/// A pool that was closed cleanly with the sample in it.
fn closed_image() -> Vec<u8> {
    sample::closed_image(POOL_BYTES)
}

/// The same pool after one more session, which changes all maps.
fn later_image(image: &[u8]) -> Vec<u8> {
    let media = FileMedia::of(image);
    let pool = alone().open_on(media.clone()).unwrap();
    sample::create(&pool, "one more", 3, 0).unwrap();
    sample::destroy(&pool, "one more").unwrap();
    sample::create(&pool, "another", 5, 0).unwrap();
    drop(pool);
    media.image()
}

fn place(image: &[u8]) -> (Superblock, SavedLayout, usize) {
    let superblock = forge::superblock(image);
    let start = superblock.saved.start_page as usize * PAGE;
    (superblock.clone(), SavedLayout::new(&superblock.layout), start)
}

fn set_superblock(image: &mut [u8], superblock: &Superblock) {
    for copy in 0..2 {
        image[copy * PAGE..(copy + 1) * PAGE].copy_from_slice(&superblock.encode(copy as u64));
    }
}

/// Whether the pool opens without its log, of which only the page at the tail can be read: that is so
/// only if nothing is recovered.
fn is_resumed_with(image: &[u8], options: &PoolOptions) -> bool {
    let superblock = forge::superblock(image);
    let log = superblock.layout.log();
    let unreadable = (superblock.tail_lsn + 2 * PAGE_BYTES) % log.len_bytes;
    let place = ByteRange { offset_bytes: log.offset_bytes + unreadable, len_bytes: PAGE_BYTES };
    let mut file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    file.write_all(image).unwrap();
    options.clone().open_on(FileMedia::open_with_unreadable(file.path(), place)).is_ok()
}

fn is_resumed(image: &[u8]) -> bool {
    let [reader, writer] = [reading(), alone()].map(|options| is_resumed_with(image, &options));
    assert_eq!(reader, writer);
    writer
}

fn assert_sound(image: &[u8]) {
    let options = CheckOptions { fresh_pages: true, ..CheckOptions::default() };
    assert_eq!(check(FileMedia::of(image), &options).unwrap().findings, []);
}

/// The pool is recovered in full, has all it had, and the next close saves a state that is right.
fn assert_recovered(image: &[u8], what: &str) {
    assert!(!is_resumed(image), "{what}: it was believed");
    let media = FileMedia::of(image);
    let names = |pool: &Pool| {
        let mut names: Vec<_> = pool.inodes().unwrap().into_iter().map(|i| i.name).collect();
        names.sort_unstable();
        names
    };
    let expected = names(&alone().check(true).open_on(FileMedia::of(image)).unwrap());
    assert_eq!(names(&reading().open_on(media.clone()).unwrap()), expected, "{what}");
    let pool = alone().open_on(media.clone()).unwrap();
    assert_eq!(names(&pool), expected, "{what}");
    drop(pool);
    assert_sound(&media.image());
    assert!(is_resumed(&media.image()), "{what}: nothing was saved anew");
}

#[test]
fn a_pool_that_was_closed_opens_without_its_log() {
    let mut image = closed_image();
    for round in 0..3 {
        assert_sound(&image);
        assert!(is_resumed(&image), "round {round}");
        assert!(!is_resumed_with(&image, &alone().check(true)));
        let media = FileMedia::of(&image);
        sample::assert_complete(&reading().open_on(media.clone()).unwrap());
        assert!(media.image() == image, "a reader writes nothing");
        let pool = alone().open_on(media.clone()).unwrap();
        sample::assert_complete(&pool);
        let full = alone().check(true).open_on(FileMedia::of(&image)).unwrap();
        let [info, expected] = [&pool, &full].map(|pool| pool.info().unwrap());
        assert_eq!(info.free_pages, expected.free_pages);
        assert_eq!(info.largest_free_pages, expected.largest_free_pages);
        assert_eq!(info.free_slots, expected.free_slots);
        assert_eq!(pool.orphans().unwrap(), full.orphans().unwrap());
        assert_eq!(pool.room().unwrap(), full.room().unwrap());
        if round == 1 {
            sample::create(&pool, "more", 2, 0).unwrap();
            sample::destroy(&pool, "more").unwrap();
        }
        drop(pool);
        image = media.image();
    }
}

#[test]
fn while_the_pool_is_open_nothing_is_saved() {
    let media = FileMedia::of(&closed_image());
    let pool = alone().open_on(media.clone()).unwrap();
    let superblock = forge::superblock(&media.image());
    assert_eq!(superblock.saved_sum, 0);
    sample::create(&pool, "another", 2, 0).unwrap();
    let image = media.image();
    pool.die();
    assert!(!is_resumed(&image));
    let pool = alone().open_on(FileMedia::of(&image)).unwrap();
    assert!(sample::find(&pool, "another").is_ok());
}

/// Readers that stay keep the segment, and the superblock names it.
#[test]
fn the_last_writer_saves_nothing_while_a_reader_stays() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, closed_image()).unwrap();
    let writer = shared().open(&path).unwrap();
    let reader = reading().open(&path).unwrap();
    drop(writer);
    assert_eq!(forge::superblock(&std::fs::read(&path).unwrap()).saved_sum, 0);
    drop(reader);
    drop(shared().open(&path).unwrap());
    assert!(is_resumed(&std::fs::read(&path).unwrap()));
}

#[test]
fn a_state_that_is_not_as_it_was_written_is_not_believed() {
    let before = closed_image();
    let image = later_image(&before);
    let (superblock, layout, start) = place(&image);
    assert_eq!(superblock.saved, place(&before).0.saved);
    assert!(is_resumed(&image));
    let damaged = |what: &str, damage: &dyn Fn(&mut [u8])| {
        let mut image = image.clone();
        damage(&mut image[start..start + superblock.saved.pages as usize * PAGE]);
        assert_recovered(&image, what);
    };
    damaged("a bit of the header", &|saved| saved[50] ^= 1);
    damaged("a reserved bit of the header", &|saved| saved[300] ^= 1);
    damaged("the header is zero", &|saved| saved[..HEADER_BYTES].fill(0));
    damaged("a bit of the table", &|saved| saved[HEADER_BYTES] ^= 1);
    damaged("everything is zero", &|saved| saved.fill(0));
    let old = &before[start..];
    damaged("the header of the last close", &|saved| {
        saved[..HEADER_BYTES].copy_from_slice(&old[..HEADER_BYTES]);
    });
    damaged("header and table of the last close", &|saved| {
        saved[..PAGE].copy_from_slice(&old[..PAGE]);
    });
    damaged("everything of the last close", &|saved| saved.copy_from_slice(&old[..saved.len()]));
    for map in MAPS {
        let block = layout.page_of_block(layout.blocks_of(map).start) as usize * PAGE;
        if image[start + block..][..PAGE].iter().all(|&byte| byte == 0) {
            continue; // not stored
        }
        damaged(&format!("a bit of {map:?}"), &|saved| saved[block] ^= 2);
        damaged(&format!("{map:?} is zero"), &|saved| saved[block..block + PAGE].fill(0));
        damaged(&format!("{map:?} has another place"), &|saved| {
            let other = layout.page_of_block(layout.blocks_of(Map::Orphans).start) as usize * PAGE;
            saved.copy_within(other..other + PAGE, block);
        });
        if old[block..block + PAGE] != image[start + block..][..PAGE] {
            damaged(&format!("{map:?} of the last close"), &|saved| {
                saved[block..block + PAGE].copy_from_slice(&old[block..block + PAGE]);
            });
        }
    }
    // A block that is all zero is not read.
    let orphans = layout.page_of_block(layout.blocks_of(Map::Orphans).start) as usize * PAGE;
    let mut anything = image.clone();
    anything[start + orphans] ^= 1;
    assert!(is_resumed(&anything));
    let pool = alone().open_on(FileMedia::of(&anything)).unwrap();
    assert_eq!(pool.orphans().unwrap(), []);
}

fn spread_numbers() -> impl Iterator<Item = u64> {
    (500..5000).step_by(500)
}

fn spread_name(number: u64) -> Vec<u8> {
    format!("object {number}").into_bytes()
}

/// A pool with objects in many pages of slots.
fn spread_image() -> Vec<u8> {
    let media = FileMedia::of(&vec![0; 16 << 20]);
    let options = alone().inodes(5000).log_bytes(2 << 20).features(KNOWN_FEATURES);
    let pool = options.create_on(media.clone()).unwrap();
    for number in spread_numbers() {
        let reservation = pool.reserve_zeroed(1, 1).unwrap();
        let object = Inode {
            kind: InodeKind::Object,
            size_bytes: PAGE_BYTES,
            name: spread_name(number),
            runs: reservation.runs().to_vec(),
            ..Inode::free(number, 1)
        };
        let created = pool.transact_unguarded(vec![reservation], |transaction| {
            transaction.put(object.clone());
            Ok(())
        });
        created.unwrap();
    }
    drop(pool);
    media.image()
}

/// Not only the digests of the first pages of metadata.
#[test]
fn the_digests_of_all_pages_are_verified() {
    let mut image = spread_image();
    let (_, layout, start) = place(&image);
    let second = layout.page_of_block(layout.blocks_of(Map::Digests).start + 1) as usize * PAGE;
    image[start + second + 5] ^= 1;
    for options in [reading(), alone()] {
        let pool = options.open_on(FileMedia::of(&image)).unwrap();
        for number in spread_numbers() {
            assert_eq!(pool.inode(number).unwrap().name, spread_name(number));
        }
    }
    assert_recovered(&image, "a bit of the second block of digests");
}

/// The pages of metadata behind the first one, which has the head.
fn objects_of_spread(image: &[u8]) -> ByteRange {
    let metadata = forge::superblock(image).layout.metadata();
    ByteRange {
        offset_bytes: metadata.offset_bytes + PAGE_BYTES,
        len_bytes: metadata.len_bytes - PAGE_BYTES,
    }
}

fn assert_spread_names(pool: &Pool) {
    for number in spread_numbers() {
        let found = pool.object_named(&spread_name(number)).unwrap();
        assert_eq!(found.map(|object| object.number), Some(number));
    }
    assert_eq!(pool.object_named(b"another").unwrap(), None);
}

/// Not even those of objects, for the index of their names.
#[test]
fn slots_are_read_when_they_are_needed() {
    let image = spread_image();
    let objects = objects_of_spread(&image);
    for options in [reading(), alone(), shared()] {
        let media = FileMedia::of(&image);
        let pool = options.open_on(media.clone()).unwrap();
        assert_eq!(media.take_reads_of(objects), 0);
        assert_spread_names(&pool);
        assert_eq!(media.take_reads_of(objects), spread_numbers().count());
        assert_spread_names(&pool);
        assert_eq!(media.take_reads_of(objects), 0);
    }
}

/// Pages that others have changed, or that are damaged, keep no others near them from being read once.
#[test]
fn pages_that_do_not_match_cost_no_further_reads() {
    let image = spread_image();
    let metadata = forge::superblock(&image).layout.metadata();
    let numbers = || 1..*spread_numbers().collect::<Vec<_>>().last().unwrap();
    let odd = || numbers().step_by(64);
    let read_bytes = |pool: &Pool, media: &FileMedia| {
        media.take_reads();
        numbers().for_each(|number| drop(pool.inode(number)));
        let reads = media.take_reads();
        reads.iter().map(|read| read.intersection(metadata).len_bytes).sum::<u64>()
    };
    let joined = |directory: &tempfile::TempDir, image: &[u8]| {
        let path = directory.path().join("pool");
        std::fs::write(&path, image).unwrap();
        let writer = shared().open(&path).unwrap();
        let media = FileMedia::open(&path);
        (writer, shared().open_on(media.clone()).unwrap(), media)
    };
    let directories = [scratch(), scratch()];
    let (_writer, pool, media) = joined(&directories[0], &image);
    let without_any = read_bytes(&pool, &media);
    let (writer, pool, media) = joined(&directories[1], &image);
    for number in odd().skip(1) {
        let changed = writer.change_unguarded(vec![], |slots| {
            slots.put(Inode::free(number, 7));
            Ok::<(), PoolError>(())
        });
        changed.unwrap();
    }
    writer.checkpoint().unwrap();
    let with_changed = read_bytes(&pool, &media);
    let mut damaged = image.clone();
    for number in odd().skip(1) {
        damaged[forge::superblock(&image).layout.slot_offset_bytes(number) as usize] ^= 1;
    }
    let media = FileMedia::of(&damaged);
    let pool = reading().open_on(media.clone()).unwrap();
    let with_damaged = read_bytes(&pool, &media);
    let counts = [without_any, with_changed, with_damaged];
    // A damaged page is read for each of its slots.
    assert!(counts.iter().all(|&bytes| bytes <= 4 * metadata.len_bytes), "{counts:?}");
    assert!(with_changed <= without_any + without_any / 4, "{counts:?}");
}

/// Nor does one that cannot be read hide others, in whatever order they are looked at.
#[test]
fn a_transaction_finds_an_object_beside_one_that_cannot_be_read() {
    let mut image = spread_image();
    let first = forge::superblock(&image).layout.slot_offset_bytes(500) as usize;
    image[first + 100] ^= 1;
    let pool = alone().open_on(FileMedia::of(&image)).unwrap();
    let find = |name: Vec<u8>| {
        pool.transact_unguarded(vec![], |transaction| {
            Ok(transaction.object_named(&name).map(|object| object.number))
        })
    };
    for number in spread_numbers().skip(1) {
        assert_eq!(find(spread_name(number)).unwrap(), Some(number));
    }
    for name in [spread_name(500), b"another".to_vec()] {
        let found = find(name);
        assert!(matches!(found, Err(PoolError::Damaged { .. })), "{found:?}");
    }
}

/// What is repaired after a death is repaired under the lock, for which others wait.
#[test]
fn a_repair_reads_no_pages_of_metadata() {
    let image = spread_image();
    let objects = objects_of_spread(&image);
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, &image).unwrap();
    let first = shared().open(&path).unwrap();
    assert_spread_names(&first);
    let media = FileMedia::open(&path);
    let joined = shared().open_on(media.clone()).unwrap();
    let died = end_thread_at("apply-odd", || {
        first.change_unguarded(vec![], |slots| {
            slots.put(Inode::free(4990, 1));
            Ok::<(), PoolError>(())
        })
    });
    assert!(died.is_none());
    joined.checkpoint().unwrap();
    assert_eq!(media.take_reads_of(objects), 0);
    assert_spread_names(&joined);
    assert_spread_names(&first);
}

/// The pages that it needs are read together.
#[test]
fn a_change_that_looks_at_all_objects_is_not_run_for_each_of_their_pages() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, spread_image()).unwrap();
    let _first = shared().open(&path).unwrap();
    let joined = shared().open(&path).unwrap();
    let mut runs = 0;
    let found = joined.transact_unguarded(vec![], |transaction| {
        runs += 1;
        Ok(transaction.inodes().count())
    });
    assert_eq!((found.unwrap(), runs), (spread_numbers().count(), 2));
}

/// The header as it was for another generation or tail, with the right checksum in the superblock:
/// nothing but a mistake of a program leads to it.
#[test]
fn a_state_of_another_moment_is_not_believed() {
    let image = closed_image();
    let (superblock, _, start) = place(&image);
    let header = SavedHeader::decode(&image[start..]).unwrap();
    let forged = |changed: SavedHeader| {
        let mut image = image.clone();
        let bytes = changed.encode();
        image[start..start + HEADER_BYTES].copy_from_slice(&bytes);
        set_superblock(
            &mut image,
            &Superblock { saved_sum: header_sum(&bytes), ..superblock.clone() },
        );
        image
    };
    assert!(is_resumed(&forged(header.clone())));
    let other = forged(SavedHeader { generation: header.generation + 1, ..header.clone() });
    assert_recovered(&other, "generation");
    assert!(is_resumed_with(&other, &alone().mutant(Some(Mutant::AnyGeneration))), "the mutant");
    let other = forged(SavedHeader { tail_lsn: header.tail_lsn + PAGE_BYTES, ..header.clone() });
    assert_recovered(&other, "tail");
    let other = forged(SavedHeader { free_pages: header.free_pages - 1, ..header.clone() });
    assert_recovered(&other, "free pages");
}

#[test]
fn blocks_are_verified() {
    let image = closed_image();
    let (_, layout, start) = place(&image);
    let block = layout.page_of_block(layout.blocks_of(Map::OccupiedSlots).start) as usize * PAGE;
    let mut damaged = image.clone();
    damaged[start + block] ^= 0x80;
    assert_recovered(&damaged, "a bit");
    assert!(is_resumed_with(&damaged, &alone().mutant(Some(Mutant::TornBlocks))), "the mutant");
}

/// A state that seems to be of this moment, while the log has a record.
#[test]
fn a_record_at_the_tail_counts_more_than_a_saved_state() {
    let media = FileMedia::of(&closed_image());
    let pool = alone().open_on(media.clone()).unwrap();
    sample::create(&pool, "another", 2, 0).unwrap();
    let mut image = media.image();
    pool.die();
    let (superblock, _, start) = place(&image);
    let header = SavedHeader::decode(&image[start..]).unwrap();
    let forged =
        SavedHeader { generation: superblock.generation, tail_lsn: superblock.tail_lsn, ..header };
    let bytes = forged.encode();
    image[start..start + HEADER_BYTES].copy_from_slice(&bytes);
    set_superblock(&mut image, &Superblock { saved_sum: header_sum(&bytes), ..superblock });
    assert_recovered(&image, "a record");
    let pool = alone().open_on(FileMedia::of(&image)).unwrap();
    assert!(sample::find(&pool, "another").is_ok());
    assert!(is_resumed_with(&image, &alone().mutant(Some(Mutant::NoTailProbe))), "the mutant");
}

/// A lost write of metadata leaves slots that are valid by themselves.
#[test]
fn a_page_of_metadata_that_is_not_the_last_one_is_found() {
    let before = closed_image();
    let image = later_image(&before);
    let (superblock, ..) = place(&image);
    let metadata = superblock.layout.metadata();
    let mut stale = 0;
    for page in 0..superblock.layout.metadata_pages as usize {
        let start = metadata.offset_bytes as usize + page * PAGE;
        if image[start..start + PAGE] != before[start..start + PAGE] {
            let mut image = image.clone();
            image[start..start + PAGE].copy_from_slice(&before[start..start + PAGE]);
            let report = check(FileMedia::of(&image), &CheckOptions::default()).unwrap();
            assert!(!report.is_sound(), "{report}");
            assert!(!is_resumed(&image));
            stale += 1;
        }
    }
    assert!(stale > 0);
}

#[test]
fn the_check_compares_what_was_saved_and_a_repair_discards_it() {
    let image = closed_image();
    let (_, layout, start) = place(&image);
    let block = layout.page_of_block(layout.blocks_of(Map::OccupiedSlots).start) as usize * PAGE;
    let mut damaged = image.clone();
    damaged[start + block] ^= 0x80;
    let report = check(FileMedia::of(&damaged), &CheckOptions::default()).unwrap();
    assert_eq!(report.findings.len(), 1, "{report}");
    assert_eq!(report.findings[0].kind, FindingKind::SavedState);
    let media: Arc<FileMedia> = FileMedia::of(&damaged);
    let repaired = repair(media.clone(), &CheckOptions::default()).unwrap();
    assert_eq!((repaired.refused, repaired.after.findings), (vec![], vec![]));
    assert!(is_resumed(&media.image()));
    sample::assert_complete(&alone().open_on(media).unwrap());
}

/// Pages that waited only for the tail are free after the close.
#[test]
fn what_was_freed_at_last_is_free() {
    for mutant in [None, Some(Mutant::SavedWhileFreed)] {
        let media = FileMedia::of(&closed_image());
        let pool = alone().mutant(mutant).open_on(media.clone()).unwrap();
        let free = pool.info().unwrap().free_pages;
        sample::destroy(&pool, "gamma").unwrap();
        drop(pool);
        let report = check(media.clone(), &CheckOptions::default()).unwrap();
        assert_eq!(report.is_sound(), mutant.is_none(), "{report}");
        let pool = alone().open_on(media.clone()).unwrap();
        assert_eq!(pool.info().unwrap().free_pages > free, mutant.is_none());
        assert_eq!(media.len_bytes(), POOL_BYTES as u64);
    }
}

/// A pool with objects in two pages of slots, of which opening reads the first.
fn of_two_pages() -> Vec<u8> {
    let media = FileMedia::of(&closed_image());
    let pool = alone().open_on(media.clone()).unwrap();
    (0..6).for_each(|index| drop(sample::create(&pool, &format!("more {index}"), 2, 0).unwrap()));
    let last = sample::find(&pool, "more 5").unwrap().number;
    assert_eq!(last / 8, 1, "in the second page");
    drop(pool);
    media.image()
}

fn names(pool: &Pool) -> Vec<Vec<u8>> {
    let mut names: Vec<_> = pool.inodes().unwrap().into_iter().map(|inode| inode.name).collect();
    names.sort_unstable();
    names
}

/// Inverts a byte of the second page of metadata.
fn invert_byte_of_second_page(media: &dyn Media) {
    let mut superblock = vec![0; 2 * PAGE];
    media.read_at(0, &mut superblock).unwrap();
    let place = forge::superblock(&superblock).layout.metadata().offset_bytes + PAGE_BYTES + 100;
    let mut byte = [0];
    media.read_at(place, &mut byte).unwrap();
    media.write_unguarded(place, &[!byte[0]]).unwrap();
}

/// What cannot be read may have any name: a second object of that name would be one too many.
#[test]
fn an_object_that_cannot_be_read_does_not_count_as_absent() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, of_two_pages()).unwrap();
    let media = FileMedia::open(&path);
    let assert_unknown = |pool: &Pool| {
        for name in ["more 5", "absent"] {
            let found = pool.object_named(name.as_bytes());
            assert!(matches!(found, Err(PoolError::Damaged { .. })), "{name}: {found:?}");
            if pool.is_writable() {
                let found = pool.transact_unguarded(vec![], |transaction| {
                    Ok(transaction.object_named(name.as_bytes()))
                });
                assert!(matches!(found, Err(PoolError::Damaged { .. })), "{name}: {found:?}");
            }
        }
        assert!(pool.object_named(b"alpha").unwrap().is_some(), "the rest can be used");
    };
    let assert_whole = |pool: &Pool| {
        assert!(pool.object_named(b"more 5").unwrap().is_some());
        assert!(pool.object_named(b"absent").unwrap().is_none());
    };
    // When the index is built.
    for options in [reading(), alone()] {
        invert_byte_of_second_page(&*media);
        let pool = options.open(&path).unwrap();
        assert_unknown(&pool);
        invert_byte_of_second_page(&*media);
        assert_whole(&pool);
        drop(pool);
        drop(shared().check(true).open(&path).unwrap());
    }
    // On the path to it, in a process that did not read it before.
    let writer = shared().open(&path).unwrap();
    invert_byte_of_second_page(&*media);
    let joined = shared().open(&path).unwrap();
    let found = joined.object_named(b"more 5");
    assert!(matches!(found, Err(PoolError::Damaged { .. })), "{found:?}");
    invert_byte_of_second_page(&*media);
    assert_whole(&joined);
    assert_whole(&writer);
}

/// A process dies while it makes a page present, before it changes the page: nothing has changed.
fn dies_at(point: &'static str, mutant: Option<Mutant>) -> bool {
    let media = FileMedia::of(&of_two_pages());
    let pool = alone().mutant(mutant).open_on(media.clone()).unwrap();
    let (before, free) = (names(&pool), pool.info().unwrap().free_pages);
    let died = end_thread_at(point, || sample::destroy(&pool, "more 5"));
    assert!(died.is_none(), "no thread passed {point}");
    // Reading alone repairs nothing.
    let is_whole = names(&pool) == before;
    if !is_whole {
        return false;
    }
    let is_right = sample::destroy(&pool, "more 4").is_ok_and(|()| {
        pool.checkpoint().unwrap();
        names(&pool).len() == before.len() - 1 && pool.info().unwrap().free_pages == free + 2
    });
    drop(pool);
    is_right && check(media, &CheckOptions::default()).unwrap().findings.is_empty()
}

#[test]
fn a_process_may_die_while_a_page_becomes_present() {
    for point in
        ["materialise-begun", "materialise-copied", "materialise-present", "materialise-cleared"]
    {
        assert!(dies_at(point, None), "{point}");
    }
    assert!(!dies_at("materialise-present", Some(Mutant::PresentTooEarly)), "the mutant");
}

/// The map of used pages is computed anew from what the base and the image name.
#[test]
fn what_was_freed_stays_free_when_the_map_is_rebuilt() {
    for mutant in [None, Some(Mutant::BaseUsedKept)] {
        let media = FileMedia::of(&of_two_pages());
        let pool = alone().mutant(mutant).open_on(media.clone()).unwrap();
        sample::destroy(&pool, "more 5").unwrap();
        pool.checkpoint().unwrap();
        let free = pool.info().unwrap().free_pages;
        // The death of a process that holds the lock makes the next one repair.
        let inode = sample::find(&pool, "more 3").unwrap();
        let died = end_thread_at("packed-written", || {
            pool.change_unguarded(vec![], |slots| {
                slots.put(Inode::free(inode.number, inode.generation));
                Ok::<(), PoolError>(())
            })
        });
        assert!(died.is_none());
        assert_eq!(pool.info().unwrap().free_pages == free, mutant.is_none());
        drop(pool);
        let report = check(media, &CheckOptions::default()).unwrap();
        assert!(report.findings.is_empty() || mutant.is_some(), "{report}");
    }
}

/// Uses the pool; whatever it answers is no panic.
fn use_all(image: &[u8]) -> Result<(), PoolError> {
    let _ = check(FileMedia::of(image), &CheckOptions::default())?;
    for options in [reading(), alone(), alone().check(true)] {
        let media = FileMedia::of(image);
        let Ok(pool) = options.open_on(media.clone()) else { continue };
        for inode in pool.inodes()? {
            // What a slot names lies in the data, or the slot is not believed.
            for run in inode.all_runs().filter(|run| !run.is_hole()) {
                assert!(run.start_page >= pool.layout().data_start_page, "{inode:?}");
                assert!(run.end_page() <= pool.layout().page_count, "{inode:?}");
            }
            let _ = sample::read(&pool, &inode);
        }
        let _ = (pool.info(), pool.orphans(), pool.room());
        if pool.is_writable() {
            let _ = sample::create(&pool, "new", 3, 0);
            if pool.object_named(b"new").is_ok_and(|found| found.is_some()) {
                let _ = sample::destroy(&pool, "new");
            }
            let _ = pool.checkpoint();
        }
        drop(pool);
        let _ = reading().open_on(media);
    }
    Ok(())
}

/// Bits of no page or slot, and pages that are never free as free ones.
#[test]
fn maps_that_no_pool_can_have_are_not_believed() {
    let image = of_two_pages();
    let (superblock, layout, start) = place(&image);
    let block =
        |map: Map| start + layout.page_of_block(layout.blocks_of(map).start) as usize * PAGE;
    let forged = |what: &str, change: &dyn Fn(&mut [u8])| {
        let mut image = image.clone();
        change(&mut image);
        assert!(forge::reseal(&mut image));
        assert_recovered(&image, what);
    };
    let slots = superblock.layout.slots() as usize;
    for map in [Map::OccupiedSlots, Map::Objects, Map::Orphans] {
        let place = block(map);
        forged(&format!("{map:?}"), &|image| image[place + slots / 8] |= 1 << (slots % 8));
    }
    let used = block(Map::UsedPages);
    let bit = |page: u64| (used + page as usize / 8, 1 << (page % 8));
    let is_free = |page: &u64| image[bit(*page).0] & bit(*page).1 == 0;
    let free = (0..superblock.layout.page_count).find(is_free).unwrap();
    for page in [0, superblock.layout.data_start_page - 1, superblock.saved.start_page] {
        assert!(!is_free(&page));
        // As many as before.
        forged(&format!("page {page}"), &|image| {
            [page, free].map(bit).into_iter().for_each(|(place, bit)| image[place] ^= bit);
        });
    }
}

#[test]
fn forged_states_end_in_errors_and_not_in_crashes() {
    let image = of_two_pages();
    let (superblock, layout, start) = place(&image);
    let mut rng = Rng::new(seed(7));
    let maps = start + layout.table_pages as usize * PAGE;
    let metadata = superblock.layout.metadata();
    for round in 0..steps(150) {
        let mut forged = image.clone();
        let mut change = |first: usize, len: usize, count: u64| {
            for _ in 0..=rng.below(count) {
                let at = first + rng.below(len as u64) as usize;
                forged[at] ^= 1 << rng.below(8);
            }
        };
        match round % 3 {
            // The maps.
            0 => change(maps, layout.blocks as usize * PAGE, 20),
            // Few bits of the first words, which are those that are used.
            1 => {
                for block in 0..layout.blocks as usize {
                    change(maps + block * PAGE, 16, 6);
                }
            }
            _ => {
                change(metadata.offset_bytes as usize, metadata.len_bytes as usize, 12);
                let slots =
                    &mut forged[metadata.offset_bytes as usize..][..metadata.len_bytes as usize];
                slots.as_chunks_mut::<SLOT_BYTES>().0.iter_mut().for_each(|slot| {
                    if slot.iter().any(|byte| *byte != 0) {
                        forge::seal_slot(slot);
                    }
                });
                forge::redigest(&mut forged);
            }
        }
        assert!(forge::reseal(&mut forged));
        let _ = use_all(&forged);
    }
}
