//! `out-of-core`: random pages of a file several times larger than memory.
//!
//! Three kinds of work: single reads and single stores with each number of threads, and reads in
//! batches of 64 pages known in advance. Every contender's process is limited to the budget, for
//! any use of memory. Reads are checked against the file's content, stores by reading the device,
//! bypassing all caches.

use anyhow::{Result, ensure};

use super::setting::{Defaults, Setting};
use crate::contender::System;
use crate::data::{DataFile, expected_sample};
use crate::harness::{Cell, Job, Measured, Schedule, Work};
use crate::options::Options;
use crate::raw::{PAGE_BYTES, cached_bytes, drop_cache};
use crate::report::{Figure, Ratio, Report};
use crate::workload::{lane_pages, stored_byte};

const READERS: &[System] = &[
    System::Mmap,
    System::MmapRandom,
    System::PreadDirect,
    System::UserCache,
    System::Mapping,
    System::MappingKernel,
    System::MappingUser,
    System::MappingTouch,
    System::Pages,
];
const BATCHERS: &[System] = &[System::MmapWillneed, System::MappingBatched, System::PagesBatched];
const WRITERS: &[System] = &[
    System::Mmap,
    System::MmapRandom,
    System::PreadDirect,
    System::Mapping,
    System::MappingTouch,
    System::Pages,
];

/// Pages in a batch.
const BATCH_PAGES: usize = 64;
/// Stores of each measurement that are verified on the device.
const VERIFIED_STORES: usize = 256;

/// Runs the bench.
pub fn run(options: &Options) -> Result<Report> {
    let defaults = Defaults {
        contenders: &[READERS, BATCHERS, WRITERS],
        size_bytes: [2 << 30, 256 << 20],
        data_per_budget: 8,
        scarce: true,
    };
    let mut setting = Setting::prepare(options, defaults)?;
    let data = setting.data_file()?;
    let cells = cells(&setting, &data);
    let mut notes = std::mem::take(&mut setting.stage.notes);
    let schedule = Schedule {
        limiter: setting.limiter.as_ref(),
        rounds: setting.stage.rounds,
        before: Box::new(|| Ok(drop_cache(&data.open()?)?)),
        check: Box::new(|job, measured| check(job, measured, &data)),
    };
    let rows = schedule.run(cells, &mut notes)?;
    if cached_bytes(&data.open()?)?.is_none() {
        notes.push("this kernel has no cachestat (6.5): cold starts were not checked".to_owned());
    }
    drop(schedule);
    setting.stage.notes = notes;
    Ok(setting.report("out-of-core", rows, &definitions(&setting.threads)))
}

fn cells(setting: &Setting, data: &DataFile) -> Vec<Cell> {
    let mut cells = Vec::new();
    // A quick run only tests the bench; otherwise the deadline decides on slow devices.
    let (reads, stores) = if setting.stage.quick { (500, 500) } else { (100_000, 200_000) };
    let mut add = |metric: String, system: System, work: Work, accesses: u64| {
        let mut job = setting.job(system, data, work, accesses);
        job.limit_bytes = setting.limiter.as_ref().map(|_| setting.budget_bytes);
        if system != System::PreadDirect {
            job.warm_accesses = setting.budget_bytes / PAGE_BYTES as u64 * 5 / 4;
        }
        if matches!(job.work, Work::Write { .. }) {
            job.deadline_ms = 4000;
        }
        if setting.stage.quick {
            job.warm_deadline_ms = 200;
        }
        let limit_bytes = Some(setting.budget_bytes);
        cells.push(Cell { metric, unit: ("µs", 1e3), job, limit_bytes });
    };
    for &threads in &setting.threads {
        for system in setting.stage.wanted(READERS) {
            add(format!("read_{threads}t"), system, Work::Read { threads }, reads);
        }
    }
    for system in setting.stage.wanted(BATCHERS) {
        let work = Work::Batch { pages: BATCH_PAGES };
        add(format!("read_batch{BATCH_PAGES}"), system, work, reads);
    }
    for &threads in &setting.threads {
        for (system, number) in setting.stage.wanted(WRITERS).zip(1_u64..) {
            let salt = u64::from(threads) << 32 | number;
            add(format!("write_{threads}t"), system, Work::Write { threads, salt }, stores);
        }
    }
    cells
}

fn check(job: &Job, measured: &Measured, data: &DataFile) -> Result<()> {
    for (lane, answer) in (0_u32..).zip(&measured.lanes) {
        let pages = lane_pages(job, lane).take(usize::try_from(answer.accesses)?);
        let expected =
            pages.map(|page| expected_sample(data.seed(), page)).fold(0, u64::wrapping_add);
        ensure!(
            answer.checksum == expected,
            "thread {lane} read something else than the file holds"
        );
    }
    if let Work::Write { threads, salt } = job.work {
        for (lane, answer) in (0..threads).zip(&measured.lanes) {
            let accesses = usize::try_from(answer.accesses)?;
            let step = accesses.div_ceil(VERIFIED_STORES / threads as usize).max(1);
            let pages = lane_pages(job, lane).take(accesses).step_by(step);
            data.verify_stores(pages.map(|page| (page, stored_byte(salt, page))))?;
        }
    }
    Ok(())
}

/// The forms of mmap; the best of them for each metric is "mmap".
const MMAP: &[&str] = &["mmap", "mmap_random"];

fn definitions(threads: &[u32]) -> Vec<Ratio> {
    let mut all = Vec::new();
    for threads in threads {
        let read = format!("read_{threads}t");
        for (name, ours) in
            [("mapping", "mapping"), ("mapping_touch", "mapping_touch"), ("pages", "pages")]
        {
            all.push(Ratio::new(format!("{name}_vs_mmap_{read}"), MMAP, ours, &read));
        }
        all.push(Ratio {
            figure: Figure::P999,
            ..Ratio::new(format!("p999_mapping_vs_mmap_{read}"), MMAP, "mapping", &read)
        });
        let write = format!("write_{threads}t");
        all.push(Ratio::new(format!("mapping_vs_mmap_{write}"), MMAP, "mapping", &write));
        all.push(Ratio::new(
            format!("pages_vs_user_cache_{read}"),
            &["user_cache"],
            "pages",
            &read,
        ));
    }
    let batch = format!("read_batch{BATCH_PAGES}");
    let willneed: &[&str] = &["mmap_willneed"];
    all.push(Ratio {
        other_metric: "read_1t".to_owned(),
        ..Ratio::new("mapping_batched_vs_serial_mmap_read", MMAP, "mapping_batched", &batch)
    });
    all.push(Ratio::new("mapping_batched_vs_willneed", willneed, "mapping_batched", &batch));
    all.push(Ratio::new("pages_batched_vs_willneed", willneed, "pages_batched", &batch));
    all
}
