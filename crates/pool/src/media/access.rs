//! Access to the bytes of media: in place where they are mapped, else by transfers.

use aquifer_vm::Bytes;
use aquifer_vm::file_mapping::FileMapping;

use super::{ByteRange, Media, MediaError, MediaOperation, PersistenceDomain};
use crate::format::PAGE_BYTES;
use crate::sync::before_bytes_are_stored;

impl dyn Media {
    /// Copies bytes out, without a system call where they are mapped.
    pub(crate) fn load(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MediaError> {
        if let Some(mapping) = self.mapping()
            && mapping.read(offset_bytes, bytes).is_ok()
        {
            return Ok(());
        }
        // The range is not mapped; or this returns the error.
        self.read_at(offset_bytes, bytes)
    }

    /// Passes bytes to a closure.
    pub(crate) fn look_at<T>(
        &self,
        range: ByteRange,
        look: impl FnOnce(Bytes<'_>) -> T,
    ) -> Result<T, MediaError> {
        let len = usize::try_from(range.len_bytes).unwrap_or(usize::MAX);
        if self.bytes(range).is_some()
            && let Some(mapping) = self.mapping()
        {
            let looked = mapping.guarded(self.file(), range.offset_bytes, len, look);
            return looked.map_err(|_| self.unreadable([range]));
        }
        if range.end_bytes() > self.len_bytes() {
            // Let the media report a range outside of them before memory is taken for all of it.
            self.read_at(range.end_bytes() - 1, &mut [0])?;
        }
        // The caller chose the length: running out of memory is an error, and must not abort the
        // process.
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| self.read_error(range, libc::ENOMEM))?;
        bytes.resize(len, 0);
        self.read_at(range.offset_bytes, &mut bytes)?;
        Ok(look(Bytes::from(&bytes[..])))
    }

    /// The error for bytes in these ranges that could not be read.
    #[cold]
    pub(crate) fn unreadable(&self, ranges: impl IntoIterator<Item = ByteRange>) -> MediaError {
        let mut first = None;
        for range in ranges {
            first.get_or_insert(range);
            for at in (range.offset_bytes..range.end_bytes()).step_by(PAGE_BYTES as usize) {
                if let Err(error) = self.read_at(at, &mut [0]) {
                    return error;
                }
            }
        }
        // They can be read again, but what was read before cannot be trusted.
        let range = first.unwrap_or(ByteRange { offset_bytes: 0, len_bytes: 0 });
        self.read_error(range, libc::EIO)
    }

    fn read_error(&self, range: ByteRange, errno: i32) -> MediaError {
        let source = std::io::Error::from_raw_os_error(errno);
        MediaError::at(self.path(), MediaOperation::Read, range)(source)
    }

    /// Bytes in place; `None` if they are not mapped.
    #[inline]
    pub(crate) fn bytes(&self, range: ByteRange) -> Option<Bytes<'_>> {
        self.bytes_of(self.mapping()?, range)
    }

    /// The address at which to store bytes; `None` if they are not mapped for stores.
    pub(crate) fn place_to_store(&self, range: ByteRange) -> Option<*mut u8> {
        let bytes = self.bytes_of(self.mapping_to_store()?, range)?;
        Some(bytes.as_ptr().cast_mut())
    }

    #[inline]
    fn bytes_of<'a>(&self, mapping: &'a FileMapping, range: ByteRange) -> Option<Bytes<'a>> {
        let len = usize::try_from(range.len_bytes).ok()?;
        mapping.bytes(range.offset_bytes, len).ok().or_else(|| {
            // The media may have grown.
            self.extend_mapping();
            mapping.bytes(range.offset_bytes, len).ok()
        })
    }

    /// Stores bytes, visible to all processes at once, without a system call where they are memory.
    ///
    /// Where they are page cache, this is a write, except for pieces of up to 16 KiB in regions that
    /// are written densely: a store to an uncached page would first read it, and a store to a page of
    /// a large folio would have the whole folio written back.
    ///
    /// # Safety
    /// As for [`Media::write_at`].
    pub(crate) unsafe fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        before_bytes_are_stored();
        // SAFETY: the caller upholds the same contract.
        unsafe { self.store_at(offset_bytes, bytes) }
    }

    /// As [`Media::store`], and by a call where they are page cache: prepares nothing.
    ///
    /// # Safety
    /// As for [`Media::write_at`].
    pub(crate) unsafe fn store_small(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
    ) -> Result<(), MediaError> {
        before_bytes_are_stored();
        match self.domain() {
            // SAFETY: the caller upholds the same contract.
            PersistenceDomain::PageCache => unsafe { self.write_at(offset_bytes, bytes) },
            // SAFETY: as above.
            _ => unsafe { self.store_at(offset_bytes, bytes) },
        }
    }
}
