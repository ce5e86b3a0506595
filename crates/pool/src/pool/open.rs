//! Creating and opening pools.

use std::fs::{File, Metadata};
use std::path::Path;
use std::sync::Arc;

use uuid::Uuid;

use super::{Pool, Shared};
use crate::background::Worker;
use crate::broker::{self, AccessKey, Granted};
use crate::create::{CreateOptions, lock_to_format};
use crate::error::Result;
use crate::media::{self, Media};
use crate::open_options::OpenOptions;
use crate::point;
use crate::recovery::{self, Opened};

impl Pool {
    /// Creates a pool in a new file of `len_bytes`, all of it allocated, and opens it.
    ///
    /// # Errors
    /// [`PoolError::NotOpened`](crate::PoolError::NotOpened) if the file exists or there is no
    /// room, [`PoolError::Media`](crate::PoolError::Media),
    /// [`PoolError::Parameter`](crate::PoolError::Parameter).
    pub fn create(
        path: impl AsRef<Path>,
        len_bytes: u64,
        options: &CreateOptions,
        open: &OpenOptions,
    ) -> Result<Pool> {
        let file = media::CreateOptions::new().write_windows(open.write_windows);
        let file = open.domain.into_iter().fold(file, media::CreateOptions::domain);
        Self::create_with(path, len_bytes, options, &file, open, &mut |_, _| {})
    }

    /// As [`Pool::create`], with control over how the file is created; also for a device.
    /// `progress` is called from time to time with the number of bytes allocated and zeroed so far,
    /// and the total.
    ///
    /// A new file appears at its path only when the pool in it is complete: if the process is
    /// killed before that, no file is left. (If the file system does not support unnamed files, a
    /// file `.aquifer-….new` is left beside it.)
    ///
    /// # Errors
    /// As for [`Pool::create`]; [`PoolError::NotOpened`](crate::PoolError::NotOpened) also if the
    /// target is in use by another process.
    pub fn create_with(
        path: impl AsRef<Path>,
        len_bytes: u64,
        options: &CreateOptions,
        file: &media::CreateOptions,
        open: &OpenOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Pool> {
        // Checked before a file is created.
        options.layout(len_bytes)?;
        let mut prepared = file.prepare(path.as_ref(), len_bytes, progress)?;
        Self::make(prepared.media.clone(), options, open, || Ok(prepared.name()?))
    }

    /// Creates a pool on media that are not open elsewhere, and opens it. The previous content of
    /// the media is lost.
    ///
    /// # Errors
    /// As for [`Pool::create`]; [`PoolError::Busy`](crate::PoolError::Busy) if another opener has
    /// them open or creates a pool on them, [`PoolError::MediaInUse`](crate::PoolError::MediaInUse)
    /// if it does so through the same open file description.
    pub fn create_on(
        media: Arc<dyn Media>,
        options: &CreateOptions,
        open: &OpenOptions,
    ) -> Result<Pool> {
        Self::make(media, options, open, || Ok(()))
    }

    fn make(
        media: Arc<dyn Media>,
        options: &CreateOptions,
        open: &OpenOptions,
        name: impl FnOnce() -> Result<()>,
    ) -> Result<Pool> {
        options.layout(media.len_bytes())?;
        let alone = lock_to_format(&*media, open)?;
        options.format_alone(&media)?;
        point::pass("create-formatted");
        name()?;
        point::pass("create-named");
        if open.read_only {
            drop(alone)
        } else {
            // Keeps the lock, so that no other opener can get in between.
            alone.hand_over()
        }
        Self::open_on(media, open)
    }

    /// Opens the pool in a file or device. The first opener recovers it.
    ///
    /// # Errors
    /// [`PoolError::NotAPool`](crate::PoolError::NotAPool),
    /// [`PoolError::Damaged`](crate::PoolError::Damaged),
    /// [`PoolError::Truncated`](crate::PoolError::Truncated),
    /// [`PoolError::FutureVersion`](crate::PoolError::FutureVersion),
    /// [`PoolError::ReadOnly`](crate::PoolError::ReadOnly),
    /// [`PoolError::Busy`](crate::PoolError::Busy),
    /// [`PoolError::BusyElsewhere`](crate::PoolError::BusyElsewhere).
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Pool> {
        Self::open_on(options.media().open(path.as_ref())?, options)
    }

    /// Opens the pool on media, which serve one open pool at a time: its locks belong to their open
    /// file description. Domain and write windows are those of the media.
    ///
    /// # Errors
    /// As for [`Pool::open`]; [`PoolError::MediaInUse`](crate::PoolError::MediaInUse) if a pool is
    /// open on these media, or on others with the same open file description.
    pub fn open_on(media: Arc<dyn Media>, options: &OpenOptions) -> Result<Pool> {
        Self::start(recovery::open(media, options, None)?, options)
    }

    /// Opens a pool for writing that this process may not open itself: the pool's broker passes the
    /// required descriptors to a process that has the key. It is closed as any other; the broker
    /// may have ended before that.
    ///
    /// The broker must belong to the pool's owner, or to root: the key is sent to no other.
    ///
    /// # Errors
    /// [`PoolError::Access`](crate::PoolError::Access); those of [`Pool::open`].
    pub fn open_granted(
        path: impl AsRef<Path>,
        key: &AccessKey,
        options: &OpenOptions,
    ) -> Result<Pool> {
        let metadata = std::fs::metadata(path.as_ref());
        let metadata = metadata.map_err(|source| media::OpenError::of(path.as_ref(), source))?;
        Self::ask_for_access(path.as_ref(), &metadata, None, key, options)
    }

    /// Opens the same pool once more, for writing: for a process that has opened it for reading,
    /// and may not open it for writing itself. This handle keeps reading.
    ///
    /// # Errors
    /// As for [`Pool::open_granted`].
    pub fn grant_access(&self, key: &AccessKey, options: &OpenOptions) -> Result<Pool> {
        let media = self.media();
        let metadata = (media.file().try_clone_to_owned().map(File::from))
            .and_then(|file| file.metadata())
            .map_err(|source| media::OpenError::of(media.path(), source))?;
        Self::ask_for_access(media.path(), &metadata, Some(self.uuid()), key, options)
    }

    fn ask_for_access(
        path: &Path,
        metadata: &Metadata,
        uuid: Option<Uuid>,
        key: &AccessKey,
        options: &OpenOptions,
    ) -> Result<Pool> {
        let options = OpenOptions { read_only: false, exclusive: false, ..options.clone() };
        let Granted { file, shared } = broker::ask(path, metadata, uuid, key, &options)?;
        let media = options.media().open_file(file.into(), path)?;
        Self::start(recovery::open(media, &options, Some(shared))?, &options)
    }

    fn start(opened: Opened, options: &OpenOptions) -> Result<Pool> {
        aquifer_sys::event!(
            info,
            pool = %opened.core.handle.media.path().display(),
            writable = opened.core.handle.members.is_writable,
            recovered_records = opened.recovered_records,
            "pool opened"
        );
        let has_workers = opened.core.handle.members.is_writable && options.background;
        let checkpointer = has_workers.then(|| Worker::checkpointer(&opened.core)).flatten();
        let zeroer = (has_workers && options.zero_bytes_per_second > 0)
            .then(|| Worker::zeroer(&opened.core, options))
            .flatten();
        let heartbeat = has_workers.then(|| Worker::heartbeat(&opened.core)).flatten();
        Ok(Pool {
            shared: Arc::new(Shared {
                core: opened.core,
                overlay: opened.overlay,
                recovered_records: opened.recovered_records,
                checkpointer,
                zeroer,
                heartbeat,
            }),
        })
    }
}
