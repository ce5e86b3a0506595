//! Changes of slots in records of the log: the words that change.
//!
//! A slot is 64 words of eight bytes, the last of which is its checksum. A change states which of
//! the other 63 words it sets, one bit each, and their values:
//!
//! | change | sets | and all others |
//! |---|---|---|
//! | *whole* | the words that are not zero | become zero |
//! | *patch* | the words that differ | stay |
//!
//! Both kinds state the new values of words, not differences, so it does no harm to apply changes
//! again, in order, to a slot that already has some of them.
//!
//! The first change of a slot after the tail of the log is whole. So replay does not need the
//! slot's content on media: that may be of any later moment, torn, or damaged, because a checkpoint
//! writes slots before it moves the tail. A whole change leaves its slot
//! [`UNSEALED`](crate::slot_bytes::UNSEALED). A patch leaves the checksum unchanged: it does not make an
//! invalid slot valid.

use crate::slot_bytes::{CHECKSUM_OFFSET, SLOT_BYTES, SlotBytes, word};

/// Words of a slot.
pub const SLOT_WORDS: usize = SLOT_BYTES / 8;
/// Words of a slot that can be set: all but its checksum.
pub const SETTABLE_WORDS: u64 = (1 << (CHECKSUM_OFFSET / 8)) - 1;

/// The words of a slot that a change sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotWords {
    /// Whether all other words become zero.
    pub is_whole: bool,
    /// The words that are set, the first one in the lowest bit.
    pub set: u64,
}

impl SlotWords {
    /// The words that turn any slot into `after`.
    pub fn whole(after: &SlotBytes) -> SlotWords {
        SlotWords { is_whole: true, set: different(|_| [0; 8], after) }
    }

    /// The words that turn a slot with the words `before` into `after`.
    pub fn patch(before: impl Fn(usize) -> [u8; 8], after: &SlotBytes) -> SlotWords {
        SlotWords { is_whole: false, set: different(before, after) }
    }

    /// As [`SlotWords::patch`], or as [`SlotWords::whole`] if that is shorter: for a slot that is
    /// given back, a patch would contain all its former words.
    pub fn shortest(before: impl Fn(usize) -> [u8; 8], after: &SlotBytes) -> SlotWords {
        // Such short patches, which are nearly all changes, are kept without a comparison.
        const FEW: u32 = 8;
        let patch = SlotWords::patch(before, after);
        if patch.set.count_ones() <= FEW {
            return patch;
        }
        let whole = SlotWords::whole(after);
        if whole.len_bytes() < patch.len_bytes() { whole } else { patch }
    }

    /// Their length in a record.
    pub fn len_bytes(self) -> u64 {
        u64::from(self.set.count_ones()) * 8
    }

    /// Copies these words of a slot to `words`, consecutively.
    pub fn copy_from(self, after: &SlotBytes, words: &mut [u8]) {
        for (index, place) in bits(self.set).zip(words.chunks_exact_mut(8)) {
            place.copy_from_slice(&word(after, index));
        }
    }
}

/// The indices of the bits that are set, ascending.
fn bits(mut word: u64) -> impl Iterator<Item = usize> + Clone {
    std::iter::from_fn(move || {
        let index = (word != 0).then(|| word.trailing_zeros() as usize)?;
        word &= word - 1;
        Some(index)
    })
}

/// The words that differ. Compares eight words at a time: most of them are equal.
fn different(before: impl Fn(usize) -> [u8; 8], after: &SlotBytes) -> u64 {
    let mut set = 0;
    for group in (0..SLOT_WORDS).step_by(8) {
        let differences: [u64; 8] = std::array::from_fn(|index| {
            let (one, other) = (before(group + index), word(after, group + index));
            u64::from_ne_bytes(one) ^ u64::from_ne_bytes(other)
        });
        if differences.iter().fold(0, |any, words| any | words) != 0 {
            for (index, words) in differences.iter().enumerate() {
                set |= u64::from(*words != 0) << (group + index);
            }
        }
    }
    set & SETTABLE_WORDS
}

/// A change of a slot in a record.
#[derive(Debug, Clone, Copy)]
pub struct SlotChange<'a> {
    /// The slot.
    pub slot: u64,
    /// The words it sets.
    pub words: SlotWords,
    /// Their values: eight bytes each, consecutive.
    pub bytes: &'a [u8],
}

impl<'a> SlotChange<'a> {
    /// The words that are set, with their index and value.
    #[inline]
    pub fn set(&self) -> impl Iterator<Item = (usize, [u8; 8])> + 'a {
        let values = self.bytes.chunks_exact(8).map(|word| word.try_into().expect("eight bytes"));
        bits(self.words.set).zip(values)
    }

    /// The first word of the slot after the change.
    #[inline]
    pub fn first_word(&self, before: [u8; 8]) -> [u8; 8] {
        match self.bytes.first_chunk() {
            Some(word) if self.words.set & 1 != 0 => *word,
            _ if self.words.is_whole => [0; 8],
            _ => before,
        }
    }

    /// Applies the change.
    #[inline]
    pub fn apply(&self, slot: &mut SlotBytes) {
        if self.words.is_whole {
            slot.fill(0);
        }
        for (index, value) in self.set() {
            slot[index * 8..index * 8 + 8].copy_from_slice(&value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot_bytes::{UNSEALED, seal};

    fn change<'a>(words: SlotWords, after: &SlotBytes, bytes: &'a mut Vec<u8>) -> SlotChange<'a> {
        bytes.resize(words.len_bytes() as usize, 0);
        words.copy_from(after, bytes);
        SlotChange { slot: 9, words, bytes }
    }

    fn slots() -> [SlotBytes; 3] {
        let mut slots = [[0; SLOT_BYTES]; 3];
        slots[1][0..40].fill(3);
        slots[2][16..40].fill(3);
        slots[2][496..504].fill(7);
        slots.iter_mut().for_each(seal);
        slots
    }

    #[test]
    fn a_change_makes_the_one_of_the_other() {
        for before in slots() {
            for mut after in slots() {
                let mut bytes = Vec::new();
                let mut found = before;
                change(SlotWords::patch(|at| word(&before, at), &after), &after, &mut bytes)
                    .apply(&mut found);
                assert_eq!(found[..CHECKSUM_OFFSET], after[..CHECKSUM_OFFSET]);
                assert_eq!(found[CHECKSUM_OFFSET..], before[CHECKSUM_OFFSET..], "not believed");
                change(SlotWords::whole(&after), &after, &mut bytes).apply(&mut found);
                after[CHECKSUM_OFFSET..].copy_from_slice(&UNSEALED.to_le_bytes());
                assert_eq!(found, after);
            }
        }
    }

    #[test]
    fn only_words_that_differ_are_there() {
        let [zero, first, second] = slots();
        assert_eq!(SlotWords::whole(&first).set, 0b1_1111);
        assert_eq!(SlotWords::patch(|at| word(&first, at), &second).set, 0b11 | 1 << 62);
        assert_eq!(SlotWords::patch(|at| word(&second, at), &second).len_bytes(), 0);
        assert_eq!(SlotWords::whole(&zero).len_bytes(), 0);
    }
}
