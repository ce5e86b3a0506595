//! Pins: readers say which pages they look at, so that these are not used again under them.
//!
//! A pin is one word in shared memory ([`word`] says what is in it and why the order of loads and stores suffices; [`memory`],
//! where it lies). Setting one and taking it away is a store each, without a system call or a lock, in words that a handle has for
//! itself. Nobody is asked and nobody waits: whoever frees pages looks at the pins before it gives them out again ([`freed`](crate::freed)).
//!
//! # Blocks
//! Words come in blocks of 512 that a handle *claims*. Its claim lasts as long as the lock it holds on the block's byte of the pool
//! file (a shared lock, since readers cannot take others), so a process that dies, however, has no pins from then on, and one that is
//! stopped keeps them.
//!
//! | step of a claim | afterwards |
//! |---|---|
//! | nobody has the byte locked | |
//! | lock it | others let the block be |
//! | still nobody *else* has it locked | of two that came this far at once at least one sees the other, and both or one of them goes on to another block |
//! | the owner's number becomes this handle's, by compare-and-swap | |
//! | all words are cleared: they may be a dead process's | whoever looks sees no pins |
//! | the block is one of this handle's | |
//!
//! Whoever looks and finds pins in a block that nobody has locked claims it the same way, clears it, and gives it up.
//!
//! # Open
//! A pin of the inode itself says how somebody uses it ([`InodeUse`]), and nothing about its pages. An *open* pin keeps a file that has no name any more in existence: its inode
//! is given back by whoever takes the last open pin away, or when the pool is recovered. Who opens a file pins it *and then* looks whether it still has a
//! name; who removes the last name *first* makes that visible *and then* looks for open pins. So at least one of them sees the other.
//!
//! A name is nearly always removed of a file that nobody has open, and then the transaction that does it gives the inode back as well. What
//! it makes visible first is a *claim*: the inode's number in a word of the segment.
//!
//! | who opens | | who removes the last name, with the metadata mutex |
//! |---|---|---|
//! | stores the pin | | stores the claim |
//! | **fence** | | **fence** |
//! | loads the claim: none | | loads the pins: none, or it leaves the inode for later |
//! | looks whether it has a name | | publishes the change; then takes the claim away |
//!
//! As with pins of pages, not both find none. Who finds the claim waits until it is gone, which is as long as the mutex is held, and
//! looks for the name then. A holder that dies leaves its claim to whoever repairs.
//!
//! In a forked child pins are inert: they stay the parent's.

mod memory;
mod word;

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicUsize};

use uuid::Uuid;

use self::memory::PinMemory;
pub(crate) use self::memory::{BLOCK_PINS, BLOCKS};
pub use self::word::InodeUse;
pub(crate) use self::word::{PinSet, PinValue, PinWord};
use crate::core::Core;
use crate::create::new_uuid;
use crate::error::{PoolError, Result};
use crate::image_words::{self, pin_in_time};
use crate::membership::{Byte, Membership};
use crate::pool::Pool;

use aquifer_sys::lock::LockKind;
use aquifer_sys::patience::Waited;
use aquifer_sys::shared_memory::SharedMemory;

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

/// The pins of all handles, as one of them sees them.
pub(crate) struct Pins {
    memory: PinMemory,
    /// This handle's number in the blocks it owns.
    nonce: u64,
    /// Blocks of this handle, in the order of their places; as many as `own_count`.
    own: Box<[AtomicU32]>,
    own_count: AtomicUsize,
    claiming: Mutex<()>,
}

impl Pins {
    fn new(memory: PinMemory) -> Result<Pins> {
        Ok(Pins {
            memory,
            nonce: new_uuid()?.as_u64_pair().1 | 1,
            own: (0..BLOCKS).map(|_| AtomicU32::new(0)).collect(),
            own_count: AtomicUsize::new(0),
            claiming: Mutex::new(()),
        })
    }

    /// Makes the pins of a segment that others can open.
    pub fn create(path: &Path, pool: Uuid, mode: u32) -> Result<Pins> {
        Pins::new(PinMemory::create(path, pool, mode)?)
    }

    /// Those in memory that is there already.
    pub fn adopt(memory: SharedMemory, pool: Uuid) -> std::result::Result<Pins, String> {
        Pins::new(PinMemory::adopt(memory, pool)?).map_err(|error| error.to_string())
    }

