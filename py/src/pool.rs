//! Pools, and what is done in them by name: objects, files and directories.
//!
//! The class here is what `aquifer.Pool` (`_pool.py`) is made of. It holds the pool's handle until it is closed; a call that
//! is under way then keeps the pool open until it ends. Calls check first that the process is the one that opened the
//! pool: in a forked child, a lock may be held by a thread that does not exist there.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use aquifer::{CreateObject, Files, ObjectInfo, ObjectOptions, Objects, Pool, PoolOptions};
use aquifer_vm::ProcessMark;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error::{Failure, Result};
use crate::object::{Attached, Object};

/// The process that something belongs to.
#[derive(Clone)]
pub(crate) struct Process(ProcessMark);

impl Process {
    pub fn new() -> Process {
        Process(ProcessMark::new())
    }

    /// Fails in a forked child.
    pub fn check(&self) -> Result {
        if self.0.is_current() { Ok(()) } else { Err(aquifer::PoolError::Forked.into()) }
    }
}

/// The buffers of a pool's memory that its consumers have. Closing the pool ends that memory, so it refuses new ones first,
/// in the same step in which it finds that there are none: a thread that takes one meanwhile is counted, or is refused.
#[derive(Clone, Default)]
pub(crate) struct Exports(Arc<AtomicUsize>);

/// One of them.
pub(crate) struct Export(Exports);

impl Exports {
    /// In place of a number: none is in use, and none is given out.
    const REFUSED: usize = usize::MAX;

