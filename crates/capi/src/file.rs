//! Open files of a pool: reading, writing, space, locks, views.

use std::ffi::{c_char, c_int, c_void};
use std::fs::Permissions;
use std::ops::{Deref, Range};
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use aquifer::fs::{At, FallocateMode, FileOptions, LockMode, SetMode, Synced, WriteHow};
use aquifer::{File, Lease, View, ViewMut};

use crate::call::{Failure, Result, always, call};
use crate::memory::{
    Place, descriptor, free, handle, list, list_mut, path, put_optional, text, usable,
};
use crate::path::{aq_file_status, put_names, put_value, times};
use crate::pool::aq_pool;
use crate::range::{aq_bytes_fn, aq_range, bounds, passing};
use crate::sized::SizedPlace;

/// An open file of a pool.
pub struct aq_file {
    file: File,
}

/// A range of a file of a pool in memory.
pub struct aq_file_view {
    view: Viewed,
}

enum Viewed {
    Read(View<'static>),
    Lease(Lease<'static>),
    Write(ViewMut),
}

impl Deref for Viewed {
    type Target = View<'static>;
    fn deref(&self) -> &View<'static> {
        match self {
            Viewed::Read(view) => view,
            Viewed::Lease(lease) => lease.view(),
            Viewed::Write(view) => view,
        }
    }
}

/// `aq_file_open`: to read.
pub const AQ_OPEN_READ: c_int = 1;
/// `aq_file_open`: to write.
pub const AQ_OPEN_WRITE: c_int = 2;
/// `aq_file_open`: create it if there is none; needs AQ_OPEN_WRITE.
pub const AQ_OPEN_CREATE: c_int = 4;
/// `aq_file_open`: create it, or fail if there is one; needs AQ_OPEN_WRITE.
pub const AQ_OPEN_CREATE_NEW: c_int = 8;
/// `aq_file_open`: cut it to no bytes; needs AQ_OPEN_WRITE.
pub const AQ_OPEN_TRUNCATE: c_int = 16;
/// `aq_file_open`: all writes go to the end.
pub const AQ_OPEN_APPEND: c_int = 32;
/// `aq_file_open`: fail with -ELOOP if it is a symbolic link.
pub const AQ_OPEN_NO_FOLLOW: c_int = 64;

/// Opens a file of a pool; `*file` is null if it fails. `flags` is a combination of `AQ_OPEN_…`; `mode`
/// has the permissions of a file that is created, minus the umask; 0 is 0666.
///
/// Threads: any. Errors: those of open(2). Durable: a file that was created after `aq_pool_sync` or
/// `aq_file_sync`. Frees: the caller, by `aq_file_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_open(
    pool: *mut aq_pool,
    name: *const c_char,
    flags: c_int,
    mode: u32,
    file: *mut *mut aq_file,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(file, "file") }?;
        // SAFETY: documented.
        let (pool, name) = unsafe { (handle(pool, "pool")?, path(name, "name")?) };
        place.give(aq_file { file: options(pool, flags, mode)?.open(name)? });
        Ok(())
    })
}

fn options(pool: &aq_pool, flags: c_int, mode: u32) -> Result<FileOptions> {
    let has = |flag| flags & flag != 0;
    if flags & !127 != 0 {
        return Err(Failure::invalid("unknown flags: use AQ_OPEN_…"));
    }
    let mut options = pool.files.options();
    options
        .read(has(AQ_OPEN_READ))
        .write(has(AQ_OPEN_WRITE))
        .create(has(AQ_OPEN_CREATE))
        .create_new(has(AQ_OPEN_CREATE_NEW))
        .truncate(has(AQ_OPEN_TRUNCATE))
        .append(has(AQ_OPEN_APPEND));
    if has(AQ_OPEN_NO_FOLLOW) {
        options.custom_flags(libc::O_NOFOLLOW);
    }
    if mode != 0 {
        options.mode(mode);
    }
    Ok(options)
}

/// Creates a file without a name: it is seen by no other process until `aq_file_link` gives it a name,
/// and is gone if it is freed before. `flags` and `mode` are as for `aq_file_open`; `*file` is null if it
/// fails.
///
/// Threads: any. Errors: -EINVAL, -ENOSPC, -EROFS. Frees: the caller, by `aq_file_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_open_unnamed(
    pool: *mut aq_pool,
    flags: c_int,
    mode: u32,
    file: *mut *mut aq_file,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(file, "file") }?;
        // SAFETY: documented.
        let pool = unsafe { handle(pool, "pool") }?;
        place.give(aq_file { file: options(pool, flags, mode)?.create_unnamed()? });
        Ok(())
    })
}

