//! [`Mapping`]: a device as memory; [`MappingMut`]: the same, to store to.
//!
//! ```text
//!         Mapping, MappingMut
//!             ┌───┴────────────┐
//!       kernel backend     user backend
//!       file mapping,      userfaultfd, page words,
//!       drop manager       own frames and policy
//! ```
//!
//! A plain load through [`Mapping::as_ptr`] reads a resident byte. All other accesses return
//! `Result`: they load pages without a fault, and return errors.

pub(crate) mod calibrate;
mod choose;
pub(crate) mod pinned;

use std::future::Future;
use std::ops::{Deref, Range};
use std::sync::Arc;

use aquifer_device::Device;
use aquifer_sys::memory::copy_racy;
use aquifer_vm::Bytes;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use self::choose::choose;
use self::pinned::{Pinned, PinnedMut};
use crate::engine::asynchronous;
use crate::engine::{Engine, InUse, Kind};
use crate::error::{CacheError, Result};
use crate::geometry::Geometry;
use crate::kernel::KernelFile;
use crate::map_options::{Advice, Backend, MapOptions};
use crate::page_word::PinKind;
use crate::running::Running;
use crate::store::Access;
use crate::store::claims::{Attached, Claim, Wanted};
use crate::user::UserStore;
use crate::user::mapped_memory::MappedMemory;

/// A device mapped into memory. See the module documentation.
///
/// May be used from any thread. Mappings of one device in one cache share their pages, see
/// [`Cache::map_with`](crate::Cache::map_with). This one is read-only; [`MappingMut`] derefs to it.
///
/// # What an application must not do
/// * Touch a mapping in a handler of an *asynchronous* signal (a timer, SIGCHLD): the interrupted
///   thread may be inside a call of the engine and hold a lock that the fault needs, and would
///   deadlock.
/// * Lock memory of a mapping (`mlock`): locked pages cannot be evicted, and stay in the budget
///   forever. `mlockall(MCL_FUTURE)` must not be in force when a mapping is created.
/// * Nest more than 160 faults at a time, over all threads, through devices whose data is mapped
///   with the same cache: each holds a transfer buffer while it waits for the next.
/// * Touch memory of a cache, for a transfer to a device of the same cache, from a thread other
///   than the one that called the device: that thread may wait for the very page that is being
///   written.
pub struct Mapping {
    pub(crate) served: Served,
    writable: bool,
    pub(crate) running: Arc<Running>,
}

/// The backend.
pub(crate) enum Served {
    /// The store comes first: `Attached` tears it down with its last user.
    User(Arc<UserStore>, Arc<Attached<MappedMemory>>),
    Kernel(Arc<KernelFile>, #[allow(dead_code, reason = "dropped with it")] Claim),
}

impl Served {
    fn shared(attached: Arc<Attached<MappedMemory>>) -> Served {
        Served::User(attached.store.clone(), attached)
    }
}

impl Mapping {
    pub(crate) fn new(
        running: Arc<Running>,
        device: Arc<dyn Device>,
        options: MapOptions,
        writable: bool,
    ) -> Result<Mapping> {
        let engine = &running.engine;
        let geometry = Geometry::of_device(&*device, engine.options.page_bytes)?;
        if writable && !device.is_writable() {
            return Err(CacheError::ReadOnly { device: device.name().to_owned() });
        }
        let wanted = Wanted {
            cache: Arc::as_ptr(engine).addr(),
            identity: device.identity(),
            device: device.clone(),
            kind: Kind::Mapped,
            len_bytes: geometry.len_bytes,
            writable,
        };
        let shared = |attached: Arc<Attached<MappedMemory>>| {
            if options.zeros_for_missing && !writable {
                attached.store.answer_faults();
            }
            Served::shared(attached)
        };
        if options.backend != Backend::Kernel
            && let Some(attached) = Attached::existing(&wanted)?
        {
            return Ok(Mapping { served: shared(attached), writable, running });
        }
        let served = match choose(engine, &device, geometry.len_bytes, options.backend, writable)? {
            Some(file) => {
                let claim = match Claim::unshared(&Wanted { kind: Kind::Kernel, ..wanted.clone() })
                {
                    Ok(claim) => claim,
                    // Another thread attached the device in between, and may have a store to share.
                    Err(refused) if options.backend == Backend::Auto => {
                        let attached = Attached::existing(&wanted)?.ok_or(refused)?;
                        return Ok(Mapping { served: shared(attached), writable, running });
                    }
                    Err(refused) => return Err(refused),
                };
                if options.zeros_for_missing {
                    file.answer_faults();
                }
                running.drop_manager()?.add(file.clone());
                engine.join_kernel(file.geometry.len_bytes);
                Served::Kernel(file, claim)
            }
            None => shared(Attached::attach(&wanted, || {
                UserStore::map(engine.clone(), device, geometry, writable)
            })?),
        };
        Ok(Mapping { served, writable, running })
    }

