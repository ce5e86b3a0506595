//! How commands open a pool. Commands that change it open it for writing directly, or through the
//! pool's broker with a key; commands that only read open it read-only.

use std::path::{Path, PathBuf};

use anyhow::Result;
use aquifer::pool::AccessKey;
use aquifer::{Pool, PoolOptions};

/// Arguments of each command that changes a pool.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Access from a broker (`aquifer pool serve`)")]
pub struct Access {
    /// Request write access from the pool's broker with the key in this file
    #[arg(long, value_name = "FILE")]
    access_key_file: Option<PathBuf>,

    /// Socket of the broker [default: the pool's path followed by `.socket`]
    #[arg(long, value_name = "PATH", requires = "access_key_file")]
    broker_socket: Option<PathBuf>,

    /// Directory for the pool's shared memory. The first process that opens the pool creates it
    /// there; later ones also search `/dev/shm` and the pool's directory. Containers that share the
    /// pool's directory and not `/dev/shm` can use the pool's directory [default: /dev/shm]
    #[arg(long, value_name = "DIR", help_heading = "Shared memory")]
    shared_memory: Option<PathBuf>,
}

/// The argument of each command that opens a pool without a broker: commands that only read it, and
/// commands that need exclusive access.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ReadAccess {
    /// Directory with the pool's shared memory, if the processes that have the pool open were given
    /// one; `/dev/shm` and the pool's directory are always searched
    #[arg(long, value_name = "DIR", help_heading = "Shared memory")]
    shared_memory: Option<PathBuf>,
}

impl ReadAccess {
    /// The access for writing to another pool than the one that is read.
    pub fn to_write(&self) -> Access {
        Access { shared_memory: self.shared_memory.clone(), ..Access::default() }
    }

    /// Whether the option is given.
    pub fn is_given(&self) -> bool {
        self.shared_memory.is_some()
    }

    /// The directory searched for shared memory in addition to the default ones.
    pub fn segment_directory(&self) -> Option<PathBuf> {
        self.shared_memory.clone()
    }

    /// The options to open a pool read-only.
    pub fn options(&self) -> PoolOptions {
        let options = Pool::options().read_only(true);
        self.segment_directory().into_iter().fold(options, PoolOptions::segment_directory)
    }

    /// Opens a pool read-only.
    pub fn open(&self, path: &Path) -> Result<Pool> {
        Ok(self.options().open(path)?)
    }
}

impl Access {
    /// The access for reading another pool than the one that is changed.
    pub fn to_read(&self) -> ReadAccess {
        ReadAccess { shared_memory: self.shared_memory.clone() }
    }

    /// Opens a pool for writing.
    pub fn open(&self, path: &Path) -> Result<Pool> {
        let options = self.broker_socket.iter().fold(Pool::options(), PoolOptions::broker_socket);
        let options = self.shared_memory.iter().fold(options, PoolOptions::segment_directory);
        Ok(match &self.access_key_file {
            None => options.open(path)?,
            Some(key_file) => options.open_granted(path, &AccessKey::from_file(key_file)?)?,
        })
    }
}
