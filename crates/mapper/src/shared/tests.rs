//! Stores that go to the file at once.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::thread::JoinHandle;

use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

use super::*;
use crate::error::FaultCause;
use crate::private::test_support::{Ballast, Kind, SmallFileSystem, open, place};
use crate::writable::test_support::{STORES_HELD_UP, interpose};

fn view(path: &Path, len_bytes: u64) -> SharedFile {
    SharedFile::new(place(len_bytes), &open(path), path, 0..len_bytes, false).unwrap()
}

#[test]
fn stores_are_seen_at_once_and_durable_after_a_flush() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    std::fs::write(&path, vec![1; 100_000]).unwrap();
    let file = open(&path);
    file.sync_all().unwrap();
    let view = view(&path, 100_000);
    view.set(50_000, 0x0102_0304u32).unwrap();
    view.write_at(99_999, &[7]).unwrap();
    let there = std::fs::read(&path).unwrap();
    assert_eq!(there[50_000..50_004], 0x0102_0304u32.to_ne_bytes());
    assert_eq!(there[99_999], 7);
    let dirty_bytes = view.dirty_bytes().unwrap();
    assert_eq!(view.flush_range(10..10).unwrap(), Flushed::default());
    assert_eq!(view.flush().unwrap().bytes_written, dirty_bytes);
    let magic = aquifer_sys::file_system::magic(view.mapping().file()).unwrap();
    if aquifer_sys::file_system::in_memory(magic).is_none() {
        assert_eq!(view.dirty_bytes().unwrap(), 0);
    }
    assert!(matches!(view.write_at(99_999, &[1, 2]), Err(MapError::OutsideView { .. })));
}

#[test]
fn a_view_grows_with_its_file_and_notices_that_it_was_cut() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    std::fs::write(&path, vec![1; 5000]).unwrap();
    let view = view(&path, 5000);
    let base = view.as_mut_ptr();
    view.grow(20_000).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 20_000);
    view.write_at(19_999, &[5]).unwrap();
    assert_eq!(view.as_mut_ptr(), base);
    view.flush().unwrap();
    assert!(matches!(view.grow(1 << 40), Err(MapError::GrowBeyond { .. })));
    open(&path).set_len(9000).unwrap();
    let lost = view.write_at(19_999, &[1]).unwrap_err();
    assert!(matches!(lost, MapError::Fault { cause: FaultCause::Truncated, .. }), "{lost}");
    let lost = view.flush().unwrap_err();
    assert!(matches!(lost, MapError::Flush { cause: FlushCause::Truncated, .. }), "{lost}");
    view.flush_range(0..9000).unwrap();
    let mut byte = [0];
    assert!(view.mapping().read_into(15_000, &mut byte).is_err());
}

/// The device has what a flush returned for: also blocks that were allocated for it, and the length.
#[test]
fn stores_to_holes_and_new_blocks_survive_a_power_cut_after_their_flush() {
    let Some(small) = SmallFileSystem::new(Kind::Ext4Journal) else { return };
    let path = small.root().join("data");
    std::fs::write(&path, [1; 4096]).unwrap();
    let file = open(&path);
    file.set_len(1 << 20).unwrap();
    aquifer_sys::io::allocate(file.as_fd(), 512 << 10, 64 << 10).unwrap();
    file.sync_all().unwrap();
    let view = SharedFile::new(place(4 << 20), &file, &path, 0..1 << 20, false).unwrap();
    // A hole, a block without content, one with it; and behind them what the file did not have.
    let stores = [300_000, 540_000, 10, (1 << 20) - 2];
    for (step, at) in stores.into_iter().chain([(2 << 20) - 100]).enumerate() {
        if step == stores.len() {
            view.grow(2 << 20).unwrap();
        }
        view.write_at(at, &[7, 8]).unwrap();
        view.flush_range(at..at + 2).unwrap();
        let after = small.after_a_power_cut();
        let there = std::fs::read(after.root().join("data")).unwrap();
        assert_eq!(there.get(at as usize..at as usize + 2), Some(&[7, 8][..]), "{at}");
    }
}

