//! What a process that may only read a pool can do to it: nothing to the media and the metadata,
//! and to writers nothing but delay the reuse of pages. And what safe code that forgets a lock can
//! do.

use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::common::{Scene, contents, create, destroy, write};
use aquifer_check::{CheckOptions, check};
use aquifer_crashkit::unguarded::{UnguardedMedia, UnguardedPool};
use aquifer_pool::media::PersistenceDomain;
use aquifer_pool::{Pool, PoolError, PoolOptions};
use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::child;
use aquifer_testkit::rng::Rng;

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("stray of a reader", stray_of_a_reader),
    ("stray into the segment", stray_into_the_segment),
    ("a reader tries", a_reader_tries),
    ("reader of another user", reader_of_another_user),
    ("forgetful", forgetful),
];

fn reading() -> PoolOptions {
    Pool::options().read_only(true)
}

fn scene_in(directory: tempfile::TempDir) -> Scene {
    let scene = Scene::new(directory);
    let pool = crate::common::small(Pool::options()).create(&scene.path, 4 << 20).unwrap();
    create(&pool, b"first", 2).unwrap();
    scene
}

/// Pools on a disk, and in memory if possible.
fn scenes() -> Vec<Scene> {
    let mut directories = vec![tempfile::tempdir().unwrap()];
    match tempfile::tempdir_in("/dev/shm") {
        Ok(directory) => directories.push(directory),
        Err(error) => eprintln!("skipped: /dev/shm is not writable ({error})"),
    }
    directories.into_iter().map(scene_in).collect()
}

fn pool_of_parent() -> PathBuf {
    std::env::var_os("POOL").expect("set by the parent").into()
}

/// Every shared mapping of this process whose path has this end: start, length, whether it is
/// writable.
fn mappings(end: &str) -> Vec<(usize, usize, bool)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let found = maps.lines().filter(|line| line.ends_with(end)).map(|line| {
        let mut words = line.split_whitespace();
        let (start, stop) = words.next().unwrap().split_once('-').unwrap();
        let [start, stop] = [start, stop].map(|digits| usize::from_str_radix(digits, 16).unwrap());
        (start, stop - start, words.next().unwrap().contains('w'))
    });
    found.collect()
}

/// The end of the name of an open pool's shared memory, from its superblock.
fn segment_of(pool: &Path) -> String {
    let bytes = std::fs::read(pool).unwrap();
    bytes[96..112].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn reader() -> (PathBuf, Pool) {
    let path = pool_of_parent();
    let pool = reading().open(&path).unwrap();
    // A pool may be mapped only at the first read.
    pool.load(0, &mut [0; 8]).unwrap();
    (path, pool)
}

fn store(address: usize) {
    // SAFETY: the address is mapped; the test is whether the kernel allows the store.
    unsafe { (address as *mut u64).write_volatile(u64::MAX) };
}

fn stray_of_a_reader() {
    let (path, _pool) = reader();
    let (start, ..) = mappings(path.to_str().unwrap())[0];
    println!("storing");
    store(start);
}

fn stray_into_the_segment() {
    let (path, _pool) = reader();
    let (start, ..) = mappings(&segment_of(&path))[0];
    println!("storing");
    store(start);
}

/// Tries everything that a process can do with its descriptors and mappings.
fn a_reader_tries() {
    let (path, pool) = reader();
    let segment = segment_of(&path);
    let of_pool = mappings(path.to_str().unwrap());
    let of_segment = mappings(&segment);
    assert!(!of_pool.is_empty() && !of_segment.is_empty());
    assert!(mappings("-pins").is_empty(), "a reader has nothing that it could store to");
    for (start, len_bytes, is_writable) in of_pool.into_iter().chain(of_segment) {
        assert!(!is_writable);
        // SAFETY: the call must fail: it requests more access than is allowed, and nothing is
        // stored.
        let made = unsafe {
            libc::mprotect(start as *mut _, len_bytes, libc::PROT_READ | libc::PROT_WRITE)
        };
        assert_eq!((made, aquifer_sys::errno()), (-1, libc::EACCES));
        // The kernel must not store on behalf of the process either.
        let (reading, writing) = std::io::pipe().unwrap();
        std::io::Write::write_all(&mut &writing, b"stray").unwrap();
        use std::os::fd::AsRawFd;
        // SAFETY: the memory is read-only, so the call fails without storing.
        let put = unsafe { libc::read(reading.as_raw_fd(), start as *mut _, 5) };
        assert_eq!((put, aquifer_sys::errno()), (-1, libc::EFAULT));
    }
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        let target = target.to_string_lossy().into_owned();
        assert!(!target.ends_with("-pins"), "{target}");
        if target != path.to_string_lossy() && !target.ends_with(&segment) {
            continue;
        }
        let number: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
        // SAFETY: the number is an open descriptor of this process, which stays open.
        let file = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
        let refused = aquifer_sys::io::write_all_at(file.as_fd(), b"stray", 0).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBADF), "{target}");
        // SAFETY: `ftruncate` accesses no memory.
        assert_eq!(unsafe { libc::ftruncate(number, 0) }, -1, "{target}");
    }
    assert!(
        pool.store_unguarded(0, b"stray").is_err()
            && pool.media().write_unguarded(0, b"stray").is_err()
    );
    assert!(pool.media().grow(64 << 20).is_err());
    println!("tried");
}

