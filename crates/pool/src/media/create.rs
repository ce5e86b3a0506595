//! Creates media: a new file, or an existing file or device whose bytes become zero.
//!
//! Every byte is allocated and written once before media are handed out, so that no later write
//! needs a change of the file system's metadata and none fails for want of disk space.
//!
//! A new file appears at its path when that is done; if a pool is created in it, when it holds the
//! pool. So no process finds a partial file there, even if the creating process is killed. A device
//! or an existing file that is overwritten is locked during that time against processes that open
//! it as a pool; if the creating process is killed, what remains is not a pool.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use aquifer_sys::high_fd::HeldFile;
use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_sys::open_file::mark;
use aquifer_sys::{file_system, io as file_io};

use super::new_file::NewFile;
use super::open::{Kind, OpenError, OpenOptions, kind_of, len_bytes, refused};
use super::{Media, PersistenceDomain, WriteWindows};
use crate::media::lock_file::LockFile;

/// How to make media.
///
/// ```
/// use aquifer_pool::media::{CreateOptions, Media};
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data");
/// let media = CreateOptions::new().create(&path, 1 << 20, &mut |done_bytes, all_bytes| {
///     eprintln!("{done_bytes} of {all_bytes}");
/// })?;
/// assert_eq!(media.len_bytes(), 1 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct CreateOptions {
    overwrite: bool,
    mode: u32,
    domain: Option<PersistenceDomain>,
    windows: WriteWindows,
}

impl Default for CreateOptions {
    fn default() -> CreateOptions {
        CreateOptions { overwrite: false, mode: 0o600, domain: None, windows: WriteWindows::None }
    }
}

impl CreateOptions {
    /// Options for a new file that only its owner may open.
    pub fn new() -> CreateOptions {
        CreateOptions::default()
    }

    /// Whether an existing file that is not empty is overwritten. Off by default.
    pub fn overwrite(mut self, overwrite: bool) -> CreateOptions {
        self.overwrite = overwrite;
        self
    }

    /// The permissions of a new file, minus the process's umask. 0o600 by default.
    pub fn mode(mut self, mode: u32) -> CreateOptions {
        self.mode = mode;
        self
    }

    /// Forces a domain, for tests and measurements. See the module's documentation.
    pub fn domain(mut self, domain: PersistenceDomain) -> CreateOptions {
        self.domain = Some(domain);
        self
    }

    /// How the media are guarded against stray stores of this process, as for
    /// [`OpenOptions::write_windows`].
    pub fn write_windows(mut self, windows: WriteWindows) -> CreateOptions {
        self.windows = windows;
        self
    }

    /// Creates media of `len_bytes` at a path that is free, or names an empty file or a device. On
    /// return every byte is zero, allocated and durable, and so is the name. Calls `progress`
    /// repeatedly with the number of finished bytes and the total. If a device is longer, its first
    /// `len_bytes` are zeroed and all of it becomes the media. A new file appears at the path when
    /// all of that is done.
    ///
    /// # Errors
    /// All of [`OpenError`]; then nothing new is at the path, but overwritten content is lost.
    pub fn create(
        &self,
        path: impl AsRef<Path>,
        len_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Arc<dyn Media>, OpenError> {
        self.prepare(path.as_ref(), len_bytes, progress)?.publish()
    }

    /// Creates media that no other process can reach or lock before they are
    /// [published](Prepared::publish).
    pub(crate) fn prepare(
        &self,
        path: &Path,
        len_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Prepared, OpenError> {
        if len_bytes == 0 {
            return Err(bad_length(path, len_bytes, "media have at least one byte".into()));
        }
        let (file, locks, kind, new) = match std::fs::metadata(path) {
            Ok(metadata) => {
                let kind = kind_of(&metadata, path)?;
                self.check_overwrite(&metadata, path, kind)?;
                let (file, locks) = self.claim(path, kind)?;
                (file, Some(locks), kind, None)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // A dangling symbolic link: a file created for it would not be found at its own
                // path.
                if path.is_symlink() {
                    return Err(OpenError::Exists { path: path.to_path_buf() });
                }
                let new = NewFile::make(path, self.mode)
                    .map_err(|source| refused(path, true, "make", source))?;
                let file = new.file().try_clone();
                let file = file.map_err(|source| refused(path, true, "make", source))?;
                mark(file.as_fd());
                (file, None, Kind::File, Some(new))
            }
            Err(error) => return Err(refused(path, true, "open", error)),
        };
        let media = self.fill(file, path, len_bytes, kind, progress)?;
        Ok(Prepared { media, locks, new })
    }

    /// Refuses to overwrite a file with content unless that was requested.
    fn check_overwrite(
        &self,
        metadata: &Metadata,
        path: &Path,
        kind: Kind,
    ) -> Result<(), OpenError> {
        if kind == Kind::File && metadata.len() > 0 && !self.overwrite {
            Err(OpenError::Exists { path: path.to_path_buf() })
        } else {
            Ok(())
        }
    }

    /// Opens an existing file or device that is not in use, and locks all of it.
    fn claim(&self, path: &Path, kind: Kind) -> Result<(File, LockFile), OpenError> {
        let in_use = || OpenError::InUse { path: path.to_path_buf() };
        let open = |flags| File::options().read(true).write(true).custom_flags(flags).open(path);
        if kind == Kind::BlockDevice {
            // The kernel refuses this while the device is mounted or part of another device.
            open(libc::O_EXCL).map_err(|source| match source.raw_os_error() {
                Some(libc::EBUSY) => in_use(),
                _ => refused(path, true, "open", source),
            })?;
        }
        let file = open(0).map_err(|source| refused(path, true, "open", source))?;
        mark(file.as_fd());
        let failed = |source| refused(path, true, "lock", source);
        let duplicate = file.try_clone().and_then(|file| HeldFile::new(file.into()));
        let locks = LockFile::open_or_share(&Arc::new(duplicate.map_err(failed)?), true);
        let locked = lock::try_lock(locks.as_fd(), LockRange::WHOLE, LockKind::Exclusive);
        if !locked.map_err(failed)? {
            return Err(in_use());
        }
        if kind == Kind::File {
            // Checked again under the lock: no other process can be creating it now.
            let metadata =
                file.metadata().map_err(|source| refused(path, true, "inspect", source))?;
            self.check_overwrite(&metadata, path, kind)?;
            file.set_len(0).map_err(|source| refused(path, true, "empty", source))?;
        }
        Ok((file, locks))
    }

    /// Allocates and zeroes an empty file or a device.
    fn fill(
        &self,
        file: File,
        path: &Path,
        len_bytes: u64,
        kind: Kind,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Arc<dyn Media>, OpenError> {
        let failed = |source: io::Error| match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::ENOMEM) => {
                OpenError::NoSpace { path: path.to_path_buf(), len_bytes, source }
            }
            Some(libc::EFBIG) => {
                bad_length(path, len_bytes, "it is more than a file can have there".into())
            }
            _ => refused(path, true, "allocate", source),
        };
        self.check_length(&file, path, len_bytes, kind)?;
        if kind == Kind::File {
            match file_io::allocate(file.as_fd(), 0, len_bytes) {
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    file.set_len(len_bytes).map_err(failed)?;
                }
                allocated => allocated.map_err(failed)?,
            }
        }
        let options = OpenOptions::made(self.domain, self.windows);
        let sync = file.try_clone().map_err(failed)?;
        let form = options.adopt(file, path.to_path_buf(), kind)?;
        form.write_zeros(len_bytes, progress).map_err(failed)?;
        if kind != Kind::DaxDevice {
            sync.sync_all().map_err(failed)?;
        }
        // The sync takes long, too: the last chance for the caller to cancel.
        progress(len_bytes, len_bytes);
        Ok(form.into_media())
    }

