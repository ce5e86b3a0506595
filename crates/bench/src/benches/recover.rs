//! `recover`: the time to open after a crash, depending on the amount committed and on the size.
//!
//! `attach_log_…` varies how much was committed before the crash, with the middle array size;
//! `attach_size_…` varies the array size, with the middle amount committed. A contender that
//! checkpoints during the work has less to recover than was committed: that is its merit.

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::declaration::{Bench, Contenders};
use super::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{LIBPMEMOBJ, LMDB, OBJECT, REDB, SQLITE};
use crate::harness::Cell;
use crate::job::{CommitWork, Domain, Job, Work};
use crate::options::Common;
use crate::raw::PAGE_BYTES;
use crate::report::Report;
use crate::scratch::scratch_directory;
use aquifer_sys::units::Bytes;

const SYSTEMS: &[&Contender] = &[OBJECT, LMDB, SQLITE, REDB, LIBPMEMOBJ];

/// Pages that each commit before the crash stores to.
const COMMIT_PAGES: u32 = 10;
/// Stores on each of them: most of a record, so that logs are about as long as the records.
const STORES_A_PAGE: u32 = 400;

/// The options of `bench recover`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench recover                           against log length, then against object size
  aquifer bench recover --logs 1M,64M --only object")]
pub struct Options {
    /// How much has been committed before the crash, separated by commas
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',',
          default_values_t = [Bytes(1 << 20), Bytes(4 << 20), Bytes(16 << 20)])]
    logs: Vec<Bytes>,

    /// Lengths of the array, separated by commas
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',',
          default_values_t = [Bytes(16 << 20), Bytes(64 << 20), Bytes(256 << 20)])]
    sizes: Vec<Bytes>,
}

/// The declaration of the bench.
pub struct Recover;

impl Bench for Recover {
    type Options = Options;
    const NAME: &'static str = "recover";
    const ABOUT: &'static str = "Opening again after a crash";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let (logs, sizes) = if common.quick {
            (vec![Bytes(256 << 10), Bytes(512 << 10)], vec![Bytes(1 << 20), Bytes(2 << 20)])
        } else {
            (options.logs.clone(), options.sizes.clone())
        };
        let largest_bytes = sizes.iter().map(|size| size.0).max().unwrap_or(0);
        let stage = Stage::of::<Self>(common, 4 * largest_bytes + (256 << 20), false)?;
        let directory = scratch_directory(stage.place.path())?;
        let cell = |metric: &str, contender: &Contender, log: Bytes, size: Bytes| {
            let work = Work::Recover(CommitWork {
                domain: Domain::PageCache,
                pages: COMMIT_PAGES,
                stores_a_page: STORES_A_PAGE,
                dirty_pages: 0,
            });
            let path = directory.path().to_owned();
            let mut job = Job::new(contender.name, path, stage.seed, work);
            job.source.pages = size.0 / PAGE_BYTES as u64;
            job.source.writable = true;
            job.accesses = log.0.div_ceil(u64::from(COMMIT_PAGES) * PAGE_BYTES as u64);
            Cell::new(metric, ("ms", 1e6), job)
        };
        let (middle_log, middle_size) = (middle(&logs), middle(&sizes));
        let mut cells = Vec::new();
        for &log in &logs {
            let metric = format!("attach_log_{}", log.suffix());
            let wanted = stage.wanted(SYSTEMS);
            cells.extend(wanted.map(|contender| cell(&metric, contender, log, middle_size)));
        }
        for &size in &sizes {
            let metric = format!("attach_size_{}", size.suffix());
            let wanted = stage.wanted(SYSTEMS);
            cells.extend(wanted.map(|contender| cell(&metric, contender, middle_log, size)));
        }
        // The child has compared every cell.
        let rows = stage.measure(None, || directory.empty_and_sync(), cells, |_, _| Ok(()))?;
        let bytes = |all: &[Bytes]| all.iter().map(|size| size.0).collect::<Vec<_>>();
        let config = [
            ("committed_bytes", json!(bytes(&logs))),
            ("size_bytes", json!(bytes(&sizes))),
            ("pages_a_commit", json!(COMMIT_PAGES)),
        ];
        Ok(stage.report(rows, |_| Default::default(), config))
    }
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
