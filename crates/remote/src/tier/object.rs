//! One version of one object in a tier, as one user of the tier has it open.
//!
//! Reading is async-signal-safe: it makes system calls on an open file and hashes, allocates nothing, takes no lock,
//! and touches no mapped file, so a truncated one is a short read.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use aquifer_sys::clock;
use aquifer_sys::io::{read_at, reopen, start_write_back, write_all_at};
use aquifer_sys::lock::{self, LockKind, LockRange};
use aquifer_vm::NotInherited;
use rustix::fs::{Advice, FallocateFlags, SeekFrom, fadvise, fallocate};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use zerocopy::{FromZeros, IntoBytes};

use super::TierError;
use super::directory::{Directory, LOCK_PATIENCE, wait_for_lock};
#[cfg(test)]
use super::hooks::{Change, Mutant};
use super::layout::{
    BLOCK_BYTES, COLD, EMPTY, Geometry, HOT, Header, Key, PROOF_BYTES, SUB_BLOCK_BYTES,
};

/// Held shared by each opener; eviction removes a file that it can lock exclusively.
const PRESENCE: LockRange = LockRange::byte(0);
/// How long eviction and lists wait for a file that another process is removing; then they leave it out.
const REMOVAL_PATIENCE: Duration = Duration::from_millis(100);
/// Leases are locks of the bytes from here on, one per sub-block. No file is as long.
const LEASES_AT: u64 = 1 << 60;
/// Sub-blocks of which a part is copied out of the stack.
const PART_SUB_BLOCKS: u64 = 2;
/// Proofs read at a time, to the stack.
const PROOFS_AT_ONCE: usize = 64;
/// Proofs kept in memory, at most: those of 1 GiB, in 6 MiB.
const KNOWN_PROOFS: u64 = 1 << 18;
const PRESENT_AT_ONCE: u64 = 1 << 16;
/// Proofs of longer objects (4 GiB have 16 MiB) are read when they are needed.
const PROOFS_AT_OPENING_BYTES: u64 = 64 << 20;
/// A block is marked as used at most once in this time.
const MARKING_PERIOD_NS: i64 = 10_000_000_000;
/// Words of marks, at most: enough for 256 GiB; blocks of longer objects share them.
const MOST_MARK_WORDS: u64 = 1 << 16;

pub(super) struct ObjectFile {
    pub key: Key,
    pub geometry: Geometry,
    /// Before the file, so that it is dropped first.
    _not_inherited: NotInherited,
    /// The same file, for data: so that reads of proofs do not end the kernel's reading ahead.
    data: OwnedFd,
    file: File,
    directory: Directory,
    marks: Marks,
    known: Known,
    /// Sub-blocks that this opener has leased: its threads do not exclude each other by locks.
    leased: Mutex<Vec<Range<u64>>>,
}

impl ObjectFile {
    /// Opens the file of an object's version, or makes it. A damaged header, as a crash may leave it, is written again:
    /// each opener would write the same, and the rest has its proofs. A whole one of another object is refused: no crash
    /// leaves it, and what the file has may be in use.
    pub fn open(
        directory: &Directory,
        url: &str,
        etag: &str,
        len_bytes: u64,
    ) -> Result<ObjectFile, TierError> {
        let key = Key::of(url, etag, len_bytes);
        let failed =
            |error| TierError::system(&directory.path_of(key), "cannot hold the object", error);
        let geometry = Geometry { len_bytes };
        if len_bytes > Geometry::LONGEST_BYTES || geometry.file_bytes() > longest_file_bytes() {
            return Err(failed(io::ErrorKind::FileTooLarge.into()));
        }
        let header = Header::new(url, etag, len_bytes);
        let object = loop {
            let file = directory.file_or_new(&key.file_name(), |file| {
                write_all_at(file, header.as_bytes(), 0)?;
                Ok(rustix::fs::ftruncate(file, geometry.file_bytes())?)
            })?;
            let object = Self::of(directory, key, geometry, file, LOCK_PATIENCE)?;
            if let Some(object) = object {
                break object;
            }
            // Removed meanwhile.
        };
        let found = object.header().map_err(failed)?;
        if found.as_bytes() != header.as_bytes() {
            if found.is_valid() {
                let (path, reason) = (directory.path_of(key), "its header is that of another file");
                return Err(TierError::Damaged { path, reason });
            }
            object.store(header.as_bytes(), 0).map_err(failed)?;
        }
        if object.file.metadata().map_err(failed)?.len() < geometry.file_bytes() {
            object.extend().map_err(failed)?;
        }
        Ok(object)
    }

