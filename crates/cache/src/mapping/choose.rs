//! Chooses the backend of a mapping.

use std::sync::Arc;

use aquifer_device::Device;

use crate::engine::Engine;
use crate::error::{CacheError, Result};
use crate::kernel::KernelFile;
use crate::map_options::Backend;
use crate::mapping::calibrate::calibrate;

/// The file mapping of the kernel backend, or `None` if the user backend is to serve.
///
/// # Errors
/// [`CacheError::BackendUnsupported`] if the kernel backend was requested and cannot serve, or if the
/// cache's settings require the user backend and the system refuses it.
pub(crate) fn choose(
    engine: &Arc<Engine>,
    device: &Arc<dyn Device>,
    len_bytes: u64,
    backend: Backend,
    writable: bool,
) -> Result<Option<Arc<KernelFile>>> {
    let forced = backend == Backend::Kernel;
    if backend == Backend::User {
        return Ok(None);
    }
    if !forced && (writable || prefers_user(engine, device)?) {
        return Ok(None);
    }
    let mapped = if writable {
        Err("it is for reading only; use the user backend to write".to_owned())
    } else {
        KernelFile::map(engine.clone(), device.clone(), len_bytes)?
    };
    match mapped {
        Ok(file) => Ok(Some(file)),
        Err(reason) if forced => Err(CacheError::BackendUnsupported {
            device: device.name().to_owned(),
            backend: Backend::Kernel.name(),
            reason,
        }),
        Err(_) => Ok(None),
    }
}

/// Whether [`Backend::Auto`] chooses the user backend for a read-only mapping without trying the
/// kernel backend.
fn prefers_user(engine: &Engine, device: &Arc<dyn Device>) -> Result<bool> {
    if device.page_cache_file().is_none() {
        return Ok(true);
    }
    if engine.options.needs_user_backend {
        return match engine.uffd() {
            Ok(_) => Ok(true),
            Err(error) => Err(CacheError::BackendUnsupported {
                device: device.name().to_owned(),
                backend: Backend::User.name(),
                reason: format!(
                    "it needs a userfaultfd ({error}), and only it keeps to the eviction policy and the page \
                     size that the cache was built with; leave them out, or ask for the kernel backend"
                ),
            }),
        };
    }
    let is_cheaper =
        calibrate(device.clone()).is_some_and(|measured| measured.backend() == Backend::User);
    // If the system refuses a userfaultfd, the kernel backend still serves.
    Ok(is_cheaper && engine.uffd().is_ok())
}