#[test]
fn a_stray_store_of_a_reader_does_not_reach_the_media() {
    for scene in scenes() {
        // Shared memory exists: a writer has the pool open.
        let pool = Pool::open(&scene.path).unwrap();
        let before = contents(&pool).unwrap();
        let bytes_before = std::fs::read(&scene.path).unwrap();
        for role in ["stray of a reader", "stray into the segment"] {
            let played = child::command(role).env("POOL", &scene.path).output().unwrap();
            use std::os::unix::process::ExitStatusExt;
            assert!(String::from_utf8_lossy(&played.stdout).contains("storing"), "{played:?}");
            assert_eq!(played.status.signal(), Some(libc::SIGSEGV), "{role}: {played:?}");
        }
        let tried = child::command("a reader tries").env("POOL", &scene.path).output().unwrap();
        let said = String::from_utf8_lossy(&tried.stdout);
        assert!(tried.status.success() && said.contains("tried"), "{tried:?}");
        assert_eq!(contents(&pool).unwrap(), before);
        assert!(std::fs::read(&scene.path).unwrap() == bytes_before, "the media have changed");
        create(&pool, b"second", 1).unwrap();
        drop(pool);
        assert!(check(&scene.path, &CheckOptions::default()).unwrap().is_sound());
    }
}

/// The bytes of the readers' pins, as in docs/format.md.
const READER_USES: u64 = (1 << 61) + (1 << 34);
const READER_GROUPS: u64 = READER_LAYOUTS - (1 << 26);
const READER_LAYOUTS: u64 = READER_LAYOUTS_END - (1 << 60);
const READER_LAYOUTS_END: u64 = 1 << 62;

/// Randomly locks and unlocks bytes of the readers' pins, mostly bytes with a meaning.
fn lock_anything(file: &std::fs::File, rng: &mut Rng) {
    for _ in 0..rng.below(400) {
        let inode = rng.below(20);
        let (offset_bytes, len_bytes) = match rng.below(100) {
            0 => (READER_USES, 0),
            1 => (READER_LAYOUTS + rng.below(1 << 60), rng.below(1 << 60)),
            2..10 => (READER_GROUPS + rng.below(2), 1),
            10..20 => (READER_USES + (rng.below(3) << 32) + inode, 1 + rng.below(5)),
            20..30 => (READER_LAYOUTS + (inode << 32), 1 << 32),
            _ => (READER_LAYOUTS + (inode << 32) + rng.below(4), 1 + rng.below(3)),
        };
        let range = LockRange { offset_bytes, len_bytes };
        match rng.below(3) {
            0 => lock::unlock(file.as_fd(), range).unwrap(),
            _ => drop(lock::try_lock(file.as_fd(), range, LockKind::Shared).unwrap()),
        }
    }
}

