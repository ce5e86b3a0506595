//! The progress of one range: the helper's position, the reader's position, and the piece to
//! populate next.

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

/// Size of one populate call where the file is in memory: some 20 µs.
const CALL_BYTES: usize = 128 << 10;
/// How long a helper sleeps while other threads need its CPU: first, longest, and in total.
const ASIDE: Duration = Duration::from_millis(1);
const LONGEST_ASIDE: Duration = Duration::from_millis(16);
const ALL_ASIDES: Duration = Duration::from_millis(100);
/// Pages sampled to tell whether a piece has to be read, and whether a reader is really sequential.
const SAMPLES: usize = 8;

/// A request in the queue.
pub(super) struct Job {
    pub request: Arc<Request>,
    /// The helper's position.
    pub at: usize,
    /// The reader's last known position.
    pub passed: usize,
    /// Bytes of a piece.
    pub step: usize,
    /// When the reader of a watched range was last seen to move.
    pub moved: Instant,
}

impl Job {
    /// Whether it is watched, and its reader has not yet been found to be sequential.
    pub fn is_unseen(&self) -> bool {
        self.request.is_watched && self.passed == self.request.range.start
    }

    /// Starts mapping ahead: the reader was found to be sequential.
    pub fn begin(&mut self) {
        self.passed += FIRST_BYTES;
        self.at = self.passed;
        self.moved = Instant::now();
    }

    /// The next piece to populate, up to a border of pieces or a marker; `None` if that would
    /// exceed the limit of unread bytes. The limit is `share`, and for a watched range also three
    /// times what its reader has read.
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

    /// Populates a piece of the range, in short calls unless it has to be read: waiting for the
    /// device does not hold the lock of the address space.
    pub fn populate(
        &self,
        form: Form,
        piece: Range<usize>,
        contention: Option<&Contention>,
    ) -> Result<(), Missing> {
        let call_bytes = if self.step == COLD_PIECE_BYTES { COLD_PIECE_BYTES } else { CALL_BYTES };
        let mut at = piece.start;
        // Relaxed: at worst one more call.
        while at < piece.end && !self.request.ended.load(Ordering::Relaxed) {
            let end = (at + call_bytes).min(piece.end);
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

    /// Waits while more threads are runnable than there are CPUs. Returns whether the helper may
    /// continue: false after [`ALL_ASIDES`], because a machine may always be busy.
    pub fn let_others_run(&self, contention: Option<&Contention>) -> bool {
        let (mut aside, mut waited) = (ASIDE, Duration::ZERO);
        loop {
            // Relaxed: at worst one more wait.
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

    /// Advances the reader's position to the last marker that it has reached.
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

    /// Whether all pages before the first marker are mapped, and at most a quarter of the samples
    /// after it: this excludes random access and files that are mapped already.
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

    /// Whether most of the next piece has to be read from the device, by a few samples. Where the
    /// system does not tell (files of other users), false.
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
