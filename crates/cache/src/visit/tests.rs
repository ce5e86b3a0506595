//! Interleavings that tests from outside cannot bring about.

#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges, some of one")]

use std::ops::ControlFlow::Continue;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_device::MemoryDevice;

use crate::Cache;
use crate::mapping::Served;
use crate::store::PageMemory;

#[test]
fn a_page_that_is_being_installed_for_stores_is_waited_for() {
    let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
    let mapping = cache.map_mut(MemoryDevice::from_bytes(&[1; 8192]).unwrap()).unwrap();
    let Served::User(store, _) = &mapping.served else {
        panic!("memory is not mapped by the kernel")
    };
    // A write fault of another thread, which is preempted when it has installed the page.
    let page = 1;
    let frame = store.pool().take(store.key(page)).unwrap();
    store.word(page).begin_load(store.word(page).load()).unwrap();
    store.dirty.mark(page);
    // SAFETY: the page is Loading, and the data a page.
    unsafe { store.memory.install(page, &[frame], [1; 4096].as_ptr(), false) }.unwrap();
    // A store of this thread does not fault. Its visit sees it.
    // SAFETY: inside of the mapping.
    unsafe { mapping.as_mut_ptr().add(4096).write_volatile(77) };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let visit = scope.spawn(|| {
            let mut seen = 0;
            mapping
                .visit_many([4096..4097], |one| {
                    seen = one.bytes.get::<u8>(0);
                    Continue(())
                })
                .unwrap();
            is_over.store(true, Ordering::Release);
            seen
        });
        while !is_over.load(Ordering::Acquire) && !store.seen(page).has_waiters() {
            std::thread::yield_now();
        }
        store.hold(page, frame, false);
        store.word(page).finish_load(frame, true, None);
        assert_eq!(visit.join().unwrap(), 77);
    });
}
