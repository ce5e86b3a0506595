//! psync: what it writes, its cost, and its failures.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use crate::support::{
    PAGE, Place, Wrapped, fill, filled, load, load_all, on_media, operations, reopen, store, stored,
};
use aquifer_crashkit::{CrashMedia, Fault, Trigger};
use aquifer_object::{Attachment, ObjectError, ObjectOptions, ObjectState, Objects, PendingPsync};
use aquifer_pool::media::{self, ByteRange, Media, MediaOperation, PersistenceDomain};
use aquifer_pool::{LockMode, Pool, PoolError};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;
use aquifer_vm::dirty::TrackerForm;

fn create(objects: &Objects, name: &str, pages: usize) {
    objects.create(name, (pages * PAGE) as u64).unwrap();
}

fn attach(objects: &Objects, name: &str) -> Attachment {
    objects.attach_mut(name).unwrap()
}

fn forms() -> Vec<TrackerForm> {
    let all = [TrackerForm::Scan, TrackerForm::Compare];
    all.into_iter()
        .filter(|form| match form.available() {
            Ok(()) => true,
            Err(error) => {
                eprintln!("skipped: {}: {error}", form.name());
                false
            }
        })
        .collect()
}

fn attach_with(objects: &Objects, name: &str, form: TrackerForm, budget_pages: u64) -> Attachment {
    let budget_bytes = budget_pages * PAGE as u64;
    let options = ObjectOptions::new().tracker(form).shadow_budget_bytes(budget_bytes);
    options.attach_mut(objects, name).unwrap()
}

// ---- what it costs ------------------------------------------------------------------------------

#[test]
fn a_psync_is_one_durable_write() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    create(&objects, "object", 64);
    let mut object = attach(&objects, "object");
    let mut from = operations(&media, 0).len();
    for round in 0..20 {
        for page in 0..1 + round {
            store(&mut object, (page * 3) as usize, round + 1);
        }
        object.psync().unwrap();
        let done = operations(&media, from);
        // Before the end of the ring the rest is filled, which takes another write.
        assert!(done.iter().all(|kind| *kind == MediaOperation::WriteDurable), "{done:?}");
        assert!(done.len() == 1 || done.len() == 2 && round > 15, "round {round}: {done:?}");
        from += done.len();
    }
    assert_eq!(object.statistics().psyncs, 20);
}

#[test]
fn an_object_that_was_not_stored_to_costs_nothing() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    create(&objects, "object", 64);
    let mut object = attach(&objects, "object");
    store(&mut object, 1, 1);
    object.psync().unwrap();
    let from = operations(&media, 0).len();
    let _ = load_all(&object);
    object.psync().unwrap();
    object.psync_begin().unwrap().wait().unwrap();
    objects.psync_many(&mut [&mut object]).unwrap();
    objects.psync_many(&mut []).unwrap();
    assert_eq!(operations(&media, from), []);
}

#[test]
fn only_pages_that_were_stored_to_are_written() {
    for form in forms() {
        let mut rng = Rng::new(seed(1));
        let (_, objects) = on_media(8 << 20, 1 << 20);
        create(&objects, "object", 700);
        let mut object = attach_with(&objects, "object", form, 1 << 20);
        let mut pages = 0;
        for round in 1..=steps(30) as u64 {
            let stored: BTreeSet<u64> = (0..rng.below(40)).map(|_| rng.below(700)).collect();
            for &page in &stored {
                store(&mut object, page as usize, round << 32 | page);
            }
            let _ = load(&object, rng.below(700) as usize);
            object.psync().unwrap();
            pages += stored.len() as u64;
            assert_eq!(object.statistics().pages, pages, "{form:?}, round {round}");
        }
    }
}