/// Gives an open file a name, its first or another one. If `replace` is not 0, what has the name is
/// replaced: at any moment, also in a crash, it is the one file or the other.
///
/// Threads: any. Errors: those of link(2). Durable: after `aq_file_sync` or `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_link(
    file: *mut aq_file,
    name: *const c_char,
    replace: c_int,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, name) = unsafe { (handle(file, "file")?, path(name, "name")?) };
        Ok(if replace != 0 { file.file.link_over(name) } else { file.file.link(name) }?)
    })
}

/// Hands an open file to another process, through a connected socket of the kind AF_UNIX, SOCK_STREAM:
/// that process calls `aq_file_receive` with the other end. For files without a name, which no other
/// process can open. Waits at most `timeout_ns`.
///
/// Threads: any; nothing else may use the socket meanwhile. Errors: -ETIMEDOUT; -ECONNREFUSED if the other
/// process could not take it; -EPIPE and others if it ended: it may have the file then or not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_send(file: *mut aq_file, socket: c_int, timeout_ns: u64) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, socket) = unsafe { (handle(file, "file")?, descriptor(socket)?) };
        Ok(file.file.give(&socket, Duration::from_nanos(timeout_ns))?)
    })
}

/// Takes the file that another process hands over by `aq_file_send`; `*file` is null if it fails.
///
/// Threads: any; nothing else may use the socket meanwhile. Errors: -ETIMEDOUT; -EXDEV for a file of
/// another pool; -ESTALE if it is gone; others of the socket. Frees: the caller, by `aq_file_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_receive(
    pool: *mut aq_pool,
    socket: c_int,
    timeout_ns: u64,
    file: *mut *mut aq_file,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(file, "file") }?;
        // SAFETY: documented.
        let (pool, socket) = unsafe { (handle(pool, "pool")?, descriptor(socket)?) };
        place.give(aq_file { file: pool.files.take(&socket, Duration::from_nanos(timeout_ns))? });
        Ok(())
    })
}

/// Closes a file; null is fine. Its locks are released, and its views stay valid.
///
/// Threads: none may be in a call with this handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_free(file: *mut aq_file) {
    // SAFETY: documented.
    unsafe { free(file) }
}

/// Reads at most `size` bytes from `offset`, and puts their number into `*done`: less only at the end of
/// the file.
///
/// Threads: any; a read beside a write sees aligned words of eight bytes whole. Errors: -EBADF if it is
/// not open to read, -EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_read(
    file: *mut aq_file,
    buffer: *mut c_void,
    size: usize,
    offset: u64,
    done: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, place) = unsafe { (handle(file, "file")?, Place::new(done, "done")?) };
        // SAFETY: documented.
        let target = unsafe { list_mut(buffer.cast::<u8>(), size, "buffer") }?;
        place.put(read(&file.file, target, offset)?);
        Ok(())
    })
}

/// Reads until the buffer is full or the file ends.
fn read(file: &File, target: &mut [u8], offset: u64) -> Result<usize> {
    let mut count = 0;
    while count < target.len() {
        match file.read_at(&mut target[count..], offset.saturating_add(count as u64))? {
            0 => break,
            more => count += more,
        }
    }
    Ok(count)
}

/// Writes all `size` bytes to `offset`; to the end if the file was opened with AQ_OPEN_APPEND. Other
/// processes see them at once.
///
/// Threads: any. Errors: -EBADF if it is not open to write, -ENOSPC, -EFBIG, -EIO; bytes before may be
/// written. Durable: after `aq_file_sync` or `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_write(
    file: *mut aq_file,
    buffer: *const c_void,
    size: usize,
    offset: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, source) =
            unsafe { (handle(file, "file")?, list(buffer.cast::<u8>(), size, "buffer")?) };
        Ok(file.file.write_all_at(source, offset)?)
    })
}

/// Reads at most the length of `count` buffers from `offset`, one after the other, and puts the number of
/// bytes into `*done`, also if it fails: otherwise less only at the end of the file. Each buffer is filled
/// as by a call of `aq_file_read`.
///
/// Threads: any. Errors: as `aq_file_read`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_readv(
    file: *mut aq_file,
    buffers: *const libc::iovec,
    count: usize,
    offset: u64,
    done: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let mut place = unsafe { Place::new(done, "done") }?.put_first(0);
        // SAFETY: documented.
        let (file, buffers) = unsafe { (handle(file, "file")?, vectors(buffers, count)?) };
        let mut total = 0;
        for one in buffers {
            // SAFETY: documented.
            let target = unsafe { list_mut(one.iov_base.cast::<u8>(), one.iov_len, "buffers") }?;
            let count = read(&file.file, target, offset.saturating_add(total as u64))?;
            total += count;
            place = place.put_first(total);
            if count < target.len() {
                break;
            }
        }
        Ok(())
    })
}

