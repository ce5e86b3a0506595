//! The integration tests of this crate: one program, because each links everything that it tests.

#[path = "../common/mod.rs"]
mod common;
mod file_table;
mod parsers;
#[path = "../support/mod.rs"]
mod support;
