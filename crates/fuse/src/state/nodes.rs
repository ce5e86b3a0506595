//! The inodes that the kernel knows, and how often it was given each.
//!
//! ```text
//!  inode number ──► 7 words:  lookups │ generation │ epoch │ first epoch │ parent │ pin │ opens
//!  node ID       =  epoch │ inode number
//! ```
//!
//! The kernel names an inode by its node ID alone; the generation that makes a [`Node`] of it is kept
//! in this table. The table is as long as the pool has slots, and costs memory only where inodes are
//! known.
//!
//! # Node IDs
//! *Invariant: the kernel never has one node ID for two inodes.* The pool uses a number again as soon as
//! its inode is free, and in a shared mount another process frees inodes that this kernel still has. So
//! a node ID has the inode number in its low bits and the *epoch* of the number above them. The epoch is
//! one higher for each generation that the table meets while the kernel still has an earlier one.
//! Node IDs of epochs before the first one of a generation name inodes that are gone: each request for
//! one gets `ESTALE`, and its `FORGET` changes nothing. Where the kernel has forgotten the earlier
//! generation, the epoch stays. The first epoch is 0, so the root, which is never freed, is its own number.
//!
//! A directory that is found in another parent than where the kernel was given it, because another
//! process has moved it, begins an epoch as well, and all node IDs of its generation name it. The kernel
//! has one place for each directory that it knows, and cannot always move it in a lookup: in a `rename`
//! between directories, and beside one, the lookup would fail with `ESTALE`. So the kernel knows a moved
//! directory as two, of which the one at the old place goes when nothing uses it. *Parent* is the node ID of
//! the directory in which the kernel was given it last, or has moved it to.
//!
//! An epoch never comes again: a number whose epochs are used up gets `EOVERFLOW` for every further
//! generation. All bits that no inode number needs are the epoch's, at least 31, and each epoch takes the
//! removal of an inode, a new one and a lookup, or a move and a lookup. With 2²⁰ slots and a microsecond for all three, the
//! epochs of a number last three months; an epoch really takes hundreds of microseconds.
//!
//! Generations of a number grow. An answer that is late, for an inode that was removed and whose number
//! the kernel knows already under a later generation, becomes `ESTALE`.
//!
//! # The count
//! Each answer with an entry raises `lookups` by one, and each `FORGET` lowers it. *Invariant:
//! `lookups` is at least what the kernel has*, because it is raised before the answer is written and
//! lowered after the kernel has forgotten. So an inode whose count is 0 is not referred to by
//! anything the kernel has, and an inode whose last name is removed while the count is above 0 must
//! be kept: only `FORGET` tells when its last user has gone.
//!
//! A lookup and the removal of the last name cannot miss each other: the kernel holds the lock of
//! the directory, shared for one and exclusively for the other. A directory with two node IDs has two
//! such locks: a lookup that misses a removal there is answered with `ESTALE`.
//!
//! A `FORGET` and such a removal cannot either. One lowers the count, and then looks for a pin; the
//! other notes the pin, and then looks at the count. Between both steps of both there is a fence, so at
//! least one of them sees what the other has done, and gives the pin back.

use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer_fs::node::Node;
use aquifer_pool::PinPlace;
use aquifer_sys::shared_words::SharedWords;
use rustix::io::Errno;

use crate::point;

/// Words of an inode.
const WORDS: usize = 7;
const LOOKUPS: usize = 0;
const GENERATION: usize = 1;
const EPOCH: usize = 2;
/// The epoch in which the kernel was first given this generation.
const FIRST_EPOCH: usize = 3;
/// Of a directory of a shared mount; 0 while that is not known.
const PARENT: usize = 4;
/// The place of the pin that keeps the inode, and 1; 0 without one. What has a pin is not freed, so the
/// pin is of the generation that the table knows.
const PIN: usize = 5;
/// In a shared mount, how often it is open ([`COUNT`]); and [`KEPT`], [`MAPPED`], [`REMOVED`].
const OPENS: usize = 6;
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
    /// How many low bits of a node ID are the inode number.
    number_bits: u32,
    /// Held while the generation of a number changes, or its lookups do. Nothing is waited for meanwhile.
    changing: Mutex<()>,
}

