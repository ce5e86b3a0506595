//! The memory of a mount that outlives its servers.
//!
//! ```text
//!  page 0        words of the mount (`Word`), blocks of pins that are lent
//!  page 1        notes: one for each worker
//!  pages 2 –     what was settled
//!  then          requests that wait for locks, by their names
//!  then          the table of nodes
//! ```
//!
//! The keeper makes it, each server maps it. A server may die at any instruction, so the next one
//! takes every value: fields are words of their own, and the order in which they are stored says what
//! is valid.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use aquifer_pool::LentPins;
use aquifer_sys::shared_words::SharedWords;

use super::NodeTable;

/// `AQMOUNT` and the version of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"AQMOUNT\x03");
const PAGE_WORDS: usize = 512;
/// Where the blocks of pins are listed.
const BLOCKS: usize = 64;
/// The most blocks: 448 × 512 files without names.
const MOST_BLOCKS: usize = PAGE_WORDS - BLOCKS;
pub(super) const NOTES: usize = PAGE_WORDS;
pub(super) const NOTE_WORDS: usize = 32;
/// As many as there are workers.
pub(super) const NOTE_COUNT: usize = 16;
pub(super) const SETTLED: usize = 2 * PAGE_WORDS;
pub(super) const SETTLED_WORDS: usize = 8;
/// Each take-over adds at most one for each worker.
pub(super) const SETTLED_COUNT: usize = 4096;
const WAITS: usize = SETTLED + SETTLED_COUNT * SETTLED_WORDS;
/// The most requests that wait for locks.
pub const MOST_WAITING: usize = 4096;
const NODES: usize = WAITS + MOST_WAITING;
const _: () = assert!(NOTE_WORDS * NOTE_COUNT <= PAGE_WORDS);

/// Words of the mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Word {
    /// The minor version of the protocol.
    Minor = 1,
    /// The features that are used.
    Features,
    /// That of the keeper, the pool's sole writer.
    Nonce,
    /// How many servers were started.
    Servers,
    /// How many of them the last one that took over was.
    TookOver,
    /// That one, and whether it died by itself: [`Memory::note_death`].
    Death,
    /// Of the next note.
    NextId,
    /// How many blocks of pins are listed.
    Blocks,
    /// By which the blocks of pins are known as lent by the keeper.
    Lender,
    /// Where the next request that is settled is written.
    NextSettled,
}

/// The memory. See the [module](self).
#[derive(Debug, Clone)]
pub struct Memory {
    words: Arc<SharedWords>,
}

