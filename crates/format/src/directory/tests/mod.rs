//! Tests of the tree: edge cases, a model, reading during changes, damage.

mod damage;
mod edges;
mod model;
mod reading;
mod slots;

use crate::directory::{Node, NodeContent, hash_name};
use crate::file::FileKind;
use crate::slots::ReadSlots;
use slots::Slots;

use super::{Checked, Found, Key, Referent, Tree};

const OWNER: u64 = 77;
const SEED: u64 = 0x5eed;

fn tree() -> Tree {
    Tree { owner: OWNER, seed: SEED, root: 0 }
}

fn referent(inode: u64) -> Referent {
    Referent { inode, kind: FileKind::File }
}

fn hash(name: &[u8]) -> u64 {
    hash_name(SEED, name)
}

/// Checks that a tree is intact and owns all slots in use; returns its names in order.
fn check_whole(tree: &Tree, slots: &Slots, hash_of: impl Fn(&[u8]) -> u64) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let checked = tree.check_hashes(slots, hash_of, |found| match found {
        Found::Slot(number) => {
            let bytes = slots.slot(number).unwrap();
            let node = Node::decode(&bytes, number).unwrap();
            assert_eq!(node.encode(), Ok(bytes), "bytes of a node are those of its encoding");
        }
        Found::Entry(entry) => names.push(entry.name.clone()),
        Found::Inconsistency(inconsistency) => panic!("{inconsistency}"),
    });
    let whole = Checked { entries: names.len() as u64, slots: slots.used(), inconsistencies: 0 };
    assert_eq!(checked.unwrap(), whole, "slots in use are those of the tree");
    names
}

/// Looks a name up by decoding every node.
fn lookup_decoded(tree: &Tree, slots: &Slots, key: Key<'_>) -> Option<Referent> {
    let mut number = tree.root;
    while number != 0 {
        match Node::decode(&slots.slot(number).unwrap(), number).unwrap().content {
            NodeContent::Interior { children, .. } => {
                let child = children.iter().rfind(|child| child.from_hash <= key.hash);
                number = child.unwrap().slot;
            }
            NodeContent::Leaf(entries) => {
                let entry = entries.iter().find(|entry| entry.name == key.name)?;
                return Some(Referent { inode: entry.inode, kind: entry.kind });
            }
        }
    }
    None
}

fn level(tree: &Tree, slots: &Slots) -> u16 {
    match Node::decode(&slots.slot(tree.root).unwrap(), tree.root).unwrap().content {
        NodeContent::Leaf(_) => 0,
        NodeContent::Interior { level, .. } => level,
    }
}
