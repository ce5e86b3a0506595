//! A child forked while other threads hold the locks of this process. A single test: a child has only the
//! thread that forked.

use std::sync::atomic::{AtomicBool, Ordering};

pub const ROLES: &[aquifer_testkit::child::Role] =
    &[("fork beside calibrations", fork_beside_calibrations)];

const CHILDREN: usize = 64;

#[test]
fn a_child_is_not_stopped_by_a_thread_that_looks_at_calibrations() {
    aquifer_testkit::child::succeeds("fork beside calibrations");
}

fn fork_beside_calibrations() {
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                assert!(aquifer_cache::calibrations().is_empty());
            }
        });
        let hung: Vec<i32> =
            (0..CHILDREN).map(|_| in_child()).filter(|&status| status != 0).collect();
        ends.store(true, Ordering::Relaxed);
        assert_eq!(hung, [], "14 is the alarm: the child hung");
    });
}

/// The status of a child that looks as well.
fn in_child() -> i32 {
    // SAFETY: the child makes a call that takes locks of its own and of the allocator, which `fork` keeps
    // usable, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        aquifer_testkit::child::dies_with_its_parent();
        let is_empty = aquifer_cache::calibrations().is_empty();
        // SAFETY: ends the child without running the parent's destructors or exit handlers.
        unsafe { libc::_exit(i32::from(!is_empty)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}
