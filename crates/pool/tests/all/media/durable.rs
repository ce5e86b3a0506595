//! What becomes durable, what is left alone, and the errors when it is lost.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use aquifer_crashkit::unguarded::UnguardedMedia;
use aquifer_pool::media::{
    ByteRange, CreateOptions, Media, OpenError, PersistenceDomain, create, open,
};
use aquifer_sys::memory::{CacheStat, cachestat};
use aquifer_testkit::failing_device::{FailingDevice, Undo};

const PAGE_BYTES: u64 = 4096;
const LEN_BYTES: u64 = 16 << 20;

fn pages(first: u64, count: u64) -> ByteRange {
    ByteRange { offset_bytes: first * PAGE_BYTES, len_bytes: count * PAGE_BYTES }
}

fn state(media: &dyn Media, range: ByteRange) -> io::Result<CacheStat> {
    cachestat(media.file(), range.offset_bytes, range.len_bytes)
}

/// A page that the kernel writes back on its own looks as if the media had done it; the kernel
/// takes seconds, so at least one of a few attempts is undisturbed.
fn undisturbed(check: impl Fn() -> bool) -> bool {
    (0..5).any(|_| check())
}

#[test]
fn ranges_become_clean_and_others_stay_dirty() {
    let directory = tempfile::tempdir().unwrap();
    let media = create(&directory.path().join("data"), LEN_BYTES, None).unwrap();
    if media.domain() != PersistenceDomain::PageCache {
        return eprintln!("skipped: the temporary directory is {}", media.domain());
    }
    let others = pages(2048, 100);
    let dirty_others = || {
        for page in 0..100 {
            media.write_unguarded(others.offset_bytes + page * PAGE_BYTES, &[1]).unwrap();
        }
    };
    dirty_others();
    match state(&*media, others) {
        Err(error) => return eprintln!("skipped: page states cannot be asked for: {error}"),
        Ok(stat) if stat.dirty == 0 => {
            return eprintln!("skipped: this file system has no dirty pages");
        }
        Ok(_) => {}
    }
    let clean = |range| {
        let stat = state(&*media, range).unwrap();
        assert_eq!((stat.dirty, stat.writeback), (0, 0), "{range:?}");
    };
    // btrfs, for example, may have to sync all of a file.
    let magic = aquifer_sys::file_system::magic(media.file()).unwrap();
    let by_range = aquifer_sys::file_system::commits_whole_inodes(magic);
    if !by_range {
        eprintln!("skipped in part: this file system decides what a sync of a range covers");
    }
    let left_alone = |what: &dyn Fn()| {
        assert!(undisturbed(|| {
            dirty_others();
            what();
            !by_range || state(&*media, others).unwrap().dirty > 0
        }));
    };
    left_alone(&|| {
        media.write_durable_unguarded(3 * PAGE_BYTES, &[2; 8192]).unwrap();
        clean(pages(3, 2));
    });
    left_alone(&|| {
        let scattered: Vec<ByteRange> = (0..40).map(|index| pages(100 + index * 3, 1)).collect();
        for range in &scattered {
            media.write_unguarded(range.offset_bytes, &[3; 4096]).unwrap();
        }
        media.write_back(&scattered).unwrap();
        scattered.iter().copied().for_each(clean);
        media.flush().unwrap();
    });
    left_alone(&|| {
        media.write_unguarded(8 * PAGE_BYTES, &[4; 100]).unwrap();
        media.write_back(&[ByteRange { offset_bytes: 8 * PAGE_BYTES + 7, len_bytes: 1 }]).unwrap();
        clean(pages(8, 1));
    });
}

/// A page that is stored to while it is written back is written again.
#[test]
fn bytes_written_during_an_earlier_write_back_are_written_back() {
    let directory = tempfile::tempdir().unwrap();
    let media = create(&directory.path().join("data"), LEN_BYTES, None).unwrap();
    let all = pages(0, LEN_BYTES / PAGE_BYTES);
    if media.domain() != PersistenceDomain::PageCache || state(&*media, all).is_err() {
        return eprintln!("skipped: page states cannot be asked for");
    }
    let last = pages(LEN_BYTES / PAGE_BYTES - 1, 1);
    for round in 0..30u8 {
        media.write_unguarded(0, &vec![round; LEN_BYTES as usize]).unwrap();
        aquifer_sys::io::start_write_back(media.file(), 0, LEN_BYTES).unwrap();
        media.write_unguarded(last.offset_bytes, &[round ^ 0xff; 4096]).unwrap();
        media.write_back(&[last]).unwrap();
        assert_eq!(state(&*media, last).unwrap().dirty, 0, "round {round}");
    }
}

