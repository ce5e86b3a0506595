//! Any bytes as the header of a saved state, and as changes of a pool that was closed cleanly, most of
//! them with recomputed checksums.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/check/tests/support/mod.rs"]
mod changes;
#[path = "../../crates/format/tests/support/mod.rs"]
mod format;

fuzz_target!(|data: &[u8]| {
    format::parsers::saved(data);
    changes::any_changes::saved(data);
});
