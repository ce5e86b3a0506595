//! Path resolution.
//!
//! A path is resolved from the root of the pool, component by component, as of one moment: the
//! caller passes slots that do not change during the call. `.`, `..`, repeated and trailing slashes
//! and symbolic links mean what they mean on Linux; a relative path also starts at the root, since
//! a pool has no working directory. Without symbolic links nothing is allocated.

use std::borrow::Cow;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use aquifer_format::byte_chain;
use aquifer_format::directory::{Referent, Tree};
use aquifer_pool::format::file::{DirectoryFields, FileInode, FileKind, FileState, ROOT_INODE};
use aquifer_pool::format::inode::MAX_NAME_BYTES;
use aquifer_pool::format::slot_bytes::{self, SLOT_BYTES, SlotBytes};
use aquifer_pool::{PoolError, ReadSlots};

pub(crate) use crate::error::owned;
use crate::error::{FsError, Result};
use crate::node_id::Node;

/// The longest path, in bytes.
pub const MAX_PATH_BYTES: usize = 4095;
/// The most symbolic links that one path may follow.
const MAX_LINKS: usize = 40;

/// Whether a symbolic link as the last component of a path is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Last {
    /// Follow it.
    Follow,
    /// Do not follow it, unless a slash comes after it.
    Keep,
    /// Never follow it: the caller creates, moves or removes the name.
    Name,
}

/// The result of resolving a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place<'p> {
    /// The directory that holds the last component.
    pub directory: u64,
    /// The last component; empty if the path refers to `directory` itself, by `/`, `.` or `..`.
    pub name: Cow<'p, [u8]>,
    /// What the name refers to, if it exists.
    pub found: Option<Referent>,
    /// Whether the path ended with a slash, so that it must be a directory.
    pub wants_directory: bool,
}

impl Place<'_> {
    /// A directory itself, by `/`, `.` or `..`.
    fn of_directory(number: u64) -> Self {
        let found = Some(Referent { inode: number, kind: FileKind::Directory });
        Place { directory: number, name: Cow::Borrowed(b""), found, wants_directory: true }
    }

    /// Returns what the path refers to; fails if it does not exist.
    pub fn referent(&self, path: &[u8]) -> Result<Referent> {
        let found = self.named(path)?;
        self.check_slash(found, path)?;
        Ok(found)
    }

    /// As [`Place::referent`], but ignores a trailing slash.
    pub fn named(&self, path: &[u8]) -> Result<Referent> {
        self.check_name(path)?;
        self.found.ok_or_else(|| FsError::NotFound { path: owned(path) })
    }

    /// Fails if the path ended with a slash and this is no directory.
    pub fn check_slash(&self, found: Referent, path: &[u8]) -> Result<()> {
        if self.wants_directory && found.kind != FileKind::Directory {
            Err(FsError::NotADirectory { path: owned(path) })
        } else {
            Ok(())
        }
    }

    /// Fails if the name is too long. [`walk`] does not check this, because Linux checks the last
    /// names only after it has resolved the directories of both paths of a call.
    pub fn check_name(&self, path: &[u8]) -> Result<()> {
        if self.name.len() > MAX_NAME_BYTES {
            Err(FsError::NameTooLong { path: owned(path) })
        } else {
            Ok(())
        }
    }
}

