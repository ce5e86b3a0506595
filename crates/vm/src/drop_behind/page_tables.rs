//! Counts the pages that are mapped in.

use aquifer_sys::memory::{REGION_BYTES, SMALL_PAGE_BYTES};
use aquifer_sys::residency::Pagemap;

use super::REGION_PAGES;

/// The process's page tables, and a buffer to read them.
pub struct PageTables {
    pagemap: Option<Pagemap>,
    entries: Box<[u64]>,
}

impl PageTables {
    pub(super) fn new() -> PageTables {
        PageTables {
            pagemap: Pagemap::open().ok(),
            entries: vec![0; REGION_PAGES as usize].into_boxed_slice(),
        }
    }

    /// Number of pages mapped in, of one region at most; `None` if that cannot be read.
    pub fn present(&mut self, address: *const u8, len_bytes: u64) -> Option<u64> {
        let pages = (len_bytes / SMALL_PAGE_BYTES as u64) as usize;
        self.pagemap.as_ref()?.present(address, self.entries.get_mut(..pages)?).ok()
    }

    /// As [`PageTables::present`], for any length in whole pages.
    pub fn present_in(&mut self, address: *const u8, len_bytes: u64) -> Option<u64> {
        let mut found = 0;
        for at in (0..len_bytes).step_by(REGION_BYTES) {
            let len = (len_bytes - at).min(REGION_BYTES as u64);
            found += self.present(address.wrapping_add(at as usize), len)?;
        }
        Some(found)
    }
}
