//! Writing an open file.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use aquifer_format::file_table::{FileBytes, FilePage, FilePages, FileTable, Piece};
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::{FileInode, MAX_FILE_BYTES};
use aquifer_pool::format::run::Run;
use aquifer_pool::media::ByteRange;
use aquifer_pool::{ChangeSlots, FileLock, InodeUse, PoolError, Reservation, Transaction, Turn};

use super::File;
use super::written::Written;
use crate::caller::Caller;
use crate::error::{FsError, Result};
use crate::files::Shared;
use crate::metadata::SetAttributes;
use crate::open_inodes::OpenInode;
use crate::rules::{self, Privileges};
use crate::transaction::{Names, now_ns};

/// A source of zeros to copy.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
/// The most extra room that a growing file gets.
const MOST_AHEAD_BYTES: u64 = 8 << 20;
/// At least this many whole pages that are to read as zeros are replaced by zero pages; fewer are
/// zeroed in place.
const LEAST_REPLACED_PAGES: u64 = 512;
/// The most such replacements in one transaction.
const MOST_REPLACED: usize = 16;
/// The most runs that one transaction removes from a file or moves in it, however large the log.
const MOST_RUNS_AT_ONCE: u64 = 512;
/// The most pieces that one transaction adds to a file, unless they must be added together. Every
/// log has room for this many.
pub(super) const PIECES_AT_ONCE: usize = 64;

impl File {
    /// Writes at `offset_bytes`, or at the end of a file that is open for appending, and returns
    /// how many bytes were written: all, unless an error ends the write early, for example because the
    /// pool becomes full ([`File::write_with`] returns that error as well). A gap between the end of the
    /// file and `offset_bytes` reads as zeros. As
    /// [`FileExt::write_at`](std::os::unix::fs::FileExt::write_at).
    ///
    /// Readers see the bytes as they are copied, in words of eight bytes; with
    /// [`File::write_atomic`] they see all of them or none.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// assert_eq!(file.write_at(b"text", 5)?, 4);
    /// assert_eq!(files.read("/f")?, b"\0\0\0\0\0text");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If nothing was written: [`FsError::NotOpenFor`], [`FsError::FileTooLarge`],
    /// [`FsError::Immutable`]; [`FsError::Pool`] if the pool is full.
    pub fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<usize> {
        let written = self.write_somewhere(bytes, offset_bytes)?;
        Ok((written.end - written.start) as usize)
    }

