//! The integration tests of this crate: one program, because each links everything that it tests. Files beside this
//! directory are programs of their own, and say why.

#[path = "../golden/blocks.rs"]
mod blocks;
mod error;
mod futures;
mod golden;
mod golden_special;
mod search_example;
