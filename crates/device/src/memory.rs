//! Plain memory as a device: for tests, and as a tier of DRAM below a cache.
//!
//! Byte-addressable, so a cache may map it instead of copying. Volatile: nothing survives the
//! process, and [`Device::sync`] has nothing to do. A transfer that overlaps a concurrent write may
//! see some of its bytes and not others, as on any device.

use crate::region::Region;
use crate::{Device, DeviceError, DeviceIdentity, bounds};

/// A device in anonymous memory of a fixed length.
///
/// ```
/// use aquifer_device::{Device, MemoryDevice};
/// let device = MemoryDevice::from_bytes(b"hello, device")?;
/// let mut word = [0; 6];
/// assert_eq!(device.read_at(7, &mut word)?, 6);
/// assert_eq!(&word, b"device");
/// # Ok::<(), aquifer_device::DeviceError>(())
/// ```
#[derive(Debug)]
pub struct MemoryDevice {
    region: Region,
}

impl MemoryDevice {
    /// Creates a device of `len_bytes` zeroed bytes, page-aligned. Memory is allocated when first
    /// touched.
    ///
    /// # Errors
    /// [`DeviceError::Open`] if address space or memory is short.
    pub fn new(len_bytes: usize) -> Result<Self, DeviceError> {
        match Region::anonymous(len_bytes) {
            Ok(region) => Ok(MemoryDevice { region }),
            Err(source) => {
                Err(DeviceError::Open { path: format!("memory of {len_bytes} bytes"), source })
            }
        }
    }

    /// Creates a device with this content and length.
    ///
    /// # Errors
    /// As [`MemoryDevice::new`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DeviceError> {
        let device = Self::new(bytes.len())?;
        device.region.write(0, bytes);
        Ok(device)
    }

    /// Returns a copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.region.len_bytes()];
        self.region.read(0, &mut bytes);
        bytes
    }
}

impl Device for MemoryDevice {
    fn name(&self) -> &str {
        "memory"
    }

    fn identity(&self) -> DeviceIdentity {
        DeviceIdentity::of_object(self.region.start())
    }

    fn len_bytes(&self) -> Result<u64, DeviceError> {
        Ok(self.region.len_bytes() as u64)
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        let device_bytes = self.region.len_bytes() as u64;
        let readable_bytes = bounds::readable_bytes(offset_bytes, buffer.len(), device_bytes)?;
        self.region.read(offset_bytes, &mut buffer[..readable_bytes]);
        Ok(readable_bytes)
    }

    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        bounds::check_write(offset_bytes, buffer.len(), self.region.len_bytes() as u64)?;
        self.region.write(offset_bytes, buffer);
        Ok(())
    }

    fn writes_are_signal_safe(&self) -> bool {
        true
    }

    /// Nothing to do: memory does not outlive the process.
    fn sync(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn dax(&self) -> Option<(*mut u8, usize)> {
        Some((self.region.start(), self.region.len_bytes()))
    }

    fn access_path(&self) -> String {
        "memory (volatile)".into()
    }
}
