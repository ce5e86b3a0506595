//! Mappings cost little until their pages are resident. A single test: it looks at the page tables of the process.

use aquifer_cache::{Advice, Cache};
use aquifer_device::{Device, DeviceError};

pub const ROLES: &[aquifer_testkit::child::Role] = &[("large and empty", large_and_empty)];

const LEN_BYTES: u64 = 1 << 40;

/// A tebibyte of ones.
#[derive(Debug)]
struct Ones;

impl Device for Ones {
    fn name(&self) -> &str {
        "ones"
    }

    fn len_bytes(&self) -> Result<u64, DeviceError> {
        Ok(LEN_BYTES)
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn read_at(&self, _offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        buffer.fill(1);
        Ok(buffer.len())
    }

    fn write_at(&self, _offset_bytes: u64, _bytes: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn sync(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn access_path(&self) -> String {
        "nothing".to_owned()
    }
}

/// Memory and page tables of this process, in KiB.
fn used_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let value = |name: &str| -> u64 {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
    };
    value("VmRSS") + value("VmPTE")
}

#[test]
fn a_tebibyte_of_which_little_is_resident_takes_little_memory() {
    aquifer_testkit::child::succeeds("large and empty");
}

fn large_and_empty() {
    let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
    let mapping = cache.map_mut(Ones).unwrap();
    let far = LEN_BYTES - 4096;
    mapping.touch(far).unwrap();
    let before = used_kib();
    for advice in [Advice::Cold, Advice::DontNeed] {
        mapping.advise(0..LEN_BYTES, advice).unwrap();
    }
    let after = used_kib();
    assert!(after < before + 2048, "{before} KiB, then {after} KiB");
    // The page was dropped, and comes again.
    assert_eq!(cache.stats().resident_pages, 0);
    assert_eq!(mapping.get::<u8>(far).unwrap(), 1);
}
