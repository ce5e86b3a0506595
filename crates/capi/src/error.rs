//! What went wrong in the last call of this thread.

use std::ffi::{c_char, c_int};

use aquifer::ErrorKind;

use crate::call::{always, last, last_text};
use crate::sized::{SizedPlace, sized};

/// `aq_error::kind`: no call has failed in this thread.
pub const AQ_KIND_NONE: c_int = 0;
/// Nothing has this name, or there is nothing at the path.
pub const AQ_KIND_NOT_FOUND: c_int = 1;
/// The name is taken, or a directory is not empty.
pub const AQ_KIND_ALREADY_EXISTS: c_int = 2;
/// Not allowed: permissions, a wrong key, an immutable file.
pub const AQ_KIND_PERMISSION_DENIED: c_int = 3;
/// Opened or mapped for reading only, or on read-only media.
pub const AQ_KIND_READ_ONLY: c_int = 4;
/// In use elsewhere; it works once the other use has ended.
pub const AQ_KIND_BUSY: c_int = 5;
/// Another process holds what is needed, and makes no progress.
pub const AQ_KIND_TIMED_OUT: c_int = 6;
/// A signal ended a wait; try again.
pub const AQ_KIND_INTERRUPTED: c_int = 7;
/// The arguments are wrong: a range, a size, an option, a name, a file of another kind.
pub const AQ_KIND_INVALID_INPUT: c_int = 8;
/// Not possible here: with this device, file system, kernel or version.
pub const AQ_KIND_UNSUPPORTED: c_int = 9;
/// The device, file system, pool, object or heap is full.
pub const AQ_KIND_NO_SPACE: c_int = 10;
/// A limit of this process or machine is reached: memory, frames, mappings, pins.
pub const AQ_KIND_LIMIT_REACHED: c_int = 11;
/// The file or device is shorter than it was.
pub const AQ_KIND_TRUNCATED: c_int = 12;
/// The bytes on the media are inconsistent.
pub const AQ_KIND_DAMAGED: c_int = 13;
/// A transfer failed.
pub const AQ_KIND_IO: c_int = 14;
/// Data written earlier may not be durable, and trying again does not make it so.
pub const AQ_KIND_NOT_DURABLE: c_int = 15;
/// The process is a fork of the one that opened it; open it again here.
pub const AQ_KIND_FORKED: c_int = 16;
/// None of these.
pub const AQ_KIND_OTHER: c_int = 17;

/// `aq_error::offset` where the failure concerns no place.
pub const AQ_NO_OFFSET: u64 = u64::MAX;

/// A failure. Set `size` before it is filled: `aq_error error = AQ_ERROR_INIT;`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_error {
    /// `sizeof(aq_error)`.
    pub size: usize,
    /// The number of errno(3), positive; 0 if no call has failed in this thread.
    pub number: c_int,
    /// One of `AQ_KIND_…`: what a program decides by.
    pub kind: c_int,
    /// The first byte concerned, of the file, device, view or heap; or `AQ_NO_OFFSET`.
    pub offset: u64,
    /// The path concerned; "" if there is none. Valid as long as `text`.
    pub path: *const c_char,
    /// What happened, to what, and what to do next; without a newline. Belongs to the library, and
    /// is valid until this thread's next call that fails.
    pub text: *const c_char,
}
sized!(aq_error {
    number: c_int,
    kind: c_int,
    offset: u64,
    path: *const c_char,
    text: *const c_char,
});

/// The constant `AQ_KIND_…` of a failure's kind.
pub(crate) fn number_of(kind: Option<ErrorKind>) -> c_int {
    let Some(kind) = kind else { return AQ_KIND_NONE };
    match kind {
        ErrorKind::NotFound => AQ_KIND_NOT_FOUND,
        ErrorKind::AlreadyExists => AQ_KIND_ALREADY_EXISTS,
        ErrorKind::PermissionDenied => AQ_KIND_PERMISSION_DENIED,
        ErrorKind::ReadOnly => AQ_KIND_READ_ONLY,
        ErrorKind::Busy => AQ_KIND_BUSY,
        ErrorKind::TimedOut => AQ_KIND_TIMED_OUT,
        ErrorKind::Interrupted => AQ_KIND_INTERRUPTED,
        ErrorKind::InvalidInput => AQ_KIND_INVALID_INPUT,
        ErrorKind::Unsupported => AQ_KIND_UNSUPPORTED,
        ErrorKind::NoSpace => AQ_KIND_NO_SPACE,
        ErrorKind::LimitReached => AQ_KIND_LIMIT_REACHED,
        ErrorKind::Truncated => AQ_KIND_TRUNCATED,
        ErrorKind::Damaged => AQ_KIND_DAMAGED,
        ErrorKind::Io => AQ_KIND_IO,
        ErrorKind::NotDurable => AQ_KIND_NOT_DURABLE,
        ErrorKind::Forked => AQ_KIND_FORKED,
        _ => AQ_KIND_OTHER,
    }
}

/// The text of this thread's last failure; "" if no call has failed. Never null.
///
/// Threads: any; each has its own. Frees: nothing; the text belongs to the library and is valid until
/// this thread's next call that fails, or its end.
#[unsafe(no_mangle)]
pub extern "C" fn aq_last_error() -> *const c_char {
    last_text()
}

/// This thread's last failure in full. A call that succeeds does not clear it, nor does a failure of
/// this one replace it.
///
/// Threads: any; each has its own. Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_last_error_info(error: *mut aq_error) -> c_int {
    always(-libc::ENOTRECOVERABLE, || {
        // SAFETY: documented.
        let place = match unsafe { SizedPlace::new(error, "error") } {
            Ok(place) => place,
            // Not kept: it would replace the failure that was asked for.
            Err(failure) => return -failure.errno,
        };
        let found = last(|failure| aq_error {
            size: 0,
            number: failure.errno,
            kind: number_of(failure.kind),
            offset: failure.offset.unwrap_or(AQ_NO_OFFSET),
            path: failure.path.as_ptr(),
            text: failure.text.as_ptr(),
        });
        // In destructors of this thread's data it may be gone.
        let none = const { c"".as_ptr() };
        let none =
            aq_error { size: 0, number: 0, kind: 0, offset: AQ_NO_OFFSET, path: none, text: none };
        place.put(&found.unwrap_or(none));
        0
    })
}
