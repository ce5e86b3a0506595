//! Counts the pages stored to, which a `psync` would have to write.

use std::alloc::Layout;
use std::ptr::NonNull;

use crate::support::{Object, PAGE};
use aquifer_pheap::collections::{PBTreeMap, PHashMap};
use aquifer_pheap::heap::{ObjectHeap, Placement};
use aquifer_testkit::campaign::seed;
use aquifer_testkit::rng::Rng;

fn alloc(heap: &ObjectHeap, size: usize) -> NonNull<u8> {
    let memory = heap.alloc(Layout::from_size_align(size, 8).unwrap()).unwrap();
    // SAFETY: a new allocation; filling it dirties its page.
    unsafe { memory.write_bytes(0xab, size) };
    memory
}

fn free(heap: &ObjectHeap, memory: NonNull<u8>) {
    // SAFETY: the allocation is not used any more.
    unsafe { heap.dealloc(memory) }.unwrap();
}

fn page_of(object: &Object, memory: NonNull<u8>) -> usize {
    (memory.as_ptr() as usize - object.start().as_ptr() as usize) / PAGE
}

/// A reopened heap of many slabs of 64-byte blocks, two thirds of them allocated in random order.
fn worn(object: &Object) -> (ObjectHeap, Vec<NonNull<u8>>) {
    let mut rng = Rng::new(seed(7));
    let heap = object.format(Placement::Fixed);
    let mut all: Vec<_> = (0..63 * 600).map(|_| alloc(&heap, 64)).collect();
    for _ in 0..63 * 200 {
        let chosen = rng.below(all.len() as u64) as usize;
        free(&heap, all.swap_remove(chosen));
    }
    drop(heap);
    object.restart();
    (object.open().unwrap(), all)
}

#[test]
fn fresh_allocations_fill_one_page_after_the_other() {
    let object = Object::new(2000 * PAGE);
    let before = object.content();
    let heap = object.format(Placement::Fixed);
    assert_eq!(object.pages_changed(&before), [0], "a fresh heap");
    let all: Vec<_> = (0..1000).map(|_| alloc(&heap, 64)).collect();
    // 63 blocks a page, the map, the header.
    assert_eq!(object.pages_changed(&before).len(), 1000usize.div_ceil(63) + 2);
    drop(all);
}

#[test]
fn a_few_allocations_in_a_worn_heap_dirty_one_page() {
    let object = Object::new(2000 * PAGE);
    let (heap, _) = worn(&object);
    let before = object.content();
    for _ in 0..10 {
        alloc(&heap, 64);
    }
    // One slab, or two if the first has little room; and the map if that one filled up.
    let changed = object.pages_changed(&before);
    assert!(changed.len() <= 3, "{changed:?}");
}

#[test]
fn what_was_freed_is_allocated_again_in_the_same_pages() {
    let object = Object::new(2000 * PAGE);
    let (heap, mut all) = worn(&object);
    let mut rng = Rng::new(seed(8));
    for _ in 0..50 {
        let before = object.content();
        let mut freed = std::collections::BTreeSet::new();
        for _ in 0..8 {
            let memory = all.swap_remove(rng.below(all.len() as u64) as usize);
            freed.insert(page_of(&object, memory));
            free(&heap, memory);
        }
        for _ in 0..8 {
            all.push(alloc(&heap, 64));
        }
        // The pages of the freed blocks, and at most the map.
        let changed = object.pages_changed(&before);
        let others: Vec<_> = changed.iter().filter(|page| !freed.contains(page)).collect();
        assert!(others.is_empty() || others == [&1], "{changed:?} for {freed:?}");
    }
}

#[test]
fn a_block_freed_and_allocated_in_turn_leaves_the_map_alone() {
    let object = Object::new(200 * PAGE);
    let heap = object.format(Placement::Fixed);
    // Two full slabs.
    let all: Vec<_> = (0..2 * 63).map(|_| alloc(&heap, 64)).collect();
    let map = object.content()[PAGE..2 * PAGE].to_vec();
    let mut memory = all[10];
    for _ in 0..100 {
        free(&heap, memory);
        assert_eq!(object.content()[PAGE..2 * PAGE], map);
        memory = alloc(&heap, 64);
        assert_eq!(object.content()[PAGE..2 * PAGE], map);
    }
    // The same with the only block of a class.
    let mut memory = alloc(&heap, 200);
    let map = object.content()[PAGE..2 * PAGE].to_vec();
    for _ in 0..100 {
        free(&heap, memory);
        assert_eq!(object.content()[PAGE..2 * PAGE], map);
        memory = alloc(&heap, 200);
        assert_eq!(object.content()[PAGE..2 * PAGE], map);
    }
}

#[test]
fn large_allocations_dirty_their_map_only() {
    let object = Object::new(6000 * PAGE);
    let heap = object.format(Placement::Fixed);
    let before = object.content();
    let layout = Layout::from_size_align(5000 * PAGE, 8).unwrap();
    // Not even a zero is stored to the pages: they are zero already.
    object.protect(5..6000, false);
    let large = heap.alloc_zeroed(layout).unwrap();
    object.protect(5..6000, true);
    // The header, because two more map pages are used from now on.
    assert_eq!(object.pages_changed(&before), [0, 1, 2]);
    let before = object.content();
    free(&heap, large);
    assert_eq!(object.pages_changed(&before), [1, 2]);
}

/// Pages changed by each of `count` calls, on average.
fn mean_changed(object: &Object, count: usize, mut change: impl FnMut()) -> f64 {
    let mut changed = 0;
    for _ in 0..count {
        let before = object.content();
        change();
        changed += object.pages_changed(&before).len();
    }
    changed as f64 / count as f64
}

#[test]
fn an_insertion_into_a_large_map_dirties_two_pages_or_three() {
    let object = Object::new(2000 * PAGE);
    let mut heap = object.format(Placement::Fixed);
    let mut rng = Rng::new(seed(14));
    heap.enter(|scope| {
        let make = |heap| Ok(PBTreeMap::<u64, u64>::new_in(heap));
        let tree = scope.root_or_insert_with(1, make).unwrap();
        for _ in 0..100_000 {
            tree.insert(rng.next_u64(), 1).unwrap();
        }
        // The leaf, and the length in the root; sometimes a split.
        let mean = mean_changed(&object, 100, || {
            tree.insert(rng.next_u64(), 1).unwrap();
        });
        assert!(mean <= 2.5, "{mean} pages");
        scope.remove_root::<PBTreeMap<u64, u64>>(1).unwrap();

        let make = |heap| PHashMap::<u64, u64>::with_capacity_in(60_000, heap);
        let table = scope.root_or_insert_with(1, make).unwrap();
        for _ in 0..50_000 {
            table.insert(rng.next_u64(), 1).unwrap();
        }
        // The slot, and the length in the root.
        let mean = mean_changed(&object, 100, || {
            table.insert(rng.next_u64(), 1).unwrap();
        });
        assert!(mean <= 2.1, "{mean} pages");
    });
}

#[test]
fn a_large_empty_table_dirties_nothing_of_a_fresh_object() {
    let object = Object::new(2000 * PAGE);
    let mut heap = object.format(Placement::Fixed);
    let before = object.content();
    heap.enter(|scope| {
        scope
            .root_or_insert_with(1, |heap| PHashMap::<u64, u64>::with_capacity_in(60_000, heap))
            .unwrap();
    });
    // Header, map, and the slab with the root.
    assert_eq!(object.pages_changed(&before).len(), 3);
}
