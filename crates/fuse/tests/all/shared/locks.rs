//! Locks of programs on the mount and of programs that use the library exclude each other.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::os::unix::thread::JoinHandleExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use aquifer_fs::{FsError, LockMode};
use aquifer_fuse::mounts;
use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_testkit::child;
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Flock, FlockType, Resource, Rlimit, fcntl_getlk, getrlimit, setrlimit};

use crate::kept::place::{How, Place, WAITS, WAITS_IF};
use crate::shared::{both, end, mount_again};
use aquifer_testkit::watchdog::Watchdog;

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
    until_waiting_at(&place.root(), count);
}

fn until_waiting_at(directory: &Path, count: u64) {
    loop {
        let all = mounts().expect("the table");
        let mounted = all.iter().find(|it| it.directory == directory).expect("it is there");
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

/// In a process of its own.
pub fn lock_second_then_first() {
    let at = std::env::var_os(AT).expect("set by the parent");
    let [first, second] = ["f", "g"].map(|name| open(&Path::new(&at).join(name)));
    fcntl_lock(&second, FlockOperation::LockExclusive).expect("it is free");
    fcntl_lock(&first, FlockOperation::LockExclusive).expect("this process is killed before");
}

/// A kernel that has the locks itself says `EDEADLK`.
pub fn a_deadlock_is_not_noticed() {
    let Some((place, files)) = both() else { return };
    let [first, second] = ["f", "g"].map(|name| {
        fs::write(place.root().join(name), "text").expect("a new file");
        open(&place.root().join(name))
    });
    fcntl_lock(&first, FlockOperation::LockExclusive).expect("it is free");
    let other = child::command("lock-other").env(AT, place.root()).spawn();
    let mut other = other.expect("this program");
    // Until the child has the other file.
    while fcntl_lock(&second, FlockOperation::NonBlockingLockExclusive).is_ok() {
        fcntl_lock(&second, FlockOperation::Unlock).expect("it is this process's");
        std::thread::yield_now();
    }
    until_waiting(&place, 1);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| fcntl_lock(&second, FlockOperation::LockExclusive));
        until_waiting(&place, 2);
        assert!(!waits.is_finished());
        other.kill().expect("a child");
        waits.join().expect("no panic").expect("its holder has ended");
    });
    assert!(!other.wait().expect("a child").success());
    drop((first, second, files));
    end(place);
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

const ALONE: FlockOperation = FlockOperation::NonBlockingLockExclusive;
const PATIENCE: Duration = Duration::from_secs(60);

/// The three kinds of locks, on all of a file: whether it was got.
type Kind = (fn(&File) -> bool, fn(&File));
const KINDS: [Kind; 3] = [
    (
        |file| flock(file, ALONE).is_ok(),
        |file| flock(file, FlockOperation::Unlock).expect("it is open"),
    ),
    (
        |file| {
            let tried = lock::try_lock(file.as_fd(), LockRange::WHOLE, LockKind::Exclusive);
            tried.expect("it is open")
        },
        |file| lock::unlock(file.as_fd(), LockRange::WHOLE).expect("it is open"),
    ),
    (
        |file| fcntl_lock(file, ALONE).is_ok(),
        |file| fcntl_lock(file, FlockOperation::Unlock).expect("it is open"),
    ),
];

pub fn locks_of_two_mounts_exclude_each_other() {
    let Some((place, files)) = both() else { return };
    let second = place.at("second");
    fs::create_dir(&second).expect("a directory of its own");
    let how = How { cache: aquifer_fuse::Cache::Shared, ..How::default() };
    let keeper = mount_again(&place, &second, &how).expect("others may mount it");
    fs::write(place.root().join("f"), "text").expect("a new file");
    let (one, two) = (open(&place.root().join("f")), open(&second.join("f")));
    for (try_it, unlock) in KINDS {
        for (has, wants) in [(&one, &two), (&two, &one)] {
            assert!(try_it(has) && !try_it(wants));
            unlock(has);
            assert!(try_it(wants) && !try_it(has));
            unlock(wants);
        }
    }
    // Which one it is.
    let wanted = Flock::from(FlockType::WriteLock);
    let found = || fcntl_getlk(&two, &wanted).expect("it is open");
    assert_eq!(found().map(|it| it.typ), None);
    fcntl_lock(&one, FlockOperation::NonBlockingLockShared).expect("no other has it");
    let it = found().expect("it is locked");
    assert_eq!((it.typ, it.start, it.length, it.pid), (FlockType::ReadLock, 0, 0, None));
    fcntl_lock(&one, FlockOperation::Unlock).expect("it is open");
    assert_eq!(found().map(|it| it.typ), None);
    // And who waits gets it.
    for wait in [
        (|file| Ok(flock(file, FlockOperation::LockExclusive)?))
            as fn(&File) -> std::io::Result<()>,
        |file| Ok(fcntl_lock(file, FlockOperation::LockExclusive)?),
    ] {
        wait(&one).expect("no other has it");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| wait(&two));
            until_waiting_at(&second, 1);
            KINDS.iter().for_each(|(_, unlock)| unlock(&one));
            waits.join().expect("no panic").expect("it is free");
        });
        KINDS.iter().for_each(|(_, unlock)| unlock(&two));
    }
    drop((one, two));
    aquifer_fuse::unmount(&second, false, PATIENCE).expect("nothing uses it");
    assert!(keeper.wait().expect("a child").success());
    drop(files);
    end(place);
}

