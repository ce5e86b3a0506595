//! A heap larger than memory: an arena of typed vectors over a writable mapping.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use aquifer_cache::{Cache, MappedArena};
//!
//! let cache = Cache::builder().budget_bytes(8 << 20).build()?;
//! let arena = MappedArena::temporary(&cache, std::env::temp_dir(), 64 << 20)?;
//! let mut squares = arena.vec::<u64>();
//! for n in 0..1_000_000u64 {
//!     squares.push(n * n)?;
//! }
//! assert_eq!(squares[777_777], 777_777 * 777_777); // a plain slice, most of it not in DRAM
//! # Ok(())
//! # }
//! ```
//!
//! The arena owns its mapping, and a vector owns its range of it, so a vector can be a slice. The
//! arena's contents are temporary: they are written to the device only under memory pressure, and
//! cannot be found again after the arena is dropped. For data that must persist use `Mapping`.
//!
//! Free ranges are kept in DRAM, best fit by size, with neighbours merged. Their lock is never held
//! while mapped memory is touched.
//!
//! A slice access whose page cannot be read back raises SIGBUS, as with any mapping used by
//! pointer.

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;

use aquifer_device::FileDevice;
use zerocopy::{FromBytes, IntoBytes};

use crate::cache::Cache;
use crate::error::{CacheError, Result};
use crate::map_options::Advice;
use crate::mapping::MappingMut;

/// Every allocation starts and ends at a multiple of this: a cache line.
const ALIGNMENT_BYTES: u64 = 64;

/// Memory for typed vectors, backed by a device. See the module documentation.
///
/// May be shared between threads. The arena does not expose its mapping: a store through it would
/// change bytes that a vector's slice borrows.
///
/// ```compile_fail,E0599
/// # use aquifer_cache::MappedArena;
/// fn change(arena: &MappedArena) {
///     let mut vec = arena.vec::<u8>();
///     vec.push(1).unwrap();
///     let slice: &[u8] = &vec;
///     arena.mapping().set(0, 2u8).unwrap();
///     assert_eq!(slice, [1]);
/// }
/// ```
pub struct MappedArena {
    mapping: MappingMut,
    base: *mut u8,
    free: Mutex<FreeRanges>,
}

// SAFETY: the base is an address inside the mapping, which is `Send` and `Sync`.
unsafe impl Send for MappedArena {}
// SAFETY: as above; allocation is behind the mutex.
unsafe impl Sync for MappedArena {}

impl MappedArena {
    /// An arena over a whole writable mapping. The device's contents are overwritten.
    ///
    /// # Errors
    /// [`CacheError::AlreadyAttached`] if the cache has other mappings of the device: the arena needs
    /// it exclusively.
    ///
    /// # Safety
    /// While the arena lives, only its vectors may change the bytes of the device: no other mapping
    /// or `Pages` of the device, no calls of the device, no other program. And the device must read
    /// back what was written to it. A page of a vector may be evicted and reloaded at any time,
    /// while references into it are in use.
    ///
    /// ```compile_fail,E0133
    /// # use aquifer_cache::{MappedArena, MappingMut};
    /// fn arena(mapping: MappingMut) -> MappedArena {
    ///     MappedArena::new(mapping).unwrap()
    /// }
    /// ```
    pub unsafe fn new(mapping: MappingMut) -> Result<MappedArena> {
        let base = mapping.as_mut_ptr();
        // Another mapping could change bytes that a vector lends as a slice.
        mapping.keep_alone()?;
        let mut free = FreeRanges::default();
        free.insert(0, mapping.len() / ALIGNMENT_BYTES * ALIGNMENT_BYTES);
        Ok(MappedArena { mapping, base, free: Mutex::new(free) })
    }

