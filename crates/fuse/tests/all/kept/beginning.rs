//! The directory that a mount is shown at.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

use aquifer_fuse::{Mounting, mounts, unmount};
use aquifer_pool::Pool;

use crate::kept::place::{self, How, Place, WAITS, WAITS_IF};

pub fn a_mount_is_shown_at_the_directory_that_was_named() {
    // Whether pools can be mounted here.
    let Some(probe) = Place::mount(&How::default()) else { return };
    probe.unmount();
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    for name in ["above/named", "victim/named"] {
        fs::create_dir_all(at(name)).expect("a new directory");
    }
    drop(Pool::create(at("pool"), 64 << 20).expect("a new pool"));
    fs::write(at(WAITS_IF), "").expect("a new file");
    let program = place::program(&How::default(), directory.path());
    let mounting = Mounting::new(at("pool"), at("above/named")).program(program);
    let starting = std::thread::spawn(move || mounting.start());
    // The server is there, and no directory shows the mount.
    while !at(WAITS_IF).with_extension(WAITS).exists() {
        assert!(!starting.is_finished(), "the server waits");
        std::thread::yield_now();
    }
    fs::rename(at("above"), at("moved")).expect("its owner");
    symlink(at("victim"), at("above")).expect("its owner");
    fs::remove_file(at(WAITS_IF)).expect("it is there");
    let keeper = starting.join().expect("no panic").expect("nothing uses it");
    let all = mounts().expect("the table");
    let here = all.into_iter().map(|it| it.directory);
    let shown: Vec<_> = here.filter(|it| it.starts_with(directory.path())).collect();
    for directory in &shown {
        unmount(directory, false, Duration::from_secs(60)).expect("nothing uses it");
    }
    assert!(keeper.wait().expect("a child").success());
    assert_eq!(shown, [at("moved/named")]);
}
