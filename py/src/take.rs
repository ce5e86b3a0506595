//! Many rows at once: `take`, `prefetch`, and their asynchronous forms.
//!
//! Rows are copied by [`aquifer::Mapping::visit_many`]: sorted, neighbours in one read, many reads in flight, without the
//! interpreter's lock. A call that takes long looks for signals of the interpreter (Ctrl-C) as it goes.
//!
//! Asynchronous calls complete through the descriptor of a [`Completions`], which an event loop watches. The target belongs
//! to the call until its token has been taken: [`Completions`] holds the Python objects until then, whatever has become of the
//! task that awaits them.

use std::collections::HashMap;
use std::ops::{ControlFlow, Range};
use std::os::fd::AsRawFd as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use aquifer::{Bytes, Mapping, Ready};
use aquifer_sys::memory;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::{Failure, Result};
use crate::list::{List, Listed, Numbers, STEP_ROWS};
use crate::memmap::{Mapped, PAGE, Region};
use crate::remote::{Wanted, waiting};

/// How often a long call looks for signals.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Copies between two looks at the clock.
const COPIES_A_LOOK: u32 = 64;

/// Rows of one length at equal distances: an array, or a slice of one along its first axis.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    /// Offset of the first row in the mapping.
    base: u64,
    rows: u64,
    row_bytes: u64,
    /// From one row to the next; negative for a reversed slice.
    stride: i64,
}

impl<'py> FromPyObject<'_, 'py> for Layout {
    type Error = PyErr;

    fn extract(tuple: Borrowed<'_, 'py, PyAny>) -> PyResult<Layout> {
        let (base, rows, row_bytes, stride) = tuple.extract()?;
        Ok(Layout { base, rows, row_bytes, stride })
    }
}

impl Layout {
    /// The offset of a row that lies inside of `len_bytes`.
    fn start_of(&self, row: u64, len_bytes: u64) -> Option<u64> {
        let distance = self.stride.checked_mul(i64::try_from(row).ok()?)?;
        let start = self.base.checked_add_signed(distance)?;
        (start.checked_add(self.row_bytes)? <= len_bytes).then_some(start)
    }
}

/// Bytes of a mapping or an object, and where they go.
pub(crate) struct Piece {
    pub start: u64,
    pub len: usize,
    /// Offset in the target.
    pub at: usize,
}

/// What a call reads.
pub(crate) struct Ranges {
    pieces: Vec<Piece>,
    target: *mut u8,
}

// SAFETY: the pieces of the target are disjoint, and one thread at a time copies; the caller keeps the target alive.
unsafe impl Send for Ranges {}
// SAFETY: as above.
unsafe impl Sync for Ranges {}

impl Ranges {
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    pub fn range(&self, index: usize) -> Range<u64> {
        let piece = &self.pieces[index];
        piece.start..piece.start + piece.len as u64
    }

    pub fn all(&self) -> impl Iterator<Item = Range<u64>> {
        (0..self.len()).map(|index| self.range(index))
    }

    /// Where a piece goes.
    #[expect(clippy::mut_from_ref, reason = "the memory is the target's, not that of the list")]
    fn target_of(&self, index: usize) -> &mut [u8] {
        let piece = &self.pieces[index];
        // SAFETY: inside the target, whose length was checked; the pieces are disjoint, and one thread copies.
        unsafe { std::slice::from_raw_parts_mut(self.target.add(piece.at), piece.len) }
    }

    /// Copies bytes of a piece that lie at `offset`.
    pub fn copy(&self, index: usize, offset: u64, bytes: Bytes<'_>) {
        let piece = &self.pieces[index];
        let at = piece.at + (offset - piece.start) as usize;
        // SAFETY: inside the target, whose length was checked.
        let target = unsafe { std::slice::from_raw_parts_mut(self.target.add(at), bytes.len()) };
        bytes.copy_to(0, target);
    }
}

