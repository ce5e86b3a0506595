//! System calls that a mounted pool refuses and ext4 does not: see "What differs from ext4" in
//! docs/mount.md.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use aquifer_fuse::Cache;
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use crate::mounted::place::Place;

/// The error of asking for a handle of a file.
fn handle_of(path: &Path) -> io::Error {
    /// `struct file_handle`, with room for the longest handle.
    #[repr(C)]
    struct Handle {
        len_bytes: u32,
        kind: i32,
        bytes: [u8; 128],
    }
    let path = CString::new(path.as_os_str().as_bytes()).expect("no NUL");
    let mut handle = Handle { len_bytes: 128, kind: 0, bytes: [0; 128] };
    let mut mount = 0;
    // SAFETY: a path with its NUL, a handle with as much room as it says, and a number; all outlive the
    // call.
    let got = unsafe {
        libc::name_to_handle_at(
            libc::AT_FDCWD,
            path.as_ptr(),
            (&raw mut handle).cast(),
            &raw mut mount,
            0,
        )
    };
    assert_eq!(got, -1, "a handle of {} bytes, {}", handle.len_bytes, handle.bytes[0]);
    let error = io::Error::last_os_error();
    assert_eq!(handle.kind, 0);
    error
}

pub fn there_are_no_file_handles_and_no_flags() {
    for cache in [Cache::WriteBack, Cache::WriteThrough, Cache::Shared] {
        let Some(place) = Place::mount(64 << 20, cache) else { return };
        let at = place.root().join("f");
        fs::write(&at, "text").expect("a new file");
        assert_eq!(handle_of(&at).raw_os_error(), Some(libc::EOPNOTSUPP), "{cache:?}");
        let file = File::open(&at).expect("it is there");
        let flags = ioctl_getflags(&file).expect_err("there are none");
        assert_eq!(flags, rustix::io::Errno::NOTTY, "{cache:?}");
        let set = ioctl_setflags(&file, IFlags::NODUMP).expect_err("there are none");
        assert_eq!(set, rustix::io::Errno::NOTTY, "{cache:?}");
        drop(file);
        place.unmount().assert_sound();
    }
}
