//! The integration tests of this crate that start no processes: one program, because each links everything that it
//! tests. Files beside these directories are programs of their own, and say why.

mod credentials;
mod errors;
mod publish;
mod reads;
mod real_servers;
mod store;
#[path = "../support/mod.rs"]
mod support;
mod tier;
mod tier_model;
