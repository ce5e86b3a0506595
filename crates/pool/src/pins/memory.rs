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
//!
//! A block, and the page of the table with its owner, get memory when the block is first claimed,
//! before any process can see that it is used. So a scan, which looks at used blocks only, touches
//! nothing that has no memory.

use std::mem::offset_of;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_sys::shared_memory::SharedMemory;
use uuid::Uuid;

use crate::error::{PoolError, Result};
use crate::memory::Memory;
use crate::shared::membership::PIN_BLOCKS;
use crate::sync::AtomicU64;

/// Pins of one block.
pub(crate) const BLOCK_PINS: usize = 512;

const MAGIC: u64 = u64::from_le_bytes(*b"AQPINS04");

/// The owner of a block.
#[repr(C)]
pub(crate) struct Owner {
    /// The owning handle's nonce for own blocks, or for lent ones; 0 if the block has had no owner
    /// since it was cleared.
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
/// The part of [`Header`] that always has memory.
const FIXED_BYTES: usize = 4096;
const _: () = assert!(offset_of!(Header, owners) <= FIXED_BYTES);
const LEN_BYTES: usize = HEADER_BYTES + PIN_BLOCKS * BLOCK_PINS * 8;

/// Where a block begins.
fn place(block: usize) -> usize {
    HEADER_BYTES + block * BLOCK_PINS * 8
}

/// The memory of pins, mapped into this process: shared by all processes that have the pool open for
/// writing, or private to a process that has the pool for itself.
pub(crate) struct PinMemory(Memory);

impl PinMemory {
    /// Creates a segment that other writers can open.
    pub fn create(path: &Path, pool: Uuid, mode: u32) -> Result<PinMemory> {
        let memory = SharedMemory::create_at(path, LEN_BYTES, FIXED_BYTES, mode)
            .map_err(PoolError::SharedMemory)?;
        let made = PinMemory(Memory::Shared(memory));
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
        let opened = PinMemory(Memory::Shared(memory));
        let (high, low) = pool.as_u64_pair();
        let found = [&opened.header().magic, &opened.header().uuid[0], &opened.header().uuid[1]];
        if found.map(|word| word.load(Relaxed)) == [MAGIC, high, low] {
            Ok(opened)
        } else {
            Err("its part for pins belongs to another pool".to_owned())
        }
    }

    /// Memory private to this process.
    pub fn private() -> Result<PinMemory> {
        Memory::private(LEN_BYTES).map(PinMemory)
    }

    /// The descriptor, if the memory is shared.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.0.file()
    }

    pub fn is_shared(&self) -> bool {
        self.0.file().is_some()
    }

    fn header(&self) -> &Header {
        // SAFETY: the memory is at least this long, page-aligned and lives as long as `self`;
        // `Header` consists of atomics only.
        unsafe { &*self.0.start().cast::<Header>() }
    }

    /// An upper bound of the blocks that have been claimed. The owners of the blocks before it have
    /// memory, and so have those blocks that have an owner.
    pub fn used_blocks(&self) -> &AtomicU64 {
        &self.header().used_blocks
    }

    /// The owner of a block that has memory.
    pub fn owner(&self, block: usize) -> &Owner {
        &self.header().owners[block]
    }

    /// Gives a block memory, and the owners up to its own. The caller has locked the block's byte.
    ///
    /// The owners from the first unused block on: a handle that is claiming one of them may die
    /// before it has allocated them, and `used_blocks` is about to include them.
    pub fn allocate(&self, block: usize) -> Result<()> {
        let used = (self.used_blocks().load(Relaxed) as usize).min(block);
        let owner = |block| offset_of!(Header, owners) + block * size_of::<Owner>();
        self.0.allocate(owner(used)..owner(block + 1))?;
        self.0.allocate(place(block)..place(block + 1))
    }

    #[inline]
    pub fn block(&self, block: usize) -> &[AtomicU64; BLOCK_PINS] {
        assert!(block < PIN_BLOCKS);
        // SAFETY: the block lies within the memory's `LEN_BYTES`.
        let start = unsafe { self.0.start().add(place(block)) };
        // SAFETY: aligned, inside the memory, which lives as long as `self`; atomics.
        unsafe { &*start.cast::<[AtomicU64; BLOCK_PINS]>() }
    }
}
