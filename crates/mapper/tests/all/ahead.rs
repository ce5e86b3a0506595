//! Bringing files in: advice, prefetching, and files that are read once.

#![allow(clippy::single_range_in_vec_init, reason = "a list of ranges may have one")]

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use aquifer_mapper::{
    Advice, FaultCause, FileAccess, FileView, MapError, Mapper, Stores, ViewOptions,
};
use aquifer_sys::memory;
use aquifer_testkit::executor::block_on;
use tempfile::TempDir;

/// A view whose stores are private until they are flushed.
const PRIVATE: ViewOptions = ViewOptions::write().stores(Stores::Private);

const PAGE: u64 = 4096;

fn mapper() -> Mapper {
    Mapper::builder().build().unwrap()
}

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 7 % 251) as u8).collect()
}

/// A view of a new file of `pages` pages.
fn view(mapper: &Mapper, directory: &TempDir, pages: u64) -> FileView {
    let path = directory.path().join("data");
    fs::write(&path, bytes((pages * PAGE) as usize)).unwrap();
    mapper.map(path, FileAccess::Read, ..).unwrap()
}

fn cut(view: &FileView, pages: u64) {
    let file = OpenOptions::new().write(true).open(view.path()).unwrap();
    file.set_len(pages * PAGE).unwrap();
}

fn scattered(count: u64, pages: u64) -> Vec<std::ops::Range<u64>> {
    let page = |index: u64| index * 7919 % pages * PAGE;
    (0..count).map(|index| page(index)..page(index) + 100).collect()
}

#[test]
fn scattered_ranges_come_in_by_all_three_ways() {
    let (directory, mapper) = (directory(), mapper());
    let view = view(&mapper, &directory, 2048);
    let ranges = scattered(700, 2048);
    view.touch_many(&ranges).unwrap();
    view.prefetch(&ranges).unwrap().wait().unwrap();
    block_on(view.prefetch(&ranges).unwrap()).unwrap();
    view.touch_many(&[]).unwrap();
    block_on(view.prefetch(&[0..0]).unwrap()).unwrap();
    // Consecutive prefetches, from several threads, and one that is not awaited and whose view is
    // dropped at once.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| block_on(view.prefetch(&ranges).unwrap()).unwrap());
        }
    });
    drop(view.prefetch(&ranges).unwrap());
    drop((view, mapper));
}

#[test]
fn a_prefetch_names_the_first_byte_that_is_gone() {
    for access in [ViewOptions::read(), PRIVATE, ViewOptions::write()] {
        names_what_is_gone(access);
    }
}

fn names_what_is_gone(access: ViewOptions) {
    let (directory, mapper) = (directory(), mapper());
    let view = view(&mapper, &directory, 512);
    // The second page of the file is the first of the view.
    let view = mapper.map(view.path(), access, PAGE..).unwrap();
    cut(&view, 100);
    let expect = |result: Result<(), MapError>| match result {
        Err(MapError::Fault { offset_bytes, cause, .. }) => {
            assert_eq!(cause, FaultCause::Truncated);
            offset_bytes
        }
        other => panic!("{other:?}"),
    };
    let long = [0..511 * PAGE];
    assert_eq!(expect(view.touch_many(&long)), 100 * PAGE);
    assert_eq!(expect(view.prefetch(&long).unwrap().wait()), 100 * PAGE);
    assert_eq!(expect(block_on(view.prefetch(&long).unwrap())), 100 * PAGE);
    let short = [50 * PAGE..51 * PAGE, 300 * PAGE..301 * PAGE];
    assert_eq!(expect(view.touch_many(&short)), 301 * PAGE);
    view.touch_many(&short[..1]).unwrap();
}

#[test]
fn what_was_stored_stays_when_the_rest_is_brought_in() {
    for access in [PRIVATE, ViewOptions::write()] {
        let (directory, mapper) = (directory(), mapper());
        let view = view(&mapper, &directory, 512);
        // Does not begin at a page boundary of the file.
        let view = mapper.map(view.path(), access, 100..).unwrap();
        let mut wanted = bytes(512 * PAGE as usize)[100..].to_vec();
        for at in [0, 50 * PAGE, 300 * PAGE + 4000] {
            view.write_all_at(b"stored", at).unwrap();
            wanted[at as usize..][..6].copy_from_slice(b"stored");
        }
        view.touch_many(&scattered(100, 511)).unwrap();
        view.prefetch(&[0..view.len_bytes()]).unwrap().wait().unwrap();
        assert!(view.read(|all| all.to_vec()).unwrap() == wanted);
        view.flush().unwrap();
        assert!(fs::read(view.path()).unwrap()[100..] == wanted);
        // The prefetch keeps the mapping until it is done.
        let coming = view.prefetch(&[0..view.len_bytes()]).unwrap();
        drop((view, mapper));
        coming.wait().unwrap();
    }
}

