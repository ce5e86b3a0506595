//! A file that appears at its path only when it is complete, even if the creating process is
//! killed.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use aquifer_sys::{file_name, io as file_io, random};

/// A file that is being made for a path.
pub(super) struct NewFile {
    file: File,
    path: PathBuf,
    /// Its temporary path, on file systems that do not support unnamed files. A killed process
    /// leaves the file there.
    meanwhile: Option<PathBuf>,
}

impl NewFile {
    /// Creates an empty file, with these permissions minus the process's umask.
    pub(super) fn make(path: &Path, mode: u32) -> io::Result<NewFile> {
        match file_name::unnamed(directory_of(path), mode) {
            Ok(file) => Ok(NewFile { file, path: path.to_path_buf(), meanwhile: None }),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Self::beside(path, mode),
            Err(error) => Err(error),
        }
    }

    /// Creates it under another name in the same directory.
    fn beside(path: &Path, mode: u32) -> io::Result<NewFile> {
        let name = format!(".aquifer-{:016x}.new", random::next_u64()?);
        let meanwhile = directory_of(path).join(name);
        let mut options = File::options();
        let file = options.read(true).write(true).create_new(true).mode(mode).open(&meanwhile)?;
        Ok(NewFile { file, path: path.to_path_buf(), meanwhile: Some(meanwhile) })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Puts the file at its path, durably; an error if the path exists. After an error the file is
    /// removed.
    pub(super) fn publish(mut self) -> io::Result<()> {
        match &self.meanwhile {
            None => file_name::link(self.file.as_fd(), &self.path)?,
            Some(meanwhile) => file_name::rename_new(meanwhile, &self.path)?,
        }
        self.meanwhile = None;
        match file_io::sync_directory(directory_of(&self.path)) {
            // File systems without storage have nothing to sync.
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => {
                let _ = std::fs::remove_file(&self.path);
                Err(error)
            }
            _ => Ok(()),
        }
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(meanwhile) = &self.meanwhile {
            let _ = std::fs::remove_file(meanwhile);
        }
    }
}

fn directory_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_at_its_path_when_it_is_published() {
        for make in [NewFile::make, NewFile::beside] {
            let directory = tempfile::tempdir().unwrap();
            let names = || {
                let entries = std::fs::read_dir(directory.path()).unwrap();
                entries.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>()
            };
            let path = directory.path().join("data");
            let file = make(&path, 0o600).unwrap();
            assert!(!path.exists());
            drop(file);
            assert!(names().is_empty(), "given up: {:?}", names());
            let [first, second] = [(); 2].map(|()| make(&path, 0o600).unwrap());
            first.file().set_len(7).unwrap();
            first.publish().unwrap();
            let refused = second.publish().unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::EEXIST));
            assert_eq!(std::fs::metadata(&path).unwrap().len(), 7);
            assert_eq!(names(), ["data"]);
        }
    }
}
