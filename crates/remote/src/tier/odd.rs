//! Odd objects, odd files in the directory, and odd moments.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;
use std::time::Duration;

use aquifer_sys::lock::{LockKind, LockRange, try_lock, unlock};
use zerocopy::IntoBytes;

use super::crash::{Object, terms};
use super::layout::{BLOCK_BYTES, COLD, Geometry, Header};
use super::object::ObjectFile;
use super::{OpenTier, Terms, Tier, TierError};
use crate::body::Body;
use crate::buffers::Buffers;

fn one() -> Object {
    Object::new("s3://bucket/one", "\"1\"", 300_001, 1)
}

fn path_of(tier: &Tier, object: &Object) -> std::path::PathBuf {
    tier.path().join(object.name())
}

fn writable(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn all(object: &Object, open: &OpenTier) -> usize {
    object.obtain(open, 0..object.bytes.len()).unwrap()
}

/// A tier in a directory that ends with the result.
fn scratch() -> (tempfile::TempDir, Tier) {
    let directory = tempfile::tempdir().unwrap();
    let tier = Tier::open(directory.path().join("tier")).unwrap();
    tier.set_budget_bytes(10 << 20).unwrap();
    (directory, tier)
}

async fn zeros(range: std::ops::Range<u64>) -> Result<Body, ()> {
    Ok(Body::of(vec![0; (range.end - range.start) as usize]))
}

fn run<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(work)
}

/// No work is proportional to the length of an object, only to what is there of it.
#[test]
fn huge_objects_cost_what_is_there_of_them() {
    const LEN: u64 = 8 << 40;
    let (_directory, tier) = scratch();
    let open = OpenTier::open(&tier, "s3://bucket/huge", "\"1\"", LEN);
    let open = match open {
        Err(error) if error.to_string().contains("large") => {
            println!("skipped: no such long files here: {error}");
            return;
        }
        open => open.unwrap(),
    };
    // Not zeros, which a hole has as well.
    let ones = async |range: std::ops::Range<u64>| {
        Ok::<_, ()>(Body::of(vec![1; (range.end - range.start) as usize]))
    };
    run(open.obtain(LEN - 9000..LEN, &terms(), &Buffers::new(1 << 20), ones)).unwrap();
    drop(open);
    let open = OpenTier::open(&tier, "s3://bucket/huge", "\"1\"", LEN).unwrap();
    assert!(open.read(LEN - 9000, &mut [1; 9000]));
    let info = tier.info().unwrap();
    assert_eq!(info.objects[0].present_bytes, 12 << 10);
    assert_eq!(tier.verify(|_, _| {}).unwrap().right_bytes, 12 << 10);
    tier.drop_objects(|_| true).unwrap();
    let info = tier.info().unwrap();
    assert_eq!(info.objects[0].present_bytes, 0);
    assert!(info.used_bytes <= 64 << 10, "{info:?}");
    // Its proofs are known still.
    assert!(open.has(LEN - 9000..LEN));
    assert!(!open.read(LEN - 9000, &mut [1; 9000]));
    assert!(!open.has(LEN - 9000..LEN));
    tier.set_budget_bytes(0).unwrap();
    drop(open);
    tier.set_budget_bytes(0).unwrap();
    assert_eq!(tier.info().unwrap().used_bytes, 0);
}

#[test]
fn objects_that_no_file_can_hold_are_refused() {
    let (_directory, tier) = scratch();
    for len_bytes in [Geometry::LONGEST_BYTES + 1, u64::MAX / 2, u64::MAX] {
        let opened = OpenTier::open(&tier, "s3://bucket/endless", "\"1\"", len_bytes);
        let Err(TierError::System { source, .. }) = opened else { panic!("{len_bytes}") };
        assert_eq!(source.kind(), io::ErrorKind::FileTooLarge);
    }
    assert!(tier.info().unwrap().objects.is_empty());
}

#[test]
fn an_empty_object_is_an_object() {
    let (_directory, tier) = scratch();
    let object = Object { url: "s3://bucket/empty", etag: "\"1\"", bytes: vec![] };
    let open = object.open(&tier).unwrap();
    assert_eq!(all(&object, &open), 0);
    assert!(open.read(0, &mut []));
    assert!(!open.read(0, &mut [0]));
    assert_eq!(tier.verify(|_, _| {}).unwrap().right_bytes, 0);
    assert_eq!(tier.info().unwrap().objects[0].len_bytes, 0);
    drop(open);
    tier.set_budget_bytes(0).unwrap();
    assert!(tier.info().unwrap().objects.is_empty());
}

