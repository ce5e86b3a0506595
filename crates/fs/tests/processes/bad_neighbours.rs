//! Misbehaving processes that share a pool: they die at each named point, are stopped with a lock
//! or a pin, lose their shared memory, or copy the file. Every other process with the pool open
//! keeps working, or gets an error.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::actor::{Actor, command, hear, say, told};
use crate::killed::{LOG, State, Turn, Worker};
use crate::scratch::soundness::assert_sound;
use crate::scratch::{Scratch, names, read_all};
use aquifer_fs::{Files, FsError};
use aquifer_pool::{POINTS, Pool, PoolError, PoolOptions};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::child;
use aquifer_testkit::rng::Rng;

pub const ROLES: &[aquifer_testkit::child::Role] =
    &[("turner", turner), ("changer", changer), ("keeper", keeper), ("elsewhere", elsewhere)];

fn options() -> PoolOptions {
    // A wait this long is a deadlock. Pages that were never used are taken more than once.
    Pool::options().stall_timeout(Duration::from_secs(4)).background(false).fresh_step_pages(32)
}

fn hasty() -> PoolOptions {
    options().stall_timeout(Duration::from_millis(50))
}

fn reading() -> PoolOptions {
    hasty().read_only(true)
}

fn small(options: PoolOptions) -> PoolOptions {
    options.inodes(127).log_bytes(128 << 10)
}

// ---- death --------------------------------------------------------------------------------------

const TURNS: u64 = 60;

/// Takes turns, with an occasional checkpoint and zeroing; closes and opens the pool in between.
fn turner() {
    let open = || Files::new(options().open(told("POOL")).unwrap());
    let mut rng = Rng::new(told("SEED").parse().unwrap());
    for count in 0..TURNS / 10 {
        let files = open();
        let mut worker = Worker::new(files.clone(), "own", 0);
        for turn in 0..10 {
            worker.take(Turn::random(&mut rng));
            if turn % 4 == 3 {
                files.pool().checkpoint().unwrap();
                files.pool().zero_free_pages(2).unwrap();
            }
            say(count * 10 + turn);
        }
    }
}

/// Points that only commits of objects pass, or processes that create or recover a pool, or
/// complete another process's work.
fn is_elsewhere(point: &str) -> bool {
    point.starts_with("help-")
        || point.starts_with("note-")
        || point.starts_with("create-")
        || point.starts_with("names-")
        || [
            "capture-reserved",
            "finish-filler",
            "reserve-filler",
            "apply-moved",
            "apply-names",
            "held-noted",
            "held-freed",
            "held-moved",
            "open-secured",
        ]
        .contains(&point)
}

