//! Creating and opening pools.

use std::fs::{File, Metadata};
use std::path::Path;
use std::sync::Arc;

use uuid::Uuid;

use super::{Pool, Shared};
use crate::background::Worker;
use crate::broker::{self, AccessKey, Granted};
use crate::create::lock_to_format;
use crate::error::Result;
use crate::media::{self, Media};
use crate::options::PoolOptions;
use crate::point;
use crate::recovery::{self, Opened};

impl Pool {
    /// Options to create or open a pool with. As [`std::fs::File::options`].
    pub fn options() -> PoolOptions {
        PoolOptions::default()
    }

    /// Creates a pool in a new file of `len_bytes`, all of it allocated, and opens it:
    /// [`PoolOptions::create`] with the default options.
    ///
    /// # Errors
    /// As for [`PoolOptions::create`].
    pub fn create(path: impl AsRef<Path>, len_bytes: u64) -> Result<Pool> {
        Self::options().create(path, len_bytes)
    }

    /// Opens the pool in a file or device, for reading and writing: [`PoolOptions::open`] with the
    /// default options.
    ///
    /// # Errors
    /// As for [`PoolOptions::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Pool> {
        Self::options().open(path)
    }

    /// Opens the same pool once more, for writing: for a process that has opened it for reading,
    /// and may not open it for writing itself. This handle keeps reading.
    ///
    /// # Errors
    /// As for [`PoolOptions::open_granted`].
    pub fn grant_access(&self, key: &AccessKey, options: &PoolOptions) -> Result<Pool> {
        let media = self.media();
        let metadata = (media.file().try_clone_to_owned().map(File::from))
            .and_then(|file| file.metadata())
            .map_err(|source| media::OpenError::of(media.path(), source))?;
        options.ask_for_access(media.path(), &metadata, Some(self.uuid()), key)
    }

    fn start(opened: Opened, options: &PoolOptions) -> Result<Pool> {
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

impl PoolOptions {
    /// Creates a pool in a new file of `len_bytes`, all of it allocated, or on a device, and opens
    /// it.
    ///
    /// A new file appears at its path only when the pool in it is complete: if the process is
    /// killed before that, no file is left. (If the file system does not support unnamed files, a
    /// file `.aquifer-….new` is left beside it.)
    ///
    /// # Errors
    /// [`PoolError::NotOpened`](crate::PoolError::NotOpened) if the file exists and may not be
    /// [overwritten](PoolOptions::overwrite), if another process uses it, or if there is no room;
    /// [`PoolError::Media`](crate::PoolError::Media),
    /// [`PoolError::Parameter`](crate::PoolError::Parameter).
    pub fn create(&self, path: impl AsRef<Path>, len_bytes: u64) -> Result<Pool> {
        self.create_with_progress(path, len_bytes, &mut |_, _| {})
    }

    /// As [`PoolOptions::create`]; `progress` is called from time to time with the number of bytes
    /// allocated and zeroed so far, and the total.
    ///
    /// # Errors
    /// As for [`PoolOptions::create`].
    pub fn create_with_progress(
        &self,
        path: impl AsRef<Path>,
        len_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Pool> {
        // Checked before a file is created.
        self.layout(len_bytes)?;
        let mut prepared = self.to_create_media().prepare(path.as_ref(), len_bytes, progress)?;
        self.make(prepared.media.clone(), || Ok(prepared.name()?))
    }

    /// Creates a pool on media that are not open elsewhere, and opens it. The previous content of
    /// the media is lost. Domain and write windows are those of the media.
    ///
    /// # Errors
    /// As for [`PoolOptions::create`]; [`PoolError::Busy`](crate::PoolError::Busy) if another
    /// opener has them open or creates a pool on them,
    /// [`PoolError::MediaInUse`](crate::PoolError::MediaInUse) if it does so through the same open
    /// file description.
    pub fn create_on(&self, media: Arc<dyn Media>) -> Result<Pool> {
        self.make(media, || Ok(()))
    }

    fn make(&self, media: Arc<dyn Media>, name: impl FnOnce() -> Result<()>) -> Result<Pool> {
        self.layout(media.len_bytes())?;
        let alone = lock_to_format(&*media, self)?;
        self.format_alone(&media)?;
        point::pass("create-formatted");
        name()?;
        point::pass("create-named");
        if self.read_only {
            drop(alone)
        } else {
            // Keeps the lock, so that no other opener can get in between.
            alone.hand_over()
        }
        self.open_on(media)
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
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Pool> {
        self.open_on(self.to_open_media().open(path.as_ref())?)
    }

    /// Opens the pool on media, which serve one open pool at a time: its locks belong to their open
    /// file description. Domain and write windows are those of the media.
    ///
    /// # Errors
    /// As for [`PoolOptions::open`]; [`PoolError::MediaInUse`](crate::PoolError::MediaInUse) if a
    /// pool is open on these media, or on others with the same open file description.
    pub fn open_on(&self, media: Arc<dyn Media>) -> Result<Pool> {
        Pool::start(recovery::open(media, self, None)?, self)
    }

    /// Opens a pool for writing that this process may not open itself: the pool's broker passes the
    /// required descriptors to a process that has the key. It is closed as any other; the broker
    /// may have ended before that.
    ///
    /// The broker must belong to the pool's owner, or to root: the key is sent to no other.
    ///
    /// # Errors
    /// [`PoolError::Access`](crate::PoolError::Access); those of [`PoolOptions::open`].
    pub fn open_granted(&self, path: impl AsRef<Path>, key: &AccessKey) -> Result<Pool> {
        let metadata = std::fs::metadata(path.as_ref());
        let metadata = metadata.map_err(|source| media::OpenError::of(path.as_ref(), source))?;
        self.ask_for_access(path.as_ref(), &metadata, None, key)
    }

    fn ask_for_access(
        &self,
        path: &Path,
        metadata: &Metadata,
        uuid: Option<Uuid>,
        key: &AccessKey,
    ) -> Result<Pool> {
        let options = self.clone().read_only(false).exclusive(false);
        let Granted { file, shared } = broker::ask(path, metadata, uuid, key, &options)?;
        let media = options.to_open_media().open_file(file.into(), path)?;
        Pool::start(recovery::open(media, &options, Some(shared))?, &options)
    }
}
