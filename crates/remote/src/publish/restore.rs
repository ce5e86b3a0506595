//! Restoring a snapshot to a file.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_pool::internals::Presence;
use aquifer_pool::media::{self, OpenError};
use aquifer_pool::{Pool, PoolError};
use aquifer_sys::{file_name, io as file_io, random};

use super::depot::{Depot, Kind, log_name, name_of};
use super::layout::{Body, PAGE_BYTES, Reference, Snapshot, TABLE_CHUNKS, decode_chunk};
use super::paced::Paced;
use super::{MOST_MEMORY_BYTES, Progress, PublishError};
use crate::runtime::aside;

/// How to restore a pool.
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct RestoreOptions {
    snapshot: Option<u64>,
    overwrite: bool,
    mode: Option<u32>,
}

impl RestoreOptions {
    /// Which snapshot; by default the newest.
    pub fn snapshot(mut self, snapshot: u64) -> Self {
        self.snapshot = Some(snapshot);
        self
    }

    /// Whether a file at the path is replaced. Off by default. A pool that is open for writing is not replaced, and
    /// processes that open it for writing meanwhile get [`PoolError::Busy`].
    pub fn overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// The permissions of the file, minus the process's umask. 0o600 by default.
    pub fn mode(mut self, mode: u32) -> Self {
        self.mode = Some(mode);
        self
    }
}

/// What restoring has done.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Restored {
    /// The snapshot's number.
    pub snapshot: u64,
    /// The uuid of its pool.
    pub uuid: uuid::Uuid,
    /// The length of the pool.
    pub pool_bytes: u64,
    /// Bytes that were written; the rest are holes.
    pub written_bytes: u64,
    /// Bytes of the objects that were received.
    pub received_bytes: u64,
}

