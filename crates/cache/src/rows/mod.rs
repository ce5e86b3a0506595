//! [`Rows`]: a cache of fixed-length rows, not of pages.
//!
//! Rows of an embedding table or a feature store are looked up at random, and many are shorter than
//! a page. A cache of pages then holds mostly bytes that nothing asks for: a popular row of 256 bytes
//! keeps fifteen others. Here memory holds rows, and a miss reads the *sectors* of a row (the unit
//! of the device's direct I/O, often 512 bytes), past the page cache, many at a time.
//!
//! # Modules
//! `layout`: where rows are on the device. [`table`]: the rows in memory, and which give way.
//! [`fetch`]: reading the missing ones at the device's queue depth. This file: the calls.
//!
//! # What happens to a batch
//! ```text
//!  rows ──▶ in the table? ──yes──▶ hits ────────────────────┐ copied out while transfers are in flight
//!                │ no                                        ▼
//!                └──▶ misses, sorted ──▶ transfers ──▶ visit(position, bytes)
//!                                            └──▶ table
//! ```
//! A row that is evicted between the first look and the copy is read with the next round of
//! transfers. Two threads that miss one row at the same time both read it; the table keeps one copy.

mod fetch;
mod layout;
mod stats;
mod table;

use std::ops::{Bound, RangeBounds};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use aquifer_device::{Device, FileDevice};
use aquifer_sys::cpu;
use aquifer_vm::ProcessMark;
use aquifer_vm::worker::{JobThread, completion};

use crate::engine::Kind;
use crate::engine::jobs::Task;
use crate::error::{CacheError, Result};
use crate::store::claims::{Claim, Wanted};
use fetch::{MOST_MEMORY_BYTES, Miss, Slots, fetch};
use layout::Layout;
use stats::Counters;
pub use stats::RowsStats;
use table::Table;

/// Options for opening [`Rows`]; made by [`Rows::options`].
#[derive(Debug, Clone)]
pub struct RowsOptions {
    row_bytes: usize,
    header_bytes: u64,
    budget_bytes: Option<u64>,
}

impl RowsOptions {
    /// Bytes before the first row; 0 by default. Any number: rows need no alignment.
    pub fn header_bytes(mut self, bytes: u64) -> Self {
        self.header_bytes = bytes;
        self
    }

    /// DRAM for rows and their bookkeeping (10 bytes a row), a quarter of the machine's memory by
    /// default.
    ///
    /// Memory is taken when it is first used. In addition, each call that reads missing rows takes
    /// up to 4 MiB for transfers, or a row if that is longer (a single [`Rows::get`] 16 KiB, or its
    /// row), and up to 48 bytes for each row of its list. As many such buffers as there are
    /// processors are kept for later calls, but none for rows over 4 MiB and no list over 64 Ki rows.
    pub fn budget_bytes(mut self, bytes: u64) -> Self {
        self.budget_bytes = Some(bytes);
        self
    }

    /// Opens a file or block device, by direct I/O where its file system allows that.
    ///
    /// # Errors
    /// [`CacheError::Open`] if it cannot be opened, or is no regular file or block device; those of
    /// [`RowsOptions::open_device`].
    pub fn open(self, path: impl AsRef<Path>) -> Result<Rows> {
        let file = FileDevice::open(path).map_err(|source| CacheError::Open { source })?;
        self.open_device(file)
    }

    /// Opens the rows of a device.
    ///
    /// # Errors
    /// [`CacheError::RowLayout`] if a row has no bytes, the header is longer than the device, or
    /// transfers need an alignment of more than 2 MiB;
    /// [`CacheError::Budget`] for a budget that is not enough for eight rows, or above the machine's
    /// memory; [`CacheError::AlreadyAttached`] if this process maps the device for writing;
    /// [`CacheError::Device`] if its length cannot be determined; [`CacheError::Kernel`] if the system
    /// refuses address space.
    pub fn open_device(self, device: impl Device) -> Result<Rows> {
        let device: Arc<dyn Device> = Arc::new(device);
        let layout = Layout::of_device(&*device, self.header_bytes, self.row_bytes)?;
        let max_bytes = cpu::memory_bytes();
        let min_bytes = Table::least_bytes(layout.row_bytes);
        let budget_bytes = self.budget_bytes.unwrap_or(max_bytes / 4);
        if budget_bytes < min_bytes || budget_bytes > max_bytes {
            return Err(CacheError::Budget { budget_bytes, min_bytes, max_bytes });
        }
        let claim = Claim::unshared(&Wanted {
            // An address that no other use has: `device` was allocated above.
            cache: Arc::as_ptr(&device).addr(),
            identity: device.identity(),
            device: device.clone(),
            kind: Kind::Kernel,
            len_bytes: layout.bytes_of(layout.rows).start,
            writable: false,
        })?;
        let most_buffers = usize::try_from(budget_bytes / 4).unwrap_or(usize::MAX);
        let buffer_bytes = device.claim_buffers(most_buffers) as u64;
        let table_bytes = budget_bytes.saturating_sub(buffer_bytes).max(min_bytes);
        let table = Table::new(table_bytes, layout.row_bytes, layout.rows)
            .map_err(|source| CacheError::Kernel { what: "reserving memory for rows", source })?;
        Ok(Rows {
            _claim: claim,
            device,
            layout,
            table,
            counters: Counters::default(),
            scratch: Mutex::default(),
            most_scratch: cpu::count(),
            thread: JobThread::new(c"aquifer-rows", |task| task()),
            mark: ProcessMark::new(),
        })
    }
}

