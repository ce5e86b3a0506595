//! What people do with a tier: look at it, check it, drop parts of it.

use std::io;

use super::layout::{BLOCK_BYTES, SUB_BLOCK_BYTES};
use super::object::ObjectFile;
use super::{Tier, TierError};

/// The state of a tier; from [`Tier::info`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierInfo {
    /// Most bytes that the files may take on their disk.
    pub budget_bytes: u64,
    /// Bytes that they take now.
    pub used_bytes: u64,
    /// The versions of objects of which something is there.
    pub objects: Vec<TierObject>,
}

/// One version of an object in a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierObject {
    /// Its URL, without secrets; cut off after 3072 bytes.
    pub url: String,
    /// Its ETag; cut off after 960 bytes.
    pub etag: String,
    /// Its length.
    pub len_bytes: u64,
    /// Bytes of it that are there.
    pub present_bytes: u64,
    /// Bytes that its file takes on the disk.
    pub used_bytes: u64,
}

/// The result of [`Tier::verify`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierVerification {
    /// Bytes of objects that were read and are right.
    pub right_bytes: u64,
    /// Bytes that were wrong, or could not be read, and were dropped: a crash or the disk has damaged them.
    pub dropped_bytes: u64,
}

impl Tier {
    /// Lists the objects.
    ///
    /// # Errors
    /// [`TierError`].
    pub fn info(&self) -> Result<TierInfo, TierError> {
        let budget_bytes = self.control()?.budget_bytes()?;
        let mut objects = vec![];
        self.for_each(|object| {
            objects.push(described(object)?);
            Ok(())
        })?;
        objects.sort_by(|one, other| (&one.url, &one.etag).cmp(&(&other.url, &other.etag)));
        Ok(TierInfo { budget_bytes, used_bytes: self.directory.used_bytes()?, objects })
    }

    /// Reads all that is there and drops what is wrong. `progress` is told the bytes done and the bytes in all.
    ///
    /// # Errors
    /// [`TierError`]; wrong bytes are not an error.
    pub fn verify(
        &self,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<TierVerification, TierError> {
        let mut all_bytes = 0;
        self.for_each(|object| object.for_present(|_, bytes| all_bytes += bytes))?;
        let mut result = TierVerification::default();
        let mut done_bytes = 0;
        self.for_each(|object| {
            let mut wrong = vec![];
            let mut buffer = vec![0; SUB_BLOCK_BYTES as usize];
            object.for_present(|sub_block, bytes| {
                if object.read(sub_block * SUB_BLOCK_BYTES, &mut buffer[..bytes as usize]) {
                    result.right_bytes += bytes;
                } else {
                    wrong.push(sub_block * SUB_BLOCK_BYTES / BLOCK_BYTES);
                }
                done_bytes += bytes;
                progress(done_bytes.min(all_bytes), all_bytes);
            })?;
            wrong.dedup();
            for block in wrong {
                result.dropped_bytes += object.evict(block)?.unwrap_or(0);
            }
            Ok(())
        })?;
        Ok(result)
    }

    /// Drops the versions of objects that `is_meant` selects by URL, except for what is being downloaded; returns the
    /// bytes that this made free on the disk. Devices that have them open go on, and download again what they need.
    ///
    /// # Errors
    /// [`TierError`].
    pub fn drop_objects(
        &self,
        mut is_meant: impl FnMut(&TierObject) -> bool,
    ) -> Result<u64, TierError> {
        let before = self.directory.used_bytes()?;
        self.for_each(|object| {
            if is_meant(&described(object)?) && matches!(object.remove_unused(), Ok(0) | Err(_)) {
                object.evict_all()?;
            }
            Ok(())
        })?;
        let after = self.control()?.change(|state| {
            state.used_bytes = self.directory.used_bytes()?;
            Ok(state.used_bytes)
        })?;
        Ok(before.saturating_sub(after?))
    }

    /// Visits the objects' files, without those that cannot be used: damaged, or another user's.
    fn for_each(
        &self,
        mut visit: impl FnMut(&ObjectFile) -> io::Result<()>,
    ) -> Result<(), TierError> {
        for key in self.directory.keys()? {
            if let Ok(Some(object)) = ObjectFile::existing(&self.directory, key) {
                let path = self.directory.path_of(key);
                visit(&object)
                    .map_err(|error| TierError::system(&path, "cannot be read", error))?;
            }
        }
        Ok(())
    }
}

fn described(object: &ObjectFile) -> io::Result<TierObject> {
    let header = object.header()?;
    let mut present_bytes = 0;
    object.for_present(|_, bytes| present_bytes += bytes)?;
    Ok(TierObject {
        url: header.url(),
        etag: header.etag(),
        len_bytes: object.geometry.len_bytes,
        present_bytes,
        used_bytes: object.allocated_bytes()?,
    })
}