#[test]
fn many_threads_make_their_ranges_durable() {
    let directory = tempfile::tempdir().unwrap();
    for forced in [PersistenceDomain::PageCache, PersistenceDomain::Dax] {
        let path = directory.path().join(forced.to_string());
        let media = create(&path, LEN_BYTES, Some(forced)).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let media = &media;
                scope.spawn(move || {
                    for round in 0..20u64 {
                        let range = pages(thread * 100 + round, 2);
                        let bytes = vec![thread as u8 + 1; range.len_bytes as usize];
                        if round % 2 == 0 {
                            media.write_durable_unguarded(range.offset_bytes, &bytes).unwrap();
                        } else {
                            media.write_unguarded(range.offset_bytes, &bytes).unwrap();
                            media.write_back(&[range]).unwrap();
                            media.flush().unwrap();
                        }
                    }
                });
            }
        });
        let read = std::fs::read(&path).unwrap();
        for thread in 0..8 {
            let start = thread * 100 * PAGE_BYTES as usize;
            let mine = &read[start..start + 21 * PAGE_BYTES as usize];
            assert!(mine.iter().all(|byte| *byte == thread as u8 + 1));
        }
    }
}

#[test]
fn what_was_lost_is_never_reported_as_durable() {
    let Some(device) = FailingDevice::new() else {
        return eprintln!("skipped: no block device can be made here");
    };
    let path = device.path();
    let media = open(path, true, None).unwrap();
    assert_eq!(media.domain(), PersistenceDomain::PageCache);
    assert_eq!(media.len_bytes(), 32 << 20);
    media.write_durable_unguarded(0, &[1; 4096]).unwrap();
    media.write_back(&[pages(0, 10)]).unwrap();
    media.flush().unwrap();

    device.fill();
    media.write_unguarded(100 * PAGE_BYTES, &[2; 4096]).unwrap();
    media.write_back(&[pages(100, 1)]).expect_err("it could not be written");
    device.empty();
    // The kernel treats the page as clean, so a retry would succeed.
    assert_eq!(state(&*media, pages(100, 1)).unwrap().dirty, 0);
    for _ in 0..3 {
        media.write_back(&[pages(100, 1)]).expect_err("it is still lost");
        media.write_back(&[pages(7, 1)]).expect_err("other writes may be lost too");
        media.flush().expect_err("it is still lost");
    }
    // A durable write makes its own bytes durable.
    media.write_durable_unguarded(200 * PAGE_BYTES, &[3; 4096]).unwrap();
    // Media that are opened afterwards are not affected.
    let anew = open(path, true, None).unwrap();
    anew.write_unguarded(100 * PAGE_BYTES, &[4; 4096]).unwrap();
    anew.write_back(&[pages(100, 1)]).unwrap();
    anew.flush().unwrap();
}

#[test]
fn a_durable_write_that_failed_can_be_repeated() {
    let Some(device) = FailingDevice::new() else {
        return eprintln!("skipped: no block device can be made here");
    };
    let media = open(device.path(), true, None).unwrap();
    device.fill();
    media
        .write_durable_unguarded(100 * PAGE_BYTES, &[2; 4096])
        .expect_err("it could not be written");
    media.write_durable_unguarded(100 * PAGE_BYTES, &[2; 4096]).expect_err("nor again");
    device.empty();
    media.write_durable_unguarded(100 * PAGE_BYTES, &[2; 4096]).unwrap();
    let mut byte = [0];
    File::open(device.path())
        .map(|file| {
            aquifer_sys::io::read_exact_at(file.as_fd(), &mut byte, 100 * PAGE_BYTES).unwrap();
        })
        .unwrap();
    assert_eq!(byte, [2]);
    media.write_back(&[pages(0, 1)]).expect_err("a page may have been lost with the failed write");
}

/// Several threads sync concurrently on a device without room: each gets an error for its own page.
#[test]
fn of_many_threads_none_is_told_that_a_lost_page_is_durable() {
    let Some(device) = FailingDevice::new() else {
        return eprintln!("skipped: no block device can be made here");
    };
    for round in 0..5 {
        let media = open(device.path(), true, None).unwrap();
        device.fill();
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let media = &media;
                scope.spawn(move || {
                    let range = pages(1000 + round * 100 + thread * 8, 1);
                    let bytes = [thread as u8; 4096];
                    let durable = if thread % 2 == 0 {
                        media.write_durable_unguarded(range.offset_bytes, &bytes)
                    } else {
                        media.write_unguarded(range.offset_bytes, &bytes).unwrap();
                        media.write_back(&[range])
                    };
                    durable.expect_err("there is no room for any of them");
                });
            }
        });
        device.empty();
    }
}

