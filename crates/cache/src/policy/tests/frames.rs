//! No policy loses a frame or names one it does not hold, for any order of operations.

use proptest::prelude::*;

use super::key;
use crate::ids::FrameId;
use crate::policy::{HitTable, Policy, PolicyKind};

const MAX_FRAMES: usize = 48;

#[derive(Debug, Clone)]
enum Step {
    Insert {
        page: u64,
    },
    Remove {
        frame: u32,
    },
    Hit {
        frame: u32,
    },
    Demote {
        frame: u32,
    },
    Victims {
        want: usize,
    },
    /// Returns the `nth` of the victims that are neither evicted nor returned yet.
    Return {
        nth: usize,
    },
    /// Evicts all of those victims.
    Evict,
    Resize {
        frames: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let frame = 0..MAX_FRAMES as u32;
    prop_oneof![
        12 => (0u64..100).prop_map(|page| Step::Insert { page }),
        2 => frame.clone().prop_map(|frame| Step::Remove { frame }),
        8 => frame.clone().prop_map(|frame| Step::Hit { frame }),
        3 => frame.prop_map(|frame| Step::Demote { frame }),
        2 => (0usize..6).prop_map(|want| Step::Victims { want }),
        2 => (0usize..9).prop_map(|nth| Step::Return { nth }),
        2 => Just(Step::Evict),
        1 => (0usize..=MAX_FRAMES).prop_map(|frames| Step::Resize { frames }),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Held,
    Victim,
}

/// The state of each frame, according to the cache.
struct Cache {
    policy: Box<dyn Policy>,
    hits: HitTable,
    states: [State; MAX_FRAMES],
    pages: [u64; MAX_FRAMES],
}

impl Cache {
    fn new(kind: PolicyKind) -> Cache {
        let mut policy = kind.build();
        // Identifiers above the first size are added later.
        policy.resize(MAX_FRAMES / 2, MAX_FRAMES / 2);
        policy.resize(MAX_FRAMES, MAX_FRAMES);
        Cache {
            hits: HitTable::new(policy.hit_mode(), MAX_FRAMES),
            policy,
            states: [State::Free; MAX_FRAMES],
            pages: [0; MAX_FRAMES],
        }
    }

    fn all(&self, state: State) -> Vec<usize> {
        (0..MAX_FRAMES).filter(|&frame| self.states[frame] == state).collect()
    }

    fn victims(&mut self, want: usize) -> Result<(), TestCaseError> {
        let mut victims = Vec::with_capacity(want);
        let pages = self.pages;
        let page_of = |frame: FrameId| key(pages[frame.0 as usize]);
        self.policy.victims(want, &self.hits, &page_of, &mut victims);
        prop_assert_eq!(victims.capacity(), want.max(victims.len()), "it made room of its own");
        // The frames are fewer than a call may examine, so it names all that are requested.
        prop_assert_eq!(victims.len(), want.min(self.all(State::Held).len()));
        for frame in victims {
            let state = &mut self.states[frame.0 as usize];
            prop_assert_eq!(*state, State::Held, "{:?} was named", frame);
            *state = State::Victim;
        }
        Ok(())
    }

    fn run(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match *step {
            Step::Insert { page } => {
                if let Some(&frame) = self.all(State::Free).first() {
                    self.states[frame] = State::Held;
                    self.pages[frame] = page;
                    let id = FrameId(frame as u32);
                    self.hits.reset(id);
                    self.policy.inserted(id, key(page), &self.hits);
                }
            }
            // Also for frames that the policy does not hold: it must ignore those.
            Step::Remove { frame } => {
                self.policy.removed(FrameId(frame));
                self.states[frame as usize] = State::Free;
            }
            Step::Hit { frame } => self.hits.hit(FrameId(frame)),
            Step::Demote { frame } => self.policy.demoted(FrameId(frame), &self.hits),
            Step::Victims { want } => self.victims(want)?,
            Step::Return { nth } => {
                if let Some(&frame) = self.all(State::Victim).get(nth) {
                    self.states[frame] = State::Held;
                    let page = key(self.pages[frame]);
                    self.policy.returned(FrameId(frame as u32), page, &self.hits);
                }
            }
            Step::Evict => {
                for frame in self.all(State::Victim) {
                    self.states[frame] = State::Free;
                }
            }
            Step::Resize { frames } => self.policy.resize(frames, MAX_FRAMES),
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_frame_is_lost_or_named_twice(
        steps in prop::collection::vec(step(), 0..400),
    ) {
        for &kind in PolicyKind::all() {
            let mut cache = Cache::new(kind);
            for step in &steps {
                cache.run(step)?;
            }
            cache.victims(MAX_FRAMES)?;
            prop_assert_eq!(cache.all(State::Held), Vec::<usize>::new(), "{}", kind);
        }
    }
}
