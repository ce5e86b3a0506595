//! Cache of path lookups, so that a file or directory is found again with one cache line.
//!
//! An entry holds the inode that a path referred to, the file's length, and, if its content was one
//! run, where that lies. If the metadata of the pool have not changed since
//! ([`Pool::metadata_version`](aquifer_pool::Pool::metadata_version)), all of that is current. If
//! no name has changed since ([`Pool::names_version`](aquifer_pool::Pool::names_version)), the
//! inode is. The caller checks these versions again after it has pinned the result. So a stale
//! entry costs time, but is never used.
//!
//! The path's hash selects a bucket of two entries. Paths are distinguished by 128 bits of SipHash
//! with a random key per process: without the key, colliding paths cannot be constructed, and
//! by chance that happens once in 2¹¹⁰ lookups of a full table.
//!
//! # Growth
//! The table begins with four pages of memory, and gets four more for each 16 paths, by linear
//! hashing (Litwin, VLDB 1980): of the entries of as many old buckets, those whose hash now selects
//! a new one are copied there. So few paths touch few pages: the first touch of a page takes longer
//! than all that is done for a path. With four buckets for each path, one in thirty displaces another
//! one.
//!
//! # Threads
//! No thread blocks: an entry is a seqlock, whose version is odd during a write. A reader that
//! overlaps a write finds nothing; a second writer skips its write. While one thread adds buckets,
//! others may miss an entry that is not copied yet, store one that is not copied any more, or find
//! the copy of an older one: the first two cost a lookup, and the last is checked as any entry is.

use std::hash::Hasher;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use aquifer_pool::Pool;
use aquifer_pool::format::file::{FileInode, FileState};
use aquifer_pool::format::run::Run;
#[cfg(not(loom))]
use aquifer_vm::ZeroedSlice;
use siphasher::sip128::{Hasher128, SipHasher13};
#[cfg(not(loom))]
use zerocopy::FromZeros;

use crate::sync::{AtomicU64, AtomicUsize, fence};

/// The most buckets: 8 MiB in all.
const BUCKETS: usize = if cfg!(loom) { 1 } else { 1 << 15 };
/// Buckets at first, and how many are added at a time: 16 KiB.
const STEP_BUCKETS: usize = if cfg!(loom) { 1 } else { 64 };
/// Buckets for each path.
const BUCKETS_PER_PATH: usize = 4;
/// Entries per bucket.
const WAYS: usize = 2;
/// Bits for the length of a run; a longer run is not stored.
const PAGES_BITS: u32 = 24;

/// What is cached of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    pub inode: u64,
    pub generation: u64,
    pub layout_version: u64,
    pub size_bytes: u64,
    /// Where the content lies; empty if it is not one run, or is too long to store.
    pub run: Run,
    /// The version of the names at the lookup.
    pub names_version: u64,
    /// The version of all metadata at the lookup; a value that never occurs if they changed during
    /// it.
    pub metadata_version: u64,
}

impl Known {
    /// What a lookup found that began at these versions; `run` is empty if the content is not one.
    pub fn found(inode: &FileInode, run: Run, versions: &Versions, pool: &impl Versioned) -> Known {
        Known {
            inode: inode.number,
            generation: inode.generation,
            layout_version: inode.layout_version,
            size_bytes: inode.size_bytes,
            run,
            names_version: versions.names,
            metadata_version: versions.metadata_if_unchanged(pool),
        }
    }

    /// Brings the entry up to date; `None` if the path may refer to another inode, or the content
    /// lies elsewhere.
    #[inline]
    pub fn renewed(self, pool: &impl Versioned) -> Option<Known> {
        let versions = Versions::of(pool);
        let state = pool.file_state(self.inode)?;
        let is_it = versions.names == self.names_version
            && (state.generation, state.layout_version) == (self.generation, self.layout_version);
        is_it.then(|| Known {
            metadata_version: versions.metadata_if_unchanged(pool),
            size_bytes: state.size_bytes,
            ..self
        })
    }
}

/// The versions and states that entries are checked against: a pool's.
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

/// Change counters of the pool.
pub(crate) struct Versions {
    pub names: u64,
    metadata: u64,
}

impl Versions {
    /// Reads the versions, before a lookup.
    #[inline]
    pub fn of(pool: &impl Versioned) -> Versions {
        // The metadata version first, so that the names version is as new or newer. In the other
        // order, names could change in between, and an old entry would be taken for one after that
        // change.
        let metadata = pool.metadata_version();
        Versions { names: pool.names_version(), metadata }
    }

