//! Where paths led: what a process has looked up before, so that a file is found again with one cache line.
//!
//! An entry says which inode a path led to, how long the file was, and, if its content was one run, where that lies. As long as nothing
//! at all has been changed in the pool since ([`Pool::metadata_version`](aquifer_pool::Pool::metadata_version)), that is how it is. As long as no name has
//! been changed ([`Pool::names_version`](aquifer_pool::Pool::names_version)), it is the inode. The caller looks at these versions again after it has
//! pinned what it found. So an entry is never wrong, only useless.
//!
//! An entry is at one of two places that its path decides. Paths are told apart by 128 bits of SipHash with a key that the process has
//! drawn: whoever does not know it cannot find two paths that are taken for one, and by chance that happens once in
//! 2¹¹⁰ lookups of a full table.
//!
//! # Threads
//! Nobody waits: an entry has a version that is odd while somebody writes to it. Who reads it meanwhile finds nothing; who wants to
//! write to it as well leaves it.

use std::hash::Hasher;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use aquifer_pool::Pool;
use aquifer_pool::format::file::FileState;
use aquifer_pool::format::run::Run;
use siphasher::sip128::{Hasher128, SipHasher13};
#[cfg(not(loom))]
use zerocopy::FromZeros;

use crate::sync::{AtomicU64, fence};

/// Places for an entry: 8 MiB together, which are there only as far as they are used.
const BUCKETS: usize = if cfg!(loom) { 1 } else { 1 << 15 };
/// Entries that can be at one of them.
const WAYS: usize = 2;
/// Bits of the length of a run: one that is longer is not known.
const PAGES_BITS: u32 = 24;

/// What is known of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    pub inode: u64,
    pub incarnation: u64,
    pub layout_version: u64,
    pub size_bytes: u64,
    /// Where the content lies; empty if it is not one run.
    pub run: Run,
    /// Of the names, when it was found.
    pub names_version: u64,
    /// Of all metadata, when it was found; one that they never have if they were changed meanwhile.
    pub metadata_version: u64,
}

impl Known {
    /// The same as it is now; `None` if the path may lead elsewhere, or the content lie elsewhere.
    #[inline]
    pub fn renewed(self, pool: &impl Versioned) -> Option<Known> {
        let versions = Versions::of(pool);
        let state = pool.file_state(self.inode)?;
        let is_it = versions.names == self.names_version
            && (state.incarnation, state.layout_version) == (self.incarnation, self.layout_version);
        is_it.then(|| Known {
            metadata_version: versions.metadata_if_unchanged(pool),
            size_bytes: state.size_bytes,
            ..self
        })
    }
}

/// What says whether something was changed: a pool.
pub(crate) trait Versioned {
    fn names_version(&self) -> u64;
    fn metadata_version(&self) -> u64;
    fn file_state(&self, inode: u64) -> Option<FileState>;
}

impl Versioned for Pool {
    #[inline]
    fn names_version(&self) -> u64 {
        Pool::names_version(self)
    }

    #[inline]
    fn metadata_version(&self) -> u64 {
        Pool::metadata_version(self)
    }

    #[inline]
    fn file_state(&self, inode: u64) -> Option<FileState> {
        Pool::file_state(self, inode)
    }
}

/// What has been changed in the pool, and how often.
pub(crate) struct Versions {
    pub names: u64,
    metadata: u64,
}

impl Versions {
    /// Those before what is looked up next.
    #[inline]
    pub fn of(pool: &impl Versioned) -> Versions {
        // That of the metadata first: that of the names is as new, or newer. The other way round, names could change in between, and an
        // entry of before would be taken for one of after that.
        let metadata = pool.metadata_version();
        Versions { names: pool.names_version(), metadata }
    }

