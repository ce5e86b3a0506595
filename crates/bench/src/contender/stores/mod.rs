//! Contenders that commit: a transaction's stores are durable when the call returns.
//!
//! | contender | a transaction | configured |
//! |---|---|---|
//! | `object` | stores to memory, then `psync` | defaults |
//! | `object_ranges` | the same, then `psync_ranges` of the cells | defaults |
//! | `object_heap` | stores to a vector in a heap that records them, then `psync` | recording |
//! | `lmdb` | get, change and put each record | default flags, map large enough from the start |
//! | `sqlite` | the same, by incremental blob writes | WAL, `synchronous=FULL`, default checkpoints, a cache that holds the table |
//! | `redb` | the same | default durability (`Immediate`) and cache |
//! | `libpmemobj` | log each cell, then store to it | default |
//! | `libpmemobj_records` | log each record, then store to its cells | default |
//! | `msync` | stores to memory, then `msync` | **not atomic**: a crash leaves only some of the stores |
//! | `log_alone` | pages appended to a log, one flush | not a contender: the lower bound of a commit's cost |
//!
//! Checkpoints are the defaults: SQLite's run in the committing thread, an object's in a thread of
//! the pool.

mod libpmemobj;
#[cfg(feature = "databases")]
mod lmdb;
mod log_alone;
mod memory;
#[cfg(not(feature = "databases"))]
pub mod not_built;
mod object_heap;
mod pmemobj_library;
#[cfg(feature = "databases")]
mod redb;
#[cfg(feature = "databases")]
mod sqlite;

use std::path::Path;

use anyhow::Result;
#[cfg(feature = "databases")]
use anyhow::ensure;

use super::regions::Home;
use crate::cells::{CellArray, Record, Transaction};
#[cfg(feature = "databases")]
use crate::cells::{RECORD_BYTES, RECORD_CELLS};
use crate::job::Unavailable;

#[cfg(feature = "databases")]
pub use self::redb::RedbStore;
pub use libpmemobj::PmemobjStore;
#[cfg(feature = "databases")]
pub use lmdb::LmdbStore;
pub use log_alone::LogAlone;
pub use memory::{Commits as MemoryCommits, MemoryStore};
#[cfg(not(feature = "databases"))]
pub use not_built::{NotBuilt as LmdbStore, NotBuilt as RedbStore, NotBuilt as SqliteStore};
pub use object_heap::HeapStore;
#[cfg(feature = "databases")]
pub use sqlite::SqliteStore;

/// An array of cells that outlives its process.
pub trait CellStore: Send {
    /// Performs the stores of `transaction` atomically; when it returns they survive a power cut.
    fn commit(&mut self, transaction: &Transaction) -> Result<()>;

    /// Calls `see` with every record, in order.
    fn scan(&mut self, see: &mut See<'_>) -> Result<()>;

    /// Keeps this many unrelated pages of its file dirty in the page cache. Does nothing while they
    /// are dirty.
    fn keep_dirty(&mut self, _pages: usize) -> Result<()> {
        Err(Unavailable("it has its file to itself".to_owned()).into())
    }

    /// Does the work that previous commits have deferred: applies content that is only in a log.
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    /// Closes the store cleanly.
    fn close(self: Box<Self>) -> Result<()>;
}

/// A visitor of records and their numbers.
pub type See<'a> = dyn FnMut(u32, &Record) -> Result<()> + 'a;

/// How a contender makes stores.
#[derive(Clone, Copy)]
pub struct Commits {
    /// Creates arrays with their initial content, durably. Each can be committed to by its own
    /// thread.
    pub create: MakeStores,
    /// Opens the arrays that `create` made, in this process or another one, recovering after a
    /// crash.
    pub open: MakeStores,
}

/// Makes this many stores with such an array each.
pub type MakeStores = fn(&Home, &CellArray, u32) -> Result<Vec<Box<dyn CellStore>>>;

/// A store that is alone in its directory, on a device that has to be flushed.
pub trait DeviceStore: CellStore + Sized + 'static {
    /// Creates the store with its initial content, durably.
    fn create(directory: &Path, array: &CellArray) -> Result<Self>;

    /// Opens the store, recovering it after a crash.
    fn open(directory: &Path, array: &CellArray) -> Result<Self>;
}

impl Commits {
    /// Commits to a [`DeviceStore`].
    pub const fn on_device<S: DeviceStore>() -> Self {
        Self {
            create: |home, array, lanes| single(lanes, || S::create(home.on_device()?, array)),
            open: |home, array, lanes| single(lanes, || S::open(home.on_device()?, array)),
        }
    }
}

/// The store of a contender that takes one writer at a time.
pub fn single<S: CellStore + 'static>(
    lanes: u32,
    make: impl FnOnce() -> Result<S>,
) -> Result<Vec<Box<dyn CellStore>>> {
    if lanes != 1 {
        return Err(Unavailable("it has one writer at a time".to_owned()).into());
    }
    Ok(vec![Box::new(make()?)])
}

