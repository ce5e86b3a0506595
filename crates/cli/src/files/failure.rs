//! What failed with which file, and what to do about it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Error, Result};
use aquifer::{FsError, PoolError};

use super::Place;
use crate::output;

/// An operation on a file of a pool that failed.
#[derive(Debug, thiserror::Error)]
#[error("{shown}: {reason}{advice}")]
pub struct Failure {
    shown: String,
    reason: String,
    advice: String,
    is_final: bool,
}

impl Failure {
    /// What failed there. If the error is about another path of the pool, that one is named.
    pub fn at(place: &Place, error: &FsError) -> Failure {
        let named = error.path().filter(|path| path.is_absolute());
        let text = error.to_string();
        // The path is said in front, escaped.
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
        FsError::NotEmpty { .. } => "; `aquifer rm -r` removes it with what is in it".to_owned(),
        _ => String::new(),
    }
}

/// Whether there is no use in going on with other files.
fn is_final(error: &FsError) -> bool {
    match error {
        FsError::Pool(PoolError::Parameter { .. } | PoolError::Locked { .. }) => false,
        FsError::Pool(_) => true,
        _ => false,
    }
}

/// Says of a result where it comes from.
pub trait At<T> {
    /// As an error of the command.
    fn at(self, place: &Place) -> Result<T>;
}

impl<T> At<T> for aquifer::fs::Result<T> {
    fn at(self, place: &Place) -> Result<T> {
        self.map_err(|error| Failure::at(place, &error).into())
    }
}

impl<T> At<T> for std::io::Result<T> {
    /// Of an error that went through `std::io`.
    fn at(self, place: &Place) -> Result<T> {
        self.map_err(|error| match error.downcast::<FsError>() {
            Ok(error) => Failure::at(place, &error).into(),
            Err(error) => Error::new(error).context(place.show()),
        })
    }
}

/// Whether there is no use in going on with other files: no room, no right to write, broken media.
pub fn ends_everything(error: &Error) -> bool {
    if let Some(failure) = error.downcast_ref::<Failure>() {
        return failure.is_final;
    }
    let io = error.chain().find_map(|cause| cause.downcast_ref::<std::io::Error>());
    let number = io.and_then(std::io::Error::raw_os_error);
    let is_final = |number| {
        matches!(number, libc::ENOSPC | libc::EDQUOT | libc::EROFS | libc::EIO | libc::EPIPE)
    };
    number.is_some_and(is_final) || error.is::<aquifer_host::interrupt::Interrupted>()
}

/// What failed so far of several things that are done one after the other.
#[derive(Debug, Default)]
pub struct Failures {
    count: u64,
}

impl Failures {
    /// Says what failed, unless nothing else is to be tried.
    ///
    /// # Errors
    /// What ends everything.
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

    /// How many.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// An error if there was one. It has been said.
    pub fn end(self) -> Result<()> {
        match self.count {
            0 => Ok(()),
            _ => Err(output::Said.into()),
        }
    }
}

/// A path of the file system, for a terminal.
pub fn shown(path: impl AsRef<OsStr>) -> String {
    output::escaped(path.as_ref().as_bytes())
}
