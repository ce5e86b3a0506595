//! Where paths led: what a process has looked up before, so that a file is found again with two cache lines.
//!
//! An entry says which inode a path led to, and, if the content of the file was one run, where that lies. It is used only if
//! no name in the pool has been changed since ([`Pool::names_version`](aquifer_pool::Pool::names_version)); that the file itself has not changed
//! is seen by who pins it. So an entry is never wrong, only useless.
//!
//! An entry has a cache line for itself, at a place that its path decides. Paths are told apart by 128 bits of SipHash with a key that
//! the process has drawn: whoever does not know it cannot find two paths that are taken for one, and by chance that happens once in
//! 2¹¹⁰ lookups of a full table.
//!
//! # Threads
//! Nobody waits: an entry has a version that is odd while somebody writes to it. Who reads it meanwhile finds nothing; who wants to
//! write to it as well leaves it.

use std::hash::Hasher;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};

use aquifer_pool::format::run::Run;
use siphasher::sip128::{Hasher128, SipHasher13};
use zerocopy::FromZeros;

/// Entries: 8 MiB, which are there only as far as they are used.
const ENTRIES: usize = 1 << 17;
/// Bits of the length of a run: one that is longer is not known.
const PAGES_BITS: u32 = 24;

/// What is known of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    pub inode: u64,
    pub incarnation: u64,
    pub layout_version: u64,
    /// Where the content lies; empty if it is not one run.
    pub run: Run,
}

/// A path, by its hash.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PathHash(u64, u64);

#[derive(FromZeros)]
#[repr(C, align(64))]
struct Entry {
    /// Odd while it is written.
    version: AtomicU64,
    /// Hash, version of the names, inode, incarnation, layout version, run.
    words: [AtomicU64; 7],
}

/// See the module's documentation.
pub(crate) struct KnownPaths {
    key: (u64, u64),
    entries: Box<[Entry]>,
}

impl std::fmt::Debug for KnownPaths {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("KnownPaths").finish_non_exhaustive()
    }
}

impl KnownPaths {
    /// Of which nothing is known yet.
    pub fn new() -> KnownPaths {
        let drawn = || aquifer_sys::random::next_u64().ok();
        KnownPaths {
            // Without a key nothing is known: see `hash`.
            key: drawn().zip(drawn()).unwrap_or((0, 0)),
            entries: <[Entry]>::new_box_zeroed_with_elems(ENTRIES).unwrap_or_default(),
        }
    }

    /// The hash of a path; `None` if nothing can be known.
    #[inline]
    pub fn hash(&self, path: &[u8]) -> Option<PathHash> {
        if self.key == (0, 0) || self.entries.is_empty() {
            return None;
        }
        let mut hasher = SipHasher13::new_with_keys(self.key.0, self.key.1);
        hasher.write(path);
        let hash = hasher.finish128();
        Some(PathHash(hash.h1, hash.h2))
    }

    fn entry(&self, path: PathHash) -> &Entry {
        &self.entries[path.0 as usize % ENTRIES]
    }

    /// What was learnt when the names had this version.
    #[inline]
    pub fn find(&self, path: PathHash, names_version: u64) -> Option<Known> {
        let entry = self.entry(path);
        // Acquire: pairs with the Release at the end of `learn`.
        let version = entry.version.load(Acquire);
        let [first, second, names, inode, incarnation, layout_version, run] =
            entry.words.each_ref().map(|word| word.load(Relaxed));
        // Acquire: the loads above come before the one below. Pairs with the fence in `learn`.
        fence(Acquire);
        let is_whole = version.is_multiple_of(2) && entry.version.load(Relaxed) == version;
        let is_it = first == path.0 && second == path.1 && names == names_version && inode != 0;
        let run = Run { start_page: run >> PAGES_BITS, pages: run & ((1 << PAGES_BITS) - 1) };
        (is_whole && is_it).then_some(Known { inode, incarnation, layout_version, run })
    }

    /// Notes what was looked up after the names had this version.
    pub fn learn(&self, path: PathHash, names_version: u64, known: Known) {
        let entry = self.entry(path);
        let version = entry.version.load(Relaxed);
        let is_taken = !version.is_multiple_of(2)
            || entry.version.compare_exchange(version, version + 1, Relaxed, Relaxed).is_err();
        if is_taken {
            return;
        }
        // Release: the odd version is seen before any of the stores below.
        fence(Release);
        let Known { inode, incarnation, layout_version, run } = known;
        let run = match run.pages >> PAGES_BITS == 0 && run.start_page >> (64 - PAGES_BITS) == 0 {
            true => run.start_page << PAGES_BITS | run.pages,
            false => 0,
        };
        let words = [path.0, path.1, names_version, inode, incarnation, layout_version, run];
        for (word, value) in entry.words.iter().zip(words) {
            word.store(value, Relaxed);
        }
        entry.version.store(version + 2, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(inode: u64) -> Known {
        let run = Run { start_page: inode * 2, pages: inode };
        Known { inode, incarnation: inode, layout_version: inode, run }
    }

    #[test]
    fn what_was_learnt_is_known_until_names_change() {
        let paths = KnownPaths::new();
        let hash = |path: &str| paths.hash(path.as_bytes()).unwrap();
        assert_eq!(paths.find(hash("/a"), 0), None, "an empty entry is nothing");
        paths.learn(hash("/a"), 5, known(7));
        assert_eq!(paths.find(hash("/a"), 5), Some(known(7)));
        assert_eq!(paths.find(hash("/a"), 6), None);
        assert_eq!(paths.find(hash("/b"), 5), None);
        paths.learn(hash("/a"), 6, known(8));
        assert_eq!(paths.find(hash("/a"), 6), Some(known(8)));
    }

    #[test]
    fn a_run_that_is_too_long_is_not_known() {
        let paths = KnownPaths::new();
        let path = paths.hash(b"/a").unwrap();
        let run = Run { start_page: 9, pages: 1 << PAGES_BITS };
        paths.learn(path, 5, Known { run, ..known(7) });
        assert!(paths.find(path, 5).unwrap().run.is_empty());
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
                        paths.learn(path, 5, known(first + number % 1000));
                    }
                })
            });
            while !writers.iter().all(|writer| writer.is_finished()) {
                if let Some(found) = paths.find(path, 5) {
                    assert_eq!(found, known(found.inode));
                }
            }
        });
    }
}
