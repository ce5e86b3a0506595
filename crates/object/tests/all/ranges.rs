//! psync of named ranges: exactly their bytes become durable, and all others wait for the next psync.

#![allow(clippy::single_range_in_vec_init, reason = "one range is a list of ranges here")]

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::{PAGE, Place, on_media, operations, survivor};
use aquifer_crashkit::{CrashMedia, Fault, Trigger};
use aquifer_object::{Attachment, CreateObject, ObjectError, ObjectOptions, Objects};
use aquifer_pool::PoolError;
use aquifer_pool::media::MediaOperation;
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;
use aquifer_vm::dirty::TrackerForm;

const PAGES: usize = 48;

fn created(log_bytes: u64) -> (std::sync::Arc<CrashMedia>, Objects) {
    let (media, objects) = on_media(8 << 20, log_bytes);
    objects.create("object", (PAGES * PAGE) as u64).unwrap();
    (media, objects)
}

fn words(range: &Range<u64>) -> Range<usize> {
    range.start as usize / 8 * 8..range.end.next_multiple_of(8) as usize
}

fn random_range(rng: &mut Rng) -> Range<u64> {
    let len_bytes = (PAGES * PAGE) as u64;
    let most = match rng.below(10) {
        0 => len_bytes,
        1..4 => 3 * PAGE as u64,
        _ => 40,
    };
    let start = rng.below(len_bytes);
    let end = (start + rng.below(most)).min(len_bytes);
    // Some are whole pages.
    if rng.chance(0.2) { start / 4096 * 4096..end.next_multiple_of(4096) } else { start..end }
}

/// Every state after a psync is exactly what was committed, whatever else was stored.
#[test]
fn exactly_the_named_bytes_are_durable() {
    let forms = [TrackerForm::Scan, TrackerForm::Compare];
    for (form, budget_pages) in forms.into_iter().flat_map(|form| [(form, 3), (form, 1 << 20)]) {
        if let Err(error) = form.available() {
            eprintln!("skipped: {}: {error}", form.name());
            continue;
        }
        let seed = seed(1);
        let mut rng = Rng::new(seed);
        let (media, objects) = created(64 << 10);
        let options = ObjectOptions::new().tracker(form).shadow_budget_bytes(budget_pages * 4096);
        let mut object = options.attach_mut(&objects, "object").unwrap();
        let mut committed = vec![0u8; PAGES * PAGE];
        for step in 0..steps(150) {
            let what = format!("seed {seed}, {form:?}, budget {budget_pages}, step {step}");
            for _ in 0..rng.below(6) {
                let range = random_range(&mut rng);
                let value = rng.below(256) as u8;
                object.as_mut_slice().unwrap()[words(&range)].fill(value);
            }
            match rng.below(12) {
                0 => object.psync().unwrap(),
                1 => object.psync_begin().unwrap().wait().unwrap(),
                2 => objects.pool().checkpoint().unwrap(),
                3 => {
                    object.detach().unwrap();
                    object = options.attach_mut(&objects, "object").unwrap();
                    assert!(object.as_slice().unwrap() == committed, "{what}");
                }
                _ => {
                    let ranges: Vec<_> =
                        (0..rng.below(5)).map(|_| random_range(&mut rng)).collect();
                    object.psync_ranges(&ranges).unwrap();
                    let now = object.as_slice().unwrap();
                    for range in ranges.iter().filter(|range| !range.is_empty()).map(words) {
                        committed[range.clone()].copy_from_slice(&now[range]);
                    }
                    assert!(survivor(&media) == committed, "{what}, {ranges:?}");
                    continue;
                }
            }
            // Only the psyncs of everything have made all stores durable.
            let found = survivor(&media);
            if found != committed {
                assert!(found == object.as_slice().unwrap(), "{what}");
                committed = found;
            }
        }
    }
}

