//! The state of a heap shared between the threads of a process: the memory, and the allocator state
//! behind its lock.

use std::alloc::Layout;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use aquifer_sys::futex::{Mutex, MutexGuard};
use aquifer_vm::fork::ProcessMark;

use super::error::{HeapError, NotAllocated};
use super::recorded::{self, Recorded};
use super::registry::Registry;
use super::state::State;

/// All open heaps.
static HEAPS: Registry<Shared> = Registry::new();

/// The heap that contains an address.
pub(crate) fn heap_at(address: u64) -> Option<Arc<Shared>> {
    HEAPS.with(address, Arc::clone)
}

/// Whether an address is in a heap that only this process's parent has open.
pub(crate) fn is_parents(address: u64) -> bool {
    HEAPS.is_parents(address)
}

/// The state that all handles of a heap share.
pub(crate) struct Shared {
    base: NonNull<u8>,
    writable: bool,
    mark: ProcessMark,
    state: Mutex<State>,
    recorded: Arc<Recorded>,
    /// Whether code may have raw pointers into the heap.
    lends_pointers: AtomicBool,
}

// SAFETY: the base is an address; its memory is accessed under the lock, or by the owners of
// allocations.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the state: the calling thread may hold its lock.
        formatter.debug_struct("Shared").field("base", &self.base).finish_non_exhaustive()
    }
}

impl Shared {
    pub fn new(base: NonNull<u8>, writable: bool, state: State) -> Shared {
        // Addresses read from the object later become pointers into this memory again.
        base.as_ptr().expose_provenance();
        Shared {
            base,
            writable,
            mark: ProcessMark::new(),
            state: Mutex::new(state),
            recorded: Arc::default(),
            lends_pointers: AtomicBool::new(false),
        }
    }

    /// Makes the heap known in this process, unless another one lies at its addresses.
    pub fn register(self: &Arc<Self>, len_bytes: u64) -> Result<(), HeapError> {
        HEAPS.insert(self.address(), len_bytes, Arc::clone(self))?;
        self.recorded.open(self.address(), len_bytes).inspect_err(|_| HEAPS.remove(self))
    }

    /// Updates the length of a heap that has grown.
    pub fn has_grown(self: &Arc<Self>, len_bytes: u64) {
        self.recorded.grow(len_bytes);
        HEAPS.grow(self, len_bytes);
    }

    /// Undoes [`Shared::register`].
    pub fn unregister(self: &Arc<Self>) {
        // In this order: a heap that is registered at these addresses now finds its place in both.
        self.recorded.close();
        HEAPS.remove(self);
    }

    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub fn is_writable(&self) -> bool {
        self.writable
    }

    pub fn recorded(&self) -> &Recorded {
        &self.recorded
    }

    /// Notes that code gets a raw pointer into the heap: from now on it may store unrecorded.
    pub fn lend_pointers(&self) {
        // Relaxed: recording begins on the thread that has the heap exclusively, or at the lock
        // that `end` takes.
        // In a forked child a thread of the parent may hold the lock.
        if !self.lends_pointers.load(Relaxed) && self.is_ours() {
            self.lends_pointers.store(true, Relaxed);
            self.recorded.end();
        }
    }

    pub fn lends_pointers(&self) -> bool {
        self.lends_pointers.load(Relaxed)
    }

    /// Whether this process opened the heap, rather than the process it was forked from.
    pub fn is_ours(&self) -> bool {
        self.mark.is_current()
    }

    /// Locks the state for reading.
    pub fn read(&self) -> Result<MutexGuard<'_, State>, HeapError> {
        if self.is_ours() { Ok(self.state.lock()) } else { Err(HeapError::Forked) }
    }

    /// Locks the state for modification.
    pub fn write(&self) -> Result<MutexGuard<'_, State>, HeapError> {
        if self.writable { self.read() } else { Err(HeapError::ReadOnly) }
    }

    fn offset_of(&self, state: &State, pointer: NonNull<u8>) -> Result<u64, HeapError> {
        let address = pointer.as_ptr() as u64;
        let foreign = HeapError::NotAllocated { address, reason: NotAllocated::Foreign };
        state.pages.memory.offset(address).ok_or(foreign)
    }

    /// Allocates memory for `layout`; its content is arbitrary.
    pub fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, HeapError> {
        self.allocate_with(layout, false)
    }

    /// Allocates zeroed bytes, storing only where they are not zero already.
    pub fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, HeapError> {
        self.allocate_with(layout, true)
    }

    fn allocate_with(&self, layout: Layout, zeroed: bool) -> Result<NonNull<[u8]>, HeapError> {
        let mut state = self.write()?;
        let (offset, usable_bytes) = state.allocate(layout.size() as u64, layout.align() as u64)?;
        let memory = state.pages.memory;
        let start = memory.at(offset, usable_bytes)?;
        drop(state);
        if zeroed {
            memory.zero(offset, usable_bytes)?;
        }
        Ok(NonNull::slice_from_raw_parts(start, usable_bytes as usize))
    }

    /// # Safety
    /// The allocation is not used any more.
    pub unsafe fn free(&self, pointer: NonNull<u8>) -> Result<(), HeapError> {
        let mut state = self.write()?;
        let offset = self.offset_of(&state, pointer)?;
        state.free(offset)
    }

    /// The bytes that the owner of an allocation may use.
    pub fn usable_bytes(&self, pointer: NonNull<u8>) -> Result<u64, HeapError> {
        let state = self.read()?;
        let offset = self.offset_of(&state, pointer)?;
        Ok(state.pages.find(offset)?.usable_bytes())
    }

    /// Resizes an allocation in place. Returns its usable bytes, or `None` if that is impossible.
    ///
    /// # Safety
    /// Bytes of the allocation beyond `size` are not used any more.
    pub unsafe fn resize_in_place(
        &self,
        pointer: NonNull<u8>,
        size: usize,
    ) -> Result<Option<u64>, HeapError> {
        let mut state = self.write()?;
        let offset = self.offset_of(&state, pointer)?;
        state.resize_in_place(offset, size as u64)
    }

    /// Resizes an allocation to `layout`, moving it with its content if necessary.
    ///
    /// # Safety
    /// The caller owns the allocation and, on success, uses only the returned pointer.
    pub unsafe fn reallocate(
        &self,
        pointer: NonNull<u8>,
        layout: Layout,
    ) -> Result<NonNull<[u8]>, HeapError> {
        let old_bytes = self.usable_bytes(pointer)?;
        if (pointer.as_ptr() as usize).is_multiple_of(layout.align()) {
            // SAFETY: the caller owns the allocation, and needs no more of it than `layout`.
            if let Some(bytes) = unsafe { self.resize_in_place(pointer, layout.size()) }? {
                return Ok(NonNull::slice_from_raw_parts(pointer, bytes as usize));
            }
        }
        let moved = self.allocate(layout)?;
        let common = moved.len().min(old_bytes as usize);
        recorded::note_bytes(moved.cast(), common);
        // SAFETY: two distinct allocations, each at least `common` bytes long, both owned by the
        // caller.
        unsafe { pointer.copy_to_nonoverlapping(moved.cast(), common) };
        // SAFETY: the caller uses only the new allocation from now on.
        if let Err(error) = unsafe { self.free(pointer) } {
            // SAFETY: the new allocation was not handed out.
            let _ = unsafe { self.free(moved.cast()) };
            return Err(error);
        }
        Ok(moved)
    }

    /// The error for an allocation that does not fit, or whose size overflows.
    pub fn full(&self, requested_bytes: u64) -> HeapError {
        self.read().map_or_else(|error| error, |mut state| state.full(requested_bytes))
    }
}
