//! The buffer protocol in both directions: memory of Aquifer that Python sees, and Python's that Aquifer copies to or from.

use std::ffi::c_int;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Fills in a view of `len` bytes for a consumer.
///
/// # Safety
/// As of `__getbuffer__`. The bytes are valid, and may be stored to if `writable` says so, until the consumer releases the
/// view, which keeps `owner` alive.
pub(crate) unsafe fn export<T>(
    owner: &Bound<'_, T>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
    start: *mut u8,
    len: usize,
    writable: bool,
) -> PyResult<()> {
    if view.is_null() {
        return Err(PyBufferError::new_err("there is no place for the view"));
    }
    let len = ffi::Py_ssize_t::try_from(len)
        .map_err(|_| PyBufferError::new_err("longer than a buffer of Python can be"))?;
    // SAFETY: the caller guarantees the view and the bytes. It refuses a writable view of what is read-only.
    let failed = unsafe {
        ffi::PyBuffer_FillInfo(
            view,
            owner.as_ptr(),
            start.cast(),
            len,
            c_int::from(!writable),
            flags,
        )
    };
    if failed != 0 {
        return Err(PyErr::fetch(owner.py()));
    }
    Ok(())
}

/// Contiguous memory of a Python object, which stays where it is as long as this lives.
pub(crate) struct Memory(PyUntypedBuffer);

impl Memory {
    /// To read from.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("the buffer is not contiguous; copy it first"));
        }
        Ok(Memory(buffer))
    }

    /// To write to.
    pub fn of_writable(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
        let memory = Memory::of(object)?;
        if memory.0.readonly() {
            return Err(PyBufferError::new_err("the buffer is read-only"));
        }
        Ok(memory)
    }

    /// Its bytes, also without the interpreter's lock. Another thread of the program may change them meanwhile, as with
    /// `readinto` and `write` of Python's own files: what is copied then is any mix of both.
    pub fn bytes(&self) -> &[u8] {
        if self.0.len_bytes() == 0 {
            return &[];
        }
        // SAFETY: the view of the buffer keeps the memory where it is, and it has this many bytes. They are only copied.
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast(), self.0.len_bytes()) }
    }

    /// As [`Memory::bytes`], to write to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(!self.0.readonly(), "checked when it was made");
        if self.0.len_bytes() == 0 {
            return &mut [];
        }
        // SAFETY: as in `bytes`; the memory is writable.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast(), self.0.len_bytes()) }
    }
}
