//! The benches about files in pools: a pool beside the same files in the kernel's file systems, on
//! a tmpfs and on a disk.
//!
//! | bench | ratio | what |
//! |---|---|---|
//! | [`read_once`] | `view_vs_read_…`, `view_vs_mmap_…`, `first_pass_vs_best_other_…` | whole files by path |
//! | [`view`] | `open_view_…_vs_4k`, `aged_view_vs_…` | long files, fragmented files |
//! | [`repetitive`] | `read_4k_vs_tmpfs`, `write_4k_vs_tmpfs` | records of one file |
//! | [`shared`] | the same for four processes, `second_process_faults_2g` | processes |
//! | [`append`] | `view_append_prezeroed_vs_mmap_append`, `view_append_sustained_vs_mmap_append` | growth |
//! | [`metadata`] | `create_stat_unlink_vs_tmpfs_1p`, `_4p` | names |
//! | [`pswap`] | `pswap_vs_copy` | replacing |
//!
//! The pool is on the file system that it is compared with, in the same directory: on a tmpfs its
//! domain is `Volatile`, on a disk `PageCache`. No contender makes anything durable.

pub mod append;
mod huge_pages;
pub mod metadata;
pub mod pswap;
pub mod read_once;
pub mod repetitive;
pub mod shared;
pub mod view;

use anyhow::{Result, ensure};

use super::{Ground, Lowest, warm_bytes};
use crate::benches::ratio::Ratio;
use crate::benches::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{MMAP, MMAP_POPULATE};
use crate::file_set::FileSet;
use crate::harness::progress_bar;
use crate::pooled_set::{self, Age};
use crate::scratch::scratch_directory;
use aquifer_sys::units::Bytes;

const ANY_MMAP: &[&Contender] = &[MMAP, MMAP_POPULATE];

/// Creates the same files in a directory and in a pool there.
fn make_set(
    stage: &Stage,
    ground: &Ground,
    files: u32,
    file_bytes: u64,
    age: Age,
) -> Result<FileSet> {
    check_warm(u64::from(files) * file_bytes)?;
    let bar = progress_bar(2 * u64::from(files), "{pos}/{len} writing files");
    let directory = scratch_directory(&ground.path)?;
    let set = pooled_set::create(directory, files, file_bytes, stage.seed, age, || bar.inc(1));
    bar.finish_and_clear();
    set
}

/// Fails if files with this much content, twice, would not stay in memory.
fn check_warm(content_bytes: u64) -> Result<()> {
    let room_bytes = 2 * warm_bytes();
    ensure!(
        2 * content_bytes <= room_bytes,
        "{} of files, and the same in a pool, do not stay in memory, of which half is {}: choose smaller sizes",
        Bytes(content_bytes),
        Bytes(room_bytes)
    );
    Ok(())
}

/// The ratios of one metric on the file systems in memory, or on the others.
fn on_some(
    name: &str,
    others: &'static [&'static Contender],
    ours: &'static Contender,
    metrics: &[String],
    grounds: &[Ground],
    in_memory: bool,
) -> Lowest {
    let grounds = grounds.iter().filter(|ground| ground.is_in_memory() == in_memory);
    let mut each = Vec::new();
    for ground in grounds {
        each.extend(metrics.iter().map(|metric| {
            let metric = format!("{metric}_{}", ground.file_system);
            Ratio::new(format!("{name}_of_{metric}"), others, ours, metric)
        }));
    }
    Lowest { name: name.to_owned(), each }
}
