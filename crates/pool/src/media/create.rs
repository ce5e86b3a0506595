//! Making media: a file where there is none, or what a device holds made zero.
//!
//! Every byte is allocated and written once before media are handed out, so that no later write needs a change of
//! the file system's metadata and none finds the disk full.
//!
//! A new file is at its path when that is done, and when a pool is made in it, when it holds the pool: nobody ever finds
//! half of one there, also when its maker is killed. What is overwritten, a device or a file that is there already, is
//! locked meanwhile against all who open it as a pool; whoever is killed over it leaves something that is no pool.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_sys::{file_system, io as file_io};

use super::new_file::NewFile;
use super::open::{Kind, OpenError, OpenOptions, kind_of, len_bytes, refused};
use super::{Media, PersistenceDomain, WriteWindows};

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
    /// A new file that only its owner may open.
    pub fn new() -> CreateOptions {
        CreateOptions::default()
    }

    /// Whether a file that is there and not empty is overwritten. Off by default.
    pub fn overwrite(mut self, overwrite: bool) -> CreateOptions {
        self.overwrite = overwrite;
        self
    }

    /// Permissions of a new file, from which the process's mask is taken away. 0o600 by default.
    pub fn mode(mut self, mode: u32) -> CreateOptions {
        self.mode = mode;
        self
    }

    /// Forces a domain, for tests and measurements. See the module's documentation.
    pub fn domain(mut self, domain: PersistenceDomain) -> CreateOptions {
        self.domain = Some(domain);
        self
    }

    /// What guards it against stray stores of this process, as for [`OpenOptions::write_windows`].
    pub fn write_windows(mut self, windows: WriteWindows) -> CreateOptions {
        self.windows = windows;
        self
    }

    /// Makes media of `len_bytes` at a path where there is nothing, an empty file, or a device. On return every
    /// byte is zero, allocated and durable, and so is the name. `progress` is told now and then how many bytes
    /// of how many are done. Of a device that is longer, the first `len_bytes` are zeroed and all are media.
    /// A new file lies at the path when all of that is done.
    ///
    /// # Errors
    /// All of [`OpenError`], and then nothing new is at the path; what was overwritten is lost.
    pub fn create(
        &self,
        path: impl AsRef<Path>,
        len_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Arc<dyn Media>, OpenError> {
        self.prepare(path.as_ref(), len_bytes, progress)?.publish()
    }

    /// Makes media that nobody else can reach or lock before they are [published](Prepared::publish).
    pub(crate) fn prepare(
        &self,
        path: &Path,
        len_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Prepared, OpenError> {
        if len_bytes == 0 {
            return Err(bad_length(path, len_bytes, "media have at least one byte".into()));
        }
        let (file, kind, new) = match std::fs::metadata(path) {
            Ok(metadata) => {
                let kind = kind_of(&metadata, path)?;
                self.check_overwrite(&metadata, path, kind)?;
                (self.claim(path, kind)?, kind, None)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // A link to nothing: a file made for it would not be found at its own path.
                if path.is_symlink() {
                    return Err(OpenError::Exists { path: path.to_path_buf() });
                }
                let new = NewFile::make(path, self.mode)
                    .map_err(|source| refused(path, true, "make", source))?;
                let file = new.file().try_clone();
                let file = file.map_err(|source| refused(path, true, "make", source))?;
                (file, Kind::File, Some(new))
            }
            Err(error) => return Err(refused(path, true, "open", error)),
        };
        let media = self.fill(file, path, len_bytes, kind, progress)?;
        Ok(Prepared { media, new })
    }

    /// A file that holds something is overwritten only when that was said.
    fn check_overwrite(
        &self,
        metadata: &Metadata,
        path: &Path,
        kind: Kind,
    ) -> Result<(), OpenError> {
        match kind == Kind::File && metadata.len() > 0 && !self.overwrite {
            true => Err(OpenError::Exists { path: path.to_path_buf() }),
            false => Ok(()),
        }
    }

    /// Opens what is there, if nobody uses it, and locks all of it.
    fn claim(&self, path: &Path, kind: Kind) -> Result<File, OpenError> {
        let in_use = || OpenError::InUse { path: path.to_path_buf() };
        let open = |flags| File::options().read(true).write(true).custom_flags(flags).open(path);
        if kind == Kind::BlockDevice {
            // Refused while it is mounted or part of another device.
            open(libc::O_EXCL).map_err(|source| match source.raw_os_error() {
                Some(libc::EBUSY) => in_use(),
                _ => refused(path, true, "open", source),
            })?;
        }
        let file = open(0).map_err(|source| refused(path, true, "open", source))?;
        let locked = lock::try_lock(file.as_fd(), LockRange::WHOLE, LockKind::Exclusive);
        if !locked.map_err(|source| refused(path, true, "lock", source))? {
            return Err(in_use());
        }
        if kind == Kind::File {
            // Asked now that nobody else can be making it.
            let metadata =
                file.metadata().map_err(|source| refused(path, true, "inspect", source))?;
            self.check_overwrite(&metadata, path, kind)?;
            file.set_len(0).map_err(|source| refused(path, true, "empty", source))?;
        }
        Ok(file)
    }

    /// Gives an empty file or a device its bytes.
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
        // That takes long, too: the last moment for somebody who wants to give up.
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

/// Media that are made, and not handed out yet.
pub(crate) struct Prepared {
    /// If nothing was there before, it has no name yet. Otherwise all of it is locked.
    pub(crate) media: Arc<dyn Media>,
    new: Option<NewFile>,
}

impl Prepared {
    /// Puts a new file at its path, durably, and gives up the lock on what was there.
    ///
    /// # Errors
    /// [`OpenError::Exists`] if somebody else was faster.
    pub(crate) fn publish(mut self) -> Result<Arc<dyn Media>, OpenError> {
        self.name()?;
        let unlocked = lock::unlock(self.media.file(), LockRange::WHOLE);
        unlocked.map_err(|source| refused(self.media.path(), true, "unlock", source))?;
        Ok(self.media)
    }

    /// Puts a new file at its path; the caller has its own locks.
    pub(crate) fn name(&mut self) -> Result<(), OpenError> {
        let named = self.new.take().map_or(Ok(()), NewFile::publish);
        named.map_err(|source| refused(self.media.path(), true, "give a name to", source))
    }
}

fn bad_length(path: &Path, len_bytes: u64, reason: String) -> OpenError {
    OpenError::BadLength { path: path.to_path_buf(), len_bytes, reason }
}

/// Makes media, with the domain that is found or with a forced one: [`CreateOptions`] in short.
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
