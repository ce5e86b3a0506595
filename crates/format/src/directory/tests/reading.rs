//! Reading a directory in batches while names are added and removed.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn name(number: u16) -> Vec<u8> {
    format!("{number:0len$}", len = 4 + usize::from(number) % 50).into()
}

/// So few hashes that many names collide.
fn few_hashes(name: &[u8]) -> u64 {
    2 + hash(name) % 150
}

#[test]
fn batches_are_as_large_as_wanted_and_end() {
    let (mut tree, mut slots) = (tree(), Slots::default());
    for number in 0..1000 {
        tree.insert(&mut slots, &name(number), referent(number.into())).unwrap();
    }
    for at_least in [0, 1, 7, 100, 999, 1000, 5000] {
        let (mut position, mut entries) = (Some(0), Vec::new());
        while let Some(from_hash) = position {
            let batch = tree.read_from(&slots, from_hash, at_least).unwrap();
            let len = batch.entries.len();
            assert!(len >= at_least.max(1) || batch.next_hash.is_none());
            assert!(len < at_least.max(1) + crate::directory::MAX_ENTRIES);
            position = batch.next_hash;
            entries.extend(batch.entries);
        }
        assert!(entries.is_sorted());
        assert_eq!(entries.len(), 1000);
    }
    let last = tree.read_from(&slots, i64::MAX as u64, 10).unwrap();
    assert_eq!((last.entries.len(), last.next_hash), (0, None));
}

#[test]
fn every_hash_is_a_position() {
    let (mut tree, mut slots) = (tree(), Slots::default());
    for number in 0..200 {
        tree.insert(&mut slots, &name(number), referent(number.into())).unwrap();
    }
    let all = tree.read_from(&slots, 0, 1000).unwrap().entries;
    for (index, entry) in all.iter().enumerate() {
        assert_eq!(tree.read_from(&slots, entry.hash, 1000).unwrap().entries, all[index..]);
        assert_eq!(tree.read_from(&slots, entry.hash + 1, 1000).unwrap().entries, all[index + 1..]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Names with even numbers stay; those with odd numbers are added and removed.
    #[test]
    fn names_that_stay_are_seen_once(
        stay in prop::collection::btree_set((0..400u16).prop_map(|number| 2 * number), 0..120),
        steps in prop::collection::vec((1..20usize, prop::collection::vec(0..400u16, 0..40)), 1..40),
        collide in any::<bool>(),
    ) {
        let hash_of = |name: &[u8]| if collide { few_hashes(name) } else { hash(name) };
        let (mut tree, mut slots) = (tree(), Slots::default());
        let mut present = BTreeSet::new();
        let toggle = |tree: &mut Tree, slots: &mut Slots, present: &mut BTreeSet<u16>, number| {
            let name = name(number);
            let key = Key { hash: hash_of(&name), name: &name };
            if present.remove(&number) {
                tree.remove_key(slots, key).unwrap().unwrap();
            } else if tree.insert_key(slots, key, referent(number.into())).is_ok() {
                present.insert(number);
            }
        };
        for &number in &stay {
            toggle(&mut tree, &mut slots, &mut present, number);
        }
        let stay = present.clone();
        let mut seen: BTreeMap<Vec<u8>, usize> = BTreeMap::new();
        let (mut position, mut steps) = (Some(0), steps.iter().cycle());
        while let Some(from_hash) = position {
            let (at_least, changes) = steps.next().unwrap();
            for number in changes {
                toggle(&mut tree, &mut slots, &mut present, 2 * number + 1);
            }
            let batch = tree.read_from(&slots, from_hash, *at_least).unwrap();
            for entry in batch.entries {
                prop_assert!(present.contains(&(entry.inode as u16)), "it is there at this moment");
                *seen.entry(entry.name).or_default() += 1;
            }
            position = batch.next_hash;
        }
        prop_assert!(seen.values().all(|&times| times == 1));
        prop_assert!(stay.iter().all(|&number| seen.contains_key(&name(number))));
    }
}
