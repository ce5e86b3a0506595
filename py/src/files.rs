//! What `aquifer.Files` (`_files.py`) does by path. Paths are bytes, as the system's: `os.fsencode` of what the program
//! gives.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

use aquifer::fs::{FileTimes, FsError, MAX_VIEW_PIECES, Metadata, RenameMode};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{Failure, Result};
use crate::file::File;
use crate::pool::{Opened, PyPool};
use crate::view::FileView;

fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// What `os.stat_result` is made of: mode, inode, links, owner, group, size, the times in nanoseconds, and the size of
/// the pages that it has.
type Stat = (u32, u64, u64, u32, u32, u64, (i128, i128, i128), u64);

fn stat_of(metadata: &Metadata) -> Stat {
    let ns = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
    let times = (
        ns(metadata.atime(), metadata.atime_nsec()),
        ns(metadata.mtime(), metadata.mtime_nsec()),
        ns(metadata.ctime(), metadata.ctime_nsec()),
    );
    (
        metadata.mode(),
        metadata.ino(),
        metadata.nlink(),
        metadata.uid(),
        metadata.gid(),
        metadata.size(),
        times,
        metadata.allocated_bytes(),
    )
}

fn time_of(ns: i64) -> SystemTime {
    let since = Duration::from_nanos(ns.unsigned_abs());
    if ns < 0 { SystemTime::UNIX_EPOCH - since } else { SystemTime::UNIX_EPOCH + since }
}

/// How a file is opened.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct How {
    read: bool,
    write: bool,
    append: bool,
    truncate: bool,
    create: bool,
    create_new: bool,
    mode: u32,
}

/// The files of a pool.
#[pyclass(module = "aquifer._native", frozen)]
pub(crate) struct Files(Py<PyPool>);

impl Files {
    fn opened(&self) -> Result<Opened> {
        self.0.get().opened()
    }
}

#[pymethods]
impl Files {
    #[new]
    fn new(pool: Py<PyPool>) -> Files {
        Files(pool)
    }

    fn open_file(&self, py: Python<'_>, name: &[u8], how: How) -> Result<File> {
        let files = self.opened()?.files;
        py.detach(|| {
            let mut options = files.options();
            options.read(how.read).write(how.write).append(how.append).truncate(how.truncate);
            options.create(how.create).create_new(how.create_new).mode(how.mode);
            let file = options.open(path(name))?;
            if file.metadata()?.is_dir() {
                return Err(FsError::IsADirectory { path: path(name).into() }.into());
            }
            Ok(File::new(file))
        })
    }

    /// The bytes from `start` to `stop`, or to the end, in place.
    fn view_file(
        &self,
        py: Python<'_>,
        name: &[u8],
        start: u64,
        stop: Option<u64>,
    ) -> Result<FileView> {
        let opened = self.opened()?;
        py.detach(|| {
            let view = match stop {
                Some(stop) => opened.files.view(path(name), start..stop),
                None => opened.files.view(path(name), start..),
            }?
            .into_owned();
            if view.bytes().is_none() {
                let pieces = opened.files.open_file(path(name))?.runs()?.len();
                return Err(FsError::TooFragmented { pieces, limit: MAX_VIEW_PIECES }.into());
            }
            Ok(FileView::new(opened.exports.clone(), view))
        })
    }

    fn stat(&self, py: Python<'_>, name: &[u8], follow: bool) -> Result<Stat> {
        let files = self.opened()?.files;
        py.detach(|| {
            let name = path(name);
            let metadata = if follow { files.metadata(name) } else { files.symlink_metadata(name) };
            Ok(stat_of(&metadata?))
        })
    }

