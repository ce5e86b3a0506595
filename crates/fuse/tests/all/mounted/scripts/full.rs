//! A pool without room.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use aquifer_fs::Files;
use aquifer_fuse::Cache;
use aquifer_sys::memory::{self, Protection};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::mounted::place::{Place, alone};

/// A piece of free room, and how many there are: more than one transaction takes, and too few for the
/// bytes, which are one request.
const PIECE_BYTES: usize = 8192;
const PIECES: usize = 100;
const LEN_BYTES: usize = 1 << 20;

/// Writes until something says that there is no room: the write, or later a sync.
fn fill(path: &std::path::Path) -> Option<i32> {
    let mut file = File::create(path).expect("room for a name");
    for _ in 0..64 {
        if let Err(error) = file.write_all(&[7; 1 << 20]).and_then(|()| file.sync_all()) {
            return error.raw_os_error();
        }
    }
    None
}

pub fn a_full_pool_is_an_error_that_ends() {
    for cache in [Cache::WriteBack, Cache::WriteThrough, Cache::Shared] {
        let Some(place) = Place::mount(32 << 20, cache) else { return };
        let path = place.root().join("f");
        assert_eq!(fill(&path), Some(libc::ENOSPC), "{cache:?}");
        fs::remove_file(&path).expect("removing needs no room");
        // Its pages are free when the log has moved on.
        let again = (0..100).find(|turn| {
            let small = place.root().join(format!("small {turn}"));
            fs::write(&small, [7; 8192]).is_ok()
                && File::open(&small).is_ok_and(|it| it.sync_all().is_ok())
        });
        assert!(again.is_some(), "{cache:?}");
        place.unmount().assert_sound();
    }
}

/// With write-back a full pool shows at `fsync` or `close`, to each open file once, as on ext4 after
/// a write-back that failed; then the file can be used as before.
pub fn each_open_file_hears_of_a_full_pool_once() {
    let Some(place) = Place::mount(32 << 20, Cache::WriteBack) else { return };
    let path = place.root().join("f");
    let mut writer = File::create(&path).expect("room for a name");
    let other = File::options().write(true).open(&path).expect("it is there");
    for _ in 0..40 {
        writer.write_all(&[7; 1 << 20]).expect("it stays in the page cache");
    }
    for file in [&writer, &other] {
        let failed = file.sync_all().expect_err("40 MiB in 32 MiB");
        assert_eq!(failed.raw_os_error(), Some(libc::ENOSPC));
    }
    for file in [&writer, &other] {
        file.sync_all().expect("it was told");
    }
    writer.set_len(8192).expect("it gets shorter");
    writer.sync_all().expect("nothing is left to write");
    drop((writer, other));
    place.unmount().assert_sound();
}

/// Leaves the pool, which is not mounted, with [`PIECES`] pieces of free room.
fn break_into_pieces(pool: &Path) {
    let files = Files::new(alone().open(pool).expect("the pool opens"));
    for index in 0..2 * PIECES {
        files.write(format!("/small {index}"), [1; PIECE_BYTES]).expect("an empty pool");
    }
    let rest = files.create_file("/rest").expect("room for a name");
    let mut offset_bytes = 0;
    while rest.write_all_at(&[1; PIECE_BYTES], offset_bytes).is_ok() {
        offset_bytes += PIECE_BYTES as u64;
    }
    for index in 0..PIECES {
        files.remove_file(format!("/small {}", 2 * index)).expect("it was made");
    }
    files.pool().checkpoint().expect("removing needs no room");
    let space = files.space().expect("the pool is open");
    assert!(space.free_bytes < LEN_BYTES as u64, "{space:?}");
    assert_eq!(space.largest_free_bytes, PIECE_BYTES as u64);
}

/// Bytes in which no two words are equal.
fn pattern() -> Vec<u8> {
    (0..LEN_BYTES / 8).flat_map(|word| (word as u64 + 1).to_le_bytes()).collect()
}

fn write_and_sync(path: &Path) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&pattern())?;
    file.sync_all()
}

