//! The redo log that the processes of a pool share: its mutexes, appends and packed records, reading
//! and replaying it, commits of content, and the superblocks, which say where it begins.
//!
//! Uses the media and what is shared. What a record means to the metadata is not known here: the
//! layer above says it ([`Metadata`](locks::Metadata)).

pub(crate) mod append;
mod buffers;
pub(crate) mod commit;
pub(crate) mod durable;
pub(crate) mod locks;
mod logged_page;
pub(crate) mod packed;
pub(crate) mod reader;
pub(crate) mod replay;
pub(crate) mod superblocks;
pub(crate) mod writer;
