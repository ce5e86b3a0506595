//! Checkpoints: bring the media up to date with the log, so that log space and freed pages can be
//! reused.
//!
//! ```text
//!   apply:       durable records ──copy──▶ pages of objects at their place        (visible to later attachments)
//!   checkpoint:  1. take a copy of the changed image pages, under the metadata mutex
//!                2. everything in the log so far is durable          (no-steal: the image may follow now)
//!                3. apply up to there
//!                4. image pages to their place
//!                5. write both back, flush the device
//!                6. superblocks with the new tail, one after the other
//!                7. the tail moves: log space is free, freed pages are free
//! ```
//!
//! The last one, which closes the pool, also writes the [saved state](crate::metadata::saved) in 4, and names it
//! and no segment in 6.
//!
//! All under the maintenance mutex. A crash anywhere leaves the old tail, from which replay gives
//! the same result. A failure in 3 to 6 makes the pool read-only: the kernel may have marked pages
//! clean that never reached the disk, so a later successful flush would prove nothing. No data is
//! lost: the log still has it.

use std::sync::atomic::Ordering::Relaxed;

use crate::error::{PoolError, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::METADATA_START_PAGE;
use crate::format::superblock::Superblock;
use crate::log::durable::{PART_BYTES, parts};
use crate::log::locks::{Log, Maintaining};
use crate::log::superblocks::write_superblocks;
use crate::media::ByteRange;
use crate::metadata::core::Core;
use crate::metadata::freed;
use crate::metadata::image_slots;
use crate::metadata::repair;
use crate::metadata::saved;
use crate::mutant::{self, Mutant};
use crate::point;
use crate::shared::failure::FailureKind;
use crate::shared::handle::Handle;
use crate::shared::heartbeat::Held;

/// Why a checkpoint is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// For room in the log, or among the freed pages.
    Room,
    /// The pool is being closed by its last writer, which has locked all others out.
    Close,
}

/// The number of an image page, and its bytes.
type ImagePage = (u64, Vec<u8>);

impl Log {
    /// Copies the changed pages of the image, and returns them with the head of the log at that
    /// moment.
    fn take_changed_pages(&self) -> Result<(u64, Vec<ImagePage>)> {
        let locked = self.lock()?;
        // The tail must lie on a page boundary of the log.
        locked.close_packed()?;
        let mut pages = Vec::new();
        let segment = &self.handle.segment;
        let dirty = segment.dirty_image_pages().iter().zip(segment.written_image_pages());
        for (index, (word, written)) in dirty.enumerate() {
            let bits = word.load(Relaxed);
            if bits == 0 {
                continue;
            }
            // Before they are cleared: if this process dies in between, none is forgotten.
            written.fetch_or(bits, Relaxed);
            let bits = word.swap(0, Relaxed);
            for bit in (0..64).filter(|bit| bits & (1 << bit) != 0) {
                let page = index as u64 * 64 + bit;
                if !mutant::is(self.handle.mutant, Mutant::PatchFirst) {
                    image_slots::begin_log_of(&self.handle.segment, page);
                }
                pages.push((page, image_slots::page_for_media(&self.handle.segment, page)));
            }
        }
        let head_lsn = locked.control().appends.head_lsn();
        drop(locked);
        pages.iter_mut().for_each(|(_, bytes)| image_slots::seal_page(bytes));
        Ok((head_lsn, pages))
    }
}

/// A checkpoint needs the log and the image, and gives pages back to the free space.
impl Core {
    /// Makes a checkpoint, which frees the log up to its head at the time of the call.
    pub fn checkpoint(&self) -> Result<()> {
        self.checkpoint_for(Purpose::Room)
    }

    /// As [`Core::checkpoint`].
    pub fn checkpoint_for(&self, purpose: Purpose) -> Result<()> {
        self.handle.check_writable()?;
        point::pass("checkpoint-begun");
        // Another process may be making a checkpoint, and this thread may hold a file's mutex.
        let maintaining =
            self.handle.heartbeat.while_media_work(Held::Files, || self.log.maintain())?;
        let outcome = self.checkpoint_while(&maintaining, purpose);
        if self.handle.control().check_not_failed().is_err() {
            // Also records a failure of another thread, which could not take the mutex to record
            // it.
            let _ = maintaining.write_loss();
        }
        outcome
    }

