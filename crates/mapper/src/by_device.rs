//! Facts about file systems, by device number: a few words that are read without a lock.
//!
//! A device number may have been reused for another file system. So a value may affect what an
//! operation costs, or how likely a mishap is, but never correctness.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// How many devices are remembered at a time.
const DEVICES: usize = 16;

/// Nonzero 32-bit values by device.
pub(super) struct ByDevice {
    /// The device in the high half, the value in the low half; 0 if unused.
    known: [AtomicU64; DEVICES],
    /// Index at which the next device is stored.
    next: AtomicU32,
}

impl ByDevice {
    pub const fn new() -> ByDevice {
        ByDevice { known: [const { AtomicU64::new(0) }; DEVICES], next: AtomicU32::new(0) }
    }

    pub fn get(&self, device: u64) -> Option<u32> {
        // Relaxed, here and below: each word is self-contained.
        let mut all = self.known.iter().map(|known| known.load(Ordering::Relaxed));
        all.find(|known| *known != 0 && known >> 32 == device).map(|known| known as u32)
    }

    /// Replaces the value of a device. Of two concurrent calls, one may be lost.
    pub fn remember(&self, device: u64, value: u32) {
        // Device numbers of the kernel have 32 bits.
        if device >> 32 != 0 || value == 0 {
            return;
        }
        let is_it = |known: &AtomicU64| {
            let known = known.load(Ordering::Relaxed);
            known != 0 && known >> 32 == device
        };
        let place = self.known.iter().position(is_it);
        let next = || self.next.fetch_add(1, Ordering::Relaxed) as usize % DEVICES;
        self.known[place.unwrap_or_else(next)]
            .store(device << 32 | u64::from(value), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_known_by_device_and_the_oldest_are_forgotten() {
        let known = ByDevice::new();
        assert_eq!(known.get(0), None);
        for device in 0..20 {
            known.remember(device, u32::MAX);
            known.remember(device, 7);
        }
        known.remember(1 << 40, 8);
        assert_eq!((known.get(3), known.get(1 << 40)), (None, None));
        assert!((4..20).all(|device| known.get(device) == Some(7)));
    }
}
