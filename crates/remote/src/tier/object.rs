//! One version of one object in a tier, as one user of the tier has it open.
//!
//! Reading is async-signal-safe: it makes system calls on an open file and hashes, allocates nothing, takes no lock,
//! and touches no mapped file, so a truncated one is a short read.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use aquifer_sys::clock;
use aquifer_sys::io::{read_at, write_all_at};
use aquifer_sys::lock::{self, LockKind, LockRange};
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};
use zerocopy::{FromZeros, IntoBytes};

use super::TierError;
use super::directory::Directory;
use super::layout::{
    BLOCK_BYTES, COLD, EMPTY, Geometry, HOT, Header, Key, PROOF_BYTES, SUB_BLOCK_BYTES,
};

/// Held shared by each opener; eviction removes a file that it can lock exclusively.
const PRESENCE: LockRange = LockRange::byte(0);
/// Leases are locks of the bytes from here on, one per sub-block. No file is as long.
const LEASES_AT: u64 = 1 << 60;
/// Proofs read at a time, to the stack.
const PROOFS_AT_ONCE: usize = 64;
/// A block is marked as used at most once in this time.
const MARKING_PERIOD_NS: i64 = 10_000_000_000;

pub(super) struct ObjectFile {
    pub key: Key,
    pub geometry: Geometry,
    file: File,
    path: PathBuf,
    marks: Marks,
    /// Sub-blocks that this opener has leased: its threads do not exclude each other by locks.
    leased: Mutex<Vec<Range<u64>>>,
}

