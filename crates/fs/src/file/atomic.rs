//! Replacing and exchanging pages: one log record, and no byte of data copied or torn.

use std::sync::Arc;

use aquifer_pool::Transaction;
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::MAX_FILE_BYTES;
use aquifer_pool::format::run::Run;
use aquifer_vm::Bytes;

use super::File;
use super::write::{Edit, Write, in_small_pieces};
use crate::error::{FsError, Result};
use crate::file_table::{FileBytes, FilePage, FilePages, FileTable};
use crate::files::now_ns;
use crate::names::Names;

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
        self.check_writes()?;
        if bytes.is_empty() {
            return Ok(());
        }
        let shared = &self.files().shared;
        let lock = &shared.pool.lock_file(self.inode().number)?;
        let (inode, table) = shared.table(self.inode())?;
        let offset_bytes = if self.opened.flags.append { inode.size_bytes } else { offset_bytes };
        let range = FileBytes { offset_bytes, len_bytes: bytes.len() as u64 };
        let write = Write { shared, lock, open: self.inode(), inode, table };
        write.replace(bytes, range)
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
            Ok::<_, FsError>(Write { shared, lock, open, inode, table })
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
            store(&mut names, own.number, &mut own_table)?;
            if !is_one_file {
                store(&mut names, others.number, &mut other_table)?;
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
) -> Result<()> {
    let mut inode = names.inode(number)?;
    table.store(&mut inode, names.slots)?;
    (inode.modified_ns, inode.changed_ns) = (names.now_ns, names.now_ns);
    names.put(&inode)
}

fn whole_pages(offset_bytes: u64, len_bytes: u64) -> Result<FilePages> {
    let not_pages = |reason| Err(FsError::NotPages { reason });
    if !offset_bytes.is_multiple_of(PAGE_BYTES) || !len_bytes.is_multiple_of(PAGE_BYTES) {
        return not_pages("offsets and length are multiples of 4,096");
    }
    if len_bytes == 0 {
        return not_pages("there is nothing to exchange");
    }
    match offset_bytes.checked_add(len_bytes) {
        Some(end) if end <= MAX_FILE_BYTES => Ok(FilePages {
            first: FilePage(offset_bytes / PAGE_BYTES),
            pages: len_bytes / PAGE_BYTES,
        }),
        _ => not_pages("no file is so long"),
    }
}

impl Write<'_> {
    /// Replaces the pages of `range` by new pages with `bytes`.
    fn replace(&self, bytes: &[u8], range: FileBytes) -> Result<()> {
        self.check()?;
        self.check_not_viewed()?;
        let end_bytes = range.offset_bytes.checked_add(range.len_bytes);
        let end_bytes =
            end_bytes.filter(|end| *end <= MAX_FILE_BYTES).ok_or(FsError::FileTooLarge)?;
        let (mut edit, reservations) = self.all_at_once(|turn| {
            let mut edit = Edit::default();
            let mut reservations = Vec::new();
            let pages = range.pages();
            let mut first = pages.first.0;
            while first < pages.end().0 {
                let left = FilePages::between(FilePage(first), pages.end());
                let reserve = || self.reserve(left, false);
                let Some(reservation) = self.one_more(&reservations, turn, left, reserve)? else {
                    return Err(in_small_pieces(&reservations, pages));
                };
                let run = reservation.whole();
                let taken = FilePages { first: FilePage(first), pages: run.pages };
                self.fill_replacing(run, taken, bytes, range)?;
                edit.splices.push((taken, reservation.runs().to_vec()));
                reservations.push(reservation);
                first += run.pages;
            }
            Ok((edit, reservations))
        })?;
        if end_bytes > self.inode.size_bytes {
            edit.size_bytes = Some(end_bytes);
            // In pages before the new ones.
            self.zero_behind_end(range.offset_bytes, &mut edit)?;
        }
        self.commit(edit, reservations)
    }

    /// Fills new pages with the file's current bytes, overlaid with `bytes`.
    fn fill_replacing(
        &self,
        run: Run,
        pages: FilePages,
        bytes: &[u8],
        range: FileBytes,
    ) -> Result<()> {
        let start = pages.first.0 * PAGE_BYTES;
        let end = pages.end().0 * PAGE_BYTES;
        let (from, to) = (start.max(range.offset_bytes), end.min(range.end_bytes()));
        let at = |file_offset: u64| run.bytes().offset_bytes + (file_offset - start);
        // Less than a page before and after `bytes`.
        for (edge_from, edge_to) in [(start, from), (to, end)] {
            let mut edge = vec![0; (edge_to - edge_from) as usize];
            self.shared.read_at(self.open, &mut edge, edge_from)?;
            self.put(at(edge_from), &edge)?;
        }
        let part = (from - range.offset_bytes) as usize..(to - range.offset_bytes) as usize;
        self.put(at(from), &bytes[part])
    }

    /// Zeroes what these pages hold beyond the end of the file, and returns where the pages lie.
    /// Fails if they extend beyond the file's last page.
    fn make_exchangeable(&self, pages: FilePages) -> Result<Vec<aquifer_pool::media::ByteRange>> {
        let size_bytes = self.inode.size_bytes;
        let end_bytes = pages.end().0 * PAGE_BYTES;
        if end_bytes > size_bytes.next_multiple_of(PAGE_BYTES) {
            let reason = "the pages lie behind the end of the file; make it longer first";
            return Err(FsError::NotPages { reason });
        }
        let behind = FileBytes {
            offset_bytes: size_bytes.min(end_bytes),
            len_bytes: end_bytes.saturating_sub(size_bytes),
        };
        for place in self.table.pieces(behind).filter_map(|piece| piece.pool) {
            let is_zero = |bytes: Bytes<'_>| bytes.to_vec().iter().all(|&byte| byte == 0);
            if !self.shared.pool.look_at(place, is_zero)? {
                // Left by a truncation. After a crash without it they are part of the file again,
                // and the exchange leaves no trace of the zeros in its own content.
                self.lock.settle_all()?;
                self.store_zeros(place)?;
            }
        }
        let whole = FileBytes {
            offset_bytes: pages.first.0 * PAGE_BYTES,
            len_bytes: pages.pages * PAGE_BYTES,
        };
        Ok(self.table.pieces(whole).filter_map(|piece| piece.pool).collect())
    }
}
