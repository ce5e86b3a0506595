//! Shared code of the heap tests: memory between guard pages, and the pages that were stored to.

#![allow(dead_code, reason = "each test file uses its part")]

use std::ptr::NonNull;

use aquifer_pheap::heap::{HeapError, ObjectHeap, PAGE_BYTES, Placement};
use aquifer_sys::memory::{self, Protection};
use xxhash_rust::xxh3::xxh3_64;

pub const PAGE: usize = PAGE_BYTES as usize;
/// Length of the guards on both sides: more than a slab or a map.
const GUARD_BYTES: usize = 1 << 20;

/// The first page of a heap at `address` of `count` zones, each a page of map and a free page.
pub fn header_of_small_zones(address: u64, count: u64) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    page[..8].copy_from_slice(b"AQFRHEAP");
    let mut put = |at: usize, value: u64| page[at..at + 8].copy_from_slice(&value.to_le_bytes());
    put(8, aquifer_pheap::heap::HEAP_FORMAT_VERSION.into());
    put(16, address);
    put(24, (1 + 2 * count) * PAGE_BYTES);
    put(72, count);
    for zone in 0..count {
        let at = 80 + 32 * zone as usize;
        [1 + 2 * zone, 1, 0, 1]
            .into_iter()
            .enumerate()
            .for_each(|(i, value)| put(at + 8 * i, value));
    }
    let checksum = xxh3_64(&page[..PAGE - 8]);
    page[PAGE - 8..].copy_from_slice(&checksum.to_le_bytes());
    page
}

/// Memory like an object's: initially zero, at a constant address while this lives. An access
/// outside of it kills the test.
pub struct Object {
    reserved: *mut u8,
    room_bytes: usize,
    len_bytes: usize,
}

impl Object {
    /// An object of `len_bytes`.
    pub fn new(len_bytes: usize) -> Object {
        Object::with_room(len_bytes, len_bytes)
    }

    /// An object that can be made as long as `room_bytes`.
    pub fn with_room(len_bytes: usize, room_bytes: usize) -> Object {
        let room_bytes = room_bytes.next_multiple_of(PAGE);
        let reserved = memory::reserve(room_bytes + 2 * GUARD_BYTES).unwrap();
        let mut object = Object { reserved, room_bytes, len_bytes: 0 };
        object.grow(len_bytes);
        object
    }

    /// Extends it with zeros.
    pub fn grow(&mut self, len_bytes: usize) {
        assert!(len_bytes <= self.room_bytes && self.len_bytes.is_multiple_of(PAGE));
        let from = self.start().as_ptr().wrapping_add(self.len_bytes);
        let added = (len_bytes - self.len_bytes).next_multiple_of(PAGE);
        // SAFETY: inside the reservation, and not mapped yet.
        unsafe { memory::map_anonymous_at(from, added, Protection::ReadWrite) }.unwrap();
        self.len_bytes = len_bytes;
    }

    pub fn start(&self) -> NonNull<u8> {
        NonNull::new(self.reserved.wrapping_add(GUARD_BYTES)).unwrap()
    }

    pub fn len(&self) -> u64 {
        self.len_bytes as u64
    }

    /// Formats a heap in it.
    pub fn format(&self, placement: Placement) -> ObjectHeap {
        // SAFETY: the memory lives as long as the tests use the heap.
        unsafe { ObjectHeap::format(self.start(), self.len(), placement) }.unwrap()
    }

    /// Opens the heap in it.
    pub fn open(&self) -> Result<ObjectHeap, HeapError> {
        // SAFETY: as above.
        unsafe { ObjectHeap::open(self.start(), self.len()) }
    }

    /// Opens the heap in it for reading.
    pub fn open_read_only(&self) -> Result<ObjectHeap, HeapError> {
        // SAFETY: as above.
        unsafe { ObjectHeap::open_read_only(self.start(), self.len()) }
    }

    /// Its bytes, while no heap is being used.
    pub fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len_bytes];
        // SAFETY: mapped, and no other code uses it at the same time.
        unsafe { self.start().as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }

    /// Replaces its bytes, while no heap is open.
    pub fn set_content(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len_bytes);
        // SAFETY: mapped, and no other code uses it at the same time.
        unsafe { self.start().as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// Changes one byte.
    pub fn damage(&self, offset: usize, change: impl FnOnce(u8) -> u8) {
        assert!(offset < self.len_bytes);
        let place = self.start().as_ptr().wrapping_add(offset);
        // SAFETY: mapped; the tests call this while no operation is running.
        unsafe { place.write(change(place.read())) };
    }

    /// Write-protects pages, or lifts the protection. A store to a protected page kills the test.
    pub fn protect(&self, pages: std::ops::Range<usize>, may_store: bool) {
        let start = self.start().as_ptr().wrapping_add(pages.start * PAGE);
        let protection = libc::PROT_READ | if may_store { libc::PROT_WRITE } else { 0 };
        // SAFETY: the object's own memory.
        let result = unsafe { libc::mprotect(start.cast(), pages.len() * PAGE, protection) };
        assert_eq!(result, 0);
    }

    /// Simulates a crash and a restart after a `psync`: the same bytes at the same address.
    pub fn restart(&self) {
        let saved = self.content();
        let start = self.start().as_ptr();
        // SAFETY: the tests have dropped the heap.
        unsafe {
            memory::map_anonymous_at(
                start,
                self.len_bytes.next_multiple_of(PAGE),
                Protection::ReadWrite,
            )
        }
        .unwrap();
        self.set_content(&saved);
    }

    /// The pages that differ from `before`.
    pub fn pages_changed(&self, before: &[u8]) -> Vec<usize> {
        let now = self.content();
        let pages = now.chunks(PAGE).zip(before.chunks(PAGE));
        pages.enumerate().filter(|(_, (now, before))| now != before).map(|(page, _)| page).collect()
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: the tests drop their heaps first.
        let _ = unsafe { memory::unmap(self.reserved, self.room_bytes + 2 * GUARD_BYTES) };
    }
}
