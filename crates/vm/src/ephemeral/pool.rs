//! Slots of one size for the threads of one CPU: a list of rings of 16 MiB of addresses each.
//!
//! Taking and retiring a slot changes a few bits under the lock; every system call is made without
//! it. The thread whose retired slot reaches the threshold drains all retired slots. The timer, and
//! threads that run out of slots or VMAs, drain the rest.
//!
//! # Invariants
//! * A claimed slot belongs to the claiming thread until it is finished: [`Slots`] does not give it
//!   out.
//! * Only the holder of the lock `sweeping` claims slots. So if the holder finds a slot neither
//!   free nor retired, the slot is in use.
//! * The VMAs of a ring are taken from the budget before the mappings that need them are made.
//!
//! Lock order: `sweeping`, then `rings`.

use std::ops::Range;
use std::sync::Arc;

use super::VmaBudget;
use super::slots::{Idle, Slots};
use super::unmapping::{Left, Span, Unmapper};
use crate::sync::Mutex;

/// Slots vacated under one claim: other threads can take the rest.
const RELEASED_AT_ONCE: usize = 64;

/// See the module documentation.
pub(super) struct Pool<U: Unmapper> {
    slot_bytes: usize,
    slots_a_ring: usize,
    /// Number of retired slots that triggers draining.
    threshold: usize,
    vmas: Arc<VmaBudget>,
    unmapper: U,
    sweeping: Mutex<Scratch>,
    rings: Mutex<Rings<U::Place>>,
}

struct Rings<P> {
    rings: Vec<Ring<P>>,
    /// The ring from which slots are taken.
    current: usize,
    /// Slots taken and neither retired nor released, in all rings.
    taken: usize,
    /// Slots retired and not claimed, in all rings.
    retired: usize,
}

struct Ring<P> {
    base: usize,
    place: P,
    slots: Slots,
}

/// Buffers of a sweep.
#[derive(Default)]
struct Scratch {
    runs: Vec<Range<usize>>,
    claims: Vec<(usize, Range<usize>)>,
    spans: Vec<Span>,
    left: Vec<Left>,
}

/// A taken slot. Must not be copied: it is retired or released once.
#[derive(Debug)]
pub(super) struct Slot {
    ring: usize,
    index: usize,
}

/// Why there is no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoSlot {
    /// All slots are in use, or wait to be unmapped.
    Taken,
    /// Some slots are free, but their mappings would exceed the VMA budget.
    Vmas,
}

/// Sizes of a pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PoolStats {
    pub taken: usize,
    pub retired: usize,
    pub drained: usize,
}

impl<U: Unmapper> Pool<U> {
    /// Creates a pool without rings. `threshold` is in slots.
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

    /// Adds a ring, at addresses that hold the reservation.
    pub fn add_ring(&self, place: U::Place, base: usize) {
        let mut rings = self.rings.lock();
        rings.current = rings.rings.len();
        rings.rings.push(Ring { base, place, slots: Slots::new(self.slots_a_ring) });
    }

    /// Size of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Takes a free slot. Returns it with its address and the result of `inspect` for its place.
    pub fn take<T>(
        &self,
        inspect: impl FnOnce(&U::Place) -> T,
    ) -> Result<(Slot, usize, T), NoSlot> {
        let mut rings = self.rings.lock();
        let (ring, index) = self.choose(&rings)?;
        rings.current = ring;
        rings.taken += 1;
        let chosen = &mut rings.rings[ring];
        chosen.slots.take(index);
        let address = chosen.base + index * self.slot_bytes;
        Ok((Slot { ring, index }, address, inspect(&chosen.place)))
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

    /// Retires a slot that is no longer used. Returns whether the threshold is reached.
    pub fn retire(&self, slot: Slot) -> bool {
        let mut rings = self.rings.lock();
        rings.rings[slot.ring].slots.retire(slot.index);
        rings.taken -= 1;
        rings.retired += 1;
        rings.retired >= self.threshold
    }

    /// Releases a slot that is no longer used: unmaps it at once.
    pub fn release(&self, slot: Slot) {
        let span = self.span(&self.rings.lock().rings[slot.ring], &(slot.index..slot.index + 1));
        // SAFETY: the caller took the slot, and does not use it any more.
        let left = unsafe { self.unmapper.vacate(span) };
        let mut rings = self.rings.lock();
        rings.taken -= 1;
        self.finish(&mut rings, slot.ring, slot.index..slot.index + 1, left);
    }

    /// Drains the retired slots, unless another thread is doing so.
    pub fn drain_unless_draining(&self) {
        if let Some(mut scratch) = self.sweeping.try_lock() {
            self.drain_with(&mut scratch);
        }
    }

    /// Drains the retired slots.
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
        // SAFETY: the slots were claimed above: no thread uses them, or takes them before they are
        // finished.
        unsafe { self.unmapper.drain(spans, left) };
        let mut rings = self.rings.lock();
        for ((ring, run), &left) in claims.drain(..).zip(left.iter()) {
            self.finish(&mut rings, ring, run, left);
        }
    }

    /// Replaces everything that is not in use by the reservation: this closes the files.
    pub fn release_idle(&self) {
        let mut scratch = self.sweeping.lock();
        let (mut ring, mut from) = (0, 0);
        while let Some(next) = self.release_some(&mut scratch, ring, from) {
            (ring, from) = next;
        }
    }

    /// Releases some of them, starting at slot `from` of ring `number`. Returns where to continue.
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
            // SAFETY: the slots were claimed above: no thread uses them, or takes them before they
            // are finished.
            let left = unsafe { self.unmapper.vacate(span) };
            self.finish(&mut self.rings.lock(), number, run, left);
        }
        if next < self.slots_a_ring {
            return Some((number, next));
        }
        self.close_holes(number);
        Some((number + 1, 0))
    }

    /// Tries to recover slots that were lost at the limit of VMAs.
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

    /// The unmapper of this pool.
    pub fn unmapper(&self) -> &U {
        &self.unmapper
    }

    /// Returns the current sizes.
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
    /// No slot is in use any more: extents hold the pool.
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
