//! Creating media.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use aquifer_crashkit::unguarded::UnguardedMedia;
use aquifer_pool::media::PersistenceDomain::{Dax, PageCache, Volatile};
use aquifer_pool::media::{CreateOptions, OpenError, create};
use aquifer_sys::lock::{self, LockKind, LockRange};

use super::forms::memory_directory;

const LEN_BYTES: u64 = 5_000_000;

#[test]
fn new_media_are_zero_and_allocated() {
    let mut places = vec![std::env::temp_dir()];
    places.extend(memory_directory().map(Into::into));
    for place in places {
        let directory = tempfile::tempdir_in(place).unwrap();
        for forced in [None, Some(Dax), Some(PageCache), Some(Volatile)] {
            let path = directory.path().join("data");
            let mut told = vec![];
            let options = CreateOptions::new().mode(0o640);
            let options = forced.into_iter().fold(options, CreateOptions::domain);
            let mut note = |done, all| told.push((done, all));
            let media = options.create(&path, LEN_BYTES, &mut note).unwrap();
            assert_eq!(told.last(), Some(&(LEN_BYTES, LEN_BYTES)));
            assert!(told.is_sorted() && media.is_writable());
            assert!(forced.is_none_or(|forced| media.domain() == forced));
            let metadata = std::fs::metadata(&path).unwrap();
            assert_eq!(metadata.len(), LEN_BYTES);
            assert_eq!(metadata.mode() & 0o777 & !0o640, 0);
            assert!(metadata.blocks() * 512 >= LEN_BYTES, "{forced:?}: {}", metadata.blocks());
            let mut bytes = vec![1; LEN_BYTES as usize];
            media.read_at(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0));

            let error = create(&path, LEN_BYTES, forced).map(drop).unwrap_err();
            assert!(matches!(error, OpenError::Exists { .. }), "{error}");
            std::fs::remove_file(&path).unwrap();
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

#[test]
fn what_exists_is_overwritten_only_when_told() {
    let file = tempfile::NamedTempFile::new().unwrap();
    // An empty file has nothing to lose.
    let media = create(file.path(), 8192, None).unwrap();
    media.write_unguarded(0, &[7; 8192]).unwrap();
    drop(media);
    let refused = create(file.path(), 4096, None).map(drop).unwrap_err();
    assert!(matches!(refused, OpenError::Exists { .. }), "{refused}");
    assert_eq!(std::fs::read(file.path()).unwrap(), [7; 8192]);

    let options = CreateOptions::new().overwrite(true);
    let user = File::options().read(true).write(true).open(file.path()).unwrap();
    assert!(lock::try_lock(user.as_fd(), LockRange::byte(99), LockKind::Shared).unwrap());
    let refused = options.create(file.path(), 4096, &mut |_, _| {}).map(drop).unwrap_err();
    assert!(matches!(refused, OpenError::InUse { .. }), "{refused}");
    assert_eq!(std::fs::read(file.path()).unwrap(), [7; 8192]);
    drop(user);

    options.create(file.path(), 6000, &mut |_, _| {}).unwrap();
    assert_eq!(std::fs::read(file.path()).unwrap(), [0; 6000]);
}

#[test]
fn what_cannot_be_made_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    let none = create(&path, 0, None).map(drop).unwrap_err();
    assert!(matches!(none, OpenError::BadLength { len_bytes: 0, .. }), "{none}");
    // More than any file system here has free, or than a file can have.
    for len_bytes in [1 << 50, u64::MAX / 2, u64::MAX] {
        let error = create(&path, len_bytes, None).map(drop).unwrap_err();
        let expected = matches!(
            error,
            OpenError::NoSpace { .. } | OpenError::BadLength { .. } | OpenError::System { .. }
        );
        assert!(expected, "{error}");
        assert!(!path.exists(), "{error}");
    }
    let error = create(&directory.path().join("a/b"), 4096, None).map(drop).unwrap_err();
    assert!(matches!(error, OpenError::Missing { .. }), "{error}");
    let error = create(directory.path(), 4096, None).map(drop).unwrap_err();
    assert!(matches!(error, OpenError::NotStorage { .. }), "{error}");
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(directory.path().join("nowhere"), &link).unwrap();
    let error = create(&link, 4096, None).map(drop).unwrap_err();
    assert!(matches!(error, OpenError::Exists { .. }), "{error}");
}

#[test]
fn a_file_beside_the_program_is_made() {
    // A path without a directory: the parent is the current one.
    let name = format!("aquifer-media-{:016x}", aquifer_sys::random::next_u64().unwrap());
    let made = create(name.as_ref(), 4096, None);
    let removed = std::fs::remove_file(&name);
    match made {
        Ok(media) => assert_eq!(media.len_bytes(), 4096),
        Err(error @ OpenError::NoPermission { .. }) => eprintln!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    }
    let _ = removed;
}
