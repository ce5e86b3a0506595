//! The objects below a prefix: requests with a timeout and typed errors.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use object_store::client::HttpErrorKind;
use object_store::path::Path;
use object_store::{Error, GetOptions, ObjectMeta, ObjectStore, PutMode, PutOptions, PutPayload};

use super::PublishError;
use super::layout::{Hash, Reference, Wrong, hash};
use crate::connection::{Connector, NOTES, Seen, install_crypto};
use crate::fetch::{TOO_LONG, http_kind, is_lost, is_too_long};
use crate::location::{Location, Scheme};
use crate::runtime::aside;
use crate::store::{FirstListed, LISTED_AGAIN, noted};
use crate::{RemoteError, RemoteOptions};

/// The kinds of objects that are named by their hash, and their folders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Chunk,
    Table,
}

impl Kind {
    pub const ALL: [Kind; 2] = [Kind::Chunk, Kind::Table];

    pub fn folder(self) -> &'static str {
        match self {
            Kind::Chunk => "chunks",
            Kind::Table => "tables",
        }
    }
}

const LOG: &str = "log";
/// Objects by which publishers find out whether the store heeds conditions.
pub(super) const PROBES: &str = "probes";

/// The name of an object that is named by its hash.
pub(super) fn name_of(kind: Kind, hash: &Hash, epoch: u64) -> String {
    use std::fmt::Write as _;
    let mut hex = String::with_capacity(64);
    for byte in hash {
        let _ = write!(hex, "{byte:02x}");
    }
    format!("{}/{}/{hex}-{epoch}", kind.folder(), &hex[..2])
}