#[test]
fn a_process_may_die_at_every_point() {
    let mut rng = Rng::new(seed(41));
    let mut visited = BTreeSet::new();
    for point in POINTS.iter().filter(|point| !is_elsewhere(point)) {
        for round in 0..steps(2).max(2) {
            let scratch = Scratch::with_pool(4 << 20, &small(Pool::options()));
            let files = Files::new(options().open(&scratch.path).unwrap());
            files.create_dir("own").unwrap();
            files.create_dir("shared").unwrap();
            files.create_file(LOG).unwrap();
            files.sync().unwrap();
            // A process that has the pool open when the turner dies, or one that opens it later.
            let staying = (round % 2 == 0).then_some(files);
            let seed = rng.next_u64();
            let nth = if round < 2 { 1 } else { 1 + rng.below(3 * round as u64) };
            let die_at = format!("{point}*{nth}");
            let when = format!("{die_at}, others stay: {}, seed {seed}", staying.is_some());
            let mut turner = command("turner", &scratch.path, &[("SEED", &seed.to_string())]);
            let output = turner.env("AQUIFER_DIE_AT", &die_at).output().unwrap();
            let has_died = std::os::unix::process::ExitStatusExt::signal(&output.status).is_some();
            assert!(has_died || output.status.success(), "{when}");
            if has_died {
                visited.insert(*point);
            }
            let said = String::from_utf8_lossy(&output.stdout);
            let done = said.lines().filter_map(|line| line.strip_prefix("says: ")?.parse().ok());
            let done = done.max().map_or(0, |last: u64| last + 1);
            let files = staying.unwrap_or_else(|| {
                options()
                    .open(&scratch.path)
                    .map(Files::new)
                    .unwrap_or_else(|e| panic!("{when}: {e}"))
            });
            let (mut before, mut turns) = (State::default(), Rng::new(seed));
            (0..done).for_each(|_| before.apply(Turn::random(&mut turns).step));
            let next = Turn::random(&mut turns).step;
            // Completes what the dead process has published: until then, readers see what was before.
            files.sync().unwrap_or_else(|error| panic!("{when}: {error}"));
            let found = State::found(&files, "own");
            assert!(
                found.may_be_between(&before, next),
                "{when}: {done} done, then {next:?}: found {}\nbefore {}",
                found.summary(),
                before.summary()
            );
            assert_sound(files.pool());
            // Old and new processes keep working.
            files.create_file("/one").unwrap_or_else(|error| panic!("{when}: {error}"));
            let other = Files::new(options().open(&scratch.path).unwrap());
            other.create_file("/other").unwrap().write_all_at(&[7; 10_000], 0).unwrap();
            other.sync().unwrap_or_else(|error| panic!("{when}: {error}"));
            drop((files, other));
            drop(Files::new(options().open(&scratch.path).unwrap()));
            scratch.assert_clean();
        }
    }
    let missed: Vec<_> =
        POINTS.iter().filter(|p| !is_elsewhere(p) && !visited.contains(*p)).collect();
    assert!(missed.is_empty(), "no thread passed {missed:?}");
}

// ---- standstill ---------------------------------------------------------------------------------

/// Changes the pool, as told.
fn changer() {
    let files = Files::new(options().open(told("POOL")).unwrap());
    let writing = || files.options().write(true).open("/f").unwrap();
    match told("DOES").as_str() {
        "makes" => drop(files.create_file("/new").unwrap()),
        "cuts" => writing().set_len(0).unwrap(),
        _ => writing().write_all_at(&[9; 200_000], 0).unwrap(),
    }
}

/// Starts a changer that stops at a point.
fn held(scratch: &Scratch, does: &str, point: &str) -> Actor {
    let told = [("DOES", does), ("AQUIFER_HOLD_AT", point)];
    let mut changer = Actor::start("changer", &scratch.path, &told);
    changer.until_line("held");
    changer
}

fn is_stalled_by<T>(outcome: Result<T, FsError>, pid: u32) -> bool {
    matches!(outcome, Err(FsError::Pool(PoolError::Stalled { pid: found, .. })) if found == pid)
}

/// A pool with two files, whose writers have a short stall timeout.
fn scene() -> (Scratch, Files) {
    let scratch = Scratch::with_pool(4 << 20, &small(Pool::options()));
    let files = Files::new(hasty().open(&scratch.path).unwrap());
    files.create_file("/f").unwrap().write_all_at(b"text", 0).unwrap();
    files.create_file("/g").unwrap().write_all_at(b"other", 0).unwrap();
    files.sync().unwrap();
    (scratch, files)
}

/// Asserts that a reader can do everything.
fn assert_readable(files: &Files, expected: &[&str]) {
    assert_eq!(read_all(files, "/f").unwrap(), b"text");
    assert_eq!(names(files, "/").unwrap(), expected);
    assert_eq!(files.metadata("/g").unwrap().len(), 5);
    files.open_file("/g").unwrap().lock_shared().unwrap();
    assert!(matches!(files.open_file("/none"), Err(FsError::NotFound { .. })));
}

