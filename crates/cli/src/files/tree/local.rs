//! The machine's file systems, as a tree to copy from or to.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{
    DirBuilderExt, FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, lchown,
    symlink,
};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Error, Result};
use aquifer::fs::SpecialFile;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, RenameFlags, SeekFrom, Timespec, Timestamps, XattrFlags,
    getxattr, lgetxattr, listxattr, llistxattr, lsetxattr, mknodat, renameat_with, seek, utimensat,
};
use rustix::io::Errno;

use super::{Attributes, Content, Item, Kind, New, Tree};
use crate::files::failure::shown;

/// The Linux limit for an attribute's value and for the list of attribute names.
const MAX_ATTRIBUTES_BYTES: usize = 64 << 10;

/// Prefix of the temporary names of incomplete items. Linux also has files without a name, but it
/// cannot link them over an existing name, it has no unnamed symbolic links, and not all file
/// systems support them.
const TEMPORARY: &str = ".aquifer-";

/// All paths that this process can reach.
pub struct Local;

/// An open file and its path.
pub struct LocalFile {
    file: File,
    path: PathBuf,
}

/// An item being created under a temporary name, which stays if the process is killed.
pub struct LocalNew {
    /// `None` for anything but a file, and for a hard link.
    file: Option<File>,
    temporary: PathBuf,
    name: PathBuf,
}

impl LocalNew {
    fn make(name: &Path, make: impl FnOnce(&Path) -> io::Result<Option<File>>) -> Result<LocalNew> {
        let number = aquifer_sys::random::next_u64().context("cannot generate a temporary name")?;
        let parent = name.parent().unwrap_or(Path::new(""));
        let temporary = parent.join(format!("{TEMPORARY}{number:016x}"));
        let file = at(name, make(&temporary))?;
        Ok(LocalNew { file, temporary, name: name.to_owned() })
    }

    fn file(&self) -> io::Result<&File> {
        self.file.as_ref().ok_or_else(|| Errno::INVAL.into())
    }
}

impl Drop for LocalNew {
    fn drop(&mut self) {
        // Fails if it was renamed to its final name.
        let _ = fs::remove_file(&self.temporary);
    }
}

impl New for LocalNew {
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        at(&self.name, self.file().and_then(|file| file.write_all_at(bytes, offset_bytes)))
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        at(&self.name, self.file().and_then(|file| file.set_len(len_bytes)))
    }

    fn finish(&self, item: &Item, attributes: &Attributes) -> Result<u64> {
        finish(&self.temporary, &self.name, item, attributes)
    }

    fn place(self, replace: bool) -> Result<()> {
        if let Some(file) = &self.file {
            // A power cut may otherwise leave the name without the content.
            at(&self.name, file.sync_data())?;
        }
        let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        let renamed = renameat_with(CWD, &self.temporary, CWD, &self.name, flags);
        at(&self.name, renamed.map_err(io::Error::from))
    }
}

/// Sets owner, attributes, permissions and times of a path.
///
/// The owner is kept if the user may change it. Otherwise the set-user-ID, set-group-ID and sticky
/// bits are dropped, so that a program does not run as the wrong user. `shown` is the path for
/// messages. Returns the number of attributes that could not be set.
fn finish(path: &Path, shown: &Path, item: &Item, attributes: &Attributes) -> Result<u64> {
    let is_owned = match lchown(path, Some(item.uid), Some(item.gid)) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let made = at(shown, fs::symlink_metadata(path))?;
            (made.uid(), made.gid()) == (item.uid, item.gid)
        }
        outcome => at(shown, outcome.map(|()| true))?,
    };
    let mut lost = 0;
    for (name, value) in attributes {
        match lsetxattr(path, &name[..], value, XattrFlags::empty()) {
            Ok(()) => {}
            Err(
                Errno::OPNOTSUPP
                | Errno::PERM
                | Errno::ACCESS
                | Errno::INVAL
                | Errno::NOSPC
                | Errno::TOOBIG
                | Errno::RANGE,
            ) => lost += 1,
            Err(error) => return at(shown, Err(error.into())),
        }
    }
    if item.kind != Kind::Link {
        // Behind the access list, which sets a mode of its own; the two agree.
        let mode = if is_owned { item.mode } else { item.mode & 0o777 };
        at(shown, fs::set_permissions(path, fs::Permissions::from_mode(mode)))?;
    }
    let times = Timestamps {
        last_access: timespec(item.accessed),
        last_modification: timespec(item.modified),
    };
    let set = utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW);
    at(shown, set.map_err(io::Error::from))?;
    Ok(lost)
}

