//! How a pool is created, opened and recovered, grown and closed, and the background threads of an
//! open pool.
//!
//! Uses all parts of the metadata and what is below them, and knows no `Pool`.

pub(crate) mod closing;
pub(crate) mod create;
pub(crate) mod grow;
pub(crate) mod recovery;
pub(crate) mod sole;
pub(crate) mod workers;
