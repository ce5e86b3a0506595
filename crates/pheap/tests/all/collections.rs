//! Compares the collections with those of `std`, through restarts, and in full heaps.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

use crate::support::{Object, PAGE};
use aquifer_pheap::collections::{PBTreeMap, PBox, PHashMap, PString, PVec};
use aquifer_pheap::heap::{HeapError, HeapRef, ObjectHeap, Placement};
use aquifer_pheap::persist;
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

const ROOT: u64 = 0x7e57;

persist! {
    /// Large, so that few fit in a node.
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Large { words: [u64; 60] }
}

impl Large {
    fn new(word: u64) -> Large {
        Large { words: [word; 60] }
    }
}

persist! {
    struct Root<'h> {
        numbers: PVec<'h, u64>,
        texts: PVec<'h, PString<'h>>,
        by_number: PBTreeMap<'h, u64, u32>,
        by_text: PBTreeMap<'h, PString<'h>, PVec<'h, u32>>,
        large: PBTreeMap<'h, u16, Large>,
        hashed: PHashMap<'h, u64, u8>,
        hashed_texts: PHashMap<'h, PString<'h>, PBox<'h, u64>>,
    }
}

impl<'h> Root<'h> {
    fn new_in(heap: HeapRef<'h>) -> Root<'h> {
        Root {
            numbers: PVec::new_in(heap),
            texts: PVec::new_in(heap),
            by_number: PBTreeMap::new_in(heap),
            by_text: PBTreeMap::new_in(heap),
            large: PBTreeMap::new_in(heap),
            hashed: PHashMap::new_in(heap),
            hashed_texts: PHashMap::new_in(heap),
        }
    }
}

#[derive(Default)]
struct Model {
    numbers: Vec<u64>,
    texts: Vec<String>,
    by_number: BTreeMap<u64, u32>,
    by_text: BTreeMap<String, Vec<u32>>,
    large: BTreeMap<u16, Large>,
    hashed: HashMap<u64, u8>,
    hashed_texts: HashMap<String, u64>,
}

fn text(rng: &mut Rng, distinct: u64) -> String {
    let n = rng.below(distinct);
    format!("{}{n}", "å".repeat((n % 40) as usize))
}

/// A random operation on one of the collections. If a full heap rejects it, the model does not
/// change either.
fn step<'h>(
    root: &mut Root<'h>,
    model: &mut Model,
    rng: &mut Rng,
    heap: HeapRef<'h>,
) -> Result<(), HeapError> {
    let keys = 1 << (4 + rng.below(10));
    let key = rng.below(keys);
    let some = rng.next_u64();
    let shrinks = rng.chance(0.45);
    match rng.below(7) {
        0 => numbers_step(root, model, rng)?,
        1 if shrinks => assert_eq!(root.texts.pop().as_deref(), model.texts.pop().as_deref()),
        1 => {
            let text = text(rng, 1000);
            let index = rng.below(model.texts.len() as u64 + 1) as usize;
            root.texts.insert(index, PString::from_str_in(&text, heap)?)?;
            model.texts.insert(index, text);
        }
        2 if shrinks => assert_eq!(root.by_number.remove(&key), model.by_number.remove(&key)),
        2 => {
            let old = root.by_number.insert(key, some as u32)?;
            assert_eq!(old, model.by_number.insert(key, some as u32));
        }
        3 if shrinks => {
            let text = text(rng, keys);
            let removed = root.by_text.remove(text.as_str());
            assert_eq!(removed.as_deref(), model.by_text.remove(&text).as_deref());
        }
        3 => {
            let text = text(rng, keys);
            if !root.by_text.contains_key(text.as_str()) {
                root.by_text.insert(PString::from_str_in(&text, heap)?, PVec::new_in(heap))?;
                model.by_text.insert(text.clone(), Vec::new());
            }
            root.by_text.get_mut(text.as_str()).unwrap().push(some as u32)?;
            model.by_text.get_mut(&text).unwrap().push(some as u32);
        }
        4 if shrinks => {
            let removed = root.large.remove(&(key as u16));
            assert_eq!(removed, model.large.remove(&(key as u16)));
        }
        4 => {
            let old = root.large.insert(key as u16, Large::new(some))?;
            assert_eq!(old, model.large.insert(key as u16, Large::new(some)));
        }
        5 if shrinks => assert_eq!(root.hashed.remove(&key), model.hashed.remove(&key)),
        5 => {
            assert_eq!(root.hashed.insert(key, some as u8)?, model.hashed.insert(key, some as u8));
        }
        _ if shrinks => {
            let text = text(rng, keys);
            let removed = root.hashed_texts.remove(text.as_str()).map(PBox::into_inner);
            assert_eq!(removed, model.hashed_texts.remove(&text));
        }
        _ => {
            let text = text(rng, keys);
            let (key, value) = (PString::from_str_in(&text, heap)?, PBox::new_in(some, heap)?);
            let old = root.hashed_texts.insert(key, value)?.map(PBox::into_inner);
            assert_eq!(old, model.hashed_texts.insert(text, some));
        }
    }
    Ok(())
}

