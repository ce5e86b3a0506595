//! The messages between parent and child.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::kernels::{KernelName, Scale};

/// One measurement: one contender, one workload, one round.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// The name of the contender.
    pub contender: String,
    /// What the contender is opened with.
    pub source: Source,
    /// The workload.
    pub work: Work,
    /// Seed of the access sequence.
    pub seed: u64,
    /// Number of the round: each round has different accesses.
    pub round: u32,
    /// Accesses each thread makes, if time permits.
    pub accesses: u64,
    /// The deadline of a thread. Its answer is then checked for the accesses it made.
    pub deadline_ms: u64,
    /// Warm-up accesses, to reach the steady state.
    pub warm_accesses: u64,
    /// The deadline of the warm-up.
    pub warm_deadline_ms: u64,
    /// The most of the file that the page cache may hold; more means that the memory limit does not
    /// work.
    pub limit_bytes: Option<u64>,
}

impl Job {
    /// A job on a file or directory, without accesses, deadlines and limits.
    pub fn new(contender: &str, path: PathBuf, seed: u64, work: impl Into<Work>) -> Self {
        Self {
            contender: contender.to_owned(),
            source: Source {
                path,
                pages: 0,
                writable: false,
                cache_bytes: 0,
                page_cache_bytes: 0,
                base_pages: false,
            },
            work: work.into(),
            seed,
            round: 0,
            accesses: 0,
            deadline_ms: 0,
            warm_accesses: 0,
            warm_deadline_ms: 0,
            limit_bytes: None,
        }
    }
}

/// The parameters for opening a contender.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Source {
    /// The data file, or the directory of the contender's files.
    pub path: PathBuf,
    /// Its length in pages of [`PAGE_BYTES`](crate::raw::PAGE_BYTES).
    pub pages: u64,
    /// Whether there will be stores.
    pub writable: bool,
    /// The budget for a contender's private cache, bookkeeping included. For mappers, 0 is their
    /// default.
    pub cache_bytes: u64,
    /// The budget for a contender that keeps its pages in the page cache; 0 if it is not limited
    /// otherwise than `cache_bytes`.
    pub page_cache_bytes: u64,
    /// Whether page tables are kept to base pages, so that all contenders have the same translation
    /// cost.
    pub base_pages: bool,
}

/// The persistence domain a contender assumes for the storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Domain {
    /// The actual one: files in a page cache, over a device that has to be flushed.
    PageCache,
    /// Forced: memory in which flushed cache lines are durable. That is not true of a tmpfs, but
    /// has the same cost.
    Dax,
}

impl Domain {
    /// The environment variable that libpmemobj reads when it is loaded.
    pub const fn environment(self) -> (&'static str, &'static str) {
        match self {
            Self::PageCache => ("PMEM_IS_PMEM_FORCE", "0"),
            Self::Dax => ("PMEM_IS_PMEM_FORCE", "1"),
        }
    }
}

/// The workloads.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Random 8-byte loads from resident memory.
    Load,
    /// Consecutive random pages.
    Read {
        /// Number of threads.
        threads: u32,
    },
    /// As [`Work::Read`] with one thread, some pages much more often than others (Zipf).
    Zipf,
    /// All pages in order, again and again.
    Cycle {
        /// Passes before the clock starts.
        warm_passes: u32,
        /// Passes that are measured.
        passes: u32,
    },
    /// Random pages in groups that are known in advance.
    Batch {
        /// Pages in a group.
        pages: usize,
    },
    /// Stores one byte to random pages, and finally makes everything durable.
    Write {
        /// Number of threads.
        threads: u32,
        /// Makes the stored bytes differ from those of the previous measurement.
        salt: u64,
    },
    /// Rows of a data file, in batches.
    Rows(RowsWork),
    /// Pages never accessed before: every access misses.
    Miss,
    /// The parts of the time of one miss.
    Anatomy,
    /// Breadth-first search over a graph file.
    Bfs {
        /// Number of threads.
        threads: u32,
    },
    /// Consecutive durable commits.
    Commit(CommitWork),
    /// Durable commits by several threads at once, each to its own array.
    CommitTogether {
        /// Number of threads.
        threads: u32,
        /// The commits of each thread.
        commit: CommitWork,
    },
    /// A computation whose result is made durable periodically.
    Compute(ComputeWork),
    /// Commits in a process that then kills itself.
    Crash(CommitWork),
    /// Opening the files that such a process left behind.
    Recover(CommitWork),
    /// Ordinary files.
    Files(FilesWork),
    /// Files in a pool, and the same files of the kernel.
    Pooled(PooledWork),
    /// Opening a store, or running a command that does. The job's source is the directory of the
    /// store.
    Open(OpenWork),
    /// Work in a directory that may be a mount.
    Mounted(MountedWork),
    /// An object of a server. The job's source is a directory for what a contender keeps of it.
    Remote(RemoteWork),
}

