//! Opening and making media: which form, which domain, and why not.
//!
//! # Detection
//! | what lies at the path | domain |
//! |---|---|
//! | a file on tmpfs, ramfs, hugetlbfs, a memfd | `Volatile` |
//! | a device `/dev/dax*` | `Dax` |
//! | another file, and `mmap(MAP_SYNC)` of it succeeds | `Dax` |
//! | another file, a block device | `PageCache` |
//!
//! The page cache is never taken for DAX. A domain can be forced, for tests and measurements: `Dax` and
//! `Volatile` on everything that can be mapped, `PageCache` on everything that has a `write` call. What a
//! forced domain promises is what its instructions and calls do on that file, and no more.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_sys::{devdax, file_system, io as file_io};

use super::file::write_zeros;
use super::mapped::Persistence;
use super::{FileMedia, MappedMedia, Media, PersistenceDomain};

/// Media could not be opened or made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is nothing at the path.
    #[error("{} does not exist; check the path, or make a pool with `aquifer pool create`", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// It is nothing that holds bytes.
    #[error(
        "{} is {what}; name a regular file, a block device or a /dev/dax device",
        path.display()
    )]
    NotStorage {
        /// The path.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// There are no bytes in it.
    #[error("{} is empty; make a pool in it with `aquifer pool create`", path.display())]
    Empty {
        /// The path.
        path: PathBuf,
    },
    /// The user may not open it so.
    #[error("no permission to {} {}; {}", access(*writable), path.display(), remedy(*writable))]
    NoPermission {
        /// The path.
        path: PathBuf,
        /// Whether it was to be written.
        writable: bool,
    },
    /// It lies on something that cannot be written.
    #[error("{} lies on read-only media; open it for reading", path.display())]
    ReadOnlyMedia {
        /// The path.
        path: PathBuf,
    },
    /// A file to be made is there already.
    #[error("{} exists already; remove it, or choose another path", path.display())]
    Exists {
        /// The path.
        path: PathBuf,
    },
    /// A file to be overwritten is in use.
    #[error("{} is locked by another process; close it there first", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// There is no room for a file to be made, or for the holes or the mapping of one to be opened.
    #[error(
        "no room for {len_bytes} bytes at {} ({source}); free space or huge pages, or make it smaller",
        path.display()
    )]
    NoSpace {
        /// The path.
        path: PathBuf,
        /// Bytes asked for.
        len_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The length is none that can be had there.
    #[error("{} cannot have {len_bytes} bytes: {reason}", path.display())]
    BadLength {
        /// The path.
        path: PathBuf,
        /// Bytes asked for.
        len_bytes: u64,
        /// Why, and what to do.
        reason: String,
    },
    /// The domain asked for cannot be had there.
    #[error("{} cannot be used as {domain} media: {reason}", path.display())]
    BadDomain {
        /// The path.
        path: PathBuf,
        /// The domain.
        domain: PersistenceDomain,
        /// Why, and what to do.
        reason: String,
    },
    /// The system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    System {
        /// What was being done.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// What lies at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    BlockDevice,
    DaxDevice,
}

impl Kind {
    fn of(metadata: &Metadata) -> Result<Kind, &'static str> {
        let kind = metadata.file_type();
        if kind.is_file() {
            Ok(Kind::File)
        } else if kind.is_block_device() {
            Ok(Kind::BlockDevice)
        } else if devdax::is_devdax(metadata) {
            Ok(Kind::DaxDevice)
        } else if kind.is_dir() {
            Err("a directory")
        } else if kind.is_fifo() {
            Err("a pipe")
        } else if kind.is_socket() {
            Err("a socket")
        } else if kind.is_char_device() {
            Err("a character device")
        } else {
            Err("no storage")
        }
    }
}

/// How to open media.
///
/// ```
/// use aquifer_pool::media::{Media, OpenOptions, PersistenceDomain};
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data");
/// # std::fs::write(&path, [7; 8192])?;
/// let media = OpenOptions::new().writable(true).domain(PersistenceDomain::PageCache).open(&path)?;
/// media.write_durable(4096, b"stays")?;
/// let mut bytes = [0; 6];
/// media.read_at(4096, &mut bytes)?;
/// assert_eq!(&bytes, b"stays\x07");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    writable: bool,
    domain: Option<PersistenceDomain>,
}

