//! Runs the bodies of the fuzz targets (`fuzz/`) on random bytes, so that they keep working.

use crate::support::parsers;
use aquifer_testkit::campaign::fuzz;

#[test]
fn any_bytes_as_a_superblock() {
    fuzz(5000, 600, parsers::superblock);
}

#[test]
fn any_bytes_as_a_saved_state() {
    fuzz(5000, 600, parsers::saved);
}

#[test]
fn any_bytes_as_a_slot() {
    fuzz(5000, 520, parsers::slot);
}

#[test]
fn any_bytes_as_a_record() {
    fuzz(5000, 9000, parsers::record);
}
