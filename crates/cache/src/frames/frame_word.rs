//! The owner word of a frame: its owner, and whether the frame exists.
//!
//! ```text
//!  63        62      44 43        0
//! +---------+----------+-----------+
//! | held    | store +1 | page      |      0: not granted      1: free      2: retired
//! +---------+----------+-----------+
//! ```
//!
//! The frames that exist are those below the pool's limit. When the limit changes while a frame is
//! given back, exactly one of the two threads must put the frame into a free list if it lies below
//! the limit, and neither otherwise. Each side writes first and reads then: the limit is stored
//! before the owner words are read, and the owner word is stored before the limit is read.
//!
//! A frame that was not in use since the pool was last that large is *not granted*. Such frames are
//! not touched when the limit rises, but granted one by one when frames are needed. A frame that is
//! given back above the limit is *retired*; the end of a shrink turns retired frames into ungranted
//! ones. Until then the thread that retired the frame may find that the limit has risen again and
//! regain it, so the two states differ.
//!
//! | from | to | function | by |
//! |---|---|---|---|
//! | not granted | free | [`grant`] | a thread without a frame; a growth after an unfinished shrink |
//! | in use | free | [`release`] | the thread that gives it back |
//! | free | retired | [`retire`] | a thread that finds it above the limit |
//! | retired | free | [`regain`] | the same, if the limit has risen; a growth after an unfinished shrink |
//! | retired | not granted | [`withdraw`] | the end of a shrink |

use crate::ids::PageKey;
use crate::sync::{self, AtomicU64, AtomicUsize, Ordering};

/// Owner word of a frame that was not granted.
pub(crate) const UNGRANTED: u64 = 0;
/// Owner word of a frame in a free list, or being moved to one.
pub(crate) const FREE: u64 = 1;
/// Owner word of a frame that a shrink has taken out of circulation and not yet withdrawn.
pub(crate) const RETIRED: u64 = 2;
/// Bit of the owner word of a frame that the policy holds. A page's frame without it is held by the
/// page's loader, or by the one evictor that decides about it. Set and cleared under the policy
/// lock.
pub(crate) const HELD: u64 = 1 << 63;

/// The page that owns a frame, by its owner word.
pub(crate) fn owner(word: u64) -> Option<PageKey> {
    PageKey::unpack(word & !HELD)
}

/// Whether a frame lies below the limit.
pub(crate) fn is_granted(limit: &AtomicUsize, frame: usize) -> bool {
    sync::in_one_order();
    frame < limit.load(Ordering::SeqCst)
}

/// Marks a frame free that its page gave up. True if the caller must put it into a free list.
pub(crate) fn release(owner: &AtomicU64, limit: &AtomicUsize, frame: usize) -> bool {
    owner.store(FREE, Ordering::SeqCst);
    is_granted(limit, frame) || retire(owner, limit, frame)
}

/// Retires a free frame that is above the limit and in no list. True if the caller must keep it
/// after all: a concurrent growth may have skipped it while it was marked free.
pub(crate) fn retire(owner: &AtomicU64, limit: &AtomicUsize, frame: usize) -> bool {
    owner.store(RETIRED, Ordering::SeqCst);
    is_granted(limit, frame) && regain(owner)
}

/// Retired → free. True for exactly one caller, which must put the frame into a free list. A growth
/// calls it after storing the limit.
pub(crate) fn regain(owner: &AtomicU64) -> bool {
    change(owner, RETIRED, FREE)
}

/// Not granted → free. True for exactly one caller, which must put the frame into a free list.
pub(crate) fn grant(owner: &AtomicU64) -> bool {
    change(owner, UNGRANTED, FREE)
}

/// Retired → not granted. False if the frame is still in circulation.
pub(crate) fn withdraw(owner: &AtomicU64) -> bool {
    change(owner, RETIRED, UNGRANTED) || owner.load(Ordering::SeqCst) == UNGRANTED
}

/// Whether a frame is in circulation: in use, in a free list, or being moved to one.
pub(crate) fn is_in_circulation(word: u64) -> bool {
    !matches!(word, UNGRANTED | RETIRED)
}

fn change(owner: &AtomicU64, from: u64, to: u64) -> bool {
    sync::in_one_order();
    owner.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}
