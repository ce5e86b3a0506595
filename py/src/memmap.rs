//! `Region`: a mapped file that exports its bytes as a buffer.
//!
//! NumPy builds arrays over the buffer. As long as one of them lives, so does the export, and with it the addresses. Pointers
//! to them may be left in code that Python cannot see, so closing unmaps nothing: [`Region::retire`] puts zeros in place of the
//! file, which stay until the last reference to the region is gone. The memory is inert in a forked child, where calls raise
//! `ForkedError`.
//!
//! [`register`] makes `Buffered`, the class between `ndarray` and `memmap`: Python before 3.12 has no way to refuse a buffer in
//! a class of its own.

use std::ffi::c_int;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use aquifer::mapper::Advice as ViewAdvice;
use aquifer::{
    Advice, Backend, Bytes, Device as _, FileDevice, FileView, MapError, MapOptions, Mapping,
    MappingMut, Stores, ViewOptions,
};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::cache::NativeCache;
use crate::error::{Failure, Result};
use crate::remote::{Held, RemoteObject, waiting};
use crate::take::Ranges;

/// A page of the system.
pub(crate) const PAGE: u64 = 4096;

/// What [`Region::bring`] brings in between two looks at whether it goes on.
const BROUGHT_BYTES: u64 = 32 << 20;

/// Up to here a range is brought in as by loads.
const SHORT_BYTES: u64 = 64 << 10;

/// What serves the bytes.
pub(crate) enum Mapped {
    /// Read-only, kernel-backed as a rule.
    Read(Mapping),
    /// Writable, user-backed.
    Write(MappingMut),
    /// A writable view of a mapper: mode `r+`, `w+`, and `c`, which is private and never flushed.
    View(FileView),
}

impl Mapped {
    /// The mapping of a cache, if it is one.
    pub fn mapping(&self) -> Option<&Mapping> {
        match self {
            Mapped::Read(mapping) => Some(mapping),
            Mapped::Write(mapping) => Some(mapping),
            Mapped::View(_) => None,
        }
    }

    fn len(&self) -> u64 {
        match self {
            Mapped::View(view) => view.len_bytes(),
            mapped => mapped.mapping().map_or(0, Mapping::len),
        }
    }

    /// Copies what many ranges hold to their targets. `copying` is passed each copy, and makes it, or not when the call has ended.
    pub fn copy_many(
        &self,
        ranges: &Ranges,
        mut copying: impl FnMut(&dyn Fn()),
        mut go_on: impl FnMut() -> bool,
    ) -> Result {
        let mut visit = |index: usize, offset: u64, bytes: Bytes<'_>| {
            copying(&|| ranges.copy(index, offset, bytes));
        };
        if let Some(mapping) = self.mapping() {
            mapping.visit_many(ranges.all(), |part| {
                visit(part.index, part.offset_bytes, part.bytes);
                if go_on() {
                    std::ops::ControlFlow::Continue(())
                } else {
                    std::ops::ControlFlow::Break(())
                }
            })?;
            return Ok(());
        }
        let Mapped::View(view) = self else { return Ok(()) };
        // Brought in together, a batch at a time, so that a long list does not fill memory before the first copy. Those on the
        // same page, or on the next one, are read as one.
        let mut sorted: Vec<usize> = (0..ranges.len()).collect();
        sorted.sort_unstable_by_key(|&index| ranges.range(index).start);
        for batch in sorted.chunks(1024) {
            if !go_on() {
                return Ok(());
            }
            let mut end = 0;
            let join = |&before: &usize, &next: &usize| {
                end = ranges.range(before).end.max(end);
                ranges.range(next).start / PAGE <= end / PAGE
            };
            let runs: Vec<_> = batch.chunk_by(join).collect();
            let span = |run: &[usize]| {
                let end = run.iter().map(|&index| ranges.range(index).end).max();
                ranges.range(run[0]).start..end.unwrap_or(0)
            };
            let wanted: Vec<_> = runs.iter().map(|run| span(run)).collect();
            view.touch_many(&wanted)?;
            for (run, span) in runs.into_iter().zip(wanted) {
                let first = span.start;
                view.read_range(span, |bytes| {
                    for &index in run {
                        let Range { start, end } = ranges.range(index);
                        let its = bytes.slice((start - first) as usize..(end - first) as usize);
                        visit(index, start, its);
                    }
                })?;
            }
        }
        Ok(())
    }

    /// What a bare access has met.
    fn check_faults(&self) -> Result {
        let missed = match self {
            Mapped::View(view) => view.take_missed_fault().map(Failure::from),
            mapped => mapped.mapping().and_then(Mapping::take_missed_fault).map(Failure::from),
        };
        missed.map_or(Ok(()), Err)
    }
}

