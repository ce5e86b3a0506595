//! A decorator that injects faults, repeatably.
//!
//! # Fault model
//! A *rule* defines which operations it applies to (reads, writes, syncs; a range of the device),
//! when it strikes (always, after a countdown, with a probability drawn from a seed), how often at
//! most, and with which fault: an errno, a short read, a premature end. The first rule that strikes
//! decides. A failed write does not reach the device; a failed sync leaves it unsynced, and nothing
//! more: keeping a failed sync final is the inner device's contract, so a rule for syncs applies
//! until it is removed.
//!
//! Each transfer is decided separately, in batches too, which keep their depth. With the same order
//! of operations, the same rules and seed give the same faults; with several threads the *n*-th
//! decision is the same, but not which thread meets it.
//!
//! The rules are under a lock that is held for one decision only, without allocating, so a faulty
//! device may serve the fault path.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::intercept::{Intercept, Intercepted};
use crate::forward::forward;
use crate::{Batch, Device, DeviceError, IoOperation, Request};

/// The operations that a rule applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultTarget {
    /// Reads.
    Reads,
    /// Writes.
    Writes,
    /// Reads and writes.
    Transfers,
    /// Syncs. Their rules have no range.
    Syncs,
}

/// The effect on an operation that a rule strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It fails with this errno.
    Errno(i32),
    /// A read fails with [`DeviceError::ShortRead`] after this many bytes, as when a device is
    /// shorter than it reports. Writes and syncs pass.
    ShortRead {
        /// Bytes returned.
        got_bytes: usize,
    },
    /// A read returns this many bytes as if the device ended there, which violates the contract
    /// unless it does: to test that callers check the length. Writes and syncs pass.
    EndsEarly {
        /// Bytes returned.
        got_bytes: usize,
    },
}

/// Selects the operations that a rule strikes, of those it applies to.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Trigger {
    /// Every one.
    Always,
    /// All after the first `operations`, which pass.
    After {
        /// Number of operations that pass.
        operations: u64,
    },
    /// Each with this probability, drawn from the seed.
    Probability {
        /// From 0 to 1.
        probability: f64,
        /// The same seed gives the same sequence of decisions.
        seed: u64,
    },
}

/// A fault to inject.
#[derive(Debug, Clone, PartialEq)]
pub struct FaultRule {
    target: FaultTarget,
    fault: Fault,
    range: Option<Range<u64>>,
    trigger: Trigger,
    most: u64,
}

impl FaultRule {
    /// Strikes every operation of the target.
    pub fn new(target: FaultTarget, fault: Fault) -> Self {
        FaultRule { target, fault, range: None, trigger: Trigger::Always, most: u64::MAX }
    }

    /// Limits the rule to transfers that touch this range of bytes.
    pub fn range(mut self, range: Range<u64>) -> Self {
        self.range = Some(range);
        self
    }

    /// Sets when it strikes.
    pub fn trigger(mut self, trigger: Trigger) -> Self {
        self.trigger = trigger;
        self
    }

    /// Limits how many times it strikes.
    pub fn at_most(mut self, times: u64) -> Self {
        self.most = times;
        self
    }

    fn concerns(&self, operation: Operation) -> bool {
        match (self.target, operation) {
            (FaultTarget::Syncs, Operation::Sync) => true,
            (
                FaultTarget::Reads | FaultTarget::Transfers,
                Operation::Read { offset_bytes, len_bytes },
            )
            | (
                FaultTarget::Writes | FaultTarget::Transfers,
                Operation::Write { offset_bytes, len_bytes },
            ) => self.range.as_ref().is_none_or(|range| {
                let end_bytes = offset_bytes.saturating_add(len_bytes as u64);
                offset_bytes < range.end && range.start < end_bytes
            }),
            _ => false,
        }
    }
}

/// Identifies a rule, to remove it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleId(u64);

/// Controls the faults of a [`Faulty`] device while it is in use; clones control the same device.
#[derive(Debug, Clone, Default)]
pub struct FaultControl {
    rules: Arc<Mutex<Rules>>,
}

#[derive(Debug, Default)]
struct Rules {
    active: Vec<ActiveRule>,
    next_id: u64,
    struck: u64,
}

#[derive(Debug)]
struct ActiveRule {
    id: u64,
    rule: FaultRule,
    concerned: u64,
    struck: u64,
}

#[derive(Debug, Clone, Copy)]
enum Operation {
    Read { offset_bytes: u64, len_bytes: usize },
    Write { offset_bytes: u64, len_bytes: usize },
    Sync,
}

impl FaultControl {
    /// Adds a rule after the existing ones.
    pub fn inject(&self, rule: FaultRule) -> RuleId {
        let mut rules = self.lock();
        let id = rules.next_id;
        rules.next_id += 1;
        rules.active.push(ActiveRule { id, rule, concerned: 0, struck: 0 });
        RuleId(id)
    }

    /// Removes a rule; false if it was removed already.
    pub fn remove(&self, id: RuleId) -> bool {
        let mut rules = self.lock();
        let before = rules.active.len();
        rules.active.retain(|active| active.id != id.0);
        rules.active.len() != before
    }

    /// Removes all rules: the device works again.
    pub fn clear(&self) {
        self.lock().active.clear();
    }

    /// Returns how many operations all rules have struck so far.
    pub fn struck(&self) -> u64 {
        self.lock().struck
    }

