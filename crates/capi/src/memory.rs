//! Arguments from C: handles, lists, strings, descriptors, places for results.
//!
//! A null pointer is an error where it is not allowed. Otherwise a pointer is what the documentation
//! of its function says.

use std::alloc::Layout;
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicPtr, AtomicUsize};

use aquifer::CacheError;
use aquifer_vm::LifeMark;

use crate::call::{Failure, Result, call};

/// What a handle points to. In a forked child the memory that handles manage is gone, and threads of
/// the parent may have held their locks.
#[repr(C)]
struct Made<T> {
    /// First, so that it can be read without the type of the value.
    header: Header,
    /// There until the handle is freed.
    value: MaybeUninit<T>,
}

struct Header {
    /// Of the process that made the handle; ended when the handle is freed.
    mark: LifeMark,
    /// Of the whole.
    layout: Layout,
}

/// The memory of the handles freed last, without their values, so that a handle that is freed twice, or
/// used after it was freed, is an error and nothing worse: a defect of the program, which is found in
/// its tests. Without a lock: a thread that exists only in the parent of a fork may have held it.
static FREED: [AtomicPtr<Header>; 256] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 256];
static NEXT_FREED: AtomicUsize = AtomicUsize::new(0);

/// Keeps the memory of a handle for a while, and gives that of an older one back.
fn keep_freed(header: *mut Header) {
    let place = &FREED[NEXT_FREED.fetch_add(1, Relaxed) % FREED.len()];
    // AcqRel: what the thread that freed the older one did with it came before.
    let older = place.swap(header, AcqRel);
    if !older.is_null() {
        // SAFETY: only this thread has got it from the list.
        let layout = unsafe { (*older).layout };
        // SAFETY: as above; `give` has allocated it so, and it has no value any more.
        unsafe { std::alloc::dealloc(older.cast(), layout) };
    }
}

fn is_null(name: &str) -> Failure {
    Failure::invalid(format!("`{name}` is null"))
}

/// A handle of this process.
///
/// # Safety
/// Null, or from [`Place::give`] and not freed while the borrow lasts.
pub(crate) unsafe fn handle<'a, T>(pointer: *const T, name: &str) -> Result<&'a T> {
    if pointer.is_null() {
        return Err(is_null(name));
    }
    // SAFETY: guaranteed by the caller.
    unsafe { usable(pointer) }.ok_or_else(|| {
        // SAFETY: guaranteed by the caller: `give` has made it.
        unsafe { why_not_usable(pointer, name) }
    })
}

/// As [`handle`], for one that one thread uses at a time.
///
/// # Safety
/// As for [`handle`]; no other thread uses it while the borrow lasts.
pub(crate) unsafe fn handle_mut<'a, T>(pointer: *mut T, name: &str) -> Result<&'a mut T> {
    // SAFETY: guaranteed by the caller.
    unsafe { handle(pointer.cast_const(), name) }?;
    // SAFETY: it is one, and guaranteed by the caller.
    Ok(unsafe { (*pointer.cast::<Made<T>>()).value.assume_init_mut() })
}

/// Why a handle is not usable: it was freed, or made before this process was forked.
///
/// # Safety
/// Not null, and as for [`handle`].
#[cold]
unsafe fn why_not_usable<T>(pointer: *const T, name: &str) -> Failure {
    // SAFETY: guaranteed by the caller: `give` has made it; the header is there.
    let is_freed = unsafe { (*pointer.cast::<Header>()).mark.has_ended() };
    if is_freed { freed(name) } else { CacheError::Forked.into() }
}

fn freed(name: &str) -> Failure {
    let text = format!("`{name}` was freed before: a defect of the program");
    Failure::new(libc::EBADF, aquifer::ErrorKind::InvalidInput, text)
}

/// A handle; `None` if it is null, was made before this process was forked, or was freed a short while
/// ago.
///
/// # Safety
/// As for [`handle`].
pub(crate) unsafe fn usable<'a, T>(pointer: *const T) -> Option<&'a T> {
    // SAFETY: guaranteed by the caller: `give` has made it.
    let made = unsafe { pointer.cast::<Made<T>>().as_ref() }?;
    // SAFETY: it has a value as long as the mark has not ended.
    made.header.mark.is_current().then(|| unsafe { made.value.assume_init_ref() })
}

/// A list; null is allowed if it is empty.
///
/// # Safety
/// `count` elements that nothing changes while the borrow lasts.
pub(crate) unsafe fn list<'a, T>(pointer: *const T, count: usize, name: &str) -> Result<&'a [T]> {
    check_length::<T>(count, name)?;
    if count == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() {
        return Err(is_null(name));
    }
    // SAFETY: guaranteed by the caller; the size was checked.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// A buffer to write to; null is allowed if it is empty.
///
/// # Safety
/// Writable for `count` elements, which nothing else uses while the borrow lasts.
pub(crate) unsafe fn list_mut<'a, T>(
    pointer: *mut T,
    count: usize,
    name: &str,
) -> Result<&'a mut [T]> {
    check_length::<T>(count, name)?;
    if count == 0 {
        return Ok(&mut []);
    }
    if pointer.is_null() {
        return Err(is_null(name));
    }
    // SAFETY: guaranteed by the caller; the size was checked.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, count) })
}

