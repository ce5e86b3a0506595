//! Errors of file operations.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use aquifer_format::StructureError;
use aquifer_pool::PoolError;
use aquifer_pool::format::byte_chain::MAX_CHAIN_BYTES;
use aquifer_pool::format::file::MAX_FILE_BYTES;
use aquifer_vm::stitched::StitchError;

use crate::attribute_limits::{MAX_ATTRIBUTE_NAME_BYTES, MAX_VALUE_BYTES, is_namespace};

/// The result of an operation on files.
pub type Result<T> = std::result::Result<T, FsError>;

/// A file operation failed.
///
/// Each variant has the error number of the corresponding system call, and the kind that
/// [`std::io::Error`] gives that: [`FsError::errno`], [`FsError::kind`].
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// let error = files.open_file("/nothing").unwrap_err();
/// assert_eq!((error.errno(), error.path().and_then(|path| path.to_str())), (libc::ENOENT, Some("/nothing")));
/// assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
/// assert_eq!(error.to_string(), "/nothing: No such file or directory");
/// let error = std::io::Error::from(error); // `?` does that, too
/// assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FsError {
    /// No file has this name.
    #[error("{path}: No such file or directory", path = path.display())]
    NotFound {
        /// The path.
        path: PathBuf,
    },
    /// The inode is no longer there: it was removed, and its number may belong to another one by now.
    #[error(
        "(inode {number}): Stale file handle: the inode of generation {generation} was removed; look its name up again"
    )]
    Stale {
        /// The inode's number.
        number: u64,
        /// The generation of the inode that was meant.
        generation: u64,
    },
    /// The name already exists.
    #[error("{path}: File exists", path = path.display())]
    Exists {
        /// The path.
        path: PathBuf,
    },
    /// The name is longer than 255 bytes, or the path than 4,095.
    #[error("{path}: File name too long: a name has at most 255 bytes, a path 4,095", path = path.display())]
    NameTooLong {
        /// The path.
        path: PathBuf,
    },
    /// The bytes cannot be a name: empty, or with a NUL.
    #[error("{path}: Invalid argument: {reason}", path = path.display())]
    BadName {
        /// The path.
        path: PathBuf,
        /// Why not.
        reason: &'static str,
    },
    /// Something that is no directory, where a directory is needed.
    #[error("{path}: Not a directory", path = path.display())]
    NotADirectory {
        /// The path.
        path: PathBuf,
    },
    /// A directory, where something else is needed.
    #[error("{path}: Is a directory", path = path.display())]
    IsADirectory {
        /// The path.
        path: PathBuf,
    },
    /// A directory cannot have a second name.
    #[error("{path}: Operation not permitted: a directory has one name; use a symbolic link", path = path.display())]
    DirectoryLink {
        /// The path.
        path: PathBuf,
    },
    /// The path does not end with a name, so it cannot be moved or removed.
    #[error("{path}: Device or resource busy: name the directory within its parent instead of `/`, `.` or `..`", path = path.display())]
    NotByName {
        /// The path.
        path: PathBuf,
    },
    /// The directory is not empty.
    #[error("{path}: Directory not empty", path = path.display())]
    NotEmpty {
        /// The path.
        path: PathBuf,
    },
    /// It is not a symbolic link.
    #[error("{path}: Invalid argument: not a symbolic link", path = path.display())]
    NotALink {
        /// The path.
        path: PathBuf,
    },
    /// More than 40 symbolic links on a path, or one where it must not be followed.
    #[error("{path}: Too many levels of symbolic links, or one that must not be followed", path = path.display())]
    LinkLoop {
        /// The path.
        path: PathBuf,
    },
    /// Something that is no regular file, where one is needed.
    #[error("{path}: Not a regular file", path = path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The content of the file is not UTF-8.
    #[error("{path}: stream did not contain valid UTF-8", path = path.display())]
    NotUtf8 {
        /// The path.
        path: PathBuf,
    },
    /// The file ends before the buffer is full.
    #[error("failed to fill whole buffer: the file ends at byte {len_bytes}")]
    UnexpectedEof {
        /// The length of the file.
        len_bytes: u64,
    },
    /// The inode has the maximum number of names, or the directory that of subdirectories.
    #[error("{path}: Too many links", path = path.display())]
    TooManyLinks {
        /// The path.
        path: PathBuf,
    },
    /// A directory cannot be moved into itself.
    #[error("{path}: Invalid argument: cannot move a directory into itself", path = path.display())]
    IntoItself {
        /// The path.
        path: PathBuf,
    },
    /// The file is immutable.
    #[error("{path}: Operation not permitted: the file is immutable; `set_immutable` makes it mutable", path = path.display())]
    Immutable {
        /// The path.
        path: PathBuf,
    },
    /// The caller is not the owner of the file: see [`Caller::enforced`](crate::node::Caller::enforced).
    #[error("{path}: Operation not permitted: the file belongs to another user", path = path.display())]
    NotOwner {
        /// The path.
        path: PathBuf,
    },
    /// The caller may not write to the file: see [`Caller::enforced`](crate::node::Caller::enforced).
    #[error("{path}: Permission denied: the user has no permission to write to it", path = path.display())]
    NotWritable {
        /// The path.
        path: PathBuf,
    },
    /// A view of the file conflicts with the operation.
    #[error("{path}: Device or resource busy: the file is in use by a view or lease; drop it and retry", path = path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// A named pipe, a socket or a device of a pool cannot be opened: it leads nowhere.
    #[error("{path}: No such device or address: a pool keeps named pipes, sockets and devices, and cannot open them", path = path.display())]
    Special {
        /// The path.
        path: PathBuf,
    },
    /// Only files and directories have attributes whose names start with `user.`.
    #[error("Operation not permitted: only files and directories have the attribute {name}", name = name.escape_ascii())]
    UserAttribute {
        /// The name.
        name: Vec<u8>,
    },
    /// The options to open a file, or source and target of a copy, contradict each other.
    #[error("{path}: Invalid argument: {reason}", path = path.display())]
    Options {
        /// The path.
        path: PathBuf,
        /// The contradiction.
        reason: &'static str,
    },
    /// The value is no access control list.
    #[error("Invalid argument: this is no POSIX access control list: {reason}")]
    Acl {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Symbolic links have no access control lists.
    #[error("{path}: Operation not supported: symbolic links have no access control lists", path = path.display())]
    NoAcl {
        /// The path.
        path: PathBuf,
    },
    /// Only directories have default access control lists.
    #[error("{path}: Permission denied: only directories have default access control lists", path = path.display())]
    NoDefaultAcl {
        /// The path.
        path: PathBuf,
    },
    /// The value is an access control list of another version.
    #[error("Operation not supported: access control lists have version 2, not {version}")]
    AclVersion {
        /// Its version.
        version: u32,
    },
    /// The file was not opened for this operation.
    #[error("Bad file descriptor: the file was not opened for {what}")]
    NotOpenFor {
        /// The kind of access.
        what: &'static str,
    },
    /// A lock that another handle holds conflicts with the requested one.
    #[error("Resource temporarily unavailable: another handle holds a lock of the file or range")]
    Locked,
    /// A signal interrupted the wait for a lock.
    #[error("Interrupted system call: a signal ended the wait for a lock; retry")]
    Interrupted,
    /// The range to be locked extends beyond the limit.
    #[error("only the first {limit_bytes} bytes of a file of this pool can be locked by ranges")]
    LockTooFar {
        /// How many bytes can be locked.
        limit_bytes: u64,
    },
    /// The length of a file that was opened for reading cannot be changed.
    #[error(
        "Invalid argument: the length of a file that is not open for writing cannot be changed"
    )]
    NotResizable,
    /// An empty range, where at least one byte is needed.
    #[error("the range is empty; name at least one byte")]
    EmptyRange,
    /// A range ends beyond the end of the file, or before it starts.
    #[error("bytes {} to {} are no range of the file: it has {len_bytes}; ask for its length first, or for an open range", range.start, range.end)]
    OutsideFile {
        /// The requested range.
        range: Range<u64>,
        /// The length of the file.
        len_bytes: u64,
    },
    /// A range lies outside of a view.
    #[error("bytes {} to {} are outside of the view, which has {len_bytes}", range.start, range.end)]
    OutsideView {
        /// The requested range.
        range: Range<u64>,
        /// The length of the view.
        len_bytes: u64,
    },
    /// The range lies in too many pieces to be a slice.
    #[error(
        "this lies in {pieces} pieces, and a slice can be made of {limit}; look at a view through a closure, which copies, or call `defragment`"
    )]
    TooFragmented {
        /// Number of pieces.
        pieces: usize,
        /// The limit: one if the media cannot be mapped in pieces.
        limit: usize,
    },
    /// The pages of a view no longer belong to the file.
    #[error(
        "the file was cut short or got a hole where the view is, so what was stored to it is lost; make a new view"
    )]
    LayoutChanged,
    /// A slice was requested of a file that is not immutable.
    #[error("{path}: others may change this; make it immutable with `set_immutable`, or take a view", path = path.display())]
    NotImmutable {
        /// The path.
        path: PathBuf,
    },
    /// The media of the pool are not mapped, so there are no pointers to them.
    #[error("the media of this pool are not memory; take a view, and look at it through a closure")]
    NotMapped,
    /// The pieces of a file cannot be mapped contiguously.
    #[error(transparent)]
    Stitch(#[from] StitchError),
    /// A range that is to be exchanged, removed or inserted is not whole pages of its file.
    #[error("these are not whole pages of the file: {reason}")]
    NotPages {
        /// Why not.
        reason: &'static str,
    },
    /// Two files of one call are in different pools, or were opened through different `Files` of
    /// one pool.
    #[error("the files are not of the same pool; open both through one `Files`")]
    OtherPool,
    /// A directory has no room for another name with the same hash.
    #[error("a directory has no room for this name; another name will do")]
    TooManyCollisions,
    /// The file would exceed the maximum length.
    #[error("File too large: a file has at most {MAX_FILE_BYTES} bytes")]
    FileTooLarge,
    /// The file has no such extended attribute.
    #[error("No data available: the file has no attribute {name}", name = name.escape_ascii())]
    NoAttribute {
        /// Its name.
        name: Vec<u8>,
    },
    /// The extended attribute exists, and was to be created.
    #[error("File exists: the file has an attribute {name}", name = name.escape_ascii())]
    AttributeExists {
        /// Its name.
        name: Vec<u8>,
    },
    /// The name of an extended attribute is empty, longer than 255 bytes, or has a NUL in it.
    #[error(
        "{name} cannot be the name of an attribute: it has to have 1 to {MAX_ATTRIBUTE_NAME_BYTES} bytes, none of them NUL",
        name = name.escape_ascii()
    )]
    AttributeName {
        /// The name.
        name: Vec<u8>,
    },
    /// The name of an extended attribute has no known namespace, or is just a namespace.
    #[error(
        "{name} cannot be the name of an attribute: it has to begin with user., trusted., security. or system. and go on \
         behind that",
        name = name.escape_ascii()
    )]
    AttributeNamespace {
        /// The name.
        name: Vec<u8>,
    },
    /// The value of an extended attribute is too long.
    #[error("an attribute of {len_bytes} bytes is too large; it can have {MAX_VALUE_BYTES}")]
    AttributeTooLarge {
        /// Its length.
        len_bytes: usize,
    },
    /// A file has too many extended attributes, or too large ones.
    #[error(
        "the attributes of the file would take {len_bytes} bytes; there is room for {MAX_CHAIN_BYTES}: remove some"
    )]
    AttributesFull {
        /// The length of all attributes together.
        len_bytes: usize,
    },
    /// An open file was not handed over, or it is not known whether it was.
    #[error("the file was not handed over to the other process: {source}")]
    HandOver {
        /// The error of the connection.
        source: std::io::Error,
    },
    /// The metadata of a file are inconsistent.
    #[error(
        "{structure} is damaged ({reason}); run `aquifer pool check` and restore what it names from a backup"
    )]
    Damaged {
        /// Which structure.
        structure: String,
        /// What is wrong.
        reason: String,
    },
    /// An error of the pool.
    #[error(transparent)]
    Pool(PoolError),
}