    /// An arena over an unnamed file in `directory`, which is deleted with the arena.
    ///
    /// # Errors
    /// [`CacheError::Kernel`] if the file cannot be created, and those of [`Cache::map_mut`].
    pub fn temporary(cache: &Cache, directory: impl AsRef<Path>, len_bytes: u64) -> Result<Self> {
        let device = temporary_file(directory.as_ref(), len_bytes)?;
        let mapping = cache.map_mut(device)?;
        // SAFETY: only this mapping uses the device. Its file was created for this arena and has no
        // name any more; while it had a name only this user could open it.
        unsafe { MappedArena::new(mapping) }
    }

    /// An empty vector.
    pub fn vec<T: Copy + FromBytes + IntoBytes>(&self) -> MappedVec<'_, T> {
        MappedVec { arena: self, offset: 0, len: 0, capacity: 0, _elements: PhantomData }
    }

    /// An empty vector with room for `capacity` elements.
    ///
    /// # Errors
    /// [`CacheError::ArenaFull`].
    pub fn vec_with_capacity<T: Copy + FromBytes + IntoBytes>(
        &self,
        capacity: usize,
    ) -> Result<MappedVec<'_, T>> {
        let mut vec = self.vec();
        vec.reserve(capacity)?;
        Ok(vec)
    }

    /// The number of unallocated bytes.
    pub fn free_bytes(&self) -> u64 {
        self.free().by_offset.values().sum()
    }

    /// The length of the mapping.
    pub fn len_bytes(&self) -> u64 {
        self.mapping.len()
    }

    /// Applies advice to all of the arena's memory. No advice loses the vectors' contents.
    pub fn advise(&self, advice: Advice) -> Result<()> {
        self.mapping.advise(0..self.mapping.len(), advice)
    }

    fn free(&self) -> std::sync::MutexGuard<'_, FreeRanges> {
        self.free.lock().expect("nothing panics while the free ranges are locked")
    }

    fn allocate(&self, len_bytes: u64) -> Result<u64> {
        let mut free = self.free();
        let largest_bytes = free.by_size.last().map_or(0, |&(len, _)| len);
        free.take(len_bytes).ok_or(CacheError::ArenaFull { len_bytes, largest_bytes })
    }
}

/// A file that is unlinked at once. Its blocks are allocated, so a full disk fails here and not at
/// write-back.
fn temporary_file(directory: &Path, len_bytes: u64) -> Result<FileDevice> {
    let kernel = |what| move |source| CacheError::Kernel { what, source };
    let unique = format!(
        ".aquifer-heap-{}-{:x}",
        std::process::id(),
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_nanos())
    );
    let path = directory.join(unique);
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(kernel("creating the arena's file"))?;
    let allocated = aquifer_sys::memory::allocate_file(&file, len_bytes)
        .map_err(kernel("allocating the arena's file"));
    let device = allocated.and_then(|()| {
        FileDevice::options()
            .writable(true)
            .open(&path)
            .map_err(|source| CacheError::Device { device: path.display().to_string(), source })
    });
    let removed = std::fs::remove_file(&path).map_err(kernel("unlinking the arena's file"));
    removed.and(device)
}

/// Free ranges, by offset for merging and by size for finding.
#[derive(Default)]
struct FreeRanges {
    by_offset: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl FreeRanges {
    fn take(&mut self, len: u64) -> Option<u64> {
        let &(found, offset) = self.by_size.range((len, 0)..).next()?;
        self.remove(offset, found);
        if found > len {
            self.add(offset + len, found - len);
        }
        Some(offset)
    }

    fn insert(&mut self, mut offset: u64, mut len: u64) {
        if len == 0 {
            return;
        }
        if let Some((&before, &before_len)) = self.by_offset.range(..offset).next_back()
            && before + before_len == offset
        {
            self.remove(before, before_len);
            offset = before;
            len += before_len;
        }
        if let Some(&after_len) = self.by_offset.get(&(offset + len)) {
            self.remove(offset + len, after_len);
            len += after_len;
        }
        self.add(offset, len);
    }

    fn add(&mut self, offset: u64, len: u64) {
        self.by_offset.insert(offset, len);
        self.by_size.insert((len, offset));
    }

    fn remove(&mut self, offset: u64, len: u64) {
        self.by_offset.remove(&offset);
        self.by_size.remove(&(len, offset));
    }
}

/// A growable vector in a [`MappedArena`]; derefs to a slice.
///
/// Its elements are plain data, without padding and valid whatever their bytes are; the derives of
/// `zerocopy` say so of a program's own types.
pub struct MappedVec<'a, T> {
    arena: &'a MappedArena,
    offset: u64,
    len: usize,
    capacity: usize,
    _elements: PhantomData<T>,
}

