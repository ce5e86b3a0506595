//! Pools: a formatted file that many processes share, with objects and files in it.

use std::ffi::{c_char, c_int, c_void};
use std::time::Duration;

use aquifer::metrics::Metrics;
use aquifer::pool::AccessKey;
use aquifer::{Files, Objects, Pool, PoolError, PoolOptions, WriteWindows};

use crate::call::{Failure, Result, call};
use crate::memory::{Place, free, handle, list, path, utf8};
use crate::process::give_string;
use crate::sized::{SizedPlace, sized};

/// An open pool.
pub struct aq_pool {
    pub(crate) pool: Pool,
    pub(crate) objects: Objects,
    pub(crate) files: Files,
}

/// The options of `aq_pool_create` and `aq_pool_open`. Initialise it with `AQ_POOL_OPTIONS_INIT`; 0 and
/// NULL are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_pool_options {
    /// `sizeof(aq_pool_options)`.
    pub size: usize,
    /// Open: other than 0: only to read; needs no permission to write.
    pub read_only: c_int,
    /// Other than 0: fail with -EBUSY if another process has it open, and keep others out.
    pub exclusive: c_int,
    /// Create: other than 0: replace what is at the path.
    pub overwrite: c_int,
    /// Create: permissions of the file, minus the umask. Default: 0600.
    pub mode: u32,
    /// Create: the length of the log.
    pub log_bytes: u64,
    /// Create: the number of slots for objects, files and directories.
    pub inodes: u64,
    /// The directory for the memory that the processes share; default /dev/shm. Copied.
    pub segment_directory: *const c_char,
    /// How long to wait for a process that holds a lock and makes no progress, before -ETIMEDOUT.
    /// Default: 10 s.
    pub stall_timeout_ns: u64,
    /// Permissions of the memory that the processes share. Default: 0600.
    pub segment_mode: u32,
    /// One of `AQ_GUARD_…`: what guards the pool against stray stores of this process.
    pub guard: c_int,
    /// The socket of the pool's broker (`aq_pool_open_granted`); default beside the pool. Copied.
    pub broker_socket: *const c_char,
}
sized!(aq_pool_options {
    read_only: c_int,
    exclusive: c_int,
    overwrite: c_int,
    mode: u32,
    log_bytes: u64,
    inodes: u64,
    segment_directory: *const c_char,
    stall_timeout_ns: u64,
    segment_mode: u32,
    guard: c_int,
    broker_socket: *const c_char,
});

/// `aq_pool_options::guard`: nothing: the fastest.
pub const AQ_GUARD_NONE: c_int = 0;
/// `aq_pool_options::guard`: memory protection keys; -EOPNOTSUPP where the processor has none.
pub const AQ_GUARD_KEYS: c_int = 1;
/// `aq_pool_options::guard`: the pool is mapped to be read only, and written by system calls; -EOPNOTSUPP
/// where there are none for it.
pub const AQ_GUARD_CALLS: c_int = 2;
/// `aq_pool_options::guard`: the first of keys, calls and nothing that is available.
pub const AQ_GUARD_BEST: c_int = 3;

/// # Safety
/// As for [`crate::sized::options`].
unsafe fn options(pointer: *const aq_pool_options) -> Result<PoolOptions> {
    // SAFETY: guaranteed by the caller.
    let given = unsafe { crate::sized::options(pointer) }?;
    let mut options = Pool::options()
        .read_only(given.read_only != 0)
        .exclusive(given.exclusive != 0)
        .overwrite(given.overwrite != 0);
    if given.mode != 0 {
        options = options.mode(given.mode);
    }
    if given.log_bytes != 0 {
        options = options.log_bytes(given.log_bytes);
    }
    if given.inodes != 0 {
        options = options.inodes(given.inodes);
    }
    if !given.segment_directory.is_null() {
        // SAFETY: guaranteed by the caller.
        let directory = unsafe { path(given.segment_directory, "segment_directory") }?;
        options = options.segment_directory(directory);
    }
    if given.stall_timeout_ns != 0 {
        options = options.stall_timeout(Duration::from_nanos(given.stall_timeout_ns));
    }
    if given.segment_mode != 0 {
        options = options.segment_mode(given.segment_mode);
    }
    if !given.broker_socket.is_null() {
        // SAFETY: guaranteed by the caller.
        options = options.broker_socket(unsafe { path(given.broker_socket, "broker_socket") }?);
    }
    options = options.write_windows(match given.guard {
        AQ_GUARD_NONE => WriteWindows::None,
        AQ_GUARD_KEYS => WriteWindows::Keys,
        AQ_GUARD_CALLS => WriteWindows::Calls,
        AQ_GUARD_BEST => WriteWindows::Best,
        _ => return Err(Failure::invalid("unknown guard: use one of AQ_GUARD_…")),
    });
    Ok(options)
}

