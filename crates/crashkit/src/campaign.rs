//! Random crash campaigns: a test gives a run of random changes for a seed, and what recovery must
//! find; these do the rest.
//!
//! The run marks state `id` with [`CrashMedia::begin`] before the change that leads to it, and with
//! [`CrashMedia::acknowledge`] once it is durable, and explores its recording.

use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};

use aquifer_testkit::campaign::{seed, steps};

use crate::explore::{CrashFailure, Explored};
use crate::media::CrashMedia;
use crate::states::CrashState;

/// With how many seeds a run may miss a deliberate mistake.
const MUTANT_SEEDS: u64 = 20;

/// Runs with `usual` seeds, or as many as the campaign's length says, and prints how many crash
/// states there were.
///
/// # Panics
/// With the seed and the first crash state that does not recover.
pub fn survives(
    domain: impl Display,
    usual: usize,
    run: impl Fn(u64) -> Result<Explored, Box<CrashFailure>>,
) {
    let first = seed(0);
    let mut states = 0;
    for seed in first..first + steps(usual) as u64 {
        match run(seed) {
            Ok(explored) => states += explored.states(),
            Err(failure) => panic!("seed {seed}: {failure}"),
        }
    }
    println!("{states} crash states on {domain}");
}

/// Asserts that each deliberate mistake is noticed with one of a few seeds: by a crash state that
/// does not recover, or by a panic of the run before any crash.
///
/// # Panics
/// With the mistakes that are not noticed.
pub fn catches<M: Copy + Debug>(
    mutants: &[M],
    run: impl Fn(u64, M) -> Result<Explored, Box<CrashFailure>>,
) {
    let mut missed = Vec::new();
    for &mutant in mutants {
        let noticed = |seed| match catch_unwind(AssertUnwindSafe(|| run(seed, mutant))) {
            Ok(explored) => explored.err().map(|failure| failure.reason),
            Err(_) => Some("the run panicked".to_owned()),
        };
        match (0..MUTANT_SEEDS).find_map(noticed) {
            Some(reason) => println!("{mutant:?}: {reason}"),
            None => missed.push(mutant),
        }
    }
    assert!(missed.is_empty(), "not noticed: {missed:?}");
}

/// Checks that recovery has found a state that the marks allow: the last that was acknowledged, or
/// one in flight. Marks on the recovered media that the caller has seen it, so that a second crash
/// must not change it. `states[id]` is the state with mark `id`.
///
/// # Errors
/// What was found, and what is allowed.
pub fn settle<M: PartialEq + Debug>(
    state: &CrashState<'_>,
    media: &CrashMedia,
    states: &[M],
    found: &M,
) -> Result<(), String> {
    let acknowledged = state.marks().last_acknowledged().unwrap_or(0);
    let in_flight = state.marks().in_flight().iter().copied().filter(|id| *id > acknowledged);
    let allowed: Vec<u64> = std::iter::once(acknowledged).chain(in_flight).collect();
    let Some(&id) = allowed.iter().rev().find(|id| states[**id as usize] == *found) else {
        let allowed: Vec<&M> = allowed.iter().map(|id| &states[*id as usize]).collect();
        return Err(format!("found {found:?}, allowed are {allowed:?}"));
    };
    if id > acknowledged {
        media.acknowledge(id);
    }
    allowed.iter().filter(|later| **later > id).for_each(|later| media.withdraw(*later));
    Ok(())
}
