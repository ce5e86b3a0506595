//! A writable view: private until it is flushed.
//!
//! Stores go to private copies of pages. [`flush`](PrivateFile::flush) writes exactly those pages
//! to the file and makes them durable; [`super::flush`] describes how, and the guarantees. Other
//! readers see stores only after a flush. With paced write-back ([`super::write_back`]) they see
//! single pages earlier.
//!
//! | the file is | effect |
//! |---|---|
//! | changed by another process | the change shows in pages that were not stored to since the last flush; once the program has a pointer to store through, in those that it has never stored to. No such change is overwritten except in pages that were stored to and not flushed |
//! | extended by another process | none: the view keeps its length; [`grow`](PrivateFile::grow) takes the new part in |
//! | truncated by another process | loads and stores behind the end are errors, stores there are lost, and a flush returns an error |
//!
//! Dropping the view discards unflushed stores, as with any private mapping.
//! [`write_out`](PrivateFile::write_out) hands them to the file without waiting for the device.
//!
//! Lock order: `State`, then `stores`.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, TryLockError};

use aquifer_sys::memory::SMALL_PAGE_BYTES;

use super::Stores;
use super::error::{MapError, Result};
use super::flush::{Choice, Flushed, State};
use super::writable::{Place, Writable};
use aquifer_vm::{PageRun, TrackerForm};
use zerocopy::{Immutable, IntoBytes};

const PAGE: u64 = SMALL_PAGE_BYTES as u64;

/// How a private file is tracked and flushed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PrivateOptions {
    /// The form of tracking; the best by default.
    pub form: Option<TrackerForm>,
    /// Whether blocks are reserved for the view.
    pub allocates: bool,
    /// Largest clean gap between pages that is written along with them; the cheapest by default.
    pub gap_pages: Option<u64>,
}

/// A private mapping of a range of a file. See the module's documentation. Can be shared freely
/// between threads.
pub(crate) struct PrivateFile {
    // Dropped before the mapping.
    state: Mutex<State>,
    mapping: Writable,
    /// Held shared by stores, and exclusively while copies are dropped. A store that waits for a
    /// page to be read delays the dropping of copies, and with it later stores.
    stores: RwLock<()>,
    /// Whether the program has a pointer to store through: then no lock can keep stores out.
    is_exposed: AtomicBool,
    /// Whether the view is gone: what was not written is discarded.
    is_gone: AtomicBool,
}

impl PrivateFile {
    /// Maps `range` of a file that is open for reading and writing. The place has room for the
    /// pages of the range; the view can grow into the remaining room.
    pub fn new(
        place: Box<dyn Place>,
        file: &File,
        path: &Path,
        range: Range<u64>,
        options: PrivateOptions,
    ) -> Result<PrivateFile> {
        aquifer_vm::router::install()?;
        let mapping = Writable::new(place, file, path, range, Stores::Private, options.allocates)?;
        let choice = Choice { forced_gap_pages: options.gap_pages, ..Choice::default() };
        // SAFETY: the mapping was made just now and is private, and only `State` drops pages of it.
        let state = unsafe { State::new(&mapping, options.form, choice) }?;
        Ok(PrivateFile {
            state: Mutex::new(state),
            mapping,
            stores: RwLock::new(()),
            is_exposed: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
        })
    }

    /// Discards what was not written: no other thread writes it from now on, although it may still
    /// have the view. Waits for what such a thread is writing.
    pub fn discard(&self) {
        // Relaxed: ends a step early; the lock orders it.
        self.is_gone.store(true, Ordering::Relaxed);
        drop(self.state());
    }

    /// The mapping, to read from.
    pub fn mapping(&self) -> &Writable {
        &self.mapping
    }

