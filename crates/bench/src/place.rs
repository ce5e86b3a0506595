//! The location of the data file: a directory of the user's choice, or a zram device made for the
//! run.
//!
//! zram is a block device in compressed memory: a fast device that most machines have. The device,
//! its file system and its mount exist only while the [`Place`] does; each step is undone in
//! reverse order when it is dropped, also if a later step failed.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use aquifer_sys::machine::file_system_of;

/// The reason why a place could not be prepared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// Only root can create zram devices.
    #[error("--device zram creates a block device, which needs root; run as root, or omit it")]
    NotRoot,
    /// The kernel has no zram, or its module is not loaded.
    #[error(
        "{}: No such file or directory: the kernel has no zram; try `modprobe zram`",
        ZRAM_CONTROL
    )]
    NoZram,
    /// Formatting needs `mkfs.ext4`.
    #[error("mkfs.ext4 (package e2fsprogs) cannot create a file system on {device}: {reason}")]
    Format {
        /// The zram device.
        device: PathBuf,
        /// The error message.
        reason: String,
    },
    /// The directory holds its files in memory.
    #[error(
        "{path} is on {file_system}, which is in memory; choose a directory on a disk with --dir"
    )]
    InMemory {
        /// The directory.
        path: PathBuf,
        /// Type of its file system.
        file_system: String,
    },
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    System {
        /// The action that failed.
        action: String,
        /// The kernel's error.
        source: io::Error,
    },
}

impl PlaceError {
    fn system(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::System { action, source }
    }
}

const ZRAM_CONTROL: &str = "/sys/class/zram-control";

/// A directory for data files, with the resources that were created for it.
#[derive(Debug)]
pub struct Place {
    directory: PathBuf,
    file_system: String,
    device: String,
    _zram: Option<Zram>,
}

impl Place {
    /// Uses an existing directory. `scarce`: the bench needs files larger than memory, which a file
    /// system in memory cannot hold.
    pub fn directory(path: &Path, scarce: bool) -> Result<Self, PlaceError> {
        let directory = fs::canonicalize(path)
            .map_err(PlaceError::system(format!("use the directory {}", path.display())))?;
        let (file_system, device) = file_system_of(&directory);
        if scarce && matches!(file_system.as_str(), "tmpfs" | "ramfs") {
            return Err(PlaceError::InMemory { path: directory, file_system });
        }
        Ok(Self { directory, file_system, device, _zram: None })
    }

    /// Creates a zram device with room for `data_bytes` and mounts an ext4 file system on it.
    pub fn zram(data_bytes: u64) -> Result<Self, PlaceError> {
        let zram = Zram::create(data_bytes)?;
        Ok(Self {
            directory: zram.mounted_at.path().to_owned(),
            file_system: "ext4".to_owned(),
            device: format!("zram ({})", zram.algorithm()),
            _zram: Some(zram),
        })
    }

    /// Returns the directory.
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// Returns the type of its file system.
    pub fn file_system(&self) -> &str {
        &self.file_system
    }

    /// Returns the device that holds the file system.
    pub fn device(&self) -> &str {
        &self.device
    }
}

/// A zram device with a mounted file system. Fields are dropped, and so undone, in this order.
#[derive(Debug)]
struct Zram {
    _mount: MountGuard,
    mounted_at: tempfile::TempDir,
    device: ZramDevice,
}

impl Zram {
    fn create(data_bytes: u64) -> Result<Self, PlaceError> {
        // SAFETY: takes no arguments and cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            return Err(PlaceError::NotRoot);
        }
        let device = ZramDevice::add()?;
        // Extra space for the file system's metadata and journal.
        device.set_size(data_bytes + data_bytes / 16 + (128 << 20))?;
        device.format()?;
        let mounted_at = tempfile::Builder::new()
            .prefix("aquifer-bench-zram-")
            .tempdir()
            .map_err(PlaceError::system("create a temporary directory"))?;
        let mount = MountGuard::mount(&device.path(), mounted_at.path(), c"ext4")?;
        Ok(Self { _mount: mount, mounted_at, device })
    }

    /// Returns the compression in use: the one in brackets.
    fn algorithm(&self) -> String {
        let all = fs::read_to_string(self.device.attribute("comp_algorithm")).unwrap_or_default();
        let chosen = all.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        chosen.map_or_else(|| all.trim().to_owned(), |(name, _)| name.to_owned())
    }
}

/// A block device created here: never one that another program has set up.
#[derive(Debug)]
struct ZramDevice {
    number: u32,
}

