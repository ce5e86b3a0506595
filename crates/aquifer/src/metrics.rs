//! Statistics as [OpenMetrics](https://prometheus.io/docs/specs/om/open_metrics_spec/) text, as
//! Prometheus and others scrape it.
//!
//! ```
//! use aquifer::metrics::Metrics;
//! use aquifer::{Cache, Mapper};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let cache = Cache::builder().budget_bytes(8 << 20).build()?;
//! let mapper = Mapper::builder().build()?;
//! let mut metrics = Metrics::new();
//! metrics.cache(&[("cache", "orders")], &cache.stats());
//! metrics.mapper(&[], &mapper.stats());
//! let text = metrics.to_string(); //    the body of the answer to a scrape
//! assert!(text.contains("aquifer_cache_misses_total{cache=\"orders\"} 0\n"));
//! assert!(text.ends_with("# EOF\n"));
//! # Ok(())
//! # }
//! ```
//!
//! Serve it with the content type [`CONTENT_TYPE`]. `aquifer stat --openmetrics` prints the same for
//! the caches that running programs publish.

use std::collections::BTreeMap;
use std::fmt;

use aquifer_cache::Stats;
use aquifer_mapper::MapperStats;
use aquifer_pool::PoolInfo;

/// The content type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Of each counter of a device its name there and here, its meaning, and its unit's share of the unit here.
const DEVICE_COUNTERS: [(&str, &str, &str, f64); 10] = [
    ("requests", "device_requests", "Requests sent, also retries", 1.0),
    ("ranges", "device_ranges", "Ranges requested, each with its retries", 1.0),
    ("hedged_ranges", "device_hedged_ranges", "Ranges requested twice, being late", 1.0),
    ("failed_ranges", "device_failed_ranges", "Ranges that could not be read", 1.0),
    ("received_bytes", "device_received_bytes", "Bytes received", 1.0),
    ("delivered_bytes", "device_delivered_bytes", "Bytes handed to the cache", 1.0),
    ("tier_bytes", "device_tier_bytes", "Bytes handed to the cache from the local tier", 1.0),
    ("cost_billionths", "device_cost", "Estimated cost, in the currency of the prices", 1e9),
    ("latency_ns_now", "device_latency_seconds", "Time from a request to its answer", 1e9),
    (
        "bytes_per_second_now",
        "device_rate_bytes",
        "Bytes received per second while requests are under way",
        1.0,
    ),
];

/// The labels of a value: pairs of a name and a value. They must tell the values of one name apart:
/// of two values with equal names and labels the later one counts.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

/// Collects values of one moment; its `Display` is the text. Names begin with `aquifer_`; sizes are
/// in bytes and times in seconds.
#[derive(Debug, Default, Clone)]
pub struct Metrics {
    families: Vec<Family>,
}

/// The values of one name.
#[derive(Debug, Clone)]
struct Family {
    name: String,
    kind: &'static str,
    help: String,
    /// Labels as text, and values.
    values: BTreeMap<String, String>,
}

impl Metrics {
    /// Creates an empty collection.
    pub fn new() -> Metrics {
        Metrics::default()
    }

    /// Adds the statistics of a [`Cache`](crate::Cache).
    pub fn cache(&mut self, labels: Labels<'_>, figures: impl Into<CacheFigures>) -> &mut Metrics {
        let figures = figures.into();
        for (name, count) in &figures.counters {
            // Counts of other versions are left out: their names could be those of other figures.
            if let Some(help) = Stats::meaning_of(name) {
                self.counter(&format!("cache_{name}"), help, labels, *count);
            }
        }
        self.gauges(
            labels,
            &[
                ("cache_budget_bytes", "DRAM that the cache may use", figures.budget_bytes),
                ("cache_resident_bytes", "DRAM that the cache uses", figures.resident_bytes),
                ("cache_dirty_bytes", "DRAM that is not yet written back", figures.dirty_bytes),
                (
                    "cache_kernel_resident_bytes",
                    "Page cache that kernel-backed mappings keep resident",
                    figures.kernel_resident_bytes,
                ),
            ],
        );
        let help = "Time from a miss to its page being usable, since the cache was created";
        for (quantile, nanoseconds) in ["0.5", "0.99", "0.999"].iter().zip(figures.fault_service_ns)
        {
            let labels = [labels, &[("quantile", quantile)]].concat();
            self.gauge("cache_fault_service_seconds", help, &labels, nanoseconds as f64 / 1e9);
        }
        self
    }

