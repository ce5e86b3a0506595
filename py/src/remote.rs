//! `RemoteObject`: an object of a store or an HTTP server, opened by URL.
//!
//! Arrays, rows and files over it share the device, and with it the version that was pinned when it was opened.
//!
//! A request takes as long as its timeout allows, which is longer than Ctrl-C should wait. So calls of the main thread, which is
//! the one that Python runs signal handlers in, wait for a thread that does the work, and leave it to itself when a handler
//! raises: see [`waiting`].

use std::mem::ManuallyDrop;
use std::ops::{ControlFlow, Deref};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aquifer::remote::{RemoteDevice, RemoteOptions, RemoteStats, Tier, TierInfo, TierObject};
use aquifer::{Device as _, PageId, Pages};
use aquifer_sys::thread;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cache::NativeCache;
use crate::credentials::Provider;
use crate::error::Result;
use crate::take::{Listing, Piece};

/// As in the library.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a wait looks for signals.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What a Python object has of the library. It is dropped without the interpreter's lock: the end of a device waits for its threads,
/// one of which may wait for the lock to ask for credentials.
pub(crate) struct Held<T: Send + Sync>(Option<Arc<T>>);

impl<T: Send + Sync> Held<T> {
    pub fn new(value: T) -> Held<T> {
        Held(Some(Arc::new(value)))
    }

    pub fn share(&self) -> Arc<T> {
        self.0.clone().expect("there until it is dropped")
    }
}

impl<T: Send + Sync> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("there until it is dropped")
    }
}

impl<T: Send + Sync> Drop for Held<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        Python::attach(|py| py.detach(|| drop(value)));
    }
}

/// An open object.
#[pyclass(frozen, module = "aquifer._native")]
pub(crate) struct RemoteObject {
    pub device: Held<RemoteDevice>,
}

/// A directory on a local disk that keeps what was downloaded.
#[pyclass(frozen, module = "aquifer._native")]
pub(crate) struct NativeTier(Tier);

#[pymethods]
impl NativeTier {
    /// Opens the directory, by default that of the environment.
    #[staticmethod]
    fn open(py: Python<'_>, path: Option<PathBuf>) -> Result<NativeTier> {
        let path = path.or_else(Tier::default_path).ok_or_else(|| {
            let text = "there is no directory for a tier: name one, or set AQUIFER_TIER or HOME";
            PyValueError::new_err(text)
        })?;
        Ok(NativeTier(py.detach(|| Tier::open(path))?))
    }

    #[getter]
    fn path(&self) -> &Path {
        self.0.path()
    }

    fn set_budget_bytes(&self, py: Python<'_>, budget_bytes: u64) -> Result {
        Ok(py.detach(|| self.0.set_budget_bytes(budget_bytes))?)
    }

    fn info<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let TierInfo { budget_bytes, used_bytes, objects, .. } = py.detach(|| self.0.info())?;
        let info = PyDict::new(py);
        info.set_item("budget_bytes", budget_bytes)?;
        info.set_item("used_bytes", used_bytes)?;
        let of_object = |object: TierObject| {
            let one = PyDict::new(py);
            one.set_item("url", object.url)?;
            one.set_item("etag", object.etag)?;
            one.set_item("len_bytes", object.len_bytes)?;
            one.set_item("present_bytes", object.present_bytes)?;
            one.set_item("used_bytes", object.used_bytes)?;
            Ok(one)
        };
        let objects: PyResult<Vec<_>> = objects.into_iter().map(of_object).collect();
        info.set_item("objects", objects?)?;
        Ok(info)
    }
}

/// The options that are not configuration keys of a store. Seconds and prices are numbers.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Options {
    endpoint: Option<String>,
    region: Option<String>,
    allow_http: Option<bool>,
    anonymous: Option<bool>,
    unversioned: Option<bool>,
    timeout: Option<f64>,
    retries: Option<usize>,
    in_flight: Option<usize>,
    largest_request_bytes: Option<usize>,
    buffer_bytes: Option<usize>,
    hedge: Option<bool>,
    prices: Option<(f64, f64)>,
    tier: Option<Py<NativeTier>>,
    credentials: Option<Py<PyAny>>,
    config: Vec<(String, String)>,
}

/// Applies an option that was given.
macro_rules! given {
    ($options:ident, $chosen:ident, $($name:ident),*) => {
        $(if let Some(value) = $chosen.$name {
            $options = $options.$name(value);
        })*
    };
}

