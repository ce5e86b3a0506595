//! The memory that the pins of writers lie in: a second segment. Readers do not open it.
//!
//! ```text
//!  ┌────────────────────────────────────┬───────────────┬───────────────┬───
//!  │ magic, uuid, owner of each block   │ block 0:      │ block 1:      │ …
//!  │                                    │ 512 words     │ 512 words     │
//!  └────────────────────────────────────┴───────────────┴───────────────┴───
//! ```
//!
//! It lies beside the segment, is named after it, has the same permissions, and comes and goes with it.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_sys::memory;
use aquifer_sys::shared_memory::{SharedMemory, SharedMemoryError};
use uuid::Uuid;

use crate::error::{PoolError, Result};
use crate::sync::AtomicU64;

/// Blocks of pins that all handles can claim together.
pub(crate) const BLOCKS: usize = 1024;
/// Pins of one block.
pub(crate) const BLOCK_PINS: usize = 512;

const MAGIC: u64 = u64::from_le_bytes(*b"AQPINS02");

/// Whose a block is.
#[repr(C)]
pub(crate) struct Owner {
    /// A number of the handle's own; 0 if there has been none since the block was cleared.
    pub nonce: AtomicU64,
    /// Words from this one on have not been used by this owner.
    pub used_words: AtomicU64,
}

#[repr(C)]
struct Header {
    magic: AtomicU64,
    uuid: [AtomicU64; 2],
    /// Blocks from this one on have not been claimed by anybody.
    used_blocks: AtomicU64,
    owners: [Owner; BLOCKS],
}

const HEADER_BYTES: usize = size_of::<Header>().next_multiple_of(4096);
const LEN_BYTES: usize = HEADER_BYTES + BLOCKS * BLOCK_PINS * 8;

/// The memory of pins, mapped into this process.
pub(crate) enum PinMemory {
    /// That of all processes that have the pool open.
    Shared(SharedMemory),
    /// That of a process that nobody shares anything with.
    Private(PrivateMemory),
}

/// Zeros, had when they are touched.
pub(crate) struct PrivateMemory(*mut u8);

// SAFETY: only reached as atomics.
unsafe impl Send for PrivateMemory {}
// SAFETY: as above.
unsafe impl Sync for PrivateMemory {}

impl Drop for PrivateMemory {
    fn drop(&mut self) {
        // SAFETY: mapped with this length by `private`, and only reached through this.
        let _ = unsafe { memory::unmap(self.0, LEN_BYTES) };
    }
}

impl PinMemory {
    /// Makes a segment that other writers can open.
    pub fn create(path: &Path, pool: Uuid, mode: u32) -> Result<PinMemory> {
        let memory = SharedMemory::create_at(path, LEN_BYTES, LEN_BYTES, mode)
            .map_err(PoolError::SharedMemory)?;
        let made = PinMemory::Shared(memory);
        let (high, low) = pool.as_u64_pair();
        made.header().uuid[0].store(high, Relaxed);
        made.header().uuid[1].store(low, Relaxed);
        // Others find it through the superblock, which is written later.
        made.header().magic.store(MAGIC, Relaxed);
        Ok(made)
    }

    /// The segment that another process made; the error says why it does not belong to this pool.
    pub fn adopt(memory: SharedMemory, pool: Uuid) -> std::result::Result<PinMemory, String> {
        if memory.len_bytes() < LEN_BYTES {
            return Err("its part for pins is too small".to_owned());
        }
        let opened = PinMemory::Shared(memory);
        let (high, low) = pool.as_u64_pair();
        let found = [&opened.header().magic, &opened.header().uuid[0], &opened.header().uuid[1]];
        match found.map(|word| word.load(Relaxed)) == [MAGIC, high, low] {
            true => Ok(opened),
            false => Err("its part for pins belongs to another pool".to_owned()),
        }
    }

    /// Memory for this process alone.
    pub fn private() -> Result<PinMemory> {
        let memory = memory::map_anonymous(LEN_BYTES).map_err(|source| {
            let len_bytes = LEN_BYTES as u64;
            PoolError::SharedMemory(SharedMemoryError::NoSpace { len_bytes, source })
        })?;
        Ok(PinMemory::Private(PrivateMemory(memory)))
    }

    /// The descriptor, where there is one.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match self {
            PinMemory::Shared(memory) => Some(memory.file()),
            PinMemory::Private(_) => None,
        }
    }

    pub fn is_shared(&self) -> bool {
        matches!(self, PinMemory::Shared(_))
    }

    fn start(&self) -> *mut u8 {
        match self {
            PinMemory::Shared(memory) => memory.start(),
            PinMemory::Private(memory) => memory.0,
        }
    }

    fn header(&self) -> &Header {
        // SAFETY: the memory is at least this long, page-aligned, lives as long as `self`, and all of `Header` is atomics.
        unsafe { &*self.start().cast::<Header>() }
    }

    /// How many blocks have been claimed, at most.
    pub fn used_blocks(&self) -> &AtomicU64 {
        &self.header().used_blocks
    }

    pub fn owner(&self, block: usize) -> &Owner {
        &self.header().owners[block]
    }

    #[inline]
    pub fn block(&self, block: usize) -> &[AtomicU64; BLOCK_PINS] {
        assert!(block < BLOCKS);
        // SAFETY: inside the memory.
        let start = unsafe { self.start().add(HEADER_BYTES + block * BLOCK_PINS * 8) };
        // SAFETY: aligned, inside the memory, which lives as long as `self`; atomics.
        unsafe { &*start.cast::<[AtomicU64; BLOCK_PINS]>() }
    }
}
