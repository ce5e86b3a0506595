//! The public handle of an attached object.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_pool::format::PAGE_BYTES;
use aquifer_vm::dirty::Stores;

use crate::access::Access;
use crate::attach::Attached;
use crate::completion::PendingPsync;
use crate::error::{ObjectError, Result};
use crate::heap::ObjectHeap;
use crate::name::ObjectName;
use crate::psync;

/// An attached object; detached when dropped.
///
/// Its bytes are in memory at [`Attachment::address`], the same address in every process that
/// attaches it and after every restart, so plain pointers into it stay valid.
///
/// # Stores and psync
/// Stores are private to this process until [`Attachment::psync`] makes them durable; stores that
/// no psync covered are lost when the object is detached or the process ends. The program must not
/// store to the object during a psync's *capture*. Through references the compiler enforces this:
/// [`Attachment::psync`] borrows the attachment mutably, so no reference can be alive. A program
/// that stores through pointers must ensure it itself, and a program whose threads share the
/// attachment uses [`Attachment::psync_shared`].
///
/// ```compile_fail
/// fn store_during_psync(object: &mut aquifer_object::Attachment) {
///     let bytes = object.as_mut_slice().unwrap();
///     object.psync().unwrap();
///     bytes[0] = 1;
/// }
/// ```
///
/// # Threads and processes
/// It can be sent and shared. In a forked child it is inert: the memory is not mapped, and calls
/// fail with [`ObjectError::Forked`].
///
/// # When references into it are valid
/// As long as every process uses this library, only this process can change an object attached for
/// writing, and no process can change one attached for reading. A process that writes to the pool
/// file directly, or truncates it, changes memory under such references or makes this process die
/// with SIGBUS: a pool is one security domain.
pub struct Attachment {
    /// Dropped before the memory is unmapped.
    pub(crate) heap: Option<ObjectHeap>,
    pub(crate) attached: Attached,
}

/// A heap whose recorded stores are not durable yet. Dropped after an error or a panic: the next
/// psync looks for stores.
struct Unsaved<'a>(&'a mut ObjectHeap);

impl Drop for Unsaved<'_> {
    fn drop(&mut self) {
        self.0.forget_recorded();
    }
}

/// Totals of an attachment's psyncs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PsyncStatistics {
    /// Commits that carried changes of this object.
    pub psyncs: u64,
    /// Pages stored to before these commits.
    pub pages: u64,
    /// Bytes written for these commits: patches and whole pages in the log, and pages put aside.
    /// Each record adds up to a page to that, and a checkpoint writes each page once to its place.
    pub bytes: u64,
}

impl fmt::Debug for Attachment {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Attachment")
            .field("name", &self.name())
            .field("access", &self.access())
            .field("address", &format_args!("{:#x}", self.address()))
            .field("len_bytes", &self.len_bytes())
            .finish_non_exhaustive()
    }
}

impl Attachment {
    /// The object's name.
    pub fn name(&self) -> ObjectName {
        self.attached.object.name_text()
    }

    /// Whether it is attached for reading or for writing.
    pub fn access(&self) -> Access {
        self.attached.access
    }

    /// The address of the first byte, the same wherever the object is attached.
    pub fn address(&self) -> u64 {
        self.attached.object.address
    }

    /// A pointer to the first byte. Valid for [`Attachment::len_bytes`] in this process while this
    /// attachment lives; stores are allowed only if it is attached for writing. Ends the effect of
    /// [`ObjectOptions::record_stores`](crate::ObjectOptions::record_stores).
    pub fn start(&self) -> NonNull<u8> {
        // Relaxed: whether the heap records stores is asked with the attachment borrowed mutably.
        self.attached.records_stores.store(false, Relaxed);
        self.first_byte()
    }

    pub(crate) fn first_byte(&self) -> NonNull<u8> {
        NonNull::new(self.attached.object.address as *mut u8)
            .expect("addresses of objects are not null")
    }

    /// Length in bytes, a multiple of the page size.
    pub fn len_bytes(&self) -> u64 {
        self.attached.object.media.len_bytes
    }

    /// The object's bytes.
    ///
    /// Unsafe code must not store to them while the slice lives.
    ///
    /// # Errors
    /// [`ObjectError::Forked`].
    pub fn as_slice(&self) -> Result<&[u8]> {
        self.attached.check_process()?;
        let start = self.first_byte().as_ptr();
        // SAFETY: mapped and readable as long as `self` lives. Other processes cannot store to it:
        // they do not hold the lock. This process stores through `as_mut_slice`, which borrows
        // `self` mutably, or through unsafe code, which must not do so while the slice lives.
        Ok(unsafe { std::slice::from_raw_parts(start, self.len_bytes() as usize) })
    }

