//! The image: metadata as of the last change, in shared memory.
//!
//! Only [`apply`] changes it, from a log record, under the metadata mutex: transactions, recovery
//! and the repair after a dead process all use it. It is idempotent. Readers take no lock: they
//! copy, and copy again if the image's version was odd or has changed ([`image_words`]). If it
//! stays odd, the process that changes the image is stopped or dead; the record being applied is
//! whole in the log, and readers take its slots from there.

use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::Duration;

use aquifer_sys::patience::Waited;

use crate::alloc;
use crate::bitmap;
use crate::core::{Core, Locked};
use crate::error::{PoolError, Result};
use crate::format::PAGE_BYTES;
use crate::format::directory;
use crate::format::file::{FileKind, FileState, LINKS_WORD, is_directory, is_unlinked};
use crate::format::inode::{HEAD_SLOT, Inode, InodeKind, PoolHead, SLOT_BYTES, SlotBytes};
use crate::format::layout::SLOTS_PER_PAGE;
use crate::format::record::Record;
use crate::format::run::Run;
use crate::format::slot::{Slot, from_media, to_media, word};
use crate::format::slot_change::SlotChange;
use crate::freed;
use crate::image_words;
use crate::object_names;
use crate::owners::{Inconsistency, Owners};
use crate::point;
use crate::segment::{Segment, SlotSet};
use crate::slots::ReadSlots;

/// Copies a slot out; the copy is torn if a writer changes the slot during the call.
pub(crate) fn load_slot(segment: &Segment, slot: u64) -> SlotBytes {
    let mut bytes = [0; SLOT_BYTES];
    load_slot_into(segment, slot, &mut bytes);
    bytes
}

/// A word of a slot.
#[inline]
pub(crate) fn load_word(segment: &Segment, slot: u64, index: usize) -> [u8; 8] {
    segment.slot(slot).map_or([0; 8], |words| image_words::word(words, index))
}

pub(crate) fn load_slot_into(segment: &Segment, slot: u64, bytes: &mut SlotBytes) {
    match segment.slot(slot) {
        Some(words) => image_words::copy_out(words, bytes),
        None => bytes.fill(0),
    }
}

/// Loads a slot, as it is on media, into the image, which must have memory for it.
pub(crate) fn load_from_media(segment: &Segment, slot: u64, bytes: &mut SlotBytes) {
    from_media(bytes);
    let words = segment.slot(slot).expect("it was allocated");
    for (word, source) in words.iter().zip(bytes.chunks_exact(8)) {
        word.store(u64::from_ne_bytes(source.try_into().expect("eight bytes")), Relaxed);
    }
}

/// Applies a change of a slot to the image, which must have memory for it, and marks its page as
/// changed since the last checkpoint.
fn store_change(segment: &Segment, change: &SlotChange<'_>) {
    if change.words.is_whole {
        bitmap::set_shared(segment.slot_set(SlotSet::Logged), change.slot);
    }
    image_words::change(segment.slot(change.slot).expect("it was allocated"), change);
    bitmap::set_shared(segment.dirty_image_pages(), change.slot / SLOTS_PER_PAGE);
}

/// A page of the image as it is on media.
pub(crate) fn page_for_media(segment: &Segment, page: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(PAGE_BYTES as usize);
    for slot in page * SLOTS_PER_PAGE..(page + 1) * SLOTS_PER_PAGE {
        bytes.extend_from_slice(&load_slot(segment, slot));
    }
    bytes
}

/// Seals the slots of pages that go to media. Called without the metadata mutex, so that other
/// processes do not wait for the checksums.
pub(crate) fn seal_page(page: &mut [u8]) {
    for slot in page.as_chunks_mut::<SLOT_BYTES>().0 {
        to_media(slot);
    }
}

/// Notes that the tail will be here once this page is on media: the next change of each of its
/// slots must be whole.
pub(crate) fn begin_log_of(segment: &Segment, page: u64) {
    const _: () = assert!(64 % SLOTS_PER_PAGE == 0);
    let first = page * SLOTS_PER_PAGE;
    let bits = ((1 << SLOTS_PER_PAGE) - 1) << (first % 64);
    segment.slot_set(SlotSet::Logged)[(first / 64) as usize].fetch_and(!bits, Relaxed);
}

