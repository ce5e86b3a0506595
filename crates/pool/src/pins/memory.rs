//! The memory of the writers' pins: a second segment, which readers do not open.
//!
//! ```text
//!  ┌────────────────────────────────────┬───────────────┬───────────────┬───
//!  │ magic, uuid, owner of each block   │ block 0:      │ block 1:      │ …
//!  │                                    │ 512 words     │ 512 words     │
//!  └────────────────────────────────────┴───────────────┴───────────────┴───
//! ```
//!
//! It lies beside the segment, is named after it, has the same permissions, and is created and
//! removed with it.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_sys::memory;
use aquifer_sys::shared_memory::{SharedMemory, SharedMemoryError};
use uuid::Uuid;

use crate::error::{PoolError, Result};
use crate::membership::PIN_BLOCKS;
use crate::sync::AtomicU64;

/// Pins of one block.
pub(crate) const BLOCK_PINS: usize = 512;

const MAGIC: u64 = u64::from_le_bytes(*b"AQPINS02");

/// The owner of a block.
#[repr(C)]
pub(crate) struct Owner {
    /// The owning handle's nonce; 0 if the block has had no owner since it was cleared.
    pub nonce: AtomicU64,
    /// Words from this one on have not been used by this owner.
    pub used_words: AtomicU64,
}

#[repr(C)]
struct Header {
    magic: AtomicU64,
    uuid: [AtomicU64; 2],
    /// No handle has claimed blocks from this one on.
    used_blocks: AtomicU64,
    owners: [Owner; PIN_BLOCKS],
}

const HEADER_BYTES: usize = size_of::<Header>().next_multiple_of(4096);
const LEN_BYTES: usize = HEADER_BYTES + PIN_BLOCKS * BLOCK_PINS * 8;

/// The memory of pins, mapped into this process.
pub(crate) enum PinMemory {
    /// Shared by all processes that have the pool open for writing.
    Shared(SharedMemory),
    /// Private to a process that has the pool for itself.
    Private(PrivateMemory),
}

/// Anonymous zero pages, allocated on first access.
pub(crate) struct PrivateMemory(*mut u8);

// SAFETY: the memory is only accessed as atomics, and this value owns its mapping.
unsafe impl Send for PrivateMemory {}
// SAFETY: as above.
unsafe impl Sync for PrivateMemory {}

impl Drop for PrivateMemory {
    fn drop(&mut self) {
        // SAFETY: `private` mapped it with this length, and it is only reached through this value.
        let _ = unsafe { memory::unmap(self.0, LEN_BYTES) };
    }
}

impl PinMemory {
    /// Creates a segment that other writers can open.
    pub fn create(path: &Path, pool: Uuid, mode: u32) -> Result<PinMemory> {
        let memory = SharedMemory::create_at(path, LEN_BYTES, LEN_BYTES, mode)
            .map_err(PoolError::SharedMemory)?;
        let made = PinMemory::Shared(memory);
        let (high, low) = pool.as_u64_pair();
        made.header().uuid[0].store(high, Relaxed);
        made.header().uuid[1].store(low, Relaxed);
        // Relaxed: other processes find the segment through the superblock, which is written later.
        made.header().magic.store(MAGIC, Relaxed);
        Ok(made)
    }

    /// Adopts the segment that another process created; the error says why it does not belong to
    /// this pool.
    pub fn adopt(memory: SharedMemory, pool: Uuid) -> std::result::Result<PinMemory, String> {
        if memory.len_bytes() < LEN_BYTES {
            return Err("its part for pins is too small".to_owned());
        }
        let opened = PinMemory::Shared(memory);
        let (high, low) = pool.as_u64_pair();
        let found = [&opened.header().magic, &opened.header().uuid[0], &opened.header().uuid[1]];
        if found.map(|word| word.load(Relaxed)) == [MAGIC, high, low] {
            Ok(opened)
        } else {
            Err("its part for pins belongs to another pool".to_owned())
        }
    }

    /// Allocates memory private to this process.
    pub fn private() -> Result<PinMemory> {
        let memory = memory::map_anonymous(LEN_BYTES).map_err(|source| {
            let len_bytes = LEN_BYTES as u64;
            PoolError::SharedMemory(SharedMemoryError::NoSpace { len_bytes, source })
        })?;
        Ok(PinMemory::Private(PrivateMemory(memory)))
    }

    /// The descriptor, if the memory is shared.
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
        // SAFETY: the memory is at least this long, page-aligned and lives as long as `self`;
        // `Header` consists of atomics only.
        unsafe { &*self.start().cast::<Header>() }
    }

    /// An upper bound of the blocks that have been claimed.
    pub fn used_blocks(&self) -> &AtomicU64 {
        &self.header().used_blocks
    }

    pub fn owner(&self, block: usize) -> &Owner {
        &self.header().owners[block]
    }

    #[inline]
    pub fn block(&self, block: usize) -> &[AtomicU64; BLOCK_PINS] {
        assert!(block < PIN_BLOCKS);
        // SAFETY: the block lies within the memory's `LEN_BYTES`.
        let start = unsafe { self.start().add(HEADER_BYTES + block * BLOCK_PINS * 8) };
        // SAFETY: aligned, inside the memory, which lives as long as `self`; atomics.
        unsafe { &*start.cast::<[AtomicU64; BLOCK_PINS]>() }
    }
}
