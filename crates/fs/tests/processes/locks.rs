//! Advisory locks between handles and between processes: which conflict, and what ends them.

use std::fs::TryLockError;
use std::sync::mpsc;

use crate::actor::{Actor, hear, say, told};
use crate::scratch::Scratch;
use aquifer_fs::{File, FileOptions, Files, FsError, HeldRange, LockMode};
use aquifer_pool::{Pool, PoolError};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::child;
use aquifer_testkit::rng::Rng;

use aquifer_fs::LockMode::{Exclusive, Shared};

pub const ROLES: &[aquifer_testkit::child::Role] =
    &[("holder", holder), ("waiter", waiter), ("counter", counter), ("sharers", sharers)];

fn scratch() -> Scratch {
    let scratch = Scratch::with_pool(8 << 20, &Pool::options());
    scratch.open().create_file("/f").unwrap();
    scratch
}

fn both(files: &Files) -> FileOptions {
    let mut options = files.options();
    options.read(true).write(true);
    options
}

fn mode_of(text: &str) -> LockMode {
    if text == "shared" { Shared } else { Exclusive }
}

/// Holds a lock until it is told to stop: of the whole file, or of bytes 10 to 19.
fn holder() {
    let files = Files::open(told("POOL")).unwrap();
    let file = files.open_file("/f").unwrap();
    let mode = mode_of(&told("MODE"));
    match told("AREA").as_str() {
        "file" if mode == Shared => file.lock_shared().unwrap(),
        "file" => file.lock().unwrap(),
        _ => file.lock_range(10..20, mode).unwrap(),
    }
    say("locked");
    hear();
    drop(file);
    say("closed");
    hear();
}

fn start(scratch: &Scratch, area: &str, mode: &str) -> Actor {
    let mut holder = Actor::start("holder", &scratch.path, &[("AREA", area), ("MODE", mode)]);
    holder.until("locked");
    holder
}

fn is_locked(outcome: Result<(), FsError>) -> bool {
    match outcome {
        Ok(()) => false,
        Err(FsError::Locked) => true,
        Err(error) => panic!("{error}"),
    }
}

/// The outcome of locking a whole file, as of a range.
fn as_range(outcome: Result<(), TryLockError>) -> Result<(), FsError> {
    outcome.map_err(|error| match error {
        TryLockError::WouldBlock => FsError::Locked,
        TryLockError::Error(error) => error.downcast().expect("an error of files"),
    })
}

/// Whether a lock of the holder's area in this mode is refused; asserts that the query agrees.
fn is_refused(file: &File, area: &str, mode: LockMode) -> bool {
    let (refused, told) = match (area, mode) {
        ("file", Shared) => (as_range(file.try_lock_shared()), file.lock_conflict(Shared).unwrap()),
        ("file", Exclusive) => (as_range(file.try_lock()), file.lock_conflict(Exclusive).unwrap()),
        _ => {
            let told = file.range_lock_conflict(.., mode).unwrap();
            let is_inside = |held: &HeldRange| held.range.start >= 10 && held.range.end <= 20;
            assert!(told.iter().all(is_inside), "{told:?}");
            (file.try_lock_range(15.., mode), told.map(|held| held.mode))
        }
    };
    let refused = is_locked(refused);
    assert_eq!(refused, told.is_some());
    file.unlock().unwrap();
    file.unlock_range(..).unwrap();
    refused
}

#[test]
fn locks_of_other_processes_end_with_their_handle_and_with_their_process() {
    let scratch = scratch();
    let files = scratch.open();
    let file = both(&files).open("/f").unwrap();
    for area in ["file", "range"] {
        for (mode, refuses) in [("shared", [false, true]), ("exclusive", [true, true])] {
            for is_killed in [false, true] {
                let refused = || [Shared, Exclusive].map(|mode| is_refused(&file, area, mode));
                let mut holder = start(&scratch, area, mode);
                assert_eq!(refused(), refuses, "{area} {mode}");
                // The other kind of lock, other bytes, other files do not conflict.
                let other = if area == "file" { "range" } else { "file" };
                assert!(!is_refused(&file, other, Exclusive), "{other} beside {area}");
                file.try_lock_range(..10, Exclusive).unwrap();
                file.try_lock_range(20.., Exclusive).unwrap();
                file.unlock_range(..).unwrap();
                if is_killed {
                    drop(holder.kill())
                } else {
                    holder.tell("close");
                    holder.until("closed");
                }
                assert_eq!(refused(), [false; 2], "{area} {mode}, killed: {is_killed}");
            }
        }
    }
}

