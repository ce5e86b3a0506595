//! The library, the process and its threads.

use std::ffi::{CString, c_char, c_int};

use crate::call::{Failure, always, call};

/// The version of the library that the program runs with, such as "0.1.0".
///
/// Threads: any. Frees: nothing; the text is constant.
#[unsafe(no_mangle)]
pub extern "C" fn aq_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Prepares this thread to load pages by plain loads from user-backed mappings: unblocks SIGBUS and
/// SIGSEGV, and gives it a signal stack of 64 KiB where it has none or a smaller one. Only a thread that
/// blocks all signals, or may touch a mapping with its stack nearly full, needs it.
///
/// Threads: the calling one. Errors: -ENOMEM and those of sigaltstack(2).
#[unsafe(no_mangle)]
pub extern "C" fn aq_prepare_thread() -> c_int {
    call(|| Ok(aquifer::prepare_thread().map_err(aquifer::CacheError::from)?))
}

/// Frees a string that a function of the library has made. Null is fine.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_string_free(string: *mut c_char) {
    if !string.is_null() {
        // SAFETY: documented: from `give_string`, and not freed before.
        always((), || drop(unsafe { CString::from_raw(string) }));
    }
}

/// A string for the program, freed by [`aq_string_free`].
pub(crate) fn give_string(text: String) -> Result<*mut c_char, Failure> {
    let text = CString::new(text).map_err(|_| Failure::invalid("a text with a zero byte"))?;
    Ok(text.into_raw())
}