    /// A reference for a call that may outlive the caller's borrow; dropping the mapping waits for
    /// it.
    pub(crate) fn in_use(&self, store: &Arc<UserStore>) -> InUse<UserStore, Arc<Engine>> {
        InUse::new(store.clone(), self.running.engine.clone())
    }

    fn geometry(&self) -> Geometry {
        match &self.served {
            Served::User(store, _) => store.geometry,
            Served::Kernel(file, _) => file.geometry,
        }
    }

    fn device(&self) -> &dyn Device {
        match &self.served {
            Served::User(store, _) => &**store.device(),
            Served::Kernel(file, _) => &*file.device,
        }
    }

    pub(crate) fn check_process(&self) -> Result<()> {
        if self.running.engine.mark.is_current() { Ok(()) } else { Err(CacheError::Forked) }
    }

    /// The mapped length in bytes: the device's length when it was mapped.
    pub fn len(&self) -> u64 {
        self.geometry().len_bytes
    }

    /// Always false: an empty device cannot be mapped.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The backend that serves this mapping.
    pub fn backend(&self) -> Backend {
        match self.served {
            Served::User(..) => Backend::User,
            Served::Kernel(..) => Backend::Kernel,
        }
    }

    /// The first byte. Loads anywhere in the mapping are valid while it lives.
    ///
    /// A load of a page that is not resident loads it from the device. If that fails, the access
    /// raises SIGBUS, as with mmap.
    ///
    /// Memory passed to a system call must be pinned first ([`Mapping::pin`]): the kernel cannot
    /// load pages of a user-backed mapping, and the call fails with EFAULT.
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        match &self.served {
            Served::User(store, _) => store.memory.address(0),
            Served::Kernel(file, _) => file.address(0),
        }
    }

    pub(crate) fn pages_of(&self, range: &Range<u64>) -> Result<Range<u64>> {
        self.check_process()?;
        let len = range.end.checked_sub(range.start).ok_or(CacheError::OutOfBounds {
            offset_bytes: range.start,
            len_bytes: 0,
            mapped_bytes: self.len(),
        })?;
        self.geometry().pages_of(range.start, len)
    }

    /// Loads the pages of a range and calls `look` on its bytes, which stay resident during the
    /// call.
    ///
    /// # Errors
    /// [`CacheError::Load`] if a page cannot be read; [`CacheError::OutOfBounds`]; [`CacheError::Exhausted`] if
    /// the budget cannot hold the range.
    pub fn read<T>(&self, range: Range<u64>, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        match &self.served {
            Served::User(..) => Ok(look(self.pin(range)?.bytes())),
            Served::Kernel(file, _) => {
                self.pages_of(&range)?;
                file.read(&range, look)
            }
        }
    }

    /// Copies `target.len()` bytes from `offset_bytes`, like `read_exact_at` of a file. Errors as
    /// [`Mapping::read`]; the range may exceed the budget, because pages are held one at a time.
    pub fn read_exact_at(&self, target: &mut [u8], offset_bytes: u64) -> Result<()> {
        // SAFETY: the target is the caller's own.
        unsafe { self.copy_to(offset_bytes, target.as_mut_ptr(), target.len()) }
    }

