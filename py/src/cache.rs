//! `Cache`: one budget of memory for many arrays.
//!
//! Reading arrays, and those of the user backend, are mappings of an [`aquifer::Cache`]. Writable arrays are private views of an
//! [`aquifer::Mapper`] with the same budget, which is made with the first of them. Mode `c` has one without a budget: its copies
//! must not be written out.

use std::sync::{Mutex, PoisonError};

use aquifer::policy::PolicyKind;
use aquifer::{Mapper, Stats};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::Result;

/// A budget of memory, and what maps files under it.
#[pyclass(frozen, module = "aquifer._native")]
pub(crate) struct NativeCache {
    pub cache: aquifer::Cache,
    /// Made when first needed: they have threads of their own.
    mappers: Mutex<Mappers>,
}

#[derive(Default)]
struct Mappers {
    bounded: Option<Mapper>,
    unbounded: Option<Mapper>,
}

impl NativeCache {
    /// What maps writable arrays. `writes_out` says whether their stores may be written to the file before they are flushed, so
    /// that they stay within the budget.
    pub fn mapper(&self, writes_out: bool) -> Result<Mapper> {
        let mut mappers = self.mappers.lock().unwrap_or_else(PoisonError::into_inner);
        // Views are private and never parked: there is nothing to keep for reuse.
        let mut builder = Mapper::builder().mapping_cache_bytes(0);
        let place = if writes_out {
            builder = builder.private_budget_bytes(self.cache.stats().budget_bytes);
            &mut mappers.bounded
        } else {
            &mut mappers.unbounded
        };
        match place {
            Some(mapper) => Ok(mapper.clone()),
            None => Ok(place.insert(builder.build()?).clone()),
        }
    }

    fn bounded(&self) -> Option<Mapper> {
        self.mappers.lock().unwrap_or_else(PoisonError::into_inner).bounded.clone()
    }
}

#[pymethods]
impl NativeCache {
    #[new]
    fn new(
        py: Python<'_>,
        budget_bytes: Option<u64>,
        policy: Option<&str>,
        page_bytes: Option<usize>,
        io_threads: Option<usize>,
    ) -> Result<NativeCache> {
        let mut builder = aquifer::Cache::builder();
        if let Some(bytes) = budget_bytes {
            builder = builder.budget_bytes(bytes);
        }
        if let Some(policy) = policy {
            let kind: PolicyKind =
                policy.parse().map_err(|error| PyValueError::new_err(format!("{error}")))?;
            builder = builder.policy(kind);
        }
        if let Some(bytes) = page_bytes {
            builder = builder.page_bytes(bytes);
        }
        if let Some(threads) = io_threads {
            builder = builder.io_threads(threads);
        }
        let cache = py.detach(|| builder.build())?;
        Ok(NativeCache { cache, mappers: Mutex::default() })
    }

    fn resize(&self, py: Python<'_>, budget_bytes: u64) -> Result {
        py.detach(|| self.cache.resize(budget_bytes))?;
        if let Some(mapper) = self.bounded() {
            mapper.set_private_budget(budget_bytes);
        }
        Ok(())
    }

    #[getter]
    fn budget_bytes(&self) -> u64 {
        self.cache.stats().budget_bytes
    }

    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.cache.stats());
        let figures = figures(py, &stats)?;
        let dropped = self.bounded().map_or(0, |mapper| mapper.stats().private_bytes_dropped);
        figures.set_item("private_dropped_bytes", dropped)?;
        Ok(figures)
    }
}

/// Statistics by name.
fn figures<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let figures = PyDict::new(py);
    figures.set_item("budget_bytes", stats.budget_bytes)?;
    figures.set_item("page_bytes", stats.page_bytes)?;
    let resident = stats.resident_pages * stats.page_bytes + stats.kernel_resident_pages * 4096;
    figures.set_item("resident_bytes", resident)?;
    figures.set_item("dirty_bytes", stats.dirty_pages * stats.page_bytes)?;
    figures.set_item("policy", stats.policy)?;
    for (name, count) in stats.counters() {
        figures.set_item(name, count)?;
    }
    let [p50, p99, p999] = stats.fault_latency();
    figures.set_item("fault_p50_ns", p50.as_nanos() as u64)?;
    figures.set_item("fault_p99_ns", p99.as_nanos() as u64)?;
    figures.set_item("fault_p999_ns", p999.as_nanos() as u64)?;
    Ok(figures)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeCache>()
}
