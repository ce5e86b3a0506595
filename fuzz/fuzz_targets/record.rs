//! Any bytes as a record of the log.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/format/tests/support/mod.rs"]
mod support;

fuzz_target!(|data: &[u8]| support::parsers::record(data));
