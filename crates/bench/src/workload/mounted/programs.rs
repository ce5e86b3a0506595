//! Whole programs, the second time that they run.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::{faster_half, single};
use crate::job::{Job, Measured, ProgramWork, Unavailable};
use aquifer_sys::interrupt;

/// The tree that is looked at.
pub const TREE: &str = "tree";
/// A part of it, which is copied.
pub const PART: &str = "part";
const ARCHIVE: &str = "part.tar";
const REPOSITORY: &str = "repository";
/// What the programs make.
const MADE: &str = "made-tree";
/// A text that some source files have.
const NEEDLE: &str = "TODO";
/// Rows of a transaction.
#[cfg(feature = "databases")]
const ROWS: u64 = 10;
/// Keys of RocksDB, for each transaction of SQLite.
const KEYS: u64 = 100;

impl ProgramWork {
    /// Returns `true` if the program works on the tree.
    pub fn takes_tree(self) -> bool {
        matches!(self, Self::GitStatus | Self::Search)
    }

    /// Returns `true` if the program works on the part of the tree, or on an archive of it.
    pub fn takes_part(self) -> bool {
        matches!(self, Self::Copy | Self::Unpack)
    }
}

/// Makes what these programs work on, from the trees in `directory`: a repository, and an archive of the
/// part.
pub fn prepare_template(directory: &Path, programs: &[ProgramWork]) -> Result<()> {
    if programs.contains(&ProgramWork::Unpack) {
        finished(Command::new("tar").current_dir(directory).args(["-cf", ARCHIVE, PART]))?;
    }
    if !programs.contains(&ProgramWork::GitStatus) || !exists("git") {
        return Ok(());
    }
    let git = |arguments: &[&str]| finished(git(arguments).current_dir(directory));
    git(&["init", "--quiet"])?;
    git(&["add", "--all"])?;
    let author = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"];
    git(&[&author[..], &["commit", "--quiet", "--message=all"]].concat())?;
    git(&["gc", "--quiet"]).map(drop)
}

/// Copies all that to a directory, and looks at it once.
pub fn prepare(template: &Path, directory: &Path) -> Result<()> {
    let mut copy = Command::new("cp");
    for name in [TREE, PART, ARCHIVE, REPOSITORY] {
        if template.join(name).exists() {
            copy.arg(template.join(name));
        }
    }
    finished(copy.arg("-r").arg(directory))?;
    if template.join(REPOSITORY).exists() {
        // The index then knows the files by their attributes.
        finished(git(&["status", "--porcelain"]).current_dir(directory))?;
    }
    Ok(())
}

/// Which program searches: `rg`, or else `grep`.
pub fn searcher() -> &'static str {
    if exists("rg") { "rg" } else { "grep" }
}

/// Runs a program, once to warm up and then as often as the job says.
pub fn run(job: &Job, work: ProgramWork) -> Result<Measured> {
    match work {
        ProgramWork::GitStatus => repeat(
            job,
            || printed(&mut git(&["status", "--porcelain"])),
            |out| Ok(out.len() as u64),
        ),
        ProgramWork::Search => {
            let mut command = Command::new(searcher());
            let is_rg = searcher() == "rg";
            command.args(if is_rg { ["-l", "-uu"] } else { ["-r", "-l"] }).args([NEEDLE, TREE]);
            repeat(job, || printed(&mut command), |out| Ok(unordered(&out)))
        }
        ProgramWork::Copy => made(job, Command::new("cp").args(["-r", PART, MADE])),
        ProgramWork::Unpack => made(job, Command::new("tar").args(["-xf", ARCHIVE, "-C", MADE])),
        ProgramWork::Sqlite { has_log } => sqlite(job, has_log),
        ProgramWork::Rocks { reads } => rocks(job, reads),
    }
}

fn repeat<T>(
    job: &Job,
    mut run: impl FnMut() -> Result<T>,
    mut answer: impl FnMut(T) -> Result<u64>,
) -> Result<Measured> {
    let (mut found, mut checksum) = (Vec::new(), None);
    for _ in 0..=job.accesses {
        interrupt::check()?;
        let start = Instant::now();
        let result = run()?;
        found.push(start.elapsed());
        let answered = answer(result)?;
        ensure!(*checksum.get_or_insert(answered) == answered, "it found something else again");
    }
    found.remove(0);
    Ok(faster_half(found, 1, checksum.unwrap_or_default()))
}

/// A command that makes [`MADE`], which is removed each time.
fn made(job: &Job, command: &mut Command) -> Result<Measured> {
    let is_unpacked = command.get_program() == "tar";
    let before = || if is_unpacked { fs::create_dir(MADE) } else { Ok(()) };
    let after = |()| {
        let sum = tree_sum(Path::new(MADE))?;
        fs::remove_dir_all(MADE)?;
        before()?;
        Ok(sum)
    };
    before()?;
    let measured = repeat(job, || finished(command).map(drop), after)?;
    if is_unpacked {
        fs::remove_dir(MADE)?;
    }
    Ok(measured)
}

