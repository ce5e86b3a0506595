//! The native module of the Python package: `aquifer._native`.
//!
//! A thin layer over the crate `aquifer`: it translates arguments, releases the interpreter's lock in every call that may
//! wait, and turns errors into exceptions in one place ([`error`]). What has a Pythonic shape (the array class, file
//! objects, fsspec) is written in Python, in `python/aquifer/`.
//!
//! A fault is served by Aquifer's signal handler without Python: it takes no lock of the interpreter.

mod buffer;
mod cache;
mod credentials;
mod error;
mod file;
mod files;
mod list;
mod memmap;
mod object;
mod pool;
mod remote;
mod rows;
mod take;
mod view;

use pyo3::prelude::*;

/// Each module adds its own classes and functions. It needs the interpreter's lock, also where the interpreter can do without:
/// the counts of references that `close` of an array compares are exact only under it, and nothing is tested without it.
#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(module)?;
    cache::register(module)?;
    memmap::register(module)?;
    take::register(module)?;
    remote::register(module)?;
    rows::register(module)?;
    pool::register(module)?;
    Ok(())
}