/// A few changed bytes of a page are logged as a patch, whatever was committed of the page before.
#[test]
fn little_that_changed_is_little_that_is_written() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    create(&objects, "object", 64);
    let mut object = attach(&objects, "object");
    let mut expected = vec![0; 64];
    let mut written = 0;
    let mut commit = |object: &mut Attachment, expected: &[u64]| {
        object.psync().unwrap();
        let before = std::mem::replace(&mut written, object.statistics().bytes);
        let survivor = reopen(&media);
        // Both have the same address, so read it through the pool instead of attaching it.
        let found = survivor.pool().bring_up_to_date(survivor_range(&survivor)).unwrap();
        assert!(found.is_empty(), "applied when it was opened");
        assert_eq!(content(&survivor), expected);
        written - before
    };
    for round in 1..=4 {
        // The base is the primary, then the twin.
        store(&mut object, 3, round);
        expected[3] = stored(expected[3], round);
        assert_eq!(commit(&mut object, &expected), 16, "round {round}");
    }
    fill(&mut object, 3, 9);
    expected[3] = filled(9);
    assert_eq!(commit(&mut object, &expected), 4096, "most of it is other");
    store(&mut object, 3, 10);
    expected[3] = stored(expected[3], 10);
    assert_eq!(commit(&mut object, &expected), 4096, "its base is only in the log");
    objects.pool().checkpoint().unwrap();
    store(&mut object, 3, 11);
    store(&mut object, 4, 11);
    expected[3] = stored(expected[3], 11);
    expected[4] = 11;
    assert_eq!(commit(&mut object, &expected), 32, "now it is at its place");
    store(&mut object, 3, 11);
    assert_eq!(commit(&mut object, &expected), 0, "stored to, and the same as before");
}

fn survivor_range(objects: &Objects) -> ByteRange {
    let info = objects.info("object").unwrap();
    ByteRange { offset_bytes: info.media_offset_bytes, len_bytes: info.size_bytes }
}

/// The number in each page of an object, as on media.
fn content(objects: &Objects) -> Vec<u64> {
    let range = survivor_range(objects);
    let mut bytes = vec![0; range.len_bytes as usize];
    objects.pool().media().read_at(range.offset_bytes, &mut bytes).unwrap();
    let word = |page: &[u8], at: usize| u64::from_le_bytes(page[at..at + 8].try_into().unwrap());
    bytes.chunks_exact(PAGE).map(|page| word(page, 8) << 32 | word(page, 0)).collect()
}

/// After a failed capture, the next one must not take its pages as committed.
#[test]
fn a_capture_that_fails_changes_no_base() {
    let (media, objects) = on_media(8 << 20, 64 << 10);
    create(&objects, "object", 64);
    let mut object = attach(&objects, "object");
    for round in 1..200 {
        store(&mut object, round as usize % 64, round);
        store(&mut object, 7, round);
        if round % 50 == 0 {
            // The log eventually fills up and cannot be emptied.
            while let Ok(()) = {
                media.fail(Fault::io_error(Trigger::on(MediaOperation::Read)));
                let outcome = object.psync();
                media.clear_faults();
                outcome
            } {
                let before = load(&object, 9);
                store(&mut object, 9, before + 1);
            }
        }
        object.psync().unwrap();
    }
    let expected = load_all(&object);
    assert_eq!(content(&reopen(&media)), expected);
}

// ---- what is there afterwards -------------------------------------------------------------------

const PAGES: u64 = 600;

/// Random stores, psyncs, detaches and restarts of one object, against plain arrays. `open` opens
/// the pool again.
fn random_work(
    seed: u64,
    what: &str,
    mut objects: Objects,
    open: impl Fn() -> Objects,
    attach: impl Fn(&Objects) -> Attachment,
) {
    let mut rng = Rng::new(seed);
    create(&objects, "object", PAGES as usize);
    let mut object = attach(&objects);
    let (mut durable, mut present) = (vec![0; PAGES as usize], vec![0; PAGES as usize]);
    for step in 1..=steps(300) as u64 {
        match rng.below(20) {
            0..12 => {
                let most = if rng.chance(0.1) { PAGES } else { 12 };
                let first = rng.below(PAGES);
                let is_whole = rng.chance(0.4);
                // Sometimes the previous content.
                let value = if rng.chance(0.4) { rng.below(2) } else { step };
                for _ in 0..rng.below(most) {
                    let page = if rng.chance(0.5) { rng.below(PAGES) } else { first } as usize;
                    present[page] =
                        if is_whole { filled(value) } else { stored(present[page], value) };
                    let change = if is_whole { fill } else { store };
                    change(&mut object, page, value);
                }
            }
            12..15 => {
                object.psync().unwrap();
                durable.clone_from(&present);
            }
            15..17 => {
                drop(object.psync_begin().unwrap());
                durable.clone_from(&present);
            }
            17 => objects.pool().checkpoint().unwrap(),
            18 => {
                object.detach().unwrap();
                if rng.chance(0.3) {
                    let reader = objects.attach("object").unwrap();
                    assert!(load_all(&reader) == durable, "seed {seed}, {what}, step {step}");
                }
                object = attach(&objects);
                present.clone_from(&durable);
            }
            _ => {
                drop((object, objects));
                objects = open();
                object = attach(&objects);
                present.clone_from(&durable);
            }
        }
        assert!(load_all(&object) == present, "seed {seed}, {what}, step {step}");
    }
}

