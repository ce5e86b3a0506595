//! The integration tests of this crate: one program, because each links everything that it tests.

mod model;
mod states;
#[path = "../support/mod.rs"]
mod support;
mod toy_log;