impl Memory {
    /// New memory, for a pool with this many slots.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(slots: u64) -> io::Result<Memory> {
        let nodes = NodeTable::len_words(slots).and_then(|len| len.checked_add(NODES));
        let words = SharedWords::new(nodes.ok_or(io::ErrorKind::OutOfMemory)?)?;
        words[0].store(MAGIC, Release);
        Ok(Memory { words: Arc::new(words) })
    }

    /// That of a descriptor.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if another version of the program has made it.
    pub fn adopt(file: OwnedFd) -> io::Result<Memory> {
        let words = SharedWords::adopt(file)?;
        if words.len() < NODES || words[0].load(Acquire) != MAGIC {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the mount was made by another version of the program: unmount it and mount it again",
            ));
        }
        Ok(Memory { words: Arc::new(words) })
    }

    /// The descriptor, for another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.words.file()
    }

    /// A word of the mount.
    pub fn word(&self, word: Word) -> &AtomicU64 {
        &self.words[word as usize]
    }

    /// Its value.
    pub fn get(&self, word: Word) -> u64 {
        self.word(word).load(Acquire)
    }

    /// Sets it.
    pub fn set(&self, word: Word, value: u64) {
        self.word(word).store(value, Release);
    }

    /// Notes how the last server has ended: by itself, or killed from outside. The notes of requests
    /// under way are those of the last one that took over, so others are not noted.
    pub fn note_death(&self, by_itself: bool) {
        if self.get(Word::TookOver) == self.get(Word::Servers) {
            self.set(Word::Death, self.get(Word::Servers) << 1 | u64::from(by_itself));
        }
    }

    /// The last server that took over, and whether it died by itself.
    pub(super) fn death(&self) -> (u64, bool) {
        let word = self.get(Word::Death);
        (word >> 1, word & 1 != 0)
    }

    /// The table of nodes, of a pool with this many slots.
    pub fn nodes(&self, slots: u64) -> NodeTable {
        NodeTable::within(self.words.clone(), NODES, slots)
    }

    /// The requests that wait for locks.
    pub fn waits(&self) -> Waits {
        Waits { words: self.words.clone() }
    }

    pub(super) fn words(&self) -> &Arc<SharedWords> {
        &self.words
    }

    /// The blocks of pins that the keeper has lent.
    pub fn lent(&self) -> LentPins {
        let count = (self.get(Word::Blocks) as usize).min(MOST_BLOCKS);
        let blocks = self.words[BLOCKS..][..count].iter();
        let blocks = blocks.map(|block| block.load(Acquire) as u32).collect();
        LentPins { nonce: self.get(Word::Lender), blocks }
    }

    /// Whether so many more blocks can be listed.
    pub fn has_room_for(&self, blocks: usize) -> bool {
        self.get(Word::Blocks) as usize + blocks <= MOST_BLOCKS
    }

    /// Lists blocks that the keeper has lent; those that have no place here are not listed.
    pub fn add_lent(&self, lent: &LentPins) {
        self.set(Word::Lender, lent.nonce);
        for &block in &lent.blocks {
            let count = self.get(Word::Blocks);
            let Some(word) = self.words[BLOCKS..][..MOST_BLOCKS].get(count as usize) else {
                return;
            };
            word.store(block.into(), Release);
            self.set(Word::Blocks, count + 1);
        }
    }
}

/// The names of the requests that wait for locks, for the next server: they may be much older than all
/// others, and where the kernel does not hand them out again, only an answer ends them.
#[derive(Debug, Clone)]
pub struct Waits {
    words: Arc<SharedWords>,
}

/// One of them. Dropping it, after the answer, makes room.
#[derive(Debug)]
pub struct WaitNote {
    words: Arc<SharedWords>,
    at: usize,
}

impl Waits {
    fn words(&self) -> &[AtomicU64] {
        &self.words[WAITS..][..MOST_WAITING]
    }

    /// Notes one; `None` if there is no room. One caller at a time.
    pub fn add(&self, key: u64) -> Option<WaitNote> {
        let is_free = |word: &AtomicU64| word.load(Acquire) == 0;
        let at = self.words().iter().position(is_free)?;
        self.words()[at].store(key, Release);
        Some(WaitNote { words: self.words.clone(), at: WAITS + at })
    }

    /// All of them.
    pub fn all(&self) -> Vec<u64> {
        self.words().iter().map(|word| word.load(Acquire)).filter(|key| *key != 0).collect()
    }

    /// They were answered, or come again.
    pub fn clear(&self) {
        self.words().iter().for_each(|word| word.store(0, Release));
    }
}

impl Drop for WaitNote {
    fn drop(&mut self) {
        self.words[self.at].store(0, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_server_finds_what_the_last_one_has_left() {
        let memory = Memory::new(100).unwrap();
        memory.set(Word::Nonce, 7);
        let lent = |blocks| LentPins { nonce: 9, blocks };
        memory.add_lent(&lent(vec![3, 5]));
        memory.add_lent(&lent(vec![8]));
        let again = Memory::adopt(memory.file().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!((again.get(Word::Nonce), again.lent()), (7, lent(vec![3, 5, 8])));
        memory.add_lent(&lent(vec![1; 1000]));
        assert_eq!(again.lent().blocks.len(), MOST_BLOCKS);
        let waits = memory.waits();
        let (first, _second) = (waits.add(7), waits.add(8));
        drop(first);
        let _third = waits.add(9);
        assert_eq!(again.waits().all(), [9, 8]);
        again.waits().clear();
        assert!(waits.all().is_empty());
        memory.words[0].store(MAGIC + 1, Release);
        let refused = Memory::adopt(memory.file().try_clone_to_owned().unwrap()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }
}
