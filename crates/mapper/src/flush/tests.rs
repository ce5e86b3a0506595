//! What flushes write, and which errors they return.

use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_sys::lease::SoleOpener;
use aquifer_sys::memory::{self, cachestat};
use aquifer_testkit::rng::Rng;
use std::os::fd::AsFd;

use super::*;
use crate::error::FaultCause;
use crate::private::test_support::*;
use crate::private::{PrivateFile, PrivateOptions};

/// More than a piece, and not a multiple of the page size.
const FILE_BYTES: u64 = (17 << 20) + 1234;

/// Random stores, among bytes that other writers write. After each flush the file must equal the
/// model, and only pages stored to are written.
#[test]
fn flushes_write_exactly_the_pages_stored_to() {
    for form in forms() {
        for gap_pages in GAPS {
            let what = format!("{form:?} {gap_pages:?}");
            let options = options(form, gap_pages);
            let range = 3 * PAGE + 100..FILE_BYTES - 17;
            let mut subject = Subject::new(FILE_BYTES, range.clone(), options);
            let mut rng = Rng::new(9);
            let len_bytes = range.end - range.start;
            for round in 0..4 {
                // Few stores, many, many in one part, whole pages.
                let (count, reach) =
                    [(20, len_bytes), (1500, len_bytes), (900, 5 << 20), (5, len_bytes)][round];
                for _ in 0..count {
                    let mut bytes = vec![0; 1 + rng.below(9) as usize];
                    bytes.fill_with(|| rng.next_u64() as u8);
                    let offset = rng.below(reach - bytes.len() as u64);
                    let page = (range.start + offset) / PAGE;
                    // Every seventh page is for other writers.
                    if page % 7 == 3 || (page + 1) % 7 == 3 {
                        subject.write_to_file(page / 7 * 7 * PAGE + 3 * PAGE + 5, &bytes);
                    } else {
                        subject.store(offset, &bytes);
                    }
                }
                if round == 3 {
                    let all = vec![round as u8; len_bytes as usize];
                    subject.store(0, &all);
                }
                // The ends of the view, which are partial pages.
                subject.store(0, &[round as u8]);
                subject.store(len_bytes - 1, &[round as u8]);
                let dirty_pages = subject.dirty.len() as u64;
                assert_eq!(subject.view.dirty_bytes().unwrap(), dirty_pages * PAGE, "{what}");
                let flushed = subject.view.flush().unwrap();
                let what = format!("{what}, round {round}");
                assert_eq!(flushed.pages, dirty_pages, "{what}");
                let gaps_bytes = flushed.bytes_written - subject.dirty_view_bytes();
                let most_pages = gap_pages.unwrap_or(8);
                assert!(gaps_bytes <= dirty_pages * most_pages * PAGE, "{what}: {gaps_bytes}");
                subject.check(&what);
                subject.dirty.clear();
                assert_eq!(subject.view.flush().unwrap(), Flushed::default(), "{what}");
            }
            assert_eq!(subject.view.form().unwrap(), form, "{what}");
        }
    }
}

/// Runs a few pages apart are written in one call while the file is not open elsewhere. The gaps
/// keep what other writers wrote, also where a copy is left.
#[test]
fn gaps_are_written_along_but_not_over_what_others_wrote() {
    for form in forms() {
        for by_pointer in [false, true] {
            let what = format!("{form:?}, pointer {by_pointer}");
            let mut subject = Subject::new(64 * PAGE, 0..64 * PAGE, options(form, Some(1)));
            if by_pointer {
                subject.view.as_mut_ptr();
            }
            for page in [10, 12, 14] {
                subject.store(page * PAGE, &[1]);
            }
            let can_join = SoleOpener::stay(subject.view.mapping().file()).is_some();
            if !can_join {
                println!("no leases on this file system: nothing is written along");
            }
            // Where content is remembered, no gaps are written.
            let joins = form == TrackerForm::Scan && can_join;
            let flushed = subject.view.flush().unwrap();
            let written = if joins { 5 } else { 3 };
            assert_eq!((flushed.pages, flushed.bytes_written), (3, written * PAGE), "{what}");
            // With a pointer, the view keeps a copy of page 12, which another writer changes.
            subject.write_to_file(12 * PAGE, &[7; 100]);
            subject.store(11 * PAGE, &[2]);
            subject.store(13 * PAGE, &[2]);
            let flushed = subject.view.flush().unwrap();
            let written = if joins { 3 } else { 2 };
            assert_eq!((flushed.pages, flushed.bytes_written), (2, written * PAGE), "{what}");
            subject.check("page 12 is what others wrote");
            // Pages written before are written whole, and joined, if the file still has the last
            // written content.
            [10, 12, 14].iter().for_each(|page| subject.store(page * PAGE + 9, &[3; 5]));
            subject.store(16 * PAGE, &[3]);
            let other = open(&subject.path);
            assert_eq!(subject.view.flush().unwrap().pages, 4, "{what}");
            subject.check("all is written, though another has the file open");
            drop(other);
        }
    }
}

