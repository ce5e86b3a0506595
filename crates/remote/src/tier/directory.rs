//! The directory of a tier and its control file.
//!
//! Every file is opened without following links and must be a regular file of the caller's own, not accessible to
//! others: what another user can change is never read.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use aquifer_sys::file_name;
use aquifer_sys::io::{read_at, write_all_at};
use aquifer_sys::lock::{self, LockKind, LockRange};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::process::geteuid;
use zerocopy::{FromBytes, IntoBytes};

use super::TierError;
use super::layout::{Control, Key};

/// Of the control file's bytes: held exclusively while it is changed.
const CHANGE: LockRange = LockRange::byte(0);
/// Held shared by each opener; who gets it exclusively is alone.
const PRESENCE: LockRange = LockRange::byte(1);

const PRIVATE_DIRECTORY: u32 = 0o700;
const PRIVATE_FILE: Mode = Mode::from_raw_mode(0o600);
/// Of what the file system has free when a tier is made, a budget takes this part.
const DEFAULT_BUDGET_DIVISOR: u64 = 4;

/// The directory, checked.
#[derive(Debug, Clone)]
pub(super) struct Directory {
    path: PathBuf,
}

impl Directory {
    /// Makes the directory if it is missing, and checks that it is the caller's own.
    pub fn open(path: &Path) -> Result<Directory, TierError> {
        let made = DirBuilder::new().recursive(true).mode(PRIVATE_DIRECTORY).create(path);
        made.map_err(|error| TierError::system(path, "cannot create the directory", error))?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY;
        let opened: File = open(path, flags, Mode::empty())
            .map_err(|error| TierError::system(path, "cannot open the directory", error.into()))?
            .into();
        check_owner(path, &opened)?;
        let path = std::path::absolute(path)
            .map_err(|error| TierError::system(path, "has no absolute path", error))?;
        Ok(Directory { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a file of the directory.
    pub fn file(&self, name: &str) -> Result<File, TierError> {
        let path = self.path.join(name);
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file: File = match open(&path, flags, Mode::empty()) {
            Ok(file) => file.into(),
            Err(Errno::LOOP) => {
                return Err(TierError::NotPrivate { path, reason: "it is a link; remove it" });
            }
            Err(error) => return Err(TierError::system(&path, "cannot open", error.into())),
        };
        check_owner(&path, &file)?;
        Ok(file)
    }

    /// Opens a file, or makes it complete: `fill` writes what it starts with.
    pub fn file_or_new(
        &self,
        name: &str,
        fill: impl Fn(BorrowedFd<'_>) -> io::Result<()>,
    ) -> Result<File, TierError> {
        let path = self.path.join(name);
        loop {
            match self.file(name) {
                Err(error) if error.is_not_found() => {}
                opened => return opened,
            }
            match self.make(&path, &fill) {
                // Another process was first.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(TierError::system(&path, "cannot create", error)),
                Ok(()) => {}
            }
        }
    }

    fn make(&self, path: &Path, fill: impl Fn(BorrowedFd<'_>) -> io::Result<()>) -> io::Result<()> {
        match file_name::unnamed(&self.path, PRIVATE_FILE.as_raw_mode()) {
            Ok(file) => {
                fill(file.as_fd())?;
                file_name::link(file.as_fd(), path)
            }
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                let unique = aquifer_sys::random::next_u64()?;
                let temporary = self.path.join(format!("{TEMPORARY}{unique:016x}"));
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let file: OwnedFd = open(&temporary, flags, PRIVATE_FILE)?;
                let named =
                    fill(file.as_fd()).and_then(|()| file_name::rename_new(&temporary, path));
                if named.is_err() {
                    let _ = std::fs::remove_file(&temporary);
                }
                named
            }
            Err(error) => Err(error),
        }
    }

    /// The objects, in the order of their keys.
    pub fn keys(&self) -> Result<Vec<Key>, TierError> {
        let failed = |error| TierError::system(&self.path, "cannot list the directory", error);
        let mut keys = vec![];
        for entry in std::fs::read_dir(&self.path).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            keys.extend(name.to_str().and_then(Key::parse));
        }
        keys.sort_unstable();
        Ok(keys)
    }

    pub fn remove(&self, key: Key) -> Result<(), TierError> {
        let path = self.path.join(key.file_name());
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(TierError::system(&path, "cannot remove", error))
            }
            _ => Ok(()),
        }
    }
}

const TEMPORARY: &str = ".new-";

/// Refuses what another user could change.
fn check_owner(path: &Path, file: &File) -> Result<(), TierError> {
    let status =
        file.metadata().map_err(|error| TierError::system(path, "cannot inspect", error))?;
    let not_ours = |reason| Err(TierError::NotPrivate { path: path.to_owned(), reason });
    if status.uid() != geteuid().as_raw() {
        return not_ours("it belongs to another user; choose a directory of your own");
    }
    if status.mode() & 0o077 != 0 {
        return not_ours("other users may access it; chmod it to 0700, a file in it to 0600");
    }
    if !status.is_dir() && !status.is_file() {
        return not_ours("it is not a regular file; remove it");
    }
    Ok(())
}

/// The control file, opened by one user of the tier: its locks exclude all others, also of the same process.
pub(super) struct ControlFile {
    file: File,
    path: PathBuf,
}

impl ControlFile {
    /// Opens the file. The first opener at a time counts what is used, by `count`.
    pub fn open(
        directory: &Directory,
        count: impl FnOnce() -> Result<u64, TierError>,
    ) -> Result<ControlFile, TierError> {
        let file = directory.file_or_new("control", |_| Ok(()))?;
        let control = ControlFile { file, path: directory.path.join("control") };
        let failed = |error| TierError::system(&control.path, "cannot lock", error);
        let is_alone = lock::try_lock(control.file.as_fd(), PRESENCE, LockKind::Exclusive);
        let is_alone = is_alone.map_err(failed)?;
        if is_alone || !control.read()?.is_valid() {
            let free_bytes = free_bytes(&control.file)
                .map_err(|error| TierError::system(&control.path, "cannot inspect", error))?;
            let used_bytes = count()?;
            control.change(|state| {
                if !state.is_valid() {
                    *state = Control::new((free_bytes + used_bytes) / DEFAULT_BUDGET_DIVISOR);
                }
                state.used_bytes = used_bytes;
            })?;
        }
        // Not blocking: only for the moment above another opener has it exclusively.
        lock::lock(control.file.as_fd(), PRESENCE, LockKind::Shared).map_err(failed)?;
        Ok(control)
    }