/// Whether a change of a slot can be a patch.
pub(crate) fn is_logged(segment: &Segment, slot: u64) -> bool {
    bitmap::is_set(segment.slot_set(SlotSet::Logged), slot)
}

/// Marks these pages of the image as changed. Requires the maintenance mutex, under which alone the
/// marks are cleared; the metadata mutex is not needed, and its holder may be stopped: a lost mark
/// would be a lost page.
pub(crate) fn mark_changed(core: &Core, pages: impl Iterator<Item = u64>) {
    pages.for_each(|page| bitmap::set_shared(core.segment.dirty_image_pages(), page));
}

/// Applies the metadata of a record to the image. Notes the runs that are no longer named first, so
/// that the repair after a death in between still knows them.
pub(crate) fn apply(locked: &Locked<'_>, record: &Record) {
    let (core, end_lsn) = (locked.core(), record.header.end_lsn());
    // If the version is odd already, a dead process has noted everything that is freed, and some
    // slots are stored: a comparison with the others would find only a part of it.
    if !core.control().image.is_odd() {
        freed::note_change(locked, freed::Change::of(core, record.slots()), end_lsn);
    }
    apply_noted(locked, record.slots(), end_lsn);
}

/// [`apply`] of a record that ends at `end_lsn` and makes these changes; the runs they free are
/// already noted.
pub(crate) fn apply_noted<'a>(
    locked: &Locked<'_>,
    changes: impl Iterator<Item = SlotChange<'a>>,
    end_lsn: u64,
) {
    let core = locked.core();
    let (control, segment) = (core.control(), &core.segment);
    point::pass("apply-noted");
    let is_half_made = control.image.is_odd();
    let version = control.image.begin_change();
    if is_half_made {
        object_names::distrust(control);
    }
    point::pass("apply-odd");
    let mut changes_names = false;
    for change in changes.filter(|change| change.slot < segment.allocated_slots()) {
        if change.slot == HEAD_SLOT && raises_fresh(segment, &change) {
            // Before the slot: if this process dies in between, applying the record again finds
            // nothing raised. Release: pairs with the Acquire in `use_fresh_pages`.
            control.fresh_lsn.store(end_lsn, Release);
        }
        let noted = object_names::before_change(segment, &change);
        store_change(segment, &change);
        alloc::note_slot(segment, change.slot);
        object_names::after_change(segment, change.slot, noted);
        changes_names |= is_of_names(load_word(segment, change.slot, 0));
    }
    if changes_names {
        control.image.note_names();
    }
    point::pass("apply-stored");
    // Before the version: a process that sees the change also sees the position that must be
    // durable for it to last.
    control.appends.note_applied(end_lsn);
    point::pass("apply-counted");
    control.image.end_change(version);
}

/// Whether changing a slot that begins like this may change what paths resolve to: every change of
/// names changes a directory.
fn is_of_names(first_word: [u8; 8]) -> bool {
    first_word[..4] == directory::MAGIC || is_directory(first_word)
}

/// Whether a change of the head turns fresh pages into used ones.
fn raises_fresh(segment: &Segment, change: &SlotChange<'_>) -> bool {
    let fresh_from_page = |bytes| PoolHead::decode(bytes).map(|head| head.fresh_from_page).ok();
    let before = load_slot(segment, HEAD_SLOT);
    let mut after = before;
    change.apply(&mut after);
    fresh_from_page(&before) < fresh_from_page(&after)
}

/// The metadata as of one moment.
pub struct View<'a> {
    segment: &'a Segment,
    /// The record that is being applied by a process that is stopped or dead.
    changing: Option<&'a Record>,
}