    /// Writes all of `bytes`, else as [`File::write_at`]. As
    /// [`FileExt::write_all_at`](std::os::unix::fs::FileExt::write_all_at), and no other call
    /// writes to the file in between.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.write_all_at(b"text", 0)?;
    /// assert_eq!(files.read("/f")?, b"text");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::write_at`]; a part of the bytes may have been written.
    pub fn write_all_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        let at = self.place_of_write(offset_bytes);
        self.write_with(bytes, at, WriteHow::default()).all().map(drop)
    }

    /// Writes as [`File::write_at`], at an offset or at the end of the file, however it was opened,
    /// and returns the range that was written with the error that ended the write early: for servers,
    /// whose clients say for each write what it does. In a [noted](aquifer_pool::Pool::noting) request the result of each transaction begins
    /// with this range, as it is then; a write inside the file's pages may need none, and if it needs
    /// one for the times, that comes behind the bytes.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::{At, WriteHow};
    ///
    /// let file = files.create_file("/f")?;
    /// assert_eq!(file.write_with(b"text", At::End, WriteHow::default()).all()?, 0..4);
    /// let modified = file.metadata()?.modified()?;
    /// let how = WriteHow { keeps_times: true, ..WriteHow::default() };
    /// assert_eq!(file.write_with(b"ed", At::End, how).all()?, 4..6);
    /// assert_eq!(file.write_with(b"T", At::Offset(0), how).all()?, 0..1);
    /// assert_eq!(files.read("/f")?, b"Texted");
    /// assert_eq!(file.metadata()?.modified()?, modified);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The errors are those of [`File::write_at`].
    pub fn write_with(&self, bytes: &[u8], at: At, how: WriteHow) -> Written {
        let start = match at {
            At::Offset(offset_bytes) | At::Inside(offset_bytes) => offset_bytes,
            At::End => 0,
        };
        Written::by(start..start, |written| self.write_from(bytes, at, written, how))
    }

    /// Where this handle writes if it is asked to write there.
    fn place_of_write(&self, offset_bytes: u64) -> At {
        if self.opened.flags.append { At::End } else { At::Offset(offset_bytes) }
    }

    /// As [`File::write_at`]; returns the range that was written.
    pub(super) fn write_somewhere(&self, bytes: &[u8], offset_bytes: u64) -> Result<Range<u64>> {
        let at = self.place_of_write(offset_bytes);
        let written = self.write_with(bytes, at, WriteHow::default()).part()?;
        // Without any bytes, not even the place counts.
        Ok(if bytes.is_empty() { offset_bytes..offset_bytes } else { written })
    }

    /// As [`File::write_all_at`], from the start of the empty range `written` on. Sets that to what
    /// was written, also if the call fails.
    fn write_from(
        &self,
        bytes: &[u8],
        at: At,
        written: &mut Range<u64>,
        how: WriteHow,
    ) -> Result<()> {
        self.check_writes()?;
        if bytes.is_empty() {
            return Ok(());
        }
        let shared = &self.files().shared;
        let lock = &shared.pool.lock_file(self.inode().number)?;
        let range = FileBytes { offset_bytes: written.start, len_bytes: bytes.len() as u64 };
        if at != At::End && shared.overwrite(lock, self.inode(), bytes, range, how)? {
            written.end = range.end_bytes();
            return Ok(());
        }
        let (inode, table) = shared.table(self.inode())?;
        let mut bytes = bytes;
        match at {
            At::Offset(_) => {}
            At::Inside(offset_bytes) => {
                let inside_bytes = inode.size_bytes.saturating_sub(offset_bytes);
                if inside_bytes == 0 {
                    return Ok(());
                }
                bytes =
                    &bytes[..bytes.len().min(usize::try_from(inside_bytes).unwrap_or(usize::MAX))];
            }
            At::End => *written = inode.size_bytes..inode.size_bytes,
        }
        let range = FileBytes { offset_bytes: written.start, len_bytes: bytes.len() as u64 };
        let mut write = Write { shared, lock, open: self.inode(), inode, table, how };
        write.write(bytes, range, &mut written.end)
    }

    /// Writes several buffers in order, each as [`File::write_at`], and returns how many bytes were
    /// written. Other writes may come in between.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
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
            match self.write_at(buffer, offset_bytes.saturating_add(done as u64)) {
                Ok(written) => {
                    done += written;
                    if written < buffer.len() {
                        break;
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Sets the length of the file: bytes beyond it are dropped, new bytes are a hole. As
    /// [`std::fs::File::set_len`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
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
        self.set_len_and(size_bytes, &SetAttributes::new(), &self.files().shared.caller)
    }

    /// As [`File::set_len`], but does nothing if the file is at least as long.
    pub(super) fn extend_to(&self, size_bytes: u64, how: WriteHow) -> Result<()> {
        let shared = &self.files().shared;
        let lock = &shared.pool.lock_file(self.inode().number)?;
        let (inode, table) = shared.table(self.inode())?;
        if inode.size_bytes >= size_bytes {
            return Ok(());
        }
        Write { shared, lock, open: self.inode(), inode, table, how }.extend(size_bytes, None)
    }

    /// [`File::set_len`], and sets other attributes for a caller in the change that ends with that
    /// length. A file that becomes shorter may take several changes.
    pub(crate) fn set_len_and(
        &self,
        size_bytes: u64,
        what: &SetAttributes,
        by: &Caller,
    ) -> Result<()> {
        self.check_writes().map_err(|_| FsError::NotResizable)?;
        if size_bytes > MAX_FILE_BYTES {
            return Err(FsError::FileTooLarge);
        }
        let shared = &self.files().shared;
        let lock = &shared.pool.lock_file(self.inode().number)?;
        let (inode, table) = shared.table(self.inode())?;
        let mut write =
            Write { shared, lock, open: self.inode(), inode, table, how: WriteHow::default() };
        if size_bytes <= write.inode.size_bytes {
            write.shrink(size_bytes, what, by)
        } else {
            write.extend(size_bytes, Some((what, by)))
        }
    }
}

/// Where a write begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// At this offset.
    Offset(u64),
    /// At this offset, but nothing behind the end of the file as it is then: the file does not become
    /// longer, whatever others do at the same time.
    Inside(u64),
    /// At the end of the file as it is then: no other write comes in between.
    End,
}