    /// Opens the file of a key, if it exists.
    pub fn existing(directory: &Directory, key: Key) -> Result<Option<ObjectFile>, TierError> {
        let Some(mut object) = Self::unchecked(directory, key)? else { return Ok(None) };
        let path = directory.path_of(key);
        let header = object.header();
        let header = header.map_err(|error| TierError::system(&path, "cannot read", error))?;
        header.check(key).map_err(|reason| TierError::Damaged { path, reason })?;
        object.geometry = Geometry { len_bytes: header.len_bytes() };
        Ok(Some(object))
    }

    /// Removes the file of a key, if no opener has it; returns the bytes that it took.
    pub fn remove_damaged(directory: &Directory, key: Key) -> Result<u64, TierError> {
        Self::unchecked(directory, key)?.map_or(Ok(0), |object| object.remove_unused())
    }

    fn unchecked(directory: &Directory, key: Key) -> Result<Option<ObjectFile>, TierError> {
        let nothing = Geometry { len_bytes: 0 };
        match directory.file(&key.file_name()) {
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
            Ok(file) => Self::of(directory, key, nothing, file, REMOVAL_PATIENCE),
        }
    }

    /// Notes that the file is in use; none if it was removed.
    fn of(
        directory: &Directory,
        key: Key,
        geometry: Geometry,
        file: File,
        patience: Duration,
    ) -> Result<Option<ObjectFile>, TierError> {
        let object = ObjectFile {
            key,
            geometry,
            _not_inherited: NotInherited::new(file.as_fd()),
            data: reopen(file.as_fd(), rustix::fs::OFlags::RDONLY.bits() as i32).map_err(
                |error| TierError::system(&directory.path_of(key), "cannot open", error),
            )?,
            file,
            directory: directory.clone(),
            // For devices: of an unchecked file the geometry is empty, and so are its marks.
            marks: Marks::new(geometry.blocks()),
            known: Known::new(geometry.sub_blocks()),
            leased: Mutex::default(),
        };
        let failed = |error| TierError::system(&directory.path_of(key), "cannot lock", error);
        // Held exclusively for a moment only, by eviction.
        let path = directory.path_of(key);
        wait_for_lock(&object.file, &path, PRESENCE, LockKind::Shared, patience)?;
        Ok((!object.is_removed().map_err(failed)?).then_some(object))
    }

    /// Whether the file has lost its name: what is written to it would serve no other opener, and count nowhere.
    pub fn is_removed(&self) -> io::Result<bool> {
        Ok(self.file.metadata()?.nlink() == 0)
    }

    /// Writes to the file: all of its changes but holes go through here.
    fn store(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        #[cfg(test)]
        let _order = self.note(Change::Write { at, bytes: bytes.to_vec() });
        write_all_at(self.file.as_fd(), bytes, at)
    }

    /// Gives the file its full length.
    fn extend(&self) -> io::Result<()> {
        let len = self.geometry.file_bytes();
        #[cfg(test)]
        let _order = self.note(Change::Extend { len });
        Ok(rustix::fs::ftruncate(&self.file, len)?)
    }

    #[cfg(test)]
    fn note(&self, change: Change) -> impl Drop {
        self.directory.hooks.note(&self.key.file_name(), change)
    }

    pub fn header(&self) -> io::Result<Header> {
        let mut header = Header::new_zeroed();
        read_at(self.file.as_fd(), header.as_mut_bytes(), 0)?;
        Ok(header)
    }

