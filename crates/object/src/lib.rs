//! Persistent objects: data structures that survive, with one call.

pub mod pointer;
