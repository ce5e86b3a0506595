//! The integration tests of this crate that start no processes: one program, because each links everything that it
//! tests. Files beside these directories are programs of their own, and say why.

#[macro_use]
#[path = "../common/mod.rs"]
mod common;
mod detach;
mod faults;
mod frames;
mod hints;
mod hostile;
mod mapping;
mod model;
mod one_store;
mod publish;
mod rows;
#[path = "../support/mod.rs"]
mod support;
mod visit;
mod visit_limits;
