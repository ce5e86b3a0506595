//! The resident budget bounds the page cache of mapped files.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use aquifer_mapper::{FileAccess, FileView, Mapper, MapperBuilder};
use aquifer_sys::memory::{self, REGION_BYTES, SMALL_PAGE_BYTES};
use aquifer_sys::residency::{self, Backing};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;
use aquifer_testkit::watchdog::wait_until;

const BUDGET: u64 = 24 << 20;
const STEP: u64 = REGION_BYTES as u64;

fn builder() -> MapperBuilder {
    Mapper::builder().resident_budget_bytes(BUDGET)
}

/// A directory on a disk, if the kernel reports the page cache of files there.
fn directory() -> Option<tempfile::TempDir> {
    for place in [std::env::temp_dir(), Path::new(env!("CARGO_TARGET_TMPDIR")).to_owned()] {
        let directory = tempfile::tempdir_in(place).unwrap();
        let probe = File::create(directory.path().join("probe")).unwrap();
        let is_stored = matches!(residency::backing(probe.as_fd()), Ok(Backing::Storage));
        if is_stored && memory::cachestat(probe.as_fd(), 0, 0).is_ok() {
            return Some(directory);
        }
    }
    eprintln!("skipped: needs a disk, and cachestat (Linux 6.5)");
    None
}

/// Writes a file through to the disk: pages that are not written back cannot be dropped.
fn stored(path: &Path, len_bytes: u64) -> File {
    let file =
        File::options().create(true).truncate(true).read(true).write(true).open(path).unwrap();
    for at in (0..len_bytes).step_by(STEP as usize) {
        file.write_all_at(&block(at, STEP.min(len_bytes - at)), at).unwrap();
    }
    file.sync_all().unwrap();
    file
}

fn block(at: u64, len_bytes: u64) -> Vec<u8> {
    vec![(at / STEP) as u8 + 1; len_bytes as usize]
}

fn cached_bytes(file: &File) -> u64 {
    memory::cachestat(file.as_fd(), 0, 0).unwrap().cached * SMALL_PAGE_BYTES as u64
}

/// Bytes of a view in the page cache, by `mincore` on its addresses.
fn resident_bytes(view: &FileView) -> u64 {
    let mut pages = vec![0; view.len_bytes() as usize / SMALL_PAGE_BYTES];
    memory::residency(view.as_ptr(), view.len_bytes() as usize, &mut pages).unwrap();
    pages.iter().filter(|&&page| page & 1 == 1).count() as u64 * SMALL_PAGE_BYTES as u64
}

/// Reads a view from start to end; after each step the resident memory falls below the bound.
fn stream(view: &FileView, resident: impl Fn() -> u64) {
    for at in (0..view.len_bytes()).step_by(STEP as usize) {
        let range = at..view.len_bytes().min(at + STEP);
        let wanted = block(at, range.end - range.start);
        assert!(view.read_range(range, |bytes| bytes.to_vec()).unwrap() == wanted, "at {at}");
        wait_until("it drops behind", || resident() <= BUDGET);
    }
}

#[test]
fn a_file_that_is_streamed_through_drops_behind() {
    let Some(directory) = directory() else { return };
    let path = directory.path().join("file");
    let file = stored(&path, 3 * BUDGET + 5000);
    let mapper = builder().build().unwrap();
    let view = mapper.map(&path, FileAccess::Read, ..).unwrap();
    for _ in 0..2 {
        stream(&view, || cached_bytes(&file));
        assert!(
            resident_bytes(&mapper.map(&path, FileAccess::Read, ..3 * BUDGET).unwrap()) <= BUDGET
        );
    }
    // The file stays open, so that it is still dropped behind after it is removed.
    std::fs::remove_file(&path).unwrap();
    stream(&view, || cached_bytes(&file));
    // Dropped behind: the pages read last are still cached.
    let end = cached_tail(&file, 3 * BUDGET);
    assert!(end > 0, "the end was read last");
    wait_until("it is told", || (1..=BUDGET).contains(&mapper.stats().resident_bytes));
}

fn cached_tail(file: &File, from: u64) -> u64 {
    memory::cachestat(file.as_fd(), from - STEP, 0).unwrap().cached
}

#[test]
fn files_that_are_streamed_through_drop_behind_also_after_they_were_unmapped() {
    let Some(directory) = directory() else { return };
    for cache_bytes in [0, BUDGET / 4] {
        let mapper = builder().mapping_cache_bytes(cache_bytes).build().unwrap();
        let mut files = Vec::new();
        for number in 0..40u64 {
            let path = directory.path().join(format!("{cache_bytes} {number}"));
            files.push(stored(&path, (1 << 20) + number * 40_000));
            let view = mapper.map(&path, FileAccess::Read, ..).unwrap();
            stream(&view, || files.iter().map(cached_bytes).sum());
            // Mapped again, it counts once.
            if number % 3 == 0 {
                drop((view, mapper.map(&path, FileAccess::Read, ..).unwrap()));
            }
        }
    }
}