    /// The value at `offset_bytes`, in native byte order; any alignment.
    #[inline]
    pub fn get<T: FromBytes>(&self, offset_bytes: u64) -> Result<T> {
        let mut value = std::mem::MaybeUninit::<T>::uninit();
        // SAFETY: the value is of that size.
        unsafe { self.copy_to(offset_bytes, value.as_mut_ptr().cast(), size_of::<T>()) }?;
        // SAFETY: every byte was copied, and `FromBytes`: any bytes are a `T`.
        Ok(unsafe { value.assume_init() })
    }

    /// # Safety
    /// `target` is writable for `len` bytes.
    #[inline]
    unsafe fn copy_to(&self, offset_bytes: u64, target: *mut u8, len: usize) -> Result<()> {
        self.check_process()?;
        match &self.served {
            Served::User(store, _) => {
                store.for_each_page(offset_bytes, len, Access::Read, |address, part| {
                    // SAFETY: the page is pinned, and the part lies within the target.
                    unsafe { copy_racy(address, target.add(part.start), part.len()) };
                })
            }
            Served::Kernel(file, _) => {
                file.geometry.pages_of(offset_bytes, len as u64)?;
                // SAFETY: guaranteed by the caller.
                unsafe { file.copy_to(offset_bytes, target, len) }
            }
        }
    }

