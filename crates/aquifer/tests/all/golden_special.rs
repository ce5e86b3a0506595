//! A pool of format version 1 that was closed cleanly, with its saved state, special files, access
//! control lists, and a file whose pages have moved.
//!
//! It is stored as the first golden pool is. `make_the_pool` made it:
//!
//! ```text
//! cargo test -p aquifer --test all golden_special::make_the_pool -- --ignored
//! ```

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::blocks::{from_blocks, to_blocks};
use aquifer::check::{CheckOptions, Severity, check};
use aquifer::fs::{
    ACCESS_ACL, Acl, AclEntry, AclTag, DEFAULT_ACL, FallocateMode, FileKind, SetMode, SpecialFile,
};
use aquifer::pool::media::PersistenceDomain;
use aquifer::{Files, Pool};

const PAGE: u64 = 4096;
const POOL_BYTES: u64 = 8 << 20;
const FILES: u64 = 200;

fn blocks_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/version-1-closed.blocks")
}

fn special() -> [(&'static str, SpecialFile, FileKind, u64); 5] {
    let (block, char) = (libc::makedev(7, 1), libc::makedev(4095, 1_048_575));
    [
        ("/fifo", SpecialFile::Fifo, FileKind::Fifo, 0),
        ("/socket", SpecialFile::Socket, FileKind::Socket, 0),
        ("/char", SpecialFile::CharDevice(char), FileKind::CharDevice, char),
        ("/block", SpecialFile::BlockDevice(block), FileKind::BlockDevice, block),
        ("/whiteout", SpecialFile::CharDevice(0), FileKind::CharDevice, 0),
    ]
}

fn list(permissions: u16) -> Acl {
    let entry = |tag, permissions| AclEntry { tag, permissions };
    Acl::new(vec![
        entry(AclTag::Owner, 7),
        entry(AclTag::User(1000), permissions),
        entry(AclTag::OwningGroup, 5),
        entry(AclTag::Group(70_000), 1),
        entry(AclTag::Mask, 7),
        entry(AclTag::Other, 0),
    ])
    .unwrap()
}

/// Which byte each page of "/moved" has; 0 for holes.
fn moved() -> Vec<u8> {
    let mut pages: Vec<u8> = (1..=120).collect();
    pages.drain(10..30);
    pages.splice(50..50, [0; 7]);
    pages.drain(0..1);
    pages
}

fn make(path: &Path) {
    let options = Pool::options()
        .log_bytes(256 << 10)
        .inodes(1023)
        .domain(PersistenceDomain::PageCache)
        .background(false);
    let files = Files::new(options.create(path, POOL_BYTES).unwrap());
    for (path, special, ..) in special() {
        files.create_special(path, special, 0o640).unwrap();
        files.set_permissions(path, PermissionsExt::from_mode(0o640)).unwrap();
    }
    files.set_attribute("/fifo", "trusted.of", "the pipe", SetMode::Any).unwrap();
    files.create_dir("/d").unwrap();
    files.set_attribute("/d", DEFAULT_ACL, list(6).encode(), SetMode::Any).unwrap();
    files.write("/d/file", "text").unwrap();
    files.create_dir("/d/d").unwrap();
    let file = files.create_new_file("/moved").unwrap();
    // In many pieces.
    let other = files.create_new_file("/other").unwrap();
    for page in 0..120_u64 {
        let mut bytes = [0; PAGE as usize];
        bytes[0] = page as u8 + 1;
        file.write_atomic(&bytes, page * PAGE).unwrap();
        other.write_atomic(&[1; 8], page % 2 * PAGE).unwrap();
    }
    files.remove_file("/other").unwrap();
    file.allocate(FallocateMode::CollapseRange, 10 * PAGE, 20 * PAGE).unwrap();
    file.allocate(FallocateMode::InsertRange, 50 * PAGE, 7 * PAGE).unwrap();
    file.allocate(FallocateMode::CollapseRange, 0, PAGE).unwrap();
    files.create_dir("/many").unwrap();
    for number in 0..FILES {
        files.create_file(format!("/many/{number}")).unwrap();
    }
    drop((file, other, files));
    std::fs::write(blocks_path(), to_blocks(&std::fs::read(path).unwrap())).unwrap();
}

fn found() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pool");
    let blocks = std::fs::read(blocks_path()).unwrap();
    std::fs::write(&path, from_blocks(&blocks, POOL_BYTES)).unwrap();
    (directory, path)
}

fn assert_clean(path: &Path) {
    let report = check(path, &CheckOptions::default()).unwrap();
    assert_eq!(report.worst().filter(|worst| *worst > Severity::Note), None, "{report}");
}

fn assert_files(files: &Files) {
    for (path, _, kind, rdev) in special() {
        let metadata = files.symlink_metadata(path).unwrap();
        assert_eq!((metadata.file_type().kind(), metadata.rdev()), (kind, rdev), "{path}");
        assert_eq!(metadata.mode() & 0o7777, 0o640, "{path}");
    }
    assert_eq!(files.attribute("/fifo", "trusted.of").unwrap(), b"the pipe");
    let acl = |path, name| Acl::decode(&files.attribute(path, name).unwrap()).unwrap().unwrap();
    for directory in ["/d", "/d/d"] {
        assert_eq!(acl(directory, DEFAULT_ACL), list(6));
    }
    let (access, mode) = list(6).inherit(0o666);
    assert_eq!(acl("/d/file", ACCESS_ACL), access.unwrap());
    assert_eq!(files.metadata("/d/file").unwrap().mode() & 0o7777, mode);
    let bytes = files.read("/moved").unwrap();
    let firsts: Vec<u8> = bytes.chunks(PAGE as usize).map(|page| page[0]).collect();
    assert_eq!(firsts, moved());
    let file = files.open_file("/moved").unwrap();
    assert_eq!(file.next_hole(0).unwrap(), Some(49 * PAGE..56 * PAGE));
    assert_eq!(files.read_dir("/many").unwrap().count() as u64, FILES);
}

#[test]
fn it_stays_readable() {
    let (_directory, path) = found();
    assert_clean(&path);
    for options in [Pool::options().read_only(true), Pool::options(), Pool::options()] {
        let pool = options.open(&path).unwrap();
        assert_eq!(pool.features(), 1);
        let info = pool.info().unwrap();
        assert_eq!((info.special_files, info.recovered_records), (5, 0), "it was closed cleanly");
        assert_files(&Files::new(pool));
        assert_clean(&path);
    }
}

#[test]
fn it_stays_writable() {
    let (_directory, path) = found();
    let files = Files::open(&path).unwrap();
    for (path, ..) in special() {
        files.remove_file(path).unwrap();
    }
    let file = files.options().write(true).open("/moved").unwrap();
    file.allocate(FallocateMode::CollapseRange, PAGE, 90 * PAGE).unwrap();
    for number in 0..FILES / 2 {
        files.remove_file(format!("/many/{number}")).unwrap();
    }
    drop((file, files));
    assert_clean(&path);
    let files = Files::open(&path).unwrap();
    let bytes = files.read("/moved").unwrap();
    let firsts: Vec<u8> = bytes.chunks(PAGE as usize).map(|page| page[0]).collect();
    let mut left = moved();
    left.drain(1..91);
    assert_eq!(firsts, left);
    assert_eq!(files.pool().info().unwrap().special_files, 0);
}

/// Run this only when a new form of the format is frozen.
#[test]
#[ignore = "it makes the pool that the other tests read"]
fn make_the_pool() {
    let directory = tempfile::tempdir().unwrap();
    make(&directory.path().join("pool"));
}
