//! Heaps that record their stores: a psync commits what was recorded, which must be all there is.

use std::alloc::Layout;

use crate::support::{on_media, survivor};
use aquifer_crashkit::{CrashMedia, Fault, Trigger};
use aquifer_object::collections::{PBTreeMap, PBox, PHashMap, PString, PVec};
use aquifer_object::heap::{HeapError, HeapRef, Scope};
use aquifer_object::{Attachment, CreateObject, ObjectOptions, Objects};
use aquifer_pool::media::MediaOperation;
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

const OBJECT_BYTES: u64 = 1 << 20;
/// Where the tests store behind the heap's back.
const UNRECORDED: usize = OBJECT_BYTES as usize - 64;
const ROOT: u64 = 1;

aquifer_object::persist! {
    /// One of each collection.
    struct Root<'h> {
        number: u64,
        vec: PVec<'h, u64>,
        strings: PVec<'h, PString<'h>>,
        tree: PBTreeMap<'h, u64, PString<'h>>,
        names: PBTreeMap<'h, PString<'h>, u64>,
        large: PBTreeMap<'h, u64, [u64; 40]>,
        table: PHashMap<'h, u64, PVec<'h, u32>>,
        words: PHashMap<'h, PString<'h>, u64>,
        boxed: Option<PBox<'h, Chain<'h>>>,
    }
}
aquifer_object::persist! {
    struct Chain<'h> { value: u64, next: Option<PBox<'h, Chain<'h>>> }
}

impl Drop for Chain<'_> {
    fn drop(&mut self) {
        self.value = 0;
    }
}

fn root(heap: HeapRef<'_>) -> Result<Root<'_>, HeapError> {
    Ok(Root {
        number: 0,
        vec: PVec::new_in(heap),
        strings: PVec::new_in(heap),
        tree: PBTreeMap::new_in(heap),
        names: PBTreeMap::new_in(heap),
        large: PBTreeMap::new_in(heap),
        table: PHashMap::new_in(heap),
        words: PHashMap::new_in(heap),
        boxed: None,
    })
}

fn enter<'s, 'h>(scope: &'s mut Scope<'h>) -> &'s mut Root<'h> {
    // Reading it records nothing.
    if scope.root::<Root<'h>>(ROOT).is_err() {
        scope.insert_root(ROOT, root(scope.heap()).unwrap()).unwrap();
    }
    scope.root_mut(ROOT).unwrap()
}

fn recording(objects: &Objects) -> Attachment {
    ObjectOptions::new().record_stores(true).attach_mut(objects, "object").unwrap()
}

fn created() -> (std::sync::Arc<CrashMedia>, Objects) {
    let (media, objects) = on_media(4 << 20, 256 << 10);
    CreateObject::new().heap(true).create(&objects, "object", OBJECT_BYTES).unwrap();
    (media, objects)
}

/// After a crash now, the object is as it is in memory, up to [`UNRECORDED`].
#[track_caller]
fn assert_durable(media: &CrashMedia, object: &Attachment, what: &str) {
    let (durable, present) = (survivor(media), object.as_slice().unwrap());
    let (durable, present) = (&durable[..UNRECORDED], &present[..UNRECORDED]);
    if durable == present {
        return;
    }
    let differs = durable.iter().zip(present).position(|(one, other)| one != other);
    assert_eq!(differs, None, "{what}: the first byte that is not durable");
}

fn text(rng: &mut Rng) -> String {
    "text ".repeat(rng.below(30) as usize)
}

fn change_vec(rng: &mut Rng, vec: &mut PVec<'_, u64>) {
    let len = vec.len();
    let at = rng.below(len as u64 + 1) as usize;
    match rng.below(13) {
        0..3 => vec.push(rng.next_u64()).unwrap(),
        3 => _ = vec.pop(),
        4 => vec.insert(at, rng.next_u64()).unwrap(),
        5 if at < len => _ = vec.remove(at),
        6 if at < len => _ = vec.swap_remove(at),
        7 if at < len => vec[at] = rng.next_u64(),
        8 => _ = vec.get_mut(at).map(|value| *value = rng.next_u64()),
        9 => vec[at..].fill(rng.next_u64()),
        10 => vec.extend_from_slice(&[rng.next_u64(); 5]).unwrap(),
        11 => vec.iter_mut().for_each(|value| *value += 1),
        12 if rng.chance(0.3) => {
            vec.truncate(at);
            vec.shrink_to_fit().unwrap();
        }
        _ => vec.reserve(rng.below(200) as usize).unwrap(),
    }
}

