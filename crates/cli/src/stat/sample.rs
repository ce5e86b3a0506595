//! Reads published cache samples.
//!
//! The content is untrusted: root reads files written by other users. So only small regular files
//! with a matching name are opened, and control characters are removed from strings.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use aquifer::publish;
use serde::{Deserialize, Serialize};

const LARGEST_FILE_BYTES: u64 = 64 << 10;
/// A cache in another PID namespace counts as alive if it was published this recently.
const FRESH_MS: u64 = 5000;

/// The published sample of one cache.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sample {
    /// Version of the format.
    pub format: u32,
    /// The process.
    pub pid: u32,
    /// Its start time, in ticks since boot.
    pub start_ticks: u64,
    /// The PID namespace of its number.
    pub pid_namespace: u64,
    /// When this was published.
    pub unix_ms: u64,
    /// Age of the cache.
    pub uptime_ms: u64,
    /// Name of the cache.
    pub name: String,
    /// Name of the program.
    pub command: String,
    /// Name of the eviction policy.
    pub policy: String,
    /// Size of a page.
    pub page_bytes: u64,
    /// Its DRAM budget.
    pub budget_bytes: u64,
    /// Resident DRAM.
    pub resident_bytes: u64,
    /// Resident DRAM not yet written back.
    pub dirty_bytes: u64,
    /// Page cache that kernel-backed mappings keep resident.
    pub kernel_resident_bytes: u64,
    /// Counters since the cache was created.
    pub counters: BTreeMap<String, u64>,
    /// Fault service latency.
    pub fault_service_ns: Quantiles,
    /// Sizes of write-back transfers.
    pub write_back_bytes: Quantiles,
    /// Devices that count something themselves. Missing if there are none, and in samples of older versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Device>,
}

/// What a device counts itself.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Device {
    /// Its name: the URL of a remote device.
    pub name: String,
    /// Values since it was opened; those of names that end with `_now` rise and fall.
    pub counters: BTreeMap<String, u64>,
}

impl Device {
    /// A counter; 0 if the device does not have it.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }
}

/// A distribution.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Quantiles {
    /// Number of values.
    pub count: u64,
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
}

/// The identity of a cache.
pub type Key = (u32, u64, u64, String);

impl Sample {
    /// Its identity.
    pub fn key(&self) -> Key {
        (self.pid, self.start_ticks, self.pid_namespace, self.name.clone())
    }

    /// A counter; 0 if this cache's version does not have it.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }

    /// Counts per second since an earlier sample, or since the cache was created.
    pub fn rates_since(&self, earlier: Option<&Sample>) -> HashMap<String, f64> {
        let elapsed_ms = self.uptime_ms - earlier.map_or(0, |earlier| earlier.uptime_ms);
        let seconds = (elapsed_ms as f64 / 1000.0).max(0.001);
        let rate = |(name, &count): (&String, &u64)| {
            let before = earlier.map_or(0, |earlier| earlier.counter(name));
            (name.clone(), count.saturating_sub(before) as f64 / seconds)
        };
        self.counters.iter().map(rate).collect()
    }

    fn is_alive(&self) -> bool {
        if self.pid_namespace == publish::process_namespace() {
            return publish::start_ticks(self.pid) == Some(self.start_ticks);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u128::from(self.unix_ms.saturating_add(FRESH_MS)) >= now.as_millis()
    }

    fn matches(&self, target: &str) -> bool {
        target.parse() == Ok(self.pid) || target == self.name || target == self.command
    }
}

/// All matching live caches, in no order. Removes the user's own files of dead processes.
pub fn all(target: Option<&str>) -> Vec<Sample> {
    let user = fs::metadata("/proc/self").map_or(u32::MAX, |metadata| metadata.uid());
    let mut found = vec![];
    for directory in directories(user) {
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        let own = fs::metadata(&directory).is_ok_and(|metadata| metadata.uid() == user);
        for path in entries.flatten().map(|entry| entry.path()).filter(|path| is_published(path)) {
            let Some(sample) = read(&path) else { continue };
            if !sample.is_alive() {
                if own && sample.pid_namespace == publish::process_namespace() {
                    // Another process may have removed it first.
                    let _ = fs::remove_file(&path);
                }
            } else if target.is_none_or(|target| sample.matches(target)) {
                found.push(sample);
            }
        }
    }
    found
}

/// The directories to search: for root, those of all users.
fn directories(user: u32) -> Vec<PathBuf> {
    let mut found = publish::directories();
    found.push(PathBuf::from(format!("/run/user/{user}/aquifer")));
    if user == 0 {
        let below = |path: &str| fs::read_dir(path).into_iter().flatten().flatten();
        found.extend(below("/run/user").map(|entry| entry.path().join("aquifer")));
        let temporary = below("/tmp").map(|entry| entry.path());
        found.extend(temporary.filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("aquifer-"))
        }));
    }
    found.sort();
    found.dedup();
    found
}

