//! Any bytes as structures on media: shared by the tests and the fuzz targets.
#![allow(dead_code, reason = "each test uses a part")]

pub mod forge;
pub mod parsers;
