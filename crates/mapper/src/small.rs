//! Small files when there is no room for more mappings: read, packed, into memory that many share.
//!
//! ```text
//!  pack, 2 MiB │ file │ file  │ a larger file        │ file │ not used yet │
//!                 ▲      ▲                              ▲
//!              Snapshot  Snapshot                    Snapshot        each keeps the pack
//! ```
//!
//! A process may have 65,530 mappings, and a program that maps a source tree has more files. Up to 64 KiB of a file are
//! then read instead (2.9 µs for 3,000 bytes, against 12 for a mapping and its first fault): a view of them shows what
//! was there when it was made. Larger ranges are refused, as a program that maps them does not expect them to take
//! memory of their own.
//!
//! A pack is unmapped when its last view is dropped: one view that stays keeps 2 MiB. Packs are anonymous memory, side
//! by side as the kernel places them, and count as few mappings. A child of a fork does not get them.
//!
//! Lock order: the lock of the open pack is a leaf, and not held while a file is read.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_sys::futex::Mutex;
use aquifer_sys::memory::{self, Advice};
use aquifer_sys::residency;

use super::error::{FaultCause, MapError, Result};
use aquifer_vm::Bytes;

/// More of one file is not read.
const LARGEST_BYTES: u64 = 64 << 10;
const PACK_BYTES: usize = 2 << 20;
/// Where a file may begin in a pack: at a cache line.
const ALIGNMENT: usize = 64;

/// Whether a range that could not be mapped for this reason is read.
pub(crate) fn serves(error: &MapError, range: &Range<u64>) -> bool {
    let is_full = match error {
        MapError::TooManyMappings { .. } => true,
        // The program itself has used up the mappings.
        MapError::Map { source, .. } => source.raw_os_error() == Some(libc::ENOMEM),
        _ => false,
    };
    is_full && range.end - range.start <= LARGEST_BYTES
}

/// Memory for small files.
#[derive(Default)]
pub(crate) struct Packs {
    open: Mutex<Option<Open>>,
    /// Of all packs there are.
    bytes: Arc<AtomicU64>,
}

/// The pack that has room.
struct Open {
    pack: Arc<Pack>,
    used_bytes: usize,
}

struct Pack {
    start: *mut u8,
    bytes: Arc<AtomicU64>,
}

// SAFETY: the address of memory that is written by who took room in it, and only read once a snapshot was made of that.
unsafe impl Send for Pack {}
// SAFETY: as above.
unsafe impl Sync for Pack {}

/// Bytes of a file as they were.
pub(crate) struct Snapshot {
    pack: Arc<Pack>,
    start: usize,
    /// Bytes of the file.
    range: Range<u64>,
}

impl Packs {
    /// Reads a range of a file, or what there is of it by now.
    pub fn read(&self, file: &File, path: &Path, range: Range<u64>) -> Result<Snapshot> {
        let len = (range.end - range.start) as usize;
        let (pack, start) = self.take(len).map_err(|source| MapError::Map {
            path: path.to_owned(),
            len_bytes: len as u64,
            source,
        })?;
        // SAFETY: room that was taken for this, initialised as fresh memory is, and known to nobody else.
        let target = unsafe { std::slice::from_raw_parts_mut(pack.start.add(start), len) };
        let got = residency::read_at(file.as_fd(), target, range.start).map_err(|error| {
            let cause = FaultCause::Io(error.raw_os_error().unwrap_or(libc::EIO));
            MapError::Fault { path: path.to_owned(), offset_bytes: range.start, cause }
        })?;
        Ok(Snapshot { pack, start, range: range.start..range.start + got as u64 })
    }

    /// Room for so many bytes, and where in its pack.
    fn take(&self, len: usize) -> io::Result<(Arc<Pack>, usize)> {
        let mut slot = self.open.lock();
        if let Some(open) = &mut *slot {
            // Nobody has a view of it any more, and who had one is done with it: from its start again.
            if Arc::get_mut(&mut open.pack).is_some() {
                open.used_bytes = 0;
            }
            if let Some(taken) = open.take(len) {
                return Ok(taken);
            }
        }
        let pack = Arc::new(Pack::new(self.bytes.clone())?);
        let open = slot.insert(Open { pack, used_bytes: 0 });
        Ok(open.take(len).expect("a new pack has room for the largest file"))
    }

    /// What packs take.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Open {
    fn take(&mut self, len: usize) -> Option<(Arc<Pack>, usize)> {
        let start = self.used_bytes;
        let end = (start + len).next_multiple_of(ALIGNMENT);
        if end > PACK_BYTES {
            return None;
        }
        self.used_bytes = end;
        Some((self.pack.clone(), start))
    }
}

impl Pack {
    fn new(bytes: Arc<AtomicU64>) -> io::Result<Pack> {
        let start = memory::map_anonymous(PACK_BYTES)?;
        // Relaxed: statistics.
        bytes.fetch_add(PACK_BYTES as u64, Ordering::Relaxed);
        let pack = Pack { start, bytes };
        for advice in [Advice::DontFork, Advice::DontDump] {
            // SAFETY: fresh memory of this pack's.
            unsafe { memory::advise(pack.start, PACK_BYTES, advice) }?;
        }
        Ok(pack)
    }
}

impl Drop for Pack {
    fn drop(&mut self) {
        // SAFETY: this pack's memory, and no snapshot of it is left.
        let unmapped = unsafe { memory::unmap(self.start, PACK_BYTES) };
        if unmapped.is_err() {
            // At the limit of mappings, where the middle of a run cannot be taken out: the memory can.
            // SAFETY: as above.
            let _ = unsafe { memory::advise(self.start, PACK_BYTES, Advice::DontNeed) };
        }
        self.bytes.fetch_sub(PACK_BYTES as u64, Ordering::Relaxed);
    }
}

impl Snapshot {
    /// Bytes of the file that it has.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// A range of the file that lies inside.
    pub fn bytes(&self, range: &Range<u64>) -> Bytes<'_> {
        assert!(self.range.start <= range.start && range.end <= self.range.end);
        let at = self.start + (range.start - self.range.start) as usize;
        // SAFETY: inside the room that was taken for it, mapped as long as the pack is known.
        unsafe { Bytes::new(self.pack.start.add(at), (range.end - range.start) as usize) }
    }
}
