//! `Rows` against the plain bytes of the device: every kind of device and layout, errors, changes
//! of the file, and several threads on one handle.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_cache::{Cache, CacheError, Rows};
use aquifer_device::{
    Counting, Device, DeviceError, Direct, Fault, FaultRule, FaultTarget, Faulty, FileDevice,
    MemoryDevice,
};
use aquifer_testkit::rng::Rng;

use crate::support::{Hooked, Liar, block_on, random_bytes, seed, steps};

/// The kinds of device: each of these bytes.
fn devices(bytes: &[u8]) -> Vec<(&'static str, Arc<dyn Device>, Option<tempfile::NamedTempFile>)> {
    let file = |options: aquifer_device::FileOptions, directory: &str| {
        let file = tempfile::NamedTempFile::new_in(directory).unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let device: Arc<dyn Device> = Arc::new(options.open(file.path()).unwrap());
        (device, Some(file))
    };
    let disk = env!("CARGO_TARGET_TMPDIR");
    let options = FileDevice::options;
    let memory: Arc<dyn Device> = Arc::new(MemoryDevice::from_bytes(bytes).unwrap());
    let mut aligned = Hooked::new(memory.clone());
    aligned.alignment_bytes = 4096;
    let mut all: Vec<(_, Arc<dyn Device>, _)> =
        vec![("memory", memory, None), ("4 KiB sectors", Arc::new(aligned), None)];
    for (name, (device, held)) in [
        ("ring", file(options(), disk)),
        ("threads", file(options().io_uring(false), disk)),
        ("buffered", file(options().direct(Direct::Never), disk)),
        ("tmpfs", file(options(), "/dev/shm")),
    ] {
        all.push((name, device, held));
    }
    all
}

#[test]
fn rows_are_the_bytes_of_the_device() {
    let seed = seed(28784);
    let mut rng = Rng::new(seed);
    let bytes = random_bytes(300_000 + rng.below(5000) as usize, seed);
    for turn in 0..steps(6) {
        let row_bytes = [1, 8, 100, 256, 700, 3072, 4096, 9000][rng.below(8) as usize];
        let header_bytes = [0, 1, 128, 4096, 5000][rng.below(5) as usize];
        let count = (bytes.len() - header_bytes) / row_bytes;
        let budget = (row_bytes as u64 + 10) * (8 + rng.below(2 * count as u64));
        for (name, device, _file) in devices(&bytes) {
            let context = format!(
                "{name}, rows of {row_bytes} behind {header_bytes}, turn {turn}, seed {seed}"
            );
            let options = Rows::options(row_bytes).header_bytes(header_bytes as u64);
            let rows = options.budget_bytes(budget.max(8 * row_bytes as u64 + 80));
            let rows = rows.open_device(device).unwrap();
            assert_eq!(rows.len(), count as u64, "{context}");
            let expected = |row: u64| {
                let start = header_bytes + row as usize * row_bytes;
                &bytes[start..start + row_bytes]
            };
            let mut asked = 0;
            for _ in 0..30 {
                // Some batches are dense, some contain a row many times, some are empty.
                let span = [3, 40, count as u64][rng.below(3) as usize].min(count as u64);
                let first = rng.below(count as u64 - span + 1);
                let len = rng.below(200);
                let wanted: Vec<u64> = (0..len).map(|_| first + rng.below(span)).collect();
                let mut visits = vec![0; wanted.len()];
                rows.get_many(&wanted, |position, found| {
                    visits[position] += 1;
                    assert_eq!(found, expected(wanted[position]), "{context}");
                })
                .unwrap();
                assert!(visits.iter().all(|&count| count == 1), "{context}");
                let mut gathered = vec![0; wanted.len() * row_bytes];
                rows.gather(&wanted, &mut gathered).unwrap();
                let mut each = gathered.chunks(row_bytes).zip(&wanted);
                assert!(each.all(|(found, &row)| found == expected(row)), "{context}");
                let row = rng.below(count as u64);
                let mut target = vec![0; row_bytes];
                rows.get(row, &mut target).unwrap();
                assert_eq!(target, expected(row), "{context}");
                asked += 2 * len + 1;
                if rng.chance(0.1) {
                    rows.invalidate(row.saturating_sub(9)..row + 1).unwrap();
                }
            }
            let mut last = vec![0; row_bytes];
            rows.get(rows.len() - 1, &mut last).unwrap();
            assert_eq!(last, expected(rows.len() - 1), "{context}");
            let stats = rows.stats();
            assert_eq!(stats.hits + stats.misses, asked + 1, "{context}: {stats:?}");
            assert!(stats.resident_rows <= stats.capacity_rows, "{context}: {stats:?}");
            rows.invalidate(..).unwrap();
            assert_eq!(rows.stats().resident_rows, 0, "{context}");
        }
    }
}

