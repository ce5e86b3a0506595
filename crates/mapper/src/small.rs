//! Small files beyond the limit of mappings: read, packed, into memory that many files share.
//!
//! ```text
//!  pack, 2 MiB │ file │ file  │ a larger file        │ file │ not used yet │
//!                 ▲      ▲                              ▲
//!              Snapshot  Snapshot                    Snapshot        each keeps the pack
//! ```
//!
//! A process may have 65,530 mappings, and a program that maps a source tree has more files. Up to
//! 64 KiB of a file are then read instead (2.9 µs for 3,000 bytes, against 12 for a mapping and its
//! first fault): a view of them shows the bytes as they were when it was made. Larger ranges are
//! refused, because a program that maps them does not expect them to occupy anonymous memory.
//!
//! A pack is unmapped when its last view is dropped: one remaining view keeps 2 MiB. Packs are
//! anonymous memory, adjacent as the kernel places them, and count as few mappings. A forked child
//! does not inherit them.
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

/// Longest range of a file that is read.
const LARGEST_BYTES: u64 = 64 << 10;
const PACK_BYTES: usize = 2 << 20;
/// Where a file may begin in a pack: at a cache line.
const ALIGNMENT: usize = 64;

/// Whether a range whose mapping failed with `error` is read instead.
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
    /// Bytes of all existing packs.
    bytes: Arc<AtomicU64>,
}

/// The pack that new snapshots are placed in.
struct Open {
    pack: Arc<Pack>,
    used_bytes: usize,
}

struct Pack {
    start: *mut u8,
    bytes: Arc<AtomicU64>,
}

// SAFETY: room in the pack is written only by the thread that took it, and only read after its
// snapshot was made.
unsafe impl Send for Pack {}
// SAFETY: as above.
unsafe impl Sync for Pack {}

/// Bytes of a file as they were when they were read.
pub(crate) struct Snapshot {
    pack: Arc<Pack>,
    start: usize,
    /// Bytes of the file.
    range: Range<u64>,
}

impl Packs {
    /// Reads a range of a file, or the part of it that still exists.
    pub fn read(&self, file: &File, path: &Path, range: Range<u64>) -> Result<Snapshot> {
        let len = (range.end - range.start) as usize;
        let (pack, start) = self.take(len).map_err(|source| MapError::Map {
            path: path.to_owned(),
            len_bytes: len as u64,
            source,
        })?;
        // SAFETY: this room was taken for this call alone, and anonymous memory is initialised.
        let target = unsafe { std::slice::from_raw_parts_mut(pack.start.add(start), len) };
        let got = residency::read_at(file.as_fd(), target, range.start).map_err(|error| {
            let cause = FaultCause::Io(error.raw_os_error().unwrap_or(libc::EIO));
            MapError::Fault { path: path.to_owned(), offset_bytes: range.start, cause }
        })?;
        Ok(Snapshot { pack, start, range: range.start..range.start + got as u64 })
    }

    /// Reserves `len` bytes: the pack and the offset in it.
    fn take(&self, len: usize) -> io::Result<(Arc<Pack>, usize)> {
        let mut slot = self.open.lock();
        if let Some(open) = &mut *slot {
            // No snapshot refers to the pack any more: reuse it from its start.
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

    /// Memory that packs occupy.
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
            // SAFETY: fresh memory of this pack.
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
            // At the limit of mappings the middle of a VMA cannot be unmapped; free its memory
            // instead.
            // SAFETY: as above.
            let _ = unsafe { memory::advise(self.start, PACK_BYTES, Advice::DontNeed) };
        }
        self.bytes.fetch_sub(PACK_BYTES as u64, Ordering::Relaxed);
    }
}

impl Snapshot {
    /// The bytes of the file that it holds.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// The bytes of a range of the file, which must lie inside.
    pub fn bytes(&self, range: &Range<u64>) -> Bytes<'_> {
        assert!(self.range.start <= range.start && range.end <= self.range.end);
        let at = self.start + (range.start - self.range.start) as usize;
        // SAFETY: inside the snapshot's room, as asserted; mapped as long as `self` holds the pack.
        unsafe { Bytes::new(self.pack.start.add(at), (range.end - range.start) as usize) }
    }
}