#[test]
fn what_was_stored_elsewhere_is_committed_by_the_next_psync() {
    let (media, objects) = created(1 << 20);
    let mut object = objects.attach_mut("object").unwrap();
    for round in 1..20u8 {
        let bytes = object.as_mut_slice().unwrap();
        for at in [0, 64, 5 * PAGE, 9 * PAGE + 8] {
            bytes[at] = round;
        }
        object.psync_ranges(&[64..65]).unwrap();
        let found = survivor(&media);
        assert_eq!((found[64], found[0], found[5 * PAGE]), (round, round - 1, round - 1));
        object.psync().unwrap();
        let found = survivor(&media);
        assert!(found == object.as_slice().unwrap(), "round {round}");
    }
}

#[test]
fn it_is_one_durable_write_of_the_named_bytes() {
    let (media, objects) = created(1 << 20);
    let mut object = objects.attach_mut("object").unwrap();
    object.as_mut_slice().unwrap().fill(1);
    let from = operations(&media, 0).len();
    object.psync_ranges(&[16..32, 3 * 4096..4 * 4096]).unwrap();
    assert_eq!(operations(&media, from), [MediaOperation::WriteDurable]);
    let statistics = object.statistics();
    assert_eq!((statistics.psyncs, statistics.pages), (1, 2));
    assert_eq!(statistics.bytes, 8 + 16 + 4096, "a patch and a page");
    object.psync_ranges(&[]).unwrap();
    object.psync_ranges(&[7..7]).unwrap();
    assert_eq!(operations(&media, from).len(), 1, "nothing was named");
}

#[test]
fn ranges_that_are_not_the_objects_are_refused() {
    let (media, objects) = created(1 << 20);
    let mut object = objects.attach_mut("object").unwrap();
    object.as_mut_slice().unwrap().fill(1);
    let end = (PAGES * PAGE) as u64;
    #[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    for bad in [9..8, end..end + 1, 0..end + 1, u64::MAX - 1..u64::MAX, end + 8..end] {
        let error = object.psync_ranges(&[0..8, bad.clone()]).unwrap_err();
        assert!(
            matches!(&error, ObjectError::OutsideObject { start, end, .. } if (*start..*end) == bad),
            "{error}"
        );
    }
    assert_eq!(survivor(&media)[0], 0, "nothing of a refused psync is committed");
    object.psync_ranges(&[end - 1..end, end..end]).unwrap();
    assert_eq!(survivor(&media)[PAGES * PAGE - 8..], [1; 8]);
    object.detach().unwrap();
    let mut reading = objects.attach("object").unwrap();
    reading.psync_ranges(&[0..8]).unwrap();
    assert!(matches!(reading.psync_ranges(&[0..end + 1]), Err(ObjectError::OutsideObject { .. })));
    CreateObject::new().heap(true).create(&objects, "heap", 1 << 20).unwrap();
    let mut heap = objects.attach_mut("heap").unwrap();
    assert!(matches!(heap.psync_ranges(&[0..8]), Err(ObjectError::HoldsHeap { .. })));
}

/// More whole pages than the log takes are put aside, but never with what lies between them.
#[test]
fn scattered_pages_that_do_not_fit_into_the_log_are_refused() {
    let (media, objects) = on_media(32 << 20, 64 << 10);
    let pages = 1024;
    objects.create("object", pages * 4096).unwrap();
    let mut object = objects.attach_mut("object").unwrap();
    object.as_mut_slice().unwrap().fill(3);
    let every_second: Vec<_> = (0..pages / 2).map(|n| n * 8192..n * 8192 + 4096).collect();
    let error = object.psync_ranges(&every_second).unwrap_err();
    assert!(matches!(error, ObjectError::Pool(PoolError::TooLargeForLog { .. })), "{error}");
    assert!(survivor(&media).iter().all(|&byte| byte == 0));
    let few = &every_second[..20];
    object.psync_ranges(few).unwrap();
    let found = survivor(&media);
    let is_named = |page: usize| page.is_multiple_of(2) && page < 40;
    for (page, bytes) in found.chunks(PAGE).enumerate() {
        assert!(bytes == [if is_named(page) { 3 } else { 0 }; PAGE], "page {page}");
    }
    object.psync().unwrap();
    assert!(survivor(&media).iter().all(|&byte| byte == 3));
    object.detach().unwrap();
}

