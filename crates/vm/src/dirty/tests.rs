//! Trackers in particular situations; see `model_tests` for random ones.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use aquifer_sys::memory::{self, Protection, SMALL_PAGE_BYTES};

use super::pieces::State;
use super::test_support::{PAGES_PER_PIECE, Source, Subject, Way, can_scan, combinations, word};
use super::*;
use crate::fixed::{FixedRange, random_base};

#[test]
fn every_second_page_is_more_than_one_answer_of_the_kernel() {
    for (source, way) in combinations() {
        let mut subject = Subject::new(source, way, 3 * PAGES_PER_PIECE);
        let stored: Vec<u64> = (0..subject.pages()).step_by(2).collect();
        for round in 0..6 {
            stored.iter().for_each(|&page| subject.store(page));
            assert_eq!(subject.commit(), stored, "{source:?} {way:?}, round {round}");
        }
        assert_eq!(subject.commit(), []);
        assert_eq!(subject.tracker.private_pages().unwrap(), stored.len() as u64);
        assert_eq!(subject.tracker.known_private_pages(), stored.len() as u64);
    }
}

#[test]
fn pages_that_were_only_loaded_are_not_reported() {
    for (source, way) in combinations() {
        let mut subject = Subject::new(source, way, 2 * PAGES_PER_PIECE);
        for round in 0..8 {
            for page in (round * 50..subject.pages()).step_by(3) {
                subject.load(page);
            }
            let stored = 11 * round;
            subject.store(stored);
            assert_eq!(subject.commit(), [stored], "{source:?} {way:?}");
        }
    }
}

#[test]
fn what_is_given_back_is_reported_again_with_what_is_new() {
    for (source, way) in combinations() {
        let mut subject = Subject::new(source, way, 100);
        (10..20).for_each(|page| subject.store(page));
        let runs = subject.take().unwrap();
        assert_eq!(runs, [PageRun::new(10..20)]);
        subject.tracker.give_back(&runs);
        subject.store(15);
        subject.store(20);
        subject.store(3);
        let expected = [PageRun::new(3..4), PageRun::new(10..21)];
        assert_eq!(subject.take().unwrap(), expected, "{source:?} {way:?}");
        subject.tracker.give_back(&expected);
        assert_eq!(subject.commit(), [3].into_iter().chain(10..21).collect::<Vec<_>>());
        assert_eq!(subject.commit(), []);
    }
}

#[test]
fn only_clean_copies_are_dropped_and_later_stores_to_them_reported() {
    for (source, way) in combinations() {
        let mut subject = Subject::new(source, way, PAGES_PER_PIECE + 50);
        (0..60).for_each(|page| subject.store(page));
        subject.commit();
        let failed: Vec<u64> = (20..30).collect();
        failed.iter().for_each(|&page| subject.store(page));
        let runs = subject.take().unwrap();
        subject.tracker.give_back(&runs);
        (30..40).for_each(|page| subject.store(page));
        let before: Vec<u64> = (0..subject.pages()).map(|page| subject.load(page)).collect();

        let dropped = subject.drop_clean(u64::MAX, &mut |page| page != 45);
        let expected = if source == Source::Anonymous { 0 } else { 39 };
        assert_eq!(dropped, expected, "{source:?} {way:?}");
        assert_eq!(subject.private_in_smaps(), 60 - expected);
        if (source, way) != (Source::Anonymous, Way::CompareEntries) {
            // There, pages that were only loaded count as private.
            assert_eq!(subject.tracker.private_pages().unwrap(), 60 - expected);
        }
        let after: Vec<u64> = (0..subject.pages()).map(|page| subject.load(page)).collect();
        assert_eq!(before, after);

        subject.store(5);
        subject.store(45);
        let expected = [5].into_iter().chain(20..40).chain([45]).collect::<Vec<_>>();
        assert_eq!(subject.commit(), expected, "{source:?} {way:?}");
    }
}

