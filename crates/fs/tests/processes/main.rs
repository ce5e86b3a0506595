//! The integration tests of this crate that start processes or fork. A program apart from the others: until it starts
//! its program, a child has copies of all descriptors of its parent, and so keeps the locks of files that other tests
//! closed.

mod acl;
#[path = "../../../object/tests/support/actor.rs"]
mod actor;
mod bad_neighbours;
mod closing;
mod hand_over;
#[path = "../killed/mod.rs"]
mod killed;
mod locks;
mod odd;
mod processes;
mod room;
#[path = "../scratch/mod.rs"]
mod scratch;
mod start;
mod unnamed;
mod views;

/// The roles of children. Not a test by itself.
#[test]
fn child() {
    aquifer_testkit::child::play(
        &[
            acl::ROLES,
            bad_neighbours::ROLES,
            closing::ROLES,
            hand_over::ROLES,
            locks::ROLES,
            odd::ROLES,
            processes::ROLES,
            room::ROLES,
            start::ROLES,
            unnamed::ROLES,
        ]
        .concat(),
    );
}