/// Writes `count` buffers one after the other to `offset`; to the end if the file was opened with
/// AQ_OPEN_APPEND. `*done`, which may be null, gets the number of bytes written, also if it fails. Each
/// buffer is written as by a call of `aq_file_write`.
///
/// Threads: any. Errors and Durable: as `aq_file_write`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_writev(
    file: *mut aq_file,
    buffers: *const libc::iovec,
    count: usize,
    offset: u64,
    done: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        unsafe { put_optional(done, 0) };
        // SAFETY: documented.
        let (file, buffers) = unsafe { (handle(file, "file")?, vectors(buffers, count)?) };
        let mut total = 0;
        for one in buffers {
            // SAFETY: documented.
            let source = unsafe { list(one.iov_base.cast::<u8>(), one.iov_len, "buffers") }?;
            file.file.write_all_at(source, offset.saturating_add(total as u64))?;
            total += source.len();
            // SAFETY: documented.
            unsafe { put_optional(done, total) };
        }
        Ok(())
    })
}

/// Buffers, which together are not longer than memory.
///
/// # Safety
/// As for [`list`].
unsafe fn vectors<'a>(buffers: *const libc::iovec, count: usize) -> Result<&'a [libc::iovec]> {
    // SAFETY: guaranteed by the caller.
    let buffers = unsafe { list(buffers, count, "buffers") }?;
    let mut total = 0_usize;
    for one in buffers {
        // Before anything is transferred.
        // SAFETY: guaranteed by the caller.
        unsafe { list(one.iov_base.cast_const().cast::<u8>(), one.iov_len, "buffers") }?;
        total = total
            .checked_add(one.iov_len)
            .filter(|&total| total <= isize::MAX as usize)
            .ok_or_else(|| Failure::invalid("`buffers` are longer than memory"))?;
    }
    Ok(buffers)
}

/// Writes all `size` bytes to the end of the file, and puts the offset where they are into `*offset`, which
/// may be null. Appends of several threads and processes do not overwrite each other. If it fails, a part
/// of the bytes may be at the end of the file, and `*offset` is as before.
///
/// Threads: any. Errors and Durable: as `aq_file_write`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_append(
    file: *mut aq_file,
    buffer: *const c_void,
    size: usize,
    offset: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, source) =
            unsafe { (handle(file, "file")?, list(buffer.cast::<u8>(), size, "buffer")?) };
        let at = match source {
            [] => file.file.metadata()?.len(),
            source => file.file.write_with(source, At::End, WriteHow::default()).all()?.start,
        };
        // SAFETY: documented.
        unsafe { put_optional(offset, at) };
        Ok(())
    })
}

/// Writes `size` bytes to `offset`, all or nothing: no reader and no crash sees a part of them.
///
/// Threads: any. Errors: as `aq_file_write`; -EINVAL. Durable: as `aq_file_write`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_write_atomic(
    file: *mut aq_file,
    buffer: *const c_void,
    size: usize,
    offset: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, source) =
            unsafe { (handle(file, "file")?, list(buffer.cast::<u8>(), size, "buffer")?) };
        Ok(file.file.write_atomic(source, offset)?)
    })
}

/// Bytes to be written.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_write {
    /// Where the first one goes.
    pub offset: u64,
    /// The number of bytes.
    pub size: usize,
    /// The bytes.
    pub source: *const c_void,
}

/// Writes `count` ranges of a file, all or nothing: no reader and no crash sees some of them. Where ranges
/// overlap, the later one counts.
///
/// Threads: any. Errors: as `aq_file_write_atomic`; -EBADF if it was opened with AQ_OPEN_APPEND; -ENOSPC
/// or -E2BIG for too many ranges at once. Durable: as `aq_file_write`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_write_atomic_many(
    file: *mut aq_file,
    writes: *const aq_write,
    count: usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, writes) = unsafe { (handle(file, "file")?, list(writes, count, "writes")?) };
        let ranges = writes
            .iter()
            // SAFETY: documented.
            .map(|one| Ok((one.offset, unsafe { list(one.source.cast(), one.size, "source") }?)))
            .collect::<Result<Vec<(u64, &[u8])>>>()?;
        Ok(file.file.write_atomic_ranges(&ranges)?)
    })
}

