//! Inodes of files, directories, symbolic links, and special files: named pipes, sockets, devices.
//!
//! | kind | `size_bytes` | `runs` | `part` | `parent` | `seed`, `entries` | `device` |
//! |---|---|---|---|---|---|---|
//! | file | of the content; may reach beyond the runs, or end before them | its pages, in order | more runs: a [`RunList`](crate::run_list::RunList) | | | |
//! | directory | | | the root of its tree: a [`Node`](crate::directory::Node) | the directory it is in | of its names | |
//! | link | of the target | | the target, if it is long: a [`ByteChain`](crate::byte_chain::ByteChain) | | | |
//! | named pipe, socket | | | | | | |
//! | device | | | | | | its number |
//!
//! An inode without links is in use as long as a process has it open, and is removed when the pool
//! is recovered.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::FormatError;
use crate::run::{RawRun, Run};
use crate::run_list::{pack, unpack};
use crate::slot_bytes::{SLOT_BYTES, SlotBytes, UNSEALED, check, seal};

/// The magic of such a slot.
pub const MAGIC: [u8; 4] = *b"AQFI";
/// The most runs in an inode of a file.
pub const FILE_RUNS: usize = 40;
/// The longest target of a symbolic link that is stored in its inode.
pub const INLINE_TARGET_BYTES: usize = FILE_RUNS * 8;
/// The inode of the root directory.
pub const ROOT_INODE: u64 = 1;

/// The kind of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

impl FileKind {
    /// Whether it is a named pipe, a socket or a device: something that has no content.
    pub fn is_special(self) -> bool {
        matches!(self, FileKind::Fifo | FileKind::Socket) || self.is_device()
    }

    /// Whether it is a character device or a block device.
    pub fn is_device(self) -> bool {
        matches!(self, FileKind::CharDevice | FileKind::BlockDevice)
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            FileKind::File => 1,
            FileKind::Directory => 2,
            FileKind::Symlink => 3,
            FileKind::Fifo => 4,
            FileKind::Socket => 5,
            FileKind::CharDevice => 6,
            FileKind::BlockDevice => 7,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<FileKind> {
        match code {
            1 => Some(FileKind::File),
            2 => Some(FileKind::Directory),
            3 => Some(FileKind::Symlink),
            4 => Some(FileKind::Fifo),
            5 => Some(FileKind::Socket),
            6 => Some(FileKind::CharDevice),
            7 => Some(FileKind::BlockDevice),
            _ => None,
        }
    }
}

/// An inode of a file of any kind, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileInode {
    /// Its slot.
    pub number: u64,
    /// What it is.
    pub kind: FileKind,
    /// Whether content and attributes must not be changed.
    pub is_immutable: bool,
    /// Whether immutability is about to end: it still holds, but must not be newly relied on.
    pub is_clearing_immutable: bool,
    /// Differs from that of every other inode in the same slot, past or future.
    pub generation: u64,
    /// Raised whenever its runs change.
    pub layout_version: u64,
    /// Length in bytes.
    pub size_bytes: u64,
    /// Pages that its runs name, holes not counted.
    pub pages: u64,
    /// When it was created, in nanoseconds since 1970. All times may be negative.
    pub created_ns: i64,
    /// When any part of it was last changed.
    pub changed_ns: i64,
    /// When its content was last changed.
    pub modified_ns: i64,
    /// When its content was last read, if any reader has recorded that.
    pub accessed_ns: i64,
    /// Permissions: the lowest 12 bits as in `chmod`.
    pub mode: u32,
    /// The user it belongs to.
    pub uid: u32,
    /// The group it belongs to.
    pub gid: u32,
    /// The names that refer to it; for a directory, 2 and one for each directory in it.
    pub links: u32,
    /// The parent of a directory; its own number for the root, and 0 for a removed directory.
    pub parent: u64,
    /// The first part: see the module's documentation. 0 if there is none.
    pub part: u64,
    /// The first slot of its extended attributes, a [`ByteChain`](crate::byte_chain::ByteChain); 0
    /// if there are none.
    pub attributes: u64,
    /// The seed of the hashes of a directory's names.
    pub seed: u64,
    /// The number of names in a directory.
    pub entries: u64,
    /// The number of a device: major in the upper half, minor in the lower one. 0 for other kinds.
    pub device: u64,
    /// The first runs of a file.
    pub runs: Vec<Run>,
    /// The target of a symbolic link that has no part.
    pub target: Vec<u8>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawFile {
    magic: [u8; 4],
    kind: U16,
    flags: U16,
    number: U64,
    generation: U64,
    layout_version: U64,
    size_bytes: U64,
    pages: U64,
    created_ns: U64,
    changed_ns: U64,
    modified_ns: U64,
    accessed_ns: U64,
    mode: U32,
    uid: U32,
    gid: U32,
    links: U32,
    parent: U64,
    part: U64,
    attributes: U64,
    seed: U64,
    entries: U64,
    run_count: U16,
    reserved: [u8; 6],
    device: U64,
    reserved_too: [u8; 32],
    runs: [RawRun; FILE_RUNS],
    checksum: U64,
}

const _: () = {
    assert!(size_of::<RawFile>() == SLOT_BYTES);
    // `image_slots::file_version` loads these two from the image as words.
    assert!(std::mem::offset_of!(RawFile, generation) == 16);
    assert!(std::mem::offset_of!(RawFile, layout_version) == 24);
    assert!(std::mem::offset_of!(RawFile, device) == 144);
    assert!(std::mem::offset_of!(RawFile, runs) == 184);
    assert!(std::mem::offset_of!(RawFile, checksum) == 504);
};

/// The byte range of the runs.
pub(crate) const RUNS_RANGE: std::ops::Range<usize> = {
    let start = std::mem::offset_of!(RawFile, runs);
    start..start + FILE_RUNS * 8
};

/// Whether a slot holds a symbolic link, whose target lies where other kinds have runs.
pub(crate) fn is_link(bytes: &SlotBytes) -> bool {
    let is_link =
        |raw: &RawFile| raw.magic == MAGIC && raw.kind.get() == FileKind::Symlink.code().into();
    RawFile::ref_from_bytes(bytes).is_ok_and(is_link)
}

/// The fields that a reader of an open file loads at each access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileState {
    /// Differs from that of every other inode in the same slot, past or future.
    pub generation: u64,
    /// Raised whenever the runs change.
    pub layout_version: u64,
    /// Length in bytes.
    pub size_bytes: u64,
    /// When its content was last changed, in nanoseconds since 1970.
    pub modified_ns: i64,
    /// Permissions: the lowest 12 bits as in `chmod`.
    pub mode: u32,
    /// The names that refer to it.
    pub links: u32,
    /// The first slot of its extended attributes; 0 if there are none.
    pub attributes: u64,
    /// Whether it must not be changed.
    pub is_immutable: bool,
}

