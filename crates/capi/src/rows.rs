//! Rows: a cache of fixed-length rows of a file, for embedding tables and feature stores.

use std::ffi::{c_char, c_int, c_void};
use std::future::Future;
use std::sync::Arc;

use aquifer::{CacheError, Rows, RowsOptions};

use crate::call::{Failure, Result, call};
use crate::device::aq_device;
use crate::memory::{Place, free, handle, list, list_mut, path, usable};
use crate::ready::{add, aq_ready};
use crate::sized::{SizedPlace, sized};

/// A file of rows of one length, with a cache of rows.
pub struct aq_rows {
    rows: Arc<Rows>,
}

/// The options of `aq_rows_open`. Initialise it with `AQ_ROWS_OPTIONS_INIT`; `row_bytes` must be set.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_rows_options {
    /// `sizeof(aq_rows_options)`.
    pub size: usize,
    /// The length of a row in bytes.
    pub row_bytes: usize,
    /// Bytes of the file before the first row.
    pub header_bytes: u64,
    /// Memory for rows, in bytes. Default: a quarter of the machine's.
    pub budget_bytes: u64,
}
sized!(aq_rows_options { row_bytes: usize, header_bytes: u64, budget_bytes: u64 });

/// Opens a file of rows; `*rows` is null if it fails. Reads bypass the page cache where they can.
///
/// Threads: any. Errors: those of open(2), -EINVAL, -EBUSY if a cache of this process uses the file to
/// write. Frees: the caller, by `aq_rows_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_rows_open(
    file: *const c_char,
    options: *const aq_rows_options,
    rows: *mut *mut aq_rows,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(rows, "rows") }?;
        // SAFETY: documented.
        let (file, options) = unsafe { (path(file, "file")?, self::options(options)?) };
        place.give(aq_rows { rows: Arc::new(options.open(file)?) });
        Ok(())
    })
}

/// As `aq_rows_open`, for rows on a device.
///
/// Threads: any. Errors: -EINVAL, -EBUSY if a cache of this process uses the device to write. Frees: the
/// caller, by `aq_rows_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_rows_open_device(
    device: *mut aq_device,
    options: *const aq_rows_options,
    rows: *mut *mut aq_rows,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(rows, "rows") }?;
        // SAFETY: documented.
        let (device, options) = unsafe { (handle(device, "device")?, self::options(options)?) };
        let rows = options.open_device(device.device.clone())?;
        place.give(aq_rows { rows: Arc::new(rows) });
        Ok(())
    })
}

/// # Safety
/// As for [`crate::sized::options`].
unsafe fn options(pointer: *const aq_rows_options) -> Result<RowsOptions> {
    // SAFETY: guaranteed by the caller.
    let given = unsafe { crate::sized::options(pointer) }?;
    let mut options = Rows::options(given.row_bytes).header_bytes(given.header_bytes);
    if given.budget_bytes != 0 {
        options = options.budget_bytes(given.budget_bytes);
    }
    Ok(options)
}

/// Frees rows; null is fine.
///
/// Threads: none may be in a call with this handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_rows_free(rows: *mut aq_rows) {
    // SAFETY: documented.
    unsafe { free(rows) }
}

/// The number of rows. 0 if `rows` is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_rows_count(rows: *mut aq_rows) -> u64 {
    // SAFETY: documented.
    unsafe { usable(rows) }.map_or(0, |rows| rows.rows.len())
}

/// Copies `count` rows, in the order of `list`, one after the other to `target`, which has room for all
/// of them. Those that are not in memory are read together.
///
/// Threads: any. Errors: -EINVAL for a row that does not exist, -EIO, -ENODATA if the file was
/// truncated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_rows_gather(
    rows: *mut aq_rows,
    list: *const u64,
    count: usize,
    target: *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (rows, wanted) = unsafe { (handle(rows, "rows")?, self::list(list, count, "list")?) };
        let size = size_of_rows(&rows.rows, count)?;
        // SAFETY: documented.
        let target = unsafe { list_mut(target.cast::<u8>(), size, "target") }?;
        Ok(rows.rows.gather(wanted, target)?)
    })
}