// SAFETY: the vector owns its elements, which are plain data.
unsafe impl<T: Send> Send for MappedVec<'_, T> {}
// SAFETY: shared access only reads.
unsafe impl<T: Sync> Sync for MappedVec<'_, T> {}

impl<T> MappedVec<'_, T> {
    const fn bytes(count: usize) -> Option<u64> {
        match (count as u64).checked_mul(size_of::<T>() as u64) {
            Some(bytes) => bytes.checked_next_multiple_of(ALIGNMENT_BYTES),
            None => None,
        }
    }

    /// The number of elements that fit without reallocation.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    fn base(&self) -> *mut T {
        self.arena.base.wrapping_add(self.offset as usize).cast()
    }

    fn release(&mut self) {
        let bytes = Self::bytes(self.capacity).expect("it was allocated");
        self.arena.free().insert(self.offset, bytes);
        self.capacity = 0;
    }
}

impl<T: Copy + FromBytes + IntoBytes> MappedVec<'_, T> {
    /// Reserves room for `additional` more elements.
    ///
    /// # Errors
    /// [`CacheError::ArenaFull`]; the vector is unchanged then.
    pub fn reserve(&mut self, additional: usize) -> Result<()> {
        const { assert!(align_of::<T>() as u64 <= ALIGNMENT_BYTES, "alignment above a cache line") };
        let too_large = CacheError::ArenaFull { len_bytes: u64::MAX, largest_bytes: 0 };
        let Some(needed) = self.len.checked_add(additional) else { return Err(too_large) };
        if needed <= self.capacity {
            return Ok(());
        }
        // Doubling amortises the cost of pushes; if that much is not free, allocate just what is
        // needed.
        let generous = needed.max(self.capacity * 2).max(64);
        let (capacity, offset) = match Self::bytes(generous).map(|b| self.arena.allocate(b)) {
            Some(Ok(offset)) => (generous, offset),
            _ => (needed, self.arena.allocate(Self::bytes(needed).ok_or(too_large)?)?),
        };
        let target = self.arena.base.wrapping_add(offset as usize).cast::<T>();
        // SAFETY: both ranges are inside the mapping and owned by this vector; they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(self.as_ptr(), target, self.len) };
        self.release();
        self.offset = offset;
        self.capacity = capacity;
        Ok(())
    }

    /// Appends an element.
    ///
    /// # Errors
    /// [`CacheError::ArenaFull`]; the vector is unchanged then.
    pub fn push(&mut self, value: T) -> Result<()> {
        if self.len == self.capacity {
            self.reserve(1)?;
        }
        // SAFETY: below the capacity, so inside this vector's range.
        unsafe { self.base().add(self.len).write(value) };
        self.len += 1;
        Ok(())
    }

    /// Removes and returns the last element.
    pub fn pop(&mut self) -> Option<T> {
        let last = self.last().copied()?;
        self.len -= 1;
        Some(last)
    }

    /// Appends all of `values`.
    ///
    /// # Errors
    /// [`CacheError::ArenaFull`]; the vector is unchanged then.
    pub fn extend_from_slice(&mut self, values: &[T]) -> Result<()> {
        self.reserve(values.len())?;
        // SAFETY: there is room, and our elements cannot be borrowed as `values` while we are
        // borrowed uniquely.
        unsafe {
            std::ptr::copy_nonoverlapping(values.as_ptr(), self.base().add(self.len), values.len());
        }
        self.len += values.len();
        Ok(())
    }

    /// Sets the length to `len`, filling new elements with `value`.
    ///
    /// # Errors
    /// [`CacheError::ArenaFull`]; the vector is unchanged then.
    pub fn resize(&mut self, len: usize, value: T) -> Result<()> {
        if len > self.len {
            self.reserve(len - self.len)?;
            for index in self.len..len {
                // SAFETY: below the capacity.
                unsafe { self.base().add(index).write(value) };
            }
        }
        self.len = len;
        Ok(())
    }

    /// Removes all elements; keeps the capacity.
    pub fn clear(&mut self) {
        self.len = 0;
    }
}