fn invalid(text: &str) -> Failure {
    PyValueError::new_err(text.to_owned()).into()
}

/// The address of a target of this many bytes.
pub(crate) fn target_of(out: &PyBuffer<u8>, len: Option<usize>) -> Result<*mut u8> {
    if out.readonly() || !out.is_c_contiguous() {
        return Err(invalid("out must be writable and C-contiguous"));
    }
    if Some(out.len_bytes()) != len {
        return Err(invalid("out has another size than what is read"));
    }
    Ok(out.buf_ptr().cast())
}

/// Ranges that a call reads, which go to its target one after the other.
pub(crate) struct Listing<'a> {
    starts: Numbers<'a>,
    lengths: Numbers<'a>,
    /// Of what they are ranges of.
    len_bytes: u64,
    /// Of all ranges together.
    total_bytes: usize,
}

impl<'a> Listing<'a> {
    /// Checks all ranges of what has `len_bytes`.
    pub fn check(
        py: Python<'_>,
        starts: &'a PyBuffer<i64>,
        lengths: &'a PyBuffer<i64>,
        len_bytes: u64,
    ) -> Result<Listing<'a>> {
        let (starts, lengths) = (Numbers::of(starts)?, Numbers::of(lengths)?);
        if starts.len() != lengths.len() {
            return Err(invalid("there must be as many lengths as starts"));
        }
        let mut listing = Listing { starts, lengths, len_bytes, total_bytes: usize::MAX };
        let mut end = 0;
        for first in (0..starts.len()).step_by(STEP_ROWS) {
            end = py.detach(|| listing.pieces(first, end, |_| ()))?;
            py.check_signals()?;
        }
        listing.total_bytes = end;
        Ok(listing)
    }

    /// Passes on the ranges of a step, from the place `first` on, whose bytes go to `at` and behind; the end of the last one.
    fn pieces(&self, first: usize, mut at: usize, mut each: impl FnMut(Piece)) -> Result<usize> {
        for place in first..self.starts.len().min(first + STEP_ROWS) {
            let (start, len) = (self.starts.get(place), self.lengths.get(place));
            let (Ok(start), Ok(len)) = (u64::try_from(start), usize::try_from(len)) else {
                return Err(invalid("a range has a negative number"));
            };
            if start.checked_add(len as u64).is_none_or(|end| end > self.len_bytes) {
                return Err(invalid("a range ends behind what is read"));
            }
            // Ranges may overlap: all together they may be longer than any memory. And another thread may have changed them.
            let end = at.checked_add(len).filter(|&end| end <= self.total_bytes);
            let end = end.ok_or_else(|| invalid("the ranges have too many bytes"))?;
            each(Piece { start, len, at });
            at = end;
        }
        Ok(at)
    }

    /// The address of a target that has room for all ranges.
    pub fn target(&self, out: &PyBuffer<u8>) -> Result<*mut u8> {
        target_of(out, Some(self.total_bytes))
    }

    /// Calls `step` with all ranges, at most [`STEP_ROWS`] a time.
    ///
    /// # Errors
    /// Those of `step`, or what the handler of a signal has raised between two steps.
    pub fn in_steps(&self, py: Python<'_>, mut step: impl FnMut(Vec<Piece>) -> Result) -> Result {
        let mut at = 0;
        for first in (0..self.starts.len()).step_by(STEP_ROWS) {
            if first > 0 {
                py.check_signals()?;
            }
            let mut pieces = Vec::with_capacity(STEP_ROWS.min(self.starts.len() - first));
            at = self.pieces(first, at, |piece| pieces.push(piece))?;
            step(pieces)?;
        }
        Ok(())
    }
}

/// The rows of a call, whose pieces have one length.
#[derive(Clone, Copy)]
struct Chosen {
    layout: Layout,
    row_bytes: usize,
    /// Of the mapping.
    len_bytes: u64,
}

