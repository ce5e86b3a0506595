//! The machine on which figures are measured, and keeping its CPUs awake during measurements.

use std::fs::{self, File, OpenOptions};
use std::io::Write;

use serde::Serialize;

use crate::place::Place;

/// The machine, as printed in the report.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// Model of the processor.
    pub cpu: String,
    /// Processors this process may run on.
    pub cores: usize,
    /// Memory of the whole machine.
    pub memory_bytes: u64,
    /// Name and release of the kernel.
    pub kernel: String,
    /// Type of the file system of the data file.
    pub file_system: String,
    /// The device that holds the file system.
    pub device: String,
}

impl Machine {
    /// Collects the description from the system.
    pub fn describe(place: &Place) -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self {
            cpu: field(&cpuinfo, "model name").unwrap_or("unknown").to_owned(),
            cores: cores(),
            memory_bytes: memory_bytes(),
            kernel: kernel_release(),
            file_system: place.file_system().to_owned(),
            device: place.device().to_owned(),
        }
    }
}

/// Returns the memory of the whole machine; 0 if unknown.
pub fn memory_bytes() -> u64 {
    meminfo("MemTotal")
}

/// Returns the memory available without swapping, as estimated by the kernel.
pub fn available_memory_bytes() -> u64 {
    meminfo("MemAvailable")
}

/// Returns the kernel's name and release, as `uname -sr` prints them.
pub fn kernel_release() -> String {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/sys/kernel/{name}"));
    match (read("ostype"), read("osrelease")) {
        (Ok(name), Ok(release)) => format!("{} {}", name.trim(), release.trim()),
        _ => "unknown".to_owned(),
    }
}

fn meminfo(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = field(&text, name).and_then(|value| value.split(' ').next()?.parse().ok());
    kib.unwrap_or(0_u64) * 1024
}

/// Returns the number of processors this process may run on.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Returns the value of the first `name : value` line.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// Keeps idle processors out of deep sleep states while it lives: otherwise a thread that waits for
/// a device also waits for its processor to wake up, and the figures reflect power saving more than
/// I/O.
#[derive(Debug)]
pub struct Awake(
    #[expect(dead_code, reason = "the kernel keeps the request while this is open")] File,
);

impl Awake {
    /// Requests a wake-up latency of 0; `None` if this user may not.
    pub fn request() -> Option<Self> {
        let mut file = OpenOptions::new().write(true).open("/dev/cpu_dma_latency").ok()?;
        file.write_all(&0_i32.to_ne_bytes()).ok()?;
        Some(Self(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_of_the_memory_is_available() {
        assert!((1 << 20..=memory_bytes()).contains(&available_memory_bytes()));
    }

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "processor\t: 0\nmodel\t\t: 1\nmodel name\t: Some CPU: fast\n";
        assert_eq!(field(text, "model name"), Some("Some CPU: fast"));
        assert_eq!(field(text, "model"), Some("1"));
        assert_eq!(field(text, "mod"), None);
    }
}
