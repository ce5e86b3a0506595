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
//! Under a budget of private copies ([`super::private_budget`]) copies are written out and
//! dropped by a thread, also while the program stores through a pointer.
//!
//! Lock order: `State`, then `stores`.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, TryLockError};

use aquifer_sys::memory::SMALL_PAGE_BYTES;

use super::Stores;
use super::error::{MapError, Result};
use super::flush::{Choice, Flushed, State};
use super::private_budget::{self, Pressure};
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
    /// The budget that its copies count towards.
    pressure: OnceLock<Arc<Pressure>>,
    /// Memory for the last written content of copies, as of the last flush.
    base_bytes: AtomicU64,
    /// Why its copies could not be written out; the next store or call says so.
    trouble: Mutex<Option<MapError>>,
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
            pressure: OnceLock::new(),
            base_bytes: AtomicU64::new(0),
            trouble: Mutex::default(),
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
    /// stored. Under a budget that cannot be kept, [`MapError::Flush`] from time to time: nothing was
    /// stored then.
    pub fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.mapping.check_process()?;
        if private_budget::is_any_exceeded() {
            self.wait_for_room()?;
        }
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
        let keeps_copies = is_exposed && self.has_room_to_keep();
        let flushed = state.flush(&self.mapping, pages, keeps_copies);
        // Also after an error: the pages that are durable no longer need their copies.
        if is_exposed && !keeps_copies {
            let keep_out = |pages, drop: &mut dyn FnMut()| self.keep_out(pages, drop);
            // SAFETY: `keep_out` keeps stores out.
            unsafe { state.drop_durable(&self.mapping, pages, &keep_out) };
        } else if !keeps_copies {
            let _alone = self.stores.write().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: `stores` is held exclusively, and every store takes it unless the program has
            // a pointer. `is_exposed` is false, and only changes under the lock of the state, which
            // is held.
            unsafe { state.drop_copies(&self.mapping) };
        }
        self.note_bases(&state);
        if flushed.is_ok() {
            self.take_trouble();
        }
        flushed
    }

    /// Runs `call` while no store reaches the pages: those through a pointer wait in the fault
    /// handler, others for a lock. Does not run it if that is not possible.
    fn keep_out(&self, pages: PageRun, call: &mut dyn FnMut()) {
        // Relaxed: it is set under the lock of the state, which the caller has.
        if self.is_exposed.load(Ordering::Relaxed) {
            self.mapping.held(pages, call);
        } else {
            let _alone = self.stores.write().unwrap_or_else(PoisonError::into_inner);
            call();
        }
    }

    /// Whether what a flush keeps in memory of each copy fits into the budget.
    fn has_room_to_keep(&self) -> bool {
        self.pressure.get().is_none_or(|pressure| pressure.has_room_for_twice())
    }

    fn note_bases(&self, state: &State) {
        // Relaxed: a figure.
        self.base_bytes.store(state.base_bytes(), Ordering::Relaxed);
    }

    /// Counts its copies towards a budget from now on.
    pub fn count_towards(&self, pressure: &Arc<Pressure>) {
        let _ = self.pressure.set(pressure.clone());
    }

    /// Memory for the last written content of copies.
    pub fn base_bytes(&self) -> u64 {
        self.base_bytes.load(Ordering::Relaxed)
    }

    /// Writes out and drops up to `most_bytes` of private copies, while `goes_on`, and returns how many bytes it has
    /// dropped; `None` if a flush is in progress.
    ///
    /// # Errors
    /// [`MapError::Flush`]: what could not be written stays. It is also what the next store or call
    /// returns. [`MapError::Memory`].
    pub fn make_room(&self, most_bytes: u64, goes_on: &dyn Fn() -> bool) -> Option<Result<u64>> {
        let mut state = self.try_state()?;
        let goes_on = || goes_on() && !self.is_gone.load(Ordering::Relaxed);
        let made = self.make_room_in(&mut state, most_bytes, &goes_on);
        if made.as_ref().is_ok_and(|&dropped| dropped > 0) {
            // It is over.
            self.take_trouble();
        }
        if let Err(MapError::Flush { path, range, cause }) = &made {
            let (path, range, cause) = (path.clone(), range.clone(), *cause);
            let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
            if trouble.replace(MapError::Flush { path, range, cause }).is_none() {
                private_budget::note_trouble();
            }
        }
        Some(made)
    }

    fn make_room_in(
        &self,
        state: &mut State,
        most_bytes: u64,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<u64> {
        let keep_out = |pages, drop: &mut dyn FnMut()| self.keep_out(pages, drop);
        let most_pages = most_bytes.div_ceil(PAGE);
        // SAFETY: `keep_out` keeps stores out.
        let room = unsafe { state.make_room(&self.mapping, most_pages, &keep_out, goes_on) };
        self.note_bases(state);
        let room = room?;
        match room.failed {
            Some((range, cause)) if room.dropped_pages == 0 => {
                Err(MapError::Flush { path: self.mapping.path().to_owned(), range, cause })
            }
            _ => Ok(room.dropped_pages * PAGE),
        }
    }

    /// Has stores through pointers wait, or go on. Those by calls wait in [`PrivateFile::write_at`].
    pub fn let_store(&self, may_store: bool) {
        // Relaxed: a view that is exposed just now is looked at again soon.
        if may_store || !self.is_exposed.load(Ordering::Relaxed) {
            self.mapping.open();
        } else {
            self.mapping.close();
        }
    }

    /// Waits while the copies exceed their budget.
    ///
    /// # Errors
    /// [`MapError::Flush`]: why they cannot be written out, once for each attempt. Nothing is lost:
    /// they stay, and the budget is exceeded.
    pub fn wait_for_room(&self) -> Result<()> {
        let Some(pressure) = self.pressure.get() else { return Ok(()) };
        if self.mapping.check_process().is_err() {
            // A forked child has no stores to keep within the budget.
            return Ok(());
        }
        loop {
            if let Some(error) = self.take_trouble() {
                return Err(error);
            }
            if !pressure.wait() {
                return Ok(());
            }
        }
    }

    fn take_trouble(&self) -> Option<MapError> {
        let error = self.trouble.lock().unwrap_or_else(PoisonError::into_inner).take();
        if error.is_some() {
            private_budget::forget_trouble();
        }
        error
    }

    /// Writes dirty pages to the file, where other processes see them, without making them durable.
    ///
    /// # Errors
    /// None for pages that cannot be written: they stay dirty.
    pub fn write_out(&self) -> Result<u64> {
        let mut state = self.state()?;
        let before = state.dirty_bytes(&self.mapping)?;
        if self.has_room_to_keep() {
            let written = state.write_back(&self.mapping, u64::MAX);
            self.note_bases(&state);
            return written;
        }
        match self.make_room_in(&mut state, u64::MAX, &|| true) {
            Ok(_) | Err(MapError::Flush { .. }) => {}
            Err(error) => return Err(error),
        }
        Ok(before.saturating_sub(state.dirty_bytes(&self.mapping)?))
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
            // The thread that makes room would wait for the lock of the state.
            self.mapping.exempt(|| self.mapping.write_at(offset_bytes, &there[..len]))?;
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

impl Drop for PrivateFile {
    fn drop(&mut self) {
        self.take_trouble();
    }
}

#[cfg(test)]
mod tests;