    /// The names in a directory: each with its inode and the kind of its file, as the bits of a mode.
    fn read_dir(&self, py: Python<'_>, name: &[u8]) -> Result<Vec<(Py<PyBytes>, u64, u32)>> {
        let files = self.opened()?.files;
        let entries = py.detach(|| {
            let entries = files.read_dir(path(name))?.map(|entry| {
                let entry = entry?;
                let kind = entry.file_type()?;
                let mode = if kind.is_dir() {
                    libc::S_IFDIR
                } else if kind.is_symlink() {
                    libc::S_IFLNK
                } else if kind.is_file() {
                    libc::S_IFREG
                } else if kind.is_fifo() {
                    libc::S_IFIFO
                } else if kind.is_socket() {
                    libc::S_IFSOCK
                } else if kind.is_char_device() {
                    libc::S_IFCHR
                } else {
                    libc::S_IFBLK
                };
                Ok((entry.file_name(), entry.ino(), mode))
            });
            entries.collect::<std::result::Result<Vec<_>, FsError>>()
        })?;
        let entry = |(name, inode, mode): (std::ffi::OsString, u64, u32)| {
            (PyBytes::new(py, name.as_bytes()).unbind(), inode, mode)
        };
        Ok(entries.into_iter().map(entry).collect())
    }

    fn make_dir(&self, py: Python<'_>, name: &[u8], mode: u32) -> Result {
        let files = self.opened()?.files;
        py.detach(|| Ok(files.dir_builder().mode(mode).create(path(name))?))
    }

    fn remove_file(&self, py: Python<'_>, name: &[u8]) -> Result {
        let files = self.opened()?.files;
        py.detach(|| Ok(files.remove_file(path(name))?))
    }

    fn remove_dir(&self, py: Python<'_>, name: &[u8], with_content: bool) -> Result {
        let files = self.opened()?.files;
        py.detach(|| {
            let name = path(name);
            Ok(if with_content { files.remove_dir_all(name) } else { files.remove_dir(name) }?)
        })
    }

    fn rename_file(&self, py: Python<'_>, from: &[u8], to: &[u8], replace: bool) -> Result {
        let files = self.opened()?.files;
        py.detach(|| {
            let (from, to) = (path(from), path(to));
            if replace {
                files.rename(from, to)?;
            } else {
                files.rename_with(from, to, RenameMode::NoReplace)?;
            }
            Ok(())
        })
    }

    fn copy_file(&self, py: Python<'_>, from: &[u8], to: &[u8]) -> Result<u64> {
        let files = self.opened()?.files;
        py.detach(|| Ok(files.copy(path(from), path(to))?))
    }

    fn link_file(&self, py: Python<'_>, from: &[u8], to: &[u8]) -> Result {
        let files = self.opened()?.files;
        py.detach(|| Ok(files.hard_link(path(from), path(to))?))
    }

    fn symlink(&self, py: Python<'_>, target: &[u8], name: &[u8]) -> Result {
        let files = self.opened()?.files;
        py.detach(|| Ok(files.symlink(path(target), path(name))?))
    }

    fn read_link(&self, py: Python<'_>, name: &[u8]) -> Result<Py<PyBytes>> {
        let files = self.opened()?.files;
        let target = py.detach(|| Ok::<_, Failure>(files.read_link(path(name))?))?;
        Ok(PyBytes::new(py, target.as_os_str().as_bytes()).unbind())
    }

    fn real_path(&self, py: Python<'_>, name: &[u8]) -> Result<Py<PyBytes>> {
        let files = self.opened()?.files;
        let found = py.detach(|| Ok::<_, Failure>(files.canonicalize(path(name))?))?;
        Ok(PyBytes::new(py, found.as_os_str().as_bytes()).unbind())
    }

    fn chmod(&self, py: Python<'_>, name: &[u8], mode: u32) -> Result {
        use std::os::unix::fs::PermissionsExt as _;
        let files = self.opened()?.files;
        let permissions = std::fs::Permissions::from_mode(mode);
        py.detach(|| Ok(files.set_permissions(path(name), permissions)?))
    }

    /// Sets the times, in nanoseconds since 1970.
    fn set_times(&self, py: Python<'_>, name: &[u8], accessed: i64, modified: i64) -> Result {
        let files = self.opened()?.files;
        let times =
            FileTimes::new().set_accessed(time_of(accessed)).set_modified(time_of(modified));
        py.detach(|| Ok(files.set_times(path(name), times)?))
    }

    /// Joins the pieces of a file; returns how many there were, and how many there are.
    fn defragment(&self, py: Python<'_>, name: &[u8]) -> Result<(usize, usize)> {
        let files = self.opened()?.files;
        py.detach(|| {
            let file = files.options().read(true).write(true).open(path(name))?;
            let done = file.defragment()?;
            Ok((done.runs_before, done.runs_after))
        })
    }
}
