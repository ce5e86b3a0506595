//! Interleavings that tests from outside cannot bring about.

#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges, some of one")]

use std::ops::ControlFlow::Continue;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_device::MemoryDevice;

use super::Source;
use crate::Advice;
use crate::Cache;
use crate::mapping::Served;

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
    unsafe { store.install(page, &[frame], [1; 4096].as_ptr(), false) }.unwrap();
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

/// A page that was guessed to be stored to, was stored to, and has its old content again when it is
/// flushed becomes Clean without a transfer: the visit's copy of the store is outdated all the same.
#[test]
fn bytes_that_were_stored_and_taken_back_are_not_kept() {
    const PAGES: u64 = 400;
    let device = MemoryDevice::from_bytes(&[1; PAGES as usize * 4096]).unwrap();
    let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
    let mapping = cache.map_mut(device).unwrap();
    let Served::User(store, _) = &mapping.served else {
        panic!("memory is not mapped by the kernel")
    };
    let at = |page: u64| mapping.as_mut_ptr().wrapping_add(page as usize * 4096);
    // SAFETY: inside of the mapping, which other threads do not use.
    let load = |page| unsafe { at(page).read_volatile() };
    // SAFETY: as above.
    let set = |page, value| unsafe { at(page).write_volatile(value) };
    // Scattered, so that no page is read ahead.
    let scattered = |index: u64| index * 151 % PAGES;
    for page in (0..PAGES / 2).map(scattered) {
        assert_eq!(load(page), 1);
        set(page, 2);
    }
    mapping.flush_all().unwrap(); // so that the flush below writes nothing
    let is_guessed = |page: &u64| load(*page) == 1 && store.is_guessed(*page);
    let page =
        (PAGES / 2..PAGES).map(scattered).find(is_guessed).expect("all pages were stored to");
    let pages = page..page + 1;
    // A visit has read the page, and copies it out of its frame.
    let (stamp, mut buffer) = (store.stamp(pages.clone()), [1; 4096]);
    set(page, 77);
    // SAFETY: the buffer is as long as a page.
    unsafe { store.settle(page, &pages, stamp, buffer.as_mut_ptr()) }.unwrap();
    assert_eq!(buffer[0], 77);
    // Other threads, before the visit keeps the page.
    set(page, 1);
    mapping.flush_all().unwrap();
    mapping.advise(page * 4096..(page + 1) * 4096, Advice::DontNeed).unwrap();
    assert!(!store.is_resident(page));
    // SAFETY: as above.
    unsafe { store.keep(pages.clone(), &pages, stamp, buffer.as_ptr()) };
    assert_eq!(load(page), 1);
}
