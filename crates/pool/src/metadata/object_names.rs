//! An index of objects by name, beside the image in the segment.
//!
//! It is a digital search tree over the slots of the objects. Each slot has two links, and each
//! object lies below the objects that were there before it, at the position given by the bits of
//! the hash of its name:
//!
//! ```text
//!               slot 7  0110…
//!         0 ┌──────┴──────┐ 1
//!     slot 3  0010…    slot 9  1100…          the first bit chooses below slot 7, the second one below slots 3 and 9
//!       1 └─────┐
//!           slot 12  0101…
//! ```
//!
//! So a lookup compares the names of about as many slots as the number of objects has bits,
//! whatever else the pool contains, and a change of names stores a few links. A removed object is
//! replaced by a leaf below it, which may take any position above its own.
//!
//! Like the rest of the segment it is derived, and nothing of it is on media: the first process that
//! looks up a name, and can write to the segment, [builds](build) it from the slots. From then on
//! only [`apply`](crate::metadata::apply::apply) changes it, while the version of the image is odd; so lookups
//! are consistent reads of the image as all others are. What a dead process left half done is not
//! repaired but built anew.
//!
//! # While it is incomplete
//! It grows by steps: all objects in the slots before [`Control::object_names_end`] are in it, and
//! changes of these slots change it. The pages of a step are read without a lock, and only inserting
//! its objects needs the metadata mutex. Until the tree is whole, lookups compare the names of all
//! objects: those by readers of a pool in which no writer has looked up a name, those after a death
//! until the next process builds the tree, and those in a pool whose names make it too deep (65
//! names whose hashes begin alike), or with an object that cannot be read. That may have any name:
//! then a lookup that finds no other fails.

use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::error::Result;
use crate::format::inode::{MAX_NAME_BYTES, NAME_RANGE};
use crate::format::slot::is_object_slot;
use crate::format::slot_change::SlotChange;
use crate::log::locks::{Locked, Log};
use crate::metadata::image_slots::load_word;
use crate::point;
use crate::shared::image_words::{self, ImageSlot};
use crate::shared::segment::{Control, Segment, SlotSet};

/// Words of a slot that contain its name, behind the length in the first byte.
const NAME_WORDS: usize = (MAX_NAME_BYTES + 1) / 8;
const FIRST_WORD: usize = NAME_RANGE.start / 8;
const _: () = assert!(NAME_RANGE.start == FIRST_WORD * 8);
const _: () = assert!(NAME_RANGE.end == (FIRST_WORD + NAME_WORDS) * 8);
/// The words of a slot that determine its place in the tree.
const PLACE_WORDS: u64 = 1 | ((1 << NAME_WORDS) - 1) << FIRST_WORD;

/// The maximal depth of an object: the number of bits in a hash.
const MOST_STEPS: u32 = 64;

/// [`Control::object_names_end`] of a tree with all objects.
const WHOLE: u64 = u64::MAX;
/// That of a tree that does not take all objects. It is not built again before the next repair.
const GIVEN_UP: u64 = WHOLE - 1;
/// How many objects are inserted while the metadata mutex is held: a millisecond of work.
const STEP_OBJECTS: usize = 1024;

/// A name to look up.
pub(crate) struct Key<'a> {
    name: &'a [u8],
    /// As in a slot, except for what lies behind the name.
    words: [u64; NAME_WORDS],
    /// The number of words of the name, and the mask of the significant bits in the last one.
    count: usize,
    last_mask: u64,
}

