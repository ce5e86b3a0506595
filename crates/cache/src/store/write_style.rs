//! Whether writes to a device are CPU work or wait for the device.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// Whether writes to a device block the writer, learnt from batches that run serially.
///
/// Measured by voluntary context switches, because times mean little on a busy machine.
#[derive(Default)]
pub struct WriteStyle {
    style: AtomicU8,
    batches: AtomicU32,
}

const WAITING: u8 = 1;
const COPYING: u8 = 2;
/// Serial transfers in a sample.
const SAMPLE: usize = 8;
/// A device found to block is sampled again after this many batches: it may only have been busy.
const BATCHES_BETWEEN_SAMPLES: u32 = 32;

impl WriteStyle {
    /// Whether a write is CPU work (memory, compressed memory): a queue gains nothing, and a
    /// faulting thread can write back itself.
    pub fn is_copying(&self) -> bool {
        self.style.load(Ordering::Relaxed) == COPYING
    }

    /// How many of a batch's transfers to run serially.
    pub fn serial_part(&self, transfers: usize) -> usize {
        let batch = self.batches.fetch_add(1, Ordering::Relaxed);
        if self.is_copying() || transfers == 1 {
            transfers
        } else if batch.is_multiple_of(BATCHES_BETWEEN_SAMPLES) {
            transfers.min(SAMPLE)
        } else {
            0
        }
    }

    pub fn learn(&self, transfers: usize, switches: u64) {
        if transfers >= SAMPLE || transfers > 0 && self.style.load(Ordering::Relaxed) == 0 {
            let style = if switches * 2 > transfers as u64 { WAITING } else { COPYING };
            self.style.store(style, Ordering::Relaxed);
        }
    }
}
