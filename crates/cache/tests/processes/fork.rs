//! What a fork of a process with mappings can do. A single test: a child has only the thread that
//! forked.

use std::sync::Arc;

use aquifer_cache::{Cache, CacheError, Rows};
use aquifer_device::MemoryDevice;

use crate::support::block_on;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("forked mappings", forked_mappings)];

fn cache() -> Cache {
    Cache::builder().budget_bytes(8 << 20).build().unwrap()
}

/// Runs `body` in a child; returns its exit status, or the signal that ended it as an error.
fn in_child(body: impl FnOnce() -> i32) -> Result<i32, i32> {
    // SAFETY: the child ends with `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        aquifer_testkit::child::dies_with_its_parent();
        // SAFETY: ends the child.
        unsafe { libc::_exit(body()) };
    }
    let mut status = 0;
    // SAFETY: waits for the child created above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    if libc::WIFEXITED(status) {
        Ok(libc::WEXITSTATUS(status))
    } else {
        Err(libc::WTERMSIG(status))
    }
}

#[test]
fn a_child_may_make_its_own_mappings_and_not_use_inherited_ones() {
    aquifer_testkit::child::succeeds("forked mappings");
}

fn forked_mappings() {
    let bytes: Vec<u8> = (0..64 << 10).map(|at| (at / 4096) as u8 + 1).collect();
    let device = Arc::new(MemoryDevice::from_bytes(&bytes).unwrap());
    let ours = cache();
    let map = ours.map_mut(device.clone()).unwrap();
    // SAFETY: inside the mapping.
    let at = |page: usize| unsafe { map.as_ptr().add(page * 4096).read_volatile() };
    assert_eq!(at(3), 4);

    let own = in_child(|| {
        let cache = cache();
        let map = cache.map_mut(device.clone()).unwrap();
        let base = map.as_mut_ptr();
        // SAFETY: inside the child's own mapping.
        let seen = unsafe {
            base.add(5 * 4096).write_volatile(77);
            (base.add(3 * 4096).read_volatile(), base.add(5 * 4096).read_volatile())
        };
        i32::from(seen != (4, 77) || !matches!(ours.resize(16 << 20), Err(CacheError::Forked)))
    });
    assert_eq!(own, Ok(0), "the child's own mapping");

    let rows = Rows::options(64).open_device(device.clone());
    assert!(matches!(rows, Err(CacheError::AlreadyAttached { .. })), "it is mapped for writing");
    let rows = Rows::options(64).open_device(MemoryDevice::new(1 << 20).unwrap()).unwrap();
    let rows = Arc::new(rows);
    rows.get(1, &mut [0; 64]).unwrap();
    assert_eq!(block_on(rows.gather_async(vec![1])).unwrap(), [0; 64]);
    let inert = in_child(|| {
        let refused = matches!(rows.get(1, &mut [0; 64]), Err(CacheError::Forked))
            && matches!(rows.get_many(&[], |_, _| ()), Err(CacheError::Forked))
            && matches!(rows.invalidate(..), Err(CacheError::Forked))
            && matches!(block_on(rows.gather_async(vec![1])), Err(CacheError::Forked))
            && rows.stats() == Default::default();
        // SAFETY: the child's copy, which nothing uses afterwards.
        unsafe { std::ptr::drop_in_place((&raw const rows).cast_mut()) };
        i32::from(!refused)
    });
    assert_eq!(inert, Ok(0), "inherited rows are inert");

    let inherited = in_child(|| i32::from(at(3)));
    assert_eq!(inherited, Err(libc::SIGSEGV), "an inherited mapping is gone");

    let jump = in_child(|| {
        let cache = cache();
        let map = cache.map(device.clone()).unwrap();
        map.touch(0).unwrap();
        // SAFETY: none: this unsound call is what is tested; the kernel refuses it, as the mapping
        // is not executable.
        let function: extern "C" fn() = unsafe { std::mem::transmute(map.as_ptr()) };
        function();
        0
    });
    assert_eq!(jump, Err(libc::SIGSEGV), "a jump into a mapping ends the process");
    assert_eq!(at(9), 10, "the parent goes on");
}
