//! Mappings: a device as memory.

use std::ffi::{c_char, c_int, c_void};
use std::future::Future;
use std::ops::{ControlFlow, Deref, Range};
use std::sync::Arc;

use aquifer::{
    Advice, Backend, CacheError, FileDevice, MapOptions, Mapping, MappingMut, Pinned, PinnedMut,
};

use crate::cache::aq_cache;
use crate::call::{Failure, Result, call};
use crate::device::aq_device;
use crate::memory::{Place, free, handle, list, list_mut, path, usable};
use crate::range::{aq_bytes_fn, aq_range, passing, ranges, whole_or};
use crate::ready::{add, aq_ready};
use crate::sized::sized;

/// A device mapped into memory.
pub struct aq_mapping {
    mapped: Arc<Mapped>,
}

enum Mapped {
    Read(Mapping),
    Write(MappingMut),
}

impl Deref for Mapped {
    type Target = Mapping;
    fn deref(&self) -> &Mapping {
        match self {
            Mapped::Read(mapping) => mapping,
            Mapped::Write(mapping) => mapping,
        }
    }
}

impl Mapped {
    fn writable(&self) -> Result<&MappingMut> {
        match self {
            Mapped::Write(mapping) => Ok(mapping),
            Mapped::Read(_) => {
                let text = "the mapping is read-only: map with `writable` set";
                Err(Failure::new(libc::EROFS, aquifer::ErrorKind::ReadOnly, text))
            }
        }
    }
}

/// The cache chooses what serves the mapping.
pub const AQ_BACKEND_AUTO: c_int = 0;
/// A kernel file mapping whose residency is kept below the budget: read-only, regular files.
pub const AQ_BACKEND_KERNEL: c_int = 1;
/// The cache itself: writable mappings, any device, exact budget, the cache's policy.
pub const AQ_BACKEND_USER: c_int = 2;

/// The options of `aq_map`. Initialise it with `AQ_MAP_OPTIONS_INIT`; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_map_options {
    /// `sizeof(aq_map_options)`.
    pub size: usize,
    /// Other than 0: for reading and writing.
    pub writable: c_int,
    /// One of `AQ_BACKEND_…`.
    pub backend: c_int,
}
sized!(aq_map_options { writable: c_int, backend: c_int });

/// Advice: detect the pattern. Applies to the whole mapping.
pub const AQ_ADVICE_NORMAL: c_int = 0;
/// Advice: read in order. Applies to the whole mapping.
pub const AQ_ADVICE_SEQUENTIAL: c_int = 1;
/// Advice: read at random, never read ahead. Applies to the whole mapping.
pub const AQ_ADVICE_RANDOM: c_int = 2;
/// Advice: the range is needed soon; start to load it.
pub const AQ_ADVICE_WILL_NEED: c_int = 3;
/// Advice: the range is not needed; give its memory back. Nothing is lost: dirty pages are written
/// first.
pub const AQ_ADVICE_DONT_NEED: c_int = 4;
/// Advice: the range is not needed soon; its pages are the next to be evicted.
pub const AQ_ADVICE_COLD: c_int = 5;

/// A range to be copied: `size` bytes from `offset` to `target`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_read {
    /// The first byte, in the mapping.
    pub offset: u64,
    /// The number of bytes.
    pub size: usize,
    /// Where they go.
    pub target: *mut c_void,
}

// SAFETY: one thread at a time copies to the target, as the documentation of the functions demands.
unsafe impl Send for aq_read {}

/// Called for a range, or a piece of one longer than 64 KiB: its position in the list, the offset of
/// the first byte, and the bytes, which are valid during the call. A value other than 0 ends the
/// visit. It must not throw, longjmp out,
/// call pthread_exit, or fork.
pub type aq_visit_fn = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        index: usize,
        offset: u64,
        data: *const c_void,
        size: usize,
    ) -> c_int,
>;