#[test]
fn successive_drops_go_round() {
    for (source, way) in combinations().into_iter().filter(|(source, _)| *source == Source::Storage)
    {
        let mut subject = Subject::new(source, way, 200);
        (0..200).for_each(|page| subject.store(page));
        subject.commit();
        let mut asked = Vec::new();
        assert_eq!(
            subject.drop_clean(70, &mut |page| {
                asked.push(page);
                true
            }),
            70
        );
        assert_eq!(
            subject.drop_clean(70, &mut |page| {
                asked.push(page);
                true
            }),
            70
        );
        assert_eq!(asked, (0..140).collect::<Vec<_>>());
        subject.store(10);
        subject.commit();
        assert_eq!(subject.drop_clean(70, &mut |_| true), 61, "{way:?}");
        assert_eq!(subject.tracker.known_private_pages(), 0);
    }
}

#[test]
fn a_new_baseline_forgets_what_was_stored() {
    for (source, way) in combinations() {
        let mut subject = Subject::new(source, way, 2 * PAGES_PER_PIECE);
        (0..subject.pages()).step_by(3).for_each(|page| subject.store(page));
        subject.tracker.give_back(&[PageRun::new(4..5)]);
        subject.tracker.reset_baseline().unwrap();
        for page in 0..subject.pages() {
            subject.committed[page as usize] = subject.load(page);
        }
        assert_eq!(subject.take().unwrap(), [], "{source:?} {way:?}");
        subject.store(6);
        subject.store(7);
        assert_eq!(subject.take().unwrap(), [PageRun::new(6..8)], "{source:?} {way:?}");
    }
}

/// Tests read(2) into the mapping, and an O_DIRECT read, which stores through pinned pages.
#[test]
fn stores_by_system_calls_are_reported() {
    for (source, way) in combinations() {
        let mut subject = Subject::new(source, way, 64);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 4 * SMALL_PAGE_BYTES]).unwrap();
        file.sync_all().unwrap();
        let direct = File::options()
            .read(true)
            .custom_flags_direct()
            .open(format!("/proc/self/fd/{}", file.as_raw_fd()));
        for round in 0u64..4 {
            let mut expected = vec![2 + round];
            read_into(&subject, &file, 2 + round);
            match &direct {
                Ok(direct) => {
                    read_into(&subject, direct, 20 + round);
                    expected.push(20 + round);
                }
                Err(error) => println!("skipped O_DIRECT: {error}"),
            }
            subject.store(50);
            expected.push(50);
            assert_eq!(subject.commit(), expected, "{source:?} {way:?}");
            // Again, into pages that are now protected.
            file.write_all_at(&[8 + round as u8; SMALL_PAGE_BYTES], 0).unwrap();
            file.sync_all().unwrap();
            read_into(&subject, &file, 2 + round);
            if let Ok(direct) = &direct {
                read_into(&subject, direct, 20 + round);
            }
            expected.pop();
            assert_eq!(subject.commit(), expected, "{source:?} {way:?}");
            file.write_all_at(&[7; SMALL_PAGE_BYTES], 0).unwrap();
        }
    }
}

fn read_into(subject: &Subject, file: &File, page: u64) {
    let target = subject.range.address().wrapping_add(page as usize * SMALL_PAGE_BYTES);
    // SAFETY: a page inside the mapping, to which no references exist.
    let got = unsafe { libc::pread(file.as_raw_fd(), target.cast(), SMALL_PAGE_BYTES, 0) };
    assert_eq!(got, SMALL_PAGE_BYTES as isize);
}

trait Direct {
    fn custom_flags_direct(&mut self) -> &mut Self;
}

impl Direct for std::fs::OpenOptions {
    fn custom_flags_direct(&mut self) -> &mut Self {
        use std::os::unix::fs::OpenOptionsExt;
        self.custom_flags(libc::O_DIRECT)
    }
}

