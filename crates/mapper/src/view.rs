//! A view: bytes of a mapped file.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::advice::Advised;
use super::descriptors::FileName;
use super::error::{FaultCause, MapError, Result};
use super::mapped::Mapped;
use super::small::Snapshot;
use super::stores::Stores;
use super::{Shared, Status};
use aquifer_vm::bytes::{Bytes, Pod};

/// Bytes of a file, mapped as long as this exists.
///
/// Others may change the file at any time, or cut it short. So bytes are copied out, or looked at under a closure; a plain
/// slice is for who knows that nobody does ([`FileView::as_slice`]).
pub struct FileView {
    pub(super) shared: Arc<Shared>,
    /// None if it is empty because its file was, if it is a snapshot, and if it can be stored to.
    pub(super) mapped: Option<Arc<Mapped>>,
    pub(super) name: FileName,
    snapshot: Option<Snapshot>,
    /// Bytes of the file.
    range: Range<u64>,
    pub(super) advised: Advised,
    /// If it can be stored to; then it is not `mapped`.
    pub(super) stores: Option<Stores>,
}

impl FileView {
    pub(super) fn new(
        shared: Arc<Shared>,
        mapped: Option<Arc<Mapped>>,
        name: FileName,
        range: Range<u64>,
    ) -> FileView {
        let advised = Advised::default();
        FileView { shared, mapped, snapshot: None, name, range, advised, stores: None }
    }

    /// One that can be stored to.
    pub(super) fn with_stores(
        shared: Arc<Shared>,
        stores: Stores,
        path: PathBuf,
        range: Range<u64>,
    ) -> FileView {
        let mut view = FileView::new(shared, None, FileName::of(path), range);
        view.stores = Some(stores);
        view
    }

    pub(super) fn of_snapshot(shared: Arc<Shared>, snapshot: Snapshot, path: PathBuf) -> FileView {
        let range = snapshot.range();
        let mut view = FileView::new(shared, None, FileName::of(path), range);
        view.snapshot = Some(snapshot);
        view
    }

    /// Whether it shows the bytes as they were when it was made, not as they are. So it is with up to 64 KiB of a
    /// file when the process had no room for more mappings; to see what the file has become, map it again.
    pub fn is_snapshot(&self) -> bool {
        self.snapshot.is_some()
    }

    /// The file, as it was named. Of one that was given open: as it is called when this is first asked for; in a fork nothing, if
    /// nobody had asked.
    pub fn path(&self) -> &Path {
        // In a fork, the lock of the mapping may be held for ever.
        self.name.path(self.mapped.as_deref().filter(|_| self.shared.mark.is_current()))
    }

    /// Where in the file it begins.
    pub fn offset_bytes(&self) -> u64 {
        self.range.start
    }

    /// How many bytes it has.
    pub fn len_bytes(&self) -> u64 {
        match &self.stores {
            Some(stores) => stores.file.mapping().len_bytes(),
            None => self.range.end - self.range.start,
        }
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len_bytes() == 0
    }

    /// The length of the file now, wherever the view ends; also if its path has come to lead to another one. Of an empty view
    /// and of a snapshot, the length of what the path leads to.
    ///
    /// # Errors
    /// [`MapError::Open`] if the path leads nowhere and the file is not open any more; [`MapError::Fault`] if it leads to
    /// another file, likewise.
    pub fn file_len_bytes(&self) -> Result<u64> {
        self.shared.check_process()?;
        if let Some(stores) = &self.stores {
            return stores.file.mapping().file_len_bytes().map_err(MapError::open(self.path()));
        }
        let file = self.mapped.as_ref().map(|mapped| mapped.file_for_now(self.path()));
        if let Some(Some(kept)) = &file {
            let status = Status::of_file(kept.file()).map_err(MapError::open(self.path()))?;
            return Ok(status.len_bytes);
        }
        let status = Status::of_path(self.path()).map_err(MapError::open(self.path()))?;
        match file {
            None => Ok(status.len_bytes),
            Some(_) => Err(MapError::Fault {
                path: self.path().to_owned(),
                offset_bytes: self.range.start,
                cause: FaultCause::OutOfReach,
            }),
        }
    }

    /// Bytes of the view as bytes of the file.
    pub(super) fn in_file(&self, range: &Range<u64>) -> Result<Range<u64>> {
        self.shared.check_process()?;
        let outside = MapError::OutsideView {
            start: range.start,
            end: range.end,
            len_bytes: self.len_bytes(),
        };
        if range.start > range.end || range.end > self.len_bytes() {
            return Err(outside);
        }
        Ok(self.range.start + range.start..self.range.start + range.end)
    }

    /// Shows all of it to a closure.
    ///
    /// If the file was cut short, that is noticed by pages: of the page in which it ends now, bytes behind the end are zeros
    /// and no error, as with mmap. [`FileView::file_len_bytes`] tells.
    ///
    /// # Errors
    /// [`MapError::Fault`] if a byte could not be had that the closure looked at: then its result is dropped.
    pub fn read<T>(&self, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        self.read_range(0..self.len_bytes(), look)
    }

