//! An attached object, in the hands of the program.

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_pool::format::PAGE_BYTES;

use crate::access::Access;
use crate::attach::Attached;
use crate::committer::PendingPsync;
use crate::error::{ObjectError, Result};
use crate::heap::ObjectHeap;
use crate::name::ObjectName;
use crate::psync::{self, Stores};

/// An object, attached: its bytes are in memory at [`Attachment::address`], in every process that attaches it, now and
/// after every restart, so plain pointers into it stay valid. Detached when dropped.
///
/// # Stores and psync
/// Stores are private to this process until [`Attachment::psync`] makes them durable; those that no psync
/// covered are lost when the object is detached or the process ends. During a psync's *capture* nobody may
/// store to the object. Through references the compiler sees to that: [`Attachment::psync`] takes the attachment
/// mutably, so none can be alive. A program that stores through pointers sees to it itself, and one whose
/// threads share the attachment uses [`Attachment::psync_shared`].
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
/// It can be sent and shared. In a forked child it is inert: the memory is not there, and calls are
/// [`ObjectError::Forked`].
///
/// # What a reference into it stands on
/// Only this process can change the object while it is attached for writing, and nobody while it is attached for
/// reading, as far as everybody uses this library. Somebody who scribbles into the pool file itself, or cuts it
/// short, changes memory under such references, or ends the process with SIGBUS: a pool is one security domain.
pub struct Attachment {
    /// Dropped before the memory goes.
    pub(crate) heap: Option<ObjectHeap>,
    pub(crate) attached: Attached,
}

/// What an attachment's psyncs have committed so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PsyncStatistics {
    /// Commits that carried something of this object.
    pub psyncs: u64,
    /// Pages stored to before them.
    pub pages: u64,
    /// Bytes written for them: patches and whole pages in the log, and pages put aside. Each record adds up to
    /// a page to that, and a checkpoint writes each page once to its place.
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
        self.attached.name_text()
    }

    /// What it may do.
    pub fn access(&self) -> Access {
        self.attached.access
    }

    /// Whether it may be stored to.
    pub fn is_writable(&self) -> bool {
        self.attached.access == Access::Write
    }

    /// The first byte's address, the same wherever the object is attached.
    pub fn address(&self) -> u64 {
        self.attached.address
    }

    /// The first byte: for programs that use pointers. Valid for [`Attachment::len_bytes`] as long as this attachment
    /// lives, in this process; stores only if it is for writing.
    pub fn start(&self) -> NonNull<u8> {
        NonNull::new(self.attached.address as *mut u8).expect("addresses of objects are not null")
    }

    /// Length in bytes, a multiple of the page.
    pub fn len_bytes(&self) -> u64 {
        self.attached.media.len_bytes
    }

    /// The object's bytes.
    ///
    /// Nobody stores to them through pointers as long as the slice lives.
    ///
    /// # Errors
    /// [`ObjectError::Forked`].
    pub fn as_slice(&self) -> Result<&[u8]> {
        self.attached.check_process()?;
        let start = self.start().as_ptr();
        // SAFETY: mapped and readable as long as `self` lives. Others cannot store to it, they have not the lock;
        // this process does so through `as_mut_slice`, which borrows `self` mutably, or by unsafe code, whose promise it
        // is not to do so now.
        Ok(unsafe { std::slice::from_raw_parts(start, self.len_bytes() as usize) })
    }

    /// The object's bytes, to be stored to.
    ///
    /// # Errors
    /// [`ObjectError::AttachedForReading`]; [`ObjectError::HoldsHeap`]; [`ObjectError::Forked`].
    pub fn as_mut_slice(&mut self) -> Result<&mut [u8]> {
        self.attached.check_process()?;
        if self.attached.is_heap {
            return Err(ObjectError::HoldsHeap { name: self.name() });
        }
        if !self.is_writable() {
            return Err(ObjectError::AttachedForReading { name: self.name() });
        }
        let start = self.start().as_ptr();
        // SAFETY: as in `as_slice`; the mapping is writable, and `self` is borrowed mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, self.len_bytes() as usize) })
    }

    /// Makes everything stored to the object until now durable, atomically: after a crash it is as this psync
    /// left it, or, if this one had not returned, perhaps as the one before did. Costs one write and one sync of the
    /// device in the steady state; an object that was not stored to costs neither. Ignored on an attachment for
    /// reading.
    ///
    /// # Errors
    /// The pages are taken along by the next psync. [`ObjectError::NoRoomForShadow`] if the commit is too large for the log
    /// and the pool is full; [`ObjectError::Pool`] if the media failed: the pool is read-only from then on, and after
    /// a restart the object is as it was before or as it is now.
    pub fn psync(&mut self) -> Result<()> {
        psync::psync(&[&self.attached], Stores::Excluded)
    }

    /// [`Attachment::psync`] for programs whose threads share the attachment.
    ///
    /// # Errors
    /// As for [`Attachment::psync`].
    ///
    /// # Safety
    /// Nobody stores to the object during the call, and no reference through which that could happen is alive.
    pub unsafe fn psync_shared(&self) -> Result<()> {
        psync::psync(&[&self.attached], Stores::Excluded)
    }

    /// Captures what was stored until now, and returns: the object may be stored to again while the commit
    /// becomes durable in the background. Commits are acknowledged in the order of their captures.
    ///
    /// # Errors
    /// As for [`Attachment::psync`], as far as they are known by then; the others come from the result.
    pub fn psync_begin(&mut self) -> Result<PendingPsync> {
        psync::psync_begin(&self.attached.shared, &[&self.attached])
    }

    /// [`Attachment::psync_begin`] for programs whose threads share the attachment.
    ///
    /// # Errors
    /// As for [`Attachment::psync_begin`].
    ///
    /// # Safety
    /// As for [`Attachment::psync_shared`], until this returns.
    pub unsafe fn psync_begin_shared(&self) -> Result<PendingPsync> {
        psync::psync_begin(&self.attached.shared, &[&self.attached])
    }

    /// What its psyncs have committed.
    pub fn statistics(&self) -> PsyncStatistics {
        PsyncStatistics {
            psyncs: self.attached.psyncs.load(Relaxed),
            pages: self.attached.psync_pages.load(Relaxed),
            bytes: self.attached.psync_bytes.load(Relaxed),
        }
    }

    /// Bytes of private copies this attachment has now. Looks at the whole mapping.
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

    /// Detaches the object. What was stored since the last psync is lost. Waits for psyncs that were begun.
    ///
    /// # Errors
    /// The object is detached all the same. [`ObjectError::Unsynced`] if a psync failed and none followed that took its
    /// pages along; [`ObjectError::Pool`] if the space of a large commit could not be freed, which the next
    /// detach after writing makes up for; [`ObjectError::Forked`] in a forked child, where there is nothing to detach.
    pub fn detach(self) -> Result<()> {
        let Attachment { heap, attached } = self;
        drop(heap);
        attached.detach()
    }
}