/// What a write does besides. By default what [`File::write_at`] does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteHow {
    /// Whether the times stay as they are: the caller sets them ([`Nodes::set`](crate::node::Nodes::set)).
    pub keeps_times: bool,
    /// The privileges that the file loses.
    pub privileges: Privileges,
}

/// How much is copied at a time when pages are moved.
const COPIED_BYTES: u64 = 1 << 20;

/// A locked file that is being written.
pub(crate) struct Write<'a> {
    pub shared: &'a Shared,
    pub lock: &'a FileLock<'a>,
    pub open: &'a OpenInode,
    pub inode: FileInode,
    pub table: Arc<FileTable>,
    pub how: WriteHow,
}

/// The turn of a call that may wait for other callers' reservations, if it has one.
pub(crate) type InTurn<'t, 'a> = Option<&'t RefCell<Turn<'a>>>;

/// Whole pages that are removed or added inside a file, so that all behind them move.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Shift {
    /// Remove these pages.
    Collapse(FilePages),
    /// Insert a hole that becomes these pages.
    Insert(FilePages),
}

/// A change of an inode and its table.
#[derive(Default)]
pub(crate) struct Edit<'a> {
    /// File pages and the runs that they get.
    pub splices: Vec<(FilePages, Vec<Run>)>,
    /// What happens after that. The caller then commits with [`FileLock::exchange`].
    pub shift: Option<Shift>,
    /// Reservations of zero pages among these runs.
    pub zeros: Vec<Reservation<'a>>,
    pub size_bytes: Option<u64>,
    /// Bytes of the pool that come to lie inside the file, besides those of reservations.
    pub exposed: Vec<ByteRange>,
    /// What else is set, and for whom the file is changed if it is not this process.
    pub also: Option<(&'a SetAttributes, &'a Caller)>,
}