    /// That of the metadata if nothing was changed since these were asked for; else one that metadata never have.
    #[inline]
    pub fn metadata_if_unchanged(&self, pool: &impl Versioned) -> u64 {
        let is_at_rest = self.metadata.is_multiple_of(2);
        match is_at_rest && pool.metadata_version() == self.metadata {
            true => self.metadata,
            false => u64::MAX,
        }
    }
}

/// A path, by its hash.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PathHash(pub u64, pub u64);

#[cfg_attr(not(loom), derive(FromZeros))]
#[repr(C, align(128))]
struct Entry {
    /// Odd while it is written.
    version: AtomicU64,
    /// Hash, version of the metadata, inode, layout version, size, run; and in the next cache line version of the names, incarnation.
    words: [AtomicU64; 9],
}

/// See the module's documentation.
pub(crate) struct KnownPaths {
    key: (u64, u64),
    buckets: Box<[[Entry; WAYS]]>,
}

impl std::fmt::Debug for KnownPaths {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("KnownPaths").finish_non_exhaustive()
    }
}

impl Entry {
    fn is_of(&self, path: PathHash) -> bool {
        self.words[0].load(Relaxed) == path.0
    }

    #[inline]
    fn read(&self, path: PathHash) -> Option<Known> {
        // Acquire: pairs with the Release at the end of `write`.
        let version = self.version.load(Acquire);
        let [
            first,
            second,
            metadata_version,
            inode,
            layout_version,
            size_bytes,
            run,
            names,
            incarnation,
        ] = self.words.each_ref().map(|word| word.load(Relaxed));
        // Acquire: the loads above come before the one below. Pairs with the fence in `write`.
        fence(Acquire);
        let is_whole = version.is_multiple_of(2) && self.version.load(Relaxed) == version;
        let is_it = (first, second) == (path.0, path.1) && inode != 0;
        (is_whole && is_it).then_some(Known {
            inode,
            incarnation,
            layout_version,
            size_bytes,
            run: Run { start_page: run >> PAGES_BITS, pages: run & ((1 << PAGES_BITS) - 1) },
            names_version: names,
            metadata_version,
        })
    }

    fn write(&self, path: PathHash, known: Known) {
        let version = self.version.load(Relaxed);
        let is_taken = !version.is_multiple_of(2)
            // Acquire: what the last one wrote to it comes before what is written now. Pairs with the Release at the end.
            || self.version.compare_exchange(version, version + 1, Acquire, Relaxed).is_err();
        if is_taken {
            return;
        }
        // Release: the odd version is seen before any of the stores below.
        fence(Release);
        let run = known.run;
        let run = match run.pages >> PAGES_BITS == 0 && run.start_page >> (64 - PAGES_BITS) == 0 {
            true => run.start_page << PAGES_BITS | run.pages,
            false => 0,
        };
        let words = [
            path.0,
            path.1,
            known.metadata_version,
            known.inode,
            known.layout_version,
            known.size_bytes,
            run,
            known.names_version,
            known.incarnation,
        ];
        for (word, value) in self.words.iter().zip(words) {
            word.store(value, Relaxed);
        }
        // Release: pairs with the Acquire in `read`.
        self.version.store(version + 2, Release);
    }
}

#[cfg(not(loom))]
fn no_entries() -> Box<[[Entry; WAYS]]> {
    <[[Entry; WAYS]]>::new_box_zeroed_with_elems(BUCKETS).unwrap_or_default()
}

#[cfg(loom)]
fn no_entries() -> Box<[[Entry; WAYS]]> {
    let zero = || AtomicU64::new(0);
    let entry = || Entry { version: zero(), words: std::array::from_fn(|_| zero()) };
    (0..BUCKETS).map(|_| std::array::from_fn(|_| entry())).collect()
}

impl KnownPaths {
    /// Of which nothing is known yet.
    pub fn new() -> KnownPaths {
        let drawn = || aquifer_sys::random::next_u64().ok();
        KnownPaths {
            // Without a key nothing is known: see `hash`.
            key: drawn().zip(drawn()).unwrap_or((0, 0)),
            buckets: no_entries(),
        }
    }