fn at<T>(path: &Path, outcome: io::Result<T>) -> Result<T> {
    outcome.with_context(|| shown(path))
}

/// Seconds and nanoseconds since 1970, with nonnegative nanoseconds.
fn timespec(time: SystemTime) -> Timespec {
    let of = |since: Duration| (since.as_secs() as i64, i64::from(since.subsec_nanos()));
    let (tv_sec, tv_nsec) = match time.duration_since(UNIX_EPOCH) {
        Ok(since) => of(since),
        Err(before) => match of(before.duration()) {
            (seconds, 0) => (-seconds, 0),
            (seconds, ns) => (-seconds - 1, 1_000_000_000 - ns),
        },
    };
    Timespec { tv_sec, tv_nsec }
}

/// A file system time, which may be before 1970.
fn time(seconds: i64, ns: i64) -> SystemTime {
    let whole = match u64::try_from(seconds) {
        Ok(since) => UNIX_EPOCH + Duration::from_secs(since),
        Err(_) => UNIX_EPOCH - Duration::from_secs(seconds.unsigned_abs()),
    };
    whole + Duration::from_nanos(ns as u64)
}

impl Tree for Local {
    type File = LocalFile;
    type New = LocalNew;

    fn show(&self, path: &Path) -> String {
        shown(path)
    }

    fn item(&self, path: &Path, follow: bool) -> Result<Option<Item>> {
        let metadata = if follow { fs::metadata(path) } else { fs::symlink_metadata(path) };
        let metadata = match metadata {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => at(path, metadata)?,
        };
        let kind = metadata.file_type();
        Ok(Some(Item {
            kind: match kind {
                _ if kind.is_file() => Kind::File,
                _ if kind.is_dir() => Kind::Directory,
                _ if kind.is_symlink() => Kind::Link,
                _ if kind.is_fifo() => Kind::Special(SpecialFile::Fifo),
                _ if kind.is_socket() => Kind::Special(SpecialFile::Socket),
                _ if kind.is_char_device() => {
                    Kind::Special(SpecialFile::CharDevice(metadata.rdev()))
                }
                _ if kind.is_block_device() => {
                    Kind::Special(SpecialFile::BlockDevice(metadata.rdev()))
                }
                _ => Kind::Other,
            },
            mode: metadata.mode() & 0o7777,
            uid: metadata.uid(),
            gid: metadata.gid(),
            len_bytes: metadata.len(),
            accessed: time(metadata.atime(), metadata.atime_nsec()),
            modified: time(metadata.mtime(), metadata.mtime_nsec()),
            links: metadata.nlink(),
            identity: (metadata.dev(), metadata.ino()),
        }))
    }