/// In a process of its own, whose standard input is a file that its parent has locked.
pub fn inherit_locks() {
    let file = std::io::stdin().as_fd().try_clone_to_owned().map(File::from).expect("a file");
    // The parent's locks of processes are not those of this one.
    assert!(!try_process_lock(&file, 0..10) && try_process_lock(&file, 40..50));
    // Those of the description are.
    flock(&file, ALONE).expect("it has it already");
    let held = lock::try_lock(file.as_fd(), range(20, 10), LockKind::Exclusive);
    assert!(held.expect("it is open"));
}

/// In a process of its own: locks a file, and becomes another program.
pub fn lock_and_exec() {
    let file = open(Path::new(&std::env::var_os(AT).expect("set by the parent")));
    fcntl_lock(&file, ALONE).expect("no other has it");
    fcntl_setfd(&file, FdFlags::empty()).expect("it is open");
    let mut next = child::command("held");
    next.stdin(Stdio::inherit()).stdout(Stdio::inherit()).stderr(Stdio::inherit());
    panic!("{}", next.exec());
}

/// That program: it ends with its standard input.
pub fn keep_lock() {
    println!("held");
    std::io::stdin().read_to_end(&mut Vec::new()).expect("a pipe");
}

pub fn locks_are_those_of_processes_or_descriptions() {
    let Some((place, files)) = both() else { return };
    let at = place.root().join("f");
    fs::write(&at, "text").expect("a new file");
    let here = files.options().read(true).write(true).open("/f").expect("it is there");
    let one = open(&at);
    let duplicate = || one.try_clone().expect("there are descriptors");

    // Another process that has the description, and closes it.
    let locked = lock::try_lock(one.as_fd(), range(20, 10), LockKind::Exclusive);
    assert!(locked.expect("it is open"));
    flock(&one, ALONE).expect("no other has it");
    let mut inherits = child::command("inherit");
    inherits.stdin(Stdio::from(duplicate()));
    let process = open(&at);
    assert!(try_process_lock(&process, 0..10));
    let output = inherits.output().expect("a child");
    assert!(output.status.success(), "{output:?}");
    assert_eq!([0, 9, 10, 20, 29].map(|at| is_locked(&here, at)), [true, true, false, true, true]);
    assert!(here.try_lock().is_err());

    // A duplicate that is closed ends what the process has, and nothing else.
    drop(inherits);
    assert_eq!([0, 9, 20, 29].map(|at| is_locked(&here, at)), [false, false, true, true]);
    assert!(here.try_lock().is_err());

    // The last descriptor of the description is another process's.
    let (reading, writing) = std::io::pipe().expect("a pipe");
    let given = Stdio::from(duplicate());
    let mut keeps =
        child::command("held").stdin(reading).stderr(given).spawn().expect("this program");
    until_held(&mut keeps);
    drop((one, process));
    assert!(is_locked(&here, 20) && here.try_lock().is_err());
    drop(writing);
    assert!(keeps.wait().expect("a child").success());
    here.lock().expect("it ends");
    here.lock_range(20..30, LockMode::Exclusive).expect("it ends");
    unlock_all(&here);

    // What a process has, it has as another program too, until that ends.
    let (reading, writing) = std::io::pipe().expect("a pipe");
    let mut keeps =
        child::command("hold").env(AT, &at).stdin(reading).spawn().expect("this program");
    until_held(&mut keeps);
    assert!(is_locked(&here, 0));
    drop(writing);
    assert!(keeps.wait().expect("a child").success());
    assert!(!is_locked(&here, 0));
    drop((here, files));
    end(place);
}

/// Waits until a child says that it has started.
fn until_held(child: &mut std::process::Child) {
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    assert!(lines.any(|line| line.is_ok_and(|line| line == "held")));
    // It goes on to write.
    std::thread::spawn(move || lines.count());
}

