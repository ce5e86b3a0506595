//! Tracks what is durable on the media, and what may be: the fault model as code.
//!
//! A recording is replayed event by event. Every unit (a sector, or 8 bytes) has one *durable*
//! version and the *open* versions written after it, oldest first:
//!
//! ```text
//!            durable      open versions, each the whole unit as it was visible after a write
//!  unit 16:  [ v0 ]       [ op 3 ] [ op 7 ]          a crash leaves v0, or op 3's, or op 7's
//!  unit 17:  [ op 4 ]                                a crash leaves op 4's
//! ```
//!
//! Events do two things to a unit: a `Write` appends a version, and an event that makes bytes
//! durable *raises* it, which drops the versions before. Nothing else happens, and units never
//! influence one another.
//!
//! # Invariants
//! * `durable` holds each unit's durable version, `visible` its newest one.
//! * A unit is in `units` if and only if it has an open version; its versions' events ascend.
//! * `durable_hash` is the hash of `durable` relative to the initial image: the sum over all units
//!   of (hash of its bytes − hash of its initial bytes). Sums are independent of order, so the hash
//!   of any crash state follows from the units in which it differs.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use aquifer_pool::media::{ByteRange, MediaOperation};
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::recording::{Event, Recording};

/// The granularity of the length of a file that is being grown.
const BLOCK_BYTES: u64 = 4096;

/// One possible content of a unit.
#[derive(Debug, Clone, Copy)]
pub(super) struct Version {
    /// The event that wrote it.
    pub at: usize,
    /// The operation that wrote it.
    pub op: usize,
    /// Hash of the unit's number and content.
    pub hash: u128,
    /// Start of the content in the arena.
    pub content: usize,
}

/// A unit with open versions.
#[derive(Debug)]
pub(super) struct Unit {
    pub durable_hash: u128,
    pub versions: Vec<Version>,
    /// A write-back or flush that covered the versions up to this event has failed: the kernel may
    /// have marked them clean, so no later one makes them durable.
    poisoned_upto: Option<usize>,
}

/// A `write_back` that has not been flushed yet.
#[derive(Debug)]
struct HandOver {
    op: usize,
    begun_at: usize,
    /// None until it has returned.
    returned_at: Option<usize>,
}

/// The state of the media after some events of a recording.
#[derive(Debug)]
pub(super) struct Settling<'r> {
    recording: &'r Recording,
    /// How many events have been replayed.
    next_event: usize,
    pub durable: Vec<u8>,
    pub visible: Vec<u8>,
    pub durable_hash: u128,
    pub units: BTreeMap<u64, Unit>,
    /// The contents of all versions ever written.
    arena: Vec<u8>,
    /// The event of each operation's `Write`, until what it wrote is durable or has failed.
    writing: HashMap<usize, usize>,
    handed_over: Vec<HandOver>,
    flush_begun_at: HashMap<usize, usize>,
    /// The lengths that a crash may leave; the first is the durable one.
    pub lens_bytes: Vec<usize>,
}