#[test]
fn a_stopped_holder_keeps_its_lock_and_others_work_on() {
    let scratch = scratch();
    let files = scratch.open();
    let file = both(&files).open("/f").unwrap();
    let holder = start(&scratch, "file", "exclusive");
    // SAFETY: `kill` on our child, which is alive.
    unsafe { libc::kill(holder.pid() as i32, libc::SIGSTOP) };
    assert!(is_refused(&file, "file", Shared));
    let short = std::time::Duration::from_millis(20);
    assert!(is_locked(file.lock_timeout(Shared, short)));
    // It blocks nothing else.
    file.write_all_at(b"text", 0).unwrap();
    files.rename("/f", "/g").unwrap();
    files.sync().unwrap();
    holder.kill();
    assert!(!is_refused(&file, "file", Exclusive));
}

#[test]
fn locks_are_seen_between_namespaces_of_processes() {
    let scratch = scratch();
    let files = scratch.open();
    let file = files.open_file("/f").unwrap();
    let told = [("AREA", "file"), ("MODE", "exclusive")];
    let mut holder = match Actor::start_in_namespace("holder", &scratch.path, &told) {
        Ok(holder) => holder,
        Err(error) => return eprintln!("skipped: no PID namespace can be made here: {error}"),
    };
    holder.until("locked");
    assert!(is_refused(&file, "file", Shared));
    holder.kill();
    // The process in the namespace is killed only after its parent has ended, a moment later.
    file.lock_timeout(Exclusive, std::time::Duration::from_secs(30)).unwrap();
}

/// Waits for the lock, and reports that it holds it.
fn waiter() {
    let files = Files::open(told("POOL")).unwrap();
    let file = files.open_file("/f").unwrap();
    say("waiting");
    match told("AREA").as_str() {
        "file" => file.lock().unwrap(),
        _ => file.lock_range(15..16, Shared).unwrap(),
    }
    say("locked");
    hear();
}

#[test]
fn a_waiter_gets_the_lock_when_its_holder_is_killed() {
    let scratch = scratch();
    let files = scratch.open();
    let file = files.open_file("/f").unwrap();
    for area in ["file", "range"] {
        let holder = start(&scratch, area, "exclusive");
        let mut waiters =
            ["one", "other"].map(|_| Actor::start("waiter", &scratch.path, &[("AREA", area)]));
        waiters.iter_mut().for_each(|waiter| waiter.until("waiting"));
        holder.kill();
        // Exclusive locks are granted one at a time.
        let (told, heard) = mpsc::channel();
        for mut waiter in waiters {
            let told = told.clone();
            std::thread::spawn(move || {
                waiter.until("locked");
                told.send(waiter).unwrap();
            });
        }
        for _ in 0..2 {
            let waiter = heard.recv().unwrap();
            assert!(is_refused(&file, area, Exclusive));
            waiter.kill();
        }
        assert!(!is_refused(&file, area, Exclusive));
    }
}

/// Increments the number in a file repeatedly, under the lock.
fn counter() {
    let files = Files::open(told("POOL")).unwrap();
    let file = both(&files).open("/f").unwrap();
    say("counting");
    for added in 1u64.. {
        match told("AREA").as_str() {
            "file" => file.lock().unwrap(),
            _ => file.lock_range(..8, Exclusive).unwrap(),
        }
        let mut bytes = [0; 8];
        file.read_at(&mut bytes, 0).unwrap();
        let number = u64::from_le_bytes(bytes) + 1;
        file.write_all_at(&number.to_le_bytes(), 0).unwrap();
        match told("AREA").as_str() {
            "file" => file.unlock().unwrap(),
            _ => file.unlock_range(..).unwrap(),
        }
        // Not under the lock: writing to the pipe may block.
        say(added);
    }
}

/// Increments of several processes all count, although the processes are killed while they hold the
/// lock or wait for it.
#[test]
fn killed_counters_have_counted_what_they_said() {
    let scratch = scratch();
    let files = scratch.open();
    let file = both(&files).open("/f").unwrap();
    let mut rng = Rng::new(seed(31));
    for round in 0..steps(6) {
        file.write_all_at(&[0; 8], 0).unwrap();
        let area = ["file", "range"][round % 2];
        let mut counters: Vec<Actor> =
            (0..3).map(|_| Actor::start("counter", &scratch.path, &[("AREA", area)])).collect();
        counters.iter_mut().for_each(|counter| counter.until("counting"));
        let (mut said, killed) = (0, counters.len() as u64);
        while !counters.is_empty() {
            let mut counter = counters.swap_remove(rng.below(counters.len() as u64) as usize);
            let wanted = rng.below(40);
            let mut lines: Vec<String> = Vec::new();
            lines.extend((0..wanted).map(|_| counter.hears().expect("it counts")));
            lines.extend(counter.kill());
            said += lines.iter().filter_map(|line| line.parse::<u64>().ok()).max().unwrap_or(0);
        }
        let mut bytes = [0; 8];
        file.read_at(&mut bytes, 0).unwrap();
        let counted = u64::from_le_bytes(bytes);
        assert!((said..=said + killed).contains(&counted), "{counted} counted, {said} said");
        file.try_lock().unwrap();
        file.unlock().unwrap();
    }
}

