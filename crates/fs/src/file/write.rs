//! Writing an open file.

use std::sync::Arc;

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::{FileInode, MAX_FILE_BYTES};
use aquifer_pool::format::run::Run;
use aquifer_pool::media::ByteRange;
use aquifer_pool::{FileLock, Reservation};

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
/// Runs that one transaction gives to a file at most: as many reservations.
pub(super) const MOST_PIECES: usize = 32;
/// Whole pages of a file that are to read as zeros are replaced by zero pages if they are so many, and else zeroed in place.
const LEAST_REPLACED_PAGES: u64 = 512;
/// Runs that one transaction takes away from a file at most.
const REMOVED_AT_ONCE_RUNS: usize = 512;

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
    /// what lies inside of the file may have been written.
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
        Write { shared, lock, open: self.inode(), inode, table }.write(bytes, range)?;
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

/// A file that is being written, locked.
pub(super) struct Write<'a> {
    pub shared: &'a Shared,
    pub lock: &'a FileLock<'a>,
    pub open: &'a OpenInode,
    pub inode: FileInode,
    pub table: Arc<FileTable>,
}

/// What changes in an inode and its table.
#[derive(Default)]
pub(super) struct Edit<'a> {
    /// Pages that get these runs.
    pub splices: Vec<(FilePages, Vec<Run>)>,
    /// Where these runs come from, if they are new.
    pub reservations: Vec<Reservation<'a>>,
    pub size_bytes: Option<u64>,
    /// Bytes of the pool that come to be inside of the file, besides those of reservations.
    pub exposed: Vec<ByteRange>,
}

impl<'a> Edit<'a> {
    /// Gives new pages to the file, from this page of it on, and returns which they are.
    pub fn take(&mut self, first: u64, reservation: Reservation<'a>) -> FilePages {
        let pages = FilePages { first: FilePage(first), pages: reservation.whole().pages };
        self.splices.push((pages, reservation.runs().to_vec()));
        self.reservations.push(reservation);
        pages
    }

    /// Whether it has as many pieces as one transaction should name.
    pub fn is_full(&self) -> bool {
        self.reservations.len() >= MOST_PIECES
    }
}

impl<'a> Write<'a> {
    pub fn check(&self) -> Result<()> {
        match self.inode.is_immutable {
            true => {
                Err(FsError::Immutable { path: format!("(inode {})", self.open.number).into() })
            }
            false => Ok(()),
        }
    }

    pub fn write(&mut self, bytes: &[u8], range: FileBytes) -> Result<()> {
        self.check()?;
        let end_bytes = range.offset_bytes.checked_add(range.len_bytes);
        end_bytes.filter(|end| *end <= MAX_FILE_BYTES).ok_or(FsError::FileTooLarge)?;
        let mut done_bytes = 0;
        loop {
            let offset_bytes = range.offset_bytes + done_bytes;
            let left = FileBytes { offset_bytes, len_bytes: range.len_bytes - done_bytes };
            done_bytes += self.write_some(&bytes[done_bytes as usize..], left)?;
            if done_bytes == range.len_bytes {
                return Ok(());
            }
            (self.inode, self.table) = self.shared.table(self.open)?;
        }
    }

    /// Writes as much as one transaction can name, which nearly always is all, and says how much that was.
    fn write_some(&self, bytes: &[u8], range: FileBytes) -> Result<u64> {
        let mut edit = Edit::default();
        let filled_to = self.fill_holes(bytes, range, &mut edit)?;
        let end_bytes = filled_to.min(range.end_bytes());
        let range = FileBytes { len_bytes: end_bytes - range.offset_bytes, ..range };
        if end_bytes > self.inode.size_bytes {
            edit.size_bytes = Some(end_bytes);
            self.zero_behind_end(range.offset_bytes, &mut edit)?;
            self.expose(self.inode.size_bytes.max(range.offset_bytes), end_bytes, &mut edit);
        }
        // Where there were pages before, which may be inside of the file or behind its end.
        self.copy_in(&bytes[..range.len_bytes as usize], range)?;
        self.commit(edit)?;
        Ok(range.len_bytes)
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
        Ok(self.shared.pool.store(place.offset_bytes, bytes)?)
    }

    /// Writes zeros over bytes of pages that the file has.
    pub fn store_zeros(&self, place: ByteRange) -> Result<()> {
        self.lock.settle()?;
        self.shared.store_zeros(place.offset_bytes, place.len_bytes)
    }

