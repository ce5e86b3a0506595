//! SQLite, through rusqlite with the bundled library: each record is a row of a table, with its
//! number as the row's.
//!
//! Write-ahead log and `synchronous=FULL`: when a commit returns, it is in the log and the log is
//! on the device. Checkpoints run at their default points (every 1,000 pages of log), in the
//! committing thread. A record is changed by incremental blob I/O, SQLite's way of writing a few
//! bytes of a value (prepared SELECT and UPDATE statements take as long). The page cache holds the
//! whole table, so that no read leaves the process.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use super::{CellStore, DeviceStore, See, from_bytes, to_bytes};
use crate::cells::{CellArray, Transaction};

/// An open database.
pub struct SqliteStore {
    connection: Connection,
}

impl DeviceStore for SqliteStore {
    fn create(directory: &Path, array: &CellArray) -> Result<Self> {
        let mut connection = Connection::open(directory.join("cells.sqlite"))?;
        configure(&connection, array)?;
        connection.execute("CREATE TABLE records (number INTEGER PRIMARY KEY, cells BLOB)", ())?;
        let transaction = connection.transaction()?;
        let mut insert = transaction.prepare("INSERT INTO records VALUES (?1, ?2)")?;
        for record in 0..array.records() {
            insert.execute((record, to_bytes(&array.initial(record))))?;
        }
        drop(insert);
        transaction.commit()?;
        // The initial content is not a commit of the bench: its log must not be checkpointed in
        // one.
        connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", (), |_| Ok(()))?;
        Ok(Self { connection })
    }

    fn open(directory: &Path, array: &CellArray) -> Result<Self> {
        let path = directory.join("cells.sqlite");
        let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        configure(&connection, array)?;
        Ok(Self { connection })
    }
}

fn configure(connection: &Connection, array: &CellArray) -> Result<()> {
    let mode: String = connection.query_row("PRAGMA journal_mode = WAL", (), |row| row.get(0))?;
    ensure!(mode == "wal", "SQLite has no write-ahead log here but `{mode}`");
    connection.pragma_update(None, "synchronous", "FULL")?;
    // A negative size is in KiB.
    let cache_kib = i64::try_from(2 * array.len_bytes() / 1024)?;
    connection.pragma_update(None, "cache_size", -cache_kib)?;
    Ok(())
}

impl CellStore for SqliteStore {
    fn commit(&mut self, transaction: &Transaction) -> Result<()> {
        let writer = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut records = transaction.records().peekable();
        let (first, _) = records.peek().context("an empty transaction")?;
        let mut blob = writer.blob_open(c"main", c"records", c"cells", i64::from(*first), false)?;
        for (index, (number, stores)) in records.enumerate() {
            if index > 0 {
                blob.reopen(i64::from(number))?;
            }
            for store in stores {
                blob.write_at(&store.value.to_ne_bytes(), store.cell as usize * 8)?;
            }
        }
        blob.close()?;
        Ok(writer.commit()?)
    }

    fn settle(&mut self) -> Result<()> {
        Ok(self.connection.query_row("PRAGMA wal_checkpoint(RESTART)", (), |_| Ok(()))?)
    }

    fn scan(&mut self, see: &mut See<'_>) -> Result<()> {
        let mut select =
            self.connection.prepare("SELECT number, cells FROM records ORDER BY number")?;
        let mut rows = select.query(())?;
        while let Some(row) = rows.next()? {
            let record = from_bytes(row.get_ref(1)?.as_blob()?)?;
            see(row.get(0)?, &record)?;
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.connection.close().map_err(|(_connection, error)| error.into())
    }
}