/// Maps a whole device; `*mapping` is null if it fails. `options` may be null.
///
/// Threads: any. Errors: -EINVAL, -EROFS, -EOPNOTSUPP for a backend that cannot serve it, -EBUSY if
/// the device is used otherwise and one side writes, -ENOMEM. Frees: the caller, by
/// `aq_mapping_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_map(
    cache: *mut aq_cache,
    device: *mut aq_device,
    options: *const aq_map_options,
    mapping: *mut *mut aq_mapping,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(mapping, "mapping") }?;
        // SAFETY: documented.
        let (cache, device) = unsafe { (handle(cache, "cache")?, handle(device, "device")?) };
        // SAFETY: documented.
        let options = unsafe { crate::sized::options(options) }?;
        if !device.can_be_mapped {
            let text = "the device's functions are not for handlers of signals: make them so and set \
                        `signal_safe`, or use aq_pages_new";
            return Err(Failure::new(libc::EOPNOTSUPP, aquifer::ErrorKind::Unsupported, text));
        }
        place.give(map(cache, device.device.clone(), options)?);
        Ok(())
    })
}

/// Maps a whole file; `*mapping` is null if it fails. `options` may be null.
///
/// Threads: any. Errors: those of open(2) and of `aq_map`. Frees: the caller, by `aq_mapping_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_map_path(
    cache: *mut aq_cache,
    file: *const c_char,
    options: *const aq_map_options,
    mapping: *mut *mut aq_mapping,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(mapping, "mapping") }?;
        // SAFETY: documented.
        let (cache, file) = unsafe { (handle(cache, "cache")?, path(file, "file")?) };
        // SAFETY: documented.
        let options: aq_map_options = unsafe { crate::sized::options(options) }?;
        let device = FileDevice::options().writable(options.writable != 0).open(file)?;
        place.give(map(cache, Arc::new(device), options)?);
        Ok(())
    })
}

fn map(
    cache: &aq_cache,
    device: Arc<dyn aquifer::Device>,
    options: aq_map_options,
) -> Result<aq_mapping> {
    let backend = match options.backend {
        AQ_BACKEND_AUTO => Backend::Auto,
        AQ_BACKEND_KERNEL => Backend::Kernel,
        AQ_BACKEND_USER => Backend::User,
        _ => return Err(Failure::invalid("unknown backend: use one of AQ_BACKEND_…")),
    };
    let map_options = MapOptions::new().backend(backend);
    let mapped = if options.writable != 0 {
        Mapped::Write(cache.cache.map_mut_with(device, map_options)?)
    } else {
        Mapped::Read(cache.cache.map_with(device, map_options)?)
    };
    Ok(aq_mapping { mapped: Arc::new(mapped) })
}

/// Frees a mapping; null is fine. Its memory is gone when its pins are released as well. Dirty pages
/// are written back, without being made durable and without errors: call `aq_mapping_flush` first
/// where that matters. Waits for asynchronous calls under way with it.
///
/// Threads: none may be in a call with this handle, or use the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_free(mapping: *mut aq_mapping) {
    // SAFETY: documented.
    unsafe { free(mapping) }
}

/// The first byte; null if `mapping` is null. Loads anywhere in the mapping are valid until it is
/// freed; a page that cannot be loaded raises SIGBUS, as with mmap(2). Memory for system calls must be
/// pinned first: user-backed pages that are absent fail with EFAULT there.
///
/// Threads: any; also the loads, except in handlers of asynchronous signals. Frees: nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_data(mapping: *mut aq_mapping) -> *const c_void {
    // SAFETY: documented.
    let mapping = unsafe { usable(mapping) };
    mapping.map_or(std::ptr::null(), |mapping| mapping.mapped.as_ptr().cast())
}

/// The first byte, to load and store; null if the mapping is read-only or null. Otherwise as
/// `aq_mapping_data`.
///
/// Threads: any. Durable: stores before a call of `aq_mapping_flush` that returns 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_data_mut(mapping: *mut aq_mapping) -> *mut c_void {
    // SAFETY: documented.
    match unsafe { usable(mapping) }.map(|mapping| &*mapping.mapped) {
        Some(Mapped::Write(mapping)) => mapping.as_mut_ptr().cast(),
        _ => std::ptr::null_mut(),
    }
}

