//! The integration tests of this crate that start no processes: one program, because each links everything that it
//! tests.

mod attributes;
#[path = "../common/mod.rs"]
mod common;
mod crash;
mod damaged_slots;
mod files;
mod fsx;
mod node_rules;
mod opening;
mod recycling;
#[path = "../scratch/mod.rs"]
mod scratch;
mod server;
mod space;
mod special;
mod std_parity;
mod zeros;