fn numbers_step(root: &mut Root<'_>, model: &mut Model, rng: &mut Rng) -> Result<(), HeapError> {
    let (ours, theirs) = (&mut root.numbers, &mut model.numbers);
    let len = theirs.len() as u64;
    let some = rng.next_u64();
    match rng.below(12) {
        0..=3 => {
            ours.push(some)?;
            theirs.push(some);
        }
        4 => assert_eq!(ours.pop(), theirs.pop()),
        5 if len > 0 => {
            let index = rng.below(len) as usize;
            assert_eq!(ours.remove(index), theirs.remove(index));
        }
        6 if len > 0 => {
            let index = rng.below(len) as usize;
            assert_eq!(ours.swap_remove(index), theirs.swap_remove(index));
        }
        7 => {
            let more: Vec<_> = (0..rng.below(200)).collect();
            ours.extend_from_slice(&more)?;
            theirs.extend_from_slice(&more);
        }
        8 => {
            let len = rng.below(len + 20) as usize;
            ours.resize(len, some)?;
            theirs.resize(len, some);
        }
        9 => ours.shrink_to_fit()?,
        10 => {
            ours.sort_unstable();
            theirs.sort_unstable();
        }
        _ => {
            ours.iter_mut().for_each(|number| *number ^= some);
            theirs.iter_mut().for_each(|number| *number ^= some);
        }
    }
    Ok(())
}

fn compare(root: &Root<'_>, model: &Model, rng: &mut Rng) {
    assert_eq!(&*root.numbers, model.numbers);
    assert!(root.texts.iter().map(|text| &**text).eq(&model.texts));
    assert!(root.by_number.iter().eq(&model.by_number));
    assert!(
        root.by_text
            .iter()
            .map(|(key, values)| (&**key, &**values))
            .eq(model.by_text.iter().map(|(key, values)| (key.as_str(), values.as_slice())))
    );
    assert!(root.large.iter().eq(&model.large));
    assert_eq!(root.by_number.len(), model.by_number.len());
    assert_eq!(root.by_number.first_key_value(), model.by_number.first_key_value());
    assert_eq!(root.by_number.last_key_value(), model.by_number.last_key_value());
    for _ in 0..20 {
        let mut ends = [rng.below(20_000), rng.below(20_000)];
        ends.sort_unstable();
        let [start, end] = ends;
        assert!(root.by_number.range(start..end).eq(model.by_number.range(start..end)));
        assert!(root.by_number.range(start..=end).eq(model.by_number.range(start..=end)));
        assert!(root.by_number.range(..end).eq(model.by_number.range(..end)));
        if start < end {
            let open = (Bound::Excluded(start), Bound::Excluded(end));
            assert!(root.by_number.range(open).eq(model.by_number.range(open)));
        }
    }
    assert_eq!(root.hashed.len(), model.hashed.len());
    assert_eq!(root.hashed.iter().count(), model.hashed.len());
    assert!(root.hashed.iter().all(|(key, value)| model.hashed.get(key) == Some(value)));
    assert!(model.hashed.iter().all(|(key, value)| root.hashed.get(key) == Some(value)));
    assert_eq!(root.hashed_texts.len(), model.hashed_texts.len());
    for (key, value) in &model.hashed_texts {
        assert_eq!(root.hashed_texts.get(key.as_str()).map(|value| **value), Some(*value));
    }
}