#[test]
fn a_store_to_a_hole_says_that_the_disk_is_full() {
    for kind in [Kind::Tmpfs, Kind::Ext4] {
        let Some(small) = SmallFileSystem::new(kind) else { return };
        let path = small.root().join("data");
        std::fs::write(&path, [1; 4096]).unwrap();
        let file = open(&path);
        file.set_len(1 << 20).unwrap();
        file.sync_all().unwrap();
        let view = view(&path, 1 << 20);
        let ballast = Ballast::fill(&small.root());
        let full = view.write_at(500_000, &[1]).unwrap_err();
        let no_space = FaultCause::NoSpace;
        assert!(matches!(full, MapError::Fault { cause, .. } if cause == no_space), "{full}");
        view.write_at(0, &[2]).unwrap();
        view.flush_range(0..4096).unwrap();
        drop(ballast);
        view.write_at(500_000, &[1]).unwrap();
        view.flush().unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 500_000).unwrap();
        assert_eq!(byte, [1], "{kind:?}");
    }
}

/// Runs `body` in a forked child, and returns how it ended.
fn status_of_child(body: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child makes a few calls and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_right = body();
        // SAFETY: ends the child without running the parent's destructors or exit handlers.
        unsafe { libc::_exit(i32::from(!is_right)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

#[test]
fn children_store_to_their_parents_view_and_make_their_own() {
    const PAGES: usize = 4096;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    std::fs::write(&path, vec![1; PAGES * 4096]).unwrap();
    let view = view(&path, (PAGES * 4096) as u64);
    let other = directory.path().join("other");
    std::fs::write(&other, vec![2; 5000]).unwrap();
    let start = view.as_mut_ptr();
    // Children of children too.
    let store = |n: usize| {
        // SAFETY: inside the view.
        (0..PAGES).for_each(|page| unsafe { start.add(page * 4096 + n).write_volatile(7) });
    };
    for n in [0, 1] {
        let status = status_of_child(|| {
            store(2 * n);
            let grandchild = status_of_child(|| {
                store(2 * n + 1);
                true
            });
            let own = self::view(&other, 5000);
            grandchild == 0
                && own.write_at(4999, &[n as u8 + 3]).is_ok()
                && view.flush().is_ok()
                && view.flush_range(0..1 << 40).is_err()
        });
        assert_eq!(status, 0);
    }
    // SAFETY: inside the view.
    let bytes = |page: usize| unsafe { start.add(page * 4096).cast::<[u8; 5]>().read_volatile() };
    assert!((0..PAGES).all(|page| bytes(page) == [7, 7, 7, 7, 1]));
    assert_eq!(std::fs::read(&other).unwrap()[4999], 4);
    view.flush().unwrap();
    // A child whose store has no place in the file gets the signal, as with mmap; the parent is served.
    open(&path).set_len(4096).unwrap();
    view.mapping().answer_faults();
    let status = status_of_child(|| {
        // SAFETY: inside the view.
        unsafe { start.add(2 * 4096).write_volatile(1) };
        true
    });
    assert_eq!(libc::WTERMSIG(status), libc::SIGBUS);
    // SAFETY: inside the view.
    unsafe { start.add(2 * 4096).write_volatile(1) };
    assert!(view.mapping().take_missed().is_some());
}

#[test]
fn a_file_that_may_not_be_mapped_shared_is_refused_with_advice() {
    // SAFETY: a NUL-terminated name.
    let sealed = unsafe { libc::memfd_create(c"sealed".as_ptr(), libc::MFD_ALLOW_SEALING) };
    // SAFETY: a new descriptor, owned by nothing else.
    let file = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(sealed) };
    file.set_len(8192).unwrap();
    // SAFETY: no memory is passed.
    assert_eq!(unsafe { libc::fcntl(sealed, libc::F_ADD_SEALS, libc::F_SEAL_FUTURE_WRITE) }, 0);
    let path = Path::new("sealed");
    let refused = SharedFile::new(place(8192), &file, path, 0..8192, false).err();
    assert!(matches!(refused, Some(MapError::SharedRefused { .. })), "{refused:?}");
    let private = crate::private::PrivateOptions::default();
    crate::private::PrivateFile::new(place(8192), &file, path, 0..8192, private).unwrap();
}

#[test]
fn a_child_can_only_flush_its_parents_view() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    std::fs::write(&path, vec![1; 5000]).unwrap();
    let view = view(&path, 5000);
    // SAFETY: the child makes a few calls and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let results = [
            view.write_out(),
            view.write_at(0, &[3]),
            view.grow(9000),
            view.dirty_bytes().map(drop),
        ];
        let refused = results.iter().all(|result| matches!(result, Err(MapError::Forked)));
        let refused = refused && view.flush().is_ok();
        // SAFETY: ends the child without running the parent's destructors or exit handlers.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
}