    /// Bytes that the file takes on its disk.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * 512)
    }

    /// Reads a range of the object, if all of it is there; otherwise `to` may hold anything. Async-signal-safe.
    pub fn read(&self, start: u64, to: &mut [u8]) -> bool {
        let Some(end) = start.checked_add(to.len() as u64) else { return false };
        if end > self.geometry.len_bytes {
            return false;
        }
        let (mut at, mut rest) = (start, to);
        // Such as a row: at once.
        let touched = self.geometry.touched(start..end);
        let whole = self.geometry.bytes_of(touched.clone());
        if touched.end - touched.start <= PART_SUB_BLOCKS && whole != (start..end) {
            if !self.read_part(touched, (start - whole.start) as usize, rest) {
                return false;
            }
            rest = &mut [];
        }
        while !rest.is_empty() {
            let sub_block = at / SUB_BLOCK_BYTES;
            let whole = self.geometry.bytes_of(sub_block..sub_block + 1);
            let first_bytes = (whole.end - whole.start) as usize;
            let done = if at == whole.start && rest.len() >= first_bytes {
                let most = (PROOFS_AT_ONCE as u64 * SUB_BLOCK_BYTES).min(rest.len() as u64);
                // Only whole sub-blocks; the last one of the object is whole when it reaches the object's end.
                let range_end = at + most;
                let last = if range_end == self.geometry.len_bytes {
                    range_end.div_ceil(SUB_BLOCK_BYTES)
                } else {
                    range_end / SUB_BLOCK_BYTES
                };
                let bytes = self.geometry.bytes_of(sub_block..last);
                let len_bytes = (bytes.end - bytes.start) as usize;
                if !self.read_whole(sub_block..last, &mut rest[..len_bytes]) {
                    return false;
                }
                len_bytes
            } else {
                let skip = (at - whole.start) as usize;
                let len_bytes = (first_bytes - skip).min(rest.len());
                if !self.read_part(sub_block..sub_block + 1, skip, &mut rest[..len_bytes]) {
                    return false;
                }
                len_bytes
            };
            at += done as u64;
            rest = &mut rest[done..];
        }
        self.mark_used(start..end);
        true
    }

    /// Reads what is behind the first `skip` bytes of at most [`PART_SUB_BLOCKS`].
    #[inline(never)]
    fn read_part(&self, sub_blocks: Range<u64>, skip: usize, to: &mut [u8]) -> bool {
        let mut whole = [0; (PART_SUB_BLOCKS * SUB_BLOCK_BYTES) as usize];
        let range = self.geometry.bytes_of(sub_blocks.clone());
        let is_there =
            self.read_whole(sub_blocks, &mut whole[..(range.end - range.start) as usize]);
        if is_there {
            to.copy_from_slice(&whole[skip..skip + to.len()]);
        }
        is_there
    }

    /// Reads whole sub-blocks, at most [`PROOFS_AT_ONCE`], and checks each after it was copied.
    #[inline(never)]
    fn read_whole(&self, sub_blocks: Range<u64>, to: &mut [u8]) -> bool {
        let mut proofs = [0; PROOFS_AT_ONCE];
        let count = (sub_blocks.end - sub_blocks.start) as usize;
        let proofs = &mut proofs[..count];
        // What is known may have been evicted since: then the file's proofs tell.
        (self.known.get(sub_blocks.start, proofs) && self.read_as(sub_blocks.clone(), to, proofs))
            || (self.learn_proofs(sub_blocks.start, proofs) && self.read_as(sub_blocks, to, proofs))
    }

    fn read_as(&self, sub_blocks: Range<u64>, to: &mut [u8], proofs: &[u128]) -> bool {
        let at = self.geometry.data_at() + sub_blocks.start * SUB_BLOCK_BYTES;
        if read_at(self.data.as_fd(), to, at).ok() != Some(to.len()) {
            return false;
        }
        let parts = to.chunks(SUB_BLOCK_BYTES as usize);
        sub_blocks
            .zip(parts.zip(proofs))
            .all(|(sub_block, (part, proof))| self.is_right(sub_block, part, *proof))
    }

    fn is_right(&self, sub_block: u64, bytes: &[u8], proof: u128) -> bool {
        #[cfg(test)]
        if self.directory.hooks.has(Mutant::Unchecked) {
            return true;
        }
        self.proof(sub_block, bytes) == proof
    }

    fn proof(&self, sub_block: u64, bytes: &[u8]) -> u128 {
        #[cfg(test)]
        if let Some(proof) = self.directory.hooks.proof(self.key, sub_block, bytes) {
            return proof;
        }
        self.key.proof(sub_block, bytes)
    }

    fn read_proofs(&self, first: u64, proofs: &mut [u128]) -> bool {
        let bytes = proofs.as_mut_bytes();
        let at = self.geometry.proof_at(first);
        read_at(self.file.as_fd(), bytes, at).ok() == Some(bytes.len())
    }

    /// Reads proofs, and remembers them; whether there are all.
    fn learn_proofs(&self, first: u64, proofs: &mut [u128]) -> bool {
        let are_read = self.read_proofs(first, proofs);
        if are_read {
            self.known.put(first, proofs);
        }
        are_read && !proofs.contains(&0)
    }

    /// Which of these sub-blocks have a proof.
    pub fn present(&self, sub_blocks: Range<u64>) -> Vec<bool> {
        let mut proofs = vec![0; (sub_blocks.end - sub_blocks.start) as usize];
        if !self.read_proofs(sub_blocks.start, &mut proofs) {
            proofs.fill(0);
        }
        proofs.iter().map(|&proof| proof != 0).collect()
    }

    /// Whether the file has all proofs of a range now.
    pub fn is_in_file(&self, range: Range<u64>) -> bool {
        !self.present(self.geometry.touched(range)).contains(&false)
    }

    /// Whether a range seems to be there. It was there once; it may have been evicted since.
    pub fn has(&self, range: Range<u64>) -> bool {
        let touched = self.geometry.touched(range);
        let mut proofs = [0; PROOFS_AT_ONCE];
        let mut at = touched.start;
        while at < touched.end {
            let count = (touched.end - at).min(PROOFS_AT_ONCE as u64) as usize;
            let proofs = &mut proofs[..count];
            if !self.known.get(at, proofs) && !self.learn_proofs(at, proofs) {
                return false;
            }
            at += count as u64;
        }
        true
    }

    /// Starts reading a range from the disk.
    pub fn prefetch(&self, range: Range<u64>) {
        let bytes = self.geometry.bytes_of(self.geometry.touched(range));
        self.advise(self.geometry.data_at() + bytes.start, bytes.end - bytes.start);
    }

    /// Starts reading the proofs, so that a read from a cold disk does not wait twice.
    pub fn prefetch_proofs(&self) {
        let at = self.geometry.proof_at(0);
        let len_bytes = self.geometry.data_at() - at;
        if len_bytes <= PROOFS_AT_OPENING_BYTES {
            self.advise(at, len_bytes);
        }
    }

    fn advise(&self, at: u64, len_bytes: u64) {
        // A hint. A length of 0 would mean all that follows.
        if let Some(len_bytes) = std::num::NonZeroU64::new(len_bytes) {
            let _ = fadvise(&self.data, at, Some(len_bytes), Advice::WillNeed);
        }
    }

    /// Asks the disk to write what was stored, without waiting for it. Nothing depends on that.
    pub fn start_write_back(&self) {
        let _ =
            start_write_back(self.data.as_fd(), self.geometry.data_at(), self.geometry.len_bytes);
    }

    /// Stores whole sub-blocks: bytes first, then their proofs. The caller holds their lease.
    pub fn write(&self, sub_blocks: Range<u64>, bytes: &[u8]) -> io::Result<()> {
        // At first, so that eviction finds what a process leaves that is killed here.
        self.write_states(self.blocks_of(self.geometry.bytes_of(sub_blocks.clone())), HOT)?;
        let data_at = self.geometry.data_at() + sub_blocks.start * SUB_BLOCK_BYTES;
        let parts = sub_blocks.clone().zip(bytes.chunks(SUB_BLOCK_BYTES as usize));
        let proofs: Vec<u128> =
            parts.map(|(sub_block, part)| self.proof(sub_block, part)).collect();
        let proofs_at = self.geometry.proof_at(sub_blocks.start);
        #[cfg(test)]
        if self.directory.hooks.has(Mutant::ProofsFirst) {
            self.store(proofs.as_bytes(), proofs_at)?;
        }
        self.store(bytes, data_at)?;
        self.store(proofs.as_bytes(), proofs_at)
    }

    fn blocks_of(&self, range: Range<u64>) -> Range<u64> {
        range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES)
    }

    fn write_states(&self, blocks: Range<u64>, state: u8) -> io::Result<()> {
        let states = [state; 256];
        let mut at = blocks.start;
        while at < blocks.end {
            let count = (blocks.end - at).min(states.len() as u64);
            let to = Geometry::STATES_AT + at;
            self.store(&states[..count as usize], to)?;
            at += count;
        }
        Ok(())
    }

    fn mark_used(&self, range: Range<u64>) {
        let blocks = self.blocks_of(range);
        let end = Geometry::STATES_AT + blocks.end;
        if !self.marks.are_new(blocks.clone()) || end > longest_file_bytes() {
            return;
        }
        // Most have their mark since they were written, and a look costs a third of a write.
        let mut states = [COLD; 16];
        let count = (blocks.end - blocks.start).min(states.len() as u64) as usize;
        let at = Geometry::STATES_AT + blocks.start;
        let is_known = read_at(self.file.as_fd(), &mut states[..count], at).is_ok();
        if !is_known
            || count as u64 != blocks.end - blocks.start
            || states[..count] != [HOT; 16][..count]
        {
            // A lost mark costs an early eviction.
            let _ = self.write_states(blocks, HOT);
        }
    }

    /// Leases sub-blocks: no other opener, and no other thread of this one, holds a lease of any of them.
    pub fn try_lease(&self, sub_blocks: Range<u64>) -> io::Result<bool> {
        let mut leased = self.leased.lock().unwrap_or_else(PoisonError::into_inner);
        let is_taken =
            |held: &Range<u64>| held.start < sub_blocks.end && sub_blocks.start < held.end;
        if leased.iter().any(is_taken) {
            return Ok(false);
        }
        let is_free =
            lock::try_lock(self.file.as_fd(), lease_range(&sub_blocks), LockKind::Exclusive)?;
        if is_free {
            leased.push(sub_blocks);
        }
        Ok(is_free)
    }

    pub fn end_lease(&self, sub_blocks: &Range<u64>) {
        let mut leased = self.leased.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = leased.iter().position(|held| held == sub_blocks) {
            leased.swap_remove(place);
            let _ = lock::unlock(self.file.as_fd(), lease_range(sub_blocks));
        }
    }

    /// The states of blocks, from `first` or from behind a hole of the file on: which blocks, none at the end.
    pub fn states(&self, first: u64, states: &mut [u8]) -> io::Result<Range<u64>> {
        let end = Geometry::STATES_AT + self.geometry.blocks();
        let from = Geometry::STATES_AT.saturating_add(first);
        let Some(data) = self.next_data(from..end)? else { return Ok(first..first) };
        let most = (data.end - data.start).min(states.len() as u64) as usize;
        let count = read_at(self.file.as_fd(), &mut states[..most], data.start)?;
        let first = data.start - Geometry::STATES_AT;
        Ok(first..first + count as u64)
    }

    /// Takes away a block's mark of use.
    pub fn cool(&self, block: u64) -> io::Result<()> {
        self.write_states(block..block + 1, COLD)
    }

    /// Drops a block, unless a part of it is leased: proofs first, so that a reader of the hole finds none, or one
    /// that its copy does not match. Returns how many bytes it took, or `None` if it is leased.
    pub fn evict(&self, block: u64) -> io::Result<Option<u64>> {
        let sub_blocks = self.geometry.of_block(block);
        if !self.try_lease(sub_blocks.clone())? {
            return Ok(None);
        }
        let evicted = self.evict_leased(block, &sub_blocks);
        self.end_lease(&sub_blocks);
        evicted.map(Some)
    }

    fn evict_leased(&self, block: u64, sub_blocks: &Range<u64>) -> io::Result<u64> {
        let nothing = [0; (BLOCK_BYTES / SUB_BLOCK_BYTES * PROOF_BYTES) as usize];
        let proofs_bytes = (sub_blocks.end - sub_blocks.start) * PROOF_BYTES;
        let nothing = &nothing[..proofs_bytes as usize];
        #[cfg(test)]
        let nothing = if self.directory.hooks.has(Mutant::KeepProofs) { &[] } else { nothing };
        self.store(nothing, self.geometry.proof_at(sub_blocks.start))?;
        let at = self.geometry.data_at() + block * BLOCK_BYTES;
        let mut freed_bytes = 0;
        self.for_data(at..at + BLOCK_BYTES, |data| {
            freed_bytes += data.end - data.start;
            Ok(())
        })?;
        {
            #[cfg(test)]
            let _order = self.note(Change::Hole { at, len: BLOCK_BYTES });
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&self.file, flags, at, BLOCK_BYTES)?;
        }
        self.write_states(block..block + 1, EMPTY)?;
        Ok(freed_bytes)
    }

    #[cfg(test)]
    pub fn has_data(&self) -> bool {
        let data = self.geometry.data_at()..self.geometry.file_bytes();
        self.next_data(data).unwrap().is_some()
    }

    /// Drops all blocks that are not leased.
    pub fn evict_all(&self) -> io::Result<()> {
        self.for_data(self.geometry.data_at()..self.geometry.file_bytes(), |data| {
            for block in self.blocks_at(data) {
                self.evict(block)?;
            }
            Ok(())
        })
    }

    /// Gives blocks with data but without a state one: a crash may have lost it.
    pub fn repair_states(&self) -> io::Result<()> {
        self.for_data(self.geometry.data_at()..self.geometry.file_bytes(), |data| {
            for block in self.blocks_at(data) {
                let mut state = [EMPTY];
                let is_known = self.states(block, &mut state)? == (block..block + 1);
                if !is_known || !matches!(state[0], COLD | HOT) {
                    self.cool(block)?;
                }
            }
            Ok(())
        })
    }

    /// The blocks at a place of the file.
    fn blocks_at(&self, place: Range<u64>) -> Range<u64> {
        let data_at = self.geometry.data_at();
        self.blocks_of(place.start - data_at..place.end - data_at)
    }

    /// Visits the sub-blocks that have a proof, with their length in bytes.
    pub fn for_present(&self, mut visit: impl FnMut(u64, u64)) -> io::Result<()> {
        let (start, end) = (self.geometry.proofs_at(), self.geometry.proofs_end());
        self.for_data(start..end, |data| {
            let last = (data.end - start).div_ceil(PROOF_BYTES);
            let mut at = (data.start - start) / PROOF_BYTES;
            while at < last {
                let end = (at + PRESENT_AT_ONCE).min(last);
                for (sub_block, is_present) in (at..).zip(self.present(at..end)) {
                    if is_present {
                        let bytes = self.geometry.bytes_of(sub_block..sub_block + 1);
                        visit(sub_block, bytes.end - bytes.start);
                    }
                }
                at = end;
            }
            Ok(())
        })
    }

    /// Visits the parts of a range of the file that are not holes.
    fn for_data(
        &self,
        range: Range<u64>,
        mut visit: impl FnMut(Range<u64>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut at = range.start;
        while let Some(data) = self.next_data(at..range.end)? {
            at = data.end;
            visit(data)?;
        }
        Ok(())
    }

    /// The first part of a range of the file that is not a hole.
    fn next_data(&self, range: Range<u64>) -> io::Result<Option<Range<u64>>> {
        if range.is_empty() {
            return Ok(None);
        }
        let start = match rustix::fs::seek(&self.file, SeekFrom::Data(range.start)) {
            Err(Errno::NXIO) => return Ok(None),
            start => start?,
        };
        if start >= range.end {
            return Ok(None);
        }
        match rustix::fs::seek(&self.file, SeekFrom::Hole(start)) {
            // Truncated meanwhile.
            Err(Errno::NXIO) => Ok(None),
            // A file that changes may have a hole there by now.
            hole => Ok(Some(start..hole?.clamp(start + 1, range.end))),
        }
    }

    /// Removes the file, if no other opener has it; returns the bytes that it took.
    pub fn remove_unused(&self) -> Result<u64, TierError> {
        let failed =
            |error| TierError::system(&self.directory.path_of(self.key), "cannot remove", error);
        let is_alone = lock::try_lock(self.file.as_fd(), PRESENCE, LockKind::Exclusive);
        if !is_alone.map_err(failed)? {
            return Ok(0);
        }
        let bytes = self.allocated_bytes().map_err(failed)?;
        self.directory.remove(self.key)?;
        Ok(bytes)
    }
}

