//! Pools that are larger than what a page of their maps describes: 128 MiB.

use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::disk::succeeds;
use crate::support::*;
use aquifer_check::{CheckOptions, check};
use aquifer_crashkit::unguarded::UnguardedPool;
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::inode::Inode;
use aquifer_pool::format::saved::{Map, SavedHeader};
use aquifer_pool::{Pool, PoolError, PoolOptions, end_thread_at};
use aquifer_testkit::child;

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("full", || with_little(shared_memory_is_full)),
    ("repair", || with_little(nothing_is_taken_twice)),
];

/// A sparse pool of this length.
fn sparse(len_bytes: u64, options: &PoolOptions) -> (tempfile::TempDir, PathBuf, Pool) {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::File::create(&path).unwrap().set_len(len_bytes).unwrap();
    let options = options.clone().inodes(1000).log_bytes(1 << 20);
    let pool = options.create_on(FileMedia::open(&path)).unwrap();
    (directory, path, pool)
}

/// A map of 64 GiB has 2 MiB.
#[test]
fn opening_a_large_pool_reads_and_takes_little() {
    let (directory, path, pool) = sparse(64 << 30, &shared());
    sample::create(&pool, "alpha", 3, 0).unwrap();
    drop(pool);
    let segments = directory.path().join("segments");
    std::fs::create_dir(&segments).unwrap();
    let sharing = shared().segment_directory(&segments);
    for (options, has_segments) in [(reading(), false), (alone(), false), (sharing, true)] {
        let media = FileMedia::open(&path);
        let pool = options.open_on(media.clone()).unwrap();
        let read: u64 = media.take_reads().iter().map(|range| range.len_bytes).sum();
        assert!(read < 256 << 10, "{read} bytes");
        assert!(sample::find(&pool, "alpha").is_ok());
        assert!(pool.room().unwrap().largest_free_pages > 15 << 20);
        let file = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().metadata().unwrap();
        let files: Vec<_> = std::fs::read_dir(&segments).unwrap().map(file).collect();
        assert_eq!(files.is_empty(), !has_segments);
        let memory: u64 = files.iter().map(|file| file.blocks() * 512).sum();
        assert!(memory < 2 << 20, "{memory} bytes");
    }
}

/// All openings find the room that a recovery in full finds.
fn assert_room(path: &Path, free_pages: u64) {
    let report = check(FileMedia::open(path), &CheckOptions::default()).unwrap();
    assert_eq!(report.findings, []);
    let room =
        |options: PoolOptions| options.open_on(FileMedia::open(path)).unwrap().room().unwrap();
    let expected = room(reading().check(true));
    assert_eq!(expected.free_pages, free_pages);
    for options in [reading(), alone(), alone().check(true), reading()] {
        assert_eq!(room(options), expected);
    }
}

#[test]
fn pages_behind_the_maps_are_free() {
    let options = shared().fresh_step_pages(1000);
    let (_directory, path, pool) = sparse(1 << 30, &options);
    let empty = pool.room().unwrap();
    sample::create(&pool, "near", 1, 0).unwrap();
    let large = pool.reserve(100_000, 1).unwrap();
    sample::create(&pool, "far", 2, 0).unwrap();
    assert!(sample::find(&pool, "far").unwrap().runs[0].start_page > 100_000);
    let joined = options.open_on(FileMedia::open(&path)).unwrap();
    let aligned = joined.reserve(1, 1 << 17).unwrap();
    assert_eq!(aligned.whole().start_page, 1 << 17);
    for pool in [&pool, &joined] {
        assert_eq!(pool.room().unwrap().free_pages, empty.free_pages - 100_004);
    }
    drop((large, aligned));
    let room = pool.room().unwrap();
    assert_eq!(room.free_pages, empty.free_pages - 3);
    assert!(room.largest_free_pages > 160_000, "{room:?}");
    // Behind what was ever used, and where a process dies with it.
    let died = end_thread_at("pages-marked", || joined.reserve(1, 3 << 16).map(drop));
    assert!(died.is_none());
    assert_eq!(pool.room().unwrap().free_pages, room.free_pages - 1);
    drop(joined);
    free(&pool, "far");
    pool.checkpoint().unwrap();
    drop(pool);
    assert_room(&path, empty.free_pages - 1);
}

/// Removes an object of a sample.
fn free(pool: &Pool, name: &str) {
    let object = sample::find(pool, name).unwrap();
    let freed = pool.change_unguarded(vec![], |slots| {
        slots.put(Inode::free(object.number, object.generation));
        Ok::<(), PoolError>(())
    });
    freed.unwrap();
}

