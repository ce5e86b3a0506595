//! The enumeration: every prefix of a recording, and for each a selection of its possible states.
//!
//! # One buffer
//! The replayed media keep two images, one with all units durable and one with all units newest. A
//! state is one of them with a few units patched; the patches are reverted before the next state.
//! Its hash is the base's plus the changes of the patched units. So a state costs what it differs
//! in, not the size of the media, and a state that was seen before is skipped before anything is
//! copied.
//!
//! # Duplicates
//! The same bytes, the same length, *and* the same demands: a state without transaction 7 is
//! correct until 7 is acknowledged, and must be checked again then. The demands are all marks but
//! `Begun`, which only permits more.
//!
//! # The budget
//! First the recording is replayed once to count the states of each point. The budget is then
//! distributed by water-filling: each point gets what it has, up to one level for all. What a point
//! does not use goes to later points. Points that cannot have new states (an operation begins, or
//! hands over) get nothing; those that only rule states out get a little, because their durable
//! image, from which others are patched, is new.

use std::collections::HashSet;
use std::io;

use xxhash_rust::xxh3::{xxh3_128, xxh3_128_with_seed};

use crate::choice::{self, Base, Choice, Open};
use crate::describe;
use crate::mark::{Mark, Marks};
use crate::media::CrashMedia;
use crate::recording::{Event, Recording};
use crate::settle::Settling;
use aquifer_testkit::rng::Rng;

/// The share of a point that only rules states out.
const RULED_OUT_SHARE: u64 = 64;

/// Number of events listed before a crash.
const LISTED_EVENTS: usize = 24;

/// A possible crash state; the image is borrowed from the enumeration.
#[derive(Debug)]
pub struct CrashState<'s> {
    states: &'s CrashStates<'s>,
}

/// A crash state that owns its image.
#[derive(Debug, Clone)]
pub struct OwnedCrashState {
    /// Number of events of the recording before the crash.
    pub prefix: usize,
    /// A readable description of the state.
    pub description: String,
    /// What had been promised.
    pub marks: Marks,
    /// The bytes of the media.
    pub image: Vec<u8>,
}

/// The start of a recording: fresh media, or a crash state of another recording.
#[derive(Debug, Clone, Default)]
pub(super) struct Origin {
    pub marks: Marks,
    /// Hash of the image, relative to the first recording's initial image.
    pub image_hash: u128,
    pub demands_hash: u128,
    /// Empty for the first recording.
    pub description: String,
    pub depth: u32,
}

/// Statistics of an enumeration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Enumerated {
    /// States returned.
    pub states: u64,
    /// States skipped because the same image had been returned under the same demands.
    pub duplicates: u64,
    /// Prefixes from which states were taken.
    pub points: u64,
    /// Those of which every state was taken.
    pub exhausted_points: u64,
}

/// An iterator over crash states.
///
/// It returns owned images as an [`Iterator`], or borrowed ones by [`CrashStates::lend`], which
/// copies nothing. The same recording, seed and budget give the same states.
#[derive(Debug)]
pub struct CrashStates<'r> {
    recording: &'r Recording,
    origin: Origin,
    settling: Settling<'r>,
    open: Open,
    choices: Choices,
    rng: Rng,
    /// Maximum number of states for each point.
    shares: Vec<u64>,
    /// Number of events replayed; none before the first step.
    point: Option<usize>,
    share_left: u64,
    attempts_left: u64,
    newest_hash: u128,
    marks: Marks,
    demands_hash: u128,
    seen: HashSet<u128>,
    current: Current,
    enumerated: Enumerated,
}

/// The choices of the current point, each with a length of the media.
struct Choices(Box<dyn Iterator<Item = (Choice, usize)>>);

impl std::fmt::Debug for Choices {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Choices")
    }
}

/// The state that was returned last.
#[derive(Debug)]
struct Current {
    base: Base,
    /// Units that differ from the base: position, and number of the version.
    exceptions: Vec<(usize, usize)>,
    len_bytes: usize,
    image_hash: u128,
    /// The bytes that the patches have overwritten, concatenated.
    overwritten: Vec<u8>,
    is_patched: bool,
}

