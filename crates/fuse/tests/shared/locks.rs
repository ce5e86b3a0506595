//! Locks of programs on the mount and of programs that use the library exclude each other.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use aquifer_fs::{FsError, LockMode};
use aquifer_fuse::mounts;
use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_testkit::child;
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::place::Place;
use crate::{both, end};

/// Where the children of a test count, or wait.
const AT: &str = "AQUIFER_LOCK_AT";
const ROUNDS: u64 = 100;

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).expect("it is there")
}

fn range(offset_bytes: u64, len_bytes: u64) -> LockRange {
    LockRange { offset_bytes, len_bytes }
}

/// Whether the library finds bytes locked by another.
fn is_locked(here: &aquifer_fs::File, at: u64) -> bool {
    match here.try_lock_range(at..at + 1, LockMode::Shared) {
        Ok(()) => {
            here.unlock_range(at..at + 1).expect("it is open");
            false
        }
        Err(FsError::Locked) => true,
        Err(error) => panic!("{error}"),
    }
}

fn unlock_all(here: &aquifer_fs::File) {
    here.unlock().expect("it is open");
    here.unlock_range(..).expect("it is open");
}

/// Waits until so many requests of the mount wait.
fn until_waiting(place: &Place, count: u64) {
    loop {
        let all = mounts().expect("the table");
        let mounted = all.iter().find(|it| it.directory == place.root()).expect("it is there");
        if mounted.waiting.expect("the control file system is mounted") >= count {
            return;
        }
        std::thread::yield_now();
    }
}

pub fn locks_exclude_both_sides() {
    let Some((place, files)) = both() else { return };
    let at = place.root().join("f");
    fs::write(&at, "text").expect("a new file");
    let here = files.options().read(true).write(true).open("/f").expect("it is there");
    let (one, two) = (open(&at), open(&at));

    // Whole files.
    let (alone, together) =
        (FlockOperation::NonBlockingLockExclusive, FlockOperation::NonBlockingLockShared);
    flock(&one, alone).expect("no other has it");
    assert!(here.try_lock().is_err() && here.try_lock_shared().is_err());
    assert_eq!(flock(&two, together).map_err(|it| it.kind()), Err(ErrorKind::WouldBlock));
    flock(&one, together).expect("it is its own");
    flock(&two, together).expect("both share it");
    here.try_lock_shared().expect("all share it");
    assert_eq!(flock(&one, alone).map_err(|it| it.kind()), Err(ErrorKind::WouldBlock));
    flock(&two, FlockOperation::Unlock).expect("it is open");
    here.try_lock().expect("a failed change gives up what there was, as on other file systems");
    assert_eq!(flock(&one, together).map_err(|it| it.kind()), Err(ErrorKind::WouldBlock));
    here.unlock().expect("it is open");

    // Ranges of descriptions.
    let mut held = lock::try_lock(one.as_fd(), range(0, 10), LockKind::Exclusive);
    assert!(held.expect("it is open") && is_locked(&here, 5) && !is_locked(&here, 10));
    here.try_lock_range(10..20, LockMode::Exclusive).expect("no other has it");
    let found = lock::conflict(two.as_fd(), range(3, 100), LockKind::Shared).expect("it is open");
    assert_eq!(found.map(|it| it.range), Some(range(0, 10)));
    let found = lock::conflict(one.as_fd(), range(3, 100), LockKind::Shared).expect("it is open");
    assert_eq!(found.map(|it| it.range), Some(range(10, 10)));
    held = lock::try_lock(two.as_fd(), range(19, 0), LockKind::Shared);
    assert!(!held.expect("it is open"));
    lock::unlock(one.as_fd(), range(2, 3)).expect("it is open");
    assert_eq!([1, 2, 4, 5].map(|at| is_locked(&here, at)), [true, false, false, true]);

    // They end with their description: the kernel says that it is closed a moment later.
    flock(&one, alone).expect("no other has it");
    drop(one);
    here.lock().expect("it ends");
    here.lock_range(0..10, LockMode::Exclusive).expect("it ends");
    unlock_all(&here);

    // Those of a process end when it closes any descriptor of the file.
    fcntl_lock(&two, alone).expect("no other has it");
    assert!(is_locked(&here, 0) && is_locked(&here, 1 << 30));
    drop(File::open(place.root()).expect("another file"));
    assert!(is_locked(&here, 0));
    drop(open(&at));
    assert!(!is_locked(&here, 0));
    drop((two, here, files));
    end(place);
}

/// In a process of its own: waits for a lock.
pub fn wait_for_lock() {
    let file = open(Path::new(&std::env::var_os(AT).expect("set by the parent")));
    flock(&file, FlockOperation::LockExclusive).expect("this process is killed before");
}

