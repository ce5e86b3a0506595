//! Shared by the tests of damaged pools with files: a pool with files of every kind, and its slots
//! to be changed.
//!
//! Every word of a file is derived from its inode, so the owner of any bytes can be told.
#![allow(dead_code, reason = "each test uses a part")]

pub mod any_changes;
pub mod damaged;
#[path = "../../../pool/tests/support/mod.rs"]
pub mod pool;

use std::io::{Read, Write};
use std::ops::Range;

use aquifer_fs::{FallocateMode, Files, FsError, RenameMode, SetMode, SpecialFile};
use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::format::slot::Slot;
use aquifer_pool::format::slot_bytes::SLOT_BYTES;
use aquifer_pool::format::superblock::KNOWN_FEATURES;
use aquifer_pool::format::{PAGE_BYTES, checksum};
use aquifer_testkit::rng::Rng;
use pool::{FileMedia, alone, forge, reading};

pub const POOL_BYTES: usize = 1 << 20;
/// Names in the directory `/many`: enough for several leaves.
pub const MANY: usize = 40;
/// Pages of the file `/pieces` before every second one is removed.
const PIECES: u64 = 100;

/// Of each kind.
pub const SPECIAL_FILES: [(&str, SpecialFile); 4] = [
    ("/a/fifo", SpecialFile::Fifo),
    ("/a/socket", SpecialFile::Socket),
    ("/a/char", SpecialFile::CharDevice(0x1234_0567)),
    ("/a/block", SpecialFile::BlockDevice(0x0007_0001)),
];

/// Kinds of [`accident`].
pub const ACCIDENTS: u64 = 5;

/// A random place for `unit` bytes in a part.
pub fn pick(rng: &mut Rng, part: &Range<usize>, unit: usize) -> usize {
    part.start + rng.below((part.len() / unit) as u64) as usize * unit
}

/// Damages a part of an image: flips a bit, or zeroes, scrambles, copies (from `source`) or swaps
/// `unit` bytes. Returns what it did.
pub fn accident(
    rng: &mut Rng,
    image: &mut [u8],
    kind: u64,
    part: &Range<usize>,
    source: &Range<usize>,
    unit: usize,
) -> String {
    let at = pick(rng, part, unit);
    match kind {
        0 => {
            let bit = rng.below(part.len() as u64 * 8) as usize;
            image[part.start + bit / 8] ^= 1 << (bit % 8);
            format!("bit {} of byte {} flipped", bit % 8, part.start + bit / 8)
        }
        1 => {
            image[at..at + unit].fill(0);
            format!("{unit} bytes at {at} zeroed")
        }
        2 => {
            image[at..at + unit].iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
            format!("{unit} bytes at {at} are noise")
        }
        3 => {
            let from = pick(rng, source, unit);
            image.copy_within(from..from + unit, at);
            format!("{unit} bytes at {at} are those at {from}")
        }
        _ => {
            let other = pick(rng, part, unit);
            let saved = image[at..at + unit].to_vec();
            image.copy_within(other..other + unit, at);
            image[other..other + unit].copy_from_slice(&saved);
            format!("{unit} bytes at {at} and {other} swapped")
        }
    }
}

/// The word that fills the file of this inode.
fn word(inode: u64) -> u64 {
    checksum(&[b"file", &inode.to_le_bytes()]) | 1
}

fn write(files: &Files, path: &str, pages: u64) -> Result<(), FsError> {
    let mut file = files.create_file(path)?;
    let inode = files.metadata(path)?.ino();
    let page = word(inode).to_le_bytes().repeat(PAGE_BYTES as usize / 8);
    for _ in 0..pages {
        file.write_all(&page).expect("room for it");
    }
    Ok(())
}

fn fill(files: &Files) -> Result<(), FsError> {
    write(files, "/gone", 5)?;
    write(files, "/plain", 3)?;
    write(files, "/pieces", PIECES)?;
    let pieces = files.options().write(true).open("/pieces")?;
    for page in (1..PIECES).step_by(2) {
        pieces.allocate(FallocateMode::PunchHole, page * PAGE_BYTES, PAGE_BYTES)?;
    }
    files.create_dir_all("/a/b/c")?;
    write(files, "/a/b/deep", 2)?;
    files.hard_link("/a/b/deep", "/second")?;
    files.symlink("a/b/deep", "/short")?;
    files.symlink(format!("{}a/b/deep", "./".repeat(400)), "/long")?;
    files.set_attribute("/plain", "user.one", [7; 900], SetMode::Any)?;
    files.set_attribute("/a", "user.two", "two", SetMode::Any)?;
    files.create_dir("/many")?;
    for index in 0..MANY {
        files.hard_link("/plain", format!("/many/a name that takes some room {index}"))?;
    }
    files.create_file("/empty")?;
    files.remove_file("/gone")?;
    files.pool().checkpoint()?;
    // Takes its slot, and perhaps its pages.
    write(files, "/new", 4)?;
    files.rename("/a/b/c", "/a/c")?;
    // Leaves a free slot that was used.
    files.create_file("/passing")?;
    files.remove_file("/passing")?;
    for (path, special) in SPECIAL_FILES {
        files.create_special(path, special, 0o640)?;
    }
    files.set_attribute("/a/fifo", "trusted.of", "a pipe", SetMode::Any)?;
    files.rename_with("/new", "/renamed", RenameMode::Whiteout)?;
    files.rename("/renamed", "/new")?;
    Ok(())
}