    /// Shows a range of it, counted from its first byte, to a closure.
    ///
    /// # Errors
    /// As for [`FileView::read`]; [`MapError::OutsideView`].
    pub fn read_range<T>(&self, range: Range<u64>, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        let range = self.in_file(&range)?;
        if let Some(stores) = &self.stores {
            let mapping = stores.file.mapping();
            let len = (range.end - range.start) as usize;
            // SAFETY: mapped as long as `self` is borrowed; a page that is not there is replaced under the guard.
            let bytes = unsafe { Bytes::new(mapping.address_of(range.start), len) };
            return mapping.guarded(&range, || look(bytes));
        }
        if let Some(snapshot) = &self.snapshot {
            return Ok(look(snapshot.bytes(&range)));
        }
        let Some(mapped) = self.mapped.as_ref().filter(|_| !range.is_empty()) else {
            // SAFETY: no bytes.
            return Ok(look(unsafe { Bytes::new(std::ptr::dangling(), 0) }));
        };
        let address = mapped.address_of(range.start);
        // SAFETY: mapped as long as `self` is borrowed; a page that is not there is replaced under the guard.
        let bytes = unsafe { Bytes::new(address, (range.end - range.start) as usize) };
        mapped.guarded(&self.name, &range, || look(bytes))
    }

    /// Copies bytes from `offset_bytes` of the view.
    ///
    /// # Errors
    /// As for [`FileView::read_range`].
    pub fn read_into(&self, offset_bytes: u64, target: &mut [u8]) -> Result<()> {
        if let Some(stores) = &self.stores {
            return stores.file.mapping().read_into(offset_bytes, target);
        }
        let end = offset_bytes.saturating_add(target.len() as u64);
        let range = self.in_file(&(offset_bytes..end))?;
        if let Some(snapshot) = &self.snapshot {
            snapshot.bytes(&range).copy_to(0, target);
            return Ok(());
        }
        match self.mapped.as_ref().filter(|_| !range.is_empty()) {
            Some(mapped) => mapped.copy_to(&self.name, range.start, target),
            None => Ok(()),
        }
    }

    /// The value at `offset_bytes` of the view, in the machine's byte order; any alignment.
    ///
    /// # Errors
    /// As for [`FileView::read_range`].
    pub fn get<T: Pod>(&self, offset_bytes: u64) -> Result<T> {
        let mut value = std::mem::MaybeUninit::<T>::zeroed();
        let pointer = value.as_mut_ptr().cast();
        // SAFETY: the value's own bytes, which are initialised.
        let bytes = unsafe { std::slice::from_raw_parts_mut(pointer, size_of::<T>()) };
        self.read_into(offset_bytes, bytes)?;
        // SAFETY: any bytes are a valid value.
        Ok(unsafe { value.assume_init() })
    }

    /// The first byte. Dangling if the view is empty.
    pub fn as_ptr(&self) -> *const u8 {
        if let Some(stores) = &self.stores {
            return stores.file.mapping().as_mut_ptr();
        }
        match (&self.mapped, &self.snapshot) {
            (Some(mapped), _) => mapped.address_of(self.range.start),
            (None, Some(snapshot)) => snapshot.bytes(&self.range).as_ptr(),
            (None, None) => std::ptr::dangling(),
        }
    }

    /// All of it as a slice: for code that wants one.
    ///
    /// # Safety
    /// Nobody, in any process, changes these bytes of the file or cuts it short as long as the slice is used. If
    /// somebody does, what the slice shows changes under the compiler's feet, and a byte that is not there any more
    /// raises SIGBUS. [`FileView::read`] has no such condition.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: mapped as long as `self` is borrowed; the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len_bytes() as usize) }
    }
}

impl fmt::Debug for FileView {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("FileView")
            .field("path", &self.path())
            .field("range", &self.range)
            .field("is_snapshot", &self.is_snapshot())
            .finish_non_exhaustive()
    }
}

impl Drop for FileView {
    fn drop(&mut self) {
        if !self.shared.mark.is_current() {
            // The addresses are the parent's, or a stranger's by now; and another thread of the parent may have been
            // changing any of this when it forked.
            std::mem::forget((self.mapped.take(), self.snapshot.take(), self.stores.take()));
            std::mem::forget(std::mem::take(&mut self.advised));
            std::mem::forget(self.shared.clone());
            return;
        }
        if let Some(mapped) = self.mapped.take() {
            self.advised.end(&*mapped, &mapped.random);
            self.shared.parked.release(&mapped);
        }
        if let Some(stores) = &self.stores {
            // A request to map ahead would keep the mapping.
            self.advised.end(&*stores.file.fetched(), &stores.random);
        }
    }
}
