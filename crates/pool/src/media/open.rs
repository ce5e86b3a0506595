//! Opens media: chooses the form, detects the domain, explains failures.
//!
//! # Detection
//! | what lies at the path | domain |
//! |---|---|
//! | a file on tmpfs, ramfs, hugetlbfs, a memfd | `Volatile` |
//! | a device `/dev/dax*` | `Dax` |
//! | another file, and `mmap(MAP_SYNC)` of it succeeds | `Dax` |
//! | another file, a block device | `PageCache` |
//!
//! The page cache is never taken for DAX. A domain can be forced, for tests and measurements: `Dax`
//! and `Volatile` on everything that can be mapped, `PageCache` on everything that has a `write`
//! call. A forced domain guarantees only what its instructions and calls do on that file.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_sys::open_file::mark;
use aquifer_sys::{devdax, file_system, io as file_io};
use aquifer_vm::WindowKey;

use super::file::write_zeros;
use super::mapped::Persistence;
use super::{FileMedia, MappedMedia, Media, PersistenceDomain, WriteWindows};

/// Media could not be opened or created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is nothing at the path.
    #[error("{} does not exist; check the path, or make a pool with `aquifer pool create`", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// It is not a file or device that holds bytes.
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
    /// The file is empty.
    #[error("{} is empty; make a pool in it with `aquifer pool create`", path.display())]
    Empty {
        /// The path.
        path: PathBuf,
    },
    /// The user has no permission for this access.
    #[error("no permission to {} {}; {}", access(*writable), path.display(), remedy(*writable))]
    NoPermission {
        /// The path.
        path: PathBuf,
        /// Whether it was opened for writing.
        writable: bool,
    },
    /// It lies on read-only media.
    #[error("{} lies on read-only media; open it for reading", path.display())]
    ReadOnlyMedia {
        /// The path.
        path: PathBuf,
    },
    /// A file to be created exists already.
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
    /// There is no space for a new file, or for the holes or the mapping of an existing one.
    #[error(
        "no room for {len_bytes} bytes at {} ({source}); free space or huge pages, or make it smaller",
        path.display()
    )]
    NoSpace {
        /// The path.
        path: PathBuf,
        /// The requested length.
        len_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The length is not possible there.
    #[error("{} cannot have {len_bytes} bytes: {reason}", path.display())]
    BadLength {
        /// The path.
        path: PathBuf,
        /// The requested length.
        len_bytes: u64,
        /// Why, and what to do.
        reason: String,
    },
    /// The requested domain is not possible there.
    #[error("{} cannot be used as {domain} media: {reason}", path.display())]
    BadDomain {
        /// The path.
        path: PathBuf,
        /// The domain.
        domain: PersistenceDomain,
        /// Why, and what to do.
        reason: String,
    },
    /// The requested write windows are not available.
    #[error("{} cannot be guarded by {windows}: {reason}; ask for others, or for the best there are", path.display())]
    NoWriteWindows {
        /// The path.
        path: PathBuf,
        /// The requested windows.
        windows: WriteWindows,
        /// The reason.
        reason: String,
    },
    /// The system returned an error.
    #[error("cannot {action} {}: {source}", path.display())]
    System {
        /// The action that failed.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl OpenError {
    /// The error of a path that cannot be inspected.
    pub(crate) fn of(path: &Path, source: io::Error) -> OpenError {
        refused(path, false, "inspect", source)
    }
}

/// What the path names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
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
/// // SAFETY: no pool is open on these media.
/// unsafe { media.write_durable(4096, b"stays")? };
/// let mut bytes = [0; 6];
/// media.read_at(4096, &mut bytes)?;
/// assert_eq!(&bytes, b"stays\x07");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    writable: bool,
    domain: Option<PersistenceDomain>,
    windows: WriteWindows,
}

impl OpenOptions {
    /// Options for reading, with the detected domain.
    pub fn new() -> OpenOptions {
        OpenOptions::default()
    }

    /// Options for media that are being created.
    pub(super) fn made(domain: Option<PersistenceDomain>, windows: WriteWindows) -> OpenOptions {
        OpenOptions { writable: true, domain, windows }
    }

    /// Whether the media can be written. Off by default.
    pub fn writable(mut self, writable: bool) -> OpenOptions {
        self.writable = writable;
        self
    }

    /// Forces a domain, for tests and measurements. See the module's documentation.
    pub fn domain(mut self, domain: PersistenceDomain) -> OpenOptions {
        self.domain = Some(domain);
        self
    }

    /// How writable media are guarded against stray stores of this process. No guard by default.
    pub fn write_windows(mut self, windows: WriteWindows) -> OpenOptions {
        self.windows = windows;
        self
    }