    /// The object's bytes, mutably.
    ///
    /// # Errors
    /// [`ObjectError::AttachedForReading`]; [`ObjectError::HoldsHeap`]; [`ObjectError::Forked`].
    pub fn as_mut_slice(&mut self) -> Result<&mut [u8]> {
        self.attached.check_process()?;
        if self.attached.is_heap {
            return Err(ObjectError::HoldsHeap { name: self.name() });
        }
        if self.access() == Access::Read {
            return Err(ObjectError::AttachedForReading { name: self.name() });
        }
        let start = self.first_byte().as_ptr();
        // SAFETY: as in `as_slice`; the mapping is writable, and `self` is borrowed mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, self.len_bytes() as usize) })
    }

    /// Makes everything stored to the object so far durable, atomically. After a crash the object
    /// has the content of this psync; if it had not returned, possibly that of the previous one.
    /// Costs one write and one device sync in the steady state; nothing if the object was not
    /// stored to. Ignored on an attachment for reading.
    ///
    /// # Errors
    /// The next psync commits the same pages again. [`ObjectError::NoRoomForShadow`] if the commit
    /// is too large for the log and the pool is full; [`ObjectError::Pool`] if the media failed:
    /// the pool is read-only from then on, and after a restart the object has either its previous
    /// or its current content.
    pub fn psync(&mut self) -> Result<()> {
        let attached = [&self.attached];
        // Relaxed: the attachment is borrowed mutably.
        let heap = self.heap.as_mut().filter(|_| self.attached.records_stores.load(Relaxed));
        let Some(heap) = heap else { return psync::psync(&attached, Stores::Excluded) };
        // No reference into the heap is alive.
        let recorded = heap.take_recorded();
        let unsaved = Unsaved(heap);
        match recorded {
            Some(ranges) => psync::psync_recorded(&self.attached, &ranges),
            None => psync::psync(&attached, Stores::Excluded),
        }?;
        std::mem::forget(unsaved);
        Ok(())
    }

    /// [`Attachment::psync`] for programs whose threads share the attachment.
    ///
    /// # Errors
    /// As for [`Attachment::psync`].
    ///
    /// # Safety
    /// No thread stores to the object during the call, by a system call neither, and no reference
    /// through which that could happen is alive. No thread is in a system call that makes pages of
    /// the object writable without storing to them (`mlock`, `mlockall`, `MADV_POPULATE_WRITE`).
    pub unsafe fn psync_shared(&self) -> Result<()> {
        psync::psync(&[&self.attached], Stores::Excluded)
    }

    /// Captures everything stored so far, and returns. The object may be stored to again while the
    /// commit becomes durable in the background. Commits are acknowledged in the order of their
    /// captures. If many pages were committed by name since the last psync of everything
    /// ([`Attachment::psync_ranges`], recorded stores), the call waits for earlier commits first.
    ///
    /// # Errors
    /// The errors of [`Attachment::psync`] that are known at that point; the result returns the
    /// others.
    pub fn psync_begin(&mut self) -> Result<PendingPsync> {
        psync::psync_begin(&self.attached.object.shared, &[&self.attached])
    }

    /// [`Attachment::psync_begin`] for programs whose threads share the attachment.
    ///
    /// # Errors
    /// As for [`Attachment::psync_begin`].
    ///
    /// # Safety
    /// As for [`Attachment::psync_shared`], until this returns.
    pub unsafe fn psync_begin_shared(&self) -> Result<PendingPsync> {
        psync::psync_begin(&self.attached.object.shared, &[&self.attached])
    }