    /// Returns the metadata version if nothing has changed since; else a value that never occurs.
    #[inline]
    pub fn metadata_if_unchanged(&self, pool: &impl Versioned) -> u64 {
        let is_at_rest = self.metadata.is_multiple_of(2);
        if is_at_rest && pool.metadata_version() == self.metadata {
            self.metadata
        } else {
            u64::MAX
        }
    }
}

/// A path, by its hash.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PathHash(pub u64, pub u64);

#[cfg_attr(not(loom), derive(FromZeros))]
#[repr(C, align(128))]
struct Entry {
    /// Odd during a write.
    version: AtomicU64,
    /// Hash (2), metadata version, inode, layout version, size, run; and in the second cache line
    /// names version, generation.
    words: [AtomicU64; 9],
}

/// See the module's documentation.
pub(crate) struct KnownPaths {
    key: (u64, u64),
    /// Empty if there are no addresses for them.
    buckets: Buckets,
    /// How many of them are in use.
    used: AtomicUsize,
    growth: Growth,
}

/// Not in the cache line that each lookup loads.
#[repr(align(128))]
struct Growth {
    /// How many buckets are in use, or will be once a thread has added some.
    made: AtomicUsize,
    /// How many paths were stored that had no entry.
    learnt: AtomicUsize,
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
            generation,
        ] = self.words.each_ref().map(|word| word.load(Relaxed));
        // Acquire: orders the loads above before the load below. Pairs with the fence in `write`.
        fence(Acquire);
        let is_whole = version.is_multiple_of(2) && self.version.load(Relaxed) == version;
        let is_it = (first, second) == (path.0, path.1) && inode != 0;
        (is_whole && is_it).then_some(Known {
            inode,
            generation,
            layout_version,
            size_bytes,
            run: Run { start_page: run >> PAGES_BITS, pages: run & ((1 << PAGES_BITS) - 1) },
            names_version: names,
            metadata_version,
        })
    }

    /// The path that it is of, if it has ever been written.
    fn path(&self) -> Option<PathHash> {
        let [first, second] = [0, 1].map(|index: usize| self.words[index].load(Relaxed));
        (self.version.load(Relaxed) != 0).then_some(PathHash(first, second))
    }

    fn write(&self, path: PathHash, known: Known) {
        let version = self.version.load(Relaxed);
        let is_taken = !version.is_multiple_of(2)
            // Acquire: orders the previous writer's stores before those below. Pairs with the
            // Release at the end.
            || self.version.compare_exchange(version, version + 1, Acquire, Relaxed).is_err();
        if is_taken {
            return;
        }
        // Release: orders the odd version before all stores below. Pairs with the fence in `read`.
        fence(Release);
        let run = known.run;
        let run = if run.pages >> PAGES_BITS == 0 && run.start_page >> (64 - PAGES_BITS) == 0 {
            run.start_page << PAGES_BITS | run.pages
        } else {
            0
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
            known.generation,
        ];
        for (word, value) in self.words.iter().zip(words) {
            word.store(value, Relaxed);
        }
        // Release: pairs with the Acquire in `read`.
        self.version.store(version + 2, Release);
    }
}

#[cfg(not(loom))]
type Buckets = ZeroedSlice<[Entry; WAYS]>;

#[cfg(loom)]
type Buckets = Box<[[Entry; WAYS]]>;

#[cfg(not(loom))]
fn no_entries() -> Buckets {
    ZeroedSlice::new(BUCKETS).unwrap_or_default()
}

#[cfg(loom)]
fn no_entries() -> Buckets {
    let zero = || AtomicU64::new(0);
    let entry = || Entry { version: zero(), words: std::array::from_fn(|_| zero()) };
    (0..BUCKETS).map(|_| std::array::from_fn(|_| entry())).collect()
}

impl KnownPaths {
    /// Creates an empty cache.
    pub fn new() -> KnownPaths {
        let drawn = || aquifer_sys::random::next_u64().ok();
        KnownPaths {
            // Without a key nothing is cached: see `hash`.
            key: drawn().zip(drawn()).unwrap_or((0, 0)),
            buckets: no_entries(),
            used: AtomicUsize::new(STEP_BUCKETS),
            growth: Growth { made: AtomicUsize::new(STEP_BUCKETS), learnt: AtomicUsize::new(0) },
        }
    }

    /// Returns the hash of a path; `None` if nothing can be cached.
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

    /// The index of the bucket of a path, of this many.
    #[inline]
    fn index(path: PathHash, used: usize) -> usize {
        let bits = used.next_power_of_two() - 1;
        match path.0 as usize & bits {
            index if index < used => index,
            index => index & (bits >> 1),
        }
    }

