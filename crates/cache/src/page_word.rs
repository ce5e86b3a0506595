//! The state of one page, in one atomic word.
//!
//! ```text
//!  63            36 35          17 16        5    4        3    0
//! +----------------+--------------+-----------+--------+---------+
//! | frame (28)     | zero (18)    | pins (12) | W (1)  | state   |   W: a thread waits
//! +----------------+--------------+-----------+--------+---------+   bit 17: pinned for writing
//! ```
//!
//! An all-zero word is *Absent*, so a table of them needs no initialisation. State changes are
//! compare-and-swaps, and each transition is one function here:
//!
//! | from | to | function | by |
//! |---|---|---|---|
//! | Absent | Loading | [`PageWord::begin_load`] | the thread that misses |
//! | Loading | Clean, Dirty | [`PageWord::finish_load`] | the same |
//! | Loading | Absent | [`PageWord::abort_load`] | the same, after an error, or with zeros for bare loads |
//! | Clean, Dirty | Unprotecting | [`PageWord::begin_unprotect`] | a store to a write-protected page |
//! | Unprotecting | Dirty | [`PageWord::finish_unprotect`] | the same |
//! | Clean, Dirty | Exclusive | [`PageWord::begin_exclusive`] | a writing guard of `Pages` |
//! | Exclusive | Dirty | [`PageWord::finish_exclusive`] | the same |
//! | Dirty | Cleaning | [`PageWord::begin_clean`] | write-back |
//! | Cleaning | Clean, Dirty | [`PageWord::finish_clean`] | write-back; Dirty if the write failed |
//! | Clean | Evicting | [`PageWord::begin_evict`] | the evictor, only without pins |
//! | Evicting | Absent | [`PageWord::finish_evict`] | the evictor |
//! | Evicting | Clean | [`PageWord::cancel_evict`] | the evictor, when the kernel refused |
//!
//! Pins may be taken in Clean, Dirty and Cleaning. A pinned page is not evicted. A page *pinned for
//! writing* is Dirty and is not cleaned, because its bytes may change without a fault.
//!
//! Waiting: a thread that finds a page in a transient state sets `W` and sleeps on the word; the
//! transition that ends the state clears `W` and wakes all sleepers.
//!
//! Memory order: a transition that publishes bytes (`finish_*`) is a release. Every function that
//! lets its caller read bytes (`pin`, `begin_*`) is an acquire on the same word.

use crate::ids::FrameId;
use crate::lazy::ZeroInit;
use crate::sync::{self, AtomicU64, Ordering};

const STATE_MASK: u64 = 0xf;
/// The states with this bit are those in which a page can be read: every hit tests it.
const READABLE: u64 = 8;
const WAITERS: u64 = 1 << 4;
const PIN_ONE: u64 = 1 << 5;
const PIN_MASK: u64 = 0xfff << 5;
const WRITE_PINNED: u64 = 1 << 17;
const FRAME_SHIFT: u32 = 36;

/// Largest number of frames a pool can have.
pub const MAX_FRAMES: usize = 1 << 28;
/// Pins that write-back may hold on one page for snapshots; a flush that gets none waits.
const SNAPSHOT_PINS: u64 = 63;
/// Largest number of pins that callers may hold on one page.
pub const MAX_PINS: u64 = PIN_MASK / PIN_ONE - SNAPSHOT_PINS;

/// The state of a page. See the module documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the module documentation has the table")]
#[repr(u8)]
pub enum State {
    Absent = 0,
    Loading = 1,
    Unprotecting = 2,
    Evicting = 3,
    Exclusive = 4,
    Clean = READABLE as u8,
    Dirty = READABLE as u8 + 1,
    Cleaning = READABLE as u8 + 2,
}

/// A value read from a page word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen(u64);

impl Seen {
    /// The state.
    #[inline]
    pub fn state(self) -> State {
        match self.0 & STATE_MASK {
            0 => State::Absent,
            1 => State::Loading,
            2 => State::Unprotecting,
            3 => State::Evicting,
            4 => State::Exclusive,
            8 => State::Clean,
            9 => State::Dirty,
            10 => State::Cleaning,
            other => unreachable!("page state {other}"),
        }
    }

