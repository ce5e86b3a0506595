//! Names of every length, colliding hashes, and the number of slots that a change touches.

use super::slots::SlotError::{Full, Structure};
use super::*;
use crate::slots::StructureError;

/// A name of this length, different for each number below 200.
fn name(number: u64, len_bytes: usize) -> Vec<u8> {
    let mut name = vec![b'a'; len_bytes];
    name[0] = 50 + number as u8;
    name
}

/// Inserts names whose hashes are given, in this order, and checks that all exist.
fn insert_all(names: &[(u64, Vec<u8>)]) -> (Tree, Slots) {
    let (mut tree, mut slots) = (tree(), Slots::default());
    for (number, (hash, name)) in names.iter().enumerate() {
        let key = Key { hash: *hash, name };
        tree.insert_key(&mut slots, key, referent(number as u64)).unwrap();
    }
    check_whole(&tree, &slots, |wanted| {
        names.iter().find(|(_, name)| name == wanted).map_or(0, |(hash, _)| *hash)
    });
    for (number, (hash, name)) in names.iter().enumerate() {
        let found = tree.lookup_key(&slots, Key { hash: *hash, name }).unwrap();
        assert_eq!(found, Some(referent(number as u64)), "{hash}");
    }
    (tree, slots)
}

#[test]
fn a_directory_without_names_has_no_slots() {
    let (mut tree, mut slots) = (tree(), Slots::default());
    assert_eq!(tree.lookup(&slots, b"a").unwrap(), None);
    assert_eq!(tree.remove(&mut slots, b"a").unwrap(), None);
    assert_eq!(tree.replace(&mut slots, b"a", referent(3)).unwrap(), None);
    assert_eq!(tree.read_from(&slots, 0, 10).unwrap().entries, []);
    tree.insert(&mut slots, b"a", referent(3)).unwrap();
    assert!(!tree.is_empty());
    assert_eq!(tree.remove(&mut slots, b"a").unwrap(), Some(referent(3)));
    assert_eq!((tree.root, slots.used()), (0, 0));
}

#[test]
fn what_cannot_be_a_name_is_refused() {
    let (mut tree, mut slots) = (tree(), Slots::default());
    for bad in [&b""[..], b".", b"..", b"a/b", b"a\0b"] {
        let error = tree.insert(&mut slots, bad, referent(3)).unwrap_err();
        assert!(matches!(error, Structure(StructureError::BadName { .. })), "{error}");
    }
    let error = tree.insert(&mut slots, &[b'a'; 256], referent(3)).unwrap_err();
    assert!(matches!(error, Structure(StructureError::NameTooLong { .. })), "{error}");
    assert_eq!(tree.lookup(&slots, &[b'a'; 300]).unwrap(), None);
    let any: Vec<u8> = (1..=255).filter(|&byte| byte != b'/').collect();
    tree.insert(&mut slots, &any, referent(3)).unwrap();
    assert_eq!(tree.lookup(&slots, &any).unwrap(), Some(referent(3)));
    assert_eq!(slots.used(), 1);
}

#[test]
fn a_name_that_is_there_is_not_inserted_but_replaced() {
    let (mut tree, mut slots) = (tree(), Slots::default());
    tree.insert(&mut slots, b"a", referent(3)).unwrap();
    let before = (tree, slots.clone());
    let error = tree.insert(&mut slots, b"a", referent(4)).unwrap_err();
    assert!(matches!(error, Structure(StructureError::Exists { .. })), "{error}");
    assert_eq!((tree, slots.writes), (before.0, before.1.writes));
    let other = Referent { inode: 4, kind: FileKind::Symlink };
    assert_eq!(tree.replace(&mut slots, b"a", other).unwrap(), Some(referent(3)));
    assert_eq!(tree.lookup(&slots, b"a").unwrap(), Some(other));
    assert_eq!(slots.writes, before.1.writes + 1);
}

#[test]
fn the_longest_names_have_leaves_of_their_own() {
    for order in [[1, 2, 3], [1, 3, 2], [3, 2, 1], [2, 1, 3]] {
        let names: Vec<_> = order.iter().map(|&hash| (hash, name(hash, 255))).collect();
        let (tree, slots) = insert_all(&names);
        assert_eq!((level(&tree, &slots), slots.used()), (1, 4));
    }
}

#[test]
fn a_long_name_between_two_halves_splits_a_leaf_into_three() {
    // Two entries of 240 bytes fill a leaf, and neither fits together with one of 269.
    let names = [(1, name(1, 226)), (3, name(3, 226)), (2, name(2, 255))];
    let (tree, slots) = insert_all(&names);
    assert_eq!((level(&tree, &slots), slots.used()), (1, 4));
}

#[test]
fn leaves_are_split_at_their_ends_too() {
    // 32 entries of 15 bytes fill a leaf; one more comes before, among or after them.
    let short: Vec<_> = (0..32).map(|number| (1000 + 2 * number, name(number, 1))).collect();
    for (hash, len_bytes, leaves) in
        [(1, 1, 2), (1, 255, 2), (1031, 1, 2), (1031, 255, 3), (5000, 1, 2), (5000, 255, 2)]
    {
        let mut names = short.clone();
        names.push((hash, name(40, len_bytes)));
        let (_, slots) = insert_all(&names);
        assert_eq!(slots.used(), leaves + 1, "{hash} {len_bytes}");
    }
}