fn store_and_sync(path: &Path) -> io::Result<()> {
    let file = File::options().read(true).write(true).create_new(true).open(path)?;
    file.set_len(LEN_BYTES as u64)?;
    let start = memory::map_file(LEN_BYTES, Protection::ReadWrite, file.as_fd(), 0)?;
    let bytes = pattern();
    // SAFETY: as long as the mapping, and nothing else uses it.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, LEN_BYTES) };
    // SAFETY: mapped above, and starts at a page.
    let synced = unsafe { memory::sync(start, LEN_BYTES) };
    // SAFETY: mapped above, and not used any more.
    unsafe { memory::unmap(start, LEN_BYTES) }?;
    synced
}

/// Whatever the room that is left looks like: a sync that succeeds has made all bytes durable.
pub fn what_finds_only_some_room_is_not_synced() {
    for cache in [Cache::WriteBack, Cache::WriteThrough, Cache::Shared] {
        for save in [write_and_sync, store_and_sync] {
            let Some(place) = Place::mount(16 << 20, cache) else { return };
            let unmounted = place.unmount();
            break_into_pieces(&unmounted.pool());
            let place = unmounted.mount(cache);
            let failed = save(&place.root().join("file")).expect_err("1 MiB in 800 KiB");
            assert_eq!(failed.raw_os_error(), Some(libc::ENOSPC), "{cache:?}");
            place.unmount().assert_sound();
        }
    }
}

/// A call that finds no room changes nothing, or says how much it has done: programs see the bytes that
/// the pool holds.
pub fn what_finds_only_some_room_shows_what_the_pool_holds() {
    for cache in [Cache::WriteBack, Cache::WriteThrough, Cache::Shared] {
        let Some(place) = Place::mount(16 << 20, cache) else { return };
        let unmounted = place.unmount();
        break_into_pieces(&unmounted.pool());
        let place = unmounted.mount(cache);
        let (synced, copied) = (place.root().join("synced"), place.root().join("copied"));
        fs::write(&synced, [5; 20_000]).expect("room for some");
        let file = File::options().read(true).write(true).open(&synced).expect("it is there");
        file.sync_all().expect("room for some");
        let full = rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, 100, LEN_BYTES as u64);
        assert_eq!(full, Err(Errno::NOSPC), "{cache:?}");

        let rest = File::open(place.root().join("rest")).expect("it is there");
        let copy = File::create(&copied).expect("room for a name");
        let copies = |len| rustix::fs::copy_file_range(&rest, None, &copy, None, len);
        let count = copies(LEN_BYTES).expect("room for some");
        assert!(0 < count && count < LEN_BYTES, "{count}");
        let seen = [&synced, &copied].map(|path| fs::read(path).expect("it is there"));
        assert!(seen == [vec![5; 20_000], vec![1; count]], "{cache:?}");
        drop((file, rest, copy));
        let unmounted = place.unmount();
        unmounted.assert_sound();
        let place = unmounted.mount(cache);
        for (name, seen) in ["synced", "copied"].into_iter().zip(seen) {
            assert!(fs::read(place.root().join(name)).expect("it is there") == seen, "{name}");
        }
        place.unmount().assert_sound();
    }
}

/// The kernel cannot be told how long a file may be.
pub fn a_write_behind_the_longest_file_is_an_error() {
    let longest = aquifer_pool::format::file::MAX_FILE_BYTES;
    for cache in [Cache::WriteBack, Cache::WriteThrough, Cache::Shared] {
        let Some(place) = Place::mount(16 << 20, cache) else { return };
        let file = File::create(place.root().join("file")).expect("room for a name");
        let written = file.write_all_at(b"x", longest);
        if cache == Cache::WriteBack {
            written.expect("it stays in the page cache");
            let failed = file.sync_all().expect_err("it is too far");
            assert_eq!(failed.raw_os_error(), Some(libc::EFBIG));
        } else {
            let failed = written.expect_err("it is too far");
            assert_eq!(failed.raw_os_error(), Some(libc::EFBIG), "{cache:?}");
        }
        drop(file);
        let unmounted = place.unmount();
        unmounted.assert_sound();
        let place = unmounted.mount(cache);
        assert!(fs::read(place.root().join("file")).expect("it is there").is_empty());
        place.unmount();
    }
}