fn agree_with_std(len: usize, turns: usize, seed: u64, may_fill_up: bool) {
    let mut rng = Rng::new(seed);
    let object = Object::new(len);
    let mut heap = object.format(Placement::Fixed);
    let (mut model, mut refusals) = (Model::default(), 0);
    for _ in 0..turns {
        heap.enter(|scope| {
            let heap = scope.heap();
            let root = scope.root_or_insert_with(ROOT, |heap| Ok(Root::new_in(heap))).unwrap();
            for _ in 0..500 {
                match step(root, &mut model, &mut rng, heap) {
                    Ok(()) => {}
                    Err(HeapError::Full { .. }) if may_fill_up => refusals += 1,
                    Err(other) => panic!("{other}"),
                }
            }
        });
        heap.check().unwrap();
        drop(heap);
        object.restart();
        heap = object.open().unwrap();
        heap.enter(|scope| compare(scope.root(ROOT).unwrap(), &model, &mut rng));
    }
    assert_eq!(refusals > 0, may_fill_up);
    heap.enter(|scope| drop(scope.remove_root::<Root>(ROOT).unwrap()));
    assert_eq!(heap.check().unwrap().allocations, 0);
}

#[test]
fn collections_agree_with_std() {
    agree_with_std(4000 * PAGE, steps(60), seed(9), false);
}

/// An operation that fails with a full heap changes nothing.
#[test]
fn collections_in_a_full_heap_stay_whole() {
    // At least as many as fill it.
    agree_with_std(150 * PAGE, steps(60).max(60), seed(10), true);
}

fn with_heap(test: impl FnOnce(&mut ObjectHeap)) {
    let object = Object::new(1000 * PAGE);
    let mut heap = object.format(Placement::Fixed);
    test(&mut heap);
    assert_eq!(heap.check().unwrap().allocations, 0, "something was not given back");
}

#[test]
fn a_tree_that_is_filled_and_emptied_in_order() {
    with_heap(|heap| {
        heap.enter(|scope| {
            let mut map = PBTreeMap::new_in(scope.heap());
            for n in 0..20_000u32 {
                assert_eq!(map.insert(n, n).unwrap(), None);
            }
            map.range_mut(5..15_000).for_each(|(key, value)| *value = key + 1);
            map.iter_mut().for_each(|(_, value)| *value += 1);
            assert_eq!(
                (map.get(&4), map.get(&5), map.get(&15_000)),
                (Some(&5), Some(&7), Some(&15_001))
            );
            for n in (10_000..20_000).rev() {
                assert!(map.remove(&n).is_some());
                assert_eq!(map.last_key_value().map(|(key, _)| *key), Some(n - 1));
            }
            for n in 0..10_000 {
                assert_eq!(map.pop_first().map(|(key, _)| key), Some(n));
            }
            assert!(map.is_empty() && map.iter().next().is_none() && map.pop_first().is_none());
            map.insert(1, 1).unwrap();
            map.clear();
            assert_eq!(map.len(), 0);
        });
    });
}

#[test]
#[should_panic(expected = "starts behind its end")]
fn a_range_that_runs_backwards_panics() {
    with_heap(|heap| {
        heap.enter(|scope| {
            let map: PBTreeMap<'_, u32, u32> = PBTreeMap::new_in(scope.heap());
            let (start, end) = (2, 1);
            map.range(start..end);
        });
    });
}

