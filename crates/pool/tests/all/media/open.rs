//! What is detected at a path, and the errors if nothing usable is there.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use aquifer_crashkit::unguarded::UnguardedMedia;
use aquifer_pool::media::PersistenceDomain::{Dax, PageCache, Volatile};
use aquifer_pool::media::{
    ByteRange, Media, MediaError, OpenError, OpenOptions, PersistenceDomain, open,
};

use super::forms;

fn refused(path: impl AsRef<Path>, writable: bool) -> OpenError {
    match open(path.as_ref(), writable, None) {
        Ok(media) => panic!("{} was opened", media.path().display()),
        Err(error) => error,
    }
}

fn with_bytes() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(8192).unwrap();
    file
}

#[test]
fn domains_are_detected_and_forced() {
    for form in forms::all(8192) {
        let domain = form.media.domain();
        let magic = aquifer_sys::file_system::magic(form.file().as_fd()).unwrap();
        let is_memory = aquifer_sys::file_system::in_memory(magic).is_some();
        match form.forced() {
            Some(forced) => assert_eq!(domain, forced, "{}", form.name),
            None if is_memory => assert_eq!(domain, Volatile, "{}", form.name),
            // The temporary directory may lie on persistent memory, but a page cache that is taken
            // for it must not pass: no machine without the device may.
            None if !Path::new("/dev/pmem0").exists() => {
                assert_eq!(domain, PageCache, "{}", form.name);
            }
            None => assert_ne!(domain, Volatile, "{}", form.name),
        }
        assert_eq!(form.media.maps_privately(), form.unit_bytes == 1, "{}", form.name);
        assert_eq!(domain.atomic_bytes(), if domain == PageCache { 512 } else { 8 });
    }
}

