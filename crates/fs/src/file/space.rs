//! Space of a file: allocating it in advance, punching holes, finding data.

use std::ops::Range;

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::MAX_FILE_BYTES;

use super::File;
use super::write::{Edit, PIECES_AT_ONCE, REMOVED_AT_ONCE_RUNS, Write};
use crate::error::{FsError, Result};
use crate::file_table::{FileBytes, FilePage, FilePages};

/// What to do with a range of a file, as for `fallocate`.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// use aquifer_fs::FallocateMode;
///
/// let file = files.create_file("/f")?;
/// file.write_all_at(&[1; 12288], 0)?;
/// file.allocate(FallocateMode::PunchHole, 4096, 4096)?;
/// assert_eq!(file.metadata()?.allocated_bytes(), 8192);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FallocateMode {
    /// Add pages to the range, zeroed where it had none; extend the file to its end.
    Extend,
    /// Add pages to the range, but keep the file's length. Pages beyond the end are kept for
    /// growing, until the file is truncated.
    KeepSize,
    /// Make the range a hole: it reads as zeros, and its whole pages are freed.
    PunchHole,
    /// Make the range read as zeros and have pages; extend the file to its end.
    ZeroRange,
}

impl File {
    /// Allocates, zeroes or frees a range of the file. Holes that are never written cost nothing.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FallocateMode;
    ///
    /// let file = files.create_file("/f")?;
    /// file.allocate(FallocateMode::KeepSize, 0, 40_960)?; // reserves room
    /// let metadata = file.metadata()?;
    /// assert_eq!((metadata.len(), metadata.allocated_bytes()), (0, 40_960));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Pool`] if the pool is full, and then a part may have been done;
    /// [`FsError::NotOpenFor`], [`FsError::FileTooLarge`], [`FsError::Immutable`].
    pub fn allocate(&self, mode: FallocateMode, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        if len_bytes == 0 {
            return Err(FsError::EmptyRange);
        }
        self.check_writes()?;
        let end_bytes = offset_bytes.checked_add(len_bytes);
        let end_bytes =
            end_bytes.filter(|end| *end <= MAX_FILE_BYTES).ok_or(FsError::FileTooLarge)?;
        let shared = &self.files().shared;
        let lock = &shared.pool.lock_file(self.inode().number)?;
        let (inode, table) = shared.table(self.inode())?;
        let mut write = Write { shared, lock, open: self.inode(), inode, table };
        let range = FileBytes { offset_bytes, len_bytes };
        match mode {
            FallocateMode::PunchHole => write.punch(range),
            FallocateMode::Extend => write.allocate(range, Some(end_bytes)),
            FallocateMode::KeepSize => {
                lock.note_room(self.inode().number, true);
                write.allocate(range, None)
            }
            FallocateMode::ZeroRange => {
                write.clear(range)?;
                write.allocate(range, Some(end_bytes))
            }
        }
    }
}

impl File {
    /// Returns the first range of data (no hole) at or after `offset_bytes`, up to the next hole or
    /// the end of the file; `None` if there is none.
    ///
    /// Ranges start and end at whole pages, so they can contain zeros that were never written. Same
    /// as `lseek` with `SEEK_DATA` and `SEEK_HOLE`.
    ///
    /// ```
    /// # use aquifer_fs::Files;
    /// # use aquifer_pool::Pool;
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = Pool::create(&path, 1 << 20)?;
    /// # let files = Files::new(pool);
    /// let file = files.create_new_file("/sparse")?;
    /// file.write_all_at(b"far away", 100_000)?;
    /// assert_eq!(file.next_data(0)?, Some(98_304..100_008));
    /// assert_eq!(file.next_data(100_008)?, None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::read_at`].
    pub fn next_data(&self, offset_bytes: u64) -> Result<Option<Range<u64>>> {
        self.check_reads()?;
        let (inode, table) = self.files().shared.table(self.inode())?;
        let len_bytes = inode.size_bytes.saturating_sub(offset_bytes);
        let mut found: Option<Range<u64>> = None;
        for piece in table.pieces(FileBytes { offset_bytes, len_bytes }) {
            match (&mut found, piece.pool) {
                (None, None) => {}
                (Some(_), None) => break,
                (None, Some(_)) => found = Some(piece.file.offset_bytes..piece.file.end_bytes()),
                // Consecutive in the file, elsewhere in the pool.
                (Some(found), Some(_)) => found.end = piece.file.end_bytes(),
            }
        }
        Ok(found)
    }
}

impl Write<'_> {
    /// Adds pages to all of a range, in as many transactions as needed.
    pub fn allocate(&mut self, range: FileBytes, size_bytes: Option<u64>) -> Result<()> {
        self.check()?;
        loop {
            let mut edit = Edit::default();
            let pages = range.pages();
            let reserve = |hole| self.reserve(hole, true);
            let fill = |_, _| Ok(());
            let (reservations, end) =
                self.take_pages(pages, PIECES_AT_ONCE, None, &mut edit, reserve, fill)?;
            let is_last = end == pages.end();
            let size_bytes = size_bytes.filter(|size| is_last && *size > self.inode.size_bytes);
            if let Some(size_bytes) = size_bytes {
                edit.size_bytes = Some(size_bytes);
                self.zero_behind_end(size_bytes, &mut edit)?;
            }
            self.commit(edit, reservations)?;
            if is_last {
                return Ok(());
            }
            (self.inode, self.table) = self.shared.table(self.open)?;
        }
    }

    /// The part of a range that lies inside the file.
    fn inside(&self, range: FileBytes) -> FileBytes {
        let end_bytes = range.end_bytes().min(self.inode.size_bytes);
        FileBytes { len_bytes: end_bytes.saturating_sub(range.offset_bytes), ..range }
    }

    /// Makes a range read as zeros.
    fn clear(&mut self, range: FileBytes) -> Result<()> {
        self.check()?;
        let mut edit = Edit::default();
        self.zero(self.inside(range), &mut edit)?;
        if !edit.splices.is_empty() {
            self.commit(edit, Vec::new())?;
            (self.inode, self.table) = self.shared.table(self.open)?;
        }
        Ok(())
    }

    fn punch(&mut self, range: FileBytes) -> Result<()> {
        self.check()?;
        let first = range.offset_bytes.div_ceil(PAGE_BYTES);
        let end = range.end_bytes() / PAGE_BYTES;
        // Zero the parts that share a page with other bytes.
        if first >= end {
            self.clear(range)?;
            return self.commit(Edit::default(), Vec::new());
        }
        self.clear(FileBytes { len_bytes: first * PAGE_BYTES - range.offset_bytes, ..range })?;
        let len_bytes = range.end_bytes() - end * PAGE_BYTES;
        self.clear(FileBytes { offset_bytes: end * PAGE_BYTES, len_bytes })?;
        self.remove(FilePages::between(FilePage(first), FilePage(end)))
    }

    /// Makes a hole, in as many transactions as needed.
    fn remove(&mut self, mut pages: FilePages) -> Result<()> {
        loop {
            let mut extents = self.table.extents(pages);
            let next = extents.nth(REMOVED_AT_ONCE_RUNS).map_or(pages.end(), |left| left.first);
            let hole = FilePages::between(pages.first, next);
            let edit = Edit { splices: vec![(hole, Vec::new())], ..Edit::default() };
            self.commit(edit, Vec::new())?;
            pages = FilePages::between(next, pages.end());
            if pages.pages == 0 {
                return Ok(());
            }
            (self.inode, self.table) = self.shared.table(self.open)?;
        }
    }
}