#[test]
fn everything_owned_is_given_back() {
    with_heap(|heap| {
        heap.enter(|scope| {
            let heap = scope.heap();
            let text = |n: u32| PString::from_str_in(&n.to_string().repeat(30), heap).unwrap();
            let mut vec = PVec::new_in(heap);
            let mut tree = PBTreeMap::new_in(heap);
            let mut table = PHashMap::with_capacity_in(100, heap).unwrap();
            for n in 0..500 {
                vec.push(PBox::new_in(text(n), heap).unwrap()).unwrap();
                tree.insert(text(n), text(n + 1)).unwrap();
                table.insert(text(n), text(n + 2)).unwrap();
            }
            vec.truncate(400);
            assert_eq!(*vec.remove(7).into_inner(), "7".repeat(30));
            assert_eq!(*tree.get("9".repeat(30).as_str()).unwrap(), *"10".repeat(30));
            assert_eq!(table.remove("9".repeat(30).as_str()).unwrap(), *"11".repeat(30));
            table.clear();
            assert!(table.is_empty() && table.get("1".repeat(30).as_str()).is_none());
            table.insert(text(1), text(1)).unwrap();
        });
    });
}

#[test]
fn a_vector_becomes_one_of_allocator_api2_and_back() {
    with_heap(|heap| {
        heap.enter(|scope| {
            let heap = scope.heap();
            let mut vec = PVec::new_in(heap);
            vec.extend_from_slice(&[3u64, 1, 2]).unwrap();
            let start = vec.as_ptr();
            let mut theirs = vec.into_vec(heap);
            theirs.sort_unstable();
            theirs.push(9);
            let mut back = PVec::from_vec(theirs);
            assert_eq!(&*back, [1, 2, 3, 9]);
            back.push(10).unwrap();
            drop((start, back));
            let empty: PVec<'_, u64> = PVec::from_vec(PVec::new_in(heap).into_vec(heap));
            assert!(empty.is_empty());
        });
    });
}

#[test]
fn text_is_cut_between_characters_only() {
    with_heap(|heap| {
        heap.enter(|scope| {
            let mut text = PString::from_str_in("smörgås", scope.heap()).unwrap();
            text.push('b').unwrap();
            assert_eq!((text.pop(), text.pop(), text.pop()), (Some('b'), Some('s'), Some('å')));
            text.truncate(4);
            assert_eq!(text, "smö");
            let torn = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| text.truncate(3)));
            assert!(torn.is_err());
            assert_eq!(format!("{text:>5}|{text:?}"), "  smö|\"smö\"");
            text.clear();
            assert_eq!(text.pop(), None);
        });
    });
}

#[test]
fn a_panicking_comparison_leaves_a_map_whole() {
    #[derive(Debug, PartialEq, Eq, Clone, Copy)]
    #[repr(transparent)]
    struct Touchy(u32);
    // SAFETY: a transparent number.
    unsafe impl<'h> aquifer_pheap::persist::Persist<'h> for Touchy {
        fn shape(shape: &mut aquifer_pheap::persist::Shape) {
            shape.leaf::<Touchy>("touchy");
        }
    }
    impl PartialOrd for Touchy {
        fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
            Some(self.cmp(other))
        }
    }
    impl Ord for Touchy {
        fn cmp(&self, other: &Self) -> std::cmp::Ordering {
            assert!(self.0 != 77 && other.0 != 77, "touched");
            self.0.cmp(&other.0)
        }
    }
    with_heap(|heap| {
        heap.enter(|scope| {
            let mut map = PBTreeMap::new_in(scope.heap());
            for n in (0..1000).filter(|&n| n != 77) {
                map.insert(Touchy(n), n).unwrap();
            }
            let mut refused = |change: &mut dyn FnMut(&mut PBTreeMap<'_, Touchy, u32>)| {
                let change = std::panic::AssertUnwindSafe(|| change(&mut map));
                assert!(std::panic::catch_unwind(change).is_err());
            };
            refused(&mut |map| assert!(map.insert(Touchy(77), 1).is_ok()));
            refused(&mut |map| assert!(map.remove(&Touchy(77)).is_none()));
            assert!(map.iter().map(|(key, _)| key.0).eq((0..1000).filter(|&n| n != 77)));
        });
    });
}

