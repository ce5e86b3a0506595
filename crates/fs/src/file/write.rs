//! Writing an open file.

use std::cell::RefCell;
use std::sync::Arc;

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::{FileInode, MAX_FILE_BYTES};
use aquifer_pool::format::run::Run;
use aquifer_pool::media::ByteRange;
use aquifer_pool::{
    ChangeSlots, FileLock, InodeUse, Pool, PoolError, Reservation, Transaction, Turn,
};

use super::File;
use crate::error::{FsError, Result};
use crate::file_table::{FileBytes, FilePage, FilePages, FileTable, Piece};
use crate::files::{Shared, now_ns};
use crate::names::Names;
use crate::open_inodes::OpenInode;

/// Zeros to copy from.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
/// A file that grows is given so much more than it needs at most.
const MOST_AHEAD_BYTES: u64 = 8 << 20;
/// How much is copied between two signs to other writers of the file that it goes on.
const COPIED_AT_ONCE_BYTES: usize = 16 << 20;
/// Whole pages of a file that are to read as zeros are replaced by zero pages if they are so many, and else zeroed in place.
const LEAST_REPLACED_PAGES: u64 = 512;
/// So many times in one transaction at most.
const MOST_REPLACED: usize = 16;
/// Runs that one transaction takes away from a file at most.
pub(super) const REMOVED_AT_ONCE_RUNS: usize = 512;
/// What need not be there all at once is given so many pieces in one transaction, which every log has room for.
pub(super) const PIECES_AT_ONCE: usize = 64;

impl File {
    /// Writes all of `bytes` from `offset_bytes` on, or at the end of a file that is open for appending. Where that is behind the end
    /// of the file, what is in between reads as zeros.
    ///
    /// Others see it as it is copied, in words of eight bytes; with [`File::write_atomic`] they see all of it or nothing.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.write_at(b"text", 5)?;
    /// let mut bytes = [1; 9];
    /// files.open_file("/f")?.read_at(&mut bytes, 0)?;
    /// assert_eq!(&bytes, b"\0\0\0\0\0text");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotOpenFor`], [`FsError::FileTooLarge`], [`FsError::Immutable`]; [`FsError::Pool`] if the pool is full, and then
    /// a part of it may have been written.
    pub fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        self.write_somewhere(bytes, offset_bytes).map(drop)
    }

    /// Writes, and says behind which byte.
    pub(super) fn write_somewhere(&self, bytes: &[u8], offset_bytes: u64) -> Result<u64> {
        self.check_writes()?;
        if bytes.is_empty() {
            return Ok(offset_bytes);
        }
        let shared = &self.files().shared;
        let lock = &shared.pool.lock_file(self.inode().number)?;
        let range = FileBytes { offset_bytes, len_bytes: bytes.len() as u64 };
        if !self.opened.options.appends() && shared.overwrite(lock, self.inode(), bytes, range)? {
            return Ok(range.end_bytes());
        }
        let (inode, table) = shared.table(self.inode())?;
        let offset_bytes =
            if self.opened.options.appends() { inode.size_bytes } else { offset_bytes };
        let range = FileBytes { offset_bytes, len_bytes: bytes.len() as u64 };
        let mut write = Write { shared, lock, open: self.inode(), inode, table };
        write.write(bytes, range)?;
        Ok(range.end_bytes())
    }

    /// [`File::write_at`] of one buffer after the other. Another writer may come in between.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::io::IoSlice;
    ///
    /// let file = files.create_file("/f")?;
    /// assert_eq!(file.write_vectored_at(&[IoSlice::new(b"some "), IoSlice::new(b"text")], 0)?, 9);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::write_at`].
    pub fn write_vectored_at(
        &self,
        buffers: &[std::io::IoSlice<'_>],
        offset_bytes: u64,
    ) -> Result<usize> {
        let mut done = 0;
        for buffer in buffers {
            self.write_at(buffer, offset_bytes.saturating_add(done as u64))?;
            done += buffer.len();
        }
        Ok(done)
    }

    /// Gives the file this length: what was behind it is gone, what is new reads as zeros and takes no room.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.set_len(500_000)?; // a hole
    /// let metadata = file.metadata()?;
    /// assert_eq!((metadata.len(), metadata.allocated_bytes()), (500_000, 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::write_at`]; [`FsError::NotResizable`].
    pub fn set_len(&self, size_bytes: u64) -> Result<()> {
        self.check_writes().map_err(|_| FsError::NotResizable)?;
        if size_bytes > MAX_FILE_BYTES {
            return Err(FsError::FileTooLarge);
        }
        let shared = &self.files().shared;
        let lock = &shared.pool.lock_file(self.inode().number)?;
        let (inode, table) = shared.table(self.inode())?;
        let mut write = Write { shared, lock, open: self.inode(), inode, table };
        match size_bytes <= write.inode.size_bytes {
            true => write.shrink(size_bytes),
            false => write.extend(size_bytes),
        }
    }
}

