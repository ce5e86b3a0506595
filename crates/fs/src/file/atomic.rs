//! Replacing and exchanging pages: one log record, and no byte of data copied or torn.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use aquifer_format::file_table::{FileBytes, FilePage, FilePages, FileTable};
use aquifer_pool::Transaction;
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::MAX_FILE_BYTES;
use aquifer_pool::format::run::Run;
use aquifer_pool::media::ByteRange;
use aquifer_vm::Bytes;

use super::File;
use super::write::{Edit, Write, WriteHow, in_small_pieces};
use crate::caller::Caller;
use crate::error::{FsError, Result};
use crate::rules::{self, Privileges};
use crate::transaction::{Names, now_ns};

impl File {
    /// Writes all of `bytes` at `offset_bytes` atomically, whatever their length: readers in all
    /// processes, and processes that open the pool after a crash, see all of them or none.
    ///
    /// The bytes are written to new pages, which then replace the old ones.
    ///
    /// As with any other call, a power cut can undo it until [`File::sync_all`]. It needs room for
    /// the new pages in addition to the old ones.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.write_atomic(&[1; 10_000], 0)?;
    /// file.write_atomic(&[2; 10_000], 0)?; // no reader sees a mix of ones and twos
    /// assert_eq!(file.metadata()?.len(), 10_000);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// As for [`File::write_at`], and [`FsError::InUse`] if there is a [`ViewMut`](crate::ViewMut)
    /// of the file; the pool also counts as full if its free space for the new pages is in more
    /// than 512 pieces. On error, nothing has happened.
    pub fn write_atomic(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        self.write_parts(&[(offset_bytes, bytes)])
    }

