//! A hash map in an object.
//!
//! One table of slots with open addressing and linear probing: hash, key and value are side by
//! side, so that an insertion or a removal dirties the page of the entry and rarely another. A
//! removal moves later entries of the chain up instead of leaving a tombstone. The stored hash also
//! makes growing cheap: no key is read.
//!
//! An empty map has no table, because there is no static table to point to. A new table is zeroed,
//! but only pages that are not already zero are stored to: in a fresh object a large table dirties
//! pages only as it fills.
//!
//! # Invariants
//! * A slot whose hash is 0 is empty; in others [`OCCUPIED`] is set.
//! * There is no empty slot between the slot that an entry's hash selects and the slot it is in.
//! * At least an eighth of the slots are empty. The number of slots is a power of two.

use std::borrow::Borrow;
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use super::place::{Place, array_layout, free};
use super::stable_hash::StableHash;
use crate::heap::recorded::note;
use crate::heap::{HeapError, HeapRef};
use crate::persist::{Persist, Shape};

const OCCUPIED: u64 = 1 << 63;
const LEAST_SLOTS: u64 = 8;

#[repr(C)]
struct Slot<K, V> {
    hash: u64,
    key: MaybeUninit<K>,
    value: MaybeUninit<V>,
}

/// A hash map in the heap with the lifetime `'h`, like `HashMap`, over [`StableHash`].
#[repr(C)]
pub struct PHashMap<'h, K: Persist<'h>, V: Persist<'h>> {
    place: Place<'h>,
    len: u64,
    /// Zero while there is no table.
    slots: u64,
    entries: PhantomData<(K, V)>,
}

// SAFETY: `repr(C)`: two numbers and the address of a table in the heap `'h`, itself of `repr(C)`
// slots.
unsafe impl<'h, K: Persist<'h>, V: Persist<'h>> Persist<'h> for PHashMap<'h, K, V> {
    fn shape(shape: &mut Shape) {
        shape.own_parts::<Self>("hash map", |shape| {
            K::shape(shape);
            V::shape(shape);
        });
    }
}

impl<'h, K: Persist<'h>, V: Persist<'h>> PHashMap<'h, K, V> {
    /// An empty map, without memory.
    pub fn new_in(heap: HeapRef<'h>) -> PHashMap<'h, K, V> {
        PHashMap { place: Place::none(heap), len: 0, slots: 0, entries: PhantomData }
    }

    /// An empty map with room for `capacity` entries.
    ///
    /// # Errors
    /// Those of [`ObjectHeap::alloc`](crate::heap::ObjectHeap::alloc).
    pub fn with_capacity_in(
        capacity: usize,
        heap: HeapRef<'h>,
    ) -> Result<PHashMap<'h, K, V>, HeapError> {
        let mut map = PHashMap::new_in(heap);
        map.reserve(capacity)?;
        Ok(map)
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Entries that fit without allocating.
    pub fn capacity(&self) -> usize {
        (self.slots - self.slots / 8) as usize
    }

    /// Makes room for `additional` more entries.
    ///
    /// # Errors
    /// [`HeapError::Full`].
    pub fn reserve(&mut self, additional: usize) -> Result<(), HeapError> {
        let needed = self.len.saturating_add(additional as u64);
        if needed <= self.capacity() as u64 {
            return Ok(());
        }
        let heap = self.place.heap();
        // Keep an eighth of the slots empty.
        let slots = needed.checked_add(needed.div_ceil(7)).and_then(u64::checked_next_power_of_two);
        let slots = slots.ok_or_else(|| heap.full(u64::MAX))?.max(LEAST_SLOTS);
        let layout = array_layout::<Slot<K, V>>(&heap, slots as usize)?;
        let table = heap.allocate_zeroed(layout)?.cast::<Slot<K, V>>();
        for index in 0..self.slots {
            let old = self.slot(index);
            if self.hash_at(index) == 0 {
                continue;
            }
            let mut target = self.hash_at(index) & (slots - 1);
            // SAFETY: the index is masked, so it is in the new table. The loop ends: an eighth of
            // the slots stay empty.
            while unsafe { table.add(target as usize).as_ref() }.hash != 0 {
                target = (target + 1) & (slots - 1);
            }
            // SAFETY: as above.
            let target = unsafe { table.add(target as usize) };
            note(target, 1);
            // SAFETY: as above; the new table owns the entry from now on.
            unsafe { old.copy_to_nonoverlapping(target, 1) };
        }
        let old = (self.slots > 0).then(|| self.place.pointer::<u8>());
        self.place.set(table.cast());
        self.slots = slots;
        if let Some(old) = old {
            // SAFETY: the entries were moved to the new table.
            unsafe { free(&heap, old) };
        }
        Ok(())
    }

    fn slot(&self, index: u64) -> NonNull<Slot<K, V>> {
        debug_assert!(index < self.slots);
        // SAFETY: the table has `slots` slots, and `index` is below that.
        unsafe { self.place.pointer::<Slot<K, V>>().add(index as usize) }
    }

    fn hash_at(&self, index: u64) -> u64 {
        // SAFETY: a slot, whose hash is always initialized.
        unsafe { (&raw const (*self.slot(index).as_ptr()).hash).read() }
    }

    fn key_at(&self, index: u64) -> NonNull<K> {
        // SAFETY: a slot; only its address is taken.
        let key = unsafe { &raw mut (*self.slot(index).as_ptr()).key };
        NonNull::new(key.cast()).expect("a table is not at zero")
    }

    fn value_at(&self, index: u64) -> NonNull<V> {
        // SAFETY: a slot; only its address is taken.
        let value = unsafe { &raw mut (*self.slot(index).as_ptr()).value };
        NonNull::new(value.cast()).expect("a table is not at zero")
    }

    fn next(&self, index: u64) -> u64 {
        (index + 1) & (self.slots - 1)
    }

    fn find<Q: StableHash + Eq + ?Sized>(&self, key: &Q) -> Option<u64>
    where
        K: Borrow<Q>,
    {
        if self.len == 0 {
            return None;
        }
        let hash = key.stable_hash() | OCCUPIED;
        let mut index = hash & (self.slots - 1);
        loop {
            let found = self.hash_at(index);
            if found == 0 {
                return None;
            }
            // SAFETY: an occupied slot has a key.
            if found == hash && unsafe { self.key_at(index).as_ref() }.borrow() == key {
                return Some(index);
            }
            index = self.next(index);
        }
    }

    /// The value of a key.
    pub fn get<Q: StableHash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        // SAFETY: an occupied slot has a value.
        self.find(key).map(|index| unsafe { self.value_at(index).as_ref() })
    }