/// The bytes of a path.
pub(crate) fn bytes_of(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

/// Decodes the inode that a directory entry or another inode refers to.
pub(crate) fn inode(slots: &impl ReadSlots<Error = PoolError>, number: u64) -> Result<FileInode> {
    let mut bytes = [0; SLOT_BYTES];
    slots.load(number, &mut bytes)?;
    decode(&bytes, number)
}

fn decode(bytes: &SlotBytes, number: u64) -> Result<FileInode> {
    let decoded = FileInode::decode_unsealed(bytes, number).map_err(|error| FsError::Damaged {
        structure: format!("inode {number}"),
        reason: error.to_string(),
    });
    decoded.map(as_seen)
}

/// In the mode of a file without links: it was a directory, removed while in use.
const WAS_DIRECTORY: u32 = libc::S_IFDIR;

/// A removed directory that is kept is a directory without links to this crate, and a file without
/// names and without content on media, where each directory has a name: so all programs free it like
/// other such files when it is no longer in use.
fn as_seen(inode: FileInode) -> FileInode {
    match inode {
        FileInode { kind: FileKind::File, links: 0, size_bytes: 0, part: 0, mode, .. }
            if mode & WAS_DIRECTORY != 0 && inode.runs.is_empty() =>
        {
            FileInode { kind: FileKind::Directory, mode: mode & !WAS_DIRECTORY, ..inode }
        }
        inode => inode,
    }
}

/// The inode as [`as_seen`] finds it again.
pub(crate) fn as_stored(inode: &FileInode) -> Cow<'_, FileInode> {
    if inode.kind == FileKind::Directory && inode.links == 0 {
        let (kind, mode) = (FileKind::File, inode.mode | WAS_DIRECTORY);
        Cow::Owned(FileInode { kind, mode, parent: 0, seed: 0, ..inode.clone() })
    } else {
        Cow::Borrowed(inode)
    }
}

/// Decodes an inode that was found in an earlier call. What has the number now is that inode only if
/// it has the generation.
pub(crate) fn live(slots: &impl ReadSlots<Error = PoolError>, node: Node) -> Result<FileInode> {
    let Node { number, generation } = node;
    let mut bytes = [0; SLOT_BYTES];
    match load_state(slots, number, &mut bytes)? {
        Some(now) if now.generation == generation => decode(&bytes, number),
        _ => Err(node.stale()),
    }
}

/// What an inode number stands for now; `None` if it is free. A slot that cannot be read is an error:
/// it is not known to be free.
pub(crate) fn state(
    slots: &impl ReadSlots<Error = PoolError>,
    number: u64,
) -> Result<Option<FileState>> {
    load_state(slots, number, &mut [0; SLOT_BYTES])
}

fn load_state(
    slots: &impl ReadSlots<Error = PoolError>,
    number: u64,
    bytes: &mut SlotBytes,
) -> Result<Option<FileState>> {
    slots.load(number, bytes)?;
    Ok(FileState::read(|offset| u64::from_le_bytes(slot_bytes::word(bytes, offset / 8))))
}

/// Decodes the inode that a name refers to, and checks that it has the kind that the name has.
pub(crate) fn referred(
    slots: &impl ReadSlots<Error = PoolError>,
    found: Referent,
) -> Result<FileInode> {
    let inode = inode(slots, found.inode)?;
    if inode.kind == found.kind {
        Ok(inode)
    } else {
        Err(FsError::Damaged {
            structure: format!("inode {}", found.inode),
            reason: "a name that leads to it says that it is something else".to_owned(),
        })
    }
}

/// As [`live`], for what must be a directory. One that was removed and kept has nothing in it, and
/// gets nothing.
pub(crate) fn live_directory(
    slots: &impl ReadSlots<Error = PoolError>,
    node: Node,
) -> Result<FileInode> {
    let inode = live(slots, node)?;
    match inode.kind {
        FileKind::Directory if inode.links == 0 => Err(FsError::NotFound { path: node.to_path() }),
        FileKind::Directory => Ok(inode),
        _ => Err(FsError::NotADirectory { path: node.to_path() }),
    }
}

fn directory(slots: &impl ReadSlots<Error = PoolError>, number: u64) -> Result<DirectoryFields> {
    DirectoryFields::read(|index| slots.word(number, index))?.ok_or_else(|| FsError::Damaged {
        structure: format!("inode {number}"),
        reason: "it is no directory, and a name says that it is".to_owned(),
    })
}

