//! An object of a server, read in a contender's way by the processes of one node.
//!
//! All of a node's processes and helpers (a Python interpreter, `rclone mount`) are in one memory group, and have one
//! directory on the disk for what the contender keeps.

mod aquifer;
mod object_store;
mod python;
mod rclone;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::job::RemoteWork;
use crate::rng::mix;

pub use aquifer::{CachedRows, Mapped};
pub use object_store::Plain;
pub use python::Worker;
pub use rclone::{Mounted, mount};

/// The object, in every way of naming it.
pub const BUCKET: &str = "bucket";
/// See [`BUCKET`].
pub const KEY: &str = "object";

/// Lines of a cache, of which a sum takes the first word each.
const LINE_BYTES: u64 = 64;

/// Where and with what a process of a node works.
#[derive(Debug, Clone, Copy)]
pub struct Site<'a> {
    /// The work.
    pub work: &'a RemoteWork,
    /// What the node's processes share.
    pub directory: &'a Path,
    /// Which of them this is.
    pub member: u32,
    /// What one process may use for a cache in memory.
    pub cache_bytes: u64,
}

impl Site<'_> {
    /// A name in the node's directory that only this process uses.
    pub fn own(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}-{}", self.member))
    }

    /// The length of the object.
    pub fn len_bytes(&self) -> u64 {
        self.work.object_bytes
    }
}

/// A process's access to the object. Sums are those of [`lines_of`], over all bytes that were read.
pub trait Remote {
    /// Reads these ranges, which are known at once, in any order.
    fn ranges(&mut self, ranges: &[Range<u64>]) -> Result<u64>;

    /// Reads the whole object once.
    fn pass(&mut self) -> Result<u64>;

    /// Additional figures for the report.
    fn details(&self) -> Result<BTreeMap<String, f64>> {
        Ok(BTreeMap::new())
    }
}

/// A process that serves those of a node, until it is dropped.
pub trait Helper {
    /// Whether it was killed.
    fn was_killed(&mut self) -> bool;
}

/// What the node's processes share, until it is dropped.
pub type Service = Option<Box<dyn Helper>>;

/// How a contender works on a node.
#[derive(Clone, Copy)]
pub struct Way {
    /// Starts what the node's processes share.
    pub serve: fn(Site<'_>) -> Result<Service>,
    /// Opens the object in a process.
    pub open: fn(Site<'_>) -> Result<Box<dyn Remote>>,
}

/// Until a helper has started, or has ended.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for a helper that was asked to end, and kills it if it does not.
fn wait_for_end(process: &mut Child) {
    let since = Instant::now();
    while since.elapsed() < PATIENCE {
        if !matches!(process.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = process.kill();
    let _ = process.wait();
}

/// Nothing is shared but the directory.
pub const NO_SERVICE: fn(Site<'_>) -> Result<Service> = |_| Ok(None);

/// The sum of the first words of the cache lines of `bytes`, which begin at a multiple of 64.
pub fn lines_of(bytes: &[u8]) -> u64 {
    let first = |line: &[u8]| u64::from_le_bytes(line[..8].try_into().expect("8 bytes"));
    bytes.chunks(LINE_BYTES as usize).fold(0, |sum, line| sum.wrapping_add(first(line)))
}

/// The same of a range of the server's generated object.
pub fn expected_lines(seed: u64, range: Range<u64>) -> u64 {
    // The word of number n is (n + seed) times a constant.
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let lines = u128::from((range.end - range.start) / LINE_BYTES);
    let first = u128::from(range.start / 8) + u128::from(seed);
    let numbers = lines * first + LINE_BYTES as u128 / 8 * (lines * lines.saturating_sub(1) / 2);
    (numbers as u64).wrapping_mul(FACTOR)
}

/// The whole object in parts of this length.
fn parts(len_bytes: u64, part_bytes: u64) -> impl Iterator<Item = Range<u64>> + Clone {
    (0..len_bytes)
        .step_by(part_bytes as usize)
        .map(move |start| start..(start + part_bytes).min(len_bytes))
}

/// A seed of a process's draws.
pub fn member_seed(seed: u64, round: u32, member: u32) -> u64 {
    mix(seed ^ mix((u64::from(round) << 32) | u64::from(member)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_the_generated_object_are_known() {
        let mut bytes = vec![0; 64 << 10];
        aquifer_testkit::object_server::generate(7, 4096, &mut bytes);
        assert_eq!(lines_of(&bytes), expected_lines(7, 4096..4096 + (64 << 10)));
        assert_eq!(lines_of(&bytes[64..128]), expected_lines(7, 4160..4224));
        assert_ne!(lines_of(&bytes), expected_lines(8, 4096..4096 + (64 << 10)));
    }
}