#[test]
fn reads_are_of_sectors_and_of_each_row_once() {
    let counting = Counting::new(MemoryDevice::from_bytes(&random_bytes(1 << 20, 1)).unwrap());
    let counters = counting.counters();
    let mut aligned = Hooked::new(Arc::new(counting));
    aligned.alignment_bytes = 512;
    // Rows of more than half a page bring no others with them.
    let rows = Rows::options(3072).budget_bytes(1 << 20).open_device(aligned).unwrap();
    let mut row = vec![0; 3072];
    rows.get(100, &mut row).unwrap();
    rows.get(100, &mut row).unwrap();
    let counts = counters.snapshot();
    assert_eq!((counts.reads, counts.read_bytes), (1, 3072));
    // Neighbours are read together, repeated rows once, resident ones not at all.
    rows.get_many(&[11, 10, 12, 10, 100], |_, _| ()).unwrap();
    let counts = counters.snapshot();
    assert_eq!((counts.reads, counts.read_bytes), (2, 4 * 3072));
    let stats = rows.stats();
    assert_eq!((stats.hits, stats.misses, stats.resident_rows), (2, 5, 4));
}

#[test]
fn an_empty_table_keeps_what_comes_with_a_page() {
    let bytes = random_bytes(1 << 20, 2);
    let counting = Counting::new(MemoryDevice::from_bytes(&bytes).unwrap());
    let counters = counting.counters();
    let mut aligned = Hooked::new(Arc::new(counting));
    aligned.alignment_bytes = 512;
    let rows = Rows::options(256).budget_bytes(1 << 20).open_device(aligned).unwrap();
    let mut row = [0; 256];
    rows.get(35, &mut row).unwrap();
    assert_eq!(counters.snapshot().read_bytes, 4096);
    for neighbour in 32..48 {
        rows.get(neighbour, &mut row).unwrap();
        assert_eq!(row, bytes[neighbour as usize * 256..][..256]);
    }
    assert_eq!(counters.snapshot().reads, 1);
}

#[test]
fn wrong_arguments_are_refused() {
    let device = || MemoryDevice::new(10_000).unwrap();
    let refused =
        |options: aquifer_cache::RowsOptions| options.open_device(device()).err().unwrap();
    assert!(matches!(refused(Rows::options(0)), CacheError::RowLayout { .. }));
    let header = Rows::options(8).header_bytes(10_001);
    assert!(matches!(refused(header), CacheError::RowLayout { .. }));
    let small = Rows::options(1000).budget_bytes(8000);
    assert!(matches!(refused(small), CacheError::Budget { min_bytes: 8080, .. }));
    let large = Rows::options(1000).budget_bytes(u64::MAX);
    assert!(matches!(refused(large), CacheError::Budget { .. }));
    let endless = Rows::options(usize::MAX).budget_bytes(1 << 20);
    assert!(matches!(refused(endless), CacheError::Budget { .. }));
    for alignment_bytes in [0, 3, 4 << 20] {
        let device = Hooked { alignment_bytes, ..Hooked::new(Arc::new(device())) };
        let refused = Rows::options(8).open_device(device).err().unwrap();
        assert!(matches!(refused, CacheError::RowLayout { .. }));
    }
    let missing = Rows::options(8).open("/nonexistent").err().unwrap();
    assert!(matches!(missing, CacheError::Open { .. }));

    let none = Rows::options(8).header_bytes(10_000).open_device(device()).unwrap();
    assert!(none.is_empty());
    let rows = Rows::options(1000).open_device(device()).unwrap();
    let mut row = [0; 1000];
    let outside = rows.get(10, &mut row).unwrap_err();
    assert!(matches!(outside, CacheError::RowOutOfRange { row: 10, rows: 10, .. }));
    let outside = rows.get_many(&[0, u64::MAX], |_, _| panic!("visited")).unwrap_err();
    assert!(matches!(outside, CacheError::RowOutOfRange { row: u64::MAX, .. }));
    assert_eq!(rows.stats().misses, 0);
    rows.invalidate(5..u64::MAX).unwrap();
}