    /// Adds what a device counts itself: the values of [`Device::counters`](crate::Device::counters), such as those of a
    /// remote device. Names that this version does not know are left out.
    pub fn device<'a>(
        &mut self,
        labels: Labels<'_>,
        counters: impl IntoIterator<Item = (&'a str, u64)>,
    ) -> &mut Metrics {
        for (counter, value) in counters {
            let known = DEVICE_COUNTERS.iter().find(|known| known.0 == counter);
            let Some(&(_, name, help, divisor)) = known else { continue };
            match (counter.ends_with("_now"), divisor) {
                (false, 1.0) => self.counter(name, help, labels, value),
                (true, _) => self.gauge(name, help, labels, value as f64 / divisor),
                (false, _) => {
                    let value = (value as f64 / divisor).to_string();
                    self.add(name, "counter", help, labels, value)
                }
            };
        }
        self
    }

    /// Adds the statistics of a [`Mapper`](crate::Mapper).
    pub fn mapper(&mut self, labels: Labels<'_>, stats: &MapperStats) -> &mut Metrics {
        let (cache, heap, ahead) = (&stats.cache, &stats.heap, &stats.map_ahead);
        let counts = [
            ("mapper_hits", "Files whose mapping was found", cache.hits),
            ("mapper_misses", "Files that had to be mapped", cache.misses),
            ("mapper_unmaps", "System calls that unmapped one or many mappings", heap.unmap_calls),
            ("mapper_ahead_requests", "Ranges to be mapped ahead", ahead.requests),
            ("mapper_ahead_bytes", "Bytes mapped ahead", ahead.populated_bytes),
        ];
        for (name, help, value) in counts {
            self.counter(name, help, labels, value);
        }
        self.gauges(
            labels,
            &[
                ("mapper_parked_mappings", "Mappings kept for reuse", cache.parked),
                (
                    "mapper_parked_bytes",
                    "Length of the mappings kept for reuse",
                    cache.parked_bytes,
                ),
                ("mapper_mappings", "Mappings in use or kept for reuse", heap.live),
                ("mapper_vmas", "Virtual memory areas accounted for", heap.vmas),
                (
                    "mapper_resident_bytes",
                    "Page cache of the files, as last measured",
                    stats.resident_bytes,
                ),
            ],
        )
    }

    /// Adds the state of a [`Pool`](crate::Pool).
    pub fn pool(&mut self, labels: Labels<'_>, info: &PoolInfo) -> &mut Metrics {
        let page_bytes = aquifer_pool::format::PAGE_BYTES;
        self.gauges(
            labels,
            &[
                (
                    "pool_log_written_bytes",
                    "Position up to which the log is durable",
                    info.durable_lsn,
                ),
                (
                    "pool_log_applied_bytes",
                    "Position up to which the log is applied",
                    info.applied_lsn,
                ),
                ("pool_log_tail_bytes", "Position from which recovery would replay", info.tail_lsn),
                ("pool_objects", "Persistent objects", info.objects),
                ("pool_files", "Regular files", info.files),
                ("pool_directories", "Directories, including the root", info.directories),
                ("pool_symbolic_links", "Symbolic links", info.symbolic_links),
                ("pool_special_files", "Named pipes, sockets and devices", info.special_files),
                ("pool_damaged_inodes", "Metadata slots that are damaged", info.damaged_inodes),
                ("pool_free_slots", "Empty metadata slots", info.free_slots),
                ("pool_free_bytes", "Free space", info.free_pages * page_bytes),
                (
                    "pool_zeroed_bytes",
                    "Free space known to be zero",
                    info.zeroed_pages * page_bytes,
                ),
                (
                    "pool_freed_bytes",
                    "Space that becomes free at the next checkpoint",
                    info.freed_pages * page_bytes,
                ),
                (
                    "pool_held_bytes",
                    "Space that becomes free once no view or lease pins it",
                    info.held_pages * page_bytes,
                ),
                (
                    "pool_largest_free_bytes",
                    "Longest contiguous free space",
                    info.largest_free_pages * page_bytes,
                ),
                ("pool_pins", "Pins of all processes", info.pins),
                (
                    "pool_writers",
                    "Processes that have the pool open for writing",
                    info.processes.len() as u64,
                ),
            ],
        )
    }

