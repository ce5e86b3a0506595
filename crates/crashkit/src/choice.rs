//! Selects which of the possible crash states of one point are checked.
//!
//! With *n* open units there are at least 2^n states, so unless they are few a selection is made.
//! It is ordered by what finds bugs in practice, so that a small budget covers the most useful
//! states:
//!
//! 1. nothing open has arrived; everything has;
//! 2. writes whole or absent: all combinations of the last few, every prefix of their sequence,
//!    each alone, all but each;
//! 3. in turns: the newest write torn (its first units, its last units, one, all but one), over
//!    media that have no other open write and over media that have all of them; each unit alone;
//!    all but each unit; each older version of a unit that was written several times; and random
//!    mixtures of three textures: units, whole and torn writes, and the blocks in which page caches
//!    and processor caches write back.
//!
//! A [`Choice`] is a recipe of a few bytes. It resolves to a base (all durable, or all newest) and
//! the units that differ from it, which have to be patched.

use std::collections::HashMap;

use crate::settle::{Settling, Version};
use aquifer_testkit::rng::Rng;

/// Below this many states a point's share is spent on random mixtures only.
const FEW: u64 = 8;

/// The write-back granularity of page caches, and the smallest one of processor caches.
const PAGE_BYTES: usize = 4096;
const CACHE_LINE_BYTES: usize = 64;

/// The state from which the others are patched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Base {
    /// Every unit durable.
    Durable,
    /// Every unit as last visible.
    Newest,
}

const BASES: [Base; 2] = [Base::Durable, Base::Newest];

/// A unit whose content after a crash is undetermined.
#[derive(Debug)]
pub(super) struct OpenUnit {
    pub unit: u64,
    pub durable_hash: u128,
    /// Its `count` open versions start here in [`Open::versions`]. Number 0 is the durable version,
    /// number *n* the *n*-th of these.
    first: usize,
    pub count: usize,
}

/// The open units at a point.
#[derive(Debug, Default)]
pub(super) struct Open {
    pub units: Vec<OpenUnit>,
    versions: Vec<Version>,
    /// For each version, the position of its operation in `writes`.
    write_of: Vec<usize>,
    /// Operations with open versions, in the order in which they wrote.
    pub writes: Vec<usize>,
    /// Positions in `units` of the units of the last write.
    focus: Vec<usize>,
    /// Number of units that are written back together.
    units_per_block: u64,
}

impl Open {
    /// Collects the open units of a replayed recording. Units whose versions all equal the durable
    /// one are left out.
    pub fn of(settling: &Settling<'_>, unit_bytes: usize) -> Open {
        let mut open = Open::default();
        let block_bytes = if unit_bytes == 8 { CACHE_LINE_BYTES } else { PAGE_BYTES };
        open.units_per_block = (block_bytes / unit_bytes).max(1) as u64;
        let mut first_event: HashMap<usize, usize> = HashMap::new();
        for (&unit, entry) in &settling.units {
            if entry.versions.iter().all(|version| version.hash == entry.durable_hash) {
                continue;
            }
            open.units.push(OpenUnit {
                unit,
                durable_hash: entry.durable_hash,
                first: open.versions.len(),
                count: entry.versions.len(),
            });
            open.versions.extend_from_slice(&entry.versions);
            for version in &entry.versions {
                first_event.insert(version.op, version.at);
            }
        }
        open.writes = first_event.keys().copied().collect();
        open.writes.sort_unstable_by_key(|op| first_event[op]);
        let positions: HashMap<usize, usize> =
            open.writes.iter().enumerate().map(|(position, &op)| (op, position)).collect();
        open.write_of = open.versions.iter().map(|version| positions[&version.op]).collect();
        let last = open.writes.last().copied();
        open.focus = (0..open.units.len())
            .filter(|&index| Some(open.newest(&open.units[index]).op) == last)
            .collect();
        open
    }

    /// Returns the number of states, up to a limit.
    pub fn combinations(&self, limit: u64) -> u64 {
        let mut product = 1u64;
        for unit in &self.units {
            product = product.saturating_mul(unit.count as u64 + 1);
            if product >= limit {
                return limit;
            }
        }
        product
    }

    /// Returns the version with a number other than 0.
    pub fn version(&self, unit: &OpenUnit, number: usize) -> Version {
        self.versions[unit.first + number - 1]
    }

    fn newest(&self, unit: &OpenUnit) -> Version {
        self.version(unit, unit.count)
    }

    /// Returns the write of a version, by its position in `writes`.
    pub fn write_of(&self, unit: &OpenUnit, number: usize) -> usize {
        self.write_of[unit.first + number - 1]
    }

    /// Returns the version number that a base has for a unit.
    pub fn base_number(unit: &OpenUnit, base: Base) -> usize {
        match base {
            Base::Durable => 0,
            Base::Newest => unit.count,
        }
    }
}

