//! The directory of a tier and its control file.
//!
//! Every file is opened without following links and must be a regular file of the caller's own, not accessible to
//! others: what another user can change is never read. A forked child does not share the files, or else its parent's
//! locks would outlive the parent.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aquifer_sys::file_name;
use aquifer_sys::io::{read_at, write_all_at};
use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_vm::NotInherited;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::process::geteuid;
use zerocopy::{FromBytes, IntoBytes};

use super::TierError;
use super::layout::{Control, Key};

/// Of the control file's bytes: held exclusively while it is changed.
const CHANGE: LockRange = LockRange::byte(0);
/// Held shared by each opener; an opener that gets it exclusively is the only one.
const PRESENCE: LockRange = LockRange::byte(1);

/// Most time that a lock is waited for which others hold for moments: a process that is stopped may hold it for ever.
pub(super) const LOCK_PATIENCE: Duration = Duration::from_secs(10);
/// How often it is tried, at first and at last.
const SHORTEST_WAIT: Duration = Duration::from_micros(50);
const LONGEST_WAIT: Duration = Duration::from_millis(5);

const CONTROL: &str = "control";
const PRIVATE_DIRECTORY: u32 = 0o700;
const PRIVATE_FILE: Mode = Mode::from_raw_mode(0o600);
/// Of what the file system has free when a tier is made, a budget takes this part.
const DEFAULT_BUDGET_DIVISOR: u64 = 4;

/// The directory, checked.
#[derive(Debug, Clone)]
pub(super) struct Directory {
    path: PathBuf,
    #[cfg(test)]
    pub hooks: std::sync::Arc<super::hooks::Hooks>,
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
        Ok(Directory {
            path,
            #[cfg(test)]
            hooks: super::hooks::Hooks::of_thread(),
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of an object's file.
    pub fn path_of(&self, key: Key) -> PathBuf {
        self.path.join(key.file_name())
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
                #[cfg(test)]
                let _order = self.hooks.note_new(path, &file);
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

    /// The bytes that the objects' files take.
    pub fn used_bytes(&self) -> Result<u64, TierError> {
        let mut used_bytes = 0_u64;
        for key in self.keys()? {
            let path = self.path_of(key);
            match std::fs::symlink_metadata(&path) {
                Ok(status) => used_bytes = used_bytes.saturating_add(status.blocks() * 512),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(TierError::system(&path, "cannot inspect", error)),
            }
        }
        Ok(used_bytes)
    }

    pub fn remove(&self, key: Key) -> Result<(), TierError> {
        let path = self.path_of(key);
        #[cfg(test)]
        let _order = self.hooks.note(&key.file_name(), super::hooks::Change::Remove);
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

/// Takes a lock that others hold for moments only; [`TierError::Busy`] if it is not free within `patience`.
pub(super) fn wait_for_lock(
    file: &File,
    path: &Path,
    range: LockRange,
    kind: LockKind,
    patience: Duration,
) -> Result<(), TierError> {
    let start = Instant::now();
    let mut wait = SHORTEST_WAIT;
    loop {
        match lock::try_lock(file.as_fd(), range, kind) {
            Ok(true) => return Ok(()),
            Ok(false) if start.elapsed() >= patience => {
                return Err(TierError::Busy { path: path.to_owned() });
            }
            Ok(false) => std::thread::sleep(wait),
            Err(error) => return Err(TierError::system(path, "cannot lock", error)),
        }
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

/// The control file, opened by one user of the tier: its locks exclude all others, also of the same process.
#[derive(Debug)]
pub(super) struct ControlFile {
    /// Before the file, so that it is dropped first.
    _not_inherited: NotInherited,
    file: File,
    directory: Directory,
}

impl ControlFile {
    /// Opens the file. The first opener at a time runs `repair`, and counts what is used.
    pub fn open(
        directory: &Directory,
        repair: impl FnOnce() -> Result<(), TierError>,
    ) -> Result<ControlFile, TierError> {
        let file = directory.file_or_new(CONTROL, |_| Ok(()))?;
        let _not_inherited = NotInherited::new(file.as_fd());
        let control = ControlFile { _not_inherited, file, directory: directory.clone() };
        let failed = |error| control.failed("cannot lock", error);
        if lock::try_lock(control.file.as_fd(), PRESENCE, LockKind::Exclusive).map_err(failed)? {
            repair()?;
            let used_bytes = directory.used_bytes()?;
            control.change(|state| state.used_bytes = used_bytes)?;
        }
        // For the moment above another opener may have it exclusively.
        control.wait_for_lock(PRESENCE, LockKind::Shared)?;
        Ok(control)
    }

    fn failed(&self, what: &'static str, error: io::Error) -> TierError {
        TierError::system(&self.directory.path.join(CONTROL), what, error)
    }

    fn wait_for_lock(&self, range: LockRange, kind: LockKind) -> Result<(), TierError> {
        wait_for_lock(&self.file, &self.directory.path.join(CONTROL), range, kind, LOCK_PATIENCE)
    }

    fn read(&self) -> Result<Control, TierError> {
        let mut bytes = [0; size_of::<Control>()];
        read_at(self.file.as_fd(), &mut bytes, 0)
            .map_err(|error| self.failed("cannot read", error))?;
        Ok(Control::read_from_bytes(&bytes).expect("of its size"))
    }

    pub fn budget_bytes(&self) -> Result<u64, TierError> {
        let state = self.read()?;
        // Under the lock, where it is made anew.
        if state.is_valid() {
            Ok(state.budget_bytes)
        } else {
            self.change(|state| state.budget_bytes)
        }
    }

    /// Changes the state under the lock. One that is damaged, as a crash may leave it, is made anew.
    pub fn change<T>(&self, change: impl FnOnce(&mut Control) -> T) -> Result<T, TierError> {
        self.wait_for_lock(CHANGE, LockKind::Exclusive)?;
        let _held = Held(self);
        let before = self.read()?;
        let mut state = before;
        if !state.is_valid() {
            let free_bytes = free_bytes(&self.file)
                .map_err(|error| self.failed("cannot inspect its file system", error))?;
            let used_bytes = self.directory.used_bytes()?;
            state = Control::new(free_bytes.saturating_add(used_bytes) / DEFAULT_BUDGET_DIVISOR);
            state.used_bytes = used_bytes;
        }
        let result = change(&mut state);
        let state = state.seal();
        if state != before {
            #[cfg(test)]
            let _order = self.directory.hooks.note(
                CONTROL,
                super::hooks::Change::Write { at: 0, bytes: state.as_bytes().to_vec() },
            );
            write_all_at(self.file.as_fd(), state.as_bytes(), 0)
                .map_err(|error| self.failed("cannot write", error))?;
        }
        Ok(result)
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