    #[inline]
    fn bucket(&self, path: PathHash) -> &[Entry; WAYS] {
        // Relaxed, as in `grow`: a bucket without entries is all zero, and each entry is a seqlock.
        &self.buckets[Self::index(path, self.used.load(Relaxed))]
    }

    /// Finds the entry of a path.
    #[inline]
    pub fn find(&self, path: PathHash) -> Option<Known> {
        self.bucket(path).iter().find(|entry| entry.is_of(path))?.read(path)
    }

    /// Stores the entry of a path.
    pub fn learn(&self, path: PathHash, known: Known) {
        let used = self.used.load(Relaxed);
        let index = Self::index(path, used);
        let bucket = &self.buckets[index];
        if let Some(own) = bucket.iter().find(|entry| entry.is_of(path)) {
            return own.write(path, known);
        }
        // An entry that was copied to another bucket is of no use here.
        let is_free = |entry: &&Entry| entry.path().is_none_or(|of| Self::index(of, used) != index);
        // Bits that do not select the bucket.
        let any = || &bucket[(path.1 as usize) % WAYS];
        bucket.iter().find(is_free).unwrap_or_else(any).write(path, known);
        if self.growth.learnt.fetch_add(1, Relaxed) >= used / BUCKETS_PER_PATH {
            self.grow(used);
        }
    }

    /// Adds buckets, unless there are all, or another thread is about to.
    #[cold]
    fn grow(&self, used: usize) {
        let more = used + STEP_BUCKETS;
        let is_own = || self.growth.made.compare_exchange(used, more, Relaxed, Relaxed).is_ok();
        if more > BUCKETS || !is_own() {
            return;
        }
        #[cfg(not(loom))]
        self.buckets.populate(used..more);
        self.used.store(more, Relaxed);
        for index in used..more {
            // The bucket that was selected by one bit less.
            let before = &self.buckets[index - (1 << index.ilog2())];
            for (entry, copy) in before.iter().zip(&self.buckets[index]) {
                // Another thread may have found the new bucket by now.
                if let Some(path) = entry.path().filter(|_| copy.path().is_none())
                    && Self::index(path, more) == index
                    && let Some(known) = entry.read(path)
                {
                    copy.write(path, known);
                }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn known(inode: u64) -> Known {
        Known {
            inode,
            generation: inode + 1,
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

    /// The table grows with what is learnt: of few paths none is displaced, and few take little
    /// memory; of half as many as there are buckets, most are kept.
    #[test]
    fn the_table_grows_with_the_number_of_paths() {
        let paths = KnownPaths::new();
        let hash = |number: u64| paths.hash(format!("/a/{number}").as_bytes()).unwrap();
        let found = |count: u64| {
            let is_found = |&number: &u64| paths.find(hash(number)) == Some(known(number));
            (1..=count).filter(is_found).count() as u64
        };
        let used_bytes = || paths.used.load(Relaxed) * size_of::<[Entry; WAYS]>() / (64 << 10);
        (1..=100).for_each(|number| paths.learn(hash(number), known(number)));
        assert!(found(100) >= 90, "{}", found(100));
        assert!(used_bytes() <= 2, "{} * 64 KiB", used_bytes());
        let all = BUCKETS as u64 / 2;
        (1..=all).for_each(|number| paths.learn(hash(number), known(number)));
        assert!(found(all) > all / 10 * 9, "{}", found(all));
        assert_eq!(paths.used.load(Relaxed), BUCKETS);
    }

    /// Threads learn different paths, while the table grows.
    #[test]
    fn threads_find_whole_entries_while_the_table_grows() {
        let paths = &KnownPaths::new();
        let hash = |number: u64| paths.hash(&number.to_le_bytes()).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..3 {
                scope.spawn(move || {
                    for number in (1 + thread..20_000).step_by(2) {
                        paths.learn(hash(number), known(number));
                        for older in [number, number / 2 + 1] {
                            let found = paths.find(hash(older));
                            assert!(found.is_none_or(|found| found == known(older)));
                        }
                    }
                });
            }
        });
        // While a thread that adds buckets does not run, others displace entries.
        (1..20_000).for_each(|number| paths.learn(hash(number), known(number)));
        let found = (1..20_000).filter(|&number| paths.find(hash(number)).is_some()).count();
        assert!(found > 18_000, "{found}");
    }

    #[test]
    fn a_run_that_is_too_long_is_not_known() {
        let paths = KnownPaths::new();
        let path = paths.hash(b"/a").unwrap();
        let run = Run { start_page: 9, pages: 1 << PAGES_BITS };
        paths.learn(path, Known { run, ..known(7) });
        assert!(paths.find(path).unwrap().run.is_empty());
    }

    /// All words of an entry belong together, whatever threads write at the same time.
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
