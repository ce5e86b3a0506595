//! [`Mapping`]: a device as memory.
//!
//! ```text
//!              Mapping
//!             ┌───┴────────────┐
//!       kernel backend     user backend
//!       file mapping,      userfaultfd, page words,
//!       drop manager       own frames and policy
//! ```
//!
//! A plain load through [`Mapping::as_ptr`] reads a resident byte. All other accesses return
//! `Result`: they load pages without a fault, and return errors.

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::Device;
use aquifer_sys::memory::copy_racy;

use crate::asynchronous;
use crate::choose::choose;
use crate::claims::{Attached, Claim, Wanted};
use crate::engine::{Engine, InUse, Kind};
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::kernel::KernelFile;
use crate::map_options::{Advice, Backend, MapOptions};
use crate::mapped_memory::MappedMemory;
use crate::page_word::PinKind;
use crate::pinned::Pinned;
use crate::running::Running;
use crate::store::Access;
use crate::user_store::UserStore;
use aquifer_vm::{Bytes, Pod};

/// A device mapped into memory. See the module documentation.
///
/// May be used from any thread. Mappings of one device in one cache share their pages, see
/// [`Cache::map_with`](crate::Cache::map_with). Dropping a mapping writes dirty pages back without
/// making them durable, and reports no errors: if that matters, call [`Mapping::flush_all`] first.
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
    served: Served,
    writable: bool,
    running: Arc<Running>,
}

