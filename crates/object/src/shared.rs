//! What the handles of a pool's objects share, and the metadata of these objects.

use aquifer_pool::format::inode::Inode;
use aquifer_pool::format::run::Run;
use aquifer_pool::media::ByteRange;
use aquifer_pool::{Pool, Reservation, Transaction};
use aquifer_vm::ProcessMark;

use crate::committer::Committer;
use crate::error::{ObjectError, Result, text};

/// State shared with the attachments. Field order matters: pending commits finish before the pool
/// is closed.
pub(crate) struct Shared {
    pub committer: Committer,
    pub pool: Pool,
    pub process: ProcessMark,
}

impl Shared {
    /// All objects.
    pub fn objects(&self) -> Result<Vec<Inode>> {
        self.check_process()?;
        Ok(self.pool.inodes()?)
    }

    /// The object of this name.
    pub fn find(&self, name: &[u8]) -> Result<Inode> {
        self.check_process()?;
        let found = self.pool.object_named(name)?;
        found.ok_or_else(|| ObjectError::NotFound { name: text(name) })
    }

    /// Fails in a forked child, which cannot use the parent's pool. Every call by name checks this
    /// first.
    fn check_process(&self) -> Result<()> {
        if self.process.is_current() { Ok(()) } else { Err(ObjectError::Forked) }
    }

    /// Changes metadata. `change` puts inodes last: if it fails, nothing has been changed.
    pub fn change<'a, T>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        mut change: impl FnMut(&mut Transaction<'a>) -> Result<T>,
    ) -> Result<T> {
        let change = |transaction: &mut Transaction<'a>| match change(transaction) {
            Err(ObjectError::Pool(error)) => Err(error),
            outcome => Ok(outcome),
        };
        // SAFETY: all callers are in this crate; they change only new inodes and inodes of objects
        // whose write lock they hold.
        unsafe { self.pool.transact(reservations, change)? }
    }
}

/// The pages of an object's content as one range of the media.
pub(crate) fn content(inode: &Inode) -> ByteRange {
    // The format requires the runs of an object to be adjacent.
    let start_page = inode.runs.first().map_or(0, |run| run.start_page);
    Run { start_page, pages: inode.content_pages() }.bytes()
}

/// An object other than `except` whose addresses overlap these.
pub(crate) fn overlapping(
    inodes: impl Iterator<Item = Inode>,
    address: u64,
    len_bytes: u64,
    except: u64,
) -> Option<Inode> {
    let end = address.saturating_add(len_bytes);
    inodes.into_iter().filter(|inode| inode.number != except).find(|inode| {
        inode.address < end && address < inode.address.saturating_add(content(inode).len_bytes)
    })
}
