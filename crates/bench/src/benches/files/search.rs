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

use anyhow::Result;
use serde_json::json;

use super::{cell, job, row_of_detail, run_block};
use crate::benches::stage::Stage;
use crate::contender::System;
use crate::harness::{FilesWork, progress_bar};
use crate::options::SearchOptions;
use crate::report::{Ratio, Report, ratios};
use crate::scratch::scratch_directory;
use crate::source_tree::{SourceTree, usual_roots};
use aquifer_host::machine::cores;

const SYSTEMS: &[System] = &[
    System::ReadLoop,
    System::Read,
    System::Mmap,
    System::MmapPopulate,
    System::Mapper,
    System::MapperReadOnce,
];
const OTHERS: &[&str] = &["read_loop", "read", "mmap", "mmap_populate"];

/// Passes after the first, normally and in the quick form.
const REPEATS: [u32; 2] = [5, 1];
/// Files of the quick form.
const QUICK_FILES: u32 = 300;

/// Runs the bench.
pub fn run(options: &SearchOptions) -> Result<Report> {
    let quick = options.common.quick;
    let mut stage = Stage::prepare(&options.common, &[SYSTEMS], 0, false)?;
    let roots = if options.tree.is_empty() { usual_roots() } else { options.tree.clone() };
    let wanted = if quick { options.files.min(QUICK_FILES) } else { options.files };
    let bar = progress_bar(u64::from(wanted), "{pos}/{len} copying source files");
    let directory = scratch_directory(stage.place.path())?;
    let tree = SourceTree::copy(directory, &roots, wanted, || bar.inc(1));
    bar.finish_and_clear();
    let tree = tree?;
    let all_cores = u32::try_from(cores()).unwrap_or(1);
    let threads = options.threads.unwrap_or(all_cores);
    let needle = options.needle.clone();
    let work = FilesWork::Search { needle, threads, repeats: REPEATS[usize::from(quick)] };
    let cells = stage.wanted(SYSTEMS).map(|system| {
        let job = job(&stage, system, tree.path(), 0, work.clone());
        cell("search_first".to_owned(), ("ms", 1e6), job)
    });
    let cells = cells.collect();
    let mut notes = std::mem::take(&mut stage.notes);
    let mut rows = run_block(&stage, cells, &mut notes, |_, _| Ok(()))?;
    let repeated = |row| row_of_detail(row, "search_repeated".to_owned(), "ms", "repeated_ms");
    let repeated: Vec<_> = rows.iter().filter_map(repeated).collect();
    rows.extend(repeated);
    if tree.repeated > 0 {
        notes.push(format!(
            "{} of {} files are further copies of the others: there are no more source files where \
             it was looked for them",
            tree.repeated, tree.files
        ));
    }
    stage.notes = notes;
    let found = ratios(&definitions(), &rows);
    let config = [
        ("files", json!(tree.files)),
        ("bytes", json!(tree.bytes)),
        ("files_that_are_copies", json!(tree.repeated)),
        ("roots", json!(roots)),
        ("needle", json!(options.needle)),
        ("threads", json!(threads)),
    ];
    Ok(stage.report("search", rows, found, config))
}

fn definitions() -> Vec<Ratio> {
    let first = |name: &str| Ratio::new(name, OTHERS, "mapper_read_once", "search_first");
    vec![
        first("search_vs_best_other"),
        Ratio::new("search_vs_best_other_first_mapped", OTHERS, "mapper", "search_first"),
        Ratio::new("search_vs_best_other_repeated", OTHERS, "mapper", "search_repeated"),
    ]
}
