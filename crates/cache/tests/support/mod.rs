//! Shared by the engine's tests: seeds, devices with hooks, waiting for a condition, child
//! processes.

#![allow(dead_code, unused_imports, reason = "each test file uses its part")]

use std::sync::Arc;

use aquifer_cache::{CacheError, Mapping, MappingMut};
use aquifer_device::{
    AlignedBuffer, Batch, Device, DeviceError, IoOperation, MemoryDevice, run_one,
};
use aquifer_testkit::rng::Rng;

pub use aquifer_testkit::campaign::{seed, steps};
pub use aquifer_testkit::child;
pub use aquifer_testkit::executor::block_on;
pub use aquifer_testkit::watchdog::wait_until;

/// Pseudo-random bytes.
pub fn random_bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut bytes = vec![0; len];
    for chunk in bytes.chunks_mut(8) {
        let word = rng.next_u64().to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
    bytes
}

/// All bytes of a device.
pub fn content(device: &dyn Device) -> Vec<u8> {
    let len = device.len_bytes().unwrap() as usize;
    let mut buffer = AlignedBuffer::new(len.next_multiple_of(4096), 4096);
    assert_eq!(device.read_at(0, &mut buffer).unwrap(), len);
    buffer[..len].to_vec()
}

/// The errno of a device error.
pub fn errno_of(error: &DeviceError) -> Option<i32> {
    match error {
        DeviceError::Io { source, .. } => source.raw_os_error(),
        _ => None,
    }
}

/// The error of a failed transfer.
pub fn io_error(operation: IoOperation, errno: i32) -> DeviceError {
    let source = std::io::Error::from_raw_os_error(errno);
    DeviceError::Io { operation, offset_bytes: 0, len_bytes: 0, source }
}

type ReadHook = Box<dyn Fn(u64, &mut [u8]) -> Result<(), DeviceError> + Send + Sync>;
type WriteHook = Box<dyn Fn(u64, &[u8]) -> Result<(), DeviceError> + Send + Sync>;

/// A device that calls a test's closures before each transfer.
pub struct Hooked {
    pub inner: Arc<dyn Device>,
    pub alignment_bytes: usize,
    pub on_read: ReadHook,
    pub on_write: WriteHook,
}

impl Hooked {
    pub fn new(inner: Arc<dyn Device>) -> Hooked {
        Hooked {
            inner,
            alignment_bytes: 1,
            on_read: Box::new(|_, _| Ok(())),
            on_write: Box::new(|_, _| Ok(())),
        }
    }
}

impl Device for Hooked {
    fn name(&self) -> &str {
        "hooked"
    }
    fn len_bytes(&self) -> Result<u64, DeviceError> {
        self.inner.len_bytes()
    }
    fn alignment_bytes(&self) -> usize {
        self.alignment_bytes
    }
    fn is_writable(&self) -> bool {
        self.inner.is_writable()
    }
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        (self.on_read)(offset_bytes, buffer)?;
        self.inner.read_at(offset_bytes, buffer)
    }
    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        (self.on_write)(offset_bytes, buffer)?;
        self.inner.write_at(offset_bytes, buffer)
    }
    fn sync(&self) -> Result<(), DeviceError> {
        self.inner.sync()
    }
    fn access_path(&self) -> String {
        "memory, with hooks".into()
    }
}

/// A device that calls a closure when a read has been made, before it is reported.
pub struct Late<F> {
    pub inner: MemoryDevice,
    pub read: F,
}

impl<F: Fn(u64) + Send + Sync + 'static> Device for Late<F> {
    fn name(&self) -> &str {
        "late"
    }
    fn len_bytes(&self) -> Result<u64, DeviceError> {
        self.inner.len_bytes()
    }
    fn is_writable(&self) -> bool {
        true
    }
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        let got = self.inner.read_at(offset_bytes, buffer)?;
        (self.read)(offset_bytes);
        Ok(got)
    }
    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        self.inner.write_at(offset_bytes, buffer)
    }
    fn sync(&self) -> Result<(), DeviceError> {
        self.inner.sync()
    }
    fn access_path(&self) -> String {
        "memory".into()
    }
}

