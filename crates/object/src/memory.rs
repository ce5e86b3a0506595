//! An object's memory: a private mapping of its pages at its fixed address.
//!
//! | media | for writing | for reading |
//! |---|---|---|
//! | can be mapped privately | the primary, mapped privately: a store copies its page, and the copy is the shadow | the same, read-only |
//! | cannot (hugetlbfs, device DAX) | an anonymous copy of the whole object | the same, read-only |
//!
//! A reader that cannot bring the primary up to date itself gets private copies of the pages for
//! which the log has newer content.

use std::sync::Arc;

use aquifer_pool::PoolError;
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::media::ByteRange;
use aquifer_sys::memory::Protection;
use aquifer_vm::dirty::{PageIndex, PageRun, TrackedKind};
use aquifer_vm::{FixedRange, VmError};

use crate::access::Access;
use crate::error::{ObjectError, Result, text};
use crate::flight::Flights;
use crate::name::ObjectName;
use crate::shared::Shared;

/// Pages that replace those on media: media offset and content.
pub(crate) type Patches = Vec<(u64, Vec<u8>)>;

/// An attached object: its identity, and where its bytes lie.
pub(crate) struct Object {
    pub shared: Arc<Shared>,
    pub name: Vec<u8>,
    pub number: u64,
    /// The address of its first byte.
    pub address: u64,
    /// Its pages on media.
    pub media: ByteRange,
    /// The commits of its stores that are in flight.
    pub flights: Arc<Flights>,
}

impl Object {
    /// Its name, for messages.
    pub fn name_text(&self) -> ObjectName {
        text(&self.name)
    }

    /// The address of a page in memory.
    pub fn page(&self, page: PageIndex) -> *const u8 {
        (self.address + page.0 * PAGE_BYTES) as *const u8
    }

    /// The range of pages on media.
    pub fn on_media(&self, run: PageRun) -> ByteRange {
        ByteRange {
            offset_bytes: self.media.offset_bytes + run.first.0 * PAGE_BYTES,
            len_bytes: run.count * PAGE_BYTES,
        }
    }

    /// Whether an address lies in the object.
    pub fn contains(&self, address: u64) -> bool {
        (self.address..self.address + self.media.len_bytes).contains(&address)
    }

    /// The kind of its mapping, for the dirty tracker.
    pub fn kind(&self) -> TrackedKind {
        let is_private = self.shared.pool.media().maps_privately();
        if is_private { TrackedKind::PrivateFile } else { TrackedKind::Anonymous }
    }

    fn failed(&self, error: VmError) -> ObjectError {
        let name = self.name_text();
        match error {
            VmError::AddressTaken { address, len_bytes, by } => {
                ObjectError::AddressTaken { name, address, len_bytes, by }
            }
            source => ObjectError::Memory { name, source },
        }
    }

    /// Maps the object.
    pub fn map(&self, access: Access, patches: &Patches) -> Result<FixedRange> {
        let ByteRange { offset_bytes, len_bytes } = self.media;
        let media = self.shared.pool.media();
        let is_copied = !media.maps_privately();
        let protection = match access {
            Access::Read if patches.is_empty() => Protection::Read,
            _ => Protection::ReadWrite,
        };
        let mapping = if is_copied {
            FixedRange::map_anonymous(self.address, len_bytes)
        } else {
            FixedRange::map_private(self.address, len_bytes, protection, media.file(), offset_bytes)
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
        for done in (0..self.media.len_bytes).step_by(PIECE_BYTES as usize) {
            let len_bytes = PIECE_BYTES.min(self.media.len_bytes - done) as usize;
            // SAFETY: inside the mapping.
            let start = unsafe { mapping.address().add(done as usize) };
            // SAFETY: the memory is fresh and zeroed, and no other code knows it yet.
            let piece = unsafe { std::slice::from_raw_parts_mut(start, len_bytes) };
            let offset = self.media.offset_bytes + done;
            self.shared.pool.media().read_at(offset, piece).map_err(PoolError::from)?;
        }
        Ok(())
    }
}