impl ReadSlots for View<'_> {
    type Error = PoolError;

    fn slot(&self, number: u64) -> Result<SlotBytes> {
        Ok(self.bytes(number))
    }

    fn load(&self, number: u64, into: &mut SlotBytes) -> Result<()> {
        self.copy(number, into);
        Ok(())
    }

    #[inline]
    fn word(&self, number: u64, index: usize) -> Result<[u8; 8]> {
        match self.changing {
            None if number < self.slots() => Ok(load_word(self.segment, number, index)),
            _ => Ok(word(&self.bytes(number), index)),
        }
    }
}

impl View<'_> {
    pub(crate) fn slots(&self) -> u64 {
        self.segment.slots()
    }

    fn bytes(&self, slot: u64) -> SlotBytes {
        let mut bytes = [0; SLOT_BYTES];
        self.copy(slot, &mut bytes);
        bytes
    }

    fn copy(&self, slot: u64, into: &mut SlotBytes) {
        if slot >= self.slots() {
            return into.fill(0);
        }
        load_slot_into(self.segment, slot, into);
        if let Some(record) = self.changing {
            // Some of its changes may be stored already; applying them again is harmless.
            record.slots().filter(|c| c.slot == slot).for_each(|change| change.apply(into));
        }
    }

    /// Inodes of files that have no links.
    pub(crate) fn orphans(&self) -> impl Iterator<Item = u64> + '_ {
        self.slots_in(SlotSet::Orphans).filter(|&slot| {
            let bytes = self.bytes(slot);
            is_unlinked(word(&bytes, 0), word(&bytes, LINKS_WORD))
        })
    }

    /// The slots of a set; while a change is being applied, possibly others too.
    fn slots_in(&self, set: SlotSet) -> impl Iterator<Item = u64> + '_ {
        let known = self.changing.is_none().then(|| self.segment.slots_in(set));
        let all = self.changing.is_some().then(|| HEAD_SLOT + 1..self.slots());
        known.into_iter().flatten().chain(all.into_iter().flatten())
    }

    /// The slot of the object with a name.
    fn object_named(&self, key: &object_names::Key<'_>) -> Option<u64> {
        let has_name = |slot: &u64| {
            let bytes = self.bytes(*slot);
            key.is_of(|index| word(&bytes, index))
        };
        match self.changing {
            None => object_names::find(self.segment, key),
            Some(_) => self.slots_in(SlotSet::Objects).find(has_name),
        }
    }

    /// Whether a slot may be in use.
    fn is_used(&self, slot: u64) -> bool {
        self.changing.is_some()
            || self.segment.slot(slot).is_some_and(|words| words[0].load(Relaxed) != 0)
    }
}

/// Examines all slots of an image that is not being changed.
pub(crate) fn owners(core: &Core) -> Owners {
    Owners::new(&core.layout, |number| Some(load_slot(&core.segment, number)), |_| {})
}

/// How long a change of the image takes at most, if the process that makes it runs.
const PATIENCE: Duration = Duration::from_millis(10);

