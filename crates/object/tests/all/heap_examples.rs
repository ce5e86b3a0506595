//! Compares the structures of the examples with those of `std`, through restarts.

use crate::common::lru_cache::LruCache;
use crate::common::plain_list::PlainList;
use crate::common::sorted_list::SortedList;
use crate::common::word_index::WordIndex;
use crate::heap_support::{Object, PAGE};
use aquifer_object::collections::PString;
use aquifer_object::heap::Placement;
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::model::{Lru, Model};
use aquifer_testkit::rng::Rng;

const ROOT: u64 = 3;

/// An example was killed while it created the pool.
#[test]
fn an_unfinished_pool_is_made_anew() {
    let directory = tempfile::tempdir().unwrap();
    let pool = directory.path().join("example.pool");
    std::fs::write(directory.path().join("example.pool.unfinished"), [0; 100_000]).unwrap();
    for is_first in [true, false] {
        let mut attached = crate::common::attach_heap(&pool, "list").unwrap();
        {
            let heap = attached.heap().unwrap();
            // SAFETY: the only list, and nothing else was made the root.
            let mut list = unsafe { PlainList::open(&heap) }.unwrap();
            assert_eq!(list.iter().next().is_none(), is_first);
            list.insert(7).unwrap();
        }
        attached.psync().unwrap();
        attached.detach().unwrap();
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn plain_pointers_hold_after_a_restart() {
    let mut rng = Rng::new(seed(11));
    let object = Object::new(500 * PAGE);
    drop(object.format(Placement::Fixed));
    let mut model = Vec::new();
    for _ in 0..5 {
        object.restart();
        let heap = object.open().unwrap();
        // SAFETY: the only list, and nothing else was made the root.
        let mut list = unsafe { PlainList::open(&heap) }.unwrap();
        for _ in 0..steps(100) {
            let number = rng.below(500);
            list.insert(number).unwrap();
            model.push(number);
        }
        model.sort_unstable();
        assert!(list.iter().eq(model.iter().copied()));
        heap.check().unwrap();
    }
}

#[test]
fn a_sorted_list_agrees_with_a_sorted_vector() {
    let mut rng = Rng::new(seed(12));
    let object = Object::new(5000 * PAGE);
    drop(object.format(Placement::Fixed));
    let mut model = Vec::new();
    for _ in 0..5 {
        object.restart();
        let mut heap = object.open().unwrap();
        heap.enter(|scope| {
            let heap = scope.heap();
            let list = scope.root_or_insert_with(ROOT, |_| Ok(SortedList::new())).unwrap();
            for _ in 0..steps(300) {
                let number = rng.below(200);
                if rng.chance(0.4) {
                    let there = model.binary_search(&number);
                    assert_eq!(list.remove(number), there.is_ok());
                    there.map(|index| model.remove(index)).ok();
                } else {
                    list.insert(number, heap).unwrap();
                    let (Ok(at) | Err(at)) = model.binary_search(&number);
                    model.insert(at, number);
                }
            }
            assert!(list.iter().eq(model.iter().copied()));
        });
    }
    // A list too long to be dropped recursively.
    let mut heap = object.open().unwrap();
    heap.enter(|scope| {
        let heap = scope.heap();
        let list = scope.root_mut::<SortedList>(ROOT).unwrap();
        (0..200_000).rev().for_each(|_| list.insert(0, heap).unwrap());
        drop(scope.remove_root::<SortedList>(ROOT).unwrap());
    });
    assert_eq!(heap.check().unwrap().allocations, 0);
}

#[test]
fn a_cache_hits_when_lru_hits() {
    let mut rng = Rng::new(seed(13));
    let object = Object::new(500 * PAGE);
    drop(object.format(Placement::Fixed));
    let mut model = Lru::new(20);
    for _ in 0..5 {
        object.restart();
        let mut heap = object.open().unwrap();
        heap.enter(|scope| {
            let heap = scope.heap();
            let cache =
                scope.root_or_insert_with(ROOT, |heap| Ok(LruCache::new_in(20, heap))).unwrap();
            for _ in 0..steps(500) {
                let key = rng.below(40);
                let hit = model.access(key);
                assert_eq!(cache.get(key).is_some(), hit, "{key}");
                if hit {
                    assert_eq!(cache.get(key), Some(key.to_string().as_str()));
                } else {
                    let text = PString::from_str_in(&key.to_string(), heap).unwrap();
                    let was_full = cache.len() == 20;
                    assert_eq!(cache.insert(key, text).unwrap().is_some(), was_full);
                }
            }
        });
        heap.check().unwrap();
    }
}

#[test]
fn a_word_index_finds_lines() {
    let object = Object::new(500 * PAGE);
    drop(object.format(Placement::Fixed));
    let text = "The sea, the sea!\nA heap of sand by the sea.\n\nSandals";
    for line in text.lines() {
        object.restart();
        let mut heap = object.open().unwrap();
        heap.enter(|scope| {
            let heap = scope.heap();
            let index =
                scope.root_or_insert_with(ROOT, |heap| Ok(WordIndex::new_in(heap))).unwrap();
            index.add_line(line, heap).unwrap();
        });
    }
    let mut heap = object.open().unwrap();
    heap.enter(|scope| {
        let index = scope.root::<WordIndex>(ROOT).unwrap();
        assert_eq!((index.lines(), index.words()), (4, 8));
        assert_eq!(index.lines_with("sea"), [0, 1]);
        assert_eq!(index.lines_with("sandals"), [3]);
        assert!(index.lines_with("nothing").is_empty());
        assert!(index.words_from("sand").eq(["sand", "sandals"]));
    });
}
