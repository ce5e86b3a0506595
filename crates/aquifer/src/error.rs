//! [`Error`]: one error for all of Aquifer, made from that of each crate by `?`.
//!
//! The errors of the crates stay as they are, and a program that acts on a particular one matches
//! it: `Error::Cache(CacheError::Exhausted { .. })`. What most programs ask of an error is answered
//! for all of them: its kind, the path and the offset concerned. These look through the nesting, so
//! a full disk is [`ErrorKind::NoSpace`] whether a device, a pool or a file of a pool met it.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use aquifer_cache::CacheError;
use aquifer_device::DeviceError;
use aquifer_fs::FsError;
use aquifer_mapper::{FaultCause, FlushCause, MapError};
use aquifer_object::ObjectError;
use aquifer_object::heap::HeapError;
use aquifer_pool::PoolError;
use aquifer_pool::broker::AccessError;
use aquifer_pool::format::StructureError;
use aquifer_pool::media::{MediaError, OpenError};
use aquifer_sys::shared_memory::SharedMemoryError;
use aquifer_vm::VmError;
use aquifer_vm::stitched::StitchError;
use rustix::io::Errno;

/// The result of an operation of Aquifer.
pub type Result<T> = std::result::Result<T, Error>;

/// The error of any operation of Aquifer.
///
/// ```
/// use aquifer::{Cache, ErrorKind, MemoryDevice};
///
/// fn last_byte(path: &str) -> aquifer::Result<u8> {
///     let cache = Cache::builder().budget_bytes(8 << 20).build()?; // a `CacheError`
///     let mapping = cache.open(path)?;
///     Ok(mapping.get(mapping.len() - 1)?)
/// }
///
/// let error = last_byte("/no/such/file").unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::NotFound);
/// assert_eq!(error.path().unwrap(), "/no/such/file");
/// assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::NotFound);
/// ```
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum Error {
    /// Of a cache, a mapping or pages.
    Cache(#[from] CacheError),
    /// Of a device.
    Device(#[from] DeviceError),
    /// Of a mapped file.
    Map(#[from] MapError),
    /// Of a pool.
    Pool(#[from] PoolError),
    /// Of a persistent object.
    Object(#[from] ObjectError),
    /// Of a heap in an object.
    Heap(#[from] HeapError),
    /// Of a file in a pool.
    Fs(#[from] FsError),
    /// Of a remote device.
    #[cfg(feature = "remote")]
    Remote(#[from] aquifer_remote::RemoteError),
}

/// What kind of failure an error is: what a program decides by.
///
/// Not [`io::ErrorKind`], which has no kind for a failed transfer (`EIO`), for data that may not be
/// durable, for damage, or for a forked process. Converts to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Nothing has this name, or there is nothing at the path.
    NotFound,
    /// The name is taken, or a directory is not empty.
    AlreadyExists,
    /// Not allowed: permissions, a wrong key, an immutable file.
    PermissionDenied,
    /// Opened or mapped for reading only, or on read-only media.
    ReadOnly,
    /// In use elsewhere; it works once the other use has ended.
    Busy,
    /// Another process holds what is needed, and makes no progress.
    TimedOut,
    /// A signal ended a wait; try again.
    Interrupted,
    /// The arguments are wrong: a range, a size, an option, a name, a file of another kind.
    InvalidInput,
    /// Not possible here: with this device, file system, kernel or version of the format.
    Unsupported,
    /// The device, file system, pool, object or heap is full.
    NoSpace,
    /// A limit of this process or machine is reached: memory, frames, mappings, pins. Release some,
    /// or raise the limit.
    LimitReached,
    /// The file or device is shorter than it was.
    Truncated,
    /// The bytes on the media are inconsistent.
    Damaged,
    /// A transfer failed.
    Io,
    /// Data written earlier may not be durable, and trying again does not make it so.
    NotDurable,
    /// The process is a fork of the one that opened it; open it again here.
    Forked,
    /// None of these.
    Other,
}

impl Error {
    /// The kind of failure, looked for along the causes.
    pub fn kind(&self) -> ErrorKind {
        self.chain().find_map(kind_of).unwrap_or(ErrorKind::Other)
    }

    /// The path concerned, if the error or one of its causes names one: in the file system, or in
    /// the pool for errors of its files.
    ///
    /// A device that is a file has its path as its name, with a slash in it; other devices have
    /// none.
    pub fn path(&self) -> Option<&Path> {
        self.chain().find_map(path_of)
    }

    /// The first byte concerned, if the error or one of its causes names one: of the file, device,
    /// view or heap.
    pub fn offset(&self) -> Option<u64> {
        self.chain().find_map(offset_of)
    }

    /// The error as a number of `errno(3)`, for programs and protocols that know nothing else.
    ///
    /// The number of the system's error or of the file system call, where one of the causes has one
    /// that means the same as [`Error::kind`]; otherwise one for the kind: `EUCLEAN` for damage, for
    /// example, `ENODATA` for a file that was truncated, and `ECHILD` in a forked process.
    ///
    /// ```
    /// let error = aquifer::Pool::open("/no/such/pool").err().unwrap();
    /// assert_eq!(aquifer::Error::from(error).errno(), 2); // ENOENT
    /// ```
    pub fn errno(&self) -> i32 {
        let kind = self.kind();
        self.chain()
            .find_map(number_of_cause)
            .filter(|&(_, means)| means == kind)
            .map_or_else(|| number_of_kind(kind).raw_os_error(), |(number, _)| number)
    }

    /// The error and its causes, from the outside in.
    fn chain(&self) -> impl Iterator<Item = Cause<'_>> {
        std::iter::successors(Some(self.inner()), |error| cause_of(*error))
    }

    fn inner(&self) -> Cause<'_> {
        match self {
            Error::Cache(error) => error,
            Error::Device(error) => error,
            Error::Map(error) => error,
            Error::Pool(error) => error,
            Error::Object(error) => error,
            Error::Heap(error) => error,
            Error::Fs(error) => error,
            #[cfg(feature = "remote")]
            Error::Remote(error) => error,
        }
    }
}

type Cause<'a> = &'a (dyn StdError + 'static);

/// The next cause. An error that only wraps another one passes that one's `source` on as its own,
/// and would skip it.
fn cause_of(error: Cause<'_>) -> Option<Cause<'_>> {
    if let Some(error) = error.downcast_ref::<CacheError>() {
        match error {
            CacheError::Open { source } => return Some(source),
            CacheError::Vm(source) => return Some(source),
            _ => {}
        }
    } else if let Some(MapError::Memory(source)) = error.downcast_ref() {
        return Some(source);
    } else if let Some(error) = error.downcast_ref::<PoolError>() {
        match error {
            PoolError::Media(source) => return Some(source),
            PoolError::NotOpened(source) => return Some(source),
            PoolError::Access(source) => return Some(source),
            PoolError::Structure(source) => return Some(source),
            PoolError::SharedMemory(source) => return Some(source),
            _ => {}
        }
    } else if let Some(ObjectError::Pool(source)) = error.downcast_ref() {
        return Some(source);
    } else if let Some(error) = error.downcast_ref::<FsError>() {
        match error {
            FsError::Pool(source) => return Some(source),
            FsError::Stitch(source) => return Some(source),
            _ => {}
        }
    } else if let Some(StitchError::Vm(source)) = error.downcast_ref() {
        return Some(source);
    } else if let Some(error) = error.downcast_ref::<io::Error>() {
        // A device over a mapping of a cache, for example, wraps the cache's error so.
        return error.get_ref().map(|inner| inner as Cause<'_>);
    } else if let Some(error) = error.downcast_ref::<Arc<dyn StdError + Send + Sync>>() {
        // Of `DeviceError::Other`.
        return Some(&**error);
    } else if let Some(error) = error.downcast_ref::<Error>() {
        return Some(error.inner());
    }
    error.source()
}

/// The kind of an error by itself; `None` if its cause decides.
fn kind_of(error: Cause<'_>) -> Option<ErrorKind> {
    None.or_else(|| error.downcast_ref().and_then(kind_of_cache))
        .or_else(|| error.downcast_ref().and_then(kind_of_device))
        .or_else(|| error.downcast_ref().and_then(kind_of_map))
        .or_else(|| kind_of_remote(error))
        .or_else(|| error.downcast_ref().and_then(kind_of_pool))
        .or_else(|| error.downcast_ref().and_then(kind_of_structure))
        .or_else(|| error.downcast_ref().and_then(kind_of_shared_memory))
        .or_else(|| error.downcast_ref().and_then(kind_of_media))
        .or_else(|| error.downcast_ref().and_then(kind_of_access))
        .or_else(|| error.downcast_ref().and_then(kind_of_object))
        .or_else(|| error.downcast_ref().and_then(kind_of_heap))
        .or_else(|| error.downcast_ref().and_then(kind_of_fs))
        .or_else(|| error.downcast_ref().and_then(kind_of_vm))
        .or_else(|| error.downcast_ref().and_then(kind_of_stitching))
        .or_else(|| error.downcast_ref().and_then(kind_of_system))
}

fn kind_of_cache(error: &CacheError) -> Option<ErrorKind> {
    Some(match error {
        CacheError::Budget { .. }
        | CacheError::PageSize { .. }
        | CacheError::Alignment { .. }
        | CacheError::Empty { .. }
        | CacheError::RowLayout { .. }
        | CacheError::RowOutOfRange { .. }
        | CacheError::OutOfBounds { .. } => ErrorKind::InvalidInput,
        CacheError::ReadOnly { .. } => ErrorKind::ReadOnly,
        CacheError::Sync { .. } => ErrorKind::NotDurable,
        CacheError::BackendUnsupported { .. } | CacheError::UnderItself { .. } => {
            ErrorKind::Unsupported
        }
        CacheError::Exhausted { .. }
        | CacheError::TooManyPins { .. }
        | CacheError::ArenaFull { .. } => ErrorKind::LimitReached,
        CacheError::AlreadyAttached { .. } => ErrorKind::Busy,
        CacheError::Forked => ErrorKind::Forked,
        error @ CacheError::MappedAccess { .. } if error.is_truncation() => ErrorKind::Truncated,
        CacheError::MappedAccess { .. } => ErrorKind::Io,
        // Of a page or a row, which was inside the device when it was mapped.
        CacheError::Load { source: DeviceError::OutOfBounds { .. }, .. } => ErrorKind::Truncated,
        _ => return None,
    })
}

fn kind_of_device(error: &DeviceError) -> Option<ErrorKind> {
    Some(match error {
        DeviceError::ShortRead { .. } => ErrorKind::Truncated,
        DeviceError::ShortWrite { .. } | DeviceError::Unfinished { .. } => ErrorKind::Io,
        DeviceError::OutOfBounds { .. } | DeviceError::Misaligned { .. } => ErrorKind::InvalidInput,
        DeviceError::ReadOnly => ErrorKind::ReadOnly,
        DeviceError::Unsuitable { .. } => ErrorKind::Unsupported,
        _ => return None,
    })
}

#[cfg(feature = "remote")]
fn kind_of_remote(error: Cause<'_>) -> Option<ErrorKind> {
    use aquifer_remote::RemoteError;

    Some(match error.downcast_ref()? {
        RemoteError::InvalidUrl { .. } | RemoteError::InvalidOption { .. } => {
            ErrorKind::InvalidInput
        }
        RemoteError::Unversioned { .. } | RemoteError::RangesIgnored { .. } => {
            ErrorKind::Unsupported
        }
        RemoteError::NotFound { .. } | RemoteError::NoBucket { .. } => ErrorKind::NotFound,
        RemoteError::Denied { .. } | RemoteError::NoCredentials { .. } => {
            ErrorKind::PermissionDenied
        }
        RemoteError::Exists { .. } => ErrorKind::AlreadyExists,
        RemoteError::Cancelled { .. } => ErrorKind::Interrupted,
        RemoteError::TimedOut { .. } => ErrorKind::TimedOut,
        RemoteError::Changed { .. }
        | RemoteError::BadAnswer { .. }
        | RemoteError::Unavailable { .. }
        | RemoteError::Tier { .. }
        | RemoteError::Stopped { .. } => ErrorKind::Io,
        _ => return None,
    })
}

#[cfg(not(feature = "remote"))]
fn kind_of_remote(_error: Cause<'_>) -> Option<ErrorKind> {
    None
}

fn kind_of_map(error: &MapError) -> Option<ErrorKind> {
    Some(match error {
        MapError::TooLong { .. } | MapError::TooManyMappings { .. } => ErrorKind::LimitReached,
        MapError::NotMappable { .. } | MapError::SharedRefused { .. } => ErrorKind::Unsupported,
        MapError::Range { .. } | MapError::OutsideView { .. } | MapError::GrowBeyond { .. } => {
            ErrorKind::InvalidInput
        }
        MapError::Fault { cause: FaultCause::Truncated, .. }
        | MapError::Flush { cause: FlushCause::Truncated, .. } => ErrorKind::Truncated,
        MapError::Fault { cause: FaultCause::NoSpace, .. }
        | MapError::Flush { cause: FlushCause::NoSpace, .. } => ErrorKind::NoSpace,
        MapError::Flush { cause: FlushCause::Gone(_), .. } => ErrorKind::NotDurable,
        MapError::Fault { .. } | MapError::Flush { .. } => ErrorKind::Io,
        MapError::ReadOnly { .. } => ErrorKind::ReadOnly,
        MapError::Forked => ErrorKind::Forked,
        _ => return None,
    })
}

fn kind_of_pool(error: &PoolError) -> Option<ErrorKind> {
    Some(match error {
        PoolError::NotAPool { .. } | PoolError::Parameter { .. } => ErrorKind::InvalidInput,
        PoolError::FutureVersion { .. }
        | PoolError::LaterFeatures { .. }
        | PoolError::Domain { .. } => ErrorKind::Unsupported,
        PoolError::Truncated { .. } => ErrorKind::Truncated,
        PoolError::Damaged { .. } | PoolError::DamagedLog { .. } => ErrorKind::Damaged,
        PoolError::ReadOnly { .. } => ErrorKind::ReadOnly,
        PoolError::Busy { .. }
        | PoolError::SoleWriter { .. }
        | PoolError::HasWriters { .. }
        | PoolError::MediaInUse { .. }
        | PoolError::BusyElsewhere { .. }
        | PoolError::UnknownSegment { .. }
        | PoolError::Locked { .. }
        | PoolError::AlreadyLocked { .. } => ErrorKind::Busy,
        PoolError::Full { .. }
        | PoolError::NoFreeInode { .. }
        | PoolError::TooLargeForLog { .. } => ErrorKind::NoSpace,
        PoolError::TooManyReservations { .. }
        | PoolError::TooManyRuns { .. }
        | PoolError::TooManyPins { .. }
        | PoolError::TooMuchPinned { .. }
        | PoolError::TooManyProcesses { .. } => ErrorKind::LimitReached,
        // The system's error is that of the first failure, not of this call.
        PoolError::Failed { .. } => ErrorKind::NotDurable,
        PoolError::Stalled { .. } => ErrorKind::TimedOut,
        PoolError::Forked => ErrorKind::Forked,
        _ => return None,
    })
}

fn kind_of_structure(error: &StructureError) -> Option<ErrorKind> {
    Some(match error {
        StructureError::Damaged { .. } => ErrorKind::Damaged,
        StructureError::Exists { .. } => ErrorKind::AlreadyExists,
        StructureError::NameTooLong { .. }
        | StructureError::BadName { .. }
        | StructureError::FileTooLarge => ErrorKind::InvalidInput,
        StructureError::TooManyCollisions => ErrorKind::LimitReached,
        _ => return None,
    })
}

fn kind_of_shared_memory(error: &SharedMemoryError) -> Option<ErrorKind> {
    Some(match error {
        SharedMemoryError::NoSpace { .. } => ErrorKind::LimitReached,
        SharedMemoryError::Exists { .. } => ErrorKind::AlreadyExists,
        SharedMemoryError::Missing { .. } => ErrorKind::NotFound,
        SharedMemoryError::NoPermission { .. } => ErrorKind::PermissionDenied,
        SharedMemoryError::BadName { .. } => ErrorKind::InvalidInput,
        _ => return None,
    })
}

fn kind_of_media(error: &OpenError) -> Option<ErrorKind> {
    Some(match error {
        OpenError::Missing { .. } => ErrorKind::NotFound,
        OpenError::NotStorage { .. } | OpenError::BadDomain { .. } => ErrorKind::Unsupported,
        OpenError::Empty { .. } | OpenError::BadLength { .. } => ErrorKind::InvalidInput,
        OpenError::NoPermission { .. } => ErrorKind::PermissionDenied,
        OpenError::ReadOnlyMedia { .. } => ErrorKind::ReadOnly,
        OpenError::Exists { .. } => ErrorKind::AlreadyExists,
        OpenError::InUse { .. } => ErrorKind::Busy,
        OpenError::NoSpace { .. } => ErrorKind::NoSpace,
        _ => return None,
    })
}

fn kind_of_access(error: &AccessError) -> Option<ErrorKind> {
    Some(match error {
        AccessError::NoBroker { .. } => ErrorKind::NotFound,
        AccessError::WrongKey { .. }
        | AccessError::NotTheOwner { .. }
        | AccessError::Refused { .. } => ErrorKind::PermissionDenied,
        AccessError::OtherPool { .. } | AccessError::BadKey { .. } => ErrorKind::InvalidInput,
        AccessError::NoAnswer { .. } => ErrorKind::Unsupported,
        AccessError::Ended { .. } => ErrorKind::Interrupted,
        AccessError::BrokerRuns { .. } | AccessError::SocketTaken { .. } => ErrorKind::Busy,
        _ => return None,
    })
}

fn kind_of_object(error: &ObjectError) -> Option<ErrorKind> {
    Some(match error {
        ObjectError::NotFound { .. }
        | ObjectError::Destroyed { .. }
        | ObjectError::NotAttached { .. } => ErrorKind::NotFound,
        ObjectError::Exists { .. } => ErrorKind::AlreadyExists,
        ObjectError::WrongKey { .. } | ObjectError::ReadKeyForWriting { .. } => {
            ErrorKind::PermissionDenied
        }
        ObjectError::Attached { .. }
        | ObjectError::AttachedHere { .. }
        | ObjectError::AddressTaken { .. } => ErrorKind::Busy,
        ObjectError::AddressOfAnother { .. }
        | ObjectError::MustMove { .. }
        | ObjectError::NotRelocatable { .. }
        | ObjectError::HeapCannotShrink { .. }
        | ObjectError::HoldsHeap { .. }
        | ObjectError::NoHeap { .. }
        | ObjectError::OutsideObject { .. }
        | ObjectError::SeveralPools
        | ObjectError::Parameter { .. } => ErrorKind::InvalidInput,
        ObjectError::NoRoomForShadow { .. } => ErrorKind::NoSpace,
        ObjectError::Unsynced { .. } => ErrorKind::NotDurable,
        ObjectError::AttachedForReading { .. } => ErrorKind::ReadOnly,
        ObjectError::Forked => ErrorKind::Forked,
        _ => return None,
    })
}

fn kind_of_heap(error: &HeapError) -> Option<ErrorKind> {
    Some(match error {
        HeapError::Version { .. } => ErrorKind::Unsupported,
        HeapError::Length { .. } => ErrorKind::Truncated,
        HeapError::AlreadyOpen { .. } => ErrorKind::Busy,
        HeapError::ReadOnly => ErrorKind::ReadOnly,
        HeapError::Forked => ErrorKind::Forked,
        HeapError::Full { .. } => ErrorKind::NoSpace,
        HeapError::TooManyZones { .. } => ErrorKind::LimitReached,
        HeapError::Damaged { .. } => ErrorKind::Damaged,
        HeapError::NoRoot => ErrorKind::NotFound,
        HeapError::RootExists { .. } => ErrorKind::AlreadyExists,
        _ => ErrorKind::InvalidInput,
    })
}

fn kind_of_fs(error: &FsError) -> Option<ErrorKind> {
    Some(match error {
        FsError::Pool(_) | FsError::Stitch(_) => return None,
        FsError::Damaged { .. } => ErrorKind::Damaged,
        FsError::LayoutChanged => ErrorKind::Truncated,
        FsError::HandOver { source } if source.kind() == io::ErrorKind::TimedOut => {
            ErrorKind::TimedOut
        }
        FsError::HandOver { .. } => ErrorKind::Io,
        FsError::NoAttribute { .. } | FsError::Stale { .. } => ErrorKind::NotFound,
        FsError::TooManyLinks { .. } | FsError::TooFragmented { .. } => ErrorKind::LimitReached,
        // The rest have the error number of the system call that fails in the same way; those that
        // the standard library has no kind for are wrong arguments.
        other => match kind_of_io(io::Error::from_raw_os_error(other.errno()).kind()) {
            ErrorKind::Io => ErrorKind::InvalidInput,
            kind => kind,
        },
    })
}

fn kind_of_vm(error: &VmError) -> Option<ErrorKind> {
    Some(match error {
        VmError::Reserve { .. } | VmError::ArenaFull { .. } | VmError::WindowFull { .. } => {
            ErrorKind::LimitReached
        }
        VmError::FixedRange { .. } => ErrorKind::InvalidInput,
        VmError::AddressTaken { .. } => ErrorKind::Busy,
        VmError::SanitizerAddress { .. } => ErrorKind::Unsupported,
        VmError::Forked => ErrorKind::Forked,
        _ => return None,
    })
}

fn kind_of_stitching(error: &StitchError) -> Option<ErrorKind> {
    match error {
        StitchError::TooManyMappings { .. } => Some(ErrorKind::LimitReached),
        StitchError::Forked => Some(ErrorKind::Forked),
        _ => None,
    }
}

fn kind_of_system(error: &io::Error) -> Option<ErrorKind> {
    match error.get_ref() {
        // One of our errors inside decides; for any other the kind that was given to it.
        Some(inner)
            if std::iter::successors(Some(inner as Cause<'_>), |e| cause_of(*e))
                .any(|cause| kind_of(cause).is_some()) =>
        {
            None
        }
        _ => Some(kind_of_io(error.kind())),
    }
}

fn kind_of_io(kind: io::ErrorKind) -> ErrorKind {
    use io::ErrorKind as Io;
    match kind {
        Io::NotFound => ErrorKind::NotFound,
        // POSIX lets the removal of a directory that is not empty fail with either.
        Io::AlreadyExists | Io::DirectoryNotEmpty => ErrorKind::AlreadyExists,
        Io::PermissionDenied => ErrorKind::PermissionDenied,
        Io::ReadOnlyFilesystem => ErrorKind::ReadOnly,
        Io::ResourceBusy | Io::WouldBlock | Io::ExecutableFileBusy | Io::AddrInUse => {
            ErrorKind::Busy
        }
        Io::TimedOut => ErrorKind::TimedOut,
        Io::Interrupted => ErrorKind::Interrupted,
        Io::InvalidInput
        | Io::InvalidFilename
        | Io::NotADirectory
        | Io::IsADirectory
        | Io::CrossesDevices
        | Io::FileTooLarge
        | Io::ArgumentListTooLong => ErrorKind::InvalidInput,
        Io::Unsupported => ErrorKind::Unsupported,
        Io::StorageFull | Io::QuotaExceeded => ErrorKind::NoSpace,
        Io::OutOfMemory | Io::TooManyLinks => ErrorKind::LimitReached,
        Io::UnexpectedEof | Io::StaleNetworkFileHandle => ErrorKind::Truncated,
        Io::InvalidData => ErrorKind::Damaged,
        // `EIO` has no kind of its own there.
        _ => ErrorKind::Io,
    }
}

/// The number that a cause has by itself, and the kind that it stands for.
fn number_of_cause(error: Cause<'_>) -> Option<(i32, ErrorKind)> {
    if let Some(error) = error.downcast_ref::<FsError>() {
        return kind_of_fs(error).map(|kind| (error.errno(), kind));
    }
    // 0 is no error: a device may make one of an `errno` that was not set.
    let number = error.downcast_ref::<io::Error>()?.raw_os_error().filter(|&number| number > 0)?;
    Some((number, kind_of_io(io::Error::from_raw_os_error(number).kind())))
}

fn number_of_kind(kind: ErrorKind) -> Errno {
    match kind {
        ErrorKind::NotFound => Errno::NOENT,
        ErrorKind::AlreadyExists => Errno::EXIST,
        ErrorKind::PermissionDenied => Errno::ACCESS,
        ErrorKind::ReadOnly => Errno::ROFS,
        ErrorKind::Busy => Errno::BUSY,
        ErrorKind::TimedOut => Errno::TIMEDOUT,
        ErrorKind::Interrupted => Errno::INTR,
        ErrorKind::InvalidInput => Errno::INVAL,
        ErrorKind::Unsupported => Errno::OPNOTSUPP,
        ErrorKind::NoSpace => Errno::NOSPC,
        ErrorKind::LimitReached => Errno::NOMEM,
        ErrorKind::Truncated => Errno::NODATA,
        ErrorKind::Damaged => Errno::UCLEAN,
        ErrorKind::Io | ErrorKind::NotDurable => Errno::IO,
        ErrorKind::Forked => Errno::CHILD,
        ErrorKind::Other => Errno::PROTO,
    }
}

fn path_of(error: Cause<'_>) -> Option<&Path> {
    if let Some(error) = error.downcast_ref::<CacheError>() {
        return match error {
            CacheError::Alignment { device, .. }
            | CacheError::Empty { device }
            | CacheError::ReadOnly { device }
            | CacheError::Load { device, .. }
            | CacheError::WriteBack { device, .. }
            | CacheError::Sync { device, .. }
            | CacheError::Device { device, .. }
            | CacheError::BackendUnsupported { device, .. }
            | CacheError::AlreadyAttached { device, .. }
            | CacheError::MappedAccess { device, .. } => {
                // A remote device's name is a URL.
                (device.contains('/') && !device.contains("://")).then(|| Path::new(device))
            }
            _ => None,
        };
    }
    if let Some(error) = error.downcast_ref::<DeviceError>() {
        return match error {
            DeviceError::Unsuitable { path, .. } | DeviceError::Open { path, .. } => {
                Some(Path::new(path))
            }
            _ => None,
        };
    }
    if let Some(error) = error.downcast_ref::<MapError>() {
        return match error {
            MapError::Open { path, .. }
            | MapError::Read { path, .. }
            | MapError::TooLong { path, .. }
            | MapError::NotMappable { path, .. }
            | MapError::Range { path, .. }
            | MapError::TooManyMappings { path, .. }
            | MapError::Map { path, .. }
            | MapError::SharedRefused { path, .. }
            | MapError::Fault { path, .. }
            | MapError::ReadOnly { path }
            | MapError::Flush { path, .. }
            | MapError::Allocate { path, .. }
            | MapError::GrowBeyond { path, .. }
            | MapError::Grow { path, .. } => Some(path),
            _ => None,
        };
    }
    if let Some(error) = error.downcast_ref::<PoolError>() {
        return match error {
            PoolError::Open { path, .. }
            | PoolError::NotAPool { path }
            | PoolError::FutureVersion { path, .. }
            | PoolError::LaterFeatures { path, .. }
            | PoolError::Truncated { path, .. }
            | PoolError::Damaged { path, .. }
            | PoolError::DamagedLog { path, .. }
            | PoolError::ReadOnly { path, .. }
            | PoolError::Busy { path }
            | PoolError::SoleWriter { path, .. }
            | PoolError::HasWriters { path, .. }
            | PoolError::MediaInUse { path }
            | PoolError::BusyElsewhere { path, .. }
            | PoolError::UnknownSegment { path, .. }
            | PoolError::Domain { path, .. } => Some(path),
            _ => None,
        };
    }
    if let Some(error) = error.downcast_ref::<OpenError>() {
        return match error {
            OpenError::Missing { path }
            | OpenError::NotStorage { path, .. }
            | OpenError::Empty { path }
            | OpenError::NoPermission { path, .. }
            | OpenError::ReadOnlyMedia { path }
            | OpenError::Exists { path }
            | OpenError::InUse { path }
            | OpenError::NoSpace { path, .. }
            | OpenError::BadLength { path, .. }
            | OpenError::BadDomain { path, .. } => Some(path),
            _ => None,
        };
    }
    if let Some(error) = error.downcast_ref::<FsError>() {
        return error.path();
    }
    error.downcast_ref::<MediaError>().map(|error| &*error.path)
}

fn offset_of(error: Cause<'_>) -> Option<u64> {
    if let Some(error) = error.downcast_ref::<CacheError>() {
        return match error {
            CacheError::OutOfBounds { offset_bytes, .. }
            | CacheError::Load { offset_bytes, .. }
            | CacheError::WriteBack { offset_bytes, .. }
            | CacheError::TooManyPins { offset_bytes, .. }
            | CacheError::MappedAccess { offset_bytes, .. } => Some(*offset_bytes),
            _ => None,
        };
    }
    if let Some(error) = error.downcast_ref::<DeviceError>() {
        return match error {
            // Of a transfer: a sync and an inspection concern the whole device.
            DeviceError::Io { offset_bytes, len_bytes: 1.., .. }
            | DeviceError::ShortRead { offset_bytes, .. }
            | DeviceError::ShortWrite { offset_bytes, .. }
            | DeviceError::Unfinished { offset_bytes, .. }
            | DeviceError::OutOfBounds { offset_bytes, .. }
            | DeviceError::Misaligned { offset_bytes, .. }
            | DeviceError::Other { offset_bytes, len_bytes: 1.., .. } => Some(*offset_bytes),
            _ => None,
        };
    }
    if let Some(error) = error.downcast_ref::<MapError>() {
        return match error {
            MapError::Range { start, .. } | MapError::OutsideView { start, .. } => Some(*start),
            MapError::Fault { offset_bytes, .. } => Some(*offset_bytes),
            MapError::Flush { range, .. } | MapError::Allocate { range, .. } => Some(range.start),
            _ => None,
        };
    }
    if let Some(error) = error.downcast_ref::<FsError>() {
        return match error {
            FsError::OutsideFile { range, .. } | FsError::OutsideView { range, .. } => {
                Some(range.start)
            }
            _ => None,
        };
    }
    if let Some(HeapError::Damaged { offset_bytes, .. }) = error.downcast_ref() {
        return Some(*offset_bytes);
    }
    error.downcast_ref::<MediaError>().map(|error| error.offset_bytes)
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            ErrorKind::NotFound => "not found",
            ErrorKind::AlreadyExists => "already exists",
            ErrorKind::PermissionDenied => "permission denied",
            ErrorKind::ReadOnly => "read-only",
            ErrorKind::Busy => "in use",
            ErrorKind::TimedOut => "timed out",
            ErrorKind::Interrupted => "interrupted",
            ErrorKind::InvalidInput => "invalid input",
            ErrorKind::Unsupported => "unsupported",
            ErrorKind::NoSpace => "no space",
            ErrorKind::LimitReached => "limit reached",
            ErrorKind::Truncated => "truncated",
            ErrorKind::Damaged => "damaged",
            ErrorKind::Io => "I/O error",
            ErrorKind::NotDurable => "not durable",
            ErrorKind::Forked => "forked",
            ErrorKind::Other => "other error",
        })
    }
}

impl From<ErrorKind> for io::ErrorKind {
    fn from(kind: ErrorKind) -> io::ErrorKind {
        match kind {
            ErrorKind::NotFound => io::ErrorKind::NotFound,
            ErrorKind::AlreadyExists => io::ErrorKind::AlreadyExists,
            ErrorKind::PermissionDenied => io::ErrorKind::PermissionDenied,
            ErrorKind::ReadOnly => io::ErrorKind::ReadOnlyFilesystem,
            ErrorKind::Busy => io::ErrorKind::ResourceBusy,
            ErrorKind::TimedOut => io::ErrorKind::TimedOut,
            ErrorKind::Interrupted => io::ErrorKind::Interrupted,
            ErrorKind::InvalidInput => io::ErrorKind::InvalidInput,
            ErrorKind::Unsupported => io::ErrorKind::Unsupported,
            ErrorKind::NoSpace => io::ErrorKind::StorageFull,
            ErrorKind::LimitReached => io::ErrorKind::OutOfMemory,
            ErrorKind::Truncated => io::ErrorKind::UnexpectedEof,
            ErrorKind::Damaged => io::ErrorKind::InvalidData,
            ErrorKind::Io | ErrorKind::NotDurable | ErrorKind::Forked | ErrorKind::Other => {
                io::ErrorKind::Other
            }
        }
    }
}

impl From<Error> for io::Error {
    /// Converts to an error of the nearest kind, with the same message.
    fn from(error: Error) -> io::Error {
        io::Error::new(error.kind().into(), error)
    }
}
