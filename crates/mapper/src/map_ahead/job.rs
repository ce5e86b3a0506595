//! One range on its way through the helpers: how far it has come, where its reader is, and what may be populated next.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aquifer_sys::cpu::{self, Contention};
use aquifer_sys::memory::{self, SMALL_PAGE_BYTES};
use aquifer_sys::pagemap::Pagemap;

use super::super::populate::{Form, Missing};
use super::markers::{FIRST_BYTES, Markers};
use super::{COLD_PIECE_BYTES, PIECE_BYTES, Request};

/// What is populated in one call where the file is in memory: some 20 µs.
const CALL_BYTES: usize = 128 << 10;
/// How long a helper waits when others want its CPU: at first, at most, and altogether.
const ASIDE: Duration = Duration::from_millis(1);
const LONGEST_ASIDE: Duration = Duration::from_millis(16);
const ALL_ASIDES: Duration = Duration::from_millis(100);
/// Pages looked at to tell whether a piece has to be read, and whether a reader is where it seems to be.
const SAMPLES: usize = 8;

/// A request in the queue.
pub(super) struct Job {
    pub request: Arc<Request>,
    /// How far a helper has come.
    pub at: usize,
    /// How far the reader has come, as far as is known.
    pub passed: usize,
    /// Bytes of a piece.
    pub step: usize,
    /// When the reader was last seen to have moved, of a range that is watched.
    pub moved: Instant,
}

impl Job {
    /// Whether it is watched, and its reader was not seen to read in order yet.
    pub fn is_unseen(&self) -> bool {
        self.request.is_watched && self.passed == self.request.range.start
    }

    /// The reader was seen to read in order.
    pub fn begin(&mut self) {
        self.passed += FIRST_BYTES;
        self.at = self.passed;
        self.moved = Instant::now();
    }

    /// What is populated next, up to a border of pieces or to a marker, unless that is more than may lie unread. Of
    /// `share` bytes a range that is watched gets three times what its reader has read.
    pub fn piece(&self, share: usize) -> Option<Range<usize>> {
        let address = self.request.span.address() as usize + self.at;
        let to_border = (address / self.step + 1) * self.step - address;
        let to_marker = self.request.markers.after(self.at) - self.at;
        let end = (self.at + to_border.min(to_marker)).min(self.request.range.end);
        let read = self.passed - self.request.range.start;
        let may_begin = match self.request.markers {
            Markers::None => true,
            Markers::Every(_) => end - self.passed <= share || self.at == self.passed,
            Markers::Doubling { .. } => end - self.passed <= share.min(3 * read),
        };
        may_begin.then_some(self.at..end)
    }

    /// Populates a part of the range, in short calls unless it has to be read, which is waited for without the lock.
    pub fn populate(
        &self,
        form: Form,
        part: Range<usize>,
        contention: Option<&Contention>,
    ) -> Result<(), Missing> {
        let call_bytes = if self.step == COLD_PIECE_BYTES { COLD_PIECE_BYTES } else { CALL_BYTES };
        let mut at = part.start;
        // Relaxed: what is populated for nothing is a call more at worst.
        while at < part.end && !self.request.ended.load(Ordering::Relaxed) {
            let end = (at + call_bytes).min(part.end);
            let lost_before = cpu::involuntary_switches();
            form.populate(&*self.request.span, at..end)?;
            std::thread::yield_now();
            if cpu::involuntary_switches() != lost_before {
                std::thread::sleep(ASIDE);
                self.let_others_run(contention);
            }
            at = end;
        }
        Ok(())
    }

    /// Waits while there are more threads to run than CPUs, and says whether there no longer are. Not for ever, since a machine
    /// that is always busy is no reason to never come to an end.
    pub fn let_others_run(&self, contention: Option<&Contention>) -> bool {
        let (mut aside, mut waited) = (ASIDE, Duration::ZERO);
        loop {
            // Relaxed: a wait too many at worst.
            let has_ended = self.request.ended.load(Ordering::Relaxed);
            if has_ended || !contention.is_some_and(Contention::is_any_waiting) {
                return true;
            }
            if waited >= ALL_ASIDES {
                return false;
            }
            std::thread::sleep(aside);
            waited += aside;
            aside = (2 * aside).min(LONGEST_ASIDE);
        }
    }

    /// Moves on to the last marker that the reader has reached.
    pub fn look_for_reader(&mut self, pagemap: &Pagemap) {
        let before = self.passed;
        loop {
            let marker = self.request.markers.after(self.passed);
            if marker >= self.request.range.end || !self.is_present(marker, pagemap) {
                break;
            }
            self.passed = marker;
            self.at = self.at.max(marker);
        }
        if self.passed != before {
            self.moved = Instant::now();
        }
    }

    fn is_present(&self, offset: usize, pagemap: &Pagemap) -> bool {
        let address = self.request.span.address().wrapping_add(offset);
        matches!(pagemap.present(address, &mut [0]), Ok(1))
    }

    /// Whether a reader has gone through what lies before the first marker, and nobody through most of the rest: so it
    /// is neither with random accesses, nor where all is mapped already.
    pub fn looks_sequential(&self, pagemap: &Pagemap) -> bool {
        let start = self.request.range.start;
        if !self.is_present(start + FIRST_BYTES - SMALL_PAGE_BYTES, pagemap) {
            return false;
        }
        let mut entries = [0; FIRST_BYTES / SMALL_PAGE_BYTES];
        let address = self.request.span.address().wrapping_add(start);
        if !matches!(pagemap.present(address, &mut entries), Ok(present) if present == entries.len() as u64)
        {
            return false;
        }
        let rest = self.request.range.end - start - FIRST_BYTES;
        let reached = (1..=SAMPLES).filter(|sample| {
            let offset = start + FIRST_BYTES + rest / (SAMPLES + 1) * sample;
            self.is_present(offset / SMALL_PAGE_BYTES * SMALL_PAGE_BYTES, pagemap)
        });
        reached.count() <= SAMPLES / 4
    }

    /// Whether most of what lies next has to be read first, by a few samples. Where the system does not tell (files of
    /// others), it has not.
    pub fn is_cold(&self) -> bool {
        let end = self.request.range.end.min(self.at + PIECE_BYTES);
        let mut resident = [0];
        let cold = (0..SAMPLES).filter(|sample| {
            let offset = self.at + (end - self.at) / SAMPLES * sample;
            let page = offset / SMALL_PAGE_BYTES * SMALL_PAGE_BYTES;
            let address = self.request.span.address().wrapping_add(page);
            memory::residency(address, SMALL_PAGE_BYTES, &mut resident).is_ok()
                && resident[0] & 1 == 0
        });
        cold.count() * 2 > SAMPLES
    }
}