#[test]
fn a_device_of_any_length_is_read_inside_it() {
    for (header_bytes, row_bytes) in [(0, 1), (0, 8), (3, 1000), (i64::MAX as u64 - 5000, 700)] {
        let device = Liar { len_bytes: u64::MAX, claims_more: true, runs: usize::MAX };
        let rows = Rows::options(row_bytes).header_bytes(header_bytes).budget_bytes(1 << 20);
        let rows = rows.open_device(device).unwrap();
        let wanted = [0, rows.len() / 2, rows.len() - 1, 1, rows.len() - 2];
        rows.get_many(&wanted, |_, found| assert!(found.iter().all(|&byte| byte == 7))).unwrap();
        rows.invalidate(..).unwrap();
    }
    let header = Rows::options(8).header_bytes(u64::MAX - 100);
    let device = Liar { len_bytes: u64::MAX, claims_more: false, runs: 0 };
    assert!(matches!(header.open_device(device), Err(CacheError::RowLayout { .. })));
}

#[test]
fn a_row_that_the_device_leaves_out_is_an_error() {
    for runs in 0..3 {
        let device = Liar { len_bytes: 1 << 20, claims_more: false, runs };
        let rows = Rows::options(3000).budget_bytes(1 << 20).open_device(device).unwrap();
        let mut visits = 0;
        let failed = rows.get_many(&[0, 100, 200], |_, _| visits += 1).unwrap_err();
        let CacheError::Load { offset_bytes, source, .. } = failed else { panic!("{failed}") };
        assert!(matches!(source, DeviceError::Unfinished { .. }), "{source}");
        assert_eq!((visits, offset_bytes), (runs, runs as u64 * 100 * 3000));
    }
}

#[test]
fn rows_behind_a_new_end_of_the_file_fail_and_others_do_not() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), random_bytes(100_000, 3)).unwrap();
    let rows = Rows::options(1000).open(file.path()).unwrap();
    let mut row = [0; 1000];
    rows.get(90, &mut row).unwrap();
    file.as_file().set_len(50_500).unwrap();
    rows.get(90, &mut row).unwrap(); // in memory
    rows.get(49, &mut row).unwrap();
    for gone in [50, 51, 99] {
        match rows.get(gone, &mut row).unwrap_err() {
            CacheError::Load { offset_bytes, source: DeviceError::ShortRead { .. }, .. } => {
                assert_eq!(offset_bytes, gone * 1000);
            }
            other => panic!("{other}"),
        }
    }
    assert!(rows.get_many(&[1, 99, 2], |_, _| ()).is_err());
    file.as_file().set_len(100_000).unwrap();
    rows.get(99, &mut row).unwrap();
    assert_eq!(row, [0; 1000]);
}

#[test]
fn a_bad_sector_fails_the_rows_in_it() {
    let bytes = random_bytes(64 << 10, 4);
    let faulty = Faulty::new(MemoryDevice::from_bytes(&bytes).unwrap());
    let control = faulty.control();
    control.inject(
        FaultRule::new(FaultTarget::Reads, Fault::Errno(libc::EIO)).range(10 * 512..11 * 512),
    );
    let mut aligned = Hooked::new(Arc::new(faulty));
    aligned.alignment_bytes = 512;
    for others in [vec![19, 22], vec![0, 19, 22, 23, 40]] {
        let rows = Rows::options(256).budget_bytes(1 << 20);
        let aligned = Hooked { alignment_bytes: 512, ..Hooked::new(aligned.inner.clone()) };
        let rows = rows.open_device(aligned).unwrap();
        let mut seen = 0;
        rows.get_many(&others, |position, found| {
            seen += 1;
            assert_eq!(found, &bytes[others[position] as usize * 256..][..256]);
        })
        .unwrap();
        assert_eq!(seen, others.len());
        for bad in [20, 21] {
            let failed = rows.get_many(&[19, bad, 22], |_, _| ()).unwrap_err();
            let CacheError::Load { offset_bytes, .. } = failed else { panic!("{failed}") };
            assert_eq!(offset_bytes, bad * 256);
        }
        assert_eq!(rows.stats().resident_rows % 2, 0, "a row of the sector is in memory");
    }
    control.clear();
}