/// Of another object, version or length, with a matching checksum: not what a crash leaves.
#[test]
fn a_header_that_lies_is_refused_and_left_as_it_is() {
    let (_directory, tier) = scratch();
    let object = one();
    let lies = [
        Header::new("s3://bucket/other", "\"1\"", 300_001),
        Header::new(object.url, "\"2\"", 300_001),
        Header::lying(object.url, object.etag, object.len(), 10),
        Header::lying(object.url, object.etag, object.len(), 1 << 50),
    ];
    for lie in lies {
        drop(object.open(&tier).unwrap());
        let file = writable(&path_of(&tier, &object));
        file.write_all_at(lie.as_bytes(), 0).unwrap();
        tier.info().unwrap();
        tier.verify(|_, _| {}).unwrap();
        let opened = OpenTier::open(&tier, object.url, object.etag, object.len());
        let Err(TierError::Damaged { reason, .. }) = opened else { panic!("opened") };
        assert!(reason.contains("another file"), "{reason}");
        let mut header = [0; 4096];
        file.read_exact_at(&mut header, 0).unwrap();
        assert_eq!(header, lie.as_bytes());
        std::fs::remove_file(path_of(&tier, &object)).unwrap();
        all(&object, &object.open(&tier).unwrap());
        assert_eq!(all(&object, &object.open(&tier).unwrap()), 0);
        std::fs::remove_file(path_of(&tier, &object)).unwrap();
    }
}

/// A length that no layout has: of a header that is no whole one.
#[test]
fn a_header_that_no_program_writes_is_written_again() {
    let (_directory, tier) = scratch();
    let object = one();
    drop(object.open(&tier).unwrap());
    let lie = Header::lying(object.url, object.etag, object.len(), u64::MAX);
    writable(&path_of(&tier, &object)).write_all_at(lie.as_bytes(), 0).unwrap();
    all(&object, &object.open(&tier).unwrap());
    assert_eq!(all(&object, &object.open(&tier).unwrap()), 0);
}

/// With states, proofs and data at the ends of what a header with a matching checksum may claim.
#[test]
fn a_hostile_file_is_evicted() {
    let (_directory, tier) = scratch();
    let object = one();
    for len_bytes in [0, 1, 1 << 30, 1 << 50] {
        drop(object.open(&tier).unwrap());
        let file = writable(&path_of(&tier, &object));
        let lie = Header::lying(object.url, object.etag, object.len(), len_bytes);
        file.write_all_at(lie.as_bytes(), 0).unwrap();
        file.write_all_at(&[255; 20_000], 4096).unwrap();
        // Of its last block, which may be where no file has bytes.
        let last = (len_bytes / BLOCK_BYTES).saturating_sub(1);
        file.write_all_at(&[COLD], Geometry::STATES_AT + last).unwrap();
        tier.info().unwrap();
        tier.verify(|_, _| {}).unwrap();
        tier.set_budget_bytes(0).unwrap();
        assert_eq!(tier.info().unwrap().used_bytes, 0, "{len_bytes}");
    }
}

#[test]
fn a_damaged_header_separates_no_openers() {
    let (_directory, tier) = scratch();
    let object = one();
    let first = object.open(&tier).unwrap();
    writable(&path_of(&tier, &object)).write_all_at(&[9; 4096], 0).unwrap();
    let second = object.open(&tier).unwrap();
    all(&object, &first);
    drop(first);
    assert_eq!(all(&object, &second), 0);
    assert_eq!(tier.info().unwrap().objects.len(), 1);
}

/// An evictor must not take the name from an opener, which would then fill a file that no budget counts.
#[test]
fn a_damaged_file_is_removed_only_when_it_is_not_open() {
    let (_directory, tier) = scratch();
    let object = one();
    let open = object.open(&tier).unwrap();
    writable(&path_of(&tier, &object)).write_all_at(&[9; 4096], 0).unwrap();
    tier.set_budget_bytes(0).unwrap();
    assert!(path_of(&tier, &object).exists());
    drop(open);
    tier.set_budget_bytes(0).unwrap();
    assert!(!path_of(&tier, &object).exists());
}

#[test]
fn a_directory_removed_while_in_use_is_a_problem_and_no_more() {
    let (_directory, tier) = scratch();
    let object = one();
    let open = object.open(&tier).unwrap();
    object.obtain(&open, 0..100_000).unwrap();
    drop(open);
    let open = object.open(&tier).unwrap();
    std::fs::remove_dir_all(tier.path()).unwrap();
    assert!(all(&object, &open) > 0);
    let again = Tier::open(tier.path()).unwrap();
    let fresh = object.open(&again).unwrap();
    assert_eq!(all(&object, &fresh), object.bytes.len());
    // Written behind the obtaining.
    while open.problem().is_none() {
        std::thread::yield_now();
    }
    assert!(open.problem().unwrap().to_string().contains("removed while in use"));
    assert!(all(&object, &open) > 0, "not written");
    drop(fresh);
    assert_eq!(all(&object, &object.open(&again).unwrap()), 0);
}