#[test]
fn a_process_stopped_in_a_name_change_stalls_writers_only() {
    for (point, expected) in
        [("packed-written", &["f", "g"][..]), ("apply-half", &["f", "g", "new"])]
    {
        for ends in ["goes on", "is killed"] {
            let (scratch, files) = scene();
            let reader = Files::new(reading().open(&scratch.path).unwrap());
            let writing = files.options().write(true).open("/f").unwrap();
            let mut changer = held(&scratch, "makes", point);
            let pid = changer.pid();
            assert!(is_stalled_by(files.create_file("/h"), pid), "{point}");
            assert!(is_stalled_by(files.rename("/f", "/h"), pid), "{point}");
            assert!(is_stalled_by(files.remove_file("/g"), pid), "{point}");
            assert!(is_stalled_by(files.sync(), pid), "{point}");
            assert!(is_stalled_by(writing.write_all_at(&[1; 100], 100_000), pid), "{point}");
            assert_readable(&files, expected);
            assert_readable(&reader, expected);
            match ends {
                "goes on" => {
                    changer.tell("on");
                    changer.finish();
                }
                _ => drop(changer.kill()),
            }
            // The stalled operations can now be done.
            files.rename("/f", "/h").unwrap();
            files.sync().unwrap();
            let is_there = ends == "goes on" || expected.len() == 3;
            assert_eq!(files.exists("/new").unwrap(), is_there, "{point}, {ends}");
            assert_sound(files.pool());
        }
    }
}

/// A new layout of a file takes effect when it is in the log, even if its writer stops there.
#[test]
fn a_process_stopped_in_a_file_change_stalls_no_readers() {
    for point in ["apply-odd", "apply-half", "apply-stored", "apply-counted"] {
        for ends in ["goes on", "is killed"] {
            let (scratch, files) = scene();
            let reader = Files::new(reading().open(&scratch.path).unwrap());
            let before = reader.view("/f", ..).unwrap();
            let known = files.view("/f", ..).unwrap();
            let open = reader.open_file("/f").unwrap();
            files.set_immutable("/g", true).unwrap();
            // It would wait for ever for the metadata lock.
            let patient = options().stall_timeout(Duration::from_secs(3600));
            let patient = Files::new(patient.open(&scratch.path).unwrap());
            patient.open_file("/g").unwrap(); // the path is known from now on
            let mut changer = Some(held(&scratch, "cuts", point));
            if ends == "is killed" {
                changer.take().map(Actor::kill);
            }
            for files in [&reader, &files] {
                assert_eq!(files.metadata("/f").unwrap().len(), 0, "{point}");
                assert!(files.view("/f", ..).unwrap().is_empty(), "{point}");
                assert!(read_all(files, "/f").unwrap().is_empty(), "{point}");
            }
            assert!(open.view(..).unwrap().is_empty(), "{point}");
            patient.open_file("/g").unwrap();
            assert!(!before.is_current() && !known.is_current(), "{point}");
            // The other file is not affected.
            for files in [&reader, &files] {
                let lease = files.lease("/g", ..).unwrap_or_else(|e| panic!("{point}: {e}"));
                assert!(lease[..] == *b"other" && lease.view().is_current(), "{point}");
            }
            for view in [&before, &known] {
                assert_eq!(view.read(|bytes| bytes.to_vec()).unwrap(), b"text", "{point}");
            }
            if let Some(mut changer) = changer {
                changer.tell("on");
                changer.finish();
            }
        }
    }
}

#[test]
fn a_process_stopped_in_a_write_stalls_other_writers_of_the_file() {
    let (scratch, files) = scene();
    let reader = Files::new(reading().open(&scratch.path).unwrap());
    let writing = files.options().write(true).open("/f").unwrap();
    // It holds the file's lock, and takes pages that were never used.
    let changer = held(&scratch, "writes", "transact-unlocked");
    let pid = changer.pid();
    assert!(is_stalled_by(writing.write_all_at(b"T", 0), pid));
    assert!(is_stalled_by(writing.set_len(2), pid));
    // Other files can be changed.
    files.options().write(true).open("/g").unwrap().write_all_at(b"O", 0).unwrap();
    files.create_file("/h").unwrap();
    files.remove_file("/h").unwrap();
    assert_readable(&files, &["f", "g"]);
    assert_readable(&reader, &["f", "g"]);
    changer.kill();
    writing.write_all_at(b"T", 0).unwrap();
    files.sync().unwrap();
    assert_eq!(read_all(&reader, "/f").unwrap(), b"Text");
    assert_sound(files.pool());
}

