//! Slots of one size for the threads of one CPU: a list of rings, each 16 MiB of addresses.
//!
//! Taking and retiring a slot changes a few bits under the lock; every system call is made without it. Whoever retires
//! the slot with which enough came together drains them all; the timer and whoever is short of slots or of VMAs does it
//! with the rest.
//!
//! # Invariants
//! * A slot that is claimed is nobody else's until it is finished: [`Slots`] gives it to no other.
//! * Only who has the lock `sweeping` claims slots. So who has it, and finds a slot neither free nor retired, knows
//!   that it is in use.
//! * The VMAs of a ring were taken from the budget before the mapping that needs them is made.
//!
//! Lock order: `sweeping`, then `rings`.

use std::ops::Range;
use std::sync::Arc;

use super::VmaBudget;
use super::slots::{Idle, Slots};
use super::unmapping::{Left, Span, Unmapper};
use crate::sync::Mutex;

/// Slots that are vacated under one claim: others can take the rest meanwhile.
const RELEASED_AT_ONCE: usize = 64;

/// See the module documentation.
pub(super) struct Pool<U: Unmapper> {
    slot_bytes: usize,
    slots_a_ring: usize,
    /// So many retired slots are drained together.
    threshold: usize,
    vmas: Arc<VmaBudget>,
    unmapper: U,
    sweeping: Mutex<Scratch>,
    rings: Mutex<Rings<U::Place>>,
}

struct Rings<P> {
    rings: Vec<Ring<P>>,
    /// The one slots are taken from.
    current: usize,
    /// Taken and neither retired nor released, in all rings.
    taken: usize,
    /// Retired and not claimed, in all rings.
    retired: usize,
}

struct Ring<P> {
    base: usize,
    place: P,
    slots: Slots,
}

/// What a sweep works with.
#[derive(Default)]
struct Scratch {
    runs: Vec<Range<usize>>,
    claims: Vec<(usize, Range<usize>)>,
    spans: Vec<Span>,
    left: Vec<Left>,
}

/// A slot that was taken. Not to be copied: it is retired or released once.
#[derive(Debug)]
pub(super) struct Slot {
    ring: usize,
    index: usize,
}

/// Why there is no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoSlot {
    /// All are in use, or wait to be unmapped.
    Taken,
    /// Some are free, but their mappings would be too many.
    Vmas,
}

/// What a pool has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PoolStats {
    pub taken: usize,
    pub retired: usize,
    pub drained: usize,
}

impl<U: Unmapper> Pool<U> {
    /// Without rings. `threshold` is in slots.
    pub fn new(
        slot_bytes: usize,
        slots_a_ring: usize,
        threshold: usize,
        vmas: Arc<VmaBudget>,
        unmapper: U,
    ) -> Pool<U> {
        let rings = Rings { rings: Vec::new(), current: 0, taken: 0, retired: 0 };
        Pool {
            slot_bytes,
            slots_a_ring,
            threshold,
            vmas,
            unmapper,
            sweeping: Mutex::new(Scratch::default()),
            rings: Mutex::new(rings),
        }
    }

    /// One more ring, in addresses that are the reservation's.
    pub fn add_ring(&self, place: U::Place, base: usize) {
        let mut rings = self.rings.lock();
        rings.current = rings.rings.len();
        rings.rings.push(Ring { base, place, slots: Slots::new(self.slots_a_ring) });
    }

    /// Bytes of each slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// A free slot with its address, and what `look` sees of its place.
    pub fn take<T>(&self, look: impl FnOnce(&U::Place) -> T) -> Result<(Slot, usize, T), NoSlot> {
        let mut rings = self.rings.lock();
        let (ring, index) = self.choose(&rings)?;
        rings.current = ring;
        rings.taken += 1;
        let chosen = &mut rings.rings[ring];
        chosen.slots.take(index);
        let address = chosen.base + index * self.slot_bytes;
        Ok((Slot { ring, index }, address, look(&chosen.place)))
    }

    fn choose(&self, rings: &Rings<U::Place>) -> Result<(usize, usize), NoSlot> {
        let mut refused = NoSlot::Taken;
        let count = rings.rings.len();
        for ring in (0..count).map(|step| (rings.current + step) % count) {
            let slots = &rings.rings[ring].slots;
            let Some(slot) = slots.next() else { continue };
            if slots.holds(slot) || self.vmas.try_take(slots.vmas_with_one_more() - slots.vmas()) {
                return Ok((ring, slot));
            }
            refused = NoSlot::Vmas;
            if let Some(drained) = slots.next_drained() {
                return Ok((ring, drained));
            }
        }
        Err(refused)
    }

    /// Nobody uses the slot any more. Says whether enough came together to be drained.
    pub fn retire(&self, slot: Slot) -> bool {
        let mut rings = self.rings.lock();
        rings.rings[slot.ring].slots.retire(slot.index);
        rings.taken -= 1;
        rings.retired += 1;
        rings.retired >= self.threshold
    }

    /// Nobody uses the slot any more: unmaps it at once.
    pub fn release(&self, slot: Slot) {
        let span = self.span(&self.rings.lock().rings[slot.ring], &(slot.index..slot.index + 1));
        // SAFETY: the caller took the slot, and has no more use for it.
        let left = unsafe { self.unmapper.vacate(span) };
        let mut rings = self.rings.lock();
        rings.taken -= 1;
        self.finish(&mut rings, slot.ring, slot.index..slot.index + 1, left);
    }

