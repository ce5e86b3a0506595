//! Address space: where mappings live and who serves their faults.
//!
//! * [`arena`]: one reserved range of addresses, cut into slots. Every mapping of Aquifer is placed in
//!   it, so the owner of a faulting address is found by a subtraction and a shift.
//! * [`router`]: the one handler of SIGBUS and SIGSEGV. Faults in the arena go to their owner, foreign
//!   ones to whoever was there before.
//! * [`fork`]: what a child process may still do, which is: nothing with its parent's mappings.
//! * `stack`: room for the handler where a thread's alternate stack is too small.

pub mod arena;
pub mod fork;
pub mod router;
mod stack;

pub use arena::{Arena, Reservation};
pub use fork::{NotInherited, ProcessMark};
pub use router::{FaultOwner, Served};
pub use stack::prepare_thread;

use std::io;

/// What can go wrong with address space.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// The process has no room for the reservation.
    #[error(
        "cannot reserve {len_bytes} bytes of address space ({source}); raise `ulimit -v`, or map less \
         at a time"
    )]
    Reserve {
        /// Bytes asked for.
        len_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// All slots of the arena are taken.
    #[error(
        "no {len_bytes} contiguous bytes are left of the {arena_bytes} bytes reserved for mappings; \
         drop mappings that are no longer used"
    )]
    ArenaFull {
        /// Bytes asked for.
        len_bytes: u64,
        /// The size of the arena.
        arena_bytes: u64,
    },
    /// A handler could not be installed.
    #[error("cannot install the fault handler: {0}")]
    Handler(#[source] io::Error),
    /// A mapping call failed inside the reservation.
    #[error("cannot map {len_bytes} bytes: {source}")]
    Map {
        /// Bytes asked for.
        len_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The calling process is a fork of the one that owns the object.
    #[error(
        "this process is a fork of the one that made the mapping; make a new cache in the child"
    )]
    Forked,
}
