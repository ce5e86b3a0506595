//! Devices: storage for bytes.
//!
//! A [`Device`] is what the cache loads pages from and writes them back to: a file opened for
//! direct I/O, a byte-addressable region, or a user's implementation. The trait is small on
//! purpose: two blocking transfers, one batch, one barrier. Queue depth comes from [`Device::run`],
//! which *pulls* requests from a [`Batch`] while the device has capacity and reports every
//! completion at once, so that installing a page overlaps with the reads still in flight.
//!
//! # Contract
//! * A transfer is never short, except for a read that crosses the end of the device: it returns
//!   the bytes before the end. A read that starts exactly at the end returns 0, one that starts
//!   beyond it fails with [`DeviceError::OutOfBounds`]. Retrying after `EINTR` or a short transfer
//!   is the device's job.
//! * Offsets and lengths are multiples of [`Device::alignment_bytes`], except that a transfer may
//!   end at the device's length, or at a length that the device had earlier: a cache keeps the
//!   length it found when it attached the device, and still writes its last page after the device
//!   has grown.
//! * [`Device::read_at`] does not allocate: it is called from the fault path, which may be a signal
//!   handler. The same holds for [`Device::write_at`] if [`Device::writes_are_signal_safe`] returns
//!   true.
//! * Written bytes are durable once a later [`Device::sync`] returned `Ok`, and only then.
//!
//! # Contents
//! | | |
//! |---|---|
//! | [`FileDevice`] | a regular file or block device, `O_DIRECT`, io_uring or a thread pool for depth |
//! | [`DaxDevice`] | a file or device whose bytes are memory: tmpfs, hugetlbfs, memfd, DAX |
//! | [`MemoryDevice`] | plain memory, for tests and as a DRAM tier |
//! | [`Faulty`], [`Throttled`], [`Counting`] | decorators that inject errors, delay, and count |
//!
//! `crates/device/examples/custom_device.rs` implements the trait for a mirrored pair of devices.
//!
//! # Example
//! ```
//! use aquifer_device::{AlignedBuffer, Device, FileDevice};
//!
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("data");
//! std::fs::write(&path, vec![7u8; 10_000])?;
//!
//! let device = FileDevice::options().writable(true).open(&path)?;
//! println!("{} by {}", device.name(), device.access_path());
//!
//! let mut page = AlignedBuffer::new(4096, device.alignment_bytes());
//! assert_eq!(device.read_at(0, &mut page)?, 4096);
//! assert_eq!(device.read_at(8192, &mut page)?, 10_000 - 8192); // crosses the end
//!
//! page.fill(9);
//! device.write_at(4096, &page)?;
//! device.sync()?; // now it is durable
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod aligned;
mod bounds;
mod dax;
mod decorate;
mod error;
mod file;
mod fork;
mod forward;
mod identity;
mod memory;
mod region;

pub use aligned::AlignedBuffer;
pub use dax::{DaxDevice, DaxOptions, Persistence};
pub use decorate::{
    CountSnapshot, Counters, Counting, Fault, FaultControl, FaultRule, FaultTarget, Faulty, Rate,
    RuleId, Throttled, Trigger,
};
pub use error::{DeviceError, IoOperation};
pub use file::{Direct, FileDevice, FileOptions};
pub use identity::DeviceIdentity;
pub use memory::MemoryDevice;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use forward::forward;

