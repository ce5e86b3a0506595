//! Writable views cost little until their pages are there. It looks at the memory of a process of its own.

use std::fs::File;

use aquifer_mapper::{Mapper, Stores, ViewOptions};

pub const ROLES: &[aquifer_testkit::child::Role] = &[("large and sparse", large_and_sparse)];

const TIB: u64 = 1 << 40;

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
fn views_of_tebibytes_cost_what_is_stored_to() {
    aquifer_testkit::child::succeeds("large and sparse");
}

fn large_and_sparse() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let mapper = Mapper::builder().build().unwrap();
    for tebibytes in [1, 7] {
        let len_bytes = tebibytes * TIB;
        if let Err(error) = File::create(&path).and_then(|file| file.set_len(len_bytes)) {
            return eprintln!("skipped: no file of {tebibytes} TiB here: {error}");
        }
        for stores in [Stores::Shared, Stores::Private] {
            let before = used_kib();
            let view = mapper.map(&path, ViewOptions::write().stores(stores), ..).unwrap();
            for round in 1..5_u8 {
                for at in [0, len_bytes / 2, len_bytes - 1] {
                    view.set(at, round).unwrap();
                }
                view.flush().unwrap();
            }
            let used = used_kib().saturating_sub(before);
            drop(view);
            assert!(used < 4096, "{tebibytes} TiB, {stores:?}: {used} KiB");
        }
    }
}