/// Another process has the file mapped shared and stores to pages in the gaps: the flush must not
/// overwrite its words with older ones.
#[test]
fn words_that_others_store_between_pages_that_are_written_are_kept() {
    const PAGES: u64 = 64;
    for by_pointer in [false, true] {
        let options = options(TrackerForm::best(), Some(3));
        let mut subject = Subject::new(PAGES * PAGE, 0..PAGES * PAGE, options);
        if by_pointer {
            subject.view.as_mut_ptr();
        }
        let file = open(&subject.path);
        let (len, protection) = ((PAGES * PAGE) as usize, memory::Protection::ReadWrite);
        let theirs = memory::map_file(len, protection, file.as_fd(), 0).unwrap();
        drop(file);
        let address = theirs as usize;
        let word = |page: u64, index: u64| {
            let address = address + (page * PAGE + index * 8) as usize;
            // SAFETY: an aligned word of the mapping, only used as this atomic.
            unsafe { AtomicU64::from_ptr(address as *mut u64) }
        };
        let ends = AtomicBool::new(false);
        let lost = std::thread::scope(|scope| {
            let storing = scope.spawn(|| {
                let mut value = 0;
                while !ends.load(Ordering::Relaxed) {
                    value += 1;
                    for page in (1..PAGES).step_by(2) {
                        for index in 0..512 {
                            let before = word(page, index).swap(value, Ordering::Relaxed);
                            if value > 1 && before != value - 1 {
                                return Some((page, index));
                            }
                        }
                    }
                }
                None
            });
            for round in 0..1500_u64 {
                (0..PAGES).step_by(2).for_each(|page| {
                    subject.store(page * PAGE, &round.to_le_bytes());
                });
                subject.view.flush().unwrap();
                if storing.is_finished() {
                    break;
                }
            }
            ends.store(true, Ordering::Relaxed);
            storing.join().unwrap()
        });
        // SAFETY: mapped above, and not used any more.
        unsafe { memory::unmap(theirs, len) }.unwrap();
        assert_eq!(lost, None, "page and word that had an older value again");
    }
}

#[test]
fn a_part_can_be_flushed() {
    for form in forms() {
        let mut subject = Subject::new(40 * PAGE, PAGE + 50..30 * PAGE, options(form, None));
        for page in [5, 6, 20] {
            subject.store(page * PAGE, &[1]);
        }
        let before = subject.file.clone();
        // An empty range, one of a byte, one across the border of two pages.
        assert_eq!(subject.view.flush_range(7 * PAGE..7 * PAGE).unwrap().pages, 0);
        assert_eq!(subject.view.flush_range(5 * PAGE..5 * PAGE + 1).unwrap().pages, 1);
        assert_eq!(subject.view.dirty_bytes().unwrap(), 2 * PAGE);
        let there = std::fs::read(&subject.path).unwrap();
        let (first, page_6) = (6 * PAGE as usize, 7 * PAGE as usize);
        assert_eq!(there[first..page_6], before[first..page_6], "page 5 of the view is there");
        let edge = 7 * PAGE - 50;
        assert_eq!(subject.view.flush_range(edge - 1..edge + 1).unwrap().pages, 1);
        assert_eq!(subject.view.flush().unwrap().pages, 1);
        subject.check("all of it");
        let outside = subject.view.flush_range(0..30 * PAGE).unwrap_err();
        assert!(matches!(outside, MapError::OutsideView { .. }), "{outside}");
    }
}

