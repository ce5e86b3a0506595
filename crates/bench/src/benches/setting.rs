//! The setting of the cache benches in addition to a stage: sizes, threads, limits.

use anyhow::{Result, ensure};
use serde_json::json;

use super::declaration::Contenders;
use super::ratio::{Ratio, ratios};
use super::stage::{Stage, data_file};
use crate::contender::Contender;
use crate::data::DataFile;
use crate::harness::Cell;
use crate::job::{Job, Measured, Work};
use crate::options::{CacheOptions, Common};
use crate::raw::{PAGE_BYTES, drop_cache};
use crate::report::{Report, Row};
use aquifer_sys::limit::Limiter;
use aquifer_sys::machine::cores;
use aquifer_sys::units::Bytes;

/// Below this the process itself needs most of the memory.
const BUDGET_MIN_BYTES: u64 = 32 << 20;

/// A bench's contenders and its default sizes.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    /// The name of the bench.
    pub name: &'static str,
    /// Its contenders.
    pub contenders: Contenders,
    /// Length of the data file, normally and in the quick form.
    pub size_bytes: [u64; 2],
    /// Ratio of data to memory.
    pub data_per_budget: u64,
    /// Whether memory is scarce by design.
    pub scarce: bool,
}

/// One run of a bench. Fields are dropped, and so undone, in this order.
#[derive(Debug)]
pub struct Setting {
    /// Length of the data file in bytes.
    pub size_bytes: u64,
    /// Memory for each contender.
    pub budget_bytes: u64,
    /// Numbers of threads to measure with.
    pub threads: Vec<u32>,
    /// Creates limited control groups, if memory is scarce and that is permitted.
    pub limiter: Option<Limiter>,
    /// What is common to all benches.
    pub stage: Stage,
    scarce: bool,
    limit_text: String,
}

impl Setting {
    /// Determines and prepares everything.
    pub fn prepare(common: &Common, options: &CacheOptions, defaults: Defaults) -> Result<Self> {
        let size = options.size.map(|size| size.0);
        let size_bytes = size.unwrap_or(defaults.size_bytes[usize::from(common.quick)]);
        let size_bytes = size_bytes / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        let budget = options.budget.map(|budget| budget.0);
        let budget_bytes =
            budget.unwrap_or((size_bytes / defaults.data_per_budget).max(BUDGET_MIN_BYTES));
        if defaults.scarce {
            ensure!(
                budget_bytes >= BUDGET_MIN_BYTES,
                "a budget of {} is too small: below 32 MiB the process itself needs most of it",
                Bytes(budget_bytes)
            );
            let (least_bytes, least) = match defaults.data_per_budget {
                1 => (budget_bytes + budget_bytes / 8, "an eighth more than"),
                _ => (2 * budget_bytes, "at least twice"),
            };
            ensure!(
                size_bytes >= least_bytes,
                "the data ({}) must be {least} the budget ({})",
                Bytes(size_bytes),
                Bytes(budget_bytes)
            );
        }
        let Defaults { name, contenders, scarce, .. } = defaults;
        let stage = Stage::prepare(name, contenders, common, size_bytes, scarce)?;
        let mut limiter = None;
        let mut limit_text = "not needed".to_owned();
        if defaults.scarce {
            match Limiter::find() {
                Ok(found) => {
                    found.describe().clone_into(&mut limit_text);
                    limiter = Some(found);
                }
                Err(error) => {
                    limit_text = "none".to_owned();
                    stage.note(format!(
                        "memory is NOT limited ({error}): page cache may hold the whole file, so the \
                         figures do not compare and there are no ratios"
                    ));
                }
            }
        }
        let threads = thread_counts(&options.threads);
        Ok(Self { size_bytes, budget_bytes, threads, limiter, stage, scarce, limit_text })
    }

    /// Pages of the data file.
    pub fn pages(&self) -> u64 {
        self.size_bytes / PAGE_BYTES as u64
    }

