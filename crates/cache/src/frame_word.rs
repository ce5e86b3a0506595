//! The owner word of a frame: who has it, and whether it exists.
//!
//! ```text
//!  63        62      44 43        0
//! +---------+----------+-----------+
//! | held    | store +1 | page      |      0: not granted      1: free      2: retired
//! +---------+----------+-----------+
//! ```
//!
//! The frames that exist are those below the pool's limit. A change of the limit and a frame that comes back
//! at the same moment have to agree on who puts it into a free list: exactly one of them, if it lies below
//! the limit, and nobody otherwise. Each side writes first and looks then: the limit is stored before the
//! owner words are looked at, and the owner word is stored before the limit is looked at.
//!
//! A frame that was never in use since the pool was last that large is *not granted*: those are not touched
//! when the limit rises, but granted one after the other when frames are wanted. A frame that came back above
//! the limit is *retired*; the end of a shrink takes retired frames for not granted again. Until then the
//! thread that retired it may find that the limit has risen meanwhile and regain it, so the two states differ.
//!
//! | from | to | function | by |
//! |---|---|---|---|
//! | not granted | free | [`grant`] | a thread without a frame; a growth that finds the shrink before it unfinished |
//! | in use | free | [`release`] | the thread that gives it back |
//! | free | retired | [`retire`] | a thread that finds it above the limit |
//! | retired | free | [`regain`] | the same, if the limit has risen; such a growth |
//! | retired | not granted | [`withdraw`] | the end of a shrink |

use crate::ids::PageKey;
use crate::sync::{self, AtomicU64, AtomicUsize, Ordering};

/// Owner word of a frame that is not in circulation.
pub(crate) const UNGRANTED: u64 = 0;
/// Owner word of a frame in a free list, or on its way there.
pub(crate) const FREE: u64 = 1;
/// Owner word of a frame that a shrink has taken out of circulation and not yet written off.
pub(crate) const RETIRED: u64 = 2;
/// Bit of the owner word of a frame that the policy holds. Without it a page's frame is in the hands of the
/// page's loader, or of the one evictor that decides what becomes of it. Set and cleared under the policy
/// lock.
pub(crate) const HELD: u64 = 1 << 63;

/// The page that holds a frame, by its owner word.
pub(crate) fn owner(word: u64) -> Option<PageKey> {
    PageKey::unpack(word & !HELD)
}

/// Whether a frame lies below the limit.
pub(crate) fn is_granted(limit: &AtomicUsize, frame: usize) -> bool {
    sync::in_one_order();
    frame < limit.load(Ordering::SeqCst)
}

/// Marks a frame free that its page gave up. True if the caller is to put it into a free list.
pub(crate) fn release(owner: &AtomicU64, limit: &AtomicUsize, frame: usize) -> bool {
    owner.store(FREE, Ordering::SeqCst);
    is_granted(limit, frame) || retire(owner, limit, frame)
}

/// Retires a free frame that was found above the limit and is in no list. True if it is the caller's after
/// all: a growth in between may have passed over it while it was marked free.
pub(crate) fn retire(owner: &AtomicU64, limit: &AtomicUsize, frame: usize) -> bool {
    owner.store(RETIRED, Ordering::SeqCst);
    is_granted(limit, frame) && regain(owner)
}

/// Retired → free. True for one caller, who puts the frame into a free list. A growth calls it after the limit
/// is stored.
pub(crate) fn regain(owner: &AtomicU64) -> bool {
    change(owner, RETIRED, FREE)
}

/// Not granted → free. True for one caller, who puts the frame into a free list.
pub(crate) fn grant(owner: &AtomicU64) -> bool {
    change(owner, UNGRANTED, FREE)
}

/// Retired → not granted. False if the frame is still in circulation.
pub(crate) fn withdraw(owner: &AtomicU64) -> bool {
    change(owner, RETIRED, UNGRANTED) || owner.load(Ordering::SeqCst) == UNGRANTED
}

/// Whether a frame is in circulation: in use, in a free list, or on its way there.
pub(crate) fn is_in_circulation(word: u64) -> bool {
    !matches!(word, UNGRANTED | RETIRED)
}

fn change(owner: &AtomicU64, from: u64, to: u64) -> bool {
    sync::in_one_order();
    owner.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}