/// Exchanges `size` bytes of two files of one pool, in whole pages of 4096 bytes, without copying them:
/// all at once for readers and after a crash.
///
/// Threads: any. Errors: -EINVAL for what are not whole pages, -EXDEV, -EBUSY if one has a writable
/// view, -ENOSPC. Durable: as `aq_file_write`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_exchange_range(
    file: *mut aq_file,
    offset: u64,
    other: *mut aq_file,
    other_offset: u64,
    size: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, other) = unsafe { (handle(file, "file")?, handle(other, "other")?) };
        Ok(file.file.exchange_range(offset, &other.file, other_offset, size)?)
    })
}

/// Copies a range of a file to `to_offset` of another, or of the same. `*done`, which may be null, gets the
/// number of bytes copied, also if it fails: otherwise less only if the file ends before the range.
///
/// Threads: any. Errors and Durable: as `aq_file_write`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_copy_range(
    file: *mut aq_file,
    range: aq_range,
    to: *mut aq_file,
    to_offset: u64,
    done: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        unsafe { put_optional(done, 0) };
        // SAFETY: documented.
        let (file, to) = unsafe { (handle(file, "file")?, handle(to, "to")?) };
        let range = range.to_range()?;
        let copied = file.file.copy_range_with(range, &to.file, to_offset, WriteHow::default());
        let Range { start, end } = copied.range();
        // SAFETY: documented.
        unsafe { put_optional(done, end - start) };
        copied.all()?;
        Ok(())
    })
}

/// Makes a file durable: with all its metadata if `data_only` is 0, otherwise with what reading it
/// needs.
///
/// Threads: any. Durable: every change of the file before the call, when it returns 0. Errors: -EIO:
/// the pool is read-only from then on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_sync(file: *mut aq_file, data_only: c_int) -> c_int {
    call(|| {
        // SAFETY: documented.
        let file = &unsafe { handle(file, "file") }?.file;
        Ok(if data_only != 0 { file.sync_data() } else { file.sync_all() }?)
    })
}

/// Makes a range of a file durable: with all changes of the pool before it if `data_only` is 0,
/// otherwise with what reading it needs. A length of UINT64_MAX is all from the offset on.
///
/// Threads: any. Durable: every change of the range before the call, when it returns 0. Errors: as
/// `aq_file_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_sync_range(
    file: *mut aq_file,
    range: aq_range,
    data_only: c_int,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let file = &unsafe { handle(file, "file") }?.file;
        let what = if data_only != 0 { Synced::Data } else { Synced::All };
        Ok(file.sync_range(bounds(range)?, what)?)
    })
}

/// Lets the media begin with what a later `aq_file_sync_range` of this range will write, without waiting:
/// a hint, whose failures are those of the sync.
///
/// Threads: any. Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_begin_sync(file: *mut aq_file, range: aq_range) -> c_int {
    call(|| {
        // SAFETY: documented.
        let file = &unsafe { handle(file, "file") }?.file;
        bounds(range)?;
        // To the end of the file, like the sync.
        file.begin_sync(range.offset..range.offset.saturating_add(range.length));
        Ok(())
    })
}

/// Makes a file longer, with zeros, or shorter.
///
/// Threads: any. Errors: -EBADF, -EFBIG. Durable: as `aq_file_write`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_set_len(file: *mut aq_file, len_bytes: u64) -> c_int {
    call(|| {
        // SAFETY: documented.
        Ok(unsafe { handle(file, "file") }?.file.set_len(len_bytes)?)
    })
}

/// `aq_file_allocate`: give the range pages, and extend the file to its end.
pub const AQ_ALLOCATE_EXTEND: c_int = 0;
/// `aq_file_allocate`: give the range pages, and keep the file's length.
pub const AQ_ALLOCATE_KEEP_SIZE: c_int = 1;
/// `aq_file_allocate`: make the range a hole.
pub const AQ_ALLOCATE_PUNCH_HOLE: c_int = 2;
/// `aq_file_allocate`: make the range zeros with pages, and extend the file to its end.
pub const AQ_ALLOCATE_ZERO: c_int = 3;
/// `aq_file_allocate`: remove the range; what is behind it moves to its place.
pub const AQ_ALLOCATE_COLLAPSE: c_int = 4;
/// `aq_file_allocate`: insert a hole; what is there moves back.
pub const AQ_ALLOCATE_INSERT: c_int = 5;