/// Which units of the newest write have arrived.
#[derive(Debug, Clone, Copy)]
pub(super) enum Torn {
    First(usize),
    From(usize),
    Only(usize),
    AllBut(usize),
}

impl Torn {
    fn has(self, position: usize) -> bool {
        match self {
            Torn::First(count) => position < count,
            Torn::From(start) => position >= start,
            Torn::Only(only) => position == only,
            Torn::AllBut(missing) => position != missing,
        }
    }
}

/// The granularity of a random mixture.
#[derive(Debug, Clone, Copy)]
pub(super) enum Texture {
    Units,
    Writes,
    Blocks,
}

/// A recipe for a crash state.
#[derive(Debug, Clone, Copy)]
pub(super) enum Choice {
    /// All units as in the base.
    Uniform(Base),
    /// The versions of all units as the digits of a number.
    Digits(u64),
    /// The first writes whole, the later ones absent.
    WritesBelow(usize),
    OnlyWrite(usize),
    AllButWrite(usize),
    /// Of the last `count` writes those in the mask; the other writes as in the base.
    LastWrites {
        mask: u64,
        count: usize,
        base: Base,
    },
    /// The newest write torn.
    Newest {
        torn: Torn,
        base: Base,
    },
    /// One unit that differs from the base.
    Unit {
        index: usize,
        number: usize,
        base: Base,
    },
    Random {
        seed: u64,
        texture: Texture,
    },
}

impl Choice {
    /// Returns the base, and in `exceptions` (cleared first) the units that have another version,
    /// by position and number.
    pub fn resolve(self, open: &Open, exceptions: &mut Vec<(usize, usize)>) -> Base {
        exceptions.clear();
        match self {
            Choice::Uniform(base) => base,
            Choice::Digits(mut digits) => {
                for (index, unit) in open.units.iter().enumerate() {
                    let radix = unit.count as u64 + 1;
                    let number = (digits % radix) as usize;
                    digits /= radix;
                    if number != 0 {
                        exceptions.push((index, number));
                    }
                }
                Base::Durable
            }
            Choice::WritesBelow(count) => by_writes(open, exceptions, Base::Durable, |w| w < count),
            Choice::OnlyWrite(only) => by_writes(open, exceptions, Base::Durable, |w| w == only),
            Choice::AllButWrite(missing) => {
                by_writes(open, exceptions, Base::Newest, |w| w != missing)
            }
            Choice::LastWrites { mask, count, base } => {
                let before = open.writes.len().saturating_sub(count);
                by_writes(open, exceptions, base, |write| match write.checked_sub(before) {
                    Some(position) => mask >> position & 1 == 1,
                    None => base == Base::Newest,
                })
            }
            Choice::Newest { torn, base } => {
                for (position, &index) in open.focus.iter().enumerate() {
                    let unit = &open.units[index];
                    let absent = match base {
                        Base::Durable => 0,
                        Base::Newest => unit.count - 1,
                    };
                    let number = if torn.has(position) { unit.count } else { absent };
                    if number != Open::base_number(unit, base) {
                        exceptions.push((index, number));
                    }
                }
                base
            }
            Choice::Unit { index, number, base } => {
                exceptions.push((index, number));
                base
            }
            Choice::Random { seed, texture } => random(open, exceptions, seed, texture),
        }
    }
}

/// Gives each unit the newest version whose write has arrived.
fn by_writes(
    open: &Open,
    exceptions: &mut Vec<(usize, usize)>,
    base: Base,
    arrived: impl Fn(usize) -> bool,
) -> Base {
    for (index, unit) in open.units.iter().enumerate() {
        let newest_arrived = (1..=unit.count).rev().find(|&n| arrived(open.write_of(unit, n)));
        let number = newest_arrived.unwrap_or(0);
        if number != Open::base_number(unit, base) {
            exceptions.push((index, number));
        }
    }
    base
}

fn random(open: &Open, exceptions: &mut Vec<(usize, usize)>, seed: u64, texture: Texture) -> Base {
    let mut rng = Rng::new(seed);
    let newest_chance = [1.0 / 16.0, 0.5, 0.5, 15.0 / 16.0][rng.below(4) as usize];
    let older_chance = [0.0, 0.5][rng.below(2) as usize];
    let pick = |rng: &mut Rng, count: usize| {
        if rng.chance(newest_chance) {
            count
        } else if rng.chance(older_chance) {
            rng.below(count as u64) as usize
        } else {
            0
        }
    };
    match texture {
        Texture::Units => {
            for (index, unit) in open.units.iter().enumerate() {
                exceptions.push((index, pick(&mut rng, unit.count)));
            }
        }
        Texture::Writes => {
            let fates: Vec<u64> = open.writes.iter().map(|_| rng.below(5)).collect();
            for (index, unit) in open.units.iter().enumerate() {
                let arrived =
                    (1..=unit.count).rev().find(|&n| match fates[open.write_of(unit, n)] {
                        0 | 1 => false,
                        2 => rng.chance(0.5),
                        _ => true,
                    });
                exceptions.push((index, arrived.unwrap_or(0)));
            }
        }
        Texture::Blocks => {
            let mut block = None;
            let mut block_seed = 0;
            for (index, unit) in open.units.iter().enumerate() {
                let this = unit.unit / open.units_per_block;
                if block != Some(this) {
                    block = Some(this);
                    block_seed = rng.next_u64();
                }
                exceptions.push((index, pick(&mut Rng::new(block_seed), unit.count)));
            }
        }
    }
    exceptions.retain(|&(_, number)| number != 0);
    Base::Durable
}

