//! Growing, faults, forks; flushes have separate tests.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};

use super::*;
use crate::Stores;
use crate::error::{FaultCause, MapError};
use crate::private::test_support::*;
use crate::writable::Writable;
use crate::writable::test_support::{STORES_HELD_UP, interpose};

fn load(subject: &Subject, offset_bytes: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    subject.view.mapping().read_into(offset_bytes, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_view_grows_at_its_address_and_its_file_with_it() {
    for form in forms() {
        // Neither end is at a page boundary.
        let mut subject = Subject::new(10 * PAGE + 7, PAGE + 9..10 * PAGE + 7, options(form, None));
        let (base, before) = (subject.view.as_mut_ptr(), subject.view.mapping().len_bytes());
        subject.store(before - 1, &[1]);
        for len_bytes in [before, 1, 20 * PAGE, 20 * PAGE + 1, 3000 * PAGE] {
            subject.view.grow(len_bytes).unwrap();
            let now = subject.view.mapping().len_bytes();
            assert_eq!(now, len_bytes.max(subject.range.end - subject.range.start));
            subject.range.end = subject.range.start + now;
            subject.file.resize(subject.file.len().max(subject.range.end as usize), 0);
            assert_eq!(subject.view.as_mut_ptr(), base);
            subject.store(now - 3, &[7, 8, 9]);
            if len_bytes > PAGE * 21 {
                assert_eq!(load(&subject, now - 103, 100), [0; 100]);
            }
        }
        let flushed = subject.view.flush().unwrap();
        assert_eq!(flushed.pages, subject.dirty.len() as u64, "{form:?}");
        subject.check("grown");
        // A longer file is not truncated.
        open(&subject.path).set_len(9000 * PAGE).unwrap();
        subject.file.resize(9000 * PAGE as usize, 0);
        subject.view.grow(3001 * PAGE).unwrap();
        subject.check("taken in");
    }
}

#[test]
fn a_view_does_not_grow_beyond_its_addresses() {
    let subject = Subject::new(PAGE, 0..PAGE, PrivateOptions::default());
    let capacity = subject.view.mapping().capacity_pages() * PAGE;
    match subject.view.grow(capacity + 1).unwrap_err() {
        MapError::GrowBeyond { capacity_bytes, .. } => assert_eq!(capacity_bytes, capacity),
        error => panic!("{error}"),
    }
    assert!(subject.view.grow(u64::MAX).is_err());
    assert_eq!(std::fs::metadata(&subject.path).unwrap().len(), PAGE);
    assert_eq!(subject.view.mapping().len_bytes(), PAGE);
}

#[test]
fn a_file_that_cannot_become_longer_stays_as_it_is() {
    for kind in [Kind::Tmpfs, Kind::Ext4] {
        let Some(small) = SmallFileSystem::new(kind) else { return };
        let options = PrivateOptions::default();
        let subject = Subject::new_in(&small.root(), 5000, 0..5000, options);
        let blocks = || std::fs::metadata(&subject.path).unwrap().blocks();
        let before = blocks();
        let ends = AtomicBool::new(false);
        let outcomes = std::thread::scope(|scope| {
            // A process that appends in the meantime finds the end where it is: its bytes are never
            // cut off.
            scope.spawn(|| {
                let mut lengths =
                    std::iter::repeat_with(|| open(&subject.path).metadata().unwrap().len());
                assert!(
                    lengths.find(|&len| len != 5000 || ends.load(Ordering::Relaxed)) == Some(5000)
                );
            });
            let grow = || (subject.view.grow(100 << 20), blocks());
            let outcomes: Vec<_> = (0..20).map(|_| grow()).collect();
            ends.store(true, Ordering::Relaxed);
            outcomes
        });
        for (outcome, after) in outcomes {
            match outcome.unwrap_err() {
                MapError::Grow { source, .. } => {
                    assert_eq!(source.raw_os_error(), Some(libc::ENOSPC), "{source}");
                }
                error => panic!("{error}"),
            }
            // A grown extent tree keeps one block of the file system, of up to 4 KiB.
            assert!(after <= before + 8, "{kind:?}: what was allocated is given back");
        }
        assert_eq!(subject.view.mapping().len_bytes(), 5000);
        subject.check("not grown");
        subject.view.grow(10_000).unwrap();
    }
}

/// The copy of the last page is older than what another writer has appended.
#[test]
fn what_others_appended_to_the_last_page_is_not_overwritten_when_the_view_takes_it_in() {
    for form in forms() {
        let len_bytes = 2 * PAGE + 100;
        let mut subject = Subject::new(len_bytes, 0..len_bytes, options(form, None));
        subject.store(2 * PAGE, &[5; 10]);
        subject.file.resize(3 * PAGE as usize, 0);
        subject.write_to_file(len_bytes, &[6; 2000]);
        assert_eq!(subject.view.flush().unwrap().bytes_written, 100, "{form:?}");
        open(&subject.path).set_len(3 * PAGE).unwrap();
        subject.check("flushed before it has grown");
        subject.view.grow(3 * PAGE).unwrap();
        subject.range.end = 3 * PAGE;
        assert_eq!(load(&subject, len_bytes, 2000), [6; 2000], "{form:?}");
        subject.store(2 * PAGE + 1, &[7]);
        subject.view.flush().unwrap();
        subject.check("flushed after it has grown");
    }
}

#[test]
fn an_empty_file_is_mapped_to_grow() {
    for form in forms() {
        let mut subject = Subject::new(0, 0..0, options(form, None));
        assert!(subject.view.write_at(0, &[1]).is_err());
        subject.view.write_at(0, &[]).unwrap();
        assert_eq!(subject.view.flush().unwrap(), Flushed::default());
        subject.view.grow(PAGE + 1).unwrap();
        subject.file.resize(PAGE as usize + 1, 0);
        subject.range = 0..PAGE + 1;
        subject.store(PAGE, &[9]);
        subject.view.flush().unwrap();
        subject.check("grown from nothing");
    }
}

/// State for the hooks of one test, which are plain functions and run in the fault handler.
struct Interposed {
    path: Mutex<Option<PathBuf>>,
    address: AtomicUsize,
}

impl Interposed {
    const fn new() -> Interposed {
        Interposed { path: Mutex::new(None), address: AtomicUsize::new(0) }
    }

    fn prepare(&self, subject: &Subject, page: u64) {
        *self.path.lock().unwrap() = Some(subject.path.clone());
        let address = subject.view.as_mut_ptr().wrapping_add((page * PAGE) as usize);
        self.address.store(address as usize, Ordering::SeqCst);
        open(&subject.path).set_len(PAGE).unwrap();
    }

    /// Extends the file again, and stores to the page.
    fn lengthen_and_store(&self) {
        open(self.path.lock().unwrap().as_ref().unwrap()).set_len(8 * PAGE).unwrap();
        // SAFETY: inside the mapping, which the test keeps.
        unsafe { (self.address.load(Ordering::SeqCst) as *mut u8).write_volatile(7) };
    }
}

/// The store exists only in the page that the load found missing a moment before.
#[test]
fn a_store_to_a_page_that_is_about_to_be_replaced_is_kept() {
    static INTERPOSED: Interposed = Interposed::new();
    let mut subject = Subject::new(8 * PAGE, 0..8 * PAGE, PrivateOptions::default());
    INTERPOSED.prepare(&subject, 3);
    subject.file.fill(0);
    interpose(Some(|| INTERPOSED.lengthen_and_store()), None);
    let seen = subject.view.mapping().guarded(&(3 * PAGE..4 * PAGE), || {
        // SAFETY: inside the mapping.
        unsafe { (INTERPOSED.address.load(Ordering::SeqCst) as *const u8).read_volatile() }
    });
    assert_eq!(load(&subject, 3 * PAGE, 1), [7]);
    assert_eq!(seen.unwrap(), 7, "the load found it, too");
    subject.view.flush().unwrap();
    assert_eq!(std::fs::read(&subject.path).unwrap()[3 * PAGE as usize], 7);
}

#[test]
fn a_store_that_meets_a_page_that_is_looked_at_once_more_is_made_again() {
    static INTERPOSED: Interposed = Interposed::new();
    static STORING: Mutex<Option<std::thread::JoinHandle<()>>> = Mutex::new(None);
    let subject = Subject::new(8 * PAGE, 0..8 * PAGE, PrivateOptions::default());
    INTERPOSED.prepare(&subject, 3);
    let held = || {
        let before = STORES_HELD_UP.load(Ordering::SeqCst);
        let storing = std::thread::spawn(|| INTERPOSED.lengthen_and_store());
        while STORES_HELD_UP.load(Ordering::SeqCst) == before && !storing.is_finished() {
            std::thread::yield_now();
        }
        assert!(!storing.is_finished(), "the store was made while the page was held");
        *STORING.lock().unwrap() = Some(storing);
    };
    interpose(None, Some(held));
    let seen = subject.view.mapping().guarded(&(3 * PAGE..4 * PAGE), || {
        // SAFETY: inside the mapping.
        unsafe { (INTERPOSED.address.load(Ordering::SeqCst) as *const u8).read_volatile() }
    });
    seen.unwrap();
    STORING.lock().unwrap().take().expect("the page was held").join().unwrap();
    assert_eq!(load(&subject, 3 * PAGE, 1), [7]);
    subject.view.flush().unwrap();
    assert_eq!(std::fs::read(&subject.path).unwrap()[3 * PAGE as usize], 7);
}

/// After very many replaced pages all the rest would be, but the file has become longer when that is looked at.
#[test]
fn pages_that_come_back_before_all_are_replaced_can_be_stored_to() {
    static PATH: Mutex<Option<PathBuf>> = Mutex::new(None);
    const PAGES: u64 = 3000;
    let subject = Subject::new(PAGES * PAGE, 0..PAGES * PAGE, PrivateOptions::default());
    subject.view.mapping().answer_faults();
    *PATH.lock().unwrap() = Some(subject.path.clone());
    open(&subject.path).set_len(PAGE).unwrap();
    let byte = |page: u64| subject.view.as_mut_ptr().wrapping_add((page * PAGE) as usize);
    // SAFETY: inside the mapping.
    let touch = |page: u64| unsafe { byte(page).read_volatile() };
    for page in (1..2 * 1024).step_by(2) {
        assert_eq!(touch(page), 0);
    }
    let lengthen = || open(PATH.lock().unwrap().as_ref().unwrap()).set_len(PAGES * PAGE).unwrap();
    interpose(None, Some(lengthen));
    assert_eq!(touch(2900), 0);
    for page in [2902, 2] {
        // SAFETY: as above.
        unsafe { byte(page).write_volatile(7) };
    }
    assert!(subject.view.take_missed().is_some());
    subject.view.flush().unwrap();
    let bytes = std::fs::read(&subject.path).unwrap();
    assert_eq!([2, 2900, 2902].map(|page| bytes[(page * PAGE) as usize]), [7, 0, 7]);
}

#[test]
fn stores_outside_of_the_view_are_refused() {
    let subject = Subject::new(4 * PAGE, 100..3 * PAGE, PrivateOptions::default());
    let len_bytes = subject.view.mapping().len_bytes();
    for offset in [len_bytes, len_bytes - 3, u64::MAX, u64::MAX - 2] {
        let error = subject.view.write_at(offset, &[1; 4]).unwrap_err();
        assert!(matches!(error, MapError::OutsideView { .. }), "{error}");
    }
    subject.view.set(len_bytes - 4, 1u32).unwrap();
}

/// One thread's closure sees zeros, and another thread stores to the page through the pointer after
/// the file is extended again.
#[test]
fn a_store_to_a_page_that_shows_zeros_to_another_thread_is_kept() {
    let subject = Subject::new(8 * PAGE, 0..8 * PAGE, PrivateOptions::default());
    let file = open(&subject.path);
    file.set_len(2 * PAGE).unwrap();
    let base = subject.view.as_mut_ptr() as usize;
    let seen = subject.view.mapping().guarded(&(0..8 * PAGE), || {
        // SAFETY: inside the mapping.
        let touch =
            |page: u64| unsafe { ((base + (page * PAGE) as usize) as *const u8).read_volatile() };
        assert_eq!((touch(2), touch(3)), (0, 0));
        file.set_len(8 * PAGE).unwrap();
        std::thread::spawn(move || {
            for page in [2, 3, 4] {
                // SAFETY: as above.
                unsafe { ((base + page * PAGE as usize) as *mut u8).write_volatile(page as u8) };
            }
        })
        .join()
        .unwrap();
        assert_eq!((touch(2), touch(3), touch(4)), (2, 3, 4));
    });
    assert!(matches!(seen, Err(MapError::Fault { .. })), "zeros were seen");
    for page in [2, 3, 4] {
        assert_eq!(load(&subject, page * PAGE, 1), [page as u8]);
    }
    subject.view.flush().unwrap();
    let bytes = std::fs::read(&subject.path).unwrap();
    assert_eq!([2, 3, 4].map(|page| bytes[page * PAGE as usize]), [2, 3, 4]);
}

/// Two threads' loads find a page missing, and a third stores to it once the file has it again: not to the zeros.
#[test]
fn zeros_that_two_threads_see_are_not_stored_to() {
    let subject = Subject::new(8 * PAGE, 0..8 * PAGE, PrivateOptions::default());
    let file = open(&subject.path);
    let at = subject.view.as_mut_ptr() as usize + 3 * PAGE as usize;
    for round in 0..aquifer_testkit::campaign::steps(1000) {
        file.set_len(2 * PAGE).unwrap();
        let value = (round % 250) as u8 + 1;
        let [first, second, third] = [2, 3, 3].map(Barrier::new);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let _ = subject.view.mapping().guarded(&(0..8 * PAGE), || {
                        first.wait();
                        // SAFETY: inside the mapping.
                        unsafe { (at as *const u8).read_volatile() };
                        second.wait();
                        third.wait();
                    });
                });
            }
            second.wait();
            file.set_len(8 * PAGE).unwrap();
            // SAFETY: as above.
            unsafe { (at as *mut u8).write_volatile(value) };
            third.wait();
        });
        assert_eq!(load(&subject, 3 * PAGE, 1), [value], "round {round}");
    }
}

