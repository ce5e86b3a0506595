//! Heaps in attached objects: safe Rust whose structures survive.

use crate::support::{PAGE, Place, on_media, reopen};
use aquifer_object::collections::{PBTreeMap, PString, PVec};
use aquifer_object::heap::HeapError;
use aquifer_object::{CreateObject, ObjectError, Objects};

aquifer_object::persist! {
    /// The root type of the tests.
    struct Notes<'h> { notes: PVec<'h, PString<'h>> }
}
const NOTES: u64 = 1;

fn create_heap(objects: &Objects, name: &str, size_bytes: u64) {
    CreateObject::new().heap(true).create(objects, name, size_bytes).unwrap();
}

fn add(objects: &Objects, text: &str, is_committed: bool) -> usize {
    let mut object = objects.attach_mut("notes").unwrap();
    let count = object
        .heap()
        .unwrap()
        .enter(|scope| {
            let heap = scope.heap();
            let root =
                scope.root_or_insert_with(NOTES, |heap| Ok(Notes { notes: PVec::new_in(heap) }))?;
            root.notes.push(PString::from_str_in(text, heap)?)?;
            Ok::<_, HeapError>(root.notes.len())
        })
        .unwrap();
    if is_committed {
        object.psync().unwrap();
    }
    object.detach().unwrap();
    count
}

fn read(objects: &Objects) -> Vec<String> {
    let mut object = objects.attach("notes").unwrap();
    let mut heap = object.heap().unwrap();
    heap.check().unwrap();
    heap.enter(|scope| {
        let notes = &scope.root::<Notes>(NOTES).unwrap().notes;
        notes.iter().map(|note| note.to_string()).collect()
    })
}

#[test]
fn structures_survive_with_psync_and_vanish_without() {
    let place = Place::new();
    let objects = place.create(8 << 20, 1 << 20);
    create_heap(&objects, "notes", 1 << 20);
    assert_eq!(add(&objects, "lost", false), 1);
    assert_eq!(add(&objects, "first", true), 1);
    assert_eq!(add(&objects, "lost again", false), 2);
    assert_eq!(add(&objects, "second", true), 2);
    drop(objects);
    let objects = place.open();
    assert_eq!(read(&objects), ["first", "second"]);
}

#[test]
fn commits_in_the_middle_of_a_scope() {
    let (media, objects) = on_media(8 << 20, 1 << 20);
    create_heap(&objects, "notes", 1 << 20);
    let mut object = objects.attach_mut("notes").unwrap();
    let images = object.heap().unwrap().enter_with(|scope, psync| {
        let heap = scope.heap();
        scope.root_or_insert_with(NOTES, |heap| Ok(Notes { notes: PVec::new_in(heap) })).unwrap();
        let mut images = Vec::new();
        for number in 0..5 {
            let note = PString::from_str_in(&format!("note {number}"), heap).unwrap();
            scope.root_mut::<Notes>(NOTES).unwrap().notes.push(note).unwrap();
            psync.psync(scope).unwrap();
            let unfinished = PString::from_str_in("nobody has it", heap).unwrap();
            images.push(reopen(&media));
            drop(unfinished);
        }
        images
    });
    drop(object);
    for (number, again) in images.iter().enumerate() {
        let expected: Vec<String> = (0..=number).map(|number| format!("note {number}")).collect();
        assert_eq!(read(again), expected);
    }
}

#[test]
fn bytes_and_heaps_are_kept_apart() {
    let (_, objects) = on_media(8 << 20, 1 << 20);
    create_heap(&objects, "heap", 1 << 20);
    objects.create("bytes", 1 << 20).unwrap();
    let mut heap = objects.attach_mut("heap").unwrap();
    let refused = heap.as_mut_slice().unwrap_err();
    assert!(matches!(refused, ObjectError::HoldsHeap { .. }), "{refused}");
    let mut bytes = objects.attach_mut("bytes").unwrap();
    let refused = bytes.heap().unwrap_err();
    assert!(matches!(refused, ObjectError::NoHeap { .. }), "{refused}");
    // An object never attached for writing has no heap to read.
    heap.detach().unwrap();
    let mut heap = objects.attach("heap").unwrap();
    let refused = heap.heap().unwrap_err();
    assert!(
        matches!(refused, ObjectError::Heap { source: HeapError::NotFormatted { .. }, .. }),
        "{refused}"
    );
}

#[test]
fn a_heap_takes_in_what_its_object_was_made_larger_by() {
    let (_, objects) = on_media(16 << 20, 1 << 20);
    create_heap(&objects, "heap", 64 * PAGE as u64);
    create_heap(&objects, "behind", 1);
    let fill = |from: u64| -> u64 {
        let mut object = objects.attach_mut("heap").unwrap();
        let mut heap = object.heap().unwrap();
        let reached = heap.enter(|scope| {
            let heap = scope.heap();
            let map = scope.root_or_insert_with(NOTES, |heap| Ok(PBTreeMap::new_in(heap))).unwrap();
            let mut number = from;
            // Until the heap is full.
            loop {
                let Ok(text) = PString::from_str_in(&number.to_string(), heap) else { break };
                if map.insert(number, text).is_err() {
                    break;
                }
                number += 1;
            }
            number
        });
        heap.check().unwrap();
        object.psync().unwrap();
        reached
    };
    let first = fill(0);
    let refused = objects.resize("heap", PAGE as u64).unwrap_err();
    assert!(matches!(refused, ObjectError::HeapCannotShrink { .. }), "{refused}");
    objects.resize("heap", 200 * PAGE as u64).unwrap();
    let second = fill(first);
    assert!(second > 2 * first, "{first}, then {second}");
    let mut object = objects.attach("heap").unwrap();
    object.heap().unwrap().enter(|scope| {
        let map = scope.root::<PBTreeMap<u64, PString>>(NOTES).unwrap();
        assert!(map.iter().map(|(number, _)| *number).eq(0..second));
        assert!(map.iter().all(|(number, text)| **text == *number.to_string()));
    });
}

/// A heap that cannot grow still works, so opening it must not fail.
#[test]
fn a_heap_that_cannot_take_more_in_is_opened_all_the_same() {
    let (_, objects) = on_media(32 << 20, 1 << 20);
    create_heap(&objects, "notes", 129 * PAGE as u64);
    let mut object = objects.attach_mut("notes").unwrap();
    let header = crate::heap_support::header_of_small_zones(object.address(), 64);
    // SAFETY: the object's first page, which is not in use; it holds a heap afterwards.
    unsafe { object.start().cast().write(header) };
    object.psync().unwrap();
    object.detach().unwrap();
    objects.resize("notes", (129 + 4096) * PAGE as u64).unwrap();
    assert_eq!(add(&objects, "a note", true), 1);
    assert_eq!(read(&objects), ["a note"]);
}
