//! How a mount ends, and what ends with it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::time::Duration;

use aquifer_fs::Files;
use aquifer_fuse::{Cache, Mount, MountOptions};
use rustix::fs::FallocateFlags;

use crate::mounted::place::{Place, alone};
use aquifer_testkit::watchdog::Watchdog;

pub fn an_unmounted_file_system_ends_its_server() {
    let Some(place) = Place::mount(16 << 20, Cache::WriteBack) else { return };
    fs::write(place.root().join("f"), "text").expect("a new file");
    // Nothing else changes the pool meanwhile.
    let refused = aquifer_pool::Pool::open(place.pool()).map(drop).expect_err("it is mounted");
    assert!(refused.to_string().contains("mounted by a test"), "{refused}");
    aquifer_sys::mount::remove(&place.root(), false).expect("nothing uses it");
    place.mounted().wait();
    // What is mounted in its place is left alone.
    let (directory, root) = (tempfile::tempdir().expect("a directory"), place.root());
    let other = alone().create(directory.path().join("pool"), 16 << 20).expect("new");
    let other = Mount::in_process(Files::new(other), &root, &MountOptions::new()).expect("mounted");
    place.unmount().assert_sound();
    fs::write(root.join("g"), "text").expect("the other one is still there");
    other.unmount().expect("nothing uses it");
}

pub fn a_mount_that_is_used_is_gone_nevertheless() {
    let Some(place) = Place::mount(16 << 20, Cache::WriteBack) else { return };
    let path = place.root().join("f");
    fs::write(&path, "text").expect("a new file");
    let mut file = File::open(&path).expect("it is there");
    let files = place.take_apart(|mount| {
        let busy = mount.unmount().expect_err("it is used");
        assert_eq!(busy.raw_os_error(), Some(libc::EBUSY));
    });
    assert!(!path.exists());
    // What the kernel has cached it may still give.
    let read = file.read_to_string(&mut String::new());
    assert!(read.is_ok() || read.is_err_and(|error| error.raw_os_error().is_some()));
    drop(file);
    files.assert_sound();
    let files = Files::open(files.pool()).expect("the pool opens");
    assert_eq!(files.read_to_string("/f").expect("it was written back"), "text");
}

pub fn files_that_are_forgotten_are_freed() {
    let Some(place) = Place::mount(32 << 20, Cache::WriteBack) else { return };
    fn free(place: &Place) -> (u64, u64) {
        let space = rustix::fs::statvfs(place.root()).expect("it is mounted");
        (space.f_ffree, space.f_bfree)
    }
    let before = free(&place);
    let path = place.root().join("f");
    for _ in 0..20 {
        fs::write(&path, [7; 100_000]).expect("a new file");
        let file = File::open(&path).expect("it is there");
        file.sync_all().expect("there is room");
        fs::remove_file(&path).expect("it is there");
        // Kept as long as it is open, and not longer.
        assert_eq!(file.metadata().expect("it is open").len(), 100_000);
        assert!(free(&place).0 < before.0);
        drop(file);
    }
    // The kernel forgets them when it likes; at the latest, without caches.
    let is_freed = (0..100).any(|_| {
        let _ = fs::write("/proc/sys/vm/drop_caches", "2");
        free(&place).0 == before.0
    });
    assert!(is_freed, "{:?}, before {before:?}", free(&place));
    // Their pages are free when the log has moved on.
    let unmounted = place.unmount();
    unmounted.assert_sound();
    assert_eq!(free(&unmounted.mount(Cache::WriteBack)), before);
}

/// What a `CREATE` opens, a `RELEASE` closes: neither is sent.
pub fn new_files_are_closed_without_a_request() {
    const FILES: u64 = 20;
    let (mknod, release) = (8, 18);
    let Some(place) = Place::mount(16 << 20, Cache::WriteBack) else { return };
    for number in 0..FILES {
        let path = place.root().join(number.to_string());
        File::options().write(true).create_new(true).open(path).expect("a new file");
    }
    let path = place.root().join("unwritable");
    let mut how = File::options();
    how.write(true).create(true).mode(0o400);
    let mut file = how.open(&path).expect("whatever its permissions");
    file.write_all(b"text").expect("it is open");
    drop(file);
    assert_eq!(fs::read_to_string(&path).expect("it is there"), "text");
    let counts = place.mounted().counts();
    assert_eq!((counts.of(mknod), counts.of(release)), (FILES + 1, 0));
    place.unmount().assert_sound();
}

/// A file that grows is given room ahead, which it has no more when it was not used for a while: the
/// kernel must not go on showing it.
pub fn room_that_is_given_back_is_not_shown() {
    const PARTS: u64 = 200;
    for cache in [Cache::WriteBack, Cache::WriteThrough, Cache::Shared] {
        let Some(place) = Place::mount(64 << 20, cache) else { return };
        let free = || rustix::fs::statvfs(place.root()).expect("it is mounted").f_bfree;
        let (before, path) = (free(), place.root().join("f"));
        let mut file = File::create(&path).expect("a new file");
        for _ in 0..PARTS {
            file.write_all(&[7; 4096]).and_then(|()| file.sync_data()).expect("there is room");
        }
        drop(file);
        let blocks = || fs::metadata(&path).expect("it is there").blocks();
        println!("{cache:?}: {} blocks at first", blocks());
        let mut watchdog = Watchdog::new();
        while (blocks(), free()) != (8 * PARTS, before - PARTS) && !watchdog.hangs() {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!((blocks(), free()), (8 * PARTS, before - PARTS), "{cache:?}");
        place.unmount().assert_sound();
    }
}

/// The kernel's time of a change and the pool's must be one: a server stamps it later, perhaps in the
/// next tick of the clock.
pub fn times_are_the_same_after_a_remount() {
    const FILES: usize = 3000;
    let Some(place) = Place::mount(64 << 20, Cache::WriteBack) else { return };
    let times = |root: &std::path::Path| -> Vec<_> {
        let time_of = |number: usize| {
            fs::metadata(root.join(number.to_string())).and_then(|it| it.modified()).expect("there")
        };
        (0..FILES).map(time_of).collect()
    };
    for number in 0..FILES {
        let path = place.root().join(number.to_string());
        fs::write(&path, [7; 5000]).expect("a new file");
        let file = File::options().write(true).open(&path).expect("it is there");
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if number % 2 == 0 {
            rustix::fs::fallocate(&file, punch, 0, 4096).expect("there is room");
        } else {
            let source = File::open(&path).expect("it is there");
            rustix::fs::copy_file_range(&source, Some(&mut 0), &file, Some(&mut 8192), 5000)
                .expect("there is room");
        }
    }
    let before = times(&place.root());
    let place = place.unmount().mount(Cache::WriteBack);
    assert_eq!(times(&place.root()), before);
    place.unmount().assert_sound();
}
