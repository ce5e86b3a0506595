//! A path from the root of a tree to an entry, and stepping to the next entry.

use std::ptr::NonNull;

use super::node::Node;

/// An upper bound on the levels of a tree: each node but the root has at least three subtrees.
pub(super) const MOST_LEVELS: usize = 41;

/// Nodes from the root down, each with an index. In the last node it is the index of the entry;
/// above, of the subtree entered, which is also the index of the entry that follows that subtree.
pub(super) struct Path<K, V> {
    steps: [(Node<K, V>, usize); MOST_LEVELS],
    len: usize,
}

impl<K, V> Clone for Path<K, V> {
    fn clone(&self) -> Self {
        Path { steps: self.steps, len: self.len }
    }
}

impl<K, V> Path<K, V> {
    pub fn empty() -> Self {
        Path { steps: [(Node::at(NonNull::dangling()), 0); MOST_LEVELS], len: 0 }
    }

    /// The path to the first entry of a tree.
    pub fn first(root: Option<Node<K, V>>) -> Self {
        let mut path = Path::empty();
        path.descend(root, |_| 0);
        path
    }

    /// Descends from a node to a leaf; `index` chooses the subtree in each node, and the position
    /// in the leaf.
    pub fn descend(
        &mut self,
        mut from: Option<Node<K, V>>,
        mut index: impl FnMut(Node<K, V>) -> usize,
    ) {
        while let Some(node) = from {
            let index = index(node);
            self.push(node, index);
            from = (!node.is_leaf()).then(|| node.edge(index));
        }
    }

    pub fn push(&mut self, node: Node<K, V>, index: usize) {
        self.steps[self.len] = (node, index);
        self.len += 1;
    }

    pub fn pop(&mut self) -> Option<(Node<K, V>, usize)> {
        let last = self.last()?;
        self.len -= 1;
        Some(last)
    }

    pub fn last(&self) -> Option<(Node<K, V>, usize)> {
        self.steps().last().copied()
    }

    /// The steps from the root down.
    pub fn steps(&self) -> &[(Node<K, V>, usize)] {
        &self.steps[..self.len]
    }

    /// From a position after the last entry of a node, ascends to the following entry; the path is
    /// empty if there is none.
    pub fn settle(&mut self) {
        while let Some((node, index)) = self.last()
            && index == node.len()
        {
            self.len -= 1;
        }
    }

    /// Steps to the next entry; the path is empty if there is none.
    pub fn advance(&mut self) {
        let Some((node, index)) = self.last() else { return };
        self.steps[self.len - 1].1 = index + 1;
        if node.is_leaf() {
            self.settle();
        } else {
            self.descend(Some(node.edge(index + 1)), |_| 0);
        }
    }
}
