//! A cache of bounded size that is still warm after a restart: a map from keys to entries, with the
//! entries linked in order of last use. Links are indices, so it needs no `unsafe`.

use aquifer_object::collections::{PHashMap, PString, PVec};
use aquifer_object::heap::{HeapError, HeapRef};
use aquifer_object::persist;

/// No entry.
const NONE: u32 = u32::MAX;

persist! {
    struct Entry<'h> {
        key: u64,
        value: PString<'h>,
        newer: u32,
        older: u32,
    }
}

persist! {
    /// Texts by number; inserting into a full cache evicts the least recently used.
    pub struct LruCache<'h> {
        entries: PVec<'h, Entry<'h>>,
        by_key: PHashMap<'h, u64, u32>,
        capacity: u32,
        newest: u32,
        oldest: u32,
    }
}

impl<'h> LruCache<'h> {
    /// An empty cache for `capacity` entries, at least one.
    pub fn new_in(capacity: u32, heap: HeapRef<'h>) -> LruCache<'h> {
        LruCache {
            entries: PVec::new_in(heap),
            by_key: PHashMap::new_in(heap),
            capacity: capacity.max(1),
            newest: NONE,
            oldest: NONE,
        }
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The text of a key, which becomes the most recently used.
    pub fn get(&mut self, key: u64) -> Option<&str> {
        let index = *self.by_key.get(&key)?;
        self.unlink(index);
        self.link_newest(index);
        Some(&self.entries[index as usize].value)
    }

    /// Sets the text of a key; returns the evicted key, if any.
    pub fn insert(&mut self, key: u64, value: PString<'h>) -> Result<Option<u64>, HeapError> {
        if let Some(&index) = self.by_key.get(&key) {
            self.entries[index as usize].value = value;
            self.unlink(index);
            self.link_newest(index);
            return Ok(None);
        }
        // Fallible steps first: an object can be full.
        self.by_key.reserve(1)?;
        let mut evicted = None;
        let index = if self.len() < self.capacity as usize {
            self.entries.push(Entry { key, value, newer: NONE, older: NONE })?;
            self.len() as u32 - 1
        } else {
            let index = self.oldest;
            self.unlink(index);
            let entry = &mut self.entries[index as usize];
            evicted = Some(entry.key);
            self.by_key.remove(&entry.key);
            (entry.key, entry.value) = (key, value);
            index
        };
        self.link_newest(index);
        self.by_key.insert(key, index)?;
        Ok(evicted)
    }

    fn unlink(&mut self, index: u32) {
        let Entry { newer, older, .. } = self.entries[index as usize];
        match self.entries.get_mut(newer as usize) {
            Some(entry) => entry.older = older,
            None => self.newest = older,
        }
        match self.entries.get_mut(older as usize) {
            Some(entry) => entry.newer = newer,
            None => self.oldest = newer,
        }
    }

    fn link_newest(&mut self, index: u32) {
        let second = std::mem::replace(&mut self.newest, index);
        match self.entries.get_mut(second as usize) {
            Some(entry) => entry.newer = index,
            None => self.oldest = index,
        }
        let entry = &mut self.entries[index as usize];
        (entry.newer, entry.older) = (NONE, second);
    }
}