impl Depot {
    /// Restores a snapshot to a new file.
    pub async fn restore(
        &self,
        path: &Path,
        options: &RestoreOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Restored, PublishError> {
        self.check_there()?;
        check_place(path, options.overwrite)?;
        let _kept_out = if options.overwrite { keep_out(path)? } else { None };
        let (position, snapshot) = self.chosen(options.snapshot).await?;
        let failed = |action| move |source| file_error(action, path, source);
        let new = NewFile::make(path, options.mode.unwrap_or(0o600)).map_err(failed("create"))?;
        new.file.set_len(snapshot.state.len_bytes).map_err(failed("set the length of"))?;
        let received_bytes = self.receive((position, &snapshot), &new, path, progress).await?;
        new.file.sync_all().map_err(failed("sync"))?;
        new.check(path, &snapshot)?;
        // Another file may have come there meanwhile.
        check_place(path, options.overwrite)?;
        new.publish(path, options.overwrite).map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => PublishError::Exists { path: path.to_owned() },
            _ => file_error("name", path, source),
        })?;
        match file_io::sync_directory(directory_of(path)) {
            // File systems without storage have nothing to sync.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {
            }
            synced => synced.map_err(failed("make durable the name of the restored pool"))?,
        }
        Ok(Restored {
            snapshot: position,
            uuid: snapshot.state.uuid,
            pool_bytes: snapshot.state.len_bytes,
            written_bytes: snapshot.pages * PAGE_BYTES,
            received_bytes,
        })
    }

    /// Finds a snapshot, or the newest one.
    async fn chosen(&self, wanted: Option<u64>) -> Result<(u64, Snapshot), PublishError> {
        let none = || PublishError::NoSnapshot { url: self.shown.clone(), wanted };
        let position = match wanted {
            // Without the rest of the log, which an HTTP server does not list, and which may be damaged.
            Some(wanted) => wanted,
            None => self.view().await?.live.last().copied().ok_or_else(none)?,
        };
        match self.entry(position).await?.ok_or_else(none)?.body {
            Body::Snapshot(snapshot) => Ok((position, snapshot)),
            Body::Collection(_) => Err(none()),
        }
    }

    /// Writes all chunks to the file. Returns the bytes received.
    async fn receive(
        &self,
        (position, snapshot): (u64, &Snapshot),
        new: &NewFile,
        path: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<u64, PublishError> {
        let (mut received, mut done) = (0, 0);
        let all = snapshot.pages.saturating_mul(PAGE_BYTES);
        progress(Progress::Bytes { done, all });
        let in_memory = MOST_MEMORY_BYTES / (2 * u64::from(snapshot.chunk_bytes));
        let at_once = (in_memory as usize).clamp(1, self.in_flight);
        let mut paced = Paced::new(at_once, self.timeout);
        for (index, table) in snapshot.tables.iter().enumerate() {
            if table.is_none() {
                continue;
            }
            let chunks = self.table(snapshot, index).await?;
            let first = index as u64 * u64::from(TABLE_CHUNKS);
            let writing = (first..).zip(chunks).filter(|(_, chunk)| !chunk.is_none());
            let receive = |(chunk, of)| self.receive_chunk(snapshot, chunk, of, &new.file, path);
            let is_done = |(object_bytes, written_bytes): (u64, u64)| {
                received += object_bytes;
                done += written_bytes;
                progress(Progress::Bytes { done, all });
            };
            paced.each(writing, receive, is_done).await?;
        }
        if done != all {
            let wrong =
                super::layout::Wrong::Damaged("its number of pages is not that of its chunks");
            return Err(self.wrong(&log_name(position), wrong));
        }
        Ok(received)
    }

    async fn receive_chunk(
        &self,
        snapshot: &Snapshot,
        chunk: u64,
        of: Reference,
        file: &Arc<File>,
        path: &Path,
    ) -> Result<(u64, u64), PublishError> {
        let object = self.fetch(Kind::Chunk, &of).await?;
        let offset_bytes = chunk * u64::from(snapshot.chunk_bytes);
        let len_bytes = (snapshot.state.len_bytes - offset_bytes).min(snapshot.chunk_bytes.into());
        let (file, path) = (file.clone(), path.to_owned());
        let object_bytes = object.len() as u64;
        let written = aside(move || {
            let mut written_bytes = 0;
            for (at, piece) in decode_chunk(&object, len_bytes).map_err(Ok)? {
                file_io::write_all_at(file.as_fd(), piece, offset_bytes + at)
                    .map_err(|source| Err(file_error("write", &path, source)))?;
                written_bytes += piece.len() as u64;
            }
            Ok::<u64, Result<_, PublishError>>(written_bytes)
        });
        match written.await {
            Ok(written_bytes) => Ok((object_bytes, written_bytes)),
            Err(Ok(wrong)) => Err(self.wrong(&name_of(Kind::Chunk, &of.hash, of.epoch), wrong)),
            Err(Err(error)) => Err(error),
        }
    }
}

fn file_error(action: &'static str, path: &Path, source: io::Error) -> PublishError {
    PublishError::File { action, path: path.to_owned(), source }
}

/// Refuses a path that is taken, before anything is received.
fn check_place(path: &Path, overwrite: bool) -> Result<(), PublishError> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(file_error("inspect", path, source)),
        Ok(_) if !overwrite => Err(PublishError::Exists { path: path.to_owned() }),
        Ok(found) if !found.is_file() => Err(file_error(
            "replace",
            path,
            io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is no regular file; choose another path",
            ),
        )),
        Ok(_) => check_unused(path),
    }
}

