//! Shared memory in a directory that the caller has chosen: the pool's directory, on a disk, which
//! other containers share and which survives restarts of the machine.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::common::{contents, create};
use crate::disk::{Disk, succeeds};
use aquifer_check::{CheckOptions, FindingKind};
use aquifer_pool::{Pool, PoolError, PoolOptions};
use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_testkit::child::{self, Reaped};

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("writer elsewhere", write_until_killed),
    ("containers", containers),
    ("crowded", crowded),
    ("no birth times", no_birth_times),
    ("syncing writer", write_two_states),
    ("dying writer", write_and_die),
    ("lost image", lost_image),
    ("opener elsewhere", open_as_told),
    ("own boot id", own_boot_id),
    ("little room", little_room),
];

fn default() -> PoolOptions {
    Pool::options().background(false)
}

fn reading() -> PoolOptions {
    Pool::options().read_only(true)
}

/// Options with shared memory beside the pool.
fn beside(pool: &Path) -> PoolOptions {
    default().segment_directory(pool.parent().unwrap())
}

fn names_of_shared_memory(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().flatten().map(|entry| entry.path());
    let is_ours =
        |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("aquifer-");
    let mut names: Vec<_> = entries.filter(is_ours).collect();
    names.sort();
    names
}

fn created(directory: &Path) -> PathBuf {
    let path = directory.join("pool");
    let pool = crate::common::small(beside(&path)).create(&path, 4 << 20).unwrap();
    create(&pool, b"first", 1).unwrap();
    path
}

fn write_until_killed() {
    let path = PathBuf::from(std::env::var_os("POOL").unwrap());
    let _pool = beside(&path).open(&path).unwrap();
    println!("writing");
    std::io::Write::flush(&mut std::io::stdout()).unwrap();
    loop {
        std::thread::park();
    }
}

fn writer_of(pool: &Path) -> Reaped {
    use std::io::{BufRead, BufReader};
    let mut writer = Reaped(child::command("writer elsewhere").env("POOL", pool).spawn().unwrap());
    let output = BufReader::with_capacity(1, writer.0.stdout.as_mut().unwrap());
    assert!(output.lines().any(|line| line.unwrap() == "writing"));
    writer
}

#[test]
fn shared_memory_beside_the_pool_is_found_by_all() {
    let directory = tempfile::tempdir().unwrap();
    let path = created(directory.path());
    assert_eq!(names_of_shared_memory(directory.path()), [] as [PathBuf; 0]);
    let pool = beside(&path).open(&path).unwrap();
    let names = names_of_shared_memory(directory.path());
    assert_eq!(names.len(), 2, "{names:?}");
    // The memory that is used at first is allocated.
    for name in &names {
        let found = name.metadata().unwrap();
        assert!(found.blocks() > 0 && found.mode() & 0o777 == 0o600, "{found:?}");
    }
    // Joined by another process, and by handles whose options have no directory.
    let other = writer_of(&path);
    for options in [beside(&path), default(), reading()] {
        let joined = options.open(&path).unwrap();
        assert!(joined.info().unwrap().processes.len() >= 2);
        if joined.is_writable() {
            create(&joined, b"more", 1).unwrap();
            crate::common::destroy(&pool, b"more").unwrap();
        }
    }
    other.kill();
    drop(pool);
    assert_eq!(names_of_shared_memory(directory.path()), [] as [PathBuf; 0]);
}

/// Opening the pool removes it; without the pool, an administrator does.
#[test]
fn shared_memory_that_no_process_uses_is_listed() {
    let directory = tempfile::tempdir().unwrap();
    let path = created(directory.path());
    let left = || Pool::left_memory(Some(directory.path())).unwrap();
    let writer = writer_of(&path);
    assert_eq!(left(), []);
    writer.kill();
    let [found] = &left()[..] else { panic!("one pool's") };
    assert_eq!(found.files, names_of_shared_memory(directory.path()));
    assert!(found.allocated_bytes > 0 && found.since.is_some(), "{found:?}");
    drop(beside(&path).open(&path).unwrap());
    assert_eq!(left(), []);
}

