//! Namespaces of mounts and users, so that a process can mount what only it and its children see.

use std::fs::OpenOptions;
use std::io::{self, Write};

use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::{self, CapabilitySet, UnshareFlags};

use crate::credentials::{self, Credentials};

/// Gives the calling thread, and what it starts from then on, a mount namespace of its own: what is
/// mounted there is seen nowhere else. Mounts and unmounts outside of it still reach it.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`.
pub fn own_mounts() -> io::Result<()> {
    unshare(UnshareFlags::NEWNS)?;
    Ok(mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?)
}

/// The same without privileges: with a user namespace of its own, in which the process may mount.
/// It keeps its user and group, and no others exist in it: files of other owners show the overflow
/// user, and no file can be given to another one.
///
/// # Errors
/// `EINVAL` if the process has other threads; `EPERM` or `EACCES` where user namespaces are refused,
/// `ENOSPC` where no more of them may exist (`user.max_user_namespaces`).
pub fn own_user_and_mounts() -> io::Result<()> {
    let Credentials { uid, gid } = credentials::effective();
    unshare(UnshareFlags::NEWUSER | UnshareFlags::NEWNS)?;
    set("uid_map", &format!("{uid} {uid} 1"))?;
    // Without privileges outside, a group can be mapped only where groups cannot be dropped.
    set("setgroups", "deny")?;
    set("gid_map", &format!("{gid} {gid} 1"))
}

/// What a process was permitted to do before it entered a user namespace, where it is permitted all.
#[derive(Debug, Clone, Copy)]
pub struct Rights(CapabilitySet);

impl Rights {
    /// Those of the calling thread.
    ///
    /// # Errors
    /// Those of `capget`.
    pub fn own() -> io::Result<Rights> {
        Ok(Rights(thread::capabilities(None)?.permitted))
    }

    /// From now on, the programs that this thread starts get no others in the user namespace of
    /// [`own_user_and_mounts`]: user ID 0 would get all.
    ///
    /// # Errors
    /// `EPERM` outside of such a namespace.
    pub fn restore(self) -> io::Result<()> {
        set_inheritable(false)?;
        for right in CapabilitySet::all().difference(self.0).iter() {
            // Of a right that this kernel does not know, it says that it is not in the set.
            if thread::capability_is_in_bounding_set(right).unwrap_or(false) {
                thread::remove_capability_from_bounding_set(right)?;
            }
        }
        Ok(())
    }
}

/// Lets the programs that this thread starts mount in the user namespace of [`own_user_and_mounts`],
/// until [`Rights::restore`]. A program of another user than 0 loses that right at its start otherwise.
///
/// # Errors
/// `EPERM` for a process that does not have the right itself.
pub fn let_programs_mount() -> io::Result<()> {
    set_inheritable(true)?;
    Ok(thread::configure_capability_in_ambient_set(CapabilitySet::SYS_ADMIN, true)?)
}

/// Without the inheritable right, the kernel takes the ambient one away.
fn set_inheritable(may_mount: bool) -> io::Result<()> {
    let mut sets = thread::capabilities(None)?;
    sets.inheritable.set(CapabilitySet::SYS_ADMIN, may_mount);
    Ok(thread::set_capabilities(None, sets)?)
}

/// Whether this process could call [`own_user_and_mounts`]. A child of it tries.
///
/// # Errors
/// As there.
pub fn probe_user_namespaces() -> io::Result<()> {
    // SAFETY: the child only makes system calls, and leaves by `_exit`.
    let child = crate::check(unsafe { libc::fork() }.into())?;
    if child == 0 {
        // SAFETY: no descriptors are concerned.
        let tried = unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) };
        let errno = if tried == 0 { 0 } else { crate::errno() };
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(errno) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    while unsafe { libc::waitpid(child as libc::pid_t, &raw mut status, 0) } < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    match (libc::WIFEXITED(status), libc::WEXITSTATUS(status)) {
        (true, 0) => Ok(()),
        (true, errno) => Err(io::Error::from_raw_os_error(errno)),
        _ => Err(io::Error::from_raw_os_error(libc::EPERM)),
    }
}

fn unshare(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: descriptors stay shared.
    Ok(unsafe { thread::unshare_unsafe(flags) }?)
}

/// The kernel takes the text in one write only.
fn set(map: &str, text: &str) -> io::Result<()> {
    let path = format!("/proc/self/{map}");
    OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}
