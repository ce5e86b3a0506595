//! A program that closes the descriptors of an open pool, or puts other files in their place: the
//! pool's calls fail, and the program's files stay as they are.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::common::{Scene, contents, create, destroy, rename, write};
use aquifer_crashkit::unguarded::UnguardedPool;
use aquifer_pool::media::OpenOptions;
use aquifer_pool::{Pool, PoolError, end_thread_at};
use aquifer_sys::clock;
use aquifer_testkit::child;

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("closes", || loses(false, close_all)),
    ("closes-far", || loses(true, close_all)),
    ("replaces", || loses(true, replace_all)),
    ("replaces-same", || loses(true, replace_all_by_the_pool)),
    ("daemon", daemon),
    ("reads", reads),
    ("drops-pin", drops_pin),
    ("pins-first", pins_first),
    ("closes-pool", closes_pool),
    ("loses-one", loses_one),
    ("appends", appends),
    ("repairs", repairs),
    ("outlives", outlives),
    ("forks-before", forks_before),
    ("stores", || stores(false)),
    ("stores-locked", || stores(true)),
    ("zeroes", zeroes),
    ("checkpoints", checkpoints),
    ("parent", parent),
];

fn pool_of_parent() -> PathBuf {
    PathBuf::from(std::env::var("POOL").expect("set by the parent"))
}

/// The descriptors of a pool, and of its shared memory.
fn descriptors_of(pool: &Path) -> Vec<RawFd> {
    let numbers = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = numbers.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let is_its = |number: &String| {
        let target = std::fs::read_link(format!("/proc/self/fd/{number}")).unwrap_or_default();
        target == pool || target.starts_with("/dev/shm")
    };
    numbers.filter(is_its).map(|number| number.parse().unwrap()).collect()
}

/// Sets the soft limit of open files to this, or to the hard limit; returns both limits.
fn limit_files(soft: u64) -> (u64, u64) {
    // SAFETY: zeros are a value of the structure, and the calls only read and write it.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = soft.min(limit.rlim_max);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        (limit.rlim_cur, limit.rlim_max)
    }
}

/// Waits until what was compared counts no more.
fn next_tick() {
    let before = clock::coarse_ns();
    while clock::coarse_ns() == before {
        std::thread::yield_now();
    }
}

/// A file that nothing may write to.
fn own_file() -> File {
    tempfile::tempfile().unwrap()
}

/// Closes all descriptors but the standard ones, as daemons do, and opens others in their place.
fn close_all(numbers: &[RawFd]) -> Vec<File> {
    // SAFETY: closes what others use, on purpose. Of these, only the pool's are used afterwards.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
    let wanted = numbers.iter().max().unwrap() + 100;
    let mut files = Vec::new();
    while files.len() < wanted as usize {
        let Ok(file) = tempfile::tempfile() else { break };
        files.push(file);
    }
    files
}

/// Puts other files in the place of the pool's.
fn replace_all(numbers: &[RawFd]) -> Vec<File> {
    put_in_place(&own_file(), numbers)
}

/// The same with another open file description of the pool's file, which has none of its locks.
fn replace_all_by_the_pool(numbers: &[RawFd]) -> Vec<File> {
    put_in_place(&File::open(pool_of_parent()).unwrap(), numbers)
}

fn put_in_place(own: &File, numbers: &[RawFd]) -> Vec<File> {
    let put = |&number: &RawFd| {
        // SAFETY: replaces what the pool uses, on purpose.
        assert_eq!(unsafe { libc::dup2(own.as_raw_fd(), number) }, number);
        // SAFETY: just made; the pool gives it up.
        File::from(unsafe { OwnedFd::from_raw_fd(number) })
    };
    numbers.iter().map(put).collect()
}

