//! A pool of format version 1, made when that version was frozen, and everything that it contains.
//!
//! The pool is stored as the non-zero 512-byte blocks of its file, as left by a power failure while
//! it was open: the log contains records that are durable but not yet applied in place, and others
//! that are not durable. `make_the_pool` made it:
//!
//! ```text
//! cargo test -p aquifer --test all golden::make_the_pool -- --ignored
//! ```

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::blocks::{from_blocks, to_blocks};
use aquifer::check::{CheckOptions, Severity};
use aquifer::fs::{FallocateMode, FileKind, SetMode};
use aquifer::object::collections::{PString, PVec};
use aquifer::pool::media::PersistenceDomain;
use aquifer::{CreateObject, Files, Objects, Pool};

const PAGE: usize = 4096;
const POOL_BYTES: u64 = 8 << 20;
/// Files in one directory.
const MANY: usize = 60;
const TYPE: u64 = 9;
/// Differs from that of any machine that reads the pool.
const BOOT: u64 = 0x0a91_f3e2_0000_0001;

fn blocks_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/version-1.blocks")
}

fn content(seed: u8, len: usize) -> Vec<u8> {
    // Few non-zero bytes in each page, so that there are few blocks.
    let byte = |at: usize| {
        if at % PAGE < 40 {
            (at as u8).wrapping_mul(31).wrapping_add((at >> 12) as u8 ^ seed)
        } else {
            0
        }
    };
    (0..len).map(byte).collect()
}

fn long_target() -> String {
    "long/".repeat(100)
}

/// Returns the expected files, and their content; for links, the target.
fn tree() -> Vec<(String, FileKind, Vec<u8>)> {
    let mut all = vec![
        ("/empty".to_owned(), FileKind::File, Vec::new()),
        ("/one run".to_owned(), FileKind::File, content(1, 3 * PAGE + 100)),
        ("/many runs".to_owned(), FileKind::File, content(2, 100 * PAGE)),
        ("/holes".to_owned(), FileKind::File, holes()),
        ("/d/deep/deeper/file".to_owned(), FileKind::File, content(3, 10)),
        ("/d/hard link".to_owned(), FileKind::File, content(1, 3 * PAGE + 100)),
        ("/short link".to_owned(), FileKind::Symlink, b"one run".to_vec()),
        ("/long link".to_owned(), FileKind::Symlink, long_target().into_bytes()),
        ("/immutable".to_owned(), FileKind::File, content(4, PAGE)),
        (format!("/{}", "n".repeat(255)), FileKind::File, b"a long name".to_vec()),
        ("/exchanged".to_owned(), FileKind::File, content(6, 2 * PAGE)),
        ("/with attributes".to_owned(), FileKind::File, Vec::new()),
    ];
    let many = |number| (format!("/many/{number:03}"), FileKind::File, vec![number as u8]);
    all.extend((0..MANY).map(many));
    all
}

fn holes() -> Vec<u8> {
    let mut bytes = vec![0; 20 * PAGE];
    bytes[5 * PAGE..6 * PAGE].copy_from_slice(&content(5, PAGE));
    bytes[19 * PAGE..].copy_from_slice(&content(7, PAGE));
    bytes
}

