//! Many handles of one pool: the memory that they share grows with what is used.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use aquifer_pool::media::PersistenceDomain;
use aquifer_pool::{Pool, PoolError, PoolOptions};
use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_testkit::child;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("crowd", crowd), ("killed", killed)];

fn shared() -> PoolOptions {
    Pool::options().background(false).domain(PersistenceDomain::PageCache)
}

/// The bytes that a pool's segment and its pins take in memory.
fn shared_bytes(pool: &Path) -> [u64; 2] {
    let superblock = &std::fs::read(pool).unwrap()[..512];
    let id = superblock[96..112].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    ["", "-pins"].map(|end| {
        let path = Path::new("/dev/shm").join(format!("aquifer-{id}{end}"));
        std::fs::metadata(path).unwrap().blocks() * 512
    })
}

/// More handles than a process may usually have files.
const HANDLES: usize = 600;

fn crowd() {
    // SAFETY: zeros are a value of the structure, and the calls only read and write it.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = limit.rlim_max;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        if limit.rlim_max < 20 * HANDLES as u64 {
            return println!("skipped: at most {} files", limit.rlim_max);
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pool");
    let first = shared().create(&path, 16 << 20).unwrap();
    let [segment, pins] = shared_bytes(&path);
    assert!(segment < 2 << 20, "{segment} bytes of a new segment");
    assert!(pins <= 4096, "{pins} bytes for pins that were never set");

    let open = || shared().open(&path).unwrap();
    let mut others: Vec<Pool> = (1..HANDLES).map(|_| open()).collect();
    let pinned: Vec<_> = others.iter().map(|pool| pool.pin(5, 1).unwrap()).collect();
    let info = first.info().unwrap();
    assert_eq!((info.processes.len(), info.pins), (HANDLES, pinned.len() as u64));
    let [all_segment, all_pins] = shared_bytes(&path);
    let pages = HANDLES as u64 * 4096;
    let most = segment + pages + pages / 8;
    assert!(all_segment <= most, "{all_segment} bytes after {segment}");
    assert!(all_pins <= pins + pages + (16 << 10), "{all_pins} bytes for pins");
    drop(pinned);

    // What half of them had is taken again.
    others.truncate(HANDLES / 2);
    assert_eq!(first.info().unwrap().processes.len(), HANDLES / 2 + 1);
    others.extend((HANDLES / 2 + 1..HANDLES).map(|_| open()));
    let _pinned: Vec<_> = others.iter().map(|pool| pool.pin(5, 1).unwrap()).collect();
    assert_eq!(shared_bytes(&path), [all_segment, all_pins]);
}

#[test]
fn memory_grows_with_the_handles() {
    child::succeeds("crowd");
}

/// All places but the first are taken, by an open file description that holds their locks.
#[test]
fn more_processes_than_there_are_places_for_are_an_error() {
    const PROCESSES: u64 = 4096;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pool");
    let first = shared().create(&path, 4 << 20).unwrap();
    let others = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    // As in docs/format.md.
    let range = LockRange { offset_bytes: (1 << 61) + (1 << 12) + 1, len_bytes: PROCESSES - 1 };
    assert!(lock::try_lock(others.as_fd(), range, LockKind::Exclusive).unwrap());
    let refused = shared().open(&path).map(drop);
    let Err(PoolError::TooManyProcesses { limit }) = refused else { panic!("{refused:?}") };
    assert_eq!(limit as u64, PROCESSES);
    drop(others);
    assert_eq!(shared().open(&path).unwrap().info().unwrap().processes.len(), 2);
    first.sync().unwrap();
}

/// Sets a pin and waits for its death.
fn killed() {
    let pool = shared().open(PathBuf::from(std::env::var("POOL").unwrap())).unwrap();
    let _pin = pool.pin(5, 1).unwrap();
    println!("pinned");
    std::io::stdout().flush().unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn what_killed_processes_had_is_taken_again() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pool");
    let pool = shared().create(&path, 4 << 20).unwrap();
    let mut taken = Vec::new();
    for _ in 0..6 {
        let mut child =
            child::command("killed").env("POOL", &path).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "pinned"));
        assert_eq!(pool.info().unwrap().pins, 1);
        child.kill().unwrap();
        child.wait().unwrap();
        taken.push(shared_bytes(&path));
        let info = pool.info().unwrap();
        assert_eq!((info.processes.len(), info.pins), (1, 0));
    }
    assert!(taken.iter().all(|bytes| *bytes == taken[0]), "{taken:?}");
}
