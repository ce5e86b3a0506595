//! The integration tests of this crate: one program, because each links everything that it tests.

mod collections;
mod heap;
mod heap_damage;
mod heap_locality;
#[path = "../support/mod.rs"]
mod support;