/// Copied at a time when pages are moved.
const COPIED_BYTES: u64 = 1 << 20;

/// A file that is being written, locked.
pub(crate) struct Write<'a> {
    pub shared: &'a Shared,
    pub lock: &'a FileLock<'a>,
    pub open: &'a OpenInode,
    pub inode: FileInode,
    pub table: Arc<FileTable>,
}

/// The turn of a call that has one to wait for the reservations of others.
pub(crate) type InTurn<'t, 'a> = Option<&'t RefCell<Turn<'a>>>;

/// What changes in an inode and its table.
#[derive(Default)]
pub(crate) struct Edit<'a> {
    /// Pages that get these runs.
    pub splices: Vec<(FilePages, Vec<Run>)>,
    /// Of these runs, such as were taken because they are zero.
    pub zeros: Vec<Reservation<'a>>,
    pub size_bytes: Option<u64>,
    /// Bytes of the pool that come to be inside of the file, besides those of reservations.
    pub exposed: Vec<ByteRange>,
}

impl Write<'_> {
    pub fn check(&self) -> Result<()> {
        match self.inode.is_immutable {
            true => {
                Err(FsError::Immutable { path: format!("(inode {})", self.open.number).into() })
            }
            false => Ok(()),
        }
    }

    /// An error if somebody has a view of the file that can be stored to: its pages stay where they are. With the file's lock.
    pub fn check_not_viewed(&self) -> Result<()> {
        match self.shared.pool.is_used(self.open.number, InodeUse::Writable)? {
            true => Err(FsError::InUse { path: format!("(inode {})", self.open.number).into() }),
            false => Ok(()),
        }
    }

    /// Writes, in as many transactions as it has to be: each leaves a longer beginning of `bytes` there.
    pub fn write(&mut self, mut bytes: &[u8], mut range: FileBytes) -> Result<()> {
        self.check()?;
        let end_bytes = range.offset_bytes.checked_add(range.len_bytes);
        end_bytes.filter(|end| *end <= MAX_FILE_BYTES).ok_or(FsError::FileTooLarge)?;
        loop {
            let done_bytes = self.write_some(bytes, range)?;
            if done_bytes == range.len_bytes {
                return Ok(());
            }
            bytes = &bytes[done_bytes as usize..];
            range.offset_bytes += done_bytes;
            range.len_bytes -= done_bytes;
            (self.inode, self.table) = self.shared.table(self.open)?;
        }
    }

    /// Writes as much of `bytes`, which belongs at `range`, as pages can be reserved for at a time; how much.
    fn write_some(&self, bytes: &[u8], range: FileBytes) -> Result<u64> {
        let mut edit = Edit::default();
        let (reservations, filled_to) = self.fill_holes(bytes, range, None, &mut edit)?;
        let end_bytes = range.end_bytes().min(filled_to.0 * PAGE_BYTES);
        let done = FileBytes { len_bytes: end_bytes - range.offset_bytes, ..range };
        if end_bytes > self.inode.size_bytes {
            edit.size_bytes = Some(end_bytes);
            self.zero_behind_end(range.offset_bytes, &mut edit)?;
            self.expose(self.inode.size_bytes.max(range.offset_bytes), end_bytes, &mut edit);
        }
        // Where there were pages before, which may be inside of the file or behind its end.
        self.copy_in(&bytes[..done.len_bytes as usize], done)?;
        self.commit(edit, reservations)?;
        Ok(done.len_bytes)
    }

    /// Copies bytes to pages that are no file's yet.
    pub fn put(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        put(&self.shared.pool, self.lock, offset_bytes, bytes)
    }

    /// Writes zeros to pages that are no file's yet.
    pub fn put_zeros(&self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        let mut done = 0;
        while done < len_bytes {
            let part = (len_bytes - done).min(ZEROS.len() as u64);
            // SAFETY: the pages are reserved: no file has them yet.
            unsafe { self.shared.pool.store(offset_bytes + done, &ZEROS[..part as usize])? };
            self.lock.note_progress();
            done += part;
        }
        Ok(())
    }

    /// Copies the part of `bytes`, which belongs at `range`, that the file has pages for.
    fn copy_in(&self, bytes: &[u8], range: FileBytes) -> Result<()> {
        for piece in self.table.pieces(range) {
            let Some(place) = piece.pool else { continue };
            let start = (piece.file.offset_bytes - range.offset_bytes) as usize;
            let part = &bytes[start..start + piece.file.len_bytes as usize];
            self.store(place, part)?;
        }
        Ok(())
    }

    /// Writes over bytes of a page that the file has.
    fn store(&self, place: ByteRange, bytes: &[u8]) -> Result<()> {
        self.lock.settle()?;
        self.put(place.offset_bytes, bytes)
    }

    /// Writes zeros over bytes of pages that the file has.
    pub fn store_zeros(&self, place: ByteRange) -> Result<()> {
        self.lock.settle()?;
        self.put_zeros(place.offset_bytes, place.len_bytes)
    }

    /// Takes pages where `range` has none, and fills them: with `bytes`, and zeros around them. As [`Write::take_pages`].
    fn fill_holes(
        &self,
        bytes: &[u8],
        range: FileBytes,
        turn: InTurn<'_, '_>,
        edit: &mut Edit<'_>,
    ) -> Result<(Vec<Reservation<'_>>, FilePage)> {
        let pages = range.pages();
        let reserve = |hole: FilePages| {
            // At the end of the table, more than is needed, so that the next write finds room there.
            let end = hole.end();
            let is_at_end = end.0 >= self.table.pages()
                && end == pages.end()
                && end.0 * PAGE_BYTES >= self.inode.size_bytes;
            let ahead_pages = if is_at_end { self.ahead_pages() } else { 0 };
            if ahead_pages > 0 {
                self.open.note_ahead();
            }
            self.reserve(FilePages { pages: hole.pages + ahead_pages, ..hole }, false)
        };
        let fill = |hole: FilePages, run| self.fill(run, hole.first, bytes, range);
        self.take_pages(pages, PIECES_AT_ONCE, turn, edit, reserve, fill)
    }

    /// Takes new pages where `pages` has none, from the front on: `reserve` is told a hole, and returns pages for its beginning, which `fill`
    /// writes to. Ends after so many pieces, or where no more can be reserved at a time: returns what was reserved, and the page up to which
    /// there is no hole any more.
    pub fn take_pages<'r>(
        &self,
        pages: FilePages,
        most_pieces: usize,
        turn: InTurn<'_, '_>,
        edit: &mut Edit<'_>,
        reserve: impl Fn(FilePages) -> aquifer_pool::Result<Reservation<'r>>,
        fill: impl Fn(FilePages, Run) -> Result<()>,
    ) -> Result<(Vec<Reservation<'r>>, FilePage)> {
        let mut reservations = Vec::new();
        for extent in self.table.extents(pages).filter(|extent| extent.run.is_hole()) {
            let mut hole = extent.pages();
            while hole.pages > 0 {
                let reservation = match reservations.len() < most_pieces {
                    true => self.one_more(&reservations, turn, hole, || reserve(hole))?,
                    false => None,
                };
                let Some(reservation) = reservation else { return Ok((reservations, hole.first)) };
                fill(hole, reservation.whole())?;
                let taken = FilePages { pages: reservation.whole().pages, ..hole };
                edit.splices.push((taken, reservation.runs().to_vec()));
                reservations.push(reservation);
                hole = FilePages::between(taken.end(), hole.end());
            }
        }
        Ok((reservations, pages.end()))
    }

    /// How many pages a file that grows is given more than it needs.
    fn ahead_pages(&self) -> u64 {
        (self.inode.size_bytes / 4).min(MOST_AHEAD_BYTES) / PAGE_BYTES
    }

    /// Pages for the beginning of a hole, in one run, as many as there are: behind those before the hole if these are free.
    pub fn reserve(
        &self,
        hole: FilePages,
        must_be_zero: bool,
    ) -> aquifer_pool::Result<Reservation<'_>> {
        let pool = &self.shared.pool;
        let near_page = (hole.first.0.checked_sub(1))
            .and_then(|before| self.table.find(FilePage(before)))
            .filter(|extent| !extent.run.is_hole())
            .map(|extent| extent.run.start_page + 1);
        self.shared.with_room(|| pool.reserve_some(hole.pages, near_page, must_be_zero))
    }

    /// Reserves pages besides those that the caller has already, for the beginning of `hole`; `None` if no more can be reserved at a time. A
    /// caller that has none waits for those of others.
    pub fn one_more<'r>(
        &self,
        reserved: &[Reservation<'r>],
        turn: InTurn<'_, '_>,
        hole: FilePages,
        reserve: impl Fn() -> aquifer_pool::Result<Reservation<'r>>,
    ) -> Result<Option<Reservation<'r>>> {
        let outcome = match turn {
            Some(turn) => turn.borrow_mut().reserve(hole.pages, reserve),
            None => match reserve() {
                Err(PoolError::TooManyReservations { .. }) if reserved.is_empty() => {
                    self.shared.pool.take_turn()?.reserve(1, reserve)
                }
                outcome => outcome,
            },
        };
        match outcome {
            Err(PoolError::TooManyReservations { .. }) if !reserved.is_empty() => Ok(None),
            outcome => Ok(Some(outcome?)),
        }
    }

    /// Does what reserves all that it needs before it changes anything: beside the reservations of others, and if these leave too little,
    /// again in a turn of its own, in which it waits for them. `attempt` gives up what it has reserved when it fails.
    pub fn all_at_once<T>(&self, attempt: impl Fn(InTurn<'_, '_>) -> Result<T>) -> Result<T> {
        match attempt(None) {
            Err(FsError::Pool(PoolError::Full { .. } | PoolError::TooManyReservations { .. })) => {
                attempt(Some(&RefCell::new(self.shared.pool.take_turn()?)))
            }
            outcome => outcome,
        }
    }

    /// Fills new pages, of the file from `first` on, with what belongs there: up to the end of the last page that `range` touches.
    fn fill(&self, run: Run, first: FilePage, bytes: &[u8], range: FileBytes) -> Result<()> {
        let at = |file_offset: u64| run.bytes().offset_bytes + (file_offset - first.0 * PAGE_BYTES);
        let start = first.0 * PAGE_BYTES;
        let end = (first.0 + run.pages).min(range.pages().end().0) * PAGE_BYTES;
        let (from, to) = (start.max(range.offset_bytes), end.min(range.end_bytes()));
        self.put_zeros(at(start), from - start)?;
        let part = (from - range.offset_bytes) as usize..(to - range.offset_bytes) as usize;
        self.put(at(from), &bytes[part])?;
        self.put_zeros(at(to), end - to)
    }

    /// Zeroes what lies in pages of the file between its end and `offset_bytes`.
    pub fn zero_behind_end<'r>(&'r self, offset_bytes: u64, edit: &mut Edit<'r>) -> Result<()> {
        let size_bytes = self.inode.size_bytes;
        let len_bytes = offset_bytes.saturating_sub(size_bytes);
        let gap = FileBytes { offset_bytes: size_bytes, len_bytes };
        let zeroed = self.zero(gap, edit)?;
        edit.exposed.extend(zeroed);
        Ok(())
    }

    /// Has what the file has in a range read as zeros, and returns what it wrote zeros over. Where there are many pages, they are replaced
    /// by such as are zero already, as long as there are any.
    pub fn zero<'r>(&'r self, range: FileBytes, edit: &mut Edit<'r>) -> Result<Vec<ByteRange>> {
        let mut zeroed = Vec::new();
        for Piece { file, pool } in self.table.pieces(range) {
            let Some(place) = pool else { continue };
            let mut zero_in_place = |from_bytes: u64, to_bytes: u64| {
                let offset_bytes = place.offset_bytes + (from_bytes - file.offset_bytes);
                let part = ByteRange { offset_bytes, len_bytes: to_bytes - from_bytes };
                zeroed.push(part);
                self.store_zeros(part)
            };
            let first = FilePage(file.offset_bytes.div_ceil(PAGE_BYTES));
            let end = FilePage(file.end_bytes() / PAGE_BYTES);
            let replaced_to = match FilePages::between(first, end).pages < LEAST_REPLACED_PAGES {
                true => first,
                false => self.replace_by_zeros(FilePages::between(first, end), edit)?,
            };
            if replaced_to == first {
                zero_in_place(file.offset_bytes, file.end_bytes())?;
            } else {
                zero_in_place(file.offset_bytes, first.0 * PAGE_BYTES)?;
                zero_in_place(replaced_to.0 * PAGE_BYTES, file.end_bytes())?;
            }
        }
        Ok(zeroed)
    }

    /// Puts zero pages in the place of others, from the front on and as long as there are such, and returns up to where.
    fn replace_by_zeros<'r>(&'r self, pages: FilePages, edit: &mut Edit<'r>) -> Result<FilePage> {
        let mut left = pages;
        // Who stores to a view of these pages stores to the file.
        let is_viewed = self.shared.pool.is_used(self.open.number, InodeUse::Writable)?;
        while !is_viewed && left.pages >= LEAST_REPLACED_PAGES && edit.zeros.len() < MOST_REPLACED {
            let ready = match self.shared.pool.reserve_ready(left.pages) {
                // The others are zeroed in place.
                Ok(None) | Err(PoolError::TooManyReservations { .. }) => break,
                Ok(Some(ready)) => ready,
                Err(error) => return Err(error.into()),
            };
            let taken = FilePages { pages: ready.whole().pages, ..left };
            edit.splices.push((taken, ready.runs().to_vec()));
            edit.zeros.push(ready);
            left = FilePages::between(taken.end(), pages.end());
        }
        Ok(left.first)
    }

    /// Notes that these bytes of pages that the file has come to be inside of it.
    fn expose(&self, from_bytes: u64, to_bytes: u64, edit: &mut Edit<'_>) {
        let range = FileBytes { offset_bytes: from_bytes, len_bytes: to_bytes - from_bytes };
        edit.exposed.extend(self.table.pieces(range).filter_map(|piece| piece.pool));
    }

    /// Makes the file longer by zeros that have pages, behind those that it has if there is room. Before that, `look` is shown where they will
    /// lie; if it fails, nothing has happened.
    pub fn append_zeros<T>(
        &self,
        len_bytes: u64,
        look: impl FnOnce(&FileTable) -> Result<T>,
    ) -> Result<T> {
        self.check()?;
        let size_bytes = self.inode.size_bytes;
        let end_bytes = size_bytes.checked_add(len_bytes).filter(|end| *end <= MAX_FILE_BYTES);
        let end_bytes = end_bytes.ok_or(FsError::FileTooLarge)?;
        let added = FileBytes { offset_bytes: size_bytes, len_bytes };
        let (edit, reservations) = self.all_at_once(|turn| {
            let mut edit = Edit { size_bytes: Some(end_bytes), ..Edit::default() };
            let (reservations, end) =
                match ZEROS.get(..usize::try_from(len_bytes).unwrap_or(usize::MAX)) {
                    // So that there is room for those that follow: writing a few zeros takes less than giving the file pages each time.
                    Some(zeros) => {
                        let filled = self.fill_holes(zeros, added, turn, &mut edit)?;
                        self.expose(size_bytes, end_bytes, &mut edit);
                        self.copy_in(zeros, added)?;
                        filled
                    }
                    None => {
                        self.zero_behind_end(end_bytes, &mut edit)?;
                        if let Some(turn) = turn {
                            edit.zeros.iter().for_each(|zeros| turn.borrow_mut().add(zeros));
                        }
                        let reserve = |hole| self.reserve(hole, true);
                        let (pages, fill) = (added.pages(), |_, _| Ok(()));
                        self.take_pages(pages, usize::MAX, turn, &mut edit, reserve, fill)?
                    }
                };
            match end < added.pages().end() {
                true => Err(in_small_pieces(&reservations, added.pages())),
                false => Ok((edit, reservations)),
            }
        })?;
        let looked = match edit.splices.is_empty() {
            true => look(&self.table)?,
            false => look(&self.spliced(&edit.splices)?)?,
        };
        self.commit(edit, reservations)?;
        Ok(looked)
    }

    pub fn extend(&mut self, size_bytes: u64) -> Result<()> {
        self.check()?;
        let mut edit = Edit { size_bytes: Some(size_bytes), ..Edit::default() };
        self.zero_behind_end(size_bytes, &mut edit)?;
        self.commit(edit, Vec::new())
    }

    /// Makes the file shorter, in as many transactions as it has to be: each leaves a shorter file.
    pub fn shrink(&mut self, size_bytes: u64) -> Result<()> {
        self.check()?;
        let kept_pages = size_bytes.div_ceil(PAGE_BYTES);
        loop {
            let from = self.table.start_of_last_runs(REMOVED_AT_ONCE_RUNS).0.max(kept_pages);
            let is_last = from == kept_pages;
            let edit = Edit {
                splices: vec![(FilePages::all_from(FilePage(from)), Vec::new())],
                size_bytes: Some(match is_last {
                    true => size_bytes,
                    false => self.inode.size_bytes.min(from * PAGE_BYTES),
                }),
                ..Edit::default()
            };
            self.commit(edit, Vec::new())?;
            if is_last {
                // With what it was asked for.
                self.lock.note_room(self.open.number, false);
                return Ok(());
            }
            (self.inode, self.table) = self.shared.table(self.open)?;
        }
    }

    /// Makes an edit, and shows the new table to the readers in this process.
    pub fn commit<'r>(
        &'r self,
        edit: Edit<'r>,
        mut reservations: Vec<Reservation<'r>>,
    ) -> Result<()> {
        let pool = &self.shared.pool;
        reservations.extend(edit.zeros);
        let now_ns = now_ns();
        let change = |slots: &mut Transaction<'_>| {
            let mut names = Names { slots, now_ns };
            let mut inode = self.open.read(names.slots)?;
            let edited = match edit.splices.is_empty() {
                true => None,
                false => Some(self.splice(&edit.splices, &mut inode, names.slots)?),
            };
            inode.size_bytes = edit.size_bytes.unwrap_or(inode.size_bytes);
            inode.modified_ns = now_ns;
            inode.changed_ns = now_ns;
            names.put(&inode)?;
            edit.exposed.iter().for_each(|range| names.slots.expose(*range));
            Ok::<_, FsError>(edited)
        };
        // SAFETY: the file's lock is held, and the file was found changeable under it, so it has no lease.
        let edited = unsafe { pool.try_change(reservations, change)? };
        if let Some(table) = edited {
            self.open.set_table(Arc::new(table));
        }
        Ok(())
    }

    /// The table with these pages in it.
    fn spliced(&self, splices: &[(FilePages, Vec<Run>)]) -> Result<FileTable> {
        let mut table = FileTable::clone(&self.table);
        for (pages, runs) in splices {
            table.splice(*pages, runs)?;
        }
        Ok(table)
    }

    /// The same, stored.
    fn splice(
        &self,
        splices: &[(FilePages, Vec<Run>)],
        inode: &mut FileInode,
        slots: &mut impl ChangeSlots,
    ) -> Result<FileTable> {
        let mut table = self.spliced(splices)?;
        table.store(inode, slots)?;
        Ok(table)
    }
}

