//! The integration tests of this crate that start processes or fork. A program apart from the others: until it starts
//! its program, a child has copies of all descriptors of its parent, and so keeps the locks of files that other tests
//! closed.

#[path = "../support/actor.rs"]
mod actor;
mod fork;
mod processes;
mod races;
#[path = "../support/mod.rs"]
mod support;

/// The roles of children. Not a test by itself.
#[test]
fn child() {
    aquifer_testkit::child::play(&[fork::ROLES, processes::ROLES, races::ROLES].concat());
}
