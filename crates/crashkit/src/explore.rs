//! The driver: crash, recover, check; and crash the recovery too.
//!
//! ```text
//!  recording ──► crash states ──► check: recover, compare with the marks ──► its recording, if it gives one
//!                     ▲                                                             │
//!                     └──────────────────── one level deeper ◄──────────────────────┘
//! ```
//!
//! A recovery's recording starts from the crash state that it recovered and continues its marks. A
//! check that returns one should mark in it what its caller was shown, before it uses the pool any
//! further: `acknowledge` for what was present, `withdraw` for what was in flight and is missing.
//! Then a second crash may not change the answer.
//!
//! # The budget
//! Without a second level the recording gets all of it. With one, it gets half, and the recoveries
//! share the other half: it accumulates until the next recovery has enough for [`LEAST_NESTED`]
//! states, so that few recoveries are crashed thoroughly instead of many at a single point. States
//! that two recoveries have in common are checked once.

use std::any::Any;
use std::collections::HashSet;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::recording::Recording;
use crate::states::{CrashState, CrashStates, Origin};

/// A recovery is crashed in this many ways, if it has that many and the budget allows them, or not
/// at all.
const LEAST_NESTED: u64 = 64;

/// The extent of an exploration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// How many times a recovery is itself crashed: 0 for never.
    pub depth: u32,
    /// Maximum number of states checked, on all levels together.
    pub budget: u64,
    /// Determines the selection of states.
    pub seed: u64,
}

/// The result of a check: an error if recovery from the state went wrong; otherwise the recording
/// of what recovery did to [`CrashState::media`], if that is to be crashed too.
pub type Verdict = Result<Option<Recording>, Box<dyn Error>>;

/// Statistics of an exploration that found no failure.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Explored {
    /// States checked, per level.
    pub states_by_depth: Vec<u64>,
    /// States skipped because an identical one had been checked.
    pub duplicates: u64,
    /// Recoveries that were crashed.
    pub recoveries: u64,
}

impl Explored {
    /// Returns the number of states checked.
    pub fn states(&self) -> u64 {
        self.states_by_depth.iter().sum()
    }
}

/// A crash state from which recovery went wrong.
#[derive(Debug, thiserror::Error)]
#[error(
    "state {number} (seed {seed}, budget {budget}): {reason}\n  {description}\n  acknowledged up to \
     {last_acknowledged:?}, in flight {in_flight:?}\n{listing}"
)]
pub struct CrashFailure {
    /// The check's error or panic message.
    pub reason: String,
    /// A description of the state.
    pub description: String,
    /// The number of the state, counted from 1.
    pub number: u64,
    /// How many recoveries were crashed before it.
    pub depth: u32,
    /// The image, for inspection.
    pub image: Vec<u8>,
    last_acknowledged: Option<u64>,
    in_flight: Vec<u64>,
    seed: u64,
    budget: u64,
    listing: String,
}

/// Checks the crash states of a recording, and of the recordings that the checks return. Stops at
/// the first failure. A panic in `check` is a failure.
///
/// ```
/// use aquifer_crashkit::unguarded::UnguardedMedia;
/// use aquifer_pool::media::{Media, PersistenceDomain};
/// use aquifer_crashkit::{CrashMedia, Plan, explore};
///
/// // Two copies of a number, written one after the other: one of them is always whole.
/// let media = CrashMedia::new(2048, PersistenceDomain::PageCache)?;
/// for id in 1..=3u8 {
///     media.begin(u64::from(id));
///     media.write_durable_unguarded(0, &[id; 1024]).unwrap();
///     media.write_durable_unguarded(1024, &[id; 1024]).unwrap();
///     media.acknowledge(u64::from(id));
/// }
/// let plan = Plan { depth: 0, budget: 1000, seed: 1 };
/// let explored = explore(&media.recording(), plan, |state| {
///     let whole = state.image().chunks(1024).find(|copy| copy.iter().all(|byte| *byte == copy[0]));
///     let id = u64::from(whole.ok_or("both copies are torn")?[0]);
///     let old_or_new = Some(id).filter(|id| *id > 0) == state.marks().last_acknowledged()
///         || state.marks().is_in_flight(id);
///     if old_or_new { Ok(None) } else { Err(format!("found {id}").into()) }
/// });
/// assert!(explored.unwrap().states() > 10);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn explore(
    recording: &Recording,
    plan: Plan,
    check: impl FnMut(&CrashState<'_>) -> Verdict,
) -> Result<Explored, Box<CrashFailure>> {
    let explored =
        Explored { states_by_depth: vec![0; plan.depth as usize + 1], ..Explored::default() };
    let mut exploration = Exploration { plan, explored, seen: HashSet::new(), check };
    exploration.level(recording, Origin::default(), plan.budget, plan.seed)?;
    Ok(exploration.explored)
}