impl<'a> Key<'a> {
    /// `None` if no object can have this name.
    pub fn new(name: &'a [u8]) -> Option<Key<'a>> {
        let length = u8::try_from(name.len()).ok().filter(|&length| length > 0)?;
        let mut bytes = [0; NAME_WORDS * 8];
        bytes[0] = length;
        bytes[1..=name.len()].copy_from_slice(name);
        let end = 1 + name.len();
        let count = end.div_ceil(8);
        Some(Key {
            name,
            words: std::array::from_fn(|index| {
                u64::from_le_bytes(bytes[index * 8..index * 8 + 8].try_into().expect("eight bytes"))
            }),
            count,
            last_mask: u64::MAX >> ((count * 8 - end) * 8),
        })
    }

    /// Whether these are the words of an object with this name.
    pub fn is_of(&self, word: impl Fn(usize) -> [u8; 8]) -> bool {
        let differs = |index: usize| {
            let mask = if index + 1 == self.count { self.last_mask } else { u64::MAX };
            (u64::from_le_bytes(word(FIRST_WORD + index)) ^ self.words[index]) & mask != 0
        };
        is_object_slot(word(0)) && !(0..self.count).any(differs)
    }
}

/// The hash of a name, with the segment's seed.
fn hash_of(segment: &Segment, name: &[u8]) -> u64 {
    // Relaxed: it was stored before any other thread knew the segment.
    let seed = segment.control().object_names_seed.load(Relaxed);
    xxhash_rust::xxh3::xxh3_64_with_seed(name, seed)
}

/// The hash of the name of the object in a slot; `None` if there is none.
fn hash_in(segment: &Segment, slot: u64) -> Option<u64> {
    if !is_object_slot(load_word(segment, slot, 0)) {
        return None;
    }
    let mut bytes = [0; NAME_WORDS * 8];
    for (index, into) in bytes.chunks_exact_mut(8).enumerate() {
        into.copy_from_slice(&load_word(segment, slot, FIRST_WORD + index));
    }
    Some(hash_of(segment, &bytes[1..=usize::from(bytes[0])]))
}

/// The bit of a hash that chooses the link below an object at this depth.
fn bit(hash: u64, steps: u32) -> u32 {
    (hash >> (u64::BITS - 1 - steps)) as u32 & 1
}

/// The slots below one. 0, the head's slot, stands for none.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Links(u64);

impl Links {
    fn of(segment: &Segment, slot: u64) -> Links {
        Links(segment.name_links(slot).map_or(0, |links| links.load(Relaxed)))
    }

    fn store(self, segment: &Segment, slot: u64) {
        if let Some(links) = segment.name_links(slot) {
            links.store(self.0, Relaxed);
        }
    }

    fn get(self, bit: u32) -> u64 {
        self.0 >> (bit * 32) & u64::from(u32::MAX)
    }

    fn with(self, bit: u32, slot: u64) -> Links {
        Links(self.0 & !(u64::from(u32::MAX) << (bit * 32)) | slot << (bit * 32))
    }
}

/// A place in the tree, which contains a slot or 0.
#[derive(Clone, Copy)]
enum Place {
    Root,
    Below { slot: u64, bit: u32 },
}

impl Place {
    fn load(self, segment: &Segment) -> u64 {
        match self {
            Place::Root => segment.control().object_names_root.load(Relaxed),
            Place::Below { slot, bit } => Links::of(segment, slot).get(bit),
        }
    }

    fn store(self, segment: &Segment, into: u64) {
        match self {
            Place::Root => segment.control().object_names_root.store(into, Relaxed),
            Place::Below { slot, bit } => {
                Links::of(segment, slot).with(bit, into).store(segment, slot);
            }
        }
    }
}

/// Whether the tree contains all objects. If not, lookups compare the names of all.
pub(crate) fn are_whole(control: &Control) -> bool {
    // Acquire: pairs with the Release in `insert_step`. A thread that finds it whole sees all links.
    // The version of the image orders later changes.
    control.object_names_end.load(Acquire) == WHOLE
}

/// Whether the tree contains the objects of a slot. With the metadata mutex.
fn covers(control: &Control, slot: u64) -> bool {
    let end = control.object_names_end.load(Relaxed);
    end == WHOLE || (end != GIVEN_UP && slot < end)
}

/// Begins the tree anew. With the metadata mutex, and while the version of the image is odd if the
/// tree is whole.
pub(crate) fn distrust(control: &Control) {
    // Relaxed: a thread that loads the next even version sees this.
    control.object_names_end.store(0, Relaxed);
}

/// Begins the tree anew if its process may have died while it changed the tree. With the metadata
/// mutex, before the version of the image is made even.
pub(crate) fn repair(control: &Control) {
    if control.image.is_odd() || !are_whole(control) {
        distrust(control);
    }
}

/// Finds the object with a name; `load` returns the words of a slot. Called in a consistent read,
/// which may repeat it, or with the metadata mutex.
///
/// # Errors
/// The last one of `load`, if no other slot has the name: the one that could not be loaded may have
/// it.
pub(crate) fn find<'a, E>(
    segment: &Segment,
    key: &Key<'_>,
    load: impl Fn(u64) -> std::result::Result<Option<&'a ImageSlot>, E>,
) -> std::result::Result<Option<u64>, E> {
    let mut unreadable = None;
    let has_name = |slot: u64| match load(slot) {
        Ok(words) => words.is_some_and(|words| key.is_of(|index| image_words::word(words, index))),
        Err(error) => {
            unreadable = Some(error);
            false
        }
    };
    let found = first_of(segment, key, has_name);
    unreadable.filter(|_| found.is_none()).map_or(Ok(found), Err)
}