/// The length in bytes: the device's when it was mapped. 0 if `mapping` is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_len(mapping: *mut aq_mapping) -> u64 {
    // SAFETY: documented.
    unsafe { usable(mapping) }.map_or(0, |mapping| mapping.mapped.len())
}

/// What serves the mapping: `AQ_BACKEND_KERNEL` or `AQ_BACKEND_USER`; `AQ_BACKEND_AUTO` if `mapping`
/// is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_backend(mapping: *mut aq_mapping) -> c_int {
    // SAFETY: documented.
    match unsafe { usable(mapping) }.map(|mapping| mapping.mapped.backend()) {
        Some(Backend::Kernel) => AQ_BACKEND_KERNEL,
        Some(Backend::User) => AQ_BACKEND_USER,
        _ => AQ_BACKEND_AUTO,
    }
}

/// Copies `size` bytes from `offset`. The range may be longer than the budget.
///
/// Threads: any. Errors: -EINVAL beyond the end, -EIO and others of the device, -ENODATA if the file
/// was truncated, -ENOMEM if all pages of the budget are pinned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_read(
    mapping: *mut aq_mapping,
    buffer: *mut c_void,
    size: usize,
    offset: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (mapping, target) = unsafe {
            (handle(mapping, "mapping")?, list_mut(buffer.cast::<u8>(), size, "buffer")?)
        };
        Ok(mapping.mapped.read_exact_at(target, offset)?)
    })
}

/// Passes a range to `look`, in one piece and without a copy where that is safe; its pages stay in memory
/// during the call, so it must fit into the mappings' part of the budget: half of it while the cache has
/// pages (`aq_pages_new`) as well.
///
/// Threads: any; `look` runs in the calling one. Stores that other threads make meanwhile may be seen in
/// part. Errors: as `aq_mapping_read`; what `look` has seen is then not to be used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_look(
    mapping: *mut aq_mapping,
    range: aq_range,
    look: aq_bytes_fn,
    context: *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let mapping = unsafe { handle(mapping, "mapping") }?;
        // SAFETY: the program's own function.
        let look = unsafe { passing(look, context) }?;
        mapping.mapped.read(range.to_range()?, look)?;
        Ok(())
    })
}

/// Copies `size` bytes to `offset`.
///
/// Threads: any; of two that write to the same bytes, either may win. Errors: as `aq_mapping_read`;
/// -EROFS; pages before the one that failed are written. Durable: after `aq_mapping_flush`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_write(
    mapping: *mut aq_mapping,
    buffer: *const c_void,
    size: usize,
    offset: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (mapping, source) =
            unsafe { (handle(mapping, "mapping")?, list(buffer.cast::<u8>(), size, "buffer")?) };
        Ok(mapping.mapped.writable()?.write_all_at(source, offset)?)
    })
}

/// Copies `count` ranges to their targets in the order that costs least: sorted, neighbours in one
/// read, many reads in flight. Several times faster than loads in the order of discovery where the
/// data is on a disk.
///
/// Threads: any. Errors: as `aq_mapping_read`; targets may have been written or not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_read_many(
    mapping: *mut aq_mapping,
    reads: *const aq_read,
    count: usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (mapping, reads) = unsafe { (handle(mapping, "mapping")?, Reads::new(reads, count)?) };
        mapping.mapped.visit_many(reads.ranges(), |part| reads.copy(part))?;
        Ok(())
    })
}

/// As `aq_mapping_read_many`, without waiting: `ready` gets `token` when all is copied. The list is
/// copied; the targets are the library's until the token is taken.
///
/// Threads: any. Errors: -EINVAL, -ECHILD; others with the completion, also for a range beyond the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_read_many_async(
    mapping: *mut aq_mapping,
    reads: *const aq_read,
    count: usize,
    ready: *mut aq_ready,
    token: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (mapping, reads) = unsafe { (handle(mapping, "mapping")?, Reads::new(reads, count)?) };
        let start = || {
            let visit =
                mapping.mapped.visit_many_async(reads.ranges(), move |part| reads.copy(part));
            Ok(Box::new(visit) as Box<dyn Future<Output = _> + Send>)
        };
        // SAFETY: documented.
        unsafe { add::<CacheError>(ready, token, start) }
    })
}

