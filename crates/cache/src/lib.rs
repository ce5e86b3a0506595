//! The cache engine.
pub mod ids;
pub mod policy;
