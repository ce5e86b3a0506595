//! A pool without room.

use std::fs::{self, File};
use std::io::Write;

use aquifer_fuse::Cache;

use crate::place::Place;

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
