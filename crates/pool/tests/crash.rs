//! Crash states: whatever a power cut leaves, recovery gives exactly the last acknowledged state or the one in flight.

mod common;

use std::sync::Arc;

use aquifer_pool::media::PersistenceDomain;
use aquifer_pool::{Mutant, Pool};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::crash::{
    CrashFailure, CrashMedia, CrashState, Explored, Mutation, Plan, Recording, Verdict, explore,
};
use aquifer_testkit::rng::Rng;
use common::{Change, Model, alone, contents, open, small};

const POOL_BYTES: u64 = 512 << 10;

/// The states that a run of random changes goes through; the one with index `id` is acknowledged by mark `id`.
struct History {
    states: Vec<Model>,
}

/// Runs random changes on fresh media, and records them from the first pool that is complete on.
fn record(
    seed: u64,
    changes: u64,
    domain: PersistenceDomain,
    mutant: Option<Mutant>,
) -> (Recording, History) {
    let fresh = Arc::new(CrashMedia::new(POOL_BYTES, domain).unwrap());
    Pool::create_on(fresh.clone(), &small(), &alone(None)).unwrap();
    let media = Arc::new(CrashMedia::from_image(&fresh.image(), domain).unwrap());
    let mut rng = Rng::new(seed);
    let mut pool = open(&media, &alone(mutant)).unwrap();
    let mut history = History { states: vec![Model::new()] };
    media.begin(0);
    media.acknowledge(0);
    for id in 1..=changes {
        let mut model = history.states.last().unwrap().clone();
        let change = Change::random(&mut rng, &model, id);
        change.apply(&mut model);
        history.states.push(model);
        media.begin(id);
        if change == Change::Reopen {
            drop(pool);
            pool = open(&media, &alone(mutant)).unwrap();
        }
        change.run(&pool).unwrap_or_else(|error| panic!("seed {seed}, {change:?}: {error}"));
        media.acknowledge(id);
    }
    // The pool is lost in the crash: what its closing does is not part of the recording.
    let recording = media.recording();
    drop(pool);
    (recording, history)
}

/// Recovers a crash state and compares it with what the marks allow.
fn check(state: &CrashState<'_>, history: &History, mutant: Option<Mutant>) -> Verdict {
    let media = Arc::new(state.media()?);
    let pool = open(&media, &alone(mutant))?;
    let mut found = contents(&pool)?;
    // Made by a check whose recovery was crashed.
    let _ = found.remove(b"after".as_slice());
    let acknowledged = state.marks().last_acknowledged().unwrap_or(0);
    let in_flight = state.marks().in_flight().iter().next().copied();
    let allowed: Vec<u64> = [Some(acknowledged), in_flight].into_iter().flatten().collect();
    let Some(id) = allowed.iter().rev().find(|id| history.states[**id as usize] == found) else {
        return Err(format!(
            "found {found:?}, allowed are {:?}",
            allowed.iter().map(|id| &history.states[*id as usize]).collect::<Vec<_>>()
        )
        .into());
    };
    // From here on the caller has seen this state: a second crash must not change it.
    match in_flight {
        Some(in_flight) if *id == in_flight => media.acknowledge(in_flight),
        Some(in_flight) => media.withdraw(in_flight),
        None => {}
    }
    // The pool works on: a change after recovery is there after the next one.
    if common::find(&pool, b"after")?.is_none() {
        common::create(&pool, b"after", 1)?;
    }
    let recording = media.recording();
    drop(pool);
    Ok(Some(recording))
}

fn run(
    seed: u64,
    changes: u64,
    domain: PersistenceDomain,
    budget: u64,
    mutant: Option<Mutant>,
) -> Result<Explored, Box<CrashFailure>> {
    let (recording, history) = record(seed, changes, domain, mutant);
    let plan = Plan { depth: 1, budget, seed };
    explore(&recording, plan, |state| check(state, &history, mutant))
}

fn survives(domain: PersistenceDomain) {
    let first = seed(0);
    let mut states = 0;
    for seed in first..first + steps(8) as u64 {
        match run(seed, 30, domain, 1500, None) {
            Ok(explored) => states += explored.states(),
            Err(failure) => panic!("seed {seed}: {failure}"),
        }
    }
    println!("{states} crash states on {domain}");
}

#[test]
fn every_crash_state_on_a_disk_recovers() {
    survives(PersistenceDomain::PageCache);
}

#[test]
fn every_crash_state_on_persistent_memory_recovers() {
    survives(PersistenceDomain::Dax);
}

#[test]
fn every_killed_process_in_memory_files_recovers() {
    survives(PersistenceDomain::Volatile);
}

/// Every deliberate mistake that a crash can show is noticed.
#[test]
fn every_mutant_is_caught() {
    let domain = PersistenceDomain::PageCache;
    let mut missed = Vec::new();
    for mutant in [
        Mutant::NoRevoke,
        Mutant::EarlyReuse,
        Mutant::CommitBeforeData,
        Mutant::TrustStoredState,
        Mutant::SameGeneration,
        Mutant::NoChecksum,
        Mutant::TailBeforeFlush,
        Mutant::NoFlush,
        Mutant::BothSuperblocksAtOnce,
    ] {
        let caught = (0..20).find_map(|seed| run(seed, 40, domain, 1500, Some(mutant)).err());
        match caught {
            Some(failure) => println!("{mutant:?}: {}", failure.reason),
            None => missed.push(mutant),
        }
    }
    assert!(missed.is_empty(), "not noticed: {missed:?}");
}

/// Media that lose a flush, write two things the other way round, or take durable writes for plain ones: each of
/// these would be noticed, so each of these operations is needed and looked at.
#[test]
fn misbehaving_media_are_caught() {
    let domain = PersistenceDomain::PageCache;
    let (recording, history) = record(5, 30, domain, None);
    let is_caught = |mutation: &Mutation| {
        let plan = Plan { depth: 0, budget: 1500, seed: 1 };
        let recording = recording.mutated(mutation);
        explore(&recording, plan, |state| check(state, &history, None).map(|_| None)).is_err()
    };
    for general in [Mutation::DropFlushes, Mutation::DropWriteBacks, Mutation::DurableIsPlain] {
        assert!(is_caught(&general), "{general}");
    }
    let swaps = Mutation::all(&recording)
        .into_iter()
        .filter(|mutation| matches!(mutation, Mutation::SwapWithNext(_)));
    let caught = swaps.filter(is_caught).take(3).count();
    assert!(caught > 0, "no swapped write was noticed");
    println!("{caught} of the first swaps noticed");
}
