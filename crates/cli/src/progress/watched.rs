//! Media that display how much of them has been read.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use aquifer::PersistenceDomain;
use aquifer::pool::media::{ByteRange, Media, MediaError};

use super::Bytes;

/// Media with a count of the bytes read from them. All operations are forwarded.
pub struct Watched {
    media: Arc<dyn Media>,
    count: Bytes,
}

impl Watched {
    /// Counts until it is dropped.
    pub fn new(media: Arc<dyn Media>, what: &'static str) -> Watched {
        Watched { media, count: Bytes::without_end(what) }
    }
}

#[allow(unsafe_code)] // `Media` declares its writes unsafe; they go through as they are.
impl Media for Watched {
    fn path(&self) -> &Path {
        self.media.path()
    }

    fn len_bytes(&self) -> u64 {
        self.media.len_bytes()
    }

    fn domain(&self) -> PersistenceDomain {
        self.media.domain()
    }

    fn is_writable(&self) -> bool {
        self.media.is_writable()
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MediaError> {
        self.count.add(bytes.len() as u64);
        self.media.read_at(offset_bytes, bytes)
    }

    unsafe fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.media.write_at(offset_bytes, bytes) }
    }

    unsafe fn write_durable(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.media.write_durable(offset_bytes, bytes) }
    }

    fn write_back(&self, ranges: &[ByteRange]) -> Result<(), MediaError> {
        self.media.write_back(ranges)
    }

    fn check_kept(&self) -> Result<(), MediaError> {
        self.media.check_kept()
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.media.flush()
    }

    fn grow(&self, len_bytes: u64) -> Result<(), MediaError> {
        self.media.grow(len_bytes)
    }

    fn grow_with_progress(
        &self,
        len_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), MediaError> {
        self.media.grow_with_progress(len_bytes, progress)
    }

    fn forget_cached(&self, range: ByteRange) {
        self.media.forget_cached(range);
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.media.file()
    }

    fn maps_privately(&self) -> bool {
        self.media.maps_privately()
    }
}
