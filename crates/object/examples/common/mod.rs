//! Structures that the examples keep in objects. Each is a file to copy.

#![allow(dead_code, reason = "each example uses its part")]

pub mod lru_cache;
pub mod plain_list;
pub mod sorted_list;
pub mod word_index;