impl From<PoolError> for FsError {
    /// Errors of a file's own structures become those of the file system.
    fn from(error: PoolError) -> FsError {
        match error {
            PoolError::Structure(error) => error.into(),
            error => FsError::Pool(error),
        }
    }
}

impl From<StructureError> for FsError {
    fn from(error: StructureError) -> FsError {
        match error {
            StructureError::Damaged { structure, reason } => FsError::Damaged { structure, reason },
            StructureError::Exists { name } => FsError::Exists { path: owned(&name) },
            StructureError::NameTooLong { name } => FsError::NameTooLong { path: owned(&name) },
            StructureError::BadName { name, reason } => {
                FsError::BadName { path: owned(&name), reason }
            }
            StructureError::TooManyCollisions => FsError::TooManyCollisions,
            StructureError::FileTooLarge => FsError::FileTooLarge,
            error => FsError::Pool(PoolError::Structure(error)),
        }
    }
}

/// Converts the bytes of a path to a path for messages.
pub(crate) fn owned(path: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(path))
}

impl From<FsError> for std::io::Error {
    /// Converts to an error of the same kind and message, which has the [`FsError`] inside.
    fn from(error: FsError) -> std::io::Error {
        std::io::Error::new(error.kind(), error)
    }
}

impl FsError {
    /// There is no memory for that many bytes.
    pub(crate) fn no_memory(len_bytes: u64) -> FsError {
        let source = ErrorKind::OutOfMemory.into();
        FsError::Stitch(StitchError::Map { len_bytes, source })
    }

