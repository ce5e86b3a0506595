//! A full `/dev/shm` is reported when a segment is created, not by a signal at a later store.

use std::ffi::{CStr, CString};
use std::os::unix::process::CommandExt;

use crate::support::{Actor, Role, command, say};
use aquifer_sys::shared_memory::{SharedMemory, SharedMemoryError};

pub const ROLES: &[Role] = &[("crowded", crowded)];

const SMALL: &CStr = c"size=1M";

/// Between fork and exec: writes to a file of /proc.
fn set(path: &CStr, value: &CStr) -> std::io::Result<()> {
    // SAFETY: a NUL-terminated string.
    let file = unsafe { libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC) };
    // SAFETY: the bytes of the value; a file that could not be opened is refused.
    let put = unsafe { libc::write(file, value.as_ptr().cast(), value.count_bytes()) };
    if put > 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Between fork and exec: creates a mount namespace with a small `/dev/shm`. An unprivileged
/// process also creates a user namespace, in which `user` and `group` are mapped.
fn with_small_dev_shm(user: &CStr, group: &CStr) -> std::io::Result<()> {
    // SAFETY: integers only.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        // SAFETY: as above.
        if unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        set(c"/proc/self/setgroups", c"deny")?;
        set(c"/proc/self/uid_map", user)?;
        set(c"/proc/self/gid_map", group)?;
    }
    let (none, root, shm) = (c"none".as_ptr(), c"/".as_ptr(), c"/dev/shm".as_ptr());
    let private = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: NUL-terminated strings; mount changes do not propagate to other namespaces.
    let apart = unsafe { libc::mount(none, root, std::ptr::null(), private, std::ptr::null()) };
    // SAFETY: NUL-terminated strings.
    let mounted = unsafe { libc::mount(none, shm, c"tmpfs".as_ptr(), 0, SMALL.as_ptr().cast()) };
    if apart == 0 && mounted == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

fn crowded(_: &[String]) {
    let error = SharedMemory::create("large", 2 << 20, 0o600).unwrap_err();
    let SharedMemoryError::NoSpace { len_bytes, source } = &error else { panic!("{error}") };
    assert_eq!((*len_bytes, source.raw_os_error()), (2 << 20, Some(libc::ENOSPC)));
    assert!(error.to_string().contains("/dev/shm"), "{error}");
    assert!(!std::path::Path::new("/dev/shm/large").exists());

    let fits = SharedMemory::create("fits", 512 << 10, 0o600).unwrap();
    // Another file takes the rest; every byte of the segment stays allocated.
    let rest = std::fs::write("/dev/shm/rest", vec![1; 1 << 20]);
    assert_eq!(rest.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    for offset in (0..fits.len_bytes()).step_by(4096) {
        // SAFETY: inside the mapping, which no other code uses.
        unsafe { fits.start().add(offset).write_volatile(1) };
    }
    say("done");
}

#[test]
fn a_full_file_system_is_told_when_the_segment_is_made() {
    let mut command = command("crowded");
    // SAFETY: no preconditions.
    let ids = unsafe { [libc::getuid(), libc::getgid()] };
    let [user, group] = ids.map(|id| CString::new(format!("0 {id} 1")).unwrap());
    // SAFETY: the function makes async-signal-safe calls only.
    unsafe { command.pre_exec(move || with_small_dev_shm(&user, &group)) };
    match command.spawn() {
        Ok(child) => assert_eq!(Actor::of(child).hear(), "done"),
        Err(error) => eprintln!("skipped: no file system can be mounted here: {error}"),
    }
}
