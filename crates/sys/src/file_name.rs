//! Names of files that are given to whole files only, and never in the place of another one.
//!
//! A file that takes long to make should not lie at its path before it is whole: whoever is killed in between leaves
//! something there that is neither nothing nor what it should be. [`unnamed`] and [`link`] leave nothing at all; where
//! a file system has no files without names, a file with another name and [`rename_new`] do.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::check;

/// A file without a name on the file system of `directory`, open for reading and writing. It is gone when it is closed,
/// unless it is [linked](link).
///
/// # Errors
/// With [`io::ErrorKind::Unsupported`] where there are none, or none that could be linked.
pub fn unnamed(directory: &Path, mode: u32) -> io::Result<File> {
    // Through it the name is given.
    if !Path::new("/proc/self/fd").exists() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let flags = libc::O_TMPFILE;
    let made =
        File::options().read(true).write(true).mode(mode).custom_flags(flags).open(directory);
    made.map_err(|error| match error.raw_os_error() {
        // Who does not know the flag tries to open the directory for writing.
        Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL) => io::ErrorKind::Unsupported.into(),
        _ => error,
    })
}

/// Gives a file that [`unnamed`] has made its name.
///
/// # Errors
/// EEXIST if there is something of that name.
pub fn link(file: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let from = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let to = CString::new(path.as_os_str().as_bytes())?;
    let (at, flags) = (libc::AT_FDCWD, libc::AT_SYMLINK_FOLLOW);
    // SAFETY: both are NUL-terminated and outlive the call.
    let result = unsafe { libc::linkat(at, from.as_ptr(), at, to.as_ptr(), flags) };
    check(result.into()).map(drop)
}

/// Renames a file if nothing has the new name.
///
/// # Errors
/// EEXIST if there is something of that name.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    let [old, new] =
        [CString::new(from.as_os_str().as_bytes())?, CString::new(to.as_os_str().as_bytes())?];
    let (at, flags) = (libc::AT_FDCWD, libc::RENAME_NOREPLACE);
    // SAFETY: both are NUL-terminated and outlive the call.
    let result =
        unsafe { libc::syscall(libc::SYS_renameat2, at, old.as_ptr(), at, new.as_ptr(), flags) };
    match check(result) {
        // Two names for a moment, and never another file's.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) => {
            std::fs::hard_link(from, to)?;
            std::fs::remove_file(from)
        }
        renamed => renamed.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_file_gets_its_name_and_takes_nobodys() {
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