    /// [`File::write_atomic`] of several ranges at once: pairs of an offset and the bytes that
    /// belong there. Readers and later processes see all of them, or none. So a page of an index
    /// and the record that it points to change together, without a journal.
    ///
    /// The ranges may be in any order; where two overlap, the later one counts.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let accounts = files.create_file("/accounts")?;
    /// accounts.write_all_at(&[10; 100_000], 0)?;
    /// accounts.write_atomic_ranges(&[(8, &[9]), (90_000, &[11])])?; // no money is lost or made
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::write_atomic`]; [`FsError::NotOpenFor`] also if the file is open for
    /// appending. On error, nothing has happened.
    ///
    /// All ranges are one change of the pool. With thousands of them far apart, it can be too large:
    /// [`PoolError::TooManyRuns`](aquifer_pool::PoolError::TooManyRuns), or in a pool with a short
    /// log [`PoolError::TooLargeForLog`](aquifer_pool::PoolError::TooLargeForLog). Then write fewer
    /// at once.
    pub fn write_atomic_ranges(&self, ranges: &[(u64, &[u8])]) -> Result<()> {
        if self.opened.flags.append {
            return Err(FsError::NotOpenFor { what: "writing at offsets, but for appending" });
        }
        self.write_parts(ranges)
    }

    fn write_parts(&self, parts: &[(u64, &[u8])]) -> Result<()> {
        self.check_writes()?;
        let mut parts: Vec<_> =
            parts.iter().copied().filter(|(_, bytes)| !bytes.is_empty()).collect();
        if parts.is_empty() {
            return Ok(());
        }
        let shared = &self.files().shared;
        let lock = &shared.pool.lock_file(self.inode().number)?;
        let (inode, table) = shared.table(self.inode())?;
        if self.opened.flags.append {
            parts.iter_mut().for_each(|part| part.0 = inode.size_bytes);
        }
        Write { shared, lock, open: self.inode(), inode, table, how: WriteHow::default() }
            .replace(&parts)
    }

    /// Exchanges whole pages with another file, or with another part of this one: `len_bytes` from
    /// `offset_bytes` on with as many of `other` from `other_offset_bytes` on.
    ///
    /// Nothing is copied, whatever the length. Readers in all processes always see both files
    /// before the exchange or both after it, also after a crash. So a large part of a file can be
    /// replaced at once: write it to a file without readers, and exchange. The MPFS paper calls this
    /// *pswap*.
    ///
    /// Until the exchange is durable, a power cut can undo it. So the next overwrite of bytes of
    /// either file first waits until it is durable, once; otherwise the other file could get these
    /// pages back with the new bytes in them. The exchange itself first waits for a truncation that
    /// is not durable, if that left bytes beyond the end of a file's last page: it zeroes them.
    ///
    /// All three numbers are multiples of 4,096, and neither range extends beyond the last page of
    /// its file.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let (current, new) = (files.create_file("/current")?, files.create_file("/new")?);
    /// current.write_all_at(&[1; 8192], 0)?;
    /// new.write_all_at(&[2; 8192], 0)?;
    /// current.exchange_range(0, &new, 0, 8192)?;
    /// let mut bytes = [0; 8192];
    /// files.open_file("/current")?.read_at(&mut bytes, 0)?;
    /// assert!(bytes == [2; 8192]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotPages`] if the ranges are not whole pages of both files, or overlapping parts
    /// of one file; [`FsError::OtherPool`]; [`FsError::InUse`] if there is a
    /// [`ViewMut`](crate::ViewMut) of one of the files;
    /// [`PoolError::TooManyRuns`](aquifer_pool::PoolError::TooManyRuns) if the pages lie in more
    /// than 4,096 pieces, which can be exchanged in parts; others as for [`File::write_at`]. On
    /// error, nothing has happened.
    pub fn exchange_range(
        &self,
        offset_bytes: u64,
        other: &File,
        other_offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<()> {
        self.check_writes()?;
        other.check_writes()?;
        let shared = &self.files().shared;
        if !Arc::ptr_eq(shared, &other.files().shared) {
            return Err(FsError::OtherPool);
        }
        let (own, others) = (self.inode(), other.inode());
        let own_range = whole_pages(offset_bytes, len_bytes)?;
        let other_range = whole_pages(other_offset_bytes, len_bytes)?;
        let is_one_file = own.number == others.number;
        let overlap = own_range.first < other_range.end() && other_range.first < own_range.end();
        if is_one_file && overlap {
            return Err(FsError::NotPages { reason: "the two parts of the file overlap" });
        }
        let lock = &shared.pool.lock_two_files(own.number, others.number)?;
        // Keep the tables read here. `OpenInode::table` can change later: a reader may publish an
        // older one at any time.
        let of = |open| {
            let (inode, table) = shared.table(open)?;
            Ok::<_, FsError>(Write { shared, lock, open, inode, table, how: WriteHow::default() })
        };
        let (own_write, other_write) = (of(own)?, of(others)?);
        let mut exposed = Vec::new();
        for (write, range) in [(&own_write, own_range), (&other_write, other_range)] {
            write.check()?;
            write.check_not_viewed()?;
            exposed.append(&mut write.make_exchangeable(range)?);
        }
        let now_ns = now_ns();
        let change = |slots: &mut Transaction<'_>| {
            let mut names = Names { slots, now_ns };
            let mut own_table = FileTable::clone(&own_write.table);
            let mut other_table = FileTable::clone(&other_write.table);
            let runs = |table: &FileTable, range: FilePages| -> Vec<Run> {
                table.extents(range).map(|extent| extent.run).flat_map(cut).collect()
            };
            let (own_runs, other_runs) =
                (runs(&own_table, own_range), runs(&other_table, other_range));
            own_table.splice(own_range, &other_runs)?;
            let both = if is_one_file { &mut own_table } else { &mut other_table };
            both.splice(other_range, &own_runs)?;
            store(&mut names, own.number, &mut own_table, &shared.caller)?;
            if !is_one_file {
                store(&mut names, others.number, &mut other_table, &shared.caller)?;
            }
            exposed.iter().for_each(|range| names.slots.expose(*range));
            Ok::<_, FsError>((own_table, other_table))
        };
        // SAFETY: both files' locks are held, and both files were found mutable under them, so
        // neither has a lease.
        let exchange = || unsafe { shared.pool.try_change(Vec::new(), change) };
        let tables = lock.exchange(exchange)?;
        own.set_table(Arc::new(tables.0));
        if !is_one_file {
            others.set_table(Arc::new(tables.1));
        }
        Ok(())
    }
}

/// Cuts a run into runs that are short enough to be stored.
fn cut(run: Run) -> impl Iterator<Item = Run> {
    const MOST: u64 = aquifer_pool::format::run::MAX_RUN_PAGES;
    let most = if run.is_hole() { u64::MAX } else { MOST };
    (0..run.pages.div_ceil(most)).map(move |index| Run {
        start_page: if run.is_hole() { 0 } else { run.start_page + index * most },
        pages: (run.pages - index * most).min(most),
    })
}

fn store<S: aquifer_pool::ChangeSlots<Error = aquifer_pool::PoolError>>(
    names: &mut Names<'_, S>,
    number: u64,
    table: &mut FileTable,
    by: &Caller,
) -> Result<()> {
    let mut inode = names.inode(number)?;
    table.store(&mut inode, names.slots)?;
    if let Some(lost) = rules::privileges_lost(&inode, names.slots, by, Privileges::default())? {
        names.drop_privileges(&mut inode, lost)?;
    }
    (inode.modified_ns, inode.changed_ns) = (names.now_ns, names.now_ns);
    names.put(&inode)
}