impl OpenOptions {
    /// For reading, with the domain that is found.
    pub fn new() -> OpenOptions {
        OpenOptions::default()
    }

    /// Whether it can be written. Off by default.
    pub fn writable(mut self, writable: bool) -> OpenOptions {
        self.writable = writable;
        self
    }

    /// Forces a domain, for tests and measurements. See the module's documentation.
    pub fn domain(mut self, domain: PersistenceDomain) -> OpenOptions {
        self.domain = Some(domain);
        self
    }

    /// Opens what lies at the path.
    ///
    /// # Errors
    /// All of [`OpenError`] that is not about making files.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Arc<dyn Media>, OpenError> {
        let path = path.as_ref();
        let refused = |source| self.refused(path, "open", source);
        // Before opening: opening a pipe waits, and opening a character device can do anything.
        let metadata = std::fs::metadata(path).map_err(refused)?;
        kind_of(&metadata, path)?;
        let file = File::options().read(true).write(self.writable).open(path).map_err(refused)?;
        self.open_file(file, path)
    }

    /// Takes a file that is open already, in the way that these options say; `path` is for messages.
    ///
    /// # Errors
    /// As for [`OpenOptions::open`].
    pub fn open_file(
        &self,
        file: File,
        path: impl Into<PathBuf>,
    ) -> Result<Arc<dyn Media>, OpenError> {
        let path = path.into();
        let metadata = file.metadata().map_err(|source| self.refused(&path, "inspect", source))?;
        let kind = kind_of(&metadata, &path)?;
        let len_bytes = len_bytes(&file, &metadata, kind)
            .map_err(|source| self.refused(&path, "find the length of", source))?;
        if len_bytes == 0 {
            return Err(OpenError::Empty { path });
        }
        self.adopt(file, path, kind).map(Form::into_media)
    }

    /// Makes media of a file that is not empty, in the first form that it can have.
    fn adopt(&self, file: File, path: PathBuf, kind: Kind) -> Result<Form, OpenError> {
        let refused = |source| self.refused(&path, "open", source);
        let magic = file_system::magic(file.as_fd()).map_err(refused)?;
        let is_memory = kind == Kind::File && file_system::in_memory(magic).is_some();
        let is_hugetlbfs = kind == Kind::File && magic == file_system::HUGETLBFS;
        let bad_domain = |reason: &str| OpenError::BadDomain {
            path: path.clone(),
            domain: self.domain.unwrap_or(PersistenceDomain::Dax),
            reason: reason.to_owned(),
        };
        let attempts: &[Attempt] = match (self.domain, kind) {
            (Some(PersistenceDomain::PageCache), Kind::DaxDevice) => {
                return Err(bad_domain("a DAX device has no page cache"));
            }
            (Some(PersistenceDomain::PageCache), _) if is_hugetlbfs => {
                return Err(bad_domain("hugetlbfs has no write call"));
            }
            (Some(PersistenceDomain::PageCache), _) => &[Attempt::PageCache],
            (Some(PersistenceDomain::Volatile), _) => &[Attempt::Mapped(Persistence::Volatile)],
            (Some(PersistenceDomain::Dax), _) => {
                &[Attempt::Mapped(Persistence::Checked), Attempt::Mapped(Persistence::Forced)]
            }
            (None, Kind::File) if is_memory => &[Attempt::Mapped(Persistence::Volatile)],
            (None, Kind::File) => &[Attempt::Mapped(Persistence::Checked), Attempt::PageCache],
            (None, Kind::DaxDevice) => &[Attempt::Mapped(Persistence::Checked)],
            (None, Kind::BlockDevice) => &[Attempt::PageCache],
        };
        let mut attempts = attempts.iter().copied().peekable();
        while let Some(attempt) = attempts.next() {
            let copy = file.try_clone().map_err(refused)?;
            let name = path.clone();
            let made = match attempt {
                Attempt::PageCache => FileMedia::new(copy, name, self.writable).map(Form::File),
                Attempt::Mapped(persistence) => {
                    MappedMedia::new(copy, name, self.writable, persistence).map(Form::Mapped)
                }
            };
            match made {
                Ok(form) => {
                    if self.writable && kind == Kind::File && matches!(form, Form::Mapped(_)) {
                        fill_holes(&file, &path)?;
                    }
                    return Ok(form);
                }
                Err(error) if is_not_dax(&error) && attempts.peek().is_some() => {}
                Err(error) if is_not_dax(&error) => return Err(bad_domain(&error.to_string())),
                Err(source) if source.raw_os_error() == Some(libc::ENOMEM) => {
                    // No huge pages or no address space for it.
                    let len_bytes = file.metadata().map_or(0, |metadata| metadata.len());
                    return Err(OpenError::NoSpace { path, len_bytes, source });
                }
                Err(error) => return Err(self.refused(&path, "map", error)),
            }
        }
        unreachable!("every list of attempts has a last one, which returns")
    }

    fn refused(&self, path: &Path, action: &'static str, source: io::Error) -> OpenError {
        refused(path, self.writable, action, source)
    }
}

