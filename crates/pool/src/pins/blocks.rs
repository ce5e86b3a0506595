//! Pins of writers: words of shared memory, in blocks that handles claim.
//!
//! A block has 512 words. A handle claims a block with an exclusive lock on the block's byte of the
//! pool file. The claim lasts as long as the lock: the pins of a process that dies in any way end
//! with it, and a stopped process keeps its pins.
//!
//! | step of a claim | afterwards |
//! |---|---|
//! | lock the block's byte | no other handle owns the block |
//! | store this handle's nonce as the owner's | |
//! | clear all words: a dead process may have left pins there | a scan finds no pins |
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
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicUsize};

use aquifer_sys::lock::LockKind;

use super::memory::{BLOCK_PINS, PinMemory};
use super::word::{PinValue, PinWord};
use crate::error::{PoolError, Result};
use crate::membership::{Byte, Membership, PIN_BLOCKS};
use crate::random::new_uuid;

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

/// The words of all handles, as one handle uses them.
pub(crate) struct Blocks {
    memory: PinMemory,
    /// The nonce that marks the blocks this handle owns.
    nonce: u64,
    /// Blocks of this handle, in the order of their places; `own_count` entries are valid.
    own: Box<[AtomicU32]>,
    own_count: AtomicUsize,
    claiming: Mutex<()>,
}

impl Blocks {
    pub fn new(memory: PinMemory) -> Result<Blocks> {
        Ok(Blocks {
            memory,
            nonce: new_uuid()?.as_u64_pair().1 | 1,
            own: (0..PIN_BLOCKS).map(|_| AtomicU32::new(0)).collect(),
            own_count: AtomicUsize::new(0),
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
            // Acquire: pairs with the Release in `claim`; the blocks are listed and cleared.
            let places = self.own_count.load(Acquire) * BLOCK_PINS;
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
            // Relaxed: stored before the pin itself, so a scan that sees the pin sees this too.
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
        // Relaxed: `own_count` covers this place, and its Acquire load ordered the entry.
        (self.own[place / BLOCK_PINS].load(Relaxed) as usize, place % BLOCK_PINS)
    }

    #[inline]
    pub fn clear(&self, place: usize) {
        let (block, index) = self.locate(place);
        self.memory.block(block)[index].clear();
        // The word is in the cache.
        NEXT.with(|next| next.set(place));
    }

    /// Claims another block, unless another thread has done so since there were `places`.
    #[cold]
    fn claim(&self, members: &Membership, places: usize) -> Result<()> {
        let _claiming = self.claiming.lock().unwrap_or_else(|broken| broken.into_inner());
        let count = self.own_count.load(Relaxed);
        if count * BLOCK_PINS != places {
            return Ok(());
        }
        for block in 0..PIN_BLOCKS {
            // The handle's own lock would not stop it from claiming the block twice.
            if self.memory.owner(block).nonce.load(Relaxed) == self.nonce
                || !self.take_block(members, block)
            {
                continue;
            }
            // Relaxed: stored before any pin in the block, so a scan that sees a pin sees this too.
            self.memory.used_blocks().fetch_max(block as u64 + 1, Relaxed);
            self.own[count].store(block as u32, Relaxed);
            // Release: pairs with the Acquire in `set`.
            self.own_count.store(count + 1, Release);
            NEXT.with(|next| next.set(places + next_of_thread() % BLOCK_PINS));
            return Ok(());
        }
        Err(PoolError::TooManyPins { limit: PIN_BLOCKS * BLOCK_PINS })
    }

    /// Claims a block that no handle owns and clears its pins. See the module's documentation.
    fn take_block(&self, members: &Membership, block: usize) -> bool {
        let byte = Byte::PinBlock(block);
        if self.is_shared() && !members.try_lock(byte, LockKind::Exclusive).unwrap_or(false) {
            return false;
        }
        // Relaxed: the lock orders this after the earlier owner's stores, and a scan that sees a
        // pin set later sees these stores too.
        let owner = self.memory.owner(block);
        owner.nonce.store(self.nonce, Relaxed);
        self.memory.block(block).iter().for_each(|word| word.store(0, Relaxed));
        owner.used_words.store(0, Relaxed);
        true
    }

    /// Returns the pins that `is_wanted` accepts. The caller has published its change, followed by
    /// a fence.
    pub fn look(
        &self,
        members: &Membership,
        is_wanted: impl Fn(PinValue) -> bool,
    ) -> Vec<PinValue> {
        let mut values = Vec::new();
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
            let is_own = nonce == self.nonce || !self.is_shared();
            if values.len() > first
                && !is_own
                && !members.is_locked_by_other(Byte::PinBlock(block), LockKind::Exclusive)
            {
                // The owner is dead: its pins do not count, and remain until a handle claims the
                // block.
                values.truncate(first);
            }
        }
        values
    }

    /// Gives up all blocks. The handle has no pins any more.
    pub fn leave(&self) {
        for own in &self.own[..self.own_count.load(Acquire)] {
            self.memory.owner(own.load(Relaxed) as usize).nonce.store(0, Release);
        }
    }
}
