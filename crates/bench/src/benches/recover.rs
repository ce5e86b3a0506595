//! `recover`: the time to open after a crash, depending on the amount committed and on the size.
//!
//! `attach_log_…` varies how much was committed before the crash, with the middle array size;
//! `attach_size_…` varies the array size, with the middle amount committed. A contender that
//! checkpoints during the work has less to recover than was committed: that is its merit.

use anyhow::Result;
use serde_json::json;

use super::stage::Stage;
use crate::contender::regions::Domain;
use crate::contender::{Source, System};
use crate::harness::{Cell, CommitWork, Job, Schedule, Work};
use crate::options::RecoverOptions;
use crate::raw::{PAGE_BYTES, sync_file_system};
use crate::report::Report;
use crate::scratch::{empty, scratch_directory};
use aquifer_host::units::Bytes;

const SYSTEMS: &[System] =
    &[System::Object, System::Lmdb, System::Sqlite, System::Redb, System::Libpmemobj];

/// Pages that each commit before the crash stores to.
const COMMIT_PAGES: u32 = 10;
/// Stores on each of them: most of a record, so that logs are about as long as the records.
const STORES_A_PAGE: u32 = 400;

/// Runs the bench.
pub fn run(options: &RecoverOptions) -> Result<Report> {
    let (logs, sizes) = if options.common.quick {
        (vec![Bytes(256 << 10), Bytes(512 << 10)], vec![Bytes(1 << 20), Bytes(2 << 20)])
    } else {
        (options.logs.clone(), options.sizes.clone())
    };
    let largest_bytes = sizes.iter().map(|size| size.0).max().unwrap_or(0);
    let mut stage =
        Stage::prepare(&options.common, &[SYSTEMS], 4 * largest_bytes + (256 << 20), false)?;
    let directory = scratch_directory(stage.place.path())?;
    let cell = |metric: String, system: System, log: Bytes, size: Bytes| {
        let work = CommitWork {
            domain: Domain::PageCache,
            pages: COMMIT_PAGES,
            stores_a_page: STORES_A_PAGE,
            dirty_pages: 0,
        };
        let job = Job {
            system,
            source: Source {
                path: directory.path().to_owned(),
                pages: size.0 / PAGE_BYTES as u64,
                writable: true,
                cache_bytes: 0,
                base_pages: false,
            },
            work: Work::Recover(work),
            seed: stage.seed,
            round: 0,
            accesses: log.0.div_ceil(u64::from(COMMIT_PAGES) * PAGE_BYTES as u64),
            deadline_ms: 0,
            warm_accesses: 0,
            warm_deadline_ms: 0,
            limit_bytes: None,
        };
        Cell { metric, unit: ("ms", 1e6), job, limit_bytes: None }
    };
    let (middle_log, middle_size) = (middle(&logs), middle(&sizes));
    let mut cells = Vec::new();
    for &log in &logs {
        let metric = format!("attach_log_{}", log.suffix());
        cells.extend(
            stage.wanted(SYSTEMS).map(|system| cell(metric.clone(), system, log, middle_size)),
        );
    }
    for &size in &sizes {
        let metric = format!("attach_size_{}", size.suffix());
        cells.extend(
            stage.wanted(SYSTEMS).map(|system| cell(metric.clone(), system, middle_log, size)),
        );
    }
    let mut notes = std::mem::take(&mut stage.notes);
    let schedule = Schedule {
        limiter: None,
        rounds: stage.rounds,
        before: Box::new(|| {
            empty(directory.path())?;
            Ok(sync_file_system(directory.path())?)
        }),
        // The child has compared every cell.
        check: Box::new(|_, _| Ok(())),
    };
    let rows = schedule.run(cells, &mut notes)?;
    drop(schedule);
    stage.notes = notes;
    let bytes = |all: &[Bytes]| all.iter().map(|size| size.0).collect::<Vec<_>>();
    let config = [
        ("committed_bytes", json!(bytes(&logs))),
        ("size_bytes", json!(bytes(&sizes))),
        ("pages_a_commit", json!(COMMIT_PAGES)),
    ];
    Ok(stage.report("recover", rows, Default::default(), config))
}

fn middle(all: &[Bytes]) -> Bytes {
    let mut sorted = all.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_an_even_number_is_the_upper_one() {
        assert_eq!(middle(&[Bytes(3), Bytes(1)]), Bytes(3));
        assert_eq!(middle(&[Bytes(3), Bytes(1), Bytes(2)]), Bytes(2));
    }
}