impl Options {
    fn chosen(self) -> RemoteOptions {
        let mut options = RemoteDevice::options();
        given!(options, self, endpoint, region, allow_http, anonymous, unversioned);
        given!(options, self, retries, in_flight, largest_request_bytes, buffer_bytes, hedge);
        // One that is no duration is as long as possible: Python has refused what is not positive.
        let timeout = self.timeout.map_or(DEFAULT_TIMEOUT, |seconds| {
            Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
        });
        options = options.timeout(timeout);
        if let Some((per_million, per_gib)) = self.prices {
            options = options.prices(per_million, per_gib);
        }
        if let Some(tier) = self.tier {
            options = options.tier(&tier.get().0);
        }
        if let Some(supply) = self.credentials {
            let provider = Provider::new(supply, timeout);
            options = options.credentials(move || provider.get());
        }
        for (key, value) in self.config {
            options = options.config(key, value);
        }
        options
    }
}

#[pymethods]
impl RemoteObject {
    /// Opens an object and pins its version.
    #[staticmethod]
    fn open(py: Python<'_>, url: String, options: Options) -> Result<RemoteObject> {
        let options = options.chosen();
        let opened = waiting(py, vec![], move |_| Ok(options.open(&url)?));
        Ok(RemoteObject { device: Held::new(opened?) })
    }

    /// Without what may be secret.
    #[getter]
    fn url(&self) -> &str {
        self.device.name()
    }

    /// The version: ETag, if the server sent one, and length.
    #[getter]
    fn version(&self) -> Result<(Option<&str>, u64)> {
        Ok((self.device.etag(), self.device.len_bytes()?))
    }

    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let figures = PyDict::new(py);
        let RemoteStats {
            requests,
            ranges,
            hedged_ranges,
            failed_ranges,
            received_bytes,
            delivered_bytes,
            latency,
            bytes_per_second,
            tier_bytes,
            tier_problem,
            cost,
            ..
        } = self.device.stats();
        for (name, value) in [
            ("requests", requests),
            ("ranges", ranges),
            ("hedged_ranges", hedged_ranges),
            ("failed_ranges", failed_ranges),
            ("received_bytes", received_bytes),
            ("delivered_bytes", delivered_bytes),
            ("tier_bytes", tier_bytes),
            ("latency_ns", u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX)),
            ("received_bytes_per_second", bytes_per_second),
        ] {
            figures.set_item(name, value)?;
        }
        figures.set_item("cost", cost)?;
        figures.set_item("tier_problem", tier_problem)?;
        Ok(figures)
    }
}

/// The bytes of an object, copied out of the pages of a cache: for files, which need no addresses.
#[pyclass(frozen, module = "aquifer._native")]
pub(crate) struct RemoteReader {
    pages: Held<Pages>,
}

/// Bytes of one page, and where they go in a target.
struct Part {
    page: PageId,
    start: usize,
    len: usize,
    at: usize,
}

/// The memory that a call copies to.
struct Target(*mut u8);

// SAFETY: one thread at a time copies, and the caller keeps the memory.
unsafe impl Send for Target {}

impl RemoteReader {
    /// The parts of these on each page, in the order of pages.
    fn parts(&self, pieces: &[Piece]) -> Vec<Part> {
        let page_bytes = self.pages.page_bytes() as u64;
        let mut parts = vec![];
        for &Piece { start, len, at } in pieces {
            let end = start + len as u64;
            let mut from = start;
            while from < end {
                let page = from / page_bytes;
                let to = ((page + 1) * page_bytes).min(end);
                parts.push(Part {
                    page: PageId(page),
                    start: (from % page_bytes) as usize,
                    len: (to - from) as usize,
                    at: at + (from - start) as usize,
                });
                from = to;
            }
        }
        parts.sort_unstable_by_key(|part| part.page);
        parts
    }

    /// Copies to the memory of `out`.
    fn read_pieces(
        &self,
        py: Python<'_>,
        pieces: &[Piece],
        target: Target,
        out: &Bound<'_, PyAny>,
    ) -> Result {
        let parts = self.parts(pieces);
        let mut wanted: Vec<_> = parts.iter().map(|part| part.page).collect();
        wanted.dedup();
        let mut is_here = true;
        for &page in &wanted {
            is_here = is_here && self.pages.is_resident(page)?;
        }
        let pages = self.pages.share();
        let copy = move |call: Wanted| {
            let target = target;
            pages.visit_many(wanted, |page, bytes| {
                let first = parts.partition_point(|part| part.page < page);
                for part in parts[first..].iter().take_while(|part| part.page == page) {
                    let place = target.0.wrapping_add(part.at);
                    let bytes = &bytes[part.start..part.start + part.len];
                    let copy = || {
                        // SAFETY: the parts lie in the target, whose length was checked; it is Python's memory, not the cache's.
                        unsafe {
                            std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len())
                        };
                    };
                    if !call.while_wanted(copy) {
                        return ControlFlow::Break(());
                    }
                }
                ControlFlow::Continue(())
            })?;
            Ok(())
        };
        if is_here {
            return py.detach(|| copy(Wanted::new()));
        }
        waiting(py, vec![out.clone().unbind()], copy)
    }
}