/// Places for results, which may be uninitialised; null is allowed if there is none.
///
/// # Safety
/// As for [`list_mut`].
pub(crate) unsafe fn places<'a, T>(
    pointer: *mut T,
    count: usize,
    name: &str,
) -> Result<&'a mut [MaybeUninit<T>]> {
    // SAFETY: guaranteed by the caller; it may be uninitialised.
    unsafe { list_mut(pointer.cast(), count, name) }
}

fn check_length<T>(count: usize, name: &str) -> Result {
    match count.checked_mul(size_of::<T>()) {
        Some(bytes) if bytes <= isize::MAX as usize => Ok(()),
        _ => Err(Failure::invalid(format!("`{name}` is longer than memory"))),
    }
}

/// A string.
///
/// # Safety
/// Null, or ended by a zero byte and unchanged while the borrow lasts.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a CStr> {
    if pointer.is_null() {
        return Err(is_null(name));
    }
    // SAFETY: guaranteed by the caller.
    Ok(unsafe { CStr::from_ptr(pointer) })
}

/// A path: any bytes.
///
/// # Safety
/// As for [`text`].
pub(crate) unsafe fn path<'a>(pointer: *const c_char, name: &str) -> Result<&'a Path> {
    // SAFETY: guaranteed by the caller.
    let text = unsafe { text(pointer, name) }?;
    Ok(Path::new(OsStr::from_bytes(text.to_bytes())))
}

/// A string in UTF-8; `None` if it is null.
///
/// # Safety
/// As for [`text`].
pub(crate) unsafe fn utf8<'a>(pointer: *const c_char, name: &str) -> Result<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: guaranteed by the caller.
    let text = unsafe { text(pointer, name) }?;
    let text = text.to_str().map_err(|_| Failure::invalid(format!("`{name}` is not UTF-8")))?;
    Ok(Some(text))
}

/// A descriptor.
///
/// # Safety
/// Open until the call ends, unless it is negative.
pub(crate) unsafe fn descriptor<'a>(number: c_int) -> Result<BorrowedFd<'a>> {
    if number < 0 {
        let text = "a descriptor is negative";
        return Err(Failure::new(libc::EBADF, aquifer::ErrorKind::InvalidInput, text));
    }
    // SAFETY: guaranteed by the caller.
    Ok(unsafe { BorrowedFd::borrow_raw(number) })
}

/// Where a function puts its result.
pub(crate) struct Place<T>(*mut T);

impl<T> Place<T> {
    /// # Safety
    /// Null, or writable until the function returns.
    pub unsafe fn new(pointer: *mut T, name: &str) -> Result<Place<T>> {
        if pointer.is_null() { Err(is_null(name)) } else { Ok(Place(pointer)) }
    }

    /// What is there until [`Place::put`], also if that does not come.
    pub fn put_first(self, value: T) -> Place<T> {
        // SAFETY: as for `put`.
        unsafe { self.0.write(value) };
        self
    }

    pub fn put(self, value: T) {
        // SAFETY: `new`; the memory may be uninitialised.
        unsafe { self.0.write(value) }
    }
}

/// Puts a result where it is wanted. Through the pointer: the memory may be uninitialised.
///
/// # Safety
/// Null, or writable.
pub(crate) unsafe fn put_optional<T>(pointer: *mut T, value: T) {
    if !pointer.is_null() {
        // SAFETY: guaranteed by the caller.
        unsafe { pointer.write(value) };
    }
}

/// Handles are used by any thread.
impl<T: Send + Sync> Place<*mut T> {
    /// As [`Place::new`]; the handle is null until there is one.
    ///
    /// # Safety
    /// As for [`Place::new`].
    pub unsafe fn of_handle(pointer: *mut *mut T, name: &str) -> Result<Place<*mut T>> {
        // SAFETY: guaranteed by the caller.
        Ok(unsafe { Place::new(pointer, name) }?.put_first(std::ptr::null_mut()))
    }

    /// Gives the caller a handle.
    pub fn give(self, value: T) {
        let (mark, layout) = (LifeMark::new(), Layout::new::<Made<T>>());
        let header = Header { mark, layout };
        let made = Box::new(Made { header, value: MaybeUninit::new(value) });
        self.put(Box::into_raw(made).cast());
    }
}

/// Takes back what a handle points to, also in a forked child.
///
/// # Safety
/// From [`Place::give`], and not used any more.
pub(crate) unsafe fn take<T>(pointer: *mut T, name: &str) -> Result<T> {
    let made = pointer.cast::<Made<T>>();
    // SAFETY: guaranteed by the caller.
    let header = unsafe { &(*made).header };
    // It guards nothing: that other threads have done with the handle is the program's duty.
    if !header.mark.end() {
        return Err(freed(name));
    }
    // SAFETY: the value is there, as only one call gets here, and none does again.
    let value = unsafe { (*made).value.assume_init_read() };
    keep_freed(made.cast());
    Ok(value)
}

/// Frees a handle; null is fine.
///
/// # Safety
/// Null, or as for [`take`].
pub(crate) unsafe fn free<T>(pointer: *mut T) {
    if !pointer.is_null() {
        call(|| {
            // SAFETY: guaranteed by the caller.
            drop(unsafe { take(pointer, "the handle") }?);
            Ok(())
        });
    }
}