/// A mapped file, whose bytes are a buffer.
#[pyclass(frozen, weakref, module = "aquifer._native")]
pub(crate) struct Region {
    pub mapped: Held<Mapped>,
    /// Whether zeros are in place of the file.
    is_retired: AtomicBool,
    exports: AtomicUsize,
    is_writable: bool,
    /// Whether stores belong into the file: not in mode `c`.
    keeps_stores: bool,
    path: PathBuf,
    /// Device and inode of the file.
    identity: (u64, u64),
    /// File offset of the first byte.
    offset: u64,
    /// Whether a load may wait for a server: calls that bring bytes in are to be interrupted by Ctrl-C.
    pub is_remote: bool,
}

impl Region {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.mapped.len()
    }

    pub fn data(&self) -> *const u8 {
        match &*self.mapped {
            Mapped::Read(mapping) => mapping.as_ptr(),
            Mapped::Write(mapping) => mapping.as_ptr(),
            Mapped::View(view) => view.as_ptr(),
        }
    }

    /// Where stores go, if it is a view.
    fn stores_of_view(&self) -> Option<Stores> {
        match &*self.mapped {
            Mapped::View(view) => view.stores(),
            _ => None,
        }
    }

    /// Whether a load of these bytes waits for nothing, at the moment.
    pub fn has(&self, range: Range<u64>) -> Result<bool> {
        Ok(self.mapped.mapping().map_or(Ok(true), |mapping| mapping.is_resident(range))?)
    }

    fn is_retired(&self) -> bool {
        // Relaxed: with the interpreter's lock, or by the last reference.
        self.is_retired.load(Ordering::Relaxed)
    }

    /// A mapping of a cache writes its pages back by itself when it is dropped.
    fn hand_over(&self) -> Result {
        match &*self.mapped {
            Mapped::View(view) if self.keeps_stores && !self.is_retired() => {
                // Reported behind the rest: what was stored elsewhere is not lost with it.
                let missed = self.mapped.check_faults();
                // What cannot be written stays dirty, without an error: a flush says why.
                view.write_out()?;
                if view.stores() == Some(Stores::Private) && view.dirty_bytes()? > 0 {
                    view.flush()?;
                }
                missed
            }
            _ => Ok(()),
        }
    }
}

/// As with an ordinary mapping, stores outlive the array: what was not flushed is handed to the file.
impl Drop for Region {
    fn drop(&mut self) {
        Python::attach(|py| {
            let handed = py.detach(|| self.hand_over());
            if let Err(failure) = handed {
                // A forked child has nothing to hand over.
                if failure.kind() != Some(aquifer::ErrorKind::Forked) {
                    PyErr::from(failure).write_unraisable(py, None);
                }
            }
        });
    }
}

