//! The image: metadata as of the last change, in shared memory.
//!
//! Only [`apply`](crate::metadata::apply) changes it, from a log record, under the metadata mutex: transactions, recovery
//! and the repair after a dead process all use it. It is idempotent. Readers take no lock: they
//! copy, and copy again if the image's version was odd or has changed ([`image_words`]). If it
//! stays odd, the process that changes the image is stopped or dead; the record being applied is
//! whole in the log, and readers take its slots from there.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use aquifer_sys::patience::Waited;

use crate::error::{PoolError, Result};
use crate::format::file::{FileKind, FileState, LINKS_WORD, is_unlinked};
use crate::format::inode::{HEAD_SLOT, Inode, InodeKind, PoolHead};
use crate::format::record::Record;
use crate::format::run::Run;
use crate::format::slot::Slot;
use crate::format::slot_bytes::{SLOT_BYTES, SlotBytes, word};
use crate::log::locks::Log;
use crate::metadata::object_names;
use crate::owners::Inconsistency;
use crate::shared::handle::Handle;
use crate::shared::image_words;
use crate::shared::segment::{Control, Segment, SlotSet};
use crate::slots::ReadSlots;

/// The metadata as of one moment.
pub struct View<'a> {
    segment: &'a Segment,
    /// The record that is being applied by a process that is stopped or dead.
    changing: Option<&'a Record>,
}

impl ReadSlots for View<'_> {
    type Error = PoolError;

    fn slot(&self, number: u64) -> Result<SlotBytes> {
        self.bytes(number)
    }

    fn load(&self, number: u64, into: &mut SlotBytes) -> Result<()> {
        self.copy(number, into)
    }

    #[inline]
    fn word(&self, number: u64, index: usize) -> Result<[u8; 8]> {
        match self.changing {
            None => match self.segment.slot_in_memory(number) {
                Ok(Some(slot)) => Ok(image_words::word(slot, index)),
                Ok(None) => Ok([0; 8]),
                Err(_) => Ok(word(&self.bytes(number)?, index)),
            },
            Some(_) => Ok(word(&self.bytes(number)?, index)),
        }
    }
}

impl View<'_> {
    pub(crate) fn slots(&self) -> u64 {
        self.segment.slots()
    }

    fn bytes(&self, slot: u64) -> Result<SlotBytes> {
        let mut bytes = [0; SLOT_BYTES];
        self.copy(slot, &mut bytes)?;
        Ok(bytes)
    }

    fn copy(&self, slot: u64, into: &mut SlotBytes) -> Result<()> {
        let words = match self.segment.slot_in_memory(slot) {
            Ok(words) => words,
            Err(_) => self.segment.read_slot(slot)?,
        };
        match words {
            Some(words) => image_words::copy_out(words, into),
            None => into.fill(0),
        }
        if let Some(record) = self.changing {
            // Some of its changes may be stored already; applying them again is harmless.
            record.slots().filter(|c| c.slot == slot).for_each(|change| change.apply(into));
        }
        Ok(())
    }

    /// Inodes of files that have no links.
    pub(crate) fn orphans(&self) -> impl Iterator<Item = u64> + '_ {
        self.slots_in(SlotSet::Orphans).filter(|&slot| {
            let is_orphan =
                |bytes: SlotBytes| is_unlinked(word(&bytes, 0), word(&bytes, LINKS_WORD));
            // One that cannot be read stays.
            self.bytes(slot).is_ok_and(is_orphan)
        })
    }

    /// The slots of a set; while a change is being applied, possibly others too.
    fn slots_in(&self, set: SlotSet) -> impl Iterator<Item = u64> + '_ {
        let known = self.changing.is_none().then(|| self.segment.slots_in(set));
        let all = self.changing.is_some().then(|| HEAD_SLOT + 1..self.slots());
        known.into_iter().flatten().chain(all.into_iter().flatten())
    }

    /// The slot of the object with a name, and its bytes.
    fn object_named(&self, key: &object_names::Key<'_>) -> Result<Option<(u64, SlotBytes)>> {
        if self.changing.is_none() {
            let load = |slot| self.segment.read_slot(slot);
            let found = object_names::find(self.segment, key, load)?;
            return found.map(|slot| Ok((slot, self.bytes(slot)?))).transpose();
        }
        let mut unreadable = None;
        for slot in self.slots_in(SlotSet::Objects) {
            match self.bytes(slot) {
                Ok(bytes) if key.is_of(|index| word(&bytes, index)) => {
                    return Ok(Some((slot, bytes)));
                }
                Ok(_) => {}
                Err(error) => unreadable = Some(error),
            }
        }
        unreadable.map_or(Ok(None), Err)
    }

    /// Whether a slot may be in use.
    fn is_used(&self, slot: u64) -> bool {
        self.changing.is_some()
            || match self.segment.read_slot(slot) {
                Ok(words) => words.is_some_and(|words| words[0].load(Relaxed) != 0),
                Err(_) => true,
            }
    }
}