    /// Makes the bytes of these ranges durable, atomically, and no others: for programs that know
    /// where they have stored. Offsets count from the object's start; ranges may touch, overlap and
    /// be in any order, and are widened to multiples of eight bytes. Costs one write and one device
    /// sync whatever the object's length, because it neither looks for stores nor compares pages.
    /// Ignored on an attachment for reading, and if no byte is named.
    ///
    /// After a crash these bytes have the values they had at the call; if it had not returned,
    /// possibly those of their previous commit, but never a mix of both. Stores outside of the ranges
    /// stay as they are: in memory, not durable, for the next [`Attachment::psync`], which finds
    /// them as if this call had not been made. Private copies of pages are not dropped: a program
    /// that only calls this exceeds the shadow budget
    /// ([`ObjectOptions::shadow_budget_bytes`](crate::ObjectOptions::shadow_budget_bytes)) up to
    /// the object's length.
    ///
    /// ```
    /// # use aquifer_object::{Objects, ObjectError};
    /// # use aquifer_pool::Pool;
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("pool");
    /// # let objects = Objects::new(Pool::create(&path, 16 << 20)?);
    /// # objects.create("numbers", 1 << 20)?;
    /// let mut numbers = objects.attach_mut("numbers")?;
    /// let bytes = numbers.as_mut_slice()?;
    /// bytes[8..16].fill(1);
    /// bytes[500_000] = 2;
    /// bytes[700_000] = 3;
    /// numbers.psync_ranges(&[8..16, 500_000..500_001])?;
    /// // A crash now would lose the store at 700,000, and only that one.
    /// # numbers.detach()?;
    /// # drop(objects);
    /// # let objects = Objects::open(&path)?;
    /// # let numbers = objects.attach("numbers")?;
    /// # let bytes = numbers.as_slice()?;
    /// # assert_eq!((bytes[8], bytes[15], bytes[500_000], bytes[700_000]), (1, 1, 2, 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ObjectError::OutsideObject`] for a range that is not one of the object's;
    /// [`ObjectError::HoldsHeap`], because a heap is consistent only as a whole;
    /// [`PoolError::TooLargeForLog`](aquifer_pool::PoolError::TooLargeForLog) if the named parts of
    /// pages exceed half the log, or if the whole pages exceed a quarter of it and lie in more runs
    /// than a record has room for: name fewer, or call [`Attachment::psync`], which has no limit. As
    /// for [`Attachment::psync`]. After any of these, the bytes are in memory as before, and the next
    /// psync that covers them commits them.
    pub fn psync_ranges(&mut self, ranges: &[Range<u64>]) -> Result<()> {
        // SAFETY: `self` is borrowed mutably, so no reference into the object is alive.
        unsafe { self.psync_ranges_shared(ranges) }
    }

    /// [`Attachment::psync_ranges`] for programs whose threads share the attachment: others may
    /// store outside of the ranges meanwhile, and commit their own.
    ///
    /// # Errors
    /// As for [`Attachment::psync_ranges`].
    ///
    /// # Safety
    /// No thread stores to the multiples of eight bytes that cover the ranges during the call, and
    /// no reference through which that could happen is alive.
    pub unsafe fn psync_ranges_shared(&self, ranges: &[Range<u64>]) -> Result<()> {
        if self.attached.is_heap {
            return Err(ObjectError::HoldsHeap { name: self.name() });
        }
        psync::psync_ranges(&self.attached, ranges)
    }

    /// The totals of its psyncs.
    pub fn statistics(&self) -> PsyncStatistics {
        PsyncStatistics {
            psyncs: self.attached.psyncs.load(Relaxed),
            pages: self.attached.psync_pages.load(Relaxed),
            bytes: self.attached.psync_bytes.load(Relaxed),
        }
    }

    /// Bytes of private copies this attachment has. Scans the whole mapping.
    ///
    /// # Errors
    /// [`ObjectError::Memory`], [`ObjectError::Forked`].
    pub fn shadow_bytes(&self) -> Result<u64> {
        self.attached.check_process()?;
        let mut held = self.attached.held();
        let Some(writing) = held.as_mut().and_then(|held| held.writing.as_mut()) else {
            return Ok(0);
        };
        let pages = writing
            .tracker
            .private_pages()
            .map_err(|source| ObjectError::Memory { name: self.name(), source })?;
        Ok(pages * PAGE_BYTES)
    }

    /// Detaches the object. Stores since the last psync are lost. Waits for pending psyncs.
    ///
    /// # Errors
    /// The object is detached even on an error. [`ObjectError::Unsynced`] if a psync failed and no
    /// later one committed its pages; [`ObjectError::Pool`] if the space of a large commit could
    /// not be freed, which the next detach after writing retries; [`ObjectError::Forked`] in a
    /// forked child, which holds nothing to detach.
    pub fn detach(self) -> Result<()> {
        let Attachment { heap, attached } = self;
        drop(heap);
        attached.detach()
    }
}