/// Transactions of [`ROWS`] inserts; the figure is for one of them.
#[cfg(feature = "databases")]
fn sqlite(job: &Job, has_log: bool) -> Result<Measured> {
    use rusqlite::Connection;

    let remove = || {
        for name in ["rows.sqlite", "rows.sqlite-wal", "rows.sqlite-shm", "rows.sqlite-journal"] {
            match fs::remove_file(name) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    };
    remove()?;
    let mut connection = Connection::open("rows.sqlite")?;
    let mode = if has_log { "wal" } else { "delete" };
    let set: String =
        connection.query_row(&format!("PRAGMA journal_mode = {mode}"), (), |row| row.get(0))?;
    ensure!(set == mode, "SQLite has the journal mode {set}");
    connection.execute_batch(
        "PRAGMA synchronous = FULL; CREATE TABLE rows (key INTEGER PRIMARY KEY, text TEXT)",
    )?;
    // As many transactions as one batch has, whatever the number of batches.
    let (batches, in_batch) = (8, job.accesses.div_ceil(8).max(1));
    let mut batch = || -> Result<std::time::Duration> {
        let start = Instant::now();
        for _ in 0..in_batch {
            let transaction = connection.transaction()?;
            let mut insert =
                transaction.prepare("INSERT INTO rows (text) VALUES (hex(?1) || ?1)")?;
            for row in 0..ROWS {
                insert.execute((format!("the text of row {row} of a transaction"),))?;
            }
            drop(insert);
            transaction.commit()?;
        }
        Ok(start.elapsed())
    };
    batch()?;
    let found = (0..batches).map(|_| batch()).collect::<Result<Vec<_>>>()?;
    let sum = "SELECT count(*) + sum(length(text)) FROM rows";
    let sum: i64 = connection.query_row(sum, (), |row| row.get(0))?;
    drop(connection);
    remove()?;
    Ok(faster_half(found, in_batch, sum as u64))
}

#[cfg(not(feature = "databases"))]
fn sqlite(_: &Job, _: bool) -> Result<Measured> {
    Err(crate::contender::stores::not_built::reason().into())
}

/// `db_bench` of RocksDB: keys in random order, written or read. It times itself.
fn rocks(job: &Job, reads: bool) -> Result<Measured> {
    let keys = job.accesses * KEYS;
    let bench = |name: &str, exists: bool| -> Result<f64> {
        let mut command = Command::new("db_bench");
        command.args(["--db=rocks", "--compression_type=none", "--seed=1"]);
        command.arg(format!("--benchmarks={name}")).arg(format!("--num={keys}"));
        command.arg(format!("--use_existing_db={}", u8::from(exists)));
        let text = String::from_utf8_lossy(&printed(&mut command)?).into_owned();
        micros(&text, name).with_context(|| format!("db_bench printed {text:?}"))
    };
    let (mut filled, mut read) = (0.0, 0.0);
    if exists("db_bench") {
        filled = bench("fillrandom", false)?;
        if reads {
            bench("readrandom", true)?;
            read = bench("readrandom", true)?;
        }
        fs::remove_dir_all("rocks")?;
    }
    let found = if reads { read } else { filled };
    if found == 0.0 {
        return Err(Unavailable("there is no db_bench (package rocksdb-tools)".to_owned()).into());
    }
    let lanes = vec![crate::job::LaneAnswer { accesses: keys, checksum: 0 }];
    Ok(Measured { mean_ns: found * 1e3, lanes, ..Measured::default() })
}

/// From a line such as `fillrandom   :       2.500 micros/op 400000 ops/sec; …`.
fn micros(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_once(':')?.1.split_whitespace().next()?.parse().ok()
}

fn git(arguments: &[&str]) -> Command {
    let mut command = Command::new("git");
    // Maintenance in the background would hold the lock, and disturb what is measured.
    command.args(["-c", "gc.auto=0", "-c", "maintenance.auto=false"]);
    command.args(["--git-dir", REPOSITORY, "--work-tree", TREE]).args(arguments);
    // Nothing of this user's or this machine's.
    command.env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_CONFIG_GLOBAL", "/dev/null");
    command
}

fn exists(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// Runs a command, which must succeed, and returns what it has printed.
fn printed(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.stdin(Stdio::null()).output();
    let output = match output {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let program = command.get_program().display();
            return Err(Unavailable(format!("there is no command {program}")).into());
        }
        output => output.with_context(|| format!("cannot start {command:?}"))?,
    };
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} ended with {}: {}", output.status, said.trim());
    Ok(output.stdout)
}

fn finished(command: &mut Command) -> Result<()> {
    printed(command).map(drop)
}

/// The sum of the lines, which come in any order.
fn unordered(lines: &[u8]) -> u64 {
    let lines = lines.split(|&byte| byte == b'\n');
    lines.fold(0, |sum, line| sum.wrapping_add(single::hash(line)))
}

/// A number that depends on the names and lengths of all files below.
fn tree_sum(directory: &Path) -> Result<u64> {
    let mut sum = 0_u64;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        let name = single::hash(entry.file_name().as_bytes());
        sum = sum.wrapping_add(match metadata.is_dir() {
            true => name.wrapping_mul(tree_sum(&entry.path())?.wrapping_add(1)),
            false => name.wrapping_mul(metadata.len() + 1),
        });
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figure_of_db_bench_is_found() {
        let text = "Keys: 16 bytes each\nfillrandom   :       2.5 micros/op 400 ops/sec;\n";
        assert_eq!(micros(text, "fillrandom"), Some(2.5));
        assert_eq!(micros(text, "readrandom"), None);
    }

    #[test]
    fn lines_in_another_order_are_the_same() {
        assert_eq!(unordered(b"a\nb\n"), unordered(b"b\na\n"));
        assert_ne!(unordered(b"a\nb\n"), unordered(b"a\nc\n"));
    }
}
