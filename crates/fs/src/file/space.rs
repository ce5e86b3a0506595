//! Space of a file: allocating it in advance, punching holes, finding data.

use std::ops::Range;

use aquifer_format::file_table::{FileBytes, FilePage, FilePages};
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::MAX_FILE_BYTES;

use super::File;
use super::atomic::whole_pages;
use super::write::{Edit, PIECES_AT_ONCE, Shift, Write, WriteHow};
use crate::error::{FsError, Result};

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
    /// As [`FallocateMode::ZeroRange`], but keep the file's length, as
    /// [`FallocateMode::KeepSize`].
    ZeroKeepSize,
    /// Remove the range: what lies behind it moves to its place, and the file gets shorter. Offset
    /// and length are multiples of 4,096, and the range ends before the end of the file.
    ///
    /// All at once, for readers and after a crash, except that a range in more than 512 pieces may
    /// first be seen as a hole. As an exchange of pages ([`File::exchange_range`]), it makes the
    /// next overwrite of bytes wait until it is durable.
    ///
    /// No byte is copied, but the bytes that move must be durable before the change is. If they lie
    /// in up to 512 pieces, the next sync sees to that. With more, the call writes back all bytes
    /// behind the range before it changes anything, and other writers of the file wait. With a log
    /// shorter than 512 KiB, both limits are one piece for each KiB of it.
    CollapseRange,
    /// Insert a hole: what lies at the offset and behind it moves back, and the file gets longer.
    /// Offset and length are multiples of 4,096, and the offset lies before the end of the file.
    /// Else as [`FallocateMode::CollapseRange`].
    InsertRange,
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
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FallocateMode;
    ///
    /// let log = files.create_file("/log")?;
    /// log.write_all_at(&[1; 8192], 0)?;
    /// log.write_all_at(b"the newest records", 8192)?;
    /// log.allocate(FallocateMode::CollapseRange, 0, 8192)?; // drops the oldest
    /// assert_eq!(files.read("/log")?, b"the newest records");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Pool`] if the pool is full: then holes inside the file may have got pages, no byte
    /// and no length has changed, and of a range of many pieces that was to become a hole a part may
    /// be one;
    /// [`FsError::NotOpenFor`], [`FsError::FileTooLarge`], [`FsError::Immutable`]; of a collapse or
    /// an insertion also [`FsError::NotPages`], and [`FsError::InUse`] if there is a
    /// [`ViewMut`](crate::ViewMut) of the file.
    pub fn allocate(&self, mode: FallocateMode, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        self.allocate_with(mode, offset_bytes, len_bytes, WriteHow::default())
    }

    /// As [`File::allocate`], and `how` says what it does besides, as for [`File::write_with`].
    ///
    /// # Errors
    /// As for [`File::allocate`].
    pub fn allocate_with(
        &self,
        mode: FallocateMode,
        offset_bytes: u64,
        len_bytes: u64,
        how: WriteHow,
    ) -> Result<()> {
        if len_bytes == 0 {
            return Err(FsError::EmptyRange);
        }
        self.check_writes()?;
        let done = self.allocate_locked(mode, FileBytes { offset_bytes, len_bytes }, how);
        if done.is_err() && matches!(mode, FallocateMode::Extend | FallocateMode::ZeroRange) {
            // Pages behind the end, which has not moved. What is left is freed at the closing.
            self.inode().note_ahead();
            let _ = self.files().shared.close_written(self.inode());
        }
        done
    }

    fn allocate_locked(&self, mode: FallocateMode, range: FileBytes, how: WriteHow) -> Result<()> {
        let shared = &self.files().shared;
        let lock = &shared.pool.lock_file(self.inode().number)?;
        let (inode, table) = shared.table(self.inode())?;
        let mut write = Write { shared, lock, open: self.inode(), inode, table, how };
        write.check()?;
        let end_bytes = range.offset_bytes.checked_add(range.len_bytes);
        let end_bytes =
            end_bytes.filter(|end| *end <= MAX_FILE_BYTES).ok_or(FsError::FileTooLarge)?;
        let keeps_size = matches!(mode, FallocateMode::KeepSize | FallocateMode::ZeroKeepSize);
        if keeps_size && end_bytes > write.inode.size_bytes {
            lock.note_room(self.inode().number, true);
        }
        match mode {
            FallocateMode::PunchHole => write.punch(range),
            FallocateMode::Extend => write.allocate(range, Some(end_bytes)),
            FallocateMode::KeepSize => write.allocate(range, None),
            FallocateMode::ZeroRange => write.zero_range(range, Some(end_bytes)),
            FallocateMode::ZeroKeepSize => write.zero_range(range, None),
            FallocateMode::CollapseRange => write.collapse(range),
            FallocateMode::InsertRange => write.insert(range),
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
        Ok(self.next_where(offset_bytes, true)?.1)
    }

    /// Returns the first hole at or after `offset_bytes`, up to the next data or the end of the
    /// file. After the last data there is always one, which may be empty; `None` only if
    /// `offset_bytes` is not inside the file.
    ///
    /// Same as `lseek` with `SEEK_HOLE`, and otherwise as [`File::next_data`].
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
    /// assert_eq!(file.next_hole(5)?, Some(5..98_304));
    /// assert_eq!(file.next_hole(98_304)?, Some(100_008..100_008));
    /// assert_eq!(file.next_hole(100_008)?, None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::read_at`].
    pub fn next_hole(&self, offset_bytes: u64) -> Result<Option<Range<u64>>> {
        let (size_bytes, found) = self.next_where(offset_bytes, false)?;
        Ok(found.or_else(|| (offset_bytes < size_bytes).then_some(size_bytes..size_bytes)))
    }

    /// Returns the length of the file, and the first range of data, or of holes.
    fn next_where(&self, offset_bytes: u64, is_data: bool) -> Result<(u64, Option<Range<u64>>)> {
        self.check_reads()?;
        let (inode, table) = self.files().shared.table(self.inode())?;
        let len_bytes = inode.size_bytes.saturating_sub(offset_bytes);
        let pieces = table.pieces(FileBytes { offset_bytes, len_bytes });
        // Pieces of data can be consecutive in the file and lie elsewhere in the pool.
        let mut found = (pieces.skip_while(|piece| piece.pool.is_some() != is_data))
            .take_while(|piece| piece.pool.is_some() == is_data)
            .map(|piece| piece.file.offset_bytes..piece.file.end_bytes());
        let range = found.next().map(|first| first.start..found.last().unwrap_or(first).end);
        Ok((inode.size_bytes, range))
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
            self.reload()?;
        }
    }

    /// Makes a range read as zeros and have pages. These come first, with the length: without room for
    /// all of them, no byte and no length changes.
    fn zero_range(&mut self, range: FileBytes, size_bytes: Option<u64>) -> Result<()> {
        let (inside, before) = (self.inside(range), self.table.clone());
        self.allocate(range, size_bytes)?;
        self.reload()?;
        // New pages are zero.
        for piece in before.pieces(inside).filter(|piece| piece.pool.is_some()) {
            self.clear(piece.file)?;
        }
        Ok(())
    }

    /// Takes inode and table as they are after a transaction.
    fn reload(&mut self) -> Result<()> {
        (self.inode, self.table) = self.shared.table(self.open)?;
        Ok(())
    }

    /// The part of a range that lies inside the file.
    fn inside(&self, range: FileBytes) -> FileBytes {
        let end_bytes = range.end_bytes().min(self.inode.size_bytes);
        FileBytes { len_bytes: end_bytes.saturating_sub(range.offset_bytes), ..range }
    }

    /// Makes a range read as zeros.
    fn clear(&mut self, range: FileBytes) -> Result<()> {
        let mut edit = Edit::default();
        self.zero(self.inside(range), &mut edit)?;
        if edit.splices.is_empty() {
            return Ok(());
        }
        // A table in more pieces may find no room. A part of the range is zero by now.
        if self.commit(edit, Vec::new()).is_err() {
            let mut pieces = self.table.pieces(self.inside(range)).filter_map(|piece| piece.pool);
            return pieces.try_for_each(|place| self.store_zeros(place));
        }
        self.reload()
    }

    fn punch(&mut self, range: FileBytes) -> Result<()> {
        let first = range.offset_bytes.div_ceil(PAGE_BYTES);
        let end = range.end_bytes() / PAGE_BYTES;
        if first >= end {
            self.clear(range)?;
            return self.commit(Edit::default(), Vec::new());
        }
        // First, as a table in more pieces may take room.
        self.remove(FilePages::between(FilePage(first), FilePage(end)))?;
        self.reload()?;
        // Zero the parts that share a page with other bytes.
        self.clear(FileBytes { len_bytes: first * PAGE_BYTES - range.offset_bytes, ..range })?;
        let len_bytes = range.end_bytes() - end * PAGE_BYTES;
        self.clear(FileBytes { offset_bytes: end * PAGE_BYTES, len_bytes })
    }

    /// Makes a hole, in as many transactions as needed.
    fn remove(&mut self, mut pages: FilePages) -> Result<()> {
        loop {
            let mut extents = self.table.extents(pages);
            let next = extents.nth(self.runs_at_once()).map_or(pages.end(), |left| left.first);
            let hole = FilePages::between(pages.first, next);
            let edit = Edit { splices: vec![(hole, Vec::new())], ..Edit::default() };
            self.commit(edit, Vec::new())?;
            pages = FilePages::between(next, pages.end());
            if pages.pages == 0 {
                return Ok(());
            }
            self.reload()?;
        }
    }

    fn collapse(&mut self, range: FileBytes) -> Result<()> {
        let pages = whole_pages(range.offset_bytes, range.len_bytes)?;
        if range.end_bytes() >= self.inode.size_bytes {
            let reason = "they must end before the end of the file; truncate it instead";
            return Err(FsError::NotPages { reason });
        }
        self.check_not_viewed()?;
        if self.table.extents(pages).nth(self.runs_at_once()).is_some() {
            self.remove(pages)?;
            self.reload()?;
        }
        let size_bytes = self.inode.size_bytes - range.len_bytes;
        self.shift(Shift::Collapse(pages), pages.end(), size_bytes)
    }

    fn insert(&mut self, range: FileBytes) -> Result<()> {
        let pages = whole_pages(range.offset_bytes, range.len_bytes)?;
        let size_bytes = self.inode.size_bytes.checked_add(range.len_bytes);
        let size_bytes =
            size_bytes.filter(|size| *size <= MAX_FILE_BYTES).ok_or(FsError::FileTooLarge)?;
        if range.offset_bytes >= self.inode.size_bytes {
            let reason = "they must begin before the end of the file; make it longer instead";
            return Err(FsError::NotPages { reason });
        }
        self.check_not_viewed()?;
        self.shift(Shift::Insert(pages), pages.first, size_bytes)
    }

    /// Moves the pages from `moved` on, in one transaction.
    ///
    /// A page that moves holds bytes that may not be durable. If a power cut kept the record and
    /// lost them, the page would show older bytes of the file at an offset at which they never
    /// were. So they become durable first, as in an exchange. If it lost the record and kept bytes
    /// stored later, these would be at their old offset: [`FileLock::exchange`] makes such stores
    /// wait.
    ///
    /// [`FileLock::exchange`]: aquifer_pool::FileLock::exchange
    fn shift(&self, shift: Shift, moved: FilePage, size_bytes: u64) -> Result<()> {
        let offset_bytes = moved.0 * PAGE_BYTES;
        let len_bytes = self.inode.size_bytes.saturating_sub(offset_bytes);
        let pieces = self.table.pieces(FileBytes { offset_bytes, len_bytes });
        let mut exposed: Vec<_> = pieces.filter_map(|piece| piece.pool).collect();
        if exposed.len() > self.runs_at_once() {
            self.shared.pool.make_durable(&exposed)?;
            exposed.clear();
        }
        let (shift, size_bytes) = (Some(shift), Some(size_bytes));
        let edit = Edit { shift, size_bytes, exposed, ..Edit::default() };
        self.lock.exchange(|| self.commit(edit, Vec::new()))
    }
}