/// With both trackers, with and without room for shadows, through small and large commits.
#[test]
fn an_object_is_as_its_last_psync_left_it() {
    let seed = seed(2);
    for form in forms() {
        for budget_pages in [1 << 20, 20] {
            let place = Place::new();
            let attach = |objects: &Objects| attach_with(objects, "object", form, budget_pages);
            let what = format!("{form:?}, {budget_pages}");
            random_work(seed, &what, place.create(16 << 20, 256 << 10), || place.open(), attach);
        }
    }
}

#[test]
fn all_persistence_domains_are_alike() {
    let seed = seed(3);
    for domain in
        [PersistenceDomain::PageCache, PersistenceDomain::Dax, PersistenceDomain::Volatile]
    {
        let place = Place::new();
        let options = Pool::options().log_bytes(256 << 10).domain(domain);
        let objects = options.create(place.path(), 16 << 20).unwrap();
        assert_eq!(objects.media().domain(), domain);
        let open = || Objects::new(options.open(place.path()).unwrap());
        let attach = |objects: &Objects| attach(objects, "object");
        random_work(seed, &domain.to_string(), Objects::new(objects), open, attach);
    }
}

/// Media that cannot be mapped privately, such as hugetlbfs and device DAX: the object is a copy in
/// memory.
#[test]
fn an_object_that_cannot_be_mapped_is_copied() {
    let seed = seed(4);
    for form in forms() {
        let place = Place::new();
        let open = || {
            let media = media::open(&place.path(), true, None).unwrap();
            let mut media = Wrapped::new(media);
            media.maps_privately = false;
            Objects::new(Pool::options().open_on(Arc::new(media)).unwrap())
        };
        drop(place.create(16 << 20, 256 << 10));
        let attach = |objects: &Objects| attach_with(objects, "object", form, 20);
        random_work(seed, &format!("copied, {form:?}"), open(), open, attach);
    }
}

#[test]
fn a_commit_larger_than_the_log_is_put_aside() {
    let (media, objects) = on_media(32 << 20, 64 << 10);
    create(&objects, "object", 2000);
    let free = objects.pool().info().unwrap().free_pages;
    let mut object = attach(&objects, "object");
    // Contiguous, then every other page: more ranges than a record has room for.
    for (round, stride) in [(1, 1), (2, 2), (3, 1), (4, 3)] {
        (0..2000).step_by(stride).for_each(|page| fill(&mut object, page, round));
        object.psync().unwrap();
        assert!(objects.info("object").unwrap().shadow_bytes > 0);
        let here = load_all(&object);
        let again = reopen(&media);
        let survivor = again.attach("object");
        // The same addresses in the same process.
        assert!(matches!(survivor, Err(ObjectError::AddressTaken { .. })));
        object.detach().unwrap();
        let survivor = again.attach("object").unwrap();
        assert!(load_all(&survivor) == here, "round {round}");
        drop(survivor);
        assert_eq!(objects.info("object").unwrap().shadow_bytes, 0, "freed at detach");
        object = attach(&objects, "object");
        assert!(load_all(&object) == here, "round {round}");
    }
    drop(object);
    objects.pool().checkpoint().unwrap();
    assert_eq!(objects.pool().info().unwrap().free_pages, free);
}

