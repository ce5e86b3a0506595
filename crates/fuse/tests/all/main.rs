//! The integration tests of this crate: one program, because each links everything that it tests.

mod any_bytes;
mod kept;
mod mounted;
mod shared;
#[path = "../support/mod.rs"]
mod support;

/// The roles of children. Not a test by itself.
#[test]
fn child() {
    aquifer_testkit::child::play(&[kept::ROLES, mounted::ROLES, shared::ROLES].concat());
}

/// The keeper of a mount, in a child of a test. Otherwise does nothing.
#[test]
fn keeper() {
    kept::place::in_child(aquifer_fuse::keeper_main);
}

/// A server.
#[test]
fn server() {
    kept::place::in_child(kept::place::server);
}