    pub fn read(&self) -> Result<Control, TierError> {
        let mut bytes = [0; size_of::<Control>()];
        read_at(self.file.as_fd(), &mut bytes, 0)
            .map_err(|error| TierError::system(&self.path, "cannot read", error))?;
        Ok(Control::read_from_bytes(&bytes).expect("of its size"))
    }

    /// Changes the state under the lock. It may be invalid, after a crash.
    pub fn change<T>(&self, change: impl FnOnce(&mut Control) -> T) -> Result<T, TierError> {
        let _held = self.hold()?;
        let mut state = self.read()?;
        let result = change(&mut state);
        write_all_at(self.file.as_fd(), state.seal().as_bytes(), 0)
            .map_err(|error| TierError::system(&self.path, "cannot write", error))?;
        Ok(result)
    }

    fn hold(&self) -> Result<Held<'_>, TierError> {
        loop {
            match lock::lock(self.file.as_fd(), CHANGE, LockKind::Exclusive) {
                Ok(()) => return Ok(Held(self)),
                Err(error) if error.raw_os_error() == Some(Errno::INTR.raw_os_error()) => {}
                Err(error) => return Err(TierError::system(&self.path, "cannot lock", error)),
            }
        }
    }
}

struct Held<'a>(&'a ControlFile);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let _ = lock::unlock(self.0.file.as_fd(), CHANGE);
    }
}

fn free_bytes(file: &File) -> io::Result<u64> {
    let status = rustix::fs::fstatvfs(file)?;
    Ok(status.f_bavail.saturating_mul(status.f_frsize))
}
