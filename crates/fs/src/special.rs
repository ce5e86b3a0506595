//! Named pipes, sockets and devices. A pool keeps their names and metadata, so that whole trees can
//! be stored and restored. It cannot open them: that would need a file system of the kernel.

use std::path::Path;

use aquifer_pool::format::file::FileKind;

use crate::caller::Caller;
use crate::error::Result;
use crate::file::{File, OpenFlags};
use crate::files::Files;
use crate::transaction::New;
use crate::walk::{Last, bytes_of, walk};

/// A file that has no content: what `mknod` makes.
///
/// A device has a number as [`std::os::unix::fs::MetadataExt::rdev`] returns it, or
/// `libc::makedev`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SpecialFile {
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device with this number.
    CharDevice(u64),
    /// A block device with this number.
    BlockDevice(u64),
}

impl SpecialFile {
    pub(crate) fn kind(self) -> FileKind {
        match self {
            SpecialFile::Fifo => FileKind::Fifo,
            SpecialFile::Socket => FileKind::Socket,
            SpecialFile::CharDevice(_) => FileKind::CharDevice,
            SpecialFile::BlockDevice(_) => FileKind::BlockDevice,
        }
    }

    /// The number of a device as in its inode.
    pub(crate) fn device(self) -> u64 {
        match self {
            SpecialFile::Fifo | SpecialFile::Socket => 0,
            SpecialFile::CharDevice(rdev) | SpecialFile::BlockDevice(rdev) => {
                u64::from(libc::major(rdev)) << 32 | u64::from(libc::minor(rdev))
            }
        }
    }
}

impl Files {
    /// Creates a named pipe, a socket or a device with these permissions, less the process's umask:
    /// `mknod`. Any process may make any of them, because none can be opened in a pool
    /// ([`FsError::Special`](crate::FsError::Special)).
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::SpecialFile;
    ///
    /// files.create_special("/null", SpecialFile::CharDevice(libc::makedev(1, 3)), 0o666)?;
    /// let metadata = files.metadata("/null")?;
    /// assert!(metadata.file_type().is_char_device());
    /// assert_eq!(metadata.rdev(), libc::makedev(1, 3));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::create_dir`].
    pub fn create_special(
        &self,
        path: impl AsRef<Path>,
        special: SpecialFile,
        mode: u32,
    ) -> Result<()> {
        let path = bytes_of(path.as_ref());
        let new = new_special(special, mode, &self.shared.caller);
        self.shared.change(|names| {
            let place = walk(names.slots, path, Last::Name)?;
            names.make(&place, path, new).map(drop)
        })
    }

    /// As [`Files::create_special`], but without a name, as
    /// [`FileOptions::create_unnamed`](crate::FileOptions::create_unnamed). It can be given times,
    /// an owner, attributes, and a name.
    ///
    /// # Errors
    /// As for [`Files::create_special`], without those of the path.
    pub fn create_special_unnamed(&self, special: SpecialFile, mode: u32) -> Result<File> {
        let new = new_special(special, mode, &self.shared.caller);
        self.make_unnamed(new, None, OpenFlags::default(), |_| Ok(()))
    }
}

fn new_special(special: SpecialFile, mode: u32, by: &Caller) -> New<'_> {
    New { device: special.device(), ..New::of(special.kind(), mode, &[], by) }
}
