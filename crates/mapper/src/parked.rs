//! The mapping cache: mappings by file, in use or parked.
//!
//! Closing the last view of a file parks its mapping: addresses, page tables and all. Mapping the
//! file again takes one system call, which resolves the path, and a look-up.
//!
//! # Eviction
//! Parked mappings are limited in bytes (the length of the mappings; most of it is page cache,
//! which remains the kernel's) and in number (a process has 65,530). They are evicted in the order
//! of a segmented LRU (Karedla et al., 1994): a mapping used once is on *probation*, one that was
//! reused from the cache is *protected*; probation is evicted first. So a scan of more files than
//! fit does not evict those that are reused.
//!
//! Repeated scans need more: there LRU keeps exactly the files that come last. Of 50,000 files with
//! room for 16,000, none was found. So a newcomer that would evict another mapping is treated in
//! one of two ways: it is admitted, or it is evicted itself except for one in 32 (bimodal
//! insertion; Qureshi et al., ISCA 2007, whose set dueling makes the choice). One shard always does
//! the first, one always the second, and the others whichever has had fewer misses lately.
//!
//! # Shards
//! The table is split into shards by file, each with its own lock. The limits are global, so that
//! one file may take nearly all of the cache. The victim is the oldest of the heaviest shard, which
//! keeps shards about equal. It is unmapped after the lock is released; no two locks are held at
//! once.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer_sys::residency::FileIdentity;

use super::identity::CacheKey;
use super::mapped::Mapped;

const SHARDS: usize = 16;
/// Share of the limits for mappings that were reused, in percent.
const PROTECTED_PERCENT: u64 = 80;
/// The shard that always admits newcomers, and the one that seldom does.
const LETTING_IN: usize = 0;
const KEEPING_OUT: usize = 8;
/// In shards that keep newcomers out, one of so many is admitted.
const LET_IN_ONE_OF: u64 = 32;
/// The difference in misses at which the duel saturates.
const DUEL_LIMIT: i32 = 256;

/// Limits of a mapping cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub bytes: u64,
    pub mappings: u64,
}

/// The mapping cache.
pub(crate) struct Parked {
    shards: [Mutex<Shard>; SHARDS],
    hash: RandomState,
    limits: Limits,
    /// Totals over all shards, and of each. Changed under the lock of the shard.
    parked: Totals,
    by_shard: [Totals; SHARDS],
    /// Misses of the shard that admits newcomers, minus those of the one that keeps them out.
    duel: AtomicI32,
    newcomers: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
}

#[derive(Default)]
struct Totals {
    bytes: AtomicU64,
    mappings: AtomicU64,
}

#[derive(Default)]
struct Shard {
    entries: HashMap<CacheKey, Entry>,
    /// Parked mappings by the time they were parked.
    probation: Segment,
    protected: Segment,
    clock: u64,
}

#[derive(Default)]
struct Segment {
    by_age: BTreeMap<u64, CacheKey>,
    bytes: u64,
}

struct Entry {
    mapped: Arc<Mapped>,
    users: usize,
    /// Whether it has been reused from the cache.
    is_protected: bool,
    parked_at: u64,
}

/// Counters and current size of a mapping cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Mappings that were found.
    pub hits: u64,
    /// Files that had to be mapped.
    pub misses: u64,
    /// Mappings parked now.
    pub parked: u64,
    /// Their length.
    pub parked_bytes: u64,
}