#[test]
fn flushed_pages_are_clean_in_the_page_cache() {
    for gap_pages in GAPS {
        let mut subject =
            Subject::new(4 << 20, 0..4 << 20, options(TrackerForm::best(), gap_pages));
        let file = open(&subject.path);
        file.sync_all().unwrap();
        (0..1024).step_by(3).for_each(|page| subject.store(page * PAGE, &[9; 10]));
        subject.view.flush().unwrap();
        let magic = aquifer_sys::file_system::magic(file.as_fd()).unwrap();
        match cachestat(file.as_fd(), 0, 4 << 20) {
            Err(error) => return println!("skipped: {error}"),
            Ok(_) if aquifer_sys::file_system::in_memory(magic).is_some() => {
                return println!("skipped: files in memory are never clean");
            }
            Ok(stat) => assert_eq!((stat.dirty, stat.writeback), (0, 0), "{gap_pages:?}"),
        }
    }
}

/// Stores through pointers during flushes: each is in a flush, or dirty for the next one.
#[test]
fn stores_during_flushes_are_not_lost() {
    const PAGES: u64 = 5000;
    for form in forms() {
        for gap_pages in GAPS {
            let subject = Subject::new(PAGES * PAGE, 0..PAGES * PAGE, options(form, gap_pages));
            let base = subject.view.as_mut_ptr() as usize;
            let word = |page: u64, thread: u64| {
                let address = (base + (page * PAGE + thread * 8) as usize) as *mut u64;
                // SAFETY: inside the mapping, aligned, only used as this atomic.
                unsafe { AtomicU64::from_ptr(address) }
            };
            let ends = AtomicBool::new(false);
            std::thread::scope(|scope| {
                for thread in 0..3 {
                    let ends = &ends;
                    scope.spawn(move || {
                        let mut rng = Rng::new(thread);
                        while !ends.load(Ordering::Relaxed) {
                            word(rng.below(PAGES), thread).fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
                for _ in 0..12 {
                    subject.view.flush().unwrap();
                }
                ends.store(true, Ordering::Relaxed);
            });
            subject.view.flush().unwrap();
            let there = std::fs::read(&subject.path).unwrap();
            for page in 0..PAGES {
                for thread in 0..3 {
                    let at = (page * PAGE + thread * 8) as usize;
                    let stored = word(page, thread).load(Ordering::Relaxed).to_le_bytes();
                    assert_eq!(there[at..at + 8], stored, "{form:?} {gap_pages:?} page {page}");
                }
            }
        }
    }
}

/// The same by calls, with all copies dropped after each flush.
#[test]
fn stores_are_not_lost_while_copies_are_dropped() {
    const PAGES: u64 = 300;
    for form in forms() {
        let subject = Subject::new(PAGES * PAGE, 0..PAGES * PAGE, options(form, None));
        let ends = AtomicBool::new(false);
        let mut stored = Vec::new();
        std::thread::scope(|scope| {
            let (view, ends) = (&subject.view, &ends);
            let threads: Vec<_> = (0..3)
                .map(|thread| {
                    scope.spawn(move || {
                        let mut rng = Rng::new(thread);
                        let mut last = vec![None; PAGES as usize];
                        while !ends.load(Ordering::Relaxed) {
                            let (page, value) = (rng.below(PAGES), rng.next_u64());
                            let mut now = [0; 8];
                            view.mapping().read_into(page * PAGE + thread * 8, &mut now).unwrap();
                            let expected = last[page as usize].unwrap_or(u64::from_le_bytes(now));
                            assert_eq!(u64::from_le_bytes(now), expected, "{form:?} page {page}");
                            view.set(page * PAGE + thread * 8, value).unwrap();
                            last[page as usize] = Some(value);
                        }
                        last
                    })
                })
                .collect();
            for _ in 0..150 {
                view.flush().unwrap();
            }
            ends.store(true, Ordering::Relaxed);
            stored.extend(threads.into_iter().map(|thread| thread.join().unwrap()));
        });
        subject.view.flush().unwrap();
        assert_eq!(subject.view.private_bytes().unwrap(), 0, "{form:?}");
        let there = std::fs::read(&subject.path).unwrap();
        for (thread, last) in stored.iter().enumerate() {
            for (page, value) in last.iter().enumerate() {
                let at = page * PAGE as usize + thread * 8;
                if let Some(value) = value {
                    assert_eq!(there[at..at + 8], value.to_le_bytes(), "{form:?} page {page}");
                }
            }
        }
    }
}

#[test]
fn copies_stay_once_a_pointer_is_out() {
    for form in forms() {
        let mut subject = Subject::new(100 * PAGE, 0..100 * PAGE, options(form, None));
        (0..60).for_each(|page| subject.store(page * PAGE, &[3]));
        subject.view.flush().unwrap();
        assert_eq!(subject.view.private_bytes().unwrap(), 0, "{form:?}");
        subject.view.as_mut_ptr();
        (0..60).for_each(|page| subject.store(page * PAGE, &[5]));
        subject.view.flush().unwrap();
        assert_eq!(subject.view.private_bytes().unwrap(), 60 * PAGE, "{form:?}");
        subject.check("after all");
    }
}

/// Two writers take turns: one stores and flushes, then the other writes. Neither loses bytes,
/// however the first one stores and hands over.
#[test]
fn two_writers_that_take_turns_both_keep_their_bytes() {
    for form in forms() {
        for by_pointer in [false, true] {
            for writes_out in [false, true] {
                let what = format!("{form:?}, pointer {by_pointer}, write_out {writes_out}");
                let range = 100..20 * PAGE - 7;
                let mut subject = Subject::new(20 * PAGE, range.clone(), options(form, None));
                let base = by_pointer.then(|| subject.view.as_mut_ptr());
                let mut rng = Rng::new(3);
                for round in 0..60 {
                    for _ in 0..1 + rng.below(5) {
                        let most = if rng.chance(0.1) { 9000 } else { 20 };
                        let at = range.start + rng.below(range.end - range.start - most);
                        let mut bytes = vec![0; 1 + rng.below(most) as usize];
                        bytes.fill_with(|| rng.next_u64() as u8);
                        if round % 2 == 1 {
                            subject.write_to_file(at, &bytes);
                            continue;
                        }
                        // Through a pointer, a store that changes nothing does not count.
                        let offset = at - range.start;
                        let mut here = vec![0; bytes.len()];
                        subject.view.mapping().read_into(offset, &mut here).unwrap();
                        let differ = bytes.iter_mut().zip(&here);
                        differ.filter(|(new, old)| new == old).for_each(|(new, _)| *new ^= 1);
                        match base {
                            None => subject.store(offset, &bytes),
                            Some(base) => {
                                subject.file[at as usize..][..bytes.len()].copy_from_slice(&bytes);
                                for (index, byte) in bytes.iter().enumerate() {
                                    let address = base.wrapping_add(offset as usize + index);
                                    // SAFETY: inside the view.
                                    unsafe { address.write_volatile(*byte) };
                                }
                            }
                        }
                    }
                    if round % 2 == 0 && writes_out && rng.chance(0.7) {
                        subject.view.write_out().unwrap();
                    } else if round % 2 == 0 {
                        subject.view.flush().unwrap();
                    }
                    subject.check(&format!("{what}, round {round}"));
                }
            }
        }
    }
}

/// After a flush the view shows the file, including other writers' changes to pages that were
/// stored to.
#[test]
fn what_others_write_shows_after_a_flush() {
    for form in forms() {
        let mut subject = Subject::new(100 * PAGE, 0..100 * PAGE, options(form, None));
        (0..60).for_each(|page| subject.store(page * PAGE, &[3]));
        subject.view.flush().unwrap();
        assert_eq!(subject.view.private_bytes().unwrap(), 0, "{form:?}");
        (0..60).for_each(|page| subject.write_to_file(page * PAGE, &[4]));
        let mut byte = [0];
        for page in 0..60 {
            subject.view.mapping().read_into(page * PAGE, &mut byte).unwrap();
            assert_eq!(byte, [4], "{form:?}, page {page}");
        }
        assert_eq!(subject.view.flush().unwrap().pages, 0, "{form:?}");
        // A new copy counts as a store, even if it holds what was written before.
        (0..60).for_each(|page| subject.store(page * PAGE, &[3]));
        assert_eq!(subject.view.flush().unwrap().pages, 60, "{form:?}");
        subject.check("after all");
    }
}

/// Copies in locked memory cannot be dropped and hide the file, but no other writer's bytes are
/// overwritten.
#[test]
fn copies_in_locked_memory_stay_and_what_others_write_stays_too() {
    for form in forms() {
        let mut subject = Subject::new(8 * PAGE, 0..8 * PAGE, options(form, None));
        let base = subject.view.mapping().base();
        // SAFETY: inside the mapping; contents stay.
        if unsafe { libc::mlock(base.cast(), 8 * PAGE as usize) } != 0 {
            return println!("skipped: {}", std::io::Error::last_os_error());
        }
        for round in 1..5 {
            subject.store(2 * PAGE + 8 * round, &[round as u8]);
            subject.view.flush().unwrap();
            subject.write_to_file(2 * PAGE + 8 * round + 1, &[round as u8]);
            subject.check(&format!("{form:?}, round {round}"));
        }
        assert!(subject.view.private_bytes().unwrap() >= PAGE, "{form:?}");
    }
}

#[test]
fn a_file_that_was_cut_short_is_named_and_not_made_longer() {
    for form in forms() {
        for gap_pages in GAPS {
            let what = format!("{form:?} {gap_pages:?}");
            let mut subject = Subject::new(100 * PAGE, 0..100 * PAGE - 5, options(form, gap_pages));
            [3, 50, 60, 61, 99].iter().for_each(|page| subject.store(page * PAGE + 9, &[1; 50]));
            // In the middle of page 60.
            open(&subject.path).set_len(60 * PAGE + 20).unwrap();
            for _ in 0..2 {
                let error = subject.view.flush().unwrap_err();
                match error {
                    MapError::Flush { range, cause: FlushCause::Truncated, .. } => {
                        assert_eq!(range.start, 60 * PAGE, "{what}");
                    }
                    error => panic!("{what}: {error}"),
                }
                subject.file.truncate((60 * PAGE + 20) as usize);
                let there = std::fs::read(&subject.path).unwrap();
                assert_eq!(there.len(), subject.file.len(), "{what}");
                assert_eq!(there[..60 * PAGE as usize], subject.file[..60 * PAGE as usize]);
            }
            let lost = subject.view.write_at(70 * PAGE, &[1]).unwrap_err();
            assert!(
                matches!(lost, MapError::Fault { cause: FaultCause::Truncated, .. }),
                "{what}: {lost}"
            );
            // Stores behind the end are lost; page 60 is kept.
            open(&subject.path).set_len(100 * PAGE).unwrap();
            subject.view.flush().unwrap();
            subject.file.truncate(60 * PAGE as usize);
            let mut page_60 = [0; PAGE as usize];
            subject.view.mapping().read_into(60 * PAGE, &mut page_60).unwrap();
            subject.file.extend_from_slice(&page_60);
            subject.file.resize(100 * PAGE as usize, 0);
            subject.check(&what);
        }
    }
}

/// At any moment the outcome is success or an error, and never a signal.
#[test]
fn a_file_cut_short_and_lengthened_all_the_time_gives_errors_at_worst() {
    for form in forms() {
        for gap_pages in GAPS {
            let pages = 2000;
            let subject = Subject::new(pages * PAGE, 0..pages * PAGE, options(form, gap_pages));
            let ends = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let file = open(&subject.path);
                    let mut rng = Rng::new(5);
                    while !ends.load(Ordering::Relaxed) {
                        file.set_len(rng.below(pages * PAGE)).unwrap();
                        file.set_len(pages * PAGE).unwrap();
                    }
                });
                let mut rng = Rng::new(6);
                for round in 0..20u64 {
                    for _ in 0..200 {
                        match subject.view.set(rng.below(pages) * PAGE, round) {
                            Ok(()) | Err(MapError::Fault { .. }) => {}
                            Err(error) => panic!("{form:?} {gap_pages:?}: {error}"),
                        }
                    }
                    match subject.view.flush() {
                        Ok(_) | Err(MapError::Flush { .. }) => {}
                        Err(error) => panic!("{form:?} {gap_pages:?}: {error}"),
                    }
                }
                ends.store(true, Ordering::Relaxed);
            });
            subject.view.flush().unwrap();
        }
    }
}

