//! A graph larger than memory, and breadth-first search over it.
//!
//! Graph search is the classic case for memory-mapped storage: the program wants two arrays, and
//! which pages of them it accesses next depends on what it has just read.

mod csr;
mod rmat;
mod rows;
mod search;

pub use csr::{Graph, GraphFile};
pub use rmat::{Rmat, Shape};
pub use rows::Overtime;
pub use search::{Reader, breadth_first_search, state_bytes};
