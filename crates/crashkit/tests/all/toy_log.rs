//! A write-ahead log of a hundred lines on the crash-enumerating media: the correct one survives
//! every crash, also of its recovery, and each wrong one is caught, in both domains.
//!
//! ```text
//!  tail │ slot 0 │ slot 1 │ … │ cells            a slot: seq, count, (cell, value)*, checksum
//! ```
//!
//! A transaction is a record, written durably into slot `seq % SLOTS`, and then the cells, not
//! durably. When the slots are full, the cells are handed over and flushed, then the tail moves up
//! to the last record. Recovery applies the records after the tail in order, up to the first
//! missing one.

use std::sync::Barrier;

use aquifer_crashkit::unguarded::UnguardedMedia;
use aquifer_crashkit::{
    CrashFailure, CrashMedia, CrashState, Explored, Mutation, Plan, Recording, Trigger, Verdict,
    explore,
};
use aquifer_pool::media::{Media, MediaError, MediaOperation, PersistenceDomain};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

use crate::support::{DOMAINS, range};

const SLOTS: u64 = 4;
/// Larger than a sector: a record can be torn in both domains.
const SLOT_BYTES: u64 = 1024;
const SLOTS_START: u64 = 512;
const CELLS_START: u64 = SLOTS_START + SLOTS * SLOT_BYTES;
const CELLS: u64 = 150;
const LEN_BYTES: u64 = CELLS_START + CELLS * 8;
/// Maximum number of entries of a record.
const MOST_ENTRIES: u64 = 60;

type Cells = Vec<u64>;

/// The bug of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bug {
    None,
    /// The cells are handed over but not flushed before the tail moves.
    NoFlush,
    /// They are flushed but were not handed over.
    NoHandOver,
    /// The tail moves before the cells are durable.
    Swapped,
    /// The record is written, not durably.
    PlainCommit,
    /// A record is accepted if its number is right.
    NoChecksum,
    /// The cells are written before their record is durable.
    CellsFirst,
    /// A transaction is acknowledged, then written.
    EarlyAcknowledge,
    /// Recovery moves the tail before its cells are durable.
    RecoverySwapped,
    /// Recovery moves the tail up to the records that it found without applying them.
    RecoveryForgets,
}

const BUGS: [Bug; 9] = [
    Bug::NoFlush,
    Bug::NoHandOver,
    Bug::Swapped,
    Bug::PlainCommit,
    Bug::NoChecksum,
    Bug::CellsFirst,
    Bug::EarlyAcknowledge,
    Bug::RecoverySwapped,
    Bug::RecoveryForgets,
];

/// Returns whether the bug shows only in a crash of the recovery, or after it.
fn is_in_recovery(bug: Bug) -> bool {
    matches!(bug, Bug::RecoverySwapped)
}

struct Toy<'m> {
    media: &'m CrashMedia,
    bug: Bug,
    tail: u64,
    last: u64,
}

fn read_word(media: &CrashMedia, offset: u64) -> Result<u64, MediaError> {
    let mut word = [0; 8];
    media.read_at(offset, &mut word)?;
    Ok(u64::from_le_bytes(word))
}

