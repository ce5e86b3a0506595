//! Shared test support: seeded randomness, access traces, plain models of published algorithms to
//! compare the real implementations with, media that enumerate what a crash may leave, and a file
//! system that fails.
//!
//! Everything here is deterministic: the same seed gives the same trace on every machine, so a
//! failure that prints its seed can be replayed. The code is meant to be obviously correct, not
//! fast or memory-efficient.
#![deny(unsafe_code)]

pub mod campaign;
pub mod child;
pub mod crash;
pub mod failing_device;
pub mod faulty_files;
pub mod model;
pub mod rng;
pub mod stripes;
pub mod trace;
#[allow(unsafe_code)] // It exists to say once why the unsafe operations are sound in tests.
pub mod unguarded;
