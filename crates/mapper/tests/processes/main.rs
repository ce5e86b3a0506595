//! The integration tests of this crate that start processes or fork. A program apart from the others: until it starts
//! its program, a child has copies of all descriptors of its parent, and so keeps the locks of files that other tests
//! closed.

mod bad_input;
mod budget;
mod closed_files;
mod fork_calibrations;
mod fuse;
mod large_and_sparse;
mod many_files;
mod stores;
mod views;

/// The roles of children. Not a test by itself.
#[test]
fn child() {
    aquifer_testkit::child::play(
        &[
            bad_input::ROLES,
            closed_files::ROLES,
            fork_calibrations::ROLES,
            fuse::ROLES,
            large_and_sparse::ROLES,
            many_files::ROLES,
            stores::ROLES,
        ]
        .concat(),
    );
}