/// Waits until a thread of this process sleeps.
fn until_asleep(thread: i32) {
    let path = format!("/proc/self/task/{thread}/stat");
    let is_asleep =
        |stat: String| stat.rsplit_once(") ").is_some_and(|(_, at)| at.starts_with('S'));
    while !std::fs::read_to_string(&path).is_ok_and(is_asleep) {
        std::thread::yield_now();
    }
}

/// A writer that holds the file's lock may truncate away holes that are to get pages: they do not
/// come back.
#[test]
fn stores_wait_for_a_truncation_to_end() {
    let (scratch, _) = scene();
    let files = Files::new(options().open(&scratch.path).unwrap());
    let file = files.options().read(true).write(true).open("/f").unwrap();
    file.set_len(1 << 16).unwrap();
    let mut changer = held(&scratch, "cuts", "packed-written");
    let (says, hears) = std::sync::mpsc::channel();
    let len = std::thread::scope(|scope| {
        let storing = scope.spawn(|| {
            // SAFETY: no preconditions: `gettid` only returns a number.
            says.send(unsafe { libc::gettid() }).unwrap();
            file.view_mut(..).map(|view| view.len())
        });
        until_asleep(hears.recv().unwrap());
        changer.tell("on");
        changer.finish();
        storing.join().unwrap().unwrap()
    });
    assert_eq!((len, file.metadata().unwrap().len()), (0, 0));
}

/// Keeps a file or a view of it open until it is killed; opens the pool for reading.
fn keeper() {
    let files = Files::new(reading().open(told("POOL")).unwrap());
    let file = files.open_file("/large").unwrap();
    let (_file, _view) = match told("KEEPS").as_str() {
        "a view" => (None, Some(file.view(..).unwrap())),
        _ => (Some(file), None),
    };
    say("keeping");
    hear();
}

/// Space that a stopped reader pins is not reused. Everything else works, and the space is freed
/// when the reader dies.
#[test]
fn space_that_a_stopped_reader_keeps_is_given_back_when_it_dies() {
    for keeps in ["the file", "a view"] {
        let scratch = Scratch::with_pool(4 << 20, &small(Pool::options()));
        let files = Files::new(hasty().open(&scratch.path).unwrap());
        let free_bytes = files.space().unwrap().free_bytes;
        let large = vec![3; free_bytes as usize * 2 / 3];
        files.create_file("/large").unwrap().write_all_at(&large, 0).unwrap();
        let mut keeper = Actor::start("keeper", &scratch.path, &[("KEEPS", keeps)]);
        keeper.until("keeping");
        // SAFETY: `kill` on our child, which is alive.
        unsafe { libc::kill(keeper.pid() as i32, libc::SIGSTOP) };
        files.remove_file("/large").unwrap();
        files.sync().unwrap();
        let next = files.create_file("/next").unwrap();
        for _ in 0..3 {
            files.pool().checkpoint().unwrap();
            assert_eq!(next.write_all_at(&large, 0).unwrap_err().errno(), libc::ENOSPC, "{keeps}");
        }
        next.write_all_at(&large[..100_000], 0).unwrap();
        files.rename("/next", "/later").unwrap();
        assert_sound(files.pool());
        keeper.kill();
        next.write_all_at(&large, 0).unwrap_or_else(|error| panic!("{keeps}: {error}"));
        assert!(read_all(&files, "/later").unwrap() == large);
        drop(next);
        files.remove_file("/later").unwrap();
        files.pool().checkpoint().unwrap();
        assert_eq!(files.space().unwrap().free_bytes, free_bytes, "{keeps}");
        assert_sound(files.pool());
    }
}

