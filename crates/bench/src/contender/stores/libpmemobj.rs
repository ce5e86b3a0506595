//! libpmemobj: the cells are one root object, stored to in undo-log transactions.
//!
//! Two forms, since programs differ in which they can use: logging each cell before it is stored
//! to, as random stores require, and logging a record before its first store, which is cheaper if a
//! record gets many stores. In the page-cache domain the library makes ranges durable with `msync`.
//! In the forced `Dax` domain an environment variable makes it flush cache lines instead.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use super::pmemobj_library::Pool;
use super::{CellStore, See, memory};
use crate::cells::{CellArray, RECORD_BYTES, Transaction, offset_bytes};
use crate::contender::regions::Home;
use crate::job::Domain;

/// The library's own tables and logs.
const OVERHEAD_BYTES: usize = 64 << 20;

/// An open pool.
pub struct PmemobjStore {
    pool: Pool,
    array: CellArray,
    whole_records: bool,
}

impl PmemobjStore {
    /// Makes a pool with the initial content. `whole_records`: a record is logged before its first
    /// store, and not each cell.
    pub fn create(home: &Home, array: &CellArray, whole_records: bool) -> Result<Self> {
        check_environment(home.domain)?;
        let pool_bytes = array.len_bytes() + array.len_bytes() / 8 + OVERHEAD_BYTES;
        let mut pool = Pool::create(&path_of(home), pool_bytes, array.len_bytes())?;
        // SAFETY: the root object is as long as the array, writable, and not yet shared.
        unsafe { memory::fill(pool.root(), array) };
        pool.persist_root();
        Ok(Self { pool, array: *array, whole_records })
    }

    /// Opens the pool.
    pub fn open(home: &Home, array: &CellArray, whole_records: bool) -> Result<Self> {
        check_environment(home.domain)?;
        let pool = Pool::open(&path_of(home), array.len_bytes())?;
        Ok(Self { pool, array: *array, whole_records })
    }
}

fn path_of(home: &Home) -> PathBuf {
    home.directory.join("cells.pmemobj")
}

fn check_environment(domain: Domain) -> Result<()> {
    let (name, value) = domain.environment();
    let forced = std::env::var(name).is_ok_and(|value| value == "1");
    ensure!(forced == (value == "1"), "{name} is not {value} in the environment");
    Ok(())
}

impl CellStore for PmemobjStore {
    fn commit(&mut self, transaction: &Transaction) -> Result<()> {
        let base = self.pool.root();
        let whole_records = self.whole_records;
        self.pool.transaction(|log| {
            if whole_records {
                for (record, stores) in transaction.records() {
                    log.add(base.wrapping_add(offset_bytes(record, 0)), RECORD_BYTES)?;
                    for store in stores {
                        // SAFETY: transactions name cells of this array, which the root object
                        // holds.
                        unsafe { memory::put(base, store) };
                    }
                }
                return Ok(());
            }
            for store in &transaction.stores {
                let offset_bytes = offset_bytes(store.record, store.cell as usize);
                log.add(base.wrapping_add(offset_bytes), 8)?;
                // SAFETY: as above.
                unsafe { memory::put(base, store) };
            }
            Ok(())
        })
    }

    fn scan(&mut self, see: &mut See<'_>) -> Result<()> {
        // SAFETY: the root object is as long as the array and readable.
        unsafe { memory::scan(self.pool.root(), &self.array, see) }
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
