//! Errors of Aquifer as exceptions: the one place where they are converted.
//!
//! The classes are written in Python (`aquifer/_errors.py`), because they derive from several exceptions of Python each.
//! A function of the native module returns [`Result`], and `?` turns any error of Aquifer, of the system or of Python into a
//! [`Failure`]; pyo3 turns that into the exception. A panic is a defect of the library; pyo3 raises it as `PanicException`.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use aquifer::remote::{RemoteError, TierError};
use aquifer::{Error, ErrorKind};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// What a function of the module returns.
pub(crate) type Result<T = ()> = std::result::Result<T, Failure>;

/// Why a function of the module fails.
pub(crate) enum Failure {
    /// Aquifer's own error.
    Aquifer(Box<Error>),
    /// The system's, of a call that the module makes itself.
    System(io::Error),
    /// An exception that is raised as it is.
    Raised(PyErr),
}

impl Failure {
    /// The kind of Aquifer's error, if it is one.
    pub fn kind(&self) -> Option<ErrorKind> {
        match self {
            Failure::Aquifer(error) => Some(error.kind()),
            _ => None,
        }
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Failure {
        Failure::Raised(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::System(error)
    }
}

macro_rules! from_aquifer {
    ($($error:ty),*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Failure {
                Failure::Aquifer(Box::new(error.into()))
            }
        })*
    };
}

from_aquifer!(
    Error,
    aquifer::CacheError,
    aquifer::DeviceError,
    aquifer::MapError,
    aquifer::PoolError,
    aquifer::ObjectError,
    aquifer::HeapError,
    aquifer::FsError,
    RemoteError
);

impl From<TierError> for Failure {
    fn from(error: TierError) -> Failure {
        let (class, errno, path) = match &error {
            TierError::NotPrivate { path, .. } => ("AccessDeniedError", libc::EACCES, Some(path)),
            TierError::Damaged { path, .. } => ("DamagedError", libc::EUCLEAN, Some(path)),
            TierError::System { path, source, .. } => {
                let errno = source.raw_os_error().unwrap_or(libc::EIO);
                (class_of_system(errno), errno, Some(path))
            }
            _ => ("AquiferError", libc::EIO, None),
        };
        let (text, path) = (error.to_string(), path.map(|path| path.as_os_str()));
        let made = Python::attach(|py| exception(py, class, errno, &text, path, None));
        Failure::Raised(made.unwrap_or_else(|failed| failed))
    }
}

/// The class for the system's error about a file of the library's own.
fn class_of_system(errno: i32) -> &'static str {
    match errno {
        libc::EACCES | libc::EPERM => "AccessDeniedError",
        libc::EROFS => "ReadOnlyError",
        libc::ENOENT => "NotFoundError",
        libc::ENOSPC | libc::EDQUOT => "NoSpaceError",
        _ => "AquiferError",
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> PyErr {
        match failure {
            Failure::Raised(error) => error,
            Failure::System(error) => match error.raw_os_error() {
                // With its number Python chooses the class.
                Some(number) => PyOSError::new_err((number, error.to_string())),
                None => error.into(),
            },
            Failure::Aquifer(error) => {
                Python::attach(|py| raised(py, &error).unwrap_or_else(|failed| failed))
            }
        }
    }
}

fn raised(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let remote = match error {
        Error::Remote(error) => Some(error),
        error => RemoteError::find(error),
    };
    let class = match remote {
        Some(RemoteError::Changed { .. }) => "ChangedError",
        _ => class_of(error.kind(), error.errno()),
    };
    let path = match remote {
        Some(remote) => url_of(remote).map(OsStr::new),
        None => error.path().map(Path::as_os_str),
    };
    exception(py, class, error.errno(), &error.to_string(), path, error.offset())
}

/// The URL that an error names, without what may be secret.
fn url_of(error: &RemoteError) -> Option<&str> {
    match error {
        RemoteError::InvalidUrl { url, .. }
        | RemoteError::InvalidOption { url, .. }
        | RemoteError::Unversioned { url }
        | RemoteError::Changed { url, .. }
        | RemoteError::NotFound { url, .. }
        | RemoteError::Denied { url, .. }
        | RemoteError::NoCredentials { url, .. }
        | RemoteError::RangesIgnored { url, .. }
        | RemoteError::BadAnswer { url, .. }
        | RemoteError::TimedOut { url, .. }
        | RemoteError::Unavailable { url, .. }
        | RemoteError::Tier { url, .. }
        | RemoteError::Stopped { url }
        | RemoteError::System { url, .. } => Some(url),
        _ => None,
    }
}

/// An exception of a class of `aquifer._errors`, with the attributes that all of them have.
pub(crate) fn exception(
    py: Python<'_>,
    class: &str,
    errno: i32,
    text: &str,
    path: Option<&OsStr>,
    offset: Option<u64>,
) -> PyResult<PyErr> {
    let class = py.import("aquifer._errors")?.getattr(class)?;
    let keywords = PyDict::new(py);
    // As `open` does: the text where it is text, whatever bytes the path has.
    let path = path.map(|path| {
        let bytes = pyo3::types::PyBytes::new(py, path.as_bytes());
        py.import("os")?.call_method1("fsdecode", (bytes,))
    });
    keywords.set_item("path", path.transpose()?)?;
    keywords.set_item("offset", offset)?;
    Ok(PyErr::from_value(class.call((errno, text), Some(&keywords))?))
}

/// The class for a kind, and for the errors that Python has classes of their own for.
fn class_of(kind: ErrorKind, errno: i32) -> &'static str {
    match kind {
        ErrorKind::InvalidInput if errno == libc::EISDIR => "IsDirectoryError",
        ErrorKind::InvalidInput if errno == libc::ENOTDIR => "NotDirectoryError",
        ErrorKind::NotFound => "NotFoundError",
        ErrorKind::AlreadyExists => "AlreadyExistsError",
        ErrorKind::PermissionDenied => "AccessDeniedError",
        ErrorKind::ReadOnly => "ReadOnlyError",
        ErrorKind::Busy => "BusyError",
        ErrorKind::TimedOut => "TimedOutError",
        ErrorKind::Interrupted => "InterruptedCallError",
        ErrorKind::InvalidInput => "InvalidInputError",
        ErrorKind::Unsupported => "UnsupportedError",
        ErrorKind::NoSpace => "NoSpaceError",
        ErrorKind::LimitReached => "LimitReachedError",
        ErrorKind::Truncated | ErrorKind::Io => "FaultError",
        ErrorKind::Damaged => "DamagedError",
        ErrorKind::NotDurable => "NotDurableError",
        ErrorKind::Forked => "ForkedError",
        _ => "AquiferError",
    }
}

/// For the tests of this conversion.
#[pyfunction]
fn _fail(py: Python<'_>, what: &str) -> Result {
    py.detach(|| match what {
        "missing" => Ok(aquifer::Pool::open("/no/such/pool").map(drop)?),
        "forked" => Err(aquifer::CacheError::Forked.into()),
        "system" => Err(io::Error::from_raw_os_error(libc::EMFILE).into()),
        what => panic!("asked to panic: {what}"),
    })
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(_fail, module)?)
}