#[test]
fn what_holds_no_bytes_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
    // SAFETY: a NUL-terminated string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let socket = directory.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let places = [
        (directory.path(), "is a directory; name a regular file"),
        (&*pipe, "is a pipe"),
        (&*socket, "is a socket"),
        (Path::new("/dev/null"), "is a character device"),
    ];
    for (path, expected) in places {
        for writable in [false, true] {
            let error = refused(path, writable);
            assert!(matches!(error, OpenError::NotStorage { .. }), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}

#[test]
fn what_is_not_there_says_how_to_make_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = with_bytes();
    for path in [directory.path().join("missing"), file.path().join("below")] {
        let error = refused(&path, true);
        assert!(matches!(error, OpenError::Missing { .. }), "{error}");
        assert!(error.to_string().contains("aquifer pool create"), "{error}");
    }
    let empty = tempfile::NamedTempFile::new().unwrap();
    let error = refused(empty.path(), false);
    assert!(matches!(error, OpenError::Empty { .. }), "{error}");
    assert!(error.to_string().contains("aquifer pool create"), "{error}");
}

#[test]
fn permission_is_asked_for_what_is_wanted() {
    use std::os::unix::fs::PermissionsExt;
    let file = with_bytes();
    file.as_file().set_permissions(std::fs::Permissions::from_mode(0o400)).unwrap();
    if File::options().write(true).open(file.path()).is_ok() {
        return eprintln!("skipped: this user may open any file");
    }
    let error = refused(file.path(), true);
    assert!(matches!(error, OpenError::NoPermission { writable: true, .. }), "{error}");
    assert!(error.to_string().contains("open it for reading"), "{error}");
    open(file.path(), false, None).unwrap();
}

/// A mount that is undone when this is dropped.
struct Mount(tempfile::TempDir);

impl Mount {
    fn new(kind: &std::ffi::CStr, flags: libc::c_ulong, options: &str) -> Option<Mount> {
        let directory = tempfile::tempdir().unwrap();
        let target = std::ffi::CString::new(directory.path().to_str().unwrap()).unwrap();
        let options = std::ffi::CString::new(options).unwrap();
        // SAFETY: NUL-terminated strings that outlive the call.
        let result = unsafe {
            libc::mount(
                kind.as_ptr(),
                target.as_ptr(),
                kind.as_ptr(),
                flags,
                options.as_ptr().cast(),
            )
        };
        if result != 0 {
            eprintln!("skipped: mounting {kind:?} needs privilege");
        }
        (result == 0).then_some(Mount(directory))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let target = std::ffi::CString::new(self.0.path().to_str().unwrap()).unwrap();
        // SAFETY: a NUL-terminated string that outlives the call.
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
}

#[test]
fn read_only_media_are_named() {
    let Some(mount) = Mount::new(c"tmpfs", 0, "size=1M") else { return };
    let path = mount.0.path().join("data");
    std::fs::write(&path, [7; 4096]).unwrap();
    let target = std::ffi::CString::new(mount.0.path().to_str().unwrap()).unwrap();
    let read_only = libc::MS_REMOUNT | libc::MS_RDONLY;
    // SAFETY: NUL-terminated strings that outlive the call.
    let remounted = unsafe {
        libc::mount(
            c"tmpfs".as_ptr(),
            target.as_ptr(),
            c"tmpfs".as_ptr(),
            read_only,
            std::ptr::null(),
        )
    };
    assert_eq!(remounted, 0);
    let error = refused(&path, true);
    assert!(matches!(error, OpenError::ReadOnlyMedia { .. }), "{error}");
    assert!(error.to_string().contains("for reading"), "{error}");
    for forced in [None, Some(Dax), Some(PageCache)] {
        let media = open(&path, false, forced).unwrap();
        let mut byte = [0];
        media.read_at(4095, &mut byte).unwrap();
        assert_eq!(byte, [7]);
    }
}

#[test]
fn a_domain_that_cannot_be_had_is_refused() {
    const HUGE: libc::c_uint = libc::MFD_HUGETLB | libc::MFD_HUGE_2MB | libc::MFD_CLOEXEC;
    // SAFETY: a NUL-terminated name.
    let fd = unsafe { libc::memfd_create(c"media".as_ptr(), HUGE) };
    if fd < 0 {
        return eprintln!("skipped: no huge pages on this kernel");
    }
    use std::os::fd::FromRawFd;
    // SAFETY: a new descriptor, which nothing else owns.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(2 << 20).unwrap();
    let forced = OpenOptions::new().domain(PageCache);
    let error = forced.open_file(file.try_clone().unwrap(), "huge").map(drop).unwrap_err();
    let OpenError::BadDomain { domain, reason, .. } = &error else { panic!("{error}") };
    assert_eq!(*domain, PageCache);
    assert!(reason.contains("hugetlbfs"), "{error}");

    // Without a free huge page the opening fails now, instead of a signal at the first access.
    match OpenOptions::new().open_file(file, "huge") {
        Ok(media) => {
            assert_eq!(media.domain(), Volatile);
            let mut bytes = [1; 10];
            media.read_at(1 << 20, &mut bytes).unwrap();
            assert_eq!(bytes, [0; 10]);
        }
        Err(error) => assert!(matches!(error, OpenError::NoSpace { .. }), "{error}"),
    }
}

/// A store to a hole of a full file system cannot return an error: holes are allocated when the
/// file is opened.
#[test]
fn holes_of_memory_files_are_filled_or_refused() {
    let Some(mount) = Mount::new(c"tmpfs", 0, "size=1M") else { return };
    let path = mount.0.path().join("sparse");
    File::create(&path).unwrap().set_len(2 << 20).unwrap();
    for forced in [None, Some(Dax)] {
        let error = open(&path, true, forced).map(drop).unwrap_err();
        let OpenError::NoSpace { len_bytes, source, .. } = &error else { panic!("{error}") };
        assert_eq!((*len_bytes, source.raw_os_error()), (2 << 20, Some(libc::ENOSPC)));
    }
    open(&path, false, None).unwrap().read_at(1 << 20, &mut [0; 100]).unwrap();
    // Through the page cache a write can return the error itself.
    let media = open(&path, true, Some(PageCache)).unwrap();
    let ballast = mount.0.path().join("ballast");
    let _ = std::fs::write(&ballast, vec![1; 2 << 20]);
    for refused in
        [media.write_unguarded(0, &[1; 8192]), media.write_durable_unguarded(0, &[1; 8192])]
    {
        assert_eq!(refused.unwrap_err().source.raw_os_error(), Some(libc::ENOSPC));
    }
    std::fs::remove_file(&ballast).unwrap();
    media.write_durable_unguarded(0, &[1; 8192]).unwrap();
    media.write_back(&[]).unwrap();
    media.flush().expect("nothing was lost by writes that were refused");

    File::options().write(true).open(&path).unwrap().set_len(512 << 10).unwrap();
    let media = open(&path, true, None).unwrap();
    let _ = std::fs::write(&ballast, vec![1; 2 << 20]);
    media.write_unguarded(0, &vec![3; 512 << 10]).expect("there is room for what was opened");
}

/// Punching a hole into a file of a full file system and storing to it gives an error and no
/// signal.
#[test]
fn memory_that_cannot_be_had_is_an_error() {
    let Some(mount) = Mount::new(c"tmpfs", 0, "size=1M") else { return };
    let path = mount.0.path().join("data");
    std::fs::write(&path, vec![1; 512 << 10]).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    for domain in [Volatile, Dax] {
        let media = open(&path, true, Some(domain)).unwrap();
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        use std::os::fd::AsRawFd;
        // SAFETY: the arguments are integers only.
        let punched = unsafe { libc::fallocate(file.as_raw_fd(), mode, 8192, 256 << 10) };
        assert_eq!(punched, 0);
        let ballast = mount.0.path().join("ballast");
        let _ = std::fs::write(&ballast, vec![1; 2 << 20]);
        let refused = |result: Result<(), MediaError>| {
            let error = result.expect_err("there is no page");
            assert_eq!(error.source.raw_os_error(), Some(libc::EIO), "{error}");
        };
        // Starting inside of a cache line, at a line, and before the hole.
        for offset_bytes in [8192 + 100, 8192 + 128, 8000] {
            for len in [1000, 100_000] {
                refused(media.write_unguarded(offset_bytes, &vec![9; len]));
                refused(media.write_durable_unguarded(offset_bytes, &vec![9; len]));
                refused(media.read_at(offset_bytes, &mut vec![9; len]));
            }
        }
        // Emulators may do nothing for the flush of a line, and then nothing fails.
        if let Err(error) = media.write_back(&[ByteRange { offset_bytes: 8192, len_bytes: 4096 }]) {
            assert_eq!(error.source.raw_os_error(), Some(libc::EIO), "{error}");
        }
        std::fs::remove_file(&ballast).unwrap();
        media.write_unguarded(8192 + 100, &vec![9; 100_000]).unwrap();
    }
}

#[test]
fn an_open_file_is_taken_as_it_is() {
    let file = with_bytes();
    let read_only = File::open(file.path()).unwrap();
    let media: Arc<dyn Media> =
        OpenOptions::new().domain(Dax).open_file(read_only, "here").unwrap();
    assert_eq!((media.domain(), media.path()), (Dax, Path::new("here")));
    let domains: Vec<PersistenceDomain> = [PageCache, Volatile]
        .into_iter()
        .map(|forced| open(file.path(), true, Some(forced)).unwrap().domain())
        .collect();
    assert_eq!(domains, [PageCache, Volatile]);
}
