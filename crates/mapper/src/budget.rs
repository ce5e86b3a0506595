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
//! Lock order: the table, then an entry. Neither is taken while the mapping cache is locked.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use aquifer_sys::futex::Mutex;
use aquifer_sys::memory::{self, Advice, SMALL_PAGE_BYTES};
use aquifer_sys::residency::{self, Backing, FileIdentity};

use super::descriptors::Kept;
use super::error::{MapError, Result};
use super::identity::FileId;
use super::mapped::{self, Mapped};
use aquifer_vm::drop_behind::{DropBehind, Droppable, Hands, PageTables};
use aquifer_vm::worker::Worker;

type Table = Mutex<HashMap<FileIdentity, Arc<Entry>>>;

/// The budget, and the thread that enforces it.
pub(crate) struct ResidentBudget {
    table: Arc<Table>,
    files: Arc<DropBehind<Entry>>,
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
    state: Mutex<State>,
}

struct State {
    mapped: Weak<Mapped>,
    path: PathBuf,
    /// The entry was removed from the table.
    is_gone: bool,
}

impl ResidentBudget {
    pub fn start(bytes: u64) -> Result<ResidentBudget> {
        let files = Arc::new(DropBehind::new());
        let resident_pages = Arc::new(AtomicU64::new(0));
        let (thread_files, published) = (files.clone(), resident_pages.clone());
        let worker = Worker::new();
        let body = move || {
            thread_files.run(|| bytes, |pages, _| published.store(pages, Ordering::Relaxed));
        };
        worker.start(c"aquifer-budget", body).map_err(MapError::Thread)?;
        Ok(ResidentBudget {
            table: Arc::default(),
            files,
            resident_pages,
            serial: AtomicU64::new(0),
            worker,
        })
    }

    /// The memory of the files when the thread last measured it.
    pub fn resident_bytes(&self) -> u64 {
        self.resident_pages.load(Ordering::Relaxed) * SMALL_PAGE_BYTES as u64
    }

    /// Counts the pages of this file from now on.
    pub fn add(&self, mapped: &Arc<Mapped>, file: &File, path: &Path, len_bytes: u64) {
        // A file in memory has no other copy of its pages: there is nothing to drop.
        if !matches!(residency::backing(file.as_fd()), Ok(Backing::Storage)) {
            return;
        }
        let identity = mapped.id.identity();
        let len_bytes = len_bytes.next_multiple_of(SMALL_PAGE_BYTES as u64);
        // Relaxed: the numbers only have to differ.
        let serial = 1 + self.serial.fetch_add(1, Ordering::Relaxed);
        let mut table = self.table.lock();
        if let Some(entry) = table.get(&identity) {
            let mut state = entry.state.lock();
            state.mapped = Arc::downgrade(mapped);
            path.clone_into(&mut state.path);
            entry.len_bytes.store(len_bytes, Ordering::Relaxed);
            entry.is_done.store(false, Ordering::Relaxed);
            entry.serial.store(serial, Ordering::Relaxed);
            return;
        }
        let entry = Arc::new(Entry {
            table: self.table.clone(),
            identity,
            len_bytes: AtomicU64::new(len_bytes),
            hands: Hands::default(),
            serial: AtomicU64::new(serial),
            is_done: AtomicBool::new(false),
            state: Mutex::new(State {
                mapped: Arc::downgrade(mapped),
                path: path.to_owned(),
                is_gone: false,
            }),
        });
        table.insert(identity, entry.clone());
        drop(table);
        self.files.add(entry);
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
        if state.mapped.strong_count() == 0 && !state.is_gone {
            state.is_gone = true;
            table.remove(&self.identity);
        }
    }

    /// Calls `call` with the mapping and a descriptor of the file, if available. Neither stays in
    /// use.
    fn with<T>(&self, call: impl FnOnce(Option<&Arc<Mapped>>, Option<&File>) -> T) -> Option<T> {
        let state = self.state.lock();
        if state.is_gone {
            return None;
        }
        let mapped = state.mapped.upgrade();
        let file = match &mapped {
            Some(mapped) => mapped.file_for_now(&state.path),
            None => mapped::open(&state.path)
                .ok()
                .filter(|file| {
                    residency::file_identity(file.as_fd()).is_ok_and(|found| found == self.identity)
                })
                .map(Kept::uncounted),
        };
        let result = call(mapped.as_ref(), file.as_deref().map(Kept::file));
        // Before the lock is released. The mapping may be unmapped here.
        drop((mapped, file));
        drop(state);
        Some(result)
    }
}

impl Droppable for Entry {
    fn identity(&self) -> FileIdentity {
        self.identity
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Relaxed)
    }

    fn hands(&self) -> &Hands {
        &self.hands
    }

    fn cached(&self, offset_bytes: u64, len_bytes: u64) -> Option<u64> {
        let cached = self.with(|mapped, file| {
            let cached = match file {
                Some(file) => memory::cachestat(file.as_fd(), offset_bytes, len_bytes).ok()?.cached,
                None => 0,
            };
            if cached == 0 && mapped.is_none() && (file.is_none() || len_bytes == 0) {
                self.is_done.store(true, Ordering::Relaxed);
            }
            Some(cached)
        });
        cached.unwrap_or(Some(0))
    }

    fn mapped(&self, tables: &mut PageTables) -> Option<u64> {
        self.with(|mapped, _| match mapped {
            Some(mapped) => {
                let there = mapped.range();
                tables.present_in(mapped.address_of(there.start), there.end - there.start)
            }
            None => Some(0),
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
            let mapped = mapped?;
            let there = mapped.range();
            let inside = region.start >= there.start && region.end <= there.end;
            let len_bytes = region.end - region.start;
            inside.then(|| tables.present(mapped.address_of(region.start), len_bytes))?
        })?
    }

    fn unmap(&self, pages: &Range<u64>) {
        self.with(|mapped, _| {
            let Some(mapped) = mapped else { return };
            // The file may have been mapped again since, with a shorter length: addresses behind it
            // belong to another mapping.
            let there = mapped.range();
            let inside = pages.start.max(there.start)..pages.end.min(there.end);
            if inside.is_empty() {
                return;
            }
            let len = (inside.end - inside.start) as usize;
            let address = mapped.address_of(inside.start).cast_mut();
            // SAFETY: a mapping of the file's own pages, which `mapped` keeps alive: no contents are
            // lost. A failure leaves the pages in memory.
            let _ = unsafe { memory::advise(address, len, Advice::DontNeed) };
        });
    }

    fn drop_unmapped(&self, pages: &Range<u64>) {
        let is_last = pages.end >= self.len_bytes();
        self.with(|mapped, file| {
            if let Some(file) = file {
                let len_bytes = pages.end - pages.start;
                let _ = memory::drop_cached(file.as_fd(), pages.start, len_bytes);
            }
            if mapped.is_none() && is_last {
                // A region before this one may have been passed over.
                let left = file.and_then(|file| memory::cachestat(file.as_fd(), 0, 0).ok());
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
