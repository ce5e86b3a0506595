//! What requests cost: counters, the measured latency and bandwidth, and what follows from them.
//!
//! A request occupies one of `n` places for its latency `L`, and then for the time of its bytes in the n-th part of the
//! bandwidth `B`. So reading a gap along costs less than a second request while the gap is shorter than `L·B/n`: 10 ms,
//! 125 MB/s and 64 places give 19.5 KiB. A request of sixteen times that wastes about a seventeenth of its place's time on
//! latency; a longer one would gain little and leave other places idle. Where bytes have a price, a gap is not read along
//! if it costs more than a request.
//!
//! `L` is measured to the headers. `B` follows from the rest of the time that a long answer took, and from how many were
//! under way: bodies wait in the sockets' buffers, so the time from headers to end would tell too much.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::RemoteOptions;
use crate::options::SMALLEST_REQUEST_BYTES;

/// Assumed until measured.
const FIRST_LATENCY: Duration = Duration::from_millis(10);
const FIRST_BYTES_PER_SECOND: u64 = 125_000_000;
/// Shorter bodies arrive with their headers and tell nothing about bandwidth.
const TELLING_BODY_BYTES: u64 = 64 << 10;
const LATENCIES_PER_REQUEST: u64 = 16;

/// What a remote device has asked for and received; from [`RemoteDevice::stats`](crate::RemoteDevice::stats).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RemoteStats {
    /// HTTP requests sent, also retries and those for credentials. None are sent for `file://`.
    pub requests: u64,
    /// Ranges of the object that were requested, each with its retries.
    pub ranges: u64,
    /// Those that were late, so that a second request was sent; see
    /// [`RemoteOptions::hedge`](crate::RemoteOptions::hedge).
    pub hedged_ranges: u64,
    /// Those that failed.
    pub failed_ranges: u64,
    /// Bytes of the object received, with the gaps that merged requests read along and what failed requests brought.
    pub received_bytes: u64,
    /// Bytes handed to callers.
    pub delivered_bytes: u64,
    /// Bytes handed to callers from the tier, without a request.
    pub tier_bytes: u64,
    /// Why the tier is not written any more, or not used at all: a full disk, an I/O error, a file of another
    /// user.
    pub tier_problem: Option<String>,
    /// The measured time from a request to its headers, a moving average.
    pub latency: Duration,
    /// The measured rate of all requests in flight, a moving average.
    pub bytes_per_second: u64,
    /// An estimate from the prices of the options and the counts above.
    pub cost: f64,
}

impl RemoteStats {
    /// The counts and estimates with their names, as [`Device::counters`](aquifer_device::Device::counters) returns them.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("requests", self.requests),
            ("ranges", self.ranges),
            ("hedged_ranges", self.hedged_ranges),
            ("failed_ranges", self.failed_ranges),
            ("received_bytes", self.received_bytes),
            ("delivered_bytes", self.delivered_bytes),
            ("tier_bytes", self.tier_bytes),
            ("cost_billionths", (self.cost * 1e9) as u64),
            ("latency_ns_now", u64::try_from(self.latency.as_nanos()).unwrap_or(u64::MAX)),
            ("bytes_per_second_now", self.bytes_per_second),
        ]
    }
}

#[derive(Debug)]
pub(crate) struct Costs {
    in_flight: u64,
    largest_request_bytes: u64,
    price_per_million: f64,
    price_per_gib: f64,
    pub ranges: AtomicU64,
    pub hedged_ranges: AtomicU64,
    pub failed_ranges: AtomicU64,
    pub received_bytes: AtomicU64,
    pub delivered_bytes: AtomicU64,
    pub tier_bytes: AtomicU64,
    latency_ns: AtomicU64,
    bytes_per_second: AtomicU64,
}

// Relaxed throughout: counters and estimates, which order nothing.
const RELAXED: Ordering = Ordering::Relaxed;

impl Costs {
    pub fn new(options: &RemoteOptions) -> Costs {
        Costs {
            in_flight: options.in_flight as u64,
            largest_request_bytes: options.largest_request_bytes as u64,
            price_per_million: options.price_per_million,
            price_per_gib: options.price_per_gib,
            ranges: AtomicU64::new(0),
            hedged_ranges: AtomicU64::new(0),
            failed_ranges: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
            delivered_bytes: AtomicU64::new(0),
            tier_bytes: AtomicU64::new(0),
            latency_ns: AtomicU64::new(FIRST_LATENCY.as_nanos() as u64),
            bytes_per_second: AtomicU64::new(FIRST_BYTES_PER_SECOND),
        }
    }

