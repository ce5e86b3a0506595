//! The file system of a pool by path: names, directories, links, attributes.

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs::Permissions;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

use aquifer::fs::{FileTimes, Metadata, ReadDir, RenameMode, SetMode, SpecialFile};

use crate::call::{Failure, Result, c_string, call};
use crate::memory::{Place, free, handle, handle_mut, list, list_mut, path, put_optional, text};
use crate::pool::aq_pool;
use crate::sized::{SizedPlace, sized};

/// What is known of a file, as by stat(2). Initialise it with `AQ_FILE_STATUS_INIT`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_file_status {
    /// `sizeof(aq_file_status)`.
    pub size: usize,
    /// The number of the inode.
    pub inode: u64,
    /// The length in bytes.
    pub len_bytes: u64,
    /// Bytes of pages that it has.
    pub allocated_bytes: u64,
    /// Its names.
    pub links: u64,
    /// Kind and permissions, as `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// 1 if it is immutable.
    pub immutable: u32,
    /// When it was read last, in nanoseconds since 1970, as the next ones.
    pub accessed_ns: i64,
    /// When its content was changed last.
    pub modified_ns: i64,
    /// When its metadata was changed last.
    pub changed_ns: i64,
    /// Tells it from earlier files with the same number of the inode.
    pub generation: u64,
    /// The number of a character or block device, as `st_rdev`; otherwise 0.
    pub device: u64,
}
sized!(aq_file_status {
    inode: u64,
    len_bytes: u64,
    allocated_bytes: u64,
    links: u64,
    mode: u32,
    uid: u32,
    gid: u32,
    immutable: u32,
    accessed_ns: i64,
    modified_ns: i64,
    changed_ns: i64,
    generation: u64,
    device: u64,
});

impl From<&Metadata> for aq_file_status {
    fn from(found: &Metadata) -> aq_file_status {
        let nanoseconds =
            |seconds: i64, rest: i64| seconds.saturating_mul(1_000_000_000).saturating_add(rest);
        aq_file_status {
            size: 0,
            inode: found.ino(),
            len_bytes: found.len(),
            allocated_bytes: found.allocated_bytes(),
            links: found.nlink(),
            mode: found.mode(),
            uid: found.uid(),
            gid: found.gid(),
            immutable: found.is_immutable().into(),
            accessed_ns: nanoseconds(found.atime(), found.atime_nsec()),
            modified_ns: nanoseconds(found.mtime(), found.mtime_nsec()),
            changed_ns: nanoseconds(found.ctime(), found.ctime_nsec()),
            generation: found.generation(),
            device: found.rdev(),
        }
    }
}

/// A time that stays as it is.
pub const AQ_KEEP_TIME: i64 = i64::MIN;

/// Times from C.
pub(crate) fn times(accessed_ns: i64, modified_ns: i64) -> FileTimes {
    let time = |nanoseconds: i64| {
        let distance = Duration::from_nanos(nanoseconds.unsigned_abs());
        if nanoseconds < 0 {
            SystemTime::UNIX_EPOCH - distance
        } else {
            SystemTime::UNIX_EPOCH + distance
        }
    };
    let mut times = FileTimes::new();
    if accessed_ns != AQ_KEEP_TIME {
        times = times.set_accessed(time(accessed_ns));
    }
    if modified_ns != AQ_KEEP_TIME {
        times = times.set_modified(time(modified_ns));
    }
    times
}

/// # Safety
/// As for [`handle`] and [`path`].
unsafe fn at<'a>(pool: *mut aq_pool, name: *const c_char) -> Result<(&'a aq_pool, &'a Path)> {
    // SAFETY: guaranteed by the caller.
    Ok(unsafe { (handle(pool, "pool")?, path(name, "name")?) })
}

/// Fills `status` with what is known of the file at a path; of a symbolic link itself if `follow` is 0.
///
/// Threads: any. Errors: those of stat(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_stat(
    pool: *mut aq_pool,
    name: *const c_char,
    follow: c_int,
    status: *mut aq_file_status,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let ((pool, name), place) =
            unsafe { (at(pool, name)?, SizedPlace::new(status, "status")?) };
        let files = &pool.files;
        let found =
            if follow != 0 { files.metadata(name)? } else { files.symlink_metadata(name)? };
        place.put(&(&found).into());
        Ok(())
    })
}

/// Creates a directory, with those above it if `parents` is not 0: then one that exists is fine. `mode`
/// has its permissions, minus the umask; 0 is 0777.
///
/// Threads: any. Errors: those of mkdir(2). Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_mkdir(
    pool: *mut aq_pool,
    name: *const c_char,
    mode: u32,
    parents: c_int,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name) = unsafe { at(pool, name) }?;
        let mut builder = pool.files.dir_builder();
        builder.recursive(parents != 0);
        if mode != 0 {
            builder.mode(mode);
        }
        Ok(builder.create(name)?)
    })
}