    /// The budget for a contender's private cache: the rest is for its program, stacks, page tables
    /// and bookkeeping, which contenders that use the page cache pay from the same budget.
    pub fn cache_bytes(&self) -> u64 {
        own_cache_bytes(self.budget_bytes)
    }

    /// The budget for a contender whose pages are in the page cache.
    pub fn page_cache_bytes(&self) -> u64 {
        page_cache_bytes(self.budget_bytes, self.size_bytes)
    }

    /// Writes the data file.
    pub fn data_file(&self) -> Result<DataFile> {
        data_file(self.stage.place.path(), self.pages(), self.stage.seed)
    }

    /// A job with this setting's sizes and `accesses` accesses per thread.
    pub fn job(&self, contender: &Contender, data: &DataFile, work: Work, accesses: u64) -> Job {
        let writable = matches!(work, Work::Write { .. });
        let mut job = Job::new(contender.name, data.path(), self.stage.seed, work);
        job.source.pages = data.pages();
        job.source.writable = writable;
        job.source.cache_bytes = self.cache_bytes();
        job.source.page_cache_bytes = self.page_cache_bytes();
        job.accesses = accesses;
        job.deadline_ms = 1500;
        job.warm_deadline_ms = 3000;
        job
    }

    /// Measures each cell from a cold start.
    pub fn measure(
        &self,
        data: &DataFile,
        cells: Vec<Cell>,
        check: impl Fn(&Job, &Measured) -> Result<()>,
    ) -> Result<Vec<Row>> {
        let before = || Ok(drop_cache(&data.open()?)?);
        self.stage.measure(self.limiter.as_ref(), before, cells, check)
    }

    /// The report on `rows`. There are no ratios if memory must be scarce and there is no limit.
    pub fn report(&self, rows: Vec<Row>, mut definitions: Vec<Ratio>) -> Report {
        if self.scarce && self.limiter.is_none() {
            definitions.clear();
        }
        let mut config = vec![
            ("size_bytes", json!(self.size_bytes)),
            ("threads", json!(self.threads)),
            ("memory_limit", json!(self.limit_text)),
        ];
        if self.scarce {
            config.push(("budget_bytes", json!(self.budget_bytes)));
            config.push(("own_cache_bytes", json!(self.cache_bytes())));
            config.push(("page_cache_bytes", json!(self.page_cache_bytes())));
        }
        self.stage.report(rows, move |rows| ratios(&definitions, rows), config)
    }
}

/// See [`Setting::cache_bytes`].
pub fn own_cache_bytes(budget_bytes: u64) -> u64 {
    budget_bytes - budget_bytes / 16 - (12 << 20)
}

/// The requested numbers, or 1, 2, 4, … and all cores.
fn thread_counts(asked: &[u32]) -> Vec<u32> {
    let mut counts = asked.to_vec();
    if counts.is_empty() {
        let all = u32::try_from(cores()).unwrap_or(1);
        counts = (0..).map(|power| 1 << power).take_while(|&count| count <= all).collect();
        counts.push(all);
    }
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// The budget for a contender whose pages are in the page cache, without frames, tables and
/// transfer buffers of its own: the rest is for its program and stacks, and for what every mapping
/// of a file has, the page tables and the index of the page cache. Those take 1/240 of the data
/// at random accesses: a page of each for 2 MiB, and a node of 576 bytes for 256 KiB. The process
/// is charged 1.5 to 3 MiB beside, and some more for the harness's draws during a warm-up.
pub fn page_cache_bytes(budget_bytes: u64, data_bytes: u64) -> u64 {
    budget_bytes - data_bytes.min(8 * budget_bytes) / 240 - (3 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_counts_are_what_was_asked_for_or_powers_of_two() {
        assert_eq!(thread_counts(&[4, 1, 4]), [1, 4]);
        let found = thread_counts(&[]);
        assert_eq!(found[0], 1);
        assert_eq!(*found.last().unwrap() as usize, cores());
        assert!(found.is_sorted());
    }
}