#[test]
fn a_changed_row_is_seen_after_it_is_invalidated() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), [1; 100_000]).unwrap();
    let rows = Rows::options(100).open(file.path()).unwrap();
    let mut row = [0; 100];
    for index in [3, 4, 5] {
        rows.get(index, &mut row).unwrap();
    }
    file.as_file().write_all_at(&[2; 300], 300).unwrap();
    rows.get(4, &mut row).unwrap();
    assert_eq!(row, [1; 100]);
    rows.invalidate(4..=4).unwrap();
    rows.get(4, &mut row).unwrap();
    assert_eq!(row, [2; 100]);
    rows.get(5, &mut row).unwrap();
    assert_eq!(row, [1; 100]);
    rows.invalidate(..).unwrap();
    rows.gather(&[5], &mut row).unwrap();
    assert_eq!(row, [2; 100]);
}

#[test]
fn a_mapping_for_writing_excludes_rows() {
    let device = Arc::new(MemoryDevice::new(1 << 20).unwrap());
    let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
    let rows = Rows::options(64).open_device(device.clone()).unwrap();
    let second = Rows::options(32).open_device(device.clone()).unwrap();
    let reading = cache.map(device.clone()).unwrap();
    drop(reading);
    assert!(matches!(cache.map_mut(device.clone()), Err(CacheError::AlreadyAttached { .. })));
    drop((rows, second));
    let writing = cache.map_mut(device.clone()).unwrap();
    let refused = Rows::options(64).open_device(device.clone());
    assert!(matches!(refused, Err(CacheError::AlreadyAttached { .. })));
    drop(writing);
    Rows::options(64).open_device(device).unwrap();
}

#[test]
fn visits_may_call_and_panic() {
    let bytes = random_bytes(1 << 20, 5);
    for (name, device, _file) in devices(&bytes) {
        let rows = Rows::options(512).budget_bytes(64 << 10).open_device(device).unwrap();
        let wanted: Vec<u64> = (0..300).map(|index| index * 6).collect();
        rows.get_many(&wanted, |position, found| {
            assert_eq!(found, &bytes[position * 6 * 512..][..512], "{name}");
            let other = (position as u64 * 31) % 2048;
            let mut row = [0; 512];
            rows.get(other, &mut row).unwrap();
            assert_eq!(row, bytes[other as usize * 512..][..512], "{name}");
        })
        .unwrap();
        let mut left = 20;
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            rows.get_many(&wanted, |_, _| {
                left -= 1;
                assert!(left > 0, "a panic in a visit");
            })
        }));
        assert!(panicked.is_err(), "{name}");
        let mut sum = 0;
        rows.get_many(&wanted, |_, _| sum += 1).unwrap();
        assert_eq!(sum, wanted.len(), "{name}");
    }
}

#[test]
fn batches_can_be_awaited() {
    let bytes = random_bytes(1 << 20, 6);
    let device = Arc::new(MemoryDevice::from_bytes(&bytes).unwrap());
    let options = Rows::options(512).budget_bytes(64 << 10);
    let rows = Arc::new(options.open_device(device.clone()).unwrap());
    let seen = Arc::new(AtomicU64::new(0));
    let counter = seen.clone();
    let wanted: Vec<u64> = (0..300).map(|index| index * 6).collect();
    let counted = rows.get_many_async(wanted.clone(), move |position, found| {
        counter.fetch_add(position as u64 + found.len() as u64, Ordering::Relaxed);
    });
    let gathered = rows.gather_async(wanted.clone());
    let panicked = rows.get_many_async(wanted.clone(), |_, _| panic!("a panic in a visit"));
    let outside = rows.gather_async(vec![u64::MAX]);
    drop(rows.gather_async(wanted.clone()));

    let mut expected = vec![0; wanted.len() * 512];
    rows.gather(&wanted, &mut expected).unwrap();
    assert!(block_on(gathered).unwrap() == expected);
    block_on(counted).unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), (0..300).sum::<u64>() + 300 * 512);
    let panicked = std::panic::AssertUnwindSafe(|| block_on(panicked));
    assert!(std::panic::catch_unwind(panicked).is_err());
    assert!(matches!(block_on(outside), Err(CacheError::RowOutOfRange { .. })));

    // The last use of the device ends with the last batch.
    let last = rows.gather_async(wanted);
    drop(rows);
    assert!(block_on(last).unwrap() == expected);
    let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
    cache.map_mut(device).unwrap();
}

