//! Models of the lock-free parts, explored by loom. Run them with
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p aquifer-fs --release --lib loom
//! ```
//!
//! Entries of known paths, their renewal, the read loop, and the words of the pool's image are the
//! real code. The metadata mutex is loom's, a directory is the one word of a slot that holds the
//! path's inode, and a page is two words. Publishing a table to the process's threads is left to
//! `arc-swap`.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_pool::format::file::{FileInode, FileKind, FileState};
use aquifer_pool::format::run::Run;
use aquifer_pool::format::slot_bytes::{SLOT_BYTES, SlotBytes};
use aquifer_pool::format::slot_change::{SlotChange, SlotWords};
use aquifer_pool::modelled::{
    ImageSlot, ImageVersion, before_bytes_are_stored, change, has_layout, image_slot, state_of_file,
};
use loom::sync::Mutex;
use loom::thread;

use crate::file::copy_of_one_layout;
use crate::known_paths::{Known, KnownPaths, PathHash, Versioned, Versions};
use crate::sync::AtomicU64;

/// Explores every schedule with at most `preemptions` preemptions.
fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Runs `first` and `second` in new threads and `third` in this one.
fn together(first: impl FnOnce() + 'static, second: impl FnOnce() + 'static, third: impl FnOnce()) {
    let threads = [thread::spawn(first), thread::spawn(second)];
    third();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

const FILE: u64 = 7;
const OTHER_FILE: u64 = 9;
const PATH: PathHash = PathHash(11, 12);

/// The word of a directory with the path's inode, or of a slot with runs with the file's page.
const WORD: usize = 2;

fn slot_with(word: u64) -> ImageSlot {
    let mut bytes = [0; SLOT_BYTES];
    bytes[WORD * 8..][..8].copy_from_slice(&word.to_ne_bytes());
    image_slot(&bytes)
}

fn inode_bytes(layout_version: u64, size_bytes: u64) -> SlotBytes {
    let new = FileInode::new(FileKind::File, FILE, 1);
    FileInode { layout_version, size_bytes, links: 1, ..new }.encode().unwrap()
}

/// A pool with one file and one directory.
struct Pool {
    version: ImageVersion,
    inode: ImageSlot,
    /// The path's inode, or the file's page.
    pointer: ImageSlot,
    metadata_mutex: Mutex<()>,
    /// Whether page 0 is free.
    is_free: Mutex<bool>,
    pages: [[AtomicU64; 2]; 2],
}

impl Versioned for Pool {
    fn names_version(&self) -> u64 {
        self.version.names()
    }

    fn metadata_version(&self) -> u64 {
        self.version.now()
    }

    fn file_state(&self, inode: u64) -> Option<FileState> {
        assert_eq!(inode, FILE);
        self.version.at_rest(|| state_of_file(&self.inode))?
    }
}

impl Pool {
    fn new(pointer: u64) -> Arc<Pool> {
        Arc::new(Pool {
            version: ImageVersion::new(),
            inode: image_slot(&inode_bytes(1, 1)),
            pointer: slot_with(pointer),
            metadata_mutex: Mutex::new(()),
            is_free: Mutex::new(false),
            pages: [0, 1].map(|page| [AtomicU64::new(page), AtomicU64::new(page)]),
        })
    }

    fn pointer(&self) -> u64 {
        self.pointer[WORD].load(Relaxed)
    }

    fn apply(&self, changes: &[(&ImageSlot, u64, &[u8])], changes_names: bool) {
        let _locked = self.metadata_mutex.lock().unwrap();
        let odd = self.version.begin_change();
        for (slot, set, bytes) in changes {
            let words = SlotWords { is_whole: false, set: *set };
            change(slot, &SlotChange { slot: 0, words, bytes });
        }
        if changes_names {
            self.version.note_names();
        }
        self.version.end_change(odd);
    }

    /// Makes the path refer to another file.
    fn rename(&self) {
        self.apply(&[(&self.pointer, 1 << WORD, &OTHER_FILE.to_ne_bytes())], true);
    }

    /// Extends the file in place.
    fn lengthen(&self) {
        let words = changed_words(&inode_bytes(1, 1), &inode_bytes(1, 2));
        self.apply(&[(&self.inode, words.0, &words.1)], false);
    }

    /// Moves the file to the second page, and frees the first one.
    fn relocate(&self) {
        let words = changed_words(&inode_bytes(1, 1), &inode_bytes(2, 1));
        let page = 1_u64.to_ne_bytes();
        self.apply(&[(&self.inode, words.0, &words.1), (&self.pointer, 1 << WORD, &page)], false);
        *self.is_free.lock().unwrap() = true;
    }

    /// Takes the first page for another file, if it is free, and writes to it as `Pool::store`
    /// does.
    fn write_other_file(&self) {
        let is_mine = std::mem::take(&mut *self.is_free.lock().unwrap());
        if is_mine {
            before_bytes_are_stored();
            self.pages[0].iter().for_each(|word| word.store(OTHER_FILE, Relaxed));
        }
    }

    /// As `Shared::read_at`.
    fn read(&self) -> [u64; 2] {
        let state = || {
            let at_rest = || (state_of_file(&self.inode).unwrap().layout_version, self.pointer());
            loop {
                if let Some(state) = self.version.at_rest(at_rest) {
                    return Ok(state);
                }
                thread::yield_now();
            }
        };
        let copy = |page: &u64| {
            let [first, second] = &self.pages[*page as usize];
            let copied = [first.load(Relaxed), second.load(Relaxed)];
            Ok((*page, copied))
        };
        let copied = copy_of_one_layout(state, copy, |version| {
            Ok(has_layout(|| Some(&self.inode), 1, version))
        });
        let (page, copied) = copied.unwrap();
        assert_eq!(copied, [page; 2], "bytes of another file");
        copied
    }
}

/// The words that differ, except the checksum, and their new values.
fn changed_words(before: &SlotBytes, after: &SlotBytes) -> (u64, Vec<u8>) {
    let word = |bytes: &SlotBytes, index: usize| bytes[index * 8..][..8].to_vec();
    let is_different = |index: &usize| word(before, *index) != word(after, *index);
    let changed: Vec<usize> = (0..SLOT_BYTES / 8 - 1).filter(is_different).collect();
    let set = changed.iter().fold(0, |set, index| set | 1 << index);
    (set, changed.iter().flat_map(|index| word(after, *index)).collect())
}

/// A reader without a pin gets bytes that the file had, or retries: never those of the page's next
/// owner.
#[test]
fn loom_a_reader_gets_no_bytes_of_another_file() {
    explore(3, || {
        let pool = Pool::new(0);
        let (changing, writing) = (pool.clone(), pool.clone());
        together(
            move || changing.relocate(),
            move || writing.write_other_file(),
            || {
                pool.read();
            },
        );
        assert_eq!(pool.read(), [1; 2]);
    });
}

fn known(inode: u64) -> Known {
    Known {
        inode,
        generation: inode,
        layout_version: inode,
        size_bytes: inode,
        run: Run { start_page: inode, pages: 1 },
        names_version: inode,
        metadata_version: inode,
    }
}

/// Entries are read whole, whatever threads write at the same time.
#[test]
fn loom_known_paths_are_whole() {
    explore(2, || {
        let paths = Arc::new(KnownPaths::new());
        paths.learn(PATH, known(1));
        let (first, second) = (paths.clone(), paths.clone());
        together(
            move || first.learn(PATH, known(2)),
            move || second.learn(PATH, known(3)),
            || {
                if let Some(found) = paths.find(PATH) {
                    assert_eq!(found, known(found.inode));
                }
            },
        );
        let found = paths.find(PATH).expect("no thread writes to it");
        assert_eq!(found, known(found.inode));
    });
}

/// Asserts that an entry matches the pool, if the pool has the entry's metadata version.
fn check_known(pool: &Pool, known: &Known) {
    let of_version = |version| (version == known.metadata_version).then_some(());
    let seen = pool.version.unchanged_during(|version| {
        of_version(version).map(|()| (pool.pointer(), state_of_file(&pool.inode).unwrap()))
    });
    if let Some((inode, state)) = seen {
        assert_eq!(inode, known.inode, "the path leads elsewhere");
        assert_eq!(state.size_bytes, known.size_bytes, "the file has another length");
    }
}

/// An entry that is renewed because no name has changed is correct as of its new metadata version.
#[test]
fn loom_a_known_path_is_renewed_as_of_one_moment() {
    for (changes_name_first, preemptions) in [(true, 3), (false, 3)] {
        explore(preemptions, move || {
            let pool = Pool::new(FILE);
            let changing = pool.clone();
            let changer = thread::spawn(move || {
                if changes_name_first {
                    changing.rename()
                } else {
                    changing.lengthen();
                    changing.rename();
                }
            });
            let known = Known {
                generation: 1,
                layout_version: 1,
                size_bytes: 1,
                names_version: 0,
                metadata_version: u64::MAX,
                ..known(FILE)
            };
            if let Some(renewed) = known.renewed(&*pool) {
                check_known(&pool, &renewed);
                changer.join().unwrap();
                check_known(&pool, &renewed);
            } else {
                changer.join().unwrap();
            }
        });
    }
}

/// An entry that is learned is correct as of its versions.
#[test]
fn loom_a_known_path_is_learned_as_of_one_moment() {
    explore(3, || {
        let pool = Pool::new(FILE);
        let changing = pool.clone();
        let changer = thread::spawn(move || changing.rename());
        let versions = Versions::of(&*pool);
        let found = pool.version.at_rest(|| pool.pointer());
        let metadata_version = versions.metadata_if_unchanged(&*pool);
        changer.join().unwrap();
        if let Some(found) = found {
            // The last change of names was the rename.
            let is_of_now = versions.names == pool.names_version();
            assert!(!is_of_now || found == OTHER_FILE, "names have changed since");
            let is_of_now = metadata_version == pool.metadata_version();
            assert!(!is_of_now || found == OTHER_FILE, "metadata have changed since");
        }
    });
}