#[test]
fn pieces_whose_entries_are_all_there_take_the_short_cut() {
    if !can_scan() {
        return;
    }
    for (source, way) in combinations().into_iter().filter(|(_, way)| *way == Way::Scan) {
        // Three whole pieces between two partial ones.
        let mut subject = Subject::new(source, way, 4 * PAGES_PER_PIECE);
        let pages = subject.pages();
        (0..pages - 600).for_each(|page| _ = subject.load(page));
        subject.store(1000);
        assert_eq!(subject.commit(), [1000]);
        assert_eq!(subject.state_of(1000), State::Armed);
        (0..70).for_each(|_| assert_eq!(subject.commit(), []));
        assert_eq!(subject.state_of(1000), State::Full, "{source:?}");
        assert_eq!(subject.state_of(0), State::Full, "{source:?}");
        assert_eq!(subject.state_of(pages - 1), State::Cold, "{source:?}");
        subject.store(pages - 600);
        assert_eq!(subject.commit(), [pages - 600]);
        (0..70).for_each(|_| _ = subject.commit());
        assert_eq!(subject.state_of(pages - 600), State::Armed, "most of it is not there");
        for page in [1000, 1001, 3, pages - 1] {
            subject.store(page);
            assert_eq!(subject.commit(), [page], "{source:?}");
        }
        subject.drop_clean(2, &mut |_| true);
        for page in [1000, 3] {
            subject.load(1000);
            subject.store(page);
            assert_eq!(subject.commit(), [page], "{source:?}");
        }
    }
}

/// Direct writes remove the file's pages from all mappings, and leave no marker.
#[test]
fn pages_thrown_out_of_the_page_cache_are_not_reported() {
    if !can_scan() {
        return;
    }
    let mut subject = Subject::new(Source::Storage, Way::Scan, 2 * PAGES_PER_PIECE);
    (0..subject.pages()).for_each(|page| _ = subject.load(page));
    subject.store(400);
    (0..9).for_each(|_| _ = subject.commit());
    assert_eq!(subject.state_of(300), State::Full);
    let path = format!("/proc/self/fd/{}", subject.file.as_ref().unwrap().as_raw_fd());
    let direct = match File::options().write(true).custom_flags_direct().open(path) {
        Ok(direct) => direct,
        Err(error) => return println!("skipped: {error}"),
    };
    // The current content of the page, from aligned memory.
    let scratch = memory::map_anonymous(SMALL_PAGE_BYTES).unwrap();
    // SAFETY: the page was mapped above.
    unsafe { scratch.cast::<u64>().write(subject.committed[300]) };
    // SAFETY: writes one page of readable memory.
    let put = unsafe {
        let offset = 300 * SMALL_PAGE_BYTES as libc::off_t;
        libc::pwrite(direct.as_raw_fd(), scratch.cast(), SMALL_PAGE_BYTES, offset)
    };
    // SAFETY: no other code uses the page.
    unsafe { memory::unmap(scratch, SMALL_PAGE_BYTES).unwrap() };
    assert_eq!(put, SMALL_PAGE_BYTES as isize);
    assert_eq!(subject.commit(), []);
    subject.load(300);
    assert_eq!(subject.commit(), []);
    subject.store(300);
    assert_eq!(subject.commit(), [300]);
}

