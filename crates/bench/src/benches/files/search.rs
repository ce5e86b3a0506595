//! `search`: finds a text in the files of a source tree, all of them warm.
//!
//! | metric | what |
//! |---|---|
//! | `search_first` | the first pass of a process, as in a program that searches once and exits |
//! | `search_repeated` | the later passes, as in a long-running program |
//!
//! | contender | each file |
//! |---|---|
//! | `read_loop` | `openat` in its directory, `read` into 64 KiB until a short read, `close` |
//! | `read` | `open`, `fstat`, `pread` into a reused buffer, `close` |
//! | `mmap`, `mmap_populate` | `open`, `fstat`, `mmap`, search, `munmap`, `close` |
//! | `mapper` | a view by name, search, view dropped: parked for the next pass |
//! | `mapper_read_once` | [`read_once_at`](aquifer::Mapper::read_once_at) in its directory, with the search as its closure |
//! | `view` | in a pool with the same files and paths: path lookup, pin, search in place, drop |

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::{job, row_of_detail, run_block};
use crate::benches::declaration::{Bench, Contenders};
use crate::benches::ratio::{Ratio, ratios};
use crate::benches::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{MAPPER, MAPPER_READ_ONCE, MMAP, MMAP_POPULATE, READ, READ_LOOP, VIEW};
use crate::harness::{Cell, progress_bar};
use crate::job::FilesWork;
use crate::options::{Common, count};
use crate::pooled_set;
use crate::report::Report;
use crate::scratch::scratch_directory;
use crate::source_tree::{SourceTree, usual_roots};
use aquifer_sys::machine::cores;

const SYSTEMS: &[&Contender] =
    &[READ_LOOP, READ, MMAP, MMAP_POPULATE, MAPPER, MAPPER_READ_ONCE, VIEW];
const OTHERS: &[&Contender] = &[READ_LOOP, READ, MMAP, MMAP_POPULATE];

/// Passes after the first, normally and in the quick form.
const REPEATS: [u32; 2] = [5, 1];
/// Files of the quick form.
const QUICK_FILES: u32 = 300;

/// The options of `bench search`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench search                            source files of this machine, copied to this directory
  aquifer bench search --tree ~/src,/usr/include  from these directories
  aquifer bench search --needle 'struct stat' --threads 4 --json

The files are copied into a scratch directory, with the directories they are in, and into a pool there. Where there are fewer than
--files, they are copied again under other names; the report says so.")]
pub struct Options {
    /// Directories to take source files from, separated by commas [default: /usr/include,
    /// /usr/share, ~/.cargo/registry, ~/.rustup and others that are there]
    #[arg(long, value_name = "DIR,…", value_delimiter = ',')]
    tree: Vec<PathBuf>,

    /// Number of files
    #[arg(long, value_name = "N", default_value_t = 50_000,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    files: u32,

    /// Text to search for; it may lie across lines
    #[arg(long, value_name = "TEXT", default_value = "TODO",
          value_parser = clap::builder::NonEmptyStringValueParser::new())]
    needle: String,

    /// Threads that search [default: the cores]
    #[arg(long, value_name = "N", value_parser = count())]
    threads: Option<u32>,
}

/// The declaration of the bench.
pub struct Search;

impl Bench for Search {
    type Options = Options;
    const NAME: &'static str = "search";
    const ABOUT: &'static str = "Text search over a source tree";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let quick = common.quick;
        let stage = Stage::of::<Self>(common, 0, false)?;
        let roots = if options.tree.is_empty() { usual_roots() } else { options.tree.clone() };
        let wanted = if quick { options.files.min(QUICK_FILES) } else { options.files };
        let bar = progress_bar(u64::from(wanted), "{pos}/{len} copying source files");
        let directory = scratch_directory(stage.place.path())?;
        let tree = SourceTree::copy(directory, &roots, wanted, || bar.inc(1));
        bar.finish_and_clear();
        let tree = tree?;
        if stage.wanted(SYSTEMS).any(|contender| contender == VIEW) {
            pooled_set::copy_tree(&tree)?;
        }
        let all_cores = u32::try_from(cores()).unwrap_or(1);
        let threads = options.threads.unwrap_or(all_cores);
        let needle = options.needle.clone();
        let work = FilesWork::Search { needle, threads, repeats: REPEATS[usize::from(quick)] };
        let cells = stage.wanted(SYSTEMS).map(|contender| {
            let job = job(&stage, contender, tree.path(), work.clone());
            Cell::new("search_first", ("ms", 1e6), job)
        });
        let mut rows = run_block(&stage, cells.collect(), |_, _| Ok(()))?;
        let repeated = |row| row_of_detail(row, "search_repeated".to_owned(), "ms", "repeated_ms");
        let repeated: Vec<_> = rows.iter().filter_map(repeated).collect();
        rows.extend(repeated);
        if tree.repeated > 0 {
            stage.note(format!(
                "{} of {} files are further copies of the others: there are no more source files where \
                 it was looked for them",
                tree.repeated, tree.files
            ));
        }
        let definitions = definitions();
        let config = [
            ("files", json!(tree.files)),
            ("bytes", json!(tree.bytes)),
            ("files_that_are_copies", json!(tree.repeated)),
            ("roots", json!(roots)),
            ("needle", json!(options.needle)),
            ("threads", json!(threads)),
        ];
        Ok(stage.report(rows, move |rows| ratios(&definitions, rows), config))
    }
}

fn definitions() -> Vec<Ratio> {
    let first = |name: &str| Ratio::new(name, OTHERS, MAPPER_READ_ONCE, "search_first");
    vec![
        first("search_vs_best_other"),
        Ratio::new("search_vs_best_other_first_mapped", OTHERS, MAPPER, "search_first"),
        Ratio::new("search_vs_best_other_repeated", OTHERS, MAPPER, "search_repeated"),
        Ratio::new("pool_views_vs_read_loop", &[READ_LOOP], VIEW, "search_first"),
        Ratio::new("pool_views_vs_read_loop_repeated", &[READ_LOOP], VIEW, "search_repeated"),
    ]
}