impl<T> Deref for MappedVec<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: the range belongs to this vector, is aligned, and its first `len` elements were
        // written.
        unsafe { std::slice::from_raw_parts(self.base(), self.len) }
    }
}

impl<T> DerefMut for MappedVec<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and the vector is borrowed uniquely.
        unsafe { std::slice::from_raw_parts_mut(self.base(), self.len) }
    }
}

impl<T> Drop for MappedVec<'_, T> {
    fn drop(&mut self) {
        if self.capacity > 0 {
            self.release();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_device::MemoryDevice;

    fn arena(len_bytes: usize) -> MappedArena {
        let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
        let device = MemoryDevice::new(len_bytes).unwrap();
        // SAFETY: nothing else uses the device.
        unsafe { MappedArena::new(cache.map_mut(device).unwrap()) }.unwrap()
    }

    #[test]
    fn vectors_larger_than_the_budget_keep_their_elements() {
        let arena = arena(96 << 20);
        let mut numbers = arena.vec::<u64>();
        let mut halves = arena.vec::<u32>();
        for n in 0..3_000_000u64 {
            numbers.push(n * 3).unwrap();
            halves.push(n as u32 / 2).unwrap();
        }
        numbers.reverse();
        for n in (0..3_000_000u64).step_by(4099) {
            assert_eq!(numbers[n as usize], (2_999_999 - n) * 3);
            assert_eq!(halves[n as usize], n as u32 / 2);
        }
        assert!(arena.len_bytes() > 8 << 20);
        arena.advise(Advice::DontNeed).unwrap();
        assert_eq!(numbers[7], (2_999_999 - 7) * 3);
    }

    #[test]
    fn a_full_arena_is_an_error_and_freed_ranges_merge() {
        let arena = arena(16 << 20);
        let all = arena.free_bytes();
        let mut first = arena.vec_with_capacity::<u8>(5 << 20).unwrap();
        let second = arena.vec_with_capacity::<u8>(5 << 20).unwrap();
        let third = arena.vec_with_capacity::<u8>(5 << 20).unwrap();
        first.resize(5 << 20, 9).unwrap();
        assert!(matches!(first.reserve(7 << 20), Err(CacheError::ArenaFull { .. })));
        assert_eq!(first[5_000_000], 9);
        drop((second, third));
        first.reserve(5 << 20).unwrap();
        assert_eq!((first.len(), first[5_000_000]), (5 << 20, 9));
        drop(first);
        assert_eq!(arena.free_bytes(), all);
        assert_eq!(arena.free().by_offset.len(), 1);
    }

    #[test]
    fn pop_extend_and_clear() {
        let arena = arena(8 << 20);
        let mut vec = arena.vec::<u16>();
        vec.extend_from_slice(&[1, 2, 3]).unwrap();
        assert_eq!(vec.pop(), Some(3));
        assert_eq!(&*vec, [1, 2]);
        vec.clear();
        assert_eq!(vec.pop(), None);
    }

    #[test]
    fn a_temporary_arena_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
        let arena = MappedArena::temporary(&cache, directory.path(), 1 << 20).unwrap();
        let mut vec = arena.vec::<u8>();
        vec.resize(1 << 19, 5).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