/// What a bare store finds on a full disk stays, is reported, and reaches the file when there is room.
#[test]
fn bare_stores_without_a_block_are_kept_reported_and_written_later() {
    for kind in [Kind::Tmpfs, Kind::Ext4] {
        let Some(small) = SmallFileSystem::new(kind) else { return };
        let path = small.root().join("data");
        std::fs::write(&path, [1; 4096]).unwrap();
        let file = open(&path);
        file.set_len(1 << 20).unwrap();
        file.sync_all().unwrap();
        let view = view(&path, 1 << 20);
        let start = view.as_mut_ptr();
        let store = |at: u64, byte: u8| {
            // SAFETY: inside the view.
            unsafe { start.add(at as usize).write_volatile(byte) }
        };
        // SAFETY: as above.
        let load = |at: u64| unsafe { start.add(at as usize).read_volatile() };
        let ballast = Ballast::fill(&small.root());
        let copied = [500_000, 500_001, 504_100, 700_000];
        copied.iter().for_each(|&at| store(at, 7));
        store(5, 9);
        // The budget unmaps the pages around them.
        Pages::unmap(&view, &(0..1 << 20));
        assert!(copied.iter().all(|&at| load(at) == 7));
        assert_eq!((load(500_002), load(5)), (0, 9));
        assert!(aquifer_vm::has_missed_faults());
        let full = |result: Option<MapError>| match result {
            Some(MapError::Flush { range, cause: FlushCause::NoSpace, .. }) => range,
            other => panic!("{kind:?}: {other:?}"),
        };
        let first = 499_712..507_904;
        assert_eq!(full(view.mapping().take_missed()), first);
        assert!(view.mapping().take_missed().is_none());
        store(900_000, 7);
        assert_eq!(full(view.write_at(5, &[3]).err()), first, "the next call reports it");
        view.write_at(6, &[3]).unwrap();
        for _ in 0..2 {
            assert_eq!(full(view.flush().err()), first, "each flush does");
        }
        assert!(copied.iter().all(|&at| load(at) == 7));
        drop(ballast);
        view.flush().unwrap();
        let there = std::fs::read(&path).unwrap();
        for (at, &byte) in there.iter().enumerate().skip(4096) {
            let is_stored = copied.contains(&(at as u64)) || at == 900_000;
            assert_eq!(byte, if is_stored { 7 } else { 0 }, "{kind:?} {at}");
        }
        assert_eq!((there[5], there[6]), (9, 3));
        // The pages are the file's again, both ways.
        store(500_003, 8);
        file.write_all_at(&[6], 700_001).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 500_003).unwrap();
        assert_eq!((byte[0], load(700_001)), (8, 6), "{kind:?}");
    }
}

