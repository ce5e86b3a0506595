//! Persistent objects: data structures that survive, with one call.

pub mod collections;
pub mod heap;
pub mod persist;
pub mod pointer;