/// Several threads store at once to a page that shows zeros, and the load that has put them there ends.
#[test]
fn stores_of_several_threads_to_a_page_of_zeros_are_made() {
    for sharing in [Stores::Private, Stores::Shared] {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (file, path) = file.into_parts();
        file.set_len(8 * PAGE).unwrap();
        let mapping =
            Writable::new(place(8 * PAGE), &file, &path, 0..8 * PAGE, sharing, false).unwrap();
        aquifer_vm::router::install().unwrap();
        let at = mapping.as_mut_ptr() as usize + 3 * PAGE as usize;
        for round in 0..aquifer_testkit::campaign::steps(1000) {
            file.set_len(2 * PAGE).unwrap();
            let start = Barrier::new(3);
            std::thread::scope(|scope| {
                for thread in 0..2 {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        // SAFETY: inside the mapping.
                        unsafe { ((at + thread) as *mut u8).write_volatile(round as u8) };
                    });
                }
                let _ = mapping.guarded(&(0..8 * PAGE), || {
                    // SAFETY: as above.
                    unsafe { (at as *const u8).read_volatile() };
                    file.set_len(8 * PAGE).unwrap();
                    start.wait();
                });
            });
            let mut stored = [0; 2];
            mapping.read_into(3 * PAGE, &mut stored).unwrap();
            assert_eq!(stored, [round as u8; 2], "{sharing:?}, round {round}");
        }
    }
}

