//! The mapping cache: mappings by file, in use or parked.
//!
//! Closing the last view of a file parks its mapping: addresses, page tables and all. Mapping the file again takes one
//! system call that asks where the path leads to, and a look-up.
//!
//! # What stays
//! Parked mappings are kept up to a number of bytes (the length of what is mapped; most of it is page cache, which stays
//! the kernel's) and of mappings (a process has 65,530). They leave in the order of a segmented LRU (Karedla et al., 1994):
//! a mapping that was used once is on *probation*, one that was taken from there is *protected*; what is on probation
//! goes first. So reading through more files than fit does not drive out those that are used again.
//!
//! Nor does reading through them again and again, where the order of use would keep exactly those that come last: of
//! 50,000 files with room for 16,000, none was found. So there are two ways to treat a newcomer that has to drive out
//! another: let it, or let it go itself but for one in 32 (bimodal insertion; Qureshi et al., ISCA 2007, whose set dueling
//! chooses here, too): one shard always does the first, one the second, and the others what has fewer misses lately.
//!
//! # Shards
//! The table is cut into shards by file, each with a lock of its own. The limits are of all together, so that one file may
//! take nearly all of the cache. What leaves is the oldest of the shard that has the most, which keeps shards about equal.
//! It is unmapped after the lock is released; no two locks are held at once.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer_sys::residency::FileIdentity;

use super::identity::CacheKey;
use super::mapped::Mapped;

const SHARDS: usize = 16;
/// Of the bytes of a shard, those for mappings that were used again, in percent.
const PROTECTED_PERCENT: u64 = 80;
/// The shard in which a newcomer always drives out another, and the one in which it seldom does.
const LETTING_IN: usize = 0;
const KEEPING_OUT: usize = 8;
/// Of so many newcomers one is let in where they are kept out.
const LET_IN_ONE_OF: u64 = 32;
/// How many more misses one way must have to be the worse one for certain.
const DUEL_LIMIT: i32 = 256;

/// What a mapping cache may keep.
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
    /// What is parked in all shards, and in each. Changed under the lock of the shard.
    parked: Totals,
    by_shard: [Totals; SHARDS],
    /// Misses where newcomers are let in, less those where they are kept out.
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
    /// Parked ones by when they were parked.
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
    /// Whether it was taken when it was parked.
    is_protected: bool,
    parked_at: u64,
}