fn make(path: &Path) {
    let options = Pool::options()
        .log_bytes(256 << 10)
        .domain(PersistenceDomain::PageCache)
        .boot(BOOT)
        .background(false);
    let pool = options.create(path, POOL_BYTES).unwrap();
    let (files, objects) = (Files::new(pool.clone()), Objects::new(pool.clone()));
    let write =
        |path: &str, bytes: &[u8]| files.create_file(path).unwrap().write_all_at(bytes, 0).unwrap();

    files.create_dir_all("/d/deep/deeper").unwrap();
    files.create_dir("/many").unwrap();
    write("/empty", b"");
    write("/one run", &content(1, 3 * PAGE + 100));
    write("/d/deep/deeper/file", &content(3, 10));
    for number in 0..MANY {
        write(&format!("/many/{number:03}"), &[number as u8]);
    }
    let many = files.create_new_file("/many runs").unwrap();
    let other = files.create_file("/other").unwrap();
    for page in 0..100 {
        let bytes = &content(2, 100 * PAGE)[page * PAGE..][..PAGE];
        many.write_atomic(bytes, (page * PAGE) as u64).unwrap();
        // Small extents are placed in between.
        other.write_atomic(&[0; 8], page as u64 % 2 * PAGE as u64).unwrap();
    }
    assert!(many.runs().unwrap().len() > 45, "more than an inode has room for");
    files.remove_file("/other").unwrap();
    let holes_file = files.create_new_file("/holes").unwrap();
    holes_file.write_all_at(&holes(), 0).unwrap();
    holes_file.allocate(FallocateMode::PunchHole, 0, 5 * PAGE as u64).unwrap();
    holes_file.allocate(FallocateMode::PunchHole, 6 * PAGE as u64, 13 * PAGE as u64).unwrap();
    files.hard_link("/one run", "/d/hard link").unwrap();
    files.symlink("one run", "/short link").unwrap();
    files.symlink(long_target(), "/long link").unwrap();
    write("/immutable", &content(4, PAGE));
    files.set_immutable("/immutable", true).unwrap();
    write(&format!("/{}", "n".repeat(255)), b"a long name");
    write("/with attributes", b"");
    files.set_attribute("/with attributes", "user.small", "green", SetMode::Any).unwrap();
    files.set_attribute("/with attributes", "user.large", content(8, 2000), SetMode::Any).unwrap();
    files.set_permissions("/with attributes", PermissionsExt::from_mode(0o640)).unwrap();

    objects.create("bytes", 64 << 10).unwrap();
    let heap = CreateObject::new().heap(true);
    heap.create(&objects, "heap", 64 << 10).unwrap();
    let mut bytes = objects.attach_mut("bytes").unwrap();
    bytes.as_mut_slice().unwrap()[..PAGE].copy_from_slice(&content(9, PAGE));
    bytes.psync().unwrap();
    pool.checkpoint().unwrap();

    // From here on changes are in the log only.
    bytes.as_mut_slice().unwrap()[PAGE..2 * PAGE].copy_from_slice(&content(10, PAGE));
    bytes.psync().unwrap();
    let mut attached = objects.attach_mut("heap").unwrap();
    attached
        .heap()
        .unwrap()
        .enter(|scope| {
            let heap = scope.heap();
            let words = scope.root_or_insert_with(TYPE, |heap| Ok(PVec::new_in(heap)))?;
            for word in ["kept", "for", "later"] {
                words.push(PString::from_str_in(word, heap)?)?;
            }
            Ok::<_, aquifer::object::heap::HeapError>(())
        })
        .unwrap();
    attached.psync().unwrap();
    write("/exchanged", &content(11, 2 * PAGE));
    write("/spare", &content(6, 2 * PAGE));
    let open = |path: &str| files.options().write(true).create(true).open(path).unwrap();
    open("/exchanged").exchange_range(0, &open("/spare"), 0, 2 * PAGE as u64).unwrap();
    files.remove_file("/spare").unwrap();
    files.sync().unwrap();

    // The power fails before this becomes durable.
    write("/unsynced", b"lost");
    files.rename("/empty", "/renamed").unwrap();
    bytes.as_mut_slice().unwrap()[0] = 0xff;
    let image = std::fs::read(path).unwrap();
    std::fs::write(blocks_path(), to_blocks(&image)).unwrap();
}