/// Removes an empty directory.
///
/// Threads: any. Errors: those of rmdir(2). Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_rmdir(pool: *mut aq_pool, name: *const c_char) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name) = unsafe { at(pool, name) }?;
        Ok(pool.files.remove_dir(name)?)
    })
}

/// Removes a name of a file, and the file with its last one when no process has it open.
///
/// Threads: any. Errors: those of unlink(2). Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_unlink(pool: *mut aq_pool, name: *const c_char) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name) = unsafe { at(pool, name) }?;
        Ok(pool.files.remove_file(name)?)
    })
}

/// Removes a directory with all that is in it.
///
/// Threads: any. Errors: those of unlink(2) and rmdir(2); a part may be removed then. Durable: after
/// `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_remove_all(pool: *mut aq_pool, name: *const c_char) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name) = unsafe { at(pool, name) }?;
        Ok(pool.files.remove_dir_all(name)?)
    })
}

/// `aq_path_rename`: replace what has the new name.
pub const AQ_RENAME_REPLACE: c_int = 0;
/// `aq_path_rename`: fail if something has the new name.
pub const AQ_RENAME_NO_REPLACE: c_int = 1;
/// `aq_path_rename`: exchange the two.
pub const AQ_RENAME_EXCHANGE: c_int = 2;

/// Renames a file or directory, atomically, also in a crash. `how` is one of `AQ_RENAME_…`.
///
/// Threads: any. Errors: those of renameat2(2). Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_rename(
    pool: *mut aq_pool,
    name: *const c_char,
    new_name: *const c_char,
    how: c_int,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let ((pool, name), new_name) = unsafe { (at(pool, name)?, path(new_name, "new_name")?) };
        let mode = match how {
            AQ_RENAME_REPLACE => RenameMode::Replace,
            AQ_RENAME_NO_REPLACE => RenameMode::NoReplace,
            AQ_RENAME_EXCHANGE => RenameMode::Exchange,
            _ => return Err(Failure::invalid("unknown mode: use one of AQ_RENAME_…")),
        };
        Ok(pool.files.rename_with(name, new_name, mode)?)
    })
}

/// Gives a file another name.
///
/// Threads: any. Errors: those of link(2). Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_link(
    pool: *mut aq_pool,
    name: *const c_char,
    new_name: *const c_char,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let ((pool, name), new_name) = unsafe { (at(pool, name)?, path(new_name, "new_name")?) };
        Ok(pool.files.hard_link(name, new_name)?)
    })
}

/// Creates a symbolic link to `target`, any text.
///
/// Threads: any. Errors: those of symlink(2). Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_symlink(
    pool: *mut aq_pool,
    target: *const c_char,
    name: *const c_char,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let ((pool, name), target) = unsafe { (at(pool, name)?, path(target, "target")?) };
        Ok(pool.files.symlink(target, name)?)
    })
}

/// Puts the target of a symbolic link into `*target`; null if it fails.
///
/// Threads: any. Errors: those of readlink(2). Frees: the caller, by `aq_string_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_readlink(
    pool: *mut aq_pool,
    name: *const c_char,
    target: *mut *mut c_char,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(target, "target") }?;
        // SAFETY: documented.
        let (pool, name) = unsafe { at(pool, name) }?;
        let target = pool.files.read_link(name)?.into_os_string().into_vec();
        place.put(c_string(target).into_raw());
        Ok(())
    })
}

/// Changes the permissions of a file.
///
/// Threads: any. Errors: those of chmod(2). Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_chmod(
    pool: *mut aq_pool,
    name: *const c_char,
    mode: u32,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name) = unsafe { at(pool, name) }?;
        Ok(pool.files.set_permissions(name, Permissions::from_mode(mode))?)
    })
}

/// Puts the path of a file without symbolic links, "." and ".." into `*absolute`; null if it fails.
///
/// Threads: any. Errors: those of realpath(3). Frees: the caller, by `aq_string_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_realpath(
    pool: *mut aq_pool,
    name: *const c_char,
    absolute: *mut *mut c_char,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(absolute, "absolute") }?;
        // SAFETY: documented.
        let (pool, name) = unsafe { at(pool, name) }?;
        let absolute = pool.files.canonicalize(name)?.into_os_string().into_vec();
        place.put(c_string(absolute).into_raw());
        Ok(())
    })
}

