//! What the programs of Aquifer, the command and the benches, need to know of the machine and of the person at it.
//!
//! | module | |
//! |---|---|
//! | [`failure`] | how a program says why it failed |
//! | [`units`] | sizes as people write them |
//! | [`interrupt`] | Ctrl-C as an error |
//! | [`machine`] | processors, memory, kernel |
//! | [`place`] | a directory, what it is on, and devices made for a run |
//! | [`limit`] | memory limits by control groups |

pub mod failure;
pub mod interrupt;
pub mod limit;
pub mod machine;
pub mod place;
pub mod units;

pub use limit::{LimitError, Limiter};
pub use machine::Machine;
pub use place::{Place, PlaceError, free_bytes};
pub use units::Bytes;
