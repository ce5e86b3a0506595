//! Pointers from C: handles, lists, strings, places for results.
//!
//! A null pointer is an error where it is not allowed. Otherwise a pointer is what the documentation
//! of its function says.

use std::ffi::{CStr, OsStr, c_char};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use aquifer::CacheError;
use aquifer_vm::ProcessMark;

use crate::call::{Failure, Result, always};

/// What a handle points to: a value and the process that made it. In a forked child the memory that
/// handles manage is gone, and threads of the parent may have held their locks.
#[repr(C)]
struct Made<T> {
    /// First, as a handle is a pointer to it.
    value: T,
    mark: ProcessMark,
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
    unsafe { usable(pointer) }.ok_or_else(|| CacheError::Forked.into())
}

/// A handle; `None` if it is null, or was made before this process was forked.
///
/// # Safety
/// As for [`handle`].
pub(crate) unsafe fn usable<'a, T>(pointer: *const T) -> Option<&'a T> {
    // SAFETY: guaranteed by the caller: `give` has made it.
    let made = unsafe { pointer.cast::<Made<T>>().as_ref() }?;
    made.mark.is_current().then_some(&made.value)
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
        let made = Box::new(Made { value, mark: ProcessMark::new() });
        self.put(Box::into_raw(made).cast());
    }
}

/// Takes back what a handle points to, also in a forked child.
///
/// # Safety
/// From [`Place::give`] and not used any more.
pub(crate) unsafe fn take<T>(pointer: *mut T) -> T {
    // SAFETY: guaranteed by the caller.
    unsafe { Box::from_raw(pointer.cast::<Made<T>>()) }.value
}

/// Frees a handle; null is fine.
///
/// # Safety
/// Null, or as for [`take`].
pub(crate) unsafe fn free<T>(pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: guaranteed by the caller.
        always((), || drop(unsafe { take(pointer) }));
    }
}
