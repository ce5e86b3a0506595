//! Views of ordinary files: their contents, whatever happens to the file.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aquifer_mapper::{
    FaultCause, FileAccess, FileView, MapError, Mapper, Stores, Unmap, ViewOptions,
};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;
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

fn view(mapper: &Mapper, path: &Path) -> FileView {
    mapper.map(path, FileAccess::Read, ..).unwrap()
}

fn content(view: &FileView) -> Vec<u8> {
    view.read(|bytes| bytes.to_vec()).unwrap()
}

/// A directory with a file of these bytes.
fn scene_of(bytes: &[u8]) -> (TempDir, PathBuf) {
    let directory = directory();
    let path = directory.path().join("file");
    fs::write(&path, bytes).unwrap();
    (directory, path)
}

/// Bytes that encode their file and offset.
fn named(name: u64, len: usize) -> Vec<u8> {
    let words = (0..).flat_map(|word: u64| (name << 32 | word).to_le_bytes());
    words.take(len).collect()
}

#[test]
fn a_view_shows_its_range_and_nothing_else() {
    let (directory, mapper) = (directory(), mapper());
    let path = directory.path().join("file");
    let bytes = named(1, 10_001);
    fs::write(&path, &bytes).unwrap();
    for range in [0..10_001, 0..0, 1..2, 4095..8193, 10_000..10_001, 10_001..10_001] {
        let view =
            mapper.map(&path, FileAccess::Read, range.start as u64..range.end as u64).unwrap();
        assert_eq!(content(&view), bytes[range.clone()]);
        assert_eq!(
            (view.offset_bytes(), view.len_bytes()),
            (range.start as u64, range.len() as u64)
        );
        let mut copied = vec![0; range.len()];
        view.read_exact_at(&mut copied, 0).unwrap();
        assert_eq!(copied, bytes[range]);
    }
    let all = view(&mapper, &path);
    assert_eq!(all.get::<u64>(8).unwrap(), 1 << 32 | 1);
    assert_eq!(all.get::<u8>(10_000).unwrap(), bytes[10_000]);
    // SAFETY: no process changes the file.
    assert_eq!(unsafe { all.as_slice() }, bytes);
    for (start, end) in [(0, 10_002), (10_001, 10_002), (u64::MAX - 1, u64::MAX)] {
        let refused = all.read_range(start..end, |_| ()).unwrap_err();
        assert!(matches!(refused, MapError::OutsideView { .. }), "{refused}");
        let refused = mapper.map(&path, FileAccess::Read, start..end).unwrap_err();
        assert!(matches!(refused, MapError::Range { len_bytes: 10_001, .. }), "{refused}");
    }
    assert!(all.get::<u64>(9_994).is_err());
    assert!(all.read_exact_at(&mut [0; 2], u64::MAX).is_err());
}

#[test]
fn what_is_no_regular_file_is_refused_with_advice() {
    let (directory, mapper) = (directory(), mapper());
    let fifo = directory.path().join("fifo");
    let name = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
    // SAFETY: a NUL-terminated path.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    for (path, kind) in [
        (directory.path(), "a directory"),
        (&fifo, "a pipe"),
        (Path::new("/dev/null"), "a character device"),
        (Path::new("/proc/self/status"), "proc"),
    ] {
        let error = mapper.map(path, FileAccess::Read, ..).unwrap_err();
        assert!(
            matches!(&error, MapError::NotMappable { kind: found, .. } if found.contains(kind)),
            "{error}"
        );
    }
    let missing = mapper.map(directory.path().join("none"), FileAccess::Read, ..).unwrap_err();
    assert!(matches!(missing, MapError::Open { .. }), "{missing}");
    let empty = directory.path().join("empty");
    File::create(&empty).unwrap();
    let view = view(&mapper, &empty);
    assert!(view.is_empty());
    assert_eq!(content(&view), []);
    // SAFETY: of length 0.
    assert!(unsafe { view.as_slice() }.is_empty());
}