/// The process's limit (`RLIMIT_FSIZE`): beyond it a write is a signal that ends the process.
fn longest_file_bytes() -> u64 {
    getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX)
}

fn lease_range(sub_blocks: &Range<u64>) -> LockRange {
    LockRange {
        offset_bytes: LEASES_AT + sub_blocks.start,
        len_bytes: sub_blocks.end - sub_blocks.start,
    }
}

/// Proofs that this opener has read: those of a version do not change, so they save system calls. The sub-block may have
/// been evicted since, and then the bytes are others.
struct Known {
    /// A sub-block's number plus one, and its proof, at the number modulo the length.
    slots: Box<[[AtomicU64; 3]]>,
}

impl Known {
    fn new(sub_blocks: u64) -> Known {
        // Zeros that take memory when they are used.
        let slots = FromZeros::new_box_zeroed_with_elems(sub_blocks.min(KNOWN_PROOFS) as usize);
        Known { slots: slots.unwrap_or_default() }
    }

    fn slot(&self, sub_block: u64) -> Option<&[AtomicU64; 3]> {
        Some(&self.slots[sub_block.checked_rem(self.slots.len() as u64)? as usize])
    }

    /// Copies proofs; false if not all are known. Relaxed throughout, and async-signal-safe: parts of two proofs are the
    /// proof of nothing.
    fn get(&self, first: u64, proofs: &mut [u128]) -> bool {
        (first..).zip(proofs).all(|(sub_block, proof)| {
            let Some([number, low, high]) = self.slot(sub_block) else { return false };
            let (low, high) = (low.load(Ordering::Relaxed), high.load(Ordering::Relaxed));
            *proof = u128::from(high) << 64 | u128::from(low);
            number.load(Ordering::Relaxed) == sub_block + 1 && *proof != 0
        })
    }

