//! The methods of [`Files`](crate::Files): what `std::fs` has, and more, for paths of a pool.

mod attributes;
mod contents;
mod immutable;
mod metadata;
mod names;
mod open;
mod remove;

pub use names::DirBuilder;