pub fn a_lock_is_waited_for_until_it_is_free_or_the_wait_is_ended() {
    let Some((place, files)) = both() else { return };
    let at = place.root().join("f");
    fs::write(&at, "text").expect("a new file");
    let here = files.options().read(true).write(true).open("/f").expect("it is there");
    let one = open(&at);
    for waits_for_ranges in [false, true] {
        let wait = |file: &File| match waits_for_ranges {
            true => lock::lock(file.as_fd(), range(7, 7), LockKind::Exclusive),
            false => Ok(flock(file, FlockOperation::LockExclusive)?),
        };
        let unlock = |file: &File| match waits_for_ranges {
            true => lock::unlock(file.as_fd(), range(7, 7)),
            false => Ok(flock(file, FlockOperation::Unlock)?),
        };
        here.lock().expect("no other has it");
        here.lock_range(.., LockMode::Exclusive).expect("no other has it");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| wait(&one));
            until_waiting(&place, 1);
            // It goes on with the next server.
            assert!(place.kill_server());
            until_waiting(&place, 1);
            assert!(!waits.is_finished());
            unlock_all(&here);
            waits.join().expect("no panic").expect("it is free");
        });
        // And the other way round.
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| match waits_for_ranges {
                true => here.lock_range(.., LockMode::Exclusive),
                false => here.lock(),
            });
            unlock(&one).expect("it is open");
            waits.join().expect("no panic").expect("it is free");
        });
        unlock_all(&here);
    }
    // A process that is killed while it waits.
    here.lock().expect("no other has it");
    let mut waits = child::command("wait").env(AT, &at).spawn().expect("this program");
    until_waiting(&place, 1);
    waits.kill().expect("a child");
    assert!(!waits.wait().expect("a child").success());
    here.unlock().expect("it is open");
    flock(&one, FlockOperation::NonBlockingLockExclusive).expect("it has not got it");
    drop((one, here, files));
    end(place);
}

pub fn locks_outlive_their_server() {
    let Some((place, files)) = both() else { return };
    let at = place.root().join("f");
    fs::write(&at, "text").expect("a new file");
    let here = files.options().read(true).write(true).open("/f").expect("it is there");
    let (one, two) = (open(&at), open(&at));
    flock(&one, FlockOperation::LockShared).expect("no other has it");
    lock::lock(one.as_fd(), range(0, 10), LockKind::Exclusive).expect("no other has it");
    lock::lock(two.as_fd(), range(20, 10), LockKind::Exclusive).expect("no other has it");
    for _ in 0..3 {
        assert!(place.kill_server());
        // Before and after the next one has come.
        for _ in 0..2 {
            assert!(here.try_lock().is_err() && is_locked(&here, 0) && is_locked(&here, 29));
            assert!(!is_locked(&here, 10));
            assert_eq!(fs::read(&at).expect("it is there"), b"text");
        }
    }
    lock::unlock(one.as_fd(), range(0, 5)).expect("it is open");
    assert_eq!([4, 5].map(|at| is_locked(&here, at)), [false, true]);
    assert!(place.kill_server());
    drop((one, two));
    here.lock().expect("they end");
    here.lock_range(.., LockMode::Exclusive).expect("they end");
    drop((here, files));
    end(place);
}

pub fn more_owners_than_descriptors_get_an_error() {
    // All processes of the mount have the same limit.
    let limit = Rlimit { current: Some(256), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).expect("a lower one");
    let Some((place, files)) = both() else { return };
    let at = |number: usize| place.root().join(number.to_string());
    let mut open = Vec::new();
    let refused = loop {
        let number = open.len();
        assert!(number < 200);
        let file = File::create_new(at(number)).expect("a new file");
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => open.push(file),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.raw_os_error(), libc::ENOLCK);
    assert!(place.kill_server());
    assert!(open.len() > 20);
    for number in 0..open.len() {
        let here = files.open_file(format!("/{number}")).expect("it is there");
        assert!(here.try_lock_shared().is_err(), "{number}");
    }
    // There is room for another one.
    open.truncate(10);
    let last = File::open(at(19)).expect("it is there");
    while flock(&last, FlockOperation::NonBlockingLockExclusive).is_err() {
        std::thread::yield_now();
    }
    drop((open, last, files));
    end(place);
}

/// In a process of its own: counts.
pub fn count_with_lock() {
    let file = open(Path::new(&std::env::var_os(AT).expect("set by the parent")));
    for _ in 0..ROUNDS {
        flock(&file, FlockOperation::LockExclusive).expect("it becomes free");
        let mut count = [0; 8];
        file.read_exact_at(&mut count, 0).expect("it is as long");
        let next = u64::from_le_bytes(count) + 1;
        file.write_all_at(&next.to_le_bytes(), 0).expect("there is room");
        flock(&file, FlockOperation::Unlock).expect("it is open");
    }
}

pub fn one_at_a_time_has_a_lock() {
    let Some((place, files)) = both() else { return };
    let at = place.root().join("count");
    fs::write(&at, [0; 8]).expect("a new file");
    let count = || child::command("count").env(AT, &at).spawn().expect("this program");
    let children = [count(), count()];
    let here = files.options().read(true).write(true).open("/count").expect("it is there");
    for round in 0..ROUNDS {
        here.lock().expect("it becomes free");
        let mut count = [0; 8];
        here.read_exact_at(&mut count, 0).expect("it is as long");
        let next = u64::from_le_bytes(count) + 1;
        here.write_all_at(&next.to_le_bytes(), 0).expect("there is room");
        here.unlock().expect("it is open");
        if round % 20 == 10 {
            place.kill_server();
        }
    }
    for child in children {
        let output = child.wait_with_output().expect("a child");
        assert!(output.status.success(), "{output:?}");
    }
    let counted = fs::read(&at).expect("it is there");
    assert_eq!(counted, (3 * ROUNDS).to_le_bytes());
    drop((here, files));
    end(place);
}