/// A page that is missing is shown as zeros until the closure ends, while the one beside it holds a store that is nowhere else.
#[test]
fn stores_beside_pages_that_are_missing_are_kept() {
    let mut subject = Subject::new(8 * PAGE, 0..8 * PAGE, PrivateOptions::default());
    let file = open(&subject.path);
    file.set_len(2 * PAGE).unwrap();
    let base = subject.view.as_mut_ptr();
    // SAFETY: inside the mapping.
    let touch = |page: u64| unsafe { base.add((page * PAGE) as usize).read_volatile() };
    let seen = subject.view.mapping().guarded(&(0..8 * PAGE), || {
        assert_eq!(touch(2), 0);
        file.set_len(4 * PAGE).unwrap();
        subject.view.write_at(3 * PAGE, &[9; 10]).unwrap();
        assert_eq!(touch(4), 0);
    });
    // Whether the byte is there now or not.
    assert!(matches!(seen, Err(MapError::Fault { .. })));
    file.set_len(8 * PAGE).unwrap();
    file.write_all_at(&[4; 10], 2 * PAGE).unwrap();
    assert_eq!(load(&subject, 3 * PAGE, 10), [9; 10]);
    assert_eq!(load(&subject, 2 * PAGE, 10), [4; 10]);
    subject.view.write_at(2 * PAGE, &[5]).unwrap();
    subject.view.flush().unwrap();
    subject.file.truncate(2 * PAGE as usize);
    subject.file.resize(8 * PAGE as usize, 0);
    subject.file[2 * PAGE as usize..][..10].copy_from_slice(&[5, 4, 4, 4, 4, 4, 4, 4, 4, 4]);
    subject.file[3 * PAGE as usize..][..10].fill(9);
    subject.check("both");
}

