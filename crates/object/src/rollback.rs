//! Rollback: an object as of its last commit again.
//!
//! ```text
//!   wait for commits in flight ─▶ take the set of pages stored to ─▶ apply the log ─▶ copy these pages from the primary
//! ```
//!
//! The set is that of the next psync, so it has the pages of failed commits as well, and is complete.
//! The pages keep their private copies: the next psync finds them stored to, and unchanged.

use aquifer_pool::PoolError;
use aquifer_pool::format::PAGE_BYTES;
use aquifer_vm::dirty::{PageRun, Stores};

use crate::access::Access;
use crate::attach::Attached;
use crate::attachment::Attachment;
use crate::error::{ObjectError, Result};
use crate::memory::Object;

impl Attachment {
    /// Undoes all stores since the last commit: the object has the content of the last
    /// [`Attachment::psync`] again, with what [`Attachment::psync_ranges`] has committed since, as
    /// after [`Attachment::detach`] and attaching it anew. Waits for pending psyncs, which count.
    /// Ignored on an attachment for reading.
    ///
    /// ```
    /// # use aquifer_object::Objects;
    /// # use aquifer_pool::Pool;
    /// # let directory = tempfile::tempdir()?;
    /// # let objects = Objects::new(Pool::create(directory.path().join("pool"), 16 << 20)?);
    /// # objects.create("numbers", 1 << 20)?;
    /// let mut numbers = objects.attach_mut("numbers")?;
    /// numbers.as_mut_slice()?[0] = 1;
    /// numbers.psync()?;
    /// numbers.as_mut_slice()?[..2].copy_from_slice(&[8, 9]);
    /// numbers.rollback()?;
    /// assert_eq!(numbers.as_slice()?[..2], [1, 0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ObjectError::Pool`], also if the media failed during an earlier psync: then its outcome is
    /// decided only when the pool is next opened. Each page has its committed content or that from
    /// before the call; calling it again undoes the rest. [`ObjectError::Memory`],
    /// [`ObjectError::Forked`].
    pub fn rollback(&mut self) -> Result<()> {
        // What it keeps outside of the object describes the stores that are undone.
        self.heap = None;
        rollback(&self.attached)
    }

    /// [`Attachment::rollback`] for programs whose threads share the attachment.
    ///
    /// # Errors
    /// As for [`Attachment::rollback`]; [`ObjectError::HoldsHeap`].
    ///
    /// # Safety
    /// No thread loads from or stores to the object during the call, by a system call neither, and no
    /// reference into it is alive.
    pub unsafe fn rollback_shared(&self) -> Result<()> {
        if self.attached.is_heap {
            return Err(ObjectError::HoldsHeap { name: self.name() });
        }
        rollback(&self.attached)
    }
}

fn rollback(attached: &Attached) -> Result<()> {
    attached.check_process()?;
    let object = &attached.object;
    let mut held = attached.held();
    let Some(held) = held.as_mut() else {
        return Err(ObjectError::NotAttached { address: object.address });
    };
    let Some(writing) = held.writing.as_mut().filter(|_| attached.access == Access::Write) else {
        return Ok(());
    };
    // Before the pages are collected: a commit that fails returns its pages to be collected.
    object.flights.wait_landed(object.flights.last_begun());
    writing.collect(object, Stores::Excluded)?;
    let restored = restore(object, &writing.captured, writing.last_lsn);
    match restored {
        Ok(()) => {
            writing.captured.clear();
            writing.is_behind = false;
        }
        Err(_) => writing.give_back(),
    }
    restored
}

/// Copies pages from the primary, brought up to date with what was committed before `last_lsn`.
fn restore(object: &Object, pages: &[PageRun], last_lsn: u64) -> Result<()> {
    let pool = &object.shared.pool;
    pool.apply_through(last_lsn)?;
    if pool.applied_lsn() < last_lsn {
        return Err(ObjectError::Unsynced { name: object.name_text() });
    }
    let mut content = vec![0; PAGE_BYTES as usize];
    for page in pages.iter().flat_map(|run| run.pages()) {
        let offset = object.media.offset_bytes + page.0 * PAGE_BYTES;
        pool.media().read_at(offset, &mut content).map_err(PoolError::from)?;
        let place = object.page(page).cast_mut();
        // SAFETY: a page of the mapping, which is attached for writing; the caller excludes loads and
        // stores by other threads.
        unsafe { place.copy_from_nonoverlapping(content.as_ptr(), content.len()) };
    }
    Ok(())
}
