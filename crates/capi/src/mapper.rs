//! Ordinary files, mapped well: a mapper, and views of files.

use std::ffi::{c_char, c_int, c_void};
use std::future::Future;

use aquifer::mapper::{Advice, MapError};
use aquifer::metrics::Metrics;
use aquifer::{FileView, Mapper, Stores, ViewOptions};

use crate::call::{Failure, Result, always, call, system};
use crate::mapping::{
    AQ_ADVICE_DONT_NEED, AQ_ADVICE_NORMAL, AQ_ADVICE_RANDOM, AQ_ADVICE_SEQUENTIAL,
    AQ_ADVICE_WILL_NEED,
};
use crate::memory::{
    Place, descriptor, free, handle, list, list_mut, path, put_optional, usable, utf8,
};
use crate::process::give_string;
use crate::range::{aq_bytes_fn, aq_range, bounds, passing, ranges, whole_or};
use crate::ready::{add, aq_ready};
use crate::sized::{SizedPlace, sized};

/// Maps ordinary files, and keeps mappings for reuse.
pub struct aq_mapper {
    mapper: Mapper,
}

/// A range of a file in memory.
pub struct aq_view {
    view: FileView,
}

/// The options of `aq_mapper_new`. Initialise it with `AQ_MAPPER_OPTIONS_INIT`; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_mapper_options {
    /// `sizeof(aq_mapper_options)`.
    pub size: usize,
    /// Bytes of mappings that are kept for reuse; 1 for none. Default: half of the machine's memory.
    pub mapping_cache_bytes: u64,
    /// Page cache that the files mapped here may occupy, in bytes; pages that were stored to through views
    /// without `AQ_STORES_PRIVATE` are written and then dropped. Default: no limit.
    pub resident_budget_bytes: u64,
    /// The rate at which stores are written to their files before a flush. Default: none is.
    pub write_back_bytes_per_second: u64,
}
sized!(aq_mapper_options {
    mapping_cache_bytes: u64,
    resident_budget_bytes: u64,
    write_back_bytes_per_second: u64,
});

/// Creates a mapper; `*mapper` is null if it fails. `options` may be null.
///
/// Threads: any. Errors: -EINVAL, -E2BIG, -ENOMEM. Frees: the caller, by `aq_mapper_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapper_new(
    options: *const aq_mapper_options,
    mapper: *mut *mut aq_mapper,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(mapper, "mapper") }?;
        // SAFETY: documented.
        let options = unsafe { crate::sized::options(options) }?;
        let mut builder = Mapper::builder();
        match options.mapping_cache_bytes {
            0 => {}
            1 => builder = builder.mapping_cache_bytes(0),
            bytes => builder = builder.mapping_cache_bytes(bytes),
        }
        if options.resident_budget_bytes != 0 {
            builder = builder.resident_budget_bytes(options.resident_budget_bytes);
        }
        if options.write_back_bytes_per_second != 0 {
            builder = builder.write_back_bytes_per_second(options.write_back_bytes_per_second);
        }
        place.give(aq_mapper { mapper: builder.build()? });
        Ok(())
    })
}

/// Frees a mapper; null is fine. Its views stay valid.
///
/// Threads: none may be in a call with this handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapper_free(mapper: *mut aq_mapper) {
    // SAFETY: documented.
    unsafe { free(mapper) }
}

/// Lets go of the mapping of a file that is kept for reuse; of all if `file` is null.
///
/// Threads: any. Errors: -ENOENT, -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapper_forget(mapper: *mut aq_mapper, file: *const c_char) -> c_int {
    call(|| {
        // SAFETY: documented.
        let mapper = unsafe { handle(mapper, "mapper") }?;
        if file.is_null() {
            return Ok(mapper.mapper.forget_all()?);
        }
        // SAFETY: documented.
        Ok(mapper.mapper.forget(unsafe { path(file, "file") }?)?)
    })
}

/// Figures of a mapper. Initialise it with `AQ_MAPPER_STATS_INIT`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_mapper_stats {
    /// `sizeof(aq_mapper_stats)`.
    pub size: usize,
    /// Files whose mapping was found.
    pub hits: u64,
    /// Files that had to be mapped.
    pub misses: u64,
    /// Mappings kept for reuse.
    pub parked: u64,
    /// Length of the mappings kept for reuse.
    pub parked_bytes: u64,
    /// Page cache of the files, as last measured; 0 without a budget.
    pub resident_bytes: u64,
}
sized!(aq_mapper_stats {
    hits: u64,
    misses: u64,
    parked: u64,
    parked_bytes: u64,
    resident_bytes: u64,
});

