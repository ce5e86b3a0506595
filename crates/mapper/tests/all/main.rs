//! The integration tests of this crate that start no processes: one program, because each links everything that it
//! tests.

mod ahead;
mod ranges;