/// The image of such a pool after a crash: the last changes are in the log only.
pub fn crashed_image() -> Vec<u8> {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let pool = alone().inodes(127).log_bytes(64 << 10).create_on(media.clone()).expect("a pool");
    let files = Files::new(pool);
    fill(&files).expect("room for everything");
    media.image()
}

/// The image of such a pool after it was closed.
pub fn closed_image() -> Vec<u8> {
    let media = FileMedia::of(&crashed_image());
    drop(alone().open_on(media.clone()).expect("a pool"));
    media.image()
}

/// The image of a pool with files and objects that was closed cleanly, and has a saved state.
pub fn closed_with_saved_state() -> Vec<u8> {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let options = alone().inodes(127).log_bytes(64 << 10).features(KNOWN_FEATURES);
    let files = Files::new(options.create_on(media.clone()).expect("a pool"));
    fill(&files).expect("room for everything");
    for (name, pages) in [("one", 1), ("two", 2), ("three", 3)] {
        pool::sample::create(files.pool(), name, pages, 0).expect("room for it");
    }
    drop(files);
    media.image()
}

/// The number of the inode that a path refers to; a symbolic link is not followed.
pub fn number(image: &[u8], path: &str) -> u64 {
    let pool = reading().open_on(FileMedia::of(image)).expect("a pool");
    Files::new(pool).symlink_metadata(path).expect("a file").ino()
}

/// Decodes a slot of the image.
pub fn slot(image: &[u8], number: u64) -> Slot {
    let start = forge::superblock(image).layout.slot_offset_bytes(number) as usize;
    Slot::decode(image[start..start + SLOT_BYTES].try_into().expect("512 bytes"), number)
        .expect("a whole slot")
}

/// Encodes a slot into the image, with its checksum.
pub fn put(image: &mut [u8], number: u64, slot: &Slot) {
    let layout = forge::superblock(image).layout;
    forge::slot(image, &layout, number).copy_from_slice(&slot.encode().expect("it fits"));
}

/// Decodes an inode of the image.
pub fn inode(image: &[u8], number: u64) -> FileInode {
    match slot(image, number) {
        Slot::File(inode) => *inode,
        other => panic!("slot {number} is {other:?}"),
    }
}

/// Changes an inode of the image.
pub fn change(image: &mut [u8], number: u64, change: impl FnOnce(&mut FileInode)) {
    let mut inode = inode(image, number);
    change(&mut inode);
    put(image, number, &Slot::File(Box::new(inode)));
}

/// The result of reading all files.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Files read to their end, directories listed, links resolved, attributes.
    pub read: usize,
    /// Number of damaged things.
    pub damaged: usize,
    /// A file with words of another one: its inode and the other's.
    pub foreign: Option<(u64, u64)>,
}

/// Reads everything reachable by path. Panics at errors that are not those of damage.
pub fn read_everything(files: &Files, inodes: u64) -> Seen {
    let mut seen = Seen::default();
    let mut note = |result: Result<(), FsError>| match result {
        Ok(()) => seen.read += 1,
        Err(FsError::Damaged { .. } | FsError::NameTooLong { .. } | FsError::NotFound { .. }) => {
            seen.damaged += 1;
        }
        Err(error) => panic!("not the error of damage: {error}"),
    };
    let mut foreign = None;
    let words: Vec<u64> = (0..inodes).map(word).collect();
    let mut directories = vec![std::path::PathBuf::from("/")];
    // Directories can form a cycle: an intact pool has fewer than this.
    let mut left = 40;
    while let Some(directory) = directories.pop().filter(|_| left > 0) {
        left -= 1;
        let entries = match files.read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) => {
                note(Err(error));
                continue;
            }
        };
        for entry in entries {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    note(Err(error));
                    break;
                }
            };
            let path = entry.path();
            note(entry.metadata().map(drop));
            if entry.file_type().unwrap().kind() != FileKind::Symlink {
                note(files.attributes(&path).map(drop));
            }
            match entry.file_type().unwrap().kind() {
                FileKind::Directory => directories.push(path),
                FileKind::Symlink => note(files.read_link(&path).map(drop)),
                FileKind::Fifo
                | FileKind::Socket
                | FileKind::CharDevice
                | FileKind::BlockDevice => note(files.symlink_metadata(&path).map(drop)),
                _ => note(files.open_file(&path).and_then(|mut file| {
                    let number = file.metadata()?.ino();
                    // The start is enough for a file with a very large (damaged) size.
                    let mut bytes = Vec::new();
                    let read = (&mut file).take(4 << 20).read_to_end(&mut bytes);
                    foreign = foreign.or(find_foreign(number, &bytes, &words));
                    match read {
                        Ok(_) => Ok(()),
                        Err(error) => Err(damage_of(error)),
                    }
                })),
            }
        }
    }
    Seen { foreign, ..seen }
}

fn damage_of(error: std::io::Error) -> FsError {
    match error.into_inner().map(|inner| inner.downcast::<FsError>()) {
        Some(Ok(error)) => *error,
        other => panic!("not one of ours: {other:?}"),
    }
}

fn find_foreign(number: u64, bytes: &[u8], words: &[u64]) -> Option<(u64, u64)> {
    let mut last = 0;
    for found in bytes.as_chunks::<8>().0 {
        let found = u64::from_le_bytes(*found);
        if found == 0 || found == last || words.get(number as usize) == Some(&found) {
            continue;
        }
        last = found;
        if let Some(other) = words.iter().position(|word| *word == found) {
            return Some((number, other as u64));
        }
    }
    None
}
