//! Ranges of open files, and what they keep open, mapped and parked.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use aquifer_mapper::{Advice, FaultCause, FileAccess, FileView, MapError, Mapper, Unmap};
use tempfile::TempDir;

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

/// A mapper that unmaps only on request.
fn patient(mapping_cache_bytes: u64) -> Mapper {
    let unmap = Unmap::Async { threshold_pages: 512, delay: std::time::Duration::from_secs(3600) };
    Mapper::builder().mapping_cache_bytes(mapping_cache_bytes).unmap(unmap).build().unwrap()
}

/// A file in memory of 4 EiB less a page, for which no process has enough addresses. `None` if it
/// cannot be made.
fn endless(directory: &TempDir) -> Option<(PathBuf, File)> {
    let path = directory.path().join("endless");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    if file.set_len((1 << 62) - PAGE).is_err() {
        eprintln!("skipped: no file system for a file of 4 EiB");
        return None;
    }
    Some((path, file))
}

fn in_memory() -> TempDir {
    aquifer_testkit::scratch::in_memory()
}

fn content(view: &FileView) -> Vec<u8> {
    view.read(|bytes| bytes.to_vec()).unwrap()
}

/// Number of descriptors of this process that are open on a file.
fn descriptors_of(file: &File) -> usize {
    let id = |metadata: &fs::Metadata| (metadata.dev(), metadata.ino());
    let wanted = id(&file.metadata().unwrap());
    let all = fs::read_dir("/proc/self/fd").unwrap();
    all.filter(|entry| {
        let path = entry.as_ref().unwrap().path();
        fs::metadata(path).is_ok_and(|metadata| id(&metadata) == wanted)
    })
    .count()
}

#[test]
fn of_a_file_larger_than_the_addresses_a_range_is_mapped() {
    let directory = in_memory();
    let Some((path, file)) = endless(&directory) else { return };
    let start = (1 << 61) + 5;
    file.write_all_at(&[7; 3 * PAGE as usize], start).unwrap();
    for mapper in [
        Mapper::builder().build().unwrap(),
        patient(0),
        Mapper::builder().resident_budget_bytes(64 << 20).build().unwrap(),
    ] {
        for by_path in [false, true] {
            let range = start + 1..start + 2 * PAGE;
            let view = if by_path {
                mapper.map(&path, FileAccess::Read, range.clone())
            } else {
                mapper.map_file(&file, FileAccess::Read, range.clone())
            };
            let view = view.unwrap();
            assert_eq!((view.offset_bytes(), view.len_bytes()), (start + 1, 2 * PAGE - 1));
            assert_eq!(content(&view), vec![7; 2 * PAGE as usize - 1]);
            assert_eq!(view.get::<u16>(2 * PAGE - 3).unwrap(), 0x0707);
            // SAFETY: no process changes the file.
            assert_eq!(unsafe { view.as_slice() }[0], 7);
            view.touch_many(&[0..PAGE, PAGE..view.len_bytes()]).unwrap();
            view.prefetch(&[0..1, PAGE..PAGE + 1]).unwrap().wait().unwrap();
            for advice in [Advice::Random, Advice::WillNeed, Advice::Normal] {
                view.advise(advice, 100..view.len_bytes()).unwrap();
            }
        }
        let all = mapper.map(&path, FileAccess::Read, ..).unwrap_err();
        assert!(matches!(all, MapError::Memory(_) | MapError::Map { .. }), "{all}");
    }
}

#[test]
fn a_byte_of_a_range_that_is_gone_is_named_and_comes_back() {
    let directory = in_memory();
    let Some((path, file)) = endless(&directory) else { return };
    let start = 1 << 61;
    let mapper = patient(0);
    let view = mapper.map_file(&file, FileAccess::Read, start..start + 4 * PAGE).unwrap();
    file.set_len(start + PAGE).unwrap();
    for offset in [
        view.read_range(2..4 * PAGE, |bytes| bytes.to_vec()).unwrap_err(),
        view.touch_many(&[0..PAGE, PAGE..4 * PAGE]).unwrap_err(),
        view.get::<u8>(PAGE).map(drop).unwrap_err(),
    ] {
        let MapError::Fault { path: named, offset_bytes, cause: FaultCause::Truncated } = offset
        else {
            panic!("{offset}");
        };
        assert_eq!((named, offset_bytes), (path.clone(), start + PAGE));
    }
    file.set_len(start + 4 * PAGE).unwrap();
    file.write_all_at(b"again", start + PAGE).unwrap();
    assert_eq!(view.read_range(PAGE..PAGE + 5, |bytes| bytes.to_vec()).unwrap(), b"again");
}