/// A store of bytes. See the crate documentation for the contract.
pub trait Device: Send + Sync + 'static {
    /// Returns a name for messages: the path of a file, or the kind of memory.
    fn name(&self) -> &str;

    /// Identifies the bytes: equal for two devices exactly if a write through one changes what the
    /// other reads. A cache keeps one copy of the bytes of one identity.
    ///
    /// The default is the device object itself, so that only the same object counts as the same
    /// device. A device that passes its transfers on to another one returns that device's identity.
    /// If several devices of one identity are attached at once, a cache calls the first, or, if
    /// that one is not writable, the first that is mapped writable: the transfers do not pass
    /// through the other decorators.
    fn identity(&self) -> DeviceIdentity {
        DeviceIdentity::of_object(self)
    }

    /// Returns the current length in bytes. Files may grow and shrink.
    fn len_bytes(&self) -> Result<u64, DeviceError>;

    /// Returns the power of two that offsets, lengths and memory addresses of transfers must be
    /// multiples of; the crate documentation names the one exception.
    fn alignment_bytes(&self) -> usize {
        1
    }

    /// Returns whether [`Device::write_at`] can succeed at all.
    fn is_writable(&self) -> bool;

    /// Reads `buffer.len()` bytes at `offset_bytes`; returns less only at the end of the device.
    ///
    /// Another thread may be writing the same bytes: then the result may be a mix of old and new
    /// ones, or an error, and a caller that needs the bytes reads again.
    ///
    /// Must not allocate, log, or take a lock that may be held while mapped memory is accessed.
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError>;

    /// Writes all of `buffer` at `offset_bytes`. Never extends the device.
    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError>;

    /// Returns whether [`Device::write_at`] follows the rules of [`Device::read_at`]: it does not
    /// allocate, log, or take a lock that may be held while mapped memory is accessed. Only then
    /// does a faulting thread that needs a page's memory write another page back itself, perhaps in
    /// a signal handler; otherwise it waits for a thread of the cache to do so.
    fn writes_are_signal_safe(&self) -> bool {
        false
    }

    /// Makes every completed write durable. A failure is final for those writes: a later call must
    /// not report success for them.
    fn sync(&self) -> Result<(), DeviceError>;

    /// Runs a batch with up to `depth` transfers in flight; returns when the batch is exhausted and
    /// all transfers have completed, each once.
    ///
    /// A write completes with its whole length or an error: a caller treats a shorter length as a
    /// failure ([`DeviceError::ShortWrite`]), and also a transfer that was not completed on return
    /// ([`DeviceError::Unfinished`]). In a child that the batch itself forked, transfers in flight are
    /// not completed: they are the parent's.
    ///
    /// The default does one transfer at a time. When this returns or panics, no transfer may still
    /// be in flight: the batch's memory is reused afterwards.
    fn run(&self, batch: &mut dyn Batch, depth: usize) {
        let _ = depth;
        run_serially(self, batch);
    }

    /// Returns the number of transfers in flight that this device benefits from.
    fn queue_depth(&self) -> usize {
        1
    }

    /// Returns the number of bytes in flight that this device benefits from, if it is more than for a local disk (1 MiB):
    /// a long line holds its latency times its rate, and has to be refilled before it is empty.
    fn bytes_in_flight(&self) -> u64 {
        0
    }

    /// Asks how much memory the device takes for buffers of its own, and that it keep to `most_bytes`. A cache asks when it
    /// attaches the device and when its budget changes, and takes the answer off its budget until it detaches the device. It
    /// asks all its devices together to keep to half of the budget. Once lowered it stays so.
    ///
    /// The default is none.
    fn claim_buffers(&self, most_bytes: usize) -> usize {
        let _ = most_bytes;
        0
    }

    /// Returns the bytes themselves if the device is byte-addressable (DAX): base address and
    /// length.
    fn dax(&self) -> Option<(*mut u8, usize)> {
        None
    }

    /// Returns a descriptor of a regular file whose page cache may be mapped instead, if there is
    /// one.
    fn page_cache_file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns what the device counts that a cache cannot, for `aquifer stat`: names that end with their unit, and values
    /// since the device was opened. A name that ends with `_now` is of a value that rises and falls.
    ///
    /// A cache that is published asks about once a second, outside of faults: this may allocate.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Returns how the device is accessed, for reports: `"direct (io_uring)"`, `"buffered: …"`,
    /// `"memory"`.
    fn access_path(&self) -> String;
}

impl<D: Device + ?Sized> Device for Arc<D> {
    forward!(self => (**self);
        name, identity, len_bytes, alignment_bytes, is_writable, read_at, write_at,
        writes_are_signal_safe, sync, run, queue_depth, bytes_in_flight, claim_buffers, dax, page_cache_file, counters,
        access_path);
}

/// One transfer of a [`Batch`].
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Read or write.
    pub operation: IoOperation,
    /// Offset on the device.
    pub offset_bytes: u64,
    /// Start of the memory read into or written from.
    pub memory: *mut u8,
    /// Length of the transfer.
    pub len_bytes: usize,
    /// Returned with the completion.
    pub tag: u64,
}

/// A source of transfers and the sink of their completions.
///
/// Both methods may run code of an application, which may call the device again: a device holds no
/// lock that another of its calls takes while it calls them.
///
/// # Safety
/// From [`Batch::next`] until [`Batch::complete`] with the same tag, the memory of a request is
/// valid; no other code reads or writes it during a read, and no code writes it during a write.
pub unsafe trait Batch {
    /// Returns the next transfer to start, or `None` when none can start *now*. A batch that
    /// returned `None` is called again after each completion, and is finished when nothing is in
    /// flight any more.
    fn next(&mut self) -> Option<Request>;

    /// Reports the end of a transfer: the number of bytes, or the error.
    fn complete(&mut self, tag: u64, result: Result<usize, DeviceError>);
}

/// Runs a batch with one blocking transfer at a time: the fallback of every device.
pub fn run_serially<D: Device + ?Sized>(device: &D, batch: &mut dyn Batch) {
    while let Some(request) = batch.next() {
        let result = run_one(device, &request);
        batch.complete(request.tag, result);
    }
}

/// Performs one request with the blocking calls of `device`.
pub fn run_one<D: Device + ?Sized>(device: &D, request: &Request) -> Result<usize, DeviceError> {
    match request.operation {
        IoOperation::Write => {
            // SAFETY: the contract of `Batch`: valid, and not written by any code until `complete`.
            let bytes = unsafe { std::slice::from_raw_parts(request.memory, request.len_bytes) };
            device.write_at(request.offset_bytes, bytes).map(|()| request.len_bytes)
        }
        _ => {
            // SAFETY: the contract of `Batch`: valid, and not accessed by other code until
            // `complete`.
            let bytes =
                unsafe { std::slice::from_raw_parts_mut(request.memory, request.len_bytes) };
            device.read_at(request.offset_bytes, bytes)
        }
    }
}