/// On a full tmpfs a load of a hole fails as well, and its page is replaced by zeros; but not once it is
/// the copy of a store.
#[test]
fn a_load_that_failed_does_not_replace_the_copy_of_a_store() {
    static ADDRESS: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
    const AT: u64 = 500_000;
    let Some(small) = SmallFileSystem::new(Kind::Tmpfs) else { return };
    let path = small.root().join("data");
    std::fs::write(&path, [1; 4096]).unwrap();
    open(&path).set_len(1 << 20).unwrap();
    let view = view(&path, 1 << 20);
    ADDRESS.store(view.as_mut_ptr().wrapping_add(AT as usize), Ordering::SeqCst);
    let ballast = Ballast::fill(&small.root());
    // SAFETY: inside the view, which the test keeps; as below.
    let store = || unsafe { ADDRESS.load(Ordering::SeqCst).write_volatile(7) };
    interpose(Some(store), None);
    let seen = view.mapping().guarded(&(AT..AT + 1), || {
        // SAFETY: as above.
        unsafe { ADDRESS.load(Ordering::SeqCst).read_volatile() }
    });
    assert!(view.mapping().take_missed().is_some());
    drop(ballast);
    view.flush().unwrap();
    assert_eq!(std::fs::read(&path).unwrap()[AT as usize], 7);
    assert_eq!(seen.unwrap(), 7, "the load found it");
}

/// The parent has the copies: what a child stores to one is in no file.
#[test]
fn a_child_does_not_flush_what_is_in_copies() {
    let Some(small) = SmallFileSystem::new(Kind::Ext4) else { return };
    let path = small.root().join("data");
    std::fs::write(&path, [1; 4096]).unwrap();
    open(&path).set_len(1 << 20).unwrap();
    let view = view(&path, 1 << 20);
    let _ballast = Ballast::fill(&small.root());
    // SAFETY: inside the view, as below.
    unsafe { view.as_mut_ptr().add(500_000).write_volatile(7) };
    let status = status_of_child(|| {
        // SAFETY: as above.
        unsafe { view.as_mut_ptr().add(500_001).write_volatile(8) };
        let is_full = |range| {
            let flushed = view.flush_range(range);
            matches!(flushed, Err(MapError::Flush { cause: FlushCause::NoSpace, .. }))
        };
        is_full(0..1 << 20) && is_full(500_000..500_001) && !is_full(0..4096)
    });
    assert_eq!(status, 0);
}

/// The file is cut short, which ends the copy, and others write to it again: the zeros in place of the copy
/// are no stores.
#[test]
fn zeros_in_place_of_a_copy_that_was_cut_off_are_not_written() {
    const AT: usize = 500_000;
    let Some(small) = SmallFileSystem::new(Kind::Ext4) else { return };
    let path = small.root().join("data");
    std::fs::write(&path, [1; 4096]).unwrap();
    let file = open(&path);
    file.set_len(1 << 20).unwrap();
    let view = view(&path, 1 << 20);
    view.mapping().answer_faults();
    let byte = view.as_mut_ptr().wrapping_add(AT);
    let ballast = Ballast::fill(&small.root());
    // SAFETY: inside the view, as below.
    unsafe { byte.write_volatile(7) };
    file.set_len(4096).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { byte.read_volatile() }, 0);
    drop(ballast);
    file.write_all_at(&vec![2; 1 << 20], 0).unwrap();
    view.mapping().take_missed();
    assert!(std::fs::read(&path).unwrap().iter().all(|&byte| byte == 2));
    view.flush().unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { byte.read_volatile() }, 2);
}