    /// The value of a key, mutably.
    pub fn get_mut<Q: StableHash + Eq + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let mut value = self.value_at(self.find(key)?);
        note(value, 1);
        // SAFETY: an occupied slot has a value, and the map is borrowed mutably.
        Some(unsafe { value.as_mut() })
    }

    /// Whether the key has a value.
    pub fn contains_key<Q: StableHash + Eq + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.find(key).is_some()
    }

    /// Sets the value of a key; returns the previous one. An existing key is kept.
    ///
    /// # Errors
    /// [`HeapError::Full`]; key and value are dropped then.
    pub fn insert(&mut self, key: K, value: V) -> Result<Option<V>, HeapError>
    where
        K: StableHash + Eq,
    {
        if let Some(old) = self.get_mut(&key) {
            return Ok(Some(std::mem::replace(old, value)));
        }
        if self.len() == self.capacity() {
            self.reserve(1)?;
        }
        let hash = key.stable_hash() | OCCUPIED;
        let mut index = hash & (self.slots - 1);
        while self.hash_at(index) != 0 {
            index = self.next(index);
        }
        let slot = Slot { hash, key: MaybeUninit::new(key), value: MaybeUninit::new(value) };
        note(self.slot(index), 1);
        // SAFETY: an empty slot.
        unsafe { self.slot(index).write(slot) };
        self.len += 1;
        Ok(None)
    }

    /// Removes a key; returns its value, if it was present.
    pub fn remove<Q: StableHash + Eq + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.remove_entry(key).map(|(_, value)| value)
    }

    /// Removes a key; returns the key and its value, if it was present.
    pub fn remove_entry<Q: StableHash + Eq + ?Sized>(&mut self, key: &Q) -> Option<(K, V)>
    where
        K: Borrow<Q>,
    {
        let index = self.find(key)?;
        Some(self.take(index))
    }

    /// Removes the entry from a slot, and moves up later entries of its chain.
    fn take(&mut self, index: u64) -> (K, V) {
        // SAFETY: an occupied slot has a key, which is overwritten or forgotten below.
        let key = unsafe { self.key_at(index).read() };
        // SAFETY: as above.
        let value = unsafe { self.value_at(index).read() };
        let (mut hole, mut at) = (index, self.next(index));
        while self.hash_at(at) != 0 {
            // Distances from a slot to `at`. The entry may move to the hole unless the hole is
            // before its preferred slot.
            let distance = |from: u64| at.wrapping_sub(from) & (self.slots - 1);
            if distance(self.hash_at(at)) >= distance(hole) {
                note(self.slot(hole), 1);
                // SAFETY: two different slots; the entry in the hole was moved out.
                unsafe { self.slot(at).copy_to_nonoverlapping(self.slot(hole), 1) };
                hole = at;
            }
            at = self.next(at);
        }
        self.set_empty(hole);
        self.len -= 1;
        (key, value)
    }

    fn set_empty(&mut self, index: u64) {
        note(self.slot(index), 1);
        // SAFETY: a slot whose entry was moved out.
        unsafe { (&raw mut (*self.slot(index).as_ptr()).hash).write(0) };
    }

    /// Drops all entries; keeps the table.
    pub fn clear(&mut self) {
        for index in 0..self.slots {
            if self.hash_at(index) != 0 {
                // Clear the hash first, so that an entry whose drop panics is not dropped again.
                // This notes the whole slot, which the drops may store to.
                self.set_empty(index);
                self.len -= 1;
                // SAFETY: the slot was occupied and is marked empty, so this is its only drop.
                unsafe { self.key_at(index).drop_in_place() };
                // SAFETY: as above.
                unsafe { self.value_at(index).drop_in_place() };
            }
        }
    }

    /// The entries, in no particular order.
    pub fn iter(&self) -> Iter<'_, 'h, K, V> {
        Iter { map: self, index: 0 }
    }

    /// The entries with mutable values, in no particular order.
    pub fn iter_mut(&mut self) -> IterMut<'_, 'h, K, V> {
        IterMut { index: 0, map: NonNull::from(self), borrow: PhantomData }
    }

    /// The first occupied slot from `index` on.
    fn occupied(&self, index: u64) -> Option<u64> {
        (index..self.slots).find(|&index| self.hash_at(index) != 0)
    }
}