/// A pool whose saved map of used pages was forged: it ends before the object "far". Returns how many
/// pages are free according to it.
fn with_short_map(options: &PoolOptions) -> (tempfile::TempDir, PathBuf, u64) {
    const PAGE: usize = PAGE_BYTES as usize;
    let (directory, path, pool) = sparse(1 << 30, options);
    sample::create(&pool, "near", 1, 0).unwrap();
    let large = pool.reserve(100_000, 1).unwrap();
    sample::create(&pool, "far", 2, 0).unwrap();
    drop(large);
    sample::create(&pool, "last", 3, 0).unwrap();
    drop(pool);
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut first = vec![0; 4 << 20];
    file.read_exact_at(&mut first, 0).unwrap();
    let (layout, start) = forge::saved_state(&first);
    let place = |block| start + layout.page_of_block(block) as usize * PAGE;
    let blocks = layout.blocks_of(Map::UsedPages);
    first[place(blocks.start + 1)..place(blocks.end)].fill(0);
    let map = &first[place(blocks.start)..place(blocks.end)];
    let used_pages: u64 = map.iter().map(|byte| u64::from(byte.count_ones())).sum();
    let free_pages = forge::superblock(&first).layout.page_count - used_pages;
    let header = SavedHeader::decode(&first[start..]).unwrap();
    let header = SavedHeader { free_pages, ..header }.encode();
    first[start..start + header.len()].copy_from_slice(&header);
    assert!(forge::reseal(&mut first));
    file.write_all_at(&first, 0).unwrap();
    (directory, path, free_pages)
}

#[test]
fn a_forged_map_that_is_too_short_ends_in_no_crash() {
    let (_directory, path, free_pages) = with_short_map(&alone());
    let pool = alone().open_on(FileMedia::open(&path)).unwrap();
    assert_eq!(pool.room().unwrap().free_pages, free_pages, "it is believed");
    free(&pool, "far");
    drop(pool);
    drop(alone().open_on(FileMedia::open(&path)).unwrap());
}

/// In a mount namespace of its own: plays with shared memory of 2 MiB.
fn with_little(play: impl FnOnce(&Path)) {
    let place = tempfile::tempdir_in("/tmp").unwrap();
    let text = place.path().to_str().unwrap();
    if !succeeds("mount", &["--make-rprivate", "/"])
        || !succeeds("mount", &["-t", "tmpfs", "-o", "size=2m", "none", text])
    {
        return println!("skipped: no small tmpfs can be mounted here");
    }
    play(place.path());
    assert!(succeeds("umount", &[text]));
}

/// Takes all shared memory until it is removed.
fn fill(segments: &Path) -> PathBuf {
    let path = segments.join("filler");
    let mut filler = std::fs::File::create(&path).unwrap();
    while filler.write_all(&[1; 512]).is_ok() {}
    path
}

fn is_refused<T>(result: Result<T, PoolError>) -> bool {
    matches!(result, Err(PoolError::SharedMemory(_)))
}

fn shared_memory_is_full(segments: &Path) {
    let options = shared().segment_directory(segments).fresh_step_pages(1000);
    let (_directory, _path, pool) = sparse(1 << 30, &options);
    let front = pool.reserve(1000, 1).unwrap();
    let last_page = front.whole().end_page();
    let behind = pool.reserve(31_700 - last_page, 1).unwrap();
    let freed = front.whole();
    drop(front);
    let filler = fill(segments);
    // The maps have memory for this many pages.
    let known_end_page = PAGE_BYTES * 8;
    for must_be_zero in [true, false] {
        for pages in [2000, 100, 100] {
            let some = pool.reserve_some(pages, Some(known_end_page), must_be_zero).unwrap();
            assert!(some.whole().end_page() <= known_end_page, "{:?}", some.whole());
        }
    }
    assert_eq!(pool.reserve(1000, 1).unwrap().whole(), freed);
    // Where only pages behind them would do, there is no memory.
    assert!(is_refused(pool.reserve(2000, 1)));
    // A call that can do without zeros gets none.
    assert!(pool.reserve_ready(100_000).unwrap().is_none());
    std::fs::remove_file(filler).unwrap();
    let more = pool.reserve(2000, 1).unwrap();
    assert!(more.whole().end_page() > known_end_page);
    drop((more, behind));
}

#[test]
fn pages_that_need_no_shared_memory_are_found_where_it_is_full() {
    child::succeeds_with_mounts("full");
}

/// The repair of the map of used pages fails in the middle, in a call that is no repair.
fn nothing_is_taken_twice(segments: &Path) {
    let options = shared().segment_directory(segments);
    let (_directory, path, _) = with_short_map(&options);
    let pool = options.open_on(FileMedia::open(&path)).unwrap();
    free(&pool, "near");
    let last = sample::find(&pool, "last").unwrap().runs[0];
    let dead = options.open_on(FileMedia::open(&path)).unwrap();
    std::mem::forget(dead.reserve(1, 1).unwrap());
    drop(dead);
    let filler = fill(segments);
    let refused = pool.checkpoint();
    assert!(matches!(refused, Err(PoolError::SharedMemory(_))), "{refused:?}");
    let refused = [pool.reserve(last.pages, 1), pool.reserve(last.pages, 1)];
    assert!(refused.into_iter().all(is_refused));
    std::fs::remove_file(filler).unwrap();
    let next = pool.reserve(last.pages, 1).unwrap().whole();
    assert!(!next.overlaps(last), "{next:?} {last:?}");
}

#[test]
fn pages_in_use_stay_so_where_no_shared_memory_is_left_for_a_repair() {
    child::succeeds_with_mounts("repair");
}