    /// Opens the file or device at the path.
    ///
    /// # Errors
    /// All of [`OpenError`] except what concerns creating files.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Arc<dyn Media>, OpenError> {
        let path = path.as_ref();
        let refused = |source| self.refused(path, "open", source);
        // Before opening: opening a pipe blocks, and opening a character device can have any side
        // effect.
        let metadata = std::fs::metadata(path).map_err(refused)?;
        kind_of(&metadata, path)?;
        let file = File::options().read(true).write(self.writable).open(path).map_err(refused)?;
        mark(file.as_fd());
        self.open_file(file, path)
    }

    /// Takes an open file, which must have been opened as these options state; `path` is for
    /// messages.
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

    /// Makes media of a file that is not empty, in the first form that works.
    pub(super) fn adopt(&self, file: File, path: PathBuf, kind: Kind) -> Result<Form, OpenError> {
        let refused = |source| self.refused(&path, "open", source);
        let magic = file_system::magic(file.as_fd()).map_err(refused)?;
        let is_memory = kind == Kind::File && file_system::in_memory(magic).is_some();
        let is_hugetlbfs = kind == Kind::File && magic == file_system::HUGETLBFS;
        let windows = if self.writable {
            self.windows_for(&path, is_hugetlbfs, kind)?
        } else {
            WriteWindows::None
        };
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
                Attempt::PageCache => FileMedia::new(copy, name, self.writable)
                    .map(|media| if windows.is_guard() { media.guarded() } else { media })
                    .map(Form::File),
                Attempt::Mapped(persistence) => {
                    let writing = self.writable.then_some(windows);
                    MappedMedia::new(copy, name, writing, persistence).map(Form::Mapped)
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
                    // There are no huge pages or no address space for it.
                    let len_bytes = file.metadata().map_or(0, |metadata| metadata.len());
                    return Err(OpenError::NoSpace { path, len_bytes, source });
                }
                Err(error) => return Err(self.refused(&path, "map", error)),
            }
        }
        unreachable!("every list of attempts has a last one, which returns")
    }

    /// The write windows that are available for a file that may be mapped.
    fn windows_for(
        &self,
        path: &Path,
        is_hugetlbfs: bool,
        kind: Kind,
    ) -> Result<WriteWindows, OpenError> {
        let keys =
            || WindowKey::of_process().map_err(|error| format!("no protection keys ({error})"));
        let calls = || match kind {
            Kind::DaxDevice => Err("a DAX device has no write call".to_owned()),
            _ if is_hugetlbfs => Err("hugetlbfs has no write call".to_owned()),
            _ => Ok(()),
        };
        let refused = |reason| OpenError::NoWriteWindows {
            path: path.to_path_buf(),
            windows: self.windows,
            reason,
        };
        match self.windows {
            WriteWindows::None => {}
            WriteWindows::Keys => {
                keys().map_err(refused)?;
            }
            WriteWindows::Calls => calls().map_err(refused)?,
            WriteWindows::Best if keys().is_ok() => return Ok(WriteWindows::Keys),
            WriteWindows::Best if calls().is_ok() => return Ok(WriteWindows::Calls),
            WriteWindows::Best => return Ok(WriteWindows::None),
        }
        Ok(self.windows)
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

/// The form that worked.
pub(super) enum Form {
    File(FileMedia),
    Mapped(MappedMedia),
}

impl Form {
    pub(super) fn into_media(self) -> Arc<dyn Media> {
        match self {
            Form::File(media) => Arc::new(media),
            Form::Mapped(media) => Arc::new(media),
        }
    }

    /// Zeroes the first bytes, durably if the domain has any durability.
    pub(super) fn write_zeros(
        &self,
        len_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> io::Result<()> {
        match self {
            Form::File(media) => write_zeros(media.file(), 0, len_bytes, progress)?,
            // Newly allocated memory is zero.
            Form::Mapped(media) if media.domain() == PersistenceDomain::Volatile => {
                media.use_huge_pages(0, len_bytes, progress);
            }
            Form::Mapped(media) => media.write_zeros(0, len_bytes, progress)?,
        }
        Ok(())
    }
}

/// Whether a mapping failed because the file is not persistent memory.
fn is_not_dax(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
        || matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENODEV))
}

/// Allocates the holes of a file that will be stored to: a store to a hole that cannot be allocated
/// raises a signal and cannot return an error.
fn fill_holes(file: &File, path: &Path) -> Result<(), OpenError> {
    let filled = file.metadata().and_then(|metadata| {
        // The unit of `st_blocks` is 512 bytes everywhere.
        let is_sparse = metadata.blocks().saturating_mul(512) < metadata.len();
        let len_bytes = metadata.len();
        let fill = || match file_io::allocate(file.as_fd(), 0, len_bytes) {
            // ramfs: it has no limit that could be exceeded.
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

pub(super) fn kind_of(metadata: &Metadata, path: &Path) -> Result<Kind, OpenError> {
    Kind::of(metadata).map_err(|what| OpenError::NotStorage { path: path.to_path_buf(), what })
}

pub(super) fn len_bytes(file: &File, metadata: &Metadata, kind: Kind) -> io::Result<u64> {
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

pub(super) fn refused(
    path: &Path,
    writable: bool,
    action: &'static str,
    source: io::Error,
) -> OpenError {
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

/// Opens media with the detected or a forced domain: a short form of [`OpenOptions`].
///
/// # Errors
/// As for [`OpenOptions::open`].
pub fn open(
    path: &Path,
    writable: bool,
    forced: Option<PersistenceDomain>,
) -> Result<Arc<dyn Media>, OpenError> {
    OpenOptions { writable, domain: forced, ..OpenOptions::new() }.open(path)
}