/// What the cache has and did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Mappings found.
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

    /// By the file alone: `forget` finds it whoever may read it by now.
    fn number(&self, file: FileIdentity) -> usize {
        self.hash.hash_one(file) as usize % SHARDS
    }

    fn shard(&self, number: usize) -> Locked<'_> {
        let shard = self.shards[number].lock().unwrap_or_else(PoisonError::into_inner);
        Locked { before: shard.totals(), shard, parked: &self.parked, own: &self.by_shard[number] }
    }

    /// The mapping of a file, if there is one that has at least `len_bytes`. It counts as used until it is released.
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

    /// A miss in a shard that has a say in what the others do.
    fn note_miss(&self, number: usize) {
        let change = match number {
            LETTING_IN => 1,
            KEEPING_OUT => -1,
            _ => return,
        };
        // Relaxed: a tendency.
        let duel = self.duel.load(Ordering::Relaxed) + change;
        self.duel.store(duel.clamp(-DUEL_LIMIT, DUEL_LIMIT), Ordering::Relaxed);
    }

    /// Whether this newcomer goes itself where it would drive out another.
    fn is_kept_out(&self, number: usize) -> bool {
        let keeps_out = match number {
            LETTING_IN => false,
            KEEPING_OUT => true,
            _ => self.duel.load(Ordering::Relaxed) > 0,
        };
        // Relaxed: about one of so many.
        keeps_out && !self.newcomers.fetch_add(1, Ordering::Relaxed).is_multiple_of(LET_IN_ONE_OF)
    }

    /// Makes a mapping known that is in use by one. It takes the place of one that is too short.
    pub fn insert(&self, mapped: &Arc<Mapped>) {
        let Some(key) = mapped.key else { return };
        let entry = Entry { mapped: mapped.clone(), users: 1, is_protected: false, parked_at: 0 };
        let mut shard = self.shard(self.number(key.identity()));
        let before = shard.remove(key);
        shard.entries.insert(key, entry);
        drop(shard);
        drop(before);
    }

    /// One user less. The last one parks it.
    pub fn release(&self, mapped: &Arc<Mapped>) {
        let Some(key) = mapped.key else { return };
        let number = self.number(key.identity());
        let released = self.shard(number).release(key, mapped, self.part());
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
        // Relaxed: who parked something sees that itself, and others make room for theirs.
        self.parked.bytes.load(Ordering::Relaxed) > self.limits.bytes
            || self.parked.mappings.load(Ordering::Relaxed) > self.limits.mappings
    }

    /// Evicts until all is within the limits again: what is on probation, and for a newcomer that was used before what is
    /// protected; of the shard that has the most. If that is not enough, the newcomer goes.
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

    /// Of some shards the one with the most of what there is too much of.
    fn heaviest(&self, which: &[bool; SHARDS]) -> Option<usize> {
        let too_many_bytes = self.parked.bytes.load(Ordering::Relaxed) > self.limits.bytes;
        let weight = |shard: &Totals| {
            let of = if too_many_bytes { &shard.bytes } else { &shard.mappings };
            of.load(Ordering::Relaxed)
        };
        (0..SHARDS).filter(|&shard| which[shard]).max_by_key(|&shard| weight(&self.by_shard[shard]))
    }

    /// A shard's part of what may be protected.
    fn part(&self) -> Limits {
        let part = |all: u64| {
            (u128::from(all) * u128::from(PROTECTED_PERCENT) / 100 / SHARDS as u128) as u64
        };
        Limits { bytes: part(self.limits.bytes), mappings: part(self.limits.mappings) }
    }

    /// Forgets a file, whatever its owner and mode were: who uses it keeps it, and unmaps it at the end.
    pub fn forget(&self, file: FileIdentity) {
        let mut shard = self.shard(self.number(file));
        let is_it = |other: &&CacheKey| other.identity() == file;
        let found: Vec<CacheKey> = shard.entries.keys().filter(is_it).copied().collect();
        let removed: Vec<_> = found.into_iter().filter_map(|key| shard.remove(key)).collect();
        drop(shard);
        drop(removed);
    }

    /// Forgets every parked mapping; says how many there were.
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

/// A shard under its lock. What changes in it changes the totals.
struct Locked<'a> {
    shard: MutexGuard<'a, Shard>,
    /// Bytes and mappings that were parked.
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
        // Relaxed: numbers, which guard nothing. Wrapping: the difference may be negative.
        self.parked.bytes.fetch_add(bytes.wrapping_sub(self.before.0), Ordering::Relaxed);
        self.parked.mappings.fetch_add(mappings.wrapping_sub(self.before.1), Ordering::Relaxed);
        self.own.bytes.store(bytes, Ordering::Relaxed);
        self.own.mappings.store(mappings, Ordering::Relaxed);
    }
}

/// What has become of a mapping that one user less has.
enum Released {
    /// Others use it, or another one has taken its place.
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

    /// The one parked longest in one of the segments, but not the one that came last.
    fn evict(&mut self, of_protected: bool, newcomer: CacheKey) -> Option<Arc<Mapped>> {
        let oldest = self.segment(of_protected).oldest().filter(|&oldest| oldest != newcomer)?;
        self.remove(oldest)
    }

    /// Removes a mapping if it is parked still.
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

    fn release(&mut self, key: CacheKey, mapped: &Arc<Mapped>, part: Limits) -> Released {
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
        self.demote(part);
        Released::Parked { is_protected }
    }

    /// What is too much for the protected part is on probation again.
    fn demote(&mut self, part: Limits) {
        while self.protected.bytes > part.bytes
            || self.protected.by_age.len() as u64 > part.mappings
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
