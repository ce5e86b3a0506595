//! The behaviour of a read-only mapping of a file, the same on both backends.

use std::fs::File;
use std::io::Write;

use crate::common::*;
use aquifer_cache::{Advice, Backend, CacheError};

/// Not a whole number of pages.
const LEN: u64 = 20 * MIB + 1234;

on_both_backends! {
    fn loads_and_calls_read_the_file(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(8 * MIB);
        let mapping = file.map(&cache, backend);
        assert_eq!(mapping.backend(), backend);
        assert_eq!(mapping.len(), LEN);
        for step in 0..20_000u64 {
            let at = step.wrapping_mul(7919 * PAGE + 13) % LEN;
            // SAFETY: inside the mapping.
            assert_eq!(unsafe { mapping.as_ptr().add(at as usize).read_volatile() }, byte_at(at));
        }
        let at = 3 * PAGE - 5;
        assert_eq!(mapping.get::<[u8; 16]>(at).unwrap().to_vec(), bytes_at(at, 16));
        let mut all = vec![0; LEN as usize];
        mapping.read_exact_at(&mut all, 0).unwrap();
        assert!(all == bytes_at(0, LEN as usize));
        let seen = mapping.read(at..at + 10_000, |bytes| bytes.to_vec()).unwrap();
        assert_eq!(seen, bytes_at(at, 10_000));
        assert_eq!(mapping.read(LEN - 3..LEN, |bytes| bytes.to_vec()).unwrap(), bytes_at(LEN - 3, 3));
        assert_eq!(mapping.read(7..7, |bytes| bytes.len()).unwrap(), 0);
        mapping.touch(LEN - 1).unwrap();
        assert!(mapping.last_fault_error().is_none());
        assert!(format!("{mapping:?}").contains(&format!("backend: {backend:?}")));
    }

    #[allow(clippy::reversed_empty_ranges, reason = "one is handed in")]
    fn what_lies_outside_is_refused(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(8 * MIB);
        let mapping = file.map(&cache, backend);
        let mut two = [0; 2];
        let results = [
            mapping.touch(LEN),
            mapping.touch(u64::MAX),
            mapping.get::<u64>(LEN - 7).map(drop),
            mapping.get::<u8>(u64::MAX).map(drop),
            mapping.read_exact_at(&mut two, LEN - 1),
            mapping.read(LEN..LEN + 1, |_| ()),
            mapping.read(5..4, |_| ()),
            mapping.pin(0..LEN + 1).map(drop),
            mapping.prefetch(&[0..1, LEN..LEN + 1]),
            mapping.touch_many(&[0..1, LEN..LEN + 1]),
            mapping.is_resident(LEN..LEN + 1).map(drop),
            mapping.advise(0..LEN + 1, Advice::WillNeed),
            block_on(mapping.touch_many_async(std::slice::from_ref(&(LEN..LEN + 1)))),
        ];
        for (index, result) in results.into_iter().enumerate() {
            assert!(matches!(result, Err(CacheError::OutOfBounds { .. })), "{index}: {result:?}");
        }
    }

    fn pinned_bytes_go_through_system_calls(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(8 * MIB);
        let mapping = file.map(&cache, backend);
        let range = 5 * PAGE + 9..9 * PAGE;
        let pinned = mapping.pin(range.clone()).unwrap();
        assert!(mapping.is_resident(range.clone()).unwrap());
        let mut null = File::options().write(true).open("/dev/null").unwrap();
        let copy = file.directory.path().join("copy");
        // SAFETY: pinned, and nothing writes to the file.
        let bytes = unsafe { pinned.bytes().as_slice() };
        null.write_all(bytes).unwrap();
        File::create(&copy).unwrap().write_all(bytes).unwrap();
        let wanted = bytes_at(range.start, (range.end - range.start) as usize);
        assert!(std::fs::read(&copy).unwrap() == wanted);
    }

    fn pinned_pages_stay(backend) {
        let file = TestFile::new(LEN);
        if !file.is_on_storage() {
            eprintln!("skipped: this file system is in memory");
            return;
        }
        let cache = cache_of(8 * MIB);
        let mapping = file.map(&cache, backend);
        let ranges = [PAGE..2 * PAGE, 5 * MIB + 3 * PAGE..5 * MIB + 5 * PAGE];
        let pins = ranges.clone().map(|range| mapping.pin(range).unwrap());
        let stay = || ranges.iter().all(|range| mapping.is_resident(range.clone()).unwrap());
        mapping.advise(0..LEN, Advice::DontNeed).unwrap();
        assert!(stay());
        assert!(!mapping.is_resident(0..PAGE).unwrap());
        for _ in 0..2 {
            for page in 0..LEN / PAGE {
                mapping.touch(page * PAGE).unwrap();
            }
        }
        if backend == Backend::Kernel && file.cached_bytes().is_some() {
            wait_until("dropped", || file.cached_bytes().unwrap() <= 10 * MIB);
        }
        assert!(stay());
        for (range, pin) in ranges.iter().zip(&pins) {
            assert_eq!(pin.bytes().to_vec(), bytes_at(range.start, pin.len()));
        }
    }

    fn advice_is_followed(backend) {
        let file = TestFile::new(LEN);
        if !file.is_on_storage() {
            eprintln!("skipped: this file system is in memory");
            return;
        }
        let cache = cache_of(32 * MIB);
        let mapping = file.map(&cache, backend);
        mapping.advise(0..LEN, Advice::Random).unwrap();
        mapping.touch(PAGE).unwrap();
        assert!(mapping.is_resident(PAGE..2 * PAGE).unwrap());
        assert!(!mapping.is_resident(2 * PAGE..3 * PAGE).unwrap(), "nothing is read ahead");
        mapping.advise(4 * MIB..5 * MIB, Advice::WillNeed).unwrap();
        wait_until("prefetched", || mapping.is_resident(4 * MIB..5 * MIB).unwrap());
        mapping.prefetch(&[6 * MIB..6 * MIB + 1, 7 * MIB..7 * MIB + PAGE]).unwrap();
        wait_until("prefetched", || {
            mapping.is_resident(6 * MIB..6 * MIB + 1).unwrap()
                && mapping.is_resident(7 * MIB..7 * MIB + PAGE).unwrap()
        });
        mapping.advise(4 * MIB..5 * MIB, Advice::DontNeed).unwrap();
        assert!(!mapping.is_resident(4 * MIB..4 * MIB + PAGE).unwrap());
        assert_eq!(mapping.get::<u8>(4 * MIB).unwrap(), byte_at(4 * MIB), "it comes again");
        for advice in [Advice::Sequential, Advice::Normal, Advice::Cold] {
            mapping.advise(0..LEN, advice).unwrap();
            assert_eq!(mapping.get::<u8>(9 * MIB).unwrap(), byte_at(9 * MIB));
        }
    }

    fn batches_bring_their_pages(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(32 * MIB);
        let mapping = file.map(&cache, backend);
        mapping.advise(0..LEN, Advice::Random).unwrap();
        let ranges: Vec<_> =
            (0..300u64).map(|i| (i * 7919 * PAGE) % (LEN - 100)).map(|at| at..at + 100).collect();
        mapping.touch_many(&ranges).unwrap();
        assert!(ranges.iter().all(|range| mapping.is_resident(range.clone()).unwrap()));
        let later: Vec<_> = (0..10u64).map(|i| i * MIB + 17..i * MIB + 18).collect();
        block_on(mapping.touch_many_async(&later)).unwrap();
        assert!(later.iter().all(|range| mapping.is_resident(range.clone()).unwrap()));
        mapping.touch_many(&[]).unwrap();
    }

    fn a_range_larger_than_the_budget_is_not_pinned(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(8 * MIB);
        let mapping = file.map(&cache, backend);
        assert!(matches!(mapping.pin(0..LEN), Err(CacheError::Exhausted { .. })));
        assert!(matches!(mapping.read(0..LEN, |_| ()), Err(CacheError::Exhausted { .. })));
        assert_eq!(mapping.get::<u8>(LEN - 1).unwrap(), byte_at(LEN - 1), "nothing stays pinned");
    }

    fn a_growing_file_keeps_its_mapped_length(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(8 * MIB);
        let mapping = file.map(&cache, backend);
        file.file.set_len(2 * LEN).unwrap();
        assert_eq!(mapping.len(), LEN);
        assert!(matches!(mapping.touch(LEN), Err(CacheError::OutOfBounds { .. })));
        assert_eq!(mapping.get::<u8>(LEN - 1).unwrap(), byte_at(LEN - 1));
        let longer = file.map(&cache, backend);
        assert_eq!(longer.len(), 2 * LEN);
        assert_eq!(longer.get::<u8>(LEN + 5 * PAGE).unwrap(), 0);
        assert_eq!(longer.get::<u8>(LEN - 1).unwrap(), byte_at(LEN - 1));
    }

    fn truncation_is_an_error_and_can_be_undone(backend) {
        let file = TestFile::new(LEN);
        let cache = cache_of(32 * MIB);
        let mapping = file.map(&cache, backend);
        let cut = 4 * MIB;
        file.file.set_len(cut).unwrap();
        let gone = cut + 3 * PAGE;
        let mut target = vec![0; 4 * PAGE as usize];
        let results = [
            mapping.touch(gone),
            mapping.get::<u64>(gone + 4).map(drop),
            mapping.read_exact_at(&mut target, cut - PAGE),
            mapping.read(cut - PAGE..gone, |bytes| bytes.to_vec()).map(drop),
            mapping.pin(gone..gone + 1).map(drop),
            mapping.touch_many(&[0..1, gone..gone + 1]),
        ];
        for (index, result) in results.into_iter().enumerate() {
            match result.expect_err("the page is gone") {
                CacheError::MappedAccess { offset_bytes, .. } if backend == Backend::Kernel => {
                    assert!((cut..=gone).contains(&offset_bytes), "{index}: {offset_bytes}");
                }
                CacheError::Load { .. } if backend == Backend::User => {}
                other => panic!("{index}: {other:?}"),
            }
        }
        assert_eq!(mapping.get::<u8>(cut - 1).unwrap(), byte_at(cut - 1), "the rest is there");
        file.file.set_len(LEN).unwrap();
        assert_eq!(mapping.get::<u8>(gone).unwrap(), 0, "a hole now");
        mapping.pin(gone..gone + PAGE).unwrap();
    }

    fn many_mappings_of_many_files(backend) {
        let files: Vec<_> = (1..8).map(|i| TestFile::new(i * 64 * PAGE + i)).collect();
        let cache = cache_of(8 * MIB);
        let mappings: Vec<_> = (0..70).map(|i| files[i % 7].map(&cache, backend)).collect();
        std::thread::scope(|scope| {
            for part in mappings.chunks(35) {
                scope.spawn(move || {
                    for mapping in part {
                        let last = mapping.len() - 1;
                        assert_eq!(mapping.get::<u8>(last).unwrap(), byte_at(last));
                    }
                });
            }
        });
        drop(cache);
        assert!(mappings.iter().all(|mapping| mapping.get::<u8>(7).unwrap() == byte_at(7)));
    }
}