impl Recording {
    /// Returns the crash states of this recording, at most `budget` of them.
    pub fn crash_states(&self, seed: u64, budget: u64) -> CrashStates<'_> {
        CrashStates::starting_at(self, Origin::default(), seed, budget, HashSet::new())
    }
}

impl<'r> CrashStates<'r> {
    pub(super) fn starting_at(
        recording: &'r Recording,
        origin: Origin,
        seed: u64,
        budget: u64,
        seen: HashSet<u128>,
    ) -> CrashStates<'r> {
        let mut settling = Settling::new(recording);
        let mut rng = Rng::new(seed);
        let shares = shares(&possible(&mut settling, budget), budget, &mut rng);
        settling.rewind();
        CrashStates {
            recording,
            settling,
            open: Open::default(),
            choices: Choices(Box::new(std::iter::empty())),
            rng,
            shares,
            point: None,
            share_left: 0,
            attempts_left: 0,
            newest_hash: 0,
            marks: origin.marks.clone(),
            demands_hash: origin.demands_hash,
            origin,
            seen,
            current: Current {
                base: Base::Durable,
                exceptions: Vec::new(),
                len_bytes: 0,
                image_hash: 0,
                overwritten: Vec::new(),
                is_patched: false,
            },
            enumerated: Enumerated::default(),
        }
    }

    /// Returns the next state. Its image is valid until the next call.
    pub fn lend(&mut self) -> Option<CrashState<'_>> {
        self.step().then_some(CrashState { states: self })
    }

    /// Returns the statistics so far.
    pub fn enumerated(&self) -> Enumerated {
        self.enumerated
    }

    /// Returns an estimate of the remaining states; never less than their number.
    pub(super) fn expected_left(&self) -> u64 {
        let behind = self.point.map_or(0, |point| point + 1);
        let shares = self.shares.iter().skip(behind);
        shares.fold(self.share_left, |sum, &share| sum.saturating_add(share))
    }

    /// Returns the hashes of the returned states, to continue with in another enumeration.
    pub(super) fn seen(&mut self) -> &mut HashSet<u128> {
        &mut self.seen
    }

    fn step(&mut self) -> bool {
        self.take_patches_back();
        loop {
            while self.share_left > 0 && self.attempts_left > 0 {
                let Some((choice, len_bytes)) = self.choices.0.next() else { break };
                self.attempts_left -= 1;
                self.current.base = choice.resolve(&self.open, &mut self.current.exceptions);
                self.current.len_bytes = len_bytes;
                self.current.image_hash = self.hash_of_current();
                if self.seen.insert(self.demanded_hash()) {
                    self.patch();
                    self.share_left -= 1;
                    self.enumerated.states += 1;
                    return true;
                }
                self.enumerated.duplicates += 1;
            }
            if !self.next_point() {
                return false;
            }
        }
    }

    /// Advances to the next point that has a share.
    fn next_point(&mut self) -> bool {
        loop {
            let point = match self.point {
                None => 0,
                Some(point) => {
                    let Some(event) = self.settling.advance() else { return false };
                    if let Event::Mark(mark) = event {
                        self.pass(*mark);
                    }
                    point + 1
                }
            };
            self.point = Some(point);
            let share = self.shares[point];
            if share > 0 {
                self.open_point(share);
                return true;
            }
        }
    }

    fn pass(&mut self, mark: Mark) {
        let says_something = self.marks.add(mark);
        // In a recovery a `Begun` counts like any other mark: several recoveries share the set of
        // seen states, and in another recovery the same state may come before it.
        let only_allows_more = matches!(mark, Mark::Begun(_)) && self.origin.depth == 0;
        if says_something && !only_allows_more {
            let mut bytes = self.demands_hash.to_le_bytes().to_vec();
            bytes.extend_from_slice(&mark.to_bytes());
            self.demands_hash = xxh3_128(&bytes);
        }
    }

    fn open_point(&mut self, share: u64) {
        self.share_left = self.share_left.saturating_add(share);
        self.attempts_left = self.share_left.saturating_mul(4).saturating_add(256);
        self.open = Open::of(&self.settling, self.recording.unit_bytes);
        let base_hash = self.settling.durable_hash;
        self.newest_hash = self.open.units.iter().fold(base_hash, |hash, unit| {
            let newest = self.open.version(unit, unit.count);
            hash.wrapping_add(newest.hash).wrapping_sub(unit.durable_hash)
        });
        let lens = self.settling.lens_bytes.clone();
        let per_len = self.share_left.div_ceil(lens.len() as u64);
        self.enumerated.points += 1;
        self.enumerated.exhausted_points += u64::from(self.open.combinations(u64::MAX) <= per_len);
        let choices = choice::choices(&self.open, per_len, &mut self.rng);
        let choices = choices.flat_map(move |choice| {
            let lens = lens.clone();
            lens.into_iter().map(move |len| (choice, len))
        });
        self.choices = Choices(Box::new(choices));
    }

    fn hash_of_current(&self) -> u128 {
        let base = self.current.base;
        let base_hash = match base {
            Base::Durable => self.settling.durable_hash,
            Base::Newest => self.newest_hash,
        };
        self.current.exceptions.iter().fold(base_hash, |hash, &(index, number)| {
            let there = self.unit_hash(index, number);
            let base_number = Open::base_number(&self.open.units[index], base);
            hash.wrapping_add(there).wrapping_sub(self.unit_hash(index, base_number))
        })
    }

    fn unit_hash(&self, index: usize, number: usize) -> u128 {
        let unit = &self.open.units[index];
        if number == 0 { unit.durable_hash } else { self.open.version(unit, number).hash }
    }

    /// Returns the hash relative to the first recording's initial image.
    fn image_hash(&self) -> u128 {
        self.origin.image_hash.wrapping_add(self.current.image_hash)
    }

    /// Returns the hash of the image, its length and the demands on it.
    fn demanded_hash(&self) -> u128 {
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&self.image_hash().to_le_bytes());
        bytes[16..].copy_from_slice(&self.demands_hash.to_le_bytes());
        xxh3_128_with_seed(&bytes, self.current.len_bytes as u64)
    }

    fn patch(&mut self) {
        let current = &mut self.current;
        for &(index, number) in &current.exceptions {
            let unit = &self.open.units[index];
            let span = self.settling.span(unit.unit);
            match current.base {
                Base::Durable => {
                    let version = self.open.version(unit, number);
                    current.overwritten.extend_from_slice(&self.settling.durable[span.clone()]);
                    let (durable, content) = self.settling.durable_and_content(unit.unit, version);
                    durable.copy_from_slice(content);
                }
                Base::Newest => {
                    current.overwritten.extend_from_slice(&self.settling.visible[span.clone()]);
                    let version = (number > 0).then(|| self.open.version(unit, number));
                    let (visible, content) = self.settling.visible_and_content(unit.unit, version);
                    visible.copy_from_slice(content);
                }
            }
        }
        current.is_patched = true;
    }

    fn take_patches_back(&mut self) {
        if !std::mem::take(&mut self.current.is_patched) {
            return;
        }
        let mut overwritten = &self.current.overwritten[..];
        for &(index, _) in &self.current.exceptions {
            let span = self.settling.span(self.open.units[index].unit);
            let (bytes, rest) = overwritten.split_at(span.len());
            overwritten = rest;
            match self.current.base {
                Base::Durable => self.settling.durable[span].copy_from_slice(bytes),
                Base::Newest => self.settling.visible[span].copy_from_slice(bytes),
            }
        }
        self.current.overwritten.clear();
    }
}

