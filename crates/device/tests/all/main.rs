//! The integration tests of this crate: one program, because each links everything that it tests.

mod decorators;
mod file_device;
mod memory_and_dax;
mod queue;
#[path = "../support/mod.rs"]
mod support;
