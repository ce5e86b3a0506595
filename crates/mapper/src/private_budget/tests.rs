//! Making room while threads store, in both forms of tracking; the budget itself has tests of the
//! public interface.

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

use super::PAGE;
use crate::error::{FlushCause, MapError};
use crate::flush::test_support::*;

const PAGES: u64 = 300;
/// A time limit that is only reached if the event never happens.
const NEVER: Duration = Duration::from_secs(60);

fn forever() -> bool {
    true
}

fn make_room(subject: &Subject) -> crate::Result<u64> {
    subject.view.make_room(u64::MAX, &forever).expect("no flush is in progress")
}

/// Each thread counts up in its own words of pages that all share, and sees none of them go back,
/// while copies are written out and dropped and stores are made to wait.
#[test]
fn no_store_is_lost_and_none_is_seen_to_go_back() {
    let seed = seed(7);
    for form in forms() {
        let subject = Subject::new(PAGES * PAGE, 0..PAGES * PAGE, options(form, None));
        let view = &subject.view;
        let base = view.as_mut_ptr().addr();
        let is_done = AtomicBool::new(false);
        let (dropped, started) = (AtomicU64::new(0), Instant::now());
        let counts: Vec<Vec<u64>> = std::thread::scope(|scope| {
            let dropped = &dropped;
            let storing: Vec<_> = (0..2u64)
                .map(|thread| {
                    scope.spawn(move || {
                        let mut rng = Rng::new(seed + thread);
                        let mut counts = vec![0u64; PAGES as usize];
                        for step in 0.. {
                            if step >= steps(150_000) && step % 1000 == 0 {
                                if dropped.load(Ordering::Relaxed) > 0 {
                                    break;
                                }
                                assert!(started.elapsed() < NEVER, "{form:?}: none is dropped");
                            }
                            let page = rng.below(PAGES);
                            let place = base + (page * PAGE + 8 * thread) as usize;
                            // SAFETY: an aligned word inside the view that only this thread uses.
                            let place = unsafe { AtomicU64::from_ptr(place as *mut u64) };
                            let count = &mut counts[page as usize];
                            let found = place.load(Ordering::Relaxed);
                            let what = format!("{form:?}, seed {seed}, step {step}, page {page}");
                            // The file begins with random bytes.
                            assert!(*count == 0 || found == *count, "{what}: {found}, not {count}");
                            *count += 1;
                            place.store(*count, Ordering::Relaxed);
                            assert_eq!(place.load(Ordering::Relaxed), *count, "{what}");
                        }
                        counts
                    })
                })
                .collect();
            let is_done = &is_done;
            let waiter = scope.spawn(move || {
                let mut rng = Rng::new(seed);
                while !is_done.load(Ordering::Relaxed) {
                    view.let_store(false);
                    (0..rng.below(20)).for_each(|_| std::thread::yield_now());
                    view.let_store(true);
                    std::thread::sleep(std::time::Duration::from_micros(200));
                }
            });
            let mut rng = Rng::new(seed);
            while storing.iter().any(|thread| !thread.is_finished()) {
                if rng.below(8) == 0 {
                    view.flush().unwrap();
                }
                if let Some(made) = view.make_room((1 + rng.below(PAGES)) * PAGE, &forever) {
                    dropped.fetch_add(made.unwrap(), Ordering::Relaxed);
                }
            }
            is_done.store(true, Ordering::Relaxed);
            waiter.join().unwrap();
            storing.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        view.flush().unwrap();
        let there = std::fs::read(&subject.path).unwrap();
        for (thread, counts) in counts.iter().enumerate() {
            for (page, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                let at = page * PAGE as usize + 8 * thread;
                let found = u64::from_ne_bytes(there[at..at + 8].try_into().unwrap());
                assert_eq!(found, *count, "{form:?}, page {page}, seed {seed}");
            }
        }
    }
}

/// What a system call says it has stored is there.
#[test]
fn a_system_call_stores_or_says_that_it_has_not() {
    for form in forms() {
        let subject = Subject::new(PAGES * PAGE, 0..PAGES * PAGE, options(form, None));
        let view = &subject.view;
        let base = view.as_mut_ptr().addr();
        let source = tempfile::tempfile().unwrap();
        let numbers: Vec<u8> = (0..1000u64).flat_map(u64::to_ne_bytes).collect();
        source.write_all_at(&numbers, 0).unwrap();
        std::thread::scope(|scope| {
            let source = &source;
            let storing = scope.spawn(move || {
                let mut rng = Rng::new(3);
                let mut words = vec![0u64; PAGES as usize];
                for _ in 0..steps(30_000) {
                    let (page, number) = (rng.below(PAGES), rng.below(1000));
                    let place = base + (page * PAGE) as usize;
                    // SAFETY: eight bytes inside the view that only this thread uses.
                    let read = unsafe {
                        libc::pread(source.as_raw_fd(), place as *mut _, 8, number as i64 * 8)
                    };
                    if read == 8 {
                        words[page as usize] = number + 1;
                    } else {
                        let error = std::io::Error::last_os_error();
                        assert_eq!((read, error.raw_os_error()), (-1, Some(libc::EFAULT)));
                    }
                    // SAFETY: as above.
                    let found = unsafe { (place as *const u64).read_volatile() };
                    let wanted = words[page as usize];
                    assert!(wanted == 0 || found == wanted - 1, "{form:?}, page {page}");
                }
            });
            while !storing.is_finished() {
                make_room(&subject).unwrap();
            }
        });
    }
}

#[test]
fn what_was_stored_again_stays_and_is_written_by_the_next_flush() {
    for form in forms() {
        let mut subject = Subject::new(PAGES * PAGE, 9..PAGES * PAGE - 9, options(form, None));
        subject.view.as_mut_ptr();
        (0..PAGES - 1).for_each(|page| subject.store(page * PAGE + 7, &[page as u8; 100]));
        let dropped = make_room(&subject).unwrap();
        assert_eq!(dropped, subject.dirty.len() as u64 * PAGE, "{form:?}");
        assert_eq!(subject.view.private_bytes().unwrap(), 0);
        subject.check("written out");
        subject.store(5 * PAGE, b"again");
        assert_eq!(subject.view.dirty_bytes().unwrap(), PAGE);
        // Another process's bytes in the same page stay, as after a flush.
        subject.write_to_file(90 * PAGE, b"theirs");
        assert_eq!(subject.view.flush().unwrap().pages, 1);
        subject.check("flushed");
        let mut there = [0; 6];
        subject.view.mapping().read_into(90 * PAGE - 9, &mut there).unwrap();
        assert_eq!(&there, b"theirs", "no copy hides it");
    }
}

/// A truncated file is not made longer, and gets no zeros.
#[test]
fn what_is_behind_the_end_of_a_truncated_file_is_named_and_not_written() {
    for form in forms() {
        let mut subject = Subject::new(PAGES * PAGE, 0..PAGES * PAGE, options(form, None));
        let base = subject.view.as_mut_ptr();
        subject.view.mapping().answer_faults();
        (0..PAGES).for_each(|page| subject.store(page * PAGE, b"stored"));
        assert_eq!(subject.view.dirty_bytes().unwrap(), PAGES * PAGE);
        open(&subject.path).set_len(100 * PAGE).unwrap();
        subject.file.truncate(100 * PAGE as usize);
        for page in [50, 200, 250] {
            // SAFETY: inside the view; behind the end of the file it finds zeros.
            unsafe { base.add((page * PAGE) as usize).write_volatile(b's') };
        }
        for _ in 0..3 {
            let made = make_room(&subject);
            let is_said =
                matches!(made, Ok(_) | Err(MapError::Flush { cause: FlushCause::Truncated, .. }));
            assert!(is_said, "{form:?}: {made:?}");
        }
        subject.check("truncated");
        assert!(matches!(subject.view.flush(), Err(MapError::Flush { .. })));
        subject.check("flushed");
    }
}

/// A thread of the parent may be at a closed gate, or making room, at the fork.
#[test]
fn a_child_does_not_wait() {
    for form in forms() {
        let mut subject = Subject::new(PAGE, 0..PAGE, options(form, None));
        subject.store(0, &[1]);
        subject.view.as_mut_ptr();
        subject.view.let_store(false);
        // SAFETY: the child makes a few calls and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: no preconditions; the alarm ends a child that hangs.
            unsafe { libc::alarm(20) };
            let view = &subject.view;
            let refused = matches!(view.write_at(0, &[3]), Err(MapError::Forked))
                && matches!(view.flush(), Err(MapError::Forked));
            // SAFETY: ends the child without running the parent's destructors or exit handlers.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above; `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "{form:?}; 14 is the alarm: the child hung");
        // Growing stores while it has the lock that making room waits for.
        subject.view.grow(PAGE + 100).unwrap();
        subject.view.let_store(true);
        subject.view.write_at(PAGE, &[7]).unwrap();
        subject.view.let_store(false);
        open(&subject.path).write_all_at(b"appended", PAGE + 100).unwrap();
        subject.view.grow(2 * PAGE).unwrap();
    }
}

#[test]
fn stores_through_a_pointer_wait_at_a_closed_gate_and_loads_do_not() {
    for form in forms() {
        let subject = Subject::new(PAGE, 0..PAGE, options(form, None));
        let base = subject.view.as_mut_ptr().addr();
        // SAFETY: an aligned word inside the view, reached as an atomic only.
        let word = unsafe { AtomicU64::from_ptr(base as *mut u64) };
        word.store(0, Ordering::Relaxed);
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    word.fetch_add(1, Ordering::Relaxed);
                }
            });
            let mut was_stored_to = None;
            for round in 0..steps(100) {
                let before = word.load(Ordering::Relaxed);
                while word.load(Ordering::Relaxed) == before {
                    std::thread::yield_now();
                }
                subject.view.let_store(false);
                let closed = word.load(Ordering::Relaxed);
                if round % 2 == 0 {
                    // It also holds and drops at a closed gate.
                    make_room(&subject).unwrap();
                }
                (0..100).for_each(|_| std::thread::yield_now());
                if word.load(Ordering::Relaxed) != closed {
                    was_stored_to = Some(round);
                }
                subject.view.let_store(true);
            }
            is_done.store(true, Ordering::Relaxed);
            assert_eq!(was_stored_to, None, "{form:?}");
        });
    }
}

