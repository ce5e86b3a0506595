//! Bits in shared memory, one for each page or slot. Only the holder of the metadata mutex changes
//! words, unless all writers of a map use [`set_shared`] and [`clear_shared`].

use std::sync::atomic::Ordering::Relaxed;

use crate::format::run::Run;
use crate::sync::AtomicU64;

/// Sets the bits of a run to `value`, a word at a time. Returns how many changed.
pub(crate) fn set(map: &[AtomicU64], run: Run, value: bool) -> u64 {
    let (mut page, end) = (run.start_page, run.end_page().min(map.len() as u64 * 64));
    let mut changed = 0;
    while page < end {
        let bit = page % 64;
        let count = (64 - bit).min(end - page);
        let mask = if count == 64 { u64::MAX } else { ((1 << count) - 1) << bit };
        let word = &map[(page / 64) as usize];
        let before = word.load(Relaxed);
        let after = if value { before | mask } else { before & !mask };
        if before != after {
            word.store(after, Relaxed);
            changed += u64::from((before ^ after).count_ones());
        }
        page += count;
    }
    changed
}

/// Whether a bit is set.
pub(crate) fn is_set(map: &[AtomicU64], bit: u64) -> bool {
    map[(bit / 64) as usize].load(Relaxed) & 1 << (bit % 64) != 0
}

/// Sets a bit, atomically with respect to changes of other bits of the word.
pub(crate) fn set_shared(map: &[AtomicU64], bit: u64) {
    if !is_set(map, bit) {
        map[(bit / 64) as usize].fetch_or(1 << (bit % 64), Relaxed);
    }
}

/// Clears a bit, atomically with respect to changes of other bits of the word.
pub(crate) fn clear_shared(map: &[AtomicU64], bit: u64) {
    if is_set(map, bit) {
        map[(bit / 64) as usize].fetch_and(!(1 << (bit % 64)), Relaxed);
    }
}

/// The first bit from `bit` on, before `end`, that is set in the words that `word` gives; `end` if
/// there is none.
pub(crate) fn first(word: impl Fn(usize) -> u64, mut bit: u64, end: u64) -> u64 {
    while bit < end {
        let wanted = word((bit / 64) as usize) >> (bit % 64);
        if wanted != 0 {
            return (bit + u64::from(wanted.trailing_zeros())).min(end);
        }
        bit = (bit / 64 + 1) * 64;
    }
    end
}

/// Runs of bits from `from` on, before `end`, that are set in the words that `word` gives.
pub(crate) fn runs(word: impl Fn(usize) -> u64, from: u64, end: u64) -> impl Iterator<Item = Run> {
    let mut bit = from;
    std::iter::from_fn(move || {
        let start_page = first(&word, bit, end);
        if start_page >= end {
            return None;
        }
        bit = first(|index| !word(index), start_page, end);
        Some(Run { start_page, pages: bit - start_page })
    })
}
