//! Errors of publishing and restoring, without secrets: of URLs without queries, names of objects, and fixed words.

use std::io;
use std::path::PathBuf;

use aquifer_pool::PoolError;

use super::Published;
use crate::RemoteError;

/// An error of publishing, restoring or listing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The URL or an option is wrong.
    #[error(transparent)]
    Url(#[from] RemoteError),
    /// The URL is of a kind that publishing or listing cannot use.
    #[error("{url}: {reason}")]
    Unsuitable {
        /// The URL.
        url: String,
        /// The problem, and a remedy.
        reason: &'static str,
    },
    /// A request failed, also in its retries.
    #[error("cannot {action} {object}: {reason}{}", status.map_or_else(String::new, |status| format!(" (HTTP status {status})")))]
    Store {
        /// The object's URL.
        object: String,
        /// What was attempted.
        action: &'static str,
        /// The failure, and a remedy.
        reason: &'static str,
        /// The HTTP status of the last answer, if there was one.
        status: Option<u16>,
    },
    /// An object's bytes are not those that were published.
    #[error("{object} is damaged or was tampered with: {reason}; {}", remedy(object))]
    Damaged {
        /// The object's URL.
        object: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// An object of a later program.
    #[error("{object} was published by a later program ({what}); use that one")]
    Later {
        /// The object's URL.
        object: String,
        /// What this program does not know.
        what: &'static str,
    },
    /// An object that a snapshot needs is not there.
    #[error(
        "{object} is missing: it was deleted, or its snapshot was removed meanwhile; {}",
        remedy(object)
    )]
    Missing {
        /// The object's URL.
        object: String,
    },
    /// There is no such snapshot.
    #[error("{url}: {}; `aquifer pool snapshots` lists them", match wanted {
        Some(number) => format!("there is no snapshot {number}"),
        None => "there are no snapshots".to_owned(),
    })]
    NoSnapshot {
        /// The URL.
        url: String,
        /// The one asked for; `None` if there are none at all.
        wanted: Option<u64>,
    },
    /// The snapshots at the URL are of another pool.
    #[error(
        "{url} has snapshots of another pool ({found}); this one is {pool}; publish it to another prefix"
    )]
    OtherPool {
        /// The URL.
        url: String,
        /// The uuid of the pool whose snapshots are there.
        found: String,
        /// The uuid of the pool to publish.
        pool: String,
    },
    /// The store overwrites objects that it was asked only to create.
    #[error(
        "{url}: the server ignores conditions (If-None-Match), so two publishers could overwrite each other's snapshots; \
         publish to a server that heeds them"
    )]
    Unconditional {
        /// The URL.
        url: String,
    },
    /// Other publishers changed the log again and again.
    #[error("{url}: other publishers were faster {attempts} times; publish again")]
    Contended {
        /// The URL.
        url: String,
        /// How often this one tried.
        attempts: usize,
    },
    /// The pool was published, but older snapshots were not removed.
    #[error("published as snapshot {}, but older ones were not removed: {source}", published.snapshot)]
    NotCollected {
        /// The new snapshot.
        published: Published,
        /// What failed then.
        source: Box<PublishError>,
    },
    /// Processes use the pool, and may write to it.
    #[error(
        "{} is in use{}; close it there, or have publishing wait for it (--freeze)",
        path.display(), process_text(processes)
    )]
    InUse {
        /// The pool.
        path: PathBuf,
        /// The processes that are known, as numbered in their own PID namespaces.
        processes: Vec<u32>,
    },
    /// The pool was not closed cleanly, and could not be recovered.
    #[error(
        "{} was not closed cleanly, and has to be recovered first, by opening it for writing once: {source}",
        path.display()
    )]
    Unrecovered {
        /// The pool.
        path: PathBuf,
        /// Why it could not be opened for writing.
        source: PoolError,
    },
    /// The pool was recovered, and each time it was not closed cleanly again.
    #[error(
        "{} was recovered {times} times, and each time it was not closed cleanly again: processes that write to it are \
         killed; publish it when they have ended", path.display()
    )]
    RecoveredInVain {
        /// The pool.
        path: PathBuf,
        /// How often.
        times: usize,
    },
    /// The pool's metadata is damaged.
    #[error("{} is damaged ({structure}); run `aquifer pool check` on it", path.display())]
    DamagedPool {
        /// The pool.
        path: PathBuf,
        /// Where.
        structure: String,
    },
    /// The pool's error.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A parameter is out of range.
    #[error("{what} is {value}: {reason}")]
    Parameter {
        /// The parameter.
        what: &'static str,
        /// Its value.
        value: String,
        /// What is possible.
        reason: &'static str,
    },
    /// There is a file at the path to restore to.
    #[error("{}: File exists; restore to another path, or replace it with --force", path.display())]
    Exists {
        /// The path.
        path: PathBuf,
    },
    /// The system returned an error for a local file.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// What was attempted.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// What to do about an object that is damaged or missing. Without an entry of the log, later ones have no place; all
/// other objects are replaced under new names.
fn remedy(object: &str) -> &'static str {
    let folder = object.rsplit('/').nth(1);
    match folder {
        Some("log") => {
            "restore another snapshot by its number (--snapshot), and publish to another prefix"
        }
        _ => "restore another snapshot, or publish again with --reread, which sends everything",
    }
}

fn process_text(processes: &[u32]) -> String {
    match processes {
        [] => String::new(),
        [one] => format!(" by process {one}"),
        many => {
            let list: Vec<String> = many.iter().map(u32::to_string).collect();
            format!(" by processes {}", list.join(", "))
        }
    }
}