#[test]
fn names_of_one_hash_stay_together_and_are_refused_when_they_do_not_fit() {
    let (mut tree, mut slots) = (tree(), Slots::default());
    let key = |hash, name| Key { hash, name };
    let one_hash = |name: &[u8]| match name.len() {
        1 => 500,
        _ => 400 + u64::from(name[0] / 2),
    };
    let names: Vec<_> = (0..33).map(|number| name(number, 1)).collect();
    let others: Vec<_> = (0..200).map(|number| name(number, 2)).collect();
    for (number, name) in names[..32].iter().enumerate() {
        tree.insert_key(&mut slots, key(500, name), referent(number as u64)).unwrap();
    }
    assert_eq!(slots.used(), 1, "they fill a leaf");
    let refused = tree.insert_key(&mut slots, key(500, &names[32]), referent(1)).unwrap_err();
    assert!(matches!(refused, Structure(StructureError::TooManyCollisions)), "{refused}");
    for name in &others {
        let key = key(one_hash(name), name);
        if key.hash != 500 {
            tree.insert_key(&mut slots, key, referent(1)).unwrap();
        }
    }
    let writes = slots.writes;
    let refused = tree.insert_key(&mut slots, key(500, &names[32]), referent(1)).unwrap_err();
    assert!(matches!(refused, Structure(StructureError::TooManyCollisions)), "{refused}");
    assert_eq!(slots.writes, writes, "nothing happened");
    check_whole(&tree, &slots, one_hash);
    for (number, name) in names[..32].iter().enumerate() {
        let found = tree.lookup_key(&slots, key(500, name)).unwrap();
        assert_eq!(found, Some(referent(number as u64)));
    }
    let batch = tree.read_from(&slots, 500, 1).unwrap();
    assert_eq!(batch.entries.iter().filter(|entry| entry.hash == 500).count(), 32);
    tree.remove_key(&mut slots, key(500, &names[7])).unwrap().unwrap();
    tree.insert_key(&mut slots, key(500, &names[32]), referent(1)).unwrap();
    check_whole(&tree, &slots, one_hash);
}

#[test]
fn a_change_touches_few_slots() {
    let (mut tree, mut slots) = (tree(), Slots::default());
    let names: Vec<_> = (0..20_000).map(|number| format!("file-{number:06}")).collect();
    let mut costs = [0; 16];
    for (number, name) in names.iter().enumerate() {
        let before = (slots.writes, slots.used());
        tree.insert(&mut slots, name.as_bytes(), referent(number as u64)).unwrap();
        let (writes, nodes) = (slots.writes - before.0, slots.used() - before.1);
        // One write for the leaf, and two for each new node: itself and its parent.
        assert!(writes as u64 <= 1 + 2 * nodes, "{writes} writes for {nodes} nodes");
        costs[writes] += 1;
    }
    assert!(costs[1] > names.len() * 8 / 10, "{costs:?}");
    let levels = level(&tree, &slots);
    assert_eq!(levels, 3);
    for name in &names {
        let before = (slots.writes, slots.used());
        tree.remove(&mut slots, name.as_bytes()).unwrap().unwrap();
        let (writes, nodes) = (slots.writes - before.0, before.1 - slots.used());
        assert!(writes as u64 <= 1 + 2 * nodes, "{writes} writes for {nodes} nodes less");
    }
    assert_eq!((tree.root, slots.used()), (0, 0));
}

#[test]
fn a_name_that_comes_and_goes_does_not_split_and_merge_each_time() {
    let (mut tree, mut slots) = (tree(), Slots::default());
    let names: Vec<_> = (0..3_000).map(|number| format!("some file {number}")).collect();
    for name in &names {
        tree.insert(&mut slots, name.as_bytes(), referent(1)).unwrap();
    }
    for name in &names {
        let mut writes = Vec::new();
        for _ in 0..6 {
            let before = slots.writes;
            tree.remove(&mut slots, name.as_bytes()).unwrap().unwrap();
            tree.insert(&mut slots, name.as_bytes(), referent(1)).unwrap();
            writes.push(slots.writes - before);
        }
        // The first rounds may merge neighbours that became small earlier.
        assert_eq!(writes[4..], [2, 2], "{name}: {writes:?}");
    }
}

#[test]
fn a_tree_that_loses_most_names_becomes_small() {
    let (mut tree, mut slots) = (tree(), Slots::default());
    let names: Vec<_> = (0..5_000).map(|number| format!("{number}")).collect();
    for name in &names {
        tree.insert(&mut slots, name.as_bytes(), referent(1)).unwrap();
    }
    assert_eq!(level(&tree, &slots), 2);
    for name in &names[20..] {
        tree.remove(&mut slots, name.as_bytes()).unwrap().unwrap();
    }
    assert_eq!(check_whole(&tree, &slots, hash).len(), 20);
    assert!(slots.used() <= 4, "{} slots for 20 names", slots.used());
}

#[test]
fn a_pool_without_slots_says_so() {
    let (mut tree, mut slots) = (tree(), Slots::default());
    slots.limit = Some(1);
    let error = (0..100).find_map(|number| {
        tree.insert(&mut slots, format!("{number:10}").as_bytes(), referent(1)).err()
    });
    assert!(matches!(error, Some(Full)), "{error:?}");
}
