//! Where the pins of a handle lie, and setting, clearing and finding pins.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

use uuid::Uuid;

use super::blocks::Blocks;
use super::locks::{self, Locks};
use super::memory::PinMemory;
use super::set::PinSet;
use super::word::{InodeUse, PinValue, PinWord};
use crate::error::{PoolError, Result};
use crate::log::locks::{Locked, Log};
use crate::shared::handle::Handle;
use crate::shared::members::Members;
use crate::shared::membership::{Membership, READER_GROUPS, READER_LAYOUTS_END};

use aquifer_sys::patience::Waited;
use aquifer_sys::shared_memory::SharedMemory;

/// Where the pins of one handle lie, and its view of the pins of other handles.
pub(crate) enum PinPlaces {
    /// Of a writer, or of a handle that has the pool for itself.
    Blocks(Blocks),
    /// Of a reader that joined writers.
    Locks(Locks),
}

impl PinPlaces {
    /// Creates the pins of a segment that other writers can open.
    pub fn create(path: &Path, pool: Uuid, mode: u32) -> Result<PinPlaces> {
        Self::in_memory(PinMemory::create(path, pool, mode)?)
    }

    /// Adopts the pins in existing memory.
    pub fn adopt(memory: SharedMemory, pool: Uuid) -> std::result::Result<PinPlaces, String> {
        Self::in_memory(PinMemory::adopt(memory, pool)?).map_err(|error| error.to_string())
    }

    /// Creates pins that no other handle sees.
    pub fn private() -> Result<PinPlaces> {
        Self::in_memory(PinMemory::private()?)
    }

    /// Creates the pins of a reader of a pool that writers have open.
    pub fn of_reader() -> PinPlaces {
        PinPlaces::Locks(Locks::default())
    }

    fn in_memory(memory: PinMemory) -> Result<PinPlaces> {
        Ok(PinPlaces::Blocks(Blocks::new(memory)?))
    }

    /// The descriptor of the memory, if it is shared.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match self {
            PinPlaces::Blocks(blocks) => blocks.file(),
            PinPlaces::Locks(_) => None,
        }
    }

    /// Sets a pin and returns its place.
    #[inline]
    fn set(&self, members: &Membership, value: PinValue) -> Result<u64> {
        match self {
            PinPlaces::Blocks(blocks) => blocks.set(members, value).map(|place| place as u64),
            PinPlaces::Locks(locks) => locks.set(members, value),
        }
    }

    /// Clears a pin, unless this handle has lost its locks and another one has its place.
    #[inline]
    fn clear(&self, members: &Members, place: u64) {
        match self {
            PinPlaces::Blocks(blocks) => blocks.clear(place as usize),
            PinPlaces::Locks(locks) if members.check_kept().is_ok() => {
                locks.clear(&members.locks, place);
            }
            PinPlaces::Locks(_) => {}
        }
    }

    /// Scans all pins of pages. A pin that is set later is set by a thread that sees everything
    /// that the caller has stored before.
    ///
    /// The caller holds the metadata mutex.
    pub fn look(&self, members: &Membership) -> PinSet {
        self.look_for(members, PinValue::is_of_pages)
    }

    fn look_for(&self, members: &Membership, is_wanted: impl Fn(PinValue) -> bool) -> PinSet {
        <crate::sync::AtomicU64 as PinWord>::fence_before_look();
        match self {
            PinPlaces::Blocks(blocks) => {
                let locked = if blocks.is_shared() { locks::look(members) } else { Vec::new() };
                PinSet::new(blocks.look(members, is_wanted), locked)
            }
            // A reader frees nothing. What it cannot see counts as pinned.
            PinPlaces::Locks(_) => {
                let everything = READER_GROUPS..READER_LAYOUTS_END;
                PinSet::new(Vec::new(), [everything].into())
            }
        }
    }

    /// Whether any handle has a pin of this kind of an inode; as for [`PinPlaces::look`]. Checking
    /// readers takes one system call.
    fn is_used(&self, members: &Membership, inode: u64, usage: InodeUse) -> bool {
        <crate::sync::AtomicU64 as PinWord>::fence_before_look();
        let PinPlaces::Blocks(blocks) = self else { return true };
        !blocks.look(members, |value| value.is_of_use(inode, usage)).is_empty()
            // Readers have no writable pins.
            || (blocks.is_shared() && usage != InodeUse::Writable && locks::is_used(members, inode, usage))
    }

    /// The number of pins of any kind. The caller holds the metadata mutex.
    pub fn count(&self, members: &Membership) -> u64 {
        let uses = match self {
            PinPlaces::Blocks(blocks) if blocks.is_shared() => locks::look_at_uses(members).len(),
            _ => 0,
        };
        (self.look_for(members, |_| true).len() + uses) as u64
    }

    /// Gives up all blocks. The handle has no pins any more; pins that are locks end with the
    /// handle's other locks.
    pub fn leave(&self) {
        if let PinPlaces::Blocks(blocks) = self {
            blocks.leave();
        }
    }
}

/// Keeps pages from being reused while it lives. Ends with its process.
///
/// It cannot be cloned: see the top of `pins/word.rs`.
#[must_use = "the pages are kept only as long as this lives"]
pub struct Pin<'a> {
    pub(crate) pins: &'a Pins,
    pub(crate) place: u64,
}