    /// Takes pages where `range` has none, and fills them: with `bytes`, and zeros around them. Returns up to which byte there
    /// are pages now: if one transaction cannot name all, before the end of the range.
    fn fill_holes(&self, bytes: &[u8], range: FileBytes, edit: &mut Edit<'a>) -> Result<u64> {
        let pages = range.pages();
        for extent in self.table.extents(pages).filter(|extent| extent.run.is_hole()) {
            let mut first = extent.first.0;
            let end = first + extent.run.pages;
            // At the end of the table, more than is needed, so that the next write finds room there.
            let is_at_end = end >= self.table.pages()
                && end == pages.end().0
                && end * PAGE_BYTES >= self.inode.size_bytes;
            let ahead_pages = if is_at_end { self.ahead_pages() } else { 0 };
            if ahead_pages > 0 {
                self.open.note_ahead();
            }
            let wanted_to = end + ahead_pages;
            while first < end {
                if edit.is_full() {
                    return Ok(first * PAGE_BYTES);
                }
                let reservation = self.reserve(first, wanted_to - first, edit, false)?;
                let run = reservation.whole();
                let taken = edit.take(first, reservation);
                self.fill(run, taken, bytes, range)?;
                first = taken.end().0;
            }
        }
        Ok(u64::MAX)
    }

    /// How many pages a file that grows is given more than it needs.
    fn ahead_pages(&self) -> u64 {
        (self.inode.size_bytes / 4).min(MOST_AHEAD_BYTES) / PAGE_BYTES
    }