/// Copies bytes to the pool, which belong to a file that is locked.
fn put(pool: &Pool, lock: &FileLock<'_>, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
    for (part, bytes) in (0..).zip(bytes.chunks(COPIED_AT_ONCE_BYTES)) {
        // SAFETY: the file's lock is held, and the file was found changeable under it, so it has no lease; or the pages are reserved
        // and no file has them yet.
        unsafe { pool.store(offset_bytes + part * COPIED_AT_ONCE_BYTES as u64, bytes)? };
        lock.note_progress();
    }
    Ok(())
}

/// The error of what cannot be done in pieces, and has not so few that they can be reserved together.
pub(super) fn in_small_pieces(reserved: &[Reservation<'_>], wanted: FilePages) -> FsError {
    let largest_free_pages = reserved.iter().map(|reserved| reserved.whole().pages).max();
    let largest_free_pages = largest_free_pages.unwrap_or(0);
    PoolError::Full { wanted_pages: wanted.pages, largest_free_pages }.into()
}

impl Shared {
    /// Writes what lies inside of a file and of one run of its pages; false if it does not. With the file's lock.
    fn overwrite(
        &self,
        lock: &FileLock<'_>,
        open: &OpenInode,
        bytes: &[u8],
        range: FileBytes,
    ) -> Result<bool> {
        let Some(table) = open.table() else { return Ok(false) };
        let Some(state) = self.pool.file_state(open.number) else { return Ok(false) };
        if state.is_immutable
            || range.end_bytes() > state.size_bytes
            || !table.is_of(open.number, state.incarnation, state.layout_version)
        {
            return Ok(false);
        }
        let Some(place) = table.contiguous(range) else { return Ok(false) };
        lock.settle()?;
        put(&self.pool, lock, place.offset_bytes, bytes)?;
        self.note_modified(open, state.modified_ns)?;
        Ok(true)
    }

    /// Notes when content was changed, as precise as file systems of Linux are: a tick of the clock.
    pub(crate) fn note_modified(&self, open: &OpenInode, before_ns: i64) -> Result<()> {
        let now_ns = now_ns();
        if now_ns == before_ns {
            return Ok(());
        }
        self.change(|names| {
            let mut inode = names.inode(open.number)?;
            (inode.modified_ns, inode.changed_ns) = (now_ns, now_ns);
            names.put(&inode)
        })
    }

    /// Gives back what a file was given to grow into, and the file if it has no name any more.
    pub(super) fn close_written(&self, open: &OpenInode) -> Result<()> {
        if !open.was_given_ahead() {
            return Ok(());
        }
        let lock = &self.pool.lock_file(open.number)?;
        let (inode, table) = self.table(open)?;
        if inode.is_immutable
            || lock.has_room(open.number)
            || table.pages() * PAGE_BYTES <= inode.size_bytes.next_multiple_of(PAGE_BYTES)
        {
            return Ok(());
        }
        let first = FilePage(inode.size_bytes.div_ceil(PAGE_BYTES));
        let splices = vec![(FilePages::all_from(first), Vec::new())];
        Write { shared: self, lock, open, inode, table }
            .relocate(Edit { splices, ..Edit::default() }, Vec::new())
    }
}

impl Write<'_> {
    /// Copies pages from an offset of the pool to a run.
    pub fn copy_pages(&self, from_bytes: u64, to: Run) -> Result<()> {
        let (to, mut done) = (to.bytes(), 0);
        let mut bytes = vec![0; COPIED_BYTES.min(to.len_bytes) as usize];
        while done < to.len_bytes {
            let part = &mut bytes[..COPIED_BYTES.min(to.len_bytes - done) as usize];
            self.shared.pool.load(from_bytes + done, part)?;
            self.put(to.offset_bytes + done, part)?;
            done += part.len() as u64;
        }
        Ok(())
    }

    /// An edit that changes nothing that anybody reads: not even times.
    pub fn relocate(&self, edit: Edit<'_>, reservations: Vec<Reservation<'_>>) -> Result<()> {
        let change = |slots: &mut Transaction<'_>| {
            let mut names = Names { slots, now_ns: 0 };
            let mut inode = names.inode(self.open.number)?;
            let table = self.splice(&edit.splices, &mut inode, names.slots)?;
            names.put(&inode)?;
            Ok::<_, FsError>(table)
        };
        // SAFETY: the new pages hold the same bytes. Leases keep the old ones, which their pins cover.
        let table = unsafe { self.shared.pool.try_change(reservations, change)? };
        self.open.set_table(Arc::new(table));
        Ok(())
    }
}
