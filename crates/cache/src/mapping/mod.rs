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
//! A resident byte is reached by a plain load through [`Mapping::as_ptr`]. Everything else here returns
//! `Result`: it brings pages in without a fault, and says what went wrong.

mod pinned;
mod user;

pub use pinned::Pinned;
pub(crate) use user::UserStore;

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::Device;
use aquifer_sys::memory::copy_racy;

use crate::asynchronous;
use crate::bytes::{Bytes, Pod};
use crate::cache::Running;
use crate::engine::Kind;
use crate::error::{Error, Result};
use crate::mapped_memory::MappedMemory;
use crate::page_word::PinKind;
use crate::readahead::Pattern;
use crate::store::{Access, Geometry, PageMemory, Store};

/// Which mechanism serves a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backend {
    /// What is cheapest on this machine and keeps the promise of the mapping.
    #[default]
    Auto,
    /// A kernel file mapping whose residency is kept under the budget. Read-only, regular files.
    Kernel,
    /// Faults served by the cache: writable mappings, any device, exact budget, own policy.
    User,
}

impl Backend {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Auto => "auto",
            Backend::Kernel => "kernel",
            Backend::User => "user",
        }
    }
}

/// How a device is mapped.
#[derive(Debug, Clone, Default)]
pub struct MapOptions {
    writable: bool,
    backend: Backend,
}

impl MapOptions {
    /// Read-only, backend chosen by the cache.
    pub fn new() -> MapOptions {
        MapOptions::default()
    }

    /// Whether stores are allowed.
    pub fn writable(mut self, writable: bool) -> MapOptions {
        self.writable = writable;
        self
    }

    /// Forces a backend.
    pub fn backend(mut self, backend: Backend) -> MapOptions {
        self.backend = backend;
        self
    }
}

/// What the application says about its accesses to a range, with the meaning mmap users expect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Find the pattern out.
    Normal,
    /// The mapping is read in order: read far ahead, from the first miss on. Holds for the whole mapping.
    Sequential,
    /// The mapping is read at random: never read ahead. Holds for the whole mapping.
    Random,
    /// The range is wanted soon: start loading it in the background.
    WillNeed,
    /// The range is not wanted: give its memory back now. Unlike `MADV_DONTNEED` on private memory nothing
    /// is lost: dirty pages are written back first, and a later access loads the page again.
    DontNeed,
    /// The range is not wanted soon: its pages are the next victims.
    Cold,
}

/// A device as memory. See the module documentation.
///
/// May be used from any thread. Dropping it writes dirty pages back without making them durable, and
/// reports nothing: call [`Mapping::flush_all`] first where that matters.
pub struct Mapping {
    user: Arc<UserStore>,
    running: Arc<Running>,
}

impl Mapping {
    pub(crate) fn new(
        running: Arc<Running>,
        device: Arc<dyn Device>,
        options: MapOptions,
    ) -> Result<Mapping> {
        let engine = running.engine.clone();
        let geometry = attach_geometry(&*device, engine.options.page_bytes)?;
        if options.writable && !device.is_writable() {
            return Err(Error::ReadOnly { device: device.name().to_owned() });
        }
        let memory = MappedMemory::new(engine.clone(), geometry, options.writable)?;
        let id = engine.reserve_id();
        let store = Store::new(id, engine.clone(), device, geometry, options.writable, memory)?;
        let mut store = Arc::new(store);
        let owner: *const UserStore = Arc::as_ptr(&store);
        let reservation = &mut Arc::get_mut(&mut store).expect("not shared yet").memory.reservation;
        // SAFETY: the reservation is dropped with the store it names as its owner.
        unsafe { reservation.set_owner(owner) }?;
        engine.attach(id, store.clone(), Kind::Mapped);
        Ok(Mapping { user: store, running })
    }

    fn check_process(&self) -> Result<()> {
        if self.running.engine.mark.is_current() { Ok(()) } else { Err(Error::Forked) }
    }

    /// The mapped length in bytes: the device's when it was mapped.
    pub fn len(&self) -> u64 {
        self.user.geometry.len_bytes
    }

    /// Never: an empty device is not mapped.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Which mechanism serves this mapping.
    pub fn backend(&self) -> Backend {
        Backend::User
    }

    /// Whether stores are allowed.
    pub fn is_writable(&self) -> bool {
        self.user.writable
    }