/// Tries to lock bytes for this process.
fn try_process_lock(file: &File, bytes: std::ops::Range<u64>) -> bool {
    // SAFETY: all zeroes is a value of it.
    let mut wanted: libc::flock = unsafe { std::mem::zeroed() };
    wanted.l_type = libc::F_WRLCK as libc::c_short;
    wanted.l_whence = libc::SEEK_SET as libc::c_short;
    (wanted.l_start, wanted.l_len) = (bytes.start as i64, (bytes.end - bytes.start) as i64);
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(file);
    // SAFETY: a pointer to what the call reads.
    unsafe { libc::fcntl(descriptor, libc::F_SETLK, &raw const wanted) == 0 }
}

static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_signal(_: libc::c_int) {
    SIGNALS.fetch_add(1, SeqCst);
}

fn count_signals(flags: libc::c_int) {
    // SAFETY: all zeroes is a value of it, with no signal blocked.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = count_signal as *const () as usize;
    action.sa_flags = flags;
    // SAFETY: the handler changes an atomic, and nothing else.
    let set = unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()) };
    assert_eq!(set, 0);
}

pub fn a_signal_ends_a_wait_unless_it_begins_anew() {
    let Some((place, files)) = both() else { return };
    let at = place.root().join("f");
    fs::write(&at, "text").expect("a new file");
    let here = files.options().read(true).write(true).open("/f").expect("it is there");
    let waits: [fn(&File) -> std::io::Result<()>; 3] = [
        |file| Ok(flock(file, FlockOperation::LockExclusive)?),
        |file| Ok(fcntl_lock(file, FlockOperation::LockExclusive)?),
        |file| lock::lock(file.as_fd(), range(7, 7), LockKind::Exclusive),
    ];
    for wait in waits {
        for flags in [0, libc::SA_RESTART] {
            count_signals(flags);
            here.lock().expect("no other has it");
            here.lock_range(.., LockMode::Exclusive).expect("no other has it");
            let file = open(&at);
            let waits = std::thread::spawn(move || wait(&file));
            until_waiting(&place, 1);
            let signal = || {
                // SAFETY: a thread that was not joined.
                let sent = unsafe { libc::pthread_kill(waits.as_pthread_t(), libc::SIGUSR1) };
                // It may have ended.
                assert!(matches!(sent, 0 | libc::ESRCH), "{sent}");
            };
            if flags == 0 {
                // The first ones may come before the thread waits.
                while !waits.is_finished() {
                    signal();
                    std::thread::yield_now();
                }
                let ended = waits.join().expect("no panic").expect_err("it is interrupted");
                assert_eq!(ended.kind(), ErrorKind::Interrupted, "{ended}");
                unlock_all(&here);
            } else {
                let before = SIGNALS.load(SeqCst);
                while SIGNALS.load(SeqCst) < before + 10 {
                    signal();
                    std::thread::yield_now();
                }
                until_waiting(&place, 1);
                assert!(!waits.is_finished());
                unlock_all(&here);
                waits.join().expect("no panic").expect("it is free");
            }
        }
    }
    drop((here, files));
    end(place);
}

fn until(place: &Place, what: impl Fn(&Place) -> bool) {
    let mut watchdog = Watchdog::new();
    while !what(place) {
        assert!(!watchdog.hangs(), "{}", place.log());
        std::thread::yield_now();
    }
}

pub fn a_server_that_does_not_read_holds_up_no_keeper() {
    /// More than a socket has room for.
    const LOCKS: usize = 600;
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.map_or(4096, |most| most.min(4096));
    setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit }).expect("up to the limit");
    if most < 1024 {
        println!("skipped: {most} open files are too few");
        return;
    }
    let Some((mut place, files)) = both() else { return };
    let locked = |number: usize| {
        let file = File::create_new(place.root().join(number.to_string())).expect("a new file");
        flock(&file, ALONE).expect("no other has it");
        file
    };
    let open: Vec<File> = (0..LOCKS).map(locked).collect();
    let waits_if = place.at(WAITS_IF);
    fs::write(&waits_if, "").expect("a new file");
    assert!(place.kill_server());
    let waits = waits_if.with_extension(WAITS);
    until(&place, |_| waits.exists());
    // It has been told as much as there is room for. The keeper hears what happens all the same.
    let processes = place.processes();
    place.cut();
    until(&place, |place| place.processes() > processes);
    fs::remove_file(&waits_if).expect("it is there");
    // The server is told of all.
    for number in 0..LOCKS {
        let here = files.open_file(format!("/{number}")).expect("it is there");
        assert!(here.try_lock_shared().is_err(), "{number}");
    }
    drop((open, files));
    assert!(place.ended(), "{}", place.log());
}