/// Returns the target of a symbolic link.
///
/// # Errors
/// [`FsError::Damaged`]; those of `slots`.
pub fn target(slots: &impl ReadSlots<Error = PoolError>, link: &FileInode) -> Result<Vec<u8>> {
    match link.part {
        0 => Ok(link.target.clone()),
        part => Ok(byte_chain::read(slots, link.number, part)?),
    }
}

/// Looks up a name in a directory that was found in an earlier call, wherever it is now.
pub(crate) fn entry<'n>(
    slots: &impl ReadSlots<Error = PoolError>,
    directory: Node,
    name: &'n [u8],
) -> Result<Place<'n>> {
    let Node { number, generation } = directory;
    let fields = if slots.generation(number)? == generation {
        DirectoryFields::read(|index| slots.word(number, index))?
    } else {
        None
    };
    let Some(fields) = fields else {
        live_directory(slots, directory)?;
        return Err(directory.stale());
    };
    let here = match name {
        b"." => number,
        b".." => fields.parent,
        _ => {
            let tree = Tree { owner: number, seed: fields.seed, root: fields.part };
            let is_too_long = name.len() > MAX_NAME_BYTES;
            let found = if is_too_long { None } else { tree.lookup(slots, name)? };
            let name = Cow::Borrowed(name);
            return Ok(Place { directory: number, name, found, wants_directory: false });
        }
    };
    Ok(Place::of_directory(here))
}

/// The result of following a path up to its end or to a symbolic link.
enum Step<'p> {
    Done(Place<'p>),
    /// A symbolic link: continue from this directory along this path.
    Link(u64, Vec<u8>),
}

/// Fails if these bytes cannot be a path.
pub(crate) fn check(path: &[u8]) -> Result<()> {
    if path.is_empty() {
        return Err(FsError::NotFound { path: PathBuf::new() });
    }
    if path.len() > MAX_PATH_BYTES {
        return Err(FsError::NameTooLong { path: owned(path) });
    }
    if path.contains(&0) {
        Err(FsError::BadName { path: owned(path), reason: "there is a NUL in it" })
    } else {
        Ok(())
    }
}

/// Fails if these bytes cannot be a name in a directory, nor `.` or `..`.
pub(crate) fn check_name(name: &[u8]) -> Result<()> {
    let reason = match name {
        b"" => return Err(FsError::NotFound { path: PathBuf::new() }),
        _ if name.contains(&0) => "there is a NUL in it",
        _ if name.contains(&b'/') => "there is a slash in it, and it is a name",
        _ => return Ok(()),
    };
    Err(FsError::BadName { path: owned(name), reason })
}

/// Resolves a path.
///
/// # Errors
/// [`FsError::NotFound`], [`FsError::NotADirectory`], [`FsError::NameTooLong`],
/// [`FsError::BadName`], [`FsError::LinkLoop`], [`FsError::Damaged`].
pub(crate) fn walk<'p>(
    slots: &impl ReadSlots<Error = PoolError>,
    path: &'p [u8],
    last: Last,
) -> Result<Place<'p>> {
    check(path)?;
    let (mut directory, mut rest) = match step(slots, ROOT_INODE, path, path, last)? {
        Step::Done(place) => return Ok(place),
        Step::Link(directory, rest) => (directory, rest),
    };
    for _ in 0..MAX_LINKS {
        match step(slots, directory, &rest, path, last)? {
            Step::Done(place) => {
                return Ok(Place { name: Cow::Owned(place.name.into_owned()), ..place });
            }
            Step::Link(from, behind) => (directory, rest) = (from, behind),
        }
    }
    Err(FsError::LinkLoop { path: owned(path) })
}