#[test]
fn a_shadow_run_is_not_written_while_a_record_behind_the_tail_names_it() {
    let (media, objects) = on_media(16 << 20, 64 << 10);
    create(&objects, "object", 100);
    let mut object = attach(&objects, "object");
    for round in (1..10).step_by(2) {
        (0..100).for_each(|page| fill(&mut object, page, round));
        object.psync().unwrap();
        (0..100).for_each(|page| fill(&mut object, page, round + 1));
        let number = objects.info("object").unwrap().number;
        let shadow = objects.pool().inode(number).unwrap().shadow.bytes();
        let gate = media.hold(Trigger::on(MediaOperation::WriteBack).within(shadow));
        let image = std::thread::scope(|scope| {
            let committing = scope.spawn(|| object.psync());
            gate.wait_until_reached();
            // The pages of the next commit overwrite those of this one in the shadow run.
            let image = media.image();
            gate.open();
            committing.join().unwrap().unwrap();
            image
        });
        object.detach().unwrap();
        let crashed = CrashMedia::from_image(&image, media.domain()).unwrap();
        let pool = crate::support::alone().open_on(Arc::new(crashed)).unwrap();
        let survivor = Objects::new(pool).attach("object").unwrap();
        assert!(load_all(&survivor).iter().all(|&number| number == filled(round)), "round {round}");
        drop(survivor);
        object = attach(&objects, "object");
    }
}

// ---- several objects ----------------------------------------------------------------------------

#[test]
fn several_objects_are_committed_by_one_record() {
    let (media, objects) = on_media(16 << 20, 256 << 10);
    ["a", "b", "c"].iter().for_each(|name| create(&objects, name, 200));
    let [mut a, mut b, mut c] = ["a", "b", "c"].map(|name| attach(&objects, name));
    for round in 1..10 {
        store(&mut a, 1, round);
        store(&mut c, 7, round);
        let from = operations(&media, 0).len();
        objects.psync_many(&mut [&mut c, &mut a, &mut b]).unwrap();
        assert_eq!(operations(&media, from), [MediaOperation::WriteDurable]);
    }
    assert_eq!(b.statistics().psyncs, 0);
    // One of them too large for the log, then two, then all three.
    for round in 10..14u64 {
        (0..200).for_each(|page| fill(&mut b, page, round));
        store(&mut c, 9, round);
        if round > 11 {
            (0..200).for_each(|page| fill(&mut a, page, round));
        }
        if round > 12 {
            (0..200).for_each(|page| fill(&mut c, page, round));
        }
        objects.psync_many(&mut [&mut a, &mut b, &mut c]).unwrap();
        let expected = [&a, &b, &c].map(load_all);
        let again = reopen(&media);
        drop((a, b, c));
        let found = ["a", "b", "c"].map(|name| load_all(&attach(&again, name)));
        assert!(found == expected, "round {round}");
        [a, b, c] = ["a", "b", "c"].map(|name| attach(&objects, name));
    }
}

#[test]
fn objects_of_several_pools_are_not_committed_together() {
    let ((_, one), (_, other)) = (on_media(4 << 20, 64 << 10), on_media(4 << 20, 64 << 10));
    create(&one, "object", 1);
    create(&other, "object", 1);
    let (mut a, mut b) = (attach(&one, "object"), attach(&other, "object"));
    store(&mut a, 0, 1);
    store(&mut b, 0, 1);
    let refused = one.psync_many(&mut [&mut a, &mut b]).unwrap_err();
    assert!(matches!(refused, ObjectError::SeveralPools), "{refused}");
    a.psync().unwrap();
    b.psync().unwrap();
    assert_eq!((a.statistics().pages, b.statistics().pages), (1, 1));
}

// ---- in the background --------------------------------------------------------------------------

#[test]
fn stores_after_a_psync_began_are_not_part_of_it() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    create(&objects, "object", 8);
    let mut object = attach(&objects, "object");
    store(&mut object, 0, 1);
    let gate = media.hold(Trigger::on(MediaOperation::WriteDurable));
    let pending = object.psync_begin().unwrap();
    gate.wait_until_reached();
    assert!(!pending.is_done());
    store(&mut object, 0, 2);
    store(&mut object, 1, 2);
    gate.open();
    pending.wait().unwrap();
    let again = reopen(&media);
    object.detach().unwrap();
    let survivor = again.attach("object").unwrap();
    assert_eq!((load(&survivor, 0), load(&survivor, 1)), (1, 0));
}

