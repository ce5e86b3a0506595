//! Tests of the library as programs in C meet it: linked once for all of them.

mod broker;
#[path = "../../examples/cost.rs"]
mod cost;
mod examples;
mod install;
mod programs;
mod support;
mod symbols;
mod valgrind;

#[test]
fn what_calls_cost_is_measured() {
    let directory = tempfile::tempdir().unwrap();
    let costs = cost::measure(directory.path(), 2, 300).unwrap();
    assert!(costs.len() == 5 && costs.iter().all(|cost| cost.c_ns > 0.0 && cost.rust_ns > 0.0));
}
