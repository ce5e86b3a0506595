//! Arbitrary bytes: every call terminates, with an error or a result, and the check reports the
//! inconsistencies.

use std::sync::LazyLock;

use crate::slot_bytes::{SLOT_BYTES, seal};
use crate::slots::ChangeSlots;
use proptest::prelude::*;

use super::*;
use crate::directory::InconsistencyKind;

fn name(number: u64) -> Vec<u8> {
    format!("{number:0len$}", len = 8 + (number % 60) as usize).into()
}

/// A tree of three levels, with slots that may be damaged.
fn large() -> (Tree, Slots) {
    static LARGE: LazyLock<(Tree, Slots)> = LazyLock::new(|| {
        let (mut tree, mut slots) = (tree(), Slots::default());
        for number in 0..700 {
            tree.insert(&mut slots, &name(number), referent(number)).unwrap();
        }
        assert_eq!(level(&tree, &slots), 2);
        slots.is_damaged = true;
        (tree, slots)
    });
    LARGE.clone()
}

fn change(slots: &mut Slots, number: u64, change: impl FnOnce(&mut Node)) {
    let mut node = Node::decode(&slots.slot(number).unwrap(), number).unwrap();
    change(&mut node);
    slots.put(number, node.encode().unwrap());
}

fn children(node: &mut Node) -> &mut Vec<crate::directory::Child> {
    match &mut node.content {
        NodeContent::Interior { children, .. } => children,
        NodeContent::Leaf(_) => panic!("it is a leaf"),
    }
}

/// The slot of a child of an interior node.
fn child(slots: &Slots, number: u64, index: usize) -> u64 {
    children(&mut Node::decode(&slots.slot(number).unwrap(), number).unwrap())[index].slot
}

fn inconsistencies(tree: &Tree, slots: &Slots) -> (Vec<(u64, InconsistencyKind)>, Checked) {
    let mut inconsistencies = Vec::new();
    let checked = tree.check(slots, |found| {
        if let Found::Inconsistency(inconsistency) = found {
            inconsistencies.push((inconsistency.slot, inconsistency.kind));
        }
    });
    let checked = checked.unwrap();
    assert!(
        checked.slots <= slots.used() && checked.inconsistencies == inconsistencies.len() as u64
    );
    (inconsistencies, checked)
}

/// Whether slots hold nodes: a pool refuses others when it loads them.
fn decode(slots: &Slots, mut numbers: impl Iterator<Item = u64>) -> bool {
    numbers.all(|number| Node::decode(&slots.slot(number).unwrap(), number).is_ok())
}

/// Makes a change, as a transaction does it: all of it, or nothing. A change that succeeds puts no
/// node that would be refused, if `decoded`: all nodes decode.
fn attempt<T>(
    (tree, slots): &mut (Tree, Slots),
    decoded: bool,
    change: impl FnOnce(&mut Tree, &mut Slots) -> Result<T, slots::SlotError>,
) {
    let before = (*tree, slots.clone());
    if change(tree, slots).is_err() {
        (*tree, *slots) = before;
    } else if decoded && slots.writes != before.1.writes {
        let has_changed = |number: &u64| slots.slot(*number).ok() != before.1.slot(*number).ok();
        assert!(decode(slots, slots.numbers().into_iter().filter(has_changed)));
    }
}

/// Calls every operation of a tree; any result is fine.
fn use_all(tree: Tree, slots: Slots) {
    inconsistencies(&tree, &slots);
    for number in (0..700).step_by(3) {
        let _ = tree.lookup(&slots, &name(number));
    }
    let (mut position, mut pieces) = (Some(0), 0);
    while let Some(from_hash) = position {
        pieces += 1;
        assert!(pieces <= 2000, "reading ends");
        position = tree.read_from(&slots, from_hash, 5).ok().and_then(|batch| batch.next_hash);
    }
    let decoded = decode(&slots, slots.numbers().into_iter());
    let mut used = (tree, slots);
    for number in (0..1000).step_by(7) {
        attempt(&mut used, decoded, |tree, slots| tree.replace(slots, &name(number), referent(1)));
        attempt(&mut used, decoded, |tree, slots| tree.remove(slots, &name(number)));
        attempt(&mut used, decoded, |tree, slots| {
            tree.insert(slots, &name(number + 1000), referent(2))
        });
    }
    // Neighbours are merged.
    for number in 0..700 {
        attempt(&mut used, decoded, |tree, slots| tree.remove(slots, &name(number)));
    }
    inconsistencies(&used.0, &used.1);
}

#[test]
fn a_node_that_leads_to_itself_or_above_ends_every_call() {
    let (tree, mut slots) = large();
    let middle = child(&slots, tree.root, 1);
    change(&mut slots, middle, |node| children(node)[1].slot = tree.root);
    let (found, _) = inconsistencies(&tree, &slots);
    assert_eq!(found, [(tree.root, InconsistencyKind::Level { found: 2, expected: 0 })]);
    change(&mut slots, middle, |node| children(node)[1].slot = middle);
    let (found, _) = inconsistencies(&tree, &slots);
    assert_eq!(found, [(middle, InconsistencyKind::Level { found: 1, expected: 0 })]);
    use_all(tree, slots);
}

