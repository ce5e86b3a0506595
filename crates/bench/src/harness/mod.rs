//! Runs contenders so that their figures are comparable.
//!
//! ```text
//! parent: round 0: A B C   round 1: B C A   round 2: C A B …       one child at a time
//!                  │
//!                  ├─ start this executable again, with its own arguments and CHILD_VARIABLE set
//!                  ├─ move it into a fresh memory-limited group
//!                  ├─ write the job to its standard input ──────▶ open, warm up, measure
//!                  └─ read the outcome from its standard output ◀──── one JSON line
//! ```
//! A contender gets a separate process for every round: nothing is inherited from the previous one,
//! neither memory nor page tables nor a group's charges. The child does no work before it has read
//! its job, so all its allocations are charged to the group. Rounds are interleaved and rotated, so
//! that drift of the machine (temperature, other load, device state) affects all contenders
//! equally.
//!
//! If several processes must work at once, the child starts them in the same way ([`Member`]): each
//! prepares, reports that it is ready, and waits for the start signal.

mod child;
mod schedule;
mod team;

pub use child::run_if_child;
pub use schedule::{Cell, Schedule, progress_bar, run_to_its_death};
pub use team::{Member, wait_to_go};