/// Loses the descriptors of a pool, and tries everything that could write to one.
fn loses(is_limit_raised: bool, lose: fn(&[RawFd]) -> Vec<File>) {
    let path = pool_of_parent();
    limit_files(1024);
    let pool = Pool::open(&path).unwrap();
    create(&pool, b"before", 1).unwrap();
    let (pin, reservation) = (pool.pin(5, 1).unwrap(), pool.reserve(1, 1).unwrap());
    if is_limit_raised {
        limit_files(u64::MAX);
    }
    let numbers = descriptors_of(&path);
    assert!(numbers.len() >= 4, "{numbers:?}");
    let files = lose(&numbers);
    let len_bytes = |file: &File| file.metadata().expect("it is not closed").len();
    let before: Vec<u64> = files.iter().map(len_bytes).collect();

    next_tick();
    let outcomes = [
        create(&pool, b"after", 1),
        write(&pool, b"before", 1, 7),
        rename(&pool, b"before", b"later"),
        pool.sync(),
        pool.checkpoint(),
        pool.pin(6, 1).map(drop),
        pool.reserve(1, 1).map(drop),
    ];
    for (index, outcome) in outcomes.into_iter().enumerate() {
        assert!(matches!(outcome, Err(PoolError::LocksLost)), "{index}: {outcome:?}");
    }
    drop((pin, reservation));
    drop(pool);
    assert_eq!(files.iter().map(len_bytes).collect::<Vec<_>>(), before);
    if numbers.iter().all(|&number| files.iter().all(|file| file.as_raw_fd() != number)) {
        println!("no number could be taken again");
    }
    drop(files);

    // It can open the pool again.
    let pool = Pool::open(&path).unwrap();
    create(&pool, b"again", 1).unwrap();
    pool.sync().unwrap();
}

/// Another process goes on as after a death.
fn goes_on_beside(role: &str) {
    let scene = Scene::new(tempfile::tempdir().unwrap());
    let pool = Pool::create(&scene.path, 4 << 20).unwrap();
    create(&pool, b"mine", 1).unwrap();
    let free = pool.room().unwrap().free_pages;
    let ended = child::command(role).env("POOL", &scene.path).status().unwrap();
    assert!(ended.success(), "{ended}");
    create(&pool, b"mine too", 1).unwrap();
    pool.checkpoint().unwrap();
    let expected: Vec<&[u8]> = vec![b"again", b"before", b"mine", b"mine too"];
    assert_eq!(contents(&pool).unwrap().keys().collect::<Vec<_>>(), expected);
    assert_eq!(pool.room().unwrap().free_pages, free - 3, "the reservation is given back");
    drop(pool);
    let pool = Pool::open(&scene.path).unwrap();
    assert_eq!(contents(&pool).unwrap().len(), 4);
}

#[test]
fn a_program_that_closes_everything_keeps_its_files() {
    goes_on_beside("closes");
}

#[test]
fn a_program_that_reuses_the_numbers_keeps_its_files() {
    goes_on_beside("closes-far");
}

#[test]
fn a_program_that_replaces_the_files_keeps_its_own() {
    goes_on_beside("replaces");
}

#[test]
fn a_program_that_replaces_the_files_by_others_of_the_pool_keeps_its_own() {
    goes_on_beside("replaces-same");
}

/// Becomes a daemon as programs did for decades: the child of a fork closes everything. The numbers
/// of the pool lie behind those that such a loop reaches; and what it inherits is not its own.
fn daemon() {
    let path = pool_of_parent();
    let (soft, hard) = limit_files(1024);
    let pool = Pool::open(&path).unwrap();
    // SAFETY: asks for a number.
    let open_max = unsafe { libc::sysconf(libc::_SC_OPEN_MAX) } as RawFd;
    for number in 3..open_max.min(4096) {
        // SAFETY: closes what others use, on purpose.
        unsafe { libc::close(number) };
    }
    if soft >= hard {
        return println!("skipped: no number is out of reach");
    }
    create(&pool, b"before", 1).unwrap();
    pool.sync().unwrap();
    drop(pool);
    create(&Pool::open(&path).unwrap(), b"again", 1).unwrap();
}

