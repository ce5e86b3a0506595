//! The inodes that the kernel knows, and how often it was given each.
//!
//! ```text
//!  inode number ──► 4 words:  lookups │ generation │ pin │ opens
//! ```
//!
//! The kernel names an inode by its node ID alone, which is the inode number here; the generation
//! that makes a [`Node`] of it is kept in this table. It is as long as the pool has slots, and costs
//! memory only where inodes are known.
//!
//! # The count
//! Each answer with an entry raises `lookups` by one, and each `FORGET` lowers it. *Invariant:
//! `lookups` is at least what the kernel has*, because it is raised before the answer is written and
//! lowered after the kernel has forgotten. So an inode whose count is 0 is not referred to by
//! anything the kernel has, and an inode whose last name is removed while the count is above 0 must
//! be kept: only `FORGET` tells when its last user has gone.
//!
//! A lookup and the removal of the last name cannot miss each other: the kernel holds the lock of
//! the directory, shared for one and exclusively for the other.
//!
//! A `FORGET` and such a removal cannot either. One lowers the count, and then looks for a pin; the
//! other notes the pin, and then looks at the count. Between both steps of both there is a fence, so at
//! least one of them sees what the other has done, and gives the pin back.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

use aquifer_fs::node::Node;
use aquifer_pool::PinPlace;
use aquifer_sys::shared_words::SharedWords;

/// Words of an inode.
const WORDS: usize = 4;
const LOOKUPS: usize = 0;
const GENERATION: usize = 1;
/// The place of the pin that keeps the inode, and 1; 0 without one.
const PIN: usize = 2;
/// In a shared mount, how often it is open ([`COUNT`]); and [`KEPT`], [`MAPPED`], [`REMOVED`].
const OPENS: usize = 3;
const COUNT: u64 = u32::MAX as u64;
/// Its last name was, or is being, removed.
const REMOVED: u64 = 1 << 61;
/// The kernel may have pages of it.
const MAPPED: u64 = 1 << 62;
/// It stays until the kernel has forgotten it.
const KEPT: u64 = 1 << 63;

/// The inodes that the kernel knows. See the [module](self).
#[derive(Debug)]
pub struct NodeTable {
    words: Arc<SharedWords>,
    /// Where the table begins.
    first: usize,
}

impl NodeTable {
    /// For a pool with this many slots.
    ///
    /// # Errors
    /// Those of the system: too little address space.
    pub fn new(slots: u64) -> io::Result<NodeTable> {
        let slots = usize::try_from(slots).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let len = slots.checked_mul(WORDS).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(NodeTable { words: Arc::new(SharedWords::new(len)?), first: 0 })
    }

    /// The one that these words have from the word `first` on.
    pub fn within(words: Arc<SharedWords>, first: usize) -> NodeTable {
        NodeTable { words, first }
    }

    /// How many words a table takes.
    pub fn len_words(slots: u64) -> Option<usize> {
        usize::try_from(slots).ok()?.checked_mul(WORDS)
    }

    fn words(&self, number: u64) -> Option<&[AtomicU64]> {
        let from = usize::try_from(number).ok()?.checked_mul(WORDS)?.checked_add(self.first)?;
        self.words.get(from..from.checked_add(WORDS)?)
    }

    /// Notes that an inode is opened.
    pub fn opened(&self, number: u64) {
        if let Some(words) = self.words(number) {
            // AcqRel, here and below: orders it with the pin, whose lock is taken behind it.
            words[OPENS].fetch_add(1, AcqRel);
        }
    }

    /// Notes that an inode is closed. Returns whether that was the last time, and nothing else says that
    /// it stays until it is forgotten.
    pub fn closed(&self, number: u64) -> bool {
        let Some(words) = self.words(number) else { return false };
        let close = |opens: u64| match opens & COUNT {
            0 => None,
            1 => Some(opens & KEPT),
            _ => Some(opens - 1),
        };
        let before = words[OPENS].fetch_update(AcqRel, Acquire, close);
        before.is_ok_and(|before| before & !MAPPED == 1)
    }

    /// Notes that an inode stays until it is forgotten.
    pub fn keep(&self, number: u64) {
        if let Some(words) = self.words(number) {
            words[OPENS].fetch_or(KEPT, AcqRel);
        }
    }

    /// As well, for its last name is removed.
    pub fn keep_removed(&self, number: u64) {
        if let Some(words) = self.words(number) {
            words[OPENS].fetch_or(KEPT | REMOVED, AcqRel);
        }
    }

    /// Whether the last name of an inode was removed since the kernel knows it. It may not have come to
    /// that, or it has got another name.
    pub fn is_removed(&self, number: u64) -> bool {
        self.words(number).is_some_and(|words| words[OPENS].load(Acquire) & REMOVED != 0)
    }

    /// Notes that the kernel may have pages of an open file.
    pub fn mapped(&self, number: u64) {
        if let Some(words) = self.words(number) {
            words[OPENS].fetch_or(MAPPED, AcqRel);
        }
    }

    /// Whether the kernel may have pages of an open file.
    pub fn is_mapped(&self, number: u64) -> bool {
        self.words(number).is_some_and(|words| words[OPENS].load(Acquire) & MAPPED != 0)
    }

    /// Whether an inode is open, or stays until it is forgotten.
    pub fn is_kept(&self, number: u64) -> bool {
        self.words(number).is_some_and(|words| words[OPENS].load(Acquire) & !MAPPED != 0)
    }