impl Chosen {
    fn of(layout: Layout, region: &Region) -> Result<Chosen> {
        let row_bytes =
            usize::try_from(layout.row_bytes).map_err(|_| invalid("rows are too long"))?;
        Ok(Chosen { layout, row_bytes, len_bytes: region.len() })
    }

    /// The address of a target that has room for this many rows.
    fn target(&self, out: &PyBuffer<u8>, rows: usize) -> Result<*mut u8> {
        target_of(out, self.row_bytes.checked_mul(rows))
    }

    fn piece(&self, (row, place): Listed) -> Result<Piece> {
        let start = self.layout.start_of(row, self.len_bytes);
        let start = start.ok_or_else(|| invalid("the rows end behind the mapping"))?;
        Ok(Piece { start, len: self.row_bytes, at: place * self.row_bytes })
    }
}

/// Looks for signals now and then; what the handler of one raised.
pub(crate) struct Signals {
    calls: u32,
    looked: Instant,
    raised: Option<PyErr>,
}

impl Signals {
    pub fn new() -> Signals {
        Signals { calls: 0, looked: Instant::now(), raised: None }
    }

    /// Whether the call goes on; asked after each copy.
    fn go_on(&mut self) -> bool {
        self.calls = self.calls.wrapping_add(1);
        !self.calls.is_multiple_of(COPIES_A_LOOK) || self.look()
    }

    /// Whether the call goes on; asked after many copies.
    pub fn look(&mut self) -> bool {
        self.looked.elapsed() < LOOK_EVERY || self.look_now()
    }

    /// As `look`, whatever the time; asked after very many bytes.
    pub fn look_now(&mut self) -> bool {
        self.looked = Instant::now();
        self.raised = Python::attach(|py| py.check_signals()).err();
        self.raised.is_none()
    }

    /// What the handler of a signal raised, which ended the call.
    pub fn result(self) -> Result {
        self.raised.map_or(Ok(()), |raised| Err(raised.into()))
    }
}