    /// Pages for the file from page `first` of it on, in one run, as many as there are of `pages`: where the file goes on if possible.
    pub fn reserve(
        &self,
        first: u64,
        pages: u64,
        edit: &Edit<'a>,
        must_be_zero: bool,
    ) -> Result<Reservation<'a>> {
        let near_page = match edit.splices.last() {
            Some((before, runs)) if before.end().0 == first => {
                runs.last().map(|run| run.end_page())
            }
            _ => (first.checked_sub(1))
                .and_then(|before| self.table.find(FilePage(before)))
                .filter(|extent| !extent.run.is_hole())
                .map(|extent| extent.run.start_page + 1),
        };
        Ok(self.shared.pool.reserve_some(pages, near_page, must_be_zero)?)
    }

    /// Fills new pages with what belongs there: up to the end of the last page that `range` touches.
    fn fill(&self, run: Run, pages: FilePages, bytes: &[u8], range: FileBytes) -> Result<()> {
        let at = |file_offset: u64| {
            run.bytes().offset_bytes + (file_offset - pages.first.0 * PAGE_BYTES)
        };
        let start = pages.first.0 * PAGE_BYTES;
        let end = pages.end().0.min(range.pages().end().0) * PAGE_BYTES;
        let (from, to) = (start.max(range.offset_bytes), end.min(range.end_bytes()));
        self.shared.store_zeros(at(start), from - start)?;
        let part = (from - range.offset_bytes) as usize..(to - range.offset_bytes) as usize;
        self.shared.pool.store(at(from), &bytes[part])?;
        self.shared.store_zeros(at(to), end - to)
    }

    /// Zeroes what lies in pages of the file between its end and `offset_bytes`.
    pub fn zero_behind_end(&self, offset_bytes: u64, edit: &mut Edit<'a>) -> Result<()> {
        let size_bytes = self.inode.size_bytes;
        let len_bytes = offset_bytes.saturating_sub(size_bytes);
        let gap = FileBytes { offset_bytes: size_bytes, len_bytes };
        let zeroed = self.zero(gap, edit)?;
        edit.exposed.extend(zeroed);
        Ok(())
    }

    /// Has pages of the file in a range read as zeros, and returns what it wrote zeros over. Where there are many, they are replaced by
    /// pages that are zero already, as long as there are any.
    pub fn zero(&self, range: FileBytes, edit: &mut Edit<'a>) -> Result<Vec<ByteRange>> {
        let mut zeroed = Vec::new();
        for Piece { file, pool } in self.table.pieces(range) {
            let Some(place) = pool else { continue };
            let mut zero_in_place = |from_bytes: u64, to_bytes: u64| {
                let offset_bytes = place.offset_bytes + (from_bytes - file.offset_bytes);
                let part = ByteRange { offset_bytes, len_bytes: to_bytes - from_bytes };
                zeroed.push(part);
                self.store_zeros(part)
            };
            let (first, end) =
                (file.offset_bytes.div_ceil(PAGE_BYTES), file.end_bytes() / PAGE_BYTES);
            let mut replaced = FilePages::between(FilePage(first), FilePage(first));
            while replaced.end().0 + LEAST_REPLACED_PAGES <= end && !edit.is_full() {
                let next = replaced.end().0;
                let Some(ready) = self.shared.pool.reserve_ready(end - next)? else { break };
                replaced.pages += edit.take(next, ready).pages;
            }
            match replaced.pages {
                0 => zero_in_place(file.offset_bytes, file.end_bytes())?,
                _ => {
                    zero_in_place(file.offset_bytes, first * PAGE_BYTES)?;
                    zero_in_place(replaced.end().0 * PAGE_BYTES, file.end_bytes())?;
                }
            }
        }
        Ok(zeroed)
    }

    /// Notes that these bytes of pages that the file has come to be inside of it.
    fn expose(&self, from_bytes: u64, to_bytes: u64, edit: &mut Edit<'a>) {
        let range = FileBytes { offset_bytes: from_bytes, len_bytes: to_bytes - from_bytes };
        edit.exposed.extend(self.table.pieces(range).filter_map(|piece| piece.pool));
    }

    pub fn extend(&mut self, size_bytes: u64) -> Result<()> {
        self.check()?;
        let mut edit = Edit { size_bytes: Some(size_bytes), ..Edit::default() };
        self.zero_behind_end(size_bytes, &mut edit)?;
        self.commit(edit)
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
            self.commit(edit)?;
            if is_last {
                return Ok(());
            }
            (self.inode, self.table) = self.shared.table(self.open)?;
        }
    }

    /// Makes an edit, and shows the new table to the readers in this process.
    pub fn commit(&self, edit: Edit<'a>) -> Result<()> {
        let pool = &self.shared.pool;
        let now_ns = now_ns();
        let table = pool.try_change(edit.reservations, |slots| {
            let mut names = Names { slots, now_ns };
            let mut inode = names.inode(self.open.number)?;
            self.open.check(&inode)?;
            let mut table = FileTable::clone(&self.table);
            for (pages, runs) in &edit.splices {
                table.splice(*pages, runs)?;
            }
            table.store(&mut inode, names.slots)?;
            inode.size_bytes = edit.size_bytes.unwrap_or(inode.size_bytes);
            inode.modified_ns = now_ns;
            inode.changed_ns = now_ns;
            names.put(&inode)?;
            edit.exposed.iter().for_each(|range| names.slots.expose(*range));
            Ok::<_, FsError>(table)
        })?;
        self.open.set_table(Arc::new(table));
        Ok(())
    }
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
        let table = open.table();
        let Some(state) = self.pool.file_state(open.number) else { return Ok(false) };
        if state.is_immutable
            || range.end_bytes() > state.size_bytes
            || !table.is_of(open.number, state.incarnation, state.layout_version)
        {
            return Ok(false);
        }
        let Some(place) = table.contiguous(range) else { return Ok(false) };
        lock.settle()?;
        self.pool.store(place.offset_bytes, bytes)?;
        // As precise as file systems of Linux are: a tick of the clock.
        let now_ns = now_ns();
        if now_ns != state.modified_ns {
            self.change(|names| {
                let mut inode = names.inode(open.number)?;
                (inode.modified_ns, inode.changed_ns) = (now_ns, now_ns);
                names.put(&inode)
            })?;
        }
        Ok(true)
    }

    /// Writes zeros over bytes of the pool.
    fn store_zeros(&self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        let mut done = 0;
        while done < len_bytes {
            let part = (len_bytes - done).min(ZEROS.len() as u64);
            self.pool.store(offset_bytes + done, &ZEROS[..part as usize])?;
            done += part;
        }
        Ok(())
    }

    /// Gives back what a file was given to grow into, and the file if it has no name any more.
    pub(super) fn close_written(&self, open: &OpenInode) -> Result<()> {
        if !open.was_given_ahead() {
            return Ok(());
        }
        let lock = &self.pool.lock_file(open.number)?;
        let (inode, table) = self.table(open)?;
        if inode.is_immutable
            || table.pages() * PAGE_BYTES <= inode.size_bytes.next_multiple_of(PAGE_BYTES)
        {
            return Ok(());
        }
        let first = FilePage(inode.size_bytes.div_ceil(PAGE_BYTES));
        let splices = vec![(FilePages::all_from(first), Vec::new())];
        Write { shared: self, lock, open, inode, table }.trim(Edit { splices, ..Edit::default() })
    }
}

impl Write<'_> {
    /// An edit that changes nothing that anybody reads: not even times.
    fn trim(&self, edit: Edit<'_>) -> Result<()> {
        let table = self.shared.change(|names| {
            let mut inode = names.inode(self.open.number)?;
            let mut table = FileTable::clone(&self.table);
            for (pages, runs) in &edit.splices {
                table.splice(*pages, runs)?;
            }
            table.store(&mut inode, names.slots)?;
            names.put(&inode)?;
            Ok(table)
        })?;
        self.open.set_table(Arc::new(table));
        Ok(())
    }
}