/// Allocates, zeroes, frees or moves a range of a file, as fallocate(2): `how` is one of
/// `AQ_ALLOCATE_…`.
///
/// Threads: any. Errors: -EBADF, -ENOSPC, -EINVAL. Durable: as `aq_file_write`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_allocate(
    file: *mut aq_file,
    how: c_int,
    range: aq_range,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let file = unsafe { handle(file, "file") }?;
        let mode = match how {
            AQ_ALLOCATE_EXTEND => FallocateMode::Extend,
            AQ_ALLOCATE_KEEP_SIZE => FallocateMode::KeepSize,
            AQ_ALLOCATE_PUNCH_HOLE => FallocateMode::PunchHole,
            AQ_ALLOCATE_ZERO => FallocateMode::ZeroRange,
            AQ_ALLOCATE_COLLAPSE => FallocateMode::CollapseRange,
            AQ_ALLOCATE_INSERT => FallocateMode::InsertRange,
            _ => return Err(Failure::invalid("unknown change: use one of AQ_ALLOCATE_…")),
        };
        Ok(file.file.allocate(mode, range.offset, range.length)?)
    })
}

/// Puts the first range with data (`hole` is 0) or the first hole at or after `offset` into `*range`;
/// one of length 0 if there is none.
///
/// Threads: any. Errors: -EINVAL, -EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_next(
    file: *mut aq_file,
    offset: u64,
    hole: c_int,
    range: *mut aq_range,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, place) = unsafe { (handle(file, "file")?, Place::new(range, "range")?) };
        let found =
            if hole != 0 { file.file.next_hole(offset)? } else { file.file.next_data(offset)? };
        place.put(found.map_or(aq_range { offset, length: 0 }, |found| aq_range {
            offset: found.start,
            length: found.end - found.start,
        }));
        Ok(())
    })
}

/// Moves the pages of a file so that they lie in as few runs as possible; `*runs`, which may be null, gets
/// the number of runs that are left.
///
/// Threads: any. Errors: -EBADF if it is not open to write, -EBUSY if it has a writable view, -ENOSPC.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_defragment(file: *mut aq_file, runs: *mut usize) -> c_int {
    call(|| {
        // SAFETY: documented.
        let done = unsafe { handle(file, "file") }?.file.defragment()?;
        // SAFETY: documented.
        unsafe { put_optional(runs, done.runs_after) };
        Ok(())
    })
}

/// Fills `status`.
///
/// Threads: any. Errors: -EINVAL, -EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_stat(file: *mut aq_file, status: *mut aq_file_status) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, place) = unsafe { (handle(file, "file")?, SizedPlace::new(status, "status")?) };
        place.put(&(&file.file.metadata()?).into());
        Ok(())
    })
}

/// Changes the permissions of a file.
///
/// Threads: any. Errors: -EPERM, -EROFS. Durable: after `aq_file_sync` or `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_chmod(file: *mut aq_file, mode: u32) -> c_int {
    call(|| {
        // SAFETY: documented.
        let file = unsafe { handle(file, "file") }?;
        Ok(file.file.set_permissions(Permissions::from_mode(mode))?)
    })
}

/// Changes owner and group; UINT32_MAX leaves one as it is.
///
/// Threads: any. Errors: -EPERM, -EROFS. Durable: after `aq_file_sync` or `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_chown(file: *mut aq_file, uid: u32, gid: u32) -> c_int {
    call(|| {
        // SAFETY: documented.
        let file = unsafe { handle(file, "file") }?;
        let given = |id| (id != u32::MAX).then_some(id);
        Ok(file.file.fchown(given(uid), given(gid))?)
    })
}

/// As `aq_path_get_attribute`, of an open file.
///
/// Threads: any. Errors: as `aq_path_get_attribute`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_get_attribute(
    file: *mut aq_file,
    attribute: *const c_char,
    buffer: *mut c_void,
    size: usize,
    value_size: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, attribute) = unsafe { (handle(file, "file")?, text(attribute, "attribute")?) };
        // SAFETY: documented.
        unsafe {
            put_value(buffer, size, value_size, || Ok(file.file.attribute(attribute.to_bytes())?))
        }
    })
}

/// As `aq_path_list_attributes`, of an open file.
///
/// Threads: any. Errors: as `aq_path_list_attributes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_list_attributes(
    file: *mut aq_file,
    buffer: *mut c_char,
    size: usize,
    names_size: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let file = unsafe { handle(file, "file") }?;
        // SAFETY: documented.
        unsafe { put_names(buffer, size, names_size, || Ok(file.file.attributes()?)) }
    })
}

/// As `aq_path_set_attribute`, of an open file.
///
/// Threads: any. Errors: those of setxattr(2). Durable: after `aq_file_sync` or `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_set_attribute(
    file: *mut aq_file,
    attribute: *const c_char,
    value: *const c_void,
    size: usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, attribute) = unsafe { (handle(file, "file")?, text(attribute, "attribute")?) };
        // SAFETY: documented.
        let value = unsafe { list(value.cast::<u8>(), size, "value") }?;
        Ok(file.file.set_attribute(attribute.to_bytes(), value, SetMode::Any)?)
    })
}

