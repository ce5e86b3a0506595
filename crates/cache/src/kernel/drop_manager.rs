//! The thread that keeps kernel-backed mappings within the budget ([`aquifer_vm::drop_behind`]).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_sys::memory::{self, SMALL_PAGE_BYTES};
use aquifer_sys::residency::{Backing, FileIdentity};
use aquifer_vm::drop_behind::{DropBehind, Droppable, Hands, PageTables};

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
        self.files.run(
            || self.engine.kernel_share_bytes(),
            |resident, dropped| self.publish(resident, dropped),
        );
    }

    fn publish(&self, resident: u64, dropped: u64) {
        let bytes = resident * SMALL_PAGE_BYTES as u64;
        let pages = bytes / self.engine.options.page_bytes as u64;
        self.engine.kernel_resident_pages.store(pages, Ordering::Relaxed);
        self.engine.kernel_dropped_pages.fetch_add(dropped, Ordering::Relaxed);
    }
}

impl Droppable for KernelFile {
    fn identity(&self) -> FileIdentity {
        self.identity
    }

    fn len_bytes(&self) -> u64 {
        self.geometry.len_bytes
    }

    fn hands(&self) -> &Hands {
        &self.hands
    }

    fn cached(&self, offset_bytes: u64, len_bytes: u64) -> Option<u64> {
        memory::cachestat(self.file(), offset_bytes, len_bytes).ok().map(|stat| stat.cached)
    }

    fn mapped(&self, tables: &mut PageTables) -> Option<u64> {
        let len_bytes = self.geometry.len_bytes.next_multiple_of(SMALL_PAGE_BYTES as u64);
        tables.present_in(self.address(0), len_bytes)
    }

    fn present(&self, region: &Range<u64>, tables: &mut PageTables) -> Option<u64> {
        tables.present(self.address(region.start), region.end - region.start)
    }

    fn unmap(&self, pages: &Range<u64>) {
        KernelFile::unmap(self, pages);
    }

    fn drop_unmapped(&self, pages: &Range<u64>) {
        KernelFile::drop_unmapped(self, pages);
    }

    fn take_asked(&self, region: &Range<u64>) -> bool {
        KernelFile::take_asked(self, region)
    }

    fn asked_of(files: &[Arc<KernelFile>]) -> u64 {
        files.first().map_or(0, |file| file.engine.kernel_batches_asked.load(Ordering::Relaxed))
    }

    fn read_past_of(files: &[Arc<KernelFile>]) -> u64 {
        files.first().map_or(0, |file| file.engine.kernel_pages_read_past.load(Ordering::Relaxed))
    }

    fn observe(
        &self,
        region: &Range<u64>,
        cached: u64,
        is_scattered: bool,
        tables: &mut PageTables,
    ) {
        if !self.detects() {
            return;
        }
        // If the pages cannot be counted there is no evidence, as for a region without mapped
        // pages.
        let len_bytes = region.end - region.start;
        let mapped = || tables.present(self.address(region.start), len_bytes).unwrap_or(0);
        KernelFile::observe(self, cached, is_scattered, mapped);
    }
}
