//! The integration tests of this crate that start no processes: one program, because each links everything that it
//! tests.

mod attached_heap;
#[path = "../../examples/common/mod.rs"]
mod common;
mod crash;
mod heap_examples;
#[path = "../../../pheap/tests/support/mod.rs"]
mod heap_support;
mod objects;
mod psync;
mod ranges;
mod recorded;
mod resize;
mod rollback;
#[path = "../support/mod.rs"]
mod support;