#[test]
fn a_full_disk_is_named_and_the_next_flush_tries_again() {
    for kind in [Kind::Tmpfs, Kind::Ext4] {
        let Some(small) = SmallFileSystem::new(kind) else { return };
        for form in forms() {
            for gap_pages in GAPS {
                let what = format!("{kind:?} {form:?} {gap_pages:?}");
                let root = small.root();
                let mut subject = Subject::new_in(&root, PAGE, 0..PAGE, options(form, gap_pages));
                // Page 0 has blocks, the rest is a hole.
                subject.view.grow(PAGE).unwrap();
                let file = open(&subject.path);
                file.set_len(64 * PAGE).unwrap();
                file.sync_all().unwrap();
                subject.file.resize(64 * PAGE as usize, 0);
                let view = PrivateFile::new(
                    place(64 * PAGE),
                    &file,
                    &subject.path,
                    0..64 * PAGE,
                    options(form, gap_pages),
                );
                subject.view = view.unwrap();
                subject.range = 0..64 * PAGE;
                let ballast = Ballast::fill(&root);
                if kind == Kind::Tmpfs {
                    // On tmpfs even a load from a hole needs space.
                    let full = subject.view.write_at(20 * PAGE, &[8; 20]).unwrap_err();
                    let no_space = FaultCause::NoSpace;
                    assert!(matches!(full, MapError::Fault { cause, .. } if cause == no_space));
                    drop(ballast);
                    subject.store(20 * PAGE, &[8; 20]);
                    subject.view.flush().unwrap();
                    subject.check(&what);
                    continue;
                }
                [0, 20, 21, 40].iter().for_each(|page| subject.store(page * PAGE, &[8; 20]));
                for _ in 0..2 {
                    match subject.view.flush().unwrap_err() {
                        MapError::Flush { range, cause: FlushCause::NoSpace, .. } => {
                            assert!((20 * PAGE..41 * PAGE).contains(&range.start), "{what}");
                        }
                        error => panic!("{what}: {error}"),
                    }
                    let dirty_pages = subject.view.dirty_bytes().unwrap() / PAGE;
                    assert!((1..=3).contains(&dirty_pages), "{what}: {dirty_pages}");
                }
                drop(ballast);
                let flushed = subject.view.flush().unwrap();
                assert!((1..=3).contains(&flushed.pages), "{what}: {flushed:?}");
                subject.check(&what);
            }
        }
    }
}