impl Parked {
    pub fn new(limits: Limits) -> Parked {
        Parked {
            shards: Default::default(),
            hash: RandomState::new(),
            limits,
            parked: Totals::default(),
            by_shard: Default::default(),
            duel: AtomicI32::new(0),
            newcomers: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    /// Whether the mapping of a file of this length can be parked.
    pub fn keeps(&self, len_bytes: u64) -> bool {
        len_bytes <= self.limits.bytes && self.limits.mappings > 0
    }

    /// The shard of a file, by its identity alone: `forget` must find it even if owner or mode have
    /// changed.
    fn number(&self, file: FileIdentity) -> usize {
        self.hash.hash_one(file) as usize % SHARDS
    }

    fn shard(&self, number: usize) -> Locked<'_> {
        let shard = self.shards[number].lock().unwrap_or_else(PoisonError::into_inner);
        Locked { before: shard.totals(), shard, parked: &self.parked, own: &self.by_shard[number] }
    }

    /// The mapping of a file, if the cache has one of at least `len_bytes`. It counts as used until
    /// it is released.
    pub fn take(&self, key: impl FnOnce() -> CacheKey, len_bytes: u64) -> Option<Arc<Mapped>> {
        if !self.keeps(len_bytes) {
            // Relaxed, here and below: statistics.
            self.misses.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let key = key();
        let number = self.number(key.identity());
        let found = self.shard(number).take(key, len_bytes);
        let count = if found.is_some() { &self.hits } else { &self.misses };
        count.fetch_add(1, Ordering::Relaxed);
        if found.is_none() {
            self.note_miss(number);
        }
        found
    }

    /// Records a miss in one of the two shards that decide the duel.
    fn note_miss(&self, number: usize) {
        let change = match number {
            LETTING_IN => 1,
            KEEPING_OUT => -1,
            _ => return,
        };
        // Relaxed: a lost update only shifts a heuristic.
        let duel = self.duel.load(Ordering::Relaxed) + change;
        self.duel.store(duel.clamp(-DUEL_LIMIT, DUEL_LIMIT), Ordering::Relaxed);
    }

    /// Whether this newcomer is evicted itself rather than evicting another mapping.
    fn is_kept_out(&self, number: usize) -> bool {
        let keeps_out = match number {
            LETTING_IN => false,
            KEEPING_OUT => true,
            _ => self.duel.load(Ordering::Relaxed) > 0,
        };
        // Relaxed: about one of so many.
        keeps_out && !self.newcomers.fetch_add(1, Ordering::Relaxed).is_multiple_of(LET_IN_ONE_OF)
    }

    /// Enters a mapping that has one user. It replaces one that is too short.
    pub fn insert(&self, mapped: &Arc<Mapped>) {
        let Some(key) = mapped.key else { return };
        let entry = Entry { mapped: mapped.clone(), users: 1, is_protected: false, parked_at: 0 };
        let mut shard = self.shard(self.number(key.identity()));
        let before = shard.remove(key);
        shard.entries.insert(key, entry);
        drop(shard);
        drop(before);
    }

    /// Removes one user. The last one parks the mapping.
    pub fn release(&self, mapped: &Arc<Mapped>) {
        let Some(key) = mapped.key else { return };
        let number = self.number(key.identity());
        let released = self.shard(number).release(key, mapped, self.share());
        match released {
            Released::InUse => {}
            // Unmapped here.
            Released::Removed(removed) => drop(removed),
            Released::Parked { is_protected } => {
                if self.is_over() {
                    self.make_room(number, key, is_protected);
                }
            }
        }
    }

    fn is_over(&self) -> bool {
        // Relaxed: a thread sees the totals it changed itself, and other threads make room for what
        // they parked.
        self.parked.bytes.load(Ordering::Relaxed) > self.limits.bytes
            || self.parked.mappings.load(Ordering::Relaxed) > self.limits.mappings
    }

    /// Evicts until the limits hold again, always from the heaviest shard: mappings on probation,
    /// and for a newcomer that was reused also protected ones. If that is not enough, evicts the
    /// newcomer.
    fn make_room(&self, number: usize, newcomer: CacheKey, is_protected: bool) {
        if !is_protected && self.is_kept_out(number) {
            let removed = self.shard(number).remove_parked(newcomer);
            drop(removed);
        }
        let segments = if is_protected { 2 } else { 1 };
        for of_protected in [false, true].into_iter().take(segments) {
            let mut has_more = [true; SHARDS];
            while self.is_over()
                && let Some(number) = self.heaviest(&has_more)
            {
                let mut shard = self.shard(number);
                let evicted = shard.evict(of_protected, newcomer);
                drop(shard);
                has_more[number] = evicted.is_some();
                // Unmapped here.
                drop(evicted);
            }
        }
        if self.is_over() {
            let removed = self.shard(number).remove_parked(newcomer);
            drop(removed);
        }
    }

    /// The shard, among those in `which`, with the most of what exceeds its limit.
    fn heaviest(&self, which: &[bool; SHARDS]) -> Option<usize> {
        let too_many_bytes = self.parked.bytes.load(Ordering::Relaxed) > self.limits.bytes;
        let weight = |shard: &Totals| {
            let of = if too_many_bytes { &shard.bytes } else { &shard.mappings };
            of.load(Ordering::Relaxed)
        };
        (0..SHARDS).filter(|&shard| which[shard]).max_by_key(|&shard| weight(&self.by_shard[shard]))
    }

    /// A shard's share of the limits for protected mappings.
    fn share(&self) -> Limits {
        let share = |all: u64| {
            (u128::from(all) * u128::from(PROTECTED_PERCENT) / 100 / SHARDS as u128) as u64
        };
        Limits { bytes: share(self.limits.bytes), mappings: share(self.limits.mappings) }
    }

    /// Removes a file, whatever its owner and mode were. Current users keep the mapping; the last
    /// one unmaps it.
    pub fn forget(&self, file: FileIdentity) {
        let mut shard = self.shard(self.number(file));
        let is_it = |other: &&CacheKey| other.identity() == file;
        let found: Vec<CacheKey> = shard.entries.keys().filter(is_it).copied().collect();
        let removed: Vec<_> = found.into_iter().filter_map(|key| shard.remove(key)).collect();
        drop(shard);
        drop(removed);
    }

    /// Removes every parked mapping, and returns how many there were.
    pub fn forget_all(&self) -> usize {
        let mut count = 0;
        for number in 0..SHARDS {
            let mut shard = self.shard(number);
            let mut removed = Vec::new();
            while let Some(key) = shard.probation.oldest().or_else(|| shard.protected.oldest()) {
                removed.extend(shard.remove(key));
            }
            drop(shard);
            count += removed.len();
        }
        count
    }

    pub fn stats(&self) -> CacheStats {
        let mut stats = CacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            ..CacheStats::default()
        };
        stats.parked = self.parked.mappings.load(Ordering::Relaxed);
        stats.parked_bytes = self.parked.bytes.load(Ordering::Relaxed);
        stats
    }
}

/// A shard under its lock. Dropping it adds the changes to the totals.
struct Locked<'a> {
    shard: MutexGuard<'a, Shard>,
    /// Bytes and mappings that were parked when it was locked.
    before: (u64, u64),
    parked: &'a Totals,
    own: &'a Totals,
}

