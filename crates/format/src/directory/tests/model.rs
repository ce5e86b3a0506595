//! Random changes, compared with a map; the whole tree is checked after each of them.

use std::collections::BTreeMap;

use crate::directory::{ENTRY_BYTES, FIRST_HASH, NODE_BYTES};
use proptest::prelude::*;

use super::slots::SlotError::Structure;
use super::*;
use crate::slots::StructureError;

#[derive(Debug, Clone)]
enum Change {
    Insert(usize, u64),
    Replace(usize, u64),
    Remove(usize),
}

/// How names get their hashes.
#[derive(Debug, Clone, Copy)]
enum Hashing {
    Real,
    /// So few hashes that names collide all the time, the smallest and largest hash among them.
    Few,
}

impl Hashing {
    fn of(self, name: &[u8]) -> u64 {
        match self {
            Hashing::Real => hash(name),
            Hashing::Few => match hash(name) % 40 {
                39 => crate::directory::LAST_HASH,
                small => FIRST_HASH + small,
            },
        }
    }
}

/// Names, most of them short, some of maximum length.
fn names() -> Vec<Vec<u8>> {
    let len_bytes = |number: usize| match number % 9 {
        0..=5 => 3 + number % 13,
        6 => 60,
        7 => 120 + number % 100,
        _ => 255,
    };
    (0..220usize).map(|number| format!("{number:0len$}", len = len_bytes(number)).into()).collect()
}

fn changes(most: usize) -> impl Strategy<Value = Vec<Change>> {
    let name = 0..220usize;
    let change = prop_oneof![
        5 => (name.clone(), 1..1000u64).prop_map(|(name, inode)| Change::Insert(name, inode)),
        1 => (name.clone(), 1..1000u64).prop_map(|(name, inode)| Change::Replace(name, inode)),
        3 => name.prop_map(Change::Remove),
    ];
    prop::collection::vec(change, 1..most)
}

/// A tree and a map that must agree.
struct Pair {
    tree: Tree,
    slots: Slots,
    map: BTreeMap<Vec<u8>, Referent>,
    hashing: Hashing,
}

impl Pair {
    fn new(hashing: Hashing) -> Pair {
        Pair { tree: tree(), slots: Slots::default(), map: BTreeMap::new(), hashing }
    }

    /// Whether the names of one hash, including this one, fit into a leaf.
    fn fits(&self, name: &[u8]) -> bool {
        let hash = self.hashing.of(name);
        let collides = |other: &&Vec<u8>| self.hashing.of(other) == hash;
        let entries = self.map.keys().filter(collides).map(|other| ENTRY_BYTES + other.len());
        entries.sum::<usize>() + ENTRY_BYTES + name.len() <= NODE_BYTES
    }

    fn apply(&mut self, change: &Change, names: &[Vec<u8>]) {
        let key = |name: usize| Key { hash: self.hashing.of(&names[name]), name: &names[name] };
        match *change {
            Change::Insert(name, inode) => {
                let result = self.tree.insert_key(&mut self.slots, key(name), referent(inode));
                let name = &names[name];
                match result {
                    Err(Structure(StructureError::Exists { .. })) => {
                        assert!(self.map.contains_key(name))
                    }
                    Err(Structure(StructureError::TooManyCollisions)) => {
                        assert!(!self.map.contains_key(name) && !self.fits(name));
                    }
                    other => {
                        other.unwrap();
                        assert!(self.fits(name));
                        assert_eq!(self.map.insert(name.clone(), referent(inode)), None);
                    }
                }
            }
            Change::Replace(name, inode) => {
                let result = self.tree.replace_key(&mut self.slots, key(name), referent(inode));
                let place = self.map.get_mut(&names[name]);
                let expected = place.map(|place| std::mem::replace(place, referent(inode)));
                assert_eq!(result.unwrap(), expected);
            }
            Change::Remove(name) => {
                let result = self.tree.remove_key(&mut self.slots, key(name));
                assert_eq!(result.unwrap(), self.map.remove(&names[name]));
            }
        }
    }

    fn compare(&self, names: &[Vec<u8>]) {
        let mut found = check_whole(&self.tree, &self.slots, |name| self.hashing.of(name));
        found.sort();
        assert!(found.iter().eq(self.map.keys()));
        for name in names {
            let key = Key { hash: self.hashing.of(name), name };
            let expected = self.map.get(name).copied();
            assert_eq!(self.tree.lookup_key(&self.slots, key).unwrap(), expected);
            assert_eq!(lookup_decoded(&self.tree, &self.slots, key), expected);
        }
    }
}

fn run(hashing: Hashing, changes: &[Change]) {
    let (mut pair, names) = (Pair::new(hashing), names());
    for change in changes {
        pair.apply(change, &names);
        check_whole(&pair.tree, &pair.slots, |name| hashing.of(name));
    }
    pair.compare(&names);
    for name in 0..names.len() {
        pair.apply(&Change::Remove(name), &names);
    }
    assert_eq!((pair.tree.root, pair.slots.used()), (0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_tree_agrees_with_a_map(changes in changes(300)) {
        run(Hashing::Real, &changes);
    }

    #[test]
    fn a_tree_whose_hashes_collide_agrees_with_a_map(changes in changes(300)) {
        run(Hashing::Few, &changes);
    }
}

/// Deep enough that interior nodes are split, merged and given back, at all places of the tree.
#[test]
fn a_large_tree_agrees_with_a_map() {
    let names: Vec<Vec<u8>> = (0..3_000u64)
        .map(|number| format!("{number:0len$}", len = 5 + (number * number % 97) as usize).into())
        .collect();
    let mut by_hash: Vec<usize> = (0..names.len()).collect();
    by_hash.sort_by_key(|&name| hash(&names[name]));
    let middle_out = |names: Vec<usize>| {
        let (left, right) = names.split_at(names.len() / 2);
        let pairs = left.iter().rev().zip(right);
        pairs.flat_map(|(&left, &right)| [left, right]).collect::<Vec<_>>()
    };
    let orders = [
        (0..names.len()).collect(),
        by_hash.clone(),
        by_hash.iter().rev().copied().collect(),
        middle_out(by_hash),
    ];
    for order in &orders {
        let mut pair = Pair::new(Hashing::Real);
        for (name, inode) in names.iter().zip(0..) {
            let key = Key { hash: hash(name), name };
            pair.tree.insert_key(&mut pair.slots, key, referent(inode)).unwrap();
            pair.map.insert(name.clone(), referent(inode));
        }
        pair.compare(&names);
        assert!(level(&pair.tree, &pair.slots) >= 2);
        for (count, &name) in order.iter().enumerate() {
            pair.apply(&Change::Remove(name), &names);
            if count % 300 == 0 {
                pair.compare(&names);
            }
        }
        assert_eq!((pair.tree.root, pair.slots.used()), (0, 0));
    }
}