/// A record as stored in a key-value store.
#[cfg(feature = "databases")]
fn to_bytes(record: &Record) -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    for (chunk, cell) in bytes.chunks_exact_mut(8).zip(record) {
        chunk.copy_from_slice(&cell.to_ne_bytes());
    }
    bytes
}

/// The reverse of [`to_bytes`].
#[cfg(feature = "databases")]
fn from_bytes(bytes: &[u8]) -> Result<Record> {
    ensure!(bytes.len() == RECORD_BYTES, "a record has {} bytes", bytes.len());
    let mut record = [0; RECORD_CELLS];
    for (cell, chunk) in record.iter_mut().zip(bytes.chunks_exact(8)) {
        *cell = u64::from_ne_bytes(chunk.try_into()?);
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use anyhow::ensure;

    use super::*;
    use crate::cells::{Reference, Transactions};
    use crate::contender::Contender;
    use crate::contenders;
    use crate::job::Domain;
    use crate::rng::Rng;

    const ARRAY: CellArray = CellArray { pages: 256, seed: 11 };
    const ALL: [&Contender; 10] = [
        contenders::OBJECT,
        contenders::OBJECT_RANGES,
        contenders::OBJECT_HEAP,
        contenders::LMDB,
        contenders::SQLITE,
        contenders::REDB,
        contenders::LIBPMEMOBJ,
        contenders::LIBPMEMOBJ_RECORDS,
        contenders::MSYNC,
        contenders::LOG_ALONE,
    ];

    /// Runs `test` with a private home, unless the contender cannot run here.
    fn with_each(test: impl Fn(&Commits, &Home) -> Result<()>) {
        for contender in ALL {
            let commits = contender.roles.commits.unwrap();
            let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
            let home = Home { directory: directory.path().to_owned(), domain: Domain::PageCache };
            match test(&commits, &home) {
                Err(error) if error.is::<Unavailable>() => {
                    eprintln!("skipped: {}: {error}", contender.name);
                }
                result => result.unwrap_or_else(|error| panic!("{}: {error:#}", contender.name)),
            }
        }
    }

    fn one(mut stores: Vec<Box<dyn CellStore>>) -> Box<dyn CellStore> {
        assert_eq!(stores.len(), 1);
        stores.remove(0)
    }

    fn check(store: &mut dyn CellStore, reference: &Reference) -> Result<()> {
        let mut next = 0;
        store.scan(&mut |record, found| {
            ensure!(record == next, "record {record} instead of {next}");
            next += 1;
            reference.check(record, found)
        })?;
        ensure!(next == ARRAY.records(), "{next} records");
        Ok(())
    }

    #[test]
    fn commits_are_there_after_reopening() {
        with_each(|commits, home| {
            let mut store = one((commits.create)(home, &ARRAY, 1)?);
            let mut reference = Reference::new(&ARRAY);
            check(&mut *store, &reference)?;
            let mut transactions = Transactions::new(ARRAY, 7, 3, Rng::new(5))?;
            let mut transaction = Transaction::default();
            for _ in 0..20 {
                transactions.next_into(&mut transaction);
                store.commit(&transaction)?;
                reference.apply(&transaction);
            }
            check(&mut *store, &reference)?;
            store.close()?;
            let mut store = one((commits.open)(home, &ARRAY, 1)?);
            check(&mut *store, &reference)?;
            // Conversely, stores that were not committed are detected as missing.
            transactions.next_into(&mut transaction);
            reference.apply(&transaction);
            assert!(check(&mut *store, &reference).is_err());
            store.close()
        });
    }

    #[test]
    fn opening_what_is_not_there_is_an_error() {
        with_each(|commits, home| {
            match (commits.open)(home, &ARRAY, 1) {
                Ok(_) => panic!("it opened nothing"),
                // Only a missing library is a reason to skip.
                Err(error) if error.is::<Unavailable>() => Err(error),
                Err(_) => Ok(()),
            }
        });
    }

    #[cfg(feature = "databases")]
    #[test]
    fn records_keep_their_bytes() {
        let record = ARRAY.initial(3);
        assert_eq!(from_bytes(&to_bytes(&record)).unwrap(), record);
        assert!(from_bytes(&[0; 8]).is_err());
    }

    #[test]
    fn lanes_of_mappings_are_apart() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let home = Home { directory: directory.path().to_owned(), domain: Domain::PageCache };
        let commits = |contender: &Contender| contender.roles.commits.unwrap();
        let mut lanes = (commits(contenders::MSYNC).create)(&home, &ARRAY, 2).unwrap();
        let mut transactions = Transactions::new(ARRAY, 3, 1, Rng::new(6)).unwrap();
        let mut transaction = Transaction::default();
        transactions.next_into(&mut transaction);
        lanes[1].commit(&transaction).unwrap();
        let untouched = Reference::new(&ARRAY);
        let mut changed = untouched.clone();
        changed.apply(&transaction);
        check(&mut *lanes[0], &untouched).unwrap();
        check(&mut *lanes[1], &changed).unwrap();
        let two = (commits(contenders::LMDB).create)(&home, &ARRAY, 2);
        assert!(two.is_err_and(|error| error.is::<Unavailable>()));
    }
}