/// An object of a server, read by the processes of a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RemoteWork {
    /// What is read.
    pub kind: RemoteKind,
    /// The processes.
    pub team: TeamWork,
    /// The server, with the interface of S3.
    pub endpoint: String,
    /// Length of the object.
    pub object_bytes: u64,
    /// Most requests of a process at once.
    pub in_flight: usize,
    /// The interpreter for the contenders in Python.
    pub python: PathBuf,
    /// The program.
    pub rclone: PathBuf,
}

/// What is read of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RemoteKind {
    /// Rows by chance, in batches that are known in advance.
    Random {
        /// Length of a row.
        row_bytes: u64,
        /// Rows in a batch.
        batch_rows: usize,
        /// After all of the object was read, and then dropped from memory.
        is_warm: bool,
    },
    /// All of it.
    Pass {
        /// After a first pass by the same process.
        is_again: bool,
    },
    /// Two columns of sixteen, in row groups of 8 MiB: the ranges that a reader of Parquet files asks for.
    Columns,
}

/// Work in a directory that may be a mount. The job's source is that directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountedWork {
    /// Serves the directory `mounted` of the source, until it is told to end.
    Serve,
    /// One operation, again and again.
    Single(SingleWork),
    /// A whole program, or a database.
    Program(ProgramWork),
}

/// Operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SingleWork {
    /// The attributes of a file.
    Stat {
        /// Of how many, in turn.
        files: u64,
    },
    /// A whole file.
    OpenReadClose {
        /// Of how many, in turn.
        files: u64,
    },
    /// A part of an open file.
    Read {
        /// Length of the part.
        len_bytes: u64,
    },
    /// Overwrites a part of an open file.
    Write {
        /// Length of the part.
        len_bytes: u64,
    },
    /// Overwrites 4 KiB, and makes them durable.
    WriteAndSync {
        /// By `fdatasync`, rather than by `fsync`.
        data_only: bool,
    },
    /// Creates and removes an empty file.
    CreateRemove,
    /// Lists a directory.
    List,
}

/// Programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgramWork {
    /// `git status`, of a tree without changes.
    GitStatus,
    /// Searches the files of a tree for a text.
    Search,
    /// `cp -r`.
    Copy,
    /// `tar -x`.
    Unpack,
    /// Transactions of SQLite.
    Sqlite {
        /// With a write-ahead log, rather than a rollback journal.
        has_log: bool,
    },
    /// Keys of RocksDB, in random order.
    Rocks {
        /// Whether they are read, rather than written.
        reads: bool,
    },
}

/// Opens, each by a process of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OpenWork {
    /// By a command, rather than by calls of a library.
    pub by_command: bool,
    /// For writing; the command makes a directory then, and else prints a file.
    pub writes: bool,
    /// While another process has the store open for writing.
    pub is_joined: bool,
    /// After the store was dropped from the page cache.
    pub is_cold: bool,
    /// The process; `None` for their parent.
    pub part: Option<OpenPart>,
}

/// The processes of [`OpenWork`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpenPart {
    /// Keeps the store open.
    Holder,
    /// Opens it, and is measured.
    Opener,
}

/// Batches of rows of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RowsWork {
    /// Length of a row.
    pub row_bytes: u64,
    /// Rows in a batch.
    pub batch_rows: usize,
    /// Which rows.
    pub draw: Draw,
}

/// How items are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Draw {
    /// All with equal probability.
    Uniform,
    /// By Zipf's law.
    Zipf,
}

/// Work on ordinary files. The job's source is a file, or the directory of the files.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesWork {
    /// Sums files chosen by Zipf's law, each opened by name.
    Sum {
        /// Number of files.
        files: u32,
    },
    /// Touches every page of open files.
    Touch {
        /// Number of files per thread.
        files: u32,
        /// Their length.
        file_bytes: u64,
        /// Number of threads.
        threads: u32,
    },
    /// Sums one file sequentially, in records of a page.
    Stream {
        /// Threads that read a share each, restricted to as many processors.
        readers: Option<u32>,
        /// Positions between which a thread alternates.
        streams: u32,
        /// Whether the file is read from its device.
        cold: bool,
    },
    /// Sums pages of one warm file in random order.
    Scatter,
    /// Sums pages of one cold file in a random order known in advance.
    Prefetch,
    /// Stores to pages of one file and makes them durable.
    Flush {
        /// Number of pages.
        pages: u64,
        /// Makes the stored bytes differ from those of the previous measurement.
        salt: u64,
    },
    /// Searches the files of a source tree for a text, several times.
    Search {
        /// The text.
        needle: String,
        /// Number of threads.
        threads: u32,
        /// Number of passes after the first.
        repeats: u32,
    },
}

