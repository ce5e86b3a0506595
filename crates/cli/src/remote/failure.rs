//! Failures of object stores.

use std::sync::Arc;

use anyhow::Error;
use aquifer::remote::RemoteError;
use aquifer_sys::interrupt::Interrupted;

/// A failure of a store.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StoreFailure(Arc<RemoteError>);

impl StoreFailure {
    /// Whether operations on other objects would fail too.
    pub fn is_final(&self) -> bool {
        match *self.0 {
            RemoteError::NoBucket { .. }
            | RemoteError::InvalidOption { .. }
            | RemoteError::TimedOut { .. }
            | RemoteError::Stopped { .. }
            | RemoteError::System { .. } => true,
            RemoteError::Unavailable { status, .. } => status.is_none_or(|status| status >= 500),
            _ => false,
        }
    }
}

/// The error of the command.
pub fn failed(error: impl Into<Arc<RemoteError>>) -> Error {
    let error = error.into();
    match *error {
        RemoteError::Cancelled { .. } => Interrupted.into(),
        _ => StoreFailure(error).into(),
    }
}