/// How long a change of the image takes at most, if the process that makes it runs.
const PATIENCE: Duration = Duration::from_millis(10);

/// The image, as this handle reads it: as of one moment, without locks.
pub(crate) struct Image {
    pub handle: Arc<Handle>,
    /// The log has the record that a stopped process is applying, and the lock under which the
    /// image is repaired after a dead one.
    pub log: Arc<Log>,
    /// Inodes that a reader of a damaged pool ignores, with the inconsistency.
    pub distrusted: OnceLock<BTreeMap<u64, Inconsistency>>,
}

impl Image {
    fn control(&self) -> &Control {
        self.handle.control()
    }

    /// Runs `read` over an image that does not change during the run; may run it several times.
    /// Fails in a forked child, which is no member of the pool: no process waits for it, and it
    /// could read anything.
    #[inline]
    pub fn consistent<T>(&self, mut read: impl FnMut(&View<'_>) -> T) -> Result<T> {
        self.handle.members.check_process()?;
        // Fast path: nearly always no change is in progress.
        let at_rest = || read(&View { segment: &self.handle.segment, changing: None });
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
                Some(read(&View { segment: &self.handle.segment, changing: changing.as_ref() }))
            });
            if let Some(value) = value {
                return Ok(value);
            }
            std::thread::yield_now();
            // Time out only after an attempt with the record that is being applied.
            if is_late && waited.look() > self.handle.members.stall_timeout {
                return Err(PoolError::Stalled { pid: 0, what: "the metadata lock" });
            }
            if self.handle.members.is_writable && is_late {
                // The holder may be dead, which taking the lock repairs; or the image changes
                // continually, but not while the lock is held.
                let _locked = self.log.lock()?;
                return Ok(read(&View { segment: &self.handle.segment, changing: None }));
            }
        }
    }

    /// The state that each read of an open file checks; `None` if the image is being changed.
    #[inline]
    pub fn file_state(&self, number: u64) -> Option<FileState> {
        let state = || self.handle.segment.slot(number).and_then(image_words::state_of_file);
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
        let slot = || self.handle.segment.slot(inode);
        if image_words::has_layout(slot, generation, layout_version) {
            Ok(true)
        } else {
            self.has_layout_in_log(inode, generation, layout_version)
        }
    }

    /// [`Image::has_layout`] if the image differs: the change to this version may be in progress by
    /// a process that is stopped, and the caller may have read the inode from the log, where it
    /// counts.
    #[cold]
    fn has_layout_in_log(&self, inode: u64, generation: u64, layout_version: u64) -> Result<bool> {
        if self.metadata_version().is_multiple_of(2) {
            return Ok(false);
        }
        self.consistent(|view| {
            let slot = view.bytes(inode)?;
            let state = FileState::read(|offset| {
                u64::from_le_bytes(slot[offset..offset + 8].try_into().expect("eight bytes"))
            });
            Ok(state.is_some_and(|state| {
                (state.generation, state.layout_version) == (generation, layout_version)
            }))
        })?
    }

    /// While the version is odd: the record that is in the log and not completely in the image, if
    /// there is one; `None` if the record cannot be read.
    fn record_being_applied(&self) -> Option<Option<Record>> {
        match self.control().appends.being_applied() {
            Some(lsn) => self.handle.log_reader().read(lsn).ok().map(Some),
            None => Some(None),
        }
    }

    /// Records the inconsistencies that make inodes untrustworthy. A reader also clears them in its private
    /// image, so that no access path reaches them.
    pub(crate) fn distrust(&self, inconsistencies: &[Inconsistency]) {
        if !self.handle.members.is_writable {
            let slots = inconsistencies.iter().flat_map(Inconsistency::inodes);
            for slot in slots.filter_map(|number| self.handle.segment.slot(number)) {
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
                Err(self.handle.damaged(inconsistency.structure(), inconsistency.error()))
            }
            None => match Slot::decode(bytes, number) {
                Ok(Slot::Free(inode) | Slot::Object(inode)) => Ok(inode),
                Ok(_) => Ok(Inode::free(number, 0)),
                Err(error) => Err(self.handle.damaged(format!("inode {number}"), error)),
            },
        }
    }

    /// The object in a slot; a free inode if there is none.
    pub fn inode(&self, number: u64) -> Result<Inode> {
        if number == HEAD_SLOT || number >= self.handle.segment.slots() {
            return Ok(Inode::free(number, 0));
        }
        let bytes = self.consistent(|image| image.bytes(number))??;
        self.decode_inode(&bytes, number)
    }

    /// Counts what the slots contain, as of one moment.
    pub fn census(&self) -> Result<Census> {
        let (used, free) = self.used_slots()?;
        let mut census = Census { free, ..Census::default() };
        for (number, bytes) in used {
            let slot = match (self.distrusts(number), bytes) {
                (None, Some(bytes)) => Slot::decode(&bytes, number).ok(),
                _ => None,
            };
            let count = match &slot {
                None => &mut census.damaged,
                Some(Slot::Free(_)) => &mut census.free,
                Some(Slot::Object(_)) => &mut census.objects,
                Some(Slot::File(inode)) => match inode.kind {
                    FileKind::File => &mut census.files,
                    FileKind::Directory => &mut census.directories,
                    FileKind::Symlink => &mut census.links,
                    _ => &mut census.special_files,
                },
                Some(Slot::Node(_) | Slot::Runs(_) | Slot::Bytes(_)) => &mut census.parts,
            };
            *count += 1;
            census.runs.extend(slot.iter().flat_map(Slot::runs));
        }
        Ok(census)
    }

    /// The slots that were ever used, and the number of the others.
    fn used_slots(&self) -> Result<(Vec<UsedSlot>, u64)> {
        self.consistent(|image| {
            let is_used = |slot: &u64| image.is_used(*slot) || self.distrusts(*slot).is_some();
            let all = HEAD_SLOT + 1..image.slots();
            let unused = all.clone().filter(|slot| !is_used(slot)).count() as u64;
            (all.filter(is_used).map(|slot| (slot, image.bytes(slot).ok())).collect(), unused)
        })
    }

    /// The pool's head.
    pub fn head(&self) -> Result<PoolHead> {
        let bytes = self.consistent(|image| image.bytes(HEAD_SLOT))??;
        PoolHead::decode(&bytes).map_err(|error| self.handle.damaged("the pool's head", error))
    }

    /// The object with a name; `None` if there is none, or the recovery of the pool found that it is
    /// damaged. An error if an object that may have the name cannot be read.
    pub fn object_named(&self, name: &[u8]) -> Result<Option<Inode>> {
        let Some(key) = object_names::Key::new(name) else { return Ok(None) };
        if !object_names::are_whole(self.control()) {
            // Readers do not wait: without the lock, and whatever fails, they compare all names.
            let _ = object_names::build(&self.log, Log::try_lock);
        }
        let found = self.consistent(|image| image.object_named(&key))??;
        Ok(found.and_then(|(slot, bytes)| self.decode_inode(&bytes, slot).ok()))
    }

    /// Builds the index of the names of objects, with the metadata mutex, unless it is whole.
    pub fn index_names(&self) -> Result<()> {
        object_names::build(&self.log, |log| log.lock().map(Some))
    }

    /// All objects, as of one moment. Damaged ones are left out.
    pub fn inodes(&self) -> Result<Vec<Inode>> {
        let objects: Vec<(u64, SlotBytes)> = self.consistent(|image| {
            let objects = image.slots_in(SlotSet::Objects);
            objects.filter_map(|slot| Some((slot, image.bytes(slot).ok()?))).collect()
        })?;
        let inodes = objects.into_iter().filter_map(|(slot, bytes)| {
            let inode = self.decode_inode(&bytes, slot).ok();
            inode.filter(|inode| inode.kind != InodeKind::Free)
        });
        Ok(inodes.collect())
    }
}

/// The number of a slot, and its bytes unless they cannot be read.
type UsedSlot = (u64, Option<SlotBytes>);

/// What the slots of a pool contain.
#[derive(Debug, Default)]
pub struct Census {
    pub free: u64,
    pub objects: u64,
    pub files: u64,
    pub directories: u64,
    pub links: u64,
    pub special_files: u64,
    /// Slots that belong to another inode.
    pub parts: u64,
    pub damaged: u64,
    /// All used pages, in no order.
    pub runs: Vec<Run>,
}
