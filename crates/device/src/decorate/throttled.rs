//! A decorator that slows a device down.
//!
//! Each transfer occupies the device's single *line* for its length divided by the rate, one after
//! the other, and then takes the latency in addition, which concurrent transfers spend in parallel.
//! So a batch at depth 8 pays the latency once where eight single transfers pay it eight times, as
//! on a real disk.
//!
//! Meant for tests and experiments: short waits spin, since a sleep overshoots by more than a fast
//! device takes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::intercept::{Intercept, Intercepted};
use crate::forward::forward;
use crate::{Batch, Device, DeviceError, Request};

/// Waits shorter than this spin.
const SPUN: Duration = Duration::from_micros(100);

/// The speed of a [`Throttled`] device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rate {
    /// Added to each transfer.
    pub latency: Duration,
    /// Bytes per second for all transfers together; `None` for no limit.
    pub bytes_per_second: Option<u64>,
}

/// A device with a fixed latency for each transfer and a bound on bytes per second.
///
/// ```
/// use aquifer_device::{Device, MemoryDevice, Rate, Throttled};
/// use std::time::Duration;
/// let rate = Rate { latency: Duration::from_micros(80), bytes_per_second: Some(1 << 30) };
/// let disk = Throttled::new(MemoryDevice::new(1 << 20)?, rate);
/// disk.write_at(0, &[1; 4096])?;
/// # Ok::<(), aquifer_device::DeviceError>(())
/// ```
#[derive(Debug)]
pub struct Throttled<D> {
    device: D,
    line: Line,
}

#[derive(Debug)]
struct Line {
    rate: Rate,
    opened: Instant,
    /// When the line becomes free, in nanoseconds after `opened`.
    free_at_ns: AtomicU64,
}

impl Line {
    /// Reserves the line for a transfer that starts now; returns when the transfer may end.
    fn reserve(&self, len_bytes: usize) -> Instant {
        let now_ns = u64::try_from(self.opened.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let occupied_ns = self.rate.bytes_per_second.map_or(0, |bytes_per_second| {
            let ns = len_bytes as u128 * 1_000_000_000 / u128::from(bytes_per_second.max(1));
            u64::try_from(ns).unwrap_or(u64::MAX)
        });
        let end_of = |free_at_ns: u64| free_at_ns.max(now_ns).saturating_add(occupied_ns);
        // Relaxed: a clock that publishes nothing else.
        let (Ok(before_ns) | Err(before_ns)) =
            self.free_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free_at_ns| {
                Some(end_of(free_at_ns))
            });
        self.opened + Duration::from_nanos(end_of(before_ns)) + self.rate.latency
    }
}

fn wait_until(due: Instant) {
    loop {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if left > SPUN {
            std::thread::sleep(left - SPUN);
        } else {
            std::hint::spin_loop();
        }
    }
}

impl<D: Device> Throttled<D> {
    /// Slows `device` down to `rate`.
    pub fn new(device: D, rate: Rate) -> Self {
        let line = Line { rate, opened: Instant::now(), free_at_ns: AtomicU64::new(0) };
        Throttled { device, line }
    }
}

impl Intercept for &Line {
    /// When the transfer may end.
    type Note = Instant;

    fn start(&mut self, request: &Request) -> Result<Instant, Result<usize, DeviceError>> {
        Ok(self.reserve(request.len_bytes))
    }

    /// Waits until this transfer may end; later transfers of the batch make progress in the same
    /// time.
    fn end(
        &mut self,
        _: &Request,
        due: Instant,
        result: Result<usize, DeviceError>,
    ) -> Result<usize, DeviceError> {
        wait_until(due);
        result
    }
}

impl<D: Device> Device for Throttled<D> {
    forward!(self => self.device;
        name, identity, len_bytes, alignment_bytes, is_writable, writes_are_signal_safe, queue_depth,
        bytes_in_flight, claim_buffers, counters);

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        self.line.read_at(&self.device, offset_bytes, buffer)
    }

    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        self.line.write_at(&self.device, offset_bytes, buffer)
    }

    fn sync(&self) -> Result<(), DeviceError> {
        let due = self.line.reserve(0);
        let result = self.device.sync();
        wait_until(due);
        result
    }

    fn run(&self, batch: &mut dyn Batch, depth: usize) {
        self.device.run(&mut Intercepted::new(batch, &self.line), depth);
    }

    fn access_path(&self) -> String {
        format!("{} (throttled)", self.device.access_path())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_shared_and_the_latency_is_not() {
        let latency = Duration::from_secs(1);
        let rate = Rate { latency, bytes_per_second: Some(1_000) };
        let line = Line { rate, opened: Instant::now(), free_at_ns: AtomicU64::new(0) };
        let first = line.reserve(500);
        let second = line.reserve(500);
        assert_eq!(second - first, Duration::from_millis(500), "one after the other on the line");
        assert!(first >= line.opened + latency + Duration::from_millis(500));
    }

    #[test]
    fn without_a_limit_only_latency_counts() {
        let line = Line {
            rate: Rate { latency: Duration::from_secs(1), bytes_per_second: None },
            opened: Instant::now(),
            free_at_ns: AtomicU64::new(0),
        };
        assert!(line.reserve(usize::MAX) >= line.opened + Duration::from_secs(1));
        assert!(line.reserve(1) <= Instant::now() + Duration::from_secs(1));
    }
}