/// Objects are attached at fixed addresses, which are the same in all copies of the pool.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Returns the pool as found after the power failure.
fn found() -> ((MutexGuard<'static, ()>, tempfile::TempDir), PathBuf) {
    let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pool");
    std::fs::write(&path, from_blocks(&std::fs::read(blocks_path()).unwrap(), POOL_BYTES)).unwrap();
    ((alone, directory), path)
}

fn assert_not_worse(path: &Path, severity: Severity) {
    let report = aquifer::check::check(path, &CheckOptions::default()).unwrap();
    assert_eq!(report.worst().filter(|worst| *worst > severity), None, "{report}");
}

fn assert_clean(path: &Path) {
    assert_not_worse(path, Severity::Note);
}

fn assert_files(files: &Files) {
    let tree = tree();
    for (path, kind, content) in &tree {
        let metadata = files.symlink_metadata(path).unwrap();
        assert_eq!(metadata.len(), content.len() as u64, "{path}");
        match kind {
            FileKind::Symlink => {
                assert!(metadata.is_symlink(), "{path}");
                let target = files.read_link(path).unwrap();
                assert_eq!(target.as_os_str().as_encoded_bytes(), content);
            }
            _ => {
                let file = files.open_file(path).unwrap();
                let mut bytes = vec![0; content.len()];
                assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len(), "{path}");
                assert!(bytes == *content, "{path}");
            }
        }
    }
    let count = |path: &str| files.read_dir(path).unwrap().count();
    assert_eq!((count("/"), count("/many"), count("/d")), (13, MANY, 2));
    let metadata = |path: &str| files.metadata(path).unwrap();
    assert_eq!(metadata("/one run").nlink(), 2);
    assert_eq!(metadata("/holes").allocated_bytes(), 2 * PAGE as u64);
    assert!(metadata("/immutable").is_immutable());
    assert_eq!(metadata("/with attributes").mode() & 0o7777, 0o640);
    let attribute = |name: &str| files.attribute("/with attributes", name).unwrap();
    assert_eq!(attribute("user.small"), b"green");
    assert_eq!(attribute("user.large"), content(8, 2000));
}

fn assert_objects(objects: &Objects) {
    let bytes = objects.attach("bytes").unwrap();
    let bytes = bytes.as_slice().unwrap();
    assert!(bytes[..PAGE] == content(9, PAGE) && bytes[PAGE..2 * PAGE] == content(10, PAGE));
    let mut attached = objects.attach("heap").unwrap();
    let mut heap = attached.heap().unwrap();
    heap.check().unwrap();
    let words: Vec<String> = heap.enter(|scope| {
        let words = scope.root::<PVec<PString>>(TYPE).unwrap();
        words.iter().map(|word| word.to_string()).collect()
    });
    assert_eq!(words, ["kept", "for", "later"]);
}

#[test]
fn version_1_stays_readable() {
    let (_directory, path) = found();
    assert_not_worse(&path, Severity::Repairable);
    // Read-only, and as a writer opens it.
    let read_only = Pool::options().read_only(true);
    for options in [read_only, Pool::options()] {
        let pool = options.open(&path).unwrap();
        assert_files(&Files::new(pool.clone()));
        assert_objects(&Objects::new(pool));
    }
    assert_clean(&path);
}

#[test]
fn version_1_stays_writable() {
    let (_directory, path) = found();
    let files = Files::open(&path).unwrap();
    files.remove_file("/many runs").unwrap();
    for number in 0..MANY / 2 {
        files.remove_file(format!("/many/{number:03}")).unwrap();
    }
    files.create_file("/new").unwrap().write_all_at(&content(12, 30 * PAGE), 0).unwrap();
    files.sync().unwrap();
    drop(files);
    assert_clean(&path);
    let files = Files::open(&path).unwrap();
    assert_eq!(files.read_dir("/many").unwrap().count(), MANY - MANY / 2);
    let mut bytes = vec![0; 30 * PAGE];
    files.open_file("/new").unwrap().read_at(&mut bytes, 0).unwrap();
    assert!(bytes == content(12, 30 * PAGE));
    assert_objects(&Objects::new(files.pool().clone()));
}

/// Run this only when a new version of the format is frozen.
#[test]
#[ignore = "it makes the pool that the other tests read"]
fn make_the_pool() {
    let directory = tempfile::tempdir().unwrap();
    make(&directory.path().join("pool"));
}