#[pymethods]
impl RemoteReader {
    #[staticmethod]
    fn open(
        py: Python<'_>,
        cache: &Bound<'_, NativeCache>,
        object: &Bound<'_, RemoteObject>,
    ) -> Result<RemoteReader> {
        let (cache, device) = (cache.get(), object.get().device.share());
        let pages = py.detach(|| cache.cache.pages(device))?;
        Ok(RemoteReader { pages: Held::new(pages) })
    }

    fn __len__(&self) -> usize {
        self.pages.len_bytes() as usize
    }

    /// Copies `lengths` bytes from each of `starts` on to `out`, one after the other.
    fn read_ranges(
        &self,
        py: Python<'_>,
        starts: PyBuffer<i64>,
        lengths: PyBuffer<i64>,
        out: &Bound<'_, PyAny>,
    ) -> Result {
        let buffer = PyBuffer::get(out)?;
        let listing = Listing::check(py, &starts, &lengths, self.pages.len_bytes())?;
        let target = listing.target(&buffer)?;
        listing.in_steps(py, |pieces| self.read_pieces(py, &pieces, Target(target), out))
    }

    /// Starts bringing in `length` bytes from `offset` on, and does not wait.
    fn prefetch(&self, py: Python<'_>, offset: u64, length: u64) -> Result {
        let page_bytes = self.pages.page_bytes() as u64;
        let end = offset.saturating_add(length).min(self.pages.len_bytes());
        if offset >= end {
            return Ok(());
        }
        let first = offset / page_bytes;
        let count = end.div_ceil(page_bytes) - first;
        Ok(py.detach(|| self.pages.prefetch(PageId(first), count))?)
    }
}

/// What long work asks from time to time: whether it goes on. A copy to the caller's memory is made under the lock of the answer, so
/// that none is made after the caller has left: the memory is the program's own again then.
#[derive(Clone)]
pub(crate) struct Wanted(Arc<Mutex<bool>>);

impl Wanted {
    pub fn new() -> Wanted {
        Wanted(Arc::new(Mutex::new(true)))
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn go_on(&self) -> bool {
        *self.lock()
    }

    /// Calls `copy`, if the work goes on; whether it does.
    pub fn while_wanted(&self, copy: impl FnOnce()) -> bool {
        let is_wanted = self.lock();
        if *is_wanted {
            copy();
        }
        *is_wanted
    }

    /// Waits for a copy under way; there is none afterwards.
    fn end(&self) {
        *self.lock() = false;
    }
}

/// Runs work that may wait for a server, without the interpreter's lock. When the handler of a signal raises meanwhile, returns
/// that, and the work ends by itself, without a copy any more; until then it has `uses`, such as the array that it copies to.
pub(crate) fn waiting<T: Send + 'static>(
    py: Python<'_>,
    uses: Vec<Py<PyAny>>,
    work: impl FnOnce(Wanted) -> Result<T> + Send + 'static,
) -> Result<T> {
    let wanted = Wanted::new();
    let of_work = wanted.clone();
    if thread::this_thread().cast_unsigned() != std::process::id() {
        // Not the main thread: no handler runs here.
        return py.detach(|| work(of_work));
    }
    let (done, ended) = mpsc::sync_channel(1);
    let body = move || {
        let result = catch_unwind(AssertUnwindSafe(|| work(of_work)));
        // Before the caller goes on. When the interpreter has ended, nothing of it can be dropped.
        let mut uses = ManuallyDrop::new(uses);
        Python::try_attach(|_| uses.clear());
        let _ = done.send(result);
    };
    thread::start(c"aquifer-wait", body)?;
    let ended = Mutex::new(ended);
    loop {
        let coming =
            || ended.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(LOOK_EVERY);
        match py.detach(coming) {
            Ok(Ok(result)) => return result,
            Ok(Err(panic)) => resume_unwind(panic),
            Err(RecvTimeoutError::Timeout) => {
                if let Err(raised) = py.check_signals() {
                    py.detach(|| wanted.end());
                    return Err(raised.into());
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("a thread of the library has ended").into());
            }
        }
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeTier>()?;
    module.add_class::<RemoteObject>()?;
    module.add_class::<RemoteReader>()
}