/// The device loses cached pages: the kernel reports it once, and marks the pages clean.
#[test]
fn what_the_device_lost_is_written_again() {
    let Some(small) = SmallFileSystem::new(Kind::Ext4OnSparse) else { return };
    for form in forms() {
        for gap_pages in GAPS {
            // With a pointer, the written content is known, but no longer used.
            let by_pointer = gap_pages == Some(0);
            let what = format!("{form:?} {gap_pages:?}");
            // Keep the files: freed blocks would be reused by the next file, and the device has
            // room for those.
            let path = small.root().join(&what);
            // Blocks that the file system has allocated to the file, and for which the device has
            // no room.
            let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path);
            let file = file.unwrap();
            aquifer_sys::io::allocate(file.as_fd(), 0, 4 << 20).unwrap();
            file.write_all_at(&[1; PAGE as usize], 0).unwrap();
            file.sync_all().unwrap();
            let view = PrivateFile::new(
                place(4 << 20),
                &file,
                &path,
                0..(4 << 20) - 100,
                options(form, gap_pages),
            );
            let view = view.unwrap();
            let ballast = Ballast::fill(&small.device());
            // The file's pages are mapped, here and elsewhere.
            let mut all = vec![0; (4 << 20) - 100];
            view.mapping().read_into(0, &mut all).unwrap();
            if by_pointer {
                view.as_mut_ptr();
            }
            // The last page is not written past the page cache: it is only partly in the view.
            let pages = [3, 200, 201, 900, 1023];
            pages.iter().for_each(|page| view.write_at(page * PAGE, &[6; 30]).unwrap());
            let error = view.flush().unwrap_err();
            assert!(matches!(error, MapError::Flush { .. }), "{what}: {error}");
            assert_eq!(view.dirty_bytes().unwrap(), 5 * PAGE, "{what}: all of it again");
            drop(ballast);
            // The failed flush waited for all of its I/O: none of it is reported again.
            let flushed = view.flush().unwrap();
            assert_eq!((flushed.pages, flushed.bytes_written), (5, 5 * PAGE - 100), "{what}");
            // This description has not reported the failure yet.
            let _ = file.sync_all();
            file.sync_all().unwrap();
            aquifer_sys::memory::drop_cached(file.as_fd(), 0, 4 << 20).unwrap();
            for page in &pages[..4] {
                let mut bytes = [0; 30];
                file.read_exact_at(&mut bytes, page * PAGE).unwrap();
                assert_eq!(bytes, [6; 30], "{what}");
            }
        }
    }
}