    /// Makes a range resident and pins it: it is not evicted, and system calls may read it.
    ///
    /// # Errors
    /// As [`Mapping::read`]; on error nothing stays pinned.
    pub fn pin(&self, range: Range<u64>) -> Result<Pinned<'_>> {
        let pages = self.pages_of(&range)?;
        match &self.served {
            Served::User(store, _) => Pinned::user(store, range, pages, PinKind::Read),
            Served::Kernel(file, _) => Pinned::kernel(file, range),
        }
    }

    /// Loads the page at `offset_bytes` without a signal. If it is resident this costs one load.
    #[inline]
    pub fn touch(&self, offset_bytes: u64) -> Result<()> {
        match &self.served {
            Served::User(store, _) if store.touch_resident(offset_bytes) => Ok(()),
            Served::Kernel(file, _)
                if offset_bytes < file.geometry.len_bytes
                    && self.running.engine.mark.is_current() =>
            {
                file.touch(offset_bytes)
            }
            _ => self.touch_slowly(offset_bytes),
        }
    }

    #[cold]
    fn touch_slowly(&self, offset_bytes: u64) -> Result<()> {
        let pages = self.pages_of(&(offset_bytes..offset_bytes.saturating_add(1)))?;
        match &self.served {
            Served::User(store, _) => store.touch(pages.start, Access::Read),
            Served::Kernel(file, _) => file.touch(offset_bytes),
        }
    }

    /// Loads the pages of many ranges at the device's queue depth, and waits for them.
    ///
    /// If the budget cannot hold them all, later pages may evict earlier ones; each is read once.
    pub fn touch_many(&self, ranges: &[Range<u64>]) -> Result<()> {
        let pages = self.page_ranges(ranges)?;
        match &self.served {
            Served::User(store, _) => store.touch_runs(&pages),
            Served::Kernel(file, _) => file.touch_many(ranges),
        }
    }

    /// As [`Mapping::touch_many`], awaitable on any executor. The work runs on the cache's I/O
    /// threads.
    pub fn touch_many_async(
        &self,
        ranges: &[Range<u64>],
    ) -> impl Future<Output = Result<()>> + Send + use<> {
        let work = || -> Box<dyn FnOnce() -> Result<()> + Send> {
            let pages = self.page_ranges(ranges);
            match &self.served {
                Served::User(store, _) => {
                    let store = self.in_use(store);
                    Box::new(move || store.touch_runs(&pages?))
                }
                Served::Kernel(file, _) => {
                    let (file, ranges) = (file.clone(), ranges.to_vec());
                    Box::new(move || pages.and_then(|_| file.touch_many(&ranges)))
                }
            }
        };
        let engine = &self.running.engine;
        asynchronous::run(&engine.jobs, engine.mark.is_current().then(work))
    }

    /// Starts loading many ranges in the background and returns at once.
    ///
    /// A hint: the access that needs a page loads it if the prefetch did not, and reports errors. All ranges are one piece of
    /// work. If the budget cannot hold them, the first ones take half of it, or what is free, and the other pages there stay.
    /// While requests wait that name as many pages as the budget holds, further ones are dropped.
    pub fn prefetch(&self, ranges: &[Range<u64>]) -> Result<()> {
        let pages = self.page_ranges(ranges)?;
        match &self.served {
            Served::User(store, _) => store.hint(pages),
            Served::Kernel(file, _) => file.will_need(ranges),
        }
        Ok(())
    }

    fn page_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Range<u64>>> {
        ranges.iter().map(|range| self.pages_of(range)).collect()
    }

    /// Whether every page of a range is in memory now.
    pub fn is_resident(&self, range: Range<u64>) -> Result<bool> {
        let mut pages = self.pages_of(&range)?;
        match &self.served {
            Served::User(store, _) => Ok(pages.all(|page| store.is_resident(page))),
            Served::Kernel(file, _) => file.is_resident(&range),
        }
    }

    /// Applies advice to a range. See [`Advice`].
    pub fn advise(&self, range: Range<u64>, advice: Advice) -> Result<()> {
        let pages = self.pages_of(&range)?;
        match &self.served {
            Served::User(store, _) => store.advise(pages, advice),
            Served::Kernel(file, _) => file.advise(&range, advice),
        }
        Ok(())
    }

    /// The first bare load since the last call that was answered with zeros, as an error; see
    /// [`MapOptions::zeros_for_missing`]. From here on loads find the file again, as far as it is there.
    pub fn take_missed_fault(&self) -> Option<CacheError> {
        match &self.served {
            // In a child the mapping is its parent's.
            _ if !self.running.engine.mark.is_current() => None,
            Served::User(store, _) => store.take_missed(),
            Served::Kernel(file, _) => file.take_missed(),
        }
    }

    /// The last bare access that could not be served, as an error.
    pub fn last_fault_error(&self) -> Option<CacheError> {
        let bare_fault = |id| self.running.engine.bare_fault(id);
        match &self.served {
            Served::User(store, _) => Some(store.bare_fault_error(bare_fault(store.id)?)),
            Served::Kernel(file, _) => Some(file.bare_fault_error(bare_fault(file.id)?)),
        }
    }

    /// Ends a mapping of the kernel backend in place, for programs in which pointers to its memory may be left that nothing can
    /// revoke. The addresses stay reserved until the mapping is dropped: loads find zeros, and stores are discarded. Afterwards
    /// only drop the mapping.
    ///
    /// Returns false for a mapping of the user backend: other mappings of the device share its pages, which stay valid until it
    /// is dropped.
    ///
    /// # Errors
    /// [`CacheError::Forked`]; [`CacheError::Vm`]: the process has no room for one more mapping.
    pub fn retire(&self) -> Result<bool> {
        self.check_process()?;
        let Served::Kernel(file, _) = &self.served else { return Ok(false) };
        self.running.drop_manager()?.remove(file);
        file.retire()?;
        Ok(true)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let engine = &self.running.engine;
        if !engine.mark.is_current() {
            return;
        }
        match &self.served {
            // The last user of the store tears it down. Other users remain: write back this
            // mapping's stores now.
            Served::User(store, attached) => {
                if self.writable && Arc::strong_count(attached) > 1 {
                    let _ = store.write_back(0..store.geometry.pages());
                }
            }
            Served::Kernel(file, _) => {
                if let Ok(manager) = self.running.drop_manager() {
                    manager.remove(file);
                }
                engine.leave_kernel(file.geometry.len_bytes);
            }
        }
    }
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapping")
            .field("device", &self.device().name())
            .field("len", &self.len())
            .field("backend", &self.backend())
            .field("writable", &self.writable)
            .finish()
    }
}

/// A device mapped into memory for reading and writing.
///
/// Derefs to [`Mapping`], which has the methods to read. Dropping it writes dirty pages back without
/// making them durable, and reports no errors: if that matters, call [`MappingMut::flush_all`]
/// first.
///
/// A read-only mapping has no way to store:
///
/// ```compile_fail,E0599
/// fn store(mapping: &aquifer_cache::Mapping) {
///     mapping.set(0, 1u8).unwrap();
/// }
/// ```
#[derive(Debug)]
pub struct MappingMut {
    mapping: Mapping,
}

