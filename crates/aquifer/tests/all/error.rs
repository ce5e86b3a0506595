//! One error for all crates: its kind, path, offset and source, through the nesting.

use std::error::Error as _;
use std::io;
use std::path::Path;
use std::sync::Arc;

use aquifer::device::{Fault, FaultRule, FaultTarget, Faulty};
use aquifer::mapper::FlushCause;
use aquifer::remote::RemoteError;
use aquifer::{
    Cache, CacheError, Device, DeviceError, Error, ErrorKind, FileAccess, Files, FsError,
    IoOperation, MapError, Mapper, MemoryDevice, ObjectError, Objects, Pool, PoolError, Result,
};

const PAGE: u64 = 4096;

fn cache() -> Cache {
    Cache::builder().budget_bytes(8 << 20).build().unwrap()
}

fn kind(error: impl Into<Error>) -> ErrorKind {
    error.into().kind()
}

#[test]
fn a_truncated_file_is_the_same_kind_everywhere() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    std::fs::write(&path, vec![1; 4 * PAGE as usize]).unwrap();
    let map = |backend| {
        let options = aquifer::MapOptions::new().backend(backend);
        cache().map_with(aquifer::FileDevice::open(&path).unwrap(), options).unwrap()
    };
    let (mapping, user) = (map(aquifer::Backend::Kernel), map(aquifer::Backend::User));
    let view = Mapper::builder().build().unwrap().map(&path, FileAccess::Read, ..).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(PAGE).unwrap();
    let errors: [Error; 3] = [
        mapping.get::<u8>(3 * PAGE).unwrap_err().into(),
        user.get::<u8>(3 * PAGE).unwrap_err().into(),
        view.get::<u8>(3 * PAGE).unwrap_err().into(),
    ];
    for error in errors {
        assert_eq!((error.kind(), error.errno()), (ErrorKind::Truncated, 61), "{error:?}");
    }
}

#[test]
fn a_missing_file_is_the_same_kind_everywhere() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nothing");
    let mapper = Mapper::builder().build().unwrap();
    let errors: [Error; 4] = [
        cache().open(&path).unwrap_err().into(),
        mapper.map(&path, FileAccess::Read, ..).unwrap_err().into(),
        Pool::open(&path).err().unwrap().into(),
        Files::open(&path).err().unwrap().into(),
    ];
    for error in errors {
        assert_eq!((error.kind(), error.path()), (ErrorKind::NotFound, Some(&*path)), "{error:?}");
        assert_eq!(io::Error::from(error).kind(), io::ErrorKind::NotFound);
    }
}

#[test]
fn a_failed_transfer_has_its_offset_and_the_device_as_its_source() {
    let device = Faulty::new(MemoryDevice::new(16 * PAGE as usize).unwrap());
    device.control().inject(FaultRule::new(FaultTarget::Reads, Fault::Errno(libc::EIO)));
    let mapping = cache().map_mut(device).unwrap();
    let error = Error::from(mapping.touch(5 * PAGE).unwrap_err());
    assert_eq!((error.kind(), error.offset()), (ErrorKind::Io, Some(5 * PAGE)));
    assert_eq!(error.path(), None, "memory has no path");
    assert!(error.source().unwrap().is::<DeviceError>());
    assert!(matches!(&error, Error::Cache(inner) if inner.to_string() == error.to_string()));
}

#[test]
fn a_device_that_fails_with_number_0_has_failed() {
    let device = Faulty::new(MemoryDevice::new(16 * PAGE as usize).unwrap());
    device.control().inject(FaultRule::new(FaultTarget::Reads, Fault::Errno(0)));
    let mapping = cache().map_mut(device).unwrap();
    let error = Error::from(mapping.touch(5 * PAGE).unwrap_err());
    assert_eq!((error.kind(), error.errno()), (ErrorKind::Io, libc::EIO));
}

/// A device whose data is a mapping of another cache passes that one's error on.
#[test]
fn an_error_inside_an_io_error_decides() {
    let exhausted = CacheError::Exhausted { pinned: 3, unwritable: 0 };
    let source = DeviceError::Io {
        operation: IoOperation::Read,
        offset_bytes: PAGE,
        len_bytes: 4096,
        source: io::Error::other(exhausted),
    };
    let error = CacheError::Load { device: "/data/file".into(), offset_bytes: PAGE, source };
    assert_eq!(kind(error), ErrorKind::LimitReached);
    let strange = io::Error::new(io::ErrorKind::PermissionDenied, "not ours");
    let error = CacheError::Load {
        device: "/data/file".into(),
        offset_bytes: PAGE,
        source: DeviceError::Open { path: "/data/other".into(), source: strange },
    };
    let error = Error::from(error);
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert_eq!(error.path(), Some(Path::new("/data/file")), "the outermost path");
}

#[test]
fn what_looks_like_a_failed_transfer_and_is_worse_has_its_own_kind() {
    let lost = CacheError::Sync {
        device: "/data/file".into(),
        source: DeviceError::Io {
            operation: IoOperation::Sync,
            offset_bytes: 0,
            len_bytes: 0,
            source: io::Error::from_raw_os_error(libc::EIO),
        },
    };
    let lost = Error::from(lost);
    assert_eq!((lost.kind(), lost.offset()), (ErrorKind::NotDurable, None));
    let failed = PoolError::Failed { what: "a write", source: io::ErrorKind::StorageFull.into() };
    assert_eq!(kind(FsError::from(failed)), ErrorKind::NotDurable);
    assert_eq!(kind(ObjectError::from(PoolError::Forked)), ErrorKind::Forked);
    let flush = |cause| MapError::Flush { path: "/data/file".into(), range: 0..PAGE, cause };
    assert_eq!(kind(flush(FlushCause::Gone(libc::EIO))), ErrorKind::NotDurable);
    assert_eq!(kind(flush(FlushCause::Lost(libc::EIO))), ErrorKind::Io, "flushed again");
}

