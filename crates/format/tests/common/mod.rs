//! Slots in memory that check the rules of the pool, and count writes. The tests of `aquifer-fs` use
//! them as well, with the pool's errors.

#![allow(dead_code)]

use std::collections::{BTreeMap, BTreeSet};

use aquifer_format::StructureError;
use aquifer_format::inode::Inode;
use aquifer_format::slot::Slot;
use aquifer_format::slot_bytes::{self, SLOT_BYTES, SlotBytes};
use aquifer_format::slots::{ChangeSlots, ReadSlots};

/// The first slot that can be taken.
pub const FIRST_SLOT: u64 = 10;

/// The errors of slots in memory.
pub trait Errors: Clone + Default {
    /// The type.
    type Error: From<StructureError>;

    /// No slot is free.
    fn full(slots: u64) -> Self::Error;
}

/// Slots in memory.
#[derive(Debug, Clone)]
pub struct SlotMap<E> {
    slots: BTreeMap<u64, SlotBytes>,
    /// How many slots can be taken.
    pub limit: usize,
    /// Slots put since this was reset.
    pub puts: usize,
    /// Slots given back.
    pub given_back: usize,
    /// Whether the caller must not put a slot that is unchanged or cannot be decoded.
    pub is_strict: bool,
    errors: E,
}

impl<E: Errors> Default for SlotMap<E> {
    fn default() -> SlotMap<E> {
        SlotMap {
            slots: BTreeMap::new(),
            limit: 1 << 20,
            puts: 0,
            given_back: 0,
            is_strict: true,
            errors: E::default(),
        }
    }
}

impl<E: Errors> SlotMap<E> {
    pub fn used(&self) -> BTreeSet<u64> {
        self.slots.keys().copied().filter(|number| !self.is_free(*number)).collect()
    }

    fn is_free(&self, number: u64) -> bool {
        match self.slots.get(&number) {
            None => true,
            Some(bytes) => matches!(Slot::decode(bytes, number), Ok(Slot::Free(_))),
        }
    }

    /// Changes bytes of a used slot; fixes its checksum if `is_sealed`.
    pub fn damage(&mut self, number: u64, offset: usize, bytes: &[u8], is_sealed: bool) {
        let slot = self.slots.get_mut(&number).expect("a used slot");
        slot[offset..offset + bytes.len()].copy_from_slice(bytes);
        if is_sealed {
            slot_bytes::seal(slot);
        }
    }

    /// Resets the counters.
    pub fn count_anew(&mut self) {
        (self.puts, self.given_back) = (0, 0);
    }
}

impl<E: Errors> ReadSlots for SlotMap<E> {
    type Error = E::Error;

    fn slot(&self, number: u64) -> Result<SlotBytes, E::Error> {
        Ok(self.slots.get(&number).copied().unwrap_or([0; SLOT_BYTES]))
    }
}

impl<E: Errors> ChangeSlots for SlotMap<E> {
    fn put(&mut self, number: u64, bytes: SlotBytes) {
        if self.is_strict {
            Slot::decode(&bytes, number).expect("a slot that can be read");
            assert_ne!(self.slots.get(&number), Some(&bytes), "slot {number} is put unchanged");
        }
        self.puts += 1;
        self.slots.insert(number, bytes);
    }

    fn take_slot(&mut self) -> Result<u64, E::Error> {
        let slots = FIRST_SLOT..FIRST_SLOT + self.limit as u64;
        // The same slot again until something is put there.
        (slots.into_iter().find(|number| !self.slots.contains_key(number)))
            .or_else(|| self.slots.keys().copied().find(|number| self.is_free(*number)))
            .ok_or_else(|| E::full(self.limit as u64))
    }

    fn new_generation(&self, _: u64) -> Result<u64, E::Error> {
        unreachable!("a chain or a table is made of parts")
    }

    fn give_back(&mut self, number: u64) -> Result<(), E::Error> {
        assert!(!self.is_free(number), "slot {number} is given back and is free");
        self.given_back += 1;
        self.slots.insert(number, Inode::free(number, 1).encode().expect("a free inode"));
        Ok(())
    }
}
