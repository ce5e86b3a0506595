//! The cache a program would otherwise use over direct I/O: quick_cache, pages as reference-counted
//! slices.
//!
//! It gets as many pages as fit in its budget, given the cost of each beside its bytes: the
//! counters of the allocation (16), its rounding by the allocator (16), and key, handle and links
//! in the cache.

use std::fs::File;
use std::sync::Arc;

use anyhow::{Result, bail};
use quick_cache::sync::Cache;

use super::{Lane, PageFile, direct};
use crate::data::read_page;
use crate::job::Source;
use crate::raw::{AlignedBuffer, PAGE_BYTES};

/// Memory a cached page takes beyond its 4 KiB.
const OVERHEAD_BYTES: usize = 128;

/// A page in the cache: aligned for words, as `Arc<[u64]>` is and `Arc<[u8]>` is not.
type CachedPage = Arc<[u64]>;

/// quick_cache over a directly opened file.
pub struct UserCache {
    file: File,
    cache: Cache<u64, CachedPage>,
}

impl UserCache {
    /// Opens the file and sizes the cache.
    pub fn open(source: &Source) -> Result<Self> {
        let file = direct::open(&source.path, false)?;
        share_one_heap();
        let pages = usize::try_from(source.cache_bytes)? / (PAGE_BYTES + OVERHEAD_BYTES);
        Ok(Self { file, cache: Cache::new(pages) })
    }
}

/// Makes all threads allocate from one heap. With glibc's heap per thread, evicted pages are freed
/// to the heap of the thread that loaded them, the loading thread's heap grows, and under a memory
/// limit the process is killed: a program with such a cache must do this or use another allocator.
fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets one number in the allocator; no other thread runs yet.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

impl PageFile for UserCache {
    type Lane<'a> = UserCacheLane<'a>;

    fn lane(&self) -> Result<UserCacheLane<'_>> {
        Ok(UserCacheLane { owner: self, buffer: AlignedBuffer::new(PAGE_BYTES) })
    }
}

/// A thread's access: looks up the cache, reads on a miss.
pub struct UserCacheLane<'a> {
    owner: &'a UserCache,
    buffer: AlignedBuffer,
}

impl UserCacheLane<'_> {
    fn miss(&mut self, page: u64) -> Result<CachedPage> {
        read_page(&self.owner.file, page, &mut self.buffer)?;
        let words = self.buffer.bytes().chunks_exact(8);
        let loaded: CachedPage =
            words.map(|word| u64::from_ne_bytes(word.try_into().expect("8 bytes"))).collect();
        self.owner.cache.insert(page, Arc::clone(&loaded));
        Ok(loaded)
    }
}

impl Lane for UserCacheLane<'_> {
    #[inline(always)]
    fn page<R>(&mut self, page: u64, mut look: impl FnMut(*const u8) -> R) -> Result<R> {
        let loaded = match self.owner.cache.get(&page) {
            Some(hit) => hit,
            None => self.miss(page)?,
        };
        Ok(look(loaded.as_ptr().cast()))
    }

    fn store(&mut self, _page: u64, _offset_bytes: usize, _value: u8) -> Result<()> {
        bail!("a read cache takes no stores")
    }
}