/// Fills `stats`.
///
/// Threads: any. Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapper_get_stats(
    mapper: *mut aq_mapper,
    stats: *mut aq_mapper_stats,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (mapper, place) =
            unsafe { (handle(mapper, "mapper")?, SizedPlace::new(stats, "stats")?) };
        let stats = mapper.mapper.stats();
        place.put(&aq_mapper_stats {
            size: 0,
            hits: stats.cache.hits,
            misses: stats.cache.misses,
            parked: stats.cache.parked,
            parked_bytes: stats.cache.parked_bytes,
            resident_bytes: stats.resident_bytes,
        });
        Ok(())
    })
}

/// The statistics of a mapper as OpenMetrics text, as Prometheus scrapes it; `name`, which may be null, is
/// the value of the label `mapper`.
///
/// Threads: any. Errors: -EINVAL. Frees: the caller, by `aq_string_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapper_metrics(
    mapper: *mut aq_mapper,
    name: *const c_char,
    text: *mut *mut c_char,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(text, "text") }?;
        // SAFETY: documented.
        let (mapper, name) = unsafe { (handle(mapper, "mapper")?, utf8(name, "name")?) };
        let mut metrics = Metrics::new();
        metrics.mapper(&[("mapper", name.unwrap_or_default())], &mapper.mapper.stats());
        place.put(give_string(metrics.to_string())?);
        Ok(())
    })
}

/// `aq_mapper_map`: to read.
pub const AQ_ACCESS_READ: c_int = 0;
/// `aq_mapper_map`: to read and write, as by `MAP_SHARED`: other processes see stores at once, and the
/// kernel writes them at any time. Right for files that several processes store to, and for files that are
/// filled or changed in large parts.
pub const AQ_ACCESS_WRITE: c_int = 1;
/// `aq_mapper_map`, with `AQ_ACCESS_WRITE |`: stores stay in this process, in copies of pages, until they
/// are flushed, and a flush writes exactly these pages. Right for few stores, scattered over a large file,
/// of one process.
pub const AQ_STORES_PRIVATE: c_int = 2;
/// `aq_mapper_map`, with `AQ_ACCESS_WRITE |`: disk blocks are reserved for the view when it is made and when
/// it grows. Otherwise the file stays sparse, and a store may find the disk full: it stays in a copy of its
/// page, and calls return -ENOSPC until a flush has written it.
pub const AQ_ALLOCATE: c_int = 4;

/// Maps `length` bytes of a file from `offset` on, or all from there if it is UINT64_MAX; `*view` is
/// null if it fails.
///
/// Threads: any. Errors: those of open(2); -EINVAL for a range outside of the file, -EOPNOTSUPP for
/// what is no regular file, -ENOMEM. Frees: the caller, by `aq_view_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapper_map(
    mapper: *mut aq_mapper,
    file: *const c_char,
    access: c_int,
    offset: u64,
    length: u64,
    view: *mut *mut aq_view,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(view, "view") }?;
        // SAFETY: documented.
        let (mapper, file) = unsafe { (handle(mapper, "mapper")?, path(file, "file")?) };
        let range = bounds(aq_range { offset, length })?;
        let view = mapper.mapper.map(file, self::access(access)?, range)?;
        place.give(aq_view { view });
        Ok(())
    })
}

/// As `aq_mapper_map`, for an open file. The program may close the descriptor afterwards.
///
/// Threads: any. Errors: as `aq_mapper_map`; -EBADF. Frees: the caller, by `aq_view_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapper_map_fd(
    mapper: *mut aq_mapper,
    file: c_int,
    access: c_int,
    offset: u64,
    length: u64,
    view: *mut *mut aq_view,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(view, "view") }?;
        // SAFETY: documented.
        let (mapper, file) = unsafe { (handle(mapper, "mapper")?, descriptor(file)?) };
        let range = bounds(aq_range { offset, length })?;
        let file = std::fs::File::from(
            file.try_clone_to_owned().map_err(|error| system("`file`", error))?,
        );
        let view = mapper.mapper.map_file(&file, self::access(access)?, range)?;
        place.give(aq_view { view });
        Ok(())
    })
}