#[test]
fn a_closed_view_is_parked_and_found_again() {
    let (directory, mapper) = (directory(), mapper());
    let path = directory.path().join("file");
    fs::write(&path, named(1, 50_000)).unwrap();
    let first = view(&mapper, &path);
    let address = first.as_ptr();
    drop(first);
    let parked = mapper.stats().cache;
    assert_eq!((parked.parked, parked.parked_bytes), (1, 13 * PAGE));
    let again = view(&mapper, &path);
    assert_eq!(again.as_ptr(), address);
    // Also while it is in use, and through another name of the file.
    let link = directory.path().join("link");
    symlink(&path, &link).unwrap();
    let other = view(&mapper, &link);
    assert_eq!(other.as_ptr(), address);
    assert_eq!(mapper.stats().cache.hits, 2);
    assert_eq!(mapper.stats().cache.parked, 0, "in use");
    drop((again, other));
    mapper.forget(&path).unwrap();
    assert_eq!(mapper.stats().cache.parked, 0);
    assert_eq!(content(&view(&mapper, &path)), named(1, 50_000));
}

#[test]
fn a_replaced_file_is_another_file() {
    let (directory, mapper) = (directory(), mapper());
    let path = directory.path().join("file");
    let new = directory.path().join("new");
    for round in 1..200 {
        fs::write(&new, named(round, 9000)).unwrap();
        fs::rename(&new, &path).unwrap();
        assert_eq!(content(&view(&mapper, &path)), named(round, 9000), "round {round}");
        if round % 3 == 0 {
            fs::remove_file(&path).unwrap();
            assert!(mapper.map(&path, FileAccess::Read, ..).is_err());
        }
    }
}