    /// The frame; meaningless while Absent or Loading.
    #[inline]
    pub fn frame(self) -> FrameId {
        FrameId((self.0 >> FRAME_SHIFT) as u32)
    }

    /// The number of pins held.
    #[inline]
    pub fn pins(self) -> u64 {
        (self.0 & PIN_MASK) / PIN_ONE
    }

    /// Whether the page is pinned for writing: its bytes may change without a fault.
    #[inline]
    pub fn is_write_pinned(self) -> bool {
        self.0 & WRITE_PINNED != 0
    }

    /// Whether the holder of a pin may read the page's bytes, and a pin may be taken.
    #[inline]
    pub fn is_readable(self) -> bool {
        self.0 & READABLE != 0
    }

    /// Whether the page can be read and was in the same frame when its word was `before`, which
    /// could be read too.
    #[inline]
    pub fn is_where_it_was(self, before: Seen) -> bool {
        // Almost always nothing has changed at all, which takes one comparison.
        self == before || (self.is_readable() && self.frame() == before.frame())
    }

    /// Whether the page occupies a frame.
    #[inline]
    pub fn is_resident(self) -> bool {
        !matches!(self.state(), State::Absent | State::Loading)
    }

    /// Whether a thread waits for the next transition.
    #[cfg(test)]
    pub fn has_waiters(self) -> bool {
        self.0 & WAITERS != 0
    }

    /// Whether a thread is working on the page and will finish soon.
    #[inline]
    pub fn is_transient(self) -> bool {
        matches!(
            self.state(),
            State::Loading
                | State::Unprotecting
                | State::Cleaning
                | State::Evicting
                | State::Exclusive
        )
    }

    fn with(self, state: State) -> u64 {
        (self.0 & !STATE_MASK) | state as u64
    }
}

/// Why a pin could not be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PinRefused {
    /// The page is in this state; load it or wait.
    NotNow(Seen),
    /// [`MAX_PINS`] pins are held already.
    TooMany,
}

/// The atomic state of one page.
#[derive(Debug)]
#[repr(transparent)]
pub struct PageWord(AtomicU64);

// SAFETY: a transparent wrapper of an `AtomicU64`, for which zero is the absent page.
unsafe impl ZeroInit for PageWord {}

impl PageWord {
    /// An absent page.
    #[cfg(any(loom, test))]
    pub fn new() -> PageWord {
        PageWord(AtomicU64::new(0))
    }

    /// The current value. Acquire, so that what a finished transition published is visible.
    #[inline]
    pub fn load(&self) -> Seen {
        Seen(self.0.load(Ordering::Acquire))
    }

    #[inline]
    fn exchange(&self, seen: Seen, new: u64) -> Result<Seen, Seen> {
        // Acquire pairs with the releases of finished transitions. Release publishes what the
        // caller did before: for example, a pin's reads must not be reordered after its unpin.
        self.0
            .compare_exchange(seen.0, new, Ordering::AcqRel, Ordering::Acquire)
            .map(Seen)
            .map_err(Seen)
    }

