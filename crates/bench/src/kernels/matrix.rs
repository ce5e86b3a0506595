//! A matrix in borrowed memory.

use std::marker::PhantomData;

/// Consecutive rows of `T` at an address.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<T> {
    base: *mut T,
    columns: usize,
    _element: PhantomData<T>,
}

impl<T: Copy> Matrix<T> {
    /// The matrix that begins at `base`.
    pub const fn new(base: *mut u8, columns: usize) -> Self {
        Self { base: base.cast(), columns, _element: PhantomData }
    }

    /// Reads a row.
    ///
    /// # Safety
    /// The row must be in readable memory, aligned for `T`, and no thread may store to it while the
    /// slice lives.
    #[inline(always)]
    pub unsafe fn row<'a>(&self, row: usize) -> &'a [T] {
        // SAFETY: the caller's promise.
        let start = unsafe { self.base.add(row * self.columns) };
        // SAFETY: the caller's promise; `T` is a plain number, for which any bytes are valid.
        unsafe { std::slice::from_raw_parts(start, self.columns) }
    }

    /// A mutable reference to a row.
    ///
    /// # Safety
    /// As for [`Matrix::row`], in writable memory, and no other code may read or write the row
    /// while the slice lives.
    #[inline(always)]
    pub unsafe fn row_mut<'a>(&self, row: usize) -> &'a mut [T] {
        // SAFETY: the caller's promise.
        let start = unsafe { self.base.add(row * self.columns) };
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(start, self.columns) }
    }
}