#[test]
fn a_psync_of_nothing_new_waits_for_what_is_on_its_way() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    create(&objects, "object", 8);
    let mut object = attach(&objects, "object");
    store(&mut object, 0, 1);
    let gate = media.hold(Trigger::on(MediaOperation::WriteDurable));
    let first = object.psync_begin().unwrap();
    gate.wait_until_reached();
    let second = object.psync_begin().unwrap();
    std::thread::scope(|scope| {
        let object = &mut object;
        let blocking = scope.spawn(move || object.psync());
        assert!(!second.is_done() && !first.is_done() && !blocking.is_finished());
        gate.open();
        blocking.join().unwrap().unwrap();
        assert_eq!(objects.pool().info().unwrap().durable_lsn, objects.pool().durable_lsn());
    });
    first.wait().unwrap();
    second.wait().unwrap();
}

#[test]
fn a_dropped_handle_cancels_nothing() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    create(&objects, "object", 8);
    let mut object = attach(&objects, "object");
    for round in 1..20 {
        store(&mut object, round as usize % 8, round);
        drop(object.psync_begin().unwrap());
    }
    let expected = load_all(&object);
    object.detach().unwrap();
    drop(objects);
    let again = reopen(&media);
    assert!(load_all(&attach(&again, "object")) == expected);
}

struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_pending_psync_is_a_future() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    create(&objects, "object", 8);
    let mut object = attach(&objects, "object");
    store(&mut object, 0, 1);
    let gate = media.hold(Trigger::on(MediaOperation::WriteDurable));
    let mut pending: PendingPsync = object.psync_begin().unwrap();
    let count = Arc::new(Count(AtomicUsize::new(0)));
    let waker = Waker::from(count.clone());
    let mut context = Context::from_waker(&waker);
    assert!(Pin::new(&mut pending).poll(&mut context).is_pending());
    gate.open();
    while !pending.is_done() {
        std::thread::yield_now();
    }
    assert!(matches!(Pin::new(&mut pending).poll(&mut context), Poll::Ready(Ok(()))));
    while count.0.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn threads_that_share_an_attachment_commit_between_their_stores() {
    let place = Place::new();
    let objects = place.create(16 << 20, 256 << 10);
    create(&objects, "object", 64);
    let object = attach(&objects, "object");
    let gate = std::sync::RwLock::new(());
    let rounds = steps(50) as u64;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (object, gate) = (&object, &gate);
            scope.spawn(move || {
                for round in 1..=rounds {
                    let stores = gate.read().unwrap();
                    for page in (thread..64).step_by(4) {
                        let place = object.start().as_ptr().cast::<u64>();
                        // SAFETY: inside the object; each thread has its own pages.
                        unsafe { place.add(page * PAGE / 8).write(round) };
                    }
                    drop(stores);
                    if round % 8 == 0 {
                        let _quiet = gate.write().unwrap();
                        // SAFETY: the lock excludes stores.
                        unsafe { object.psync_shared() }.unwrap();
                    }
                }
            });
        }
    });
    // SAFETY: the threads have ended.
    unsafe { object.psync_shared() }.unwrap();
    object.detach().unwrap();
    drop(objects);
    let objects = place.open();
    assert!(load_all(&attach(&objects, "object")).iter().all(|&number| number == rounds));
}

#[test]
fn objects_are_committed_in_parallel() {
    let place = Place::new();
    let objects = place.create(16 << 20, 256 << 10);
    let names = ["a", "b", "c", "d"];
    names.iter().for_each(|name| create(&objects, name, 16));
    let rounds = steps(100) as u64;
    std::thread::scope(|scope| {
        for name in names {
            let objects = &objects;
            scope.spawn(move || {
                let mut object = attach(objects, name);
                for round in 1..=rounds {
                    store(&mut object, round as usize % 16, round);
                    match round % 3 {
                        0 => drop(object.psync_begin().unwrap()),
                        _ => object.psync().unwrap(),
                    }
                }
                object.psync().unwrap();
            });
        }
    });
    drop(objects);
    let objects = place.open();
    for name in names {
        let newest = load_all(&attach(&objects, name)).into_iter().max();
        assert_eq!(newest, Some(rounds), "{name}");
    }
}