impl FileState {
    /// Reads it from the words of a slot, each given by the offset of its first byte; `None` if the
    /// slot is no inode of a file.
    #[inline]
    pub fn read(word: impl Fn(usize) -> u64) -> Option<FileState> {
        let first = word(0).to_le_bytes();
        let flags = u16::from_le_bytes([first[6], first[7]]);
        (first[..4] == MAGIC).then(|| FileState {
            generation: word(Self::INCARNATION_OFFSET),
            layout_version: word(Self::LAYOUT_VERSION_OFFSET),
            size_bytes: word(Self::SIZE_OFFSET),
            modified_ns: word(Self::MODIFIED_OFFSET) as i64,
            mode: word(Self::MODE_OFFSET) as u32,
            links: (word(Self::LINKS_OFFSET - 4) >> 32) as u32,
            attributes: word(Self::ATTRIBUTES_OFFSET),
            is_immutable: flags & IMMUTABLE != 0,
        })
    }

    const INCARNATION_OFFSET: usize = std::mem::offset_of!(RawFile, generation);
    /// The offset of the layout version.
    pub const LAYOUT_VERSION_OFFSET: usize = std::mem::offset_of!(RawFile, layout_version);
    const SIZE_OFFSET: usize = std::mem::offset_of!(RawFile, size_bytes);
    const MODIFIED_OFFSET: usize = std::mem::offset_of!(RawFile, modified_ns);
    const ATTRIBUTES_OFFSET: usize = std::mem::offset_of!(RawFile, attributes);
    /// In the lower half of its word.
    const MODE_OFFSET: usize = std::mem::offset_of!(RawFile, mode);
    /// In the upper half of its word.
    const LINKS_OFFSET: usize = std::mem::offset_of!(RawFile, links);
}

const _: () = assert!(FileState::LINKS_OFFSET % 8 == 4 && FileState::MODE_OFFSET.is_multiple_of(8));

/// Whether a slot with these two words is an inode of a file without links. The bytes must be known
/// to be valid.
#[inline]
pub fn is_unlinked(first_word: [u8; 8], links: [u8; 8]) -> bool {
    first_word[..4] == MAGIC && links[4..] == [0; 4]
}

/// The index of the word with the links of a file, in its upper half.
pub const LINKS_WORD: usize = FileState::LINKS_OFFSET / 8;

/// Whether a slot with this first word is the inode of a directory.
#[inline]
pub fn is_directory(first_word: [u8; 8]) -> bool {
    first_word[..4] == MAGIC && first_word[4..6] == [FileKind::Directory.code(), 0]
}