/// Returns the choices for a point with a share of `share` states, best first: all states if they
/// fit into the share, otherwise an endless selection.
pub(super) fn choices(open: &Open, share: u64, rng: &mut Rng) -> Box<dyn Iterator<Item = Choice>> {
    let all = open.combinations(u64::MAX);
    if all <= share {
        return Box::new((0..all).map(Choice::Digits));
    }
    let random = random_choices(rng.next_u64());
    if share < FEW {
        return random;
    }
    let uniform = BASES.into_iter().map(Choice::Uniform);
    let writes = write_choices(open.writes.len(), share / 3).take(share as usize / 2);
    let turns = vec![
        torn_choices(open.focus.len(), rng),
        unit_choices(open, rng, Base::Durable),
        unit_choices(open, rng, Base::Newest),
        random,
    ];
    Box::new(uniform.chain(writes).chain(Turns { turns, next: 0 }))
}

fn random_choices(seed: u64) -> Box<dyn Iterator<Item = Choice>> {
    let mut rng = Rng::new(seed);
    Box::new(std::iter::repeat_with(move || {
        let texture = [Texture::Units, Texture::Writes, Texture::Blocks][rng.below(3) as usize];
        Choice::Random { seed: rng.next_u64(), texture }
    }))
}

/// Returns choices with each write whole or absent.
fn write_choices(writes: usize, limit: u64) -> Box<dyn Iterator<Item = Choice>> {
    let bits = limit.max(1).ilog2().min(16);
    if writes <= bits as usize {
        let masks = 0..1u64 << writes;
        return Box::new(masks.map(move |mask| Choice::LastWrites {
            mask,
            count: writes,
            base: Base::Durable,
        }));
    }
    let each = (0..writes).rev().flat_map(|write| {
        [Choice::WritesBelow(write), Choice::OnlyWrite(write), Choice::AllButWrite(write)]
    });
    let count = bits as usize;
    let last = (0..1u64 << count).flat_map(move |mask| {
        BASES.into_iter().map(move |base| Choice::LastWrites { mask, count, base })
    });
    Box::new(Turns { turns: vec![Box::new(each), Box::new(last)], next: 0 })
}

fn torn_choices(units: usize, rng: &mut Rng) -> Box<dyn Iterator<Item = Choice>> {
    let positions = shuffled(units, rng);
    Box::new(positions.into_iter().flat_map(move |position| {
        let torn = [
            Torn::First(position + 1),
            Torn::From(position),
            Torn::AllBut(position),
            Torn::Only(position),
        ];
        torn.into_iter()
            .flat_map(|torn| BASES.into_iter().map(move |base| Choice::Newest { torn, base }))
    }))
}

/// Returns choices where one unit differs from the base: the newest version or none first, older
/// versions after it.
fn unit_choices(open: &Open, rng: &mut Rng, base: Base) -> Box<dyn Iterator<Item = Choice>> {
    let mut order: Vec<(usize, usize)> = vec![];
    let mut older = vec![];
    for index in shuffled(open.units.len(), rng) {
        let count = open.units[index].count;
        order.push((index, if base == Base::Durable { count } else { 0 }));
        older.extend((1..count).map(|number| (index, number)));
    }
    order.extend(older);
    Box::new(order.into_iter().map(move |(index, number)| Choice::Unit { index, number, base }))
}

/// Returns the numbers below `count` in random order.
fn shuffled(count: usize, rng: &mut Rng) -> Vec<usize> {
    let mut numbers: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        numbers.swap(last, rng.below(last as u64 + 1) as usize);
    }
    numbers
}

/// Takes from several iterators in turn until all have ended.
struct Turns {
    turns: Vec<Box<dyn Iterator<Item = Choice>>>,
    next: usize,
}

impl Iterator for Turns {
    type Item = Choice;

    fn next(&mut self) -> Option<Choice> {
        while !self.turns.is_empty() {
            self.next %= self.turns.len();
            match self.turns[self.next].next() {
                Some(choice) => {
                    self.next += 1;
                    return Some(choice);
                }
                None => drop(self.turns.remove(self.next)),
            }
        }
        None
    }
}