/// Hash and epoch in such a name, without its folders; `None` for any other name.
fn parse_name(name: &str) -> Option<(Hash, u64)> {
    let (hex, epoch) = name.split_once('-')?;
    let is_plain = |text: &str, is: fn(&u8) -> bool| text.bytes().all(|byte| is(&byte));
    let is_hex = hex.len() == 64 && is_plain(hex, |b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if !is_hex || epoch.is_empty() || !is_plain(epoch, u8::is_ascii_digit) {
        return None;
    }
    let mut hash = Hash::default();
    for (byte, pair) in hash.iter_mut().zip(hex.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some((hash, epoch.parse().ok()?))
}

/// The name of an entry of the log. Names in order are entries in order.
pub(super) fn log_name(position: u64) -> String {
    format!("{LOG}/{position:020}")
}

/// An object in a listing.
pub(super) struct Listed {
    /// Without the prefix.
    pub name: String,
    pub len_bytes: u64,
    /// By the store's clock, in seconds.
    pub modified: i64,
}

/// The objects below a prefix.
pub(super) struct Depot {
    store: Arc<dyn ObjectStore>,
    root: Path,
    /// The prefix, for messages.
    pub shown: String,
    pub is_http: bool,
    /// Of a `file://` URL.
    directory: Option<PathBuf>,
    /// None without a runtime.
    pub timeout: Option<Duration>,
    pub in_flight: usize,
}

impl Depot {
    pub fn open(url: &str, options: &RemoteOptions) -> Result<Depot, RemoteError> {
        install_crypto();
        let location = Location::parse_prefix(url)?;
        Ok(Depot {
            store: location.store(options, Connector::default())?,
            shown: location.shown.trim_end_matches('/').to_owned(),
            is_http: location.scheme == Scheme::Http,
            directory: (location.scheme == Scheme::File)
                .then(|| PathBuf::from(format!("/{}", location.path))),
            root: location.path,
            timeout: Some(options.timeout),
            in_flight: options.in_flight,
        })
    }

    #[cfg(test)]
    pub fn of(store: Arc<dyn ObjectStore>) -> Depot {
        let shown = "memory:".to_owned();
        let (root, is_http, directory) = (Path::from("pool"), false, None);
        Depot { store, root, shown, is_http, directory, timeout: None, in_flight: 1 }
    }

    /// Refuses a directory that is not there. Publishing makes one.
    pub fn check_there(&self) -> Result<(), PublishError> {
        match &self.directory {
            Some(directory) if !directory.is_dir() => Err(PublishError::Unsuitable {
                url: self.shown.clone(),
                reason: "there is no such directory; check the path",
            }),
            _ => Ok(()),
        }
    }

    fn path(&self, name: &str) -> Path {
        self.root.parts().chain(Path::from(name).parts()).collect()
    }

    /// The URL of an object, for messages.
    pub fn url(&self, name: &str) -> String {
        format!("{}/{name}", self.shown)
    }

    pub fn wrong(&self, name: &str, wrong: Wrong) -> PublishError {
        let object = self.url(name);
        match wrong {
            Wrong::Damaged(reason) => PublishError::Damaged { object, reason },
            Wrong::Later(what) => PublishError::Later { object, what },
        }
    }

    /// Makes durable what other publishers have put into a directory: one that was killed may not have got to it.
    pub async fn sync_others(&self) -> Result<(), PublishError> {
        let Some(directory) = self.directory.clone() else { return Ok(()) };
        let synced = aside(move || {
            let opened = std::fs::File::open(&directory);
            let synced = opened.and_then(|opened| Ok(rustix::fs::syncfs(opened)?));
            synced.map_err(|source| PublishError::File { action: "sync", path: directory, source })
        });
        synced.await
    }

    /// Gets an object of at most `most_bytes`; `None` if there is none.
    pub async fn get(&self, name: &str, most_bytes: u64) -> Result<Option<Bytes>, PublishError> {
        let path = self.path(name);
        let request = async {
            let mut options = GetOptions::default();
            options.extensions.insert(NOTES.get());
            let answer = self.store.get_opts(&path, options).await?;
            if answer.meta.size > most_bytes {
                return Ok(None);
            }
            // Grows with what arrives, whatever length the server has promised.
            let (mut pieces, mut len) = (Vec::new(), 0);
            let mut body = answer.into_stream();
            while let Some(piece) = body.try_next().await? {
                len += piece.len() as u64;
                if len > most_bytes {
                    return Ok(None);
                }
                pieces.push(piece);
            }
            Ok(Some(if let [one] = &*pieces { one.clone() } else { pieces.concat().into() }))
        };
        match noted(self.timeout, request).await {
            Ok(Some(bytes)) => Ok(Some(bytes)),
            Ok(None) => Err(self.wrong(name, Wrong::Damaged("it is too long"))),
            Err((Some(Error::NotFound { .. }), _)) => Ok(None),
            Err(failure) => Err(self.failed("get", name, failure)),
        }
    }

    /// Gets an object that is named by its hash, and compares that.
    pub async fn fetch(&self, kind: Kind, of: &Reference) -> Result<Bytes, PublishError> {
        let name = name_of(kind, &of.hash, of.epoch);
        let bytes = self.get(&name, u64::from(of.len_bytes)).await?;
        let bytes = bytes.ok_or_else(|| PublishError::Missing { object: self.url(&name) })?;
        let wrong = |reason| Err(self.wrong(&name, Wrong::Damaged(reason)));
        if bytes.len() as u64 != u64::from(of.len_bytes) {
            return wrong("it is too short");
        }
        if hash(&bytes) != of.hash {
            return wrong("its content does not match its hash");
        }
        Ok(bytes)
    }

    /// Puts an object, in the place of one of the same name and so of the same bytes.
    pub async fn put(&self, name: &str, bytes: Bytes) -> Result<(), PublishError> {
        self.put_with(name, bytes, PutMode::Overwrite).await.map(drop)
    }

    /// Creates an object; false if there is one.
    pub async fn create(&self, name: &str, bytes: Bytes) -> Result<bool, PublishError> {
        self.put_with(name, bytes, PutMode::Create).await
    }

    async fn put_with(
        &self,
        name: &str,
        bytes: Bytes,
        mode: PutMode,
    ) -> Result<bool, PublishError> {
        let options = PutOptions { mode, ..PutOptions::default() };
        let path = self.path(name);
        let request = self.store.put_opts(&path, PutPayload::from_bytes(bytes), options);
        match noted(self.timeout, request).await {
            Ok(_) => Ok(true),
            Err((Some(Error::AlreadyExists { .. } | Error::Precondition { .. }), _)) => Ok(false),
            Err(failure) => Err(self.failed("put", name, failure)),
        }
    }

    /// Deletes objects, those that are not there as well. Returns how many.
    pub async fn delete(&self, names: Vec<String>) -> Result<u64, PublishError> {
        let count = names.len() as u64;
        let paths: Vec<_> = names.iter().map(|name| Ok(self.path(name))).collect();
        let mut deleted = self.store.delete_stream(futures_util::stream::iter(paths).boxed());
        loop {
            match noted(self.timeout, async { deleted.next().await.transpose() }).await {
                Ok(Some(_)) | Err((Some(Error::NotFound { .. }), _)) => {}
                Ok(None) => return Ok(count),
                Err(failure) => return Err(self.failed("delete objects of", "", failure)),
            }
        }
    }

    /// Passes all objects of a folder to a closure, in any order.
    pub async fn list(
        &self,
        folder: &str,
        mut each: impl FnMut(Listed),
    ) -> Result<(), PublishError> {
        let root = self.path(folder);
        let (mut listing, mut first) = (self.store.list(Some(&root)), FirstListed::default());
        loop {
            match noted(self.timeout, async { listing.try_next().await }).await {
                Ok(Some(ObjectMeta { location, .. })) if first.comes_again(&location) => {
                    return Err(PublishError::Store {
                        object: self.url(folder),
                        action: "list",
                        reason: LISTED_AGAIN,
                        status: None,
                    });
                }
                Ok(Some(ObjectMeta { location, last_modified, size: len_bytes, .. })) => {
                    let Some(parts) = location.prefix_match(&root) else { continue };
                    let parts: Vec<String> = parts.map(|part| part.as_ref().to_owned()).collect();
                    let (name, modified) = (parts.join("/"), last_modified.timestamp());
                    each(Listed { name, len_bytes, modified });
                }
                Ok(None) => return Ok(()),
                // Of a directory that is not there yet.
                Err((Some(Error::NotFound { .. }), Seen { status: None, .. })) => return Ok(()),
                Err(_) if self.is_http => {
                    return Err(PublishError::Unsuitable {
                        url: self.shown.clone(),
                        reason: "the server lists no objects; name the snapshot to restore (--snapshot)",
                    });
                }
                Err(failure) => return Err(self.failed("list", folder, failure)),
            }
        }
    }

    /// Passes hash, epoch and length of all objects of a kind to a closure, in any order, perhaps more than once.
    pub async fn objects(
        &self,
        kind: Kind,
        mut each: impl FnMut(Hash, u64, u64),
    ) -> Result<(), PublishError> {
        self.list(kind.folder(), |listed| {
            let last = listed.name.rsplit('/').next().and_then(parse_name);
            let Some((hash, epoch)) = last else { return };
            let name = name_of(kind, &hash, epoch);
            if name.strip_prefix(kind.folder()) == Some(&*format!("/{}", listed.name)) {
                each(hash, epoch, listed.len_bytes);
            }
        })
        .await
    }

    /// The highest position of the log, and the time at which each was written; none if it is empty.
    pub async fn positions(&self) -> Result<Vec<(u64, i64)>, PublishError> {
        let mut positions = Vec::new();
        self.list(LOG, |Listed { name, modified, .. }| {
            let is_number = name.len() == 20 && name.bytes().all(|byte| byte.is_ascii_digit());
            if let (true, Ok(position)) = (is_number, name.parse()) {
                positions.push((position, modified));
            }
        })
        .await?;
        positions.sort_unstable();
        Ok(positions)
    }

    /// Names a failure.
    fn failed(
        &self,
        action: &'static str,
        name: &str,
        (error, seen): (Option<Error>, Seen),
    ) -> PublishError {
        let kind = error.as_ref().and_then(http_kind).or(seen.failure);
        let reason = match (&error, kind, seen.status) {
            (Some(error), ..) if is_too_long(error) => TOO_LONG,
            (Some(error), Some(HttpErrorKind::Timeout), _) if is_lost(error) => {
                "the connection broke off"
            }
            (None, ..) | (_, Some(HttpErrorKind::Timeout), _) => {
                "no complete answer within the timeout; raise it, or try again"
            }
            // Of listings and deletions the library tells only that they failed.
            (Some(Error::NotFound { .. }), ..) | (_, None, Some(404)) => {
                "there is no such bucket; check its name, the endpoint and the region"
            }
            (Some(Error::PermissionDenied { .. } | Error::Unauthenticated { .. }), ..)
            | (_, None, Some(401 | 403)) => {
                "permission denied; check the credentials in the environment and the permissions of the bucket"
            }
            (Some(Error::NotSupported { .. } | Error::NotImplemented { .. }), ..) => {
                "the store does not support it"
            }
            (_, Some(HttpErrorKind::Connect), _) => "no connection to the server",
            (_, Some(_), _) => "the connection broke off",
            (_, None, Some(300..400)) => "the server redirects; check endpoint and region",
            (_, None, Some(400..500)) => "the server refused the request",
            (_, None, Some(_)) => "the server failed, or its answer is malformed",
            (_, None, None) if self.shown.starts_with("file:") => {
                "the system refused it; check the directory, its permissions and free space"
            }
            (_, None, None) => "it failed; check endpoint, bucket and credentials",
        };
        let object = if name.is_empty() { self.shown.clone() } else { self.url(name) };
        PublishError::Store { object, action, reason, status: seen.status }
    }
}