    /// Adds gauges: names, help and values.
    fn gauges(&mut self, labels: Labels<'_>, gauges: &[(&str, &str, u64)]) -> &mut Metrics {
        for &(name, help, value) in gauges {
            self.gauge(name, help, labels, value as f64);
        }
        self
    }

    /// Adds a count that only grows. `name` gets the prefix `aquifer_` and the suffix `_total`.
    pub fn counter(
        &mut self,
        name: &str,
        help: &str,
        labels: Labels<'_>,
        value: u64,
    ) -> &mut Metrics {
        self.add(name, "counter", help, labels, value.to_string())
    }

    /// Adds a value that rises and falls. `name` gets the prefix `aquifer_`.
    pub fn gauge(
        &mut self,
        name: &str,
        help: &str,
        labels: Labels<'_>,
        value: f64,
    ) -> &mut Metrics {
        self.add(name, "gauge", help, labels, value.to_string())
    }

    fn add(
        &mut self,
        name: &str,
        kind: &'static str,
        help: &str,
        labels: Labels<'_>,
        value: String,
    ) -> &mut Metrics {
        let index = self.families.iter().position(|family| family.name == name);
        let index = index.unwrap_or_else(|| {
            let (name, help) = (name.to_owned(), help.trim_end_matches('.').to_owned());
            self.families.push(Family { name, kind, help, values: BTreeMap::new() });
            self.families.len() - 1
        });
        self.families[index].values.insert(text_of(labels), value);
        self
    }
}

impl fmt::Display for Metrics {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Family { name, kind, help, values } in &self.families {
            writeln!(formatter, "# TYPE aquifer_{name} {kind}")?;
            if let Some(unit) = ["bytes", "seconds"].iter().find(|unit| name.ends_with(*unit)) {
                writeln!(formatter, "# UNIT aquifer_{name} {unit}")?;
            }
            writeln!(formatter, "# HELP aquifer_{name} {}", escaped(help))?;
            let suffix = if *kind == "counter" { "_total" } else { "" };
            for (labels, value) in values {
                writeln!(formatter, "aquifer_{name}{suffix}{labels} {value}")?;
            }
        }
        writeln!(formatter, "# EOF")
    }
}

fn text_of(labels: Labels<'_>) -> String {
    if labels.is_empty() {
        return String::new();
    }
    let pairs = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value)));
    format!("{{{}}}", pairs.collect::<Vec<_>>().join(","))
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// What [`Metrics::cache`] shows of a cache, from its [`Stats`] or from what it has
/// [published](crate::publish).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheFigures {
    /// Counts since the cache was created, with the names of [`Stats::counters`]; others are left
    /// out.
    pub counters: Vec<(String, u64)>,
    /// DRAM that the cache may use.
    pub budget_bytes: u64,
    /// DRAM that it uses.
    pub resident_bytes: u64,
    /// DRAM that is not yet written back.
    pub dirty_bytes: u64,
    /// Page cache that kernel-backed mappings keep resident.
    pub kernel_resident_bytes: u64,
    /// Time from a miss to its page being usable, in nanoseconds: p50, p99 and p99.9.
    pub fault_service_ns: [u64; 3],
}

impl From<&Stats> for CacheFigures {
    fn from(stats: &Stats) -> CacheFigures {
        let counters = stats.counters();
        CacheFigures {
            counters: counters.into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
            budget_bytes: stats.budget_bytes,
            resident_bytes: stats.resident_pages * stats.page_bytes,
            dirty_bytes: stats.dirty_pages * stats.page_bytes,
            kernel_resident_bytes: stats.kernel_resident_pages * stats.page_bytes,
            fault_service_ns: [0.5, 0.99, 0.999].map(|q| stats.fault_service_ns.quantile(q)),
        }
    }
}
