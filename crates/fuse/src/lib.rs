//! A pool as a file system of the kernel: every program works on it, unmodified.
//!
//! ```text
//!  programs ─► kernel ─► /dev/fuse ─► team (threads) ─► wire (bytes) ─► pool_fs ─► aquifer_fs::node
//! ```
//!
//! | | |
//! |---|---|
//! | [`wire`] | the protocol's bytes; pure |
//! | `device`, [`Answer`] | requests from the device and answers to it: the one conversion of errors |
//! | `init` | which features both sides use |
//! | `team` | the threads: as many as CPUs read, those that wait do not count |
//! | [`Handler`] | what answers requests: `pool_fs` for a pool, others in tests |
//! | `state` | which inodes the kernel knows, and how often it was given them |
//! | [`Mount`] | all of it in one process |
//! | [`Mounting`] | by processes that outlive the calling one, of which one answers requests and may die |
//! | [`mounts`], [`unmount`] | what is mounted, whichever process serves it |
//! | [`fusermount`] | mounting for users without the right to mount |
//!
//! The request loop is written here, over the kernel's published interface, and not taken from a
//! library: `docs/decisions/0017-a-request-loop-of-our-own.md`.

#![forbid(unsafe_code)]

mod answer;
mod device;
mod error;
pub mod fusermount;
mod in_process;
mod init;
mod kept;
mod mounts;
mod options;
mod pool_fs;
mod state;
mod team;
pub mod wire;

pub use answer::{Answer, Channel, Delivered};
pub use error::MountError;
pub use in_process::Mount;
pub use init::Agreed;
pub use kept::{Keeper, Mounting, Program, keeper_main, server_main};
pub use mounts::{MountedPool, UnmountError, Unmounted, mounts, unmount};
pub use options::{Cache, MountOptions};
pub use team::{Counts, Handler, Worker};

/// A point at which tests end a server.
#[cfg(test)]
use aquifer_pool::pass_other as point;
#[cfg(not(test))]
fn point(_name: &'static str) {}
