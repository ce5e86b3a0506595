//! The benches: contenders, work and ratios.

mod bfs;
mod compute;
mod demo;
mod fault;
mod files;
mod graph_run;
mod hit;
mod out_of_core;
mod psync;
mod recover;
mod setting;
mod stage;

use anyhow::Result;

pub use demo::demo;

use crate::options::Bench;
use crate::report::Report;

/// Runs one bench.
pub fn run(bench: &Bench) -> Result<Report> {
    match bench {
        Bench::Hit(options) => hit::run(options),
        Bench::Fault(options) => fault::run(options),
        Bench::OutOfCore(options) => out_of_core::run(options),
        Bench::Bfs(options) => bfs::run(options),
        Bench::Psync(options) => psync::run(options),
        Bench::Compute(options) => compute::run(options),
        Bench::Recover(options) => recover::run(options),
        Bench::MappingCache(options) => files::mapping_cache(options),
        Bench::MapAhead(options) => files::map_ahead(options),
        Bench::Unmap(options) => files::unmap(options),
        Bench::Flush(options) => files::flush(options),
        Bench::Search(options) => files::search(options),
        Bench::ReadOnce(options) => files::read_once(options),
        Bench::View(options) => files::view(options),
        Bench::Repetitive(options) => files::repetitive(options),
        Bench::Append(options) => files::append(options),
        Bench::Shared(options) => files::shared(options),
        Bench::Metadata(options) => files::metadata(options),
        Bench::Pswap(options) => files::pswap(options),
    }
}