/// Never zero for words that are all zero: a slot that was never written must not look like a
/// record.
fn checksum(words: &[u64]) -> u64 {
    words.iter().fold(words.len() as u64 + 0x1234_5678, |sum, word| {
        (sum.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    })
}

fn slot_of(seq: u64) -> u64 {
    SLOTS_START + seq % SLOTS * SLOT_BYTES
}

impl<'m> Toy<'m> {
    /// Opens the log and recovers.
    fn open(media: &'m CrashMedia, bug: Bug) -> Result<Toy<'m>, MediaError> {
        let tail = read_word(media, 0)?;
        let mut toy = Toy { media, bug, tail, last: tail };
        while let Some(entries) = toy.record(toy.last + 1)? {
            toy.last += 1;
            if bug != Bug::RecoveryForgets {
                toy.apply(&entries)?;
            }
        }
        if toy.last != toy.tail {
            match bug {
                Bug::RecoverySwapped => {
                    toy.move_tail()?;
                    toy.settle_cells()?;
                }
                _ => {
                    toy.settle_cells()?;
                    toy.move_tail()?;
                }
            }
        }
        Ok(toy)
    }

    fn record(&self, seq: u64) -> Result<Option<Vec<(u64, u64)>>, MediaError> {
        let mut bytes = vec![0; SLOT_BYTES as usize];
        self.media.read_at(slot_of(seq), &mut bytes)?;
        let words = words(&bytes);
        let count = words[1] as usize;
        if words[0] != seq || count > MOST_ENTRIES as usize {
            return Ok(None);
        }
        let end = 2 + 2 * count;
        if self.bug != Bug::NoChecksum && words[end] != checksum(&words[..end]) {
            return Ok(None);
        }
        let entries = words[2..end].chunks(2).map(|entry| (entry[0], entry[1]));
        Ok(Some(entries.filter(|entry| entry.0 < CELLS).collect()))
    }

    fn apply(&self, entries: &[(u64, u64)]) -> Result<(), MediaError> {
        for (cell, value) in entries {
            self.media.write_unguarded(CELLS_START + cell * 8, &value.to_le_bytes())?;
        }
        Ok(())
    }

    fn settle_cells(&self) -> Result<(), MediaError> {
        if self.bug != Bug::NoHandOver {
            self.media.write_back(&[range(CELLS_START, CELLS * 8)])?;
        }
        if self.bug != Bug::NoFlush {
            self.media.flush()?;
        }
        Ok(())
    }

    fn move_tail(&mut self) -> Result<(), MediaError> {
        self.tail = self.last;
        self.media.write_durable_unguarded(0, &self.tail.to_le_bytes())
    }

    fn commit(&mut self, entries: &[(u64, u64)]) -> Result<u64, MediaError> {
        if self.last - self.tail == SLOTS {
            if self.bug == Bug::Swapped {
                self.move_tail()?;
                self.settle_cells()?;
            } else {
                self.settle_cells()?;
                self.move_tail()?;
            }
        }
        let seq = self.last + 1;
        self.media.begin(seq);
        let mut words = vec![seq, entries.len() as u64];
        words.extend(entries.iter().flat_map(|&(cell, value)| [cell, value]));
        words.push(checksum(&words));
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        if self.bug == Bug::CellsFirst {
            self.apply(entries)?;
        }
        match self.bug {
            Bug::PlainCommit => self.media.write_unguarded(slot_of(seq), &bytes)?,
            Bug::EarlyAcknowledge => {
                self.media.acknowledge(seq);
                self.media.write_durable_unguarded(slot_of(seq), &bytes)?;
            }
            _ => self.media.write_durable_unguarded(slot_of(seq), &bytes)?,
        }
        self.media.acknowledge(seq);
        self.last = seq;
        self.apply(entries)?;
        Ok(seq)
    }

    fn cells(&self) -> Result<Cells, MediaError> {
        let mut bytes = vec![0; CELLS as usize * 8];
        self.media.read_at(CELLS_START, &mut bytes)?;
        Ok(words(&bytes))
    }
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Runs transactions; returns the recording, and the cells after each of them.
fn run(
    domain: PersistenceDomain,
    bug: Bug,
    transactions: u64,
    seed: u64,
) -> (Recording, Vec<Cells>) {
    let media = CrashMedia::new(LEN_BYTES, domain).unwrap();
    let mut toy = Toy::open(&media, bug).unwrap();
    let mut rng = Rng::new(seed);
    let mut cells = vec![0; CELLS as usize];
    let mut history = vec![cells.clone()];
    for transaction in 0..transactions {
        // Every third one is short: it fits into one sector, and into a few words.
        let most = if transaction % 3 == 0 { 4 } else { MOST_ENTRIES };
        let count = 1 + rng.below(most);
        let entries: Vec<(u64, u64)> =
            (0..count).map(|_| (rng.below(CELLS), rng.next_u64())).collect();
        for &(cell, value) in &entries {
            cells[cell as usize] = value;
        }
        toy.commit(&entries).unwrap();
        history.push(cells.clone());
    }
    assert_eq!(toy.cells().unwrap(), cells, "the toy must work while nothing crashes");
    (media.recording(), history)
}

/// Recovers from a state: the cells must be those of the last acknowledged transaction or of one in
/// flight, and the next crash must give the same answer.
fn check(state: &CrashState<'_>, bug: Bug, history: &[Cells]) -> Verdict {
    let media = state.media()?;
    let toy = Toy::open(&media, bug)?;
    let marks = state.marks();
    let old = marks.last_acknowledged().unwrap_or(0);
    if toy.last < old || (toy.last > old && !marks.is_in_flight(toy.last)) {
        return Err(format!("recovered up to {} in place of {old}", toy.last).into());
    }
    if toy.cells()? != history[toy.last as usize] {
        return Err(format!("the cells are not those of {}", toy.last).into());
    }
    for &id in marks.in_flight() {
        if id <= toy.last { media.acknowledge(id) } else { media.withdraw(id) }
    }
    Ok(Some(media.recording()))
}

fn explore_toy(
    domain: PersistenceDomain,
    bug: Bug,
    depth: u32,
    budget: u64,
    seed: u64,
) -> Result<Explored, Box<CrashFailure>> {
    let (recording, history) = run(domain, bug, 11, seed);
    explore(&recording, Plan { depth, budget, seed }, |state| check(state, bug, &history))
}

#[test]
fn the_right_log_survives_every_crash() {
    let seed = seed(1);
    for domain in DOMAINS {
        let explored = explore_toy(domain, Bug::None, 2, steps(6_000) as u64, seed);
        let explored = explored.unwrap_or_else(|failure| panic!("{domain}: {failure}"));
        println!("{domain}: {explored:?}");
        assert!(explored.states_by_depth.iter().all(|&states| states > 50), "{explored:?}");
    }
}

#[test]
fn every_wrong_log_is_caught() {
    let seed = seed(1);
    for domain in DOMAINS {
        for bug in BUGS {
            let depth = u32::from(is_in_recovery(bug));
            let failure =
                explore_toy(domain, bug, depth, 6_000, seed).expect_err(&format!("{bug:?}"));
            println!("{domain}, {bug:?}: {failure}");
            assert_eq!(failure.depth, depth);
        }
    }
}

/// Without the second level, a recovery that is wrong only when it is itself crashed looks correct.
#[test]
fn crashing_the_recovery_is_what_finds_bugs_in_it() {
    for domain in DOMAINS {
        explore_toy(domain, Bug::RecoverySwapped, 0, 6_000, 1).unwrap();
    }
}

/// One run of the correct log, and media that misbehave afterwards.
#[test]
fn mutated_recordings_are_caught() {
    let seed = seed(1);
    for domain in DOMAINS {
        let (recording, history) = run(domain, Bug::None, 11, seed);
        let survives = |recording: &Recording, budget| {
            let plan = Plan { depth: 0, budget, seed };
            explore(recording, plan, |state| check(state, Bug::None, &history)).is_ok()
        };
        assert!(survives(&recording, 3_000));
        for mutation in [Mutation::DropFlushes, Mutation::DropWriteBacks, Mutation::DurableIsPlain]
        {
            assert!(!survives(&recording.mutated(&mutation), 3_000), "{domain}: {mutation}");
        }
        // Each record, each flush and each hand-over is necessary.
        for (op, operation) in recording.operations().iter().enumerate() {
            let mutations = match operation.kind() {
                MediaOperation::WriteDurable if operation.ranges()[0].offset_bytes > 0 => {
                    vec![Mutation::Lose(op), Mutation::PlainWrite(op)]
                }
                MediaOperation::Flush | MediaOperation::WriteBack => vec![Mutation::Lose(op)],
                _ => vec![],
            };
            for mutation in mutations {
                let mutated = recording.mutated(&mutation);
                assert!(!survives(&mutated, 3_000), "{domain}: {mutation}\n{recording}");
            }
        }
    }
}

#[test]
fn a_write_that_changes_places_with_the_next_is_caught() {
    let media = CrashMedia::new(1024, PersistenceDomain::PageCache).unwrap();
    media.write_durable_unguarded(0, &[1; 512]).unwrap();
    media.write_durable_unguarded(512, &[1; 512]).unwrap();
    let recording = media.recording();
    let commit_without_data = |recording: &Recording| {
        recording.crash_states(1, 100).any(|state| state.image[512] == 1 && state.image[0] == 0)
    };
    assert!(Mutation::all(&recording).contains(&Mutation::SwapWithNext(0)));
    assert!(!commit_without_data(&recording));
    assert!(commit_without_data(&recording.mutated(&Mutation::SwapWithNext(0))));
}

/// Threads that commit concurrently, each into its own slots: what each thread acknowledged holds,
/// whatever the other threads had in progress. `durably` selects whether the commits are durable.
fn parallel_run(domain: PersistenceDomain, durably: bool) -> Recording {
    const THREADS: u64 = 3;
    let media = CrashMedia::new(THREADS * 4 * SLOT_BYTES, domain).unwrap();
    let start = Barrier::new(THREADS as usize);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (media, start) = (&media, &start);
            scope.spawn(move || {
                start.wait();
                for turn in 0..4 {
                    let id = thread * 4 + turn;
                    let record = [&[id + 1; 127][..], &[checksum(&[id + 1; 127])]].concat();
                    let bytes: Vec<u8> =
                        record.iter().flat_map(|word| word.to_le_bytes()).collect();
                    media.begin(id);
                    if durably {
                        media.write_durable_unguarded(id * SLOT_BYTES, &bytes).unwrap()
                    } else {
                        media.write_unguarded(id * SLOT_BYTES, &bytes).unwrap()
                    }
                    media.acknowledge(id);
                }
            });
        }
    });
    media.recording()
}