/// A form to try.
#[derive(Debug, Clone, Copy)]
enum Attempt {
    PageCache,
    Mapped(Persistence),
}

/// A form that was had.
enum Form {
    File(FileMedia),
    Mapped(MappedMedia),
}

impl Form {
    fn into_media(self) -> Arc<dyn Media> {
        match self {
            Form::File(media) => Arc::new(media),
            Form::Mapped(media) => Arc::new(media),
        }
    }

    /// Zeroes the first bytes, durably where the domain has any durability.
    fn write_zeros(&self, len_bytes: u64, progress: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
        match self {
            Form::File(media) => write_zeros(media.file(), 0, len_bytes, progress)?,
            // Fresh memory is zero.
            Form::Mapped(media) if media.domain() == PersistenceDomain::Volatile => {
                progress(len_bytes, len_bytes);
            }
            Form::Mapped(media) => media.write_zeros(0, len_bytes, progress)?,
        }
        Ok(())
    }
}

/// Whether a mapping was refused because it would not be of persistent memory, or cannot be made so.
fn is_not_dax(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
        || matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENODEV))
}

/// Gives a file that will be stored to its memory now: a store to a hole has nobody to tell that there is no
/// room, and is a signal.
fn fill_holes(file: &File, path: &Path) -> Result<(), OpenError> {
    let filled = file.metadata().and_then(|metadata| {
        // The unit of `st_blocks` is 512 bytes everywhere.
        let is_sparse = metadata.blocks().saturating_mul(512) < metadata.len();
        let len_bytes = metadata.len();
        let fill = || match file_io::allocate(file.as_fd(), 0, len_bytes) {
            // ramfs: no limit to run into either.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
            filled => filled,
        };
        if is_sparse { fill() } else { Ok(()) }
    });
    filled.map_err(|source| match source.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::ENOMEM) => OpenError::NoSpace {
            path: path.to_path_buf(),
            len_bytes: file.metadata().map_or(0, |metadata| metadata.len()),
            source,
        },
        _ => refused(path, true, "allocate", source),
    })
}

fn kind_of(metadata: &Metadata, path: &Path) -> Result<Kind, OpenError> {
    Kind::of(metadata).map_err(|what| OpenError::NotStorage { path: path.to_path_buf(), what })
}

fn len_bytes(file: &File, metadata: &Metadata, kind: Kind) -> io::Result<u64> {
    match kind {
        Kind::File => Ok(metadata.len()),
        Kind::BlockDevice => file_io::block_device_len_bytes(file.as_fd()),
        Kind::DaxDevice => Ok(devdax::len_bytes(metadata)),
    }
}

fn access(writable: bool) -> &'static str {
    if writable { "write" } else { "read" }
}

