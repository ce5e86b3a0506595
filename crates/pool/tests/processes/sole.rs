//! A writer that keeps other writers out.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Barrier;

use crate::common::{Scene, create};
use aquifer_pool::{InodeUse, LockMode, Pool, PoolError, PoolOptions, Result};
use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_testkit::child::{self, Reaped};

/// The byte that a sole writer has locked: see `membership`.
const SOLE: u64 = (1 << 61) + 6;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("sole writer", be_sole)];

fn scene() -> Scene {
    let scene = Scene::new(tempfile::tempdir().unwrap());
    drop(crate::common::small(options()).create(&scene.path, 2 << 20).unwrap());
    scene
}

fn options() -> PoolOptions {
    Pool::options().background(false)
}

fn sole() -> PoolOptions {
    options().sole("mounted at /mnt; unmount it")
}

fn be_sole() {
    let _pool = sole().open(std::env::var_os("POOL").expect("set by the parent")).unwrap();
    println!("open");
    loop {
        std::thread::park();
    }
}

fn assert_kept_out(opened: Result<Pool>) {
    match opened {
        Err(PoolError::SoleWriter { pid, note, .. }) => {
            assert_eq!((pid, note.as_str()), (std::process::id(), "mounted at /mnt; unmount it"));
        }
        opened => panic!("{opened:?}"),
    }
}

#[test]
fn a_sole_writer_keeps_writers_out_and_readers_not() {
    let scene = scene();
    let server = sole().open(&scene.path).unwrap();
    create(&server, b"of the server", 1).unwrap();
    assert_kept_out(options().open(&scene.path));
    assert_kept_out(sole().open(&scene.path));
    // For repairs, growing, creating.
    assert_kept_out(options().exclusive(true).open(&scene.path));
    let media = aquifer_pool::media::open(&scene.path, true, None).unwrap();
    let alone = aquifer_pool::internals::lock_for_one(&*media, &options().exclusive(true));
    assert!(matches!(alone, Err(PoolError::SoleWriter { note, .. }) if note.contains("/mnt")));
    drop(media);
    let nonce = server.sole_nonce().unwrap();
    assert_kept_out(options().beside(nonce ^ 1).open(&scene.path));
    let reader = options().read_only(true).open(&scene.path).unwrap();
    assert_eq!(crate::common::contents(&reader).unwrap().len(), 1);

    let second = options().beside(nonce).open(&scene.path).unwrap();
    create(&second, b"of a process of the server", 1).unwrap();
    assert_eq!((second.sole_nonce(), reader.sole_nonce()), (None, None));
    assert_kept_out(options().open(&scene.path));

    drop(server);
    // What belonged to the sole writer is a writer as any other from now on.
    assert!(
        matches!(sole().open(&scene.path), Err(PoolError::HasWriters { pid, .. }) if pid == std::process::id())
    );
    assert!(matches!(options().beside(nonce).open(&scene.path), Err(PoolError::Parameter { .. })));
    let other = options().open(&scene.path).unwrap();
    assert_eq!(other.sole_nonce(), None);
    drop((second, other));
    drop(sole().open(&scene.path).unwrap());
}

#[test]
fn a_pool_without_a_path_is_opened_by_files_that_are_passed() {
    let scene = scene();
    let keeper = sole().open(&scene.path).unwrap();
    let beside = options().beside(keeper.sole_nonce().unwrap());
    let elsewhere = scene.path.with_extension("elsewhere");
    std::fs::rename(&scene.path, &elsewhere).unwrap();
    assert!(beside.open(&scene.path).is_err());
    let server = beside.open_passed(keeper.files_to_pass().unwrap(), &scene.path).unwrap();
    create(&server, b"of the server", 1).unwrap();
    assert_kept_out(options().open_passed(keeper.files_to_pass().unwrap(), &scene.path));
    let passed = keeper.files_to_pass().unwrap();
    drop((server, keeper));
    let late = options().open_passed(passed, &scene.path);
    assert!(matches!(late, Err(PoolError::Access(_))), "{late:?}");
    drop(options().open(&elsewhere).unwrap());
    let alone = options().exclusive(true).open(&elsewhere).unwrap();
    assert!(matches!(alone.files_to_pass(), Err(PoolError::Parameter { .. })));
}

