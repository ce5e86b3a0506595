//! Shared memory that is not what the superblock names: forged by a user that may only read the
//! pool, exchanged, or older than the media. No process joins it.

use std::fs::Permissions;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use crate::common::{Scene, contents, create};
use aquifer_pool::{Pool, PoolError, PoolOptions};
use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_testkit::child::{self, Reaped};

/// A user that owns nothing.
const NOBODY: u32 = 65534;
/// The byte of the pool file that every process with the pool open has locked: see `membership`.
const OPENERS: u64 = 1 << 61;

pub const ROLES: &[aquifer_testkit::child::Role] =
    &[("killed writer", write_until_killed), ("forger", forge)];

fn reading() -> PoolOptions {
    Pool::options().read_only(true)
}

/// A pool that every user may read, with an object in it.
fn scene() -> Scene {
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
    let scene = Scene::new(directory);
    let pool = crate::common::small(Pool::options()).create(&scene.path, 2 << 20);
    create(&pool.unwrap(), b"first", 2).unwrap();
    std::fs::set_permissions(&scene.path, Permissions::from_mode(0o644)).unwrap();
    scene
}

fn pool_of_parent() -> PathBuf {
    std::env::var_os("POOL").expect("set by the parent").into()
}

/// The segment and the pins that the superblock of a pool names.
fn shared_memory_of(pool: &Path) -> [PathBuf; 2] {
    let superblock = &std::fs::read(pool).unwrap()[..512];
    let id = superblock[96..112].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    ["", "-pins"].map(|end| Path::new("/dev/shm").join(format!("aquifer-{id}{end}")))
}

fn say(text: &str) {
    use std::io::Write;
    let mut output = std::io::stdout().lock();
    writeln!(output, "{text}").unwrap();
    output.flush().unwrap();
}

/// Waits until a child has printed this line.
fn hear(child: &mut Reaped, wanted: &str) {
    use std::io::{BufRead, BufReader};
    let mut output = BufReader::with_capacity(1, child.0.stdout.as_mut().unwrap());
    let mut line = String::new();
    while line.trim_end() != wanted {
        line.clear();
        if output.read_line(&mut line).unwrap() == 0 {
            let reason = std::io::read_to_string(child.0.stderr.take().unwrap()).unwrap();
            panic!("the child ended early: {reason}");
        }
    }
}

fn write_until_killed() {
    let _pool = Pool::open(pool_of_parent()).unwrap();
    say("writing");
    loop {
        std::thread::park();
    }
}

/// Leaves a pool in the state after its only writer was killed.
fn kill_a_writer(pool: &Path) {
    let mut writer = Reaped(child::command("killed writer").env("POOL", pool).spawn().unwrap());
    hear(&mut writer, "writing");
    writer.kill();
}

/// Takes the lock of processes that have the pool open: any read-only descriptor can hold it.
fn seem_to_have_it_open(pool: &Path) -> std::fs::File {
    let file = std::fs::File::open(pool).unwrap();
    assert!(lock::try_lock(file.as_fd(), LockRange::byte(OPENERS), LockKind::Shared).unwrap());
    file
}

/// Another user: creates shared memory with the names from the superblock, for a copy of the pool
/// with one more object.
fn forge() {
    let path = pool_of_parent();
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    let own = directory.path().join("own");
    std::fs::copy(&path, &own).unwrap();
    std::fs::set_permissions(&own, Permissions::from_mode(0o600)).unwrap();
    let pool = Pool::open(&own).unwrap();
    create(&pool, b"forged", 1).unwrap();
    let forged = shared_memory_of(&path);
    for (from, to) in shared_memory_of(&own).iter().zip(&forged) {
        std::fs::copy(from, to).unwrap();
        std::fs::set_permissions(to, Permissions::from_mode(0o666)).unwrap();
    }
    let _lock = seem_to_have_it_open(&path);
    drop(pool);
    say("forged");
    // Blocks until the parent ends it.
    let _ = std::io::stdin().read_line(&mut String::new());
    forged.iter().for_each(|path| std::fs::remove_file(path).unwrap());
}

fn assert_refused(opened: Result<Pool, PoolError>) {
    match opened {
        Err(PoolError::BusyElsewhere { .. }) => {}
        Err(other) => panic!("{other}"),
        Ok(pool) => panic!("joined, and saw {:?}", contents(&pool)),
    }
}

#[test]
fn shared_memory_that_another_user_forged_is_not_joined() {
    if aquifer_sys::credentials::effective().uid != 0 {
        return println!("skipped: only root can act as another user");
    }
    let scene = scene();
    kill_a_writer(&scene.path);
    // As a restart of the machine does.
    shared_memory_of(&scene.path).iter().for_each(|path| std::fs::remove_file(path).unwrap());
    let mut command = child::command("forger");
    command.env("POOL", &scene.path).stdin(std::process::Stdio::piped()).uid(NOBODY).gid(NOBODY);
    let mut forger = Reaped(command.spawn().unwrap());
    hear(&mut forger, "forged");
    for options in [Pool::options(), reading()] {
        assert_refused(options.open(&scene.path));
    }
    // Tell it to end.
    drop(forger.0.stdin.take());
    assert!(forger.0.wait().unwrap().success());
    let pool = Pool::open(&scene.path).unwrap();
    assert_eq!(contents(&pool).unwrap().into_keys().collect::<Vec<_>>(), [b"first"]);
}

/// In a directory that is not sticky, names can be exchanged, but not bytes.
#[test]
fn shared_memory_that_was_exchanged_is_not_joined() {
    let scene = scene();
    let pool = Pool::open(&scene.path).unwrap();
    for path in shared_memory_of(&scene.path) {
        let aside = path.with_extension("aside");
        std::fs::rename(&path, &aside).unwrap();
        std::fs::copy(&aside, &path).unwrap();
        let opened =
            [Pool::options(), reading()].map(|options| options.open(&scene.path).map(drop));
        std::fs::rename(&aside, &path).unwrap();
        // Readers do not open the pins.
        let is_segment = !path.to_str().unwrap().ends_with("-pins");
        for opened in opened.into_iter().take(if is_segment { 2 } else { 1 }) {
            assert!(matches!(opened, Err(PoolError::BusyElsewhere { .. })), "{opened:?}");
        }
        Pool::open(&scene.path).unwrap();
    }
    drop(pool);
}

/// Shared memory outlives the page cache of a file system that is unmounted: its statements about
/// the media count while one of its writers lives, or if nothing can have been lost.
#[test]
fn shared_memory_without_writers_is_joined_only_where_no_cache_was_lost() {
    let scene = scene();
    kill_a_writer(&scene.path);
    let lock = seem_to_have_it_open(&scene.path);
    let in_another_life = Pool::options().boot(7);
    assert_refused(in_another_life.open(&scene.path));
    let pool = Pool::open(&scene.path).unwrap();
    // A writer lives.
    in_another_life.open(&scene.path).unwrap();
    drop((pool, lock));
}
