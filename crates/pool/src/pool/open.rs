//! Creating and opening pools.

use std::fs::{File, Metadata};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use aquifer_sys::open_file::mark;
use uuid::Uuid;

use super::{Pool, Shared};
use crate::broker::{self, AccessKey, Broker, Granted};
use crate::error::Result;
use crate::media::lock_file::LockFile;
use crate::media::{self, Media};
use crate::open::create::lock_to_format;
use crate::open::recovery::{self, Opened};
use crate::open::workers;
use crate::options::PoolOptions;
use crate::point;

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

    /// Opens files for another process, with which that opens the pool for writing by
    /// [`PoolOptions::open_passed`]: the pool's file, as an open file description of its own, and the
    /// shared memory. It needs no path then, so it does not matter what has become of those of the pool.
    /// Which processes get them is up to the caller: such a process is a writer.
    ///
    /// # Errors
    /// [`PoolError::NotOpened`](crate::PoolError::NotOpened) if this process may not open the file any more;
    /// [`PoolError::ReadOnly`](crate::PoolError::ReadOnly);
    /// [`PoolError::Parameter`](crate::PoolError::Parameter) for an exclusive handle.
    pub fn files_to_pass(&self) -> Result<[OwnedFd; 3]> {
        broker::files_to_pass(self.core())
    }

    fn start(opened: Opened, options: &PoolOptions) -> Result<Pool> {
        aquifer_sys::event!(
            info,
            pool = %opened.core.handle.media.path().display(),
            writable = opened.core.handle.members.is_writable,
            recovered_records = opened.recovered_records,
            "pool opened"
        );
        workers::prepare(&opened.core, options);
        Ok(Pool {
            shared: Arc::new(Shared {
                core: opened.core,
                overlay: opened.overlay,
                recovered_records: opened.recovered_records,
            }),
        })
    }
}

impl Broker {
    /// Listens for processes that want to write to `pool`, which is open for writing and shared. A
    /// process that may read its shared memory ([`PoolOptions::segment_mode`]) may connect. Of the
    /// options, only [`PoolOptions::broker_socket`] is used.
    ///
    /// # Errors
    /// [`AccessError::BrokerRuns`](crate::AccessError::BrokerRuns), [`AccessError::SocketTaken`](crate::AccessError::SocketTaken), [`AccessError::System`](crate::AccessError::System);
    /// [`PoolError::ReadOnly`](crate::PoolError::ReadOnly) if the pool was opened for reading, [`PoolError::Parameter`](crate::PoolError::Parameter) if it
    /// is not shared.
    pub fn bind(pool: &Pool, key: &AccessKey, options: &PoolOptions) -> Result<Broker> {
        Broker::bind_to(pool.core().clone(), pool.shared.clone(), key, options)
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
        let locks = prepared.locks.take();
        self.make(prepared.media.clone(), locks, || Ok(prepared.name()?))
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
        self.make(media, None, || Ok(()))
    }

    fn make(
        &self,
        media: Arc<dyn Media>,
        locks: Option<LockFile>,
        name: impl FnOnce() -> Result<()>,
    ) -> Result<Pool> {
        self.layout(media.len_bytes())?;
        let alone = lock_to_format(&*media, self, locks)?;
        self.format_alone(&media)?;
        point::pass("create-formatted");
        name()?;
        point::pass("create-named");
        // A writer keeps the locks, so that no other opener can get in between.
        let members = if self.read_only {
            drop(alone);
            None
        } else {
            alone.hand_over()
        };
        Pool::start(recovery::open(media, self, None, members)?, self)
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

    /// Opens the pool on media, which serve one open pool at a time. Its locks have an open file
    /// description of their own, or that of the media where this process may not open the file again.
    /// Domain and write windows are those of the media.
    ///
    /// # Errors
    /// As for [`PoolOptions::open`]; [`PoolError::MediaInUse`](crate::PoolError::MediaInUse) if a
    /// pool is open on these media, or on others with the same open file description.
    pub fn open_on(&self, media: Arc<dyn Media>) -> Result<Pool> {
        Pool::start(recovery::open(media, self, None, None)?, self)
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
        options.open_shared(file, shared, path)
    }

    /// Opens a pool for writing by files that another process has
    /// [opened for this one](Pool::files_to_pass), and that has it open still. `path` is for messages.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let first = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// use aquifer_pool::Pool;
    ///
    /// let passed = first.files_to_pass()?; // through a socket to another process, usually
    /// std::fs::remove_file(&path)?;
    /// let second = Pool::options().open_passed(passed, &path)?;
    /// assert_eq!(second.uuid(), first.uuid());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`PoolError::Access`](crate::PoolError::Access) if that process has closed the pool;
    /// those of [`PoolOptions::open`].
    pub fn open_passed(&self, files: [OwnedFd; 3], path: impl AsRef<Path>) -> Result<Pool> {
        let [file, segment, pins] = files;
        let shared = recovery::Shared { segment_id: None, segment, pins };
        self.clone().read_only(false).exclusive(false).open_shared(file, shared, path.as_ref())
    }

    /// With a file that was opened for this process alone.
    fn open_shared(&self, file: OwnedFd, shared: recovery::Shared, path: &Path) -> Result<Pool> {
        mark(file.as_fd());
        let media = self.to_open_media().open_file(file.into(), path)?;
        Pool::start(recovery::open(media, self, Some(shared), None)?, self)
    }
}