    fn lock(&self) -> MutexGuard<'_, Rules> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the fault for one operation, if a rule strikes it.
    fn decide(&self, operation: Operation) -> Option<Fault> {
        let mut rules = self.lock();
        let fault = rules.active.iter_mut().find_map(|active| active.decide(operation))?;
        rules.struck += 1;
        Some(fault)
    }
}

impl ActiveRule {
    fn decide(&mut self, operation: Operation) -> Option<Fault> {
        let is_read = matches!(operation, Operation::Read { .. });
        let applies = is_read || matches!(self.rule.fault, Fault::Errno(_));
        if !applies || !self.rule.concerns(operation) || self.struck >= self.rule.most {
            return None;
        }
        let number = self.concerned;
        self.concerned += 1;
        let strikes = match self.rule.trigger {
            Trigger::Always => true,
            Trigger::After { operations } => number >= operations,
            Trigger::Probability { probability, seed } => unit_draw(seed, number) < probability,
        };
        if !strikes {
            return None;
        }
        self.struck += 1;
        Some(self.rule.fault)
    }
}

/// Returns the `number`-th draw of a seed, uniform in [0, 1): the output function of SplitMix64
/// (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
fn unit_draw(seed: u64, number: u64) -> f64 {
    let mut bits = seed.wrapping_add((number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// A device that fails according to its rules; without rules it passes everything.
///
/// ```
/// use aquifer_device::{Device, Fault, FaultRule, FaultTarget, Faulty, MemoryDevice, Trigger};
/// let device = Faulty::new(MemoryDevice::new(8192)?);
/// let control = device.control();
/// let no_space = 28; // ENOSPC
/// control.inject(
///     FaultRule::new(FaultTarget::Writes, Fault::Errno(no_space))
///         .range(4096..8192)
///         .trigger(Trigger::After { operations: 1 }),
/// );
/// assert!(device.write_at(4096, &[1; 4096]).is_ok());
/// assert!(device.write_at(4096, &[2; 4096]).is_err());
/// assert!(device.write_at(0, &[2; 4096]).is_ok());
/// control.clear();
/// assert!(device.write_at(4096, &[2; 4096]).is_ok());
/// # Ok::<(), aquifer_device::DeviceError>(())
/// ```
#[derive(Debug)]
pub struct Faulty<D> {
    device: D,
    control: FaultControl,
}

impl<D: Device> Faulty<D> {
    /// Wraps `device`, without faults yet.
    pub fn new(device: D) -> Self {
        Faulty { device, control: FaultControl::default() }
    }

    /// Returns a handle that injects faults, which stays valid after the device is moved.
    pub fn control(&self) -> FaultControl {
        self.control.clone()
    }
}

fn io_error(
    operation: IoOperation,
    offset_bytes: u64,
    len_bytes: usize,
    errno: i32,
) -> DeviceError {
    let source = io::Error::from_raw_os_error(errno);
    DeviceError::Io { operation, offset_bytes, len_bytes, source }
}

/// Returns the result of a read that is cut to `got_bytes`; the device returned `result`.
fn cut(
    fault: Fault,
    offset_bytes: u64,
    len_bytes: usize,
    result: Result<usize, DeviceError>,
) -> Result<usize, DeviceError> {
    match fault {
        Fault::ShortRead { got_bytes } => {
            let got_bytes = got_bytes.min(result?);
            Err(DeviceError::ShortRead { offset_bytes, len_bytes, got_bytes })
        }
        Fault::EndsEarly { got_bytes } => Ok(got_bytes.min(result?)),
        Fault::Errno(_) => result,
    }
}

impl Intercept for &FaultControl {
    /// The cut to apply to the result.
    type Note = Option<Fault>;

    fn start(&mut self, request: &Request) -> Result<Option<Fault>, Result<usize, DeviceError>> {
        let Request { operation, offset_bytes, len_bytes, .. } = *request;
        let fault = self.decide(match operation {
            IoOperation::Write => Operation::Write { offset_bytes, len_bytes },
            _ => Operation::Read { offset_bytes, len_bytes },
        });
        match fault {
            Some(Fault::Errno(errno)) => {
                Err(Err(io_error(operation, offset_bytes, len_bytes, errno)))
            }
            fault => Ok(fault),
        }
    }

    fn end(
        &mut self,
        request: &Request,
        fault: Option<Fault>,
        result: Result<usize, DeviceError>,
    ) -> Result<usize, DeviceError> {
        match fault {
            Some(fault) => cut(fault, request.offset_bytes, request.len_bytes, result),
            None => result,
        }
    }
}

impl<D: Device> Device for Faulty<D> {
    forward!(self => self.device;
        name, identity, len_bytes, alignment_bytes, is_writable, queue_depth, bytes_in_flight,
        claim_buffers, counters);

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        self.control.read_at(&self.device, offset_bytes, buffer)
    }

    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        self.control.write_at(&self.device, offset_bytes, buffer)
    }

    /// Never: rules are decided under a lock.
    fn writes_are_signal_safe(&self) -> bool {
        false
    }

    fn sync(&self) -> Result<(), DeviceError> {
        match self.control.decide(Operation::Sync) {
            Some(Fault::Errno(errno)) => Err(io_error(IoOperation::Sync, 0, 0, errno)),
            _ => self.device.sync(),
        }
    }

    fn run(&self, batch: &mut dyn Batch, depth: usize) {
        self.device.run(&mut Intercepted::new(batch, &self.control), depth);
    }

    fn access_path(&self) -> String {
        format!("{} (with injected faults)", self.device.access_path())
    }
}