impl<'h, K: Persist<'h>, V: Persist<'h>> Drop for PHashMap<'h, K, V> {
    fn drop(&mut self) {
        if self.place.is_parents() {
            return;
        }
        self.clear();
        if self.slots > 0 {
            // SAFETY: the map has a table, which contains no entry any more.
            unsafe { self.place.free() };
        }
    }
}

/// The entries of a [`PHashMap`].
pub struct Iter<'a, 'h, K: Persist<'h>, V: Persist<'h>> {
    map: &'a PHashMap<'h, K, V>,
    index: u64,
}

impl<'a, 'h, K: Persist<'h>, V: Persist<'h>> Iterator for Iter<'a, 'h, K, V> {
    type Item = (&'a K, &'a V);
    fn next(&mut self) -> Option<Self::Item> {
        let map = self.map;
        let Some(index) = map.occupied(self.index) else {
            self.index = map.slots;
            return None;
        };
        self.index = index + 1;
        // SAFETY: an occupied slot has a key.
        let key = unsafe { map.key_at(index).as_ref() };
        // SAFETY: it also has a value.
        Some((key, unsafe { map.value_at(index).as_ref() }))
    }
}

/// The entries of a [`PHashMap`], with mutable values.
pub struct IterMut<'a, 'h, K: Persist<'h>, V: Persist<'h>> {
    map: NonNull<PHashMap<'h, K, V>>,
    index: u64,
    borrow: PhantomData<&'a mut PHashMap<'h, K, V>>,
}

impl<'a, 'h, K: Persist<'h>, V: Persist<'h>> Iterator for IterMut<'a, 'h, K, V> {
    type Item = (&'a K, &'a mut V);
    fn next(&mut self) -> Option<Self::Item> {
        // SAFETY: this iterator borrows the map mutably; values already lent are in the table, not
        // in the map struct.
        let map = unsafe { self.map.as_ref() };
        let Some(index) = map.occupied(self.index) else {
            self.index = map.slots;
            return None;
        };
        self.index = index + 1;
        // SAFETY: an occupied slot has a key.
        let key = unsafe { map.key_at(index).as_ref() };
        let mut value = map.value_at(index);
        note(value, 1);
        // SAFETY: it also has a value, which is lent once.
        Some((key, unsafe { value.as_mut() }))
    }
}

impl<'a, 'h, K: Persist<'h>, V: Persist<'h>> IntoIterator for &'a PHashMap<'h, K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Iter<'a, 'h, K, V>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a, 'h, K: Persist<'h>, V: Persist<'h>> IntoIterator for &'a mut PHashMap<'h, K, V> {
    type Item = (&'a K, &'a mut V);
    type IntoIter = IterMut<'a, 'h, K, V>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}

impl<'h, K: Persist<'h> + fmt::Debug, V: Persist<'h> + fmt::Debug> fmt::Debug
    for PHashMap<'h, K, V>
{
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_map().entries(self).finish()
    }
}
