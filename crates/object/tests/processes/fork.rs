//! What a forked child of a process with attached objects can do. Each test is
//! a process of its own: a child has only the thread that forked.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use crate::support::{Place, store};
use aquifer_object::collections::{PBTreeMap, PBox, PHashMap, PString, PVec};
use aquifer_object::{CreateObject, ObjectError, ObjectOptions};

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("dropping", dropping),
    ("busy threads", busy_threads),
    ("own threads", own_threads),
    ("no objects", no_objects),
];

/// Runs `body` in a child; returns the signal that ended it, or its exit status.
fn in_child(body: impl FnOnce() -> i32) -> Result<i32, i32> {
    // SAFETY: the child exits through `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        aquifer_testkit::child::dies_with_its_parent();
        // SAFETY: ends the child.
        unsafe { libc::_exit(body()) };
    }
    let mut status = 0;
    // SAFETY: waits for the child forked above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    if libc::WIFEXITED(status) {
        Ok(libc::WEXITSTATUS(status))
    } else {
        Err(libc::WTERMSIG(status))
    }
}

#[test]
fn a_child_has_no_objects_and_may_attach_its_own() {
    aquifer_testkit::child::succeeds("no objects");
}

fn no_objects() {
    let place = Place::new();
    let objects = place.create(8 << 20, 1 << 20);
    for name in ["object", "other"] {
        objects.create(name, 4096).unwrap();
    }
    let heap = CreateObject::new().heap(true);
    heap.create(&objects, "child's", 1 << 16).unwrap();
    let mut object = objects.attach_mut("object").unwrap();
    store(&mut object, 0, 5);
    drop(object.psync_begin().unwrap());
    store(&mut object, 0, 6);
    let raw = ObjectOptions::new().attach_raw_mut(&objects, "other").unwrap();

    let is_forked = |error: ObjectError| {
        matches!(error, ObjectError::Forked)
            || matches!(error, ObjectError::Pool(aquifer_pool::PoolError::Forked))
    };
    let start = object.start();
    // SAFETY: faults in the child, where the memory is not mapped.
    let gone = in_child(|| i32::from(unsafe { start.as_ptr().read_volatile() }));
    assert_eq!(gone, Err(libc::SIGSEGV));

    let pending = object.psync_begin().unwrap();
    let inert = in_child(|| {
        let refused = [
            object.as_slice().map(drop),
            object.as_mut_slice().map(drop),
            object.psync(),
            object.psync_begin().map(drop),
            object.shadow_bytes().map(drop),
            object.heap().map(drop),
            objects.attach("object").map(drop),
            objects.create("new", 1).map(drop),
            objects.destroy("other"),
            objects.resize("other", 1 << 16).map(drop),
            objects.relocate("other", None).map(drop),
            objects.rename("other", "another"),
            objects.list().map(drop),
            objects.info("object").map(drop),
            objects.psync_many(&mut [&mut object]),
            objects.psync_many_begin(&mut [&mut object]).map(drop),
            ObjectOptions::new().attach_raw(&objects, "other").map(drop),
            objects.detach(raw.as_ptr()),
            // SAFETY: no thread stores to it.
            unsafe { objects.psync_at(raw.as_ptr()) },
            pending.wait(),
            object.detach(),
        ];
        let place_of_first = refused.iter().position(|outcome| outcome.is_ok());
        let all = refused.into_iter().filter_map(Result::err).all(is_forked);
        drop(objects);
        match (place_of_first, all) {
            (None, true) => 0,
            (Some(at), _) => 10 + at as i32,
            (None, false) => 1,
        }
    });
    assert_eq!(inert, Ok(0), "everything is refused, and dropping does nothing");

    let objects = place.open();
    let mut object = objects.attach_mut("object").unwrap();
    store(&mut object, 0, 7);
    let own = in_child(|| {
        let objects = place.open();
        let mut own = objects.attach_mut("child's").unwrap();
        own.heap().unwrap().enter(|scope| scope.insert_root(1, 7u64)).unwrap();
        own.psync().unwrap();
        own.detach().unwrap();
        let parents = objects.attach("object").unwrap_err();
        i32::from(!matches!(parents, ObjectError::Attached { .. }))
    });
    assert_eq!(own, Ok(0));
    let mut childs = objects.attach("child's").unwrap();
    let root = childs.heap().unwrap().enter(|scope| scope.root::<u64>(1).copied());
    assert_eq!(root, Ok(7));
    // The parent's attachment is unaffected.
    object.psync().unwrap();
    object.detach().unwrap();
}