/// Where the file is mapped again, stores are not tracked until the next take.
#[test]
fn a_store_to_a_page_that_was_mapped_again_is_not_lost() {
    for form in forms() {
        let subject = Subject::new(PAGES * PAGE, 0..PAGES * PAGE, options(form, None));
        let view = &subject.view;
        let base = view.as_mut_ptr().addr();
        let word = |page: u64| {
            let place = base + (page * PAGE) as usize;
            // SAFETY: an aligned word inside the view, reached as an atomic only.
            unsafe { AtomicU64::from_ptr(place as *mut u64) }
        };
        for round in 1..4 {
            (0..PAGES).for_each(|page| word(page).store(round, Ordering::Relaxed));
            view.flush().unwrap();
        }
        let is_over = AtomicBool::new(false);
        let goes_on = || {
            if !is_over.swap(true, Ordering::Relaxed) {
                let file = open(&subject.path);
                file.set_len(100 * PAGE).unwrap();
                let load = || word(200).load(Ordering::Relaxed);
                assert!(view.mapping().guarded(&(200 * PAGE..201 * PAGE), load).is_err());
                file.set_len(PAGES * PAGE).unwrap();
                view.mapping().read_into(200 * PAGE, &mut [0; 8]).unwrap();
                word(200).store(77, Ordering::Relaxed);
            }
            true
        };
        view.make_room(u64::MAX, &goes_on).unwrap().unwrap();
        assert_eq!(word(200).load(Ordering::Relaxed), 77, "{form:?}");
        view.flush().unwrap();
        let mut there = [0; 8];
        open(&subject.path).read_exact_at(&mut there, 200 * PAGE).unwrap();
        assert_eq!(u64::from_ne_bytes(there), 77, "{form:?}");
    }
}