#[pymethods]
impl Region {
    /// Maps a file from an offset on, for a length.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "those of `memmap`, passed on in one place")]
    fn open(
        py: Python<'_>,
        cache: &Bound<'_, NativeCache>,
        path: PathBuf,
        mode: &str,
        backend: &str,
        place: (u64, u64),
        zeros: bool,
        private: bool,
        allocate: bool,
    ) -> Result<Region> {
        let (offset, length) = place;
        let cache = cache.get();
        let status = std::fs::metadata(&path)?;
        let is_writable = mode != "r";
        let mapped = py.detach(|| -> Result<Mapped> {
            if backend == "auto" && is_writable {
                let mapper = cache.mapper()?;
                let map = |stores| {
                    let options = ViewOptions::write().stores(stores).allocate(allocate);
                    mapper.map(&path, options, offset..offset + length)
                };
                let view = match map(if private { Stores::Private } else { Stores::Shared }) {
                    Err(MapError::SharedRefused { .. }) => map(Stores::Private),
                    mapped => mapped,
                }?;
                // From here on no thread can be kept from storing.
                view.as_mut_ptr()?;
                view.answer_faults_with_zeros()?;
                return Ok(Mapped::View(view));
            }
            let backend = match backend {
                "kernel" => Backend::Kernel,
                "cache" => Backend::User,
                // System calls must work on the memory.
                _ => Backend::Kernel,
            };
            let zeros = zeros || backend == Backend::Kernel;
            let options = MapOptions::new().backend(backend).zeros_for_missing(zeros);
            let device = FileDevice::options().writable(is_writable).open(&path)?;
            if is_writable {
                return Ok(Mapped::Write(cache.cache.map_mut_with(device, options)?));
            }
            Ok(Mapped::Read(cache.cache.map_with(device, options)?))
        })?;
        Ok(Region {
            exports: AtomicUsize::new(0),
            is_retired: AtomicBool::new(false),
            is_writable,
            keeps_stores: is_writable && mode != "c",
            identity: (status.dev(), status.ino()),
            offset: if matches!(mapped, Mapped::View(_)) { offset } else { 0 },
            mapped: Held::new(mapped),
            path,
            is_remote: false,
        })
    }

    /// Maps an object of a store. The path is for messages.
    #[staticmethod]
    fn open_remote(
        py: Python<'_>,
        cache: &Bound<'_, NativeCache>,
        object: &Bound<'_, RemoteObject>,
        zeros: bool,
    ) -> Result<Region> {
        let (cache, device) = (cache.get(), object.get().device.share());
        let path = PathBuf::from(device.name());
        let options = MapOptions::new().backend(Backend::User).zeros_for_missing(zeros);
        let mapping = py.detach(|| cache.cache.map_with(device, options))?;
        Ok(Region {
            exports: AtomicUsize::new(0),
            is_retired: AtomicBool::new(false),
            is_writable: false,
            keeps_stores: false,
            identity: (0, 0),
            offset: 0,
            mapped: Held::new(Mapped::Read(mapping)),
            path,
            is_remote: true,
        })
    }

    /// Brings in `length` bytes from `offset` on, with many requests at once, so that loads find them in memory.
    fn bring(&self, py: Python<'_>, offset: u64, length: u64) -> Result {
        if self.has(offset..offset + length)? {
            return Ok(());
        }
        let mapped = self.mapped.share();
        waiting(py, vec![], move |wanted| {
            let Some(mapping) = mapped.mapping() else { return Ok(()) };
            let end = offset + length;
            let is_short = length <= SHORT_BYTES;
            let step = if is_short { PAGE } else { BROUGHT_BYTES };
            for start in (offset - offset % PAGE..end).step_by(step as usize) {
                if !wanted.go_on() {
                    break;
                }
                if is_short {
                    // As a load does: several such calls in order are read ahead of.
                    mapping.touch(start)?;
                } else {
                    mapping.touch_many(std::slice::from_ref(&(start..end.min(start + step))))?;
                }
            }
            Ok(())
        })
    }

    /// Length of the buffer in bytes.
    fn __len__(&self) -> usize {
        self.mapped.len() as usize
    }