    fn state(&self) -> Result<MutexGuard<'_, State>> {
        // In a child, a thread of the parent may hold the lock forever.
        self.mapping.check_process()?;
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // Zeros in place of missing bytes are no stores.
        self.mapping.settle();
        Ok(state)
    }

    /// The state, if no flush is in progress.
    fn try_state(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The first bare access since the last call that was answered with zeros, as an error. Waits for a
    /// flush in progress, which would take the file for stored to where it is mapped again.
    pub fn take_missed(&self) -> Option<MapError> {
        let _between_flushes = self.state().ok()?;
        self.mapping.take_missed()
    }

    /// Stores bytes at `offset_bytes` of the view.
    ///
    /// # Errors
    /// [`MapError::OutsideView`](super::MapError::OutsideView);
    /// [`MapError::Fault`](super::MapError::Fault), after which some of the bytes may have been
    /// stored.
    pub fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.mapping.check_process()?;
        let _storing = self.stores.read().unwrap_or_else(PoisonError::into_inner);
        self.mapping.write_at(offset_bytes, bytes)
    }

    /// Stores a value at `offset_bytes` of the view, in the machine's byte order. A concurrent
    /// reader sees an aligned value of up to eight bytes old or new, never torn.
    ///
    /// # Errors
    /// As for [`PrivateFile::write_at`].
    pub fn set<T: IntoBytes + Immutable>(&self, offset_bytes: u64, value: T) -> Result<()> {
        self.write_at(offset_bytes, value.as_bytes())
    }

    /// Returns a pointer to the first byte, to store through. From now on copies are kept as long
    /// as the view. Waits for a flush in progress.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        // Relaxed, here and below: the lock of the state orders it.
        if !self.is_exposed.load(Ordering::Relaxed) {
            // The lock ensures that no flush is dropping copies when the pointer is first used. In
            // a child the view is inert.
            let _between_flushes = self.state();
            self.is_exposed.store(true, Ordering::Relaxed);
        }
        self.mapping.as_mut_ptr()
    }

    /// Writes all pages that were stored to, and makes them durable.
    ///
    /// # Errors
    /// [`MapError::Flush`](super::MapError::Flush): pages that failed stay dirty, and the next
    /// flush writes them again. [`MapError::Memory`](super::MapError::Memory) if the pages stored
    /// to cannot be determined: likewise.
    pub fn flush(&self) -> Result<Flushed> {
        self.flush_pages(PageRun::new(0..self.mapping.capacity_pages()))
    }

    /// As [`flush`](PrivateFile::flush), for the pages that a range of the view touches.
    ///
    /// # Errors
    /// As for `flush`; [`MapError::OutsideView`](super::MapError::OutsideView).
    pub fn flush_range(&self, range: Range<u64>) -> Result<Flushed> {
        let bytes = self.mapping.in_file(&range)?;
        let page = |byte: u64| (byte - self.mapping.first_byte()) / PAGE;
        let end = if bytes.is_empty() { page(bytes.start) } else { page(bytes.end - 1) + 1 };
        self.flush_pages(PageRun::new(page(bytes.start)..end))
    }

    fn flush_pages(&self, pages: PageRun) -> Result<Flushed> {
        let mut state = self.state()?;
        // Relaxed: it is set under the lock of the state.
        let is_exposed = self.is_exposed.load(Ordering::Relaxed);
        let flushed = state.flush(&self.mapping, pages, is_exposed);
        // Also after an error: the pages that are durable no longer need their copies.
        if !is_exposed {
            let _alone = self.stores.write().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: `stores` is held exclusively, and every store takes it unless the program has
            // a pointer. `is_exposed` is false, and only changes under the lock of the state, which
            // is held.
            unsafe { state.drop_copies(&self.mapping) };
        }
        flushed
    }

    /// Writes dirty pages to the file, where other processes see them, without making them durable.
    ///
    /// # Errors
    /// None for pages that cannot be written: they stay dirty.
    pub fn write_out(&self) -> Result<u64> {
        let mut state = self.state()?;
        state.write_back(&self.mapping, u64::MAX)
    }

    /// As [`write_out`](PrivateFile::write_out), but up to `most_bytes`, continuing where the last
    /// call ended; the kernel starts to write them to the device. `None` if a flush is in progress.
    pub fn write_back(&self, most_bytes: u64) -> Result<Option<u64>> {
        self.mapping.check_process()?;
        let Some(mut state) = self.try_state() else { return Ok(None) };
        // Relaxed: the lock orders it.
        if self.is_gone.load(Ordering::Relaxed) {
            return Ok(None);
        }
        state.write_back(&self.mapping, most_bytes).map(Some)
    }

    /// Makes the view longer, at the same addresses, and extends the file if it ends before that;
    /// never shrinks. Allocates blocks for the new part of the file, so that a later flush does not
    /// find the disk full.
    ///
    /// # Errors
    /// [`MapError::GrowBeyond`](super::MapError::GrowBeyond) if the addresses end before;
    /// [`MapError::Grow`](super::MapError::Grow) if the file cannot be extended, for example
    /// `ENOSPC`. Nothing has changed then.
    pub fn grow(&self, len_bytes: u64) -> Result<()> {
        // Hold the lock of the state: no flush may see the longer view before its last page is up
        // to date.
        let mut state = self.state()?;
        let Some(end) = self.mapping.grow(len_bytes)? else { return Ok(()) };
        self.take_in_tail(&mut state, end)
    }

    /// Copies bytes that another process appended to the file into the page in which the view
    /// ended. Its private copy may stem from a time when the file ended there too; a flush would
    /// overwrite the appended bytes with it.
    fn take_in_tail(&self, state: &mut State, end: u64) -> Result<()> {
        let view = self.mapping.view_in_file();
        let tail = end..end.next_multiple_of(PAGE).min(view.end);
        let mut there = vec![0; (tail.end - tail.start) as usize];
        let mut here = there.clone();
        let len = aquifer_sys::io::read_at(self.mapping.file(), &mut there, tail.start)
            .unwrap_or_default();
        let offset_bytes = tail.start - view.start;
        self.mapping.read_into(offset_bytes, &mut here[..len])?;
        if here[..len] != there[..len] {
            self.mapping.write_at(offset_bytes, &there[..len])?;
            state.take_in(&self.mapping, tail.start, &there[..len]);
        }
        Ok(())
    }

    /// Bytes of the pages that were stored to and not written since. Waits for a flush in progress.
    ///
    /// # Errors
    /// [`MapError::Memory`](super::MapError::Memory).
    pub fn dirty_bytes(&self) -> Result<u64> {
        self.state()?.dirty_bytes(&self.mapping)
    }

    /// The size of the file's folios, if a flush has measured it. If it is one page, a shared view
    /// is cheaper (see [`super::flush`]).
    pub fn folio_bytes(&self) -> Result<Option<u64>> {
        Ok(self.state()?.folio_bytes())
    }

    /// The form of tracking in use.
    pub fn form(&self) -> Result<TrackerForm> {
        Ok(self.state()?.form())
    }

    /// Bytes of private copies, as of the last flush.
    pub fn private_bytes(&self) -> Result<u64> {
        Ok(self.state()?.private_pages() * PAGE)
    }
}

#[cfg(test)]
pub(crate) mod test_support;
#[cfg(test)]
mod tests;