impl MappingMut {
    pub(crate) fn new(
        running: Arc<Running>,
        device: Arc<dyn Device>,
        options: MapOptions,
    ) -> Result<MappingMut> {
        Ok(MappingMut { mapping: Mapping::new(running, device, options, true)? })
    }

    #[inline]
    fn served(&self) -> (&Arc<UserStore>, &Arc<Attached<MappedMemory>>) {
        match &self.mapping.served {
            Served::User(store, attached) => (store, attached),
            Served::Kernel(..) => unreachable!("the kernel backend is for reading only"),
        }
    }

    #[inline]
    fn store(&self) -> &Arc<UserStore> {
        self.served().0
    }

    /// Excludes other mappings of the device while this one lives.
    ///
    /// # Errors
    /// [`CacheError::AlreadyAttached`] if there are other mappings.
    pub(crate) fn keep_alone(&self) -> Result<()> {
        self.served().1.keep_alone()
    }

    /// The first byte. Loads and stores anywhere in the mapping are valid while it lives; otherwise
    /// as [`Mapping::as_ptr`].
    #[inline]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.store().memory.address(0)
    }

    /// Copies all of `source` to `offset_bytes`, like `write_all_at` of a file. Durable after the
    /// next flush of the range.
    ///
    /// # Errors
    /// As [`Mapping::read_exact_at`]. Pages before the failed one are written.
    pub fn write_all_at(&self, source: &[u8], offset_bytes: u64) -> Result<()> {
        self.check_process()?;
        self.store().for_each_page(offset_bytes, source.len(), Access::Write, |address, part| {
            // SAFETY: the page is pinned for writing, and the part lies within the source.
            unsafe { copy_racy(source[part.clone()].as_ptr(), address, part.len()) };
        })
    }

    /// Stores a value at `offset_bytes`, in native byte order; any alignment.
    ///
    /// # Errors
    /// As [`MappingMut::write_all_at`].
    pub fn set<T: IntoBytes + Immutable>(&self, offset_bytes: u64, value: T) -> Result<()> {
        self.write_all_at(value.as_bytes(), offset_bytes)
    }

    /// As [`Mapping::pin`], and system calls may also *write* the range. The pages become dirty.
    ///
    /// # Errors
    /// As [`Mapping::pin`].
    pub fn pin_mut(&self, range: Range<u64>) -> Result<PinnedMut<'_>> {
        let pages = self.pages_of(&range)?;
        PinnedMut::new(self.store(), range, pages)
    }

    /// Makes the page at `offset_bytes` ready for a store, without a signal: resident and dirty.
    #[inline]
    pub fn touch_mut(&self, offset_bytes: u64) -> Result<()> {
        let pages = self.pages_of(&(offset_bytes..offset_bytes.saturating_add(1)))?;
        self.store().touch(pages.start, Access::Write)
    }

    /// Writes back the dirty pages of a range and makes them durable.
    ///
    /// When it returns `Ok`, every store to the range made before the call survives a crash and a
    /// power cut.
    ///
    /// # Errors
    /// [`CacheError::WriteBack`] names the pages that could not be written; they stay dirty and the
    /// next flush retries them. [`CacheError::Sync`] is final, see there.
    pub fn flush(&self, range: Range<u64>) -> Result<()> {
        let pages = self.pages_of(&range)?;
        self.store().flush(pages)
    }

    /// [`MappingMut::flush`] of the whole mapping.
    pub fn flush_all(&self) -> Result<()> {
        self.flush(0..self.len())
    }

    /// [`MappingMut::flush`], awaitable on any executor.
    pub fn flush_async(
        &self,
        range: Range<u64>,
    ) -> impl Future<Output = Result<()>> + Send + use<> {
        let work = || {
            let (pages, store) = (self.pages_of(&range), self.in_use(self.store()));
            move || store.flush(pages?)
        };
        let engine = &self.running.engine;
        asynchronous::run(&engine.jobs, engine.mark.is_current().then(work))
    }
}

impl Deref for MappingMut {
    type Target = Mapping;
    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}