    /// The descriptor of their memory, where others share it.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.memory.file()
    }

    /// Pins that nobody else sees.
    pub fn private() -> Result<Pins> {
        Pins::new(PinMemory::private()?)
    }

    /// Sets a pin. Returns its place.
    #[inline]
    fn set(&self, members: &Membership, value: PinValue) -> Result<usize> {
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
    fn clear(&self, place: usize) {
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
        // Who collides with somebody at the last free block tries once more.
        for block in (0..BLOCKS).chain(0..BLOCKS) {
            if self.memory.owner(block).nonce.load(Relaxed) == self.nonce
                || !self.take_block(members, block)
            {
                continue;
            }
            // AcqRel: before any pin in the block.
            self.memory.used_blocks().fetch_max(block as u64 + 1, AcqRel);
            self.own[count].store(block as u32, Relaxed);
            // Release: pairs with `set`.
            self.own_count.store(count + 1, Release);
            NEXT.with(|next| next.set(places + next_of_thread() % BLOCK_PINS));
            return Ok(());
        }
        Err(PoolError::TooManyPins { limit: BLOCKS * BLOCK_PINS })
    }

    /// Makes a block that nobody has this handle's, without pins. See the module's documentation.
    fn take_block(&self, members: &Membership, block: usize) -> bool {
        let byte = Byte::PinBlock(block);
        let is_taken = || members.is_locked_by_other(byte, LockKind::Exclusive);
        let owner = self.memory.owner(block);
        if self.memory.is_shared() {
            if is_taken() || !members.try_lock(byte, LockKind::Shared).unwrap_or(false) {
                return false;
            }
            if is_taken() {
                members.unlock(byte);
                return false;
            }
        }
        let before = owner.nonce.load(Acquire);
        if owner.nonce.compare_exchange(before, self.nonce, AcqRel, Relaxed).is_err() {
            members.unlock(byte);
            return false;
        }
        self.memory.block(block).iter().for_each(|word| word.store(0, Relaxed));
        owner.used_words.store(0, Release);
        true
    }

    fn give_up_block(&self, members: &Membership, block: usize) {
        // Release: the block is cleared.
        self.memory.owner(block).nonce.store(0, Release);
        if self.memory.is_shared() {
            members.unlock(Byte::PinBlock(block));
        }
    }

    /// Looks at all pins. Whoever sets one later finds everything that the caller has stored before.
    ///
    /// With the metadata mutex, and so not while another one looks here.
    pub fn look(&self, members: &Membership) -> PinSet {
        self.look_for(members, |_| true)
    }

    fn look_for(&self, members: &Membership, is_wanted: impl Fn(PinValue) -> bool) -> PinSet {
        <crate::sync::AtomicU64 as PinWord>::fence_before_look();
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
            let is_own = nonce == self.nonce || !self.memory.is_shared();
            if values.len() > first
                && !is_own
                && !members.is_locked_by_other(Byte::PinBlock(block), LockKind::Exclusive)
            {
                values.truncate(first);
                if self.take_block(members, block) {
                    self.give_up_block(members, block);
                }
            }
        }
        PinSet::new(values)
    }

    /// Gives all blocks up. The handle has no pins any more.
    pub fn leave(&self) {
        for own in &self.own[..self.own_count.load(Acquire)] {
            self.memory.owner(own.load(Relaxed) as usize).nonce.store(0, Release);
        }
    }
}

/// Keeps pages from being used again, while it lives. Ends with its process.
///
/// It cannot be cloned: see the top of `pins/word.rs`.
#[must_use = "the pages are kept only as long as this lives"]
pub struct Pin<'a> {
    core: &'a Core,
    place: usize,
}

impl std::fmt::Debug for Pin<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Pin").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Pin<'_> {
    /// The same pin, for something that keeps the pool open by itself: `pool` is the one that it was made by.
    pub fn into_owned(self, pool: &Pool) -> OwnedPin {
        assert!(std::ptr::eq(self.core, &**pool.core()), "a pin of another pool");
        let pin = std::mem::ManuallyDrop::new(self);
        OwnedPin { pool: pool.clone(), place: pin.place }
    }
}

impl Drop for Pin<'_> {
    #[inline]
    fn drop(&mut self) {
        self.core.unpin(self.place);
    }
}

/// A [`Pin`], or an open pin, that keeps the pool open as well.
#[must_use = "the pages, or the inode, are kept only as long as this lives"]
#[derive(Debug)]
pub struct OwnedPin {
    pool: Pool,
    place: usize,
}

impl Drop for OwnedPin {
    fn drop(&mut self) {
        self.pool.core().unpin(self.place);
    }
}

impl Core {
    #[inline]
    fn set_pin(&self, inode: u64, value: Option<PinValue>) -> Result<usize> {
        if !self.process.is_current() {
            return Err(PoolError::Forked);
        }
        let value = value.ok_or_else(|| PoolError::Parameter {
            what: "the inode to be pinned",
            value: inode.to_string(),
            reason: "there is none of that number",
        })?;
        self.pins.set(&self.membership, value)
    }