/// On a machine that has one: `AQUIFER_DAX_DEVICE` names a device DAX whose bytes may be
/// overwritten.
#[test]
fn a_dax_device_is_media() {
    let Some(path) = std::env::var_os("AQUIFER_DAX_DEVICE") else {
        return eprintln!("skipped: AQUIFER_DAX_DEVICE names no device");
    };
    let path = Path::new(&path);
    let media = create(path, 8 << 20, None).unwrap();
    assert_eq!(media.domain(), PersistenceDomain::Dax);
    assert!(!media.maps_privately() && media.len_bytes() >= 8 << 20);
    let end_bytes = media.len_bytes();
    media.write_durable_unguarded(end_bytes - 3, b"end").unwrap();
    media.write_unguarded(5000, b"some").unwrap();
    media.write_back(&[pages(1, 1)]).unwrap();
    media.flush().unwrap();
    media.grow(end_bytes + 1).expect_err("it has the length it has");
    for forced in [None, Some(PersistenceDomain::Dax), Some(PersistenceDomain::Volatile)] {
        let again = open(path, false, forced).unwrap();
        let mut bytes = [0; 7];
        again.read_at(4998, &mut bytes).unwrap();
        assert_eq!(&bytes, b"\0\0some\0");
        again.read_at(end_bytes - 7, &mut bytes).unwrap();
        assert!(bytes.ends_with(b"end"));
        again.read_at(end_bytes - 6, &mut bytes).expect_err("behind the end");
    }
    let error = open(path, true, Some(PersistenceDomain::PageCache)).map(drop).unwrap_err();
    assert!(matches!(error, OpenError::BadDomain { .. }), "{error}");
}

#[test]
fn a_device_is_made_into_media_and_has_its_length() {
    let Some(device) = FailingDevice::new() else {
        return eprintln!("skipped: no block device can be made here");
    };
    let path = device.path();
    std::fs::write(path, vec![9; 1 << 20]).unwrap();
    let made = CreateOptions::new().create(path, 64 << 20, &mut |_, _| {});
    let error = made.map(drop).unwrap_err();
    assert!(error.to_string().contains("the device has 33554432"), "{error}");
    let media = create(path, 1 << 20, None).unwrap();
    assert_eq!(media.len_bytes(), 32 << 20);
    let mut bytes = vec![1; 1 << 20];
    media.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "what it held is gone");
    let error = media.grow(33 << 20).unwrap_err();
    assert!(error.to_string().contains("a larger one"), "{error}");
    media.grow(1).unwrap();
    for forced in [PersistenceDomain::Dax, PersistenceDomain::Volatile] {
        let mapped = open(path, true, Some(forced)).unwrap();
        assert_eq!((mapped.domain(), mapped.len_bytes()), (forced, 32 << 20));
        mapped.write_durable_unguarded(5000, b"mapped").unwrap();
        let mut bytes = [0; 6];
        media.read_at(5000, &mut bytes).unwrap();
        assert_eq!(&bytes, b"mapped");
    }
}

/// A small private file system in memory, or on a block device in memory.
fn small_file_system(on_device: bool) -> Option<(tempfile::TempDir, Undo)> {
    let directory = tempfile::tempdir().unwrap();
    let mut undo = Undo::default();
    let place = directory.path().to_str().unwrap().to_owned();
    let unmount: [&str; 3] = ["umount", "-l", &place];
    undo.run(&["mount", "-t", "tmpfs", "-o", "size=40M", "none", &place], &unmount)?;
    if on_device {
        let backing = format!("{place}/backing");
        File::create(&backing).unwrap().set_len(16 << 20).unwrap();
        undo.run(&["mkfs.ext4", "-q", "-F", &backing], &[])?;
        undo.run(&["mount", "-o", "loop", &backing, &place], &unmount)?;
    }
    Some((directory, undo))
}

#[test]
fn a_full_file_system_is_told_when_growing_and_the_length_stays() {
    let domains = [None, Some(PersistenceDomain::Dax), Some(PersistenceDomain::PageCache)];
    for on_device in [false, true] {
        let Some((directory, undo)) = small_file_system(on_device) else {
            return eprintln!("skipped: no file system can be made and mounted here");
        };
        for (index, forced) in domains.into_iter().enumerate() {
            let path = directory.path().join(index.to_string());
            let media = create(&path, 1 << 20, forced).unwrap();
            media.write_unguarded(0, b"kept").unwrap();
            let error = media.grow(64 << 20).unwrap_err();
            assert_eq!(error.source.raw_os_error(), Some(libc::ENOSPC), "{error}");
            assert_eq!(media.len_bytes(), 1 << 20, "{forced:?}");
            media.grow(2 << 20).unwrap();
            media.write_durable_unguarded((2 << 20) - 1, &[1]).unwrap();
            let mut bytes = [0; 4];
            media.read_at(0, &mut bytes).unwrap();
            assert_eq!(&bytes, b"kept");
            drop(media);
            std::fs::remove_file(&path).unwrap();
            let error = create(&path, 64 << 20, forced).map(drop).unwrap_err();
            assert!(matches!(error, OpenError::NoSpace { .. }), "{error}");
            assert!(!path.exists());
        }
        drop(undo);
    }
}