impl NodeTable {
    /// For a pool with this many slots.
    ///
    /// # Errors
    /// Those of the system: too little address space.
    pub fn new(slots: u64) -> io::Result<NodeTable> {
        let len = NodeTable::len_words(slots).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(NodeTable::within(Arc::new(SharedWords::new(len)?), 0, slots))
    }

    /// The one that these words have from the word `first` on, for a pool with this many slots.
    pub fn within(words: Arc<SharedWords>, first: usize, slots: u64) -> NodeTable {
        let number_bits = (u64::BITS - slots.leading_zeros()).clamp(1, 63);
        NodeTable { words, first, number_bits, changing: Mutex::default() }
    }

    /// How many words a table takes.
    pub fn len_words(slots: u64) -> Option<usize> {
        usize::try_from(slots).ok()?.checked_mul(WORDS)
    }

    fn words(&self, number: u64) -> Option<&[AtomicU64]> {
        if number >> self.number_bits != 0 {
            return None;
        }
        let from = usize::try_from(number).ok()?.checked_mul(WORDS)?.checked_add(self.first)?;
        self.words.get(from..from.checked_add(WORDS)?)
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        // No panic leaves anything else than the death of a server may, between any two stores.
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number and the epoch in a node ID.
    fn parts(&self, id: u64) -> (u64, u64) {
        (id & ((1 << self.number_bits) - 1), id >> self.number_bits)
    }

    fn id_of(&self, number: u64, epoch: u64) -> u64 {
        epoch << self.number_bits | number
    }

    /// The number of the inode that the kernel means by a node ID; `None` if the inode is gone and its
    /// number has been given again.
    pub fn number(&self, id: u64) -> Option<u64> {
        let (number, epoch) = self.parts(id);
        is_in_epochs(self.words(number)?, epoch).then_some(number)
    }

    /// The node ID that the kernel was given last for an inode; `None` for another generation than the table has.
    pub fn id(&self, node: Node) -> Option<u64> {
        // Both words are of one moment.
        let _changing = self.lock();
        let words = self.words(node.number)?;
        let is_this = words[GENERATION].load(Acquire) == node.generation;
        is_this.then(|| self.id_of(node.number, words[EPOCH].load(Acquire)))
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

    /// The inode that the kernel means by a node ID; `None` if no answer has given it this ID, or its
    /// number has been given again.
    pub fn node(&self, id: u64) -> Option<Node> {
        let (number, epoch) = self.parts(id);
        let words = self.words(number)?;
        // Acquire: pairs with the Release in `adopt_locked`. The epochs are looked at behind the generation,
        // which is stored behind them: so a later generation is never found with an earlier epoch.
        let generation = words[GENERATION].load(Acquire);
        // Generations start at 1.
        let is_known = is_in_epochs(words, epoch) && generation != 0;
        is_known.then_some(Node { number, generation })
    }

    /// The inode that the table knows by a number, with the node ID that the kernel was given last.
    pub fn numbered(&self, number: u64) -> Option<(u64, Node)> {
        let _changing = self.lock();
        let words = self.words(number)?;
        let node = Node { number, generation: words[GENERATION].load(Acquire) };
        let id = self.id_of(number, words[EPOCH].load(Acquire));
        (node.generation != 0).then_some((id, node))
    }

    /// Notes that an answer is about to give the kernel an inode. Returns its node ID.
    ///
    /// # Errors
    /// * `EUCLEAN` for a number beyond the table, which only a damaged pool has;
    /// * `ESTALE` for an earlier generation than the table has: the inode is gone;
    /// * `EOVERFLOW` if the epochs of the number are used up.
    pub fn remember(&self, node: Node) -> Result<u64, Errno> {
        let _changing = self.lock();
        let words = self.adopt_locked(node)?;
        Ok(self.count_locked(node, words))
    }

    /// As [`NodeTable::remember`], for a directory that is found in the one with the node ID `parent`, in
    /// a shared mount.
    ///
    /// # Errors
    /// As [`NodeTable::remember`].
    pub fn remember_in(&self, parent: u64, node: Node) -> Result<u64, Errno> {
        let _changing = self.lock();
        let words = self.adopt_locked(node)?;
        let before = words[PARENT].load(Acquire);
        let has_moved = before != parent && before != 0 && words[LOOKUPS].load(Acquire) > 0;
        // Without another epoch, a `rename` may fail.
        if has_moved && let Some(next) = self.next_epoch(words) {
            words[EPOCH].store(next, Release);
        }
        words[PARENT].store(parent, Release);
        Ok(self.count_locked(node, words))
    }

    /// Notes that the kernel moves a directory to the one with the node ID `parent`; `None` while the
    /// directory may be found at either place.
    pub fn moved(&self, parent: Option<u64>, node: Node) {
        let _changing = self.lock();
        if let Some(words) = self.words(node.number)
            && words[GENERATION].load(Acquire) == node.generation
        {
            words[PARENT].store(parent.unwrap_or(0), Release);
        }
    }

    fn count_locked(&self, node: Node, words: &[AtomicU64]) -> u64 {
        words[LOOKUPS].fetch_add(1, AcqRel);
        self.id_of(node.number, words[EPOCH].load(Acquire))
    }

    /// `None` if there is none.
    fn next_epoch(&self, words: &[AtomicU64]) -> Option<u64> {
        let next = words[EPOCH].load(Acquire) + 1;
        (next >> (u64::BITS - self.number_bits) == 0).then_some(next)
    }

    /// Makes this the inode that the table knows by its number, before anything is noted of it that is
    /// not given to the kernel yet.
    ///
    /// # Errors
    /// As [`NodeTable::remember`].
    pub fn adopt(&self, node: Node) -> Result<(), Errno> {
        let _changing = self.lock();
        self.adopt_locked(node).map(drop)
    }

    fn adopt_locked(&self, node: Node) -> Result<&[AtomicU64], Errno> {
        let words = self.words(node.number).ok_or(Errno::UCLEAN)?;
        let before = words[GENERATION].load(Acquire);
        if node.generation < before {
            return Err(Errno::STALE);
        }
        if node.generation > before {
            if words[LOOKUPS].load(Acquire) > 0 {
                let next = self.next_epoch(words).ok_or(Errno::OVERFLOW)?;
                // First: a server that dies behind this has used up an epoch and nothing else. Release,
                // here and below: the next server finds the stores in this order, as far as they came.
                words[EPOCH].store(next, Release);
                point("epoch");
                words[FIRST_EPOCH].store(next, Release);
                words[LOOKUPS].store(0, Release);
            }
            words[PARENT].store(0, Release);
            // Clears the notes of the earlier inode. Its opens were closed, or it would have a pin; those
            // that are just failing take back what they have counted.
            words[OPENS].fetch_and(COUNT, AcqRel);
            // Release: a thread that finds the generation finds the inode as it was looked up.
            words[GENERATION].store(node.generation, Release);
        }
        Ok(words)
    }

    /// Returns `true` if the kernel was given this inode and has not forgotten it.
    pub fn knows(&self, node: Node) -> bool {
        self.id(node).is_some() && self.lookups(node.number) > 0
    }

    /// How often the kernel was given the inode that the table knows by this number and has not forgotten
    /// it.
    pub fn lookups(&self, number: u64) -> u64 {
        // Acquire: pairs with the changes of other threads.
        self.words(number).map_or(0, |words| words[LOOKUPS].load(Acquire))
    }

    /// Notes that the kernel has forgotten `count` answers with a node ID. Returns the inode's number if
    /// the kernel does not know the inode any more; of several calls, one gets it.
    pub fn forget(&self, id: u64, count: u64) -> Option<u64> {
        let _changing = self.lock();
        // Otherwise the count went with the generation.
        let number = self.number(id)?;
        let words = self.words(number)?;
        let opens = words[OPENS].load(Acquire);
        let before = words[LOOKUPS].load(Acquire);
        // Release: the next server.
        words[LOOKUPS].store(before.saturating_sub(count), Release);
        // Pairs with that in `set_pin`.
        fence(SeqCst);
        debug_assert!(before >= count, "inode {number} was forgotten {count} times of {before}");
        let is_last = before > 0 && before <= count;
        if is_last {
            // It is not open; a dead server may have counted twice. Unless it was opened again.
            let _ = words[OPENS].compare_exchange(opens, 0, AcqRel, Relaxed);
        }
        is_last.then_some(number)
    }
}

/// Whether an epoch of a number is one of the generation that the table knows.
fn is_in_epochs(words: &[AtomicU64], epoch: u64) -> bool {
    // Acquire: pairs with the Release in `adopt_locked` and `remember_in`.
    (words[FIRST_EPOCH].load(Acquire)..=words[EPOCH].load(Acquire)).contains(&epoch)
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
        assert_eq!([(); 3].map(|()| table.remember(node)), [Ok(7); 3]);
        assert_eq!((table.node(7), table.id(node), table.lookups(7)), (Some(node), Some(7), 3));
        assert_eq!(table.forget(7, 2), None);
        assert_eq!((table.forget(7, 1), table.lookups(7)), (Some(7), 0));
        // Under another generation the number is another inode.
        let next = Node { generation: 10, ..node };
        assert_eq!(table.remember(next), Ok(7));
        assert_eq!((table.node(7), table.id(node), table.id(next)), (Some(next), None, Some(7)));
    }

    #[test]
    fn the_kernel_never_has_one_node_id_for_two_inodes() {
        let table = NodeTable::new(8).unwrap();
        let generation = |generation| Node { number: 7, generation };
        assert_eq!(table.remember(generation(9)), Ok(7));
        table.keep_removed(7);
        let second = table.remember(generation(12)).unwrap();
        assert!(second != 7 && table.node(second) == Some(generation(12)));
        // The first one is gone, with all that was noted of it, and so are late answers.
        assert_eq!((table.node(7), table.number(7), table.is_removed(7)), (None, None, false));
        assert_eq!(table.remember(generation(9)), Err(Errno::STALE));
        assert_eq!((table.forget(7, 1), table.lookups(7)), (None, 1));
        assert!(table.knows(generation(12)) && !table.knows(generation(9)));
        // The kernel has forgotten the second one: its node ID is free.
        assert_eq!(table.forget(second, 1), Some(7));
        assert_eq!(table.remember(generation(13)), Ok(second));
        // A server that died in the middle of it has used up an epoch.
        let words = table.words(7).unwrap();
        words[EPOCH].fetch_add(1, AcqRel);
        let third = table.remember(generation(14)).unwrap();
        assert!(![7, second].contains(&third) && table.node(third) == Some(generation(14)));
        // Until none is left.
        words[EPOCH].store(u64::MAX >> table.number_bits, Release);
        assert_eq!(table.remember(generation(15)), Err(Errno::OVERFLOW));
        assert!(table.remember(generation(14)).is_ok());
    }

    #[test]
    fn a_directory_that_others_move_is_known_by_each_of_its_node_ids() {
        let table = NodeTable::new(8).unwrap();
        let node = Node { number: 5, generation: 9 };
        let find = |parent| table.remember_in(parent, node).unwrap();
        assert_eq!([find(1), find(1)], [5, 5]);
        let moved = find(3);
        assert!(moved != 5 && find(3) == moved);
        assert_eq!([5, moved].map(|id| table.node(id)), [Some(node); 2]);
        // The kernel has moved it itself.
        table.moved(Some(1), node);
        assert_eq!((find(1), table.lookups(5)), (moved, 5));
        table.moved(None, node);
        assert_eq!(find(3), moved);
        assert_eq!([table.forget(5, 2), table.forget(moved, 3)], [None; 2]);
        assert_eq!(table.forget(moved, 1), Some(5));
        assert_eq!(find(3), moved);
        // Another inode is none of them.
        let next = table.remember_in(3, Node { generation: 10, ..node }).unwrap();
        assert_eq!([5, moved].map(|id| table.node(id)), [None; 2]);
        assert!(table.node(next).is_some() && next != moved && next != 5);
    }

    #[test]
    fn an_inode_is_kept_until_it_was_closed_as_often_as_opened_or_is_forgotten() {
        let table = NodeTable::new(8).unwrap();
        let node = Node { number: 3, generation: 1 };
        assert!(table.remember(node) == Ok(3) && !table.is_kept(3) && !table.closed(3));
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
        assert!(table.forget(3, 1).is_some() && !table.is_kept(3) && !table.is_removed(3));
    }

    #[test]
    fn numbers_beyond_the_table_are_not_known() {
        let table = NodeTable::new(8).unwrap();
        for number in [8, u64::MAX / 4, u64::MAX] {
            assert_eq!(table.remember(Node { number, generation: 1 }), Err(Errno::UCLEAN));
            assert_eq!((table.node(number), table.lookups(number)), (None, 0));
            assert_eq!(table.forget(number, 1), None);
        }
    }
}