/// There is room again while a hole of a file in memory is filled for a store, and another thread stores to
/// the page.
#[test]
fn a_store_while_a_hole_is_filled_for_another_one_is_kept() {
    static ADDRESS: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
    static BALLAST: Mutex<Option<Ballast>> = Mutex::new(None);
    static OTHER: Mutex<Option<JoinHandle<()>>> = Mutex::new(None);
    const AT: usize = 500_000;
    let Some(small) = SmallFileSystem::new(Kind::Tmpfs) else { return };
    let path = small.root().join("data");
    std::fs::write(&path, [1; 4096]).unwrap();
    open(&path).set_len(1 << 20).unwrap();
    let view = view(&path, 1 << 20);
    ADDRESS.store(view.as_mut_ptr().wrapping_add(AT), Ordering::SeqCst);
    *BALLAST.lock().unwrap() = Some(Ballast::fill(&small.root()));
    // SAFETY: inside the view, which the test keeps.
    let store = |at| unsafe { ADDRESS.load(Ordering::SeqCst).add(at).write_volatile(7) };
    let meanwhile = || {
        drop(BALLAST.lock().unwrap().take());
        let before = STORES_HELD_UP.load(Ordering::SeqCst);
        // SAFETY: as above.
        let other = || unsafe { ADDRESS.load(Ordering::SeqCst).add(1).write_volatile(8) };
        let storing = std::thread::spawn(other);
        while STORES_HELD_UP.load(Ordering::SeqCst) == before && !storing.is_finished() {
            std::thread::yield_now();
        }
        *OTHER.lock().unwrap() = Some(storing);
    };
    interpose(None, Some(meanwhile));
    store(0);
    OTHER.lock().unwrap().take().unwrap().join().unwrap();
    view.flush().unwrap();
    assert_eq!(std::fs::read(&path).unwrap()[AT..AT + 2], [7, 8]);
}

/// Also a store of a call that guards loads of the page.
#[test]
fn a_store_to_a_copy_that_is_being_written_waits() {
    static VIEW: AtomicPtr<SharedFile> = AtomicPtr::new(std::ptr::null_mut());
    static OTHER: Mutex<Option<JoinHandle<()>>> = Mutex::new(None);
    const AT: u64 = 500_000;
    let Some(small) = SmallFileSystem::new(Kind::Ext4) else { return };
    let path = small.root().join("data");
    std::fs::write(&path, [1; 4096]).unwrap();
    open(&path).set_len(1 << 20).unwrap();
    let view = view(&path, 1 << 20);
    VIEW.store((&raw const view).cast_mut(), Ordering::SeqCst);
    let ballast = Ballast::fill(&small.root());
    // SAFETY: inside the view, as below.
    unsafe { view.as_mut_ptr().add(AT as usize).write_volatile(7) };
    drop(ballast);
    let meanwhile = || {
        let before = STORES_HELD_UP.load(Ordering::SeqCst);
        let storing = std::thread::spawn(|| {
            // SAFETY: the test joins this thread before it drops the view.
            let view = unsafe { &*VIEW.load(Ordering::SeqCst) };
            // SAFETY: as above.
            let store = || unsafe { view.as_mut_ptr().add(AT as usize + 1).write_volatile(8) };
            view.mapping().guarded(&(AT..AT + 2), store).unwrap();
        });
        while STORES_HELD_UP.load(Ordering::SeqCst) == before && !storing.is_finished() {
            std::thread::yield_now();
        }
        *OTHER.lock().unwrap() = Some(storing);
    };
    interpose(None, Some(meanwhile));
    view.flush().unwrap();
    OTHER.lock().unwrap().take().unwrap().join().unwrap();
    // The standard library's handler, to which other faults go, removes this one before it returns.
    assert!(aquifer_vm::router::is_installed());
    let there = std::fs::read(&path).unwrap();
    assert_eq!(there[AT as usize..AT as usize + 2], [7, 8]);
}

