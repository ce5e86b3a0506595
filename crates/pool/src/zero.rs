//! Zeroing: free pages become zeros before somebody needs them.
//!
//! Pages of files are zero until they are written to, whoever had them before. Whoever takes pages that must be zero takes such as are
//! known to be, and zeroes others himself ([`Core::zero`]); so that this is rare, a thread of each process zeroes free pages ahead:
//!
//! ```text
//!   free ──reserve──▶ this process's ──zeros──▶ this process's ──bits, give back──▶ free, known to be zero
//! ```
//!
//! While it writes to them the pages are reserved, so nobody else takes them; when it dies, they are free and nothing is known of
//! them. One process does it at a time (a lock byte), a mebibyte at a time, at a rate that the options set, and only until there is a stock.
//!
//! # What is zero when
//! | domain | zeroed by | after a power cut |
//! |---|---|---|
//! | `Dax` | stores past the caches | zero or what was there; nobody takes it for zeros |
//! | `PageCache` | writes to the page cache, written back at some time | the same |
//! | `Volatile` | stores | nothing is there |
//!
//! So none of it need be durable. What names a page that was zeroed makes it durable first, zeros and all (rule 3).
//!
//! # Lock order
//! `Core::zeroing`, then the byte, then the metadata mutex.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use aquifer_sys::lock::LockKind;

use crate::core::Core;
use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::image_words::before_bytes_are_stored;
use crate::media::ByteRange;
use crate::membership::Byte;
use crate::point;

/// How much is zeroed at a time: whoever wants these very pages waits for it.
pub(crate) const CHUNK_PAGES: u64 = 256;
/// How long somebody who finds no room waits for another process to finish what it is zeroing.
const PATIENCE: Duration = Duration::from_secs(1);

static ZEROS: [u8; 1 << 18] = [0; 1 << 18];

impl Core {
    /// Writes zeros over a range; not durable.
    pub fn zero(&self, range: ByteRange) -> Result<()> {
        before_bytes_are_stored();
        for done in (0..range.len_bytes).step_by(ZEROS.len()) {
            let len_bytes = (range.len_bytes - done).min(ZEROS.len() as u64);
            // SAFETY: free pages that no pin covers, or pages that the caller has reserved: no reference to them exists.
            unsafe {
                self.media.write_at(range.offset_bytes + done, &ZEROS[..len_bytes as usize])?;
            }
        }
        Ok(())
    }

    /// Zeroes some free pages, at most [`CHUNK_PAGES`], and returns how many; 0 if there are none, or somebody else is doing
    /// it.
    pub fn zero_some(&self, most_pages: u64) -> Result<u64> {
        self.check_writable()?;
        let _zeroing = self.zeroing.lock().unwrap_or_else(|broken| broken.into_inner());
        if most_pages == 0
            || !self.membership.try_lock(Byte::Zeroer, LockKind::Exclusive).unwrap_or(false)
        {
            return Ok(0);
        }
        let zeroed = self.zero_reserved(most_pages.min(CHUNK_PAGES));
        self.membership.unlock(Byte::Zeroer);
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

    /// Does `work` while nobody has pages reserved only to zero them, if they can be waited for.
    pub fn without_zeroing<T>(&self, work: impl FnOnce() -> T) -> T {
        let _zeroing = self.zeroing.lock().unwrap_or_else(|broken| broken.into_inner());
        let patience = PATIENCE.min(self.stall_timeout);
        let alone = self.membership.lock(Byte::Zeroer, LockKind::Exclusive, patience);
        let done = work();
        if alone.unwrap_or(false) {
            self.membership.unlock(Byte::Zeroer);
        }
        done
    }

    /// Bytes of free pages known to be zero, nearly.
    pub fn zeroed_bytes(&self) -> u64 {
        let control = self.control();
        let fresh = self.layout.page_count - control.fresh_from_page.load(Relaxed);
        (fresh + control.zeroed_count.load(Relaxed)) * PAGE_BYTES
    }
}
