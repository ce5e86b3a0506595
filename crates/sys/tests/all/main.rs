//! The integration tests of this crate: one program, because each links everything that it tests. Files beside this
//! directory are programs of their own, and say why.

mod high_fd;
mod robust;
mod shared_memory;
#[path = "../support/mod.rs"]
mod support;

/// The roles of children. Not a test by itself.
#[test]
fn child() {
    support::play(&[high_fd::ROLES, robust::ROLES, shared_memory::ROLES].concat());
}
