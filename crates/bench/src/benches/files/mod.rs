//! The benches about ordinary files, and their shared code: places, jobs, ratios over several file
//! systems.
//!
//! Metrics end with the name of the file system, as in `sum_32k_ext4`. A ratio over several file
//! systems is the lowest of them, and all are reported too: `mapping_cache_vs_mmap_32k`,
//! `…_32k_ext4`, `…_32k_tmpfs`.
//!
//! The data for one file system and one size is created, measured and removed before the next:
//! files that have to stay in memory need not all fit at once. Contenders are interleaved within
//! each of these blocks.

pub mod flush;
pub mod map_ahead;
pub mod mapping_cache;
pub mod pooled;
pub mod search;
pub mod unmap;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::{Value, json};

use super::ratio::{Ratio, ratios};
use super::stage::{Answers, Stage};
use crate::contender::Contender;
use crate::file_set::FileSet;
use crate::harness::{Cell, progress_bar};
use crate::job::{FilesWork, Job, Measured, Work};
use crate::options::Memory;
use crate::place::Place;
use crate::report::Row;
use crate::scratch::scratch_directory;
use aquifer_sys::machine::available_memory_bytes;

/// A directory for files, and the name of its file system in metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Ground {
    path: PathBuf,
    file_system: String,
}

impl Ground {
    fn is_in_memory(&self) -> bool {
        matches!(self.file_system.as_str(), "tmpfs" | "ramfs")
    }
}

/// The stage's place, and the directory in memory. The latter is omitted, with a note, if there is
/// none.
fn grounds(stage: &Stage, memory: &Memory) -> Vec<Ground> {
    let ground = |place: &Place| Ground {
        path: place.path().to_owned(),
        file_system: place.file_system().to_owned(),
    };
    let mut found = vec![ground(&stage.place)];
    if found[0].is_in_memory() {
        stage.note("--dir is in memory: nothing was measured on a disk");
        return found;
    }
    match Place::directory(&memory.tmpfs_dir, false).map(|place| ground(&place)) {
        Ok(place) if place.is_in_memory() => found.push(place),
        Ok(place) => stage.note(format!(
            "--tmpfs-dir {} is a {}, not a tmpfs: nothing was measured in memory",
            place.path.display(),
            place.file_system
        )),
        Err(error) => stage.note(format!("nothing was measured in memory: {error}")),
    }
    found
}

/// A ratio measured in several ways, of which the lowest is reported.
#[derive(Debug, Clone)]
struct Lowest {
    name: String,
    each: Vec<Ratio>,
}

impl Lowest {
    /// The best of `others` over `ours` on each of the file systems. `metric` excludes their names.
    fn everywhere(
        name: impl Into<String>,
        others: &'static [&'static Contender],
        ours: &'static Contender,
        metric: &str,
        grounds: &[Ground],
    ) -> Self {
        let name = name.into();
        let on = |Ground { file_system, .. }: &Ground| {
            let metric = format!("{metric}_{file_system}");
            Ratio::new(format!("{name}_{file_system}"), others, ours, metric)
        };
        let each = grounds.iter().map(on).collect();
        Self { name, each }
    }
}

/// The ratios whose rows exist, and the lowest of each kind.
fn lowest_ratios(definitions: &[Lowest], rows: &[Row]) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    for Lowest { name, each } in definitions {
        let each = ratios(each, rows);
        let lowest = each.values().copied().min_by(f64::total_cmp);
        found.extend(lowest.map(|lowest| (name.clone(), lowest)));
        found.extend(each);
    }
    found
}

/// The names of file systems, for the report.
fn file_systems(grounds: &[Ground]) -> Value {
    json!(grounds.iter().map(|ground| &*ground.file_system).collect::<Vec<_>>())
}

/// A job on files.
fn job(stage: &Stage, contender: &Contender, path: &Path, work: impl Into<Work>) -> Job {
    Job::new(contender.name, path.to_owned(), stage.seed, work)
}