#[test]
fn missing_bytes_are_named() {
    let subject = Subject::new(8 * PAGE, 0..8 * PAGE, PrivateOptions::default());
    open(&subject.path).set_len(3 * PAGE + 5).unwrap();
    let mut bytes = [0; 2 * PAGE as usize];
    match subject.view.mapping().read_into(3 * PAGE, &mut bytes).unwrap_err() {
        MapError::Fault { offset_bytes, cause: FaultCause::Truncated, .. } => {
            assert_eq!(offset_bytes, 3 * PAGE + 5);
        }
        error => panic!("{error}"),
    }
}

#[test]
fn a_child_can_do_nothing_with_its_parents_view() {
    for form in forms() {
        let mut subject = Subject::new(8 * PAGE, 0..8 * PAGE, options(form, None));
        subject.store(0, &[1]);
        subject.view.flush().unwrap();
        subject.store(0, &[2]);
        // Simulates another thread of the parent that is flushing.
        let flushing = subject.view.state().unwrap();
        // SAFETY: the child makes a few calls and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: no preconditions; the alarm ends a child that hangs.
            unsafe { libc::alarm(20) };
            let view = &subject.view;
            let results = [
                view.flush().map(drop),
                view.flush_range(0..1).map(drop),
                view.write_at(0, &[3]),
                view.set(0, 1u64),
                view.grow(100 * PAGE),
                view.dirty_bytes().map(drop),
                view.write_out().map(drop),
                view.write_back(1).map(drop),
                view.mapping().read_into(0, &mut [0]),
            ];
            let refused = results.iter().all(|result| matches!(result, Err(MapError::Forked)));
            // SAFETY: ends the child without running the parent's destructors or exit handlers.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        drop(flushing);
        let mut status = 0;
        // SAFETY: waits for the child made above; `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "14 is the alarm: the child hung");
        assert_eq!(subject.view.flush().unwrap().pages, 1, "{form:?}");
        subject.check("the parent goes on");
    }
}

#[test]
fn what_is_written_out_is_seen_and_then_only_synced() {
    for form in forms() {
        let mut subject = Subject::new(100 * PAGE, 0..100 * PAGE, options(form, None));
        (0..100).step_by(9).for_each(|page| subject.store(page * PAGE, b"seen"));
        assert_eq!(subject.view.write_out().unwrap(), 12 * PAGE, "{form:?}");
        subject.check("written out");
        assert_eq!(subject.view.flush().unwrap(), Flushed::default());
    }
}

#[test]
fn stores_wait_while_copies_are_dropped() {
    let subject = Subject::new(PAGE, 0..PAGE, PrivateOptions::default());
    let before = load(&subject, 0, 1);
    let dropping = subject.view.stores.write().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| subject.view.write_at(0, &[!before[0]]).unwrap());
        for _ in 0..2000 {
            std::thread::yield_now();
            assert_eq!(load(&subject, 0, 1), before);
        }
        drop(dropping);
    });
    assert_eq!(load(&subject, 0, 1), [!before[0]]);
}