#[test]
fn ranges_outside_the_view_are_refused_before_anything_is_done() {
    let (directory, mapper) = (directory(), mapper());
    let view = view(&mapper, &directory, 4);
    let outside = [0..PAGE, 3 * PAGE..5 * PAGE];
    assert!(matches!(view.touch_many(&outside), Err(MapError::OutsideView { .. })));
    assert!(matches!(view.prefetch(&outside).map(drop), Err(MapError::OutsideView { .. })));
    assert!(matches!(
        view.advise(Advice::Sequential, 0..u64::MAX),
        Err(MapError::OutsideView { .. })
    ));
}

#[test]
fn advice_maps_ahead_changes_no_content_and_keeps_out_of_the_cache() {
    let (directory, mapper) = (directory(), mapper());
    let view = view(&mapper, &directory, 1024);
    for advice in [Advice::Sequential, Advice::Random, Advice::WillNeed, Advice::Normal] {
        view.advise(advice, 0..view.len_bytes()).unwrap();
        assert_eq!(view.read(|all| all.to_vec()).unwrap(), bytes(1024 * PAGE as usize));
    }
    assert_eq!(mapper.stats().map_ahead.requests, 2);
    let path = view.path().to_owned();
    drop(view);
    assert_eq!(mapper.stats().cache.parked, 1);
    let again = mapper.map(&path, FileAccess::Read, ..).unwrap();
    again.advise(Advice::DontNeed, 0..PAGE).unwrap();
    drop(again);
    assert_eq!(mapper.stats().cache.parked, 0);
}

/// Neither the helpers nor the kernel read pages other than those touched.
#[test]
fn random_reads_nothing_ahead() {
    let mapper = mapper();
    for access in [ViewOptions::read(), PRIVATE, ViewOptions::write()] {
        let directory = directory();
        let path = directory.path().join("data");
        fs::write(&path, bytes((1024 * PAGE) as usize)).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        let view = mapper.map(&path, access, ..).unwrap();
        memory::drop_cached(file.as_fd(), 0, 1024 * PAGE).unwrap();
        let cached = || memory::cachestat(file.as_fd(), 0, 1024 * PAGE).map(|stat| stat.cached);
        match cached() {
            Ok(0) => {}
            Ok(_) => return println!("skipped: the page cache keeps the file"),
            Err(error) => return println!("skipped: {error}"),
        }
        view.advise(Advice::Random, 0..view.len_bytes()).unwrap();
        for page in [100, 500, 900] {
            assert_eq!(
                view.get::<u8>(page * PAGE).unwrap(),
                bytes(1024 * PAGE as usize)[(page * PAGE) as usize]
            );
        }
        assert_eq!(cached().unwrap(), 3, "{access:?}");
    }
    assert_eq!(mapper.stats().map_ahead.requests, 0);
}

/// A sparse, unnamed file.
fn sparse(directory: &std::path::Path, len_bytes: u64) -> Option<File> {
    let file = tempfile::tempfile_in(directory).ok()?;
    file.set_len(len_bytes).ok().map(|()| file)
}

/// Whether a view of the file is watched. Retries, because on a busy machine the watch may end at
/// once.
fn is_watched(mapper: &Mapper, file: &File) -> bool {
    (0..100).any(|_| {
        let _view = mapper.map_file(file, FileAccess::Read, ..).unwrap();
        mapper.stats().map_ahead.in_progress == 1
    })
}

#[test]
fn large_files_in_memory_are_watched_and_no_others() {
    let never = Mapper::builder().mapping_cache_bytes(0).detect_sequential(false).build().unwrap();
    let mapper = Mapper::builder().mapping_cache_bytes(0).build().unwrap();
    let disk = sparse(std::path::Path::new(env!("CARGO_TARGET_TMPDIR")), 1 << 30).unwrap();
    assert!(!is_watched(&mapper, &disk), "on a disk there is nothing to gain");
    let memory = |len_bytes| sparse(std::path::Path::new("/dev/shm"), len_bytes);
    let (Some(small), Some(large)) = (memory(16 << 20), memory(1 << 30)) else {
        return eprintln!("skipped: no file system in memory");
    };
    assert!(!is_watched(&mapper, &small));
    assert!(!is_watched(&never, &large));
    assert!(is_watched(&mapper, &large));
    let view = mapper.map_file(&large, FileAccess::Read, ..).unwrap();
    view.advise(Advice::Normal, 0..1 << 30).unwrap();
    assert_eq!(mapper.stats().map_ahead.in_progress, 0, "ended by advice");
}

#[test]
fn files_of_all_lengths_are_shown_whole() {
    let (directory, mapper) = (directory(), mapper());
    let path = directory.path().join("file");
    let around = |len: usize| [len - 1, len, len + 1];
    let lens = [16 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20, 2 << 20, 5 << 20];
    for len in [0, 1].into_iter().chain(lens.into_iter().flat_map(around)) {
        let content = bytes(len);
        fs::write(&path, &content).unwrap();
        for _ in 0..2 {
            let seen = mapper.read_once(&path, |all| all.to_vec()).unwrap();
            assert!(seen == content, "{len} bytes");
        }
    }
}

