//! Where the bytes of a file lie, and defragmenting it.

use std::ops::Range;

use aquifer_format::file_table::{FileBytes, FilePage, FilePages};
use aquifer_pool::PoolError;
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::run::Run;

use super::File;
use super::write::{Edit, Write, WriteHow};
use crate::error::Result;

/// How much is moved in one transaction: it bounds how long readers and writers of the file wait.
const STEP_PAGES: u64 = (16 << 20) / PAGE_BYTES;

/// Consecutive bytes of a file that are also consecutive in the pool, or a hole.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileRun {
    /// The bytes of the file.
    pub range: Range<u64>,
    /// Where the first of them lies in the pool; `None` in a hole.
    pub pool_offset_bytes: Option<u64>,
}

/// What [`File::defragment`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Defragmented {
    /// Runs before the call, holes not counted.
    pub runs_before: usize,
    /// Runs after the call, holes not counted.
    pub runs_after: usize,
    /// Bytes that were moved.
    pub moved_bytes: u64,
}

impl File {
    /// Returns where the bytes of the file lie, in order and without a gap.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?.write_all_at(b"far away", 8192)?;
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
        let run = |piece: aquifer_format::file_table::Piece| FileRun {
            range: piece.file.offset_bytes..piece.file.end_bytes(),
            pool_offset_bytes: piece.pool.map(|place| place.offset_bytes),
        };
        Ok(table.pieces(all).map(run).collect())
    }

    /// Moves the content of the file to fewer runs if the free space allows, so that views of it
    /// are pointers again.
    ///
    /// The number of runs never grows; where there is no better place nothing is moved. Holes stay
    /// holes. Other threads and processes can read and write the file during the call; views keep
    /// the pages that they have. If the call fails, the file is intact, and a part may have been
    /// moved.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let (one, other) = (files.create_file("/one")?, files.create_file("/other")?);
    /// for page in 0..4 {
    ///     one.write_all_at(&[1; 4096], page * 4096)?;
    ///     other.write_all_at(&[2; 4096], page * 4096)?;
    /// }
    /// let done = one.defragment()?;
    /// assert!(done.runs_before > 1 && done.runs_after == 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::InUse`](crate::FsError::InUse) if there is a [`ViewMut`](crate::ViewMut) of the
    /// file; those of [`File::write_at`].
    pub fn defragment(&self) -> Result<Defragmented> {
        self.check_writes()?;
        let shared = &self.files().shared;
        let count = || -> Result<usize> {
            let table = shared.table(self.inode())?.1;
            let all = FilePages { first: FilePage(0), pages: table.pages() };
            Ok(table.extents(all).filter(|extent| !extent.run.is_hole()).count())
        };
        let runs_before = count()?;
        let mut done = Defragmented { runs_before, runs_after: runs_before, moved_bytes: 0 };
        if runs_before <= 1 {
            return Ok(done);
        }
        let (mut next, mut behind) = (FilePage(0), None);
        while let Some(step) = self.move_some(next, behind)? {
            (next, behind) = (step.next, Some(step.end_page));
            done.moved_bytes += step.moved_pages * PAGE_BYTES;
        }
        done.runs_after = count()?;
        Ok(done)
    }

    /// Moves the next extent from page `from` on, or its first [`STEP_PAGES`], if that saves a run.
    /// It goes directly after the page before it in the file, which ends at page `behind` of the
    /// pool, or to a free range with room for the next extent too. Otherwise it stays. `None` if
    /// there are no more extents.
    fn move_some(&self, from: FilePage, behind: Option<u64>) -> Result<Option<Step>> {
        let shared = &self.files().shared;
        let lock = &shared.pool.lock_file(self.inode().number)?;
        let (inode, table) = shared.table(self.inode())?;
        let rest = FilePages::between(from, FilePage(table.pages()));
        let mut extents = table.extents(rest).filter(|extent| !extent.run.is_hole());
        let Some(extent) = extents.next() else { return Ok(None) };
        // An extent after a hole is a separate run in any case.
        let next = extents.next().filter(|next| next.first == extent.pages().end());
        let behind = behind.filter(|_| extent.first == from);
        let write = Write {
            shared,
            lock,
            open: self.inode(),
            inode,
            table: table.clone(),
            how: WriteHow::default(),
        };
        write.check()?;
        write.check_not_viewed()?;
        let reserve = |pages, near_page| match shared.pool.reserve_some(pages, near_page, false) {
            Err(PoolError::Full { .. }) => Ok(None),
            reserved => reserved.map(Some),
        };
        // Reserve only to find a place; dropping the reservation gives the pages back.
        let place = |pages, near_page| -> Result<Option<Run>> {
            Ok(reserve(pages, near_page)?.map(|reservation| reservation.whole()))
        };
        let fits_behind = |page| -> Result<bool> {
            let run = place(extent.run.pages, Some(page))?;
            Ok(run == Some(Run { start_page: page, pages: extent.run.pages }))
        };
        let start = match (behind, next) {
            // It is there already.
            (Some(page), _) if page == extent.run.start_page => None,
            (Some(page), _) if fits_behind(page)? => Some(page),
            (_, None) => None,
            (_, Some(next)) => {
                let least_pages = extent.run.pages + next.run.pages;
                let roomy = place(table.mapped_pages(), None)?;
                let roomy = roomy.filter(|run| run.pages >= least_pages);
                roomy.map(|run| run.start_page)
            }
        };
        let wanted = extent.run.pages.min(STEP_PAGES);
        let found = match start {
            Some(page) => reserve(wanted, start)?
                .filter(|found| found.whole() == Run { start_page: page, pages: wanted }),
            None => None,
        };
        let Some(reservation) = found else {
            let (next, end_page) = (extent.pages().end(), extent.run.end_page());
            return Ok(Some(Step { next, moved_pages: 0, end_page }));
        };
        let target = reservation.whole();
        let pages = FilePages { first: extent.first, pages: target.pages };
        write.copy_pages(extent.run.bytes().offset_bytes, target)?;
        let edit = Edit { splices: vec![(pages, reservation.runs().to_vec())], ..Edit::default() };
        write.relocate(edit, vec![reservation])?;
        let (next, moved_pages) = (pages.end(), pages.pages);
        Ok(Some(Step { next, moved_pages, end_page: target.end_page() }))
    }
}

/// The result of one step of [`File::defragment`].
struct Step {
    /// The page of the file after the extent.
    next: FilePage,
    /// 0 if the extent stays where it is.
    moved_pages: u64,
    /// The page of the pool after the extent.
    end_page: u64,
}