#[test]
fn a_damaged_control_file_is_made_anew_in_use() {
    let (_directory, tier) = scratch();
    let object = one();
    let open = object.open(&tier).unwrap();
    let control = writable(&tier.path().join("control"));
    let default = tier.info().unwrap().budget_bytes;
    // Budget and use, without the checksum; then nothing.
    control.write_all_at(&[1; 16], 16).unwrap();
    object.obtain(&open, 0..100_000).unwrap();
    drop(open);
    let budget = tier.info().unwrap().budget_bytes;
    assert_ne!(budget, u64::from_ne_bytes([1; 8]));
    assert!(budget > default, "a part of the disk");
    control.set_len(0).unwrap();
    let open = object.open(&tier).unwrap();
    object.obtain(&open, 0..200_000).unwrap();
    drop(open);
    assert!(tier.info().unwrap().budget_bytes > default);
    let open = object.open(&tier).unwrap();
    assert_eq!(object.obtain(&open, 0..200_000).unwrap(), 0);
}

#[test]
fn what_is_no_file_of_a_tier_is_left_alone() {
    let (_directory, tier) = scratch();
    let object = one();
    let strange = tier.path().join(format!("{}.object", "0".repeat(32)));
    std::fs::DirBuilder::new().mode(0o700).create(&strange).unwrap();
    std::fs::write(tier.path().join("notes.txt"), "mine").unwrap();
    let path = tier.path().to_owned();
    drop(tier);
    let tier = Tier::open(path).unwrap();
    all(&object, &object.open(&tier).unwrap());
    tier.verify(|_, _| {}).unwrap();
    tier.set_budget_bytes(0).unwrap();
    assert!(strange.is_dir() && tier.path().join("notes.txt").is_file());
    assert!(!path_of(&tier, &object).exists());
}

/// Their headers, states and proofs take more than their bytes.
#[test]
fn many_small_objects_keep_the_budget() {
    const BUDGET: u64 = 400 << 10;
    let (_directory, tier) = scratch();
    tier.set_budget_bytes(BUDGET).unwrap();
    for number in 0..150 {
        let etag = format!("\"{number}\"").leak();
        let object = Object::new("s3://bucket/small", etag, 100, number);
        let open = object.open(&tier).unwrap();
        assert_eq!(all(&object, &open), 100);
        drop(open);
        let used = tier.info().unwrap().used_bytes;
        assert!(used <= BUDGET + (32 << 10), "{used} with {number}");
    }
    assert!(tier.info().unwrap().used_bytes > BUDGET / 2);
}

#[test]
fn verification_is_no_use() {
    let (_directory, tier) = scratch();
    let object = one();
    let open = object.open(&tier).unwrap();
    all(&object, &open);
    drop(open);
    let key = super::layout::Key::of(object.url, object.etag, object.len());
    let file = ObjectFile::existing(&tier.directory, key).unwrap().unwrap();
    let blocks = object.len().div_ceil(BLOCK_BYTES);
    (0..blocks).for_each(|block| file.cool(block).unwrap());
    tier.verify(|_, _| {}).unwrap();
    let mut states = [0; 9];
    assert_eq!(file.states(0, &mut states).unwrap(), 0..blocks);
    assert_eq!(states[..blocks as usize], [COLD; 5]);
}

