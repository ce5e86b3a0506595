//! Address space: where mappings live and who serves their faults.
//!
//! * [`arena`]: one reserved range of addresses, cut into slots. Every mapping of Aquifer is placed
//!   in it, so the owner of a faulting address is found by a subtraction and a shift.
//! * [`router`]: the one handler of SIGBUS and SIGSEGV. Faults in the arena go to their owner,
//!   foreign ones to the handler that was installed before.
//! * [`fork`]: what a forked child may still do: it may not use its parent's mappings.
//! * [`fixed`]: mappings at fixed addresses, which their contents depend on.
//! * [`bytes`]: access to memory that may change concurrently.
//! * [`guard`]: calls in which an unreadable page is replaced by zeros and reported as an error.
//! * [`file_mapping`]: a whole file, mapped in a mapping that can grow.
//! * [`drop_behind`]: a bound on the page cache that mapped files occupy.
//! * [`dirty`]: which pages of a private mapping were stored to.
//! * [`ephemeral`]: addresses for short-lived mappings; [`ephemeral::stitched`]: pieces of a file in
//!   them, as contiguous memory.
//! * [`mailbox`]: reads that a fault handler posts, and another thread answers.
//! * [`readahead`]: how far to read ahead of faults.
//! * [`window`]: write windows, during which a thread can store to guarded memory.
//! * [`worker`]: background threads, the bell that wakes them, and the end of their work.
//! * `zeroed`: slices of zeros that take memory only where they are used.
//! * `stack`: room for the handler where a thread's alternate stack is too small.

pub mod arena;
pub mod bytes;
pub mod dirty;
pub mod drop_behind;
pub mod ephemeral;
mod fault_owner;
pub mod file_mapping;
pub mod fixed;
pub mod fork;
pub mod guard;
pub mod mailbox;
mod missed;
pub mod readahead;
pub mod router;
mod stack;
mod sync;
pub mod window;
pub mod worker;
mod zeroed;

pub use arena::{Arena, Reservation};
pub use bytes::Bytes;
pub use dirty::{DirtyTracker, PageIndex, PageRun, TrackedKind, TrackerForm};
pub use ephemeral::stitched;
pub use fault_owner::{FaultOwner, Served};
pub use fixed::FixedRange;
pub use fork::{LifeMark, NotInherited, PerProcess, ProcessMark};
pub use missed::{Missed, has_missed_faults};
pub use stack::prepare_thread;
pub use window::{WindowKey, WriteWindow};
pub use zeroed::ZeroedSlice;

use std::io;

use aquifer_sys::sanitizer::Sanitizer;

/// The errors of address space management.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// The process has no room for the reservation.
    #[error(
        "cannot reserve {len_bytes} bytes of address space ({source}); raise `ulimit -v`, or map less \
         at a time"
    )]
    Reserve {
        /// Bytes requested.
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
        /// Bytes requested.
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
        /// Bytes requested.
        len_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The calling process is a fork of the one that owns the object.
    #[error(
        "this process is a fork of the one that made the mapping; make a new cache in the child, or \
         attach the object again"
    )]
    Forked,
    /// A range of fixed addresses that cannot be mapped.
    #[error("cannot map {len_bytes} bytes at the fixed address {address:#x}: {problem}")]
    FixedRange {
        /// First byte.
        address: u64,
        /// Bytes requested.
        len_bytes: u64,
        /// What is wrong with it.
        problem: fixed::RangeProblem,
    },
    /// Another mapping occupies a fixed address.
    #[error(
        "cannot map {len_bytes} bytes at the fixed address {address:#x}, where {by} lies; unmap that, \
         or map from a process that does not have it"
    )]
    AddressTaken {
        /// First byte.
        address: u64,
        /// Bytes requested.
        len_bytes: u64,
        /// The mapping that occupies the address, as named in `/proc/self/maps`.
        by: String,
    },
    /// A sanitizer owns the address space that fixed addresses come from.
    #[error(
        "cannot map {len_bytes} bytes at the fixed address {address:#x}: {sanitizer} owns the addresses \
         around it; run without it (AddressSanitizer works)"
    )]
    SanitizerAddress {
        /// The sanitizer.
        sanitizer: Sanitizer,
        /// First byte.
        address: u64,
        /// Bytes requested.
        len_bytes: u64,
    },
    /// No gap between the ranges taken is large enough.
    #[error(
        "no {len_bytes} contiguous bytes are free among the fixed addresses; destroy objects that are \
         no longer needed, or make this one smaller"
    )]
    WindowFull {
        /// Bytes requested.
        len_bytes: u64,
    },
    /// The kernel gave no random numbers.
    #[error("cannot get random numbers: {0}")]
    Random(#[source] io::Error),
    /// A thread could not be started.
    #[error(
        "cannot start a thread: {source}; raise `ulimit -u`, or the limit of the control group"
    )]
    Thread {
        /// The system's error.
        source: io::Error,
    },
    /// The page tables could not be searched for the pages stored to.
    #[error("cannot find the pages that were stored to: {doing}: {source}")]
    Tracking {
        /// What was tried, and what it needs.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
}
