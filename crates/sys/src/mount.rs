//! Mounting a file system that a process serves over FUSE.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, open, statx};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};

use crate::fuse::FuseDevice;

/// How a file system is mounted.
#[derive(Debug, Clone, Default)]
pub struct FuseMount {
    /// What `mount` shows as the source.
    pub source: OsString,
    /// What comes behind `fuse.` in its type.
    pub subtype: String,
    /// Whether users other than the one that mounts it may use it.
    pub allow_other: bool,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Whether set-user-ID and set-group-ID bits count.
    pub suid: bool,
    /// Whether devices can be opened.
    pub dev: bool,
    /// Whether programs cannot be run.
    pub noexec: bool,
}

/// A mount that no directory shows yet, or that one shows.
#[derive(Debug)]
pub struct Mounted {
    root: OwnedFd,
}

/// A directory that is to show a mount: the one that its path led to when this was opened, whatever the
/// path leads to later.
#[derive(Debug)]
pub struct MountPoint {
    directory: OwnedFd,
}

impl MountPoint {
    /// Follows a path to a directory.
    ///
    /// # Errors
    /// Those of `open`: `ENOTDIR` if it is something else.
    pub fn open(path: &Path) -> io::Result<MountPoint> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(MountPoint { directory: open(path, flags, Mode::empty())? })
    }

    /// The path of it at this moment, from the root on and without symbolic links.
    ///
    /// # Errors
    /// Those of reading a link in `/proc/self/fd`.
    pub fn path(&self) -> io::Result<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.directory.as_raw_fd()))
    }
}

impl From<OwnedFd> for MountPoint {
    /// Of a descriptor of it, from another process.
    fn from(directory: OwnedFd) -> MountPoint {
        MountPoint { directory }
    }
}

impl AsFd for MountPoint {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

impl FuseMount {
    /// Creates the mount. The kernel sends the first request to `device` now, and waits for the
    /// answer when the file system is first used.
    ///
    /// # Errors
    /// Those of `fsopen`, `fsconfig` and `fsmount`: `EPERM` without the right to mount.
    pub fn create(&self, device: &FuseDevice) -> io::Result<Mounted> {
        let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let context = context.as_fd();
        let number = |number: u32| number.to_string();
        let owner = crate::credentials::effective();
        fsconfig_set_string(context, "source", self.source.as_os_str())?;
        fsconfig_set_string(context, "subtype", self.subtype.as_str())?;
        fsconfig_set_string(context, "fd", number(device.as_fd().as_raw_fd() as u32))?;
        fsconfig_set_string(context, "rootmode", "40000")?;
        fsconfig_set_string(context, "user_id", number(owner.uid))?;
        fsconfig_set_string(context, "group_id", number(owner.gid))?;
        fsconfig_set_flag(context, "default_permissions")?;
        if self.allow_other {
            fsconfig_set_flag(context, "allow_other")?;
        }
        if self.read_only {
            fsconfig_set_flag(context, "ro")?;
        }
        fsconfig_create(context)?;
        let mut attributes = MountAttrFlags::empty();
        for (is_set, flag) in [
            (self.read_only, MountAttrFlags::MOUNT_ATTR_RDONLY),
            (!self.suid, MountAttrFlags::MOUNT_ATTR_NOSUID),
            (!self.dev, MountAttrFlags::MOUNT_ATTR_NODEV),
            (self.noexec, MountAttrFlags::MOUNT_ATTR_NOEXEC),
        ] {
            attributes.set(flag, is_set);
        }
        let root = fsmount(context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        Ok(Mounted { root })
    }
}

impl From<OwnedFd> for Mounted {
    /// Of a descriptor of it, from another process.
    fn from(root: OwnedFd) -> Mounted {
        Mounted { root }
    }
}

impl AsFd for Mounted {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }
}

impl Mounted {
    /// Shows it at a directory.
    ///
    /// # Errors
    /// Those of `move_mount`.
    pub fn attach(&self, at: &MountPoint) -> io::Result<()> {
        let no_paths =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        Ok(move_mount(&self.root, "", &at.directory, "", no_paths)?)
    }

    /// The device number of the file system: major and minor. Asks the kernel only, not the server.
    ///
    /// # Errors
    /// Those of `statx`.
    pub fn device_number(&self) -> io::Result<(u32, u32)> {
        number_of(self.root.as_fd(), Path::new(""))
    }
}

/// The device number of the file system that a directory shows: major and minor. Asks the kernel
/// only, no server.
///
/// # Errors
/// Those of `statx`.
pub fn device_number(directory: &Path) -> io::Result<(u32, u32)> {
    number_of(CWD, directory)
}

fn number_of(at: BorrowedFd<'_>, path: &Path) -> io::Result<(u32, u32)> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let stat = statx(at, path, flags, StatxFlags::empty())?;
    Ok((stat.stx_dev_major, stat.stx_dev_minor))
}

/// Starts writing back what the kernel has cached of the file system that a directory shows, and
/// waits for it where the kernel does.
///
/// # Errors
/// Those of `open` and `syncfs`.
pub fn write_back(directory: &Path) -> io::Result<()> {
    let directory = std::fs::File::open(directory)?;
    Ok(rustix::fs::syncfs(&directory)?)
}

/// Removes the mount that a directory shows; with `lazily`, also while it is used: it then ends with
/// its last use.
///
/// # Errors
/// Those of `umount2`: `EBUSY`.
pub fn remove(directory: &Path, lazily: bool) -> io::Result<()> {
    let flags = if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    Ok(unmount(directory, flags | UnmountFlags::NOFOLLOW)?)
}

/// Ends the connection of the FUSE file system that a directory shows: what waits for its server
/// fails from then on. It also removes the mount, unless it is used.
///
/// # Errors
/// Those of `umount2`, except `EBUSY`.
pub fn end(directory: &Path) -> io::Result<()> {
    match unmount(directory, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW) {
        Err(rustix::io::Errno::BUSY) => Ok(()),
        ended => Ok(ended?),
    }
}

/// Ends a connection of FUSE, by the minor device number of its file system, wherever it is mounted.
///
/// # Errors
/// Those of writing to the file: `ENOENT` where the connection is no more, or where nothing has
/// mounted `fusectl`.
pub fn abort(minor: u32) -> io::Result<()> {
    std::fs::write(format!("/sys/fs/fuse/connections/{minor}/abort"), "1")
}

/// Sets how far the kernel reads ahead in a file system, and how much of memory its pages may be
/// before writers wait. Where the process may not, they stay as they are.
pub fn set_write_back((major, minor): (u32, u32), read_ahead_kib: u32, max_ratio: u32) {
    let set = |name: &str, value: u32| {
        let path = format!("/sys/class/bdi/{major}:{minor}/{name}");
        let _ = std::fs::write(path, value.to_string());
    };
    set("read_ahead_kb", read_ahead_kib);
    set("strict_limit", 0);
    set("max_ratio", max_ratio);
}