#[test]
fn a_daemon_keeps_its_pool() {
    let scene = Scene::new(tempfile::tempdir().unwrap());
    drop(Pool::create(&scene.path, 4 << 20).unwrap());
    let ended = child::command("daemon").env("POOL", &scene.path).status().unwrap();
    assert!(ended.success(), "{ended}");
}

/// A handle that only reads notices it as well: its pins are gone.
fn reads() {
    let path = pool_of_parent();
    let pool = Pool::options().read_only(true).open(&path).unwrap();
    let mut bytes = [0; 8];
    pool.load(0, &mut bytes).unwrap();
    close_all(&descriptors_of(&path));
    next_tick();
    let lost = pool.load(0, &mut bytes);
    assert!(matches!(lost, Err(PoolError::LocksLost)), "{lost:?}");
    assert!(matches!(pool.pin(6, 1), Err(PoolError::LocksLost)));
}

#[test]
fn a_reader_whose_files_were_closed_reads_nothing() {
    let scene = Scene::new(tempfile::tempdir().unwrap());
    let _pool = Pool::create(&scene.path, 4 << 20).unwrap();
    let ended = child::command("reads").env("POOL", &scene.path).status().unwrap();
    assert!(ended.success(), "{ended}");
}

/// Says that the descriptors are closed, and waits until another process has gone on.
fn wait_for_the_other() {
    next_tick();
    println!("closed");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

fn drops_pin() {
    let path = pool_of_parent();
    let pool = Pool::open(&path).unwrap();
    let pin = pool.pin(5, 1).unwrap();
    close_all(&descriptors_of(&path));
    wait_for_the_other();
    drop(pin);
}

fn pins_first() {
    let path = pool_of_parent();
    let pool = Pool::open(&path).unwrap();
    drop(pool.pin(5, 1).unwrap());
    close_all(&descriptors_of(&path));
    wait_for_the_other();
    let pinned = pool.pin(6, 1);
    assert!(matches!(pinned, Err(PoolError::LocksLost)), "{pinned:?}");
}

/// Closes the descriptors while another thread is about to leave the pool.
fn closes_pool() {
    let path = pool_of_parent();
    let pool = Pool::open(&path).unwrap();
    drop(pool.pin(5, 1).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| drop(pool));
        wait_until_held(&path);
        close_all(&descriptors_of(&path));
        println!("closed");
    });
}

/// Waits until the parent has seen that a thread is held.
fn wait_until_held(path: &Path) {
    while !path.with_extension("held").exists() {
        std::thread::yield_now();
    }
}

/// The block of its pins is free for others, who claim it. Its first call afterwards, whichever it
/// is, changes none of their words; nor does the end of a call that closes the pool.
#[test]
fn pins_of_others_stay_where_a_program_had_its_own() {
    for role in ["drops-pin", "pins-first", "closes-pool"] {
        let scene = Scene::new(tempfile::tempdir().unwrap());
        let _first = Pool::create(&scene.path, 4 << 20).unwrap();
        let mut child = child::command(role);
        child.env("POOL", &scene.path).stdin(Stdio::piped()).stderr(Stdio::inherit());
        if role == "closes-pool" {
            child.env("AQUIFER_HOLD_AT", "close-leave");
        }
        let mut child = child::Reaped(child.spawn().unwrap());
        let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
        if role == "closes-pool" {
            assert!(lines.any(|line| line.unwrap() == "held"));
            File::create(scene.path.with_extension("held")).unwrap();
        }
        assert!(lines.any(|line| line.unwrap() == "closed"), "{role}");

        let pool = Pool::open(&scene.path).unwrap();
        // As many as a block has.
        let _pins: Vec<_> = (0..512).map(|_| pool.pin(7, 1).unwrap()).collect();
        let pins = pool.info().unwrap().pins;
        child.0.stdin.take().unwrap().write_all(b"\n").unwrap();
        assert!(lines.any(|line| line.unwrap().contains("played to its end")), "{role}");
        assert!(child.0.wait().unwrap().success(), "{role}");
        assert_eq!((pins, pool.info().unwrap().pins), (512, 512), "{role}");
    }
}