impl From<Pool> for aq_pool {
    fn from(pool: Pool) -> aq_pool {
        aq_pool { objects: Objects::new(pool.clone()), files: Files::new(pool.clone()), pool }
    }
}

/// Creates a pool of `len_bytes` and opens it; `*pool` is null if it fails. `options` may be null.
///
/// Threads: any. Errors: -EEXIST, those of open(2), -ENOSPC, -EINVAL. Durable: on return. Frees: the
/// caller, by `aq_pool_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pool_create(
    file: *const c_char,
    len_bytes: u64,
    options: *const aq_pool_options,
    pool: *mut *mut aq_pool,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(pool, "pool") }?;
        // SAFETY: documented.
        let (file, options) = unsafe { (path(file, "file")?, self::options(options)?) };
        place.give(options.create(file, len_bytes)?.into());
        Ok(())
    })
}

/// Opens a pool, and recovers it if no other process has it open and it was not closed; `*pool` is null
/// if it fails. `options` may be null.
///
/// Threads: any. Errors: those of open(2), -EINVAL for what is no pool, -EUCLEAN for a damaged one,
/// -EOPNOTSUPP for one of a later version, -EBUSY. Frees: the caller, by `aq_pool_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pool_open(
    file: *const c_char,
    options: *const aq_pool_options,
    pool: *mut *mut aq_pool,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(pool, "pool") }?;
        // SAFETY: documented.
        let (file, options) = unsafe { (path(file, "file")?, self::options(options)?) };
        place.give(options.open(file)?.into());
        Ok(())
    })
}

/// Opens a pool for writing that this process may not open itself: the pool's broker, which runs in a
/// process of its owner (`aquifer pool serve`), passes it on to a process that has the key. `*pool` is null
/// if it fails. `options` may be null.
///
/// Threads: any. Errors: -EACCES for a wrong key, -ENOENT without a broker, -EINVAL for a key that is too
/// short, and those of `aq_pool_open`. Frees: the caller, by `aq_pool_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pool_open_granted(
    file: *const c_char,
    key: *const c_void,
    key_size: usize,
    options: *const aq_pool_options,
    pool: *mut *mut aq_pool,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(pool, "pool") }?;
        // SAFETY: documented.
        let (file, options) = unsafe { (path(file, "file")?, self::options(options)?) };
        // SAFETY: documented.
        let key = unsafe { list(key.cast::<u8>(), key_size, "key") }?;
        let key = AccessKey::new(key).map_err(PoolError::from)?;
        place.give(options.open_granted(file, &key)?.into());
        Ok(())
    })
}

/// Frees a pool; null is fine. It is closed when what was opened in it is freed as well.
///
/// Threads: none may be in a call with this handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pool_free(pool: *mut aq_pool) {
    // SAFETY: documented.
    unsafe { free(pool) }
}

/// Makes every change of files and directories so far durable, those of other processes as well.
///
/// Threads: any. Durable: all before the call, when it returns 0. Errors: -EIO: the pool is read-only
/// from then on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pool_sync(pool: *mut aq_pool) -> c_int {
    call(|| {
        // SAFETY: documented.
        Ok(unsafe { handle(pool, "pool") }?.pool.sync()?)
    })
}