/// Returns the pages of a range, which must be whole ones.
pub(super) fn whole_pages(offset_bytes: u64, len_bytes: u64) -> Result<FilePages> {
    let not_pages = |reason| Err(FsError::NotPages { reason });
    if !offset_bytes.is_multiple_of(PAGE_BYTES) || !len_bytes.is_multiple_of(PAGE_BYTES) {
        return not_pages("offsets and length are multiples of 4,096");
    }
    if len_bytes == 0 {
        return not_pages("there is none");
    }
    match offset_bytes.checked_add(len_bytes) {
        Some(end) if end <= MAX_FILE_BYTES => Ok(FilePages {
            first: FilePage(offset_bytes / PAGE_BYTES),
            pages: len_bytes / PAGE_BYTES,
        }),
        _ => not_pages("no file is so long"),
    }
}

/// The bytes that count in these parts of a file, in order and without overlaps: where two parts
/// overlap, the later one counts.
fn without_overlaps<'b>(parts: &[(u64, &'b [u8])]) -> Vec<(u64, &'b [u8])> {
    let mut counting = Vec::with_capacity(parts.len());
    // Start and end of what later parts cover, apart from each other: each part joins all that it
    // touches, so none is visited twice.
    let mut covered = BTreeMap::<u64, u64>::new();
    for part in parts.iter().rev() {
        let (offset_bytes, end_bytes) = (part.0, range_of(part).end_bytes());
        let mut count = |from: u64, to: u64| {
            if from < to {
                let inside = (from - offset_bytes) as usize..(to - offset_bytes) as usize;
                counting.push((from, &part.1[inside]));
            }
        };
        let (mut joined, mut left_to) = ((offset_bytes, end_bytes), end_bytes);
        while let Some((&start, &end)) = covered.range(..=left_to).next_back()
            && end >= offset_bytes
        {
            covered.remove(&start);
            count(end, left_to);
            joined = (joined.0.min(start), joined.1.max(end));
            left_to = start;
        }
        count(offset_bytes, left_to);
        covered.insert(joined.0, joined.1);
    }
    counting.sort_unstable_by_key(|part| part.0);
    counting
}

/// The pages that these parts of a file, which are in order, touch; adjacent ones together.
fn pages_of(parts: &[(u64, &[u8])]) -> Vec<FilePages> {
    let mut touched: Vec<FilePages> = parts.iter().map(|part| range_of(part).pages()).collect();
    touched.dedup_by(|next, pages| {
        let continues = next.first <= pages.end();
        if continues {
            *pages = FilePages::between(pages.first, pages.end().max(next.end()));
        }
        continues
    });
    touched
}

fn range_of((offset_bytes, bytes): &(u64, &[u8])) -> FileBytes {
    FileBytes { offset_bytes: *offset_bytes, len_bytes: bytes.len() as u64 }
}