#[test]
fn a_node_that_is_reached_from_everywhere_is_looked_at_once() {
    let (tree, mut slots) = large();
    let (middle, leaf) = {
        let middle = child(&slots, tree.root, 0);
        (middle, child(&slots, middle, 0))
    };
    let middles =
        children(&mut Node::decode(&slots.slot(tree.root).unwrap(), tree.root).unwrap()).len();
    change(&mut slots, middle, |node| {
        children(node).iter_mut().for_each(|child| child.slot = leaf)
    });
    let leaves = children(&mut Node::decode(&slots.slot(middle).unwrap(), middle).unwrap()).len();
    change(&mut slots, tree.root, |node| {
        children(node).iter_mut().for_each(|child| child.slot = middle);
    });
    let (found, checked) = inconsistencies(&tree, &slots);
    assert_eq!(checked.slots, 3);
    tree.read_from(&slots, 0, 700).expect_err("leaves without names");
    assert_eq!(
        found
            .iter()
            .filter(|inconsistency| **inconsistency == (leaf, InconsistencyKind::Twice))
            .count(),
        leaves - 1
    );
    assert_eq!(
        found
            .iter()
            .filter(|inconsistency| **inconsistency == (middle, InconsistencyKind::Twice))
            .count(),
        middles - 1
    );
    use_all(tree, slots);
}

#[test]
fn the_node_of_another_directory_is_not_followed() {
    let (tree, mut slots) = large();
    let middle = child(&slots, tree.root, 0);
    change(&mut slots, middle, |node| node.owner = 5);
    let (found, checked) = inconsistencies(&tree, &slots);
    assert_eq!(found, [(middle, InconsistencyKind::Owner { found: 5 })]);
    assert!(checked.entries > 0, "what lies beside it is found");
    assert!((0..700).any(|number| tree.lookup(&slots, &name(number)).is_err()));
    let other = Tree { owner: 5, ..tree };
    assert!((0..700).all(|number| other.lookup(&slots, &name(number)).is_err()));
    use_all(tree, slots);
}

#[test]
fn names_out_of_place_are_inconsistencies() {
    let (tree, mut slots) = large();
    let (first, last) = {
        let middle = child(&slots, tree.root, 0);
        (child(&slots, middle, 0), child(&slots, middle, 1))
    };
    let mut moved = None;
    change(&mut slots, last, |node| match &mut node.content {
        NodeContent::Leaf(entries) => moved = Some(entries.remove(0)),
        NodeContent::Interior { .. } => panic!("it is no leaf"),
    });
    let moved = moved.unwrap();
    change(&mut slots, first, |node| match &mut node.content {
        NodeContent::Leaf(entries) => *entries.last_mut().unwrap() = moved.clone(),
        NodeContent::Interior { .. } => panic!("it is no leaf"),
    });
    let (found, checked) = inconsistencies(&tree, &slots);
    assert_eq!(found, [(first, InconsistencyKind::NameMisplaced { name: moved.name })]);
    assert_eq!(checked.entries, 698);
    tree.read_from(&slots, 0, 1).expect_err("a name that would be seen again");
    let wrong_seed = Tree { seed: 1, ..tree };
    let (found, checked) = inconsistencies(&wrong_seed, &slots);
    assert_eq!((found.len(), checked.entries), (699, 0));
    use_all(tree, slots);
}

#[test]
fn a_child_out_of_bounds_is_an_inconsistency() {
    let (tree, mut slots) = large();
    let middle = child(&slots, tree.root, 0);
    change(&mut slots, middle, |node| children(node).last_mut().unwrap().from_hash = 1 << 62);
    let (found, _) = inconsistencies(&tree, &slots);
    assert_eq!(found, [(middle, InconsistencyKind::ChildMisplaced { from_hash: 1 << 62 })]);
    use_all(tree, slots);
}

#[test]
fn damage_does_not_get_a_new_checksum() {
    let (tree, mut slots) = large();
    let numbers = slots.numbers();
    for &number in &numbers {
        let mut bytes = slots.slot(number).unwrap();
        bytes[SLOT_BYTES - 1] ^= 1;
        slots.put(number, bytes);
    }
    for number in 0..700 {
        let (mut tree, mut slots) = (tree, slots.clone());
        let writes = slots.writes;
        tree.lookup(&slots, &name(number)).unwrap().unwrap();
        tree.remove(&mut slots, &name(number)).unwrap_err();
        tree.insert(&mut slots, &name(number + 1000), referent(1)).unwrap_err();
        tree.replace(&mut slots, &name(number), referent(1)).unwrap_err();
        assert_eq!(slots.writes, writes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Randomly changed bytes, with valid or invalid checksums.
    #[test]
    fn any_bytes_end_every_call(
        flips in prop::collection::vec((any::<u16>(), 0..SLOT_BYTES, any::<u8>()), 1..40),
        in_head in any::<bool>(),
        is_sealed in any::<bool>(),
    ) {
        let (tree, mut slots) = large();
        let numbers = slots.numbers();
        for (slot, offset, value) in flips {
            let number = numbers[usize::from(slot) % numbers.len()];
            let mut bytes = slots.slot(number).unwrap();
            bytes[if in_head { offset % 64 } else { offset }] = value;
            if is_sealed {
                seal(&mut bytes);
            }
            slots.put(number, bytes);
        }
        use_all(tree, slots);
    }

    /// Valid nodes with arbitrary children.
    #[test]
    fn any_children_end_every_call(
        links in prop::collection::vec((any::<u16>(), any::<u16>(), any::<u16>()), 1..200),
    ) {
        let (tree, mut slots) = large();
        let numbers = slots.numbers();
        let mut inner: Vec<u64> = (0..40).map_while(|index| {
            let root = &mut Node::decode(&slots.slot(tree.root).unwrap(), tree.root).unwrap();
            children(root).get(index).map(|child| child.slot)
        }).collect();
        inner.push(tree.root);
        for (from, index, to) in links {
            let from = inner[usize::from(from) % inner.len()];
            let to = numbers[usize::from(to) % numbers.len()];
            change(&mut slots, from, |node| {
                let children = children(node);
                let index = usize::from(index) % children.len();
                children[index].slot = to;
            });
        }
        use_all(tree, slots);
    }
}
