//! redb: each record is a value under its number in one table; default durability and cache.

use std::path::Path;

use anyhow::{Context, Result};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use super::{CellStore, DeviceStore, See, from_bytes, to_bytes};
use crate::cells::{CellArray, Transaction, apply};

const RECORDS: TableDefinition<'_, u32, &[u8]> = TableDefinition::new("records");
const FILE_NAME: &str = "cells.redb";

/// An open database.
pub struct RedbStore {
    database: Database,
}

impl DeviceStore for RedbStore {
    fn create(directory: &Path, array: &CellArray) -> Result<Self> {
        let database = Database::create(directory.join(FILE_NAME))?;
        let writer = database.begin_write()?;
        let mut records = writer.open_table(RECORDS)?;
        for record in 0..array.records() {
            records.insert(record, to_bytes(&array.initial(record)).as_slice())?;
        }
        drop(records);
        writer.commit()?;
        Ok(Self { database })
    }

    fn open(directory: &Path, _array: &CellArray) -> Result<Self> {
        Ok(Self { database: Database::open(directory.join(FILE_NAME))? })
    }
}

impl CellStore for RedbStore {
    fn commit(&mut self, transaction: &Transaction) -> Result<()> {
        let writer = self.database.begin_write()?;
        let mut records = writer.open_table(RECORDS)?;
        for (number, stores) in transaction.records() {
            let mut value = records.get_mut(number)?.context("a record is gone")?;
            let mut record = from_bytes(value.value())?;
            apply(&mut record, stores);
            value.insert(to_bytes(&record).as_slice())?;
        }
        drop(records);
        Ok(writer.commit()?)
    }

    fn scan(&mut self, see: &mut See<'_>) -> Result<()> {
        let reader = self.database.begin_read()?;
        for entry in reader.open_table(RECORDS)?.iter()? {
            let (number, bytes) = entry?;
            see(number.value(), &from_bytes(bytes.value())?)?;
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