    /// Returns the same error, for the whole path.
    pub(crate) fn at(self, path: &[u8]) -> FsError {
        let whole = owned(path);
        match self {
            FsError::Exists { .. } => FsError::Exists { path: whole },
            FsError::NameTooLong { .. } => FsError::NameTooLong { path: whole },
            FsError::BadName { reason, .. } => FsError::BadName { path: whole, reason },
            other => other,
        }
    }

    /// Returns the path in the pool that the error is about, if any.
    pub fn path(&self) -> Option<&Path> {
        match self {
            FsError::NotFound { path }
            | FsError::Exists { path }
            | FsError::NameTooLong { path }
            | FsError::BadName { path, .. }
            | FsError::NotADirectory { path }
            | FsError::IsADirectory { path }
            | FsError::DirectoryLink { path }
            | FsError::NotByName { path }
            | FsError::NotEmpty { path }
            | FsError::NotALink { path }
            | FsError::NotAFile { path }
            | FsError::NotUtf8 { path }
            | FsError::LinkLoop { path }
            | FsError::Special { path }
            | FsError::NoAcl { path }
            | FsError::NoDefaultAcl { path }
            | FsError::TooManyLinks { path }
            | FsError::IntoItself { path }
            | FsError::Immutable { path }
            | FsError::NotOwner { path }
            | FsError::NotWritable { path }
            | FsError::InUse { path }
            | FsError::NotImmutable { path }
            | FsError::Options { path, .. } => Some(path),
            _ => None,
        }
    }

