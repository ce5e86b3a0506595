//! Pieces of a file as contiguous memory.
//!
//! ```text
//! file      [ … | c | … | a | … | b | … ]
//!                 └──────┐└──┐    │
//!                        ▼   │    │
//! addresses  [ a | b | zeros │ c ]◀─ one mapping each, in addresses of the ephemeral heap
//! ```
//! Each piece is a separate mapping, which takes a system call and counts towards the process's
//! limit of mappings. So this is for a handful of pieces, or a few hundred that are used for long.
//! Dropping it unmaps its mappings in a batch with others (see [`ephemeral`](super)).
//!
//! The bytes may change concurrently; the rules of [`file_mapping`](crate::file_mapping) apply.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use aquifer_sys::memory::{self, Protection, SMALL_PAGE_BYTES};
use aquifer_sys::signal::FaultContext;

use super::{Extent, Heap, NoAddresses, Unmap, VmaBudget};
use crate::bytes::Bytes;
use crate::file_mapping::Inaccessible;
use crate::guard::Replaceable;
use crate::{FaultOwner, Served, VmError, router};

/// One piece of the contiguous memory. Offsets and lengths are multiples of 4,096.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StitchPiece {
    /// A part of the file.
    File {
        /// Offset in the file.
        offset_bytes: u64,
        /// Length.
        len_bytes: usize,
    },
    /// Zeros, which cannot be stored to.
    Zeros {
        /// Length.
        len_bytes: usize,
    },
}

impl StitchPiece {
    fn len_bytes(self) -> usize {
        match self {
            StitchPiece::File { len_bytes, .. } | StitchPiece::Zeros { len_bytes } => len_bytes,
        }
    }
}

/// Why pieces could not be stitched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StitchError {
    /// The process has no room for more mappings.
    #[error(
        "there is no room for {pieces} more mappings: {used} are in use of {limit} that may be (half of \
         vm.max_map_count); drop views, or raise the limit with `sysctl vm.max_map_count`"
    )]
    TooManyMappings {
        /// Mappings requested.
        pieces: usize,
        /// Mappings in use.
        used: usize,
        /// The limit.
        limit: usize,
    },
    /// The system refused a mapping.
    #[error("cannot map {len_bytes} bytes of the file: {source}")]
    Map {
        /// Bytes of the piece.
        len_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// No addresses are free.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// This process is a fork of the one that made the stitcher.
    #[error("this process is a fork of the one that opened this; open it anew here")]
    Forked,
}

/// Makes contiguous memory out of pieces. Cheap to clone; can be shared between threads.
#[derive(Clone)]
pub struct Stitcher {
    heap: Arc<Heap>,
}

impl fmt::Debug for Stitcher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Stitcher").field("heap", &self.heap.stats()).finish()
    }
}

impl Default for Stitcher {
    fn default() -> Self {
        Stitcher::new()
    }
}

impl Stitcher {
    /// Creates a stitcher without addresses. Its mappings may take up to half of those that the
    /// process may have.
    pub fn new() -> Stitcher {
        Stitcher { heap: Heap::new(Unmap::default(), Arc::new(VmaBudget::of_process())) }
    }

    /// Maps existing pieces of a file consecutively. The file must be open for the requested
    /// access.
    ///
    /// # Errors
    /// [`StitchError`].
    ///
    /// # Panics
    /// If an offset or a length is not a multiple of 4,096, or there are no pieces.
    pub fn stitch(
        &self,
        file: BorrowedFd<'_>,
        pieces: Vec<StitchPiece>,
        is_writable: bool,
    ) -> Result<Stitched, StitchError> {
        assert!(pieces.iter().all(|piece| piece.len_bytes().is_multiple_of(SMALL_PAGE_BYTES)));
        router::install()?;
        let len_bytes = pieces.iter().map(|piece| piece.len_bytes()).sum::<usize>();
        assert!(len_bytes > 0);
        let extent =
            self.heap.take_for_pieces(len_bytes, pieces.len()).map_err(|error| match error {
                NoAddresses::Vmas { used, limit } => {
                    StitchError::TooManyMappings { pieces: pieces.len(), used, limit }
                }
                NoAddresses::Memory(error) => error.into(),
                NoAddresses::Forked => StitchError::Forked,
            })?;
        // From here on `drop` retires the extent, even if a piece is refused.
        let mapping = Box::new(Mapping {
            extent: Some(extent),
            heap: self.heap.clone(),
            pieces,
            len_bytes,
            is_writable,
            replaceable: Replaceable::new(),
        });
        mapping.map(file, 0..len_bytes)?;
        // SAFETY: the box keeps the mapping's address stable, and dropping the mapping retires the
        // extent.
        unsafe { mapping.extent().set_owner(&raw const *mapping) };
        Ok(Stitched { mapping })
    }
}