    fn check_length(
        &self,
        file: &File,
        path: &Path,
        wanted_bytes: u64,
        kind: Kind,
    ) -> Result<(), OpenError> {
        let failed = |source| refused(path, true, "inspect", source);
        if kind != Kind::File {
            let metadata = file.metadata().map_err(failed)?;
            let device_bytes = len_bytes(file, &metadata, kind).map_err(failed)?;
            if wanted_bytes > device_bytes {
                let reason = format!("the device has {device_bytes}");
                return Err(bad_length(path, wanted_bytes, reason));
            }
        } else if file_system::magic(file.as_fd()).map_err(failed)? == file_system::HUGETLBFS {
            let unit_bytes = file_system::block_bytes(file.as_fd()).map_err(failed)?;
            if !wanted_bytes.is_multiple_of(unit_bytes) {
                let reason = format!("there it must be a multiple of {unit_bytes}");
                return Err(bad_length(path, wanted_bytes, reason));
            }
        }
        Ok(())
    }
}

/// Media that are complete and not handed out yet.
pub(crate) struct Prepared {
    /// A new file has no name yet. An overwritten file or device is locked as a whole.
    pub(crate) media: Arc<dyn Media>,
    pub(crate) locks: Option<LockFile>,
    new: Option<NewFile>,
}

impl Prepared {
    /// Puts a new file at its path, durably, and releases the lock of an overwritten one.
    ///
    /// # Errors
    /// [`OpenError::Exists`] if another process has created a file there first.
    pub(crate) fn publish(mut self) -> Result<Arc<dyn Media>, OpenError> {
        self.name()?;
        if let Some(locks) = self.locks {
            let unlocked = lock::unlock(locks.as_fd(), LockRange::WHOLE);
            unlocked.map_err(|source| refused(self.media.path(), true, "unlock", source))?;
        }
        Ok(self.media)
    }

    /// Puts a new file at its path; the caller holds its own locks.
    pub(crate) fn name(&mut self) -> Result<(), OpenError> {
        let named = self.new.take().map_or(Ok(()), NewFile::publish);
        named.map_err(|source| refused(self.media.path(), true, "give a name to", source))
    }
}

fn bad_length(path: &Path, len_bytes: u64, reason: String) -> OpenError {
    OpenError::BadLength { path: path.to_path_buf(), len_bytes, reason }
}

/// Creates media with the detected or a forced domain: a short form of [`CreateOptions`].
///
/// # Errors
/// As for [`CreateOptions::create`].
pub fn create(
    path: &Path,
    len_bytes: u64,
    forced: Option<PersistenceDomain>,
) -> Result<Arc<dyn Media>, OpenError> {
    let options = CreateOptions { domain: forced, ..CreateOptions::new() };
    options.create(path, len_bytes, &mut |_, _| {})
}