/// A cache of fixed-length rows of a file or device, for reading. See the module documentation.
///
/// Of the rows that do not fit into memory, those that are asked for often stay. All methods may be
/// called from any number of threads at once.
///
/// # Changes of the file
/// A row is kept as it was when it was read. If the file changes, rows in memory keep their old
/// content until [`Rows::invalidate`] is called, and a row that is read *while* it changes may be a
/// mix of old and new bytes, as with `read`. Rows that are appended are not seen: the number of rows
/// is that at opening. If the file is truncated, rows that are no longer there fail with
/// [`CacheError::Load`] unless they are in memory. Mapping the device for writing in the same process
/// is refused while it is open here.
///
/// After a fork the child's copy is inert: calls fail with [`CacheError::Forked`].
///
/// ```
/// use aquifer_cache::Rows;
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("table");
/// // A header of 16 bytes and 1,000 rows of 4 numbers.
/// let mut file = vec![0; 16];
/// (0..4000_u32).for_each(|number| file.extend(number.to_le_bytes()));
/// std::fs::write(&path, file)?;
///
/// let rows = Rows::options(16).header_bytes(16).budget_bytes(1 << 20).open(&path)?;
/// assert_eq!(rows.len(), 1000);
/// let mut row = [0; 16];
/// rows.get(7, &mut row)?;
/// assert_eq!(row[..4], 28_u32.to_le_bytes());
///
/// let wanted = [900, 3, 900];
/// let mut sum = 0;
/// rows.get_many(&wanted, |position, bytes| {
///     let first = u32::from_le_bytes(bytes[..4].try_into().unwrap());
///     assert_eq!(u64::from(first), wanted[position] * 4);
///     sum += first;
/// })?;
/// assert_eq!(sum, 3600 + 12 + 3600);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Rows {
    // Dropped before the device, whose address it names.
    _claim: Claim,
    device: Arc<dyn Device>,
    layout: Layout,
    table: Table,
    counters: Counters,
    scratch: Mutex<Vec<Scratch>>,
    /// How many of them are kept.
    most_scratch: usize,
    /// Runs what is awaited.
    thread: JobThread<Task>,
    mark: ProcessMark,
}

/// Memory of one call, reused by later ones.
struct Scratch {
    slots: Slots,
    hits: Vec<usize>,
    misses: Vec<Miss>,
    evicted: Vec<Miss>,
    row: Vec<u8>,
}

/// Lists of more entries are not kept for later calls.
const MOST_KEPT: usize = 64 << 10;
/// How many rows ahead a batch prefetches what it looks up.
const AHEAD: usize = 8;

impl Rows {
    /// Starts opening rows of this length.
    pub fn options(row_bytes: usize) -> RowsOptions {
        RowsOptions { row_bytes, header_bytes: 0, budget_bytes: None }
    }

