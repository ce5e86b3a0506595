//! What a server knows of the kernel's side, in memory that can outlive it.

mod memory;
mod nodes;
mod notes;

pub use memory::{MOST_WAITING, Memory, WaitNote, Waits, Word};
pub use nodes::NodeTable;
pub use notes::{Done, Notes, Outcome, Shape};
