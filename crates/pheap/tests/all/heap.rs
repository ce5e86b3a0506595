//! Compares the allocator with a plain model, through restarts and moves; and tests each of its
//! errors.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::{Object, PAGE, header_of_small_zones};
use aquifer_pheap::heap::{Damage, HeapError, NotAllocated, ObjectHeap, Placement};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

/// The allocations: offset → (requested size, fill byte).
type Model = BTreeMap<u64, (usize, u8)>;

fn offset(heap: &ObjectHeap, pointer: NonNull<u8>) -> u64 {
    pointer.as_ptr() as u64 - heap.start().as_ptr() as u64
}

fn pointer(heap: &ObjectHeap, offset: u64) -> NonNull<u8> {
    NonNull::new(heap.start().as_ptr().wrapping_add(offset as usize)).unwrap()
}

fn fill(pointer: NonNull<u8>, size: usize, byte: u8) {
    // SAFETY: an allocation of at least `size` bytes.
    unsafe { pointer.write_bytes(byte, size) };
}

fn is_filled(pointer: NonNull<u8>, size: usize, byte: u8) -> bool {
    // SAFETY: an allocation of at least `size` bytes.
    unsafe { NonNull::slice_from_raw_parts(pointer, size).as_ref() }.iter().all(|&b| b == byte)
}

/// Mostly small, sometimes some pages.
fn some_layout(rng: &mut Rng, most_align: u64) -> Layout {
    let size = match rng.below(20) {
        0 => rng.below(100_000),
        1..=3 => rng.below(6_000),
        4 => 4096 * rng.below(4),
        _ => rng.below(300),
    };
    let align = if rng.chance(0.1) { 1 << rng.below(most_align) } else { 1 << rng.below(5) };
    Layout::from_size_align(size as usize, align).unwrap()
}

