//! The places of a pool's parts, computed from its size at creation and checked when it is opened.

use crate::run::MAX_PAGES;
use crate::slot_bytes::SLOT_BYTES;
use crate::{ByteRange, FormatError, PAGE_BYTES};

/// The first page of the metadata: after both superblocks.
pub const METADATA_START_PAGE: u64 = 2;
/// Slots of one metadata page.
pub const SLOTS_PER_PAGE: u64 = PAGE_BYTES / SLOT_BYTES as u64;
/// The smallest log, in pages.
pub const MIN_LOG_PAGES: u64 = 16;
/// The smallest pool, in bytes.
pub const MIN_POOL_BYTES: u64 = 256 << 10;

/// The parts of a pool, in pages. Fixed when the pool is created, except that `page_count` may
/// grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Pages of the whole pool.
    pub page_count: u64,
    /// Pages of slots.
    pub metadata_pages: u64,
    /// First page of the log.
    pub log_start_page: u64,
    /// Pages of the log.
    pub log_pages: u64,
    /// First page of the data.
    pub data_start_page: u64,
}

impl Layout {
    /// Computes the layout of a new pool of `len_bytes`, with at least `slots` slots and a log of
    /// about `log_bytes`.
    ///
    /// # Errors
    /// [`FormatError::Field`] if these do not fit into the pool.
    pub fn new(len_bytes: u64, slots: u64, log_bytes: u64) -> Result<Layout, FormatError> {
        let page_count = len_bytes / PAGE_BYTES;
        let metadata_pages = slots.max(SLOTS_PER_PAGE).div_ceil(SLOTS_PER_PAGE);
        let log_start_page = METADATA_START_PAGE.saturating_add(metadata_pages);
        let log_pages = log_bytes.div_ceil(PAGE_BYTES);
        let layout = Layout {
            page_count,
            metadata_pages,
            log_start_page,
            log_pages,
            data_start_page: log_start_page.saturating_add(log_pages),
        };
        layout.validate()?;
        Ok(layout)
    }

    /// Checks that all parts are in place, that none is empty and none is outside.
    ///
    /// # Errors
    /// [`FormatError::Field`] names the first field that is wrong.
    pub fn validate(&self) -> Result<(), FormatError> {
        let field = |field, value| Err(FormatError::Field { field, value });
        if self.page_count > MAX_PAGES || self.page_count < MIN_POOL_BYTES / PAGE_BYTES {
            return field("page count", self.page_count);
        }
        // Records name inodes in 32 bits.
        let most = (u64::from(u32::MAX) / SLOTS_PER_PAGE).min(self.page_count);
        if self.metadata_pages == 0 || self.metadata_pages > most {
            return field("metadata pages", self.metadata_pages);
        }
        if self.log_start_page != METADATA_START_PAGE + self.metadata_pages {
            return field("log start", self.log_start_page);
        }
        if self.log_pages < MIN_LOG_PAGES || self.log_pages > self.page_count {
            return field("log pages", self.log_pages);
        }
        if self.data_start_page != self.log_start_page + self.log_pages
            || self.data_start_page >= self.page_count
        {
            return field("data start", self.data_start_page);
        }
        Ok(())
    }

    /// The number of slots of the metadata.
    #[inline]
    pub fn slots(&self) -> u64 {
        self.metadata_pages * SLOTS_PER_PAGE
    }

    /// The bytes of the metadata.
    #[inline]
    pub fn metadata(&self) -> ByteRange {
        ByteRange {
            offset_bytes: METADATA_START_PAGE * PAGE_BYTES,
            len_bytes: self.metadata_pages * PAGE_BYTES,
        }
    }

    /// The bytes of the log.
    #[inline]
    pub fn log(&self) -> ByteRange {
        ByteRange {
            offset_bytes: self.log_start_page * PAGE_BYTES,
            len_bytes: self.log_pages * PAGE_BYTES,
        }
    }

    /// The bytes of the data.
    #[inline]
    pub fn data(&self) -> ByteRange {
        ByteRange {
            offset_bytes: self.data_start_page * PAGE_BYTES,
            len_bytes: (self.page_count - self.data_start_page) * PAGE_BYTES,
        }
    }

    /// The length of the pool in bytes.
    #[inline]
    pub fn len_bytes(&self) -> u64 {
        self.page_count * PAGE_BYTES
    }

    /// The place on media of a slot.
    #[inline]
    pub fn slot_offset_bytes(&self, slot: u64) -> u64 {
        METADATA_START_PAGE * PAGE_BYTES + slot * SLOT_BYTES as u64
    }
}
