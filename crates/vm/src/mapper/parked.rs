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
//! # Shards
//! The table is cut into shards by inode, each with a lock of its own and its part of the limit: what is longer than that
//! part is never parked. What is evicted is unmapped after the lock is released.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::identity::FileId;
use super::mapped::Mapped;

const SHARDS: usize = 16;
/// Of the bytes of a shard, those for mappings that were used again, in percent.
const PROTECTED_PERCENT: u64 = 80;

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
    hits: AtomicU64,
    misses: AtomicU64,
}

#[derive(Default)]
struct Shard {
    entries: HashMap<FileId, Entry>,
    /// Parked ones by when they were parked.
    probation: Segment,
    protected: Segment,
    clock: u64,
}

#[derive(Default)]
struct Segment {
    by_age: BTreeMap<u64, FileId>,
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
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    fn shard(&self, id: FileId) -> MutexGuard<'_, Shard> {
        // By the file alone: `forget` finds it whoever may read it by now.
        let index = self.hash.hash_one(id.identity()) as usize % SHARDS;
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mapping of a file, if there is one that has at least `len_bytes`. It counts as used until it is released.
    pub fn take(&self, id: FileId, len_bytes: u64) -> Option<Arc<Mapped>> {
        let mut shard = self.shard(id);
        let found = shard.take(id, len_bytes);
        drop(shard);
        // Relaxed: statistics.
        let count = if found.is_some() { &self.hits } else { &self.misses };
        count.fetch_add(1, Ordering::Relaxed);
        found
    }

    /// Makes a mapping known that is in use by one. It takes the place of one that is too short.
    pub fn insert(&self, mapped: &Arc<Mapped>) {
        let entry = Entry { mapped: mapped.clone(), users: 1, is_protected: false, parked_at: 0 };
        let mut shard = self.shard(mapped.id);
        let before = shard.remove(mapped.id);
        shard.entries.insert(mapped.id, entry);
        drop(shard);
        drop(before);
    }

    /// One user less. The last one parks it.
    pub fn release(&self, mapped: &Arc<Mapped>) {
        let mut shard = self.shard(mapped.id);
        let evicted = shard.release(mapped, self.part());
        drop(shard);
        // Unmapped here.
        drop(evicted);
    }

    /// The limits of a shard.
    fn part(&self) -> Limits {
        let part = |all: u64| all / SHARDS as u64;
        Limits { bytes: part(self.limits.bytes), mappings: part(self.limits.mappings) }
    }

    /// Forgets a file, whatever its owner and mode were: who uses it keeps it, and unmaps it at the end.
    pub fn forget(&self, id: FileId) {
        let mut shard = self.shard(id);
        let is_it = |other: &&FileId| other.identity() == id.identity();
        let found: Vec<FileId> = shard.entries.keys().filter(is_it).copied().collect();
        let removed: Vec<_> = found.into_iter().filter_map(|id| shard.remove(id)).collect();
        drop(shard);
        drop(removed);
    }

    /// Forgets every parked mapping; says how many there were.
    pub fn forget_all(&self) -> usize {
        let mut count = 0;
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let mut removed = Vec::new();
            while let Some(id) = shard.oldest() {
                removed.extend(shard.remove(id));
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
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            stats.parked += shard.parked();
            stats.parked_bytes += shard.probation.bytes + shard.protected.bytes;
        }
        stats
    }
}

impl Segment {
    fn insert(&mut self, entry: &Entry, id: FileId) {
        self.by_age.insert(entry.parked_at, id);
        self.bytes += entry.mapped.mapped_bytes;
    }

    fn remove(&mut self, entry: &Entry) {
        if self.by_age.remove(&entry.parked_at).is_some() {
            self.bytes -= entry.mapped.mapped_bytes;
        }
    }

    fn oldest(&self) -> Option<FileId> {
        self.by_age.first_key_value().map(|(_, id)| *id)
    }
}

impl Shard {
    fn segment(&mut self, is_protected: bool) -> &mut Segment {
        if is_protected { &mut self.protected } else { &mut self.probation }
    }

    fn parked(&self) -> u64 {
        (self.probation.by_age.len() + self.protected.by_age.len()) as u64
    }

    /// The next to go.
    fn oldest(&self) -> Option<FileId> {
        self.probation.oldest().or_else(|| self.protected.oldest())
    }

    fn take(&mut self, id: FileId, len_bytes: u64) -> Option<Arc<Mapped>> {
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

    fn remove(&mut self, id: FileId) -> Option<Arc<Mapped>> {
        let entry = self.entries.remove(&id)?;
        if entry.users == 0 {
            self.segment(entry.is_protected).remove(&entry);
        }
        Some(entry.mapped)
    }

    /// What is to be unmapped because of it.
    fn release(&mut self, mapped: &Arc<Mapped>, limits: Limits) -> Vec<Arc<Mapped>> {
        let mut evicted = Vec::new();
        let Some(entry) = self.entries.get_mut(&mapped.id) else { return evicted };
        if !Arc::ptr_eq(&entry.mapped, mapped) {
            return evicted;
        }
        entry.users -= 1;
        if entry.users > 0 {
            return evicted;
        }
        let may_park = mapped.may_park.load(Ordering::Relaxed) && mapped.is_sound();
        if !may_park || mapped.mapped_bytes > limits.bytes {
            evicted.extend(self.remove_in_use(mapped.id));
            return evicted;
        }
        mapped.close_file();
        self.clock += 1;
        entry.parked_at = self.clock;
        let segment = if entry.is_protected { &mut self.protected } else { &mut self.probation };
        segment.insert(entry, mapped.id);
        self.demote(limits);
        while self.probation.bytes + self.protected.bytes > limits.bytes
            || self.parked() > limits.mappings
        {
            let Some(id) = self.oldest() else { break };
            evicted.extend(self.remove(id));
        }
        evicted
    }

    /// Removes an entry that is in no segment.
    fn remove_in_use(&mut self, id: FileId) -> Option<Arc<Mapped>> {
        self.entries.remove(&id).map(|entry| entry.mapped)
    }

    /// What is too much for the protected part is on probation again.
    fn demote(&mut self, limits: Limits) {
        let part = |all: u64| (u128::from(all) * u128::from(PROTECTED_PERCENT) / 100) as u64;
        while self.protected.bytes > part(limits.bytes)
            || self.protected.by_age.len() as u64 > part(limits.mappings)
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