/// After a restart of the machine the device of a disk may have another number, and shared memory
/// found there is not joined.
#[test]
fn shared_memory_that_an_earlier_start_has_left_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = created(directory.path());
    writer_of(&path).kill();
    let names = names_of_shared_memory(directory.path());
    assert_eq!(names.len(), 2);
    let findings = aquifer_check::check(&path, &CheckOptions::default()).unwrap().findings;
    assert!(findings.iter().any(|finding| finding.kind == FindingKind::SharedMemory));
    // Other files with the same names and bytes: what they look like if all device and inode
    // numbers have changed.
    for name in &names {
        let bytes = std::fs::read(name).unwrap();
        std::fs::remove_file(name).unwrap();
        std::fs::write(name, bytes).unwrap();
    }
    let pool = default().open(&path).unwrap();
    assert_eq!(names_of_shared_memory(directory.path()), [] as [PathBuf; 0]);
    assert_eq!(contents(&pool).unwrap().len(), 1);
    drop(pool);
    // Created, but not named by the superblock yet.
    writer_of(&path).kill();
    for name in names_of_shared_memory(directory.path()) {
        if name.to_str().unwrap().ends_with("-pins") {
            std::fs::remove_file(name).unwrap()
        } else {
            std::fs::rename(&name, format!("{}-new", name.display())).unwrap()
        }
    }
    let pool = beside(&path).open(&path).unwrap();
    assert_eq!(names_of_shared_memory(directory.path()).len(), 2, "its own");
    drop(pool);
    assert_eq!(names_of_shared_memory(directory.path()), [] as [PathBuf; 0]);
}

/// A copy of a pool in use names the same shared memory, and leaves it alone.
#[test]
fn a_copy_leaves_the_shared_memory_of_its_original() {
    let directory = tempfile::tempdir().unwrap();
    let path = created(directory.path());
    let pool = beside(&path).open(&path).unwrap();
    let copy = directory.path().join("copy");
    std::fs::copy(&path, &copy).unwrap();
    for options in [default(), beside(&copy)] {
        drop(options.open(&copy).unwrap());
        assert_eq!(names_of_shared_memory(directory.path()).len(), 2);
        default().open(&path).unwrap();
    }
    drop(pool);
}

fn mount(arguments: &[&str]) -> bool {
    succeeds("mount", arguments)
}

/// Each container has its own /dev/shm, and both have the pool's directory.
fn containers() {
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    let path = created(directory.path());
    let writer = writer_of(&path);
    if !mount(&["--make-rprivate", "/"]) || !mount(&["-t", "tmpfs", "none", "/dev/shm"]) {
        return println!("skipped: no other /dev/shm can be mounted here");
    }
    for options in [default(), beside(&path), reading()] {
        let pool = options.open(&path).unwrap();
        assert!(pool.info().unwrap().processes.contains(&writer.0.id()));
    }
    let pool = default().open(&path).unwrap();
    writer.kill();
    create(&pool, b"second", 1).unwrap();
    drop(pool);
    assert_eq!(contents(&reading().open(&path).unwrap()).unwrap().len(), 2);
    assert_eq!(names_of_shared_memory(directory.path()), [] as [PathBuf; 0]);
}

#[test]
fn containers_share_a_pool_by_its_directory() {
    child::succeeds_with_mounts("containers");
}

fn crowded() {
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    let path = created(directory.path());
    let place = directory.path().join("place");
    std::fs::create_dir(&place).unwrap();
    let place_text = place.to_str().unwrap();
    if !mount(&["--make-rprivate", "/"])
        || !mount(&["-t", "tmpfs", "-o", "size=16k", "none", place_text])
    {
        return println!("skipped: no small tmpfs can be mounted here");
    }
    let options = default().segment_directory(place.clone());
    // Until there is enough, another part of it finds no room.
    let mut size_kib = 16;
    while let Err(refused) = options.open(&path) {
        assert!(matches!(refused, PoolError::SharedMemory(_)), "{refused}");
        assert_eq!(names_of_shared_memory(&place), [] as [PathBuf; 0], "{size_kib} KiB");
        size_kib += 4;
        assert!(mount(&["-o", &format!("remount,size={size_kib}k"), place_text]));
    }
    assert!((32..1024).contains(&size_kib), "{size_kib} KiB suffice");
    drop(default().open(&path).unwrap());
    let absent = default().segment_directory(place.join("absent"));
    assert!(matches!(absent.open(&path), Err(PoolError::SharedMemory(_))));
    assert!(succeeds("umount", &[place_text]));
}

#[test]
fn a_directory_without_room_is_an_error_and_keeps_nothing() {
    child::succeeds_with_mounts("crowded");
}

