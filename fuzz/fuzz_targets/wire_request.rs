//! Any bytes as a request of FUSE.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/fuse/tests/support/mod.rs"]
mod support;

fuzz_target!(|data: &[u8]| support::request(data));
