//! Describes a file, as text and as JSON.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use aquifer::Files;
use aquifer::fs::{FileKind, Metadata};
use serde::Serialize;

use super::Place;
use super::failure::At;
use crate::output;

/// A file of any kind, as JSON.
#[derive(Debug, Serialize)]
pub struct Entry {
    /// The path in the pool; escaped if it is not UTF-8.
    path: String,
    /// Its last component.
    name: String,
    /// Whether path and name are UTF-8 and therefore unescaped.
    name_is_utf8: bool,
    kind: &'static str,
    /// Permissions, as a number.
    mode: u32,
    /// Kind and permissions as in `ls -l`.
    permissions: String,
    links: u64,
    uid: u32,
    gid: u32,
    /// The length of a file, or of a symbolic link's target.
    size_bytes: u64,
    /// The number of names in a directory.
    names: Option<u64>,
    /// Bytes of the pool allocated to its content.
    allocated_bytes: u64,
    inode: u64,
    generation: u64,
    is_immutable: bool,
    /// The number of a device.
    device: Option<Device>,
    modified_ns: i64,
    accessed_ns: i64,
    changed_ns: i64,
    created_ns: i64,
    /// The target of a symbolic link; escaped if it is not UTF-8.
    target: Option<String>,
    #[serde(skip)]
    raw_name: Vec<u8>,
    #[serde(skip)]
    raw_target: Option<Vec<u8>>,
}

/// The number of a device.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Device {
    pub major: u32,
    pub minor: u32,
}

impl Device {
    fn of(metadata: &Metadata) -> Option<Device> {
        let (kind, rdev) = (metadata.file_type(), metadata.rdev());
        (kind.is_char_device() || kind.is_block_device())
            .then(|| Device { major: libc::major(rdev), minor: libc::minor(rdev) })
    }
}

/// The bytes as text, escaped if they are not UTF-8; and whether they are UTF-8.
pub fn as_json(bytes: &[u8]) -> (String, bool) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (text.to_owned(), true),
        Err(_) => (output::escaped(bytes), false),
    }
}

/// The name of a kind in all output.
pub fn kind_name(kind: FileKind) -> &'static str {
    match kind {
        FileKind::File => "file",
        FileKind::Directory => "directory",
        FileKind::Symlink => "symlink",
        FileKind::Fifo => "fifo",
        FileKind::Socket => "socket",
        FileKind::CharDevice => "char-device",
        FileKind::BlockDevice => "block-device",
        _ => "unknown",
    }
}

/// Nanoseconds since 1970.
pub fn nanoseconds(time: SystemTime) -> i64 {
    let ns = |since: std::time::Duration| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX);
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => ns(since),
        Err(before) => -ns(before.duration()),
    }
}

/// A time as text.
pub fn moment(ns: i64) -> String {
    match u64::try_from(ns) {
        Ok(ns) => output::moment(ns),
        Err(_) => format!("{} s before 1970", ns.unsigned_abs() / 1_000_000_000),
    }
}

/// `drwxr-xr-x`.
pub fn permissions(kind: FileKind, mode: u32) -> String {
    let mut text = String::from(match kind {
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
        FileKind::Fifo => 'p',
        FileKind::Socket => 's',
        FileKind::CharDevice => 'c',
        FileKind::BlockDevice => 'b',
        _ => '-',
    });
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (bits & 1 != 0, mode & special != 0) {
            (true, false) => 'x',
            (false, false) => '-',
            (true, true) => letter,
            (false, true) => letter.to_ascii_uppercase(),
        });
    }
    text
}

impl Entry {
    /// The entry at a place, with known metadata.
    pub fn of(files: &Files, place: &Place, name: &OsStr, metadata: &Metadata) -> Result<Entry> {
        let target = if metadata.is_symlink() {
            Some(files.read_link(place.path()).at(place)?)
        } else {
            None
        };
        let raw_target = target.map(|target| target.as_os_str().as_bytes().to_vec());
        let (path, name_is_utf8) = as_json(place.path().as_os_str().as_bytes());
        let (kind, mode) = (metadata.file_type().kind(), metadata.mode() & 0o7777);
        Ok(Entry {
            path,
            name: as_json(name.as_bytes()).0,
            name_is_utf8,
            kind: kind_name(kind),
            mode,
            permissions: permissions(kind, mode),
            links: metadata.nlink(),
            uid: metadata.uid(),
            gid: metadata.gid(),
            size_bytes: if metadata.is_dir() { 0 } else { metadata.len() },
            names: metadata.is_dir().then_some(metadata.len()),
            allocated_bytes: metadata.allocated_bytes(),
            inode: metadata.ino(),
            generation: metadata.generation(),
            is_immutable: metadata.is_immutable(),
            device: Device::of(metadata),
            modified_ns: nanoseconds(metadata.modified().at(place)?),
            accessed_ns: nanoseconds(metadata.accessed().at(place)?),
            changed_ns: nanoseconds(metadata.changed()),
            created_ns: nanoseconds(metadata.created().at(place)?),
            target: raw_target.as_deref().map(|target| as_json(target).0),
            raw_name: name.as_bytes().to_vec(),
            raw_target,
        })
    }

    /// The same entry under another name.
    pub fn named(self, name: &Path) -> Entry {
        let raw_name = name.as_os_str().as_bytes().to_vec();
        Entry { name: as_json(&raw_name).0, raw_name, ..self }
    }

    pub fn raw_name(&self) -> &[u8] {
        &self.raw_name
    }

    pub fn raw_target(&self) -> Option<&[u8]> {
        self.raw_target.as_deref()
    }

    pub fn permissions(&self) -> &str {
        &self.permissions
    }

    pub fn kind(&self) -> &'static str {
        self.kind
    }

    pub fn mode(&self) -> u32 {
        self.mode
    }

    pub fn links(&self) -> u64 {
        self.links
    }

    pub fn owner(&self) -> (u32, u32) {
        (self.uid, self.gid)
    }

    /// Length in bytes; of a directory, its number of names.
    pub fn len(&self) -> u64 {
        self.names.unwrap_or(self.size_bytes)
    }

    pub fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes
    }

    pub fn inode(&self) -> u64 {
        self.inode
    }

    pub fn is_immutable(&self) -> bool {
        self.is_immutable
    }

    pub fn device(&self) -> Option<Device> {
        self.device
    }

    pub fn modified_ns(&self) -> i64 {
        self.modified_ns
    }

    /// The access, change and creation times.
    pub fn other_times_ns(&self) -> [i64; 3] {
        [self.accessed_ns, self.changed_ns, self.created_ns]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_shown_as_by_ls() {
        assert_eq!(permissions(FileKind::Directory, 0o755), "drwxr-xr-x");
        assert_eq!(permissions(FileKind::File, 0o6644), "-rwSr-Sr--");
        assert_eq!(permissions(FileKind::File, 0o4711), "-rws--x--x");
        assert_eq!(permissions(FileKind::Directory, 0o1777), "drwxrwxrwt");
        assert_eq!(permissions(FileKind::Symlink, 0o777), "lrwxrwxrwx");
        assert_eq!(permissions(FileKind::CharDevice, 0o620), "crw--w----");
    }

    #[test]
    fn times_before_1970_are_shown() {
        assert_eq!(moment(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(moment(-5_000_000_000), "5 s before 1970");
    }
}