#[test]
fn swapped_pages_are_reported_and_stay_tracked() {
    if !can_scan() {
        return;
    }
    for source in [Source::Storage, Source::Anonymous] {
        let mut subject = Subject::new(source, Way::Scan, 64);
        let page_out = |subject: &Subject, page: u64| {
            let address = subject.range.address().wrapping_add(page as usize * SMALL_PAGE_BYTES);
            let map = Pagemap::open().unwrap();
            // Reclaim may fail temporarily for a page that was just brought in or is being written.
            (0..1000).any(|_| {
                // SAFETY: one page of the mapping; its content stays.
                unsafe { libc::madvise(address.cast(), SMALL_PAGE_BYTES, libc::MADV_PAGEOUT) };
                std::thread::yield_now();
                map.present(address, &mut [0]).unwrap() == 0
            })
        };
        subject.store(5);
        if !page_out(&subject, 5) {
            return println!("skipped: no swap to page out to");
        }
        assert_eq!(subject.commit(), [5], "first stored to, then swapped out");
        assert!(page_out(&subject, 5));
        assert_eq!(subject.commit(), []);
        assert_eq!(subject.tracker.private_pages().unwrap(), 1);
        subject.load(5);
        assert_eq!(subject.commit(), []);
        assert!(page_out(&subject, 5));
        subject.store(5);
        assert!(page_out(&subject, 5));
        subject.store(6);
        assert!(page_out(&subject, 6));
        subject.store(7);
        assert_eq!(subject.commit(), [5, 6, 7]);
        assert!(page_out(&subject, 6));
        let dropped = subject.drop_clean(9, &mut |_| true);
        assert_eq!(dropped, if source == Source::Anonymous { 0 } else { 3 });
        subject.store(6);
        assert_eq!(subject.commit(), [6]);
    }
}

#[test]
fn scattered_stores_do_not_use_up_the_mappings() {
    if !can_scan() {
        return;
    }
    let pieces = 700;
    let mut subject = Subject::new(Source::Anonymous, Way::Scan, pieces * PAGES_PER_PIECE);
    let mut stored: Vec<u64> = (0..pieces).step_by(2).map(|n| n * PAGES_PER_PIECE + n).collect();
    for half in [100, stored.len()] {
        stored[..half].to_vec().iter().for_each(|&page| subject.store(page));
        assert_eq!(subject.commit(), stored[..half]);
        assert!(subject.mappings() <= 513, "{} mappings", subject.mappings());
    }
    assert_eq!(subject.mappings(), 1, "all is tracked");
    stored.truncate(20);
    stored.iter().for_each(|&page| subject.store(page));
    assert_eq!(subject.commit(), stored);
}

/// Whatever call the kernel refuses, the pages that the scan found before must not be lost.
#[test]
fn a_scan_that_fails_goes_over_to_comparing() {
    if !can_scan() {
        return;
    }
    let mut subject = Subject::new(Source::Storage, Way::Scan, 6 * PAGES_PER_PIECE);
    (0..subject.pages()).for_each(|page| subject.store(page));
    (0..9).for_each(|_| _ = subject.commit());
    assert_eq!(subject.state_of(1500), State::Full);
    let stored = [100, 700, 1500, 1501, 3000];
    stored.iter().for_each(|&page| subject.store(page));
    // Ends the tracking of a piece in the middle.
    let addresses = subject.tracker.range.addresses_of(3..4);
    let uffd = subject.tracker.scan.as_ref().unwrap().tracking().unwrap();
    uffd.unregister(addresses.start as *mut u8, addresses.len()).unwrap();
    assert_eq!(subject.commit(), stored);
    assert_eq!(subject.tracker.form(), TrackerForm::Compare);
    subject.store(9);
    assert_eq!(subject.commit(), [9]);
}

/// Lost tracking that does not make the scan fail is set up again.
#[test]
fn a_piece_that_lost_its_tracking_is_armed_again() {
    if !can_scan() {
        return;
    }
    let mut subject = Subject::new(Source::Storage, Way::Scan, 6 * PAGES_PER_PIECE);
    [700, 1500, 3000].iter().for_each(|&page| subject.store(page));
    subject.commit();
    let addresses = subject.tracker.range.addresses_of(3..4);
    let uffd = subject.tracker.scan.as_ref().unwrap().tracking().unwrap();
    uffd.unregister(addresses.start as *mut u8, addresses.len()).unwrap();
    subject.store(1501);
    let taken = subject.commit();
    assert!(taken.contains(&1501), "{taken:?}");
    assert_eq!(subject.commit(), []);
    subject.store(1501);
    assert_eq!(subject.commit(), [1501]);
    assert_eq!(subject.tracker.form(), TrackerForm::Scan);
}

