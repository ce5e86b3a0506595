//! The memory of a segment: shared with other processes, or private to one that has the pool for
//! itself.
//!
//! Private memory takes no system call but one, and no pages before they are touched: opening a
//! pool alone is as fast as the part of the segment that is used is small. If the system has no page
//! left, that is not an error of an operation but as for the process's other memory: it is swapped, or
//! the kernel ends a process. Making ranges accessible one by one, as for shared memory, would
//! count only these as committed, but each takes a mapping, of which a process has 65,530, and the
//! image of ten million slots alone can have more.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;

use aquifer_sys::shared_memory::{SharedMemory, SharedMemoryError};
use aquifer_vm::ZeroedSlice;
use zerocopy::FromZeros;

use crate::error::{PoolError, Result};

/// Memory mapped into this process. Its bytes are atomics: other threads, and other processes if it
/// is shared, change them at any time.
pub(crate) enum Memory {
    Shared(SharedMemory),
    Private(ZeroedSlice<AtomicU64>),
}

/// `len` zeros for this process alone, which take memory where they are touched.
///
/// # Errors
/// [`PoolError::SharedMemory`] if there are no addresses.
pub(crate) fn zeroed<T: FromZeros>(len: usize) -> Result<ZeroedSlice<T>> {
    ZeroedSlice::new(len).map_err(|source| {
        let len_bytes = (len * size_of::<T>()) as u64;
        PoolError::SharedMemory(SharedMemoryError::NoSpace { len_bytes, source })
    })
}

impl Memory {
    /// Zeros for this process alone, page-aligned.
    pub fn private(len_bytes: usize) -> Result<Memory> {
        zeroed(len_bytes.div_ceil(8)).map(Memory::Private)
    }

    /// The first byte; page-aligned.
    #[inline]
    pub fn start(&self) -> *mut u8 {
        match self {
            Memory::Shared(memory) => memory.start(),
            Memory::Private(words) => words.as_ptr().cast_mut().cast(),
        }
    }

    pub fn len_bytes(&self) -> usize {
        match self {
            Memory::Shared(memory) => memory.len_bytes(),
            Memory::Private(words) => size_of_val::<[AtomicU64]>(words),
        }
    }

    /// Whether this process can store to it.
    pub fn is_writable(&self) -> bool {
        match self {
            Memory::Shared(memory) => memory.is_writable(),
            Memory::Private(_) => true,
        }
    }

    /// The descriptor of shared memory.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Memory::Shared(memory) => Some(memory.file()),
            Memory::Private(_) => None,
        }
    }

    /// Makes a range accessible that was created without memory: until then, nothing may touch it,
    /// in any process. Private memory always is.
    ///
    /// # Errors
    /// [`PoolError::SharedMemory`]; the range then still must not be touched.
    pub fn allocate(&self, range: Range<usize>) -> Result<()> {
        match self {
            Memory::Shared(memory) => memory.allocate(range).map_err(PoolError::SharedMemory),
            Memory::Private(_) => Ok(()),
        }
    }
}
