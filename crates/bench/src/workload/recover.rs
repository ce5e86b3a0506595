//! Opens the files that a crashed process left behind.
//!
//! ```text
//! child        starts ─────────────────────── waits ── drops caches ── [open … first record] ── checks all
//! grandchild          creates, commits, SIGKILL ┘                       └── what is timed ──┘
//! ```
//! The caches are dropped because nothing is warm after a power cut. All committed content must be
//! there.

use std::fs::{self, File};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::commit::{array_of, check, home_of, transactions_of};
use crate::cells::{Reference, Transaction};
use crate::contender::stores::{CellStore, Commits};
use crate::harness::run_to_its_death;
use crate::job::{CommitWork, Job, LaneAnswer, Measured, Work};
use crate::raw::{drop_cache, kill_this_process};
use aquifer_sys::interrupt;

/// The process that crashes: makes the job's commits and kills itself.
pub fn crash(job: &Job, work: &CommitWork, contender: Commits) -> Result<Measured> {
    // Only its own end may terminate it: the recovering process cleans up its files.
    let _signals = interrupt::Guard::install();
    let array = array_of(job)?;
    let mut store = (contender.create)(&home_of(job, work), &array, 1)?.remove(0);
    let mut transactions = transactions_of(job, work, 0)?;
    let mut transaction = Transaction::default();
    for _ in 0..job.accesses {
        transactions.next_into(&mut transaction);
        store.commit(&transaction)?;
    }
    kill_this_process()
}

/// The process that measures.
pub fn run(job: &Job, work: &CommitWork, contender: Commits) -> Result<Measured> {
    let _signals = interrupt::Guard::install();
    run_to_its_death(&Job { work: Work::Crash(*work), ..job.clone() })?;
    let home = home_of(job, work);
    for entry in fs::read_dir(&home.directory)? {
        let path = entry?.path();
        if path.is_file() {
            let file = File::open(&path)?;
            drop_cache(&file).with_context(|| format!("cannot drop {}", path.display()))?;
        }
    }
    let array = array_of(job)?;
    let start = Instant::now();
    let mut store = (contender.open)(&home, &array, 1)?.remove(0);
    read_first(&mut *store)?;
    let elapsed = start.elapsed();

    let mut reference = Reference::new(&array);
    let mut transactions = transactions_of(job, work, 0)?;
    let mut transaction = Transaction::default();
    for _ in 0..job.accesses {
        transactions.next_into(&mut transaction);
        reference.apply(&transaction);
    }
    check(&mut *store, &reference, &array)?;
    store.close()?;
    Ok(Measured {
        mean_ns: elapsed.as_nanos() as f64,
        lanes: vec![LaneAnswer { accesses: job.accesses, checksum: reference.checksum() }],
        ..Measured::default()
    })
}

/// Ends a scan.
#[derive(Debug, thiserror::Error)]
#[error("enough seen")]
struct Enough;

fn read_first(store: &mut dyn CellStore) -> Result<()> {
    match store.scan(&mut |_, _| Err(Enough.into())) {
        Ok(()) => bail!("it has no records"),
        Err(error) => {
            ensure!(error.is::<Enough>(), error);
            Ok(())
        }
    }
}
