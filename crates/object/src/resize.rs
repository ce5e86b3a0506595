//! Resizing and moving objects that are not attached.
//!
//! | | pages | addresses |
//! |---|---|---|
//! | smaller | the last ones are freed | the last ones are freed |
//! | larger, and the following pages are free | these are added, zeroed | the following ones, if no object has them |
//! | larger, and they are not free | the content is copied to a new run, made durable there, and the inode is switched to it | the same |
//!
//! Each operation is one transaction: a crash leaves the old object or the new one. If the
//! following addresses belong to another object, a relocatable object gets a new address range; for
//! any other the call fails.

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::inode::Inode;
use aquifer_pool::format::run::{MAX_RUN_PAGES, Run};
use aquifer_pool::{PoolError, Reservation, Transaction};
use aquifer_vm::fixed::WINDOW;

use crate::access::Access;
use crate::create::{alignment_pages, check_address, now_ns, pages_for, random_address};
use crate::error::{ObjectError, Result, text};
use crate::objects::Objects;
use crate::options::ObjectOptions;
use crate::shared::{Shared, content, overlapping};

/// The result of resizing or moving an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resized {
    /// Its new size in bytes, a multiple of the page size.
    pub size_bytes: u64,
    /// Its new address.
    pub address: u64,
    /// Its previous address.
    pub previous_address: u64,
    /// Whether its content was copied to other pages of the pool.
    pub is_copied: bool,
}

impl Resized {
    /// Whether the object has moved, so that plain pointers into it are invalid.
    pub fn has_moved(&self) -> bool {
        self.address != self.previous_address
    }
}

/// Bytes copied at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// Splits adjacent pages into runs of at most the maximum run length. The runs start at the same
/// pages for any total length.
fn as_runs(whole: Run) -> Vec<Run> {
    (0..whole.pages.div_ceil(MAX_RUN_PAGES))
        .map(|index| Run {
            start_page: whole.start_page + index * MAX_RUN_PAGES,
            pages: (whole.pages - index * MAX_RUN_PAGES).min(MAX_RUN_PAGES),
        })
        .collect()
}

impl Shared {
    /// The address for an object of this length: its current one, if it can stay there.
    fn address_for(&self, inodes: &[Inode], inode: &Inode, len_bytes: u64) -> Result<u64> {
        let other = overlapping(inodes.iter().cloned(), inode.address, len_bytes, inode.number);
        let by = match other {
            Some(other) => Some(text(&other.name)),
            None if inode.address.saturating_add(len_bytes) > WINDOW.end => None,
            None => return Ok(inode.address),
        };
        if inode.is_relocatable {
            random_address(inodes.iter().cloned(), &inode.name, len_bytes)
        } else {
            Err(ObjectError::MustMove { name: text(&inode.name), size_bytes: len_bytes, by })
        }
    }

    /// Copies an object's content to new pages and zeroes the rest.
    fn copy_content(&self, inode: &Inode, pages: u64) -> Result<Reservation<'_>> {
        let media = self.pool.media();
        let reservation = self.pool.reserve(pages, alignment_pages(pages))?;
        let (from, to) = (content(inode), reservation.whole().bytes());
        let mut piece = vec![0; PIECE_BYTES.min(to.len_bytes) as usize];
        for done in (0..to.len_bytes).step_by(PIECE_BYTES as usize) {
            let piece = &mut piece[..PIECE_BYTES.min(to.len_bytes - done) as usize];
            let old_bytes = from.len_bytes.saturating_sub(done).min(piece.len() as u64);
            let (old, behind) = piece.split_at_mut(old_bytes as usize);
            if !old.is_empty() {
                media.read_at(from.offset_bytes + done, old).map_err(PoolError::from)?;
            }
            behind.fill(0);
            // SAFETY: the pages are reserved: no inode refers to them yet.
            unsafe { media.write_at(to.offset_bytes + done, piece) }.map_err(PoolError::from)?;
        }
        Ok(reservation)
    }

    fn put_resized(&self, transaction: &mut Transaction<'_>, inode: &Inode, whole: Run, at: u64) {
        transaction.put(Inode {
            size_bytes: whole.pages * PAGE_BYTES,
            address: at,
            layout_version: inode.layout_version + 1,
            changed_ns: now_ns(),
            runs: as_runs(whole),
            // The commit that used the shadow run is applied, so the run can be dropped.
            shadow: Run::EMPTY,
            ..inode.clone()
        });
    }
}

