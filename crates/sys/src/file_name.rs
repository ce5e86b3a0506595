//! Gives a name to a file only once it is complete, and never replaces another file.
//!
//! A file that takes long to create should not appear at its path before it is complete: a process
//! killed halfway leaves a partial file there. [`unnamed`] and [`link`] leave nothing at all; where
//! a file system does not support unnamed files, use a file with a temporary name and
//! [`rename_new`].

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, RenameFlags, linkat, renameat_with};
use rustix::io::Errno;

/// Creates a file without a name on the file system of `directory`, open for reading and writing.
/// It is deleted when it is closed, unless it is [linked](link).
///
/// # Errors
/// [`io::ErrorKind::Unsupported`] where such files are not supported, or cannot be linked.
pub fn unnamed(directory: &Path, mode: u32) -> io::Result<File> {
    // `link` needs it.
    if !Path::new("/proc/self/fd").exists() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let flags = libc::O_TMPFILE;
    let made =
        File::options().read(true).write(true).mode(mode).custom_flags(flags).open(directory);
    made.map_err(|error| match error.raw_os_error() {
        // A kernel or file system that ignores the flag tries to open the directory for writing.
        Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL) => io::ErrorKind::Unsupported.into(),
        _ => error,
    })
}

/// Gives a file created by [`unnamed`] its name.
///
/// # Errors
/// EEXIST if the path exists.
pub fn link(file: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let from = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(linkat(CWD, from, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

/// Renames a file if nothing exists at the new path.
///
/// # Errors
/// EEXIST if the path exists.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // For a moment the file has two names; no other file is replaced.
        Err(Errno::INVAL | Errno::NOSYS) => {
            std::fs::hard_link(from, to)?;
            std::fs::remove_file(from)
        }
        renamed => Ok(renamed?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn linking_a_file_replaces_no_existing_name() {
        let directory = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| directory.path().join(name));
        let taken = |outcome: io::Result<()>| {
            assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EEXIST));
        };
        match unnamed(directory.path(), 0o600) {
            Ok(file) => {
                assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
                link(file.as_fd(), &one).unwrap();
                taken(link(file.as_fd(), &one));
            }
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                eprintln!("skipped: no files without names here");
                std::fs::write(&one, b"").unwrap();
            }
            Err(error) => panic!("{error}"),
        }
        std::fs::write(&other, b"other").unwrap();
        taken(rename_new(&one, &other));
        assert_eq!(std::fs::read(&other).unwrap(), b"other");
        let third = directory.path().join("third");
        rename_new(&one, &third).unwrap();
        assert!(third.exists() && !one.exists());
        let none = unnamed(&one, 0o600).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::NotFound);
    }
}