/// Threads store to holes, several to each page, while the disk becomes full and has room again and all is
/// flushed.
#[test]
fn stores_of_several_threads_to_copies_are_kept_while_they_are_flushed() {
    /// A round is on holes of its own.
    const PAGES: u64 = 64;
    const THREADS: u64 = 3;
    let rounds = steps(10) as u64;
    for kind in [Kind::Ext4, Kind::Tmpfs] {
        let Some(small) = SmallFileSystem::new(kind) else { return };
        let path = small.root().join("data");
        std::fs::write(&path, [0; 4096]).unwrap();
        open(&path).set_len(rounds * PAGES * PAGE).unwrap();
        let view = view(&path, rounds * PAGES * PAGE);
        let start = view.as_mut_ptr().addr();
        let round = AtomicU64::new(0);
        let store_all = |thread: u64| {
            let mut rng = Rng::new(seed(thread));
            let mut last = vec![0_u64; (rounds * PAGES) as usize];
            for count in 1.. {
                let round = match round.load(Ordering::SeqCst) {
                    0 => continue,
                    round if round > rounds => break,
                    round => round - 1,
                };
                let page = round * PAGES + rng.below(PAGES);
                let at = start + (page * PAGE + 8 * thread) as usize;
                // SAFETY: inside the view, aligned; threads store to bytes of their own.
                unsafe { (at as *mut u64).write_volatile(count) };
                last[page as usize] = count;
            }
            last
        };
        let mut stored = vec![];
        std::thread::scope(|scope| {
            let store_all = &store_all;
            let threads: Vec<_> =
                (0..THREADS).map(|thread| scope.spawn(move || store_all(thread))).collect();
            for _ in 0..rounds {
                let ballast = Ballast::fill(&small.root());
                round.fetch_add(1, Ordering::SeqCst);
                while view.flush().is_ok() {}
                for _ in 0..50 {
                    let _ = view.flush();
                }
                drop(ballast);
                view.flush().unwrap();
            }
            round.fetch_add(1, Ordering::SeqCst);
            stored = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        });
        view.flush().unwrap();
        let there = std::fs::read(&path).unwrap();
        for (thread, last) in stored.iter().enumerate() {
            for (page, &count) in last.iter().enumerate() {
                let at = page * PAGE as usize + 8 * thread;
                let found = u64::from_ne_bytes(there[at..at + 8].try_into().unwrap());
                assert_eq!(found, count, "{kind:?}: thread {thread}, page {page}");
            }
        }
    }
}

/// The kernel reports an error once: here to the budget's thread.
#[test]
fn an_error_of_another_sync_at_the_same_time_fails_the_flush() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    std::fs::write(&path, [1; 5000]).unwrap();
    let view = view(&path, 5000);
    let (is_syncing, mut is_spared) = (AtomicBool::new(false), false);
    let flushed = std::thread::scope(|scope| {
        let flushing = scope.spawn(|| {
            while !is_syncing.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            view.flush()
        });
        Pages::sync(&view, &mut || {
            is_spared = view.has_lost();
            is_syncing.store(true, Ordering::SeqCst);
            // No reader gets in while a writer waits.
            while !flushing.is_finished() && view.syncing.try_read().is_ok() {
                std::thread::yield_now();
            }
            Err(io::Error::from_raw_os_error(libc::EIO))
        });
        flushing.join().unwrap()
    });
    let gone = matches!(flushed, Err(MapError::Flush { cause: FlushCause::Gone(libc::EIO), .. }));
    assert!(gone, "{flushed:?}");
    assert!(is_spared, "the budget drops no page of which the error is not known yet");
}

