//! What parent and child tell each other.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::contender::regions::Domain;
use crate::contender::{Source, System, stores};
use crate::kernels::Scale;
use crate::options::KernelName;

/// One measurement: one contender, one workload, one round.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// The contender.
    pub system: System,
    /// What it is opened with.
    pub source: Source,
    /// What it does.
    pub work: Work,
    /// Seed of the access sequence.
    pub seed: u64,
    /// Number of the round: each has its own accesses.
    pub round: u32,
    /// Accesses each thread makes, if there is time.
    pub accesses: u64,
    /// When a thread stops before that. The answer is then checked for the accesses it made.
    pub deadline_ms: u64,
    /// Accesses made in advance, to reach the state that lasts.
    pub warm_accesses: u64,
    /// When warming up stops at the latest.
    pub warm_deadline_ms: u64,
    /// The page cache may hold at most this much of the file, or the memory limit does not work.
    pub limit_bytes: Option<u64>,
}

/// The workloads.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Random 8-byte loads from memory that is all there.
    Load,
    /// Random pages, one after the other.
    Read {
        /// How many threads do that.
        threads: u32,
    },
    /// Random pages in groups that are known in advance.
    Batch {
        /// Pages in a group.
        pages: usize,
    },
    /// One byte into random pages, and at the end everything made durable.
    Write {
        /// How many threads do that.
        threads: u32,
        /// Makes the stored bytes differ from those of the measurement before.
        salt: u64,
    },
    /// Pages never accessed before: every access misses.
    Miss,
    /// Where the time of one miss goes.
    Anatomy,
    /// Breadth-first search over a graph file.
    Bfs {
        /// How many threads search.
        threads: u32,
    },
    /// The neighbours of random vertices of a graph file.
    Lookup {
        /// How many threads look up.
        threads: u32,
    },
    /// Durable commits, one after the other.
    Commit(CommitWork),
    /// Durable commits by several threads at once, each to an array of its own.
    CommitTogether {
        /// How many threads commit.
        threads: u32,
        /// What each of them does.
        commit: CommitWork,
    },
    /// A computation whose result is made durable from time to time.
    Compute(ComputeWork),
    /// Commits without an end, in a process that will be killed.
    Crash(CommitWork),
    /// Opening what such a process left behind.
    Recover(CommitWork),
    /// Ordinary files.
    Files(FilesWork),
    /// Files in a pool, and the same files of the kernel.
    Pooled(PooledWork),
}

/// Work on ordinary files. The job's source is a file, or the directory that has the files.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesWork {
    /// Files chosen by Zipf's law are summed, each by its name.
    Sum {
        /// How many there are.
        files: u32,
    },
    /// Every page of open files is touched.
    Touch {
        /// How many files each thread has.
        files: u32,
        /// Their length.
        file_bytes: u64,
        /// How many threads there are.
        threads: u32,
    },
    /// One file is summed from its start to its end, in records of a page.
    Stream {
        /// Threads that read a part each, with no more processors than that.
        readers: Option<u32>,
        /// Places where a thread reads in turn.
        streams: u32,
        /// Whether the file comes from its device.
        cold: bool,
    },
    /// Pages of one warm file are summed in random order.
    Scatter,
    /// Pages of one cold file are summed in random order, which is known in advance.
    Prefetch,
    /// Pages of one file are stored to and made durable.
    Flush {
        /// How many.
        pages: u64,
        /// Makes the stored bytes differ from those of the measurement before.
        salt: u64,
    },
    /// The files of a source tree are searched for a text, several times over.
    Search {
        /// The text.
        needle: String,
        /// How many threads search.
        threads: u32,
        /// How often after the first time.
        repeats: u32,
    },
}

/// Work on files that are in a pool and, the same, in a directory of the kernel's. The job's source is that directory; the
/// pool is a file in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PooledWork {
    /// Each file is opened by path, summed and closed; once in advance, and then so many times over.
    Sum {
        /// How many files there are.
        files: u32,
        /// How many threads sum, each its own part of the files.
        threads: u32,
        /// How often after the first time.
        passes: u32,
    },
    /// One file is opened by path, a word of it read, and closed.
    Open {
        /// Which file.
        file: u32,
    },
    /// Records of open files.
    Records(RecordWork),
    /// A file grows.
    Append(AppendWork),
    /// Names come and go: a file is made, looked up and removed.
    Names(TeamWork),
    /// The content of one file takes the place of that of another.
    Replace {
        /// How long both are.
        file_bytes: u64,
    },
    /// A process reads what another process has read: how many page faults that takes.
    SecondProcess {
        /// Length of the file.
        file_bytes: u64,
        /// Which of the two; `None` for the one that starts them.
        member: Option<u32>,
    },
}

/// How many processes do the same at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TeamWork {
    /// How many.
    pub processes: u32,
    /// Which of them; `None` for the one that starts them.
    pub member: Option<u32>,
}

/// Records of a large file, read or overwritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RecordWork {
    /// Length of a record.
    pub record_bytes: u32,
    /// Length of the file.
    pub file_bytes: u64,
    /// Whether they are overwritten.
    pub writes: bool,
    /// In random order, or from the start to the end and over again.
    pub is_random: bool,
    /// Whether every process has a file of its own.
    pub own_files: bool,
    /// The processes.
    pub team: TeamWork,
}

/// A file that grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AppendWork {
    /// Length of a piece.
    pub piece_bytes: u64,
    /// How long the file gets.
    pub file_bytes: u64,
    /// How often it is removed and grows again.
    pub times: u32,
}

/// Commits to an array of cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CommitWork {
    /// What makes bytes durable.
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
    /// How large it is.
    pub scale: Scale,
    /// How often a second the result is made durable; 0 for never.
    pub rate_hz: u32,
    /// How many threads compute.
    pub threads: u32,
}

impl Work {
    /// What the environment of a child must say for this work.
    pub const fn environment(&self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Commit(commit)
            | Self::CommitTogether { commit, .. }
            | Self::Crash(commit)
            | Self::Recover(commit) => Some(stores::environment(commit.domain)),
            _ => None,
        }
    }
}

impl From<FilesWork> for Work {
    fn from(work: FilesWork) -> Self {
        Self::Files(work)
    }
}

impl From<PooledWork> for Work {
    fn from(work: PooledWork) -> Self {
        Self::Pooled(work)
    }
}

/// What a child answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It worked.
    Measured(Measured),
    /// This contender cannot run here.
    Unavailable(String),
    /// It went wrong.
    Failed(String),
}

/// The figures of one measurement.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Measured {
    /// Mean over all accesses, as the thread that makes them sees it.
    pub mean_ns: f64,
    /// 99th percentile of single accesses, where they are timed.
    pub p99_ns: Option<f64>,
    /// 99.9th percentile.
    pub p999_ns: Option<f64>,
    /// What each thread did and found.
    pub lanes: Vec<LaneAnswer>,
    /// Further figures.
    pub details: BTreeMap<String, f64>,
}

/// What one thread did and found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneAnswer {
    /// How many accesses it made.
    pub accesses: u64,
    /// Sum over what it read.
    pub checksum: u64,
}