impl Iterator for CrashStates<'_> {
    type Item = OwnedCrashState;

    fn next(&mut self) -> Option<OwnedCrashState> {
        self.lend().map(|state| state.to_owned())
    }
}

impl CrashState<'_> {
    /// Returns the bytes of the media.
    pub fn image(&self) -> &[u8] {
        let image = match self.states.current.base {
            Base::Durable => &self.states.settling.durable,
            Base::Newest => &self.states.settling.visible,
        };
        &image[..self.states.current.len_bytes]
    }

    /// Returns the number of events of the recording before the crash.
    pub fn prefix(&self) -> usize {
        self.states.point.unwrap_or(0)
    }

    /// Returns what had been promised before the crash, and before the earlier crashes of its
    /// chain.
    pub fn marks(&self) -> &Marks {
        &self.states.marks
    }

    /// Returns how many recoveries were crashed before it.
    pub fn depth(&self) -> u32 {
        self.states.origin.depth
    }

    /// Returns a description that suffices to reproduce the state by hand.
    pub fn description(&self) -> String {
        let states = self.states;
        let here = describe::state(
            states.recording,
            self.prefix(),
            &states.open,
            states.current.base,
            &states.current.exceptions,
            (states.settling.lens_bytes.len() > 1).then_some(states.current.len_bytes),
        );
        match states.origin.description.as_str() {
            "" => here,
            before => format!("{before}; then, in its recovery, {here}"),
        }
    }

    /// Returns media with this state, to recover from; what is done to them is recorded.
    pub fn media(&self) -> io::Result<CrashMedia> {
        let recording = self.states.recording;
        let media = CrashMedia::from_image(self.image(), recording.domain)?;
        Ok(media.with_unit_bytes(recording.unit_bytes))
    }

    /// Returns a copy that owns its image.
    pub fn to_owned(&self) -> OwnedCrashState {
        OwnedCrashState {
            prefix: self.prefix(),
            description: self.description(),
            marks: self.marks().clone(),
            image: self.image().to_vec(),
        }
    }

    /// Lists the last events before the crash.
    pub(super) fn listing(&self) -> String {
        let end = self.prefix();
        self.states.recording.listing(end.saturating_sub(LISTED_EVENTS)..end)
    }

    /// Returns the state as the start of its recovery's recording.
    pub(super) fn as_origin(&self) -> Origin {
        Origin {
            marks: self.states.marks.clone(),
            image_hash: self.states.image_hash(),
            demands_hash: self.states.demands_hash,
            description: self.description(),
            depth: self.states.origin.depth + 1,
        }
    }
}