impl<'r> Settling<'r> {
    /// Creates the state before the first event.
    pub fn new(recording: &'r Recording) -> Settling<'r> {
        let mut durable = vec![0; recording.max_len_bytes()];
        durable[..recording.initial.len()].copy_from_slice(&recording.initial);
        Settling {
            recording,
            next_event: 0,
            visible: durable.clone(),
            durable,
            durable_hash: 0,
            units: BTreeMap::new(),
            arena: Vec::new(),
            writing: HashMap::new(),
            handed_over: Vec::new(),
            flush_begun_at: HashMap::new(),
            lens_bytes: vec![recording.initial.len()],
        }
    }

    /// Creates the state after all events.
    pub fn at_the_end(recording: &'r Recording) -> Settling<'r> {
        let mut settling = Settling::new(recording);
        while settling.advance().is_some() {}
        settling
    }

    /// Rewinds to before the first event.
    pub fn rewind(&mut self) {
        let initial = &self.recording.initial;
        for image in [&mut self.durable, &mut self.visible] {
            image[..initial.len()].copy_from_slice(initial);
            image[initial.len()..].fill(0);
        }
        self.next_event = 0;
        self.durable_hash = 0;
        self.units.clear();
        self.arena.clear();
        self.writing.clear();
        self.handed_over.clear();
        self.flush_begun_at.clear();
        self.lens_bytes = vec![initial.len()];
    }

    /// Replays one event and returns it; `None` after the last.
    pub fn advance(&mut self) -> Option<&'r Event> {
        let recording = self.recording;
        let at = self.next_event;
        let event = recording.events.get(at)?;
        self.next_event += 1;
        match event {
            Event::Write { op, offset_bytes, bytes } => self.write(at, *op, *offset_bytes, bytes),
            Event::Persisted { op } => self.persist(*op),
            Event::HandOver { op } => {
                self.handed_over.push(HandOver { op: *op, begun_at: at, returned_at: None });
            }
            Event::HandedOver { op } => {
                for handed in self.handed_over.iter_mut().filter(|handed| handed.op == *op) {
                    handed.returned_at = Some(at);
                }
            }
            Event::FlushBegin { op } => {
                self.flush_begun_at.insert(*op, at);
            }
            Event::Flushed { op } => self.flushed(*op),
            Event::GrowBegin { op } => self.grow_begin(*op),
            Event::Grown { op } => {
                self.lens_bytes = vec![recording.operations[*op].ranges[0].end_bytes() as usize];
            }
            Event::Failed { op } => self.failed(*op),
            Event::Forgotten { ranges, .. } => self.forget(ranges),
            Event::Mark(_) => {}
        }
        Some(event)
    }

    /// Returns the byte range of a unit.
    pub fn span(&self, unit: u64) -> Range<usize> {
        let start = unit as usize * self.recording.unit_bytes;
        start..(start + self.recording.unit_bytes).min(self.durable.len())
    }

    /// Returns the durable bytes of a unit, to patch, and the content of a version of it.
    pub fn durable_and_content(&mut self, unit: u64, version: Version) -> (&mut [u8], &[u8]) {
        let span = self.span(unit);
        let content = &self.arena[version.content..version.content + span.len()];
        (&mut self.durable[span], content)
    }

    /// Returns the visible bytes of a unit, to patch, and the content of a version of it, or the
    /// durable one.
    pub fn visible_and_content(
        &mut self,
        unit: u64,
        version: Option<Version>,
    ) -> (&mut [u8], &[u8]) {
        let span = self.span(unit);
        let content = match version {
            Some(version) => &self.arena[version.content..version.content + span.len()],
            None => &self.durable[span.clone()],
        };
        (&mut self.visible[span], content)
    }

    /// Returns, as ranges, what a failed `write_back` or `flush` covered and readers may find
    /// reverted: units that have not been written since and are not being written durably.
    pub fn forgettable(&self, op: usize) -> Vec<ByteRange> {
        let mut forgettable = vec![];
        for (range, upto) in self.covered(op) {
            for unit in self.open_in(range) {
                let versions = &self.units[&unit].versions;
                let in_flight = |version: &Version| self.is_in_flight(version.op);
                if versions.iter().all(|version| version.at <= upto && !in_flight(version)) {
                    let span = self.span(unit);
                    forgettable.push(ByteRange {
                        offset_bytes: span.start as u64,
                        len_bytes: span.len() as u64,
                    });
                }
            }
        }
        forgettable
    }

    /// Returns whether it is a durable write that has not returned.
    fn is_in_flight(&self, op: usize) -> bool {
        self.recording.operations[op].kind == MediaOperation::WriteDurable
            && self.writing.contains_key(&op)
    }

    /// Returns the units that a range touches.
    fn units_of(&self, range: ByteRange) -> Range<u64> {
        if range.len_bytes == 0 {
            return 0..0;
        }
        let unit_bytes = self.recording.unit_bytes as u64;
        range.offset_bytes / unit_bytes..range.end_bytes().div_ceil(unit_bytes)
    }

    /// Returns the open units that a range touches.
    fn open_in(&self, range: ByteRange) -> Vec<u64> {
        self.units.range(self.units_of(range)).map(|(&unit, _)| unit).collect()
    }

    fn write(&mut self, at: usize, op: usize, offset_bytes: u64, bytes: &[u8]) {
        let range = ByteRange { offset_bytes, len_bytes: bytes.len() as u64 };
        self.writing.insert(op, at);
        let start = offset_bytes as usize;
        self.visible[start..start + bytes.len()].copy_from_slice(bytes);
        for unit in self.units_of(range) {
            let span = self.span(unit);
            let content = self.arena.len();
            self.arena.extend_from_slice(&self.visible[span.clone()]);
            let hash = xxh3_128_with_seed(&self.visible[span.clone()], unit);
            let durable = &self.durable[span];
            let entry = self.units.entry(unit).or_insert_with(|| Unit {
                durable_hash: xxh3_128_with_seed(durable, unit),
                versions: Vec::new(),
                poisoned_upto: None,
            });
            entry.versions.push(Version { at, op, hash, content });
        }
    }

    /// A durable write makes its own bytes durable, and with them the whole units that contain
    /// them.
    fn persist(&mut self, op: usize) {
        let Some(at) = self.writing.remove(&op) else { return };
        let Some(Event::Write { offset_bytes, bytes, .. }) = self.recording.events.get(at) else {
            return;
        };
        let range = ByteRange { offset_bytes: *offset_bytes, len_bytes: bytes.len() as u64 };
        for unit in self.open_in(range) {
            self.raise(unit, at, None);
        }
    }

    /// Makes durable what was handed over before the flush began.
    fn flushed(&mut self, op: usize) {
        for (range, upto) in self.covered(op) {
            for unit in self.open_in(range) {
                let poisoned = self.units[&unit].poisoned_upto;
                self.raise(unit, upto, poisoned);
            }
        }
        self.drop_covered(op);
    }

    /// Handles a failed write-back or flush: no later one makes durable what it covered.
    fn failed(&mut self, op: usize) {
        self.writing.remove(&op);
        for (range, upto) in self.covered(op) {
            for unit in self.open_in(range) {
                if let Some(unit) = self.units.get_mut(&unit) {
                    unit.poisoned_upto = unit.poisoned_upto.max(Some(upto));
                }
            }
        }
        self.drop_covered(op);
    }

    /// Returns the ranges that a `write_back` or `flush` applies to, each with the last event that
    /// it covers.
    fn covered(&self, op: usize) -> Vec<(ByteRange, usize)> {
        let about = self.handed_over.iter().filter(|handed| self.is_about(op, handed));
        let ranges = about.flat_map(|handed| {
            let ranges = self.recording.operations[handed.op].ranges.iter();
            ranges.map(|&range| (range, handed.begun_at))
        });
        ranges.collect()
    }

    fn drop_covered(&mut self, op: usize) {
        let mut handed_over = std::mem::take(&mut self.handed_over);
        handed_over.retain(|handed| !self.is_about(op, handed));
        self.handed_over = handed_over;
        self.flush_begun_at.remove(&op);
    }

    /// Returns whether `op` applies to a hand-over: a `write_back` to its own, a `flush` to those
    /// that had returned when it began.
    fn is_about(&self, op: usize, handed: &HandOver) -> bool {
        match self.recording.operations[op].kind {
            MediaOperation::WriteBack => handed.op == op,
            MediaOperation::Flush => {
                let begun_at = self.flush_begun_at.get(&op);
                begun_at.is_some_and(|&begun_at| handed.returned_at.is_some_and(|at| at < begun_at))
            }
            _ => false,
        }
    }

    /// Makes the newest version up to the event `upto` durable, unless that one is poisoned.
    fn raise(&mut self, number: u64, upto: usize, poisoned_upto: Option<usize>) {
        let span = self.span(number);
        let Some(unit) = self.units.get_mut(&number) else { return };
        let settled = unit.versions.partition_point(|version| version.at <= upto);
        let Some(&version) = settled.checked_sub(1).and_then(|last| unit.versions.get(last)) else {
            return;
        };
        if poisoned_upto.is_some_and(|poisoned| version.at <= poisoned) {
            return;
        }
        let len = span.len();
        self.durable[span].copy_from_slice(&self.arena[version.content..version.content + len]);
        self.durable_hash =
            self.durable_hash.wrapping_add(version.hash).wrapping_sub(unit.durable_hash);
        unit.durable_hash = version.hash;
        unit.versions.drain(..settled);
        if unit.versions.is_empty() {
            self.units.remove(&number);
        }
    }

    /// Until the call has returned, and forever if it fails, a crash may leave an intermediate
    /// length.
    fn grow_begin(&mut self, op: usize) {
        let range = self.recording.operations[op].ranges[0];
        let halfway = (range.offset_bytes + range.len_bytes / 2) / BLOCK_BYTES * BLOCK_BYTES;
        for len in [halfway, range.end_bytes()] {
            let len = len as usize;
            if len as u64 > range.offset_bytes && !self.lens_bytes.contains(&len) {
                self.lens_bytes.push(len);
            }
        }
    }

    /// Makes readers see the durable bytes again.
    fn forget(&mut self, ranges: &[ByteRange]) {
        for &range in ranges {
            for unit in self.open_in(range) {
                let span = self.span(unit);
                self.visible[span.clone()].copy_from_slice(&self.durable[span]);
                self.units.remove(&unit);
            }
        }
    }
}