impl ZramDevice {
    fn add() -> Result<Self, PlaceError> {
        let control = Path::new(ZRAM_CONTROL).join("hot_add");
        let text = match fs::read_to_string(&control) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(PlaceError::NoZram);
            }
            other => other.map_err(PlaceError::system(format!("read {}", control.display())))?,
        };
        let number = text.trim().parse().map_err(|_| PlaceError::NoZram)?;
        Ok(Self { number })
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/zram{}", self.number))
    }

    fn attribute(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/sys/block/zram{}/{name}", self.number))
    }

    fn set_size(&self, size_bytes: u64) -> Result<(), PlaceError> {
        let file = self.attribute("disksize");
        let action = format!("write {}", file.display());
        fs::write(file, size_bytes.to_string()).map_err(PlaceError::system(action))
    }

    fn format(&self) -> Result<(), PlaceError> {
        let device = self.path();
        let result = Command::new("mkfs.ext4")
            .args(["-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"])
            .arg(&device)
            .output();
        match result {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(PlaceError::Format {
                device,
                reason: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            }),
            Err(error) => Err(PlaceError::Format { device, reason: error.to_string() }),
        }
    }
}

impl Drop for ZramDevice {
    fn drop(&mut self) {
        let reset = fs::write(self.attribute("reset"), "1");
        let control = Path::new(ZRAM_CONTROL).join("hot_remove");
        let removed = reset.and_then(|()| fs::write(control, self.number.to_string()));
        if let Err(error) = removed {
            eprintln!("warning: {} could not be removed: {error}", self.path().display());
        }
    }
}

/// A mounted file system, unmounted when dropped.
#[derive(Debug)]
pub struct MountGuard {
    target: CString,
}

impl MountGuard {
    /// Mounts a file system of this type; needs root.
    pub fn mount(device: &Path, target: &Path, kind: &CStr) -> Result<Self, PlaceError> {
        let action = format!("mount {} on {}", device.display(), target.display());
        let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).map_err(io::Error::from);
        let mount = || {
            let (source, target) = (text(device)?, text(target)?);
            let flags = libc::MS_NODEV | libc::MS_NOSUID | libc::MS_NOATIME;
            // SAFETY: all three strings are terminated and outlive the call; no options are passed.
            let result = unsafe {
                libc::mount(
                    source.as_ptr(),
                    target.as_ptr(),
                    kind.as_ptr(),
                    flags,
                    std::ptr::null(),
                )
            };
            if result == 0 { Ok(Self { target }) } else { Err(io::Error::last_os_error()) }
        };
        mount().map_err(PlaceError::system(action))
    }
}

impl Drop for MountGuard {
    fn drop(&mut self) {
        // SAFETY: a terminated string.
        if unsafe { libc::umount2(self.target.as_ptr(), 0) } == 0 {
            return;
        }
        let error = io::Error::last_os_error();
        eprintln!("warning: {} is busy ({error}); detaching it", self.target.to_string_lossy());
        // SAFETY: a terminated string.
        unsafe { libc::umount2(self.target.as_ptr(), libc::MNT_DETACH) };
    }
}

#[cfg(test)]
mod tests {
    use aquifer_sys::machine::free_bytes;

    use super::*;

    #[test]
    fn missing_and_in_memory_directories_are_refused() {
        let missing = Place::directory(Path::new("/no/such/directory"), false);
        assert!(matches!(missing, Err(PlaceError::System { .. })), "{missing:?}");
        let shm = Path::new("/dev/shm");
        if file_system_of(shm).0 != "tmpfs" {
            return eprintln!("skipped: /dev/shm is not a tmpfs here");
        }
        assert!(matches!(Place::directory(shm, true), Err(PlaceError::InMemory { .. })));
        assert!(Place::directory(shm, false).is_ok());
    }

    #[test]
    fn zram_is_made_and_leaves_nothing_behind() {
        let place = match Place::zram(16 << 20) {
            Ok(place) => place,
            Err(error @ (PlaceError::NotRoot | PlaceError::NoZram)) => {
                return eprintln!("skipped: {error}");
            }
            Err(PlaceError::System { action, source })
                if matches!(source.raw_os_error(), Some(libc::EPERM | libc::EACCES)) =>
            {
                return eprintln!("skipped: cannot {action}: {source}");
            }
            Err(error) => panic!("{error}"),
        };
        let directory = place.path().to_owned();
        let zram = place._zram.as_ref().unwrap();
        let block = zram.device.attribute("disksize").parent().unwrap().to_owned();
        fs::write(directory.join("file"), vec![1; 1 << 20]).unwrap();
        assert!(block.exists());
        assert!(free_bytes(&directory).unwrap() >= 15 << 20);
        drop(place);
        assert!(!directory.exists());
        assert!(!block.exists());
    }
}
