//! Rollback: what it undoes, what stays, and its failures.

use std::sync::Arc;

use crate::support::{
    PAGE, Wrapped, alone, fill, load, load_all, on_media, operations, reopen, store,
};
use aquifer_crashkit::{CrashMedia, Fault, Trigger};
use aquifer_object::collections::PVec;
use aquifer_object::heap::HeapError;
use aquifer_object::{Attachment, CreateObject, ObjectError, ObjectOptions, Objects};
use aquifer_pool::PoolError;
use aquifer_pool::media::{MediaOperation, PersistenceDomain};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;
use aquifer_vm::dirty::TrackerForm;

/// More than the 2 MiB in which stores are tracked at a time.
const PAGES: usize = 700;

fn on(maps_privately: bool) -> (Arc<CrashMedia>, Objects) {
    let media = Arc::new(CrashMedia::new(16 << 20, PersistenceDomain::PageCache).unwrap());
    let mut wrapped = Wrapped::new(media.clone());
    wrapped.maps_privately = maps_privately;
    let pool = alone().log_bytes(64 << 10).create_on(Arc::new(wrapped)).unwrap();
    (media, Objects::new(pool))
}

fn attach(objects: &Objects, options: ObjectOptions<'_>) -> Attachment {
    objects.create("object", (PAGES * PAGE) as u64).unwrap();
    options.attach_mut(objects, "object").unwrap()
}

/// Random stores, psyncs, detached ones and rollbacks, against a plain copy.
#[test]
fn an_object_is_as_of_its_last_commit() {
    let mut rng = Rng::new(seed(17));
    for form in [TrackerForm::Scan, TrackerForm::Compare] {
        if let Err(error) = form.available() {
            eprintln!("skipped: {}: {error}", form.name());
            continue;
        }
        for maps_privately in [true, false] {
            let (media, objects) = on(maps_privately);
            let budget_bytes = if rng.below(2) == 0 { 8 * PAGE as u64 } else { 1 << 30 };
            let options = ObjectOptions::new().tracker(form).shadow_budget_bytes(budget_bytes);
            let mut object = attach(&objects, options);
            let mut committed = load_all(&object);
            for _ in 0..steps(60) {
                for _ in 0..rng.below(40) {
                    let page = rng.below(PAGES as u64) as usize;
                    let value = 1 + rng.below(1000);
                    if rng.below(3) == 0 {
                        fill(&mut object, page, value);
                    } else {
                        store(&mut object, page, value);
                    }
                }
                match rng.below(4) {
                    0 => {
                        object.psync().unwrap();
                        committed = load_all(&object);
                    }
                    1 => {
                        // Its outcome is dropped: rollback has to wait for it.
                        drop(object.psync_begin().unwrap());
                        committed = load_all(&object);
                        store(&mut object, 3, 7);
                        object.rollback().unwrap();
                    }
                    _ => object.rollback().unwrap(),
                }
                assert!(load_all(&object) == committed);
            }
            object.detach().unwrap();
            drop(objects);
            let again = reopen(&media);
            let found = again.attach("object").unwrap();
            assert!(load_all(&found) == committed, "{form:?}, private mapping: {maps_privately}");
        }
    }
}

#[test]
fn a_rollback_writes_nothing_and_leaves_nothing_to_commit() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    let mut object = attach(&objects, ObjectOptions::new());
    store(&mut object, 1, 1);
    object.psync().unwrap();
    objects.pool().checkpoint().unwrap();
    store(&mut object, 1, 2);
    store(&mut object, 600, 2);
    let from = operations(&media, 0).len();
    object.rollback().unwrap();
    object.psync().unwrap();
    let done = operations(&media, from);
    let writes = done.iter().filter(|kind| **kind != MediaOperation::Read);
    assert_eq!(writes.count(), 0, "{done:?}");
    assert_eq!((load(&object, 1), load(&object, 600)), (1, 0));
    object.detach().unwrap();
}