impl Write<'_> {
    pub fn check(&self) -> Result<()> {
        if self.inode.is_immutable {
            Err(FsError::Immutable { path: self.shown() })
        } else {
            Ok(())
        }
    }

    /// The file, for errors.
    fn shown(&self) -> PathBuf {
        format!("(inode {})", self.open.number).into()
    }

    /// Fails if a writable view of the file exists, in any process: its pages must stay in place.
    /// The caller holds the file's lock.
    pub fn check_not_viewed(&self) -> Result<()> {
        if self.shared.pool.is_used(self.open.number, InodeUse::Writable)? {
            Err(FsError::InUse { path: self.shown() })
        } else {
            Ok(())
        }
    }

    /// The most runs that one transaction removes from a file, and the most that it moves.
    ///
    /// A record has 40 bytes for each run that moves, and the changed words of each slot that it
    /// frees, which may be one for each removed run. It may be a quarter as long as the log, which
    /// has at least 64 KiB.
    pub fn runs_at_once(&self) -> usize {
        let log_bytes = self.shared.pool.layout().log().len_bytes;
        (log_bytes >> 10).min(MOST_RUNS_AT_ONCE) as usize
    }

    /// Writes in as many transactions as needed; each one extends the part of `bytes` that is
    /// written, which ends at `end_bytes`, also if the call fails.
    pub fn write(
        &mut self,
        mut bytes: &[u8],
        mut range: FileBytes,
        end_bytes: &mut u64,
    ) -> Result<()> {
        self.check()?;
        let end = range.offset_bytes.checked_add(range.len_bytes);
        end.filter(|end| *end <= MAX_FILE_BYTES).ok_or(FsError::FileTooLarge)?;
        let start_bytes = range.offset_bytes;
        loop {
            let done_bytes = self.write_some(bytes, range, start_bytes)?;
            *end_bytes += done_bytes;
            if done_bytes == range.len_bytes {
                return Ok(());
            }
            bytes = &bytes[done_bytes as usize..];
            range.offset_bytes += done_bytes;
            range.len_bytes -= done_bytes;
            (self.inode, self.table) = self.shared.table(self.open)?;
        }
    }

    /// Writes as much of `bytes`, which belongs at `range`, as pages can be reserved for at a time.
    /// Returns how many bytes. The whole write began at `start_bytes`.
    fn write_some(&self, bytes: &[u8], range: FileBytes, start_bytes: u64) -> Result<u64> {
        let mut edit = Edit::default();
        let (reservations, filled_to) = self.fill_holes(bytes, range, None, &mut edit)?;
        let end_bytes = range.end_bytes().min(filled_to.0 * PAGE_BYTES);
        let done = FileBytes { len_bytes: end_bytes - range.offset_bytes, ..range };
        if end_bytes > self.inode.size_bytes {
            edit.size_bytes = Some(end_bytes);
            self.zero_behind_end(range.offset_bytes, &mut edit)?;
            self.expose(self.inode.size_bytes.max(range.offset_bytes), end_bytes, &mut edit);
        }
        // Existing pages, inside the file or beyond its end.
        self.copy_in(&bytes[..done.len_bytes as usize], done)?;
        self.shared.pool.note_result([start_bytes, end_bytes, 0]);
        self.commit(edit, reservations)?;
        Ok(done.len_bytes)
    }

    /// Copies bytes to pages that no file owns yet.
    pub fn put(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        put(self.lock, offset_bytes, bytes)
    }

    /// Writes zeros to pages that no file owns yet.
    pub fn put_zeros(&self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        let mut done = 0;
        while done < len_bytes {
            let part = (len_bytes - done).min(ZEROS.len() as u64);
            self.put(offset_bytes + done, &ZEROS[..part as usize])?;
            done += part;
        }
        Ok(())
    }

    /// Copies the part of `bytes`, which belongs at `range`, for which the file has pages.
    fn copy_in(&self, bytes: &[u8], range: FileBytes) -> Result<()> {
        for piece in self.table.pieces(range) {
            let Some(place) = piece.pool else { continue };
            let start = (piece.file.offset_bytes - range.offset_bytes) as usize;
            let part = &bytes[start..start + piece.file.len_bytes as usize];
            self.overwrite(place, part)?;
        }
        Ok(())
    }

    /// Overwrites bytes of a page that the file owns.
    fn overwrite(&self, place: ByteRange, bytes: &[u8]) -> Result<()> {
        self.lock.settle()?;
        self.put(place.offset_bytes, bytes)
    }

    /// Overwrites bytes of pages that the file owns with zeros.
    pub fn store_zeros(&self, place: ByteRange) -> Result<()> {
        self.lock.settle()?;
        self.put_zeros(place.offset_bytes, place.len_bytes)
    }

    /// Adds pages where `range` has none, and fills them with `bytes` and zeros around them.
    /// Returns as [`Write::take_pages`].
    fn fill_holes(
        &self,
        bytes: &[u8],
        range: FileBytes,
        turn: InTurn<'_, '_>,
        edit: &mut Edit<'_>,
    ) -> Result<(Vec<Reservation<'_>>, FilePage)> {
        let pages = range.pages();
        let reserve = |hole: FilePages| {
            // At the end of the table, reserve more than needed, so that the next write finds room.
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

    /// Adds new pages to the holes of `pages`, front to back.
    ///
    /// For each hole, `reserve` returns pages for its beginning, which `fill` writes to. Stops
    /// after `most_pieces` pieces, or when no more can be reserved at a time. Returns the
    /// reservations, and the page up to which no holes are left.
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
                let reservation = if reservations.len() < most_pieces {
                    self.one_more(&reservations, turn, hole, || reserve(hole))?
                } else {
                    None
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

    /// How many extra pages a growing file gets.
    fn ahead_pages(&self) -> u64 {
        (self.inode.size_bytes / 4).min(MOST_AHEAD_BYTES) / PAGE_BYTES
    }

    /// Reserves pages for the beginning of a hole, as many as one run has, directly after those
    /// before the hole if these are free.
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

    /// Reserves more pages for the beginning of `hole`; `None` if no more can be reserved at a
    /// time. A caller without reservations waits for other callers to give theirs back.
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

    /// Runs an operation that must reserve all it needs before it changes anything: first alongside
    /// other callers' reservations; if these leave too little, again in a turn, in which it waits
    /// for them. `attempt` drops its reservations when it fails.
    pub fn all_at_once<T>(&self, attempt: impl Fn(InTurn<'_, '_>) -> Result<T>) -> Result<T> {
        match attempt(None) {
            Err(FsError::Pool(PoolError::Full { .. } | PoolError::TooManyReservations { .. })) => {
                attempt(Some(&RefCell::new(self.shared.pool.take_turn()?)))
            }
            outcome => outcome,
        }
    }

    /// Fills new pages, which start at page `first` of the file, up to the end of the last page
    /// that `range` touches.
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

    /// Zeroes the pages of the file between its end and `offset_bytes`.
    pub fn zero_behind_end<'r>(&'r self, offset_bytes: u64, edit: &mut Edit<'r>) -> Result<()> {
        self.zero_between(self.inode.size_bytes, offset_bytes, edit)
    }

    /// Zeroes pages behind the end of the file that come to lie inside.
    pub fn zero_between<'r>(
        &'r self,
        from_bytes: u64,
        to_bytes: u64,
        edit: &mut Edit<'r>,
    ) -> Result<()> {
        let len_bytes = to_bytes.saturating_sub(from_bytes);
        let zeroed = self.zero(FileBytes { offset_bytes: from_bytes, len_bytes }, edit)?;
        edit.exposed.extend(zeroed);
        Ok(())
    }

    /// Makes a range read as zeros, and returns the bytes that it overwrote. Long stretches of
    /// pages are replaced by zero pages, as long as the pool has any.
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
            let replaced_to = if FilePages::between(first, end).pages < LEAST_REPLACED_PAGES {
                first
            } else {
                self.replace_by_zeros(FilePages::between(first, end), edit)?
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

    /// Replaces pages by zero pages, front to back, as long as the pool has any. Returns the end of
    /// the replaced part.
    fn replace_by_zeros<'r>(&'r self, pages: FilePages, edit: &mut Edit<'r>) -> Result<FilePage> {
        let mut left = pages;
        // Stores to a view of these pages must reach the file.
        let is_viewed = self.shared.pool.is_used(self.open.number, InodeUse::Writable)?;
        while !is_viewed && left.pages >= LEAST_REPLACED_PAGES && edit.zeros.len() < MOST_REPLACED {
            let ready = match self.shared.pool.reserve_ready(left.pages) {
                // The rest is zeroed in place.
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

    /// Notes that existing pages with these bytes come to lie inside the file.
    fn expose(&self, from_bytes: u64, to_bytes: u64, edit: &mut Edit<'_>) {
        let range = FileBytes { offset_bytes: from_bytes, len_bytes: to_bytes - from_bytes };
        edit.exposed.extend(self.table.pieces(range).filter_map(|piece| piece.pool));
    }

    /// Extends the file by zeros that have pages, directly after its last pages if there is room.
    /// Calls `look` with the new table before the change; if it fails, nothing has happened.
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
                    // Overwriting a few zeros is cheaper than adding pages each time, so add room
                    // for later calls.
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
            if end < added.pages().end() {
                Err(in_small_pieces(&reservations, added.pages()))
            } else {
                Ok((edit, reservations))
            }
        })?;
        let looked =
            if edit.splices.is_empty() { look(&self.table)? } else { look(&self.edited(&edit)?)? };
        self.commit(edit, reservations)?;
        Ok(looked)
    }

    pub fn extend(&self, size_bytes: u64, also: Option<(&SetAttributes, &Caller)>) -> Result<()> {
        self.check()?;
        let mut edit = Edit { size_bytes: Some(size_bytes), also, ..Edit::default() };
        self.zero_behind_end(size_bytes, &mut edit)?;
        self.note_resized(also.is_some());
        self.commit(edit, Vec::new())
    }

    /// In a [noted](aquifer_pool::Pool::noting) request, the next transaction sets the length that was
    /// asked for: its result is the inode.
    fn note_resized(&self, is_last: bool) {
        if is_last {
            self.shared.pool.note_result([self.open.number, self.open.generation, 0]);
        }
    }

    /// Shortens the file, in as many transactions as needed; each one makes it shorter, and the last
    /// one sets `what` as well.
    pub fn shrink(&mut self, size_bytes: u64, what: &SetAttributes, by: &Caller) -> Result<()> {
        self.check()?;
        let kept_pages = size_bytes.div_ceil(PAGE_BYTES);
        loop {
            let from = self.table.start_of_last_runs(self.runs_at_once()).0.max(kept_pages);
            let is_last = from == kept_pages;
            self.note_resized(is_last);
            let edit = Edit {
                splices: vec![(FilePages::all_from(FilePage(from)), Vec::new())],
                size_bytes: Some(if is_last {
                    size_bytes
                } else {
                    self.inode.size_bytes.min(from * PAGE_BYTES)
                }),
                also: Some((if is_last { what } else { &SetAttributes::new() }, by)),
                ..Edit::default()
            };
            self.commit(edit, Vec::new())?;
            if is_last {
                // Room that was asked for with `FallocateMode::KeepSize` was removed as well.
                self.lock.note_room(self.open.number, false);
                return Ok(());
            }
            (self.inode, self.table) = self.shared.table(self.open)?;
        }
    }

    /// Commits an edit, and publishes the new table to the readers in this process.
    pub fn commit<'r>(
        &'r self,
        mut edit: Edit<'r>,
        mut reservations: Vec<Reservation<'r>>,
    ) -> Result<()> {
        let pool = &self.shared.pool;
        reservations.append(&mut edit.zeros);
        let is_edited = !edit.splices.is_empty() || edit.shift.is_some();
        let ready = Cell::new(if is_edited { Some(self.edited(&edit)?) } else { None });
        let now_ns = now_ns();
        let change = |slots: &mut Transaction<'_>| {
            let mut names = Names { slots, now_ns };
            let mut inode = self.open.read(names.slots)?;
            let by = edit.also.map_or(&self.shared.caller, |(_, by)| by);
            let loses = rules::privileges_lost(&inode, names.slots, by, self.how.privileges)?;
            let is_resized = edit.size_bytes.is_some_and(|bytes| bytes != inode.size_bytes);
            let is_unchanged =
                !is_edited && !is_resized && edit.exposed.is_empty() && edit.also.is_none();
            if is_unchanged && loses.is_none() && self.how.keeps_times {
                return Ok(None);
            }
            let edited = if is_edited {
                Some(self.store(&edit, &ready, &mut inode, names.slots)?)
            } else {
                None
            };
            inode.size_bytes = edit.size_bytes.unwrap_or(inode.size_bytes);
            if let Some(lost) = loses {
                names.drop_privileges(&mut inode, lost)?;
            }
            if !self.how.keeps_times {
                inode.modified_ns = now_ns;
                inode.changed_ns = now_ns;
            }
            match edit.also {
                Some((what, by)) => drop(names.set(inode, what, by, || self.shown())?),
                None => names.put(&inode)?,
            }
            edit.exposed.iter().for_each(|range| names.slots.expose(*range));
            Ok::<_, FsError>(edited)
        };
        // SAFETY: the file's lock is held, and the file was found mutable under it, so it has no
        // lease.
        let edited = unsafe { pool.try_change(reservations, change)? };
        if let Some(table) = edited {
            self.open.set_table(Arc::new(table));
        }
        Ok(())
    }

    /// Returns a copy of the table with the splices, and then the shift.
    fn edited(&self, edit: &Edit<'_>) -> Result<FileTable> {
        let mut table = FileTable::clone(&self.table);
        for (pages, runs) in &edit.splices {
            table.splice(*pages, runs)?;
        }
        match edit.shift {
            None => {}
            Some(Shift::Collapse(pages)) => drop(table.collapse(pages)),
            Some(Shift::Insert(hole)) => table.insert(hole)?,
        }
        Ok(table)
    }

    /// Stores the table that [`Write::edited`] returns. It is made before the transaction, which
    /// holds a mutex of the whole pool, and is `ready`; only another attempt makes it again.
    fn store(
        &self,
        edit: &Edit<'_>,
        ready: &Cell<Option<FileTable>>,
        inode: &mut FileInode,
        slots: &mut impl ChangeSlots<Error = PoolError>,
    ) -> Result<FileTable> {
        let mut table = match ready.take() {
            Some(table) => table,
            None => self.edited(edit)?,
        };
        table.store(inode, slots)?;
        Ok(table)
    }
}

