//! The resident budget of a mapper's files: a thread drops pages behind
//! ([`aquifer_vm::drop_behind`]).
//!
//! Every file that is mapped gets one entry, by device and inode. The entry outlives the last view
//! and the parked mapping, until the pages are dropped too: otherwise pages of files streamed one
//! after another would stay once unmapped.
//!
//! An entry holds neither the mapping nor a descriptor. Both are acquired for one call at a time,
//! under the entry's lock: so [`ResidentBudget::forget`] waits for that call, and afterwards
//! nothing here keeps the file in use.
//!
//! A file that is not kept open (`descriptors`) and that its path no longer names is left alone:
//! its pages can neither be counted nor dropped. If it was removed, they are freed with its last
//! mapping.
//!
//! Only mappings of the file's own pages are entered: dropping pages of a private mapping would
//! lose stores.
//!
//! Pages that are stored to through a shared view are written before they are dropped. The front hand
//! starts their write-back when it unmaps them; the back hand waits for it, and then drops them. A page
//! that is stored to meanwhile is dirty again, and the kernel drops no dirty page. An error of the
//! write-back is the view's: its next flush returns it. From then on the pages of its file stay, as long as
//! the view: they may be the only copy of what was stored.
//!
//! Lock order: the table, then an entry. Neither is taken while the mapping cache is locked.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use aquifer_sys::futex::Mutex;
use aquifer_sys::memory::{self, Advice, SMALL_PAGE_BYTES};
use aquifer_sys::residency::{self, Backing, FileIdentity};

use super::error::{MapError, Result};
use super::identity::FileId;
use super::mapped::{self, Mapped};
use aquifer_vm::drop_behind::{DropBehind, Droppable, Hands, PageTables};
use aquifer_vm::worker::Worker;