/// A wrapper that a cache treats as a different device: for tests that compare two interfaces over
/// the same bytes, which a cache refuses if one of them may write.
pub fn unrelated(device: Arc<dyn Device>) -> Arc<Hooked> {
    Arc::new(Hooked { alignment_bytes: device.alignment_bytes(), ..Hooked::new(device) })
}

/// A device in memory, and its bytes.
pub fn memory(len: usize, seed: u64) -> (Arc<MemoryDevice>, Vec<u8>) {
    let bytes = random_bytes(len, seed);
    (Arc::new(MemoryDevice::from_bytes(&bytes).unwrap()), bytes)
}

/// A bare load, which loads the page by a fault if it is absent.
pub fn load(mapping: &Mapping, at: usize) -> u8 {
    assert!((at as u64) < mapping.len());
    // SAFETY: inside the mapping.
    unsafe { mapping.as_ptr().add(at).read_volatile() }
}

/// A bare store.
pub fn store(mapping: &MappingMut, at: usize, value: u8) {
    assert!((at as u64) < mapping.len());
    // SAFETY: inside the mapping.
    unsafe { mapping.as_mut_ptr().add(at).write_volatile(value) };
}

/// A device that does its worst within safe code: it is as long as a number allows, claims to read
/// more than it was asked for, and completes only the first transfers.
pub struct Liar {
    pub len_bytes: u64,
    pub claims_more: bool,
    pub runs: usize,
}

impl Device for Liar {
    fn name(&self) -> &str {
        "liar"
    }
    fn len_bytes(&self) -> Result<u64, DeviceError> {
        Ok(self.len_bytes)
    }
    fn is_writable(&self) -> bool {
        false
    }
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        assert!(offset_bytes <= i64::MAX as u64 && buffer.len() <= 64 << 10);
        buffer.fill(7);
        Ok(if self.claims_more { usize::MAX } else { buffer.len() })
    }
    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::ReadOnly)
    }
    fn sync(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn queue_depth(&self) -> usize {
        usize::MAX
    }
    fn run(&self, batch: &mut dyn Batch, _depth: usize) {
        for _ in 0..self.runs {
            let Some(request) = batch.next() else { return };
            batch.complete(request.tag, run_one(self, &request));
        }
    }
    fn access_path(&self) -> String {
        "none".into()
    }
}

/// A device whose data is a mapping.
pub struct OverMapping {
    pub below: MappingMut,
    pub bare: bool,
}

impl OverMapping {
    pub fn failed(operation: IoOperation, error: CacheError) -> DeviceError {
        let source = std::io::Error::other(error);
        DeviceError::Io { operation, offset_bytes: 0, len_bytes: 0, source }
    }
}

impl Device for OverMapping {
    fn name(&self) -> &str {
        "over a mapping"
    }
    fn len_bytes(&self) -> Result<u64, DeviceError> {
        Ok(self.below.len())
    }
    fn is_writable(&self) -> bool {
        true
    }
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        let len = buffer.len().min((self.below.len() - offset_bytes) as usize);
        if self.bare {
            for (at, byte) in buffer[..len].iter_mut().enumerate() {
                *byte = load(&self.below, offset_bytes as usize + at);
            }
        } else {
            self.below
                .read_exact_at(&mut buffer[..len], offset_bytes)
                .map_err(|error| OverMapping::failed(IoOperation::Read, error))?;
        }
        Ok(len)
    }
    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        if self.bare {
            for (at, &byte) in buffer.iter().enumerate() {
                store(&self.below, offset_bytes as usize + at, byte);
            }
            return Ok(());
        }
        self.below
            .write_all_at(buffer, offset_bytes)
            .map_err(|error| OverMapping::failed(IoOperation::Write, error))
    }
    fn sync(&self) -> Result<(), DeviceError> {
        self.below.flush_all().map_err(|error| OverMapping::failed(IoOperation::Sync, error))
    }
    fn access_path(&self) -> String {
        "a mapping of the same cache".into()
    }
}