impl Core {
    /// Runs `read` over an image that does not change during the run; may run it several times.
    /// Fails in a forked child, which is no member of the pool: no process waits for it, and it
    /// could read anything.
    #[inline]
    pub fn consistent<T>(&self, mut read: impl FnMut(&View<'_>) -> T) -> Result<T> {
        if !self.process.is_current() {
            return Err(PoolError::Forked);
        }
        // Fast path: nearly always no change is in progress.
        let at_rest = || read(&View { segment: &self.segment, changing: None });
        match self.control().image.at_rest(at_rest) {
            Some(value) => Ok(value),
            None => self.consistent_in_time(read),
        }
    }

    #[cold]
    fn consistent_in_time<T>(&self, mut read: impl FnMut(&View<'_>) -> T) -> Result<T> {
        let control = self.control();
        let mut waited = Waited::new();
        loop {
            let is_late = waited.look() > PATIENCE;
            let value = control.image.unchanged_during(|version| {
                // While an odd version stays, only slots of its record are stored to.
                let changing = match version % 2 {
                    0 => None,
                    _ if is_late => self.record_being_applied()?,
                    _ => return None,
                };
                Some(read(&View { segment: &self.segment, changing: changing.as_ref() }))
            });
            if let Some(value) = value {
                return Ok(value);
            }
            std::thread::yield_now();
            // Time out only after an attempt with the record that is being applied.
            if is_late && waited.look() > self.stall_timeout {
                return Err(PoolError::Stalled { pid: 0, what: "the metadata lock" });
            }
            if self.is_writable && is_late {
                // The holder may be dead, which taking the lock repairs; or the image changes
                // continually, but not while the lock is held.
                let _locked = self.lock()?;
                return Ok(read(&View { segment: &self.segment, changing: None }));
            }
        }
    }

    /// The state that each read of an open file checks; `None` if the image is being changed.
    #[inline]
    pub fn file_state(&self, number: u64) -> Option<FileState> {
        let state = || self.segment.slot(number).and_then(image_words::state_of_file);
        self.control().image.at_rest(state)?
    }

    /// The version that each change of the metadata raises; odd during a change.
    #[inline]
    pub fn metadata_version(&self) -> u64 {
        self.control().image.now()
    }

    /// The version that each change of names raises. If it is unchanged, paths resolve as before.
    #[inline]
    pub fn names_version(&self) -> u64 {
        self.control().image.names()
    }

    /// Whether a file has this generation and layout version, after everything that was loaded
    /// before: if they are unchanged, the pages belonged to the file.
    #[inline]
    pub fn has_layout(&self, inode: u64, generation: u64, layout_version: u64) -> Result<bool> {
        let slot = self.segment.slot(inode);
        if slot.is_some_and(|slot| image_words::has_layout(slot, generation, layout_version)) {
            Ok(true)
        } else {
            self.has_layout_in_log(inode, generation, layout_version)
        }
    }

    /// [`Core::has_layout`] if the image differs: the change to this version may be in progress by
    /// a process that is stopped, and the caller may have read the inode from the log, where it
    /// counts.
    #[cold]
    fn has_layout_in_log(&self, inode: u64, generation: u64, layout_version: u64) -> Result<bool> {
        if self.metadata_version().is_multiple_of(2) {
            return Ok(false);
        }
        self.consistent(|view| {
            let slot = view.bytes(inode);
            let state = FileState::read(|offset| {
                u64::from_le_bytes(slot[offset..offset + 8].try_into().expect("eight bytes"))
            });
            state.is_some_and(|state| {
                (state.generation, state.layout_version) == (generation, layout_version)
            })
        })
    }

    /// While the version is odd: the record that is in the log and not completely in the image, if
    /// there is one; `None` if the record cannot be read.
    fn record_being_applied(&self) -> Option<Option<Record>> {
        match self.control().appends.being_applied() {
            Some(lsn) => self.read_record(lsn).ok().map(Some),
            None => Some(None),
        }
    }

    pub(crate) fn damaged(
        &self,
        structure: impl Into<String>,
        error: crate::format::FormatError,
    ) -> PoolError {
        PoolError::Damaged {
            path: self.media.path().to_path_buf(),
            structure: structure.into(),
            error,
        }
    }

    /// Records the inconsistencies that make inodes untrustworthy. A reader also clears them in its private
    /// image, so that no access path reaches them.
    pub(crate) fn distrust(&self, inconsistencies: &[Inconsistency]) {
        if !self.is_writable {
            let slots = inconsistencies.iter().flat_map(Inconsistency::inodes);
            for slot in slots.filter_map(|number| self.segment.slot(number)) {
                slot.iter().for_each(|word| word.store(0, Relaxed));
            }
        }
        let by_inode = inconsistencies.iter().flat_map(|inconsistency| {
            inconsistency.inodes().map(|number| (number, inconsistency.clone()))
        });
        // The pool is being opened, so this is the only call.
        let _ = self.distrusted.set(by_inode.collect());
    }

    fn distrusts(&self, number: u64) -> Option<&Inconsistency> {
        self.distrusted.get()?.get(&number)
    }

    pub(crate) fn decode_inode(&self, bytes: &SlotBytes, number: u64) -> Result<Inode> {
        match self.distrusts(number) {
            Some(inconsistency) => {
                Err(self.damaged(inconsistency.structure(), inconsistency.error()))
            }
            None => match Slot::decode(bytes, number) {
                Ok(Slot::Free(inode) | Slot::Object(inode)) => Ok(inode),
                Ok(_) => Ok(Inode::free(number, 0)),
                Err(error) => Err(self.damaged(format!("inode {number}"), error)),
            },
        }
    }

    /// The object in a slot; a free inode if there is none.
    pub fn inode(&self, number: u64) -> Result<Inode> {
        if number == HEAD_SLOT || number >= self.segment.slots() {
            return Ok(Inode::free(number, 0));
        }
        let bytes = self.consistent(|image| image.bytes(number))?;
        self.decode_inode(&bytes, number)
    }

    /// Counts what the slots contain, as of one moment.
    pub fn census(&self) -> Result<Census> {
        let (used, free) = self.used_slots()?;
        let mut census = Census { free, ..Census::default() };
        for (number, bytes) in used {
            let slot = match self.distrusts(number) {
                Some(_) => None,
                None => Slot::decode(&bytes, number).ok(),
            };
            let count = match &slot {
                None => &mut census.damaged,
                Some(Slot::Free(_)) => &mut census.free,
                Some(Slot::Object(_)) => &mut census.objects,
                Some(Slot::File(inode)) => match inode.kind {
                    FileKind::File => &mut census.files,
                    FileKind::Directory => &mut census.directories,
                    _ => &mut census.links,
                },
                Some(Slot::Node(_) | Slot::Runs(_) | Slot::Bytes(_)) => &mut census.parts,
            };
            *count += 1;
            census.runs.extend(slot.iter().flat_map(Slot::runs));
        }
        Ok(census)
    }

    /// The slots that were ever used, and the number of the others.
    fn used_slots(&self) -> Result<(Vec<(u64, SlotBytes)>, u64)> {
        self.consistent(|image| {
            let is_used = |slot: &u64| image.is_used(*slot) || self.distrusts(*slot).is_some();
            let all = HEAD_SLOT + 1..image.slots();
            let unused = all.clone().filter(|slot| !is_used(slot)).count() as u64;
            (all.filter(is_used).map(|slot| (slot, image.bytes(slot))).collect(), unused)
        })
    }

    /// The pool's head.
    pub fn head(&self) -> Result<PoolHead> {
        let bytes = self.consistent(|image| image.bytes(HEAD_SLOT))?;
        PoolHead::decode(&bytes).map_err(|error| self.damaged("the pool's head", error))
    }

    /// The object with a name; `None` if there is none, or it is damaged.
    pub fn object_named(&self, name: &[u8]) -> Result<Option<Inode>> {
        let Some(key) = object_names::Key::new(name) else { return Ok(None) };
        let found = self.consistent(|image| {
            let slot = image.object_named(&key)?;
            Some((slot, image.bytes(slot)))
        })?;
        Ok(found.and_then(|(slot, bytes)| self.decode_inode(&bytes, slot).ok()))
    }

    /// All objects, as of one moment. Damaged ones are left out.
    pub fn inodes(&self) -> Result<Vec<Inode>> {
        let objects: Vec<(u64, SlotBytes)> = self.consistent(|image| {
            image.slots_in(SlotSet::Objects).map(|slot| (slot, image.bytes(slot))).collect()
        })?;
        let inodes = objects.into_iter().filter_map(|(slot, bytes)| {
            let inode = self.decode_inode(&bytes, slot).ok();
            inode.filter(|inode| inode.kind != InodeKind::Free)
        });
        Ok(inodes.collect())
    }
}

/// What the slots of a pool contain.
#[derive(Debug, Default)]
pub struct Census {
    pub free: u64,
    pub objects: u64,
    pub files: u64,
    pub directories: u64,
    pub links: u64,
    /// Slots that belong to another inode.
    pub parts: u64,
    pub damaged: u64,
    /// All used pages, in no order.
    pub runs: Vec<Run>,
}