/// Copies a regular file with its permissions; what has the new name is overwritten. `*copied`, which may
/// be null, gets the number of bytes.
///
/// Threads: any. Errors: those of open(2), -ENOSPC, -EIO; -EINVAL if both are the same file, also by links:
/// nothing is changed then. Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_copy(
    pool: *mut aq_pool,
    name: *const c_char,
    new_name: *const c_char,
    copied: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let ((pool, name), new_name) = unsafe { (at(pool, name)?, path(new_name, "new_name")?) };
        let bytes = pool.files.copy(name, new_name)?;
        // SAFETY: documented.
        unsafe { put_optional(copied, bytes) };
        Ok(())
    })
}

/// Makes a named pipe, socket or device, which the pool keeps and does not open. `mode` has its kind
/// (`S_IFIFO`, `S_IFSOCK`, `S_IFCHR`, `S_IFBLK`) and permissions, minus the umask; `device` is the number
/// of a device as of makedev(3), and otherwise not used.
///
/// Threads: any. Errors: those of mknod(2); -EINVAL for another kind. Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_mknod(
    pool: *mut aq_pool,
    name: *const c_char,
    mode: u32,
    device: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name) = unsafe { at(pool, name) }?;
        let special = match mode & libc::S_IFMT {
            libc::S_IFIFO => SpecialFile::Fifo,
            libc::S_IFSOCK => SpecialFile::Socket,
            libc::S_IFCHR => SpecialFile::CharDevice(device),
            libc::S_IFBLK => SpecialFile::BlockDevice(device),
            _ => return Err(Failure::invalid("`mode` has no kind of a special file")),
        };
        Ok(pool.files.create_special(name, special, mode & !libc::S_IFMT)?)
    })
}

/// Sets when a file was read and modified last, in nanoseconds since 1970; `AQ_KEEP_TIME` leaves one as it
/// is. Of a symbolic link itself if `follow` is 0.
///
/// Threads: any. Errors: those of utimensat(2). Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_set_times(
    pool: *mut aq_pool,
    name: *const c_char,
    follow: c_int,
    accessed_ns: i64,
    modified_ns: i64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name) = unsafe { at(pool, name) }?;
        let (files, times) = (&pool.files, times(accessed_ns, modified_ns));
        Ok(if follow != 0 {
            files.set_times(name, times)
        } else {
            files.set_times_nofollow(name, times)
        }?)
    })
}

/// Changes owner and group; UINT32_MAX leaves one as it is. Of a symbolic link itself if `follow` is 0.
///
/// Threads: any. Errors: those of chown(2). Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_chown(
    pool: *mut aq_pool,
    name: *const c_char,
    uid: u32,
    gid: u32,
    follow: c_int,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name) = unsafe { at(pool, name) }?;
        let given = |id| (id != u32::MAX).then_some(id);
        let files = &pool.files;
        Ok(if follow != 0 {
            files.chown(name, given(uid), given(gid))
        } else {
            files.lchown(name, given(uid), given(gid))
        }?)
    })
}

/// Makes a file immutable if `immutable` is not 0, otherwise changeable: an immutable file can be viewed
/// as memory that does not change.
///
/// Threads: any. Errors: -EPERM, -EBUSY while it is leased. Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_set_immutable(
    pool: *mut aq_pool,
    name: *const c_char,
    immutable: c_int,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name) = unsafe { at(pool, name) }?;
        Ok(pool.files.set_immutable(name, immutable != 0)?)
    })
}

/// Puts the value of an extended attribute into `buffer`, and its size into `*value_size`. With a
/// `size` of 0 only the latter.
///
/// Threads: any. Errors: -ENODATA if there is none, -ERANGE if `size` is too small.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_get_attribute(
    pool: *mut aq_pool,
    name: *const c_char,
    attribute: *const c_char,
    buffer: *mut c_void,
    size: usize,
    value_size: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let ((pool, name), attribute) = unsafe { (at(pool, name)?, text(attribute, "attribute")?) };
        // SAFETY: documented.
        unsafe {
            put_value(buffer, size, value_size, || {
                Ok(pool.files.attribute(name, attribute.to_bytes())?)
            })
        }
    })
}

/// Puts the value of an attribute where there is room for it, and its size.
///
/// # Safety
/// As for [`list_mut`] and [`Place::new`].
pub(crate) unsafe fn put_value(
    buffer: *mut c_void,
    size: usize,
    value_size: *mut usize,
    find: impl FnOnce() -> Result<Vec<u8>>,
) -> Result {
    // SAFETY: guaranteed by the caller.
    let (target, place) = unsafe {
        (list_mut(buffer.cast::<u8>(), size, "buffer")?, Place::new(value_size, "value_size")?)
    };
    put_bytes(target, place, &find()?)
}

