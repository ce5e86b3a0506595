//! What requests cost: counters, the measured latency and bandwidth, and what follows from them.
//!
//! A request occupies one of `n` places for its latency `L`, and then for the time of its bytes in the n-th part of the
//! bandwidth `B`. `n` is what a device may have in flight, but at most 64: more places serve scattered reads, and no reason
//! to cut others into more requests, which cost time of a processor as well. So reading a gap along costs less than a second request while the gap is shorter than `L·B/n`: 10 ms,
//! 125 MB/s and 64 places give 19.5 KiB. A request of sixteen times that wastes about a seventeenth of its place's time on
//! latency; a longer one would gain little and leave other places idle. Where bytes have a price, a gap is not read along
//! if it costs more than a request.
//!
//! `L` is measured to the headers. Of requests at once some wait for others, so it follows shorter times at once, and longer
//! ones only as often as a request could have been alone. `B` is what all requests together received in a time without a
//! pause: bodies wait in the sockets' buffers, so what one of them took tells too much. Only times of long answers count, in
//! which the line was full.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::RemoteOptions;
use crate::buffers::SMALLEST_REQUEST_BYTES;

/// Assumed until measured.
const FIRST_LATENCY: Duration = Duration::from_millis(10);
const FIRST_BYTES_PER_SECOND: u64 = 125_000_000;
/// Shorter bodies, on average, leave the line idle and tell nothing about bandwidth.
const TELLING_BODY_BYTES: u64 = 64 << 10;
/// The rate is measured that often while requests are under way, and when the last one ends.
const SPAN: Duration = Duration::from_millis(100);
const LATENCIES_PER_REQUEST: u64 = 16;
/// On a short line shorter requests would do, which cost time of a processor, and tell nothing about bandwidth.
const SMALLEST_MERGED_BYTES: u64 = 4 * TELLING_BODY_BYTES;
/// Places that requests are cut for.
const MOST_PLACES: u64 = 64;

/// What a remote device has asked for and received; from [`RemoteDevice::stats`](crate::RemoteDevice::stats).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RemoteStats {
    /// HTTP requests sent, also retries, those that redirects led to, and those for credentials. None are sent for `file://`.
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
    /// The measured time from a request to its headers: a moving average that follows shorter times faster than longer ones,
    /// which tell of load.
    pub latency: Duration,
    /// The measured rate of all requests in flight while their answers were long, a moving average.
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
    /// `n` above.
    places: u64,
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
    /// For times as numbers of nanoseconds.
    epoch: Instant,
    latency_raised_ns: AtomicU64,
    under_way: AtomicU64,
    span: Span,
}

/// A time without a pause.
#[derive(Debug, Default)]
struct Span {
    since_ns: AtomicU64,
    /// Bytes received before.
    bytes_before: AtomicU64,
    answers: AtomicU64,
    /// How long no answer could come at first.
    latency_ns: AtomicU64,
}

// Relaxed throughout: counters and estimates, which order nothing.
const RELAXED: Ordering = Ordering::Relaxed;

impl Costs {
    pub fn new(options: &RemoteOptions) -> Costs {
        Costs {
            places: (options.in_flight as u64).min(MOST_PLACES),
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
            epoch: Instant::now(),
            latency_raised_ns: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
            span: Span::default(),
        }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Notes a request, until the result is dropped.
    pub fn begin(&self) -> UnderWay<'_> {
        self.began(self.now_ns());
        UnderWay(self)
    }

    /// Forgets the requests under way: they are a parent's, and end there.
    pub fn forget_requests(&self) {
        self.under_way.store(0, RELAXED);
    }

    fn began(&self, now_ns: u64) {
        if self.under_way.fetch_add(1, RELAXED) == 0 {
            self.start_span(now_ns, self.latency_ns.load(RELAXED));
        }
    }

    fn start_span(&self, now_ns: u64, latency_ns: u64) {
        self.span.since_ns.store(now_ns, RELAXED);
        self.span.bytes_before.store(self.received_bytes.load(RELAXED), RELAXED);
        self.span.answers.store(0, RELAXED);
        self.span.latency_ns.store(latency_ns, RELAXED);
    }

    fn ended(&self, now_ns: u64) {
        // Another thread may have forgotten them.
        let less = |count: u64| Some(count.saturating_sub(1));
        let left =
            self.under_way.fetch_update(RELAXED, RELAXED, less).unwrap_or(0).saturating_sub(1);
        let answers = self.span.answers.fetch_add(1, RELAXED) + 1;
        let took_ns = now_ns.saturating_sub(self.span.since_ns.load(RELAXED));
        if left > 0 && u128::from(took_ns) < SPAN.as_nanos() {
            return;
        }
        let bytes = self.received_bytes.load(RELAXED) - self.span.bytes_before.load(RELAXED);
        let transfer_ns = took_ns.saturating_sub(self.span.latency_ns.load(RELAXED));
        if bytes / answers >= TELLING_BODY_BYTES && transfer_ns > 0 {
            let rate = u128::from(bytes) * 1_000_000_000 / u128::from(transfer_ns);
            smooth(&self.bytes_per_second, u64::try_from(rate).unwrap_or(u64::MAX));
        }
        self.start_span(now_ns, 0);
    }