/// Changes the pool, syncs nothing, and dies.
fn write_and_die() {
    let of = |name: &str| std::env::var_os(name).unwrap();
    let options = default().segment_directory(of("PLACE"));
    let pool = options.open(of("POOL")).unwrap();
    crate::common::write(&pool, of("NAME").as_encoded_bytes(), 2, 3).unwrap();
    // SAFETY: ends this process.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

/// What a dead process left in a directory of its choice counts, and is removed, if the tools get
/// the directory as an option.
#[test]
fn grow_and_repair_find_what_a_dead_process_left_elsewhere() {
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    let path = created(directory.path());
    let place = directory.path().join("place");
    std::fs::create_dir(&place).unwrap();
    let options = default().segment_directory(place.clone());
    let check = CheckOptions { segment_directory: Some(place.clone()), ..CheckOptions::default() };
    let grow = || _ = Pool::grow(&path, 8 << 20, &options, &mut |_, _| {}).unwrap();
    let repair = || drop(aquifer_check::repair(&path, &check).unwrap());
    let tools: [(&[u8], &dyn Fn()); 2] = [(b"grown", &grow), (b"repaired", &repair)];
    for (name, tool) in tools {
        let mut writer = child::command("dying writer");
        writer
            .env("POOL", &path)
            .env("PLACE", &place)
            .env("NAME", std::str::from_utf8(name).unwrap());
        assert!(!writer.status().unwrap().success());
        assert_eq!(names_of_shared_memory(&place).len(), 2);
        assert!(!aquifer_check::check(&path, &check).unwrap().findings.is_empty());
        tool();
        assert_eq!(names_of_shared_memory(&place), [] as [PathBuf; 0]);
        let pool = options.open(&path).unwrap();
        assert!(contents(&pool).unwrap().contains_key(name), "what was not synced is lost");
    }
}

/// Inodes of 128 bytes have no room for a birth time.
fn no_birth_times() {
    let Some(disk) = Disk::new(&["-I", "128"]) else { return };
    let path = created(&disk.mounted());
    let pool = beside(&path).open(&path).unwrap();
    let segment = names_of_shared_memory(&disk.mounted()).remove(0);
    let owned_by = |uid: u32| std::os::unix::fs::chown(&segment, Some(uid), None).unwrap();
    for uid in [12_345, 65_534] {
        owned_by(uid);
        for options in [default(), reading()] {
            match options.open(&path) {
                Err(PoolError::UnknownSegment { uid: found, .. }) => assert_eq!(found, uid),
                opened => panic!("{opened:?}"),
            }
        }
    }
    // The pool's owner can do everything that a writer can.
    std::os::unix::fs::chown(&path, Some(12_345), None).unwrap();
    owned_by(12_345);
    drop(default().open(&path).unwrap());
    owned_by(0);
    drop(default().open(&path).unwrap());
    drop(pool);
}

#[test]
fn without_birth_times_only_known_owners_are_believed() {
    child::succeeds_with_mounts("no birth times");
}

/// The byte of the pool file that every process with the pool open has locked: see `membership`.
const OPENERS: u64 = 1 << 61;

/// Leaves an image on the disk of the shared memory that is older than the pool's media.
fn write_two_states() {
    let path = std::env::var_os("POOL").unwrap();
    let place = PathBuf::from(std::env::var_os("PLACE").unwrap());
    let options = default().segment_directory(place.clone());
    let pool = options.open(path).unwrap();
    crate::common::write(&pool, b"old", 2, 3).unwrap();
    // As the system may do at any time.
    for name in names_of_shared_memory(&place) {
        File::open(name).unwrap().sync_all().unwrap();
    }
    File::open(&place).unwrap().sync_all().unwrap();
    crate::common::remove(&pool, b"old").unwrap();
    crate::common::write(&pool, b"new", 2, 7).unwrap();
    pool.sync().unwrap();
    pool.checkpoint().unwrap();
    // SAFETY: a signal that ends this process.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

/// The disk of the shared memory loses its page cache, the pool's file system does not.
fn lost_image() {
    let Some(disk) = Disk::new(&[]) else { return };
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("pool");
    let options = default().segment_directory(disk.mounted());
    drop(crate::common::small(options.clone()).create(&path, 1 << 20).unwrap());
    let mut writer = child::command("syncing writer");
    writer.env("POOL", &path).env("PLACE", disk.mounted());
    assert!(!writer.status().unwrap().success());
    disk.shut_down();
    assert!(disk.mount());
    assert_eq!(names_of_shared_memory(&disk.mounted()).len(), 2, "the names survive");
    let reader = File::open(&path).unwrap();
    assert!(lock::try_lock(reader.as_fd(), LockRange::byte(OPENERS), LockKind::Shared).unwrap());
    match options.open(&path) {
        Err(PoolError::BusyElsewhere { .. }) => {}
        Err(other) => panic!("{other}"),
        Ok(pool) => panic!("joined, and saw {:?}", contents(&pool)),
    }
    drop(reader);
    let pool = options.open(&path).unwrap();
    assert_eq!(contents(&pool).unwrap(), [(b"new".to_vec(), vec![7, 7])].into());
    drop(pool);
}

#[test]
fn shared_memory_that_has_lost_its_own_page_cache_is_not_joined() {
    child::succeeds_with_mounts("lost image");
}

/// Opens the pool with its shared memory beside it, changes it, and closes it.
fn open_as_told() {
    let path = PathBuf::from(std::env::var_os("POOL").unwrap());
    let pool = beside(&path).open(&path).unwrap();
    create(&pool, b"opened", 1).unwrap();
}

/// A container with its own boot id opens a copy: the shared memory that it finds seems to be from
/// another start of the machine, and is in use.
fn own_boot_id() {
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    let path = created(directory.path());
    let pool = beside(&path).open(&path).unwrap();
    let names = names_of_shared_memory(directory.path());
    let copy = directory.path().join("copy");
    std::fs::copy(&path, &copy).unwrap();
    let boot_id = directory.path().join("boot_id");
    std::fs::write(&boot_id, "11111111-2222-3333-4444-555555555555\n").unwrap();
    let seen = "/proc/sys/kernel/random/boot_id";
    if !mount(&["--make-rprivate", "/"]) || !mount(&["--bind", boot_id.to_str().unwrap(), seen]) {
        return println!("skipped: no boot id of its own can be mounted here");
    }
    let mut opener = child::command("opener elsewhere");
    let output = opener.env("POOL", &copy).output().unwrap();
    assert!(succeeds("umount", &[seen]));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(names_of_shared_memory(directory.path()), names, "in use");
    default().open(&path).unwrap();
    drop(pool);
}

#[test]
fn shared_memory_that_is_in_use_is_not_taken_for_one_of_an_earlier_start() {
    child::succeeds_with_mounts("own boot id");
}

/// Another user sees a new file, computes the name that it will get, and takes it first.
#[test]
fn a_name_that_another_user_has_taken_is_not_needed() {
    use std::io::{BufRead, BufReader, Write};
    let directory = tempfile::tempdir().unwrap();
    let path = created(directory.path());
    let mut opener = child::command("opener elsewhere");
    opener.env("POOL", &path).env("AQUIFER_HOLD_AT", "open-made");
    let mut opener = Reaped(opener.stdin(std::process::Stdio::piped()).spawn().unwrap());
    let mut taken = Vec::new();
    {
        let output = BufReader::with_capacity(1, opener.0.stdout.as_mut().unwrap());
        for line in output.lines() {
            if line.unwrap() != "held" {
                continue;
            }
            if taken.is_empty() {
                for pins in names_of_shared_memory(directory.path()) {
                    if let Some(name) = pins.to_str().unwrap().strip_suffix("-pins") {
                        // Stands for a file of another user in a sticky directory: it cannot be
                        // replaced either, except by root.
                        std::fs::create_dir(name).unwrap();
                        taken.push(PathBuf::from(name));
                    }
                }
                assert_eq!(taken.len(), 1);
            }
            opener.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        }
    }
    let status = opener.0.wait().unwrap();
    let said = std::io::read_to_string(opener.0.stderr.take().unwrap()).unwrap();
    assert!(status.success(), "{said}");
    assert_eq!(names_of_shared_memory(directory.path()), taken, "what is not the pool's stays");
}

/// If the shared memory of a killed process leaves no space for another one, it is removed.
fn little_room() {
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    let path = created(directory.path());
    let pool = beside(&path).open(&path).unwrap();
    let bytes: u64 = names_of_shared_memory(directory.path())
        .iter()
        .map(|name| name.metadata().unwrap().blocks() * 512)
        .sum();
    drop(pool);
    let place = directory.path().join("place");
    std::fs::create_dir(&place).unwrap();
    let place_text = place.to_str().unwrap();
    let size = format!("size={}", bytes * 3 / 2);
    if !mount(&["--make-rprivate", "/"])
        || !mount(&["-t", "tmpfs", "-o", &size, "none", place_text])
    {
        return println!("skipped: no small tmpfs can be mounted here");
    }
    let mut writer = child::command("syncing writer");
    writer.env("POOL", &path).env("PLACE", &place);
    assert!(!writer.status().unwrap().success());
    let left = names_of_shared_memory(&place);
    assert_eq!(left.len(), 2);
    let options = default().segment_directory(place.clone());
    let pool = options.open(&path).unwrap();
    assert_eq!(contents(&pool).unwrap()[b"new".as_slice()], [7, 7]);
    assert_ne!(names_of_shared_memory(&place), left);
    drop(pool);
    assert_eq!(names_of_shared_memory(&place), [] as [PathBuf; 0]);
    assert!(succeeds("umount", &[place_text]));
}

#[test]
fn shared_memory_of_dead_processes_makes_way_where_there_is_little_room() {
    child::succeeds_with_mounts("little room");
}
