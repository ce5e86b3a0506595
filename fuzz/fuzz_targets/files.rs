//! Any bytes as changes of a pool with files, which is then checked, opened, read, written and repaired.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/check/tests/support/mod.rs"]
mod support;

fuzz_target!(|data: &[u8]| support::damaged::image(data));
