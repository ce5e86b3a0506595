//! Pins of writers: words of shared memory, in blocks that handles claim.
//!
//! A block has 512 words. A handle claims a block with an exclusive lock on the block's byte of the
//! pool file. The claim lasts as long as the lock: the pins of a process that dies in any way end
//! with it, and a stopped process keeps its pins.
//!
//! | step of a claim | afterwards |
//! |---|---|
//! | lock the block's byte | no other handle owns the block |
//! | allocate its memory, if it is new | a death leaves memory that is not used |
//! | store this handle's nonce as the owner's | |
//! | clear all words: a dead process may have left pins there | a scan finds no pins |
//! | raise the number of used blocks over it | scans look at it |
//! | add the block to this handle's list | |
//!
//! # A scan and a claim at the same time
//! The locks separate handles, not the threads of one handle: a handle's own lock never conflicts
//! with itself. So a scan changes nothing. It loads the owner's nonce and the words; if the nonce
//! is not its own handle's, it then tests the lock, and skips the words if no other handle holds
//! it. Between these steps another thread of the same handle may claim the block and set a pin,
//! which the scan then skips as well. That is safe: after its fence the scan loaded the earlier
//! nonce, so the pin was set after that fence, and the thread that set it sees what was published
//! before the fence ([`word`](super::word)).

use std::cell::Cell;
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicUsize};

use aquifer_sys::lock::LockKind;
use aquifer_vm::ZeroedSlice;

use super::memory::{BLOCK_PINS, PinMemory};
use super::word::{PinValue, PinWord};
use crate::error::{PoolError, Result};
use crate::memory::zeroed;
use crate::random::new_uuid;
use crate::shared::membership::{Byte, Membership, PIN_BLOCKS, to_try};
use crate::sync::AtomicU64;

/// Words that are tried before another block is claimed.
const MOST_LOOKED_AT: usize = 2 * BLOCK_PINS;
/// Distance between the first words of two threads: two cache lines.
const THREAD_PINS: usize = 16;

/// The number of threads that have set a pin.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The word that this thread tries first, in any pool.
    static NEXT: Cell<usize> = const { Cell::new(usize::MAX) };
}

fn next_of_thread() -> usize {
    NEXT.with(|next| match next.get() {
        usize::MAX => {
            // Relaxed: a count.
            let first = THREADS.fetch_add(1, Relaxed) % (BLOCK_PINS / THREAD_PINS) * THREAD_PINS;
            next.set(first);
            first
        }
        place => place,
    })
}

/// Blocks of pins that are lent: from [`Pool::lend_pins`](crate::Pool::lend_pins), for [`Pool::borrow_pins`](crate::Pool::borrow_pins) in another
/// process, which gets both fields as numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LentPins {
    /// Tells them from blocks that other handles have under the same numbers later.
    pub nonce: u64,
    /// Their numbers.
    pub blocks: Vec<u32>,
}

/// Blocks in which one handle sets pins. It only grows.
pub(crate) struct BlockList {
    blocks: ZeroedSlice<AtomicU32>,
    count: AtomicUsize,
}

impl BlockList {
    pub fn new() -> Result<BlockList> {
        Ok(BlockList { blocks: zeroed(PIN_BLOCKS)?, count: AtomicUsize::new(0) })
    }

    #[inline]
    pub fn len(&self) -> usize {
        // Acquire: pairs with the Release in `push`. The blocks before it are listed, and what was
        // done to them before that is seen.
        self.count.load(Acquire)
    }

    /// A block that is listed.
    #[inline]
    pub fn get(&self, index: usize) -> usize {
        // Relaxed: `len` covers this entry, and its Acquire load ordered the entry.
        self.blocks[index].load(Relaxed) as usize
    }

    /// Adds a block. Calls must not overlap.
    pub fn push(&self, block: usize) {
        let count = self.count.load(Relaxed);
        self.blocks[count].store(block as u32, Relaxed);
        // Release: pairs with the Acquire in `len`.
        self.count.store(count + 1, Release);
    }

    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.len()).map(|index| self.get(index))
    }
}

/// The words of all handles, as one handle uses them.
pub(crate) struct Blocks {
    memory: PinMemory,
    /// The nonce that marks the blocks this handle owns.
    nonce: u64,
    /// Blocks of this handle, in the order of their places.
    own: BlockList,
    /// The nonce that marks those in which other processes set pins: see [`LentPins`].
    lent_nonce: u64,
    /// These blocks.
    lent: Mutex<Vec<u32>>,
    claiming: Mutex<()>,
}