struct Exploration<C> {
    plan: Plan,
    explored: Explored,
    /// Hashes of all states so far, while no enumeration owns them.
    seen: HashSet<u128>,
    check: C,
}

impl<C: FnMut(&CrashState<'_>) -> Verdict> Exploration<C> {
    /// Explores one recording and the levels below it; returns how much of the budget that took.
    fn level(
        &mut self,
        recording: &Recording,
        origin: Origin,
        budget: u64,
        seed: u64,
    ) -> Result<u64, Box<CrashFailure>> {
        let depth = origin.depth;
        let goes_deeper = depth < self.plan.depth;
        let own_budget = if goes_deeper { budget.div_ceil(2) } else { budget };
        let mut nested_left = budget - own_budget;
        let mut saved_up = 0;
        let seen = std::mem::take(&mut self.seen);
        let mut states = CrashStates::starting_at(recording, origin, seed, own_budget, seen);
        while let Some(state) = states.lend() {
            self.explored.states_by_depth[depth as usize] += 1;
            let recovery = self.check(&state)?;
            let Some(recovery) = recovery.filter(|_| goes_deeper) else { continue };
            if recovery.initial() != state.image() || recovery.domain() != recording.domain() {
                let reason = "the check returned a recording that does not begin with its state";
                return Err(self.failure(&state, reason.to_owned()));
            }
            let origin = state.as_origin();
            let share = nested_left.saturating_sub(saved_up) / (states.expected_left() + 1);
            saved_up += share;
            if saved_up >= LEAST_NESTED.min(nested_left.div_ceil(2)) && saved_up > 0 {
                self.seen = std::mem::take(states.seen());
                self.explored.recoveries += 1;
                let below = seed.rotate_left(7) ^ states.enumerated().states;
                let used = self.level(&recovery, origin, saved_up, below)?;
                nested_left = nested_left.saturating_sub(used);
                saved_up = saved_up.saturating_sub(used);
                *states.seen() = std::mem::take(&mut self.seen);
            }
        }
        let enumerated = states.enumerated();
        self.explored.duplicates += enumerated.duplicates;
        self.seen = std::mem::take(states.seen());
        Ok(enumerated.states + (budget - own_budget - nested_left))
    }

    fn check(&mut self, state: &CrashState<'_>) -> Result<Option<Recording>, Box<CrashFailure>> {
        let reason = match catch_unwind(AssertUnwindSafe(|| (self.check)(state))) {
            Ok(Ok(recovery)) => return Ok(recovery),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("panicked: {}", panic_message(&*panic)),
        };
        Err(self.failure(state, reason))
    }

    fn failure(&self, state: &CrashState<'_>, reason: String) -> Box<CrashFailure> {
        Box::new(CrashFailure {
            reason,
            description: state.description(),
            number: self.explored.states(),
            depth: state.depth(),
            image: state.image().to_vec(),
            last_acknowledged: state.marks().last_acknowledged(),
            in_flight: state.marks().in_flight().iter().copied().collect(),
            seed: self.plan.seed,
            budget: self.plan.budget,
            listing: state.listing(),
        })
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}
