//! `read-once`: files of one length, each opened by path, summed and closed.
//!
//! | contender | each file |
//! |---|---|
//! | `read` | `open`, `fstat`, `pread` into a reused buffer, sum, `close` |
//! | `mmap`, `mmap_populate` | `open`, `fstat`, `mmap`, sum, `munmap`, `close` |
//! | `pool` | open in the pool, read into a reused buffer, sum, close |
//! | `view` | path lookup, pin, sum in place, drop |
//!
//! `sum_…` is the mean over all passes of a process but the first, `first_…` the time of the first.
//! Metrics end with the length of a file, the length of all files, the threads and the file system.

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;

use super::{ANY_MMAP, make_set};
use crate::benches::declaration::{Bench, Contenders};
use crate::benches::files::{
    Ground, Lowest, file_systems, grounds, job, lowest_ratios, row_of_detail, run_block,
};
use crate::benches::ratio::Ratio;
use crate::benches::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{MMAP, MMAP_POPULATE, POOL, READ, VIEW};
use crate::harness::Cell;
use crate::job::PooledWork;
use crate::options::{Common, Memory, count};
use crate::pooled_set::Age;
use crate::report::{Report, Row};
use aquifer_sys::units::Bytes;

const SYSTEMS: &[&Contender] = &[READ, MMAP, MMAP_POPULATE, POOL, VIEW];
const OTHERS: &[&Contender] = &[READ, MMAP, MMAP_POPULATE];

const SIZES: [Bytes; 3] = [Bytes(4 << 10), Bytes(32 << 10), Bytes(256 << 10)];
const ALL_SIZES: [Bytes; 7] = [
    Bytes(4 << 10),
    Bytes(32 << 10),
    Bytes(256 << 10),
    Bytes(2 << 20),
    Bytes(16 << 20),
    Bytes(128 << 20),
    Bytes(1 << 30),
];
const SETS: [Bytes; 2] = [Bytes(64 << 20), Bytes(2 << 30)];
/// Files of the quick form.
const QUICK_FILES: u64 = 16;

/// Files of one length.
#[derive(Debug, Clone, Copy)]
struct Shape {
    size: Bytes,
    set: Bytes,
    files: u32,
}

impl Shape {
    fn metric(&self, threads: u32) -> String {
        format!("{}_{}_{threads}t", self.size.suffix(), self.set.suffix())
    }
}

/// The options of `bench read-once`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench read-once                         three lengths, 64 MiB of files, about two minutes
  aquifer bench read-once --full                  4 KiB to 1 GiB, and 2 GiB of files, too
  aquifer bench read-once --sizes 16K --threads 1 --json")]
pub struct Options {
    /// Where the files in memory are.
    #[command(flatten)]
    memory: Memory,

    /// Lengths of the files, separated by commas [default: 4K,32K,256K; --full: to 1G]
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',')]
    sizes: Vec<Bytes>,

    /// Lengths of all files together, separated by commas [default: 64M; --full: 64M,2G]
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',')]
    sets: Vec<Bytes>,

    /// Numbers of threads, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2],
          value_parser = count())]
    threads: Vec<u32>,

    /// How often all files are read in each measurement, after the first time
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = count())]
    passes: u32,

    /// All lengths and sets
    #[arg(long)]
    full: bool,
}

/// The declaration of the bench.
pub struct ReadOnce;

impl Bench for ReadOnce {
    type Options = Options;
    const NAME: &'static str = "read-once";
    const ABOUT: &'static str = "Files of a pool, each opened by path, summed and closed";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let shapes = shapes(common, options)?;
        let stage = Stage::of::<Self>(common, 0, false)?;
        let grounds = grounds(&stage, &options.memory);
        let mut rows = Vec::new();
        for shape in &shapes {
            for ground in &grounds {
                rows.extend(block(options, &stage, ground, *shape)?);
            }
        }
        let definitions = definitions(options, &shapes, &grounds);
        let bytes = |of: fn(&Shape) -> u64| json!(shapes.iter().map(of).collect::<Vec<_>>());
        let config = [
            ("file_sizes", bytes(|shape| shape.size.0)),
            ("set_bytes", bytes(|shape| shape.set.0)),
            ("files", bytes(|shape| u64::from(shape.files))),
            ("threads", json!(options.threads)),
            ("passes", json!(options.passes)),
            ("file_systems", file_systems(&grounds)),
        ];
        Ok(stage.report(rows, move |rows| lowest_ratios(&definitions, rows), config))
    }
}