impl Region {
    /// Whether rows are in memory, at the moment.
    fn has_rows(&self, layout: Layout, rows: Range<u64>) -> Result<bool> {
        let at = |row| {
            let start = layout.start_of(row, self.len());
            start.ok_or_else(|| invalid("the rows end behind the mapping"))
        };
        let (first, last) = (at(rows.start)?, at(rows.end - 1)?);
        let bytes = first.min(last)..first.max(last) + layout.row_bytes;
        if self.mapped.mapping().is_some() {
            return self.has(bytes);
        }
        let mut resident = [0; 4096];
        let end = self.data().addr() + bytes.end as usize;
        let start = self.data().addr() + bytes.start as usize;
        for page in (start - start % PAGE as usize..end).step_by(resident.len() * PAGE as usize) {
            let pages = (end - page).div_ceil(PAGE as usize).min(resident.len());
            let address = std::ptr::without_provenance(page);
            memory::residency(address, pages * PAGE as usize, &mut resident)?;
            if resident[..pages].iter().any(|page| page & 1 == 0) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Copies rows that are in memory, or most of them: one after the other, as they are listed.
    fn copy_each(&self, py: Python<'_>, ranges: &Ranges) -> Result {
        let mut signals = Signals::new();
        let copied = py.detach(|| {
            for index in 0..ranges.len() {
                let start = ranges.range(index).start;
                let target = ranges.target_of(index);
                match &*self.mapped {
                    Mapped::View(view) => view.read_exact_at(target, start)?,
                    mapped => {
                        let copy = |mapping: &Mapping| mapping.read_exact_at(target, start);
                        mapped.mapping().map_or(Ok(()), copy)?;
                    }
                }
                if !signals.go_on() {
                    break;
                }
            }
            Ok(())
        });
        signals.result().and(copied)
    }

    /// Copies to the memory of `out`. Interrupted by signals as it goes, so that one call of it may take long.
    fn copy_all(&self, py: Python<'_>, ranges: Ranges, out: &Bound<'_, PyAny>) -> Result {
        let mut wait = false;
        if self.is_remote {
            for range in ranges.all() {
                wait = wait || !self.has(range)?;
            }
        }
        if wait {
            let mapped = self.mapped.share();
            let copy_all = move |wanted: Wanted| {
                let copying = |copy: &dyn Fn()| {
                    wanted.while_wanted(copy);
                };
                mapped.copy_many(&ranges, copying, || wanted.go_on())
            };
            return waiting(py, vec![out.clone().unbind()], copy_all);
        }
        let mut signals = Signals::new();
        let copied =
            py.detach(|| self.mapped.copy_many(&ranges, |copy| copy(), || signals.go_on()));
        signals.result().and(copied)
    }
}

#[pymethods]
impl Region {
    /// Copies rows to `out`.
    fn take(
        &self,
        py: Python<'_>,
        layout: Layout,
        indices: PyBuffer<i64>,
        out: &Bound<'_, PyAny>,
    ) -> Result {
        let buffer = PyBuffer::<u8>::get(out)?;
        let rows = List::check(py, &indices, layout.rows)?;
        let chosen = Chosen::of(layout, self)?;
        let target = chosen.target(&buffer, rows.len())?;
        let is_here = rows.is_long() && self.has_rows(layout, rows.span())?;
        rows.in_steps(py, !is_here, |listed| {
            let pieces = listed.into_iter().map(|listed| chosen.piece(listed));
            let ranges = Ranges { pieces: pieces.collect::<Result<_>>()?, target };
            if is_here {
                return self.copy_each(py, &ranges);
            }
            self.copy_all(py, ranges, out)
        })
    }

    /// Copies `lengths` bytes from each of `starts` on to `out`, one after the other.
    fn read_ranges(
        &self,
        py: Python<'_>,
        starts: PyBuffer<i64>,
        lengths: PyBuffer<i64>,
        out: &Bound<'_, PyAny>,
    ) -> Result {
        let buffer = PyBuffer::<u8>::get(out)?;
        let listing = Listing::check(py, &starts, &lengths, self.len())?;
        let target = listing.target(&buffer)?;
        listing.in_steps(py, |pieces| self.copy_all(py, Ranges { pieces, target }, out))
    }

    /// Starts reading rows, and does not wait.
    fn prefetch(&self, py: Python<'_>, layout: Layout, indices: PyBuffer<i64>) -> Result {
        let ranges = all_of(py, self, layout, &indices, None)?;
        py.detach(|| {
            let mut wanted: Vec<_> = ranges.all().collect();
            wanted.sort_unstable_by_key(|range| range.start);
            match &*self.mapped {
                Mapped::View(view) => drop(view.prefetch(&wanted)?),
                mapped => mapped.mapping().map_or(Ok(()), |mapping| mapping.prefetch(&wanted))?,
            }
            Ok(())
        })
    }
}

/// All rows of a list at once, for calls that return before they are read.
fn all_of(
    py: Python<'_>,
    region: &Region,
    layout: Layout,
    indices: &PyBuffer<i64>,
    out: Option<&PyBuffer<u8>>,
) -> Result<Ranges> {
    let rows = List::check(py, indices, layout.rows)?;
    let chosen = Chosen::of(layout, region)?;
    let target = out.map_or(Ok(std::ptr::null_mut()), |out| chosen.target(out, rows.len()))?;
    let mut pieces = Vec::with_capacity(rows.len());
    rows.in_steps(py, false, |listed| {
        for listed in listed {
            pieces.push(chosen.piece(listed)?);
        }
        Ok(())
    })?;
    Ok(Ranges { pieces, target })
}

/// Calls under way, whose completions make a descriptor readable.
#[pyclass(frozen, module = "aquifer._native")]
pub(crate) struct Completions {
    ready: Ready<std::result::Result<(), aquifer::Error>>,
    /// What the calls under way use, by token.
    held: Mutex<HashMap<u64, Vec<Py<PyAny>>>>,
}

impl Completions {
    /// Keeps what a call uses, or drops it: without the lock, as the end of an object may be code of Python, which may come
    /// here again.
    fn hold(&self, token: u64, uses: Option<Vec<Py<PyAny>>>) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match uses {
            Some(uses) => held.insert(token, uses),
            None => held.remove(&token),
        };
        drop(held);
        drop(before);
    }

    /// Adds a call, which begins when its future is polled: not before it is accepted. Keeps what it uses until it has
    /// completed.
    pub fn start(
        &self,
        py: Python<'_>,
        token: u64,
        uses: Vec<Py<PyAny>>,
        call: impl Future<Output = std::result::Result<(), aquifer::Error>> + Send + 'static,
    ) -> Result {
        self.hold(token, Some(uses));
        let added = py.detach(|| self.ready.add(token, call));
        if added.is_err() {
            self.hold(token, None);
        }
        Ok(added?)
    }
}

/// The targets are written to until the calls have ended.
impl Drop for Completions {
    fn drop(&mut self) {
        Python::attach(|py| {
            py.detach(|| {
                // Interrupted by a signal, or the last was taken: asked again. False in a forked child, whose memory no call
                // of the parent writes to.
                while self.ready.wait().unwrap_or(true) {
                    self.ready.take(usize::MAX);
                }
            });
        });
    }
}

#[pymethods]
impl Completions {
    #[new]
    fn new() -> Result<Completions> {
        Ok(Completions { ready: Ready::new()?, held: Mutex::default() })
    }

