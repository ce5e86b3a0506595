//! What a process that may only read a pool can do to it: nothing to the media and the metadata, and to the pins no more than
//! keep pages from being used again.

mod common;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use aquifer_pool::check::{CheckOptions, check};
use aquifer_pool::{InodeUse, OpenOptions, Pool, PoolError};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::child;
use aquifer_testkit::rng::Rng;
use aquifer_testkit::unguarded::{UnguardedMedia, UnguardedPool};
use common::{Scene, contents, create, destroy};

/// What a child does. Not a test by itself.
#[test]
fn child() {
    child::play(&[
        ("stray of a reader", stray_of_a_reader),
        ("stray into the segment", stray_into_the_segment),
        ("a reader tries", a_reader_tries),
    ]);
}

fn reading() -> OpenOptions {
    OpenOptions { read_only: true, ..OpenOptions::default() }
}

fn scene_in(directory: tempfile::TempDir) -> Scene {
    let scene = Scene::new(directory);
    let options = common::small();
    let pool = Pool::create(&scene.path, 4 << 20, &options, &OpenOptions::default()).unwrap();
    create(&pool, b"first", 2).unwrap();
    scene
}

/// On a disk, and in memory where that can be had.
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

/// Every shared mapping of this process whose path ends so: start, length, whether it can be stored to.
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

/// The end of the name of the shared memory of a pool that is open: what its superblock says.
fn segment_of(pool: &Path) -> String {
    let bytes = std::fs::read(pool).unwrap();
    bytes[96..112].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn reader() -> (PathBuf, Pool) {
    let path = pool_of_parent();
    let pool = Pool::open(&path, &reading()).unwrap();
    // Where nothing is mapped before it is read.
    pool.load(0, &mut [0; 8]).unwrap();
    (path, pool)
}

fn store(address: usize) {
    // SAFETY: mapped; whether that is allowed is what is asked.
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

/// Everything that a process can do with the descriptors and mappings it has.
fn a_reader_tries() {
    let (path, pool) = reader();
    let segment = segment_of(&path);
    let of_pool = mappings(path.to_str().unwrap());
    let of_segment = mappings(&segment);
    assert!(!of_pool.is_empty() && !of_segment.is_empty());
    for (start, len_bytes, is_writable) in of_pool.into_iter().chain(of_segment) {
        assert!(!is_writable);
        // SAFETY: asks for more than is allowed, and nothing is stored.
        let made = unsafe {
            libc::mprotect(start as *mut _, len_bytes, libc::PROT_READ | libc::PROT_WRITE)
        };
        assert_eq!((made, aquifer_sys::errno()), (-1, libc::EACCES));
        // The kernel stores no more than the process may.
        let (reading, writing) = std::io::pipe().unwrap();
        std::io::Write::write_all(&mut &writing, b"stray").unwrap();
        use std::os::fd::AsRawFd;
        // SAFETY: the memory may not be stored to, and so is not.
        let put = unsafe { libc::read(reading.as_raw_fd(), start as *mut _, 5) };
        assert_eq!((put, aquifer_sys::errno()), (-1, libc::EFAULT));
    }
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        let target = target.to_string_lossy().into_owned();
        if target != path.to_string_lossy() && !target.ends_with(&segment) {
            continue;
        }
        let number: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
        // SAFETY: an open descriptor of this process.
        let file = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
        let refused = aquifer_sys::io::write_all_at(file.as_fd(), b"stray", 0).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBADF), "{target}");
        // SAFETY: as above.
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
        // Shared memory that readers share: a writer is there.
        let pool = Pool::open(&scene.path, &OpenOptions::default()).unwrap();
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

/// Stores anything anywhere into the pins, as any reader could: numbers that mean something there more often than not.
fn scribble(pins: &Path, rng: &mut Rng) {
    use std::os::unix::fs::FileExt;
    // Behind magic and uuid, without which newcomers are refused: of those who are there is this about.
    const FIRST_OWNER: u64 = 3;
    const FIRST_BLOCK: u64 = 20480 / 8;
    let file = std::fs::File::options().write(true).open(pins).unwrap();
    let words = file.metadata().unwrap().len() / 8;
    for _ in 0..rng.below(400) {
        let word = match rng.below(4) {
            0 => FIRST_OWNER + rng.below(8),
            1 => FIRST_OWNER + rng.below(words - FIRST_OWNER),
            _ => FIRST_BLOCK + rng.below(512),
        };
        let value = match rng.below(4) {
            0 => rng.below(600),
            1 => rng.next_u64(),
            _ => rng.below(20) << 32 | [0, 1, 2, u64::from(u32::MAX)][rng.below(4) as usize],
        };
        file.write_all_at(&value.to_le_bytes(), word * 8).unwrap();
    }
}

/// Scribbling in the pins costs at most that freed pages are not used again: what is written is as it should be, and what was
/// kept is free when the scribbler is gone.
#[test]
fn scribbling_in_the_pins_only_delays_that_pages_are_used_again() {
    let scene = scene_in(tempfile::tempdir().unwrap());
    let mut rng = Rng::new(seed(21));
    let options = OpenOptions { background: false, ..OpenOptions::default() };
    let pool = Pool::open(&scene.path, &options).unwrap();
    let free_before = pool.info().unwrap().free_pages;
    // Words count only where their owner lives.
    let reader = Pool::open(&scene.path, &reading()).unwrap();
    let pin = reader.pin_inode(1, InodeUse::Open).unwrap();
    let pins = Path::new("/dev/shm").join(format!("aquifer-{}-pins", segment_of(&scene.path)));
    let mut expected = contents(&pool).unwrap();
    let mut kept_pages = 0;
    for round in 0..steps(60) as u64 {
        scribble(&pins, &mut rng);
        let name = format!("object-{}", rng.below(5)).into_bytes();
        match expected.remove(&name) {
            Some(_) => destroy(&pool, &name).unwrap(),
            None => match create(&pool, &name, 1 + rng.below(3)) {
                Ok(()) => {
                    drop(expected.insert(name.clone(), contents(&pool).unwrap()[&name].clone()))
                }
                // In a long run all may be kept.
                Err(PoolError::Full { .. }) => break,
                Err(error) => panic!("round {round}: {error}"),
            },
        }
        pool.checkpoint().unwrap();
        kept_pages = kept_pages.max(pool.info().unwrap().held_pages);
        assert_eq!(contents(&pool).unwrap(), expected, "round {round}");
    }
    drop((pin, reader));
    for name in expected.keys().filter(|name| *name != b"first") {
        destroy(&pool, name).unwrap();
    }
    drop(pool);
    assert!(kept_pages > 0, "nothing that was scribbled kept a page: this has shown nothing");
    println!("at most {kept_pages} pages were kept by what was scribbled");
    assert!(check(&scene.path, &CheckOptions::default()).unwrap().is_sound());
    let pool = Pool::open(&scene.path, &options).unwrap();
    assert_eq!(pool.info().unwrap().free_pages, free_before);
}
