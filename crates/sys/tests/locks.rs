//! Open-file-description locks between processes, including processes that are killed. A program of
//! its own: a test of another file that forks would keep locks for a while.

mod support;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_testkit::watchdog::wait_until;
use support::{Actor, command, hear, play, say};

#[test]
fn child() {
    play(&[("holder", holder)]);
}

/// Keeps other tests of this process from forking: a child that has not yet started its program, or
/// starts none, has copies of all descriptors, and so keeps every lock.
fn forks_alone() -> MutexGuard<'static, ()> {
    static FORKS: Mutex<()> = Mutex::new(());
    FORKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A test's private file, removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(directory: PathBuf) -> Scratch {
        let unique = aquifer_sys::random::next_u64().unwrap();
        let path = directory.join(format!("aquifer-test-locks-{unique:016x}"));
        std::fs::write(&path, b"0123456789").unwrap();
        Scratch(path)
    }

    fn open(&self) -> File {
        File::options().read(true).write(true).open(&self.0).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn places() -> Vec<PathBuf> {
    let shared = PathBuf::from("/dev/shm");
    let mut places = vec![std::env::temp_dir()];
    places.extend(shared.is_dir().then_some(shared));
    places
}

/// Takes and releases byte 7 of a file on command.
fn holder(arguments: &[String]) {
    let file = File::options().read(true).write(true).open(&arguments[0]).unwrap();
    let range = LockRange::byte(7);
    say(&format!("ready as {}", std::process::id()));
    while let Some(order) = hear() {
        let answer = match order.as_str() {
            "shared" => lock::try_lock(file.as_fd(), range, LockKind::Shared),
            "exclusive" => lock::try_lock(file.as_fd(), range, LockKind::Exclusive),
            "unlock" => lock::unlock(file.as_fd(), range).map(|()| true),
            "free" => lock::conflict(file.as_fd(), range, LockKind::Exclusive)
                .map(|conflict| conflict.is_none()),
            other => panic!("no such order: {other}"),
        };
        say(&format!("{answer:?}"));
    }
}

fn takes(file: &File, kind: LockKind) -> bool {
    lock::try_lock(file.as_fd(), LockRange::byte(7), kind).unwrap()
}

#[test]
fn one_writer_or_many_readers() {
    let _alone = forks_alone();
    for place in places() {
        let scratch = Scratch::new(place);
        let file = scratch.open();
        let role = format!("holder {}", scratch.0.display());
        let mut other = Actor::start(&role);
        assert!(other.hear().starts_with("ready"));
        assert_eq!(other.ask("shared"), "Ok(true)");
        assert!(takes(&file, LockKind::Shared));
        assert!(!takes(&file, LockKind::Exclusive));
        assert_eq!(other.ask("exclusive"), "Ok(false)");
        lock::unlock(file.as_fd(), LockRange::WHOLE).unwrap();
        assert_eq!(other.ask("exclusive"), "Ok(true)");
        for kind in [LockKind::Shared, LockKind::Exclusive] {
            assert!(!takes(&file, kind));
        }
        assert_eq!(other.ask("unlock"), "Ok(true)");
        assert!(takes(&file, LockKind::Exclusive));
        assert_eq!(other.ask("free"), "Ok(false)");
    }
}

#[test]
fn a_killed_holder_does_not_block() {
    let _alone = forks_alone();
    let scratch = Scratch::new(std::env::temp_dir());
    let file = scratch.open();
    for order in ["shared", "exclusive"] {
        let mut other = Actor::start(&format!("holder {}", scratch.0.display()));
        assert!(other.hear().starts_with("ready"));
        assert_eq!(other.ask(order), "Ok(true)");
        assert!(!takes(&file, LockKind::Exclusive));
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(other.kill().signal(), Some(libc::SIGKILL));
        assert!(takes(&file, LockKind::Exclusive), "at once when the process is gone");
        lock::unlock(file.as_fd(), LockRange::WHOLE).unwrap();
    }
}

#[test]
fn a_forked_child_keeps_the_lock_until_it_closes_its_copy() {
    let _alone = forks_alone();
    let scratch = Scratch::new(std::env::temp_dir());
    let held = scratch.open();
    let watching = scratch.open();
    assert!(takes(&held, LockKind::Exclusive));
    let fd = held.as_raw_fd();
    let mut sleeper = Command::new("sleep");
    sleeper.arg("60").stdin(Stdio::null());
    // SAFETY: between fork and exec only an async-signal-safe call is made.
    unsafe {
        sleeper.pre_exec(move || {
            // Without close-on-exec the copy stays open in the program.
            if libc::fcntl(fd, libc::F_SETFD, 0) == 0 {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        })
    };
    let mut child = sleeper.spawn().unwrap();
    drop(held);
    let while_it_lives = takes(&watching, LockKind::Exclusive);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!while_it_lives, "the child has a copy");
    assert!(takes(&watching, LockKind::Exclusive));
}

/// Between fork and exec: creates a PID namespace and continues as its first process. The process
/// that was forked waits, so that killing it also kills the other one.
fn enter_pid_namespace() -> std::io::Result<()> {
    // SAFETY: integers only. An unprivileged process also needs a user namespace.
    let alone = unsafe { libc::unshare(libc::CLONE_NEWPID) };
    // SAFETY: as above.
    if alone != 0 && unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the only thread of a forked process, and async-signal-safe calls follow on both
    // sides.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()),
        0 => {
            // SAFETY: integers only.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            Ok(())
        }
        first => {
            // SAFETY: closes this process's copies of all descriptors, so that no lock or pipe
            // stays open.
            unsafe { libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0) };
            let mut status = 0;
            // SAFETY: waits for the child made above; `status` outlives the call.
            unsafe { libc::waitpid(first, &raw mut status, 0) };
            // SAFETY: ends without running any of the parent's code.
            unsafe { libc::_exit(0) }
        }
    }
}

#[test]
fn pid_namespaces_are_seen_through() {
    let _alone = forks_alone();
    let scratch = Scratch::new(std::env::temp_dir());
    let file = scratch.open();
    let mut command = command(&format!("holder {}", scratch.0.display()));
    // SAFETY: the function makes async-signal-safe calls only.
    unsafe { command.pre_exec(enter_pid_namespace) };
    let child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return eprintln!("skipped: no PID namespace can be made here: {error}"),
    };
    let mut other = Actor::of(child);
    assert_eq!(other.hear(), "ready as 1", "the first process of its namespace");
    assert_eq!(other.ask("exclusive"), "Ok(true)");
    assert!(!takes(&file, LockKind::Shared));
    let conflict = lock::conflict(file.as_fd(), LockRange::byte(7), LockKind::Shared).unwrap();
    assert_eq!(conflict.unwrap().pid, None, "the kernel does not say whose");
    other.kill();
    // The process in the namespace is killed a moment after the other one ends.
    wait_until("the lock of a killed holder", || takes(&file, LockKind::Exclusive));
}
