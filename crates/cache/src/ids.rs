//! The engine's units, as types.

/// Index of a page within one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u64);

/// Index of a frame: one page's worth of a pool's share of the DRAM budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameId(pub u32);

/// Identifies one of a cache's attached devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreId(pub u32);

/// A page of any device of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageKey {
    /// The attached device.
    pub store: StoreId,
    /// The page within it.
    pub page: PageId,
}

/// Bits of a packed key that hold the page; the store is above them.
const STORE_SHIFT: u32 = 44;

impl PageKey {
    /// The key as one word, for tables of atomics.
    ///
    /// At least 2 to the 44th, so that a table can use smaller numbers for itself; the highest bit
    /// is never set.
    pub(crate) fn pack(self) -> u64 {
        (u64::from(self.store.0 + 1) << STORE_SHIFT) | self.page.0
    }

    /// The key packed in a word; `None` for smaller numbers.
    pub(crate) fn unpack(word: u64) -> Option<PageKey> {
        Some(PageKey {
            store: StoreId(((word >> STORE_SHIFT) as u32).checked_sub(1)?),
            page: PageId(word & ((1 << STORE_SHIFT) - 1)),
        })
    }
}