#[test]
fn an_error_forgets_nothing_that_was_pending() {
    for (source, way) in combinations() {
        let mut subject = Subject::new(source, way, 64);
        subject.store(1);
        subject.store(9);
        let mut calls = 0;
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut is_changed = |_| {
                calls += 1;
                assert!(calls < 2, "a failing comparison");
                true
            };
            subject.tracker.take(Stores::Excluded, &mut is_changed, &mut Vec::new())
        }));
        // Only comparing calls `is_changed`.
        if let Ok(result) = result {
            result.unwrap();
            assert!(matches!(way, Way::Scan | Way::ScanFaulted));
            subject.tracker.give_back(&[PageRun::new(1..2), PageRun::new(9..10)]);
        }
        assert_eq!(subject.commit(), [1, 9], "{source:?} {way:?}");
    }
}

#[test]
fn a_mapping_whose_pages_look_like_copies_is_compared() {
    let range = |page| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 * SMALL_PAGE_BYTES as u64).unwrap();
        let len_bytes = 8 * SMALL_PAGE_BYTES as u64;
        let base = random_base(len_bytes, &[]).unwrap();
        let access = Protection::ReadWrite;
        let range = FixedRange::map_private(base, len_bytes, access, file.as_fd(), 0).unwrap();
        word(range.address(), 8, page).store(1, Ordering::Relaxed);
        let kind = TrackedKind::PrivateFile;
        // SAFETY: a private mapping that no other code uses.
        let tracker = unsafe { DirtyTracker::new(range.address(), len_bytes, None, kind) };
        tracker.unwrap().form()
    };
    // A copy of the first page looks like a file on DAX, where the kernel cannot distinguish
    // copies.
    assert_eq!(range(0), TrackerForm::Compare);
    assert_eq!(range(1), TrackerForm::best());
}

#[test]
fn a_forked_child_cannot_use_its_parents_tracker() {
    for (source, way) in combinations() {
        let mut subject = Subject::new(source, way, 8);
        subject.store(3);
        subject.commit();
        subject.store(4);
        // SAFETY: the child only makes system calls and leaves with `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut yes = |_: PageIndex| true;
            let tracker = &mut subject.tracker;
            let mut used =
                i32::from(tracker.take(subject.stores, &mut yes, &mut Vec::new()).is_ok());
            used |= i32::from(tracker.private_pages().is_ok()) << 1;
            used |= i32::from(tracker.reset_baseline().is_ok()) << 2;
            // SAFETY: refused in a child before anything is done.
            let dropped = unsafe { tracker.drop_clean(1, &mut |_| false, &mut |_| true) };
            used |= i32::from(dropped.is_ok()) << 3;
            drop(subject);
            // SAFETY: ends the child without running the test harness's exit handlers.
            unsafe { libc::_exit(used) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0), "{source:?} {way:?}");
        assert_eq!(subject.commit(), [4], "the parent's tracker still works");
    }
}

#[test]
fn ranges_that_are_not_whole_pages_are_refused() {
    let page = memory::map_anonymous(2 * SMALL_PAGE_BYTES).unwrap();
    for (offset, len_bytes) in [(1, 4096), (0, 0), (0, 5000)] {
        let start = page.wrapping_add(offset);
        // SAFETY: refused before anything is done.
        let result = unsafe { DirtyTracker::new(start, len_bytes, None, TrackedKind::Anonymous) };
        assert!(matches!(result, Err(VmError::Tracking { .. })));
    }
    // SAFETY: no other code uses the pages.
    unsafe { memory::unmap(page, 2 * SMALL_PAGE_BYTES).unwrap() };
}