/// Returns for each point how many states may be new there, up to a limit.
fn possible(settling: &mut Settling<'_>, limit: u64) -> Vec<u64> {
    let combinations = |settling: &Settling<'_>| {
        let mut product = settling.lens_bytes.len() as u64;
        for unit in settling.units.values() {
            product = product.saturating_mul(unit.versions.len() as u64 + 1);
            if product >= limit {
                return limit;
            }
        }
        product
    };
    let mut possible = vec![combinations(settling).min(limit)];
    while let Some(event) = settling.advance() {
        possible.push(match event {
            Event::HandOver { .. }
            | Event::HandedOver { .. }
            | Event::FlushBegin { .. }
            | Event::Failed { .. }
            | Event::Mark(Mark::Begun(_)) => 0,
            Event::Persisted { .. }
            | Event::Flushed { .. }
            | Event::Grown { .. }
            | Event::Forgotten { .. } => combinations(settling).min(RULED_OUT_SHARE).min(limit),
            Event::Write { .. } | Event::GrowBegin { .. } | Event::Mark(_) => {
                combinations(settling).min(limit)
            }
        });
    }
    possible
}

/// Distributes the budget: each point gets what it has, up to a level that uses the budget up.
fn shares(possible: &[u64], budget: u64, rng: &mut Rng) -> Vec<u64> {
    let poured = |level: u64| {
        possible.iter().fold(0u64, |sum, &possible| sum.saturating_add(possible.min(level)))
    };
    let (mut low, mut high) = (0, budget);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if poured(middle) <= budget {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    let mut shares: Vec<u64> = possible.iter().map(|&possible| possible.min(low)).collect();
    // One more for some of the points that have more, spread evenly from a random one on.
    let mut left = budget - poured(low).min(budget);
    let more: Vec<usize> = (0..possible.len()).filter(|&p| possible[p] > shares[p]).collect();
    if !more.is_empty() && left > 0 {
        let offset = rng.below(more.len() as u64) as usize;
        left = left.min(more.len() as u64);
        for step in 0..left as usize {
            let position = step * more.len() / left as usize;
            shares[more[(position + offset) % more.len()]] += 1;
        }
    }
    shares
}
