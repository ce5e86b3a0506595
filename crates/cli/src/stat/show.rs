//! Samples as text.

use std::fmt::Write as _;

use aquifer::metrics::{CacheFigures, Metrics};
use aquifer_sys::units::Bytes;

use super::Seen;
use super::sample::{Device, Sample};
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
        for device in &sample.devices {
            let labels = [&labels[..], &[("device", &*device.name)]].concat();
            let counters = device.counters.iter();
            metrics.device(&labels, counters.map(|(name, value)| (&**name, *value)));
        }
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
            format!("{} late, {} write", with_rate("late_faults"), with_rate("write_faults")),
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
    let lines = lines.into_iter().map(|(name, value)| [name.to_owned(), value]);
    let devices = sample.devices.iter().map(|device| [device.name.clone(), device_line(device)]);
    let lines: Vec<_> = lines.chain(devices).collect();
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
        output::columns(&lines),
    )
}

/// What a remote device has requested and received.
fn device_line(device: &Device) -> String {
    let bytes = |name: &str| Bytes(device.counter(name));
    let mut line = format!(
        "{} requests, {} received, {} delivered",
        output::count(device.counter("requests")),
        bytes("received_bytes"),
        bytes("delivered_bytes"),
    );
    if device.counter("tier_bytes") > 0 {
        let _ = write!(line, " ({} from the tier)", bytes("tier_bytes"));
    }
    let _ = write!(line, ", {} failed", output::count(device.counter("failed_ranges")));
    // Several devices in one entry have no such values.
    if device.counter("latency_ns_now") > 0 {
        let latency = output::time(device.counter("latency_ns_now") as f64);
        let _ = write!(line, ", {latency}, {}/s", bytes("bytes_per_second_now"));
    }
    let cost = device.counter("cost_billionths") as f64 / 1e9;
    let _ = write!(line, ", cost about {cost:.6}");
    line
}

#[cfg(test)]
mod tests {
    use super::super::sample::tests::{device, example};
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
    fn remote_devices_have_lines_and_metrics() {
        let sample = Sample { devices: vec![device(), Device::default()], ..example() };
        let text = open_metrics(std::slice::from_ref(&sample));
        for line in [
            "# TYPE aquifer_device_requests counter",
            "aquifer_device_requests_total{LABELS} 1200",
            "aquifer_device_received_bytes_total{LABELS} 3145728",
            "aquifer_device_cost_total{LABELS} 0.00048",
            "aquifer_device_latency_seconds{LABELS} 0.012",
            "aquifer_device_rate_bytes{LABELS} 104857600",
        ] {
            let (start, end) = line.split_once("{LABELS}").unwrap_or((line, ""));
            let is_it = |there: &str| {
                let labelled = end.is_empty() || there.contains("device=\"s3://bucket/key\"}");
                there.starts_with(start) && there.ends_with(end) && labelled
            };
            assert!(text.lines().any(is_it), "{line} is missing in\n{text}");
        }
        let rates = sample.rates_since(None);
        let text = caches(&[&Seen { sample, rates, rates_since_start: true }]);
        let line = "1,200 requests, 3 MiB received, 2 MiB delivered (1 MiB from the tier), 1 failed, 12.0 ms, 100 MiB/s, \
                    cost about 0.000480";
        assert!(text.contains("s3://bucket/key") && text.contains(line), "{text}");
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
