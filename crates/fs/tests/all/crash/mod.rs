//! Crash states: whatever a power cut leaves, the tree is as it was at one moment after the last
//! sync, no file has a byte that it never had at that place, and everything synced is there.
//!
//! * [`history`]: the history of a program's operations, and the states that a crash may leave.
//! * [`random`]: long runs of random operations on a tiny pool, whose pages are freed and reused
//!   all the time.
//! * [`orders`]: each change of page ownership, followed by each way to store bytes.

mod atomic;
mod history;
mod orders;
mod random;
mod synced;
