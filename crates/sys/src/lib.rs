//! sys

pub mod copy;
