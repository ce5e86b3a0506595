//! Directories that programs work in, unmodified: of the file system on the disk, of a tmpfs, and of
//! FUSE mounts.
//!
//! They are made once for a bench, in a mount namespace of its own, and served by other processes
//! until it ends, however it ends.

mod pass_through;

use std::io::PipeWriter;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use aquifer_fuse::{Cache, Keeper, MountError, MountOptions, Mounting};
use aquifer_pool::Pool;
use aquifer_sys::{mount, namespace};

use crate::harness::{Member, wait_to_go};
use crate::job::{Job, Measured, MountedWork, Unavailable};
use crate::scratch::{POOL, Scratch, scratch_directory};

/// How a directory is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Home {
    /// In `--dir`.
    Disk,
    /// In memory.
    Memory,
    /// A pass-through server, over a directory in `--dir`.
    PassThrough,
    /// A pool in `--dir`, mounted by the processes of `aquifer mount`.
    Pool(Cache),
}

/// A directory, removed when dropped.
#[derive(Debug)]
pub struct Housed {
    path: PathBuf,
    served: Served,
    _scratch: Scratch,
}

/// By what it is served.
#[derive(Debug)]
enum Served {
    Kernel,
    PassThrough(Option<Member>),
    Pool(Option<(Keeper, PipeWriter)>),
}

/// What directories are made with.
#[derive(Debug, Clone, Copy)]
pub struct Ground<'a> {
    /// A directory on the disk.
    pub disk: &'a Path,
    /// A directory in memory, if there is one.
    pub memory: Option<&'a Path>,
    /// The length of a pool.
    pub pool_bytes: u64,
    /// How many files it can have.
    pub files: u64,
}

/// Gives this process, and those that it starts, a mount namespace.
///
/// # Errors
/// The reason why it cannot mount anything.
pub fn enter_namespace() -> Result<()> {
    let own = namespace::own_mounts().or_else(|_| namespace::own_user_and_mounts());
    own.context("this process may not mount: it takes privileges, or user namespaces")
}

impl Home {
    /// Whether it is a mount.
    pub fn is_mounted(self) -> bool {
        matches!(self, Self::PassThrough | Self::Pool(_))
    }

    /// Makes it. An error that is [`Unavailable`] says what it lacks.
    pub fn make(self, contender: &str, ground: Ground<'_>) -> Result<Housed> {
        let parent = match (self, ground.memory) {
            (Self::Memory, Some(memory)) => memory,
            (Self::Memory, None) => {
                return Err(Unavailable("there is no tmpfs".to_owned()).into());
            }
            _ => ground.disk,
        };
        let scratch = scratch_directory(parent)?;
        let own = scratch.path().to_owned();
        let at = own.join("mounted");
        std::fs::create_dir(&at)?;
        let served = match self {
            Self::Disk | Self::Memory => Served::Kernel,
            Self::PassThrough => {
                std::fs::create_dir(own.join("source"))?;
                let mut job = Job::new(contender, own, 0, MountedWork::Serve);
                job.source.writable = true;
                let mut member = Member::start(&job)?;
                member.wait_ready()?;
                Served::PassThrough(Some(member))
            }
            Self::Pool(cache) => {
                let pool = own.join(POOL);
                drop(Pool::options().inodes(ground.files).create(&pool, ground.pool_bytes)?);
                let (other_end, lifeline) = std::io::pipe()?;
                let options = MountOptions::new().cache(cache);
                let mounting = Mounting::new(pool, &at).options(options);
                let keeper = mounting.until_closed(other_end.into()).start().map_err(without)?;
                Served::Pool(Some((keeper, lifeline)))
            }
        };
        Ok(Housed { path: at, served, _scratch: scratch })
    }
}

/// Whether there is no FUSE, rather than a defect.
fn without(error: MountError) -> anyhow::Error {
    match error {
        MountError::Device(_) | MountError::Mount { .. } => Unavailable(error.to_string()).into(),
        error => error.into(),
    }
}

impl Housed {
    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Housed {
    fn drop(&mut self) {
        match &mut self.served {
            Served::Kernel => {}
            Served::PassThrough(member) => {
                let ended =
                    member.take().map(|mut member| member.go().and_then(|()| member.finish()));
                if !matches!(ended, Some(Ok(_))) {
                    let _ = mount::remove(&self.path, true);
                }
            }
            Served::Pool(kept) => {
                let Some((keeper, lifeline)) = kept.take() else { return };
                drop(lifeline);
                let _ = keeper.wait();
            }
        }
    }
}

/// The process that serves a directory of [`Home::PassThrough`], until it is told to end.
pub fn serve(job: &Job) -> Result<Measured> {
    let own = &job.source.path;
    let served = pass_through::serve(&own.join("source"), &own.join("mounted"), wait_to_go);
    served.map_err(|error| match error.downcast::<MountError>() {
        Ok(error) => without(error),
        Err(error) => error,
    })?;
    Ok(Measured::default())
}