    /// Learns from a request that succeeded at once how long its headers took.
    pub fn learn_latency(&self, latency: Duration) {
        self.learn_latency_at(self.now_ns(), latency);
    }

    fn learn_latency_at(&self, now_ns: u64, latency: Duration) {
        let sample_ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        let usual_ns = self.latency_ns.load(RELAXED);
        if sample_ns > usual_ns {
            let since_ns = now_ns.saturating_sub(self.latency_raised_ns.load(RELAXED));
            if since_ns < usual_ns {
                return;
            }
            self.latency_raised_ns.store(now_ns, RELAXED);
        }
        smooth(&self.latency_ns, sample_ns);
    }

    /// How long a request of so many bytes usually takes while all places are occupied.
    pub fn expected(&self, bytes: u64) -> Duration {
        let latency = Duration::from_nanos(self.latency_ns.load(RELAXED));
        let rate = self.bytes_per_second.load(RELAXED).max(1) / self.places;
        latency + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64)
    }

    /// What a place could receive in the time of a request's latency.
    fn latency_bytes(&self) -> u64 {
        let latency_ns = u128::from(self.latency_ns.load(RELAXED));
        let rate = u128::from(self.bytes_per_second.load(RELAXED));
        let bytes = latency_ns * rate / 1_000_000_000 / u128::from(self.places);
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
        bytes.max(SMALLEST_MERGED_BYTES).min(self.largest_request_bytes)
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

/// A request, while it lives: also one that fails or is cancelled.
pub(crate) struct UnderWay<'a>(&'a Costs);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.ended(self.0.now_ns());
    }
}

/// Moves a value an eighth of the way to a sample, of which at most its double counts. Of two threads at once one may be lost.
fn smooth(value: &AtomicU64, sample: u64) {
    let old = value.load(RELAXED);
    let sample = sample.min(old.saturating_mul(2).max(8));
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
        let mut line = Line::new(costs);
        let (second, moment) = (Duration::from_secs(1), Duration::from_micros(1));
        for _ in 0..100 {
            line.answers(second, 1 << 30, 4);
        }
        assert_eq!(line.costs.merged_bytes(), 8 << 20);
        for _ in 0..300 {
            line.answers(moment, 1 << 20, 1);
        }
        assert_eq!(line.costs.gap_bytes(), 4 << 10);
    }

    /// A line of 1 GiB a second.
    struct Line {
        costs: Costs,
        now_ns: u64,
    }

    impl Line {
        fn new(costs: Costs) -> Line {
            Line { costs, now_ns: 0 }
        }

        fn wait(&mut self, time: Duration) {
            self.now_ns += time.as_nanos() as u64;
        }

        /// Requests at once, each with so many bytes: their answers share the line.
        fn answers(&mut self, latency: Duration, body_bytes: u64, count: u64) {
            for _ in 0..count {
                self.costs.began(self.now_ns);
            }
            self.wait(latency);
            for _ in 0..count {
                self.costs.learn_latency_at(self.now_ns, latency);
                self.wait(Duration::from_nanos(body_bytes * 1_000_000_000 / (1 << 30)));
                self.costs.received_bytes.fetch_add(body_bytes, RELAXED);
                self.costs.ended(self.now_ns);
            }
        }
    }

    #[test]
    fn the_rate_is_that_of_the_line() {
        for (body_bytes, count) in [(1 << 20, 1), (256 << 10, 64), (8 << 20, 300)] {
            let mut line = Line::new(Costs::new(&RemoteOptions::default()));
            for _ in 0..100 {
                line.answers(Duration::from_millis(10), body_bytes, count);
            }
            let rate = line.costs.stats(0).bytes_per_second as f64 / f64::from(1 << 30);
            assert!((0.9..1.1).contains(&rate), "{count} of {body_bytes}: {rate}");
        }
    }

    #[test]
    fn requests_that_wait_for_each_other_are_one_sample_of_latency() {
        let costs = Costs::new(&RemoteOptions::default());
        for _ in 0..1000 {
            costs.learn_latency_at(1 << 30, Duration::from_secs(5));
        }
        let latency = costs.stats(0).latency;
        assert!(latency < 2 * FIRST_LATENCY, "{latency:?}");
        // One after the other.
        for second in 2..102_u64 {
            costs.learn_latency_at(second << 33, Duration::from_secs(5));
        }
        assert!(costs.stats(0).latency > Duration::from_secs(4));
        for _ in 0..100 {
            costs.learn_latency_at(0, FIRST_LATENCY);
        }
        assert!(costs.stats(0).latency < 2 * FIRST_LATENCY);
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
        let mut line = Line::new(costs);
        line.answers(Duration::from_millis(10), 4096, 256);
        assert_eq!(line.costs.stats(0).bytes_per_second, FIRST_BYTES_PER_SECOND);
    }

    #[test]
    fn costs_are_of_requests_and_bytes() {
        let costs = Costs::new(&RemoteOptions::default().prices(2.0, 0.5));
        costs.received_bytes.store(4 << 30, RELAXED);
        assert_eq!(costs.stats(500_000).cost, 3.0);
    }
}