    /// The number of rows: the whole ones that the device had behind the header when it was opened.
    pub fn len(&self) -> u64 {
        self.layout.rows
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Length of a row.
    pub fn row_bytes(&self) -> usize {
        self.layout.row_bytes
    }

    /// How the device is accessed, as [`Device::access_path`].
    pub fn access_path(&self) -> String {
        self.device.access_path()
    }

    /// Copies a row into `target`.
    ///
    /// # Errors
    /// [`CacheError::RowOutOfRange`]; [`CacheError::Load`] if the row cannot be read, also because the
    /// file was truncated. `target` then has unspecified content, and a later call reads again.
    ///
    /// # Panics
    /// If the length of `target` is not that of a row, like `copy_from_slice`.
    pub fn get(&self, row: u64, target: &mut [u8]) -> Result<()> {
        assert_eq!(target.len(), self.layout.row_bytes, "the target has the length of a row");
        self.check(&[row])?;
        if self.table.copy_row(row, target) {
            self.counters.hits.add(1);
            return Ok(());
        }
        self.counters.misses.add(1);
        let mut scratch = self.take_scratch();
        let miss = Miss { row, position: 0 };
        let read = self.fetch(&mut scratch.slots, &[miss], |_, bytes| {
            target.copy_from_slice(bytes);
            Ok(())
        });
        self.keep_scratch(scratch);
        read
    }

    /// Calls `visit` with each position of `rows` and the bytes of the row there: once for each
    /// position, in *any order*, in the calling thread. A row that occurs several times is read once.
    ///
    /// Missing rows are read at the device's queue depth, neighbouring ones together, and visited
    /// as they arrive, so `visit` should be short, or pass the work on. It may call methods of these
    /// rows.
    ///
    /// # Errors
    /// [`CacheError::RowOutOfRange`] for any row of the list, before the first visit.
    /// [`CacheError::Load`] for the first row that cannot be read; some of the others have then been
    /// visited. [`CacheError::Forked`] in a child that `visit` forked, when it returns there.
    pub fn get_many(&self, rows: &[u64], mut visit: impl FnMut(usize, &[u8])) -> Result<()> {
        self.check(rows)?;
        let mut scratch = self.take_scratch();
        let done = self.visit_all(rows, &mut scratch, &mut visit);
        self.keep_scratch(scratch);
        done
    }

    /// Copies each row of `rows` to its position in `target`: the first one to its first
    /// [`Rows::row_bytes`] bytes, and so on.
    ///
    /// # Errors
    /// As [`Rows::get_many`].
    ///
    /// # Panics
    /// If the length of `target` is not that of all rows.
    pub fn gather(&self, rows: &[u64], target: &mut [u8]) -> Result<()> {
        let row_bytes = self.layout.row_bytes;
        let wanted = rows.len().checked_mul(row_bytes);
        assert_eq!(Some(target.len()), wanted, "the target has the length of the rows");
        self.get_many(rows, |position, bytes| {
            target[position * row_bytes..][..row_bytes].copy_from_slice(bytes);
        })
    }

    /// As [`Rows::get_many`], awaitable on any executor.
    ///
    /// `visit` is called in a thread of these rows, which starts with the first such call and runs
    /// the batches one after another: many rows in one batch are faster than many batches. So
    /// `visit` must not wait for another batch. If it panics, so does the future. The batch runs
    /// even if the future is dropped; the file stays in use until then.
    ///
    /// # Errors
    /// As [`Rows::get_many`].
    pub fn get_many_async<V: FnMut(usize, &[u8]) + Send + 'static>(
        self: &Arc<Self>,
        rows: Vec<u64>,
        visit: V,
    ) -> impl Future<Output = Result<()>> + Send + use<V> {
        self.run_async(move |own| own.get_many(&rows, visit))
    }

    /// The rows of a list, one behind the other, awaitable on any executor; see
    /// [`Rows::get_many_async`].
    ///
    /// ```
    /// # use aquifer_cache::{CacheError, Rows};
    /// # async fn example(table: std::sync::Arc<Rows>) -> Result<(), CacheError> {
    /// let bytes = table.gather_async(vec![900, 3, 900]).await?;
    /// let each: Vec<&[u8]> = bytes.chunks(table.row_bytes()).collect();
    /// assert_eq!(each[0], each[2]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Rows::get_many`].
    pub fn gather_async(
        self: &Arc<Self>,
        rows: Vec<u64>,
    ) -> impl Future<Output = Result<Vec<u8>>> + Send + use<> {
        self.run_async(move |own| {
            own.check(&rows)?;
            let mut bytes = vec![0; rows.len() * own.layout.row_bytes];
            own.gather(&rows, &mut bytes).map(|()| bytes)
        })
    }

    /// Runs `work` on the thread; the future completes with its result.
    fn run_async<T: Send + 'static, W: FnOnce(&Rows) -> Result<T> + Send + 'static>(
        self: &Arc<Self>,
        work: W,
    ) -> impl Future<Output = Result<T>> + Send + use<T, W> {
        let coming = self.mark.is_current().then(|| {
            let (done, coming) = completion();
            let own = self.clone();
            self.thread.run(Box::new(move || {
                // Otherwise the batches behind this one would never run. What a panic leaves of
                // `work` nothing sees, and the rows are shared by threads that may panic anyway.
                let result = catch_unwind(AssertUnwindSafe(|| work(&own)));
                // Before the caller learns the result: it may want to map the file next.
                drop(own);
                done.complete(result);
            }));
            coming
        });
        async move {
            let done = coming.ok_or(CacheError::Forked)?.await;
            match done.map_err(|_| CacheError::Forked)? {
                Ok(result) => result,
                Err(panic) => resume_unwind(panic),
            }
        }
    }