fn put_bytes(target: &mut [u8], place: Place<usize>, value: &[u8]) -> Result {
    place.put(value.len());
    if !target.is_empty() {
        let target = target.get_mut(..value.len()).ok_or_else(|| {
            let text = format!("there are {} bytes, more than the buffer has", value.len());
            Failure::new(libc::ERANGE, aquifer::ErrorKind::InvalidInput, text)
        })?;
        target.copy_from_slice(value);
    }
    Ok(())
}

/// Puts the names of attributes where there is room for them, as listxattr(2), and their size.
///
/// # Safety
/// As for [`list_mut`] and [`Place::new`].
pub(crate) unsafe fn put_names(
    buffer: *mut c_char,
    size: usize,
    names_size: *mut usize,
    find: impl FnOnce() -> Result<Vec<Vec<u8>>>,
) -> Result {
    // SAFETY: guaranteed by the caller.
    let (target, place) = unsafe {
        (list_mut(buffer.cast::<u8>(), size, "buffer")?, Place::new(names_size, "names_size")?)
    };
    let names: Vec<u8> = find()?.into_iter().flat_map(|name| name.into_iter().chain([0])).collect();
    put_bytes(target, place, &names)
}

/// Puts the names of the extended attributes into `buffer`, one after the other, each ended by a zero
/// byte, and their size into `*names_size`. With a `size` of 0 only the latter.
///
/// Threads: any. Errors: -ENOENT, -ERANGE if `size` is too small.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_list_attributes(
    pool: *mut aq_pool,
    name: *const c_char,
    buffer: *mut c_char,
    size: usize,
    names_size: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name) = unsafe { at(pool, name) }?;
        // SAFETY: documented.
        unsafe { put_names(buffer, size, names_size, || Ok(pool.files.attributes(name)?)) }
    })
}

/// Sets an extended attribute, whether there is one or not.
///
/// Threads: any. Errors: those of setxattr(2). Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_set_attribute(
    pool: *mut aq_pool,
    name: *const c_char,
    attribute: *const c_char,
    value: *const c_void,
    size: usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let ((pool, name), attribute) = unsafe { (at(pool, name)?, text(attribute, "attribute")?) };
        // SAFETY: documented.
        let value = unsafe { list(value.cast::<u8>(), size, "value") }?;
        Ok(pool.files.set_attribute(name, attribute.to_bytes(), value, SetMode::Any)?)
    })
}

/// Removes an extended attribute.
///
/// Threads: any. Errors: those of removexattr(2). Durable: after `aq_pool_sync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_path_remove_attribute(
    pool: *mut aq_pool,
    name: *const c_char,
    attribute: *const c_char,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let ((pool, name), attribute) = unsafe { (at(pool, name)?, text(attribute, "attribute")?) };
        Ok(pool.files.remove_attribute(name, attribute.to_bytes())?)
    })
}

/// A directory that is being read.
pub struct aq_dir {
    entries: ReadDir,
    /// Of the entry that was read last.
    name: CString,
}

/// Opens a directory to read its entries; `*dir` is null if it fails.
///
/// Threads: any. Errors: those of opendir(3). Frees: the caller, by `aq_dir_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_dir_open(
    pool: *mut aq_pool,
    name: *const c_char,
    dir: *mut *mut aq_dir,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(dir, "dir") }?;
        // SAFETY: documented.
        let (pool, name) = unsafe { at(pool, name) }?;
        place.give(aq_dir { entries: pool.files.read_dir(name)?, name: CString::default() });
        Ok(())
    })
}

/// Puts the name of the next entry, without "." and "..", into `*name`; null at the end. `inode`, which may
/// be null, gets the number of its inode.
///
/// Threads: one at a time for each handle. Errors: -EIO, -EUCLEAN. Frees: nothing; the name belongs to the
/// directory, and is valid until the next call with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_dir_next(
    dir: *mut aq_dir,
    name: *mut *const c_char,
    inode: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::new(name, "name") }?;
        // SAFETY: documented: one thread at a time.
        let dir = unsafe { handle_mut(dir, "dir") }?;
        let Some(entry) = dir.entries.next().transpose()? else {
            place.put(std::ptr::null());
            return Ok(());
        };
        dir.name = c_string(entry.file_name_ref().as_bytes());
        place.put(dir.name.as_ptr());
        // SAFETY: documented.
        unsafe { put_optional(inode, entry.ino()) };
        Ok(())
    })
}

/// Closes a directory; null is fine.
///
/// Threads: none may be in a call with this handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_dir_free(dir: *mut aq_dir) {
    // SAFETY: documented.
    unsafe { free(dir) }
}
