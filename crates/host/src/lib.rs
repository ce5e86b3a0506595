//! What Aquifer's programs (the command and the benches) share: the machine, error reports,
//! interruption.
//!
//! | module | |
//! |---|---|
//! | [`failure`] | error reports |
//! | [`units`] | human-readable sizes |
//! | [`interrupt`] | Ctrl-C as an error |
//! | [`machine`] | processors, memory, kernel |
//! | [`place`] | a directory, its file system and device, and devices made for a run |
//! | [`keep`] | keeping a pool open |
//! | [`limit`] | memory limits by control groups |

pub mod failure;
pub mod interrupt;
pub mod keep;
pub mod limit;
pub mod machine;
pub mod place;
pub mod units;

pub use limit::{LimitError, Limiter};
pub use machine::Machine;
pub use place::{Place, PlaceError, free_bytes};
pub use units::Bytes;
