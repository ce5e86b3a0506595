//! Random identifiers.

use uuid::Uuid;

use crate::error::{PoolError, Result};

/// A random uuid.
pub(crate) fn new_uuid() -> Result<Uuid> {
    let mut bytes = [0; 16];
    aquifer_sys::random::fill(&mut bytes).map_err(|source| PoolError::Open {
        path: "the system's random numbers".into(),
        reason: "they cannot be read".to_owned(),
        source: Some(source),
    })?;
    Ok(uuid::Builder::from_random_bytes(bytes).into_uuid())
}
