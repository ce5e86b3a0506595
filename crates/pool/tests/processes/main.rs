//! The integration tests of this crate that start processes or fork. A program apart from the others: until it starts
//! its program, a child has copies of all descriptors of its parent, and so keeps the locks of files that other tests
//! closed.

mod bad_input;
mod broker;
mod closed_files;
#[path = "../common/mod.rs"]
mod common;
mod create;
#[path = "../disk/mod.rs"]
mod disk;
mod forged_segment;
mod huge;
mod image;
mod large;
mod lent_pins;
mod lost_cache;
mod many;
mod notes;
mod packed;
mod points;
mod processes;
mod segment_directory;
mod sole;
mod space;
mod strays;
#[path = "../support/mod.rs"]
mod support;
mod threads;
mod windows;

/// The roles of children. Not a test by itself.
#[test]
fn child() {
    aquifer_testkit::child::play(
        &[
            broker::ROLES,
            closed_files::ROLES,
            create::ROLES,
            forged_segment::ROLES,
            huge::ROLES,
            image::ROLES,
            large::ROLES,
            lent_pins::ROLES,
            lost_cache::ROLES,
            many::ROLES,
            notes::ROLES,
            packed::ROLES,
            points::ROLES,
            processes::ROLES,
            segment_directory::ROLES,
            sole::ROLES,
            space::ROLES,
            strays::ROLES,
            threads::ROLES,
            windows::ROLES,
        ]
        .concat(),
    );
}
