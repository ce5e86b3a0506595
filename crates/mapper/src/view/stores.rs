//! Stores to writable views, and their flushes.

use std::ops::Range;

use super::FileView;
use crate::Stores;
#[allow(unused_imports, reason = "for the documentation")]
use crate::ViewOptions;
use crate::error::{MapError, Result};
use crate::flush::Flushed;
use crate::stores::StoredFile;
use aquifer_vm::TrackerForm;
use zerocopy::{Immutable, IntoBytes};

impl FileView {
    /// Where stores go; `None` for a view to read.
    pub fn stores(&self) -> Option<Stores> {
        self.stores.as_ref().map(|stores| match stores.file {
            StoredFile::Private(_) => Stores::Private,
            StoredFile::Shared(_) => Stores::Shared,
        })
    }

    fn stored(&self) -> Result<&StoredFile> {
        self.stores
            .as_ref()
            .map(|stores| &stores.file)
            .ok_or_else(|| MapError::ReadOnly { path: self.path().to_owned() })
    }

    /// Stores all of `bytes` at `offset_bytes` of the view, like `write_all_at` of a file.
    ///
    /// # Errors
    /// [`MapError::ReadOnly`], [`MapError::OutsideView`]; [`MapError::Fault`], after which some of
    /// the bytes may have been stored.
    /// [`MapError::Flush`] for an earlier store through the pointer of a shared view that has found no
    /// block: nothing was stored.
    pub fn write_all_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        match self.stored()? {
            StoredFile::Private(file) => file.write_at(offset_bytes, bytes),
            StoredFile::Shared(file) => file.write_at(offset_bytes, bytes),
        }
    }

    /// Stores a value at `offset_bytes` of the view, in the machine's byte order.
    ///
    /// # Errors
    /// As for [`FileView::write_all_at`].
    pub fn set<T: IntoBytes + Immutable>(&self, offset_bytes: u64, value: T) -> Result<()> {
        match self.stored()? {
            StoredFile::Private(file) => file.set(offset_bytes, value),
            StoredFile::Shared(file) => file.set(offset_bytes, value),
        }
    }

    /// Returns a pointer to the first byte, valid for stores to the length of the view. A store
    /// behind the end of the file raises SIGBUS.
    ///
    /// A store through a shared view for which the file system has no block goes to a copy of its page
    /// ([`FileView::take_missed_fault`]), as long as the process may have more mappings; after that it
    /// raises SIGBUS. A system call that stores there fails with EFAULT.
    ///
    /// A forked child can load and store through the pointer of a shared view, as with `mmap`, and
    /// flush it. Its other calls return [`MapError::Forked`], and a store there for which the file has no block or no byte
    /// raises SIGBUS. A private view's memory is not there in a child.
    ///
    /// From now on a private view keeps its copies of pages after a flush, because it can no longer
    /// tell when no thread stores. Changes by other processes to these pages stay in the file, but
    /// the view does not show them. A store that does not change the value of a byte in such a copy
    /// does not count as a store. Waits for a flush in progress.
    ///
    /// # Errors
    /// [`MapError::ReadOnly`].
    pub fn as_mut_ptr(&self) -> Result<*mut u8> {
        Ok(match self.stored()? {
            StoredFile::Private(file) => file.as_mut_ptr(),
            StoredFile::Shared(file) => file.as_mut_ptr(),
        })
    }

    /// Writes all stores since the last flush to the file, and makes them durable.
    ///
    /// # Errors
    /// [`MapError::Flush`], with the first range that is not durable. In a private view it counts as
    /// stored to until a flush succeeds. A shared view has no copies to write again: once the device
    /// has failed, every later flush of the view fails ([`FlushCause::Gone`]). [`MapError::ReadOnly`].
    ///
    /// [`FlushCause::Gone`]: crate::FlushCause::Gone
    ///
    /// ```
    /// use aquifer_mapper::{Mapper, Stores, ViewOptions};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("table");
    /// # std::fs::write(&path, vec![0; 1 << 20])?;
    /// let options = ViewOptions::write().stores(Stores::Private);
    /// let view = Mapper::builder().build()?.map(&path, options, ..)?;
    /// view.set(8, 7_u64)?; //              not visible to other processes yet
    /// view.grow(2 << 20)?; //              at the same addresses; the file grows with it
    /// view.set((2 << 20) - 8, 9_u64)?;
    /// assert_eq!(view.flush()?.pages, 2); // exactly the pages stored to
    /// assert_eq!(std::fs::read(&path)?[8], 7);
    /// # Ok(())
    /// # }
    /// ```
    pub fn flush(&self) -> Result<Flushed> {
        match self.stored()? {
            StoredFile::Private(file) => file.flush(),
            StoredFile::Shared(file) => file.flush(),
        }
    }

    /// As [`FileView::flush`], for the pages that a range of the view touches.
    ///
    /// # Errors
    /// As for [`FileView::flush`]; [`MapError::OutsideView`].
    pub fn flush_range(&self, range: Range<u64>) -> Result<Flushed> {
        match self.stored()? {
            StoredFile::Private(file) => file.flush_range(range),
            StoredFile::Shared(file) => file.flush_range(range),
        }
    }

    /// Makes the view this long, and extends the file to hold it. Addresses stay. Does nothing if
    /// the view is that long already. The file of a shared view stays sparse without
    /// [`ViewOptions::allocate`].
    ///
    /// # Errors
    /// [`MapError::GrowBeyond`] if the addresses reserved for the view end before that;
    /// [`MapError::Grow`]; [`MapError::ReadOnly`].
    pub fn grow(&self, len_bytes: u64) -> Result<()> {
        match self.stored()? {
            StoredFile::Private(file) => file.grow(len_bytes),
            StoredFile::Shared(file) => file.grow(len_bytes),
        }
    }

    /// From now on, bare loads of bytes that the file does not have any more, or that cannot be read, find
    /// zeros instead of raising SIGBUS; stores behind the end of the file are lost. For run-times that cannot survive the
    /// signal, such as interpreters. A store to a page that cannot be read still raises it.
    ///
    /// # Errors
    /// [`MapError::ReadOnly`].
    pub fn answer_faults_with_zeros(&self) -> Result<()> {
        self.stored()?.mapping().answer_faults();
        Ok(())
    }

    /// The first bare access since the last call that was answered with zeros, as an error
    /// ([`FileView::answer_faults_with_zeros`]). From here on loads find the file again, as far as it is there; also from the
    /// beginning of a flush on, which writes no such zeros.
    ///
    /// In a shared view also [`MapError::Flush`] for a bare store for which the file system had no block: its page is a copy of
    /// this process, and nothing is lost. Each flush tries to write it; so does this call, which reports it only if it cannot.
    pub fn take_missed_fault(&self) -> Option<MapError> {
        match &self.stores.as_ref()?.file {
            StoredFile::Private(file) => file.take_missed(),
            StoredFile::Shared(file) => file.mapping().take_missed(),
        }
    }

    /// Ends the view in place, for programs in which pointers to its memory may be left that nothing can revoke. Its addresses
    /// stay reserved until the view is dropped: loads find zeros, and stores go to no file. Stores of a private view that were
    /// not flushed are discarded. Flush before; afterwards only drop the view.
    ///
    /// # Errors
    /// [`MapError::ReadOnly`], [`MapError::Forked`]; [`MapError::Map`]: the process has no room for one more mapping.
    pub fn retire(&self) -> Result<()> {
        let stores = self.stored()?;
        if let StoredFile::Private(file) = stores {
            file.discard();
        }
        stores.mapping().retire()
    }

    /// Bytes of the pages stored to since they were last written.
    ///
    /// # Errors
    /// [`MapError::ReadOnly`]; [`MapError::Memory`].
    pub fn dirty_bytes(&self) -> Result<u64> {
        match self.stored()? {
            StoredFile::Private(file) => file.dirty_bytes(),
            StoredFile::Shared(file) => file.dirty_bytes(),
        }
    }

    /// Hands stores to the file, where other processes see them, without waiting for the device.
    /// Returns how many bytes that were; of a shared view 0, and only stores that had found no block
    /// are handed over.
    ///
    /// # Errors
    /// As for [`FileView::flush`].
    pub fn write_out(&self) -> Result<u64> {
        self.shared.check_process()?;
        match self.stored()? {
            StoredFile::Private(file) => file.write_out(),
            StoredFile::Shared(file) => file.write_out().map(|()| 0),
        }
    }

    /// How stores to a private view are tracked; `None` for a shared one.
    ///
    /// # Errors
    /// [`MapError::ReadOnly`], [`MapError::Forked`].
    pub fn tracking(&self) -> Result<Option<Tracking>> {
        match self.stored()? {
            StoredFile::Private(file) => Ok(Some(Tracking {
                form: file.form()?,
                folio_bytes: file.folio_bytes()?,
                private_bytes: file.private_bytes()?,
            })),
            StoredFile::Shared(_) => Ok(None),
        }
    }
}

/// How stores to a private view are tracked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tracking {
    /// How the pages stored to are found.
    pub form: TrackerForm,
    /// The size of the file's folios in the page cache, if a flush has measured it. If it is one
    /// page, [`Stores::Shared`] flushes as exactly, and faster.
    pub folio_bytes: Option<u64>,
    /// Bytes of private copies, as of the last flush.
    pub private_bytes: u64,
}