#[test]
fn errors_of_a_pool_are_found_through_objects_and_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data.pool");
    let pool = || -> Result<Pool> { Ok(Pool::create(&path, 4 << 20)?) };
    let objects = Objects::new(pool().unwrap());
    let create = |bytes| objects.create("one", bytes);
    assert_eq!(kind(create(1 << 30).unwrap_err()), ErrorKind::NoSpace);
    create(4096).unwrap();
    assert_eq!(kind(create(4096).unwrap_err()), ErrorKind::AlreadyExists);
    let missing = objects.attach("two").err().unwrap();
    assert_eq!(kind(missing), ErrorKind::NotFound);
    drop(objects);

    let again = pool().err().unwrap();
    assert_eq!((again.kind(), again.path()), (ErrorKind::AlreadyExists, Some(&*path)));
    let files = Files::open(&path).unwrap();
    files.create_dir("/dir").unwrap();
    files.create_file("/dir/file").unwrap();
    let removed = Error::from(files.remove_dir("/dir").unwrap_err());
    assert_eq!(
        (removed.kind(), removed.path()),
        (ErrorKind::AlreadyExists, Some(Path::new("/dir")))
    );
    let file = files.open_file("/dir/file").unwrap();
    assert_eq!(kind(file.write_at(b"text", 0).unwrap_err()), ErrorKind::InvalidInput);
    let outside = Error::from(file.view(7..9).err().unwrap());
    assert_eq!((outside.kind(), outside.offset()), (ErrorKind::InvalidInput, Some(7)));
}

#[test]
fn a_truncated_file_and_a_store_to_what_is_read_only() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4 * PAGE).unwrap();
    let mapper = Mapper::builder().build().unwrap();
    let view = mapper.map(file.path(), FileAccess::Read, ..).unwrap();
    let stored = Error::from(view.write_all_at(b"text", 0).unwrap_err());
    assert_eq!((stored.kind(), stored.path()), (ErrorKind::ReadOnly, Some(file.path())));
    file.as_file().set_len(PAGE).unwrap();
    let gone = Error::from(view.read_exact_at(&mut [0; 8], 2 * PAGE).unwrap_err());
    assert_eq!((gone.kind(), gone.offset()), (ErrorKind::Truncated, Some(2 * PAGE)));
    assert!(matches!(gone, Error::Map(MapError::Fault { .. })));
    let memory = MemoryDevice::from_bytes(&[0; 4096]).unwrap();
    assert_eq!(kind(memory.write_at(PAGE, b"behind").unwrap_err()), ErrorKind::InvalidInput);
}

fn number(error: impl Into<Error>) -> i32 {
    error.into().errno()
}

#[test]
fn the_number_is_the_systems_where_it_means_the_same() {
    assert_eq!(number(cache().open("/no/such/file").unwrap_err()), libc::ENOENT);
    let device = Faulty::new(MemoryDevice::new(16 * PAGE as usize).unwrap());
    for (errno, expected) in
        [(libc::EIO, libc::EIO), (libc::ENODEV, libc::ENODEV), (libc::ENOSPC, libc::ENOSPC)]
    {
        let rule = FaultRule::new(FaultTarget::Reads, Fault::Errno(errno));
        let rule = device.control().inject(rule);
        let source = device.read_at(0, &mut [0; 512]).unwrap_err();
        device.control().remove(rule);
        let error = CacheError::Load { device: "d".into(), offset_bytes: 0, source };
        assert_eq!(number(error), expected);
    }
    // What could not be made durable is not cured by more space.
    let source = DeviceError::Io {
        operation: IoOperation::Sync,
        offset_bytes: 0,
        len_bytes: 0,
        source: io::Error::from_raw_os_error(libc::ENOSPC),
    };
    assert_eq!(number(CacheError::Sync { device: "d".into(), source }), libc::EIO);
}

#[test]
fn each_kind_has_a_number() {
    assert_eq!(number(CacheError::Forked), libc::ECHILD);
    assert_eq!(number(CacheError::Exhausted { pinned: 1, unwritable: 0 }), libc::ENOMEM);
    assert_eq!(number(CacheError::ReadOnly { device: "d".into() }), libc::EROFS);
    assert_eq!(number(FsError::Locked), libc::EWOULDBLOCK);
    assert_eq!(number(FsError::OtherPool), libc::EXDEV);
    assert_eq!(number(FsError::Pool(PoolError::Forked)), libc::ECHILD);
}

/// A device's own error decides the kind; a URL is no path.
#[test]
fn a_devices_own_error_is_found_in_a_caches() {
    let range = 0..10;
    let missing = || {
        let url = "s3://bucket/key".into();
        RemoteError::NotFound { url, range: range.clone() }
    };
    let through_cache = CacheError::Load {
        device: "s3://bucket/key".into(),
        offset_bytes: PAGE,
        source: DeviceError::Other {
            operation: IoOperation::Read,
            offset_bytes: PAGE + 1,
            len_bytes: 10,
            source: Arc::new(missing()),
        },
    };
    for error in [Error::from(missing()), through_cache.into()] {
        assert_eq!((error.kind(), error.errno(), error.path()), (ErrorKind::NotFound, 2, None));
    }
    let changed = RemoteError::Changed { url: "s3://bucket/key".into(), range, what: "" };
    assert_eq!(kind(changed), ErrorKind::Io);
}