    /// Applies a step that only the owner of a transient state may take, and wakes waiters. Keeps
    /// concurrent changes of pins and `W`.
    fn finish(&self, from: State, step: impl Fn(Seen) -> u64) {
        let mut seen = self.load();
        loop {
            debug_assert_eq!(seen.state(), from, "only the owner ends a transient state");
            match self.exchange(seen, step(seen) & !WAITERS) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        if seen.0 & WAITERS != 0 {
            sync::wake_all(&self.0);
        }
    }

    /// Absent → Loading. The caller then loads the page; no other thread does.
    pub fn begin_load(&self, seen: Seen) -> Result<Seen, Seen> {
        debug_assert_eq!(seen.state(), State::Absent);
        self.exchange(seen, seen.0 & WAITERS | State::Loading as u64)
    }

    /// Loading → Clean or Dirty, with the page now in `frame`; `pinned` gives the caller a pin.
    pub fn finish_load(&self, frame: FrameId, dirty: bool, pinned: Option<PinKind>) {
        let state = if dirty { State::Dirty } else { State::Clean } as u64;
        let pins = match pinned {
            None => 0,
            Some(PinKind::Read) => PIN_ONE,
            Some(PinKind::Write) => PIN_ONE | WRITE_PINNED,
        };
        self.finish(State::Loading, |_| u64::from(frame.0) << FRAME_SHIFT | pins | state);
    }

    /// Loading → Absent: the load failed.
    pub fn abort_load(&self) {
        self.finish(State::Loading, |_| State::Absent as u64);
    }

    /// Takes a pin on a Clean, Dirty or Cleaning page.
    #[inline]
    pub fn pin(&self) -> Result<Seen, PinRefused> {
        let mut seen = self.load();
        loop {
            if !seen.is_readable() {
                return Err(PinRefused::NotNow(seen));
            }
            if seen.pins() >= MAX_PINS {
                return Err(PinRefused::TooMany);
            }
            match self.exchange(seen, seen.0 + PIN_ONE) {
                Ok(_) => return Ok(seen),
                Err(now) => seen = now,
            }
        }
    }

    /// Takes a pin for writing on a Dirty page.
    pub fn pin_for_writing(&self) -> Result<Seen, PinRefused> {
        self.pin_dirty(MAX_PINS)
    }

    /// Takes a pin for a snapshot on a Dirty page; these have room beyond the callers' limit.
    ///
    /// It counts as a pin for writing: while a snapshot is being written to the device no thread
    /// may start another write of the page, or the older bytes could reach the device last.
    pub fn pin_for_snapshot(&self) -> Result<Seen, PinRefused> {
        self.pin_dirty(MAX_PINS + SNAPSHOT_PINS)
    }

    fn pin_dirty(&self, most: u64) -> Result<Seen, PinRefused> {
        let mut seen = self.load();
        loop {
            if seen.state() != State::Dirty {
                return Err(PinRefused::NotNow(seen));
            }
            if seen.pins() >= most {
                return Err(PinRefused::TooMany);
            }
            match self.exchange(seen, (seen.0 + PIN_ONE) | WRITE_PINNED) {
                Ok(_) => return Ok(seen),
                Err(now) => seen = now,
            }
        }
    }

    /// Gives a pin back. The last one also ends "pinned for writing".
    #[inline]
    pub fn unpin(&self) {
        let mut seen = self.load();
        loop {
            debug_assert!(seen.pins() > 0, "unpin without a pin");
            let mut new = seen.0 - PIN_ONE;
            if new & PIN_MASK == 0 {
                new &= !(WRITE_PINNED | WAITERS);
            }
            match self.exchange(seen, new) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        // A writing guard of `Pages` may wait for the last pin in a state that is not transient.
        if seen.pins() == 1 && seen.0 & WAITERS != 0 {
            sync::wake_all(&self.0);
        }
    }

    /// Clean or Dirty → Unprotecting.
    pub fn begin_unprotect(&self, seen: Seen) -> Result<Seen, Seen> {
        debug_assert!(matches!(seen.state(), State::Clean | State::Dirty));
        self.exchange(seen, seen.with(State::Unprotecting))
    }

    /// Unprotecting → Dirty; with `pin`, pinned for writing by the caller in the same step.
    ///
    /// The caller checks before `begin_unprotect` that there is room for the pin; no other thread
    /// pins the page in between.
    pub fn finish_unprotect(&self, pin: bool) {
        let pins = if pin { PIN_ONE } else { 0 };
        let flag = if pin { WRITE_PINNED } else { 0 };
        self.finish(State::Unprotecting, |seen| (seen.with(State::Dirty) + pins) | flag);
    }

    /// Clean or Dirty, not pinned → Exclusive. Only the caller may read and write the page.
    pub fn begin_exclusive(&self, seen: Seen) -> Result<Seen, Seen> {
        debug_assert!(matches!(seen.state(), State::Clean | State::Dirty) && seen.pins() == 0);
        self.exchange(seen, seen.with(State::Exclusive))
    }

    /// Exclusive → Dirty.
    pub fn finish_exclusive(&self) {
        self.finish(State::Exclusive, |seen| seen.with(State::Dirty));
    }

    /// Dirty, not pinned for writing → Cleaning.
    pub fn begin_clean(&self) -> Result<Seen, Seen> {
        let mut seen = self.load();
        loop {
            if seen.state() != State::Dirty || seen.is_write_pinned() {
                return Err(seen);
            }
            match self.exchange(seen, seen.with(State::Cleaning)) {
                Ok(_) => return Ok(seen),
                Err(now) => seen = now,
            }
        }
    }

    /// Cleaning → Clean if the write completed, Dirty if it failed.
    pub fn finish_clean(&self, written: bool) {
        let state = if written { State::Clean } else { State::Dirty };
        self.finish(State::Cleaning, |seen| seen.with(state));
    }

    /// Clean without pins → Evicting.
    pub fn begin_evict(&self) -> Result<Seen, Seen> {
        let seen = self.load();
        if seen.state() != State::Clean || seen.pins() != 0 {
            return Err(seen);
        }
        self.exchange(seen, seen.with(State::Evicting))
    }

    /// Evicting → Absent.
    pub fn finish_evict(&self) {
        self.finish(State::Evicting, |_| State::Absent as u64);
    }

    /// Evicting → Clean: the page could not be discarded after all.
    pub fn cancel_evict(&self) {
        self.finish(State::Evicting, |seen| seen.with(State::Clean));
    }

    /// Sleeps until the word may have changed from `seen`.
    pub fn wait(&self, seen: Seen) {
        let waiting = Seen(seen.0 | WAITERS);
        if seen.0 & WAITERS != 0 || self.exchange(seen, waiting.0).is_ok() {
            sync::wait(&self.0, waiting.0);
        }
    }
}

/// What a pin allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PinKind {
    /// Loads.
    Read,
    /// Loads and stores, by system calls and devices too.
    Write,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn loaded(dirty: bool) -> PageWord {
        let word = PageWord::new();
        word.begin_load(word.load()).unwrap();
        word.finish_load(FrameId(5), dirty, None);
        word
    }

    #[test]
    fn a_pinned_page_is_not_evicted() {
        let word = loaded(false);
        word.pin().unwrap();
        assert!(word.begin_evict().is_err());
        word.unpin();
        assert_eq!(word.begin_evict().unwrap().frame(), FrameId(5));
        assert!(matches!(word.pin(), Err(PinRefused::NotNow(_))));
        word.finish_evict();
        assert_eq!(word.load().state(), State::Absent);
    }

    #[test]
    fn a_page_pinned_for_writing_is_not_cleaned() {
        let word = loaded(true);
        word.pin_for_writing().unwrap();
        word.pin().unwrap();
        assert!(word.begin_clean().is_err());
        word.unpin();
        assert!(word.begin_clean().is_err());
        word.unpin();
        assert!(word.begin_clean().is_ok());
        word.pin().unwrap();
        word.finish_clean(true);
        assert_eq!((word.load().state(), word.load().pins()), (State::Clean, 1));
    }

    #[test]
    fn a_failed_write_leaves_the_page_dirty() {
        let word = loaded(true);
        word.begin_clean().unwrap();
        word.finish_clean(false);
        assert_eq!(word.load().state(), State::Dirty);
        assert!(word.begin_evict().is_err());
    }

    #[test]
    fn pins_are_counted_up_to_the_limit() {
        let word = loaded(false);
        for _ in 0..MAX_PINS {
            word.pin().unwrap();
        }
        assert_eq!(word.pin(), Err(PinRefused::TooMany));
        assert_eq!(word.load().frame(), FrameId(5));
    }
}