/// Background commits of many threads: none waits for a later one.
#[test]
fn commits_of_many_threads_pass_in_the_background() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    let names: Vec<String> = (0..8).map(|number| number.to_string()).collect();
    names.iter().for_each(|name| create(&objects, name, 2));
    let rounds = steps(200) as u64;
    std::thread::scope(|scope| {
        for name in &names {
            let objects = &objects;
            scope.spawn(move || {
                let mut object = attach(objects, name);
                for round in 1..=rounds {
                    store(&mut object, 0, round);
                    drop(object.psync_begin().unwrap());
                }
                object.detach().unwrap();
            });
        }
    });
    let again = reopen(&media);
    drop(objects);
    assert!(names.iter().all(|name| load(&attach(&again, name), 0) == rounds));
}

// ---- failures -----------------------------------------------------------------------------------

#[test]
fn a_log_write_that_fails_once_is_repeated() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    create(&objects, "object", 8);
    let mut object = attach(&objects, "object");
    store(&mut object, 3, 5);
    media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteDurable)));
    object.psync().unwrap();
    let again = reopen(&media);
    drop(object);
    assert_eq!(load(&attach(&again, "object"), 3), 5);
}

#[test]
fn a_log_write_that_fails_twice_makes_the_pool_read_only() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    create(&objects, "object", 8);
    let mut object = attach(&objects, "object");
    store(&mut object, 3, 5);
    object.psync().unwrap();
    store(&mut object, 3, 6);
    media.fail(Fault::no_space(Trigger::on(MediaOperation::WriteDurable).lasting()));
    let is_failed = |error| matches!(error, ObjectError::Pool(PoolError::Failed { .. }));
    assert!(is_failed(object.psync().unwrap_err()));
    media.clear_faults();
    // The disk works again, but the pool stays failed.
    assert!(is_failed(object.psync().unwrap_err()));
    assert!(is_failed(object.psync_begin().unwrap_err()));
    assert!(is_failed(objects.create("new", 1).unwrap_err()));
    assert_eq!(load(&object, 3), 6, "the program goes on with what it has");
    let lost = object.detach().unwrap_err();
    assert!(matches!(lost, ObjectError::Unsynced { .. }), "{lost}");
    // Acknowledged content can be read, and no attachment for writing is possible.
    let reader = objects.attach("object").unwrap();
    assert_eq!(load(&reader, 3), 5);
    drop((reader, objects));
    let again = reopen(&media);
    let found = load(&attach(&again, "object"), 3);
    assert!(found == 5 || found == 6, "old or new: {found}");
}

#[test]
fn a_background_failure_is_returned_by_the_next_call() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    create(&objects, "object", 8);
    let mut object = attach(&objects, "object");
    store(&mut object, 3, 5);
    media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteDurable).lasting()));
    let pending = object.psync_begin().unwrap();
    let told = pending.wait().unwrap_err();
    assert!(matches!(told, ObjectError::Pool(PoolError::Failed { .. })), "{told}");
    assert!(matches!(object.detach(), Err(ObjectError::Unsynced { .. })));
}

/// While an object's removal is not durable yet, its number can already belong to another object.
#[test]
fn a_number_whose_object_is_being_destroyed_can_be_used_again() {
    let media = Arc::new(CrashMedia::new(8 << 20, PersistenceDomain::PageCache).unwrap());
    let options = Pool::options().exclusive(true).background(false).inodes(1);
    let pool = options.create_on(media.clone()).unwrap();
    let log = pool.layout().log();
    let objects = Objects::new(pool);
    create(&objects, "old", 1);
    let gate = media.hold(Trigger::on(MediaOperation::WriteDurable).within(log));
    std::thread::scope(|scope| {
        let destroying = scope.spawn(|| objects.destroy("old"));
        gate.wait_until_reached();
        let creating = scope.spawn(|| create(&objects, "new", 1));
        let number = loop {
            let inodes = objects.pool().inodes().unwrap();
            match inodes.into_iter().find(|inode| inode.name == b"new") {
                Some(inode) => break inode.number,
                None => std::thread::yield_now(),
            }
        };
        // As attaching does.
        let locked = objects.pool().lock_inode(number, LockMode::Shared).map(drop);
        gate.open();
        destroying.join().unwrap().unwrap();
        creating.join().unwrap();
        locked.unwrap();
    });
    drop(attach(&objects, "new"));
}

