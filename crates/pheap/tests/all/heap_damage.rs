//! A damaged heap returns errors; it must neither hang nor access memory outside the object. The
//! object lies between guard pages: touching them kills the test.

use std::alloc::Layout;
use std::ptr::NonNull;

use crate::support::{Object, PAGE};
use aquifer_pheap::heap::{Damage, HeapError, ObjectHeap, Placement};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;
use xxhash_rust::xxh3::xxh3_64;

const PAGES: usize = 64;

/// The allocations a test knows; their content is arbitrary once the heap is damaged.
type Known = Vec<NonNull<u8>>;

fn layout(rng: &mut Rng) -> Layout {
    let most = if rng.chance(0.1) { 30_000 } else { 3000 };
    Layout::from_size_align(rng.below(most) as usize, 1 << rng.below(8)).unwrap()
}

/// Writes to all usable bytes of an allocation.
fn scribble(heap: &ObjectHeap, memory: NonNull<u8>, rng: &mut Rng) {
    if let Ok(usable) = heap.usable_size(memory) {
        let byte = rng.next_u64() as u8;
        // SAFETY: the heap reports these bytes as usable; if they were not, a guard page would end
        // the test.
        unsafe { memory.write_bytes(byte, usable) };
    }
}

fn operate(heap: &ObjectHeap, known: &mut Known, rng: &mut Rng) -> Result<(), HeapError> {
    let chosen = (!known.is_empty()).then(|| rng.below(known.len() as u64) as usize);
    match (rng.below(8), chosen) {
        (0 | 1, Some(chosen)) => {
            let memory = known.swap_remove(chosen);
            // SAFETY: the test does not use it any more.
            unsafe { heap.dealloc(memory) }
        }
        (2, Some(chosen)) => {
            let layout = layout(rng);
            // SAFETY: the test uses only the returned pointer.
            known[chosen] = unsafe { heap.realloc(known[chosen], layout) }?;
            scribble(heap, known[chosen], rng);
            Ok(())
        }
        (3, Some(chosen)) => {
            scribble(heap, known[chosen], rng);
            heap.set_root(known[chosen], 1)?;
            heap.root::<u8>(1).map(drop)
        }
        (4, _) => {
            let at = rng.below((PAGES * PAGE) as u64) as usize;
            let anywhere = NonNull::new(heap.start().as_ptr().wrapping_add(at)).unwrap();
            heap.usable_size(anywhere).map(drop)
        }
        (5, _) => heap.check().map(drop),
        (_, _) => {
            let layout = layout(rng);
            let zeroed = rng.chance(0.2);
            let memory = if zeroed { heap.alloc_zeroed(layout) } else { heap.alloc(layout) }?;
            scribble(heap, memory, rng);
            known.push(memory);
            Ok(())
        }
    }
}

/// A heap with allocations.
fn used(object: &Object, rng: &mut Rng) -> (ObjectHeap, Known) {
    object.set_content(&vec![0; object.len() as usize]);
    let heap = object.format(Placement::Fixed);
    let mut known = Known::new();
    for _ in 0..150 {
        match operate(&heap, &mut known, rng) {
            Ok(()) | Err(HeapError::Full { .. } | HeapError::NotAllocated { .. }) => {}
            // The root was freed, so the result of these operations is unspecified.
            Err(HeapError::Damaged { damage: Damage::Root, .. }) => {}
            Err(other) => panic!("undamaged, and yet: {other}"),
        }
    }
    heap.clear_root().unwrap();
    heap.check().unwrap();
    (heap, known)
}

/// An offset that may contain metadata: in the header, in the map, or at the start of a page.
fn somewhere(rng: &mut Rng) -> usize {
    match rng.below(3) {
        0 => rng.below(200) as usize,
        1 => PAGE + rng.below(PAGES as u64) as usize,
        _ => (2 + rng.below(PAGES as u64 - 2) as usize) * PAGE + rng.below(64) as usize,
    }
}

fn some_damage(object: &Object, rng: &mut Rng) {
    for _ in 0..1 + rng.below(6) {
        let change = rng.next_u64() as u8;
        let at = somewhere(rng);
        object.damage(at, |byte| match change % 4 {
            0 => change,
            1 => 0,
            2 => byte ^ 1 << (change >> 5),
            // Page states, so that the map is wrong rather than invalid.
            _ => [0, 1, 2, 3, 0x40 | change >> 3, 0xc0 | change >> 3][usize::from(change) % 6],
        });
    }
}

/// Corrects the header's checksum, so that its fields are validated.
fn seal(object: &Object) {
    let checksum = xxh3_64(&object.content()[..PAGE - 8]);
    for (index, byte) in checksum.to_le_bytes().into_iter().enumerate() {
        object.damage(PAGE - 8 + index, |_| byte);
    }
}

#[test]
fn damage_is_an_error_and_never_leads_outside() {
    let mut rng = Rng::new(seed(5));
    let object = Object::new(PAGES * PAGE);
    let (mut refused, mut found) = (0, 0);
    for _ in 0..steps(600) {
        let (mut heap, mut known) = used(&object, &mut rng);
        let while_open = rng.chance(0.5);
        if !while_open {
            drop(heap);
            some_damage(&object, &mut rng);
            if rng.chance(0.7) {
                seal(&object);
            }
            heap = match object.open() {
                Ok(heap) => heap,
                Err(_) => {
                    refused += 1;
                    continue;
                }
            };
        } else {
            some_damage(&object, &mut rng);
        }
        for _ in 0..60 {
            found += usize::from(matches!(
                operate(&heap, &mut known, &mut rng),
                Err(HeapError::Damaged { .. })
            ));
        }
        // SAFETY: the memory has that length.
        let _ = unsafe { heap.grow((PAGES * PAGE) as u64) };
    }
    assert!(refused > 0 && found > 0, "{refused} heaps refused, {found} operations");
}

/// Changes each single byte of metadata: `open` or `check` must detect it, or nothing depends on
/// it.
#[test]
fn check_sees_single_bytes() {
    let mut rng = Rng::new(seed(6));
    let object = Object::new(PAGES * PAGE);
    let (heap, _) = used(&object, &mut rng);
    let statistics = heap.check().unwrap();
    drop(heap);
    let good = object.content();
    let map = PAGE..PAGE + (PAGES - 2);
    for at in (0..PAGE).chain(map.clone()) {
        object.set_content(&good);
        object.damage(at, |byte| byte ^ 0x41);
        let seen = match object.open() {
            Err(_) => true,
            Ok(heap) => heap.check() != Ok(statistics),
        };
        assert!(seen, "byte {at:#x}");
    }
    // The headers of the pages that the map marks as slabs.
    for page in map.clone().filter(|&at| good[at] & 0x40 != 0).map(|at| at - PAGE + 2) {
        for at in page * PAGE..page * PAGE + 64 {
            object.set_content(&good);
            // One bit only: with two, one might free a block while the other allocates one.
            object.damage(at, |byte| byte ^ 0x40);
            let heap = object.open().unwrap();
            assert_ne!(heap.check(), Ok(statistics), "byte {at:#x}");
        }
    }
}
