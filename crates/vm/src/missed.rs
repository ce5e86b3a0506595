//! Bare faults that are answered with zeros instead of a signal, and reported by a later call.
//!
//! A program whose run-time cannot survive SIGBUS (an interpreter, code of others in C) asks for this with each mapping. The
//! fault handler maps zeros where bytes are missing and notes the first such place; the mapping's next call that looks reports
//! it, and maps the file again. Other loads of the place find zeros until then.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Mappings whose fault was not reported yet.
static UNREPORTED: AtomicU64 = AtomicU64::new(0);

/// Whether a bare fault of any mapping of this process was answered with zeros and not reported yet: one load, to be asked
/// after each access that returned no error by itself.
#[inline]
pub fn has_missed_faults() -> bool {
    // Acquire pairs with the release in `Missed::note`: zeros that were read are seen to be such.
    UNREPORTED.load(Ordering::Acquire) > 0
}

const NONE: u64 = u64::MAX;

/// The first bare fault of a mapping that was answered with zeros and not reported yet.
#[derive(Debug)]
pub struct Missed {
    is_wanted: AtomicBool,
    offset_bytes: AtomicU64,
}

impl Default for Missed {
    fn default() -> Self {
        Missed::new()
    }
}

impl Missed {
    /// Nothing was missed, and bare faults are not answered.
    pub const fn new() -> Missed {
        Missed { is_wanted: AtomicBool::new(false), offset_bytes: AtomicU64::new(NONE) }
    }

    /// From now on bare faults are answered.
    pub fn answer(&self) {
        // Relaxed: a fault in another thread at the same time is answered or not.
        self.is_wanted.store(true, Ordering::Relaxed);
    }

    /// Whether bare faults are answered. Async-signal-safe.
    pub fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::Relaxed)
    }

    /// Whether a fault was noted and not taken yet. Async-signal-safe.
    pub fn is_noted(&self) -> bool {
        // Relaxed: a fault at the same time is answered as if it had come before or after.
        self.offset_bytes.load(Ordering::Relaxed) != NONE
    }

    /// Notes a fault at this offset; the first one counts. Async-signal-safe.
    pub fn note(&self, offset_bytes: u64) {
        let first = self.offset_bytes.compare_exchange(
            NONE,
            offset_bytes,
            // Release pairs with the acquire in `take`.
            Ordering::Release,
            Ordering::Relaxed,
        );
        if first.is_ok() {
            // Release pairs with the acquire in `has_missed_faults`.
            UNREPORTED.fetch_add(1, Ordering::Release);
        }
    }

    /// The offset of the first fault since the last call.
    pub fn take(&self) -> Option<u64> {
        let offset_bytes = self.offset_bytes.swap(NONE, Ordering::Acquire);
        (offset_bytes != NONE).then(|| {
            // Relaxed: only compared with 0. It may come before the increment of `note`: the count is of 64 bits and wraps.
            UNREPORTED.fetch_sub(1, Ordering::Relaxed);
            offset_bytes
        })
    }
}

impl Drop for Missed {
    fn drop(&mut self) {
        self.take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_several_is_reported_once() {
        let missed = Missed::new();
        assert!(!missed.is_wanted() && missed.take().is_none());
        missed.answer();
        missed.note(8192);
        missed.note(4096);
        assert!(missed.is_wanted() && has_missed_faults());
        assert_eq!((missed.take(), missed.take()), (Some(8192), None));
        missed.note(0);
        drop(missed);
        assert!(!has_missed_faults(), "no other test of this program notes one");
    }
}
