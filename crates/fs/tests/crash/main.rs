//! Crash states: whatever a power cut leaves, the tree is as it was at one moment after the last sync, no file has a byte that it
//! never had there, and what was synced is there.
//!
//! * [`history`]: what a program has done and what a crash may leave of it.
//! * [`random`]: long runs of random operations on a tiny pool, whose pages are freed and reused all the time.
//! * [`orders`]: each change of what pages belong to whom, followed by each way to store bytes.

mod history;
mod orders;
mod random;
#[path = "../scratch/mod.rs"]
mod scratch;