/// Applies the log, so that the next recovery has little to do. It happens by itself as well.
///
/// Threads: any. Errors: as `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pool_checkpoint(pool: *mut aq_pool) -> c_int {
    call(|| {
        // SAFETY: documented.
        Ok(unsafe { handle(pool, "pool") }?.pool.checkpoint()?)
    })
}

/// What a pool holds. Initialise it with `AQ_POOL_INFO_INIT`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_pool_info {
    /// `sizeof(aq_pool_info)`.
    pub size: usize,
    /// Pages of 4096 bytes that are free.
    pub free_pages: u64,
    /// The longest run of free pages.
    pub largest_free_pages: u64,
    /// Slots that are free.
    pub free_slots: u64,
    /// Objects.
    pub objects: u64,
    /// Regular files.
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Processes that have it open for writing.
    pub processes: u64,
    /// Records that opening it has recovered.
    pub recovered_records: u64,
}
sized!(aq_pool_info {
    free_pages: u64,
    largest_free_pages: u64,
    free_slots: u64,
    objects: u64,
    files: u64,
    directories: u64,
    processes: u64,
    recovered_records: u64,
});

/// Fills `info`. Takes time in proportion to the number of objects and files.
///
/// Threads: any. Errors: -EINVAL, -EIO, -EUCLEAN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pool_get_info(pool: *mut aq_pool, info: *mut aq_pool_info) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, place) = unsafe { (handle(pool, "pool")?, SizedPlace::new(info, "info")?) };
        let info = pool.pool.info()?;
        place.put(&aq_pool_info {
            size: 0,
            free_pages: info.free_pages,
            largest_free_pages: info.largest_free_pages,
            free_slots: info.free_slots,
            objects: info.objects,
            files: info.files,
            directories: info.directories,
            processes: info.processes.len() as u64,
            recovered_records: info.recovered_records,
        });
        Ok(())
    })
}

/// How much room a pool has, as by statvfs(3). Initialise it with `AQ_POOL_SPACE_INIT`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_pool_space {
    /// `sizeof(aq_pool_space)`.
    pub size: usize,
    /// Bytes for content, used or free.
    pub total_bytes: u64,
    /// Free bytes, also those that were freed a moment ago.
    pub free_bytes: u64,
    /// The longest run of bytes that are free at once.
    pub largest_free_bytes: u64,
    /// Slots for objects, files and directories, used or free.
    pub total_slots: u64,
    /// Free slots.
    pub free_slots: u64,
}
sized!(aq_pool_space {
    total_bytes: u64,
    free_bytes: u64,
    largest_free_bytes: u64,
    total_slots: u64,
    free_slots: u64,
});

/// Fills `space`. Does not depend on the number of objects and files, as `aq_pool_get_info` does.
///
/// Threads: any. Errors: -EINVAL, -EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pool_get_space(pool: *mut aq_pool, space: *mut aq_pool_space) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, place) = unsafe { (handle(pool, "pool")?, SizedPlace::new(space, "space")?) };
        let space = pool.files.space()?;
        place.put(&aq_pool_space {
            size: 0,
            total_bytes: space.total_bytes,
            free_bytes: space.free_bytes,
            largest_free_bytes: space.largest_free_bytes,
            total_slots: space.total_slots,
            free_slots: space.free_slots,
        });
        Ok(())
    })
}

/// The figures of a pool as OpenMetrics text, as Prometheus scrapes it; `name`, which may be null, is the
/// value of the label `pool`. Takes as long as `aq_pool_get_info`.
///
/// Threads: any. Errors: as `aq_pool_get_info`. Frees: the caller, by `aq_string_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pool_metrics(
    pool: *mut aq_pool,
    name: *const c_char,
    text: *mut *mut c_char,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(text, "text") }?;
        // SAFETY: documented.
        let (pool, name) = unsafe { (handle(pool, "pool")?, utf8(name, "name")?) };
        let mut metrics = Metrics::new();
        metrics.pool(&[("pool", name.unwrap_or_default())], &pool.pool.info()?);
        place.put(give_string(metrics.to_string())?);
        Ok(())
    })
}