impl Deref for Locked<'_> {
    type Target = Shard;

    fn deref(&self) -> &Shard {
        &self.shard
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Shard {
        &mut self.shard
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let (bytes, mappings) = self.shard.totals();
        if (bytes, mappings) == self.before {
            return;
        }
        // Relaxed: counters that guard nothing. Wrapping: the difference may be negative.
        self.parked.bytes.fetch_add(bytes.wrapping_sub(self.before.0), Ordering::Relaxed);
        self.parked.mappings.fetch_add(mappings.wrapping_sub(self.before.1), Ordering::Relaxed);
        self.own.bytes.store(bytes, Ordering::Relaxed);
        self.own.mappings.store(mappings, Ordering::Relaxed);
    }
}

/// The state of a mapping after a user was removed.
enum Released {
    /// It has other users, or another mapping has replaced it.
    InUse,
    Parked {
        is_protected: bool,
    },
    Removed(Option<Arc<Mapped>>),
}

impl Segment {
    fn insert(&mut self, entry: &Entry, id: CacheKey) {
        self.by_age.insert(entry.parked_at, id);
        self.bytes += entry.mapped.mapped_bytes;
    }

    fn remove(&mut self, entry: &Entry) {
        if self.by_age.remove(&entry.parked_at).is_some() {
            self.bytes -= entry.mapped.mapped_bytes;
        }
    }