    /// Learns from a request that succeeded at once, while `in_flight` were under way: how long the headers took, and
    /// the whole answer.
    pub fn learn(&self, latency: Duration, whole: Duration, body_bytes: u64, in_flight: u64) {
        smooth(&self.latency_ns, u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
        let usual = Duration::from_nanos(self.latency_ns.load(RELAXED));
        let transfer = whole.saturating_sub(usual.min(latency));
        if body_bytes >= TELLING_BODY_BYTES && !transfer.is_zero() {
            let rate = body_bytes as f64 / transfer.as_secs_f64() * in_flight as f64;
            smooth(&self.bytes_per_second, rate as u64);
        }
    }

    /// How long a request of so many bytes usually takes while all places are occupied.
    pub fn expected(&self, bytes: u64) -> Duration {
        let latency = Duration::from_nanos(self.latency_ns.load(RELAXED));
        let rate = self.bytes_per_second.load(RELAXED).max(1) / self.in_flight;
        latency + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64)
    }

    /// What a place could receive in the time of a request's latency.
    fn latency_bytes(&self) -> u64 {
        let latency_ns = u128::from(self.latency_ns.load(RELAXED));
        let rate = u128::from(self.bytes_per_second.load(RELAXED));
        let bytes = latency_ns * rate / 1_000_000_000 / u128::from(self.in_flight);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// The longest gap that costs less to read along than a second request.
    pub fn gap_bytes(&self) -> u64 {
        let mut bytes = self.latency_bytes();
        if self.price_per_gib > 0.0 {
            let price_per_byte = self.price_per_gib / (1u64 << 30) as f64;
            bytes = bytes.min((self.price_per_million / 1e6 / price_per_byte) as u64);
        }
        bytes.clamp(SMALLEST_REQUEST_BYTES as u64, self.largest_request_bytes)
    }

    /// The length up to which requests are merged.
    pub fn merged_bytes(&self) -> u64 {
        let bytes = self.latency_bytes().saturating_mul(LATENCIES_PER_REQUEST);
        bytes.clamp(SMALLEST_REQUEST_BYTES as u64, self.largest_request_bytes)
    }

    pub fn stats(&self, requests: u64) -> RemoteStats {
        let received_bytes = self.received_bytes.load(RELAXED);
        let gib = received_bytes as f64 / (1u64 << 30) as f64;
        RemoteStats {
            requests,
            ranges: self.ranges.load(RELAXED),
            hedged_ranges: self.hedged_ranges.load(RELAXED),
            failed_ranges: self.failed_ranges.load(RELAXED),
            received_bytes,
            delivered_bytes: self.delivered_bytes.load(RELAXED),
            tier_bytes: self.tier_bytes.load(RELAXED),
            tier_problem: None,
            latency: Duration::from_nanos(self.latency_ns.load(RELAXED)),
            bytes_per_second: self.bytes_per_second.load(RELAXED),
            cost: requests as f64 / 1e6 * self.price_per_million + gib * self.price_per_gib,
        }
    }
}

/// Moves a value an eighth of the way. Of two threads at once one may be lost.
fn smooth(value: &AtomicU64, sample: u64) {
    let old = value.load(RELAXED);
    value.store(old - old / 8 + sample / 8, RELAXED);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_follow_latency_and_bandwidth() {
        let costs = Costs::new(&RemoteOptions::default());
        assert_eq!(costs.gap_bytes(), 19_531);
        assert_eq!(costs.merged_bytes(), 16 * 19_531);
        let (second, moment) = (Duration::from_secs(1), Duration::from_micros(1));
        for _ in 0..100 {
            costs.learn(second, 2 * second, 1 << 30, 64);
        }
        assert_eq!(costs.merged_bytes(), 8 << 20);
        for _ in 0..300 {
            costs.learn(moment, second, 1 << 20, 1);
        }
        assert_eq!(costs.gap_bytes(), 4 << 10);
    }

    #[test]
    fn gaps_that_cost_more_than_a_request_are_not_read() {
        let costs = |per_gib| Costs::new(&RemoteOptions::default().prices(0.4, per_gib));
        assert_eq!(costs(0.0).gap_bytes(), 19_531);
        assert_eq!(costs(0.09).gap_bytes(), 4772);
        assert_eq!(costs(0.09).merged_bytes(), 16 * 19_531);
        assert_eq!(costs(1.0).gap_bytes(), 4096);
    }

    #[test]
    fn short_bodies_tell_no_bandwidth() {
        let costs = Costs::new(&RemoteOptions::default());
        costs.learn(Duration::from_millis(10), Duration::from_millis(11), 4096, 1);
        assert_eq!(costs.stats(0).bytes_per_second, FIRST_BYTES_PER_SECOND);
    }

    #[test]
    fn costs_are_of_requests_and_bytes() {
        let costs = Costs::new(&RemoteOptions::default().prices(2.0, 0.5));
        costs.received_bytes.store(4 << 30, RELAXED);
        assert_eq!(costs.stats(500_000).cost, 3.0);
    }
}