/// A reader of a pool without writers shares no memory, so a writer could not take back what it
/// pins: `open` returns `Busy`.
#[test]
fn a_stopped_reader_that_was_the_first_keeps_writers_out_until_it_dies() {
    let scratch = Scratch::with_pool(4 << 20, &small(Pool::options()));
    scratch.open().create_file("/large").unwrap();
    let mut keeper = Actor::start("keeper", &scratch.path, &[("KEEPS", "the file")]);
    keeper.until("keeping");
    // SAFETY: `kill` on our child, which is alive.
    unsafe { libc::kill(keeper.pid() as i32, libc::SIGSTOP) };
    let refused = hasty().open(&scratch.path).map(drop);
    assert!(matches!(refused, Err(PoolError::Busy { .. })), "{refused:?}");
    assert!(Files::new(reading().open(&scratch.path).unwrap()).exists("/large").unwrap());
    keeper.kill();
    Files::new(hasty().open(&scratch.path).unwrap()).remove_file("/large").unwrap();
}

// ---- shared memory ------------------------------------------------------------------------------

/// The prefix of the names of the shared memory of an open pool.
fn start_of_segments(pool: &Path) -> String {
    let bytes = std::fs::read(pool).unwrap();
    let owner: String = bytes[96..104].iter().map(|byte| format!("{byte:02x}")).collect();
    assert_ne!(owner, "0".repeat(16));
    format!("aquifer-{owner}")
}

fn segments(start: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/dev/shm").unwrap().flatten();
    let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(start));
    named.map(|entry| entry.path()).collect()
}

#[test]
fn shared_memory_that_is_deleted_keeps_new_processes_out_and_loses_nothing() {
    let (scratch, files) = scene();
    let both = segments(&start_of_segments(&scratch.path));
    assert_eq!(both.len(), 2, "{both:?}");
    for deleted in [&both[..1], &both[1..]] {
        // Writers need both of them, readers only the segment.
        let has_segment = deleted[0].to_string_lossy().ends_with("-pins");
        let copies: Vec<_> =
            deleted.iter().map(|path| (path, path.with_extension("kept"))).collect();
        copies.iter().for_each(|(path, kept)| std::fs::rename(path, kept).unwrap());
        for (options, is_enough) in [(hasty(), false), (reading(), has_segment)] {
            let opened = options.open(&scratch.path).map(drop);
            let is_told = matches!(opened, Err(PoolError::BusyElsewhere { .. }));
            assert!(is_told != is_enough, "without {deleted:?}: {opened:?}");
        }
        copies.iter().for_each(|(path, kept)| std::fs::rename(kept, path).unwrap());
        drop(Files::new(hasty().open(&scratch.path).unwrap()));
    }
    both.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    // A process that has it open keeps working, and closes it as usual.
    files.create_file("/new").unwrap().write_all_at(b"new", 0).unwrap();
    files.sync().unwrap();
    drop(files);
    let files = Files::new(hasty().open(&scratch.path).unwrap());
    assert_eq!(read_all(&files, "/new").unwrap(), b"new");
    drop(files);
    scratch.assert_clean();
}

#[test]
fn the_next_opener_removes_shared_memory_of_dead_processes() {
    let (scratch, files) = scene();
    let start = start_of_segments(&scratch.path);
    drop(files);
    for point in ["packed-published", "close-last", "close-superblock", "open-segment"] {
        let told = [("DOES", "makes"), ("AQUIFER_DIE_AT", point)];
        let mut changer = command("changer", &scratch.path, &told);
        let status = changer.stderr(Stdio::null()).stdout(Stdio::null()).status().unwrap();
        assert!(!status.success(), "{point}");
        let left = segments(&start);
        assert!(!left.is_empty(), "{point}");
        let files = Files::new(hasty().open(&scratch.path).unwrap());
        let now = segments(&start);
        assert!(now.len() == 2 && left.iter().all(|left| !now.contains(left)), "{point}: {now:?}");
        match files.remove_file("/new") {
            Err(FsError::NotFound { .. }) => {}
            removed => removed.unwrap(),
        }
        drop(files);
        assert_eq!(segments(&start), [] as [PathBuf; 0], "{point}");
    }
}

