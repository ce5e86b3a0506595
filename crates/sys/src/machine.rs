//! The machine on which figures are measured, and keeping its CPUs awake during measurements.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use crate::limit::Mount;

/// The machine, as printed in the report.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
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
    /// Collects the description from the system, with the file system that holds `directory`, an
    /// absolute path without symbolic links.
    pub fn describe(directory: &Path) -> Self {
        let (file_system, device) = file_system_of(directory);
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self {
            cpu: field(&cpuinfo, "model name").unwrap_or("unknown").to_owned(),
            cores: cores(),
            memory_bytes: memory_bytes(),
            kernel: kernel_release(),
            file_system,
            device,
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

/// Returns how many bytes an unprivileged user can still write below `directory`.
pub fn free_bytes(directory: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(directory)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Returns type and source of the file system that holds `path`, by the longest mount point above
/// it.
pub fn file_system_of(path: &Path) -> (String, String) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    file_system_among(&mounts, path)
}

fn file_system_among(mountinfo: &str, path: &Path) -> (String, String) {
    mountinfo
        .lines()
        .filter_map(Mount::parse)
        .filter(|mount| path.starts_with(mount.point))
        // Later mounts hide earlier ones at the same point, and `max_by_key` keeps the last
        // maximum.
        .max_by_key(|mount| mount.point.len())
        .map_or_else(
            || ("unknown".to_owned(), "unknown".to_owned()),
            |mount| (mount.file_system.to_owned(), mount.source.to_owned()),
        )
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
    fn the_longest_and_latest_mount_point_counts() {
        let mounts = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n\
                      2 1 0:2 / /data rw - tmpfs first rw\n\
                      3 1 0:3 / /data rw - xfs /dev/sdb rw\n";
        let of = |path: &str| file_system_among(mounts, Path::new(path));
        assert_eq!(of("/data/x"), ("xfs".to_owned(), "/dev/sdb".to_owned()));
        assert_eq!(of("/database"), ("ext4".to_owned(), "/dev/sda1".to_owned()));
    }

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