/// Whether a file has the name of a published cache: `PID-NAME.json`.
fn is_published(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.and_then(|name| name.strip_suffix(".json")?.split_once('-'))
        .is_some_and(|(pid, _)| pid.parse::<u32>().is_ok())
}

fn read(path: &Path) -> Option<Sample> {
    // Do not follow links or block on pipes that another user planted.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = String::new();
    file.take(LARGEST_FILE_BYTES).read_to_string(&mut text).ok()?;
    let mut sample: Sample = serde_json::from_str(&text).ok()?;
    let names = sample.devices.iter_mut().map(|device| &mut device.name);
    for string in names.chain([&mut sample.name, &mut sample.command, &mut sample.policy]) {
        string.retain(|c| !c.is_control());
    }
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let counters = sample.devices.iter_mut().map(|device| &mut device.counters);
    for counters in counters.chain([&mut sample.counters]) {
        counters.retain(|name, _| name.chars().all(is_plain));
    }
    (sample.format == publish::FORMAT).then_some(sample)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A sample of this process.
    pub fn example() -> Sample {
        Sample {
            format: publish::FORMAT,
            pid: std::process::id(),
            start_ticks: publish::start_ticks(std::process::id()).unwrap(),
            pid_namespace: publish::process_namespace(),
            unix_ms: 0,
            uptime_ms: 1000,
            name: "orders".to_owned(),
            command: "server".to_owned(),
            policy: "clock".to_owned(),
            page_bytes: 4096,
            budget_bytes: 256 << 20,
            resident_bytes: 128 << 20,
            dirty_bytes: 1 << 20,
            kernel_resident_bytes: 0,
            counters: [("misses".to_owned(), 10)].into(),
            fault_service_ns: Quantiles { count: 10, p50: 5000, p99: 20_000, p999: 90_000 },
            write_back_bytes: Quantiles::default(),
            devices: vec![],
        }
    }

    /// A remote device.
    pub fn device() -> Device {
        let counters = [
            ("requests", 1200),
            ("received_bytes", 3 << 20),
            ("delivered_bytes", 2 << 20),
            ("tier_bytes", 1 << 20),
            ("failed_ranges", 1),
            ("cost_billionths", 480_000),
            ("latency_ns_now", 12_000_000),
            ("bytes_per_second_now", 100 << 20),
        ];
        let counters = counters.map(|(name, value)| (name.to_owned(), value)).into();
        Device { name: "s3://bucket/key".to_owned(), counters }
    }

    #[test]
    fn the_living_are_told_from_the_dead() {
        let alive = example();
        assert!(alive.is_alive());
        assert!(!Sample { start_ticks: alive.start_ticks + 1, ..alive.clone() }.is_alive());
        assert!(!Sample { pid: u32::MAX, ..alive.clone() }.is_alive());
        let elsewhere = Sample { pid_namespace: 1, ..alive.clone() };
        assert!(!elsewhere.is_alive(), "published in 1970");
        assert!(Sample { unix_ms: u64::MAX, ..elsewhere }.is_alive());
    }

    #[test]
    fn caches_are_found_by_process_name_and_program() {
        let sample = example();
        for target in ["orders", "server", &sample.pid.to_string()] {
            assert!(sample.matches(target), "{target}");
        }
        assert!(!sample.matches("order") && !sample.matches("1x"));
    }

    #[test]
    fn hostile_files_are_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let mut sample = example();
        sample.command = "\u{1b}[2Jevil".to_owned();
        sample.counters.insert("evil 1\nother".to_owned(), 1);
        let mut evil = device();
        evil.name.push('\u{1b}');
        evil.counters = [("requests".to_owned(), 1), ("\u{1b}".to_owned(), 1)].into();
        sample.devices.push(evil);
        let text = serde_json::to_string(&sample).unwrap();
        fs::write(path("1-a.json"), &text).unwrap();
        let seen = read(&path("1-a.json")).unwrap();
        assert_eq!((&*seen.command, seen.counters.len()), ("[2Jevil", 1));
        let [device] = &seen.devices[..] else { panic!("{seen:?}") };
        assert_eq!((&*device.name, device.counters.len()), ("s3://bucket/key", 1));
        std::os::unix::fs::symlink(path("1-a.json"), path("2-a.json")).unwrap();
        assert!(read(&path("2-a.json")).is_none());
        fs::write(path("3-a.json"), text.replace("\"format\":1", "\"format\":99")).unwrap();
        assert!(read(&path("3-a.json")).is_none());
        fs::write(path("4-a.json"), "{").unwrap();
        assert!(read(&path("4-a.json")).is_none());
        fs::create_dir(path("5-a.json")).unwrap();
        assert!(read(&path("5-a.json")).is_none());
        assert!(is_published(Path::new("/x/12-a-b.json")));
        for other in ["/x/.12-a.new", "/x/a-1.json", "/x/12.json", "/x"] {
            assert!(!is_published(Path::new(other)), "{other}");
        }
    }
}