/// The path may name another file between `stat` and `open`.
#[test]
fn a_file_that_is_being_replaced_is_shown_whole() {
    let (directory, path) = scene_of(&named(1, 100));
    let mapper = Mapper::builder().mapping_cache_bytes(0).build().unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let new = directory.path().join("new");
            for len in [10_000, 100].iter().cycle() {
                fs::write(&new, named(1, *len)).unwrap();
                fs::rename(&new, &path).unwrap();
                if is_done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for step in 0..steps(20_000) {
            let access = [ViewOptions::read(), PRIVATE][usize::from(step % 8 == 7)];
            let shown = content(&mapper.map(&path, access, ..).unwrap());
            assert!(shown == named(1, 100) || shown == named(1, 10_000), "{} bytes", shown.len());
        }
        is_done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_file_that_changes_its_length_is_followed() {
    let (directory, mapper) = (directory(), mapper());
    let path = directory.path().join("file");
    let file = File::create(&path).unwrap();
    let mut rng = Rng::new(seed(1));
    for step in 0..300u64 {
        let len = rng.below(20 * PAGE);
        file.set_len(0).unwrap();
        file.write_all_at(&named(step, len as usize), 0).unwrap();
        let view = view(&mapper, &path);
        assert_eq!(view.len_bytes(), len);
        assert_eq!(content(&view), named(step, len as usize), "step {step}");
        assert_eq!(view.file_len_bytes().unwrap(), len);
    }
}

#[test]
fn bytes_that_are_gone_are_an_error_and_come_back_with_the_file() {
    let (directory, mapper) = (directory(), mapper());
    let path = directory.path().join("file");
    let bytes = named(1, 40 * PAGE as usize);
    fs::write(&path, &bytes).unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    let view = view(&mapper, &path);
    for len in [PAGE * 10 + 7, PAGE * 10, 0] {
        file.set_len(len).unwrap();
        // The rest of the last page reads as zeros, as with mmap.
        let is_truncated = |error: MapError| match error {
            MapError::Fault { offset_bytes, cause: FaultCause::Truncated, .. } => {
                assert!(offset_bytes >= len, "{offset_bytes} of {len}");
            }
            other => panic!("{other}"),
        };
        is_truncated(view.read(|bytes| bytes.to_vec().len()).unwrap_err());
        is_truncated(view.read_exact_at(&mut vec![0; bytes.len()], 0).unwrap_err());
        is_truncated(view.get::<u64>(39 * PAGE).unwrap_err());
        let there = len as usize;
        let found = view.read_range(0..there as u64, |bytes| bytes.to_vec()).unwrap();
        assert!(found == bytes[..there], "{len}");
    }
    // A view made now ends at the end of the file.
    let short = mapper.map(&path, FileAccess::Read, ..).unwrap();
    assert!(short.is_empty());
    file.write_all_at(&bytes, 0).unwrap();
    assert!(content(&view) == bytes);
}

#[test]
fn the_length_is_of_the_file_that_is_mapped() {
    let (directory, path) = scene_of(&named(1, 9000));
    let mapper = mapper();
    for access in [ViewOptions::read(), PRIVATE] {
        fs::write(&path, named(1, 9000)).unwrap();
        let shown = mapper.map(&path, access, 0..10).unwrap();
        let new = directory.path().join("new");
        fs::write(&new, "another").unwrap();
        fs::rename(&new, &path).unwrap();
        assert_eq!(shown.file_len_bytes().unwrap(), 9000, "{access:?}");
    }
}

#[test]
fn a_file_whose_mode_has_changed_is_forgotten_all_the_same() {
    let (_directory, path) = scene_of(b"text");
    let mapper = mapper();
    drop(view(&mapper, &path));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    drop(view(&mapper, &path));
    assert_eq!(mapper.stats().cache.parked, 2);
    mapper.forget(&path).unwrap();
    assert_eq!(mapper.stats().cache.parked, 0);
}

#[test]
fn a_removed_file_that_is_mapped_again_stays_within_reach() {
    let (_directory, path) = scene_of(&named(1, 9000));
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let mapper = mapper();
    drop(mapper.map_file(&file, FileAccess::Read, ..).unwrap());
    let shown = mapper.map_file(&file, FileAccess::Read, ..).unwrap();
    assert_eq!(mapper.stats().cache.hits, 1);
    file.set_len(0).unwrap();
    let cut = shown.read(|bytes| bytes.to_vec().len()).unwrap_err();
    assert!(matches!(cut, MapError::Fault { cause: FaultCause::Truncated, .. }), "{cut}");
}

/// Without a descriptor of the file, and with its path naming another file, zeros stay in place of
/// a missing page.
#[test]
fn bytes_that_could_not_be_mapped_again_come_back_with_the_path() {
    let (directory, path) = scene_of(&named(1, 9000));
    let (mapper, away) = (mapper(), directory.path().join("away"));
    for copies in [false, true] {
        // Parking closes the file.
        drop(view(&mapper, &path));
        let shown = view(&mapper, &path);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        fs::rename(&path, &away).unwrap();
        file.set_len(0).unwrap();
        let gone = shown.read(|bytes| bytes.to_vec().len()).unwrap_err();
        assert!(matches!(gone, MapError::Fault { cause: FaultCause::OutOfReach, .. }), "{gone}");
        file.write_all_at(&named(1, 9000), 0).unwrap();
        assert!(shown.read(|bytes| bytes.to_vec().len()).is_err(), "zeros may be there");
        fs::rename(&away, &path).unwrap();
        let mut copied = vec![0; 9000];
        if copies {
            shown.read_exact_at(&mut copied, 0).unwrap();
        } else {
            copied = content(&shown);
        }
        assert_eq!(copied, named(1, 9000));
    }
}

#[test]
fn threads_that_look_at_a_file_being_cut_short_get_the_file_or_an_error() {
    let (directory, mapper) = (directory(), mapper());
    let path = directory.path().join("file");
    let bytes = named(3, 64 * PAGE as usize);
    fs::write(&path, &bytes).unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut buffer = vec![0; bytes.len()];
                while !is_done.load(Ordering::Relaxed) {
                    let Ok(view) = mapper.map(&path, FileAccess::Read, ..) else { continue };
                    let len = view.len_bytes() as usize;
                    let found = view.read(|bytes| bytes.to_vec());
                    let copied = view.read_exact_at(&mut buffer[..len], 0).map(|()| &buffer[..len]);
                    for found in [found.as_deref().ok(), copied.ok()].into_iter().flatten() {
                        // A page shows its old content, or zeros behind an end that moved.
                        for (number, page) in found.chunks(PAGE as usize).enumerate() {
                            let wanted = &bytes[number * PAGE as usize..][..page.len()];
                            let same = page.iter().zip(wanted).take_while(|(a, b)| a == b).count();
                            assert!(page[same..].iter().all(|&byte| byte == 0), "page {number}");
                        }
                    }
                }
            });
        }
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let mut rng = Rng::new(seed(2));
        for _ in 0..steps(300) {
            file.set_len(rng.below(64 * PAGE)).unwrap();
            file.write_all_at(&bytes, 0).unwrap();
        }
        is_done.store(true, Ordering::Relaxed);
    });
    assert!(content(&view(&mapper, &path)) == bytes);
}

