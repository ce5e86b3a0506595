//! Queue depth for file devices: many transfers in flight for one caller.
//!
//! Two engines with the same semantics: io_uring ([`ring`]), and a pool of blocking threads
//! ([`threads`]) where io_uring is disabled or refused. Both *pull*: they take requests from the
//! batch while there is room, and report each completion before they take the next ones.
//!
//! Neither is on the fault path. Both wait for everything in flight before they return, even if the
//! batch panics, because until then the kernel or another thread writes into the batch's memory.

mod ring;
mod threads;

use std::sync::Arc;

use aquifer_sys::features::is_forbidden;

use super::state::FileState;
use crate::{Batch, DeviceError};

/// Maximum number of transfers in flight per batch.
const LARGEST_DEPTH: usize = 256;

/// The source of a device's queue depth. Chosen at open; a batch still falls back to threads if the
/// kernel refuses it a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Engine {
    Ring,
    Threads { because: &'static str },
}

/// The result of one transfer.
type TransferResult = Result<usize, DeviceError>;

impl Engine {
    /// Returns the engine for a new device; `wanted` is the caller's io_uring option.
    pub(super) fn choose(wanted: bool) -> Self {
        if is_forbidden("AQUIFER_NO_IO_URING") {
            Engine::Threads { because: "AQUIFER_NO_IO_URING is set" }
        } else if !wanted {
            Engine::Threads { because: "asked for" }
        } else {
            Engine::Ring
        }
    }

    /// Returns the engine in use, and why, for `access_path`.
    pub(super) fn describe(self) -> String {
        match self.refusal() {
            None => "io_uring".into(),
            Some(reason) => format!("threads ({reason})"),
        }
    }

    /// Returns the depth that the engine can sustain.
    pub(super) fn queue_depth(self) -> usize {
        if self.refusal().is_none() { 64 } else { threads::LARGEST_POOL }
    }

    /// Runs a batch on a file with up to `depth` transfers in flight.
    pub(super) fn run(self, file: &Arc<FileState>, batch: &mut dyn Batch, depth: usize) {
        let depth = depth.clamp(1, LARGEST_DEPTH);
        if self == Engine::Ring && ring::run(file, batch, depth).is_ok() {
            return;
        }
        threads::run(file, batch, depth);
    }

    fn refusal(self) -> Option<&'static str> {
        match self {
            Engine::Ring => ring::refusal(),
            Engine::Threads { because } => Some(because),
        }
    }
}