/// Loses one descriptor in the middle of a checkpoint.
fn checkpoints() {
    let path = pool_of_parent();
    let lost = std::env::var("LOSE").unwrap().parse::<usize>().unwrap();
    let pool = Pool::options().background(false).open(&path).unwrap();
    create(&pool, b"first", 1).unwrap();
    pool.sync().unwrap();
    std::thread::scope(|scope| {
        let checkpoint = scope.spawn(|| pool.checkpoint());
        wait_until_held(&path);
        let mut numbers = descriptors_of(&path);
        numbers.sort_unstable();
        if let Some(&number) = numbers.get(lost) {
            // SAFETY: closes what the pool uses, on purpose.
            unsafe { libc::close(number) };
        }
        next_tick();
        // Another thread notices it.
        let _ = pool.reserve(1, 1);
        println!("{}", if numbers.len() > lost { "closed" } else { "end" });
        let _ = checkpoint.join().unwrap();
    });
}

/// What others change and make durable after the loss is not replaced by what a checkpoint has found
/// before it.
#[test]
fn a_checkpoint_does_not_go_on_after_the_loss() {
    for point in ["checkpoint-durable", "checkpoint-applied"] {
        for lost in 0.. {
            let scene = Scene::new(tempfile::tempdir().unwrap());
            let options = Pool::options().background(false);
            let options = options.stall_timeout(std::time::Duration::from_millis(100));
            drop(options.create(&scene.path, 4 << 20).unwrap());
            let mut child = child::command("checkpoints");
            child.env("POOL", &scene.path).env("LOSE", lost.to_string());
            child.env("AQUIFER_HOLD_AT", point).stdin(Stdio::piped()).stderr(Stdio::inherit());
            let mut child = child::Reaped(child.spawn().unwrap());
            let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
            assert!(lines.any(|line| line.unwrap() == "held"));
            File::create(scene.path.with_extension("held")).unwrap();
            let is_end = loop {
                match lines.next().unwrap().unwrap().as_str() {
                    "closed" => break false,
                    "end" => break true,
                    _ => {}
                }
            };
            let pool = options.open(&scene.path).unwrap();
            // If the loss is not one of locks, the checkpoint goes on, and others wait for it.
            let second = create(&pool, b"second", 1).and_then(|()| pool.sync());
            let _ = pool.checkpoint();
            child.0.stdin.take().unwrap().write_all(b"\n\n").unwrap();
            lines.for_each(drop);
            drop(pool);
            let pool = options.check(true).open(&scene.path).unwrap();
            for (name, outcome) in [("first", Ok(())), ("second", second)] {
                let found = pool.object_named(name.as_bytes()).unwrap();
                assert!(found.is_some() || outcome.is_err(), "{point}, {lost}: {name} is lost");
            }
            if is_end {
                break;
            }
        }
    }
}

/// Loses one descriptor after the other, each of another handle.
fn loses_one() {
    let path = pool_of_parent();
    let mut losses = 0;
    let mut index = 0;
    loop {
        let pool = Pool::open(&path).unwrap();
        let numbers = descriptors_of(&path);
        let Some(&number) = numbers.get(index) else { break };
        // SAFETY: closes what the pool uses, on purpose.
        unsafe { libc::close(number) };
        next_tick();
        let name = format!("of {index}");
        let outcomes =
            [create(&pool, name.as_bytes(), 1), pool.sync(), pool.reserve(1, 1).map(drop)];
        if let Some(Err(error)) = outcomes.last()
            && matches!(error, PoolError::LocksLost)
        {
            losses += 1;
            // For others it is dead, and not only when it is dropped.
            let second = Pool::open(&path).unwrap();
            assert_eq!(second.info().unwrap().processes.len(), 2, "{index}");
            create(&second, format!("after {index}").as_bytes(), 1).unwrap();
            second.sync().unwrap();
        }
        drop(pool);
        index += 1;
    }
    assert!(losses >= 2, "{losses} of {index}");
}

