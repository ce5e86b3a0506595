//! The metadata of an open pool: the image of the slots, the maps of pages, freed runs, the names of
//! objects, transactions, checkpoints, and the repair of what a dead process left of a change.
//!
//! Uses the log, the pins, and what is below them. [`core`] has the parts of an open pool and the
//! order of their locks.

pub(crate) mod alloc;
pub(crate) mod apply;
pub(crate) mod checkpoint;
pub(crate) mod core;
pub(crate) mod freed;
pub(crate) mod fresh;
pub(crate) mod image;
pub(crate) mod image_slots;
pub(crate) mod object_names;
pub(crate) mod repair;
pub(crate) mod reservation;
pub(crate) mod saved;
pub(crate) mod space;
pub(crate) mod transaction;
pub(crate) mod turn;
pub(crate) mod zero;