fn shapes(common: &Common, options: &Options) -> Result<Vec<Shape>> {
    let or = |asked: &[Bytes], all: &[Bytes], few: usize| match (asked, options.full) {
        ([], true) => all.to_vec(),
        ([], false) => all[..few].to_vec(),
        _ => asked.to_vec(),
    };
    let sizes = or(&options.sizes, &ALL_SIZES, SIZES.len());
    let sets = or(&options.sets, &SETS, 1);
    let most = u64::from(options.threads.iter().copied().max().unwrap_or(1));
    let mut shapes = Vec::new();
    for &set in &sets {
        for &size in &sizes {
            ensure!(
                size.0 > 0,
                "files of no length have nothing to sum: choose another of --sizes"
            );
            let files = set.0 / size.0;
            let files = if common.quick { files.min(QUICK_FILES) } else { files };
            // Some lengths may be too large for some sets.
            if files >= most {
                shapes.push(Shape { size, set, files: u32::try_from(files)? });
            }
        }
    }
    ensure!(
        !shapes.is_empty(),
        "each thread needs a file: choose larger --sets or smaller --sizes"
    );
    Ok(shapes)
}

/// The measurements with one length, one set, one file system.
fn block(options: &Options, stage: &Stage, ground: &Ground, shape: Shape) -> Result<Vec<Row>> {
    let set = make_set(stage, ground, shape.files, shape.size.0, Age::New)?;
    let expected = set.sums().iter().copied().fold(0, u64::wrapping_add);
    let passes = options.passes;
    let mut cells = Vec::new();
    for &threads in &options.threads {
        let metric = format!("sum_{}_{}", shape.metric(threads), ground.file_system);
        let work = PooledWork::Sum { files: shape.files, threads, passes };
        cells.extend(stage.wanted(SYSTEMS).map(|contender| {
            Cell::new(metric.clone(), ("µs", 1e3), job(stage, contender, set.path(), work))
        }));
    }
    let mut rows = run_block(stage, cells, |_, measured| {
        let found = measured.lanes.iter().map(|lane| lane.checksum);
        let found = found.fold(0, u64::wrapping_add);
        let expected = expected.wrapping_mul(u64::from(passes) + 1);
        ensure!(found == expected, "its sums are not those of the files");
        Ok(())
    })?;
    let first =
        |row: &Row| row_of_detail(row, row.metric.replacen("sum", "first", 1), "µs", "first_us");
    let firsts: Vec<_> = rows.iter().filter_map(first).collect();
    rows.extend(firsts);
    Ok(rows)
}

fn definitions(options: &Options, shapes: &[Shape], grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    for shape in shapes {
        // The default set has no suffix.
        let set =
            if shape.set == SETS[0] { String::new() } else { format!("_{}", shape.set.suffix()) };
        for (name, others, ours, kind) in [
            ("view_vs_read", &[READ][..], VIEW, "sum"),
            ("view_vs_mmap", ANY_MMAP, VIEW, "sum"),
            ("first_pass_vs_best_other", OTHERS, VIEW, "first"),
            ("pool_read_vs_read", &[READ], POOL, "sum"),
        ] {
            let name = format!("{name}_{}{set}", shape.size.suffix());
            let mut each = Vec::new();
            for ground in grounds {
                let suffix = &ground.file_system;
                each.extend(options.threads.iter().map(|&threads| {
                    let metric = format!("{kind}_{}_{suffix}", shape.metric(threads));
                    Ratio::new(format!("{name}_{threads}t_{suffix}"), others, ours, metric)
                }));
            }
            all.push(Lowest { name, each });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        options: Options,
    }

    fn of(arguments: &[&str]) -> Vec<(u64, u64, u32)> {
        let line = Line::parse_from([&["bench"], arguments].concat());
        let shapes = shapes(&line.common, &line.options).unwrap();
        shapes.iter().map(|shape| (shape.size.0, shape.set.0, shape.files)).collect()
    }

    #[test]
    fn lengths_fit_their_sets() {
        assert_eq!(of(&[]).len(), 3);
        assert_eq!(of(&[])[0], (4096, 64 << 20, 16_384));
        let all = of(&["--full"]);
        // In 64 MiB, files of up to 32 MiB for two threads; in 2 GiB, all lengths.
        assert_eq!(all.len(), 5 + 7);
        assert_eq!(all.last(), Some(&(1 << 30, 2 << 30, 2)));
        assert_eq!(of(&["--sizes", "1M", "--sets", "4M"]), [(1 << 20, 4 << 20, 4)]);
    }
}