/// Bytes of a row that name it.
fn named(row: u64, version: u64, row_bytes: usize) -> Vec<u8> {
    (0..row_bytes / 16).flat_map(|_| [row, version]).flat_map(u64::to_ne_bytes).collect()
}

#[test]
fn threads_share_a_small_table() {
    const ROWS: u64 = 400;
    let seed = seed(28785);
    for row_bytes in [64, 3072] {
        let bytes: Vec<u8> = (0..ROWS).flat_map(|row| named(row, 0, row_bytes)).collect();
        for (name, device, _file) in devices(&bytes) {
            // Three sets, so that threads meet in them.
            let rows = Rows::options(row_bytes).budget_bytes(3 * 8 * (row_bytes as u64 + 10));
            let rows = rows.open_device(device).unwrap();
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let rows = &rows;
                    scope.spawn(move || {
                        let mut rng = Rng::new(seed ^ thread);
                        let mut row = vec![0; row_bytes];
                        for _ in 0..steps(150) {
                            let wanted: Vec<u64> =
                                (0..rng.below(20)).map(|_| rng.below(ROWS)).collect();
                            rows.get_many(&wanted, |position, found| {
                                assert_eq!(found, named(wanted[position], 0, row_bytes), "{name}");
                            })
                            .unwrap();
                            // Few rows, so that they are hits while others are replaced.
                            for _ in 0..20 {
                                let index = rng.below(12);
                                rows.get(index, &mut row).unwrap();
                                assert_eq!(row, named(index, 0, row_bytes), "{name}, seed {seed}");
                            }
                            if rng.chance(0.05) {
                                rows.invalidate(rng.below(ROWS)..).unwrap();
                            }
                        }
                    });
                }
            });
            let stats = rows.stats();
            assert!(stats.resident_rows <= stats.capacity_rows, "{stats:?}");
        }
    }
}

#[test]
fn no_call_returns_what_was_invalidated_before_it() {
    const ROWS: u64 = 64;
    const ROW_BYTES: usize = 256;
    let bytes: Vec<u8> = (0..ROWS).flat_map(|row| named(row, 0, ROW_BYTES)).collect();
    let device = Arc::new(MemoryDevice::from_bytes(&bytes).unwrap());
    let rows = Rows::options(ROW_BYTES).budget_bytes(64 << 10).open_device(device.clone()).unwrap();
    let published = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (rows, published, done) = (&rows, &published, &done);
            scope.spawn(move || {
                let mut rng = Rng::new(seed(28786) ^ thread);
                while !done.load(Ordering::Relaxed) {
                    let oldest = published.load(Ordering::Acquire);
                    let wanted: Vec<u64> = (0..8).map(|_| rng.below(ROWS)).collect();
                    rows.get_many(&wanted, |position, found| {
                        for pair in found.chunks(16) {
                            let word = |at: usize| {
                                u64::from_ne_bytes(pair[at..at + 8].try_into().unwrap())
                            };
                            assert_eq!(word(0), wanted[position]);
                            assert!(word(8) >= oldest, "{} before {oldest}", word(8));
                        }
                    })
                    .unwrap();
                }
            });
        }
        for version in 1..=steps(2000) as u64 {
            for row in 0..ROWS {
                device.write_at(row * ROW_BYTES as u64, &named(row, version, ROW_BYTES)).unwrap();
            }
            if version % 2 == 0 {
                rows.invalidate(..).unwrap();
            } else {
                (0..ROWS).for_each(|row| rows.invalidate(row..=row).unwrap());
            }
            published.store(version, Ordering::Release);
        }
        done.store(true, Ordering::Relaxed);
    });
}
