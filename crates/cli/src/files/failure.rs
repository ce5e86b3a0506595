//! Errors of file operations, with the file and advice.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Error, Result};
use aquifer::{FsError, PoolError};

use super::Place;
use crate::output;
#[cfg(feature = "remote")]
use crate::remote::StoreFailure;

/// A failed operation on a file of a pool.
#[derive(Debug, thiserror::Error)]
#[error("{shown}: {reason}{advice}")]
pub struct Failure {
    shown: String,
    reason: String,
    advice: String,
    is_final: bool,
}

impl Failure {
    /// The failure at a place. If the error names another path of the pool, that path is shown.
    pub fn at(place: &Place, error: &FsError) -> Failure {
        let named = error.path().filter(|path| path.is_absolute());
        let text = error.to_string();
        // The path is printed in front, escaped.
        let reason = error
            .path()
            .and_then(|path| text.strip_prefix(&format!("{}: ", path.display())))
            .unwrap_or(&text)
            .to_owned();
        let place = named.map_or(place.clone(), |path| place.with_path(path));
        let advice = advice(&place, error);
        Failure { shown: place.show(), reason, advice, is_final: is_final(error) }
    }
}

fn advice(place: &Place, error: &FsError) -> String {
    match error {
        FsError::NotFound { .. } => {
            let parent = place.path().parent().unwrap_or(Path::new("/"));
            format!("; see `aquifer ls {}`", place.with_path(parent).show())
        }
        FsError::NotEmpty { .. } => "; `aquifer rm -r` removes it with its content".to_owned(),
        _ => String::new(),
    }
}

/// Whether operations on other files would fail too.
fn is_final(error: &FsError) -> bool {
    match error {
        FsError::Pool(PoolError::Parameter { .. } | PoolError::Locked { .. }) => false,
        FsError::Pool(_) => true,
        _ => false,
    }
}

/// Adds the place to the error of a result.
pub trait At<T> {
    /// Converts to an error of the command.
    fn at(self, place: &Place) -> Result<T>;
}

impl<T> At<T> for aquifer::fs::Result<T> {
    fn at(self, place: &Place) -> Result<T> {
        self.map_err(|error| Failure::at(place, &error).into())
    }
}

impl<T> At<T> for std::io::Result<T> {
    /// For an error that went through `std::io`.
    fn at(self, place: &Place) -> Result<T> {
        self.map_err(|error| match error.downcast::<FsError>() {
            Ok(error) => Failure::at(place, &error).into(),
            Err(error) => Error::new(error).context(place.show()),
        })
    }
}

/// Whether operations on other files would fail too: no space, no write permission, failed media.
pub fn ends_everything(error: &Error) -> bool {
    if let Some(failure) = error.downcast_ref::<Failure>() {
        return failure.is_final;
    }
    #[cfg(feature = "remote")]
    if let Some(failure) = error.downcast_ref::<StoreFailure>() {
        return failure.is_final();
    }
    let io = error.chain().find_map(|cause| cause.downcast_ref::<std::io::Error>());
    let number = io.and_then(std::io::Error::raw_os_error);
    let is_final = |number| {
        matches!(number, libc::ENOSPC | libc::EDQUOT | libc::EROFS | libc::EIO | libc::EPIPE)
    };
    number.is_some_and(is_final) || error.is::<aquifer_sys::interrupt::Interrupted>()
}

/// The failures so far of several independent operations.
#[derive(Debug, Default)]
pub struct Failures {
    count: u64,
}

impl Failures {
    /// Prints a failure, and returns it instead if the command must stop.
    ///
    /// # Errors
    /// The failure that stops the command.
    pub fn note(&mut self, outcome: Result<()>) -> Result<()> {
        match outcome {
            Err(error) if ends_everything(&error) || output::is_closed_pipe(&error) => Err(error),
            Err(error) => {
                self.count += 1;
                output::print_error(&error);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// The number of failures.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Fails if there was a failure, which has already been printed.
    pub fn end(self) -> Result<()> {
        match self.count {
            0 => Ok(()),
            _ => Err(output::Said.into()),
        }
    }
}

/// A path of the file system, escaped for a terminal.
pub fn shown(path: impl AsRef<OsStr>) -> String {
    output::escaped(path.as_ref().as_bytes())
}
