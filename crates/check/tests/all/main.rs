//! The integration tests of this crate: one program, because each links everything that it tests.

mod damage;
mod damaged_files;
mod files;
mod pool;
#[path = "../support/mod.rs"]
mod support;

/// The roles of children. Not a test by itself.
#[test]
fn child() {
    aquifer_testkit::child::play(pool::ROLES);
}