/// The first slot that may have a name for which `is_it` returns true.
fn first_of(segment: &Segment, key: &Key<'_>, mut is_it: impl FnMut(u64) -> bool) -> Option<u64> {
    if are_whole(segment.control()) {
        find_below_root(segment, hash_of(segment, key.name), is_it)
    } else {
        segment.slots_in(SlotSet::Objects).find(|&slot| is_it(slot))
    }
}

/// The slot on the path of a hash for which `is_it` returns true. While the tree is being changed,
/// the result is arbitrary.
fn find_below_root(
    segment: &Segment,
    hash: u64,
    mut is_it: impl FnMut(u64) -> bool,
) -> Option<u64> {
    let mut slot = Place::Root.load(segment);
    for steps in 0..MOST_STEPS {
        if slot == 0 {
            return None;
        }
        if is_it(slot) {
            return Some(slot);
        }
        slot = Links::of(segment, slot).get(bit(hash, steps));
    }
    None
}

/// What the tree must forget about a slot when a change is applied to it.
pub(crate) enum Noted {
    /// The slot keeps its place.
    Nothing,
    /// The hash of the name that the slot has before the change.
    Before(Option<u64>),
}

/// Must be called before a change of a slot is stored.
#[inline]
pub(crate) fn before_change(segment: &Segment, change: &SlotChange<'_>) -> Noted {
    let can_move = change.words.is_whole || change.words.set & PLACE_WORDS != 0;
    if can_move && covers(segment.control(), change.slot) {
        Noted::Before(hash_in(segment, change.slot))
    } else {
        Noted::Nothing
    }
}

/// Must be called after a change of a slot is stored.
#[inline]
pub(crate) fn after_change(segment: &Segment, slot: u64, noted: Noted) {
    let Noted::Before(before) = noted else { return };
    let after = hash_in(segment, slot);
    if before == after {
        return;
    }
    let is_removed = before.is_none_or(|hash| remove(segment, slot, hash));
    point::pass("apply-names");
    let is_inserted = is_removed && after.is_none_or(|hash| insert(segment, slot, hash));
    if !is_inserted {
        // Relaxed: as in `distrust`.
        segment.control().object_names_end.store(GIVEN_UP, Relaxed);
    }
}

/// Builds the tree, unless it is whole, cannot be, or this process cannot write to it. `lock` takes
/// the metadata mutex; where it returns `None`, the rest is left to later calls.
///
/// # Errors
/// Those of `lock`, of [`Segment::read_slot`] and [`Segment::reserve_links`]: what is not in the
/// tree yet is left to later calls.
pub(crate) fn build<'a>(
    log: &'a Log,
    lock: impl Fn(&'a Log) -> Result<Option<Locked<'a>>>,
) -> Result<()> {
    let segment = &log.handle.segment;
    while segment.is_writable()
        && let Some(step) = next_step(segment)
    {
        prepare_step(segment, step.clone())?;
        let Some(_locked) = lock(log)? else { break };
        insert_step(segment, step);
    }
    Ok(())
}

/// The next slots whose objects are to be inserted.
fn next_step(segment: &Segment) -> Option<Range<u64>> {
    // Acquire: pairs with the Release in `insert_step`; but it is looked at again with the mutex.
    let from = segment.control().object_names_end.load(Acquire);
    let last = segment.slots_from(SlotSet::Objects, from).nth(STEP_OBJECTS - 1);
    (from < GIVEN_UP).then(|| from..last.map_or(segment.slots(), |last| last + 1))
}