/// The fields of a directory that a path walk needs, read in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectoryFields {
    /// The parent directory.
    pub parent: u64,
    /// The root of its tree.
    pub part: u64,
    /// The seed of the hashes of its names.
    pub seed: u64,
}

impl DirectoryFields {
    /// Reads them from the words of a slot, given by their index; `None` if the slot is no
    /// directory.
    ///
    /// # Errors
    /// The errors of `word`.
    #[inline]
    pub fn read<E>(
        word: impl Fn(usize) -> Result<[u8; 8], E>,
    ) -> Result<Option<DirectoryFields>, E> {
        let first = word(0)?;
        if !is_directory(first) {
            return Ok(None);
        }
        let number = |offset: usize| word(offset / 8).map(u64::from_le_bytes);
        Ok(Some(DirectoryFields {
            parent: number(std::mem::offset_of!(RawFile, parent))?,
            part: number(std::mem::offset_of!(RawFile, part))?,
            seed: number(std::mem::offset_of!(RawFile, seed))?,
        }))
    }
}

const IMMUTABLE: u16 = 1;
const THAWING: u16 = 2;
const IMMUTABLE_THAWING: u16 = IMMUTABLE | THAWING;

impl FileInode {
    /// Creates an inode of this kind, empty, without a name.
    pub fn new(kind: FileKind, number: u64, generation: u64) -> FileInode {
        FileInode {
            number,
            kind,
            is_immutable: false,
            is_clearing_immutable: false,
            generation,
            layout_version: 0,
            size_bytes: 0,
            pages: 0,
            created_ns: 0,
            changed_ns: 0,
            modified_ns: 0,
            accessed_ns: 0,
            mode: 0,
            uid: 0,
            gid: 0,
            links: 0,
            parent: 0,
            part: 0,
            attributes: 0,
            seed: 0,
            entries: 0,
            device: 0,
            runs: Vec::new(),
            target: Vec::new(),
        }
    }

    /// Encodes it as bytes.
    ///
    /// # Errors
    /// [`FormatError::Field`] if there are too many runs, or the target is too long.
    pub fn encode(&self) -> Result<SlotBytes, FormatError> {
        let mut bytes = [0; SLOT_BYTES];
        self.encode_unsealed(&mut bytes)?;
        seal(&mut bytes);
        Ok(bytes)
    }

    /// [`FileInode::encode`] for memory: without the checksum, and over any previous bytes.
    ///
    /// # Errors
    /// As for [`FileInode::encode`].
    pub fn encode_unsealed(&self, bytes: &mut SlotBytes) -> Result<(), FormatError> {
        let raw = RawFile::mut_from_bytes(bytes).map_err(|_| FormatError::Short)?;
        raw.magic = MAGIC;
        raw.kind = U16::new(self.kind.code().into());
        raw.flags = U16::new(
            if self.is_immutable { IMMUTABLE } else { 0 }
                | if self.is_clearing_immutable { THAWING } else { 0 },
        );
        raw.number = U64::new(self.number);
        raw.generation = U64::new(self.generation);
        raw.layout_version = U64::new(self.layout_version);
        raw.size_bytes = U64::new(self.size_bytes);
        raw.pages = U64::new(self.pages);
        raw.created_ns = U64::new(self.created_ns as u64);
        raw.changed_ns = U64::new(self.changed_ns as u64);
        raw.modified_ns = U64::new(self.modified_ns as u64);
        raw.accessed_ns = U64::new(self.accessed_ns as u64);
        raw.mode = U32::new(self.mode);
        raw.uid = U32::new(self.uid);
        raw.gid = U32::new(self.gid);
        raw.links = U32::new(self.links);
        raw.parent = U64::new(self.parent);
        raw.part = U64::new(self.part);
        raw.attributes = U64::new(self.attributes);
        raw.seed = U64::new(self.seed);
        raw.entries = U64::new(self.entries);
        raw.run_count = U16::new(self.runs.len() as u16);
        (raw.reserved, raw.reserved_too) = ([0; 6], [0; 32]);
        raw.device = U64::new(self.device);
        raw.runs = [RawRun::EMPTY; FILE_RUNS];
        raw.checksum = U64::new(UNSEALED);
        pack(&self.runs, &mut raw.runs)?;
        if self.kind == FileKind::Symlink {
            if !self.runs.is_empty() {
                return Err(FormatError::Field { field: "runs", value: self.runs.len() as u64 });
            }
            let place = raw.runs.as_mut_bytes().get_mut(..self.target.len());
            let len = self.target.len() as u64;
            place
                .ok_or(FormatError::Field { field: "target", value: len })?
                .copy_from_slice(&self.target);
        }
        Ok(())
    }

