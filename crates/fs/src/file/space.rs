//! Room for a file: allocating it ahead, making holes, finding them.

use std::ops::Range;

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::MAX_FILE_BYTES;
use aquifer_pool::{PoolError, Reservation};

use super::File;
use super::write::{Edit, Write};
use crate::error::{FsError, Result};
use crate::file_table::{FileBytes, FilePage, FilePages};

/// What to do with a range of a file: as `fallocate`.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
/// # let files = aquifer_fs::Files::new(pool);
/// use aquifer_fs::Allocate;
///
/// let file = files.create_file("/f")?;
/// file.write_at(&[1; 12288], 0)?;
/// file.allocate(Allocate::PunchHole, 4096, 4096)?;
/// assert_eq!(file.metadata()?.allocated_bytes(), 8192);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocate {
    /// It has pages, zero where there were none; the file is at least that long.
    Extend,
    /// It has pages; the file keeps its length, and what is behind that is for growing.
    KeepSize,
    /// It is a hole: it reads as zeros, and takes no room where whole pages are inside.
    PunchHole,
    /// It reads as zeros and has pages; the file is at least that long.
    ZeroRange,
}

impl File {
    /// Allocates, zeroes or gives up a range of the file. Holes that are not written to cost nothing.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::Allocate;
    ///
    /// let file = files.create_file("/f")?;
    /// file.allocate(Allocate::KeepSize, 0, 40_960)?; // there will be room
    /// let metadata = file.metadata()?;
    /// assert_eq!((metadata.len(), metadata.allocated_bytes()), (0, 40_960));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Pool`] if the pool is full, and then nothing has happened; [`FsError::NotOpenFor`],
    /// [`FsError::FileTooLarge`], [`FsError::Immutable`].
    pub fn allocate(&self, mode: Allocate, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        self.check_writes()?;
        let end_bytes = offset_bytes.checked_add(len_bytes);
        let end_bytes =
            end_bytes.filter(|end| *end <= MAX_FILE_BYTES).ok_or(FsError::FileTooLarge)?;
        if len_bytes == 0 {
            return Err(FsError::EmptyRange);
        }
        let shared = &self.files().shared;
        let lock = &shared.pool.lock_file(self.inode().number)?;
        let (inode, table) = shared.table(self.inode())?;
        let write = Write { shared, lock, open: self.inode(), inode, table };
        let range = FileBytes { offset_bytes, len_bytes };
        match mode {
            Allocate::PunchHole => write.punch(range),
            Allocate::Extend => write.allocate(range, Some(end_bytes)),
            Allocate::KeepSize => {
                self.inode().note_asked_for();
                write.allocate(range, None)
            }
            Allocate::ZeroRange => {
                write.zero(range)?;
                write.allocate(range, Some(end_bytes))
            }
        }
    }
}

impl File {
    /// The first range of bytes from `offset_bytes` on that is no hole, up to the next hole or the end of the file; `None` if
    /// there is none. Ranges begin and end at whole pages, so they can hold zeros that nobody wrote. It is what `lseek` with
    /// `SEEK_DATA` and `SEEK_HOLE` says.
    ///
    /// ```
    /// # use aquifer_fs::{FileOptions, Files};
    /// # use aquifer_pool::{CreateOptions, OpenOptions, Pool};
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = Pool::create(&path, 1 << 20, &CreateOptions::default(), &OpenOptions::default())?;
    /// # let files = Files::new(pool);
    /// let file = files.open_with("/sparse", &FileOptions::new().read(true).write(true).create(true))?;
    /// file.write_at(b"far away", 100_000)?;
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
                // Bytes that go on in the file and lie elsewhere in the pool.
                (Some(found), Some(_)) => found.end = piece.file.end_bytes(),
            }
        }
        Ok(found)
    }
}

impl Write<'_> {
    /// Gives pages to all of a range.
    fn allocate(&self, range: FileBytes, size_bytes: Option<u64>) -> Result<()> {
        self.check()?;
        let mut edit = Edit::default();
        let mut reservations: Vec<Reservation<'_>> = Vec::new();
        for extent in self.table.extents(range.pages()).filter(|extent| extent.run.is_hole()) {
            let mut first = extent.first.0;
            let end = first + extent.run.pages;
            while first < end {
                let reservation = self.reserve_zeroed(end - first)?;
                let pages = reservation.whole().pages;
                let taken = FilePages { first: FilePage(first), pages };
                edit.splices.push((taken, reservation.runs().to_vec()));
                reservations.push(reservation);
                first += pages;
            }
        }
        if let Some(size_bytes) = size_bytes.filter(|size| *size > self.inode.size_bytes) {
            edit.size_bytes = Some(size_bytes);
            self.zero_behind_end(size_bytes, &mut edit)?;
        }
        self.commit(edit, reservations)
    }

    /// Zero pages in one run, as many as there are of `pages`.
    fn reserve_zeroed(&self, pages: u64) -> Result<Reservation<'_>> {
        let pool = &self.shared.pool;
        match pool.reserve_zeroed(pages, 1) {
            Err(PoolError::Full { largest_free_pages, .. })
                if (1..pages).contains(&largest_free_pages) =>
            {
                Ok(pool.reserve_zeroed(largest_free_pages, 1)?)
            }
            reserved => Ok(reserved?),
        }
    }

    /// Writes zeros over what the file has in a range, up to its end.
    fn zero(&self, range: FileBytes) -> Result<()> {
        self.check()?;
        let len_bytes =
            range.end_bytes().min(self.inode.size_bytes).saturating_sub(range.offset_bytes);
        let inside = FileBytes { len_bytes, ..range };
        for place in self.table.pieces(inside).filter_map(|piece| piece.pool) {
            self.store_zeros(place)?;
        }
        Ok(())
    }

    fn punch(&self, range: FileBytes) -> Result<()> {
        self.check()?;
        let first = range.offset_bytes.div_ceil(PAGE_BYTES);
        let end = range.end_bytes() / PAGE_BYTES;
        // What shares a page with other bytes is zeroed.
        if first >= end {
            self.zero(range)?;
            return self.commit(Edit::default(), Vec::new());
        }
        let before = first * PAGE_BYTES - range.offset_bytes;
        self.zero(FileBytes { len_bytes: before, ..range })?;
        let behind = range.end_bytes() - end * PAGE_BYTES;
        self.zero(FileBytes { offset_bytes: end * PAGE_BYTES, len_bytes: behind })?;
        let hole = FilePages::between(FilePage(first), FilePage(end));
        let edit = Edit { splices: vec![(hole, Vec::new())], ..Edit::default() };
        self.commit(edit, Vec::new())
    }
}
