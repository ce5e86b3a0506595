//! `Cache`: one budget of memory for many arrays.
//!
//! Reading arrays, and those of the user backend, are mappings of an [`aquifer::Cache`]. Writable arrays are views of an
//! [`aquifer::Mapper`], which is made with the first of them. Its budget is the same, and bounds the pages of shared views; the
//! copies of private views, and of mode `c`, come on top.

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
    /// Made when first needed: it has threads of its own.
    mapper: Mutex<Option<Mapper>>,
}

impl NativeCache {
    /// What maps writable arrays.
    pub fn mapper(&self) -> Result<Mapper> {
        let mut place = self.mapper.lock().unwrap_or_else(PoisonError::into_inner);
        match &*place {
            Some(mapper) => Ok(mapper.clone()),
            None => {
                // Writable views are never parked: there is nothing to keep for reuse.
                let builder = Mapper::builder().mapping_cache_bytes(0);
                let budget_bytes = self.cache.stats().budget_bytes;
                Ok(place.insert(builder.resident_budget_bytes(budget_bytes).build()?).clone())
            }
        }
    }

    fn mapper_if_made(&self) -> Option<Mapper> {
        self.mapper.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
        Ok(NativeCache { cache, mapper: Mutex::default() })
    }

    fn resize(&self, py: Python<'_>, budget_bytes: u64) -> Result {
        py.detach(|| self.cache.resize(budget_bytes))?;
        if let Some(mapper) = self.mapper_if_made() {
            mapper.set_resident_budget(budget_bytes);
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
        let stored_to = self.mapper_if_made().map_or(0, |mapper| mapper.stats().resident_bytes);
        figures.set_item("writable_resident_bytes", stored_to)?;
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