fn check_parallel(state: &CrashState<'_>) -> Verdict {
    for (id, slot) in state.image().chunks(SLOT_BYTES as usize).enumerate() {
        let words = words(slot);
        let whole = words[127] == checksum(&words[..127]) && words[0] == id as u64 + 1;
        if state.marks().is_acknowledged(id as u64) && !whole {
            return Err(format!("{id} was acknowledged and is not there").into());
        }
        if whole && !state.marks().is_acknowledged(id as u64) {
            assert!(state.marks().is_in_flight(id as u64), "{id} has not begun");
        }
    }
    Ok(None)
}

#[test]
fn parallel_commits_are_in_one_order() {
    for domain in DOMAINS {
        let plan = Plan { depth: 0, budget: 3_000, seed: 1 };
        let explored = explore(&parallel_run(domain, true), plan, check_parallel);
        explored.unwrap_or_else(|failure| panic!("{failure}"));
        explore(&parallel_run(domain, false), plan, check_parallel).unwrap_err();
    }
}

/// A gate makes two durable writes overlap: the second completes inside the first, in the same
/// sector.
#[test]
fn a_gate_holds_a_write_in_its_middle() {
    let media = CrashMedia::new(1024, PersistenceDomain::PageCache).unwrap();
    let gate = media.hold(Trigger::on(MediaOperation::WriteDurable));
    std::thread::scope(|scope| {
        scope.spawn(|| media.write_durable_unguarded(0, &[1; 520]).unwrap());
        gate.wait_until_reached();
        media.write_durable_unguarded(8, &[2; 8]).unwrap();
        gate.open();
    });
    media.acknowledge(1);
    let recording = media.recording();
    let states = |prefix: usize| -> Vec<(u8, u8, u8)> {
        let states = recording.crash_states(1, 100).filter(|state| state.prefix == prefix);
        states.map(|state| (state.image[0], state.image[8], state.image[512])).collect()
    };
    assert_eq!(states(1), [(1, 1, 0), (0, 0, 1), (1, 1, 1)]);
    assert_eq!(states(2), [(1, 2, 0), (1, 2, 1)]);
    // The second is durable, and with it the sector, which contains part of the first. The rest of
    // the first is not.
    assert_eq!(states(3), []);
    assert_eq!(states(5), [(1, 2, 1)]);
}

/// A panic of the code under test is a failure with its state, not the end of the run.
#[test]
fn a_panic_in_a_check_is_a_failure() {
    let (recording, _) = run(PersistenceDomain::PageCache, Bug::None, 3, 1);
    let plan = Plan { depth: 0, budget: 100, seed: 1 };
    let failure = explore(&recording, plan, |state| {
        assert!(state.marks().last_acknowledged() < Some(2), "too far");
        Ok(None)
    })
    .unwrap_err();
    assert!(failure.reason.contains("too far"), "{failure}");
    assert!(failure.description.starts_with("crash after acknowledged(2)"), "{failure}");
}

/// A recording that does not start from the state is refused.
#[test]
fn a_recovery_begins_with_its_state() {
    let (recording, _) = run(PersistenceDomain::Dax, Bug::None, 3, 1);
    let plan = Plan { depth: 1, budget: 100, seed: 1 };
    let elsewhere = CrashMedia::new(LEN_BYTES + 8, PersistenceDomain::Dax).unwrap();
    let failure = explore(&recording, plan, |_| Ok(Some(elsewhere.recording()))).unwrap_err();
    assert!(failure.reason.contains("does not begin with its state"), "{failure}");
}