/// More such pages, far apart, than a process should have mappings for.
#[test]
fn many_bare_stores_without_a_block_take_few_mappings() {
    const PAGES: u64 = 6000;
    let Some(small) = SmallFileSystem::new(Kind::Ext4) else { return };
    let path = small.root().join("data");
    std::fs::write(&path, [1; 4096]).unwrap();
    open(&path).set_len(2 * PAGES * 4096).unwrap();
    let view = view(&path, 2 * PAGES * 4096);
    let start = view.as_mut_ptr();
    let ballast = Ballast::fill(&small.root());
    let page = |page: u64| start.wrapping_add(2 * page as usize * 4096);
    // SAFETY: inside the view.
    (1..PAGES).for_each(|n| unsafe { page(n).cast::<u64>().write_volatile(n) });
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    assert!(maps < 4000, "{maps}");
    // SAFETY: as above.
    assert!((1..PAGES).all(|n| unsafe { page(n).cast::<u64>().read_volatile() } == n));
    // The file system has no room for all of them: none of the pages is written in part.
    open(&path).set_len(PAGES * 4096).unwrap();
    drop(ballast);
    assert!(matches!(
        view.flush(),
        Err(MapError::Flush { cause: FlushCause::Truncated | FlushCause::NoSpace, .. })
    ));
    let there = std::fs::read(&path).unwrap();
    for n in 1..PAGES / 2 {
        let at = 2 * n as usize * 4096;
        let found = u64::from_ne_bytes(there[at..at + 8].try_into().unwrap());
        assert!(found == n || found == 0, "{n} {found}");
    }
    assert_eq!(there.len() as u64, PAGES * 4096);
}

#[test]
fn bare_accesses_behind_the_end_find_zeros_where_that_was_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    std::fs::write(&path, vec![1; 10 * 4096]).unwrap();
    let view = view(&path, 10 * 4096);
    view.mapping().answer_faults();
    let at = |at: usize| view.as_mut_ptr().wrapping_add(at);
    let file = open(&path);
    file.set_len(5 * 4096).unwrap();
    // SAFETY: inside the view.
    unsafe {
        assert_eq!((at(4096).read_volatile(), at(7 * 4096).read_volatile()), (1, 0));
        at(8 * 4096).write_volatile(9);
        at(4097).write_volatile(9);
    }
    let missed = view.mapping().take_missed();
    let truncated = |error: &Option<MapError>| {
        matches!(error, Some(MapError::Fault { cause: FaultCause::Truncated, .. }))
    };
    assert!(truncated(&missed), "{missed:?}");
    file.set_len(10 * 4096).unwrap();
    view.flush().unwrap();
    // SAFETY: as above.
    unsafe { at(8 * 4096 + 1).write_volatile(4) };
    let there = std::fs::read(&path).unwrap();
    assert_eq!((there[4097], there[8 * 4096], there[8 * 4096 + 1]), (9, 0, 4));
    assert!(view.mapping().take_missed().is_none());
}

/// The disk blocks of a file, in bytes.
fn allocated(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap()) * 512
}

#[test]
fn files_stay_sparse_unless_blocks_are_asked_for() {
    let Some(small) = SmallFileSystem::new(Kind::Ext4) else { return };
    for allocates in [false, true] {
        let path = small.root().join(format!("data {allocates}"));
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let place = place(1 << 40);
        let make = |place, len| SharedFile::new(place, &open(&path), &path, 0..len, allocates);
        let view = make(place, 1 << 20).unwrap();
        let opened = allocated(&path);
        view.grow(2 << 20).unwrap();
        let grown = allocated(&path);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 << 20);
        if !allocates {
            assert!(grown <= 64 << 10, "{grown}");
            // More than the disk has.
            view.grow(1 << 30).unwrap();
            assert!(allocated(&path) <= 64 << 10);
            continue;
        }
        assert!(opened >= 1 << 20 && grown >= 2 << 20, "{opened} {grown}");
        let full = view.grow(1 << 30).unwrap_err();
        assert!(matches!(full, MapError::Grow { .. }), "{full}");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 << 20);
        // On a full disk, a store to a reserved block finds it.
        let ballast = Ballast::fill(&small.root());
        // SAFETY: inside the view.
        unsafe { view.as_mut_ptr().add(1_500_000).write_volatile(7) };
        view.flush().unwrap();
        let longer = std::fs::File::create(small.root().join("other")).unwrap();
        longer.set_len(4 << 20).unwrap();
        let path = small.root().join("other");
        let full = SharedFile::new(self::place(4 << 20), &open(&path), &path, 0..4 << 20, true);
        assert!(matches!(full.err(), Some(MapError::Allocate { .. })));
        drop(ballast);
    }
}
