//! Any bytes as a slot: an inode, or the pool's head.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/format/tests/support/mod.rs"]
mod support;

fuzz_target!(|data: &[u8]| support::parsers::slot(data));