#[test]
fn a_handle_that_has_lost_one_descriptor_is_dead_for_all() {
    let scene = Scene::new(tempfile::tempdir().unwrap());
    let pool = Pool::create(&scene.path, 4 << 20).unwrap();
    let ended = child::command("loses-one").env("POOL", &scene.path).output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    create(&pool, b"mine", 1).unwrap();
    pool.sync().unwrap();
}

/// Closes the descriptors while another thread is about to write a record that is reserved.
fn appends() {
    let path = pool_of_parent();
    let pool = Pool::open(&path).unwrap();
    std::thread::scope(|scope| {
        let appending = scope.spawn(|| pool.reserve(1, 1).map(drop));
        wait_until_held(&path);
        close_all(&descriptors_of(&path));
        next_tick();
        println!("closed");
        assert!(appending.join().unwrap().is_err());
    });
    let later = create(&pool, b"later", 1);
    assert!(matches!(later, Err(PoolError::LocksLost)), "{later:?}");
}

/// The first to find what a dead thread left is a handle without descriptors.
fn repairs() {
    let path = pool_of_parent();
    let pool = Pool::open(&path).unwrap();
    let ended = end_thread_at("transact-published", || create(&pool, b"dead", 1));
    assert!(ended.is_none());
    close_all(&descriptors_of(&path));
    next_tick();
    let later = create(&pool, b"later", 1);
    assert!(matches!(later, Err(PoolError::LocksLost)), "{later:?}");
}

#[test]
fn others_change_a_pool_that_was_lost_in_the_middle_of_an_append() {
    let scene = Scene::new(tempfile::tempdir().unwrap());
    let pool = Pool::create(&scene.path, 4 << 20).unwrap();
    let mut child = child::command("appends");
    child.env("POOL", &scene.path).env("AQUIFER_HOLD_AT", "transact-reserved");
    child.stdin(Stdio::piped()).stderr(Stdio::inherit());
    let mut child = child::Reaped(child.spawn().unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "held"));
    File::create(scene.path.with_extension("held")).unwrap();
    assert!(lines.any(|line| line.unwrap() == "closed"));
    child.0.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(lines.any(|line| line.unwrap().contains("played to its end")));
    create(&pool, b"mine", 1).unwrap();
    pool.sync().unwrap();
    pool.checkpoint().unwrap();
}

/// Closes all descriptors but one while another thread is about to write a record that others see,
/// and lives on, with its mappings.
fn outlives() {
    let path = pool_of_parent();
    let kept = std::env::var("KEEP").unwrap().parse::<usize>().unwrap();
    let pool = Pool::open(&path).unwrap();
    let _pin = pool.pin(5, 1).unwrap();
    std::thread::scope(|scope| {
        let appending = scope.spawn(|| create(&pool, b"theirs", 1));
        wait_until_held(&path);
        let mut numbers = descriptors_of(&path);
        numbers.sort_unstable();
        for (index, number) in numbers.into_iter().enumerate() {
            if index != kept {
                // SAFETY: closes what the pool uses, on purpose.
                unsafe { libc::close(number) };
            }
        }
        next_tick();
        println!("closed");
        let outcome = appending.join().unwrap();
        println!("{}", if outcome.is_ok() { "went on" } else { "ended" });
        assert!(outcome.is_ok() || matches!(pool.check_kept(), Err(PoolError::LocksLost)));
        loop {
            std::thread::park();
        }
    });
}