    /// Discards rows from memory, because the file has changed: a call that starts afterwards reads
    /// them anew. Calls that are in progress may still return the old content.
    ///
    /// # Errors
    /// [`CacheError::Forked`].
    pub fn invalidate(&self, rows: impl RangeBounds<u64>) -> Result<()> {
        self.check(&[])?;
        let start = match rows.start_bound() {
            Bound::Included(&first) => first,
            Bound::Excluded(&before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match rows.end_bound() {
            Bound::Included(&last) => last.saturating_add(1),
            Bound::Excluded(&end) => end,
            Bound::Unbounded => u64::MAX,
        };
        self.table.invalidate(start..end.min(self.layout.rows));
        Ok(())
    }

    /// Statistics. All zero in a child of a fork.
    pub fn stats(&self) -> RowsStats {
        if !self.mark.is_current() {
            return RowsStats::default();
        }
        self.counters.snapshot(self.table.resident(), self.table.capacity())
    }

    fn check(&self, rows: &[u64]) -> Result<()> {
        if !self.mark.is_current() {
            return Err(CacheError::Forked);
        }
        match rows.iter().find(|row| **row >= self.layout.rows) {
            Some(&row) => Err(CacheError::RowOutOfRange {
                device: self.device.name().to_owned(),
                row,
                rows: self.layout.rows,
            }),
            None => Ok(()),
        }
    }

    fn fetch(
        &self,
        slots: &mut Slots,
        misses: &[Miss],
        visit: impl FnMut(Miss, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let place = (&*self.device, &self.layout);
        fetch(place, &self.table, &self.counters, slots, misses, visit)
    }

    fn visit_all(
        &self,
        rows: &[u64],
        scratch: &mut Scratch,
        visit: &mut impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        let Scratch { slots, hits, misses, evicted, row: copy } = scratch;
        for (position, &row) in rows.iter().enumerate() {
            if let Some(&ahead) = rows.get(position + AHEAD) {
                self.table.prefetch(ahead);
            }
            if self.table.contains(row) {
                hits.push(position);
            } else {
                misses.push(Miss { row, position });
            }
        }
        let mut found = 0;
        let mut show = |position: usize, bytes: &[u8]| {
            visit(position, bytes);
            if self.mark.is_current() { Ok(()) } else { Err(CacheError::Forked) }
        };
        let mut hit = |position: usize, show: &mut dyn FnMut(usize, &[u8]) -> Result<()>| {
            let row = rows[position];
            if self.table.copy_row(row, copy) {
                found += 1;
                return show(position, copy);
            }
            evicted.push(Miss { row, position });
            Ok(())
        };
        if !misses.is_empty() {
            misses.sort_unstable();
            self.counters.misses.add(misses.len() as u64);
            // The hits are spread over the reads: while the thread copies, the device works.
            let share = hits.len().div_ceil(misses.len());
            self.fetch(slots, misses, |miss, bytes| {
                show(miss.position, bytes)?;
                let mut next = hits.drain(hits.len() - share.min(hits.len())..);
                next.try_for_each(|position| hit(position, &mut show))
            })?;
        }
        hits.drain(..).try_for_each(|position| hit(position, &mut show))?;
        self.counters.hits.add(found);
        if evicted.is_empty() {
            return Ok(());
        }
        // Evicted since the first look, by other threads or by the reads of this batch.
        evicted.sort_unstable();
        self.counters.misses.add(evicted.len() as u64);
        self.fetch(slots, evicted, |miss, bytes| show(miss.position, bytes))
    }

    fn take_scratch(&self) -> Scratch {
        let kept = self.scratch.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.unwrap_or_else(|| Scratch {
            slots: Slots::none(&self.layout),
            hits: Vec::new(),
            misses: Vec::new(),
            evicted: Vec::new(),
            row: vec![0; self.layout.row_bytes],
        })
    }

    fn keep_scratch(&self, mut scratch: Scratch) {
        // In a child a thread of the parent may hold the lock.
        if self.layout.row_bytes > MOST_MEMORY_BYTES || !self.mark.is_current() {
            return;
        }
        let Scratch { hits, misses, evicted, .. } = &mut scratch;
        hits.clear();
        misses.clear();
        evicted.clear();
        if hits.capacity().max(misses.capacity()) > MOST_KEPT {
            (*hits, *misses, *evicted) = Default::default();
        }
        let mut kept = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < self.most_scratch {
            kept.push(scratch);
        }
    }
}
