//! Writable views.

use std::fs;
use std::path::PathBuf;

use aquifer_mapper::{Advice, FileAccess, MapError, Mapper, Stores, ViewOptions};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;
use tempfile::TempDir;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("no flusher", no_flusher)];

/// A view whose stores are private until they are flushed.
const PRIVATE: ViewOptions = ViewOptions::write().stores(Stores::Private);

const PAGE: u64 = 4096;

fn scene(len: usize) -> (TempDir, PathBuf, Mapper) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, vec![1; len]).unwrap();
    (directory, path, Mapper::builder().build().unwrap())
}

#[test]
fn private_stores_are_seen_by_others_after_a_flush_and_shared_ones_at_once() {
    let (_directory, path, mapper) = scene(10_000);
    let private = mapper.map(&path, PRIVATE, 100..9000).unwrap();
    private.set(0, 7u64).unwrap();
    private.write_all_at(b"text", 8000).unwrap();
    assert_eq!(private.get::<u64>(0).unwrap(), 7);
    assert_eq!(private.dirty_bytes().unwrap(), 2 * PAGE);
    let reader = mapper.map(&path, FileAccess::Read, ..).unwrap();
    assert_eq!(reader.get::<u8>(100).unwrap(), 1);
    let flushed = private.flush().unwrap();
    assert_eq!(flushed.pages, 2);
    assert_eq!(reader.get::<u64>(100).unwrap(), 7);
    assert_eq!(&fs::read(&path).unwrap()[8100..8104], b"text");
    assert_eq!(private.dirty_bytes().unwrap(), 0);
    assert!(private.tracking().unwrap().is_some());

    let shared = mapper.map(&path, FileAccess::Write, ..).unwrap();
    shared.set(200, 9u8).unwrap();
    assert_eq!(reader.get::<u8>(200).unwrap(), 9);
    shared.flush_range(0..PAGE).unwrap();
    assert!(shared.tracking().unwrap().is_none());
    // SAFETY: inside the view, and no other code stores there.
    unsafe { shared.as_mut_ptr().unwrap().add(300).write(5) };
    assert_eq!(reader.get::<u8>(300).unwrap(), 5);
}

#[test]
fn what_is_not_flushed_is_given_up_and_write_out_hands_it_over() {
    let (_directory, path, mapper) = scene(10_000);
    let view = mapper.map(&path, PRIVATE, ..).unwrap();
    view.set(0, 7u8).unwrap();
    drop(view);
    assert_eq!(fs::read(&path).unwrap()[0], 1);
    let view = mapper.map(&path, PRIVATE, ..).unwrap();
    view.set(0, 7u8).unwrap();
    view.write_out().unwrap();
    drop(view);
    assert_eq!(fs::read(&path).unwrap()[0], 7);
}

#[test]
fn a_view_for_reading_is_not_stored_to() {
    let (_directory, path, mapper) = scene(100);
    let view = mapper.map(&path, FileAccess::Read, ..).unwrap();
    assert!(matches!(view.set(0, 1u8), Err(MapError::ReadOnly { .. })));
    assert!(matches!(view.flush(), Err(MapError::ReadOnly { .. })));
    assert!(matches!(view.grow(200), Err(MapError::ReadOnly { .. })));
    assert!(matches!(view.as_mut_ptr(), Err(MapError::ReadOnly { .. })));
}

#[test]
fn a_view_grows_where_it_is_from_nothing_on() {
    for access in [PRIVATE, ViewOptions::write()] {
        let (_directory, path, mapper) = scene(0);
        let view = mapper.map(&path, access, ..).unwrap();
        assert!(view.is_empty());
        let address = view.as_mut_ptr().unwrap();
        for len in [1, 5000, 1 << 20] {
            view.grow(len).unwrap();
            assert_eq!((view.len_bytes(), view.as_mut_ptr().unwrap()), (len, address));
            view.set(len - 1, 3u8).unwrap();
        }
        view.flush().unwrap();
        let found = fs::read(&path).unwrap();
        assert_eq!((found.len(), found[4999], found[(1 << 20) - 1]), (1 << 20, 3, 3));
        assert!(matches!(view.grow(1 << 40), Err(MapError::GrowBeyond { .. })));
    }
}