/// As `aq_path_remove_attribute`, of an open file.
///
/// Threads: any. Errors: those of removexattr(2). Durable: after `aq_file_sync` or `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_remove_attribute(
    file: *mut aq_file,
    attribute: *const c_char,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, attribute) = unsafe { (handle(file, "file")?, text(attribute, "attribute")?) };
        Ok(file.file.remove_attribute(attribute.to_bytes())?)
    })
}

/// Sets when a file was read and modified last, in nanoseconds since 1970; `AQ_KEEP_TIME` leaves one as
/// it is.
///
/// Threads: any. Errors: -EROFS, -EINVAL. Durable: after `aq_file_sync` or `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_set_times(
    file: *mut aq_file,
    accessed_ns: i64,
    modified_ns: i64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let file = unsafe { handle(file, "file") }?;
        Ok(file.file.set_times(times(accessed_ns, modified_ns))?)
    })
}

/// `aq_file_lock`: as long as necessary.
pub const AQ_WAIT: i64 = -1;

fn patience(timeout_ns: i64) -> Result<Option<Duration>> {
    match u64::try_from(timeout_ns) {
        Ok(timeout_ns) => Ok(Some(Duration::from_nanos(timeout_ns))),
        Err(_) if timeout_ns == AQ_WAIT => Ok(None),
        Err(_) => Err(Failure::invalid("a timeout is 0 or more, or AQ_WAIT")),
    }
}

/// Locks a whole file for this handle, until `aq_file_unlock` or the file is freed: exclusively if
/// `exclusive` is not 0, otherwise shared with other readers. The lock is advice, and ends with the
/// process. Waits at most `timeout_ns`: 0 not at all, `AQ_WAIT` as long as necessary.
///
/// Threads: any. Errors: -EWOULDBLOCK if it is locked otherwise, -EINTR after a signal, -EINVAL for another negative time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_lock(
    file: *mut aq_file,
    exclusive: c_int,
    timeout_ns: i64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let file = &unsafe { handle(file, "file") }?.file;
        let mode = lock_mode(exclusive);
        match (patience(timeout_ns)?, mode) {
            (Some(timeout), _) => file.lock_timeout(mode, timeout)?,
            (None, LockMode::Exclusive) => file.lock()?,
            (None, LockMode::Shared) => file.lock_shared()?,
        }
        Ok(())
    })
}

/// Releases the lock of `aq_file_lock`.
///
/// Threads: any. Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_unlock(file: *mut aq_file) -> c_int {
    call(|| {
        // SAFETY: documented.
        Ok(unsafe { handle(file, "file") }?.file.unlock()?)
    })
}

/// Locks a range of a file; a length of UINT64_MAX is all from the offset on, also what is appended
/// later. Otherwise as `aq_file_lock`, apart from which these locks are.
///
/// Threads: any. Errors: as `aq_file_lock`; -EOVERFLOW for a range that is too far.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_lock_range(
    file: *mut aq_file,
    range: aq_range,
    exclusive: c_int,
    timeout_ns: i64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let file = &unsafe { handle(file, "file") }?.file;
        let (mode, range) = (lock_mode(exclusive), bounds(range)?);
        match patience(timeout_ns)? {
            Some(timeout) => file.lock_range_timeout(range, mode, timeout)?,
            None => file.lock_range(range, mode)?,
        }
        Ok(())
    })
}

/// `*held` of `aq_file_lock_conflict`: no lock is in the way.
pub const AQ_LOCK_NONE: c_int = 0;
/// `*held` of `aq_file_lock_conflict`: another handle has a shared lock.
pub const AQ_LOCK_SHARED: c_int = 1;
/// `*held` of `aq_file_lock_conflict`: another handle has an exclusive lock.
pub const AQ_LOCK_EXCLUSIVE: c_int = 2;

fn held_mode(mode: LockMode) -> c_int {
    match mode {
        LockMode::Shared => AQ_LOCK_SHARED,
        LockMode::Exclusive => AQ_LOCK_EXCLUSIVE,
    }
}

/// Puts one of `AQ_LOCK_…` into `*held`: the lock of the whole file that another handle has and that
/// `aq_file_lock` would wait for.
///
/// Threads: any. Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_lock_conflict(
    file: *mut aq_file,
    exclusive: c_int,
    held: *mut c_int,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, place) = unsafe { (handle(file, "file")?, Place::new(held, "held")?) };
        let found = file.file.lock_conflict(lock_mode(exclusive))?;
        place.put(found.map_or(AQ_LOCK_NONE, held_mode));
        Ok(())
    })
}