/// A process that is stopped while it evicts stops no reads of others.
#[test]
fn reads_go_on_while_nothing_can_be_written() {
    const LEN: u64 = 16 << 20;
    const PIECE: u64 = 1 << 20;
    let (_directory, tier) = scratch();
    let open = OpenTier::open(&tier, "s3://bucket/one", "\"1\"", LEN).unwrap();
    let control = writable(&tier.path().join("control"));
    assert!(try_lock(control.as_fd(), LockRange::byte(0), LockKind::Exclusive).unwrap());
    let buffers = Buffers::new(8 << 20);
    // As a request does.
    let fetch = async |range: std::ops::Range<u64>| {
        let _memory = buffers.take(range.end - range.start).await;
        zeros(range).await
    };
    run(async {
        let terms = Terms { room_patience: Duration::ZERO, ..terms() };
        let mut kept = vec![];
        for piece in 0..12 {
            let range = piece * PIECE..(piece + 1) * PIECE;
            let obtained = open.obtain(range, &terms, &buffers, fetch).await.unwrap();
            kept.push(obtained.is_kept);
        }
        // Two fit into the memory for what waits.
        assert!(kept[..2] == [true; 2] && kept[2..] == [false; 10], "{kept:?}");
        // What does not wait to be written is not leased.
        let again = open.obtain(5 * PIECE..6 * PIECE, &terms, &buffers, fetch).await;
        assert!(!again.unwrap().is_kept);
        // A disk that was late is waited for by none, until it has written.
        let patient = Terms { room_patience: Duration::from_secs(3600), ..terms };
        let again = open.obtain(5 * PIECE..6 * PIECE, &patient, &buffers, fetch);
        let again = tokio::time::timeout(Duration::from_secs(60), again).await;
        assert!(!again.expect("not waited for").unwrap().is_kept);
    });
    assert!(open.problem().is_none(), "none of it waited for the lock");
    // So that it is not written in the end.
    std::fs::remove_dir_all(tier.path()).unwrap();
    unlock(control.as_fd(), LockRange::WHOLE).unwrap();
}

/// With what is there between them, if a request for each would cost more.
#[test]
fn missing_runs_that_are_near_are_one_request() {
    const SUB_BLOCK: u64 = 4096;
    let (_directory, tier) = scratch();
    let object = Object::new("s3://bucket/one", "\"1\"", 100 * 4096 + 5, 1);
    let len = object.len();
    for (gap_bytes, wanted) in [
        (0, vec![0..10, 11..20, 23..100]),
        (SUB_BLOCK, vec![0..20, 23..100]),
        (3 * SUB_BLOCK, std::iter::once(0..100).collect()),
    ] {
        tier.drop_objects(|_| true).unwrap();
        let open = object.open(&tier).unwrap();
        for there in [10..11, 20..23] {
            object.obtain(&open, there.start * 4096..there.end * 4096).unwrap();
        }
        open.flush();
        let asked = std::sync::Mutex::new(vec![]);
        let fetch = async |range: std::ops::Range<u64>| {
            asked.lock().unwrap().push(range.clone());
            let bytes = &object.bytes[range.start as usize..range.end as usize];
            Ok::<_, ()>(Body::of(bytes.to_vec()))
        };
        let tally = std::sync::Arc::<super::Tally>::default();
        let terms = Terms { gap_bytes, tally: Some(tally.clone()), ..terms() };
        let buffers = Buffers::new(64 << 20);
        let obtained = run(open.obtain(0..len, &terms, &buffers, fetch)).unwrap();
        let mut got = vec![];
        obtained.body.parts(0, len as usize).for_each(|(_, part)| got.extend_from_slice(part));
        assert!(got == object.bytes && obtained.is_kept);
        let wanted: Vec<_> =
            wanted.into_iter().map(|run| run.start * SUB_BLOCK..(run.end * SUB_BLOCK)).collect();
        let mut asked = asked.into_inner().unwrap();
        assert_eq!(asked.last().unwrap().end, len, "with the rest at the end");
        asked.last_mut().unwrap().end = 100 * SUB_BLOCK;
        assert_eq!(asked, wanted);
        open.flush();
        let count = |counter: &std::sync::atomic::AtomicU64| {
            counter.load(std::sync::atomic::Ordering::Relaxed)
        };
        assert_eq!(count(&tally.missing_bytes), len - 4 * SUB_BLOCK);
        assert_eq!(count(&tally.stored_bytes), len - 4 * SUB_BLOCK, "not the gaps");
        drop(open);
        assert_eq!(all(&object, &object.open(&tier).unwrap()), 0);
        assert_eq!(tier.verify(|_, _| {}).unwrap().right_bytes, len);
    }
}

