//! A view: bytes of a mapped file.

mod advise;
mod fetch;
mod stores;

pub use stores::Tracking;

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::advice::Advised;
use crate::descriptors::FileName;
use crate::error::{FaultCause, MapError, Result};
use crate::mapped::Mapped;
use crate::small::Snapshot;
use crate::stores::{Stored, StoredFile};
use crate::{Shared, Status};
use aquifer_vm::bytes::Bytes;
use zerocopy::FromBytes;

/// Bytes of a file, mapped as long as this exists.
///
/// Other processes may change or truncate the file at any time. So bytes are copied out, or read in
/// a closure; a plain slice requires the caller to rule such changes out ([`FileView::as_slice`]).
pub struct FileView {
    shared: Arc<Shared>,
    /// `None` if the file was empty, for a snapshot, and for a writable view.
    mapped: Option<Arc<Mapped>>,
    name: FileName,
    snapshot: Option<Snapshot>,
    /// Bytes of the file.
    range: Range<u64>,
    pub(super) advised: Advised,
    /// Set for a writable view; `mapped` is then `None`.
    stores: Option<Stored>,
}

impl FileView {
    pub(crate) fn new(
        shared: Arc<Shared>,
        mapped: Option<Arc<Mapped>>,
        name: FileName,
        range: Range<u64>,
    ) -> FileView {
        let advised = Advised::default();
        FileView { shared, mapped, snapshot: None, name, range, advised, stores: None }
    }

    /// A writable view.
    pub(crate) fn with_stores(
        shared: Arc<Shared>,
        stores: Stored,
        path: PathBuf,
        range: Range<u64>,
    ) -> FileView {
        let mut view = FileView::new(shared, None, FileName::of(path), range);
        view.stores = Some(stores);
        view
    }

    pub(crate) fn of_snapshot(shared: Arc<Shared>, snapshot: Snapshot, path: PathBuf) -> FileView {
        let range = snapshot.range();
        let mut view = FileView::new(shared, None, FileName::of(path), range);
        view.snapshot = Some(snapshot);
        view
    }

    /// Whether the view shows the bytes as they were when it was made, not as they are. This is so
    /// for up to 64 KiB of a file that was mapped when the process had no room for more mappings;
    /// to see later changes, map it again.
    pub fn is_snapshot(&self) -> bool {
        self.snapshot.is_some()
    }

    /// The path the file was mapped by. For a file given as a descriptor, the path it has at the
    /// first call; in a forked child empty, if there was no call before the fork.
    pub fn path(&self) -> &Path {
        // In a fork, the lock of the mapping may be held forever.
        let mapped = self.mapped.as_ref().filter(|_| self.shared.mark.is_current());
        self.name.path(|| mapped.and_then(|mapped| mapped.path_now()))
    }

    /// File offset of the first byte.
    pub fn offset_bytes(&self) -> u64 {
        self.range.start
    }

    /// Length of the view in bytes.
    pub fn len_bytes(&self) -> u64 {
        match &self.stores {
            Some(stores) => stores.file.mapping().len_bytes(),
            None => self.range.end - self.range.start,
        }
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len_bytes() == 0
    }

    /// The current length of the file, wherever the view ends, even if the path now names another
    /// file. For an empty view and for a snapshot, the length of the file that the path names.
    ///
    /// # Errors
    /// [`MapError::Open`] if the path does not exist and the file is no longer open;
    /// [`MapError::Fault`] if the path names another file and the file is no longer open.
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

    /// Converts bytes of the view to bytes of the file.
    pub(crate) fn in_file(&self, range: &Range<u64>) -> Result<Range<u64>> {
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

    /// Passes the whole view to a closure.
    ///
    /// Truncation is detected by pages: in the page in which the file now ends, bytes behind the
    /// end read as zeros without an error, as with mmap. [`FileView::file_len_bytes`] detects that.
    ///
    /// # Errors
    /// [`MapError::Fault`] if the closure read a byte that could not be accessed: its result is
    /// then dropped.
    pub fn read<T>(&self, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        self.read_range(0..self.len_bytes(), look)
    }

    /// Passes a range of the view, counted from its first byte, to a closure.
    ///
    /// # Errors
    /// As for [`FileView::read`]; [`MapError::OutsideView`].
    pub fn read_range<T>(&self, range: Range<u64>, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        let range = self.in_file(&range)?;
        if let Some(stores) = &self.stores {
            let mapping = stores.file.mapping();
            mapping.report_copies()?;
            let len = (range.end - range.start) as usize;
            // SAFETY: mapped as long as `self` is borrowed; under the guard, a missing page is
            // replaced.
            let bytes = unsafe { Bytes::new(mapping.address_of(range.start), len) };
            return mapping.guarded(&range, || look(bytes));
        }
        if let Some(snapshot) = &self.snapshot {
            return Ok(look(snapshot.bytes(&range)));
        }
        let Some(mapped) = self.mapped.as_ref().filter(|_| !range.is_empty()) else {
            // SAFETY: of length 0.
            return Ok(look(unsafe { Bytes::new(std::ptr::dangling(), 0) }));
        };
        let address = mapped.address_of(range.start);
        // SAFETY: mapped as long as `self` is borrowed; under the guard, a missing page is
        // replaced.
        let bytes = unsafe { Bytes::new(address, (range.end - range.start) as usize) };
        mapped.guarded(&self.name, &range, || look(bytes))
    }

    /// Copies `target.len()` bytes from `offset_bytes` of the view, like `read_exact_at` of a file.
    ///
    /// # Errors
    /// As for [`FileView::read_range`].
    pub fn read_exact_at(&self, target: &mut [u8], offset_bytes: u64) -> Result<()> {
        if let Some(stores) = &self.stores {
            stores.file.mapping().report_copies()?;
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
    pub fn get<T: FromBytes>(&self, offset_bytes: u64) -> Result<T> {
        let mut value = std::mem::MaybeUninit::<T>::zeroed();
        let pointer = value.as_mut_ptr().cast();
        // SAFETY: the bytes of the value, initialised to zeros above.
        let bytes = unsafe { std::slice::from_raw_parts_mut(pointer, size_of::<T>()) };
        self.read_exact_at(bytes, offset_bytes)?;
        // SAFETY: `FromBytes`: any bytes are a `T`.
        Ok(unsafe { value.assume_init() })
    }

    /// A pointer to the first byte; dangling if the view is empty.
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

    /// The whole view as a slice.
    ///
    /// # Safety
    /// While the slice is used, no thread of any process changes these bytes of the file or
    /// truncates it. Otherwise the contents of the slice change in violation of the compiler's
    /// assumptions, and a load of a missing byte raises SIGBUS. [`FileView::read`] has no such
    /// condition.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: mapped as long as `self` is borrowed; the caller guarantees that the bytes do not
        // change.
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
            // The addresses are the parent's, and may have been reused in this process; and another
            // thread of the parent may have been changing any of these during the fork: leak them.
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
            // End a request to map ahead: it would keep the mapping.
            self.advised.end(&*stores.file.fetched(), &stores.random);
            match &stores.file {
                StoredFile::Private(file) => file.discard(),
                // What cannot be written now never will be; `write_out` returns the error.
                StoredFile::Shared(file) => drop(file.write_out()),
            }
        }
    }
}
