//! A mount that this process serves.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_fs::Files;
use aquifer_sys::fuse::FuseDevice;
use aquifer_sys::mount::{self, MountPoint};
use aquifer_sys::resident::Resident;

use crate::device::Device;
use crate::error::MountError;
use crate::init::{self, Agreed};
use crate::options::MountOptions;
use crate::pool_fs::PoolFs;
use crate::team::{Counts, Handler, IN_BYTES, Team};

/// How far the kernel reads ahead: as much as one request transfers.
pub(crate) const READ_AHEAD_KIB: u32 = 1024;
/// How much of memory may be pages of the mount that are not written back yet, in percent. The
/// kernel's own choice for FUSE is 1.
pub(crate) const DIRTY_PERCENT: u32 = 40;

/// A file system that is served by threads of this process. Unmounted when dropped, even if in use;
/// the kernel then ends what uses it with an error.
///
/// The process must not end in any other way while programs work in the mount: they would get
/// `ENOTCONN`, and what the kernel has cached and not yet written would be lost. Its threads may use
/// the mount, but while a thread of it waits for the mount, the process cannot be stopped and
/// continued by a debugger.
///
/// Unless it is [shared](crate::Cache::Shared), the kernel caches the pool without end, so nothing else
/// may change it: neither another process, which
/// [`PoolOptions::sole`](aquifer_pool::PoolOptions::sole) sees to, nor this one, by the same or another
/// handle.
pub struct Mount {
    directory: PathBuf,
    /// The device number of the file system, major and minor.
    number: (u32, u32),
    team: Team,
    agreed: Agreed,
}

impl Mount {
    /// Mounts the files of a pool at a directory. Takes the right to mount, `/dev/fuse`, and unless it is
    /// shared, a pool that was opened as its sole writer.
    ///
    /// ```no_run
    /// use aquifer_fuse::{Mount, MountOptions};
    ///
    /// let pool = aquifer_pool::Pool::options().sole("mounted at /mnt; unmount it").open("data.pool")?;
    /// let files = aquifer_fs::Files::new(pool);
    /// let mount = Mount::in_process(files, "/mnt".as_ref(), &MountOptions::new())?;
    /// std::fs::write("/mnt/notes", "text")?; // from this process, or any other
    /// mount.unmount()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`MountError`].
    pub fn in_process(
        files: Files,
        directory: &Path,
        options: &MountOptions,
    ) -> Result<Mount, MountError> {
        if !options.is_shared() && files.pool().sole_nonce().is_none() {
            return Err(MountError::NotSole);
        }
        Mount::serve(directory, options, |agreed| {
            Ok(Arc::new(PoolFs::new(files, agreed, options.clone())?))
        })
    }

    /// Mounts any file system: `handler` makes it, of what kernel and server have agreed on.
    ///
    /// # Errors
    /// [`MountError`].
    pub fn serve(
        directory: &Path,
        options: &MountOptions,
        handler: impl FnOnce(Agreed) -> Result<Arc<dyn Handler>, MountError>,
    ) -> Result<Mount, MountError> {
        let refused = |source| MountError::Mount { path: directory.to_path_buf(), source };
        // The path may be relative, and the process's directory may change.
        let at = MountPoint::open(directory).map_err(refused)?;
        let directory = at.path().map_err(refused)?;
        let device = FuseDevice::open().map_err(MountError::Device)?;
        let mounted =
            options.fuse_mount(options.source.as_ref()).create(&device).map_err(refused)?;
        let device = Device::new(device);
        // From here on an error closes the device, which ends the connection.
        let mut buffer = Resident::new(IN_BYTES).map_err(MountError::Start)?;
        let agreed =
            init::negotiate(&device, &mut buffer, options).map_err(MountError::Protocol)?;
        drop(buffer);
        let number = mounted.device_number().map_err(refused)?;
        mount::set_write_back(number, READ_AHEAD_KIB, DIRTY_PERCENT);
        let handler = handler(agreed)?;
        let team = Team::start(device, handler).map_err(MountError::Start)?;
        // The last step, so that an error before leaves nothing. The descriptor of the root, which
        // goes here, is a use of the mount.
        mounted.attach(&at).map_err(refused)?;
        drop((mounted, at));
        Ok(Mount { directory, number, team, agreed })
    }

    /// What kernel and server have agreed on.
    pub fn agreed(&self) -> Agreed {
        self.agreed
    }

    /// How many requests there were.
    pub fn counts(&self) -> &Counts {
        self.team.counts()
    }

    /// The number of the connection, in `/sys/fs/fuse/connections`.
    pub fn connection(&self) -> u32 {
        self.number.1
    }

    /// Waits until something else unmounts it.
    pub fn wait(&self) {
        let _ = self.team.wait();
    }

    /// Unmounts it: all that was written is then in the pool.
    ///
    /// # Errors
    /// `EBUSY` while it is used. It is gone nevertheless, with an error for what uses it, once what
    /// was written is in the pool.
    pub fn unmount(self) -> io::Result<()> {
        self.end()
    }

    fn end(&self) -> io::Result<()> {
        // Not what was mounted over it since, or in its place, perhaps with its number.
        let is_there = !self.team.is_unmounted()
            && mount::device_number(&self.directory).is_ok_and(|it| it == self.number);
        let removed = if is_there { mount::remove(&self.directory, false) } else { Ok(()) };
        if removed.is_err() {
            let _ = mount::write_back(&self.directory);
            let _ = mount::end(&self.directory);
            let _ = mount::remove(&self.directory, true);
        } else if !is_there && !self.team.is_unmounted() {
            // It is used where nothing shows it any more.
            let _ = mount::abort(self.number.1);
        }
        let _ = self.team.wait();
        removed
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Does nothing if it was unmounted before.
        let _ = self.end();
    }
}