/// A process that is stopped with a lock: the others go on without the tier, and say so.
#[test]
fn no_lock_is_waited_for_without_end() {
    let is_busy = |error: &TierError| matches!(error, TierError::Busy { .. });
    let (_directory, tier) = scratch();
    let object = one();
    let open = object.open(&tier).unwrap();
    let control = writable(&tier.path().join("control"));
    assert!(try_lock(control.as_fd(), LockRange::byte(0), LockKind::Exclusive).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            all(&object, &open);
            open.flush();
            assert!(open.problem().is_some_and(is_busy), "{:?}", open.problem());
            all(&object, &open);
            drop(open);
        });
        scope.spawn(|| assert!(is_busy(&tier.set_budget_bytes(9 << 20).unwrap_err())));
        // Of another tier: its only opener is stopped while it counts.
        scope.spawn(|| {
            let (_directory, tier) = scratch();
            let path = tier.path().to_owned();
            drop(tier);
            let control = writable(&path.join("control"));
            assert!(try_lock(control.as_fd(), LockRange::byte(1), LockKind::Exclusive).unwrap());
            assert!(is_busy(&Tier::open(&path).unwrap_err()));
            unlock(control.as_fd(), LockRange::WHOLE).unwrap();
            Tier::open(&path).unwrap();
        });
        // Stopped while it removes a file: that one is left out.
        scope.spawn(|| {
            let (_directory, tier) = scratch();
            drop(object.open(&tier).unwrap());
            let file = writable(&path_of(&tier, &object));
            assert!(try_lock(file.as_fd(), LockRange::byte(0), LockKind::Exclusive).unwrap());
            assert!(tier.info().unwrap().objects.is_empty());
            tier.set_budget_bytes(0).unwrap();
            let opened = OpenTier::open(&tier, object.url, object.etag, object.len());
            assert!(is_busy(&opened.err().unwrap()));
        });
    });
    unlock(control.as_fd(), LockRange::WHOLE).unwrap();
    object.open(&tier).unwrap();
}

#[test]
fn open_files_end_with_their_users() {
    let (directory, tier) = scratch();
    let object = one();
    let mine = || {
        let files = std::fs::read_dir("/proc/self/fd").unwrap();
        let files = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
        files.filter(|file| file.starts_with(directory.path())).count()
    };
    for _ in 0..5 {
        let open = object.open(&tier).unwrap();
        all(&object, &open);
        tier.info().unwrap();
        tier.verify(|_, _| {}).unwrap();
        tier.set_budget_bytes(100_000).unwrap();
        drop(open);
        tier.drop_objects(|_| true).unwrap();
        assert_eq!(mine(), 1, "the tier's own control file");
    }
    drop(tier);
    assert_eq!(mine(), 0);
}

/// Devices that are opened one after another do not each read the whole directory again.
#[test]
fn an_open_tier_is_counted_once() {
    let (_directory, tier) = scratch();
    let object = one();
    all(&object, &object.open(&tier).unwrap());
    let key = super::layout::Key::of(object.url, object.etag, object.len());
    let file = ObjectFile::existing(&tier.directory, key).unwrap().unwrap();
    let states = writable(&path_of(&tier, &object));
    states.write_all_at(&[0; 5], Geometry::STATES_AT).unwrap();
    let state = || {
        let mut states = [9];
        file.states(0, &mut states).unwrap();
        states[0]
    };
    drop(object.open(&tier).unwrap());
    assert_eq!(state(), 0);
    let path = tier.path().to_owned();
    drop(tier);
    drop(Tier::open(path).unwrap());
    assert_eq!(state(), COLD, "repaired by the first");
}

extern "C" fn nothing(_: libc::c_int) {}

#[test]
fn signals_end_no_waits() {
    let (_directory, tier) = scratch();
    let object = one();
    drop(object.open(&tier).unwrap());
    // SAFETY: all-zero is a valid action, with no flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as *const () as usize;
    // SAFETY: the handler does nothing, and no other test of this crate uses the signal.
    unsafe { libc::sigaction(libc::SIGWINCH, &raw const action, std::ptr::null_mut()) };
    let held = [
        // Changed, counted, and removed, for a moment.
        (tier.path().join("control"), 0),
        (tier.path().join("control"), 1),
        (path_of(&tier, &object), 0),
    ];
    let path = tier.path().to_owned();
    drop(tier);
    for (file, byte) in held {
        let file = writable(&file);
        assert!(try_lock(file.as_fd(), LockRange::byte(byte), LockKind::Exclusive).unwrap());
        let (says, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let (object, path) = (&object, &path);
            let waiting = scope.spawn(move || {
                // SAFETY: no preconditions.
                says.send(unsafe { libc::pthread_self() }).unwrap();
                let tier = Tier::open(path)?;
                tier.set_budget_bytes(9 << 20)?;
                object.open(&tier).map(drop).map_err(|error| panic!("{error}"))
            });
            let thread = told.recv().unwrap();
            for _ in 0..50 {
                // SAFETY: the thread is joined below.
                unsafe { libc::pthread_kill(thread, libc::SIGWINCH) };
                std::thread::sleep(Duration::from_millis(1));
            }
            unlock(file.as_fd(), LockRange::WHOLE).unwrap();
            let ended: Result<(), TierError> = waiting.join().unwrap();
            ended.unwrap();
        });
    }
}
