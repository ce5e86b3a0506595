//! A view of a file of a pool: its bytes in place, as a read-only buffer.
//!
//! The pin lasts until the last consumer of the buffer has released it: `memoryview.release` ends it, not only the
//! garbage collector. Until then the pool cannot be closed.

use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use aquifer::View;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::buffer::export;
use crate::error::Result;
use crate::pool::{Export, Exports, Process};

/// A pinned range of a file. Its buffer can be taken once: that is what ends the pin when it is released.
#[pyclass(module = "aquifer._native", frozen)]
pub(crate) struct FileView {
    process: Process,
    exports: Exports,
    pinned: Mutex<Option<(View<'static>, Option<Export>)>>,
}

impl FileView {
    /// A view whose bytes are in one piece.
    pub fn new(exports: Exports, view: View<'static>) -> FileView {
        FileView { process: Process::new(), exports, pinned: Mutex::new(Some((view, None))) }
    }
}

#[pymethods]
impl FileView {
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        this.process.check()?;
        let mut pinned = this.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((pin, exported @ None)) = pinned.as_mut() else {
            return Err(PyBufferError::new_err(
                "the view was released, or is in use; make another",
            ));
        };
        let Some(bytes) = pin.bytes() else {
            return Err(PyBufferError::new_err("the bytes are not in memory in one piece"));
        };
        let (start, len) = (bytes.as_ptr().cast_mut(), bytes.len());
        let counted = this.exports.add()?;
        // SAFETY: forwarded to the caller; the view pins the bytes until the consumer releases them. They are not stored to.
        unsafe { export(&slf, view, flags, start, len, false) }?;
        *exported = Some(counted);
        Ok(())
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        if self.process.check().is_err() {
            return;
        }
        let pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(pinned);
    }

    /// Whether the file still has the pages of this view.
    fn is_current(&self) -> Result<bool> {
        self.process.check()?;
        let pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(pinned.as_ref().is_some_and(|(view, _)| view.is_current()))
    }
}