#[test]
fn ranges_of_an_open_file_share_a_descriptor_and_a_name_is_asked_for_late() {
    let directory = tempfile::tempdir().unwrap();
    let (path, renamed) = (directory.path().join("file"), directory.path().join("renamed"));
    fs::write(&path, vec![3; 64 * PAGE as usize]).unwrap();
    for cache_bytes in [0, 64 << 20] {
        fs::write(&path, vec![3; 64 * PAGE as usize]).unwrap();
        let (file, mapper) = (File::open(&path).unwrap(), patient(cache_bytes));
        let map = |page: u64| mapper.map_file(&file, FileAccess::Read, page * PAGE..64 * PAGE);
        let views: Vec<_> = (0..64).map(|page| map(page).unwrap()).collect();
        assert_eq!(descriptors_of(&file), 2, "the caller's and one duplicate");
        fs::rename(&path, &renamed).unwrap();
        assert_eq!(views[0].path(), renamed);
        fs::rename(&renamed, &path).unwrap();
        assert_eq!(views[0].path(), renamed, "as it was called when it was asked");
        assert_eq!(views[1].path(), path);
        drop(views);
        mapper.forget_all().unwrap();
        assert_eq!(descriptors_of(&file), 1, "closed with what was retired");
        // The path has not been read yet, and the file is no longer open.
        let view = map(1).unwrap();
        drop(file);
        assert_eq!((view.path(), content(&view).len()), (&*path, 63 * PAGE as usize));
        fs::remove_file(&path).unwrap();
    }
    let (file, mapper) = (tempfile::tempfile().unwrap(), Mapper::builder());
    file.set_len(PAGE).unwrap();
    let mapper = mapper.mapping_cache_bytes(0).unmap(Unmap::Sync).build().unwrap();
    drop(mapper.map_file(&file, FileAccess::Read, ..).unwrap());
    assert_eq!(descriptors_of(&file), 1, "at once means at once");
}

#[test]
fn an_open_file_without_read_access_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, [3; 100]).unwrap();
    for cache_bytes in [0, 64 << 20] {
        let mapper = patient(cache_bytes);
        let only_written = File::options().write(true).open(&path).unwrap();
        let refused = mapper.map_file(&only_written, FileAccess::Read, ..).unwrap_err();
        assert!(matches!(refused, MapError::Map { path: ref named, .. } if *named == path));
        let read = File::open(&path).unwrap();
        let view = mapper.map_file(&read, FileAccess::Read, ..).unwrap();
        assert_eq!(content(&view), [3; 100]);
    }
}

#[test]
fn nothing_of_another_file_is_shown_whatever_its_descriptor_was() {
    let directory = tempfile::tempdir().unwrap();
    let mapper = patient(0);
    let mut numbers = Vec::new();
    for round in 0..300_u64 {
        let path = directory.path().join(round.to_string());
        fs::write(&path, round.to_le_bytes()).unwrap();
        let file = File::open(&path).unwrap();
        numbers.push(file.as_raw_fd());
        let view = mapper.map_file(&file, FileAccess::Read, ..).unwrap();
        fs::remove_file(&path).unwrap();
        drop(file);
        assert_eq!(view.get::<u64>(0).unwrap(), round);
    }
    numbers.dedup();
    assert!(numbers.len() < 300, "numbers of descriptors were used again");
}

// ---- the mapping cache
// ------------------------------------------------------------------------------

fn write_files(directory: &Path, count: usize, len_bytes: u64) -> Vec<PathBuf> {
    let made = (0..count).map(|number| {
        let path = directory.join(number.to_string());
        File::create(&path).unwrap().set_len(len_bytes).unwrap();
        path
    });
    made.collect()
}

#[test]
fn a_file_that_takes_most_of_the_cache_is_parked_and_one_that_takes_more_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let files = write_files(directory.path(), 2, 12 * MIB);
    let larger = directory.path().join("larger");
    File::create(&larger).unwrap().set_len(17 * MIB).unwrap();
    let mapper = patient(16 * MIB);
    let use_once = |path: &Path| drop(mapper.map(path, FileAccess::Read, ..).unwrap());
    use_once(&files[0]);
    use_once(&files[0]);
    let cache = mapper.stats().cache;
    assert_eq!((cache.hits, cache.parked), (1, 1), "{cache:?}");
    assert!(cache.parked_bytes <= 16 * MIB, "{cache:?}");
    use_once(&larger);
    assert_eq!(mapper.stats().cache.parked, 1, "the one that fits stays");
    // A file used once does not evict files that are used repeatedly.
    let small = tempfile::tempdir().unwrap();
    let small = write_files(small.path(), 100, 64 << 10);
    for path in small.iter().chain(&small) {
        use_once(path);
    }
    let before = mapper.stats().cache.hits;
    use_once(&files[1]);
    small.iter().for_each(|path| use_once(path));
    let hits = mapper.stats().cache.hits - before;
    // If its number puts it into the shard that always admits newcomers, it takes the room of 36.
    // By age alone, none would be found.
    assert!(hits >= 50, "{hits} of 100 are there still");
}

#[test]
fn a_pass_over_more_files_than_fit_finds_some_of_them_the_next_time() {
    let directory = tempfile::tempdir().unwrap();
    let files = write_files(directory.path(), 3000, PAGE);
    // Room for 1000.
    let mapper = patient(1000 * PAGE);
    let pass = || {
        let before = mapper.stats().cache.hits;
        for path in &files {
            drop(mapper.map(path, FileAccess::Read, ..).unwrap());
        }
        mapper.stats().cache.hits - before
    };
    let hits: Vec<u64> = (0..12).map(|_| pass()).collect();
    assert!(hits[6..].iter().all(|&hits| hits > 400), "of 1000 at best: {hits:?}");
    assert!(mapper.stats().cache.parked_bytes <= 1000 * PAGE);
}
