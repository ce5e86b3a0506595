//! Pools that open without reading their metadata: each page of it is read when it is needed, and
//! believed only if it is the one that was there when the pool was closed.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use crate::scratch::{Scratch, read_all};
use aquifer_check::{CheckOptions, Finding, Severity, check, repair};
use aquifer_fs::node::{Cookie, NodeEntry};
use aquifer_fs::{Files, FsError};
use aquifer_pool::format::slot_bytes::SLOT_BYTES;
use aquifer_pool::format::superblock::{COPIES, Superblock};
use aquifer_pool::{Mutant, Pool, PoolError, PoolOptions};

const PAGE: usize = 4096;
const DIRECTORIES: usize = 10;
const FILES: usize = 600;

fn quiet() -> PoolOptions {
    Pool::options().background(false)
}

fn name(file: usize) -> String {
    format!("/directory {}/file {file}", file % DIRECTORIES)
}

/// A pool with files, closed cleanly.
fn closed() -> Scratch {
    let scratch = Scratch::with_pool(16 << 20, &quiet().inodes(4000).log_bytes(1 << 20));
    let files = scratch.open();
    (0..DIRECTORIES).for_each(|d| files.create_dir(format!("/directory {d}")).unwrap());
    for file in 0..FILES {
        let created = files.create_file(name(file)).unwrap();
        created.write_all_at(name(file).as_bytes(), 0).unwrap();
    }
    drop(files);
    scratch
}

fn superblock(scratch: &Scratch) -> Superblock {
    let bytes = std::fs::read(&scratch.path).unwrap();
    let copies = (0..COPIES as usize)
        .filter_map(|copy| Superblock::decode(&bytes[copy * PAGE..][..PAGE], copy as u64).ok());
    copies.max_by_key(|superblock| superblock.sequence).unwrap()
}

fn open(scratch: &Scratch, options: &PoolOptions) -> Files {
    Files::new(options.open(&scratch.path).unwrap())
}

/// All files, with their content or the kind of error.
fn all(files: &Files) -> BTreeMap<String, Option<Vec<u8>>> {
    (0..FILES).map(|file| (name(file), read_all(files, name(file)).ok())).collect()
}

/// The place on media of a file's inode.
fn slot_of(scratch: &Scratch, files: &Files, path: &str) -> u64 {
    let number = files.metadata(path).unwrap().ino();
    superblock(scratch).layout.slot_offset_bytes(number)
}

fn is_damaged(error: &FsError) -> bool {
    matches!(error, FsError::Pool(PoolError::Damaged { .. }))
}

fn assert_sound(scratch: &Scratch) {
    let report = check(&scratch.path, &CheckOptions::default()).unwrap();
    // A file that a reader had open when it was removed may be left for the next writer.
    let is_note = |finding: &Finding| finding.severity == Severity::Note;
    assert!(report.findings.iter().all(is_note), "{report}");
}

#[test]
fn what_is_read_when_it_is_needed_is_what_is_read_at_once() {
    let scratch = closed();
    assert_ne!(superblock(&scratch).saved_sum, 0);
    assert_sound(&scratch);
    let whole = all(&open(&scratch, &quiet().read_only(true).check(true)));
    assert!(whole.values().all(Option::is_some));
    assert_eq!(all(&open(&scratch, &quiet().read_only(true))), whole);
    for exclusive in [true, false] {
        let files = open(&scratch, &quiet().exclusive(exclusive));
        assert_eq!(all(&files), whole);
        assert_eq!(files.read_dir("/directory 3").unwrap().count(), FILES / DIRECTORIES);
        // Others, which have the pool open at the same time.
        if !exclusive {
            let joined = [quiet(), quiet().read_only(true)].map(|options| open(&scratch, &options));
            joined.iter().for_each(|joined| assert_eq!(all(joined), whole));
        }
        drop(files);
        assert_sound(&scratch);
    }
}

/// A few changes after each opening: what did not change keeps its digests.
#[test]
fn what_changes_in_many_sessions_is_saved_each_time() {
    let scratch = closed();
    for round in 0..8 {
        let files = open(&scratch, &quiet());
        let joined = open(&scratch, &quiet());
        for file in (round..FILES).step_by(97) {
            let file = name(file);
            if files.metadata(&file).is_ok() {
                joined.remove_file(&file).unwrap();
            } else {
                files.create_file(&file).unwrap();
            }
            files.create_file(format!("{file}-{round}")).unwrap();
        }
        let found = all(&joined);
        let space = files.space().unwrap();
        drop((files, joined));
        assert_sound(&scratch);
        assert_ne!(superblock(&scratch).saved_sum, 0, "round {round}");
        let files = open(&scratch, &quiet().exclusive(true).check(round % 2 == 0));
        assert_eq!(all(&files), found);
        assert!(files.space().unwrap().free_bytes >= space.free_bytes);
    }
}