#[test]
fn write_back_goes_round_and_keeps_to_its_measure() {
    for form in forms() {
        let mut subject = Subject::new(100 * PAGE, 0..100 * PAGE, options(form, None));
        (0..100).step_by(2).for_each(|page| subject.store(page * PAGE, &[1]));
        for left in [30, 10] {
            assert_eq!(subject.view.write_back(20 * PAGE).unwrap(), Some(20 * PAGE), "{form:?}");
            assert_eq!(subject.view.dirty_bytes().unwrap(), left * PAGE, "{form:?}");
        }
        // New dirty pages at the start come after those that wait.
        subject.store(0, &[2]);
        assert_eq!(subject.view.dirty_bytes().unwrap(), 11 * PAGE, "{form:?}");
        assert_eq!(subject.view.write_back(10 * PAGE).unwrap(), Some(10 * PAGE));
        let mut byte = [0];
        open(&subject.path).read_exact_at(&mut byte, 98 * PAGE).unwrap();
        assert_eq!(byte, [1], "{form:?}");
        // Of a page written before, only the bytes that differ are written.
        assert_eq!(subject.view.write_back(10 * PAGE).unwrap(), Some(1), "{form:?}");
        assert_eq!(subject.view.write_back(10 * PAGE).unwrap(), Some(0), "{form:?}");
        subject.check("before the flush");
        // Nothing is left to write, only to make durable.
        let file = open(&subject.path);
        assert_eq!(subject.view.flush().unwrap(), Flushed::default(), "{form:?}");
        if let Ok(stat) = cachestat(file.as_fd(), 0, 0)
            && aquifer_sys::file_system::magic(file.as_fd())
                .is_ok_and(|magic| aquifer_sys::file_system::in_memory(magic).is_none())
        {
            assert_eq!((stat.dirty, stat.writeback), (0, 0), "{form:?}");
        }
    }
}