#[test]
fn a_passive_handle_is_no_writer() {
    let scene = scene();
    let keeper = options().passive(true).open(&scene.path).unwrap();
    let server = sole().open(&scene.path).unwrap();
    let late = options().passive(true).open(&scene.path).unwrap();
    create(&server, b"of the server", 1).unwrap();
    for passive in [&keeper, &late] {
        let error = create(passive, b"another", 1).unwrap_err();
        assert!(matches!(error, PoolError::ReadOnly { .. }), "{error}");
        assert!(matches!(passive.lock_file(2), Err(PoolError::ReadOnly { .. })));
        let refused = passive.lock_inode(2, LockMode::Exclusive);
        assert!(matches!(refused, Err(PoolError::ReadOnly { .. })), "{refused:?}");
        let refused = passive.pin_inode(2, InodeUse::Writable);
        assert!(matches!(refused, Err(PoolError::ReadOnly { .. })), "{refused:?}");
        drop(passive.pin_inode(2, InodeUse::Open).unwrap());
        let end = passive.layout().data().end_bytes() - 8;
        // SAFETY: nothing refers to the last page of the pool.
        let refused = unsafe { passive.store(end, &[1; 8]) };
        assert!(matches!(refused, Err(PoolError::ReadOnly { .. })), "{refused:?}");
        passive.sync().unwrap();
        passive.checkpoint().unwrap();
        let found = crate::common::find(passive, b"of the server").unwrap().unwrap();
        drop(passive.lock_inode(found.number, LockMode::Shared).unwrap());
    }
    // The last one that closes it writes what is left.
    drop((server, late));
    drop(keeper);
    let pool = sole().open(&scene.path).unwrap();
    assert!(crate::common::find(&pool, b"of the server").unwrap().is_some());
    // The slot of a passive handle is a writer's again.
    drop(pool);
    let keeper = options().passive(true).open(&scene.path).unwrap();
    let passive = options().passive(true).open(&scene.path).unwrap();
    drop(passive);
    let writer = options().open(&scene.path).unwrap();
    assert!(matches!(sole().open(&scene.path), Err(PoolError::HasWriters { .. })));
    drop((writer, keeper));
}

#[test]
fn what_is_not_passive_may_be_alone() {
    let scene = scene();
    let pool = sole().passive(false).open(&scene.path).unwrap();
    assert!(pool.sole_nonce().is_some());
    drop(pool);
    let pool = options().passive(true).passive(false).open(&scene.path).unwrap();
    create(&pool, b"x", 1).unwrap();
}

#[test]
fn a_sole_writer_that_was_killed_keeps_no_writer_out() {
    use std::io::{BufRead, BufReader};

    let scene = scene();
    let keeper = options().passive(true).open(&scene.path).unwrap();
    let mut child = child::command("sole writer");
    let mut child = Reaped(child.env("POOL", &scene.path).spawn().unwrap());
    let mut said = BufReader::with_capacity(1, child.0.stdout.as_mut().unwrap()).lines();
    assert!(said.any(|line| line.unwrap() == "open"));
    let pid = child.0.id();
    let error = options().open(&scene.path).unwrap_err();
    assert!(matches!(error, PoolError::SoleWriter { pid: its, .. } if its == pid), "{error}");
    let text = error.to_string();
    assert!(text.contains(&format!("process {pid}")) && text.contains("unmount it"), "{text}");
    child.kill();
    drop(options().open(&scene.path).unwrap());
    drop(sole().open(&scene.path).unwrap());
    drop(keeper);
}

#[test]
fn of_writers_that_open_at_once_one_is_the_sole_one() {
    let scene = scene();
    let keeper = options().passive(true).open(&scene.path).unwrap();
    for _ in 0..20 {
        let barrier = Barrier::new(4);
        let open = |options: PoolOptions, path: &Path| {
            barrier.wait();
            let opened = options.open(path);
            barrier.wait();
            opened.map(|pool| pool.sole_nonce().is_some())
        };
        let opened: Vec<Result<bool>> = std::thread::scope(|scope| {
            let all = [sole(), sole(), options(), sole()]
                .map(|options| scope.spawn(|| open(options, &scene.path)));
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let found: Vec<bool> = opened.iter().filter_map(|one| one.as_ref().ok().copied()).collect();
        assert_eq!(found.len(), 1, "{opened:?}");
        assert_eq!(found[0], !matches!(opened[2], Ok(false)), "{opened:?}");
    }
    drop(keeper);
}

/// A reader may lock the byte, but not in the mode of a sole writer.
#[test]
fn a_reader_keeps_no_writer_out() {
    let scene = scene();
    let _keeper = options().passive(true).open(&scene.path).unwrap();
    let stray = File::open(&scene.path).unwrap();
    assert!(lock::try_lock(stray.as_fd(), LockRange::byte(SOLE), LockKind::Shared).unwrap());
    drop(options().open(&scene.path).unwrap());
    // It delays only what needs the byte.
    assert!(matches!(sole().open(&scene.path), Err(PoolError::Busy { .. })));
    drop(stray);
    drop(sole().open(&scene.path).unwrap());
}