/// Random stores and flushes of one view against a plain array.
#[test]
fn the_file_is_what_was_flushed_last() {
    let (_directory, path, mapper) = scene(50 * PAGE as usize + 77);
    let view = mapper.map(&path, PRIVATE, ..).unwrap();
    let mut present = fs::read(&path).unwrap();
    let mut flushed = present.clone();
    let mut rng = Rng::new(seed(1));
    for step in 0..steps(400) {
        if rng.chance(0.2) {
            view.flush().unwrap();
            flushed.clone_from(&present);
        } else {
            let at = rng.below(present.len() as u64) as usize;
            let len = 1 + rng.below((present.len() - at).min(9000) as u64) as usize;
            let bytes = vec![rng.below(256) as u8; len];
            view.write_all_at(&bytes, at as u64).unwrap();
            present[at..at + len].copy_from_slice(&bytes);
        }
        assert!(fs::read(&path).unwrap() == flushed, "step {step}");
        assert!(view.read(|bytes| bytes.to_vec()).unwrap() == present, "step {step}");
    }
}

/// The names of this process's threads.
fn threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let name =
        |task: std::io::Result<fs::DirEntry>| fs::read_to_string(task.unwrap().path().join("comm"));
    tasks.filter_map(|task| name(task).ok()).map(|name| name.trim().to_owned()).collect()
}

/// Nothing writes stores before a flush does: there is no thread that could.
#[test]
fn without_being_asked_no_thread_writes_stores_before_they_are_flushed() {
    aquifer_testkit::child::succeeds("no flusher");
}

fn no_flusher() {
    let (_directory, path, mapper) = scene(10 * PAGE as usize);
    let view = mapper.map(&path, PRIVATE, ..).unwrap();
    (0..10).for_each(|page| view.set(page * PAGE, 7u8).unwrap());
    let threads = threads();
    assert!(!threads.iter().any(|name| name.starts_with("aquifer-flush")), "{threads:?}");
    assert_eq!(fs::read(&path).unwrap(), vec![1; 10 * PAGE as usize]);
    assert_eq!(view.flush().unwrap().pages, 10);
}

/// Two programs with views of one file take turns to increment a shared counter, and private ones
/// in the same page.
#[test]
fn two_views_that_take_turns_see_and_keep_each_others_bytes() {
    let (_directory, path, mapper) = scene(10 * PAGE as usize);
    let other = Mapper::builder().build().unwrap();
    let views = [&mapper, &other].map(|mapper| mapper.map(&path, PRIVATE, ..).unwrap());
    views[0].set(PAGE, [0u64; 3]).unwrap();
    views[0].flush().unwrap();
    for turn in 0..20 {
        let view = &views[turn % 2];
        for counter in [0, 1 + turn as u64 % 2] {
            let at = PAGE + 8 * counter;
            let before: u64 = view.get(at).unwrap();
            view.set(at, before + 1).unwrap();
        }
        view.flush().unwrap();
    }
    for view in &views {
        assert_eq!(view.get::<[u64; 3]>(PAGE).unwrap(), [20, 10, 10]);
    }
    assert_eq!(fs::read(&path).unwrap()[PAGE as usize], 20);
}

/// Whether the kernel's read-ahead is off for an address, according to `/proc/self/smaps`.
fn is_random(address: usize) -> bool {
    let mut inside = false;
    for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let first = line.split(' ').next().unwrap();
        if let Some((start, end)) = first.split_once('-') {
            let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
            inside = (number(start)..number(end)).contains(&address);
        } else if inside && line.starts_with("VmFlags:") {
            return line.split(' ').any(|flag| flag == "rr");
        }
    }
    panic!("not mapped");
}

#[test]
fn advice_about_views_that_can_be_stored_to_is_followed() {
    for access in [PRIVATE, ViewOptions::write()] {
        let (_directory, path, mapper) = scene(1 << 20);
        let view = mapper.map(&path, access, PAGE..).unwrap();
        let at = |page: u64| view.as_ptr() as usize + (page * PAGE) as usize;
        view.advise(Advice::Random, 2 * PAGE..9 * PAGE).unwrap();
        assert!(!is_random(at(1)) && is_random(at(2)) && is_random(at(8)) && !is_random(at(9)));
        view.set(3 * PAGE, 7u8).unwrap();
        view.advise(Advice::Normal, 2 * PAGE..4 * PAGE).unwrap();
        assert!(!is_random(at(2)) && is_random(at(4)));
        view.flush().unwrap();
        let before = mapper.stats().map_ahead.requests;
        view.advise(Advice::WillNeed, 0..view.len_bytes()).unwrap();
        assert!(!is_random(at(4)));
        assert_eq!(mapper.stats().map_ahead.requests, before + 1);
        view.advise(Advice::DontNeed, 0..view.len_bytes()).unwrap();
        assert_eq!(view.get::<u8>(3 * PAGE).unwrap(), 7);
        let outside = view.advise(Advice::Random, 0..1 << 30).unwrap_err();
        assert!(matches!(outside, MapError::OutsideView { .. }), "{outside}");
    }
}