fn remedy(writable: bool) -> &'static str {
    if writable { "open it for reading, or ask its owner" } else { "ask its owner" }
}

fn refused(path: &Path, writable: bool, action: &'static str, source: io::Error) -> OpenError {
    let path = path.to_path_buf();
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => OpenError::Missing { path },
        Some(libc::EACCES | libc::EPERM) => OpenError::NoPermission { path, writable },
        Some(libc::EROFS) => OpenError::ReadOnlyMedia { path },
        Some(libc::EISDIR) => OpenError::NotStorage { path, what: "a directory" },
        Some(libc::EEXIST) => OpenError::Exists { path },
        _ => OpenError::System { action, path, source },
    }
}

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
}

impl Default for CreateOptions {
    fn default() -> CreateOptions {
        CreateOptions { overwrite: false, mode: 0o600, domain: None }
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

    /// Makes media of `len_bytes` at a path where there is nothing, an empty file, or a device. On return every
    /// byte is zero, allocated and durable, and so is the name. `progress` is told now and then how many bytes
    /// of how many are done. Of a device that is longer, the first `len_bytes` are zeroed and all are media.
    ///
    /// # Errors
    /// All of [`OpenError`]. A file that was made is removed again; what was overwritten is lost.
    pub fn create(
        &self,
        path: impl AsRef<Path>,
        len_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Arc<dyn Media>, OpenError> {
        let path = path.as_ref();
        if len_bytes == 0 {
            return Err(bad_length(path, len_bytes, "media have at least one byte".into()));
        }
        match std::fs::metadata(path) {
            Ok(metadata) => {
                let kind = kind_of(&metadata, path)?;
                if kind == Kind::File && metadata.len() > 0 && !self.overwrite {
                    return Err(OpenError::Exists { path: path.to_path_buf() });
                }
                let file = self.claim(path, kind)?;
                self.fill(file, path, len_bytes, kind, progress)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.make(path, len_bytes, progress)
            }
            Err(error) => Err(refused(path, true, "open", error)),
        }
    }

    /// A file where there is nothing.
    fn make(
        &self,
        path: &Path,
        len_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Arc<dyn Media>, OpenError> {
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(self.mode)
            .open(path)
            .map_err(|source| refused(path, true, "make", source))?;
        let made = self.fill(file, path, len_bytes, Kind::File, progress).and_then(|media| {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            match file_io::sync_directory(parent.unwrap_or(Path::new("."))) {
                // File systems without storage have nothing to sync.
                Err(error) if error.raw_os_error() != Some(libc::EINVAL) => {
                    Err(refused(path, true, "make the name durable of", error))
                }
                _ => Ok(media),
            }
        });
        if made.is_err() {
            let _ = std::fs::remove_file(path);
        }
        made
    }

    /// Opens what is there, if nobody uses it.
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
        let conflict = lock::conflict(file.as_fd(), LockRange::WHOLE, LockKind::Exclusive)
            .map_err(|source| refused(path, true, "look for locks of", source))?;
        if conflict.is_some() {
            return Err(in_use());
        }
        if kind == Kind::File {
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
        let options = OpenOptions { writable: true, domain: self.domain };
        let sync = file.try_clone().map_err(failed)?;
        let form = options.adopt(file, path.to_path_buf(), kind)?;
        form.write_zeros(len_bytes, progress).map_err(failed)?;
        if kind != Kind::DaxDevice {
            sync.sync_all().map_err(failed)?;
        }
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

fn bad_length(path: &Path, len_bytes: u64, reason: String) -> OpenError {
    OpenError::BadLength { path: path.to_path_buf(), len_bytes, reason }
}

/// Opens media, with the domain that is found or with a forced one: [`OpenOptions`] in short.
///
/// # Errors
/// As for [`OpenOptions::open`].
pub fn open(
    path: &Path,
    writable: bool,
    forced: Option<PersistenceDomain>,
) -> Result<Arc<dyn Media>, OpenError> {
    OpenOptions { writable, domain: forced }.open(path)
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
