//! Contenders that commit: a transaction's stores are durable when the call returns.
//!
//! | contender | a transaction | configured |
//! |---|---|---|
//! | `object` | stores to memory, then `psync` | defaults |
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
mod pmemobj_library;
#[cfg(feature = "databases")]
mod redb;
#[cfg(feature = "databases")]
mod sqlite;

use std::path::Path;

pub use libpmemobj::environment;

#[cfg(feature = "databases")]
use anyhow::ensure;
use anyhow::{Result, bail};

use super::regions::{Domain, Home};
use super::{System, Unavailable};
use crate::cells::{CellArray, Record, Transaction};
#[cfg(feature = "databases")]
use crate::cells::{RECORD_BYTES, RECORD_CELLS};

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

/// Creates `lanes` arrays with their initial content, durably. Each can be committed to by its own
/// thread.
pub fn create(
    system: System,
    home: &Home,
    array: &CellArray,
    lanes: u32,
) -> Result<Vec<Box<dyn CellStore>>> {
    match system {
        System::Object | System::Msync => memory::create(system, home, array, lanes),
        _ => {
            single(lanes)?;
            let store: Box<dyn CellStore> = match system {
                #[cfg(feature = "databases")]
                System::Lmdb => Box::new(lmdb::LmdbStore::create(on_device(home)?, array)?),
                #[cfg(feature = "databases")]
                System::Sqlite => Box::new(sqlite::SqliteStore::create(on_device(home)?, array)?),
                #[cfg(feature = "databases")]
                System::Redb => Box::new(redb::RedbStore::create(on_device(home)?, array)?),
                #[cfg(not(feature = "databases"))]
                System::Lmdb | System::Sqlite | System::Redb => {
                    return Err(without_databases().into());
                }
                System::LogAlone => Box::new(log_alone::LogAlone::create(on_device(home)?, array)?),
                System::Libpmemobj | System::LibpmemobjRecords => {
                    Box::new(libpmemobj::PmemobjStore::create(system, home, array)?)
                }
                other => bail!("{} has no commits", other.name()),
            };
            Ok(vec![store])
        }
    }
}

/// Opens the arrays that [`create`] made, in this process or another one, recovering after a crash.
pub fn open(
    system: System,
    home: &Home,
    array: &CellArray,
    lanes: u32,
) -> Result<Vec<Box<dyn CellStore>>> {
    match system {
        System::Object | System::Msync => memory::open(system, home, array, lanes),
        _ => {
            single(lanes)?;
            let store: Box<dyn CellStore> = match system {
                #[cfg(feature = "databases")]
                System::Lmdb => Box::new(lmdb::LmdbStore::open(on_device(home)?, array)?),
                #[cfg(feature = "databases")]
                System::Sqlite => Box::new(sqlite::SqliteStore::open(on_device(home)?, array)?),
                #[cfg(feature = "databases")]
                System::Redb => Box::new(redb::RedbStore::open(on_device(home)?, array)?),
                #[cfg(not(feature = "databases"))]
                System::Lmdb | System::Sqlite | System::Redb => {
                    return Err(without_databases().into());
                }
                System::LogAlone => Box::new(log_alone::LogAlone::open(on_device(home)?, array)?),
                System::Libpmemobj | System::LibpmemobjRecords => {
                    Box::new(libpmemobj::PmemobjStore::open(system, home, array)?)
                }
                other => bail!("{} has no commits", other.name()),
            };
            Ok(vec![store])
        }
    }
}

#[cfg(not(feature = "databases"))]
fn without_databases() -> Unavailable {
    let build = "cargo build --release --package aquifer-bench";
    Unavailable(format!("this program was built without the databases; build it again: {build}"))
}

fn single(lanes: u32) -> Result<(), Unavailable> {
    if lanes == 1 {
        return Ok(());
    }
    Err(Unavailable("it has one writer at a time".to_owned()))
}

fn on_device(home: &Home) -> Result<&Path, Unavailable> {
    match home.domain {
        Domain::PageCache => Ok(&home.directory),
        Domain::Dax => Err(Unavailable("it makes no use of byte-addressable storage".to_owned())),
    }
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
    use super::*;
    use crate::cells::{Reference, Transactions};
    use crate::rng::Rng;

    const ARRAY: CellArray = CellArray { pages: 256, seed: 11 };
    const ALL: [System; 8] = [
        System::Object,
        System::Lmdb,
        System::Sqlite,
        System::Redb,
        System::Libpmemobj,
        System::LibpmemobjRecords,
        System::Msync,
        System::LogAlone,
    ];

    /// Runs `test` with a private home, unless the contender cannot run here.
    fn with_each(test: impl Fn(System, &Home) -> Result<()>) {
        for system in ALL {
            let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
            let home = Home { directory: directory.path().to_owned(), domain: Domain::PageCache };
            match test(system, &home) {
                Err(error) if error.is::<Unavailable>() => {
                    eprintln!("skipped: {}: {error}", system.name());
                }
                result => result.unwrap_or_else(|error| panic!("{}: {error:#}", system.name())),
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
        with_each(|system, home| {
            let mut store = one(create(system, home, &ARRAY, 1)?);
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
            let mut store = one(open(system, home, &ARRAY, 1)?);
            check(&mut *store, &reference)?;
            // Conversely, stores that were not committed are detected as missing.
            transactions.next_into(&mut transaction);
            reference.apply(&transaction);
            assert!(check(&mut *store, &reference).is_err(), "{}", system.name());
            store.close()
        });
    }

    #[test]
    fn opening_what_is_not_there_is_an_error() {
        with_each(|system, home| {
            match open(system, home, &ARRAY, 1) {
                Ok(_) => panic!("{} opened nothing", system.name()),
                // Only a missing library is a reason to skip.
                Err(error) if error.is::<Unavailable>() => Err(error),
                Err(_) => Ok(()),
            }
        });
    }

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
        let mut lanes = create(System::Msync, &home, &ARRAY, 2).unwrap();
        let mut transactions = Transactions::new(ARRAY, 3, 1, Rng::new(6)).unwrap();
        let mut transaction = Transaction::default();
        transactions.next_into(&mut transaction);
        lanes[1].commit(&transaction).unwrap();
        let untouched = Reference::new(&ARRAY);
        let mut changed = untouched.clone();
        changed.apply(&transaction);
        check(&mut *lanes[0], &untouched).unwrap();
        check(&mut *lanes[1], &changed).unwrap();
        assert!(
            create(System::Lmdb, &home, &ARRAY, 2).is_err_and(|error| error.is::<Unavailable>())
        );
    }
}
