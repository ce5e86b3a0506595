//! Errors, without secrets: they are made of URLs without their queries, of numbers, and of fixed
//! words, never of a server's text or an error message of the HTTP libraries, which may contain
//! signed URLs.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use aquifer_device::{DeviceError, IoOperation};

/// An error of a remote device or a store. URLs in it have no query; a range is of the bytes requested or sent, and empty
/// for what concerns no bytes, such as a listing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// The URL does not name an object.
    #[error("{url}: {reason}")]
    InvalidUrl {
        /// The URL, as far as it can be shown.
        url: String,
        /// The problem, and a remedy.
        reason: &'static str,
    },
    /// An option that the URL's kind of store does not take, or not with this value.
    #[error("{url}: option `{option}`: {reason}")]
    InvalidOption {
        /// The URL.
        url: String,
        /// The option's name.
        option: String,
        /// The problem, and a remedy.
        reason: &'static str,
    },
    /// The server sends no strong ETag, so a change of the object could go unnoticed.
    #[error(
        "{url}: the server sends no strong ETag, so bytes of two versions could be mixed unnoticed; if the \
         object never changes, open it with `unversioned`"
    )]
    Unversioned {
        /// The URL.
        url: String,
    },
    /// The object is not the one that was opened. Final for the device: open the object again.
    #[error("{url}{}: the object changed since it was opened ({what}); open it again", at(range))]
    Changed {
        /// The URL.
        url: String,
        /// The bytes requested.
        range: Range<u64>,
        /// What differs.
        what: &'static str,
    },
    /// There is no such object.
    #[error("{url}{}: there is no such object", at(range))]
    NotFound {
        /// The URL.
        url: String,
        /// The bytes requested.
        range: Range<u64>,
    },
    /// There is no such bucket, or the credentials may not see it.
    #[error(
        "{url}: there is no such bucket; check its name, the endpoint and the region, or create it"
    )]
    NoBucket {
        /// The URL.
        url: String,
    },
    /// There is an object of this name, and it was not to be replaced.
    #[error(
        "{url}: there is an object of this name, which stays as it is; choose another name, or allow replacing it"
    )]
    Exists {
        /// The URL.
        url: String,
    },
    /// The caller asked to stop; see [`RemoteOptions::cancelled_by`](crate::RemoteOptions::cancelled_by).
    #[error("{url}: cancelled")]
    Cancelled {
        /// The URL.
        url: String,
    },
    /// The server does not allow the credentials to read or write the object.
    #[error(
        "{url}{}: permission denied (HTTP status {status}); check the credentials in the environment and the \
         permissions of the object",
        at(range)
    )]
    Denied {
        /// The URL.
        url: String,
        /// The bytes requested.
        range: Range<u64>,
        /// 401 or 403.
        status: u16,
    },
    /// The provider of [`RemoteOptions::credentials`](crate::RemoteOptions::credentials) supplied none that the store takes; or
    /// there is no provider, and none were found.
    #[error("{url}{}: {reason}", at(range))]
    NoCredentials {
        /// The URL.
        url: String,
        /// The bytes requested.
        range: Range<u64>,
        /// The failure, without the provider's own words.
        reason: &'static str,
    },
    /// The server answered a request for a range with the whole object.
    #[error(
        "{url}{}: the server ignores ranges, and would send the whole object each time; download it and open the file",
        at(range)
    )]
    RangesIgnored {
        /// The URL.
        url: String,
        /// The bytes requested.
        range: Range<u64>,
    },
    /// The answer contradicts the request or itself; its bytes were discarded.
    #[error("{url}{}: the server's answer is wrong: {reason}", at(range))]
    BadAnswer {
        /// The URL.
        url: String,
        /// The bytes requested.
        range: Range<u64>,
        /// The contradiction.
        reason: &'static str,
    },
    /// The request and its retries did not end within the timeout.
    #[error(
        "{url}{}: no complete answer within {timeout:?}{}; raise the timeout, or try again", at(range),
        last_status(*status)
    )]
    TimedOut {
        /// The URL.
        url: String,
        /// The bytes requested.
        range: Range<u64>,
        /// The timeout of the device's options.
        timeout: Duration,
        /// The HTTP status of the last answer, if there was one.
        status: Option<u16>,
    },
    /// The server could not be reached, broke off, or refused, also in the retries.
    #[error("{url}{}: {reason}{}", at(range), last_status(*status))]
    Unavailable {
        /// The URL.
        url: String,
        /// The bytes requested.
        range: Range<u64>,
        /// The failure.
        reason: &'static str,
        /// The HTTP status of the last answer, if there was one.
        status: Option<u16>,
    },
    /// The device has no tier, or cannot write it.
    #[error("{url}: the tier cannot be used: {problem}")]
    Tier {
        /// The URL.
        url: String,
        /// The reason.
        problem: String,
    },
    /// The device's thread does not answer.
    #[error("{url}: the thread that makes requests does not answer; open the device again")]
    Stopped {
        /// The URL.
        url: String,
    },
    /// The system refused what the device needs: a thread, a descriptor.
    #[error("{url}: {what}: {source}")]
    System {
        /// The URL.
        url: String,
        /// What was attempted.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

fn at(range: &Range<u64>) -> String {
    if range.is_empty() {
        return String::new();
    }
    format!(": bytes {} to {}", range.start, range.end)
}

fn last_status(status: Option<u16>) -> String {
    status.map_or_else(String::new, |status| format!(" (last HTTP status {status})"))
}

impl RemoteError {
    /// Finds the remote device's error in another one: a [`DeviceError`], or one that has it among
    /// its causes, such as a cache's.
    pub fn find<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a RemoteError> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(found) = error.downcast_ref() {
                return Some(found);
            }
            if let Some(shared) = error.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>() {
                next = Some(&**shared);
                continue;
            }
            next = error.source();
        }
        None
    }

    /// The error of a read. Allocates nothing.
    pub(crate) fn of_read(self: Arc<Self>, offset_bytes: u64, len_bytes: usize) -> DeviceError {
        DeviceError::Other { operation: IoOperation::Read, offset_bytes, len_bytes, source: self }
    }
}
