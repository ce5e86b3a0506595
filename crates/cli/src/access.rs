//! How commands get at a pool. Those that change it open it as users that may write its file do, or with a key, from the pool's broker; those that
//! only look open it for reading.

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

    /// Where the first process that opens the pool puts what its processes share; those that come later also look in `/dev/shm` and
    /// beside the pool. The pool's own directory serves containers that share it and not `/dev/shm` [default: /dev/shm]
    #[arg(long, value_name = "DIR", help_heading = "Shared memory")]
    shared_memory: Option<PathBuf>,
}

/// The argument of each command that opens a pool by no broker: those that only look at one, and those that must have it alone.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ReadAccess {
    /// Where to look for what the processes share that have the pool open, besides `/dev/shm` and beside the pool: as they were told with the
    /// same option
    #[arg(long, value_name = "DIR", help_heading = "Shared memory")]
    shared_memory: Option<PathBuf>,
}

impl ReadAccess {
    /// Whether there is an argument.
    pub fn is_given(&self) -> bool {
        self.shared_memory.is_some()
    }

    /// Where shared memory is looked for besides the usual places.
    pub fn segment_directory(&self) -> Option<PathBuf> {
        self.shared_memory.clone()
    }

    /// How a pool is opened without changing anything in it.
    pub fn options(&self) -> OpenOptions {
        OpenOptions {
            read_only: true,
            segment_directory: self.segment_directory(),
            ..OpenOptions::default()
        }
    }

    /// Opens a pool without changing anything in it.
    pub fn open(&self, path: &Path) -> Result<Pool> {
        Ok(Pool::open(path, &self.options())?)
    }
}

impl Access {
    /// To look at another pool than the one that is changed.
    pub fn to_read(&self) -> ReadAccess {
        ReadAccess { shared_memory: self.shared_memory.clone() }
    }

    /// Opens a pool to change it.
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