fn objects_in(segment: &Segment, step: Range<u64>) -> impl Iterator<Item = u64> + '_ {
    segment.slots_from(SlotSet::Objects, step.start).take_while(move |slot| *slot < step.end)
}

/// Reads the pages of a step, and allocates the memory of their links.
fn prepare_step(segment: &Segment, step: Range<u64>) -> Result<()> {
    objects_in(segment, step).try_for_each(|slot| {
        // One that cannot be read may have any name, and lookups must come across it.
        segment.read_slot(slot)?;
        segment.reserve_links(slot..slot + 1)
    })
}

/// Inserts the objects of a step. With the metadata mutex. Does nothing if another process was
/// faster, or if there are objects by now that are not prepared.
fn insert_step(segment: &Segment, step: Range<u64>) {
    let end = &segment.control().object_names_end;
    let is_prepared =
        |slot| segment.slot_in_memory(slot).is_ok() && segment.name_links(slot).is_some();
    if end.load(Relaxed) != step.start || !objects_in(segment, step.clone()).all(is_prepared) {
        return;
    }
    if step.start == 0 {
        // Readers have found it incomplete, and do not use it.
        Place::Root.store(segment, 0);
    }
    point::pass("names-step");
    let are_in = objects_in(segment, step.clone())
        .all(|slot| hash_in(segment, slot).is_none_or(|hash| insert(segment, slot, hash)));
    point::pass("names-inserted");
    let reached = match are_in {
        true if step.end >= segment.slots() => WHOLE,
        true => step.end,
        false => GIVEN_UP,
    };
    // Release: pairs with the Acquire in `are_whole`.
    end.store(reached, Release);
}

/// Inserts a slot; false if the tree would become too deep.
fn insert(segment: &Segment, slot: u64, hash: u64) -> bool {
    Links(0).store(segment, slot);
    let mut place = Place::Root;
    for steps in 0..MOST_STEPS {
        match place.load(segment) {
            0 => {
                place.store(segment, slot);
                return true;
            }
            above => place = Place::Below { slot: above, bit: bit(hash, steps) },
        }
    }
    false
}

/// Removes a slot; false if it is not where it should be.
fn remove(segment: &Segment, slot: u64, hash: u64) -> bool {
    let mut place = Place::Root;
    for steps in 0..MOST_STEPS {
        match place.load(segment) {
            0 => return false,
            found if found == slot => {
                let leaf = take_leaf(segment, slot);
                if let Some(leaf) = leaf {
                    Links::of(segment, slot).store(segment, leaf);
                }
                place.store(segment, leaf.unwrap_or(0));
                return true;
            }
            above => place = Place::Below { slot: above, bit: bit(hash, steps) },
        }
    }
    false
}