    /// Device and inode of the file.
    #[getter]
    fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// Path of the file, or a name for messages.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Ends the region in place: loads of its memory find zeros, and stores go to no file. No access in between finds nothing
    /// there. The user backend's pages stay, as other arrays share them.
    fn retire(&self) -> Result {
        // The interpreter's lock is kept, so that nothing refers to the memory anew.
        match &*self.mapped {
            Mapped::View(view) => view.retire()?,
            mapped => {
                if !mapped.mapping().map_or(Ok(false), Mapping::retire)? {
                    return Ok(());
                }
            }
        }
        self.is_retired.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// In a forked child: maps the file at the same addresses again, for reading only, so that arrays stay valid; zeros, if it
    /// was retired. False if its path leads to another file now, or the memory is the user backend's: then loads raise SIGSEGV.
    fn map_in_child(&self) -> Result<bool> {
        if self.stores_of_view() == Some(Stores::Shared) {
            // Inherited, to store to as well.
            return Ok(true);
        }
        if self.mapped.mapping().is_some_and(|mapping| mapping.backend() == Backend::User) {
            return Ok(false);
        }
        let file = if self.is_retired() { None } else { File::open(&self.path).ok() };
        let is_same = |file: &File| -> Result<bool> {
            let status = file.metadata()?;
            Ok((status.dev(), status.ino()) == self.identity)
        };
        if !self.is_retired() && !file.as_ref().map_or(Ok(false), is_same)? {
            return Ok(false);
        }
        let (protection, flags) = match &file {
            Some(_) => (libc::PROT_READ, libc::MAP_SHARED),
            None => (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            ),
        };
        // Views begin anywhere in a page.
        let lead = self.offset % PAGE;
        let address = self.data().wrapping_sub(lead as usize).cast_mut();
        let len = (self.len() + lead).next_multiple_of(PAGE) as usize;
        // SAFETY: the addresses are those of the parent's mapping. They were not inherited, the parent's objects keep them
        // reserved here, inert, and arrays of this child refer to nothing else there.
        let mapped = unsafe {
            libc::mmap(
                address.cast(),
                len,
                protection,
                flags | libc::MAP_FIXED,
                file.as_ref().map_or(-1, |file| file.as_raw_fd()),
                (self.offset - lead) as libc::off_t,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok(true)
    }

    /// Buffers that are in use.
    #[getter]
    fn exports(&self) -> usize {
        self.exports.load(Ordering::Relaxed)
    }

    #[getter]
    fn backend(&self) -> &'static str {
        self.mapped.mapping().map_or("view", |mapping| mapping.backend().name())
    }

    /// Address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.data().addr()
    }

    /// Hands stores to the file: what the end of an ordinary mapping does. For views that are alive when the process ends.
    fn write_out(&self, py: Python<'_>) -> Result {
        py.detach(|| match &*self.mapped {
            // Nothing drops it.
            Mapped::Write(mapping) => Ok(mapping.flush_all()?),
            _ => self.hand_over(),
        })
    }

    /// Writes what changed in `length` bytes from `offset` on to the file and makes it durable; the bytes written, where that
    /// is known.
    fn flush_range(&self, py: Python<'_>, offset: u64, length: u64) -> Result<Option<u64>> {
        let range = offset..offset + length;
        py.detach(|| match &*self.mapped {
            Mapped::Read(_) => Ok(Some(0)),
            Mapped::Write(mapping) => Ok(mapping.flush(range).map(|()| None)?),
            Mapped::View(view) => Ok(Some(view.flush_range(range)?.bytes_written)),
        })
    }

    /// Where stores go: `shared` or `private`; None where there is no choice.
    #[getter]
    fn stores(&self) -> Option<&'static str> {
        match self.stores_of_view()? {
            Stores::Shared => Some("shared"),
            Stores::Private => Some("private"),
        }
    }

    /// Advice about a range.
    fn advise(&self, py: Python<'_>, offset: u64, length: u64, advice: &str) -> Result {
        let range = offset..offset + length;
        let (of_mapping, of_view) = match advice {
            "normal" => (Advice::Normal, ViewAdvice::Normal),
            "sequential" => (Advice::Sequential, ViewAdvice::Sequential),
            "random" => (Advice::Random, ViewAdvice::Random),
            "willneed" => (Advice::WillNeed, ViewAdvice::WillNeed),
            "dontneed" => (Advice::DontNeed, ViewAdvice::DontNeed),
            other => {
                let text = format!(
                    "advice {other:?}: use normal, sequential, random, willneed or dontneed"
                );
                return Err(PyValueError::new_err(text).into());
            }
        };
        py.detach(|| match &*self.mapped {
            Mapped::View(view) => Ok(view.advise(of_view, range)?),
            mapped => {
                Ok(mapped.mapping().map_or(Ok(()), |mapping| mapping.advise(range, of_mapping))?)
            }
        })
    }

    /// Raises what a load or a store through the memory met since the last call.
    fn check(&self, py: Python<'_>) -> Result {
        if self.is_remote && faulted() {
            // The server is asked again, for its error.
            let mapped = self.mapped.share();
            return waiting(py, vec![], move |_| mapped.check_faults());
        }
        py.detach(|| self.mapped.check_faults())
    }

