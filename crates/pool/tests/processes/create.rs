//! Creating pools while other processes do the same or use the media, and while the creating
//! process is killed: the path has a whole pool, or none.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::*;
use aquifer_check::{CheckOptions, check};
use aquifer_pool::media::{self, OpenError};
use aquifer_pool::{POINTS, Pool, PoolError, PoolOptions};
use aquifer_testkit::child::{self, Reaped};

/// More than is zeroed at once, so that a child stops in the middle.
const POOL_BYTES: u64 = 6 << 20;
const GROWN_BYTES: u64 = 18 << 20;

pub const ROLES: &[aquifer_testkit::child::Role] =
    &[("maker", maker), ("opener", opener), ("grower", grower)];

fn path_of_parent() -> PathBuf {
    std::env::var_os("POOL").expect("set by the parent").into()
}

/// Prints "held", and continues when a line arrives.
fn pause() {
    println!("held");
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Waits for other processes only very briefly.
fn at_once(options: PoolOptions) -> PoolOptions {
    options.stall_timeout(Duration::from_millis(10))
}

fn make(path: &Path, overwrite: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<(), PoolError> {
    let options = small(at_once(shared())).overwrite(overwrite);
    options.create_with_progress(path, POOL_BYTES, progress).map(drop)
}

/// Creates a pool, and stops after it has zeroed some of it, if requested.
fn maker() {
    let stops = std::env::var_os("STOPS").is_some();
    let mut has_stopped = !stops;
    let made = make(&path_of_parent(), std::env::var_os("FORCE").is_some(), &mut |_, _| {
        if !std::mem::replace(&mut has_stopped, true) {
            pause();
        }
    });
    match made {
        Ok(()) => println!("made"),
        Err(PoolError::NotOpened(OpenError::Exists { .. })) => println!("exists"),
        Err(error) => println!("{error:?}"),
    }
}

fn opener() {
    let _pool = shared().open(path_of_parent()).unwrap();
    pause();
}

fn grower() {
    let grown = Pool::grow(path_of_parent(), GROWN_BYTES, &Pool::options(), &mut |done, _| {
        if done > 0 {
            pause();
        }
    });
    grown.unwrap();
}

/// A child that waits for a line.
struct Held {
    child: Reaped,
    output: BufReader<std::process::ChildStdout>,
}

fn command(role: &str, path: &Path) -> Command {
    let mut command = child::command(role);
    command.env("POOL", path).stdin(Stdio::piped());
    command
}

impl Held {
    fn start(command: &mut Command) -> Held {
        let mut child = Reaped(command.spawn().unwrap());
        let output = BufReader::new(child.0.stdout.take().unwrap());
        let mut held = Held { child, output };
        held.hear("held");
        held
    }

    fn go_on(&mut self) {
        self.child.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    fn hear(&mut self, expected: &str) {
        let mut line = String::new();
        while line.trim_end() != expected {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "it ended before {expected}");
        }
    }
}

fn is_sound(path: &Path, len_bytes: u64) {
    let report =
        check(path, &CheckOptions { fresh_pages: true, ..CheckOptions::default() }).unwrap();
    assert!(report.is_sound(), "{report}");
    assert_eq!(report.pool.unwrap().layout.len_bytes(), len_bytes);
    drop(shared().open(path).unwrap());
}

fn is_empty(directory: &tempfile::TempDir) -> bool {
    std::fs::read_dir(directory.path()).unwrap().next().is_none()
}

#[test]
fn a_maker_that_is_killed_leaves_nothing() {
    // On a disk, where zeroing takes time, and in memory.
    for directory in [tempfile::tempdir().unwrap(), scratch()] {
        let path = directory.path().join("pool");
        let held = Held::start(command("maker", &path).env("STOPS", "1"));
        assert!(!path.exists());
        drop(held);
        if !is_empty(&directory) {
            eprintln!("skipped: no files without names in {}", directory.path().display());
            assert!(!path.exists());
        }
        make(&path, false, &mut |_, _| {}).unwrap();
        is_sound(&path, POOL_BYTES);
    }
}

#[test]
fn at_its_path_a_new_pool_is_whole() {
    for point in POINTS.iter().filter(|point| point.starts_with("create-")) {
        let directory = scratch();
        let path = directory.path().join("pool");
        let output = command("maker", &path).env("AQUIFER_DIE_AT", point).output().unwrap();
        assert!(!output.status.success(), "{point}");
        assert_eq!(path.exists(), *point == "create-named");
        if path.exists() {
            is_sound(&path, POOL_BYTES);
        }
    }
}

#[test]
fn of_two_makers_of_one_file_one_is_told_that_it_exists() {
    let directory = scratch();
    let path = directory.path().join("pool");
    let mut slow = Held::start(command("maker", &path).env("STOPS", "1"));
    make(&path, false, &mut |_, _| {}).unwrap();
    let before = std::fs::read(&path).unwrap();
    slow.go_on();
    slow.hear("exists");
    assert!(std::fs::read(&path).unwrap() == before);
    is_sound(&path, POOL_BYTES);
}

#[test]
fn what_is_being_overwritten_is_kept_from_all_others() {
    let directory = scratch();
    let path = directory.path().join("pool");
    make(&path, false, &mut |_, _| {}).unwrap();
    let mut slow = Held::start(command("maker", &path).env("STOPS", "1").env("FORCE", "1"));
    let refused = make(&path, true, &mut |_, _| {}).unwrap_err();
    assert!(matches!(refused, PoolError::NotOpened(OpenError::InUse { .. })), "{refused}");
    for options in [alone(), shared(), reading()] {
        let refused = at_once(options).open(&path).unwrap_err();
        assert!(matches!(refused, PoolError::Busy { .. }), "{refused}");
    }
    slow.go_on();
    slow.hear("made");
    is_sound(&path, POOL_BYTES);

    // A process that is killed while overwriting leaves something that is no pool, and can be
    // overwritten.
    drop(Held::start(command("maker", &path).env("STOPS", "1").env("FORCE", "1")));
    let refused = shared().open(&path).unwrap_err();
    assert!(matches!(refused, PoolError::NotAPool { .. }), "{refused}");
    make(&path, true, &mut |_, _| {}).unwrap();
    is_sound(&path, POOL_BYTES);
}

#[test]
fn media_that_are_in_use_are_not_formatted() {
    let directory = scratch();
    let path = directory.path().join("pool");
    make(&path, false, &mut |_, _| {}).unwrap();
    let refusals = |when: &str| {
        let before = std::fs::read(&path).unwrap();
        let made = small(at_once(shared())).create_on(FileMedia::open(&path));
        assert!(matches!(made, Err(PoolError::Busy { .. })), "{when}: {made:?}");
        let refused = make(&path, true, &mut |_, _| {}).unwrap_err();
        let is_it = matches!(refused, PoolError::NotOpened(OpenError::InUse { .. }));
        assert!(is_it, "{when}: {refused}");
        assert!(std::fs::read(&path).unwrap() == before, "{when}");
    };
    let mut user = Held::start(&mut command("opener", &path));
    refusals("open");
    let media: std::sync::Arc<dyn media::Media> = FileMedia::open(&path);
    user.go_on();
    user.child.0.wait().unwrap();

    let held_at = |point| {
        let mut command = command("maker", &path);
        Held::start(command.env("AQUIFER_HOLD_AT", point).env("FORCE", "1"))
    };
    for point in ["create-formatted", "create-named"] {
        let mut maker = held_at(point);
        refusals(point);
        let opened = at_once(shared()).open(&path);
        assert!(matches!(opened, Err(PoolError::Busy { .. })), "{point}: {opened:?}");
        maker.go_on();
        maker.hear("made");
        is_sound(&path, POOL_BYTES);
    }
    // It is not open any more, and formatting leaves no locks behind.
    small(Pool::options()).format(&media).unwrap();
    is_sound(&path, POOL_BYTES);
    // A reader has it open, too.
    let _reader = reading().open(&path).unwrap();
    refusals("read");
}

#[test]
fn a_pool_made_over_another_is_shared_like_any() {
    let directory = scratch();
    let path = directory.path().join("pool");
    std::fs::write(&path, [7; 100]).unwrap();
    let pool = small(shared()).overwrite(true).create(&path, POOL_BYTES).unwrap();
    let other = at_once(shared()).open(&path).unwrap();
    sample::create(&pool, "alpha", 2, 0).unwrap();
    let inode = sample::find(&other, "alpha").unwrap();
    let _lock = other.lock_inode(inode.number, aquifer_pool::LockMode::Exclusive).unwrap();
    assert_eq!(pool.info().unwrap().processes.len(), 2);
}

#[test]
fn a_pool_whose_growing_was_killed_is_as_it_was_and_can_grow() {
    for directory in [tempfile::tempdir().unwrap(), scratch()] {
        let path = directory.path().join("pool");
        let options = at_once(shared());
        let pool = small(options.clone()).create(&path, POOL_BYTES).unwrap();
        sample::fill(&pool).unwrap();
        drop(pool);
        let held = Held::start(&mut command("grower", &path));
        let refused = options.open(&path).unwrap_err();
        assert!(matches!(refused, PoolError::Busy { .. }), "{refused}");
        drop(held);
        is_sound(&path, POOL_BYTES);
        sample::assert_complete(&options.open(&path).unwrap());
        let grown = Pool::grow(&path, GROWN_BYTES, &Pool::options(), &mut |_, _| {}).unwrap();
        assert_eq!(grown.len_bytes(), GROWN_BYTES);
        is_sound(&path, GROWN_BYTES);
        sample::assert_complete(&options.open(&path).unwrap());
    }
}