/// Opens a pool that is to be replaced for reading, which keeps out processes that would write to it. `None` if there is
/// no pool that could be opened.
fn keep_out(path: &Path) -> Result<Option<Pool>, PublishError> {
    match Pool::options().read_only(true).open(path) {
        Ok(pool) => check_unused(path).map(|()| Some(pool)),
        Err(error) if has_no_pool(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether no process can have a pool there open that this program could harm: there is none, or none that can be read. Other
/// failures may pass, and tell nothing of the pool.
fn has_no_pool(error: &PoolError) -> bool {
    matches!(
        error,
        PoolError::NotOpened(OpenError::Missing { .. } | OpenError::Empty { .. })
            | PoolError::NotAPool { .. }
            | PoolError::FutureVersion { .. }
            | PoolError::LaterFeatures { .. }
            | PoolError::Truncated { .. }
            | PoolError::Damaged { .. }
            | PoolError::Structure(_)
            | PoolError::DamagedLog { .. }
    )
}

/// Refuses to replace a pool that processes have open.
fn check_unused(path: &Path) -> Result<(), PublishError> {
    match media::open(path, false, None) {
        Ok(there) if Presence::of(&*there).is_in_use() => {
            Err(PoolError::Busy { path: path.to_owned() }.into())
        }
        Ok(_) | Err(OpenError::Empty { .. }) => Ok(()),
        Err(error) => Err(PoolError::from(error).into()),
    }
}

/// A file that appears at its path when it is complete.
struct NewFile {
    file: Arc<File>,
    /// Its temporary path, if it has one. A killed process leaves the file there.
    meanwhile: Option<PathBuf>,
}

impl NewFile {
    fn make(path: &Path, mode: u32) -> io::Result<NewFile> {
        let (file, meanwhile) = match file_name::unnamed(directory_of(path), mode) {
            Ok(file) => (file, None),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                let meanwhile = temporary(path)?;
                let mut options = File::options();
                let options = options.read(true).write(true).create_new(true).mode(mode);
                (options.open(&meanwhile)?, Some(meanwhile))
            }
            Err(error) => return Err(error),
        };
        Ok(NewFile { file: Arc::new(file), meanwhile })
    }

    /// Opens the pool in the file for reading: what was published is one.
    fn check(&self, path: &Path, snapshot: &Snapshot) -> Result<(), PublishError> {
        let copy = self.file.try_clone().map_err(|source| file_error("open", path, source))?;
        let media = media::OpenOptions::new().open_file(copy, path).map_err(PoolError::from)?;
        let pool = Pool::options().read_only(true).open_on(media)?;
        if pool.uuid() != snapshot.state.uuid {
            return Err(PublishError::Damaged {
                object: path.display().to_string(),
                reason: "it is another pool than its snapshot says",
            });
        }
        Ok(())
    }

    /// Puts the file at its path.
    fn publish(mut self, path: &Path, overwrite: bool) -> io::Result<()> {
        match (self.meanwhile.take(), overwrite) {
            (None, false) => file_name::link(self.file.as_fd(), path)?,
            (Some(meanwhile), false) => {
                self.meanwhile = Some(meanwhile);
                file_name::rename_new(self.meanwhile.as_ref().expect("just put"), path)?;
                self.meanwhile = None;
            }
            (meanwhile, true) => {
                let meanwhile = match meanwhile {
                    Some(meanwhile) => meanwhile,
                    None => {
                        let meanwhile = temporary(path)?;
                        file_name::link(self.file.as_fd(), &meanwhile)?;
                        meanwhile
                    }
                };
                self.meanwhile = Some(meanwhile);
                std::fs::rename(self.meanwhile.as_ref().expect("just put"), path)?;
                self.meanwhile = None;
            }
        }
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(meanwhile) = &self.meanwhile {
            let _ = std::fs::remove_file(meanwhile);
        }
    }
}

fn temporary(path: &Path) -> io::Result<PathBuf> {
    let name = format!(".aquifer-{:016x}.new", random::next_u64()?);
    Ok(directory_of(path).join(name))
}

fn directory_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_that_may_pass_is_not_taken_for_the_lack_of_a_pool() {
        let path = || PathBuf::from("/data/pool");
        let system = || io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
        for error in [
            PoolError::Mutex(system()),
            PoolError::Open { path: path(), reason: "refused".into(), source: Some(system()) },
            PoolError::NotOpened(OpenError::NoPermission { path: path(), writable: false }),
            PoolError::Busy { path: path() },
            PoolError::BusyElsewhere { path: path(), reason: "another container".into() },
            PoolError::UnknownSegment { path: path(), uid: 1000 },
            PoolError::Forked,
        ] {
            assert!(!has_no_pool(&error), "{error}");
        }
        let empty = PoolError::NotOpened(OpenError::Empty { path: path() });
        assert!(has_no_pool(&empty) && has_no_pool(&PoolError::NotAPool { path: path() }));
    }
}
