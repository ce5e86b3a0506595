//! Aquifer's persistent objects, each region one of them, all in one pool.
//!
//! This is the only file of the benches that knows how pools and objects are made, attached and synced.

use anyhow::Result;

use super::{Home, Region};
use crate::contender::Unavailable;

/// Makes a pool with one object for each length.
pub fn create(_home: &Home, _lens_bytes: &[usize]) -> Result<Vec<Box<dyn Region>>> {
    Err(Unavailable("this build has no persistent objects".to_owned()).into())
}

/// Attaches the objects of that pool.
pub fn open(_home: &Home, _lens_bytes: &[usize]) -> Result<Vec<Box<dyn Region>>> {
    Err(Unavailable("this build has no persistent objects".to_owned()).into())
}