/// One thread renames, replaces, truncates, extends and removes files; other threads map and read.
#[test]
fn a_mapping_is_never_of_another_file() {
    let (directory, mapper) = (directory(), mapper());
    let is_done = AtomicBool::new(false);
    const FILES: u64 = 8;
    let path = |file: u64| directory.path().join(file.to_string());
    // This name only ever names files whose words all contain the name's number.
    let write = |file: u64, len: u64| {
        let new = directory.path().join(format!("new {file}"));
        fs::write(&new, named(file, len as usize)).unwrap();
        fs::rename(&new, path(file)).unwrap();
    };
    (0..FILES).for_each(|file| write(file, 3 * PAGE));
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (mapper, is_done) = (&mapper, &is_done);
            scope.spawn(move || {
                let mut rng = Rng::new(seed(3) + thread);
                let mut views = Vec::new();
                while !is_done.load(Ordering::Relaxed) {
                    let file = rng.below(FILES);
                    let Ok(view) = mapper.map(path(file), FileAccess::Read, ..) else { continue };
                    if let Ok(found) = view.read(|bytes| bytes.to_vec()) {
                        let words =
                            found.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
                        for (index, word) in words.enumerate() {
                            assert!(
                                word == 0 || word == file << 32 | index as u64,
                                "file {file}: {word:#x}"
                            );
                        }
                    }
                    views.push(view);
                    if views.len() > 20 {
                        views.swap_remove(rng.below(20) as usize);
                    }
                }
            });
        }
        let mut rng = Rng::new(seed(4));
        for _ in 0..steps(1500) {
            let file = rng.below(FILES);
            match rng.below(4) {
                0 => drop(fs::remove_file(path(file))),
                1 => {
                    if let Ok(open) = OpenOptions::new().write(true).open(path(file)) {
                        open.set_len(rng.below(4 * PAGE) / 8 * 8).unwrap();
                    }
                }
                _ => write(file, rng.below(6 * PAGE) / 8 * 8),
            }
        }
        is_done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn parked_mappings_stay_within_their_limit_and_the_useful_ones_stay() {
    let directory = directory();
    let mapper = Mapper::builder().mapping_cache_bytes(16 * 16 * PAGE).build().unwrap();
    let path = |file: u64| directory.path().join(file.to_string());
    for file in 0..400 {
        fs::write(path(file), named(file, PAGE as usize)).unwrap();
    }
    for _ in 0..3 {
        for file in 0..32 {
            drop(view(&mapper, &path(file)));
        }
    }
    let before = mapper.stats().cache;
    for file in 32..400 {
        assert_eq!(content(&view(&mapper, &path(file))), named(file, PAGE as usize));
        assert!(mapper.stats().cache.parked_bytes <= 16 * 16 * PAGE);
    }
    for file in 0..32 {
        drop(view(&mapper, &path(file)));
    }
    let after = mapper.stats().cache;
    assert!(after.hits - before.hits >= 24, "a scan drives out little that is used: {after:?}");
    mapper.forget_all().unwrap();
    assert_eq!(mapper.stats().cache.parked, 0);
}

