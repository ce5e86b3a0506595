//! Attached objects: memory at a fixed address, which Python sees as a buffer.
//!
//! Python stores to the memory whenever it likes, through any buffer that it has taken: so a psync is the `_shared` form of
//! the crate, and what that asks of the program is in the documentation of `aquifer.Array.psync`.

use std::ffi::c_int;
use std::sync::{Arc, PoisonError, RwLock};

use aquifer::{Access, Attachment, Objects};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::export;
use crate::error::Result;
use crate::pool::{Opened, Process};

/// An attachment that can be detached while others refer to it. Calls hold the lock shared, and detaching exclusively:
/// so it waits for a psync that another thread is in.
pub(crate) struct Attached {
    attachment: RwLock<Option<Attachment>>,
    process: Process,
}

impl Attached {
    pub fn new(attachment: Attachment) -> Attached {
        Attached { attachment: RwLock::new(Some(attachment)), process: Process::new() }
    }

    pub fn is_detached(&self) -> bool {
        self.process.check().is_ok()
            && self.attachment.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Detaches it, if that was not done before.
    pub fn detach(&self) -> Result {
        self.process.check()?;
        let attachment = self.attachment.write().unwrap_or_else(PoisonError::into_inner).take();
        Ok(attachment.map_or(Ok(()), Attachment::detach)?)
    }

    fn with<T>(&self, call: impl FnOnce(&Attachment) -> Result<T>) -> Result<T> {
        self.process.check()?;
        let attachment = self.attachment.read().unwrap_or_else(PoisonError::into_inner);
        let attachment = attachment.as_ref();
        call(attachment.ok_or_else(|| PyValueError::new_err("the object is detached"))?)
    }

    fn psync(&self) -> Result {
        // SAFETY: documented in `aquifer.Array.psync`: no thread stores to the object meanwhile. One that does risks
        // only the bytes that it stores.
        self.with(|attachment| Ok(unsafe { attachment.psync_shared() }?))
    }

    fn rollback(&self) -> Result {
        // SAFETY: documented in `aquifer.Array.rollback`: no thread uses the object meanwhile. One that does finds bytes
        // from before and after, and loses what it stores.
        self.with(|attachment| Ok(unsafe { attachment.rollback_shared() }?))
    }

    pub fn psync_many(objects: &Objects, mut attached: Vec<Arc<Attached>>) -> Result {
        attached.iter().try_for_each(|one| one.process.check())?;
        // In one order, each once: another thread may wait to detach one of them.
        attached.sort_unstable_by_key(Arc::as_ptr);
        attached.dedup_by_key(|one| Arc::as_ptr(one));
        let held: Vec<_> = (attached.iter())
            .map(|one| one.attachment.read().unwrap_or_else(PoisonError::into_inner))
            .collect();
        // What is detached has lost what was not committed.
        let attachments: Vec<&Attachment> = held.iter().filter_map(|one| one.as_ref()).collect();
        // SAFETY: as in `psync`, for `aquifer.Pool.psync`.
        Ok(unsafe { objects.psync_many_shared(&attachments) }?)
    }
}

/// An attached object, with its memory as a buffer: writable if it is attached for writing.
#[pyclass(module = "aquifer._native", frozen, weakref)]
pub(crate) struct Object {
    pub attached: Arc<Attached>,
    /// Keeps the pool open, and counts the buffers of all of its memory.
    opened: Opened,
}

impl Object {
    pub fn new(attached: Arc<Attached>, opened: Opened) -> Object {
        Object { attached, opened }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        if self.attached.process.check().is_err() {
            return;
        }
        // Before the interpreter's lock is released: weak references to this are dead already.
        let _detach = self.opened.detaches.begin();
        // Nothing refers to the memory any more. Waits for a psync in the background, and frees the space of large commits.
        let attached = &self.attached;
        Python::attach(|py| py.detach(|| attached.detach().ok()));
    }
}

#[pymethods]
impl Object {
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        // From here on the pool is not closed, and so the object stays attached: what else detaches it is the end of `slf`,
        // which the buffer keeps.
        let exported = this.opened.exports.add()?;
        let (start, len, writable) = this.attached.with(|attachment| {
            let writable = attachment.access() == Access::Write;
            Ok((attachment.start(), attachment.len_bytes(), writable))
        })?;
        let len = usize::try_from(len).map_err(|_| PyBufferError::new_err("too long"))?;
        // SAFETY: forwarded to the caller; the memory is there until the export is given back.
        unsafe { export(&slf, view, flags, start.as_ptr(), len, writable) }?;
        // Given back by `__releasebuffer__`.
        std::mem::forget(exported);
        Ok(())
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.opened.exports.release();
    }

    #[getter]
    fn is_writable(&self) -> Result<bool> {
        self.attached.with(|attachment| Ok(attachment.access() == Access::Write))
    }

    fn psync(&self, py: Python<'_>) -> Result {
        py.detach(|| self.attached.psync())
    }

    fn rollback(&self, py: Python<'_>) -> Result {
        py.detach(|| self.attached.rollback())
    }

    fn stats(&self, py: Python<'_>) -> Result<Py<PyDict>> {
        let (statistics, shadow_bytes) = py.detach(|| {
            self.attached
                .with(|attachment| Ok((attachment.statistics(), attachment.shadow_bytes()?)))
        })?;
        let dict = PyDict::new(py);
        dict.set_item("psyncs", statistics.psyncs)?;
        dict.set_item("psync_pages", statistics.pages)?;
        dict.set_item("psync_bytes", statistics.bytes)?;
        dict.set_item("shadow_bytes", shadow_bytes)?;
        Ok(dict.unbind())
    }
}
