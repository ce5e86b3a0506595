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
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer::{Bytes, Ready};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

use crate::error::{Failure, Result};
use crate::memmap::{Mapped, Region};
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

/// Numbers of a buffer. Another thread of Python may store to it: each is old or new, and checked by the caller.
pub(crate) fn numbers(buffer: &PyBuffer<i64>) -> Result<impl Iterator<Item = i64> + '_> {
    if !buffer.is_c_contiguous() {
        return Err(invalid("numbers must be contiguous"));
    }
    let first = buffer.buf_ptr().cast::<i64>().cast_const();
    Ok((0..buffer.item_count()).map(move |place| {
        // SAFETY: inside the buffer, which is borrowed and contiguous.
        unsafe { first.add(place).read_volatile() }
    }))
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

/// Ranges of what has `len_bytes`, which go to `out` one after the other, and its address.
pub(crate) fn pieces(
    starts: &PyBuffer<i64>,
    lengths: &PyBuffer<i64>,
    len_bytes: u64,
    out: &PyBuffer<u8>,
) -> Result<(Vec<Piece>, *mut u8)> {
    if starts.item_count() != lengths.item_count() {
        return Err(invalid("there must be as many lengths as starts"));
    }
    let mut at = 0_usize;
    let mut pieces = Vec::with_capacity(starts.item_count());
    for (start, len) in numbers(starts)?.zip(numbers(lengths)?) {
        let (Ok(start), Ok(len)) = (u64::try_from(start), usize::try_from(len)) else {
            return Err(invalid("a range has a negative number"));
        };
        if start.checked_add(len as u64).is_none_or(|end| end > len_bytes) {
            return Err(invalid("a range ends behind what is read"));
        }
        pieces.push(Piece { start, len, at });
        // Ranges may overlap: all together they may be longer than any memory.
        at = at.checked_add(len).ok_or_else(|| invalid("the ranges have too many bytes"))?;
    }
    Ok((pieces, target_of(out, Some(at))?))
}

/// The row of this index among `rows`; a negative one counts from the end.
pub(crate) fn row_of(index: i64, rows: u64) -> Result<u64> {
    let row = if index < 0 { index.checked_add_unsigned(rows) } else { Some(index) };
    let row = row.and_then(|row| u64::try_from(row).ok()).filter(|&row| row < rows);
    row.ok_or_else(|| {
        let text = format!("index {index} is out of bounds for axis 0 with size {rows}");
        PyIndexError::new_err(text).into()
    })
}

/// The rows that `indices` names, and the target of a call, checked against each other. Negative indices count from the end.
fn checked(
    region: &Region,
    layout: Layout,
    indices: &PyBuffer<i64>,
    out: Option<&PyBuffer<u8>>,
) -> Result<Ranges> {
    let row_bytes = usize::try_from(layout.row_bytes).map_err(|_| invalid("rows are too long"))?;
    let target = match out {
        None => std::ptr::null_mut(),
        Some(out) => target_of(out, row_bytes.checked_mul(indices.item_count()))?,
    };
    let pieces = numbers(indices)?.enumerate().map(|(place, index)| {
        let row = row_of(index, layout.rows)?;
        let start = layout
            .start_of(row, region.len())
            .ok_or_else(|| invalid("the rows end behind the mapping"))?;
        Ok(Piece { start, len: row_bytes, at: place * row_bytes })
    });
    Ok(Ranges { pieces: pieces.collect::<Result<_>>()?, target })
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
    /// Copies to the memory of `out`.
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
        let target = PyBuffer::<u8>::get(out)?;
        let ranges = checked(self, layout, &indices, Some(&target))?;
        self.copy_all(py, ranges, out)
    }

    /// Copies `lengths` bytes from each of `starts` on to `out`, one after the other.
    fn read_ranges(
        &self,
        py: Python<'_>,
        starts: PyBuffer<i64>,
        lengths: PyBuffer<i64>,
        out: &Bound<'_, PyAny>,
    ) -> Result {
        let (pieces, target) = pieces(&starts, &lengths, self.len(), &PyBuffer::get(out)?)?;
        self.copy_all(py, Ranges { pieces, target }, out)
    }

    /// Starts reading rows, and does not wait.
    fn prefetch(&self, py: Python<'_>, layout: Layout, indices: PyBuffer<i64>) -> Result {
        let ranges = checked(self, layout, &indices, None)?;
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

/// Calls under way, whose completions make a descriptor readable.
#[pyclass(frozen, module = "aquifer._native")]
pub(crate) struct Completions {
    ready: Ready<std::result::Result<(), aquifer::Error>>,
    /// What the calls under way use, by token.
    held: Mutex<HashMap<u64, Vec<Py<PyAny>>>>,
}

impl Completions {
    fn held(&self) -> MutexGuard<'_, HashMap<u64, Vec<Py<PyAny>>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.held().insert(token, uses);
        let added = py.detach(|| self.ready.add(token, call));
        if added.is_err() {
            self.held().remove(&token);
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
        let ranges = checked(region.get(), layout, &indices, Some(&target))?;
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
                self.held().remove(&token);
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