#[test]
fn bytes_that_were_committed_by_name_stay() {
    let (_media, objects) = on_media(8 << 20, 1 << 20);
    let mut object = attach(&objects, ObjectOptions::new());
    let bytes = object.as_mut_slice().unwrap();
    bytes[..16].fill(1);
    bytes[9 * PAGE..10 * PAGE].fill(2);
    object.psync_ranges(&[0..8, 9 * 4096..10 * 4096]).unwrap();
    object.as_mut_slice().unwrap()[9 * PAGE] = 3;
    object.rollback().unwrap();
    let bytes = object.as_slice().unwrap();
    assert_eq!(bytes[..16], [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[9 * PAGE], 2);
}

#[test]
fn a_heap_is_as_of_its_last_psync() {
    let (_media, objects) = on_media(8 << 20, 1 << 20);
    CreateObject::new().heap(true).create(&objects, "object", 1 << 20).unwrap();
    let options = ObjectOptions::new().record_stores(true);
    let mut object = options.attach_mut(&objects, "object").unwrap();
    let push = |object: &mut Attachment, count: u64| {
        object.heap().unwrap().enter(|scope| {
            let all: &mut PVec<'_, u64> = scope.root_or_insert_with(1, |h| Ok(PVec::new_in(h)))?;
            (0..count).try_for_each(|number| all.push(number))?;
            Ok::<_, HeapError>(all.len())
        })
    };
    for round in 1..5 {
        assert_eq!(push(&mut object, 1).unwrap(), round);
        object.psync().unwrap();
        push(&mut object, 5000).unwrap();
        object.rollback().unwrap();
    }
    // SAFETY: nothing uses the object.
    let refused = unsafe { object.rollback_shared() }.unwrap_err();
    assert!(matches!(refused, ObjectError::HoldsHeap { .. }), "{refused}");
}

/// A psync that failed without harm to the pool can be rolled back; then nothing is left to commit.
#[test]
fn a_psync_without_room_can_be_undone() {
    let (_media, objects) = on_media(4 << 20, 64 << 10);
    objects.create("object", 300 * PAGE as u64).unwrap();
    let free = objects.pool().info().unwrap().free_pages;
    (0..free / 100).for_each(|number| {
        objects.create(format!("ballast {number}"), 90 * PAGE as u64).unwrap();
    });
    let mut object = objects.attach_mut("object").unwrap();
    (0..300).for_each(|page| fill(&mut object, page, 1));
    let full = object.psync().unwrap_err();
    assert!(matches!(full, ObjectError::NoRoomForShadow { .. }), "{full}");
    object.rollback().unwrap();
    assert!(load_all(&object).iter().all(|&value| value == 0));
    object.detach().expect("nothing is behind");
}

#[test]
fn after_a_failure_of_the_media_nothing_is_undone() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    let mut object = attach(&objects, ObjectOptions::new());
    store(&mut object, 3, 5);
    media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteDurable).lasting()));
    object.psync().unwrap_err();
    media.clear_faults();
    let refused = object.rollback().unwrap_err();
    assert!(matches!(refused, ObjectError::Pool(PoolError::Failed { .. })), "{refused}");
    assert_eq!(load(&object, 3), 5);
    assert!(matches!(object.detach(), Err(ObjectError::Unsynced { .. })));
}

/// What could not be read is undone by the next call, or committed by the next psync.
#[test]
fn a_page_that_cannot_be_read_is_not_forgotten() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    let mut object = attach(&objects, ObjectOptions::new());
    store(&mut object, 3, 5);
    object.psync().unwrap();
    objects.pool().checkpoint().unwrap();
    let offset = objects.info("object").unwrap().media_offset_bytes;
    let page = aquifer_pool::media::ByteRange { offset_bytes: offset + 3 * 4096, len_bytes: 4096 };
    store(&mut object, 2, 6);
    store(&mut object, 3, 6);
    let from = Trigger::on(MediaOperation::Read).within(page);
    media.fail(Fault::io_error(from));
    object.rollback().unwrap_err();
    media.clear_faults();
    assert_eq!(load(&object, 3), 6);
    object.rollback().unwrap();
    assert_eq!((load(&object, 2), load(&object, 3)), (0, 5));
}

#[test]
fn a_reader_has_nothing_to_undo() {
    let (_media, objects) = on_media(8 << 20, 1 << 20);
    drop(attach(&objects, ObjectOptions::new()));
    objects.attach("object").unwrap().rollback().unwrap();
}