fn change(rng: &mut Rng, scope: &mut Scope<'_>) {
    let heap = scope.heap();
    let root = enter(scope);
    let key = rng.below(150);
    let string = |rng: &mut Rng| PString::from_str_in(&text(rng), heap).unwrap();
    match rng.below(28) {
        0 => root.number = rng.next_u64(),
        1..5 => change_vec(rng, &mut root.vec),
        5 => root.strings.push(string(rng)).unwrap(),
        6 => {
            let at = rng.below(root.strings.len() as u64 + 1) as usize;
            if at < root.strings.len() {
                match rng.below(4) {
                    0 => root.strings[at].push_str("more").unwrap(),
                    1 => _ = root.strings.swap_remove(at),
                    2 => _ = root.strings[at].pop(),
                    _ => root.strings.truncate(at),
                }
            }
        }
        7..10 => _ = root.tree.insert(key, string(rng)).unwrap(),
        10 => _ = root.tree.remove(&key),
        11 => _ = root.tree.get_mut(&key).map(|value| value.push('x').unwrap()),
        12 => root.tree.range_mut(key..key + 10).for_each(|(_, value)| value.clear()),
        13 | 14 => _ = root.large.insert(key, [rng.next_u64(); 40]).unwrap(),
        15 => _ = root.large.pop_first(),
        16 => _ = root.large.remove(&key),
        17 => {
            let key = key % 40;
            let mut values = PVec::new_in(heap);
            values.extend_from_slice(&[key as u32; 3]).unwrap();
            root.table.insert(key, values).unwrap();
        }
        18 => _ = root.table.get_mut(&(key % 40)).map(|values| values.push(1).unwrap()),
        19 => _ = root.table.remove(&(key % 40)),
        20 if rng.chance(0.2) => root.table.clear(),
        20 if rng.chance(0.2) => root.tree.clear(),
        20 if rng.chance(0.2) => root.names.clear(),
        20 if rng.chance(0.2) => root.words.clear(),
        20 => {
            for (_, values) in root.table.iter_mut().take(3) {
                values.clear();
            }
        }
        21 => {
            let next = root.boxed.take();
            root.boxed = Some(PBox::new_in(Chain { value: key, next }, heap).unwrap());
        }
        22 => {
            let mut chain = &mut root.boxed;
            while let Some(here) = chain {
                here.value += 1;
                chain = &mut here.next;
            }
        }
        23 | 24 => _ = root.names.insert(string(rng), key).unwrap(),
        25 | 26 => _ = root.words.insert(string(rng), key).unwrap(),
        _ => {
            if let Some(chain) = root.boxed.as_mut().and_then(|first| first.next.as_mut()) {
                chain.next = None;
            }
        }
    }
}

/// Whatever the collections do, after a psync memory and media are equal, byte by byte.
#[test]
fn everything_stored_is_durable() {
    for budget_pages in [20, 1 << 20] {
        let seed = seed(1);
        let mut rng = Rng::new(seed);
        let (media, objects) = created();
        let options =
            ObjectOptions::new().record_stores(true).shadow_budget_bytes(budget_pages * 4096);
        let mut object = options.attach_mut(&objects, "object").unwrap();
        for step in 0..steps(600) {
            let changes = if rng.chance(0.05) { rng.below(300) } else { 1 + rng.below(4) };
            object.heap().unwrap().enter(|scope| {
                (0..changes).for_each(|_| change(&mut rng, scope));
            });
            if rng.chance(0.01) {
                object.heap().unwrap().enter(|scope| {
                    if scope.remove_root::<Root<'_>>(ROOT).is_ok() && rng.chance(0.5) {
                        scope.insert_root(ROOT, root(scope.heap()).unwrap()).unwrap();
                    }
                });
            }
            if rng.chance(0.02) {
                object.detach().unwrap();
                object = options.attach_mut(&objects, "object").unwrap();
            } else if rng.chance(0.05) {
                drop(object.psync_begin().unwrap());
            } else {
                object.psync().unwrap();
                assert_durable(&media, &object, &format!("seed {seed}, step {step}"));
            }
        }
        object.heap().unwrap().check().unwrap();
    }
}