/// A copy of the file is another pool with the same uuid. Both can be used at once.
#[test]
fn a_copied_pool_is_another_one() {
    let (scratch, files) = scene();
    files.create_file("/not synced").unwrap().write_all_at(b"all the same", 0).unwrap();
    let copy = scratch.directory.path().join("copy");
    std::fs::copy(&scratch.path, &copy).unwrap();
    let copied = Files::new(hasty().open(&copy).unwrap());
    assert_eq!(copied.pool().uuid(), files.pool().uuid());
    assert_eq!(read_all(&copied, "/not synced").unwrap(), b"all the same");
    let [own, others] = [&scratch.path, &copy].map(|path| segments(&start_of_segments(path)));
    assert!(own.len() == 2 && others.len() == 2 && own.iter().all(|path| !others.contains(path)));
    for (files, content) in [(&files, b"one"), (&copied, b"two")] {
        files.create_file("/f").unwrap().write_all_at(content, 0).unwrap();
        files.open_file("/f").unwrap().lock().unwrap();
    }
    let lock = files.open_file("/f").unwrap();
    lock.lock().unwrap();
    copied.open_file("/f").unwrap().try_lock().unwrap();
    // Each pool has its own processes; closing one does not affect the other.
    let other = Files::new(hasty().open(&copy).unwrap());
    assert_eq!(read_all(&other, "/f").unwrap(), b"two");
    drop((copied, other));
    assert_eq!(read_all(&Files::new(hasty().open(&scratch.path).unwrap()), "/f").unwrap(), b"one");
    assert!(own.iter().all(|path| path.exists()));
    drop((lock, files));
    for (path, content) in [(&scratch.path, b"one"), (&copy, b"two")] {
        let files = Files::new(hasty().open(path).unwrap());
        assert_eq!(read_all(&files, "/f").unwrap(), content);
        assert_sound(files.pool());
    }
}

/// With private mounts: a process has the pool open, and the next one sees another /dev/shm.
fn elsewhere() {
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    let path = directory.path().join("pool");
    let files = Files::new(small(hasty()).create(&path, 4 << 20).unwrap());
    files.create_file("/large").unwrap().write_all_at(b"text", 0).unwrap();
    let mut keeper = Actor::start("keeper", &path, &[("KEEPS", "the file")]);
    keeper.until("keeping");
    let mount = |arguments: &[&str]| {
        let mounted = Command::new("mount").args(arguments).stderr(Stdio::null()).status();
        mounted.is_ok_and(|status| status.success())
    };
    let is_own = std::fs::read_link("/proc/self/ns/mnt").ok()
        != std::fs::read_link(format!("/proc/{}/ns/mnt", std::os::unix::process::parent_id())).ok();
    if !is_own || !mount(&["--make-rprivate", "/"]) || !mount(&["-t", "tmpfs", "none", "/dev/shm"])
    {
        return println!("skipped: no other /dev/shm can be mounted here");
    }
    for options in [hasty(), reading()] {
        let refused = options.open(&path).map(drop);
        let is_told = matches!(refused, Err(PoolError::BusyElsewhere { .. }));
        assert!(is_told, "{refused:?}");
    }
    // The process that had it open is not affected.
    files.create_file("/new").unwrap().write_all_at(b"new", 0).unwrap();
    drop(files);
    // The remaining reader keeps memory that only it can see.
    let refused = hasty().open(&path).map(drop);
    assert!(matches!(refused, Err(PoolError::BusyElsewhere { .. })), "{refused:?}");
    keeper.kill();
    let files = Files::new(hasty().open(&path).unwrap());
    assert_eq!(read_all(&files, "/new").unwrap(), b"new");
    assert_sound(files.pool());
    drop(files);
    // What the dead processes left stays in their /dev/shm until the pool is opened there.
    assert!(Command::new("umount").arg("/dev/shm").status().unwrap().success());
    let files = Files::new(hasty().open(&path).unwrap());
    assert_eq!(read_all(&files, "/new").unwrap(), b"new");
}

#[test]
fn a_pool_that_is_open_beside_another_dev_shm_is_refused() {
    child::succeeds_with_mounts("elsewhere");
}
