//! The image in shared memory: it takes memory only for the slots that are used, and memory that
//! cannot be allocated is an error.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::support::*;
use aquifer_crashkit::unguarded::UnguardedPool;
use aquifer_pool::format::inode::Inode;
use aquifer_pool::{Pool, PoolError};
use aquifer_testkit::child;

const SLOTS: u64 = 131_072;
const MIB: u64 = 1 << 20;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("crowded image", crowded)];

/// A pool with very many slots, in a sparse file.
fn large_pool(directory: &Path) -> Pool {
    let path = directory.join("pool");
    std::fs::File::create(&path).unwrap().set_len(160 * MIB).unwrap();
    let options = shared().inodes(SLOTS - 1).log_bytes(8 * MIB);
    options.create_on(FileMedia::open(&path)).unwrap()
}

fn segment(pool: &Pool) -> PathBuf {
    let superblock = &std::fs::read(pool.media().path()).unwrap()[..512];
    let id = superblock[96..112].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    Path::new("/dev/shm").join(format!("aquifer-{id}"))
}

fn allocated_bytes(segment: &Path) -> u64 {
    std::fs::metadata(segment).unwrap().blocks() * 512
}

/// Uses all slots from `from` to `to`, in several transactions.
fn use_slots(pool: &Pool, from: u64, to: u64) -> aquifer_pool::Result<()> {
    (from..to).step_by(100).try_for_each(|number| {
        pool.change_unguarded(vec![], |transaction| {
            transaction.put(Inode::free(number, number + 1));
            Ok(())
        })
    })
}

#[test]
fn slots_take_memory_when_they_are_used() {
    let directory = scratch();
    let pool = large_pool(directory.path());
    let segment = segment(&pool);
    let other = shared().open_on(FileMedia::open(&directory.path().join("pool"))).unwrap();
    let reader = reading().open_on(FileMedia::open(&directory.path().join("pool"))).unwrap();
    let before = allocated_bytes(&segment);
    assert!(before < 8 * MIB, "{before}");
    for pool in [&pool, &other, &reader] {
        assert_eq!(pool.inode(SLOTS - 1).unwrap().generation, 0);
        assert!(pool.file_state(SLOTS - 1).is_none() && pool.file_state(u64::MAX).is_none());
    }
    assert_eq!(allocated_bytes(&segment), before, "who only looks takes none");
    use_slots(&pool, 2, 10_000).unwrap();
    use_slots(&other, 10_002, 20_000).unwrap();
    let after = allocated_bytes(&segment);
    assert!((before + 8 * MIB..before + 12 * MIB).contains(&after), "{after}");
    for pool in [&pool, &other, &reader] {
        assert_eq!(pool.inode(9902).unwrap().generation, 9903);
        assert_eq!(pool.inode(19_902).unwrap().generation, 19_903);
        assert_eq!(pool.room().unwrap().free_slots, SLOTS - 2);
    }
    drop((pool, other, reader));
    let again = shared().open_on(FileMedia::open(&directory.path().join("pool"))).unwrap();
    assert_eq!(again.inode(19_902).unwrap().generation, 19_903);
}

fn crowded() {
    const SMALL: &std::ffi::CStr = c"size=24m";
    let (none, shm) = (c"none".as_ptr(), c"/dev/shm".as_ptr());
    // SAFETY: NUL-terminated strings that outlive the call; the mount namespace is private to this
    // child.
    let mounted = unsafe { libc::mount(none, shm, c"tmpfs".as_ptr(), 0, SMALL.as_ptr().cast()) };
    if mounted != 0 {
        println!("skipped: nothing can be mounted here: {}", std::io::Error::last_os_error());
        return;
    }
    let directory = tempfile::tempdir_in(std::env::temp_dir()).unwrap();
    let pool = large_pool(directory.path());
    // Another file takes all the rest.
    let rest = std::fs::write("/dev/shm/rest", vec![1; 24 * MIB as usize]);
    assert_eq!(rest.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    let refused = use_slots(&pool, 2, 10_000).unwrap_err();
    assert!(matches!(refused, PoolError::SharedMemory(_)), "{refused}");
    assert!(refused.to_string().contains("/dev/shm"), "{refused}");
    // So is what needs memory for another process, or for pins.
    let path = directory.path().join("pool");
    let joined = || shared().open_on(FileMedia::open(&path));
    assert!(matches!(joined().unwrap_err(), PoolError::SharedMemory(_)));
    assert!(matches!(pool.pin(2, 1).unwrap_err(), PoolError::SharedMemory(_)));
    // What needs no more memory continues, and everything does when there is room again.
    use_slots(&pool, 2, 1000).unwrap();
    pool.checkpoint().unwrap();
    let reader = reading().open_on(FileMedia::open(&path)).unwrap();
    assert_eq!(reader.inode(902).unwrap().generation, 903);
    std::fs::remove_file("/dev/shm/rest").unwrap();
    drop((pool.pin(2, 1).unwrap(), joined().unwrap()));
    use_slots(&pool, 2, 10_000).unwrap();
    assert_eq!(pool.inode(9902).unwrap().generation, 9903);
    drop((reader, pool));
    // Pages that are on media only need memory when they are changed.
    let pool = joined().unwrap();
    let first = allocated_bytes(&segment(&pool));
    assert_eq!(pool.inode(9902).unwrap().generation, 9903);
    let rest = std::fs::write("/dev/shm/rest", vec![1; 24 * MIB as usize]);
    assert_eq!(rest.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    let reader = reading().open_on(FileMedia::open(&path)).unwrap();
    for pool in [&pool, &reader] {
        assert_eq!(pool.inode(5002).unwrap().generation, 5003);
    }
    let refused = use_slots(&pool, 5002, 5003).unwrap_err();
    assert!(matches!(refused, PoolError::SharedMemory(_)), "{refused}");
    assert_eq!(allocated_bytes(&segment(&pool)), first);
    std::fs::remove_file("/dev/shm/rest").unwrap();
    use_slots(&pool, 2, 10_000).unwrap();
    assert_eq!(reader.inode(9902).unwrap().generation, 9903);
}

#[test]
fn memory_that_cannot_be_had_is_an_error() {
    child::succeeds_with_mounts("crowded image");
}