/// Operations that are rare among the random ones, or whose stores others record as well.
#[test]
fn single_operations_are_durable() {
    let (media, objects) = created();
    let mut object = recording(&objects);
    for round in 0..3 {
        let mut psync = |what: &str, change: &mut dyn for<'h> FnMut(&mut Scope<'h>)| {
            object.heap().unwrap().enter(change);
            object.psync().unwrap();
            assert_durable(&media, &object, &format!("round {round}: {what}"));
        };
        psync("insertions", &mut |scope| {
            let heap = scope.heap();
            let root = enter(scope);
            for number in 0..6 {
                let string = || PString::from_str_in(&format!("text {number}"), heap).unwrap();
                root.names.insert(string(), number).unwrap();
                root.words.insert(string(), number).unwrap();
                root.table.insert(number, PVec::new_in(heap)).unwrap();
                root.table.get_mut(&number).unwrap().push(7).unwrap();
            }
        });
        psync("words", &mut |scope| enter(scope).words.clear());
        psync("table", &mut |scope| enter(scope).table.clear());
        psync("names", &mut |scope| enter(scope).names.clear());
        psync("removal", &mut |scope| drop(scope.remove_root::<Root<'_>>(ROOT).unwrap()));
        psync("nothing", &mut |_| {});
        psync("root", &mut |scope| scope.insert_root(ROOT, root(scope.heap()).unwrap()).unwrap());
    }
}

/// Stores where nothing is recorded.
fn store_behind_its_back(object: &Attachment) {
    let place = (object.address() as usize + UNRECORDED) as *mut u64;
    // SAFETY: inside the object, which is attached for writing, and in a page that is not used.
    unsafe { place.write(place.read() + 1) };
}

/// Whether a psync looks for stores, or takes what was recorded.
fn looks_for_stores(media: &CrashMedia, object: &mut Attachment) -> bool {
    store_behind_its_back(object);
    object.psync().unwrap();
    survivor(media)[UNRECORDED..][..8] == object.as_slice().unwrap()[UNRECORDED..][..8]
}

/// One recorded store.
fn store(object: &mut Attachment) {
    object.heap().unwrap().enter(|scope| enter(scope).number += 1);
}

#[test]
fn recorded_stores_are_committed_without_looking_for_others() {
    let (media, objects) = created();
    let mut object = recording(&objects);
    store(&mut object);
    assert!(looks_for_stores(&media, &mut object), "the first");
    for _ in 0..10 {
        store(&mut object);
        assert!(!looks_for_stores(&media, &mut object));
        object.psync().unwrap();
    }
    // Without the option each psync looks.
    object.detach().unwrap();
    let mut object = objects.attach_mut("object").unwrap();
    for _ in 0..3 {
        store(&mut object);
        assert!(looks_for_stores(&media, &mut object));
    }
}

#[test]
fn after_many_stores_a_psync_looks_for_them() {
    let (media, objects) = created();
    let mut object = recording(&objects);
    store(&mut object);
    object.psync().unwrap();
    for elements in [100, 20_000] {
        object.heap().unwrap().enter(|scope| {
            let vec = &mut enter(scope).vec;
            vec.clear();
            (0..elements).for_each(|element| vec.push(element).unwrap());
        });
        assert_eq!(looks_for_stores(&media, &mut object), elements > 100);
        assert!(!looks_for_stores(&media, &mut object));
        object.heap().unwrap().enter(|scope| enter(scope).vec.iter_mut().for_each(|one| *one += 1));
        assert_eq!(looks_for_stores(&media, &mut object), elements > 100);
        object.heap().unwrap().enter(|scope| enter(scope).vec[7] += 1);
        object.psync().unwrap();
        assert_durable(&media, &object, "one element");
        object.heap().unwrap().enter(|scope| enter(scope).vec[90..95].fill(8));
        object.psync().unwrap();
        assert_durable(&media, &object, "a part");
        assert!(!looks_for_stores(&media, &mut object));
    }
}

/// A reference into what a value on the stack owns lives on beyond a psync in the scope.
#[test]
fn a_psync_in_a_scope_does_not_end_what_is_recorded() {
    let (media, objects) = created();
    let mut object = recording(&objects);
    store(&mut object);
    object.psync().unwrap();
    object.heap().unwrap().enter_with(|scope, psync| {
        enter(scope);
        let mut own = PBox::new_in(Chain { value: 1, next: None }, scope.heap()).unwrap();
        let value = &mut own.value;
        psync.psync(scope).unwrap();
        *value = 2;
        enter(scope).boxed = Some(own);
    });
    object.psync().unwrap();
    assert_durable(&media, &object, "a store through an older reference");
    assert!(!looks_for_stores(&media, &mut object));
}

#[test]
fn raw_pointers_end_recording() {
    aquifer_object::persist! { struct Addresses { to: *mut u64 } }
    type Use = fn(&mut Attachment);
    let uses: [(&str, Use); 5] = [
        ("start", |object| _ = object.start()),
        ("heap start", |object| _ = object.heap().unwrap().start()),
        ("alloc", |object| _ = object.heap().unwrap().alloc(Layout::new::<u64>()).unwrap()),
        ("into_vec", |object| {
            object.heap().unwrap().enter(|scope| {
                let heap = scope.heap();
                drop(std::mem::replace(&mut enter(scope).vec, PVec::new_in(heap)).into_vec(heap));
            });
        }),
        ("a root with addresses", |object| {
            object.heap().unwrap().enter(|scope| {
                scope.remove_root::<Root<'_>>(ROOT).unwrap();
                let to = std::ptr::null_mut();
                scope.insert_root(2, Addresses { to }).unwrap();
            });
        }),
    ];
    for (what, action) in uses {
        let (media, objects) = created();
        let mut object = recording(&objects);
        store(&mut object);
        object.psync().unwrap();
        assert!(!looks_for_stores(&media, &mut object), "{what}");
        action(&mut object);
        for _ in 0..3 {
            assert!(looks_for_stores(&media, &mut object), "{what}");
        }
        object.detach().unwrap();
        // Before the heap is opened, as well.
        let mut object = recording(&objects);
        if what == "start" {
            action(&mut object);
            object.heap().unwrap();
            for _ in 0..3 {
                assert!(looks_for_stores(&media, &mut object), "{what}");
            }
        }
    }
}

/// After a psync failed, the next one commits its stores.
#[test]
fn what_a_failed_psync_recorded_is_not_lost() {
    let (media, objects) = created();
    let mut object = recording(&objects);
    store(&mut object);
    object.psync().unwrap();
    store(&mut object);
    // The first attempt to write fails.
    media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteDurable)));
    object.psync().unwrap();
    media.clear_faults();
    assert_durable(&media, &object, "written by the second attempt");
    store(&mut object);
    media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteDurable).lasting()));
    object.psync().unwrap_err();
    object.psync().unwrap_err();
    assert!(object.detach().is_err(), "it is not durable");
}

/// Pages committed by name are captured again when stores are looked for, and not committed again.
#[test]
fn unchanged_pages_are_not_committed_again() {
    let (media, objects) = created();
    let mut object = recording(&objects);
    object.heap().unwrap().enter(|scope| enter(scope).vec.resize(50_000, 0).unwrap());
    object.psync().unwrap();
    for page in 0..90 {
        object.heap().unwrap().enter(|scope| enter(scope).vec[page * 512] += 1);
        assert!(page % 10 > 0 || !looks_for_stores(&media, &mut object));
        object.psync().unwrap();
    }
    let before = object.statistics().bytes;
    object.start();
    object.psync().unwrap();
    let bytes = object.statistics().bytes - before;
    assert!(bytes < 4 * 4096, "{bytes} bytes");
    assert_durable(&media, &object, "after looking for stores");
}