/// A reader that locks random bytes can at most delay the reuse of freed pages: what is written is
/// correct, and the kept pages are free when that reader is closed.
#[test]
fn whatever_a_reader_locks_only_delays_that_pages_are_used_again() {
    let scene = scene_in(tempfile::tempdir().unwrap());
    let mut rng = Rng::new(seed(21));
    let options = Pool::options().background(false);
    let pool = options.open(&scene.path).unwrap();
    let free_before = pool.info().unwrap().free_pages;
    let reader = std::fs::File::open(&scene.path).unwrap();
    let mut expected = contents(&pool).unwrap();
    let mut kept_pages = 0;
    for round in 0..steps(60) as u64 {
        lock_anything(&reader, &mut rng);
        let name = format!("object-{}", rng.below(5)).into_bytes();
        match expected.remove(&name) {
            Some(_) => destroy(&pool, &name).unwrap(),
            None => match create(&pool, &name, 1 + rng.below(3)) {
                Ok(()) => {
                    drop(expected.insert(name.clone(), contents(&pool).unwrap()[&name].clone()))
                }
                // In a long run all pages may be kept.
                Err(PoolError::Full { .. }) => break,
                Err(error) => panic!("round {round}: {error}"),
            },
        }
        pool.checkpoint().unwrap();
        kept_pages = kept_pages.max(pool.info().unwrap().held_pages);
        assert_eq!(contents(&pool).unwrap(), expected, "round {round}");
    }
    drop(reader);
    for name in expected.keys().filter(|name| *name != b"first") {
        destroy(&pool, name).unwrap();
    }
    drop(pool);
    assert!(kept_pages > 0, "nothing that was locked kept a page: this has shown nothing");
    println!("at most {kept_pages} pages were kept by what was locked");
    assert!(check(&scene.path, &CheckOptions::default()).unwrap().is_sound());
    let pool = options.open(&scene.path).unwrap();
    assert_eq!(pool.info().unwrap().free_pages, free_before);
}

/// The first of the bytes that openers lock.
const OPENERS: u64 = 1 << 61;

/// The bytes of openers, of recovery, and of the process slots after the first one, which the
/// writer has.
const LOCKS_OF_A_LIVING_WRITER: [LockRange; 3] = [
    LockRange::byte(OPENERS),
    LockRange::byte(OPENERS + 1),
    LockRange { offset_bytes: OPENERS + (1 << 12) + 1, len_bytes: (1 << 12) - 1 },
];

/// What the last writer stored without a sync survives a restart of the machine, although a reader
/// has these ranges locked while the writer closes the pool.
fn outlasts_the_machine(locked: &[LockRange]) {
    let in_boot = |boot| {
        Pool::options()
            .boot(boot)
            .domain(PersistenceDomain::PageCache)
            .background(false)
            .stall_timeout(std::time::Duration::from_millis(50))
    };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pool");
    drop(crate::common::small(in_boot(1)).create(&path, 1 << 20).unwrap());
    let writer = in_boot(1).open(&path).unwrap();
    let reader = std::fs::File::open(&path).unwrap();
    for &range in locked {
        assert!(lock::try_lock(reader.as_fd(), range, LockKind::Shared).unwrap(), "{range:?}");
    }
    write(&writer, b"unsynced", 2, 7).unwrap();
    drop(writer);
    // The locks stay with the file. The shared memory belongs to the closed file, too.
    let copy = directory.path().join("copy");
    std::fs::copy(&path, &copy).unwrap();
    let pool = in_boot(2).open(&copy).unwrap();
    assert!(contents(&pool).unwrap().contains_key(b"unsynced".as_slice()), "{locked:?}");
    drop(pool);
    drop(reader);
    drop(in_boot(1).open(&path).unwrap());
}

#[test]
fn whatever_a_reader_locks_the_last_writer_leaves_a_durable_pool() {
    let [openers, recovery, slots] = LOCKS_OF_A_LIVING_WRITER;
    outlasts_the_machine(&[]);
    outlasts_the_machine(&[openers]);
    outlasts_the_machine(&[recovery]);
    outlasts_the_machine(&[openers, slots]);
    outlasts_the_machine(&[openers, recovery, slots]);
}

