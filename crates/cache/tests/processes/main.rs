//! The integration tests of this crate that start processes or fork. A program apart from the others: until it starts
//! its program, a child has copies of all descriptors of its parent, and so keeps the locks of files that other tests
//! closed.

#[path = "../common/mod.rs"]
mod common;
mod crash;
mod fork;
mod fork_calibrations;
mod kernel_backend;
mod large_and_empty;
mod process;
mod resize;
mod rows_fork;
mod serving_thread;
#[path = "../support/mod.rs"]
mod support;
mod visit_fork;

/// The roles of children. Not a test by itself.
#[test]
fn child() {
    aquifer_testkit::child::play(
        &[
            crash::ROLES,
            fork::ROLES,
            fork_calibrations::ROLES,
            large_and_empty::ROLES,
            process::ROLES,
            resize::ROLES,
            rows_fork::ROLES,
            serving_thread::ROLES,
            visit_fork::ROLES,
        ]
        .concat(),
    );
}
