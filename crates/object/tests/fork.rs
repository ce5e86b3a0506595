//! What a fork of a process with attached objects can do. One test: a child has only the thread that forked.

mod support;

use aquifer_object::{Access, CreateObject, ObjectError};
use support::{Place, store};

/// Runs `body` in a child; returns the signal that ended it, or its exit status.
fn in_child(body: impl FnOnce() -> i32) -> Result<i32, i32> {
    // SAFETY: the child leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends a child that hangs, and one that is done.
        unsafe {
            libc::alarm(30);
            libc::_exit(body());
        }
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    if libc::WIFEXITED(status) {
        Ok(libc::WEXITSTATUS(status))
    } else {
        Err(libc::WTERMSIG(status))
    }
}

#[test]
fn a_child_has_no_objects_and_may_attach_its_own() {
    let place = Place::new();
    let objects = place.create(8 << 20, 1 << 20);
    for name in ["object", "other"] {
        objects.create(name, 4096, &CreateObject::default()).unwrap();
    }
    let heap = CreateObject { heap: true, ..CreateObject::default() };
    objects.create("child's", 1 << 16, &heap).unwrap();
    let mut object = objects.attach("object", Access::Write, None).unwrap();
    store(&mut object, 0, 5);
    drop(object.psync_begin().unwrap());
    store(&mut object, 0, 6);
    let raw = objects.attach_raw("other", Access::Write, None, &Default::default()).unwrap();

    let is_forked = |error: ObjectError| {
        matches!(error, ObjectError::Forked)
            || matches!(error, ObjectError::Pool(aquifer_pool::PoolError::Forked))
    };
    let start = object.start();
    // SAFETY: faults in the child, whose memory has a hole there.
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
            objects.attach("object", Access::Read, None).map(drop),
            objects.create("new", 1, &CreateObject::default()).map(drop),
            objects.destroy("other", None),
            objects.resize("other", 1 << 16, None).map(drop),
            objects.relocate("other", None, None).map(drop),
            objects.rename("other", "another", None),
            objects.list().map(drop),
            objects.info("object").map(drop),
            objects.psync_many(&mut [&mut object]),
            objects.psync_many_begin(&mut [&mut object]).map(drop),
            objects.attach_raw("other", Access::Read, None, &Default::default()).map(drop),
            objects.detach(raw.as_ptr()),
            // SAFETY: nobody stores.
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
    let mut object = objects.attach("object", Access::Write, None).unwrap();
    store(&mut object, 0, 7);
    let own = in_child(|| {
        let objects = place.open();
        let mut own = objects.attach("child's", Access::Write, None).unwrap();
        own.heap().unwrap().enter(|scope| scope.insert_root(1, 7u64)).unwrap();
        own.psync().unwrap();
        own.detach().unwrap();
        let parents = objects.attach("object", Access::Read, None).unwrap_err();
        i32::from(!matches!(parents, ObjectError::Attached { .. }))
    });
    assert_eq!(own, Ok(0));
    let mut childs = objects.attach("child's", Access::Read, None).unwrap();
    let root = childs.heap().unwrap().enter(|scope| scope.root::<u64>(1).copied());
    assert_eq!(root, Ok(7));
    // The parent's attachment is as it was.
    object.psync().unwrap();
    object.detach().unwrap();
}