/// A pool too full for a large commit: nothing is lost, and the commit succeeds after space is
/// freed.
#[test]
fn a_full_pool_takes_a_large_commit_once_there_is_room() {
    let (media, objects) = on_media(4 << 20, 64 << 10);
    create(&objects, "object", 300);
    let free = objects.pool().info().unwrap().largest_free_pages as usize;
    create(&objects, "more ballast", 500);
    create(&objects, "ballast", free - 500 - 50);
    let mut object = attach(&objects, "object");
    (0..300).for_each(|page| fill(&mut object, page, 1));
    for _ in 0..2 {
        let full = object.psync().unwrap_err();
        assert!(matches!(full, ObjectError::NoRoomForShadow { .. }), "{full}");
    }
    store(&mut object, 5, 2);
    // Small commits would work, but a psync is never split.
    objects.destroy("more ballast").unwrap();
    object.psync().unwrap();
    let expected = load_all(&object);
    let again = reopen(&media);
    drop(object);
    assert!(load_all(&attach(&again, "object")) == expected);
}

#[test]
fn data_that_cannot_be_written_back_fails_the_commit_that_needs_it() {
    for operation in [MediaOperation::Write, MediaOperation::WriteBack, MediaOperation::Flush] {
        let (media, objects) = on_media(4 << 20, 64 << 10);
        create(&objects, "object", 100);
        let mut object = attach(&objects, "object");
        (0..100).for_each(|page| fill(&mut object, page, 1));
        object.psync().unwrap();
        (0..100).for_each(|page| fill(&mut object, page, 2));
        let data = objects.pool().layout().data();
        let trigger = Trigger::on(operation);
        let trigger =
            if operation == MediaOperation::Flush { trigger } else { trigger.within(data) };
        media.fail(Fault::io_error(trigger));
        object.psync().unwrap_err();
        media.clear_faults();
        let lost = object.detach();
        assert!(lost.is_err(), "{operation}");
        drop(objects);
        let again = reopen(&media);
        let found = load_all(&attach(&again, "object"));
        assert!(found == vec![filled(1); 100], "{operation}: not acknowledged, and wholly absent");
    }
}

/// The next commit includes the pages of a commit that failed for a temporary reason.
#[test]
fn pages_of_a_failed_commit_are_part_of_the_next() {
    for form in forms() {
        let (media, objects) = on_media(4 << 20, 64 << 10);
        create(&objects, "object", 100);
        let mut object = attach_with(&objects, "object", form, 1 << 20);
        (0..100).for_each(|page| fill(&mut object, page, 1));
        let shadow = Trigger::on(MediaOperation::Write).within(objects.pool().layout().data());
        media.fail(Fault::io_error(shadow));
        let failed = object.psync().unwrap_err();
        assert!(matches!(failed, ObjectError::Pool(PoolError::Media(_))), "{failed}");
        store(&mut object, 50, 2);
        object.psync().unwrap();
        assert_eq!(object.statistics().pages, 100, "{form:?}");
        let expected = load_all(&object);
        let again = reopen(&media);
        object.detach().unwrap();
        assert!(load_all(&attach(&again, "object")) == expected, "{form:?}");
    }
}

// ---- memory -------------------------------------------------------------------------------------

