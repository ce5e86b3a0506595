//! Aligned transfer buffers that are allocated in advance.
//!
//! The fault path must not allocate, and direct I/O needs aligned memory; so a lock-free stack
//! hands out a fixed set of buffers. Last in, first out: the next buffer is the one most likely in
//! the CPU's caches, and only as many buffers are ever touched as were in use at once. When all are
//! taken, a loader waits for one. Holders wait only for their own device, so a buffer is always
//! given back.
//!
//! The buffers are in huge pages where the system has them: a device gets each buffer as one piece of
//! memory. Some take as long for each further piece as for the bytes in it: a virtio disk read 1.1 GB/s
//! into small pages and 2.2 GB/s into huge ones, in reads of 128 KiB. That is also why a run of pages
//! is read into a buffer and copied, and not by one vectored read into its frames.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use aquifer_sys::memory::{self, Advice, REGION_BYTES};

use crate::lazy::LazyArray;

/// Transfer buffers of a cache: enough for two full batches besides the fault path.
const TRANSFER_BUFFERS: usize = 160;
const TRANSFER_BYTES: usize = 64 << 10;
/// Buffers of all visits of a cache.
const VISIT_BUFFERS: usize = 48;
/// Largest read of a visit.
pub(crate) const VISIT_RUN_BYTES: usize = 128 << 10;

/// A set of equal buffers.
pub struct BouncePool {
    mapped: *mut u8,
    mapped_bytes: usize,
    /// The first buffer, at the start of a huge page.
    base: *mut u8,
    buffer_bytes: usize,
    /// Top of the stack. The low half is an index plus one, 0 when empty. The high half counts
    /// pops, so that a top that was popped and pushed again is not mistaken for an unchanged one.
    top: AtomicU64,
    /// For each buffer, the index of the one below it plus one.
    below: LazyArray<AtomicU32>,
}

// SAFETY: only the thread that popped a buffer's index uses the buffer.
unsafe impl Send for BouncePool {}
// SAFETY: as above.
unsafe impl Sync for BouncePool {}

const INDEX: u64 = u32::MAX as u64;
const ONE_POP: u64 = 1 << 32;

impl BouncePool {
    /// The buffers for the transfers of a cache's stores.
    pub fn for_transfers(page_bytes: usize) -> io::Result<BouncePool> {
        BouncePool::new(TRANSFER_BYTES.max(page_bytes), TRANSFER_BUFFERS)
    }

    /// The buffers for a cache's visits, each for two of the largest runs. They take memory where they
    /// are used.
    pub fn for_visits(page_bytes: usize) -> io::Result<BouncePool> {
        BouncePool::new(2 * VISIT_RUN_BYTES.max(page_bytes), VISIT_BUFFERS)
    }

    /// `count` buffers of `buffer_bytes` each, page-aligned.
    pub fn new(buffer_bytes: usize, count: usize) -> io::Result<BouncePool> {
        let below = LazyArray::new(count)?;
        let len_bytes = (buffer_bytes * count).next_multiple_of(REGION_BYTES);
        let mapped_bytes = len_bytes + REGION_BYTES;
        let mapped = memory::map_anonymous(mapped_bytes)?;
        let base = mapped.wrapping_add(mapped.align_offset(REGION_BYTES));
        // SAFETY: our own new mapping. Huge pages may be switched off; small ones work as well.
        let _ = unsafe { memory::advise(base, len_bytes, Advice::HugePage) };
        let top = AtomicU64::new(0);
        let pool = BouncePool { mapped, mapped_bytes, base, buffer_bytes, top, below };
        for index in (0..count as u32).rev() {
            pool.push(index);
        }
        Ok(pool)
    }

    /// Size of one buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    fn push(&self, index: u32) {
        let mut top = self.top.load(Ordering::Relaxed);
        loop {
            self.below[index as usize].store(top as u32, Ordering::Relaxed);
            let new = (top & !INDEX) | u64::from(index + 1);
            // Release pairs with the acquires in `try_take`: a thread that pops this buffer sees
            // what is below.
            match self.top.compare_exchange_weak(top, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }

    /// A buffer, if one is free.
    pub fn try_take(&self) -> Option<Bounce<'_>> {
        // Acquire pairs with the release in `push`.
        let mut top = self.top.load(Ordering::Acquire);
        loop {
            let index = ((top & INDEX) as u32).checked_sub(1)?;
            let below = self.below[index as usize].load(Ordering::Relaxed);
            let new = ((top & !INDEX).wrapping_add(ONE_POP)) | u64::from(below);
            match self.top.compare_exchange_weak(top, new, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(Bounce { pool: self, index }),
                Err(now) => top = now,
            }
        }
    }

    /// A buffer; waits for one. Async-signal-safe.
    pub fn take(&self) -> Bounce<'_> {
        loop {
            if let Some(buffer) = self.try_take() {
                return buffer;
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for BouncePool {
    fn drop(&mut self) {
        // SAFETY: made by `map_anonymous` with this length; every `Bounce` borrowed the pool.
        let _ = unsafe { memory::unmap(self.mapped, self.mapped_bytes) };
    }
}

/// One buffer, given back when dropped.
pub struct Bounce<'a> {
    pool: &'a BouncePool,
    index: u32,
}

impl Bounce<'_> {
    /// The buffer's first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.pool.base.wrapping_add(self.index as usize * self.pool.buffer_bytes)
    }
}

impl Drop for Bounce<'_> {
    fn drop(&mut self) {
        self.pool.push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_buffer_has_two_holders() {
        let pool = BouncePool::new(4096, 8).unwrap();
        std::thread::scope(|scope| {
            for thread in 1..=3u8 {
                let pool = &pool;
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        let (first, second) = (pool.take(), pool.take());
                        for buffer in [&first, &second] {
                            // SAFETY: this thread's own buffer.
                            unsafe { buffer.as_ptr().write_volatile(thread) };
                        }
                        for buffer in [&first, &second] {
                            // SAFETY: as above.
                            assert_eq!(unsafe { buffer.as_ptr().read_volatile() }, thread);
                        }
                    }
                });
            }
        });
        let all: Vec<Bounce<'_>> = std::iter::from_fn(|| pool.try_take()).collect();
        assert_eq!(all.len(), 8);
    }
}
