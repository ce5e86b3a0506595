//! LMDB, through heed: each record is a value under its number in one unnamed database.
//!
//! Default flags: a commit writes the copied pages and then its meta page, each made durable by the
//! device. `MDB_WRITEMAP` was tried and is several times slower: it makes the whole map durable
//! with `msync`.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use heed::byteorder::BigEndian;
use heed::types::{Bytes, U32};
use heed::{Database, Env, EnvOpenOptions, PutFlags};

use super::{CellStore, DeviceStore, See, from_bytes, to_bytes};
use crate::cells::{CellArray, RECORD_BYTES, Transaction, apply};

type Records = Database<U32<BigEndian>, Bytes>;

/// An open environment.
pub struct LmdbStore {
    env: Env,
    records: Records,
}

impl DeviceStore for LmdbStore {
    fn create(directory: &Path, array: &CellArray) -> Result<Self> {
        let env = environment(directory, array)?;
        let mut transaction = env.write_txn()?;
        let records: Records = env.create_database(&mut transaction, None)?;
        for record in 0..array.records() {
            let bytes = to_bytes(&array.initial(record));
            records.put_with_flags(&mut transaction, PutFlags::APPEND, &record, &bytes)?;
        }
        transaction.commit()?;
        Ok(Self { env, records })
    }

    fn open(directory: &Path, array: &CellArray) -> Result<Self> {
        // Otherwise LMDB would create a new environment.
        ensure!(directory.join("data.mdb").exists(), "{} has no LMDB file", directory.display());
        let env = environment(directory, array)?;
        let transaction = env.read_txn()?;
        let records = env.open_database(&transaction, None)?.context("the database is gone")?;
        transaction.commit()?;
        Ok(Self { env, records })
    }
}

fn environment(directory: &Path, array: &CellArray) -> Result<Env> {
    let mut options = EnvOpenOptions::new();
    // Room for the copies of pages that readers and the last two commits still reference.
    options.map_size(4 * array.len_bytes() + (256 << 20));
    // SAFETY: the file is in a directory private to this contender, no other process writes to it,
    // and this process opens it once at a time.
    Ok(unsafe { options.open(directory) }?)
}

impl CellStore for LmdbStore {
    fn commit(&mut self, transaction: &Transaction) -> Result<()> {
        let mut writer = self.env.write_txn()?;
        for (number, stores) in transaction.records() {
            let bytes = self.records.get(&writer, &number)?.context("a record is gone")?;
            let mut record = from_bytes(bytes)?;
            apply(&mut record, stores);
            let bytes: [u8; RECORD_BYTES] = to_bytes(&record);
            self.records.put(&mut writer, &number, &bytes)?;
        }
        Ok(writer.commit()?)
    }

    fn scan(&mut self, see: &mut See<'_>) -> Result<()> {
        let reader = self.env.read_txn()?;
        for entry in self.records.iter(&reader)? {
            let (number, bytes) = entry?;
            see(number, &from_bytes(bytes)?)?;
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.env.prepare_for_closing().wait();
        Ok(())
    }
}