    /// Notes where the pin is that keeps an inode.
    pub fn set_pin(&self, number: u64, place: PinPlace) {
        if let Some(words) = self.words(number) {
            // Release: pairs with the Acquire of the thread that takes it.
            words[PIN].store(u64::from(place.0) + 1, Release);
            // Pairs with that in `forget`.
            fence(SeqCst);
        }
    }

    /// Where the pin is that keeps an inode, if there is one.
    pub fn pin(&self, number: u64) -> Option<PinPlace> {
        place_of(self.words(number)?[PIN].load(Acquire))
    }

    /// As [`NodeTable::pin`], and no longer notes it: of several callers, one gets it.
    pub fn take_pin(&self, number: u64) -> Option<PinPlace> {
        place_of(self.words(number)?[PIN].swap(0, AcqRel))
    }

    /// The inode that the kernel means by a node ID; `None` if no answer has given it this ID.
    pub fn node(&self, number: u64) -> Option<Node> {
        let words = self.words(number)?;
        // Acquire: pairs with the Release in `remember`.
        let generation = words[GENERATION].load(Acquire);
        // Generations start at 1.
        (generation != 0).then_some(Node { number, generation })
    }

    /// Notes that an answer is about to give the kernel an inode. Returns false if its number is
    /// beyond the table, which only a damaged pool has.
    pub fn remember(&self, node: Node) -> bool {
        let Some(words) = self.words(node.number) else { return false };
        // Release: a thread that finds the generation finds the inode as it was looked up.
        words[GENERATION].store(node.generation, Release);
        words[LOOKUPS].fetch_add(1, AcqRel);
        true
    }

    /// How often the kernel was given an inode and has not forgotten it.
    pub fn lookups(&self, number: u64) -> u64 {
        // Acquire: pairs with the changes of other threads.
        self.words(number).map_or(0, |words| words[LOOKUPS].load(Acquire))
    }

    /// Notes that the kernel has forgotten `count` answers. Returns whether it does not know the
    /// inode any more; of several calls, one is told so.
    pub fn forget(&self, number: u64, count: u64) -> bool {
        let Some(words) = self.words(number) else { return false };
        let opens = words[OPENS].load(Acquire);
        // AcqRel: the thread that reaches 0 sees what all others did with the inode. Relaxed where
        // nothing is changed.
        let before = words[LOOKUPS]
            .fetch_update(AcqRel, Relaxed, |lookups| Some(lookups.saturating_sub(count)));
        // Pairs with that in `set_pin`.
        fence(SeqCst);
        let before = before.unwrap_or(0);
        debug_assert!(before >= count, "inode {number} was forgotten {count} times of {before}");
        let is_last = before > 0 && before <= count;
        if is_last {
            // It is not open; a dead server may have counted twice. Unless it was opened again.
            let _ = words[OPENS].compare_exchange(opens, 0, AcqRel, Relaxed);
        }
        is_last
    }
}

fn place_of(word: u64) -> Option<PinPlace> {
    u32::try_from(word).ok()?.checked_sub(1).map(PinPlace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_is_taken_once() {
        let table = NodeTable::new(8).unwrap();
        assert_eq!(table.pin(3), None);
        table.set_pin(3, PinPlace(0));
        assert_eq!((table.pin(3), table.take_pin(3)), (Some(PinPlace(0)), Some(PinPlace(0))));
        assert_eq!((table.take_pin(3), table.pin(9)), (None, None));
    }

    #[test]
    fn an_inode_is_known_until_all_that_was_given_is_forgotten() {
        let table = NodeTable::new(8).unwrap();
        let node = Node { number: 7, generation: 9 };
        assert_eq!((table.node(7), table.lookups(7)), (None, 0));
        assert!(table.remember(node) && table.remember(node) && table.remember(node));
        assert_eq!((table.node(7), table.lookups(7)), (Some(node), 3));
        assert!(!table.forget(7, 2));
        assert!(table.forget(7, 1));
        assert_eq!(table.lookups(7), 0);
        // Under another generation the number is another inode.
        let next = Node { generation: 10, ..node };
        assert!(table.remember(next));
        assert_eq!(table.node(7), Some(next));
    }

    #[test]
    fn an_inode_is_kept_until_it_was_closed_as_often_as_opened_or_is_forgotten() {
        let table = NodeTable::new(8).unwrap();
        let node = Node { number: 3, generation: 1 };
        assert!(table.remember(node) && !table.is_kept(3) && !table.closed(3));
        table.opened(3);
        table.opened(3);
        assert!(!table.closed(3) && table.is_kept(3) && table.closed(3) && !table.is_kept(3));
        table.opened(3);
        table.mapped(3);
        assert!(table.is_mapped(3) && table.closed(3) && !table.is_mapped(3));
        table.opened(3);
        table.keep(3);
        assert!(!table.closed(3) && table.is_kept(3));
        table.keep_removed(3);
        assert!(table.is_removed(3) && table.is_kept(3));
        assert!(table.forget(3, 1) && !table.is_kept(3) && !table.is_removed(3));
    }

    #[test]
    fn numbers_beyond_the_table_are_not_known() {
        let table = NodeTable::new(8).unwrap();
        for number in [8, u64::MAX / 4, u64::MAX] {
            assert!(!table.remember(Node { number, generation: 1 }));
            assert_eq!((table.node(number), table.lookups(number)), (None, 0));
            assert!(!table.forget(number, 1));
        }
    }
}
