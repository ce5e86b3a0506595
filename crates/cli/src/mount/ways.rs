//! Ways to mount: as root, by `fusermount3`, or in namespaces of the command's own.
//!
//! | | needs | seen by |
//! |---|---|---|
//! | directly | `CAP_SYS_ADMIN`, `/dev/fuse` | all |
//! | `fusermount3` | that program (package fuse3) | all |
//! | `aquifer run` | user namespaces and `/dev/fuse`; or one of the above | the command that it runs |
//!
//! If none works, the error says of each what is missing.

use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use aquifer::fuse::fusermount::FusermountError;
use aquifer::fuse::{Keeper, MountError, Mounting};
use aquifer_sys::fuse;
use aquifer_sys::namespace::{self, Rights};

use super::options::Options;

/// No way to mount is open to this process.
#[derive(Debug, thiserror::Error)]
#[error("cannot mount: {direct}; {helper}")]
pub struct NoWay {
    direct: String,
    helper: FusermountError,
}

/// Mounts a pool, and returns the process that serves it. `more` sets what is not an option of the
/// mount.
pub fn start(
    options: &Options,
    pool: &Path,
    directory: &Path,
    more: impl Fn(Mounting) -> Result<Mounting>,
) -> Result<Keeper> {
    let pool = found(pool)?;
    let mounting = || more(options.mounting(&pool, directory));
    match mounting()?.start() {
        Err(refused) if needs_help(&refused) => {
            mounting()?.by_fusermount().start().map_err(|error| explained(&refused, error))
        }
        started => Ok(started?),
    }
}

/// Mounts a pool and serves it until it is unmounted.
pub fn run(
    options: &Options,
    pool: &Path,
    directory: &Path,
    ready: impl FnOnce() + Clone,
) -> Result<()> {
    let pool = found(pool)?;
    let mounting = || options.mounting(&pool, directory);
    match mounting().run(ready.clone()) {
        Err(refused) if needs_help(&refused) => {
            mounting().by_fusermount().run(ready).map_err(|error| explained(&refused, error))
        }
        ran => Ok(ran?),
    }
}

fn found(pool: &Path) -> Result<PathBuf> {
    pool.canonicalize().with_context(|| format!("cannot open the pool {}", pool.display()))
}

/// Enters namespaces where this process may mount. Returns the rights that the command keeps, if it
/// would get more there; or the reason if it cannot: then it stays where it was.
pub fn enter_namespaces() -> Result<Option<Rights>, String> {
    if namespace::own_mounts().is_ok() {
        return Ok(None);
    }
    let rights = Rights::own().map_err(|error| error.to_string())?;
    // The namespace gives no other rights to the device.
    if let Err(error) = fuse::FuseDevice::open() {
        return Err(format!("in a user namespace: {}", why_no_device(&error)));
    }
    namespace::own_user_and_mounts()
        .and_then(|()| namespace::let_programs_mount())
        .map_err(|error| why_no_namespace(&error))?;
    Ok(Some(rights))
}

/// The reason why user namespaces do not work.
pub fn why_no_namespace(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOSPC) => {
            "user namespaces are off (user.max_user_namespaces), or there are too many".to_owned()
        }
        Some(libc::EPERM | libc::EACCES) => "user namespaces are refused \
             (kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns, or a container's seccomp rules)"
            .to_owned(),
        _ => format!("no user namespace: {error}"),
    }
}

/// The reason why the device cannot be opened.
pub fn why_no_device(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => format!(
            "the kernel has no FUSE here ({error}): try `modprobe fuse`, or give the container {}",
            fuse::PATH
        ),
        Some(libc::EACCES | libc::EPERM) => match std::fs::metadata(fuse::PATH) {
            Ok(device) => format!(
                "{} has mode {:o} and belongs to user {}, so this user may not open it",
                fuse::PATH,
                device.permissions().mode() & 0o777,
                device.uid()
            ),
            Err(_) => format!("{} may not be opened", fuse::PATH),
        },
        _ => format!("cannot open {}: {error}", fuse::PATH),
    }
}

/// Whether another user, with more rights, could mount it.
fn needs_help(error: &MountError) -> bool {
    let (MountError::Device(source) | MountError::Mount { source, .. }) = error else {
        return false;
    };
    matches!(source.raw_os_error(), Some(libc::EPERM | libc::EACCES))
}

/// The error of a user for whom `fusermount3` could not mount it either.
fn explained(refused: &MountError, error: MountError) -> anyhow::Error {
    let helper = match error {
        MountError::Fusermount(helper) => helper,
        error => return error.into(),
    };
    let direct = match refused {
        MountError::Device(error) => why_no_device(error),
        MountError::Mount { .. } => "mounting needs root (CAP_SYS_ADMIN)".to_owned(),
        other => other.to_string(),
    };
    NoWay { direct, helper }.into()
}
