//! The integration tests of this crate: one program, because each links everything that it tests.

#[cfg(feature = "remote")]
mod cache;
mod command;
mod files;
mod keep;
mod mount;
mod object;
mod pool;
#[cfg(feature = "remote")]
mod publish;
#[cfg(feature = "remote")]
mod remote;
mod serve;
#[path = "../support/mod.rs"]
mod support;

/// The roles of children. Not a test by itself.
#[test]
fn child() {
    aquifer_testkit::child::play(mount::ROLES);
}