/// As `aq_file_lock_conflict`, for `aq_file_lock_range`; `*held_range`, which may be null, gets the bytes
/// that the other handle has locked, with a length of UINT64_MAX if that lock has no end.
///
/// Threads: any. Errors: -EINVAL; -EOVERFLOW for a range that is too far.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_range_lock_conflict(
    file: *mut aq_file,
    range: aq_range,
    exclusive: c_int,
    held: *mut c_int,
    held_range: *mut aq_range,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (file, place) = unsafe { (handle(file, "file")?, Place::new(held, "held")?) };
        let found = file.file.range_lock_conflict(bounds(range)?, lock_mode(exclusive))?;
        place.put(found.as_ref().map_or(AQ_LOCK_NONE, |held| held_mode(held.mode)));
        // SAFETY: documented.
        unsafe {
            put_optional(
                held_range,
                found.map_or(aq_range { offset: 0, length: 0 }, |held| {
                    let std::ops::Range { start, end } = held.range;
                    let length = if end == u64::MAX { u64::MAX } else { end - start };
                    aq_range { offset: start, length }
                }),
            )
        };
        Ok(())
    })
}

/// Releases the locks of this handle in a range.
///
/// Threads: any. Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_unlock_range(file: *mut aq_file, range: aq_range) -> c_int {
    call(|| {
        // SAFETY: documented.
        Ok(unsafe { handle(file, "file") }?.file.unlock_range(bounds(range)?)?)
    })
}

fn lock_mode(exclusive: c_int) -> LockMode {
    if exclusive != 0 { LockMode::Exclusive } else { LockMode::Shared }
}

/// Makes a view of a range of a file, which must be open to read; `*view` is null if it fails. A length
/// of UINT64_MAX is all from the offset on. `writable`, if it is not 0, gives holes in the range pages;
/// the file must be open to write as well. What is seen changes when the file is written to.
///
/// Threads: any. Errors: -EINVAL beyond the end, -EBADF, -ENOMEM, -ENOSPC. Frees: the caller, by
/// `aq_file_view_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_view_new(
    file: *mut aq_file,
    range: aq_range,
    writable: c_int,
    view: *mut *mut aq_file_view,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(view, "view") }?;
        // SAFETY: documented.
        let file = &unsafe { handle(file, "file") }?.file;
        let range = bounds(range)?;
        let view = if writable != 0 {
            Viewed::Write(file.view_mut(range)?)
        } else {
            Viewed::Read(file.view(range)?.into_owned())
        };
        place.give(aq_file_view { view });
        Ok(())
    })
}

/// As `aq_file_view_new`, to read, for the file at a path: opening and viewing in one step.
///
/// Threads: any. Errors: as `aq_file_view_new`; those of open(2). Frees: the caller, by
/// `aq_file_view_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_view(
    pool: *mut aq_pool,
    name: *const c_char,
    range: aq_range,
    view: *mut *mut aq_file_view,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(view, "view") }?;
        // SAFETY: documented.
        let (pool, name) = unsafe { (handle(pool, "pool")?, path(name, "name")?) };
        let view = pool.files.view(name, bounds(range)?)?.into_owned();
        place.give(aq_file_view { view: Viewed::Read(view) });
        Ok(())
    })
}

/// Extends a file by `len_bytes` zeros, and makes a writable view of them: new content needs no other
/// copy. The file must be open to read and write; `*view` is null if it fails.
///
/// Threads: any; of two calls each gets its own bytes. Errors: as `aq_file_view_new`. Frees: the caller,
/// by `aq_file_view_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_append_view(
    file: *mut aq_file,
    len_bytes: u64,
    view: *mut *mut aq_file_view,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(view, "view") }?;
        // SAFETY: documented.
        let file = &unsafe { handle(file, "file") }?.file;
        place.give(aq_file_view { view: Viewed::Write(file.append_view(len_bytes)?) });
        Ok(())
    })
}

/// Leases a range of an immutable file (`aq_path_set_immutable`): as `aq_file_view_new`, but its bytes do
/// not change, and until the lease is freed no process can make the file changeable again. `*view` is null
/// if it fails.
///
/// Threads: any. Errors: as `aq_file_view_new`; -EPERM if the file is not immutable; -EOPNOTSUPP if its
/// bytes cannot lie one after the other in memory. Frees: the caller, by `aq_file_view_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_lease(
    file: *mut aq_file,
    range: aq_range,
    view: *mut *mut aq_file_view,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(view, "view") }?;
        // SAFETY: documented.
        let file = &unsafe { handle(file, "file") }?.file;
        let lease = file.lease(bounds(range)?)?.into_owned();
        place.give(aq_file_view { view: Viewed::Lease(lease) });
        Ok(())
    })
}