/// Writes files of one length.
fn file_set(stage: &Stage, ground: &Ground, files: u32, file_bytes: u64) -> Result<FileSet> {
    let bar = progress_bar(u64::from(files), "{pos}/{len} writing files");
    let directory = scratch_directory(&ground.path)?;
    let set = FileSet::create(directory, files, file_bytes, stage.seed, || bar.inc(1));
    bar.finish_and_clear();
    set
}

/// Runs a block of cells. `check` is called with every answer; answers to the same work must be
/// equal.
fn run_block(
    stage: &Stage,
    cells: Vec<Cell>,
    check: impl Fn(&Job, &Measured) -> Result<()>,
) -> Result<Vec<Row>> {
    run_block_after(stage, || Ok(()), cells, check)
}

/// The same, calling `before` before every child.
fn run_block_after(
    stage: &Stage,
    before: impl Fn() -> Result<()>,
    cells: Vec<Cell>,
    check: impl Fn(&Job, &Measured) -> Result<()>,
) -> Result<Vec<Row>> {
    let answers = Answers::new();
    stage.measure(None, before, cells, |job, measured| {
        check(job, measured)?;
        let Some(same_work) = work_number(job) else { return Ok(()) };
        answers.check((same_work, job.round), measured)
    })
}

/// Equal for jobs that must have the same answer; `None` if the answer depends on earlier stores.
fn work_number(job: &Job) -> Option<u64> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    if matches!(job.work, Work::Files(FilesWork::Flush { .. })) {
        return None;
    }
    let mut hasher = DefaultHasher::new();
    (&job.work, &job.source.path, job.accesses).hash(&mut hasher);
    Some(hasher.finish())
}

/// The most that files that must stay in memory may occupy together: a quarter of the available
/// memory, since other processes on the machine and contenders that copy need some too.
fn warm_bytes() -> u64 {
    available_memory_bytes() / 4
}

/// A row made from a detail of another row.
fn row_of_detail(
    row: &Row,
    metric: String,
    unit: impl Into<Cow<'static, str>>,
    detail: &str,
) -> Option<Row> {
    let values: Vec<_> =
        row.each.iter().filter_map(|round| round.details.get(detail).copied()).collect();
    (!values.is_empty()).then(|| Row::of(&*row.system, metric, unit, values, Vec::new()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contenders::{MAPPER, MMAP, READ};
    use crate::report::Round;

    #[test]
    fn a_ratio_over_file_systems_is_the_lowest() {
        let ground = |name: &str| Ground { path: "/x".into(), file_system: name.to_owned() };
        let rows = [
            Row::single("mmap", "sum_ext4", 6.0),
            Row::single("mapper", "sum_ext4", 2.0),
            Row::single("mmap", "sum_tmpfs", 8.0),
            Row::single("mapper", "sum_tmpfs", 2.0),
        ];
        let grounds = [ground("ext4"), ground("tmpfs"), ground("xfs")];
        let one = Lowest::everywhere("a", &[MMAP], MAPPER, "sum", &grounds);
        let other = Lowest::everywhere("b", &[READ], MAPPER, "sum", &grounds);
        let found = lowest_ratios(&[one, other], &rows);
        let expected = [("a", 3.0), ("a_ext4", 3.0), ("a_tmpfs", 4.0)];
        assert_eq!(found, BTreeMap::from(expected.map(|(name, value)| (name.to_owned(), value))));
    }

    #[test]
    fn a_detail_becomes_a_row() {
        let details = BTreeMap::from([("second".to_owned(), 7.0)]);
        let each = vec![Round { details, ..Round::default() }];
        let row = Row::of("mmap", "first", "µs", vec![6.0], each);
        let made = row_of_detail(&row, "again".to_owned(), "ms", "second").unwrap();
        assert_eq!((&*made.system, &*made.metric, made.median), ("mmap", "again", 7.0));
        assert!(row_of_detail(&row, "again".to_owned(), "ms", "third").is_none());
    }
}
