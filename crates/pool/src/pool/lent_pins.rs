//! Pins that outlive the process that sets them: lent by a keeper, set by a server.
//!
//! A server may die at any moment, and what its clients have open must stay. So a second process,
//! which does nothing that can fail, claims blocks and *lends* them to the server: the keeper's lock
//! shows that the blocks have an owner, and the server stores to their words. The next server
//! borrows the same blocks and finds the pins as the last one left them.
//!
//! | | claims the block, clears it, holds its lock | stores to its words | a scan counts its pins |
//! |---|---|---|---|
//! | own block | this handle | this handle | while this handle lives |
//! | lent block | the keeper | the server, one process at a time | while the keeper lives |
//!
//! Lent blocks have a nonce of their own, by which a scan by the keeper, whose own lock never
//! conflicts, counts the pins as well, and by which the server knows that a block is lent, and by this
//! keeper: the numbers alone may be those of another handle's own blocks by now.
//!
//! When the keeper leaves or dies, the pins count no more, and another handle may claim the block. The
//! server must then end; it notices at its next call, by the lock of the block and the nonce. That
//! handle may claim the block during the call, and the server may be stopped in it for any time. So
//! lent pins are another value than own ones, and what a late server removes is never another
//! handle's own pin. (Only if that handle lends the block as well, and its server sets a pin of the
//! same inode in the same word, can a server that was stopped in [`BorrowedPins::clear`] remove that.)

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::Pool;
use crate::error::{PoolError, Result};
use crate::pins::{BLOCK_PINS, BlockList, Blocks, LentPins, PinPlaces, PinValue, PinWord};
use crate::sync::AtomicU64;

/// The place of a pin in borrowed blocks: a number that stays valid as long as the blocks are lent,
/// in any process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PinPlace(pub u32);

impl PinPlace {
    fn new(block: usize, index: usize) -> PinPlace {
        // At most 2¹⁴ blocks of 2⁹ words.
        PinPlace((block * BLOCK_PINS + index) as u32)
    }

    fn parts(self) -> (usize, usize) {
        (self.0 as usize / BLOCK_PINS, self.0 as usize % BLOCK_PINS)
    }
}

/// Open pins in blocks that another process has lent: from [`Pool::borrow_pins`]. They keep inodes
/// as long as that process has the pool open, whatever becomes of this one. Safe from any thread.
pub struct BorrowedPins {
    pool: Pool,
    blocks: BlockList,
    /// The nonce of the blocks; 0 without any.
    lender: AtomicU64,
    adding: Mutex<()>,
    free: AtomicUsize,
    /// Where the next search for a free word begins.
    next: AtomicUsize,
}

impl std::fmt::Debug for BorrowedPins {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("BorrowedPins").field("free", &self.free).finish_non_exhaustive()
    }
}

const GONE: &str = "no living process has lent it";

fn refused(value: impl ToString, reason: &'static str) -> PoolError {
    PoolError::Parameter { what: "the borrowed block of pins", value: value.to_string(), reason }
}

impl Pool {
    /// Lends `blocks` blocks of 512 pins to another process, which sets them by
    /// [`Pool::borrow_pins`]. They are lent until this handle is closed, or its process dies; until
    /// then each pin in them keeps its inode. All blocks that a handle lends have one nonce. After an
    /// error none is lent.
    ///
    /// # Errors
    /// [`PoolError::TooManyPins`], [`PoolError::SharedMemory`] if there is no memory;
    /// [`PoolError::ReadOnly`]; [`PoolError::Parameter`] in a pool that no other process can open;
    /// [`PoolError::Forked`], [`PoolError::LocksLost`].
    pub fn lend_pins(&self, blocks: usize) -> Result<LentPins> {
        self.check_kept()?;
        self.shared_blocks()?.lend(&self.core().handle.members.locks, blocks)
    }

    /// Borrows the blocks of pins that another handle has lent, and leaves the pins in them as they
    /// are. Only one process may use them at a time: the next one borrows them when the last has
    /// died.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let keeper = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// use aquifer_pool::{InodeUse, Pool};
    ///
    /// let lent = keeper.lend_pins(1)?;
    /// let server = Pool::open(&path)?;
    /// let place = server.borrow_pins(&lent)?.set(5)?;
    /// drop(server); // or it dies
    /// let server = Pool::open(&path)?;
    /// let pins = server.borrow_pins(&lent)?;
    /// assert!(server.is_used(5, InodeUse::Open)?);
    /// assert_eq!(pins.iter().collect::<Vec<_>>(), [(place, 5)]);
    /// pins.clear(place, 5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`PoolError::Parameter`] if no living handle other than this one has lent these blocks;
    /// [`PoolError::ReadOnly`], [`PoolError::Forked`], [`PoolError::LocksLost`].
    pub fn borrow_pins(&self, lent: &LentPins) -> Result<BorrowedPins> {
        let pins = BorrowedPins {
            pool: self.clone(),
            blocks: BlockList::new()?,
            lender: AtomicU64::new(0),
            adding: Mutex::default(),
            free: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
        };
        pins.add(lent)?;
        Ok(pins)
    }

