//! The mappings behind writable views.
//!
//! There are two kinds: private views, whose stores stay in this process until they are flushed
//! ([`super::private`]), and shared ones, which are ordinary shared mappings ([`super::shared`]).
//! Neither is ever parked, and each has dedicated addresses with room to grow.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use aquifer_sys::memory::SMALL_PAGE_BYTES;

use super::descriptors::FileName;
use super::error::{MapError, Result};
use super::mapped::NotMapped;
use super::populate::Span;
use super::prefetch::Fetched;
use super::private::{PrivateFile, PrivateOptions};
use super::random::RandomRanges;
use super::shared::SharedFile;
use super::writable::{Place, Writable};
use super::{Shared, Stores, ViewOptions};
use aquifer_vm::ephemeral::{Extent, NoAddresses, VmaBudget};
use aquifer_vm::{Arena, FaultOwner, Reservation, VmError};

/// Least address space reserved for a view to grow into: unused addresses cost nothing.
const LEAST_CAPACITY_BYTES: u64 = 64 << 20;

/// A writable mapping, and the advice given about it.
pub(super) struct Stored {
    // Dropped before the ranges in it, which count its VMAs.
    pub file: StoredFile,
    pub random: RandomRanges,
}

/// The mapping behind a writable view.
pub(super) enum StoredFile {
    Private(Arc<PrivateFile>),
    Shared(Arc<SharedFile>),
}

// SAFETY: an extent owns its addresses, is unmapped when it is dropped, and detects that it is in a
// child.
unsafe impl Place for Extent {
    fn address(&self) -> *mut u8 {
        Extent::address(self)
    }

    fn capacity_bytes(&self) -> usize {
        Extent::capacity_bytes(self)
    }

    unsafe fn set_owner(
        &mut self,
        owner: *const dyn FaultOwner,
    ) -> std::result::Result<(), VmError> {
        // SAFETY: forwarded to the caller.
        unsafe { Extent::set_owner(self, owner) };
        Ok(())
    }
}

/// Addresses of a shared view, which a forked child keeps: slots of the arena, since the other
/// mappings of a heap's region are not inherited.
struct Kept {
    // Dropped before its VMA is given back.
    slots: Option<Reservation>,
    vmas: Arc<VmaBudget>,
}

impl Kept {
    fn take(vmas: &Arc<VmaBudget>, len_bytes: usize) -> std::result::Result<Kept, NotMapped> {
        if !vmas.try_take(1) {
            let (used, limit) = (vmas.used(), vmas.limit());
            return Err(NotMapped::NoAddresses(NoAddresses::Vmas { used, limit }));
        }
        // Gives the VMA back if there are no slots.
        let mut kept = Kept { slots: None, vmas: vmas.clone() };
        let slots = Arena::global().and_then(|arena| arena.allocate(len_bytes));
        let no_room = |error| NotMapped::NoAddresses(NoAddresses::Memory(error));
        kept.slots = Some(slots.map_err(no_room)?);
        Ok(kept)
    }

    fn slots(&self) -> &Reservation {
        self.slots.as_ref().expect("taken as long as it exists")
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.slots = None;
        self.vmas.give_back(1);
    }
}

// SAFETY: a reservation owns its addresses, and detects that it is in a child.
unsafe impl Place for Kept {
    fn address(&self) -> *mut u8 {
        self.slots().address()
    }

    fn capacity_bytes(&self) -> usize {
        self.slots().len_bytes()
    }

    fn keep_in_children(&self) {
        self.slots().keep_in_children();
    }

    unsafe fn set_owner(
        &mut self,
        owner: *const dyn FaultOwner,
    ) -> std::result::Result<(), VmError> {
        let slots = self.slots.as_mut().expect("taken as long as it exists");
        // SAFETY: forwarded to the caller.
        unsafe { slots.set_owner(owner) }
    }
}

impl Stored {
    /// Maps a range of a file that is open for reading and writing.
    pub fn map(
        shared: &Shared,
        file: &File,
        path: &Path,
        options: ViewOptions,
        range: Range<u64>,
    ) -> Result<Stored> {
        let lead_bytes = range.start % SMALL_PAGE_BYTES as u64;
        let len_bytes = (range.end - range.start).saturating_add(lead_bytes);
        let random = RandomRanges::new(shared.heap.vmas().clone());
        let take = |wanted_bytes: u64| -> std::result::Result<Box<dyn Place>, NotMapped> {
            Ok(match options.stores {
                Stores::Private => Box::new(
                    shared.heap.take(wanted_bytes as usize).map_err(NotMapped::NoAddresses)?,
                ),
                Stores::Shared => Box::new(Kept::take(shared.heap.vmas(), wanted_bytes as usize)?),
            })
        };
        // Where the addresses do not suffice for twice the file, the view cannot grow.
        let roomy_bytes = len_bytes.saturating_mul(2).max(LEAST_CAPACITY_BYTES);
        let place = (shared.with_room(|| take(roomy_bytes)))
            .or_else(|_| shared.with_room(|| take(len_bytes)))
            .map_err(|none| none.of(path.to_owned(), len_bytes))?;
        if options.stores == Stores::Shared {
            let file = SharedFile::new(place, file, path, range, options.allocate)?;
            let file = StoredFile::Shared(Arc::new(file));
            return Ok(Stored { file, random });
        }
        let exact = PrivateOptions { allocates: options.allocate, ..PrivateOptions::default() };
        let private = Arc::new(PrivateFile::new(place, file, path, range, exact)?);
        shared.write_back.add(&private)?;
        Ok(Stored { file: StoredFile::Private(private), random })
    }
}

impl StoredFile {
    /// The mapping, to read from.
    pub fn mapping(&self) -> &Writable {
        match self {
            StoredFile::Private(file) => file.mapping(),
            StoredFile::Shared(file) => file.mapping(),
        }
    }

    /// The mapping, to populate ranges of it.
    pub fn fetched(&self) -> Arc<dyn Fetched> {
        match self {
            StoredFile::Private(file) => file.clone(),
            StoredFile::Shared(file) => file.clone(),
        }
    }
}

/// A writable mapping is populated like any other: loads and advice do not change its contents.
macro_rules! fetch_stores_of {
    ($file:ty) => {
        // SAFETY: the place is mapped readable, whole, from when the mapping is made until it is
        // dropped.
        unsafe impl Span for $file {
            fn address(&self) -> *const u8 {
                self.mapping().base()
            }

            fn len_bytes(&self) -> usize {
                (self.mapping().capacity_pages() as usize) * SMALL_PAGE_BYTES
            }
        }

        impl Fetched for $file {
            fn offset_of(&self, file_byte: u64) -> usize {
                (file_byte - self.mapping().first_byte()) as usize
            }

            fn why(&self, _name: &FileName, offset: usize) -> MapError {
                let start = self.mapping().first_byte() + offset as u64;
                self.mapping().fault(&(start..start + 1))
            }
        }
    };
}

fetch_stores_of!(PrivateFile);
fetch_stores_of!(SharedFile);