/// Random range locks by several handles, against a model with the holders of each byte.
#[test]
fn locks_of_ranges_are_those_of_their_bytes() {
    const HANDLES: usize = 3;
    const BYTES: u64 = 12;
    let scratch = scratch();
    let files = scratch.open();
    files.create_file("/other").unwrap();
    let other_process = scratch.open();
    let handles = [&files, &files, &other_process].map(|files| files.open_file("/f").unwrap());
    // A handle of another file, which holds a lock on everything all the time.
    let neighbour = files.open_file("/other").unwrap();
    neighbour.lock_range(.., Exclusive).unwrap();
    let mut held = vec![[None::<LockMode>; HANDLES]; BYTES as usize];
    let mut rng = Rng::new(seed(32));
    for step in 0..steps(4000) {
        let handle = rng.below(HANDLES as u64) as usize;
        let start = rng.below(BYTES);
        let end = start + 1 + rng.below(BYTES - start);
        // The last byte stands for all bytes after it.
        let range = start..if end == BYTES { u64::MAX } else { end };
        let bytes = start as usize..end as usize;
        let mode = if rng.chance(0.5) { Shared } else { Exclusive };
        let stands_against = |held: &[Option<LockMode>; HANDLES]| {
            held.iter().enumerate().any(|(other, has)| {
                other != handle && (*has == Some(Exclusive) || (has.is_some() && mode == Exclusive))
            })
        };
        let first = bytes.clone().find(|byte| stands_against(&held[*byte]));
        match rng.below(3) {
            0 => {
                handles[handle].unlock_range(range).unwrap();
                held[bytes].iter_mut().for_each(|held| held[handle] = None);
            }
            1 => {
                let told = handles[handle].range_lock_conflict(range.clone(), mode).unwrap();
                assert_eq!(told.is_some(), first.is_some(), "step {step}: {range:?} {mode:?}");
                if let Some(told) = told {
                    let is_there = |byte: usize| {
                        let has = |(other, has): (usize, &Option<LockMode>)| {
                            other != handle && *has == Some(told.mode)
                        };
                        held[byte].iter().enumerate().any(has)
                    };
                    let end = told.range.end.min(BYTES);
                    assert!((told.range.start..end).all(|byte| is_there(byte as usize)));
                }
            }
            _ => {
                let outcome = handles[handle].try_lock_range(range.clone(), mode);
                assert_eq!(is_locked(outcome), first.is_some(), "step {step}: {range:?} {mode:?}");
                if first.is_none() {
                    held[bytes].iter_mut().for_each(|held| held[handle] = Some(mode));
                }
            }
        }
    }
}

#[test]
fn a_handle_is_never_in_its_own_way_and_its_clones_are_the_same() {
    let scratch = scratch();
    let files = scratch.open();
    let (file, other) = (files.open_file("/f").unwrap(), files.open_file("/f").unwrap());
    for _ in 0..2 {
        file.lock().unwrap();
        file.lock_shared().unwrap();
    }
    other.lock_shared().unwrap();
    // A lock that is refused changes nothing.
    assert!(is_locked(as_range(file.try_lock())));
    assert_eq!(other.lock_conflict(Exclusive).unwrap(), Some(Shared));
    other.unlock().unwrap();
    let clone = file.clone();
    clone.lock().unwrap();
    drop(file);
    assert!(is_locked(as_range(other.try_lock_shared())));
    clone.unlock().unwrap();
    other.try_lock().unwrap();
    // A lock belongs to the file, whatever happens to its names.
    other.lock().unwrap();
    files.rename("/f", "/g").unwrap();
    assert!(is_locked(as_range(files.open_file("/g").unwrap().try_lock())));
    files.create_file("/f").unwrap().try_lock().unwrap();
    files.remove_file("/g").unwrap();
    drop((other, clone));
    for index in 0..20 {
        files.create_file(format!("/{index}")).unwrap().try_lock().unwrap();
    }
}

fn sharers() {
    let scratch = scratch();
    let files = scratch.open();
    let handles = [(); 2].map(|()| files.open_file("/f").unwrap());
    handles.iter().for_each(|handle| handle.lock_shared().unwrap());
    std::thread::scope(|scope| {
        for handle in &handles {
            scope.spawn(move || {
                handle.lock().unwrap();
                handle.unlock().unwrap();
            });
        }
    });
}

/// In a child, so that a deadlock ends with it.
#[test]
fn two_that_share_a_file_and_both_want_it_alone_do_not_wait_for_each_other() {
    child::succeeds("sharers");
}