    fn shared_blocks(&self) -> Result<&Blocks> {
        let core = self.core();
        core.handle.check_writable()?;
        core.handle.members.check_kept()?;
        match &*core.pins.places {
            PinPlaces::Blocks(blocks) if blocks.is_shared() => Ok(blocks),
            _ => Err(refused("none", "this process has the pool for itself")),
        }
    }
}

impl BorrowedPins {
    /// Borrows more blocks, of the same handle; those that it has already stay as they are.
    ///
    /// # Errors
    /// As for [`Pool::borrow_pins`].
    pub fn add(&self, lent: &LentPins) -> Result<()> {
        self.pool.check_kept()?;
        let (words, locks) = (self.pool.shared_blocks()?, &self.pool.core().handle.members.locks);
        let _adding = self.adding.lock().unwrap_or_else(|broken| broken.into_inner());
        for &block in &lent.blocks {
            let known = self.blocks.iter().any(|known| known == block as usize);
            if !words.is_lent_by_other(locks, block as usize, lent.nonce) {
                return Err(refused(block, GONE));
            }
            // Relaxed: stored with `adding` held, and before the block is listed.
            if ![0, lent.nonce].contains(&self.lender.load(Relaxed)) {
                return Err(refused(block, "another handle has lent it"));
            }
            if !known {
                self.lender.store(lent.nonce, Relaxed);
                let pins = words.words(block as usize).iter().filter_map(PinWord::get).count();
                // Release: pairs with the Acquire of `free`. Before the block can be used.
                self.free.fetch_add(BLOCK_PINS - pins, Release);
                self.blocks.push(block as usize);
            }
        }
        Ok(())
    }

    /// Marks an inode as open until [`BorrowedPins::clear`], or until the lender is gone. A caller
    /// that knows the inode from before checks *afterwards* whether it is still there, as with
    /// [`Pool::pin_inode`]; in a transaction that holds the metadata mutex it needs not. Takes a system
    /// call, by which it knows that the lender was there when the pin was set, and allocates nothing.
    ///
    /// Waits while another transaction gives back this very inode. So a transaction must not set a pin
    /// of an inode that it has itself claimed ([`ChangeSlots::claim_unused`](crate::ChangeSlots)): it
    /// would wait for itself, until [`PoolError::Stalled`].
    ///
    /// # Errors
    /// [`PoolError::TooManyPins`] if no word is free; [`PoolError::Parameter`] if the lender is gone,
    /// or for an inode number that cannot exist; [`PoolError::Stalled`], [`PoolError::Forked`],
    /// [`PoolError::LocksLost`].
    pub fn set(&self, inode: u64) -> Result<PinPlace> {
        let core = self.pool.core();
        let words = self.pool.shared_blocks()?;
        let value = PinValue::of_lent(inode)
            .ok_or_else(|| refused(inode, "there is no inode of that number"))?;
        let count = self.blocks.len();
        // Relaxed: where a search begins.
        let first = self.next.load(Relaxed);
        let lender = self.lender.load(Relaxed);
        for at in (0..count * BLOCK_PINS).map(|at| (first + at) % (count * BLOCK_PINS)) {
            let (block, index) = (self.blocks.get(at / BLOCK_PINS), at % BLOCK_PINS);
            // Before it may be stored to.
            if !words.is_marked(block, lender) {
                return Err(refused(block, GONE));
            }
            if words.try_set(block, index, value) {
                // Afterwards: without the lender's lock the pin may have counted at no time.
                if !words.is_lent_by_other(&core.handle.members.locks, block, lender) {
                    words.words(block)[index].clear_if(value);
                    return Err(refused(block, GONE));
                }
                self.next.store(at + 1, Relaxed);
                self.free.fetch_sub(1, Relaxed);
                let place = PinPlace::new(block, index);
                let waited = core.pins.wait_while_claimed(inode);
                return waited.map(|()| place).inspect_err(|_| self.clear(place, inode));
            }
        }
        Err(PoolError::TooManyPins { limit: count * BLOCK_PINS })
    }

    /// Removes the pin of an inode; nothing if there is none at that place. The caller then frees the
    /// inode if it has no names.
    pub fn clear(&self, place: PinPlace, inode: u64) {
        let (block, index) = place.parts();
        let is_ours = self.blocks.iter().any(|known| known == block);
        let value = PinValue::of_lent(inode);
        let (Some(value), Ok(words), true) = (value, self.pool.shared_blocks(), is_ours) else {
            return;
        };
        let is_lent = words.is_marked(block, self.lender.load(Relaxed));
        if is_lent && words.words(block)[index].clear_if(value) {
            self.free.fetch_add(1, Relaxed);
        }
    }

    /// All pins and their inodes, in the order of their places.
    pub fn iter(&self) -> impl Iterator<Item = (PinPlace, u64)> + '_ {
        let words = self.pool.shared_blocks().ok();
        let blocks = words
            .into_iter()
            .flat_map(|words| self.blocks.iter().map(move |block| (block, words.words(block))));
        blocks.flat_map(|(block, words)| {
            let pins = words.iter().enumerate();
            pins.filter_map(move |(index, word)| {
                word.get().map(|value| (PinPlace::new(block, index), value.inode()))
            })
        })
    }

    /// How many pins can be set before more blocks are needed.
    pub fn free(&self) -> usize {
        // Acquire: pairs with the Release in `add`.
        self.free.load(Acquire)
    }
}
