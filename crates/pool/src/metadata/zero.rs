//! Zeroing: free pages are zeroed before they are needed.
//!
//! Pages of files read as zeros until they are written, whatever they held before. A call that
//! needs zeroed pages takes pages that are known to be zero, and zeroes others itself
//! ([`Space::zero`]); to make this rare, a background thread of each process zeroes free pages
//! ahead:
//!
//! ```text
//!   free ──reserve──▶ this process's ──zeros──▶ this process's ──bits, give back──▶ free, known to be zero
//! ```
//!
//! While a process zeroes pages they are reserved, so no other allocation takes them; if it dies,
//! they are free and nothing is known of them. One process zeroes at a time (a lock byte), a
//! mebibyte at a time, at a rate that the options set, and only until the stock is full.
//!
//! # Zeros and power cuts
//! | domain | zeroed by | after a power cut |
//! |---|---|---|
//! | `Dax` | stores past the caches | zero or the old bytes; not counted as zeros |
//! | `PageCache` | writes to the page cache, written back at some time | the same |
//! | `Volatile` | stores | nothing is left |
//!
//! So no zero need be durable. The record that names a zeroed page makes it durable first,
//! including the zeros (rule 3).

use std::time::Duration;

use aquifer_sys::lock::LockKind;

use crate::error::Result;
use crate::media::ByteRange;
use crate::metadata::space::Space;
use crate::point;
use crate::shared::membership::Byte;
use crate::sync::before_bytes_are_stored;

/// How many pages are zeroed at a time: an allocation that needs these very pages waits for it.
pub(crate) const CHUNK_PAGES: u64 = 256;
/// How long an allocation that finds no room waits until another process has finished its zeroing.
const PATIENCE: Duration = Duration::from_secs(1);

static ZEROS: [u8; 1 << 18] = [0; 1 << 18];

impl Space {
    /// Writes zeros over a range; not durable.
    pub fn zero(&self, range: ByteRange) -> Result<()> {
        before_bytes_are_stored();
        for done in (0..range.len_bytes).step_by(ZEROS.len()) {
            let len_bytes = (range.len_bytes - done).min(ZEROS.len() as u64);
            // Without the locks, others may have given the pages to files.
            self.handle.members.check_kept()?;
            // SAFETY: free pages that no pin covers, or pages that the caller has reserved: no
            // reference to them exists.
            unsafe {
                self.handle
                    .media
                    .write_at(range.offset_bytes + done, &ZEROS[..len_bytes as usize])?;
            }
        }
        Ok(())
    }

    /// Zeroes some free pages, at most [`CHUNK_PAGES`], and returns how many; 0 if there are none,
    /// or another process is zeroing.
    pub fn zero_some(&self, most_pages: u64) -> Result<u64> {
        self.handle.check_writable()?;
        let _zeroing = self.zeroing.lock().unwrap_or_else(|broken| broken.into_inner());
        if most_pages == 0
            || !self
                .handle
                .members
                .locks
                .try_lock(Byte::Zeroer, LockKind::Exclusive)
                .unwrap_or(false)
        {
            return Ok(0);
        }
        let zeroed = self.zero_reserved(most_pages.min(CHUNK_PAGES));
        self.handle.members.locks.unlock(Byte::Zeroer);
        zeroed
    }

    fn zero_reserved(&self, most_pages: u64) -> Result<u64> {
        let Some(mut reservation) = self.reserve_to_zero(most_pages)? else { return Ok(0) };
        point::pass("zero-taken");
        let whole = reservation.whole();
        self.zero(whole.bytes())?;
        point::pass("zero-written");
        reservation.is_zeroed = true;
        Ok(whole.pages)
    }

    /// Runs `work` while no process has pages reserved only to zero them; if the wait for that
    /// times out, runs it anyway.
    pub fn without_zeroing<T>(&self, work: impl FnOnce() -> T) -> T {
        let _zeroing = self.zeroing.lock().unwrap_or_else(|broken| broken.into_inner());
        let patience = PATIENCE.min(self.handle.members.stall_timeout);
        let alone = self.handle.members.locks.lock(Byte::Zeroer, LockKind::Exclusive, patience);
        let done = work();
        if alone.unwrap_or(false) {
            self.handle.members.locks.unlock(Byte::Zeroer);
        }
        done
    }
}