impl Objects {
    /// Makes an object that no process has attached larger or smaller. Content is kept, added bytes
    /// are zero, bytes cut off are lost. If it has keys, the write key is required
    /// ([`ObjectOptions::key`]). Durable on return; the result tells whether the address has
    /// changed.
    ///
    /// A heap in the object takes in the new memory when it is next opened.
    ///
    /// # Errors
    /// As for [`Objects::attach_mut`]; [`ObjectError::MustMove`]; [`ObjectError::HeapCannotShrink`];
    /// [`ObjectError::Parameter`]; [`ObjectError::Pool`], also if the pool is full. The object is
    /// unchanged then.
    pub fn resize(&self, name: impl AsRef<[u8]>, size_bytes: u64) -> Result<Resized> {
        ObjectOptions::new().resize(self, name, size_bytes)
    }

    /// Moves a relocatable object that no process has attached to another address: the one given,
    /// or a random one. If it has keys, the write key is required ([`ObjectOptions::key`]). Durable
    /// on return.
    ///
    /// # Errors
    /// As for [`Objects::attach_mut`]; [`ObjectError::NotRelocatable`]; [`ObjectError::Parameter`]
    /// and [`ObjectError::AddressOfAnother`] if the address cannot be used.
    pub fn relocate(&self, name: impl AsRef<[u8]>, address: Option<u64>) -> Result<Resized> {
        ObjectOptions::new().relocate(self, name, address)
    }
}

impl ObjectOptions<'_> {
    /// [`Objects::resize`] with these options.
    ///
    /// # Errors
    /// As for [`Objects::resize`].
    pub fn resize(
        &self,
        objects: &Objects,
        name: impl AsRef<[u8]>,
        size_bytes: u64,
    ) -> Result<Resized> {
        let shared = &objects.shared;
        let pages = pages_for(size_bytes)?;
        let (inode, _lock) = shared.claim(name.as_ref(), Access::Write, self.key)?;
        let before = Run { start_page: inode.runs[0].start_page, pages: inode.content_pages() };
        if inode.is_heap && pages < before.pages {
            return Err(ObjectError::HeapCannotShrink { name: text(&inode.name) });
        }
        let len_bytes = pages * PAGE_BYTES;
        // Fail before copying anything.
        shared.address_for(&shared.objects()?, &inode, len_bytes)?;
        shared.pool.bring_up_to_date(content(&inode))?;
        let mut is_copied = false;
        let (whole, reservations) = if pages <= before.pages {
            (Run { pages, ..before }, Vec::new())
        } else if let Some(following) =
            shared.pool.reserve_zeroed_at(before.end_page(), pages - before.pages)?
        {
            (Run { pages, ..before }, vec![following])
        } else {
            is_copied = true;
            let reservation = shared.copy_content(&inode, pages)?;
            (reservation.whole(), vec![reservation])
        };
        let address = shared.change(reservations, |transaction| {
            let inodes: Vec<Inode> = transaction.inodes().collect();
            let address = shared.address_for(&inodes, &inode, len_bytes)?;
            shared.put_resized(transaction, &inode, whole, address);
            Ok(address)
        })?;
        let previous_address = inode.address;
        Ok(Resized { size_bytes: len_bytes, address, previous_address, is_copied })
    }

    /// [`Objects::relocate`] with these options.
    ///
    /// # Errors
    /// As for [`Objects::relocate`].
    pub fn relocate(
        &self,
        objects: &Objects,
        name: impl AsRef<[u8]>,
        address: Option<u64>,
    ) -> Result<Resized> {
        let shared = &objects.shared;
        let (inode, _lock) = shared.claim(name.as_ref(), Access::Write, self.key)?;
        if !inode.is_relocatable {
            return Err(ObjectError::NotRelocatable { name: text(&inode.name) });
        }
        let len_bytes = content(&inode).len_bytes;
        if let Some(address) = address {
            check_address(address, len_bytes)?;
        }
        let address = shared.change(Vec::new(), |transaction| {
            let address = match address {
                None => random_address(transaction.inodes(), &inode.name, len_bytes)?,
                Some(address) => {
                    let inodes = transaction.inodes();
                    if let Some(other) = overlapping(inodes, address, len_bytes, inode.number) {
                        let by = text(&other.name);
                        return Err(ObjectError::AddressOfAnother { address, len_bytes, by });
                    }
                    address
                }
            };
            transaction.put(Inode { address, changed_ns: now_ns(), ..inode.clone() });
            Ok(address)
        })?;
        let previous_address = inode.address;
        Ok(Resized { size_bytes: len_bytes, address, previous_address, is_copied: false })
    }
}