/// The list of a scattered read, checked.
struct Reads(Vec<aq_read>);

impl Reads {
    /// # Safety
    /// As for [`list`]; each target is writable for its size, by this call alone.
    unsafe fn new(reads: *const aq_read, count: usize) -> Result<Reads> {
        // SAFETY: guaranteed by the caller.
        let reads = unsafe { list(reads, count, "reads") }?;
        for read in reads {
            aq_range { offset: read.offset, length: read.size as u64 }.to_range()?;
            if read.target.is_null() && read.size > 0 {
                return Err(Failure::invalid("a target is null"));
            }
        }
        Ok(Reads(reads.to_vec()))
    }

    fn ranges(&self) -> Vec<Range<u64>> {
        self.0.iter().map(|read| read.offset..read.offset + read.size as u64).collect()
    }

    fn copy(&self, part: aquifer::Visited<'_>) -> ControlFlow<()> {
        let read = self.0[part.index];
        let start = (part.offset_bytes - read.offset) as usize;
        // SAFETY: `new`; a part lies within its range.
        let target = unsafe {
            std::slice::from_raw_parts_mut(read.target.cast::<u8>().add(start), part.bytes.len())
        };
        part.bytes.copy_to(0, target);
        ControlFlow::Continue(())
    }
}

/// Calls `visit` for each of `count` ranges, in the order that costs least; see
/// `aq_mapping_read_many`. The bytes of a user-backed mapping are the cache's own; those of a kernel-backed one
/// are a copy. Returns 0, the value other
/// than 0 with which `visit` ended it, or an error.
///
/// Threads: any; `visit` runs in the calling one, and may use the mapping. Stores that other threads
/// make meanwhile may be seen in part. Errors: as `aq_mapping_read`; ranges may have been visited or
/// not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_visit(
    mapping: *mut aq_mapping,
    list: *const aq_range,
    count: usize,
    visit: aq_visit_fn,
    context: *mut c_void,
) -> c_int {
    crate::call::visit(|ended| {
        // SAFETY: documented.
        let (mapping, ranges) = unsafe { (handle(mapping, "mapping")?, ranges(list, count)?) };
        let visit = visit.ok_or_else(|| Failure::invalid("`visit` is null"))?;
        mapping.mapped.visit_many(ranges, |part| {
            let (data, size) = (part.bytes.as_ptr().cast(), part.bytes.len());
            // SAFETY: the program's own function.
            *ended = unsafe { visit(context, part.index, part.offset_bytes, data, size) };
            if *ended == 0 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        Ok(())
    })
}

/// Names the range that `aq_mapping_visit_in_order` visits next: puts it into `*range`, which is empty
/// before, and returns 1; or 0 if there is none now. It must not throw, longjmp out, call pthread_exit, or
/// fork.
pub type aq_next_range_fn =
    Option<unsafe extern "C" fn(context: *mut c_void, range: *mut aq_range) -> c_int>;

/// Calls `visit` for ranges in the order in which `next` names them, with many reads in flight: for
/// programs that must process in order and know what comes next. `next` is asked for up to 32,768 ranges
/// ahead, and again after it has returned 0: its answer may depend on what was visited; the call ends when
/// it returns 0 and nothing is under way. Empty ranges are skipped. Returns as `aq_mapping_visit`.
///
/// Threads: any; `next` and `visit` run in the calling one. Errors: as `aq_mapping_visit`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_visit_in_order(
    mapping: *mut aq_mapping,
    next: aq_next_range_fn,
    visit: aq_visit_fn,
    context: *mut c_void,
) -> c_int {
    crate::call::visit(|ended| {
        // SAFETY: documented.
        let mapping = unsafe { handle(mapping, "mapping") }?;
        let next = next.ok_or_else(|| Failure::invalid("`next` is null"))?;
        let visit = visit.ok_or_else(|| Failure::invalid("`visit` is null"))?;
        let ranges = std::iter::from_fn(|| {
            let mut range = aq_range { offset: 0, length: 0 };
            // SAFETY: the program's own function.
            let is_there = unsafe { next(context, &raw mut range) } != 0;
            // One that ends beyond 2^64 is refused as one beyond the end.
            is_there.then(|| range.offset..range.offset.saturating_add(range.length))
        });
        mapping.mapped.visit_in_order(ranges, |part| {
            let (data, size) = (part.bytes.as_ptr().cast(), part.bytes.len());
            // SAFETY: the program's own function.
            *ended = unsafe { visit(context, part.index, part.offset_bytes, data, size) };
            if *ended == 0 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        Ok(())
    })
}

/// Loads the pages of `count` ranges at the device's queue depth, and waits for them. If the budget
/// cannot hold them all, later pages may evict earlier ones.
///
/// Threads: any. Errors: as `aq_mapping_read`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_touch(
    mapping: *mut aq_mapping,
    list: *const aq_range,
    count: usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (mapping, ranges) = unsafe { (handle(mapping, "mapping")?, ranges(list, count)?) };
        Ok(mapping.mapped.touch_many(&ranges)?)
    })
}

