//! Aquifer: a device with a tier that the node's processes share, under a cache in each.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use aquifer::remote::{RemoteDevice, Tier};
use aquifer::{Bytes, Cache, Mapping, Rows};

use super::{BUCKET, KEY, LINE_BYTES, Remote, Site, parts};
use crate::job::RemoteKind;

/// What a visit is asked for at a time in a pass.
const PART_BYTES: u64 = 64 << 10;

fn device(site: Site<'_>) -> Result<RemoteDevice> {
    let tier = Tier::open(site.directory.join("tier"))?;
    // All of it, and the proofs: the others may keep everything, too.
    tier.set_budget_bytes(site.len_bytes() + site.len_bytes() / 8)?;
    let device = RemoteDevice::options()
        .endpoint(&site.work.endpoint)
        .allow_http(true)
        .anonymous(true)
        .region("us-east-1")
        .in_flight(site.work.in_flight)
        .tier(&tier)
        .open(&format!("s3://{BUCKET}/{KEY}"))?;
    Ok(device)
}

fn lines(bytes: Bytes<'_>) -> u64 {
    let mut sum = 0_u64;
    for at in (0..bytes.len()).step_by(LINE_BYTES as usize) {
        sum = sum.wrapping_add(u64::from_le(bytes.get(at)));
    }
    sum
}

/// What the device counts. It goes on without a tier that cannot be used, which would be another contender.
fn details_of(device: &RemoteDevice) -> Result<BTreeMap<String, f64>> {
    let stats = device.stats();
    if let Some(problem) = stats.tier_problem {
        bail!("the tier was not used: {problem}");
    }
    let counts = [
        ("device_requests", stats.requests as f64),
        ("device_received_bytes", stats.received_bytes as f64),
        ("measured_latency_us", stats.latency.as_micros() as f64),
        ("measured_bytes_per_second", stats.bytes_per_second as f64),
    ];
    Ok(counts.map(|(name, count)| (name.to_owned(), count)).into())
}

/// A mapping, visited by ranges.
pub struct Mapped {
    mapping: Mapping,
    device: Arc<RemoteDevice>,
    len_bytes: u64,
}

impl Mapped {
    /// Opens the object.
    pub fn open(site: Site<'_>) -> Result<Self> {
        let device = Arc::new(device(site)?);
        let cache = Cache::builder().budget_bytes(site.cache_bytes).build()?;
        let mapping = cache.map(device.clone())?;
        Ok(Self { mapping, device, len_bytes: site.len_bytes() })
    }

    fn visit(&self, ranges: impl Iterator<Item = Range<u64>>) -> Result<u64> {
        let mut sum = 0_u64;
        self.mapping.visit_many(ranges, |visited| {
            sum = sum.wrapping_add(lines(visited.bytes));
            ControlFlow::Continue(())
        })?;
        Ok(sum)
    }
}

impl Remote for Mapped {
    fn ranges(&mut self, ranges: &[Range<u64>]) -> Result<u64> {
        self.visit(ranges.iter().cloned())
    }

    fn pass(&mut self) -> Result<u64> {
        self.visit(parts(self.len_bytes, PART_BYTES))
    }

    fn details(&self) -> Result<BTreeMap<String, f64>> {
        details_of(&self.device)
    }
}

/// A cache of rows; other work as by [`Mapped`].
pub struct CachedRows {
    rows: Rows,
    row_bytes: u64,
    device: Arc<RemoteDevice>,
}

impl CachedRows {
    /// Opens the object.
    pub fn open(site: Site<'_>) -> Result<Box<dyn Remote>> {
        let RemoteKind::Random { row_bytes, .. } = site.work.kind else {
            return Ok(Box::new(Mapped::open(site)?));
        };
        let device = Arc::new(device(site)?);
        let options = Rows::options(usize::try_from(row_bytes)?).budget_bytes(site.cache_bytes);
        let rows = options.open_device(device.clone()).context("rows of a remote device")?;
        Ok(Box::new(Self { rows, row_bytes, device }))
    }
}

impl Remote for CachedRows {
    fn ranges(&mut self, ranges: &[Range<u64>]) -> Result<u64> {
        let rows: Vec<u64> = ranges.iter().map(|range| range.start / self.row_bytes).collect();
        let mut sum = 0_u64;
        self.rows.get_many(&rows, |_, bytes| sum = sum.wrapping_add(super::lines_of(bytes)))?;
        Ok(sum)
    }

    fn pass(&mut self) -> Result<u64> {
        let count = self.rows.len();
        let mut sum = 0_u64;
        let all: Vec<u64> = (0..count).collect();
        for rows in all.chunks(4096) {
            self.rows.get_many(rows, |_, bytes| sum = sum.wrapping_add(super::lines_of(bytes)))?;
        }
        Ok(sum)
    }

    fn details(&self) -> Result<BTreeMap<String, f64>> {
        details_of(&self.device)
    }
}
