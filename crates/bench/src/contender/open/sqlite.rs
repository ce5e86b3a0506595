//! A database of SQLite in its write-ahead mode, through rusqlite and by the command `sqlite3`.

use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use rusqlite::{Connection, OpenFlags};

use super::{NAMES_A_DIRECTORY, Opened, Opening, TEXT};
use crate::job::Unavailable;

const DATABASE: &str = "names.sqlite";
/// The directory of names that commands insert.
const MADE: i64 = -1;

/// A database with a table of names.
pub const OPEN_SQLITE: Opening = Opening {
    create,
    open: Some(open),
    print: || command(true, "SELECT text FROM file".to_owned()),
    make: |name| command(false, format!("INSERT INTO names VALUES ({MADE}, '{name}')")),
    unmake,
    file: DATABASE,
};

fn create(directory: &Path, names: u64) -> Result<()> {
    let mut connection = Connection::open(directory.join(DATABASE))?;
    let mode: String = connection.query_row("PRAGMA journal_mode = WAL", (), |row| row.get(0))?;
    ensure!(mode == "wal", "SQLite has no write-ahead log here but `{mode}`");
    let transaction = connection.transaction()?;
    // Without an index of its own: rows are inserted in the order of the key.
    transaction.execute_batch(
        "CREATE TABLE file (text TEXT);
         CREATE TABLE names (directory INTEGER, name TEXT, PRIMARY KEY (directory, name)) WITHOUT ROWID;",
    )?;
    // The command ends each row with a new line.
    transaction.execute("INSERT INTO file VALUES (?1)", (TEXT.trim_end(),))?;
    let mut insert = transaction.prepare("INSERT INTO names VALUES (?1, ?2)")?;
    for name in 0..names {
        insert.execute(((name / NAMES_A_DIRECTORY) as i64, format!("{name:07}")))?;
    }
    drop(insert);
    Ok(transaction.commit()?)
}

struct OpenDatabase(Connection);

fn open(writes: bool) -> Result<Box<dyn Opened>> {
    let flags = match writes {
        true => OpenFlags::SQLITE_OPEN_READ_WRITE,
        false => OpenFlags::SQLITE_OPEN_READ_ONLY,
    };
    let connection = Connection::open_with_flags(DATABASE, flags)?;
    // Opening reads nothing; this reads the schema, and the root of a table.
    connection.query_row("SELECT count(*) FROM file", (), |_| Ok(()))?;
    Ok(Box::new(OpenDatabase(connection)))
}

impl Opened for OpenDatabase {
    fn names(&self) -> Result<u64> {
        let count = "SELECT count(*) FROM names WHERE directory = 0";
        let names: i64 = self.0.query_row(count, (), |row| row.get(0))?;
        Ok(names as u64)
    }
}

fn command(read_only: bool, query: String) -> Result<Command> {
    let mut probe = Command::new("sqlite3");
    let found = probe.arg("-version").stdout(Stdio::null()).status();
    if found.is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return Err(Unavailable("there is no command sqlite3".to_owned()).into());
    }
    let mut command = Command::new("sqlite3");
    command.args(read_only.then_some("-readonly")).args([DATABASE.to_owned(), query]);
    Ok(command)
}

fn unmake(names: &[String]) -> Result<()> {
    let connection = Connection::open(DATABASE)?;
    for name in names {
        let delete = "DELETE FROM names WHERE directory = ?1 AND name = ?2";
        ensure!(connection.execute(delete, (MADE, name))? == 1, "{name} is not there");
    }
    Ok(())
}