#[test]
fn what_cannot_be_locked_is_an_error() {
    let scratch = scratch();
    let files = scratch.open();
    files.create_dir("/d").unwrap();
    let file = files.open_file("/f").unwrap();
    let limit_bytes = files.pool().lockable_bytes();
    for range in [0..limit_bytes + 1, limit_bytes..limit_bytes + 1, limit_bytes..u64::MAX] {
        let refused = file.lock_range(range.clone(), Shared);
        assert!(matches!(refused, Err(FsError::LockTooFar { .. })), "{range:?}");
    }
    file.lock_range(limit_bytes - 1..limit_bytes, Exclusive).unwrap();
    #[allow(clippy::reversed_empty_ranges, reason = "is an error")]
    for range in [0..0, 7..7, 9..3] {
        assert!(matches!(file.try_lock_range(range, Shared), Err(FsError::EmptyRange)));
    }
    let directory = files.open_file("/d").unwrap();
    assert!(matches!(directory.lock(), Err(FsError::IsADirectory { .. })));

    // A read-only pool allows shared locks only.
    let reading = Pool::options().read_only(true);
    let reader = Files::new(reading.open(&scratch.path).unwrap());
    let read = reader.open_file("/f").unwrap();
    for refused in [read.lock(), as_range(read.try_lock()), read.lock_range(.., Exclusive)] {
        assert!(matches!(refused, Err(FsError::Pool(PoolError::ReadOnly { .. }))), "{refused:?}");
    }
    read.lock_shared().unwrap();
    assert!(is_locked(as_range(file.try_lock())));
    assert!(is_locked(read.try_lock_range(limit_bytes - 1.., Shared)));
    drop(read);
    file.try_lock().unwrap();
}

/// Every bit of the inode number matters: locks of files with high numbers in a large pool do not
/// conflict with those of low ones.
#[test]
fn files_of_all_numbers_are_locked_apart() {
    let options = Pool::options().inodes(5000);
    let scratch = Scratch::with_pool(16 << 20, &options);
    let files = scratch.open();
    let made: Vec<File> =
        (0..4000).map(|index| files.create_file(format!("/{index}")).unwrap()).collect();
    let kept: Vec<&File> = made.iter().step_by(97).collect();
    for file in &kept {
        file.try_lock().unwrap();
        file.try_lock_range(.., Exclusive).unwrap();
    }
    let highest = kept.iter().map(|file| file.metadata().unwrap().ino()).max();
    assert!(highest > Some(3900), "{highest:?}");
    // Nor do they conflict with opening and closing the pool, or with locks of objects.
    drop(Pool::open(&scratch.path).unwrap());
    for number in 1..5000 {
        files.pool().lock_inode(number, aquifer_pool::LockMode::Exclusive).unwrap();
    }
}

/// A forked child has no locks, cannot take any, and neither keeps nor releases those of its
/// parent.
#[test]
fn a_fork_has_no_locks() {
    for drops in [true, false] {
        let scratch = scratch();
        let files = scratch.open();
        let file = files.open_file("/f").unwrap();
        file.lock().unwrap();
        file.lock_range(.., Exclusive).unwrap();
        let (mut reading, writing) = std::io::pipe().unwrap();
        // SAFETY: the child only makes the tested calls, and pauses until it is killed.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_forked = |outcome: Result<(), FsError>| {
                matches!(outcome, Err(FsError::Pool(PoolError::Forked)))
            };
            let refused = [
                as_range(file.try_lock()),
                file.unlock(),
                file.unlock_range(..),
                file.lock_conflict(Shared).map(drop),
            ];
            let all = refused.into_iter().all(is_forked);
            if drops {
                drop((file, files));
            }
            let mut writing = writing;
            let _ = std::io::Write::write_all(&mut writing, if all { b"y" } else { b"n" });
            loop {
                // SAFETY: no preconditions: `pause` waits for a signal.
                unsafe { libc::pause() };
            }
        }
        drop(writing);
        let mut answer = [0];
        std::io::Read::read_exact(&mut reading, &mut answer).unwrap();
        let other = scratch.open();
        let others = other.open_file("/f").unwrap();
        let still_held = is_refused(&others, "file", Shared);
        drop(file);
        let free_again = others.try_lock().is_ok() && others.try_lock_range(.., Exclusive).is_ok();
        // SAFETY: `kill` on our child, which has not been waited for.
        unsafe { libc::kill(child, libc::SIGKILL) };
        let mut status = 0;
        // SAFETY: waits for the child made above; `status` outlives the call.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(&answer, b"y");
        assert!(still_held, "the child gave up its parent's lock");
        assert!(free_again, "the child keeps its parent's lock");
    }
}