    /// Remembers proofs; a zero is that of an absent sub-block. Async-signal-safe.
    fn put(&self, first: u64, proofs: &[u128]) {
        for (sub_block, &proof) in (first..).zip(proofs) {
            let Some([number, low, high]) = self.slot(sub_block) else { return };
            number.store(sub_block + 1, Ordering::Relaxed);
            low.store(proof as u64, Ordering::Relaxed);
            high.store((proof >> 64) as u64, Ordering::Relaxed);
        }
    }
}

/// Which blocks this opener has marked as used lately.
struct Marks {
    bits: Box<[AtomicU64]>,
    since_ns: AtomicI64,
}

impl Marks {
    fn new(blocks: u64) -> Marks {
        let words = blocks.div_ceil(64).min(MOST_MARK_WORDS) as usize;
        Marks {
            bits: (0..words).map(|_| AtomicU64::new(0)).collect(),
            since_ns: AtomicI64::new(clock::coarse_ns()),
        }
    }

    /// Notes blocks; whether any was not noted. Relaxed throughout: hints. Async-signal-safe.
    fn are_new(&self, blocks: Range<u64>) -> bool {
        let now_ns = clock::coarse_ns();
        let since_ns = self.since_ns.load(Ordering::Relaxed);
        if now_ns.saturating_sub(since_ns) > MARKING_PERIOD_NS {
            self.since_ns.store(now_ns, Ordering::Relaxed);
            for word in &self.bits {
                word.store(0, Ordering::Relaxed);
            }
        }
        let mut are_new = false;
        for block in blocks {
            let Some(word) = (block / 64).checked_rem(self.bits.len() as u64) else { break };
            let word = &self.bits[word as usize];
            let bit = 1 << (block % 64);
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
                are_new = true;
            }
        }
        are_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_of_any_object_fit_in_memory() {
        let marks = Marks::new(Geometry { len_bytes: Geometry::LONGEST_BYTES }.blocks());
        assert!(marks.bits.len() <= 1 << 16);
        let last = Geometry::LONGEST_BYTES / BLOCK_BYTES - 1;
        assert!(marks.are_new(last..last + 1));
        assert!(!marks.are_new(last..last + 1));
        assert!(!Marks::new(0).are_new(0..1));
    }
}