    fn names(&self, directory: &Path) -> Result<Vec<OsString>> {
        let entries: io::Result<Vec<_>> = fs::read_dir(directory)
            .and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect());
        let mut names = at(directory, entries)?;
        names.sort();
        Ok(names)
    }

    fn target(&self, link: &Path) -> Result<PathBuf> {
        at(link, fs::read_link(link))
    }

    fn open(&self, path: &Path, follow: bool) -> Result<LocalFile> {
        // The file may have been replaced by a pipe, whose open must not block.
        let flags = libc::O_NONBLOCK | if follow { 0 } else { libc::O_NOFOLLOW };
        let file = at(path, File::options().read(true).custom_flags(flags).open(path))?;
        Ok(LocalFile { file, path: path.to_owned() })
    }

    fn attributes(&self, path: &Path, follow: bool) -> Result<Attributes> {
        let mut bytes = vec![0; MAX_ATTRIBUTES_BYTES];
        let listed = match follow {
            true => listxattr(path, &mut bytes[..]),
            false => llistxattr(path, &mut bytes[..]),
        };
        let len = match listed {
            Ok(len) => len,
            // The file has none, or access to them is denied.
            Err(Errno::OPNOTSUPP | Errno::PERM | Errno::ACCESS) => return Ok(Vec::new()),
            Err(error) => return at(path, Err(error.into())),
        };
        let names: Vec<Vec<u8>> = bytes[..len]
            .split(|&byte| byte == 0)
            .filter(|name| !name.is_empty())
            .map(<[u8]>::to_vec)
            .collect();
        let mut attributes = Attributes::new();
        for name in names {
            // Skip attributes that are inaccessible or were removed concurrently.
            let got = match follow {
                true => getxattr(path, &name[..], &mut bytes[..]),
                false => lgetxattr(path, &name[..], &mut bytes[..]),
            };
            if let Ok(len) = got {
                attributes.push((name, bytes[..len].to_vec()));
            }
        }
        Ok(attributes)
    }

    fn make_file(&self, name: &Path, _len_bytes: u64) -> Result<LocalNew> {
        LocalNew::make(name, |path| {
            File::options().write(true).create_new(true).mode(0o600).open(path).map(Some)
        })
    }

    fn make_link(&self, target: &Path, name: &Path) -> Result<LocalNew> {
        LocalNew::make(name, |path| symlink(target, path).map(|()| None))
    }

    fn make_special(&self, special: SpecialFile, name: &Path) -> Result<LocalNew> {
        let (kind, rdev) = match special {
            SpecialFile::Fifo => (FileType::Fifo, 0),
            SpecialFile::Socket => (FileType::Socket, 0),
            SpecialFile::CharDevice(rdev) => (FileType::CharacterDevice, rdev),
            SpecialFile::BlockDevice(rdev) => (FileType::BlockDevice, rdev),
        };
        LocalNew::make(name, |path| {
            Ok(mknodat(CWD, path, kind, Mode::from_raw_mode(0o600), rdev).map(|()| None)?)
        })
    }

    fn make_name(&self, original: &Path, name: &Path) -> Result<LocalNew> {
        LocalNew::make(name, |path| fs::hard_link(original, path).map(|()| None))
    }

    fn make_directory(&self, path: &Path) -> Result<()> {
        at(path, fs::DirBuilder::new().mode(0o700).create(path))
    }

    fn finish_directory(&self, path: &Path, item: &Item, attributes: &Attributes) -> Result<u64> {
        finish(path, path, item, attributes)
    }
}

impl Content for LocalFile {
    fn next_data(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<Option<Range<u64>>> {
        if offset_bytes >= len_bytes {
            return Ok(None);
        }
        let start = match seek(&self.file, SeekFrom::Data(offset_bytes)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            // The file system does not support `SEEK_DATA`.
            Err(Errno::INVAL) => return Ok(Some(offset_bytes..len_bytes)),
            Err(error) => return Err(error.into()),
        };
        let end = seek(&self.file, SeekFrom::Hole(start))?;
        Ok((start < len_bytes).then_some(start..end.min(len_bytes)))
    }

    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < bytes.len() {
            match self.file.read_at(&mut bytes[done..], offset_bytes + done as u64) {
                Ok(0) => break,
                Ok(got) => done += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn explain(&self, error: io::Error) -> Error {
        Error::new(error).context(shown(&self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_kept_on_both_sides_of_1970() {
        for (seconds, ns) in [(0, 0), (5, 7), (-5, 0), (-5, 7), (-1, 999_999_999)] {
            let there = timespec(time(seconds, ns));
            assert_eq!((there.tv_sec, there.tv_nsec), (seconds, ns));
        }
    }
}