#[test]
fn one_look_inside_another_has_a_buffer_of_its_own() {
    let (directory, mapper) = (directory(), mapper());
    let (a, b) = (directory.path().join("a"), directory.path().join("b"));
    fs::write(&a, "first").unwrap();
    fs::write(&b, "second, longer").unwrap();
    let seen = mapper.read_once(&a, |outer| {
        let inner = mapper.read_once(&b, |inner| inner.to_vec()).unwrap();
        (inner, outer.to_vec())
    });
    assert_eq!(seen.unwrap(), (b"second, longer".to_vec(), b"first".to_vec()));
}

#[test]
fn what_is_no_file_is_read_to_its_end_or_refused() {
    let (directory, mapper) = (directory(), mapper());
    let refused = |path: &std::path::Path| mapper.read_once(path, |_| ()).unwrap_err();
    assert!(matches!(refused(directory.path()), MapError::Read { .. }));
    let gone = refused(&directory.path().join("gone"));
    assert!(
        matches!(gone, MapError::Open { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    );
    assert_eq!(mapper.read_once("/dev/null", |all| all.len()).unwrap(), 0);
    let maps = mapper.read_once("/proc/self/status", |all| all.to_vec()).unwrap();
    assert!(maps.starts_with(b"Name:"), "length 0, and content all the same");
    let symbols = mapper.read_once("/proc/self/smaps", |all| all.to_vec()).unwrap();
    assert!(symbols.len() > 16 << 10 && symbols.ends_with(b"\n"), "it comes in pieces");

    let pipe = directory.path().join("pipe");
    let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
    // SAFETY: a NUL-terminated path.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let content = bytes(300_000);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut pipe = OpenOptions::new().write(true).open(&pipe).unwrap();
            content.chunks(1000).for_each(|piece| pipe.write_all(piece).unwrap());
        });
        assert!(mapper.read_once(&pipe, |all| all.to_vec()).unwrap() == content);
        writer.join().unwrap();
    });
}

static ALARMS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count_alarm(_: libc::c_int) {
    ALARMS.fetch_add(1, Ordering::Relaxed);
}

/// Covers pages that are populated, pages faulted in by fallible loads, and reads from a pipe,
/// which a signal does interrupt.
#[test]
fn signals_while_files_are_brought_in_are_not_noticed() {
    // SAFETY: a zeroed action without flags: interrupted calls are not restarted.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = count_alarm as *const () as usize;
    // SAFETY: the handler only counts, and no other code in this process uses the signal.
    let set = unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) };
    assert_eq!(set, 0);
    let (directory, mapper) =
        (directory(), Mapper::builder().mapping_cache_bytes(0).build().unwrap());
    let whole = view(&mapper, &directory, 2048);
    let path = whole.path().to_owned();
    let expected = bytes(2048 * PAGE as usize);
    let pipe = directory.path().join("pipe");
    let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
    // SAFETY: a NUL-terminated path.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    // SAFETY: returns the thread's own handle.
    let thread = unsafe { libc::pthread_self() };
    let (is_done, first) = (AtomicBool::new(false), ALARMS.load(Ordering::Relaxed));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                // SAFETY: the thread lives as long as the scope.
                unsafe { libc::pthread_kill(thread, libc::SIGALRM) };
                std::thread::yield_now();
            }
        });
        let mut rounds = 0;
        while rounds < 20 || ALARMS.load(Ordering::Relaxed) - first < 1000 {
            let fresh = mapper.map(&path, FileAccess::Read, ..).unwrap();
            fresh.advise(Advice::WillNeed, 0..1024 * PAGE).unwrap();
            fresh.touch_many(&[0..2048 * PAGE]).unwrap();
            fresh.touch_many(&scattered(300, 2048)).unwrap();
            fresh.prefetch(&scattered(300, 2048)).unwrap().wait().unwrap();
            assert!(fresh.read(|all| all.to_vec()).unwrap() == expected);
            assert!(mapper.read_once(&path, |all| all.to_vec()).unwrap() == expected);
            let writer = scope.spawn(|| {
                let mut pipe = OpenOptions::new().write(true).open(&pipe).unwrap();
                // One piece at a time, so that the reader waits for the next.
                for piece in expected[..400_000].chunks(4_000) {
                    pipe.write_all(piece).unwrap();
                    std::thread::yield_now();
                }
            });
            assert!(mapper.read_once(&pipe, |all| all.to_vec()).unwrap() == expected[..400_000]);
            writer.join().unwrap();
            rounds += 1;
        }
        is_done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_file_larger_than_the_addresses_is_refused() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| directory());
    let path = directory.path().join("large");
    if File::create(&path).unwrap().set_len(1 << 60).is_err() {
        eprintln!("skipped: no file system for a file of 1 EiB");
        return;
    }
    let error = mapper().read_once(&path, |all| all.len()).unwrap_err();
    assert!(matches!(error, MapError::Map { .. } | MapError::Memory(_)), "{error}");
}

#[test]
fn without_permission_it_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let (directory, mapper) = (directory(), mapper());
    let path = directory.path().join("secret");
    fs::write(&path, "secret").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    if File::open(&path).is_ok() {
        eprintln!("skipped: this user may read everything");
        return;
    }
    assert!(matches!(mapper.read_once(&path, |_| ()), Err(MapError::Open { .. })));
}
