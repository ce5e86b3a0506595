//! `append`: a file that grows piece by piece.
//!
//! | contender | a piece |
//! |---|---|
//! | `syscalls` | `pwrite` at the end |
//! | `mmap`, `mmap_populate` | `ftruncate`, then stores to a mapping made in advance, populated or not |
//! | `pool` | written at the end of the file in the pool |
//! | `view` | stored to a view of the range added to the file in the pool |
//!
//! `prezeroed_…`: the file grows once, into space of a new pool, which is known to be zero.
//! `sustained_…`: the file is removed and grows again several times, so that space must be reused.
//! Ratios without either word are the lower of the two, on a disk.

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;

use super::{ANY_MMAP, check_warm, on_some};
use crate::benches::declaration::{Bench, Contenders};
use crate::benches::files::{
    Ground, Lowest, file_systems, grounds, job, lowest_ratios, run_block_after,
};
use crate::benches::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{MMAP, MMAP_POPULATE, POOL, SYSCALLS, VIEW};
use crate::harness::Cell;
use crate::job::{AppendWork, PooledWork};
use crate::options::{Common, Memory};
use crate::report::{Report, Row};
use crate::scratch::scratch_directory;
use aquifer_sys::units::Bytes;

const SYSTEMS: &[&Contender] = &[SYSCALLS, MMAP, MMAP_POPULATE, POOL, VIEW];
/// How often the file grows.
const TIMES: [(&str, u32); 2] = [("prezeroed", 1), ("sustained", 4)];

/// The options of `bench append`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench append                            pieces of 4 KiB to 4 MiB
  aquifer bench append --pieces 64K --size 512M --json")]
pub struct Options {
    /// Where the files in memory are.
    #[command(flatten)]
    memory: Memory,

    /// Lengths of a piece, separated by commas
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',',
          default_values_t = [Bytes(4 << 10), Bytes(64 << 10), Bytes(1 << 20), Bytes(4 << 20)])]
    pieces: Vec<Bytes>,

    /// How long the file gets [default: 64 MiB]
    #[arg(long, value_name = "BYTES")]
    size: Option<Bytes>,
}

/// The declaration of the bench.
pub struct Append;

impl Bench for Append {
    type Options = Options;
    const NAME: &'static str = "append";
    const ABOUT: &'static str = "Files of a pool that grow";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let default_bytes = if common.quick { 8 << 20 } else { 64 << 20 };
        let size_bytes = options.size.map_or(default_bytes, |size| size.0);
        for piece in &options.pieces {
            ensure!(
                piece.0 > 0 && piece.0 <= size_bytes && piece.0.is_multiple_of(8),
                "a file of {} does not grow by {piece}: choose other --pieces, multiples of 8",
                Bytes(size_bytes)
            );
        }
        check_warm(size_bytes)?;
        let stage = Stage::of::<Self>(common, 4 * size_bytes, false)?;
        let grounds = grounds(&stage, &options.memory);
        let mut rows = Vec::new();
        for ground in &grounds {
            rows.extend(block(options, &stage, ground, size_bytes)?);
        }
        let definitions = definitions(options, &grounds);
        let config = [
            ("size_bytes", json!(size_bytes)),
            ("pieces", json!(options.pieces.iter().map(|piece| piece.0).collect::<Vec<_>>())),
            ("file_systems", file_systems(&grounds)),
        ];
        Ok(stage.report(rows, move |rows| lowest_ratios(&definitions, rows), config))
    }
}

fn block(options: &Options, stage: &Stage, ground: &Ground, file_bytes: u64) -> Result<Vec<Row>> {
    let directory = scratch_directory(&ground.path)?;
    let mut cells = Vec::new();
    for (kind, times) in TIMES {
        for piece in &options.pieces {
            let metric = format!("{kind}_{}_{}", piece.suffix(), ground.file_system);
            let work = PooledWork::Append(AppendWork { piece_bytes: piece.0, file_bytes, times });
            cells.extend(stage.wanted(SYSTEMS).map(|contender| {
                let job = job(stage, contender, directory.path(), work);
                Cell::new(metric.clone(), ("µs", 1e3), job)
            }));
        }
    }
    run_block_after(stage, || directory.empty(), cells, |_, _| Ok(()))
}

fn definitions(options: &Options, grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    for (kind, _) in TIMES {
        for piece in &options.pieces {
            let metric = format!("{kind}_{}", piece.suffix());
            for (ours, name, others) in [
                (VIEW, "mmap", ANY_MMAP),
                (VIEW, "write", &[SYSCALLS]),
                (POOL, "mmap", ANY_MMAP),
                (POOL, "write", &[SYSCALLS]),
            ] {
                let name =
                    format!("{}_append_{kind}_vs_{name}_append_{}", ours.name, piece.suffix());
                all.push(Lowest::everywhere(name, others, ours, &metric, grounds));
            }
        }
    }
    for piece in &options.pieces {
        let metrics = TIMES.map(|(kind, _)| format!("{kind}_{}", piece.suffix()));
        let calls: &[&Contender] = &[SYSCALLS];
        for (ours, name, others) in [(VIEW, "mmap", ANY_MMAP), (POOL, "write", calls)] {
            let name = format!("{}_append_vs_{name}_append_{}", ours.name, piece.suffix());
            all.push(on_some(&name, others, ours, &metrics, grounds, false));
        }
    }
    all
}