/// A mapping of a file's own pages.
pub(crate) trait Pages: Send + Sync {
    /// The bytes of the file that are mapped: whole pages.
    fn range(&self) -> Range<u64>;
    /// The address of one of them.
    fn address_of(&self, file_byte: u64) -> *const u8;
    /// Calls `call` with a descriptor of the file, if there is one.
    fn with_file(&self, path: &Path, call: &mut dyn FnMut(Option<BorrowedFd<'_>>));
    /// Unmaps pages; they stay in the page cache.
    fn unmap(&self, bytes: &Range<u64>);
    /// Whether they may be stored to.
    fn is_writable(&self) -> bool;
    /// Calls `sync`, which writes pages back by its descriptor, and keeps its error for the next flush.
    fn sync(&self, sync: &mut dyn FnMut() -> io::Result<()>);
    /// Whether that, or a flush, has failed: what was stored may be in the page cache alone.
    fn has_lost(&self) -> bool;
}

impl Pages for Mapped {
    fn range(&self) -> Range<u64> {
        Mapped::range(self)
    }

    fn address_of(&self, file_byte: u64) -> *const u8 {
        Mapped::address_of(self, file_byte)
    }

    fn with_file(&self, path: &Path, call: &mut dyn FnMut(Option<BorrowedFd<'_>>)) {
        let kept = self.file_for_now(path);
        call(kept.as_deref().map(|kept| kept.file().as_fd()));
    }

    fn unmap(&self, bytes: &Range<u64>) {
        let address = self.address_of(bytes.start).cast_mut();
        // SAFETY: a mapping of the file's own pages: no contents are lost. A failure leaves the pages
        // in memory.
        let _ = unsafe {
            memory::advise(address, (bytes.end - bytes.start) as usize, Advice::DontNeed)
        };
    }

    fn is_writable(&self) -> bool {
        false
    }

    fn sync(&self, sync: &mut dyn FnMut() -> io::Result<()>) {
        // No flush returns the error.
        let _ = sync();
    }

    fn has_lost(&self) -> bool {
        false
    }
}

type Table = Mutex<HashMap<FileIdentity, Arc<Entry>>>;

/// The budget, and the thread that enforces it.
pub(crate) struct ResidentBudget {
    table: Arc<Table>,
    files: Arc<DropBehind<Entry>>,
    bytes: Arc<AtomicU64>,
    resident_pages: Arc<AtomicU64>,
    serial: AtomicU64,
    worker: Worker,
}

/// A file that has been mapped.
struct Entry {
    table: Arc<Table>,
    identity: FileIdentity,
    len_bytes: AtomicU64,
    hands: Hands,
    /// Serial number of its last mapping, among all mappings of the mapper.
    serial: AtomicU64,
    /// No pages of it are left to drop, unless it has been mapped again since.
    is_done: AtomicBool,
    /// A shared view of it was made: pages may be dirty.
    is_stored_to: AtomicBool,
    state: Mutex<State>,
}

struct State {
    mapped: Vec<Weak<dyn Pages>>,
    path: PathBuf,
    /// The entry was removed from the table.
    is_gone: bool,
}

impl ResidentBudget {
    pub fn start(bytes: u64) -> Result<ResidentBudget> {
        let files = Arc::new(DropBehind::new());
        let resident_pages = Arc::new(AtomicU64::new(0));
        let bytes = Arc::new(AtomicU64::new(bytes));
        let (thread_files, published) = (files.clone(), resident_pages.clone());
        let bound = bytes.clone();
        let worker = Worker::new();
        let body = move || {
            // Relaxed: a figure, read at every check.
            let bound = || bound.load(Ordering::Relaxed);
            thread_files.run(bound, |pages, _| published.store(pages, Ordering::Relaxed));
        };
        worker.start(c"aquifer-budget", body).map_err(MapError::Thread)?;
        Ok(ResidentBudget {
            table: Arc::default(),
            files,
            bytes,
            resident_pages,
            serial: AtomicU64::new(0),
            worker,
        })
    }

    /// Changes the budget.
    pub fn set(&self, bytes: u64) {
        // Relaxed: a figure.
        self.bytes.store(bytes, Ordering::Relaxed);
        self.files.wake();
    }

    /// The memory of the files when the thread last measured it.
    pub fn resident_bytes(&self) -> u64 {
        self.resident_pages.load(Ordering::Relaxed) * SMALL_PAGE_BYTES as u64
    }

    /// Counts the pages of this file from now on.
    pub fn add<P: Pages + 'static>(
        &self,
        mapped: &Arc<P>,
        id: FileId,
        file: BorrowedFd<'_>,
        path: &Path,
        len_bytes: u64,
    ) {
        // A file in memory has no other copy of its pages: there is nothing to drop.
        if !matches!(residency::backing(file), Ok(Backing::Storage)) {
            return;
        }
        let identity = id.identity();
        let len_bytes = len_bytes.next_multiple_of(SMALL_PAGE_BYTES as u64);
        // Relaxed: the numbers only have to differ.
        let serial = 1 + self.serial.fetch_add(1, Ordering::Relaxed);
        let mut table = self.table.lock();
        let known = table.get(&identity).cloned();
        let entry = known.clone().unwrap_or_else(|| {
            Arc::new(Entry {
                table: self.table.clone(),
                identity,
                len_bytes: AtomicU64::new(0),
                hands: Hands::default(),
                serial: AtomicU64::new(0),
                is_done: AtomicBool::new(false),
                is_stored_to: AtomicBool::new(false),
                state: Mutex::new(State { mapped: vec![], path: PathBuf::new(), is_gone: false }),
            })
        });
        {
            let mut state = entry.state.lock();
            state.mapped.retain(|mapped| mapped.strong_count() > 0);
            let weak: Weak<P> = Arc::downgrade(mapped);
            state.mapped.push(weak);
            path.clone_into(&mut state.path);
            // Relaxed, here and below: the lock orders them.
            entry.len_bytes.store(len_bytes, Ordering::Relaxed);
            entry.is_done.store(false, Ordering::Relaxed);
            entry.serial.store(serial, Ordering::Relaxed);
            entry.is_stored_to.fetch_or(mapped.is_writable(), Ordering::Relaxed);
        }
        if known.is_none() {
            table.insert(identity, entry.clone());
            drop(table);
            self.files.add(entry);
        }
    }

    /// Waits until the thread does not use a file, and removes its entry unless a view of it is
    /// left.
    pub fn forget(&self, id: FileId) {
        let entry = self.table.lock().get(&id.identity()).cloned();
        if let Some(entry) = entry {
            entry.leave_if_unmapped();
        }
    }

    /// As [`ResidentBudget::forget`], for all files.
    pub fn forget_all(&self) {
        let entries: Vec<Arc<Entry>> = self.table.lock().values().cloned().collect();
        for entry in entries {
            entry.leave_if_unmapped();
        }
    }
}

impl Drop for ResidentBudget {
    fn drop(&mut self) {
        self.files.stop();
        self.worker.join();
    }
}

impl Entry {
    fn leave_if_unmapped(&self) {
        let mut table = self.table.lock();
        let mut state = self.state.lock();
        let is_mapped = state.mapped.iter().any(|mapped| mapped.strong_count() > 0);
        if !is_mapped && !state.is_gone {
            state.is_gone = true;
            table.remove(&self.identity);
        }
    }

    /// Calls `call` with the mappings and a descriptor of the file, if available. None stays in use.
    fn with<T>(
        &self,
        call: impl FnOnce(&[Arc<dyn Pages>], Option<BorrowedFd<'_>>) -> T,
    ) -> Option<T> {
        let state = self.state.lock();
        if state.is_gone {
            return None;
        }
        let mut mapped: Vec<_> = state.mapped.iter().filter_map(Weak::upgrade).collect();
        // The first one's descriptor is used, and reports the errors of write-back.
        mapped.sort_by_key(|mapped| !mapped.is_writable());
        let (mut call, mut result) = (Some(call), None);
        let mut run = |file: Option<BorrowedFd<'_>>| {
            result = call.take().map(|call| call(&mapped, file));
        };
        match mapped.first() {
            Some(first) => first.with_file(&state.path, &mut run),
            None => {
                let file = mapped::open(&state.path).ok().filter(|file| {
                    residency::file_identity(file.as_fd()).is_ok_and(|found| found == self.identity)
                });
                run(file.as_ref().map(AsFd::as_fd));
            }
        }
        // Before the lock is released. The mappings may be unmapped here.
        drop(mapped);
        drop(state);
        result
    }

    /// The part of a range of the file that a mapping shows.
    fn inside(mapped: &dyn Pages, bytes: &Range<u64>) -> Option<Range<u64>> {
        let there = mapped.range();
        let inside = bytes.start.max(there.start)..bytes.end.min(there.end);
        (inside.start < inside.end).then_some(inside)
    }

    fn is_stored_to(&self) -> bool {
        // Relaxed: stores made since are written by the next sweep.
        self.is_stored_to.load(Ordering::Relaxed)
    }
}

impl Droppable for Entry {
    fn identity(&self) -> FileIdentity {
        self.identity
    }

    fn len_bytes(&self) -> u64 {
        let len_bytes = self.len_bytes.load(Ordering::Relaxed);
        if !self.is_stored_to() {
            return len_bytes;
        }
        // Shared views grow.
        let state = self.state.lock();
        let ends = state.mapped.iter().filter_map(Weak::upgrade).map(|mapped| mapped.range().end);
        ends.fold(len_bytes, u64::max)
    }

    fn hands(&self) -> &Hands {
        &self.hands
    }

    fn cached(&self, offset_bytes: u64, len_bytes: u64) -> Option<u64> {
        let cached = self.with(|mapped, file| {
            let cached = match file {
                Some(file) => memory::cachestat(file, offset_bytes, len_bytes).ok()?.cached,
                None => 0,
            };
            if cached == 0 && mapped.is_empty() && (file.is_none() || len_bytes == 0) {
                self.is_done.store(true, Ordering::Relaxed);
            }
            Some(cached)
        });
        cached.unwrap_or(Some(0))
    }

    fn mapped(&self, tables: &mut PageTables) -> Option<u64> {
        self.with(|mapped, _| {
            let of = |mapped: &Arc<dyn Pages>| {
                let there = mapped.range();
                tables.present_in(mapped.address_of(there.start), there.end - there.start)
            };
            mapped.iter().map(of).try_fold(0, |most: u64, pages| Some(most.max(pages?)))
        })
        .unwrap_or(Some(0))
    }

    /// Detects a file that was mapped, read and unmapped between two passes: it leaves no trace in
    /// the page tables.
    fn asked(&self) -> u64 {
        self.serial.load(Ordering::Relaxed)
    }

    fn present(&self, region: &Range<u64>, tables: &mut PageTables) -> Option<u64> {
        self.with(|mapped, _| {
            let of = |mapped: &Arc<dyn Pages>| {
                let inside = Entry::inside(&**mapped, region)?;
                tables.present(mapped.address_of(inside.start), inside.end - inside.start)
            };
            mapped.iter().filter_map(of).max()
        })?
    }

    fn unmap(&self, pages: &Range<u64>) {
        self.with(|mapped, file| {
            // The file may have been mapped again since, with a shorter length: addresses behind it
            // belong to another mapping.
            for mapped in mapped {
                if let Some(inside) = Entry::inside(&**mapped, pages) {
                    mapped.unmap(&inside);
                }
            }
            if let Some(file) = file.filter(|_| self.is_stored_to()) {
                // A failure is repeated when it is waited for.
                let _ =
                    aquifer_sys::io::start_write_back(file, pages.start, pages.end - pages.start);
            }
        });
    }

    fn drop_unmapped(&self, pages: &Range<u64>) {
        let is_last = pages.end >= self.len_bytes();
        self.with(|mapped, file| {
            if let Some(file) = file {
                let len_bytes = pages.end - pages.start;
                let mut finish = || {
                    match aquifer_sys::io::finish_write_back(file, pages.start, len_bytes) {
                        // Where a sandbox forbids the call, dirty pages stay until the kernel has written them.
                        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
                        finished => finished,
                    }
                };
                match mapped.first() {
                    _ if !self.is_stored_to() => {}
                    Some(first) => first.sync(&mut finish),
                    None => drop(finish()),
                }
                // The kernel takes pages that it could not write for clean.
                if !mapped.iter().any(|mapped| mapped.has_lost()) {
                    let _ = memory::drop_cached(file, pages.start, len_bytes);
                }
            }
            if mapped.is_empty() && is_last {
                // A region before this one may have been passed over.
                let left = file.and_then(|file| memory::cachestat(file, 0, 0).ok());
                if left.is_none_or(|left| left.cached == 0) {
                    self.is_done.store(true, Ordering::Relaxed);
                }
            }
        });
    }

    fn is_gone(&self) -> bool {
        if self.is_done.swap(false, Ordering::Relaxed) {
            self.leave_if_unmapped();
        }
        self.state.lock().is_gone
    }
}