    /// Drains what was retired, unless another thread is at it.
    pub fn drain_if_nobody_does(&self) {
        if let Some(mut scratch) = self.sweeping.try_lock() {
            self.drain_with(&mut scratch);
        }
    }

    /// Drains what was retired.
    pub fn drain(&self) {
        self.drain_with(&mut self.sweeping.lock());
    }

    fn drain_with(&self, scratch: &mut Scratch) {
        let Scratch { runs, claims, spans, left } = scratch;
        spans.clear();
        left.clear();
        let mut rings = self.rings.lock();
        for (number, ring) in rings.rings.iter_mut().enumerate() {
            ring.slots.claim(Idle::Retired, 0, usize::MAX, runs);
            spans.extend(runs.iter().map(|run| self.span(ring, run)));
            claims.extend(runs.drain(..).map(|run| (number, run)));
        }
        rings.retired = 0;
        drop(rings);
        // SAFETY: the slots were claimed here: nobody uses them, or takes them before they are finished.
        unsafe { self.unmapper.drain(spans, left) };
        let mut rings = self.rings.lock();
        for ((ring, run), &left) in claims.drain(..).zip(left.iter()) {
            self.finish(&mut rings, ring, run, left);
        }
    }

    /// Puts the reservation in the place of everything that is not in use: the files are let go.
    pub fn release_idle(&self) {
        let mut scratch = self.sweeping.lock();
        let (mut ring, mut from) = (0, 0);
        while let Some(next) = self.release_some(&mut scratch, ring, from) {
            (ring, from) = next;
        }
    }

    /// Some of them, from a slot on. Says where to go on.
    fn release_some(
        &self,
        scratch: &mut Scratch,
        number: usize,
        from: usize,
    ) -> Option<(usize, usize)> {
        let mut rings = self.rings.lock();
        if number == rings.rings.len() {
            return None;
        }
        let free = rings.rings[number].slots.free_count();
        let next =
            rings.rings[number].slots.claim(Idle::Any, from, RELEASED_AT_ONCE, &mut scratch.runs);
        let claimed: usize = scratch.runs.iter().map(ExactSizeIterator::len).sum();
        let drained = free - rings.rings[number].slots.free_count();
        rings.retired -= claimed - drained;
        let base = rings.rings[number].base;
        drop(rings);
        for run in scratch.runs.drain(..) {
            let span = self.span_at(base, &run);
            // SAFETY: the slots were claimed here: nobody uses them, or takes them before they are finished.
            let left = unsafe { self.unmapper.vacate(span) };
            self.finish(&mut self.rings.lock(), number, run, left);
        }
        if next < self.slots_a_ring {
            return Some((number, next));
        }
        self.close_holes(number);
        Some((number + 1, 0))
    }

    /// Tries to get back what was lost at the limit of VMAs.
    fn close_holes(&self, number: usize) {
        let mut from = 0;
        loop {
            let rings = self.rings.lock();
            let Some(hole) = rings.rings[number].slots.next_hole(from) else { return };
            let span = self.span(&rings.rings[number], &(hole..hole + 1));
            drop(rings);
            if self.unmapper.close_hole(span) {
                self.rings.lock().rings[number].slots.close_hole(hole);
            }
            from = hole + 1;
        }
    }

    fn finish(&self, rings: &mut Rings<U::Place>, number: usize, run: Range<usize>, left: Left) {
        if left == Left::Stuck {
            rings.retired += run.len();
        }
        let slots = &mut rings.rings[number].slots;
        let before = slots.vmas();
        slots.finish(run, left);
        let fewer = before - slots.vmas();
        if fewer > 0 {
            self.vmas.give_back(fewer);
        }
    }

    fn span(&self, ring: &Ring<U::Place>, run: &Range<usize>) -> Span {
        self.span_at(ring.base, run)
    }

    fn span_at(&self, base: usize, run: &Range<usize>) -> Span {
        Span { address: base + run.start * self.slot_bytes, len_bytes: run.len() * self.slot_bytes }
    }

    #[cfg(all(test, not(loom)))]
    pub fn lock_for_test(&self) -> impl Sized + '_ {
        (self.sweeping.lock(), self.rings.lock())
    }

    /// How it takes mappings away.
    pub fn unmapper(&self) -> &U {
        &self.unmapper
    }

    /// What it has.
    pub fn stats(&self) -> PoolStats {
        let rings = self.rings.lock();
        PoolStats {
            taken: rings.taken,
            retired: rings.retired,
            drained: rings.rings.iter().map(|ring| ring.slots.drained_count()).sum(),
        }
    }
}

impl<U: Unmapper> Drop for Pool<U> {
    /// Nobody has a slot any more.
    fn drop(&mut self) {
        if !self.unmapper.is_current() {
            return;
        }
        self.release_idle();
        for ring in &self.rings.lock().rings {
            if ring.slots.has_holes() || ring.slots.vmas() > 0 {
                self.unmapper.abandon(&ring.place);
            }
        }
    }
}