/// Loads the page at `offset` and makes it dirty, so that a store to it does not fault a second time.
///
/// Threads: any. Errors: as `aq_mapping_read`; -EROFS.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_touch_mut(mapping: *mut aq_mapping, offset: u64) -> c_int {
    call(|| {
        // SAFETY: documented.
        let mapping = unsafe { handle(mapping, "mapping") }?;
        Ok(mapping.mapped.writable()?.touch_mut(offset)?)
    })
}

/// As `aq_mapping_touch`, without waiting: `ready` gets `token` when the pages are in memory. The list
/// is copied.
///
/// Threads: any. Errors: -EINVAL, -ECHILD; others with the completion, also for a range beyond the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_touch_async(
    mapping: *mut aq_mapping,
    list: *const aq_range,
    count: usize,
    ready: *mut aq_ready,
    token: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (mapping, ranges) = unsafe { (handle(mapping, "mapping")?, ranges(list, count)?) };
        let start = || Ok(Box::new(mapping.mapped.touch_many_async(&ranges)) as Box<_>);
        // SAFETY: documented.
        unsafe { add::<CacheError>(ready, token, start) }
    })
}

/// Starts to load `count` ranges in the background: a hint.
///
/// Threads: any. Errors: -EINVAL beyond the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_prefetch(
    mapping: *mut aq_mapping,
    list: *const aq_range,
    count: usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (mapping, ranges) = unsafe { (handle(mapping, "mapping")?, ranges(list, count)?) };
        Ok(mapping.mapped.prefetch(&ranges)?)
    })
}

/// Applies one of `AQ_ADVICE_…` to a range.
///
/// Threads: any. Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_advise(
    mapping: *mut aq_mapping,
    range: aq_range,
    advice: c_int,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let mapping = unsafe { handle(mapping, "mapping") }?;
        let advice = match advice {
            AQ_ADVICE_NORMAL => Advice::Normal,
            AQ_ADVICE_SEQUENTIAL => Advice::Sequential,
            AQ_ADVICE_RANDOM => Advice::Random,
            AQ_ADVICE_WILL_NEED => Advice::WillNeed,
            AQ_ADVICE_DONT_NEED => Advice::DontNeed,
            AQ_ADVICE_COLD => Advice::Cold,
            _ => return Err(Failure::invalid("unknown advice: use one of AQ_ADVICE_…")),
        };
        Ok(mapping.mapped.advise(range.to_range()?, advice)?)
    })
}

/// Whether every page of a range is in memory now: 1 or 0 into `*resident`.
///
/// Threads: any. Errors: -EINVAL beyond the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_is_resident(
    mapping: *mut aq_mapping,
    range: aq_range,
    resident: *mut c_int,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (mapping, place) =
            unsafe { (handle(mapping, "mapping")?, Place::new(resident, "resident")?) };
        place.put(mapping.mapped.is_resident(range.to_range()?)?.into());
        Ok(())
    })
}

