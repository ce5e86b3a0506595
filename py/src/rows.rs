//! `Rows`: a cache of single rows of a file, for rows shorter than a page.
//!
//! An [`aquifer::Rows`] reads and keeps rows, past the page cache; this file translates. There is no mapping, so nothing can
//! fault: what cannot be read is an error of the call.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use aquifer::{CacheError, RowsOptions, RowsStats};
use aquifer_vm::ProcessMark;
use aquifer_vm::worker::JobThread;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::Result;
use crate::list::{List, Listed};
use crate::remote::{RemoteObject, waiting};
use crate::take::{Completions, Signals, target_of};

/// What is read between two looks at signals, or at whether a prefetch goes on: as many rows as these at most, and one at
/// least. A list that is longer is read sorted, so that neighbours still come together.
const BATCH_ROWS: usize = 2048;
const BATCH_BYTES: usize = 16 << 20;

/// A cache of the rows of a file.
#[pyclass(frozen, module = "aquifer._native")]
pub(crate) struct NativeRows {
    /// Of the file's rows, the first ones that there are here.
    count: u64,
    mark: ProcessMark,
    /// `None` only while it is dropped.
    rows: Option<Arc<aquifer::Rows>>,
    coming: Arc<Coming>,
    /// `None` when prefetches have been ended. Locked without the interpreter's lock only, which no holder asks for.
    prefetches: Mutex<Option<JobThread<Prefetch>>>,
    /// Whether a call may wait for a server.
    is_remote: bool,
}

/// What the prefetches have still to read.
#[derive(Default)]
struct Coming {
    rows: AtomicU64,
    is_ended: AtomicBool,
}

struct Prefetch {
    rows: Arc<aquifer::Rows>,
    wanted: Vec<u64>,
    coming: Arc<Coming>,
}

impl Prefetch {
    fn run(self) {
        for batch in self.wanted.chunks(batch_rows(&self.rows)) {
            // Relaxed, here and below: a flag and a number that publish nothing.
            if self.coming.is_ended.load(Ordering::Relaxed) {
                return;
            }
            // What cannot be read is an error of the call that needs it.
            let _ = self.rows.get_many(batch, |_, _| ());
            self.coming.rows.fetch_sub(batch.len() as u64, Ordering::Relaxed);
        }
    }
}

fn batch_rows(rows: &aquifer::Rows) -> usize {
    (BATCH_BYTES / rows.row_bytes()).clamp(1, BATCH_ROWS)
}

impl Drop for NativeRows {
    fn drop(&mut self) {
        Python::attach(|py| {
            self.end_prefetches(py);
            let rows = self.rows.take();
            // Waits for the thread of asynchronous calls.
            py.detach(|| drop(rows));
        });
    }
}

/// Where rows are copied to.
#[derive(Clone, Copy)]
struct Target {
    start: *mut u8,
    row_bytes: usize,
}

// SAFETY: one thread at a time copies, each row to its own place; the caller keeps the target alive.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

impl Target {
    fn copy(&self, position: usize, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.row_bytes);
        let place = self.start.wrapping_add(position * self.row_bytes);
        // SAFETY: inside the target, which has room for as many rows as there are positions; it is Python's memory, and the
        // bytes are the cache's.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
    }
}

fn options(row_bytes: usize, header_bytes: u64, budget_bytes: Option<u64>) -> RowsOptions {
    let options = aquifer::Rows::options(row_bytes).header_bytes(header_bytes);
    match budget_bytes {
        Some(bytes) => options.budget_bytes(bytes),
        None => options,
    }
}

impl NativeRows {
    fn new(rows: aquifer::Rows, is_remote: bool, most: Option<u64>) -> NativeRows {
        let thread = JobThread::new(c"aquifer-prefetch", Prefetch::run);
        NativeRows {
            count: most.map_or(rows.len(), |most| most.min(rows.len())),
            mark: ProcessMark::new(),
            rows: Some(Arc::new(rows)),
            coming: Arc::default(),
            prefetches: Mutex::new(Some(thread)),
            is_remote,
        }
    }

    fn get(&self) -> &Arc<aquifer::Rows> {
        self.rows.as_ref().expect("there until it is dropped")
    }

    /// Fails in a forked child, where nothing of the cache is there.
    fn check_process(&self) -> Result {
        if self.mark.is_current() { Ok(()) } else { Err(CacheError::Forked.into()) }
    }

    /// The rows that `indices` names; negative ones count from the end.
    fn checked(&self, py: Python<'_>, indices: &PyBuffer<i64>) -> Result<Vec<u64>> {
        let rows = List::check(py, indices, self.count)?;
        py.detach(|| rows.all().collect())
    }

    /// `out`, which has room for this many rows.
    fn target(&self, out: &PyBuffer<u8>, rows: usize) -> Result<Target> {
        let row_bytes = self.get().row_bytes();
        Ok(Target { start: target_of(out, row_bytes.checked_mul(rows))?, row_bytes })
    }
}

/// Copies rows in the order of the file, a batch at a time. `go_on` is told whether batches are long, and ends it.
fn copy_sorted(
    rows: &aquifer::Rows,
    mut listed: Vec<Listed>,
    mut copy: impl FnMut(usize, &[u8]),
    mut go_on: impl FnMut(bool) -> bool,
) -> Result {
    let batch_rows = batch_rows(rows);
    listed.sort_unstable();
    let mut wanted = Vec::with_capacity(batch_rows.min(listed.len()));
    for batch in listed.chunks(batch_rows) {
        wanted.clear();
        wanted.extend(batch.iter().map(|&(row, _)| row));
        rows.get_many(&wanted, |place, bytes| copy(batch[place].1, bytes))?;
        if !go_on(batch_rows < BATCH_ROWS) {
            break;
        }
    }
    Ok(())
}