    /// Figures of this file alone.
    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let figures = PyDict::new(py);
        figures.set_item("backend", self.backend())?;
        figures.set_item("stores", self.stores())?;
        if let Mapped::View(view) = &*self.mapped {
            let (dirty, tracking) =
                py.detach(|| -> Result<_> { Ok((view.dirty_bytes()?, view.tracking()?)) })?;
            figures.set_item("dirty_bytes", dirty)?;
            if let Some(tracking) = tracking {
                figures.set_item("private_bytes", tracking.private_bytes)?;
            }
        }
        Ok(figures)
    }

    /// # Safety
    /// Called by the interpreter.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        if view.is_null() {
            return Err(PyBufferError::new_err("no place for the buffer"));
        }
        let read_only = c_int::from(!this.is_writable);
        // SAFETY: `view` is the interpreter's; the memory lives as long as the region, to which the call adds a reference.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                this.data().cast_mut().cast(),
                this.len() as ffi::Py_ssize_t,
                read_only,
                flags,
            )
        };
        if filled != 0 {
            return Err(PyErr::take(slf.py())
                .unwrap_or_else(|| PyBufferError::new_err("the buffer was refused")));
        }
        // Relaxed: with the interpreter's lock, and only compared with a number.
        this.exports.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// # Safety
    /// Called by the interpreter, once for each buffer.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.exports.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the kernel offers to Aquifer: (name, whether it is there, what for, details).
#[pyfunction]
fn features(py: Python<'_>) -> Vec<(&'static str, bool, &'static str, String)> {
    let probes = py.detach(aquifer_sys::features::probe_all);
    probes
        .into_iter()
        .map(|probe| (probe.name, probe.available, probe.purpose, probe.detail))
        .collect()
}

/// Whether a load or a store has met missing bytes in any array, or a store a full disk, and no call has raised that yet. Then
/// arrays are to be checked.
#[pyfunction]
fn faulted() -> bool {
    aquifer::has_missed_faults()
}

/// Exports an array of `Buffered`: the buffer is one of the plain array that its `_exported` returns, so that `close` sees it;
/// or the method raises.
///
/// # Safety
/// Called by the interpreter.
unsafe extern "C" fn export_plain(
    array: *mut ffi::PyObject,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> c_int {
    Python::attach(|py| {
        // SAFETY: the interpreter's reference, which it keeps during the call.
        let array = unsafe { Bound::from_borrowed_ptr(py, array) };
        match array.call_method0("_exported") {
            // SAFETY: the interpreter's view; a failure leaves it without an object, and an exception.
            Ok(plain) => unsafe { ffi::PyObject_GetBuffer(plain.as_ptr(), view, flags) },
            Err(raised) => {
                if !view.is_null() {
                    // SAFETY: the interpreter's view.
                    unsafe { (*view).obj = std::ptr::null_mut() };
                }
                raised.restore(py);
                -1
            }
        }
    })
}

/// A subclass of `ndarray` whose buffers are [`export_plain`]'s.
fn buffered<'py>(ndarray: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = ndarray.py();
    let mut slots = [
        ffi::PyType_Slot {
            slot: ffi::Py_bf_getbuffer,
            pfunc: export_plain as ffi::getbufferproc as *mut std::ffi::c_void,
        },
        ffi::PyType_Slot { slot: 0, pfunc: std::ptr::null_mut() },
    ];
    let mut spec = ffi::PyType_Spec {
        name: c"aquifer._native.Buffered".as_ptr(),
        // That of the base.
        basicsize: 0,
        itemsize: 0,
        flags: (ffi::Py_TPFLAGS_DEFAULT | ffi::Py_TPFLAGS_BASETYPE) as std::ffi::c_uint,
        slots: slots.as_mut_ptr(),
    };
    let bases = PyTuple::new(py, [ndarray])?;
    // SAFETY: the slots end with an empty one; the interpreter copies what it keeps, but the name, which is static.
    let class = unsafe { ffi::PyType_FromSpecWithBases(&raw mut spec, bases.as_ptr()) };
    // SAFETY: a new reference, or null and an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, class) }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let ndarray = module.py().import("numpy")?.getattr("ndarray")?;
    module.add("Buffered", buffered(&ndarray)?)?;
    module.add_function(wrap_pyfunction!(faulted, module)?)?;
    module.add_function(wrap_pyfunction!(features, module)?)?;
    module.add_class::<Region>()
}
