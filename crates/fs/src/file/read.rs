//! Reading an open file.

use std::sync::Arc;

use aquifer_format::file_table::{FileBytes, FileTable};
use aquifer_pool::format::run::Run;
use arc_swap::Guard;

use super::File;
use crate::error::{FsError, Result};
use crate::files::Shared;
use crate::open_inodes::OpenInode;

impl File {
    /// Reads at `offset_bytes`, and returns how many bytes were read: fewer than requested only at
    /// the end of the file. Holes read as zeros. As
    /// [`FileExt::read_at`](std::os::unix::fs::FileExt::read_at).
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?.write_all_at(b"some text", 0)?;
    /// let mut bytes = [0; 100];
    /// let got = files.open_file("/f")?.read_at(&mut bytes, 5)?;
    /// assert_eq!(&bytes[..got], b"text");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotOpenFor`], [`FsError::IsADirectory`], [`FsError::Pool`] if the media cannot be
    /// read.
    pub fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<usize> {
        self.check_reads()?;
        self.files().shared.read_at(self.inode(), bytes, offset_bytes)
    }

    /// Fills `bytes` from `offset_bytes` on. As
    /// [`FileExt::read_exact_at`](std::os::unix::fs::FileExt::read_exact_at).
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.write("/f", "some text")?;
    /// let mut bytes = [0; 4];
    /// files.open_file("/f")?.read_exact_at(&mut bytes, 5)?;
    /// assert_eq!(&bytes, b"text");
    /// let beyond = files.open_file("/f")?.read_exact_at(&mut bytes, 6);
    /// assert_eq!(beyond.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::UnexpectedEof`] if the file ends before; then `bytes` has what there is. Others as
    /// for [`File::read_at`].
    pub fn read_exact_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<()> {
        // `read_at` reads less only at the end of the file.
        let got = self.read_at(bytes, offset_bytes)?;
        if got == bytes.len() {
            Ok(())
        } else {
            // What was read tells where the file ended then: it may have grown since.
            let len_bytes =
                if got > 0 { offset_bytes + got as u64 } else { self.metadata()?.len() };
            Err(FsError::UnexpectedEof { len_bytes })
        }
    }

    /// Reads the whole file.
    pub(crate) fn read_all(&self) -> Result<Vec<u8>> {
        self.check_reads()?;
        let mut bytes = Vec::new();
        loop {
            let (done, len_bytes) = (bytes.len(), self.metadata()?.len());
            let len = usize::try_from(len_bytes).map_err(|_| FsError::no_memory(len_bytes))?;
            if len <= done {
                return Ok(bytes);
            }
            // A hole may be longer than memory, which must not abort the process.
            bytes.try_reserve_exact(len - done).map_err(|_| FsError::no_memory(len_bytes))?;
            bytes.resize(len, 0);
            let got = self.read_at(&mut bytes[done..], done as u64)?;
            bytes.truncate(done + got);
        }
    }