/// A child's threads may have the same stacks as threads of the parent had: dropping the parent's
/// handles must not detach them.
#[test]
fn a_childs_threads_are_its_own() {
    aquifer_testkit::child::succeeds("own threads");
}

fn own_threads() {
    let place = Place::new();
    let objects = place.create(8 << 20, 1 << 20);
    objects.create("object", 1 << 16).unwrap();
    let mut object = objects.attach_mut("object").unwrap();
    store(&mut object, 0, 5);
    object.psync_begin().unwrap().wait().unwrap();
    drop(object);
    let mut reader = objects.attach("object").unwrap();
    let joined = in_child(|| {
        let refused = reader.psync().is_err();
        let is_done = std::sync::Arc::new(AtomicBool::new(false));
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let is_done = is_done.clone();
                std::thread::spawn(move || {
                    while !is_done.load(Relaxed) {
                        std::thread::yield_now();
                    }
                })
            })
            .collect();
        drop((reader, objects));
        is_done.store(true, Relaxed);
        let all = threads.into_iter().all(|thread| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| thread.join())).is_ok()
        });
        i32::from(!(all && refused))
    });
    assert_eq!(joined, Ok(0));
}

/// Even if many threads of the parent are in the middle of allocating.
#[test]
fn a_child_of_busy_threads_may_have_heaps() {
    aquifer_testkit::child::succeeds("busy threads");
}

fn busy_threads() {
    let place = Place::new();
    let objects = place.create(8 << 20, 1 << 20);
    let heap = CreateObject::new().heap(true);
    for name in ["parent's", "child's"] {
        heap.create(&objects, name, 1 << 16).unwrap();
    }
    let mut object = objects.attach_mut("parent's").unwrap();
    object.heap().unwrap().enter(|scope| {
        let heap = scope.heap();
        let is_done = AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !is_done.load(Relaxed) {
                    drop(PBox::new_in(1u64, heap).unwrap());
                }
            });
            let outcomes: Vec<_> = (0..50)
                .map(|_| {
                    in_child(|| {
                        let objects = place.open();
                        let mut own = objects.attach_mut("child's").unwrap();
                        own.heap().unwrap().enter(|scope| {
                            drop(PBox::new_in(2u64, scope.heap()).unwrap());
                        });
                        0
                    })
                })
                .collect();
            is_done.store(true, Relaxed);
            assert!(outcomes.iter().all(|outcome| *outcome == Ok(0)), "{outcomes:?}");
        });
    });
}

/// Their memory is not mapped: nothing must be freed.
#[test]
fn dropping_the_parents_structures_does_nothing_in_a_child() {
    aquifer_testkit::child::succeeds("dropping");
}

fn dropping() {
    let place = Place::new();
    let objects = place.create(8 << 20, 1 << 20);
    let heap = CreateObject::new().heap(true);
    heap.create(&objects, "heap", 1 << 20).unwrap();
    let mut object = objects.attach_mut("heap").unwrap();
    object.heap().unwrap().enter(|scope| {
        let heap = scope.heap();
        let text = || PString::from_str_in("text", heap).unwrap();
        let boxed = PBox::new_in(text(), heap).unwrap();
        let (mut vec, mut tree, mut table) =
            (PVec::new_in(heap), PBTreeMap::new_in(heap), PHashMap::new_in(heap));
        vec.push(text()).unwrap();
        tree.insert(text(), text()).unwrap();
        table.insert(text(), text()).unwrap();
        let all = (text(), boxed, vec, tree, table);
        let mut all = std::mem::ManuallyDrop::new(all);
        let outcome = in_child(|| {
            // SAFETY: the child's copy, which is not used again.
            drop(unsafe { std::mem::ManuallyDrop::take(&mut all) });
            0
        });
        assert_eq!(outcome, Ok(0));
        assert_eq!(*all.1, "text");
        drop(std::mem::ManuallyDrop::into_inner(all));
    });
    assert_eq!(object.heap().unwrap().check().unwrap().allocations, 0);
}
