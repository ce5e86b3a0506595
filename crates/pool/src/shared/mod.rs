//! What the processes of a pool share at run time: the segment and what is in it, the members and
//! their locks, and the handle that an open pool has of all of them.
//!
//! Uses the media, and none of the log, the pins and the metadata.

pub(crate) mod advisory;
pub(crate) mod appends;
pub(crate) mod base;
mod claims;
pub(crate) mod dead_holders;
pub(crate) mod failure;
pub(crate) mod handle;
pub(crate) mod heartbeat;
pub(crate) mod image_words;
pub(crate) mod inode_lock;
pub(crate) mod life;
pub(crate) mod members;
pub(crate) mod membership;
pub(crate) mod note;
pub(crate) mod presence;
pub(crate) mod segment;
pub(crate) mod segment_place;
pub(crate) mod signal;
pub(crate) mod sole_note;
