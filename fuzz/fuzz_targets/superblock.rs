//! Any bytes as a superblock.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/format/tests/support/mod.rs"]
mod support;

fuzz_target!(|data: &[u8]| support::parsers::superblock(data));
