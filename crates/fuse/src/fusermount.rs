//! `fusermount3`, which mounts for users without the right to mount: a program of libfuse that belongs
//! to root and has its set-user-ID bit. It opens the device, mounts, and sends the descriptor.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use aquifer_sys::fuse::FuseDevice;
use aquifer_sys::local_socket::Connection;

use crate::options::MountOptions;

/// Its names: that of libfuse 3, and that of distributions that have only one.
const NAMES: [&str; 2] = ["fusermount3", "fusermount"];

/// What it says of a mount that is used.
const BUSY: &str = "Device or resource busy";

/// What keeps `fusermount3` from helping.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FusermountError {
    /// It is not installed.
    #[error("fusermount3 is not installed (package fuse3)")]
    Missing,
    /// It refused.
    #[error("{0}")]
    Refused(String),
    /// It could not be run, or sent nothing.
    #[error("cannot run fusermount3: {0}")]
    Run(#[source] io::Error),
}

impl FusermountError {
    /// The error of an unmount that the process itself could not do either.
    pub(crate) fn into_io(self, own: io::Error) -> io::Error {
        match self {
            FusermountError::Missing => own,
            // It translates nothing.
            FusermountError::Refused(said) if said.ends_with(BUSY) => {
                io::Error::from_raw_os_error(libc::EBUSY)
            }
            other => io::Error::other(other.to_string()),
        }
    }
}

/// Where it is; `None` if it is not installed.
pub fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
    let directories: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let places = NAMES.iter().flat_map(|name| directories.iter().map(move |at| at.join(name)));
    // Not from the present directory, whatever the variable says: other users may have put it there.
    places.into_iter().find(|place| place.is_absolute() && may_be_run(place))
}

fn may_be_run(place: &Path) -> bool {
    place.metadata().is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
}

/// Mounts a pool at a directory, both as absolute paths. The directory shows it at once; the first
/// request waits in the device.
pub(crate) fn mount(
    source: &Path,
    directory: &Path,
    options: &MountOptions,
) -> Result<FuseDevice, FusermountError> {
    let program = program().ok_or(FusermountError::Missing)?;
    let (own, helpers) = Connection::pair().map_err(FusermountError::Run)?;
    let mut wanted = OsString::from("default_permissions,subtype=aquifer");
    for (is_wanted, name) in [
        (options.read_only, "ro"),
        (options.allow_other, "allow_other"),
        (!options.suid, "nosuid"),
        (!options.dev, "nodev"),
        (!options.exec, "noexec"),
        (options.suid, "suid"),
        (options.dev, "dev"),
    ] {
        if is_wanted {
            wanted.push(",");
            wanted.push(name);
        }
    }
    wanted.push(",fsname=");
    wanted.push(as_option(source));
    let mut command = Command::new(program);
    // Its standard input, which it does not read: so no descriptor has to be left open on purpose.
    command.args([OsStr::new("-o"), &wanted, OsStr::new("--"), directory.as_os_str()]);
    command.env("_FUSE_COMMFD", "0").stdin(Stdio::from(helpers));
    run(command)?;
    let (_, sent) = own.receive(&mut [0]).map_err(FusermountError::Run)?;
    let device = sent.into_iter().next().ok_or(io::ErrorKind::UnexpectedEof);
    Ok(FuseDevice::from(std::fs::File::from(
        device.map_err(|kind| FusermountError::Run(kind.into()))?,
    )))
}

/// Unmounts what the user has mounted.
pub(crate) fn unmount(directory: &Path, lazily: bool) -> Result<(), FusermountError> {
    let mut command = Command::new(program().ok_or(FusermountError::Missing)?);
    command.arg(if lazily { "-uz" } else { "-u" }).arg("--").arg(directory).stdin(Stdio::null());
    run(command)
}

fn run(mut command: Command) -> Result<(), FusermountError> {
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    // The command keeps the other end of the socket until it is dropped.
    drop(command);
    let mut child = child.map_err(FusermountError::Run)?;
    let mut said = String::new();
    if let Some(errors) = &mut child.stderr {
        let _ = errors.read_to_string(&mut said);
    }
    let status = child.wait().map_err(FusermountError::Run)?;
    if status.success() {
        return Ok(());
    }
    let said = said.trim();
    Err(FusermountError::Refused(if said.is_empty() {
        format!("fusermount3: {status}")
    } else {
        said.replace('\n', "; ")
    }))
}

/// A path as an option of a mount helper: there, commas divide options.
fn as_option(path: &Path) -> OsString {
    let mut bytes = Vec::new();
    for &byte in path.as_os_str().as_bytes() {
        if matches!(byte, b',' | b'\\') {
            bytes.push(b'\\');
        }
        bytes.push(byte);
    }
    OsString::from_vec(bytes)
}
