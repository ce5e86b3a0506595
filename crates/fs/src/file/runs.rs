//! Where the bytes of a file lie, and bringing them together.

use std::ops::Range;

use aquifer_pool::format::PAGE_BYTES;

use super::File;
use super::write::{Edit, Write};
use crate::error::Result;
use crate::file_table::{FileBytes, FilePage, FilePages};

/// How much is moved in one transaction: readers and writers of the file wait for no more than this.
const STEP_PAGES: u64 = (16 << 20) / PAGE_BYTES;

/// Bytes of a file that lie one behind the other in the pool, or are a hole.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileRun {
    /// Which bytes of the file.
    pub range: Range<u64>,
    /// Where the first of them lies in the pool; `None` in a hole.
    pub pool_offset_bytes: Option<u64>,
}

/// What [`File::defragment`] has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Defragmented {
    /// Runs before, holes not counted.
    pub runs_before: usize,
    /// Runs after.
    pub runs_after: usize,
    /// Bytes that were moved.
    pub moved_bytes: u64,
}

impl File {
    /// Where the bytes of the file lie, in order and without a gap.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?.write_at(b"far away", 8192)?;
    /// let runs = files.open_file("/f")?.runs()?;
    /// assert_eq!((runs[0].range.clone(), runs[0].pool_offset_bytes), (0..8192, None));
    /// assert_eq!(runs[1].range, 8192..8200);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Pool`](crate::FsError::Pool).
    pub fn runs(&self) -> Result<Vec<FileRun>> {
        let (inode, table) = self.files().shared.table(self.inode())?;
        let all = FileBytes { offset_bytes: 0, len_bytes: inode.size_bytes };
        let run = |piece: crate::file_table::Piece| FileRun {
            range: piece.file.offset_bytes..piece.file.end_bytes(),
            pool_offset_bytes: piece.pool.map(|place| place.offset_bytes),
        };
        Ok(table.pieces(all).map(run).collect())
    }

    /// Moves the content of the file to as few runs as the free space allows, so that views of it are pointers again. Holes stay holes.
    /// Readers and writers go on meanwhile; views keep the pages that they have. If it fails, the file is whole, and a part may have been
    /// moved.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let (one, other) = (files.create_file("/one")?, files.create_file("/other")?);
    /// for page in 0..4 {
    ///     one.write_at(&[1; 4096], page * 4096)?;
    ///     other.write_at(&[2; 4096], page * 4096)?;
    /// }
    /// let done = one.defragment()?;
    /// assert!(done.runs_before > 1 && done.runs_after == 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::InUse`](crate::FsError::InUse) if there is a [`ViewMut`](crate::ViewMut) of the file; those of [`File::write_at`].
    pub fn defragment(&self) -> Result<Defragmented> {
        self.check_writes()?;
        let shared = &self.files().shared;
        let count = || -> Result<(usize, u64)> {
            let table = shared.table(self.inode())?.1;
            let all = FilePages { first: FilePage(0), pages: table.pages() };
            let runs = table.extents(all).filter(|extent| !extent.run.is_hole());
            Ok((runs.count(), table.mapped_pages()))
        };
        let (runs_before, mapped_pages) = count()?;
        let mut done = Defragmented { runs_before, runs_after: runs_before, moved_bytes: 0 };
        if runs_before <= 1 {
            return Ok(done);
        }
        // Where all of it fits, or as much as there is in one piece.
        let mut near_page = match shared.pool.reserve_some(mapped_pages, None, false) {
            Ok(found) if found.whole().pages == mapped_pages => Some(found.whole().start_page),
            Ok(_) => None,
            Err(error) => return Err(error.into()),
        };
        let mut next = FilePage(0);
        while let Some(moved) = self.move_some(next, near_page)? {
            next = moved.pages.end();
            near_page = moved.end_page;
            done.moved_bytes += moved.pages.pages * PAGE_BYTES;
        }
        done.runs_after = count()?.0;
        Ok(done)
    }

    /// Moves the next pages behind a page of the pool, if that is free; `None` if there are no more.
    fn move_some(&self, from: FilePage, near_page: Option<u64>) -> Result<Option<Moved>> {
        let shared = &self.files().shared;
        let lock = &shared.pool.lock_file(self.inode().number)?;
        let (inode, table) = shared.table(self.inode())?;
        let rest = FilePages::between(from, FilePage(table.pages()));
        let Some(extent) = table.extents(rest).find(|extent| !extent.run.is_hole()) else {
            return Ok(None);
        };
        let write = Write { shared, lock, open: self.inode(), inode, table };
        write.check()?;
        write.check_not_viewed()?;
        let wanted = extent.run.pages.min(STEP_PAGES);
        let reservation = shared.pool.reserve_some(wanted, near_page, false)?;
        let target = reservation.whole();
        let pages = FilePages { first: extent.first, pages: target.pages };
        write.copy_pages(extent.run.bytes().offset_bytes, target)?;
        let edit = Edit { splices: vec![(pages, reservation.runs().to_vec())], ..Edit::default() };
        write.relocate(edit, vec![reservation])?;
        Ok(Some(Moved { pages, end_page: Some(target.end_page()) }))
    }
}

/// Pages that were moved, and the page of the pool behind them.
struct Moved {
    pages: FilePages,
    end_page: Option<u64>,
}