    /// Counted before the memory is looked at, which is there as long as this lives.
    pub fn add(&self) -> PyResult<Export> {
        // Relaxed: `refuse` and this change the same word, one of them first. It publishes nothing.
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
                (count != Self::REFUSED).then(|| count + 1)
            })
            .map(|_| Export(self.clone()))
            .map_err(|_| PyValueError::new_err("the pool is closed, or is being closed"))
    }

    /// Gives out no more of them, if none is in use. Says how many are otherwise.
    fn refuse(&self) -> std::result::Result<(), usize> {
        // Acquire: pairs with the drop of an export. Memory that is released is not used any more.
        match self.0.compare_exchange(0, Self::REFUSED, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) | Err(Self::REFUSED) => Ok(()),
            Err(count) => Err(count),
        }
    }

    /// Takes `refuse` back.
    fn allow(&self) {
        // Relaxed: nothing was changed meanwhile. Where none is refused it does nothing.
        let _ = self.0.compare_exchange(Self::REFUSED, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn count(&self) -> usize {
        match self.0.load(Ordering::Relaxed) {
            Self::REFUSED => 0,
            count => count,
        }
    }

    /// Takes back one that was forgotten.
    pub fn release(&self) {
        drop(Export(self.clone()));
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // Release: pairs with `refuse`.
        self.0.0.fetch_sub(1, Ordering::Release);
    }
}

/// How many objects are being detached, because nothing refers to them any more. Attaching one waits for that, as it may be
/// of the same name.
#[derive(Clone, Default)]
pub(crate) struct Detaches(Arc<(Mutex<usize>, Condvar)>);

/// One of them.
pub(crate) struct Detach(Detaches);

impl Detaches {
    pub fn begin(&self) -> Detach {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Detach(self.clone())
    }

    /// Waits until there are none.
    fn wait(&self) {
        let (count, ended) = &*self.0;
        let count = count.lock().unwrap_or_else(PoisonError::into_inner);
        drop(ended.wait_while(count, |count| *count > 0).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Detach {
    fn drop(&mut self) {
        let (count, ended) = &*self.0.0;
        *count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        ended.notify_all();
    }
}

/// A handle that is not closed.
#[derive(Clone)]
pub(crate) struct Opened {
    pub pool: Pool,
    pub objects: Objects,
    pub files: Files,
    pub exports: Exports,
    pub detaches: Detaches,
}

struct State {
    opened: Opened,
    /// Closing detaches them.
    attached: Vec<Arc<Attached>>,
}

/// A pool.
#[pyclass(module = "aquifer._native", name = "Pool", frozen)]
pub(crate) struct PyPool {
    process: Process,
    state: Mutex<Option<State>>,
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Options {
    read_only: bool,
    exclusive: bool,
    overwrite: bool,
    mode: u32,
    log_bytes: Option<u64>,
    inodes: Option<u64>,
    shared_memory: Option<PathBuf>,
    stall_timeout: Option<f64>,
}

impl Options {
    fn of(self) -> PyResult<PoolOptions> {
        let Options { read_only, exclusive, overwrite, mode, .. } = self;
        let mut options = Pool::options();
        options = options.read_only(read_only).exclusive(exclusive).overwrite(overwrite).mode(mode);
        if let Some(log_bytes) = self.log_bytes {
            options = options.log_bytes(log_bytes);
        }
        if let Some(inodes) = self.inodes {
            options = options.inodes(inodes);
        }
        if let Some(directory) = self.shared_memory {
            options = options.segment_directory(directory);
        }
        if let Some(seconds) = self.stall_timeout {
            let timeout = Duration::try_from_secs_f64(seconds)
                .map_err(|_| PyValueError::new_err("stall_timeout is a number of seconds"))?;
            options = options.stall_timeout(timeout);
        }
        Ok(options)
    }
}

fn info_of(py: Python<'_>, info: &ObjectInfo) -> PyResult<Py<PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("name", String::from_utf8_lossy(info.name.as_bytes()))?;
    dict.set_item("size_bytes", info.size_bytes)?;
    dict.set_item("address", info.address)?;
    dict.set_item("state", info.state.letter().to_string())?;
    dict.set_item("is_heap", info.is_heap)?;
    dict.set_item("needs_read_key", info.needs_read_key)?;
    dict.set_item("needs_write_key", info.needs_write_key)?;
    dict.set_item("created_ns", info.created_ns)?;
    Ok(dict.unbind())
}

pub(crate) fn options_with(key: Option<&[u8]>) -> ObjectOptions<'_> {
    key.map_or(ObjectOptions::new(), |key| ObjectOptions::new().key(key))
}

fn refuse_buffers(state: Option<&State>) -> Result {
    let Some(Err(count)) = state.map(|state| state.opened.exports.refuse()) else { return Ok(()) };
    let text = format!(
        "the pool cannot be closed: {count} arrays or views of its memory are in use; delete or release them"
    );
    Err(PyBufferError::new_err(text).into())
}

impl PyPool {
    fn new(pool: Pool) -> PyPool {
        let (objects, files) = (Objects::new(pool.clone()), Files::new(pool.clone()));
        let opened = Opened {
            pool,
            objects,
            files,
            exports: Exports::default(),
            detaches: Detaches::default(),
        };
        PyPool {
            process: Process::new(),
            state: Mutex::new(Some(State { opened, attached: Vec::new() })),
        }
    }

    pub fn opened(&self) -> Result<Opened> {
        self.process.check()?;
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = state.as_ref().ok_or_else(|| PyValueError::new_err("the pool is closed"))?;
        Ok(state.opened.clone())
    }
}

impl Drop for PyPool {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // A pool that was not closed: the last process brings the media up to date.
        if let Some(state) = state {
            Python::attach(|py| py.detach(|| drop(state)));
        }
    }
}

#[pymethods]
impl PyPool {
    #[staticmethod]
    fn create(py: Python<'_>, path: PathBuf, len_bytes: u64, options: Options) -> Result<PyPool> {
        let options = options.of()?;
        py.detach(|| Ok(PyPool::new(options.create(path, len_bytes)?)))
    }

    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf, options: Options) -> Result<PyPool> {
        let options = options.of()?;
        py.detach(|| Ok(PyPool::new(options.open(path)?)))
    }

    /// Gives out no more buffers, until it is closed or `allow_buffers` is called; fails if some are in use.
    fn refuse_buffers(&self) -> Result {
        self.process.check()?;
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        refuse_buffers(state.as_ref())
    }

    fn allow_buffers(&self) -> Result {
        self.process.check()?;
        // Under the lock: not after another thread has found that there are none, and closes it.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = state.as_ref() {
            state.opened.exports.allow();
        }
        Ok(())
    }

    /// Closes it, and reports what could not be made durable. In a forked child it does nothing.
    fn close(&self, py: Python<'_>) -> Result {
        if self.process.check().is_err() {
            return Ok(());
        }
        let state = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            refuse_buffers(state.as_ref())?;
            state.take()
        };
        py.detach(|| {
            let Some(State { opened, attached }) = state else { return Ok(()) };
            // All of them, also if one fails.
            let detached: Vec<Result> = attached.iter().map(|one| one.detach()).collect();
            drop(opened);
            detached.into_iter().collect()
        })
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.process.check().is_ok()
            && self.state.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// How many buffers of its memory are in use.
    fn exports(&self) -> usize {
        if self.process.check().is_err() {
            return 0;
        }
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.as_ref().map_or(0, |state| state.opened.exports.count())
    }

    /// Whether this process is a fork of the one that opened it.
    #[getter]
    fn is_forked(&self) -> bool {
        self.process.check().is_err()
    }

    #[getter]
    fn is_writable(&self) -> Result<bool> {
        Ok(self.opened()?.pool.is_writable())
    }

    fn sync(&self, py: Python<'_>) -> Result {
        let opened = self.opened()?;
        py.detach(|| Ok(opened.pool.sync()?))
    }

    fn checkpoint(&self, py: Python<'_>) -> Result {
        let opened = self.opened()?;
        py.detach(|| Ok(opened.pool.checkpoint()?))
    }

    fn info(&self, py: Python<'_>) -> Result<Py<PyDict>> {
        const PAGE_BYTES: u64 = aquifer::pool::format::PAGE_BYTES;
        let opened = self.opened()?;
        let (info, space) =
            py.detach(|| Ok::<_, Failure>((opened.pool.info()?, opened.files.space()?)))?;
        let dict = PyDict::new(py);
        dict.set_item("path", info.path)?;
        dict.set_item("uuid", info.uuid.to_string())?;
        dict.set_item("domain", format!("{:?}", info.domain))?;
        dict.set_item("writable", opened.pool.is_writable())?;
        dict.set_item("total_bytes", space.total_bytes)?;
        dict.set_item("free_bytes", space.free_bytes)?;
        dict.set_item("largest_free_bytes", space.largest_free_bytes)?;
        dict.set_item("held_bytes", info.held_pages * PAGE_BYTES)?;
        dict.set_item("total_slots", space.total_slots)?;
        dict.set_item("free_slots", space.free_slots)?;
        dict.set_item("objects", info.objects)?;
        dict.set_item("files", info.files)?;
        dict.set_item("directories", info.directories)?;
        dict.set_item("symbolic_links", info.symbolic_links)?;
        dict.set_item("pins", info.pins)?;
        dict.set_item("recovered_records", info.recovered_records)?;
        dict.set_item("processes", info.processes)?;
        Ok(dict.unbind())
    }

    // ---- objects ----------------------------------------------------------------------------------

    fn create_object(
        &self,
        py: Python<'_>,
        name: &str,
        size_bytes: u64,
        content: &[u8],
        read_key: Option<&[u8]>,
        write_key: Option<&[u8]>,
    ) -> Result {
        let opened = self.opened()?;
        let mut options = CreateObject::new().content(content);
        if let Some(key) = read_key {
            options = options.read_key(key);
        }
        if let Some(key) = write_key {
            options = options.write_key(key);
        }
        py.detach(|| Ok(options.create(&opened.objects, name, size_bytes).map(drop)?))
    }

    fn attach(
        &self,
        py: Python<'_>,
        name: &str,
        writable: bool,
        key: Option<&[u8]>,
        shadow_budget_bytes: Option<u64>,
    ) -> Result<Object> {
        let opened = self.opened()?;
        let mut options = options_with(key);
        if let Some(bytes) = shadow_budget_bytes {
            options = options.shadow_budget_bytes(bytes);
        }
        let attached = py.detach(|| {
            opened.detaches.wait();
            let attachment = if writable {
                options.attach_mut(&opened.objects, name)
            } else {
                options.attach(&opened.objects, name)
            }?;
            Ok::<_, Failure>(Arc::new(Attached::new(attachment)))
        })?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(state) = state.as_mut() else {
            return Err(PyValueError::new_err("the pool was closed meanwhile").into());
        };
        state.attached.retain(|one| !one.is_detached());
        state.attached.push(attached.clone());
        Ok(Object::new(attached, opened))
    }

    fn remove_object(&self, py: Python<'_>, name: &str, key: Option<&[u8]>) -> Result {
        let opened = self.opened()?;
        py.detach(|| Ok(options_with(key).destroy(&opened.objects, name)?))
    }

    fn rename_object(
        &self,
        py: Python<'_>,
        name: &str,
        new_name: &str,
        key: Option<&[u8]>,
    ) -> Result {
        let opened = self.opened()?;
        py.detach(|| Ok(options_with(key).rename(&opened.objects, name, new_name)?))
    }

    /// All objects that hold plain bytes, each with the first `len` bytes of its content on media. Of an object that is
    /// being replaced by another one meanwhile, these bytes may be of both.
    fn objects(&self, py: Python<'_>, len: usize) -> Result<Vec<(Py<PyDict>, Py<PyBytes>)>> {
        let opened = self.opened()?;
        let found = py.detach(|| {
            let mut found = Vec::new();
            for info in opened.objects.list()?.into_iter().filter(|info| !info.is_heap) {
                let mut start = vec![0; len.min(info.size_bytes as usize)];
                opened.pool.load(info.media_offset_bytes, &mut start)?;
                found.push((info, start));
            }
            Ok::<_, Failure>(found)
        })?;
        let objects = found
            .iter()
            .map(|(info, start)| Ok((info_of(py, info)?, PyBytes::new(py, start).unbind())));
        objects.collect()
    }

    /// One object, as `objects` has it; `None` if it holds a heap.
    fn object(
        &self,
        py: Python<'_>,
        name: &str,
        len: usize,
    ) -> Result<Option<(Py<PyDict>, Py<PyBytes>)>> {
        let opened = self.opened()?;
        let (info, start) = py.detach(|| {
            let info = opened.objects.info(name)?;
            let mut start = vec![0; len.min(info.size_bytes as usize)];
            opened.pool.load(info.media_offset_bytes, &mut start)?;
            Ok::<_, Failure>((info, start))
        })?;
        if info.is_heap {
            return Ok(None);
        }
        Ok(Some((info_of(py, &info)?, PyBytes::new(py, &start).unbind())))
    }

    /// Whether there is an object of this name.
    fn has_object(&self, py: Python<'_>, name: &str) -> Result<bool> {
        let opened = self.opened()?;
        py.detach(|| match opened.objects.info(name) {
            Ok(_) => Ok(true),
            Err(aquifer::ObjectError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        })
    }

    /// `psync` of all of these at once.
    fn psync_many(&self, py: Python<'_>, objects: Vec<Bound<'_, Object>>) -> Result {
        let opened = self.opened()?;
        let attached = objects.iter().map(|object| object.get().attached.clone()).collect();
        py.detach(|| Attached::psync_many(&opened.objects, attached))
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyPool>()?;
    module.add_class::<Object>()?;
    module.add_class::<crate::view::FileView>()?;
    module.add_class::<crate::file::File>()?;
    module.add_class::<crate::files::Files>()
}
