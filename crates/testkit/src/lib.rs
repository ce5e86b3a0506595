//! Shared test support: seeded randomness, access traces, plain models of published algorithms to
//! compare the real implementations with, and a device, a file system and an object server that fail. It knows no
//! pool: `aquifer-crashkit` has what tests of pools share.
//!
//! Everything here is deterministic: the same seed gives the same trace on every machine, so a
//! failure that prints its seed can be replayed. The code is meant to be obviously correct, not
//! fast or memory-efficient.
#![forbid(unsafe_code)]

pub mod campaign;
pub mod child;
pub mod executor;
pub mod failing_device;
pub mod faulty_files;
pub mod model;
#[cfg(feature = "object-server")]
pub mod object_server;
pub mod rng;
pub mod scratch;
pub mod stripes;
pub mod trace;
pub mod watchdog;
