//! The border: every function of the library runs in [`call`].
//!
//! No panic crosses it: unwinding into C is undefined. A panic is a defect of the library; its
//! caller gets `-ENOTRECOVERABLE` and its text, and handles that the call used may be unusable.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_int};
use std::os::unix::ffi::OsStrExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use aquifer::{Error, ErrorKind};

/// What a function of the library returns inside.
pub(crate) type Result<T = ()> = std::result::Result<T, Failure>;

/// The failure of a call.
#[derive(Default)]
pub(crate) struct Failure {
    pub errno: c_int,
    /// None if no call has failed.
    pub kind: Option<ErrorKind>,
    pub offset: Option<u64>,
    pub path: CString,
    pub text: CString,
}

impl Failure {
    /// A failure of the call itself, not of the engine.
    pub fn new(errno: c_int, kind: ErrorKind, text: impl Into<Vec<u8>>) -> Failure {
        Failure { errno, kind: Some(kind), text: c_string(text), ..Failure::default() }
    }

    pub fn invalid(text: impl Into<Vec<u8>>) -> Failure {
        Failure::new(libc::EINVAL, ErrorKind::InvalidInput, text)
    }

    pub fn panicked(panic: &(dyn Any + Send)) -> Failure {
        let text = panic
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("no message");
        let text = format!("a defect of the library: {text}");
        Failure::new(libc::ENOTRECOVERABLE, ErrorKind::Other, text)
    }

    /// Keeps the failure as this thread's last; the number for C.
    pub fn keep(self) -> c_int {
        let number = -self.errno;
        // Fails only in destructors of this thread's data: then the text is lost.
        let _ = LAST.try_with(|last| *last.borrow_mut() = self);
        number
    }
}

/// Bytes as a string of C; a zero byte ends it.
pub(crate) fn c_string(text: impl Into<Vec<u8>>) -> CString {
    let mut bytes = text.into();
    bytes.truncate(bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len()));
    CString::new(bytes).unwrap_or_default()
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        let error = error.into();
        Failure {
            errno: error.errno(),
            kind: Some(error.kind()),
            offset: error.offset(),
            path: c_string(error.path().map_or(&[][..], |path| path.as_os_str().as_bytes())),
            text: c_string(error.to_string()),
        }
    }
}

thread_local!(static LAST: RefCell<Failure> = RefCell::default());

/// Looks at this thread's last failure.
pub(crate) fn last<T>(look: impl FnOnce(&Failure) -> T) -> Option<T> {
    LAST.try_with(|last| look(&last.borrow())).ok()
}

/// The text of the last failure; valid until this thread's next failure.
pub(crate) fn last_text() -> *const std::ffi::c_char {
    last(|failure| failure.text.as_ptr()).unwrap_or(const { c"".as_ptr() })
}

/// The failure of a system call of this crate; `what` is the call, or the argument that it was made with.
pub(crate) fn system(what: &str, error: std::io::Error) -> Failure {
    let number = error.raw_os_error().unwrap_or(libc::EIO);
    let kind = match number {
        libc::EINTR => ErrorKind::Interrupted,
        libc::EBADF | libc::EINVAL => ErrorKind::InvalidInput,
        _ => ErrorKind::LimitReached,
    };
    Failure::new(number, kind, format!("{what}: {error}"))
}

/// Runs the body of a function.
pub(crate) fn call(body: impl FnOnce() -> Result) -> c_int {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(failure)) => failure.keep(),
        Err(panic) => Failure::panicked(&*panic).keep(),
    }
}

/// Runs the body of a function that calls one of the program until that returns another value than 0,
/// which is then what the function returns.
pub(crate) fn visit(body: impl FnOnce(&mut c_int) -> Result) -> c_int {
    let mut ended = 0;
    let result = call(|| body(&mut ended));
    if result == 0 { ended } else { result }
}

/// Runs the body of a function that cannot fail.
pub(crate) fn always<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        Failure::panicked(&*panic).keep();
        otherwise
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn text() -> String {
        // SAFETY: this thread's last text, which no call replaces meanwhile.
        unsafe { CStr::from_ptr(last_text()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn no_panic_crosses() {
        assert_eq!(call(|| panic!("page {}", 7)), -libc::ENOTRECOVERABLE);
        assert_eq!(text(), "a defect of the library: page 7");
        assert_eq!(always(3, || panic!("no")), 3);
    }

    #[test]
    fn each_thread_has_its_last_failure() {
        assert_eq!(call(|| Err(Failure::invalid("here"))), -libc::EINVAL);
        std::thread::spawn(|| assert_eq!(text(), "")).join().unwrap();
        assert_eq!(call(|| Ok(())), 0);
        assert_eq!(text(), "here", "success does not clear it");
    }

    #[test]
    fn texts_end_at_a_zero_byte() {
        assert_eq!(c_string(*b"ab\0c").as_c_str(), c"ab");
    }
}