/// As `aq_file_lease`, for the file at a path: opening and leasing in one step.
///
/// Threads: any. Errors: as `aq_file_lease`; those of open(2). Frees: the caller, by `aq_file_view_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_lease(
    pool: *mut aq_pool,
    name: *const c_char,
    range: aq_range,
    view: *mut *mut aq_file_view,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(view, "view") }?;
        // SAFETY: documented.
        let (pool, name) = unsafe { (handle(pool, "pool")?, path(name, "name")?) };
        let lease = pool.files.lease(name, bounds(range)?)?.into_owned();
        place.give(aq_file_view { view: Viewed::Lease(lease) });
        Ok(())
    })
}

/// Frees a view; null is fine.
///
/// Threads: none may be in a call with this handle, or use the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_view_free(view: *mut aq_file_view) {
    // SAFETY: documented.
    unsafe { free(view) }
}

/// The first byte of a view, valid until it is freed; null if the bytes do not lie one after the other
/// in memory (then `aq_file_view_read` copies them), or if `view` is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_view_data(view: *mut aq_file_view) -> *const c_void {
    // SAFETY: documented.
    let view = unsafe { usable(view) };
    always(std::ptr::null(), || {
        let bytes = view.and_then(|view| view.view.bytes());
        bytes.map_or(std::ptr::null(), |bytes| bytes.as_ptr().cast())
    })
}

/// The first byte of a view, to load and store; null if the view is not writable. Otherwise as
/// `aq_file_view_data`.
///
/// Threads: any. Durable: after `aq_file_view_persist`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_view_data_mut(view: *mut aq_file_view) -> *mut c_void {
    // SAFETY: documented.
    let view = unsafe { usable(view) };
    always(std::ptr::null_mut(), || {
        let data = match view.map(|view| &view.view) {
            Some(Viewed::Write(view)) => view.as_mut_ptr(),
            _ => None,
        };
        data.map_or(std::ptr::null_mut(), <*mut u8>::cast)
    })
}

/// The length of a view in bytes. 0 if `view` is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_view_len(view: *mut aq_file_view) -> u64 {
    // SAFETY: documented.
    unsafe { usable(view) }.map_or(0, |view| view.view.len())
}

/// Copies `size` bytes from `offset` of the view.
///
/// Threads: any. Errors: -EINVAL outside of the view, -EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_view_read(
    view: *mut aq_file_view,
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

/// Passes a range of the view to `look`, in one piece: without a copy if its bytes lie one after the other
/// in memory, and otherwise as a copy.
///
/// Threads: any; `look` runs in the calling one. Errors: as `aq_file_view_read`; what `look` has seen is
/// then not to be used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_view_look(
    view: *mut aq_file_view,
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

/// Copies `size` bytes to `offset` of a writable view. Other processes see them at once.
///
/// Threads: any. Errors: -EROFS, -EINVAL outside of the view, -EIO. Durable: after
/// `aq_file_view_persist`, `aq_file_sync` or `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_view_write(
    view: *mut aq_file_view,
    buffer: *const c_void,
    size: usize,
    offset: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (view, source) =
            unsafe { (handle(view, "view")?, list(buffer.cast::<u8>(), size, "buffer")?) };
        Ok(writable(view)?.write(offset, source)?)
    })
}

/// Makes a range of a writable view durable, with what is needed to find it again; a length of
/// UINT64_MAX is all from the offset on.
///
/// Threads: any. Durable: every store before the call, when it returns 0. Errors: -EROFS, -EINVAL,
/// -ESTALE if the bytes do not belong to the file any more, -EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_view_persist(view: *mut aq_file_view, range: aq_range) -> c_int {
    call(|| {
        // SAFETY: documented.
        let view = writable(unsafe { handle(view, "view") }?)?;
        let end = if range.length == u64::MAX { view.len() } else { range.to_range()?.end };
        Ok(view.persist(range.offset..end)?)
    })
}

fn writable(view: &aq_file_view) -> Result<&ViewMut> {
    match &view.view {
        Viewed::Write(view) => Ok(view),
        Viewed::Read(_) | Viewed::Lease(_) => {
            let text = "the view is read-only: make it with `writable` set";
            Err(Failure::new(libc::EROFS, aquifer::ErrorKind::ReadOnly, text))
        }
    }
}

/// Whether the file still has the layout that the view was made from: 1 or 0. If not, some of the bytes
/// may not belong to the file any more.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_file_view_is_current(view: *mut aq_file_view) -> c_int {
    // SAFETY: documented.
    let view = unsafe { usable(view) };
    always(0, || view.is_some_and(|view| view.view.is_current()).into())
}
