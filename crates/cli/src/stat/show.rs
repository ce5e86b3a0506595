//! Samples as text.

use std::fmt::Write as _;

use aquifer::metrics::{CacheFigures, Metrics};
use aquifer_host::Bytes;

use super::Seen;
use super::sample::Sample;
use crate::output;

/// A block for each cache, each followed by an empty line.
pub fn caches(seen: &[&Seen]) -> String {
    if seen.is_empty() {
        return "no running cache\n\n".to_owned();
    }
    seen.iter().map(|seen| block(seen)).collect()
}

/// OpenMetrics text; of no cache, an empty set of metrics.
pub fn open_metrics(samples: &[Sample]) -> String {
    let mut metrics = Metrics::new();
    for sample in samples {
        let (pid, faults) = (sample.pid.to_string(), &sample.fault_service_ns);
        let namespace = sample.pid_namespace.to_string();
        let labels = [
            ("cache", &*sample.name),
            ("command", &*sample.command),
            ("pid", &*pid),
            ("pid_namespace", &*namespace),
            ("policy", &*sample.policy),
        ];
        metrics.cache(
            &labels,
            CacheFigures {
                counters: sample.counters.clone().into_iter().collect(),
                budget_bytes: sample.budget_bytes,
                resident_bytes: sample.resident_bytes,
                dirty_bytes: sample.dirty_bytes,
                kernel_resident_bytes: sample.kernel_resident_bytes,
                fault_service_ns: [faults.p50, faults.p99, faults.p999],
            },
        );
    }
    metrics.to_string()
}

fn block(seen: &Seen) -> String {
    let sample = &seen.sample;
    let count = |name: &str| output::count(sample.counter(name));
    let with_rate = |name: &str| {
        let rate = seen.rates.get(name).copied().unwrap_or(0.0);
        format!("{} ({}/s)", count(name), output::count(rate.round() as u64))
    };
    let faults = &sample.fault_service_ns;
    let [p50, p99, p999] = [faults.p50, faults.p99, faults.p999].map(|ns| output::time(ns as f64));
    let write_back = &sample.write_back_bytes;
    let mut memory = format!(
        "{} of {} ({} %), {} dirty",
        Bytes(sample.resident_bytes),
        Bytes(sample.budget_bytes),
        sample.resident_bytes * 100 / sample.budget_bytes.max(1),
        Bytes(sample.dirty_bytes),
    );
    if sample.kernel_resident_bytes > 0 {
        let _ =
            write!(memory, ", {} by kernel-backed mappings", Bytes(sample.kernel_resident_bytes));
    }
    let lines = [
        ("resident", memory),
        ("misses", format!("{}, {} failed", with_rate("misses"), count("load_errors"))),
        ("prefetched", with_rate("prefetched")),
        (
            "soft faults",
            format!(
                "{} late, {} probation, {} write",
                with_rate("late_faults"),
                with_rate("probation_hits"),
                with_rate("write_faults"),
            ),
        ),
        ("fault service", format!("{p50} p50, {p99} p99, {p999} p99.9")),
        ("evictions", format!("{}, {} dropped", with_rate("evictions"), count("dropped"))),
        ("stalls", with_rate("stalls")),
        (
            "write-back",
            format!(
                "{} pages in {} transfers ({} p50, {} p99), {} failed, {} syncs",
                with_rate("written_pages"),
                count("write_backs"),
                Bytes(write_back.p50),
                Bytes(write_back.p99),
                count("write_errors"),
                count("syncs"),
            ),
        ),
    ];
    let rates =
        if seen.rates_since_start { "rates since the start" } else { "rates since the last" };
    format!(
        "{} {} ({}), {} pages, {}, up {}, {rates}\n{}\n",
        sample.pid,
        sample.name,
        sample.command,
        Bytes(sample.page_bytes),
        sample.policy,
        output::time(sample.uptime_ms as f64 * 1e6),
        output::columns(&lines.map(|(name, value)| [name.to_owned(), value])),
    )
}

#[cfg(test)]
mod tests {
    use super::super::sample::tests::example;
    use super::*;

    #[test]
    fn open_metrics_text_has_every_figure_with_its_labels() {
        let text = open_metrics(&[example(), Sample { name: "odd \"\n".to_owned(), ..example() }]);
        let pid = std::process::id();
        let namespace = aquifer::publish::process_namespace();
        let labels = format!(
            "cache=\"orders\",command=\"server\",pid=\"{pid}\",pid_namespace=\"{namespace}\",policy=\"clock\""
        );
        for line in [
            "# TYPE aquifer_cache_misses counter".to_owned(),
            format!("aquifer_cache_misses_total{{{labels}}} 10"),
            format!("aquifer_cache_resident_bytes{{{labels}}} 134217728"),
            format!("aquifer_cache_fault_service_seconds{{{labels},quantile=\"0.99\"}} 0.00002"),
        ] {
            assert!(text.lines().any(|there| there == line), "{line} is missing in\n{text}");
        }
        let mut hostile = example();
        hostile.counters.insert("resident_bytes".to_owned(), 1);
        hostile.counters.insert("misses_total".to_owned(), 1);
        let text_of_hostile = open_metrics(&[hostile]);
        assert!(text_of_hostile.contains("# TYPE aquifer_cache_resident_bytes gauge"));
        assert!(!text_of_hostile.contains("misses_total_total"), "{text_of_hostile}");
        assert!(text.contains("cache=\"odd \\\"\\n\""), "{text}");
        assert_eq!(open_metrics(&[]), "# EOF\n");
    }

    #[test]
    fn a_block_says_what_matters() {
        let sample = example();
        let rates = sample.rates_since(None);
        let text = caches(&[&Seen { sample, rates, rates_since_start: true }]);
        for part in ["orders (server)", "128 MiB of 256 MiB (50 %)", "10 (10/s)", "20.0 µs p99"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }
}