/// Dense stores make the flush measure the folios, which determines the gaps it writes.
#[test]
fn folios_are_asked_for() {
    let mut subject = Subject::new(4 << 20, 0..4 << 20, PrivateOptions::default());
    open(&subject.path).sync_all().unwrap();
    (0..1024).step_by(3).for_each(|page| subject.store(page * PAGE, &[9; 10]));
    let flushed = subject.view.flush().unwrap();
    assert_eq!(flushed.pages, 342);
    match subject.view.folio_bytes().unwrap() {
        None => {
            println!("skipped: no accounts, or pages were dirty");
            assert_eq!(flushed.bytes_written, 342 * PAGE, "nothing between is written along");
        }
        Some(bytes) => {
            assert!((PAGE..=16 << 20).contains(&bytes), "{bytes}");
            assert!((342 * PAGE..=4 << 20).contains(&flushed.bytes_written), "{flushed:?}");
        }
    }
    subject.check("with samples");
}

#[test]
fn files_in_memory_and_files_opened_to_append_are_flushed() {
    for parent in ["/dev/shm", "/tmp"].map(Path::new) {
        if !parent.is_dir() {
            println!("skipped {}", parent.display());
            continue;
        }
        for form in forms() {
            for gap_pages in GAPS {
                let range = 0..300 * PAGE;
                let mut subject =
                    Subject::new_in(parent, 300 * PAGE, range, options(form, gap_pages));
                let appending = std::fs::File::options()
                    .read(true)
                    .append(true)
                    .custom_flags(libc::O_SYNC)
                    .open(&subject.path);
                let view = PrivateFile::new(
                    place(300 * PAGE),
                    &appending.unwrap(),
                    &subject.path,
                    0..300 * PAGE,
                    options(form, gap_pages),
                );
                subject.view = view.unwrap();
                (0..300).step_by(7).for_each(|page| subject.store(page * PAGE + 5, b"appended?"));
                assert_eq!(subject.view.flush().unwrap().pages, 43);
                subject.check("nothing was appended");
            }
        }
    }
}

#[test]
fn a_file_that_cannot_be_written_is_refused_when_it_is_mapped() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    std::fs::write(&path, [0; 5000]).unwrap();
    // Read-only even for the superuser.
    let image = std::fs::File::open("/proc/self/exe").unwrap();
    let made = |file: &std::fs::File, range| {
        PrivateFile::new(place(2 * PAGE), file, &path, range, PrivateOptions::default()).map(drop)
    };
    assert!(matches!(made(&image, 0..5000), Err(MapError::Open { .. })));
    let file = open(&path);
    // A range that does not fit the place is an error of the caller.
    let too_long = 0..1 << 40;
    assert!(matches!(made(&file, too_long), Err(MapError::Map { .. })));
    made(&file, 0..5000).unwrap();
}