/// Detaches a leaf below this slot, if there is one.
fn take_leaf(segment: &Segment, slot: u64) -> Option<u64> {
    let mut last: Option<(Place, u64)> = None;
    let mut above = slot;
    for _ in 0..MOST_STEPS {
        let links = Links::of(segment, above);
        let bit = u32::from(links.get(0) == 0);
        let below = links.get(bit);
        if below == 0 {
            break;
        }
        last = Some((Place::Below { slot: above, bit }, below));
        above = below;
    }
    let (place, leaf) = last?;
    place.store(segment, 0);
    Some(leaf)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use aquifer_testkit::campaign::{seed, steps};
    use aquifer_testkit::rng::Rng;
    use uuid::Uuid;

    use super::*;
    use crate::format::inode::{Inode, InodeKind};
    use crate::format::layout::{Layout, SLOTS_PER_PAGE};
    use crate::format::slot_change::SlotWords;
    use crate::metadata::alloc;

    /// Builds the tree of a segment that nothing else uses.
    fn build_alone(segment: &Segment) {
        while let Some(step) = next_step(segment) {
            prepare_step(segment, step.clone()).unwrap();
            insert_step(segment, step);
        }
    }

    fn segment(slots: u64) -> Segment {
        let metadata_pages = slots / SLOTS_PER_PAGE;
        let layout = Layout {
            page_count: metadata_pages + 2 + 16 + 64,
            metadata_pages,
            log_start_page: 2 + metadata_pages,
            log_pages: 16,
            data_start_page: 2 + metadata_pages + 16,
        };
        let segment = Segment::private(Uuid::from_u128(7), &layout).unwrap();
        (0..metadata_pages).for_each(|page| segment.add_page(page).unwrap());
        build_alone(&segment);
        assert!(are_whole(segment.control()));
        segment
    }

    /// Changes a slot as `apply` does.
    fn put(segment: &Segment, slot: u64, name: Option<&[u8]>) {
        let inode = match name {
            Some(name) => {
                Inode { kind: InodeKind::Object, name: name.to_vec(), ..Inode::free(slot, 1) }
            }
            None => Inode::free(slot, 1),
        };
        let after = inode.encode().unwrap();
        let words = SlotWords::shortest(|at| load_word(segment, slot, at), &after);
        let mut bytes = vec![0; words.len_bytes() as usize];
        words.copy_from(&after, &mut bytes);
        let change = SlotChange { slot, words, bytes: &bytes };
        let noted = before_change(segment, &change);
        image_words::change(segment.slot(slot).unwrap(), &change);
        alloc::note_slot(segment, slot);
        after_change(segment, slot, noted);
    }

    fn slot_of(segment: &Segment, name: &[u8]) -> Option<u64> {
        let load = |slot| Ok::<_, ()>(segment.slot(slot));
        find(segment, &Key::new(name)?, load).unwrap()
    }

    /// Names of all lengths, some of which differ in their last byte only, or in their length.
    fn name(number: u64) -> Vec<u8> {
        let length = 1 + number as usize * 7 % MAX_NAME_BYTES;
        let mut name = vec![b'n'; length.max(8)];
        let end = name.len();
        name[end - 8..].copy_from_slice(&(number | 1 << 63).to_be_bytes());
        name
    }

    #[test]
    fn names_are_found_whatever_came_and_went() {
        const SLOTS: u64 = 256;
        let segment = segment(SLOTS);
        let mut rng = Rng::new(seed(1));
        let mut model: BTreeMap<u64, u64> = BTreeMap::new();
        for step in 0..steps(4000) {
            let slot = 1 + rng.below(SLOTS - 1);
            let number = rng.below(600);
            let is_taken = model.values().any(|other| *other == number);
            let is_filling = step / 500 % 2 == 0;
            if !is_taken && rng.chance(if is_filling { 0.9 } else { 0.3 }) {
                put(&segment, slot, Some(&name(number)));
                model.insert(slot, number);
            } else {
                put(&segment, slot, None);
                model.remove(&slot);
            }
            if step % 50 == 0 {
                for number in 0..600 {
                    let expected = model.iter().find(|(_, of)| **of == number);
                    assert_eq!(slot_of(&segment, &name(number)), expected.map(|(slot, _)| *slot));
                }
            }
            assert!(are_whole(segment.control()), "step {step}");
        }
        model.keys().for_each(|slot| put(&segment, *slot, None));
        assert_eq!(segment.control().object_names_root.load(Relaxed), 0);
    }

    #[test]
    fn a_lookup_looks_at_few_of_many_objects() {
        const OBJECTS: u64 = 10_000;
        let segment = segment(OBJECTS + 240);
        (1..=OBJECTS).for_each(|slot| put(&segment, slot, Some(&name(slot))));
        let (mut all, mut most) = (0, 0);
        for number in 1..=2 * OBJECTS {
            let name = name(number);
            let key = Key::new(&name).unwrap();
            let looked_at = std::cell::Cell::new(0);
            let found = find_below_root(&segment, hash_of(&segment, &name), |slot| {
                looked_at.set(looked_at.get() + 1);
                key.is_of(|index| load_word(&segment, slot, index))
            });
            assert_eq!(found, (number <= OBJECTS).then_some(number));
            all += looked_at.get();
            most = most.max(looked_at.get());
        }
        // The logarithm is 13.3; a tree of random hashes is only a little deeper.
        assert!(all / (2 * OBJECTS) <= 20 && most <= 40, "{all} in all, {most} at most");
    }

    #[test]
    fn a_name_is_all_of_its_bytes() {
        let segment = segment(64);
        for (slot, name) in (1..).zip([&b"1234567"[..], b"12345678", b"123456789", b"a", b"ab"]) {
            put(&segment, slot, Some(name));
            assert_eq!(slot_of(&segment, name), Some(slot));
        }
        for other in [&b""[..], b"1234568", b"123456", b"12345679", b"b", b"abc", &[b'a'; 256]] {
            assert_eq!(slot_of(&segment, other), None, "{other:?}");
        }
    }

    #[test]
    fn more_alike_hashes_than_fit_are_found_without_the_tree() {
        let segment = segment(128);
        put(&segment, 1, Some(b"other"));
        (2..60).for_each(|slot| put(&segment, slot, Some(b"same")));
        assert!(are_whole(segment.control()));
        (60..100).for_each(|slot| put(&segment, slot, Some(b"same")));
        assert!(!are_whole(segment.control()));
        assert_eq!(slot_of(&segment, b"other"), Some(1));
        assert!(slot_of(&segment, b"same").is_some());
        build_alone(&segment);
        assert!(!are_whole(segment.control()));
        (2..100).for_each(|slot| put(&segment, slot, None));
        repair(segment.control());
        build_alone(&segment);
        assert!(are_whole(segment.control()));
        assert_eq!(slot_of(&segment, b"other"), Some(1));
        assert_eq!(slot_of(&segment, b"same"), None);
    }

    /// Objects come and go in slots that the tree has reached, and in others.
    #[test]
    fn the_tree_may_grow_while_names_change() {
        const OBJECTS: u64 = 3000;
        let segment = segment(2 * OBJECTS + 16);
        let end = || segment.control().object_names_end.load(Relaxed);
        distrust(segment.control());
        let mut model: BTreeMap<u64, u64> =
            (1..=OBJECTS).map(|number| (2 * number, number)).collect();
        model.iter().for_each(|(slot, number)| put(&segment, *slot, Some(&name(*number))));
        let mut random = Rng::new(seed(31));
        for is_last in [false, false, true] {
            let step = next_step(&segment).unwrap();
            prepare_step(&segment, step.clone()).unwrap();
            // Another process was faster.
            insert_step(&segment, step.start + 1..step.end);
            assert_eq!(end(), step.start);
            insert_step(&segment, step);
            assert_eq!(are_whole(segment.control()), is_last, "{}", end());
            for number in (OBJECTS + 1..).take(200) {
                let slot = 1 + random.below(2 * OBJECTS - 1);
                let number = slot << 32 | number;
                put(&segment, slot, Some(&name(number)));
                model.insert(slot, number);
                let slot = 1 + random.below(2 * OBJECTS - 1);
                put(&segment, slot, None);
                model.remove(&slot);
            }
        }
        for (slot, number) in model {
            assert_eq!(slot_of(&segment, &name(number)), Some(slot));
        }
    }

    /// A process that dies in a step leaves objects behind its end.
    #[test]
    fn a_step_that_is_half_made_is_made_anew() {
        let segment = segment(64);
        distrust(segment.control());
        (1..20).for_each(|slot| put(&segment, slot, Some(&name(slot))));
        Place::Root.store(&segment, 0);
        for slot in 1..10 {
            assert!(insert(&segment, slot, hash_in(&segment, slot).unwrap()));
        }
        // Nothing notes these.
        (5..15).for_each(|slot| put(&segment, slot, Some(&name(slot + 100))));
        repair(segment.control());
        build_alone(&segment);
        assert!(are_whole(segment.control()));
        for slot in 1..20 {
            let number = if (5..15).contains(&slot) { slot + 100 } else { slot };
            assert_eq!(slot_of(&segment, &name(number)), Some(slot));
        }
        assert_eq!(slot_of(&segment, &name(5)), None);
    }

    #[test]
    fn what_is_half_made_is_made_anew() {
        let segment = segment(64);
        (1..20).for_each(|slot| put(&segment, slot, Some(&name(slot))));
        // As a process that dies in the middle leaves it: the links below the first object are
        // lost.
        Links(0).store(&segment, segment.control().object_names_root.load(Relaxed));
        assert!((1..20).any(|slot| slot_of(&segment, &name(slot)).is_none()));
        distrust(segment.control());
        let are_found = || (1..20).all(|slot| slot_of(&segment, &name(slot)) == Some(slot));
        assert!(are_found());
        build_alone(&segment);
        assert!(are_whole(segment.control()) && are_found());
    }
}