    /// Waits until no transaction is about to give an inode back without having looked at a pin that was just set.
    fn wait_while_claimed(&self, inode: u64) -> Result<()> {
        // Acquire: pairs with the Release when the claim is taken away; the inode is as that transaction left it.
        let is_claimed = || self.control().claimed_inode.load(Acquire) == inode;
        let mut waited = Waited::new();
        while is_claimed() {
            if self.is_writable {
                // It waits for whoever runs, and repairs what a dead one left.
                drop(self.lock()?);
            } else if waited.look() > self.stall_timeout {
                return Err(PoolError::Stalled { pid: 0, what: "the metadata lock" });
            } else {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    #[inline]
    fn unpin(&self, place: usize) {
        // In a fork the pin is the parent's.
        if self.process.is_current() {
            self.pins.clear(place);
        }
    }

    /// What a file's inode has for incarnation and layout version; `None` if it is none.
    #[inline]
    pub fn file_version(&self, inode: u64) -> Option<(u64, u64)> {
        image_words::version_of_file(self.segment.slot(inode)?)
    }

    /// Whether anybody has a pin of this kind of an inode. With the metadata mutex.
    pub fn is_used(&self, _locked: &crate::core::Locked<'_>, inode: u64, usage: InodeUse) -> bool {
        let Some(wanted) = PinValue::of_use(inode, usage) else { return false };
        self.pins.look_for(&self.membership, |value| value == wanted).is_used(inode, usage)
    }
}

impl Pool {
    /// Pins the pages that an inode has as of `layout_version`: those that a later change of it frees are not used again while the result
    /// lives, in any process. Takes some nanoseconds. Safe from any thread.
    ///
    /// The pages may have been freed before the pin was there. The caller looks at the layout version again *afterwards*, as
    /// [`Pool::pin_current`] does.
    ///
    /// # Errors
    /// [`PoolError::TooManyPins`]; [`PoolError::Forked`]; [`PoolError::Parameter`] for an inode that cannot be.
    #[inline]
    pub fn pin(&self, inode: u64, layout_version: u64) -> Result<Pin<'_>> {
        let core = self.core();
        let place = core.set_pin(inode, PinValue::of_version(inode, layout_version))?;
        Ok(Pin { core, place })
    }

    /// Pins the pages that a file has, if incarnation and layout version of its inode are still these; else `None`, and the caller
    /// reads the inode again. While the result lives, the pages that the inode named then hold what this file has written to them.
    ///
    /// # Errors
    /// As for [`Pool::pin`]; [`PoolError::Stalled`].
    #[inline]
    pub fn pin_current(
        &self,
        inode: u64,
        incarnation: u64,
        layout_version: u64,
    ) -> Result<Option<Pin<'_>>> {
        pin_in_time(
            || self.pin(inode, layout_version),
            || self.core().has_layout(inode, incarnation, layout_version),
        )
    }

    /// As [`Pool::pin_current`], if nothing at all was changed in the pool since its metadata had this version
    /// ([`Pool::metadata_version`]), when the inode had this layout version.
    ///
    /// # Errors
    /// As for [`Pool::pin`].
    #[inline]
    pub fn pin_unchanged(
        &self,
        inode: u64,
        layout_version: u64,
        metadata_version: u64,
    ) -> Result<Option<Pin<'_>>> {
        pin_in_time(
            || self.pin(inode, layout_version),
            // A change of the layout is one of the metadata.
            || Ok(self.core().metadata_version() == metadata_version),
        )
    }

    /// As [`Pool::pin`], for something that keeps the pool open by itself.
    ///
    /// # Errors
    /// As for [`Pool::pin`].
    pub fn pin_owned(&self, inode: u64, layout_version: u64) -> Result<OwnedPin> {
        let place = self.core().set_pin(inode, PinValue::of_version(inode, layout_version))?;
        Ok(OwnedPin { pool: self.clone(), place })
    }

    /// Says that an inode is in use, while the result lives; nothing about its pages. Who opens a file looks *afterwards* whether the
    /// inode still has a link.
    ///
    /// # Errors
    /// As for [`Pool::pin`].
    pub fn pin_inode(&self, inode: u64, usage: InodeUse) -> Result<OwnedPin> {
        let place = self.core().set_pin(inode, PinValue::of_use(inode, usage))?;
        let pin = OwnedPin { pool: self.clone(), place };
        self.core().wait_while_claimed(inode)?;
        Ok(pin)
    }

    /// Whether any process says that it uses an inode so: [`Pool::pin_inode`].
    ///
    /// An inode may be given back when it had no link *before* this was called, by a transaction that was visible then, and this says
    /// that it is not open. [`Transaction::is_used`](crate::Transaction::is_used) is the same inside a transaction.
    ///
    /// # Errors
    /// [`PoolError::Stalled`]; [`PoolError::ReadOnly`] for readers.
    pub fn is_used(&self, inode: u64, usage: InodeUse) -> Result<bool> {
        self.core().check_writable()?;
        let locked = self.core().lock()?;
        Ok(self.core().is_used(&locked, inode, usage))
    }
}