    fn oldest(&self) -> Option<CacheKey> {
        self.by_age.first_key_value().map(|(_, id)| *id)
    }
}

impl Shard {
    fn segment(&mut self, is_protected: bool) -> &mut Segment {
        if is_protected { &mut self.protected } else { &mut self.probation }
    }

    /// Bytes and mappings that are parked.
    fn totals(&self) -> (u64, u64) {
        let mappings = self.probation.by_age.len() + self.protected.by_age.len();
        (self.probation.bytes + self.protected.bytes, mappings as u64)
    }

    /// Evicts the mapping of a segment that was parked longest, unless it is the newcomer.
    fn evict(&mut self, of_protected: bool, newcomer: CacheKey) -> Option<Arc<Mapped>> {
        let oldest = self.segment(of_protected).oldest().filter(|&oldest| oldest != newcomer)?;
        self.remove(oldest)
    }

    /// Removes a mapping if it is still parked.
    fn remove_parked(&mut self, key: CacheKey) -> Option<Arc<Mapped>> {
        let is_parked = self.entries.get(&key).is_some_and(|entry| entry.users == 0);
        is_parked.then(|| self.remove(key)).flatten()
    }

    fn take(&mut self, id: CacheKey, len_bytes: u64) -> Option<Arc<Mapped>> {
        let entry = self.entries.get_mut(&id)?;
        if entry.mapped.mapped_bytes < len_bytes || !entry.mapped.is_sound() {
            return None;
        }
        entry.users += 1;
        let mapped = entry.mapped.clone();
        if entry.users == 1 {
            let segment =
                if entry.is_protected { &mut self.protected } else { &mut self.probation };
            segment.remove(entry);
            entry.is_protected = true;
        }
        Some(mapped)
    }

    fn remove(&mut self, id: CacheKey) -> Option<Arc<Mapped>> {
        let entry = self.entries.remove(&id)?;
        if entry.users == 0 {
            self.segment(entry.is_protected).remove(&entry);
        }
        Some(entry.mapped)
    }

    fn release(&mut self, key: CacheKey, mapped: &Arc<Mapped>, share: Limits) -> Released {
        let Some(entry) = self.entries.get_mut(&key) else { return Released::InUse };
        if !Arc::ptr_eq(&entry.mapped, mapped) {
            return Released::InUse;
        }
        entry.users -= 1;
        if entry.users > 0 {
            return Released::InUse;
        }
        if !mapped.may_park.load(Ordering::Relaxed) || !mapped.is_sound() {
            // It is in no segment.
            return Released::Removed(self.entries.remove(&key).map(|entry| entry.mapped));
        }
        mapped.close_file();
        self.clock += 1;
        entry.parked_at = self.clock;
        let is_protected = entry.is_protected;
        let segment = if is_protected { &mut self.protected } else { &mut self.probation };
        segment.insert(entry, key);
        self.demote(share);
        Released::Parked { is_protected }
    }

    /// Moves protected mappings beyond the shard's share back to probation.
    fn demote(&mut self, share: Limits) {
        while self.protected.bytes > share.bytes
            || self.protected.by_age.len() as u64 > share.mappings
        {
            let Some(id) = self.protected.oldest() else { return };
            let entry = self.entries.get_mut(&id).expect("a parked mapping has an entry");
            self.protected.remove(entry);
            entry.is_protected = false;
            self.clock += 1;
            entry.parked_at = self.clock;
            self.probation.insert(entry, id);
        }
    }
}