fn size_of_rows(rows: &Rows, count: usize) -> Result<usize> {
    let size = count.checked_mul(rows.row_bytes());
    size.ok_or_else(|| Failure::invalid("`list` is longer than memory"))
}

/// Where rows go that are read in the background.
struct Target(*mut u8);

// SAFETY: the memory is the library's until the token is taken, and one thread copies.
unsafe impl Send for Target {}

impl Target {
    /// # Safety
    /// The row lies in the memory.
    unsafe fn put(&self, at: usize, bytes: &[u8]) {
        // SAFETY: guaranteed by the caller, and nothing else uses the memory.
        unsafe { self.0.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

/// As `aq_rows_gather`, without waiting: `ready` gets `token` when all is copied. The list is copied;
/// the target is the library's until the token is taken.
///
/// Threads: any. Errors: -EINVAL, -ECHILD; others with the completion, also for a range beyond the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_rows_gather_async(
    rows: *mut aq_rows,
    list: *const u64,
    count: usize,
    target: *mut c_void,
    ready: *mut aq_ready,
    token: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (rows, wanted) = unsafe { (handle(rows, "rows")?, self::list(list, count, "list")?) };
        let size = size_of_rows(&rows.rows, count)?;
        // SAFETY: documented; only checked here.
        unsafe { list_mut(target.cast::<u8>(), size, "target") }?;
        let (target, row_bytes) = (Target(target.cast()), rows.rows.row_bytes());
        let start = || -> Result<Box<dyn Future<Output = _> + Send>> {
            let visit = move |position: usize, bytes: &[u8]| {
                // SAFETY: a position is below the number of rows.
                unsafe { target.put(position * row_bytes, bytes) };
            };
            Ok(Box::new(rows.rows.get_many_async(wanted.to_vec(), visit)))
        };
        // SAFETY: documented.
        unsafe { add::<CacheError>(ready, token, start) }
    })
}

/// Forgets `count` rows from `first` on, after the program has written them to the file: the next call
/// reads them again.
///
/// Threads: any. Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_rows_invalidate(rows: *mut aq_rows, first: u64, count: u64) -> c_int {
    call(|| {
        // SAFETY: documented.
        let rows = unsafe { handle(rows, "rows") }?;
        Ok(rows.rows.invalidate(first..first.saturating_add(count))?)
    })
}

/// The activity of rows. Initialise it with `AQ_ROWS_STATS_INIT`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_rows_stats {
    /// `sizeof(aq_rows_stats)`.
    pub size: usize,
    /// Rows that were in memory.
    pub hits: u64,
    /// Rows that were not.
    pub misses: u64,
    /// Rows that were replaced.
    pub evictions: u64,
    /// Transfers.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Rows in memory now.
    pub resident_rows: u64,
    /// Rows that memory has room for.
    pub capacity_rows: u64,
}
sized!(aq_rows_stats {
    hits: u64,
    misses: u64,
    evictions: u64,
    reads: u64,
    read_bytes: u64,
    resident_rows: u64,
    capacity_rows: u64,
});

/// Fills `stats`.
///
/// Threads: any. Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_rows_get_stats(rows: *mut aq_rows, stats: *mut aq_rows_stats) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (rows, place) = unsafe { (handle(rows, "rows")?, SizedPlace::new(stats, "stats")?) };
        let stats = rows.rows.stats();
        place.put(&aq_rows_stats {
            size: 0,
            hits: stats.hits,
            misses: stats.misses,
            evictions: stats.evictions,
            reads: stats.reads,
            read_bytes: stats.read_bytes,
            resident_rows: stats.resident_rows,
            capacity_rows: stats.capacity_rows,
        });
        Ok(())
    })
}
