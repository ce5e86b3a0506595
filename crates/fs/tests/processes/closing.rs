//! After all writers have closed the pool and the machine was restarted properly, everything is
//! there, even if readers stay.

use std::path::Path;

use crate::scratch::{Scratch, read_all};
use aquifer_fs::Files;
use aquifer_pool::media::PersistenceDomain;
use aquifer_pool::{Pool, PoolOptions};
use aquifer_testkit::child;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("writes", writes)];

/// On a disk, in the machine's boot number `boot`.
fn options(boot: u64, read_only: bool) -> PoolOptions {
    Pool::options()
        .read_only(read_only)
        .boot(boot)
        .domain(PersistenceDomain::PageCache)
        .background(false)
}

fn write(files: &Files, path: &str) {
    files.create_file(path).unwrap().write_all_at(path.as_bytes(), 0).unwrap();
}

fn writes() {
    let path = std::env::var("POOL").expect("the pool");
    let files = Files::new(options(1, false).open(path).unwrap());
    write(&files, "/in another process");
}

/// Copies the file, as a proper shutdown leaves it on the disk, without the shared memory, and
/// checks it.
fn assert_survives_a_restart(path: &Path, expected: &[&str]) {
    let directory = aquifer_testkit::scratch::in_memory();
    let copy = directory.path().join("pool");
    std::fs::copy(path, &copy).unwrap();
    let files = Files::new(options(2, false).open(&copy).unwrap());
    for name in expected {
        assert_eq!(read_all(&files, name).unwrap(), name.as_bytes(), "{name}");
    }
}

#[test]
fn a_reader_that_stays_does_not_keep_the_last_writer_from_leaving_everything() {
    let scratch = Scratch::with_pool(1 << 20, &Pool::options());
    let first = Files::new(options(1, false).open(&scratch.path).unwrap());
    let reader = Files::new(options(1, true).open(&scratch.path).unwrap());
    let second = Files::new(options(1, false).open(&scratch.path).unwrap());
    write(&first, "/first");
    write(&second, "/second");
    drop(first);
    write(&second, "/later");
    drop(second);
    assert_survives_a_restart(&scratch.path, &["/first", "/second", "/later"]);
    // The reader keeps working, and sees new files.
    assert_eq!(read_all(&reader, "/later").unwrap(), b"/later");
    let third = Files::new(options(1, false).open(&scratch.path).unwrap());
    write(&third, "/third");
    assert_eq!(read_all(&reader, "/third").unwrap(), b"/third");
    drop(third);
    assert_survives_a_restart(&scratch.path, &["/later", "/third"]);
    drop(reader);
    assert_survives_a_restart(&scratch.path, &["/later", "/third"]);
}

#[test]
fn the_last_writer_may_be_another_process() {
    let scratch = Scratch::with_pool(1 << 20, &Pool::options());
    let first = Files::new(options(1, false).open(&scratch.path).unwrap());
    let reader = Files::new(options(1, true).open(&scratch.path).unwrap());
    write(&first, "/here");
    drop(first);
    let status = child::command("writes").env("POOL", &scratch.path).status().unwrap();
    assert!(status.success(), "{status}");
    assert_survives_a_restart(&scratch.path, &["/here", "/in another process"]);
    drop(reader);
}
