//! Any bytes as changes of a whole pool, which is then checked, opened and read.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/check/tests/support/mod.rs"]
mod support;

fuzz_target!(|data: &[u8]| support::any_changes::image(data));
