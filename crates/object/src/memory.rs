//! An object's memory: a private mapping of its pages at its fixed address.
//!
//! | media | for writing | for reading |
//! |---|---|---|
//! | can be mapped privately | the primary, mapped privately: a store copies its page, and the copy is the shadow | the same, read-only |
//! | cannot (hugetlbfs, device DAX) | an anonymous copy of the whole object | the same, read-only |
//!
//! A reader that cannot bring the primary up to date itself gets private copies of the pages for
//! which the log has newer content.

use aquifer_pool::media::{ByteRange, Media};
use aquifer_sys::memory::Protection;
use aquifer_vm::dirty::TrackedKind;
use aquifer_vm::{FixedRange, VmError};

use crate::access::Access;
use crate::error::{ObjectError, Result, text};

/// Pages that replace those on media: media offset and content.
pub(crate) type Patches = Vec<(u64, Vec<u8>)>;

/// The source of an object's mapping.
pub(crate) struct Source<'a> {
    pub name: &'a [u8],
    pub media: &'a dyn Media,
    pub range: ByteRange,
    pub address: u64,
}

impl Source<'_> {
    /// The kind of its mapping, for the dirty tracker.
    pub fn kind(&self) -> TrackedKind {
        if self.media.maps_privately() { TrackedKind::PrivateFile } else { TrackedKind::Anonymous }
    }

    fn failed(&self, error: VmError) -> ObjectError {
        let name = text(self.name);
        match error {
            VmError::AddressTaken { address, len_bytes, by } => {
                ObjectError::AddressTaken { name, address, len_bytes, by }
            }
            source => ObjectError::Memory { name, source },
        }
    }

    /// Maps the object.
    pub fn map(&self, access: Access, patches: &Patches) -> Result<FixedRange> {
        let ByteRange { offset_bytes, len_bytes } = self.range;
        let is_copied = !self.media.maps_privately();
        let protection = match access {
            Access::Read if patches.is_empty() => Protection::Read,
            _ => Protection::ReadWrite,
        };
        let mapping = if is_copied {
            FixedRange::map_anonymous(self.address, len_bytes)
        } else {
            FixedRange::map_private(
                self.address,
                len_bytes,
                protection,
                self.media.file(),
                offset_bytes,
            )
        }
        .map_err(|error| self.failed(error))?;
        if is_copied {
            self.fill(&mapping)?;
        }
        for (offset, bytes) in patches {
            let start = (offset - offset_bytes) as usize;
            assert!(start + bytes.len() <= len_bytes as usize, "a patch of another object");
            // SAFETY: inside the mapping, which is fresh and writable and not yet shared with other
            // code.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    bytes.as_ptr(),
                    mapping.address().add(start),
                    bytes.len(),
                );
            }
        }
        if access == Access::Read && (is_copied || protection == Protection::ReadWrite) {
            // SAFETY: no other code knows the mapping yet.
            unsafe { mapping.protect(Protection::Read) }.map_err(|error| self.failed(error))?;
        }
        Ok(mapping)
    }

    fn fill(&self, mapping: &FixedRange) -> Result<()> {
        const PIECE_BYTES: u64 = 1 << 20;
        for done in (0..self.range.len_bytes).step_by(PIECE_BYTES as usize) {
            let len_bytes = PIECE_BYTES.min(self.range.len_bytes - done) as usize;
            // SAFETY: inside the mapping.
            let start = unsafe { mapping.address().add(done as usize) };
            // SAFETY: the memory is fresh and zeroed, and no other code knows it yet.
            let piece = unsafe { std::slice::from_raw_parts_mut(start, len_bytes) };
            let offset = self.range.offset_bytes + done;
            self.media.read_at(offset, piece).map_err(aquifer_pool::PoolError::from)?;
        }
        Ok(())
    }
}
