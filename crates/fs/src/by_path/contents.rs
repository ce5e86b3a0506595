//! Whole files: reading, writing and copying them by path.

use std::path::Path;

use aquifer_format::PAGE_BYTES;

use crate::error::{FsError, Result};
use crate::files::Files;

/// How much [`Files::copy`] copies at a time.
const COPIED_AT_ONCE_BYTES: u64 = 1 << 20;

impl Files {
    /// Reads a file. As [`std::fs::read`].
    ///
    /// The bytes are those of one moment only if no other thread or process writes the file
    /// meanwhile; [`Files::view`] shows them without a copy.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.write("/f", "text")?;
    /// assert_eq!(files.read("/f")?, b"text");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::open_file`]; [`FsError::IsADirectory`].
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>> {
        self.open_file(path)?.read_all()
    }

    /// Reads a file of UTF-8. As [`std::fs::read_to_string`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.write("/f", "text")?;
    /// assert_eq!(files.read_to_string("/f")?, "text");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::read`]; [`FsError::NotUtf8`].
    pub fn read_to_string(&self, path: impl AsRef<Path>) -> Result<String> {
        let path = path.as_ref();
        String::from_utf8(self.read(path)?).map_err(|_| FsError::NotUtf8 { path: path.to_owned() })
    }

    /// Writes a file: creates it if it does not exist, replaces its content if it does. As
    /// [`std::fs::write`].
    ///
    /// Other threads and processes can see it empty or incomplete. To replace it in one step,
    /// write a file [without a name](crate::FileOptions::create_unnamed) and give it this one.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.write("/f", "a long text")?;
    /// files.write("/f", [1, 2, 3])?;
    /// assert_eq!(files.metadata("/f")?.len(), 3);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::create_file`] and [`File::write_all_at`](crate::File::write_all_at).
    pub fn write(&self, path: impl AsRef<Path>, contents: impl AsRef<[u8]>) -> Result<()> {
        self.create_file(path)?.write_all_at(contents.as_ref(), 0)
    }

    /// Copies content and permissions of a file, and returns its length. Holes stay holes. Else as
    /// [`std::fs::copy`]: an existing file is overwritten. That function empties a file which is
    /// copied to itself; here that is an error, and the file stays as it is.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.write("/f", "text")?;
    /// assert_eq!(files.copy("/f", "/g")?, 4);
    /// assert_eq!(files.read("/g")?, b"text");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::read`] and [`Files::write`]; [`FsError::NotAFile`] if `from` is a directory;
    /// [`FsError::Options`] if both paths lead to one file, also by links.
    pub fn copy(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<u64> {
        let reader = self.open_file(from.as_ref())?;
        let metadata = reader.metadata()?;
        if !metadata.is_file() {
            return Err(FsError::NotAFile { path: from.as_ref().to_owned() });
        }
        let mut options = self.options();
        options.write(true).create(true).mode(metadata.mode() & 0o7777);
        let writer = options.open(to.as_ref())?;
        // Before the target is truncated, and of what is open: names may change meanwhile.
        if writer.node() == reader.node() {
            return Err(FsError::Options {
                path: to.as_ref().to_owned(),
                reason: "source and target are the same file; copy to another name",
            });
        }
        writer.set_len(0)?;
        writer.set_permissions(metadata.permissions())?;
        let most = metadata.len().clamp(PAGE_BYTES, COPIED_AT_ONCE_BYTES);
        let mut buffer = vec![0; most as usize];
        let mut copied = 0;
        let len_bytes = loop {
            // Before the look for data: what is appended in between is data behind this length, and
            // must not become a hole.
            let len_bytes = reader.metadata()?.len();
            let Some(data) = reader.next_data(copied)? else { break copied.max(len_bytes) };
            copied = data.start;
            while copied < data.end {
                let len = buffer.len().min((data.end - copied) as usize);
                let got = reader.read_at(&mut buffer[..len], copied)?;
                if got == 0 {
                    break;
                }
                writer.write_all_at(&buffer[..got], copied)?;
                copied += got as u64;
            }
        };
        // A hole at the end has no data.
        writer.set_len(len_bytes)?;
        Ok(len_bytes)
    }
}
