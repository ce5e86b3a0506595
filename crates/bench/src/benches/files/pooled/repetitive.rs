//! `repetitive`: records of one large file, read and overwritten repeatedly by one process.
//!
//! | contender | a record |
//! |---|---|
//! | `syscalls` | `pread`, `pwrite` |
//! | `mmap`, `mmap_populate` | copied from and to a shared mapping |
//! | `pool` | read from and written to the file in the pool |

use anyhow::Result;
use serde_json::json;

use super::{MMAP, make_set, on_some};
use crate::benches::files::{
    Ground, Lowest, cell, file_systems, grounds, job, lowest_ratios, run_block,
};
use crate::benches::stage::Stage;
use crate::contender::System;
use crate::harness::{PooledWork, RecordWork, TeamWork};
use crate::options::RepetitiveOptions;
use crate::pooled_set::Age;
use crate::report::{Report, Row};
use crate::workload::record_files;
use aquifer_host::units::Bytes;

/// Contenders that have records.
pub const SYSTEMS: &[System] =
    &[System::Syscalls, System::Mmap, System::MmapPopulate, System::Pool];

const RECORDS: [u32; 2] = [1 << 10, 4 << 10];
const ORDERS: [(&str, bool); 2] = [("sequential", false), ("random", true)];
/// The actions on records.
pub const ACTIONS: [(&str, bool); 2] = [("read", false), ("write", true)];

/// Records and length of the file in the quick form.
pub const QUICK: (u64, u64) = (500, 2 << 20);

/// Runs the bench.
pub fn run(options: &RepetitiveOptions) -> Result<Report> {
    let quick = options.common.quick;
    let default_bytes = if quick { QUICK.1 } else { 256 << 20 };
    let size_bytes = options.size.map_or(default_bytes, |size| size.0).next_multiple_of(4096);
    let records = if quick { options.records.min(QUICK.0) } else { options.records };
    let mut stage = Stage::prepare(&options.common, &[SYSTEMS], 0, false)?;
    let grounds = grounds(&mut stage, &options.memory);
    let mut notes = std::mem::take(&mut stage.notes);
    let mut rows = Vec::new();
    for ground in &grounds {
        rows.extend(block(&stage, ground, size_bytes, records, &mut notes)?);
    }
    stage.notes = notes;
    let found = lowest_ratios(&definitions(&grounds), &rows);
    let config = [
        ("size_bytes", json!(size_bytes)),
        ("records", json!(records)),
        ("file_systems", file_systems(&grounds)),
    ];
    Ok(stage.report("repetitive", rows, found, config))
}

fn block(
    stage: &Stage,
    ground: &Ground,
    file_bytes: u64,
    records: u64,
    notes: &mut Vec<String>,
) -> Result<Vec<Row>> {
    let set = make_set(stage, ground, record_files(1), file_bytes, Age::New)?;
    let mut cells = Vec::new();
    for (action, writes) in ACTIONS {
        for record_bytes in RECORDS {
            for (order, is_random) in ORDERS {
                let metric = metric(action, record_bytes, order);
                let metric = format!("{metric}_{}", ground.file_system);
                let work = PooledWork::Records(RecordWork {
                    record_bytes,
                    file_bytes,
                    writes,
                    is_random,
                    own_files: false,
                    team: TeamWork { processes: 1, member: None },
                });
                cells.extend(stage.wanted(SYSTEMS).map(|system| {
                    let mut job = job(stage, system, set.path(), 0, work);
                    job.accesses = records;
                    cell(metric.clone(), ("ns", 1.0), job)
                }));
            }
        }
    }
    run_block(stage, cells, notes, |_, _| Ok(()))
}

fn metric(action: &str, record_bytes: u32, order: &str) -> String {
    format!("{action}_{}_{order}", Bytes(u64::from(record_bytes)).suffix())
}

fn definitions(grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    for (action, _) in ACTIONS {
        for record_bytes in RECORDS {
            let metrics = ORDERS.map(|(order, _)| metric(action, record_bytes, order));
            let size = Bytes(u64::from(record_bytes)).suffix();
            let name = |other: &str| format!("{action}_{size}_vs_{other}");
            let calls: &[&str] = &["syscalls"];
            all.push(on_some(&name("tmpfs"), calls, "pool", &metrics, grounds, true));
            all.push(on_some(&name("disk"), calls, "pool", &metrics, grounds, false));
            all.push(on_some(&name("mmap_in_memory"), MMAP, "pool", &metrics, grounds, true));
            all.push(on_some(&name("mmap_on_disk"), MMAP, "pool", &metrics, grounds, false));
        }
    }
    all
}
