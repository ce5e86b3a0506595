//! What people do with a tier: look at it, check it, drop parts of it.

use super::directory::Directory;
use super::evict::used_bytes;
use super::layout::{BLOCK_BYTES, Geometry, SUB_BLOCK_BYTES};
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
        let budget_bytes = self.control()?.read()?.budget_bytes;
        let mut objects = vec![];
        self.for_each(|object| {
            let header = object.header()?;
            let mut present_bytes = 0;
            for_present(object, |_, bytes| present_bytes += bytes);
            objects.push(TierObject {
                url: header.url(),
                etag: header.etag(),
                len_bytes: object.geometry.len_bytes,
                present_bytes,
                used_bytes: object.allocated_bytes()?,
            });
            Ok(())
        })?;
        objects.sort_by(|one, other| (&one.url, &one.etag).cmp(&(&other.url, &other.etag)));
        Ok(TierInfo { budget_bytes, used_bytes: used_bytes(&self.directory)?, objects })
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
        self.for_each(|object| {
            for_present(object, |_, bytes| all_bytes += bytes);
            Ok(())
        })?;
        let mut result = TierVerification::default();
        let mut done_bytes = 0;
        self.for_each(|object| {
            let mut wrong = vec![];
            let mut buffer = vec![0; SUB_BLOCK_BYTES as usize];
            for_present(object, |sub_block, bytes| {
                if object.read(sub_block * SUB_BLOCK_BYTES, &mut buffer[..bytes as usize]) {
                    result.right_bytes += bytes;
                } else {
                    wrong.push(sub_block * SUB_BLOCK_BYTES / BLOCK_BYTES);
                }
                done_bytes += bytes;
                progress(done_bytes.min(all_bytes), all_bytes);
            });
            wrong.dedup();
            for block in wrong {
                result.dropped_bytes += object.evict(block)?;
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
        let before = used_bytes(&self.directory)?;
        for meant in self.info()?.objects.into_iter().filter(|object| is_meant(object)) {
            self.for_each(|object| {
                let header = object.header()?;
                if (header.url(), header.etag()) != (meant.url.clone(), meant.etag.clone()) {
                    return Ok(());
                }
                for block in 0..object.geometry.blocks() {
                    object.evict(block)?;
                }
                let _ = object.remove_unused(&self.directory);
                Ok(())
            })?;
        }
        let after = used_bytes(&self.directory)?;
        self.control()?.change(|state| state.used_bytes = after)?;
        Ok(before.saturating_sub(after))
    }

    /// Visits the objects' files, without those that are damaged or another user's.
    fn for_each(
        &self,
        mut visit: impl FnMut(&ObjectFile) -> std::io::Result<()>,
    ) -> Result<(), TierError> {
        let directory: &Directory = &self.directory;
        for key in directory.keys()? {
            match ObjectFile::existing(directory, key) {
                Ok(Some(object)) => visit(&object).map_err(|error| {
                    let path = directory.path().join(key.file_name());
                    TierError::system(&path, "cannot be read", error)
                })?,
                Ok(None) | Err(TierError::Damaged { .. } | TierError::NotPrivate { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Visits the sub-blocks that have a proof, with their length in bytes.
fn for_present(object: &ObjectFile, mut visit: impl FnMut(u64, u64)) {
    let geometry: Geometry = object.geometry;
    let mut at = 0;
    while at < geometry.sub_blocks() {
        let end = (at + 65_536).min(geometry.sub_blocks());
        for (sub_block, is_present) in (at..).zip(object.present(at..end)) {
            if is_present {
                let bytes = geometry.bytes_of(sub_block..sub_block + 1);
                visit(sub_block, bytes.end - bytes.start);
            }
        }
        at = end;
    }
}