#[pymethods]
impl NativeRows {
    #[staticmethod]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        row_bytes: usize,
        header_bytes: u64,
        budget_bytes: Option<u64>,
        most: Option<u64>,
    ) -> Result<NativeRows> {
        let options = options(row_bytes, header_bytes, budget_bytes);
        let rows = py.detach(|| options.open(path))?;
        Ok(NativeRows::new(rows, false, most))
    }

    /// Opens the rows of an object of a store.
    #[staticmethod]
    fn open_remote(
        py: Python<'_>,
        object: &Bound<'_, RemoteObject>,
        row_bytes: usize,
        header_bytes: u64,
        budget_bytes: Option<u64>,
    ) -> Result<NativeRows> {
        let options = options(row_bytes, header_bytes, budget_bytes);
        let device = object.get().device.share();
        let rows = py.detach(|| options.open_device(device))?;
        Ok(NativeRows::new(rows, true, None))
    }

    fn __len__(&self) -> usize {
        self.count as usize
    }

    /// Copies rows to `out`.
    fn take(&self, py: Python<'_>, indices: PyBuffer<i64>, out: &Bound<'_, PyAny>) -> Result {
        let wanted = List::check(py, &indices, self.count)?;
        let buffer = PyBuffer::get(out)?;
        let target = self.target(&buffer, wanted.len())?;
        let rows = self.get();
        if !self.is_remote && wanted.len() <= batch_rows(rows) {
            let wanted = wanted.all().collect::<Result<Vec<_>>>()?;
            return py.detach(|| {
                Ok(rows.get_many(&wanted, |position, bytes| target.copy(position, bytes))?)
            });
        }
        wanted.in_steps(py, true, |listed| {
            if self.is_remote {
                let rows = rows.clone();
                return waiting(py, vec![out.clone().unbind()], move |call| {
                    let copy = |position, bytes: &[u8]| {
                        call.while_wanted(|| target.copy(position, bytes));
                    };
                    copy_sorted(&rows, listed, copy, |_| call.go_on())
                });
            }
            let mut signals = Signals::new();
            let copied = py.detach(|| {
                let go_on = |is_long| if is_long { signals.look_now() } else { signals.look() };
                let copy = |position, bytes: &[u8]| target.copy(position, bytes);
                copy_sorted(rows, listed, copy, go_on)
            });
            signals.result().and(copied)
        })
    }

    /// Starts reading rows, and does not wait: the first of them, as many as the budget holds with those that prefetches
    /// before have still to read.
    fn prefetch(&self, py: Python<'_>, indices: PyBuffer<i64>) -> Result {
        let mut wanted = self.checked(py, &indices)?;
        self.check_process()?;
        let Coming { rows: coming, .. } = &*self.coming;
        let room = self.get().stats().capacity_rows.saturating_sub(coming.load(Ordering::Relaxed));
        wanted.truncate(usize::try_from(room).unwrap_or(usize::MAX));
        if wanted.is_empty() {
            return Ok(());
        }
        coming.fetch_add(wanted.len() as u64, Ordering::Relaxed);
        let job = Prefetch { rows: self.get().clone(), wanted, coming: self.coming.clone() };
        py.detach(|| {
            let prefetches = self.prefetches.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(thread) = &*prefetches {
                thread.run(job);
            }
        });
        Ok(())
    }

    /// Ends prefetches; waits for the batch under way.
    fn end_prefetches(&self, py: Python<'_>) {
        self.coming.is_ended.store(true, Ordering::Relaxed);
        // A thread of the parent may have the lock.
        if self.check_process().is_ok() {
            py.detach(|| {
                let thread = self.prefetches.lock().unwrap_or_else(PoisonError::into_inner).take();
                drop(thread);
            });
        }
    }

    /// Forgets what it has of the rows from `start` to `stop`.
    fn invalidate(&self, py: Python<'_>, start: u64, stop: u64) -> Result {
        Ok(py.detach(|| self.get().invalidate(start..stop))?)
    }

    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        self.check_process()?;
        let stats = self.get().stats();
        let RowsStats {
            hits,
            misses,
            reads,
            read_bytes,
            evictions,
            resident_rows,
            capacity_rows,
            ..
        } = stats;
        let figures = PyDict::new(py);
        let row_bytes = self.get().row_bytes() as u64;
        for (name, value) in [
            ("row_bytes", row_bytes),
            ("rows", self.count),
            ("resident_rows", resident_rows),
            ("capacity_rows", capacity_rows),
            ("resident_bytes", resident_rows * row_bytes),
            ("hits", hits),
            ("misses", misses),
            ("reads", reads),
            ("read_bytes", read_bytes),
            ("evictions", evictions),
        ] {
            figures.set_item(name, value)?;
        }
        Ok(figures)
    }
}

#[pymethods]
impl Completions {
    /// Starts to copy single rows to `out`; `token` comes back when they are there.
    fn take_single_rows(
        &self,
        py: Python<'_>,
        token: u64,
        rows: &Bound<'_, NativeRows>,
        indices: PyBuffer<i64>,
        out: &Bound<'_, PyAny>,
    ) -> Result {
        let cache = rows.get();
        let wanted = cache.checked(py, &indices)?;
        let target = cache.target(&PyBuffer::<u8>::get(out)?, wanted.len())?;
        let own = cache.get().clone();
        let uses = vec![out.clone().unbind(), rows.clone().into_any().unbind()];
        self.start(py, token, uses, async move {
            let copied =
                own.get_many_async(wanted, move |position, bytes| target.copy(position, bytes));
            Ok(copied.await?)
        })
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeRows>()
}