    /// The first byte. Loads anywhere in the mapping are valid while it lives; a page that is not there is
    /// loaded by the access itself. If that fails, the access raises SIGBUS, as with mmap.
    ///
    /// Memory handed to a system call must be pinned first ([`Mapping::pin`]): the kernel cannot load
    /// pages of a user-backed mapping, and answers EFAULT.
    pub fn as_ptr(&self) -> *const u8 {
        self.user.memory.address(0)
    }

    /// The first byte, for stores.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] if the mapping is.
    pub fn as_mut_ptr(&self) -> Result<*mut u8> {
        self.check_writable()?;
        Ok(self.user.memory.address(0))
    }

    fn check_writable(&self) -> Result<()> {
        if self.is_writable() {
            return Ok(());
        }
        Err(Error::ReadOnly { device: self.user.device.name().to_owned() })
    }

    fn pages_of(&self, range: &Range<u64>) -> Result<Range<u64>> {
        self.check_process()?;
        let len = range.end.checked_sub(range.start).ok_or(Error::OutOfBounds {
            offset_bytes: range.start,
            len_bytes: 0,
            mapped_bytes: self.len(),
        })?;
        self.user.geometry.pages_of(range.start, len)
    }

    /// Brings the pages of a range in and calls `look` on its bytes, which stay resident meanwhile.
    ///
    /// # Errors
    /// [`Error::Load`] if a page cannot be read; [`Error::OutOfBounds`]; [`Error::Exhausted`] if the
    /// budget cannot hold the range.
    pub fn read<T>(&self, range: Range<u64>, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        let pinned = self.pin(range)?;
        Ok(look(pinned.bytes()))
    }

    /// Copies `target.len()` bytes from `offset_bytes`. Errors as [`Mapping::read`]; a range larger than
    /// the budget is fine, because pages are held one at a time.
    pub fn read_into(&self, offset_bytes: u64, target: &mut [u8]) -> Result<()> {
        self.for_each_page(offset_bytes, target.len(), Access::Read, |address, part| {
            let target = &mut target[part];
            // SAFETY: the page is pinned; the target is the caller's own.
            unsafe { copy_racy(address, target.as_mut_ptr(), target.len()) };
        })
    }

    /// Copies `source` to `offset_bytes`. Durable after the next flush of the range.
    ///
    /// # Errors
    /// As [`Mapping::read_into`], and [`Error::ReadOnly`]. Pages before the one that failed are written.
    pub fn write(&self, offset_bytes: u64, source: &[u8]) -> Result<()> {
        self.check_writable()?;
        self.for_each_page(offset_bytes, source.len(), Access::Write, |address, part| {
            let source = &source[part];
            // SAFETY: the page is pinned for writing.
            unsafe { copy_racy(source.as_ptr(), address, source.len()) };
        })
    }

    /// The value at `offset_bytes`, in the machine's byte order; any alignment.
    pub fn get<T: Pod>(&self, offset_bytes: u64) -> Result<T> {
        let mut value = std::mem::MaybeUninit::<T>::uninit();
        self.for_each_page(offset_bytes, size_of::<T>(), Access::Read, |address, part| {
            // SAFETY: the page is pinned, and the part lies within the value.
            unsafe {
                copy_racy(address, value.as_mut_ptr().cast::<u8>().add(part.start), part.len());
            }
        })?;
        // SAFETY: every byte was copied, and every bit pattern is a `T`.
        Ok(unsafe { value.assume_init() })
    }

    /// Stores a value at `offset_bytes`, in the machine's byte order; any alignment.
    pub fn set<T: Pod>(&self, offset_bytes: u64, value: T) -> Result<()> {
        self.check_writable()?;
        let source = std::ptr::from_ref(&value).cast::<u8>();
        self.for_each_page(offset_bytes, size_of::<T>(), Access::Write, |address, part| {
            // SAFETY: the page is pinned for writing, and the part lies within the value.
            unsafe { copy_racy(source.add(part.start), address, part.len()) };
        })
    }