    /// The hash of a path; `None` if nothing can be known.
    #[inline]
    pub fn hash(&self, path: &[u8]) -> Option<PathHash> {
        if self.key == (0, 0) || self.buckets.is_empty() {
            return None;
        }
        let mut hasher = SipHasher13::new_with_keys(self.key.0, self.key.1);
        hasher.write(path);
        let hash = hasher.finish128();
        Some(PathHash(hash.h1, hash.h2))
    }

    fn bucket(&self, path: PathHash) -> &[Entry; WAYS] {
        &self.buckets[path.0 as usize % BUCKETS]
    }

    /// What is known of a path.
    #[inline]
    pub fn find(&self, path: PathHash) -> Option<Known> {
        self.bucket(path).iter().find(|entry| entry.is_of(path))?.read(path)
    }

    /// Notes what was found.
    pub fn learn(&self, path: PathHash, known: Known) {
        let bucket = self.bucket(path);
        let own = bucket.iter().position(|entry| entry.is_of(path));
        let empty = || bucket.iter().position(|entry| entry.version.load(Relaxed) == 0);
        // Bits that the place does not depend on.
        let any = || (path.1 as usize) % WAYS;
        bucket[own.or_else(empty).unwrap_or_else(any)].write(path, known);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn known(inode: u64) -> Known {
        Known {
            inode,
            incarnation: inode + 1,
            layout_version: inode + 2,
            size_bytes: inode + 3,
            run: Run { start_page: inode * 2, pages: inode },
            names_version: inode + 4,
            metadata_version: inode + 5,
        }
    }

    #[test]
    fn what_was_learnt_is_known() {
        let paths = KnownPaths::new();
        let hash = |path: &str| paths.hash(path.as_bytes()).unwrap();
        assert_eq!(paths.find(hash("/a")), None, "an empty entry is nothing");
        paths.learn(hash("/a"), known(7));
        assert_eq!(paths.find(hash("/a")), Some(known(7)));
        assert_eq!(paths.find(hash("/b")), None);
        paths.learn(hash("/a"), known(8));
        assert_eq!(paths.find(hash("/a")), Some(known(8)));
    }

    #[test]
    fn a_place_has_room_for_two() {
        let paths = KnownPaths::new();
        let one = paths.hash(b"/a").unwrap();
        let others = [1, 2, 3].map(|n| PathHash(one.0 + n * BUCKETS as u64, one.1 + n));
        paths.learn(one, known(1));
        paths.learn(others[0], known(2));
        assert_eq!(paths.find(one), Some(known(1)));
        assert_eq!(paths.find(others[0]), Some(known(2)));
        for (number, other) in (3..).zip(&others[1..]) {
            paths.learn(*other, known(number));
            assert_eq!(paths.find(*other), Some(known(number)));
        }
    }

    #[test]
    fn a_run_that_is_too_long_is_not_known() {
        let paths = KnownPaths::new();
        let path = paths.hash(b"/a").unwrap();
        let run = Run { start_page: 9, pages: 1 << PAGES_BITS };
        paths.learn(path, Known { run, ..known(7) });
        assert!(paths.find(path).unwrap().run.is_empty());
    }

    /// All words of an entry say the same, whoever writes to it meanwhile.
    #[test]
    fn threads_see_whole_entries() {
        let paths = KnownPaths::new();
        let path = paths.hash(b"/a").unwrap();
        std::thread::scope(|scope| {
            let writers = [1, 2].map(|first| {
                let (paths, known) = (&paths, &known);
                scope.spawn(move || {
                    for number in 0..200_000_u64 {
                        paths.learn(path, known(first + number % 1000));
                    }
                })
            });
            while !writers.iter().all(|writer| writer.is_finished()) {
                if let Some(found) = paths.find(path) {
                    assert_eq!(found, known(found.inode));
                }
            }
        });
    }
}