#[test]
fn a_root_is_opened_as_what_it_is_only() {
    persist! { struct Old<'h> { items: PVec<'h, u64> } }
    persist! { struct New<'h> { items: PVec<'h, f64> } }
    let object = Object::new(20 * PAGE);
    let mut heap = object.format(Placement::Fixed);
    heap.enter(|scope| {
        assert_eq!(scope.root::<Old>(1).err(), Some(HeapError::NoRoot));
        let heap = scope.heap();
        scope.insert_root(1, Old { items: PVec::new_in(heap) }).unwrap();
        assert!(matches!(scope.insert_root(1, 5u64), Err(HeapError::RootExists { .. })));
        assert!(scope.root::<Old>(1).unwrap().items.is_empty());
        assert!(matches!(scope.root::<Old>(2), Err(HeapError::RootType { .. })));
        assert!(matches!(scope.root_mut::<New>(1), Err(HeapError::RootType { .. })));
        assert!(matches!(scope.remove_root::<New>(1), Err(HeapError::RootType { .. })));
        scope.root_mut::<Old>(1).unwrap().items.push(4).unwrap();
        let two = scope.quiesced(|| 2).unwrap();
        assert_eq!(two, 2);
    });
    drop(heap);
    let mut heap = object.open_read_only().unwrap();
    heap.enter(|scope| {
        assert_eq!(&*scope.root::<Old>(1).unwrap().items, [4]);
        assert_eq!(scope.root_mut::<Old>(1).err(), Some(HeapError::ReadOnly));
        assert_eq!(scope.remove_root::<Old>(1).err(), Some(HeapError::ReadOnly));
        let heap = scope.heap();
        assert_eq!(PBox::new_in(1u64, heap).err(), Some(HeapError::ReadOnly));
    });
}

/// Collections that span memory added later are found too.
#[test]
fn collections_move_into_a_heap_that_grew() {
    let mut object = Object::with_room(20 * PAGE, 5000 * PAGE);
    let mut heap = object.format(Placement::Fixed);
    let fill = |heap: &mut ObjectHeap, count: u64| {
        heap.enter(|scope| {
            let heap = scope.heap();
            let make = |heap| Ok(PVec::<PBox<u64>>::new_in(heap));
            let boxes = scope.root_or_insert_with(ROOT, make).unwrap();
            (0..count).try_for_each(|n| boxes.push(PBox::new_in(n, heap)?))
        })
    };
    assert!(matches!(fill(&mut heap, 100_000), Err(HeapError::Full { .. })));
    for pages in [2000, 5000] {
        object.grow(pages * PAGE);
        // SAFETY: the memory has been added.
        unsafe { heap.grow((pages * PAGE) as u64) }.unwrap();
        fill(&mut heap, 50_000).unwrap();
    }
    heap.enter(|scope| drop(scope.remove_root::<PVec<PBox<u64>>>(ROOT).unwrap()));
    assert_eq!(heap.check().unwrap().allocations, 0);
}

#[test]
fn owners_have_no_place_in_a_heap_that_moves() {
    let object = Object::new(20 * PAGE);
    let mut heap = object.format(Placement::Relocatable);
    heap.enter(|scope| {
        let refused = scope.root_or_insert_with(1, |_| Ok(5u64)).err();
        assert_eq!(refused, Some(HeapError::Relocatable));
        assert_eq!(scope.root::<u64>(1).err(), Some(HeapError::Relocatable));
    });
}

/// Two threads modify disjoint parts of one root.
#[test]
fn a_root_is_shared_out_between_threads() {
    persist! { struct Halves<'h> { left: PVec<'h, u64>, right: PBTreeMap<'h, u64, u64> } }
    with_heap(|heap| {
        heap.enter(|scope| {
            let heap = scope.heap();
            let make =
                |heap| Ok(Halves { left: PVec::new_in(heap), right: PBTreeMap::new_in(heap) });
            let Halves { left, right } = scope.root_or_insert_with(1, make).unwrap();
            std::thread::scope(|threads| {
                threads.spawn(|| (0..5000).for_each(|n| left.push(n).unwrap()));
                threads.spawn(|| (0..5000).for_each(|n| assert_eq!(right.insert(n, n), Ok(None))));
                threads.spawn(|| (0..500).for_each(|n| drop(PBox::new_in(n, heap).unwrap())));
            });
            let halves = scope.remove_root::<Halves>(1).unwrap();
            assert!(halves.left.iter().eq(halves.right.iter().map(|(key, _)| key)));
        });
    });
}