/// Consecutively mapped pieces of a file.
pub struct Stitched {
    mapping: Box<Mapping>,
}

struct Mapping {
    /// `Some` until it is dropped.
    extent: Option<Extent>,
    heap: Arc<Heap>,
    pieces: Vec<StitchPiece>,
    len_bytes: usize,
    is_writable: bool,
    replaceable: Replaceable,
}

impl Mapping {
    fn extent(&self) -> &Extent {
        self.extent.as_ref().expect("there until it is dropped")
    }

    fn address(&self) -> *mut u8 {
        self.extent().address()
    }

    /// Maps the pieces that lie in a range of the mapping.
    fn map(&self, file: BorrowedFd<'_>, range: Range<usize>) -> Result<(), StitchError> {
        let mut at = 0;
        for piece in &self.pieces {
            let (start, end) = (at.max(range.start), (at + piece.len_bytes()).min(range.end));
            let skipped = start.saturating_sub(at);
            at += piece.len_bytes();
            if start >= end {
                continue;
            }
            let (address, len_bytes) = (self.address().wrapping_add(start), end - start);
            // SAFETY: addresses of the extent, into which no references exist. They hold a
            // reservation, an unused mapping, this mapping, or its zero pages.
            let mapped = unsafe {
                match *piece {
                    StitchPiece::Zeros { .. } => {
                        memory::map_anonymous_at(address, len_bytes, Protection::Read)
                    }
                    StitchPiece::File { offset_bytes, .. } => {
                        let protection =
                            if self.is_writable { Protection::ReadWrite } else { Protection::Read };
                        let offset_bytes = offset_bytes + skipped as u64;
                        memory::map_file_at(address, len_bytes, protection, file, offset_bytes)
                    }
                }
            };
            let len_bytes = len_bytes as u64;
            mapped.map_err(|source| StitchError::Map { len_bytes, source })?;
        }
        Ok(())
    }

    fn place(&self, offset_bytes: usize, len_bytes: usize) -> Result<*mut u8, Inaccessible> {
        let end_bytes = offset_bytes.checked_add(len_bytes);
        if end_bytes.is_some_and(|end_bytes| end_bytes <= self.len_bytes) {
            Ok(self.address().wrapping_add(offset_bytes))
        } else {
            Err(Inaccessible)
        }
    }
}

impl FaultOwner for Mapping {
    fn serve(&self, fault: &FaultContext) -> Served {
        // SAFETY: the guarded addresses are this mapping's, and no references into them exist.
        unsafe { self.replaceable.serve(fault) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(extent) = self.extent.take() {
            self.heap.retire(extent);
        }
    }
}

impl Stitched {
    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.mapping.len_bytes
    }

