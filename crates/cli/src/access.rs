//! How commands open a pool. Commands that change it open it for writing directly, or through the
//! pool's broker with a key; commands that only read open it read-only.

use std::path::{Path, PathBuf};

use anyhow::Result;
use aquifer::pool::AccessKey;
use aquifer::{OpenOptions, Pool};

/// Arguments of each command that changes a pool.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Access from a broker (`aquifer pool serve`)")]
pub struct Access {
    /// Ask for access for writing with the key in this file, where the pool file may only be read
    #[arg(long, value_name = "FILE")]
    access_key_file: Option<PathBuf>,

    /// Where the broker listens [default: the pool's path and `.socket`]
    #[arg(long, value_name = "PATH", requires = "access_key_file")]
    broker_socket: Option<PathBuf>,

    /// Where the first process that opens the pool puts what its processes share; those that come
    /// later also look in `/dev/shm` and beside the pool. The pool's own directory serves
    /// containers that share it and not `/dev/shm` [default: /dev/shm]
    #[arg(long, value_name = "DIR", help_heading = "Shared memory")]
    shared_memory: Option<PathBuf>,
}

/// The argument of each command that opens a pool by no broker: those that only look at one, and those that must have it alone.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ReadAccess {
    /// Where to look for what the processes share that have the pool open, besides `/dev/shm` and
    /// beside the pool: as they were told with the same option
    #[arg(long, value_name = "DIR", help_heading = "Shared memory")]
    shared_memory: Option<PathBuf>,
}

impl ReadAccess {
    /// Whether the option is given.
    pub fn is_given(&self) -> bool {
        self.shared_memory.is_some()
    }

    /// The directory searched for shared memory in addition to the default ones.
    pub fn segment_directory(&self) -> Option<PathBuf> {
        self.shared_memory.clone()
    }

    /// The options to open a pool read-only.
    pub fn options(&self) -> OpenOptions {
        OpenOptions {
            read_only: true,
            segment_directory: self.segment_directory(),
            ..OpenOptions::default()
        }
    }

    /// Opens a pool read-only.
    pub fn open(&self, path: &Path) -> Result<Pool> {
        Ok(Pool::open(path, &self.options())?)
    }
}

impl Access {
    /// The access for reading another pool than the one that is changed.
    pub fn to_read(&self) -> ReadAccess {
        ReadAccess { shared_memory: self.shared_memory.clone() }
    }

    /// Opens a pool for writing.
    pub fn open(&self, path: &Path) -> Result<Pool> {
        let options = OpenOptions {
            broker_socket: self.broker_socket.clone(),
            segment_directory: self.shared_memory.clone(),
            ..OpenOptions::default()
        };
        Ok(match &self.access_key_file {
            None => Pool::open(path, &options)?,
            Some(key_file) => Pool::open_granted(path, &AccessKey::from_file(key_file)?, &options)?,
        })
    }
}