/// Beyond the budget: what may not be written yet, or is stored between two looks of the thread.
const SLACK: u64 = 64 << 20;

/// Stores through a shared view of eight times the budget, in the order of `places`, eight bytes at a time.
fn store_all(path: &Path, places: impl Iterator<Item = u64>) {
    let file = File::create(path).unwrap();
    file.set_len(8 * BUDGET).unwrap();
    let mapper = builder().build().unwrap();
    let view = mapper.map(path, FileAccess::Write, ..).unwrap();
    let start = view.as_mut_ptr().unwrap();
    let mut last = HashMap::new();
    for (count, at) in places.enumerate() {
        // SAFETY: inside the view, aligned.
        unsafe { start.add(at as usize).cast::<u64>().write_volatile(count as u64 + 1) };
        last.insert(at, count as u64 + 1);
        if count % 256 == 0 {
            wait_until("it is written and drops behind", || cached_bytes(&file) <= BUDGET + SLACK);
        }
    }
    wait_until("all of it", || cached_bytes(&file) <= BUDGET);
    view.flush().unwrap();
    let there = std::fs::read(path).unwrap();
    for (at, value) in last {
        let at = at as usize;
        assert_eq!(there[at..at + 8], value.to_ne_bytes(), "at {at}");
    }
}

#[test]
fn a_file_of_eight_times_the_budget_is_filled_within_it() {
    let Some(directory) = directory() else { return };
    store_all(&directory.path().join("file"), (0..8 * BUDGET).step_by(2048));
}

#[test]
fn random_stores_over_eight_times_the_budget_stay_within_it() {
    let Some(directory) = directory() else { return };
    let mut rng = Rng::new(seed(3));
    let places = (0..steps(20_000)).map(|_| rng.below(8 * BUDGET / 8) * 8);
    store_all(&directory.path().join("file"), places);
}

/// They stay, are counted, and keep no others in memory.
#[test]
fn pages_that_another_process_has_mapped_are_beyond_the_budget() {
    let Some(directory) = directory() else { return };
    let path = directory.path().join("file");
    let file = stored(&path, 3 * BUDGET);
    let mapper = builder().build().unwrap();
    let view = mapper.map(&path, FileAccess::Write, ..).unwrap();
    let (mut told, mut tells) = std::io::pipe().unwrap();
    let (hold, held) = std::io::pipe().unwrap();
    // SAFETY: the child loads from memory that it has inherited, writes, reads, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(held);
        let start = view.as_mut_ptr().unwrap();
        for at in (0..BUDGET + STEP).step_by(SMALL_PAGE_BYTES) {
            // SAFETY: inside the view.
            unsafe { start.add(at as usize).read_volatile() };
        }
        let _ = tells.write_all(&[1]);
        // Until the parent has closed its end.
        let _ = { hold }.read(&mut [0]);
        // SAFETY: ends the child without running the parent's destructors or exit handlers.
        unsafe { libc::_exit(0) };
    }
    told.read_exact(&mut [0]).unwrap();
    for at in (BUDGET + STEP..3 * BUDGET).step_by(STEP as usize) {
        view.set(at, 7_u64).unwrap();
        view.touch_many(std::slice::from_ref(&(at..at + STEP))).unwrap();
        let cached = || memory::cachestat(file.as_fd(), BUDGET + STEP, 0).unwrap().cached;
        let cached_bytes = || cached() * SMALL_PAGE_BYTES as u64;
        wait_until("others drop behind", || cached_bytes() <= BUDGET);
    }
    // Counted when this process has brought pages in.
    wait_until("it is told", || mapper.stats().resident_bytes > BUDGET);
    assert!(cached_bytes(&file) > BUDGET);
    drop(held);
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    wait_until("all drop behind", || cached_bytes(&file) <= BUDGET);
}

#[test]
fn files_in_memory_stay() {
    // SAFETY: a NUL-terminated name.
    let memory = unsafe { libc::memfd_create(c"aquifer".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: made above, and owned by nothing else.
    let file = unsafe { File::from_raw_fd(memory) };
    for at in (0..BUDGET + STEP).step_by(STEP as usize) {
        file.write_all_at(&block(at, STEP), at).unwrap();
    }
    let mapper = builder().build().unwrap();
    let view = mapper.map_file(&file, FileAccess::Read, ..).unwrap();
    stream(&view, || 0);
    assert_eq!(mapper.stats().resident_bytes, 0);
    assert_eq!(resident_bytes(&view), BUDGET + STEP);
}

#[test]
fn a_child_of_a_fork_drops_its_copy_and_goes() {
    let mapper = builder().build().unwrap();
    // SAFETY: the child only drops what is inert there, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(mapper);
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
}