/// What another process writes beside a store stays, as in other pages whose copy a flush keeps.
#[test]
fn a_locked_copy_stays_by_itself_and_remembers_what_was_written() {
    for form in forms() {
        let subject = Subject::new(PAGES * PAGE, 0..PAGES * PAGE, options(form, None));
        let base = subject.view.as_mut_ptr();
        for page in 0..PAGES as usize {
            // SAFETY: a byte of the view.
            unsafe { base.add(page * PAGE as usize).write_volatile(3) };
        }
        let locked = base.wrapping_add(5 * PAGE as usize);
        // SAFETY: no preconditions.
        if unsafe { libc::mlock(locked.cast(), PAGE as usize) } != 0 {
            eprintln!("skipped: {}", std::io::Error::last_os_error());
            return;
        }
        assert_eq!(make_room(&subject).unwrap(), (PAGES - 1) * PAGE, "{form:?}");
        let file = open(&subject.path);
        file.write_all_at(b"theirs", 5 * PAGE + 100).unwrap();
        // SAFETY: a byte of the view.
        unsafe { locked.add(200).write_volatile(4) };
        subject.view.flush().unwrap();
        let mut there = [0; 101];
        file.read_exact_at(&mut there, 5 * PAGE + 100).unwrap();
        assert_eq!((&there[..6], there[100]), (&b"theirs"[..], 4), "{form:?}");
    }
}