    /// Calls `work` with the address and the part of the range on each page, pinned one at a time.
    fn for_each_page(
        &self,
        offset_bytes: u64,
        len: usize,
        access: Access,
        mut work: impl FnMut(*mut u8, Range<usize>),
    ) -> Result<()> {
        self.check_process()?;
        let store = &*self.user;
        let pages = store.geometry.pages_of(offset_bytes, len as u64)?;
        let end = offset_bytes + len as u64;
        for page in pages {
            let first = store.geometry.offset_of(page).max(offset_bytes);
            let last = store.geometry.offset_of(page + 1).min(end);
            let pin = if access == Access::Write { PinKind::Write } else { PinKind::Read };
            store
                .ensure(page, access, Some(pin), false)
                .map_err(|refused| store.error(page, refused))?;
            let address = self.as_ptr().cast_mut().wrapping_add(first as usize);
            let start = (first - offset_bytes) as usize;
            work(address, start..start + (last - first) as usize);
            store.unpin(page);
        }
        Ok(())
    }

    /// Makes a range resident and keeps it so: not evicted, and safe to hand to system calls that read it.
    ///
    /// # Errors
    /// As [`Mapping::read`]; nothing stays pinned then.
    pub fn pin(&self, range: Range<u64>) -> Result<Pinned<'_>> {
        self.pin_as(range, PinKind::Read)
    }

    /// As [`Mapping::pin`], and safe to hand to system calls that *write* it. The pages count as dirty.
    ///
    /// # Errors
    /// As [`Mapping::pin`], and [`Error::ReadOnly`].
    pub fn pin_mut(&self, range: Range<u64>) -> Result<Pinned<'_>> {
        self.check_writable()?;
        self.pin_as(range, PinKind::Write)
    }

    fn pin_as(&self, range: Range<u64>, kind: PinKind) -> Result<Pinned<'_>> {
        let pages = self.pages_of(&range)?;
        Pinned::new(&self.user, range, pages, kind)
    }

    /// Brings the page at `offset_bytes` in, without a signal. A resident page costs one load.
    #[inline]
    pub fn touch(&self, offset_bytes: u64) -> Result<()> {
        let store = &*self.user;
        if offset_bytes < store.geometry.len_bytes {
            let page = offset_bytes / store.geometry.page_bytes as u64;
            let seen = store.seen(page);
            if seen.is_readable() {
                store.pool().hit(seen.frame());
                return Ok(());
            }
        }
        self.touch_slowly(offset_bytes)
    }

    #[cold]
    fn touch_slowly(&self, offset_bytes: u64) -> Result<()> {
        let pages = self.pages_of(&(offset_bytes..offset_bytes.saturating_add(1)))?;
        let store = &*self.user;
        store
            .ensure(pages.start, Access::Read, None, false)
            .map(drop)
            .map_err(|refused| store.error(pages.start, refused))
    }

    /// Makes the page at `offset_bytes` ready for a store, without a signal: present and dirty.
    #[inline]
    pub fn touch_mut(&self, offset_bytes: u64) -> Result<()> {
        self.check_writable()?;
        let pages = self.pages_of(&(offset_bytes..offset_bytes.saturating_add(1)))?;
        let store = &*self.user;
        store
            .ensure(pages.start, Access::Write, None, false)
            .map(drop)
            .map_err(|refused| store.error(pages.start, refused))
    }

    /// Brings the pages of many ranges in, at the device's queue depth, and waits for them.
    ///
    /// Later ones may push out earlier ones if the budget cannot hold them all.
    pub fn touch_many(&self, ranges: &[Range<u64>]) -> Result<()> {
        let pages = self.page_ranges(ranges)?;
        let store = &*self.user;
        store.touch_many(&pages).map_err(|(page, refused)| store.error(page, refused))
    }

    /// As [`Mapping::touch_many`], awaitable on any executor. The work runs on the cache's I/O threads.
    pub fn touch_many_async(
        &self,
        ranges: &[Range<u64>],
    ) -> impl Future<Output = Result<()>> + Send + 'static {
        let pages = self.page_ranges(ranges);
        let store = self.user.clone();
        asynchronous::run(&self.running.engine.jobs, move || {
            store.touch_many(&pages?).map_err(|(page, refused)| store.error(page, refused))
        })
    }

    /// Starts loading many ranges in the background and returns at once. A hint: what does not fit, or
    /// fails, is loaded or reported by the access that needs it.
    pub fn prefetch(&self, ranges: &[Range<u64>]) -> Result<()> {
        for pages in self.page_ranges(ranges)? {
            let engine = &self.running.engine;
            engine.request_prefetch(self.user.id, pages.start, pages.end - pages.start);
        }
        Ok(())
    }

    fn page_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Range<u64>>> {
        ranges.iter().map(|range| self.pages_of(range)).collect()
    }

    /// Whether every page of a range is in memory now.
    pub fn is_resident(&self, range: Range<u64>) -> Result<bool> {
        let mut pages = self.pages_of(&range)?;
        Ok(pages.all(|page| self.user.is_resident(page)))
    }

    /// Follows advice about a range. See [`Advice`].
    pub fn advise(&self, range: Range<u64>, advice: Advice) -> Result<()> {
        let pages = self.pages_of(&range)?;
        let store = &*self.user;
        match advice {
            Advice::Normal => store.readahead.set_pattern(Pattern::Detect),
            Advice::Sequential => store.readahead.set_pattern(Pattern::Sequential),
            Advice::Random => store.readahead.set_pattern(Pattern::Random),
            Advice::WillNeed => self.prefetch(&[range])?,
            Advice::DontNeed => {
                let _ = store.write_back(pages.clone());
                store.discard_clean(pages);
            }
            Advice::Cold => {
                for seen in pages.map(|page| store.seen(page)) {
                    if seen.is_resident() {
                        store.pool().demoted(seen.frame());
                    }
                }
            }
        }
        Ok(())
    }

    /// Writes the dirty pages of a range back and makes them durable. When it returns `Ok`, every store to
    /// the range made before the call survives a crash and a power cut.
    ///
    /// # Errors
    /// [`Error::WriteBack`] names what could not be written; it stays dirty and is tried again by the next
    /// flush. [`Error::Sync`] is final, see there.
    pub fn flush(&self, range: Range<u64>) -> Result<()> {
        let pages = self.pages_of(&range)?;
        self.user.flush(pages)
    }

    /// [`Mapping::flush`] of everything.
    pub fn flush_all(&self) -> Result<()> {
        self.flush(0..self.len())
    }

    /// [`Mapping::flush`], awaitable on any executor.
    pub fn flush_async(
        &self,
        range: Range<u64>,
    ) -> impl Future<Output = Result<()>> + Send + 'static {
        let pages = self.pages_of(&range);
        let store = self.user.clone();
        asynchronous::run(&self.running.engine.jobs, move || store.flush(pages?))
    }

    /// Refused: a mapping is unmapped whole. For a part, [`Advice::DontNeed`] gives the memory back.
    ///
    /// # Errors
    /// [`Error::PartialUnmap`] always, unless the range is the whole mapping, which is then unmapped.
    pub fn unmap(self, range: Range<u64>) -> std::result::Result<(), (Mapping, Error)> {
        if range == (0..self.len()) { Ok(()) } else { Err((self, Error::PartialUnmap)) }
    }

    /// The last bare access that could not be served, as an error.
    pub fn last_fault_error(&self) -> Option<Error> {
        let fault = self.running.engine.bare_fault(self.user.id)?;
        Some(Error::Load {
            device: self.user.device.name().to_owned(),
            offset_bytes: self.user.geometry.offset_of(fault.page.0),
            source: aquifer_device::DeviceError::Io {
                operation: aquifer_device::IoOperation::Read,
                offset_bytes: self.user.geometry.offset_of(fault.page.0),
                len_bytes: self.user.geometry.page_bytes,
                source: std::io::Error::from_raw_os_error(fault.os_error),
            },
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if !self.running.engine.mark.is_current() {
            return;
        }
        let engine = &self.running.engine;
        engine.detach(self.user.id);
        self.user.teardown();
        engine.release_id(self.user.id);
        engine.use_budget(Kind::Mapped, false);
    }
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapping")
            .field("device", &self.user.device.name())
            .field("len", &self.len())
            .field("backend", &self.backend())
            .field("writable", &self.is_writable())
            .finish()
    }
}

/// Checks that a device can be attached, and measures it.
pub(crate) fn attach_geometry(device: &dyn Device, page_bytes: usize) -> Result<Geometry> {
    let name = || device.name().to_owned();
    let len_bytes =
        device.len_bytes().map_err(|source| Error::Device { device: name(), source })?;
    if len_bytes == 0 {
        return Err(Error::Empty { device: name() });
    }
    let alignment_bytes = device.alignment_bytes();
    if !alignment_bytes.is_power_of_two() || !page_bytes.is_multiple_of(alignment_bytes) {
        return Err(Error::Alignment { device: name(), alignment_bytes });
    }
    Ok(Geometry { len_bytes, page_bytes })
}

const _: () = assert!(<MappedMemory as PageMemory>::CONTIGUOUS, "bytes() of a range is one run");