impl ObjectFile {
    /// Opens the file of an object's version, or makes it.
    pub fn open(
        directory: &Directory,
        url: &str,
        etag: &str,
        len_bytes: u64,
    ) -> Result<ObjectFile, TierError> {
        let key = Key::of(url, etag, len_bytes);
        let geometry = Geometry { len_bytes };
        loop {
            let file = directory.file_or_new(&key.file_name(), |file| {
                write_all_at(file, Header::new(url, etag, len_bytes).as_bytes(), 0)?;
                Ok(rustix::fs::ftruncate(file, geometry.file_bytes())?)
            })?;
            match Self::of(directory, key, file) {
                Ok(Some(object)) => return Ok(object),
                // Removed meanwhile.
                Ok(None) => {}
                // A crash may leave any part of a file, so its header proves nothing either.
                Err(TierError::Damaged { .. }) => directory.remove(key)?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Opens the file of a key, if it exists.
    pub fn existing(directory: &Directory, key: Key) -> Result<Option<ObjectFile>, TierError> {
        match directory.file(&key.file_name()) {
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
            Ok(file) => Self::of(directory, key, file),
        }
    }

    fn of(directory: &Directory, key: Key, file: File) -> Result<Option<ObjectFile>, TierError> {
        let path = directory.path().join(key.file_name());
        let failed = |what| {
            let path = path.clone();
            move |source| TierError::System { path, what, source }
        };
        while !lock::try_lock(file.as_fd(), PRESENCE, LockKind::Shared)
            .map_err(failed("cannot lock"))?
        {
            // Held exclusively for a moment only, by eviction.
            std::thread::yield_now();
        }
        if file.metadata().map_err(failed("cannot inspect"))?.nlink() == 0 {
            return Ok(None);
        }
        let mut header = Header::new_zeroed();
        read_at(file.as_fd(), header.as_mut_bytes(), 0).map_err(failed("cannot read"))?;
        if let Err(reason) = header.check(key) {
            return Err(TierError::Damaged { path, reason });
        }
        let geometry = Geometry { len_bytes: header.len_bytes() };
        let marks = Marks::new(geometry.blocks());
        Ok(Some(ObjectFile { key, geometry, file, path, marks, leased: Mutex::default() }))
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
                if !self.read_part(sub_block, first_bytes, skip, &mut rest[..len_bytes]) {
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

    #[inline(never)]
    fn read_part(&self, sub_block: u64, whole_bytes: usize, skip: usize, to: &mut [u8]) -> bool {
        let mut whole = [0; SUB_BLOCK_BYTES as usize];
        let is_there = self.read_whole(sub_block..sub_block + 1, &mut whole[..whole_bytes]);
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
        if !self.read_proofs(sub_blocks.start, proofs) || proofs.contains(&0) {
            return false;
        }
        let at = self.geometry.data_at() + sub_blocks.start * SUB_BLOCK_BYTES;
        if read_at(self.file.as_fd(), to, at).ok() != Some(to.len()) {
            return false;
        }
        let parts = to.chunks(SUB_BLOCK_BYTES as usize);
        sub_blocks
            .zip(parts.zip(proofs))
            .all(|(sub_block, (part, proof))| self.key.proof(sub_block, part) == *proof)
    }

    fn read_proofs(&self, first: u64, proofs: &mut [u128]) -> bool {
        let bytes = proofs.as_mut_bytes();
        let at = self.geometry.proof_at(first);
        read_at(self.file.as_fd(), bytes, at).ok() == Some(bytes.len())
    }

    /// Which of these sub-blocks have a proof.
    pub fn present(&self, sub_blocks: Range<u64>) -> Vec<bool> {
        let mut proofs = vec![0; (sub_blocks.end - sub_blocks.start) as usize];
        if !self.read_proofs(sub_blocks.start, &mut proofs) {
            proofs.fill(0);
        }
        proofs.iter().map(|&proof| proof != 0).collect()
    }

    /// Starts reading a range from the disk, if it seems to be there; otherwise returns false.
    pub fn prefetch(&self, range: Range<u64>) -> bool {
        let touched = self.geometry.touched(range);
        let mut proofs = [0; PROOFS_AT_ONCE];
        let mut at = touched.start;
        while at < touched.end {
            let count = (touched.end - at).min(PROOFS_AT_ONCE as u64) as usize;
            if !self.read_proofs(at, &mut proofs[..count]) || proofs[..count].contains(&0) {
                return false;
            }
            at += count as u64;
        }
        let bytes = self.geometry.bytes_of(touched);
        let len_bytes = std::num::NonZeroU64::new(bytes.end - bytes.start);
        let at = self.geometry.data_at() + bytes.start;
        let _ = fadvise(&self.file, at, len_bytes, Advice::WillNeed);
        true
    }

    /// Stores whole sub-blocks: bytes first, then their proofs. The caller holds their lease.
    pub fn write(&self, sub_blocks: Range<u64>, bytes: &[u8]) -> io::Result<()> {
        let at = self.geometry.data_at() + sub_blocks.start * SUB_BLOCK_BYTES;
        write_all_at(self.file.as_fd(), bytes, at)?;
        let parts = bytes.chunks(SUB_BLOCK_BYTES as usize);
        let proofs: Vec<u128> = sub_blocks
            .clone()
            .zip(parts)
            .map(|(sub_block, part)| self.key.proof(sub_block, part))
            .collect();
        write_all_at(
            self.file.as_fd(),
            proofs.as_bytes(),
            self.geometry.proof_at(sub_blocks.start),
        )?;
        let blocks = self.blocks_of(self.geometry.bytes_of(sub_blocks));
        self.write_states(blocks, HOT)
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
            write_all_at(self.file.as_fd(), &states[..count as usize], to)?;
            at += count;
        }
        Ok(())
    }

    fn mark_used(&self, range: Range<u64>) {
        let blocks = self.blocks_of(range);
        if self.marks.are_new(blocks.clone()) {
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

    /// The states of blocks, from one on; less at the end.
    pub fn states(&self, first: u64, states: &mut [u8]) -> io::Result<usize> {
        let most = (self.geometry.blocks().saturating_sub(first)).min(states.len() as u64);
        if most == 0 {
            return Ok(0);
        }
        read_at(self.file.as_fd(), &mut states[..most as usize], Geometry::STATES_AT + first)
    }

    /// Takes away a block's mark of use.
    pub fn cool(&self, block: u64) -> io::Result<()> {
        self.write_states(block..block + 1, COLD)
    }

    /// Drops a block, unless a part of it is leased: proofs first, so that a reader of the hole finds none, or one
    /// that its copy does not match. Returns how many bytes were there.
    pub fn evict(&self, block: u64) -> io::Result<u64> {
        let sub_blocks = self.geometry.of_block(block);
        if !self.try_lease(sub_blocks.clone())? {
            return Ok(0);
        }
        let evicted = self.evict_leased(block, &sub_blocks);
        self.end_lease(&sub_blocks);
        evicted
    }

    fn evict_leased(&self, block: u64, sub_blocks: &Range<u64>) -> io::Result<u64> {
        let present = self.present(sub_blocks.clone());
        let nothing = [0; (BLOCK_BYTES / SUB_BLOCK_BYTES * PROOF_BYTES) as usize];
        let proofs_bytes = present.len() * PROOF_BYTES as usize;
        write_all_at(
            self.file.as_fd(),
            &nothing[..proofs_bytes],
            self.geometry.proof_at(sub_blocks.start),
        )?;
        let at = self.geometry.data_at() + block * BLOCK_BYTES;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, at, BLOCK_BYTES)?;
        self.write_states(block..block + 1, EMPTY)?;
        Ok(present.iter().filter(|&&is_present| is_present).count() as u64 * SUB_BLOCK_BYTES)
    }

    /// Gives blocks with data but without a state one: a crash may have lost it.
    pub fn repair_states(&self) -> io::Result<()> {
        let mut at = self.geometry.data_at();
        let end = self.geometry.file_bytes();
        while at < end {
            let Ok(data) = rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(at)) else {
                return Ok(());
            };
            let hole = rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Hole(data))?;
            let extent = data - self.geometry.data_at()..hole.min(end) - self.geometry.data_at();
            for block in self.blocks_of(extent) {
                let mut state = [EMPTY];
                if self.states(block, &mut state)? == 1 && state[0] == EMPTY {
                    self.cool(block)?;
                }
            }
            at = hole;
        }
        Ok(())
    }

    /// Removes the file, if no other opener has it.
    pub fn remove_unused(&self, directory: &Directory) -> Result<bool, TierError> {
        let is_alone = lock::try_lock(self.file.as_fd(), PRESENCE, LockKind::Exclusive)
            .map_err(|error| TierError::system(&self.path, "cannot lock", error))?;
        if is_alone {
            directory.remove(self.key)?;
        }
        Ok(is_alone)
    }
}

fn lease_range(sub_blocks: &Range<u64>) -> LockRange {
    LockRange {
        offset_bytes: LEASES_AT + sub_blocks.start,
        len_bytes: sub_blocks.end - sub_blocks.start,
    }
}

/// Which blocks this opener has marked as used lately.
struct Marks {
    bits: Box<[AtomicU64]>,
    since_ns: AtomicI64,
}

impl Marks {
    fn new(blocks: u64) -> Marks {
        let words = blocks.div_ceil(64) as usize;
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
            let Some(word) = self.bits.get((block / 64) as usize) else { break };
            let bit = 1 << (block % 64);
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
                are_new = true;
            }
        }
        are_new
    }
}