/// Others need not wait for the death of a process that has lost its locks, or some descriptors: also
/// where the pool is mapped.
#[test]
fn others_go_on_while_a_program_that_has_closed_descriptors_lives() {
    let none = 99;
    for place in [std::env::temp_dir(), PathBuf::from("/dev/shm")] {
        for (point, kept) in [("transact-unlocked", none), ("transact-published", none)]
            .into_iter()
            .chain((0..7).map(|kept| ("transact-published", kept)))
        {
            let scene = Scene::new(tempfile::tempdir_in(&place).unwrap());
            let options = Pool::options().background(false);
            let options = options.stall_timeout(std::time::Duration::from_secs(5));
            let pool = options.create(&scene.path, 4 << 20).unwrap();
            let mut child = child::command("outlives");
            child.env("POOL", &scene.path).env("KEEP", kept.to_string());
            child.env("AQUIFER_HOLD_AT", point).stdin(Stdio::piped()).stderr(Stdio::inherit());
            let mut child = child::Reaped(child.spawn().unwrap());
            let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
            assert!(lines.any(|line| line.unwrap() == "held"));
            File::create(scene.path.with_extension("held")).unwrap();
            assert!(lines.any(|line| line.unwrap() == "closed"));
            child.0.stdin.take().unwrap().write_all(b"\n").unwrap();
            let outcome = lines.next().unwrap().unwrap();
            let what = format!("{}, {point}, {kept}: {outcome}", place.display());
            if kept == none {
                assert_eq!(outcome, "ended", "{what}");
            }

            create(&pool, b"mine", 1).unwrap_or_else(|error| panic!("{what}: {error}"));
            pool.sync().unwrap_or_else(|error| panic!("{what}: {error}"));
            let pins = usize::from(outcome == "went on");
            assert_eq!(pool.info().unwrap().pins, pins as u64, "{what}");
            assert!(child.0.try_wait().unwrap().is_none(), "{what}: it lives");
        }
    }
}

/// Another thread forks between the opening of the media and that of the pool.
fn forks_before() {
    let path = pool_of_parent();
    let media = OpenOptions::new().writable(true).open(&path).unwrap();
    let mut bytes = [0; 8];
    media.read_at(0, &mut bytes).unwrap();
    // SAFETY: the child makes system calls, and leaves by `_exit`.
    if unsafe { libc::fork() } == 0 {
        // SAFETY: the parent of this process reads the output until it is closed.
        unsafe { libc::syscall(libc::SYS_close_range, 1, 2, 0) };
        let mut byte = 0_u8;
        // SAFETY: waits for the end of the input.
        unsafe { libc::read(0, (&raw mut byte).cast(), 1) };
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    let pool = Pool::options().open_on(media).unwrap();
    // Dies without closing it.
    std::mem::forget(pool);
}

#[test]
fn a_child_that_was_forked_before_the_pool_was_opened_keeps_no_locks() {
    let scene = Scene::new(tempfile::tempdir().unwrap());
    drop(Pool::create(&scene.path, 4 << 20).unwrap());
    let mut child = child::command("forks-before");
    child.env("POOL", &scene.path).stdin(Stdio::piped()).stderr(Stdio::inherit());
    let mut child = child::Reaped(child.spawn().unwrap());
    let _input = child.0.stdin.take();
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("played to its end")));
    assert!(child.0.wait().unwrap().success());
    drop(Pool::options().exclusive(true).open(&scene.path).unwrap());
}

#[test]
fn others_repair_what_a_lost_handle_cannot() {
    let scene = Scene::new(tempfile::tempdir().unwrap());
    let pool = Pool::create(&scene.path, 4 << 20).unwrap();
    let ended = child::command("repairs").env("POOL", &scene.path).output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    create(&pool, b"mine", 1).unwrap();
    pool.sync().unwrap();
    assert!(contents(&pool).unwrap().contains_key(&b"mine"[..]));
}