/// The backend.
enum Served {
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
    ) -> Result<Mapping> {
        let engine = &running.engine;
        let geometry = Geometry::of_device(&*device, engine.options.page_bytes)?;
        if options.writable && !device.is_writable() {
            return Err(Error::ReadOnly { device: device.name().to_owned() });
        }
        let writable = options.writable;
        let wanted = Wanted {
            engine: engine.clone(),
            identity: device.identity(),
            device: device.clone(),
            kind: Kind::Mapped,
            len_bytes: geometry.len_bytes,
            writable,
        };
        if options.backend != Backend::Kernel
            && let Some(attached) = Attached::existing(&wanted)?
        {
            return Ok(Mapping { served: Served::shared(attached), writable, running });
        }
        let served = match choose(engine, &device, geometry.len_bytes, &options)? {
            Some(file) => {
                let claim = match Claim::unshared(&Wanted { kind: Kind::Kernel, ..wanted.clone() })
                {
                    Ok(claim) => claim,
                    // Another thread attached the device in between, and may have a store to share.
                    Err(refused) if options.backend == Backend::Auto => {
                        let attached = Attached::existing(&wanted)?.ok_or(refused)?;
                        return Ok(Mapping { served: Served::shared(attached), writable, running });
                    }
                    Err(refused) => return Err(refused),
                };
                running.drop_manager()?.add(file.clone());
                engine.join_kernel(file.geometry.len_bytes);
                Served::Kernel(file, claim)
            }
            None => Served::shared(Attached::attach(&wanted, || {
                UserStore::map(engine.clone(), device, geometry, writable)
            })?),
        };
        Ok(Mapping { served, writable, running })
    }

    /// A reference for a call that may outlive the caller's borrow; dropping the mapping waits for
    /// it.
    fn in_use(&self, store: &Arc<UserStore>) -> InUse<UserStore, Arc<Engine>> {
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

    /// Excludes other mappings of the device while this one lives.
    ///
    /// # Errors
    /// [`Error::AlreadyAttached`] if there are other mappings, [`Error::ReadOnly`] if this one is
    /// read-only.
    pub(crate) fn keep_alone(&self) -> Result<()> {
        self.writable()?;
        match &self.served {
            Served::User(_, attached) => attached.keep_alone(),
            Served::Kernel(..) => Ok(()),
        }
    }

    /// The store of a writable, user-backed mapping; [`Error::ReadOnly`] for any other.
    fn writable(&self) -> Result<&UserStore> {
        match &self.served {
            Served::User(store, _) if self.writable => Ok(store),
            _ => Err(Error::ReadOnly { device: self.device().name().to_owned() }),
        }
    }

    fn check_process(&self) -> Result<()> {
        if self.running.engine.mark.is_current() { Ok(()) } else { Err(Error::Forked) }
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

    /// Whether stores are allowed.
    pub fn is_writable(&self) -> bool {
        self.writable().is_ok()
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

    /// The first byte, for stores.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] if the mapping is read-only.
    pub fn as_mut_ptr(&self) -> Result<*mut u8> {
        Ok(self.writable()?.memory.address(0))
    }

    fn pages_of(&self, range: &Range<u64>) -> Result<Range<u64>> {
        self.check_process()?;
        let len = range.end.checked_sub(range.start).ok_or(Error::OutOfBounds {
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
    /// [`Error::Load`] if a page cannot be read; [`Error::OutOfBounds`]; [`Error::Exhausted`] if
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

    /// Copies `target.len()` bytes from `offset_bytes`. Errors as [`Mapping::read`]; the range may
    /// exceed the budget, because pages are held one at a time.
    pub fn read_into(&self, offset_bytes: u64, target: &mut [u8]) -> Result<()> {
        // SAFETY: the target is the caller's own.
        unsafe { self.copy_to(offset_bytes, target.as_mut_ptr(), target.len()) }
    }

    /// Copies `source` to `offset_bytes`. Durable after the next flush of the range.
    ///
    /// # Errors
    /// As [`Mapping::read_into`], and [`Error::ReadOnly`]. Pages before the failed one are written.
    pub fn write(&self, offset_bytes: u64, source: &[u8]) -> Result<()> {
        // SAFETY: the source is the caller's own.
        unsafe { self.copy_from(offset_bytes, source.as_ptr(), source.len()) }
    }

    /// The value at `offset_bytes`, in native byte order; any alignment.
    #[inline]
    pub fn get<T: Pod>(&self, offset_bytes: u64) -> Result<T> {
        let mut value = std::mem::MaybeUninit::<T>::uninit();
        // SAFETY: the value is of that size.
        unsafe { self.copy_to(offset_bytes, value.as_mut_ptr().cast(), size_of::<T>()) }?;
        // SAFETY: every byte was copied, and every bit pattern is a `T`.
        Ok(unsafe { value.assume_init() })
    }

    /// Stores a value at `offset_bytes`, in native byte order; any alignment.
    pub fn set<T: Pod>(&self, offset_bytes: u64, value: T) -> Result<()> {
        // SAFETY: the value is of that size.
        unsafe { self.copy_from(offset_bytes, std::ptr::from_ref(&value).cast(), size_of::<T>()) }
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

    /// # Safety
    /// `source` is readable for `len` bytes.
    unsafe fn copy_from(&self, offset_bytes: u64, source: *const u8, len: usize) -> Result<()> {
        self.check_process()?;
        let store = self.writable()?;
        store.for_each_page(offset_bytes, len, Access::Write, |address, part| {
            // SAFETY: the page is pinned for writing, and the part lies within the source.
            unsafe { copy_racy(source.add(part.start), address, part.len()) };
        })
    }

    /// Makes a range resident and pins it: it is not evicted, and system calls may read it.
    ///
    /// # Errors
    /// As [`Mapping::read`]; on error nothing stays pinned.
    pub fn pin(&self, range: Range<u64>) -> Result<Pinned<'_>> {
        self.pin_as(range, PinKind::Read)
    }

    /// As [`Mapping::pin`], and system calls may also *write* the range. The pages become dirty.
    ///
    /// # Errors
    /// As [`Mapping::pin`], and [`Error::ReadOnly`].
    pub fn pin_mut(&self, range: Range<u64>) -> Result<Pinned<'_>> {
        self.writable()?;
        self.pin_as(range, PinKind::Write)
    }

    fn pin_as(&self, range: Range<u64>, kind: PinKind) -> Result<Pinned<'_>> {
        let pages = self.pages_of(&range)?;
        match &self.served {
            Served::User(store, _) => Pinned::user(store, range, pages, kind),
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

    /// Makes the page at `offset_bytes` ready for a store, without a signal: resident and dirty.
    #[inline]
    pub fn touch_mut(&self, offset_bytes: u64) -> Result<()> {
        let store = self.writable()?;
        let pages = self.pages_of(&(offset_bytes..offset_bytes.saturating_add(1)))?;
        store.touch(pages.start, Access::Write)
    }

    /// Loads the pages of many ranges at the device's queue depth, and waits for them.
    ///
    /// If the budget cannot hold them all, later pages may evict earlier ones.
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
    ) -> impl Future<Output = Result<()>> + Send + 'static {
        let pages = self.page_ranges(ranges);
        let work: Box<dyn FnOnce() -> Result<()> + Send> = match &self.served {
            Served::User(store, _) => {
                let store = self.in_use(store);
                Box::new(move || store.touch_runs(&pages?))
            }
            Served::Kernel(file, _) => {
                let (file, ranges) = (file.clone(), ranges.to_vec());
                Box::new(move || pages.and_then(|_| file.touch_many(&ranges)))
            }
        };
        asynchronous::run(&self.running.engine.jobs, work)
    }

    /// Starts loading many ranges in the background and returns at once.
    ///
    /// A hint: the access that needs a page loads it if the prefetch did not, and reports errors.
    pub fn prefetch(&self, ranges: &[Range<u64>]) -> Result<()> {
        let pages = self.page_ranges(ranges)?;
        match &self.served {
            Served::User(store, _) => store.prefetch_runs(&pages),
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

    /// Writes back the dirty pages of a range and makes them durable.
    ///
    /// When it returns `Ok`, every store to the range made before the call survives a crash and a
    /// power cut.
    ///
    /// # Errors
    /// [`Error::WriteBack`] names the pages that could not be written; they stay dirty and the next
    /// flush retries them. [`Error::Sync`] is final, see there.
    pub fn flush(&self, range: Range<u64>) -> Result<()> {
        let pages = self.pages_of(&range)?;
        match &self.served {
            Served::User(store, _) => store.flush(pages),
            // Never written: the mapping is read-only.
            Served::Kernel(..) => Ok(()),
        }
    }

    /// [`Mapping::flush`] of the whole mapping.
    pub fn flush_all(&self) -> Result<()> {
        self.flush(0..self.len())
    }

    /// [`Mapping::flush`], awaitable on any executor.
    pub fn flush_async(
        &self,
        range: Range<u64>,
    ) -> impl Future<Output = Result<()>> + Send + 'static {
        let pages = self.pages_of(&range);
        let store = match &self.served {
            Served::User(store, _) => Some(self.in_use(store)),
            Served::Kernel(..) => None,
        };
        asynchronous::run(&self.running.engine.jobs, move || match store {
            Some(store) => store.flush(pages?),
            None => pages.map(drop),
        })
    }

    /// The last bare access that could not be served, as an error.
    pub fn last_fault_error(&self) -> Option<Error> {
        let bare_fault = |id| self.running.engine.bare_fault(id);
        match &self.served {
            Served::User(store, _) => Some(store.bare_fault_error(bare_fault(store.id)?)),
            Served::Kernel(file, _) => Some(file.bare_fault_error(bare_fault(file.id)?)),
        }
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
            .field("writable", &self.is_writable())
            .finish()
    }
}