    /// Returns the kind that [`std::io::Error`] has for the same failure of a system call.
    pub fn kind(&self) -> ErrorKind {
        match self {
            FsError::NotUtf8 { .. } => ErrorKind::InvalidData,
            FsError::UnexpectedEof { .. } => ErrorKind::UnexpectedEof,
            _ => std::io::Error::from_raw_os_error(self.errno()).kind(),
        }
    }

    /// Returns the error number that Linux returns for the same failure.
    pub fn errno(&self) -> i32 {
        match self {
            FsError::NotFound { .. } => libc::ENOENT,
            FsError::Exists { .. } | FsError::AttributeExists { .. } => libc::EEXIST,
            FsError::NameTooLong { .. } => libc::ENAMETOOLONG,
            FsError::BadName { .. }
            | FsError::IntoItself { .. }
            | FsError::NotALink { .. }
            | FsError::NotAFile { .. }
            | FsError::EmptyRange
            | FsError::NotPages { .. }
            | FsError::OutsideFile { .. }
            | FsError::OutsideView { .. }
            | FsError::NotResizable
            | FsError::Acl { .. }
            | FsError::Options { .. } => libc::EINVAL,
            FsError::NotADirectory { .. } => libc::ENOTDIR,
            FsError::IsADirectory { .. } => libc::EISDIR,
            FsError::NotEmpty { .. } => libc::ENOTEMPTY,
            FsError::LinkLoop { .. } => libc::ELOOP,
            FsError::Special { .. } => libc::ENXIO,
            FsError::TooManyLinks { .. } => libc::EMLINK,
            FsError::Immutable { .. }
            | FsError::NotOwner { .. }
            | FsError::NotImmutable { .. }
            | FsError::UserAttribute { .. }
            | FsError::DirectoryLink { .. } => libc::EPERM,
            FsError::NotUtf8 { .. } => libc::EILSEQ,
            FsError::UnexpectedEof { .. } => libc::EIO,
            FsError::TooFragmented { .. } => libc::E2BIG,
            FsError::LayoutChanged | FsError::Stale { .. } => libc::ESTALE,
            FsError::NotMapped | FsError::AclVersion { .. } | FsError::NoAcl { .. } => {
                libc::EOPNOTSUPP
            }
            FsError::NoDefaultAcl { .. } | FsError::NotWritable { .. } => libc::EACCES,
            FsError::Stitch(_) => libc::ENOMEM,
            FsError::InUse { .. } | FsError::NotByName { .. } => libc::EBUSY,
            FsError::OtherPool => libc::EXDEV,
            FsError::NotOpenFor { .. } => libc::EBADF,
            FsError::TooManyCollisions | FsError::AttributesFull { .. } => libc::ENOSPC,
            FsError::Locked => libc::EWOULDBLOCK,
            FsError::Interrupted => libc::EINTR,
            FsError::LockTooFar { .. } => libc::EOVERFLOW,
            FsError::FileTooLarge => libc::EFBIG,
            FsError::NoAttribute { .. } => libc::ENODATA,
            FsError::AttributeName { .. } => libc::ERANGE,
            FsError::AttributeNamespace { name } if is_namespace(name) => libc::EINVAL,
            FsError::AttributeNamespace { .. } => libc::EOPNOTSUPP,
            FsError::AttributeTooLarge { .. } => libc::E2BIG,
            FsError::HandOver { source } => match source.kind() {
                ErrorKind::UnexpectedEof => libc::ECONNRESET,
                _ => source.raw_os_error().unwrap_or(libc::EIO),
            },
            // As Linux file systems return for damaged metadata.
            FsError::Damaged { .. } => libc::EUCLEAN,
            FsError::Pool(error) => errno_of_pool(error),
        }
    }
}

fn errno_of_pool(error: &PoolError) -> i32 {
    match error {
        PoolError::Full { .. }
        | PoolError::NoFreeInode { .. }
        | PoolError::SharedMemory(_)
        | PoolError::TooLargeForLog { .. } => libc::ENOSPC,
        PoolError::ReadOnly { .. } => libc::EROFS,
        PoolError::Busy { .. }
        | PoolError::SoleWriter { .. }
        | PoolError::HasWriters { .. }
        | PoolError::BusyElsewhere { .. }
        | PoolError::MediaInUse { .. }
        | PoolError::UnknownSegment { .. }
        | PoolError::Locked { .. }
        | PoolError::AlreadyLocked { .. } => libc::EBUSY,
        PoolError::TooManyReservations { .. } => libc::EAGAIN,
        PoolError::TooManyRuns { .. } => libc::E2BIG,
        PoolError::Stalled { .. } => libc::ETIMEDOUT,
        PoolError::LocksLost => libc::EBADF,
        PoolError::CannotLock { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        PoolError::Parameter { .. } => libc::EINVAL,
        PoolError::Damaged { .. } => libc::EUCLEAN,
        _ => libc::EIO,
    }
}