#[test]
fn bare_accesses_of_missing_bytes_find_zeros_and_the_next_call_reports_it() {
    let (_directory, path, mapper) = scene(10 * PAGE as usize);
    let view = mapper.map(&path, PRIVATE, PAGE..).unwrap();
    view.answer_faults_with_zeros().unwrap();
    let data = view.as_mut_ptr().unwrap();
    let load = |at: u64| {
        // SAFETY: inside the view.
        unsafe { data.add(at as usize).read_volatile() }
    };
    let store = |at: u64, byte: u8| {
        // SAFETY: as above.
        unsafe { data.add(at as usize).write_volatile(byte) }
    };
    store(0, 7);
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(5 * PAGE).unwrap();
    assert_eq!((load(0), load(3 * PAGE), load(6 * PAGE), load(7 * PAGE)), (7, 1, 0, 0));
    store(8 * PAGE, 9);
    let missed = view.take_missed_fault();
    assert!(
        matches!(missed, Some(MapError::Fault { offset_bytes, .. }) if offset_bytes == 7 * PAGE),
        "{missed:?}"
    );
    assert!(view.take_missed_fault().is_none());
    // The store behind the end is lost, the one before it is not, and nothing was written there.
    view.flush().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 5 * PAGE);
    assert_eq!(fs::read(&path).unwrap()[PAGE as usize], 7);
    file.set_len(10 * PAGE).unwrap();
    assert_eq!((load(8 * PAGE), load(0)), (0, 7));
    store(8 * PAGE, 5);
    assert!(view.take_missed_fault().is_none());
    view.flush().unwrap();
    assert_eq!(fs::read(&path).unwrap()[9 * PAGE as usize], 5);
}

/// What is stored to a page behind the end is not written when the file has another content there by the
/// time of the flush, also if the missed fault was not asked for.
#[test]
fn zeros_under_bare_stores_are_not_written() {
    let (_directory, path, mapper) = scene(10 * PAGE as usize);
    let view = mapper.map(&path, PRIVATE, ..).unwrap();
    view.answer_faults_with_zeros().unwrap();
    let data = view.as_mut_ptr().unwrap();
    let store = |at: u64, byte: u8| {
        // SAFETY: inside the view.
        unsafe { data.add(at as usize).write_volatile(byte) }
    };
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(5 * PAGE).unwrap();
    store(3 * PAGE, 6);
    store(7 * PAGE + 1, 9);
    std::os::unix::fs::FileExt::write_all_at(&file, &[2; 5 * PAGE as usize], 5 * PAGE).unwrap();
    view.flush().unwrap();
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes[3 * PAGE as usize], 6);
    assert!(bytes[5 * PAGE as usize..].iter().all(|&byte| byte == 2));
    assert!(view.take_missed_fault().is_some());
}

/// Several threads that meet the same missing pages, and more pages than a process may have mappings for.
#[test]
fn many_bare_accesses_of_many_threads_are_answered() {
    const PAGES: u64 = 140_000;
    let (_directory, path, mapper) = scene(PAGE as usize);
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(PAGES * PAGE).unwrap();
    let view = mapper.map(&path, PRIVATE, ..).unwrap();
    view.answer_faults_with_zeros().unwrap();
    let address = view.as_mut_ptr().unwrap() as usize;
    file.set_len(PAGE).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            scope.spawn(move || {
                for page in (1..PAGES).step_by(2) {
                    let byte = (address + (page * PAGE) as usize) as *mut u8;
                    // SAFETY: inside the view.
                    unsafe {
                        if thread == 0 {
                            byte.write_volatile(1)
                        } else {
                            byte.read_volatile();
                        }
                    }
                }
            });
        }
    });
    let maps = fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    assert!(maps < 10_000, "{maps}");
    assert!(view.take_missed_fault().is_some());
    view.flush().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), PAGE);
}
