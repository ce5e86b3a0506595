//! Slots in memory that check the order of calls.

use std::collections::BTreeMap;

use crate::slot_bytes::{SLOT_BYTES, SlotBytes, to_media};
use crate::slots::{ChangeSlots, ReadSlots, StructureError};

const FIRST: u64 = 100;

/// An error of the tree or of its slots.
#[derive(Debug, thiserror::Error)]
pub(super) enum SlotError {
    #[error("no slot is free")]
    Full,
    #[error(transparent)]
    Structure(#[from] StructureError),
}

/// Slots of a tree. Using a free slot panics, unless `is_damaged`.
#[derive(Debug, Clone, Default)]
pub(super) struct Slots {
    used: BTreeMap<u64, SlotBytes>,
    /// How often a slot was put or given back.
    pub writes: usize,
    /// The tree may be damaged, so it may use free slots.
    pub is_damaged: bool,
    /// The most slots that can be taken.
    pub limit: Option<u64>,
}

impl Slots {
    pub fn used(&self) -> u64 {
        self.used.len() as u64
    }

    pub fn numbers(&self) -> Vec<u64> {
        self.used.keys().copied().collect()
    }

    fn first_free(&self) -> u64 {
        let taken = self.used.keys().zip(FIRST..).take_while(|&(&used, number)| used == number);
        FIRST + taken.count() as u64
    }
}

impl ReadSlots for Slots {
    type Error = SlotError;

    fn slot(&self, number: u64) -> Result<SlotBytes, SlotError> {
        Ok(self.used.get(&number).copied().unwrap_or([0; SLOT_BYTES]))
    }
}

impl ChangeSlots for Slots {
    fn put(&mut self, number: u64, mut bytes: SlotBytes) {
        to_media(&mut bytes);
        let is_taken = self.used.contains_key(&number) || number == self.first_free();
        assert!(is_taken || self.is_damaged, "slot {number} was not taken");
        self.used.insert(number, bytes);
        self.writes += 1;
    }

    fn take_slot(&mut self) -> Result<u64, SlotError> {
        match self.limit {
            Some(limit) if self.used() >= limit => Err(SlotError::Full),
            _ => Ok(self.first_free()),
        }
    }

    fn new_generation(&self, _: u64) -> Result<u64, SlotError> {
        unreachable!("a tree is made of parts")
    }

    fn give_back(&mut self, number: u64) -> Result<(), SlotError> {
        let was_used = self.used.remove(&number).is_some();
        assert!(was_used || self.is_damaged, "slot {number} was given back twice");
        self.writes += 1;
        Ok(())
    }
}