#[test]
fn a_damaged_page_is_an_error_for_what_is_in_it() {
    let scratch = closed();
    let media = std::fs::File::options().read(true).write(true).open(&scratch.path).unwrap();
    let place = slot_of(&scratch, &open(&scratch, &quiet().read_only(true)), &name(333));
    let mut bytes = [0];
    media.read_exact_at(&mut bytes, place + 100).unwrap();
    media.write_all_at(&[bytes[0] ^ 1], place + 100).unwrap();
    for options in [quiet().read_only(true), quiet()] {
        let files = open(&scratch, &options);
        let error = files.metadata(name(333)).unwrap_err();
        assert!(is_damaged(&error), "{error}");
        // What lies in other pages can be used.
        let found = all(&files);
        let lost = found.values().filter(|content| content.is_none()).count();
        assert!((1..=PAGE / SLOT_BYTES).contains(&lost), "{lost} files");
        if files.pool().is_writable() {
            let error = files.remove_file(name(333)).unwrap_err();
            assert!(is_damaged(&error), "{error}");
            files.create_file("/new").unwrap();
        }
    }
    // A writer has met it: the next one looks at everything.
    let error = quiet().open(&scratch.path).unwrap_err();
    assert!(matches!(error, PoolError::Damaged { .. }), "{error}");
    assert!(!check(&scratch.path, &CheckOptions::default()).unwrap().is_sound());
}

/// Those whose inodes can be read have metadata.
#[test]
fn a_damaged_page_hides_no_names() {
    let scratch = closed();
    let media = std::fs::File::options().read(true).write(true).open(&scratch.path).unwrap();
    let files = open(&scratch, &quiet().read_only(true));
    let place = slot_of(&scratch, &files, &name(333));
    let directory = files.metadata("/directory 3").unwrap().node();
    drop(files);
    let mut bytes = [0];
    media.read_exact_at(&mut bytes, place + 100).unwrap();
    media.write_all_at(&[bytes[0] ^ 1], place + 100).unwrap();
    let nodes = open(&scratch, &quiet().read_only(true)).nodes();
    let (mut with, mut without) = (0, Vec::new());
    let each = |_: Cookie, entries: &[NodeEntry]| {
        for entry in entries {
            match entry.metadata {
                Some(_) => with += 1,
                None => without.push(String::from_utf8(entry.name.clone()).unwrap()),
            }
        }
        ControlFlow::Continue(())
    };
    nodes.read_dir_plus(directory, Cookie::START, each).unwrap();
    assert!(without.contains(&"file 333".to_owned()), "{without:?}");
    // With the directory itself and its parent.
    assert_eq!(with + without.len(), FILES / DIRECTORIES + 2);
    assert!(with > 40, "{with}");
}

/// Its free slots are not taken.
#[test]
fn a_damaged_page_with_free_slots_stops_no_creation() {
    let scratch = closed();
    let files = open(&scratch, &quiet());
    let place = slot_of(&scratch, &files, &name(333));
    files.remove_file(name(333)).unwrap();
    drop(files);
    let media = std::fs::File::options().read(true).write(true).open(&scratch.path).unwrap();
    let mut bytes = [0];
    media.read_exact_at(&mut bytes, place + 100).unwrap();
    media.write_all_at(&[bytes[0] ^ 1], place + 100).unwrap();
    let files = open(&scratch, &quiet());
    for file in 0..10 {
        let path = format!("/new {file}");
        files.create_file(&path).unwrap().write_all_at(path.as_bytes(), 0).unwrap();
        assert_ne!(slot_of(&scratch, &files, &path), place);
        assert_eq!(read_all(&files, &path).unwrap(), path.as_bytes());
    }
    let all_new = || (10..4000).map(|file| files.create_file(format!("/new {file}")));
    let error = all_new().find_map(Result::err).unwrap();
    assert!(matches!(error, FsError::Pool(PoolError::NoFreeInode { .. })), "{error}");
}