#[test]
fn private_copies_stay_within_their_budget() {
    const PAGES: usize = 2000;
    const BUDGET: u64 = 64;
    for form in forms() {
        let (media, objects) = on_media(32 << 20, 1 << 20);
        create(&objects, "object", PAGES);
        let mut object = attach_with(&objects, "object", form, BUDGET);
        let mut model = vec![0; PAGES];
        let mut rng = Rng::new(seed(3));
        for round in 1..=steps(40) as u64 {
            for _ in 0..100 {
                let page = rng.below(PAGES as u64) as usize;
                store(&mut object, page, round);
                model[page] = round;
            }
            match round % 4 {
                0 => object.psync_begin().unwrap().wait().unwrap(),
                _ => {
                    object.psync().unwrap();
                    let kept = object.shadow_bytes().unwrap() / PAGE as u64;
                    assert!(kept <= BUDGET, "{form:?}, round {round}: {kept} pages");
                }
            }
            assert!(object.shadow_bytes().unwrap() <= (BUDGET + 200) * PAGE as u64);
            assert!(load_all(&object) == model, "{form:?}, round {round}");
        }
        let again = reopen(&media);
        drop(object);
        assert!(load_all(&attach(&again, "object")) == model);
    }
}

// ---- states -------------------------------------------------------------------------------------

#[test]
fn an_object_goes_through_the_states_of_the_figure() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    create(&objects, "object", 8);
    create(&objects, "other", 8);
    let state = || objects.state_of("object").unwrap();
    assert_eq!(state(), ObjectState::Detached);
    let reader = objects.attach("object").unwrap();
    assert_eq!(state(), ObjectState::Reading);
    reader.detach().unwrap();
    assert_eq!(state(), ObjectState::Detached);
    let mut object = attach(&objects, "object");
    assert_eq!(state(), ObjectState::Writing);
    store(&mut object, 0, 1);
    assert_eq!(state(), ObjectState::Writing);
    for from in [ObjectState::Writing, ObjectState::Copying] {
        assert_eq!(state(), from);
        let before = load(&object, 1);
        store(&mut object, 1, before + 1);
        let gate = media.hold(Trigger::on(MediaOperation::WriteDurable));
        let pending = object.psync_begin().unwrap();
        gate.wait_until_reached();
        assert_eq!(state(), ObjectState::Persisting);
        assert_eq!(objects.state_of("other").unwrap(), ObjectState::Detached);
        gate.open();
        pending.wait().unwrap();
        assert_eq!(state(), ObjectState::Copying);
    }
    objects.pool().apply_through(objects.pool().durable_lsn()).unwrap();
    assert_eq!(state(), ObjectState::Writing);
    store(&mut object, 0, 3);
    object.psync().unwrap();
    object.detach().unwrap();
    assert_eq!(state(), ObjectState::Copying, "detached, and not applied");
    objects.pool().checkpoint().unwrap();
    assert_eq!(state(), ObjectState::Detached);
    let letters: String = [
        ObjectState::Detached,
        ObjectState::Reading,
        ObjectState::Writing,
        ObjectState::Persisting,
        ObjectState::Copying,
    ]
    .map(ObjectState::letter)
    .iter()
    .collect();
    assert_eq!(letters, "DRWPC");
}

/// The recovery figure: objects found in W and P have their previous content, those found in C the
/// committed one.
#[test]
fn recovery_keeps_what_was_copying_and_drops_what_was_persisting() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    create(&objects, "object", 8);
    let mut object = attach(&objects, "object");
    store(&mut object, 0, 1);
    let while_writing = media.image();
    object.psync().unwrap();
    let while_copying = media.image();
    let content = ByteRange {
        offset_bytes: objects.info("object").unwrap().media_offset_bytes,
        len_bytes: PAGE as u64,
    };
    let first = |image: &[u8]| image[content.offset_bytes as usize];
    assert_eq!((first(&while_writing), first(&while_copying)), (0, 0), "the primary is old");
    drop((object, objects));
    for (image, expected) in [(while_writing, 0), (while_copying, 1)] {
        let media = CrashMedia::from_image(&image, media.domain()).unwrap();
        let pool = crate::support::alone().open_on(Arc::new(media)).unwrap();
        let objects = Objects::new(pool);
        assert_eq!(objects.state_of("object").unwrap(), ObjectState::Detached);
        assert_eq!(load(&attach(&objects, "object"), 0), expected);
    }
}
