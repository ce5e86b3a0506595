//! The thread that keeps kernel-backed mappings within the budget ([`aquifer_vm::drop_behind`]).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_sys::memory::{self, SMALL_PAGE_BYTES};
use aquifer_sys::residency::{Backing, FileIdentity};
use aquifer_vm::drop_behind::{DropBehind, Droppable, PageTables};

use super::KernelFile;
use crate::engine::Engine;

/// The drop manager of a cache. See the module documentation.
pub(crate) struct DropManager {
    engine: Arc<Engine>,
    files: DropBehind<KernelFile>,
}

impl DropManager {
    pub fn new(engine: Arc<Engine>) -> DropManager {
        DropManager { engine, files: DropBehind::new() }
    }

    pub fn add(&self, file: Arc<KernelFile>) {
        // The pages of a file in memory are not copies: there is nothing to drop.
        if file.backing == Backing::Storage {
            self.files.add(file);
            self.files.wake();
        }
    }

    pub fn remove(&self, file: &Arc<KernelFile>) {
        self.files.remove(file);
    }

    pub fn stop(&self) {
        self.files.stop();
    }

    /// The loop of the drop manager's thread.
    pub fn run(&self) {
        self.files.run(|| self.engine.kernel_share_bytes(), |pages| self.publish(pages));
    }

    fn publish(&self, pages: u64) {
        let bytes = pages * SMALL_PAGE_BYTES as u64;
        let pages = bytes / self.engine.options.page_bytes as u64;
        self.engine.kernel_resident_pages.store(pages, Ordering::Relaxed);
    }
}

impl Droppable for KernelFile {
    fn identity(&self) -> FileIdentity {
        self.identity
    }

    fn len_bytes(&self) -> u64 {
        self.geometry.len_bytes
    }

    fn cursor(&self) -> &AtomicU64 {
        &self.cursor
    }

    fn cached(&self, offset_bytes: u64, len_bytes: u64) -> Option<u64> {
        memory::cachestat(self.file(), offset_bytes, len_bytes).ok().map(|stat| stat.cached)
    }

    fn mapped(&self, tables: &mut PageTables) -> Option<u64> {
        let len_bytes = self.geometry.len_bytes.next_multiple_of(SMALL_PAGE_BYTES as u64);
        tables.present_in(self.address(0), len_bytes)
    }

    fn discard(&self, pages: Range<u64>) {
        KernelFile::discard(self, pages);
    }

    fn asked(&self) -> u64 {
        self.batches_asked.load(Ordering::Relaxed)
    }

    fn observe(&self, region: &Range<u64>, cached: u64, tables: &mut PageTables) {
        // Approximately the number of pages dropped now: the pinned ones stay, and are few.
        self.engine().kernel_dropped_pages.fetch_add(cached, Ordering::Relaxed);
        if !self.detects() {
            return;
        }
        // If the pages cannot be counted there is no evidence, as for a region without mapped
        // pages.
        let len_bytes = region.end - region.start;
        let mapped = || tables.present(self.address(region.start), len_bytes).unwrap_or(0);
        KernelFile::observe(self, cached, mapped);
    }
}