/// A write of metadata is lost: the page is as it was before the last session, valid by itself.
#[test]
fn an_older_page_is_not_believed() {
    let scratch = closed();
    let before = std::fs::read(&scratch.path).unwrap();
    let files = open(&scratch, &quiet());
    let place = slot_of(&scratch, &files, &name(200));
    files.options().write(true).open(name(200)).unwrap().set_len(3).unwrap();
    drop(files);
    let media = std::fs::File::options().read(true).write(true).open(&scratch.path).unwrap();
    let page = place as usize / PAGE * PAGE;
    let mut now = [0; PAGE];
    media.read_exact_at(&mut now, page as u64).unwrap();
    assert!(now[..] != before[page..page + PAGE]);
    media.write_all_at(&before[page..page + PAGE], page as u64).unwrap();
    let reader = |mutant| open(&scratch, &quiet().read_only(true).mutant(mutant));
    let error = reader(None).metadata(name(200)).unwrap_err();
    assert!(is_damaged(&error), "{error}");
    let len = reader(Some(Mutant::UncheckedPages)).metadata(name(200)).unwrap().len();
    assert_eq!(len, name(200).len() as u64, "the mutant shows what was");
    // Closing and recovering do not make it right, nor does a repair.
    let writer = open(&scratch, &quiet());
    assert!(is_damaged(&writer.metadata(name(200)).unwrap_err()));
    writer.create_file("/new").unwrap();
    drop(writer);
    for _ in 0..2 {
        let error = quiet().open(&scratch.path).unwrap_err();
        assert!(matches!(error, PoolError::Damaged { .. }), "{error}");
        let repaired = repair(&scratch.path, &CheckOptions::default()).unwrap();
        assert!(!repaired.refused.is_empty() && !repaired.after.is_sound(), "{}", repaired.after);
    }
    assert!(is_damaged(&reader(None).metadata(name(200)).unwrap_err()));
    // A page that could not be read once.
    media.write_all_at(&now, page as u64).unwrap();
    assert_eq!(open(&scratch, &quiet()).metadata(name(200)).unwrap().len(), 3);
    assert_sound(&scratch);
}

#[test]
fn metadata_that_names_no_pages_of_files_is_not_believed() {
    let scratch = closed();
    let files = open(&scratch, &quiet().read_only(true).check(true));
    let expected = all(&files);
    drop(files);
    // Whatever a page of zeros, or of another place, says.
    let bytes = std::fs::read(&scratch.path).unwrap();
    let layout = superblock(&scratch).layout;
    let first = layout.metadata().offset_bytes as usize;
    let media = std::fs::File::options().write(true).open(&scratch.path).unwrap();
    for page in [20, 50] {
        let place = first + page * PAGE;
        for wrong in [&vec![0; PAGE], &bytes[place - PAGE..place].to_vec()] {
            media.write_all_at(wrong, place as u64).unwrap();
            let found = all(&open(&scratch, &quiet().read_only(true)));
            let differ = |(name, content): (&String, &Option<Vec<u8>>)| {
                content.is_some() && expected[name] != *content
            };
            assert!(!found.iter().any(differ), "page {page}");
        }
        media.write_all_at(&bytes[place..place + PAGE], place as u64).unwrap();
    }
    assert_eq!(all(&open(&scratch, &quiet())), expected);
}

/// Readers join and read pages that writers are changing and writing to media for the first time.
#[test]
fn readers_see_whole_states_of_pages_that_become_present() {
    for round in 0..4 {
        let scratch = closed();
        let writer = open(&scratch, &quiet());
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_done.load(Relaxed) {
                        let reader = open(&scratch, &quiet().read_only(true));
                        for file in (0..FILES).rev() {
                            let found = read_all(&reader, name(file)).unwrap();
                            let is_whole = found == name(file).as_bytes() || found == b"new";
                            assert!(is_whole, "{found:?}");
                        }
                    }
                });
            }
            for file in 0..FILES {
                writer.write_atomic_file(&name(file), b"new");
                if file % 16 == round {
                    writer.pool().checkpoint().unwrap();
                }
            }
            is_done.store(true, Relaxed);
        });
        drop(writer);
        assert_sound(&scratch);
        assert_ne!(superblock(&scratch).saved_sum, 0);
    }
}

trait Replace {
    fn write_atomic_file(&self, path: &str, content: &[u8]);
}

impl Replace for Files {
    /// Replaces a file, so that it has either content.
    fn write_atomic_file(&self, path: &str, content: &[u8]) {
        let other = "/being written";
        self.create_file(other).unwrap().write_all_at(content, 0).unwrap();
        self.rename(other, path).unwrap();
    }
}