/// Follows `rest` up to its end or to a symbolic link. `path` is for messages.
fn step<'p>(
    slots: &impl ReadSlots<Error = PoolError>,
    from: u64,
    rest: &'p [u8],
    path: &[u8],
    last: Last,
) -> Result<Step<'p>> {
    let mut here = if rest.first() == Some(&b'/') { ROOT_INODE } else { from };
    let mut rest = rest;
    loop {
        while let Some((&b'/', behind)) = rest.split_first() {
            rest = behind;
        }
        let end = rest.iter().position(|&byte| byte == b'/').unwrap_or(rest.len());
        let (name, behind) = rest.split_at(end);
        let is_last = behind.iter().all(|&byte| byte == b'/');
        if matches!(name, b"" | b"." | b"..") {
            if name == b".." {
                here = self::directory(slots, here)?.parent;
            }
            if is_last {
                return Ok(Step::Done(Place::of_directory(here)));
            }
            rest = behind;
            continue;
        }
        let is_too_long = name.len() > MAX_NAME_BYTES;
        if is_too_long && !is_last {
            return Err(FsError::NameTooLong { path: owned(path) });
        }
        let found = if is_too_long {
            None
        } else {
            let fields = self::directory(slots, here)?;
            let tree = Tree { owner: here, seed: fields.seed, root: fields.part };
            tree.lookup(slots, name)?
        };
        let wants_directory = is_last && !behind.is_empty();
        let is_followed = match last {
            Last::Follow => true,
            Last::Keep => wants_directory,
            Last::Name => false,
        };
        match found {
            Some(Referent { inode, kind: FileKind::Symlink }) if !is_last || is_followed => {
                let found = Referent { inode, kind: FileKind::Symlink };
                let mut on = target(slots, &referred(slots, found)?)?;
                if !behind.is_empty() {
                    on.extend_from_slice(behind);
                }
                return Ok(Step::Link(here, on));
            }
            _ if is_last => {
                let name = Cow::Borrowed(name);
                return Ok(Step::Done(Place { directory: here, name, found, wants_directory }));
            }
            Some(Referent { inode, kind: FileKind::Directory }) => here = inode,
            Some(_) => return Err(FsError::NotADirectory { path: owned(path) }),
            None => return Err(FsError::NotFound { path: owned(path) }),
        }
        rest = behind;
    }
}

/// Returns the path from the root, without `.`, `..` and symbolic links, of what [`walk`] finds at
/// `path` in the same slots with [`Last::Follow`].
pub(crate) fn canonical(slots: &impl ReadSlots<Error = PoolError>, path: &[u8]) -> Result<Vec<u8>> {
    let components = |path: &[u8]| -> Vec<Vec<u8>> {
        path.split(|&byte| byte == b'/').rev().map(<[u8]>::to_vec).collect()
    };
    let (mut here, mut found) = (ROOT_INODE, Vec::new());
    // The directories above `here`, each with the length of its path.
    let mut above = Vec::new();
    // The next component comes last.
    let mut rest = components(path);
    while let Some(name) = rest.pop() {
        if name == b".." {
            if let Some((parent, len)) = above.pop() {
                here = parent;
                found.truncate(len);
            }
            continue;
        }
        if matches!(&name[..], b"" | b".") {
            continue;
        }
        let fields = directory(slots, here)?;
        let tree = Tree { owner: here, seed: fields.seed, root: fields.part };
        let referent = tree.lookup(slots, &name)?;
        let referent = referent.ok_or_else(|| FsError::NotFound { path: owned(path) })?;
        if referent.kind == FileKind::Symlink {
            let target = target(slots, &referred(slots, referent)?)?;
            if target.starts_with(b"/") {
                here = ROOT_INODE;
                above.clear();
                found.clear();
            }
            rest.extend(components(&target));
            continue;
        }
        above.push((here, found.len()));
        here = referent.inode;
        found.push(b'/');
        found.extend(name);
    }
    if found.is_empty() {
        found.push(b'/');
    }
    if found.len() > MAX_PATH_BYTES {
        return Err(FsError::NameTooLong { path: owned(path) });
    }
    Ok(found)
}
