//! The integration tests of this crate that start no processes: one program, because each links everything that it
//! tests.

mod allocator;
#[path = "../common/mod.rs"]
mod common;
mod crash;
mod grow;
mod media;
mod packed_input;
mod parallel;
mod same_media;
mod saved;
mod superblocks;
#[path = "../support/mod.rs"]
mod support;