    fn checkpoint_while(&self, maintaining: &Maintaining<'_>, purpose: Purpose) -> Result<()> {
        let control = self.handle.control();
        let tail_lsn = control.tail_lsn.load(Relaxed);
        let (head_lsn, pages) = self.log.take_changed_pages()?;
        point::pass("checkpoint-taken");
        let outcome = self.write_checkpoint(maintaining, purpose, tail_lsn, head_lsn, &pages);
        if outcome.is_err() {
            maintaining.mark_changed(pages.iter().map(|(page, _)| *page));
        }
        outcome
    }

    fn write_checkpoint(
        &self,
        maintaining: &Maintaining<'_>,
        purpose: Purpose,
        tail_lsn: u64,
        head_lsn: u64,
        pages: &[ImagePage],
    ) -> Result<()> {
        let is_last = purpose == Purpose::Close;
        if tail_lsn == head_lsn && pages.is_empty() && !is_last {
            let locked = self.log.lock()?;
            freed::look_again(&locked, &self.pins.places);
            repair::take_from_the_dead(&locked)?;
            return Ok(());
        }
        let Handle { media, heartbeat, mutant, .. } = &*self.handle;
        let control = self.handle.control();
        self.log.wait_durable(head_lsn)?;
        point::pass("checkpoint-durable");
        self.handle.members.check_kept_now()?;
        let committed = self.log.committed_between(tail_lsn, head_lsn)?;
        // Part of it may have been applied before: applying it again changes nothing.
        maintaining.apply(&committed, head_lsn)?;
        point::pass("checkpoint-applied");
        let mut ranges = committed.ranges();
        drop(committed);
        let saved =
            if is_last { saved::state(&self.log, &self.pins.places, head_lsn)? } else { None };
        let mut saved_sum = 0;
        let members = &self.handle.members;
        let work = || -> Result<()> {
            for (page, bytes) in pages {
                // Without the locks, others may have changed the page since.
                members.check_kept()?;
                let offset_bytes = (METADATA_START_PAGE + page) * PAGE_BYTES;
                // SAFETY: a page of metadata: no reference to it is ever made.
                unsafe { media.write_at(offset_bytes, bytes)? };
                ranges.push(ByteRange { offset_bytes, len_bytes: PAGE_BYTES });
            }
            let unsaid = mutant::is(*mutant, Mutant::SavedUnflushed);
            if let Some(state) = &saved
                && !unsaid
            {
                saved_sum = state.write(&**media, &mut ranges)?;
            }
            point::pass("checkpoint-written");
            if !mutant::is(*mutant, Mutant::TailBeforeFlush) {
                ranges.sort_unstable();
                for part in parts(&ranges, PART_BYTES) {
                    media.write_back(&part)?;
                    maintaining.note_progress();
                }
                media.flush()?;
            }
            if let Some(state) = saved.as_ref().filter(|_| unsaid) {
                saved_sum = state.write(&**media, &mut ranges)?;
            }
            Ok(())
        };
        heartbeat.while_media_work(Held::Maintenance, work).inspect_err(|error| {
            if let PoolError::Media(error) = error {
                self.handle.fail_at_media(FailureKind::Data, &error.source);
            }
        })?;
        // The kernel may have reported lost bytes to another process and not to this one.
        control.check_not_failed()?;
        point::pass("checkpoint-flushed");
        self.handle.members.check_kept_now()?;
        let mut superblock = self.handle.superblock(head_lsn);
        if is_last {
            superblock = Superblock { segment: uuid::Uuid::nil(), saved_sum, ..superblock };
        }
        let write = || write_superblocks(&**media, &superblock, 0, *mutant);
        heartbeat.while_media_work(Held::Maintenance, write).inspect_err(|error| {
            self.handle.fail_at_media(FailureKind::Superblock, &error.source)
        })?;
        point::pass("checkpoint-superblocks");
        control.sequence.store(superblock.sequence, Relaxed);
        point::pass("checkpoint-sequence");
        let locked = self.log.lock()?;
        control.tail_lsn.store(head_lsn, Relaxed);
        point::pass("checkpoint-tail");
        freed::look_again(&locked, &self.pins.places);
        repair::take_from_the_dead(&locked)?;
        drop(locked);
        control.signal.ring();
        self.space.zero_soon();
        Ok(())
    }

    /// Makes room in the log for a record of `len_bytes`, and for freed runs, by a checkpoint.
    pub(crate) fn make_room(&self, len_bytes: u64) -> Result<()> {
        let log_bytes = self.handle.layout.log().len_bytes;
        // A record that does not fit before the end of the ring needs up to its own length again.
        if len_bytes > log_bytes / 2 {
            return Err(PoolError::TooLargeForLog { len_bytes, log_bytes });
        }
        self.checkpoint()
    }
}