impl Blocks {
    pub fn new(memory: PinMemory) -> Result<Blocks> {
        let (nonce, lent_nonce) = new_uuid()?.as_u64_pair();
        Ok(Blocks {
            memory,
            // Neither is 0, nor the other.
            nonce: nonce | 1,
            lent_nonce: lent_nonce & !1 | 2,
            own: BlockList::new()?,
            lent: Mutex::default(),
            claiming: Mutex::new(()),
        })
    }

    /// The descriptor of the memory, if it is shared.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.memory.file()
    }

    /// Whether other handles can have pins.
    pub fn is_shared(&self) -> bool {
        self.memory.is_shared()
    }

    /// Sets a pin and returns its place.
    #[inline]
    pub fn set(&self, members: &Membership, value: PinValue) -> Result<usize> {
        loop {
            let places = self.own.len() * BLOCK_PINS;
            if let Some(place) = self.set_within(places, places.min(MOST_LOOKED_AT), value) {
                return Ok(place);
            }
            if let Err(full) = self.claim(members, places) {
                // No block could be claimed: try every word.
                return self.set_within(places, places, value).ok_or(full);
            }
        }
    }

    #[inline]
    fn set_within(&self, places: usize, most: usize, value: PinValue) -> Option<usize> {
        let mut place = next_of_thread();
        for _ in 0..most {
            if place >= places {
                place = 0;
            }
            let (block, index) = self.locate(place);
            if self.try_set(block, index, value) {
                NEXT.with(|next| next.set(place + 1));
                return Some(place);
            }
            place += 1;
        }
        None
    }

    /// Sets a pin in a word of a block in which this handle sets them, if the word is empty.
    #[inline]
    pub fn try_set(&self, block: usize, index: usize, value: PinValue) -> bool {
        // Relaxed: stored before the pin itself, so a scan that sees the pin sees this too.
        let used_words = &self.memory.owner(block).used_words;
        if used_words.load(Relaxed) <= index as u64 {
            used_words.fetch_max(index as u64 + 1, Relaxed);
        }
        self.memory.block(block)[index].try_set(value)
    }

    #[inline]
    fn locate(&self, place: usize) -> (usize, usize) {
        (self.own.get(place / BLOCK_PINS), place % BLOCK_PINS)
    }

    /// Clears a pin, if this handle has the block. If it has lost its locks, another handle may have
    /// claimed the block: that stores its nonce before it sets a pin. This takes less time than to
    /// ask how long ago the locks were held.
    #[inline]
    pub fn clear(&self, place: usize) {
        let (block, index) = self.locate(place);
        // Relaxed: a claim that comes between this and the store comes, as for a question of the
        // locks, at most one loss of the CPU after it.
        if self.memory.owner(block).nonce.load(Relaxed) != self.nonce {
            return;
        }
        self.memory.block(block)[index].clear();
        // The word is in the cache.
        NEXT.with(|next| next.set(place));
    }

    /// Claims another block, unless another thread has done so since there were `places`.
    #[cold]
    fn claim(&self, members: &Membership, places: usize) -> Result<()> {
        let _claiming = self.claiming.lock().unwrap_or_else(|broken| broken.into_inner());
        if self.own.len() * BLOCK_PINS != places {
            return Ok(());
        }
        self.own.push(self.claim_one(members, self.nonce)?);
        NEXT.with(|next| next.set(places + next_of_thread() % BLOCK_PINS));
        Ok(())
    }

    /// Claims blocks in which another process sets pins, for as long as this handle has the pool open:
    /// all of them, or none.
    pub fn lend(&self, members: &Membership, count: usize) -> Result<LentPins> {
        let _claiming = self.claiming.lock().unwrap_or_else(|broken| broken.into_inner());
        let mut lent = self.lent.lock().unwrap_or_else(|broken| broken.into_inner());
        let mut blocks = Vec::new();
        for _ in 0..count {
            match self.claim_one(members, self.lent_nonce) {
                Ok(block) => blocks.push(block as u32),
                Err(error) => {
                    for block in blocks.into_iter().map(|block| block as usize) {
                        self.memory.owner(block).nonce.store(0, Release);
                        members.unlock(Byte::PinBlock(block));
                    }
                    return Err(error);
                }
            }
        }
        lent.extend(&blocks);
        Ok(LentPins { nonce: self.lent_nonce, blocks })
    }

    fn is_own(&self, nonce: u64) -> bool {
        nonce == self.nonce || nonce == self.lent_nonce
    }

    /// Claims a block, and marks it with this nonce. The caller holds `claiming`.
    fn claim_one(&self, members: &Membership, own_nonce: u64) -> Result<usize> {
        let used = self.memory.used_blocks().load(Relaxed) as usize;
        let nonce = |block: usize| self.memory.owner(block).nonce.load(Relaxed);
        for block in to_try(used, PIN_BLOCKS, |block| nonce(block) == 0) {
            // The handle's own lock would not stop it from claiming the block twice.
            let is_own = block < used && self.is_own(nonce(block));
            if is_own || !self.take_block(members, block, own_nonce)? {
                continue;
            }
            // Relaxed: stored before any pin in the block, so a scan that sees a pin sees this too.
            self.memory.used_blocks().fetch_max(block as u64 + 1, Relaxed);
            return Ok(block);
        }
        Err(PoolError::TooManyPins { limit: PIN_BLOCKS * BLOCK_PINS })
    }

    /// Whether a living handle other than this one has lent this block with this nonce.
    pub fn is_lent_by_other(&self, members: &Membership, block: usize, nonce: u64) -> bool {
        let used = (self.memory.used_blocks().load(Relaxed) as usize).min(PIN_BLOCKS);
        block < used
            && nonce != 0
            && !self.is_own(nonce)
            // A lock that a read-only descriptor cannot have.
            && members.is_locked_by_other(Byte::PinBlock(block), LockKind::Shared)
            // Then: of an owner that has just claimed the block.
            && self.is_marked(block, nonce)
    }

    /// Whether a block that has an owner, or had one, is marked with this nonce.
    pub fn is_marked(&self, block: usize, nonce: u64) -> bool {
        self.memory.owner(block).nonce.load(Relaxed) == nonce
    }

    /// The words of a block that has, or had, an owner.
    pub fn words(&self, block: usize) -> &[AtomicU64; BLOCK_PINS] {
        self.memory.block(block)
    }

    /// Claims a block that no handle owns and clears its pins. See the module's documentation.
    ///
    /// # Errors
    /// There is no memory for it.
    fn take_block(&self, members: &Membership, block: usize, own_nonce: u64) -> Result<bool> {
        let byte = Byte::PinBlock(block);
        if self.is_shared() && !members.try_lock(byte, LockKind::Exclusive).unwrap_or(false) {
            return Ok(false);
        }
        self.memory.allocate(block).inspect_err(|_| members.unlock(byte))?;
        // Relaxed: the lock orders this after the earlier owner's stores, and a scan that sees a
        // pin set later sees these stores too, as does an earlier owner that lost its locks.
        let owner = self.memory.owner(block);
        owner.nonce.store(own_nonce, Relaxed);
        self.memory.block(block).iter().for_each(|word| word.store(0, Relaxed));
        owner.used_words.store(0, Relaxed);
        Ok(true)
    }

    /// Returns the pins that `is_wanted` accepts. The caller has published its change, followed by
    /// a fence. Whether an owner lives is asked once, and only if it has such pins: it takes a system
    /// call, which takes the longer the more locks there are.
    pub fn look(
        &self,
        members: &Membership,
        is_wanted: impl Fn(PinValue) -> bool,
    ) -> Vec<PinValue> {
        let mut values = Vec::new();
        // The nonces of owners, and whether they live.
        let mut asked = HashMap::new();
        // Relaxed, here and below: stored before the first pin of the block, so visible if the pin
        // is.
        let used_blocks = (self.memory.used_blocks().load(Relaxed) as usize).min(PIN_BLOCKS);
        for block in 0..used_blocks {
            let owner = self.memory.owner(block);
            let nonce = owner.nonce.load(Relaxed);
            if nonce == 0 {
                continue;
            }
            let used_words = (owner.used_words.load(Relaxed) as usize).min(BLOCK_PINS);
            let words = &self.memory.block(block)[..used_words];
            let first = values.len();
            values.extend(words.iter().filter_map(PinWord::get).filter(|value| is_wanted(*value)));
            let is_own = self.is_own(nonce) || !self.is_shared();
            let lives = || members.is_locked_by_other(Byte::PinBlock(block), LockKind::Exclusive);
            if values.len() > first && !is_own && !*asked.entry(nonce).or_insert_with(lives) {
                // The owner is dead: its pins do not count, and remain until a handle claims the
                // block.
                values.truncate(first);
            }
        }
        values
    }

    /// Gives up all blocks. The handle has no pins any more.
    pub fn leave(&self) {
        let lent = self.lent.lock().unwrap_or_else(|broken| broken.into_inner());
        for block in self.own.iter().chain(lent.iter().map(|block| *block as usize)) {
            self.memory.owner(block).nonce.store(0, Release);
        }
    }
}