/// Writes the dirty pages of a range back and makes them durable. A length of UINT64_MAX is all from
/// the offset on.
///
/// Threads: any. Durable: every store before the call, when it returns 0. Errors: -EROFS; -EIO and
/// others of the device: what was not written stays dirty, and the next flush tries again, unless the
/// kind of the failure is `AQ_KIND_NOT_DURABLE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_flush(mapping: *mut aq_mapping, range: aq_range) -> c_int {
    call(|| {
        // SAFETY: documented.
        let mapping = unsafe { handle(mapping, "mapping") }?;
        let mapping = mapping.mapped.writable()?;
        Ok(mapping.flush(whole_or(range, mapping.len())?)?)
    })
}

/// As `aq_mapping_flush`, without waiting: `ready` gets `token` when the range is durable.
///
/// Threads: any. Errors: -EROFS, -EINVAL, -ECHILD; others with the completion. Durable: every store before the
/// call, when the result of the completion is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_flush_async(
    mapping: *mut aq_mapping,
    range: aq_range,
    ready: *mut aq_ready,
    token: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let mapping = unsafe { handle(mapping, "mapping") }?;
        let mapping = mapping.mapped.writable()?;
        let range = whole_or(range, mapping.len())?;
        let start = || Ok(Box::new(mapping.flush_async(range)) as Box<_>);
        // SAFETY: documented.
        unsafe { add::<CacheError>(ready, token, start) }
    })
}

/// Pinned memory of a mapping: stays in memory, and may be passed to system calls.
pub struct aq_pin {
    /// Before what it borrows from.
    pinned: Pin,
    _mapped: Arc<Mapped>,
}

enum Pin {
    Read(Pinned<'static>),
    Write(PinnedMut<'static>),
}

/// Makes a range resident and pins it; `*pin` is null if it fails. `for_writing`, if it is not 0,
/// makes its pages dirty: system calls may write there.
///
/// Threads: any. Errors: as `aq_mapping_read`; -EROFS. Frees: the caller, by `aq_unpin`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_pin(
    mapping: *mut aq_mapping,
    range: aq_range,
    for_writing: c_int,
    pin: *mut *mut aq_pin,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(pin, "pin") }?;
        // SAFETY: documented.
        let mapped = unsafe { handle(mapping, "mapping") }?.mapped.clone();
        // SAFETY: the pin keeps its `Arc` of the mapping, whose address does not change, and is
        // dropped before it.
        let borrowed: &'static Mapped = unsafe { &*Arc::as_ptr(&mapped) };
        let pinned = if for_writing != 0 {
            Pin::Write(borrowed.writable()?.pin_mut(range.to_range()?)?)
        } else {
            Pin::Read(borrowed.pin(range.to_range()?)?)
        };
        place.give(aq_pin { pinned, _mapped: mapped });
        Ok(())
    })
}

/// The first byte of pinned memory; null if `pin` is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pin_data(pin: *mut aq_pin) -> *const c_void {
    // SAFETY: documented.
    match unsafe { usable(pin) }.map(|pin| &pin.pinned) {
        Some(Pin::Read(pinned)) => pinned.as_ptr().cast(),
        Some(Pin::Write(pinned)) => pinned.as_mut_ptr().cast_const().cast(),
        None => std::ptr::null(),
    }
}

/// The first byte of pinned memory, to load and store; null if it was not pinned for writing, or `pin`
/// is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pin_data_mut(pin: *mut aq_pin) -> *mut c_void {
    // SAFETY: documented.
    match unsafe { usable(pin) }.map(|pin| &pin.pinned) {
        Some(Pin::Write(pinned)) => pinned.as_mut_ptr().cast(),
        _ => std::ptr::null_mut(),
    }
}

/// Releases pinned memory; null is fine.
///
/// Threads: any, also another than the one that pinned it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_unpin(pin: *mut aq_pin) {
    // SAFETY: documented.
    unsafe { free(pin) }
}

/// The last plain load or store that could not be served in any mapping of its cache, as a failure:
/// returns its negative number, and keeps it as this thread's last failure. 0 if there was none. Nothing
/// clears it: for a handler of SIGBUS, not to be polled.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapping_last_fault(mapping: *mut aq_mapping) -> c_int {
    call(|| {
        // SAFETY: documented.
        match unsafe { handle(mapping, "mapping") }?.mapped.last_fault_error() {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    })
}