fn access(access: c_int) -> Result<ViewOptions> {
    let allocates = access & AQ_ALLOCATE != 0;
    match (access & !AQ_ALLOCATE & !AQ_STORES_PRIVATE, access & AQ_STORES_PRIVATE) {
        (AQ_ACCESS_READ, 0) if !allocates => Ok(ViewOptions::read()),
        (AQ_ACCESS_WRITE, 0) => Ok(ViewOptions::write().allocate(allocates)),
        (AQ_ACCESS_WRITE, _) => {
            Ok(ViewOptions::write().stores(Stores::Private).allocate(allocates))
        }
        _ => Err(Failure::invalid(
            "unknown access: use AQ_ACCESS_READ, or AQ_ACCESS_WRITE with AQ_STORES_PRIVATE, AQ_ALLOCATE, both or none",
        )),
    }
}

/// Passes the whole content of a file to `look`, read or mapped, whichever costs less: for files that
/// are read once.
///
/// Threads: any; `look` runs in the calling one. Errors: those of open(2), -EIO, -ENODATA if the file
/// is cut off meanwhile: what `look` has seen is then not to be used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_mapper_read_once(
    mapper: *mut aq_mapper,
    file: *const c_char,
    look: aq_bytes_fn,
    context: *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (mapper, file) = unsafe { (handle(mapper, "mapper")?, path(file, "file")?) };
        // SAFETY: the program's own function.
        let look = unsafe { passing(look, context) }?;
        mapper.mapper.read_once(file, look)?;
        Ok(())
    })
}

/// Frees a view; null is fine. Stores that were not flushed are lost with `AQ_STORES_PRIVATE`, and in the
/// file otherwise.
///
/// Threads: none may be in a call with this handle, or use the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_free(view: *mut aq_view) {
    // SAFETY: documented.
    unsafe { free(view) }
}

/// The first byte; null if `view` is null. A load of a page that is gone raises SIGBUS, as with
/// mmap(2); `aq_view_look` and `aq_view_read` return an error instead.
///
/// Threads: any. Frees: nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_data(view: *mut aq_view) -> *const c_void {
    // SAFETY: documented.
    let view = unsafe { usable(view) };
    always(std::ptr::null(), || view.map_or(std::ptr::null(), |view| view.view.as_ptr().cast()))
}

/// The first byte, to load and store; null if it cannot be stored to, with a failure to be asked for.
/// From now on a view with `AQ_STORES_PRIVATE` keeps its copies of pages when it is flushed.
///
/// Threads: any. Durable: stores before a call of `aq_view_flush` that returns 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_data_mut(view: *mut aq_view) -> *mut c_void {
    let mut data = std::ptr::null_mut();
    call(|| {
        // SAFETY: documented.
        data = unsafe { handle(view, "view") }?.view.as_mut_ptr()?;
        Ok(())
    });
    data.cast()
}

/// The length in bytes. 0 if `view` is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_len(view: *mut aq_view) -> u64 {
    // SAFETY: documented.
    unsafe { usable(view) }.map_or(0, |view| view.view.len_bytes())
}

/// Puts the current length of the file into `*len_bytes`, wherever the view ends.
///
/// Threads: any. Errors: -EINVAL, -ENOENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_file_len(view: *mut aq_view, len_bytes: *mut u64) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (view, place) = unsafe { (handle(view, "view")?, Place::new(len_bytes, "len_bytes")?) };
        place.put(view.view.file_len_bytes()?);
        Ok(())
    })
}

/// Copies `size` bytes from `offset` of the view.
///
/// Threads: any. Errors: -EINVAL outside of the view, -ENODATA if the file was truncated, -EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_read(
    view: *mut aq_view,
    buffer: *mut c_void,
    size: usize,
    offset: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (view, target) =
            unsafe { (handle(view, "view")?, list_mut(buffer.cast::<u8>(), size, "buffer")?) };
        Ok(view.view.read_exact_at(target, offset)?)
    })
}

/// Passes a range of the view to `look`, without a copy. A page that is gone reads as zeros there, and
/// the call fails afterwards: what `look` has seen is then not to be used.
///
/// Threads: any; `look` runs in the calling one. Errors: as `aq_view_read`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_look(
    view: *mut aq_view,
    range: aq_range,
    look: aq_bytes_fn,
    context: *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let view = unsafe { handle(view, "view") }?;
        // SAFETY: the program's own function.
        let look = unsafe { passing(look, context) }?;
        view.view.read_range(range.to_range()?, look)?;
        Ok(())
    })
}

/// Copies `size` bytes to `offset` of the view.
///
/// Threads: any. Errors: as `aq_view_read`; -EROFS. Durable: after `aq_view_flush`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_write(
    view: *mut aq_view,
    buffer: *const c_void,
    size: usize,
    offset: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (view, source) =
            unsafe { (handle(view, "view")?, list(buffer.cast::<u8>(), size, "buffer")?) };
        Ok(view.view.write_all_at(source, offset)?)
    })
}

