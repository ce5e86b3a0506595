//! Queue depth for file devices: many transfers in flight for one caller.
//!
//! Two engines with the same meaning: io_uring ([`ring`]), and a pool of blocking threads
//! ([`threads`]) where io_uring is switched off or refused. Both *pull*: they take requests from the
//! batch while there is room, and hand each completion back before they take the next ones.
//!
//! Neither is on the fault path. Both wait for everything in flight before they return, also when the
//! batch panics, because the kernel or another thread is writing into the batch's memory until then.

mod ring;
mod threads;

use crate::file::FileState;
use crate::{Batch, DeviceError};

/// No batch has more transfers in flight than this.
const LARGEST_DEPTH: usize = 256;

/// How a device gets its queue depth. Chosen at open; a ring still gives way to threads when the kernel
/// refuses one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    Ring,
    Threads { because: &'static str },
}

/// The result of one transfer.
type TransferResult = Result<usize, DeviceError>;

impl Engine {
    /// The engine for a new device; `wanted` is what the caller said about io_uring.
    pub(crate) fn choose(wanted: bool) -> Self {
        let forced_off = std::env::var_os("AQUIFER_NO_IO_URING")
            .is_some_and(|value| !value.is_empty() && value != "0");
        if forced_off {
            Engine::Threads { because: "AQUIFER_NO_IO_URING is set" }
        } else if !wanted {
            Engine::Threads { because: "asked for" }
        } else {
            Engine::Ring
        }
    }

    /// What is in use, and why, for `access_path`.
    pub(crate) fn describe(self) -> String {
        match self.refusal() {
            None => "io_uring".into(),
            Some(reason) => format!("threads ({reason})"),
        }
    }

    /// The depth the engine can keep up.
    pub(crate) fn queue_depth(self) -> usize {
        if self.refusal().is_none() { 64 } else { threads::LARGEST_POOL }
    }

    fn refusal(self) -> Option<&'static str> {
        match self {
            Engine::Ring => ring::refusal(),
            Engine::Threads { because } => Some(because),
        }
    }
}

/// Runs a batch on a file at up to `depth` transfers in flight.
pub(crate) fn run(file: &std::sync::Arc<FileState>, batch: &mut dyn Batch, depth: usize) {
    let depth = depth.clamp(1, LARGEST_DEPTH);
    if file.engine() == Engine::Ring && ring::run(file, batch, depth).is_ok() {
        return;
    }
    threads::run(file, batch, depth);
}