    /// Reads into several buffers in order, each as [`File::read_at`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::io::IoSliceMut;
    ///
    /// files.create_file("/f")?.write_all_at(b"some text", 0)?;
    /// let (mut first, mut second) = ([0; 4], [0; 100]);
    /// let mut buffers = [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
    /// assert_eq!(files.open_file("/f")?.read_vectored_at(&mut buffers, 0)?, 9);
    /// assert_eq!((&first, &second[..5]), (b"some", &b" text"[..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::read_at`].
    pub fn read_vectored_at(
        &self,
        buffers: &mut [std::io::IoSliceMut<'_>],
        offset_bytes: u64,
    ) -> Result<usize> {
        let mut done = 0;
        for buffer in buffers.iter_mut() {
            let got = self.read_at(buffer, offset_bytes.saturating_add(done as u64))?;
            done += got;
            if got < buffer.len() {
                break;
            }
        }
        Ok(done)
    }
}

/// Where the pages of a file are.
enum Pages {
    Run(Run),
    Table(Guard<Arc<FileTable>>),
}

/// Runs `copy` on a state of the file, and retries until the state's layout version (the first part
/// of the tuple) is still current afterwards.
#[inline]
pub(crate) fn copy_of_one_layout<S, T>(
    state: impl Fn() -> Result<(u64, S)>,
    mut copy: impl FnMut(&S) -> Result<T>,
    has_layout: impl Fn(u64) -> Result<bool>,
) -> Result<T> {
    loop {
        let (version, state) = state()?;
        let copied = copy(&state)?;
        // A layout change raises the version before any page can be freed.
        if has_layout(version)? {
            return Ok(copied);
        }
    }
}

impl Shared {
    pub(crate) fn read_at(
        &self,
        open: &OpenInode,
        bytes: &mut [u8],
        offset_bytes: u64,
    ) -> Result<usize> {
        copy_of_one_layout(
            || {
                let (size_bytes, layout_version, pages) = self.pages(open)?;
                Ok((layout_version, (size_bytes, pages)))
            },
            |(size_bytes, pages)| {
                let left = size_bytes.saturating_sub(offset_bytes);
                let len = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                match pages {
                    Pages::Run(run) => self.copy_of_run(*run, offset_bytes, &mut bytes[..len])?,
                    Pages::Table(table) => {
                        let range = FileBytes { offset_bytes, len_bytes: len as u64 };
                        self.copy_out(table, range, &mut bytes[..len])?;
                    }
                }
                Ok(len)
            },
            |version| Ok(self.pool.has_layout(open.number, open.generation, version)?),
        )
    }

    /// Returns the size, the layout version, and where the pages of that version are.
    fn pages(&self, open: &OpenInode) -> Result<(u64, u64, Pages)> {
        if let Some((layout_version, run)) = open.known_run
            && let Some(state) = self.pool.file_state(open.number)
            && (state.generation, state.layout_version) == (open.generation, layout_version)
        {
            return Ok((state.size_bytes, layout_version, Pages::Run(run)));
        }
        let (size_bytes, layout_version, table) = self.state(open)?;
        Ok((size_bytes, layout_version, Pages::Table(table)))
    }

    /// Returns the size, the layout version, and the table of that version.
    pub(crate) fn state(&self, open: &OpenInode) -> Result<(u64, u64, Guard<Arc<FileTable>>)> {
        loop {
            if let Some(table) = open.table()
                && let Some(state) = self.pool.file_state(open.number)
                && table.is_of(open.number, state.generation, state.layout_version)
            {
                return Ok((state.size_bytes, state.layout_version, table));
            }
            let (inode, _) = self.table(open)?;
            if let Some(table) = open.table().filter(|table| table.is_current(&inode)) {
                return Ok((inode.size_bytes, inode.layout_version, table));
            }
            // Another thread has published another table in between.
        }
    }

    /// Copies bytes of a file that is this run from page 0 on, and beyond it a hole.
    fn copy_of_run(&self, run: Run, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        let place = run.bytes();
        let left = place.len_bytes.saturating_sub(offset_bytes);
        let len = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let (inside, beyond) = bytes.split_at_mut(len);
        beyond.fill(0);
        if !inside.is_empty() {
            self.pool.load(place.offset_bytes + offset_bytes, inside)?;
        }
        Ok(())
    }

    /// Copies bytes of a file with this table. The range must not extend beyond the end of the
    /// file.
    pub(crate) fn copy_out(
        &self,
        table: &FileTable,
        range: FileBytes,
        bytes: &mut [u8],
    ) -> Result<()> {
        if let Some(place) = table.contiguous(range) {
            return Ok(self.pool.load(place.offset_bytes, bytes)?);
        }
        for piece in table.pieces(range) {
            let start = (piece.file.offset_bytes - range.offset_bytes) as usize;
            let target = &mut bytes[start..start + piece.file.len_bytes as usize];
            match piece.pool {
                Some(place) => self.pool.load(place.offset_bytes, target)?,
                None => target.fill(0),
            }
        }
        Ok(())
    }
}