    fn fileno(&self) -> i32 {
        self.ready.fd().as_raw_fd()
    }

    fn __len__(&self) -> usize {
        self.ready.len()
    }

    /// Starts to copy rows to `out`; `token` comes back when they are there.
    fn take_rows(
        &self,
        py: Python<'_>,
        token: u64,
        region: &Bound<'_, Region>,
        layout: Layout,
        indices: PyBuffer<i64>,
        out: &Bound<'_, PyAny>,
    ) -> Result {
        let target = PyBuffer::<u8>::get(out)?;
        let ranges = all_of(py, region.get(), layout, &indices, Some(&target))?;
        let mapped = region.get().mapped.share();
        // The object, not its buffer: the engine's threads must drop nothing of Python.
        let uses = vec![out.clone().unbind(), region.clone().into_any().unbind()];
        let wanted: Vec<_> = ranges.all().collect();
        let coming = match &*mapped {
            Mapped::View(view) => Some(py.detach(|| view.prefetch(&wanted))?),
            _ => None,
        };
        self.start(py, token, uses, async move {
            if let Some(coming) = coming {
                coming.await?;
                // What was brought in is there: only copied.
                return match mapped.copy_many(&ranges, |copy| copy(), || true) {
                    Err(Failure::Aquifer(error)) => Err(*error),
                    _ => Ok(()),
                };
            }
            let Some(mapping) = mapped.mapping() else { return Ok(()) };
            let visited = mapping.visit_many_async(wanted, move |part| {
                ranges.copy(part.index, part.offset_bytes, part.bytes);
                ControlFlow::Continue(())
            });
            Ok(visited.await?)
        })
    }

    /// The calls that have completed: (token, exception or None).
    fn completed(&self, py: Python<'_>) -> Vec<(u64, Option<PyErr>)> {
        let done = py.detach(|| self.ready.take(usize::MAX));
        done.into_iter()
            .map(|(token, result)| {
                self.hold(token, None);
                (token, result.err().map(|error| Failure::from(error).into()))
            })
            .collect()
    }

    /// Waits until a call may have completed; false if none is under way.
    fn wait(&self, py: Python<'_>) -> Result<bool> {
        loop {
            match py.detach(|| self.ready.wait()) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {
                    py.check_signals()?;
                }
                waited => return Ok(waited?),
            }
        }
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Completions>()
}