/// Copies bytes to pages of a locked file, or to reserved pages.
fn put(lock: &FileLock<'_>, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
    // SAFETY: the file's lock is held, and the file was found mutable under it, so it has no lease;
    // or the pages are reserved and no file owns them yet.
    unsafe { lock.store(offset_bytes, bytes)? };
    Ok(())
}

/// The error if the free space is in so many pieces that they cannot be reserved together.
pub(super) fn in_small_pieces(reserved: &[Reservation<'_>], wanted: FilePages) -> FsError {
    let largest_free_pages = reserved.iter().map(|reserved| reserved.whole().pages).max();
    let largest_free_pages = largest_free_pages.unwrap_or(0);
    PoolError::Full { wanted_pages: wanted.pages, largest_free_pages }.into()
}

impl Shared {
    /// Overwrites bytes that lie inside the file and in one run of its pages; else returns false.
    /// The caller holds the file's lock.
    fn overwrite(
        &self,
        lock: &FileLock<'_>,
        open: &OpenInode,
        bytes: &[u8],
        range: FileBytes,
        how: WriteHow,
    ) -> Result<bool> {
        let Some(table) = open.table() else { return Ok(false) };
        let Some(state) = self.pool.file_state(open.number) else { return Ok(false) };
        if state.is_immutable
            || rules::may_lose_bits(state.mode, &self.caller, how.privileges)
            || range.end_bytes() > state.size_bytes
            || !table.is_of(open.number, state.generation, state.layout_version)
        {
            return Ok(false);
        }
        let Some(place) = table.contiguous(range) else { return Ok(false) };
        if state.attributes != 0
            && how.privileges != Privileges::Keep
            && self.has_capabilities(open)?
        {
            return Ok(false);
        }
        lock.settle()?;
        put(lock, place.offset_bytes, bytes)?;
        if !how.keeps_times {
            self.pool.note_result([range.offset_bytes, range.end_bytes(), 0]);
            self.note_modified(open, state.modified_ns)?;
        }
        Ok(true)
    }

    /// Whether a file with extended attributes has capabilities. Looks again only after a change of
    /// the metadata of any file.
    fn has_capabilities(&self, open: &OpenInode) -> Result<bool> {
        let version = self.pool.metadata_version();
        if open.has_no_capabilities(version) {
            return Ok(false);
        }
        let has = self.look(|slots| rules::has_capabilities(&open.read(slots)?, slots))?;
        // Odd: a change is being made, which may not have been seen.
        if !has && version.is_multiple_of(2) {
            open.note_no_capabilities(version);
        }
        Ok(has)
    }

    /// Notes the time of a modification, with the granularity of Linux file systems: one clock
    /// tick.
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

    /// Frees the room that a file was given to grow into.
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
        Write { shared: self, lock, open, inode, table, how: WriteHow::default() }
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

    /// Commits an edit that no reader can notice: not even the times change.
    pub fn relocate(&self, edit: Edit<'_>, reservations: Vec<Reservation<'_>>) -> Result<()> {
        let ready = Cell::new(Some(self.edited(&edit)?));
        let change = |slots: &mut Transaction<'_>| {
            let mut names = Names { slots, now_ns: 0 };
            let mut inode = names.inode(self.open.number)?;
            let table = self.store(&edit, &ready, &mut inode, names.slots)?;
            names.put(&inode)?;
            Ok::<_, FsError>(table)
        };
        let pool = &self.shared.pool;
        // SAFETY: the new pages hold the same bytes. Leases keep the old pages, which their pins
        // protect.
        let table = pool.without_note(|| unsafe { pool.try_change(reservations, change) })?;
        self.open.set_table(Arc::new(table));
        Ok(())
    }
}