/// One random operation, on the heap and on the model.
fn step(heap: &ObjectHeap, model: &mut Model, rng: &mut Rng, most_align: u64) {
    let chosen = (!model.is_empty()).then(|| {
        let nth = rng.below(model.len() as u64) as usize;
        let (&offset, &(size, byte)) = model.iter().nth(nth).unwrap();
        (offset, size, byte)
    });
    let byte = rng.next_u64() as u8;
    match (rng.below(10), chosen) {
        // In waves, so that whole pages become free too.
        (0..=3, Some((at, size, filled))) => {
            let memory = pointer(heap, at);
            assert!(is_filled(memory, size, filled), "{size} bytes at {at:#x} changed");
            // SAFETY: the model forgets the allocation.
            unsafe { heap.dealloc(memory) }.unwrap();
            model.remove(&at);
        }
        (4, Some((at, size, filled))) => {
            let layout = some_layout(rng, most_align);
            // SAFETY: the model uses only the returned pointer.
            if let Ok(moved) = unsafe { heap.realloc(pointer(heap, at), layout) } {
                assert!(is_filled(moved, size.min(layout.size()), filled));
                assert!(moved.is_aligned_to_(layout.align()));
                fill(moved, layout.size(), byte);
                model.remove(&at);
                model.insert(offset(heap, moved), (layout.size(), byte));
            }
        }
        _ => {
            let layout = some_layout(rng, most_align);
            let zeroed = rng.chance(0.2);
            let allocated = if zeroed { heap.alloc_zeroed(layout) } else { heap.alloc(layout) };
            match allocated {
                Ok(memory) => {
                    assert!(memory.is_aligned_to_(layout.align()));
                    let usable = heap.usable_size(memory).unwrap();
                    assert!(usable >= layout.size());
                    assert!(!zeroed || is_filled(memory, usable, 0));
                    fill(memory, layout.size(), byte);
                    let old = model.insert(offset(heap, memory), (layout.size(), byte));
                    assert!(old.is_none(), "handed out twice");
                }
                Err(HeapError::Full { requested_bytes, largest_run_bytes, .. }) => {
                    assert!(largest_run_bytes < requested_bytes.max(1) + layout.align() as u64 * 2);
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
}

trait IsAligned {
    fn is_aligned_to_(&self, align: usize) -> bool;
}

impl IsAligned for NonNull<u8> {
    fn is_aligned_to_(&self, align: usize) -> bool {
        (self.as_ptr() as usize).is_multiple_of(align)
    }
}

fn compare(heap: &ObjectHeap, model: &Model) {
    let statistics = heap.check().unwrap();
    assert_eq!(statistics.allocations, model.len() as u64);
    let parts = statistics.allocated_bytes
        + statistics.free_block_bytes
        + statistics.free_page_bytes
        + statistics.metadata_bytes;
    assert_eq!(parts, statistics.len_bytes);
    let mut end = 0;
    for (&at, &(size, byte)) in model {
        assert!(at >= end, "allocations overlap at {at:#x}");
        let usable = heap.usable_size(pointer(heap, at)).unwrap();
        assert!(usable >= size);
        end = at + usable as u64;
        assert!(is_filled(pointer(heap, at), size, byte), "{size} bytes at {at:#x} changed");
    }
    assert!(end <= heap.len_bytes());
}

#[test]
fn allocations_keep_their_bytes_through_restarts() {
    let mut rng = Rng::new(seed(1));
    for len in [64 * PAGE, 700 * PAGE + 123, 3000 * PAGE] {
        let object = Object::new(len);
        let mut heap = object.format(Placement::Fixed);
        let mut model = Model::new();
        for turn in 0..steps(12_000) {
            step(&heap, &mut model, &mut rng, 16);
            if turn % 1000 == 0 {
                compare(&heap, &model);
            }
            if rng.chance(0.002) {
                drop(heap);
                object.restart();
                heap = object.open().unwrap();
                compare(&heap, &model);
            }
        }
        compare(&heap, &model);
        for &at in model.keys() {
            // SAFETY: the allocation is not used any more.
            unsafe { heap.dealloc(pointer(&heap, at)) }.unwrap();
        }
        // At most one slab per class is kept; after a restart, it is kept until the next allocation
        // and free.
        let statistics = heap.check().unwrap();
        assert_eq!((statistics.allocations, statistics.allocated_bytes), (0, 0));
        assert!(statistics.free_block_bytes < (23 + 3 * 4) * 4096);
    }
}

#[test]
fn a_relocatable_heap_moves() {
    let mut rng = Rng::new(seed(2));
    let objects = [Object::new(500 * PAGE), Object::new(500 * PAGE)];
    let mut heap = objects[0].format(Placement::Relocatable);
    let mut model = Model::new();
    for turn in 1..=20 {
        for _ in 0..steps(400) {
            step(&heap, &mut model, &mut rng, 13);
        }
        assert_eq!(heap.placement(), Placement::Relocatable);
        drop(heap);
        objects[turn % 2].set_content(&objects[(turn + 1) % 2].content());
        objects[(turn + 1) % 2].set_content(&vec![0xdd; 500 * PAGE]);
        heap = objects[turn % 2].open().unwrap();
        compare(&heap, &model);
    }
    let error = heap.alloc(Layout::from_size_align(8, 8192).unwrap()).unwrap_err();
    assert_eq!(error, HeapError::Alignment { align_bytes: 8192, largest_bytes: 4096 });
}

#[test]
fn memory_that_held_something_becomes_a_heap() {
    let mut rng = Rng::new(seed(16));
    // Three pages of map, the last two unused at first.
    let object = Object::new(9000 * PAGE);
    let garbage: Vec<u8> = (0..9000 * PAGE).map(|at| (at * 7 / 3) as u8 | 1).collect();
    object.set_content(&garbage);
    let mut heap = object.format(Placement::Fixed);
    assert_eq!(object.pages_changed(&garbage), [0]);
    let free = HeapError::NotAllocated {
        address: object.start().as_ptr() as u64 + 8000 * 4096,
        reason: NotAllocated::Free,
    };
    assert_eq!(heap.usable_size(pointer(&heap, 8000 * 4096)), Err(free));
    let mut model = Model::new();
    for pages in [10, 5000, 8000] {
        // Few enough that a long run stays free.
        for _ in 0..steps(1000).min(2000) {
            step(&heap, &mut model, &mut rng, 16);
        }
        let layout = Layout::from_size_align(pages * PAGE, 8).unwrap();
        let large = heap.alloc_zeroed(layout).unwrap();
        assert!(is_filled(large, pages * PAGE, 0));
        // SAFETY: the allocation is not used any more.
        unsafe { heap.dealloc(large) }.unwrap();
        compare(&heap, &model);
        drop(heap);
        heap = object.open().unwrap();
        compare(&heap, &model);
    }
}

#[test]
fn a_full_heap_says_so_and_is_whole_again_when_freed() {
    let object = Object::new(200 * PAGE);
    let heap = object.format(Placement::Fixed);
    let layout = Layout::from_size_align(600, 8).unwrap();
    let mut counts = Vec::new();
    for _ in 0..3 {
        let mut all = Vec::new();
        let error = loop {
            match heap.alloc(layout) {
                Ok(memory) => all.push(memory),
                Err(error) => break error,
            }
        };
        let HeapError::Full { free_bytes, largest_run_bytes, .. } = error else {
            panic!("{error}")
        };
        assert_eq!((free_bytes, largest_run_bytes), (0, 0));
        heap.check().unwrap();
        counts.push(all.len());
        for memory in all {
            // SAFETY: the allocation is not used any more.
            unsafe { heap.dealloc(memory) }.unwrap();
        }
    }
    // 198 pages of 6 blocks of 672 bytes.
    assert_eq!(counts, [198 * 6; 3]);
    // Everything in one run, except for the slab that is kept.
    let statistics = heap.check().unwrap();
    assert!(statistics.largest_run_bytes >= 196 * PAGE as u64);
    assert!(heap.alloc(Layout::from_size_align(196 * PAGE, 8).unwrap()).is_ok());
}

#[test]
fn runs_grow_and_shrink_in_place() {
    let object = Object::new(100 * PAGE);
    let heap = object.format(Placement::Fixed);
    let page = |pages: usize| Layout::from_size_align(pages * PAGE, 8).unwrap();
    let first = heap.alloc(page(10)).unwrap();
    fill(first, 10 * PAGE, 7);
    // SAFETY: the test owns it, and uses nothing beyond the kept size.
    unsafe {
        assert!(heap.resize_in_place(first, 30 * PAGE).unwrap());
        assert_eq!(heap.usable_size(first), Ok(30 * PAGE));
        let behind = heap.alloc(page(1)).unwrap();
        assert!(!heap.resize_in_place(first, 31 * PAGE).unwrap());
        assert!(heap.resize_in_place(first, 5 * PAGE + 1).unwrap());
        assert_eq!(heap.usable_size(first), Ok(6 * PAGE));
        let moved = heap.realloc(first, page(40)).unwrap();
        assert_ne!(moved, first);
        assert!(is_filled(moved, 6 * PAGE, 7));
        heap.dealloc(behind).unwrap();
        heap.dealloc(moved).unwrap();
        assert_eq!(heap.check().unwrap().free_page_bytes, 98 * PAGE as u64);
    }
}

#[test]
fn freeing_wrongly_is_an_error() {
    let object = Object::new(100 * PAGE);
    let heap = object.format(Placement::Fixed);
    let refused = |address: *mut u8| {
        // SAFETY: no freed allocation is used any more.
        match unsafe { heap.dealloc(NonNull::new(address).unwrap()) } {
            Err(HeapError::NotAllocated { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    };
    let start = heap.start().as_ptr();
    let block = heap.alloc(Layout::new::<[u64; 10]>()).unwrap().as_ptr();
    let large = heap.alloc(Layout::new::<[u8; 3000]>()).unwrap().as_ptr();
    let run = heap.alloc(Layout::new::<[u8; 20_000]>()).unwrap().as_ptr();
    let mut on_the_stack = 0u64;
    assert_eq!(refused((&raw mut on_the_stack).cast()), NotAllocated::Foreign);
    assert_eq!(refused(start.wrapping_sub(1)), NotAllocated::Foreign);
    assert_eq!(refused(start.wrapping_add(100 * PAGE)), NotAllocated::Foreign);
    assert_eq!(refused(start), NotAllocated::Metadata);
    assert_eq!(refused(start.wrapping_add(PAGE)), NotAllocated::Metadata);
    assert_eq!(
        refused(start.wrapping_add(block.addr() / PAGE * PAGE - start.addr())),
        NotAllocated::Metadata
    );
    assert_eq!(refused(block.wrapping_add(8)), NotAllocated::Interior);
    assert_eq!(refused(block.wrapping_add(80)), NotAllocated::Free);
    assert_eq!(refused(large.wrapping_add(1500)), NotAllocated::Interior);
    assert_eq!(refused(large.wrapping_add(3264)), NotAllocated::Free);
    assert_eq!(refused(run.wrapping_add(16)), NotAllocated::Interior);
    assert_eq!(refused(run.wrapping_add(PAGE)), NotAllocated::Interior);
    assert_eq!(refused(start.wrapping_add(99 * PAGE)), NotAllocated::Free);
    for memory in [block, large, run] {
        // SAFETY: the allocation is not used any more.
        unsafe { heap.dealloc(NonNull::new(memory).unwrap()) }.unwrap();
        assert_eq!(refused(memory), NotAllocated::Free);
    }
    assert_eq!(heap.check().unwrap().allocations, 0);
}

#[test]
fn a_heap_grows_in_its_zone_and_beyond() {
    let mut object = Object::with_room(10 * PAGE, 40_000 * PAGE);
    let mut heap = object.format(Placement::Fixed);
    let mut model = Model::new();
    let mut rng = Rng::new(seed(3));
    let mut lengths = Vec::new();
    // One map page describes 4096 pages; beyond that a new zone begins, and another beyond twice
    // that.
    for pages in [11, 100, 4000, 4098, 4099, 4200, 9000, 40_000] {
        let before = heap.check().unwrap();
        object.grow(pages * PAGE);
        // SAFETY: the memory has been added.
        match unsafe { heap.grow((pages * PAGE) as u64 + 5) } {
            Ok(()) => lengths.push(pages),
            // One page is too few for a map and its data pages.
            Err(HeapError::TooSmall { .. }) => assert_eq!(heap.check().unwrap(), before),
            Err(other) => panic!("{other}"),
        }
        for _ in 0..steps(1000) {
            step(&heap, &mut model, &mut rng, 13);
        }
        compare(&heap, &model);
        drop(heap);
        object.restart();
        heap = object.open().unwrap();
        compare(&heap, &model);
    }
    assert_eq!(heap.len_bytes(), 40_000 * PAGE as u64);
    assert_eq!(lengths, [11, 100, 4000, 4098, 4200, 9000, 40_000]);
    // The last growth is one run.
    assert!(heap.check().unwrap().largest_run_bytes > 30_000 * PAGE as u64);
    // SAFETY: nothing changes.
    let shrunk = unsafe { heap.grow(9000 * PAGE as u64) }.unwrap_err();
    assert!(matches!(shrunk, HeapError::TooSmall { .. }));
}

/// Like a program that enlarges its object a little whenever it is full.
#[test]
fn a_heap_grows_in_many_small_steps() {
    const STEP: usize = 256 * PAGE;
    let mut object = Object::with_room(STEP, 3000 * STEP);
    let heap = object.format(Placement::Fixed);
    for steps in 2..=3000 {
        object.grow(steps * STEP);
        // SAFETY: the memory is there.
        unsafe { heap.grow((steps * STEP) as u64) }.unwrap();
    }
    let statistics = heap.check().unwrap();
    assert_eq!(statistics.len_bytes, 3000 * STEP as u64);
    assert!(statistics.metadata_bytes < statistics.len_bytes / 1000, "{statistics:?}");
}

#[test]
fn a_header_without_room_for_a_zone_is_an_error() {
    let mut object = Object::with_room(129 * PAGE, (129 + 4096) * PAGE);
    let header = header_of_small_zones(object.start().as_ptr() as u64, 64);
    header.into_iter().enumerate().for_each(|(at, byte)| object.damage(at, |_| byte));
    let heap = object.open().unwrap();
    let before = heap.check().unwrap();
    assert_eq!((before.len_bytes, before.free_page_bytes), (129 * 4096, 64 * 4096));
    // More than the last map has room for.
    object.grow((129 + 4096) * PAGE);
    // SAFETY: the memory is there.
    let refused = unsafe { heap.grow(object.len()) };
    assert_eq!(refused, Err(HeapError::TooManyZones { zones: 64 }));
    assert_eq!(heap.check().unwrap(), before);
}

#[test]
fn opening_says_what_is_wrong() {
    let object = Object::new(20 * PAGE);
    let start = object.start().as_ptr() as u64;
    assert_eq!(object.open().unwrap_err(), HeapError::NotFormatted { address: start });
    let heap = object.format(Placement::Fixed);
    assert_eq!(object.open().unwrap_err(), HeapError::AlreadyOpen { address: start });
    drop(heap);
    let with = |start, len| {
        // SAFETY: never more than the object's memory.
        unsafe { ObjectHeap::open(start, len) }
    };
    let short = with(object.start(), 19 * 4096).unwrap_err();
    assert_eq!(short, HeapError::Length { recorded_bytes: 20 * 4096, given_bytes: 19 * 4096 });
    assert!(matches!(with(object.start(), 100), Err(HeapError::TooSmall { .. })));
    let other = Object::new(20 * PAGE);
    other.set_content(&object.content());
    let given = other.start().as_ptr() as u64;
    assert_eq!(other.open().unwrap_err(), HeapError::Moved { recorded: start, given });
    object.damage(3, |byte| byte ^ 1);
    assert_eq!(object.open().unwrap_err(), HeapError::NotAHeap { address: start });
    object.damage(3, |byte| byte ^ 1);
    object.damage(30, |byte| byte ^ 1);
    let damaged = HeapError::Damaged { offset_bytes: 0, damage: Damage::HeaderChecksum };
    assert_eq!(object.open().unwrap_err(), damaged);
    // SAFETY: the object's memory.
    let format = |len| unsafe { ObjectHeap::format(object.start(), len, Placement::Fixed) };
    assert!(matches!(format(2 * 4096), Err(HeapError::TooSmall { .. })));
    assert!(matches!(format(0), Err(HeapError::TooSmall { .. })));
    let inside = NonNull::new(object.start().as_ptr().wrapping_add(8)).unwrap();
    // SAFETY: the object's memory.
    let misaligned = unsafe { ObjectHeap::format(inside, 8 * 4096, Placement::Fixed) };
    assert!(matches!(misaligned, Err(HeapError::Misaligned { .. })));
    assert!(format(3 * 4096).is_ok());
}

#[test]
fn for_reading_nothing_can_be_changed() {
    let object = Object::new(20 * PAGE);
    let heap = object.format(Placement::Fixed);
    let number = heap.alloc(Layout::new::<u64>()).unwrap().cast::<u64>();
    heap.set_root(number, 5).unwrap();
    drop(heap);
    let before = object.content();
    let heap = object.open_read_only().unwrap();
    assert_eq!(heap.root::<u64>(5), Ok(number));
    assert_eq!(heap.usable_size(number.cast()), Ok(16));
    assert_eq!(heap.check().unwrap().allocations, 1);
    assert_eq!(heap.alloc(Layout::new::<u64>()), Err(HeapError::ReadOnly));
    // SAFETY: the allocation is not used otherwise.
    unsafe {
        assert_eq!(heap.dealloc(number.cast()), Err(HeapError::ReadOnly));
        assert_eq!(heap.resize_in_place(number.cast(), 8), Err(HeapError::ReadOnly));
        assert_eq!(heap.grow(30 * 4096), Err(HeapError::ReadOnly));
    }
    assert_eq!(heap.clear_root(), Err(HeapError::ReadOnly));
    assert!(object.pages_changed(&before).is_empty());
}

#[test]
fn the_root_is_found_by_its_type_only() {
    let object = Object::new(20 * PAGE);
    let heap = object.format(Placement::Fixed);
    assert_eq!(heap.root::<u64>(1), Err(HeapError::NoRoot));
    let number = heap.alloc(Layout::new::<[u64; 2]>()).unwrap();
    heap.set_root(number.cast::<u64>(), 1).unwrap();
    let outside = NonNull::new(heap.start().as_ptr().wrapping_add(15 * PAGE)).unwrap();
    assert!(matches!(heap.set_root(outside, 1), Err(HeapError::NotAllocated { .. })));
    assert!(matches!(
        heap.set_root(number.cast::<[u64; 9]>(), 1),
        Err(HeapError::NotAllocated { .. })
    ));
    drop(heap);
    object.restart();
    let heap = object.open().unwrap();
    assert_eq!(heap.root::<u64>(1), Ok(number.cast()));
    assert!(matches!(heap.root::<u64>(2), Err(HeapError::RootType { .. })));
    assert!(matches!(heap.root::<u32>(1), Err(HeapError::RootType { .. })));
    assert!(matches!(heap.root::<[u32; 2]>(1), Err(HeapError::RootType { .. })));
    // SAFETY: the allocation is not used any more.
    unsafe { heap.dealloc(number) }.unwrap();
    let dangling = HeapError::Damaged { offset_bytes: offset(&heap, number), damage: Damage::Root };
    assert_eq!(heap.check(), Err(dangling));
    drop(heap);
    let heap = object.open().unwrap();
    assert_eq!(heap.root::<u64>(1), Err(dangling));
    heap.clear_root().unwrap();
    assert_eq!(heap.root::<u64>(1), Err(HeapError::NoRoot));
}

#[test]
fn threads_share_a_heap() {
    let object = Object::new(2000 * PAGE);
    let heap = object.format(Placement::Fixed);
    let seed = seed(4);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let heap = &heap;
            scope.spawn(move || {
                let mut rng = Rng::new(seed + thread);
                let mut model = Model::new();
                for _ in 0..steps(4_000) {
                    step(heap, &mut model, &mut rng, 8);
                }
                for at in model.into_keys() {
                    // SAFETY: the allocation is not used any more.
                    unsafe { heap.dealloc(pointer(heap, at)) }.unwrap();
                }
            });
        }
        for _ in 0..20 {
            drop(heap.quiesce().unwrap());
            heap.check().unwrap();
        }
    });
    assert_eq!(heap.check().unwrap().allocations, 0);
}

#[test]
fn a_frozen_allocator_makes_others_wait() {
    let object = Object::new(20 * PAGE);
    let heap = object.format(Placement::Fixed);
    let (about_to, done) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let quiet = heap.quiesce().unwrap();
        scope.spawn(|| {
            about_to.store(true, Ordering::SeqCst);
            heap.alloc(Layout::new::<u64>()).unwrap();
            done.store(true, Ordering::SeqCst);
        });
        while !about_to.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        for _ in 0..10_000 {
            std::thread::yield_now();
        }
        assert!(!done.load(Ordering::SeqCst));
        drop(quiet);
    });
    assert!(done.load(Ordering::SeqCst));
}

#[test]
fn a_forked_child_has_no_heap() {
    let object = Object::new(20 * PAGE);
    let heap = object.format(Placement::Fixed);
    // SAFETY: the child only calls the heap, which checks its process first, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = heap.alloc(Layout::new::<u64>()) == Err(HeapError::Forked)
            && heap.check() == Err(HeapError::Forked);
        drop(heap);
        // SAFETY: always.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) };
    }
    let mut status = -1;
    // SAFETY: waits for the child forked above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert!(heap.alloc(Layout::new::<u64>()).is_ok());
}

#[test]
fn collections_of_allocator_api2_work_over_a_heap() {
    use allocator_api2::boxed::Box as HeapBox;
    use allocator_api2::vec::Vec as HeapVec;
    let object = Object::new(1000 * PAGE);
    let heap = object.format(Placement::Fixed);
    {
        let mut numbers = HeapVec::new_in(&heap);
        let mut boxes = HeapVec::new_in(&heap);
        for n in 0..50_000u64 {
            numbers.push(n);
            if n % 1000 == 0 {
                boxes.push(HeapBox::new_in([n; 20], &heap));
                numbers.shrink_to_fit();
            }
        }
        assert!(numbers.iter().copied().eq(0..50_000));
        assert!(boxes.iter().enumerate().all(|(i, values)| **values == [i as u64 * 1000; 20]));
        assert!(heap.contains(numbers.as_ptr().cast()));
        let empty: HeapVec<(), _> =
            std::iter::repeat_n((), 5).fold(HeapVec::new_in(&heap), |mut all, unit| {
                all.push(unit);
                all
            });
        assert_eq!(empty.len(), 5);
        let mut too_many = HeapVec::<u64, _>::new_in(&heap);
        assert!(too_many.try_reserve(10_000_000).is_err());
        heap.check().unwrap();
    }
    assert_eq!(heap.check().unwrap().allocations, 0);
}