    /// Decodes the inode in slot `number`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &SlotBytes, number: u64) -> Result<FileInode, FormatError> {
        check(bytes, MAGIC, number)?;
        Self::decode_unsealed(bytes, number)
    }

    /// [`FileInode::decode`] of bytes whose checksum was verified before: those of a pool's
    /// metadata in memory.
    ///
    /// # Errors
    /// As for [`FileInode::decode`].
    pub fn decode_unsealed(bytes: &SlotBytes, number: u64) -> Result<FileInode, FormatError> {
        if bytes[..4] != MAGIC {
            return Err(FormatError::Magic);
        }
        let raw = RawFile::ref_from_bytes(bytes).map_err(|_| FormatError::Short)?;
        let field = |field, value| FormatError::Field { field, value };
        let code = raw.kind.get();
        let kind = u8::try_from(code).ok().and_then(FileKind::from_code);
        let kind = kind.ok_or(field("kind", code.into()))?;
        let flags = raw.flags.get();
        if !matches!(flags, 0 | IMMUTABLE | IMMUTABLE_THAWING) {
            return Err(field("flags", flags.into()));
        }
        let size_bytes = raw.size_bytes.get();
        if size_bytes > MAX_FILE_BYTES {
            return Err(field("size", size_bytes));
        }
        let (mut runs, mut target) = (Vec::new(), Vec::new());
        if kind == FileKind::Symlink {
            if raw.part.get() == 0 {
                let place = raw.runs.as_bytes().get(..size_bytes as usize);
                target = place.ok_or(field("size", size_bytes))?.to_vec();
            }
            let behind = &raw.runs.as_bytes()[target.len()..];
            let is_whole = raw.run_count.get() == 0 && behind.iter().all(|&byte| byte == 0);
            if target.contains(&0) || size_bytes == 0 || !is_whole {
                return Err(field("target", size_bytes));
            }
        } else {
            runs = unpack(&raw.runs, raw.run_count.get().into())?;
            if kind != FileKind::File && !runs.is_empty() {
                return Err(field("runs", runs.len() as u64));
            }
        }
        if kind.is_special() && (size_bytes, raw.part.get()) != (0, 0) {
            return Err(field("size", size_bytes));
        }
        let device = raw.device.get();
        if device != 0 && !kind.is_device() {
            return Err(field("device", device));
        }
        Ok(FileInode {
            number,
            kind,
            is_immutable: flags & IMMUTABLE != 0,
            is_clearing_immutable: flags & THAWING != 0,
            generation: raw.generation.get(),
            layout_version: raw.layout_version.get(),
            size_bytes,
            pages: raw.pages.get(),
            created_ns: raw.created_ns.get() as i64,
            changed_ns: raw.changed_ns.get() as i64,
            modified_ns: raw.modified_ns.get() as i64,
            accessed_ns: raw.accessed_ns.get() as i64,
            mode: raw.mode.get(),
            uid: raw.uid.get(),
            gid: raw.gid.get(),
            links: raw.links.get(),
            parent: raw.parent.get(),
            part: raw.part.get(),
            attributes: raw.attributes.get(),
            seed: raw.seed.get(),
            entries: raw.entries.get(),
            device,
            runs,
            target,
        })
    }
}

/// The longest file: as many pages as a pool can have. The runs of a sparse file of this size fit
/// into the pool.
pub const MAX_FILE_BYTES: u64 = crate::run::MAX_PAGES * crate::PAGE_BYTES;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_files_have_no_content() {
        for code in 0..=u8::MAX {
            let Some(kind) = FileKind::from_code(code) else { continue };
            assert_eq!(kind.code(), code);
            assert_eq!(kind.is_special(), code >= 4);
            let inode = FileInode { mode: 0o640, links: 1, ..FileInode::new(kind, 9, 1) };
            if kind == FileKind::Symlink {
                continue;
            }
            let device = FileInode { device: 250 << 32 | 70_000, ..inode.clone() };
            let sized = FileInode { size_bytes: 1, ..inode.clone() };
            let parted = FileInode { part: 5, ..inode.clone() };
            let paged = FileInode { runs: vec![Run { start_page: 5, pages: 1 }], ..inode.clone() };
            let is_refused = |inode: FileInode| {
                let decoded = FileInode::decode(&inode.encode().unwrap(), 9);
                assert!(decoded.is_err() || decoded == Ok(inode), "{kind:?}");
                decoded.is_err()
            };
            assert!(!is_refused(inode));
            assert_eq!(is_refused(device), !kind.is_device(), "{kind:?}");
            assert_eq!(is_refused(sized), kind.is_special(), "{kind:?}");
            assert_eq!(is_refused(parted), kind.is_special(), "{kind:?}");
            assert_eq!(is_refused(paged), kind != FileKind::File, "{kind:?}");
        }
    }
}