impl std::fmt::Debug for Pin<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Pin").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Drop for Pin<'_> {
    #[inline]
    fn drop(&mut self) {
        self.pins.unpin(self.place);
    }
}

/// The pins that this handle sets.
pub(crate) struct Pins {
    pub handle: Arc<Handle>,
    /// Has the metadata mutex, to wait for a claim.
    pub log: Arc<Log>,
    pub places: Arc<PinPlaces>,
}

impl Pins {
    /// Without the locks a pin counts for no other handle, and its word may be another handle's.
    #[inline]
    pub fn set(&self, inode: u64, value: Option<PinValue>) -> Result<u64> {
        self.handle.members.check_process()?;
        self.handle.members.check_kept()?;
        let value = value.ok_or_else(|| PoolError::Parameter {
            what: "the inode to be pinned",
            value: inode.to_string(),
            reason: "there is none of that number",
        })?;
        self.places.set(&self.handle.members.locks, value)
    }

    /// Waits while a transaction that may have missed a pin set just before gives the inode back.
    pub fn wait_while_claimed(&self, inode: u64) -> Result<()> {
        // Acquire: pairs with the Release that removes the claim; the inode is as that transaction
        // left it.
        let is_claimed = || self.handle.control().claimed_inode.load(Acquire) == inode;
        let mut waited = Waited::new();
        while is_claimed() {
            if self.handle.members.is_writable {
                // This waits for the holder of the mutex, and repairs what a dead holder left.
                drop(self.log.lock()?);
            } else if waited.look() > self.handle.members.stall_timeout {
                return Err(PoolError::Stalled { pid: 0, what: "the metadata lock" });
            } else {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    #[inline]
    pub fn unpin(&self, place: u64) {
        // In a forked child the pin is the parent's.
        if self.handle.members.process.is_current() {
            self.places.clear(&self.handle.members, place);
        }
    }

    /// Whether any handle has a pin of this kind of an inode.
    pub fn is_used(&self, _locked: &Locked<'_>, inode: u64, usage: InodeUse) -> bool {
        self.places.is_used(&self.handle.members.locks, inode, usage)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::path::Path;
    use std::sync::Barrier;

    use super::*;
    use crate::pins::memory::BLOCK_PINS;
    use crate::random::new_uuid;
    use crate::shared::membership::Byte;

    fn open(path: &Path, pool: Uuid) -> PinPlaces {
        let file = SharedMemory::descriptor_at(path, true).unwrap();
        PinPlaces::adopt(SharedMemory::adopt(file, true).unwrap(), pool).unwrap()
    }

    /// An open file description of the pool file, for the locks of one handle.
    fn members(path: &Path) -> (File, Membership) {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let members = Membership::new(file.as_fd()).unwrap();
        (file, members)
    }

    /// One thread of a handle sets its first pin, and so claims the block of a dead process, while
    /// another thread of the handle scans the pins. The locks of one handle never conflict, and the
    /// pin must still persist.
    #[test]
    fn a_look_takes_no_pin_from_another_thread_of_its_handle() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let pool = new_uuid().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let memory = directory.path().join("pins");
        let observer = PinPlaces::create(&memory, pool, 0o600).unwrap();
        let (_file, of_observer) = members(file.path());
        let [dead, new] = [3, 4].map(|inode| PinValue::of_version(inode, 1).unwrap());
        for round in 0..4000 {
            {
                let pins = open(&memory, pool);
                let (_file, members) = members(file.path());
                pins.set(&members, dead).unwrap();
            }
            let pins = open(&memory, pool);
            let (_file, members) = members(file.path());
            let barrier = Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    barrier.wait();
                    drop(pins.look(&members));
                });
                barrier.wait();
                pins.set(&members, new).unwrap();
            });
            for (looks, members) in [(&pins, &members), (&observer, &of_observer)] {
                let seen = looks.look(members);
                assert!(seen.covers(PinValue::of_freed(4, 1), Some(2)), "round {round}");
                assert!(!seen.covers(PinValue::of_freed(3, 1), Some(2)), "round {round}");
            }
            pins.leave();
        }
    }

    /// Files that are open keep no pages, so a look at the pins of pages does not ask for their owners.
    /// And it asks for each owner once, not for each of its blocks.
    #[test]
    fn a_look_asks_once_for_an_owner_of_pins_of_pages() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let pool = new_uuid().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let memory = directory.path().join("pins");
        let observer = PinPlaces::create(&memory, pool, 0o600).unwrap();
        let (_file, of_observer) = members(file.path());
        let pins = open(&memory, pool);
        let (_file, members) = members(file.path());
        pins.set(&members, PinValue::of_use(7, InodeUse::Open).unwrap()).unwrap();
        assert_eq!(observer.look(&of_observer).len(), 0);
        assert_eq!(observer.count(&of_observer), 1);

        let value = PinValue::of_version(7, 1).unwrap();
        for _ in 0..BLOCK_PINS {
            pins.set(&members, value).unwrap();
        }
        // As if it had been asked for.
        members.unlock(Byte::PinBlock(1));
        assert_eq!(observer.look(&of_observer).len(), BLOCK_PINS);
        members.unlock(Byte::PinBlock(0));
        assert_eq!(observer.look(&of_observer).len(), 0);
    }
}
