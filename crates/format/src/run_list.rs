//! Runs of a file that do not fit into its inode: a chain of slots.
//!
//! The runs of a file, those of its inode first and then those of the chain, are its pages in
//! order: its *file table*. A run that starts at page 0, where the superblock lies, is a hole of
//! that many pages. Pages after the last run are a hole as well.

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::FormatError;
use crate::run::{RawRun, Run};
use crate::slot_bytes::{SLOT_BYTES, SlotBytes, check, seal};

/// The magic of such a slot.
pub const MAGIC: [u8; 4] = *b"AQRN";
/// The most runs in one slot.
pub const LIST_RUNS: usize = 59;

/// One slot of the chain, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunList {
    /// Its slot.
    pub number: u64,
    /// The file.
    pub owner: u64,
    /// The slot with the following runs; 0 if there are none.
    pub next: u64,
    /// The runs, in order: at least one.
    pub runs: Vec<Run>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawList {
    magic: [u8; 4],
    count: U16,
    reserved: [u8; 2],
    number: U64,
    owner: U64,
    next: U64,
    runs: [RawRun; LIST_RUNS],
    checksum: U64,
}

const _: () = assert!(size_of::<RawList>() == SLOT_BYTES);

/// The file that such a slot belongs to.
pub(crate) fn owner(bytes: &SlotBytes) -> Option<u64> {
    RawList::ref_from_bytes(bytes).ok().map(|raw| raw.owner.get())
}

/// The byte range of the runs.
pub(crate) const RUNS_RANGE: std::ops::Range<usize> = {
    let start = std::mem::offset_of!(RawList, runs);
    start..start + LIST_RUNS * 8
};

/// Packs runs into the first of `places` and leaves the others unchanged.
pub(crate) fn pack(runs: &[Run], places: &mut [RawRun]) -> Result<(), FormatError> {
    if runs.len() > places.len() {
        return Err(FormatError::Field { field: "run count", value: runs.len() as u64 });
    }
    for (place, run) in places.iter_mut().zip(runs) {
        *place = RawRun::pack(*run)?;
    }
    Ok(())
}

/// Unpacks the first `count` places. Each must be canonical and not empty, and all other places
/// must be zero.
pub(crate) fn unpack(places: &[RawRun], count: usize) -> Result<Vec<Run>, FormatError> {
    let wrong = FormatError::Field { field: "runs", value: count as u64 };
    // All at once, without a branch for each: nearly always they are zero.
    let rest = places.get(count..).ok_or_else(|| wrong.clone())?.as_bytes();
    if rest.as_chunks::<8>().0.iter().fold(0, |any, run| any | u64::from_ne_bytes(*run)) != 0 {
        return Err(wrong);
    }
    if count == 0 {
        return Ok(Vec::new());
    }
    let runs: Vec<Run> = places[..count].iter().map(|run| run.unpack()).collect();
    let is_right = |(run, raw): (&Run, &RawRun)| !run.is_empty() && raw.is_canonical();
    if runs.iter().zip(places).all(is_right) { Ok(runs) } else { Err(wrong) }
}

impl RunList {
    /// Encodes it as bytes.
    ///
    /// # Errors
    /// [`FormatError::Field`] if there are too many runs, or none.
    pub fn encode(&self) -> Result<SlotBytes, FormatError> {
        let mut raw = RawList {
            magic: MAGIC,
            count: U16::new(self.runs.len() as u16),
            reserved: [0; 2],
            number: U64::new(self.number),
            owner: U64::new(self.owner),
            next: U64::new(self.next),
            runs: [RawRun::EMPTY; LIST_RUNS],
            checksum: U64::ZERO,
        };
        pack(&self.runs, &mut raw.runs)?;
        let mut bytes = [0; SLOT_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        seal(&mut bytes);
        Ok(bytes)
    }

    /// Decodes the list in slot `number`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &SlotBytes, number: u64) -> Result<RunList, FormatError> {
        check(bytes, MAGIC, number)?;
        let raw = RawList::ref_from_bytes(bytes).map_err(|_| FormatError::Short)?;
        let runs = unpack(&raw.runs, raw.count.get().into())?;
        if runs.is_empty() {
            return Err(FormatError::Field { field: "run count", value: 0 });
        }
        Ok(RunList { number, owner: raw.owner.get(), next: raw.next.get(), runs })
    }
}
