//! A disk for a test: ext4 on a loop device, in a private mount namespace.
#![allow(dead_code, reason = "each test uses a part")]

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// `_IOR('X', 125, __u32)`.
const FS_IOC_SHUTDOWN: libc::c_ulong = 0x8004_587d;
/// Discards everything that is not written yet.
const NO_LOG_FLUSH: u32 = 2;

/// Runs a program without output. Returns whether it succeeded.
pub fn succeeds(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    let done = command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    done.is_ok_and(|status| status.success())
}

/// An ext4 file system on a loop device, mounted. Dropping it removes all of it.
pub struct Disk {
    directory: tempfile::TempDir,
    device: PathBuf,
}

impl Disk {
    /// `None` if it cannot be created; prints the reason.
    pub fn new(format: &[&str]) -> Option<Disk> {
        let is_own = std::fs::read_link("/proc/self/ns/mnt").ok()
            != std::fs::read_link(format!("/proc/{}/ns/mnt", std::os::unix::process::parent_id()))
                .ok();
        if !is_own || !succeeds("mount", &["--make-rprivate", "/"]) {
            println!("skipped: there can be no mounts of its own here");
            return None;
        }
        let directory = tempfile::tempdir_in("/tmp").unwrap();
        let image = directory.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        std::fs::create_dir(directory.path().join("mounted")).unwrap();
        let arguments = [&["-q", "-F"], format, &[image.to_str().unwrap()]].concat();
        if !succeeds("mkfs.ext4", &arguments) {
            println!("skipped: there is no mkfs.ext4");
            return None;
        }
        let Some(device) = attach(&image) else {
            println!("skipped: there are no loop devices for this user");
            return None;
        };
        let disk = Disk { directory, device };
        if !disk.mount() {
            println!("skipped: ext4 cannot be mounted here");
            return None;
        }
        Some(disk)
    }

    /// Its mount point.
    pub fn mounted(&self) -> PathBuf {
        self.directory.path().join("mounted")
    }

    /// A file on it.
    pub fn pool(&self) -> PathBuf {
        self.mounted().join("pool")
    }

    /// Mounts it. Returns whether it is mounted.
    pub fn mount(&self) -> bool {
        let (device, place) = (self.device.to_str().unwrap(), self.mounted());
        succeeds("mount", &["-t", "ext4", device, place.to_str().unwrap()])
    }

    pub fn unmount(&self) {
        assert!(succeeds("umount", &[self.mounted().to_str().unwrap()]), "it is in use");
    }

    /// Attaches the image as another device, perhaps with the same number.
    pub fn attach_anew(&mut self) {
        assert!(succeeds("losetup", &["--detach", self.device.to_str().unwrap()]));
        self.device = attach(&self.directory.path().join("image")).unwrap();
    }

    /// Loses everything that is in the cache and not on the device.
    pub fn shut_down(&self) {
        let place = std::fs::File::open(self.mounted()).unwrap();
        // SAFETY: the request reads one `u32`, which outlives the call.
        let done = unsafe { libc::ioctl(place.as_raw_fd(), FS_IOC_SHUTDOWN, &NO_LOG_FLUSH) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        drop(place);
        self.unmount();
    }
}

fn attach(image: &Path) -> Option<PathBuf> {
    let attached = Command::new("losetup").args(["--find", "--show"]).arg(image).output().ok()?;
    let device = String::from_utf8(attached.stdout).ok()?.trim().to_owned();
    (attached.status.success() && !device.is_empty()).then(|| device.into())
}

impl Drop for Disk {
    fn drop(&mut self) {
        let place = self.mounted();
        let _ = succeeds("umount", &["--lazy", place.to_str().unwrap()]);
        let _ = succeeds("losetup", &["--detach", self.device.to_str().unwrap()]);
    }
}