/// Work on files in a pool and on identical files in a directory. The job's source is that
/// directory, which contains the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PooledWork {
    /// Opens each file by path, sums it and closes it; one first pass, then `passes` more.
    Sum {
        /// Number of files.
        files: u32,
        /// Number of threads, each with its own share of the files.
        threads: u32,
        /// Number of passes after the first.
        passes: u32,
    },
    /// Opens one file by path, reads a word of it, and closes it.
    Open {
        /// Number of the file.
        file: u32,
    },
    /// Records of open files.
    Records(RecordWork),
    /// Appends to a file.
    Append(AppendWork),
    /// Creates, looks up and removes a file.
    Names(TeamWork),
    /// Looks up files by name in an open directory, or lists all of it, with their metadata.
    LookUps {
        /// Whether the directory is listed.
        lists: bool,
        /// The processes.
        team: TeamWork,
    },
    /// Replaces the content of one file by that of another.
    Replace {
        /// Length of both files.
        file_bytes: u64,
    },
    /// Counts the page faults of a process that reads what another process has read.
    SecondProcess {
        /// Length of the file.
        file_bytes: u64,
        /// Which of the two; `None` for their parent.
        member: Option<u32>,
    },
}

/// Several processes with the same work at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TeamWork {
    /// Number of processes.
    pub processes: u32,
    /// Which of them; `None` for their parent.
    pub member: Option<u32>,
}

/// Records of a large file, read or overwritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RecordWork {
    /// Length of a record.
    pub record_bytes: u32,
    /// Length of the file.
    pub file_bytes: u64,
    /// Whether the records are overwritten.
    pub writes: bool,
    /// In random order, rather than sequentially and starting over.
    pub is_random: bool,
    /// Whether every process has its own file.
    pub own_files: bool,
    /// The processes.
    pub team: TeamWork,
}

/// A file that grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AppendWork {
    /// Length of a piece.
    pub piece_bytes: u64,
    /// Final length of the file.
    pub file_bytes: u64,
    /// How often the file is grown; it is removed in between.
    pub times: u32,
}

/// Commits to an array of cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CommitWork {
    /// How bytes become durable.
    pub domain: Domain,
    /// Distinct pages each commit stores to.
    pub pages: u32,
    /// Stores on each of them.
    pub stores_a_page: u32,
    /// Unrelated pages of the same file that are kept dirty.
    pub dirty_pages: u32,
}

/// A computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ComputeWork {
    /// What is computed.
    pub kernel: KernelName,
    /// Size of the computation.
    pub scale: Scale,
    /// How often per second the result is made durable; 0 for never.
    pub rate_hz: u32,
    /// Number of threads.
    pub threads: u32,
}

impl Work {
    /// The environment variable that a child needs for this work.
    pub const fn environment(&self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Commit(commit)
            | Self::CommitTogether { commit, .. }
            | Self::Crash(commit)
            | Self::Recover(commit) => Some(commit.domain.environment()),
            _ => None,
        }
    }
}

impl From<FilesWork> for Work {
    fn from(work: FilesWork) -> Self {
        Self::Files(work)
    }
}

impl From<OpenWork> for Work {
    fn from(work: OpenWork) -> Self {
        Self::Open(work)
    }
}

impl From<MountedWork> for Work {
    fn from(work: MountedWork) -> Self {
        Self::Mounted(work)
    }
}

impl From<PooledWork> for Work {
    fn from(work: PooledWork) -> Self {
        Self::Pooled(work)
    }
}

/// The reply of a child.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The measurement succeeded.
    Measured(Measured),
    /// This contender cannot run here.
    Unavailable(String),
    /// The measurement failed.
    Failed(String),
}

/// A contender cannot run on this machine or file system. Not a failure: it becomes a note in the
/// report.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub String);

/// The figures of one measurement.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Measured {
    /// Mean over all accesses, as seen by the accessing thread.
    pub mean_ns: f64,
    /// 99th percentile of single accesses, if they are timed.
    pub p99_ns: Option<f64>,
    /// 99.9th percentile.
    pub p999_ns: Option<f64>,
    /// The answer of each thread.
    pub lanes: Vec<LaneAnswer>,
    /// Additional figures.
    pub details: BTreeMap<String, f64>,
}

/// The answer of one thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneAnswer {
    /// Number of accesses.
    pub accesses: u64,
    /// Sum over the data read.
    pub checksum: u64,
}
