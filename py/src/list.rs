//! Lists of row numbers, of any length: checked first, and then worked off in steps.
//!
//! A list may have hundreds of millions of numbers. So nothing is kept for each of them but four bytes, and that only where
//! they are out of order; and every loop over them ends soon when a signal's handler raises.
//!
//! The work of a step sorts its own rows. Where rows are read, they are wanted in the order of the file over all steps, so that no
//! page is read in several of them. A list in another order is distributed over [`BUCKETS`] parts of the file, as the first
//! pass of a radix sort does, and the steps take one part after the other. Lists of more than [`ORDERED_ROWS`] rows are
//! distributed piece by piece. Of rows in memory that would take longer than the copies.
//!
//! Another thread of Python may store to the list meanwhile. Each number is read again, and checked again, when a step
//! takes it.

use std::marker::PhantomData;
use std::ops::Range;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

use crate::error::Result;
use crate::take::Signals;

/// Most rows of a step: their bookkeeping fits into a core's cache, and a device's queue is refilled many times.
pub(crate) const STEP_ROWS: usize = 64 << 10;
/// Most rows that are distributed at once, 4 bytes each.
const ORDERED_ROWS: usize = 8 << 20;
/// Parts of the file that rows are distributed over.
const BUCKETS: usize = 1024;
/// Numbers that are read between two looks at signals.
const LOOK_ROWS: usize = 1 << 20;

/// Numbers of a buffer. Another thread of Python may store to it: each is old or new, and checked by the caller.
#[derive(Clone, Copy)]
pub(crate) struct Numbers<'a> {
    first: *const i64,
    len: usize,
    buffer: PhantomData<&'a PyBuffer<i64>>,
}

// SAFETY: the numbers are only read, with volatile loads, and the buffer is borrowed as long as this lives.
unsafe impl Send for Numbers<'_> {}
// SAFETY: as above.
unsafe impl Sync for Numbers<'_> {}

impl<'a> Numbers<'a> {
    pub fn of(buffer: &'a PyBuffer<i64>) -> Result<Numbers<'a>> {
        if !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err("numbers must be contiguous").into());
        }
        let first = buffer.buf_ptr().cast::<i64>().cast_const();
        Ok(Numbers { first, len: buffer.item_count(), buffer: PhantomData })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// # Panics
    /// If there are fewer numbers.
    pub fn get(&self, place: usize) -> i64 {
        assert!(place < self.len, "a place behind the numbers");
        // SAFETY: inside the buffer, which is borrowed and contiguous.
        unsafe { self.first.add(place).read_volatile() }
    }
}

/// The row of this index among `rows`; a negative one counts from the end.
fn row_of(index: i64, rows: u64) -> Result<u64> {
    let row = if index < 0 { index.checked_add_unsigned(rows) } else { Some(index) };
    let row = row.and_then(|row| u64::try_from(row).ok()).filter(|&row| row < rows);
    row.ok_or_else(|| {
        let text = format!("index {index} is out of bounds for axis 0 with size {rows}");
        PyIndexError::new_err(text).into()
    })
}

/// A row, and its place in the list.
pub(crate) type Listed = (u64, usize);

/// Row numbers, all of which exist.
pub(crate) struct List<'a> {
    numbers: Numbers<'a>,
    /// Of the array.
    rows: u64,
    least: u64,
    greatest: u64,
    is_sorted: bool,
}

impl<'a> List<'a> {
    /// Checks all numbers.
    ///
    /// # Errors
    /// `IndexError`, or what the handler of a signal has raised.
    pub fn check(py: Python<'_>, indices: &'a PyBuffer<i64>, rows: u64) -> Result<List<'a>> {
        let numbers = Numbers::of(indices)?;
        let mut list = List { numbers, rows, least: u64::MAX, greatest: 0, is_sorted: true };
        let mut signals = Signals::new();
        py.detach(|| {
            let mut before = 0;
            for place in 0..list.len() {
                if place > 0 && place.is_multiple_of(LOOK_ROWS) && !signals.look_now() {
                    return Ok(());
                }
                let row = list.row(place)?;
                list.is_sorted &= row >= before;
                (list.least, list.greatest) = (list.least.min(row), list.greatest.max(row));
                before = row;
            }
            Ok::<_, crate::error::Failure>(())
        })?;
        signals.result()?;
        Ok(list)
    }

    pub fn len(&self) -> usize {
        self.numbers.len()
    }

    /// The row at a place of the list.
    fn row(&self, place: usize) -> Result<u64> {
        row_of(self.numbers.get(place), self.rows)
    }

    /// All rows, in the order of the list.
    pub fn all(&self) -> impl Iterator<Item = Result<u64>> + '_ {
        (0..self.len()).map(|place| self.row(place))
    }

    /// The first row and the one behind the last, of the file. Not those of an empty list.
    pub fn span(&self) -> Range<u64> {
        self.least..self.greatest + 1
    }

    /// Whether it has more than one step.
    pub fn is_long(&self) -> bool {
        self.len() > STEP_ROWS
    }

    /// Calls `step` with rows and their places, at most [`STEP_ROWS`] a time and in any order: all of the list, one part of it
    /// after the other, or with `by_file` one part of the file after the other.
    ///
    /// # Errors
    /// Those of `step`, or what the handler of a signal has raised between two steps.
    pub fn in_steps(
        &self,
        py: Python<'_>,
        by_file: bool,
        mut step: impl FnMut(Vec<Listed>) -> Result,
    ) -> Result {
        let mut order = vec![];
        for start in (0..self.len()).step_by(ORDERED_ROWS) {
            let part = start..self.len().min(start + ORDERED_ROWS);
            let is_in_order = !by_file || self.is_sorted || part.len() <= STEP_ROWS;
            if !is_in_order {
                self.distribute(py, part.clone(), &mut order)?;
            }
            for first in (0..part.len()).step_by(STEP_ROWS) {
                if self.is_long() {
                    py.check_signals()?;
                }
                let listed = |place: usize| {
                    let place = if is_in_order { place } else { order[place] as usize };
                    self.row(start + place).map(|row| (row, start + place))
                };
                let places = first..part.len().min(first + STEP_ROWS);
                step(py.detach(|| places.map(listed).collect::<Result<Vec<_>>>())?)?;
            }
        }
        Ok(())
    }

    /// Orders the places of a part of the list, counted from its first, by the part of the file that their rows lie in.
    fn distribute(&self, py: Python<'_>, part: Range<usize>, order: &mut Vec<u32>) -> Result {
        let span = self.greatest - self.least;
        let shift = (u64::BITS - span.leading_zeros()).saturating_sub(BUCKETS.ilog2());
        // Clamped: a number may be another one by now.
        let bucket_of = |place: usize| -> Result<usize> {
            let row = self.row(place)?;
            Ok(((row.saturating_sub(self.least) >> shift) as usize).min(BUCKETS - 1))
        };
        let mut ends = [0_usize; BUCKETS];
        py.detach(|| -> Result {
            for place in part.clone() {
                ends[bucket_of(place)?] += 1;
            }
            Ok(())
        })?;
        py.check_signals()?;
        let mut begin = 0;
        for end in &mut ends {
            begin += std::mem::replace(end, begin);
        }
        order.clear();
        order.resize(part.len(), 0);
        py.detach(|| -> Result {
            for (place, in_part) in part.zip(0_u32..) {
                let next = &mut ends[bucket_of(place)?];
                // Behind the end if numbers have changed since they were counted.
                if let Some(slot) = order.get_mut(*next) {
                    *slot = in_part;
                }
                *next += 1;
            }
            Ok(())
        })
    }
}