/// Writes the pages of a range that were stored to, and makes them durable: of a view with
/// `AQ_STORES_PRIVATE` exactly these, otherwise also what is dirty beside them. A length of
/// UINT64_MAX is all from the offset on. `written_bytes` may be null; otherwise it gets the number of
/// bytes written.
///
/// Threads: any; stores during the call are in the file or wait for the next flush. Durable: every
/// store before the call, when it returns 0. Errors: -EROFS, -ENOSPC, -EIO, -ENODATA if the file was
/// truncated. The next flush of a view with `AQ_STORES_PRIVATE` writes again what was not written; of
/// another view every later flush fails after one of the device's errors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_flush(
    view: *mut aq_view,
    range: aq_range,
    written_bytes: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let view = unsafe { handle(view, "view") }?;
        let flushed = view.view.flush_range(whole_or(range, view.view.len_bytes())?)?;
        // SAFETY: documented.
        unsafe { put_optional(written_bytes, flushed.bytes_written) };
        Ok(())
    })
}

/// Hands stores to the file, where other processes see them, without waiting for the disk.
/// `written_bytes` may be null; otherwise it gets the number of bytes handed over: 0 without
/// `AQ_STORES_PRIVATE`.
///
/// Threads: any. Errors: as `aq_view_flush`. Durable: after `aq_view_flush`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_write_out(view: *mut aq_view, written_bytes: *mut u64) -> c_int {
    call(|| {
        // SAFETY: documented.
        let bytes = unsafe { handle(view, "view") }?.view.write_out()?;
        // SAFETY: documented.
        unsafe { put_optional(written_bytes, bytes) };
        Ok(())
    })
}

/// Puts the number of bytes that the next flush would write into `*dirty_bytes`.
///
/// Threads: any. Errors: -EROFS, -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_dirty(view: *mut aq_view, dirty_bytes: *mut u64) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (view, place) =
            unsafe { (handle(view, "view")?, Place::new(dirty_bytes, "dirty_bytes")?) };
        place.put(view.view.dirty_bytes()?);
        Ok(())
    })
}

/// Makes a view that can be stored to, and its file, longer; the view stays where it is.
///
/// Threads: any. Errors: -EROFS, -ENOSPC, -EINVAL if there is no room at these addresses or the view
/// does not reach the end of its file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_grow(view: *mut aq_view, len_bytes: u64) -> c_int {
    call(|| {
        // SAFETY: documented.
        Ok(unsafe { handle(view, "view") }?.view.grow(len_bytes)?)
    })
}

/// Applies one of `AQ_ADVICE_…` to a range; `AQ_ADVICE_COLD` is not one for views.
///
/// Threads: any. Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_advise(
    view: *mut aq_view,
    range: aq_range,
    advice: c_int,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let view = unsafe { handle(view, "view") }?;
        let advice = match advice {
            AQ_ADVICE_NORMAL => Advice::Normal,
            AQ_ADVICE_SEQUENTIAL => Advice::Sequential,
            AQ_ADVICE_RANDOM => Advice::Random,
            AQ_ADVICE_WILL_NEED => Advice::WillNeed,
            AQ_ADVICE_DONT_NEED => Advice::DontNeed,
            _ => return Err(Failure::invalid("unknown advice for a view")),
        };
        Ok(view.view.advise(advice, range.to_range()?)?)
    })
}

/// Loads the pages of `count` ranges at the disk's queue depth, and waits for them.
///
/// Threads: any. Errors: as `aq_view_read`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_touch(
    view: *mut aq_view,
    list: *const aq_range,
    count: usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (view, ranges) = unsafe { (handle(view, "view")?, ranges(list, count)?) };
        Ok(view.view.touch_many(&ranges)?)
    })
}

/// As `aq_view_touch`, without waiting: `ready` gets `token` when the pages are in memory. The list is
/// copied.
///
/// Threads: any. Errors: -EINVAL, -ECHILD; others with the completion, also for a range beyond the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_view_touch_async(
    view: *mut aq_view,
    list: *const aq_range,
    count: usize,
    ready: *mut aq_ready,
    token: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (view, ranges) = unsafe { (handle(view, "view")?, ranges(list, count)?) };
        let start = || -> Result<Box<dyn Future<Output = _> + Send>> {
            Ok(Box::new(view.view.prefetch(&ranges)?))
        };
        // SAFETY: documented.
        unsafe { add::<MapError>(ready, token, start) }
    })
}