/// Another user that may read the pool and its shared memory: prints "pinned" when it has pins, and
/// stays until it is killed.
fn reader_of_another_user() {
    const NOBODY: u32 = 65534;
    // SAFETY: changes only this process, in which no other thread depends on its credentials.
    unsafe {
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setgid(NOBODY), 0);
        assert_eq!(libc::setuid(NOBODY), 0);
    }
    let path = pool_of_parent();
    let refused = |tried: std::io::Result<std::fs::File>| {
        let error = tried.expect_err("another user can write to the shared memory");
        assert_eq!(error.raw_os_error(), Some(libc::EACCES), "{error}");
    };
    for end in ["", "-pins"] {
        let name = Path::new("/dev/shm").join(format!("aquifer-{}{end}", segment_of(&path)));
        assert!(name.exists());
        refused(std::fs::File::options().write(true).open(&name));
        refused(std::fs::File::options().write(true).truncate(true).open(&name));
        let name = std::ffi::CString::new(name.to_str().unwrap()).unwrap();
        // SAFETY: a NUL-terminated path that outlives the call.
        let cut = unsafe { libc::truncate(name.as_ptr(), 0) };
        assert_eq!((cut, aquifer_sys::errno()), (-1, libc::EACCES));
    }
    let pool = reading().open(&path).unwrap();
    let _pins: Vec<_> = (pool.inodes().unwrap().iter())
        .map(|inode| pool.pin_owned(inode.number, 0).unwrap())
        .collect();
    println!("pinned");
    // Blocks until the parent kills it.
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
fn a_user_who_may_only_read_keeps_pages_and_cannot_harm_writers() {
    use std::os::unix::fs::PermissionsExt;
    if aquifer_sys::credentials::effective().uid != 0 {
        return eprintln!("skipped: acting as another user needs root");
    }
    let scene = scene_in(tempfile::tempdir().unwrap());
    let readable = |path: &Path, mode| {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    };
    readable(scene.path.parent().unwrap(), 0o755);
    readable(&scene.path, 0o644);
    let options = Pool::options().segment_mode(0o644).background(false);
    let pool = options.open(&scene.path).unwrap();
    let mut command = child::command("reader of another user");
    command.env("POOL", &scene.path).stdin(std::process::Stdio::piped());
    let mut reader = child::Reaped(command.spawn().unwrap());
    let mut lines = BufReader::new(reader.0.stdout.as_mut().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "pinned"), "the reader ended early");

    let free_pages = pool.info().unwrap().free_pages;
    destroy(&pool, b"first").unwrap();
    pool.checkpoint().unwrap();
    let info = pool.info().unwrap();
    assert_eq!((info.free_pages, info.pins), (free_pages, 1));
    assert!(info.held_pages > 0);
    // SAFETY: our child, which was not waited for.
    assert_eq!(unsafe { libc::kill(reader.0.id() as i32, libc::SIGSTOP) }, 0);
    create(&pool, b"second", 1).unwrap();
    pool.checkpoint().unwrap();
    assert_eq!(pool.info().unwrap().held_pages, info.held_pages, "a stopped reader keeps its pins");
    reader.kill();
    pool.checkpoint().unwrap();
    let info = pool.info().unwrap();
    assert_eq!((info.held_pages, info.pins), (0, 0));
    drop(pool);
    assert!(check(&scene.path, &CheckOptions::default()).unwrap().is_sound());
}

/// Forgets the lock of a file, closes the pool, and takes more locks in the same thread.
fn forgetful() {
    let options = Pool::options().background(false);
    let lock_of = |pool: &Pool, inode| std::mem::forget(pool.lock_file(inode).unwrap());
    let other = pool_of_parent().with_extension("other");
    let other = crate::common::small(options.clone()).create(other, 4 << 20).unwrap();
    let pool = options.open(pool_of_parent()).unwrap();
    lock_of(&pool, 2);
    std::mem::forget(pool.lock_two_files(3, 4).unwrap());
    drop(pool);
    // With another pool, so that nothing is mapped in place of what was forgotten.
    create(&other, b"first", 1).unwrap();
    let pool = options.open(pool_of_parent()).unwrap();
    lock_of(&pool, 2);
    create(&pool, b"second", 1).unwrap();
    drop(pool);
    let pool = options.open(pool_of_parent()).unwrap();
    drop(pool.lock_file(2).unwrap());
    create(&pool, b"third", 1).unwrap();
    println!("went on");
}

#[test]
fn a_forgotten_lock_of_a_file_harms_nothing_once_its_pool_is_closed() {
    let scene = scene_in(tempfile::tempdir().unwrap());
    let played = child::command("forgetful").env("POOL", &scene.path).output().unwrap();
    let said = String::from_utf8_lossy(&played.stdout);
    assert!(played.status.success() && said.contains("went on"), "{played:?}");
    let pool = Pool::open(&scene.path).unwrap();
    assert_eq!(contents(&pool).unwrap().len(), 3);
}