#[test]
fn a_cache_without_a_limit_parks_everything() {
    let (directory, path) = scene_of(b"text");
    let mapper = Mapper::builder().mapping_cache_bytes(u64::MAX).build().unwrap();
    for hits in 0..3 {
        drop(view(&mapper, &path));
        let stats = mapper.stats().cache;
        assert_eq!((stats.parked, stats.hits), (1, hits));
    }
    drop(directory);
}

#[test]
fn without_a_cache_and_without_delay_a_dropped_view_is_gone() {
    let directory = directory();
    let mapper = Mapper::builder().mapping_cache_bytes(0).unmap(Unmap::Sync).build().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, named(1, 9000)).unwrap();
    let name = path.to_str().unwrap().to_owned();
    let is_mapped = || fs::read_to_string("/proc/self/maps").unwrap().contains(&name);
    let shown = view(&mapper, &path);
    assert!(is_mapped());
    drop(shown);
    assert!(!is_mapped());
    let later = Mapper::builder()
        .mapping_cache_bytes(0)
        .unmap(Unmap::Async { threshold_pages: 1 << 30, delay: Duration::from_millis(1) })
        .build()
        .unwrap();
    drop(view(&later, &path));
    // The timer unmaps it eventually.
    while is_mapped() {
        std::thread::yield_now();
    }
}

#[test]
fn a_child_gets_errors_and_leaves_the_parents_mappings_alone() {
    let (directory, mapper) = (directory(), mapper());
    let path = directory.path().join("file");
    fs::write(&path, named(1, 9000)).unwrap();
    let shown = view(&mapper, &path);
    // SAFETY: the child only makes calls that are inert there, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = [
            mapper.map(&path, FileAccess::Read, ..).map(drop),
            shown.read(|_| ()),
            shown.get::<u8>(0).map(drop),
            mapper.forget(&path),
            mapper.forget_all(),
        ];
        let all = refused.iter().all(|outcome| matches!(outcome, Err(MapError::Forked)));
        drop((shown, mapper));
        // The child's own mapper works.
        let own = Mapper::builder().build().unwrap();
        let same = content(&view(&own, &path)) == named(1, 9000);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!(all && same))) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(content(&shown), named(1, 9000));
}

/// In a child, the addresses of the parent's mappings are free for the child to map.
#[test]
fn a_child_that_drops_what_it_inherited_unmaps_nothing_of_its_own() {
    let (_directory, path) = scene_of(b"text");
    let mapper = Mapper::builder().mappings_limit(0).build().unwrap();
    let shown = view(&mapper, &path);
    assert!(shown.is_snapshot());
    let address = shown.as_ptr().cast_mut();
    // SAFETY: the child makes inert calls and maps its own memory, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
        );
        // SAFETY: `MAP_FIXED_NOREPLACE` replaces no existing mapping.
        let own = unsafe { libc::mmap(address.cast(), 4096, access, flags, -1, 0) };
        let is_free = own == address.cast();
        drop((shown, mapper));
        // SAFETY: mapped above, if it could be.
        let is_there = is_free && unsafe { address.read_volatile() } == 0;
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!is_there)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "11 is SIGSEGV");
    assert_eq!(content(&shown), b"text");
}

#[test]
fn a_file_of_more_than_half_of_the_addresses_can_be_stored_to() {
    const LEN_BYTES: u64 = 9 << 40;
    let (_directory, path) = scene_of(b"");
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    if let Err(error) = file.set_len(LEN_BYTES) {
        return eprintln!("skipped: no file of 9 TiB here: {error}");
    }
    for access in [PRIVATE, ViewOptions::write()] {
        let view = mapper().map(&path, access, ..).unwrap();
        view.write_all_at(b"end", LEN_BYTES - 3).unwrap();
        view.flush().unwrap();
        let mut end = [0; 3];
        File::open(&path).unwrap().read_exact_at(&mut end, LEN_BYTES - 3).unwrap();
        assert_eq!(&end, b"end");
        let error = view.grow(2 * LEN_BYTES).unwrap_err();
        assert!(matches!(error, MapError::GrowBeyond { .. }), "{error}");
    }
}
