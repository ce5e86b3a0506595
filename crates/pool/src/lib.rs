//! Pools: a formatted file or device that holds named, persistent things.
//!
//! ```text
//!            Pool: create, open, grow, check
//!              │
//!   transaction ── alloc ── image         metadata, changed under the one metadata mutex
//!              │
//!             log ── checkpoint ── recovery         the one redo log
//!              │
//!   segment, locks                        what the processes of a pool share at run time
//!              │
//!   format    media                       bytes on media; how they become durable
//! ```

pub mod format;
pub mod media;
