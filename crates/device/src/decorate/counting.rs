//! A decorator that counts transfers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::intercept::{Intercept, Intercepted};
use crate::forward::forward;
use crate::{Batch, Device, DeviceError, IoOperation, Request};

/// Number of classes of the size histogram: class `n` counts transfers of 2ⁿ to 2ⁿ⁺¹ - 1 bytes, the
/// last one also everything larger; class 0 also empty ones.
pub(crate) const SIZE_CLASSES: usize = 32;

/// A device that counts transfers, bytes, errors and syncs.
///
/// ```
/// use aquifer_device::{Counting, Device, MemoryDevice};
/// let device = Counting::new(MemoryDevice::new(8192)?);
/// let counters = device.counters();
/// device.write_at(0, &[1; 4096])?;
/// device.sync()?;
/// let counts = counters.snapshot();
/// assert_eq!((counts.writes, counts.written_bytes, counts.syncs), (1, 4096, 1));
/// assert_eq!(counts.sizes[12], 1); // 2¹² bytes
/// # Ok::<(), aquifer_device::DeviceError>(())
/// ```
#[derive(Debug)]
pub struct Counting<D> {
    device: D,
    counters: Counters,
}

/// The counts of a [`Counting`] device; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Counters {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    reads: AtomicU64,
    writes: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    transfer_errors: AtomicU64,
    syncs: AtomicU64,
    sync_errors: AtomicU64,
    batches: AtomicU64,
    in_flight: AtomicU64,
    most_in_flight: AtomicU64,
    sizes: [AtomicU64; SIZE_CLASSES],
}

/// A snapshot of the counts. Transfers that run while it is taken may be counted in part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CountSnapshot {
    /// Reads that succeeded.
    pub reads: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Bytes those reads returned.
    pub read_bytes: u64,
    /// Bytes those writes wrote.
    pub written_bytes: u64,
    /// Transfers that failed.
    pub transfer_errors: u64,
    /// Syncs that succeeded.
    pub syncs: u64,
    /// Syncs that failed.
    pub sync_errors: u64,
    /// Calls of [`Device::run`].
    pub batches: u64,
    /// The maximum number of transfers in flight at once.
    pub most_in_flight: u64,
    /// Requested transfers by size: class `n` counts those of 2ⁿ to 2ⁿ⁺¹ - 1 bytes.
    pub sizes: [u64; SIZE_CLASSES],
}

impl Counters {
    /// Returns the current counts.
    pub fn snapshot(&self) -> CountSnapshot {
        // Relaxed everywhere in this file: the counts order nothing.
        let shared = &*self.shared;
        CountSnapshot {
            reads: shared.reads.load(Ordering::Relaxed),
            writes: shared.writes.load(Ordering::Relaxed),
            read_bytes: shared.read_bytes.load(Ordering::Relaxed),
            written_bytes: shared.written_bytes.load(Ordering::Relaxed),
            transfer_errors: shared.transfer_errors.load(Ordering::Relaxed),
            syncs: shared.syncs.load(Ordering::Relaxed),
            sync_errors: shared.sync_errors.load(Ordering::Relaxed),
            batches: shared.batches.load(Ordering::Relaxed),
            most_in_flight: shared.most_in_flight.load(Ordering::Relaxed),
            sizes: std::array::from_fn(|class| shared.sizes[class].load(Ordering::Relaxed)),
        }
    }
}

impl Shared {
    fn started(&self, len_bytes: usize) {
        let class = (usize::BITS - 1).saturating_sub(len_bytes.leading_zeros()) as usize;
        add(&self.sizes[class.min(SIZE_CLASSES - 1)], 1);
        let in_flight = self.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        self.most_in_flight.fetch_max(in_flight, Ordering::Relaxed);
    }

    fn ended(&self, operation: IoOperation, result: &Result<usize, DeviceError>) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        match (operation, result) {
            (_, Err(_)) => add(&self.transfer_errors, 1),
            (IoOperation::Write, Ok(len_bytes)) => {
                add(&self.writes, 1);
                add(&self.written_bytes, *len_bytes as u64);
            }
            (_, Ok(len_bytes)) => {
                add(&self.reads, 1);
                add(&self.read_bytes, *len_bytes as u64);
            }
        }
    }
}

fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

impl<D: Device> Counting<D> {
    /// Counts the operations that reach `device`, from 0.
    pub fn new(device: D) -> Self {
        Counting { device, counters: Counters::default() }
    }

    /// Returns a handle to the counts, which stays valid after the device is moved.
    pub fn counters(&self) -> Counters {
        self.counters.clone()
    }
}

impl Intercept for &Shared {
    type Note = ();

    fn start(&mut self, request: &Request) -> Result<(), Result<usize, DeviceError>> {
        self.started(request.len_bytes);
        Ok(())
    }

    fn end(
        &mut self,
        request: &Request,
        (): (),
        result: Result<usize, DeviceError>,
    ) -> Result<usize, DeviceError> {
        self.ended(request.operation, &result);
        result
    }
}

impl<D: Device> Device for Counting<D> {
    forward!(self => self.device;
        name, identity, len_bytes, alignment_bytes, is_writable, writes_are_signal_safe, queue_depth,
        bytes_in_flight, claim_buffers, counters);

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        self.counters.shared.read_at(&self.device, offset_bytes, buffer)
    }

    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        self.counters.shared.write_at(&self.device, offset_bytes, buffer)
    }

    fn sync(&self) -> Result<(), DeviceError> {
        let shared = &self.counters.shared;
        let result = self.device.sync();
        add(if result.is_ok() { &shared.syncs } else { &shared.sync_errors }, 1);
        result
    }

    fn run(&self, batch: &mut dyn Batch, depth: usize) {
        let shared = &*self.counters.shared;
        add(&shared.batches, 1);
        self.device.run(&mut Intercepted::new(batch, shared), depth);
    }

    fn access_path(&self) -> String {
        format!("{} (counted)", self.device.access_path())
    }
}
