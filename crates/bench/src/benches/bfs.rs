//! `bfs`: breadth-first search over an R-MAT graph, from a cold start.
//!
//! Every contender runs the same search. `mmap` and `mmap_random` represent unmodified programs;
//! for `mmap_willneed` the frontier is prefetched with vectored `process_madvise(WILLNEED)`,
//! exactly where the mapping's own prefetch is called. These read the frontier in the order in which
//! its vertices were found. `mmap_sorted_willneed` is a program that sorts each frontier by hand and
//! prefetches groups of 1024 vertices, `_16k` groups of 16,384; `mapping_visited` passes the ranges of
//! at most so many vertices to `visit_many`. Each contender gets the budget plus the memory of the search itself (levels and
//! frontiers, 12 bytes per vertex). The largest requested number of threads is used.

use anyhow::Result;

use super::declaration::{Bench, Contenders};
use super::graph_run::GraphRun;
use super::ratio::Ratio;
use super::setting::Defaults;
use crate::contender::Contender;
use crate::contenders::{
    MAPPING, MAPPING_USER_VISITED, MAPPING_VISITED, MMAP, MMAP_RANDOM, MMAP_SORTED_WILLNEED,
    MMAP_SORTED_WILLNEED_16K, MMAP_WILLNEED,
};
use crate::options::{CacheOptions, Common};
use crate::report::Report;

const SYSTEMS: &[&Contender] = &[
    MMAP,
    MMAP_RANDOM,
    MMAP_WILLNEED,
    MMAP_SORTED_WILLNEED,
    MMAP_SORTED_WILLNEED_16K,
    MAPPING,
    MAPPING_VISITED,
    MAPPING_USER_VISITED,
];

const SORTED_BY_HAND: &[&Contender] = &[MMAP_SORTED_WILLNEED, MMAP_SORTED_WILLNEED_16K];

/// The declaration of the bench.
pub struct Bfs;

impl Bench for Bfs {
    type Options = CacheOptions;
    const NAME: &'static str = "bfs";
    const ABOUT: &'static str = "Breadth-first search over a graph larger than memory";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &CacheOptions) -> Result<Report> {
        let defaults = Defaults {
            name: Self::NAME,
            contenders: Self::CONTENDERS,
            size_bytes: [256 << 20, 64 << 20],
            data_per_budget: 4,
            scarce: true,
        };
        let run = GraphRun::prepare(common, options, defaults)?;
        // Read-ahead whose pages evict others can take an hour. A form that slow is not the best
        // form of mmap, so leaving it out changes no ratio.
        let deadline_ms = if common.quick { 3_000 } else { 90_000 };
        let cells = run
            .setting
            .stage
            .wanted(SYSTEMS)
            .map(|contender| run.search_cell("search", ("ms", 1e6), contender, deadline_ms));
        let rows = run.measure(cells.collect())?;
        Ok(run.report(rows, definitions()))
    }
}

fn definitions() -> Vec<Ratio> {
    let all: &[&Contender] = &[MMAP, MMAP_RANDOM, MMAP_WILLNEED];
    vec![
        Ratio::new("mapping_vs_mmap", all, MAPPING, "search"),
        Ratio::new("mapping_vs_plain_mmap", &[MMAP, MMAP_RANDOM], MAPPING, "search"),
        Ratio::new("visit_vs_sorted_willneed", SORTED_BY_HAND, MAPPING_VISITED, "search"),
    ]
}
