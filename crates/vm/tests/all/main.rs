//! The integration tests of this crate: one program, because each links everything that it tests.

mod faulted_pages;
mod statics;

/// The roles of children. Not a test by itself.
#[test]
fn child() {
    aquifer_testkit::child::play(faulted_pages::ROLES);
}