/// Media that are memory take bytes without a descriptor. With the lock of a file, `store` asks once
/// in a MiB.
fn stores(is_locked: bool) {
    let path = pool_of_parent();
    let pool = Pool::open(&path).unwrap();
    let reservation = pool.reserve(1024, 1).unwrap();
    let start_bytes = reservation.whole().bytes().offset_bytes;
    let is_stored = |offset_bytes: u64| {
        let mut bytes = [0; 8];
        File::open(&path).unwrap().read_exact_at(&mut bytes, start_bytes + offset_bytes).unwrap();
        bytes == [1; 8]
    };
    let lock = pool.lock_file(5).unwrap();
    close_all(&descriptors_of(&path));
    next_tick();
    let bytes = vec![1; 4 << 20];
    let stored = if is_locked {
        // SAFETY: the pages are reserved.
        unsafe { lock.store(start_bytes, &bytes) }
    } else {
        pool.store_unguarded(start_bytes, &bytes)
    };
    assert!(matches!(stored, Err(PoolError::LocksLost)), "{stored:?}");
    assert_eq!([is_stored(0), is_stored(1 << 20)], [is_locked, false]);
}

#[test]
fn a_long_store_ends_soon_after_the_loss() {
    for role in ["stores", "stores-locked"] {
        let scene = Scene::new(tempfile::tempdir_in("/dev/shm").unwrap());
        let pool = Pool::create(&scene.path, 8 << 20).unwrap();
        let ended = child::command(role).env("POOL", &scene.path).output().unwrap();
        assert!(ended.status.success(), "{role}: {ended:?}");
        create(&pool, b"mine", 1).unwrap();
    }
}

/// Closes the descriptors while another thread is about to zero pages that it has reserved.
fn zeroes() {
    let path = pool_of_parent();
    let pool = Pool::options().background(false).open(&path).unwrap();
    std::thread::scope(|scope| {
        let zeroing = scope.spawn(|| pool.zero_free_pages(1));
        while !path.with_extension("held").exists() {
            std::thread::yield_now();
        }
        close_all(&descriptors_of(&path));
        next_tick();
        println!("closed");
        let zeroed = zeroing.join().unwrap();
        assert!(matches!(zeroed, Err(PoolError::LocksLost)), "{zeroed:?}");
    });
}

#[test]
fn no_page_is_zeroed_after_the_loss() {
    let scene = Scene::new(tempfile::tempdir_in("/dev/shm").unwrap());
    let pool = Pool::options().background(false).create(&scene.path, 8 << 20).unwrap();
    // So that a free page is not fresh: those are known to be zero.
    write(&pool, b"before", 1, 7).unwrap();
    destroy(&pool, b"before").unwrap();
    pool.checkpoint().unwrap();
    let mut child = child::command("zeroes");
    child.env("POOL", &scene.path).env("AQUIFER_HOLD_AT", "zero-taken");
    child.stdin(Stdio::piped()).stderr(Stdio::inherit());
    let mut child = child::Reaped(child.spawn().unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "held"));
    let before = std::fs::read(&scene.path).unwrap();
    File::create(scene.path.with_extension("held")).unwrap();
    assert!(lines.any(|line| line.unwrap() == "closed"));
    child.0.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(lines.any(|line| line.unwrap().contains("played to its end")));
    assert!(std::fs::read(&scene.path).unwrap() == before, "bytes were stored");
    create(&pool, b"mine", 1).unwrap();
}

/// What a forked child closes is not its parent's.
fn parent() {
    let path = pool_of_parent();
    let pool = Pool::open(&path).unwrap();
    let numbers = descriptors_of(&path);
    // SAFETY: the only other thread sleeps.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let has_locks = numbers.iter().any(|&number| {
            let target = std::fs::read_link(format!("/proc/self/fd/{number}"));
            target.is_ok_and(|target| target == path) && pool.sync().is_ok()
        });
        drop(pool);
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(has_locks)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    create(&pool, b"before", 1).unwrap();
    pool.sync().unwrap();
    assert_eq!(descriptors_of(&path), numbers);
}

#[test]
fn a_forked_child_closes_nothing_of_its_parent() {
    let scene = Scene::new(tempfile::tempdir().unwrap());
    drop(Pool::create(&scene.path, 4 << 20).unwrap());
    let ended = child::command("parent").env("POOL", &scene.path).status().unwrap();
    assert!(ended.success(), "{ended}");
}
