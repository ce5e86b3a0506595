//! How a pool is mounted: the options that `aquifer mount`, `aquifer run` and the file systems table
//! have in common.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::keep::shared_mode;
use aquifer::fuse::{Cache, MountOptions, Mounting};

/// What the kernel caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum CacheMode {
    /// Also what was written: it reaches the pool at `fsync`, `close`, or after some seconds
    #[default]
    WriteBack,
    /// What was read or written; each write reaches the pool before it returns
    WriteThrough,
}

/// Options of every way to mount.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Mount it read-only: nothing can be changed, neither there nor, unless it is shared, by other
    /// processes. Also takes permission to write to the pool
    #[arg(long, short)]
    read_only: bool,

    /// What the kernel caches
    #[arg(long, value_enum, value_name = "MODE", default_value = "write-back")]
    cache: CacheMode,

    /// Let other mounts and other programs change the pool at the same time: the kernel caches nothing,
    /// and every call asks the pool
    #[arg(long, conflicts_with = "cache")]
    shared: bool,

    /// Without extended attributes: the first write to each file is faster. Access control lists of
    /// files are not checked then, and their groups get what the mode shows
    #[arg(long)]
    no_xattrs: bool,

    /// Let other users use the mount too, as owners and modes permit. Users without privileges may
    /// allow it only if `/etc/fuse.conf` has `user_allow_other`
    #[arg(long)]
    allow_other: bool,

    /// Honour set-user-ID bits: a process that can write to the pool can then become root
    #[arg(long)]
    suid: bool,

    /// Honour device files: a process that can write to the pool can then reach every device
    #[arg(long)]
    dev: bool,

    /// Run no programs from it
    #[arg(long)]
    no_exec: bool,

    /// Directory for the pool's shared memory, if this is the first process that opens the pool;
    /// other processes also search `/dev/shm` and the pool's directory [default: /dev/shm]
    #[arg(long, value_name = "DIR")]
    shared_memory: Option<PathBuf>,
}

impl Options {
    /// What is to be mounted.
    pub fn mounting(&self, pool: &Path, directory: &Path) -> Mounting {
        let mode = std::fs::metadata(pool).map_or(0o600, |metadata| shared_mode(&metadata));
        let mounting = Mounting::new(pool, directory).options(self.for_kernel());
        let mounting = mounting.segment_mode(mode);
        // The keeper has another working directory.
        let directory = self.shared_memory.iter().map(std::path::absolute);
        directory.flatten().fold(mounting, Mounting::segment_directory)
    }

    /// The part that concerns the kernel.
    pub fn for_kernel(&self) -> MountOptions {
        let cache = match self.cache {
            _ if self.shared => Cache::Shared,
            CacheMode::WriteBack => Cache::WriteBack,
            CacheMode::WriteThrough => Cache::WriteThrough,
        };
        MountOptions::new()
            .cache(cache)
            .read_only(self.read_only)
            .allow_other(self.allow_other)
            .xattrs(!self.no_xattrs)
            .suid(self.suid)
            .dev(self.dev)
            .exec(!self.no_exec)
    }
}

/// What an option of the file systems table means.
#[derive(Debug, PartialEq, Eq)]
pub enum Meaning {
    /// This argument of `aquifer mount`.
    Argument(OsString),
    /// Nothing: it is the default, or for other programs.
    Nothing,
}

/// The argument for an option of the file systems table.
///
/// # Errors
/// For an option that is unknown, or that this file system cannot have.
pub fn of_table(option: &str) -> Result<Meaning, String> {
    let (name, value) =
        option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
    let argument = |text: &str| Ok(Meaning::Argument(text.into()));
    match (name, value) {
        ("ro", None) => argument("--read-only"),
        ("allow_other", None) => argument("--allow-other"),
        ("shared", None) => argument("--shared"),
        ("noxattr", None) => argument("--no-xattrs"),
        ("suid", None) => argument("--suid"),
        ("dev", None) => argument("--dev"),
        ("noexec", None) => argument("--no-exec"),
        ("cache", Some(mode)) => argument(&format!("--cache={mode}")),
        ("shared_memory", Some(directory)) => argument(&format!("--shared-memory={directory}")),
        ("remount", None) => {
            Err("a pool is not remounted with other options; unmount it and mount it again"
                .to_owned())
        }
        ("sync" | "dirsync" | "mand", None) => {
            Err(format!("a pool cannot be mounted with `{name}`"))
        }
        // The defaults; times of access, which are not kept; what mount and systemd do by themselves.
        (
            "rw"
            | "nosuid"
            | "nodev"
            | "exec"
            | "async"
            | "defaults"
            | "default_permissions"
            | "auto"
            | "noauto"
            | "user"
            | "users"
            | "nouser"
            | "owner"
            | "group"
            | "nofail"
            | "_netdev"
            | "atime"
            | "noatime"
            | "relatime"
            | "norelatime"
            | "strictatime"
            | "nostrictatime"
            | "diratime"
            | "nodiratime"
            | "lazytime"
            | "nolazytime"
            | "iversion"
            | "noiversion"
            | "nomand"
            | "silent"
            | "loud",
            None,
        ) => Ok(Meaning::Nothing),
        ("comment", Some(_)) => Ok(Meaning::Nothing),
        _ if name.starts_with("x-") || name.starts_with("X-") || name.is_empty() => {
            Ok(Meaning::Nothing)
        }
        _ => Err(format!(
            "`{option}` is no option of a mounted pool; there are ro, shared, cache=write-through, noxattr, allow_other, suid, dev, noexec, \
             shared_memory=DIR"
        )),
    }
}