/// Parts of pages are not put aside: they must fit into half the log.
#[test]
fn parts_of_pages_that_do_not_fit_into_the_log_are_refused() {
    let (media, objects) = created(64 << 10);
    let mut object = objects.attach_mut("object").unwrap();
    object.as_mut_slice().unwrap().fill(3);
    let parts = |pages: u64| -> Vec<_> { (0..pages).map(|n| n * 4096..n * 4096 + 4088).collect() };
    let error = object.psync_ranges(&parts(10)).unwrap_err();
    assert!(matches!(error, ObjectError::Pool(PoolError::TooLargeForLog { .. })), "{error}");
    assert!(survivor(&media).iter().all(|&byte| byte == 0));
    // More than is put aside of whole pages, and less than half the log.
    object.psync_ranges(&parts(7)).unwrap();
    let found = survivor(&media);
    let is_named = |at: usize| at < 7 * PAGE && at % PAGE < 4088;
    assert!((0..PAGES * PAGE).all(|at| found[at] == if is_named(at) { 3 } else { 0 }));
    object.psync().unwrap();
    assert!(survivor(&media).iter().all(|&byte| byte == 3));
    object.detach().unwrap();
}

#[test]
fn bytes_whose_commit_failed_are_part_of_the_next_psync() {
    let (media, objects) = created(1 << 20);
    let mut object = objects.attach_mut("object").unwrap();
    let put = |object: &mut Attachment, value: u8| {
        object.as_mut_slice().unwrap()[100 * 8..101 * 8].fill(value);
    };
    put(&mut object, 1);
    // Repeated once, so it succeeds.
    media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteDurable)));
    object.psync_ranges(&[800..808]).unwrap();
    put(&mut object, 2);
    object.psync().unwrap();
    media.clear_faults();
    assert_eq!(survivor(&media)[800..808], [2; 8]);
    media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteDurable).lasting()));
    put(&mut object, 3);
    object.psync_ranges(&[800..808]).unwrap_err();
    assert!(matches!(object.detach(), Err(ObjectError::Unsynced { .. })), "it is not durable");
}

/// Threads commit their own words while the others store to the same pages. Each word has a value
/// that its thread has committed, the last one acknowledged or the one on its way.
#[test]
fn threads_commit_their_own_words_of_the_same_pages() {
    const THREADS: usize = 4;
    let place = Place::new();
    let objects = place.create(8 << 20, 1 << 20);
    objects.create("object", 4 * PAGE as u64).unwrap();
    let object = objects.attach_mut("object").unwrap();
    let rounds = steps(60) as u64;
    let offset = |thread: usize, word: usize| (word % 4) * PAGE + thread * 8 + word / 4 * 64;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let object = &object;
            scope.spawn(move || {
                let at = |word| {
                    let place = object.start().as_ptr().wrapping_add(offset(thread, word));
                    // SAFETY: inside the object, aligned, and used as an atomic only.
                    unsafe { AtomicU64::from_ptr(place.cast()) }
                };
                for round in 1..=rounds {
                    // Half of the words are stored to and not named; they get the value one round
                    // later.
                    for word in 0..8 {
                        at(word).store(round, Ordering::Relaxed);
                        at(word + 8).store(u64::MAX, Ordering::Relaxed);
                    }
                    let named: Vec<_> = (0..8)
                        .map(|word| offset(thread, word) as u64..offset(thread, word) as u64 + 8)
                        .collect();
                    // SAFETY: only this thread stores to these words.
                    unsafe { object.psync_ranges_shared(&named) }.unwrap();
                }
            });
        }
    });
    object.detach().unwrap();
    let object = objects.attach("object").unwrap();
    let bytes = object.as_slice().unwrap();
    for (thread, word) in (0..THREADS).flat_map(|thread| (0..16).map(move |word| (thread, word))) {
        let found = &bytes[offset(thread, word)..][..8];
        let expected = if word < 8 { rounds } else { 0 };
        assert_eq!(u64::from_ne_bytes(found.try_into().unwrap()), expected, "{thread} {word}");
    }
}