impl Write<'_> {
    /// Writes bytes at offsets of the file to new pages, which replace those that were there.
    fn replace(&self, parts: &[(u64, &[u8])]) -> Result<()> {
        self.check()?;
        self.check_not_viewed()?;
        let end_bytes = parts.iter().map(|part| range_of(part).end_bytes()).max().unwrap_or(0);
        if end_bytes > MAX_FILE_BYTES {
            return Err(FsError::FileTooLarge);
        }
        let parts = &without_overlaps(parts);
        let touched = pages_of(parts);
        let (mut edit, reservations) = self.all_at_once(|turn| {
            let mut edit = Edit::default();
            let mut reservations = Vec::new();
            let mut left = VecDeque::from(touched.clone());
            // Pages that are apart in the file are still reserved together.
            while let Some(next) = left.front() {
                let pages = left.iter().map(|pages| pages.pages).sum();
                let wanted = FilePages { first: next.first, pages };
                let reserve = || self.reserve(wanted, false);
                let Some(reservation) = self.one_more(&reservations, turn, wanted, reserve)? else {
                    return Err(in_small_pieces(&reservations, wanted));
                };
                for run in reservation.runs() {
                    self.put_parts(*run, &mut left, parts, &mut edit)?;
                }
                reservations.push(reservation);
            }
            Ok((edit, reservations))
        })?;
        if end_bytes > self.inode.size_bytes {
            edit.size_bytes = Some(end_bytes);
            // Pages behind the end that come to lie inside, between the new ones.
            let mut from_bytes = self.inode.size_bytes;
            for pages in &touched {
                let to_bytes = pages.first.0 * PAGE_BYTES;
                if from_bytes == self.inode.size_bytes {
                    self.settle_behind_end(to_bytes)?;
                }
                self.zero_between(from_bytes, to_bytes, &mut edit)?;
                from_bytes = from_bytes.max(pages.end().0 * PAGE_BYTES);
            }
        }
        self.commit(edit, reservations)
    }

    /// Fills a new run for the first pages that are left, and adds it to the edit.
    fn put_parts(
        &self,
        mut run: Run,
        left: &mut VecDeque<FilePages>,
        parts: &[(u64, &[u8])],
        edit: &mut Edit<'_>,
    ) -> Result<()> {
        while !run.is_empty()
            && let Some(pages) = left.front_mut()
        {
            let taken = FilePages { pages: pages.pages.min(run.pages), ..*pages };
            let part = Run { pages: taken.pages, ..run };
            self.fill_replacing(part, taken, parts)?;
            edit.splices.push((taken, vec![part]));
            run = Run { start_page: part.end_page(), pages: run.pages - part.pages };
            *pages = FilePages::between(taken.end(), pages.end());
            if pages.pages == 0 {
                left.pop_front();
            }
        }
        Ok(())
    }

    /// Fills new pages with the file's current bytes, overlaid with these parts, which are in order
    /// and do not overlap.
    fn fill_replacing(&self, run: Run, pages: FilePages, parts: &[(u64, &[u8])]) -> Result<()> {
        let (start, end) = (pages.first.0 * PAGE_BYTES, pages.end().0 * PAGE_BYTES);
        let at = |file_offset: u64| run.bytes().offset_bytes + (file_offset - start);
        let first = parts.partition_point(|part| range_of(part).end_bytes() <= start);
        let inside = parts[first..].iter().take_while(|part| part.0 < end).map(|part| {
            let (from, to) = (part.0.max(start), range_of(part).end_bytes().min(end));
            (from, &part.1[(from - part.0) as usize..(to - part.0) as usize])
        });
        // Each page is touched, so less than two pages are left before, between and after the
        // parts.
        let mut kept_from = start;
        for (from, bytes) in inside.chain([(end, &[][..])]) {
            let mut kept = vec![0; (from - kept_from) as usize];
            if !kept.is_empty() {
                self.shared.read_at(self.open, &mut kept, kept_from)?;
                self.put(at(kept_from), &kept)?;
            }
            self.put(at(from), bytes)?;
            kept_from = from + bytes.len() as u64;
        }
        Ok(())
    }

    /// Prepares a change that is atomic also for content, and that overwrites bytes behind the end
    /// of the file, up to `to_bytes`, in place. Returns those of them that are not all zero.
    ///
    /// Only the last page can have such bytes that were the file's, left by a truncation. After a
    /// crash without it they are part of the file again, and zeros among them would be content of
    /// no moment. So the truncation becomes durable first.
    fn settle_behind_end(&self, to_bytes: u64) -> Result<Option<ByteRange>> {
        let offset_bytes = self.inode.size_bytes;
        let end_bytes = to_bytes.min(offset_bytes.next_multiple_of(PAGE_BYTES));
        let len_bytes = end_bytes.saturating_sub(offset_bytes);
        let mut pieces = self.table.pieces(FileBytes { offset_bytes, len_bytes });
        let Some(place) = pieces.find_map(|piece| piece.pool) else { return Ok(None) };
        let is_zero = |bytes: Bytes<'_>| bytes.to_vec().iter().all(|&byte| byte == 0);
        if self.shared.pool.look_at(place, is_zero)? {
            return Ok(None);
        }
        self.lock.settle_all()?;
        Ok(Some(place))
    }

    /// Zeroes what these pages hold beyond the end of the file, and returns where the pages lie.
    /// Fails if they extend beyond the file's last page.
    fn make_exchangeable(&self, pages: FilePages) -> Result<Vec<ByteRange>> {
        let size_bytes = self.inode.size_bytes;
        let end_bytes = pages.end().0 * PAGE_BYTES;
        if end_bytes > size_bytes.next_multiple_of(PAGE_BYTES) {
            let reason = "the pages lie behind the end of the file; make it longer first";
            return Err(FsError::NotPages { reason });
        }
        if let Some(behind) = self.settle_behind_end(end_bytes)? {
            self.store_zeros(behind)?;
        }
        let whole = FileBytes {
            offset_bytes: pages.first.0 * PAGE_BYTES,
            len_bytes: pages.pages * PAGE_BYTES,
        };
        Ok(self.table.pieces(whole).filter_map(|piece| piece.pool).collect())
    }
}