    /// The file offsets and lengths behind a range, piece by piece, without zeros.
    pub fn file_offsets(&self, range: Range<usize>) -> impl Iterator<Item = (u64, u64)> + '_ {
        let mut at = 0;
        self.mapping.pieces.iter().filter_map(move |piece| {
            let (start, end) = (at.max(range.start), (at + piece.len_bytes()).min(range.end));
            let skipped_bytes = start.saturating_sub(at) as u64;
            at += piece.len_bytes();
            match *piece {
                StitchPiece::File { offset_bytes, .. } if start < end => {
                    Some((offset_bytes + skipped_bytes, (end - start) as u64))
                }
                _ => None,
            }
        })
    }

    /// The bytes of a range. Reading a byte that cannot be accessed raises SIGBUS.
    pub fn bytes(&self, offset_bytes: usize, len_bytes: usize) -> Result<Bytes<'_>, Inaccessible> {
        let start = self.mapping.place(offset_bytes, len_bytes)?;
        // SAFETY: `place` checked the range, which is mapped as long as `self` is borrowed.
        Ok(unsafe { Bytes::new(start, len_bytes) })
    }

    /// Passes a range to a closure. If the closure reads a byte that cannot be accessed, returns an
    /// error and drops the closure's result. `file` is the mapped file.
    pub fn guarded<T>(
        &self,
        file: BorrowedFd<'_>,
        offset_bytes: usize,
        len_bytes: usize,
        access: impl FnOnce(Bytes<'_>) -> T,
    ) -> Result<T, Inaccessible> {
        let bytes = self.bytes(offset_bytes, len_bytes)?;
        let base = self.mapping.address().addr();
        let start = base + offset_bytes;
        let map_again = |replaced: Range<usize>| {
            self.mapping.map(file, replaced.start - base..replaced.end - base).is_ok()
        };
        let replaceable = &self.mapping.replaceable;
        let outcome = replaceable.guarded(start..start + len_bytes, map_again, || access(bytes));
        outcome.map_err(|_| Inaccessible)
    }

    /// Copies bytes out; bytes that change concurrently may be torn.
    pub fn read(&self, offset_bytes: usize, target: &mut [u8]) -> Result<(), Inaccessible> {
        let source = self.mapping.place(offset_bytes, target.len())?;
        // SAFETY: `place` checked the range.
        let copied = unsafe { self.mapping.replaceable.try_copy(source, target) };
        copied.then_some(()).ok_or(Inaccessible)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    const PAGE: usize = SMALL_PAGE_BYTES;

    fn file_of(pages: u8) -> std::fs::File {
        let file = tempfile::tempfile().unwrap();
        for page in 0..pages {
            file.write_all_at(&[page; PAGE], u64::from(page) * PAGE as u64).unwrap();
        }
        file
    }

    fn piece(page: usize, pages: usize) -> StitchPiece {
        StitchPiece::File { offset_bytes: (page * PAGE) as u64, len_bytes: pages * PAGE }
    }

    #[test]
    fn pieces_lie_one_behind_the_other() {
        let file = file_of(6);
        let stitcher = Stitcher::new();
        let pieces = vec![piece(4, 2), StitchPiece::Zeros { len_bytes: PAGE }, piece(1, 1)];
        let stitched = stitcher.stitch(file.as_fd(), pieces, true).unwrap();
        let pages = |stitched: &Stitched| -> Vec<u8> {
            let bytes = stitched.bytes(0, stitched.len_bytes()).unwrap();
            (0..4).map(|page| bytes.get::<u8>(page * PAGE + 7)).collect()
        };
        assert_eq!(pages(&stitched), [4, 5, 0, 1]);
        let across = stitched.bytes(PAGE - 2, 4).unwrap().as_ptr().cast_mut();
        // SAFETY: inside the writable mapping; no other code accesses these bytes.
        unsafe { across.write_bytes(9, 4) };
        let mut bytes = [0; 6];
        file.read_exact_at(&mut bytes, 5 * PAGE as u64 - 3).unwrap();
        assert_eq!(bytes, [4, 9, 9, 9, 9, 5]);
        assert_eq!(stitched.read(4 * PAGE - 1, &mut [0; 2]), Err(Inaccessible));
        drop(stitched);
        stitcher.heap.unmap_now();
        assert_eq!(stitcher.heap.stats().live, 0);
    }

    #[test]
    fn a_page_that_is_gone_is_an_error_and_is_there_again_when_it_is_back() {
        let file = file_of(4);
        let stitched =
            Stitcher::new().stitch(file.as_fd(), vec![piece(3, 1), piece(0, 1)], false).unwrap();
        file.set_len(PAGE as u64).unwrap();
        let look = |bytes: Bytes<'_>| (bytes.get::<u8>(0), bytes.get::<u8>(PAGE));
        assert_eq!(stitched.guarded(file.as_fd(), 0, 2 * PAGE, look), Err(Inaccessible));
        assert_eq!(stitched.read(0, &mut [0]), Err(Inaccessible));
        assert_eq!(stitched.guarded(file.as_fd(), PAGE, 1, |bytes| bytes.get::<u8>(0)), Ok(0));
        file.write_all_at(&[8; PAGE], 3 * PAGE as u64).unwrap();
        assert_eq!(stitched.guarded(file.as_fd(), 0, 2 * PAGE, look), Ok((8, 0)));
    }

    /// Each piece is a mapping and counts towards the budget.
    #[test]
    fn mappings_are_counted_until_they_are_gone() {
        let file = file_of(2);
        let vmas = Arc::new(VmaBudget::new(40));
        let stitcher = Stitcher { heap: Heap::new(Unmap::default(), vmas.clone()) };
        let many = |count: usize| (0..count).map(|index| piece(index % 2, 1)).collect::<Vec<_>>();
        let refused = stitcher.stitch(file.as_fd(), many(41), false);
        assert!(matches!(refused, Err(StitchError::TooManyMappings { pieces: 41, .. })));
        let before = vmas.used();
        let stitched = stitcher.stitch(file.as_fd(), many(20), false).unwrap();
        assert!(vmas.used() >= before + 20);
        drop(stitched);
        stitcher.heap.unmap_now();
        assert!(vmas.used() < 20, "{}", vmas.used());
    }
}
