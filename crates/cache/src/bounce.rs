//! Aligned buffers that exist before they are needed.
//!
//! The fault path must not allocate, and direct I/O wants aligned memory; so a fixed set of buffers is
//! handed out by a lock-free queue. When all are out, a loader waits for one: holders never wait for
//! anything but their own device, so one always comes back.

use std::io;

use crossbeam_queue::ArrayQueue;

use aquifer_sys::memory;

/// A set of equal buffers.
pub struct BouncePool {
    base: *mut u8,
    buffer_bytes: usize,
    count: usize,
    free: ArrayQueue<u32>,
}

// SAFETY: each buffer is used by whoever took its index out of the queue.
unsafe impl Send for BouncePool {}
// SAFETY: as above.
unsafe impl Sync for BouncePool {}

impl BouncePool {
    /// `count` buffers of `buffer_bytes` each, page-aligned.
    pub fn new(buffer_bytes: usize, count: usize) -> io::Result<BouncePool> {
        let base = memory::map_anonymous(buffer_bytes * count)?;
        let free = ArrayQueue::new(count);
        for index in 0..count as u32 {
            free.push(index).expect("the queue holds all buffers");
        }
        Ok(BouncePool { base, buffer_bytes, count, free })
    }

    /// Size of one buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    /// A buffer, if one is free.
    pub fn try_take(&self) -> Option<Bounce<'_>> {
        let index = self.free.pop()?;
        Some(Bounce { pool: self, index })
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
        let _ = unsafe { memory::unmap(self.base, self.buffer_bytes * self.count) };
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
        let pushed = self.pool.free.push(self.index);
        debug_assert!(pushed.is_ok(), "a buffer is returned once");
    }
}
