//! Pins of writers: words of shared memory, in blocks that handles claim.
//!
//! A block has 512 words. A handle claims it with an exclusive lock on the block's byte of the pool file, and the claim lasts as long as
//! the lock: so a process that dies, however, has no pins from then on, and one that is stopped keeps them.
//!
//! | step of a claim | afterwards |
//! |---|---|
//! | lock the block's byte | no other handle has the block |
//! | the owner's number becomes this handle's | |
//! | clear all words: they may be a dead process's | a look finds no pins |
//! | the block is one of this handle's | |
//!
//! # A look and a claim at the same time
//! Locks tell handles apart, and not the threads of one handle: a lock of this handle never stands against it. So a look changes nothing. It loads
//! the number of the owner and the words, and then asks for the lock, unless the number is its own handle's; it leaves the words
//! out if no other handle has the lock. Another thread of the same handle may claim the block and set a pin there between these steps, and the pin
//! is left out as well. That is no harm: the look loaded the number of the owner behind its fence and found the earlier one, so the pin was set
//! behind that fence, and its setter finds what was published before it ([`word`](super::word)).

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicUsize};

use aquifer_sys::lock::LockKind;

use super::memory::{BLOCK_PINS, BLOCKS, PinMemory};
use super::word::{PinValue, PinWord};
use crate::create::new_uuid;
use crate::error::{PoolError, Result};
use crate::membership::{Byte, Membership};

/// How many words are looked at for a free one before another block is claimed.
const MOST_LOOKED_AT: usize = 2 * BLOCK_PINS;
/// How far apart threads begin: two cache lines.
const THREAD_PINS: usize = 16;

/// The number of threads that have set a pin.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Where this thread looks for a free word first, in any pool.
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

/// The words of all handles, as one of them sees them.
pub(crate) struct Blocks {
    memory: PinMemory,
    /// This handle's number in the blocks it owns.
    nonce: u64,
    /// Blocks of this handle, in the order of their places; as many as `own_count`.
    own: Box<[AtomicU32]>,
    own_count: AtomicUsize,
    claiming: Mutex<()>,
}

impl Blocks {
    pub fn new(memory: PinMemory) -> Result<Blocks> {
        Ok(Blocks {
            memory,
            nonce: new_uuid()?.as_u64_pair().1 | 1,
            own: (0..BLOCKS).map(|_| AtomicU32::new(0)).collect(),
            own_count: AtomicUsize::new(0),
            claiming: Mutex::new(()),
        })
    }

    /// The descriptor of their memory, where others share it.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.memory.file()
    }

    /// Whether other handles can have pins.
    pub fn is_shared(&self) -> bool {
        self.memory.is_shared()
    }

    /// Sets a pin. Returns its place.
    #[inline]
    pub fn set(&self, members: &Membership, value: PinValue) -> Result<usize> {
        loop {
            // Acquire: pairs with the Release in `claim`; the blocks are there, and cleared.
            let places = self.own_count.load(Acquire) * BLOCK_PINS;
            if let Some(place) = self.set_within(places, places.min(MOST_LOOKED_AT), value) {
                return Ok(place);
            }
            if let Err(full) = self.claim(members, places) {
                // There may be one further on.
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
            // Relaxed: before the pin itself, which whoever looks sees together with this.
            let used_words = &self.memory.owner(block).used_words;
            if used_words.load(Relaxed) <= index as u64 {
                used_words.fetch_max(index as u64 + 1, Relaxed);
            }
            if self.memory.block(block)[index].try_set(value) {
                NEXT.with(|next| next.set(place + 1));
                return Some(place);
            }
            place += 1;
        }
        None
    }

    #[inline]
    fn locate(&self, place: usize) -> (usize, usize) {
        // Relaxed: the place is one that `own_count` covers.
        (self.own[place / BLOCK_PINS].load(Relaxed) as usize, place % BLOCK_PINS)
    }

    #[inline]
    pub fn clear(&self, place: usize) {
        let (block, index) = self.locate(place);
        self.memory.block(block)[index].clear();
        // It is in the cache.
        NEXT.with(|next| next.set(place));
    }

    /// Claims another block, unless another thread has done it since there were `places`.
    #[cold]
    fn claim(&self, members: &Membership, places: usize) -> Result<()> {
        let _claiming = self.claiming.lock().unwrap_or_else(|broken| broken.into_inner());
        let count = self.own_count.load(Relaxed);
        if count * BLOCK_PINS != places {
            return Ok(());
        }
        for block in 0..BLOCKS {
            // Its own byte would let it in once more.
            if self.memory.owner(block).nonce.load(Relaxed) == self.nonce
                || !self.take_block(members, block)
            {
                continue;
            }
            // Relaxed: before any pin in the block, which a look sees together with this.
            self.memory.used_blocks().fetch_max(block as u64 + 1, Relaxed);
            self.own[count].store(block as u32, Relaxed);
            // Release: pairs with `set`.
            self.own_count.store(count + 1, Release);
            NEXT.with(|next| next.set(places + next_of_thread() % BLOCK_PINS));
            return Ok(());
        }
        Err(PoolError::TooManyPins { limit: BLOCKS * BLOCK_PINS })
    }

    /// Makes a block that no handle has this handle's, without pins. See the module's documentation.
    fn take_block(&self, members: &Membership, block: usize) -> bool {
        let byte = Byte::PinBlock(block);
        if self.is_shared() && !members.try_lock(byte, LockKind::Exclusive).unwrap_or(false) {
            return false;
        }
        // Relaxed: the lock orders it behind what an earlier owner has done, and whoever sees a pin that is set later sees this.
        let owner = self.memory.owner(block);
        owner.nonce.store(self.nonce, Relaxed);
        self.memory.block(block).iter().for_each(|word| word.store(0, Relaxed));
        owner.used_words.store(0, Relaxed);
        true
    }

    /// The pins that are wanted. The caller has published what it wants to know the pins for, and had a fence behind that.
    pub fn look(
        &self,
        members: &Membership,
        is_wanted: impl Fn(PinValue) -> bool,
    ) -> Vec<PinValue> {
        let mut values = Vec::new();
        // Relaxed, here and below: stored before the first pin of the block, so seen if that is.
        let used_blocks = (self.memory.used_blocks().load(Relaxed) as usize).min(BLOCKS);
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
            let is_own = nonce == self.nonce || !self.is_shared();
            if values.len() > first
                && !is_own
                && !members.is_locked_by_other(Byte::PinBlock(block), LockKind::Exclusive)
            {
                // A dead process's, until a handle claims the block.
                values.truncate(first);
            }
        }
        values
    }

    /// Gives all blocks up. The handle has no pins any more.
    pub fn leave(&self) {
        for own in &self.own[..self.own_count.load(Acquire)] {
            self.memory.owner(own.load(Relaxed) as usize).nonce.store(0, Release);
        }
    }
}
